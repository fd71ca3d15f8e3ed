"""The format ``ternary``: -1, 0 and 1 in 2 bits, with a scale for a tensor, row or group (BitNet b1.58).

======  ==================  ============================================================================================
plane   dtype, length       contents
======  ==================  ============================================================================================
codes   uint8,              of the flattened array, in blocks of 128: byte 32 b + m, bits 2 f and 2 f + 1: t + 1 of
        32 ceil(n / 128)    element 128 b + 32 f + m; beyond the end t is 0
scale   float32, one for    in C order of the blocks that share one
        each tensor, row
        or group
======  ==================  ============================================================================================

An element comes back as ``(code - 1) * scale``, one multiplication in float32. Code 3, which no quantizer writes, is 2.
Subnormal numbers are kept everywhere; a float64 array goes through float32.

Trits: with ``inv = fl(1 / scale)``, t is the sign of w where ``fl(|w| * inv) > 0.5``, else 0; that is ``clamp(rint(w *
inv), -1, 1)``, halves to even. With ``rounding="away"`` halves go away from zero: ``>= 0.5``. NaN is 0, an infinity has
the trit of its sign, and under a scale of 0 all trits are 0.

Scales, where the call gives none, for the n elements of a block. NaN counts as 0 and an infinity as the largest finite
float32; sums are in float64, their order is below.

=======  ===============================================================================================================
rule     scale
=======  ===============================================================================================================
absmean  ``max(fl(sum |w| / n), fl(eps))``, BitNet's; an array of no elements has the mean 0
absmax   ``max |w|``: exact where an array has been ternary before, which absmean would shrink by its share of zeros
fit      for weights that were never trained to be ternary: the mean of the ``|w|`` above ``fl(0.7 * mean |w|)``
         (ternary weight networks), then three times that of the ``|w|`` above ``fl(scale / 2)``, each rounded to
         float32; where none is above, the scale stays what it was, at first the mean
=======  ===============================================================================================================

Sums: the |w| of a block in its order, 256 at a time with zeros behind the last, each by the tree (i) + (i + half); of
those sums number i is added to lane i % 1024 of 1024, one after the other, and the lanes by such a tree.

The error of an element is at most ``max(scale / 2, |w| - scale)``, beside roundings.

Sources: "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits" (arXiv 2402.17764) and its code; ternary
weight networks, arXiv 1605.04711. Codes lie as those of GGUF's ``tq2_0`` do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel
from ..backend.structs import Constants, Struct
from ..backend.xp import contiguous, is_cupy, namespace
from ..errors import FormatError
from .base import Magnitude, Plane, Trits, register
from .chunks import AT_ONCE, CHUNK, has_special, narrow, room, unpack_fields, widen
from .decoders import Decoder, decodes, dequantize, templates
from .granular import Granular
from .granularity import (
    Blocks,
    Granularity,
    blocks_of,
    check_entries,
    check_host_scales,
    granularity_of,
    slab_size,
    walk,
)
from .integer_codes import IntegerCodes, lies_whole, scale_of

#: Elements whose codes lie together, and how many neighbours have the same field of their bytes.
BLOCK, RUN = 128, 32
RULES = ("absmean", "absmax", "fit")
#: Where fl(|w| * inv) is above, or not below, a half: |w| * inv, exactly, is above a half and half of what follows in
#: float32, which goes to the even half; or not below what is rounded to a half.
LIMITS = {"even": 0.5 + 2.0**-25, "away": 0.5 - 2.0**-26}

# The order of sums: of how many numbers each comes first, and how many lanes add them up; threads of a block of the
# kernels that read arrays.
_NUMBERS = Constants(SUMMED=256, LANES=1024, THREADS=256)
_SUMMED, _LANES, _THREADS = _NUMBERS.SUMMED, _NUMBERS.LANES, _NUMBERS.THREADS
# Rows of a tree up to this length are turned.
_SHORT = 32
_SIGN = np.uint16(0x8000)
# 2^53 times the last bit of a float32 is two to its exponent, as it is stored, less this.
_REACH = 127 + 23 - 53
# What is left of the bits of bfloat16 and float16 at their places in float32, without the sign.
_MAGNITUDES = np.uint32(0x7FFF0000), np.uint32(0x0FFFE000)
# A byte of codes whose trits are 0, eight times.
_ONES = np.uint64(0x5555555555555555)
# A run of numbers of a byte; by what fields are moved, one and two at a time.
_RUN_ITEM = np.dtype((np.void, RUN))
_TWO_BITS, _FOUR_BITS = np.uint64(2), np.uint64(4)
# Trits that are packed at a time by one thread; rows of a slab that are short for a loop of their own.
_PACKED, _FEW = 1 << 18, 256
# Scales whose thresholds are found at a time: the arrays in between, of float64, stay small.
_THRESHOLDS = 1 << 14
_LARGEST = np.finfo(np.float32).max
_SINGLE = np.dtype(np.float32)
# Zeros in a byte of codes.
_ZEROS = sum((np.arange(256) >> shift & 3 == 1).astype(np.uint8) for shift in (0, 2, 4, 6))
# Numbers that were never trained to be ternary have less than this SQNR: normal ones 5.8 dB by absmean and 7.2 by fit.
# With less than the second, but a cosine as good as 1, all is right but the scale.
_TRAINED_DB, _REFINED_DB, _PARALLEL = 8.0, 60.0, 1 - 1e-6
# Of ternary weight networks.
_FIRST_THRESHOLD, _ROUNDS = np.float32(0.7), 3

# ---- kernels ---------------------------------------------------------------------------------------------------------

_FILE, _HEADER = "ternary.cu", "formats/ternary.cuh"
#: How elements share scales: its members are explained in kernels/ternary.cu.
SCALE_BLOCKS = Struct("ScaleBlocks", size="i8", row="i8", run="i8", per_row="i8", count="i8")
_TYPES = tuple(CXX_TYPES[name] for name in ("float16", "bfloat16", "float32"))
# The steps of the rules, see kernels/ternary.cu, and what reads the array for them.
_STEPS = {"absmean": ("MEAN",), "absmax": ("LARGEST",), "fit": ("FIRST", *("ABOVE",) * (1 + _ROUNDS))}
_EVERY_STEP = ("MEAN", "LARGEST", "FIRST", "ABOVE")
# Neighbours that surely share a scale; chunks of 32 elements of short blocks.
_SHARED, _CHUNKS = (128, 8, 1), (2, 8)
# An array that is one block is read by one thread block up to this size, and by many beyond it.
_OF_ONE_BLOCK = 1 << 17
# Groups of so many elements, one behind the other, of which a warp has 32 at the most.
_GROUPED = range(32, 257)
# A row that every element of an array lies in, and a power of two, by which kernels divide at once.
_ENDLESS = 1 << 40


def _template(name: str, *axes: tuple[str, ...], hot: bool = True) -> Template:
    return Template(_FILE, name, axes, hot=hot, structs=(_NUMBERS, SCALE_BLOCKS))


def _of_steps(name: str, *axes: tuple[str, ...]) -> tuple[Template, Template]:
    """Fitting takes its time: a few bytes of spilled registers do not matter to it."""
    before, behind = axes[:1], axes[1:]
    return (
        _template(name, *before, _EVERY_STEP[:3], *behind),
        _template(name, *before, _EVERY_STEP[3:], *behind, hot=False),
    )


_KERNELS = (
    _template("quantize_ternary", _TYPES, tuple(map(str, _SHARED))),
    _template("quantize_groups_ternary", _TYPES, ("true", "false")),
    _template("give_ternary", ("float", "double")),
    *_of_steps("short_scales_ternary", _TYPES, tuple(map(str, _CHUNKS))),
    *_of_steps("long_scales_ternary", _TYPES),
    *_of_steps("sums_ternary", _TYPES),
    _template("lanes_ternary", _EVERY_STEP),
    _template("finish_ternary", _EVERY_STEP),
)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "quantize_ternary": ("p", "p", "p", "i4", SCALE_BLOCKS),
    "quantize_groups_ternary": ("p", "p", "p", "p", "i4", "i8", "i4", "u8"),
    "give_ternary": ("p", "f4", "i8", "p", "i8"),
    "short_scales_ternary": ("p", "p", "p", "f4", SCALE_BLOCKS),
    "long_scales_ternary": ("p", "p", "p", "f4", SCALE_BLOCKS),
    "sums_ternary": ("p", "i8", "p", "p", "p"),
    "lanes_ternary": ("p", "p", "i8", "p", "p"),
    "finish_ternary": ("p", "p", "i8", "f4", "p", "p"),
}


@functools.cache
def _kernel(name: str, *values: str, threads: int = _THREADS) -> Kernel:
    template = next(
        t for t in _KERNELS if t.name == name and all(v in axis for v, axis in zip(values, t.axes, strict=True))
    )
    return Kernel(template, values, threads, signature=_SIGNATURES[name])


@functools.lru_cache(maxsize=1024)
def _scale_blocks(blocks: Blocks, endless: bool) -> bytes:
    """``struct ScaleBlocks``; `endless`: where one scale is for all, its block has no end."""
    row, run, per_row = blocks.row, blocks.run, blocks.per_row
    if blocks.count == 1:
        row = run = _ENDLESS if endless else blocks.size
        per_row = 1
    return SCALE_BLOCKS.pack(size=blocks.size, row=row, run=run, per_row=per_row, count=blocks.count)


def _numbers(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a decoder; the last one is the float64 1 / row, by its bits."""
    blocks = blocks_of(shape, granularity)
    return blocks.row, blocks.run, blocks.per_row, int(np.float64(1 / blocks.row).view(np.int64))


