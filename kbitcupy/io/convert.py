"""Whole files and checkpoints: `quantize_file` and `dequantize_file`, one tensor at a time."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _xp
from .._version import __version__
from ..array import config_of
from ..errors import FileError
from ..formats.base import Format, get_format
from ..ops import quantize
from .atomic import check_file, check_folder, check_space, filling
from .checkpoint import Checkpoint, write_index
from .safetensors import MIN_SIZE, NAMES, Entry, Put, SourceFile, entry_of, plane_entries, with_configs, writing


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
        Shards that an earlier run had finished.
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
    file : SourceFile
        The file to read.
    entries, metadata : mapping
        Header of the file to write.
    copied : list of str
        Stored tensors that keep their bytes.
    converted : dict of str to int
        Tensors that do not, and their bytes in the file to read.
    convert : callable
        Takes the name of a tensor, returns the arrays to store by their names.
    elements, compressed_nbytes, tensors_copied : int
        For the report.
    """

    file: SourceFile
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    copied: Sequence[str]
    converted: Mapping[str, int]
    convert: Callable[[str], Mapping[str, np.ndarray]]
    elements: int
    compressed_nbytes: int
    tensors_copied: int

    def run(self, put: Put, advance: Callable[[int], object]) -> None:
        """Write everything, tensor by tensor."""
        for name in self.copied:
            put(name, self.file.raw(name))
            advance(self.file.entries[name].nbytes)
        for name, nbytes in self.converted.items():
            try:
                arrays = self.convert(name)
            except FileError:
                raise
            except (ValueError, TypeError, OverflowError) as error:
                raise FileError(f"{self.file.path}: tensor {name!r}: {error}") from error
            for stored, array in arrays.items():
                put(stored, array)
            del arrays  # not beside the next tensor's
            advance(nbytes)


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format | Mapping[str, str | Format],
    *,
    min_size: int = MIN_SIZE,
    keep: str | Iterable[str] = (),
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
    format : str, Format or mapping of str to them
        Name of a registered format, or a format with its options chosen. A mapping names the format of each tensor to
        compress (see `kbitcupy.explore.plan`); all others are copied, and `min_size` and `keep` are not asked.
    min_size : int, default 512
        Tensors with fewer elements are copied, as are those of fewer than two dimensions and those whose dtype is not
        float16, bfloat16, float32 or float64.
    keep : str or iterable of str, optional
        Patterns (``"*embed*"``, ``"lm_head.weight"``; case matters) of names to copy as well.
    device : str, default "auto"
        Where to compress: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one.
    force : bool, default False
        Overwrite `target` if it is a file; a directory with files in it never is.
    resume : bool, default False
        Continue an interrupted run with the same arguments at the first shard that is missing, and keep finished
        shards in ``target.part`` if this one is interrupted too.
    progress : bool, default False
        Show a progress bar on stderr.

    Returns
    -------
    FileReport

    Raises
    ------
    FileError
        When `source` is not a safetensors file, `target` exists or cannot be written, two tensors would get the same
        name, or a mapping names a tensor that is not there or cannot be compressed.
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
    wanted: Format | dict[str, Format]
    if isinstance(format, Mapping):
        wanted = {name: _made(one) for name, one in format.items()}
        options: dict[str, Any] = {"formats": {name: one.config() for name, one in wanted.items()}}
    else:
        wanted = _made(format)
        options = {"format": wanted.config(), "min_size": int(min_size), "keep": patterns}
    device = _xp.resolve_device(device)
    checkpoint = Checkpoint(source)
    if isinstance(wanted, dict):
        chosen = _planned(checkpoint, wanted)
    else:
        chosen = {
            name: dict.fromkeys(file.compressible(min_size, patterns), wanted)
            for name, file in checkpoint.files.items()
        }
    taken = {name for file in checkpoint.files.values() for name in (*file.entries, *file.compressed)}
    jobs = {name: _quantizing(file, chosen[name], device, taken) for name, file in checkpoint.files.items()}
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
        unused_keep=tuple(p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in checkpoint)),
    )


def _made(format: str | Format) -> Format:
    return format if isinstance(format, Format) else get_format(format)


def _planned(checkpoint: Checkpoint, wanted: Mapping[str, Format]) -> dict[str, dict[str, Format]]:
    """For each file the formats of its tensors, checked that no tensor is left over."""
    chosen = {}
    missing = dict(wanted)
    for path, file in checkpoint.files.items():
        possible = file.compressible(0)
        chosen[path] = {name: missing.pop(name) for name in possible if name in wanted}
    for name in missing:
        why = "cannot be compressed" if name in set(checkpoint) else "is not in it"
        raise FileError(
            f"{checkpoint.path}: a format is given for tensor {name!r}, which {why}; compressed are tensors of "
            f"{', '.join(_xp.FLOAT_DTYPES)} with two or more dimensions: plan for this file"
        )
    return chosen


