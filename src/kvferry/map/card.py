"""The model card of a mapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.map.mapper import Mapper


def model_card(mapper: Mapper, nbytes: int) -> str:
    """Markdown: what the mapper maps, how it was made, how well it does on held-out tokens, and how it is used."""
    recipe, made = mapper.recipe, mapper.made
    r2 = mapper.measures.get("r2", {})
    lines = [
        "---",
        "library_name: kvferry",
        "tags: [kv-cache, kvferry-mapper]",
        "---",
        f"# Key-value caches of {mapper.source.model} for {mapper.target.model}",
        "",
        f"A `{recipe.variant}` mapper of kvferry: a cache that {mapper.source.model} prefilled becomes one that "
        f"{mapper.target.model} goes on from.",
        "",
        "| | |",
        "|---|---|",
        f"| source | {mapper.source.model}, {len(mapper.source.layers)} layers, {mapper.source.dtype}, "
        f"`{mapper.source.weights}` |",
        f"| target | {mapper.target.model}, {len(mapper.target.layers)} layers, {mapper.target.dtype}, "
        f"`{mapper.target.weights}` |",
        f"| source layers a target layer | {recipe.top_k or 'all'}; "
        f"{'keys and values from both' if recipe.sources == 'both' else 'keys from keys, values from values'} |",
        f"| ridge | {recipe.ridge:g} |",
        f"| rotary positions | {'taken off' if recipe.strip else 'left on'}, "
        f"{'put back on' if recipe.reapply else 'not put back on'} |",
        f"| first tokens left to the target | {recipe.native_prefix} |",
        f"| parameters | {mapper.parameters:,} ({nbytes:,} bytes) |",
        f"| digest | `{mapper.digest}` |",
        *(
            f"| {name.replace('_', ' ')} | {_shown(value)} |"
            for name, value in made.items()
            if not isinstance(value, list | dict)
        ),
        "",
        "## Held-out R²",
        "",
        "Of tokens that were not fitted on; the source layers were chosen by them. R² alone does not say how well the "
        "target goes on from a mapped cache: run `kvferry map eval` on text of your own.",
        "",
        f"Mean over layers and heads: keys {_mean(r2.get('keys', ()))}, values {_mean(r2.get('values', ()))}.",
        "",
        "## Use",
        "",
        "```python",
        "import kvferry as kv",
        "",
        'mapper = kv.Mapper.from_pretrained("this folder")',
        "snapshot_b = mapper.map(snapshot_a)",
        "snapshot_b = mapper.extend(snapshot_b, longer_snapshot_a)",
        "```",
        "",
        "It takes caches of the very source named above, by the hash of its weights, and of no other.",
        "",
    ]
    return "\n".join(lines)


def _mean(values: Sequence[Any]) -> str:
    known = [value for value in values if isinstance(value, int | float)]
    return f"{sum(known) / len(known):.3f}" if known else "not measured"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
