"""Other people's launchers: PyTorch's, Lightning's and Accelerate's own start the workers, and
GradSync sums over just those."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import RATE, STEPS, WORLD, batches, loss_of, network

pytestmark = pytest.mark.systems

HERE = Path(__file__).parent
TORCH, LIGHTNING = HERE / "launched.py", HERE / "launched_lightning.py"
# accelerate's own command starts several workers for GPUs alone; the script then says CPU.
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(WORLD)),
    *("--num_machines", "1", "--num_cpu_threads_per_process", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
]
LINES = {
    "mp.spawn": [TORCH, "mp.spawn"],
    "debug_launcher": [TORCH, "debug_launcher"],
    "notebook_launcher": [TORCH, "notebook_launcher"],
    "accelerate launch": [*ACCELERATE, TORCH, "accelerate launch"],
    "Lightning's ddp": [LIGHTNING, "ddp"],
    "Lightning's ddp_spawn": [LIGHTNING, "ddp_spawn"],
    "Lightning's ddp_notebook": [LIGHTNING, "ddp_notebook"],
}


def launch(*line):
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *map(str, line)], capture_output=True, text=True, timeout=240, env=environ
    )


def expected_weights():
    """What data-parallel training is: each step by the mean of the workers' gradients."""
    net = network()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    for images in zip(*(batches(rank) for rank in range(WORLD)), strict=True):
        gradients = [torch.autograd.grad(loss_of(net(part)), parameters) for part in images]
        for p, *parts in zip(parameters, *gradients, strict=True):
            p.grad = sum(part / WORLD for part in parts)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("launcher", LINES)
def test_their_workers_are_summed_over(launcher, tmp_path):
    done = launch(*LINES[launcher], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(WORLD):
        where, steps, weights = torch.load(tmp_path / f"{rank}.pt")
        assert where == (rank, WORLD, rank, WORLD, (1, WORLD))
        assert steps == STEPS
        assert torch.equal(weights, expected_weights())


def test_a_cluster_made_before_the_workers_were_is_refused(tmp_path):
    done = launch(LIGHTNING, "ddp", tmp_path, "early")
    assert done.returncode != 0
    assert "this module sums over workers 0, 1, but the cluster has workers" in done.stderr
