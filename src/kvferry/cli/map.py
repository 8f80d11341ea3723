"""``kvferry map``: fit and apply; eval and explain have files of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, check_output, command, model_options, prompt_text, working
from kvferry.cli.lazy import LazyGroup
from kvferry.cli.progress import progress
from kvferry.errors import InvalidInput
from kvferry.evidence.machine import peak_memory

Item = TypeVar("Item")

COMMANDS = {
    "fit": ("kvferry.cli.map:fit", "Fit a mapper of SOURCE's caches to TARGET's."),
    "eval": ("kvferry.cli.map_eval:evaluate", "Judge a mapper by what the target makes of its caches."),
    "gate": ("kvferry.cli.map_eval:gate", "Accept or reject a mapper by the receiver's own floors."),
    "apply": ("kvferry.cli.map:apply", "Map a snapshot."),
    "explain": ("kvferry.cli.map_explain:explain", "Show which layers a mapper is made of, and how well each serves."),
}


@click.group("map", cls=LazyGroup, lazy=COMMANDS)
def map_group() -> None:
    """Turn one model's cache into another's."""


def layers_wanted(text: str) -> int | None:
    """``--top-k``: a number of layers, or ``all``. Raises `InvalidInput` for anything else."""
    if text == "all":
        return None
    if not text.isdecimal() or not text.isascii() or not 0 < int(text) < 10_000:
        raise InvalidInput(f"--top-k {text}: a number of source layers, or all")
    return int(text)


def ridge_wanted(text: str) -> float:
    """``--ridge``: a number that is not negative. Raises `InvalidInput` for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise InvalidInput(f"--ridge {text}: a number, not negative")
    return value


def several(text: str, read: Callable[[str], Item], option: str) -> list[Item]:
    """The items of a list with commas. Raises `InvalidInput` for none."""
    items = [read(item.strip()) for item in text.split(",") if item.strip()]
    if not items:
        raise InvalidInput(f"{option} {text!r}: give at least one")
    return items


