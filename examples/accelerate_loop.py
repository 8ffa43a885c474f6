"""An Accelerate loop with our loader, optimizer, rate and all-reduce; marked lines are megabatch's.

accelerate launch --num_processes 4 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn

import megabatch as mb

EPOCHS, BATCH, SIZE = 6, 128, 16


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    cluster = mb.Cluster.from_env()  # megabatch: after Accelerator, whose workers it takes
    torch.manual_seed(0)
    images = mb.Data(source="digits", size=SIZE, channels=3)  # megabatch
    loader = mb.Loader(images, BATCH, cluster=cluster)  # megabatch: not prepared, it is shared out
    net = mb.models.build("small20", loader.classes)
    groups = mb.parameter_groups(net, weight_decay=5e-5)  # megabatch: before prepare
    lars = mb.LARS(groups, lr=0.0, momentum=0.9, trust=0.01)  # megabatch
    rate = mb.join(mb.warmup(1, to=4.0), mb.poly(EPOCHS - 1, power=2))  # megabatch
    model, optimizer = accelerator.prepare(net, lars)
    sync = mb.GradSync(cluster, plan="torus")  # megabatch
    if cluster.world > 1:
        sync.attach(model)  # megabatch: after prepare, which wraps the net in DDP
    for _ in range(EPOCHS):
        for pictures, labels in loader:
            for group in optimizer.param_groups:  # megabatch
                group["lr"] = rate(loader.epoch)  # megabatch
            loss = nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {loader.epoch:.2f}: loss {loss.item():.4f}")
    sync.close()  # megabatch
    loader.close()  # megabatch
    accelerator.end_training()


if __name__ == "__main__":
    main()
