"""What a hand-off took and gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SECONDS = ("prefill", "encode", "wire", "decode", "install", "first_token", "ttft")


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """One hand-off, measured and judged.

    The producer prefills all tokens of the prompt but the last, encodes their cache and sends it frame by frame; the
    consumer decodes frames as they come, installs the cache, runs the last token and goes on greedily. Encode, wire and
    decode overlap, so ``seconds`` of the parts need not add up to ``ttft``; `timeline` says what lay where.

    Attributes:
        packet_bytes: header and frames.
        wire_bytes: what the consumer received for them, with the channel's own heads; no encryption or TCP counted.
        full_bytes: the same packet with every token at 16 bit.
        cache_bytes: keys and values in memory.
        budget: ``packet_bytes / full_bytes``.
        budget_asked: what was asked for, ``None`` for a nominal budget.
        nominal_budget: the policy's b.
        policy: what chose each token's bits.
        quantizer: what coded them, keys / values.
        scorer: what ranked the tokens; ``None`` where nothing did.
        pipelined: whether each layer was encoded and sent while later ones were being prefilled.
        why_not_pipelined: the reason, where it was not.
        prompt_tokens: tokens of the prompt; all but the last were shipped.
        layers: of the model.
        seconds: ``prefill``: the producer's forward pass over the shipped tokens, the observation of its last queries
            included. ``encode``: planning, and building each frame, summed. ``wire``: time during which at least one
            frame was under way, from given to the producer's socket to whole at the consumer. ``decode``: reading the
            header, and verifying and decoding each frame into place, summed. ``install``: the identity check and the
            copy into the model's cache. ``first_token``: the forward pass of the last prompt token, up to the token's
            number. ``ttft``: from the start of prefill, or of planning where that came first, to the first token at the
            consumer, as it passed.
        timeline: part → (begin, end) in seconds from the start of prefill; of several spans the first begin and the
            last end.
        local_seconds: the run that was not shipped: ``first_token``, with the copy of its cache, and ``ttft``, the sum
            of ``prefill`` and it.
        kl_mean: mean KL(unshipped ‖ shipped), in nats, over the positions of the unshipped run's tokens, which both
            were fed (teacher forcing); with `fidelity`, which holds n, median, 95th percentile and maximum.
        top1_agreement: share of these positions with the same most likely token.
        tokens_equal: whether the two greedy runs gave the same tokens.
        first_difference: index of the first token that differs.
        token_ids: ``shipped`` and ``local``.
        text: the same decoded, and ``prompt_end``, the last words of the prompt.
        producer: model, dtype, threads, versions and peak memory of that process.
        consumer: likewise.
        traffic: messages of the channel at the consumer.
        progressive: of a progressive hand-off what `progressive_report` says, else
            ``None``. Its ``kl_mean`` and what belongs to it are of the refined cache; the tokens were chosen as it was
            being refined.
        stages: of a hand-off with a mapper what `stages_of` says, else ``None``. The unshipped run is then the
            consumer's own prefill: ``local_seconds``, ``kl_mean`` and what belongs to it, ``tokens_equal`` and the
            local tokens and text are of that; ``seconds`` and ``timeline`` have ``map``, and ``text`` has ``source``,
            what the producer's model goes on with.
        link: of a shaped link its ``rate``, and the bytes that the kernel counted on the producer's interface, out and
            back, from before the hand-off until the consumer confirmed it; ``None`` for the loopback interface.
    """

    packet_bytes: int
    wire_bytes: int
    full_bytes: int
    cache_bytes: int
    budget: float
    budget_asked: float | None
    nominal_budget: float
    policy: str
    quantizer: str
    scorer: str | None
    pipelined: bool
    why_not_pipelined: str | None
    prompt_tokens: int
    layers: int
    new_tokens: int
    seconds: dict[str, float]
    timeline: dict[str, tuple[float, float]]
    local_seconds: dict[str, float]
    kl_mean: float | None
    top1_agreement: float | None
    tokens_equal: bool
    first_difference: int | None
    fidelity: dict[str, Any]
    token_ids: dict[str, list[int]]
    text: dict[str, str]
    producer: dict[str, Any]
    consumer: dict[str, Any]
    traffic: dict[str, int]
    link: dict[str, Any] | None = None
    progressive: dict[str, Any] | None = None
    stages: list[dict[str, Any]] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def combine(
    produced: Mapping[str, Any],
    consumed: Mapping[str, Any],
    budget_asked: float | None,
    link: dict[str, Any] | None = None,
) -> HandoffResult:
    """One result from what the two processes report, each with clock readings in nanoseconds."""
    start = min(produced["prefill"]["began"], produced["encode"]["began"])
    watches = {name: produced[name] for name in ("prefill", "encode")}
    watches |= {name: consumed[name] for name in ("wire", "decode")}
    if consumed["map"] is not None:
        watches["map"] = consumed["map"]["watch"]
    watches |= {name: consumed[name] for name in ("install", "first_token")}
    seconds = {name: watch["busy"] / 1e9 for name, watch in watches.items()}
    seconds["ttft"] = (consumed["first_token"]["ended"] - start) / 1e9
    timeline = {
        name: ((watch["began"] - start) / 1e9, (watch["ended"] - start) / 1e9) for name, watch in watches.items()
    }
    local = {"prefill": seconds["prefill"], "first_token": produced["local_first_token"]}
    local_ids, texts = produced["token_ids"], {"local": produced["text"]}
    stages = None
    if consumed["map"] is not None:
        judged = consumed["map"]
        local, local_ids = judged["seconds"], judged["token_ids"]
        texts = {"local": judged["text"], "source": produced["text"]}
        stages = stages_of(produced["packet"], seconds, judged)
    fidelity = consumed["fidelity"]
    progressive = None
    if produced["refinement"] is not None:
        sizes = produced["packet"]["packet_bytes"], produced["packet"]["full_bytes"]
        progressive = progressive_report(produced["refinement"], consumed["refinement"], *sizes, start)
    return HandoffResult(
        **produced["packet"],
        wire_bytes=consumed["traffic"]["received"],
        budget=produced["packet"]["packet_bytes"] / produced["packet"]["full_bytes"],
        budget_asked=budget_asked,
        pipelined=not produced["why_plain"],
        why_not_pipelined=produced["why_plain"] or None,
        prompt_tokens=produced["prompt_tokens"],
        layers=produced["layers"],
        new_tokens=len(consumed["token_ids"]),
        seconds=seconds,
        timeline=timeline,
        local_seconds={"first_token": local["first_token"], "ttft": local["prefill"] + local["first_token"]},
        kl_mean=fidelity["kl_mean"],
        top1_agreement=fidelity["top1_agreement"],
        tokens_equal=consumed["token_ids"] == local_ids,
        first_difference=consumed["first_difference"],
        fidelity=fidelity,
        token_ids={"shipped": consumed["token_ids"], "local": local_ids},
        text={"shipped": consumed["text"], **texts, "prompt_end": produced["prompt_end"]},
        producer=produced["process"],
        consumer=consumed["process"],
        traffic=consumed["traffic"],
        link=link,
        progressive=progressive,
        stages=stages,
    )


def stages_of(
    packet: Mapping[str, Any], seconds: Mapping[str, float], judged: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What each stage cost in bytes and time, and how far the predictions are from what would have been without it.

    ``seconds`` of ``ship`` are those of encode, wire and decode, which overlap with each other and with the prefill;
    of ``all`` the time to the first token. ``fidelity`` of ``map`` is that of the map of the unshipped cache against
    the target's own prefill; of ``ship`` that of the delivered cache against the map of the unshipped one; of ``all``
    that of the delivered cache against the target's own prefill.
    """
    shipping = {name: seconds[name] for name in ("encode", "wire", "decode")}
    size = packet["packet_bytes"]
    return [
        {"stage": "prefill", "bytes": 0, "seconds": seconds["prefill"], "fidelity": None},
        {"stage": "ship", "bytes": size, "seconds": sum(shipping.values()), "fidelity": judged["ship"], **shipping},
        {"stage": "map", "bytes": 0, "seconds": seconds["map"], "fidelity": judged["map"], **judged["crossed"]},
        {"stage": "all", "bytes": size, "seconds": seconds["ttft"], "fidelity": judged["fidelity"]},
    ]


