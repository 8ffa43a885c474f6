"""Workers, hosts and supervisors are killed for real; every run ends as if nothing had happened.

All processes are this machine's, and all traffic stays on the loopback interface.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import forkserver

import dying
import pytest
from dying import await_steps, died, disturbed
from ports import free_ports
from waiting import gone, until

from megabatch.launch import run_local
from megabatch.runs import checkpoint

pytestmark = [pytest.mark.systems, pytest.mark.timeout(600)]

TRAIN = ["train", "digits", "--deterministic", "--device", "cpu", "--json"]
MEGABATCH = [sys.executable, "-m", "megabatch.cli", *TRAIN]
WAIT_SECONDS = 240
KILLS = 20


@pytest.fixture(scope="module")
def environ():
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MEGABATCH_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return kept | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def alone(environ, tmp_path_factory):
    """The weights and the steps of an undisturbed run of so many epochs on one worker."""
    known = {}

    def run(epochs):
        if epochs not in known:
            out = tmp_path_factory.mktemp("alone") / "run"
            line = [*MEGABATCH, "--workers", "1", "--epochs", str(epochs), "--out", str(out)]
            done = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)
            known[epochs] = result(done.stdout)["weights_sha256"], dying.steps_of(out)
        return known[epochs]

    return run


def result(output):
    return json.loads(output.splitlines()[-1])


# ---------------------------------------------------------------- under our supervisor


def test_twenty_random_kills(environ, alone, tmp_path):
    """Runs of four workers, one after another; each kill hits a random worker at a random moment.

    Deaths while workers start and regroup come about by themselves: the next kill may follow the
    last at once.
    """
    seed = random.randrange(1 << 16)
    chance, killed, number = random.Random(seed), 0, 0
    while killed < KILLS:
        number += 1
        out = tmp_path / f"run{number}"
        line = [*MEGABATCH, "--workers", "4", "--epochs", "3", "--max-restarts", "99"]
        with subprocess.Popen(
            [*line, "--out", str(out)], env=environ, stdout=subprocess.PIPE, text=True
        ) as training:
            while await_steps(out, 1, training) and killed < KILLS:
                time.sleep(chance.expovariate(1.0))  # a moment of its own, not a wait for anything
                with contextlib.suppress(ProcessLookupError, IndexError):
                    os.kill(chance.choice(dying.workers_of(training.pid)), signal.SIGKILL)
                    killed += 1
            said, _ = training.communicate(timeout=WAIT_SECONDS)
        assert training.returncode == 0, f"seed {seed}, run {number}"
        found = result(said)["weights_sha256"], dying.steps_of(out)
        assert found == alone(3), f"seed {seed}, run {number}"


DEATHS = {
    "two at once": [("before a step", 1, 4), ("before a step", 2, 4)],
    "while it starts": [("as it opens the images", 1, 1)],
    "the first, while it starts": [("as it opens the images", 0, 1)],
    "as the first saves": [("as it saves", 0, 1)],
    "as a checkpoint is written beside the run": [("as it writes a checkpoint", 0, 2)],
    "and as they regroup from there": [
        ("as it writes a checkpoint", 0, 1),
        ("as it copies the state", 1, 1, 1),
    ],
    "at the end": [("at the last barrier", 1, 1)],
    "past the end": [("past the last barrier", 1, 1)],
    "the first, past the end": [("past the last barrier", 0, 1)],
    "one after another": [
        ("after a step", rank, count) for rank, count in ((0, 2), (1, 3), (2, 4))
    ],
    "as they regroup": [("before a step", 2, 3), ("as it opens the images", 1, 1, 1)],
    "as they meet": [("before a step", 2, 3), ("as it meets the others", 1, 1, 1)],
    "the newcomer": [("before a step", 2, 3), ("as it copies the state", 2, 1, 1)],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    summary = dying.undisturbed(folder)
    run = folder / "run"
    return summary.weights_sha256, dying.steps_of(run), dying.evaluations_of(run)


@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
def test_deaths_at_all_moments(deaths, whole, tmp_path):
    found = disturbed(tmp_path, *deaths, most=9)
    assert died(tmp_path, *deaths)
    run = tmp_path / "run"
    assert (found.weights_sha256, dying.steps_of(run), dying.evaluations_of(run)) == whole
    assert (run / "summary.json").exists()


def test_a_killed_supervisor_leaves_no_workers_and_a_good_checkpoint(environ, alone, tmp_path):
    out = tmp_path / "run"
    line = [*MEGABATCH, "--workers", "3", "--epochs", "3", "--out", str(out)]
    with dying.held(line, out, 25, 45, environ) as (training, workers):  # in the second of epochs
        until(lambda: checkpoint.newest(out / "checkpoints"), "the checkpoint of the first")
        training.kill()
        os.kill(workers[-1], signal.SIGCONT)
        training.communicate(timeout=WAIT_SECONDS)
        assert len(workers) == 3
        assert gone(workers), "workers outlive their supervisor"
    done = subprocess.run(
        [*line, "--resume"], env=environ, capture_output=True, text=True, check=True
    )
    assert "resumed at step 23" in done.stderr
    assert (result(done.stdout)["weights_sha256"], dying.steps_of(out)) == alone(3)


def test_a_supervisor_that_is_killed_while_its_workers_regroup_leaves_none(environ, tmp_path):
    """Nor the newcomer, which stands still then and has not begun to listen."""
    out = tmp_path / "run"
    line = [*MEGABATCH, "--workers", "3", "--epochs", "3", "--out", str(out)]
    with subprocess.Popen(
        line, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as training:
        assert await_steps(out, 5, training)
        workers, servers = dying.workers_of(training.pid), dying.children(training.pid)
        os.kill(workers[1], signal.SIGKILL)
        new = until(
            lambda: {*dying.workers_of(training.pid)} - {*workers}, "the newcomer", training
        )
        for newcomer in new:
            os.kill(newcomer, signal.SIGSTOP)
        training.kill()
        _, said = training.communicate(timeout=WAIT_SECONDS)
    assert gone([*workers, *servers, *new])
    assert "Traceback" not in said


def test_a_run_that_is_told_to_stop_while_a_worker_is_lost_stops(environ, alone, tmp_path):
    out = tmp_path / "run"
    line = [*MEGABATCH, "--workers", "3", "--epochs", "3", "--out", str(out)]
    with subprocess.Popen(line, env=environ, stdout=subprocess.DEVNULL) as training:
        assert await_steps(out, 5, training)
        os.kill(dying.workers_of(training.pid)[-1], signal.SIGKILL)
        training.terminate()
        assert training.wait(WAIT_SECONDS) == 3
    done = subprocess.run(
        [*line, "--resume"], env=environ, capture_output=True, text=True, check=True
    )
    assert (result(done.stdout)["weights_sha256"], dying.steps_of(out)) == alone(3)


def test_a_supervisor_that_was_stopped_itself_replaces_who_was_lost_meanwhile(
    environ, alone, tmp_path
):
    """For longer than its patience, so that it has heard of nobody; and the server that workers are
    forked from is killed too."""
    out = tmp_path / "run"
    line = [*MEGABATCH, "--workers", "3", "--epochs", "3", "--patience", "3", "--out", str(out)]
    with subprocess.Popen(
        line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as training:
        assert await_steps(out, 5, training)
        (server,) = (one for one in dying.children(training.pid) if dying.children(one))
        workers = dying.workers_of(training.pid)
        training.send_signal(signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        os.kill(workers[1], signal.SIGKILL)
        time.sleep(8)  # longer than anybody's patience with it
        training.send_signal(signal.SIGCONT)
        assert await_steps(out, 15, training)
        os.kill(workers[0], signal.SIGSTOP)  # of the server that is gone
        said, words = training.communicate(timeout=WAIT_SECONDS)
    assert training.returncode == 0, words
    assert (result(said)["weights_sha256"], dying.steps_of(out)) == alone(3)
    # It blames nobody for its own pause; a worker may have named the dead one meanwhile.
    assert (words.count("is silent for"), words.count(", replaced")) == (1, 2), words
    assert gone(workers)


def test_a_server_that_cannot_fork_is_replaced():
    server = run_local(1, os.getppid)
    assert server == forkserver._forkserver._forkserver_pid
    resource.prlimit(server, resource.RLIMIT_NOFILE, (3, 3))  # it cannot take what it is sent
    assert run_local(1, os.getppid) != server


@pytest.mark.parametrize("steps", [0, 5], ids=["starting", "training"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_tells_all_processes_to_stop(number, steps, environ, alone, tmp_path):
    """As Slurm does before a job's time is up: the supervisor, its workers and who forks them."""
    out = tmp_path / "run"
    line = [*MEGABATCH, "--workers", "3", "--epochs", "3", "--out", str(out)]
    with subprocess.Popen(
        line, env=environ, stdout=subprocess.DEVNULL, start_new_session=True
    ) as training:
        until(lambda: dying.children(training.pid), "the server that forks workers", training)
        assert await_steps(out, steps, training)
        os.killpg(training.pid, number)
        assert training.wait(WAIT_SECONDS) == 3
    done = subprocess.run(
        [*line, "--resume"], env=environ, capture_output=True, text=True, check=True
    )
    assert (result(done.stdout)["weights_sha256"], dying.steps_of(out)) == alone(3)


