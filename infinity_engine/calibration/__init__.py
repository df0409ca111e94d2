"""Measures what this machine can do, by training's own code, and keeps it as `plan.Calibration`.

`calibrated` takes what was kept and measures the rest; `kept_calibration` never measures. Torch is
imported only when links and devices are measured, and only where it is installed. Used by engine/
and cli/.
"""

from infinity_engine.calibration.cache import CalibrationCache, CalibrationWarning
from infinity_engine.calibration.calibrate import KeptFigures, calibrated, kept_calibration
from infinity_engine.calibration.effort import FULL, QUICK, Effort

__all__ = [
    "FULL",
    "QUICK",
    "CalibrationCache",
    "CalibrationWarning",
    "Effort",
    "KeptFigures",
    "calibrated",
    "kept_calibration",
]
