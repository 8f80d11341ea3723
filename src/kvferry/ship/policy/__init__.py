"""Which token gets which precision."""

from kvferry.ship.policy.table import POLICIES, Policy, policy
from kvferry.ship.policy.tiers import DROP, INT4, INT8, RAW, TIER_COST, PolicyContext

__all__ = ["DROP", "INT4", "INT8", "POLICIES", "RAW", "TIER_COST", "Policy", "PolicyContext", "policy"]
