"""``kvferry map eval`` and ``kvferry map gate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command, model_options, prompt_text, working
from kvferry.cli.map import chosen_layers
from kvferry.cli.progress import progress
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from kvferry.evaluate.map_arms import Arm
    from kvferry.evaluate.map_eval import ArmResult
    from kvferry.evaluate.map_rates import TaskResult
    from kvferry.map.mapper import Mapper


Function = TypeVar("Function", bound=Callable[..., Any])


def _judging(*, windows: int, prefix: int, suffix: int) -> Callable[[Function], Function]:
    """The options of what a mapper is judged on."""
    options = (
        click.option("--text", metavar="FILE", help="None that it was fitted on. [default: Python's topics]"),
        click.option("--source", "source_name", metavar="MODEL", help="[default: as the mapper names it]"),
        click.option("--target", "target_name", metavar="MODEL", help="[default: as the mapper names it]"),
        click.option("--windows", type=click.IntRange(2), default=windows, show_default=True, help="Of the text."),
        click.option("--prefix", type=click.IntRange(2), default=prefix, show_default=True, help="Tokens mapped."),
        click.option("--suffix", type=click.IntRange(1), default=suffix, show_default=True, help="Tokens scored."),
    )

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


@command("map eval")
@click.argument("folder", metavar="DIR")
@_judging(windows=8, prefix=512, suffix=256)
@click.option(
    "--native",
    "natives",
    metavar="N,N",
    help="Numbers of first tokens that the target prefills itself. [default: as fitted, and 0]",
)
@click.option(
    "--recompute-last",
    "lasts",
    metavar="N,P%",
    help="Beside that: numbers of last tokens computed anew, or shares of all such as 10%.",
)
@click.option(
    "--recompute",
    "shares",
    metavar="CHOOSER:SHARE,…",
    help="Beside that: choosers (attention, spread, last, error) and shares of all tokens, such as attention:0.1.",
)
@click.option("--tasks", metavar="FILE", help='Questions too: a line {"ctx": …, "endings": […], "label": …} each.')
@click.option("--items", type=click.IntRange(1), default=400, show_default=True, help="Questions, of that file.")
@click.option("--needle", is_flag=True, help="Needles in haystacks of 512 and 1,024 tokens, too.")
@click.option(
    "--controls",
    type=click.Choice(("all", "few")),
    default="all",
    show_default=True,
    help="few: no prefix, and the target's own cache once.",
)
@click.option(
    "--control-items",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="First questions and needles that the controls are tried on, too.",
)
@click.option("--log", metavar="FILE", help="Keep answers there as they come; a run that was killed goes on from them.")
@model_options
def evaluate(
    common: Common,
    folder: str,
    text: str | None,
    source_name: str | None,
    target_name: str | None,
    windows: int,
    prefix: int,
    suffix: int,
    natives: str | None,
    lasts: str | None,
    shares: str | None,
    tasks: str | None,
    items: int,
    needle: bool,
    controls: str,
    control_items: int,
    log: str | None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Judge the mapper in DIR by what the target makes of its caches.

    The target scores the same tokens after its own prefill, after the mapped cache, and after controls: no context, a
    cache of zeros, the mapped cache shuffled, another text's, and its own through the whole path; beside them stands
    the source model alone. Status 1 where the target's own cache does not score exactly as it does by itself.
    """
    words = prompt_text(None, text, needed=False)
    arms = arms_of(natives, lasts, shares)
    common.set_threads()
    mapper, source, target, tokenizer, words = loaded(common, folder, source_name, target_name, words)
    from kvferry.evaluate.map_arms import CONTROLS
    from kvferry.evaluate.map_eval import MapEvalSettings, evaluate_mapper

    questions = None if tasks is None else _questions(tasks, tokenizer, items)
    chosen = CONTROLS if controls == "all" else ()
    settings = MapEvalSettings(windows, prefix, suffix, arms, chosen, common.seed)
    how: dict[str, Any] = {"controls": control_items, "log": log, "seed": common.seed}
    with progress() as told:
        report = evaluate_mapper(mapper, source, target, tokenizer, words, settings, on_step=told)
        done = _tasks(mapper, source, target, tokenizer, arms, tasks, questions, needle, {**how, "on_step": told})
    result = {
        "path": folder,
        "source": mapper.source.model,
        "target": mapper.target.model,
        "r2": mapper.measures.get("r2", {}),
        "layers_chosen": chosen_layers(mapper),
        **report.to_json(),
        "tasks": [task.to_json() for task in done],
        "checks_failed": not report.identity_exact,
    }

    def show() -> None:
        seconds = result["seconds"]
        tables.show_pairs(
            {
                "mapper": f"{mapper.source.model} -> {mapper.target.model}, {mapper.digest[:16]}",
                "scored": f"{windows} windows of {prefix} + {suffix} tokens",
                "identity": "exact" if report.identity_exact else "NOT exact: no row below counts",
                "target's own prefill": tables.seconds(seconds["prefill"]),
                "transfer": f"{tables.seconds(seconds['transfer'])} ({seconds['speedup'] or 0:.1f} times faster)",
            }
        )
        tables.show_rows(
            ("target goes on from", "ppl", "KL", "top-1", "context gain", "interval", "cosine", "computed"),
            [_row(row) for row in report.rows],
        )
        if done:
            head = ("task", "cache", "n", "source", "target", "mapped", "retention", "floor-normalised")
            tables.show_rows(head, [_task_row(task) for task in done])

    return result, show


