"""megabatch doctor: what works on this machine, what does not, what that costs and the way out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megabatch.doctor import conclusion, examine
from megabatch.doctor.finding import Finding
from megabatch.errors import DONE, FAILED
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import say

STYLES = {"works": "green", "limited": "yellow", "missing": "dim", "stops": "bold red"}


@dataclass(frozen=True)
class DoctorFlags:
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(DoctorFlags, "doctor", arguments)
    say("looking at this machine: some seconds", progress=True)
    findings = examine()
    works, sentence = conclusion(findings)
    Console().print(_table(findings))
    print(f"megabatch: {sentence}", flush=True)
    if flags.json:
        result = {"works": works, "verdict": sentence, "findings": [asdict(f) for f in findings]}
        print(json.dumps(result), flush=True)
    return DONE if works else FAILED


def _table(findings: list[Finding]) -> Table:
    table = Table(title="megabatch doctor", title_justify="left", box=None, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for finding in findings:
        # Text, not markup: what a part said may hold brackets.
        words = Text(finding.found)
        if finding.costs:
            words.append(f"\ncosts: {finding.costs}", style="dim")
        if finding.remedy:
            words.append(f"\nget it: {finding.remedy}", style="dim")
        table.add_row(finding.part, Text(finding.state, STYLES[finding.state]), words)
    return table
