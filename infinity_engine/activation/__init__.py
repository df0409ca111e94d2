"""What autograd saves for the backward: kept where it is, or moved to the host or to drives."""

from infinity_engine.activation.offloading import ActivationOffload
from infinity_engine.activation.saved import Activations, KeptActivations

__all__ = ["ActivationOffload", "Activations", "KeptActivations"]
