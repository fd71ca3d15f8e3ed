"""One safetensors file: checked, mapped into memory, and written tensor by tensor.

A compressed tensor ``w`` is stored as one tensor for each of its planes, ``w.packed``, ``w.absmax``, ...; the metadata
key ``kbitcupy`` holds ``{"version": 1, "written_by": ..., "tensors": {"w": configuration, ...}}`` as JSON. Every other
tensor and metadata key stays as it is, so other tools read these files as well.

The safetensors library checks a file before anything is read from it. What this module adds is a check of what the
library lets pass (names that stand twice), errors that name the tensor, access to the bytes of any dtype, NumPy's own
or not, and a writer that needs one tensor at a time in memory.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import hashlib
import json
import math
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from .._version import __version__
from ..array import QuantizedArray, read_config
from ..backend import xp as _xp
from ..errors import FileError
from ..formats.base import Format
from .atomic import InputChanged, Output, as_path, check_file, replacing
from .kinds import HEAD, what_it_is

#: Metadata key of the compressed tensors' configurations.
METADATA_KEY = "kbitcupy"
#: Version of what stands under `METADATA_KEY`; what an older version wrote is still read.
FILE_VERSION = 1
#: Tensors with fewer elements are copied: compressing them saves nothing.
MIN_SIZE = 512

#: safetensors' dtype codes by NumPy (or ml_dtypes) dtype name; the codes without a NumPy dtype are only copied.
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
#: NumPy (or ml_dtypes) dtype names by safetensors' codes.
NAMES = {code: name for name, code in CODES.items()}
_COMPRESSIBLE = tuple(CODES[name] for name in _xp.FLOAT_DTYPES)

_HEADER_KEY = "__metadata__"  # reserved in the header: no tensor can have this name
_LONGEST_HEADER = 100_000_000  # the library's own limit
_LONGEST_JSON = 100_000_000
# The library reads hostile JSON in little memory; Python does not, and gets longer headers only when they are good.
_LONGEST_DIAGNOSED = 1 << 20
_CUT = "; if it is cut off, download or copy it again"
_MOST_BYTES = 1 << 63  # of a tensor
# What a short text of JSON becomes in memory is bounded by its values. A header has nine for a tensor of two
# dimensions, and a compressed tensor some forty: this is room for 100,000 of them in one file.
_MOST_VALUES = 1 << 22
_DEEPEST = 100  # levels of JSON; Python's own limit would be found while it is written
_COPIED_BYTES = 1 << 23  # of a tensor that is copied, at a time
_HASHED_BYTES = 1 << 20  # at either end of a file


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file's header says about one tensor.

    Parameters
    ----------
    dtype : str
        safetensors' code of the dtype.
    shape : tuple of int
        Shape of the tensor.
    nbytes : int
        Bytes of its data.
    at_most : bool, default False
        Of a file to write: whether the data may turn out shorter than this, in one dimension.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    at_most: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Compressed(NamedTuple):
    """What a file says about one compressed tensor."""

    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype


# ---- reading -------------------------------------------------------------------------------------------------------


class SourceFile:
    """A safetensors file, checked; its data is mapped into memory, or read, when it is asked for.

    Parameters
    ----------
    path : path_like
        The file.
    mapped : bool, default True
        Whether arrays are views of the file. Those that are read instead survive a file that is cut while they are in
        use, which ends a process that looks at a view.

    Attributes
    ----------
    entries : dict of str to Entry
        All stored tensors, planes included, in the order of their data.
    metadata : dict of str to str
        The file's metadata without the key of kbitcupy.
    all_metadata : dict of str to str
        The same with it.
    configs : dict of str to dict, or None
        Configurations of the compressed tensors, by name; None in a file that kbitcupy did not write.
    written_by : str or None
        Which kbitcupy wrote the file.
    compressed : dict of str to Compressed
        The same configurations, understood and checked against the planes.
    plain : list of str
        Names of the stored tensors that are no planes.

    Raises
    ------
    FileError
        When the file is missing, is not a safetensors file, or describes compressed tensors that it does not hold.
    """

    def __init__(self, path: str | os.PathLike[str], mapped: bool = True):
        self.path = as_path(path, "path")
        self._mapped = mapped
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._reading = threading.Lock()
        with reading(self.path):
            self._file = _open(self.path)
            weakref.finalize(self, self._file.close)
            self._before = self._about()
            self.entries, self._starts, self.metadata = _header(self._file, self.path, self._before[0])
        self.all_metadata = dict(self.metadata)
        stored = _read_stored(self.metadata.pop(METADATA_KEY, None), self.path)
        self.configs: dict[str, Any] | None = None if stored is None else stored["tensors"]
        self.written_by = _writer(stored)
        self.compressed: dict[str, Compressed] = {}
        planes: set[str] = set()
        for name, config in (self.configs or {}).items():
            try:
                self.compressed[name], owned = self._describe(name, config)
            except FileError:
                raise
            except Exception as error:  # a third party's format may raise anything on options that it did not write
                writer = f" (written by {self.written_by})" if self.written_by else ""
                raise FileError(f"{self.path}: compressed tensor {name!r}{writer}: {_brief(error)}") from error
            planes.update(owned)
        self.plain = [name for name in self.entries if name not in planes]

    def _describe(self, name: str, config: Any) -> tuple[Compressed, list[str]]:
        """A configuration, of which nothing can be trusted, and the names of its planes."""
        if name in self.entries:
            raise FileError(f"{self.path}: tensor {name!r} is stored twice, as it is and compressed; rename one")
        found = Compressed(*read_config(config))
        np.broadcast_to(np.zeros((), found.dtype), found.shape)  # refuses what no array can have, and takes no memory
        names = []
        stored_names = {plane: f"{name}.{plane}" for plane in found.format.planes(found.shape)}
        for plane, stored in stored_names.items():
            if stored not in self.entries:
                raise FileError(
                    f"{self.path}: compressed tensor {name!r} lacks its plane {plane!r}: there is no tensor {stored!r} "
                    "in the file; compress it again"
                )
        shapes = {plane: self.entries[stored].shape for plane, stored in stored_names.items()}
        specs = found.format.planes_of(found.shape, found.format.lead_of(found.shape, shapes) or 0)
        for plane, spec in specs.items():
            stored = stored_names[plane]
            wanted = entry_of(_xp.named_dtype(spec.dtype), tuple(spec.shape), f"plane {plane!r}")
            if self.entries[stored] != wanted:
                raise FileError(
                    f"{self.path}: compressed tensor {name!r}: plane {plane!r} is {self.entries[stored]}, but "
                    f"{found.format} of shape {found.shape} needs {wanted}; compress it again"
                )
            names.append(stored)
        return found, names

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def _about(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self) -> None:
        """Check that nobody has written to the file since it was opened.

        Raises
        ------
        InputChanged
            When its size or the time of its last change is another.
        """
        with reading(self.path):
            changed = self._about() != self._before
        if changed:
            raise InputChanged(
                f"{self.path} was changed while it was read: nothing is kept; wait until it is complete, and repeat"
            )

    def identity(self) -> list[Any]:
        """Size, time of the last change, and a hash of both ends of the file: JSON that tells files apart."""
        size, changed = self._before
        ends = hashlib.sha256(self._read_at(0, min(size, _HASHED_BYTES)).data)
        ends.update(self._read_at(max(size - _HASHED_BYTES, 0), min(size, _HASHED_BYTES)).data)
        return [size, changed, ends.hexdigest()]

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a stored tensor, uint8: a read-only view of the file, which is unmapped with the last view of
        any of its tensors, or in memory where the file is not mapped.
        """
        nbytes = self.entries[name].nbytes
        if not nbytes or not self._mapped:
            return self.read(name)
        with reading(self.path):
            return np.frombuffer(self._map(), np.uint8, nbytes, self._starts[name])

    def _map(self) -> mmap.mmap:
        """The mapping of the whole file that all views share: each mapping holds a descriptor."""
        size = self._before[0]
        if self._about()[0] < size:
            raise ValueError(f"it has fewer than its {size} bytes now")
        mapped = None if self._mapping is None else self._mapping()
        if mapped is None:
            mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)
            self._mapping = weakref.ref(mapped)
        return mapped

    def read(self, name: str) -> np.ndarray:
        """The bytes of a stored tensor, uint8, in memory."""
        return self._read_at(self._starts[name], self.entries[name].nbytes)

    def parts(self, name: str) -> Iterator[np.ndarray]:
        """The bytes of a stored tensor, part after part in one buffer."""
        start, nbytes = self._starts[name], self.entries[name].nbytes
        buffer = np.empty(min(nbytes, _COPIED_BYTES), np.uint8)
        for begin in range(0, nbytes, _COPIED_BYTES):
            yield self._read_at(start + begin, min(nbytes - begin, _COPIED_BYTES), buffer)

    def _read_at(self, start: int, nbytes: int, buffer: np.ndarray | None = None) -> np.ndarray:
        found = np.empty(nbytes, np.uint8) if buffer is None else buffer[:nbytes]
        left = found.data
        with reading(self.path), self._reading:
            self._file.seek(start)
            while left.nbytes:
                count = self._file.readinto(left)
                if not count:
                    raise InputChanged(
                        f"{self.path} was cut off while it was read: nothing is kept; wait until it is complete, and "
                        "repeat"
                    )
                left = left[count:]
        return found

    def array(self, name: str, buffer: np.ndarray | None = None) -> np.ndarray:
        """A stored tensor: read-only, a view of the file if that is mapped (a copy where it is not aligned there); in
        uint8 memory of the caller, where it is given.

        Raises
        ------
        FileError
            When NumPy and ml_dtypes have no dtype or no shape for it.
        """
        entry = self.entries[name]
        if entry.dtype not in NAMES:
            raise FileError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}, which NumPy cannot hold; quantize_file and "
                "dequantize_file copy it byte for byte"
            )
        raw = self.raw(name) if buffer is None else self._read_at(self._starts[name], entry.nbytes, buffer)
        try:
            array = raw.view(_xp.named_dtype(NAMES[entry.dtype])).reshape(entry.shape)
        except ValueError as error:
            raise FileError(f"{self.path}: tensor {name!r} of shape {entry.shape}: {error}") from error
        if not array.flags.aligned:
            array = array.copy()
        array.flags.writeable = False
        return array

    def quantized(self, name: str) -> QuantizedArray:
        """A compressed tensor; its planes are what `array` gives."""
        format, shape, dtype = self.compressed[name]
        planes = {plane: self.array(f"{name}.{plane}") for plane in format.planes(shape)}
        return QuantizedArray(format, planes, shape, dtype)

    def compressible(self, min_size: int = MIN_SIZE, keep: Iterable[str] = (), again: bool = False) -> list[str]:
        """Names of the float tensors of at least two dimensions and `min_size` elements that no `keep` matches; with
        `again` also of those that are compressed already.
        """
        patterns = tuple(keep)
        shapes = {name: self.entries[name].shape for name in self.plain if self.entries[name].dtype in _COMPRESSIBLE}
        if again:
            shapes.update((name, found.shape) for name, found in self.compressed.items())
        return [
            name
            for name, shape in shapes.items()
            if len(shape) >= 2
            and math.prod(shape) >= max(min_size, 1)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the file system refuses in this block is an error of this input."""
    try:
        yield
    except FileNotFoundError as error:
        hint = "; standard input is not read: save it to a file first" if str(path) == "-" else ""
        raise FileError(f"{path} does not exist{hint}") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} cannot be read: {error}; was it changed meanwhile?") from error


def _open(path: Path) -> FileIO:
    """An open file; it stays this file when another takes its name."""
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise FileError(f"{path} is a directory; pass the .safetensors file itself")
    if not stat.S_ISREG(kind):  # opening a pipe would wait for its writer
        raise FileError(f"{path} is not a regular file; pass a .safetensors file")
    return open(path, "rb", buffering=0)


def read_json(text: bytes | str) -> Any:
    """JSON of a stranger.

    Raises
    ------
    ValueError
        When it is not JSON, has too many values or nests too deep, or an object has a key twice: readers differ in
        which one they take.
    """
    if len(text) > _MOST_VALUES:
        _check_values(_count_values(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text))

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"key {twice!r} stands twice in one object")
        return found

    try:
        found = json.loads(text, object_pairs_hook=without_duplicates)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(_DEEPEST):
        inside = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inside for value in values if isinstance(value, (dict, list))]
    if level:
        raise ValueError(f"it nests too deep: more than {_DEEPEST} levels")
    return found


def read_json_file(path: str | os.PathLike[str]) -> Any:
    """A file of JSON of a stranger.

    Raises
    ------
    OSError
        When it cannot be read.
    ValueError
        As `read_json`, and when it is too long.
    """
    with open(path, "rb") as file:
        text = file.read(min(os.fstat(file.fileno()).st_size, _LONGEST_JSON) + 1)
    if len(text) > _LONGEST_JSON:
        raise ValueError(f"it is longer than {_LONGEST_JSON} bytes")
    return read_json(text)


def _count_values(text: bytes) -> int:
    """How many values a JSON text has, or more: commas and brackets of strings count as well."""
    return sum(map(text.count, (b",", b"[", b"{")))


def _check_values(count: int) -> None:
    if count > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES} values, which would take gigabytes of memory; use shards")


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
        if length > _MOST_VALUES:
            _check_values(_count_ahead(file, length))
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
        count += _count_values(part)
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
    entry = Entry(dtype, tuple(shape), offsets[1] - offsets[0])
    if dtype in NAMES:
        expected = _size(shape) * _xp.named_dtype(NAMES[dtype]).itemsize
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


def _read_stored(text: str | None, path: Path) -> dict[str, Any] | None:
    """What stands under `METADATA_KEY`."""
    if text is None:
        return None
    try:
        stored = read_json(text)
    except ValueError as error:
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} is not JSON: {_brief(error)}") from error
    version = stored.get("version") if isinstance(stored, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} has no version: it was not written by kbitcupy")
    if version > FILE_VERSION:
        raise FileError(
            f"{path}: written by {_writer(stored) or 'a newer kbitcupy'}, needs one that reads file version {version}; "
            f"this is kbitcupy {__version__}, which reads up to {FILE_VERSION}: upgrade it"
        )
    if not isinstance(stored.get("tensors"), dict):
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} lists no tensors")
    return dict(stored)


def _writer(stored: Mapping[str, Any] | None) -> str | None:
    writer = (stored or {}).get("written_by")
    return _brief(writer) if isinstance(writer, str) else None


# ---- writing -------------------------------------------------------------------------------------------------------


def entry_of(dtype: np.dtype, shape: tuple[int, ...], owner: str) -> Entry:
    """The header's entry for an array.

    Raises
    ------
    FileError
        When safetensors has no such dtype.
    """
    code = CODES.get(dtype.name)
    if code is None:
        raise FileError(f"{owner} has dtype {dtype.name}, which safetensors cannot store; it stores {', '.join(CODES)}")
    return Entry(code, shape, math.prod(shape) * dtype.itemsize)


def plane_entries(
    name: str, format: Format, shape: tuple[int, ...], taken: Iterable[str], lead: int = 0
) -> dict[str, Entry]:
    """The entries of a compressed tensor's planes.

    Raises
    ------
    FileError
        When one would get a name that is `taken`.
    """
    entries: dict[str, Entry] = {}
    for plane, spec in format.planes_of(shape, lead).items():
        stored = f"{name}.{plane}"
        if stored in taken:
            raise FileError(
                f"plane {plane!r} of tensor {name!r} would be stored as {stored!r}, but that is the name of "
                f"another tensor: rename one of them, or keep {name!r} as it is"
            )
        entries[stored] = entry_of(_xp.named_dtype(spec.dtype), tuple(spec.shape), f"plane {stored!r}")
    return entries


def with_configs(metadata: Mapping[str, str], configs: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a file of compressed tensors."""
    stored = {"version": FILE_VERSION, "written_by": f"kbitcupy {__version__}", "tensors": configs}
    return {**metadata, METADATA_KEY: json.dumps(stored, separators=(",", ":"))}


class Layout:
    """How compressed tensors are stored: kbitcupy's own way. Other projects' ways are subclasses."""

    def entries(
        self, name: str, format: Format, shape: tuple[int, ...], dtype: np.dtype, taken: Iterable[str], lead: int = 0
    ) -> dict[str, Entry]:
        """The stored tensors that a compressed one becomes, a stack where `lead` of its lengths count members.

        Raises
        ------
        FileError
            When one would get a name that is `taken`, or this layout cannot hold the format.
        """
        return plane_entries(name, format, shape, taken, lead)

    def arrays(self, name: str, q: QuantizedArray) -> dict[str, np.ndarray]:
        """Their data, in host memory."""
        return {f"{name}.{plane}": _xp.to_device(array, "cpu") for plane, array in q.planes.items()}

    def metadata(
        self, metadata: Mapping[str, str], before: Mapping[str, Any], configs: Mapping[str, Any]
    ) -> dict[str, str]:
        """The file's metadata: its own, and configurations of tensors compressed before and now."""
        return with_configs(metadata, {**before, **configs})


def _layout(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes, up to the data, and where each tensor's data begins in the file.

    Wider dtypes come first, so every tensor is aligned to its dtype without gaps, which the format forbids. What may
    turn out shorter comes last.
    """

    def order(name: str) -> tuple[bool, float, str]:
        entry = entries[name]
        return entry.at_most, (-8 * entry.nbytes / entry.size if entry.size else -math.inf), name

    header: dict[str, Any] = {_HEADER_KEY: dict(metadata)} if metadata else {}
    starts = {}
    end = 0
    for name in sorted(entries, key=order):
        if name == _HEADER_KEY:
            raise FileError(f"a tensor is named {name!r}, which safetensors reserves: rename it")
        entry = entries[name]
        starts[name] = end
        end += entry.nbytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [starts[name], end]}
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FileError(f"a tensor name or metadata text is not valid Unicode: {error}") from error
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise FileError(f"the header would take {len(text)} bytes; safetensors allows {_LONGEST_HEADER}: use shards")
    if len(text) > _MOST_VALUES:
        try:
            _check_values(_count_values(text))
        except ValueError as error:
            raise FileError(f"the header is one that kbitcupy would not read: {error}") from error
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


#: Takes a stored tensor's name and its data, whole or part after part.
Put = Callable[[str, np.ndarray | Iterator[np.ndarray]], None]


@contextlib.contextmanager
def writing(target: Path, entries: dict[str, Entry], metadata: Mapping[str, str], force: bool) -> Iterator[Put]:
    """Write a file of known layout; the tensors come one by one, in any order.

    Yields
    ------
    callable
        ``put(name, data)``; the data must have as many bytes as its entry says. An entry that says "at most" becomes
        what was put, and such data should be small: it is kept until the end.
    """
    first, starts = _layout(entries, metadata)
    check_file(target, force)
    with replacing(target, len(first) + sum(entry.nbytes for entry in entries.values()), force) as file:
        file.write(first)
        late: dict[str, np.ndarray] = {}

        def put(name: str, data: np.ndarray | Iterator[np.ndarray]) -> None:
            entry = entries[name]
            if entry.at_most and isinstance(data, np.ndarray) and data.nbytes <= entry.nbytes:
                late[name] = _raw(data)
                return
            nbytes = 0
            file.seek(starts[name])
            for part in _parts(data):
                nbytes += part.nbytes
                if nbytes <= entry.nbytes:
                    file.write(part.data)
            if nbytes != entry.nbytes:
                raise FileError(f"tensor {name!r} has {nbytes} bytes; {entry.nbytes} were announced")

        yield put
        if late:
            for name, raw in late.items():
                entries[name] = Entry(entries[name].dtype, (raw.nbytes,), raw.nbytes)
            _write_late(file, len(first), entries, metadata, late)


def _parts(data: np.ndarray | Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The bytes to store, as `SourceFile.parts` cuts them."""
    if not isinstance(data, np.ndarray):
        yield from data
        return
    raw = _raw(data)
    for begin in range(0, raw.nbytes, _COPIED_BYTES):
        yield raw[begin : begin + _COPIED_BYTES]


class Unlike(FileError):
    """A file is not what it was compared with."""


def written(path: Path, entries: dict[str, Entry], metadata: Mapping[str, str]) -> SourceFile:
    """A finished file, which must be of this layout; what turned out shorter is put into `entries`.

    Raises
    ------
    Unlike
        When its header says anything else.
    """
    found = SourceFile(path, mapped=False)
    same = found.all_metadata == dict(metadata) and found.entries.keys() == entries.keys()
    if not same or not all(_fits(found.entries[name], entry) for name, entry in entries.items()):
        raise Unlike(f"{path} is not what this command writes: other tensors, or other metadata")
    entries.update(found.entries)
    return found


def _fits(found: Entry, wanted: Entry) -> bool:
    if wanted.at_most:
        return found == Entry(wanted.dtype, (found.nbytes,), found.nbytes) and found.nbytes <= wanted.nbytes
    return found == wanted


def comparing(path: Path, entries: dict[str, Entry], metadata: Mapping[str, str]) -> Put:
    """What takes tensors like the ``put`` of `writing`, and compares them with a finished file.

    Raises
    ------
    Unlike
        When the layout is another, or later when a tensor is.
    """
    file = written(path, entries, metadata)

    def put(name: str, data: np.ndarray | Iterator[np.ndarray]) -> None:
        found = file.parts(name)
        for part in _parts(data):
            if not np.array_equal(part, next(found, empty)):
                raise Unlike(f"{path} is not what this command writes: tensor {name!r} has other bytes")

    empty = np.empty(0, np.uint8)
    return put


def _write_late(
    file: Output,
    first_nbytes: int,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, str],
    late: Mapping[str, np.ndarray],
) -> None:
    """Write data whose length was not known, and the header again: shorter, with spaces to the same length."""
    first, starts = _layout({name: replace(entry, at_most=name in late) for name, entry in entries.items()}, metadata)
    spare = first_nbytes - len(first)
    file.seek(0)
    file.write((first_nbytes - 8).to_bytes(8, "little") + first[8:] + b" " * spare)
    for name, raw in late.items():
        file.seek(starts[name] + spare)
        file.write(raw.data)
    file.truncate(first_nbytes + sum(entry.nbytes for entry in entries.values()))


def _raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array as safetensors stores them: C order, little-endian."""
    plain = np.asarray(array)
    little = plain.astype(plain.dtype.newbyteorder("<"), order="C", copy=False)
    return little.reshape(-1).view(np.uint8)
