"""The policy that goes by the probe's answer."""

from __future__ import annotations

import pytest
import torch

from kvferry.ship.encode import decode, encode
from kvferry.ship.policy import POLICIES, PolicyContext
from tests.ship.builders import realistic


@pytest.mark.parametrize("b", [0.25, 0.3, 0.5, 0.7, 1.0])
def test_adaptive_is_greedy_or_two_tier(b: float) -> None:
    scores = torch.rand(37, generator=torch.Generator().manual_seed(1))
    for allowed, name in ((True, "greedy"), (False, "two_tier")):
        context = PolicyContext(int4_allowed=allowed)
        expected = POLICIES[name].assign(scores, b, 37, context)
        assert torch.equal(POLICIES["adaptive"].assign(scores, b, 37, context), expected)


def test_a_packet_tells_what_was_allowed() -> None:
    snapshot = realistic(64, layers=2)
    sizes = {}
    for allowed, keys in ((True, "sym8+sym4"), (False, "sym8")):
        packet = encode(snapshot, nominal_budget=0.4, policy="adaptive", int4_allowed=allowed)
        assert packet.policy == "adaptive"
        assert packet.report["int4_allowed"] is allowed
        assert packet.quantizer == f"{keys} / {keys}"
        sizes[allowed] = int(decode(packet).mask.sum())
    assert sizes == {True: 64, False: 51}  # without INT4, a fifth is dropped below b = 0.5
