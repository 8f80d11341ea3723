"""Checks on what a caller gives as a prompt: ids, mask, positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.errors import InvalidInput
from kvferry.hf.geometry import context_length, text_config


def as_ids(model: PreTrainedModel, input_ids: Tensor | Sequence[int]) -> Int[Tensor, "batch seq_len"]:
    """``input_ids`` as an int64 tensor of its own ``(batch, seq_len)`` on the CPU.

    Raises:
        InvalidInput: not integers, not one- or two-dimensional, empty, or outside of the model's vocabulary.
    """
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"input_ids must be a tensor of token ids, not {type(input_ids).__name__}") from error
    if ids.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(f"input_ids must be int64 or int32, not {ids.dtype}")
    ids = ids.detach().to("cpu", torch.int64, copy=True)
    if ids.dim() == 1:
        ids = ids.unsqueeze(0)
    if ids.dim() != 2:
        raise InvalidInput(f"input_ids must be (batch, seq_len) or (seq_len,), not {tuple(ids.shape)}")
    if ids.numel() == 0:
        raise InvalidInput(f"the prompt is empty: input_ids are {tuple(ids.shape)}")
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocabulary:
        raise InvalidInput(
            f"token id {least if least < 0 else most} is outside of the model's vocabulary of {vocabulary}; "
            "was another model's tokenizer used?"
        )
    return ids


def as_mask(attention_mask: Tensor | None, ids: Tensor) -> Bool[Tensor, "batch seq_len"]:
    """``attention_mask`` (1 or true: a token; 0 or false: padding or dropped) as bool; all true where none is given.

    Raises:
        InvalidInput: another shape than ``ids``, other values than 0 and 1, or a row without any token.
    """
    if attention_mask is None:
        return torch.ones(ids.shape, dtype=torch.bool)
    mask = torch.as_tensor(attention_mask).detach().to("cpu", copy=True)
    if mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask.shape != ids.shape:
        raise InvalidInput(f"attention_mask is {tuple(mask.shape)}, but input_ids are {tuple(ids.shape)}")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidInput("attention_mask must hold only 0 and 1; a 4-dimensional or additive mask is not taken here")
    mask = mask.to(torch.bool)
    empty = (~mask.any(dim=1)).nonzero()
    if empty.numel():
        raise InvalidInput(f"row {int(empty[0])} of attention_mask masks every token")
    return mask


def require_left_padding(mask: Bool[Tensor, "batch seq_len"]) -> None:
    """Raise `InvalidInput` unless each row is padding, then tokens up to its end."""
    wrong = (mask[:, :-1] & ~mask[:, 1:]).nonzero()
    if wrong.numel():
        row, column = (int(index) for index in wrong[0])
        raise InvalidInput(
            f"row {row} of attention_mask has a 0 after a 1 (at token {column + 1}): only left padding can be "
            'prefilled; tokenize with padding_side="left"'
        )


def as_positions(positions: Tensor | Sequence[int], ids: Tensor) -> Int[Tensor, "batch seq_len"]:
    """``positions`` as an int64 tensor of its own, of the shape of ``ids``; one row serves for all of a batch.

    Raises:
        InvalidInput: not integers, negative, or of a shape that does not fit ``ids``.
    """
    try:
        places = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"positions must be a tensor of integers, not {type(positions).__name__}") from error
    if places.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(f"positions must be int64 or int32, not {places.dtype}")
    batch, seq_len = ids.shape
    if tuple(places.shape) not in ((seq_len,), (1, seq_len), (batch, seq_len)):
        raise InvalidInput(f"positions are {tuple(places.shape)}, but the tokens are {tuple(ids.shape)}")
    places = places.detach().to("cpu", torch.int64, copy=True).expand(ids.shape).contiguous()
    if int(places.min()) < 0:
        raise InvalidInput(f"position {int(places.min())} is negative")
    return places


def positions_of(mask: Bool[Tensor, "batch seq_len"]) -> Int[Tensor, "batch seq_len"]:
    """Positions as transformers' ``generate`` gives them: counted over real tokens, 0 on padding."""
    return (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)


def require_within_context(model: PreTrainedModel, positions: Tensor) -> None:
    """Raise `InvalidInput` when a position lies beyond the model's context."""
    limit = context_length(text_config(model))
    needed = int(positions.max()) + 1
    if limit is not None and needed > limit:
        raise InvalidInput(f"the prompt needs {needed} positions, but the model's context is {limit} tokens")
