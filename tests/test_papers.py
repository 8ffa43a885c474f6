"""The page for readers of the papers, and what only the papers ask for: every file and test it
names is there, every command is accepted, the quick ones run."""

import copy
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from commands import megabatch
from waiting import PATIENCE_SECONDS

import megabatch as mb
from megabatch import between_steps, training
from megabatch.bench.ratios import RatioFlags, first_step
from megabatch.launch import run_local
from megabatch.planner.chips import CHIPS
from megabatch.planner.nets import BUILDERS
from megabatch.planner.peak import share_of_peak
from megabatch.planner.published import rows as published_rows
from megabatch.plans.names import plan_of
from megabatch.plans.traffic import wire
from megabatch.plans.wiring import halving_scatter
from megabatch.recipes import RECIPES
from megabatch.recipes.imagenet import IMAGES
from megabatch.runs.folder import State
from megabatch.verbs import study as study_verb
from megabatch.verbs import train as train_verb
from megabatch.verbs.parsing import flags_of

ROOT = Path(mb.__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", PAGE)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| in the paper |")
]
COMMANDS = sorted({code for code in CODE if code.startswith(("megabatch ", "python "))})
ON_IMAGENET = [command for command in COMMANDS if "imagenet.arrow" in command]
QUICK = [c for c in COMMANDS if c not in ON_IMAGENET and c != "megabatch pack"]
ON_TINY = [block.replace("\\\n", " ") for block in re.findall(r"```\n(.+?)```", PAGE, re.DOTALL)]


# --- the page ----------------------------------------------------------------------------------


def test_every_row_says_where_it_lives_and_what_shows_it_or_why_not():
    assert len(ROWS) > 60
    for row in ROWS:
        assert len(row) == 4, row
        claim, here, shown, not_shown = row
        assert claim and here, row
        assert shown or not_shown, row
    assert {row[1] for row in ROWS if not row[2]} == {"out of scope"}


def test_every_file_and_test_on_the_page_exists():
    paths = [code for code in CODE if re.match(r"(megabatch|tests|benchmarks|results)/", code)]
    assert len(paths) > 50
    for path in paths:
        file, _, name = path.partition("::")
        assert (ROOT / file).exists(), path
        if name:
            assert f"\ndef {name}(" in (ROOT / file).read_text(), path


def test_every_flag_and_recipe_on_the_page_exists():
    known = set(flags_of(train_verb.TrainFlags))
    alone = [code.split()[0] for code in CODE if code.startswith("--")]
    assert set(alone) - {"--path"} <= known  # --path is bench ratios' own
    named = {code for code in CODE if re.fullmatch(r"(goyal|you|jia|mikami)20\w+", code)}
    assert named <= set(RECIPES)
    of_papers = {name for name in RECIPES if re.search(r"20\d\d", name)}
    assert of_papers - {"goyal2017"} <= named


