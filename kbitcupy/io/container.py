"""What a file of tensors is to everything above it: a `Reader`, a `Writer`, and an `Entry` for each tensor.

A `Container` is one kind of file, such as safetensors: it knows where bytes are, and under what names, shapes and
dtypes. Which of them belong together as one compressed tensor is said by a layout (`kbitcupy.io.layouts`). Whoever
opens a checkpoint gets a `Together`: all its files as one reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import mmap
import os
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..backend import xp as _xp
from ..backend.staging import PART_BYTES
from ..errors import FileError
from .atomic import InputChanged, Output, as_path, opened_again

#: NumPy's and ml_dtypes' names of the dtypes that stored tensors may have.
DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

_HASHED_BYTES = 1 << 16  # at either end of a file
_READS_ANYWHERE = hasattr(os, "preadv")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file says about one stored tensor.

    Parameters
    ----------
    dtype : str
        One of `DTYPES`, or the container's own word for data that NumPy cannot hold: such tensors are only copied.
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

    @property
    def numpy_dtype(self) -> np.dtype | None:
        """The dtype as NumPy has it; None where it has none."""
        return _xp.named_dtype(self.dtype) if self.dtype in DTYPES else None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def entry_of(array: Any) -> Entry:
    """The entry of an array, or of anything else with a dtype (or the name of one) and a shape."""
    if isinstance(array.dtype, str):
        name, itemsize = array.dtype, _xp.named_dtype(array.dtype).itemsize
    else:
        name, itemsize = array.dtype.name, array.dtype.itemsize
    return Entry(name, tuple(array.shape), math.prod(array.shape) * itemsize)


# ---- reading -------------------------------------------------------------------------------------------------------


class Reader(ABC):
    """Stored tensors by name, whatever container and however many files they are in.

    Attributes
    ----------
    path : pathlib.Path
        What was opened: for messages.
    metadata : mapping
        What the files say beside their tensors.
    """

    path: Path
    metadata: Mapping[str, Any]

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Names of the stored tensors, file by file in the order of their data."""

    @property
    @abstractmethod
    def files(self) -> Sequence[FileReader]:
        """The files behind it."""

    @abstractmethod
    def file_of(self, name: str) -> FileReader:
        """The file that holds a stored tensor."""

    def entry(self, name: str) -> Entry:
        """What is said about a stored tensor."""
        return self.file_of(name).entries[name]

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a stored tensor, uint8: a read-only view of the file, which is unmapped with the last view of
        any of its tensors, or in memory where the file is not mapped.
        """
        return self.file_of(name).raw(name)

    def read(self, name: str) -> np.ndarray:
        """The bytes of a stored tensor, uint8, in memory."""
        return self.file_of(name).read(name)

    def array(self, name: str, buffer: np.ndarray | None = None) -> np.ndarray:
        """A stored tensor: read-only, a view of the file if that is mapped (a copy where it is not aligned there); in
        uint8 memory of the caller, where it is given.

        Raises
        ------
        FileError
            When NumPy and ml_dtypes have no dtype or no shape for it.
        """
        return self.file_of(name).array(name, buffer)


class FileReader(Reader):
    """One file, checked; its data is mapped into memory, or read, when it is asked for.

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
        All stored tensors, in the order of their data.
    kind : str
        Name of the container.

    Raises
    ------
    FileError
        When the file is missing, or is not of this kind, or lies about its tensors.
    """

    kind: ClassVar[str] = ""

    def __init__(self, path: str | os.PathLike[str], mapped: bool = True):
        self.path = as_path(path, "path")
        self._mapped = mapped
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._reading = threading.Lock()
        with reading(self.path):
            self._file = _open(self.path)
            weakref.finalize(self, self._file.close)
            self._before = self._about()
            self.entries, self._starts, self.metadata = self._header(self._file, self._before[0])

    @abstractmethod
    def _header(self, file: FileIO, size: int) -> tuple[dict[str, Entry], dict[str, int], Mapping[str, Any]]:
        """Entries, the offset of each one's data in the file of `size` bytes, metadata; of which nothing is trusted."""

    @property
    def names(self) -> Collection[str]:
        return self.entries.keys()

    @property
    def files(self) -> Sequence[FileReader]:
        return (self,)

    def file_of(self, name: str) -> FileReader:
        return self

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

    def size_and_time(self) -> tuple[int, int]:
        """Its size and the time of its last change in ns, when it was opened."""
        return self._before

    def identity(self) -> list[Any]:
        """Size, time of the last change, and a hash of both ends of the file: JSON that tells files apart."""
        size, changed = self._before
        ends = hashlib.sha256(self._read_at(0, min(size, _HASHED_BYTES)).data)
        ends.update(self._read_at(max(size - _HASHED_BYTES, 0), min(size, _HASHED_BYTES)).data)
        return [size, changed, ends.hexdigest()]

    def raw(self, name: str) -> np.ndarray:
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
        return self._read_at(self._starts[name], self.entries[name].nbytes)

    def parts(self, name: str, buffers: Sequence[np.ndarray] = ()) -> Iterator[np.ndarray]:
        """The bytes of a stored tensor, part after part, in one buffer or in those of the caller round and round."""
        start, nbytes = self._starts[name], self.entries[name].nbytes
        memory = itertools.cycle(buffers or [np.empty(min(nbytes, PART_BYTES), np.uint8)])
        for begin in range(0, nbytes, PART_BYTES):
            yield self._read_at(start + begin, min(nbytes - begin, PART_BYTES), next(memory))

    def _read_at(self, start: int, nbytes: int, buffer: np.ndarray | None = None) -> np.ndarray:
        found = np.empty(nbytes, np.uint8) if buffer is None else buffer[:nbytes]
        left = found.data
        # Where the system reads at a place that is named, threads do not wait for each other.
        with reading(self.path), contextlib.nullcontext() if _READS_ANYWHERE else self._reading:
            if not _READS_ANYWHERE:
                self._file.seek(start)
            while left.nbytes:
                if _READS_ANYWHERE:
                    count = os.preadv(self._file.fileno(), [left], start + nbytes - left.nbytes)
                else:
                    count = self._file.readinto(left)
                if not count:
                    raise InputChanged(
                        f"{self.path} was cut off while it was read: nothing is kept; wait until it is complete, and "
                        "repeat"
                    )
                left = left[count:]
        return found

    def array(self, name: str, buffer: np.ndarray | None = None) -> np.ndarray:
        entry = self.entries[name]
        dtype = entry.numpy_dtype
        if dtype is None:
            raise FileError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}, which NumPy cannot hold; quantize_file and "
                "dequantize_file copy it byte for byte"
            )
        raw = self.raw(name) if buffer is None else self._read_at(self._starts[name], entry.nbytes, buffer)
        try:
            array = raw.view(dtype).reshape(entry.shape)
        except ValueError as error:
            raise FileError(f"{self.path}: tensor {name!r} of shape {entry.shape}: {error}") from error
        if not array.flags.aligned:
            array = array.copy()
        array.flags.writeable = False
        return array


