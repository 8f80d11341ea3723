"""Audits beside the figures of the two papers whose protocols they take over."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.report.audit_said import Found, Row, dtype_of, once
from kvferry.report.audit_tables import cell, models_of, table

DTYPES = ("bfloat16", "float16", "float32")


def _sampled(name: str) -> Callable[[Row], bool]:
    return lambda one: bool(one["detail"]["sampler"]["name"] == name)


def _direction(name: str) -> Callable[[Row], bool]:
    return lambda one: bool(one["detail"]["direction"] == name)


def _incremental(finding: Row) -> bool:
    return bool(finding["arms"][-1]["construction"] == "incremental")


PAPERS: tuple[tuple[str, str, str, str, Callable[[Row], bool]], ...] = (
    (
        "greedy runs that part, of prompts",
        "C&X: 100 % in 9 of 9 fp16 conditions; fp32 none",
        "free_run",
        "prompts_diverging",
        _sampled("greedy"),
    ),
    ("top-k runs that part", "C&X: as above", "free_run", "prompts_diverging", _sampled("top_k")),
    ("top-p runs that part", "C&X: as above", "free_run", "prompts_diverging", _sampled("top_p")),
    ("accuracy of ON less OFF's", "C&X: ON better in 8 of 9", "free_run", "accuracy_difference", _sampled("greedy")),
    (
        "flips on fixed prefixes, by sequence",
        "C&X: fp32 0.0 %",
        "fixed_prefix|precision_2x2",
        "flip_rate_clustered",
        once,
    ),
    ("KL of ON from OFF, mean", "C&X: eight orders smaller in fp32", "fixed_prefix|precision_2x2", "kl_mean", once),
    (
        "suffixes that differ by construction",
        "Lorup: bf16 83 % (77.2 to 87.6), n 200; fp32 0 (≤ 1.88 %)",
        "stage_replay",
        "suffix_differs",
        _incremental,
    ),
    ("their first divergence, median", "Lorup: 88", "stage_replay", "suffix_first_divergence_median", _incremental),
    (
        "relative L2 of the cache, median",
        "Lorup: bf16 1.22e-2; fp32 4.27e-6",
        "stage_replay",
        "cache_l2_median",
        _incremental,
    ),
    (
        "largest logit difference, median",
        "Lorup: bf16 0.4375; fp32 1.04e-4",
        "stage_replay",
        "max_abs_median_of_sequences",
        _incremental,
    ),
    (
        "transplants that give the donor's tokens",
        "Lorup: 24 of 24 and 43 of 43",
        "transplant",
        "whole: tokens recovered",
        _direction("donor_to_recipient"),
    ),
    (
        "the same, recipient into donor",
        "Lorup: as above",
        "transplant",
        "whole: tokens recovered",
        _direction("recipient_to_donor"),
    ),
    (
        "later steps restored by a residual patch",
        "C&X: not",
        "residual_patch",
        "restored_later_steps_all_layers_mean_clipped",
        _direction("off_into_on"),
    ),
)
"""What, the figure of either paper, the protocol and measure that answer it here, and of which findings."""


def papers(found: Found) -> str:
    """Ours beside the papers' figures: a row a measure and model, a column a dtype."""
    rows = []
    for title, figures, protocol, measure, wanted in PAPERS:
        for model in models_of(found):
            own = {
                dtype_of(one): one
                for name, one in found
                if name == model
                and one["protocol"] in protocol.split("|")
                and measure in one["measures"]
                and wanted(one)
            }
            cells = [cell(own[dtype], measure) if dtype in own else "" for dtype in DTYPES]
            if any(cells):
                rows.append((title, figures, model, *cells))
    return table(("what", "papers", "model", *DTYPES), rows)
