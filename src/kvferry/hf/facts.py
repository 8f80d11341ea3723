"""What of a model's configuration changes what the model computes, and so belongs into the hash of its weights.

Everything does, but for the settings named here with their reason: a behaviour that nobody has thought of is then in
the hash, and at worst a cache is refused that would have fitted.

The hash must be the same under every transformers version that runs the model, although versions add settings. So
what says "not this" (``None``, ``False``, an empty list) is left out wherever it stands by a name: a new setting
comes in switched off. One that comes in with another value changes the hash, and gets a line below where it should
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

_IGNORED = frozenset(
    (
        # how it is called, where it came from, who wrote the file
        *("name_or_path", "architectures", "auto_map", "custom_pipelines", "transformers_version"),
        *("transformers.js_config", "quantization_config"),
        # fields of the identity: dtype, rotary embedding, kinds of layers, shapes of the cache
        *("dtype", "torch_dtype", "layer_types", "num_key_value_heads", "head_dim"),
        *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
        *("rotary_pct", "rotary_emb_base"),
        # shown by the weights: a tied head is not among them
        "tie_word_embeddings",
        # how it is computed or handed back, not what
        *("use_cache", "return_dict", "use_return_dict", "torchscript", "attn_implementation", "attn_impl"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("chunk_size_feed_forward", "pretraining_tp"),
        # training and classification heads
        *("problem_type", "id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params"),
        *("gradient_checkpointing", "rescale_prenorm_residual", "router_jitter_noise"),
    )
)
_IGNORED_ENDINGS = (
    *("_token_id", "_token_ids"),  # what a prompt may hold, not what comes of it
    *("dropout", "_pdrop", "_drop", "layerdrop", "dropout_prob", "drop_rate"),  # nothing outside of training
    *("initializer_range", "initializer_factor", "init_std", "_loss_coef"),  # training
)
_IGNORED_BEGINNINGS = ("_", "summary_")  # private bookkeeping; heads for classification


def config_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a configuration that go into the hash of the weights, in a form that JSON gives back.

    Floats are rounded to six digits, since formats of checkpoints keep them in different precision, and are integers
    where they are whole.
    """
    facts: dict[str, Any] = _facts_of(config.to_dict())
    return facts


def is_ignored(name: str) -> bool:
    """Whether a setting of this name is left out of the hash."""
    return name in _IGNORED or name.startswith(_IGNORED_BEGINNINGS) or name.endswith(_IGNORED_ENDINGS)


def _facts_of(value: Any) -> Any:
    if isinstance(value, Mapping):
        named = {str(name): _facts_of(item) for name, item in value.items() if not is_ignored(str(name))}
        return {name: item for name, item in named.items() if not _says_nothing(item)}
    if isinstance(value, list | tuple):
        return [_facts_of(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, float):
        rounded = float(f"{value:.6g}")
        return int(rounded) if rounded.is_integer() else rounded
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in ([], {})
