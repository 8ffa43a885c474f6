"""LARS, LAMB and Muon in anyone's script: whatever torch's own optimisers take, these take alike.

What torch checks of each of its optimisers is asked here of ours: options, tensor rates, complex
and mixed parameters, state dicts of all kinds, copies, hooks, schedulers, GradScaler, compiling.
"""

import copy
import io
import pickle
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from megabatch import optim
from megabatch.errors import UserError
from megabatch.optim import LAMB, LARS, Muon, lars_step, layerwise, parameter_groups

MAKERS = {
    "paper": lambda p, lr=0.1, **o: LARS(p, lr, weight_decay=0.01, **o),
    "corrected": lambda p, lr=0.1, **o: LARS(
        p, lr, momentum_correction=True, nesterov=True, weight_decay=0.01, **o
    ),
    "pytorch": lambda p, lr=0.1, **o: LARS(p, lr, weight_decay=0.01, form="pytorch", **o),
    "clip": lambda p, lr=0.1, **o: LARS(p, lr, trust=0.02, policy="clip", **o),
    "sgd": lambda p, lr=0.1, **o: LARS(p, lr, trust=None, form="pytorch", **o),
    "still": lambda p, lr=0.1, **o: LARS(p, lr, momentum=0.0, **o),
    "lamb": lambda p, lr=0.1, **o: LAMB(p, lr, weight_decay=0.01, **o),
    "muon": lambda p, lr=0.1, **o: Muon(p, lr, weight_decay=0.01, nesterov=True, **o),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
SHAPES = [(6, 4), (3, 2, 3, 3), (5,), (), (0,), (2, 0, 3)]


def weights_of(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(weights, t=0, scale=1.0):
    generator = torch.Generator().manual_seed(100 + t)
    for p in weights:
        parts = (*p.shape, 2) if p.is_complex() else p.shape
        gradient = scale * torch.randn(parts, generator=generator)
        p.grad = (torch.view_as_complex(gradient) if p.is_complex() else gradient).to(p)


def run(optimizer, weights, steps=range(3), **options):
    for t in steps:
        give_gradients(weights, t, **options)
        optimizer.step()
    return weights


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
        assert torch.isfinite(torch.view_as_real(mine) if mine.is_complex() else mine).all()


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_one_by_one_is_together_and_moves_everything(make, dtype):
    results = {}
    for foreach in (None, True, False):
        weights = weights_of(dtype=dtype)
        optimizer = make(weights, 5.0, foreach=foreach)  # in bf16 a smaller step may round to none
        results[foreach] = run(optimizer, weights)
        held = [v for state in optimizer.state.values() for v in state.values()]
        assert {v.dtype for v in held if isinstance(v, torch.Tensor)} <= {dtype}
    assert_same(results[None], results[True])
    assert_same(results[None], results[False])
    for before, after in zip(weights_of(dtype=dtype), results[None], strict=True):
        assert before.numel() == 0 or not torch.equal(before, after)


@every_optimizer
def test_a_group_of_several_dtypes_and_devices_is_a_run_of_each(make):
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    mixed = [p for dtype in dtypes for p in weights_of([(4, 3), (5,)], dtype)]
    ghosts = [nn.Parameter(torch.empty(4, 3, device="meta"))]
    optimizer = make([*mixed, *ghosts])
    for t in range(3):
        for p, q in zip(mixed[::2], mixed[1::2], strict=True):
            give_gradients([p, q], t)
        ghosts[0].grad = torch.empty_like(ghosts[0])
        optimizer.step(good=torch.tensor(True))
    for i, dtype in enumerate(dtypes):
        alone = weights_of([(4, 3), (5,)], dtype)
        assert_same(mixed[2 * i : 2 * i + 2], run(make(alone), alone))
    adapting = optimizer.param_groups[0].get("trust", 1)
    assert set(optimizer.ratios) == (set() if adapting is None else {*mixed, *ghosts})


@every_optimizer
def test_maximize_climbs(make):
    down, up = weights_of(), weights_of()
    run(make(down), down)
    run(make(up, maximize=True), up, scale=-1.0)
    assert_same(down, up)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor([0.1])], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_without_trust_it_is_sgd_with_all_of_its_options(nesterov, dtype, lr, maximize):
    ours, theirs = weights_of(dtype=dtype), weights_of(dtype=dtype)
    options = {"weight_decay": 0.01, "nesterov": nesterov, "maximize": maximize}
    run(LARS(ours, lr, trust=None, form="pytorch", **options), ours)
    run(torch.optim.SGD(theirs, lr, 0.9, **options), theirs)
    if dtype.is_complex:  # torch multiplies complex numbers here, which rounds otherwise
        torch.testing.assert_close(ours, theirs)
    else:
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_without_adaptation_lamb_is_adam(dtype, maximize, capturable):
    ours, theirs = weights_of(dtype=dtype), weights_of(dtype=dtype)
    groups = [{"params": ours, "adapt": False}]
    run(LAMB(groups, 0.1, maximize=maximize, capturable=capturable), ours)
    run(torch.optim.Adam(theirs, 0.1, eps=1e-6, maximize=maximize), theirs)
    torch.testing.assert_close(ours, theirs)


@every_optimizer
def test_complex_weights_are_pairs_of_real_ones(make):
    whole = weights_of([(6, 4), (3,)], torch.complex64)
    pairs = [nn.Parameter(torch.view_as_real(p.detach().clone())) for p in whole]
    run(make(whole), whole)
    run(make(pairs), pairs)
    assert_same([torch.view_as_real(p) for p in whole], pairs)


@every_optimizer
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_rate_is_a_rate(make, shape):
    plain, tensor, captured = (weights_of() for _ in range(3))
    rates = [torch.full(shape, 0.1, dtype=torch.float64) for _ in range(2)]
    optimizers = [
        make(plain, 0.1),
        make(tensor, rates[0]),
        make(captured, rates[1], capturable=True),
    ]
    for t, lr in enumerate((0.1, 0.3, 0.0, 0.2)):
        optimizers[0].param_groups[0]["lr"] = lr
        for rate in rates:
            rate.fill_(lr)  # in place, as schedulers write it
        for optimizer, weights in zip(optimizers, (plain, tensor, captured), strict=True):
            run(optimizer, weights, [t])
    assert_same(plain, tensor)
    torch.testing.assert_close(plain, captured)


@every_optimizer
def test_a_captured_step_reads_nothing_back(make):
    # A meta tensor has no values: whatever the host would read of the rate or the clock raises.
    weights = [nn.Parameter(torch.empty(s, device="meta")) for s in SHAPES]
    optimizer = make(weights, 0.1, capturable=True)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    for _ in range(2):
        for p in weights:
            p.grad = torch.empty_like(p)
        optimizer.step(good=torch.empty((), dtype=torch.bool, device="meta"))


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (LARS, {"differentiable": True}, "differentiable is not offered: LARS"),
        (LAMB, {"differentiable": True}, "differentiable is not offered: LAMB"),
        (LARS, {"fused": True, "foreach": True}, "fused and foreach are two ways"),
        (LAMB, {"fused": True}, "LAMB has no fused kernel"),
        (LARS, {"lr": torch.ones(2)}, "a tensor lr must have one element, got 2"),
        (LAMB, {"lr": torch.tensor(-1.0)}, "lr must not be negative"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, options, sentence):
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=sentence):
        make([weight], **{"lr": 0.1, **options})
    optimizer = make([weight], lr=0.1)
    with pytest.raises(ValueError, match=sentence):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
    assert len(optimizer.param_groups) == 1


