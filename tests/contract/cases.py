"""What the contract tests go through: every registered format with its option sets, shapes, dtypes, kinds of numbers.

`Case` is one of these; a format says its option sets by `Format.samples`, and its shapes by `Format.check_shape`.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from inputs import BFLOAT16, KINDS as ALL_KINDS, bits_for, fitting, make
from make_frozen_data import own_codebook

import kbitcupy as kb
from kbitcupy.backend.xp import device_of
from kbitcupy.errors import FormatError
from kbitcupy.formats import base

#: Arrays by what is special about them, before they are fitted to a format.
SHAPES = {
    "scalar": lambda block: (),
    "nothing": lambda block: (0,),
    "one": lambda block: (1,),
    "short": lambda block: (max(block - 1, 1),),
    "block": lambda block: (block,),
    "longer": lambda block: (block + 1,),
    "many": lambda block: (4097,),
    "cube": lambda block: (5, 7, 33),
    "hole": lambda block: (4, 0, 2),
}
DTYPES = {"float16": np.float16, "bfloat16": BFLOAT16, "float32": np.float32, "float64": np.float64}
KINDS = [*ALL_KINDS, "ties", "signed zeros"]


@dataclass(frozen=True)
class Case:
    """A registered format with some of its options chosen, as text, and what a call brings with it."""

    text: str

    @property
    def format(self):
        return kb.get_format(self.text)

    @property
    def given(self):
        """Numbers of one's own where an option asks for them."""
        return {"codebook": own_codebook(self.format)} if self.format.options().get("codebook") == "custom" else {}

    def quantize(self, x, out=None, **more):
        """`x` in the format; where that only decodes, an array that depends on `x`, and on nothing else."""
        if self.format.can_encode:
            return kb.quantize(x, self.format, **self.given, **({} if out is None else {"out": out}), **more)
        found = bits_for(self.format, x if isinstance(x, np.ndarray) else x.get())
        made = kb.QuantizedArray(self.format, found, x.shape, x.dtype).to_device(device_of(x))
        if out is None:
            return made
        for name, plane in made.planes.items():
            out.planes[name][...] = plane
        return out

    def shape(self, kind):
        """A shape of one kind that the format takes."""
        format = self.format
        shape = SHAPES[kind](format.block or 32)
        for candidate in (shape, (1, *shape), (1, 1, *shape)):  # an option may name an axis
            candidate = fitting(format, candidate)
            if takes(format, candidate):
                return candidate
        raise AssertionError(f"{format} takes no shape like {shape}")

    def matrix(self, rows=24, columns=512):
        """A shape of two axes that the format takes, whose rows are whole blocks of it where they can be."""
        return fitting(self.format, (rows, columns))

    def __str__(self):
        return self.text


def takes(format, shape):
    try:
        format.check_shape(shape)
        format.planes(shape)
    except FormatError:
        return False
    return True


def cases_of(name):
    """Every option set of a registered format."""
    return [Case(text) for text in dict.fromkeys(map(str, base.samples(name)))]


def numbers(kind, shape, dtype="float32", seed=0):
    """An array of one kind of numbers."""
    return _numbers(kind, shape, np.dtype(DTYPES.get(dtype, dtype)), seed).copy()


@functools.lru_cache(maxsize=512)
def _numbers(kind, shape, dtype, seed):
    size = math.prod(shape)
    rng = np.random.default_rng([seed, size])
    if kind == "ties":
        return (rng.integers(-16, 17, size) / 2).astype(dtype).reshape(shape)
    if kind == "signed zeros":
        return np.where(rng.random(size) < 0.5, 0.0, -0.0).astype(dtype).reshape(shape)
    with np.errstate(over="ignore"):
        return make(kind, size, dtype, seed).reshape(shape)


# An option set may be another way to say the default.
CASES = list(dict.fromkeys(case for name in kb.list_formats() for case in cases_of(name)))
