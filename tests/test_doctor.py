"""The doctor: true of a machine that works, and still standing where everything is broken."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from waiting import PATIENCE_SECONDS

from megabatch import doctor, kernels
from megabatch.doctor import child, compilers, machine, network, software
from megabatch.doctor.child import Failed, ask
from megabatch.doctor.finding import Finding
from megabatch.host.granted import memory

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI_", "MPI_", "SLURM_", "MASTER_", "GLOO_")
CPU = {"error": None, "version": "2.13.0+cpu", "cuda": None, "hip": None, "nccl": None, "gpus": []}
GPU = {"index": 0, "name": "NVIDIA H200", "nbytes": 139 * 2**30, "trouble": None}


def run(folder, *arguments, **broken_modules):
    """The command itself, with modules before the real ones that do what their source says."""
    for name, source in broken_modules.items():
        (folder / f"{name}.py").write_text(source)
    clean = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHERS, "CC", "CXX"))}
    return subprocess.run(
        [sys.executable, "-m", "megabatch.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        # A path without any command: the doctor needs none, and there is no compiler on it.
        env={**clean, "PYTHONPATH": str(folder), "COLUMNS": "200", "PATH": str(folder)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        timeout=PATIENCE_SECONDS,
    )


def by_part(result):
    said = json.loads(result.stdout.splitlines()[-1])
    return said, {finding["part"]: finding for finding in said["findings"]}


def test_a_machine_that_works_with_broken_things_that_do_not_matter(tmp_path):
    result = run(
        tmp_path,
        "--json",
        torchvision="raise RuntimeError('operator torchvision::nms does not exist')",
        timm="import torchvision",
        sklearn="import os; os.abort()",
        mlperf_logging='print(\'{"answer": "noise"}\')',
    )
    assert result.returncode == 0, result.stderr
    said, parts = by_part(result)
    assert said["works"] is True
    for part in ("Python", "torch", "gloo", "training step", "launcher", "loopback", "numpy"):
        assert parts[part]["state"] == "works", parts[part]
        assert parts[part]["costs"] == parts[part]["remedy"] == ""
    assert parts["torchvision, timm"]["state"] == "limited"
    assert parts["torchvision, timm"]["found"].count("nms does not exist") == 2
    assert parts["scikit-learn"]["state"] == "limited"
    assert "SIGABRT" in parts["scikit-learn"]["found"]
    assert parts["mlperf-logging"]["state"] == "works"
    assert parts["open files"]["state"] == "limited"
    assert parts["compiler"]["state"] == "missing"
    assert parts["compiler"]["found"] == "no C++ compiler"
    for finding in said["findings"]:
        assert (finding["costs"] == "") == (finding["state"] == "works"), finding
        assert finding["part"] in result.stdout
    assert "scikit-learn" in said["verdict"]


def test_a_machine_that_does_not(tmp_path):
    result = run(
        tmp_path,
        "--json",
        torch="raise OSError('libc10.so: cannot open shared object file')",
        safetensors="raise ImportError",
    )
    assert result.returncode == 1
    said, parts = by_part(result)
    assert said["works"] is False
    assert result.stdout.splitlines()[-2] == f"megabatch: {said['verdict']}"
    assert said["verdict"].startswith("training cannot work here: torch: cannot be imported: OSErr")
    assert "libc10.so" in said["verdict"] and "safetensors" in said["verdict"]
    assert parts["torch"]["state"] == parts["safetensors"]["state"] == "stops"
    assert "Traceback" not in result.stderr


def test_a_check_that_raises_costs_its_row_alone():
    def broken():
        raise OSError("\n  the disk is on fire\nand more")

    finding = doctor._guarded(("working folder", broken))
    assert (finding.part, finding.state) == ("working folder", "limited")
    assert finding.found == "could not be examined: OSError: the disk is on fire"


@pytest.mark.parametrize(
    ("states", "works"),
    [(["works"], True), (["limited", "missing"], True), (["works", "stops"], False)],
)
def test_verdict(states, works):
    found = doctor.conclusion([Finding(f"part {s}", s, f"found {s}") for s in states])
    assert found[0] is works
    assert ("part stops: found stops" in found[1]) is not works
    assert ("part limited" in found[1]) is ("limited" in states)


# --- children ----------------------------------------------------------------------------------


def test_a_child_answers_raises_hangs_and_crashes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, source in {
        "noisy": "import sys; print('hello'); print('oh', file=sys.stderr)",
        "raising": "raise ValueError('\\n  first\\nsecond')",
        "leaving": "raise SystemExit(0)",
        "slow": "import time; time.sleep(60)",
        "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "vanishing": "import os; os._exit(0)",
    }.items():
        (tmp_path / f"{name}.py").write_text(source)
    assert ask(child.version_of, "noisy", "noisy") == "of unknown version"
    assert ask(child.version_of, "absent_module", "absent") is None
    for name, seconds, says in [
        ("raising", 60, "ValueError: first"),
        ("leaving", 60, "SystemExit"),
        ("slow", 1.5, "no answer in 1.5 s"),
        ("crashing", 60, "SIGSEGV"),
        ("vanishing", 60, "no reason given"),
    ]:
        with pytest.raises(Failed, match=says):
            ask(child.version_of, name, name, seconds=seconds)


def test_a_module_in_the_working_folder_is_not_examined(tmp_path, monkeypatch):
    (tmp_path / "pyarrow.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    assert ask(child.version_of, "pyarrow", "pyarrow") not in (None, "of unknown version")


# --- torch and GPUs, by what torch says of itself -----------------------------------------------


@pytest.mark.parametrize(
    ("facts", "state", "says"),
    [
        (CPU, "works", "CPU build"),
        ({**CPU, "version": "2.11.0a0+git", "cuda": "13.0"}, "works", "CUDA 13.0 build"),
        ({**CPU, "hip": "6.4"}, "works", "ROCm build"),
        ({**CPU, "version": "2.10.1"}, "stops", "older than 2.11"),
        ({"error": "no torch", "cuda": None, "gpus": []}, "stops", "no torch"),
    ],
)
def test_torch(facts, state, says):
    finding = software.check_torch(facts)
    assert finding.state == state
    assert says in finding.found


@pytest.mark.parametrize(
    ("facts", "nodes", "state", "says"),
    [
        (CPU, [], "missing", "no GPU"),
        (CPU, ["nvidia0", "nvidiactl"], "limited", "has 1 of NVIDIA's GPUs, but this torch is"),
        ({**CPU, "cuda": "13.0", "warning": "the driver is too old"}, ["nvidia0"], "limited",
         "the driver is too old"),
        ({**CPU, "cuda": "13.0", "gpus": [GPU, GPU]}, [], "works", "2 x NVIDIA H200, 139 GiB"),
        ({**CPU, "cuda": "13.0", "gpus": [GPU, {**GPU, "trouble": "no kernel image"}]}, [],
         "limited", "no kernel image"),
    ],
)  # fmt: skip
def test_cuda(tmp_path, facts, nodes, state, says):
    for node in nodes:
        (tmp_path / node).touch()
    finding = software.check_cuda(facts, tmp_path)
    assert finding.state == state
    assert says in finding.found


@pytest.mark.parametrize(
    ("gpus", "nccl", "state"),
    [(0, None, "missing"), (1, "2.27", "works"), (1, None, "limited"), (2, None, "stops")],
)
def test_nccl_without_joining(gpus, nccl, state):
    assert software.check_nccl({**CPU, "gpus": [GPU] * gpus, "nccl": nccl}).state == state


@pytest.fixture
def only_commands(tmp_path, monkeypatch):
    """A path on which nothing stands but what a test puts there."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernels, "installed", lambda: True)
    kernels.lacking.cache_clear()
    yield tmp_path
    kernels.lacking.cache_clear()


