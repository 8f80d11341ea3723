"""Groups whose commands are imported when they run: their help imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

Commands = Mapping[str, tuple[str, str]]
"""Name -> ``module:attribute``, and the command's line in the help; without one it is hidden."""


class LazyGroup(click.Group):
    """A group of ``lazy`` commands, each imported when it is called."""

    def __init__(self, *arguments: Any, lazy: Commands, **settings: Any):
        super().__init__(*arguments, **settings)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.lazy:
            return None
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items() if text])
