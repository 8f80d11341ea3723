"""The two hidden commands that `kvferry handoff` starts as processes of their own."""

from __future__ import annotations

import click

from kvferry.engines.handoff.child import CONSUMER, PRODUCER, run_child


@click.command("handoff-producer", hidden=True)
def producer() -> int:
    """Prefill and send, as told on standard input."""
    return run_child(PRODUCER)


@click.command("handoff-consumer", hidden=True)
@click.argument("address")
def consumer(address: str) -> int:
    """Fetch and decode, as told on standard input."""
    return run_child(CONSUMER, address)
