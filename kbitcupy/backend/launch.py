"""Launches: a compiled kernel with its grid and its arguments, and the facts of a device that choose them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Any

from .compile import Template, function
from .structs import Struct as Struct


@functools.cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a thread block can have on a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


@dataclass(frozen=True)
class Ready:
    """A kernel that is loaded on one device.

    Parameters
    ----------
    function : cupy.cuda.Function
        The kernel itself. (What CuPy wraps it in takes a microsecond more to find it again.)
    resident : int
        Thread blocks of it that the device holds at a time.
    """

    function: Any
    resident: int


def by_value(struct: Any) -> Any:
    """A zero-dimensional structured NumPy array as a kernel argument that is passed by value.

    CuPy takes such an array itself, but looks at it for 5 us on every launch; its own pointer type it takes as it is.

    Returns
    -------
    cupy.cuda.function.CPointer
        Refers to the memory of `struct`, which must be kept alive.
    """
    from cupy.cuda.function import CPointer

    return CPointer(struct.ctypes.data)


def bind_thread() -> None:
    """Make the context of the current device that of this thread.

    Functions of the driver take the context that the thread has, and a thread that has not used the runtime yet has
    none. CuPy binds it before its own launches; whoever calls the driver has to do it, once a thread.
    """
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())


@functools.cache
def driver_function(name: str) -> Any:
    """A function of the driver that CuPy does not wrap; None where the driver is too old to have it."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    return getattr(library, name, None)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


# Driver versions from this one on capture early launches in graphs.
_EARLY_DRIVER = 12030
_PROGRAMMATIC_SERIALIZATION = 6  # of the driver's launch attributes


@functools.cache
def starts_early(device: int) -> bool:
    """Whether kernels on a device may start before the kernel ahead of them has ended."""
    import cupy

    return capability(device) >= 90 and int(cupy.cuda.runtime.driverGetVersion()) >= _EARLY_DRIVER


class _PackedLaunch(threading.local):
    """Called as CuPy's own launcher, with arguments that are ints and `bytes`; it takes less time.

    Each thread has buffers of its own, as ctypes lets other threads run during the call; making them, it is bound to
    its device.
    """

    def __init__(self, handle: int, shared: int, sizes: tuple[int, ...], early: bool):
        from cupy.cuda import get_current_stream
        from cupy_backends.cuda.api import driver

        bind_thread()
        self._stream, self._check = get_current_stream, driver.check_status
        self._launch = driver_function("cuLaunchKernelEx")
        self._launch.argtypes = (ctypes.c_void_p,) * 4
        packing = struct.Struct("=" + "".join({8: "q", 4: "i"}.get(size, f"{size}s") for size in sizes))
        self._pack = packing.pack_into
        self._buffer = ctypes.create_string_buffer(packing.size)
        places = itertools.accumulate((0, *sizes[:-1]), initial=ctypes.addressof(self._buffer))
        self._arguments = (ctypes.c_void_p * len(sizes))(*itertools.islice(places, 1, None))
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (ctypes.c_uint * 16)(1))
        attribute = ctypes.addressof(self._attribute)
        self._config = _Config(1, 1, 1, 1, 1, 1, shared, 0, attribute, int(early))
        where = ctypes.addressof(self._config), ctypes.addressof(self._arguments)
        self._pointers = where[0], handle, where[1], None

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int], arguments: tuple[Any, ...], shared_mem: int = 0
    ) -> None:
        self._pack(self._buffer, 0, *arguments)
        config = self._config
        config.grid, config.grid_y, config.grid_z = (*grid, 1, 1)[:3]
        config.block, config.stream = block[0], self._stream().ptr
        status = self._launch(*self._pointers)
        if status:
            self._check(status)


class Kernel:
    """One kernel with its launch shape, for every device: compiled on first use, then a lookup and a launch.

    Each thread block takes an equal run of the work, whatever the size of the grid. The grid has as many blocks as fill
    the device, and more where that keeps the runs short.

    Parameters
    ----------
    template : Template
        Which kernel.
    values : tuple of str
        The values of its template parameters, as C++ text.
    threads : int
        Threads of a block.
    shared : int, default 0
        Bytes of dynamic shared memory of a block.
    rounds : int, default 1
        Units of work that a block takes one after the other in a grid that is larger than the device.
    sizes : tuple of int, default ()
        For a kernel that may start before the one ahead of it has ended, where the device can do so (see
        `starts_early`), as it waits itself, by ``griddepcontrol.wait``, before it looks at what that one writes: the
        sizes of its arguments, which are then ints, of 8 or 4 bytes, or `bytes`.
    early : bool, default True
        Whether it may: not where it reads more before it waits than the kernel ahead of it allows for.
    """

    __slots__ = ("_ready", "early", "expression", "rounds", "shared", "sizes", "template", "threads")

    def __init__(
        self,
        template: Template,
        values: tuple[str, ...],
        threads: int,
        shared: int = 0,
        rounds: int = 1,
        sizes: tuple[int, ...] = (),
        early: bool = True,
    ):
        self.template, self.expression, self.threads = template, template.expression(*values), threads
        self.shared, self.rounds, self.sizes, self.early = shared, rounds, sizes, early
        self._ready: dict[int, Ready] = {}

    def __call__(self, array: Any, units: int, arguments: tuple[Any, ...], waves: int = 0) -> None:
        """Launch on the device of `array`, which must be the current one, and its current stream.

        Parameters
        ----------
        array : cupy.ndarray
            Any of the arrays.
        units : int
            Units of work: what a thread block does in one round.
        arguments : tuple
            Arrays, Python ints (64 bits), NumPy scalars (their own size) and structs from `by_value`; 0 where a pointer
            is null.
        waves : int, default 0
            Limit the grid to so many times what the device holds, instead of by rounds: for a kernel that may find
            nothing to do, where each block costs.
        """
        ready = self._ready.get(array.data.device_id) or self.ready(array.data.device_id)
        if units <= ready.resident:
            grid = units
        elif waves:
            grid = min(units, waves * ready.resident)
        else:
            grid = max(ready.resident, -(-units // self.rounds))
        ready.function((grid,), (self.threads,), arguments, self.shared)

    def ready(self, device: int) -> Ready:
        """The kernel on a device, compiled where it has to be; ``ready.function(grid, ...)`` launches any grid."""
        ready = self._ready.get(device)
        if ready is None:
            ready = self._ready[device] = self._load(device)
        return ready

    def launch(self, array: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Launch a grid of the caller's choice; the rest is as in a call."""
        self.ready(array.data.device_id).function(grid, (self.threads,), arguments, shared_mem=self.shared)

    def _load(self, device: int) -> Ready:
        from cupy_backends.cuda.api import driver

        bind_thread()
        with _load_lock:
            kernel = function(self.template, self.expression, device)
            if self.shared + kernel.shared_size_bytes > 48 << 10:  # more than that has to be asked for
                kernel.max_dynamic_shared_size_bytes = max(self.shared, kernel.max_dynamic_shared_size_bytes)
            count = driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, self.threads, self.shared)
        launch: Any = kernel.kernel
        if self.sizes:
            launch = _PackedLaunch(launch.ptr, self.shared, self.sizes, self.early and starts_early(device))
        return Ready(launch, count * multiprocessors(device))


_load_lock = threading.RLock()


@functools.cache
def capability(device: int) -> int:
    """The compute capability of a device: 90 for 9.0."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


@functools.cache
def multiprocessors(device: int) -> int:
    """How many multiprocessors a device has."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
