"""Who works for the commands that read whole files: this thread, several of them, processes, or a Dask cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..backend import xp as _xp
from ..backend.staging import lane, release
from ..errors import FormatError
from ..io.executors import Inline, completed, dask_cluster, default_workers, local
from ..io.progress import Progress
from .sources import Source

_R = TypeVar("_R")

#: Takes the name of a tensor and the tensor on a device.
Measure = Callable[[str, Any], _R]


def devices_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The devices that ``--device`` names; with ``--scheduler`` they are those of the workers."""
    find = _xp.resolve_device if arguments.scheduler is None else _xp.device_name
    return tuple(dict.fromkeys(map(find, arguments.device.split(","))))


@contextlib.contextmanager
def sharing(arguments: argparse.Namespace, nbytes: int) -> Iterator[Executor | None]:
    """Who does the work, for so many bytes to read; None is this thread.

    Raises
    ------
    FormatError
        When both ``--workers`` and ``--scheduler`` are given.
    FileError, MissingExtraError
        When there is no such scheduler.
    """
    if arguments.scheduler is not None:
        if arguments.workers is not None:
            raise FormatError("--workers starts workers here, and those of --scheduler run already: leave one away")
        with dask_cluster(arguments.scheduler) as cluster:
            yield cluster
        return
    gpus = [device for device in devices_of(arguments) if device != "cpu"]
    workers = default_workers(nbytes, len(gpus)) if arguments.workers is None else arguments.workers
    with local(workers, gpus, nbytes) as executor:
        yield executor


def size_of(paths: Sequence[str]) -> int:
    """Bytes of files and folders, about; 0 for what is not there, which is found out later."""
    total = 0
    for path in map(Path, paths):
        with contextlib.suppress(OSError, ValueError):
            folder = path if path.is_dir() else path.parent
            names = os.scandir(folder) if path.is_dir() or path.suffix == ".json" else [path]
            total += sum(os.stat(name).st_size for name in names if os.path.isfile(name))
    return total


@dataclass(frozen=True)
class _Task:
    """A tensor to measure, for one worker."""

    number: int
    source: Source
    measure: Measure[Any]
    devices: tuple[str, ...]


def _do(task: _Task) -> Any:
    with lane(task.devices, task.number) as own:
        return task.measure(task.source.name, _xp.to_device(task.source.read(), own.device))


def measured(
    found: Sequence[Source],
    measure: Callable[[], Measure[_R]],
    executor: Executor | None,
    devices: Sequence[str],
    bar: Progress,
) -> list[_R]:
    """What is measured of each tensor, in their order.

    Parameters
    ----------
    found : sequence of Source
        The tensors.
    measure : callable
        Returns what measures a tensor, which can be pickled: it is asked when the turn of a tensor has come.
    executor, devices, bar
        Who works, where, and who is told.
    """
    tasks = (_Task(number, source, measure(), tuple(devices)) for number, source in enumerate(found))
    results: dict[int, _R] = {}
    work = completed(Inline() if executor is None else executor, _do, tasks, lambda task: task.source.name)
    with contextlib.closing(work):
        for task, result in work:
            results[task.number] = result
            bar.advance(task.source.nbytes)
            bar.finished(1)
    release()
    return [results[number] for number in range(len(found))]
