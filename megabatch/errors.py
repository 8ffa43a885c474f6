"""What goes wrong, in words: the user's mistakes, runs that cannot go on, and exit statuses."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

DONE, FAILED, MISTAKE, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130
"""exit statuses; STOPPED: on request, with a good checkpoint; INTERRUPTED: at once, as shells say
it of Ctrl-C"""


class UserError(ValueError):
    """A mistake of the user's, in one sentence that names the thing and the way out (exit status
    2)."""


class RunFailed(RuntimeError):
    """A run that cannot go on, and why, in its own words (exit status 1, no traceback)."""


class WorkerFailed(RuntimeError):
    """A local worker failed; the message names it and holds its own words."""


def no_variance() -> UserError:
    """Of a batch norm, by kernels or not."""
    return UserError(
        "a batch norm sees one value a channel, which has no variance, where a span of one image "
        "meets features of 1 x 1: raise --span, or --data.size"
    )


def printable(words: str) -> str:
    """Words from a file or a name, with what moves a cursor or is no Unicode written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def between_words(line: str, wide: int) -> str:
    """A line as a terminal of this width should show it: broken between words, never inside one."""
    return "\n".join(
        textwrap.wrap(
            line,
            wide,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The way out for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