def put(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_without_a_compiler_kernels_are_left_out_and_the_doctor_says_so(only_commands):
    assert not kernels.available(torch.device("cuda"))
    on_cores = compilers.check_compiler(CPU)
    assert (on_cores.state, on_cores.found) == ("missing", "no C++ compiler")
    assert "only --compile always" in on_cores.costs and "g++" in on_cores.remedy
    on_gpu = compilers.check_compiler({**CPU, "gpus": [GPU]})
    assert (on_gpu.state, on_gpu.found) == ("limited", "Triton finds no C compiler")
    assert "torch's kernels run instead" in on_gpu.costs and "g++" in on_gpu.remedy


def test_a_compiler_that_fails_and_one_that_does_not_run(only_commands):
    put(only_commands, "gcc", "echo 'small.c:1: fatal error: Python.h: no such file' >&2; exit 1")
    found = compilers.check_compiler({**CPU, "gpus": [GPU]})
    assert found.state == "limited" and "fatal error: Python.h" in found.found
    (only_commands / "g++").write_text("\0")
    (only_commands / "g++").chmod(0o755)
    found = compilers.check_compiler(CPU)
    assert found.state == "limited" and "does not run: " in found.found


def test_a_gpu_without_triton_or_headers(only_commands, monkeypatch):
    put(only_commands, "clang", "exit 0")
    monkeypatch.setattr(kernels, "python_headers", lambda: only_commands)
    found = compilers.check_compiler({**CPU, "gpus": [GPU]})
    assert found.found == "Triton finds no Python.h" and "python3-dev" in found.remedy
    (only_commands / "Python.h").touch()
    kernels.lacking.cache_clear()
    found = compilers.check_compiler({**CPU, "gpus": [GPU]})
    assert (found.state, found.found) == (
        "works",
        f"{only_commands / 'clang'} compiles, for Triton's kernels",
    )
    monkeypatch.setattr(kernels, "installed", lambda: False)
    kernels.lacking.cache_clear()
    found = compilers.check_compiler({**CPU, "gpus": [GPU]})
    assert found.found == "Triton is not installed" and found.remedy == "pip install triton"


@pytest.mark.skipif(
    not (shutil.which("g++") and (kernels.python_headers() / "Python.h").exists()),
    reason="there is no g++ here, or no Python.h",
)
@pytest.mark.parametrize("gpus", [[], [GPU]])
def test_a_real_compiler(gpus, monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda: True)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    kernels.lacking.cache_clear()
    finding = compilers.check_compiler({**CPU, "gpus": gpus})
    kernels.lacking.cache_clear()
    assert finding.state == "works", finding


@pytest.mark.parametrize(("gpus", "state"), [(0, "stops"), (1, "limited")])
def test_gloo_is_needed_where_there_is_no_gpu(monkeypatch, gpus, state):
    def no_answer(*arguments, **options):
        raise Failed("no answer")

    monkeypatch.setattr(software, "ask", no_answer)
    assert software.check_gloo({**CPU, "gpus": [GPU] * gpus}).state == state
    assert software.check_nccl({**CPU, "gpus": [GPU, GPU], "nccl": "2.27"}).state == "stops"
    assert software.check_training(CPU).state == "stops"


# --- the machine -------------------------------------------------------------------------------


def machine_of(
    root, available_gib, cpu_max="max 100000", memory_max="max", used_gib=0.0, cached_gib=0.0
):
    """A system's files: a process two control groups deep, limits on the outer one."""
    outer = root / "sys/fs/cgroup/job"
    (outer / "task").mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job/task\n")
    (outer / "cpu.max").write_text(f"{cpu_max}\n")
    (outer / "memory.max").write_text(f"{memory_max}\n")
    (outer / "memory.current").write_text(f"{int(used_gib * 2**30)}\n")
    half = int(cached_gib * 2**29)
    (outer / "memory.stat").write_text(f"anon 1\ninactive_file {half}\nactive_file {half}\n")
    kib = int(available_gib * 2**20)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\nHugePages_Total: 0\n"
    )
    return root


