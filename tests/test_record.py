"""Folders of runs as others read them: real, unfinished, torn, hostile."""

import json
import math
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import evaluation_line, made_up, real_run, step_line

from megabatch.errors import UserError
from megabatch.runs import alive, record


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    out = tmp_path_factory.mktemp("record") / "run"
    return out, real_run(out)


def test_a_real_run_is_read_whole(real):
    out, summary = real
    found = record.read(out)
    assert found.faults == [] and found.bad_lines == 0
    assert len(found.steps) == summary.steps
    assert found.result("top1") == summary.top1
    assert found.images == 1438
    assert found.epoch == summary.epochs
    assert found.state() == "finished"
    assert [e["epoch"] for e in found.evaluations] == sorted(e["epoch"] for e in found.evaluations)
    assert len(found.layers) == 10 * len(found.evaluations)
    assert math.isfinite(record.seconds_of(found)) and record.images_per_second(found) > 0


def test_a_glance_tells_the_same_end(real):
    out, _ = real
    whole, end = record.read(out), record.glance(out)
    assert (end.result("top1"), end.epoch, end.state()) == (
        whole.result("top1"), whole.epoch, whole.state(),
    )  # fmt: skip
    assert end.steps.last() == whole.steps.last()
    assert len(end.steps) == len(end.evaluations) == 1


BAD_LINES = [
    "{", "[1, 2]", "null", "3", '"train"', '{"step": 1}', '{"kind": 3}', "\x00\x01", "[" * 100_000,
    '{"kind": "train", "step":', "NaN",
]  # fmt: skip


def test_bad_lines_are_counted_and_the_rest_is_read(tmp_path):
    lines = [step_line(0)]
    for bad in BAD_LINES:
        lines += [bad, step_line(1)]
    folder = made_up(tmp_path / "run", lines)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\xfd\n" + step_line(2).encode()[:40])  # the last line is torn
    found = record.read(folder)
    assert len(found.steps) == 1 + len(BAD_LINES)
    assert found.bad_lines == len(BAD_LINES) + 2


def test_a_line_longer_than_any_record_is_passed_over(tmp_path):
    folder = made_up(tmp_path / "run", [step_line(0), "x" * (5 << 20), step_line(1)])
    found = record.read(folder)
    assert len(found.steps) == 2 and found.bad_lines > 0


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"x"',
                                 "null", "[]", "{}"])  # fmt: skip
def test_what_is_no_number_is_nan(tmp_path, odd):
    line = step_line(0).replace('"loss": 2.0', f'"loss": {odd}')
    found = record.read(made_up(tmp_path / "run", [line]))
    assert len(found.steps) == 1 and math.isnan(found.steps["loss"][0])
    assert found.steps["lr"][0] == 0.1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.recursive(
                st.none() | st.floats() | st.text(max_size=5) | st.integers(),
                lambda inner: st.dictionaries(st.sampled_from(["kind", "seen", "epoch"]), inner),
                max_leaves=6,
            ).map(lambda value: json.dumps(value).encode()),
            st.sampled_from(["train", "evaluation", "waits", "layer"]).flatmap(
                lambda kind: st.dictionaries(
                    st.sampled_from([*record.STEP_NUMBERS, "name", "ratio", "seconds", "input"]),
                    st.floats() | st.text(max_size=3) | st.none() | st.integers(),
                ).map(lambda told: json.dumps({"kind": kind, **told}).encode())
            ),
        ),
        max_size=12,
    )
)
def test_any_lines_make_a_record_and_a_page(tmp_path_factory, lines):
    from megabatch.report.run import report

    folder = made_up(tmp_path_factory.mktemp("any") / "run")
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert report([record.read(folder)]).startswith("<!doctype html>")
    record.glance(folder).state()


@pytest.mark.parametrize("torn", ["", "{", "[]", "\x00", '{"a": ' * 50_000])
@pytest.mark.parametrize("name", ["config", "environment", "summary", "diagnosis"])
def test_a_torn_file_is_a_fault_and_not_the_end(tmp_path, name, torn):
    folder = made_up(tmp_path / "run", [step_line(0)])
    (folder / f"{name}.json").write_text(torn)
    found = record.read(folder)
    assert len(found.steps) == 1
    assert [fault for fault in found.faults if fault.startswith(f"{name}.json cannot be read")]