# What a reader looks for by its number. Goyal: 1706.02677v2, read as a whole; the others: what of
# them could be read (their tables and figures are only partly known).
LOOKED_FOR = {
    "Goyal": [
        "Table 1", "Table 2a", "Table 2b", "Table 2c", "Tables 3a and 3b", "Figure 2",
        "Figures 2 to 5", "Figures 1 and 3", "Figure 4", "Figure 6", "Figure 7", "Figure 8",
        "equations 1 to 4", "equations 5 to 7", "equation 8", "equations 9 and 10", "remark 1",
        "remark 2", "remark 3", "remark 4", "24.84, 25.88 and 23.74", "41.67 and 26.22",
        "24.27 and 24.05", "23.92 and 23.68", "23.60", "24.79", "27.55", "33.96", "24.11",
        "23.84", "22.08", "22.36", "92.5 min", "25.83", "26.09", "29 h", "one hour",
        "30 s an epoch", "12 % longer", "90 %", "12.8 Gbit/s", "23.49", "23.48", "23.53", "23.56",
        "beyond 64k", "30, 60 and 80", "24.01", "cyclic control inputs", "Big Basin",
        "length of the warm-up", "pipelined", "256 KB", "mean and deviation of each channel",
    ],
    "You": [
        "Table 3", "Table 4", "57.6 to 53.1", "44.8", "2.2 points", "58.5", "58.2", "55.0",
        "60.4", "60.1", "59.3", "57.8", "59.9", "72.7", "73.0", "72.3", "75.3", "75.4", "74.9",
        "58.6", "10^18", "14 days", "45 h", "20 and 14 min", "52 and 31 min", "in 11", "24 min",
        "Table 2)", "57.7", "77.8", "58.9", "55.9, 56.7, 57.3 and 58.2", "6 h 10 min",
        "58.7 % at 512", "3,690", "1,345", "rate inside the momentum buffer", "solver files",
        "Stampede2", "swaps the machines", "leaves eta out", "(t / T)^2", "9 at 1k", "0.08",
        "57.8, 59.2, 59.5, 59.5 and 59.9", "58.1, 58.9, 58.5 and 57.1", "57.6, 58.0, 57.7 and 56.5",
    ],
    "Jia": [
        "Figure 1", "Figure 2", "Figure 3", "Table 2", "172 to 218", "60.6", "71.9", "76.2",
        "57.1", "55.8", "58.8", "186", "2,046", "3 and 11 times", "87.9",
        "8.7 min (the last, and its 99.2 %, from memory)", "75.8", "58.7", "8 P40",
        "what others had before",
    ],
    "Mikami": [
        "2(X - 1) + 2(Y - 1)", "34k to 68k", "75.03", "75.29", "224 s on 2,176",
        "91.62 % on 1,088", "54k (from memory) in 122 s on 3,456", "119k",
        "84.75, 83.10 and 74.08", "1,641,853", "2,565", "556,522", "1,091,357", "80 (Akiba)",
        "8k to 16k", "ABCI:", "noise",
    ],
}  # fmt: skip


@pytest.mark.parametrize("paper", LOOKED_FOR)
def test_what_a_reader_of_the_paper_looks_for_has_a_row(paper):
    section = PAGE.split(f"## {paper} et al.")[1].split("\n## ")[0]
    assert [each for each in LOOKED_FOR[paper] if each not in section] == []


def configs_of(command):
    """The runs that a command line of train or study asks for."""
    _, verb, recipe, *flags = shlex.split(command)
    if verb == "train":
        return {"recipe": train_verb.read_flags(recipe, flags)[0]}
    assert verb == "study"
    return {
        arm: config for (arm, _), config in study_verb.read_flags(recipe, flags)[0].configs.items()
    }


@pytest.mark.parametrize("command", ON_IMAGENET)
def test_a_command_that_needs_imagenet_would_be_accepted(command):
    for config in configs_of(command).values():
        assert config.data.path == "imagenet.arrow"


def test_the_studies_of_imagenet_compare_what_the_page_says():
    """Jia's Table 2 is of the net before batch norm after pool5, which his Figure 3 then adds; his
    ResNet-50 loses LARS and gains decay, one after the other."""
    jia = {c: configs_of(c) for c in ON_IMAGENET if c.startswith("megabatch study jia")}
    table, resnet, figure = (
        next(found for command, found in jia.items() if word in command)
        for word in ("--model alexnet_bn --batches", "sgd_decay_all", "no_pool5")
    )
    assert {arm: (c.model, c.optimizer.decay_all) for arm, c in table.items()} == {
        "recipe": ("alexnet_bn", False), "decay_all": ("alexnet_bn", True)
    }  # fmt: skip
    assert {arm: c.model for arm, c in figure.items()} == {
        "recipe": "alexnet_bn_pool5", "no_pool5": "alexnet_bn"
    }  # fmt: skip
    ways = {arm: (c.optimizer.trust, c.optimizer.decay_all) for arm, c in resnet.items()}
    assert ways == {
        "recipe": (0.001, False), "decay_all": (0.001, True), "sgd_decay_all": (None, True)
    }  # fmt: skip
    assert resnet["sgd_decay_all"].lr.peak(65536) == pytest.approx(25.6)  # by linear scaling


