"""How product kernels decode affine integers."""

from __future__ import annotations

import functools

import numpy as np

from ...backend.compile import CXX_TYPES
from ..planes import Fragments

#: Groups whose sums ``linear_few`` scales; larger ones are whole k-tiles, of so many elements.
GROUPS, K_TILE = (32, 64), 128
_ZEROS = {"none": "NO_ZEROS", "int": "ZERO_POINTS", "float": "OFFSETS"}
_INTEGERS = {"int32": "int", "int8": "signed char", "uint8": "unsigned char"}
_BESIDE = {"none": None, "int": "zero_point", "float": "offset"}


@functools.lru_cache(maxsize=256)
def fragments_of(
    bits: int, signed: bool, block: int, zero: str = "none", scale_dtype: str = "float32", zero_dtype: str = "int32"
) -> Fragments | None:
    """What product kernels need of integers of 8 or 4 bits.

    Parameters
    ----------
    bits : {8, 4}
        Of an integer.
    signed : bool
        Whether integers are two's complement.
    block : int
        Elements that share a scale; 0 where those of a row do.
    zero : {"none", "int", "float"}
        What stands beside scales: nothing, zero points or offsets.
    scale_dtype : str
        Of scales and offsets.
    zero_dtype : str
        Of zero points.

    Returns
    -------
    Fragments or None
        None where no kernel decodes them.
    """
    if block not in GROUPS and block % K_TILE:
        return None
    granule = block if block in GROUPS else K_TILE
    scale, scale_bytes = CXX_TYPES[scale_dtype], 4 if scale_dtype == "float32" else 2
    beside = {"none": 0, "int": np.dtype(zero_dtype).itemsize, "float": scale_bytes}[zero]
    beside_type = _INTEGERS[zero_dtype] if zero == "int" else scale
    decoder = f"{bits}, {granule}, {scale}, {_ZEROS[zero]}, {beside_type}, USABLE_SCALES, NEIGHBOURS"
    # Sums of x, by which offsets are multiplied, take registers.
    few = 4 if bits == 4 and zero != "float" else 2
    return Fragments(
        small_batch=f"Affine<{{T}}, {decoder}>",
        hopper=_tile_decoder(bits, signed, block, zero, scale_dtype, zero_dtype),
        bits=bits,
        block=block,
        granule=granule,
        scale_bytes=scale_bytes,
        entries=0,
        gaps=False,
        hopper_entries=0,
        owned=granule == K_TILE,
        copied=True,
        swizzled=bits == 8 or granule != K_TILE,
        items=few,
        grouped_items=few,
        wide=zero != "float",
        targeted=False,
        codes="codes",
        scales="scale",
        beside=_BESIDE[zero],
        beside_bytes=beside,
        aligned=min(16, max(scale_bytes, beside) * K_TILE // granule),
        signed=signed,
        multiple=granule if block else 32,
        added=zero == "float",
        together=2 if bits == 4 else 1,
        work=1.1 if zero == "float" else 1.0,
        tile_work=1.3 if zero == "int" and bits == 4 else 1.0,
    )


def _tile_decoder(bits: int, signed: bool, block: int, zero: str, scale_dtype: str, zero_dtype: str) -> str:
    """The decoder of ``linear_tile``; empty where it has none."""
    if block & block - 1 or (zero == "float" and not block):
        return ""
    order = "FOUR_APART" if bits == 4 else "TWO_APART"
    scale = {"float32": "FLOAT32", "float16": "USABLE_FLOAT16", "bfloat16": "USABLE_BFLOAT16"}[scale_dtype]
    beside = {"none": "NO_ZERO_POINTS", "int": f"{zero_dtype.upper()}_ZERO_POINTS", "float": "FLOAT_OFFSETS"}[zero]
    shares = {0: "OF_ROWS", 32: "OF_GRANULES", 64: "OF_BLOCKS"}.get(block, "OF_STAGES")
    return f"TileIntegers<{{T}}, {bits}, {str(signed).lower()}, {order}, {scale}, {beside}, {shares}>"


def all_fragments() -> tuple[Fragments, ...]:
    """What the compile check looks at: all that `fragments_of` returns for scales of 32 bits and unsigned integers, and
    for narrower ones where most of them are copied in another way.
    """
    found = [
        fragments_of(bits, False, block, zero) for bits in (4, 8) for block in (*GROUPS, K_TILE) for zero in _ZEROS
    ]
    found += [fragments_of(4, False, K_TILE, "none", "float16"), fragments_of(4, False, 32, "int", "bfloat16", "uint8")]
    found += [fragments_of(4, False, block, "int", "float16", "uint8") for block in (64, K_TILE)]
    found += [fragments_of(bits, False, K_TILE, "float", "bfloat16") for bits in (4, 8)]
    return tuple(each for each in found if each is not None)
