"""`Residency`: the tier that has a shard's current version, or its move, and what can follow.

Pure data. Only `ShardRecord.advance` applies the table.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

from infinity_engine.plan import Tier

__all__ = ["HOME_OF", "MOVES", "TIER_OF", "TRANSITIONS", "Residency"]


class Residency(Enum):
    """The tier that has the current version; or the move to a tier, with undefined bytes so far.

    Other tiers may have copies of the same version: a shard that is NVME with a copy in HOST is a
    cached one.
    """

    NVME = "nvme"  # in the swap file
    LOADING = "loading"  # being read from there
    HOST = "host"  # in a lease of host memory
    # being copied to the record's `arriving`, for streams that wait for the copy's event
    UPLOADING = "uploading"
    DEVICE = "device"  # in a lease of device memory
    DOWNLOADING = "downloading"  # being copied to the host
    STORING = "storing"  # being written to the swap file

    # By identity, as each member is one object: Enum's own hash runs in Python at each look-up.
    __hash__ = object.__hash__


# A failed move ends where it came from. Down without a move: the tier below has the same version.
TRANSITIONS = MappingProxyType(
    {
        Residency.NVME: (Residency.LOADING,),
        Residency.LOADING: (Residency.HOST, Residency.NVME),
        Residency.HOST: (Residency.UPLOADING, Residency.STORING, Residency.NVME),
        Residency.UPLOADING: (Residency.DEVICE, Residency.HOST),
        Residency.DEVICE: (Residency.DOWNLOADING, Residency.HOST, Residency.NVME),
        Residency.DOWNLOADING: (Residency.HOST, Residency.DEVICE),
        Residency.STORING: (Residency.NVME, Residency.HOST),
    }
)

HOME_OF = MappingProxyType(
    {Tier.NVME: Residency.NVME, Tier.HOST: Residency.HOST, Tier.DEVICE: Residency.DEVICE}
)
TIER_OF = MappingProxyType({residency: tier for tier, residency in HOME_OF.items()})

# Of each move the tier that it leaves and the one that it goes to.
MOVES = MappingProxyType(
    {
        Residency.LOADING: (Tier.NVME, Tier.HOST),
        Residency.UPLOADING: (Tier.HOST, Tier.DEVICE),
        Residency.DOWNLOADING: (Tier.DEVICE, Tier.HOST),
        Residency.STORING: (Tier.HOST, Tier.NVME),
    }
)
