"""Trits in and out of the format ``ternary``, and in the bytes of other projects.

For trits t of an array [..., K], or a matrix [N, K]; d is a float16 scale, and every number little-endian:

================  ======================  ==============================================================================
layout            packed                  where they stand
================  ======================  ==============================================================================
``i2_s``          uint8 [n / 4 + 32]      bitnet.cpp. In blocks of 128 elements: byte m holds t + 1 of elements m, m +
                                          32, m + 64, m + 96 at bits 6, 4, 2, 0; behind all codes one float32 scale and
                                          28 bytes of padding
``tq1_0``         uint8 [..., 54 K / 256] llama.cpp. In blocks of 256: base 3, the most significant trit first, t + 1 as
                                          v, and the byte ``(v * 256 + 242) // 243``: 32 bytes of elements m + 32 i, i =
                                          0 .. 4; 16 of 160 + m + 16 i; 4 of four each, 240 + m + 4 i, v times 3; d
``tq2_0``         uint8 [..., 66 K / 256] llama.cpp. In blocks of 256: 64 bytes, of each 128 elements byte m holds t + 1
                                          of m + 32 f at bits 2 f; d
``q2_0``          uint8 [..., 18 K / 64]  llama.cpp. In blocks of 64: d; byte m holds t + 1 of element 4 m + f at bits
                                          2 f. It has the value 2, too
``transformers``  uint8 [N / 4, K]        byte [r, k] holds t + 1 of the rows r + f N / 4 at bits 2 f
``microsoft``     uint8 [N, K / 4]        Microsoft's GPU kernel: words [N / 16][K / 32][32]; word w has t + 2 of row 8
                                          (w // 16) + w % 8, column 16 (w // 8 % 2) + e at bit 8 (e % 4) + 2 (e // 4)
``torchao``       int8 [N, K / 4]         four neighbours a byte, the first at bits 6, in two's complement
``planes``        uint32 [2, N, ceil(K /  bitnet-quantize: bits of the trits that are 1, and of those that are -1;
                  32)]                    element k at bit k % 32
``u32``           uint32 [N, ceil(K /     bitnet-quantize's kernels: element k at bits 2 (k % 16); 0 is 0, 1 is 1, 2 is
                  16)]                    -1
================  ======================  ==============================================================================

What no packer of a layout writes is refused: 3 (in ``microsoft`` 0, in ``torchao`` 2), a trit in both planes, the 13
bytes that ``tq1_0`` does not have. Bytes and trits in host memory are always looked at; on a GPU that would read values
back, and is done where ``check=True`` asks for it. What is invalid and not looked at is decoded by the rule of the
layout: 3 is 2 in ``tq2_0``, ``q2_0`` and ``transformers``, and 0 in ``i2_s``, ``planes`` and ``u32``, as it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import DeviceError, FormatError
from ..formats import ternary as _ternary
from ..formats.base import get_format
from ..formats.granularity import blocks_of, check_entries, check_host_scales
from ..products.ternary import decode_on_gpu

_SINGLE = np.dtype(np.float32)


def from_trits(
    t: Any, scale: Any = 1.0, *, granularity: Any = "tensor", dtype: Any = "float32", check: bool | None = None
) -> QuantizedArray:
    """The compressed array of trits and their scales.

    Parameters
    ----------
    t : array_like
        int8 of any shape: -1, 0 and 1.
    scale : float or array_like, default 1
        float: one for a tensor, row or group, as `granularity` says; finite and not negative.
    granularity : str or tuple, default "tensor"
        ``"tensor"``, ``("channel", 0)`` or ``("group", size)``.
    dtype : dtype_like, default "float32"
        Of the array that it decodes to.
    check : bool, optional
        Whether values of `t` are looked at; by default those in host memory are. On a GPU they are read back for it.

    Returns
    -------
    QuantizedArray
        Of the format ``ternary``, on the device of `t`.

    Raises
    ------
    TypeError, ValueError, FormatError, DeviceError
        When an argument does not fit, or `t` has other values.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.from_trits(np.int8([[1, -1], [0, 1]]), 0.75).dequantize()
    array([[ 0.75, -0.75],
           [ 0.  ,  0.75]], dtype=float32)
    """
    t = _trit_array(t)
    format = get_format("ternary", granularity=granularity)
    found = _xp.float_dtype(dtype)
    blocks = blocks_of(t.shape, format.granularity)  # type: ignore[attr-defined]
    scale = check_entries(scale, blocks, t, "fiu", "scale")
    with _xp.on_device_of(t), np.errstate(over="ignore", under="ignore"):
        _check_trits(t, check)
        single = scale.astype(_SINGLE).reshape(-1)
        if isinstance(single, np.ndarray):
            check_host_scales(single, _SINGLE)
        xp = _xp.namespace(t)
        padded = xp.zeros(-(-t.size // _ternary.BLOCK) * _ternary.BLOCK, np.int8)
        padded[: t.size] = t.reshape(-1)
        scales = _repeated(single, blocks.count, t)
        planes = {"codes": _fields(padded, (0, 2, 4, 6)), "scale": scales}
    return QuantizedArray(format, planes, t.shape, found)


def trits(q: QuantizedArray) -> Any:
    """The trits of a ternary array.

    Parameters
    ----------
    q : QuantizedArray
        Of the format ``ternary``, of any shape.

    Returns
    -------
    array
        int8 of q's shape, on its device: -1, 0 and 1; 2 where codes of another origin are 3.

    Raises
    ------
    TypeError, FormatError
        When `q` is no such array.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.trits(kb.quantize(np.array([0.9, -0.1, -2], np.float32), "ternary"))
    array([ 1,  0, -1], dtype=int8)
    """
    codes = _codes_of(q)
    members = math.prod(q.shape[: q.lead])
    with _xp.on_device_of(codes):
        if isinstance(codes, np.ndarray):
            found = _ternary.unpack(codes)
        else:
            found = decode_on_gpu(codes, 4 * codes.size)
        if found.size != q.size:  # what is behind each member
            found = found.reshape(members, -1)[:, : q.size // max(1, members)]
        return _xp.contiguous(found.reshape(q.shape))


def sparsity(q: Any) -> float:
    """The share of zeros among trits; of an array on a GPU one number is read back.

    Parameters
    ----------
    q : QuantizedArray or array_like
        Of the format ``ternary``, or int8 trits.

    Returns
    -------
    float
        0 to 1; 0 of an empty array.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.sparsity(np.int8([[1, 0, 0, 0], [0, -1, 0, 0]]))
    0.75
    """
    t = trits(q) if isinstance(q, QuantizedArray) else _trit_array(q)
    if not t.size:
        return 0.0
    with _xp.on_device_of(t):
        return (t.size - int(_xp.namespace(t).count_nonzero(t))) / t.size


def pack(q: Any, layout: str, *, scale: Any = None, check: bool | None = None) -> Any:
    """Trits in the bytes of another project; `LAYOUTS` are their names, and the module describes them.

    Parameters
    ----------
    q : QuantizedArray or array_like
        Of the format ``ternary``, whose scales go into layouts that have some; or int8 trits.
    layout : str
        Which.
    scale : float or array_like, optional
        For int8 trits, where the layout has scales: one number, or one for each of its blocks; by default 1.
    check : bool, optional
        Whether values are looked at; by default those in host memory are. On a GPU they are read back for it.

    Returns
    -------
    array
        On the device of `q`.

    Raises
    ------
    TypeError, ValueError, FormatError
        When the layout has no such shape or scales, or `q` other values.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> t = (np.arange(256) % 3 - 1).astype(np.int8)
    >>> kb.bitnet.pack(t, "tq2_0", scale=0.75)[[0, 1, 2, 64, 65]]
    array([ 24,  97, 134,   0,  58], dtype=uint8)
    >>> kb.bitnet.pack(t.reshape(4, 64), "transformers").shape
    (1, 64)
    """
    if _xp.is_tensor(q):
        return _xp.in_torch(pack, "q", q, layout, scale=scale, check=check)
    chosen = _layout(layout)
    if isinstance(q, QuantizedArray):
        if scale is not None:
            raise FormatError("scale goes with int8 trits, and q brings its own: leave it away")
        t = trits(q)
    else:
        t = _trit_array(q, "q")
    chosen.check_shape(t.shape, layout)
    with _xp.on_device_of(t):
        _check_trits(t, check, chosen.largest)
        if not chosen.block:
            if scale is not None:
                raise FormatError(f"layout {layout!r} has no scales: leave scale away")
            return chosen.pack(t)
        found = _scales_of(q, chosen, layout) if isinstance(q, QuantizedArray) else _given(scale, t, chosen)
        _check_scales(found, chosen, check)
        return chosen.pack(t, found)


def unpack(packed: Any, shape: Sequence[int], layout: str, *, check: bool | None = None) -> Any:
    """Trits from the bytes of another project: the inverse of `pack`; `packed_scales` has the scales.

    Parameters
    ----------
    packed : array_like
        As `pack` returns them, of any shape of so many bytes; words may be signed as well.
    shape : sequence of int
        Of the trits.
    layout : str
        One of `LAYOUTS`.
    check : bool, optional
        Whether codes are looked at, and refused where no packer writes them; by default those in host memory are. On a
        GPU values are read back for it.

    Returns
    -------
    array
        int8 of `shape`, on the device of `packed`.

    Raises
    ------
    TypeError, ValueError, FormatError
        When the bytes are not those of such an array, or a code is invalid.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.unpack(np.uint8([[0xC7, 0x1C]]), (1, 8), "torchao")
    array([[-1,  0,  1, -1,  0,  1, -1,  0]], dtype=int8)
    """
    if _xp.is_tensor(packed):
        return _xp.in_torch(unpack, "packed", packed, shape, layout, check=check)
    chosen, lengths, data = _packed(packed, shape, layout)
    with _xp.on_device_of(data):
        t, wrong = chosen.unpack(data, lengths)
        if _looks(data, check) and bool(wrong().any()):
            raise FormatError(
                f"packed has codes that no packer of {layout!r} writes; it is damaged, of another layout or shape, or "
                "pass check=False to decode them as the module says"
            )
        return _xp.contiguous(t.reshape(lengths))


def packed_scales(packed: Any, shape: Sequence[int], layout: str) -> Any:
    """The scales in the bytes of a layout that has some.

    Parameters
    ----------
    packed, shape, layout
        As for `unpack`.

    Returns
    -------
    array
        float32: [1] of ``i2_s``, [..., K / 256] of ``tq1_0`` and ``tq2_0``, [..., K / 64] of ``q2_0``.

    Raises
    ------
    TypeError, ValueError, FormatError
        When the bytes are not those of such an array, or the layout has no scales.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> packed = kb.bitnet.pack(np.zeros((2, 256), np.int8), "tq1_0", scale=0.5)
    >>> kb.bitnet.packed_scales(packed, (2, 256), "tq1_0")
    array([[0.5],
           [0.5]], dtype=float32)
    """
    if _xp.is_tensor(packed):
        return _xp.in_torch(packed_scales, "packed", packed, shape, layout)
    chosen, lengths, data = _packed(packed, shape, layout)
    if chosen.scales is None:
        raise FormatError(f"layout {layout!r} has no scales; those that have some are {_named(scaled=True)}")
    with _xp.on_device_of(data):
        return chosen.scales(data, lengths)


# ---- bits ------------------------------------------------------------------------------------------------------------


def _fields(t: Any, shifts: tuple[int, ...], add: int = 1) -> Any:
    """uint8 [n / 4]: in blocks of 128, t + add of elements m + 32 f at bit shifts[f] of byte m."""
    return _or(t.reshape(-1, 4, 32), shifts, add).reshape(-1)


def _or(t: Any, shifts: tuple[int, ...], add: int) -> Any:
    """t[:, f] + add at bit shifts[f], for all f."""
    codes = (t + np.int8(add)).view(np.uint8) & np.uint8(3)
    found = codes[:, 0] << np.uint8(shifts[0])
    for field in range(1, 4):
        found |= codes[:, field] << np.uint8(shifts[field])
    return found


def _split(data: Any, shifts: tuple[int, ...]) -> Any:
    """uint8 codes [:, 4, ...] of bytes [:, ...]."""
    xp = _xp.namespace(data)
    return xp.stack([data >> np.uint8(shift) & np.uint8(3) for shift in shifts], axis=1)


def _less_one(codes: Any) -> Any:
    return codes.view(np.int8) - np.int8(1)


def _is_three(codes: Any) -> Callable[[], Any]:
    return lambda: codes == 3


_UP, _DOWN = (0, 2, 4, 6), (6, 4, 2, 0)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Layout:
    """How trits are packed.

    Parameters
    ----------
    pack : callable
        From trits, and scales where there are some.
    unpack : callable
        From uint8 and a shape: the trits in their order, and what tells which codes are invalid.
    size : callable
        Bytes for a shape.
    multiples : tuple of int
        Of what the last lengths are multiples; 0 for the size of the array.
    block : int
        Elements that share a scale, 0 where there are none, -1 for all.
    scales : callable, optional
        From uint8 and a shape.
    largest : int
        The largest value.
    """

    pack: Callable[..., Any]
    unpack: Callable[[Any, tuple[int, ...]], tuple[Any, Callable[[], Any]]]
    size: Callable[[tuple[int, ...]], int]
    multiples: tuple[int, ...]
    block: int = 0
    scales: Callable[[Any, tuple[int, ...]], Any] | None = None
    largest: int = 1

    def check_shape(self, shape: tuple[int, ...], layout: str) -> None:
        """Refuse what cannot be packed."""
        matrix = len(self.multiples) == 2
        if matrix and len(shape) != 2:
            raise ValueError(f"the trits have shape {shape}; layout {layout!r} packs a matrix [N, K]: reshape them")
        if not shape:
            raise ValueError(f"the trits have no axis; layout {layout!r} packs [..., K]: reshape them to (1,)")
        lengths = (math.prod(shape),) if self.block < 0 else shape[-len(self.multiples) :]
        for name, length, multiple in zip("NK" if matrix else "K", lengths, self.multiples, strict=True):
            if length % multiple:
                what = "size" if self.block < 0 else name
                raise ValueError(
                    f"the trits have shape {shape}; layout {layout!r} needs a {what} that is a multiple of {multiple}: "
                    "pad them with zeros"
                )


def _pack_i2_s(t: Any, scale: Any) -> Any:
    xp = _xp.namespace(t)
    packed = xp.zeros(t.size // 4 + 32, np.uint8)
    packed[: t.size // 4] = _fields(t, _DOWN)
    packed[t.size // 4 : t.size // 4 + 4] = scale.view(np.uint8)
    return packed


def _unpack_i2_s(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    codes = _split(data[:-32].reshape(-1, 32), _DOWN)
    t = _less_one(codes)
    t[codes == 3] = 0
    return t, _is_three(codes)


def _halves(scale: Any) -> Any:
    """uint8 [blocks, 2]: scales as float16."""
    return scale.reshape(-1, 1).astype(np.float16).view(np.uint8)


def _blocks(data: Any, size: int) -> Any:
    return data.reshape(-1, size)


def _half_scales(data: Any, shape: tuple[int, ...], size: int, at: int, block: int) -> Any:
    found = _xp.contiguous(_blocks(data, size)[:, at : at + 2]).view(np.float16).astype(np.float32)
    return found.reshape(*shape[:-1], shape[-1] // block)


def _joined(t: Any, parts: list[Any]) -> Any:
    """Parts [blocks, bytes] side by side, in rows of the array's."""
    joined = _xp.namespace(t).concatenate(parts, axis=1)
    lead = t.shape[:-1]
    return joined.reshape(*lead, joined.size // max(1, math.prod(lead)))


def _pack_tq2_0(t: Any, scale: Any) -> Any:
    return _joined(t, [_fields(t, _UP).reshape(-1, 64), _halves(scale)])


def _unpack_tq2_0(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    codes = _split(_xp.contiguous(_blocks(data, 66)[:, :64]).reshape(-1, 32), _UP)
    return _less_one(codes), _is_three(codes)


def _pack_q2_0(t: Any, scale: Any) -> Any:
    return _joined(t, [_halves(scale), _or(t.reshape(-1, 4), _UP, 1).reshape(-1, 16)])


def _unpack_q2_0(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    codes = _split(_xp.contiguous(_blocks(data, 18)[:, 2:]).reshape(-1), _UP)
    return _less_one(codes), lambda: codes > 3  # 2 is a value of it


# Of tq1_0's block: first element, bytes, trits of a byte.
_BASE3 = ((0, 32, 5), (160, 16, 5), (240, 4, 4))


def _to_base3(t: Any) -> list[Any]:
    """The 52 bytes of blocks [blocks, 256]."""
    parts = []
    for first, width, count in _BASE3:
        digits = (t[:, first : first + width * count].reshape(-1, count, width) + np.int8(1)).astype(np.uint16)
        value = digits[:, 0]
        for digit in range(1, count):
            value = value * np.uint16(3) + digits[:, digit]
        value = value * np.uint16(3 ** (5 - count))
        parts.append(((value * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8))
    return parts


def _pack_tq1_0(t: Any, scale: Any) -> Any:
    return _joined(t, [*_to_base3(t.reshape(-1, 256)), _halves(scale)])


def _unpack_tq1_0(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    xp, blocks = _xp.namespace(data), _blocks(data, 54)
    parts, place = [], 0
    for _, width, count in _BASE3:
        part = blocks[:, place : place + width]
        place += width
        for digit in range(count):
            shifted = part * np.uint8(3**digit)  # modulo 256
            parts.append(((shifted.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).astype(np.int8) - np.int8(1))
    t = xp.concatenate(parts, axis=1)
    return t, lambda: xp.concatenate(_to_base3(t), axis=1) != blocks[:, :52]


def _pack_transformers(t: Any) -> Any:
    rows, depth = t.shape
    return _or(t.reshape(1, 4, rows // 4, depth), _UP, 1)[0]


def _unpack_transformers(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    codes = _split(data.reshape(1, -1), _UP)
    return _less_one(codes), _is_three(codes)


def _pack_microsoft(t: Any) -> Any:
    rows, depth = t.shape
    # Row 8 a + b, column 16 c + 4 f + byte of a tile of 16 x 32.
    tiles = t.reshape(rows // 16, 2, 8, depth // 32, 2, 4, 4).transpose(5, 0, 3, 1, 4, 2, 6)
    return _or(tiles[None], _UP, 2).reshape(rows, depth // 4)


def _unpack_microsoft(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    rows, depth = shape
    codes = _split(data.reshape(1, rows // 16, depth // 32, 2, 2, 8, 4), _UP)[0]
    t = codes.view(np.int8) - np.int8(2)
    return t.transpose(1, 3, 5, 2, 4, 0, 6), lambda: codes == 0


def _pack_torchao(t: Any) -> Any:
    return _or(t.reshape(-1, 4), _DOWN, 0).reshape(t.shape[0], t.shape[1] // 4).view(np.int8)


def _unpack_torchao(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    codes = _split(data, _DOWN)
    return (codes ^ np.uint8(2)).view(np.int8) - np.int8(2), lambda: codes == 2


def _padded(t: Any, multiple: int) -> Any:
    """int8 rows [N, ...] with zeros behind them, up to a multiple."""
    rows, depth = t.shape
    wide = _xp.namespace(t).zeros((rows, -(-depth // multiple) * multiple), np.int8)
    wide[:, :depth] = t
    return wide


def _pack_planes(t: Any) -> Any:
    xp, wide = _xp.namespace(t), _padded(t, 32)
    rows = len(wide)
    bits = xp.stack([wide == 1, wide == -1]).reshape(2, rows, wide.shape[1] // 8, 8)
    found = bits[..., 0].astype(np.uint8)
    for bit in range(1, 8):
        found |= bits[..., bit].astype(np.uint8) << np.uint8(bit)
    return found.view(np.uint32)


def _unpack_planes(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    xp, (rows, depth) = _xp.namespace(data), shape
    bits = xp.stack([data >> np.uint8(bit) & np.uint8(1) for bit in range(8)], axis=1).view(np.int8)
    plus, minus = bits.reshape(2, rows, -(-depth // 32) * 32)
    return (plus - minus)[:, :depth], lambda: plus & minus


def _pack_u32(t: Any) -> Any:
    wide = _padded(t, 16)
    wide[wide < 0] = 2
    return _or(wide.reshape(-1, 4), _UP, 0).reshape(len(wide), wide.shape[1] // 4).view(np.uint32)


def _unpack_u32(data: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    rows, depth = shape
    codes = _split(data, _UP)
    t = ((codes & np.uint8(1)).view(np.int8) - (codes >> np.uint8(1)).view(np.int8)).reshape(rows, -(-depth // 16) * 16)
    return t[:, :depth], _is_three(codes)


def _words(shape: tuple[int, ...], each: int) -> int:
    return shape[0] * -(-shape[1] // each) * 4


_TABLE = {
    "i2_s": _Layout(
        _pack_i2_s,
        _unpack_i2_s,
        lambda shape: math.prod(shape) // 4 + 32,
        (128,),
        -1,
        lambda data, shape: _xp.contiguous(data[-32:-28]).view(np.float32),
    ),
    "tq1_0": _Layout(
        _pack_tq1_0,
        _unpack_tq1_0,
        lambda shape: math.prod(shape) // 256 * 54,
        (256,),
        256,
        lambda data, shape: _half_scales(data, shape, 54, 52, 256),
    ),
    "tq2_0": _Layout(
        _pack_tq2_0,
        _unpack_tq2_0,
        lambda shape: math.prod(shape) // 256 * 66,
        (256,),
        256,
        lambda data, shape: _half_scales(data, shape, 66, 64, 256),
    ),
    "q2_0": _Layout(
        _pack_q2_0,
        _unpack_q2_0,
        lambda shape: math.prod(shape) // 64 * 18,
        (64,),
        64,
        lambda data, shape: _half_scales(data, shape, 18, 0, 64),
        2,
    ),
    "transformers": _Layout(_pack_transformers, _unpack_transformers, lambda shape: math.prod(shape) // 4, (4, 1)),
    "microsoft": _Layout(_pack_microsoft, _unpack_microsoft, lambda shape: math.prod(shape) // 4, (16, 32)),
    "torchao": _Layout(_pack_torchao, _unpack_torchao, lambda shape: math.prod(shape) // 4, (1, 4)),
    "planes": _Layout(_pack_planes, _unpack_planes, lambda shape: 2 * _words(shape, 32), (1, 1)),
    "u32": _Layout(_pack_u32, _unpack_u32, lambda shape: _words(shape, 16), (1, 1)),
}
#: What `pack` and `unpack` know.
LAYOUTS = tuple(_TABLE)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _named(scaled: bool = False) -> str:
    return ", ".join(repr(name) for name, layout in _TABLE.items() if layout.block or not scaled)


def _layout(layout: Any) -> _Layout:
    if not isinstance(layout, str) or layout not in _TABLE:
        raise FormatError(f"layout is {layout!r}; allowed are {_named()}")
    return _TABLE[layout]


def _trit_array(t: Any, argument: str = "t") -> Any:
    """An int8 array, contiguous."""
    t = _xp.as_array(t, argument)
    if t.dtype != np.int8:
        raise TypeError(f"{argument} is {t.dtype}; trits are int8: convert with astype('int8')")
    with _xp.on_device_of(t):
        return _xp.contiguous(t)


def _codes_of(q: Any) -> Any:
    """The plane of codes of a ternary array."""
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray of the format 'ternary'")
    found = q.format.trits(q.shape, q.lead)
    if found is None:
        raise FormatError(
            f"q is {q.format!r}; it must be 'ternary': quantize(q.dequantize(), 'ternary', rule='absmax') keeps what "
            "was ternary already"
        )
    return q.planes[found.codes]


def _looks(array: Any, check: Any) -> bool:
    """Whether values are looked at."""
    if check is not None and not isinstance(check, bool):
        raise FormatError(f"check is {check!r}; allowed are True, False and None, which looks at host memory")
    return isinstance(array, np.ndarray) if check is None else check


def _check_trits(t: Any, check: Any, largest: int = 1) -> None:
    if _looks(t, check) and t.size and not (int(t.min()) >= -1 and int(t.max()) <= largest):
        raise FormatError(
            f"the trits are {int(t.min())} to {int(t.max())}; they must be -1 to {largest}: clip them, or quantize "
            "float weights with kb.quantize(w, 'ternary')"
        )


def _repeated(single: Any, count: int, beside: Any) -> Any:
    """float32 [count] on the device of `beside`, of one number, which may be in host memory, or of all."""
    found = _xp.namespace(beside).empty(count, _SINGLE)
    if single.size == 1 and isinstance(single, np.ndarray):
        found.fill(single[0])
    else:
        found[...] = _xp.namespace(beside).asarray(single)
    return found


def _given(scale: Any, t: Any, layout: _Layout) -> Any:
    """Scales of the layout's blocks, float32, from what a call brings."""
    count = 1 if layout.block < 0 else t.size // layout.block
    scale = _xp.as_array(1.0 if scale is None else scale, "scale")
    if scale.dtype.kind not in "fiu":
        raise TypeError(f"scale is {scale.dtype}; it must be a float array")
    if not isinstance(scale, np.ndarray) and not _xp.same_device(scale, t):
        raise DeviceError(f"scale is on {_xp.device_of(scale)} and the trits on {_xp.device_of(t)}; move one of them")
    if scale.size not in (1, count):
        raise ValueError(
            f"scale has shape {scale.shape}; it must be one number, or {count} of them, one for each block"
        )
    with np.errstate(over="ignore", under="ignore"):
        return _repeated(scale.reshape(-1).astype(_SINGLE), count, t)


def _scales_of(q: QuantizedArray, layout: _Layout, name: str) -> Any:
    """Scales of the layout's blocks, float32, from those of an array."""
    found = q.format.trits(q.shape, q.lead)
    assert found is not None
    scale = q.planes[found.scales]
    count = 1 if layout.block < 0 else q.size // layout.block
    # Scales that lie in the order of the elements, each for a whole number of blocks.
    whole = scale.size and count % scale.size == 0
    if found.group or (not found.shares and scale.size > 1):
        whole = whole and q.shape[-1] % (found.group or 1) == 0
    if not whole:
        raise FormatError(
            f"q is {q.format!r} of shape {q.shape}, with {scale.size} scales; layout {name!r} has {count}, one for "
            f"{'all elements' if layout.block < 0 else f'{layout.block} neighbours'}: pack its trits, and keep the "
            "scales beside them"
        )
    return scale.repeat(count // scale.size)


def _check_scales(scale: Any, layout: _Layout, check: Any) -> None:
    """Scales that do not fit the float16 of a layout."""
    if not _looks(scale, check) or not scale.size:
        return
    most = float(abs(scale).max())
    limit = 65504.0 if layout.block > 0 else float(np.finfo(_SINGLE).max)
    if not most <= limit:
        raise FormatError(f"a scale is {most}; the layout holds magnitudes up to {limit}")


def _packed(packed: Any, shape: Any, layout: Any) -> tuple[_Layout, tuple[int, ...], Any]:
    """A layout, a checked shape, and the bytes as flat uint8."""
    chosen = _layout(layout)
    try:
        lengths = tuple(int(length) for length in shape)
    except (TypeError, ValueError):
        lengths = (-1,)
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape is {shape!r}; it must be a sequence of lengths")
    chosen.check_shape(lengths, layout)
    data = _xp.as_array(packed, "packed")
    if data.dtype.kind not in "iu":
        raise TypeError(f"packed is {data.dtype}; it must be an integer array, such as uint8")
    with _xp.on_device_of(data):
        data = _xp.contiguous(data).reshape(-1).view(np.uint8)
    wanted = chosen.size(lengths)
    if data.size != wanted:
        raise ValueError(f"packed has {data.size} bytes; an array of shape {lengths} has {wanted} in {layout!r}")
    return chosen, lengths, data
