"""The tree over real workers, and the bucket engine: exact sums, exact means, the same bits."""

import contextlib
import itertools
import os

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from megabatch.cluster import Cluster
from megabatch.errors import UserError
from megabatch.launch import run_local
from megabatch.sync.buckets import GradientSum, buckets_of
from megabatch.sync.summation import TreeSum, tree_all_reduce
from megabatch.tree import deal, folds, largest_nodes, tree_sum

WORLDS = (1, 2, 3, 4, 5, 7, 8)


def on_workers(world, function, *arguments):
    return function(*arguments) if world == 1 else run_local(world, function, *arguments)


def leaf(index, length, dtype=torch.float32):
    """Gradients of very different sizes: their sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(index)
    scale = 10.0 ** (index % 7 - 3)
    return torch.randn(length, generator=generator, dtype=dtype) * scale


def sums_by_tree(cases):
    """For each (count, length): the tree's sum over leaves made here, and whether all agree."""
    cluster = Cluster.from_env()
    found = []
    for count, length in cases:
        tree = TreeSum(length, torch.empty(0))
        dealt = deal(count, cluster.world)[cluster.rank]
        tree.begin(count, dealt)
        for index in range(*dealt):
            vector = tree.fresh()
            vector.copy_(leaf(index, length))
            tree.push(vector)
        own = torch.zeros(length)
        own[0] = float(cluster.rank == cluster.world - 1)
        found.append((tree.all_reduce(cluster).clone(), own))
        found.append((tree.all_reduce(cluster, own=own).clone(), own))
    return [total for total, _ in found]


CASES = [(1, 1), (2, 7), (5, 3), (8, 64), (11, 1000), (23, 4099)]


def reference(count, length):
    parts = {(i, i + 1): leaf(i, length) for i in range(count)}
    return tree_sum(count, parts, torch.add)


@pytest.mark.parametrize("world", WORLDS)
def test_the_tree_gives_the_same_bits_on_any_number_of_workers(world):
    totals = on_workers(world, sums_by_tree, CASES)
    for index, (count, length) in enumerate(CASES):
        expected = reference(count, length)
        assert torch.equal(totals[2 * index], expected)
        flagged = totals[2 * index + 1]
        assert flagged[0] == expected[0] + 1  # the last worker's flag, idle or not
        assert torch.equal(flagged[1:], expected[1:])


def test_the_order_matters_or_the_test_above_shows_nothing():
    count, length = CASES[-1]
    straight = sum(leaf(i, length) for i in range(count))
    assert not torch.equal(straight, reference(count, length))


class Integers(nn.Module):
    """Gradients that are whole numbers, so that any order of summation is exact."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(7))
        self.unused = nn.Parameter(torch.zeros(3))
        self.last = nn.Parameter(torch.zeros(5, 2))

    def forward(self, index):
        return (index + 1) * self.first.sum() + index * (self.last * torch.arange(2.0)).sum()


def numbers(index):
    """A micro-batch's counts and statistics."""
    return torch.tensor([1.0, 2.0, 3.0]) * index, torch.tensor([float(index)])


def integer_gradients(cases):
    """For each case, two steps' gradients and control vectors."""
    cluster = Cluster.from_env()
    found = []
    for by_tree, count, bucket_bytes in cases:
        net = Integers()
        with GradientSum(net, cluster, 1, tree=by_tree, bucket_bytes=bucket_bytes) as engine:
            for step in range(2):  # buffers are reused from step to step
                first, last = engine.begin(count)
                for index in range(first, last):
                    engine.backward(net(float(index)), *numbers(index))
                stop = cluster.rank == cluster.world - 1 and step == 1
                control = engine.finish(stop=stop, batch=10 * step + cluster.rank)
                gradients = [p.grad.tolist() for p in net.parameters()]
                found.append([*gradients, control.vector.tolist()])
    return found


# By tree or not, micro-batches, bytes of a bucket.
ENGINE_CASES = list(itertools.product([True, False], [1, 5, 8], [50]))
ENGINE_CASES += itertools.product([True, False], [5], [1, 1e6])


@pytest.mark.parametrize("world", WORLDS)
def test_the_engine_sums_exactly(world):
    found = iter(on_workers(world, integer_gradients, ENGINE_CASES))
    for (_, count, _), step in itertools.product(ENGINE_CASES, range(2)):
        first, unused, last, control = next(found)
        indices = range(count)
        assert first == [sum(i + 1 for i in indices)] * 7
        assert unused == [0.0] * 3
        assert last == [[0.0, sum(indices)]] * 5
        squares = sum(7 * (i + 1) ** 2 + 5 * i**2 for i in indices)
        total = sum(indices)
        assert control[:3] == [squares, float(step == 1), 10.0 * step]
        assert control[3:7] == [total, 2 * total, 3 * total, total]
        busy = min(world, count)
        assert control[7:] == ([busy, 0.0, busy] if world > 1 else [])  # as many came to each