def test_missing_files_are_told(tmp_path):
    folder = made_up(tmp_path / "run")
    for name in ("environment.json", "metrics.jsonl"):
        (folder / name).unlink()
    assert record.read(folder).faults == ["environment.json is missing", "metrics.jsonl is missing"]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    folder = made_up(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    assert "metrics.jsonl is missing" in record.read(folder).faults


def test_metrics_without_end_are_not_read(tmp_path):
    path = made_up(tmp_path / "run") / "metrics.jsonl"
    os.truncate(path, 1 << 42)  # no block of it is there
    for read in (record.read, record.glance):
        assert read(path.parent).faults == [
            "metrics.jsonl cannot be read: it is larger than it can be"
        ]
    assert list(record.Tail(path).new_lines()) == []


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not the folder of a run"):
        record.read(tmp_path / "nothing")
    with pytest.raises(UserError, match="is not the folder of a run"):
        record.read(tmp_path)


def test_states(tmp_path):
    now = time.time()
    lines = [step_line(step) for step in range(3)]
    running = made_up(tmp_path / "running", lines)
    assert record.read(running).state(now) == "running"
    assert record.read(running).state(now + 3600) == "silent"
    for ended in ("finished", "target", "stopped"):
        folder = made_up(tmp_path / ended, lines, summary={"ended": ended})
        assert record.read(folder).state(now + 3600) == ended
    failed = made_up(tmp_path / "failed", lines, diagnosis={"step": 2})
    assert record.read(failed).state(now) == "failed"


def test_a_process_that_is_gone_has_failed(tmp_path):
    asleep = subprocess.Popen(
        [sys.executable, "-c", "from megabatch.runs.alive import mark; import json, time;"
         "print(json.dumps(mark()), flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with asleep:
        left = json.loads(asleep.stdout.readline())
        assert left["pid"] == asleep.pid
        folder = made_up(tmp_path / "run", [step_line(0)], environment={"process": left})
        soon = time.time() + 60
        assert not alive.gone(left) and record.read(folder).state(soon) == "running"
        asleep.kill()
        # Dead, though its parent has not asked for it yet.
        os.waitid(os.P_PID, asleep.pid, os.WEXITED | os.WNOWAIT)
        assert alive.gone(left)
    assert alive.gone(left)
    found = record.read(folder)
    assert found.state(soon) == "failed"
    assert found.state(found.written) == "running"  # it may be begun again


def test_a_process_elsewhere_is_not_said_to_be_gone():
    mine = alive.mark()
    assert not alive.gone(mine)
    assert alive.gone({**mine, "began": mine["began"] - 1})  # its number is used again
    for name in ("boot", "namespace"):
        assert not alive.gone({**mine, "began": 0, name: "another"})
    for odd in (None, {}, [], {"pid": "1"}, {"pid": 1.5}, 3):
        assert not alive.gone(odd)


def test_a_run_that_goes_on_after_its_summary_is_running(tmp_path):
    folder = made_up(tmp_path / "run", [step_line(0)], summary={"ended": "stopped", "top1": 0.1})
    past = time.time() - 100
    os.utime(folder / "summary.json", (past, past))
    found = record.read(folder)
    assert found.resumed and found.state() == "running"
    assert math.isnan(found.result("top1"))


def test_slow_steps_make_a_patient_reader(tmp_path):
    slow = made_up(tmp_path / "run", [step_line(0, batch=65536, images_per_second=100.0)])
    found = record.read(slow)
    assert found.patience == pytest.approx(6553.6)
    assert found.state(time.time() + 3600) == "running"


def test_a_speed_is_images_by_seconds():
    # 100 images in 1 s and 100 in 0.001 s: not the mean of the two rates.
    assert record.speed([100, 100], [100.0, 100_000.0]) == pytest.approx(200 / 1.001)
    assert math.isnan(record.speed([], []))


def test_a_tail_reads_whole_lines_as_they_come(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = record.Tail(path)
    assert list(tail.new_lines()) == []
    path.write_text(step_line(0) + "\n" + step_line(1)[:30])
    assert [line["step"] for line in tail.new_lines()] == [0]
    path.write_text(step_line(0) + "\n" + step_line(1) + "\n")
    assert [line["step"] for line in tail.new_lines()] == [1]
    assert list(tail.new_lines()) == []
    path.write_text(evaluation_line(1.0) + "\n")  # resumed: the file was cut
    assert [line["kind"] for line in tail.new_lines()] == ["evaluation"]
    assert tail.bad == 0


def test_when_a_run_began_is_read_in_its_own_time_zone(tmp_path):
    folder = made_up(tmp_path / "run", environment={"began": "2026-11-01T12:00:00+0200"})
    assert record.began_at(record.read(folder)) == 1793527200
    for odd in (None, 3, "yesterday", "9999999-01-01T00:00:00+0000"):
        folder = made_up(tmp_path / "odd", environment={"began": odd})
        assert record.began_at(record.read(folder)) is None
