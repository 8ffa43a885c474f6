"""Silent divergence: any flipped bit is seen; a run whose workers differ names them and stops."""

import os
import platform
import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from test_train import CONFIG
from torch import nn

from megabatch.batch import Stage, step_at
from megabatch.cluster import Cluster
from megabatch.data.opening import open_sources
from megabatch.elastic.supervisor import Losses
from megabatch.elastic.worlds import join_others
from megabatch.errors import RunFailed
from megabatch.launch import run_local
from megabatch.runs import checkpoint
from megabatch.sync.replicas import Replicas, checksum
from megabatch.training import train

CPU = torch.device("cpu")
KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
shapes = st.lists(st.integers(1, 5), max_size=4)


def by_numpy(tensors):
    """The same, a byte at a time: words of eight, then what is left."""
    total = 0
    for index, tensor in enumerate(tensors):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        whole = len(data) // 8 * 8
        words = int(np.frombuffer(data[:whole], "<i8").astype(object).sum()) if whole else 0
        total += (2 * index + 1) * (words + sum(data[whole:]))
    return (total + 2**63) % 2**64 - 2**63


@given(st.lists(st.tuples(st.sampled_from(KINDS), shapes), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_changes_the_checksum(kinds, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    tensors = [(100 * torch.randn(shape, generator=generator)).to(kind) for kind, shape in kinds]
    before = checksum(tensors, CPU).item()
    assert before == by_numpy(tensors)
    chosen = data.draw(st.sampled_from(tensors))
    bits = chosen.view(-1).view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(tensors, CPU).item() != before


def test_what_one_tensor_loses_another_does_not_make_up_for():
    a, b = torch.tensor([5]), torch.tensor([9])
    assert checksum([a, b], CPU) != checksum([a + 1, b - 1], CPU)


def test_the_layout_in_memory_does_not_matter_where_it_is_the_same():
    picture = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    view = torch.randn(100)[1:51]  # not where words begin
    assert checksum([picture, view], CPU) == checksum([picture.clone(), view], CPU)


def compared(cluster, spoilt):
    weights = torch.arange(10.0)
    weights[3] += cluster.rank in spoilt
    replicas = Replicas(cluster, every=2)
    assert not replicas.due(3) and replicas.due(4)
    replicas.compare(2, [torch.ones(3)])
    replicas.compare(4, [weights])
    found = replicas.read()
    assert replicas.read() is None
    return found and (found.step, found.differing())


@pytest.mark.parametrize(
    ("world", "spoilt", "named"),
    [
        (3, [], None),
        (3, [1], (4, (1,))),
        (3, [0, 2], (4, (1,))),  # the majority is right
        (2, [1], (4, (0, 1))),  # there is none
    ],
)
def test_the_ranks_that_differ_from_the_majority_are_named(world, spoilt, named):
    assert run_ranks(compared, world, spoilt) == [named] * world


class Spoilt(nn.Sequential):
    """A net one of whose bits flips on one rank, in the pass with that number."""

    def __init__(self, rank, at):
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
        self.rank, self.at, self.passes = rank, at, 0

    def forward(self, images):
        self.passes += self.training
        if os.environ["RANK"] == str(self.rank) and self.passes == self.at:
            self[3].weight.data.view(torch.int32)[2, 5] ^= (
                1 << 20
            )  # the last bits a step may round away
        return super().forward(images)


# Every worker has one micro-batch of each of some fifteen steps.
RUN = replace(CONFIG, deterministic=True, batch=48, stages=(), epochs=0.5, eval_every=0)


def diverging(config, rank, at, out):
    train(config, Spoilt(rank, at), out=out, quiet=True)


def test_a_run_stops_when_a_bit_of_one_worker_flips(tmp_path):
    """Here in the ninth step, of which a checkpoint is due at each; none is saved from then on."""
    config = replace(RUN, compare_every=1000, save_every=0.01, keep=1000)
    with pytest.raises(RunFailed) as failed:
        run_local(3, diverging, config, 1, 9, tmp_path / "run")
    place = re.escape(f"{tmp_path}/run/checkpoints/seen-{8 * 48:012d}")
    assert re.fullmatch(
        rf"after step 9 rank 1 \({re.escape(platform.node())}\) no longer holds the weights of the "
        rf"others: .*; the last checkpoint that agreed is {place} \(--resume\); .*",
        str(failed.value),
    )
    assert checkpoint.seen(checkpoint.newest(tmp_path / "run" / "checkpoints")) == 8 * 48
    # Gone on with, by machines that are whole: as if nothing had been.
    again = run_local(3, going_on, config, tmp_path / "run")
    assert again == run_local(3, going_on, config, tmp_path / "whole")


def going_on(config, out):
    return train(config, Spoilt(-1, 0), out=out, resume=True, quiet=True).weights_sha256


class SpoiltAndLost(Spoilt):
    """Two passes later another rank is killed."""

    def __init__(self, rank, at, lost):
        super().__init__(rank, at)
        self.lost = lost

    def forward(self, images):
        out = super().forward(images)
        if os.environ["RANK"] == str(self.lost) and self.passes == self.at + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return out


def diverging_and_lost(config, lost):
    cluster = join_others(device="cpu")
    try:
        train(config, SpoiltAndLost(1, 3, lost), cluster=cluster, quiet=True)
    finally:
        cluster.leave()


# Rank 1's bit flips in the third step; rank 0 is killed in the fifth, before anybody has read what
# was compared after the fourth.
LOST = {
    "a comparison that nobody has read": (4, r"after step 4 rank 1 \(\S+\) no longer holds"),
    "nothing compared yet": (
        1000,
        r"after step 4 rank 0 \(\S+\) and rank 1 \(\S+\) no longer hold the same weights, and no "
        r"majority does",
    ),
}


@pytest.mark.parametrize(("every", "sentence"), LOST.values(), ids=LOST)
def test_those_that_a_lost_worker_leaves_are_compared_before_one_is_copied(every, sentence):
    config = replace(RUN, compare_every=every, save_every=0)
    with pytest.raises(RunFailed, match=sentence):
        run_local(3, diverging_and_lost, config, 0, losses=Losses(3))


def test_those_that_are_left_may_agree():
    """The one that differed is the one that was lost."""
    config = replace(RUN, compare_every=1000, save_every=0)
    run_local(3, diverging_and_lost, config, 1, losses=Losses(3))


def test_a_change_of_the_number_of_workers_forgets_no_comparison():
    """After the last step of a stage, one that nobody has read."""
    stages = (Stage(0.25, 96),)
    config = replace(RUN, stages=stages, compare_every=1, save_every=0)
    steps = step_of_stage(config, 1)
    with pytest.raises(RunFailed, match=rf"after step {steps} rank 1 .* no longer holds"):
        run_local(3, changing, config, steps, by_stage=(3, 2))


def step_of_stage(config, stage):
    """The first step of a stage, counted from 0."""
    images = len(open_sources(config, None, Cluster.from_env(device="cpu"))[0])
    index, seen = 0, 0
    while (step := step_at(config.all_stages, images, index, seen, None)).stage < stage:
        index, seen = index + 1, seen + step.batch
    return index


def changing(config, at):
    cluster = join_others(device="cpu")
    try:
        train(config, Spoilt(1, at), cluster=cluster, quiet=True)
    finally:
        cluster.leave()


def test_between_checkpoints_workers_are_compared_every_so_many_steps():
    config = replace(RUN, compare_every=4, save_every=0)
    with pytest.raises(RunFailed, match=r"after step 8 rank 2 .* no longer holds the weights"):
        run_local(3, diverging, config, 2, 6, None)


def test_no_comparison_is_made_where_none_is_wanted(tmp_path):
    run_local(3, diverging, replace(RUN, compare_every=0), 1, 6, tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()
