"""The report: one HTML page that needs nothing beside itself.

Everything that comes from a run goes through `text.escaped` or `text.script_json`. The content security policy lets
only the page's own style and script in, by their hashes, and nothing load.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from sparrow.tracking.report import compare, health, tokens
from sparrow.tracking.report.chart import Chart
from sparrow.tracking.report.panels import alarm_chart, panels
from sparrow.tracking.report.reduce import COLUMNS
from sparrow.tracking.report.run import Run
from sparrow.tracking.report.svg import figure
from sparrow.tracking.report.text import escaped, script_json

SAMPLES = 12
# Of the page, for the samples and for the columns of all charts: it stays below 5 MB with any number of runs.
MOST_SAMPLE_BYTES = 2_000_000
FEWEST_COLUMNS = 40


def render(runs: Sequence[Run], now: float) -> str:
    """The page for one run, or for several with their comparison first; `now` is what ages are counted from."""
    columns = max(COLUMNS // len(runs), FEWEST_COLUMNS)
    data: list[Any] = []
    body = _comparison(runs, data) if len(runs) > 1 else ""
    for order, run in enumerate(runs):
        content = _run(run, now, data, columns, MOST_SAMPLE_BYTES // len(runs))
        body += content if len(runs) == 1 else _folded(run, content, order)
    return _document("Sparrow: " + ", ".join(run.name for run in runs), body, data)


def _comparison(runs: Sequence[Run], data: list[Any]) -> str:
    return (
        f'<h1>{len(runs)} runs</h1><section id="comparison"><h2>Side by side</h2>{compare.table(runs)}'
        f"{_grid(compare.charts(runs), data, COLUMNS)}<h2>Settings that differ</h2>{compare.differing(runs)}</section>"
    )


def _folded(run: Run, content: str, order: int) -> str:
    return f'<details class="run" id="run-{order}"><summary>{escaped(run.name)}</summary>{content}</details>'


def _run(run: Run, now: float, data: list[Any], columns: int, most_sample_bytes: int) -> str:
    everything = panels(run.metrics)
    shown = [chart for chart in everything if not chart.empty]
    alarms = alarm_chart(run.metrics)
    return (
        f"<h1>{escaped(run.name)}</h1>{_health(run, now)}{_warnings(run)}"
        f"<section><h2>Curves</h2>{_grid(shown, data, columns)}{_absent(everything)}</section>"
        f"<section><h2>Alarms</h2>{_alarms(run, alarms, data, columns)}</section>"
        f"<section><h2>Samples</h2>{tokens.section(run.samples, most_sample_bytes)}</section>"
    )


def _health(run: Run, now: float) -> str:
    found = health.facts(run, now)
    cells = "".join(
        f'<div class="fact {fact.state}"><dt>{escaped(fact.label)}</dt><dd>{escaped(fact.value)}'
        f"<small>{escaped(fact.detail)}</small></dd></div>"
        for fact in [health.verdict(found), *found]
    )
    return f'<dl class="health">{cells}</dl>'


def _warnings(run: Run) -> str:
    words = []
    if not len(run.metrics.steps_N):
        words.append("There is no whole line in metrics.jsonl yet.")
    if run.metrics.broken:
        words.append(f"{run.metrics.broken} lines of metrics.jsonl could not be read, and are left out.")
    return "".join(f'<p class="warning">{word}</p>' for word in words)


def _grid(charts: Sequence[Chart], data: list[Any], columns: int) -> str:
    return f'<div class="grid">{"".join(figure(chart, data, columns) for chart in charts)}</div>'


def _absent(charts: Sequence[Chart]) -> str:
    titles = [chart.title for chart in charts if chart.empty]
    return f'<p class="note">Not logged by this run: {escaped("; ".join(titles))}.</p>' if titles else ""


def _alarms(run: Run, chart: Chart, data: list[Any], columns: int) -> str:
    watched = list(run.metrics.below("alarm/"))
    if not watched:
        return '<p class="note">This run logs no alarms.</p>'
    quiet = [name for name in watched if name not in {line.label for line in chart.lines}]
    words = f'<p class="note">Never raised: {escaped(", ".join(quiet))}.</p>' if quiet else ""
    return (_grid([chart], data, columns) if chart.lines else "") + words


def _document(title: str, body: str, data: list[Any]) -> str:
    style, script = _own("page.css"), _own("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escaped(title)}</title><style>{style}</style></head>\n<body><main>{body}</main>"
        f'<div id="tip" role="status" hidden></div>'
        f'<script type="application/json" id="data">{script_json(data)}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _own(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
