"""What autograd saves for the backward: kept where it is, or moved to the host or to drives."""

from infinity_engine.activation.offloading import ActivationOffload
from infinity_engine.activation.saved import BlockUse, KeptActivations, SavedTensors

__all__ = ["ActivationOffload", "BlockUse", "KeptActivations", "SavedTensors"]
