"""The identity of a live model: enough to tell whether a cache was made for it.

The hash of the weights is computed anew at each call. It cannot be cached safely: a change through ``weight.data``
leaves no trace that torch keeps, and the whole sample takes tens of milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvferry.errors import InvalidInput
from kvferry.hf.compat import VERSION
from kvferry.hf.facts import config_facts
from kvferry.hf.geometry import geometry_of, text_config
from kvferry.hf.models import loaded_as
from kvferry.snapshot import Identity, dtype_name
from kvferry.version import __version__

SAMPLES = 4096
"""Elements of each weight tensor that the hash reads; a tensor of no more is read whole."""

_WRAPPERS = ("module.", "_orig_mod.")
"""What `torch.nn.DataParallel` and `torch.compile` put before the names of the model in them."""


def identity_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    construction: tuple[str, ...] = ("prefill",),
    full_hash: bool = False,
) -> Identity:
    """The identity of ``model`` as it is now.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; when it came from `load_model`, the one loaded with it is taken if none is given.
        construction: how the cache in question came about.
        full_hash: hash every byte of the weights too (about a second a gigabyte).

    Raises:
        UnsupportedCache: the model's cache is of a kind that kvferry does not carry; see `geometry_of`.
    """
    layers = geometry_of(model)
    known = loaded_as(model)
    if tokenizer is None and known is not None:
        tokenizer = known.tokenizer
    config = text_config(model)
    facts = config_facts(config)
    return Identity(
        model=known.name if known is not None else str(getattr(model, "name_or_path", "") or type(model).__name__),
        revision=None if known is None else known.revision,
        weights=weights_hash(facts, named_weights(model)),
        full_weights=weights_hash(facts, named_weights(model), full=True) if full_hash else None,
        layers=layers,
        dtype=dtype_name(model.dtype),
        tokenizer=None if tokenizer is None else tokenizer_hash(tokenizer),
        attention=getattr(config, "_attn_implementation", None),
        transformers=VERSION,
        kvferry=__version__,
        construction=construction,
    )


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight and saved buffer once, under the name that its checkpoint has.

    The prefixes of wrappers around the model are off, and so is what `torch.compile` puts before a part compiled for
    itself; a tied head is left out.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((_plain(name), weight.detach()) for name, weight in model.named_parameters())
    yield from ((_plain(name), value) for name, value in model.state_dict().items() if name not in parameters)


def _plain(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name.replace("._orig_mod.", ".")


def weights_hash(
    config_facts: Mapping[str, Any], named_tensors: Iterable[tuple[str, Tensor]], full: bool = False
) -> str:
    """Hash of a model's weights: names, shapes, dtypes and, of every tensor, a sample of its elements' bytes.

    The sample of a tensor depends on its shape alone, not on how it lies in memory, and the order of
    ``named_tensors`` does not matter: an engine that fuses projections gets the same hash from the split parts.

    Args:
        config_facts: `config_facts`, or the same from another source.
        named_tensors: (name in the checkpoint, tensor); a tied output head is not among them.
        full: hash all elements instead of at most `SAMPLES` of each tensor.

    Returns:
        ``sha256:`` or, when full, ``sha256-full:`` with 64 hexadecimal digits.

    Raises:
        InvalidInput: two tensors have the same name.
    """
    entries: dict[str, bytes] = {}
    for name, tensor in named_tensors:
        if name in entries:
            raise InvalidInput(f"two weights are named {name!r}; the hash needs names that tell them apart")
        head = f"{name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)}\n".encode()
        digest = hashlib.sha256(head)
        for piece in _pieces(tensor) if full else (_sample(tensor),):
            digest.update(piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        entries[name] = digest.digest()
    whole = hashlib.sha256(json.dumps(dict(config_facts), sort_keys=True).encode())
    for name in sorted(entries):
        whole.update(entries[name])
    return f"{'sha256-full' if full else 'sha256'}:{whole.hexdigest()}"


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of vocabulary, merges, added and special tokens.

    A vocabulary of a quarter million tokens takes a second or two, so the hash is kept for as long as the tokenizer
    has the same length and special tokens.
    """
    state = (len(tokenizer), *sorted(f"{role} {text!r}" for role, text in tokenizer.special_tokens_map.items()))
    known = _tokenizer_hashes.get(tokenizer)
    if known is not None and known[0] == state:
        return known[1]
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        digest.update(f"added {index} {token.content!r} {token.special} {token.lstrip} {token.rstrip}\n".encode())
    for special in state[1:]:
        digest.update(f"special {special}\n".encode())
    for merge in _merges(tokenizer):
        digest.update(f"merge {merge}\n".encode("utf-8", "surrogatepass"))
    value = f"sha256:{digest.hexdigest()}"
    _tokenizer_hashes[tokenizer] = (state, value)
    return value


_tokenizer_hashes: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple[Any, ...], str]] = (
    weakref.WeakKeyDictionary()
)


def _merges(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    text, key = backend.to_str(), '"merges":'
    start = text.rfind(key)  # in a token's own text its quotes are escaped
    if start < 0:
        return
    # Only the list of merges is parsed: the vocabulary before it is known, and takes longer.
    for merge in json.JSONDecoder().raw_decode(text, start + len(key))[0]:
        yield merge if isinstance(merge, str) else " ".join(merge)


def _sample(tensor: Tensor) -> Tensor:
    count = tensor.numel()
    if count <= SAMPLES:
        return tensor
    index = _indices(count).to(tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1).index_select(0, index)
    return tensor[torch.unravel_index(index, tensor.shape)]


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in row-major order, in pieces small enough to be copied one at a time."""
    if tensor.dim() < 2:
        yield tensor
        return
    rows = max(1, (1 << 22) // max(1, tensor[0].numel()))
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows]


@lru_cache(maxsize=1024)
def _indices(count: int) -> Tensor:
    """`SAMPLES` indices below ``count``: one in each of as many equal strata, first and last element among them.

    Within its stratum an index moves along by the golden ratio, so that the samples never line up with the rows or
    columns of a matrix, as a fixed stride can. Integer arithmetic: the same on every machine.
    """
    stratum = torch.arange(SAMPLES, dtype=torch.int64)
    shift = (stratum * 40_503) % 65_536  # 65,536 / golden ratio
    index = (stratum * 65_536 + shift) * count // (SAMPLES * 65_536)
    index[0], index[-1] = 0, count - 1
    return index
