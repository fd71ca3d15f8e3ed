"""Lanes: what one worker has for itself while arrays go from a file to a device and back.

A copy between a GPU and memory that the system may page is several times slower than one between a GPU and pinned
memory, and the kernel between two such copies takes a hundredth of either. So a lane of a GPU has a stream, and two
small pinned buffers through which everything goes, part after part: while one is read or written, the other is copied.
Several lanes keep a GPU busy, and several GPUs; their host memory does not grow with the arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import xp as _xp
from .launch import driver_function

#: Bytes of an array that go through a buffer together: few enough that the buffers of all workers stay in a cache, from
#: where a copy costs the host's memory nothing, and so many that threads seldom meet at the interpreter between two.
PART_BYTES = 1 << 22


class Lane:
    """What one worker has for itself, on one device.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    """

    def __init__(self, device: str):
        self.device = device
        self._memory = np.empty(0, np.uint8)

    def memory(self, nbytes: int) -> np.ndarray:
        """Host memory of at least so many bytes, the same each time: fresh pages take time."""
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(0, np.uint8)  # so that both are not there at once
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory

    def parts(self, array: Any) -> Iterator[np.ndarray]:
        """The bytes of an array on the device, uint8, part after part; each is valid until the next is asked for."""
        yield _xp.contiguous(array).reshape(-1).view(np.uint8)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """A block whose work is done on the device and, if it is a GPU, in the stream of the lane."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Give back what is kept for the next block."""
        self._memory = np.empty(0, np.uint8)


class GpuLane(Lane):
    """A stream of a GPU and pinned buffers."""

    def __init__(self, device: str):
        super().__init__(device)
        self._cuda = _xp.import_cupy().cuda
        self._device = self._cuda.Device(int(device.partition(":")[2]))
        with self._device:
            self._stream = self._cuda.Stream(non_blocking=True)
            self._pointer = self._stream.ptr
            # Pinned memory comes as a whole number of pages, and maybe more of them.
            self._buffers = [
                np.frombuffer(self._cuda.alloc_pinned_memory(PART_BYTES), np.uint8)[:PART_BYTES] for _ in range(2)
            ]
            self._places = [buffer.ctypes.data for buffer in self._buffers]
        # Threads that give up the interpreter around every call wait for it most of the time when there are many.
        self._memcpy = driver_function("cuMemcpyAsync", holds=True)
        self._memcpy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._query = driver_function("cuStreamQuery", holds=True)
        self._query.argtypes = (ctypes.c_void_p,)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self._device, self._stream:
            try:
                yield
            finally:
                self._stream.synchronize()  # what the block has allocated is free for others from here on

    def upload(self, parts: Callable[[Sequence[np.ndarray]], Iterator[np.ndarray]], nbytes: int) -> Any:
        """Bytes on the device.

        Parameters
        ----------
        parts : callable
            Takes buffers, and fills one after the other with the bytes to upload, round and round.
        nbytes : int
            How many bytes there are.

        Returns
        -------
        cupy.ndarray
            Of uint8.
        """
        import cupy

        made = cupy.empty(nbytes, np.uint8)
        target = made.data.ptr
        self._wait()
        for part, place in zip(parts(self._buffers), itertools.cycle(self._places)):
            self._wait()  # so the buffer that is filled next is free
            self._copy(target, place, part.nbytes)
            target += part.nbytes
        return made

    def parts(self, array: Any) -> Iterator[np.ndarray]:
        flat = _xp.contiguous(array)

        def start(begin: int) -> np.ndarray:
            number = begin // PART_BYTES % 2
            part = self._buffers[number][: flat.nbytes - begin]
            self._copy(self._places[number], flat.data.ptr + begin, part.nbytes)
            return part

        if not flat.nbytes:
            return
        coming = start(0)
        for after in range(PART_BYTES, flat.nbytes + PART_BYTES, PART_BYTES):
            part = coming
            self._wait()
            if after < flat.nbytes:
                coming = start(after)
            yield part

    def _wait(self) -> None:
        """Until the copy that was begun last is done. Usually it is, for the host is the slower one."""
        if self._query(self._pointer):  # an error, which is told when it is waited for, or not done
            self._stream.synchronize()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        status = self._memcpy(target, source, nbytes, self._pointer)
        if status:
            self._cuda.driver.check_status(status)

    def release(self) -> None:
        super().release()
        with self._device:  # what CuPy's pool keeps for the stream of this lane alone
            _xp.import_cupy().get_default_memory_pool().free_all_blocks(stream=self._stream)


# Where the lanes of this process are, if it is for one device alone.
_here: list[str] = []


def stay_on(device: str) -> None:
    """Of several devices to choose from, lanes of this process take this one from now on."""
    _here[:] = [_xp.resolve_device(device)]


# Lanes that nobody is in, and how many are in use: to make one of a GPU takes a millisecond, and pages that have been
# written to once take nothing.
_lock = threading.Lock()
_idle: dict[str, list[Lane]] = {}
_used: Counter[str] = Counter()


@contextlib.contextmanager
def lane(devices: Sequence[str], number: int = 0) -> Iterator[Lane]:
    """A lane for this block, in which its device and its stream are the current ones.

    Parameters
    ----------
    devices : sequence of str
        Names of devices, ``"auto"`` among them: that one is taken which has the fewest lanes of this process.
    number : int, default 0
        Which of those with equally many is taken: processes that number their work share the devices.
    """
    here = [_xp.resolve_device(name) for name in devices]
    here = _here if set(_here) & set(here) else here
    turn = number % len(here)
    with _lock:
        device = min((*here[turn:], *here[:turn]), key=lambda name: _used[name])
        _used[device] += 1
        waiting = _idle.get(device)
        found = waiting.pop() if waiting else None
    try:
        found = (Lane if device == "cpu" else GpuLane)(device) if found is None else found
        with found.current():
            yield found
        with _lock:
            _idle.setdefault(device, []).append(found)
    finally:
        with _lock:
            _used[device] -= 1


def release() -> None:
    """Give back the memory of lanes that nobody is in."""
    with _lock:
        found = [each for lanes in _idle.values() for each in lanes]
        _idle.clear()
    for each in found:
        each.release()