@pytest.mark.parametrize(
    ("available", "limit", "used", "state", "free"),
    [
        (32, "max", 0, "works", "32.0 GiB free of 64.0"),
        (1, "max", 0, "limited", "1.0 GiB free of 64.0"),
        (32, str(4 * 2**30), 3, "limited", "1.0 GiB free of 4.0"),
        (32, str(16 * 2**30), 3, "works", "13.0 GiB free of 16.0"),
    ],
)
def test_memory_is_what_the_container_grants(tmp_path, available, limit, used, state, free):
    root = machine_of(tmp_path, available, memory_max=limit, used_gib=used)
    finding = machine.check_memory(root)
    assert (finding.state, finding.found) == (state, free)
    if free.startswith("1.0"):
        assert "about 4 workers" in finding.costs


def test_what_a_container_has_read_of_files_is_not_taken(tmp_path):
    root = machine_of(tmp_path, 32, memory_max=str(4 * 2**30), used_gib=4, cached_gib=3)
    assert memory(root) == (3 * 2**30, 4 * 2**30)
    assert memory(tmp_path / "no linux") is None


@pytest.mark.parametrize(
    ("cores", "usable", "cpu_max", "threads", "state", "says"),
    [
        (8, 8, "max 100000", "", "works", "8 of 8 cores"),
        (8, 8, "150000 100000", "", "limited", "the time of 1.5"),
        (64, 1, "max 100000", "", "limited", "1 of 64"),
        (1, 1, "max 100000", "1", "works", "1 of 1 cores"),
        (8, 4, "400000 100000", "4", "works", "OMP_NUM_THREADS 4"),
        (8, 4, "max 100000", "8", "limited", "OMP_NUM_THREADS 8"),
        (8, 4, "max 100000", "4,2", "works", "OMP_NUM_THREADS 4,2"),
    ],
)
def test_cores(tmp_path, monkeypatch, cores, usable, cpu_max, threads, state, says):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)))
    environ = {"OMP_NUM_THREADS": threads} if threads else {}
    finding = machine.check_cores(environ, machine_of(tmp_path, 8, cpu_max=cpu_max))
    assert finding.state == state
    assert says in finding.found