_ROWS = (
    *templates(_HEADER, "TernaryRows"),
    *templates(_HEADER, "Ternary<false>", kernels=("dequantize_blocks",)),
)


@functools.lru_cache(maxsize=256)
def _decoder(granularity: Granularity) -> Decoder:
    planes = "codes", "scale"
    if granularity == "tensor":
        return Decoder(_HEADER, "Ternary<true>", planes, together=True)
    return Decoder(_HEADER, "TernaryRows", planes, functools.partial(_numbers, granularity))


@functools.lru_cache(maxsize=256)
def _quick_decoder(granularity: Granularity) -> Decoder:
    """The one for all of an array whose scales change only every 32 elements."""
    numbers = functools.partial(_numbers, granularity)
    return Decoder(_HEADER, "Ternary<false>", ("codes", "scale"), numbers, together=True)


def _find_on_device(x: Any, scale: Any, blocks: Blocks, rule: str, eps: float) -> None:
    """Fill `scale` by a rule: the twin of `find`."""
    if not blocks.size:
        scale.fill(eps if rule == "absmean" else 0)
        return
    alloc, type = namespace(x).cuda.alloc, CXX_TYPES[x.dtype.name]
    # What goes back to the stream's pool behind the launches.
    floor = alloc(4 * blocks.count) if rule == "fit" else None
    floors = 0 if floor is None else floor.ptr
    length = blocks.size if blocks.count == 1 else blocks.run
    if blocks.count > 1 or blocks.size <= _OF_ONE_BLOCK:
        argument = _scale_blocks(blocks, False)
        for step in _STEPS[rule]:
            if length <= _SUMMED:
                chunks = next(chunks for chunks in _CHUNKS if length <= 32 * chunks)
                kernel, units = (
                    _kernel("short_scales_ternary", type, step, str(chunks)),
                    -(-4 * blocks.count // _THREADS),
                )
            else:
                threads = min(max(4 << (-(-length // _SUMMED) - 1).bit_length(), 32), _THREADS)
                kernel, units = _kernel("long_scales_ternary", type, step, threads=threads), blocks.count
            kernel(x, units, (x, scale, floors, eps, argument))
        return
    count = -(-blocks.size // _SUMMED)
    room = alloc(16 * (count + _LANES))
    sums, kept = room.ptr, room.ptr + 8 * count
    lanes, kept_lanes = room.ptr + 16 * count, room.ptr + 16 * count + 8 * _LANES
    for step in _STEPS[rule]:
        _kernel("sums_ternary", type, step)(x, -(-4 * count // _THREADS), (x, blocks.size, floors, sums, kept))
        _kernel("lanes_ternary", step, threads=32)(x, _LANES // 32, (sums, kept, count, lanes, kept_lanes))
        _kernel("finish_ternary", step, threads=_LANES)(x, 1, (lanes, kept_lanes, blocks.size, eps, scale, floors))


def _give_on_device(given: Any, scale: Any, x: Any) -> None:
    """Fill `scale` with numbers that a call brings: one, or one for each block."""
    if not scale.size:
        return
    source: Any = 0
    value = 0.0
    if is_cupy(given):
        source = given if given.dtype in (np.float32, np.float64) else given.astype(np.float32)
    else:
        value = float(given.reshape(-1)[0])
    type = "double" if is_cupy(source) and source.dtype == np.float64 else "float"
    each = int(is_cupy(given) and given.size > 1)
    _kernel("give_ternary", type)(x, -(-scale.size // _THREADS), (source, value, each, scale, scale.size))


def _are_grouped(blocks: Blocks) -> bool:
    """Whether ``quantize_groups_ternary`` is for these blocks."""
    return blocks.count > 1 and blocks.row == blocks.run and blocks.run in _GROUPED


def _quantize_on_device(x: Any, codes: Any, scale: Any, blocks: Blocks, rounding: str, given: Any = 0) -> None:
    """Fill `codes` under the scales. `given`, of groups: float32, of which `scale` becomes what is usable."""
    if not blocks.size:
        return
    type, away = CXX_TYPES[x.dtype.name], int(rounding == "away")
    blocks_of_threads = -(-len(codes) * x.dtype.itemsize // (16 * _THREADS))  # a thread has 16 bytes of each field
    if _are_grouped(blocks):
        inverse = -(-(1 << 64) // blocks.run)
        kernel = _kernel("quantize_groups_ternary", type, "false" if blocks.run % 8 else "true")
        kernel(x, blocks_of_threads, (x, codes, given, scale, away, blocks.size, blocks.run, inverse))
        return
    cut = 0 if blocks.count == 1 else blocks.row | blocks.run
    shared = next(shared for shared in _SHARED if cut % shared == 0)
    kernel = _kernel("quantize_ternary", type, str(shared))
    kernel(x, blocks_of_threads, (x, codes, scale, away, _scale_blocks(blocks, True)))


# ---- the format ------------------------------------------------------------------------------------------------------


class Ternary(Granular):
    """-1, 0 and 1 times a scale.

    Parameters
    ----------
    granularity : {"tensor", ("channel", 0), ("group", size)}, optional
        Elements that share a scale: all, those of a row along axis 0, or groups along the last axis, of which the last
        may be short; as text ``"channel:0"``, ``"group:64"``. ``"tensor"`` where `block` is not given either.
    block : int, optional
        Another way to say ``("group", block)``.
    rule : {"absmean", "absmax", "fit"}, default "absmean"
        How scales are found, where a call of `quantize` gives none.
    rounding : {"even", "away"}, default "even"
        Where a quotient of half a scale goes: to 0, or away from it.
    eps : float, default 1e-5
        The least scale of ``rule="absmean"``; 0 or more.

    Notes
    -----
    `kbitcupy.quantize` takes ``scale``: one number, or one for each block in the shape of the granularity, in that with
    a 1 behind it, or flat; with NumPy checked to be finite and not negative, on a GPU those that are not count as 0.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.array([[1, -1, 0.5, -0.5]], np.float32), "ternary", granularity=("group", 4))
    >>> q.planes["scale"], q.dequantize()
    (array([0.75], dtype=float32), array([[ 0.75, -0.75,  0.75, -0.75]], dtype=float32))
    >>> q.format
    get_format('ternary:block=4')
    """

    name, bits, pitch = "ternary", 2, BLOCK
    origin = "BitNet b1.58 (arXiv 2402.17764)"
    summary = "-1, 0 and 1 in 2 bits, a scale for a tensor, row or group"
    ternary = True
    takes = ("scale",)
    tells = ("zeros",)
    kernels = (*_KERNELS, *templates(_HEADER, "Ternary<true>"), *_ROWS)

    def __init__(
        self,
        *,
        granularity: Any = None,
        block: int | None = None,
        rule: str = "absmean",
        rounding: str = "even",
        eps: float = 1e-5,
    ):
        self.granularity = granularity_of(granularity, block)
        if self.granularity == "token" or (self.granularity[0] == "channel" and self.granularity[1] != 0):
            raise FormatError(
                f"granularity is {granularity!r}; ternary takes 'tensor', ('channel', 0) and ('group', size)"
            )
        self.block = int(self.granularity[1]) if self.granularity[0] == "group" else 1
        for option, value, allowed in (("rule", rule, RULES), ("rounding", rounding, tuple(LIMITS))):
            if not isinstance(value, str) or value not in allowed:
                raise FormatError(f"{option} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
        self.rule, self.rounding = rule, rounding
        self.eps = _check_eps(eps)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        return (
            {},
            {"granularity": ("channel", 0)},
            {"granularity": ("group", 64)},
            {"granularity": ("group", 20), "rule": "absmax", "rounding": "away"},
            {"granularity": ("channel", 0), "rule": "fit"},
        )

    def options(self) -> dict[str, Any]:
        return {
            "granularity": self.granularity_option(),
            "rule": self.rule,
            "rounding": self.rounding,
            "eps": self.eps,
        }

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks = blocks_of(shape, self.granularity)
        return {
            "codes": Plane("uint8", (-(-blocks.size // BLOCK) * RUN,)),
            "scale": Plane("float32", (blocks.count,), self.scope_of(shape)),
        }

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        blocks = blocks_of(x.shape, self.granularity)
        scale = _given_scale(given["scale"], blocks, x) if "scale" in given else find(x, blocks, self.rule, self.eps)
        planes["scale"][...] = scale
        _encode(x, thresholds(planes["scale"], self.rounding), blocks, planes["codes"])

    def part_numpy(self, x: np.ndarray, planes: Mapping[str, Any]) -> Any:
        blocks = blocks_of(x.shape, "tensor")
        if self.rule == "absmax":
            return find(x, blocks, self.rule, self.eps)
        if self.rule == "fit" or x.size % _SUMMED:
            return None
        memory = _memory(blocks)
        return x.size, np.concatenate([_slab_sums(numbers, memory) for _, numbers in _slabs(x, blocks)], axis=1)

    def whole_numpy(self, found: list[Any], dtype: np.dtype, planes: Mapping[str, Any]) -> dict[str, Any]:
        if self.rule == "absmax":
            return {"scale": np.max(found, axis=0)}
        total = _lane_sums(np.concatenate([sums for _, sums in found], axis=1))
        mean = (total / sum(size for size, _ in found)).astype(np.float32)
        return {"scale": np.maximum(mean, np.float32(self.eps))}

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        blocks, scale = blocks_of(x.shape, self.granularity), planes["scale"]
        if "scale" not in given:
            _find_on_device(x, scale, blocks, self.rule, self.eps)
            _quantize_on_device(x, planes["codes"], scale, blocks, self.rounding)
            return
        brought = _given_scale(given["scale"], blocks, x)
        if is_cupy(brought) and brought.dtype == _SINGLE and brought.size == blocks.count and _are_grouped(blocks):
            _quantize_on_device(x, planes["codes"], scale, blocks, self.rounding, brought)
            return
        _give_on_device(brought, scale, x)
        _quantize_on_device(x, planes["codes"], scale, blocks, self.rounding)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        trits = unpack(planes["codes"])[: out.size]
        blocks = blocks_of(out.shape, self.granularity)
        for (part, y), (scale,) in walk(blocks, (trits, out), (planes["scale"],)):
            if out.dtype == _SINGLE:
                np.multiply(part, scale, out=y)
            else:
                narrow(part * scale, y)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        blocks = blocks_of(x.shape, self.granularity)
        bound = np.empty(x.shape, np.float64)
        for (part, out), (scale,) in walk(blocks, (x, bound), (planes["scale"],)):
            number, step = np.abs(part.astype(np.float64)), scale.astype(np.float64)
            # 1 / scale is rounded, and to few bits or none where one of them is subnormal.
            half = np.where((step < 2.0**-126) | (step > 2.0**126), step, step / 2)
            out[...] = np.where(step > 0, np.maximum(half, number - step), number)
            out += 2.0**-22 * (number + step) + 2.0**-149
        return bound.reshape(-1)

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        self._decode_on_device(planes, out.shape, out)

    def decode_stack(self, planes: Mapping[str, Any], out: Any, lead: int) -> bool:
        if not decodes(out):
            return False
        self._decode_on_device(planes, out.shape[lead:], out, math.prod(out.shape[:lead]))
        return True

    def _decode_on_device(self, planes: Mapping[str, Any], shape: tuple[int, ...], out: Any, members: int = 1) -> None:
        blocks, chosen = blocks_of(shape, self.granularity), self.decoder
        if self.granularity != "tensor" and (blocks.row | blocks.run) % RUN == 0 and blocks.row < 1 << 32:
            chosen = _quick_decoder(self.granularity)
        dequantize(chosen, planes, shape, out, members)

    @functools.cached_property
    def decoder(self) -> Decoder:
        return _decoder(self.granularity)

    def shares(self, planes: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, float]:
        """The trits that are 0."""
        codes, size = planes["codes"], math.prod(shape)
        if not size:
            return {}
        zeros = int(namespace(codes).asarray(_ZEROS)[codes].sum(dtype=np.int64))
        return {"zeros": (zeros - (4 * codes.size - size)) / size}

    def remark(self, sqnr_db: float, cosine: float) -> str | None:
        if sqnr_db < _REFINED_DB and cosine > _PARALLEL:
            return "the numbers are ternary already, and their scale shrinks by the zeros: rule=absmax keeps them"
        if sqnr_db < _TRAINED_DB:
            return (
                "so low an SQNR says that the numbers were never trained to be ternary: train with ternary weights, or "
                "choose a format of more bits"
            )
        return None

    def magnitude(self) -> Magnitude:
        return Magnitude("scale", largest=2.0)

    def trits(self, shape: tuple[int, ...], lead: int = 0) -> Trits:
        if lead or len(shape) != 2:
            return Trits("codes", "scale", "")
        if self.granularity == "tensor":
            return Trits("codes", "scale", "tensor")
        if self.granularity[0] == "channel" or self.block >= shape[1]:
            return Trits("codes", "scale", "row")
        return Trits("codes", "scale", "group", self.block)

    def integer_codes(self, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
        if len(shape) <= lead or not lies_whole(shape, lead, BLOCK):
            return None
        found = scale_of(shape, self.granularity, lead)
        return found and IntegerCodes(2, RUN, False, 1, "codes", "scale", "float32", found, True)

    def with_granularity(self, granularity: Granularity) -> Ternary:
        return _of_granularity(granularity, self.rule, self.rounding, self.eps)

    def why_not_whole(self, shape: tuple[int, ...]) -> str:
        return f"{math.prod(shape[1:])} elements are no multiple of {BLOCK}, whose codes lie together"


@functools.lru_cache(maxsize=256)
def _of_granularity(granularity: Granularity, rule: str, rounding: str, eps: float) -> Ternary:
    return Ternary(granularity=granularity, rule=rule, rounding=rounding, eps=eps)


def _given_scale(scale: Any, blocks: Blocks, x: Any) -> Any:
    """Scales that a call brings, contiguous: on the host float32 and flat, on a device as they are."""
    scale = check_entries(scale, blocks, x, "fiu", "scale")
    if is_cupy(scale):
        return contiguous(scale)
    with np.errstate(over="ignore", under="ignore"):
        scale = scale.astype(_SINGLE).reshape(-1)
    check_host_scales(scale, _SINGLE)
    return scale


def _check_eps(eps: Any) -> float:
    number = isinstance(eps, (int, float, np.integer, np.floating)) and not isinstance(eps, bool)
    if not number or not 0 <= float(eps) <= float(_LARGEST):
        raise FormatError(f"eps is {eps!r}; it must be a number, 0 or more and finite in float32, such as 1e-5")
    return float(eps)


# ---- codes -----------------------------------------------------------------------------------------------------------


def _encode(x: np.ndarray, least: np.ndarray, blocks: Blocks, codes: np.ndarray) -> None:
    """Fill the plane `codes` of an array with the trits under its thresholds."""
    bits = _least_bits(least, x.dtype) if x.dtype.itemsize == 2 else least
    flags = _Flags(len(codes) * 4)
    length = blocks.size // max(blocks.count, 1)
    if blocks.count == 1 or (blocks.row == blocks.run * blocks.per_row and length % BLOCK == 0):
        _encode_runs(x.reshape(-1, max(length, 1)), least.reshape(-1, 1), bits.reshape(-1, 1), flags, codes)
        return
    trits = np.zeros(len(codes) * 4, np.int8)
    for (part, out), (own, own_bits) in walk(blocks, (x, trits[: x.size]), (least, bits)):
        above, below = flags.of(part.shape)
        _compare(part, own, own_bits, above, below)
        np.subtract(above.view(np.int8), below.view(np.int8), out=out)
    pack(trits, codes)


class _Flags:
    """What the numbers of a slab are compared to, two rows of flags, and how those become codes.

    All slabs but the last have one size, so what the rows are seen as is found once. Nothing else is allocated: page
    faults would cost as much as the arithmetic.
    """

    def __init__(self, size: int):
        self.size = min(slab_size(), size)
        self._rows = room("flags", 2 * self.size, np.bool_).reshape(2, self.size)
        self._used = 0

    def of(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Where the flags of the numbers of a slab lie: the trit is 1, or -1."""
        size = math.prod(shape)
        return self._rows[0, :size].reshape(shape), self._rows[1, :size].reshape(shape)

    def pack(self, size: int, packed: np.ndarray) -> None:
        """Fill some bytes of the plane `codes`, uint8[runs, RUN], from so many flags, which are spoilt."""
        used = packed.size * 4
        if used != self._used:
            self._used, (above, below) = used, self._rows[:, :used].view(np.uint64)
            self._trits = above, below, _fields(above, below)
        if size < used:
            self._rows[:, size:used] = False
        above, below, fields = self._trits
        # Of words, not of bytes: what a byte borrows from the next is given back by the last sum.
        np.subtract(above, below, out=above)
        np.add(_gather(*fields), _ONES, out=packed.view(np.uint64).reshape(-1))


def _encode_runs(x: np.ndarray, least: np.ndarray, bits: np.ndarray, flags: _Flags, codes: np.ndarray) -> None:
    """... of an array whose rows have one threshold each, and whole blocks of codes."""
    count, length = x.shape
    rows, columns = max(flags.size // length, 1), min(flags.size, length)
    packed = codes.reshape(-1, RUN)
    with np.errstate(all="ignore"):
        # The last ones first: if scales have been looked for, caches may hold them.
        for first in range(0, count, rows)[::-1]:
            own = slice(first, first + rows)
            for begin in range(0, length, columns)[::-1]:
                part = x[own, begin : begin + columns]
                _compare(part, least[own], bits[own], *flags.of(part.shape))
                start = (first * length + begin) // BLOCK
                flags.pack(part.size, packed[start : start + -(-part.size // BLOCK)])


def _compare(part: np.ndarray, least: np.ndarray, bits: np.ndarray, above: np.ndarray, below: np.ndarray) -> None:
    """Set where the numbers of a slab have the trit 1, and where -1."""
    number, own = part, least
    as_bits = part.dtype.itemsize == 2 and not _has_nan(part)
    if as_bits:  # numbers of one sign have the order of their bits
        number, own = part.view(np.int16), bits
    elif part.dtype != _SINGLE:
        number = np.empty(part.shape, np.float32)
        widen(part, number)
    again = None  # where what is compared below may be written
    if 1 < part.shape[-1] <= _FEW and own.shape[-1] == 1:  # rows of which each would be a loop
        again = own = np.repeat(own.reshape(-1), part.shape[-1]).reshape(part.shape)
    np.greater_equal(number, own, out=above)
    if as_bits:
        least_below = np.bitwise_or(own.view(np.uint16), _SIGN, out=None if again is None else again.view(np.uint16))
        np.greater_equal(number.view(np.uint16), least_below, out=below)
    else:
        np.less_equal(number, np.negative(own, out=again), out=below)


def _has_nan(x: np.ndarray) -> bool:
    """Whether numbers of 16 bits, one or more, hold a NaN."""
    infinity = x.dtype.type(np.inf).view(np.int16)
    return bool(x.view(np.int16).max() > infinity or x.view(np.uint16).max() > infinity.view(np.uint16) | _SIGN)


def _least_bits(least: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The bits, int16, of the least numbers of a dtype of 16 bits that are not below some positive float32; under NaN
    bits that are above all numbers.
    """
    with np.errstate(all="ignore"):
        near = least.astype(dtype)
        bits = near.view(np.int16) + (near.astype(np.float32) < least)
    return np.where(np.isnan(least), np.int16(0x7FFF), bits.astype(np.int16))


def pack(trits: np.ndarray, codes: np.ndarray) -> None:
    """Fill the plane `codes` from int8 trits, a multiple of `BLOCK` of them, -1 to 2."""
    rows, packed = trits.reshape(-1, BLOCK), codes.reshape(-1, RUN)
    step = _PACKED * AT_ONCE.get() // BLOCK
    for first in range(0, len(rows), step):
        some = rows[first : first + step] + np.int8(1)
        gathered = _gather(*_fields(some, np.empty(some.size // 8, np.uint64)))
        packed[first : first + step] = gathered.view(np.uint8).reshape(-1, RUN)


def _fields(numbers: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, ...]:
    """What `_gather` works on: the numbers, bytes, of four fields each, and `memory` of as many bytes, uint64."""
    fields = memory.reshape(4, -1)
    # Runs as single items: copies of theirs are quick.
    return fields.view(_RUN_ITEM), numbers.reshape(-1).view(_RUN_ITEM).reshape(-1, 4).T, fields[::2], fields[1::2]


def _gather(target: np.ndarray, runs: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The sum of the four numbers of a byte, the second times 4 and so on: eight of them, and bytes, are a uint64."""
    target[...] = runs  # the fields one after the other: words of theirs are quick
    high <<= _TWO_BITS
    low += high
    first, whole = low
    whole <<= _FOUR_BITS
    whole += first
    return whole


def unpack(codes: np.ndarray) -> np.ndarray:
    """The int8 trits of the plane `codes`, those beyond the end of the array too."""
    packed = codes.reshape(-1, RUN)
    trits = np.empty((len(packed), BLOCK), np.int8)
    step = CHUNK // BLOCK
    for first in range(0, len(packed), step):
        found = unpack_fields(packed[first : first + step], 2, RUN).view(np.int8)
        np.subtract(found, np.int8(1), out=trits[first : first + step])
    return trits.reshape(-1)


def thresholds(scale: np.ndarray, rounding: str) -> np.ndarray:
    """The least float32 whose trit is 1 under each of a row of scales; NaN, above which is none, under one of 0."""
    found = np.empty(scale.shape, np.float32)
    for first in range(0, scale.size, _THRESHOLDS):
        found[first : first + _THRESHOLDS] = _some_thresholds(scale[first : first + _THRESHOLDS], rounding)
    return found


def _some_thresholds(scale: np.ndarray, rounding: str) -> np.ndarray:
    limit = LIMITS[rounding]
    with np.errstate(all="ignore"):
        inverse = (np.float32(1) / scale.astype(np.float32)).astype(np.float64)
        # Products of two float32 are exact in float64, and the quotient is off by less than two of its neighbours.
        guess = (limit / inverse).astype(np.float32)
        bits = np.clip(guess.view(np.int32).astype(np.int64) - 2, 1, None).astype(np.int32)
        for _ in range(4):
            product = bits.view(np.float32).astype(np.float64) * inverse
            bits += ~(product > limit if rounding == "even" else product >= limit)
    return np.where(scale > 0, bits.view(np.float32), np.float32(np.nan))


# ---- scales ----------------------------------------------------------------------------------------------------------


def find(x: np.ndarray, blocks: Blocks, rule: str, eps: float) -> np.ndarray:
    """The scale of each block by a rule, float32."""
    if rule == "absmax":
        largest, memory = np.zeros(blocks.count, np.float32), _memory(blocks)
        for where, numbers in _slabs(x, blocks):
            largest[where] = np.maximum(largest[where], _magnitudes(numbers, memory).max(axis=1))
        return largest
    sums, _ = _sums(x, blocks, None)
    with np.errstate(under="ignore"):
        mean = (sums / max(blocks.run if blocks.count > 1 else blocks.size, 1)).astype(np.float32)
        if blocks.run * blocks.per_row > blocks.row:  # the last group of a row is short
            per_row = mean.reshape(-1, blocks.per_row)
            last = blocks.row - blocks.run * (blocks.per_row - 1)
            per_row[:, -1] = (sums.reshape(per_row.shape)[:, -1] / last).astype(np.float32)
        if rule == "absmean":
            return np.maximum(mean, np.float32(eps))
        scale, floor = mean, _FIRST_THRESHOLD * mean
        for _ in range(1 + _ROUNDS):
            sums, kept = _sums(x, blocks, floor)
            scale = np.where(kept > 0, (sums / np.maximum(kept, 1)).astype(np.float32), scale)
            floor = scale * np.float32(0.5)
    return scale


def _slabs(x: np.ndarray, blocks: Blocks) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The numbers of some blocks, in three axes of which the last goes along a block, and which blocks they are.

    A long block comes in pieces of `slab_size()` elements.
    """
    slab = slab_size()
    with np.errstate(invalid="ignore"):
        for part in blocks.parts if blocks.size else ():
            view, numbers = part.view(x), part.of_blocks(np.arange(blocks.count))
            outer, count, length = part.shape
            step = max(1, slab // length)
            many = max(1, step // count)  # rows of blocks at a time
            for a in range(0, outer, many):
                for b in range(0, count, step):
                    for c in range(0, length, slab):
                        found = view[a : a + many, b : b + step, c : c + slab]
                        yield numbers[a : a + many, b : b + step].reshape(-1), found


def _memory(blocks: Blocks) -> np.ndarray:
    """What the magnitudes of any slab fit in: the page faults of fresh arrays would cost more than the arithmetic."""
    return room("magnitudes", min(blocks.size, slab_size()), np.float32)


def _magnitudes(numbers: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """|w| of a slab, float32[blocks, elements] that may be written to: NaN is 0, an infinity the largest finite one."""
    found = memory[: numbers.size].reshape(numbers.shape)
    if numbers.dtype == _SINGLE:
        np.abs(numbers, out=found)
    else:
        widen(numbers, found)
        np.abs(found, out=found)
    return _finite(found.reshape(-1, numbers.shape[2]))


def _finite(found: np.ndarray) -> np.ndarray:
    """Magnitudes with 0 for NaN and the largest finite one for an infinity."""
    if not found.max() <= _LARGEST:
        found[np.isnan(found)] = 0
        np.minimum(found, _LARGEST, out=found)
    return found


def _sums(x: np.ndarray, blocks: Blocks, floor: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The sum of each block, float64, and how many numbers it is of: with a `floor` for each, those above it."""
    totals, kept = np.zeros(blocks.count), np.zeros(blocks.count, np.int64)
    pieces: list[np.ndarray] = []  # of a long block
    length, gathered, memory = min(blocks.run, blocks.size), 0, _memory(blocks)
    for where, numbers in _slabs(x, blocks):
        if floor is None:
            sums = _slab_sums(numbers, memory)
        else:
            rows = _magnitudes(numbers, memory)
            rows *= rows > floor[where][:, None]
            kept[where] += np.count_nonzero(rows, axis=1)
            sums = _first_sums(rows)
        if length <= slab_size():
            totals[where] = _lane_sums(sums)
            continue
        pieces.append(sums)
        gathered += numbers.shape[2]
        if gathered == length:
            totals[where] = _lane_sums(np.concatenate(pieces, axis=1))
            pieces, gathered = [], 0
    return totals, kept


def _slab_sums(numbers: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """`_first_sums` of the magnitudes of a slab."""
    found, half = memory[: numbers.size].reshape(numbers.shape), numbers.dtype == np.float16
    rows = found.reshape(-1, numbers.shape[2])
    if numbers.dtype == _SINGLE:
        np.abs(numbers, out=found)
    elif numbers.dtype.itemsize > 2 or (half and has_special(numbers)):
        return _first_sums(_magnitudes(numbers, memory))
    else:  # float16 comes out 2^112 times smaller, its subnormal numbers too
        bits = found.view(np.uint32)
        np.left_shift(numbers.view(np.uint16), np.uint32(13 if half else 16), out=bits)
        np.bitwise_and(bits, _MAGNITUDES[half], out=bits)
    sums = _first_sums(rows, half)
    if half:
        return sums * 2.0**112
    return sums if np.maximum.reduce(sums, axis=None, initial=0) < math.inf else _first_sums(_finite(rows))


def _first_sums(rows: np.ndarray, exact: bool = False) -> np.ndarray:
    """The sums of each `_SUMMED` numbers of every row, float64[rows, sums]; `exact`: whatever the order, as those of
    float16 are, which are multiples of one number and below 2^53 of it.
    """
    count, length = rows.shape
    width = min(1 << (length - 1).bit_length(), _SUMMED)  # zeros behind a few numbers change nothing
    each = -(-length // width)
    padded = rows
    if length % width:
        padded = np.zeros((count, each * width), np.float32)
        padded[:, :length] = rows
    padded = padded.reshape(-1, width)
    sums = np.einsum("ij->i", padded, dtype=np.float64)  # no BLAS, whose threads come on top of those of a call
    if not exact:
        rare = _inexact(padded, sums)
        if len(rare):
            sums[rare] = _tree(padded[rare])
    return sums.reshape(count, each)


def _inexact(rows: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The rows of magnitudes, float32, whose sums may not be exact in float64, and so depend on the order: of the
    others all numbers are multiples of the last bit of the least one, and the sum, in any order, is below 2^53 of it.
    """
    bits = rows.view(np.uint32)
    least = int(np.minimum.reduce(bits, axis=None)) if rows.size else 1
    if not least:
        least = int((bits - np.uint32(1)).min())  # 0 is the largest there
    if not rows.size or sums.max() < math.ldexp(1.0, max(least >> 23, 1) - _REACH):
        return np.empty(0, np.intp)
    each = (bits - np.uint32(1)).min(axis=1) >> np.uint32(23)
    return np.flatnonzero(~(sums < np.ldexp(1.0, np.maximum(each, np.uint32(1)).astype(np.int32) - _REACH)))


def _lane_sums(sums: np.ndarray) -> np.ndarray:
    """The sum of each row of sums, by lanes."""
    count, length = sums.shape
    lanes = np.zeros((count, min(1 << (length - 1).bit_length(), _LANES)))
    for first in range(0, length, _LANES):
        part = sums[:, first : first + _LANES]
        lanes[:, : part.shape[1]] += part
    return _tree(lanes)


def _tree(rows: np.ndarray) -> np.ndarray:
    """The sum of each row in float64, whose length is a power of two: (i) + (i + half), until one is left."""
    while rows.shape[1] > _SHORT:
        half = rows.shape[1] // 2
        rows = np.add(rows[:, :half], rows[:, half:], dtype=np.float64)
    columns = np.ascontiguousarray(rows.T, np.float64)  # operations along short rows are slow
    while len(columns) > 1:
        half = len(columns) // 2
        columns = columns[:half] + columns[half:]
    return columns[0]


register(Ternary.name, Ternary)
