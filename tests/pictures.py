"""Pictures for the tests of packs and loaders: small, different from each other, made by
arithmetic."""

import io

import numpy
from PIL import Image

from megabatch.data.jpeg import Encoding
from megabatch.data.origins import open_origin
from megabatch.data.packs.making import pack


def pixels(seed, height, width):
    """A smooth coloured picture: JPEG keeps it well, and no two seeds are alike."""
    y, x = numpy.mgrid[0:height, 0:width]
    planes = [
        numpy.sin(x * (0.05 + 0.01 * (seed % 7)) + c + seed) + numpy.cos(y * 0.07 * (c + 1) + seed)
        for c in range(3)
    ]
    return ((numpy.stack(planes, 2) + 2) * 63).astype(numpy.uint8)


def encoded(seed=0, height=48, width=64, kind="JPEG", mode="RGB", **options):
    image = Image.fromarray(pixels(seed, height, width)).convert(mode)
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 90} if kind == "JPEG" else {}), **options)
    return out.getvalue()


def packed(where, each, val, size, raw):
    """The same images as a folder (set), a JPEG pack (jpeg.arrow) and pixels of a square
    (raw.arrow)."""
    origin = open_origin(folder(where / "set", each=each, val=val, size=size))
    pack(origin, "set", where / "jpeg.arrow", Encoding())
    pack(origin, "set", where / "raw.arrow", Encoding("raw", raw))
    return where


def folder(root, classes=("ant", "bee", "cat"), each=5, val=2, size=(48, 64)):
    """train/CLASS/* and val/CLASS/* (val 0: CLASS/* alone)."""
    seed = 0
    for part, count in (("train", each), ("val", val)) if val else (("", each),):
        for name in classes:
            where = root / part / name
            where.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                (where / f"{number}.JPEG").write_bytes(encoded(seed, *size))
                seed += 1
    return root
