"""Work that is done by any `concurrent.futures.Executor`: threads, processes, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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

from ..backend import staging
from ..errors import FileError, FormatError, KbitError, MissingExtraError

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Bytes to read above which the commands use several workers unasked.
LARGE = 2_000_000_000
#: Workers that they use then at most, on each GPU or on all cores.
MOST_WORKERS = 8
#: Bytes to read above which each of several GPUs has processes of its own. To start them takes a second or more, since
#: each makes a context of its GPU: less work would not win that back.
APART = 64_000_000_000
# Threads of such a process at most: more wait for the interpreter, not for the files.
_TOGETHER = 4
# Tasks that wait beside those that run, and how many run where an executor does not say it.
_WAITING, _UNKNOWN = 2, 32
# Seconds for a scheduler of Dask to answer; how often a task is done again whose worker was lost.
_PATIENCE, _RETRIES = 10, 2
# Seconds between two looks at whether a process has ended.
_MOMENT = 0.01
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
def local(workers: int, gpus: Sequence[str] = (), nbytes: int = 0) -> Iterator[Executor | None]:
    """Workers on this machine, for so many bytes to read: processes where NumPy does the work, since its threads hold
    each other up; threads for a GPU; for several GPUs either, by what is faster.

    None for one worker.
    """
    if workers == 1:
        yield None
    elif 1 < len(gpus) <= workers and nbytes >= APART:
        with _gpu_processes(gpus, -(-workers // len(gpus))) as apart:
            yield apart
    elif gpus:
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
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)
    with pool, _ending(made):
        with _undisturbed():
            while len(made) < workers:  # a process that is idle already would be given what another should begin for
                pool.submit(_begun)
                made[:] = [each for each in multiprocessing.active_children() if each not in others]
        yield pool


@contextlib.contextmanager
def _ending(made: Sequence[Any]) -> Iterator[None]:
    """These processes end with the block."""
    try:
        yield
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
def _gpu_processes(gpus: Sequence[str], threads: int) -> Iterator[Executor]:
    """So many threads for each GPU, in processes that end with the block."""
    each = -(-threads // _TOGETHER)
    made: list[Any] = []
    with _ending(made):
        with _undisturbed():
            pool = GpuProcesses([*gpus] * each, -(-threads // each))
            made += pool.processes
        yield pool


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
    ends = time.monotonic() + _PATIENCE
    # Not `join`: the pool waits for it too, and of two threads that ask the system how a process has ended one is told
    # that there is none. It would find no code here before the other has written it down.
    while (code := process.exitcode) is None and time.monotonic() < ends:
        time.sleep(_MOMENT)
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


# ---- processes for GPUs ----------------------------------------------------------------------------------------------


class GpuProcesses(Executor):
    """Spawned processes, each for one GPU, in which threads do the tasks.

    Threads of one process take turns at the interpreter. A few do so often enough; those of several GPUs would wait for
    each other longer than for the files.

    Parameters
    ----------
    gpus : sequence of str
        The GPUs, such as ``["cuda:0", "cuda:1"]``; one that comes twice has two processes.
    threads : int
        Threads of each process.
    """

    def __init__(self, gpus: Sequence[str], threads: int):
        self._max_workers = threads * len(gpus)
        self._changing, self._numbers, self._broken = threading.Lock(), itertools.count(), False
        self._all: list[_GpuProcess] = []
        try:
            for gpu in gpus:
                self._all.append(_GpuProcess(gpu, threads, self._lose))
        except BaseException:
            for each in self._all:
                each.process.terminate()
            raise

    @property
    def processes(self) -> list[Any]:
        """The processes."""
        return [each.process for each in self._all]

    def submit(self, fn: Callable[..., _R], /, *arguments: Any, **options: Any) -> Future[_R]:
        future: Future[_R] = Future()
        future.set_running_or_notify_cancel()  # a process that has a task is not asked to give it back
        task = pickle.dumps((fn, arguments, options))
        with self._changing:
            if self._broken:
                raise BrokenExecutor("a process of a GPU has ended")
            least = min(self._all, key=lambda each: len(each.pending))
            least.pending[number := next(self._numbers)] = future
        least.send(pickle.dumps((number, task)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for each in self._all:
            each.send(b"")
            if wait:
                each.process.join()

    def _lose(self, one: _GpuProcess) -> None:
        """No answer of this process comes any more."""
        with self._changing:
            self._broken = True
            left = list(one.pending.values())
            one.pending.clear()
        for future in left:
            future.set_exception(BrokenExecutor("the process of a GPU has ended"))


class _GpuProcess:
    """One of them, as the process sees it that has started it; `pending` are the tasks that it has."""

    def __init__(self, gpu: str, threads: int, lose: Callable[[_GpuProcess], None]):
        context = multiprocessing.get_context("spawn")
        self.pending: dict[int, Future[Any]] = {}
        self._connection, there = context.Pipe()
        self._sending, self._lose = threading.Lock(), lose
        self.process = context.Process(target=_serve, args=(there, gpu, threads), daemon=True)
        self.process.start()
        there.close()  # so that nothing holds it open when the process is gone
        threading.Thread(target=self._collect, daemon=True).start()

    def send(self, data: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # a process that is gone is missed by `_collect`
            self._connection.send_bytes(data)

    def _collect(self) -> None:
        """Hand out what comes back, until the process is gone."""
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    number, data = pickle.loads(self._connection.recv_bytes())
                    future = self.pending.pop(number)
                    try:
                        done, result = pickle.loads(data)
                    except Exception as error:
                        done, result = False, RuntimeError(f"what a worker has sent cannot be unpickled: {error}")
                    future.set_result(result) if done else future.set_exception(result)
        finally:
            self._lose(self)  # whatever ends this thread: nobody waits for what it would have handed out


def _serve(connection: Any, gpu: str, threads: int) -> None:
    """What such a process does: tasks as they come, until an empty one does."""
    _begin()
    staging.stay_on(gpu)
    sending = threading.Lock()

    def answer(number: int, task: bytes) -> None:
        try:
            function, arguments, options = pickle.loads(task)
            data = _answer(function(*arguments, **options))
        except BaseException as error:
            data = _failure(error)
        with sending:
            connection.send_bytes(pickle.dumps((number, data)))

    with ThreadPoolExecutor(threads, "kbitcupy") as pool, contextlib.suppress(EOFError, OSError):
        while task := connection.recv_bytes():
            pool.submit(answer, *pickle.loads(task))


def _answer(result: Any) -> bytes:
    """What a task came to, for the process that gave it."""
    try:
        return pickle.dumps((True, result))
    except Exception as error:
        raise RuntimeError(f"what a worker came to cannot be pickled: {error}") from error


def _failure(error: BaseException) -> bytes:
    """The same of an error, whose text comes where it cannot come itself."""
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)  # an error whose class takes other arguments than it keeps cannot be made again
    except Exception:
        data = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return data


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
