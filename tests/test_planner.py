"""The planner against what it stands on: messages, real models, worked sums, published results."""

import json
import runpy
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import models, plans, recipes
from megabatch.batch import Stage, count_steps
from megabatch.bench.describe import describe
from megabatch.config import Hybrid
from megabatch.errors import UserError
from megabatch.planner import forecast, load, machine_file, published, workload
from megabatch.planner.best import fastest
from megabatch.planner.bundled import MACHINES
from megabatch.planner.cost import Line, Price, legs, price
from megabatch.planner.length import epochs_to_target, stretches
from megabatch.planner.machine import Machine, Network, Node, Rate, Sending, Spine
from megabatch.planner.pace import expected_maximum
from megabatch.planner.run import Job
from megabatch.planner.search import as_configured, candidates, compare
from megabatch.planner.settings import BUCKETS_MB, LANES, PLANNED, Setting
from megabatch.planner.step import SentBucket, arrival, buckets, held_up, send, step
from megabatch.plans import HIERARCHICAL, RING, TORUS, through
from megabatch.plans.names import plan_of
from megabatch.recipes.jia2018 import jia_hybrid
from megabatch.report import tables
from megabatch.sync.buckets import buckets_of
from megabatch.sync.choice import choose_plan
from megabatch.sync.execute import LANES as ENGINE_LANES

DOCS = Path(__file__).parents[1] / "docs" / "planner.md"
HALF, FULL = 51_114_064, 102_228_128  # ResNet-50's gradients in fp16 and fp32


# --- workload: the formulas are the real models


@pytest.mark.parametrize("name", models.names())
def test_a_bundled_model_is_the_real_one_layer_by_layer(name):
    size, channels, classes = {"small": (8, 1, 10), "small20": (32, 3, 10)}.get(
        name, (227 if name.startswith("alexnet") else 224, 3, 1000)
    )
    with torch.device("meta"):
        net = models.build(name, classes, channels)
        images = torch.empty(1, channels, size, size)
    assert workload.bundled(name, size, channels, classes) == describe(net, images, name)
    order = [p.numel() for p in reversed(list(net.parameters()))]
    assert [n for n, _ in workload.bundled(name, size, channels, classes).gradients()] == order


def test_sizes_that_are_published():
    assert workload.bundled("resnet50").parameters == 25_557_032
    assert workload.bundled("alexnet", 227).parameters == 60_965_224
    assert 330e6 < workload.bert_large().parameters < 340e6


def test_backward_is_over_with_the_last_gradient():
    ready = [share for _, share in workload.bundled("resnet50").gradients()]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0


def test_a_workload_survives_its_json():
    own = workload.bundled("small", 8, 1, 10)
    assert workload.from_json(own.to_json()) == own


# --- price: the formulas are the messages

UNIFORM = Machine("uniform", 1, None, Network(3e-6, 2e9))
NODES_OF_4 = Machine("nodes", 4, Node(1e-6, 7e9), Network(5e-6, 1e9, nics=2))
RACKS_OF_2 = replace(NODES_OF_4, spine=Spine(9e-6, nodes_per_rack=2, oversubscription=4.0))
GRIDS = [(1, 2), (1, 7), (2, 2), (3, 5), (4, 4), (2, 8), (8, 2), (5, 3), (6, 1)]
ALIGNED = [(1, 16), (2, 4), (4, 2), (4, 4), (2, 8), (8, 2), (8, 4), (4, 8), (16, 2), (2, 16)]


def run_messages(messages, nbytes, latency, bandwidth, world):
    """When the last message arrives: a rank sends when it has received all of earlier steps."""
    got = [[0.0] for _ in range(world)]  # by rank: arrivals, by step
    free = [0.0] * world
    waiting = dict.fromkeys(range(world), 0.0)
    arrivals = []
    for message in sorted(messages, key=lambda m: m.step):
        for other in [a for a in arrivals if a[0] < message.step]:
            waiting[other[1]] = max(waiting[other[1]], other[2])
            arrivals.remove(other)
        start = max(free[message.source], waiting[message.source])
        seconds = float(message.slice.share) * nbytes / bandwidth
        free[message.source] = start + seconds
        arrivals.append((message.step, message.destination, start + seconds + latency))
        got[message.destination].append(arrivals[-1][2])
    return max(max(times) for times in got)


@pytest.mark.parametrize("name", [n for n in PLANNED if "halving" not in n and n != "three_phase"])
def test_a_price_is_the_time_of_the_messages_run_one_by_one(name):
    for (y, x), nbytes in product(GRIDS, (0, 1_000_000)):
        taken = run_messages(plans.lower(PLANNED[name], y, x), nbytes, 3e-6, 2e9, y * x)
        assert price(PLANNED[name], y, x, UNIFORM).seconds(nbytes) == pytest.approx(taken, rel=1e-9)


@pytest.mark.parametrize("name", ["ring:halving_doubling", "three_phase", "torus:halving_doubling"])
def test_so_is_that_of_halving_and_doubling_on_powers_of_two(name):
    for (y, x), nbytes in product([(1, 2), (2, 2), (1, 8), (4, 2), (4, 4)], (0, 1_000_000)):
        taken = run_messages(plans.lower(PLANNED[name], y, x), nbytes, 3e-6, 2e9, y * x)
        assert price(PLANNED[name], y, x, UNIFORM).seconds(nbytes) == pytest.approx(taken, rel=1e-9)


