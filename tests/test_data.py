"""Sources, crops and augmentation: against plain references, and one picture whatever its store."""

import math
from dataclasses import replace

import numpy
import pictures
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megabatch.config import Config, Data
from megabatch.data.augment import augment, finish, normalise, recoloured
from megabatch.data.crop import (
    CROP_DRAWS,
    centre_boxes,
    choose_boxes,
    crop_draws,
    random_boxes,
    scale_boxes,
)
from megabatch.data.decoded import bring_to_size, with_channels
from megabatch.data.jpeg import Encoding, Workspace, head_of, region, scaling
from megabatch.data.opening import open_sources
from megabatch.data.origins import open_origin
from megabatch.data.packs.making import pack
from megabatch.data.resident import crop_on_device
from megabatch.errors import UserError

PHOTOS = Data(size=16, channels=3, crop_area=(0.08, 1.0), flip=True)


def opened(path, **data):
    return open_sources(Config(data=replace(PHOTOS, path=str(path), **data)))


# --- crops


def one_random_box(data, width, height, draws):
    """The rule, image by image, as a person would write it."""
    low, high = (math.log(aspect) for aspect in data.crop_aspect)
    for index in range(10):
        share, shape = draws[2 * index : 2 * index + 2]
        small, large = data.crop_area
        area = width * height * (small + share * (large - small))
        aspect = math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(draws[-2] * (width - w + 1))
            upper = int(draws[-1] * (height - h + 1))
            return [left, upper, left + w, upper + h]
    aspect = min(max(width / height, data.crop_aspect[0]), data.crop_aspect[1])
    w, h = min(width, round(height * aspect)), min(height, round(width / aspect))
    left, upper = (width - w) // 2, (height - h) // 2
    return [left, upper, left + w, upper + h]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=9),
       st.integers(0, 2**40), st.sampled_from([(0.08, 1.0), (0.9, 1.0), (1.0, 1.0)]))  # fmt: skip
def test_random_boxes_are_the_rule_applied_to_each_image(sizes, position, area):
    data = replace(PHOTOS, crop_area=area)
    draws = crop_draws(3, torch.arange(position, position + len(sizes)))
    heights, widths = numpy.array(sizes).T
    found = random_boxes(data, heights, widths, draws.numpy().astype(float)).tolist()
    rows = draws.tolist()
    assert found == [
        one_random_box(data, width, height, rows[n]) for n, (height, width) in enumerate(sizes)
    ]


def test_evaluation_sees_what_training_sees_where_that_is_whole_images():
    heights, widths = numpy.array([30, 30, 40, 30]), numpy.array([30, 40, 30, 90])
    draws = crop_draws(0, torch.arange(4))
    whole = Data(size=16)
    seen = choose_boxes(whole, heights, widths, None)
    # A drawn aspect may fit but for rounding: then a row of pixels is missing.
    assert abs(seen - choose_boxes(whole, heights, widths, draws)).max() <= 1
    assert seen.tolist() == [[0, 0, 30, 30], [0, 0, 40, 30], [0, 0, 30, 40], [25, 0, 65, 30]]


