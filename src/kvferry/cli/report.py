"""``kvferry report``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, check_output, command
from kvferry.errors import InvalidInput


@command("report")
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@click.option("-o", "--output", default="report.html", show_default=True, metavar="PAGE", help="*.html or *.md.")
def report(
    common: Common,  # noqa: ARG001
    files: tuple[str, ...],
    output: str,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Put results of kvferry's commands, as --json prints them, on one page, with what each was made with."""
    from kvferry.report.page import read, render
    from kvferry.snapshot.files import write_text

    kind = Path(output).suffix.lower()
    if kind not in (".html", ".md"):
        raise InvalidInput(f"--output {output}: a page is a .html or a .md file")
    check_output(output, *files)
    results = {_name(file, files): read(file) for file in files}
    write_text(Path(output), render(results, html=kind == ".html"))
    failed = [name for name, content in results.items() if content["result"] is None]
    result = {"path": output, "results": list(results), "failed": failed}
    return result, lambda: tables.show_text("written", output)


def _name(file: str, files: tuple[str, ...]) -> str:
    """The file's name, with its folder where another has the same."""
    path = Path(file)
    return path.stem if [Path(other).stem for other in files].count(path.stem) == 1 else str(path)
