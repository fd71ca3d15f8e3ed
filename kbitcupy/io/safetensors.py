"""safetensors files that hold compressed tensors.

A compressed tensor ``w`` is stored as one tensor for each of its planes, ``w.packed``, ``w.absmax``, ...; the metadata
key ``kbitcupy`` holds ``{"version": 1, "written_by": ..., "tensors": {"w": configuration, ...}}`` as JSON. Every other
tensor and metadata key stays as it is, so other tools read these files as well.

The safetensors library checks a file before anything is read from it. What this module adds is access to the bytes of
any dtype, NumPy's own or not, and a writer that needs one tensor at a time in memory.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from .. import _xp
from .._version import __version__
from ..array import QuantizedArray, config_of
from ..errors import FileError
from ..formats.base import Format, get_format
from ..ops import quantize

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
_NAMES = {code: name for name, code in CODES.items()}
_COMPRESSIBLE = tuple(CODES[name] for name in _xp.FLOAT_DTYPES)

_HEADER_KEY = "__metadata__"  # reserved in the header: no tensor can have this name


Item = TypeVar("Item")


@dataclass(frozen=True)
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
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileReport:
    """What `quantize_file` or `dequantize_file` did.

    Parameters
    ----------
    converted : int
        Tensors compressed or decompressed.
    copied : int
        Tensors taken over as they were.
    elements : int
        Elements of the converted tensors.
    compressed_nbytes : int
        Bytes of the converted tensors in compressed form.
    nbytes_before, nbytes_after : int
        Bytes of all tensors in the source and in the target.
    seconds : float
        Wall time.
    unused_keep : tuple of str
        Patterns of `keep` that no tensor's name matches.
    """

    converted: int
    copied: int
    elements: int
    compressed_nbytes: int
    nbytes_before: int
    nbytes_after: int
    seconds: float
    unused_keep: tuple[str, ...] = ()

    @property
    def bits_per_element(self) -> float:
        """Bits for each element of the converted tensors; NaN when there are none."""
        return self.compressed_nbytes * 8 / self.elements if self.elements else math.nan


# ---- reading -------------------------------------------------------------------------------------------------------


class SourceFile:
    """A safetensors file, checked and mapped into memory.

    Parameters
    ----------
    path : path_like
        The file.

    Attributes
    ----------
    entries : dict of str to Entry
        All stored tensors, planes included.
    metadata : dict of str to str
        The file's metadata without the key of kbitcupy.
    configs : dict of str to dict, or None
        Configurations of the compressed tensors, by name; None in a file that kbitcupy did not write.
    quantized : dict of str to QuantizedArray
        The compressed tensors; their planes are views of the file.
    plain : list of str
        Names of the stored tensors that are no planes.

    Raises
    ------
    FileError
        When the file is missing, is not a safetensors file, or describes compressed tensors that it does not hold.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        _check_with_library(self.path)
        try:
            self._bytes = np.asarray(np.memmap(self.path, np.uint8, "r"))
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror or error}") from error
        length = 8 + int.from_bytes(self._bytes[:8].tobytes(), "little")
        header = json.loads(self._bytes[8:length].tobytes())
        self.metadata: dict[str, str] = header.pop(_HEADER_KEY, None) or {}
        self.entries: dict[str, Entry] = {}
        self._starts: dict[str, int] = {}
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, end = tensor["data_offsets"]
            self.entries[name] = Entry(tensor["dtype"], tuple(tensor["shape"]), end - first)
            self._starts[name] = length + first
        self.configs = _read_configs(self.metadata.pop(METADATA_KEY, None), self.path)
        self.quantized = {name: self._quantized(name, config) for name, config in (self.configs or {}).items()}
        planes = {f"{name}.{plane}" for name, q in self.quantized.items() for plane in q.planes}
        self.plain = [name for name in self.entries if name not in planes]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a stored tensor: read-only uint8 view of the file."""
        start = self._starts[name]
        return self._bytes[start : start + self.entries[name].nbytes]

    def array(self, name: str) -> np.ndarray:
        """A stored tensor: read-only view of the file, maybe unaligned.

        Raises
        ------
        FileError
            When NumPy and ml_dtypes have no dtype or no shape for it.
        """
        entry = self.entries[name]
        if entry.dtype not in _NAMES:
            raise FileError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}, which NumPy cannot hold; quantize_file and "
                "dequantize_file copy it byte for byte"
            )
        try:
            return self.raw(name).view(_xp.named_dtype(_NAMES[entry.dtype])).reshape(entry.shape)
        except ValueError as error:
            raise FileError(f"{self.path}: tensor {name!r} of shape {entry.shape}: {error}") from error

    def compressible(self, min_size: int = MIN_SIZE, keep: Iterable[str] = ()) -> list[str]:
        """Names of the float tensors of at least two dimensions and `min_size` elements that no `keep` matches."""
        patterns = tuple(keep)
        return [
            name
            for name in self.plain
            if (entry := self.entries[name]).dtype in _COMPRESSIBLE
            and len(entry.shape) >= 2
            and entry.size >= max(min_size, 1)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]

    def _quantized(self, name: str, config: Any) -> QuantizedArray:
        """A compressed tensor on views of its planes. Nothing about `config` can be trusted."""
        planes: tuple[str, ...] = ()
        with contextlib.suppress(Exception):  # from_config below says what is wrong with a malformed configuration
            options = dict(config["format"])
            planes = tuple(get_format(options.pop("name"), **options).planes(tuple(config["shape"])))
        for plane in planes:
            if f"{name}.{plane}" not in self.entries:
                raise FileError(
                    f"{self.path}: compressed tensor {name!r} lacks its plane {plane!r}: there is no tensor "
                    f"{f'{name}.{plane}'!r} in the file; compress it again"
                )
        if name in self.entries:
            raise FileError(f"{self.path}: tensor {name!r} is stored twice, as it is and compressed; rename one")
        try:
            return QuantizedArray.from_config(config, {plane: self.array(f"{name}.{plane}") for plane in planes})
        except Exception as error:  # a third party's format may raise anything on options that it did not write
            raise FileError(f"{self.path}: compressed tensor {name!r}: {error}") from error


def _check_with_library(path: Path) -> None:
    if path.is_dir():
        raise FileError(f"{path} is a directory; pass the .safetensors file itself")
    try:
        with safe_open(path, framework="np"):
            pass
    except FileNotFoundError as error:
        raise FileError(f"{path} does not exist") from error
    except SafetensorError as error:
        raise FileError(f"{path} is not a valid safetensors file: {error}") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}") from error


def _read_configs(text: str | None, path: Path) -> dict[str, Any] | None:
    """The configurations under `METADATA_KEY`, by tensor name."""
    if text is None:
        return None
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} is not JSON: {error}") from error
    version = stored.get("version") if isinstance(stored, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} has no version: it was not written by kbitcupy")
    if version > FILE_VERSION:
        writer = stored.get("written_by")
        raise FileError(
            f"{path} was written by {writer if isinstance(writer, str) else 'a newer kbitcupy'} and needs file version "
            f"{version}; kbitcupy {__version__} reads up to {FILE_VERSION}: upgrade it"
        )
    if not isinstance(stored.get("tensors"), dict):
        raise FileError(f"{path}: metadata key {METADATA_KEY!r} lists no tensors")
    return stored["tensors"]


# ---- writing -------------------------------------------------------------------------------------------------------


def _entry(dtype: np.dtype, shape: tuple[int, ...], owner: str) -> Entry:
    code = CODES.get(dtype.name)
    if code is None:
        raise FileError(f"{owner} has dtype {dtype.name}, which safetensors cannot store; it stores {', '.join(CODES)}")
    return Entry(code, shape, math.prod(shape) * dtype.itemsize)


def _with_planes(
    plain: Mapping[str, Entry], quantized: Mapping[str, tuple[Format, tuple[int, ...]]]
) -> dict[str, Entry]:
    """`plain` and the planes of all compressed tensors, under distinct names."""
    entries = dict(plain)
    for name, (format, shape) in quantized.items():
        for plane, spec in format.planes(shape).items():
            stored = f"{name}.{plane}"
            if stored in entries or stored in quantized:
                raise FileError(
                    f"plane {plane!r} of tensor {name!r} would be stored as {stored!r}, but that is the name of "
                    f"another tensor: rename one of them, or keep {name!r} as it is"
                )
            entries[stored] = _entry(_xp.named_dtype(spec.dtype), spec.shape, f"plane {stored!r}")
    return entries


def _with_configs(metadata: Mapping[str, str], configs: Mapping[str, Any]) -> dict[str, str]:
    stored = {"version": FILE_VERSION, "written_by": f"kbitcupy {__version__}", "tensors": configs}
    return {**metadata, METADATA_KEY: json.dumps(stored, separators=(",", ":"))}


def _layout(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes, up to the data, and where each tensor's data begins in the file.

    Wider dtypes come first, so every tensor is aligned to its dtype without gaps, which the format forbids.
    """

    def order(name: str) -> tuple[float, str]:
        entry = entries[name]
        return (-8 * entry.nbytes / entry.size if entry.size else -math.inf), name

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
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