def test_the_studies_of_tiny_imagenet_compare_what_the_page_says():
    goyal, three, alexnet, with_norm_alone = map(configs_of, ON_TINY)
    assert set(goyal) == {"recipe", "no_warmup", "constant_warmup", "fixed_rate", "sqrt_rate"}
    assert {c.lr.peak(4096) for c in goyal.values() if c.batch == 4096} == {1.6, 0.1, 0.4}
    assert set(three) == {"recipe", "sgd", "decay_all", "grow", "no_warmup"}
    assert three["sgd"].optimizer.trust is None
    lars = three["recipe"].optimizer
    assert (lars.name, lars.trust, three["recipe"].lr.peak(4096)) == ("lars", 0.001, 24)
    for config in (*goyal.values(), *three.values()):
        assert (config.model, config.data.size, config.epochs) == ("resnet18", 64, 30)
    # Caffe's rate in proportion; LARS's of the paper at 4,096.
    plain, lars, with_norm = (alexnet[arm] for arm in ("recipe", "you_lars", "you_lars_bn"))
    assert plain.lr.peak(4096) == pytest.approx(0.16) and lars.lr.peak(4096) == 10
    assert (plain.optimizer.trust, lars.optimizer.trust) == (None, 0.001)
    assert replace(lars, model="alexnet_bn") == with_norm and plain.data.size == 227
    lars, plain = (with_norm_alone[arm] for arm in ("recipe", "no_lars"))
    assert lars.model == plain.model == "alexnet_bn" and lars.epochs == plain.epochs == 30
    assert (lars.optimizer.trust, plain.optimizer.trust) == (0.001, None)
    assert lars.lr.peak(4096) == 10 and plain.lr.peak(4096) == pytest.approx(0.16)


@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_runs_as_it_stands(command, tmp_path):
    program, *words = shlex.split(command)
    if program == "megabatch":
        done = megabatch(*words, cwd=tmp_path)
    else:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr


# --- Goyal: why linear scaling, and what it asks of a network ----------------------------------


def test_small_steps_and_one_large_step_part_by_the_square_of_the_rate():
    """Equations 3 and 4: alike to first order in the rate, so that half of it leaves a quarter of
    the difference; and by that much only."""
    torch.manual_seed(0)
    images, labels = torch.randn(64, 20, dtype=torch.float64), torch.randint(5, (64,))
    start = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    start = start.double()

    def trained(batches, rate):
        net = copy.deepcopy(start)
        optimizer = mb.LARS(net.parameters(), lr=rate, momentum=0, trust=None, form="pytorch")
        for some in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(images[some]), labels[some]).backward()
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(net.parameters()).detach()

    def apart(rate, k=4):
        return float((trained(torch.arange(64).chunk(k), rate) - one(k * rate)).norm())

    def one(rate):
        return trained([torch.arange(64)], rate)

    moved = float((one(4 * 0.001) - one(0.0)).norm())
    assert apart(0.001) < 0.01 * moved
    for rate in (0.002, 0.001):
        assert apart(rate) / apart(rate / 2) == pytest.approx(4, rel=0.02)
    assert apart(1.0) > 0.1 * float((one(4.0) - one(0.0)).norm())  # where gradients change, not


def test_scaling_the_loss_is_scaling_the_rate_only_where_nothing_decays():
    """Remark 1 and equation 8: weight decay has the rate for a factor, but not the loss's."""

    def stepped(weight_decay, rate, loss_scale):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))
        optimizer = mb.LARS(
            [weight], lr=rate, momentum=0, weight_decay=weight_decay, trust=None, form="pytorch"
        )
        (loss_scale * (weight**3).sum()).backward()
        optimizer.step()
        return weight.detach()

    for weight_decay in (0.0, 0.1):
        by_rate, by_loss = stepped(weight_decay, 0.4, 1), stepped(weight_decay, 0.1, 4)
        assert torch.allclose(by_rate, by_loss, rtol=1e-12) == (weight_decay == 0)
        # Three parts of the decay are missing.
        missing = 0.3 * weight_decay * torch.linspace(-1, 1, 8, dtype=torch.float64)
        assert torch.allclose(by_loss - by_rate, missing, atol=1e-12)


def test_the_bandwidth_that_goyal_needs():
    """100 MB between 32 servers in the 120 ms of a backward pass: about 12.8 Gbit/s, before the
    paper adds what protocols cost."""
    for name in ("ring", "ring:halving_doubling"):
        sent = wire(plan_of(name), 100_000_000, 1, 32).busiest
        assert 8 * float(sent) / 0.12 == pytest.approx(12.8e9, rel=0.02)


