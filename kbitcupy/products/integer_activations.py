"""Activations as products of integers take them: int8 codes, and scales of tokens or of 32 neighbours.

``"int8"`` is W8A8's rule (`kbitcupy.products.int8`): one scale a token, ``fl(a / 127)`` of its absmax a (1 where that
is 0), codes ``rint(fl(x / scale))``. ``"q8_1"`` is GGUF's, of 32 neighbours each, the last of a token fewer:

    e = fl(a / 127),  q = round(fl(x * fl(1 / e))), halves away from zero, clamped to -127 .. 127

in float32, subnormal numbers kept; where e is 0, so are the codes. NaN counts as 0 and an infinity as the largest
float32; float64 is rounded first. Scales stay float32, and what sums there are, are those of codes: a half for either
of them, as in GGUF's own blocks, would overflow for activations over 2047 and 65504, and the sum of the numbers instead
of the codes makes errors larger where weights have minima.

Source: ggml, ``quantize_row_q8_1_ref``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_BOOLS, CXX_TYPES, Template, cxx_type
from ..backend.launch import Kernel, Planned, packed
from ..backend.structs import Constants
from ..formats.base import IntegerCodes, register_templates
from ..ops import source
from . import activations
from .activations import FLOATS, LARGEST, Rule
from .int8 import quantize_tokens, token_planes

#: Elements that share a scale in "q8_1".
Q8_BLOCK = 32
#: The presets, and where codes lie, as kernels/linear/integer_activations.cuh has them.
NUMBERS = Constants(
    Q8_BLOCK=Q8_BLOCK,
    TOKEN_THREADS=1024,
    FRAGMENT_K=64,
    TAKEN=0,
    INT8_TOKENS=1,
    Q8_1_TOKENS=2,
    ROWS=0,
    ROWS_SPLIT=1,
    IN_TURN=2,
    NIBBLES=3,
    HALVES=4,
    OWN_BYTES=5,
    OWN_NIBBLES=6,
    HALF_ROWS=7,
    HALVES_IN_TURN=8,
)
#: Tokens of experts in ternary may be quantized by the rule of `kbitcupy.products.activations`, too.
BITNET, _BITNET_RULE = "bitnet", Rule()
#: Columns of codes come in multiples of this.
PITCH = 128
_PRESETS = {"int8": NUMBERS.INT8_TOKENS, "q8_1": NUMBERS.Q8_1_TOKENS}
_FILE, _NAME = "linear/integer_activations.cu", "quantize_integers"
_TYPES = *(CXX_TYPES[name] for name in FLOATS), "signed char"
_TEMPLATE = Template(_FILE, _NAME, (_TYPES, CXX_BOOLS), structs=(NUMBERS,))
# Rows of floats with one scale a token: threads of a block, the most and those of many tokens; elements of a thread.
_ROW_SIZES = Constants(ROW_THREADS=512)
_ROW_THREADS, _SIXTEEN = 256, 16
_ROW_TEMPLATE = Template("linear/row_tokens.cu", "quantize_row_tokens", (_TYPES[:-1], CXX_BOOLS), structs=(_ROW_SIZES,))
register_templates(_TEMPLATE, _ROW_TEMPLATE)
_NUMBERS, _ROW_NUMBERS = ("i4",) * 6, ("i4",) * 3
_SIGNATURE, _ROW_SIGNATURE = (*("p",) * 4, _NUMBERS), (*("p",) * 3, _ROW_NUMBERS)
# Threads of a part of a token, the most and the least: few blocks leave multiprocessors to the product that follows.
_PART_THREADS, _LEAST_THREADS, _HALF = 512, 128, np.float32(0.5)
_OF_ROWS = NUMBERS.ROWS, NUMBERS.ROWS_SPLIT
# Tokens from which on a device has no room for a block of each.
_MANY = 256


class Tokens(NamedTuple):
    """Tokens on NumPy.

    Parameters
    ----------
    codes : numpy.ndarray
        int8 [tokens, K].
    scales : numpy.ndarray
        float32 [tokens, 1], or [tokens, ceil(K / 32)] for "q8_1".
    """

    codes: np.ndarray
    scales: np.ndarray


def quantize_host(x: np.ndarray, preset: str) -> Tokens:
    """A matrix of floats."""
    x = source(x, FLOATS)
    if preset != "q8_1":
        codes, scales = activations.quantize(x, _BITNET_RULE) if preset == BITNET else quantize_tokens(x, None, None)
        return Tokens(codes, scales.reshape(-1, 1))
    tokens, depth = x.shape
    blocks = -(-depth // Q8_BLOCK)
    with np.errstate(all="ignore"):
        numbers = np.nan_to_num(x.astype(np.float32), posinf=float(LARGEST), neginf=-float(LARGEST))
        numbers = np.pad(numbers, ((0, 0), (0, blocks * Q8_BLOCK - depth))).reshape(tokens, blocks, Q8_BLOCK)
        scales = np.abs(numbers).max(axis=2, initial=0) / np.float32(127)
        numbers *= np.where(scales == 0, np.float32(0), np.float32(1) / scales)[..., None]
        np.clip(numbers, -127, 127, out=numbers)
        whole = np.trunc(numbers)
        whole += np.copysign(np.abs(numbers - whole) >= _HALF, numbers)
    return Tokens(np.nan_to_num(whole).astype(np.int8).reshape(tokens, -1)[:, :depth], scales)


def pitch_of(depth: int) -> int:
    """Bytes of a row of codes."""
    return max(-(-depth // PITCH) * PITCH, PITCH)


def padded_of(tokens: int) -> int:
    """Tokens for which scales and sums have room: a multiple of 8."""
    return -(-tokens // 8) * 8


@dataclass(frozen=True, eq=False)
class Quantizing(Planned):
    """The launch that quantizes tokens of one shape.

    Parameters
    ----------
    summed : bool
        Whether it takes an address of sums.
    numbers : bytes
        Its arguments behind addresses.
    """

    summed: bool
    numbers: bytes

    def start(self, x: int, codes: int, scales: int, sums: int) -> None:
        """Launch it with these addresses."""
        if self.summed:
            self.launch(self.grid, (x, codes, scales, sums, self.numbers))
        else:
            self.launch(self.grid, (x, codes, scales, self.numbers))


PlanT = TypeVar("PlanT", bound=Planned)


@dataclass(frozen=True, eq=False)
class Launches(Generic[PlanT]):
    """Those of a product of one shape.

    Parameters
    ----------
    quantize : Quantizing
        The first one.
    product : Planned
        The second one.
    part : IntegerCodes
        How the weight lies.
    size, scales_at, sums_at : int
        Bytes that the first one writes, and where in them, behind codes, scales begin, or what a kernel has in their
        place, and sums; 0 without sums.
    step : int
        From the scales of 32 elements to those of the next ones; 1 where tokens have one each.
    zeros_at, zeros : int
        Where the second one wants bytes to be 0 that the first one leaves as they are, and how many.
    """

    quantize: Quantizing
    product: PlanT
    part: IntegerCodes
    size: int
    scales_at: int
    sums_at: int = 0
    step: int = 1
    zeros_at: int = 0
    zeros: int = 0

    def start(self, x: Any, address: int, tokens: int) -> tuple[Any, int, int, int]:
        """Quantize tokens, or bring those of int8 into order, whose numbers are at that address.

        Returns
        -------
        tuple
            The memory that begins with codes, the addresses of scales and of sums, and the step between scales.
        """
        scratch = _xp.allocate(self.size)
        codes = scratch.ptr
        if self.zeros:
            (scratch + self.zeros_at).memset_async(0, self.zeros)
        sums = codes + self.sums_at if self.sums_at else 0
        if isinstance(x, QuantizedArray):
            given = token_planes(x)[1]
            self.quantize.start(address, codes, 0, sums)
            return scratch, given.data.ptr, sums, int(given.size == tokens)
        scales = codes + self.scales_at
        self.quantize.start(address, codes, scales, sums)
        return scratch, scales, sums, self.step


def by_rows(depth: int, preset: str | None, layout: int, summed: bool, vector: bool) -> bool:
    """Whether a block quantizes a row of floats, which then start at multiples of 16 bytes."""
    return preset == "int8" and not summed and vector and depth % _SIXTEEN == 0 and layout in _OF_ROWS


@functools.lru_cache(maxsize=4096)
def quantizing(
    dtype: np.dtype,
    tokens: int,
    depth: int,
    preset: str | None,
    layout: int,
    group: int,
    summed: bool,
    vector: bool,
    device: int,
    zeros: int = 0,
) -> Quantizing:
    """How `quantize_into` quantizes, its kernel compiled; with `vector` x starts at a multiple of 16 bytes.

    Of `by_rows` there may be so many zeros, of 4 bytes, behind the scales.
    """
    vector = vector and depth % 8 == 0
    if by_rows(depth, preset, layout, summed, vector):
        threads = _row_threads(depth, tokens > _MANY)
        kernel = _row_kernel(cxx_type(dtype), layout == NUMBERS.ROWS_SPLIT, threads)
        numbers = packed(_ROW_NUMBERS, depth, pitch_of(depth), zeros)
        return Quantizing(kernel.ready(device).launch, (tokens, 1, 1), False, numbers)
    threads, parts = _cut(depth, preset != "int8" and (group != 0 or not summed), tokens > _MANY)
    cxx = "signed char" if preset is None else cxx_type(dtype)
    number = NUMBERS.TAKEN if preset is None else _PRESETS[preset]
    pitch = depth if layout == NUMBERS.HALF_ROWS else pitch_of(depth)
    numbers = packed(_NUMBERS, depth, pitch, padded_of(tokens), number, layout, group)
    return Quantizing(_kernel(cxx, vector, threads).ready(device).launch, (tokens, parts, 1), True, numbers)


@functools.cache
def _kernel(cxx: str, vector: bool, threads: int) -> Kernel:
    return Kernel(_TEMPLATE, (cxx, CXX_BOOLS[vector]), threads, signature=_SIGNATURE, early=True)


@functools.cache
def _row_kernel(cxx: str, split: bool, threads: int) -> Kernel:
    return Kernel(_ROW_TEMPLATE, (cxx, CXX_BOOLS[split]), threads, signature=_ROW_SIGNATURE, early=True)


@functools.lru_cache(maxsize=1024)
def _row_threads(depth: int, many: bool) -> int:
    """Of a block with a token; with many tokens not so many, of which more blocks fit."""
    most = _ROW_THREADS if many else int(_ROW_SIZES.ROW_THREADS)
    return min(most, -(-depth // (32 * _SIXTEEN)) * 32)


@functools.lru_cache(maxsize=1024)
def _cut(depth: int, parts: bool, many: bool = False) -> tuple[int, int]:
    """Threads of a block, and blocks of a token; with many tokens not so many threads, of which more blocks fit."""
    octets = pitch_of(depth) // 8
    if parts:
        most = _LEAST_THREADS if many else _PART_THREADS
        threads = min(most, -(-octets // _LEAST_THREADS) * _LEAST_THREADS)
        return threads, -(-octets // threads)
    return min(max(1 << (octets - 1).bit_length(), 32), NUMBERS.TOKEN_THREADS // (1 + many)), 1


def quantize_into(
    x: Any, tokens: int, preset: str | None, codes: int, scales: int, sums: int, layout: int, group: int
) -> None:
    """Quantize tokens on the current device, in one launch.

    Parameters
    ----------
    x : cupy.ndarray
        [..., K] in a dtype of `FLOATS`, or int8 that is only brought into the order of `layout`; contiguous, `tokens`
        rows, one or more, of which none is empty.
    preset : {"int8", "q8_1", None}
        The rule; None for int8.
    codes, scales, sums : int
        Addresses of what is written. Codes: ``tokens * pitch_of(K)`` bytes, of fragments ``padded_of(tokens) *
        pitch_of(K)``, zeros from K on; as halves float16 ``[tokens, K]``, K a multiple of 32. Scales: float32
        ``[padded]``, of which `tokens` are written, or for "q8_1" ``[ceil(K / 32), padded]``. Sums of codes: int32
        ``[ceil(K / group), padded]``; 0 where none are wanted.
    layout : int
        One of `NUMBERS`.
    group : int
        32, 64, 128 or 256, elements of a sum; 0 for all of a token.
    """
    data = x.data
    address, device = data.ptr, data.device_id
    about = x.dtype, tokens, x.shape[-1], preset, layout, group, sums != 0, address % 16 == 0, device
    quantizing(*about).start(address, codes, scales, sums)


def quantizing_rows(
    dtype: np.dtype, tokens: int, depth: int, preset: str, vector: bool, device: int
) -> Callable[[int, int, int], None]:
    """The launch that quantizes tokens of floats to rows of `pitch_of` bytes, by any preset, its kernel compiled.

    It is called with the addresses of x, codes and scales, which are as those of `quantize_into`.
    """
    if preset == BITNET:
        about = _BITNET_RULE, None, vector, pitch_of(depth), 0, 0, False, device
        by_rule = activations.quantizing(dtype, tokens, depth, *about)
        return lambda x, codes, scales: by_rule.start(x, 0, codes, scales, 0)
    by_preset = quantizing(dtype, tokens, depth, preset, NUMBERS.ROWS, 0, False, vector, device)
    return lambda x, codes, scales: by_preset.start(x, codes, scales, 0)


def floats_of(x: Any) -> Any:
    """x on a GPU as `quantize_into` takes it."""
    return source(x, FLOATS)
