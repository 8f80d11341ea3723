"""Any kvpress ``ScorerPress`` as a scorer: its scores of a prompt's tokens, and nothing pruned.

kvpress is not needed to import this module: a press is anything with kvpress's ``score`` method. Its own hook is not
used, which in kvpress 0.5 reads arguments that newer transformers no longer pass.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.capture import run
from kvferry.hf.geometry import geometry_of
from kvferry.hf.tokens import as_ids, as_mask, positions_of, require_within_context


class ScorerPress(Protocol):
    """What kvferry asks of a press."""

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Scores ``(batch, kv_heads, tokens)``, higher = keep."""


def press_layer_scores(
    model: PreTrainedModel, press: ScorerPress, input_ids: Int[Tensor, "batch seq_len"] | Sequence[int]
) -> Float[Tensor, "layers batch seq_len"]:
    """Prefill a prompt and ask a press for the score of every token in every layer; mean over kv heads, on the CPU.

    NaN where a layer does not hold the token (sliding windows, layers that share another's cache). The press sees the
    whole prompt's hidden states and, in ``kwargs``, what the attention module was given, the cache under its older
    name ``past_key_values`` and ``cache_position`` too. A press that needs attention weights (``attentions``) needs a
    model loaded with ``attn="eager"``.

    Args:
        model: a causal language model whose attention modules kvpress can read (Llama, Mistral, Qwen, Gemma 3 …).
        press: any ``ScorerPress``.
        input_ids: ``(batch, seq_len)`` or ``(seq_len,)``, no padding.

    Raises:
        InvalidInput: no press, or a bad prompt.
        UnsupportedCache: the press cannot score a layer of this model; says which and why.
    """
    if not callable(getattr(press, "score", None)):
        raise InvalidInput(f"a {type(press).__name__} has no score method: give a kvpress ScorerPress")
    ids = as_ids(model, input_ids)
    mask = as_mask(None, ids)
    positions = positions_of(mask)
    require_within_context(model, positions)
    geometry = geometry_of(model)
    cache = DynamicCache(config=model.config)
    found = torch.full((len(geometry), *ids.shape), torch.nan, dtype=torch.float32)

    def record(module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        index = module.layer_idx
        if not isinstance(index, int) or geometry[index].kind.name == "shared":
            return
        held = cache.layers[index]
        keys, values = held.keys, held.values
        rotary = module.__dict__.get("rotary_emb")
        if isinstance(rotary, _Rotary):
            rotary.first = ids.shape[1] - keys.shape[2]
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else inputs[0]
        given = {**kwargs, "past_key_values": cache, "cache_position": torch.arange(ids.shape[1], device=hidden.device)}
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        scores = _score(press, index, module, hidden[:, -keys.shape[2] :], keys, values, weights, given)
        found[index, :, ids.shape[1] - keys.shape[2] :] = scores.detach().float().mean(dim=1).cpu()

    prepare = getattr(press, "post_init_from_model", None)
    if callable(prepare):
        prepare(model)
    with _hooks(model, record), torch.no_grad():
        run(model, cache, ids, mask, positions)
    return found


def press_scores(
    model: PreTrainedModel, press: ScorerPress, input_ids: Int[Tensor, "batch seq_len"] | Sequence[int]
) -> Float[Tensor, "batch seq_len"]:
    """`press_layer_scores` as one score a token, for ``kvferry.encode(snapshot, budget, policy, scores=…)``.

    Presses differ in scale from layer to layer, so within each layer scores become ranks in (0, 1] first; the mean of
    those over the layers that hold the token is what counts. Ties share the higher rank.
    """
    layers = press_layer_scores(model, press, input_ids)
    ranked = torch.full_like(layers, torch.nan)
    for layer in range(layers.shape[0]):
        for row in range(layers.shape[1]):
            here = ~layers[layer, row].isnan()
            values = layers[layer, row, here].contiguous()
            if values.numel():
                order = torch.searchsorted(values.sort().values, values, right=True)
                ranked[layer, row, here] = order.float() / values.numel()
    return ranked.nanmean(dim=0).nan_to_num(0.0)


def _score(
    press: ScorerPress,
    index: int,
    module: nn.Module,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    embeddings = kwargs.get("position_embeddings")
    if isinstance(embeddings, tuple):
        kwargs = {**kwargs, "position_embeddings": tuple(part[:, -keys.shape[2] :] for part in embeddings)}
    if weights is not None:
        weights = weights[..., -keys.shape[2] :, -keys.shape[2] :]
    try:
        scores = press.score(module, hidden, keys, values, weights, kwargs)
    except Exception as error:  # a press is foreign code: whatever it raises, say where
        raise UnsupportedCache(
            f"{type(press).__name__} cannot score layer {index} ({type(module).__name__}, {keys.shape[2]} tokens): "
            f"{type(error).__name__}: {error}"
        ) from error
    if tuple(scores.shape) != tuple(keys.shape[:3]):
        raise UnsupportedCache(
            f"{type(press).__name__} gave scores {tuple(scores.shape)} for keys {tuple(keys.shape)} of layer {index}"
        )
    if bool(scores.isnan().any()):
        raise UnsupportedCache(f"{type(press).__name__} gave NaN for tokens of layer {index}: they cannot be ranked")
    return scores


class _Rotary:
    """The model's rotary embedding as presses call it, for one attention module.

    Presses count positions from the first token that a layer holds, and know of one embedding for all layers; models
    with sliding windows hold later tokens only, and some (Gemma 3) have an embedding for each type of layer.

    Attributes:
        first: position of the first token that the layer holds.
    """

    def __init__(self, embed: nn.Module, module: Any):
        self.embed, self.first = embed, 0
        self.named: dict[str, Any] = {}
        if "layer_type" in inspect.signature(embed.forward).parameters:
            types = module.config.layer_types
            self.named["layer_type"] = types[module.layer_idx]

    def __call__(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.embed(x, position_ids + self.first, **self.named)


@contextlib.contextmanager
def _hooks(model: PreTrainedModel, record: Any) -> Iterator[None]:
    """``record`` after each attention module; each has its model's ``rotary_emb`` meanwhile, as presses expect."""
    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "o_proj")]
    if not modules:
        raise UnsupportedCache(f"no attention module of {type(model).__name__} is of a kind that kvpress knows")
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    handles, lent = [], []
    try:
        for module in modules:
            if rotary is not None and not hasattr(module, "rotary_emb"):
                # Beside torch's registry of submodules, so that the model's own structure stays as it is.
                object.__setattr__(module, "rotary_emb", _Rotary(rotary, module))
                lent.append(module)
            handles.append(module.register_forward_hook(record, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in lent:
            object.__delattr__(module, "rotary_emb")
