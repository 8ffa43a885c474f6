"""A Lightning script as others write it; the Trainer itself starts the workers.

    python launched_lightning.py STRATEGY FOLDER [early]

early: the cluster is made before the Trainer starts its workers, and so has none but one.
"""

import sys

import lightning
import torch
from launched import RATE, WORLD, batches, loss_of, network, write
from torch.utils.data import DataLoader

from megabatch.cluster import Cluster
from megabatch.sync.ddp import GradSync


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return loss_of(self.net(batch))

    def train_dataloader(self):
        return DataLoader(batches(self.global_rank), batch_size=None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Attach(lightning.Callback):
    def __init__(self, folder, cluster):
        self.folder, self.cluster = folder, cluster

    def on_train_start(self, trainer, module):
        self.sync = GradSync(self.cluster or Cluster.from_env(), "torus")
        self.sync.attach(trainer.strategy.model)

    def on_train_end(self, trainer, module):
        write(self.folder, self.sync, module)
        self.sync.close()
        del self.sync


def main(strategy, folder, *early):
    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Attach(folder, Cluster.from_env() if early else None)],
    )
    trainer.fit(Module())


if __name__ == "__main__":
    main(*sys.argv[1:])