def _questions(path: str, tokenizer: Any, items: int) -> Any:
    from kvferry.evaluate.map_tasks import read_choices

    return read_choices(path, tokenizer, items)


def _tasks(
    mapper: Mapper,
    source: Any,
    target: Any,
    tokenizer: Any,
    arms: tuple[Arm, ...],
    path: str | None,
    questions: Any,
    needle: bool,
    how: dict[str, Any],
) -> list[TaskResult]:
    """What ``--tasks`` and ``--needle`` ask for."""
    from kvferry.evaluate.map_tasks import judge_choices, judge_needles
    from kvferry.evaluate.needle import NeedleGrid

    found: list[TaskResult] = []
    if path is not None:
        name = Path(path).stem
        found += judge_choices(mapper, source, target, questions, arms, name=name, **how)
    if needle:
        grid = NeedleGrid(lengths=(512, 1024), depths=(0.0, 0.25, 0.5, 0.75, 1.0), seed=how["seed"])
        found += judge_needles(mapper, source, target, tokenizer, grid, arms, **how)
    return found


def _task_row(task: TaskResult) -> tuple[str, ...]:
    rates = (f"{task.source:.3f}", f"{task.target:.3f}", f"{task.mapped:.3f}")
    return (task.name, task.arm, str(task.n), *rates, _number(task.retention, 3), _number(task.retention_floor, 3))


