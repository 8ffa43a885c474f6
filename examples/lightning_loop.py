"""A Lightning module with our loader, optimizer, rate and all-reduce; marked lines are megabatch's.

python examples/lightning_loop.py [WORKERS]
"""

import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn

import megabatch as mb

EPOCHS, BATCH, SIZE = 6, 128, 16


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mb.models.build("small20", 10)
        self.rate = mb.join(mb.warmup(1, to=4.0), mb.poly(EPOCHS - 1, power=2))  # megabatch

    def train_dataloader(self) -> mb.Loader:
        images = mb.Data(source="digits", size=SIZE, channels=3)  # megabatch
        self.loader = mb.Loader(images, BATCH)  # megabatch: here, where the workers are there
        return self.loader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = mb.parameter_groups(self, weight_decay=5e-5)  # megabatch
        return mb.LARS(groups, lr=0.0, momentum=0.9, trust=0.01)  # megabatch

    def on_train_batch_start(self, *_: Any) -> None:
        # Not loader.epoch: Lightning fetches a batch ahead.
        epoch = self.global_step * BATCH / self.loader.images  # megabatch
        for group in self.trainer.optimizers[0].param_groups:  # megabatch
            group["lr"] = self.rate(epoch)  # megabatch

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        pictures, labels = batch
        self.loss = nn.functional.cross_entropy(self.net(pictures), labels)
        return self.loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch + 1}: loss {self.loss.item():.4f}")


class Attach(lightning.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.sync = mb.GradSync(mb.Cluster.from_env(), plan="torus")  # megabatch
        if isinstance(trainer.strategy.model, nn.parallel.DistributedDataParallel):
            self.sync.attach(trainer.strategy.model)  # megabatch: the strategy's, not the module

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.sync.close()  # megabatch
        module.loader.close()  # megabatch


def main(workers: str = "2") -> None:
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(workers),
        strategy="ddp" if int(workers) > 1 else "auto",
        max_epochs=EPOCHS,
        use_distributed_sampler=False,  # megabatch: the loader has shared the images out
        callbacks=[Attach()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits())


if __name__ == "__main__":
    main(*sys.argv[1:])