def test_shared_memory_that_is_absent_small_or_closed(tmp_path, monkeypatch):
    absent = machine.check_shared_memory(tmp_path / "shm")
    assert (absent.state, absent.found) == ("limited", f"there is no {tmp_path / 'shm'}")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    assert machine.check_shared_memory(tmp_path).state == "limited"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    assert machine.check_shared_memory(tmp_path).state == "works"
    monkeypatch.setattr(machine, "_write_trouble", lambda path: "Read-only file system")
    assert "Read-only" in machine.check_shared_memory(tmp_path).found


def test_a_folder_that_cannot_be_written(tmp_path):
    assert machine.check_folder(tmp_path).state in ("works", "limited")
    assert list(tmp_path.iterdir()) == []
    gone = machine.check_folder(tmp_path / "gone")
    assert gone.state == "limited"
    assert "No such file" in gone.found and "--out" in gone.remedy


@pytest.mark.parametrize(
    ("limits", "state", "remedy"),
    [
        ((64, 64), "limited", "administrator"),
        ((64, 4096), "limited", "ulimit -n 4096"),
        ((64, resource.RLIM_INFINITY), "limited", "ulimit -n 65536"),
        ((4096, 4096), "works", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "works", ""),
    ],
)
def test_open_files(monkeypatch, limits, state, remedy):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    finding = machine.check_open_files()
    assert finding.state == state
    assert remedy in finding.remedy


# --- names and launchers -----------------------------------------------------------------------


def test_a_hostname_that_leads_nowhere():
    finding = network.check_hostname({}, host="no-such-host.invalid")
    assert finding.state == "limited"
    assert "leads nowhere" in finding.found and "/etc/hosts" in finding.remedy


@pytest.mark.parametrize(
    ("addresses", "state", "says"),
    [
        (["127.0.1.1"], "limited", "127.0.1.1"),
        (["192.0.2.7"], "limited", "no address of this machine"),  # an address nobody has
    ],
)
def test_a_hostname_that_leads_elsewhere(monkeypatch, addresses, state, says):
    monkeypatch.setattr(network, "ask", lambda *arguments, **options: addresses)
    finding = network.check_hostname({}, host="here")
    assert finding.state == state
    assert says in finding.found


def test_the_interface_that_gloo_is_told():
    assert network.check_hostname({"GLOO_SOCKET_IFNAME": "lo"}).state == "works"
    assert network.check_hostname({"GLOO_SOCKET_IFNAME": "nonet9"}).state == "limited"


def test_no_loopback(monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError(101, "Network is unreachable")

    assert network.check_loopback().state == "works"
    monkeypatch.setattr(socket, "create_connection", unreachable)
    finding = network.check_loopback()
    assert finding.state == "limited"
    assert "Network is unreachable" in finding.found


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "3"}
SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{what}": "1" for what in ("RANK", "LOCAL_RANK")} | {
    f"OMPI_COMM_WORLD_{what}": "2" for what in ("SIZE", "LOCAL_SIZE")
}


@pytest.mark.parametrize(
    ("environ", "state", "says", "remedy"),
    [
        ({}, "works", "local workers by itself", ""),
        ({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}, "works", "torchrun", ""),
        ({**TORCHRUN, "MASTER_ADDR": "no-such-host.invalid"}, "stops", "leads nowhere", "address"),
        (TORCHRUN, "stops", "MASTER_ADDR is not set", "FIRST_HOST"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "works", "worker 0 of 1", ""),
        ({"RANK": "0"}, "limited", "WORLD_SIZE is not", "unset RANK"),
        ({"PMI_SIZE": "2"}, "limited", "PMI_RANK is not", "unset PMI_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "stops", "not a number", ""),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "stops", "ranks count from 0", ""),
        ({**OPEN_MPI, "MEGABATCH_STORE": "/tmp/store"}, "works", "mpirun: worker 1 of 2", ""),
        ({**OPEN_MPI, "MEGABATCH_STORE": "/nowhere/store"}, "stops", "/nowhere", "share"),
        (SLURM, "limited", "inside a Slurm job", "srun"),
        ({**SLURM, **SRUN}, "stops", "srun: worker 3 of 8", "scontrol show hostnames"),
    ],
)
def test_launchers(environ, state, says, remedy):
    finding = network.check_launcher(environ)
    assert finding.state == state, finding
    assert says in finding.found
    assert remedy in finding.remedy