def _check_target(path: str | os.PathLike[str], force: bool, source: Path | None = None) -> Path:
    """The path to write to, links followed."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise FileError(f"{path} is a directory; name the output file itself")
    if source is not None and target.exists() and target.samefile(source):
        raise FileError(f"output {path} is the input file; write to another path")
    if target.exists() and not target.is_file():
        raise FileError(f"{path} is not a regular file; name a file to write")
    if target.exists() and not force:
        raise FileError(f"{path} exists; choose another path, or overwrite it with force=True (--force)")
    if not target.parent.is_dir():
        raise FileError(f"{path} cannot be written: the directory {target.parent} does not exist; create it first")
    return target


@contextlib.contextmanager
def _writing(
    target: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], force: bool
) -> Iterator[Callable[[str, np.ndarray], None]]:
    """Write a file of known layout; yields ``put(name, data)``.

    The file is written beside `target` and renamed when everything is on disk, so `target` is whole or not there.
    """
    first, starts = _layout(entries, metadata)
    beside = target.with_name(f".kbit-{secrets.token_hex(8)}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(first)

            def put(name: str, data: np.ndarray) -> None:
                file.seek(starts[name])
                file.write(_raw(data).data)

            yield put
            file.flush()
            os.fsync(file.fileno())
        _check_target(target, force)  # it may have appeared in the meantime
        os.replace(beside, target)
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array as safetensors stores them: C order, little-endian."""
    plain = np.asarray(array)
    little = plain.astype(plain.dtype.newbyteorder("<"), order="C", copy=False)
    return little.reshape(-1).view(np.uint8)


