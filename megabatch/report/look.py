"""One look for every page: a file that stands alone, light or dark as the reader's system is, and
readable on a phone.

Nothing in a page asks the network for anything, and a policy in its head forbids it; only the
scripts that were put in by `page` may run, whatever words a run's files hold.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

RUN_COLOURS = 8
"""--c0 to --c7 are colours that tell runs apart, in light and in dark"""


class Section(NamedTuple):
    title: str
    body: str
    """HTML"""
    note: str = ""
    """words under the title"""


def text(words: object) -> str:
    """Words of anyone's as HTML."""
    return html.escape(str(words), quote=True)


def page(
    title: str, sections: Sequence[Section], lead: str = "", scripts: Sequence[str] = ()
) -> str:
    """A whole page; `lead` is HTML that stands under the title."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        f"base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<a href="#s{at}">{text(s.title)}</a>' for at, s in enumerate(sections))
    body = "".join(
        f'<section id="s{at}"><h2>{text(section.title)}</h2>'
        + (f'<p class="note">{text(section.note)}</p>' if section.note else "")
        + f"{section.body}</section>"
        for at, section in enumerate(sections)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title><style>{CSS}</style></head>\n'
        f"<body><header><h1>{text(title)}</h1>{lead}<nav>{links}</nav></header>"
        f"<main>{body}</main>"
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table of HTML cells; the first `words` columns are words, the rest numbers."""
    head = "".join(_cell("th", cell, at < words) for at, cell in enumerate(heads))
    head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, at < words) for at, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def dot(run: int) -> str:
    """A run's colour, in front of its name."""
    return f'<i class="dot" style="--c:{colour(run)}"></i>'


def called(run: int, name: str) -> str:
    """A run's colour and name in a table, which a long name may not push apart."""
    return f'{dot(run)}<span class="called">{text(name)}</span>'


def colour(run: int) -> str:
    return f"var(--c{run % RUN_COLOURS})"


def _cell(tag: str, cell: str, word: bool) -> str:
    return f"<{tag}>{cell}</{tag}>" if word else f'<{tag} class="n">{cell}</{tag}>'


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


