"""Callers' own data sets: what torch's DataLoader and cross_entropy take works, the rest is one
sentence that names the item."""

import random
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import megabatch as mb
from megabatch.config import Config, Data
from megabatch.data.opening import open_sources
from megabatch.errors import UserError
from megabatch.launch import run_local

CONFIG = Config(batch=8, micro=4, span=4, epochs=1, data=Data(size=6, channels=3, classes=4))
OWN_NET = replace(CONFIG, model="own Net")


def floats(seed=0, channels=3, size=6):
    return torch.rand(channels, size, size, generator=torch.Generator().manual_seed(seed))


def of(item, count=20, changed=None, at=7):
    """A data set of one item, but for one of them."""
    items = [item] * count
    if changed is not None:
        items[at] = changed
    return items


def read(data, config=CONFIG):
    train, val = open_sources(config, data)
    images, labels = [], []
    for part in (train, val):
        some, numbers = part.read(torch.arange(len(part)), None)
        images.append(some)
        labels.append(numbers)
    return torch.cat(images), torch.cat(labels)


def refused(data, words, config=CONFIG):
    with pytest.raises(UserError, match=words) as error:
        read(data, config)
    assert "\n" not in str(error.value)
    return error.value


# --- what works


LABELS = [
    2, numpy.int64(2), numpy.uint8(2), torch.tensor(2), torch.tensor([2]), numpy.array(2), 2.0,
    [0, 0, 1, 0], torch.eye(4)[2], numpy.eye(4, dtype=numpy.int32)[2], numpy.float32(2),
]  # fmt: skip


@pytest.mark.parametrize("label", LABELS, ids=lambda label: f"{type(label).__name__} {label}")
def test_labels_that_mean_a_class(label):
    images, labels = read(of((floats(), label)))
    assert labels.tolist() == [2] * 20 and labels.dtype == torch.int64
    assert torch.equal(images[3], floats())


@pytest.mark.parametrize(
    "keys", [("image", "label"), ("img", "label"), ("pixel_values", "labels"), ("image", "target")]
)
def test_dicts_as_hugging_face_has_them(keys):
    images, labels = read(of({keys[0]: floats(), keys[1]: 3, "id": "x"}))
    assert torch.equal(images[0], floats()) and labels.tolist() == [3] * 20


def test_parts_in_one_dict_and_classes_that_the_set_knows():
    class Part(list):
        features = {"label": type("ClassLabel", (), {"names": list("abcdef")})()}  # noqa: RUF012

    parts = {"train": Part(of((floats(), 5))), "validation": Part(of((floats(1), 4), 6))}
    train, val = open_sources(CONFIG, parts)
    assert (len(train), len(val), train.classes) == (20, 6, 6)