def progressive_report(
    produced: Mapping[str, Any], consumed: Mapping[str, Any], packet_bytes: int, full_bytes: int, start: int
) -> dict[str, Any]:
    """What a progressive hand-off did, from what both processes report of it; ``start`` is when the clock began.

    ``bytes_before_first_token`` and ``total_bytes`` are headers and frames, as `packet_bytes` is, and stand beside
    their share of ``full_bytes``. ``seconds``: until all tokens had level 1, until they were ``exact``, both at the
    consumer and from the same start as ``ttft``; ``encode`` and ``decode`` are the refinement's alone, summed.
    ``tokens_at_level``: how many tokens were chosen from a cache of each level, the packet's own being 0.
    ``bit_exact``: the digest of the consumer's refined cache is that of the cache which stayed at the producer, and the
    model's own cache holds the same bits, as far as it still holds these tokens.
    """
    total = packet_bytes + produced["bytes"]
    level_1, exact = consumed["levels_complete"]
    return {
        "bytes_before_first_token": packet_bytes,
        "share_before_first_token": packet_bytes / full_bytes,
        "refinement_bytes": produced["bytes"],
        "level_bytes": produced["level_bytes"],
        "total_bytes": total,
        "total_budget": total / full_bytes,
        "wire_bytes": consumed["received"],
        "seconds": {
            "level_1": (level_1 - start) / 1e9,
            "exact": (exact - start) / 1e9,
            "generated": (consumed["generated"] - start) / 1e9,
            "encode": produced["encode"]["busy"] / 1e9,
            "decode": consumed["decode"]["busy"] / 1e9,
        },
        "tokens_at_level": consumed["tokens_at_level"],
        "bit_exact": consumed["digest"] == produced["digest"] and consumed["live_cache_equal"],
        "digest": consumed["digest"],
    }
