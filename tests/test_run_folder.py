"""The folder of a run: whatever happens while it is written, it goes on; whatever lies in it, who
reads it gets an answer or one sentence, and nothing outside it is touched."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ports import free_ports
from test_checkpoint import Held, trained
from test_train import CONFIG
from waiting import PATIENCE_SECONDS, until

from megabatch import cli
from megabatch.cluster import Cluster
from megabatch.errors import RunFailed, UserError
from megabatch.host.durable import write_whole
from megabatch.launch import run_local
from megabatch.runs import checkpoint, folder, record
from megabatch.runs.folder import RunFolder, State
from megabatch.runs.log import drop_after

ALONE = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))


# --- what happens while it is written ----------------------------------------------------------


class Killed(BaseException):
    """Nothing more is done to the disk."""


CALLS = ("open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")


class Disk:
    """The system's calls on files, the nth of which fails: with the disk full, or as if the process
    had been killed in it, half of what it was to write being written."""

    def __init__(self, monkeypatch, nth, killed):
        self.count, self.nth, self.killed = 0, nth, killed
        for name in CALLS:
            call = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, _name=name, _call=call, **k: self._do(
                _name, _call, a, k
            ))  # fmt: skip

    def _do(self, name, call, arguments, keywords):
        dead = self.killed and self.count >= self.nth > 0
        self.count += not dead
        if not dead and self.count != self.nth:
            return call(*arguments, **keywords)
        if name == "write" and not dead:
            call(arguments[0], arguments[1][: len(arguments[1]) // 2])
        if self.killed:
            raise Killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def session(path, steps, threads):
    """A run as its folder sees it: begun or gone on with, a checkpoint, a summary."""
    config = replace(CONFIG, data=replace(CONFIG.data, threads=threads), keep=1)
    net, optimizer = trained([])
    with RunFolder(path, config, ALONE) as run:
        state = run.begin(True, Held(net, optimizer))
        begun = state.seen, checkpoint.weights_sha256(net)
        net, optimizer = trained(range(state.steps, steps), net, optimizer)
        state.steps, state.seen = steps, 16 * steps
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "train", "step": steps - 1, "seen": state.seen}) + "\n")
        run.save(state, Held(net, optimizer))
        run.wait()
        run.write("summary.json", {"loss": float("nan")})
    return begun, (state.seen, checkpoint.weights_sha256(net))


@pytest.mark.parametrize("killed", [False, True], ids=["full", "killed"])
@pytest.mark.parametrize("steps", [0, 1], ids=["new", "resumed"])
def test_after_a_fault_in_any_file_operation_the_run_goes_on(killed, steps, tmp_path, monkeypatch):
    begin = tmp_path / "begin"
    good = [(0, checkpoint.weights_sha256(trained([])[0]))]
    if steps:
        good = list(session(begin, steps, 1))[1:]
    else:
        begin.mkdir()
    after = session(shutil.copytree(begin, tmp_path / "whole"), steps + 1, 2)[1]
    nth, done = 0, False
    while not done:
        nth += 1
        path = shutil.copytree(begin, tmp_path / f"{nth}")
        with monkeypatch.context() as patched:
            disk = Disk(patched, nth, killed)
            try:
                session(path, steps + 1, 2)
                done = disk.count < nth  # all of it was done
            except Killed:
                assert killed
            except (UserError, RunFailed) as error:
                assert "No space left on device" in str(error)
                assert "\n" not in str(error)
        begun, ended = session(path, steps + 1, 2)
        assert begun in (*good, after)
        assert ended == after
        left = [p.name for p in path.rglob(".*")]
        assert left == []
        shutil.rmtree(path)
    assert nth > 30


def test_metrics_cut_anywhere_are_mended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "step": step, "seen": 16 * step}) for step in range(4)]
    whole = "".join(f"{line}\n" for line in ("no record", "[]", *lines[:2])).encode()
    text = whole + "".join(f"{line}\n" for line in lines[2:]).encode()
    for length in range(len(text) + 1):
        path.write_bytes(text[:length])
        drop_after(path, 32, 2)
        kept = path.read_bytes()
        assert kept == whole[: whole.rfind(b"\n", 0, min(length, len(whole))) + 1]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def written(path):
    """What changes when a file is written, and not when it is read."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def test_the_config_is_not_touched_where_it_did_not_change(tmp_path):
    session(tmp_path, 1, 1)
    before = written(tmp_path / "config.json")
    session(tmp_path, 2, 1)
    assert written(tmp_path / "config.json") == before
    session(tmp_path, 3, 2)
    assert json.loads((tmp_path / "config.json").read_text())["data"]["threads"] == 2


