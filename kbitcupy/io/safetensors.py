"""safetensors: one file, checked, mapped into memory, and written tensor by tensor.

The safetensors library checks a file before anything is read from it. What this module adds is a check of what the
library lets pass (names that stand twice), errors that name the tensor, access to the bytes of any dtype, NumPy's own
or not, and a writer that needs one tensor at a time in memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..backend import xp as _xp
from ..errors import FileError
from ..serial import MOST_VALUES, check_values, count_values, read_json
from .atomic import Output, check_file, replacing
from .container import Container, Entry, FileReader, PlacedWriter, Writer
from .kinds import HEAD, what_it_is

#: safetensors' codes of `DTYPES`; entries of dtypes that NumPy cannot hold have the code itself as their dtype.
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_NAMES = {code: name for name, code in CODES.items()}
#: Its codes of less than a byte, which are copied as they are.
_COPIED = ("F4", "F6_E2M3", "F6_E3M2")

_HEADER_KEY = "__metadata__"  # reserved in the header: no tensor can have this name
_LONGEST_HEADER = 100_000_000  # the library's own limit
# The library reads hostile JSON in little memory; Python does not, and gets longer headers only when they are good.
_LONGEST_DIAGNOSED = 1 << 20
_CUT = "; if it is cut off, download or copy it again"
_MOST_BYTES = 1 << 63  # of a tensor


# ---- reading -------------------------------------------------------------------------------------------------------


class SafetensorsReader(FileReader):
    """A safetensors file, see `FileReader`; its metadata is text by text."""

    kind = "safetensors"

    def _header(self, file: FileIO, size: int) -> tuple[dict[str, Entry], dict[str, int], Mapping[str, Any]]:
        return _header(file, self.path, size)


def _header(file: FileIO, path: Path, size: int) -> tuple[dict[str, Entry], dict[str, int], dict[str, str]]:
    """Entries, the offset in the file of each one's data, metadata."""
    invalid = f"{path} is not a valid safetensors file"
    head = file.read(HEAD)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(size - 8, _LONGEST_HEADER) or head[8:9] != b"{":
        kind = what_it_is(path, head)
        if kind is not None:
            raise FileError(f"{invalid}: {kind}")
    if len(head) < 8:
        raise FileError(f"{invalid}: it ends within its first 8 bytes")
    if length > min(size - 8, _LONGEST_HEADER):
        hint = _CUT if length <= _LONGEST_HEADER and head[8:9] == b"{" else ""
        raise FileError(
            f"{invalid}: its first 8 bytes announce a header of {length} bytes, but the file has {size} bytes and a "
            f"header at most {_LONGEST_HEADER}{hint}"
        )
    refusal = ""
    try:
        if length > MOST_VALUES:
            check_values(_count_ahead(file, length))
    except ValueError as error:
        raise FileError(f"{invalid}: {error}") from error
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        refusal = str(error)
        if length > _LONGEST_DIAGNOSED:
            raise FileError(f"{invalid}: {_brief(error)}{_CUT if 'IncompleteBuffer' in refusal else ''}") from error
    file.seek(8)
    try:
        with _uncollected(length):
            found = _read_header(read_json(file.read(length)), size - 8 - length)
    except ValueError as error:
        raise FileError(f"{invalid}: {_brief(error)}") from error
    if refusal:
        raise FileError(f"{invalid}: {refusal}")
    entries, starts, metadata = found
    return entries, {name: 8 + length + start for name, start in starts.items()}, metadata


@contextlib.contextmanager
def _uncollected(length: int) -> Iterator[None]:
    """No garbage collection while a long text is read: it would look at all that was read, again and again."""
    if length < _LONGEST_DIAGNOSED or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _count_ahead(file: FileIO, length: int) -> int:
    """`_count_values` of a header, of which little is in memory at a time."""
    file.seek(8)
    count = 0
    while length > 0 and (part := file.read(min(length, 1 << 16))):
        count += count_values(part)
        length -= len(part)
    return count