@pytest.mark.parametrize(
    ("settings", "side"),
    [
        ({"crop_area": (0.08, 1.0)}, 28),
        ({"scale": (32, 40)}, 28),
        ({"resize": 20}, 26),
        ({"resize": 16}, 32),
        ({"resize": 10}, 32),
    ],
)
def test_evaluation_crops_the_middle_where_training_crops_or_it_is_told_to(settings, side):
    data = Data(size=16, **settings)
    left, upper, right, lower = choose_boxes(data, numpy.array([32]), numpy.array([64]), None)[0]
    assert (right - left, lower - upper) == (side, side)
    assert (left, upper) == ((64 - side) // 2, (32 - side) // 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 10**6))
def test_scale_and_centre_boxes_lie_inside_and_are_square(height, width, position):
    data = replace(PHOTOS, size=24, scale=(27, 48))
    draws = crop_draws(0, torch.tensor([position])).numpy().astype(float)
    for boxes in (
        scale_boxes(data, numpy.array([height]), numpy.array([width]), draws),
        centre_boxes(data, numpy.array([height]), numpy.array([width])),
    ):
        left, upper, right, lower = boxes[0].tolist()
        assert 0 <= left < right <= width and 0 <= upper < lower <= height
        assert right - left == lower - upper
    side = scale_boxes(data, numpy.array([480]), numpy.array([640]), draws)[0]
    assert 480 * 24 / 48 <= side[2] - side[0] <= 480 * 24 / 27 + 1


def test_a_crop_is_pillows_crop_and_resize():
    image = pictures.pixels(1, 90, 120)
    for box in ([10, 5, 90, 85], [0, 0, 120, 90], [50, 40, 60, 52], [3, 3, 19, 19]):
        out = torch.empty(3, 16, 16, dtype=torch.uint8)
        left, upper, right, lower = box
        bring_to_size(image[upper:lower, left:right], out)
        reference = Image.fromarray(image).crop(box).resize((16, 16), Image.BILINEAR)
        difference = out.permute(1, 2, 0).numpy().astype(int) - numpy.asarray(reference)
        assert abs(difference).max() <= 1


def test_on_the_device_the_same_crop_is_two_matrix_products():
    images = numpy.stack([pictures.pixels(n, 40, 56) for n in range(6)])
    draws = crop_draws(1, torch.arange(6)).numpy().astype(float)
    boxes = random_boxes(PHOTOS, numpy.full(6, 40), numpy.full(6, 56), draws)
    found = crop_on_device(torch.from_numpy(images), torch.from_numpy(boxes), 16)
    for n in range(6):
        out = torch.empty(3, 16, 16, dtype=torch.uint8)
        left, upper, right, lower = boxes[n]
        bring_to_size(images[n, upper:lower, left:right], out)
        assert (found[n].int() - out.int()).abs().max() <= 1


def test_large_jpegs_are_decoded_small_when_the_crop_stays_large_enough():
    assert [scaling(side, 16) for side in (31, 32, 63, 64, 127, 128, 999)] == [1, 2, 2, 4, 4, 8, 8]
    y, x = numpy.mgrid[0:200, 0:240]
    ramp = numpy.stack([x, y, x // 2 + y // 2], 2).astype(numpy.uint8)
    data, box = simplejpeg.encode_jpeg(ramp, 95), [20, 30, 180, 190]
    exact, fast = (torch.empty(3, 16, 16, dtype=torch.uint8) for _ in range(2))
    for size, out in ((160, exact), (16, fast)):
        bring_to_size(region(data, head_of(data), box, 3, size, Workspace(), False), out)
    # Half a pixel of the scaled picture is 4 of the whole one: 4 steps of the ramp.
    assert 0 < (exact.int() - fast.int()).abs().max() <= 6


# --- augmentation


def test_flip_and_shift_are_what_they_always_were():
    """Fixed values: weights of earlier runs depend on them."""
    images = torch.arange(2 * 16, dtype=torch.uint8).view(2, 1, 4, 4)
    data = Data(flip=True, shift=1)
    found = augment(images.clone(), torch.tensor([5, 6]), data, seed=0)
    assert found.tolist() == FLIPPED_AND_SHIFTED


FLIPPED_AND_SHIFTED = [
    [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]],
    [[[18, 17, 16, 0], [22, 21, 20, 0], [26, 25, 24, 0], [30, 29, 28, 0]]],
]


def test_flip_mirrors_half_of_the_images():
    images = torch.randint(0, 256, (64, 3, 5, 7), dtype=torch.uint8)
    found = augment(images.clone(), torch.arange(64), Data(flip=True), seed=1)
    same = (found == images).flatten(1).all(1)
    mirrored = (found == images.flip(3)).flatten(1).all(1)
    assert (same | mirrored).all() and 20 <= int(mirrored.sum()) <= 44


def test_jitter_and_lighting_are_keyed_by_position_alone():
    images = torch.rand(6, 3, 8, 8)
    data = replace(PHOTOS, jitter=(0.4, 0.4, 0.4), lighting=0.1)
    whole = recoloured(images, torch.arange(10, 16), data, seed=2)
    parts = [recoloured(images[n : n + 1], torch.tensor([10 + n]), data, seed=2) for n in range(6)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, recoloured(images, torch.arange(6), data, seed=2))


def jittered(image, draws, strengths):
    """One image, operation by operation."""
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    for which in orders[int(draws[3] * 6)]:
        keep = 1 + (2 * draws[which] - 1) * strengths[which]
        grey = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
        other = [torch.zeros_like(grey), torch.full_like(grey, grey.mean().item()), grey][which]
        image = image * keep + other * (1 - keep)
    return image


def test_jitter_is_brightness_contrast_and_saturation_in_a_drawn_order():
    from megabatch.keyed import Purpose, uniform

    images, strengths = torch.rand(8, 3, 6, 6, dtype=torch.float64), (0.4, 0.3, 0.2)
    data = replace(PHOTOS, jitter=strengths)
    found = recoloured(images, torch.arange(8), data, seed=4)
    draws = uniform(4, Purpose.COLOUR, torch.arange(8)[:, None], torch.arange(4)[None]).tolist()
    for n in range(8):
        torch.testing.assert_close(found[n], jittered(images[n], draws[n], strengths))


def test_lighting_has_the_deviations_of_the_principal_components():
    images = torch.zeros(4000, 3, 1, 1, dtype=torch.float64)
    data = replace(PHOTOS, lighting=0.1)
    found = recoloured(images, torch.arange(4000), data, seed=0)[:, :, 0, 0]
    components = torch.tensor(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]],
        dtype=torch.float64,
    )
    along = found @ components
    expected = 0.1 * torch.tensor([0.2175, 0.0188, 0.0045], dtype=torch.float64)
    torch.testing.assert_close(along.std(0), expected, rtol=0.05, atol=1e-5)
    assert (along.mean(0).abs() < 0.003).all()


