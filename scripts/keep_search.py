"""Runs of a study on held-out images, added to the search that is kept in results/study.

    python scripts/keep_search.py STUDY 'megabatch study ...' [--beside]

Each run's settings in short, its accuracy by epoch and on the last thirtieth of its training
images, its largest loss, the length of its last layer at first and at last (where that does not
adapt: how many times the length of another grew most, from the first evaluation on), and its time;
--beside: runs shared the GPU, so times tell nothing.
"""

import argparse
import json
import statistics
from pathlib import Path

KEPT = Path(__file__).parent.parent / "results" / "study" / "search.json"


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("study", type=Path)
    flags.add_argument("command")
    flags.add_argument("--beside", action="store_true")
    flags.add_argument("--kept", type=Path, default=KEPT)
    arguments = flags.parse_args()
    search = json.loads(arguments.kept.read_text())
    if arguments.command not in search["commands"]:
        search["commands"].append(arguments.command)
    known = {row["run"] for row in search["rows"]}
    for run in sorted(path.parent for path in arguments.study.glob("*/trial.json")):
        row = row_of(run, arguments.beside)
        if row["run"] not in known:
            search["rows"].append(row)
            print({k: v for k, v in row.items() if k != "top1_by_epoch"})
    arguments.kept.write_text(json.dumps(search, indent=2) + "\n")


def row_of(run, beside):
    config = json.loads((run / "config.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    summary = run / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else None
    optimizer = config["optimizer"]
    last = steps[-max(1, len(steps) // 30) :]
    row = {
        "run": f"{run.parent.name}/{run.name}",
        "epochs": config["epochs"],
        "batch": config["batch"],
        "rate": config["lr"]["reference"],
        "optimizer": optimizer["name"] if optimizer["trust"] is not None else "sgd",
        "power": config["lr"]["power"],
        "warmup": config["lr"]["warmup"],
        "weight_decay": optimizer["weight_decay"],
        "unadapted_rate": optimizer["unadapted_rate"],
        "judged_by": "held-out training images"
        if config["data"]["tuning_share"]
        else "validation images",
        "top1": found["top1"] if found else evaluations[-1]["top1"],
        "best_top1": max(line["top1"] for line in evaluations),
        "steps": len(steps),
        "seconds": found and found["seconds"],
        "images_per_second": found and found["images_per_second"],
        "top1_by_epoch": " ".join(f"{line['top1']:.4f}" for line in evaluations),
        "last_train_top1": round(statistics.mean(step["top1"] for step in last), 4),
        "finished": bool(found) and found["ended"] == "finished",
    }
    if not config["zero_gamma"]:
        row["zero_gamma"] = False
    if optimizer["momentum"] != 0.9:
        row["momentum"] = optimizer["momentum"]
    if optimizer["nesterov"]:
        row["nesterov"] = True
    if config["stages"]:
        row["stages"] = config["stages"]
    row["largest_loss"] = max(step["loss"] for step in steps)
    lengths = {}
    for line in lines:
        if line["kind"] == "layer":
            lengths.setdefault(line["name"], []).append(line["weight_norm"])
    if optimizer["name"] == "muon" or not optimizer.get("adapt_head", True):
        row["adapt_head"] = False
        grown = max((seen[-1] / seen[0] for seen in lengths.values()), default=1.0)
        if grown > 2:
            row["most_grown"] = grown
    elif lengths:
        last = list(lengths.values())[-1]
        row["last_layer"] = {"at_first": last[0], "at_last": last[-1]}
    return {**row, "beside_another": True} if beside else row


if __name__ == "__main__":
    main()