@pytest.mark.parametrize(("grid", "lanes"), [((4, 2), 1), ((2, 4), 3), ((1, 8), 1)])
def test_a_hybrid_is_priced_as_the_trainer_runs_it(grid, lanes):
    """The trainer's own buckets of the real net, its choice by size, and that plan's messages one
    by one: fc6 and fc7 by a ring, all else hierarchically."""
    config = recipes.jia2018_alexnet().resized(batch=64)
    rate = Rate(config.model, 8, 1000.0)
    job = Job.of(config, replace(UNIFORM, rates=(rate,), chip="cpu"), 8)
    setting = Setting("hybrid", grid, config.bucket_mb, "fp16", lanes)
    (made,) = job.steps(setting)
    with torch.device("meta"):
        net = models.build(config.model, 1000)
    choice = choose_plan("hybrid", "gloo", thresholds=config.hybrid.thresholds)
    taken, off_wire, free = set(), 0.0, [0.0] * lanes
    full = buckets_of(net.parameters(), 1e6 * config.bucket_mb)
    for number, (bucket, sent) in enumerate(zip(full, made.sent, strict=True)):
        nbytes = 2 * bucket.tree.length
        plan = choice.plan(nbytes)
        taken.add(plan)
        seconds = run_messages(plans.lower(plan, *grid), nbytes, 3e-6, 2e9, 8)
        latency = run_messages(plans.lower(plan, *grid), 0, 3e-6, 2e9, 8)
        start = max(sent.ready, off_wire, free[number % lanes])
        off_wire = start + seconds - latency
        free[number % lanes] = start + seconds
        assert sent.nbytes == nbytes
        assert (sent.start, sent.end) == pytest.approx((start, start + seconds), rel=1e-9)
    assert len(taken) == 2
    found = job.forecast(setting)
    assert found.parted == (("hierarchical", 3), ("ring", 2))
    assert found.train_seconds == pytest.approx(job.train_seconds(setting), rel=1e-12)


@given(
    threshold=st.floats(0.001, 200), wire=st.sampled_from(["fp32", "fp16"]), size=st.floats(0.1, 99)
)
@settings(max_examples=30, deadline=None)
def test_a_hybrids_threshold_parts_buckets_where_the_trainers_does(threshold, wire, size):
    hybrid = replace(recipes.jia2018().hybrid, threshold_mb=threshold)
    config = replace(published.imagenet("alexnet_bn", 64, 1), hybrid=hybrid)
    job = Job.of(config, replace(NODES_OF_4, rates=(Rate("alexnet_bn", 8, 1000.0),)), 16)
    cost = job.price(Setting("hybrid", (4, 4), size, wire))
    alone = {
        plan_of(name): job.price(Setting(name, (4, 4), size, wire))
        for name in ("hierarchical", "ring")
    }
    choice = choose_plan("hybrid", "nccl", thresholds=hybrid.thresholds)
    for bucket in job.buckets(size, wire):
        assert cost.of(bucket.nbytes) == alone[choice.plan(bucket.nbytes)]
    edge = round(1e6 * threshold)  # the largest small one, and the smallest large one
    assert [cost.of(edge), cost.of(edge + 1)] == [*alone.values()]


def test_a_hybrid_of_one_way_is_that_way():
    config = published.imagenet("resnet50", 8192, 1)
    torus = replace(config, hybrid=Hybrid("torus", "torus", 1.0), plan="hybrid")
    settings = [Setting(plan, (16, 4), 4.0, "fp16", LANES) for plan in ("torus", "hybrid")]
    for place in ("abci", replace(NODES_OF_4, rates=(Rate("resnet50", 8, 10.0),),
                                  sending=Sending(2e-4, 3e-9, 4))):  # fmt: skip
        plain, parted = (Job.of(torus, place, 64).forecast(setting) for setting in settings)
        assert plain.seconds_to_target == pytest.approx(parted.seconds_to_target, rel=1e-12)
        assert plain.interval == pytest.approx(parted.interval, rel=1e-12)


