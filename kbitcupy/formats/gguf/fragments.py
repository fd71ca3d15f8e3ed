"""How product kernels decode GGUF's types: to fragments (linear_few, linear_tile), or by records (linear_records)."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..integer_codes import IQ4
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


def _tables(
    small_batch: str, hopper: str, block: int, scale_bytes: int, values: tuple[float, ...], **others: Any
) -> Fragments:
    """Codes of 4 bits into a table of 16 values."""
    about: dict[str, Any] = {
        "granule": block,
        "owned": False,
        "copied": True,
        "swizzled": True,
        "items": 4,
        "grouped_items": 2,
        "wide": True,
        "blocked": block != 16,
        "table_work": 1.0,
        **others,
    }
    return Fragments(
        small_batch=small_batch,
        hopper=f"TileNibbles<{{T}}, {hopper}>",
        bits=4,
        block=block,
        scale_bytes=scale_bytes,
        entries=256,
        gaps=True,
        hopper_entries=256,
        targeted=False,
        codes="qs",
        known_values=values,
        single=False,
        **about,
    )


_FP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)

#: By the names of formats. Codes of q4_0 are 8 more than they stand for, those of q8_0 are in two's complement. An item
#: of q4_k has the inner scales of its whole block beside it.
FRAGMENTS = {
    "q4_0": _fragments(
        "Affine<{T}, 4, 32, __half, NO_ZEROS, __half, ALL_SCALES, SPLIT>",
        "4, false, TWO_APART, FLOAT16, NO_ZERO_POINTS, OF_GRANULES",
        4,
        blocked=True,
    ),
    "q8_0": _fragments(
        "Affine<{T}, 8, 32, __half, NO_ZEROS, __half, ALL_SCALES, NEIGHBOURS>",
        "8, true, TWO_APART, FLOAT16, NO_ZERO_POINTS, OF_GRANULES",
        8,
        signed=True,
        blocked=True,
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
        columns=True,
        work=1.1,
    ),
    "q4_1": _fragments(
        "Q4_1<{T}>",
        "4, false, TWO_APART, FLOAT16_PAIRS, FLOAT_OFFSETS, OF_GRANULES",
        4,
        scale_bytes=4,
        aligned=16,
        added=True,
        blocked=True,
        columns=True,
        work=1.1,
    ),
    "iq4_nl": _tables(
        "PairTable<{T}, __half, SPLIT>", "SPLIT, FLOAT16", 32, 2, tuple(map(float, IQ4)), scales="d", columns=True
    ),
    "iq4_xs": _tables(
        "InnerPairTable<{T}>",
        "SPLIT, SIX_BITS",
        256,
        4,
        tuple(map(float, IQ4)),
        scales="d",
        beside="scales_l",
        offset="scales_h",
        granule=32,
        multiple=256,
        copied=False,
        columns=True,
        table_work=1.18,
        tile_work=1.1,
    ),
    "mxfp4": _tables(
        "PairTable<{T}, unsigned char, NEIGHBOURS>",
        "NEIGHBOURS, E8M0",
        32,
        1,
        (*_FP4, *(-v for v in _FP4)),
        scales="scales",
        columns=True,
    ),
    "nvfp4": _tables(
        "PairTable16<{T}>",
        "NEIGHBOURS, UE4M3_HALVES",
        16,
        1,
        (*_FP4, *(-v for v in _FP4)),
        scales="scales",
        halves=True,
        tensor_scale="scale",
        owned=True,
        swizzled=False,
        grouped_items=4,
        table_work=0.93,
        tile_work=1.25,
        quantized=_tables(
            "SharedTable16<{T}>",
            "NEIGHBOURS, UE4M3_HALVES",
            16,
            1,
            (*_FP4, *(-v for v in _FP4)),
            scales="scales",
            blocked=True,
            paired=True,
            columns=True,
            tensor_scale="scale",
        ),
    ),
}


class About(NamedTuple):
    """What `Records` says of a type beside its fields.

    Parameters
    ----------
    sub : int
        Elements that share a factor.
    summed : bool, default True
        As there.
    table : int, default 0
        Words of its table.
    work : float, default 1.0
        As there.
    lanes : float, default 0
        As there.
    folded : bool, default False
        As there.
    gap : int, default 16
        As there.
    apart : bool, default False
        As there.
    integers : float, default 1.0
        As there.
    columns, halves : bool, default False
        As there.
    """

    sub: int
    summed: bool = True
    table: int = 0
    work: float = 1.0
    lanes: float = 0.0
    folded: bool = False
    gap: int = 16
    apart: bool = False
    integers: float = 1.0
    columns: bool = False
    halves: bool = False


#: By the names of formats: the types that linear_records decodes.
RECORDS = {
    "q4_1": About(32, integers=0.9),
    "q5_0": About(32, work=1.2, integers=1.04),
    "q5_1": About(32, work=1.25, integers=1.14),
    "q2_k": About(16, lanes=0.74, gap=32, apart=True, integers=0.68),
    "q3_k": About(16, work=1.3, lanes=0.96, folded=True, gap=32, integers=0.92),
    "q5_k": About(32, work=1.15, apart=True),
    "q6_k": About(16, work=1.35, integers=1.23, columns=True),
    "iq4_nl": About(32, work=1.4, integers=1.03),
    "iq4_xs": About(32, work=1.65, integers=1.15),
    "mxfp4": About(32, work=1.6),
    "nvfp4": About(16, work=1.9, integers=1.08),
    "tq1_0": About(128, work=1.15, integers=0.85),
    "tq2_0": About(128, work=0.75, integers=0.55),
    "iq1_s": About(32, table=2048, work=1.4, lanes=0.74, folded=True, integers=0.86, halves=True),
    "iq1_m": About(16, table=2048, work=1.9, lanes=0.84, folded=True, integers=0.95, halves=True),
    "iq2_xxs": About(32, table=32 * 256 + 16 * 128, work=1.3, lanes=0.9, folded=True, integers=0.86),
    "iq2_xs": About(16, table=16 * (512 + 128), work=1.4, lanes=1.0, folded=True),
    "iq2_s": About(16, table=8 * 1024 + 16 * 256, work=1.4, lanes=1.16, folded=True, integers=1.17, halves=True),
    "iq3_xxs": About(32, False, 32 * 256 + 16 * 128, 1.45, lanes=1.1, integers=1.03),
    "iq3_s": About(32, table=16 * 512 + 8 * 256, work=1.65, lanes=1.42, folded=True, integers=1.43, halves=True),
}
