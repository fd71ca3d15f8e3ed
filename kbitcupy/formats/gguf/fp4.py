"""4-bit floats with one byte as their scale: ``mxfp4`` of 32 elements, ``nvfp4`` of 16.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
scales   mxfp4: uint8, 1             E: the scale A is 2^(E - 128)
         nvfp4: uint8, 4             of 16 elements each, UE4M3: A is half of what it stands for
qs       mxfp4: uint8, 16            byte i: the codes of elements 2 i (low nibble) and 2 i + 1, as OCP's formats have
         nvfp4: uint8, 32            them
scale    float32, 1                  nvfp4 with ``tensor_scale``: a factor of the whole array
=======  ==========================  ==================================================================================

A code stands for F = 0 1 2 3 4 6 8 12, or with bit 3 set for their negatives: twice what E2M1 has, so that A is half of
the usual scale; code 8 is 0 as well. An element decodes to A * F, which is exact, subnormal numbers included, and
overflows to infinity with E = 255 alone; with a tensor scale to A * F * scale, rounded once. A byte of UE4M3 has an
exponent e in bits 3 to 6 and a mantissa m in bits 0 to 2: (1 + m / 8) * 2^(e - 7), or m * 2^-9 where e is 0. Bit 7 is
ignored; 0x7F is 0, but 0xFF is 480.

A file has the planes' entries in this order, but other nibbles: byte i of ``mxfp4`` has the codes of elements i and
i + 16; byte 8 s + i of ``nvfp4`` those of elements i and i + 8 of the 16 with scale s. A tensor scale is no part of it.

mxfp4: E = floor(log2(max|x|)) + 125, 0 below 2^-125, where log2 is rounded to float32: the last floats below a power of
two have the E of that power. nvfp4: the scale is the UE4M3 of v = min(max|x| / 6, 448). Where e is 0,
m = min(7, trunc(512 v + 0.5)); else the first bit that is left out rounds the mantissa up; from 256 on it is 448. A
code is the first of the 16 with the least |F * A - x|. With a tensor scale x * (1 / scale) takes the place of
x. All in float32, each operation rounded.

Source: OCP Microscaling Formats 1.0; ggml, ``ggml-quants.c`` (``quantize_row_mxfp4_ref``, ``quantize_row_nvfp4_ref``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ...backend import xp as _xp
from ...backend.compile import Template
from ...backend.launch import Kernel
from ...errors import FormatError
from .. import integer_codes
from ..base import register
from ..blocks import Field, Importance
from ..planes import Plane
from . import Gguf
from .arithmetic import largest_magnitude, pack_fields

#: What codes stand for, F.
VALUES = np.array(integer_codes.FP4, np.int8)


class MXFP4(Gguf):
    """4-bit floats (E2M1), a power of two as the scale of 32."""

    name, bits, block, origin = "mxfp4", 4, 32, "OCP Microscaling Formats 1.0, GGUF (ggml)"
    summary = "4-bit floats, a power of two as the scale of 32"
    fields = (Field("scales", "uint8", 1), Field("qs", "uint8", 16, split=32))
    struct, ggml_type, default = "MXFP4", 39, False

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        largest = largest_magnitude(rows)
        exponent = np.maximum(floor_log2(largest) + 125, 0)
        codes = nearest(rows, power_of_two(exponent))
        return exponent.astype(np.uint8), pack_fields(codes, 4, 16)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        return values_of(planes["qs"], power_of_two(planes["scales"].astype(np.int32)))


class NVFP4(Gguf):
    """4-bit floats (E2M1), a float of 8 bits (UE4M3) as the scale of 16, and one for all if wanted.

    Parameters
    ----------
    tensor_scale : bool, default False
        Whether a float32 factor of the whole array is stored, too: `scale`, which a call of `quantize` brings, 1 where
        it brings none. It is implied where a call brings one.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.arange(64, dtype=np.float32) * 1e-5
    >>> q = kb.quantize(x, "nvfp4", scale=1e-5)
    >>> q.format, q.planes["scale"]
    (get_format('nvfp4:tensor_scale=true'), array([1.e-05], dtype=float32))
    """

    name, bits, block, origin = "nvfp4", 4, 64, "NVIDIA (NVFP4), GGUF (ggml)"
    summary = "4-bit floats, an 8-bit float as the scale of 16"
    fields = (Field("scales", "uint8", 4), Field("qs", "uint8", 32, split=16))
    struct, ggml_type, default = "NVFP4", 40, False
    takes = ("scale",)
    implied = MappingProxyType({"scale": ("tensor_scale", True)})
    tensor_scale = "scale"

    def __init__(self, *, tensor_scale: bool = False):
        if not isinstance(tensor_scale, (bool, np.bool_)):
            raise FormatError(f"tensor_scale is {tensor_scale!r}; allowed are True and False")
        self.has_tensor_scale = bool(tensor_scale)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        return {}, {"tensor_scale": True}

    def options(self) -> dict[str, Any]:
        return {"tensor_scale": self.has_tensor_scale}

    def check_given(self, given: Mapping[str, Any]) -> None:
        if "scale" in given:
            if not self.has_tensor_scale:
                raise FormatError(f"scale is given, but {self} has no tensor scale: use nvfp4:tensor_scale=true")
            _check_scale(given["scale"])

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        planes = super().planes(shape)
        return {**planes, "scale": Plane("float32", (1,), "tensor")} if self.has_tensor_scale else planes

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        if self.has_tensor_scale:
            _store(planes["scale"], _check_scale(given.get("scale", 1.0)))
        super().encode_numpy(x, planes, given)

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        if self.has_tensor_scale:
            _store(planes["scale"], _check_scale(given.get("scale", 1.0)))
        super().encode_cuda(x, planes, given)

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        x = rows.reshape(-1, 16)
        largest = largest_magnitude(x)
        scales = encode_ue4m3(np.minimum(largest / np.float32(6), np.float32(448)))
        codes = nearest(x, ue4m3_halves()[scales])
        return scales.reshape(-1, 4), pack_fields(codes.reshape(-1, 64), 4, 8)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        return values_of(planes["qs"], ue4m3_halves()[planes["scales"]])


def _store(plane: Any, scale: Any) -> None:
    """Write a scale of `_check_scale` into its plane, on the device of the plane."""
    if isinstance(plane, np.ndarray):
        plane[...] = _xp.to_device(scale, "cpu") if _xp.is_cupy(scale) else scale
    elif isinstance(scale, float):
        _STORE(plane, 1, (plane, scale))
    elif _xp.same_gpu(scale, plane) and scale.dtype == np.float32:
        plane.data.copy_from_device_async(scale.data, plane.nbytes)
    else:
        plane[...] = _xp.to_device(scale, _xp.device_of(plane))


_STORE = Kernel(Template("gguf.cu", "store_scale", hot=False), (), 1, signature=("p", "f4"))
NVFP4.kernels += (_STORE.template,)


def _check_scale(scale: Any) -> Any:
    """A tensor scale as a Python float, or an array of one number on a device, which is not looked at.

    Raises
    ------
    TypeError
        When it is not numeric.
    FormatError
        When it is not one number, or it or its inverse is not finite and positive in float32.
    """
    if type(scale) is not float:
        array = _xp.as_array(scale, "scale")
        if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
            raise TypeError(f"scale is {array.dtype}; it must be a number")
        if array.size != 1:
            raise FormatError(f"scale has shape {array.shape}; nvfp4 takes one number, the scale of the whole array")
        if _xp.is_cupy(array):
            return array.reshape(1)
        scale = float(array.reshape(()))
    with np.errstate(over="ignore"):
        rounded = float(np.float32(scale))
    if not 2.0**-127 <= rounded < np.inf:
        raise FormatError(f"scale is {scale}; it must be positive and finite in float32, as must be 1 / scale")
    return rounded


# ---- scales ----------------------------------------------------------------------------------------------------------


def power_of_two(exponent: np.ndarray) -> np.ndarray:
    """2^(E - 128) of integers from 0 to 255, float32."""
    bits = np.where(exponent < 2, 0x200000 << np.minimum(exponent, 1), (exponent - 1) << 23)
    return bits.astype(np.int32).view(np.float32)


def floor_log2(x: np.ndarray) -> np.ndarray:
    """floor(log2(x)) of float32 >= 0, where log2 is rounded to float32: int32; -127 where x is below 2^-126."""
    bits = x.view(np.int32)
    return (bits + _lifted()[bits >> 23] >> 23) - 127


@functools.cache
def _lifted() -> np.ndarray:
    """How many floats below each power of two have its logarithm, int32, by the exponent bits of these floats.

    The n-th float below 2^k has the logarithm k - n * 2^-24 / ln 2. Just below k floats are 2^(e - 23) apart, with
    e = floor(log2(k - 1)), or floor(log2(-k)) of negative ones, and what is nearer than half of that becomes k.
    """
    counts = np.zeros(256, np.int32)
    for biased in range(1, 255):
        k = biased - 126
        below = k - 1 if k > 0 else -k
        if below:
            counts[biased] = math.floor(math.log(2) * 2.0 ** math.floor(math.log2(below)))
    return counts


def encode_ue4m3(v: np.ndarray) -> np.ndarray:
    """float32 from 0 to 448 as UE4M3, ggml's way, uint8."""
    bits = v.view(np.int32)
    normal = (bits + (1 << 19) >> 20) - (120 << 3)  # the first bit that is left out rounds up
    small = np.minimum(v * np.float32(512) + np.float32(0.5), np.float32(7)).astype(np.int32)
    return np.where(normal >= 0x78, 0x7E, np.where(bits < 121 << 23, small, normal)).astype(np.uint8)


