"""What a run leaves behind: the caller's module, theirs again, and nothing else."""

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from test_train import CONFIG, WithDropout
from torch import nn
from waiting import PATIENCE_SECONDS

import megabatch as mb
from megabatch.cluster import Cluster
from megabatch.elastic.processes import children
from megabatch.errors import UserError
from megabatch.launch import run_local
from megabatch.optim import Layerwise
from megabatch.sync import heartbeat, lanes, senders
from megabatch.sync.buckets import GradientSum

SOON = PATIENCE_SECONDS / 4

SHORT = replace(
    CONFIG,
    epochs=0.2,
    stages=(),
    lr=replace(CONFIG.lr, warmup=0),
    save_every=0.1,
    deterministic=True,
)


class Plain:
    """A logger that does nothing."""

    def begin(self, about):
        pass

    def write(self, kind, record):
        pass

    def end(self, summary):
        pass


class Refuses(Exception):
    pass


class Failing(WithDropout):
    """Raises `error` in the pass of training with that number."""

    def __init__(self, at, error=Refuses):
        super().__init__()
        self.at, self.error, self.passes = at, error, 0

    def forward(self, x):
        self.passes += self.training
        if self.training and self.passes == self.at:
            raise self.error
        return super().forward(x)


def net_of(kind=WithDropout, *arguments):
    torch.manual_seed(5)
    return kind(*arguments)


def is_theirs_again(net):
    """Their own layers, modes and autograd, as in a module that no run has touched."""
    assert net.training and all(module.training for module in net.modules())
    assert type(net.body[1]) is nn.BatchNorm2d and type(net.head[1]) is nn.Dropout
    assert all(p.grad is None for p in net.parameters())
    untouched = net_of()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    untouched.load_state_dict(net.state_dict())
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    for module in (net, untouched):
        module.at = None
        torch.manual_seed(3)
        nn.functional.cross_entropy(module(images), labels).backward()
    for (name, p), q in zip(net.named_parameters(), untouched.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, b), c in zip(net.named_buffers(), untouched.buffers(), strict=True):
        assert torch.equal(b, c), name
    net.zero_grad()


