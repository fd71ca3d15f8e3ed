"""GGUF, the files of ggml and llama.cpp: one file, checked, mapped into memory, and written tensor by tensor.

A file is a header and data, all little-endian::

    "GGUF"  u32 version  u64 tensors  u64 keys
    keys:     text key, u32 type, value         text: u64 length, UTF-8; an array: u32 type, u64 count, items
    tensors:  text name, u32 dimensions, u64 lengths (fastest first), u32 type, u64 offset in the data
    zeros up to a multiple of the alignment, then the data, each tensor at a multiple of it

Nothing in a header is trusted: every count is compared with the bytes that are left before anything is made of it,
arrays are skipped and stay bytes until somebody asks for their items, and numbers are Python's, which do not wrap.
Versions 2 and 3, which differ in nothing that is read here, are read, and 3 is written.

Large models are split into several files, ``name-00001-of-00003.gguf`` and so on, each a whole GGUF file with keys that
say which part it is (`part_of`); the other keys are in the first.

Source: ggml, ``gguf.h`` and ``docs/gguf.md``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..backend import xp as _xp
from ..errors import FileError
from .atomic import check_file, replacing
from .container import Container, Entry, FileReader, PlacedWriter, Writer

MAGIC = b"GGUF"
#: The version that is written.
VERSION = 3
_VERSIONS = (2, 3)
#: Data is aligned to this, unless the key says otherwise.
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"

#: Keys of a file that is a part of several: its number from 0, how many there are, tensors of all.
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
SPLIT_KEYS = (SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

#: ggml's types of plain numbers.
PLAIN = {
    "float32": 0,
    "float16": 1,
    "int8": 24,
    "int16": 25,
    "int32": 26,
    "int64": 27,
    "float64": 28,
    "bfloat16": 30,
}
_PLAIN_NAMES = {number: name for name, number in PLAIN.items()}


class Blocks(NamedTuple):
    """A type of blocks.

    Parameters
    ----------
    number : int
        ggml's type id.
    block, nbytes : int
        Elements and bytes of a block.
    """

    number: int
    block: int
    nbytes: int


#: ggml's types of blocks; those that a format has have its name.
BLOCKS = {
    "q4_0": Blocks(2, 32, 18),
    "q4_1": Blocks(3, 32, 20),
    "q5_0": Blocks(6, 32, 22),
    "q5_1": Blocks(7, 32, 24),
    "q8_0": Blocks(8, 32, 34),
    "q8_1": Blocks(9, 32, 36),
    "q2_k": Blocks(10, 256, 84),
    "q3_k": Blocks(11, 256, 110),
    "q4_k": Blocks(12, 256, 144),
    "q5_k": Blocks(13, 256, 176),
    "q6_k": Blocks(14, 256, 210),
    "q8_k": Blocks(15, 256, 292),
    "iq2_xxs": Blocks(16, 256, 66),
    "iq2_xs": Blocks(17, 256, 74),
    "iq3_xxs": Blocks(18, 256, 98),
    "iq1_s": Blocks(19, 256, 50),
    "iq4_nl": Blocks(20, 32, 18),
    "iq3_s": Blocks(21, 256, 110),
    "iq2_s": Blocks(22, 256, 82),
    "iq4_xs": Blocks(23, 256, 136),
    "iq1_m": Blocks(29, 256, 56),
    "tq1_0": Blocks(34, 256, 54),
    "tq2_0": Blocks(35, 256, 66),
    "mxfp4": Blocks(39, 32, 17),
    "nvfp4": Blocks(40, 64, 36),
    "q1_0": Blocks(41, 128, 18),
}
#: Numbers of types that mean another one in another program, by the architecture that only that one has: bitnet.cpp
#: has TL2 where ggml has MXFP4.
_OTHERS = {"bitnet-b1.58": frozenset({39})}
_ARCHITECTURE_KEY = "general.architecture"
_BLOCK_NAMES = {blocks.number: name for name, blocks in BLOCKS.items()}
#: The dtype of an entry of any other type, with its number; its bytes are all up to the next tensor's.
_UNKNOWN = "type"

# What ggml allows.
_LONGEST_NAME, _LONGEST_KEY, _MOST_DIMENSIONS = 63, 65535, 4
_MOST_ELEMENTS = 1 << 60  # NumPy's limit, of 8 bytes each, though some length be 0
# What no model has: these bound the time and the memory that reading a header takes.
_MOST_KEYS, _MOST_TENSORS, _MOST_TEXTS, _LONGEST_VALUES = 1 << 14, 1 << 16, 1 << 21, 100_000_000
# Bytes of a header that are read at a time.
_WINDOW = 1 << 18
_CUT = "; if it is cut off, download or copy it again"


# ---- values of the metadata ------------------------------------------------------------------------------------------

_TYPES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array"),
    *("uint64", "int64", "float64"),
)
_NUMBERS = {name: number for number, name in enumerate(_TYPES)}
_STRING, _ARRAY = _NUMBERS["string"], _NUMBERS["array"]
_ITEMSIZES = [0 if name in ("string", "array") else np.dtype(name).itemsize for name in _TYPES]
_U64 = struct.Struct("<Q")
_SHOWN = 6  # items of an array


class GgufValue:
    """A value of a GGUF file's metadata, with its type: what was read is written byte for byte the same.

    Parameters
    ----------
    value : bool, int, float, str, NumPy scalar, ndarray or sequence of them
        The value.
    type : str, optional
        ``"uint8"``, ``"int8"``, ... ``"float64"``, ``"bool"`` or ``"string"``, with ``[]`` behind it for arrays. By
        default NumPy's own dtype, ``"uint32"`` for an int (or the first of int32, uint64, int64 that holds it) and
        ``"float32"`` for a float.

    Attributes
    ----------
    type : str
        Its type.
    raw : bytes
        The value as a file has it.

    Raises
    ------
    FileError
        When no type, or not the given one, holds the value.

    Examples
    --------
    >>> from kbitcupy.io import GgufValue
    >>> GgufValue(32)
    GgufValue(32, 'uint32')
    >>> GgufValue(["a", "b"]).value
    ['a', 'b']
    """

    __slots__ = ("raw", "type")

    type: str
    raw: bytes

    def __init__(self, value: Any, type: str | None = None):
        if isinstance(value, GgufValue):
            value, type = value.value, type or value.type
        found = _guess(value) if type is None else type
        item = found.removesuffix("[]")
        if item not in _NUMBERS or item == "array":
            known = ", ".join(name for name in _TYPES if name != "array")
            raise FileError(f"type of a GGUF value is {type!r}; it must be one of {known}, with [] for an array")
        self.type = found
        try:
            if item == found:
                self.raw = _pack(value, item)
            else:
                items = list(value) if item == "string" or not isinstance(value, np.ndarray) else value
                packed = b"".join(_pack(each, item) for each in items) if item == "string" else _pack_all(items, item)
                self.raw = struct.pack("<IQ", _NUMBERS[item], len(items)) + packed
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise FileError(f"GGUF cannot store {_brief(repr(value))} as {found}: {error}") from error

    @classmethod
    def _read(cls, type: str, raw: bytes) -> GgufValue:
        """A value of a file."""
        made = object.__new__(cls)
        made.type, made.raw = type, raw
        return made

    @property
    def value(self) -> Any:
        """The value: a bool, int, float or str, a list of str, or a read-only array. Bytes that are no UTF-8 become
        surrogates, as in the names of files.
        """
        item = self.type.removesuffix("[]")
        if item == self.type:
            if item == "string":
                return _unpack_text(self.raw, 0)[0]
            number = np.frombuffer(self.raw, _wire(item))[0].item()
            return bool(number) if item == "bool" else number
        if item != "string":
            array = np.frombuffer(self.raw, _wire(item), offset=12)
            return array != 0 if item == "bool" else array
        return list(self._texts())

    def _texts(self) -> Iterator[str]:
        at = 12
        for _ in range(len(self)):
            text, at = _unpack_text(self.raw, at)
            yield text

    def __len__(self) -> int:
        if not self.type.endswith("[]"):
            raise TypeError(f"len() of a {self.type}")
        return int(_U64.unpack_from(self.raw, 4)[0])

    def __bool__(self) -> bool:
        return len(self) > 0 if self.type.endswith("[]") else bool(self.value)

    def head(self) -> Any:
        """The value, or the first items of an array, as Python has them."""
        if not self.type.endswith("[]"):
            return self.value
        if self.type == "string[]":
            return [text for text, _ in zip(self._texts(), range(_SHOWN), strict=False)]
        item = self.type.removesuffix("[]")
        first = np.frombuffer(self.raw, _wire(item), min(len(self), _SHOWN), 12)
        return (first != 0 if item == "bool" else first).tolist()

    @property
    def json(self) -> Any:
        """JSON that says what it is: the value, or type, length and first items of an array."""
        if not self.type.endswith("[]"):
            return self.value
        return {"type": self.type, "length": len(self), "first": self.head()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GgufValue):
            return NotImplemented
        return self.type == other.type and self.raw == other.raw

    def __hash__(self) -> int:
        return hash((self.type, self.raw))

    def __str__(self) -> str:
        """The value; of an array its first items and its length."""
        if not self.type.endswith("[]"):
            return str(np.float32(self.value) if self.type == "float32" else self.value)
        more = f", ... ({len(self)} items)" if len(self) > _SHOWN else ""
        return f"[{', '.join(map(str, self.head()))}{more}]"

    def __repr__(self) -> str:
        if not self.type.endswith("[]"):
            return f"GgufValue({self.value!r}, {self.type!r})"
        shown = repr(self.head())
        return f"GgufValue({shown[:-1]}{', ...' if len(self) > _SHOWN else ''}], {self.type!r})"


def _wire(item: str) -> np.dtype:
    """The dtype of an item in a file: bytes that are no bool must not become one unseen."""
    return np.dtype("uint8" if item == "bool" else item).newbyteorder("<")


def _guess(value: Any) -> str:
    """The type of a value that brings none."""
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in _NUMBERS:
        if value.ndim > 1:
            raise FileError(f"GGUF's metadata has arrays of one dimension; got one of shape {value.shape}: flatten it")
        return value.dtype.name + "[]" * value.ndim
    if isinstance(value, int):
        for name in ("uint32", "int32", "uint64", "int64"):
            if np.iinfo(name).min <= value <= np.iinfo(name).max:
                return name
    if isinstance(value, float):
        return "float32"
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)) and len(value):
        found = {_guess(each) for each in value}
        if found <= {"uint32", "int32", "uint64", "int64"}:
            low, high = min(value), max(value)
            for name in ("int32", "uint32", "int64", "uint64"):
                if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
                    return name + "[]"
        if len(found) == 1 and not next(iter(found)).endswith("[]"):
            return found.pop() + "[]"
    raise FileError(
        f"GGUF's metadata cannot store {_brief(repr(value))}; it stores bool, int, float, str and arrays of one of them"
    )


def _pack(value: Any, item: str) -> bytes:
    if item == "string":
        if not isinstance(value, str):
            raise TypeError("it is no str")
        data = value.encode("utf-8", "surrogateescape")
        return _U64.pack(len(data)) + data
    return _pack_all([value], item)


def _pack_all(values: Any, item: str) -> bytes:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"it has {array.ndim} dimensions")
    if array.size == 0:
        return b""
    if item == "bool":
        if array.dtype.kind != "b":
            raise TypeError("it is no bool")
        return array.tobytes()
    if array.dtype.kind not in ("fiu" if item.startswith("float") else "iu"):
        raise TypeError(f"it is {array.dtype}")
    if (
        not item.startswith("float")
        and not np.iinfo(item).min <= int(array.min()) <= int(array.max()) <= np.iinfo(item).max
    ):
        raise OverflowError("it is out of range")
    with np.errstate(all="ignore"):  # of what float32 has no number for
        return array.astype(_wire(item)).tobytes()


def _unpack_text(raw: bytes, at: int) -> tuple[str, int]:
    """A text, and where it ends."""
    end = at + 8 + _U64.unpack_from(raw, at)[0]
    return raw[at + 8 : end].decode("utf-8", "surrogateescape"), end


# ---- reading ---------------------------------------------------------------------------------------------------------


class GgufReader(FileReader):
    """A GGUF file, see `FileReader`; its metadata are `GgufValue`s.

    Lengths of a tensor are in NumPy's order, the fastest last. The dtype of an entry is NumPy's name, or the name of a
    type of blocks in `BLOCKS`, or ``"type77"`` of one that is not known.
    """

    kind = "GGUF"

    def _header(self, file: FileIO, size: int) -> tuple[dict[str, Entry], dict[str, int], Mapping[str, Any]]:
        try:
            return _read_header(_Cursor(file, size))
        except ValueError as error:
            raise FileError(f"{self.path} is not a valid GGUF file: {error}") from error

    @property
    def split(self) -> tuple[int, int, int] | None:
        """Number of this part from 0, parts, tensors of all; None of a file that is whole."""
        values = [self.metadata.get(key) for key in SPLIT_KEYS]
        if not isinstance(values[1], GgufValue) or values[1].type.endswith("[]"):
            return None
        if not all(isinstance(value, GgufValue) and type(value.value) is int for value in values):
            raise FileError(f"{self.path}: {', '.join(SPLIT_KEYS)} must be integers, all of them or none")
        no, count, tensors = (value.value for value in values if value is not None)
        return (no, count, tensors) if count > 1 else None


class _Cursor:
    """The header of a file, of which little is in memory at a time."""

    def __init__(self, file: FileIO, size: int):
        self._file, self._size = file, size
        self._start, self._window = 0, b""
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self._size - self.at

    def _see(self, nbytes: int) -> int:
        """Where these bytes are in the window."""
        first = self.at - self._start
        if not 0 <= first <= first + nbytes <= len(self._window):
            self._file.seek(self.at)
            parts, missing = [], min(max(nbytes, _WINDOW), self.left)
            while missing and (part := self._file.read(missing)):
                parts.append(part)
                missing -= len(part)
            self._start, self._window, first = self.at, b"".join(parts), 0
            if len(self._window) < nbytes:
                raise ValueError("it was cut off while it was read")
        return first

    def check(self, nbytes: int, what: str) -> None:
        """Check that the file has so many bytes left."""
        if nbytes > self.left:
            raise ValueError(f"{what} takes {_count(nbytes)} bytes, but {self.left} are left{_CUT}")

    def take(self, nbytes: int, what: str) -> bytes:
        """The next bytes."""
        first = self.at - self._start
        if not 0 <= first <= first + nbytes <= len(self._window):
            self.check(nbytes, what)
            first = self._see(nbytes)
        self.at += nbytes
        return self._window[first : first + nbytes]

    def skip(self, nbytes: int, what: str) -> None:
        """Go on behind the next bytes."""
        self.check(nbytes, what)
        self.at += nbytes

    def number(self, nbytes: int, what: str) -> int:
        """An unsigned number."""
        return int.from_bytes(self.take(nbytes, what), "little")

    def text(self, most: int, what: str) -> str:
        """A short text."""
        length = self.number(8, what)
        if length > most:
            raise ValueError(f"{what} has {_count(length)} bytes; at most {most} are allowed")
        data = self.take(length, what)
        if b"\0" in data:
            raise ValueError(f"{what} {_brief(repr(data))} has a NUL character")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} {_brief(repr(data))} is not UTF-8") from None

    def skip_texts(self, count: int, what: str) -> None:
        """Go on behind so many texts: one look at each, for tokenizers have a quarter of a million."""
        unpack = _U64.unpack_from
        while count:
            self.check(8 * count, what)
            at, end = self._see(8), len(self._window) - 8
            while count and at <= end:
                at += 8 + unpack(self._window, at)[0]
                count -= 1
            self.skip(at + self._start - self.at, what)


def _count(number: int) -> str:
    return str(number) if number < 1 << 64 else "more than 2^64"


def _read_header(cursor: _Cursor) -> tuple[dict[str, Entry], dict[str, int], dict[str, GgufValue]]:
    """Entries in the order of the header, the offset in the file of each one's data, metadata.

    Raises
    ------
    ValueError
        Names what is wrong.
    """
    if cursor.take(4, "its magic") != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.number(4, "its version")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise ValueError(
                "its numbers are big-endian, which is not read: convert it with gguf_convert_endian.py of llama.cpp"
            )
        raise ValueError(f"its version is {version}; versions 2 and 3 are read: convert it with a newer llama.cpp")
    tensors, keys = cursor.number(8, "its number of tensors"), cursor.number(8, "its number of keys")
    # A tensor has a length, dimensions, type and offset, a key a length, a type and a value.
    for what, count, least, most in (("tensors", tensors, 24, _MOST_TENSORS), ("keys", keys, 13, _MOST_KEYS)):
        if count > most:
            raise ValueError(f"it has {count} {what}; at most {most} are read")
        cursor.check(count * least, f"its header of {count} {what}")
    values = _read_values(cursor, keys)

    def value(key: str) -> GgufValue:
        kind, cursor.at, nbytes = values[key]
        return GgufValue._read(kind, cursor.take(nbytes, key))

    end, others = cursor.at, frozenset[int]()
    kind, _, nbytes = values.get(_ARCHITECTURE_KEY, ("", 0, 0))
    if kind == "string" and nbytes < _LONGEST_NAME:
        others = _OTHERS.get(value(_ARCHITECTURE_KEY).value, others)
    cursor.at = end
    infos = _read_infos(cursor, tensors, others)
    end = cursor.at
    alignment = ALIGNMENT
    if ALIGNMENT_KEY in values:
        if values[ALIGNMENT_KEY][0] != "uint32":
            raise ValueError(f"{ALIGNMENT_KEY} is a {values[ALIGNMENT_KEY][0]}; it must be a uint32, a power of two")
        alignment = _alignment({ALIGNMENT_KEY: value(ALIGNMENT_KEY)})
    entries, starts = _place_infos(infos, -(-end // alignment) * alignment, alignment, cursor)
    return entries, starts, {key: value(key) for key in values}  # now that nothing is refused any more


def _alignment(metadata: Mapping[str, GgufValue]) -> int:
    """What data is aligned to."""
    value = metadata.get(ALIGNMENT_KEY)
    if value is None:
        return ALIGNMENT
    if value.type != "uint32" or value.value.bit_count() != 1:
        raise ValueError(f"{ALIGNMENT_KEY} is {_brief(repr(value))}; it must be a uint32, a power of two")
    return int(value.value)


def _read_values(cursor: _Cursor, count: int) -> dict[str, tuple[str, int, int]]:
    """Type, offset and bytes of each key's value."""
    values: dict[str, tuple[str, int, int]] = {}
    texts, total = 0, 0
    for _ in range(count):
        key = cursor.text(_LONGEST_KEY, "a key")
        what = f"key {_brief(repr(key))}"
        if key in values:
            raise ValueError(f"{what} stands twice")
        kind, start = cursor.number(4, what), cursor.at
        suffix = ""
        if kind == _ARRAY:
            kind, length, start, suffix = cursor.number(4, what), cursor.number(8, what), cursor.at - 12, "[]"
            if kind == _ARRAY:
                raise ValueError(f"{what} is an array of arrays, which no reader of GGUF takes")
        else:
            length = 1
        if kind >= len(_TYPES):
            raise ValueError(f"{what} has type {kind}; types are 0 to {len(_TYPES) - 1}")
        if kind == _STRING:
            texts += length
            if texts > _MOST_TEXTS:
                raise ValueError(f"{what}: its metadata has {_count(texts)} texts; at most {_MOST_TEXTS} are read")
            cursor.skip_texts(length, what)
        else:
            cursor.skip(length * _ITEMSIZES[kind], what)
        nbytes = cursor.at - start
        total += nbytes
        if total > _LONGEST_VALUES:
            raise ValueError(f"{what}: its metadata takes {total} bytes; at most {_LONGEST_VALUES} are read")
        values[key] = _TYPES[kind] + suffix, start, nbytes
    return values


