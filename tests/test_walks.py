"""docs/walks.md is what a traced step does, and the walks stay short."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_walks_are_those_of_a_real_step():
    # A process of its own: tracing must see the threads begin.
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "walks.py"], capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() == (ROOT / "docs" / "walks.md").read_text().strip()


def test_no_walk_is_long_or_turns_back():
    (image, image_again), (gradient, gradient_again), (updated, _) = (
        [int(word) for word in line.split() if word.isdigit()]
        for line in (ROOT / "docs" / "walks.md").read_text().splitlines()
        if " files, " in line
    )
    assert image <= 10
    assert gradient <= 8
    assert updated <= 6
    assert image_again == gradient_again == 0