def test_goyals_44_servers_are_summed_by_binary_blocks():
    """44 = 32 + 8 + 4: halving within a block, then one step in which it hands its slices to the
    next larger one; and as many steps back."""
    blocks = [range(32), range(32, 40), range(40, 44)]
    handed = dict.fromkeys(blocks, 0)
    for place, block in enumerate(blocks):
        for me in block:
            for send in halving_scatter(me, 44):
                if send.to in block:
                    assert send.to - block.start == (me - block.start) ^ (1 << send.step)
                    continue
                larger = blocks[place - 1]
                assert send.to in larger and send.step == len(larger).bit_length() - 1
                handed[block] += send.slice.share
    assert [handed[block] for block in blocks] == [0, 1, 1]  # each a whole sum, once
    assert wire(plan_of("ring:halving_doubling"), 100_000_000, 1, 44).steps == 2 * (5 + 1)


def plan_on_the_page(*words, **others):
    """The forecasts of the page's only `megabatch plan` that has all these words, some of them put
    in others' place."""
    (command,) = [c for c in QUICK if c.startswith("megabatch plan") and all(w in c for w in words)]
    for this, that in others.items():
        assert this in command
        command = command.replace(this, that)
    done = megabatch(*shlex.split(command)[1:], "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["rows"]


def test_the_forecasts_are_those_that_the_page_tells():
    (server,), (servers,) = plan_on_the_page("--gpus 8 "), plan_on_the_page("--gpus 352")
    # A row of the grid is a server of 8, or there would be one phase and not three.
    assert (server["grid"], servers["grid"]) == ([1, 8], [44, 8])
    assert servers["step_seconds"] / server["step_seconds"] == pytest.approx(1.05, abs=0.005)
    assert IMAGES / servers["images_per_second"] == pytest.approx(28, abs=0.5)
    assert server["seconds_to_target"] / 3600 == pytest.approx(29 + 33 / 60, abs=1 / 60)
    rings = plan_on_the_page("--plan ring --compare buckets")
    fused = {row["bucket_mb"]: row["images_per_second"] for row in rings}
    assert fused[100] / fused[1] == pytest.approx(2.2, abs=0.05)
    rows = plan_on_the_page("--plan ring --compare buckets", ring="hierarchical")
    by_steps = {row["bucket_mb"]: row["images_per_second"] for row in rows}
    assert max(by_steps.values()) < 1.01 * by_steps[1]
    assert plan_on_the_page("--plan hybrid")[4]["bucket_mb"] == 25
    hybrid, hierarchical, ring = (
        plan_on_the_page("--plan hybrid", **{"hybrid --grid 64 16": way})[4]["images_per_second"]
        for way in ("hybrid --grid 64 16", "hierarchical --grid 64 16", "ring")
    )
    assert hybrid / hierarchical == pytest.approx(1.16, abs=0.005)
    assert hybrid / ring == pytest.approx(1.26, abs=0.005)
    wires = [row["images_per_second"] for row in plan_on_the_page("--compare wire")]
    assert max(wires) == pytest.approx(min(wires), rel=0.01)
    assert min(row["seconds_to_target"] for row in plan_on_the_page("2176")) < 224 / 2
    assert plan_on_the_page("1088")[0]["efficiency"] < 0.9162
    (flash,) = plan_on_the_page("--gpus 3456")
    (by_nodes,) = plan_on_the_page("--gpus 3456", **{"48 72": "864 4 --bucket-mb 25"})
    seconds = flash["seconds_to_target"], by_nodes["seconds_to_target"]
    assert "has {:.0f} s on this grid".format(*seconds) in PAGE
    assert f"without `--grid`, {seconds[1]:.0f} s)" in PAGE
    told = re.search(r"(?<=abci`'s constants; )([\d,]+) and ([\d,]+) are forecast", PAGE)
    for gpus, rate in zip((1024, 2048), told.groups(), strict=True):
        (row,) = plan_on_the_page(f"--gpus {gpus} --batch {16 * gpus} ")
        assert f"{row['images_per_second']:,.0f}" == rate
    published = {row.what: row for row in published_rows()}
    alexnet = published["2,048 CPUs, AlexNet-BN, 100 epochs"]
    assert alexnet.predicted / alexnet.published == pytest.approx(0.5, abs=0.05)
    for net in ("ResNet-50", "AlexNet"):
        assert published[f"{net}, gain over flat NCCL"].error > 10


# --- You: the authors' solvers, Table 3, peak accuracy, operations -----------------------------

# The authors' solver files: net, batch, base rate, iterations of the ramp (from 1; None: no ramp),
# max_iter.
SOLVERS = [
    ("alexnet", 1024, 2, None, 125_000), ("alexnet", 8192, 10, 600, 15_600),
    ("alexnet", 16384, 16, 400, 7_800), ("alexnet_bn", 512, 1, None, 250_000),
    ("alexnet_bn", 8192, 10, 600, 15_600), ("alexnet_bn", 16384, 24, 400, 7_800),
    ("alexnet_bn", 32768, 32, 400, 4_000), ("resnet50", 512, 4, None, 250_000),
    ("resnet50", 512, 8, 5_000, 250_000), ("resnet50", 1024, 9, 10_000, 125_000),
]  # fmt: skip


@pytest.mark.parametrize(("net", "batch", "base", "ramp", "most"), SOLVERS)
def test_the_rates_of_the_authors_solvers(net, batch, base, ramp, most):
    """Caffe's own arithmetic, iteration by iteration: lr = 1 + (base - 1) (i / ramp)^2, then
    base (1 - i / max_iter)^2, which counts the ramp."""
    epoch = batch / IMAGES  # of an iteration
    flags = f"--model {net} --batch {batch} --micro 16 --lr.reference {base} --lr.per {batch}"
    flags += f" --epochs {most * epoch} --lr.warmup {(ramp or 0) * epoch}"
    weight_decay = 1e-4 if net == "resnet50" else 5e-4
    flags += f" --optimizer.weight-decay {weight_decay}"
    config, _ = train_verb.read_flags("you2018_alexnet", shlex.split(flags))
    for i in (0, 1, 399, 401, 599, 601, most // 2, most - 1):
        caffe = base * (1 - i / most) ** 2
        if ramp and i < ramp:
            caffe = 1 + (base - 1) * (i / ramp) ** 2
        assert config.lr_at(i * epoch, batch) == pytest.approx(caffe, rel=1e-9)
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (0.9, weight_decay)


# Norms of weights and biases of AlexNet-BN at the first iteration, in the table of 1708.03888.
WEIGHT_NORMS = {
    "conv1": (1.86, 0.098), "conv2": (5.546, 0.16), "conv3": (9.40, 0.196), "conv4": (8.15, 0.196),
    "conv5": (6.65, 0.16), "fc6": (30.7, 6.4), "fc7": (20.5, 6.4), "fc8": (20.2, 0.316),
}  # fmt: skip


def test_the_first_steps_weight_norms_are_the_papers():
    flags = RatioFlags(batch=4, device="cpu")
    rows = {row["tensor"]: row for row in first_step(flags, "alexnet_bn")}
    for layer, norms in WEIGHT_NORMS.items():
        for kind, norm in zip(("weight", "bias"), norms, strict=True):
            assert rows[f"{layer}.{kind}"]["weight_norm"] == pytest.approx(norm, rel=0.01)
    for row in rows.values():
        assert row["ratio"] == row["weight_norm"] / row["gradient_norm"]
        decayed = row["gradient_norm"] + 5e-4 * row["weight_norm"]
        assert row["local_rate"] == pytest.approx(0.001 * row["weight_norm"] / decayed, rel=1e-12)
    # The point of the table: no one rate suits all.
    ratios = [row["ratio"] for row in rows.values()]
    assert max(ratios) > 50 * min(ratios)


def test_two_images_are_enough_for_a_first_step():
    """The fewest that its own sentence allows."""
    rows = first_step(RatioFlags(batch=2, device="cpu"), "small")
    assert all(row["gradient_norm"] > 0 for row in rows if row["tensor"].startswith("fc."))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--weight-decay", "-1"], "weight_decay is -1; it must be at least 0"),
        (["--trust", "nan"], "trust is nan: give a finite number"),
        (["--batch", "1"], "--batch is 1; batch norm needs 2 images and more"),
        (["--path", "nowhere"], "there is no nowhere"),
        (["--models", "alexnet_bm"], "did you mean 'alexnet_bn'"),
    ],
)
def test_mistakes_of_bench_ratios_are_one_sentence(flags, sentence):
    done = megabatch("bench", "ratios", "--models", "small", *flags)
    assert done.returncode == 2 and not done.stdout
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_ninety_epochs_of_resnet50_are_about_so_many_operations():
    """The abstract's 10^18 and 14 days on an M40, by the planner's own count: 2.8 times as many, a
    third of the chip's peak."""
    operations = 6 * sum(e.multiply_adds for e in BUILDERS["resnet50"](224, 3, 1000)) * 90 * IMAGES
    assert operations == pytest.approx(2.8e18, rel=0.02)
    assert operations / (14 * 86400) / CHIPS["m40"].flops == pytest.approx(1 / 3, rel=0.05)


