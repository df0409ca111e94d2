"""The words that plans are written in: tiers, budgets, rates, strategies, ops and their order.

Pure data, no torch, no I/O. All other packages use these; they know nothing of who uses them.
"""

from infinity_engine.plan.budget import Budget, Capacity, Percent, ResolvedBudget
from infinity_engine.plan.calibration import (
    CALIBRATION_VERSION,
    BlockFigures,
    Calibration,
    DriveFigures,
    Figure,
    HostUpdateFigures,
    LinkFigures,
    Unit,
)
from infinity_engine.plan.compute import BlockRates, BlockShape, ComputeRate, block_flops
from infinity_engine.plan.extent import Extent
from infinity_engine.plan.ops import (
    CopyOp,
    DownloadParameters,
    DownloadStates,
    Lane,
    LoadStates,
    Op,
    StoreStates,
    UpdateOnDevice,
    UpdateOnHost,
    UpdateOp,
    UploadParameters,
    UploadStates,
)
from infinity_engine.plan.own_work import OwnWork
from infinity_engine.plan.rates import DriveRates, Rates
from infinity_engine.plan.step import ADAM_BYTES, BytesPerParameter, Home, StepPlan, SubgroupSpec
from infinity_engine.plan.strategy import (
    Auto,
    DeviceOnly,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    StaticSplit,
    Strategy,
    parse_strategy,
)
from infinity_engine.plan.tier import Tier
from infinity_engine.plan.timing import LaneClocks, OpTime

__all__ = [
    "ADAM_BYTES",
    "CALIBRATION_VERSION",
    "Auto",
    "BlockFigures",
    "BlockRates",
    "BlockShape",
    "Budget",
    "BytesPerParameter",
    "Calibration",
    "Capacity",
    "ComputeRate",
    "CopyOp",
    "DeviceOnly",
    "DownloadParameters",
    "DownloadStates",
    "DriveFigures",
    "DriveRates",
    "Extent",
    "Figure",
    "Home",
    "HostOnly",
    "HostUpdateFigures",
    "Interleaved",
    "Lane",
    "LaneClocks",
    "LinkFigures",
    "LoadStates",
    "NvmeStreamed",
    "Op",
    "OpTime",
    "OwnWork",
    "Percent",
    "Rates",
    "ResolvedBudget",
    "StaticSplit",
    "StepPlan",
    "StoreStates",
    "Strategy",
    "SubgroupSpec",
    "Tier",
    "Unit",
    "UpdateOnDevice",
    "UpdateOnHost",
    "UpdateOp",
    "UploadParameters",
    "UploadStates",
    "block_flops",
    "parse_strategy",
]
