"""megabatch launch --slurm|--hosts ... train|study RECIPE ...: the script that starts a run or a
study on a cluster.

It only writes: a shell script that can be read, edited and submitted, with the run's line checked.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megabatch import recipes
from megabatch.config import Data
from megabatch.data.paths import check_fitting
from megabatch.errors import DONE, UserError
from megabatch.verbs import study, train
from megabatch.verbs.examples import EXAMPLES
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import check_out, say, write_out

STARTED = ("train", "study")
"""the verbs that a script may start"""
_MOST = 100_000
_GRACE_SECONDS = 120
"""before the time is up, to save in"""


@dataclass(frozen=True)
class LaunchFlags:
    """The rest of the line, from `train` or `study` on, is checked, not started."""

    slurm: bool = False
    """a batch script for Slurm; goes on after its time is up or a node is lost"""
    hosts: Annotated[str, tyro.conf.arg(metavar="HOST,HOST,...")] = ""
    """a shell script that starts torchrun on these hosts over ssh"""
    nodes: int = 1
    """how many, Slurm's"""
    workers: int = 8
    """on each node or host: one a GPU"""
    cpu: bool = False
    """workers without GPUs"""
    time: Annotated[str, tyro.conf.arg(metavar="H:MM:SS")] = "24:00:00"
    """Slurm's limit of one go; a run that takes longer is queued again"""
    partition: str = ""
    """Slurm's"""
    account: str = ""
    """Slurm's"""
    port: int = 29500
    """where the first host listens for the others, over ssh"""
    script: Annotated[str, tyro.conf.arg(metavar="FILE.sh")] = ""
    """the file to write (none: standard output)"""


def run(arguments: list[str]) -> int:
    at = next((at for at, word in enumerate(arguments) if word in STARTED), len(arguments))
    ours = [word for word in arguments[:at] if word != "--"]
    if other := next((word for word in ours if word in EXAMPLES), None):
        raise UserError(f"launch starts train or study, not {other}: type that one by itself")
    if at == len(arguments) and (recipe := next((w for w in ours if w in recipes.RECIPES), None)):
        raise UserError(f"launch wants the run's whole line: megabatch launch ... train {recipe}")
    flags = parse(LaunchFlags, "launch", ours, usage="train|study RECIPE ...")
    _check(flags, arguments[at:])
    line, name = _line(arguments[at:], flags.cpu)
    script = _for_slurm(flags, line, name) if flags.slurm else _over_ssh(flags, line)
    if not flags.script:
        print(script, end="")
        return DONE
    out = Path(flags.script)
    check_out(out, (".sh", ".sbatch"), "a script")
    write_out(out, script.encode())
    out.chmod(out.stat().st_mode | 0o111)
    start = f"sbatch {out}" if flags.slurm else f"sh {out}"
    say(f"{out}: read it, then {start}")
    return DONE


def _line(words: list[str], cpu: bool) -> tuple[list[str], str]:
    """The verb and its words, with a folder to go on in; the job's name."""
    verb, subject = (*words, "", "")[:2]
    if not subject or subject.startswith("-"):
        raise UserError("launch needs the run's line at its end: megabatch launch ... train RECIPE")
    flags: study.SweepFlags | train.Launch
    if verb == "study":
        plan, flags = study.read_flags(subject, words[2:])
        config = next(iter(plan.configs.values()))
        out, resume = f"runs/study-{config.name}", []  # it goes on by itself
    else:
        config, launch = train.read_flags(subject, words[2:])
        flags = launch
        out, resume = f"runs/{config.name}", [] if launch.resume else ["--resume"]
    if flags.workers is not None:
        raise UserError(f"launch --workers N comes before {verb}: the launcher starts the workers")
    _check_images(config.data)
    if flags.out is None:
        words = [*words, "--out", out]
    if cpu and flags.device == "auto":
        words = [*words, "--device", "cpu"]
    return [*words, *resume], Path(out).name


def _check_images(data: Data) -> None:
    """Images named from this folder must be in it, since the workers begin here; what has a whole
    path may lie on the nodes alone."""
    check_fitting(data)
    if data.path and not Path(data.path).exists():
        if not Path(data.path).is_absolute():
            raise UserError(
                f"there is no {data.path} here, where the workers will look for it: make it with "
                f"megabatch pack, or give its whole path"
            )
        say(f"megabatch: {data.path} is not here: the nodes must have it", progress=True)


