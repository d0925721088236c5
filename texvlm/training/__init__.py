"""Training of allocators: estimators that get gradients through the choice of k cells, a task that takes minutes, and the loop.

    python -m texvlm.training proxy --steps 1000 --folder run
    torchrun --nproc-per-node 2 -m texvlm.training proxy --folder run

Every figure is of the deployed selector: the k best cells, no noise, no weights.
"""

from texvlm.training.estimators import ESTIMATORS, Choice, Noise, hard
from texvlm.training.loop import Annealing, Report, Settings, Task, Trainer, distributed
from texvlm.training.maps import Sample, heat_map
from texvlm.training.proxy import ProxyTask

__all__ = [
    "ESTIMATORS",
    "Annealing",
    "Choice",
    "Noise",
    "ProxyTask",
    "Report",
    "Sample",
    "Settings",
    "Task",
    "Trainer",
    "distributed",
    "hard",
    "heat_map",
]
