"""Numbers in the README and the docs are those of the files that they are said to come from."""

import json
import math
import os
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

import megabatch as mb

ROOT = Path(mb.__file__).parent.parent


def result(name):
    return json.loads((ROOT / "results" / name).read_text())


def page(name):
    return (ROOT / name).read_text()


def test_the_step_on_one_gpu():
    told = page("docs/performance.md")
    rows = {row["name"]: row for row in result("gpu/step.json")["rows"]}
    assert len(rows) >= 9
    for row in rows.values():
        assert f"{row['images_per_second']:,.0f}" in told, row["name"]
    ours = rows["ours resnet50 224 px bf16 1024/1024/1024"]["images_per_second"]
    rival = rows["rival resnet50 224 px bf16 1024/1024"]["images_per_second"]
    assert f"{ours:,.0f} against {rival:,.0f} images/s" in page("README.md")
    assert f"{ours / rival:.2f} x" in told
    for row in result("gpu/train.json")["rows"]:
        assert f"{row['median_ms']:.1f}" in told, row["case"]


def test_the_chip_at_its_power_limit():
    told = page("docs/performance.md")
    rows = {row["what"]: row for row in result("gpu/power.json")["rows"]}
    for row in rows.values():
        # Halves are rounded up.
        assert f"| {row['ms']:.1f} | {int(row['median_mhz'] + 0.5):,} |" in told, row["what"]
    # What the verb takes over its bare step, both with gradients as training has them.
    for precision, verb in (("bf16", "bf16"), ("fp16", "fp16, dynamic loss scale")):
        bare = rows[f"bare step, {precision}, open blocks"]["ms"]
        assert rows[f"megabatch train, {verb}"]["ms"] < 1.03 * bare


def test_the_fast_step_beside_the_plain_one():
    told = page("docs/performance.md").replace("\n", " ")
    for way in ("kernels", "plain, compiled"):
        runs = [run for run in result("gpu/accuracy.json")["runs"] if run["way"] == way]
        assert [run["seed"] for run in runs] == [0, 1, 2]
        mean = 100 * sum(run["top1"] for run in runs) / 3
        assert f"{mean:.2f} % in the mean" in told
    seeds = result("gpu/loss.json")["seeds"]
    ours, plain = ([seed[way] for seed in seeds] for way in ("kernels", "plain bf16"))
    for distances in (ours, plain):
        *first, last = (f"{distance:.4f}" for distance in distances)
        assert f"{', '.join(first)} and {last}" in told
    single = sorted(one / other for one, other in zip(ours, plain, strict=True))
    assert f"{sum(ours) / sum(plain):.2f} times as far in the mean, {single[0]:.2f} to" in told
    assert f"{single[-1]:.2f} times in single seeds" in told


def test_the_step_on_two_cpu_cores():
    told = page("docs/performance.md")
    for row in result("cpu/step.json")["rows"]:
        cells = [f"{number:.2f}" for number in (*row["ms"].values(), *row["times_faster"].values())]
        assert f"| {row['case']} | {' | '.join(cells)} |" in told


def test_the_loader():
    rates = result("gpu/loader.json")["rates"]
    assert all(f"{rate:,}" in page("results/gpu/README.md") for rate in rates.values())
    assert f"{rates['256 px pack, all cores']:,} images/s" in page("README.md")
    rows = result("loader/two_cores.json")["rows"]
    packs = [row["of_dataloader"] for row in rows if row["loader"] == "ours, pack"]
    assert f"{min(packs):.1f} to {max(packs):.1f} times DataLoader" in page("README.md")
    for row in rows:
        assert f"{row['rate']:,.0f}" in page("results/loader/README.md"), row


@pytest.mark.parametrize("name", ["kills", "kills-62"])
def test_what_a_killed_worker_costs(name):
    told, found = page("docs/faults.md"), result(f"faults/{name}.json")
    memory = found["killed workers, replaced from the others' memory"]
    seconds = memory["seconds to the next step"]
    assert f"{memory['kills']} random SIGKILLs in {memory['runs']} runs" in told
    assert f"{seconds['median']:.1f} s" in told
    assert f"{seconds['most']:.1f} s" in told or f"{seconds['most']:.0f} s" in told


def test_what_watching_a_run_costs():
    told, found = page("docs/chaos.md"), result("faults/guards-gpu.json")
    watched, unwatched = (found["ms"][way] for way in ("watched", "unwatched"))
    assert f"{watched:.2f} ms a step and {unwatched:.2f}" in told.replace("\n", " ")
    assert f"{found['share_of_a_step']:.2%} of a step".replace("%", " %") in told
    assert found["share_of_a_step"] < 0.01


