"""Dealing, the tree of summation, and batch-size control."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.batch import Stage, count_steps, stage_at, steps
from megabatch.tree import deal, folds, halve, largest_nodes, tree_sum

counts = st.integers(1, 300)
worlds = st.integers(1, 40)


def all_nodes(node):
    yield node
    if node[1] - node[0] > 1:
        for half in halve(node):
            yield from all_nodes(half)


def bracketed(node):
    """The whole tree as text, from its definition alone."""
    if node[1] - node[0] == 1:
        return str(node[0])
    left, right = halve(node)
    return f"({bracketed(left)}+{bracketed(right)})"


def bracket(a, b):
    return f"({a}+{b})"


def worked_by(count, interval):
    """What a worker holds after pushing its leaves on a stack as `folds` says: node ->
    expression."""
    nodes = largest_nodes(count, interval)
    stack, leaf = [], interval[0]
    for completed in (fold for node in nodes for fold in folds(node)):
        stack.append(str(leaf))
        leaf += 1
        for _ in range(completed):
            right = stack.pop()
            stack[-1] = bracket(stack[-1], right)
    assert leaf == interval[1] or interval[0] == interval[1]
    return dict(zip(nodes, stack, strict=True))


@given(counts, worlds)
def test_shares_cover_everything_once_and_differ_by_one(count, world):
    dealt = deal(count, world)
    assert [m for first, last in dealt for m in range(first, last)] == list(range(count))
    lengths = [last - first for first, last in dealt]
    assert max(lengths) - min(lengths) <= 1
    assert len(dealt) == world


@given(counts, st.integers(0, 6))
def test_a_power_of_two_of_workers_holds_nodes_of_the_tree(count, depth):
    nodes = set(all_nodes((0, count)))
    for interval in deal(count, 2**depth):
        assert interval in nodes or interval[0] == interval[1]


@given(counts, worlds)
def test_any_number_of_workers_brackets_the_sum_alike(count, world):
    parts = {}
    for interval in deal(count, world):
        parts |= worked_by(count, interval)
    assert tree_sum(count, parts, bracket) == bracketed((0, count))


@given(counts, st.data())
def test_largest_nodes_cover_an_interval_and_cannot_be_joined(count, data):
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    held = largest_nodes(count, (first, last))
    assert [m for node in held for m in range(*node)] == list(range(first, last))
    inside = [n for n in all_nodes((0, count)) if first <= n[0] and n[1] <= last]
    assert all(not any(h != n and n[0] <= h[0] and h[1] <= n[1] for n in inside) for h in held)


@given(counts)
def test_the_stack_of_a_sum_stays_as_low_as_the_tree_is_deep(count):
    height = highest = 0
    for completed in folds((0, count)):
        height += 1
        highest = max(highest, height)
        height -= completed
    assert height == 1
    assert highest <= (count - 1).bit_length() + 1


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=100))
def test_tree_sum_is_the_sum(values):
    leaves = {(i, i + 1): value for i, value in enumerate(values)}
    assert tree_sum(len(values), leaves, operator.add) == sum(values)


stage_lists = st.lists(
    st.tuples(st.floats(0.1, 20), st.integers(1, 500)), max_size=4, unique_by=lambda s: s[0]
).map(lambda later: (Stage(0, 64), *(Stage(e, b) for e, b in sorted(later))))


@given(stage_lists, st.integers(1, 3000), st.floats(0.1, 25))
def test_steps_follow_each_other_and_reach_the_end(stages, images, epochs):
    run = list(steps(stages, images, epochs))
    seen = 0
    for index, step in enumerate(run):
        assert (step.index, step.seen) == (index, seen)
        assert step.epoch == seen / images
        begun = [s for s in stages if s.epoch <= step.epoch]
        assert step.batch == begun[-1].batch == stages[step.stage].batch
        seen += step.batch
    assert seen >= epochs * images > run[-1].seen
    assert count_steps(stages, images, epochs) == (len(run), seen)


@given(stage_lists, st.integers(50, 3000), st.floats(0.1, 25), st.data())
def test_a_run_goes_on_from_any_step_as_if_it_had_not_stopped(stages, images, epochs, data):
    run = list(steps(stages, images, epochs))
    at = data.draw(st.integers(0, len(run) - 1))
    assert list(steps(stages, images, epochs, run[at].index, run[at].seen)) == run[at:]


def test_stages_switch_where_told():
    stages = (Stage(0, 32), Stage(10, 64), Stage(20, 128))
    assert [stage_at(stages, e) for e in (0, 9.99, 10, 19.99, 20, 1000)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("count", "world"), [(3, 8), (1, 5)])
def test_fewer_micro_batches_than_workers_leave_some_idle(count, world):
    lengths = [last - first for first, last in deal(count, world)]
    assert sorted(lengths) == [0] * (world - count) + [1] * count
