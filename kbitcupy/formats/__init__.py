"""The formats: importing this package registers them."""

from . import kbit as kbit
