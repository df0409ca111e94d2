"""The built-in policies, by name and by strategy. Pure. Users put theirs into a new registry."""

from infinity_engine.optim.policies.choice import BUILT_IN, policy_for
from infinity_engine.optim.policies.interleaved import interleaved, two_ended
from infinity_engine.optim.policies.published import algorithm1, eq1, eq1_ratio
from infinity_engine.optim.policies.static import DEVICE_ONLY, HOST_ONLY, static_split

__all__ = [
    "BUILT_IN",
    "DEVICE_ONLY",
    "HOST_ONLY",
    "algorithm1",
    "eq1",
    "eq1_ratio",
    "interleaved",
    "policy_for",
    "static_split",
    "two_ended",
]
