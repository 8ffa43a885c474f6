"""The same line under every launcher, for real: Open MPI, MPICH and a Slurm of this machine.

Each run must end with the weights of the run on one worker. Needs root, and what
scripts/install-systems.sh installs; all traffic stays on the loopback interface.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_slurm import free_ports, small_slurm

pytestmark = [pytest.mark.systems, pytest.mark.timeout(600)]

MEGABATCH = str(Path(sys.executable).parent / "megabatch")
TRAIN = [MEGABATCH, "train", "digits", "--deterministic", "--device", "cpu", "--json"]
SHORT = [*TRAIN, "--epochs", "1"]
LONG = [*TRAIN, "--epochs", "12"]
"""Long enough to be stopped half-way, short enough to be run to its end as well."""
WAIT_SECONDS = 300
NOWHERE = "but nothing says where they meet: set MASTER_ADDR"

LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMP_NUM_THREADS": "1",
}
# Open MPI wants to be told that root is meant, and that workers may outnumber cores; it looks for
# ssh even where it has no other host to reach.
ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_plm_rsh_agent": "",
}
MPI = ["mpirun.openmpi", "mpiexec.hydra"]


@pytest.fixture(scope="module")
def environ():
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MEGABATCH_", "SLURM_", "OMPI_", "PMI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return kept | LOOPBACK | ROOT


@pytest.fixture(scope="module")
def slurm(environ, tmp_path_factory):
    # Where one worker fails the others would wait for it, and hold the nodes.
    ours = {"MASTER_ADDR": "127.0.0.1", "SLURM_KILL_BAD_EXIT": "1"}
    with small_slurm(tmp_path_factory.mktemp("slurm") / "small") as settings:
        yield environ | ours | {"SLURM_CONF": settings["SLURM_CONF"]}


@pytest.fixture(scope="module")
def alone(environ, tmp_path_factory):
    """The weights of a run on one worker, by its line."""
    known = {}

    def weights(line):
        if tuple(line) not in known:
            out = tmp_path_factory.mktemp("alone") / "run"
            done = run([*line, "--workers", "1", "--out", out], environ)
            known[tuple(line)] = summary(done)["weights_sha256"]
        return known[tuple(line)]

    return weights


def run(line, environ, **options):
    assert shutil.which(line[0]), f"{line[0]} is missing: scripts/install-systems.sh installs it"
    return subprocess.run(
        [str(word) for word in line],
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        **options,
    )


def summary(done):
    assert done.returncode == 0, done.stderr
    return result_in(done.stdout)


def result_in(output):
    """What a run said on standard output, over all workers: its JSON, once, at the end."""
    lines = output.splitlines()
    assert [line.startswith("{") for line in lines].count(True) == 1, output
    return json.loads(lines[-1])


# ---------------------------------------------------------------- MPI


@pytest.mark.parametrize("meet", ["at an address", "through a file"])
@pytest.mark.parametrize("mpi", MPI)
def test_mpi(mpi, meet, environ, alone, tmp_path):
    if meet == "at an address":
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_ports(1)[0]}"}
    else:
        where = {"MEGABATCH_STORE": str(tmp_path / "store")}
    found = summary(run([mpi, "-n", 3, *SHORT, "--out", tmp_path / "run"], environ | where))
    assert found["world"] == 3
    assert found["weights_sha256"] == alone(SHORT)
    assert not (tmp_path / "store").exists()  # the next run may use the name again


@pytest.mark.parametrize("mpi", MPI)
def test_mpi_with_nowhere_to_meet(mpi, environ):
    """MPI ends the others as soon as one has failed, so only one is sure to speak."""
    done = run([mpi, "-n", 2, *SHORT], environ)
    assert done.returncode == 2
    assert NOWHERE in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- Slurm


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun(nodes, slurm, alone, tmp_path):
    line = ["srun", "--nodes", nodes, "--ntasks", 4, *SHORT, "--out", tmp_path / "run"]
    found = summary(run(line, slurm))
    assert found["world"] == 4
    assert found["weights_sha256"] == alone(SHORT)


def test_srun_through_a_file(slurm, alone, tmp_path):
    where = {name: value for name, value in slurm.items() if name != "MASTER_ADDR"}
    where["MEGABATCH_STORE"] = str(tmp_path / "store")
    found = summary(run(["srun", "--ntasks", 2, *SHORT, "--out", tmp_path / "run"], where))
    assert (found["world"], found["weights_sha256"]) == (2, alone(SHORT))


def test_srun_with_nowhere_to_meet_ends_every_worker_with_one_sentence(slurm):
    where = {name: value for name, value in slurm.items() if name != "MASTER_ADDR"}
    each = '"$0" "$@"; echo "worker $SLURM_PROCID: $?"'
    done = run(["srun", "--ntasks", 4, "sh", "-c", each, *SHORT], where)
    assert sorted(done.stdout.splitlines()) == [f"worker {rank}: 2" for rank in range(4)]
    said = sorted(line for line in done.stderr.splitlines() if line.startswith("megabatch: "))
    assert [line.partition(" but ")[0] for line in said] == [
        f"megabatch: this is worker {rank} of 4" for rank in range(4)
    ]
    assert all(NOWHERE in line for line in said)
    assert "Traceback" not in done.stderr
    patient = "--kill-on-bad-exit=0"  # else the slower one may be ended before it has its say
    assert run(["srun", patient, "--ntasks", 2, *SHORT], where).returncode == 2


def batch(line, folder, tasks, nodes=1):
    """The line that submits a batch script with this body and waits for its end."""
    script = folder / "batch.sh"
    script.write_text("#!/bin/sh\n" + " ".join(str(word) for word in line) + "\n")
    files = [f"--output={folder}/out", f"--error={folder}/err"]
    return ["sbatch", "--wait", "--parsable", *files, f"-n{tasks}", f"-N{nodes}", str(script)]


def summary_of_batch(done, folder):
    assert done.returncode == 0, (folder / "err").read_text()
    return result_in((folder / "out").read_text())


@pytest.mark.parametrize("launch", [["srun"], *([mpi, "-n", "4"] for mpi in MPI)], ids=" ".join)
def test_sbatch(launch, slurm, alone, tmp_path):
    """mpirun and mpiexec start one daemon a node by srun: its variables must not count."""
    line = [*launch, *SHORT, "--out", tmp_path / "run"]
    found = summary_of_batch(run(batch(line, tmp_path, tasks=4, nodes=2), slurm), tmp_path)
    assert (found["world"], found["weights_sha256"]) == (4, alone(SHORT))


def test_in_a_batch_script_without_srun_megabatch_starts_its_own_workers(slurm, alone, tmp_path):
    line = [*SHORT, "--workers", 2, "--out", tmp_path / "run"]
    found = summary_of_batch(run(batch(line, tmp_path, tasks=2), slurm), tmp_path)
    assert (found["world"], found["weights_sha256"]) == (2, alone(SHORT))


def test_in_an_interactive_shell_megabatch_starts_its_own_workers(slurm, alone, tmp_path):
    """srun --pty bash: the shell is a step of one task."""
    line = [*SHORT, "--workers", 2, "--out", tmp_path / "run"]
    typed = shlex.join(["bash", "-c", f"{shlex.join(map(str, line))} > {tmp_path}/said"])
    shell = ["script", "--quiet", "--return", "--command", f"srun --pty {typed}", "/dev/null"]
    done = run(shell, slurm)
    assert done.returncode == 0, done.stdout
    found = result_in((tmp_path / "said").read_text())
    assert (found["world"], found["weights_sha256"]) == (2, alone(SHORT))


# ---------------------------------------------------------------- written by megabatch launch


def written(line, words, folder, environ):
    """A script as `megabatch launch` writes it."""
    script = folder / "job.sh"
    done = run([MEGABATCH, "launch", *words, "--script", script, *line[1:]], environ)
    assert done.returncode == 0, done.stderr
    return script


def test_the_batch_script_that_launch_writes(slurm, alone, tmp_path):
    words = ["--slurm", "--nodes", 2, "--workers", 2, "--cpu"]
    script = written([*SHORT, "--out", str(tmp_path / "run")], words, tmp_path, slurm)
    done = run(["sbatch", "--wait", f"--output={tmp_path}/log", script], slurm)
    assert done.returncode == 0, (tmp_path / "log").read_text()
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (found["world"], found["weights_sha256"]) == (4, alone(SHORT))


def test_a_job_whose_time_is_up_is_queued_again_and_goes_on(slurm, alone, tmp_path):
    """Asked to stop as Slurm asks it, the job saves and submits itself again; the second go ends as
    a run that was never stopped."""
    words = ["--slurm", "--workers", 2, "--cpu"]
    out = tmp_path / "run"
    script = written([*LONG, "--out", str(out)], words, tmp_path, slurm)
    line = ["sbatch", "--parsable", f"--output={tmp_path}/log", script]
    job = run(line, slurm).stdout.strip()
    await_first_step(out)
    run(["scancel", "--signal=TERM", job], slurm)
    await_that(lambda: "PENDING" in state_of(job, slurm), lambda: state_of(job, slurm))
    assert json.loads((out / "summary.json").read_text())["ended"] == "stopped"
    # Slurm lets it wait for two minutes. Not now: the credentials of a job that begins in the
    # second in which its last go was ended count as revoked with the old ones.
    run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"], slurm)
    await_that(lambda: finished(out), lambda: state_of(job, slurm) + (tmp_path / "log").read_text())
    assert "resumed at step" in (tmp_path / "log").read_text()
    assert json.loads((out / "summary.json").read_text())["weights_sha256"] == alone(LONG)


STUDY = [MEGABATCH, "study", "digits", "--batches", "32,64", "--epochs", "4", "--deterministic"]
"""of two runs, each long enough to be stopped in"""


def test_a_study_whose_time_is_up_is_queued_again_and_ends_as_one_that_was_not(slurm, tmp_path):
    words = ["--slurm", "--nodes", 2, "--workers", 1, "--cpu"]
    out = tmp_path / "study"
    script = written([*STUDY, "--out", str(out)], words, tmp_path, slurm)
    job = run(["sbatch", "--parsable", f"--output={tmp_path}/log", script], slurm).stdout.strip()
    evidence = lambda: state_of(job, slurm) + (tmp_path / "log").read_text()  # noqa: E731
    await_that(lambda: [*out.glob("*/metrics.jsonl")], evidence)
    run(["scancel", "--signal=TERM", job], slurm)
    await_that(lambda: "PENDING" in state_of(job, slurm), evidence)
    assert len(weights_of(out)) < 2
    run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"], slurm)
    await_that(lambda: "COMPLETED" in state_of(job, slurm), evidence)
    straight = [*STUDY, "--workers", "1", "--device", "cpu", "--out", tmp_path / "straight"]
    assert run(straight, slurm).returncode == 0
    assert len(weights_of(out)) == 2
    assert weights_of(out) == weights_of(tmp_path / "straight")


def weights_of(study):
    """Of its finished runs, by name."""
    found = {
        path.parent.name: json.loads(path.read_text()) for path in study.glob("*/summary.json")
    }
    return {n: one["weights_sha256"] for n, one in found.items() if one["ended"] == "finished"}


def state_of(job, environ):
    return run(["scontrol", "show", "job", job], environ).stdout


def finished(out):
    return json.loads((out / "summary.json").read_text())["ended"] == "finished"


def await_that(holds, evidence):
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, evidence()
        time.sleep(0.2)


# ---------------------------------------------------------------- stopped on request


@pytest.mark.parametrize("how", ["scancel --signal=TERM", "scancel", "Ctrl-C"])
def test_a_run_that_is_told_to_stop_leaves_a_checkpoint(how, slurm, environ, alone, tmp_path):
    out = tmp_path / "run"
    # Status 3 is bad enough for srun to kill those who are a little later, and to say 143.
    patient = ["--disable-status", "--kill-on-bad-exit=0"]
    work = ["srun", "--ntasks=4", *patient, *LONG, "--out", str(out)]
    line = work if how == "Ctrl-C" else batch(work, tmp_path, tasks=4)
    with subprocess.Popen(line, env=slurm, stdout=subprocess.PIPE, text=True) as launched:
        if how == "Ctrl-C":
            await_first_step(out)
            launched.send_signal(signal.SIGINT)
        else:
            job = launched.stdout.readline().strip()
            await_first_step(out)
            run([*how.split(), job], slurm)
        launched.communicate(timeout=WAIT_SECONDS)
    # A job that was cancelled as a whole has no exit status of its own.
    assert launched.returncode == (1 if how == "scancel" else 3)
    assert json.loads((out / "summary.json").read_text())["ended"] == "stopped"
    # It ends on one worker as if it had never been stopped.
    done = run([*LONG, "--workers", 1, "--out", out, "--resume"], environ)
    assert "resumed at step" in done.stderr
    assert summary(done)["weights_sha256"] == alone(LONG)


# Hydra, itself being ended, now and then does not wait for its workers' status.
@pytest.mark.parametrize(("mpi", "status"), [("mpirun.openmpi", {1}), ("mpiexec.hydra", {3, 0})])
def test_mpi_that_is_told_to_stop_leaves_a_checkpoint(mpi, status, environ, tmp_path):
    out = tmp_path / "run"
    # Open MPI waits so many seconds before SIGTERM and again after it; its status is its own.
    where = {"MEGABATCH_STORE": str(tmp_path / "store"), "OMPI_MCA_odls_base_sigkill_timeout": "10"}
    # Each worker's own status is written down by a shell that outlives it.
    noted = ["sh", "-c", 'trap : TERM; "$@"; s=$?; echo $s > "$0.$$"; exit $s', tmp_path / "status"]
    line = [mpi, "-n", "2", *noted, *TRAIN, "--epochs", "1000", "--out", str(out)]
    with subprocess.Popen(line, env=environ | where, stdout=subprocess.DEVNULL) as launched:
        await_first_step(out)
        launched.terminate()
        assert launched.wait(timeout=WAIT_SECONDS) in status
    assert [path.read_text() for path in tmp_path.glob("status.*")] == ["3\n", "3\n"]
    assert json.loads((out / "summary.json").read_text())["ended"] == "stopped"
    assert list((out / "checkpoints").iterdir())


def await_first_step(folder):
    deadline = time.monotonic() + WAIT_SECONDS
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or not metrics.stat().st_size:
        assert time.monotonic() < deadline, f"{folder} did not start"
        time.sleep(0.1)