def shared_links(stage, place):
    """Seconds a byte of a phase: in each step the busiest of all links that its messages cross."""
    node, rack = place.workers_per_node, place.workers_per_rack
    total = 0.0
    messages = stage.messages()
    for number in range(1 + max((m.step for m in messages), default=-1)):
        load = {}
        for m in (m for m in messages if m.step == number):
            share = float(m.slice.share)
            nics = place.network.nics * place.network.bytes_per_second
            if m.source // node == m.destination // node:
                links = {("worker", m.source): place.node.bytes_per_second}
            else:
                links = {("nics", m.source // node): nics}
            if rack and m.source // rack != m.destination // rack:
                uplinks = nics * place.spine.nodes_per_rack / place.spine.oversubscription
                links["uplinks", m.source // rack] = uplinks
            for link, bandwidth in links.items():
                load[link] = load.get(link, 0.0) + share / bandwidth
        total += max(load.values())
    return total


@pytest.mark.parametrize("place", [NODES_OF_4, RACKS_OF_2], ids=["nodes", "racks"])
@pytest.mark.parametrize("name", PLANNED)
def test_bytes_are_priced_on_the_links_that_the_messages_cross(name, place):
    for y, x in ALIGNED:
        stages = [s for s in plans.on_grid(PLANNED[name], y, x) if len(s.groups[0].members) > 1]
        for stage, leg in zip(stages, legs(PLANNED[name], y, x, place), strict=True):
            exact = shared_links(stage, place)
            assert leg.phase == stage.phase
            if stage.phase.op in ("reduce", "broadcast"):
                # the ends of a chain or a tree leave slow links idle, which the price does not see
                assert 0.999 * exact <= leg.seconds_per_byte <= 1.6 * exact, (y, x)
            else:
                assert leg.seconds_per_byte == pytest.approx(exact), (y, x, str(leg.phase))


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(list(PLANNED)),
    y=st.integers(1, 9),
    x=st.integers(1, 9),
)
def test_grids_that_lie_across_the_nodes_are_never_priced_too_low(name, y, x):
    if y * x % 4:
        return
    stages = [s for s in plans.on_grid(PLANNED[name], y, x) if len(s.groups[0].members) > 1]
    for stage, leg in zip(stages, legs(PLANNED[name], y, x, RACKS_OF_2), strict=True):
        exact = shared_links(stage, RACKS_OF_2)
        slack = 2.5 if leg.phase.wiring == "ring" else 5  # swaps of odd lines are bounded only
        assert 0.999 * exact <= leg.seconds_per_byte <= slack * exact, (y, x, str(leg.phase))


def latency_of(source, destination):
    if source // 8 != destination // 8:
        return 9e-6
    return 5e-6 if source // 4 != destination // 4 else 1e-6


@pytest.mark.parametrize("name", PLANNED)
def test_latency_is_that_of_the_longest_way_through_the_messages(name):
    for y, x in ALIGNED:
        arrived = [0.0] * (y * x)
        stages = plans.on_grid(PLANNED[name], y, x)
        for stage in stages:
            held = dict(enumerate(arrived))
            messages = stage.messages()
            for number in range(1 + max((m.step for m in messages), default=-1)):
                sent = [
                    (m.destination, held[m.source] + latency_of(m.source, m.destination))
                    for m in messages
                    if m.step == number
                ]
                for rank, when in sent:
                    held[rank] = max(held[rank], when)
            arrived = [held[rank] for rank in range(y * x)]
        found = price(PLANNED[name], y, x, RACKS_OF_2).latency
        # a price takes each phase at its worst, a way through all of them need not be
        assert max(arrived) <= found * 1.0001
        assert found <= 1.35 * max(arrived), (y, x, found, max(arrived))


def test_the_worked_sums_of_the_cost_model():
    def ms(plan, y, x, place, nbytes):
        return 1e3 * price(plan, y, x, place).seconds(nbytes)

    goyal = Machine("goyal", 1, None, Network(20e-6, 6.25e9))
    halving = through(RING, "halving_doubling")
    assert ms(RING, 1, 32, goyal, FULL) == pytest.approx(32.9, abs=0.05)
    assert ms(halving, 1, 32, goyal, FULL) == pytest.approx(31.9, abs=0.05)
    assert ms(RING, 1, 32, goyal, 1e6) == pytest.approx(1.55, abs=0.005)
    assert ms(halving, 1, 32, goyal, 1e6) == pytest.approx(0.51, abs=0.005)
    alone = Machine("abci, a worker a node", 1, None, Network(40.8e-6, 12.5e9))
    assert ms(RING, 1, 1088, alone, HALF) == pytest.approx(96.9, abs=0.05)
    nodes = Machine("abci", 4, Node(9e-6, 50e9), Network(40.8e-6, 12.5e9, nics=2))
    assert ms(TORUS, 272, 4, nodes, HALF) == pytest.approx(27.8, abs=0.05)
    # rows span nodes: each ring has one NIC of 12.5 GB/s, two columns share one
    spanning = replace(nodes, node=Node(40.6e-6, 50e9))
    spanning = replace(spanning, network=Network(40.8e-6, 12.5e9, 2, flow_bytes_per_second=12.5e9))
    assert ms(TORUS, 34, 32, spanning, HALF) == pytest.approx(13.6, abs=0.05)
    h100 = Machine("h100", 8, Node(3.4e-6, 370e9), Network(14e-6, 47e9, nics=8))
    for y, known in ((8, 0.72), (32, 1.42), (448, 13.1)):
        assert ms(TORUS, y, 8, h100, HALF) == pytest.approx(known, abs=0.05)


def test_rings_that_share_a_nic_share_its_bandwidth():
    one, many = (replace(NODES_OF_4, network=Network(5e-6, 1e9, nics=nics)) for nics in (1, 4))
    shared = price(TORUS, 8, 4, one).seconds_per_byte - price(TORUS, 8, 4, many).seconds_per_byte
    assert shared == pytest.approx(2 * 7 / 8 * (1 / 1e9 - 1 / 4e9))
    # masters alone send no more out of a node than four columns do, all through one NIC
    column = next(leg for leg in legs(HIERARCHICAL, 8, 4, one) if leg.phase.axis == "y")
    assert column.seconds_per_byte == pytest.approx(2 * 7 / 8 / 1e9)


@pytest.mark.parametrize("name", PLANNED)
def test_work_is_that_of_the_messages_one_by_one(name):
    """Each worker has half a core: what all send, over all of their cores."""
    place = replace(UNIFORM, sending=Sending(1e-4, 2e-9, cores=0.5 * UNIFORM.workers_per_node))
    for y, x in [*GRIDS, (3, 1), (5, 7)]:
        messages = plans.lower(PLANNED[name], y, x)
        tensors = float(sum(message.slice.share for message in messages))
        work = price(PLANNED[name], y, x, place).work(1e6)
        known = (1e-4 * len(messages) + 2e-9 * 1e6 * tensors) / (0.5 * y * x)
        assert work == pytest.approx(known, rel=1e-9), (y, x)
        assert price(PLANNED[name], y, x, UNIFORM).work(1e6) == 0.0


def test_a_slow_flow_slows_one_ring_and_not_four():
    slow = replace(NODES_OF_4, network=Network(5e-6, 1e9, flow_bytes_per_second=0.25e9))
    free = replace(NODES_OF_4, network=Network(5e-6, 1e9))
    assert price(TORUS, 8, 4, slow) == price(TORUS, 8, 4, free)
    ratio = price(RING, 8, 4, slow).seconds_per_byte / price(RING, 8, 4, free).seconds_per_byte
    assert ratio == pytest.approx(4)


def test_blocks_of_ranks_count_what_leaves_them():
    assert Line(8, 4, 32).leaving_ring(4) == 4
    assert Line(4, 1, 32).leaving_ring(4) == 0
    assert Line(8, 4, 32, alone=True).leaving_ring(4) == 1
    assert Line(6, 1, 24).touches(4) == 2


# --- step: two timelines


def test_one_bucket_is_the_closed_form():
    made = step(0.3, 1, [SentBucket(1e6, 1.0)], Price(0.01, 1e-7))
    assert made.exposed_seconds == pytest.approx(0.01 + 0.1)
    assert made.seconds == pytest.approx(0.3 + 0.11)
    early = step(0.3, 1, [SentBucket(1e6, 0.2)], Price(0.01, 1e-7))
    assert early.exposed_seconds == 0.0


@st.composite
def some_buckets(draw):
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=12)))
    return [SentBucket(draw(st.floats(1, 1e8)), share) for share in ready]