def test_fused_where_it_cannot_run_is_refused_at_the_step():
    weights = [nn.Parameter(torch.empty(4, 3, device="meta"))]
    weights[0].grad = torch.empty_like(weights[0])
    optimizer = LARS(weights, 0.1, fused=True)
    with pytest.raises(ValueError, match=r"fused=True needs .*float32 on meta; leave it at None"):
        optimizer.step()
    LARS(weights, 0.1, fused=False).step()


def test_the_kernel_is_taken_where_it_can_run_and_nothing_else_was_asked(monkeypatch):
    calls = []

    def kernel(*arguments):
        calls.append(arguments)
        return lars_step.update(*arguments)

    monkeypatch.setattr(layerwise, "kernel", lambda name: kernel)
    ours, theirs = weights_of(), weights_of()
    run(LARS(theirs, 0.1), theirs)
    assert not calls  # these lie on a CPU
    monkeypatch.setattr(layerwise, "kernel_takes", lambda weights: True)
    for options in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        unfused = weights_of()
        assert_same(run(LARS(unfused, 0.1, **options), unfused), theirs)
    assert not calls
    optimizer = LARS(ours, 0.1)
    run(optimizer, ours)
    assert_same(ours, theirs)
    assert len(calls) == 3 and all(len(weights) == len(ours) for weights, *_ in calls)
    assert set(optimizer.ratios) == set(ours)


