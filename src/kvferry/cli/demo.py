"""``kvferry demo``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command, model_options, plain
from kvferry.cli.handoff import show_results, show_texts, stages
from kvferry.engines.handoff.job import HandoffJob

BUDGETS = (1.0, 0.52, 0.28)


@command("demo")
@click.option("--out", default="demo", show_default=True, metavar="DIR", help="Folder for the report.")
@click.option("--model", default="smollm2-135m", show_default=True, help="Another model.")
@model_options
def demo(common: Common, out: str, model: str) -> tuple[dict[str, Any], Callable[[], None]]:
    """Hand a cache of 1,536 tokens from one process to another, at 16 bit, 0.52 and 0.28 of the bytes.

    Leaves report.html and results.json in DIR.
    """
    from kvferry.cli.environment import environment
    from kvferry.engines.handoff.run import Session
    from kvferry.report.files import writable_folder
    from kvferry.report.handoff import write_report

    new = not Path(out).exists()
    folder = writable_folder(out)
    dtype, attn = common.fill_defaults()
    results = []
    try:
        with Session() as session:
            for number, budget in enumerate(BUDGETS, 1):
                job = HandoffJob(
                    producer_model=model,
                    consumer_model=model,
                    budget=budget,
                    dtype=dtype,
                    attn=attn,
                    threads=common.threads,
                    seed=common.seed,
                )
                with stages(f"{number}/{len(BUDGETS)}") as on_stage:
                    results.append(session.run(job, on_stage))
    except BaseException:
        if new:
            folder.rmdir()  # made to see that it can be; nothing is in it yet
        raise
    rows = [result.to_json() for result in results]
    paths = write_report(folder, plain(rows), environment(common))

    def show() -> None:
        show_results(results)
        show_texts(results[-1])
        tables.show_text("report", "\n".join(paths))

    return {"report": paths, "rows": rows}, show
