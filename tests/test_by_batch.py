"""The recipe that follows the batch: exact at its rows, monotone between them, carried over to
other data by share, and one sentence where nothing was verified."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.batch import Stage
from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.recipes import BY_BATCH, doubts, named
from megabatch.recipes.by_batch import fitted, lost_points, proportional_batch, row_at
from megabatch.recipes.mlperf import ROWS, mlperf
from megabatch.recipes.tiny import LONG, SHORT, tiny, tiny30
from megabatch.verbs import sizing
from megabatch.verbs.train import read_flags

TABLES = [ROWS, LONG, SHORT]


@pytest.mark.parametrize("rows", TABLES)
def test_a_row_is_itself(rows):
    for row in rows:
        assert row_at(rows, row.batch) == row


@pytest.mark.parametrize("name", BY_BATCH)
def test_a_recipe_at_a_row_has_the_rows_numbers(name):
    for row in BY_BATCH[name].rows:
        config = named(name, batch=row.batch).check()
        assert (config.batch, config.epochs) == (row.batch, row.epochs)
        assert config.lr.peak(row.batch) == row.rate
        assert config.lr.warmup == row.warmup
        assert config.optimizer.momentum == row.momentum
        assert config.optimizer.weight_decay == row.weight_decay
        if hasattr(row, "optimizer"):
            said = {"sgd": ("lars", None), "lars": ("lars", 0.001), "muon": ("muon", 0.001)}
            assert (config.optimizer.name, config.optimizer.trust) == said[row.optimizer]


@given(st.integers(0, len(ROWS) - 2), st.floats(0, 1), st.floats(0, 1))
def test_between_two_rows_settings_go_from_one_to_the_other(at, one, other):
    low, high = ROWS[at], ROWS[at + 1]
    near, far = sorted(low.batch * (high.batch / low.batch) ** share for share in (one, other))
    for name in ("rate", "warmup", "epochs"):
        ends = getattr(low, name), getattr(high, name)
        first, second = (getattr(row_at(ROWS, b), name) for b in (near, far))
        upwards = ends[1] >= ends[0]
        path = (ends[0], first, second, ends[1])
        slack = 1e-9 * max(ends)
        assert all((b - a if upwards else a - b) >= -slack for a, b in itertools.pairwise(path))


def test_halfway_in_doublings_is_halfway_in_rate():
    middle = math.sqrt(32768 * 49152)
    found = row_at(ROWS, middle)
    assert found.rate == pytest.approx((21.2 + 19.405) / 2)
    assert found.warmup == pytest.approx(20)
    assert found.epochs == pytest.approx((58 + 70.82) / 2)


@pytest.mark.parametrize("rows", [SHORT, LONG])
def test_the_rate_of_what_does_not_adapt_goes_from_row_to_row(rows):
    """It is given as a share of a rate that moves too: with the nearest row's share it would jump,
    and rise above both rows between two that have the same."""
    below, above = rows[-2:]
    assert below.optimizer == above.optimizer
    path = [row_at(rows, below.batch * 2 ** (i / 16)) for i in range(17)]
    made = [row.rate * row.unadapted_rate for row in path]
    even = [made[0] + i / 16 * (made[-1] - made[0]) for i in range(17)]
    assert path[0] == below and path[-1] == above
    assert made == pytest.approx(even)


def test_between_sgd_and_muon_there_is_nothing_to_interpolate():
    below, above = LONG[0], LONG[1]
    assert (below.optimizer, above.optimizer) == ("sgd", "muon")
    near_sgd, near_muon = row_at(LONG, 1.5 * below.batch), row_at(LONG, above.batch / 1.5)
    assert near_sgd.optimizer == "sgd" and near_sgd.rate == pytest.approx(1.5 * below.rate)
    assert near_muon.optimizer == "muon" and near_muon.rate == above.rate


@given(st.integers(5, 11))
def test_any_power_of_two_is_made_of_passes(power):
    """Rows with spans of 204 or 230 do not divide it."""
    config = mlperf(2**power * 32).check()
    assert config.batch % config.micro == 0 and config.micro % config.span == 0
    assert config.micro <= 256


def test_fitted_keeps_what_fits_and_counts_stages():
    config = Config(batch=1024, micro=256, span=64)
    assert fitted(config) == config
    assert fitted(replace(config, micro=384)).micro == 256
    staged = fitted(replace(config, stages=(Stage(5, 1024 + 64),)))
    assert (staged.micro, staged.span) == (64, 64)
    assert fitted(replace(config, batch=96)).span == 48
    assert fitted(replace(config, batch=7, span=4)).span == 1


@given(st.integers(1, 100_000))
def test_a_span_that_does_not_divide_the_batch_gives_way_to_the_next_that_does(batch):
    """Batch norm over eight images is another net than over 200: 3,000 need not have it."""
    config = mlperf(batch)
    wanted = row_at(ROWS, batch).span
    assert config.batch % config.micro == 0 and config.micro % config.span == 0
    assert config.span <= wanted
    assert all(batch % larger for larger in range(config.span + 1, wanted + 1))


def test_spans_of_round_batches():
    assert [mlperf(batch).span for batch in (1000, 3000, 40_000)] == [200, 200, 125]
    assert [tiny(batch).span for batch in (500, 5000, 100_000)] == [50, 50, 50]


def test_a_batch_without_spans_is_said_with_the_next_that_has_them():
    said = [doubts("mlperf", mlperf(batch)) for batch in (2048, 3000, 40_000, 50_000)]
    assert said == [[], [], [], []]
    (prime,) = doubts("mlperf", mlperf(4099))
    assert prime == (
        "a batch of 4,099 is made of spans of 1 image, too few for batch norm's statistics, and "
        "takes 4,099 passes, slow ones: 4,096 has spans of 64"
    )
    said = doubts("tiny", tiny(6002))
    assert said == [
        "a batch of 6,002 is made of spans of 2 images, too few for batch norm's statistics, and "
        "takes 3,001 passes, slow ones: 6,016 has spans of 64"
    ]
    (few,) = doubts("tiny", replace(tiny(4096 + 48), span=16, micro=592))
    assert "spans of 16 images, too few for batch norm's statistics: 4,160 has" in few
    assert len(doubts("tiny", tiny(13))) == 1  # a batch as small as that is one span
    assert doubts("mlperf", replace(mlperf(4096), span=1)) == []  # given by hand


def test_other_data_by_its_share():
    images = 1_281_167 // 10
    assert proportional_batch(4096, None, 1_281_167) == 4096
    tenth = mlperf(4096, images)
    whole = row_at(ROWS, 4096 * 1_281_167 / images)
    assert tenth.lr.peak(4096) == whole.rate
    assert (tenth.lr.warmup, tenth.epochs) == (whole.warmup, whole.epochs)
    # As many steps: in all and of warm-up.
    steps = tenth.epochs * images / 4096
    assert steps == pytest.approx(whole.epochs * 1_281_167 / whole.batch)
    assert tenth.target_accuracy is None and mlperf(4096).target_accuracy == 0.759


@pytest.mark.parametrize("name", BY_BATCH)
def test_a_recipes_own_batch_is_carried_to_other_data_like_one_that_is_given(name):
    """Else it would have the steps, and the target, of data that is not there."""
    own = named(name).batch
    for images in (20_000, 400_000):
        assert named(name, images=images) == named(name, batch=own, images=images)
        assert named(name, images=images).target_accuracy is None
        assert named(name, images=images, keep_epochs=True).epochs == named(name).epochs
    assert named(name) == named(name, batch=own)


def test_outside_the_rows_one_sentence_is_said():
    assert doubts("mlperf", mlperf(5000)) == []
    for batch, side in ((1024, "below"), (131072, "above")):
        (said,) = doubts("mlperf", mlperf(batch))
        assert f"a batch of {batch:,} lies {side} what was verified" in said
        assert "\n" not in said
    (carried,) = doubts("mlperf", mlperf(8192, 100_000), 100_000)
    assert "a batch of 8,192, by its share of the images 104,953 there," in carried
    low, high = mlperf(816), mlperf(131072)
    assert low.lr.peak(816) == pytest.approx(7.4 / 2)
    assert high.lr.peak(131072) == pytest.approx(24.699 * 2)


def test_images_that_are_not_counted_are_said(tmp_path):
    """A folder of 1,000 images has the settings of a million's."""
    folder, pack = (
        replace(tiny(4096), data=replace(tiny(4096).data, path=str(tmp_path / name)))
        for name in ("pictures", "pictures.arrow")
    )
    (said,) = sizing.doubts("tiny", folder)
    assert said.startswith("a batch is taken as a share of 100,000 images: those of ")
    assert said.endswith("pictures are not counted before they are read, those of a pack are "
                         "(megabatch pack)")  # fmt: skip
    assert list(sizing.doubts("tiny", pack)) == list(sizing.doubts("digits", folder)) == []


