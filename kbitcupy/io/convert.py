"""Whole files and checkpoints: `quantize_file` and `dequantize_file`, one tensor at a time."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..array import config_of
from ..backend import xp as _xp
from ..errors import FileError, FormatError
from ..formats.base import Choice, Format, resolve
from ..ops import quantize
from .atomic import as_path, check_file, check_folder, check_space, filling, forget
from .checkpoint import MIN_SIZE, Checkpoint, File, index_text, write_index
from .container import Comparison, Container, Entry, FileReader, Unlike, Writer, entry_of, finished, reading
from .layouts import LAYOUTS, Layout, find_layout
from .layouts.base import free_entries
from .safetensors import SAFETENSORS


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
    resumed : int
        Files that an earlier run had finished.
    compressed_already : int
        Of the copied tensors those that are compressed in the source.
    nan, infinite : int
        Elements of the tensors compressed in this run that are no finite numbers: formats do not keep them.
    not_finite : tuple of str
        The tensors that have such elements.
    """

    converted: int
    copied: int
    elements: int
    compressed_nbytes: int
    nbytes_before: int
    nbytes_after: int
    seconds: float
    unused_keep: tuple[str, ...] = ()
    resumed: int = 0
    compressed_already: int = 0
    nan: int = 0
    infinite: int = 0
    not_finite: tuple[str, ...] = ()

    @property
    def bits_per_element(self) -> float:
        """Bits for each element of the converted tensors; NaN when there are none."""
        return self.compressed_nbytes * 8 / self.elements if self.elements else math.nan

    @property
    def gb_per_second(self) -> float:
        """1e9 bytes of the larger side, which is the one that is not compressed, for each second."""
        return max(self.nbytes_before, self.nbytes_after) / 1e9 / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class Job:
    """How one file becomes another.

    Parameters
    ----------
    file : FileReader
        The file to read.
    container : Container
        The kind of file to write.
    entries, metadata : mapping
        What the file to write says of its tensors, and beside them.
    copied : list of str
        Stored tensors that keep their bytes.
    converted : dict of str to int
        Tensors that do not, and their bytes in the file to read.
    convert : callable
        Takes the name of a tensor, returns the arrays to store by their names.
    compressed_nbytes : callable
        Bytes of the compressed tensors, when they are known.
    elements, tensors_copied, compressed_already : int
        For the report.
    """

    file: FileReader
    container: Container
    entries: dict[str, Entry]
    metadata: Mapping[str, str]
    copied: Sequence[str]
    converted: Mapping[str, int]
    convert: Callable[[str], Mapping[str, np.ndarray]]
    compressed_nbytes: Callable[[], int]
    elements: int
    tensors_copied: int
    compressed_already: int

    def run(self, writer: Writer, advance: Callable[[int], object]) -> None:
        """Write everything, tensor by tensor."""
        for name in self.copied:
            writer.put(name, self.file.parts(name))
            advance(self.file.entries[name].nbytes)
        for name, nbytes in self.converted.items():
            self._run_one(name, writer)
            advance(nbytes)

    def _run_one(self, name: str, writer: Writer) -> None:
        """A function of its own: when it returns, nothing of this tensor stays in memory beside the next one."""
        try:
            arrays = self.convert(name)
        except FileError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise FileError(f"{self.file.path}: tensor {name!r}: {error}") from error
        for stored, array in arrays.items():
            writer.put(stored, array)


#: As an integer, what is not finite has at least the exponent's bits: NaN more, infinity just these.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}
# Elements that are looked at together: NumPy's part stays in the cache, CuPy's temporary arrays stay small.
_HOST_PART, _DEVICE_PART = 1 << 17, 1 << 24


class _Memory:
    """Memory that is used again and again."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> np.ndarray:
        """At least so many bytes; what was handed out before is overwritten."""
        if self._buffer.nbytes < nbytes:
            self._buffer = np.empty(0, np.uint8)  # so that both are not there at once
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer


class _NotFinite:
    """How many NaN and infinities tensors hold; a GPU is not waited for until the end."""

    def __init__(self) -> None:
        self._counts: dict[str, list[Any]] = {}

    def add(self, name: str, x: Any) -> None:
        """Count those of a contiguous tensor."""
        xp = _xp.namespace(x)
        exponent = _EXPONENTS[x.dtype.name]
        bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
        infinity, sign = bits.dtype.type(exponent), bits.dtype.type(1 << 8 * x.dtype.itemsize - 1)
        part = _HOST_PART if xp is np else _DEVICE_PART
        counts = self._counts.setdefault(name, [])
        with _xp.on_device_of(x):
            for begin in range(0, bits.size, part):
                some = bits[begin : begin + part]
                if xp is np and self._all_finite(some, x.dtype, exponent):
                    continue
                magnitude = some & ~sign
                counts.append(
                    xp.stack([xp.count_nonzero(magnitude > infinity), xp.count_nonzero(magnitude == infinity)])
                )

    @staticmethod
    def _all_finite(bits: np.ndarray, dtype: np.dtype, exponent: int) -> bool:
        """Whether all are finite numbers, at little cost; False too where squares are too large."""
        if dtype == np.float32:
            some = bits.view(dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                return math.isfinite(np.dot(some, some))
        # The largest negative and the largest positive number.
        sign = 1 << 8 * dtype.itemsize - 1
        return int(bits.max()) < sign + exponent and int(bits.view(f"i{dtype.itemsize}").max()) < exponent

    def counts(self) -> dict[str, tuple[int, int]]:
        """NaN and infinities of each tensor that has any."""
        found = {}
        for name, counts in self._counts.items():
            host = [_xp.to_device(count, "cpu") for count in counts]
            nan, infinite = (int(sum(count[kind] for count in host)) for kind in (0, 1))
            if nan or infinite:
                found[name] = nan, infinite
        return found


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format | Choice | Mapping[str, str | Format | Choice],
    *,
    min_size: int | None = None,
    keep: str | Iterable[str] = (),
    layout: str = "kbitcupy",
    device: str = "auto",
    force: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> FileReport:
    """Compress the float tensors of a safetensors file or a sharded checkpoint, one at a time.

    Parameters
    ----------
    source : path_like
        What `load` takes: a file, a directory, or the index of shards.
    target : path_like
        Where to write: a file when `source` is a file, else a directory, whose shards have the names of the source's.
        It is written beside (a directory as ``target.part``) and renamed.
    format : str, Format, tuple of one of them and a dict, or mapping of str to them
        Name of a registered format, or a format with its options chosen. A mapping names the format of each tensor to
        compress (see `kbitcupy.explore.plan`); all others are copied.
    min_size : int, optional
        Tensors with fewer elements are copied, as are those of fewer than two dimensions and those whose dtype is not
        float16, bfloat16, float32 or float64. By default 512, and 0 beside a mapping.
    keep : str or iterable of str, optional
        Patterns (``"*embed*"``, ``"lm_head.weight"``; case matters) of names to copy as well, also of those that a
        mapping names.
    layout : {"kbitcupy", "bitsandbytes"}, default "kbitcupy"
        How compressed tensors are stored: ``"bitsandbytes"`` makes a file that bitsandbytes loads, see
        `kbitcupy.io.bitsandbytes.save`.
    device : str, default "auto"
        Where to compress: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one.
    force : bool, default False
        Overwrite `target` if it is a file; a directory with files in it never is.
    resume : bool, default False
        Continue an interrupted run with the same arguments at the first shard that is missing, and keep finished
        shards in ``target.part`` if this one is interrupted too. A `target` that is there already is no error if it
        holds, byte for byte, what this call would write: the tensors are compressed again and compared.
    progress : bool, default False
        Show a progress bar on stderr.

    Returns
    -------
    FileReport

    Raises
    ------
    FileError
        When `source` is not a safetensors file, `target` exists or cannot be written, two tensors would get the same
        name, the layout cannot hold a format, or a mapping names a tensor that is not there or cannot be compressed;
        when another process is writing `target`, or writes to `source` meanwhile.
    FormatError, DeviceError
        When the format or the device is not known.
    TypeError
        When a path is none.
    ValueError
        When the layout is not known.

    Notes
    -----
    Copied tensors keep their bytes whatever their dtype; tensors that are compressed already, and the file's own
    metadata, stay as they are. Memory holds about twice the largest tensor. A source that somebody writes to while it
    is read is an error, and nothing is kept.

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
    if min_size is None:
        min_size = 0 if isinstance(format, Mapping) else MIN_SIZE
    if isinstance(min_size, bool) or not isinstance(min_size, (int, np.integer)) or min_size < 0:
        raise ValueError(f"min_size is {min_size!r}; it must be a non-negative integer")
    target_layout = find_layout(layout)
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    wanted: Choice | dict[str, Choice]
    if isinstance(format, Mapping):
        wanted = {name: resolve(one) for name, one in format.items()}
        options: dict[str, Any] = {"formats": {name: _described(one) for name, one in wanted.items()}}
    else:
        wanted = resolve(format)
        options = {"format": _described(wanted)}
    options.update(min_size=int(min_size), keep=patterns, layout=layout)
    device = _xp.resolve_device(device)
    checkpoint = Checkpoint(as_path(source, "source"), mapped=False)
    if isinstance(wanted, dict):
        chosen = _planned(checkpoint, wanted, int(min_size), patterns)
    else:
        chosen = dict.fromkeys(checkpoint.compressible(min_size, patterns), wanted)
    taken = {*checkpoint.reader.names, *checkpoint.compressed}
    not_finite, memory = _NotFinite(), _Memory()
    jobs = {}
    for name, file in checkpoint.files.items():
        own = {tensor: chosen[tensor] for tensor in file.plain if tensor in chosen}
        jobs[name] = _quantizing(file, own, target_layout, device, taken, not_finite, memory)
    return _run(
        checkpoint,
        target,
        jobs,
        began,
        "quantize",
        options,
        force=force,
        resume=resume,
        progress=progress,
        not_finite=not_finite,
        unused_keep=tuple(p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in checkpoint)),
    )


def _described(choice: Choice) -> dict[str, Any]:
    """JSON values that differ where the bytes do that a format makes of an array."""
    format, brought = choice
    given = {}
    for name, value in brought.items():
        array = np.ascontiguousarray(_xp.to_device(_xp.as_array(value, name), "cpu"))
        given[name] = [array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    return {**format.config(), "given": given}


def _planned(
    checkpoint: Checkpoint, wanted: Mapping[str, Choice], min_size: int, keep: Sequence[str]
) -> dict[str, Choice]:
    """The formats of the tensors, checked that none is left over."""
    for name in sorted(set(wanted).difference(checkpoint.compressible(0))):
        why = "cannot be compressed" if name in checkpoint else "is not in it"
        raise FileError(
            f"{checkpoint.path}: a format is given for tensor {name!r}, which {why}; compressed are tensors of "
            f"{', '.join(_xp.FLOAT_DTYPES)} with two or more dimensions: plan for this file"
        )
    return {name: wanted[name] for name in checkpoint.compressible(min_size, keep) if name in wanted}


def _quantizing(
    file: File,
    chosen: Mapping[str, Choice],
    layout: Layout,
    device: str,
    taken: set[str],
    not_finite: _NotFinite,
    memory: Callable[[int], np.ndarray],
) -> Job:
    reader = file.reader
    configs = {}
    made: dict[str, Entry] = {}
    for name, (format, _) in chosen.items():
        entry = reader.entries[name]
        try:
            format.check_shape(entry.shape)
        except FormatError as error:
            raise FileError(f"{file.path}: tensor {name!r}: {error}; or keep it as it is (keep=, --keep)") from error
        dtype = _xp.float_dtype(entry.dtype)
        made.update(free_entries(layout, name, taken, format, format.planes(entry.shape), entry.shape, dtype))
        configs[name] = config_of(format, entry.shape, dtype)
    taken.update(made)

    def convert(name: str) -> Mapping[str, np.ndarray]:
        # No format keeps the array that it is given, so one piece of memory serves all: fresh pages take time.
        x = _xp.to_device(reader.array(name, memory(reader.entries[name].nbytes)), device)
        not_finite.add(name, x)
        format, given = chosen[name]
        return layout.arrays(name, quantize(x, format, **given))

    converted = {name: reader.entries[name].nbytes for name in chosen}
    copied = [name for name in reader.entries if name not in converted]
    entries = {**{name: reader.entries[name] for name in copied}, **made}
    return Job(
        reader,
        layout.container,
        entries,
        layout.metadata(reader.metadata, configs),
        copied,
        converted,
        convert,
        lambda: sum(entries[name].nbytes for name in made),
        elements=sum(reader.entries[name].size for name in chosen),
        tensors_copied=len(file.plain) - len(chosen) + len(file.compressed),
        compressed_already=len(file.compressed),
    )


def dequantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    device: str = "auto",
    force: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> FileReport:
    """Restore the tensors of what `quantize_file` or `save` or bitsandbytes wrote, one at a time.

    Parameters
    ----------
    source, target : path_like
        As for `quantize_file`.
    device : str, default "auto"
        Where to decompress: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one.
    force, resume, progress : bool, default False
        As for `quantize_file`.

    Returns
    -------
    FileReport

    Raises
    ------
    FileError
        When `source` is not a safetensors file with compressed tensors, when a plane is missing or does not fit its
        configuration, when `target` exists or cannot be written, when another process is writing it, or writes to
        `source` meanwhile.
    DeviceError
        When the device is not known.

    Notes
    -----
    The result has the names, shapes, dtypes and metadata of what was compressed; every other tensor is copied byte for
    byte. Memory holds about twice the largest tensor.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.safetensors", {"w": kb.quantize(np.ones((64, 64), np.float32), "kbit4")})
    ...     report = kb.io.dequantize_file(f"{folder}/a.safetensors", f"{folder}/b.safetensors")
    ...     restored = kb.io.load(f"{folder}/b.safetensors")["w"].copy()
    >>> report.converted, restored.shape, restored.dtype
    (1, (64, 64), dtype('float32'))
    """
    began = time.perf_counter()
    device = _xp.resolve_device(device)
    checkpoint = Checkpoint(as_path(source, "source"), mapped=False)
    if not checkpoint.compressed and checkpoint.metadata == checkpoint.reader.metadata:
        known = " or ".join(layout.name for layout in LAYOUTS)
        raise FileError(f"{checkpoint.path} holds no tensors compressed by {known}: there is nothing to dequantize")
    jobs = {name: _dequantizing(checkpoint, file, device) for name, file in checkpoint.files.items()}
    return _run(checkpoint, target, jobs, began, "dequantize", {}, force=force, resume=resume, progress=progress)


def _dequantizing(checkpoint: Checkpoint, file: File, device: str) -> Job:
    entries = {name: file.reader.entries[name] for name in file.plain}
    converted = {}
    for name, about in file.compressed.items():
        entries[name] = entry_of(about)
        converted[name] = sum(entry.nbytes for entry in checkpoint.stored(name).values())

    def convert(name: str) -> Mapping[str, np.ndarray]:
        q: Any = checkpoint[name]
        return {name: _xp.to_device(q.to_device(device).dequantize(), "cpu")}

    return Job(
        file.reader,
        SAFETENSORS,
        entries,
        file.metadata,
        file.plain,
        converted,
        convert,
        lambda: sum(converted.values()),
        elements=sum(entries[name].size for name in converted),
        tensors_copied=len(file.plain),
        compressed_already=0,
    )


def _run(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    jobs: Mapping[str, Job],
    began: float,
    label: str,
    options: Mapping[str, Any],
    *,
    force: bool,
    resume: bool,
    progress: bool,
    not_finite: _NotFinite | None = None,
    unused_keep: tuple[str, ...] = (),
) -> FileReport:
    """Run the jobs, into one file or a folder of them."""
    resumed = 0
    path = as_path(target, "target")
    with progress_bar(label, checkpoint.nbytes, progress) as advance:
        if resume and not (force and not checkpoint.is_folder) and _is_there(checkpoint, path):
            _compare(checkpoint, path, jobs, advance)
            resumed = len(jobs)
            if checkpoint.is_folder:
                forget(path, _note(checkpoint, label, options))
        elif checkpoint.is_folder:
            path = check_folder(target)
            check_space(path.parent, _nbytes(jobs) if not resume else 0)
            with filling(path, _note(checkpoint, label, options), resume) as folder:
                for name, job in jobs.items():
                    if resume and (folder / name).exists():
                        finished(job.container, folder / name, job.entries, job.metadata)
                        resumed += 1
                        advance(job.file.nbytes)
                        continue
                    with job.container.writing(folder / name, job.entries, job.metadata, force=False) as writer:
                        job.run(writer, advance)
                        checkpoint.check_unchanged()
                if checkpoint.index is not None:
                    write_index(folder, checkpoint.index, _index(checkpoint, jobs))
        else:
            (job,) = jobs.values()
            path = check_file(target, force, checkpoint.paths)
            with job.container.writing(path, job.entries, job.metadata, force) as writer:
                job.run(writer, advance)
                checkpoint.check_unchanged()
    counts = {} if not_finite is None else not_finite.counts()
    return FileReport(
        converted=sum(len(job.converted) for job in jobs.values()),
        copied=sum(job.tensors_copied for job in jobs.values()),
        elements=sum(job.elements for job in jobs.values()),
        compressed_nbytes=sum(job.compressed_nbytes() for job in jobs.values()),
        nbytes_before=checkpoint.nbytes,
        nbytes_after=_nbytes(jobs),
        seconds=time.perf_counter() - began,
        unused_keep=unused_keep,
        resumed=resumed,
        compressed_already=sum(job.compressed_already for job in jobs.values()),
        nan=sum(nan for nan, _ in counts.values()),
        infinite=sum(infinite for _, infinite in counts.values()),
        not_finite=tuple(counts),
    )


def _is_there(checkpoint: Checkpoint, path: Path) -> bool:
    """Whether a run may have finished this output: it has files in it, or is one that is not the input."""
    with reading(path):
        if checkpoint.is_folder:
            return path.is_dir() and any(path.iterdir())
        return path.is_file() and not any(path.samefile(source) for source in checkpoint.paths)


def _compare(checkpoint: Checkpoint, path: Path, jobs: Mapping[str, Job], advance: Callable[[int], object]) -> None:
    """Do the work once more, and compare every byte with what is there."""
    try:
        writers = {
            name: Comparison(job.container, path / name if checkpoint.is_folder else path, job.entries, job.metadata)
            for name, job in jobs.items()
        }
        if checkpoint.index is not None:
            wanted = _index(checkpoint, jobs)
            with reading(path / checkpoint.index), open(path / checkpoint.index, "rb") as file:
                if file.read(len(wanted) + 1) != wanted:
                    raise Unlike(f"{path / checkpoint.index} is another index")
    except FileError as error:
        raise _in_the_way(path, error) from error
    for name, job in jobs.items():
        try:
            job.run(writers[name], advance)
        except Unlike as error:
            raise _in_the_way(path, error) from error
        checkpoint.check_unchanged()


def _in_the_way(path: Path, error: FileError) -> FileError:
    return FileError(
        f"{path} is there already, and it is not what this command writes with this input and these options ({error}): "
        "choose another path, or delete it"
    )


def _index(checkpoint: Checkpoint, jobs: Mapping[str, Job]) -> bytes:
    weight_map = {entry: name for name, job in jobs.items() for entry in job.entries}
    return index_text(weight_map, {**checkpoint.index_metadata, "total_size": _nbytes(jobs)})


def _nbytes(jobs: Mapping[str, Job]) -> int:
    return sum(entry.nbytes for job in jobs.values() for entry in job.entries.values())


def _note(checkpoint: Checkpoint, label: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same when a run is resumed: the command, and the input as far as that is cheap to tell."""
    files = {name: file.reader.identity() for name, file in checkpoint.files.items()}
    return {"kbitcupy": __version__, "command": label, **options, "files": files}


@contextlib.contextmanager
def progress_bar(label: str, nbytes: int, show: bool) -> Iterator[Callable[[int], object]]:
    """Yields what counts bytes up to `nbytes`, on stderr where `show` says so."""
    if not show:
        yield lambda nbytes: None
        return
    from tqdm.auto import tqdm  # most calls show no bar; a widget in a notebook, text elsewhere

    with tqdm(desc=label, total=nbytes, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
