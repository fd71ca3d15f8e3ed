"""Compressed arrays in CUDA kernels of one's own: headers, compiler options and the argument for ``cupy.RawKernel``.

Every format has a decoder in CUDA C++, with which kbitcupy's own kernels are made. A kernel of yours includes the same
header and reads a `kbitcupy.QuantizedArray` where it lies; nothing is decoded to memory first.

>>> import numpy as np, kbitcupy as kb
>>> q = kb.quantize(np.ones((8, 64), np.float32), "kbit4")
>>> decoder = kb.raw.decoder(q)
>>> decoder.type
'Kbit<E4M4>'
>>> kernel_source = kb.raw.preamble(decoder) + '''
... extern "C" __global__ void sum_of_squares(const __grid_constant__ kbit::Array<KBIT_TYPE> q, float* y) {
...     const kbit::Reader<KBIT_TYPE> reader(q);  // every thread of the block
...     float sum = 0.0f;
...     reader.for_each([&](long long first, int count, const float (&v)[8]) {
...         for (int e = 0; e < 8; ++e) sum += v[e] * v[e];
...     });
...     atomicAdd(y, sum);
... }
... '''.replace("KBIT_TYPE", decoder.type)

With an array on a GPU it is compiled and launched like any other::

    kernel = cupy.RawKernel(kernel_source, "sum_of_squares", options=kb.raw.options(decoder))
    kernel((132,), (256,), (decoder.argument, y))

**What is promised.** The names in the namespace ``kbit`` of ``kbitcupy.cuh`` (``Array``, and of ``Reader`` the
constructor, ``size``, ``octets``, ``octet``, ``[]`` and ``for_each``) and the functions here keep their meaning in a
major version. The names of decoders and what their headers hold belong to a version: ask `decoder` for them each time.
Elements are the float32 numbers that `kbitcupy.dequantize` gives, bit for bit, with the options that `options` names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from .array import QuantizedArray
from .backend import compile as _compile
from .backend.structs import declarations
from .errors import DeviceError, FormatError

__all__ = ["Argument", "Decoder", "decoder", "get_include", "options", "preamble"]

_HEADER = "kbitcupy.cuh"


class Argument(np.ndarray):
    """A kernel's argument of type ``kbit::Array<F>``, passed by value: a NumPy array of one element.

    It keeps the planes alive, whose addresses it holds.

    Attributes
    ----------
    planes : mapping
        Names to CuPy arrays.
    """

    planes: Mapping[str, Any]


class Decoder:
    """What a kernel of one's own needs to read one compressed array; `decoder` makes it.

    Attributes
    ----------
    type : str
        The C++ type that decodes the format of the array: the parameter of ``kbit::Array`` and ``kbit::Reader``.
    header : str
        The file that defines it, relative to `get_include`, or to the folder of the package that brings the format.
    shape : tuple of int
        Of the array; of a stack with its leading lengths.
    members : int
        How many arrays a stack holds: ``kbit::Reader<F>(q, i)`` reads member i.
    """

    def __init__(self, q: QuantizedArray):
        found = q.format.decoder
        if found is None:
            raise FormatError(f"{q.format} has no decoder in CUDA C++; dequantize the array first")
        self._decoder, self._q = found, q
        self.type: str = found.struct
        self.header: str = found.header
        self.shape, self.members = q.shape, q.members

    @functools.cached_property
    def argument(self) -> Argument:
        """The argument of the kernel.

        Raises
        ------
        DeviceError
            When the array is in host memory.
        """
        planes = dict(self._q.planes)
        if any(isinstance(plane, np.ndarray) for plane in planes.values()):
            raise DeviceError("the array is in host memory, and kernels read it on a GPU: take q.to_device('cuda:0')")
        packed = self._decoder.argument(planes, self.shape[self._q.lead :], self.members)
        made = np.frombuffer(packed, f"V{len(packed)}").view(Argument)
        made.planes = planes
        return made

    def __repr__(self) -> str:
        return f"Decoder({self.type!r}, {self.header!r}, shape={self.shape})"


def decoder(q: QuantizedArray) -> Decoder:
    """What a kernel needs to read `q` in place: the C++ type of its elements' decoder, its header, and the argument.

    Parameters
    ----------
    q : QuantizedArray
        Of any format that is registered, those of other packages too. In host memory it has everything but
        `Decoder.argument`.

    Returns
    -------
    Decoder

    Raises
    ------
    TypeError
        When `q` is no QuantizedArray.
    FormatError
        When its format has no decoder in CUDA C++.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.raw.decoder(kb.quantize(np.ones(64, np.float32), "nf4"))
    Decoder('Table4<false>', 'formats/table4.cuh', shape=(64,))
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray: kb.quantize(x, 'kbit4')")
    return Decoder(q)


def preamble(*decoders: Decoder) -> str:
    """What stands ahead of the source of a kernel that reads arrays with `decoders`: declarations and includes.

    Parameters
    ----------
    *decoders : Decoder
        Of all arrays that the kernel reads, of whatever formats.

    Returns
    -------
    str
        It ends with a ``#line``, so that messages of the compiler count the lines of what follows from 1.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> print(kb.raw.preamble(kb.raw.decoder(kb.quantize(np.ones(64, np.float32), "nf4"))))
    #include "kbitcupy.cuh"
    #include "formats/table4.cuh"
    #line 1
    <BLANKLINE>
    """
    found = [each._decoder for each in _checked(decoders)]
    declared = tuple(dict.fromkeys(each for decoder in found for each in decoder.declared))
    headers = dict.fromkeys((_HEADER, *(decoder.header for decoder in found)))
    ahead = [declarations(declared)] if declared else []
    return "\n".join((*ahead, *(f'#include "{header}"' for header in headers), "#line 1", ""))


def get_include() -> str:
    """The folder of kbitcupy's headers, for the compiler's option ``-I``.

    Returns
    -------
    str

    Examples
    --------
    >>> import os, kbitcupy as kb
    >>> os.path.exists(os.path.join(kb.raw.get_include(), "kbitcupy.cuh"))
    True
    """
    return str(_compile.kernel_folder())


def options(*decoders: Decoder) -> tuple[str, ...]:
    """The options with which NVRTC compiles a kernel that includes the headers.

    Among them is a macro with a hash of the headers, since CuPy's cache of compiled kernels does not look into them,
    and ``--fmad=false``: a contraction would round otherwise than the contracts of the formats say. Where a kernel of
    yours wants a fused multiply-add, it writes ``fmaf``.

    Parameters
    ----------
    *decoders : Decoder
        Of the arrays that the kernel reads; needed where the formats of other packages bring headers of their own.

    Returns
    -------
    tuple of str

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.raw.options()[:2]
    ('-std=c++17', '--fmad=false')
    """
    folders = dict.fromkeys(each._decoder.folder for each in _checked(decoders) if each._decoder.folder is not None)
    return _compile.include_options(tuple(folders))


def _checked(decoders: tuple[Any, ...]) -> tuple[Decoder, ...]:
    for each in decoders:
        if not isinstance(each, Decoder):
            raise TypeError(f"{each!r} is {type(each).__name__}; allowed is what kb.raw.decoder(q) returns")
    return decoders
