"""ggml's own products, by its compiled library and ctypes, beside ours.

The library is the one that ``KBITCUPY_GGML`` names, else one of an installed package that has it built for CUDA, such
as llama-cpp-python. A product is timed as a server has it: weights and tokens (float32) lie on the device, and a graph
of many products, of other weights each time so that none is in the cache, is computed at once. ggml works on a stream
of its own: its time is that of the host, until the graph is done.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Names the library.
VARIABLE = "KBITCUPY_GGML"
_PACKAGES = ("llama-cpp-python", "ggml-python", "xllamacpp", "pywhispercpp")
_FLOAT32 = 0  # ggml's number of it
_OF_TOKENS = 9, 15  # types, q8_1 and q8_k, that no weight has: asked for products with one, ggml ends the process
_P, _I32, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


# What is called: result, and arguments.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, (_InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead_custom": (_SIZE, (_SIZE, ctypes.c_bool)),
    "ggml_new_graph_custom": (_P, (_P, _SIZE, ctypes.c_bool)),
    "ggml_new_tensor_2d": (_P, (_P, _I32, _I64, _I64)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_nbytes": (_SIZE, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_backend_supports_op": (ctypes.c_bool, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors": (_P, (_P, _P)),
    "ggml_backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_tensor_get": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_graph_compute": (_I32, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_free": (None, (_P,)),
}


def found() -> Path | None:
    """The library with ggml's CUDA backend; None where there is none."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    for package in _PACKAGES:
        try:
            files = importlib.metadata.files(package) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if file.name.startswith(("libggml-cuda", "ggml-cuda")) and path.suffix != ".py" and path.is_file():
                return path
    return None


class Backend:
    """ggml on one device.

    Parameters
    ----------
    library : Path
        A shared library that has the backend, and ggml itself or a dependency on it.
    device : int or None
        The number of a GPU; None for the host's processor.

    Raises
    ------
    OSError
        When the library cannot be loaded, or has no such backend.
    """

    def __init__(self, library: Path, device: int | None):
        self.library = _loaded(library)
        name = "ggml_backend_cpu_init" if device is None else "ggml_backend_cuda_init"
        if not hasattr(self.library, name):
            raise OSError(f"{library} has no {name}")
        start = getattr(self.library, name)
        start.restype = _P
        self.handle = start() if device is None else start(_I32(device))
        if not self.handle:
            raise OSError(f"{name} of {library} failed")

    def close(self) -> None:
        """Give the device back."""
        self.library.ggml_backend_free(self.handle)
        self.handle = None


@functools.cache
def _loaded(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise OSError(f"{library} has no {name}: is it a library of ggml?") from None
        function.restype, function.argtypes = result, arguments
    return loaded


class Products:
    """A graph of products of equal shape with `copies` of a weight, one after the other.

    Parameters
    ----------
    backend : Backend
        Where they are computed.
    kind : int
        ggml's number of the weight's type.
    blocks : ndarray of uint8
        The weight, [N, bytes of a row].
    x : ndarray of float32
        The tokens, [M, K].
    copies : int
        Weights, each of which takes memory of its own.
    products : int
        Of the graph.

    Raises
    ------
    ValueError
        When the backend has no such product, or the weight is of another size.
    MemoryError
        When there is no room.

    Notes
    -----
    Of a type that is newer than the library ggml ends the process, and there is no call that tells beforehand.
    """

    def __init__(self, backend: Backend, kind: int, blocks: np.ndarray, x: np.ndarray, copies: int, products: int):
        self._backend, self._context, self._buffer = backend, None, None
        ggml, (rows, self._shape) = backend.library, (len(blocks), (len(x), len(blocks)))
        blocks, x = np.ascontiguousarray(blocks), np.ascontiguousarray(x, np.float32)
        size = ggml.ggml_tensor_overhead() * (copies + products + 8) + ggml.ggml_graph_overhead_custom(
            2 * products, False
        )
        if kind in _OF_TOKENS:
            raise ValueError(f"type {kind} is one of tokens")
        self._context = ggml.ggml_init(_InitParams(size, None, True))
        if not self._context:
            raise MemoryError("ggml found no room for a graph")
        try:
            weights = [ggml.ggml_new_tensor_2d(self._context, kind, x.shape[1], rows) for _ in range(copies)]
            tokens = ggml.ggml_new_tensor_2d(self._context, _FLOAT32, x.shape[1], len(x))
            self._results = [ggml.ggml_mul_mat(self._context, weights[i % copies], tokens) for i in range(products)]
            if ggml.ggml_nbytes(weights[0]) != blocks.nbytes:
                raise ValueError(f"a weight of {blocks.nbytes} bytes, and ggml has {ggml.ggml_nbytes(weights[0])}")
            if not ggml.ggml_backend_supports_op(backend.handle, self._results[0]):
                raise ValueError("it has no such product on this device")
            self._graph = ggml.ggml_new_graph_custom(self._context, 2 * products, False)
            for result in self._results:
                ggml.ggml_build_forward_expand(self._graph, result)
            self._buffer = ggml.ggml_backend_alloc_ctx_tensors(self._context, backend.handle)
            if not self._buffer:
                raise MemoryError("ggml found no room for the weights")
            for weight in weights:
                ggml.ggml_backend_tensor_set(weight, blocks.ctypes.data, 0, blocks.nbytes)
            ggml.ggml_backend_tensor_set(tokens, x.ctypes.data, 0, x.nbytes)
        except BaseException:
            self.close()
            raise

    def compute(self) -> None:
        """All products, until they are there."""
        status = self._backend.library.ggml_backend_graph_compute(self._backend.handle, self._graph)
        if status:
            raise RuntimeError(f"ggml's graph failed with status {status}")

    def result(self, number: int) -> np.ndarray:
        """float32[M, N] of one of the products."""
        out = np.empty(self._shape, np.float32)
        self._backend.library.ggml_backend_tensor_get(self._results[number], out.ctypes.data, 0, out.nbytes)
        return out

    def microseconds(self, rounds: int) -> float:
        """Of a product, the least of so many rounds."""
        for _ in range(3):  # what is captured as a graph, is so after the first ones
            self.compute()
        taken = []
        for _ in range(rounds):
            start = time.perf_counter()
            self.compute()
            taken.append(time.perf_counter() - start)
        return min(taken) / len(self._results) * 1e6

    def close(self) -> None:
        """Give the memory back."""
        ggml = self._backend.library
        if self._buffer:
            ggml.ggml_backend_buffer_free(self._buffer)
        if self._context:
            ggml.ggml_free(self._context)
        self._buffer = self._context = None


def timed(
    backend: Backend, kind: int, blocks: np.ndarray, tokens: int, shape: Sequence[int], cold: int, rounds: int = 10
) -> float:
    """Microseconds of a product of `tokens` tokens with a weight [N, K] whose copies exceed `cold` bytes."""
    x = np.random.default_rng(0).standard_normal((tokens, shape[1]), np.float32)
    copies = max(1, min(64, math.ceil(cold / max(1, blocks.nbytes))))
    products = Products(backend, kind, blocks, x, copies, copies * -(-48 // copies))
    try:
        return products.microseconds(rounds)
    finally:
        products.close()