def _row(row: ArmResult) -> tuple[str, ...]:
    data = row.to_json()
    gain = row.gain
    return (
        row.name,
        _number(row.perplexity.ppl, 2),
        _number(row.fidelity.kl_mean, 4),
        _number(row.fidelity.top1_agreement, 3),
        _number(gain.recovered, 3),
        "" if gain.ci is None else f"{gain.ci[0]:.3f} … {gain.ci[1]:.3f}",
        _number(data["attention_cosine"], 3),
        "" if row.share is None else f"{100 * row.share:.1f}%",
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def arms_of(natives: str | None, lasts: str | None, shares: str | None) -> tuple[Arm, ...]:
    """The arms that the options name, the mapper's own first.

    Raises:
        InvalidInput: what is no number, or no chooser.
    """
    from kvferry.evaluate.map_arms import Arm
    from kvferry.evaluate.map_choose import CHOOSERS

    arms = [Arm("mapped")]
    for item in _items(natives if natives is not None else "0"):
        arms.append(Arm(f"native {item}", native_prefix=_count(item)))
    for item in _items(lasts or ""):
        if item.endswith("%"):
            arms.append(Arm(f"last {item} computed", last_share=_percent(item)))
        else:
            arms.append(Arm(f"last {item} computed", recompute_last=_count(item)))
    for item in _items(shares or ""):
        name, _, share = item.partition(":")
        try:
            part = float(share)
        except ValueError:
            part = -1.0
        if name not in CHOOSERS or not 0 < part <= 1:
            raise InvalidInput(f"--recompute {item}: one of {', '.join(CHOOSERS)} and a share, such as attention:0.1")
        arms.append(Arm(f"{name} {part:g} computed", chooser=name, share=part))
    return tuple(arms)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidInput(f"{text!r} is no number of tokens")
    return int(text)


def _percent(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InvalidInput(f"{text!r} is no share of tokens, such as 10%")
    return share


def loaded(
    common: Common, folder: str, source_name: str | None, target_name: str | None, text: str | None
) -> tuple[Mapper, Any, Any, Any, str]:
    """The mapper in a folder, its two models, their tokenizer, and the text or the default one."""
    from kvferry.map.mapper import Mapper

    mapper = Mapper.from_pretrained(folder)
    wanted = common.dtype
    dtype, attn = common.fill_defaults(mapper.target.dtype, mapper.target.attention)
    with working(f"loading {mapper.source.model} and {mapper.target.model}"):
        from kvferry.hf.models import load_model
        from kvferry.hf.text import default_part

        source, tokenizer = load_model(
            source_name or mapper.source.model, dtype=wanted or mapper.source.dtype, attn=attn
        )
        target = load_model(target_name or mapper.target.model, dtype=dtype, attn=attn)[0]
    return mapper, source, target, tokenizer, text or default_part(judged=True)


@command("map gate")
@click.argument("folder", metavar="DIR")
@_judging(windows=6, prefix=256, suffix=64)
@click.option(
    "--floor",
    "floors",
    metavar="NAME=VALUE",
    multiple=True,
    help="attention_cosine, kl, agreement, context_gain, control_margin or native_prefix; several.",
)
@click.option("--keep/--no-keep", default=True, show_default=True, help="Keep the record, which hand-offs ask for.")
@model_options
def gate(
    common: Common,
    folder: str,
    text: str | None,
    source_name: str | None,
    target_name: str | None,
    windows: int,
    prefix: int,
    suffix: int,
    floors: tuple[str, ...],
    keep: bool,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Accept or reject the mapper in DIR by the receiver's own floors, on the receiver's own text.

    Another text's mapped cache is offered as a control, and has to score clearly worse. The record is bound to the
    mapper and to the weights of both models. Status 1: rejected.
    """
    words = prompt_text(None, text, needed=False)
    bar = floors_of(floors)
    common.set_threads()
    mapper, source, target, tokenizer, words = loaded(common, folder, source_name, target_name, words)
    from kvferry.evaluate.map_gate import accept

    began = time.perf_counter()
    with progress() as told:
        found = accept(
            mapper,
            source,
            target,
            tokenizer,
            words,
            floors=bar,
            windows=windows,
            prefix=prefix,
            suffix=suffix,
            seed=common.seed,
            on_step=told,
        )
    kept = str(found.save()) if keep else None
    result = {
        **found.to_json(),
        "path": folder,
        "kept": kept,
        "seconds": time.perf_counter() - began,
        "checks_failed": not found.accepted,
    }

    def show() -> None:
        measured = found.measured
        tables.show_pairs(
            {
                "mapper": f"{mapper.source.model} -> {mapper.target.model}, {mapper.digest[:16]}",
                "accepted": "yes" if found.accepted else "no",
                **{f"because {place + 1}": reason for place, reason in enumerate(found.reasons)},
                "attention cosine": tables.small(measured.attention_cosine),
                "KL": f"{tables.small(measured.kl)} (another text's cache: {tables.small(measured.control_kl)})",
                "top-1 agreement": tables.small(measured.agreement),
                "context gain": f"{tables.small(measured.context_gain)}, at least "
                f"{tables.small(measured.context_gain_low)}",
                **({} if kept is None else {"kept": kept}),
            }
        )

    return result, show


def floors_of(given: tuple[str, ...]) -> Any:
    """Floors with some of them set. Raises `InvalidInput` for an unknown name, or what is no number."""
    from dataclasses import replace

    from kvferry.map.gate import Floors

    bar = Floors()
    for item in given:
        name, _, value = item.partition("=")
        if name not in bar.to_json():
            raise InvalidInput(f"--floor {item}: {', '.join(bar.to_json())} are, as in kl=0.3")
        try:
            none = name == "context_gain" and value == "none"
            changed: dict[str, Any] = {name: None if none else float(value)}
            bar = replace(bar, **changed)
        except ValueError as error:
            raise InvalidInput(f"--floor {item}: {error}") from error
    return bar
