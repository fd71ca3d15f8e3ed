"""The formats: importing this package registers them, in the order in which lists name them."""

from . import kbit as kbit

# isort: split
from . import float4 as float4

# isort: split
from . import affine as affine
