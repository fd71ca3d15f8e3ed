"""Routes for few tokens: weights are decoded in registers and never written (kernels/linear/), on any GPU.

``linear_one`` takes one token, ``linear_few`` up to 32 and mixtures of experts. Here stands what they can take, how
their work is cut, and how they are launched.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import CXX_TYPES, Template, cxx_type
from ..backend.launch import Kernel, Struct, Type
from ..backend.structs import Constants
from ..formats.base import Fragments, all_fragments, register_templates
from .fused import (
    DECLARED,
    HALF_CXX,
    ITEM_K,
    ITEM_ROWS,
    NO_EXPERTS,
    NUMBERS,
    PROMOTION,
    SIZES,
    TOKENS,
    VALUES,
    Binder,
    Decoder,
    Experts,
    Fused,
    Grouping,
    Multiply,
    arguments_of,
    bias_argument,
    bind,
    kind_of,
    no_map,
    refusal,
    rounded_note,
    values_between,
)
from .routes import Device, Problem, Product, Route, refused_by_all

#: What ``linear_few`` is told of its `Cut`: run, warps, items and share; teams of a thread block; the bytes of scales
#: that are copied at a time, 0 where they are spread; whether weights are copied in pieces of 16 bytes, and whether x
#: comes by way of shared memory; the numbers by which it divides by warps and teams.
CUT = Struct(
    "Cut",
    run="i4",
    warps="i4",
    teams="i4",
    items="i4",
    share="i4",
    width="i4",
    wide="i4",
    staged="i4",
    per_warps="u4",
    per_teams="u4",
)
#: The gap between the halves of x in shared memory; tiles whose inner scales the warps of a team hand out ahead, and
#: the same where they keep them until they are multiplied by.
_GAP = Constants(X_GAP=256, HANDED_OUT=2, MADE_OUT=4)
#: Elements of a token that share a scale where tokens are integers.
TOKEN_BLOCK = 32
#: What becomes of a decoder (kernels/linear/decoder.cuh): tokens are integers with scales of 32, or the kernel
#: quantizes up to four, and each is the sum of two halves; or of one token parts have columns of an mma, of floats or,
#: where the kernel quantizes it, of integers.
PLAIN, BLOCKED, IN_HALVES, COLUMNS = "{}", "Blocked<{}>", "InHalves<{}>", "Columns<{}>"
INTEGER_COLUMNS = "IntegerColumns<{}>"
# Bytes of the powers of two of such tokens: POWERS of kernels/linear/few_block.cuh.
_POWERS = TOKENS * 16 * 4
_DECLARED = (*DECLARED, _GAP, CUT, NUMBERS)


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
    most = decoder.fragments.grouped_items if grouped else decoder.fragments.items
    sizes = (8,) if two_at_once(decoder, grouped) else (16, 8)
    for warps, items in itertools.product(sizes, (4, 2) if even else (1,)):
        if eights * items <= 4 and items <= most and decoder.shared_bytes(eights, items, warps) <= room:
            return items, warps
    return 1, 0


def two_at_once(decoder: Decoder, grouped: bool) -> bool:
    """Whether thread blocks have half the warps, so that a multiprocessor has two of them and one fetches its first
    data while the other multiplies: those of experts, which have few tiles, where there is no table to make.
    """
    return grouped and not decoder.fragments.entries


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
        if k % (items * ITEM_K) or (decoder.fragments.gaps and k > decoder.elements_in_gaps):
            continue
        if decoder.shared_bytes_one(k, run, items, warps) <= room:
            return items, warps
    return 2, 0


# Few: elements of k, times the tiles of a thread block.
_LITTLE = 96 * ITEM_K


def _instances(eights: int, grouped: bool, even: bool, flow: str, cluster: int, tables: bool = True) -> tuple[str, ...]:
    """Those that a device with the 227 KiB of shared memory of an H100 takes; of values in `tables`, or worked out."""
    found = {
        _few_arguments(
            decoder, T, eights, few_room(decoder, eights, 227 << 10, even, grouped)[0], grouped, flow, cluster
        ): None
        for decoder in map(Decoder, all_fragments())
        for T in HALF_CXX
        if decoder.fragments.small_batch
        if (eights == 1 or decoder.fragments.wide) and flow in (_IN_CHUNKS, _flow_at_once(decoder))
        if bool(decoder.fragments.entries) == tables
    }
    return tuple(found)


def _one_instances(hot: bool) -> tuple[str, ...]:
    """... of ``linear_one``: whatever `one_room` may choose; with four items and most warps where `hot`."""
    return tuple(
        _one_arguments(decoder, T, items, warps)
        for decoder in map(Decoder, all_fragments())
        if decoder.single
        for items, warps in itertools.product((4, 2), (16, 12, 8))
        if (items == 4 and warps > 8) == hot
        for T in HALF_CXX
    )


def _few_arguments(
    decoder: Decoder, T: str, eights: int, items: int, grouped: bool, flow: str, cluster: int, way: str = PLAIN
) -> str:
    flavour = f"{eights}, {items}, {str(grouped).lower()}, {flow}, {cluster}"
    found = decoder.fragments.small_batch.format(T=T)
    return f"{way.format(found)}, {flavour}, {decoder.layout}"


def _blocked_instances() -> tuple[str, ...]:
    """Those of tokens with scales of 32, which are halves."""
    flavours = ((1, True, _CLUSTER), (1, True, 1), (2, True, 1), (1, False, 1), (2, False, 1))
    found = {
        _few_arguments(
            decoder,
            HALF_CXX[0],
            eights,
            few_room(decoder, eights, 227 << 10, even)[0],
            False,
            _flow_at_once(decoder) if even else _IN_CHUNKS,
            cluster,
            BLOCKED,
        ): None
        for decoder in map(Decoder, map(of_integers, all_fragments()))
        for eights, even, cluster in flavours
        if decoder.fragments.blocked and (eights == 1 or decoder.fragments.wide)
    }
    return tuple(found)


def of_integers(fragments: Fragments) -> Fragments:
    """What takes tokens that are integers with scales of 32."""
    return fragments.quantized or fragments


def of_one_token(fragments: Fragments) -> bool:
    """Whether one token is quantized to columns of its own: not where a kernel of integers alone, or that reads scales
    in place which here are spread, is faster.
    """
    return fragments.columns and fragments.blocked and not (fragments.entries and fragments.beside)


def _way_instances(way: str, clusters: tuple[int, ...]) -> tuple[str, ...]:
    """Those of one token by columns, or of tokens that are quantized on the way, each of which is two halves."""
    return tuple(
        _few_arguments(
            decoder,
            HALF_CXX[0],
            1,
            few_room(decoder, 1, 227 << 10, True)[0],
            False,
            _flow_at_once(decoder),
            cluster,
            way,
        )
        for decoder in map(Decoder, map(of_integers, all_fragments()) if way == INTEGER_COLUMNS else all_fragments())
        for cluster in clusters
        if (decoder.fragments.halves if way == IN_HALVES else decoder.fragments.columns)
        if way != INTEGER_COLUMNS or of_one_token(decoder.fragments)
    )


def _one_arguments(decoder: Decoder, T: str, items: int, warps: int) -> str:
    known = str(_by_words(decoder, warps)).lower()
    return f"{decoder.fragments.small_batch.format(T=T)}, {items}, {warps}, {decoder.layout}, {known}"


def _by_words(decoder: Decoder, warps: int) -> bool:
    """Whether ``linear_one`` makes the table of values that are known of words, see `values_between`.

    Of pairs of 16 values, before there is anything else to do: a table that is made while weights are on their way has
    the time to find them out.
    """
    return decoder.fragments.bits == 4 and warps == 16


# Thread blocks of a cluster, where there are any: multiprocessors come in pairs, so that all of them find a place.
_CLUSTER = 2
# Values of ``Flow`` of kernels/linear/few_block.cuh.
_IN_CHUNKS, _AT_ONCE, _AT_ONCE_SPREAD = "IN_CHUNKS", "AT_ONCE", "AT_ONCE_SPREAD"


def _reciprocal(divisor: int) -> int:
    """By which a kernel divides numbers below 2^32 / divisor: ``divided`` of kernels/linear/pipeline.cuh."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


