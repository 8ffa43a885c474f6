"""Claim: the weak-scaling curve of results/papers, measured, with the planner's line beside it.

    python benchmarks/papers_pictures.py

Writes results/papers/scaling.svg from scaling.json; needs nothing else, and measures nothing.
"""

import argparse
import json
import math
from pathlib import Path

from megabatch.report.against import batch_axis
from megabatch.report.axes import axis_of
from megabatch.report.numbers import short
from megabatch.report.picture import DottedLine, picture

FOLDER = Path(__file__).parent.parent / "results" / "papers"


def scaling(found):
    """Goyal's weak scaling: images/s of 1, 2, 4 and 8 hosts, and what the planner makes of them."""
    workers = [int(count) for count in found["alone"]]
    measured, predicted, unlimited = [], [], []
    for count, row in zip(workers, found["rows"], strict=True):
        at = math.log2(count)
        measured.append((at, row["images_per_second"]))
        unlimited.append((at, count * found["alone"][str(count)]))
        if "predicted" in row:
            predicted.append((at, row["predicted"]))
    lines = [
        DottedLine("links of 400 Mbit/s", measured),
        DottedLine("the planner for them", predicted, dashed=True),
        DottedLine("links without a limit", unlimited),
    ]
    return picture(
        "Weak scaling between emulated hosts: images/s, two images a worker in a step",
        lines,
        batch_axis(workers),
        axis_of([value for line in lines for value in line.reach], zero=True, keep_all=True),
        ticks=[(math.log2(count), str(count)) for count in workers],
        across="workers, one a host",
        say=short,
    )


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--out", type=Path, default=FOLDER / "scaling.svg")
    out = flags.parse_args().out
    out.write_text(scaling(json.loads((FOLDER / "scaling.json").read_text())))
    print(out)


if __name__ == "__main__":
    main()