@every_optimizer
def test_what_torch_refuses_is_refused_in_its_words(make):
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])
    optimizer = make([nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": optimizer.param_groups[0]["params"]})


@every_optimizer
def test_weights_may_rest_freeze_or_be_absent(make):
    resting, frozen, moving = weights_of([(3, 3)] * 3)
    frozen.requires_grad_(False)
    optimizer = make([{"params": [resting, frozen, moving]}, {"params": []}])
    alone = weights_of([(3, 3)] * 3)[2]
    other = make([alone])
    before = frozen.detach().clone()
    for t in range(4):
        resting.grad = torch.ones(3, 3) if t in (1, 3) else None
        run(optimizer, [moving], [t])
        run(other, [alone], [t])
        assert (resting in optimizer.state) == (t > 0 and other.state != {})
    assert_same([moving, frozen], [alone, before])
    assert frozen not in optimizer.state


@every_optimizer
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_are_cleared_as_asked(make, set_to_none):
    weights = weights_of()
    optimizer = make(weights, foreach=True)
    run(optimizer, weights)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in weights)


def copied(optimizer):
    return copy.deepcopy(optimizer)


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@every_optimizer
@pytest.mark.parametrize("again", [copied, pickled])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_copy_goes_on_alike(make, again, capturable):
    weights = weights_of()
    optimizer = make(weights, torch.tensor(0.1), capturable=capturable)
    run(optimizer, weights)
    other = again(optimizer)
    twins = other.param_groups[0]["params"]
    assert not {*map(id, twins)} & {*map(id, weights)}
    run(optimizer, weights, range(3, 6))
    run(other, twins, range(3, 6))
    assert_same(weights, twins)
    other.add_param_group({"params": weights_of([(2, 2)])})


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_dict_goes_onto_another_dtype(make, dtype):
    weights = weights_of()
    optimizer = make(weights)
    run(optimizer, weights)
    others = [nn.Parameter(p.detach().to(dtype)) for p in weights]
    other = make(others)
    other.load_state_dict(optimizer.state_dict())
    for state in other.state.values():
        assert {v.dtype for v in state.values() if isinstance(v, torch.Tensor)} <= {dtype}
    run(optimizer, weights, [3])
    run(other, others, [3])
    assert all(p.dtype == dtype for p in others)
    torch.testing.assert_close([p.to(dtype) for p in weights], others, rtol=0.02, atol=0.02)


@every_optimizer
def test_the_clock_and_rate_survive_another_capturable(make):
    weights = weights_of()
    optimizer = make(weights)
    run(optimizer, weights)
    for capturable in (True, False, True):
        twins = [nn.Parameter(p.detach().clone()) for p in weights]
        other = make(twins, capturable=capturable)
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["capturable"] = capturable
        if capturable:
            state["param_groups"][0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
        other.load_state_dict(state)
        run(optimizer, weights, [3])
        run(other, twins, [3])
        torch.testing.assert_close(weights, twins)
        optimizer, weights = other, twins


@every_optimizer
def test_settings_missing_from_an_old_state_dict_are_the_groups_own(make):
    weights = weights_of()
    groups = [{"params": weights[:2]}, {"params": weights[2:], "adapt": False, "share": 0.5}]
    optimizer = make(groups)
    run(optimizer, weights)
    whole = optimizer.state_dict()
    own = [name for name in whole["param_groups"][0] if name not in ("params", "lr")]
    for names in [[name] for name in own] + [own]:
        old = copy.deepcopy(whole)
        for name in names:
            for group in old["param_groups"]:
                del group[name]
        again = [nn.Parameter(p.detach().clone()) for p in weights]
        other = make([{"params": again[:2]}, {"params": again[2:], "adapt": False, "share": 0.5}])
        other.load_state_dict(old)
        ours, theirs = other.param_groups[1], optimizer.param_groups[1]
        same = {n for n in own if n != "previous_rate"}
        assert {n: ours[n] for n in same} == {n: theirs[n] for n in same}
        run(other, again, [3])


@every_optimizer
def test_an_old_pickle_gets_the_constructors_defaults(make):
    weights = weights_of()
    optimizer = make(weights)
    run(optimizer, weights)
    kept = {"params", "lr", "momentum", "weight_decay", "betas", "eps"}
    for settings in (*optimizer.param_groups, optimizer.defaults):
        for name in set(settings) - kept:
            del settings[name]
    again = pickled(optimizer)
    group = again.param_groups[0]
    assert (group["adapt"], group["share"], group["maximize"]) == (True, 1.0, False)
    assert group.get("form", "paper") == "paper"
    run(again, group["params"], [3])
    again.add_param_group({"params": weights_of([(2, 2)])})


def test_a_run_of_sgd_goes_on_as_lars_without_trust():
    ours, theirs = weights_of(), weights_of()
    sgd = torch.optim.SGD(theirs, 0.1, 0.9)
    run(sgd, theirs)
    lars = LARS(ours, 0.2, trust=None, form="pytorch")
    lars.load_state_dict(copy.deepcopy(sgd.state_dict()))  # torch shares the buffers
    with torch.no_grad():
        torch._foreach_copy_(ours, theirs)
    assert_same(run(lars, ours, [3, 4]), run(sgd, theirs, [3, 4]))


def test_a_run_of_adam_goes_on_as_lamb():
    ours, theirs = weights_of(), weights_of()
    adam = torch.optim.Adam(theirs, 0.1, eps=1e-6)
    run(adam, theirs)
    lamb = LAMB([{"params": ours, "adapt": False}], 0.2)
    lamb.load_state_dict(copy.deepcopy(adam.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(ours, theirs)
    torch.testing.assert_close(run(lamb, ours, [3, 4]), run(adam, theirs, [3, 4]))


@pytest.mark.parametrize(
    ("make", "other", "sentence"),
    [
        (MAKERS["paper"], torch.optim.Adam, "not the state of LARS, which keeps momentum_buffer"),
        (MAKERS["lamb"], torch.optim.RMSprop, "not the state of LAMB, which keeps step and exp"),
        (MAKERS["paper"], partial(torch.optim.SGD, momentum=0.9), 'the state of SGD.* form="pyto'),
        (MAKERS["sgd"], partial(torch.optim.SGD, momentum=0.9, dampening=0.5), "dampening of 0.5"),
        (MAKERS["paper"], partial(torch.optim.RMSprop, momentum=0.9), "not the state of LARS"),
        (MAKERS["paper"], Muon, "not the state of LARS.* has momentum_buffer, length"),
        (MAKERS["muon"], LARS, "the state of LARS, whose momentum has its ratios in it"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_and_changes_nothing(make, other, sentence):
    weights, strangers = weights_of(), weights_of()
    foreign = other(strangers, 0.7)
    run(foreign, strangers)
    optimizer = make(weights)
    run(optimizer, weights)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(foreign.state_dict())
    assert str(optimizer.state_dict()) == str(before)
    bad = copy.deepcopy(before)
    bad["param_groups"][0]["weight_decay"] = -1.0
    with pytest.raises(ValueError, match="weight_decay must not be negative"):
        optimizer.load_state_dict(bad)
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize(
    ("make", "other", "sentence"),
    [
        (MAKERS["paper"], torch.optim.Muon, "torch.optim.Muon, whose momentum is an average"),
        (MAKERS["sgd"], torch.optim.Muon, "torch.optim.Muon, whose momentum is an average"),
        (MAKERS["muon"], torch.optim.Muon, "torch.optim.Muon.*: Muon takes them in full"),
        (
            MAKERS["muon"],
            partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
            "dampening of 0.5, which Muon has not",
        ),
    ],
)
def test_a_momentum_of_shares_of_gradients_is_refused(make, other, sentence):
    """For that of the paper form, which is a step, its gradients are thousands of times too long;
    beside gradients in full it is as good as none."""
    strangers = weights_of([(4, 3)])
    foreign = other(strangers, 0.7)
    run(foreign, strangers)
    with pytest.raises(ValueError, match=sentence):
        make(weights_of([(4, 3)])).load_state_dict(foreign.state_dict())


@every_optimizer
def test_names_go_along(make):
    net = nn.Linear(3, 2)
    optimizer = make(net.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    run(optimizer, list(net.parameters()))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = make(nn.Linear(3, 2).named_parameters())
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@every_optimizer
def test_hooks_see_the_step_and_the_state(make):
    weights = weights_of()
    optimizer, seen = make(weights), []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", set(kwargs))))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", len(o.ratios))))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("out"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("in"))
    give_gradients(weights)
    optimizer.step(good=torch.tensor(True))
    adapting = 0 if optimizer.param_groups[0].get("trust", 1) is None else len(weights)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [("pre", {"good"}), ("post", adapting), "out", "in"]


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.4, total_steps=6),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.PolynomialLR(o, 4, power=2)],
        milestones=[2],
    ),
}


@every_optimizer
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_torchs_schedulers_set_the_rate(make, schedule):
    plain, tensor = weights_of(dtype=torch.float64), weights_of(dtype=torch.float64)
    rates, momenta = set(), set()
    for weights, lr in ((plain, 0.1), (tensor, torch.tensor(0.1, dtype=torch.float64))):
        optimizer = make(weights, lr)
        scheduler = schedule(optimizer)
        for t in range(5):
            group = optimizer.param_groups[0]
            rates.add(round(float(group["lr"]), 9))
            momenta.add(group["betas"][0] if "betas" in group else group["momentum"])
            run(optimizer, weights, [t])
            scheduler.step()
    assert len(rates) == 5
    assert (len(momenta) > 1) == (schedule is SCHEDULES["one cycle"])
    assert_same(plain, tensor)


@every_optimizer
def test_a_grad_scaler_unscales_first_and_skips_what_overflowed(make):
    weights, twins = weights_of(), weights_of()
    optimizer, other = make(weights), make(twins)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    scaler.scale(torch.zeros(()))  # as a script's first backward does
    for t in range(4):
        give_gradients(weights, t, scale=2.0**10 if t < 3 else 2.0**9)
        if t == 2:
            weights[0].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        if t != 2:
            run(other, twins, [t])
    assert scaler.get_scale() == 2.0**9
    assert_same(weights, twins)


@every_optimizer
def test_the_last_step_of_a_closed_gate_leaves_everything(make):
    weights, twins = weights_of(), weights_of()
    optimizer, other = (make(ws, capturable=True) for ws in (weights, twins))
    for t, good in enumerate((False, True, False, True)):
        give_gradients(weights, t, scale=float(good))
        optimizer.step(good=torch.tensor(good))
        if good:
            run(other, twins, [t])
    assert_same(weights, twins)


@every_optimizer
def test_copies_in_half_are_written_with_their_weights(make):
    weights, twins = weights_of(), weights_of()
    halves = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in weights[:2]}
    optimizer, other = make(weights), make(twins)
    give_gradients(weights)
    optimizer.step(good=torch.tensor(True), copies=halves)
    run(other, twins, [0])
    assert_same(weights, twins)
    assert_same(halves.values(), [p.to(torch.bfloat16) for p in twins[:2]])


@every_optimizer
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_a_scripts_default_dtype_rounds_no_factor(make, default):
    """It is how a net in half is built: 0.999 would be 1."""
    for dtype in (torch.bfloat16, torch.float32):
        weights, twins = weights_of(dtype=dtype), weights_of(dtype=dtype)
        run(make(twins, 5.0), twins, range(5))
        optimizer = make(weights, 5.0)
        for t in range(5):
            give_gradients(weights, t)
            torch.set_default_dtype(default)
            try:
                optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
        assert_same(weights, twins)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # in torch's compiler
@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (MAKERS["paper"], "inductor"),
        (MAKERS["corrected"], "aot_eager"),
        (MAKERS["lamb"], "aot_eager"),
    ],
    ids=["paper", "corrected", "lamb"],
)
def test_a_compiled_step_is_the_step(make, backend):
    weights, twins = weights_of([(6, 4), (5,)]), weights_of([(6, 4), (5,)])
    optimizer, other = (make(ws, torch.tensor(0.1), capturable=True) for ws in (weights, twins))
    for each, own in ((optimizer, weights), (other, twins)):
        run(each, own, [0])  # the first step makes the state, and would be a graph of its own
    compiled = torch.compile(optimizer.step, backend=backend)
    for t in range(1, 3):
        give_gradients(weights, t)
        compiled()
        run(other, twins, [t])
    torch.testing.assert_close(weights, twins)


def test_a_new_optimizer_is_one_file(tmp_path, monkeypatch):
    assert optim.names() == ("lamb", "lars", "muon")
    monkeypatch.setattr(optim, "__path__", [*optim.__path__, str(tmp_path)])
    (tmp_path / "halved.py").write_text(
        "from megabatch.optim import LARS\n"
        "def build(settings, groups):\n"
        "    return LARS(groups, lr=0.0, momentum=settings.momentum / 2)\n"
    )
    groups = parameter_groups(nn.Linear(2, 2), 0.1)
    built = optim.build(types.SimpleNamespace(name="halved", momentum=0.8), groups)
    assert [group["momentum"] for group in built.param_groups] == [0.4, 0.4]
    with pytest.raises(UserError, match=r"there is no optimizer 'halves': did you mean halved"):
        optim.build(types.SimpleNamespace(name="halves"), groups)
