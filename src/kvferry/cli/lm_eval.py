"""``kvferry lm-eval``."""

from __future__ import annotations

import click


@click.command(
    "lm-eval",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> int:
    """lm-evaluation-harness's own command line, with the model type kvferry.

    ARGUMENTS are lm-eval's: `kvferry lm-eval run --help` shows them. --model_args takes pretrained=MODEL, codec=POLICY,
    budget=B, mapper=DIR and more: docs/lm-eval.md.
    """
    from kvferry.evaluate.harness import run

    return run(arguments)
