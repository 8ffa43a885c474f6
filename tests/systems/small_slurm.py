"""A real Slurm of this machine for tests: its own munged, controller and two nodes, all in one
folder and on 127.0.0.1, ended by their process ids."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ports import free_ports

NODES = ("n1", "n2")
CPUS = 4  # a node's, as told: the machine may have fewer
START_SECONDS = 240

# No cgroups, no accounting, nobody but root: what a container allows. A node is a name and a port.
SETTINGS = """
ClusterName=small
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def small_slurm(folder: Path):
    """The environment in which srun, sbatch and scancel speak to it."""
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    settings = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    ports = free_ports(1 + len(NODES))
    settings.write_text(SETTINGS.format(host=host, folder=folder, ports=ports, cpus=CPUS))
    munge = {name: f"{folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
    environ = os.environ | {"SLURM_CONF": str(settings)}
    with ExitStack() as ending:

        def start(name, *command):
            ending.enter_context(daemon(folder / f"{name}.out", environ, *command))

        # munged is strict about who may write to the folders of its files; a temporary one is not
        # always to its taste, and here nothing is secret.
        start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={munge['socket']}", f"--pid-file={munge['pid']}"),
            *(f"--log-file={munge['log']}", f"--seed-file={munge['seed']}"),
        )
        start("slurmctld", "slurmctld", "-D", "-f", settings)
        for node in NODES:
            start(f"slurmd-{node}", "slurmd", "-D", "-N", node, "-f", settings)
        await_nodes(folder, environ)
        yield environ
        subprocess.run(["scancel", "--full", "--user=root"], env=environ, check=False)


@contextmanager
def daemon(log: Path, environ, command, *arguments):
    path = shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin")
    assert path, f"{command} is missing: scripts/install-systems.sh installs it"
    with log.open("w") as out:
        process = subprocess.Popen([path, *arguments], stdout=out, stderr=out, env=environ)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_nodes(folder: Path, environ):
    deadline = time.monotonic() + START_SECONDS
    question = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    while time.monotonic() < deadline:
        answer = subprocess.run(question, env=environ, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == f"{len(NODES)}":
            return
        time.sleep(0.2)
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.out"))
    raise AssertionError(f"Slurm did not start in {START_SECONDS} s: {answer.stderr}\n{logs}")
