"""Kernels that multiply few tokens by compressed weights, for any GPU (kernels/linear/).

``linear_one`` takes one token, ``linear_few`` up to 32 and mixtures of experts. Here stands what they can take, how
their work is cut, and how they are launched.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import tables
from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import CXX_TYPES, IDS_CXX, Template
from ..backend.launch import Kernel, capability, multiprocessors, shared_memory
from ..formats.base import Format, register_templates
from ..formats.codebook.kbit import ABSMAX, BLOCK, KBit
from ..formats.codebook.table4 import Table4

# As in kernels/linear/decoder.cuh and pipeline.cuh.
ITEM_K, _ITEM_ROWS, TOKENS = 128, 16, 8
TABLE_AT, _HEAD, _FEW_HEAD = 2048, 1024, 2048
_MOST_K = 128 * ITEM_K  # elements of x in the gaps of a table
# Counted in the 48 KiB of shared memory that every kernel has.
MAX_EXPERTS = 12000


@dataclass(frozen=True)
class Decoder:
    """How a kernel reads the weights of a format.

    Parameters
    ----------
    expression : str
        The C++ type; ``{T}`` stands for the type of x.
    granule : int
        k must be a multiple of it: the elements of a row that have to lie in one block.
    entries : int
        Of the table of values.
    gaps : bool
        Whether the table has gaps, where the sums find room.
    item_bytes, scale_bytes : int
        As there.
    items, grouped_items : int
        Most items of a warp of ``linear_few``, and of its grouped flavour: there are registers for them.
    wide : bool
        Whether a thread block of ``linear_few`` may take 16 tokens: there are registers for it.
    swizzled : bool
        Whether ``TURNS`` is not 1.
    copied : bool
        Whether the scales are used as they are stored; otherwise they are spread, one for each granule.
    block : int
        Elements of a block.
    """

    expression: str
    granule: int
    entries: int
    gaps: bool
    item_bytes: int
    scale_bytes: int
    items: int
    grouped_items: int
    wide: bool
    swizzled: bool
    copied: bool
    block: int

    def shared_bytes(self, eights: int, items: int, warps: int) -> int:
        """Shared memory of a thread block of ``linear_few``."""
        stages = warps * items * _ITEM_ROWS * (self.item_bytes + 2 * self.scale_bytes)
        slots = 2 if eights == 2 else 4
        sums = 0 if self.gaps else slots * warps * _ITEM_ROWS * TOKENS * eights * 4
        return self._table_bytes - _HEAD + _FEW_HEAD + sums + stages

    def shared_bytes_one(self, k: int, run: int, items: int, warps: int) -> int:
        """... of ``linear_one``."""
        slots = warps * items * _ITEM_ROWS * (self.item_bytes + self.scale_bytes)
        return self._table_bytes + (0 if self.gaps else k * 2) + slots + (run + warps) * _ITEM_ROWS * 4

    @property
    def _table_bytes(self) -> int:
        """Shared memory up to the end of the table of values and of what stands behind it."""
        return TABLE_AT + self.entries * 256 + _HEAD


def _kbit_decoder(k: int, absmax: str) -> Decoder:
    return Decoder(
        f"Kbit<{{T}}, {k}, {ABSMAX[absmax].kernel}>",
        granule=BLOCK,
        entries=32 if k == 5 else 256,
        gaps=k in (3, 4),
        item_bytes=ITEM_K * k // 8,
        scale_bytes=ITEM_K // BLOCK * np.dtype(ABSMAX[absmax].dtype).itemsize,
        items=2 if k == 5 or absmax == "float32" else 4,
        grouped_items=2 if k == 5 or absmax == "float32" else 4,
        wide=absmax != "float32",
        swizzled=False,
        copied=True,
        block=BLOCK,
    )


def _table4_decoder(block: int, double_quant: bool) -> Decoder:
    granule = min(block, 64)
    return Decoder(
        f"Table4<{{T}}, {granule}>",
        granule=granule,
        entries=256,
        gaps=True,
        item_bytes=ITEM_K // 2,
        scale_bytes=ITEM_K // granule * 4,
        items=4 if granule == 64 else 2,
        grouped_items=2,
        wide=granule == 64,
        swizzled=True,
        copied=block == granule and not double_quant,
        block=block,
    )


def decoder_of(format: Format) -> Decoder | None:
    """The decoder of a format; None where products go through decoded weights."""
    if isinstance(format, KBit):
        return _kbit_decoder(format.bits, format.absmax) if 2 <= format.bits <= 5 else None
    return _table4_decoder(format.block, format.double_quant) if isinstance(format, Table4) else None


def _decoders() -> list[Decoder]:
    """All there are, for the compile check."""
    kbit = [_kbit_decoder(k, absmax) for k in (2, 3, 4, 5) for absmax in ABSMAX]
    return kbit + [_table4_decoder(*options) for options in ((64, False), (32, False), (16, False), (64, True))]


HALF_CXX = (CXX_TYPES["float16"], CXX_TYPES["bfloat16"])


def few_room(decoder: Decoder, eights: int, room: int, even: bool, grouped: bool = False) -> tuple[int, int]:
    """``ITEMS`` and warps of ``linear_few``, as many as the shared memory allows; no warps where it does not at all.

    Parameters
    ----------
    decoder : Decoder
        How a weight is read.
    eights : int
        Tokens of a thread block, in eights.
    room : int
        Bytes of shared memory that a thread block can have.
    even : bool
        Whether tiles are whole, and rows whole items that begin at multiples of 16 bytes.
    grouped : bool
        Whether it is the flavour for experts.
    """
    most = decoder.grouped_items if grouped else decoder.items
    for warps, items in itertools.product((16, 8), (4, 2) if even else (1,)):
        if eights * items <= 4 and items <= most and decoder.shared_bytes(eights, items, warps) <= room:
            return items, warps
    return 1, 0


def one_room(decoder: Decoder, k: int, run: int, room: int) -> tuple[int, int]:
    """``ITEMS`` and ``WARPS`` of ``linear_one``; no warps where none of them fit.

    Parameters
    ----------
    decoder : Decoder
        How a weight is read.
    k : int
        Elements of a row.
    run : int
        Tiles of a thread block.
    room : int
        Bytes of shared memory that a thread block can have.
    """
    # Fewer warps get the first of their weights earlier, which matters where they have few.
    for warps, items in itertools.product((12, 16, 8) if run * k <= _LITTLE else (16, 8), (4, 2)):
        if k % (items * ITEM_K) or (decoder.gaps and k > _MOST_K):
            continue
        if decoder.shared_bytes_one(k, run, items, warps) <= room:
            return items, warps
    return 2, 0


# Few: elements of k, times the tiles of a thread block.
_LITTLE = 96 * ITEM_K


def _instances(eights: int, grouped: bool, even: bool, flow: int, cluster: int) -> tuple[str, ...]:
    """Those that a device with the 227 KiB of shared memory of an H100 takes."""
    found = {
        _few_arguments(
            decoder, T, eights, few_room(decoder, eights, 227 << 10, even, grouped)[0], grouped, flow, cluster
        ): None
        for decoder in (*_decoders(), _table4_decoder(32, True), _table4_decoder(16, True))
        for T in HALF_CXX
        if (eights == 1 or decoder.wide) and flow in (_IN_CHUNKS, _flow_at_once(decoder))
    }
    return tuple(found)


def _one_instances(hot: bool) -> tuple[str, ...]:
    """... of ``linear_one``: whatever `one_room` may choose; with four items and most warps where `hot`."""
    return tuple(
        f"{decoder.expression.format(T=T)}, {items}, {warps}"
        for decoder in _decoders()
        if decoder.copied
        for items, warps in itertools.product((4, 2), (16, 12, 8))
        if (items == 4 and warps > 8) == hot
        for T in HALF_CXX
    )


def _few_arguments(
    decoder: Decoder, T: str, eights: int, items: int, grouped: bool, flow: int, cluster: int = 1
) -> str:
    return f"{decoder.expression.format(T=T)}, {eights}, {items}, {grouped:d}, {flow}, {cluster}"


# Thread blocks of a cluster, where there are any: multiprocessors come in pairs, so that all of them find a place.
_CLUSTER = 2
# Bytes that the L2 cache fetches together: rows of a box are shorter than 256, and what stands beside them another warp
# fetches a little later.
PROMOTION = 128
# ``Flow``, the size of ``struct Cut`` and the gap between the halves of x, of kernels/linear/small_batch.cu.
_IN_CHUNKS, _AT_ONCE, _AT_ONCE_SPREAD = range(3)
_CUT_BYTES = 40
_X_GAP = 256


def _reciprocal(divisor: int) -> int:
    """By which a kernel divides numbers below 2^32 / divisor: ``divided`` of kernels/linear/pipeline.cuh."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