prices = st.builds(Price, *[st.floats(0, 0.01), st.floats(0, 1e-8)] * 2)


@settings(max_examples=80, deadline=None)
@given(full=some_buckets(), cost=prices, seconds=st.floats(0.001, 1), lanes=st.integers(1, 4))
def test_a_step_lies_between_its_longer_part_and_the_sum(full, cost, seconds, lanes):
    wire = sum(cost.seconds(bucket.nbytes) for bucket in full)
    made = step(seconds, 1, full, cost, lanes=lanes)
    work = sum(cost.work(bucket.nbytes) for bucket in full)
    assert made.seconds <= seconds + wire + work + 1e-9
    busy = sum(cost.seconds_per_byte * bucket.nbytes for bucket in full)
    # the cores do all work of computing and sending within the step
    assert made.seconds >= max(seconds + work, busy) - 1e-9
    assert step(seconds, 1, full, cost, lanes=1).seconds >= made.seconds - 1e-9
    assert step(seconds, 1, full, cost, overlap=False).seconds >= made.seconds - 1e-9


@settings(max_examples=60, deadline=None)
@given(full=some_buckets(), cost=prices, factor=st.floats(1, 10))
def test_a_slower_wire_never_makes_a_step_faster(full, cost, factor):
    slower = Price(*(factor * part for part in cost))
    assert step(0.1, 2, full, slower).seconds >= step(0.1, 2, full, cost).seconds - 1e-12


def test_buckets_leave_in_order_when_full_and_when_the_wire_is_free():
    full = [SentBucket(100, ready) for ready in (0.5, 0.6, 1.0)]
    sent = send(full, Price(1, 0.01), 0.0, 10.0)
    assert [(b.start, b.end) for b in sent] == [(5, 7), (7, 9), (10, 12)]
    both = send(full[:2], Price(1, 0.01), 0.0, 10.0, lanes=2)
    assert [(b.start, b.end) for b in both] == [(5, 7), (6, 8)]


def test_sending_takes_from_backward_what_the_cores_do_for_it():
    cost = Price(1.0, 0.04, message_work=1.0, byte_work=0.01)  # 4 s on the wire, 2 s of the cores
    first, last = send([SentBucket(100, 0.5), SentBucket(100, 1.0)], cost, 0.0, 10.0)
    assert (first.start, first.off_wire, first.end, first.work) == (5.0, 9.0, 10.0, 2.0)
    assert last.ready == last.start == 12.0  # at half pace while the first was on the wire
    assert held_up(5.0, [first]) == 5.0
    assert held_up(6.0, [first]) == 7.0
    # cores that do nothing but send for 5 s
    flooded = cost._replace(byte_work=0.04)
    first, last = send([SentBucket(100, 0.5), SentBucket(100, 1.0)], flooded, 0.0, 10.0)
    assert (first.off_wire, last.ready) == (10.0, 15.0)
    # backward is over after 15 s, but the step is not before its last bucket is there
    made = step(15.0, 1, [SentBucket(100, 0.0)], cost)
    assert made.exposed_seconds == pytest.approx(2.0)
    assert step(15.0, 1, [SentBucket(100, 1.0)], cost).exposed_seconds == pytest.approx(5.0)


def test_buckets_hold_all_gradients_once():
    net = workload.bundled("resnet50")
    for limit, count in ((1e-9, 161), (1e9, 1)):
        assert len(buckets(net, limit, "fp32")) == count
    for limit in (1e-9, 1.0, 25.0, 1e9):
        assert sum(b.nbytes for b in buckets(net, limit, "fp16")) == HALF
        assert sum(b.nbytes for b in buckets(net, limit, "fp32")) == FULL


def test_the_slowest_of_many_is_expected_later():
    for count, known in ((1, 0.0), (10, 1.5388), (100, 2.5076), (1000, 3.2414)):
        assert expected_maximum(count) == pytest.approx(known, abs=0.02)
    values = [expected_maximum(n) for n in range(1, 300)]
    assert all(a < b for a, b in pairwise(values))