class Together(Reader):
    """Several files as one.

    Parameters
    ----------
    path : pathlib.Path
        What they are called together.
    files : sequence of FileReader
        The files.

    Raises
    ------
    FileError
        When two files hold a tensor of one name.
    """

    def __init__(self, path: Path, files: Sequence[FileReader]):
        self.path = path
        self._files = tuple(files)
        self.metadata = {key: value for file in files for key, value in file.metadata.items()}
        self._owners: dict[str, FileReader] = {}
        for file in files:
            for name in file.names:
                if name in self._owners:
                    raise FileError(
                        f"{path}: tensor {name!r} is in {self._owners[name].path.name} and {file.path.name}"
                    )
                self._owners[name] = file

    @property
    def names(self) -> Collection[str]:
        return self._owners.keys()

    @property
    def files(self) -> Sequence[FileReader]:
        return self._files

    def file_of(self, name: str) -> FileReader:
        return self._owners[name]

    def without(self, names: Collection[str]) -> Together:
        """The same files without these stored tensors."""
        rest = object.__new__(Together)
        rest.path, rest._files, rest.metadata = self.path, self._files, self.metadata
        rest._owners = {name: file for name, file in self._owners.items() if name not in names}
        return rest


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


def head_of(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file; none of what is no regular file, which `FileReader` refuses."""
    with reading(path):
        if not path.is_file():
            return b""
        with open(path, "rb", buffering=0) as file:
            return file.read(nbytes)


def _open(path: Path) -> FileIO:
    """An open file; it stays this file when another takes its name."""
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise FileError(f"{path} is a directory; pass the file of tensors itself")
    if not stat.S_ISREG(kind):  # opening a pipe would wait for its writer
        raise FileError(f"{path} is not a regular file; pass a file of tensors")
    return open(path, "rb", buffering=0)


# ---- writing -------------------------------------------------------------------------------------------------------


class Writer(ABC):
    """What takes the tensors of a file of known entries, one by one and in any order.

    Attributes
    ----------
    late : dict of str to numpy.ndarray
        Data of entries that say "at most", which waits for the end.
    """

    late: dict[str, np.ndarray]

    @abstractmethod
    def put(self, name: str, data: np.ndarray | Iterator[np.ndarray]) -> None:
        """Take a stored tensor's data, whole or part after part; it must have as many bytes as its entry says."""

    @abstractmethod
    def elsewhere(self, names: Collection[str]) -> Elsewhere:
        """What takes some of these tensors, in another thread or process, as often as that likes."""


class Elsewhere(ABC):
    """A part of the work of a `Writer`, for another thread or process: it can be pickled."""

    @abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[Writer]:
        """What takes the tensors. Its data are on the disk when the block ends, but for those that are late: the
        first writer is given these. To do all of it once more changes nothing.
        """


class PlacedWriter(Writer):
    """Writes tensors where they belong in a file; what is late stays in `late`.

    Parameters
    ----------
    file : Output
        The file.
    entries : mapping of str to Entry
        Its tensors.
    starts : mapping of str to int
        Where the data of each begin.
    """

    def __init__(self, file: Output, entries: Mapping[str, Entry], starts: Mapping[str, int]):
        self._file, self._entries, self._starts = file, entries, starts
        self.late = {}

    def put(self, name: str, data: np.ndarray | Iterator[np.ndarray]) -> None:
        entry = self._entries[name]
        if entry.at_most and isinstance(data, np.ndarray) and data.nbytes <= entry.nbytes:
            self.late[name] = raw_bytes(data)
            return
        nbytes = 0
        self._file.seek(self._starts[name])
        for part in parts_of(data):
            nbytes += part.nbytes
            if nbytes <= entry.nbytes:
                self._file.write(part.data)
        if nbytes != entry.nbytes:
            raise FileError(f"tensor {name!r} has {nbytes} bytes; {entry.nbytes} were announced")

    def elsewhere(self, names: Collection[str]) -> Elsewhere:
        return _Placed(
            self._file.path,
            self._file.target,
            {name: self._entries[name] for name in names},
            {name: self._starts[name] for name in names},
        )


@dataclass(frozen=True)
class _Placed(Elsewhere):
    """Places in a file that is being written under another name than its own."""

    path: Path
    target: Path
    entries: dict[str, Entry]
    starts: dict[str, int]

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer]:
        with opened_again(self.path, self.target) as file:
            yield PlacedWriter(file, self.entries, self.starts)