CSS = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#16191d;--soft:#5d6672;--line:#e2e5ea;--grid:#eceef2;
--accent:#2457d6;--good:#147a4b;--warn:#9a5b00;--bad:#b42318;
--c0:#2563eb;--c1:#e0580b;--c2:#0a8f63;--c3:#b8257a;--c4:#7044e0;--c5:#08788c;--c6:#8a6400;--c7:#59606b;
--compute:#6c8ed8;--input:#e0912f;--wire:#c9548b;--blank:#eceef2}
@media (prefers-color-scheme:dark){:root{--bg:#0f1216;--card:#181c22;--ink:#e8eaee;--soft:#9aa4b2;
--line:#2a303a;--grid:#242a33;--accent:#8ab0ff;--good:#5fd39b;--warn:#f0b35a;--bad:#ff8f85;
--c0:#6ea0ff;--c1:#ff9752;--c2:#46cf9b;--c3:#f47cc0;--c4:#b197fc;--c5:#4cc9dd;--c6:#dcb550;--c7:#aab2bf;
--compute:#5b7fd0;--input:#d98f37;--wire:#cf5f97;--blank:#242a33}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-padding-top:4.8rem;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
header,main{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:28px}
h1{font-size:26px;line-height:1.2;letter-spacing:-.015em;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;letter-spacing:-.01em;margin:0 0 4px}
h3{font-size:14px;margin:20px 0 8px;display:flex;align-items:center;gap:8px;overflow-wrap:anywhere}
p{margin:0 0 10px;overflow-wrap:anywhere}.note,.soft{color:var(--soft)}.note{max-width:72ch}
nav{position:sticky;top:0;z-index:5;display:flex;flex-wrap:wrap;gap:2px 16px;margin-top:14px;
padding:9px 0;border-bottom:1px solid var(--line);background:var(--bg);white-space:nowrap}
header{display:contents}header>*{max-width:1180px;margin-left:auto;margin-right:auto}
header>:not(nav){padding-left:24px;padding-right:24px}header>h1{padding-top:28px}
header>nav{padding-left:max(24px,calc((100vw - 1180px)/2 + 24px));padding-right:24px;max-width:none}
nav a{color:var(--soft);text-decoration:none;font-size:13.5px}nav a:hover{color:var(--accent)}
section{padding:26px 0 6px}
.cards{display:grid;
grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:14px;margin:14px 0}
.card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:14px 16px;border-top:3px solid var(--c)}
.card b{display:block;font-size:30px;line-height:1.15;letter-spacing:-.02em;margin:6px 0 2px}
.card .few{display:flex;flex-wrap:wrap;gap:0 12px}.card .few span{white-space:nowrap}
.card .name{display:flex;
justify-content:space-between;gap:8px;font-weight:600;overflow-wrap:anywhere}
.chip{font-size:12px;font-weight:600;white-space:nowrap;color:var(--soft)}
.chip.finished,.chip.target{color:var(--good)}.chip.stopped,.chip.silent{color:var(--warn)}
.chip.failed{color:var(--bad)}.chip.running{color:var(--accent)}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px;margin-top:12px}
figure{margin:0;padding:12px 14px 10px;min-width:0}
.wide{grid-column:1/-1}
figcaption{display:flex;justify-content:space-between;gap:10px;font-weight:600;font-size:14px}
figcaption small{font-weight:400;font-size:12px;color:var(--soft);text-align:right}
.plot{position:relative;margin:10px 0 20px 46px;height:190px;touch-action:pan-y}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:hidden;display:block}
.plot rect{shape-rendering:crispEdges}
.plot .bar{stroke:var(--card);stroke-width:1;vector-effect:non-scaling-stroke}
.plot path,.plot line{fill:none;vector-effect:non-scaling-stroke}
.plot .grid{stroke:var(--grid);stroke-width:1}
.plot .axis{stroke:var(--line);stroke-width:1}
.plot .s{stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.plot .raw{stroke:var(--c);stroke-width:1;opacity:.28}
.plot .band{fill:var(--c);opacity:.14;stroke:none}
.plot .thin{stroke:var(--c);stroke-width:1.25;opacity:.55}
.plot .dots{stroke:var(--c);stroke-width:6;stroke-linecap:round}
.plot .dash{stroke-dasharray:5 4}
.plot .single{stroke:var(--c);stroke-width:4;stroke-linecap:round;opacity:.4}
.plot .whisker{stroke:var(--c);stroke-width:1.5;opacity:.75}
.plot .level{stroke:var(--soft);stroke-width:1;stroke-dasharray:5 4}
.plot span{position:absolute;font-size:11px;line-height:1;color:var(--soft);white-space:nowrap}
.plot .y{right:100%;margin-right:7px;transform:translateY(50%)}
.plot .x{top:100%;margin-top:7px;transform:translateX(-50%)}
.cross{position:absolute;
top:0;bottom:0;width:0;border-left:1px solid var(--soft);pointer-events:none}
.tip{position:fixed;z-index:9;pointer-events:none;background:var(--card);color:var(--ink);
border:1px solid var(--line);border-radius:8px;box-shadow:0 4px 18px rgb(0 0 0/.18);
padding:7px 10px;font-size:12.5px;line-height:1.45;max-width:min(320px,90vw)}
.tip div{display:flex;gap:8px;align-items:baseline}
.tip div>:last-child{margin-left:auto;padding-left:12px}
.tip div>span{overflow-wrap:anywhere}
.key{display:flex;flex-wrap:wrap;gap:6px 8px;margin:10px 0 0}
.key button,.key span{font:inherit;font-size:13px;display:inline-flex;align-items:center;gap:7px;
color:var(--ink);overflow-wrap:anywhere;text-align:left}
.key button{background:var(--card);border:1px solid var(--line);border-radius:99px;
padding:3px 11px;cursor:pointer}
.key button[aria-pressed=false]{opacity:.45;text-decoration:line-through}
.key span{color:var(--soft);margin-right:8px;overflow-wrap:anywhere}
.dot{flex:none;display:inline-block;width:10px;height:10px;border-radius:50%;background:var(--c)}
td .dot,th .dot{margin-right:7px}.box{border-radius:3px}
.ramp{display:inline-block;width:120px;height:10px;border-radius:3px}
.heat{display:grid;grid-template-columns:minmax(90px,max-content) minmax(0,1fr);
column-gap:10px;margin-top:8px}
.heat .names{font:11px/1 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;color:var(--soft);
max-width:230px;display:grid;grid-auto-rows:var(--row)}
.heat .names span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;text-align:right;
direction:rtl;line-height:var(--row)}
.heat .plot{margin:0 0 20px;height:auto}
.versus{display:grid;grid-template-columns:fit-content(40%) minmax(0,1fr) max-content;
gap:0 14px;align-items:center;font-size:13px;margin-top:8px;overflow-wrap:anywhere}
.track{position:relative;height:22px}.track i{position:absolute}
.track .zero{top:0;bottom:0;border-left:1px dashed var(--soft)}
.track .reach{top:50%;border-top:1.5px solid var(--c0);opacity:.75}
.track .at{top:50%;width:9px;height:9px;border-radius:50%;background:var(--c0);
transform:translate(-50%,-50%)}
.scroll{overflow-x:auto;margin:12px 0;border:1px solid var(--line);border-radius:10px;
background:linear-gradient(90deg,var(--card) 50%,#0000) 0 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--card) 50%,#0000) 100% 0/40px 100% no-repeat local,
linear-gradient(90deg,var(--line),#0000) 0 0/12px 100% no-repeat,
linear-gradient(270deg,var(--line),#0000) 100% 0/12px 100% no-repeat,var(--card)}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:7px 14px;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
table>tbody:first-child>tr:first-child>td{border-top:0}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:12.5px;white-space:nowrap}
td{overflow-wrap:anywhere;min-width:12em}.n{text-align:right;white-space:nowrap}
:is(th,td).n:not(:last-child){padding-left:8px;padding-right:10px}
td:first-child{min-width:9.5em}td.n,td:has(.chip){min-width:0}
@media (min-width:761px){td:first-child{white-space:nowrap}
.called{display:inline-block;width:max-content;max-width:18em;
vertical-align:top;white-space:normal;overflow-wrap:anywhere}}
.after{margin-top:12px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
code span{display:inline-block;max-width:100%;white-space:pre-wrap}
details{margin:12px 0}summary{cursor:pointer;color:var(--accent);font-size:14px}
.faults{border-left:3px solid var(--warn);padding-left:12px}
footer{color:var(--soft);font-size:13px;padding:24px 0 40px}
[hidden]{display:none!important}
@media (max-width:760px){header>:not(nav),main{padding-left:14px;padding-right:14px}
header>nav{padding-left:14px;padding-right:14px;flex-wrap:nowrap;overflow-x:auto}
.charts{grid-template-columns:minmax(0,1fr)}h1{font-size:22px}
.plot{height:170px}.card b{font-size:26px}th,td{padding:6px 10px}
td{min-width:9em}
.heat .names{max-width:112px}figure{padding:10px 10px 8px}}
@media print{nav{display:none}section{break-inside:avoid}}
"""
