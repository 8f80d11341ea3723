"""Taking a cache out of a model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.compat import cache_argument, forward_parameters
from kvferry.hf.identity import identity_of
from kvferry.hf.tokens import as_ids, as_mask, as_positions, positions_of, require_left_padding, require_within_context
from kvferry.snapshot import Identity, LayerKind, LayerState, Snapshot

_CHUNKED = re.compile(r"chunked\(([1-9]\d{0,8})\)")
_FULL_LAYERS = (DynamicLayer, StaticLayer)
_SLIDING_LAYERS = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)


def capture(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch seq_len"] | Sequence[int],
    *,
    attention_mask: Tensor | None = None,
    construction: str = "prefill",
    query_window: int = 0,
    copy: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    full_hash: bool = False,
) -> Snapshot:
    """Run ``model`` over a prompt and take its cache: a snapshot of exactly the tokens given.

    The receiver computes its own first logits, so leave the last token of a prompt out when it is to be continued.

    Args:
        model: a causal language model.
        input_ids: ``(batch, seq_len)``, or ``(seq_len,)`` for a batch of one.
        attention_mask: ``(batch, seq_len)``, 0 on left padding.
        construction: ``prefill`` (all at once), ``chunked(n)`` (n tokens at a time) or ``incremental`` (one by one).
        query_window: keep the last so many queries of each layer too, for observation-window scores.
        copy: give the snapshot storage of its own, packed.
        tokenizer: to record in the identity; known already for a model from `load_model`.
        full_hash: record a hash of every byte of the weights, not only of a sample (about a second a gigabyte); who
            takes the cache up then compares that, too.

    Raises:
        InvalidInput: a bad prompt, mask or construction; a prompt longer than the model's context.
        UnsupportedCache: the model keeps a cache of another kind than keys and values per token.
    """
    from kvferry.hf.observe import observe_queries

    identity = identity_of(model, tokenizer, construction=(construction,), full_hash=full_hash)
    ids = as_ids(model, input_ids)
    mask = as_mask(attention_mask, ids)
    require_left_padding(mask)
    positions = positions_of(mask)
    require_within_context(model, positions)
    _require_no_dropout(model)
    step = _step(construction, ids.shape[1])
    cache = DynamicCache(config=model.config)
    if query_window < 0:
        raise InvalidInput(f"query_window is {query_window}; it must not be negative")
    queries: dict[int, Tensor] = {}
    with contextlib.ExitStack() as stack:
        if query_window:
            queries = stack.enter_context(observe_queries(model, query_window))
        run(model, cache, ids, mask, positions, step=step)
    if query_window and len(queries) != len(identity.layers):
        raise UnsupportedCache(
            f"{len(queries)} of {len(identity.layers)} layers of {type(model).__name__} showed queries"
        )
    return _take(cache, identity, ids, mask, positions, queries, copy=copy)


def snapshot_from_cache(
    cache: Cache,
    model: PreTrainedModel,
    token_ids: Int[Tensor, "batch seq_len"] | Sequence[int],
    *,
    attention_mask: Tensor | None = None,
    positions: Tensor | None = None,
    construction: str | tuple[str, ...] = "prefill",
    copy: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    full_hash: bool = False,
    identity: Identity | None = None,
) -> Snapshot:
    """A snapshot of a cache that transformers built: `DynamicCache` or `StaticCache`, with full and sliding layers.

    Without ``copy`` it shares the cache's storage. A `DynamicCache` never writes to what it has handed out; a
    `StaticCache` does: take a copy if it goes on being used.

    Args:
        cache: what ``model`` filled.
        model: the model that filled it.
        token_ids: exactly the tokens that the cache has seen (after ``generate``, all but the last one).
        attention_mask: ``(batch, seq_len)``, 0 on padding and on tokens dropped from attention.
        positions: as given to the model; by default counted over the tokens of the mask.
        construction: how the cache came about, one stage or several.
        copy: give the snapshot storage of its own, packed.
        tokenizer: to record in the identity; known already for a model from `load_model`.
        full_hash: record a hash of every byte of the weights, not only of a sample.
        identity: of ``model``, where the caller has it already and the weights are as they were; computed by default.

    Raises:
        InvalidInput: the cache has seen more or fewer tokens than given, or is not this model's; positions that do
            not fit the tokens.
        UnsupportedCache: the cache or one of its layers is of another kind; names the class and the layer.
    """
    stages = (construction,) if isinstance(construction, str) else tuple(construction)
    if identity is None:
        identity = identity_of(model, tokenizer, full_hash=full_hash)
    ids = as_ids(model, token_ids)
    mask = as_mask(attention_mask, ids)
    places = positions_of(mask) if positions is None else as_positions(positions, ids)
    return _take(cache, replace(identity, construction=stages), ids, mask, places, {}, copy=copy)


def run(
    model: PreTrainedModel,
    cache: Cache,
    ids: Int[Tensor, "batch seq_len"],
    mask: Tensor,
    positions: Tensor,
    *,
    start: int = 0,
    step: int | None = None,
) -> None:
    """Feed tokens ``start … seq_len - 1`` into ``cache``, ``step`` at a time; mask and positions cover all tokens."""
    named = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        named["logits_to_keep"] = 1
    device = model.device
    everything = bool(mask.all())
    ids, mask, positions = ids.to(device), mask.to(device, torch.int64), positions.to(device)
    with torch.no_grad():
        for begin, end in _spans(start, ids.shape[1], step):
            # `generate` drops a mask of ones only; doing the same keeps kernels, and so bits, the same.
            model(
                input_ids=ids[:, begin:end],
                attention_mask=None if everything else mask[:, :end],
                position_ids=positions[:, begin:end],
                **named,
            )


def _spans(start: int, end: int, step: int | None) -> Iterator[tuple[int, int]]:
    stride = step or max(1, end - start)
    for begin in range(start, end, stride):
        yield begin, min(begin + stride, end)


def _step(construction: str, seq_len: int) -> int:
    if construction == "prefill":
        return seq_len
    if construction == "incremental":
        return 1
    chunked = _CHUNKED.fullmatch(construction)
    if chunked is None:
        raise InvalidInput(f'unknown construction {construction!r}: "prefill", "chunked(n)" and "incremental" are')
    return int(chunked[1])


def _require_no_dropout(model: PreTrainedModel) -> None:
    if model.training and (
        getattr(model.config, "attention_dropout", 0)
        or any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    ):
        raise InvalidInput("the model is in training mode and drops activations at random: call model.eval() first")


def _take(
    cache: Cache,
    identity: Identity,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    queries: dict[int, Tensor],
    *,
    copy: bool,
) -> Snapshot:
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise UnsupportedCache(f"a {type(cache).__name__} is no cache of keys and values in layers")
    owners = [index for index, geometry in enumerate(identity.layers) if geometry.kind.name != "shared"]
    if not owners[-1] < len(cache.layers) <= len(identity.layers):
        raise InvalidInput(f"the cache has {len(cache.layers)} layers, but the model has {len(identity.layers)}")
    layers = []
    for index, geometry in enumerate(identity.layers):
        if geometry.kind.name == "shared":
            layers.append(LayerState(geometry.kind, None, None, ids.shape[1], queries.get(index)))
            continue
        keys, values = _held(cache.layers[index], geometry.kind, index, ids.shape[1])
        layers.append(LayerState(geometry.kind, keys, values, ids.shape[1], queries.get(index)))
    snapshot = Snapshot(identity, ids, positions, mask, tuple(layers))
    return snapshot.clone() if copy else snapshot


def _held(layer: object, kind: LayerKind, index: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Views of the tokens that a layer of ``kind`` must hold after ``seq_len`` tokens."""
    # Exact classes: what derives from these (quantised, indexed, hybrid layers) keeps more, or something else.
    if type(layer) not in (*_FULL_LAYERS, *_SLIDING_LAYERS):
        raise UnsupportedCache(f"layer {index} is a {type(layer).__name__}, which kvferry does not carry")
    assert isinstance(layer, (*_FULL_LAYERS, *_SLIDING_LAYERS))
    if kind.name == "full" and type(layer) in _SLIDING_LAYERS:
        raise InvalidInput(f"layer {index} attends to everything, but the cache's is a {type(layer).__name__}")
    if not layer.is_initialized:
        raise InvalidInput(f"layer {index} of the cache is empty: run the model first")
    seen = int(layer.get_seq_length())
    if seen != seq_len:
        raise InvalidInput(
            f"layer {index} of the cache has seen {seen} tokens, but {seq_len} token ids are given "
            "(after `generate`, the cache holds all tokens but the last)"
        )
    keys, values = layer.keys, layer.values
    if isinstance(layer, StaticLayer):  # preallocated: slots beyond the tokens seen are empty
        filled = min(seen, int(keys.shape[2]))
        keys, values = keys[:, :, :filled], values[:, :, :filled]
    held = kind.held(seen)
    if keys.shape[2] < held:
        raise InvalidInput(f"layer {index} of the cache holds {keys.shape[2]} tokens; a {kind} layer needs {held}")
    start = keys.shape[2] - held
    return keys[:, :, start:].detach(), values[:, :, start:].detach()
