"""Make a child of the model in a folder and die on the way, as a killed process does.

Called with the model, the child's folder, and the step after which to die; 0: live.
"""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from kvferry.hf.models import load_model
from kvferry.hf.pair import PairSettings, make_pair
from kvferry.hf.train import Progress, TrainSettings

TEXT = "A child has fewer layers than its parent, and learns from it what those were for. " * 12
SETTINGS = PairSettings(
    TrainSettings(tokens=24 * 2 * 16, batch=2, rate=3e-3, keep_minutes=1e-9), layers=6, window=16, looked_at=4
)


def main() -> None:
    model, tokenizer = load_model(sys.argv[1], dtype="bfloat16")
    torch.set_num_threads(1)

    def die(progress: Progress) -> None:
        if progress.step == int(sys.argv[3]):
            os._exit(9)

    make_pair(model, tokenizer, [TEXT], SETTINGS, name="tiny", folder=sys.argv[2], on_step=die)


if __name__ == "__main__":
    main()
