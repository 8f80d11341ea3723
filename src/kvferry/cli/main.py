"""``kvferry``: the commands, and what happens to their errors.

Exit status: 0 good; 1 the check or the work failed; 2 used wrongly; 130 interrupted.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvferry.cli.lazy import LazyGroup
from kvferry.errors import InvalidInput, KVFerryError
from kvferry.version import __version__

if TYPE_CHECKING:
    from kvferry.cli.common import Common

COMMANDS = {
    "capture": ("kvferry.cli.capture:capture", "Prefill a prompt and write its cache to a file."),
    "inspect": ("kvferry.cli.inspect:inspect", "Say what is in a snapshot, packet or transform, and check it."),
    "generate": ("kvferry.cli.generate:generate", "Go on from a cache in a file."),
    "audit": ("kvferry.cli.audit:audit", "Measure, locate and explain what a cache differs by from recomputation."),
    "ship": ("kvferry.cli.ship:ship", "Encode a cache in fewer bytes, and decode it."),
    "handoff": ("kvferry.cli.handoff:handoff", "Prefill in one process, decode in another, and judge the result."),
    "plan": ("kvferry.cli.plan:plan", "Say what a hand-off will weigh, to the byte, and take on a link."),
    "map": ("kvferry.cli.map:map_group", "Turn one model's cache into another's: fit, eval, gate, apply, explain."),
    "pair": ("kvferry.cli.pair:pair", "Make a smaller model whose cache can be mapped."),
    "bench": ("kvferry.cli.bench:bench", "Measure speed, beside memcpy and other codecs in the same run."),
    "report": ("kvferry.cli.report:report", "Put results of --json on one page."),
    "lm-eval": (
        "kvferry.cli.lm_eval:lm_eval",
        "lm-evaluation-harness, on shipped or mapped caches (--model kvferry).",
    ),
    "demo": ("kvferry.cli.demo:demo", "Three hand-offs of SmolLM2-135M, with a report."),
    "handoff-producer": ("kvferry.cli.roles:producer", ""),
    "handoff-consumer": ("kvferry.cli.roles:consumer", ""),
}
"""Name -> where the command is, and its line in the help; without one it is hidden."""

GROUPS = ("ship", "bench", "map", "pair")
"""Commands that have commands of their own."""

_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click raises for a group without a command: it shows the help."""


@click.group(
    cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="kvferry")
def cli() -> None:
    """Capture, ship and take up the key-value caches of language models.

    Every command but lm-eval takes --json: one JSON object on standard output, all else on standard error.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in given or "--debug" in given or not sys.stderr.isatty():
        os.environ.setdefault("NO_COLOR", "1")
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if "--debug" in given else logging.WARNING,
        format="kvferry: %(levelname)s: %(message)s" if "--debug" not in given else "%(name)s: %(message)s",
    )
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 (for the whole process)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    try:
        status = run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left: nothing more can be said there, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except OSError as error:  # a full disk behind our output, most likely
        click.echo(f"kvferry: cannot write the output: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def run(given: Sequence[str]) -> int:
    """Run one command; every error becomes one line (and one JSON object with ``--json``) and an exit status."""
    running: list[Common] = []
    try:
        found = cli.main(list(given), prog_name="kvferry", standalone_mode=False, obj=running)
        return found if isinstance(found, int) else 0
    except click.UsageError as error:
        helps = isinstance(error, _HELP)
        if helps:
            error.show()
        return _fail(given, running, error, 2, shown=helps)
    except click.ClickException as error:
        return _fail(given, running, error, 1)
    except InvalidInput as error:
        return _fail(given, running, error, 2)
    except KVFerryError as error:
        return _fail(given, running, error, 1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("kvferry: interrupted", err=True)
        if "--json" in given:
            fault = {"type": "Interrupted", "message": "interrupted before there was a result"}
            click.echo(_failure(given, running, fault))
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            raise  # our own output, or a file whose writer does not know its name: main says it in one line
        return _fail(given, running, error, 1)
    except Exception as error:
        return _fail(given, running, error, 1)


def _fail(
    given: Sequence[str], running: Sequence[Common], error: Exception, status: int, *, shown: bool = False
) -> int:
    """Say what went wrong: one line, more with ``--debug``."""
    from kvferry.channel import faults

    if "--debug" in given:
        logging.getLogger(__name__).error("the error in full", exc_info=error)
    if not shown:
        click.echo(f"kvferry: {_line(error)}", err=True)
    if "--json" in given:
        fault = faults.describe(error)
        if isinstance(error, click.ClickException):
            fault["message"] = error.format_message()
        click.echo(_failure(given, running, fault))
    return status


def _failure(given: Sequence[str], running: Sequence[Common], fault: Mapping[str, Any]) -> str:
    """The one object that ``--json`` prints where there is no result."""
    from kvferry.cli.common import Common, as_json

    return as_json(running[-1] if running else Common(_command(given), True), None, fault)


def _line(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        text = " ".join(error.format_message().split())
        context = error.ctx if isinstance(error, click.UsageError) else None
        return text if context is None else f"{text} (see {context.command_path} --help)"
    text = " ".join(str(error).split())
    if isinstance(error, KVFerryError):
        return text
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename}: {error.strerror}"
    return f"unexpected {type(error).__name__}: {text or 'no message'} (--debug shows where)"


def _command(given: Sequence[str]) -> str | None:
    """The command's name, as in ``ship encode``."""
    words = [word for word in given if not word.startswith("-")][:2]
    if not words or words[0] not in COMMANDS:
        return None
    return " ".join(words) if words[0] in GROUPS else words[0]


if __name__ == "__main__":
    main()
