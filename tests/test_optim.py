"""LARS, LARC and LAMB against float64 references in numpy that share no code with them.

Where equality can be exact (SGD, resuming, scaling by powers of two) it is asked for bit by bit.
"""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megabatch.errors import UserError
from megabatch.optim import LAMB, LARS, Muon, parameter_groups

SHAPES = [(64, 32), (16, 3, 3, 3), (257,), (12, 1)]
RATES = [8.0 * (i + 1) / 20 for i in range(20)] + [8.0 * (1 - i / 180) ** 2 for i in range(180)]


def draw(shapes, steps, seed=0):
    """Weights, and for each step their gradients, all float32: sizes differ widely, as in a net."""
    rng = np.random.default_rng(seed)

    def normal(power, shape):
        return rng.normal(0, 10.0**-power, shape).astype(np.float32)

    weights = [normal(i % 3, shape) for i, shape in enumerate(shapes)]
    gradients = [
        [normal(i % 3 + t % 2, shape) for i, shape in enumerate(shapes)] for t in range(steps)
    ]
    return weights, gradients


def parameters(weights, dtype=torch.float32):
    return [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in weights]


def step(optimizer, gradients, lr):
    """One step at rate lr; a weight whose gradient is None takes no part.

    Gradients are rewritten in place, as zero_grad(set_to_none=False) has it, and must come out
    unchanged: both show an optimizer that keeps or spoils them.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None or weight.grad is None:
            weight.grad = None if gradient is None else torch.empty_like(weight)
        if gradient is not None:
            weight.grad.copy_(torch.as_tensor(gradient))
    before = bits(p.grad for p in weights if p.grad is not None)
    optimizer.step()
    assert bits(p.grad for p in weights if p.grad is not None) == before


def bits(tensors):
    return [t.detach().numpy().tobytes() for t in tensors]


def error(weights, references):
    return max(
        np.linalg.norm(w.detach().double().numpy() - r) / np.linalg.norm(r)
        for w, r in zip(weights, references, strict=True)
    )


def reference_lars(
    w, gradients, rates, momentum, decay, trust, eps, nesterov=False, form="paper", policy="lars"
):
    """The algorithm of the paper, and its variants, for one weight in float64."""
    w = w.astype(np.float64)
    v = np.zeros_like(w)
    for g, lr in zip(gradients, rates, strict=True):
        g = g.astype(np.float64)
        size, slope = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
        local = lr
        if size > 0 and slope > 0:
            if policy == "lars":
                local = lr * trust * size / (slope + decay * size + eps)
            elif policy == "scale":
                local = lr * trust * size / (slope + eps)
            else:
                local = min(lr, trust * size / (slope + eps))
        if form == "paper":
            push = local * (g + decay * w)
            v = momentum * v + push
            w = w - (push + momentum * v if nesterov else v)
        else:
            push = local / lr * (g + decay * w)
            v = momentum * v + push
            w = w - lr * (push + momentum * v if nesterov else v)
    return w


@pytest.mark.parametrize("form", ["paper", "pytorch"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("decay", "eps"), [(0.0, 0.0), (0.05, 0.1)])
@pytest.mark.parametrize("policy", ["lars", "clip", "scale"])
def test_lars_and_larc_follow_the_reference(form, nesterov, decay, eps, policy):
    trust = 0.02 if policy == "clip" else 0.001  # so that clip both clips and does not
    rates = [lr / 100 for lr in RATES] if policy == "clip" else RATES
    weights, gradients = draw(SHAPES, len(rates))
    ours = parameters(weights)
    variant = {"nesterov": nesterov, "form": form, "policy": policy}
    optimizer = LARS(ours, 0.0, 0.9, decay, trust, eps, **variant)
    clipped = set()
    for g, lr in zip(gradients, rates, strict=True):
        step(optimizer, g, lr)
        clipped |= {seen.ratio.item() == 1 for seen in optimizer.ratios.values()}
    assert clipped == ({True, False} if policy == "clip" else {False})
    references = [
        reference_lars(w, [g[i] for g in gradients], rates, 0.9, decay, trust, eps, **variant)
        for i, w in enumerate(weights)
    ]
    assert error(ours, references) <= 1e-6


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_follows_the_reference(decay):
    weights, gradients = draw(SHAPES, len(RATES))
    ours = parameters(weights)
    optimizer = LAMB(ours, 0.0, weight_decay=decay)
    references = [w.astype(np.float64) for w in weights]
    means = [np.zeros_like(w) for w in references]
    squares = [np.zeros_like(w) for w in references]
    for t, lr in enumerate((r / 400 for r in RATES), start=1):
        step(optimizer, gradients[t - 1], lr)
        for i, w in enumerate(references):
            g = gradients[t - 1][i].astype(np.float64)
            means[i] = 0.9 * means[i] + 0.1 * g
            squares[i] = 0.999 * squares[i] + 0.001 * g * g
            update = means[i] / (1 - 0.9**t) / (np.sqrt(squares[i] / (1 - 0.999**t)) + 1e-6)
            update = update + decay * w
            references[i] = w - lr * np.sqrt((w * w).sum() / (update * update).sum()) * update
    assert error(ours, references) <= 1e-6


def test_lamb_takes_ratio_one_where_a_norm_is_zero():
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    optimizer = LAMB([zero, still], lr=0.5)
    step(optimizer, [[1.0, -1.0, 1.0], [0.0, 0.0, 0.0]], lr=0.5)
    torch.testing.assert_close(zero.detach(), torch.tensor([-0.5, 0.5, -0.5]))
    assert torch.equal(still, torch.ones(3))
    assert [seen.ratio.item() for seen in optimizer.ratios.values()] == [1.0, 1.0]


positive = st.floats(1e-4, 1.0)


@given(
    rates=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6),
    momentum=st.one_of(st.just(0.0), st.floats(0.01, 0.99)),
    decay=st.one_of(st.just(0.0), positive),
    nesterov=st.booleans(),
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3),
    trust=st.sampled_from([None, 0, 0.0]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_without_trust_the_pytorch_form_is_sgd(
    rates, momentum, decay, nesterov, shapes, trust, data
):
    nesterov = nesterov and momentum > 0
    weights, gradients = draw(shapes, len(rates))
    for g in gradients:  # some weights sit out some steps; signed zeros show a clone from a sum
        g[0] = data.draw(st.sampled_from([g[0], None, g[0] * np.float32(-0.0)]))
    ours, theirs = parameters(weights), parameters(weights)
    lars = LARS(ours, 0.0, momentum, decay, trust=trust, nesterov=nesterov, form="pytorch")
    sgd = torch.optim.SGD(theirs, 0.0, momentum, weight_decay=decay, nesterov=nesterov)
    for g, lr in zip(gradients, rates, strict=True):
        step(lars, g, lr)
        step(sgd, g, lr)
        assert bits(ours) == bits(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            buffers = [o.state[p].get("momentum_buffer") for o, p in ((lars, mine), (sgd, other))]
            assert (buffers[0] is None) == (buffers[1] is None)
            assert buffers[0] is None or bits(buffers[:1]) == bits(buffers[1:])


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999)])
def test_lamb_has_two_betas(betas):
    with pytest.raises(ValueError, match="betas must be two numbers"):
        LAMB(parameters([np.ones(3)]), 0.1, betas=betas)


RESTING = {
    "paper": lambda p: LARS(p, 0.0, 0.9, 1e-2),
    "corrected": lambda p: LARS(p, 0.0, 0.9, 1e-2, momentum_correction=True),
    "pytorch": lambda p: LARS(p, 0.0, 0.9, 1e-2, form="pytorch", nesterov=True),
    "without momentum": lambda p: LARS(p, 0.0, 0.0, 1e-2),
    "fused": lambda p: LARS(p, 0.0, 0.9, 1e-2, fused=True),
    "muon": lambda p: Muon(p, 0.0, 0.9),
}


@pytest.mark.parametrize("name", RESTING)
def test_a_weight_that_was_not_reached_is_one_without_a_gradient(name):
    """Also where only the device knows that: weight and state have the same bits."""
    weights, gradients = draw(SHAPES, 6)
    told, without = parameters(weights), parameters(weights)
    ours, theirs = RESTING[name](told), RESTING[name](without)
    halves = {told[0]: told[0].detach().half()}
    for at, (g, lr) in enumerate(zip(gradients, [0.1, 0.2, 0.3, 0.2, 0.1, 0.4], strict=True)):
        rests = at in (0, 2, 5)
        step(theirs, [None if rests else g[0], *g[1:]], lr)
        for group in ours.param_groups:
            group["lr"] = lr
        for p, gradient in zip(told, g, strict=True):
            p.grad = torch.from_numpy(gradient.copy())
        if rests:
            told[0].grad.zero_()
        ours.step(reached={told[0]: torch.tensor(not rests)}, copies=halves)
        assert bits(told) == bits(without), at
        assert torch.equal(halves[told[0]], told[0].half())
        for mine, other in zip(told, without, strict=True):
            for key, value in theirs.state[other].items():
                assert bits([ours.state[mine][key]]) == bits([value]), (at, key)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_trust_the_paper_form_is_its_reference(nesterov):
    weights, gradients = draw(SHAPES, 50)
    rates = [lr / 100 for lr in RATES[:50]]
    ours = parameters(weights, torch.float64)
    optimizer = LARS(ours, 0.0, 0.9, 1e-3, trust=None, nesterov=nesterov)
    for g, lr in zip(gradients, rates, strict=True):
        step(optimizer, g, lr)
    for i, w in enumerate(weights):
        v, w = 0.0, w.astype(np.float64)
        for g, lr in zip(gradients, rates, strict=True):
            push = lr * (g[i] + 1e-3 * w)
            v = 0.9 * v + push
            w = w - (push + 0.9 * v if nesterov else v)
        np.testing.assert_allclose(ours[i].detach().numpy(), w, rtol=1e-11, atol=1e-13)


def run(form, rates, *, correction=False, nesterov=False, momentum=0.9, resting=False):
    """The float64 weights after each step; with resting, the first weight misses every third."""
    weights, gradients = draw(SHAPES, len(rates))
    ours = parameters(weights, torch.float64)
    # lr 0 as in a script whose schedule sets the rate before each step
    optimizer = LARS(
        ours, 0.0, momentum, 1e-4, form=form, momentum_correction=correction, nesterov=nesterov
    )
    path = []
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True)):
        if lr is not None:
            step(optimizer, [None if resting and t % 3 == 2 else g[0], *g[1:]], lr)
        path.append([p.detach().clone() for p in ours])
    return path


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("resting", [False, True])
def test_momentum_correction_makes_the_forms_agree(nesterov, resting):
    options = {"nesterov": nesterov, "resting": resting}
    for ours, theirs in zip(
        run("paper", RATES, correction=True, **options),
        run("pytorch", RATES, **options),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_gradient_seen_at_rate_zero_is_forgotten_by_the_paper_form_alone():
    # v = lr u has nothing to say of u while lr is 0. So the corrected paper form equals a pytorch
    # form that skips the steps at rate 0, not one that takes them.
    warmup = [0.0, 0.0, 1.0, 2.0, 4.0, 8.0]
    paper = run("paper", warmup, correction=True)[-1]
    skipping = run("pytorch", [lr or None for lr in warmup])[-1]
    taking = run("pytorch", warmup)[-1]
    torch.testing.assert_close(paper, skipping, rtol=1e-12, atol=1e-14)
    assert (paper[0] - taking[0]).norm() > 1e-3 * paper[0].norm()
    without_momentum = run("paper", warmup, correction=True, momentum=0.0)[-1]
    torch.testing.assert_close(without_momentum, run("pytorch", warmup, momentum=0.0)[-1])


def test_without_correction_the_forms_part_when_the_rate_moves():
    rates = [8.0, 8.0, 16.0, 4.0]
    start = torch.tensor(draw(SHAPES, len(rates))[0][0], dtype=torch.float64)
    paper = [start, *(weights[0] for weights in run("paper", rates))]
    pytorch = [start, *(weights[0] for weights in run("pytorch", rates))]
    update, distance = [], []
    for t in range(1, 5):
        update.append(
            ((pytorch[t] - pytorch[t - 1]).norm() / (paper[t] - paper[t - 1]).norm()).item()
        )
        distance.append(((pytorch[t] - paper[t]).norm() / (paper[t] - start).norm()).item())
    assert update == pytest.approx([1.0, 1.0, 1.34, 0.40], abs=0.02)
    assert distance == pytest.approx([0.0, 0.0, 0.31, 0.26], abs=0.02)


@pytest.mark.parametrize("form", ["paper", "pytorch"])
@pytest.mark.parametrize("policy", ["lars", "clip", "scale"])
def test_ratio_is_one_where_a_norm_is_zero(form, policy):
    zero, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([zero, still], 0.5, weight_decay=0.25, form=form, policy=policy)
    step(optimizer, [np.eye(2), np.zeros((2, 2))], lr=0.5)
    assert torch.equal(zero, -0.5 * torch.eye(2))
    assert torch.equal(still, torch.full((2, 2), 1 - 0.5 * 0.25))
    assert [seen.ratio.item() for seen in optimizer.ratios.values()] == [1.0, 1.0]


def scaled_run(weight_scale=1.0, gradient_scale=1.0, decay=0.0, steps=5):
    weights, gradients = draw(SHAPES, steps)
    ours = parameters([w * np.float32(weight_scale) for w in weights])
    optimizer = LARS(ours, 0.0, weight_decay=decay)
    for g, lr in zip(gradients, RATES, strict=False):
        step(optimizer, [gradient * np.float32(gradient_scale) for gradient in g], lr)
    return ours


@given(k=st.integers(-60, 60))
@settings(max_examples=20, deadline=None)
def test_powers_of_two_scale_exactly(k):
    # Without decay the size of the gradient does not matter; a norm in float32 would be 0 at 2^-60.
    assert bits(scaled_run(gradient_scale=2.0**k)) == bits(scaled_run())
    # With decay, scaling weights and gradients together scales the whole run.
    both = scaled_run(weight_scale=2.0**k, gradient_scale=2.0**k, decay=0.05)
    assert bits(both) == bits([p * 2.0**k for p in scaled_run(decay=0.05)])


def test_other_scales_hold_to_rounding_and_decay_breaks_them():
    plain = [p.detach().double().numpy() for p in scaled_run()]
    assert 0 < error(scaled_run(gradient_scale=3.0), plain) < 1e-6
    decayed = [p.detach().double().numpy() for p in scaled_run(decay=0.05)]
    assert error(scaled_run(gradient_scale=2.0, decay=0.05), decayed) > 1e-4


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 2**22), (torch.float16, 2**17), (torch.bfloat16, 2**17)]
)
def test_norms_are_accurate(dtype, size):
    torch.manual_seed(0)
    weight = nn.Parameter((300 * torch.randn(size, 1)).to(dtype))  # in float16 the norm overflows
    weight.grad = (1e-6 * torch.randn(size, 1)).to(dtype)  # and there the squares are all 0
    before = weight.detach().double().numpy()
    gradient = weight.grad.double().numpy()
    optimizer = LARS([weight], lr=1.0, trust=0.01)
    optimizer.step()
    seen = optimizer.ratios[weight]
    size, slope = np.linalg.norm(before), np.linalg.norm(gradient)
    assert seen.weight_norm.item() == pytest.approx(size, rel=1e-7)
    assert seen.gradient_norm.item() == pytest.approx(slope, rel=1e-7)
    assert seen.ratio.item() == pytest.approx(0.01 * size / slope, rel=1e-7)
    # Three roundings: ratio times gradient, and the subtraction.
    moved = np.linalg.norm(weight.detach().double().numpy() - before)
    assert moved == pytest.approx(0.01 * size, rel=3 * torch.finfo(dtype).eps)


def test_share_and_adapt_belong_to_the_group():
    weights, gradients = draw([(8, 4), (8,)], 5)
    grouped = parameters(weights)
    groups = [{"params": grouped[:1]}, {"params": grouped[1:], "adapt": False, "share": 0.25}]
    alone = parameters(weights)
    together = LARS(groups, 0.0, weight_decay=0.01)
    adapting, plain = LARS(alone[:1], 0.0, weight_decay=0.01), LARS(alone[1:], 0.0, 0.9, 0.01, None)
    for g, lr in zip(gradients, RATES, strict=False):
        step(together, g, lr)
        step(adapting, g[:1], lr)
        step(plain, g[1:], lr * 0.25)
    assert bits(grouped) == bits(alone)
    assert set(together.ratios) == {grouped[0]}
    lamb = LAMB([{"params": parameters(weights[1:]), "adapt": False, "share": 0.25}], 0.0)
    adam_weights = parameters(weights[1:])
    adam = torch.optim.Adam(adam_weights, 0.0, eps=1e-6)
    for g, lr in zip(gradients, RATES, strict=False):
        step(lamb, g[1:], lr)
        step(adam, g[1:], lr * 0.25)
    assert error(lamb.param_groups[0]["params"], [adam_weights[0].detach().double().numpy()]) < 1e-6


class Tangled(nn.Module):
    """Shared and frozen weights, a norm with a matrix, a vector that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch = nn.BatchNorm2d(4)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm((4, 5))
        self.rms = nn.RMSNorm((4, 5))
        self.embed = nn.Embedding(6, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 6)
        self.head.weight = self.embed.weight
        self.stack = nn.ParameterList([torch.ones(2, 3)])