def test_kept_epochs_and_what_they_are_expected_to_cost():
    kept = named("mlperf", batch=32768, keep_epochs=True)
    assert kept.epochs == mlperf().epochs == 37
    assert kept.lr.peak(32768) == 21.2
    assert kept.lr.warmup == pytest.approx(16 * 37 / 58)
    (said,) = doubts("mlperf", kept)
    assert "has 58 epochs in its row: 37 are expected to cost about 1.4 points" in said
    (said,) = doubts("mlperf", named("mlperf", epochs=10, batch=32768))
    assert "10 are expected to cost more than 3.4 points" in said
    assert named("mlperf", epochs=50, batch=32768, keep_epochs=True).epochs == 50


def test_lost_points_at_the_runs_that_they_come_from():
    for epochs, top1 in ((40, 77.2), (32, 76.6), (24, 75.6), (16, 73.8)):
        assert lost_points(epochs, 40) == pytest.approx(77.2 - top1)
    assert lost_points(90, 40) == 0
    assert lost_points(28, 40) == pytest.approx(1.1)
    assert lost_points(8, 40) is None


def test_the_command_line_follows_the_batch_and_what_is_given_wins():
    config, _ = read_flags("mlperf", ["--batch", "16384"])
    assert config == mlperf(16384)
    config, _ = read_flags("mlperf", ["--batch", "16384", "--lr.warmup", "3"])
    assert config.lr == replace(mlperf(16384).lr, warmup=3)
    config, _ = read_flags("mlperf", ["--batch", "32768", "--keep-epochs"])
    assert config.epochs == 37
    with pytest.raises(UserError, match=r"^goyal2017 keeps its epochs at any batch"):
        read_flags("goyal2017", ["--keep-epochs"])


