"""Two tiny models of one tokenizer and one kv geometry, from nothing but the default text: a pair for quick checks."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from kvferry.evidence.log import digest
from kvferry.hf.distil import cross_entropy
from kvferry.hf.made import existing, put, working_folder
from kvferry.hf.pair import OnStage, PairResult, pairs_folder
from kvferry.hf.text import default_text
from kvferry.hf.train import OnStep, TrainSettings, train
from kvferry.version import __version__

VOCABULARY = 1024
WINDOW = 128
HELD_OUT = 64
"""Windows at the end of the text that are not trained on."""

SIZES: dict[str, dict[str, int]] = {
    "large": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6},
    "small": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4},
}
"""Of the two models; kv heads and their size are the same."""

_SHARED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}


def make_tiny_pair(
    settings: TrainSettings,
    *,
    folder: str | Path | None = None,
    on_step: OnStep | None = None,
    on_stage: OnStage | None = None,
) -> PairResult:
    """Train two small Llamas from scratch on Python's own reference topics, one after the other, and save both.

    The folder has ``large`` and ``small`` in it, appears whole or not at all, and is made on after a kill as in
    `kvferry.hf.pair.make_pair`.

    Args:
        settings: of the training of each of them.
        folder: of both; by default one in `pairs_folder`.
        on_step: told after each step.
        on_stage: told what is done next.

    Raises:
        InvalidInput: a folder that holds something else, or another process at the same work.
        CorruptPacket: a damaged checkpoint.
    """
    say = on_stage or (lambda _what: None)
    text = default_text()
    recipe = {
        "sizes": SIZES,
        "shared": _SHARED,
        "vocabulary": VOCABULARY,
        "window": WINDOW,
        "settings": asdict(settings),
        "text": digest(text),
    }
    bound_to = digest(recipe)
    target = pairs_folder() / f"tiny-{bound_to[:12]}" if folder is None else Path(folder).expanduser()
    found = existing(target, bound_to)
    if found is not None:
        return PairResult(str(target), tuple(found["kept"]), found["made"], True)
    with working_folder(target) as work:
        say("tokenizer")
        tokenizer = _tokenizer(text)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        windows = ids[: ids.numel() // WINDOW * WINDOW].view(-1, WINDOW)
        training, held = windows[:-HELD_OUT], windows[-HELD_OUT:]
        made: dict[str, Any] = {**recipe, "kvferry": __version__, "torch": torch.__version__}
        built = {}
        for name, size in SIZES.items():
            say(name)
            built[name] = model = _model(size, settings.seed)
            progress = train(
                dict(model.named_parameters()),
                partial(_loss, model),
                training,
                settings,
                checkpoint=work / f"{name}.safetensors",
                bound_to=f"{bound_to} {name}",
                on_step=on_step,
            )
            model.requires_grad_(False)
            made[name] = {"progress": progress.to_json(), "held_out_nll": cross_entropy(model, held)}
        say("saving")
        put(work, target, built, tokenizer, {"digest": bound_to, "kept": [], "made": made})
    return PairResult(str(target), (), made, False)


def _tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte pairs of ``text``; a token for the end, which is also the padding."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(text.split("\n\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>", pad_token="<end>")


def _model(size: dict[str, int], seed: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        initializer_range=0.05, **_SHARED, **size,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def _loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss
