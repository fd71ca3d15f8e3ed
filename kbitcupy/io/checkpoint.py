"""Files and sharded checkpoints as mappings of names to arrays: `load` and `save`."""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FileError
from ..serial import read_json_file
from .atomic import as_path, check_file, check_folder, filling, replacing
from .container import Container, Entry, FileReader, Together, entry_of, head_of, reading
from .gguf import GGUF, GgufReader, check_parts, part_name, part_of, parts_beside
from .kinds import HEAD, other_checkpoints
from .layouts import LAYOUTS, WEIGHT_SCALES, Compressed, Layout, find_layout, recognise
from .layouts.base import free_entries
from .npy import NPY, NPZ
from .safetensors import SAFETENSORS

#: Kinds of files, in the order in which their first bytes are looked at; safetensors has none that are the same in all
#: files, and says what a file is that nobody reads.
CONTAINERS: list[Container] = [GGUF, NPY, NPZ, SAFETENSORS]

#: Name of the files of a checkpoint, before their numbers and their ending.
STEM = "model"
#: A sharded checkpoint has one file with this ending, which says where each tensor is.
INDEX_ENDING = ".safetensors.index.json"
#: Tensors with fewer elements are copied: compressing them saves nothing.
MIN_SIZE = 512


@dataclass(frozen=True)
class File:
    """One file of a checkpoint.

    Parameters
    ----------
    reader : FileReader
        Its stored tensors.
    plain : list of str
        Names of those that belong to no compressed tensor, in the order of their data.
    compressed : dict of str to Compressed
        The compressed tensors of this file, by name.
    """

    reader: FileReader
    plain: list[str]
    compressed: dict[str, Compressed]

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.reader.path

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of their data."""
        first = {one.stored[0]: name for name, one in self.compressed.items()}
        first.update((name, name) for name in self.plain)
        return [first[stored] for stored in self.reader.names if stored in first]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.reader.nbytes

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata without what describes compressed tensors."""
        own = {key for layout in LAYOUTS for key in layout.own_keys()}
        return {key: text for key, text in self.reader.metadata.items() if key not in own}


class Checkpoint(Mapping[str, Any]):
    """The tensors of a file, or of a directory of shards, read when they are asked for.

    Parameters
    ----------
    path : path_like
        A safetensors, GGUF, ``.npy`` or ``.npz`` file, a directory that holds one file, shards with their index or the
        parts of a GGUF file, the index (``model.safetensors.index.json``), or any of those parts.
    mapped : bool, default True
        Whether arrays are views of the files, see `FileReader`.
    raw : bool, default False
        Show the stored tensors as they are: none is recognised as a part of a compressed one.
    weight_scale : str, optional
        As for `load`.

    Attributes
    ----------
    files : dict of str to File
        The files by name.
    reader : Together
        The stored tensors of all files.
    compressed : dict of str to Compressed
        What is known of the compressed tensors, by name.
    index : str or None
        Name of the index.
    index_metadata : dict
        What the index says besides where the tensors are.
    paths : list of pathlib.Path
        The files and the index.
    metadata : dict of str to str or GgufValue
        Metadata of all files together, without what describes compressed tensors.
    is_folder : bool
        Whether it is, or may be, several files.
    folder : pathlib.Path or None
        The folder, where that was asked for, or its index.

    Raises
    ------
    FileError
        When a file is missing or hostile, or describes compressed tensors that it does not hold; when the index is not
        one, names a file outside its directory, or places a tensor where it is not; when two files hold the same
        tensor.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mapped: bool = True,
        raw: bool = False,
        weight_scale: str | None = None,
    ):
        if weight_scale is not None and weight_scale not in WEIGHT_SCALES:
            raise ValueError(
                f"weight_scale is {weight_scale!r}; allowed are {', '.join(map(repr, WEIGHT_SCALES))}, and None for "
                "what config.json says"
            )
        self.path = as_path(path, "path")
        with reading(self.path):
            self.is_folder = self.path.is_dir() or self.path.name.endswith(INDEX_ENDING)
        self.folder = (self.path if self.path.is_dir() else self.path.parent) if self.is_folder else None
        self.index: str | None = None
        self.index_metadata: dict[str, Any] = {}
        self.files = {name: File(reader, [], {}) for name, reader in self._open(mapped).items()}
        self.paths = [file.path for file in self.files.values()]
        if self.index is not None:
            self.paths.append(self.paths[0].with_name(self.index))
        self.reader = Together(self.path, [file.reader for file in self.files.values()])
        self.compressed, rest = ({}, self.reader) if raw else recognise(self.reader, weight_scale)
        owners = {id(file.reader): file for file in self.files.values()}
        for name in rest.names:
            owners[id(rest.file_of(name))].plain.append(name)
        for name, one in self.compressed.items():
            owners[id(self.reader.file_of(one.stored[0]))].compressed[name] = one
        self._names = {name: None for file in self.files.values() for name in file.names}
        parts = [file.reader.metadata if raw else file.metadata for file in self.files.values()]
        self.metadata = {key: text for part in parts for key, text in part.items()}

    def _open(self, mapped: bool) -> dict[str, FileReader]:
        """The files by name; what the index says of them is true."""
        if not self.is_folder:
            reader = _open(self.path, mapped)
            if not isinstance(reader, GgufReader):
                return {self.path.name: reader}
            found = _open_parts(reader, mapped)
            self.is_folder = len(found) > 1
            return found
        with reading(self.path):
            folder, self.index, names = _contents(self.path)
        if self.index is None and names[0].endswith(GGUF.ending):
            return _open_parts(_open(folder / names[0], mapped), mapped)
        weight_map: dict[str, str] = {}
        if self.index is not None:
            weight_map, self.index_metadata = _read_index(folder / self.index)
            names = sorted(set(weight_map.values()))
        readers = {name: _open(folder / name, mapped) for name in names}
        for name, owner in weight_map.items():
            if name not in readers[owner].entries:
                raise FileError(
                    f"{folder / str(self.index)}: tensor {name!r} is not in {owner}, where weight_map puts it"
                )
        return readers

    def check_unchanged(self) -> None:
        """Check that nobody has written to the files since they were opened, see `FileReader.check_unchanged`."""
        for file in self.files.values():
            file.reader.check_unchanged()

    def stored(self, name: str) -> dict[str, Entry]:
        """The stored tensors that one consists of."""
        if name not in self._names:
            raise KeyError(name)
        names = self.compressed[name].stored if name in self.compressed else (name,)
        return {stored: self.reader.entry(stored) for stored in names}

    def compressible(self, min_size: int = MIN_SIZE, keep: Iterable[str] = (), again: bool = False) -> list[str]:
        """Names of the float tensors of at least two dimensions and `min_size` elements that no `keep` matches; with
        `again` also of those that are compressed already.
        """
        patterns = tuple(keep)
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files.values():
            entries = {name: file.reader.entries[name] for name in file.plain}
            shapes.update((name, entry.shape) for name, entry in entries.items() if entry.dtype in _xp.FLOAT_DTYPES)
            if again:
                shapes.update((name, found.shape) for name, found in file.compressed.items())
        return [
            name
            for name, shape in shapes.items()
            if len(shape) >= 2
            and math.prod(shape) >= max(min_size, 1)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]

    def __getitem__(self, name: str) -> np.ndarray | QuantizedArray:
        """A `QuantizedArray`, or a read-only array that is a view of the file: ``.copy()`` makes it writeable."""
        if name in self.compressed:
            return self.compressed[name].read(self.reader)
        if name not in self._names:
            raise KeyError(name)
        return self.reader.array(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}: {len(self)} tensors, {len(self.compressed)} of them compressed)"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self.files.values())

    @property
    def written_by(self) -> str | None:
        """Which program compressed the tensors, where a file says so."""
        writers = (layout.written_by(file.reader.metadata) for file in self.files.values() for layout in LAYOUTS)
        return next(filter(None, writers), None)

    @property
    def quant_storage(self) -> dict[str, str]:
        """The dtype that the bytes of each 4-bit weight in bitsandbytes' layout are stored under."""
        found = self.compressed.items()
        return {name: one.options["quant_storage"] for name, one in found if "quant_storage" in one.options}


def _open(path: Path, mapped: bool) -> FileReader:
    """A file of any kind."""
    head = head_of(path, HEAD)
    return next(container for container in CONTAINERS if container.is_one(head)).open(path, mapped)


def _open_parts(reader: FileReader, mapped: bool) -> dict[str, FileReader]:
    """A GGUF file, and the others that it is a part of a whole with."""
    if not isinstance(reader, GgufReader):
        return {reader.path.name: reader}
    readers = []
    for path in parts_beside(reader):
        if path == reader.path:
            readers.append(reader)
            continue
        with reading(path):
            if not path.exists():
                raise FileError(f"{reader.path} is a part of a model; {path} is missing: download it as well")
        readers.append(GGUF.open(path, mapped))
    if len(readers) == 1:
        return {reader.path.name: reader}
    check_parts(readers)
    return {each.path.name: each for each in readers}


def _contents(path: Path) -> tuple[Path, str | None, list[str]]:
    """Folder, name of the index, names of the files where there is none."""
    if not path.is_dir():
        return path.parent, path.name, []
    names = sorted(entry.name for entry in path.iterdir())
    indices = [name for name in names if name.endswith(INDEX_ENDING)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) == 1:
        return path, indices[0], []
    if not indices and len(files) == 1:
        return path, None, files
    kind = SAFETENSORS.name
    if not indices and not files and any(name.endswith(GGUF.ending) for name in names):
        kind = GGUF.name
        files = [name for name in names if name.endswith(GGUF.ending)]
        parts = [part_of(path / name) for name in files]
        if len(files) == 1 or (
            files and None not in parts and len({(part[0], part[2]) for part in parts if part}) == 1
        ):
            return path, None, files
    found = ", ".join((indices or files)[:4])
    others = "" if found else other_checkpoints(names)
    hint = others or "it must hold one index, or one file: pass the file that you mean"
    raise FileError(
        f"{path} is a directory with {len(indices)} indices (*{INDEX_ENDING}) and {len(files)} {kind} files"
        f"{f' ({found})' if found else ''}; {hint}"
    )


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """weight_map and metadata of an index, of which nothing can be trusted."""
    try:
        index = read_json_file(path)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it has no object 'weight_map' with the files of the tensors")
        for name, file_name in weight_map.items():
            _check_file_name(name, file_name)
        metadata = index.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise ValueError("'metadata' is not an object")
    except FileNotFoundError as error:
        raise FileError(f"{path} does not exist") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FileError(f"{path} is not an index of shards: {str(error)[:400]}") from error
    return weight_map, metadata


def _check_file_name(name: str, file: Any) -> None:
    # A backslash or a colon would leave the directory on Windows.
    if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & set("/\\:\0") or file[0] == ".":
        raise ValueError(
            f"weight_map puts tensor {name!r} into {str(file)[:200]!r}; it must be the name of a .safetensors file in "
            "the same directory"
        )


def index_text(weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> bytes:
    """The content of an index."""
    index = {"metadata": dict(metadata), "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def write_text(folder: Path, name: str, text: bytes) -> None:
    """Write the index, or another small file, of a folder that is being filled."""
    with replacing(folder / name, len(text), force=True) as file:
        file.write(text)


# ---- public --------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], *, raw: bool = False, weight_scale: str | None = None) -> Checkpoint:
    """Open a file or a sharded checkpoint; its tensors are read when they are asked for.

    Parameters
    ----------
    path : path_like
        A safetensors, GGUF, ``.npy`` (its array has the name of the file) or ``.npz`` file, a directory that holds one
        file, shards with their index or the parts of a GGUF file, the index (``model.safetensors.index.json``), or any
        of those parts (``model-00001-of-00003.gguf``), written by kbitcupy, bitsandbytes, llama.cpp or any other tool.
    raw : bool, default False
        Give every stored tensor under its own name, such as the planes ``w.packed`` and ``w.absmax`` of a compressed
        ``w``: for files that are damaged, or to look at what a layout stores.
    weight_scale : {"divides", "multiplies"}, optional
        What products of transformers' BitNet are done with the scales that it stores; by default what ``config.json``
        says, which not all programs that write such files keep to.

    Returns
    -------
    Checkpoint
        A read-only mapping: for each name an array of the stored shape and dtype (BF16 and the FP8 types as ml_dtypes'
        dtypes), or a `QuantizedArray` for a tensor compressed by kbitcupy or, in bitsandbytes' layout, to ``nf4``,
        ``fp4`` or ``int8`` (LLM.int8, see `kbitcupy.io.bitsandbytes.load`), or in compressed-tensors' to integers of 4
        or 8 bits (``int4``, ``int8``), or of one of GGUF's types: in its own
        format, and of dtype float32, for a GGUF file does not say what was compressed. A BitNet of transformers, which
        ``config.json`` beside the files tells, or of bitnet.cpp (I2_S) has format ``ternary``, and so have GGUF's TQ
        types with a scale beside them. Arrays are views of the file,
        mapped into memory for as long as they are referred to, and read-only; ``.copy()`` makes one writeable,
        ``.to_device("cuda:0")`` moves a `QuantizedArray` to a GPU. ``dict(...)`` of the mapping holds them all. Whoever
        cuts the file off while it is mapped takes the memory away from under the arrays: a process that then looks at
        them is ended by the system (SIGBUS). A file that may be rewritten in place should be copied first, or each
        array with ``.copy()``.

    Raises
    ------
    TypeError
        When `path` is no path.
    ValueError
        When `weight_scale` is none of these.
    FileError
        When a file is missing or of a kind that is not read (the message says what it is, where its first bytes tell,
        and how to convert it), holds Python objects, or when the stored tensors of a compressed one do not fit
        together. When a tensor is asked for that has a dtype which NumPy cannot hold.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.safetensors", {"w": kb.quantize(np.eye(64), "kbit4"), "bias": np.zeros(64)})
    ...     tensors = dict(kb.io.load(f"{folder}/a.safetensors"))
    >>> tensors["w"]
    QuantizedArray(kbit4, shape=(64, 64), dtype=float64, device=cpu, 4.26 bits/element)
    >>> tensors["bias"].shape
    (64,)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.gguf", {"w": kb.quantize(np.eye(256), "q4_k")}, {"general.architecture": "llama"})
    ...     loaded = kb.io.load(f"{folder}/a.gguf")
    ...     about, w = loaded.metadata["general.architecture"].value, loaded["w"].copy()
    >>> about, w.format, w.shape
    ('llama', get_format('q4_k'), (256, 256))
    """
    return Checkpoint(path, raw=raw, weight_scale=weight_scale)


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    layout: str | None = None,
    force: bool = False,
    max_shard_size: int | None = None,
) -> None:
    """Write arrays and compressed arrays to a safetensors or GGUF file, or to a directory of shards.

    Parameters
    ----------
    path : path_like
        The file, or with `max_shard_size` the directory, to write. It is written beside and renamed: after a failure
        nothing is left of it.
    tensors : mapping of str to array_like or QuantizedArray
        NumPy or CuPy arrays of any shape and of a dtype that the file can hold, and compressed arrays; what `load`
        returned is passed on tensor by tensor.
    metadata : mapping of str to str, optional
        Metadata of the file, or of each shard; the key ``kbitcupy`` is taken. For GGUF the values are `GgufValue`, or
        what makes one (bool, int, float, str, arrays); ``general.architecture``, ``general.quantization_version`` and
        ``general.file_type`` are added where they are not given.
    layout : {"kbitcupy", "bitsandbytes", "compressed-tensors", "bitnet", "gguf", "bitnet.cpp"}, optional
        How compressed tensors are stored (``"bitnet"``: as transformers does, which wants a ``config.json`` beside with
        ``"quantization_config": {"quant_method": "bitnet"}``); by default ``"gguf"`` where `path` ends in ``.gguf``,
        else ``"kbitcupy"``.
    force : bool, default False
        Overwrite `path` if it is a file; a directory with files in it never is.
    max_shard_size : int, optional
        Bytes of tensors in a shard; a larger tensor gets a shard of its own. The directory then holds shards and
        ``model.safetensors.index.json``, or ``model.safetensors`` alone when one is enough; with the layout ``"gguf"``
        the parts ``model-00001-of-00003.gguf`` and so on, or ``model.gguf``.

    Raises
    ------
    FileError
        When `path` exists or cannot be written, when two tensors would get the same name, or when a name, dtype or
        metadata entry cannot be stored.
    TypeError
        When `path` is no path, or `tensors` or `metadata` no mapping.
    ValueError
        When `max_shard_size` is not a positive integer.

    Examples
    --------
    >>> import os, tempfile, numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.ones((32, 32), np.float16), "kbit4")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/shards", {"w": q, "bias": np.zeros(64)}, {"origin": "example"}, max_shard_size=600)
    ...     names = sorted(os.listdir(f"{folder}/shards"))
    ...     restored = kb.io.load(f"{folder}/shards")["w"].copy()
    >>> names[0]
    'model-00001-of-00002.safetensors'
    >>> bool((restored.dequantize() == q.dequantize()).all())
    True
    """
    chosen = find_layout(layout_for(path) if layout is None else layout)
    save_as(chosen, path, tensors, metadata, force=force, max_shard_size=max_shard_size)


def layout_for(path: Any) -> str:
    """The layout that a name asks for."""
    return "gguf" if isinstance(path, (str, os.PathLike)) and str(path).endswith(GGUF.ending) else "kbitcupy"


def save_as(
    layout: Layout,
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
) -> None:
    """`save` with compressed arrays in any layout."""
    _check_order(path, tensors)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is {type(metadata).__name__}; it must be a mapping of str to str, or None")
    metadata = dict(metadata or {})
    layout.container.check({}, metadata)
    for key in (key for each in LAYOUTS for key in each.own_keys()):
        if key in metadata:
            raise FileError(f"metadata key {key!r} belongs to kbitcupy: choose another one")
    if max_shard_size is not None and (type(max_shard_size) is not int or max_shard_size < 1):
        raise ValueError(f"max_shard_size is {max_shard_size!r}; it must be a positive number of bytes, or None")
    stored = _stored(tensors, layout)
    everything = {name: entry for entries in stored.values() for name, entry in entries.items()}
    if max_shard_size is None:
        about = layout.about_file(_described(metadata, tensors, stored, layout), everything)
        _save(check_file(path, force), tensors, stored, layout, about, force)
        return
    target = check_folder(path)
    shards = _shards(
        {name: sum(e.nbytes for e in entries.values()) for name, entries in stored.items()}, max_shard_size
    )
    with filling(target, {}) as folder:
        weight_map: dict[str, str] = {}
        total = 0
        for number, names in enumerate(shards):
            file = file_name(layout.container, number, len(shards))
            part = {name: stored[name] for name in names}
            numbered = number, len(shards), len(everything)
            about = layout.about_file(_described(metadata, tensors, part, layout), everything, numbered)
            entries = _save(folder / file, tensors, part, layout, about, force)
            weight_map.update(dict.fromkeys(entries, file))
            total += sum(entry.nbytes for entry in entries.values())
        if len(shards) > 1 and layout.container is SAFETENSORS:
            write_text(folder, f"{STEM}{INDEX_ENDING}", index_text(weight_map, {"total_size": total}))


def file_name(container: Container, number: int, count: int) -> str:
    """The name of a file of a checkpoint; `number` counts from 0."""
    if count == 1:
        return STEM + container.ending
    return Path(part_name(STEM, number + 1, count)).with_suffix(container.ending).name


def _described(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], names: Iterable[str], layout: Layout
) -> Mapping[str, Any]:
    """The metadata with the configurations of compressed tensors, where there are some."""
    configs = {name: tensors[name].config() for name in names if isinstance(tensors[name], QuantizedArray)}
    return layout.metadata(metadata, configs) if configs else metadata


def _check_order(path: Any, tensors: Any) -> None:
    order = "the order is save(path, {'name': array, ...})"
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path is {type(path).__name__}; it must be a str or pathlib.Path: {order}")
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is {type(tensors).__name__}; it must be a mapping of names to arrays: {order}")


def _stored(tensors: Mapping[str, Any], layout: Layout) -> dict[str, dict[str, Entry]]:
    """What is written for each tensor; no array is held."""
    stored = {}
    taken = set(tensors)
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise FileError(f"a tensor's name is {name!r}; it must be a str")
        if isinstance(tensor, QuantizedArray):
            about = tensor.format, tensor.planes, tensor.shape, tensor.dtype
            stored[name] = free_entries(layout, name, taken, *about)
            taken.update(stored[name])
        else:
            stored[name] = {name: entry_of(_xp.as_array(tensor, f"tensors[{name!r}]"))}
        layout.container.check(stored[name], {})
    return stored


def _shards(sizes: Mapping[str, int], most: int) -> Sequence[list[str]]:
    """The tensors of each shard, in their order."""
    shards: list[list[str]] = [[]]
    room = most
    for name, nbytes in sizes.items():
        if nbytes > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= nbytes
    return shards


def _save(
    target: Path,
    tensors: Mapping[str, Any],
    stored: Mapping[str, Mapping[str, Entry]],
    layout: Layout,
    metadata: Mapping[str, Any],
    force: bool,
) -> dict[str, Entry]:
    """Write a file; what stands in its header."""
    entries = {name: entry for group in stored.values() for name, entry in group.items()}
    with layout.container.writing(target, entries, metadata, force) as writer:
        for name in stored:
            tensor = tensors[name]
            if isinstance(tensor, QuantizedArray):
                for key, array in layout.arrays(name, tensor).items():
                    writer.put(key, _xp.to_device(array, "cpu"))
            else:
                writer.put(name, _xp.to_device(_xp.as_array(tensor, f"tensors[{name!r}]"), "cpu"))
    return entries