def test_the_papers_recipes_keep_their_rule():
    for name in ("goyal2017", "you2018", "jia2018", "mikami2018"):
        recipe = named(name)
        assert named(name, batch=2 * recipe.batch) == recipe.resized(batch=2 * recipe.batch)
        assert doubts(name, recipe) == []


def test_configs_of_rows_are_written_and_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(named("tiny", batch=2048).to_json())))
    assert Config.read(path) == named("tiny", batch=2048)


def test_muons_step_is_the_same_share_of_a_weight_outside_its_rows():
    """Of the shares tried at 8,192 the double was worse and four times it learnt nothing."""
    for name, rows, made in (("tiny30", SHORT, tiny30), ("tiny", LONG, tiny)):
        for batch, nearest in ((768, rows[1]), (16384, rows[-1]), (65536, rows[-1])):
            assert nearest.optimizer == "muon"
            assert row_at(rows, batch) == nearest._replace(batch=batch)
            assert made(batch).lr.peak(batch) == nearest.rate
        (doubt,) = doubts(name, made(16384))
        assert "settings are those of 8,192, and may want tuning" in doubt


def test_other_rates_go_with_the_batch_outside_their_rows():
    lars = [LONG[0]._replace(optimizer="lars", rate=10.0)]
    assert row_at(lars, 2 * lars[-1].batch).rate == 2 * lars[-1].rate
    assert tiny(64).lr.peak(64) == LONG[0].rate / 4
    (doubt,) = doubts("tiny", tiny(64))
    assert "settings are those of 256 with the rate in proportion" in doubt


def test_between_two_optimizers_one_sentence_is_said():
    assert doubts("tiny30", tiny30(4096)) == doubts("tiny30", tiny30(6016)) == []
    (doubt,) = doubts("tiny30", tiny30(768))
    assert "768 lies between 256 and 1,024, which have different optimizers" in doubt
    assert "the settings are those of 1,024, and may want tuning" in doubt
    (doubt,) = doubts("tiny30", tiny30(384))
    assert "those of 256 with the rate in proportion" in doubt


def test_a_row_that_nobody_ran_is_said_at_it_and_beside_it():
    (doubt,) = doubts("tiny30", tiny30(1024))
    assert doubt.startswith("a batch of 1,024 has settings that were carried over to it and never")
    between = tiny30(2048)
    assert (between.lr.peak(2048), between.optimizer.name) == (60, "muon")
    (doubt,) = doubts("tiny30", between)
    assert doubt.startswith("a batch of 2,048 has settings between rows of which 1,024 was carried")
