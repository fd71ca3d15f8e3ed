"""The formats: importing this package registers them, in the order in which lists name them."""

from .codebook import kbit as kbit

# isort: split
from .codebook import table4 as table4

# isort: split
from .codebook import dynamic8 as dynamic8

# isort: split
from . import affine as affine

# isort: split
from .gguf import legacy as legacy

# isort: split
from .gguf import kquants as kquants

# isort: split
from .gguf import iq4 as iq4

# isort: split
from .gguf.ternary import TQ1_0 as TQ1_0, TQ2_0 as TQ2_0

# isort: split
from .gguf import fp4 as fp4

# isort: split
from .gguf import grids as grids

# isort: split
from . import ternary as ternary
