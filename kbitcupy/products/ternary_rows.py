"""Products of up to 8 tokens and ternary weights, whose codes the copy engine brings: kernels/linear/ternary_rows.cuh.

The second launch of `kbitcupy.products.ternary_stream`, from Hopper on, or the only one: a warp has rows of its own and
waits for no other warp, or shares them with few. Tokens, and what comes of them, are as there, to the bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, Planned, capability, multiprocessors, packed, shared_memory
from ..backend.structs import Constants
from ..backend.tma import MAP_BYTES, byte_matrix
from ..formats.base import Trits, register_templates
from . import activations as tokens_of
from .fused import GROUP, HALF_CXX
from .int8 import BIAS_KINDS
from .routes import Device

#: Of all kernels of the file: the oldest architecture, numbers, and what stands ahead of the source.
FILE, OLDEST = "linear/ternary_rows.cu", 90
SIZES = Constants(
    STEP=tokens_of.SIZES.STEP,
    ROW_THREADS=512,
    MOST_ROW_STAGES=4,
    MOST_SLOTS=64,
    LANES=tokens_of.LANES,
)
STRUCTS = BIAS_KINDS, SIZES, GROUP
#: Of weights with few rows: thread blocks that leave room for those of the next kernel.
FEW_FILE = "linear/ternary_rows_few.cu"
FEW_SIZES = Constants(
    STEP=tokens_of.SIZES.STEP, ROW_THREADS=256, MOST_ROW_STAGES=4, MOST_SLOTS=64, LANES=tokens_of.LANES
)
FEW_STRUCTS = BIAS_KINDS, FEW_SIZES, GROUP
_TYPES = tuple(CXX_TYPES[name] for name in tokens_of.FLOATS)
#: Sizes of groups that have kernels, the most tokens, and the fewest rows of a thread block: smaller weights are faster
#: by more and smaller thread blocks, which start while those of the kernel ahead end.
GROUPS, TOKENS, LEAST_ROWS = (32, 64, 128), 8, 160
# The same of one token in floats, or of int8 in one launch; and of the latter where thread blocks are smaller, of one
# token and of several.
_LEAST_OF_ONE, _LEAST_OF_FEW, _LEAST_OF_SEVERAL = 60, 16, 24
# Elements of a weight with few rows from which on several tokens that are quantized ahead gain by such thread blocks.
_EARLY = 3 << 24
# Lines of a warp's codes that the L2 cache is to have before tokens are there. Those that are quantized meanwhile come
# later by it where they are longer, all together, than so many bytes.
_AHEAD, _FEW_AHEAD, _EARLY_AHEAD, _MOST_AHEAD_OF = 2, 4, 8, 1 << 15
_ROWS = Template(FILE, "rows_ternary", (_TYPES,), structs=STRUCTS, least=OLDEST)
_OF_GROUPS = Template(FILE, "rows_ternary_groups", (_TYPES, tuple(map(str, GROUPS))), structs=STRUCTS, least=OLDEST)
_FLOATS = Template(FILE, "rows_ternary_floats", (HALF_CXX,), structs=STRUCTS, least=OLDEST)
_QUANTIZED = Template(FILE, "rows_ternary_quantized", (_TYPES,), structs=STRUCTS, least=OLDEST)
_FEW_QUANTIZED = Template(FEW_FILE, "rows_ternary_quantized", (_TYPES,), structs=FEW_STRUCTS, least=OLDEST)
_INT8 = Template(FILE, "rows_ternary_int8", (_TYPES,), structs=STRUCTS, least=OLDEST)
_FEW_INT8 = Template(FEW_FILE, "rows_ternary_int8", (_TYPES,), structs=FEW_STRUCTS, least=OLDEST)
_EARLY_ROWS = Template(FEW_FILE, "rows_ternary_early", (_TYPES,), structs=FEW_STRUCTS, least=OLDEST)
_BYTES = Template("linear/ternary_bytes.cu", "rows_ternary_bytes", (_TYPES,), structs=STRUCTS, least=OLDEST)
_FEW_BYTES = Template("linear/ternary_bytes_few.cu", "rows_ternary_bytes", (_TYPES,), structs=FEW_STRUCTS, least=OLDEST)
register_templates(
    _ROWS, _OF_GROUPS, _FLOATS, _QUANTIZED, _FEW_QUANTIZED, _INT8, _FEW_INT8, _EARLY_ROWS, _BYTES, _FEW_BYTES
)
# Numbers that stand between addresses and maps.
_NUMBERS, _GROUP_NUMBERS = ("i8", *("i4",) * 8), ("i8", *("i4",) * 6)
_QUANTIZED_NUMBERS = "f8", "f8", "i8", *("i4",) * 4, "f4", *("i4",) * 7
_INT8_NUMBERS = _FLOAT_NUMBERS = ("i8", *("i4",) * 7)
_EARLY_NUMBERS = _BYTES_NUMBERS = ("i8", *("i4",) * 9)
_SIGNATURE = (*("p",) * 6, _NUMBERS, MAP_BYTES)
_GROUP_SIGNATURE = (*("p",) * 5, _GROUP_NUMBERS, MAP_BYTES, MAP_BYTES)
_QUANTIZED_SIGNATURE = (*("p",) * 5, _QUANTIZED_NUMBERS, MAP_BYTES)
_INT8_SIGNATURE = (*("p",) * 5, _INT8_NUMBERS, MAP_BYTES)
_BYTES_SIGNATURE = (*("p",) * 5, _BYTES_NUMBERS, MAP_BYTES)
_EARLY_SIGNATURE = (*("p",) * 6, _EARLY_NUMBERS, MAP_BYTES)
_FLOAT_SIGNATURE = (*("p",) * 4, _FLOAT_NUMBERS, MAP_BYTES)
#: Warps of a thread block, and bytes of a stage of a warp; stages beyond which the first codes, and the tokens, only
#: come later; what stages begin at; bytes beside stages and tokens.
WARPS, STAGE, STAGES, ALIGNMENT = SIZES.ROW_THREADS // 32, 2 * 16 * 128, 2, 1 << 10
BESIDE = 2 << 10
# ... and where tokens are floats, of which sums stand there.
_BESIDE_FLOATS = BESIDE + 512
# Bytes of scales that the L2 cache fetches together.
_PROMOTION = 128
# Rows of a pass; bytes of a row in a box.
_PASS, _LINE = 16, 128


@dataclass(frozen=True, eq=False)
class Rows(Planned):
    """The launch for products of one shape.

    Parameters
    ----------
    cut : tuple of int
        The last numbers of the kernel's arguments.
    of_pass : int
        Rows of a box.
    types : tuple of str
        Of the numbers among the kernel's arguments.
    """

    cut: tuple[int, ...]
    of_pass: int
    types: tuple[str, ...]

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - plans are kept as long
    def packed(self, *numbers: float) -> bytes:
        """All numbers, of which the cut is the last."""
        return packed(self.types, *numbers, *self.cut)

    def multiply(self, pointers: tuple[int, ...], numbers: bytes, q: QuantizedArray, part: Trits) -> None:
        """Start it with these addresses and `packed` numbers."""
        self.launch(self.grid, (*pointers, numbers, *self._maps(q, part)))

    def _maps(self, q: QuantizedArray, part: Trits) -> tuple[bytes, ...]:
        """Those of the weight, and of the scales of its groups, made once for each number of rows."""
        found: tuple[bytes, ...] | None = q._launches.get((Rows, self.of_pass))
        if found is None:
            rows, depth = q.shape
            codes, scales = q.planes[part.codes], q.planes[part.scales].data.ptr
            found = (map_of(codes, rows, depth, self.of_pass),)
            if part.shares == "group":
                of_row, of_box = 4 * (depth // part.group), scale_bytes(part.group)
                found += (byte_matrix(scales, rows, of_row, of_row, self.of_pass, of_box, False, _PROMOTION),)
            q._launches[Rows, self.of_pass] = found
        return found


def map_of(codes: Any, rows: int, depth: int, of_pass: int) -> bytes:
    """The map of a plane of codes, in boxes of so many rows and a line."""
    return byte_matrix(codes.data.ptr, rows, depth // 4, depth // 4, of_pass, _LINE, True, 128)


def named(name: str, tokens: int, rows: int, gpu: Device) -> str:
    """The kernel of a product: `name`, or the one of large weights."""
    large = gpu.capability >= OLDEST and tokens <= TOKENS and rows >= LEAST_ROWS * gpu.multiprocessors
    return name.replace("stream", "rows") if large else name


def in_one_launch(rows: int, depth: int, gpu: Device) -> bool:
    """Whether a product of one token quantizes it on the way, or takes one that is int8 as it lies."""
    return _of_few(rows, depth, gpu.capability, gpu.multiprocessors) is not None


def takes_bytes(tokens: int, rows: int, depth: int, gpu: Device) -> bool:
    """Whether a product of several tokens that are int8 takes them as they lie."""
    return _of_several(tokens, rows, depth, gpu.capability, gpu.multiprocessors, gpu.shared_memory) is not None


def early(tokens: int, rows: int, depth: int, gpu: Device) -> bool:
    """Whether a product of tokens that are quantized ahead is by thread blocks of few rows."""
    return _is_early(tokens, rows, depth, gpu.capability, gpu.multiprocessors, gpu.shared_memory)


def staged_bytes(tokens: int, depth: int) -> int:
    """Bytes of int8 tokens in shared memory, of whole lines of codes."""
    return -(-depth // (4 * _LINE)) * 4 * _LINE * tokens


def scale_bytes(group: int) -> int:
    """Bytes of the scales of a row in a stage."""
    return 2 * 4 * _LINE // group * 4


def cut_of(rows: int, depth: int, blocks: int, group: int, warps: int = WARPS) -> tuple[int, int]:
    """Warps that share rows, and rows of a pass.

    Examples
    --------
    >>> [cut_of(rows, depth, 132, 0) for rows, depth in ((28672, 8192), (8192, 8192), (4096, 4096), (2560, 2560))]
    [(1, 14), (4, 16), (8, 16), (4, 5)]
    """
    of_block, lines = -(-rows // blocks), -(-depth // (4 * _LINE))
    share = 1
    while not group and 2 * share <= min(warps, lines) and -(-of_block * 2 * share // warps) <= _PASS:
        share *= 2
    of_team = -(-of_block * share // warps)
    return share, -(-of_team // -(-of_team // _PASS))


def _least(tokens: int) -> int:
    return LEAST_ROWS if tokens > 1 else min(LEAST_ROWS, _LEAST_OF_ONE)


def _blocks(rows: int, device: int, least: int) -> int:
    """Thread blocks; 0 where they would have too few rows."""
    blocks = min(multiprocessors(device), rows)
    return blocks if capability(device) >= OLDEST and -(-rows // blocks) >= least else 0


def stages_of(staged: int, stage: int, device: int, beside: int = BESIDE) -> int:
    """Stages of a warp, of so many bytes, for which there is room."""
    return min(STAGES, (shared_memory(device) - beside - staged) // (WARPS * stage))


@functools.lru_cache(maxsize=4096)
def rows_of(dtype: np.dtype, tokens: int, rows: int, depth: int, group: int, device: int) -> Rows | None:
    """How a product is computed, its kernel compiled; None where it is not for such a product.

    `group` is 0 where one scale is for all, or for a row.
    """
    facts = capability(device), multiprocessors(device), shared_memory(device)
    if not group and _is_early(tokens, rows, depth, *facts):
        ahead = _EARLY_AHEAD if staged_bytes(tokens, depth) <= _MOST_AHEAD_OF else 0
        about = _EARLY_ROWS, FEW_SIZES, _EARLY_SIGNATURE
        return _several_rows(*about, dtype, tokens, rows, depth, ahead, device)
    blocks = _blocks(rows, device, LEAST_ROWS)
    if not blocks or tokens > TOKENS or group not in (0, *GROUPS):
        return None
    share, of_pass = cut_of(rows, depth, blocks, group)
    staged, stage = staged_bytes(tokens, depth), STAGE
    if group:
        if depth // group * 4 % 16:  # no rows of scales for the copy engine
            return None
        # Behind the tokens are zeros and what sums of groups begin with, with room for those of a line; in a stage the
        # scales of its rows.
        staged += 16 + (4 if tokens == 1 and group >= 64 else 64) * (depth // group + 16)
        stage += -(-of_pass * scale_bytes(group) // 128) * 128
    stages = stages_of(staged, stage, device)
    if stages < 1:
        return None
    template, values = (_OF_GROUPS, (CXX_TYPES[dtype.name], str(group))) if group else (_ROWS, (CXX_TYPES[dtype.name],))
    signature = _GROUP_SIGNATURE if group else _SIGNATURE
    launch = _launch(template, values, staged + stages * WARPS * stage, signature, device)
    cut, types = ((stages, of_pass), _GROUP_NUMBERS) if group else ((share, stages, of_pass), _NUMBERS)
    return Rows(launch, (blocks, 1, 1), cut, of_pass, types)


def _of_few(rows: int, depth: int, capability: int, processors: int) -> bool | None:
    """Whether a product of one token in one launch is by thread blocks of few rows; None where there is no such one."""
    few = rows < LEAST_ROWS * processors and depth <= 32 * FEW_SIZES.ROW_THREADS
    enough = rows > (min(LEAST_ROWS, _LEAST_OF_FEW if few else _LEAST_OF_ONE) - 1) * processors
    return few if capability >= OLDEST and enough and depth <= 32 * SIZES.ROW_THREADS else None


@functools.lru_cache(maxsize=4096)
def quantized_rows_of(dtype: np.dtype, rows: int, depth: int, device: int) -> Rows | None:
    """The same of one token of floats, which is quantized on the way, in one launch."""
    return _row_of((_QUANTIZED, _FEW_QUANTIZED), _QUANTIZED_SIGNATURE, dtype, rows, depth, device)


@functools.lru_cache(maxsize=4096)
def int8_rows_of(dtype: np.dtype, rows: int, depth: int, device: int) -> Rows | None:
    """The same of one token that is int8 already, in one launch."""
    return _row_of((_INT8, _FEW_INT8), _INT8_SIGNATURE, dtype, rows, depth, device)


def _row_of(
    templates: tuple[Template, Template],
    signature: tuple[Any, ...],
    dtype: np.dtype,
    rows: int,
    depth: int,
    device: int,
) -> Rows | None:
    few = _of_few(rows, depth, capability(device), multiprocessors(device))
    if few is None:
        return None
    template, sizes = (templates[1], FEW_SIZES) if few else (templates[0], SIZES)
    warps, blocks = sizes.ROW_THREADS // 32, min(multiprocessors(device), rows)
    share, of_pass = cut_of(rows, depth, blocks, 0, warps)
    # What is no larger waits for its token anyway, which comes earlier where little else is under way.
    stages = STAGES if few or rows >= LEAST_ROWS * blocks else 1
    shared = staged_bytes(1, depth) + stages * warps * STAGE
    if shared + ALIGNMENT + 2 * BESIDE > shared_memory(device):
        return None
    launch = _launch(template, (CXX_TYPES[dtype.name],), shared, signature, device, sizes)
    return Rows(launch, (blocks, 1, 1), (share, stages, of_pass, stages), of_pass, signature[-2])


def _room(tokens: int, depth: int, sizes: Constants, shared: int) -> int:
    """Stages of a warp, beside so many tokens, for which there is room."""
    of_stage = sizes.ROW_THREADS // 32 * STAGE
    return min(STAGES, (shared - BESIDE - ALIGNMENT - staged_bytes(tokens, depth)) // of_stage)


def _of_several(tokens: int, rows: int, depth: int, capability: int, processors: int, shared: int) -> bool | None:
    """The same as `_of_few` of several tokens that are int8 already."""
    if capability < OLDEST or not 1 < tokens <= TOKENS:
        return None
    if rows >= LEAST_ROWS * processors:
        return False if _room(tokens, depth, SIZES, shared) > 0 else None
    enough = rows > (_LEAST_OF_SEVERAL - 1) * processors
    return True if enough and _room(tokens, depth, FEW_SIZES, shared) == STAGES else None


def _is_early(tokens: int, rows: int, depth: int, capability: int, processors: int, shared: int) -> bool:
    few = _of_several(tokens, rows, depth, capability, processors, shared)
    return few is True and rows * depth >= _EARLY


@functools.lru_cache(maxsize=4096)
def bytes_rows_of(dtype: np.dtype, tokens: int, rows: int, depth: int, device: int) -> Rows | None:
    """The same of several tokens that are int8 already, in one launch."""
    facts = capability(device), multiprocessors(device), shared_memory(device)
    few = _of_several(tokens, rows, depth, *facts)
    if few is None:
        return None
    template, sizes, ahead = (_FEW_BYTES, FEW_SIZES, _FEW_AHEAD) if few else (_BYTES, SIZES, _AHEAD)
    return _several_rows(template, sizes, _BYTES_SIGNATURE, dtype, tokens, rows, depth, ahead, device)


def _several_rows(
    template: Template,
    sizes: Constants,
    signature: tuple[Any, ...],
    dtype: np.dtype,
    tokens: int,
    rows: int,
    depth: int,
    ahead: int,
    device: int,
) -> Rows:
    warps, blocks = sizes.ROW_THREADS // 32, min(multiprocessors(device), rows)
    share, of_pass = cut_of(rows, depth, blocks, 0, warps)
    stages = _room(tokens, depth, sizes, shared_memory(device))
    shared = staged_bytes(tokens, depth) + stages * warps * STAGE
    launch = _launch(template, (CXX_TYPES[dtype.name],), shared, signature, device, sizes)
    return Rows(launch, (blocks, 1, 1), (share, stages, of_pass, ahead), of_pass, signature[-2])


@functools.lru_cache(maxsize=4096)
def float_rows_of(dtype: np.dtype, tokens: int, rows: int, depth: int, device: int) -> Rows | None:
    """The same of floats of 16 bits, in one launch."""
    blocks = _blocks(rows, device, _least(tokens))
    if not blocks or tokens > TOKENS:
        return None
    share, of_pass = cut_of(rows, depth, blocks, 0)
    staged = 2 * staged_bytes(tokens, depth)
    stages = stages_of(staged, STAGE, device, _BESIDE_FLOATS)
    if stages < 1:
        return None
    shared = staged + stages * WARPS * STAGE
    launch = _launch(_FLOATS, (CXX_TYPES[dtype.name],), shared, _FLOAT_SIGNATURE, device)
    return Rows(launch, (blocks, 1, 1), (share, stages, of_pass), of_pass, _FLOAT_NUMBERS)


def _launch(
    template: Template,
    values: tuple[str, ...],
    shared: int,
    signature: tuple[Any, ...],
    device: int,
    sizes: Constants = SIZES,
) -> Any:
    kernel = Kernel(template, values, sizes.ROW_THREADS, shared + ALIGNMENT, signature=signature, early=True)
    return kernel.ready(device).launch