def _read_header(header: Any, nbytes: int) -> tuple[dict[str, Entry], dict[str, int], dict[str, str]]:
    """Entries and where their data begins in the `nbytes` of data; metadata.

    Raises
    ------
    ValueError
        Names what is wrong.
    """
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop(_HEADER_KEY, None) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{_HEADER_KEY!r} is not an object")
    for key, text in metadata.items():
        if not isinstance(text, str):
            raise ValueError(f"metadata key {key!r} is not text")
    found = {}
    for name, tensor in header.items():
        try:
            found[name] = _read_entry(tensor, nbytes)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
    entries, starts, end = {}, {}, 0
    for name, (entry, start) in sorted(found.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if start != end:
            raise ValueError(
                f"tensor {name!r}: its data begins at byte {start}, but the data before it ends at {end}: gaps and "
                "overlaps are not allowed"
            )
        entries[name], starts[name], end = entry, start, start + entry.nbytes
    if end != nbytes:
        raise ValueError(f"its tensors end at byte {end} of the data, which has {nbytes} bytes")
    return entries, starts, metadata


def _read_entry(tensor: Any, nbytes: int) -> tuple[Entry, int]:
    if not isinstance(tensor, dict) or not {"dtype", "shape", "data_offsets"} <= tensor.keys():
        raise ValueError("it is not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError("dtype is not text")
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < _MOST_BYTES for n in numbers):
            raise ValueError(f"{key} is not a list of integers from 0 to 2^63 - 1")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= nbytes:
        hint = _CUT if len(offsets) == 2 and nbytes < offsets[1] and offsets[0] <= offsets[1] else ""
        raise ValueError(f"data_offsets {offsets[:4]} are not a range within the {nbytes} bytes of data{hint}")
    entry = Entry(_NAMES.get(dtype, dtype), tuple(shape), offsets[1] - offsets[0])
    if dtype in _NAMES:
        expected = _size(shape) * _xp.named_dtype(_NAMES[dtype]).itemsize
        if expected != entry.nbytes:
            raise ValueError(
                f"{dtype} of shape {_brief(shape, 80)} takes {expected} bytes, data_offsets span {entry.nbytes}"
            )
    return entry, offsets[0]


def _size(shape: list[int]) -> int:
    """Number of elements; it gives up early, for the product of a long list of large integers takes for ever."""
    if 0 in shape:
        return 0
    size = 1
    for length in shape:
        size *= length
        if size >= _MOST_BYTES:
            raise ValueError(f"shape {_brief(shape, 80)} has 2^63 elements or more")
    return size


def _brief(text: Any, length: int = 400) -> str:
    """The beginning of what may quote a large part of a file."""
    text = str(text)
    return text if len(text) <= length else f"{text[:length]}..."


# ---- writing -------------------------------------------------------------------------------------------------------


class _SafetensorsWriter(PlacedWriter):
    """Writes tensors where the header says; those whose length was not known, and the header again, at the end."""

    def __init__(self, file: Output, entries: dict[str, Entry], metadata: Mapping[str, str], starts: dict[str, int]):
        super().__init__(file, entries, starts)
        self._all, self._metadata = entries, metadata

    def finish(self, first_nbytes: int) -> None:
        """Write what waited for the end: the header becomes shorter, with spaces to the same length."""
        if not self.late:
            return
        for name, raw in self.late.items():
            self._all[name] = Entry(self._all[name].dtype, (raw.nbytes,), raw.nbytes)
        placed = {name: replace(entry, at_most=name in self.late) for name, entry in self._all.items()}
        first, starts = _place(placed, self._metadata)
        spare = first_nbytes - len(first)
        self._file.seek(0)
        self._file.write((first_nbytes - 8).to_bytes(8, "little") + first[8:] + b" " * spare)
        for name, raw in self.late.items():
            self._file.seek(starts[name] + spare)
            self._file.write(raw.data)
        self._file.truncate(first_nbytes + sum(entry.nbytes for entry in self._all.values()))


class Safetensors(Container):
    """Files of the safetensors library."""

    name, ending = SafetensorsReader.kind, ".safetensors"

    def open(self, path: str | os.PathLike[str], mapped: bool = True) -> SafetensorsReader:
        return SafetensorsReader(path, mapped)

    def adopt(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Single values become text; arrays, which can be a tokenizer, are left out."""
        return {key: str(value) for key, value in metadata.items() if isinstance(value, str) or not _is_array(value)}

    def check(self, entries: Mapping[str, Entry], metadata: Mapping[str, Any]) -> None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise FileError(
                    f"metadata has {key!r}: {value!r}; keys and values must be str: use str() or json.dumps"
                )
        for name, entry in entries.items():
            if name == _HEADER_KEY:
                raise FileError(f"a tensor is named {name!r}, which safetensors reserves: rename it")
            if entry.dtype not in (*CODES, *_COPIED):
                raise FileError(
                    f"tensor {name!r} has dtype {entry.dtype}, which safetensors cannot store; it stores "
                    f"{', '.join(CODES)}"
                )

    @contextlib.contextmanager
    def writing(
        self, target: Path, entries: dict[str, Entry], metadata: Mapping[str, Any], force: bool
    ) -> Iterator[Writer]:
        first, starts = _place(entries, metadata)
        check_file(target, force)
        with replacing(target, len(first) + sum(entry.nbytes for entry in entries.values()), force) as file:
            file.write(first)
            writer = _SafetensorsWriter(file, entries, metadata, starts)
            yield writer
            writer.finish(len(first))


def _is_array(value: Any) -> bool:
    """Whether a value of another container's metadata has items."""
    return str(getattr(value, "type", "")).endswith("[]")


#: The container itself: it has no state.
SAFETENSORS = Safetensors()


def _place(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes, up to the data, and where each tensor's data begins in the file.

    Wider dtypes come first, so every tensor is aligned to its dtype without gaps, which the format forbids. What may
    turn out shorter comes last.
    """

    def order(name: str) -> tuple[bool, float, str]:
        entry = entries[name]
        return entry.at_most, (-8 * entry.nbytes / entry.size if entry.size else -math.inf), name

    SAFETENSORS.check(entries, metadata)
    header: dict[str, Any] = {_HEADER_KEY: dict(metadata)} if metadata else {}
    starts = {}
    end = 0
    for name in sorted(entries, key=order):
        entry = entries[name]
        starts[name] = end
        end += entry.nbytes
        header[name] = {
            "dtype": CODES.get(entry.dtype, entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [starts[name], end],
        }
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FileError(f"a tensor name or metadata text is not valid Unicode: {error}") from error
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise FileError(f"the header would take {len(text)} bytes; safetensors allows {_LONGEST_HEADER}: use shards")
    if len(text) > MOST_VALUES:
        try:
            check_values(count_values(text))
        except ValueError as error:
            raise FileError(f"the header is one that kbitcupy would not read: {error}") from error
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}
