"""A page and pictures of a run, from its logs alone; several runs side by side: --run DIR"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sparrow.errors import UserError
from sparrow.tracking.picture import draw_charts, main_charts
from sparrow.tracking.report import compare
from sparrow.tracking.report.page import SAMPLES, render
from sparrow.tracking.report.run import Run, names, read_run
from sparrow.whole_files import write_text

DESCRIPTION = """\
Writes one HTML page that opens without a network, and pictures, from metrics.jsonl and samples.jsonl in a run's folder.
The run may still be going on, or have been killed."""
PANEL_DPI = 150


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 after one line of what the user can mend."""
    try:
        options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        _report(options.run, options.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tune run sparrow_report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--run", type=Path, action="append", required=True, metavar="DIR", help="folder of a run; again for more"
    )
    output = "the page; default: report.html in the folder of the run, or of several in the working directory"
    parser.add_argument("--output", type=Path, metavar="FILE.html", help=output)
    return parser


def _report(folders: list[Path], output: Path | None) -> None:
    if output is not None and (output.suffix != ".html" or output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"--output {output}: give a file that ends with .html, in a folder that exists")
    samples = max(SAMPLES // len(folders), 1)
    runs = [read_run(folder, name, samples) for folder, name in zip(folders, names(folders), strict=True)]
    page = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    try:
        write_text(page, render(runs, time.time()))
        pictures = _draw(runs, page)
    except OSError as error:
        raise UserError(f"--output {page}: {error}") from error
    print(f"page      {page}\npicture   {page.with_suffix('.png')}\nand each  {pictures}/*.png", flush=True)


def _draw(runs: Sequence[Run], page: Path) -> Path:
    """All main charts in one picture beside the page, and each in one of its own."""
    charts = main_charts(runs[0].metrics) if len(runs) == 1 else compare.charts(runs)
    folder = page.with_name(f"{page.stem}_charts")
    folder.mkdir(exist_ok=True)
    for chart in charts:
        draw_charts([chart], folder / f"{chart.key}.png", PANEL_DPI)
    if charts:
        draw_charts(charts, page.with_suffix(".png"))
    return folder


if __name__ == "__main__":
    sys.exit(main())
