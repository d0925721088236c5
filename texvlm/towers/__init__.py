"""Vision towers of transformers that attend by `texvlm.hierarchical_attention`: behind `texvlm.attention.replace` and `.calibrate`.

`finding.py` finds a model's tower and its layers, `grids.py` where its tokens lie, `interface.py` puts an attention function into it and
takes it out again, `calibration.py` measures what that costs layer by layer. transformers is imported when something is replaced.
"""

from texvlm.towers.calibration import Calibration, calibrate
from texvlm.towers.interface import Replacement, replace

__all__ = ["Calibration", "Replacement", "calibrate", "replace"]
