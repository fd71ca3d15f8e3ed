"""Blockwise tables as bitsandbytes has them: ``nf4``, ``fp4``, ``table4`` (4 bits) and ``dynamic8`` (8 bits).

The flattened array is cut into blocks of 16 to 4096 elements, the last one as long as it comes. With
r = fl(1 / absmax), an element is stored as the code of the table value that the thresholds give for y = fl(x * r); two
elements share a byte, the first in its high nibble. An element decodes to fl(table[code] * absmax).

==============  ======================  ======================================================================
plane           dtype, entries          contents
==============  ======================  ======================================================================
packed          uint8, (n + 1) // 2     two codes a byte (`dynamic8`: ``codes``, uint8, n)
absmax          float32, blocks         max|x| of the block, NaN ignored; with double quantization uint8 codes
                                        of absmax - offset, blocks of 256, by the dynamic map
nested_absmax   float32, blocks / 256   max|absmax - offset| of each such block (rounded up)
nested_offset   float32, 1              the mean of all absmax
table           float32, 16             only for a codebook of one's own
==============  ======================  ======================================================================

Thresholds are the float32 midpoints of neighbours; for NF4 they are bitsandbytes' own numbers, four of which are the
next float32 to the midpoint. A number on a threshold stays below it; in the dynamic map it goes to the even code. FP4
compares magnitudes with bitsandbytes' own seven numbers, and numbers below zero get the sign bit.

Special values: NaN gets code 0; every code of a block without a number other than zero is 0, and its absmax 0;
the spare nibble of an odd array holds the code of 0. Where the absmax is infinite, finite numbers get the code of 0
and infinities code 0. Magnitudes under 2^-126, of input or output, are zero. A block with an absmax over 2^126, whose
reciprocal would be such a number, is searched 2^64 times smaller.

Source: bitsandbytes 0.50, ``csrc/kernels.cu`` (NF4, FP4, dynamic map, nested statistics). Equal to these CUDA kernels,
to the bit, are absmax and what given planes decode to. Codes are equal but for three cases: there r is the GPU's
approximate reciprocal, so that a number on a threshold may get the neighbouring code; with an absmax over 2^126 it is
zero; and the mean of the absmax is added up in another order. Of a block of NaN alone they store the lowest float32 as
absmax. bitsandbytes' CPU backend has rules of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ... import tables
from ...errors import FormatError
from ...tables import flush
from ..base import Format, Fragments, Magnitude, Plane, register
from ..decoders import Decoder
from . import cuda, numpy as host
from .search import (
    NESTED_BLOCK,
    Table,
    check_block,
    check_codebook_name,
    check_host_codebook,
    fp4_table,
    given_table,
    nf4_table,
    table_of,
)


@functools.lru_cache(maxsize=256)
def _fragments(block: int, double_quant: bool, known: tuple[float, ...] = ()) -> Fragments:
    """What product kernels need of a table; `known` are its values, empty where they are in a plane."""
    granule = min(block, 64)
    return Fragments(
        small_batch=f"Table4<{{T}}, {granule}>",
        hopper=f"TileTable4<{{T}}, {str(double_quant).lower()}>" if block >= 32 else "",
        bits=4,
        block=block,
        granule=granule,
        scale_bytes=4,
        entries=256,
        gaps=True,
        hopper_entries=256,
        owned=False,
        copied=block == granule and not double_quant,
        swizzled=True,
        items=4 if granule == 64 else 2,
        grouped_items=2,
        wide=granule == 64,
        targeted=not double_quant,
        codes="packed",
        scales="absmax",
        nested_scales="nested_absmax" if double_quant else None,
        offset="nested_offset" if double_quant else None,
        values="table",
        known_values=known,
        scale_values=tuple(tables.dynamic_map().tolist()) if double_quant else (),
    )


class Table4(Format):
    """4-bit codes into a table of 16 values, one absmax for a block: what the three formats share.

    Parameters
    ----------
    block : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096.
    double_quant : bool, default False
        Store the absmax themselves in 8 bits (QLoRA's double quantization).
    """

    bits = 4
    name: str
    kernels = (cuda.QUANTIZE4, cuda.QUANTIZE4_ANY, cuda.DEQUANTIZE4, *cuda.BLOCKS4, *cuda.NESTED)
    all_fragments = tuple(_fragments(block, double_quant) for block in (16, 32, 64) for double_quant in (False, True))

    #: The table; None where each call of `quantize` brings one.
    _table: Table | None

    def __init__(self, *, block: int = 64, double_quant: bool = False):
        self.block = check_block(block)
        if not isinstance(double_quant, (bool, np.bool_)):
            raise FormatError(f"double_quant is {double_quant!r}; allowed are True and False")
        self.double_quant = bool(double_quant)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        return {}, {"block": 16}, {"block": 128}, {"block": 16, "double_quant": True}

    def options(self) -> dict[str, Any]:
        return {"block": self.block, "double_quant": self.double_quant}

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        n = math.prod(shape)
        blocks = -(-n // self.block)
        planes = {"packed": Plane("uint8", (-(-n // 2),), per=self.block // 2)}
        if self.double_quant:
            planes["absmax"] = Plane("uint8", (blocks,))
            planes["nested_absmax"] = Plane("float32", (-(-blocks // NESTED_BLOCK),), every=NESTED_BLOCK)
            planes["nested_offset"] = Plane("float32", (1,), "tensor")
        else:
            planes["absmax"] = Plane("float32", (blocks,))
        if self._table is None:
            planes["table"] = Plane("float32", (16,), "constant")
        return planes

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        host.quantize_table4(x, planes, self._table or given_table(given.get("codebook")), self.block)

    def first_numpy(
        self, shape: tuple[int, ...], planes: Mapping[str, Any]
    ) -> tuple[Format, Mapping[str, Any], Callable[[], None]] | None:
        if not self.double_quant:
            return None
        absmax = np.empty(planes["absmax"].shape, np.float32)
        single = {name: planes[name] for name in ("packed", "table") if name in planes}
        return self._single(), {**single, "absmax": absmax}, lambda: host.nest(absmax, planes)

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        cuda.quantize_table4(x, planes, self._table or given_table(given.get("codebook")), self.block)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        host.dequantize_table4(planes, out, self.values(planes), self.block)

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        cuda.dequantize_table4(planes, out, self._table, self.block)

    @functools.cached_property
    def decoder(self) -> Decoder:
        return cuda.table4_decoder(self.block, self.double_quant, self._table)

    def decode_rows(
        self,
        planes: Mapping[str, Any],
        shape: tuple[int, ...],
        ids: Any,
        out: Any,
        lead: int = 0,
        kept: dict[Any, Any] | None = None,
    ) -> bool:
        if not isinstance(out, np.ndarray):
            return super().decode_rows(planes, shape, ids, out, lead, kept)
        if not self.double_quant or lead:
            return False
        # 256 blocks share what their absmax are decoded with, wherever rows end: those of all rows are decoded.
        single = self._single()
        kept = {name: planes[name] for name in single.planes(shape)}
        rows = single.select({**kept, "absmax": host.host_absmax(planes)}, shape, ids.reshape(-1))
        single.decode_numpy(rows, out)
        return True

    def _single(self) -> Table4:
        """The format without double quantization."""
        return type(self)(block=self.block)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        table = self._table or table_of(self.values(planes))
        return host.table_error_bound(x, self.block, table, planes)

    def magnitude(self) -> Magnitude:
        scales, offset = ("nested_absmax", "nested_offset") if self.double_quant else ("absmax", None)
        if self._table is None:
            return Magnitude(scales, offset, "table")
        return Magnitude(scales, offset, largest=float(np.abs(self._table.values).max()))

    def fragments(self, ndim: int = 2) -> Fragments | None:
        known = () if self._table is None else tuple(self._table.values.tolist())
        return _fragments(self.block, self.double_quant, known)

    def values(self, planes: Mapping[str, Any]) -> np.ndarray:
        """The table that NumPy planes are decoded with, float32[16]."""
        return flush(planes["table"].astype(np.float32)) if self._table is None else self._table.values


class NF4(Table4):
    """4-bit codes into the NF4 table, one absmax for a block.

    Parameters
    ----------
    block : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096.
    double_quant : bool, default False
        Store the absmax themselves in 8 bits (QLoRA's double quantization).

    Examples
    --------
    >>> from kbitcupy.formats.codebook.table4 import NF4
    >>> NF4(block=32)
    get_format('nf4:block=32')
    """

    name = "nf4"
    family = "nf"
    origin = "QLoRA (arXiv 2305.14314), bitsandbytes 0.50"
    summary = "4-bit normal float, one float32 scale for a block"
    _table = nf4_table()


class FP4(Table4):
    """4-bit codes into the FP4 table, one absmax for a block.

    Parameters
    ----------
    block : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096.
    double_quant : bool, default False
        Store the absmax themselves in 8 bits (QLoRA's double quantization).

    Examples
    --------
    >>> from kbitcupy.formats.codebook.table4 import FP4
    >>> FP4(block=32)
    get_format('fp4:block=32')
    """

    name = "fp4"
    family = "fp"
    origin = "bitsandbytes 0.50"
    summary = "4-bit float (2 exponent bits), one float32 scale for a block"
    _table = fp4_table()

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        return {}, {"block": 32}, {"block": 16, "double_quant": True}


class OwnTable4(Table4):
    """4-bit codes into a table of 16 values of one's own, one absmax for a block.

    Parameters
    ----------
    block : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096.
    double_quant : bool, default False
        Store the absmax themselves in 8 bits (QLoRA's double quantization).
    codebook : {"bnf", "nf", "custom"}, default "bnf"
        The values: a standard codebook of `kbitcupy.create_normal_float_codebook`'s kind, or those that each call of
        `quantize` brings: any 16 numbers, in any order; `kbitcupy.fit_table` makes them from data. Files of version
        0.1 call it ``table``.

    Examples
    --------
    >>> from kbitcupy.formats.codebook.table4 import OwnTable4
    >>> OwnTable4(block=32)
    get_format('table4:block=32')
    """

    name = "table4"
    family = "table"
    origin = "bitsandbytes' layout, any table"
    summary = "4-bit codes into 16 values of one's own"
    takes = ("codebook",)
    renamed = MappingProxyType({"table": "codebook"})

    def __init__(self, *, block: int = 64, double_quant: bool = False, codebook: str = "bnf"):
        super().__init__(block=block, double_quant=double_quant)
        self.codebook = check_codebook_name(codebook, "an array of 16 numbers")
        self._table = None if codebook == "custom" else table_of(tables.standard_codebook(codebook, 4).values)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        return {}, {"codebook": "nf", "block": 32}, {"codebook": "custom"}, {"block": 16, "double_quant": True}

    def check_given(self, given: Mapping[str, Any]) -> None:
        check_host_codebook(given.get("codebook"), 16)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "codebook": self.codebook}

    def _single(self) -> Table4:
        return OwnTable4(block=self.block, codebook=self.codebook)


for _format in (NF4, FP4, OwnTable4):
    register(_format.name, _format)
