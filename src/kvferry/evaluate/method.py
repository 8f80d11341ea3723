"""A way to ship a cache, by name, so that a sweep can go through many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kvferry.errors import InvalidInput
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.transform.store import for_packet
from kvferry.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Method:
    """Settings of `kvferry.encode`, or one of the `CONTROLS`, which send nothing.

    Attributes:
        policy: a policy's name, ``auto``, ``fast``, or a control's.
        budget: of actual bytes.
        nominal_budget: the policy's b instead.
        quantizers: what stands behind the tiers, as text; ``None``: the policy's default.
        scorer: name of the scorer; ``None``: the default one.
        decay: λ of the scorer.
        seed: of random policies.
        int4_allowed: the probe's answer, for the policy ``adaptive``.
        transform: digest of the kept transform, for the policies ``klt`` and ``auto``; ``None``: the newest one of the
            model.
    """

    policy: str
    budget: float | None = None
    nominal_budget: float | None = None
    quantizers: str | None = None
    scorer: str | None = None
    decay: float | None = None
    seed: int = 0
    int4_allowed: bool = True
    transform: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Shipped:
    """A cache as it came out at the other end.

    Attributes:
        snapshot: what the receiver has.
        nbytes: bytes on the wire.
        full_bytes: those of the 16-bit packet.
        nominal_budget: the policy's own mean cost of a token; ``None`` for a control.
        quantizer: names of the quantisers in use, keys / values.
        packet: what went over the wire; ``None`` for a control.
    """

    snapshot: Snapshot
    nbytes: int
    full_bytes: int
    nominal_budget: float | None
    quantizer: str
    packet: Packet | None


def ship(snapshot: Snapshot, method: Method) -> Shipped:
    """Encode and decode ``snapshot``.

    Raises:
        BudgetTooSmall: the policy cannot meet the budget.
        InvalidInput: an unknown policy, quantiser or scorer.
    """
    control = CONTROLS.get(method.policy)
    if control is not None:
        return Shipped(control(snapshot), 0, encode(snapshot, None, "full").full_bytes, None, "none / none", None)
    packet = encode(
        snapshot,
        method.budget,
        method.policy,
        method.scorer,
        nominal_budget=method.nominal_budget,
        quantizers=method.quantizers,
        seed=method.seed,
        decay=method.decay,
        int4_allowed=method.int4_allowed,
        transform=None if method.transform is None else for_packet(method.transform),
    )
    return Shipped(decode(packet), len(packet), packet.full_bytes, packet.nominal_budget, packet.quantizer, packet)


def zero_cache(snapshot: Snapshot) -> Snapshot:
    """All keys and values zero, still attended to: every token of the prefix gets the same weight and adds nothing."""
    layers = tuple(
        replace(
            layer,
            keys=None if layer.keys is None else torch.zeros_like(layer.keys),
            values=None if layer.values is None else torch.zeros_like(layer.values),
        )
        for layer in snapshot.layers
    )
    return replace(snapshot, layers=layers)


def no_prefix(snapshot: Snapshot) -> Snapshot:
    """Every token dropped: attention skips the whole prefix, positions are kept."""
    return replace(zero_cache(snapshot), mask=torch.zeros_like(snapshot.mask))


CONTROLS: dict[str, Callable[[Snapshot], Snapshot]] = {"zero_cache": zero_cache, "no_prefix": no_prefix}
"""What is left without a cache: the floor that every method must be above."""


def expand(
    policies: list[str],
    budgets: list[float],
    *,
    quantizers: list[str | None] | None = None,
    nominal_budgets: list[float] | None = None,
    scorer: str | None = None,
    decay: float | None = None,
    seed: int = 0,
) -> list[Method]:
    """Every policy at every budget with every quantiser, each packet once.

    A policy that knows one budget only (``full``, ``uniform_int8``, the controls) gets one method.

    Raises:
        InvalidInput: an unknown policy, quantiser or scorer, or no budget for a policy that needs one.
    """
    from kvferry.ship.allocate import TierSpecs
    from kvferry.ship.importance import scorer_named
    from kvferry.ship.plan import COMPOSED
    from kvferry.ship.policy import POLICIES
    from kvferry.ship.transform.plan import POLICY as KLT

    for specs in quantizers or ():
        TierSpecs.make(specs)
    if scorer is not None:
        scorer_named(scorer)
    methods: list[Method] = []
    for name in policies:
        if name in CONTROLS or name == "full":
            methods.append(Method(name))
            continue
        if name == KLT:  # ranks and quantises by its transform
            methods += [Method(KLT, budget) for budget in budgets]
            continue
        if name not in COMPOSED and name not in POLICIES:
            known = ", ".join([*COMPOSED, *POLICIES, KLT, *CONTROLS])
            raise InvalidInput(f"unknown policy {name!r}; there are {known}")
        fixed = name in POLICIES and POLICIES[name].least == POLICIES[name].most
        if not fixed and not (budgets or nominal_budgets):
            raise InvalidInput(f"policy {name} needs budgets, and none are given")
        for specs in quantizers or [None]:
            base = Method(name, quantizers=specs, scorer=scorer, decay=decay, seed=seed)
            if fixed:
                methods.append(base)
                continue
            methods += [replace(base, budget=budget) for budget in budgets]
            methods += [replace(base, nominal_budget=nominal) for nominal in nominal_budgets or []]
    return list(dict.fromkeys(methods))