@command("map fit")
@click.argument("source")
@click.argument("target")
@click.option(
    "--text",
    "texts",
    metavar="FILE",
    multiple=True,
    help="What caches are made of; several. [default: Python's own reference topics]",
)
@click.option("-o", "--output", required=True, metavar="DIR", help="The mapper's folder.")
@click.option(
    "--top-k",
    default="4",
    show_default=True,
    metavar="K,…",
    help="Source layers a target layer, or all; of several the best on the tokens held out.",
)
@click.option(
    "--variant",
    default="ridge",
    show_default=True,
    help="ridge, head_local, ridge+residual, mlp, ridge+e2e or residual+e2e.",
)
@click.option("--ridge", "ridges", default="0.01", show_default=True, metavar="λ,…", help="Of several the best, too.")
@click.option(
    "--sources",
    type=click.Choice(("same", "both")),
    default="same",
    show_default=True,
    help="Keys from keys and values from values, or each from both.",
)
@click.option("--native-prefix", type=click.IntRange(0), default=4, show_default=True, help="First tokens left out.")
@click.option(
    "--strip/--no-strip", default=True, help="Take rotary positions off the keys first; --no-strip: an ablation."
)
@click.option("--reapply/--no-reapply", default=True, help="Put the target's on at the end; --no-reapply: an ablation.")
@click.option("--sequences", type=click.IntRange(5), default=160, show_default=True, help="Of the text, at most.")
@click.option("--length", type=click.IntRange(8), default=1024, show_default=True, help="Tokens of each.")
@click.option("--stride", type=click.IntRange(1), default=4, show_default=True, help="Take every so many-th token.")
@click.option(
    "--reach",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="How far apart in depth a source layer may lie; less: less memory.",
)
@click.option("--epochs", type=click.IntRange(1), help="Of a trained variant. [default: as the variant's]")
@click.option("--train-sequences", type=click.IntRange(1), help="Of those, how many a trained variant learns from.")
@click.option("--resume", metavar="DIR", help="Keep moments and training there, and go on from them after a kill.")
@model_options
def fit(
    common: Common,
    source: str,
    target: str,
    texts: tuple[str, ...],
    output: str,
    top_k: str,
    variant: str,
    ridges: str,
    sources: str,
    native_prefix: int,
    strip: bool,
    reapply: bool,
    sequences: int,
    length: int,
    stride: int,
    reach: float,
    epochs: int | None,
    train_sequences: int | None,
    resume: str | None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Fit a mapper of SOURCE's caches to TARGET's, and write it to a folder.

    The two must be a matched-KV pair: the same kv heads, head size and tokenizer. Both run over the text once; no
    cache is kept. One sequence of five is held out, to choose source layers by and to measure.
    """
    counts, weights = several(top_k, layers_wanted, "--top-k"), several(ridges, ridge_wanted, "--ridge")
    if Path(output).exists() and not Path(output).is_dir():
        raise InvalidInput(f"cannot write {output}: it is a file; give a folder")
    from kvferry.map.artifact import require_place

    require_place(output)
    words = [text for name in texts if (text := prompt_text(None, name)) is not None]
    common.set_threads()
    dtype, attn = common.fill_defaults()
    with working(f"loading {source} and {target}"):
        from kvferry.evaluate import map_fit
        from kvferry.hf.models import load_model
        from kvferry.hf.text import default_part
        from kvferry.map.fit import r2_table
        from kvferry.map.mapper import Recipe

        map_fit.require_variant(variant)
        first = load_model(source, dtype=dtype, attn=attn)[0]
        second = load_model(target, dtype=dtype, attn=attn)[0]
    training = training_of(variant, epochs, train_sequences)
    began = time.perf_counter()
    with progress() as told:
        run = map_fit.collect(
            first,
            second,
            words or default_part(judged=False),
            Recipe(variant, counts[0], weights[0], sources, strip, reapply, native_prefix),
            settings=map_fit.FitSettings(sequences, length, stride, reach),
            resume=resume,
            on_step=told,
        )
        rows = r2_table(run.calibration, counts, weights) if len(counts) * len(weights) > 1 else []
        if rows:
            map_fit.choose_best(run, rows)
        mapper = map_fit.finish(first, second, run, training=training, seed=common.seed, resume=resume, on_step=told)
    seconds = max(float(mapper.made["fit_seconds"]), run.earlier + time.perf_counter() - began)
    mapper.save_pretrained(output)
    r2 = mapper.measures["r2"]
    result = {
        "path": output,
        "digest": mapper.digest,
        "bytes": sum(path.stat().st_size for path in Path(output).iterdir() if path.is_file()),
        "parameters": mapper.parameters,
        "variant": variant,
        "top_k": mapper.recipe.top_k,
        "r2": r2,
        "r2_mean": {side: sum(values) / len(values) for side, values in r2.items()},
        "layers_chosen": chosen_layers(mapper),
        "ridge": mapper.recipe.ridge,
        "tries": rows,
        "moments_bytes": run.calibration.nbytes,
        "peak_bytes": peak_memory(),
        "taken_up": run.earlier > 0,
        "made": dict(mapper.made),
        "seconds": {"fit": seconds, "models": run.model_seconds, "ratio": seconds / run.model_seconds},
    }

    def show() -> None:
        tables.show_pairs(
            {
                "path": output,
                "digest": mapper.digest,
                "parameters": f"{mapper.parameters:,}",
                "bytes": tables.number_of_bytes(result["bytes"]),
                "fitted on": f"{mapper.made['tokens_fit']:,} tokens, {mapper.made['tokens_held']:,} held out",
                "held-out R², keys": f"{result['r2_mean']['keys']:.4f}",
                "held-out R², values": f"{result['r2_mean']['values']:.4f}",
                "fit": f"{tables.seconds(seconds)} ({tables.seconds(run.model_seconds)} of it the two models)",
            }
        )
        if rows:
            shown = [
                (str(row["top_k"] or "all"), f"{row['ridge']:g}", f"{row['keys']:.4f}", f"{row['values']:.4f}")
                for row in rows
            ]
            tables.show_rows(("layers", "λ", "R² keys", "R² values"), shown)

    return result, show


def training_of(variant: str, epochs: int | None, sequences: int | None) -> Any:
    """Settings of a trained variant with some of them changed; ``None`` for the others.

    Raises:
        InvalidInput: they are given for a variant that is not trained.
    """
    from kvferry.map.train import VARIANTS

    given = {"epochs": epochs, "sequences": sequences}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if variant not in VARIANTS:
        if changed:
            raise InvalidInput(f"variant {variant} is not trained: leave --epochs and --train-sequences out")
        return None
    return replace(VARIANTS[variant], **changed)


def chosen_layers(mapper: Any) -> dict[str, list[list[list[object]]]]:
    """For each side and target layer, the source blocks of its parts."""
    found: dict[str, list[list[list[object]]]] = {"keys": [], "values": []}
    for side, rows in found.items():
        for layer in range(len(mapper.target.layers)):
            mine = [part for part in mapper.parts if (part.target.layer, part.target.side) == (layer, side)]
            rows.append([block.to_json() for block in dict.fromkeys(b for part in mine for b in part.sources)])
    return found


@command("map apply")
@click.argument("folder", metavar="DIR")
@click.argument("path", metavar="SNAPSHOT")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write the target's snapshot.")
@click.option("--extend", "before", metavar="FILE", help="A snapshot of the target that has the first tokens already.")
@click.option(
    "--target", "model", metavar="MODEL", help="Load the target, so that it prefills the first tokens itself."
)
@click.option("--native-prefix", type=click.IntRange(0), help="How many of them. [default: as the mapper was fitted]")
@click.option(
    "--recompute-last",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Last tokens that the target computes anew.",
)
@model_options
def apply(
    common: Common,
    folder: str,
    path: str,
    output: str,
    before: str | None,
    model: str | None,
    native_prefix: int | None,
    recompute_last: int,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Map SNAPSHOT, of the source of the mapper in DIR, to a snapshot of its target.

    Without --target no model is loaded, and the first tokens are mapped like the rest; they matter most, and come out
    worst.
    """
    check_output(output, path, *(() if before is None else (before,)))
    if model is None and (native_prefix or recompute_last):
        raise InvalidInput("--native-prefix and --recompute-last need the target's model: give --target")
    if model is not None and before is not None:
        raise InvalidInput("--extend goes on from a cache that has its first tokens: leave --target out")
    common.set_threads()
    from kvferry.map.mapper import Mapper
    from kvferry.snapshot import Snapshot

    mapper = Mapper.from_pretrained(folder)
    snapshot = Snapshot.load(path)
    stages: dict[str, float]
    if model is None:
        began = time.perf_counter()
        made = mapper.map(snapshot) if before is None else mapper.extend(Snapshot.load(before), snapshot)
        stages, computed = {"map": time.perf_counter() - began}, 0
    else:
        from kvferry.evaluate.map_run import transfer
        from kvferry.hf.models import load_model

        dtype, attn = common.fill_defaults(mapper.target.dtype, mapper.target.attention)
        with working(f"loading {model}"):
            target = load_model(model, dtype=dtype, attn=attn)[0]
        done = transfer(mapper, target, snapshot, native_prefix=native_prefix, recompute_last=recompute_last)
        made, stages, computed = done.snapshot, done.seconds, done.computed
    size = made.save(output)
    result = {
        "path": output,
        "mapper": mapper.digest,
        "tokens": made.seq_len,
        "computed_tokens": computed,
        "bytes": size,
        "construction": list(made.identity.construction),
        "seconds": stages,
    }

    def show() -> None:
        tables.show_pairs(
            {
                "path": output,
                "model": made.identity.model,
                "tokens": f"{made.seq_len:,}, {computed:,} of them computed by the target",
                "bytes": tables.number_of_bytes(size),
                **{name: tables.seconds(value) for name, value in stages.items()},
            }
        )

    return result, show