@functools.cache
def ue4m3_halves() -> np.ndarray:
    """Half of what the 256 bytes stand for, float32."""
    every = np.arange(256)
    exponent, mantissa = every >> 3 & 15, every & 7
    values = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7)) / 2
    values[0x7F] = 0
    return values.astype(np.float32)


# ---- codes -----------------------------------------------------------------------------------------------------------


def values_of(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What codes stand for, neighbours in a byte, times the scale of each row: float32[rows, elements]."""
    y = np.take(_pairs(), packed).view(np.float32).reshape(len(scale), -1)
    y *= scale[:, None]
    return y


@functools.cache
def _pairs() -> np.ndarray:
    """The two float32 that each byte stands for, as one item."""
    every = np.arange(256)
    return np.stack([VALUES[every & 15], VALUES[every >> 4]], axis=1).astype(np.float32).view(np.complex64).reshape(-1)


def nearest(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The first code of the least |F * scale - x|, uint8; `scale` is float32 beside x, 0 where all codes are 0.

    In the middle of two neighbours that is the one of lesser magnitude, and none is negative that stands for 0. So
    2 |x| / scale, rounded up, is compared with twice the middles, whole numbers, across which no quotient is rounded.
    """
    doubled = np.abs(x)
    doubled /= np.where(scale == 0, np.float32(np.inf), scale * np.float32(0.5))
    np.ceil(doubled, out=doubled)
    np.minimum(doubled, np.float32(_TWICE_THE_MIDDLES[-1] + 1), out=doubled)
    whole = doubled.astype(np.uint8)
    codes = np.zeros(x.shape, np.uint8)
    for middle in _TWICE_THE_MIDDLES:
        codes += whole > middle
    below = x < 0
    below &= codes > 0
    codes |= below.view(np.uint8) << np.uint8(3)
    return codes


# The middles of neighbouring values of codes 0 to 7, doubled.
_TWICE_THE_MIDDLES = np.array([1, 3, 5, 7, 10, 14, 20], np.uint8)

for _format in (MXFP4, NVFP4):
    register(_format.name, _format)
