"""JPEGs decoded on the GPU: nvJPEG through torchvision.io, then crop and resize as matrix
products."""

from __future__ import annotations

import time
from typing import Any

import numpy
import torch
from torch import Tensor

from megabatch.data.crop import choose_boxes, crop_draws, crop_on_device
from megabatch.data.decoded import Decoded
from megabatch.data.jpeg import head_of, is_jpeg
from megabatch.errors import UserError

_TRIAL = 256
_MUCH = 2


class OnGpu:
    """The images of a source, decoded on a device. What nvJPEG cannot read the source reads
    itself."""

    instant = False
    on_gpu = True

    def __init__(self, source: Decoded, device: torch.device) -> None:
        self._source, self._device, self._decode = source, device, nvjpeg()
        self.data, self.classes = source.data, source.classes
        self.mean, self.std = source.mean, source.std

    def __len__(self) -> int:
        return len(self._source)

    def prove(self) -> None:
        """Decode one image, or say in words that it cannot be done."""
        stored = self._source.records.record(int(self._source.chosen[0]))
        if isinstance(stored, numpy.ndarray) or not is_jpeg(stored):
            return
        file = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
        try:
            self._decode([file], self.data.channels, self._device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"data.decode is gpu, but nvJPEG does not decode here ({reason}): "
                f"use --data.decode cpu"
            ) from error

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        records = self._source.records
        numbers = self._source.chosen[indices].tolist()
        records.will_need(numbers)
        stored = [records.record(number) for number in numbers]
        if not all(isinstance(image, bytes | memoryview) and is_jpeg(image) for image in stored):
            return self._source.read(indices, draws)
        sizes = numpy.array([head_of(image)[:2] for image in stored])  # type: ignore[arg-type]
        boxes = torch.from_numpy(choose_boxes(self.data, sizes[:, 0], sizes[:, 1], draws))
        files = [torch.frombuffer(bytearray(image), dtype=torch.uint8) for image in stored]
        # On a stream of this thread's own, finished before anyone else sees the images.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            try:
                decoded = self._decode(files, self.data.channels, self._device)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # a JPEG of a kind that nvJPEG does not know
                return self._source.read(indices, draws)
            height, width = sizes.max(0).tolist()
            shape = (len(decoded), height, width, self.data.channels)
            room = torch.zeros(shape, dtype=torch.uint8, device=self._device)
            for place, image in enumerate(decoded):
                room[place, : image.shape[1], : image.shape[2]] = image.permute(1, 2, 0)
            images = crop_on_device(room, boxes.to(self._device), self.data.size)
            torch.cuda.current_stream(self._device).synchronize()
        return images, self._source.labels[indices]


def nvjpeg() -> Any:
    """torchvision's decoder, as a function of files, channels and device."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, RuntimeError):
        raise UserError(
            "data.decode is gpu, but torchvision, through which nvJPEG is called, cannot be "
            "imported: install it, or use --data.decode cpu"
        ) from None

    def decode(files: list[Tensor], channels: int, device: torch.device) -> list[Tensor]:
        mode = ImageReadMode.RGB if channels == 3 else ImageReadMode.GRAY
        found: list[Tensor] = decode_jpeg(files, mode=mode, device=device)
        return found

    return decode


def faster(source: Decoded, device: torch.device, threads: int) -> bool:
    """Whether the GPU decoded a few hundred images so much faster than this worker's cores would
    that it pays, although it does not train meanwhile."""
    try:
        there = OnGpu(source, device)
    except UserError:
        return False
    indices = torch.arange(min(_TRIAL, len(source)))
    draws = crop_draws(0, indices)
    there.read(indices[:8], draws[:8])  # what is done only once
    began = time.perf_counter()
    there.read(indices, draws)
    on_gpu = time.perf_counter() - began
    few = indices[: max(1, len(indices) // 8)]
    began = time.perf_counter()
    source.read(few, draws[: len(few)])
    on_one_thread = (time.perf_counter() - began) * len(indices) / len(few)
    return _MUCH * on_gpu < on_one_thread / threads
