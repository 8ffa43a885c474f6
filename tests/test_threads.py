"""A micro-batch that threads write in pieces."""

import threading

import pytest
import torch

from megabatch.config import Config, Data
from megabatch.data.slots import Layout
from megabatch.data.source import InMemory
from megabatch.data.threads import ThreadReader

COUNT = 100  # four pieces
LAYOUT = Layout("bytes", COUNT, 2, 1)


class Written(InMemory):
    """Images whose pieces are written as a function of the test's says."""

    instant = False

    def __init__(self, write):
        super().__init__(torch.zeros(512, 1, 2, 2, dtype=torch.uint8), torch.zeros(512).long(), 2)
        self._write = write

    def writer(self, config, layout, training):
        return self._write


def reader(write, threads=2):
    config = Config(batch=4, micro=4, span=4, data=Data(size=2, classes=2))
    return ThreadReader(Written(write), config, LAYOUT, True, threads, pinned=False)


def test_a_micro_batch_is_there_when_all_its_pieces_are():
    begin = threading.Event()

    def write(first, buffer):
        begin.wait()
        buffer.images.fill_(first % 251)
        buffer.labels.copy_(torch.arange(first, first + len(buffer.labels)))

    with reader(write) as reading:
        coming = reading.submit(1000, COUNT)
        assert not coming.done()
        begin.set()
        buffer = coming.result()
        assert coming.done()
        assert buffer.labels.tolist() == list(range(1000, 1000 + COUNT))
        assert buffer.images[:, 0, 0, 0].unique().tolist() == sorted(
            (1000 + at) % 251 for at in (0, 32, 64, 96)
        )


def test_of_several_failures_the_first_pieces_is_told():
    last_has_failed = threading.Event()

    def write(first, buffer):
        if first == 96:
            last_has_failed.set()
            raise ValueError("the last piece")
        if first == 32:
            last_has_failed.wait()
            raise ValueError("the second piece")

    with reader(write, threads=4) as reading, pytest.raises(ValueError, match="the second piece"):
        reading.submit(0, COUNT).result()


@pytest.mark.parametrize("begun", [1, 4])
def test_what_is_not_wanted_any_more_is_not_begun(begun, caplog):
    here, go_on, wrote = threading.Semaphore(0), threading.Event(), []

    def write(first, buffer):
        here.release()
        go_on.wait()
        wrote.append(first)

    with reader(write, threads=begun) as reading:
        coming = reading.submit(0, COUNT)
        for _ in range(begun):
            here.acquire()
        coming.cancel()
        go_on.set()
    assert len(wrote) == begun
    assert not caplog.records  # threads that end find nothing to complain of
