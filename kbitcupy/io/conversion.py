"""A checkpoint that is written anew: what becomes of each tensor, planned first, and then done in pieces.

A piece is a few tensors of one file to write. Whoever began the work has the files open under temporary names; workers,
which may be other threads, other processes or other machines, open them once more and put their tensors where these
belong. So a piece that is done twice changes nothing, a worker that dies leaves nothing behind, and a file gets its
name from the one process that knows that all of it is there.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .._version import __version__
from ..array import QuantizedArray, config_of
from ..backend import xp as _xp
from ..backend.staging import GpuLane, Lane, lane, release
from ..errors import FileError, FormatError
from ..formats.base import Format, is_of_others, path_of
from ..ops import quantize
from .atomic import as_path
from .changes import Change, Changes
from .checkpoint import INDEX_ENDING, STEM, Checkpoint, File, file_name
from .companions import Companion, companions
from .container import Container, Elsewhere, Entry, FileReader, Reader, Writer, entry_of
from .executors import Inline, completed, workers_of
from .gguf import GGUF
from .layouts import Layout
from .layouts.base import free_entries
from .progress import Progress
from .safetensors import SAFETENSORS

# Pieces for each worker in what is left when one is cut: they become smaller and smaller, so none is waited for long in
# the end; bytes of a piece.
_SHARES, _LEAST_PIECE, _LARGEST_PIECE = 4, 1 << 24, 1 << 28


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
    made : mapping of str to sequence of str
        What is stored for each of these.
    convert : callable
        Takes the name of a tensor and a worker, returns the arrays to store by their names.
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
    made: Mapping[str, Sequence[str]]
    convert: Callable[[str, _Worker], Mapping[str, Any]]
    compressed_nbytes: Callable[[], int]
    elements: int
    changed: int
    kept: int
    compressed_already: int

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(file.nbytes for file in self.files)

    def run(self, names: Iterable[str], writer: Writer, worker: _Worker) -> None:
        """Write what becomes of these tensors, one after the other."""
        for name in names:
            if name in self.copied:
                worker.check()
                writer.put(self.copied[name], self.reader.file_of(name).parts(name))
                worker.advance(self.reader.entry(name).nbytes)
            else:
                worker.check()
                self._run_one(name, writer, worker)
                worker.advance(self.converted[name])

    def _run_one(self, name: str, writer: Writer, worker: _Worker) -> None:
        """A function of its own: when it returns, nothing of this tensor stays in memory beside the next one."""
        try:
            arrays = self.convert(name, worker)
        except FileError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise FileError(f"{self.reader.path}: tensor {name!r}: {error}") from error
        for stored, array in arrays.items():
            writer.put(stored, array if isinstance(array, np.ndarray) else worker.lane.parts(array))
        worker.not_finite.settle()

    def pieces(self, most: Callable[[int], float]) -> list[tuple[str, ...]]:
        """The names of the tensors in parts that are worked on apart; `most` says how many bytes to read the next one
        has, unless a tensor is larger, when pieces before it have so many.
        """
        nbytes = {name: self.reader.entry(name).nbytes for name in self.copied} | dict(self.converted)
        found: list[list[str]] = []
        room, begun = -1.0, 0
        for name, count in nbytes.items():
            if count > room:
                found.append([])
                room = most(begun)
            found[-1].append(name)
            room, begun = room - count, begun + count
        return [tuple(names) for names in found]


#: As an integer, what is not finite has at least the exponent's bits: NaN more, infinity just these.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}
# Elements that are looked at together: NumPy's part stays in the cache, CuPy's temporary arrays stay small.
_HOST_PART, _DEVICE_PART = 1 << 17, 1 << 24


class _NotFinite:
    """How many NaN and infinities tensors hold.

    A tensor on a GPU is looked at in two steps: `add` begins, with two kernels, and `settle` ends, when the GPU need
    not be waited for any more. Between them the tensor stays in memory.
    """

    def __init__(self) -> None:
        #: NaN and infinities of each tensor that has any.
        self.counts: dict[str, tuple[int, int]] = {}
        self._begun: list[tuple[str, Any, Any]] = []

    def add(self, name: str, x: Any) -> None:
        """Count those of a contiguous tensor."""
        bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
        if not bits.size:
            return
        if not isinstance(bits, np.ndarray):
            with _xp.on_device_of(x):
                ends = _xp.namespace(x).empty(2, bits.dtype)
                signed = bits.dtype.str.replace("u", "i")
                bits.view(signed).max(out=ends[:1].view(signed).reshape(()))
                bits.max(out=ends[1:].reshape(()))
            self._begun.append((name, x, ends))
            return
        for begin in range(0, bits.size, _HOST_PART):
            some = bits[begin : begin + _HOST_PART]
            if not self._all_finite(some, x.dtype):
                self._count(name, some, x.dtype)

    def settle(self) -> None:
        """Count those of tensors that were added and are on a GPU."""
        for name, x, ends in self._begun:
            found = _xp.to_device(ends, "cpu")
            if not self._are_finite(int(found.view(f"i{x.dtype.itemsize}")[0]), int(found[1]), x.dtype):
                with _xp.on_device_of(x):
                    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
                    for begin in range(0, bits.size, _DEVICE_PART):
                        self._count(name, bits[begin : begin + _DEVICE_PART], x.dtype)
        self._begun.clear()

    def _count(self, name: str, bits: Any, dtype: np.dtype) -> None:
        xp, infinity = _xp.namespace(bits), bits.dtype.type(_EXPONENTS[dtype.name])
        magnitude = bits & bits.dtype.type((1 << 8 * dtype.itemsize - 1) - 1)
        found = (int(xp.count_nonzero(magnitude > infinity)), int(xp.count_nonzero(magnitude == infinity)))
        if any(found):
            before = self.counts.get(name, (0, 0))
            self.counts[name] = before[0] + found[0], before[1] + found[1]

    @classmethod
    def _all_finite(cls, bits: np.ndarray, dtype: np.dtype) -> bool:
        """Whether all are finite numbers, at little cost; False too where squares are too large."""
        if dtype == np.float32:
            some = bits.view(dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                return math.isfinite(np.dot(some, some))
        return cls._are_finite(int(bits.view(f"i{dtype.itemsize}").max()), int(bits.max()), dtype)

    @staticmethod
    def _are_finite(signed: int, unsigned: int, dtype: np.dtype) -> bool:
        """The same from the largest of their bits as signed integers, where a positive number is, and as unsigned
        ones, where a negative number is.
        """
        exponent, sign = _EXPONENTS[dtype.name], 1 << 8 * dtype.itemsize - 1
        return signed < exponent and unsigned < sign + exponent


@dataclass(frozen=True)
class _Worker:
    """Who works on some tensors.

    Parameters
    ----------
    lane : Lane
        The device, and what the worker has for itself there.
    advance : callable
        Is told the bytes that were read for each tensor that is done.
    check : callable
        Raises an error when the work was given up meanwhile.
    """

    lane: Lane
    advance: Callable[[int], object]
    check: Callable[[], None]
    not_finite: _NotFinite = field(default_factory=_NotFinite)


@dataclass(frozen=True)
class _Result:
    """What a piece of work has come to, beside what it has written.

    Parameters
    ----------
    late : dict of str to numpy.ndarray
        Tensors for the end of the file.
    not_finite : dict
        As `_NotFinite.counts`.
    unsaid : int
        Bytes that were read and not told to whoever counts them.
    tensors : int
        How many tensors are done.
    """

    late: dict[str, np.ndarray]
    not_finite: dict[str, tuple[int, int]]
    unsaid: int
    tensors: int


def is_one_file(checkpoint: Checkpoint, target: str | os.PathLike[str]) -> bool:
    """Whether a file is written, not a folder."""
    return not checkpoint.is_folder or as_path(target, "target").name.endswith(GGUF.ending)


class Conversion:
    """A checkpoint that is going to be written anew: everything is known but the bytes.

    It can be pickled, for other processes: they plan the same once more, from the arguments that it was made of.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is read.
    jobs : dict of str to Job
        The files to write, by their names.
    one_file : bool
        Whether a file is written, not a folder.
    index : str or None
        Name of the index to write.
    beside : mapping of str to bytes
        Files to write, by their names.
    others, left : list
        Files that go along, and the names of those that do not.
    chosen : iterable of Format
        The formats that tensors get.
    label : str
        The name of the command.
    options : mapping
        JSON values that differ where the result does: unfinished work is continued only with the same ones.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        jobs: dict[str, Job],
        *,
        one_file: bool,
        index: str | None,
        beside: Mapping[str, bytes],
        others: Sequence[Companion],
        left: Sequence[str],
        chosen: Iterable[Format],
        label: str,
        options: Mapping[str, Any],
    ):
        self.checkpoint, self.jobs, self.one_file, self.index = checkpoint, jobs, one_file, index
        self.beside, self.others, self.left = beside, others, tuple(left)
        self.label, self.options = label, options
        self._chosen = frozenset(chosen)
        self._again: tuple[Callable[..., Any], Mapping[str, Any]] | None = None
        self._given_up = threading.Event()
        self._advance: Callable[[int], object] | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        target: str | os.PathLike[str],
        changes: Changes,
        layout: Layout,
        label: str,
        options: Mapping[str, Any],
    ) -> Conversion:
        """A conversion of `checkpoint`, which is not mapped, with these changes, into files of this layout.

        Raises
        ------
        FileError
            When two tensors would get the same name, one is not there, or the files cannot hold them.
        """
        one_file = is_one_file(checkpoint, target)
        for name in (*changes.tensors, *changes.omitted, *(changes.order or ())):
            if name not in checkpoint and name not in changes.made:
                raise FileError(f"{checkpoint.path}: tensor {name!r} is not in it")
        if one_file and changes.beside:
            raise FileError(
                f"the layout {layout.name!r} writes a folder, of which {', '.join(changes.beside)} is a part: let "
                f"target not end in {GGUF.ending}"
            )
        jobs = _jobs(checkpoint, changes, layout, one_file)
        index = None
        if not one_file and layout.container is SAFETENSORS:
            index = checkpoint.index or (f"{STEM}{INDEX_ENDING}" if len(jobs) > 1 else None)
        others: list[Companion] = []
        left: list[str] = []
        if not one_file and checkpoint.folder is not None:
            own = {*(path.name for path in checkpoint.paths), *jobs, *changes.beside}
            others, left = companions(checkpoint.folder, own, as_path(target, "target"))
        chosen = [change.choice[0] for change in changes.tensors.values() if change.choice is not None]
        about: dict[str, Any] = {"index": index, "beside": changes.beside, "others": others, "left": left}
        about["chosen"] = chosen
        return cls(checkpoint, jobs, one_file=one_file, label=label, options=options, **about)

    # ---- in other processes

    def planned_by(self, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Conversion:
        """Itself; other processes plan it once more by calling `make`, which returns it first, with these."""
        self._again = make, arguments
        return self

    @functools.cached_property
    def fingerprint(self) -> str:
        """What differs where the work does: the input, as far as that is cheap to tell, and what is to be written."""
        entries = {name: (job.entries, dict(job.metadata)) for name, job in self.jobs.items()}
        files = [(str(file.path.absolute()), file.reader.size_and_time()) for file in self.checkpoint.files.values()]
        text = repr((__version__, self.label, self.options, files, entries))
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def __reduce__(self) -> Any:
        if self._again is None:
            raise TypeError("a conversion that was not planned by its arguments stays in its process")
        return _planned_again, (*self._again, self.fingerprint, self._of_others)

    @functools.cached_property
    def _of_others(self) -> tuple[tuple[Format, str], ...]:
        """Formats that kbitcupy may not know in another process, which learns of them as it gets this, and what makes
        them.
        """
        compressed = (found.format for found in self.checkpoint.compressed.values())
        formats = {*self._chosen, *compressed}
        found = sorted((each for each in formats if is_of_others(each)), key=str)
        return tuple((each, path_of(type(each))) for each in found)

    # ---- the work

    def do(self, piece: _Piece) -> _Result:
        """Do a piece of the work; to do it twice changes nothing."""
        job, unsaid = self.jobs[piece.file], [0]

        def count(nbytes: int) -> None:
            unsaid[0] += nbytes

        with lane(piece.devices, piece.number) as own:
            worker = _Worker(own, count if self._advance is None else self._advance, self._check)
            with piece.elsewhere.writing() as writer:
                job.run(piece.names, writer, worker)
            for file in job.files:
                file.check_unchanged()
            return _Result(writer.late, worker.not_finite.counts, unsaid[0], len(piece.names))

    def _check(self) -> None:
        if self._given_up.is_set():
            raise FileError(f"{self.checkpoint.path}: the work was given up")

    def run(
        self,
        writing: Mapping[str, Callable[[], contextlib.AbstractContextManager[Writer]]],
        executor: Executor,
        devices: Sequence[str],
        bar: Progress,
    ) -> dict[str, tuple[int, int]]:
        """Write files, each as its context says, which is left when all of it is there; how many elements of which
        tensors are not finite.
        """
        counts: dict[str, tuple[int, int]] = {}
        unfinished: dict[str, tuple[contextlib.ExitStack, Writer, list[int]]] = {}

        def pieces_of(file: str) -> Iterator[_Piece]:
            stack = everything.enter_context(contextlib.ExitStack())
            writer = stack.enter_context(writing[file]())
            job = self.jobs[file]
            before, left[0] = left[0], left[0] - job.nbytes
            found = job.pieces(lambda begun: most(before - begun))
            if not found:
                finish(job, stack)
            unfinished[file] = stack, writer, [len(found)]
            for names in found:
                stored = [each for name in names for each in (job.made.get(name) or (job.copied[name],))]
                yield _Piece(self, file, names, writer.elsewhere(stored), tuple(devices), next(numbers))

        def pieces() -> Iterator[_Piece]:
            # Of several files in turn: who writes to a file waits for all others that do.
            waiting = map(pieces_of, writing)
            begun = collections.deque(itertools.islice(waiting, workers))
            while begun:
                one = begun.popleft()
                piece = next(one, None)
                if piece is not None:
                    yield piece
                    begun.append(one)
                else:
                    begun.extend(itertools.islice(waiting, 1))

        def finish(job: Job, stack: contextlib.ExitStack) -> None:
            for file in job.files:
                file.check_unchanged()
            stack.close()

        def most(nbytes: int) -> float:
            if isinstance(executor, Inline):
                return math.inf
            return min(max(nbytes / (_SHARES * workers), _LEAST_PIECE), _LARGEST_PIECE)

        workers, numbers = workers_of(executor), itertools.count()
        left = [sum(self.jobs[file].nbytes for file in writing)]  # bytes of files that are not yet in pieces
        self._advance = bar.advance
        with contextlib.ExitStack() as everything:
            done = completed(executor, _do, pieces(), lambda piece: str(self.checkpoint.path.parent / piece.file))
            everything.callback(release)
            try:
                for piece, result in done:
                    counts.update(result.not_finite)
                    bar.advance(result.unsaid)
                    bar.finished(result.tensors)
                    stack, writer, count = unfinished[piece.file]
                    for name, data in result.late.items():
                        writer.put(name, data)
                    count[0] -= 1
                    if not count[0]:
                        del unfinished[piece.file]
                        finish(self.jobs[piece.file], stack)
                if not self.one_file:  # which has its name by now
                    self.checkpoint.check_unchanged()  # so that all shards are of one state of the input
            except BaseException:
                self._given_up.set()  # threads end with the tensor that they are at
                raise
            finally:
                done.close()  # nobody works on a file any more when it is removed
        return counts


@dataclass(frozen=True)
class _Piece:
    """Some tensors of one file, for one worker.

    Parameters
    ----------
    conversion : Conversion
        What it is a part of.
    file : str
        Name of the file to write.
    names : tuple of str
        Names of the tensors.
    elsewhere : Elsewhere
        Where they go.
    devices : tuple of str
        Devices to choose from.
    number : int
        Number among all pieces.
    """

    conversion: Conversion
    file: str
    names: tuple[str, ...]
    elsewhere: Elsewhere
    devices: tuple[str, ...]
    number: int


def _do(piece: _Piece) -> _Result:
    return piece.conversion.do(piece)


# The last conversion that this process has planned for another one: its pieces come one after the other.
_planning = threading.Lock()
_last: list[Conversion] = []


def _planned_again(
    make: Callable[..., Any], arguments: Mapping[str, Any], fingerprint: str, formats: Sequence[tuple[Format, str]]
) -> Conversion:
    """The conversion of another process; its formats of other packages are known here now, by what makes them there.

    Raises
    ------
    FileError
        When it is not the same here.
    """
    for format, path in formats:
        if path_of(type(format)) != path:
            raise FileError(
                f"format {format.name!r} is {path_of(type(format))} for this worker and {path} for the process that "
                "began the work: register one of them under another name"
            )
    with _planning:
        if not _last or _last[0].fingerprint != fingerprint:
            _last.clear()
            made: Conversion = make(**arguments)[0]
            if made.fingerprint != fingerprint:
                raise FileError(
                    f"{made.checkpoint.path} is another file for this worker than for the process that began the work, "
                    "or their versions of kbitcupy differ: all need one version, and one file system"
                )
            _last.append(made.planned_by(make, arguments))
        return _last[0]


def _jobs(checkpoint: Checkpoint, changes: Changes, layout: Layout, one_file: bool) -> dict[str, Job]:
    """The files to write, by name."""
    files = list(checkpoint.files.items())
    groups = [[file for _, file in files]] if one_file else [[file] for _, file in files]
    work = _Work(checkpoint, changes, layout)
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
    return jobs


class _Work:
    """What the jobs of a conversion share.

    Parameters
    ----------
    checkpoint, changes, layout
        As for `Conversion.of`.
    """

    def __init__(self, checkpoint: Checkpoint, changes: Changes, layout: Layout):
        self._checkpoint, self._changes, self._layout = checkpoint, changes, layout
        self.same_kind = all(file.reader.kind == layout.container.name for file in checkpoint.files.values())
        #: Whether tensors that are compressed already, and stay so, are copied as they are stored.
        self._as_stored = self.same_kind and not any(name in checkpoint.compressed for name in changes.tensors)
        self._order = {name: number for number, name in enumerate(changes.order or ())}
        self._places = {stored: number for number, stored in enumerate(checkpoint.reader.names)}
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
        stored_for: dict[str, tuple[str, ...]] = {}
        configs: dict[str, Any] = {}
        places: dict[str, int] = {}  # in the files that are read
        small: list[str] = []  # what is stored of tensors that are compressed
        elements = changed = decoded = 0
        for name in names:
            if name in self._changes.made:
                entries[name], converted[name] = entry_of(self._changes.made[name]), 0
                stored_for[name] = (name,)
                continue
            stored = self._checkpoint.stored(name)
            if self._copies(name):
                copied.update((each, each) for each in stored)
                entries.update(stored)
                places.update((each, self._places[each]) for each in stored)
                continue
            made, config = self._made(name)
            entries.update(made)
            stored_for[name] = tuple(made)
            places.update(dict.fromkeys(made, self._places[next(iter(stored))]))
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
            entries = dict(sorted(entries.items(), key=lambda entry: places.get(entry[0], len(self._places))))
        return Job(
            reader,
            [file.reader for file in files],
            self._layout.container,
            entries,
            self._metadata(files, configs),
            copied,
            converted,
            stored_for,
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

    def _convert(self, name: str, worker: _Worker) -> Mapping[str, Any]:
        change, new = self._changes.tensors.get(name), self._new_name(name)
        if name not in self._checkpoint:
            return {name: self._changes.made[name]}
        if name in self._checkpoint.compressed:
            if change is None or change.kept:
                q: Any = self._checkpoint[name]
                kept = q if change is None or change.transform is None else change.transform(q)
                return self._layout.arrays(new, kept)
            x = self._compressed(name, worker.lane).dequantize(dtype=change.dtype)
        else:
            x = self._read(name, change, worker.lane)
        if change is not None and change.transform is not None:
            x = change.transform(x)
        if change is None or change.choice is None:
            return {new: x}
        worker.not_finite.add(name, x)
        format, given = change.choice
        if change.given_by is not None:
            given = {**given, **change.given_by(x)}
        return self._layout.arrays(new, quantize(x, format, **given))

    def _compressed(self, name: str, lane: Lane) -> QuantizedArray:
        """A compressed tensor, on the device."""
        found = self._checkpoint.compressed[name]
        if isinstance(lane, GpuLane) and found.as_stored:
            planes = {plane: self._uploaded(stored, lane) for plane, stored in found.as_stored.items()}
            return QuantizedArray(found.format, planes, found.shape, found.dtype)
        return found.read(self._checkpoint.reader).to_device(lane.device)

    def _uploaded(self, stored: str, lane: GpuLane) -> Any:
        """A stored tensor, on the device."""
        file, entry = self._checkpoint.reader.file_of(stored), self._checkpoint.reader.entry(stored)
        made = lane.upload(functools.partial(file.parts, stored), entry.nbytes)
        return made.view(_xp.named_dtype(entry.dtype)).reshape(entry.shape)

    def _read(self, name: str, change: Change | None, lane: Lane) -> Any:
        """A tensor that is not compressed, rounded to another dtype where one is asked for; on the device if it is
        going to be compressed. No format keeps the array that it is given, so one piece of memory serves all.
        """
        reader, rounded = self._checkpoint.reader, None if change is None else change.dtype
        entry = reader.entry(name)
        goes = change is not None and change.choice is not None
        if goes and isinstance(lane, GpuLane) and rounded in (None, entry.dtype):
            return self._uploaded(name, lane)
        x = reader.array(name, lane.memory(entry.nbytes))
        if rounded is not None:
            with np.errstate(over="ignore"):  # it becomes infinite
                x = x.astype(_xp.named_dtype(rounded), copy=False)
        return _xp.to_device(x, lane.device) if goes else x
