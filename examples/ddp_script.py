"""Somebody's DDP script; the lines marked `megabatch` are all that was added.

torchrun --nproc-per-node 4 examples/ddp_script.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    cluster = mb.Cluster.from_env()  # megabatch
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(cluster.device)
    model = DistributedDataParallel(net)
    sync = mb.GradSync(cluster, plan="torus", wire="fp16")  # megabatch
    sync.attach(model)  # megabatch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        images = torch.randn(32, 64, generator=generator).to(cluster.device)
        labels = images[:, :10].argmax(1)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    sync.close()  # megabatch
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