def test_the_share_of_the_peak_is_operations_over_time_and_peak():
    # ResNet-50: 4.089 G multiply-adds an image forward, twice as many backward, two operations each
    share = share_of_peak("NVIDIA H200", "resnet50", 224, 3, 1000, 3000)
    assert share == pytest.approx(6 * 4.089e9 * 3000 / CHIPS["h200"].flops, rel=1e-3)
    assert share_of_peak("some accelerator", "resnet50", 224, 3, 1000, 3000) is None
    assert share_of_peak("NVIDIA H200", "own Net", 224, 3, 1000, 3000) is None


@pytest.mark.parametrize(("share", "told"), [(0.3141, "images/s, 31.4% of peak FLOP/s) on"),
                                             (None, "images/s) on")])  # fmt: skip
def test_the_last_line_of_a_run_tells_the_share_of_the_peak_where_it_is_known(share, told, capfd):
    summary = {
        "ended": "finished", "loss": 1.0, "top1": 0.5, "best_top1": 0.6, "median_top1": 0.5,
        "steps": 3, "seen": 96, "seconds": 1.0, "images_per_second": 96.0, "world": 1,
        "peak_share": share, "out": "run",
    }  # fmt: skip
    train_verb._say(summary)
    assert told in " ".join(capfd.readouterr().out.split())