@pytest.mark.parametrize("plan", ["torus", "ring", "three_phase"])
def test_sums_by_a_plan_are_given_up_at_once(plan, tmp_path, environ):
    """What waits for a lost worker in our own lanes does not wait for the heartbeat's verdict."""
    out = tmp_path / "run"
    line = [*MEGABATCH, "--no-deterministic", "--plan", plan, "--workers", "4", "--epochs", "2"]
    line += ["--patience", "10000"]
    with subprocess.Popen(
        [*line, "--out", str(out)], env=environ, stdout=subprocess.PIPE, text=True
    ) as training:
        for steps in (3, 8):
            assert await_steps(out, steps, training)
            os.kill(dying.workers_of(training.pid)[steps % 4], signal.SIGKILL)
            assert await_steps(out, steps + 3, training)
        said, _ = training.communicate(timeout=WAIT_SECONDS)
    assert training.returncode == 0
    indices = [step for step, _ in dying.steps_of(out)]
    assert indices == list(range(result(said)["steps"]))


@pytest.fixture
def heard_workers(capfd):
    """What workers say on standard error too: the server they are forked from, which has the one
    of its own start, is started anew."""
    forkserver._forkserver._stop()
    yield capfd
    forkserver._forkserver._stop()


@pytest.mark.parametrize("plan", ["backend", "torus"])
def test_a_worker_that_lives_but_lets_all_wait_is_ended(plan, tmp_path, heard_workers):
    """By the word of the heartbeat, which is patient ten times as long as with the silent."""
    death = ("before a step", 1, 3)
    config = replace(dying.CONFIG, plan=plan, deterministic=plan == "backend", patience=2.0)
    found = disturbed(tmp_path, death, config=config, how=dying.HANGS)
    assert died(tmp_path, death)
    assert [step for step, _ in dying.steps_of(tmp_path / "run")] == list(range(found.steps))
    said = heard_workers.readouterr().err
    assert "rank 1 lives but let the others wait for 20 s" in said
    assert "worker 1 of 3 ended by SIGKILL: loss 1 of 3, replaced" in said


