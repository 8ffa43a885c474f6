"""The command: megabatch VERB ... Only the verb that was asked for is imported and parsed."""

from __future__ import annotations

import errno
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from megabatch.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    MISTAKE,
    RunFailed,
    UserError,
    WorkerFailed,
    between_words,
    nearest,
    printable,
)
from megabatch.host.stopping import keep_stop_requests
from megabatch.host.streams import lead_nowhere, prepare
from megabatch.verbs.examples import show_examples
from megabatch.version import __version__
from megabatch.workers.place import under_launcher

# Each verb is a module of megabatch.verbs with a function run(arguments) -> exit status.
VERBS = {
    "train": "train a recipe, on local workers or under torchrun, srun or mpirun",
    "study": "accuracy against batch size, over seeds and arms: a table, a page",
    "evaluate": "evaluate the newest checkpoint of a run",
    "pack": "pack a data set into one file that the loader never waits for",
    "plan": "how long a run takes on a machine, before it is started",
    "bench": "measure this machine: the parts against their alternatives",
    "launch": "write the script that starts a run on a cluster, by Slurm or ssh",
    "report": "runs as one page: curves, where the time went, what differs",
    "runs": "what is in runs/, as a table",
    "watch": "follow a run that was started elsewhere",
    "export": "take the model with you: safetensors, torchvision, ONNX",
    "predict": "what a run's model sees in an image",
    "chaos": "kill, stop and starve a real job: it must end as if undisturbed",
    "completion": "a script that completes verbs, recipes and flags in your shell",
    "doctor": "what works on this machine, what does not, and how to get it",
}

_ASKING = ("--help", "--version")

# What Ctrl-C leaves of a verb's work.
_KEPT = {
    "train": ": --resume goes on from the last checkpoint, where there is one",
    "study": ": finished runs are kept, and the same command goes on with the others",
    "pack": ": finished parts are kept, and the same command goes on from there",
}

_STOPPED = ("train", "study")
"""verbs whose runs stop on request, with a checkpoint"""

# A write to standard output that fails; files have their own words.
_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    if argv is None:  # else in somebody's process, whose streams are not ours
        prepare()
    arguments = sys.argv[1:] if argv is None else argv
    verb = arguments[0] if arguments else "--help"
    try:
        try:
            return _run(verb, arguments[1:])
        finally:
            sys.stdout.flush()  # here, where its failure has words
    except UserError as error:
        _say(error)
        return MISTAKE
    except (RunFailed, WorkerFailed) as error:
        _say(error)
        return FAILED
    except BrokenPipeError:  # whoever reads had enough, as head has
        lead_nowhere(sys.stdout.fileno())
        return DONE
    except OSError as error:
        if error.errno not in _LOST or error.filename is not None:
            raise
        _say(f"what it has to say cannot be written ({error.strerror}): send it elsewhere")
        lead_nowhere(sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        _say(f"ended at once, as asked{_KEPT.get(verb, '')}")
        return INTERRUPTED


def _run(verb: str, arguments: list[str]) -> int:
    if verb in ("-h", "--help"):
        return _help()
    if verb in ("-V", "--version"):
        return _version()
    if verb not in VERBS:
        raise UserError(f"there is no verb {verb!r}: {_meant(verb)}")
    with _keeping_stop_requests(verb):
        status: int = import_module(f"megabatch.verbs.{verb}").run(arguments)
    return status


def _meant(verb: str) -> str:
    """The way out of a verb that there is not."""
    if verb in import_module("megabatch.recipes").RECIPES:
        return f"{verb} is a recipe, megabatch train {verb} trains it"
    if f"--{verb}" in _ASKING:
        return f"did you mean --{verb}?"
    return nearest(verb.lower(), (*VERBS, *_ASKING) if verb.startswith("-") else VERBS)


def _keeping_stop_requests(verb: str) -> AbstractContextManager[None]:
    """From the first moment on, while the verb is loaded and workers are started; under a launcher
    a worker that waits for others had better end at once."""
    stops = verb in _STOPPED and not under_launcher()
    return keep_stop_requests() if stops else nullcontext()


def _say(words: object) -> None:
    """One line, whatever a name in it holds; at a terminal broken between words."""
    line = f"megabatch: {printable(' '.join(str(words).splitlines()))}"
    if sys.stderr.isatty():
        line = between_words(line, shutil.get_terminal_size().columns)
    print(line, file=sys.stderr)


def _help() -> int:
    show_examples("")
    print("usage: megabatch VERB ...\n")
    for verb, says in VERBS.items():
        print(f"  {verb:10} {says}")
    print("\nmegabatch VERB --help says more.")
    return DONE


def _version() -> int:
    print(f"megabatch {__version__}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