def gradients_by_plan(cases):
    """Of one net, by plans of our own on a grid of two rows; and how much was exposed."""
    cluster = Cluster.from_env(grid=(2, int(os.environ["WORLD_SIZE"]) // 2))
    found = []
    for plan, wire in cases:
        net = Integers()
        with GradientSum(
            net, cluster, 1, tree=False, bucket_bytes=50, plan=plan, wire=wire
        ) as engine:
            for _ in range(2):
                first, last = engine.begin(5)
                for index in range(first, last):
                    engine.backward(net(float(index)), *numbers(index))
                control = engine.finish()
            gradients = [p.grad.tolist() for p in net.parameters()]
            found.append([*gradients, control.vector.tolist()])
            assert engine.exposed_seconds() > 0
    return found


@pytest.mark.parametrize("world", [4, 6])
def test_the_engine_sums_exactly_by_any_plan(world):
    cases = [("torus", "fp32"), ("hierarchical", "fp16"), ("hybrid", "bf16")]
    for first, unused, last, control in run_local(world, gradients_by_plan, cases):
        assert first == [15.0] * 7  # small whole numbers survive half precision
        assert unused == [0.0] * 3
        assert last == [[0.0, 10.0]] * 5
        assert control[:7] == [7 * 55 + 5 * 30, 0.0, 0.0, 10.0, 20.0, 30.0, 10.0]
        busy = min(world, 5)
        assert control[7:] == [busy, 0.0, busy]


def two_engines(cluster, trees, steps):
    """Two nets of one size, an engine each; on every other worker the second one's gradients come
    first. The steps whose sums were not the nets' own."""
    nets, wrong = [Integers(), Integers()], []
    with contextlib.ExitStack() as ending:
        engines = [
            ending.enter_context(GradientSum(net, cluster, tree=tree, bucket_bytes=50))
            for net, tree in zip(nets, trees, strict=True)
        ]
        for step in range(steps):
            places = (0, 1) if (step + cluster.rank) % 2 else (1, 0)
            for place in places:
                engines[place].begin(cluster.world)
            for place in places:
                loss = nets[place](float(100 * place + cluster.rank))
                engines[place].backward(loss, torch.zeros(3))
            for engine in engines:  # one after the other: each sends its control vector and waits
                engine.finish()
            for place, net in enumerate(nets):
                total = sum(100 * place + rank + 1 for rank in range(cluster.world))
                if not net.first.grad.eq(total).all():
                    wrong.append((step, place, net.first.grad[0].item(), total))
    return wrong


@pytest.mark.parametrize("trees", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("world", [2, 3])
def test_two_engines_in_one_process_do_not_mix_their_sums(world, trees):
    assert run_ranks(two_engines, world, trees, 20) == [[]] * world


def mean_gradient(count, micro):
    """The engine's gradient of a mean loss over micro-batches dealt unevenly, in float64."""
    cluster = Cluster.from_env()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    images, labels = torch.randn(count * micro, 6).double(), torch.arange(count * micro) % 3
    with GradientSum(net, cluster, tree=False) as engine:
        first, last = engine.begin(count)
        for index in range(first, last):
            part = slice(index * micro, (index + 1) * micro)
            loss = nn.functional.cross_entropy(net(images[part]), labels[part], reduction="sum")
            engine.backward(loss / (count * micro), torch.zeros(3, dtype=torch.float64))
        engine.finish()
        found = [p.grad.clone() for p in net.parameters()]
    nn.functional.cross_entropy(net(images), labels).backward()
    return [
        ((a - p.grad).norm() / p.grad.norm()).item()
        for a, p in zip(found, net.parameters(), strict=True)
    ]


@pytest.mark.parametrize(("world", "count"), [(1, 5), (3, 5), (4, 7), (4, 3)])
def test_uneven_dealing_gives_the_mean_over_the_global_batch(world, count):
    assert max(on_workers(world, mean_gradient, count, 4)) < 1e-14


def test_buckets_are_filled_from_the_last_parameter_and_hold_one_dtype():
    net = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10).double(), nn.Linear(10, 10)])
    buckets = buckets_of(net.parameters(), limit_bytes=250)
    flat = [p for bucket in buckets for p in bucket.parameters]
    assert [id(p) for p in flat] == [id(p) for p in reversed(list(net.parameters()))]
    for bucket in buckets:
        assert len({p.dtype for p in bucket.parameters}) == 1
        nbytes = sum(p.numel() * p.element_size() for p in bucket.parameters)
        assert nbytes <= 250 or len(bucket.parameters) == 1


def test_a_tree_sum_holds_few_copies():
    """log2(K) + 1 gradients for K micro-batches."""
    tree = TreeSum(4, torch.empty(0))
    tree.begin(64, (0, 64))
    made = set()
    for _ in range(64):
        vector = tree.fresh()
        made.add(vector.data_ptr())
        tree.push(vector.zero_())
    assert len(made) <= 7
    assert sum(folds((0, 64))) == 63 and largest_nodes(64, (0, 64)) == [(0, 64)]


