"""k-bit blockwise quantization with a codebook: formats ``kbit1`` .. ``kbit8``.

The flattened array is cut into blocks of 32. An element is stored as the index of the codebook value nearest to
x / scale, an index as one bit in each of K bit planes, the scale of a block in one byte (E4M4), two or four.

=========  ==================  =============================================================================
plane      dtype, entries      contents
=========  ==================  =============================================================================
packed     uint32, blocks * K  bit e of word b * K + p: bit p of the index of element 32 * b + e
absmax     uint8 (E4M4),       max|x| of the block over the tensor scale, NaN ignored, encoded
           float16 or float32
scale      float32, 1          tensor scale, a power of two; 1 unless the largest finite absmax lies outside the
                               range where `absmax` is accurate
codebook   float32, 2^K        only for custom codebooks
=========  ==================  =============================================================================

Special values: NaN gets index 0; infinities the extreme value of the codebook (index 0 when the block scale itself is
infinite); magnitudes under 2^-126, of input or output, are zero; a block whose decoded scale is 0 stores the index
nearest to 0; elements beyond the end of the array count as 0.

The two rules of the index search: the format searches with the scale that will be decoded, the flat functions of
`kbitcupy.bitsandbytes` with the float32 absmax (the pull request's rule). Layout and decoder are the same.

Source: bitsandbytes pull request 1858 (layout, E4M4, nf and bnf codebooks, for K = 2 to 5), which is open: no release
of bitsandbytes reads or writes these planes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import tables
from ...errors import FormatError
from ...tables import Codebook
from ..base import Format, Fragments, Magnitude, Plane, register
from ..chunks import block_absmax
from ..decoders import Decoder
from . import cuda, numpy as host
from .numpy import BLOCK as BLOCK
from .scales import ABSMAX as ABSMAX
from .search import check_codebook_name, check_host_codebook, check_k, given_codebook


@functools.lru_cache(maxsize=64)
def _fragments(k: int, absmax: str, codebook: str | None) -> Fragments:
    """What product kernels need of K = 2 to 8; `codebook` is a standard one, or None where it is in a plane."""
    known = () if codebook is None else tuple(tables.standard_codebook(codebook, k).values.tolist())
    few = 2 if k >= 5 or absmax == "float32" else 4
    found = Fragments(
        small_batch=f"Kbit<{{T}}, {k}, {ABSMAX[absmax].kernel}>",
        hopper=f"TileKbit<{{T}}, {k}, {ABSMAX[absmax].kernel}>" if k <= 5 else "",
        bits=k,
        block=BLOCK,
        granule=BLOCK,
        scale_bytes=np.dtype(ABSMAX[absmax].dtype).itemsize,
        entries=1 << k if k >= 5 else 256,
        gaps=k in (3, 4),
        hopper_entries={3: 64, 5: 32}.get(k, 256),
        owned=True,
        copied=True,
        swizzled=False,
        items=few,
        grouped_items=few,
        wide=absmax != "float32" and k <= 5,
        targeted=k == 4 and absmax == "e4m4",
        codes="packed",
        scales="absmax",
        tensor_scale="scale",
        values="codebook",
        known_values=known,
        single=k <= 5,
        in_two_parts=k > 5,
    )
    if codebook is not None or k > 3:
        return found
    # Standard codebooks of 4 and 8 values are symmetric: what rounding does to one value, that of its negative undoes.
    return dataclasses.replace(
        found,
        small_batch=f"Kbit<{{T}}, {k}, {ABSMAX[absmax].kernel}, true>",
        hopper="",
        gaps=False,
        single=False,
        in_two_parts=True,
        one_token=found,
    )


def _all_fragments() -> tuple[Fragments, ...]:
    own = [_fragments(k, absmax, None) for k in range(2, 9) for absmax in ABSMAX]
    return (*own, *(fragments.one_token for fragments in own if fragments.one_token is not None))


class KBit(Format):
    """K-bit codebook indices in bit planes, one scale for 32 elements.

    Parameters
    ----------
    k : int
        Bits of an index, 1 to 8.
    codebook : {"bnf", "nf", "custom"}
        The values an index stands for: Lloyd-Max levels of normal blocks (``"bnf"``), normal quantiles (``"nf"``,
        default of the source), or those that each call of `quantize` brings: any 2^k numbers, in any order. A NumPy
        array or a sequence is checked to be finite; a CuPy array is never read back: what is not finite is never
        nearest.
    absmax : {"e4m4", "float16", "float32"}, optional
        Storage of the block scales; ``"e4m4"`` for k up to 7, ``"float16"`` for k = 8.

    Examples
    --------
    >>> from kbitcupy.formats.codebook.kbit import KBit
    >>> KBit(3, absmax="float16")
    get_format('kbit3:absmax=float16')
    """

    family = "kbit"
    block = BLOCK
    origin = "bitsandbytes pull request 1858"
    summary = "codebook indices in bit planes, one scale for 32 elements"
    takes = ("codebook",)
    kernels = (cuda.QUANTIZE, cuda.QUANTIZE_UNORDERED, cuda.DEQUANTIZE, *cuda.KBIT_BLOCKS, *cuda.CODES)
    all_fragments = _all_fragments()
    tensor_scale = "scale"

    def __init__(self, k: int, *, codebook: str = "bnf", absmax: str | None = None):
        self.bits: int = check_k(k)
        self.name = f"kbit{self.bits}"
        if absmax is None:
            absmax = "e4m4" if self.bits < 8 else "float16"
        if not isinstance(absmax, str) or absmax not in ABSMAX:
            raise FormatError(f"absmax is {absmax!r}; allowed are {', '.join(map(repr, ABSMAX))}")
        self.absmax = absmax
        self.codebook = check_codebook_name(codebook, f"an array of {1 << self.bits} numbers")
        self._table = None if codebook == "custom" else tables.standard_codebook(codebook, self.bits)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        return {}, {"codebook": "nf"}, {"codebook": "custom"}, {"absmax": "float16"}, {"absmax": "float32"}

    def check_given(self, given: Mapping[str, Any]) -> None:
        check_host_codebook(given.get("codebook"), 1 << self.bits)

    def options(self) -> dict[str, Any]:
        return {"codebook": self.codebook, "absmax": self.absmax}

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks = -(-math.prod(shape) // BLOCK)
        planes = {
            "packed": Plane("uint32", (blocks * self.bits,), per=self.bits),
            "absmax": Plane(ABSMAX[self.absmax].dtype, (blocks,)),
            "scale": Plane("float32", (1,), "tensor"),
        }
        if self.codebook == "custom":
            planes["codebook"] = Plane("float32", (1 << self.bits,), "constant")
        return planes

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        host.quantize_kbit(x, planes, self.bits, self.absmax, self._host_table(given, x), given.get("left"))

    def part_numpy(self, x: np.ndarray, planes: Mapping[str, Any]) -> Any:
        return (np.float32(0), False) if self.absmax == "float32" else host.leave_absmax(x, planes, self.bits)

    def whole_numpy(self, found: list[Any], dtype: np.dtype, planes: Mapping[str, Any]) -> dict[str, Any]:
        largest, finite = zip(*found, strict=True)
        return {"left": (max(largest), all(finite))}

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        table, values = self._codebook(given, x)
        cuda.quantize_kbit(x, planes, self.bits, self.absmax, table, values)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        host.decode_blocks(planes["packed"], planes["absmax"], planes["scale"], self._values(planes), self.bits, out)

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        cuda.dequantize_kbit(planes, out, self.bits, self.absmax, self._table)

    @functools.cached_property
    def decoder(self) -> Decoder:
        return cuda.kbit_decoder(self.bits, self.absmax, self._table)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        absmax = block_absmax(x.reshape(-1), BLOCK).astype(np.float64)
        values, stored = self._values(planes), ABSMAX[self.absmax]
        scale = planes["scale"].astype(np.float64)
        scale_error = np.maximum(stored.relative_error * absmax, stored.absolute_error * scale)
        return Codebook(values).edge * absmax + tables.reach(values) * np.minimum(scale_error, absmax)

    def magnitude(self) -> Magnitude | None:
        if self.absmax != "float32":  # the others have a tensor scale
            return None
        if self._table is None:
            return Magnitude("absmax", values="codebook")
        return Magnitude("absmax", largest=float(np.abs(self._table.values).max()))

    def fragments(self, ndim: int = 2) -> Fragments | None:
        if self.bits < 2:
            return None
        return _fragments(self.bits, self.absmax, None if self.codebook == "custom" else self.codebook)

    def _values(self, planes: Mapping[str, Any]) -> np.ndarray:
        """The codebook that NumPy planes are decoded with."""
        return planes["codebook"] if self._table is None else self._table.values

    def _codebook(self, given: Mapping[str, Any], x: Any) -> tuple[Codebook | None, Any]:
        """The codebook as the host knows it, else as an array on the device (else 0)."""
        return given_codebook(given.get("codebook"), self.bits, x) if self._table is None else (self._table, 0)

    def _host_table(self, given: Mapping[str, Any], x: np.ndarray) -> Codebook:
        table, _ = self._codebook(given, x)
        assert table is not None  # beside NumPy's arrays it is
        return table


# ---- the flat functions of the pull request ------------------------------------------------------------------------


def quantize_flat(x: Any, planes: Mapping[str, Any], k: int, absmax: str, table: Codebook | None, values: Any) -> None:
    """The pull request's rule: search with the float32 absmax; buffers with its padding."""
    if isinstance(x, np.ndarray):
        assert table is not None
        host.encode_blocks(x.reshape(-1), planes, k, table, absmax, None, None)
    else:
        cuda.quantize_kbit(x, planes, k, absmax, table, values, flat=True)


def dequantize_flat(planes: Mapping[str, Any], out: Any, k: int, absmax: str, table: Codebook | None) -> None:
    """Decode buffers that have no tensor scale, by `table` or by the plane ``codebook`` where it is None."""
    if isinstance(out, np.ndarray):
        values = planes["codebook"] if table is None else table.values
        host.decode_blocks(planes["packed"], planes["absmax"], None, values, k, out)
    else:
        cuda.dequantize_kbit(planes, out, k, absmax, table)


for _k in range(1, 9):
    register(f"kbit{_k}", functools.partial(KBit, _k))