def _check(flags: LaunchFlags, line: list[str]) -> None:
    late = next((word for word in line if word.split("=")[0] in ("--slurm", "--hosts")), None)
    if late is not None:
        raise UserError(f"launch's own flags, as {late}, come before {line[0]}")
    if flags.slurm == bool(flags.hosts):
        raise UserError("launch needs one of --slurm and --hosts HOST,HOST,...")
    for name, value, most in (
        ("nodes", flags.nodes, _MOST),
        ("workers", flags.workers, 1024),
        ("port", flags.port, 65535),
    ):
        if not 1 <= value <= most:
            raise UserError(f"--{name} is {value}; give 1 to {most}")
    if re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", flags.time) is None:
        raise UserError(f"--time is {flags.time!r}; give H:MM:SS, or D-H:MM:SS")
    for name, word in (("partition", flags.partition), ("account", flags.account)):
        if re.fullmatch(r"[\w.,@+-]*", word) is None:
            raise UserError(f"--{name} is {word!r}; that is no name of Slurm's")
    hosts = _hosts(flags)
    for host in hosts:
        if re.fullmatch(r"\w[\w.@:-]*", host) is None:
            raise UserError(f"--hosts has {host!r}, which is no host: give names parted by commas")
    twice = next((host for host in hosts if hosts.count(host) > 1), None)
    if twice is not None:
        raise UserError(f"--hosts has {twice} twice: --workers says how many a host has")
    if hosts and flags.nodes != 1:
        raise UserError("--nodes is for --slurm: with --hosts the hosts are counted")


def _hosts(flags: LaunchFlags) -> list[str]:
    return flags.hosts.split(",") if flags.hosts else []


def _for_slurm(flags: LaunchFlags, line: list[str], name: str) -> str:
    asked = [
        f"--job-name={name.replace(' ', '-')}",
        f"--nodes={flags.nodes}",
        f"--ntasks-per-node={flags.workers}",
        *([] if flags.cpu else [f"--gpus-per-node={flags.workers}"]),
        *([f"--partition={flags.partition}"] if flags.partition else []),
        *([f"--account={flags.account}"] if flags.account else []),
        f"--time={flags.time}",
        "--output=%x-%j.log",
        "--open-mode=append",
    ]
    wanted = "\n".join(f"#SBATCH {one}" for one in asked)
    return f"""#!/bin/sh
# One worker a task. Submit it with sbatch, edit it as you like.
{wanted}
# A lost or preempted node: the job is queued again, and the run goes on from its last checkpoint.
#SBATCH --requeue
# Before the time is up the workers are asked to stop; they save, and end with status 3.
#SBATCH --signal=TERM@{_GRACE_SECONDS}

# Where the workers meet: the first node. Its port follows from the job's number.
MASTER_ADDR=${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}
export MASTER_ADDR

# --wait: if one worker fails the others are ended a minute later, not never.
srun --kill-on-bad-exit=0 --wait=60 \\
    {_shell(_megabatch(line), 4)}
status=$?

# Stopped with a checkpoint: go on in the next slot. (scancel ends the job for good.)
if [ "$status" -eq 3 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _over_ssh(flags: LaunchFlags, line: list[str]) -> str:
    hosts, here = _hosts(flags), shlex.quote(os.getcwd())
    first = hosts[0].rpartition("@")[2]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nnodes", str(len(hosts)), "--nproc-per-node", str(flags.workers)]
    torchrun += ["--master-addr", first, "--master-port", str(flags.port)]
    work = ["-m", "megabatch.cli", *line]
    starts = "\n".join(f"start {rank} {host}" for rank, host in enumerate(hosts))
    return f"""#!/bin/sh
# torchrun on {len(hosts)} hosts over ssh, {flags.workers} workers each: run it with sh, edit it.
# Every host needs this folder, this Python and the images at the same paths (a shared disk).
ssh=${{SSH:-ssh}}
# Set for the workers, NCCL_SOCKET_IFNAME=eth0 say, where hosts have several networks.
variables=${{VARIABLES:-OMP_NUM_THREADS=1}}
cd {here} || exit 1
there={shlex.quote(here)} # as the hosts' shells read it
note=.launch-$(hostname)-$$

command=$(
    cat <<'END'
exec {_shell(torchrun, 4)} \\
    --node-rank "$NODE_RANK" \\
    {_shell(work, 4)}
END
)

start() {{ # NUMBER HOST: notes the number of torchrun's process there, to stop it by
    $ssh -n "$2" "cd $there && echo \\$\\$ >$note-$1 && export NODE_RANK=$1 $variables
$command" &
    pids="$pids $!"
}}

stop() {{ # every host's workers save and end, within 30 s
    trap '' INT TERM
    for at in $started; do
        $ssh -n "${{at#*:}}" "cd $there && kill -TERM \\$(cat $note-${{at%%:*}})"
    done
}}

started="{" ".join(f"{rank}:{host}" for rank, host in enumerate(hosts))}"
pids=
trap stop INT TERM
{starts}

status=0
for pid in $pids; do
    wait "$pid"
    code=$?
    # A signal ends the waiting, not the work.
    while [ "$code" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do
        wait "$pid"
        code=$?
    done
    [ "$code" -eq 0 ] || status=$code
done
rm -f "$note"-*
exit "$status"
"""


def _megabatch(line: list[str]) -> list[str]:
    return [sys.executable, "-m", "megabatch.cli", *line]


def _shell(words: list[str], indent: int) -> str:
    """Words as a shell reads them, a flag and its values a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return f" \\\n{' ' * indent}".join(" ".join(line) for line in lines)