SETTINGS = {
    "plain": {},
    "half weights": {"precision": "fp16", "half_weights": True},
    "average": {"ema": 0.9},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_net_is_its_owners_again_and_trains_again(setting):
    config = replace(SHORT, **SETTINGS[setting])
    net = net_of()
    before = copy.deepcopy(net)
    parameters = list(net.parameters())  # an optimizer of theirs may hold these
    first = mb.train(config, model=net, quiet=True)
    assert all(p is q for p, q in zip(net.parameters(), parameters, strict=True))
    copy.deepcopy(net), pickle.dumps(net)
    assert not torch.equal(net.head[2].weight, before.head[2].weight)
    assert not torch.equal(net.body[1].running_mean, before.body[1].running_mean)
    is_theirs_again(net)
    # From the same weights the second run is the first, and another config may follow.
    net.load_state_dict(before.state_dict())
    again = mb.train(config, model=net, quiet=True)
    assert again.weights_sha256 == first.weights_sha256
    mb.train(replace(SHORT, batch=32, span=16, bucket_mb=0.001), model=net, quiet=True)
    is_theirs_again(net)


def test_weights_are_laid_out_as_they_were(tmp_path):
    """Runs have convolutions channels-last; view(), safetensors and friends may not."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    before = [p.stride() for p in net.parameters()]
    config = replace(SHORT, deterministic=False, compile="never")
    mb.train(config, model=net, out=tmp_path / "run", quiet=True)
    assert [p.stride() for p in net.parameters()] == before
    told = mb.evaluate(tmp_path / "run", model=net)
    assert [p.stride() for p in net.parameters()] == before
    assert mb.evaluate(tmp_path / "run", model=net) == told


# A StopIteration is another error to any generator that it passes through.
@pytest.mark.parametrize("error", [Refuses, KeyboardInterrupt, MemoryError, StopIteration])
@pytest.mark.parametrize("at", [1, 2, 8])
def test_after_a_failure_too(error, at):
    net = net_of(Failing, at, error)
    for _ in range(2):
        with pytest.raises(error):
            mb.train(SHORT, model=net, quiet=True)
        is_theirs_again(net)
        net.at, net.passes = at, 0
    net.at = None
    assert mb.train(SHORT, model=net, quiet=True).ended == "finished"


def test_ctrl_c_ends_a_run_in_order_and_the_net_is_theirs(tmp_path):
    class Interrupted(WithDropout):
        asked = False

        def forward(self, x):
            if self.training and not self.asked:  # a second one, much later, would end the run
                self.asked = True
                signal.raise_signal(signal.SIGINT)
            return super().forward(x)

    handler = signal.getsignal(signal.SIGINT)
    net = net_of(Interrupted)
    summary = mb.train(SHORT, model=net, out=tmp_path / "run", quiet=True)
    assert (summary.ended, summary.steps) == ("stopped", 2)
    assert signal.getsignal(signal.SIGINT) is handler
    assert type(net.body[1]) is nn.BatchNorm2d


def test_a_frozen_backbone_stays_and_the_head_trains():
    net = net_of()
    for p in net.body.parameters():
        p.requires_grad = False
    before = copy.deepcopy(net)
    mb.train(SHORT, model=net, quiet=True)
    for p, q in zip(net.body.parameters(), before.body.parameters(), strict=True):
        assert torch.equal(p, q) and not p.requires_grad
    assert not torch.equal(net.head[2].weight, before.head[2].weight)
    for p in net.parameters():
        p.requires_grad = False
    with pytest.raises(UserError, match="no parameter that trains"):
        mb.train(SHORT, model=net, quiet=True)


def test_the_callers_randomness_and_threads_are_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    mb.train(SHORT, quiet=True)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_evaluate_needs_no_engine_and_gives_the_net_back(tmp_path, monkeypatch):
    out = tmp_path / "run"
    summary = mb.train(replace(SHORT, ema=0.5), model=net_of(), out=out, quiet=True)

    def refused(*_, **__):
        raise AssertionError("an evaluation trains nothing")

    # The classes themselves: a function may have been imported by whoever calls it.
    for kind in (GradientSum, Layerwise):
        monkeypatch.setattr(kind, "__init__", refused)
    net = net_of()
    assert mb.evaluate(out, model=net)["loss"] == summary.loss
    is_theirs_again(net)


class Extra(nn.Identity):
    def get_extra_state(self):
        return {"calls": 3}


def with_extra_state():
    net = net_of()
    net.body = Extra()
    return net


def with_a_complex_buffer():
    net = nn.Linear(64, 10)
    net.register_buffer("filter", torch.ones(3, dtype=torch.complex64))  # a cast would halve it
    return net


@torch.inference_mode()
def made_in_inference_mode():
    return nn.Linear(64, 10)


def scripted(net):
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(net)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("digits",), r"config is 'digits', not a Config: .*recipes\.digits\(\)"),
        ((None,), "config is none, not a Config"),
        ((SHORT, WithDropout), "model is the class WithDropout, not a module"),
        ((SHORT, "resnet50"), r"model is 'resnet50', not a torch\.nn\.Module"),
        ((SHORT, nn.DataParallel(WithDropout())), r"sums gradients .* itself: .*model\.module"),
        ((SHORT, lambda x: x), r"not a torch\.nn\.Module"),
        ((SHORT, nn.Sequential(nn.LazyLinear(10))), "the model's 0.weight has no values yet"),
        ((SHORT, nn.Linear(64, 10, device="meta")), "the model's weight has no values yet"),
        ((SHORT, nn.Linear(64, 10, dtype=torch.complex64)), "the model's weight is complex"),
        ((SHORT, with_a_complex_buffer()), "the model's filter is complex"),
        ((SHORT, [net_of()]), r"model is \[WithDropout\( \(body.*\], not a torch\.nn\.Module"),
        ((SHORT, scripted(net_of().body)), "the model's 1 is a BatchNorm2d in a graph of"),
        ((SHORT, with_extra_state()), "the model's body._extra_state is a dict, and checkpoints"),
        ((SHORT, made_in_inference_mode()), "the model's weight was made in torch.inference_mode"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(UserError, match=words) as refused:
        mb.train(*arguments)
    assert "\n" not in str(refused.value)


def test_what_is_no_cluster_is_refused_in_a_sentence():
    with pytest.raises(
        UserError, match=r"cluster is 2, not a Cluster: give what Cluster\.from_env"
    ):
        mb.train(SHORT, cluster=2)


class Answers(WithDropout):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(super().forward(x))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda logits: (logits, logits), "gives a tuple for 16 images"),
        (lambda logits: {"logits": logits}, "gives a dict for 16 images"),
        (lambda logits: logits.argmax(1), r"gives \(16,\) for 16 images"),
        (lambda logits: logits[:8], r"gives \(8, 10\) for 16 images"),
        (lambda logits: logits.detach(), "logits do not depend on a parameter that trains"),
    ],
)
def test_a_net_that_gives_no_logits_is_named(answer, words):
    with pytest.raises(UserError, match=words):
        mb.train(SHORT, model=Answers(answer), quiet=True)


def test_a_checkpoint_of_another_net_is_no_reason_to_remove_it_first(tmp_path):
    mb.train(SHORT, model=net_of(), out=tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"does not fit .* with the model it was trained with"):
        mb.evaluate(tmp_path / "run", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_caller_who_has_turned_gradients_off_can_train(off):
    net = net_of()
    before = net.head[2].weight.detach().clone()
    with off():
        mb.train(SHORT, model=net, quiet=True)
        assert not torch.is_grad_enabled()
    assert not torch.equal(net.head[2].weight, before)


class DropsTwice(nn.Module):
    """One layer of dropout in two places, and on rows that are parts of images."""

    def __init__(self):
        super().__init__()
        self.drop, self.head, self.alike = nn.Dropout(0.5), nn.Linear(64, 10), []

    def forward(self, x):
        parts = self.drop(x.reshape(-1, 16)).reshape(len(x), 64)
        masks = [self.drop(torch.ones(len(x), 64)) > 0 for _ in range(2)]
        if self.training:
            self.alike.append(float((masks[0] == masks[1]).float().mean()))
        return self.head(parts * masks[0] * masks[1])


def test_a_layer_of_dropout_may_be_called_again_and_on_any_shape():
    net = net_of(DropsTwice)
    before = copy.deepcopy(net)
    first = mb.train(SHORT, model=net, quiet=True)
    assert 0.4 < sum(net.alike) / len(net.alike) < 0.6  # masks of their own
    assert mb.train(SHORT, model=before, quiet=True).weights_sha256 == first.weights_sha256


def with_another_head(net):
    net.head[2] = nn.Linear(net.head[2].in_features, 10)


class Pointwise(nn.Conv2d):
    def forward(self, x):
        return super().forward(x[:, :, None, None]).flatten(1)


def with_a_head_of_other_dimensions(net):
    net.head[2] = Pointwise(net.head[2].in_features, 10, 1)


def with_one_more(net):
    net.more = nn.Linear(2, 2)


def with_a_frozen_head(net):
    net.head[2].requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_another_head, "the model's head.2.weight was replaced while the run went on"),
        (with_a_head_of_other_dimensions, "the model's head.2.weight was replaced"),
        (with_one_more, "the model's more.weight was added or removed"),
        (with_a_frozen_head, "the model's head.2.weight was frozen"),
    ],
)
def test_a_net_that_is_changed_in_mid_run_is_one_sentence(change, words):
    """In a callback, say: the run would go on training what is no part of the net any more."""
    net = net_of()

    class Changes(Plain):
        def write(self, kind, record):
            if kind == "train" and record["step"] == 1:
                change(net)

    with pytest.raises(UserError, match=words) as refused:
        mb.train(SHORT, model=net, quiet=True, loggers=[Changes()])
    assert "\n" not in str(refused.value)


def test_what_was_frozen_and_is_made_to_train_in_mid_run_is_one_sentence():
    net = net_of()
    net.body[0].requires_grad_(False)

    class Thaws(Plain):
        def write(self, kind, record):
            net.body[0].requires_grad_(True)

    with pytest.raises(UserError, match=r"the model's body\.0\.weight was made to train"):
        mb.train(SHORT, model=net, quiet=True, loggers=[Thaws()])


def test_a_callers_default_device_is_not_the_runs():
    first = mb.train(SHORT, model=net_of(), quiet=True)
    bundled = mb.train(SHORT, quiet=True)
    net = net_of()
    with torch.device("meta"):
        second = mb.train(SHORT, model=net, quiet=True)
        assert torch.ones(1).is_meta  # it is theirs again
        assert mb.train(SHORT, quiet=True).weights_sha256 == bundled.weights_sha256
    assert second.weights_sha256 == first.weights_sha256
    torch.set_default_device("meta")
    try:
        assert mb.train(SHORT, quiet=True).weights_sha256 == bundled.weights_sha256
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_callers_default_dtype_is_not_the_runs(dtype):
    scaled = replace(SHORT, precision="fp16")
    bundled, half = mb.train(SHORT, quiet=True), mb.train(scaled, model=net_of(), quiet=True)
    net = net_of()
    torch.set_default_dtype(dtype)
    try:
        assert mb.train(SHORT, quiet=True).weights_sha256 == bundled.weights_sha256
        assert mb.train(scaled, model=net, quiet=True).weights_sha256 == half.weights_sha256
        assert torch.ones(1).dtype == dtype  # it is theirs again
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", b"bytes", 3])
def test_what_no_folder_can_be_called_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"out is .*, which is no name of a folder") as refused:
        mb.train(SHORT, model=net_of(), out=name, quiet=True)
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"run is .*, which is no name of a folder"):
        mb.evaluate(name)
    assert not any(tmp_path.iterdir())


def test_a_callers_autocast_is_not_the_runs():
    first = mb.train(SHORT, model=net_of(), quiet=True)
    net = net_of()
    with torch.autocast("cpu", torch.bfloat16):
        second = mb.train(SHORT, model=net, quiet=True)
        assert net(torch.ones(2, 1, 8, 8)).dtype == torch.bfloat16  # it is theirs again
    assert second.weights_sha256 == first.weights_sha256


def _rounds_all():
    torch.set_float32_matmul_precision("medium")  # as Lightning advises


def _rounds_on_a_cpu():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


def _rounds_nothing_on_a_gpu():
    torch.backends.cudnn.allow_tf32 = False


def _rounds_some_on_a_gpu():
    torch.backends.cudnn.conv.fp32_precision = "ieee"


@pytest.fixture
def products_as_they_were():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for place in (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv):
        place.fp32_precision = "none"


def _products():
    on_cpu, on_gpu = torch.backends.mkldnn, torch.backends.cudnn
    places = on_cpu.matmul, on_cpu.conv, on_gpu.conv, on_gpu.rnn
    return tuple(place.fp32_precision for place in places)


def _products_by(words, trains):
    """As a caller's words leave them, who trains behind the first of them, or does not."""
    for number, (place, precision) in enumerate(words):
        place = torch.backends if place == "all" else getattr(torch.backends, place)
        place.fp32_precision = precision
        if trains and number == 0:
            mb.train(replace(SHORT, deterministic=True), quiet=True)
    return _products()


@pytest.mark.parametrize(
    "words",
    [
        [("all", "tf32"), ("all", "ieee")],
        [("mkldnn", "bf16"), ("mkldnn", "ieee")],
        [("all", "none"), ("all", "bf16")],
    ],
    ids=["rounded", "on a CPU", "nothing"],
)
def test_what_follows_from_a_callers_word_follows_from_the_next(words):
    assert run_local(1, _products_by, words, True) == run_local(1, _products_by, words, False)


@pytest.mark.parametrize(
    "rounds", [_rounds_all, _rounds_on_a_cpu, _rounds_nothing_on_a_gpu, _rounds_some_on_a_gpu]
)
def test_a_callers_rounded_products_are_not_a_deterministic_runs(rounds, products_as_they_were):
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append(_products())
            return super().forward(x)

    config = replace(CONFIG, deterministic=True)
    fresh = _products()
    rounds()
    before = _products()
    assert before != fresh
    mb.train(config, model=nn.Sequential(nn.Flatten(), Looks(64, 10)), quiet=True)
    (during,) = set(seen)
    assert set(during[:2]) <= {"ieee", "none"}  # none: nobody has said anything
    assert during[2:] == ("tf32", "tf32")
    assert _products() == before
    if rounds is _rounds_all:
        assert torch.get_float32_matmul_precision() == "medium"
    if rounds is _rounds_nothing_on_a_gpu:
        assert torch.backends.cudnn.allow_tf32 is False


class Halves(nn.Module):
    """Looks whether autocast computes with the weights as they are now."""

    def __init__(self):
        super().__init__()
        self.head, self.right = nn.Linear(64, 10), []

    def forward(self, x):
        found = self.head(x.flatten(1))
        with torch.autocast("cpu", enabled=False):
            now = [t.detach().bfloat16() for t in (x.flatten(1), self.head.weight, self.head.bias)]
            self.right.append(torch.equal(found, nn.functional.linear(*now)))
        return found


class OwnHalves(Halves):
    forward = torch.autocast("cpu", torch.bfloat16)(Halves.forward)


@pytest.mark.parametrize("around", [contextlib.nullcontext(), torch.autocast("cpu")])
@pytest.mark.parametrize("kind,precision", [(Halves, "bf16"), (OwnHalves, "fp32")])
def test_each_pass_in_half_precision_sees_the_weights_as_they_are(
    kind, precision, around, tmp_path
):
    """Autocast keeps half copies of weights until the outermost one ends: those of the first step
    must not be those of the last, nor of an evaluation behind it."""
    net = net_of(kind)
    with around:
        mb.train(replace(SHORT, precision=precision), model=net, out=tmp_path / "run", quiet=True)
        mb.evaluate(tmp_path / "run", model=net)
    assert len(net.right) > 4 and all(net.right)


def test_two_runs_in_two_threads_are_refused():
    """They would draw from one generator: neither would be the run that it is alone."""
    refused = []

    class Meanwhile(WithDropout):
        def forward(self, x):
            if self.training and not refused:
                thread = threading.Thread(target=another)
                thread.start()
                thread.join()
            return super().forward(x)

    def another():
        with pytest.raises(UserError, match="another thread of this process trains") as error:
            mb.train(SHORT, model=net_of(), quiet=True)
        refused.append(error)

    mb.train(SHORT, model=net_of(Meanwhile), quiet=True)
    assert len(refused) == 1
    mb.train(SHORT, model=net_of(), quiet=True)


# --- nothing is left --------------------------------------------------------------------------


def left():
    """How many threads, child processes, open files, areas of shared memory and tensors this
    process has, by name; and what it does at a signal."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return Counter(
        [
            *(("thread", thread.name) for thread in threading.enumerate()),
            *(("child", number) for number in children(os.getpid())),
            # Without their numbers: after a failure one process group is left until the next run.
            *(("file", name.split("[")[0]) for name in _open_files()),
            *(("shared memory", line.split()[-1]) for line in mapped if "/dev/shm" in line),
            *(
                ("tensor", "")
                for found in gc.get_objects()
                if issubclass(type(found), torch.Tensor)
            ),
            *(("at a signal", signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)),
        ]
    )


def _open_files():
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            yield os.readlink(f"/proc/self/fd/{fd}")


def runs(folder, plan):
    """What there is more of on this worker after ten runs, and after ten that fail, than after the
    first two of each."""
    cluster = Cluster.from_env()
    config = replace(
        SHORT,
        epochs=0.1,  # two steps
        data=replace(SHORT.data, val_share=0.05),
        deterministic=plan == "tree",
        plan="backend" if plan == "tree" else plan,
    )
    images = [(torch.full((1, 8, 8), float(i % 7)), i % 10) for i in range(400)]

    def one(number, fails):
        net = net_of(Failing, 2 if fails else None)
        data = images if number % 2 else None
        out = folder / f"{fails}-{number}"
        try:
            mb.train(config, net, data, cluster=cluster, out=out, quiet=True)
            assert not fails
        except Refuses:
            assert fails

    found = []
    for fails in (False, True):
        for number in range(2):  # torch and the process group open some things once
            one(number, fails)
        # What is still ending now may be counted: ten times as much would be left of each.
        before = left()
        for number in range(2, 12):
            one(number, fails)
        found.append(more_than(before))
    return found


def more_than(before):
    """When threads and connections that are ending have ended, or never do."""
    deadline = time.monotonic() + SOON
    while (more := left() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {kind: count for (kind, _), count in more.items()}


def test_ten_runs_in_one_process_leave_nothing(tmp_path):
    assert runs(tmp_path, "tree") == [{}, {}]


def runs_on_workers(folder, plan):
    torch.set_num_threads(1)
    # Whoever closes waits for the other worker for as long as that takes.
    lanes._PATIENCE_SECONDS = senders._PATIENCE_SECONDS = heartbeat._PATIENCE_SECONDS = SOON
    found = runs(folder / os.environ["RANK"], plan)
    return Cluster.from_env().gather(found)


@pytest.mark.systems
@pytest.mark.parametrize("plan", ["tree", "backend"])
def test_ten_runs_on_two_workers_leave_nothing(tmp_path, plan):
    assert run_local(2, runs_on_workers, tmp_path, plan) == 2 * [[{}, {}]]


def test_an_engine_lets_go_at_any_moment():
    """Before a step, in its middle, after it, and again."""
    for moment in range(4):
        net = nn.Linear(3, 2)
        alone = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))
        with GradientSum(net, alone, tree=True) as engine:
            if moment > 0:
                engine.begin(2)
            if moment > 1:
                engine.backward(net(torch.ones(1, 3)).sum(), torch.zeros(3))
            if moment > 2:
                engine.backward(net(torch.ones(1, 3)).sum(), torch.zeros(3))
                engine.finish()
                assert net.weight.grad is not None
        engine.close()
        assert net.weight.grad is None
        net(torch.ones(1, 3)).sum().backward()
        assert torch.equal(net.weight.grad, torch.ones(2, 3))


def test_all_of_a_callers_net_trains_from_the_first_step_on():
    modes = []

    class Noting(nn.Module):
        def forward(self, x):
            modes.append(self.training)
            return x

    net = nn.Sequential(nn.Conv2d(1, 4, 3), Noting(), nn.Flatten(), nn.Linear(144, 10))
    net[1].eval()
    mb.train(replace(SHORT, eval_every=0), net, quiet=True)
    assert not net[1].training  # as it was
    evaluation = modes.index(False)
    assert all(modes[:evaluation]) and not any(modes[evaluation:])


class WithSpares(WithDropout):
    """Has layers that no forward uses, and one that every other pass does."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 4)
        self.at_times = nn.Parameter(torch.zeros(10))
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        out = super().forward(x)
        return out + self.at_times if self.training and self.passes % 2 == 0 else out


class Seldom(WithDropout):
    """Comes to a part of itself for some images alone, and can raise in a pass."""

    def __init__(self, at=None):
        super().__init__()
        self.seldom = nn.Linear(64, 10)
        self.at, self.passes, self.reached = at, 0, []

    def forward(self, x):
        self.passes += self.training
        if self.training and self.passes == self.at:
            raise Refuses
        reaches = float(x[0].sum()) > -50
        self.reached.append(reaches)
        found = super().forward(x)
        return found + self.seldom(x.flatten(1)) if reaches else found


SELDOM = replace(
    SHORT,
    epochs=0.5,
    save_every=0.1,
    optimizer=replace(SHORT.optimizer, weight_decay=0.05, momentum_correction=True),
)


def seldom_run(config, out=None, at=None, resume=False):
    return mb.train(
        config, model=net_of(Seldom, at), out=out, resume=resume, quiet=True
    ).weights_sha256


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_seldom_reached_ends_alike_on_any_workers_and_when_resumed(setting, tmp_path):
    config = replace(SELDOM, **SETTINGS[setting])
    net = net_of(Seldom)
    mb.train(config, model=net, quiet=True)
    passes = [net.reached[at : at + 5] for at in range(0, 5 * (net.passes // 5), 5)]  # of a step
    steps = {any(step) for step in passes}
    assert steps == {True, False}, net.reached
    alone = seldom_run(config)
    for world in (2, 3):
        assert run_local(world, seldom_run, config) == alone
    with pytest.raises(Refuses):
        seldom_run(config, tmp_path / "run", at=23)
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    assert seldom_run(config, tmp_path / "run", resume=True) == alone


@pytest.mark.parametrize("micros", [1, 2])
def test_parameters_that_no_pass_reaches_are_named(micros, capfd):
    """They stay as they are, as torch leaves them: not without a word."""
    config = replace(SHORT, save_every=0, deterministic=False, micro=SHORT.batch // micros)
    mb.train(config, model=net_of(WithSpares))
    lines = [line for line in capfd.readouterr().err.splitlines() if "does not depend" in line]
    seldom = "at_times, " if micros == 1 else ""  # the first pass does without it
    assert len(lines) == 1
    assert f"on {seldom}spare.weight, spare.bias: what no pass" in lines[0]
    mb.train(config, model=net_of())
    assert "does not depend" not in capfd.readouterr().err


class Counting(WithDropout):
    """Keeps buffers of its own, as a spectral norm, an instance norm or a queue of features does:
    changed in place or put anew, of any dtype, in every pass; and one that is drawn when it is
    made, and that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.scale = nn.utils.parametrizations.spectral_norm(nn.Linear(10, 10))
        self.old_scale = nn.utils.spectral_norm(nn.Linear(10, 10))
        self.averages = nn.InstanceNorm2d(1, track_running_stats=True)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(8, 8))
        self.register_buffer("steady", torch.arange(10.0))
        self.register_buffer("expanded", torch.rand(1, 1, 8, 1).expand(1, 1, 8, 8))
        self.register_buffer("table", torch.zeros(1))
        self.register_buffer("strided", torch.randn(10, 2)[:, 0])
        self.register_buffer("drawn", torch.randn(10), persistent=False)

    def forward(self, x):
        if self.training:
            self.passes += 1
            self.seen[int(self.passes) % 3] = True
            self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))  # another tensor
            self.table = torch.arange(len(x))  # of another shape
        x = self.averages(x - self.mean)
        found = self.old_scale(self.scale(super().forward(x * self.expanded)))
        return found + 0.01 * (self.steady + self.strided + self.drawn)


COUNTING = replace(SHORT, epochs=0.5, eval_every=0.2, save_every=0)


def counting_run(cluster, config):
    """How it ended, and what the net itself has then."""
    torch.manual_seed(cluster.rank)  # a script need not think of it: the first worker's count
    net = Counting()
    summary = mb.train(config, model=net, quiet=True, cluster=cluster)
    buffers = [buffer.tolist() for name, buffer in net.named_buffers() if name != "table"]
    return summary.weights_sha256, summary.loss, int(net.passes), buffers


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("micros", [5, 1])  # of a step; with one, all workers but one are idle
def test_buffers_that_a_net_changes_itself_end_alike_on_any_workers(micros):
    config = replace(COUNTING, micro=COUNTING.batch // micros)
    alone = counting_run(Cluster.from_env(device="cpu"), config)
    steps = mb.train(config, quiet=True).steps
    assert alone[2] == steps > 1  # once a step, not once a pass
    for world in (2, 3):
        for ended in run_ranks(counting_run, world, config):
            assert ended == alone
    # Channels last and back: what is expanded cannot be written to where it lay.
    counting_run(Cluster.from_env(device="cpu"), replace(config, deterministic=False))