def test_one_mean_for_all_channels_of_a_callers_own_images():
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
    found = normalise(images, (0.5,), (0.25,), torch.float32)
    assert torch.equal(found, (images.float() - 127.5) / 63.75)


def test_finish_without_colour_is_flip_and_normalisation():
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    found = finish(images.clone(), torch.arange(5), PHOTOS, 7, mean, std, torch.float32)
    flipped = augment(images.clone(), torch.arange(5), PHOTOS, 7)
    assert torch.equal(found, normalise(flipped, mean, std, torch.float32))
    offset, scale = (torch.tensor(v).view(1, 3, 1, 1) * 255 for v in (mean, std))
    assert torch.equal(found, (flipped.float() - offset) / scale)


# --- sources


@pytest.fixture
def root(tmp_path):
    return pictures.folder(tmp_path / "set", each=6, val=2, size=(40, 56))


def test_a_folder_and_a_pack_of_it_give_the_same_pixels(root, tmp_path):
    pack(open_origin(root), "set", tmp_path / "a.arrow", Encoding())
    indices = torch.tensor([3, 17, 0, 9])
    draws = crop_draws(0, torch.arange(4))
    for channels in (1, 3):
        read = [
            part.read(indices % len(part), drawn)
            for path in (root, tmp_path / "a.arrow")
            for part, drawn in zip(opened(path, channels=channels), (draws, None), strict=True)
        ]
        for one, other in zip(read[:2], read[2:], strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
            assert one[0].shape == (4, channels, 16, 16)


def test_a_raw_pack_gives_the_pixels_of_the_decoded_images(root, tmp_path):
    pack(open_origin(root), "set", tmp_path / "raw.arrow", Encoding("raw"))
    indices, draws = torch.arange(18), crop_draws(0, torch.arange(18))
    raw, _ = opened(tmp_path / "raw.arrow")[0].read(indices, draws)
    jpeg, _ = opened(root)[0].read(indices, draws)
    boxes = choose_boxes(PHOTOS, numpy.full(18, 40), numpy.full(18, 56), draws).tolist()
    sides = [min(right - left, lower - upper) for left, upper, right, lower in boxes]
    whole = [n for n in range(18) if scaling(sides[n], 16) == 1]
    assert 5 < len(whole) < 18  # the others were scaled down while they were decoded
    assert torch.equal(raw[whole], jpeg[whole])


def test_grey_and_colour_are_made_of_each_other_as_pillow_does():
    image = pictures.pixels(3, 20, 30)
    grey = numpy.asarray(Image.fromarray(image).convert("L"))
    assert (with_channels(image, 1)[:, :, 0] == grey).all()
    assert (with_channels(grey[:, :, None], 3) == grey[:, :, None]).all()
    assert with_channels(image, 3) is image


def test_a_folder_without_val_holds_a_share_out(tmp_path):
    root = pictures.folder(tmp_path / "set", each=10, val=0)
    train, val = opened(root, val_share=0.2)
    assert (len(train), len(val)) == (24, 6)
    assert sorted(train.labels.tolist() + val.labels.tolist()) == [0] * 10 + [1] * 10 + [2] * 10


def test_what_is_missing_or_bad_is_named(root, tmp_path):
    with pytest.raises(UserError, match="no images were named"):
        opened("", source="folder")
    with pytest.raises(UserError, match="there is no"):
        opened(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"there is no file .*a\.arrow"):
        opened(tmp_path / "a.arrow")
    (root / "train/ant/3.JPEG").write_bytes(b"")
    train, _ = opened(root)
    with pytest.raises(UserError, match=r"train/ant/3\.JPEG cannot be read \(the file is empty\)"):
        train.read(torch.tensor([3]), None)


def test_the_path_alone_decides(root, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    kinds = {str(root): "folder", str(tmp_path / "x.arrow"): "pack", "": "digits"}
    kinds |= {str(tmp_path / "file"): "pack", "cifar-10-python.tar.gz": "folder"}
    assert {path: Data(path=path).kind for path in kinds} == kinds


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scale": (8, 4)}, "data.scale is"),
        ({"scale": (4, 16), "size": 8}, "at least data.size"),
        ({"jitter": (0.4, 1.0, 0.0)}, "data.jitter is"),
        ({"lighting": -0.1}, "data.lighting is -0.1; it must be at least 0"),
        ({"threads": -1}, "data.threads is -1"),
    ],
)
def test_contradictions_are_refused(wrong, words):
    with pytest.raises(UserError, match=words):
        Config(data=Data(**wrong)).check()


def test_a_local_copy_is_of_a_pack(root, tmp_path):
    with pytest.raises(UserError, match=r"data\.local_copy copies packs"):
        opened(root, local_copy=str(tmp_path))


def test_draws_reach_every_part_of_the_rule():
    assert crop_draws(0, torch.arange(3)).shape == (3, CROP_DRAWS)
