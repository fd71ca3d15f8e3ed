"""Formats whose origin stores equal blocks of bytes: a class that reads and writes those bytes, and what follows.

The origin lays a block's fields side by side. Here each field is a plane of its own, block after block: rows of codes
then are whole multiples of 16 bytes where the origin's blocks are 2-byte aligned, a kernel may copy them without
looking at the scales, and slices, stacks and files work as they do for every other format. `BlockFormat.to_blocks` and
`BlockFormat.from_blocks` convert between the two; nothing is rounded on the way.

What all of these formats have in common:

- A row along the last axis consists of whole blocks; an array of another shape is refused.
- NaN counts as 0, and magnitudes over 65504 count as 65504: then no scale, which is a half, is infinite. An element may
  decode to more, by the rounding of its scale or in blocks of somebody else, and is then infinite in float16.
- Arithmetic is IEEE float32 as the origin has it, subnormal numbers included.
- Formats that list ``importance`` in `takes` weigh errors by how much the column of an element counts, usually the mean
  square of the activations that it meets: float32[K] for an array of [..., K], or one such row for each matrix of a
  stack, so [E, K] for experts of [E, N, K]. Numbers are from 0 to 2^64, so that no sum overflows where x does not make
  it; those on a device are not looked at.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel
from ..backend.structs import Declared
from ..backend.xp import as_array, contiguous, device_of, is_cupy, namespace, same_device, to_device
from ..errors import FormatError
from .base import Format, Plane
from .chunks import AT_ONCE, CHUNK, converted, narrow
from .decoders import Decoder, templates
from .fields import MAX_FIELDS, Field as Field, block_bytes, join_blocks, split_blocks, split_into, store_fields

if TYPE_CHECKING:
    from pathlib import Path

# Rows of which a thread block finds the means, and its threads.
_MEAN_ROWS, _MEAN_THREADS = 32, 256
#: Magnitudes beyond this, the largest half, count as this.
LARGEST = np.float32(65504)
#: The largest importance of a column: what scales are found from stays finite.
MOST_IMPORTANT = 2.0**64


class Importance(NamedTuple):
    """How much the elements of some blocks count, as `BlockFormat.quantize_blocks` takes it.

    Parameters
    ----------
    weights : numpy.ndarray
        float32[blocks, block]: that of each element's column.
    mean : numpy.ndarray or None
        float32[blocks, 1]: the mean square of the row that a block is part of, its squares added up in order, where the
        format has `row_mean`.
    """

    weights: np.ndarray
    mean: np.ndarray | None


@dataclass(frozen=True, eq=False)  # one and the same each time, so that it is looked up quickly
class Quantizer:
    """The kernel that quantizes, the twin of `BlockFormat.quantize_blocks`.

    Its arguments are the array, how many blocks it has (64 bits), and the planes in the order of the fields, null
    pointers behind them up to `MAX_FIELDS`. With importance they go on: that, float32, and the means of x * x of rows,
    float32, or null; how many blocks a row has, and how many rows a matrix (64 bits).

    Parameters
    ----------
    file, name, struct : str
        File below ``kernels/``, function template and the struct that is its second parameter, behind the dtype.
    threads : int
        Threads of a thread block.
    blocks : int
        Blocks that a thread block quantizes at a time.
    folder : Path, optional
        The kernels of another package.
    weighs : bool, default False
        Whether it is for calls with importance.
    means : str, default ""
        The function template of `file` that finds the means of rows, 256 threads for 32 of them: its arguments are the
        array, how many rows and columns it has (64 bits), and where the means go. Without, none are asked for.
    """

    file: str
    name: str
    struct: str
    threads: int
    blocks: int
    folder: Path | None = None
    weighs: bool = False
    means: str = ""

    @property
    def templates(self) -> tuple[Template, ...]:
        """The kernel, and that of the means where there is one, for every dtype."""
        dtypes = tuple(CXX_TYPES.values())
        kernel = Template(self.file, self.name, (dtypes, (self.struct,)), folder=self.folder)
        return (kernel, Template(self.file, self.means, (dtypes,), folder=self.folder)) if self.means else (kernel,)


@functools.cache
def _kernel(quantizer: Quantizer, dtype: np.dtype) -> Kernel:
    signature = ("p", "i8", *["p"] * MAX_FIELDS, *(("p", "p", "i8", "i8") if quantizer.weighs else ()))
    values = CXX_TYPES[dtype.name], quantizer.struct
    return Kernel(quantizer.templates[0], values, quantizer.threads, signature=signature)


@functools.cache
def _means_kernel(quantizer: Quantizer, dtype: np.dtype) -> Kernel:
    values = (CXX_TYPES[dtype.name],)
    return Kernel(quantizer.templates[1], values, _MEAN_THREADS, signature=("p", "i8", "i8", "p"))


class BlockFormat(Format):
    """A format of equal byte blocks.

    A subclass sets ``name``, ``origin``, ``summary``, ``block`` and `fields`, and writes `dequantize_blocks` or
    `dequantize_planes`, and `quantize_blocks` or `quantize_fields` unless it is for reading only (``can_encode`` is
    then False). For CUDA it names the `struct` that decodes it and the kernel that quantizes. With a `tensor_scale`
    that `planes` names, what is quantized is x * (1 / scale), and what is decoded is multiplied with it, each rounded
    to float32.
    """

    #: Fields in the order of the origin's bytes. Neighbours that a decoder always reads together may be one field.
    fields: ClassVar[tuple[Field, ...]]
    #: The header below ``kernels/``, or below `folder`, with the C++ struct that decodes it: storey 1 (`decoders`).
    header: ClassVar[str] = ""
    struct: ClassVar[str] = ""
    #: Whether the struct decodes several octets together.
    together: ClassVar[bool] = False
    #: What stands ahead of the header.
    declared: ClassVar[tuple[Declared, ...]] = ()
    #: The kernels of another package.
    folder: ClassVar[Path | None] = None
    #: Whether errors that are weighed depend on the mean square of the whole row.
    row_mean: ClassVar[bool] = False
    #: Elements that NumPy quantizes at a time.
    chunk: ClassVar[int] = CHUNK
    #: The kernel that quantizes, and the one for calls with importance; None where only NumPy does.
    quantizer: ClassVar[Quantizer | None] = None
    weigher: ClassVar[Quantizer | None] = None
    _decoder: ClassVar[Decoder | None] = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.struct:
            planes = *(f.name for f in cls.fields), *((cls.tensor_scale,) if cls.tensor_scale else ())
            about: dict[str, Any] = {"folder": cls.folder, "declared": cls.declared}
            cls._decoder = Decoder(cls.header, cls.struct, planes, together=cls.together, **about)
            cls.kernels = templates(cls.header, cls.struct, **about)
        for quantizer in filter(None, (cls.quantizer, cls.weigher)):
            cls.kernels += quantizer.templates
        cls.can_encode = cls.quantizes()

    @classmethod
    def quantizes(cls) -> bool:
        """Whether the class says how NumPy quantizes, in one of two ways."""
        apart = cls.quantize_fields is not BlockFormat.quantize_fields
        return apart or cls.quantize_blocks is not BlockFormat.quantize_blocks

    @property
    def decoder(self) -> Decoder | None:
        return self._decoder

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one of the origin's blocks."""
        return block_bytes(self.fields)

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """float32[blocks, block] from the origin's bytes, uint8[blocks, block_bytes]; without a tensor scale."""
        return self.dequantize_planes(self.from_blocks(blocks))

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        """The same from the planes of some blocks; a subclass writes the one of the two that is easier."""
        return self.dequantize_blocks(self.to_blocks(planes))

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        """The origin's bytes, uint8[blocks, block_bytes], from finite float32[blocks, block], not to be written.

        `importance` comes only where `takes` has it.
        """
        return np.concatenate(self.quantize_fields(rows, importance), axis=1)

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        """The same bytes field by field, each uint8[blocks, bytes of the field]: faster than blocks, where a subclass
        has them apart.
        """
        raise FormatError(f"{self.name} is read and decoded only: choose another format to quantize")

    def options(self) -> dict[str, Any]:
        return {}

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] % self.block:
            raise FormatError(
                f"shape is {shape}; the last axis of {self.name} is whole blocks of {self.block} elements: pad it, or "
                "choose a format that cuts blocks across rows, such as kbit4"
            )

    def check_given(self, given: Mapping[str, Any]) -> None:
        if "importance" in given:
            check_importance(given["importance"])

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks = math.prod(shape) // self.block
        return {f.name: Plane(f.dtype, (blocks * f.entries,), per=f.entries) for f in self.fields}

    def to_blocks(self, planes: Mapping[str, Any]) -> Any:
        """The origin's bytes, uint8[blocks, block_bytes], on the device of the planes."""
        return join_blocks(self.fields, planes)

    def from_blocks(self, blocks: Any) -> dict[str, Any]:
        """The planes of the origin's bytes, of any shape whose size is whole blocks, on their device."""
        return split_blocks(self.fields, contiguous(blocks))

    def encode(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any] | None = None, lead: int = 0) -> None:
        if given and "importance" in given:
            # All planes belong to blocks here, so that a stack is an array like any other.
            given, lead = {**given, "importance": importance_beside(given["importance"], x)}, 0
        super().encode(x, planes, given, lead)

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        flat, columns, scale = x.reshape(-1), None, self._scale(planes)
        apart = type(self).quantize_fields is not BlockFormat.quantize_fields
        chunk = max(self.chunk, CHUNK * AT_ONCE.get())
        size = chunk - chunk % self.block
        if x.size and "importance" in given:
            columns = given["importance"].reshape(-1, x.shape[-1])
            size = max(chunk // x.shape[-1], 1) * x.shape[-1]  # whole rows
        for start in range(0, flat.size, size):
            part = flat[start : start + size]
            if part.dtype != np.float32:
                part = converted(part, np.dtype(np.float32))
            if scale is not None:
                with np.errstate(all="ignore"):
                    part = part * (np.float32(1) / scale)
            if not (np.minimum.reduce(part) >= -LARGEST and np.maximum.reduce(part) <= LARGEST):  # NaN is neither
                part = np.where(np.isnan(part), np.float32(0), part.clip(-LARGEST, LARGEST))
            # Overflow on the way is a part of the origin's rules.
            with np.errstate(all="ignore"):
                importance = None if columns is None else self._importance(part, columns, start, flat.size)
                rows = part.reshape(-1, self.block)
                first, last = start // self.block, start // self.block + len(rows)
                cut = {f.name: planes[f.name][first * f.entries : last * f.entries] for f in self.fields}
                if apart:
                    store_fields(self.fields, self.quantize_fields(rows, importance), cut)
                else:
                    split_into(self.fields, self.quantize_blocks(rows, importance), cut)

    def _scale(self, planes: Mapping[str, Any]) -> Any | None:
        """The tensor scale; None where there is none."""
        return None if self.tensor_scale is None else planes.get(self.tensor_scale)

    def _importance(self, part: np.ndarray, columns: np.ndarray, start: int, size: int) -> Importance:
        """That of whole rows, `part`, which begin at element `start` of `size`; `columns` has a row for each matrix."""
        length = columns.shape[1]
        rows = part.reshape(-1, length)
        matrix = np.arange(start // length, start // length + len(rows)) // (size // columns.size)
        mean = None
        if self.row_mean:
            # np.sum's order is not given, that of a running sum is.
            total = np.add.accumulate(rows * rows, axis=1, dtype=np.float32)[:, -1:]
            mean = np.repeat(total / np.float32(length), length // self.block, axis=0)
        return Importance(columns[matrix].reshape(-1, self.block), mean)

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        importance = given.get("importance")
        quantizer = self.quantizer if importance is None else self.weigher
        if quantizer is None:
            raise FormatError(f"{self.name} is quantized on NumPy only: pass x.get(), then .to_device('cuda:0')")
        blocks = x.size // self.block
        if not blocks:
            return
        names = () if self._decoder is None else self._decoder.planes  # the fields, and a tensor scale behind them
        arguments = x, blocks, *(planes.get(name, 0) for name in names), *[0] * (MAX_FIELDS - len(names))
        if importance is not None:
            columns = x.shape[-1]
            rows = x.size // columns
            means = 0
            if quantizer.means:
                room = namespace(x).cuda.alloc(4 * rows)  # goes back to the stream's pool behind the launches
                means = room.ptr
                _means_kernel(quantizer, x.dtype)(x, -(-rows // _MEAN_ROWS), (x, rows, columns, means))
            arguments += importance, means, columns // self.block, rows // (importance.size // columns)
        _kernel(quantizer, x.dtype)(x, -(-blocks // quantizer.blocks), arguments)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        flat, size, scale = out.reshape(-1), CHUNK - CHUNK % self.block, self._scale(planes)
        for start in range(0, flat.size, size):
            target = flat[start : start + size]
            first, last = start // self.block, (start + target.size) // self.block
            part = {f.name: planes[f.name][first * f.entries : last * f.entries] for f in self.fields}
            with np.errstate(all="ignore"):
                values = self.dequantize_planes(part).reshape(-1)
                narrow(values if scale is None else values * scale, target)


def check_importance(importance: Any) -> Any:
    """Importance as an array, where that is from 0 to `MOST_IMPORTANT`; on a device it is not looked at.

    Raises
    ------
    TypeError
        When it is not numeric.
    FormatError
        When it is a single number, or a number is negative, NaN or too large.
    """
    array = as_array(importance, "importance")
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"importance is {array.dtype}; it must hold numbers")
    if not array.ndim:
        raise FormatError("importance is a single number; it must be an array with one for each column")
    if not is_cupy(array):
        numbers = array.astype(np.float64)
        good = (numbers >= 0) & (numbers <= MOST_IMPORTANT)
        if not good.all():
            raise FormatError(
                f"importance holds {array[~good][0]}; it must be from 0 to 2**64, as sums of larger ones overflow: "
                "only ratios count, so divide it by its mean"
            )
    return array


def importance_beside(importance: Any, x: Any) -> Any:
    """Importance as a C-contiguous float32 array on the device of `x`, of shape [K], or [..., K] for stacks.

    Raises
    ------
    TypeError
        As `check_importance`.
    FormatError
        As `check_importance`, and when it has neither one number for each column of `x` nor that for each of the
        matrices of `x`.
    """
    array = check_importance(importance)
    if is_cupy(array) and isinstance(x, np.ndarray):
        array = check_importance(to_device(array, "cpu"))
    shape = x.shape
    if array.shape not in (shape[-1:], shape[:-2] + shape[-1:]):
        allowed = dict.fromkeys([shape[-1:], shape[:-2] + shape[-1:]])
        raise FormatError(
            f"importance has shape {array.shape}; for an array of shape {shape} it must have "
            f"{' or '.join(map(str, allowed))}, one number for each column"
        )
    if array.dtype != np.float32 or not same_device(array, x):
        array = to_device(array, device_of(x)).astype(np.float32, copy=False)
    return contiguous(array)
