"""NumPy's own files as input: ``.npy``, one array, and ``.npz``, a zip archive of such.

No pickle is read: arrays of objects are refused, and so are dtypes that no file here stores (text, structures, dates).
What lies in a file as a tensor does, in C order, little-endian and not compressed, is read in place like that of a
safetensors file; all else is put into that form when it is asked for.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ..errors import FileError
from .container import DTYPES, Container, Entry, FileReader, Writer, parts_of, raw_bytes, reading

_SUFFIX, _MAGIC = ".npy", b"\x93NUMPY"
#: Bytes of the length of a header, by version.
_LENGTHS = {1: 2, 2: 4, 3: 4}
_MOST_BYTES = 1 << 63
# As NumPy's own limit: what is longer takes Python's parser a long time.
_LONGEST_HEADER = 10_000
_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = 30
# What the library says of members that are damaged, encrypted or compressed in a way that it does not know.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


class _Found(NamedTuple):
    """What the header of an array says."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    length: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether the data lie as those of a tensor do."""
        little = self.dtype == self.dtype.newbyteorder("<")
        return little and not (self.fortran and len(self.shape) > 1)


def _read_header(file: IO[bytes], where: str) -> _Found:
    """The header of an array, of which nothing can be trusted."""
    try:
        shape, fortran, dtype, length = _parsed(file)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FileError(f"{where} is not a valid .npy file: {str(error)[:200]}") from error
    if dtype.hasobject:
        raise FileError(f"{where} holds Python objects, which are a pickle, and never read: save numbers")
    if dtype.name not in DTYPES:
        raise FileError(
            f"{where} is of dtype {str(dtype)[:100]}; read are {', '.join(DTYPES[:9])}, float16, float32, float64 and "
            "complex64: save the other arrays to a file of their own (bfloat16, which NumPy writes without its name, "
            "with kb.io.save)"
        )
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize >= _MOST_BYTES:
        raise FileError(f"{where} is of shape {str(shape)[:100]}, which no array has")
    return _Found(dtype, shape, fortran, length)


