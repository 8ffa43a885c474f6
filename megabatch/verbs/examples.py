"""An example or two of each verb, which its help begins with."""

from __future__ import annotations

EXAMPLES = {
    "": ("megabatch train digits", "megabatch plan mikami2018 --gpus 2048"),
    "train": (
        "megabatch train digits --epochs 5 --workers 2",
        "megabatch train digits --data.path PICTURES --data.size 32 --data.channels 3",
        "megabatch train digits --out runs/mine --resume",
    ),
    "study": (
        "megabatch study digits --batches 32,128,512 --seeds 3",
        "megabatch study digits --batches 32,512 --arms no_warmup sgd",
    ),
    "evaluate": ("megabatch evaluate runs/mine --workers 2",),
    "pack": (
        "megabatch pack PICTURES pictures.arrow --size 256",
        "megabatch pack --verify pictures.arrow",
    ),
    "plan": ("megabatch plan mikami2018 --gpus 512,2048", "megabatch plan published"),
    "bench": (
        "megabatch bench step --model resnet50 --micro 32 64",
        "megabatch bench sync --workers 4",
        "megabatch bench loader --images PICTURES",
    ),
    "launch": (
        "megabatch launch --slurm --nodes 4 train mikami2018 --data.path images.arrow",
        "megabatch launch --hosts node1,node2 train mikami2018 --data.path images.arrow",
    ),
    "report": ("megabatch report runs/mine runs/other",),
    "runs": ("megabatch runs",),
    "watch": ("megabatch watch runs/mine",),
    "export": ("megabatch export runs/mine --to onnx",),
    "predict": ("megabatch predict runs/mine cat.jpg dog.png",),
    "chaos": ("megabatch chaos digits --seed 7 --rounds 3 --epochs 3",),
    "completion": (
        "megabatch completion bash > ~/.megabatch-completion",
        "megabatch completion fish > ~/.config/fish/completions/megabatch.fish",
    ),
    "doctor": ("megabatch doctor", "megabatch doctor --json"),
}


def show_examples(verb: str) -> None:
    shown = EXAMPLES[verb]
    print("example:" if len(shown) == 1 else "examples:")
    print("".join(f"  {line}\n" for line in shown))
