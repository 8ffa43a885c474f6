"""GradSync in other people's loops: plain DDP, Accelerate and Lightning; the choice of a plan."""

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from waiting import PATIENCE_SECONDS

from megabatch.errors import UserError
from megabatch.plans import HIERARCHICAL, PLANS, RING, THREE_PHASE, TORUS, through
from megabatch.plans.names import named
from megabatch.sync.choice import Choice, choose_plan, fastest_by_size
from megabatch.sync.ddp import GradSync

EXAMPLE = Path(__file__).parents[1] / "examples" / "ddp_script.py"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 30), nn.Linear(30, 7))


def inputs(rank, integers):
    generator = torch.Generator().manual_seed(100 + rank)
    if integers:
        return torch.randint(-2, 3, (6, 40), generator=generator).float()
    return torch.randn(6, 40, generator=generator)


def gradients(model, rank, integers):
    """All gradients after three backwards, the last of them counts (DDP builds its buckets anew
    after the first)."""
    for _ in range(3):
        model.zero_grad()
        model(inputs(rank, integers)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def with_and_without(cluster, grid, plan, wire, integers):
    """Gradients by GradSync and by plain DDP."""
    cluster = replace(cluster, grid=grid)
    net = network()
    if integers:
        for p in net.parameters():
            p.data = (p.data * 20).round()
    nets = [DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.01) for _ in range(2)]
    with GradSync(cluster, plan, wire) as sync:
        sync.attach(nets[0])
        return [gradients(model, cluster.rank, integers) for model in nets]


@pytest.mark.parametrize("plan", [*PLANS, "torus:halving_doubling", "ring:backend", "hybrid"])
def test_integer_gradients_through_ddp_are_exactly_those_of_plain_ddp(plan):
    for ours, plain in run_ranks(with_and_without, 4, (2, 2), plan, "fp32", True):
        assert plain.abs().max() > 100
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(("wire", "bound"), [("fp32", 1e-6), ("fp16", 1e-2), ("bf16", 1e-2)])
@pytest.mark.parametrize("grid", [(2, 3), (1, 4)])
def test_gradients_through_ddp_are_those_of_plain_ddp_up_to_rounding(grid, wire, bound):
    results = run_ranks(with_and_without, grid[0] * grid[1], grid, "torus", wire, False)
    for ours, plain in results:
        assert (ours - plain).norm() <= bound * plain.norm()
        assert torch.equal(ours, results[0][0])


def half_parameters(cluster):
    model = DistributedDataParallel(network().bfloat16())
    with GradSync(cluster, "torus") as sync:
        sync.attach(model)
        model(inputs(cluster.rank, True).bfloat16()).sum().backward()
    return model.module[3].bias.grad.tolist()


def test_half_gradients_stay_half_and_are_averaged():
    assert run_ranks(half_parameters, 2) == [[6.0] * 7] * 2


# ---------------------------------------------------------------- which plan


def test_a_name_may_carry_its_wiring():
    assert named("torus:halving_doubling", "gloo") == through(TORUS, "halving_doubling")
    assert named("torus", "nccl") == TORUS
    assert named("torus", "gloo") == through(TORUS, "ring")
    assert named("three_phase", "gloo")[1] == THREE_PHASE[1]  # says how it goes, and is left so


def test_hybrid_chooses_by_size():
    thresholds = [(100, "hierarchical:ring"), (1000, "ring:ring"), (None, "torus:ring")]
    choice = choose_plan("hybrid", "gloo", thresholds=thresholds)
    expected = {1: HIERARCHICAL, 100: HIERARCHICAL, 101: RING, 1000: RING, 1001: TORUS}
    for nbytes, plan in expected.items():
        assert choice.plan(nbytes) == through(plan, "ring")
    usual = choose_plan("hybrid", "gloo")
    assert usual.plan(64 << 10) != usual.plan(100 << 20)