IMAGES = {
    "tensor": floats().mul(255).byte(),
    "array": floats().mul(255).byte().permute(1, 2, 0).numpy(),
    "pillow": Image.fromarray(floats().mul(255).byte().permute(1, 2, 0).numpy()),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_bytes_in_any_shape_are_the_same_image(kind):
    images, _ = read(of((IMAGES[kind], 0)))
    assert torch.equal(images[0], IMAGES["tensor"])


def test_grey_pictures_among_colours_are_read_as_colours():
    grey = IMAGES["pillow"].convert("L")
    images, _ = read(of((IMAGES["pillow"], 0), changed=(grey, 0)))
    assert images.shape == (20, 3, 6, 6)
    images, _ = read(
        of((IMAGES["pillow"], 0)), replace(CONFIG, data=replace(CONFIG.data, channels=1))
    )
    assert images.shape == (20, 1, 6, 6)


def test_a_net_of_ones_own_takes_what_one_gives_it():
    images, _ = read(of((torch.rand(5, 7), 1)), OWN_NET)
    assert images.shape == (20, 5, 7)
    assert read(of((torch.rand(3), 1)), OWN_NET)[0].shape == (20, 3)
    refused(
        of((torch.rand(3, 9, 9), 1), changed=(torch.rand(3, 9, 8), 1)),
        "item 7 .* 3 x 9 x 8",
        OWN_NET,
    )


def test_numbers_of_another_order_of_bytes_are_the_same():
    """As FITS and IDX files have them; torch takes none."""
    numbers = numpy.arange(12, dtype=">f4").reshape(3, 4)
    images, _ = read(of((numbers, 1)), OWN_NET)
    assert torch.equal(images[0], torch.arange(12.0).view(3, 4))


def test_torchs_own_sets_and_a_list_of_two_items():
    data = TensorDataset(torch.rand(20, 3, 6, 6), torch.arange(20) % 4)
    assert read(data)[0].shape == (20, 3, 6, 6)
    assert len(read((data, data))[1]) == 40
    config = replace(CONFIG, data=replace(CONFIG.data, val_share=0.5))
    assert read([(floats(), 0), (floats(), 1)], config)[1].tolist() in ([0, 1], [1, 0])


TWO_ITEMS = {
    "tuples": [(floats(), 0), (floats(1), 1)],
    "lists": [[floats(), 0], [floats(1), 1]],
    "a tuple of lists": ([floats(), 0], [floats(1), 1]),
    "one-hot": [[floats(), [1, 0, 0, 0]], [floats(1), [0, 1, 0, 0]]],
    "one-hot tensors": [[floats(), torch.eye(3)[0]], [floats(1), torch.eye(3)[1]]],
    "nested lists": [[floats().tolist(), 0], [floats(1).tolist(), 1]],
    "with a name": [[floats(), 0, "a.png"], [floats(1), 1, "b.png"]],
    "dicts": [{"image": floats(), "label": 0}, {"image": floats(1), "label": 1}],
    "pillow": [[Image.new("RGB", (6, 6)), 0], [Image.new("RGB", (6, 6)), 1]],
}


@pytest.mark.parametrize("kind", TWO_ITEMS)
def test_two_items_are_one_set_and_two_sets_are_two(kind):
    """What they are tells, not how many: also where each of two sets has two items."""
    items = TWO_ITEMS[kind]
    config = replace(CONFIG, data=replace(CONFIG.data, val_share=0.5))
    assert sorted(read(items, config)[1].tolist()) == [0, 1]
    for pair in ((items, items), [items, items], (tuple(items), items)):
        train, val = open_sources(config, pair)
        assert (len(train), len(val)) == (2, 2)
    assert [len(part) for part in open_sources(config, (items[:1], items))] == [1, 2]


def test_two_vectors_with_labels_are_one_set():
    config = replace(OWN_NET, data=replace(CONFIG.data, val_share=0.5))
    assert read([[torch.ones(5), 1], [torch.zeros(5), 0]], config)[0].shape == (2, 5)


def test_an_item_beside_a_set_is_neither():
    items = [(floats(), 0), (floats(1), 1)]
    refused([items[0], items], r"the first looks like an \(image, label\), the second like a data")
    refused([items, items[0]], r"the first looks like a data set, the second like an \(image")


def test_images_and_labels_apart_are_told_the_way_together():
    images, labels = torch.rand(20, 3, 6, 6), torch.arange(20) % 4
    words = r"give them together, as torch\.utils\.data\.TensorDataset"
    refused((images, labels), words)
    refused(((images, labels), (images[:8], labels[:8])), words)
    refused((images.numpy(), labels.numpy()), words)


def test_a_training_run_on_dicts_and_one_hot_labels():
    data = [{"image": floats(n), "label": torch.eye(4)[n % 4]} for n in range(40)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    config = replace(CONFIG, epochs=1, lr=replace(CONFIG.lr, warmup=0))
    summary = mb.train(config, model=net, data=data, quiet=True)
    assert summary.ended == "finished" and summary.seen == 40


@pytest.mark.parametrize("label", [True, numpy.bool_(1), torch.tensor(True)])
def test_true_and_false_are_the_classes_1_and_0(label):
    _, labels = read(of((floats(), label)))
    assert labels.tolist() == [1] * 20 and labels.dtype == torch.int64
    config = replace(CONFIG, epochs=1, lr=replace(CONFIG.lr, warmup=0))
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    assert mb.train(config, model=net, data=of((floats(), label)), quiet=True).ended == "finished"


def test_a_net_with_fewer_outputs_than_classes():
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
    config = replace(CONFIG, epochs=1, lr=replace(CONFIG.lr, warmup=0))
    with pytest.raises(
        mb.UserError, match=r"tells 3 .* apart, but the images have 4: .* 4 outputs, or set data.cl"
    ):
        mb.train(config, model=net, data=of((floats(), 0)), quiet=True)


class Draws:
    """Its images are drawn anew each time, as torchvision's transforms do; `seen` are they."""

    def __init__(self, by):
        self.by, self.seen = by, []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        drawn = {
            "torch": lambda: float(torch.rand(())),
            "numpy": lambda: float(numpy.random.rand()),
            "python": random.random,
        }
        self.seen.append((index, drawn[self.by]()))
        return torch.full((3, 6, 6), self.seen[-1][1]), index % 4


class DrawsToo(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(108, 4)

    def forward(self, x):
        return self.head(nn.functional.dropout(x.flatten(1), 0.5, self.training))


DETERMINISTIC = replace(
    CONFIG, deterministic=True, epochs=3, lr=replace(CONFIG.lr, warmup=0, reference=1)
)


def weights_of_draws(by):
    return mb.train(DETERMINISTIC, DrawsToo(), Draws(by), quiet=True).weights_sha256


@pytest.mark.parametrize("by", ["torch", "numpy", "python"])
def test_what_a_data_set_draws_is_keyed_in_a_deterministic_run(by):
    random.seed(1), numpy.random.seed(1)
    expected = random.random(), numpy.random.rand()
    random.seed(1), numpy.random.seed(1)
    data = Draws(by)
    summary = mb.train(DETERMINISTIC, DrawsToo(), data, quiet=True)
    assert (random.random(), numpy.random.rand()) == expected  # they are the caller's
    trained = {index for index, _ in data.seen[1:9]}
    for index in trained:  # another draw each epoch
        drawn = [number for i, number in data.seen[1:] if i == index]
        assert len(drawn) >= 3 and len(set(drawn)) == len(drawn)
    assert summary.weights_sha256 == weights_of_draws(by)


def test_and_the_same_on_two_workers():
    assert run_local(2, weights_of_draws, "torch") == weights_of_draws("torch")


# --- what is refused


@pytest.mark.parametrize(
    "label",
    [
        1.7,
        float("nan"),
        "cat",
        None,
        [0.5, 0.5, 0, 0],
        (1, 2),
        torch.rand(2, 2),
        1j,
        [],
        [[0], [0, 1]],
    ],
)
def test_labels_that_mean_nothing(label):
    refused(of((floats(), 0), changed=(floats(), label)), "item 7 of the data set has the label")


@pytest.mark.parametrize("label", [-100, 4, -1, 10**30])
def test_labels_outside_the_classes(label):
    refused(
        of((floats(), 0), changed=(floats(), label)),
        rf"item 7 .* has the label {label}, but labels are 0 to 3: .*data\.classes",
    )


@pytest.mark.parametrize(
    "image",
    [floats(size=5), floats(channels=1), floats(channels=4), torch.rand(3, 6, 7), 5, [1, 2]],
)
def test_images_of_another_shape(image):
    refused(of((floats(), 0), changed=(image, 0)), r"item 7 .* but 3 x 6 x 6 .* data\.size")


@pytest.mark.parametrize("image", [None, "a.jpg", object()])
def test_what_is_no_image(image):
    refused(of((floats(), 0), changed=(image, 0)), "item 7 .* where its image should be")


@pytest.mark.parametrize("config", [CONFIG, OWN_NET], ids=["bundled", "own"])
@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_images_that_are_no_plain_numbers(kind, config):
    image = floats() + 1j if kind == "complex" else floats().to_sparse()
    refused(of((floats(), 0), changed=(image, 0)), f"item 7 .* is a {kind} image", config)


class Named(list):
    def __init__(self, classes, items):
        super().__init__(items)
        self.classes = classes


def test_both_parts_number_their_classes_alike():
    """Of folders, one without a class would number those behind it anew."""
    train = Named(["ant", "bee", "cat"], of((floats(), 2)))
    refused(
        (train, Named(["ant", "cat"], of((floats(), 1)))),
        "the validation set has the classes ant, cat, but the training set ant, bee, cat: ",
    )
    refused((train, Named(list("abcde"), of((floats(), 1)))), r"a, b, c, \.\.\. \(5\), but")
    assert len(read((train, Named(["ant", "bee", "cat"], of((floats(), 1)))))[1]) == 40
    refused((train, of((floats(), 3))), "item 0 of the validation set .* labels are 0 to 2")


def test_items_that_are_no_pairs():
    refused([1, 2, 3], "item 0 of the data set is an int: give")
    refused(of((floats(), 0), changed=floats()), "item 7 of the data set is a Tensor")
    refused(of((floats(), 0), changed={"x": 1, "y": 2}), "item 7 .* holds x, y: name its parts")
    refused(of((floats(), 0), changed=(floats(),)), "item 7 of the data set is a tuple")
    three = [[(floats(), 0), (floats(), 1)]] * 3  # training, validation and test
    refused(three, "item 0 of the data set has a tuple where its image should be")


def test_what_is_no_data_set():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter([])

    refused([], "the data set is empty")
    refused(([(floats(), 0)], []), "the validation set is empty")
    refused(
        "folder", "the data set is a str, which .*, or name a folder or pack in config.data.path"
    )
    refused(Endless(), "is an? Endless, which cannot be read by index")
    refused(DataLoader(of((floats(), 0))), "is a DataLoader, which cannot be read by index")
    refused(3, "the data set is an int")
    refused((1, 2), "the training set is an int")
    refused({"a": 1}, "the data set is a dict")
    refused([(floats(), 0)] * 3, "change the share that is held out")


def test_an_item_that_raises_is_named_and_the_cause_is_kept():
    class Broken:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            if index == 7:
                raise KeyError("pixels")
            return floats(), 0

    error = refused(Broken(), r"item 7 of the data set cannot be read \(KeyError: 'pixels'\)")
    assert isinstance(error.__cause__, KeyError)
    with pytest.raises(UserError, match="item 7 of the data set"):
        net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
        config = replace(CONFIG, lr=replace(CONFIG.lr, warmup=0))
        mb.train(config, model=net, data=Broken(), quiet=True)
