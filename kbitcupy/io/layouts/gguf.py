"""Types of GGUF: a compressed tensor is one stored tensor, the origin's blocks under its own name.

The formats of `kbitcupy.formats.gguf` are those types, so nothing is decoded on the way in or out. NVFP4 may have a
scale of the whole tensor, or one for each expert: the float32 tensor ``blk.0.attn_q.scale`` beside
``blk.0.attn_q.weight``.

BitNet's weights, of the format ``ternary``, are of type TQ2_0 or TQ1_0 and have such a scale as well: the blocks' own
is the half nearest to theirs, and what it lacks is in the other one. A program that reads both gets the scale but for
its last bit, one that reads the blocks alone is off by 5e-4 at most. Blocks with a scale beside them are read as
``ternary``, too, with a scale for each block.

Source: ggml, ``gguf.h``, and llama.cpp, ``llama.h`` (``llama_ftype``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...array import QuantizedArray
from ...errors import FileError, FormatError
from ...formats.base import Format, get_format
from ...formats.blocks import BlockFormat
from ...formats.raw import RawPlanes
from ..container import Container, Entry, Reader, entry_of
from ..gguf import BLOCKS, GGUF, SPLIT_KEYS, GgufReader, GgufValue, split_values
from . import trits
from .base import Compressed, Layout

ARCHITECTURE_KEY = "general.architecture"
#: What a file says of its architecture that is no model's.
UNKNOWN = "unknown"
#: The version of the blocks' layout.
VERSION_KEY, QUANTIZATION_VERSION = "general.quantization_version", 2
#: What most of the weights are, for who reads it; nothing depends on it.
FILE_TYPE_KEY = "general.file_type"
#: llama.cpp's numbers of files of mostly one type; of the K types those of its smallest mixtures.
FILE_TYPES = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 32,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 14,
    "q5_k": 16,
    "q6_k": 18,
    "iq2_xxs": 19,
    "iq2_xs": 20,
    "iq3_xxs": 23,
    "iq1_s": 24,
    "iq4_nl": 25,
    "iq3_s": 26,
    "iq2_s": 28,
    "iq4_xs": 30,
    "iq1_m": 31,
    "tq1_0": 36,
    "tq2_0": 37,
    "mxfp4": 38,
    "nvfp4": 39,
    "q1_0": 40,
}
_WEIGHT, _SCALE = ".weight", ".scale"


@dataclass(frozen=True)
class GgufLayout(Layout):
    """One stored tensor for each compressed one.

    Parameters
    ----------
    ternary : {"tq2_0", "tq1_0"}
        The type of tensors of the format ``ternary``.
    """

    ternary: str = "tq2_0"
    name: ClassVar[str] = "gguf"
    container: ClassVar[Container] = GGUF

    @property
    def ternary_file_type(self) -> int:
        """The number of a file whose weights are ternary."""
        return FILE_TYPES[self.ternary]

    def recognise(self, reader: Reader) -> dict[str, Compressed]:
        found = {}
        names = set(reader.names)
        for name in reader.names:
            file = reader.file_of(name)
            if not isinstance(file, GgufReader):
                continue
            entry = file.entries[name]
            format = format_of(entry.dtype)
            if format is None:
                continue
            stored: tuple[str, ...] = (name,)
            lead, scale = 0, _scale_name(name)
            planes: Any = functools.partial(_planes, format, stored)
            if scale in names and (format.tensor_scale is not None or entry.dtype in trits.TYPES):
                about = reader.entry(scale)
                lead = _lead(entry.shape, about)
                if lead < 0:
                    raise FileError(f"{file.path}: tensor {scale!r} is {about}, no scale of {name!r}, which is {entry}")
                stored = (name, scale)
                if entry.dtype in trits.TYPES:  # each block has a scale of its own in the end: no stack
                    format, lead = get_format("ternary", block=trits.TYPE_BLOCK), 0
                    planes = functools.partial(_ternary_planes, entry.dtype, stored)
                else:
                    format = _known(entry.dtype, True)
                    planes = functools.partial(_planes, format, stored)
            found[name] = Compressed(format, entry.shape, np.dtype(np.float32), stored, planes, lead=lead)
        return found

    def entries(
        self, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Entry]:
        if trits.is_ternary(format):
            trits.check_blocks(name, format, shape, self.ternary)
            blocks = BLOCKS[self.ternary]
            return {
                name: Entry(self.ternary, shape, math.prod(shape) // blocks.block * blocks.nbytes),
                _scale_name(name): Entry("float32", (1,), 4),
            }
        if not isinstance(format, BlockFormat) or format.name not in BLOCKS:
            raise FileError(
                f"tensor {name!r}: GGUF has no type for {format}; choose one of {', '.join(_shown())}, or another "
                "layout; what is compressed already is restored by dequantize first"
            )
        found = {name: Entry(format.name, shape, math.prod(shape) // format.block * format.block_bytes)}
        if format.tensor_scale in planes:
            scale = planes[str(format.tensor_scale)]
            found[_scale_name(name)] = entry_of(scale)
        return found

    def arrays(self, name: str, q: QuantizedArray) -> dict[str, Any]:
        if trits.is_ternary(q.format):
            made, factor = trits.to_blocks(name, q, self.ternary)
            return {name: made, _scale_name(name): factor}
        format: Any = q.format
        blocks = q.planes.blocks if isinstance(q.planes, RawPlanes) else None
        found = {name: format.to_blocks(q.planes) if blocks is None else blocks}
        if format.tensor_scale in q.planes:
            found[_scale_name(name)] = q.planes[format.tensor_scale]
        return found

    def metadata(self, metadata: Mapping[str, Any], configs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(metadata)

    def about_file(
        self,
        metadata: Mapping[str, Any],
        entries: Mapping[str, Entry],
        part: tuple[int, int, int] = (0, 1, 0),
        changed: bool = False,
    ) -> dict[str, Any]:
        no, count, tensors = part
        values: dict[str, Any] = {}
        if no == 0:
            values.update(GGUF.adopt({} if ARCHITECTURE_KEY in metadata else {ARCHITECTURE_KEY: UNKNOWN}))
            values.update(GGUF.adopt({key: each for key, each in metadata.items() if key not in SPLIT_KEYS}))
            for key, number in ((VERSION_KEY, QUANTIZATION_VERSION), (FILE_TYPE_KEY, self.file_type(entries))):
                # As text it comes from a safetensors file.
                if changed or key not in values or values[key].type == "string":
                    values[key] = GgufValue(number)
        if count > 1:
            values.update(split_values(no, count, tensors))
        return values

    def file_type(self, entries: Mapping[str, Entry]) -> int:
        """The number of a file of these tensors."""
        return _file_type(entries)

    def own_keys(self) -> Collection[str]:
        return SPLIT_KEYS


@functools.cache
def _known(dtype: str, scaled: bool = False) -> Any:
    try:
        format = get_format(dtype, **({"tensor_scale": True} if scaled else {}))
    except FormatError:
        return None
    return format if isinstance(format, BlockFormat) and format.block_bytes == BLOCKS[dtype].nbytes else None


def format_of(dtype: str) -> Any:
    """The format of an entry's dtype; None of plain numbers, and where there is no such format."""
    return _known(dtype) if dtype in BLOCKS else None


