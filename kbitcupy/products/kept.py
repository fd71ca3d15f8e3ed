"""What products on NumPy keep of weights that are multiplied again, where a caller asks for it."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..array import QuantizedArray

_ACTIVE: ContextVar[tuple[DecodedCache, ...]] = ContextVar("kbitcupy_decoded_cache", default=())


class DecodedCache:
    """Weights that products on NumPy keep decoded, so that a weight that is used again is decoded once.

    Decoding a weight for one token takes several times as long as the product. Within ``with cache:`` products with
    NumPy arrays (`linear`, `matmul`, `kbitcupy.bitnet.linear`, the layers) look for the decoded weight here, and put it
    here. Results are the same, bit for bit. Kept are 4 bytes for an element (8 beside float64 activations), and 2.7 for
    ``activations="bitnet"`` or ``"int8"`` with a ternary weight, whose product then takes less than that of a float32
    matrix. Products on a GPU, with experts, with other int8 weights and with ternary weights whose scales belong to
    groups keep nothing.

    Parameters
    ----------
    max_bytes : int
        Of all that is kept. The weight that was used longest ago goes first; one that is larger alone is not kept.

    Attributes
    ----------
    max_bytes : int
        As given.

    Raises
    ------
    TypeError
        When `max_bytes` is no integer.
    ValueError
        When it is negative.

    Notes
    -----
    An entry belongs to the planes of a weight and goes with them: weights that share their planes share it, and a slice
    has one of its own. Who writes to planes, as ``quantize(..., out=q)`` does, calls `clear`. A cache may be entered
    again and by several threads; each thread enters it for itself.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32), "kbit4")
    >>> x = np.ones((1, 128), np.float32)
    >>> cache = kb.DecodedCache(1 << 20)
    >>> with cache:
    ...     y = [kb.linear(x, q) for token in range(3)]
    >>> cache
    DecodedCache(32768 of 1048576 bytes, 1 weight)
    >>> bool((y[2] == kb.linear(x, q)).all())
    True
    """

    def __init__(self, max_bytes: int):
        if isinstance(max_bytes, bool):
            raise TypeError(f"max_bytes is {max_bytes!r}; it must be an integer")
        try:
            self.max_bytes = operator.index(max_bytes)
        except TypeError:
            raise TypeError(f"max_bytes is {max_bytes!r}; it must be an integer, such as 1 << 30") from None
        if self.max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be 0 or more")
        self._entries: OrderedDict[tuple[Any, ...], tuple[np.ndarray, list[Any]]] = OrderedDict()
        self._bytes = 0
        # A plane may be collected, and its entry dropped, while this thread holds the lock.
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """What is kept."""
        return self._bytes

    def clear(self) -> None:
        """Drop all that is kept."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def __len__(self) -> int:
        """Weights that are kept."""
        return len(self._entries)

    def __enter__(self) -> DecodedCache:
        _ACTIVE.set((*_ACTIVE.get(), self))
        return self

    def __exit__(self, *exception: object) -> None:
        _ACTIVE.set(_ACTIVE.get()[:-1])

    def __repr__(self) -> str:
        plural = "" if len(self) == 1 else "s"
        return f"DecodedCache({self.nbytes} of {self.max_bytes} bytes, {len(self)} weight{plural})"

    def _find(self, q: QuantizedArray, kind: str, nbytes: int, make: Callable[[], np.ndarray]) -> np.ndarray | None:
        planes = tuple(q.planes.values())
        key = (kind, q.format, q.shape, q.lead, *map(id, planes))
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                return found[0]
        if nbytes > self.max_bytes:
            return None
        made = make()
        made.flags.writeable = False
        with self._lock:
            if key not in self._entries:
                gone = weakref.WeakMethod(self._drop)
                watched = [weakref.ref(plane, lambda _: (drop := gone()) and drop(key)) for plane in planes]
                self._entries[key] = made, watched
                self._bytes += made.nbytes
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))
        return made

    def _drop(self, key: tuple[Any, ...]) -> None:
        with self._lock:
            found = self._entries.pop(key, None)
            if found is not None:
                self._bytes -= found[0].nbytes


def kept(q: QuantizedArray, kind: str, nbytes: int, make: Callable[[], np.ndarray]) -> np.ndarray | None:
    """What is kept of a weight as this kind, made where it is not yet; None where nobody asked, or it is too large."""
    active = _ACTIVE.get()
    return active[-1]._find(q, kind, nbytes, make) if active else None
