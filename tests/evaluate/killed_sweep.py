"""Run a sweep and die in it, as a killed process does: after N steps, in the middle of a line of the log.

Called with the log, the number of steps, and the name of a model.
"""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from kvferry.evaluate.sweep import sweep
from kvferry.evidence.log import ResultLog
from kvferry.hf.models import load_model
from kvferry.hf.text import default_text
from tests.evaluate.sweeping import settings


def main() -> None:
    path, steps, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(2)
    model, tokenizer = load_model(name)

    def die(done: int, total: int, what: str) -> None:
        if done == steps:
            with open(path, "ab") as file:  # noqa: PTH123
                file.write(b'{"key":"half a li')
            os._exit(9)

    with ResultLog(path) as log:
        sweep(model, tokenizer, default_text(), settings(), results=log, on_progress=die)


if __name__ == "__main__":
    main()
