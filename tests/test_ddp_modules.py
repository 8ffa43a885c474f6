"""GradSync on every kind of DDP module: integer-valued gradients are exactly those of plain DDP.

Whole numbers sum exactly in any order, so any difference is a message in the wrong place.
"""

import contextlib
import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, dismiss, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import megabatch as mb
from megabatch.cluster import Cluster
from megabatch.errors import UserError
from megabatch.sync.ddp import GradSync
from megabatch.sync.execute import Pipeline
from megabatch.sync.meeting import Disagreement, Meeting
from megabatch.sync.senders import Planned

STEPS, WIDTH = 4, 24
SMALL_BUCKETS = {"bucket_cap_mb": 0.001}


def whole_numbers(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


class Net(nn.Module):
    """Four layers of whole numbers; `skip` leaves some out, by step and rank."""

    def __init__(self, seed=0, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for place, p in enumerate(self.parameters()):
            p.data = whole_numbers(p.shape, 1000 * seed + place)
        self.checkpointed = checkpointed

    def forward(self, x, skip=None):
        for place, layer in enumerate(self.layers):
            if place == skip:
                continue
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = x.clamp(-3, 3)
        return x


def images(rank, step):
    return whole_numbers((3, WIDTH), 7919 * rank + step)


def loss_of(model, rank, step, **skip):
    # DDP divides before it sums: by 2 and by 3 without a remainder.
    return 6 * model(images(rank, step), **skip).sum()


def trained(model, rank, passes=1, skips=False):
    """All gradients of every step; the last of `passes` backward passes is summed."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        skip = {"skip": (step + rank) % 3} if skips else {}
        with model.no_sync() if passes > 1 else contextlib.nullcontext():
            for index in range(1, passes):
                loss_of(model, rank, 100 * index + step, **skip).backward()
        loss_of(model, rank, step, **skip).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1 + 2j))
        self.real = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.view_as_real(self.weight * x).sum(-1) * self.real


def compiled():
    # By gcc where there is one; what the compiler makes of a layer may be no whole number.
    return torch.compile(Net(), backend="aot_eager")


# How the net is made, DDP's own settings, and how it is trained.
CASES = {
    "plain": (Net, {}, {}),
    "buckets as gradients": (Net, {"gradient_as_bucket_view": True}, {}),
    "no_sync": (Net, {}, {"passes": 3}),
    "static graph": (Net, {"static_graph": True}, {}),
    "unused": (Net, {"find_unused_parameters": True}, {"skips": True}),
    "checkpointing": (lambda: Net(checkpointed=True), {}, {}),
    "static, checkpointing": (lambda: Net(checkpointed=True), {"static_graph": True}, {}),
    "compiled": (compiled, {"bucket_cap_mb": 25}, {}),
    "complex": (Complex, {}, {}),
}


def with_and_without(cluster, case, wire="fp32"):
    make, settings, training = CASES[case]
    plain = DistributedDataParallel(make(), **(SMALL_BUCKETS | settings))
    ours = DistributedDataParallel(make(), **(SMALL_BUCKETS | settings))
    with GradSync(cluster, "torus", wire) as sync:
        sync.attach(ours)
        found = trained(ours, cluster.rank, **training)
    expected = trained(plain, cluster.rank, **training)
    same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    largest = max(gradient.abs().max() for gradient in expected)
    return sync.steps, all(same), float(largest)


@pytest.mark.parametrize(
    ("world", "case"),
    [(world, case) for world in (2, 3) for case in CASES if (world, case) != (3, "compiled")],
)
def test_gradients_are_those_of_plain_ddp(world, case):
    for steps, same, largest in run_ranks(with_and_without, world, case):
        assert steps == STEPS
        assert same
        assert largest > 1


# ---------------------------------------------------------------- several in one process


def two_in_one_backward(cluster, plans):
    """Each of two modules with a GradSync of its own; their buckets are ready in another order on
    each rank. Returns the steps whose gradients were not exactly those of plain DDP."""
    nets = [Net(seed) for seed in range(2)]
    plain, ours = (
        [DistributedDataParallel(copy.deepcopy(net), **SMALL_BUCKETS) for net in nets]
        for _ in range(2)
    )
    wrong = []
    with contextlib.ExitStack() as ending:
        for model, plan in zip(ours, plans, strict=True):
            ending.enter_context(GradSync(cluster, plan)).attach(model)
        for step in range(20):
            found = []
            for models in (ours, plain):
                for model in models:
                    model.zero_grad()
                order = models if (step + cluster.rank) % 2 else models[::-1]
                # Plain DDP shares one group and wants one order; ours may be met in any.
                order = models if models is plain else order
                sum(loss_of(model, cluster.rank, step) for model in order).backward()
                found.append([p.grad.clone() for model in models for p in model.parameters()])
            if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
                wrong.append(step)
    return wrong


@pytest.mark.parametrize("plans", [("torus", "torus"), ("ring:backend", "hierarchical:backend")])
@pytest.mark.parametrize("world", [2, 3])
def test_two_modules_with_a_sync_each_in_one_backward(world, plans):
    assert run_ranks(two_in_one_backward, world, plans) == [[]] * world


def interleaved(cluster):
    """Sums of three pipelines and a sender, all on their way at once."""
    with contextlib.ExitStack() as ending:
        pipelines = [ending.enter_context(Pipeline(cluster)) for _ in range(3)]
        planned = ending.enter_context(Planned(cluster, "torus"))
        wrong = 0
        for turn in range(10):
            tensors = [torch.full((500,), 1.0 + place + cluster.rank) for place in range(4)]
            order = range(3) if (turn + cluster.rank) % 2 else reversed(range(3))
            plan = planned.choice.plan(1)
            sums = [pipelines[place].submit(plan, tensors[place]) for place in order]
            sums.append(planned.send(tensors[3], 0))
            for reduction in sums:
                reduction.wait()
            ranks = cluster.world * (cluster.world - 1) / 2
            wrong += sum(
                not tensor.eq(cluster.world * (1 + place) + ranks).all()
                for place, tensor in enumerate(tensors)
            )
        return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_pipelines_do_not_mix_their_messages(world):
    assert run_ranks(interleaved, world) == [0] * world


def made_in_another_order(cluster):
    makers = [
        lambda: Pipeline(cluster),
        lambda: GradSync(cluster, "torus", silent_seconds=None),
    ]
    try:
        makers[cluster.rank]()
    except Disagreement as error:
        return str(error)


def test_parts_made_in_another_order_are_told_so():
    for message in run_ranks(made_in_another_order, 2):
        assert re.fullmatch(
            r"rank \d makes .*, where another rank makes .*: every worker makes the same parts in "
            r"the same order",
            message,
        )
        assert "a pipeline of 3 lanes" in message
        assert "a GradSync of 3 lanes" in message


def made_wrongly(cluster):
    found = []
    for arguments in (
        {"plan": 3},
        {"plan": ["reduce", "broadcast"]},
        {"wire": torch.float16},
        {"lanes": 2.5},
        {"silent_seconds": -1},
        {"silent_seconds": float("nan")},
        {"late_seconds": 0},
    ):
        with pytest.raises(UserError) as error:
            GradSync(cluster, **arguments)
        found.append(str(error.value))
    return found


def test_what_no_gradsync_takes_is_a_sentence_on_every_rank():
    first, second = run_ranks(made_wrongly, 2)
    assert (
        first
        == second
        == [
            "plan is 3: give a name, torus say, or phases in a tuple",
            "plan is ['reduce', 'broadcast']: give a name, torus say, or phases in a tuple",
            "there is no wire torch.float16: there are fp32, fp16, bf16",
            "there are 1 to 16 lanes, not 2.5",
            "silent_seconds is -1: give seconds, more than 0",
            "silent_seconds is nan: give seconds, more than 0",
            "late_seconds is 0: give seconds, more than 0",
        ]
    )


def decided_by_a_broken_first(cluster):
    meeting = Meeting(cluster, "a decision")
    with pytest.raises(ZeroDivisionError if cluster.first else Disagreement) as error:
        meeting.decide("the answer", lambda: 1 // 0)
    return str(error.value)


def test_nobody_waits_for_a_decision_that_failed():
    _, heard = run_ranks(decided_by_a_broken_first, 2)
    assert heard.startswith("rank 0 failed to decide on the answer: ZeroDivisionError")


def made_by_one(cluster):
    if cluster.rank == 1:
        return None
    with pytest.raises(Disagreement) as error:
        GradSync(cluster, late_seconds=0.5)
    return str(error.value)


def test_a_part_that_only_one_rank_makes_is_told_so():
    message, _ = run_ranks(made_by_one, 2)
    dismiss()  # one of them has made a part more than the other
    assert "rank 0 makes a GradSync" in message
    assert "but rank 1 made nothing of the kind in 0.5 s: every worker" in message


# ---------------------------------------------------------------- copies, and workers that run dry


def copied(cluster, copying, while_attached):
    """A module with a GradSync is copied, and the copy trained as it is and by a GradSync of its
    own; how many steps of each had the gradients of plain DDP, and how many went by a plan."""
    model, plain = (DistributedDataParallel(Net(), **SMALL_BUCKETS) for _ in range(2))
    expected = trained(plain, cluster.rank)
    with GradSync(cluster, "torus") as sync:
        sync.attach(model)
        trained(model, cluster.rank)
        copies = [copying(model)] if while_attached else []
    copies = copies or [copying(model)]
    right = [equal(trained(copies[0], cluster.rank), expected)]
    with GradSync(cluster, "torus") as own:
        own.attach(copies[0])
        right.append(equal(trained(copies[0], cluster.rank), expected))
    return right, sync.steps, own.steps


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("while_attached", [True, False])
@pytest.mark.parametrize("copying", [copy.deepcopy, averaged, saved_and_loaded])
def test_a_module_can_be_copied_and_the_copy_takes_a_sync_of_its_own(copying, while_attached):
    for right, steps, own_steps in run_ranks(copied, 2, copying, while_attached):
        assert right == [True, True]
        assert steps == own_steps == STEPS


def until_its_inputs_end(model, rank, **how):
    found = []
    with model.join(**how):
        for step in range(STEPS + rank):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            found += [p.grad.clone() for p in model.parameters()]
    return found


def with_uneven_inputs(cluster):
    ours, plain = (DistributedDataParallel(Net(), **SMALL_BUCKETS) for _ in range(2))
    with GradSync(cluster, "torus") as sync:
        sync.attach(ours)
        found = until_its_inputs_end(ours, cluster.rank)
    return equal(found, until_its_inputs_end(plain, cluster.rank)), sync.steps


@pytest.mark.parametrize("world", [2, 3])
def test_workers_whose_inputs_end_earlier_are_summed_over_too(world):
    # The last worker has the most inputs; the others go along with zeros.
    assert run_ranks(with_uneven_inputs, world) == [(True, STEPS + world - 1)] * world


def mean_over_who_is_left(cluster):
    """DDP's own hook would divide by all workers, and say nothing."""
    model = DistributedDataParallel(Net())
    with GradSync(cluster, "torus") as sync:
        sync.attach(model)
        until_its_inputs_end(model, cluster.rank, divide_by_initial_world_size=False)


def test_a_mean_over_those_who_are_left_is_refused():
    with pytest.raises(RankFailed, match="leave divide_by_initial_world_size at True in join"):
        run_ranks(mean_over_who_is_left, 2)


# ---------------------------------------------------------------- a group of some workers


def in_groups_of_two(cluster):
    """Ranks 0 and 2 and ranks 1 and 3 train apart from each other."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[cluster.rank % 2]
    mine = Cluster.from_env(device="cpu", group=group, grid=(2, 1))
    assert (mine.rank, mine.world, mine.grid) == (cluster.rank // 2, 2, (2, 1))
    plain, ours = (
        DistributedDataParallel(Net(), process_group=group, **SMALL_BUCKETS) for _ in range(2)
    )
    with GradSync(mine, "torus") as sync:
        sync.attach(ours)
        found = trained(ours, cluster.rank)
    expected = trained(plain, cluster.rank)
    for one in groups:
        dist.destroy_process_group(one)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), found[-1]


def test_a_module_of_a_group_is_summed_over_that_group():
    results = run_ranks(in_groups_of_two, 4)
    assert all(same for same, _ in results)
    (_, a), (_, b), (_, c), (_, d) = results
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)


def refused(cluster, call):
    """The one sentence that a mistake gets on each rank."""
    try:
        call(cluster)
    except ValueError as error:
        return str(error)


def group_of_one(cluster):
    groups = [dist.new_group([rank]) for rank in range(cluster.world)]
    model = DistributedDataParallel(Net(), process_group=groups[cluster.rank])
    with GradSync(cluster) as sync:
        sync.attach(model)


def backend_in_a_group(cluster):
    group = dist.new_group([0, 1])
    with GradSync(Cluster.from_env(device="cpu", group=group), "torus:backend"):
        pass


def grid_of_the_world(cluster):
    groups = [dist.new_group([rank]) for rank in range(cluster.world)]
    Cluster.from_env(device="cpu", group=groups[cluster.rank], grid=(1, 2))


def no_ddp(cluster):
    with GradSync(cluster) as sync:
        sync.attach(Net())


def compiled_ddp(cluster):
    with GradSync(cluster) as sync:
        sync.attach(torch.compile(DistributedDataParallel(Net()), backend="eager"))


def twice(cluster):
    model = DistributedDataParallel(Net())
    with GradSync(cluster) as sync, GradSync(cluster) as other:
        sync.attach(model)
        other.attach(model)


def two_modules(cluster):
    with GradSync(cluster) as sync:
        sync.attach(DistributedDataParallel(Net()))
        sync.attach(DistributedDataParallel(Net()))


def another_hook(cluster):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    with GradSync(cluster) as sync:
        sync.attach(model)


def delayed(cluster):
    """A sum that DDP does not wait for, and plans do not go behind it."""
    net = Net()
    late = [("layers.0.bias", net.layers[0].bias)]
    model = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=late,
        param_to_hook_all_reduce=net.layers[1].weight,
    )
    with GradSync(cluster) as sync:
        sync.attach(model)


def another_device(cluster):
    net = Net()
    model = DistributedDataParallel(net)
    net.layers[0].bias = nn.Parameter(torch.empty(WIDTH, device="meta"))
    with GradSync(cluster) as sync:
        sync.attach(model)


def alone(cluster):
    """The cluster was made before torch.distributed was initialised."""
    with GradSync(Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))) as sync:
        sync.attach(DistributedDataParallel(Net()))


def train_in_a_group(cluster):
    group = dist.new_group([0, 1])
    config = mb.Config(data=mb.Data(source="synthetic", images=64), batch=32)
    mb.train(config, cluster=Cluster.from_env(device="cpu", group=group), quiet=True)


def closed(cluster):
    sync = GradSync(cluster, plan="torus:ring")
    sync.close()
    sync.attach(DistributedDataParallel(Net()))


def wrong_wire(cluster):
    GradSync(cluster, wire="fp8")


SENTENCES = {
    group_of_one: "sums over workers [01], but the cluster has workers 0, 1: make the cluster",
    backend_in_a_group: "a plan goes over gloo by a wiring of its own, as torus:ring",
    grid_of_the_world: "a grid of 1 x 2 does not hold the 1 workers there are",
    no_ddp: "attach takes a DistributedDataParallel module, not Net: wrap the net in it first",
    compiled_ddp: "not OptimizedModule: .* compile the net, not the wrapper",
    twice: "this module has a GradSync already",
    two_modules: "this GradSync is attached already",
    closed: "this GradSync is closed: make another",
    another_hook: "has one already: .*can only be called once",
    delayed: "delays the sum of some parameters, .* leave delay_all_reduce_named_params away",
    another_device: "this module is on cpu and meta, but the cluster on cpu",
    alone: "sums over workers 0, 1, but the cluster has workers [01]: make the cluster when torch",
    train_in_a_group: "a run has all workers, not a group of them",
    wrong_wire: "there is no wire 'fp8': there are fp32, fp16, bf16",
}


@pytest.mark.parametrize("call", SENTENCES, ids=lambda call: call.__name__)
def test_what_cannot_be_is_one_sentence(call):
    for sentence in run_ranks(refused, 2, call):
        assert sentence is not None
        assert re.search(SENTENCES[call], sentence), sentence


def sparse(cluster):
    net = nn.Embedding(10, 4, sparse=True)
    model = DistributedDataParallel(net)
    with GradSync(cluster) as sync:
        sync.attach(model)
        model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused():
    with pytest.raises(RankFailed, match="plans sum dense gradients"):
        run_ranks(sparse, 2)


def still_usable(cluster):
    """A GradSync on a fresh DDP module after all that."""
    model = DistributedDataParallel(Net())
    with GradSync(cluster) as sync:
        sync.attach(model)
        return len(trained(model, cluster.rank))


def test_the_workers_are_none_the_worse():
    assert run_ranks(still_usable, 2) == [8 * STEPS] * 2