@pytest.mark.parametrize("plan", ["backend", "torus"])
def test_survivors_keep_nothing_of_the_worlds_they_lost(plan, tmp_path):
    # Not in the first steps: what the first point drawn loads of TensorBoard's is there by then.
    deaths = [("before a step", 1, count) for count in range(3, 8)]
    config = replace(dying.CONFIG, epochs=6.0, plan=plan, deterministic=plan == "backend")
    disturbed(tmp_path, *deaths, workers=2, most=9, config=config)
    assert died(tmp_path, *deaths)
    files, threads = zip(*dying.belongings(tmp_path), strict=True)
    assert len(files) == 6
    # The first loss loads and opens what stays.
    assert min(files[-2:]) <= files[1], files
    assert min(threads[-2:]) <= threads[1], threads


# ---------------------------------------------------------------- under torchrun


class Host:
    """A torchrun agent and its workers: a host of a run, or all of it."""

    def __init__(self, environ, out, *flags, epochs):
        torchrun = [sys.executable, "-m", "torch.distributed.run", *flags, "-m", "megabatch.cli"]
        line = [*torchrun, *TRAIN, "--epochs", str(epochs), "--out", str(out)]
        self.agent = subprocess.Popen(
            line, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.agent.stdout.close()

    def workers(self):
        return dying.children(self.agent.pid)

    def kill(self):
        """The power fails: agent and workers at once."""
        for process in [*self.workers(), self.agent.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agent.wait()

    def ends(self):
        said, _ = self.agent.communicate(timeout=WAIT_SECONDS)
        assert self.agent.returncode == 0
        return result(said)


def test_torchrun_restarts_from_the_last_checkpoint(environ, alone, tmp_path):
    out = tmp_path / "run"
    flags = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "2"]
    with Host(environ, out, *flags, epochs=3) as host:
        assert await_steps(out, 30, host.agent)
        os.kill(host.workers()[1], signal.SIGKILL)
        found = host.ends()
    assert found["world"] == 3
    assert (found["weights_sha256"], dying.steps_of(out)) == alone(3)


def test_a_host_joins_and_a_host_is_lost(environ, alone, tmp_path):
    """Two workers, then four, then two again; the batch and the order of images stay.

    Agents of torch 2.13 that share one store over all rounds never tell a newcomer its address.
    """
    environ = environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    out, epochs = tmp_path / "run", 20
    flags = [
        "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}",
        "--rdzv-id", "a-run", "--local-addr", "127.0.0.1", "--monitor-interval", "0.2",
        "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]  # fmt: skip
    worlds = []

    def world_is(size):
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            with contextlib.suppress(OSError, ValueError):
                if json.loads((out / "environment.json").read_text())["world"] == size:
                    break
            assert time.monotonic() < deadline, f"the run never had {size} workers"
            time.sleep(0.1)
        worlds.append(size)

    with Host(environ, out, *flags, epochs=epochs) as first:
        assert await_steps(out, 3, first.agent)
        world_is(2)
        with Host(environ, out, *flags, epochs=epochs) as second:
            world_is(4)
            so_far = len(dying.steps_of(out))
            assert await_steps(out, so_far + 5, first.agent)
            second.kill()
            world_is(2)
            found = first.ends()
    assert worlds == [2, 4, 2]
    assert found["world"] == 2
    assert (found["weights_sha256"], dying.steps_of(out)) == alone(epochs)
