"""What all commands share: their options, and how a result is given out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from kvferry.errors import InvalidInput
from kvferry.version import __version__

DTYPES = ("bfloat16", "float16", "float32")
DEFAULT_DTYPE = "bfloat16"
DEFAULT_ATTN = "sdpa"

POLICY_HELP = "What chooses each token's bits: auto, fast, klt, greedy…; a wrong name shows them all."
SEED = click.IntRange(0, 2**32 - 1)
"""What every generator of random numbers takes."""
FRAME_TOKENS = click.IntRange(1, 2**26)
"""A packet has no more tokens than that."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(slots=True)
class Common:
    """The options that every command has; ``dtype`` and ``attn`` are ``None`` where none was given or is known yet."""

    command: str | None
    json: bool
    dtype: str | None = None
    attn: str | None = None
    threads: int | None = None
    seed: int = 0

    def fill_defaults(self, dtype: str | None = None, attn: str | None = None) -> tuple[str, str]:
        """Settle ``dtype`` and ``attn``: what was typed, else what is given here, else the defaults of all commands."""
        self.dtype = self.dtype or dtype or DEFAULT_DTYPE
        self.attn = self.attn or attn or DEFAULT_ATTN
        return self.dtype, self.attn

    def set_threads(self) -> None:
        """Make torch compute with ``threads`` threads, where a number was given."""
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)


def model_options(
    function: Function, *, seed_help: str = "For what is random.", dtypes: Sequence[str] = DTYPES
) -> Function:
    """``--dtype --attn --threads --seed``: how a model is loaded and run."""
    for option in reversed(
        (
            click.option(
                "--dtype", type=click.Choice(dtypes), help=f"Of weights and cache. [default: {DEFAULT_DTYPE}]"
            ),
            click.option("--attn", metavar="BACKEND", help=f"Attention backend. [default: {DEFAULT_ATTN}]"),
            click.option("--threads", type=click.IntRange(1, 4096), help="Threads to compute with."),
            click.option("--seed", type=SEED, default=0, show_default=True, help=seed_help),
        )
    ):
        function = option(function)
    return function


def int4_option(function: Function) -> Function:
    """``--int4-allowed``: for the policy adaptive."""
    option = click.option(
        "--int4-allowed/--no-int4-allowed",
        default=None,
        help="For policy adaptive: whether the model bears INT4. [default: what `kvferry ship probe` found]",
    )
    return option(function)


def check_int4(int4_allowed: bool | None, policies: Collection[str]) -> None:
    """Raise `InvalidInput` where ``--int4-allowed`` was given and no policy asks for it."""
    if int4_allowed is not None and "adaptive" not in policies:
        raise InvalidInput("--int4-allowed and --no-int4-allowed are for --policy adaptive alone")


def greedy_options(function: Function) -> Function:
    """`model_options` of a command in which nothing is random."""
    return model_options(function, seed_help="Taken as everywhere; greedy decoding uses no randomness.")


def command(name: str, **settings: Any) -> Callable[[Function], click.Command]:
    """A click command with ``--json`` and ``--debug``, called with a `Common` first.

    The function returns ``(result, show)``: the JSON object of its result, and a function that prints it for a person.
    A result whose ``checks_failed`` is true ends with status 1.
    """

    def decorate(function: Function) -> click.Command:
        @wraps(function)
        def call(**given: Any) -> int:
            common = Common(
                name,
                given.pop("as_json"),
                **{key: given.pop(key) for key in ("dtype", "attn", "threads", "seed") if key in given},
            )
            given.pop("debug")
            running = click.get_current_context().obj
            if isinstance(running, list):
                running.append(common)  # for what is said of it if it fails
            with _stdout_for_results_only() as out:
                result, show = function(common, **given)
            failed = bool(result.pop("checks_failed", False))
            if common.json:
                out.write(as_json(common, result) + "\n")
            else:
                show()
            return int(failed)

        debug = click.option("--debug", is_flag=True, help="Show where an error comes from.")
        as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
        make: Callable[[Callable[..., Any]], click.Command] = click.command(name.rpartition(" ")[2], **settings)
        return make(as_json_option(debug(call)))

    return decorate