# ---- public --------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray | QuantizedArray]:
    """Read all tensors of a safetensors file into host memory.

    Parameters
    ----------
    path : path_like
        A safetensors file, written by kbitcupy or by any other tool.

    Returns
    -------
    dict of str to numpy.ndarray or QuantizedArray
        Arrays of the stored shapes and dtypes (BF16 and the FP8 types as ml_dtypes' dtypes), and a `QuantizedArray`
        for each compressed tensor; ``.to_device("cuda:0")`` moves one to a GPU.

    Raises
    ------
    FileError
        When the file is missing or not a safetensors file, when the configuration of a compressed tensor does not fit
        its planes, or when NumPy has no dtype for a tensor.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.safetensors", {"w": kb.quantize(np.eye(64), "kbit4"), "bias": np.zeros(64)})
    ...     tensors = kb.io.load(f"{folder}/a.safetensors")
    >>> tensors["w"]
    QuantizedArray(kbit4, shape=(64, 64), dtype=float64, device=cpu, 4.26 bits/element)
    >>> tensors["bias"].shape
    (64,)
    """
    source = SourceFile(path)
    tensors: dict[str, np.ndarray | QuantizedArray] = {name: source.array(name).copy() for name in source.plain}
    tensors.update((name, q.copy()) for name, q in source.quantized.items())
    return tensors


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> None:
    """Write arrays and compressed arrays to a safetensors file.

    Parameters
    ----------
    path : path_like
        The file to write. It is written beside and renamed: after a failure nothing is left of it.
    tensors : mapping of str to array_like or QuantizedArray
        NumPy or CuPy arrays of any shape and of a dtype that safetensors knows, and compressed arrays.
    metadata : mapping of str to str, optional
        Metadata of the file; the key ``kbitcupy`` is taken.
    force : bool, default False
        Overwrite `path` if it exists.

    Raises
    ------
    FileError
        When `path` exists or cannot be written, when two tensors would get the same name, or when a name, dtype or
        metadata entry cannot be stored.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.ones((32, 32), np.float16), "kbit4")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.safetensors", {"w": q}, {"origin": "example"})
    ...     restored = kb.io.load(f"{folder}/a.safetensors")["w"]
    >>> bool((restored.dequantize() == q.dequantize()).all())
    True
    """
    metadata = dict(metadata or {})
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise FileError(f"metadata has {key!r}: {value!r}; keys and values must be str: use str() or json.dumps")
    if METADATA_KEY in metadata:
        raise FileError(f"metadata key {METADATA_KEY!r} belongs to kbitcupy: choose another one")
    plain: dict[str, Any] = {}
    quantized: dict[str, QuantizedArray] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise FileError(f"a tensor's name is {name!r}; it must be a str")
        if isinstance(tensor, QuantizedArray):
            quantized[name] = tensor
        else:
            plain[name] = _xp.as_array(tensor, f"tensors[{name!r}]")
    entries = _with_planes(
        {name: _entry(array.dtype, array.shape, f"tensor {name!r}") for name, array in plain.items()},
        {name: (q.format, q.shape) for name, q in quantized.items()},
    )
    if quantized:
        metadata = _with_configs(metadata, {name: q.config() for name, q in quantized.items()})
    with _writing(_check_target(path, force), entries, metadata, force) as put:
        for name, array in plain.items():
            put(name, _xp.to_device(array, "cpu"))
        for name, q in quantized.items():
            for plane, array in q.planes.items():
                put(f"{name}.{plane}", _xp.to_device(array, "cpu"))


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format,
    *,
    min_size: int = MIN_SIZE,
    keep: str | Iterable[str] = (),
    device: str = "auto",
    force: bool = False,
    progress: bool = False,
) -> FileReport:
    """Compress the float tensors of a safetensors file, one at a time.

    Parameters
    ----------
    source, target : path_like
        The file to read and the file to write; `target` is written beside and renamed.
    format : str or Format
        Name of a registered format, or a format with its options chosen.
    min_size : int, default 512
        Tensors with fewer elements are copied, as are those of fewer than two dimensions and those whose dtype is not
        float16, bfloat16, float32 or float64.
    keep : str or iterable of str, optional
        Patterns (``"*embed*"``, ``"lm_head.weight"``; case matters) of names to copy as well.
    device : str, default "auto"
        Where to compress: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one.
    force : bool, default False
        Overwrite `target` if it exists.
    progress : bool, default False
        Show a progress bar on stderr.

    Returns
    -------
    FileReport

    Raises
    ------
    FileError
        When `source` is not a safetensors file, `target` exists or cannot be written, or two tensors would get the
        same name.
    FormatError, DeviceError
        When the format or the device is not known.

    Notes
    -----
    Copied tensors keep their bytes whatever their dtype; tensors that are compressed already, and the file's own
    metadata, stay as they are. Memory holds about twice the largest tensor.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.safetensors", {"w": np.ones((64, 64), np.float32), "bias": np.zeros(64)})
    ...     report = kb.io.quantize_file(f"{folder}/a.safetensors", f"{folder}/b.safetensors", "kbit4")
    >>> report.converted, report.copied, report.nbytes_before, report.nbytes_after
    (1, 1, 16896, 2692)
    """
    began = time.perf_counter()
    if isinstance(min_size, bool) or not isinstance(min_size, (int, np.integer)) or min_size < 0:
        raise ValueError(f"min_size is {min_size!r}; it must be a non-negative integer")
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    format = format if isinstance(format, Format) else get_format(format)
    stored = format.stored()
    device = _xp.resolve_device(device)
    file = SourceFile(source)
    path = _check_target(target, force, file.path)

    chosen = dict.fromkeys(file.compressible(min_size, patterns))
    quantized = {name: (q.format, q.shape) for name, q in file.quantized.items()}
    quantized.update((name, (stored, file.entries[name].shape)) for name in chosen)
    entries = _with_planes({name: file.entries[name] for name in file.plain if name not in chosen}, quantized)
    configs = dict(file.configs or {})
    for name in chosen:
        dtype = _xp.float_dtype(_NAMES[file.entries[name].dtype])
        configs[name] = config_of(stored, file.entries[name].shape, dtype)

    compressed = 0
    with _writing(path, entries, _with_configs(file.metadata, configs), force) as put:
        for name in file.entries:
            if name not in chosen:
                put(name, file.raw(name))
        for name in with_progress(chosen, len(chosen), "quantize", progress):
            with _naming(name, file.path):
                q = quantize(_xp.to_device(file.array(name), device), format).get()
            for plane, array in q.planes.items():
                put(f"{name}.{plane}", array)
            compressed += q.nbytes
    return FileReport(
        converted=len(chosen),
        copied=len(file.plain) - len(chosen) + len(file.quantized),
        elements=sum(file.entries[name].size for name in chosen),
        compressed_nbytes=compressed,
        nbytes_before=file.nbytes,
        nbytes_after=sum(entry.nbytes for entry in entries.values()),
        seconds=time.perf_counter() - began,
        unused_keep=tuple(p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in file.plain)),
    )


def dequantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    device: str = "auto",
    force: bool = False,
    progress: bool = False,
) -> FileReport:
    """Restore the tensors of a file that `quantize_file` or `save` wrote, one at a time.

    Parameters
    ----------
    source, target : path_like
        The file to read and the file to write; `target` is written beside and renamed.
    device : str, default "auto"
        Where to decompress: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one.
    force : bool, default False
        Overwrite `target` if it exists.
    progress : bool, default False
        Show a progress bar on stderr.

    Returns
    -------
    FileReport

    Raises
    ------
    FileError
        When `source` is not a safetensors file of kbitcupy, when a plane is missing or does not fit its
        configuration, or when `target` exists or cannot be written.
    DeviceError
        When the device is not known.

    Notes
    -----
    The result has the names, shapes, dtypes and metadata of the file that was compressed; every other tensor is copied
    byte for byte.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.safetensors", {"w": kb.quantize(np.ones((64, 64), np.float32), "kbit4")})
    ...     report = kb.io.dequantize_file(f"{folder}/a.safetensors", f"{folder}/b.safetensors")
    ...     restored = kb.io.load(f"{folder}/b.safetensors")["w"]
    >>> report.converted, restored.shape, restored.dtype
    (1, (64, 64), dtype('float32'))
    """
    began = time.perf_counter()
    device = _xp.resolve_device(device)
    file = SourceFile(source)
    if file.configs is None:
        raise FileError(f"{file.path} holds no tensors compressed by kbitcupy: there is nothing to dequantize")
    path = _check_target(target, force, file.path)
    entries = {name: file.entries[name] for name in file.plain}
    entries.update((name, _entry(q.dtype, q.shape, f"tensor {name!r}")) for name, q in file.quantized.items())
    with _writing(path, entries, file.metadata, force) as put:
        for name in file.plain:
            put(name, file.raw(name))
        for name in with_progress(file.quantized, len(file.quantized), "dequantize", progress):
            with _naming(name, file.path):
                array = _xp.to_device(file.quantized[name].to_device(device).dequantize(), "cpu")
            put(name, array)
    return FileReport(
        converted=len(file.quantized),
        copied=len(file.plain),
        elements=sum(q.size for q in file.quantized.values()),
        compressed_nbytes=sum(q.nbytes for q in file.quantized.values()),
        nbytes_before=file.nbytes,
        nbytes_after=sum(entry.nbytes for entry in entries.values()),
        seconds=time.perf_counter() - began,
    )


@contextlib.contextmanager
def _naming(name: str, path: Path) -> Iterator[None]:
    """Add the tensor's name to an error."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise FileError(f"{path}: tensor {name!r}: {error}") from error


def with_progress(items: Iterable[Item], count: int, label: str, show: bool) -> Iterable[Item]:
    """`items`, with a progress bar on stderr where `show` says so."""
    if not show:
        return items
    from tqdm import tqdm  # most calls show no bar

    bar: Iterable[Item] = tqdm(items, desc=label, total=count, unit="tensor", leave=False)
    return bar
