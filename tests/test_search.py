"""Fewest and cheapest GPUs against going through all of them; properties of forecasts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_planner import calls_of

from megabatch.config import Hybrid
from megabatch.errors import UserError
from megabatch.planner import forecast, smallest
from megabatch.planner.best import Possible, at_least, best, fastest
from megabatch.planner.bounds import least_latency, least_prices
from megabatch.planner.bundled import MACHINES
from megabatch.planner.cost import price
from megabatch.planner.machine import Machine, Network, Node, Rate, Spine
from megabatch.planner.pace import pace
from megabatch.planner.published import imagenet
from megabatch.planner.run import Job
from megabatch.planner.search import ROUNDING, advice, candidates, enough, hybrid_of
from megabatch.planner.settings import PLANNED
from megabatch.planner.workload import usual

GRIDS = [(1, 2), (1, 7), (2, 2), (3, 5), (4, 4), (2, 8), (8, 2), (5, 3), (6, 1), (12, 10), (34, 32)]

places = st.builds(
    lambda each, near, far, racks, jitter, launch: Machine(
        "m",
        each,
        Node(near, 1e11),
        Network(far, 1e10, nics=2),
        Spine(2 * far, racks, 2.0) if racks else None,
        rates=(Rate("resnet50", 128, 2000.0),),
        jitter=jitter,
        launch_seconds=launch,
        chip="a100",
    ),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.floats(1e-6, 2e-5),
    st.floats(1e-6, 1e-4),
    st.sampled_from([0, 3, 16]),
    st.floats(0, 0.05),
    st.floats(0, 1e-5),
)


def by_going_through_all(config, place, seconds):
    """(GPUs, hours) of the fewest and of the cheapest that are in time."""
    each = place.workers_per_node
    found = []
    for nodes in range(1, config.batch // each + 1):
        job = Job.of(config, place, nodes * each)
        choices = candidates(job.gpus, hybrid=hybrid_of(config))
        taken = min(job.seconds(s) for s in choices.settings())
        if taken <= seconds:
            found.append(((taken + place.start_seconds) * job.gpus / 3600, job.gpus))
    if not found:
        return None
    return min(gpus for _, gpus in found), min(found)[0]


hybrids = st.none() | st.builds(
    Hybrid, st.sampled_from([*PLANNED]), st.sampled_from([*PLANNED]), st.floats(0.05, 60)
)


def summed(config, hybrid):
    """The config with a hybrid to its plans, if there is one."""
    return config if hybrid is None else replace(config, plan="hybrid", hybrid=hybrid)


@settings(max_examples=25, deadline=None)
@given(place=places, batch=st.integers(40, 160), share=st.floats(0.02, 1.5), hybrid=hybrids)
def test_the_fewest_and_the_cheapest_are_those_of_all_numbers_of_nodes(place, batch, share, hybrid):
    config = summed(imagenet("resnet50", batch, 1.0), hybrid)
    each = place.workers_per_node
    assume(batch // each <= 40)
    alone = Job.of(config, place, each)
    seconds = share * min(alone.seconds(s) for s in candidates(each).settings())
    known = by_going_through_all(config, place, seconds)
    if known is None:
        with pytest.raises(UserError, match="no number of m's nodes does it in"):
            enough(config, place, seconds)
        return
    found = enough(config, place, seconds)
    assert found.fewest.gpus == known[0]
    assert found.fewest.seconds_to_target <= seconds * ROUNDING
    assert found.cheapest.seconds_to_target <= seconds * ROUNDING
    # of equals within the search's 1 %, the one least at risk is taken
    assert known[1] * 0.9999 <= found.cheapest.gpu_hours <= 1.011 * known[1]


@pytest.mark.parametrize(
    ("machine", "batch"), [("abci", 800), ("dgx-h100", 1600), ("p4d.24xlarge", 1632)]
)
def test_tight_targets_too_get_the_fewest_of_all(machine, batch):
    """Close to the least time there is, where most numbers of nodes almost do it."""
    config, place = imagenet("resnet50", batch), MACHINES[machine]
    each = place.workers_per_node
    times = {}
    for gpus in range(each, batch + 1, each):
        job = Job.of(config, place, gpus)
        times[gpus] = job.whole_run(fastest(job, candidates(gpus))[0])
    least = min(times.values())
    for target in (least * (1 + part / 20) ** 2 for part in range(20)):
        in_time = [gpus for gpus, seconds in times.items() if seconds <= target * ROUNDING]
        assert smallest(config, machine, target).gpus == min(in_time)


def test_a_cliff_does_not_hide_a_smaller_cluster():
    """1,024 GPUs of abci beat 1,028: growing steps of a quarter would jump over them."""
    config = imagenet("resnet50", 65536)
    at_1024 = forecast(config, "abci", 1024).seconds_to_target
    found = smallest(config, "abci", at_1024)
    assert found.gpus <= 1024
    with pytest.raises(UserError, match=r"no number of dgx-h100's nodes does it in 1 s: the fast"):
        smallest(imagenet("resnet50", 32768), "dgx-h100", 1.0)


def test_a_number_of_gpus_may_be_one_of_numpys():
    config = imagenet("resnet50", 8192, 90.0)
    ours, theirs = (forecast(config, "dgx-h100", kind(48)) for kind in (int, np.int64))
    assert theirs == ours


def test_a_target_is_searched_for_in_a_second():
    for machine, batch, seconds in (
        ("abci", 55296, 120.0), ("abci", 65536, 40.3), ("dgx-h100", 131072, 12.0),
        ("dgx-h100", 131072, 4.1),
    ):  # fmt: skip
        config = imagenet("resnet50", batch)
        # A second's worth, about.
        assert calls_of(partial(smallest, config, machine, seconds)) < 3_000_000


def test_advice_says_what_to_leave_idle_and_what_is_not_worth_it():
    config = imagenet("resnet50", 65536)
    job = Job.of(config, "abci", 1028)
    (said,) = advice(job, best(job, candidates(1028)), "fp32")
    assert said.startswith("leave 4 of 1,028 GPUs idle: 1,024 end in")
    large = Job.of(imagenet("resnet50", 8192), "dgx-h100", 4096)
    (said,) = advice(large, best(large, candidates(4096)), "fp32")
    assert said.startswith("2,048 GPUs, half as many, take")
    few = Job.of(imagenet("resnet50", 8192), "dgx-h100", 64)
    assert list(advice(few, best(few, candidates(64)), "fp32")) == []


# --- bounds that a search relies on


@settings(max_examples=150, deadline=None)
@given(place=places, name=st.sampled_from(list(PLANNED)), grid=st.sampled_from(GRIDS))
def test_no_price_has_less_latency_than_its_bound(place, name, grid):
    assert least_latency(PLANNED[name], *grid, place) <= price(
        PLANNED[name], *grid, place
    ).latency * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(
    place=places,
    nodes=st.integers(1, 130) | st.sampled_from([2**n for n in range(10)]),
    name=st.sampled_from(list(PLANNED)),
    wires=st.tuples(st.floats(1e9, 1e12), st.floats(1e8, 1e11), st.floats(0.5, 4)),
    data=st.data(),
)
def test_no_plan_costs_less_than_the_least_of_any(place, nodes, name, wires, data):
    inside, outside, oversubscription = wires
    place = replace(
        place,
        node=replace(place.node, bytes_per_second=inside),
        network=replace(place.network, bytes_per_second=outside),
        spine=place.spine and replace(place.spine, oversubscription=oversubscription),
    )
    gpus = nodes * place.workers_per_node
    assume(gpus > 1)
    shapes = [grid for plan, grid in candidates(gpus).shapes if plan == name]
    found = price(PLANNED[name], *data.draw(st.sampled_from([*shapes, (1, gpus)])), place)
    assert any(
        bound.latency <= found.latency * (1 + 1e-9)
        and bound.seconds_per_byte <= found.seconds_per_byte * (1 + 1e-9)
        for bound in least_prices(gpus, place)
    )


@settings(max_examples=40, deadline=None)
@given(place=places, nodes=st.integers(1, 24), batch=st.integers(200, 2000), hybrid=hybrids)
def test_no_setting_beats_the_bounds_of_a_job(place, nodes, batch, hybrid):
    config = summed(imagenet("resnet50", batch, 1.0), hybrid)
    job = Job.of(config, place, nodes * place.workers_per_node)
    choices = candidates(job.gpus, hybrid=hybrid_of(config))
    for setting in choices.settings():
        taken = job.train_seconds(setting)
        possible = Possible("fp32", mixed=hybrid is not None)
        assert possible.within(job, job.whole_run(taken) * (1 + 1e-9))
        cost = job.price(setting).least
        size = setting.bucket_mb
        least, any_size = at_least(job, cost, "fp32", size), at_least(job, cost, "fp32")
        assert any_size <= least * (1 + 1e-12) <= taken * (1 + 1e-11)
        stretches = zip(job.stretches, job.steps(setting), strict=True)
        long_way = sum(stretch.steps * one.seconds for stretch, one in stretches)
        assert taken == pytest.approx(long_way, rel=1e-9)
    least = min(map(job.train_seconds, choices.settings()))
    assert fastest(job, choices)[0] == pytest.approx(least, rel=1e-12)


# --- what must hold of every machine and setting


@settings(max_examples=60, deadline=None)
@given(
    place=places,
    nodes=st.integers(2, 40),
    batch=st.integers(400, 4000),
    better=st.sampled_from(["bandwidth", "node", "nics", "latency", "jitter", "speed", "sending"]),
    factor=st.floats(1.01, 10),
)
def test_a_better_machine_is_never_slower(place, nodes, batch, better, factor):
    place = replace(place, sending_share=0.1)
    network, node = place.network, place.node
    changes = {
        "bandwidth": {
            "network": replace(network, bytes_per_second=factor * network.bytes_per_second)
        },
        "node": {"node": replace(node, bytes_per_second=factor * node.bytes_per_second)},
        "nics": {"network": replace(network, nics=network.nics + 1)},
        "latency": {
            "network": replace(network, latency_seconds=network.latency_seconds / factor),
            "node": replace(node, latency_seconds=node.latency_seconds / factor),
        },
        "jitter": {"jitter": place.jitter / factor},
        "speed": {"rates": (Rate("resnet50", 128, 2000.0 * factor),)},
        "sending": {"sending_share": 0.1 / factor},
    }
    config = imagenet("resnet50", batch, 1.0)
    job = Job.of(config, place, nodes * place.workers_per_node)
    other = Job.of(config, replace(place, **changes[better]), job.gpus)
    for setting in list(candidates(job.gpus).settings())[::7]:
        assert other.seconds(setting) <= job.seconds(setting) * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(place=places, nodes=st.integers(1, 20), batch=st.integers(200, 2000))
def test_twice_as_slow_in_everything_takes_twice_as_long(place, nodes, batch):
    """Seconds come of seconds alone: a wrong dimension anywhere would show."""
    place = replace(place, sending_share=0.1, input_images_per_second=3000.0, chip="cpu")
    network, node, spine = place.network, place.node, place.spine
    slow = replace(
        place,
        node=Node(2 * node.latency_seconds, node.bytes_per_second / 2),
        network=replace(
            network,
            latency_seconds=2 * network.latency_seconds,
            bytes_per_second=network.bytes_per_second / 2,
        ),
        spine=spine and replace(spine, latency_seconds=2 * spine.latency_seconds),
        rates=(Rate("resnet50", 128, 1000.0),),
        launch_seconds=2 * place.launch_seconds,
        input_images_per_second=1500.0,
    )
    config = imagenet("resnet50", batch, 1.0)
    gpus = nodes * place.workers_per_node
    for setting in list(candidates(gpus).settings())[::23]:
        once, twice = (Job.of(config, one, gpus).forecast(setting) for one in (place, slow))
        assert twice.seconds_to_target == pytest.approx(2 * once.seconds_to_target, rel=1e-9)
        assert twice.interval == pytest.approx([2 * end for end in once.interval], rel=1e-9)
        assert twice.efficiency == pytest.approx(once.efficiency, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(place=places, nodes=st.integers(1, 20))
def test_intervals_hold_the_forecast_and_widen_with_what_is_assumed(place, nodes):
    config = imagenet("resnet50", 4000, 1.0)
    taken = pace(replace(place, jitter=0.0), usual("resnet50"))
    # the same curve, but measured
    points = tuple(Rate("resnet50", n, n / taken.seconds(n)) for n in (1, 8, 64, 512, 4000))
    job = Job.of(config, place, nodes * place.workers_per_node)
    sure = Job.of(config, replace(place, rates=points), job.gpus)
    setting = next(candidates(job.gpus).settings())
    low, high = job.interval(setting)
    assert low < job.seconds(setting) < high
    assert sure.seconds(setting) == pytest.approx(job.seconds(setting), rel=1e-6)
    narrow = sure.interval(setting)
    assert low < narrow[0] < narrow[1] < high
