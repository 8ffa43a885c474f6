"""Plans: right on every grid, refused when broken, priced as the messages say, runnable as written.

Two references are independent of the package: what each collective means on a grid of cells, and a
run of the messages on integer vectors.
"""

import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import groupby, product
from math import lcm
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import plans
from megabatch.plans import BLUECONNECT, HIERARCHICAL, PLANS, RING, THREE_PHASE, TORUS, Phase
from megabatch.plans.phase import Axis, Op

DOCS = Path(__file__).parents[1] / "docs" / "algorithms.md"
GRIDS = [(y, world // y) for world in range(1, 17) for y in range(1, world + 1) if world % y == 0]
VIAS = ["backend", "ring", "halving_doubling"]
EVERY_PLAN = {
    "three_phase": THREE_PHASE,  # the only one that mixes wirings
    **{f"{name} {via}": plans.through(plan, via) for name, plan in PLANS.items() for via in VIAS},
}

every_plan = pytest.mark.parametrize("plan", EVERY_PLAN.values(), ids=EVERY_PLAN.keys())


# ---------------------------------------------------------------- proof


@every_plan
def test_every_plan_is_proved_on_every_grid_up_to_16_workers(plan):
    assert all(plans.prove(plan, y, x) for y, x in GRIDS)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("grid", [(5, 7), (1, 37), (31, 1), (8, 8)])
def test_larger_and_odder_grids_are_proved_too(plan, grid):
    assert plans.prove(plan, *grid)
    assert plans.prove(plans.through(plan, "halving_doubling"), *grid)


def test_a_single_rank_sends_nothing():
    assert all(plans.lower(plan, 1, 1) == [] for plan in EVERY_PLAN.values())


def test_blueconnect_on_two_axes_is_the_torus():
    assert all(plans.lower(BLUECONNECT, y, x) == plans.lower(TORUS, y, x) for y, x in GRIDS)


def run(messages, inputs):
    """Messages on vectors of integers, one a rank: all sends of a step, then all receives."""
    vectors = [list(vector) for vector in inputs]
    length = len(vectors[0])
    for _, step in groupby(sorted(messages), lambda message: message.step):
        in_flight = []
        for message in step:
            start, stop, of = message.slice
            place = slice(length * start // of, length * stop // of)
            in_flight.append((message, place, vectors[message.source][place]))
        for message, place, sent in in_flight:
            own = vectors[message.destination][place]
            new = [a + b for a, b in zip(own, sent, strict=True)] if message.op == "add" else sent
            vectors[message.destination][place] = new
    return vectors


@pytest.mark.parametrize("via", ["ring", "halving_doubling"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (1, 3), (2, 3)])
def test_no_message_can_be_lost_doubled_or_changed(plan, via, grid):
    world = grid[0] * grid[1]
    inputs = [[100**rank] * 12 for rank in range(world)]
    total = [[sum(100**rank for rank in range(world))] * 12] * world
    messages = plans.lower(plans.through(plan, via), *grid)
    for index, message in enumerate(messages):
        before, after = messages[:index], messages[index + 1 :]
        flipped = message._replace(op={"add": "copy", "copy": "add"}[message.op])
        for mutant in ([], [message, message], [flipped]):
            with pytest.raises(ValueError, match=r"counted \d+ times|two messages write"):
                plans.verify(before + mutant + after, world)
        # Redirected additions may be right (a later message takes them along); then the run agrees.
        for rank in range(world):
            mutated = [*before, message._replace(destination=rank), *after]
            if is_proved(mutated, world):
                assert run(mutated, inputs) == total
                assert message.op == "add" or rank == message.destination


def is_proved(messages, world):
    try:
        return plans.verify(messages, world)
    except ValueError:
        return False


def test_the_proof_names_the_first_wrong_sum():
    messages = plans.lower(RING, 1, 2)
    with pytest.raises(ValueError, match="rank 0 ends with rank 1 counted 0 times in chunk 0 of 2"):
        plans.verify([m for m in messages if (m.destination, m.op) != (0, "add")], 2)
    with pytest.raises(ValueError, match="two messages write chunk 1 of rank 1 in step 0"):
        plans.verify([messages[0], *messages], 2)


# ---------------------------------------------------------------- which plans are right

CELLS = list(product(range(2), range(3)))  # ranks of a 2 x 3 grid, and pieces: (row, column)
PHASES = [Phase(op, axis) for op in get_args(Op) for axis in get_args(Axis)]
# A sum is an integer with one digit for each contributor; 6 ** 4 copies of one still fit.
START = tuple(4096**rank for rank in range(6) for _ in CELLS)
SUMMED = (sum(4096**rank for rank in range(6)),) * len(START)


@cache
def apply(phase, state):
    """What a collective means; the state has a sum, or None for rubbish, by rank and piece."""
    held = dict(zip(product(CELLS, CELLS), state, strict=True))

    def after(rank, piece):
        def moved(to):  # the rank of this line that is in the place `to` along the axis
            return tuple(to[k] if axis in phase.axis else rank[k] for k, axis in enumerate("yx"))

        if phase.op in ("broadcast", "all_gather"):
            return held[moved((0, 0) if phase.op == "broadcast" else piece), piece]
        if rank != {"reduce": moved((0, 0)), "reduce_scatter": moved(piece)}.get(phase.op, rank):
            return None
        terms = [held[member, piece] for member in {moved(cell) for cell in CELLS}]
        return None if None in terms else sum(terms)

    return tuple(after(rank, piece) for rank, piece in held)


def is_right(plan):
    state = START
    for phase in plan:
        state = apply(phase, state)
    return state == SUMMED


def is_minimal(plan):
    """No phase can be dropped, nor an "xy" one be done along one axis only."""
    for k, phase in enumerate(plan):
        narrower = [(replace(phase, axis=axis),) for axis in "xy" if phase.axis == "xy"]
        if any(is_right(plan[:k] + less + plan[k + 1 :]) for less in [(), *narrower]):
            return False
    return True


def is_accepted(plan):
    try:
        plans.check(plan)
    except ValueError:
        return False
    return True


def each_axis_goes_down_and_up(plan):
    wholes = [("all_reduce",), ("reduce", "broadcast"), ("reduce_scatter", "all_gather")]
    return all(tuple(p.op for p in plan if axis in p.axis) in wholes for axis in "xy")


def is_tangled(plan):
    """A closing phase that is not on the axis of the innermost open phase."""
    opened = []
    for phase in plan:
        if phase.op in ("reduce", "reduce_scatter"):
            opened.append(phase.axis)
        elif phase.op != "all_reduce" and opened.pop() != phase.axis:
            return True
    return False


def test_check_accepts_exactly_the_right_plans_that_waste_nothing_and_nest():
    accepted, tangled = Counter(), Counter()
    for length in range(5):
        for plan in product(PHASES, repeat=length):
            good = is_right(plan) and is_minimal(plan)
            assert good == each_axis_goes_down_and_up(plan), plan
            assert is_accepted(plan) == (good and not is_tangled(plan)), plan
            accepted[length] += is_accepted(plan)
            tangled[length] += good and is_tangled(plan)
    # No right plan is longer: each of two axes has two phases at most.
    assert accepted == {0: 0, 1: 1, 2: 4, 3: 12, 4: 16}
    assert tangled == {0: 0, 1: 0, 2: 0, 3: 8, 4: 8}


@pytest.mark.parametrize("via", VIAS)
def test_all_accepted_plans_are_proved(via):
    candidates = (plan for length in range(1, 5) for plan in product(PHASES, repeat=length))
    for plan in filter(is_accepted, candidates):
        assert all(plans.prove(plans.through(plan, via), y, x) for y, x in [(2, 3), (4, 2), (3, 3)])


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("", "nothing sums over x and y"),
        ("all_reduce x", "nothing sums over y"),
        ("reduce x, broadcast x", "nothing sums over y"),
        ("all_reduce xy, all_reduce y", "all_reduce on y sums over an axis that is summed already"),
        ("reduce_scatter x, all_reduce xy", "all_reduce on xy sums over an axis that is summed"),
        ("all_reduce xy, broadcast x", "broadcast on x closes nothing: no reduce is open before"),
        ("reduce_scatter x, all_reduce y", "reduce_scatter on x is never closed"),
        ("reduce x, all_reduce y, all_gather x", "all_gather on x cannot close reduce on x"),
        ("reduce_scatter x, all_reduce y, all_gather y", "all_gather on y cannot close"),
        ("reduce x, reduce y, broadcast x, broadcast y", "broadcast on x cannot close reduce on y"),
    ],
)
def test_a_broken_plan_is_refused_with_the_reason(broken, reason):
    plan = tuple(Phase(*words.split()) for words in broken.split(", ") if words)
    for refuse in (plans.check, lambda plan: plans.prove(plan, 2, 2)):
        with pytest.raises(ValueError, match=reason):
            refuse(plan)


def test_a_gather_must_be_wired_like_its_scatter():
    down, across, up = TORUS
    mixed = (down, across, replace(up, via="halving_doubling"))
    with pytest.raises(ValueError, match="via halving_doubling looks for its slices elsewhere"):
        plans.check(mixed)
    ring, halving = (
        [m for m in plans.lower(plans.through(RING, via), 1, 4) if m.op == op]
        for via, op in [("ring", "add"), ("halving_doubling", "copy")]
    )
    late = [message._replace(step=message.step + 10) for message in halving]
    assert not is_proved(ring + late, 4)  # and rightly so
    plans.check((down, across, replace(up, via="ring")))  # a backend keeps slices as a ring does
    plans.check((HIERARCHICAL[0], across, replace(HIERARCHICAL[2], via="halving_doubling")))


def test_misspelt_phases_and_empty_grids_are_refused():
    for op, axis, via, wrong in [
        ("allreduce", "x", "ring", "allreduce"),
        ("reduce", "z", "ring", "z"),
        ("reduce", "x", "nccl", "nccl"),
    ]:
        with pytest.raises(ValueError, match=f"'{wrong}' is not one of"):
            Phase(op, axis, via)
    for grid in [(0, 4), (4, 0), (-1, -4)]:
        with pytest.raises(ValueError, match="at least one row and one column"):
            plans.lower(RING, *grid)


# ---------------------------------------------------------------- the order of summation

POWERS = [
    grid for grid in [*GRIDS, (4, 8), (8, 4), (1, 32)] if (grid[0] * grid[1]).bit_count() == 1
]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_halving_doubling_follows_the_tree_and_rings_do_not(plan):
    for y, x in POWERS:
        assert plans.follows_tree(plans.through(plan, "halving_doubling"), y, x)
    assert not plans.follows_tree(plans.through(plan, "ring"), 4, 4)
    assert not plans.follows_tree(plan, 2, 4)


def test_where_the_tree_is_not_followed():
    down, across, up = plans.through(TORUS, "halving_doubling")
    columns_first = (replace(down, axis="y"), replace(across, axis="x"), replace(up, axis="y"))
    assert not plans.follows_tree(columns_first, 2, 2)  # (0 + 2) + (1 + 3)
    assert not plans.follows_tree((down, across, up), 3, 4)
    assert plans.follows_tree(RING, 1, 2)  # one addition has one order


def test_brackets():
    assert plans.bracketing(RING, 1, 3) == [[(0, (1, 2)), ((0, 2), 1), ((0, 1), 2)]] * 3
    balanced = (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert plans.bracketing(plans.through(TORUS, "halving_doubling"), 2, 4) == [[balanced] * 8] * 8


# ---------------------------------------------------------------- running


def integers(world, length):
    return [[(3 + 7 * rank + k * k) % 101 - 50 for k in range(length)] for rank in range(world)]


def summed(inputs):
    return [[sum(column) for column in zip(*inputs, strict=True)]] * len(inputs)


plans_on_grids = given(
    plan=st.sampled_from(list(EVERY_PLAN.values())),
    grid=st.sampled_from(GRIDS),
    length=st.sampled_from([0, 1, 2, 3, 5, 7, 16, 17, 31, 97]),
    order=st.randoms(use_true_random=False),
)


@settings(max_examples=150, deadline=None)
@plans_on_grids
def test_messages_sum_vectors_of_any_length(plan, grid, length, order):
    messages = plans.lower(plan, *grid)
    order.shuffle(messages)  # only the steps matter
    inputs = integers(grid[0] * grid[1], length)
    assert run(messages, inputs) == summed(inputs)


def run_moves(stages, rank, vector, mail):
    """One rank's run: it sends straight from its vector and waits for its own receives only."""
    for number, stage in enumerate(stages):
        moves = stage.moves(rank)
        assert [move.step for move in moves] == sorted(move.step for move in moves)
        for move in moves:
            place = slice(*move.slice.bounds(len(vector)))
            if move.action == "send":
                mail[rank, move.peer].append((number, move.step, vector[place]))
                continue
            while not mail[move.peer, rank]:
                yield
            *sent_at, sent = mail[move.peer, rank].pop(0)
            assert sent_at == [number, move.step]  # first in, first out: no tags needed
            own = [0] * len(sent) if move.op == "copy" else vector[place]
            vector[place] = [a + b for a, b in zip(own, sent, strict=True)]


@settings(max_examples=100, deadline=None)
@plans_on_grids
def test_each_rank_can_run_its_moves_at_its_own_pace(plan, grid, length, order):
    vectors = integers(grid[0] * grid[1], length)
    expected = summed(vectors)
    stages, mail = plans.on_grid(plan, *grid), defaultdict(list)
    running = [run_moves(stages, rank, vector, mail) for rank, vector in enumerate(vectors)]
    for _ in range(1 + len(plans.lower(plan, *grid))):  # after the first, each has a receive
        order.shuffle(running)
        running = [rank for rank in running if next(rank, "done") != "done"]
    assert not running, "deadlock"
    assert vectors == expected
    assert not any(mail.values())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_groups_and_slices_are_all_that_a_backend_needs(plan):
    for y, x in GRIDS:
        vectors = integers(y * x, 53)
        expected = summed(vectors)
        for stage in plans.on_grid(plan, y, x):
            for group in stage.groups:
                collective(stage.phase.op, [vectors[rank] for rank in group.members], group.slice)
        assert vectors == expected


def collective(op, vectors, part):
    start, stop = part.bounds(len(vectors[0]))
    pieces = [plans.Slice(k, k + 1, len(vectors)).within(part) for k in range(len(vectors))]
    bounds = [piece.bounds(len(vectors[0])) for piece in pieces]
    before = [vector[:] for vector in vectors]
    for k, vector in enumerate(vectors):
        if op in ("reduce", "reduce_scatter", "all_reduce"):
            mine = {"reduce": (start, stop if k == 0 else start), "reduce_scatter": bounds[k]}
            for i in range(start, stop):
                kept = i in range(*mine.get(op, (start, stop)))
                vector[i] = sum(other[i] for other in before) if kept else 10**9
        else:
            owners = {"broadcast": [(start, stop)], "all_gather": bounds}[op]
            for owner, (first, last) in enumerate(owners):
                vector[first:last] = before[owner][first:last]


@every_plan
def test_a_step_needs_no_spare_copy_and_no_tags(plan):
    for y, x in GRIDS:
        for _, step in groupby(plans.lower(plan, y, x), lambda message: message.step):
            messages = list(step)
            pairs = [(m.source, m.destination) for m in messages]
            assert len(set(pairs)) == len(pairs)
            chunks = lcm(*(m.slice.of for m in messages))
            sent = {(m.source, k) for m in messages for k in range(*m.slice.bounds(chunks))}
            got = {(m.destination, k) for m in messages for k in range(*m.slice.bounds(chunks))}
            assert not sent & got


# ---------------------------------------------------------------- price


@every_plan
def test_the_price_is_the_sum_of_the_messages(plan):
    for y, x in GRIDS:
        price = plans.wire(plan, 1000, y, x)
        messages = plans.lower(plan, y, x)
        sent = [Fraction(0)] * (y * x)
        load = Counter()
        for message in messages:
            nbytes = 1000 * message.slice.share
            sent[message.source] += nbytes
            load[message.step, message.source] += nbytes
        most = [max(b for (s, _), b in load.items() if s == step) for step in range(price.steps)]
        assert price.sent == tuple(sent)
        assert price.steps == 1 + max((message.step for message in messages), default=-1)
        assert sum(leg.nbytes for leg in price.legs) == sum(most)
        assert [leg.phase for leg in price.legs] == list(plan)


SECTION = re.compile(
    r"^## .+: `(?P<plan>.+)`\n\n"
    r"- Communication steps: `(?P<steps>.+)`\n"
    r"- Bytes on the wire: `(?P<nbytes>.+?)`"
    r"( if (?P<count>\w) is a power of two, else at most `(?P<limit>.+)`)?$",
    re.MULTILINE,
)


def test_steps_and_bytes_are_the_formulas_of_the_docs():
    sections = list(SECTION.finditer(DOCS.read_text()))
    assert len(sections) == len(PLANS) + 1
    for section, (y, x) in product(sections, [*GRIDS, (5, 7), (6, 12), (3, 32)]):
        if min(y, x) == 1:
            continue
        letters = {"P": y * x, "X": x, "Y": y, "N": Fraction(1000), "lg": rounded_up_log2}
        price = plans.wire(eval(section["plan"], vars(plans)), 1000, y, x)
        where = (section["plan"], y, x)
        assert price.steps == eval(section["steps"], letters), where
        if section["count"] and letters[section["count"]].bit_count() > 1:
            assert price.busiest <= eval(section["limit"], letters), where
        else:
            assert price.busiest == eval(section["nbytes"], letters), where


def rounded_up_log2(count):
    return (count - 1).bit_length()


@pytest.mark.parametrize(
    ("plan", "grid", "steps"),
    [
        (RING, (32, 32), 2046),
        (RING, (34, 64), 4350),
        (RING, (48, 72), 6910),
        (HIERARCHICAL, (64, 16), 186),
        (TORUS, (34, 64), 192),
        (TORUS, (32, 68), 196),
        (TORUS, (48, 72), 236),
        (TORUS, (54, 64), 232),
    ],
)
def test_step_counts_of_the_papers(plan, grid, steps):
    assert plans.wire(plan, 102_228_128, *grid).steps == steps


def test_time_in_lock_step_is_the_published_cost_model():
    y, x, nbytes = 272, 4, 51_114_064
    row, column = Fraction(2 * (x - 1), x) * nbytes, Fraction(2 * (y - 1), y) * nbytes
    assert sum(leg.nbytes for leg in plans.wire(TORUS, nbytes, y, x).legs) == row + column / x
    assert [leg.nbytes for leg in plans.wire(HIERARCHICAL, nbytes, y, x).legs] == [row, column, row]


def test_the_docs_hold_the_printed_table_and_nothing_heavy_is_imported():
    code = (
        "import runpy, sys; runpy.run_module('megabatch.plans', run_name='__main__'); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.count("\n") == 10
    assert ran.stdout in DOCS.read_text()
