"""The gradient noise scale against what it estimates, and a batch that follows it."""

import json
import shutil
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_train import CONFIG

from megabatch.batch import Step
from megabatch.config import Config, Noise
from megabatch.launch import run_local
from megabatch.noise import NoiseScale, following_batch
from megabatch.runs.folder import State
from megabatch.sync.control import StepNumbers
from megabatch.training import train


def test_the_estimate_is_the_truth_for_gaussian_gradients():
    """Gradients drawn around G with covariance S: the ratio must come out as tr(S) / |G|^2."""
    rng = numpy.random.default_rng(0)
    true = rng.normal(size=50)
    deviations = rng.uniform(0.5, 3.0, size=50)
    micro, count = 8, 16
    noise = NoiseScale()
    for _ in range(3000):
        gradients = true + deviations * rng.normal(size=(count, 50)) / micro**0.5
        squares = ((gradients / count) ** 2).sum()  # each is already divided by their number
        noise.update(squares, (gradients.mean(0) ** 2).sum(), count, micro, memory=0.999)
    expected = (deviations**2).sum() / (true**2).sum()
    assert noise.scale == pytest.approx(expected, rel=0.05)


def test_one_micro_batch_says_nothing_and_nor_does_an_overflow():
    noise = NoiseScale()
    noise.update(1.0, 1.0, 1, 16, 0.9)
    assert noise.scale is None
    noise.update(float("inf"), 1.0, 4, 16, 0.9)
    noise.update(1.0, float("nan"), 4, 16, 0.9)
    assert noise == NoiseScale()


FOLLOWING = Config(batch=64, micro=16, span=16, noise=Noise(True, least=32, most=256))


@given(st.sampled_from([32, 64, 128, 256]), st.floats(0.1, 1e6))
def test_the_batch_moves_by_two_within_bounds(batch, scale):
    after = following_batch(FOLLOWING, batch, scale)
    assert after in (batch, 2 * batch, batch // 2)
    assert 32 <= after <= 256
    if after == 2 * batch:
        assert scale >= 2 * batch
    if after == batch // 2:
        assert scale <= batch / 2


def test_it_settles():
    for scale in (10.0, 100.0, 180.0, 1e5):
        batch = 64
        for _ in range(10):
            batch = following_batch(FOLLOWING, batch, scale)
        assert following_batch(FOLLOWING, batch, scale) == batch
        assert batch == {10.0: 32, 100.0: 64, 180.0: 128, 1e5: 256}[scale]


def test_it_stays_while_the_scale_is_unknown():
    assert following_batch(FOLLOWING, 64, None) == 64


class Scales:
    """A noise scale that was made up, step by step."""

    def __init__(self, scales):
        self._scales, self.scale = iter(scales), None

    def update(self, *step):
        self.scale = next(self._scales)


def test_a_batch_at_the_edge_of_halving_does_not_alternate():
    """A step's numbers are read one step later, when the next has its batch: a scale that touches
    the edge for one step must not leave every other step with another batch."""
    scales = [129.0] * 4 + [127.0] + [200.0] * 20
    state = State(noise=Scales(scales), batch=256)
    waiting, taken = [], []
    for number in range(len(scales)):
        step = Step(number, number, state.batch, 0.0, 0)
        taken.append(step.batch)
        waiting.append(
            StepNumbers(step, 1.0, False, state.proposed, 1.0, 0.0, 0.0, 1.0, 1.0, False)
        )
        if len(waiting) > 1:
            state.learn(waiting.pop(0), FOLLOWING)
    assert taken[0] == 256 and taken[-1] == 128
    assert taken == sorted(taken, reverse=True)


# A share so large that the batch grows as fast as it may.
GROWING = replace(
    CONFIG,
    epochs=1,
    batch=32,
    stages=(),
    deterministic=True,
    save_every=0.02,
    keep=100,
    noise=Noise(True, least=32, most=128, multiple=1000.0, memory=0.5),
)


def batches(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["batch"] for line in lines if line["kind"] == "train"]


def resume(config, out):
    return train(config, out=out, resume=True, quiet=True)


def test_a_run_that_follows_the_noise_resumes_exactly(tmp_path):
    whole = tmp_path / "whole"
    summary = train(GROWING, out=whole, quiet=True)
    taken = batches(whole)
    assert taken[0] == 32 and taken[-1] == 128 and 64 in taken
    saved = sorted((whole / "checkpoints").iterdir())
    switch = taken.index(64)
    for place, world in ((switch - 1, 2), (switch, 3), (switch + 1, 1)):
        out = tmp_path / f"{place}"
        shutil.copytree(whole, out)
        for later in saved[place + 1 :]:
            shutil.rmtree(out / "checkpoints" / later.name)
        again = resume(GROWING, out) if world == 1 else run_local(world, resume, GROWING, out)
        assert again.weights_sha256 == summary.weights_sha256
        assert batches(out) == taken


def test_the_noise_scale_is_logged_and_undefined_for_one_micro_batch(tmp_path):
    train(replace(CONFIG, epochs=0.6, stages=()), out=tmp_path / "many", quiet=True)
    one = replace(CONFIG, epochs=0.2, batch=16, stages=(), lr=replace(CONFIG.lr, warmup=0))
    train(one, out=tmp_path / "one", quiet=True)

    def scales(name):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [r["noise_scale"] for r in map(json.loads, lines) if r["kind"] == "train"]

    assert scales("one") == [None] * len(scales("one"))
    assert any(scale is not None and scale > 0 for scale in scales("many"))
