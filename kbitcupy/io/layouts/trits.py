"""The bytes that files have for ternary arrays, made of the format ``ternary`` and back; no trit is rounded on the way.

============  ==========================================================================================================
transformers  uint8 [N / 4, K]: byte [r, k] has t + 1 of rows r, r + N/4, r + N/2 and r + 3N/4, from the lowest bits
I2_S          bitnet.cpp's: bytes of 128 elements as in ``ternary``, but the first field in the highest bits; behind all
              of them the scale, float32, and 28 bytes
TQ2_0, TQ1_0  GGUF's, blocks of 256 elements with a half as their scale (`kbitcupy.formats.gguf.ternary`)
============  ==========================================================================================================

Sources: transformers, ``integrations/bitnet.py``; bitnet.cpp, ``ggml-bitnet-mad.cpp``; ggml, ``ggml-quants.c``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...array import QuantizedArray
from ...backend import xp as _xp
from ...errors import FileError
from ...formats.base import Format, get_format
from ...formats.blocks import BlockFormat
from ...formats.ternary import BLOCK, RUN, pack, unpack

#: GGUF's types of trits.
TYPES = ("tq2_0", "tq1_0")
#: Elements of one of their blocks.
TYPE_BLOCK = 256
#: Bytes of I2_S behind the codes: a float32 and zeros.
I2_S_TAIL = 32
# The four fields of a byte in the other order.
_REVERSED = np.array([sum((byte >> 2 * f & 3) << 6 - 2 * f for f in range(4)) for byte in range(256)], np.uint8)
# Blocks that are made at a time: they stay in the cache.
_ROWS = 256
# Scales that a half has with all of its bits.
_LEAST_HALF, _LARGEST_HALF = np.float32(2.0**-14), np.float32(65504)


def is_ternary(format: Format) -> bool:
    """Whether a format holds trits and scales of their own."""
    return format.name == "ternary"


def trits_of(name: str, q: QuantizedArray) -> np.ndarray:
    """The trits of an array, int8 of its size, in host memory.

    Raises
    ------
    FileError
        When a code is none of theirs.
    """
    trits = unpack(_xp.to_device(q.planes["codes"], "cpu"))[: q.size]
    if trits.size and trits.max() > 1:
        raise FileError(f"tensor {name!r} has a code 3, which is no trit: it was not made by a quantizer")
    return trits


def codes_of(trits: np.ndarray) -> np.ndarray:
    """The plane ``codes`` from int8 trits."""
    padded = np.zeros(-(-trits.size // BLOCK) * BLOCK, np.int8)
    padded[: trits.size] = trits.reshape(-1)
    codes = np.empty(padded.size // BLOCK * RUN, np.uint8)
    pack(padded, codes)
    return codes


def scales_of(name: str, q: QuantizedArray) -> np.ndarray:
    """The scales of an array, float32, in host memory.

    Raises
    ------
    FileError
        When one is negative or no finite number.
    """
    scales = _xp.to_device(q.planes["scale"], "cpu")
    _check_scales(name, scales)
    return scales


def one_scale(name: str, q: QuantizedArray, who: str) -> np.float32:
    """The scale of an array of which a file has one.

    Raises
    ------
    FileError
        When there are several.
    """
    scales = scales_of(name, q)
    if not scales.size or not (scales == scales[0]).all():
        raise FileError(
            f"tensor {name!r} has {len(np.unique(scales))} different scales, {who} has one for a tensor: quantize it "
            "with granularity='tensor'"
        )
    return np.float32(scales[0])


def to_transformers(trits: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """transformers' bytes, uint8 [N / 4, K], of N x K trits; N is a multiple of 4."""
    codes = (trits.reshape(4, shape[0] // 4, shape[1]) + np.int8(1)).view(np.uint8)
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6


def from_transformers(name: str, packed: np.ndarray) -> np.ndarray:
    """The trits of transformers' bytes, int8 [N, K].

    Raises
    ------
    FileError
        When a code is 3.
    """
    codes = np.concatenate([packed >> np.uint8(2 * field) & np.uint8(3) for field in range(4)])
    _check_codes(name, codes)
    trits: np.ndarray = codes.view(np.int8) - np.int8(1)
    return trits


def to_i2_s(name: str, q: QuantizedArray) -> np.ndarray:
    """bitnet.cpp's bytes of an array of whole blocks of 128."""
    scale = one_scale(name, q, "I2_S")
    trits_of(name, q)
    tail = np.zeros(I2_S_TAIL, np.uint8)
    tail[:4] = np.array([scale], "<f4").view(np.uint8)
    return np.concatenate([_REVERSED[_xp.to_device(q.planes["codes"], "cpu")], tail])


def from_i2_s(name: str, raw: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """The planes of an array of `size` elements from bitnet.cpp's bytes.

    Raises
    ------
    FileError
        When a code is 3, or the scale negative or no finite number.
    """
    codes = _REVERSED[raw[: size // 4]]
    for field in range(4):
        _check_codes(name, codes >> np.uint8(2 * field) & np.uint8(3))
    scale = raw[size // 4 : size // 4 + 4].copy().view("<f4").astype(np.float32)
    _check_scales(name, scale)
    return {"codes": codes, "scale": scale}


def to_blocks(name: str, q: QuantizedArray, type: str) -> tuple[np.ndarray, np.ndarray]:
    """GGUF's blocks of an array, and what multiplies them: float32 [1].

    Where all scales are equal, the two multiply to the scale but for its last bit; where they differ, the scale of
    each block is rounded to a half.
    """
    scales, format = scales_of(name, q), _type(type)
    per_block = np.repeat(scales, q.size // TYPE_BLOCK // max(len(scales), 1))
    largest = scales.max(initial=np.float32(0))
    half = np.clip(largest, _LEAST_HALF, _LARGEST_HALF).astype(np.float16)
    factor = largest / np.float32(half) if largest > 0 else np.float32(1)
    d = (per_block / factor).astype(np.float16)
    trits = trits_of(name, q)
    if not q.size:
        return np.zeros(0, np.uint8), np.array([factor], np.float32)
    if type == "tq2_0":  # its codes lie as those of ternary do
        blocks = format.to_blocks({"qs": _xp.to_device(q.planes["codes"], "cpu"), "d": d}).reshape(-1)
        return blocks, np.array([factor], np.float32)
    rows = trits.reshape(-1, TYPE_BLOCK)
    blocks = np.empty((len(rows), format.block_bytes), np.uint8)
    with np.errstate(all="ignore"):  # a block of zeros has no inverse scale
        for first in range(0, len(rows), _ROWS):
            blocks[first : first + _ROWS] = format.quantize_blocks(rows[first : first + _ROWS].astype(np.float32))
    blocks[:, -2:] = d.astype("<f2")[:, None].view(np.uint8)  # a type ends in its scale
    return blocks.reshape(-1), np.array([factor], np.float32)


def from_blocks(name: str, raw: np.ndarray, type: str, factor: np.ndarray) -> dict[str, np.ndarray]:
    """The planes, one scale for a block, from GGUF's blocks and what multiplies them: a number for each member.

    Raises
    ------
    FileError
        When a scale is negative or no finite number.
    """
    format = _type(type)
    planes = format.from_blocks(raw)
    d = planes["d"].astype(np.float32)
    with np.errstate(all="ignore"):
        scale = (d.reshape(len(factor), -1) * factor[:, None]).reshape(-1) if d.size else d
    _check_scales(name, scale)
    if type == "tq2_0":
        return {"codes": planes["qs"], "scale": scale}
    trits = format.dequantize_planes({**planes, "d": np.ones_like(planes["d"])}) if d.size else np.zeros(0, np.float32)
    return {"codes": codes_of(trits.astype(np.int8)), "scale": scale}


def check_blocks(name: str, format: Any, shape: tuple[int, ...], type: str) -> None:
    """Check that blocks of a GGUF type have one scale each.

    Raises
    ------
    FileError
        When a row is not whole blocks, or scales change within a block.
    """
    if not shape or shape[-1] % TYPE_BLOCK:
        raise FileError(
            f"tensor {name!r} of shape {shape}: rows of {type} are whole blocks of {TYPE_BLOCK} elements: keep it as "
            "it is (keep=, --keep)"
        )
    kind, length = (*format.granularity, 0)[:2] if format.granularity != "tensor" else ("tensor", 0)
    if kind == "group" and length < shape[-1] and (length % TYPE_BLOCK or shape[-1] % length):
        raise FileError(
            f"tensor {name!r} has a scale for {length} elements; blocks of {type} have one for {TYPE_BLOCK}: take "
            f"groups of a multiple of {TYPE_BLOCK} that rows of {shape[-1]} consist of, or granularity='tensor'"
        )


def _type(name: str) -> Any:
    format = get_format(name)
    assert isinstance(format, BlockFormat)
    return format


def _check_scales(name: str, scales: np.ndarray) -> None:
    good = np.isfinite(scales) & (scales >= 0)
    if not good.all():
        raise FileError(f"tensor {name!r} has the scale {scales[~good][0]}; it must be finite and not negative")


def _check_codes(name: str, codes: np.ndarray) -> None:
    if codes.size and codes.max() > 2:
        raise FileError(f"tensor {name!r} has a code 3, which stands for no trit: the file is damaged, or no BitNet's")