def _quantizing(file: SourceFile, chosen: Mapping[str, Format], device: str, taken: set[str]) -> Job:
    configs = dict(file.configs or {})
    planes: dict[str, Entry] = {}
    for name, format in chosen.items():
        stored, shape = format.stored(), file.entries[name].shape
        planes.update(plane_entries(name, stored, shape, taken))
        configs[name] = config_of(stored, shape, _xp.float_dtype(NAMES[file.entries[name].dtype]))
    taken.update(planes)

    def convert(name: str) -> Mapping[str, np.ndarray]:
        q = quantize(_xp.to_device(file.array(name), device), chosen[name]).get()
        return {f"{name}.{plane}": array for plane, array in q.planes.items()}

    converted = {name: file.entries[name].nbytes for name in chosen}
    copied = [name for name in file.entries if name not in converted]
    return Job(
        file,
        {**{name: file.entries[name] for name in copied}, **planes},
        with_configs(file.metadata, configs),
        copied,
        converted,
        convert,
        elements=sum(file.entries[name].size for name in chosen),
        compressed_nbytes=sum(entry.nbytes for entry in planes.values()),
        tensors_copied=len(file.plain) - len(chosen) + len(file.compressed),
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
    """Restore the tensors of what `quantize_file` or `save` wrote, one at a time.

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
        When `source` is not a safetensors file of kbitcupy, when a plane is missing or does not fit its
        configuration, or when `target` exists or cannot be written.
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
    checkpoint = Checkpoint(source)
    if all(file.configs is None for file in checkpoint.files.values()):
        raise FileError(f"{checkpoint.path} holds no tensors compressed by kbitcupy: there is nothing to dequantize")
    jobs = {name: _dequantizing(file, device) for name, file in checkpoint.files.items()}
    return _run(checkpoint, target, jobs, began, "dequantize", {}, force=force, resume=resume, progress=progress)


def _dequantizing(file: SourceFile, device: str) -> Job:
    entries = {name: file.entries[name] for name in file.plain}
    converted = {}
    for name, (format, shape, dtype) in file.compressed.items():
        entries[name] = entry_of(dtype, shape, f"tensor {name!r}")
        converted[name] = sum(file.entries[f"{name}.{plane}"].nbytes for plane in format.planes(shape))

    def convert(name: str) -> Mapping[str, np.ndarray]:
        return {name: _xp.to_device(file.quantized(name).to_device(device).dequantize(), "cpu")}

    return Job(
        file,
        entries,
        file.metadata,
        file.plain,
        converted,
        convert,
        elements=sum(entries[name].size for name in converted),
        compressed_nbytes=sum(converted.values()),
        tensors_copied=len(file.plain),
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
    unused_keep: tuple[str, ...] = (),
) -> FileReport:
    """Run the jobs, into one file or a folder of them."""
    resumed = 0
    sizes = {name: sum(entry.nbytes for entry in job.entries.values()) for name, job in jobs.items()}
    with progress_bar(label, checkpoint.nbytes, progress) as advance:
        if checkpoint.is_folder:
            path = check_folder(target)
            check_space(path.parent, sum(sizes.values()) if not resume else 0)
            with filling(path, _note(checkpoint, label, options), resume) as folder:
                for name, job in jobs.items():
                    if resume and (folder / name).exists():
                        resumed += 1
                        advance(job.file.nbytes)
                        continue
                    with writing(folder / name, job.entries, job.metadata, force=False) as put:
                        job.run(put, advance)
                if checkpoint.index is not None:
                    weight_map = {entry: name for name, job in jobs.items() for entry in job.entries}
                    metadata = {**checkpoint.index_metadata, "total_size": sum(sizes.values())}
                    write_index(folder, checkpoint.index, weight_map, metadata)
        else:
            (job,) = jobs.values()
            with writing(check_file(target, force, job.file.path), job.entries, job.metadata, force) as put:
                job.run(put, advance)
    return FileReport(
        converted=sum(len(job.converted) for job in jobs.values()),
        copied=sum(job.tensors_copied for job in jobs.values()),
        elements=sum(job.elements for job in jobs.values()),
        compressed_nbytes=sum(job.compressed_nbytes for job in jobs.values()),
        nbytes_before=checkpoint.nbytes,
        nbytes_after=sum(sizes.values()),
        seconds=time.perf_counter() - began,
        unused_keep=unused_keep,
        resumed=resumed,
    )


def _note(checkpoint: Checkpoint, label: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same when a run is resumed: the command, and the input as far as that is cheap to tell."""
    files = {}
    for name, file in checkpoint.files.items():
        about = os.stat(file.path)
        files[name] = [about.st_size, about.st_mtime_ns]
    return {"kbitcupy": __version__, "command": label, **options, "files": files}


@contextlib.contextmanager
def progress_bar(label: str, nbytes: int, show: bool) -> Iterator[Callable[[int], object]]:
    """Yields what counts bytes up to `nbytes`, on stderr where `show` says so."""
    if not show:
        yield lambda nbytes: None
        return
    from tqdm import tqdm  # most calls show no bar

    with tqdm(desc=label, total=nbytes, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