def as_json(common: Common, result: Mapping[str, Any] | None, error: Mapping[str, Any] | None = None) -> str:
    """The one object that ``--json`` prints: with ``error`` beside a ``result`` of ``null`` where there is none."""
    from kvferry.cli.environment import environment

    content = {
        "kvferry": __version__,
        "command": common.command,
        "environment": environment(common),
        "result": plain(result),
    }
    if error is not None:
        content["error"] = plain(error)
    return json.dumps(content, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` with numbers that JSON cannot hold (NaN, infinity) as ``null``, and tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def prompt_text(prompt: str | None, text: str | None, *, needed: bool = True) -> str | None:
    """The text of ``--prompt`` or ``--text FILE``. Raises `InvalidInput` for both, none, or an empty one."""
    from kvferry.snapshot.files import read_text

    if prompt is not None and text is not None:
        raise InvalidInput("give --prompt or --text, not both")
    if text is not None:
        return read_text(text)
    if prompt is None and needed:
        raise InvalidInput("give a prompt: --prompt TEXT or --text FILE")
    if prompt is not None and not prompt:
        raise InvalidInput("the prompt is empty")
    return prompt


def numbers(text: str | None, what: str) -> list[float]:
    """``"0.5,0.3"`` as numbers above 0."""
    try:
        found = [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError as error:
        raise InvalidInput(f"{what} is {text!r}: give numbers with commas between them") from error
    if not all(0 < number < math.inf for number in found):
        raise InvalidInput(f"{what} is {text!r}: give numbers above 0")
    return found


def names(text: str | None) -> list[str]:
    """``"a,b"`` as names."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def check_output(path: str, *inputs: str) -> None:
    """Raise `InvalidInput` where a file cannot be written, or is one of ``inputs``: before the work, not after it."""
    if not path:
        raise InvalidInput("the name of the file to write is empty: give one")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise InvalidInput(f"cannot write {path}: there is no folder {Path(path).parent}")
    if target.is_dir():
        raise InvalidInput(f"cannot write {path}: it is a folder")
    if target.exists() and not target.is_file():
        raise InvalidInput(f"cannot write {path}: it exists and is no regular file; choose another path")
    try:
        with tempfile.TemporaryFile(dir=target.parent):  # permissions do not tell: root has them all, also in /proc
            pass
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: nothing can be made in its folder ({error.strerror})") from error
    for given in inputs:
        if Path(path).exists() and Path(given).exists() and Path(path).samefile(given):
            raise InvalidInput(f"cannot write {path}: it is what is read; give another name to --output")


def check_kind(path: str, wanted: str, **instead: str) -> None:
    """Raise `InvalidInput` where a file of kvferry is of another kind than ``wanted``; `peek`'s errors for no file.

    Args:
        path: the file.
        wanted: the kind that it has to be.
        instead: kind -> what to do with one of that kind, where the command knows.
    """
    from kvferry.snapshot.container import peek

    kind = peek(path).kind
    if kind != wanted:
        remedy = instead.get(kind) or _REMEDIES.get((kind, wanted), f"give a {wanted}")
        raise InvalidInput(f"{path} is a {kind}, no {wanted}: {remedy.format(path=path)}")


_REMEDIES = {
    ("packet", "snapshot"): "decode it first, with `kvferry ship decode {path} -o FILE`",
    ("snapshot", "packet"): "encode it first, with `kvferry ship encode {path} -o FILE --budget B`",
    ("refinement", "packet"): "give the packet that it belongs to, and this one with --refinement",
}
"""(What was given, what is needed) -> what to do."""


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner with ``what`` on standard error while the block runs; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(what):
        yield


@contextlib.contextmanager
def _stdout_for_results_only() -> Iterator[Any]:
    """Whatever prints inside prints to standard error; yields the true standard output."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield out
