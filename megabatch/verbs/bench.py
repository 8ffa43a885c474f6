"""megabatch bench WHAT: each is a module of megabatch.bench with a function run(arguments)."""

from __future__ import annotations

from importlib import import_module

from megabatch.errors import DONE, UserError, nearest
from megabatch.verbs.examples import show_examples

BENCHES: dict[str, str] = {
    "sync": "every plan by size, against the backend and a bare TCP ring",
    "loader": "this loader against DataLoader and decoding alone, on your images",
    "ratios": "norms of weights and gradients by layer at the first step",
    "step": "images/s of this device by model and micro-batch, for machine.json",
    "optim": "one update of all weights, beside torch's SGD and timm's LARS",
}


def run(arguments: list[str]) -> int:
    what = arguments[0] if arguments else "--help"
    if what in ("-h", "--help"):
        show_examples("bench")
        print("usage: megabatch bench WHAT [OPTIONS]\n")
        for name, says in BENCHES.items():
            print(f"  {name:10} {says}")
        return DONE
    if what not in BENCHES:
        raise UserError(f"there is no bench {what!r}: {nearest(what, BENCHES)}")
    status: int = import_module(f"megabatch.bench.{what}").run(arguments[1:])
    return status