class _Info(NamedTuple):
    """What a header says of a tensor: its bytes are None where the type is not known."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int | None
    offset: int


def _read_infos(cursor: _Cursor, count: int, others: frozenset[int]) -> dict[str, _Info]:
    """What is said of each tensor; `others` are types that are none of ggml's."""
    infos: dict[str, _Info] = {}
    for _ in range(count):
        name = cursor.text(_LONGEST_NAME, "the name of a tensor")
        what = f"tensor {name!r}"
        if name in infos:
            raise ValueError(f"{what} stands twice")
        dimensions = cursor.number(4, what)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{what} has {dimensions} dimensions; at most {_MOST_DIMENSIONS} are allowed")
        fields = struct.unpack(f"<{dimensions}QIQ", cursor.take(8 * dimensions + 12, what))
        shape, kind, offset = fields[:dimensions][::-1], fields[-2], fields[-1]
        if math.prod(length or 1 for length in shape) >= _MOST_ELEMENTS:
            raise ValueError(f"{what} has shape {shape}; lengths that are not 0 multiply to less than 2^60")
        dtype, shape, nbytes = _sized(what, shape, kind) if kind not in others else (f"{_UNKNOWN}{kind}", shape, None)
        infos[name] = _Info(dtype, shape, nbytes, offset)
    return infos


