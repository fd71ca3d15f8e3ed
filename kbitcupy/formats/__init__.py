"""The formats: importing this package registers them, in the order in which lists name them."""

from .base import register_later
from .codebook import kbit as kbit

# isort: split
from .codebook import table4 as table4

# isort: split
from .codebook import dynamic8 as dynamic8

# isort: split
from . import affine as affine

# GGUF's types are many, and whoever wants none of them does not wait for their import.
for _module, _names in {
    "legacy": ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_1"),
    "kquants": ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k"),
    "iq4": ("iq4_nl", "iq4_xs"),
    "ternary": ("tq2_0", "tq1_0"),
    "fp4": ("mxfp4", "nvfp4"),
    "grids": ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
}.items():
    register_later(f"{__name__}.gguf.{_module}", *_names)

# isort: split
from . import ternary as ternary  # noqa: E402
