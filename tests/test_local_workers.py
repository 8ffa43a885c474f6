"""Workers of this machine: started at once, heard, and ended with one clear word whatever happens
to one of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from started import note_pid
from waiting import PATIENCE_SECONDS, gone, running, state, until

from megabatch.cluster import Cluster
from megabatch.elastic.processes import children
from megabatch.errors import UserError, WorkerFailed
from megabatch.host.granted import Granted
from megabatch.host.stopping import SIGNALS
from megabatch.launch import run_local
from megabatch.verbs import workers


def test_the_result_is_the_first_workers_and_all_of_them_ran(tmp_path):
    found = run_local(3, note_and_sum, tmp_path)
    assert found == (0, 3, [0, 1, 2], (1, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def note_and_sum(folder):
    cluster = Cluster.from_env(device="cpu")
    note_pid(folder)
    ranks = [torch.empty(1, dtype=torch.int64) for _ in range(cluster.world)]
    dist.all_gather(ranks, torch.tensor([cluster.rank]))
    cluster.leave()
    return cluster.rank, cluster.world, [int(rank) for rank in ranks], cluster.grid


def test_no_more_workers_than_the_memory_holds_are_started(monkeypatch):
    """Each would start, and all together take the machine down."""
    monkeypatch.setattr(workers, "memory", lambda: Granted(2**30, 2**32))
    for few in (1, 16):
        workers.check_workers(few)
    with pytest.raises(UserError, match=r"^--workers is 17, .* 1\.0 GiB .*: give 16 at most$"):
        workers.check_workers(17)
    monkeypatch.setattr(workers, "memory", lambda: Granted(0, 2**32))
    workers.check_workers(1)
    with pytest.raises(UserError, match=r"give 1 at most$"):
        workers.check_workers(2)
    monkeypatch.setattr(workers, "memory", lambda: None)
    workers.check_workers(1024)


def test_workers_begin_in_the_callers_folder(tmp_path, monkeypatch):
    run_local(1, os.getcwd)  # the server that forks them is there already
    monkeypatch.chdir(tmp_path)
    assert run_local(2, os.getcwd) == str(tmp_path)


def test_all_agree_on_what_the_first_worker_decides():
    assert run_local(3, agreement, "") == ["0", "0", "0"]
    with pytest.raises(UserError, match=r"^the first says no$"):
        run_local(3, agreement, "the first says no")


def agreement(refusal):
    cluster = Cluster.from_env(device="cpu")

    def decide():
        if refusal:
            raise UserError(refusal)
        return f"{cluster.rank}"

    said = [None] * cluster.world
    dist.all_gather_object(said, cluster.agree(decide))
    cluster.leave()
    return said


FAILURES = {
    "raises": (WorkerFailed, r"^worker 2 of 4 failed:\nTraceback[\s\S]*LookupError: the cause\n$"),
    "mistaken": (UserError, "^the mistake$"),
    "killed": (WorkerFailed, "^worker 2 of 4 ended by SIGKILL$"),
    "terminated": (WorkerFailed, "^worker 2 of 4 ended by SIGTERM$"),
    "exits": (WorkerFailed, "^worker 2 of 4 ended with status 7$"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_the_worker_that_failed_is_named_and_the_others_end(how, tmp_path):
    """The others wait for it in an all-reduce, or fail of it a moment later: they are not news."""
    error, words = FAILURES[how]
    with pytest.raises(error, match=words):
        run_local(4, fail, how, tmp_path)
    assert not any(map(running, pids(tmp_path, 4)))


def fail(how, folder):
    cluster = Cluster.from_env(device="cpu")
    note_pid(folder)
    cluster.barrier()
    try:
        if cluster.rank != 2:
            while True:
                dist.all_reduce(torch.ones(1000))
        if how == "raises":
            raise LookupError("the cause")
        if how == "mistaken":
            raise UserError("the mistake")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    finally:
        cluster.leave()


def test_a_result_that_cannot_be_sent_is_a_failure():
    with pytest.raises(WorkerFailed, match=r"^worker 0 of 2 failed:\n[\s\S]*pickle"):
        run_local(2, nameless)


def nameless():
    return (lambda: None) if os.environ["RANK"] == "0" else None


def pids(folder, count):
    """The processes that noted themselves, once all have."""

    def noted():
        found = [path.read_text() for path in folder.iterdir() if path.name.isdigit()]
        return found if len(found) == count and all(found) else None

    return [int(pid) for pid in until(noted, f"the start of {count} workers")]


# A process of its own, so that it can be killed.
def launcher(call, **options):
    code = f"import started; from megabatch.launch import run_local; {call}"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, text=True, **options
    )


@pytest.mark.parametrize("stopped", ["a worker", pytest.param("all", marks=pytest.mark.systems)])
def test_workers_end_with_the_process_that_started_them(stopped, tmp_path, short_tmp):
    """Who stands still then does too; and all that it leaves is one folder, which the next process
    removes."""
    environ = os.environ | {"TMPDIR": str(short_tmp)}
    call = f"run_local(3, started.sleep, {str(tmp_path)!r})"
    # A session of its own: the system would continue a group of processes that nobody is left for.
    with launcher(call, env=environ, start_new_session=True) as parent:
        workers = pids(tmp_path, 3)
        servers = children(parent.pid)  # the one that workers are forked from is among them
        assert servers
        stand_still([parent.pid])  # it would continue its servers
        stand_still({"a worker": workers[:1], "all": [*workers, *servers]}[stopped])
        parent.kill()
    assert gone([*workers, *servers])
    (left,) = short_tmp.iterdir()
    assert left.name.startswith("megabatch-") and (left / "lock").exists()


def test_a_folder_of_temporary_files_that_somebody_removed_is_not_missed(short_tmp):
    """As what cleans a machine's temporary files does, in a long run."""
    call = f"run_local(1, print, 'worked'); import shutil; shutil.rmtree({str(short_tmp)!r})"
    environ = os.environ | {"TMPDIR": str(short_tmp)}
    with launcher(call, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        said = parent.communicate(timeout=PATIENCE_SECONDS)
    assert (parent.returncode, *said) == (0, "worked\n", "")


def stand_still(processes):
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    until(lambda: all(state(process) == "T" for process in processes), "their stop")


def test_a_server_that_was_stopped_is_made_to_go_on():
    """Else nobody hears how workers end, and no other is ever forked."""
    server = run_local(1, os.getppid)
    assert run_local(1, stopping_the_server) == server
    stand_still([server])
    assert run_local(1, os.getppid) == server


def stopping_the_server():
    # Not until it stands still: whoever makes it go on may be quicker than a look at it.
    os.kill(os.getppid(), signal.SIGSTOP)
    return os.getppid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_to_every_worker(number, tmp_path):
    """Each worker answers with the signal it got; the launcher itself goes on to collect them."""
    call = f"print(run_local(2, started.await_signal, {str(tmp_path)!r}))"
    with launcher(call, stdout=subprocess.PIPE) as parent:
        pids(tmp_path, 2)
        parent.send_signal(number)
        said, _ = parent.communicate(timeout=PATIENCE_SECONDS)
    assert parent.returncode == 0
    assert said == f"{[number.value, number.value]}\n"


def test_the_server_that_forks_is_deaf_to_requests_to_stop_and_workers_are_not():
    assert run_local(1, who_is_deaf) == ({*SIGNALS}, set())
    assert not {*SIGNALS} & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def who_is_deaf():
    """The server that has forked this worker, and the worker itself."""
    return tuple(deaf(process) for process in (os.getppid(), os.getpid()))


def deaf(process):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (blocked,) = [line.split()[1] for line in lines if line.startswith("SigBlk")]
    return {number for number in SIGNALS if int(blocked, 16) & 1 << number - 1}


def test_what_workers_print_is_not_lost():
    with launcher("run_local(4, print, 'a line')", stdout=subprocess.PIPE) as parent:
        said, _ = parent.communicate(timeout=PATIENCE_SECONDS)
    assert sorted(said) == sorted("a line\n" * 4)  # they speak at once


def test_four_workers_start_and_meet_with_less_work_than_one_interpreter_imports_torch():
    """Counted in processor time: what else this machine does is not in it."""
    run_local(1, os.getpid)  # starts the server
    imports = "import time, megabatch.training; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", imports], capture_output=True, check=True)
    assert sum(run_local(4, meet)) < float(done.stdout)


def meet():
    """What it cost each worker, from its fork on."""
    cluster = Cluster.from_env(device="cpu")
    taken = cluster.gather(time.process_time())
    cluster.leave()
    return taken


def test_a_second_ctrl_c_ends_workers_that_do_not_heed_the_first(tmp_path):
    """The first reaches a worker twice, from the terminal and from the launcher, and is one."""
    call = f"run_local(2, started.hear_and_go_on, {str(tmp_path)!r})"
    with launcher(call, stderr=subprocess.PIPE, start_new_session=True) as parent:
        workers = pids(tmp_path, 2)
        os.killpg(parent.pid, signal.SIGINT)
        heard = [tmp_path / f"heard-{rank}" for rank in range(2)]
        until(lambda: all(path.exists() for path in heard), "the first request", parent)
        assert parent.poll() is None and all(map(running, workers))
        os.killpg(parent.pid, signal.SIGINT)
        _, said = parent.communicate(timeout=PATIENCE_SECONDS)
    assert gone(workers)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert "WorkerFailed" not in said