def stopped_after(steps, monkeypatch):
    """A run in this process is asked to stop in the step of that number, and stops a step later."""
    real, taken = training.train_step, []

    def step(*arguments, **how):
        taken.append(None)
        if len(taken) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **how)

    monkeypatch.setattr(training, "train_step", step)


def gone_on(config, out):
    """On this worker, as if its chip were an H200."""
    between_steps.chip_of = lambda cluster: "NVIDIA H200"
    return mb.train(config, out=out, resume=True, quiet=True)


def test_the_share_of_the_peak_counts_the_workers_that_there_were(monkeypatch, tmp_path):
    """One worker, then three: each second counts once for each worker of that second."""
    config = replace(mb.recipes.digits().resized(epochs=1), stages=(), deterministic=True)
    stopped_after(4, monkeypatch)
    alone = mb.train(config, out=tmp_path / "run", quiet=True)
    assert (alone.ended, alone.world, alone.peak_share) == ("stopped", 1, None)
    assert alone.worker_seconds == pytest.approx(alone.seen / alone.images_per_second)
    found = run_local(3, gone_on, config, tmp_path / "run")
    assert (found.ended, found.world) == ("finished", 3)
    trained = found.seen / found.images_per_second
    workers = alone.worker_seconds + 3 * (trained - alone.worker_seconds)
    assert found.worker_seconds == pytest.approx(workers, rel=1e-9)
    rate = found.seen / workers
    # What small does with an image of 8 x 8, forward and twice that backward, two operations each
    operations = 6 * sum(each.multiply_adds for each in BUILDERS["small"](8, 1, 10))
    assert found.peak_share == pytest.approx(operations * rate / CHIPS["h200"].flops, rel=1e-9)


def test_a_run_begun_before_workers_were_counted_has_no_share_of_the_peak(monkeypatch):
    before = {**vars(State()), "noise": {}, "training_seconds": 5.0}
    del before["worker_seconds"]
    assert State.of(before, 1).worker_seconds is None
    assert State.of({**before, "worker_seconds": 7.0}, 1).worker_seconds == 7.0
    with pytest.raises(ValueError, match="values that no run has"):
        State.of({**before, "worker_seconds": float("inf")}, 1)
    monkeypatch.setattr(between_steps, "chip_of", lambda cluster: "NVIDIA H200")
    for seconds, known in ((7.0, True), (None, False)):
        state = State(seen=1000, training_seconds=5.0, worker_seconds=seconds)
        share = between_steps._peak_share(mb.recipes.digits(), mb.Cluster.from_env(), 10, state)
        assert (share is not None) == known


