"""machine.json with mistakes: one sentence each, never a traceback, nothing taken in silence."""

import json
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.planner import load, machine_file
from megabatch.planner.bundled import MACHINES
from megabatch.planner.machine import Machine, Network, Node, Rate
from megabatch.planner.published import imagenet
from megabatch.planner.search import forecast

GOOD = {
    "format": "megabatch-machine-1",
    "name": "ours",
    "workers_per_node": 4,
    "chip": "a100",
    "links": {
        "node": {"latency_seconds": 1e-5, "bytes_per_second": 1e11},
        "network": {"latency_seconds": 2e-5, "bytes_per_second": 1e10, "nics": 2,
                    "flow_bytes_per_second": None, "transport": "infiniband"},
        "spine": {"latency_seconds": 3e-5, "nodes_per_rack": 8, "oversubscription": 3.0},
    },
    "sending": {"message_core_seconds": 2e-4, "byte_core_seconds": 3e-9, "cores": 16},
    "compute": [{"model": "resnet50", "micro": 64, "images_per_second": 2000.0, "workers": 4}],
    "jitter": 0.02,
    "launch_seconds": 1e-5,
    "sending_share": 0.1,
    "input_images_per_second": 20000.0,
    "largest_micro": 512,
    "start_seconds": 30.0,
    "price_per_gpu_hour": 2.5,
    "watts_per_gpu": 800,
    "sources": {"jitter": "guess"},
    "host": {"gpu": "A100"},
    "date": "2026-01-31",
}  # fmt: skip


def paths(said, before=()):
    """The way to every value in the file."""
    pairs = said.items() if isinstance(said, dict) else enumerate(said)
    for key, value in pairs:
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*before, key))


def changed(path, value):
    said = json.loads(json.dumps(GOOD))
    inner = said
    for key in path[:-1]:
        inner = inner[key]
    if value is DROP:
        del inner[path[-1]]
    elif value is MISSPELL:
        inner[f"{path[-1]}x"] = inner.pop(path[-1])
    else:
        inner[path[-1]] = value
    return said


DROP, MISSPELL = object(), object()
WRONG = [0, -1, -5.5, nan, inf, -inf, "many", "", True, None, [], [1], {}, {"x": 1}, 1e400, 1.5,
         DROP, MISSPELL]  # fmt: skip


def read(tmp_path_factory, said):
    file = tmp_path_factory.mktemp("machine") / "machine.json"
    file.write_text(json.dumps(said))
    return load(str(file))


def test_the_good_one_is_read_and_survives(tmp_path_factory):
    found = read(tmp_path_factory, GOOD)
    assert found.network.nic_bytes_per_second == pytest.approx(0.94e10)
    assert machine_file.from_json(machine_file.to_json(found)) == found
    assert forecast(imagenet("resnet50", 512, 1.0), found, 16).dollars > 0


@settings(max_examples=200, deadline=None)
@given(path=st.sampled_from(list(paths(GOOD))), value=st.sampled_from(WRONG))
def test_a_mutated_file_is_used_or_gets_one_sentence(tmp_path_factory, path, value):
    try:
        said = changed(path, value)
    except TypeError:  # a list has no keys to misspell
        return
    try:
        found = read(tmp_path_factory, said)
        taken = forecast(imagenet("resnet50", 512, 1.0), found, 16)
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 400
        return
    assert 0 < taken.interval[0] < taken.seconds_to_target < taken.interval[1] < inf