def _flow_at_once(decoder: Decoder) -> int:
    return _AT_ONCE if decoder.copied else _AT_ONCE_SPREAD


def _few_template(*options: Any, hot: bool = True) -> Template:
    return Template("linear/small_batch.cu", "linear_few", (_instances(*options),), hot=hot)


TEMPLATES = (
    _few_template(1, False, True, _AT_ONCE, _CLUSTER),
    _few_template(1, True, True, _AT_ONCE, 1),
    _few_template(1, False, True, _AT_ONCE, 1),
    *(
        _few_template(*options, hot=False)
        for options in (
            (1, False, True, _AT_ONCE_SPREAD, _CLUSTER),
            (1, False, True, _AT_ONCE_SPREAD, 1),
            (1, True, True, _AT_ONCE_SPREAD, 1),
            (2, False, True, _AT_ONCE, 1),
            (2, False, True, _AT_ONCE_SPREAD, 1),
            (1, True, True, _IN_CHUNKS, 1),
            (1, False, False, _IN_CHUNKS, 1),
            (2, False, False, _IN_CHUNKS, 1),
            (1, True, False, _IN_CHUNKS, 1),
        )
    ),
    Template("linear/single_token.cu", "linear_one", (_one_instances(True),)),
    Template("linear/single_token.cu", "linear_one", (_one_instances(False),), hot=False),
    Template("linear/small_batch.cu", "add_partials", (HALF_CXX,), hot=False),
    Template("linear/experts.cu", "combine_slots", (HALF_CXX,), hot=False),
    Template("linear/experts.cu", "group_tokens", (tuple(IDS_CXX.values()),), hot=False),
)
register_templates(*TEMPLATES)
_BY_NAME = {template.name: template for template in reversed(TEMPLATES)}


