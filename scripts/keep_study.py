"""A study as it is kept in results/: settings, numbers and pages of its runs, without weights.

    python scripts/keep_study.py STUDY results/study/NAME

Of metrics.jsonl every evaluation stays and at most 200 steps, evenly, of which the last is one;
paths of the machine that ran it are shortened to names. The page is made anew from what is kept.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

STEPS = 200
FILES = ("config.json", "environment.json", "summary.json", "trial.json")


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("study", type=Path)
    flags.add_argument("kept", type=Path)
    arguments = flags.parse_args()
    study, kept = arguments.study, arguments.kept
    kept.mkdir(parents=True, exist_ok=True)
    write(kept / "study.json", cleaned(json.loads((study / "study.json").read_text())))
    for run in sorted(path.parent for path in study.glob("*/trial.json")):  # those that failed too
        (kept / run.name).mkdir(exist_ok=True)
        for name in FILES:
            if (run / name).exists():
                write(kept / run.name / name, cleaned(json.loads((run / name).read_text())))
        if (run / "metrics.jsonl").exists():
            (kept / run.name / "metrics.jsonl").write_text("".join(thinned(run / "metrics.jsonl")))
    for picture in study.glob("*.svg"):
        (kept / picture.name).write_text(picture.read_text())
    page = [sys.executable, "-m", "megabatch.cli", "report", kept, "--out", kept / "report.html"]
    subprocess.run(page, check=True)


def thinned(metrics):
    lines = metrics.read_text().splitlines(keepends=True)
    steps = [i for i, line in enumerate(lines) if '"kind": "train"' in line]
    every = max(1, -(-len(steps) // STEPS))
    stay = set(steps[::-every])
    for i, line in enumerate(lines):
        if i in stay or '"kind": "evaluation"' in line:
            yield line


def cleaned(value):
    """Without folders, and without what tells one process of a machine from another."""
    if isinstance(value, dict):
        return {key: cleaned(inner) for key, inner in value.items() if key != "process"}
    if isinstance(value, list):
        return [cleaned(inner) for inner in value]
    if isinstance(value, str) and value.startswith("/"):
        return "megabatch" if value.endswith("/cli.py") else Path(value).name
    return value


def write(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
