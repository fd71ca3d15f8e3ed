"""Whole files and checkpoints: `quantize_file` and `dequantize_file`, one tensor at a time."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from .bitnet import bitnet_job
from .changes import Changes
from .checkpoint import INDEX_ENDING, MIN_SIZE, STEM, Checkpoint, File, file_name, index_text, layout_for, write_text
from .companions import Companion, companions
from .container import Comparison, Container, Entry, FileReader, Reader, Unlike, Writer, entry_of, finished, reading
from .gguf import GGUF
from .layouts import LAYOUTS, Layout, find_layout
from .layouts.base import free_entries
from .llama_cpp import dequantizing, quantizing
from .pretrained import for_pretrained, natural_layout, restored_config
from .recipes import find_recipe
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


@dataclass(frozen=True)
class Job:
    """How a file is made.

    Parameters
    ----------
    reader : Reader
        Where the stored tensors are.
    files : sequence of FileReader
        The files that are read.
    container : Container
        The kind of file to write.
    entries, metadata : mapping
        What the file to write says of its tensors, and beside them.
    copied : mapping of str to str
        Stored tensors that keep their bytes, and their names in the file to write.
    converted : dict of str to int
        Tensors that do not, and their bytes in the file to read.
    convert : callable
        Takes the name of a tensor, returns the arrays to store by their names.
    compressed_nbytes : callable
        Bytes of the compressed tensors, when they are known.
    elements, changed, kept, compressed_already : int
        For the report: elements of the tensors that are compressed or decoded, how many these are and how many
        others, and how many of those are compressed.
    """

    reader: Reader
    files: Sequence[FileReader]
    container: Container
    entries: dict[str, Entry]
    metadata: Mapping[str, Any]
    copied: Mapping[str, str]
    converted: Mapping[str, int]
    convert: Callable[[str], Mapping[str, np.ndarray]]
    compressed_nbytes: Callable[[], int]
    elements: int
    changed: int
    kept: int
    compressed_already: int

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(file.nbytes for file in self.files)

    def run(self, writer: Writer, advance: Callable[[int], object]) -> None:
        """Write everything, tensor by tensor."""
        for name, target in self.copied.items():
            writer.put(target, self.reader.file_of(name).parts(name))
            advance(self.reader.entry(name).nbytes)
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
            raise FileError(f"{self.reader.path}: tensor {name!r}: {error}") from error
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
    format: str | Format | Choice | Mapping[str, str | Format | Choice] | None = None,
    *,
    recipe: str | None = None,
    importance: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    min_size: int | None = None,
    keep: str | Iterable[str] = (),
    layout: str | None = None,
    weight_scale: str | None = None,
    device: str = "auto",
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
    began = time.perf_counter()
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
    one_file = _is_one_file(checkpoint, target)
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
    unused = tuple(p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in checkpoint))
    report = convert_checkpoint(
        checkpoint,
        target,
        changes,
        job.layout,
        label="quantize",
        options=options,
        device=device,
        force=force,
        resume=resume,
        progress=progress,
        dry_run=dry_run,
        unused_keep=unused,
        began=began,
    )
    notes = (*loadable.notes, *outcome.notes)
    return replace(report, without_importance=outcome.without_importance, notes=notes)


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


def _is_one_file(checkpoint: Checkpoint, target: str | os.PathLike[str]) -> bool:
    """Whether a file is written, not a folder."""
    return not checkpoint.is_folder or as_path(target, "target").name.endswith(GGUF.ending)


def convert_checkpoint(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    changes: Changes,
    layout: Layout,
    *,
    label: str,
    options: Mapping[str, Any],
    device: str = "auto",
    force: bool = False,
    resume: bool = False,
    progress: bool = False,
    dry_run: bool = False,
    unused_keep: tuple[str, ...] = (),
    began: float | None = None,
) -> FileReport:
    """Write a checkpoint anew, with changes.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is read, not mapped.
    target : path_like
        As for `quantize_file`.
    changes : Changes
        What becomes of its tensors.
    layout : Layout
        How compressed tensors are stored.
    label : str
        The name of the command.
    options : mapping
        JSON values that differ where the changes do: unfinished work is continued only with the same ones.
    device, force, resume, progress, dry_run
        As for `quantize_file`.
    unused_keep : tuple of str
        For the report.
    began : float, optional
        `time.perf_counter` when the work began.

    Returns
    -------
    FileReport
    """
    began = time.perf_counter() if began is None else began
    device = _xp.resolve_device(device)
    one_file = _is_one_file(checkpoint, target)
    for name in (*changes.tensors, *changes.omitted, *(changes.order or ())):
        if name not in checkpoint and name not in changes.made:
            raise FileError(f"{checkpoint.path}: tensor {name!r} is not in it")
    if one_file and changes.beside:
        raise FileError(
            f"the layout {layout.name!r} writes a folder, of which {', '.join(changes.beside)} is a part: let target "
            f"not end in {GGUF.ending}"
        )
    files = list(checkpoint.files.items())
    groups = [[file for _, file in files]] if one_file else [[file] for _, file in files]
    work = _Work(checkpoint, changes, layout, device)
    jobs: dict[str, Job] = {}
    for number, group in enumerate(groups):
        kept = not one_file and work.same_kind
        jobs[files[number][0] if kept else file_name(layout.container, number, len(groups))] = work.job(
            group, number == 0
        )
    everything = {name: entry for job in jobs.values() for name, entry in job.entries.items()}
    changed = any(job.changed for job in jobs.values())
    for number, (file, job) in enumerate(jobs.items()):
        said = {key: value for key, value in job.metadata.items() if changes.metadata.get(key, value) is not None}
        about = layout.about_file(said, everything, (number, len(jobs), len(everything)), changed)
        if number == 0:
            given = {key: value for key, value in changes.metadata.items() if value is not None}
            about = {key: value for key, value in about.items() if key not in given}
            about.update(layout.container.adopt(given))
        jobs[file] = replace(job, metadata=about)
        job.container.check(job.entries, about)
    index = None
    if not one_file and layout.container is SAFETENSORS:
        index = checkpoint.index or (f"{STEM}{INDEX_ENDING}" if len(jobs) > 1 else None)
    others: list[Companion] = []
    left: list[str] = []
    if not one_file and checkpoint.folder is not None:
        own = {*(path.name for path in checkpoint.paths), *jobs, *changes.beside}
        others, left = companions(checkpoint.folder, own, as_path(target, "target"))
    report = _run(
        checkpoint,
        target,
        jobs,
        began,
        label,
        options,
        one_file=one_file,
        index=index,
        beside=changes.beside,
        others=others,
        force=force,
        resume=resume,
        progress=progress,
        dry_run=dry_run,
        not_finite=work.not_finite,
        unused_keep=unused_keep,
    )
    return replace(report, files_copied=tuple(other.name for other in others), files_left_out=tuple(left))


class _Work:
    """What the jobs of a conversion share.

    Parameters
    ----------
    checkpoint, changes, layout, device
        As for `convert_checkpoint`.
    """

    def __init__(self, checkpoint: Checkpoint, changes: Changes, layout: Layout, device: str):
        self._checkpoint, self._changes, self._layout, self._device = checkpoint, changes, layout, device
        self.not_finite, self._memory = _NotFinite(), _Memory()
        self.same_kind = all(file.reader.kind == layout.container.name for file in checkpoint.files.values())
        #: Whether tensors that are compressed already, and stay so, are copied as they are stored.
        self._as_stored = self.same_kind and not any(name in checkpoint.compressed for name in changes.tensors)
        self._order = {name: number for number, name in enumerate(changes.order or ())}
        self._taken: set[str] = set()
        for name in changes.made:
            if name in checkpoint:
                raise FileError(f"{checkpoint.path}: tensor {name!r} is to be made, but it is there")
            self._take(name)
        for name in checkpoint:
            if name not in changes.omitted:
                self._take(self._new_name(name))
                if self._copies(name):
                    self._taken.update(checkpoint.stored(name))

    def _take(self, name: str) -> None:
        if name in self._taken:
            raise FileError(f"{self._checkpoint.path}: two tensors would be named {name!r}")
        self._taken.add(name)

    def _new_name(self, name: str) -> str:
        change = self._changes.tensors.get(name)
        return name if change is None or change.name is None else change.name

    def _stays_compressed(self, name: str) -> bool:
        """Whether a tensor that is compressed stays as it is, wherever it is stored."""
        change = self._changes.tensors.get(name)
        return change is None or change.kept

    def _copies(self, name: str) -> bool:
        """Whether a tensor keeps its bytes."""
        return name not in self._changes.tensors and (self._as_stored or name not in self._checkpoint.compressed)

    def job(self, files: Sequence[File], first: bool) -> Job:
        """The job that makes one file of these; the first one has the tensors that the source does not have."""
        reader, compressed = self._checkpoint.reader, self._checkpoint.compressed
        names = [name for file in files for name in file.names if name not in self._changes.omitted]
        names += self._changes.made if first else ()
        if self._order:
            names.sort(key=lambda name: self._order.get(name, len(self._order)))
        entries: dict[str, Entry] = {}
        copied: dict[str, str] = {}
        converted: dict[str, int] = {}
        configs: dict[str, Any] = {}
        places = {stored: number for number, stored in enumerate(reader.names)}
        small: list[str] = []  # what is stored of tensors that are compressed
        elements = changed = decoded = 0
        for name in names:
            if name in self._changes.made:
                entries[name], converted[name] = entry_of(self._changes.made[name]), 0
                continue
            stored = self._checkpoint.stored(name)
            if self._copies(name):
                copied.update((each, each) for each in stored)
                entries.update(stored)
                continue
            made, config = self._made(name)
            entries.update(made)
            places.update(dict.fromkeys(made, places[next(iter(stored))]))
            converted[name] = sum(entry.nbytes for entry in stored.values())
            if config is not None:
                configs[self._new_name(name)] = config
            change = self._changes.tensors.get(name)
            if change is not None and not change.kept and (change.choice is not None or name in compressed):
                changed += 1
                elements += self._about(name).size
                if change.choice is None:
                    decoded += converted[name]
                else:
                    small += made
        if not self._order:  # what a tensor consists of need not lie side by side
            entries = dict(sorted(entries.items(), key=lambda entry: places.get(entry[0], len(places))))
        return Job(
            reader,
            [file.reader for file in files],
            self._layout.container,
            entries,
            self._metadata(files, configs),
            copied,
            converted,
            self._convert,
            lambda: decoded + sum(entries[name].nbytes for name in small),
            elements=elements,
            changed=changed,
            kept=len(names) - changed,
            compressed_already=sum(name in compressed and self._stays_compressed(name) for name in names),
        )

    def _about(self, name: str) -> Entry:
        """A tensor as it is, or would be if it were not compressed."""
        found = self._checkpoint.compressed.get(name)
        return self._checkpoint.reader.entry(name) if found is None else entry_of(found)

    def _made(self, name: str) -> tuple[dict[str, Entry], dict[str, Any] | None]:
        """What is stored for a tensor that does not keep its bytes, and its configuration if it is compressed."""
        about, change, new = self._about(name), self._changes.tensors.get(name), self._new_name(name)
        found = self._checkpoint.compressed.get(name)
        format, shape, dtype_name = (None if found is None else found.format), about.shape, about.dtype
        if change is not None and not change.kept:
            format = None if change.choice is None else change.choice[0]
            shape, dtype_name = change.shape or shape, change.dtype or dtype_name
        if format is None:
            itemsize = _xp.named_dtype(dtype_name).itemsize
            return {new: Entry(dtype_name, shape, math.prod(shape) * itemsize)}, None
        try:
            format.check_shape(shape)
            dtype = _xp.float_dtype(dtype_name)
        except (FormatError, TypeError) as error:
            path = self._checkpoint.reader.file_of(next(iter(self._checkpoint.stored(name)))).path
            raise FileError(f"{path}: tensor {name!r}: {error}; or keep it as it is (keep=, --keep)") from error
        planes = format.planes(shape) if found is None or not self._stays_compressed(name) else found.specs()
        made = free_entries(self._layout, new, self._taken, format, planes, shape, dtype)
        self._taken.update(made)
        return made, config_of(format, shape, dtype)

    def _metadata(self, files: Sequence[File], configs: Mapping[str, Any]) -> dict[str, Any]:
        if self._as_stored and self._changes.describes:
            base = {key: value for file in files for key, value in file.reader.metadata.items()}
        else:
            base = {key: value for file in files for key, value in file.metadata.items()}
        base = self._layout.container.adopt(base)
        if self._changes.describes:
            base = self._layout.metadata(base, configs)
        return base

    def _convert(self, name: str) -> Mapping[str, np.ndarray]:
        change, new, reader = self._changes.tensors.get(name), self._new_name(name), self._checkpoint.reader
        if name not in self._checkpoint:
            return {name: self._changes.made[name]}
        if name in self._checkpoint.compressed:
            q: Any = self._checkpoint[name]
            if change is None or change.kept:
                kept = q if change is None or change.transform is None else change.transform(q)
                return self._layout.arrays(new, kept)
            x = q.to_device(self._device).dequantize(dtype=change.dtype)
        else:
            # No format keeps the array that it is given, so one piece of memory serves all: fresh pages take time.
            x = reader.array(name, self._memory(reader.entry(name).nbytes))
            if change is not None and change.dtype is not None:
                with np.errstate(over="ignore"):  # it becomes infinite
                    x = x.astype(_xp.named_dtype(change.dtype), copy=False)
            if change is not None and change.choice is not None:
                x = _xp.to_device(x, self._device)
        if change is not None and change.transform is not None:
            x = change.transform(x)
        if change is None or change.choice is None:
            return {new: _xp.to_device(x, "cpu")}
        self.not_finite.add(name, x)
        format, given = change.choice
        if change.given_by is not None:
            given = {**given, **change.given_by(x)}
        return self._layout.arrays(new, quantize(x, format, **given))


def dequantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    weight_scale: str | None = None,
    device: str = "auto",
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
    device : str, default "auto"
        Where to decompress: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one.
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
    began = time.perf_counter()
    device = _xp.resolve_device(device)
    if dtype is not None:
        dtype = _xp.float_dtype(dtype).name
    checkpoint = Checkpoint(as_path(source, "source"), mapped=False, weight_scale=weight_scale)
    if not checkpoint.compressed and checkpoint.metadata == checkpoint.reader.metadata:
        known = " or ".join(layout.name for layout in LAYOUTS)
        raise FileError(f"{checkpoint.path} holds no tensors compressed by {known}: there is nothing to dequantize")
    layout = find_layout(layout_for(target))
    asked = {"dtype": dtype, "weight_scale": weight_scale}
    outcome = dequantizing(checkpoint, dtype, into_gguf=layout.container is GGUF)
    beside = {} if _is_one_file(checkpoint, target) else restored_config(checkpoint)
    report = convert_checkpoint(
        checkpoint,
        target,
        replace(outcome.changes, beside=beside),
        layout,
        label="dequantize",
        options={key: value for key, value in asked.items() if value is not None},
        device=device,
        force=force,
        resume=resume,
        progress=progress,
        dry_run=dry_run,
        began=began,
    )
    return replace(report, notes=outcome.notes)


def _run(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    jobs: Mapping[str, Job],
    began: float,
    label: str,
    options: Mapping[str, Any],
    *,
    one_file: bool,
    index: str | None,
    beside: Mapping[str, bytes],
    others: Sequence[Companion],
    force: bool,
    resume: bool,
    progress: bool,
    dry_run: bool = False,
    not_finite: _NotFinite | None = None,
    unused_keep: tuple[str, ...] = (),
) -> FileReport:
    """Run the jobs, into one file or a folder of them."""
    resumed = 0
    path = as_path(target, "target")

    def texts() -> dict[str, bytes]:  # an index says what tensors take, which is known in the end
        return {**beside, **({} if index is None else {index: _index(checkpoint, jobs)})}

    with progress_bar(label, checkpoint.nbytes, progress and not dry_run) as advance:
        is_there = resume and not (force and one_file) and _is_there(checkpoint, path, one_file)
        if dry_run:
            if not is_there:
                path = check_file(target, force, checkpoint.paths) if one_file else check_folder(target)
                check_space(path.parent, 0 if resume else _nbytes(jobs) + sum(other.nbytes for other in others))
        elif is_there:
            _compare(checkpoint, path, jobs, one_file, texts, others, advance)
            resumed = len(jobs)
            if not one_file:
                forget(path, _note(checkpoint, label, options))
        elif not one_file:
            path = check_folder(target)
            more = sum(other.nbytes for other in others)
            check_space(path.parent, _nbytes(jobs) + more if not resume else 0)
            with filling(path, _note(checkpoint, label, options), resume) as folder:
                for name, job in jobs.items():
                    if resume and (folder / name).exists():
                        finished(job.container, folder / name, job.entries, job.metadata)
                        resumed += 1
                        advance(job.nbytes)
                        continue
                    with job.container.writing(folder / name, job.entries, job.metadata, force=False) as writer:
                        job.run(writer, advance)
                        checkpoint.check_unchanged()
                for other in others:
                    other.copy(folder)
                for name, text in texts().items():
                    write_text(folder, name, text)
        else:
            (job,) = jobs.values()
            path = check_file(target, force, checkpoint.paths)
            with job.container.writing(path, job.entries, job.metadata, force) as writer:
                job.run(writer, advance)
                checkpoint.check_unchanged()
    counts = {} if not_finite is None else not_finite.counts()
    return FileReport(
        converted=sum(job.changed for job in jobs.values()),
        copied=sum(job.kept for job in jobs.values()),
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


def _is_there(checkpoint: Checkpoint, path: Path, one_file: bool) -> bool:
    """Whether a run may have finished this output: it has files in it, or is one that is not the input."""
    with reading(path):
        if not one_file:
            return path.is_dir() and any(path.iterdir())
        return path.is_file() and not any(path.samefile(source) for source in checkpoint.paths)


def _compare(
    checkpoint: Checkpoint,
    path: Path,
    jobs: Mapping[str, Job],
    one_file: bool,
    texts: Callable[[], Mapping[str, bytes]],
    others: Sequence[Companion],
    advance: Callable[[int], object],
) -> None:
    """Do the work once more, and compare every byte with what is there."""
    try:
        writers = {
            name: Comparison(job.container, path if one_file else path / name, job.entries, job.metadata)
            for name, job in jobs.items()
        }
        for name, wanted in texts().items():
            with reading(path / name), open(path / name, "rb") as file:
                if file.read(len(wanted) + 1) != wanted:
                    raise Unlike(f"{path / name} is another one")
        for other in others:
            if not other.is_at(path):
                raise Unlike(f"{path / other.name} is not {other.path}")
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