def _sized(what: str, shape: tuple[int, ...], kind: int) -> tuple[str, tuple[int, ...], int | None]:
    """dtype, shape and bytes of a tensor of ggml's type `kind`."""
    size = math.prod(shape)
    if kind in _PLAIN_NAMES:
        dtype = _PLAIN_NAMES[kind]
        return dtype, shape, size * _xp.named_dtype(dtype).itemsize
    if kind not in _BLOCK_NAMES:
        return f"{_UNKNOWN}{kind}", shape, None
    dtype = _BLOCK_NAMES[kind]
    blocks = BLOCKS[dtype]
    if not shape or shape[-1] % blocks.block:
        raise ValueError(f"{what} is {dtype} of shape {shape}; rows of {dtype} are whole blocks of {blocks.block}")
    return dtype, shape, size // blocks.block * blocks.nbytes


def _place_infos(
    infos: Mapping[str, _Info], data: int, alignment: int, cursor: _Cursor
) -> tuple[dict[str, Entry], dict[str, int]]:
    """Entries and offsets in the file, of which no two overlap; data begins at byte `data`."""
    nbytes = cursor.left + cursor.at - data  # of the data
    entries: dict[str, Entry] = {}
    starts: dict[str, int] = {}
    order = sorted(infos, key=lambda name: (infos[name].offset, infos[name].nbytes or 0))
    ends: dict[str, int] = {}
    before, end = "", 0
    for number, name in enumerate(order):
        info = infos[name]
        if info.offset % alignment:
            raise ValueError(f"tensor {name!r}: its data begins at byte {info.offset}, no multiple of {alignment}")
        if info.offset < end:
            raise ValueError(
                f"tensor {name!r}: its data begins at byte {info.offset}, but that of {before!r} ends at {end}"
            )
        following = infos[order[number + 1]].offset if number + 1 < len(order) else max(nbytes, info.offset)
        length = following - info.offset if info.nbytes is None else info.nbytes
        if info.offset + length > nbytes:
            raise ValueError(
                f"tensor {name!r}: {_count(length)} bytes at byte {info.offset} are not within the {max(nbytes, 0)} "
                f"bytes of data{_CUT}"
            )
        if length:
            before, end = name, info.offset + length
        ends[name] = length
    for name, info in infos.items():
        entries[name] = Entry(info.dtype, info.shape, ends[name])
        starts[name] = data + info.offset
    return entries, starts