def test_where_any_order_will_do_a_worker_contributes_one_vector():
    tree = TreeSum(4, torch.empty(0), by_tree=False)
    made: list[set[int]] = []
    for _ in range(3):
        made.append(set())
        for count, dealt in ((6, (1, 5)), (6, (3, 3)), (5, (2, 5)), (1, (0, 1))):
            tree.begin(count, dealt)
            for micro in range(*dealt):
                assert not tree.complete
                vector = tree.fresh().fill_(micro)
                made[-1].add(vector.data_ptr())
                tree.push(vector)
            assert tree.complete
            (total,) = tree.nodes
            made[-1].add(total.data_ptr())
            assert torch.equal(total, torch.full((4,), float(sum(range(*dealt)))))
    assert made[0] >= made[1] == made[2]  # memory is used again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_micro_batch_of_one_worker_stays_where_backward_left_it(dtype):
    """Nothing to sum, nothing to copy; the same numbers as by buckets."""
    found = []
    for tree in (False, True):
        net = Integers().to(dtype)
        with GradientSum(net, Cluster.from_env(), 1, tree=tree, bucket_bytes=50) as engine:
            for count, factor, good in (
                (1, None, None),
                (2, None, None),
                (1, 2.0, None),
                (1, None, 0),
            ):
                engine.begin(count)
                for index in range(count):
                    engine.backward(net(3.0 + index), *numbers(index))
                left = [p.grad for p in net.parameters()]
                control = engine.finish()
                stayed = all(p.grad is g for p, g in zip(net.parameters(), left, strict=True))
                assert stayed is (count == 1 and not tree)
                factor = None if factor is None else torch.tensor(factor)
                engine.scale(factor, None if good is None else torch.tensor(bool(good)))
                gradients = [p.grad.tolist() for p in net.parameters()]
                square = engine.squared_norm().item()
                assert square == sum(p.grad.double().square().sum() for p in net.parameters())
                found.append([tree, *gradients, control.vector.tolist(), square])
    half = len(found) // 2
    assert [row[1:] for row in found[:half]] == [row[1:] for row in found[half:]]


def test_one_worker_needs_no_process_group():
    cluster = Cluster.from_env()
    assert (cluster.rank, cluster.world) == (0, 1)
    assert not torch.distributed.is_initialized()
    assert torch.equal(tree_all_reduce(torch.ones(1, 3), 1, cluster), torch.ones(3))


def launches(compiled):
    """When each bucket left, as the number of gradients that had arrived by then."""
    cluster = Cluster.from_env()
    blocks = [nn.Linear(8, 8, bias=False) for _ in range(6)]
    if compiled:  # block by block; a whole compiled model delivers its gradients at the end
        blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
    net = nn.Sequential(*blocks)
    engine = GradientSum(net, cluster, tree=True, bucket_bytes=8 * 8 * 4)
    arrived, left = [], []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: arrived.append(p))
    send = engine._send
    engine._send = lambda tree, own=None: (left.append(len(arrived)), send(tree, own))
    engine.begin(cluster.world)
    engine.backward(net(torch.ones(2, 8)).sum(), torch.zeros(3))
    engine.finish()
    engine.close()
    return left


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled by block"])
def test_buckets_leave_while_backward_goes_on(compiled):
    left = run_local(2, launches, compiled)
    assert len(left) == 7  # six buckets and the control vector
    assert left[0] < 3  # the first is under way before half of backward


class Twice(nn.Module):
    """A weight that is used twice, checkpointed each time, between two that are not."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            if self.reentrant is None:
                x = x + self.shared(x)
            else:
                x = x + checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.last(x)


def summed_once(reentrant, bucket_bytes):
    torch.manual_seed(0)
    net, x = Twice(reentrant), torch.randn(4, 8)
    with GradientSum(net, Cluster.from_env(), tree=True, bucket_bytes=bucket_bytes) as engine:
        engine.begin(2)
        for _ in range(2):
            engine.backward(net(x).square().sum(), torch.zeros(3))
        engine.finish()
        return [p.grad.clone() for p in net.parameters()]


def test_a_gradient_that_comes_twice_is_whole_or_refused():
    """Reentrant checkpoints accumulate a shared weight's gradient once for each use."""
    plain = summed_once(None, 1)
    torch.testing.assert_close(summed_once(False, 1), plain)
    torch.testing.assert_close(summed_once(True, 1e9), plain)  # in one bucket, full at the end
    with pytest.raises(UserError, match=r"the gradient of shared\.\w+ came twice.*reentrant=False"):
        summed_once(True, 1)


def overlap_needs_the_same_order_everywhere():
    cluster = Cluster.from_env()
    torch.manual_seed(cluster.rank)  # different data on each worker
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for p in net.parameters():
        nn.init.ones_(p)
    with GradientSum(net, cluster, tree=False, bucket_bytes=1) as engine:
        first, last = engine.begin(3)
        for index in range(first, last):
            # Worker by worker another layer is left out, so that buckets fill in another order.
            x = torch.ones(1, 4)
            for place, layer in enumerate(net):
                if place != index:
                    x = layer(x)
            engine.backward(x.sum(), torch.zeros(3))
        engine.finish()
        return [p.grad.sum().item() for p in net.parameters()]


def test_workers_whose_backward_differs_still_agree():
    alone = overlap_needs_the_same_order_everywhere()
    assert run_local(3, overlap_needs_the_same_order_everywhere) == alone