def test_rows_measured_on_several_workers_are_not_charged_twice_for_the_slowest():
    place = Machine("m", 8, Node(0.0, 1e15), rates=(Rate("resnet50", 32, 100.0, workers=8),))
    config = published.imagenet("resnet50", 256, 1)
    assert forecast(config, place, 8).step_seconds == pytest.approx(0.32, rel=1e-4)


def test_the_quick_way_through_a_step_is_the_long_one():
    full = buckets(workload.bundled("resnet50"), 4.0, "fp32")
    for lanes, latency, pace_ in product((1, 3), (0.0, 1e-4, 3e-3), (0.0, 1e-10, 5e-9)):
        sent = send(full, Price(latency, pace_), 0.01, 0.02, lanes)
        last, under_way = arrival(full, Price(latency, pace_), 0.01, 0.02, lanes)
        assert last == pytest.approx(max(one.end for one in sent), rel=1e-12)
        assert under_way == pytest.approx(sum(one.end - one.start for one in sent), rel=1e-9)


def test_multiprocessors_that_send_do_not_compute():
    full, cost = [SentBucket(1e6, 0.5)], Price(0.01, 1e-8)  # 20 ms under way, hidden
    free = step(0.3, 1, full, cost)
    held = step(0.3, 1, full, cost, sending_share=0.25)
    assert held.seconds - free.seconds == pytest.approx(0.25 * 0.02)
    assert step(0.3, 1, full, cost, sending_share=0.25, overlap=False).seconds == pytest.approx(
        step(0.3, 1, full, cost, overlap=False).seconds
    )


# --- run


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 400),
    grown=st.lists(st.tuples(st.floats(0.1, 4), st.integers(1, 900)), max_size=3),
    images=st.integers(10, 2000),
)
def test_steps_are_counted_as_the_trainer_counts_them(batch, grown, images):
    begins = sorted(dict(grown).items())
    config = replace(
        published.imagenet("resnet50", batch, 5.0), stages=tuple(Stage(e, b) for e, b in begins)
    )
    found = stretches(config, images, 5.0)
    assert sum(steps for _, steps in found) == count_steps(config.all_stages, images, 5.0)[0]


