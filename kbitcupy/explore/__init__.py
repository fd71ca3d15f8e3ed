"""What a bit costs: formats measured over tensors, the best format for each tensor under a budget, and plots of both.

Measuring and planning need nothing but kbitcupy. The plots need matplotlib (the extra ``plot``), which is imported when
one is drawn; each takes a matplotlib Axes, or makes one, and returns it.
"""

from .choosing import Best, best
from .design import design_codebook
from .fit import fit_table
from .measurement import Measurement, default_formats, label, measure, notes, remarks
from .planning import OBJECTIVES, PLAN_VERSION, Plan, plan, read_plan
from .plots import (
    DB_PER_BIT,
    figure,
    picture_kinds,
    plot_codebook,
    plot_error_histogram,
    plot_layers,
    plot_sqnr,
)
from .sweeps import Sweep, sweep

__all__ = [
    "DB_PER_BIT",
    "OBJECTIVES",
    "PLAN_VERSION",
    "Best",
    "Measurement",
    "Plan",
    "Sweep",
    "best",
    "default_formats",
    "design_codebook",
    "figure",
    "fit_table",
    "label",
    "measure",
    "notes",
    "picture_kinds",
    "plan",
    "plot_codebook",
    "plot_error_histogram",
    "plot_layers",
    "plot_sqnr",
    "read_plan",
    "remarks",
    "sweep",
]
