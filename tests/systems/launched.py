"""A training script as others write it, started by each of their launchers.

    python launched.py LAUNCHER FOLDER

Two workers train a small net on data of their own, four steps; each writes its weights, and how
many of its backward passes GradSync summed, to FOLDER.
"""

import os
import socket
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.cluster import Cluster
from megabatch.sync.ddp import GradSync

WORLD, STEPS, RATE = 2, 4, 0.05


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 30), nn.Linear(30, 7))


def batches(rank):
    generator = torch.Generator().manual_seed(5 + rank)
    return [torch.randn(4, 40, generator=generator) for _ in range(STEPS)]


def loss_of(output):
    return output.square().mean()


def write(folder, sync, net):
    cluster = sync._cluster
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    where = (cluster.rank, cluster.world, cluster.local_rank, cluster.local_world, cluster.grid)
    torch.save((where, sync.steps, weights), os.path.join(folder, f"{cluster.rank}.pt"))


def loop(model, backward, optimizer, folder, rank):
    """Everybody's loop, once the model is a DDP module."""
    with GradSync(Cluster.from_env(), "torus") as sync:
        sync.attach(model)
        for images in batches(rank):
            optimizer.zero_grad()
            backward(loss_of(model(images)))
            optimizer.step()
        write(folder, sync, model)


# ---------------------------------------------------------------- torch


def spawned(rank, folder):
    """As in PyTorch's own DDP tutorial: no variable says who is who."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loop(model, lambda loss: loss.backward(), optimizer, folder, rank)
    torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- Accelerate


def accelerated(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = network()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=RATE))
    loop(model, accelerator.backward, optimizer, folder, accelerator.process_index)
    accelerator.end_training()


def main(launcher, folder):
    torch.set_num_threads(1)
    if launcher == "mp.spawn":
        torch.multiprocessing.spawn(spawned, (folder,), WORLD)
    elif launcher == "debug_launcher":
        from accelerate import debug_launcher

        debug_launcher(accelerated, (folder,), WORLD)
    elif launcher == "notebook_launcher":
        from accelerate import notebook_launcher

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        notebook_launcher(accelerated, (folder,), WORLD, use_port=f"{port}")
    else:  # accelerate launch
        accelerated(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
