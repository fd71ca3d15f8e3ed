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
from .bitsandbytes import BitsandbytesCheckpoint, BitsandbytesLayout
from .checkpoint import Checkpoint, write_index
from .safetensors import MIN_SIZE, NAMES, Entry, Layout, Put, SourceFile, entry_of, writing

#: How compressed tensors can be stored.
LAYOUTS: Mapping[str, Layout] = {"kbitcupy": Layout(), "bitsandbytes": BitsandbytesLayout()}


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
    compressed_nbytes : callable
        Bytes of the compressed tensors, when they are known.
    elements, tensors_copied : int
        For the report.
    """

    file: SourceFile
    entries: dict[str, Entry]
    metadata: Mapping[str, str]
    copied: Sequence[str]
    converted: Mapping[str, int]
    convert: Callable[[str], Mapping[str, np.ndarray]]
    compressed_nbytes: Callable[[], int]
    elements: int
    tensors_copied: int

    def run(self, put: Put, advance: Callable[[int], object]) -> None:
        """Write everything, tensor by tensor."""
        for name in self.copied:
            put(name, self.file.raw(name))
            advance(self.file.entries[name].nbytes)
        for name, nbytes in self.converted.items():
            self._run_one(name, put)
            advance(nbytes)

    def _run_one(self, name: str, put: Put) -> None:
        """A function of its own: when it returns, nothing of this tensor stays in memory beside the next one."""
        try:
            arrays = self.convert(name)
        except FileError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise FileError(f"{self.file.path}: tensor {name!r}: {error}") from error
        for stored, array in arrays.items():
            put(stored, array)


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format | Mapping[str, str | Format],
    *,
    min_size: int = MIN_SIZE,
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
    format : str, Format or mapping of str to them
        Name of a registered format, or a format with its options chosen. A mapping names the format of each tensor to
        compress (see `kbitcupy.explore.plan`); all others are copied, and `min_size` and `keep` are not asked.
    min_size : int, default 512
        Tensors with fewer elements are copied, as are those of fewer than two dimensions and those whose dtype is not
        float16, bfloat16, float32 or float64.
    keep : str or iterable of str, optional
        Patterns (``"*embed*"``, ``"lm_head.weight"``; case matters) of names to copy as well.
    layout : {"kbitcupy", "bitsandbytes"}, default "kbitcupy"
        How compressed tensors are stored: ``"bitsandbytes"`` makes a file that bitsandbytes loads, see
        `kbitcupy.io.bitsandbytes.save`.
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
        name, the layout cannot hold a format, or a mapping names a tensor that is not there or cannot be compressed.
    FormatError, DeviceError
        When the format or the device is not known.
    ValueError
        When the layout is not known.

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
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; allowed are {', '.join(LAYOUTS)}")
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    wanted: Format | dict[str, Format]
    if isinstance(format, Mapping):
        wanted = {name: _made(one) for name, one in format.items()}
        options: dict[str, Any] = {"formats": {name: one.config() for name, one in wanted.items()}}
    else:
        wanted = _made(format)
        options = {"format": wanted.config(), "min_size": int(min_size), "keep": patterns}
    device = _xp.resolve_device(device)
    options["layout"] = layout
    checkpoint = BitsandbytesCheckpoint(source)
    if isinstance(wanted, dict):
        chosen = _planned(checkpoint, wanted)
    else:
        chosen = {
            name: dict.fromkeys(file.compressible(min_size, patterns), wanted)
            for name, file in checkpoint.files.items()
        }
    taken = {name for file in checkpoint.files.values() for name in (*file.entries, *file.compressed)}
    jobs = {
        name: _quantizing(file, chosen[name], LAYOUTS[layout], device, taken) for name, file in checkpoint.files.items()
    }
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


def _quantizing(file: SourceFile, chosen: Mapping[str, Format], layout: Layout, device: str, taken: set[str]) -> Job:
    configs = {}
    made: dict[str, Entry] = {}
    for name, format in chosen.items():
        stored, shape = format.stored(), file.entries[name].shape
        dtype = _xp.float_dtype(NAMES[file.entries[name].dtype])
        made.update(layout.entries(name, stored, shape, dtype, taken))
        configs[name] = config_of(stored, shape, dtype)
    taken.update(made)

    def convert(name: str) -> Mapping[str, np.ndarray]:
        return layout.arrays(name, quantize(_xp.to_device(file.array(name), device), chosen[name]))

    converted = {name: file.entries[name].nbytes for name in chosen}
    copied = [name for name in file.entries if name not in converted]
    entries = {**{name: file.entries[name] for name in copied}, **made}
    return Job(
        file,
        entries,
        layout.metadata(file.metadata, file.configs or {}, configs),
        copied,
        converted,
        convert,
        lambda: sum(entries[name].nbytes for name in made),
        elements=sum(file.entries[name].size for name in chosen),
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
    checkpoint = BitsandbytesCheckpoint(source)
    if all(file.configs is None and not file.compressed for file in checkpoint.files.values()):
        raise FileError(
            f"{checkpoint.path} holds no tensors compressed by kbitcupy or bitsandbytes: there is nothing to dequantize"
        )
    jobs = {name: _dequantizing(checkpoint, file, device) for name, file in checkpoint.files.items()}
    return _run(checkpoint, target, jobs, began, "dequantize", {}, force=force, resume=resume, progress=progress)


def _dequantizing(checkpoint: Checkpoint, file: SourceFile, device: str) -> Job:
    entries = {name: file.entries[name] for name in file.plain}
    converted = {}
    for name, (_, shape, dtype) in file.compressed.items():
        entries[name] = entry_of(dtype, shape, f"tensor {name!r}")
        converted[name] = sum(entry.nbytes for entry in checkpoint.stored(name).values())

    def convert(name: str) -> Mapping[str, np.ndarray]:
        q: Any = checkpoint[name]
        return {name: _xp.to_device(q.to_device(device).dequantize(), "cpu")}

    return Job(
        file,
        entries,
        file.metadata,
        file.plain,
        converted,
        convert,
        lambda: sum(converted.values()),
        elements=sum(entries[name].size for name in converted),
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
    with progress_bar(label, checkpoint.nbytes, progress) as advance:
        if checkpoint.is_folder:
            path = check_folder(target)
            check_space(path.parent, _nbytes(jobs) if not resume else 0)
            with filling(path, _note(checkpoint, label, options), resume) as folder:
                for name, job in jobs.items():
                    if resume and (folder / name).exists():
                        resumed += 1
                        job.entries.update(SourceFile(folder / name).entries)
                        advance(job.file.nbytes)
                        continue
                    with writing(folder / name, job.entries, job.metadata, force=False) as put:
                        job.run(put, advance)
                if checkpoint.index is not None:
                    weight_map = {entry: name for name, job in jobs.items() for entry in job.entries}
                    metadata = {**checkpoint.index_metadata, "total_size": _nbytes(jobs)}
                    write_index(folder, checkpoint.index, weight_map, metadata)
        else:
            (job,) = jobs.values()
            with writing(check_file(target, force, job.file.path), job.entries, job.metadata, force) as put:
                job.run(put, advance)
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
    )


def _nbytes(jobs: Mapping[str, Job]) -> int:
    return sum(entry.nbytes for job in jobs.values() for entry in job.entries.values())


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
    from tqdm.auto import tqdm  # most calls show no bar; a widget in a notebook, text elsewhere

    with tqdm(desc=label, total=nbytes, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
