"""Whole files and checkpoints: `quantize_file` and `dequantize_file`, one tensor at a time."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..backend import xp as _xp
from ..errors import DeviceError, FileError
from ..formats.base import Choice, Format, resolve
from .atomic import as_path, check_file, check_folder, check_space, filling, forget
from .bitnet import bitnet_job
from .changes import Changes
from .checkpoint import MIN_SIZE, Checkpoint, index_text, layout_for, write_text
from .container import (
    Comparison,
    Unlike,
    Writer,
    finished,
    reading,
)
from .conversion import Conversion, Job, is_one_file
from .executors import check_executor, is_local
from .gguf import GGUF
from .layouts import LAYOUTS, Layout, find_layout
from .llama_cpp import dequantizing, quantizing
from .pretrained import for_pretrained, natural_layout, restored_config
from .progress import Progress, progress_bar
from .recipes import find_recipe


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
    without_importance : tuple of str
        Tensors that `importance` has nothing for, though their formats take it.
    notes : tuple of str
        What the result lacks, or is not, for the program that loads it.
    files_copied : tuple of str
        Files of the source's folder that went along: configuration, tokenizer, text.
    files_left_out : tuple of str
        Files and folders of it that did not, such as pickles and other weights.
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
    without_importance: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files_copied: tuple[str, ...] = ()
    files_left_out: tuple[str, ...] = ()

    @property
    def bits_per_element(self) -> float:
        """Bits for each element of the converted tensors; NaN when there are none."""
        return self.compressed_nbytes * 8 / self.elements if self.elements else math.nan

    @property
    def gb_per_second(self) -> float:
        """1e9 bytes of the larger side, which is the one that is not compressed, for each second."""
        return max(self.nbytes_before, self.nbytes_after) / 1e9 / self.seconds if self.seconds else math.nan


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format | Choice | Mapping[str, str | Format | Choice] | None = None,
    *,
    recipe: str | None = None,
    importance: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    min_size: int | None = None,
    keep: str | Iterable[str] = (),
    layout: str | None = None,
    weight_scale: str | None = None,
    device: str | Sequence[str] = "auto",
    executor: Executor | None = None,
    force: bool = False,
    resume: bool = False,
    progress: bool = False,
    dry_run: bool = False,
) -> FileReport:
    """Compress the float tensors of a file or a sharded checkpoint, one at a time.

    Parameters
    ----------
    source : path_like
        What `load` takes: a file, a directory, or the index of shards.
    target : path_like
        Where to write: a file when `source` is a file, or when the name ends in ``.gguf``; else a directory, whose
        shards have the names of the source's. It is written beside (a directory as ``target.part``) and renamed.
    format : str, Format, tuple of one of them and a dict, or mapping of str to them
        Name of a registered format, or a format with its options chosen. A mapping names the format of each tensor to
        compress (see `kbitcupy.explore.plan`); all others are copied.
    recipe : str, optional
        In place of a format, one of llama-quantize's recipes, such as ``"q4_k_m"``, for GGUF files: the tensors get the
        types that llama-quantize would give them, see `kbitcupy.io.recipes`.
    importance : path_like, optional
        A file that llama-imatrix wrote: formats that weight errors are given the importance of each column.
    tokenizer : path_like, optional
        A GGUF file of the same model, whose tokenizer the GGUF file to write gets: checkpoints of Hugging Face bring
        none that llama.cpp knows.
    min_size : int, optional
        Tensors with fewer elements are copied, as are those of fewer than two dimensions and those whose dtype is not
        float16, bfloat16, float32 or float64. By default 512, and 0 beside a mapping or a recipe.
    keep : str or iterable of str, optional
        Patterns (``"*embed*"``, ``"lm_head.weight"``; case matters) of names to copy as well, also of those that a
        mapping names.
    layout : {"kbitcupy", "bitsandbytes", "compressed-tensors", "bitnet", "gguf", "bitnet.cpp"}, optional
        How compressed tensors are stored: ``"bitsandbytes"`` and ``"compressed-tensors"`` make files that these load,
        see `kbitcupy.io.layouts`, ``"gguf"`` a GGUF file, which has formats of its own; ``"bitnet"`` makes a folder of
        the format ``ternary`` that transformers loads, ``"bitnet.cpp"`` a GGUF file of it (I2_S) for that program. By
        default ``"gguf"`` where `target` ends in ``.gguf``; for a folder whose ``config.json`` is a model's the layout
        that transformers loads, where it knows the format: ``"bitsandbytes"`` for ``nf4`` and ``fp4``,
        ``"compressed-tensors"`` for ``int8``, ``int4``, ``uint8`` and ``uint4`` without zero points; else
        ``"kbitcupy"``.
    weight_scale : {"divides", "multiplies"}, optional
        As for `load`.
    device : str or sequence of str, default "auto"
        Where to compress: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one; several, such as
        ``"cuda:0,cuda:1"``, share the work of an `executor`. It is found where the work is done.
    executor : concurrent.futures.Executor, optional
        Who does the work, a few tensors at a time; by default this thread, one tensor after the other. Threads suit
        GPUs, of which one is kept busy by several, processes (spawned ones, ``mp_context=get_context("spawn")``) suit
        NumPy, and ``client.get_executor(pure=False, retries=2)`` of `distributed` is one for the workers of a Dask
        cluster, which see the same files under the same paths. The result has the same bytes.
    force : bool, default False
        Overwrite `target` if it is a file; a directory with files in it never is.
    resume : bool, default False
        Continue an interrupted run with the same arguments at the first shard that is missing, and keep finished
        shards in ``target.part`` if this one is interrupted too. A `target` that is there already is no error if it
        holds, byte for byte, what this call would write: the tensors are compressed again and compared.
    progress : bool, default False
        Show a progress bar on stderr.
    dry_run : bool, default False
        Only check all that can be checked before the first byte is written: the files, names, what the layout holds,
        what is in the way, room on the disk. The report then says what the sizes would be.

    Returns
    -------
    FileReport

    Raises
    ------
    FileError
        When `source` is no file that `load` reads, `target` exists or cannot be written, two tensors would
        get the same name, the layout cannot hold a format, or a mapping names a tensor that is not there or cannot be
        compressed; when another process is writing `target`, or writes to `source` meanwhile.
    FormatError, DeviceError
        When the format or the device is not known.
    TypeError
        When a path is none, or both a format and a recipe are given, or neither.
    ValueError
        When the layout is not known, or a recipe is given for another one than ``"gguf"``.

    Notes
    -----
    Of a folder, files of configuration, tokenizer and text go along; pickles and other weights stay behind, and the
    report names them. With ``"bitsandbytes"`` and ``"compressed-tensors"`` embeddings, the head and experts stay as
    they are, for transformers swaps linear layers only, and ``config.json`` gets the ``quantization_config`` that
    ``from_pretrained`` asks for: it computes what it would with the decoded weights. Scales of compressed-tensors are
    rounded to the dtype of the weights before codes are chosen. In a model's folder of the layout ``"kbitcupy"``
    ``config.json`` makes transformers refuse it, which would fill the layers with random numbers.

    A checkpoint of Hugging Face that becomes a GGUF file gets llama.cpp's names, order of rows and metadata where its
    ``config.json`` says that it is a llama (or Mistral) or bitnet, and norms and biases in float32. `dequantize_file`
    gives such models Hugging Face's names and order back.

    A BitNet, of architecture bitnet or with BitNet's ``quantization_config``, has ternary linear layers, and
    embeddings and a head that stay as they are; ``"tq2_0"`` and ``"tq1_0"`` mean ``"ternary"`` there, stored as that
    type of GGUF, with a half as scale and the float32 tensor ``.scale`` beside that makes up for its rounding. What is
    ternary already keeps its trits and its scale. ``"bitnet"`` writes ``config.json`` too; its scales are rounded to
    the dtype of the weights.

    Copied tensors keep their bytes whatever their dtype; tensors that are compressed already, and the file's own
    metadata, stay as they are. What is compressed already in a file of another kind keeps its format and gets the new
    layout; of GGUF's metadata, safetensors keeps single values, as text. Memory holds about twice the largest tensor. A
    source that somebody writes to while it is read is an error, and nothing is kept.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/a.safetensors", {"w": np.ones((64, 64), np.float32), "bias": np.zeros(64)})
    ...     report = kb.io.quantize_file(f"{folder}/a.safetensors", f"{folder}/b.safetensors", "kbit4")
    >>> report.converted, report.copied, report.nbytes_before, report.nbytes_after
    (1, 1, 16896, 2692)
    """
    arguments: dict[str, Any] = {
        "source": source,
        "target": target,
        "format": format,
        "recipe": recipe,
        "importance": importance,
        "tokenizer": tokenizer,
        "min_size": min_size,
        "keep": keep if isinstance(keep, str) else tuple(keep),
        "layout": layout,
        "weight_scale": weight_scale,
    }
    how: dict[str, Any] = {"device": device, "executor": executor, "force": force, "resume": resume}
    return _convert(_plan_quantize, arguments, **how, progress=progress, dry_run=dry_run)


def _convert(
    plan: Callable[..., tuple[Conversion, dict[str, Any]]], arguments: Mapping[str, Any], **how: Any
) -> FileReport:
    """Plan a conversion from these arguments, which other processes can repeat, and do it; `how` is as for `_run`."""
    began = time.perf_counter()
    conversion, said = plan(**arguments)
    conversion.planned_by(plan, _from_anywhere(arguments))
    return replace(_run(conversion, arguments["target"], began, **how), **said)


def _from_anywhere(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments whose paths mean the same in processes with another working directory."""
    paths = ("source", "target", "importance", "tokenizer")
    return {
        name: os.path.abspath(as_path(value, name)) if name in paths and value is not None else value
        for name, value in arguments.items()
    }