@dataclass(frozen=True)
class Cut:
    """How the work of ``linear_few`` is cut: ``struct Cut`` of kernels/linear/small_batch.cu, and the grid.

    Parameters
    ----------
    run, warps, items, share
        As there.
    grid : tuple of int
        Thread blocks along n and along k.
    cluster : int
        Thread blocks of a cluster; those along k, or 1.
    """

    run: int
    warps: int
    items: int
    share: int
    grid: tuple[int, int]
    cluster: int = 1


@functools.lru_cache(maxsize=1024)
def cut_few(
    n: int,
    k: int,
    most: int,
    warps: int,
    resident: int,
    splits: int = 8,
    once: bool = False,
    clusters: tuple[int, int] = (1, 0),
) -> Cut | None:
    """The cut with the least work for the busiest warp.

    Parameters
    ----------
    n, k : int
        Shape of the weight.
    most : int
        Items of k that a warp can have at a time, ``ITEMS`` of the kernel.
    warps : int
        Warps of a thread block.
    resident : int
        Thread blocks that the device holds.
    splits : int
        Thread blocks that may share k.
    once : bool
        Whether all of k has to go through at once; a warp then has `most` items or half of them.
    clusters : tuple of int
        Thread blocks of a cluster, and how many clusters the device holds.

    Returns
    -------
    Cut or None
        None where k is too long for that.
    """
    rows, total = -(-n // _ITEM_ROWS), -(-k // ITEM_K)
    best: tuple[float, Cut] | None = None
    choices = [(split, resident // split, 1) for split in range(1, 1 + min(splits, total))]
    if clusters[1] and total >= clusters[0]:
        choices.append((clusters[0], clusters[1], clusters[0]))
    for (split, blocks, cluster), teams in itertools.product(choices, range(warps, 0, -1)):
        share, team = -(-total // split), warps // teams
        chunks = -(-share // (team * most))
        if once and chunks > 1:
            continue
        items = -(-share // (team * chunks))
        items = -(-items // (most // 2)) * (most // 2) if once else items
        run = -(-rows // max(1, blocks))
        passes = -(-run // teams)
        # Beside the items of a warp, in their unit: x, once or in each pass; sums; the launch that adds up the splits.
        work = passes * (chunks * items * (1 + 0.4 * (chunks > 1)) + 0.5) + share / 32
        work += (4 + 0.2 * split) * (split > cluster)
        if best is None or work < best[0]:
            team = -(-share // (items * chunks)) if once else team
            along = cluster if cluster > 1 else -(-total // share)
            best = work, Cut(run, team, items, share, (-(-rows // run), along), cluster)
    return best and best[1]


# ``struct Values`` of kernels/linear/decoder.cuh.
_VALUES = np.dtype([("power", "f4"), ("value", "f4", 32), ("map", "f4", 256)])
VALUES_BYTES = _VALUES.itemsize


@functools.lru_cache(maxsize=256)
def _values_of(format: Format, dtype: np.dtype) -> bytes:
    """What a kernel knows of a format by value; planes with values of their own come first."""
    struct = np.zeros((), _VALUES)
    values = known_values(format)
    if values is not None:
        struct["power"] = _power_below(values) * np.float32(gentle_factor(values, dtype))
        struct["value"][: values.size] = values * struct["power"]
    if isinstance(format, Table4) and format.double_quant:
        struct["map"] = tables.dynamic_map()
    return struct.tobytes()


def known_values(format: Format) -> Any:
    """The values that the indices of a format stand for, float32; None where a plane holds them."""
    if isinstance(format, KBit):
        return None if format.codebook == "custom" else tables.standard_codebook(format.codebook, format.bits).values
    if isinstance(format, Table4) and format.table_name != "custom":
        return format.values({})
    return None


def gentle_factor(values: np.ndarray, dtype: np.dtype) -> float:
    """A factor from 1 to 2 with which `values` lose least when they are rounded to `dtype`.

    The rounding of a table is the same for every weight of an index, so it is worth some choice; the products are
    divided by the factor in fp32.
    """
    factors = np.float32(1) + np.arange(1024, dtype=np.float32) / np.float32(1024)
    scaled = np.asarray(values, np.float32)[None, :] * _power_below(values) * factors[:, None]
    lost = (scaled.astype(dtype).astype(np.float64) - scaled) / factors[:, None]
    return float(factors[np.square(lost).sum(1).argmin()])


def _power_below(values: np.ndarray) -> np.float32:
    """The power of two that brings the largest magnitude to 1 .. 2: then the range of half precision is enough."""
    return np.float32(np.ldexp(np.float32(1), 1 - np.frexp(np.abs(values).max())[1]))


class Experts(NamedTuple):
    """What a mixture of experts adds to the arguments of a kernel.

    Parameters
    ----------
    groups, order : int
        Addresses of what ``group_tokens`` writes.
    divisor : int
        Product number p is that of row p / divisor of x.
    step : int
        Tensor scales of an expert: 1, or 0 where they share one.
    """

    groups: int
    order: int
    divisor: int
    step: int


NO_EXPERTS = Experts(0, 0, 1, 0)
#: Sizes of what `Fused.arguments` returns.
SIZES = (*(8,) * 10, *(4,) * 7)


class Weight(NamedTuple):
    """What a kernel says of a weight in every launch.

    Parameters
    ----------
    fits : bool
        Whether its planes start where the kernel can read them.
    packed : int
        Address of that plane.
    planes : tuple of int
        Addresses of the others; 0 for one that is not there.
    map : bytes
        The tensor map of the packed plane.
    """

    fits: bool
    packed: int
    planes: tuple[int, ...]
    map: bytes


class Fused:
    """What the kernels have in common that multiply compressed weights.

    Parameters
    ----------
    format : Format
        Of the weight.
    shape : tuple of int
        Its N and K.
    dtype : numpy.dtype
        Of x.
    block : int
        Elements of a block.
    """

    _launch: Callable[..., None]
    #: Finds out what the kernel says of a weight; the same object for all kernels that say the same.
    _look: Callable[[Mapping[str, Any]], Weight]

    def __init__(self, format: Format, shape: tuple[int, int], dtype: np.dtype, block: int):
        self._n, self._k, self._block = *shape, block
        self._cxx = CXX_TYPES[dtype.name]
        self._values = _values_of(format, dtype)

    def weight(self, q: QuantizedArray) -> Weight:
        """What the kernel says of a weight, which is found out once.

        Kernels for other numbers of tokens look at it in the same way: so a weight keeps few entries.
        """
        found: Weight | None = q._launches.get(self._look)
        if found is None:
            found = q._launches[self._look] = self._look(q.planes)
        return found

    def takes(self, x: Any, q: QuantizedArray) -> bool:
        """Whether the arrays start where the kernel can read them."""
        return not x.data.ptr % 16 and self.weight(q).fits

    def arguments(
        self, weight: Weight, bias: Any, kind: int, out: Any, partial: int, experts: Experts, tokens: int
    ) -> tuple[int, ...]:
        """Those that the kernels have in common, from the scales on."""
        groups, order, divisor, step = experts
        return (
            *weight.planes,
            bias,
            out.data.ptr,
            partial,
            groups,
            order,
            divisor,
            step,
            kind,
            tokens,
            self._n,
            self._k,
            self._block,
        )

    def grouped(self, x: Any, q: QuantizedArray, ids: Any, experts: int, weights: Any, out: Any) -> None:
        """`linear_grouped`: sort by expert, multiply, combine."""
        products, slots = ids.size, ids.shape[1]
        room = products // TOKENS + min(products, experts + 1)
        lists = 4 * room + products
        # One array for all: groups, order, and the products that are combined.
        scratch = _xp.namespace(x).empty(lists + (0 if weights is None else products * self._n), np.int32)
        groups = scratch.data.ptr
        order = groups + 16 * room
        partial = 0 if weights is None else groups + 4 * lists
        _group_tokens(ids.dtype, experts).launch(x, (1,), (ids.data.ptr, order, groups, products, experts, room))
        step = int("scale" in q.planes and q.planes["scale"].size > 1)
        chosen = Experts(groups, order, slots if x.ndim == 2 else 1, step)
        self._launch(room, x, q, None, out, partial, products, chosen)
        if weights is not None:
            pointers = partial, weights.data.ptr, out.data.ptr
            _combine_slots(self._cxx).launch(x, (-(-out.size // 256),), (*pointers, out.size, slots, self._n))


class Few(Fused):
    """``linear_few`` for one format, shape and dtype, and how many tokens share a thread block."""

    def __init__(
        self,
        format: Format,
        decoder: Decoder,
        shape: tuple[int, int],
        dtype: np.dtype,
        device: int,
        *,
        eights: int = 1,
        together: int = 1,
        grouped: bool = False,
    ):
        super().__init__(format, shape, dtype, decoder.block)
        n, k = shape
        room = shared_memory(device)
        whole = n % _ITEM_ROWS == 0 and k % ITEM_K == 0 and _copies(device)
        # Thread blocks with the same weights and other tokens run `together`, so that they share what they read.
        resident = max(1, multiprocessors(device) // together)
        cut = None
        for even, flow in ((True, _flow_at_once(decoder)), (True, _IN_CHUNKS), (False, _IN_CHUNKS)):
            items, warps = few_room(decoder, eights, room, even, grouped)
            if even and not (whole and warps and (flow != _IN_CHUNKS or grouped)):
                continue
            clusters = _clusters(device, together) if flow != _IN_CHUNKS and eights == 1 and not grouped else (1, 0)
            cut = cut_few(n, k, items, max(1, warps), resident, 1 if grouped else 8, flow != _IN_CHUNKS, clusters)
            if cut:
                break
        assert cut is not None  # the last one takes anything
        self.fits = warps > 0
        self.tokens, self.clustered = TOKENS * eights, cut.cluster > 1
        arguments = _few_arguments(decoder, self._cxx, eights, items, grouped, flow, cut.cluster)
        shared = decoder.shared_bytes(eights, items, warps)
        # By way of shared memory whole lines of x are read, and once.
        stage = cut.warps * cut.items * ITEM_K * TOKENS * 2 + _X_GAP
        self.staged = flow != _IN_CHUNKS and eights == 1 and shared + stage <= room
        shared += stage * self.staged
        sizes = 8, 8, *SIZES, _CUT_BYTES, VALUES_BYTES, 128, 128
        self._kernel = _kernel("linear_few", arguments, 32 * warps, shared, sizes)
        self.grid, self._splits = cut.grid, cut.grid[1] // cut.cluster
        box = 2 if items == 4 and 2 * decoder.item_bytes == 128 else 1
        self._map_of_x = functools.partial(_map_of_x, k) if self.staged and self.clustered else _no_map
        pitches = [k * size // ITEM_K for size in (decoder.item_bytes, decoder.scale_bytes)]
        wide = even or pitches[0] % 16 == 0
        width = 0
        if decoder.copied:
            width = min(16, decoder.scale_bytes) if even else 4 if pitches[1] % 4 == decoder.scale_bytes % 4 == 0 else 1
        codes = ITEM_K // decoder.granule if flow == _AT_ONCE_SPREAD else 1  # of an item, read at once
        self._look = look(16 if wide else 4, max(codes, width), decoder, k, device, box if even else 0)
        teams = warps // cut.warps
        numbers = cut.run, cut.warps, teams, cut.items, cut.share, width, wide, self.staged
        self._cut = np.array((*numbers, _reciprocal(cut.warps), _reciprocal(teams)), np.uint32).tobytes()

    def __call__(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], each row from that of x."""
        tokens, splits = out.size // self._n, self._splits
        partial = None if splits == 1 else _xp.namespace(x).empty(splits * out.size, np.float32)
        to = 0 if partial is None else partial.data.ptr
        self._launch(-(-tokens // self.tokens), x, q, bias, out, to, tokens)
        if partial is not None:
            bias, address, kind = bias_argument(bias, x.dtype)
            pointers = to, address, out.data.ptr
            _add_partials(self._cxx).launch(x, (-(-out.size // 256),), (*pointers, out.size, splits, kind, self._n))

    def _launch(
        self,
        blocks: int,
        x: Any,
        q: QuantizedArray,
        bias: Any,
        out: Any,
        partial: int,
        tokens: int,
        experts: Experts = NO_EXPERTS,
    ) -> None:
        bias, address, kind = bias_argument(bias, x.dtype)
        weight = self.weight(q)
        arguments = self.arguments(weight, address, kind, out, partial, experts, tokens)
        self._kernel.launch(
            x,
            (blocks, *self.grid),
            (x.data.ptr, weight.packed, *arguments, self._cut, self._values, weight.map, self._map_of_x(x)),
        )


class One(Fused):
    """``linear_one`` for one format whose scales are used as they are stored, shape and dtype."""

    def __init__(self, format: Format, decoder: Decoder, shape: tuple[int, int], dtype: np.dtype, device: int):
        super().__init__(format, shape, dtype, decoder.block)
        n, k = shape
        self.run = max(1, -(-n // _ITEM_ROWS // multiprocessors(device)))
        items, warps = one_room(decoder, k, self.run, shared_memory(device))
        self.fits = decoder.copied and n % _ITEM_ROWS == 0 and warps > 0 and _copies(device)
        if not self.fits:
            return
        # All multiprocessors have some of them, `run` or one less.
        self._blocks = min(n // _ITEM_ROWS, multiprocessors(device))
        arguments = f"{decoder.expression.format(T=self._cxx)}, {items}, {warps}"
        shared = decoder.shared_bytes_one(k, self.run, items, warps)
        sizes = (*(8,) * 7, *(4,) * 4, VALUES_BYTES, 128)
        self._kernel = _kernel("linear_one", arguments, 32 * warps, shared, sizes)
        self._numbers = n, k, self.run
        box = 2 if decoder.item_bytes > 48 else items
        self._look = look(16, min(16, items * decoder.scale_bytes), decoder, k, device, box)

    def __call__(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], which has one row."""
        bias, address, kind = bias_argument(bias, x.dtype)
        weight = self.weight(q)
        absmax, _, _, scale, values = weight.planes
        self._kernel.launch(
            x,
            (self._blocks,),
            (
                x.data.ptr,
                weight.packed,
                absmax,
                scale,
                values,
                address,
                out.data.ptr,
                kind,
                *self._numbers,
                self._values,
                weight.map,
            ),
        )


def _clusters(device: int, together: int) -> tuple[int, int]:
    """Thread blocks of a cluster, and how many clusters a device holds at least."""
    if not 90 <= capability(device) < 120:
        return 1, 0
    return _CLUSTER, max(1, multiprocessors(device) // _CLUSTER // together)


def _copies(device: int) -> bool:
    """Whether there is what copies whole tiles: Hopper's bulk copy engine, or asynchronous copies before it."""
    return capability(device) < 90 or _tma.available()


def _map_of_weights(decoder: Decoder, k: int, device: int, planes: Mapping[str, Any], box: int = 1) -> bytes:
    """The tensor map of the packed plane: boxes of 16 rows and `box` items."""
    if capability(device) < 90:
        return _no_map(planes)
    packed, pitch = planes["packed"], k // ITEM_K * decoder.item_bytes
    rows = packed.nbytes // pitch
    swizzled = box * decoder.item_bytes == 128 or (box == 1 and decoder.swizzled)
    return _tma.byte_matrix(
        packed.data.ptr, rows, pitch, pitch, _ITEM_ROWS, box * decoder.item_bytes, swizzled, PROMOTION
    )


def _map_of_x(k: int, x: Any) -> bytes:
    """The tensor map of x: boxes of 8 tokens and 64 elements."""
    return _tma.byte_matrix(x.data.ptr, x.size // k, 2 * k, 2 * k, TOKENS, _tma.BOX_BYTES, True, PROMOTION)


def _no_map(_: Any) -> bytes:
    """An argument in the place of a tensor map where there is no use for one."""
    return bytes(128)


@functools.cache
def look(
    packed: int, absmax: int, decoder: Decoder, k: int, device: int, box: int
) -> Callable[[Mapping[str, Any]], Weight]:
    """`look_at` for ``linear_few`` and ``linear_one``; without boxes, a `box` of 0, there is no tensor map."""
    map = functools.partial(_map_of_weights, decoder, k, device, box=box) if box else _no_map
    return functools.partial(look_at, packed=packed, absmax=absmax, map=map)


def look_at(planes: Mapping[str, Any], packed: int, absmax: int, map: Callable[[Mapping[str, Any]], bytes]) -> Weight:
    """What a kernel says of a weight, of which two planes must start at multiples of `packed` and `absmax` bytes."""
    found = []
    for name in ("absmax", "nested_absmax", "nested_offset", "scale", "codebook"):
        plane = planes.get(name)
        found.append(0 if plane is None else plane.data.ptr)
    if "table" in planes:
        found[-1] = planes["table"].data.ptr
    address = planes["packed"].data.ptr
    fits = not (address % packed or found[0] % absmax)
    return Weight(fits, address, tuple(found), map(planes) if fits else b"")


def bias_argument(bias: Any, dtype: np.dtype) -> tuple[Any, int, int]:
    """A bias as the kernels take it, which must outlive the launch, its address, and its kind."""
    if bias is None:
        return None, 0, _NO_BIAS
    if bias.dtype != dtype and bias.dtype != np.float32:
        bias = bias.astype(np.float32)
    bias = bias if bias.flags.c_contiguous else bias.copy()
    return bias, bias.data.ptr, _OWN_BIAS if bias.dtype == dtype else _FLOAT_BIAS


_NO_BIAS, _OWN_BIAS, _FLOAT_BIAS = range(3)


@functools.cache
def _group_tokens(ids: np.dtype, experts: int) -> Kernel:
    return _kernel("group_tokens", IDS_CXX[ids.name], 1024, 4 * (experts + 1), (*(8,) * 3, *(4,) * 3))


@functools.cache
def _combine_slots(cxx: str) -> Kernel:
    return _kernel("combine_slots", cxx, 256, 0, (*(8,) * 4, *(4,) * 2))


@functools.cache
def _add_partials(cxx: str) -> Kernel:
    return _kernel("add_partials", cxx, 256, 0, (*(8,) * 4, *(4,) * 3))


@functools.cache
def _kernel(name: str, values: str, threads: int, shared: int, sizes: tuple[int, ...]) -> Kernel:
    return Kernel(_BY_NAME[name], (values,), threads, shared, signature=sizes, early=True)


def fits(format: Format, shape: tuple[int, int], dtype: np.dtype, device: int) -> tuple[Decoder | None, str]:
    """The decoder, or None and what stands against a fused kernel."""
    decoder = decoder_of(format)
    if decoder is None:
        return None, f"{format} has no decoder"
    if dtype.itemsize != 2:
        return None, f"x is {dtype}, the tensor cores take float16 and bfloat16"
    if capability(device) < 80:
        return None, "the fused kernel needs compute capability 8.0"
    n, k = shape
    if k % decoder.granule or not k:
        return None, f"rows of {k} elements are not whole blocks of {decoder.granule}"
    if n * k >= 1 << 33:
        return None, "the kernel's offsets of 32 bits do not reach through the weight"
    return decoder, ""
