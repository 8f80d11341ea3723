"""What engines do with kvferry, as one page of Markdown; every number comes out of the studies' JSON files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import InvalidInput
from kvferry.report.files import writable_folder
from kvferry.report.page import read
from kvferry.report.tables import made_with, markdown
from kvferry.snapshot.files import write_text

Row = Mapping[str, Any]


def write_engines_page(folder: Path, files: Iterable[Path]) -> str:
    """Write ``engines.md`` into ``folder``; returns its path.

    Args:
        folder: made where it is missing.
        files: ``engines-….json``, as the studies write them: of vLLM, and of lm-evaluation-harness.

    Raises `InvalidInput` where a file is none of these.
    """
    found = {path.stem.removeprefix("engines-"): read(path) for path in files}
    lines = [
        "# Engines",
        "",
        "Made from the JSON files beside it by `make results-engines`; not edited by hand. Brackets hold 95%",
        "intervals: Wilson's of a rate, by bootstrap over prompts of a mean.",
        "",
    ]
    for name, content in found.items():
        section = _SECTIONS.get(str(content["command"]))
        if section is None or content["result"] is None:
            raise InvalidInput(f"engines-{name}.json is no result of a study of engines, or one that failed")
        lines += [*section(content["result"]), f"Made with {made_with(content['environment'])} (`{name}`).", ""]
    page = writable_folder(folder) / "engines.md"
    write_text(page, "\n".join(lines))
    return str(page)


_VLLM_HEAD = (
    "engine",
    "answers equal",
    "to the bit",
    "margin",
    "failed",
    "same first token",
    "KL of the first token",
    "tokens not computed",
    "preemptions",
    "store, bytes",
    "prompt tokens/s",
    "first token, s",
    "one by one, s",
)


def _vllm(result: Row) -> list[str]:
    rows = result["rows"]
    refusal = result["refusal"]
    told = (
        f"A consumer of another model raises `{refusal['error']}`, which names {', '.join(refusal['differences'])}."
        if refusal["error"]
        else "**A consumer of another model was not refused.**"
    )
    loads = [row for row in rows if row["counters"]]
    kinds = sorted({kind for row in loads for kind in row["counters"]})
    return [
        f"## vLLM: {result['model']}",
        "",
        f"{result['prompts']} prompts, {result['prompt_tokens']:,} tokens. *answers equal*: all tokens of an answer",
        "are those of the engine without a connector (`aggregated`); *to the bit*: all its log probabilities, too.",
        "*margin*: by how much that engine preferred its own token where answers part, in nats: median, and largest.",
        "Few pages make an engine preempt requests, compute in one pass what they had decoded token by token, and run",
        "batches of other sizes: rounding of its own, with or without a connector, in float32 too small to change a",
        "token (rows of *float32* are held against the engine without a connector in float32).",
        "*tokens not computed*: of the prompts, because they came from a store or from the engine's own prefix cache.",
        "*store*: the files' bytes, counted outside (of NIXL, which has no files, what it counts itself, prompts that",
        "are served twice twice). *first token*: median of all prompts served together; *one by one*: mean of some",
        "that are served singly, with nothing else to do.",
        "",
        *markdown(_VLLM_HEAD, [_vllm_row(row) for row in rows]),
        "",
        told,
        "",
        "What the connector counted:",
        "",
        *markdown(
            ("engine", *(kind.replace("_", " ") for kind in kinds)),
            [(row["phase"], *(_count(row["counters"].get(kind)) for kind in kinds)) for row in loads],
        ),
        "",
    ]


def _vllm_row(row: Row) -> tuple[str, ...]:
    return (
        row["phase"],
        f"{row['equal_answers']} of {row['n'] - row['failed']}",
        str(row["same_bits"]),
        _margins(row["margins_at_parting"]),
        str(row["failed"]),
        _with_interval(row["first_token_agreement"], 3),
        _with_interval(row["kl_first_token"], 5),
        _count(row["cached_tokens"]),
        _count(row["preemptions"]),
        _count(row.get("store_bytes", row.get("sent_bytes"))),
        f"{row['prompt_tokens_per_s']:,.0f}",
        f"{row['first_token_s']:.3f}",
        "" if row["first_token_alone_s"] is None else _with_interval(row["first_token_alone_s"], 3),
    )


def _margins(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else ""


def _lm_eval(result: Row) -> list[str]:
    rows = []
    for row in result["rows"]:
        choices, problems = row["hellaswag"], row["gsm8k"]
        rows.append(
            (
                f"{row['budget']:g}",
                f"{choices['harness']:.3f} [{choices['harness_ci'][0]:.3f}, {choices['harness_ci'][1]:.3f}]",
                f"{choices['own']:.3f}",
                f"{choices['items_that_differ']} of {choices['n']}",
                _count(row["hellaswag"]["p_against_first_budget"]),
                f"{problems['harness']:.3f} [{problems['harness_ci'][0]:.3f}, {problems['harness_ci'][1]:.3f}]",
                f"{problems['texts_that_differ']} of {problems['texts_checked']}",
            )
        )
    head = ("budget", "HellaSwag", "own evaluator", "items that differ", "p", "GSM8K", "texts that differ")
    return [
        f"## lm-evaluation-harness: {result['model']}",
        "",
        "Each task scored by `lm-eval` on shipped caches, and again by kvferry's own evaluator. *p*: McNemar's exact",
        "test against the first budget, question by question.",
        "",
        *markdown(head, rows),
        "",
    ]


_SECTIONS = {"vllm_results": _vllm, "lm-eval": _lm_eval}


def _with_interval(value: Row, digits: int) -> str:
    ends = value["ci"]
    interval = "" if ends is None else f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"
    return f"{value['value']:.{digits}f}{interval}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,g}" if value < 1e6 else f"{value:,.0f}"