def _flow_at_once(decoder: Decoder) -> str:
    return _AT_ONCE if decoder.fragments.copied else _AT_ONCE_SPREAD


def declared_template(name: str, instances: tuple[str, ...] = (), hot: bool = False, least: int = 80) -> Template:
    """A template of kernels/linear/, with what host and kernels both know."""
    axes = (instances,) if instances else ()
    return Template(f"linear/{_FILES[name]}.cu", name, axes, hot=hot, structs=_DECLARED, least=least)


_FILES = {
    "linear_few": "small_batch",
    "linear_one": "single_token",
    "add_partials": "small_batch",
    "combine_slots": "slots",
    "combine_rounded_slots": "slots",
    "group_tokens": "experts",
}


def _templates() -> Iterator[Template]:
    """All instances that the host may ask for."""
    for hot, options in (
        (True, (1, False, True, _AT_ONCE, _CLUSTER)),
        (True, (1, True, True, _AT_ONCE, 1)),
        (True, (1, False, True, _AT_ONCE, 1)),
        (False, (1, False, True, _AT_ONCE_SPREAD, _CLUSTER)),
        (False, (1, False, True, _AT_ONCE_SPREAD, 1)),
        (False, (1, True, True, _AT_ONCE_SPREAD, 1)),
        (False, (2, False, True, _AT_ONCE, 1)),
        (False, (2, False, True, _AT_ONCE_SPREAD, 1)),
        (False, (1, True, True, _IN_CHUNKS, 1)),
        (False, (1, False, False, _IN_CHUNKS, 1)),
        (False, (2, False, False, _IN_CHUNKS, 1)),
        (False, (1, True, False, _IN_CHUNKS, 1)),
    ):
        yield declared_template("linear_few", _instances(*options), hot)
        if worked_out := _instances(*options, tables=False):
            yield declared_template("linear_few", worked_out)
    yield declared_template("linear_few", _way_instances(COLUMNS, (_CLUSTER,)), True)
    yield declared_template("linear_few", _way_instances(INTEGER_COLUMNS, (_CLUSTER,)))
    yield declared_template("linear_few", _blocked_instances())
    yield declared_template("linear_few", _way_instances(IN_HALVES, (_CLUSTER, 1)))
    yield declared_template("linear_one", _one_instances(True), True)
    yield declared_template("linear_one", _one_instances(False))
    yield declared_template("add_partials", (*HALF_CXX, CXX_TYPES["float32"]))


register_templates(_templates)


@dataclass(frozen=True)
class Cut:
    """How the work of ``linear_few`` is cut.

    Parameters
    ----------
    run : int
        Tiles of 16 rows of a thread block.
    warps : int
        Warps that share k, a team; each team takes other tiles.
    items : int
        k-tiles of a warp at a time.
    share : int
        k-tiles of a thread block.
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
    unit: int = 1,
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
    unit : int
        Items of k that stay together.

    Returns
    -------
    Cut or None
        None where k is too long for that.
    """
    rows, total = -(-n // ITEM_ROWS), -(-k // ITEM_K)
    best: tuple[float, Cut] | None = None
    choices = [(split, resident // split, 1) for split in range(1, 1 + min(splits, total))]
    if clusters[1] and total >= clusters[0]:
        choices.append((clusters[0], clusters[1], clusters[0]))
    for (split, blocks, cluster), teams in itertools.product(choices, range(warps, 0, -1)):
        share, team = -(-total // split // unit) * unit, warps // teams
        chunks = -(-share // (team * most))
        if once and chunks > 1:
            continue
        items = -(-share // (team * chunks))
        least = max(most // 2 if once else 1, unit)
        items = -(-items // least) * least
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


class FewKernel(Fused):
    """``linear_few`` for one format, shape and dtype, and how many tokens share a thread block.

    `way`: for tokens of floats or quantized ones, see `PLAIN`; `COLUMNS` is `PLAIN` where it cannot be.
    """

    def __init__(
        self,
        fragments: Fragments,
        shape: tuple[int, int],
        dtype: np.dtype,
        device: Device,
        *,
        eights: int = 1,
        together: int = 1,
        grouped: bool = False,
        way: str = PLAIN,
    ):
        super().__init__(fragments, shape, dtype)
        n, k = shape
        decoder, room = Decoder(fragments), device.shared_memory
        whole = n % ITEM_ROWS == 0 and k % ITEM_K == 0 and device.copies_tiles
        # Thread blocks with the same weights and other tokens run `together`, so that they share what they read.
        resident = max(1, (2 if two_at_once(decoder, grouped) else 1) * device.multiprocessors // together)
        cut = None
        for even, flow in ((True, _flow_at_once(decoder)), (True, _IN_CHUNKS), (False, _IN_CHUNKS)):
            items, warps = few_room(decoder, eights, room, even, grouped)
            if even and not (whole and warps and (flow != _IN_CHUNKS or grouped)):
                continue
            clusters = _clusters(device, together) if flow != _IN_CHUNKS and eights == 1 and not grouped else (1, 0)
            paired = eights == 2 and fragments.paired
            unit = max(1 + paired, fragments.multiple // ITEM_K) if even else 1
            splits, once = 1 if grouped else 8, flow != _IN_CHUNKS
            cut = cut_few(n, k, items, max(1, warps), resident, splits, once, clusters, unit)
            if cut:
                break
        assert cut is not None  # the last one takes anything
        self._dtype = np.dtype(dtype)
        self.tokens, self.clustered = TOKENS * eights, cut.cluster > 1
        shared = decoder.shared_bytes(eights, items, warps, flow != _IN_CHUNKS)
        own = cut.share if flow == _IN_CHUNKS else cut.warps * cut.items
        shared += (way == IN_HALVES) * _POWERS + (way == BLOCKED) * own * (ITEM_K // TOKEN_BLOCK) * self.tokens * 4
        teams = max(1, warps // cut.warps)  # 0 where it does not fit at all
        pairs = cut.share % 2 == 0 and k % (2 * ITEM_K) == 0
        #: Whether parts of one token have columns of their own: of two k-tiles at a time, which are there or not.
        by_columns = way in (COLUMNS, INTEGER_COLUMNS) and fragments.columns
        self.columns = by_columns and self.clustered and pairs and dtype == np.float16
        if flow == _AT_ONCE_SPREAD and fragments.beside and eights == 1 and way != BLOCKED:
            tiles, size = (_GAP.MADE_OUT, 16) if self.columns else (_GAP.HANDED_OUT, 8)
            row = (cut.warps * cut.items * ITEM_K // fragments.block + 1) * size
            shared += teams * tiles * (ITEM_ROWS * row + 16)
        #: Whether the device has the shared memory.
        self.fits = warps > 0 and shared <= room
        # By way of shared memory whole lines of x are read, and once.
        stage = cut.warps * cut.items * ITEM_K * TOKENS * 2 + _GAP.X_GAP
        self.staged = not self.columns and flow != _IN_CHUNKS and eights == 1 and shared + stage <= room
        shared += stage * self.staged
        arguments = arguments_of(CUT.dtype.itemsize, VALUES.dtype.itemsize)
        signature = "p", "p", *arguments, _tma.MAP_BYTES, _tma.MAP_BYTES
        if way in (COLUMNS, INTEGER_COLUMNS) and not self.columns:
            way = PLAIN
        values = _few_arguments(decoder, self.cxx, eights, items, grouped, flow, cut.cluster, way)
        self.kernel = kernel_of("linear_few", values, 32 * warps, shared, signature)
        self.grid, self._splits = cut.grid, cut.grid[1] // cut.cluster
        boxed = items == 4 or (items == 2 and (paired or not fragments.entries))
        box = 2 if boxed and fragments.together == 2 and 2 * decoder.item_bytes == 128 else 1
        by_box = self.staged and self.clustered and way != IN_HALVES
        self._map_of_x = functools.partial(_map_of_x, k) if by_box else no_map
        pitches = [k * size // ITEM_K for size in (decoder.item_bytes, decoder.scale_bytes)]
        wide = even or pitches[0] % 16 == 0
        width = 0
        if fragments.copied and fragments.entries:
            width = min(16, decoder.scale_bytes) if even else 4 if pitches[1] % 4 == decoder.scale_bytes % 4 == 0 else 1
        read = ITEM_K // fragments.granule if flow == _AT_ONCE_SPREAD else 1  # codes of scales, of an item, at once
        #: At which multiples of bytes the planes of codes and scales have to start.
        self.alignment = 16 if wide else 4, max(read, width) if fragments.entries else fragments.aligned
        self._bind = _binder(decoder, k, device.capability, box if even else 0)
        self._cut = CUT.pack(
            run=cut.run,
            warps=cut.warps,
            teams=teams,
            items=cut.items,
            share=cut.share,
            width=width,
            wide=wide,
            staged=self.staged,
            per_warps=_reciprocal(cut.warps),
            per_teams=_reciprocal(teams),
        )
        self._behind = self._cut + self._values

    def __call__(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], each row from that of x."""
        launch_in_parts(self.launch, self.tokens, self._splits, x, q, bias, out)

    def blocked(self, x: Any, scales: int, padded: int, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], float16, bfloat16 or float32, from float16 [tokens, k], and from float32 [k / 32, padded]
        at an address.
        """
        tokens = x.shape[0]
        partial = room_for_parts(self._splits, out)
        if partial is None and out.dtype != x.dtype:
            partial = _xp.namespace(out).empty(out.size, np.float32)
        to, given = (0, bias) if partial is None else (partial.data.ptr, None)
        scales_of = Experts(0, scales, padded, 0)
        self.launch(-(-tokens // self.tokens), x, q, given, out, to, tokens, scales_of)
        if partial is not None:
            add_up(partial, self._splits, bias, out)

    def in_halves(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n] from tokens that the kernel quantizes, both float16, bfloat16 or float32."""
        partial = room_for_parts(self._splits, out)
        if partial is None and out.dtype != np.float16:
            partial = _xp.namespace(out).empty(out.size, np.float32)
        to, given = (0, bias) if partial is None else (partial.data.ptr, None)
        self.launch(1, x, q, given, out, to, out.size // out.shape[-1], Experts(0, 0, kind_of(x.dtype), 0))
        if partial is not None:
            add_up(partial, self._splits, bias, out)

    def launch(
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
        bias, address, kind = bias_argument(bias, self._dtype)
        weight = self.weight(q)
        arguments = self.arguments(weight, address, kind, out, partial, experts, tokens)
        self.kernel.launch(
            x,
            (blocks, *self.grid),
            (x.data.ptr, weight.codes, *arguments, weight.map, self._map_of_x(x)),
        )

    def of_experts(self, grouping: Grouping) -> Multiply:
        """The launch for experts, the kernel compiled."""
        start, grid = self.kernel.ready(grouping.device).launch, (grouping.groups, *self.grid)
        numbers = self.numbers(grouping.divisor, grouping.step, SIZES.NO_BIAS, grouping.products)
        no_map_of_x = no_map(None)

        def multiply(x: Any, qs: QuantizedArray, out: int, partial: int, groups: int, order: int) -> None:
            weight = self.weight(qs)
            pointers = x.data.ptr, weight.codes, weight.packed, 0, out, partial, groups, order
            start(grid, (*pointers, numbers, weight.map, no_map_of_x))

        return multiply


class OneKernel(Fused):
    """``linear_one`` for one format whose scales are used as they are stored, shape and dtype."""

    def __init__(self, fragments: Fragments, shape: tuple[int, int], dtype: np.dtype, device: Device):
        super().__init__(fragments, shape, dtype)
        n, k = shape
        decoder = Decoder(fragments)
        self.run = max(1, -(-n // ITEM_ROWS // device.multiprocessors))
        items, warps = one_room(decoder, k, self.run, device.shared_memory)
        #: Whether the device has the shared memory.
        self.fits = warps > 0
        # All multiprocessors have some of them, `run` or one less.
        self.blocks = min(n // ITEM_ROWS, device.multiprocessors)
        shared = decoder.shared_bytes_one(k, self.run, items, warps)
        sizes = (*(8,) * 7, *(4,) * 4, VALUES.dtype.itemsize, _tma.MAP_BYTES)
        if _by_words(decoder, warps):
            self._values = values_between(fragments, dtype)
        self.kernel = kernel_of(
            "linear_one", _one_arguments(decoder, self.cxx, items, warps), 32 * warps, shared, sizes
        )
        self._numbers = n, k, self.run
        self.alignment = 16, min(16, items * decoder.scale_bytes)
        self._bind = _binder(decoder, k, device.capability, 2 if decoder.item_bytes > 48 else items)

    def __call__(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], which has one row."""
        bias, address, kind = bias_argument(bias, x.dtype)
        weight = self.weight(q)
        scales, _, _, tensor_scale, values = weight.planes
        self.kernel.launch(
            x,
            (self.blocks,),
            (
                x.data.ptr,
                weight.codes,
                scales,
                tensor_scale,
                values,
                address,
                out.data.ptr,
                kind,
                *self._numbers,
                self._values,
                weight.map,
            ),
        )


def _clusters(device: Device, together: int) -> tuple[int, int]:
    """Thread blocks of a cluster, and how many clusters a device holds at least."""
    if not 90 <= device.capability < 120:
        return 1, 0
    return _CLUSTER, max(1, device.multiprocessors // _CLUSTER // together)


@functools.cache
def _binder(decoder: Decoder, k: int, capability: int, box: int) -> Binder:
    """How ``linear_few`` and ``linear_one`` take a weight: by a tensor map of boxes of 16 rows and `box` k-tiles.

    Without boxes, a `box` of 0, and before Hopper there is no tensor map.
    """
    row, pitch = box * decoder.item_bytes, k // ITEM_K * decoder.item_bytes
    swizzled = row == 128 or (box == 1 and decoder.fragments.swizzled)

    def map(codes: Any) -> bytes:
        return _tma.byte_matrix(
            codes.data.ptr, codes.nbytes // pitch, pitch, pitch, ITEM_ROWS, row, swizzled, PROMOTION
        )

    used = box > 0 and capability >= 90
    return functools.partial(bind, fragments=decoder.fragments, map=map if used else no_map)


def _map_of_x(k: int, x: Any) -> bytes:
    """The tensor map of x: boxes of 8 tokens and 64 elements."""
    return _tma.byte_matrix(x.data.ptr, x.size // k, 2 * k, 2 * k, TOKENS, _tma.BOX_BYTES, True, PROMOTION)


def launch_in_parts(
    launch: Callable[..., None], together: int, splits: int, x: Any, q: QuantizedArray, bias: Any, out: Any
) -> None:
    """Launch a kernel for all tokens, and where thread blocks share k in `splits` parts, add up the sums of the parts.

    Parameters
    ----------
    launch : callable
        Takes how many thread blocks have other tokens, x, q, bias, out, the address of the sums or 0, and the tokens.
    together : int
        Tokens of a thread block.
    splits : int
        Parts of k.
    x, q, bias, out : array
        As the kernel takes them.
    """
    tokens = out.size // out.shape[-1]
    partial = room_for_parts(splits, out)
    to = 0 if partial is None else partial.data.ptr
    launch(-(-tokens // together), x, q, None if to else bias, out, to, tokens)
    if partial is not None:
        add_up(partial, splits, bias, out)


def room_for_parts(splits: int, out: Any) -> Any:
    """Room for the sums of all parts of k; None where there is one."""
    return None if splits == 1 else _xp.namespace(out).empty(splits * out.size, np.float32)


def add_up(partial: Any, splits: int, bias: Any, out: Any) -> None:
    """Fill `out` with the sums over the parts and the bias."""
    bias, address, kind = bias_argument(bias, out.dtype)
    pointers = partial.data.ptr, address, out.data.ptr
    add = _add_partials(cxx_type(out.dtype))
    add.launch(out, (-(-out.size // 256),), (*pointers, out.size, splits, kind, out.shape[-1]))


@functools.cache
def _add_partials(cxx: str) -> Kernel:
    """The kernel that adds up the sums of thread blocks that shared k."""
    return kernel_of("add_partials", cxx, 256, 0, (*(8,) * 4, *(4,) * 3))


@functools.cache
def kernel_of(name: str, values: str, threads: int, shared: int, signature: tuple[Type, ...]) -> Kernel:
    """A kernel of kernels/linear/, which may start before the one ahead of it has ended."""
    return Kernel(declared_template(name), (values,), threads, shared, signature=signature, early=True)


# ---- routes --------------------------------------------------------------------------------------------------------

# The most tokens, by whether a thread block can take 16 of them at a time: each tile of tokens decodes the weights
# again, and beyond that was never the fastest way.
MOST_TOKENS = {True: 32, False: 16}
# Microseconds of the launch; the fraction of the bandwidth at which weights pass; microseconds to decode an element.
_START, _FRACTION, _DECODING = 2.5, 0.8, 1.1e-7
# The same for more than 8 tokens, of which each thread block takes 16, or several decode the same weights; and
# microseconds of a k-tile, as parts of k are added up by a launch of its own.
_MORE_START, _MORE_FRACTION, _MORE_DECODING, _MORE_ALONG_K = 7.0, 0.45, 2.7e-7, 0.12
# The same of formats that were measured one by one.
_TABLE_START, _TABLE_FRACTION, _TABLE_DECODING, _TABLE_ALONG_K = 4.3, 0.9, 1.87e-7, 0.03
# By how much that takes less with each token that 16 are more than a thread block has.
_FEWER_TOKENS = 0.008
# The same of integers, which are worked out, for up to 8 tokens and for more.
_INTEGER_START, _INTEGER_FRACTION, _INTEGER_DECODING = 3.0, 0.96, 1.45e-7
_MORE_INTEGER_DECODING, _INTEGER_ALONG_K = 1.72e-7, 0.07
# Where thread blocks do not share k as a cluster, or read x in halves, they wait longer for their data. From three
# tokens on that counts for weights of so many elements: larger ones fill the device anyway, smaller ones are no work.
_WAITING, _WAITING_TOKENS, _WAITING_SIZES = 2.5, 3, range(1 << 24, 1 << 27)


def few_refusal(problem: Problem) -> str | None:
    """What stands against ``linear_few`` and ``linear_one``, but for the number of tokens."""
    found = refusal(problem)
    if found is not None:
        return found
    assert problem.device is not None and problem.fragments is not None
    n, k = problem.shape
    if not problem.fragments.small_batch:
        return f"it has no decoder of {problem.format}"
    if problem.device.capability < 80:
        return "it needs compute capability 8.0"
    multiple = problem.fragments.multiple or problem.fragments.granule
    if k % multiple:
        return f"rows of {k} elements are not whole blocks of {multiple}"
    return "offsets of 32 bits do not reach through the weight" if n * k >= 1 << 33 else None


def rounds_scales(problem: Problem) -> bool:
    """Whether ``linear_few`` multiplies values of a codebook by scales that x's type does not hold.

    Where lanes share a block it multiplies sums, in float32.
    """
    fragments = problem.fragments
    if fragments is None or not fragments.entries or not fragments.owned or fragments.in_two_parts:
        return False
    return fragments.scale_bytes == 4 or (fragments.scale_bytes == 2 and problem.dtype != np.float16)


def _passing(problem: Problem, fraction: float, decoding: float) -> float:
    """Microseconds in which the weights pass: they are read at a fraction of the bandwidth, and decoded."""
    n, k = problem.shape
    return max(problem.reading / fraction, n * k * decoding)


def misaligned(problem: Problem, alignment: tuple[int, int]) -> str | None:
    """What stands against a kernel whose planes have to start at such multiples of bytes."""
    codes, scales = alignment
    if problem.stored.codes < codes or problem.stored.scales < scales:
        return f"the planes do not start at multiples of {codes} and {scales} bytes"
    return None


@functools.lru_cache(maxsize=4096)
def _one(fragments: Fragments, shape: tuple[int, int], dtype: np.dtype, device: Device) -> OneKernel:
    return OneKernel(fragments, shape, dtype, device)


@functools.lru_cache(maxsize=4096)
def few_kernel(
    fragments: Fragments,
    shape: tuple[int, int],
    dtype: np.dtype,
    device: Device,
    eights: int = 1,
    together: int = 1,
    grouped: bool = False,
    way: str = PLAIN,
) -> FewKernel:
    """The launcher of ``linear_few``."""
    flavour: dict[str, Any] = {"eights": eights, "together": together, "grouped": grouped, "way": way}
    return FewKernel(fragments, shape, dtype, device, **flavour)


class SingleToken(Route):
    """``linear_one``: a GEMV."""

    name = "single_token"

    def accepts(self, problem: Problem) -> str | None:
        found = refused_by_all(problem, "one weight") or few_refusal(problem)
        if found:
            return found
        if problem.tokens != 1:
            return f"it takes one token, and these are {problem.tokens}"
        assert problem.device is not None
        fragments = self._fragments(problem)
        if not fragments.copied:
            return "it takes scales as they are stored, and these have to be spread"
        if not Decoder(fragments).single:
            return "it takes values out of a table of up to 32"
        if problem.shape[0] % ITEM_ROWS or not problem.device.copies_tiles:
            return f"{problem.shape[0]} rows are not whole tiles of {ITEM_ROWS}"
        kernel = self._kernel(problem)
        if not kernel.fits:
            return f"rows of {problem.shape[1]} elements do not fit the shared memory of the device"
        return misaligned(problem, kernel.alignment)

    def cost(self, problem: Problem) -> float:
        return 0.9 * _START + _passing(problem, _FRACTION, _DECODING)

    def prepare(self, problem: Problem) -> Product:
        return self._kernel(problem)

    def describe(self, problem: Problem) -> str:
        kernel = self._kernel(problem)
        rounded = rounded_note(self._fragments(problem), problem.dtype, False)
        blocks = f"{kernel.run} tiles a thread block, grid ({kernel.blocks},)"
        return f"weights decoded in registers: linear_one, {blocks}{rounded}"

    def _kernel(self, problem: Problem) -> OneKernel:
        assert problem.device is not None
        return _one(self._fragments(problem), problem.shape, problem.dtype, problem.device)

    @staticmethod
    def _fragments(problem: Problem) -> Fragments:
        assert problem.fragments is not None
        return problem.fragments.one_token or problem.fragments


class SmallBatch(Route):
    """``linear_few``: a GEMM of up to 32 tokens."""

    name = "small_batch"
    #: What becomes of a decoder.
    way = PLAIN

    def accepts(self, problem: Problem) -> str | None:
        found = refused_by_all(problem, "one weight") or few_refusal(problem)
        if found:
            return found
        assert problem.fragments is not None
        most = MOST_TOKENS[problem.fragments.wide]
        if problem.tokens > most:
            return f"more than {most} tokens"
        kernel = self._kernel(problem)
        if not kernel.fits:
            return "the device has too little shared memory"
        return misaligned(problem, kernel.alignment)

    def cost(self, problem: Problem) -> float:
        assert problem.fragments is not None
        if not problem.fragments.entries:
            return self._cost_of_integers(problem, problem.fragments)
        if problem.tokens > TOKENS:
            return self._cost_of_more(problem, problem.fragments)
        cost = _START + _passing(problem, self._fraction(problem), _DECODING)
        middling = problem.shape[0] * problem.shape[1] in _WAITING_SIZES
        waits = problem.tokens >= _WAITING_TOKENS and middling and not self._quick(problem)
        return cost * _WAITING if waits else cost

    def _fraction(self, problem: Problem) -> float:
        """The fraction of the bandwidth at which weights pass, of which a table has the values, for up to 8 tokens."""
        return _FRACTION

    def _cost_of_more(self, problem: Problem, fragments: Fragments) -> float:
        """The cost of more than 8 tokens where a table has the values of codes."""
        items = problem.shape[1] / ITEM_K
        if not fragments.table_work:
            return _MORE_START + items * _MORE_ALONG_K + _passing(problem, _MORE_FRACTION, _MORE_DECODING)
        decoding = self._more_decoding(problem, fragments, _TABLE_DECODING * fragments.table_work)
        return _TABLE_START + items * _TABLE_ALONG_K + _passing(problem, _TABLE_FRACTION, decoding)

    def _cost_of_integers(self, problem: Problem, fragments: Fragments) -> float:
        """The cost where what codes stand for is worked out, which takes little more than to read them."""
        if problem.tokens <= TOKENS:
            return _INTEGER_START + _passing(problem, _INTEGER_FRACTION, _INTEGER_DECODING * fragments.work)
        along_k = problem.shape[1] / ITEM_K * _INTEGER_ALONG_K
        decoding = self._more_decoding(problem, fragments, _MORE_INTEGER_DECODING * fragments.work)
        return _INTEGER_START + along_k + _passing(problem, _INTEGER_FRACTION, decoding)

    def _more_decoding(self, problem: Problem, fragments: Fragments, decoding: float) -> float:
        """Microseconds of an element for more than 8 tokens: each thread block of 16, or 8, decodes all of them."""
        together = TOKENS * (2 if fragments.wide else 1)
        blocks = -(-problem.tokens // together)
        fewer = 1.0 - _FEWER_TOKENS * (together - problem.tokens / blocks)
        return decoding * blocks * fewer * (1 if fragments.wide else 0.75)

    def _quick(self, problem: Problem) -> bool:
        """Whether thread blocks share k as a cluster, and have whole lines of x or need few of them."""
        kernel = self._kernel(problem)
        assert problem.fragments is not None
        # Where a lane owns whole granules it reads lines of x in halves, unless they come by way of shared memory.
        lines = kernel.staged or problem.tokens <= TOKENS // 2 or not problem.fragments.owned
        return kernel.clustered and lines

    def prepare(self, problem: Problem) -> Product:
        return self._kernel(problem)

    def describe(self, problem: Problem) -> str:
        kernel = self._kernel(problem)
        grid = -(-problem.tokens // kernel.tokens), *kernel.grid
        rounded = rounded_note(problem.fragments, problem.dtype, rounds_scales(problem))
        return f"weights decoded in registers: linear_few, {kernel.tokens} tokens a thread block, grid {grid}{rounded}"

    def _kernel(self, problem: Problem) -> FewKernel:
        assert problem.device is not None and problem.fragments is not None
        eights = 2 if problem.fragments.wide and problem.tokens > TOKENS else 1
        together = -(-problem.tokens // (eights * TOKENS))
        fragments = of_integers(problem.fragments) if self.way in (BLOCKED, INTEGER_COLUMNS) else problem.fragments
        about = fragments, problem.shape, problem.dtype, problem.device
        way = COLUMNS if self.way == PLAIN and problem.tokens == 1 else self.way
        return few_kernel(*about, eights, together, False, way)
