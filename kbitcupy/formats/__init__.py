"""The formats: importing this package registers them, in the order in which lists name them."""

from .codebook import kbit as kbit

# isort: split
from .codebook import table4 as table4

# isort: split
from . import affine as affine