def test_a_target_ends_the_run_where_reference_runs_reach_it():
    config = replace(published.imagenet("resnet50", 8192), target_accuracy=0.759)
    images, net = workload.images_of(config), workload.usual("resnet50")

    def epochs(**changes):
        return epochs_to_target(replace(config, **changes), net, images)

    assert epochs() == 42.0
    assert epochs(batch=(8192 + 13056) // 2) == pytest.approx(43.7)
    assert epochs(batch=10**6) == epochs(target_accuracy=0.80) == epochs(target_accuracy=None) == 90
    # another model has its own epochs, never ResNet-50's
    assert epochs_to_target(config, workload.usual("vgg16"), images) == 90.0


def test_time_is_steps_and_evaluation_and_its_interval_holds_it():
    config = replace(published.imagenet("resnet50", 8192, 4.0), eval_every=1.0)
    found = forecast(config, "dgx-h100", 64)
    steps = count_steps(config.all_stages, workload.IMAGENET, 4.0)[0]
    assert found.train_seconds == pytest.approx(steps * found.step_seconds)
    assert found.seconds_to_target == found.train_seconds + found.evaluation_seconds
    low, high = found.interval
    assert low < found.seconds_to_target < high
    assert 0 < found.efficiency <= 1
    assert found.gpu_hours == pytest.approx((found.seconds_to_target + 20) * 64 / 3600)
    assert found.dollars is None
    assert found.kwh == pytest.approx(found.gpu_hours * 1.275)
    paid = forecast(config, "p5.48xlarge", 64)
    assert paid.dollars == pytest.approx(paid.gpu_hours * 98.32 / 8)


def test_input_that_is_too_slow_is_named():
    slow = replace(load("dgx-h100"), input_images_per_second=1000.0)
    found = forecast(published.imagenet("resnet50", 4096, 1), slow, 64)
    assert found.limit == "input"
    assert found.images_per_second == pytest.approx(8 * 1000.0)


@pytest.mark.parametrize(("images", "longer"), [(16, 10), (64, 5), (128, 3)])
def test_what_sending_after_backward_costs_is_what_the_docs_say(images, longer):
    job = Job.of(published.imagenet("resnet50", 512 * images), "hgx-h200", 512)
    choices = list(candidates(512, wire="fp16").settings())
    least, late = (
        min(job.steps(replace(setting, overlap=overlap))[0].seconds for setting in choices)
        for overlap in (True, False)
    )
    assert round(100 * (late / least - 1)) == longer
    said = " ".join(DOCS.read_text().split())
    assert f"{longer} % with {images}" in said or f"{longer} % longer with {images} images" in said


def test_the_search_finds_what_going_through_all_finds():
    config = published.imagenet("resnet50", 8192, 1)
    best = forecast(config, "abci", 256, wire="fp16")
    job = Job.of(config, "abci", 256)
    choices = candidates(256, wire="fp16")
    every = [job.train_seconds(setting) for setting in choices.settings()]
    assert fastest(job, choices)[0] == min(every)
    assert best.train_seconds <= 1.01 * min(every)
    assert len(every) == 8 * (2 + 5 * 8)  # two flat plans, five on eight grids


def test_a_recipes_hybrid_is_one_of_the_plans_that_are_searched():
    config = recipes.jia2018_alexnet()
    job = Job.of(config, "tencent-p40", 1024)
    every = candidates(1024, wire="fp16", hybrid=config.hybrid)
    times = {setting: job.train_seconds(setting) for setting in every.settings()}
    assert {setting.plan for setting in times} == {*PLANNED, "hybrid"}
    assert fastest(job, every)[0] == min(times.values())
    hybrid = candidates(1024, plan="hybrid", wire="fp16", hybrid=config.hybrid)
    assert {*hybrid.settings()} == {one for one in times if one.plan == "hybrid"}
    seconds, setting = fastest(job, hybrid)
    assert seconds == times[setting] == min(times[one] for one in hybrid.settings())
    found = {row.setting.plan: row for row in compare(job, "plans", every)}
    assert found["hybrid"].train_seconds <= 1.01 * seconds
    assert forecast(config, "tencent-p40", 1024, plan="hybrid").setting.plan == "hybrid"
    flat = Hybrid("ring:halving_doubling", "ring", 1.0)  # two lines of all: no grid to choose
    assert candidates(64, plan="hybrid", hybrid=flat).shapes == [("hybrid", (1, 64))]


def test_a_recipe_is_forecast_as_it_sums():
    def own(recipe, machine, gpus):
        return as_configured(Job.of(recipe, machine, gpus))

    jia, goyal = recipes.jia2018(), recipes.goyal2017()
    assert own(jia, "tencent-p40", 1024) == Setting("hybrid", (128, 8), 25.0, "fp16", LANES)
    assert own(goyal, "bigbasin-p100", 256) == Setting("three_phase", (32, 8), 25.0, "fp32", LANES)
    assert own(recipes.you2018(), "stampede2-knl", 64).grid == (1, 64)
    assert own(recipes.mikami2018(), "abci", 2).grid == (1, 2)
    assert own(recipes.mlperf(), "abci", 64) is None  # the backend's


def test_comparisons():
    job = Job.of(published.imagenet("resnet50", 8192, 1), "abci", 64)
    every = candidates(64)
    assert {f.setting.plan for f in compare(job, "plans", every)} == set(PLANNED)
    assert {f.setting.grid[1] for f in compare(job, "grids", every)} == {1, 2, 4, 8, 16, 32}
    assert len({f.setting.bucket_mb for f in compare(job, "buckets", every)}) == 8
    assert [f.setting.wire for f in compare(job, "wire", every)] == ["fp32", "fp16"]


def test_a_hundred_thousand_gpus_are_searched_in_no_time():
    config, found = published.imagenet("resnet50", 131072), []
    calls = calls_of(lambda: found.append(forecast(config, "dgx-h100", 100_000)))
    assert calls < 100_000
    assert found[0].gpus == 100_000


def calls_of(function):
    """How many Python functions it calls: what it costs, the same on every machine. Three million
    take about a second."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_the_cost_does_not_grow_with_the_number_of_gpus():
    config = published.imagenet("resnet50", 131072)
    small, large = (
        calls_of(lambda gpus=gpus: forecast(config, "dgx-h100", gpus, grid=(gpus // 8, 8)))
        for gpus in (1024, 65536)
    )
    assert large <= 1.2 * small  # halving-doubling takes a step more each time they double
    # a search over all grids pays for the divisors
    sizes = [len(list(candidates(n).settings())) for n in (2**10, 2**13)]
    assert sizes[1] - sizes[0] == 3 * 5 * 8


# --- machines


def test_the_machines_of_the_papers_and_of_today_are_bundled():
    assert set(MACHINES) == {
        "bigbasin-p100", "mn1-p100", "tencent-p40", "abci", "stampede2-knl", "stampede2-skx",
        "horovod-v100-10gbe", "horovod-p100-25gbe", "dgx1-v100", "dgx2h", "dgx-a100", "dgx-h100",
        "hgx-h200", "dgx-b200", "p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge", "a3-highgpu-8g",
        "nd-h100-v5", "nd-a100-v4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "name"),
    [("ND H100 v5", "nd-h100-v5"), ("nd_h100_v5", "nd-h100-v5"), ("P5.48xlarge", "p5.48xlarge"),
     ("h200", "hgx-h200"), ("b200", "dgx-b200"), ("DGX-1", "dgx1-v100")],
)  # fmt: skip
def test_a_machine_is_found_under_the_name_that_people_type(typed, name):
    assert load(typed) is MACHINES[name]


def test_plans_are_priced_with_the_lanes_that_the_trainer_has():
    assert LANES == ENGINE_LANES
    assert all(setting.lanes == LANES for setting in candidates(8).settings())


def test_every_constant_has_a_source_and_one_at_most_is_fitted():
    for place in MACHINES.values():
        for name in ("node", "network", "spine", "rates", "jitter", "launch_seconds",
                     "sending_share", "input_images_per_second", "price_per_gpu_hour",
                     "watts_per_gpu"):  # fmt: skip
            if getattr(place, name):
                assert place.sources.get(name), (place.name, name)
        if place.fitted:
            assert "fitted" in place.sources[place.fitted.split(".")[0]]
        assert sum("fitted on the" in source for source in place.sources.values()) <= 1
    fitted = {place.name for place in MACHINES.values() if place.fitted}
    assert fitted == {"abci", "stampede2-skx", "horovod-v100-10gbe"}


def test_machine_json_is_written_in_parts_and_read_back(tmp_path):
    file = tmp_path / "machine.json"
    row = {"model": "small", "micro": 16, "images_per_second": 10.0}
    machine_file.update(file, {"compute": [row, row | {"micro": 32}], "host": {"cpu": "x"}})
    link = {"latency_seconds": 1e-4, "bytes_per_second": 1e9}
    machine_file.update(
        file, {"links": {"node": link}, "workers_per_node": 4, "host": {"gpu": "y"}}
    )
    machine_file.update(file, {"compute": [row | {"images_per_second": 20.0}]})
    work = {"message_core_seconds": 1e-4, "byte_core_seconds": 1e-9, "cores": 8}
    machine_file.update(file, {"sending": work})
    machine_file.update(file, {"sending": {"cores": 2}})
    found = load(str(file))
    assert found.workers_per_node == 4
    assert found.node == Node(1e-4, 1e9)
    assert found.network is None
    assert found.sending == Sending(1e-4, 1e-9, cores=2)
    assert found.rates == (Rate("small", 16, 20.0), Rate("small", 32, 10.0))
    assert found.host == {"cpu": "x", "gpu": "y"}
    assert machine_file.from_json(machine_file.to_json(found)) == found
    with pytest.raises(UserError, match="has no network: megabatch bench sync adds it"):
        found.check_world(8)
    with pytest.raises(UserError, match=r"no key 'links\.node\.speed'"):
        machine_file.update(file, {"links": {"node": {"speed": 1}}})
    assert load(str(file)) == found


def test_speed_may_be_given_as_operations_a_second(tmp_path):
    file = tmp_path / "machine.json"
    row = {"model": "resnet50", "micro": 64, "flops": 312e12, "efficiency": 0.3}
    machine_file.update(file, {"compute": [row]})
    (rate,) = load(str(file)).rates
    # 4.09 G multiply-adds an image, forward; a pass has three times as many
    assert rate.images_per_second == pytest.approx(0.3 * 312e12 / (6 * 4.09e9), rel=1e-3)


@pytest.mark.parametrize("name", MACHINES)
def test_bundled_machines_survive_their_json(name):
    assert machine_file.from_json(machine_file.to_json(MACHINES[name])) == MACHINES[name]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("abbci", None, "there is no machine 'abbci': did you mean abci?"),
        ("missing.json", None, "missing.json cannot be read: No such file"),
        ("wrong.json", "{}", "wrong.json is not a machine.json: its format is none"),
        ("broken.json", "{", "broken.json is not a machine.json"),
        ("list.json", '{"format": "megabatch-machine-1", "links": [1]}', "links is .1.: give an"),
    ],
)
def test_a_wrong_machine_gets_one_sentence(tmp_path, monkeypatch, name, text, sentence):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        load(name)


@pytest.mark.parametrize(
    ("gpus", "sentence"),
    [
        (7, "7 GPUs do not fill dgx-h100's nodes of 8: give a divisor of 8"),
        (12, "give 8 or 16"),
        (0, "at least 1"),
        (512, "a batch of 256 leaves some of 512 GPUs without an image"),
    ],
)
def test_a_wrong_number_of_gpus_gets_one_sentence(gpus, sentence):
    with pytest.raises(UserError, match=sentence):
        forecast(published.imagenet("resnet50", 256), "dgx-h100", gpus)


# --- published


ROWS = published.rows()


def test_published_rows_are_met():
    promised = [row for row in ROWS if row.tolerance is not None and not row.given]
    assert len(promised) == 16
    assert [row.what for row in promised if not row.holds] == []


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("model", ["resnet50", "alexnet_bn"])
def test_a_bucket_size_that_nobody_published_is_the_best_for_as_many_lanes(lanes, model):
    """A paper sums in as many lanes as its row says, not in the trainer's."""
    for plan, grid in (("torus", (8, 8)), ("three_phase", (8, 8)), ("ring", (1, 64))):
        setting = Setting(plan, grid, 0, "fp16", lanes)

        def rate(megabytes, setting=setting):
            how = replace(setting, bucket_mb=megabytes)
            found = published.replay(MACHINES["abci"], 64, 2048, how, model=model)
            assert found.setting.lanes == lanes
            return found.images_per_second

        assert rate(0) >= max(map(rate, BUCKETS_MB)) / 1.01


def test_what_jias_hybrid_fuses_goes_hierarchically_in_his_rows():
    """fc6 and fc7 alone go by a ring: buckets that are larger than the threshold would take all."""
    hybrid = jia_hybrid()
    setting = Setting("hybrid", (64, 16), 0, "fp16")
    found = published.replay(
        MACHINES["tencent-p40"], 1024, 65536, setting, model="alexnet_bn_pool5", hybrid=hybrid
    )
    limit = 1e6 * hybrid.threshold_mb
    net = workload.bundled("alexnet_bn_pool5", 227)
    large = [2 * size for size, _ in net.gradients() if 2 * size > limit]
    sent = [b.nbytes for b in buckets(net, found.setting.bucket_mb, "fp16")]
    assert [nbytes for nbytes in sent if nbytes > limit] == large and len(large) == 2


def test_a_row_that_gave_a_constant_is_met_exactly():
    given_rows = [row for row in ROWS if row.given]
    assert len(given_rows) == 4
    assert all(abs(row.error) < 0.2 for row in given_rows)


def moved(name, **changes):
    """How far each published row moves, in points or per cent, if a machine's constant changes."""
    other = published.rows(MACHINES | {name: replace(MACHINES[name], **changes)})
    return {row.what: changed.error - row.error for row, changed in zip(ROWS, other, strict=True)}


def test_what_a_fitted_constant_moves():
    abci, skx, v100 = (MACHINES[n] for n in ("abci", "stampede2-skx", "horovod-v100-10gbe"))
    jitter = moved("abci", jitter=abci.jitter * 1.2)
    assert {what for what, by in jitter.items() if by} == {
        row.what for row in ROWS if row.paper == "Mikami 2018"
    }
    assert all(-0.7 < by < -0.2 for what, by in jitter.items() if "efficiency from 4" in what)
    flow = replace(v100.network, flow_bytes_per_second=v100.network.flow_bytes_per_second * 1.2)
    faster = moved("horovod-v100-10gbe", network=flow)
    assert faster["BERT-Large, 32 x 6 V100, ring"] < -10
    assert faster["BERT-Large, 32 x 6 V100, torus"] == 0
    rate = skx.rates[0].images_per_second * 1.2
    quicker = moved("stampede2-skx", rates=(Rate("resnet50", 16, rate),))
    assert quicker["1,600 CPUs, 90 epochs"] == pytest.approx(-17.5, abs=2)
    assert quicker["2,048 KNL, 90 epochs"] == 0


def test_half_the_assumed_jitter_more_or_less_moves_no_efficiency_by_three_points():
    for factor in (0.5, 1.5):
        for name in ("bigbasin-p100", "mn1-p100", "tencent-p40", "dgx-h100"):
            by = moved(name, jitter=MACHINES[name].jitter * factor)
            assert all(abs(by[row.what]) < 3 for row in ROWS if row.unit == "%")


def test_published_times_lie_inside_their_intervals_nine_of_ten_times():
    timed = [
        row for row in ROWS if row.paper.startswith("MLPerf") and row.interval and row.unit == "s"
    ]
    inside = [row.interval[0] <= row.published <= row.interval[1] for row in timed]
    assert len(timed) == 5
    assert sum(inside) >= 0.9 * len(timed)
    assert statistics.median(row.interval[1] / row.interval[0] for row in timed) <= 1.4


def test_the_docs_hold_the_tables():
    docs = DOCS.read_text()
    assert tables.published(ROWS) in docs
    assert tables.jitter() in docs
    assert tables.sources() in docs
    assert tables.chips() in docs


# --- real steps


@pytest.mark.parametrize("run", ["first", "second", "faster"])
def test_steps_between_emulated_hosts_are_still_foreseen(run, tmp_path):
    """As they were measured: results/planner says how."""
    folder = Path(__file__).parents[1] / "results" / "planner"
    script = runpy.run_path(str(folder / "emulated.py"))
    rows = json.loads((folder / run / "rows.json").read_text())
    place = json.loads((folder / run / "machine.json").read_text())
    idle = tmp_path / "machine.json"  # the same, if sending cost the cores nothing
    idle.write_text(json.dumps(place | {"sending": None}))
    errors, without = [], []
    for case, row in zip(script["cases"](), rows, strict=True):
        assert str(case) == row["what"]
        predicted = script["predict"](case, str(folder / run / "machine.json"))
        assert predicted == pytest.approx(row["predicted"])  # what was said before it was run
        errors.append(abs(predicted / row["seconds"] - 1))
        without.append(abs(script["predict"](case, str(idle)) / row["seconds"] - 1))
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.25
    both = [
        f"{kind(which):.1%}" for which in (errors, without) for kind in (statistics.median, max)
    ]
    found = f"| {run} | {' | '.join(both)} |".replace("%", " %")
    assert found in DOCS.read_text()
    assert found in (folder / "README.md").read_text()


def test_runs_of_others_are_foreseen_from_one_measured_speed():
    """MLPerf's logs: results/planner says which were looked at and which were held out."""
    folder = Path(__file__).parents[1] / "results" / "planner"
    script = runpy.run_path(str(folder / "mlperf.py"))
    said = (folder / "mlperf.md").read_text()
    for name, allowed in (("SEEN", 8.0), ("HELD", 8.0)):
        runs = script[name]
        found = [script["planned"](run) for run in runs]
        errors = [abs(script["error"](run, one)) for run, one in zip(runs, found, strict=True)]
        assert statistics.median(errors) <= allowed
        inside = [
            one.interval[0] <= run.seconds <= one.interval[1]
            for run, one in zip(runs, found, strict=True)
        ]
        assert statistics.mean(inside) >= 0.9
        assert statistics.median(one.interval[1] / one.interval[0] for one in found) <= 1.4
        *_, summary = script["replay"](runs)
        assert summary in said
        assert summary in DOCS.read_text()


def test_gpus_of_one_node_are_foreseen_from_the_speed_of_one():
    script = runpy.run_path(str(Path(__file__).parents[1] / "results/planner/one_node.py"))
    assert script["table"]() in DOCS.read_text()
    for row in script["rows"]():
        assert abs(row.error) < 12
        if "hours" in row.what:
            low, high = (end / 3600 for end in row.found.interval)
            assert low <= row.published <= high


# --- what users rely on


def test_the_planner_needs_neither_torch_nor_numpy():
    code = (
        "import sys, megabatch.verbs.plan, megabatch.report.plan; "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_row_for_json_has_plain_values():
    row = forecast(published.imagenet("resnet50", 256, 1), "dgx-h100", 8).row()
    wanted = {"gpus", "plan", "grid", "bucket_mb", "step_seconds", "exposed_seconds",
              "efficiency", "images_per_second", "seconds_to_target"}  # fmt: skip
    assert wanted <= set(json.loads(json.dumps(row)))
    assert Setting("ring", (1, 8), row["bucket_mb"]).overlap
