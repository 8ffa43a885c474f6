"""megabatch report RUN [RUN ...]: runs as one page that needs nothing else."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megabatch.errors import DONE, UserError
from megabatch.study.trials import is_study
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import check_out, say, write_out


@dataclass(frozen=True)
class ReportFlags:
    """Runs as one HTML file that works offline: results, curves, where the time went, trust ratios,
    derived numbers, what differs between the runs, and what they ran on.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """folders of runs, finished or not, or the folder of one study"""
    out: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = "report.html"
    """the page to write; one that is there is replaced"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(ReportFlags, "report", arguments)
    if not flags.runs:
        raise UserError("report needs a run: megabatch report RUN [RUN ...] --out report.html")
    out = Path(flags.out)
    check_out(out, (".html", ".htm"), "a report")
    if len(flags.runs) == 1 and is_study(Path(flags.runs[0])):
        return _study(Path(flags.runs[0]), out, flags.json)
    from megabatch.report.run import report
    from megabatch.runs.begun import check_run
    from megabatch.runs.record import read

    folders = {os.path.realpath(folder): folder for folder in reversed(flags.runs)}
    for folder in flags.runs:
        check_run(Path(folder))
    records = [read(folder) for folder in reversed(folders.values())]
    # Names of files may hold what is no Unicode.
    written = report(records).encode(errors="replace")
    write_out(out, written)
    bad = sum(record.bad_lines for record in records)
    for record in records:
        if record.config_fault is not None:
            say(f"megabatch: {record.path}: {record.config_fault}", progress=True)
    if bad:
        lines = f"{bad:,} line{'s' * (bad != 1)}"
        say(f"megabatch: {lines} of metrics could not be read", progress=True)
    say(f"{out}: {len(records)} run{'s' * (len(records) > 1)}, {len(written) / 1e3:,.0f} kB")
    if flags.json:
        result = {
            "out": str(out),
            "nbytes": len(written),
            "runs": [str(record.path) for record in records],
            "bad_lines": bad,
            "faults": {str(r.path): r.faults for r in records if r.faults},
        }
        print(json.dumps(result), flush=True)
    return DONE


def _study(folder: Path, out: Path, as_json: bool) -> int:
    from megabatch.report.study import study_page
    from megabatch.study.results import read

    study = read(folder)
    written = study_page(study).encode(errors="replace")
    write_out(out, written)
    runs = sum(len(cell.runs) for cell in study.cells)
    say(f"{out}: a study of {runs} run{'s' * (runs != 1)}, {len(written) / 1e3:,.0f} kB")
    if as_json:
        rows = list(study.rows())
        print(json.dumps({"out": str(out), "nbytes": len(written), "rows": rows}), flush=True)
    return DONE