# ---- writing ---------------------------------------------------------------------------------------------------------


class Gguf(Container):
    """Files of ggml and llama.cpp."""

    name, ending, magic = GgufReader.kind, ".gguf", MAGIC

    def open(self, path: str | os.PathLike[str], mapped: bool = True) -> GgufReader:
        return GgufReader(path, mapped)

    def adopt(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {key: as_value(key, value) for key, value in metadata.items()}

    def check(self, entries: Mapping[str, Entry], metadata: Mapping[str, Any]) -> None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not 0 < len(_encoded(key, "metadata key")) <= _LONGEST_KEY or "\0" in key:
                raise FileError(
                    f"metadata has the key {_brief(repr(key))}; it must be a str of 1 to {_LONGEST_KEY} bytes"
                )
            as_value(key, value)
        try:
            _alignment(self.adopt({key: metadata[key] for key in metadata if key == ALIGNMENT_KEY}))
        except ValueError as error:
            raise FileError(str(error)) from error
        for name, entry in entries.items():
            data = _encoded(name, "tensor name")
            if len(data) > _LONGEST_NAME or b"\0" in data:
                raise FileError(
                    f"tensor {_brief(repr(name))}: a name in GGUF has at most {_LONGEST_NAME} bytes and no NUL: "
                    "rename it"
                )
            if len(entry.shape) > _MOST_DIMENSIONS:
                raise FileError(
                    f"tensor {name!r} of shape {entry.shape}: GGUF has at most {_MOST_DIMENSIONS} axes; reshape it"
                )
            type_number(name, entry.dtype)

    @contextlib.contextmanager
    def writing(
        self, target: Path, entries: dict[str, Entry], metadata: Mapping[str, Any], force: bool
    ) -> Iterator[Writer]:
        first, starts, end = _place(entries, self, metadata)
        check_file(target, force)
        with replacing(target, end, force) as file:
            file.write(first)
            yield PlacedWriter(file, entries, starts)
            file.truncate(end)  # zeros behind the last tensor, and between them, which nobody has written


#: The container itself: it has no state.
GGUF = Gguf()


def as_value(key: str, value: Any) -> GgufValue:
    """A value of the metadata, with a type."""
    if isinstance(value, GgufValue):
        return value
    try:
        return GgufValue(value)
    except FileError as error:
        raise FileError(f"metadata key {key!r}: {error}") from error


def type_number(name: str, dtype: str) -> int:
    """ggml's number of an entry's dtype.

    Raises
    ------
    FileError
        When there is none.
    """
    if dtype in PLAIN:
        return PLAIN[dtype]
    if dtype in BLOCKS:
        return BLOCKS[dtype].number
    number = dtype.removeprefix(_UNKNOWN)
    if number != dtype and number.isdecimal():
        return int(number)
    instead = {"uint8": ": store .view(np.int8)", "bool": ": store .astype(np.int8)"}.get(dtype, "")
    raise FileError(
        f"tensor {name!r} has dtype {dtype}, which GGUF cannot store; it stores {', '.join(PLAIN)} and types of blocks"
        f"{instead}"
    )


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise FileError(f"{what} {_brief(repr(text))} is not valid Unicode: {error}") from error


def _place(
    entries: Mapping[str, Entry], container: Gguf, metadata: Mapping[str, Any]
) -> tuple[bytes, dict[str, int], int]:
    """The file's first bytes, up to the data; where each tensor's data begins, in their order; where the file ends."""
    container.check(entries, metadata)
    values = container.adopt(metadata)
    alignment = _alignment(values)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(entries), len(values))]
    for key, value in values.items():
        item = value.type.removesuffix("[]")
        kind = _NUMBERS[item] if item == value.type else _ARRAY
        parts += [_pack(key, "string"), struct.pack("<I", kind), value.raw]
    offset, offsets = 0, {}
    for name, entry in entries.items():
        lengths = len(entry.shape)
        parts += [
            _pack(name, "string"),
            struct.pack(f"<I{lengths}QIQ", lengths, *entry.shape[::-1], type_number(name, entry.dtype), offset),
        ]
        offsets[name] = offset
        offset += -(-entry.nbytes // alignment) * alignment
    first = b"".join(parts)
    first += bytes(-len(first) % alignment)
    return first, {name: len(first) + start for name, start in offsets.items()}, len(first) + offset


# ---- files that are parts of one -------------------------------------------------------------------------------------


def part_of(path: Path) -> tuple[str, int, int] | None:
    """What all parts are called, the number of this one from 1, and how many there are, from the name of a file."""
    found = _PART.fullmatch(path.name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def part_name(stem: str, number: int, count: int) -> str:
    """The name of a part; `number` counts from 1."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def parts_beside(reader: GgufReader) -> Iterator[Path]:
    """All parts of what a file is a part of, in their order; the file alone where it is whole.

    Raises
    ------
    FileError
        When its name does not say which part it is, or says something else.
    """
    split = reader.split
    if split is None:
        yield reader.path
        return
    no, count, _ = split
    named = part_of(reader.path)
    if named is None or named[1:] != (no + 1, count):
        raise FileError(
            f"{reader.path} is part {no + 1} of {count}: give it its name back, which ends in "
            f"{part_name('', no + 1, count)}"
        )
    for number in range(1, count + 1):
        yield reader.path.with_name(part_name(named[0], number, count))


def check_parts(readers: Sequence[GgufReader]) -> None:
    """Check that files are all parts of one, in their order.

    Raises
    ------
    FileError
        When one is not.
    """
    for number, reader in enumerate(readers):
        wanted = number, len(readers)
        if reader.split is None or reader.split[:2] != wanted:
            raise FileError(f"{reader.path} is not part {number + 1} of {len(readers)}: its {SPLIT_NO} says otherwise")
    total, found = readers[0].split[2] if readers[0].split else 0, sum(len(reader.entries) for reader in readers)
    if total != found:
        raise FileError(
            f"{readers[0].path}: {SPLIT_TENSORS} is {total}, but its {len(readers)} parts have {found} tensors: they "
            "are not of one model"
        )


def split_values(no: int, count: int, tensors: int) -> dict[str, GgufValue]:
    """The keys of a part."""
    return {
        SPLIT_NO: GgufValue(no, "uint16"),
        SPLIT_COUNT: GgufValue(count, "uint16"),
        SPLIT_TENSORS: GgufValue(tensors, "int32"),
    }


def _brief(text: str, length: int = 100) -> str:
    """The beginning of what may quote a large part of a file."""
    return text if len(text) <= length else f"{text[:length]}..."