def _shown() -> list[str]:
    return [name for name in BLOCKS if (format := format_of(name)) is not None and format.can_encode]


def _scale_name(name: str) -> str:
    return name.removesuffix(_WEIGHT) + _SCALE


def _lead(shape: tuple[int, ...], scale: Entry) -> int:
    """How many lengths of a tensor count what has a scale of its own: none, or the experts; -1 where neither fits."""
    if scale.dtype == "float32":
        if scale.shape in ((), (1,)):
            return 0
        if len(shape) == 3 and scale.shape == shape[:1]:
            return 1
    return -1


def _planes(format: BlockFormat, stored: tuple[str, ...], reader: Reader) -> RawPlanes:
    scale = {str(format.tensor_scale): reader.array(name).reshape(-1) for name in stored[1:]}
    return RawPlanes(format, reader.raw(stored[0]), scale)


def _ternary_planes(dtype: str, stored: tuple[str, ...], reader: Reader) -> dict[str, np.ndarray]:
    return trits.from_blocks(stored[0], reader.raw(stored[0]), dtype, reader.array(stored[1]).reshape(-1))


def _file_type(entries: Mapping[str, Entry]) -> int:
    """What most elements are."""
    sizes: dict[str, int] = {}
    for entry in entries.values():
        if entry.dtype in FILE_TYPES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size
    return FILE_TYPES[max(sizes, key=lambda dtype: sizes[dtype])] if sizes else FILE_TYPES["float32"]