def _parsed(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, order and dtype, and the bytes before the data.

    Raises
    ------
    Exception
        Of many kinds, when it is no header.
    """
    head = file.read(8)
    if len(head) < 8 or not head.startswith(_MAGIC):
        raise ValueError("it does not begin as one")
    if head[6] not in _LENGTHS:
        raise ValueError(f"its version is {head[6]}.{head[7]}; known are 1.0, 2.0 and 3.0")
    width = _LENGTHS[head[6]]
    length = int.from_bytes(file.read(width), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"it announces a header of {length} bytes; read are at most {_LONGEST_HEADER}")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends within its header")
    found = ast.literal_eval(text.decode("latin1" if head[6] < 3 else "utf-8").strip())
    if not isinstance(found, dict) or found.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header is no dict of descr, fortran_order and shape")
    descr, fortran, shape = (found[key] for key in ("descr", "fortran_order", "shape"))
    if not isinstance(shape, tuple) or not all(type(each) is int for each in shape) or not isinstance(fortran, bool):
        raise ValueError(f"shape is {str(shape)[:100]}, fortran_order {str(fortran)[:100]}")
    if not isinstance(descr, str):
        raise ValueError(f"its dtype is a structure, {str(descr)[:100]}: save each of its fields as an array")
    return shape, fortran, np.dtype(descr), 8 + width + length


class _ArraysReader(FileReader):
    """Arrays of NumPy, see `FileReader`; those that do not lie in place are put into C order when they are read."""

    _converted: Mapping[str, Callable[[], np.ndarray]]

    def raw(self, name: str) -> np.ndarray:
        return self.read(name) if name in self._converted else super().raw(name)

    def read(self, name: str) -> np.ndarray:
        if name not in self._converted:
            return super().read(name)
        with reading(self.path), self._reading:
            return raw_bytes(self._converted[name]())

    def parts(self, name: str, buffers: Sequence[np.ndarray] = ()) -> Iterator[np.ndarray]:
        return parts_of(self.read(name)) if name in self._converted else super().parts(name, buffers)

    def array(self, name: str, buffer: np.ndarray | None = None) -> np.ndarray:
        return super().array(name, None if name in self._converted else buffer)


def _filled(file: IO[bytes], found: _Found, where: str) -> np.ndarray:
    """The array whose data a file is at the beginning of."""
    raw = np.empty(found.nbytes, np.uint8)
    left = raw.data
    try:
        while left.nbytes:
            part = file.read(min(left.nbytes, 1 << 20))
            if not part:
                raise FileError(f"{where} is cut off: download or copy it again")
            left[: len(part)] = part
            left = left[len(part) :]
    except _DAMAGED as error:
        raise FileError(f"{where} cannot be unpacked: {str(error)[:200]}") from error
    return raw.view(found.dtype).reshape(found.shape, order="F" if found.fortran else "C")


def _from(file: FileIO, found: _Found, where: str) -> np.ndarray:
    """The array of a file of its own."""
    file.seek(found.length)
    return _filled(file, found, where)


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, found: _Found, where: str) -> np.ndarray:
    """The array of a member."""
    try:
        with archive.open(info) as member:
            member.read(found.length)
            return _filled(member, found, where)
    except _DAMAGED as error:
        raise FileError(f"{where} cannot be unpacked: {str(error)[:200]}") from error


class NpyReader(_ArraysReader):
    """A ``.npy`` file; its array has the name of the file, without the ending."""

    kind = "npy"

    def _header(self, file: FileIO, size: int) -> tuple[dict[str, Entry], dict[str, int], Mapping[str, Any]]:
        found = _read_header(file, str(self.path))
        if found.length + found.nbytes != size:
            raise FileError(
                f"{self.path} has {size} bytes, but {found.dtype} of shape {found.shape} takes "
                f"{found.length + found.nbytes}: download or copy it again"
            )
        name = self.path.name.removesuffix(_SUFFIX) or "array"
        self._converted = {} if found.in_place else {name: functools.partial(_from, file, found, str(self.path))}
        dtype = found.dtype.name
        return {name: Entry(dtype, found.shape, found.nbytes)}, {name: found.length}, {}


class NpzReader(_ArraysReader):
    """A ``.npz`` file; its arrays have the names that `numpy.load` gives them."""

    kind = "npz"

    def _header(self, file: FileIO, size: int) -> tuple[dict[str, Entry], dict[str, int], Mapping[str, Any]]:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
            raise FileError(f"{self.path} is not a valid .npz file: {str(error)[:200]}") from error
        entries: dict[str, Entry] = {}
        starts: dict[str, int] = {}
        converted: dict[str, Callable[[], np.ndarray]] = {}
        for info in archive.infolist():
            where = f"{self.path}: {info.filename[:200]!r}"
            name = info.filename.removesuffix(_SUFFIX)
            if name == info.filename or not name:
                raise FileError(f"{where} is no array (.npy): a .npz file holds nothing else")
            if name in entries:
                raise FileError(f"{where} is there twice")
            try:
                with archive.open(info) as member:
                    found = _read_header(member, where)
            except _DAMAGED as error:
                raise FileError(f"{where} cannot be unpacked: {str(error)[:200]}") from error
            if found.length + found.nbytes != info.file_size:
                raise FileError(
                    f"{where} has {info.file_size} bytes, but {found.dtype} of shape {found.shape} takes "
                    f"{found.length + found.nbytes}: save it again"
                )
            entries[name], starts[name] = Entry(found.dtype.name, found.shape, found.nbytes), 0
            if info.compress_type == zipfile.ZIP_STORED and found.in_place:
                starts[name] = self._start(file, info, size, where) + found.length
            else:
                converted[name] = functools.partial(_unpacked, archive, info, found, where)
        self._converted = converted
        in_order = dict(sorted(entries.items(), key=lambda entry: starts[entry[0]])) if not converted else entries
        return in_order, starts, {}

    def _start(self, file: FileIO, info: zipfile.ZipInfo, size: int, where: str) -> int:
        """Where the bytes of a member begin that is not compressed."""
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER)
        lengths = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
        start = info.header_offset + _LOCAL_HEADER + sum(lengths)
        if len(head) < _LOCAL_HEADER or start + info.file_size > size or info.compress_size != info.file_size:
            raise FileError(f"{where} lies outside the file: download or copy it again")
        return start


class _Input(Container):
    """A kind of file that is only read."""

    def check(self, entries: Mapping[str, Entry], metadata: Mapping[str, Any]) -> None:
        raise FileError(f"{self.ending} files are read but not written: let the output end in .safetensors")

    def writing(
        self, target: Path, entries: dict[str, Entry], metadata: Mapping[str, Any], force: bool
    ) -> contextlib.AbstractContextManager[Writer]:
        raise FileError(f"{target}: {self.ending} files are read but not written")


class Npy(_Input):
    """Files of `numpy.save`."""

    name, ending, magic = NpyReader.kind, _SUFFIX, _MAGIC

    def open(self, path: str | os.PathLike[str], mapped: bool = True) -> NpyReader:
        return NpyReader(path, mapped)


class Npz(_Input):
    """Files of `numpy.savez` and `numpy.savez_compressed`."""

    name, ending, magic = NpzReader.kind, ".npz", _ZIP

    def open(self, path: str | os.PathLike[str], mapped: bool = True) -> NpzReader:
        return NpzReader(path, mapped)

    def is_one(self, head: bytes) -> bool:
        """Told by the name of the first member: PyTorch's checkpoints are zip archives, too."""
        return head.startswith(_ZIP) and head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")


#: The containers themselves: they have no state.
NPY, NPZ = Npy(), Npz()