def test_a_damaged_config_has_a_way_out(tmp_path):
    session(tmp_path, 1, 1)
    (tmp_path / "config.json").write_bytes(b"")
    with pytest.raises(UserError, match="remove it to go on"):
        session(tmp_path, 2, 1)
    (tmp_path / "config.json").unlink()
    assert session(tmp_path, 2, 1)[0][0] == 16


def test_a_nan_is_null_in_json(tmp_path):
    session(tmp_path, 1, 1)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None}


def test_files_have_the_permissions_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        session(tmp_path / "run", 1, 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        if path.name != "metrics.jsonl":
            assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


# --- one writer at a time ----------------------------------------------------------------------

HOLDS = """
import json, os, sys, time
from pathlib import Path
from megabatch.host.durable import lock
held = lock(Path(sys.argv[1]), lambda: json.dumps({"pid": os.getpid(), "host": "h", "since": "s"}))
print("held", flush=True)
time.sleep(1000)
"""


def test_who_writes_a_folder_is_named_and_lets_go_by_dying(tmp_path, monkeypatch):
    session(tmp_path, 1, 1)
    monkeypatch.setattr(folder, "_OTHERS_SECONDS", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            before = {path: written(path) for path in tmp_path.rglob("*")}
            says = f"written by process {other.pid} on h, since s: wait"
            with pytest.raises(UserError, match=says):
                session(tmp_path, 2, 2)
            assert {path: written(path) for path in tmp_path.rglob("*")} == before
        finally:
            other.kill()
    monkeypatch.undo()
    assert session(tmp_path, 2, 1)[0][0] == 16
    with RunFolder(tmp_path, replace(CONFIG, keep=1), ALONE) as run:
        monkeypatch.setattr(folder, "_OTHERS_SECONDS", 0.1)
        with pytest.raises(UserError, match="holds a run already"):
            run.begin(False, Held(*trained([])))
        with pytest.raises(UserError, match=f"written by process {os.getpid()} on "):
            session(tmp_path, 3, 1)


def test_a_folder_that_was_moved_during_the_run_is_not_begun_again(tmp_path):
    """Neither by a checkpoint nor by a summary; a writer of its own names the file."""
    place, held = tmp_path / "run", Held(*trained([]))

    def save(run):
        run.save(State(), held)
        run.wait()

    def log(run):
        (place / "events").open("xb").close()

    words = "cannot be written: No such file or directory; it was moved or removed; --resume goes"
    for number, write in enumerate((save, log, lambda run: run.write("summary.json", {}))):
        with (
            pytest.raises(RunFailed, match=words),
            RunFolder(place, replace(CONFIG, keep=1), ALONE) as run,
        ):
            run.begin(False, held)
            place.rename(tmp_path / f"moved-{number}")
            write(run)
        assert not place.exists()
    assert session(tmp_path / "moved-0", 1, 1)[0][0] == 0


# --- what lies in it ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A good checkpoint."""
    return checkpoint.save(tmp_path / "checkpoints", Held(*trained(range(1))), {"seen": 16}, 1)


def test_a_flipped_bit_anywhere_is_found(saved):
    drawn = random.Random(12)
    for path in saved.iterdir():
        whole = path.read_bytes()
        every = 1 if path.suffix == ".json" else 13
        for at in range(0, len(whole), every):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << drawn.randrange(8)
            path.write_bytes(damaged)
            assert checkpoint.newest(saved.parent) is None, (path.name, at)
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert checkpoint.newest(saved.parent) is None
        path.write_bytes(whole + b"\n")
        assert checkpoint.newest(saved.parent) is None
        path.write_bytes(whole)
    assert checkpoint.newest(saved.parent) == saved


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_only_plain_files_of_bounded_size_are_opened(saved, name):
    path, aside = saved / name, saved.parent.parent / "aside"
    path.rename(aside)
    for make in (
        lambda: path.symlink_to(aside),
        lambda: path.symlink_to("/dev/zero"),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
    ):
        make()
        assert checkpoint.newest(saved.parent) is None
        path.rmdir() if path.is_dir() else path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 42)  # no block of it is there
    assert checkpoint.newest(saved.parent) is None
    with path.open("wb") as file:
        file.truncate(1 << 34)  # such a one there may be, but not here: it is not read for minutes
    began = time.process_time()
    assert checkpoint.newest(saved.parent) is None
    assert time.process_time() - began < 1
    path.unlink()
    assert checkpoint.newest(saved.parent) is None
    aside.rename(path)
    assert checkpoint.newest(saved.parent) == saved


def sealed(path):
    """A manifest that agrees with what lies there: its maker wanted it so."""
    names = ("model.safetensors", "optimizer.safetensors", "extra.safetensors", "state.json")
    entries = {}
    for name in names:
        data = (path / name).read_bytes()
        (path / name).unlink()
        entries[name] = checkpoint._put(path / name, data)
    (path / "manifest.json").write_bytes(checkpoint._manifest(entries))
    return entries


def test_a_manifest_names_exactly_the_files_of_a_checkpoint(saved):
    entries = sealed(saved)
    assert checkpoint.newest(saved.parent) == saved
    for wrong in (
        {},
        [],
        {name: entry for name, entry in entries.items() if name != "state.json"},
        {**entries, "../../x": entries["state.json"]},
        {**entries, "state.json": {}},
        {**entries, "state.json": None},
    ):
        (saved / "manifest.json").write_bytes(checkpoint._manifest(wrong))
        assert checkpoint.newest(saved.parent) is None


def test_names_that_are_no_checkpoints_are_passed_over(saved):
    for name in ("seen-", "seen-abc", "seen-" + "9" * 400, "seen-00000000001x"):
        if len(name) < 250:
            (saved.parent / name).mkdir()
    (saved.parent / f"seen-{99:012d}").symlink_to(saved)
    assert checkpoint.newest(saved.parent) == saved
    links = saved.parent.parent / "links"
    links.symlink_to(saved.parent)
    assert checkpoint.newest(links) is None


# --- a folder of somebody else's ---------------------------------------------------------------


VALUES = (
    None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "", "nan", "../x", "/dev/zero",
    [], {}, [1] * 100, "x" * 5000,
)  # fmt: skip


def mutated(drawn, path):
    """Change a file: its bytes, or a value somewhere in its JSON."""
    whole = path.read_bytes()
    if path.suffix == ".json" and drawn.random() < 0.7:
        text = json.loads(whole)
        place, key = text, None
        while isinstance(place, dict | list) and place and (key is None or drawn.random() < 0.8):
            above = place
            key = drawn.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place = place[key]
        if drawn.random() < 0.2:
            del above[key]
        else:
            above[key] = drawn.choice(VALUES)
        path.write_text(json.dumps(text))
        return
    at = drawn.randrange(len(whole))
    cut = drawn.choice((0, 1, 20))
    path.write_bytes(whole[:at] + drawn.randbytes(drawn.choice((0, 1, 9))) + whole[at + cut :])


@pytest.mark.parametrize("turns", [100, pytest.param(500, marks=pytest.mark.systems)])
def test_mutated_folders_give_an_answer_or_one_sentence(
    finished, outside, tmp_path, capfd, monkeypatch, turns
):
    """Checkpoints are sealed after the change, as somebody who means it would."""
    drawn = random.Random(2026)
    monkeypatch.chdir(tmp_path)
    image = Path(__file__).parent / "pictures.py"  # no image: told as such
    files = ("state.json", "optimizer.safetensors", "extra.safetensors", "model.safetensors")
    statuses = []
    for turn in range(turns):
        path = shutil.copytree(finished, tmp_path / "run")
        name = drawn.choice((*files, "config.json", "metrics.jsonl", "environment.json"))
        found = next((path / "checkpoints").iterdir())
        inside = name in files
        for _ in range(drawn.choice((1, 1, 3))):
            try:
                mutated(drawn, (found if inside else path) / name)
            except (ValueError, UnboundLocalError, TypeError):  # it is no JSON any more
                break
        if inside:
            sealed(found)
        verb = drawn.choice(("evaluate", "report", "export", "predict", "plan", "resume"))
        commands = {
            "plan": ["plan", str(path / "config.json"), "--gpus", "4"],
            "evaluate": ["evaluate", str(path), "--device", "cpu"],
            "report": ["report", str(path), "--out", "run/r.html"],
            "export": ["export", str(path), "--out", "run/x.safetensors"],
            "predict": ["predict", str(path), str(image)],
        }
        outside.allowed, outside.found = (str(path),), []
        try:
            status = cli.main(commands[verb]) if verb in commands else resumed(path)
        finally:
            outside.allowed = None
        said = capfd.readouterr()
        assert status in (0, 1, 2), (turn, verb, name)
        assert "Traceback" not in said.err, (turn, verb, name, said.err)
        assert outside.found == [], (turn, verb, name)
        assert len(list(tmp_path.iterdir())) == 1
        statuses.append(status)
        shutil.rmtree(path)
    assert min(statuses.count(0), statuses.count(2)) > turns / 6


def resumed(path):
    """The first moments of a run that goes on, with the settings it was begun with."""
    import megabatch as mb

    config = replace(mb.recipes.named("digits", epochs=2), keep=1, ema=0.9)
    try:
        mb.train(config, cluster=ALONE, out=path, resume=True, quiet=True)
    except UserError as error:
        assert "\n" not in str(error)
        return 2
    return 0


def test_weights_that_claim_a_billion_classes_build_no_net(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    found = next((path / "checkpoints").iterdir())
    from safetensors.torch import load_file, save

    weights = load_file(found / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.shape[:1] == (10,) and tensor.ndim == 2:
            weights[name] = torch.empty(1 << 40, 0)
        elif tensor.shape == (10,):
            weights[name] = torch.zeros(1 << 20)
    (found / "model.safetensors").write_bytes(save(weights))
    sealed(found)
    assert cli.main(["predict", str(path), str(__file__)]) == 2


def test_a_name_cannot_leave_the_folder_of_runs():
    assert cli.main(["train", "digits", "--name", "../x"]) == 2


def test_a_state_that_no_run_has_is_refused():
    good = {"seen": 16, "steps": 1, "noise": {}}
    assert State.of(good, 1).seen == 16
    for wrong in ({"seen": "16"}, {"seen": -1}, {"noise": {"trace": "x"}}, {"pending": [[{}, []]]}):
        with pytest.raises((ValueError, TypeError)):
            State.of({**good, **wrong}, 1)


def test_a_folders_links_are_not_followed(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    secret = tmp_path / "secret.json"
    secret.write_text('{"secret": 1}')
    (path / "environment.json").unlink()
    (path / "environment.json").symlink_to(secret)
    assert record.read(path).environment == {}


# --- processes ---------------------------------------------------------------------------------


def start(place, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "TMPDIR": str(place)}, text=True, **options,
    )  # fmt: skip


def hears_sigterm(process):
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_while_a_run_starts_ends_it_with_a_checkpoint(workers, tmp_path, short_tmp):
    out = tmp_path / "run"
    command = ("-m", "megabatch.cli", "train", "digits", "--workers", f"{workers}", "--device")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(short_tmp, *command, "cpu", "--out", str(out), **pipes) as run:
        until(
            # The folder is made before the first worker is.
            (lambda: hears_sigterm(run)) if workers == 1 else (lambda: any(short_tmp.iterdir())),
            "the run hears signals",
            run,
        )
        run.terminate()
        result, progress = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 3, progress
    assert "stopped on request" in result
    assert checkpoint.newest(out / "checkpoints") is not None
    assert [p.name for p in short_tmp.iterdir() if p.name.startswith(("megabatch", "pymp"))] == []


SCRATCH = """
import multiprocessing.util, sys
from megabatch.host.scratch import scratch
print(scratch(), multiprocessing.util.get_temp_dir(), flush=True)
sys.stdin.read()
"""


def test_temporary_folders_of_killed_processes_are_removed_by_the_next(short_tmp):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start(short_tmp, "-c", SCRATCH, **pipes) as killed:
        left, inside = map(Path, killed.stdout.readline().split())
        killed.kill()
    assert inside == left and left.is_dir()
    with start(short_tmp, "-c", SCRATCH, **pipes) as living:
        lives = Path(living.stdout.readline().split()[0])
        assert left.is_dir()  # it is too young
        for path in (left, lives):
            os.utime(path, (0, 0))
        (short_tmp / "megabatch-of-others").mkdir()
        os.utime(short_tmp / "megabatch-of-others", (0, 0))
        with start(short_tmp, "-c", SCRATCH, **pipes) as third:
            third.stdout.readline()
            assert not left.exists()
            assert lives.is_dir()
            third.stdin.close()
        living.stdin.close()
    assert [path.name for path in short_tmp.iterdir()] == ["megabatch-of-others"]


def test_local_workers_listen_on_loopback_only():
    found = run_local(2, listening)
    assert found  # gloo does
    assert set(found) <= {"0100007F", "00000000000000000000000001000000"}


def test_a_store_at_a_loopback_address_listens_there_alone():
    (port,) = free_ports(1)
    assert "00000000000000000000000000000000" not in run_local(2, listening_at, port)
    assert run_local(2, listening_at, port).count("0100007F") == 2  # the store's and gloo's


def listening_at(port):
    del os.environ["MEGABATCH_STORE"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    return listening()


def listening():
    """Addresses that this worker's process listens on, as the kernel writes them."""
    cluster = Cluster.from_env(device="cpu")
    cluster.barrier()
    names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    inodes = {name[8:-1] for name in names if name.startswith("socket:[")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    found = [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    cluster.barrier()
    cluster.leave()
    return found


FULL = """
set -e
mount -t tmpfs -o size=900k none "$2"
status=0
"$1" -m megabatch.cli train digits --workers 2 --device cpu --epochs 6 --save-every 0.2 \
    --deterministic --keep 1 --out "$2/run" || status=$?
echo "first $status"
mount -o remount,size=100m none "$2"
"$1" -m megabatch.cli train digits --workers 2 --device cpu --epochs 6 --save-every 0.2 \
    --deterministic --keep 1 --out "$2/run" --resume
"""


@pytest.mark.systems
def test_a_run_whose_disk_fills_ends_in_words_and_goes_on(tmp_path):
    ran = subprocess.run(
        ["unshare", "-rm", "bash", "-c", FULL, "full", sys.executable, str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "first 1" in ran.stdout
    assert "cannot be written: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_what_is_written_whole_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "other").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "other").read_text() == "mine"
    assert (tmp_path / "link").read_text() == "new"
