"""Rows of a compressed array by their numbers, in one launch: what the families give to ``kernels/take.cu``."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...backend.compile import CXX_TYPES, IDS_CXX, Template
from ...backend.launch import Kernel, by_value

TAKE_KBIT, TAKE_TABLE4 = (
    Template("take.cu", name, (tuple(CXX_TYPES.values()), tuple(IDS_CXX.values())), hot=False)
    for name in ("take_kbit", "take_table4")
)

_THREADS = 256


class Take:
    """A kernel of ``take.cu`` with the values that it is given.

    Parameters
    ----------
    template : Template
        `TAKE_KBIT` or `TAKE_TABLE4`.
    values, scales : numpy.ndarray or None
        float32 values of the indices and of 8-bit scales; None where a plane holds them or there are none.
    """

    def __init__(self, template: Template, values: np.ndarray | None, scales: np.ndarray | None = None):
        self._template = template
        self._struct = np.zeros((), [("value", "f4", 256), ("map", "f4", 256)])
        for field, given in (("value", values), ("map", scales)):
            if given is not None:
                self._struct[field][: given.size] = given

    def __call__(self, planes: tuple[Any, ...], shape: tuple[int, ...], ids: Any, out: Any, *about: int) -> None:
        """Fill `out` with the rows `ids` of an array of `shape`; `about` are the format's own numbers."""
        kernel = _kernel(self._template, out.dtype, ids.dtype)
        eights, per_row = out.size // 8, math.prod(shape[1:]) // 8
        numbers = (eights, shape[0], *map(np.int32, (per_row, *about)))
        kernel(out, -(-eights // _THREADS), (*planes, ids, out, *numbers, by_value(self._struct)))


@functools.cache
def _kernel(template: Template, dtype: np.dtype, ids: np.dtype) -> Kernel:
    return Kernel(template, (CXX_TYPES[dtype.name], IDS_CXX[ids.name]), _THREADS)