class Container(ABC):
    """A kind of file that holds named tensors.

    Attributes
    ----------
    name : str
        What it is called in messages.
    ending : str
        What names of its files end in.
    magic : bytes
        What its files begin with; nothing where there is no such thing.
    """

    name: ClassVar[str]
    ending: ClassVar[str] = ""
    magic: ClassVar[bytes] = b""

    @abstractmethod
    def open(self, path: str | os.PathLike[str], mapped: bool = True) -> FileReader:
        """Open a file of this kind, see `FileReader`."""

    def is_one(self, head: bytes) -> bool:
        """Whether a file that begins so is of this kind."""
        return head.startswith(self.magic)

    def adopt(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The metadata of a file of any kind, as far as this kind can hold it."""
        return dict(metadata)

    @abstractmethod
    def check(self, entries: Mapping[str, Entry], metadata: Mapping[str, Any]) -> None:
        """Check that a file of this kind can hold these tensors and this metadata.

        Raises
        ------
        FileError
            When a dtype, a name or an entry of the metadata cannot be stored.
        """

    @abstractmethod
    def writing(
        self, target: Path, entries: dict[str, Entry], metadata: Mapping[str, Any], force: bool
    ) -> contextlib.AbstractContextManager[Writer]:
        """Write a file beside `target`, which takes its place when the block ends without an error.

        An entry that says "at most" becomes what was put, in `entries` as well; such data should be small, for it is
        kept until the end.
        """


def raw_bytes(array: Any) -> np.ndarray:
    """The bytes of an array as files store them, uint8: C order, little-endian."""
    plain = np.asarray(array)
    little = plain.astype(plain.dtype.newbyteorder("<"), order="C", copy=False)
    return little.reshape(-1).view(np.uint8)


def parts_of(data: np.ndarray | Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The bytes to store, as `FileReader.parts` cuts them."""
    if not isinstance(data, np.ndarray):
        yield from data
        return
    raw = raw_bytes(data)
    for begin in range(0, raw.nbytes, PART_BYTES):
        yield raw[begin : begin + PART_BYTES]


# ---- files that are finished already ---------------------------------------------------------------------------------


class Unlike(FileError):
    """A file is not what it was compared with."""


def finished(container: Container, path: Path, entries: dict[str, Entry], metadata: Mapping[str, Any]) -> FileReader:
    """A file that was written before, which must say this of its tensors; what turned out shorter is put into
    `entries`.

    Raises
    ------
    Unlike
        When it says anything else.
    """
    found = container.open(path, mapped=False)
    same = dict(found.metadata) == dict(metadata) and found.entries.keys() == entries.keys()
    if not same or not all(_is_one_of(found.entries[name], entry) for name, entry in entries.items()):
        raise Unlike(f"{path} is not what this command writes: other tensors, or other metadata")
    entries.update(found.entries)
    return found


def _is_one_of(found: Entry, wanted: Entry) -> bool:
    if wanted.at_most:
        return found == Entry(wanted.dtype, (found.nbytes,), found.nbytes) and found.nbytes <= wanted.nbytes
    return found == wanted


class Comparison(Writer):
    """What takes tensors as a `Writer` does, and compares them with a finished file.

    Raises
    ------
    Unlike
        When the entries are others, or later when a tensor is.
    """

    def __init__(self, container: Container, path: Path, entries: dict[str, Entry], metadata: Mapping[str, Any]):
        self._again = _Compared(container, path, entries, metadata)
        self._file = finished(container, path, entries, metadata)
        self.late = {}

    def elsewhere(self, names: Collection[str]) -> Elsewhere:
        return self._again

    def put(self, name: str, data: np.ndarray | Iterator[np.ndarray]) -> None:
        found = self._file.parts(name)
        for part in parts_of(data):
            if not np.array_equal(part, next(found, np.empty(0, np.uint8))):
                raise Unlike(f"{self._file.path} is not what this command writes: tensor {name!r} has other bytes")


@dataclass(frozen=True)
class _Compared(Elsewhere):
    """A comparison with a file that is there."""

    container: Container
    path: Path
    entries: dict[str, Entry]
    metadata: Mapping[str, Any]

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer]:
        yield Comparison(self.container, self.path, dict(self.entries), self.metadata)
