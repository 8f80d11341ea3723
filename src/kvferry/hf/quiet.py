"""Manners towards the terminal: other libraries' noise off for a while, one progress line of our own."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

_NOISY_LOGGERS = ("huggingface_hub", "accelerate")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or deprecation warnings of transformers inside; its settings are put back after."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity(verbosity)


def progress() -> Progress:
    """A Rich progress display on the standard error stream as it is now; silent when that is no terminal."""
    # The stream is taken by value: while the display is live, other code may redirect `sys.stderr`.
    console = Console(file=sys.stderr)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )
