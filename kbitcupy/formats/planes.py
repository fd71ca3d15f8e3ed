"""What a format says of itself: its planes, and what products need to know of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from ..backend.structs import Declared
from ..errors import FormatError

#: What the entries of a plane belong to, see `Plane`.
SCOPES = ("block", "tensor", "constant")


@dataclass(frozen=True)
class Plane:
    """One array of a compressed tensor.

    Parameters
    ----------
    dtype : str
        NumPy dtype name.
    shape : tuple of int
        Shape of the plane: one length or more.
    scope : {"block", "tensor", "constant"}, default "block"
        What its entries belong to, along its first axis: ``"block"``: the blocks of the array, in their order, so that
        those of a row along axis 0 lie side by side; ``"tensor"``: the whole array, so that each member of a stack has
        all of them; ``"constant"``: all arrays that are stacked or joined, in which they must be equal.
    per : int, default 1
        Entries of a block. Only sizes count; this is for the reader.
    every : int, default 1
        Blocks that one entry serves, where those of several are kept together.
    """

    dtype: str
    shape: tuple[int, ...]
    scope: str = "block"
    per: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise FormatError(f"scope of a plane is {self.scope!r}; allowed are {', '.join(map(repr, SCOPES))}")

    def repeated(self, members: int) -> Plane:
        """The plane of a stack of so many arrays."""
        if self.scope == "constant" or members == 1:
            return self
        return replace(self, shape=(members * self.shape[0], *self.shape[1:]))


@dataclass(frozen=True)
class Magnitude:
    """What decoded elements are proportional to: ``(code * scale + offset) * value`` of planes and known numbers, or
    ``code * scale + offset`` where each scale has an offset.

    Parameters
    ----------
    scales : str
        A plane of float32, float16 or bfloat16.
    offset : str or None
        A float32 plane of one number that is added to what the scales multiply; None where there is none.
    values : str or None
        A float32 plane of what codes stand for; None where the host knows it.
    largest : float
        Then the largest magnitude of what a code stands for.
    offsets : str or None
        A plane like `scales` with an offset beside each of them; None where there is none.
    """

    scales: str
    offset: str | None = None
    values: str | None = None
    largest: float = 1.0
    offsets: str | None = None

    @functools.cached_property
    def bits(self) -> int:
        """`largest` as the bits of a float32."""
        return int(np.float32(self.largest).view(np.int32))


@dataclass(frozen=True)
class Fragments:
    """What the tuned product kernels need of a format, whose codes they decode to fragments: tensor-core operands.

    The C++ types are decoders of ``kernels/``, in which ``{T}`` stands for the type of the tokens. Planes are named by
    their roles; None where a format has no such plane. The numbers are constants of the decoders, where static
    assertions compare them.

    Parameters
    ----------
    small_batch : str
        The decoder of ``linear_few`` and ``linear_one``; empty where these have none.
    hopper : str
        ... of ``linear_tile``; empty where that kernel has none.
    bits : int
        Of a code.
    block : int
        Elements that share a scale; 0 where those of a row do.
    granule : int
        Elements of a row that have to lie in one block: K is a multiple of it.
    scale_bytes : int
        Of the scale of a granule in shared memory.
    entries : int
        Of the decoder's table of values in ``linear_few`` and ``linear_one``; 0 where it works out what codes stand
        for (kernels/linear/integers.cuh).
    gaps : bool
        Whether that table has gaps between its entries, where sums find room.
    hopper_entries : int
        Of the table of ``linear_tile``.
    owned : bool
        Whether a lane of a warp has whole granules to itself; otherwise the four lanes of a row share each of them.
    copied : bool
        Whether scales are used as they are stored; otherwise they are spread, one float32 for each granule.
    swizzled : bool
        Whether rows of one k-tile are permuted in shared memory.
    items, grouped_items : int
        The most k-tiles that a warp of ``linear_few``, and of its flavour for experts, has registers for.
    together : int
        k-tiles that a warp of ``linear_few`` copies at a time where it has four.
    wide : bool
        Whether a thread block of ``linear_few`` has registers for 16 tokens.
    targeted : bool
        Whether the format has targets for the speed of products: then every instance is checked.
    codes, scales : str
        The planes of codes and of the scales of blocks.
    nested_scales, offset : str or None
        Planes of double quantization: the scales of the scales, and what is added to all of them. `offset` is also a
        second plane of what stands beside scales.
    tensor_scale : str or None
        The plane of the scale of all blocks of a member.
    values : str or None
        The plane of the values that codes stand for.
    known_values : tuple of float
        ... where the host knows them: empty where they are in a plane.
    scale_values : tuple of float
        What the 8-bit codes of nested scales stand for; else empty.
    beside : str or None
        The plane of what stands beside the scales, in the same order: zero points, offsets or inner scales, which the
        decoders know from each other.
    beside_bytes : int
        Of these for a granule in shared memory.
    aligned : int
        At which multiples of bytes rows of scales, and of what stands beside them, begin where rows are whole k-tiles.
    signed : bool
        Whether codes are in two's complement.
    blocked : bool
        Whether that decoder takes tokens that are integers with scales of 32, too.
    paired : bool
        Whether k-tiles are copied `together` for 16 of these tokens, too.
    columns : bool
        Whether it has a decoder for one token of float16 on clusters of thread blocks, where parts of k that have
        scales of their own have columns of an mma (kernels/linear/columns.cuh).
    halves : bool
        Whether it takes up to four tokens that are sums of two halves.
    work : float
        How much longer it takes ``linear_few`` to decode an element than one of 4 bits with a zero point.
    table_work : float
        How much longer it takes ``linear_few`` with more than 8 tokens to look up an element than one of iq4_nl; 0
        where that was not measured by itself.
    tile_work : float
        How much longer it takes ``linear_tile`` to decode an element than others of as many bits.
    multiple : int
        Of which K is a multiple where that is not the granule; else 0.
    single : bool
        Whether ``linear_one`` takes decoders of tables with such scales.
    in_two_parts : bool
        Whether ``linear_few`` keeps each value of a codebook, and each scale, as two numbers of x's type: then a weight
        is rounded once. Other codebooks have tables of pairs, or of rounded values.
    one_token : Fragments, optional
        What ``linear_one`` takes instead, which keeps values as they are.
    quantized : Fragments, optional
        What ``linear_few`` takes instead for tokens that are integers with scales of 32.
    added : bool
        Whether something is added to what scales multiply: offsets or minima, for which ``linear_tile`` takes means of
        x.
    """

    small_batch: str
    hopper: str
    bits: int
    block: int
    granule: int
    scale_bytes: int
    entries: int
    gaps: bool
    hopper_entries: int
    owned: bool
    copied: bool
    swizzled: bool
    items: int
    grouped_items: int
    wide: bool
    targeted: bool
    codes: str
    scales: str
    nested_scales: str | None = None
    offset: str | None = None
    tensor_scale: str | None = None
    values: str | None = None
    known_values: tuple[float, ...] = ()
    scale_values: tuple[float, ...] = ()
    beside: str | None = None
    beside_bytes: int = 0
    aligned: int = 4
    signed: bool = False
    multiple: int = 0
    added: bool = False
    single: bool = True
    in_two_parts: bool = False
    one_token: Fragments | None = None
    quantized: Fragments | None = None
    together: int = 2
    blocked: bool = False
    paired: bool = False
    columns: bool = False
    halves: bool = False
    work: float = 1.0
    table_work: float = 0.0
    tile_work: float = 1.0


@dataclass(frozen=True)
class Records:
    """How the streaming product kernel decodes a format whose elements are integers times factors, all of them with
    minima or none: see kernels/linear/gguf_records.cuh. A record is what 256 elements of a row take.

    Parameters
    ----------
    header, struct : str
        The file below ``kernels/`` with the decoder, and its C++ type, in which ``{way}`` stands for ``Record`` or
        ``Lanes``, see `lanes`.
    fields : tuple of (str, int)
        The planes in the order in which the decoder counts them, and the bytes of a record in each.
    sub : int
        Elements that share a factor.
    summed : bool
        Whether the kernel takes sums of `sub` neighbours of x: where codes have a bias, or something is added.
    table : int, default 0
        Words of the decoder's table in shared memory.
    tensor_scale : str, optional
        The plane of the scale of all elements of a member.
    declared : tuple of Struct, Constants and Table, default ()
        What stands ahead of the header.
    work : float, default 1.0
        How much longer it takes to decode an element than one of 4 bits with a minimum.
    lanes : float, default 0
        The same where tokens of floats have a decoder of their own, in which each lane has elements of its own; 0:
        they have none.
    folded : bool, default False
        Whether that takes no sums of x where the other does, since it takes a bias off codes.
    gap : int, default 16
        Bytes behind 32 elements of x of all tokens in shared memory, by which writes meet in the fewest banks.
    apart : bool, default False
        Whether quantized tokens have sums for minima that are integers.
    integers : float, default 1.0
        As `work`, for tokens that are quantized.
    columns : bool, default False
        Whether one token of float16 has a way of its own, where sub-blocks have columns of an mma.
    halves : bool, default False
        Whether up to four of them become sums of two halves.
    """

    header: str
    struct: str
    fields: tuple[tuple[str, int], ...]
    sub: int
    summed: bool
    table: int = 0
    tensor_scale: str | None = None
    declared: tuple[Declared, ...] = ()
    work: float = 1.0
    lanes: float = 0.0
    folded: bool = False
    gap: int = 16
    apart: bool = False
    integers: float = 1.0
    columns: bool = False
    halves: bool = False

    #: Elements of a record.
    ELEMENTS: ClassVar[int] = 256

    @property
    def stride(self) -> int:
        """Bytes from the record of a row to the next one in shared memory: an odd multiple of 16."""
        pieces = -(-sum(nbytes for _, nbytes in self.fields if nbytes % 4 == 0) // 16)
        return 16 * (pieces | 1)

    @property
    def planes(self) -> tuple[str, ...]:
        """The names of the planes."""
        return tuple(name for name, _ in self.fields)

    @property
    def pieces(self) -> tuple[int, ...]:
        """The bytes by which each of them is copied at once, at multiples of which it has to start."""
        return tuple(next(piece for piece in (16, 8, 4, 2) if nbytes % piece == 0) for _, nbytes in self.fields)


@dataclass(frozen=True)
class Integers:
    """A matrix of plain int8 codes, one byte each, as integer tensor cores multiply them.

    Parameters
    ----------
    codes, scales : str
        The planes; scales are float32 and positive, and zero points are 0.
    shares : str
        Who shares a scale: ``"row"`` where each row along the last axis has one, ``"tensor"`` where all share one.
    """

    codes: str
    scales: str
    shares: str


class Trits(NamedTuple):
    """An array of -1, 0 and 1 in 2 bits, as the format ``ternary`` stores them, and who shares their scales.

    Parameters
    ----------
    codes, scales : str
        The planes: `kbitcupy.formats.ternary` says how codes lie; scales are float32.
    shares : str
        Who shares a scale of a matrix: ``"tensor"``, ``"row"`` or ``"group"``; empty of stacks, and of what is none.
    group : int, default 0
        Elements of a row that share one, where these are groups; the last of a row may be fewer.
    """

    codes: str
    scales: str
    shares: str
    group: int = 0