@pytest.mark.parametrize(
    "rows", [[], [(10, "ring")], [(10, "ring"), (10, "torus"), (None, "ring")]]
)
def test_thresholds_must_grow_and_end(rows):
    with pytest.raises(UserError, match="must grow and end"):
        choose_plan("hybrid", "gloo", thresholds=rows)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("tours", "did you mean torus"),
        ("torus:rings", "there is no wiring 'rings': did you mean ring"),
        (TORUS[:2], "never closed"),
        ("auto", "nowhere.json, which does not exist: run megabatch bench sync"),
    ],
)
def test_a_plan_that_is_none_is_refused_in_one_sentence(plan, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        choose_plan(plan, "gloo", machine="nowhere.json")


def test_the_fastest_plan_of_each_size_is_chosen_and_sizes_between_go_to_the_nearer():
    def row(nbytes, plan, seconds):
        return {"nbytes": nbytes, "plan": plan, "seconds": seconds}

    choice = fastest_by_size(
        [
            row(100, "torus:ring", 3.0),
            row(100, "ring:ring", 2.0),
            row(10000, "torus:ring", 5.0),
            row(10000, "ring:ring", 6.0),
        ]
    )
    small, large = through(RING, "ring"), through(TORUS, "ring")
    assert [choice.plan(nbytes) for nbytes in (1, 100, 1000)] == [small] * 3
    assert [choice.plan(nbytes) for nbytes in (1001, 10000, 10**9)] == [large] * 2 + [large]
    assert choice.digest() == Choice(((1000, small), (None, large))).digest()


def measured_choice(cluster, path):
    # Only the first rank has the file: it decides for all.
    mine = path if cluster.first else "nowhere.json"
    with GradSync(replace(cluster, grid=(1, 2)), "auto", machine=mine) as sync:
        return sync.choice


def test_auto_takes_what_rank_0_measured(tmp_path):
    path = tmp_path / "machine.json"
    rows = [
        {"grid": [1, 2], "nbytes": 10, "plan": "ring:ring", "seconds": 1.0},
        {"grid": [2, 1], "nbytes": 10, "plan": "torus:ring", "seconds": 0.5},
    ]
    path.write_text(json.dumps({"format": "megabatch-machine-1", "plans": rows}))
    assert (
        run_ranks(measured_choice, 2, str(path)) == [Choice(((None, through(RING, "ring")),))] * 2
    )
    with pytest.raises(UserError, match="has no plans measured on a 3 x 1 grid"):
        choose_plan("auto", "gloo", machine=path, grid=(3, 1))


# ---------------------------------------------------------------- other people's loops


def test_the_example_adds_at_most_five_lines_and_learns():
    added = [line for line in EXAMPLE.read_text().splitlines() if line.endswith("# megabatch")]
    assert 1 <= len(added) <= 5
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.2


def same_weights(with_sync, without):
    """Four steps summed by us end as four steps of plain DDP: two workers have one order."""
    start = torch.cat([p.detach().flatten() for p in network().parameters()])
    assert [steps for steps, _ in with_sync] == [4, 4]
    assert [steps for steps, _ in without] == [0, 0]
    for _, weights in with_sync:
        assert torch.equal(weights, without[0][1])
        assert not torch.equal(weights, start)


def accelerate_loop(cluster, sync):
    """An ordinary Accelerate loop; GradSync is attached after prepare()."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    model, data = network(), torch.randn(32, 40, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(data), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(model, DistributedDataParallel)
    ours = GradSync(cluster, "torus")
    if sync:
        ours.attach(model)
    for (images,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(images).square().mean())
        optimizer.step()
    ours.close()
    return ours.steps, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_an_accelerate_loop_ends_with_the_same_weights():
    same_weights(run_ranks(accelerate_loop, 2, True), run_ranks(accelerate_loop, 2, False))


def lightning_run(cluster, folder, sync):
    """A Lightning fit on the workers that are there; GradSync is attached by a callback."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    class Attach(lightning.Callback):
        def on_train_start(self, trainer, module):
            ours.attach(trainer.strategy.model)

    class Standing(LightningEnvironment):
        """The workers have been started, and know their ranks."""

        creates_processes_externally = True
        world_size, global_rank, local_rank = (
            lambda self: cluster.world,
            lambda self: cluster.rank,
            lambda self: cluster.rank,
        )

    ours = GradSync(cluster, "torus")
    data = torch.randn(32, 40, generator=torch.Generator().manual_seed(5))
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=cluster.world,
        strategy="ddp",
        plugins=[Standing()],
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Attach()] if sync else [],
    )
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    ours.close()
    return ours.steps, torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_lightning_run_ends_with_the_same_weights(tmp_path):
    folder = str(tmp_path)
    same_weights(
        run_ranks(lightning_run, 2, folder, True), run_ranks(lightning_run, 2, folder, False)
    )
