"""mb.Loader in somebody's own loop: every image once an epoch, on any number of workers, from any
position; closed when its block ends."""

import gc
import itertools
import multiprocessing

import pictures
import pytest
import torch
from waiting import PATIENCE_SECONDS

import megabatch as mb
from megabatch.cluster import Cluster
from megabatch.errors import UserError


def worker(rank=0, world=1):
    return Cluster(rank, world, rank, world, torch.device("cpu"), (1, world))


class Numbered:
    """Image n is the number n."""

    def __init__(self, images, classes=10):
        self._images, self.classes = images, [f"class {n}" for n in range(classes)]

    def __len__(self):
        return self._images

    def __getitem__(self, index):
        return torch.full((1, 2, 2), float(index)), index % len(self.classes)


PAIR = (Numbered(64), Numbered(10))


def numbers(images):
    return images[:, 0, 0, 0].tolist()


def test_an_epoch_is_every_image_once():
    with mb.Loader(PAIR, batch=16, cluster=worker()) as loader:
        assert (len(loader), loader.images, loader.held_out, loader.classes) == (4, 64, 10, 10)
        assert loader.class_names[3] == "class 3"
        epochs = []
        for _ in range(2):
            found = []
            for images, labels in loader:
                assert images.shape == (16, 1, 2, 2) and images.dtype == torch.float32
                assert labels.tolist() == [int(n) % 10 for n in numbers(images)]
                found += numbers(images)
            assert sorted(found) == list(range(64))
            epochs.append(found)
        assert epochs[0] != epochs[1]
        assert (loader.seen, loader.epoch) == (128, 2.0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_workers_share_out_the_same_batches(world):
    def batches(rank, world):
        with mb.Loader(PAIR, batch=24, seed=3, cluster=worker(rank, world)) as loader:
            return [numbers(images) for images, _ in loader]

    alone = batches(0, 1)
    shares = [batches(rank, world) for rank in range(world)]
    assert all(len(part) == 24 // world for parts in shares for part in parts)
    assert [[*itertools.chain(*parts)] for parts in zip(*shares, strict=True)] == alone


def test_it_goes_on_where_it_stopped():
    with mb.Loader(PAIR, batch=16, cluster=worker()) as loader:
        whole = [numbers(images) for _ in range(2) for images, _ in loader]
    with mb.Loader(PAIR, batch=16, cluster=worker()) as loader:
        begun = [numbers(next(iter(loader))[0])]
        begun += [numbers(images) for images, _ in loader]  # the rest of the epoch
        assert begun == whole[:4]
        seen = loader.seen
    with mb.Loader(PAIR, batch=16, cluster=worker(), seen=seen) as loader:
        assert loader.epoch == 1.0
        assert [numbers(images) for images, _ in loader] == whole[4:]
        loader.seen = 32
        assert numbers(next(iter(loader))[0]) == whole[2]


def test_a_batch_that_does_not_divide_the_epoch_crosses_its_end():
    with mb.Loader(PAIR, batch=48, cluster=worker()) as loader:
        counts = [len([*loader]) for _ in range(3)]
        assert counts == [2, 1, 1]
        assert loader.seen == 192


@pytest.mark.parametrize("world", [1, 3])
def test_validation_has_each_image_once(world):
    found = []
    for rank in range(world):
        with mb.Loader(PAIR, batch=12, cluster=worker(rank, world)) as loader:
            found += [n for images, _ in loader.validation() for n in numbers(images)]
    assert sorted(found) == list(range(10))


def test_a_folder_and_its_settings(tmp_path):
    folder = pictures.folder(tmp_path / "pictures")
    with mb.Loader(folder, batch=4, size=24, cluster=worker()) as loader:
        images, labels = next(iter(loader))
        assert images.shape == (4, 3, 24, 24) and labels.dtype == torch.int64
        again = next(iter(loader))[0]
        assert not torch.equal(images, again)
    settings = mb.Data(path=str(folder), size=16, channels=1)
    with mb.Loader(settings, batch=4, cluster=worker()) as loader:
        assert next(iter(loader))[0].shape == (4, 1, 16, 16)


def test_a_callers_default_device_is_theirs_between_two_batches():
    def taken():
        with mb.Loader(mb.Data(), batch=500, cluster=worker()) as loader:  # read by this thread
            for images, labels in itertools.chain(loader, loader.validation()):
                yield images, labels, torch.ones(1).device.type

    plain = list(taken())
    torch.set_default_device("meta")
    try:
        found = list(taken())
    finally:
        torch.set_default_device(None)
    assert {device for *_, device in found} == {"meta"}
    for before, now in zip(plain, found, strict=True):
        assert torch.equal(before[0], now[0]) and torch.equal(before[1], now[1])


def test_mistakes_are_one_sentence():
    for batch in (0, -4, 2.5, "all"):
        with pytest.raises(UserError, match=f"^batch is '?{batch}'?"):
            mb.Loader(PAIR, batch=batch, cluster=worker())
    with pytest.raises(UserError, match="a batch of 10 cannot be shared out evenly to 4 workers"):
        mb.Loader(PAIR, batch=10, cluster=worker(0, 4))
    with pytest.raises(UserError, match="seen is 5, not a multiple of the batch, 16"):
        mb.Loader(PAIR, batch=16, cluster=worker(), seen=5)
    with pytest.raises(UserError, match="the loader has no images: name a folder or a pack"):
        mb.Loader(None, batch=16, cluster=worker())
    for seen in (16.0, "16", -16):
        with pytest.raises(UserError, match=f"seen is '?{seen}'?, not a multiple of the batch, 16"):
            mb.Loader(PAIR, batch=16, cluster=worker(), seen=seen)
    for dtype in ("float32", torch.int64, torch.complex64):  # whose images would be all 0
        with pytest.raises(UserError, match=r"dtype is .*: give one of torch's floating point"):
            mb.Loader(PAIR, batch=16, cluster=worker(), dtype=dtype)
    with pytest.raises(
        UserError, match=r"cluster is 'here', not a Cluster: give what Cluster\.from_env"
    ):
        mb.Loader(PAIR, batch=16, cluster="here")
    with pytest.raises(UserError, match="/nowhere"):
        mb.Loader("/nowhere", batch=16, cluster=worker())
    with mb.Loader(PAIR, batch=16, cluster=worker()) as loader:
        pass
    with pytest.raises(UserError, match="the loader is closed"):
        next(iter(loader))
    with pytest.raises(UserError, match="the loader is closed"):
        loader.validation()
    loader.close()


def told(loader, words):
    for images in (loader.__iter__, loader.validation):
        try:
            words.put(len(next(iter(images()))))
        except UserError as error:
            words.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads
def test_a_forked_process_is_told_to_make_its_own():
    context = multiprocessing.get_context("fork")
    words = context.SimpleQueue()
    with mb.Loader(PAIR, batch=16, cluster=worker()) as loader:
        next(iter(loader))
        child = context.Process(target=told, args=(loader, words))
        child.start()
        child.join(PATIENCE_SECONDS)
        waited = child.is_alive()
        child.kill()
        assert not waited
        for _ in range(2):
            assert words.get().startswith("the loader was made in another process")
        assert len(list(loader)) == 3


def test_one_that_is_forgotten_says_so():
    loader = mb.Loader(PAIR, batch=16, cluster=worker())
    with pytest.warns(ResourceWarning, match="a loader was not closed"):
        del loader
        gc.collect()
