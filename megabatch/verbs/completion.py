"""megabatch completion SHELL: verbs, recipes and flags completed in bash, zsh or fish."""

from __future__ import annotations

import dataclasses
import shlex
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

from megabatch import recipes
from megabatch.errors import DONE, UserError, nearest
from megabatch.verbs.examples import EXAMPLES, show_examples
from megabatch.verbs.parsing import flags_of

_WITH_RECIPE = ("train", "plan", "study", "chaos")


class Verb(NamedTuple):
    name: str
    flags: list[str]
    firsts: list[str]
    """what its first word may be, where that is known"""


def run(arguments: list[str]) -> int:
    shell = arguments[0] if arguments else "--help"
    if shell in ("-h", "--help"):
        show_examples("completion")
        print("usage: megabatch completion bash|zsh|fish\n")
        print("Writes the shell's script to standard output. To have it in every shell, add")
        print('  bash  eval "$(megabatch completion bash)"  to ~/.bashrc')
        print('  zsh   eval "$(megabatch completion zsh)"   to ~/.zshrc, after compinit')
        return DONE
    if shell not in _SHELLS:
        raise UserError(f"there is no completion for {shell!r}: {nearest(shell, _SHELLS)}")
    if len(arguments) > 1:
        raise UserError(f"completion writes one script: leave {arguments[1]} away")
    print(_SHELLS[shell]([_verb(name) for name in EXAMPLES if name]), end="")
    return DONE


def _verb(name: str) -> Verb:
    """What can follow a verb: the flags of its own dataclass, and of its subjects their names."""
    module = import_module(f"megabatch.verbs.{name}")
    inner = getattr(module, "STARTED", ())  # verbs whose line it takes too
    flags = {flag for verb in (name, *inner) for flag in _flags(verb)}
    firsts = list(recipes.RECIPES) if name in _WITH_RECIPE else _subjects(module)
    return Verb(name, sorted(flags | {"--help", "--help-all"}), firsts)


def _flags(name: str) -> Iterator[str]:
    module = import_module(f"megabatch.verbs.{name}")
    for word, kind in vars(module).items():
        ours = getattr(kind, "__module__", None) == module.__name__
        if word.endswith("Flags") and ours and dataclasses.is_dataclass(kind):
            yield from flags_of(kind)


def _subjects(module: types.ModuleType) -> list[str]:
    for word in ("BENCHES", "_SHELLS"):
        if hasattr(module, word):
            return list(getattr(module, word))
    return []


def _bash(verbs: list[Verb]) -> str:
    cases = "\n".join(
        f"        {verb.name}) flags={_quoted(verb.flags)}; firsts={_quoted(verb.firsts)} ;;"
        for verb in verbs
    )
    return f"""# eval "$(megabatch completion bash)" in ~/.bashrc
_megabatch() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} flags= firsts=
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W {_quoted([verb.name for verb in verbs])} -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    elif [[ $COMP_CWORD -eq 2 ]]; then
        COMPREPLY=($(compgen -W "$firsts" -- "$word"))
    fi
}}
complete -o default -F _megabatch megabatch
"""


def _zsh(verbs: list[Verb]) -> str:
    cases = "\n".join(
        f"        {verb.name}) flags=({' '.join(verb.flags)}); firsts=({' '.join(verb.firsts)}) ;;"
        for verb in verbs
    )
    return f"""#compdef megabatch
# eval "$(megabatch completion zsh)" in ~/.zshrc, after compinit
_megabatch() {{
    local -a flags firsts
    if (( CURRENT == 2 )); then
        compadd -- {" ".join(verb.name for verb in verbs)}
        return
    fi
    case $words[2] in
{cases}
    esac
    if [[ $words[CURRENT] == -* ]]; then
        compadd -- $flags
    else
        (( CURRENT == 3 )) && compadd -- $firsts
        _files
    fi
}}
(( $+functions[compdef] )) && compdef _megabatch megabatch
"""


def _fish(verbs: list[Verb]) -> str:
    lines = ["# megabatch completion fish > ~/.config/fish/completions/megabatch.fish"]
    names = " ".join(verb.name for verb in verbs)
    lines.append(f"complete -c megabatch -f -n __fish_use_subcommand -a '{names}'")
    for verb in verbs:
        after = f"complete -c megabatch -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.firsts:
            lines.append(f"{after} -a '{' '.join(verb.firsts)}'")
        lines += [f"{after} -l {flag.removeprefix('--')}" for flag in verb.flags]
    return "\n".join(lines) + "\n"


def _quoted(words: list[str]) -> str:
    return shlex.quote(" ".join(words))


_SHELLS: dict[str, Callable[[list[Verb]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