def test_one_hash_on_one_gpu():
    runs = result("gpu/nccl-one-hash.json")["runs"]
    assert [run["ranks"] for run in runs] == [1, 1, 2]
    assert len({run["weights_sha256"] for run in runs}) == 1


@pytest.mark.parametrize("name", ["ablation", "ablation-pairs", "scaling"])
def test_the_papers_tables(name):
    """Row by row; and the planner's column is what it says today from the file's own speeds."""
    told, found = page("results/papers/README.md"), result(f"papers/{name}.json")
    assert found["command"] in told and found["date"] in told
    code = runpy.run_path(str(ROOT / "benchmarks/papers_hosts.py"))
    for row in found["rows"]:
        measured, over = row["images_per_second"], row["over_the_first"]
        if name == "scaling":
            count = row["name"].split()[0]
            unlimited = int(count) * found["alone"][count]
            cells = [count, f"{measured:.3g}", f"{unlimited:.1f}"]
            hosts, workers, how = int(count), 1, ("three_phase", "fp32", 25.0)
        else:
            cells = [row["name"], f"{measured:.2f}", f"{over:.2f}"]
            hosts, workers, how = 4, 1 + (name == "ablation-pairs"), code["ABLATION"][row["name"]]
        assert over == measured / found["rows"][0]["images_per_second"]
        if "predicted" in row:
            cells.append(f"{row['predicted']:.2f}")
            flags = SimpleNamespace(model="resnet50", micro=2, rate="400mbit")
            flags.plan, flags.wire, flags.bucket = how
            alone = found["alone"][str(hosts)]
            again = code["predicted"](flags, hosts, workers, alone)
            assert again == pytest.approx(row["predicted"], rel=1e-9)
        assert f"\n| {' | '.join(cells)} |" in told


def test_what_the_papers_tables_are_said_to_show():
    told = " ".join(page("results/papers/README.md").split())

    def of(name):
        rows = result(f"papers/{name}.json")["rows"]
        return [row["images_per_second"] for row in rows], [row.get("predicted") for row in rows]

    (_, half, fused, whole, *_), planned = of("ablation")
    assert f"Fusion gives {fused / half - 1:.0%}".replace("%", " %") in told
    assert abs(whole / fused - 1) < 0.01 and "The hybrid gives nothing there" in told
    off = [100 * (p / m - 1) for m, p in zip(of("ablation")[0], planned, strict=True)]
    fast, singly = sorted(off[i] for i in (2, 3, 4)), sorted(off[i] for i in (0, 1, 5))
    assert f"{fast[0]:.0f} to {fast[-1]:.0f} % too fast with buckets" in told
    assert f"and {singly[0]:.0f} to {singly[-1]:.0f} % where every tensor travels singly" in told
    (_, half, fused, whole, _, unfused), planned = of("ablation-pairs")
    assert f"the hybrid gives {100 * (whole / fused - 1):.0f} %" in told
    assert f"with two the hybrid gives {100 * (whole / fused - 1):.0f} %" in page("docs/papers.md")
    assert f"Fusion gives {100 * (fused / half - 1):.0f} % of a ring" in told
    assert f"and {100 * (whole / unfused - 1):.0f} % of the hybrid" in told
    off = [100 * (p / m - 1) for m, p in zip(of("ablation-pairs")[0], planned, strict=True)]
    singly = sorted(off[i] for i in (0, 1, 5))
    assert (
        max(off[2:5]) < 5.5 and f"within 5 % with buckets ({off[3]:.1f} % with all of it)" in told
    )
    assert f"and {singly[0]:.0f} to {singly[-1]:.0f} % too fast where tensors" in told
    measured, planned = of("scaling")
    off = [100 * (p / m - 1) for m, p in zip(measured[1:], planned[1:], strict=True)]
    assert [round(each) for each in off] == [2, 11, 11]
    assert "2 % too fast at two of them, 11 % at four and eight" in told


def test_the_papers_picture_is_what_its_numbers_draw(tmp_path):
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/papers_pictures.py", "--out", tmp_path / "drawn.svg"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    drawn = (tmp_path / "drawn.svg").read_text()
    assert drawn == page("results/papers/scaling.svg")
    dots = [e for e in ET.fromstring(drawn).iter() if e.attrib.get("class") == "dot"]
    rows = result("papers/scaling.json")["rows"]
    assert len(dots) == 2 * len(rows) + sum("predicted" in row for row in rows)


