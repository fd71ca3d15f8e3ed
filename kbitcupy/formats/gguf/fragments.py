"""How product kernels decode GGUF's types."""

from __future__ import annotations

from typing import Any

from ..planes import Fragments


def _fragments(small_batch: str, hopper: str, bits: int, **others: Any) -> Fragments:
    few = 4 if bits == 4 else 2
    about: dict[str, Any] = {
        "block": 32,
        "granule": 32,
        "multiple": 32,
        "scale_bytes": 2,
        "owned": False,
        "aligned": 8,
        "wide": True,
        "together": 2 if bits == 4 else 1,
        **others,
    }
    return Fragments(
        small_batch=small_batch,
        hopper=f"TileIntegers<{{T}}, {hopper}>",
        bits=bits,
        entries=0,
        gaps=False,
        hopper_entries=0,
        copied=True,
        swizzled=True,
        items=few,
        grouped_items=few,
        targeted=False,
        codes="qs",
        scales="d",
        **about,
    )


#: By the names of formats. Codes of q4_0 are 8 more than they stand for, those of q8_0 are in two's complement. An item
#: of q4_k has the inner scales of its whole block beside it.
FRAGMENTS = {
    "q4_0": _fragments(
        "Affine<{T}, 4, 32, __half, NO_ZEROS, __half, ALL_SCALES, SPLIT>",
        "4, false, TWO_APART, FLOAT16, NO_ZERO_POINTS, OF_GRANULES",
        4,
    ),
    "q8_0": _fragments(
        "Affine<{T}, 8, 32, __half, NO_ZEROS, __half, ALL_SCALES, NEIGHBOURS>",
        "8, true, TWO_APART, FLOAT16, NO_ZERO_POINTS, OF_GRANULES",
        8,
        signed=True,
    ),
    "q4_k": _fragments(
        "Q4K<{T}>",
        "4, false, TWO_BLOCKS, INNER_SCALES, INNER_OFFSETS, OF_BLOCKS",
        4,
        block=256,
        granule=128,
        scale_bytes=4,
        beside="scales",
        beside_bytes=12,
        aligned=4,
        owned=True,
        multiple=256,
        added=True,
        work=1.3,
    ),
}