def _plan_quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: Any,
    recipe: str | None,
    importance: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | None,
    min_size: int | None,
    keep: str | Sequence[str],
    layout: str | None,
    weight_scale: str | None,
) -> tuple[Conversion, dict[str, Any]]:
    """The work of `quantize_file`, and what its report says beside."""
    layout_name = layout_for(target) if layout is None else layout
    target_layout = find_layout(layout_name)
    into_gguf = target_layout.container is GGUF
    if (format is None) == (recipe is None):
        raise TypeError("give either a format, such as 'kbit4', or recipe=, such as 'q4_k_m'")
    if recipe is not None and not into_gguf:
        raise FileError(f"recipe {recipe!r} is for the layout 'gguf'; got {layout_name!r}: let target end in .gguf")
    if tokenizer is not None and not into_gguf:
        raise FileError(f"a tokenizer is for the layout 'gguf'; got {layout_name!r}: let target end in .gguf")
    if min_size is None:
        min_size = MIN_SIZE if format is not None and not isinstance(format, Mapping) else 0
    if isinstance(min_size, bool) or not isinstance(min_size, (int, np.integer)) or min_size < 0:
        raise ValueError(f"min_size is {min_size!r}; it must be a non-negative integer")
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    options: dict[str, Any] = {"min_size": int(min_size), "keep": patterns}
    if weight_scale is not None:
        options["weight_scale"] = weight_scale
    wanted: Choice | dict[str, Choice] | None = None
    if recipe is not None:
        options["recipe"] = find_recipe(recipe)
    elif isinstance(format, Mapping):
        wanted = {name: resolve(one) for name, one in format.items()}
        options["formats"] = {name: _described(one) for name, one in wanted.items()}
    elif format is not None:
        wanted = resolve(format)
        options["format"] = _described(wanted)
    checkpoint = Checkpoint(as_path(source, "source"), mapped=False, weight_scale=weight_scale)
    chosen: Mapping[str, Choice] = {}
    if isinstance(wanted, dict):
        chosen = _planned(checkpoint, wanted, int(min_size), patterns)
    elif wanted is not None:
        chosen = dict.fromkeys(checkpoint.compressible(min_size, patterns), wanted)
    if layout is None and not into_gguf:
        target_layout = find_layout(natural_layout(checkpoint, chosen))
    options["layout"] = target_layout.name
    one_file = is_one_file(checkpoint, target)
    planned = isinstance(wanted, dict)
    loadable = for_pretrained(checkpoint, chosen, target_layout, planned=planned, one_file=one_file)
    job = bitnet_job(checkpoint, wanted, loadable.choices, target_layout, recipe)
    outcome = quantizing(
        checkpoint,
        job,
        into_gguf=into_gguf,
        recipe=recipe,
        min_size=int(min_size),
        keep=patterns,
        importance=importance,
        tokenizer=tokenizer,
    )
    if importance is not None:
        given = [change.choice for change in outcome.changes.tensors.values() if change.choice is not None]
        options["importance"] = [_described(choice)["given"] for choice in given]
    if tokenizer is not None:
        values = {key: value for key, value in outcome.changes.metadata.items() if key.startswith("tokenizer.")}
        options["tokenizer"] = hashlib.sha256(b"".join(value.raw for value in values.values())).hexdigest()
    changes = replace(outcome.changes, beside={**loadable.beside, **outcome.changes.beside})
    if changes.beside:
        options["beside"] = {name: hashlib.sha256(text).hexdigest() for name, text in changes.beside.items()}
    conversion = Conversion.of(checkpoint, target, changes, job.layout, "quantize", options)
    return conversion, {
        "unused_keep": tuple(p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in checkpoint)),
        "without_importance": outcome.without_importance,
        "notes": (*loadable.notes, *outcome.notes),
    }


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


def dequantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    weight_scale: str | None = None,
    device: str | Sequence[str] = "auto",
    executor: Executor | None = None,
    force: bool = False,
    resume: bool = False,
    progress: bool = False,
    dry_run: bool = False,
) -> FileReport:
    """Restore the tensors of what `quantize_file`, `save`, bitsandbytes or llama.cpp wrote, one at a time.

    Parameters
    ----------
    source, target : path_like
        As for `quantize_file`. A GGUF file is written where `target` ends in ``.gguf``, safetensors otherwise.
    dtype : {"float16", "bfloat16", "float32", "float64"}, optional
        dtype of the restored tensors; by default what the file says, which is float32 for GGUF's types.
    weight_scale : {"divides", "multiplies"}, optional
        As for `load`.
    device, executor
        As for `quantize_file`.
    force, resume, progress, dry_run : bool, default False
        As for `quantize_file`.

    Returns
    -------
    FileReport

    Raises
    ------
    FileError
        When `source` is no file with compressed tensors, when a plane is missing or does not fit its
        configuration, when `target` exists or cannot be written, when another process is writing it, or writes to
        `source` meanwhile.
    DeviceError
        When the device is not known.

    Notes
    -----
    The result has the names, shapes, dtypes and metadata of what was compressed; every other tensor is copied byte for
    byte. A llama or bitnet of llama.cpp gets Hugging Face's names and order of rows, unless a GGUF file is written;
    what llama.cpp has computed from the configuration is left out, and no ``config.json`` is made. Memory holds about
    twice the largest tensor. Of a folder the same files go along as with `quantize_file`; its ``config.json`` no longer
    says that anything is compressed.

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
    arguments: dict[str, Any] = {
        "source": source,
        "target": target,
        "dtype": None if dtype is None else _xp.float_dtype(dtype).name,
        "weight_scale": weight_scale,
    }
    how: dict[str, Any] = {"device": device, "executor": executor, "force": force, "resume": resume}
    return _convert(_plan_dequantize, arguments, **how, progress=progress, dry_run=dry_run)


def _plan_dequantize(
    source: str | os.PathLike[str], target: str | os.PathLike[str], dtype: str | None, weight_scale: str | None
) -> tuple[Conversion, dict[str, Any]]:
    """The work of `dequantize_file`, and what its report says beside."""
    checkpoint = Checkpoint(as_path(source, "source"), mapped=False, weight_scale=weight_scale)
    if not checkpoint.compressed and checkpoint.metadata == checkpoint.reader.metadata:
        known = " or ".join(layout.name for layout in LAYOUTS)
        raise FileError(f"{checkpoint.path} holds no tensors compressed by {known}: there is nothing to dequantize")
    layout = find_layout(layout_for(target))
    asked = {"dtype": dtype, "weight_scale": weight_scale}
    options = {key: value for key, value in asked.items() if value is not None}
    outcome = dequantizing(checkpoint, dtype, into_gguf=layout.container is GGUF)
    beside = {} if is_one_file(checkpoint, target) else restored_config(checkpoint)
    changes = replace(outcome.changes, beside=beside)
    conversion = Conversion.of(checkpoint, target, changes, layout, "dequantize", options)
    return conversion, {"notes": outcome.notes}


def convert_checkpoint(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    changes: Changes,
    layout: Layout,
    *,
    label: str,
    options: Mapping[str, Any],
    **how: Any,
) -> FileReport:
    """Write a checkpoint, which is not mapped, anew in this process; `how` is what `quantize_file` takes beside."""
    conversion = Conversion.of(checkpoint, target, changes, layout, label, options)
    return _run(conversion, target, time.perf_counter(), **how)


def _run(
    conversion: Conversion,
    target: str | os.PathLike[str],
    began: float,
    *,
    device: str | Sequence[str] = "auto",
    executor: Executor | None = None,
    force: bool = False,
    resume: bool = False,
    progress: bool = False,
    dry_run: bool = False,
) -> FileReport:
    """Do the work, into one file or a folder of them."""
    executor = check_executor(executor)
    devices = _devices(device, executor)
    checkpoint, jobs, one_file = conversion.checkpoint, conversion.jobs, conversion.one_file
    if not is_local(executor):
        _ = conversion.fingerprint  # as long as nothing is known of files that are finished
    resumed, counts = 0, {}
    path = as_path(target, "target")

    def texts() -> dict[str, bytes]:  # an index says what tensors take, which is known in the end
        index = {} if conversion.index is None else {conversion.index: _index(checkpoint, jobs)}
        return {**conversion.beside, **index}

    tensors = sum(len(job.copied) + len(job.converted) for job in jobs.values())
    with progress_bar(conversion.label, checkpoint.nbytes, progress and not dry_run, tensors) as bar:
        is_there = resume and not (force and one_file) and _is_there(checkpoint, path, one_file)
        more = sum(other.nbytes for other in conversion.others)
        if dry_run:
            if not is_there:
                path = check_file(target, force, checkpoint.paths) if one_file else check_folder(target)
                check_space(path.parent, 0 if resume else _nbytes(jobs) + more)
        elif is_there:
            counts = _compare(conversion, path, texts, executor, devices, bar)
            resumed = len(jobs)
            if not one_file:
                forget(path, _note(conversion))
        elif not one_file:
            path = check_folder(target)
            check_space(path.parent, _nbytes(jobs) + more if not resume else 0)
            with filling(path, _note(conversion), resume) as folder:
                due = {}
                for name, job in jobs.items():
                    if resume and (folder / name).exists():
                        finished(job.container, folder / name, job.entries, job.metadata)
                        resumed += 1
                        bar.advance(job.nbytes)
                        bar.finished(len(job.copied) + len(job.converted))
                    else:
                        due[name] = _writing(job, folder / name, force=False)
                counts = conversion.run(due, executor, devices, bar)
                for other in conversion.others:
                    other.copy(folder)
                for name, text in texts().items():
                    write_text(folder, name, text)
        else:
            ((name, job),) = jobs.items()
            path = check_file(target, force, checkpoint.paths)
            counts = conversion.run({name: _writing(job, path, force)}, executor, devices, bar)
    return FileReport(
        converted=sum(job.changed for job in jobs.values()),
        copied=sum(job.kept for job in jobs.values()),
        elements=sum(job.elements for job in jobs.values()),
        compressed_nbytes=sum(job.compressed_nbytes() for job in jobs.values()),
        nbytes_before=checkpoint.nbytes,
        nbytes_after=_nbytes(jobs),
        seconds=time.perf_counter() - began,
        resumed=resumed,
        compressed_already=sum(job.compressed_already for job in jobs.values()),
        nan=sum(nan for nan, _ in counts.values()),
        infinite=sum(infinite for _, infinite in counts.values()),
        not_finite=tuple(name for job in jobs.values() for name in job.converted if name in counts),
        files_copied=tuple(other.name for other in conversion.others),
        files_left_out=conversion.left,
    )


def _writing(job: Job, path: Path, force: bool) -> Callable[[], contextlib.AbstractContextManager[Writer]]:
    return functools.partial(job.container.writing, path, job.entries, job.metadata, force)


def _devices(device: str | Sequence[str], executor: Executor) -> tuple[str, ...]:
    """The devices to share the work out to, which are there if it is done in this process.

    Raises
    ------
    DeviceError
        When one is not known.
    """
    names = device.split(",") if isinstance(device, str) else tuple(device)
    if not names:
        raise DeviceError("device names none; allowed are 'auto', 'cpu', 'cuda:N' and several, such as 'cuda:0,cuda:1'")
    find = _xp.resolve_device if is_local(executor) else _xp.device_name
    return tuple(dict.fromkeys(map(find, names)))


def _is_there(checkpoint: Checkpoint, path: Path, one_file: bool) -> bool:
    """Whether a run may have finished this output: it has files in it, or is one that is not the input."""
    with reading(path):
        if not one_file:
            return path.is_dir() and any(path.iterdir())
        return path.is_file() and not any(path.samefile(source) for source in checkpoint.paths)


def _compare(
    conversion: Conversion,
    path: Path,
    texts: Callable[[], Mapping[str, bytes]],
    executor: Executor,
    devices: Sequence[str],
    bar: Progress,
) -> dict[str, tuple[int, int]]:
    """Do the work once more, and compare every byte with what is there."""
    try:
        writers = {
            name: Comparison(job.container, path if conversion.one_file else path / name, job.entries, job.metadata)
            for name, job in conversion.jobs.items()
        }
        for name, wanted in texts().items():
            with reading(path / name), open(path / name, "rb") as file:
                if file.read(len(wanted) + 1) != wanted:
                    raise Unlike(f"{path / name} is another one")
        for other in conversion.others:
            if not other.is_at(path):
                raise Unlike(f"{path / other.name} is not {other.path}")
    except FileError as error:
        raise _in_the_way(path, error) from error
    due = {name: functools.partial(_there, writer) for name, writer in writers.items()}
    try:
        return conversion.run(due, executor, devices, bar)
    except Unlike as error:
        raise _in_the_way(path, error) from error


@contextlib.contextmanager
def _there(writer: Writer) -> Iterator[Writer]:
    """What needs nothing done in the end."""
    yield writer


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


def _note(conversion: Conversion) -> dict[str, Any]:
    """What has to be the same when a run is resumed: the command, and the input as far as that is cheap to tell."""
    files = {name: file.reader.identity() for name, file in conversion.checkpoint.files.items()}
    return {"kbitcupy": __version__, "command": conversion.label, **conversion.options, "files": files}
