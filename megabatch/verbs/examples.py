"""An example or two of each verb, which its help begins with."""

from __future__ import annotations

EXAMPLES = {
    "": ("megabatch train digits", "megabatch plan mikami2018 --gpus 2048"),
    "train": (
        "megabatch train digits --epochs 5 --workers 2",
        "megabatch train digits --data.path PICTURES --data.size 32 --data.channels 3",
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
    "plan": ("megabatch plan mikami2018 --gpus 512,2048",),
    "bench": (
        "megabatch bench step --model resnet50 --micro 32 64",
        "megabatch bench sync --workers 4",
        "megabatch bench loader --images PICTURES",
        "megabatch bench optim --model resnet50",
        "megabatch bench ratios --models alexnet_bn --path images.arrow",
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


def show_examples(words: str) -> None:
    print("\n".join(examples(words)) + "\n")


def examples(words: str) -> list[str]:
    """Those of `megabatch WORDS` itself, or else all of its verb, with a title."""
    of_verb = EXAMPLES[words.partition(" ")[0]]
    shown = [line for line in of_verb if f"{line} ".startswith(f"megabatch {words} ")] or of_verb
    return ["examples:" if len(shown) > 1 else "example:", *(f"  {line}" for line in shown)]