def test_groups_cover_the_model_by_type_and_dimension():
    model = Tangled()
    names = {p: name for name, p in model.named_parameters()}
    adapted, plain = parameter_groups(model, 5e-5, share=0.1)
    assert [names[p] for p in adapted.pop("params")] == ["conv.weight", "embed.weight", "stack.0"]
    kinds = [
        f"{n}.{w}" for n in ("batch", "instance", "group", "layer") for w in ("weight", "bias")
    ]
    assert [names[p] for p in plain.pop("params")] == [
        "scale",
        "conv.bias",
        *kinds,
        "rms.weight",
        "head.bias",
    ]
    assert adapted == {"weight_decay": 5e-5, "adapt": True, "share": 1.0}
    assert plain == {"weight_decay": 0.0, "adapt": False, "share": 0.1}
    assert isinstance(model.layer.weight, nn.Parameter) and model.layer.weight.ndim == 2


def test_the_last_layer_may_be_kept_from_adapting():
    """It decays as it did; those before it adapt."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
    adapted, head, plain = parameter_groups(net, 5e-5, share=0.1, adapt_head=False)
    assert adapted["params"] == [net[0].weight, net[1].weight] and adapted["adapt"]
    assert head == {"params": [net[3].weight], "weight_decay": 5e-5, "adapt": False, "share": 0.1}
    assert plain["params"] == [net[0].bias, net[1].bias, net[3].bias]
    by_convolution = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Conv2d(3, 4, 1, bias=False))
    _, head = parameter_groups(by_convolution, 0.1, adapt_head=False)
    assert head["params"] == [by_convolution[1].weight]
    without = nn.BatchNorm2d(4)
    assert parameter_groups(without, 0.1, adapt_head=False) == parameter_groups(without, 0.1)
    made = nn.Sequential(
        nn.Linear(4, 4), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    )
    _, head, _ = parameter_groups(made, 0.1, adapt_head=False)
    assert [p.shape for p in head["params"]] == [(3, 1), (3, 4)]


def test_groups_are_made_of_a_module_not_of_its_parameters():
    with pytest.raises(UserError, match="was given a generator: give the module itself"):
        parameter_groups(nn.Linear(2, 2).parameters(), weight_decay=0.1)


def test_weights_without_dimensions_yet_are_no_biases():
    with pytest.raises(UserError, match=r"the module's 0\.weight has no values yet: call it on"):
        parameter_groups(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), weight_decay=0.1)


def test_empty_groups_are_left_out():
    assert [g["adapt"] for g in parameter_groups(nn.Linear(2, 2, bias=False), 0.1)] == [True]
    assert [g["adapt"] for g in parameter_groups(nn.LayerNorm((2, 2)), 0.1)] == [False]
    assert parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1) == []


OPTIMIZERS = {
    "paper": lambda p: LARS(p, 0.0, weight_decay=0.01),
    "corrected": lambda p: LARS(p, 0.0, momentum_correction=True, nesterov=True),
    "pytorch": lambda p: LARS(p, 0.0, weight_decay=0.01, form="pytorch", eps=1e-6),
    "clip": lambda p: LARS(p, 0.0, policy="clip"),
    "plain": lambda p: LARS(p, 0.0, trust=None),
    "lamb": lambda p: LAMB(p, 0.0, weight_decay=0.01),
    "muon": lambda p: Muon(p, 0.0, weight_decay=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_resuming_is_the_uninterrupted_run(make):
    weights, gradients = draw(SHAPES, 10)
    whole = parameters(weights)
    optimizer = make(whole)
    for t in range(5):
        step(optimizer, gradients[t], RATES[t] / 100)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = [nn.Parameter(p.detach().clone()) for p in whole]
    again = make(resumed)
    again.load_state_dict(torch.load(file))
    copied = copy.deepcopy(optimizer)
    assert copied.ratios == {}
    for t in range(5, 10):
        for each in (optimizer, again, copied):
            step(each, gradients[t], RATES[t] / 100)
    assert bits(resumed) == bits(whole)
    assert bits(copied.param_groups[0]["params"]) == bits(whole)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_step_reads_nothing_back(make):
    # A meta tensor has no values: whatever would make the host wait for the device raises here.
    weights = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer = make(weights)
    for lr in (0.0, 1.0, 2.0):
        optimizer.param_groups[0]["lr"] = lr
        for p in weights:
            p.grad = torch.empty_like(p)
        optimizer.step()
    assert all(seen.ratio.ndim == 0 and seen.ratio.is_meta for seen in optimizer.ratios.values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_on_the_gpu_as_on_the_cpu_without_waiting(make, gate):
    good = torch.ones((), dtype=torch.bool, device="cuda") if gate else None
    weights, gradients = draw([*SHAPES, (2**22,)], 5)
    here = parameters(weights)
    there = [nn.Parameter(p.detach().cuda()) for p in here]
    cpu, gpu = make(here), make(there)
    for t in range(5):
        step(cpu, gradients[t], RATES[t] / 100)
        for p, q in zip(here, there, strict=True):
            q.grad = p.grad.cuda()
        gpu.param_groups[0]["lr"] = RATES[t] / 100
        torch.cuda.set_sync_debug_mode("error")
        try:
            gpu.step(good=good)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for p, q in zip(cpu.ratios.values(), gpu.ratios.values(), strict=True):
            torch.testing.assert_close(p.weight_norm, q.weight_norm.cpu(), rtol=1e-6, atol=0)
    assert error([q.cpu() for q in there], [p.detach().double().numpy() for p in here]) < 1e-6


def test_closure_is_run_with_gradients_and_its_loss_returned():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([weight], lr=1.0)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert optimizer.ratios[weight].gradient_norm.item() == 4.0


def test_weights_without_a_gradient_are_left_alone():
    moved, left = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    for optimizer in (LARS([{"params": [moved, left]}], 1.0), LAMB([moved, left], 1.0)):
        moved.grad = torch.ones(2, 2)
        optimizer.step()
        assert torch.equal(left, torch.ones(2, 2)) and not optimizer.state.get(left)
        assert set(optimizer.ratios) == {moved}
        moved.grad = None
        optimizer.step()
        assert optimizer.ratios == {}


def test_a_group_may_be_added_later():
    first, second = parameters(draw([(4, 4), (4, 4)], 1)[0])
    optimizer = LARS([first], 1.0, momentum_correction=True)
    step(optimizer, [np.ones((4, 4))], lr=2.0)
    optimizer.add_param_group({"params": [second], "trust": None, "momentum": 0.5})
    before = second.detach().clone()
    step(optimizer, [np.ones((4, 4)), np.ones((4, 4))], lr=1.0)
    assert torch.equal(second, before - 1.0)
    with pytest.raises(ValueError, match="share"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "share": -1.0})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_sparse_gradients_are_refused(make):
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    dense = nn.Parameter(torch.ones(2, 2))
    dense.grad = torch.ones(2, 2)
    optimizer = make([dense])
    optimizer.add_param_group({"params": table.parameters(), "lr": 1.0})
    with pytest.raises(ValueError, match="needs dense gradients"):
        optimizer.step()
    assert not optimizer.state  # nothing was updated before the refusal


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must not be negative"),
        ({"weight_decay": -1e-4}, "weight_decay must not be negative"),
        ({"eps": -1e-9}, "eps must not be negative"),
        ({"trust": -0.001}, "trust must be None or not negative"),
        ({"momentum": -0.1}, r"momentum must lie in \[0, 1\)"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum"),
        ({"form": "caffe"}, "form must be one of"),
        ({"policy": "larc"}, "policy must be one of"),
        ({"form": "pytorch", "momentum_correction": True}, "momentum_correction is for the paper"),
    ],
)
def test_contradictions_are_refused_in_words(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        LARS([nn.Parameter(torch.ones(1))], **{"lr": 1.0, **settings})


@pytest.mark.parametrize("settings", [{"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}])
def test_lamb_refuses_moments_that_do_not_fade(settings):
    with pytest.raises(ValueError, match="betas must lie"):
        LAMB([nn.Parameter(torch.ones(1))], lr=1.0, **settings)