NUMBERS = [
    path for path in paths(GOOD)
    if path[0] not in ("sources", "host") and isinstance(path[-1], str)
    and isinstance(_value := eval("GOOD" + "".join(f"[{key!r}]" for key in path)), int | float)
]  # fmt: skip


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("value", [-1, nan, inf, "many", [1], {"x": 1}, True])
def test_no_number_may_be_negative_or_no_number(tmp_path_factory, path, value):
    with pytest.raises(UserError, match=path[-1]) as caught:
        read(tmp_path_factory, changed(path, value))
    assert "machine.json is not a machine.json: " in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("links", "node", "bytes_per_second"), 0, "links.node.bytes_per_second is 0: give a "
         "number above 0"),
        (("links", "network", "nics"), 1.5, "nics is 1.5: give a whole number from 1 on"),
        (("links", "network", "nics"), 0, "nics is 0: give a whole number from 1 on"),
        (("links", "network", "transport"), "infinband", "did you mean infiniband?"),
        (("links", "spine", "nodes_per_rack"), DROP, "links.spine has no nodes_per_rack"),
        (("links", "nodes"), {}, "there is no key 'links.nodes': did you mean node?"),
        (("jiter",), 0.1, "there is no key 'jiter': did you mean jitter?"),
        (("jitter",), 2, "jitter is 2: give a number from 0 to 1"),
        (("workers_per_node",), 0, "workers_per_node is 0: give a whole number from 1 on"),
        (("compute", 0, "micro"), 0, "compute.micro is 0: give a whole number from 1 on"),
        (("compute", 0, "model"), 5, "compute.model is 5: give a text"),
        (("compute", 0, "images_per_second"), DROP, "compute has no images_per_second"),
        (("compute",), {"model": "resnet50"}, "compute is {'model': 'resnet50'}: give a list"),
        (("chip",), "a1000", "there is no chip 'a1000': did you mean a100?"),
        (("compute", 0), {"micro": 64, "flops": 1e14}, "compute.model is none: give a text"),
        (("compute", 0), {"model": 5, "micro": 64, "flops": 1e14}, "compute.model is 5: give a "),
        (("compute", 0, "assumed"), "yes", "compute.assumed is 'yes': give true or false"),
        (("name",), "a\x1b[31m", "name is 'a\\x1b[31m': give a line of at most 60 letters"),
        (("name",), "x" * 61, "give a line of at most 60 letters"),
        (("sending", "cores"), 0, "sending.cores is 0: give a number above 0"),
        (("format",), "other", "its format is 'other'"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_key_and_the_way_out(tmp_path_factory, path, value, sentence):
    with pytest.raises(UserError) as caught:
        read(tmp_path_factory, changed(path, value))
    assert sentence in str(caught.value)


def test_a_file_is_read_with_a_mark_before_it_and_a_chip_in_capitals(tmp_path):
    file = tmp_path / f"{'long' * 30}.json"
    file.write_text("\ufeff" + json.dumps({key: GOOD[key] for key in ("format", "chip")}))
    assert load(str(file)).name == "long" * 15
    file.write_text(json.dumps(GOOD | {"chip": "A100"}))
    assert load(str(file)).chip == "a100"
    file.write_text("[" * 100_000)
    with pytest.raises(UserError, match="it is nested too deeply"):
        load(str(file))


def test_a_speed_that_nobody_measured_widens_the_interval(tmp_path_factory):
    def width(**more):
        row = GOOD["compute"][0] | more
        found = read(tmp_path_factory, GOOD | {"compute": [row], "sending": None})
        low, high = forecast(imagenet("resnet50", 512, 1.0), found, 16).interval
        return high / low

    assert width() == width(assumed=False) < 0.8 * width(assumed=True)


def test_python_is_checked_as_files_are():
    for make in (
        lambda: Node(-1e-6, 1e9),
        lambda: Network(1e-6, nan),
        lambda: Rate("resnet50", 0, 1.0),
        lambda: Machine("m", 0),
    ):
        with pytest.raises(UserError, match="give a"):
            make()


@pytest.mark.parametrize("name", MACHINES)
def test_bundled_machines_forecast_and_survive_their_json(name):
    place = MACHINES[name]
    assert machine_file.from_json(machine_file.to_json(place)) == place
    found = forecast(imagenet("resnet50", 4096, 1.0), place, place.workers_per_node * 8)
    assert 0 < found.efficiency <= 1