# --- Mikami: the torus, what changes with the batch --------------------------------------------


@pytest.mark.parametrize("grid", [(34, 64), (48, 72), (4, 2)])
def test_the_torus_sends_x_times_less_across_than_the_hierarchical_sum(grid):
    rows, columns = grid
    torus, hierarchical = (wire(plan_of(name), 51_114_064, *grid) for name in
                           ("torus", "hierarchical"))  # fmt: skip
    across = [
        next(leg.nbytes for leg in each.legs if leg.phase.axis == "y")
        for each in (torus, hierarchical)
    ]
    assert across[1] == columns * across[0] == 2 * Fraction(rows - 1, rows) * 51_114_064
    assert torus.steps == 2 * (columns - 1) + 2 * (rows - 1)


def test_a_stages_momentum_is_the_optimizers():
    """Two steps of 64 images and one of 128, by w - lr (m u + g): what the last one's momentum
    does to the weights is in proportion to it."""

    def trained(momentum):
        config = mb.Config(
            batch=64,
            micro=16,
            span=16,
            epochs=256 / 1438,
            stages=(mb.Stage(128 / 1438, 128, momentum),),
            deterministic=True,
            lr=mb.LearningRate(warmup=0, decay="constant"),
            optimizer=mb.OptimizerConfig(momentum=0.9, trust=None, form="pytorch"),
            data=mb.recipes.digits().data,
        )
        torch.manual_seed(0)
        net = mb.models.build("small", 10, 1, 8)
        summary = mb.train(config, model=net, quiet=True)
        assert summary.steps == 3
        return torch.nn.utils.parameters_to_vector(net.parameters()).detach().double()

    none, half, whole = trained(0.0), trained(0.45), trained(0.9)
    went = (whole - none).norm()
    assert went > 1e-4 * none.norm()
    assert (whole - none - 2 * (half - none)).norm() < 1e-2 * went


# --- how results are reported ------------------------------------------------------------------


def test_a_summary_has_the_last_the_best_and_the_median_accuracy(tmp_path):
    config = replace(
        mb.recipes.digits().resized(epochs=1.5), stages=(), eval_every=0.2, deterministic=True
    )
    summary = mb.train(config, out=tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    top1s = [record["top1"] for record in records if record.get("kind") == "evaluation"]
    assert len(top1s) > 5
    assert summary.top1 == top1s[-1]
    assert summary.best_top1 == max(top1s)
    assert summary.median_top1 == statistics.median(top1s[-5:])
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["median_top1"] == summary.median_top1
    assert summary.peak_share is None  # a CPU's peak is not known


@pytest.mark.systems  # two runs of the digits
def test_statistics_computed_anew_are_worth_what_the_page_says(tmp_path):
    (command,) = [c for c in QUICK if "--bn-recompute" in c]
    told = re.search(
        r"\(top-1 at epochs 1 and 2: ([\d.]+) and ([\d.]+) %, without it ([\d.]+) and ([\d.]+) %\)",
        PAGE,
    )
    config, _ = train_verb.read_flags("digits", shlex.split(command)[3:])
    without = replace(config, bn_recompute=0)
    for each, percents in ((config, told.groups()[:2]), (without, told.groups()[2:])):
        out = tmp_path / percents[0]
        mb.train(each, out=out, quiet=True)
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        top1s = [record["top1"] for record in records if record["kind"] == "evaluation"]
        # Of 359 images; another machine's rounding may move some.
        assert [100 * top1 for top1 in top1s[:2]] == pytest.approx([*map(float, percents)], abs=5)


def test_a_resumed_run_remembers_its_evaluations():
    state = State()
    for top1 in (0.1, 0.9, 0.3, 0.4, 0.5, 0.6, 0.7):
        state.evaluated({"top1": top1, "top5": 1.0, "loss": 0.0})
    saved = json.loads(json.dumps({"best_top1": state.best_top1, "last_top1s": state.last_top1s}))
    assert saved == {"best_top1": 0.9, "last_top1s": [0.3, 0.4, 0.5, 0.6, 0.7]}
    before = {**vars(State()), "noise": {}}
    del before["best_top1"], before["last_top1s"]
    assert State.of(before, 1).last_top1s == []  # of a checkpoint that has none
