"""Work that is done by any `concurrent.futures.Executor`: threads, processes, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from ..errors import FileError, FormatError, KbitError, MissingExtraError

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Bytes to read above which the commands use several workers unasked.
LARGE = 2_000_000_000
#: Workers that they use then at most, on each GPU or on all cores.
MOST_WORKERS = 8
# Tasks that wait beside those that run, and how many run where an executor does not say it.
_WAITING, _UNKNOWN = 2, 32
# Seconds for a scheduler of Dask to answer; how often a task is done again whose worker was lost.
_PATIENCE, _RETRIES = 10, 2
# What a process of ours ends with when Ctrl-C is pressed.
_INTERRUPTED = 130
# Of a library that would use all cores in each of the processes.
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Inline(Executor):
    """Does each task when it is given one, in the thread that gives it."""

    _max_workers = 1

    def submit(self, fn: Callable[..., _R], /, *arguments: Any, **options: Any) -> Future[_R]:
        done: Future[_R] = Future()
        done.set_result(fn(*arguments, **options))
        return done


def check_executor(executor: Any) -> Executor:
    """An executor, which is `Inline` where there is none.

    Raises
    ------
    TypeError
        When it is something else.
    """
    if executor is None:
        return Inline()
    if not callable(getattr(executor, "submit", None)) or isinstance(executor, type):
        raise TypeError(
            f"executor is {executor!r}; it must be a concurrent.futures.Executor, such as ThreadPoolExecutor(8), "
            "ProcessPoolExecutor(8), or client.get_executor(pure=False, retries=2) of dask.distributed"
        )
    return executor  # Dask's is none by its class


def is_local(executor: Executor) -> bool:
    """Whether the work is done in this process, as far as that can be told."""
    return isinstance(executor, (Inline, ThreadPoolExecutor))


def workers_of(executor: Executor) -> int:
    """How many tasks run at once, as far as that can be told."""
    count = getattr(executor, "_max_workers", None)  # of all executors of the standard library
    return count if isinstance(count, int) and count > 0 else _UNKNOWN


def completed(
    executor: Executor, function: Callable[[_T], _R], tasks: Iterable[_T], name_of: Callable[[_T], str]
) -> Generator[tuple[_T, _R]]:
    """Each task and its result, as they end; a task is taken from `tasks` when its turn is near.

    When one fails, or nobody takes results any more, those that wait are given up, and those that run are waited for.

    Parameters
    ----------
    executor : Executor
        Who works.
    function : callable
        Does a task: both can be pickled, and doing one twice changes nothing.
    tasks : iterable
        The tasks.
    name_of : callable
        What a task is called in messages.

    Raises
    ------
    FileError
        When a worker is lost, or a task ends in an error that is none of kbitcupy's.
    """
    most = workers_of(executor)
    most += 0 if most == 1 else _WAITING
    lost = _as_it_is if isinstance(executor, Inline) else _lost
    running: dict[Future[_R], _T] = {}
    coming = iter(tasks)
    more, breaks = True, False
    try:
        while True:
            while more and len(running) < most:
                try:
                    task = next(coming)
                except StopIteration:
                    more = False
                    break
                with lost(name_of(task)):
                    # Packed, for a scheduler in between would unpack the task to look at it.
                    work = (function, task) if is_local(executor) else (_unpack, _packed((function, task)))
                    running[executor.submit(*work)] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                with lost(name_of(task)):
                    result = future.result()
                yield task, result
    except BaseException as error:
        # A pool of processes that is breaking, as Ctrl-C breaks it, trips over futures that are cancelled meanwhile.
        interrupted = not isinstance(error, Exception) or isinstance(error.__cause__, BrokenExecutor)
        breaks = interrupted and isinstance(executor, ProcessPoolExecutor)
        raise
    finally:
        # A future that is cancelled is never "done" for `wait` where nobody takes it out of a queue.
        wait([future for future in running if breaks or not future.cancel()])


def _packed(work: Any) -> bytes:
    """A task for another process. Where Dask has brought cloudpickle a format of a notebook travels whole."""
    packed: bytes = sys.modules.get("cloudpickle", pickle).dumps(work)
    return packed


def _unpack(data: bytes) -> Any:
    """Do a task that comes from another process.

    Raises
    ------
    FileError
        When something of it is not known here.
    """
    try:
        function, task = pickle.loads(data)
    except (FormatError, ImportError, AttributeError) as error:
        raise FileError(
            f"a worker does not know all that this work needs ({error}): define and register formats in a module that "
            "workers can import, or let threads do the work"
        ) from error
    return function(task)


def _as_it_is(name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _lost(name: str) -> Iterator[None]:
    """What an executor says of a worker that is gone, as an error with the name of its task."""
    try:
        yield
    except (KbitError, MemoryError, TypeError, ValueError, OSError):
        raise  # of the task itself
    except BrokenExecutor as error:
        raise FileError(
            f"{name}: a worker ended abruptly, killed perhaps for want of memory: repeat with fewer workers, and with "
            "resume=True (--resume) from the start to keep the shards that are finished"
        ) from error
    except Exception as error:
        raise FileError(f"{name}: {type(error).__name__}: {error}") from error


# ---- executors of the commands -------------------------------------------------------------------------------------


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(nbytes: int, gpus: int) -> int:
    """How many workers are worth it for so many bytes to read, on so many GPUs or on none."""
    if nbytes < LARGE:
        return 1
    return min(MOST_WORKERS * gpus, max(MOST_WORKERS, cores())) if gpus else min(MOST_WORKERS, cores())


@contextlib.contextmanager
def local(workers: int, on_gpu: bool) -> Iterator[Executor | None]:
    """Workers on this machine: threads where a GPU does the work, else processes, for NumPy's hold each other up.

    None for one worker.
    """
    if workers == 1:
        yield None
    elif on_gpu:
        with ThreadPoolExecutor(workers, "kbitcupy") as threads:
            yield threads
    else:
        with _one_thread_each(), _processes(workers) as processes:
            yield processes


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that begin in this block have one thread for their linear algebra."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _processes(workers: int) -> Iterator[Executor]:
    """Spawned processes, which end with the block."""
    others = multiprocessing.active_children()
    made: list[Any] = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin) as pool:
        try:
            with _undisturbed():
                for _ in range(workers):
                    pool.submit(_begun)
                made = [each for each in multiprocessing.active_children() if each not in others]
            yield pool
        except FileError as error:
            # Of Ctrl-C all processes hear, and those of the pool may be gone before this one has heard of it.
            if isinstance(error.__cause__, BrokenExecutor) and any(_code(each) == _INTERRUPTED for each in made):
                raise KeyboardInterrupt from error
            raise
        finally:
            # Not asked to end: one that was killed as it waited for work keeps a lock that the others would wait for.
            for each in made:
                each.terminate()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Processes that begin in this block hear nothing of Ctrl-C until they have come to `_begin`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would change the mask when the first process begins
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _code(process: Any) -> int | None:
    """With what a process of a pool that breaks has ended."""
    process.terminate()
    process.join(_PATIENCE)
    code: int | None = process.exitcode
    return code


def _begun() -> None:
    """Nothing: for this a process begins."""


def _begin() -> None:
    """What a process of ours does first: it ends with its parent, and at once when Ctrl-C is pressed."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def dask_cluster(scheduler: str) -> Iterator[Executor]:
    """The workers of a Dask cluster that is running.

    Parameters
    ----------
    scheduler : str
        The address of its scheduler, such as ``"tcp://10.0.0.1:8786"``, or the file that the scheduler has written.

    Raises
    ------
    MissingExtraError
        When `distributed` is not installed.
    FileError
        When there is no scheduler.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingExtraError(
            "--scheduler needs Dask's scheduler: pip install 'kbitcupy[dask]' (or [dask-cuda12], [dask-cuda13])"
        ) from error
    where = {"address": scheduler} if "://" in scheduler else {"scheduler_file": os.path.abspath(scheduler)}
    if "scheduler_file" in where and not os.path.isfile(where["scheduler_file"]):
        raise FileError(f"{scheduler} is no scheduler's file, nor an address such as tcp://10.0.0.1:8786")
    try:
        client = Client(**where, timeout=_PATIENCE, set_as_default=False)
    except (OSError, TimeoutError, ValueError, KeyError) as error:
        raise FileError(f"no scheduler of Dask answers at {scheduler}: {error}") from error
    with client:
        yield client.get_executor(pure=False, retries=_RETRIES)
