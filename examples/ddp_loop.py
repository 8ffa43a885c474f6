"""A DDP loop with our loader, optimizer, rate and all-reduce; marked lines are megabatch's.

torchrun --nproc-per-node 4 examples/ddp_loop.py [FOLDER OF IMAGES]
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb

EPOCHS, BATCH, SIZE = 6, 128, 16


def main(folder: str | None = None) -> None:
    cluster = mb.Cluster.from_env()  # megabatch
    images: str | mb.Data = folder or mb.Data(source="digits", size=SIZE, channels=3)
    torch.manual_seed(0)
    with mb.Loader(images, BATCH, size=SIZE, cluster=cluster) as loader:  # megabatch
        net = mb.models.build("small20", loader.classes).to(cluster.device)
        model = DistributedDataParallel(net) if cluster.world > 1 else net
        sync = mb.GradSync(cluster, plan="torus")  # megabatch
        if isinstance(model, DistributedDataParallel):
            sync.attach(model)  # megabatch
        groups = mb.parameter_groups(net, weight_decay=5e-5)  # megabatch
        optimizer = mb.LARS(groups, lr=0.0, momentum=0.9, trust=0.01)  # megabatch
        rate = mb.join(mb.warmup(1, to=4.0), mb.poly(EPOCHS - 1, power=2))  # megabatch
        for _ in range(EPOCHS):
            model.train()
            for pictures, labels in loader:
                for group in optimizer.param_groups:  # megabatch
                    group["lr"] = rate(loader.epoch)  # megabatch
                loss = nn.functional.cross_entropy(model(pictures), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            right = accuracy(net, loader, cluster)
            if cluster.first:
                print(f"epoch {loader.epoch:.2f}: loss {loss.item():.4f}, top-1 {right:.2%}")
        sync.close()  # megabatch
    cluster.leave()  # megabatch


@torch.no_grad()
def accuracy(net: nn.Module, loader: mb.Loader, cluster: mb.Cluster) -> float:
    net.eval()
    right = torch.zeros((), device=cluster.device)
    for pictures, labels in loader.validation():  # megabatch
        right += net(pictures).argmax(1).eq(labels).sum()
    if cluster.world > 1:
        torch.distributed.all_reduce(right)
    return right.item() / loader.held_out


if __name__ == "__main__":
    main(*sys.argv[1:])