def test_the_search_for_its_settings():
    told = page("results/study/README.md")
    for row in result("study/search.json")["rows"]:
        if "last_layer" in row and row["largest_loss"] > 10:
            assert f"{row['largest_loss']:.1e}" in told, row["run"]
            assert f"{row['last_layer']['at_last']:.1e}" in told, row["run"]
        elif "last_layer" in row:
            grown = row["last_layer"]
            assert f"from {grown['at_first']:.1f} to {grown['at_last']:,.0f} in" in told, row["run"]
        if (times := row.get("most_grown")) is not None:
            words = f"{times / 1e6:.0f} million" if times > 1e6 else f"{times / 1e3:.0f} thousand"
            assert f"{words} times" in told, row["run"]
        if row["run"].startswith("probe") or not row["finished"]:
            continue
        assert f"{row['top1']:.1%}".replace("%", " %") in told, row["run"]


def test_the_study_on_tiny_imagenet():
    """The kept runs give the kept rows, and pages say what they say."""
    told, found = page("results/study/README.md"), result("study/tiny30/study.json")
    assert "megabatch study tiny30 --data.path tiny.arrow --batches 256,4096,8192 --seeds 3" in told
    rows = [row for row in found["rows"] if row["arm"] == "recipe"]
    for row in rows:
        runs = [result(f"study/tiny30/{row['batch']}-s{s}/summary.json") for s in row["seeds"]]
        assert len(runs) == 3
        assert 100 * sum(run["top1"] for run in runs) / 3 == pytest.approx(row["top1"])
        cells = (
            ", ".join(f"{100 * run['top1']:.2f}" for run in runs),
            f"{row['top1']:.2f} ± {row['top1_half']:.2f}",
            f"{row['images_per_second']:,.0f}",
        )
        assert all(cell in told for cell in cells)
        assert f"{row['batch']:,}" in page("README.md") and f"{row['top1']:.1f} %" in page(
            "README.md"
        )
        if row["to_baseline"] is not None:
            assert f"{row['to_baseline']:+.2f} ± {row['to_baseline_half']:.2f}" in told
            assert f"{abs(row['to_baseline']):.2f} ± {row['to_baseline_half']:.2f}" in page(
                "docs/study.md"
            )


def test_what_is_there_of_the_papers_length():
    told = page("results/study/README.md")
    for row in result("study/tiny/study.json")["rows"]:
        runs = [result(f"study/tiny/{row['batch']}-s{s}/summary.json") for s in row["seeds"]]
        by_seed = ", ".join(f"{100 * run['top1']:.2f}" for run in runs)
        half = f" ± {row['top1_half']:.2f}" if len(runs) > 1 else ""
        mean = f"{row['top1']:.2f}{half}"
        assert (
            f"{by_seed} | {mean} | {row['seconds']:.0f} | {row['images_per_second']:,.0f}" in told
        )
        assert f"{row['batch']:,}" in page("README.md")
        assert f"{row['top1']:.2f} %" in page("README.md")
        if row["to_baseline"] is not None:
            half = f" ± {row['to_baseline_half']:.2f}" if len(runs) > 1 else ""
            difference = f"{abs(row['to_baseline']):.2f}{half}"
            assert difference in told and difference in page("docs/study.md")


def test_arms_one_by_one():
    """Each arm's accuracy and its distance to the recipe stand in its row, and pages quote them."""
    told = page("results/study/README.md")
    for name in ("tiny30", "arms", "goyal", "alexnet", "alexnet-bn"):
        for row in result(f"study/{name}/study.json")["rows"]:
            kept = [
                result(f"study/{name}/{row['batch']}-{arm}s{seed}/summary.json")["top1"]
                for seed in row["seeds"]
                for arm in ["" if row["arm"] == "recipe" else f"{row['arm']}-"]
            ]
            assert 100 * sum(kept) / len(kept) == pytest.approx(row["top1"])
            of_recipe = name == "arms" or (name.startswith("alexnet") and row["arm"] != "recipe")
            against = row["to_recipe"] if of_recipe else row["to_baseline"]
            distance = "" if against is None else f"{against:+.2f}"
            lines = [line for line in told.splitlines() if f"{row['top1']:.2f}" in line]
            assert any(distance in line for line in lines), (name, row["arm"])
    quoted = page("docs/papers.md").replace("\n", " ")
    arms = {row["arm"]: row for row in result("study/arms/study.json")["rows"]}
    goyal = {(r["arm"], r["batch"]): r for r in result("study/goyal/study.json")["rows"]}
    assert f"LARS ends at {arms['recipe']['top1']:.2f} %" in quoted
    for arm, side in (("sgd", "below"), ("grow", "above"), ("decay_all", "above")):
        distance = arms[arm]["to_recipe"] * (1 if side == "above" else -1)
        assert distance > 0 and f"{distance:.2f} {side}" in quoted
    assert f"ends at {goyal['fixed_rate', 4096]['top1']:.2f} %" in quoted
    ways = [goyal[way, 4096]["top1"] for way in ("recipe", "no_warmup", "constant_warmup")]
    assert ways == sorted(ways, reverse=True)


def test_held_against_the_same_optimizer():
    """Muon at 256, tuned as the larger batches are: what pages say that they lose to it."""
    rows = result("study/search.json")["rows"]
    (small,) = [100 * row["top1"] for row in rows if row["run"] == "muon256/256-s0"]
    tried = {
        row["rate"]: row["top1"]
        for row in rows
        if (row["batch"], row.get("optimizer"), row.get("epochs")) == (256, "muon", 30)
        and row["judged_by"] == "held-out training images"
        and row["finished"]
    }
    assert sorted(tried) == [6.0, 12.0, 24.0, 48.0] and max(tried, key=tried.__getitem__) == 24.0
    means = {
        row["batch"]: row["top1"]
        for row in result("study/tiny30/study.json")["rows"]
        if row["arm"] == "recipe"
    }
    lost = [f"{small - means[batch]:.1f}" for batch in (4096, 8192)]
    for name in ("results/study/README.md", "docs/study.md", "docs/cards/batch-rule.md"):
        told = " ".join(page(name).split())
        assert f"4,096 loses {lost[0]} " in told and f"8,192 {lost[1]}" in told, name
    assert f"ends {small - means[256]:.2f} above SGD" in " ".join(page("docs/study.md").split())
    for name in ("README.md", "docs/cards/muon.md", "results/study/README.md"):
        assert f"{small:.1f} %" in page(name), name


def test_a_batch_that_follows_its_noise():
    told = " ".join(page("results/study/README.md").split())
    fixed, follows = result("study/noise/study.json")["rows"]
    assert f"({fixed['top1']:.2f} ± {fixed['top1_half']:.2f} over three seeds)" in told
    assert f"{follows['top1']:.2f} %, one seed, in {follows['steps']:,.0f} steps, " in told
    assert f"{follows['to_recipe']:.2f} points above a fixed batch" in told


def test_when_the_noise_passes_a_batch():
    """Whole epochs, of the seed in which it comes first."""
    told = " ".join(page("results/study/README.md").split())
    small, above = [], []
    for batch in (4096, 8192):
        seeds = []
        for seed in range(3):
            file = ROOT / f"results/study/tiny30/{batch}-s{seed}/metrics.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            seen = [(s["epoch"], s["noise_scale"]) for s in lines if s["kind"] == "train"]
            late = [(epoch, scale) for epoch, scale in seen if epoch > 9]
            assert min(scale for _, scale in seen) < 250
            below = max(epoch for epoch, scale in late if scale <= batch)
            seeds.append(
                (next(e for e, s in late if s > 1000), min(e for e, _ in late if e > below))
            )
        small.append(int(min(first for first, _ in seeds)))
        above.append(int(min(last for _, last in seeds)))
    assert f"below 1,000 until epoch {small[0]} at 4,096 and {small[1]} at 8,192" in told
    assert f"above the batch itself only from epoch {above[0]} and {above[1]} on" in told


def test_what_lars_lost_at_the_batches_that_its_probe_forecast():
    found = result("study/tiny30/study.json")["rows"]
    (baseline,) = (r["top1"] for r in found if (r["batch"], r["arm"]) == (256, "recipe"))
    lars = {
        row["batch"]: baseline - 100 * row["top1"]
        for row in result("study/search.json")["rows"]
        if row["judged_by"] == "validation images" and "optimizer" not in row and row["steps"] > 99
    }
    assert (
        f"with LARS 4,096 ended {lars[4096]:.1f} points below SGD at 256 and 8,192 {lars[8192]:.1f}"
    ) in " ".join(page("docs/cards/noise-scale.md").split())


def test_where_a_large_batch_nearly_loses_its_way():
    """Over 90 epochs the loss rises above chance's while the rate does, from 8,192 on; over 30,
    with a slower last layer and a longer warm-up, nowhere."""
    risen = {}
    for run in sorted((ROOT / "results/study").glob("tiny*/*-s*/metrics.jsonl")):
        steps = [json.loads(line) for line in run.read_text().splitlines()]
        losses = [s["loss"] for s in steps if s["kind"] == "train" and s["epoch"] >= 1]
        if max(losses) > math.log(200):
            risen[run.parent.parent.name, run.parent.name] = max(losses)
    assert set(risen) == {("tiny", name) for name in ("8192-s0", "8192-s1", "8192-s2", "16384-s0")}
    told = (
        f"to {min(risen.values()):.1f} in the best run and {max(risen.values()):.1f} in the worst"
    )
    assert told in page("results/study/README.md").replace("\n", " ")
