"""Launches: a compiled kernel with its grid and its arguments, and the facts of a device that choose them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
    launch : callable
        Starts it: called with the grid and the arguments.
    resident : int
        Thread blocks of it that the device holds at a time.
    """

    launch: Start
    resident: int


@dataclass(frozen=True, eq=False)
class Planned:
    """A launch that is worked out once for all products of one shape.

    Parameters
    ----------
    launch : callable
        The kernel, loaded: `Ready.launch`.
    grid : tuple of int
        Thread blocks.
    """

    launch: Start
    grid: tuple[int, ...]


def bind_thread() -> None:
    """Make the context of the current device that of this thread.

    Functions of the driver take the context that the thread has, and a thread that has not used the runtime yet has
    none. CuPy binds it before its own launches; whoever calls the driver has to do it, once a thread.
    """
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())


@functools.cache
def driver_function(name: str, *, holds: bool = False) -> Any:
    """A function of the driver; None where the driver is too old to have it.

    With `holds` other Python threads wait while it is called: for what takes microseconds, after which this thread
    would have to wait for them.
    """
    kind = ctypes.PyDLL if holds else ctypes.CDLL
    return getattr(kind("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name, None)


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


# The configuration as it is packed: the grid; block and shared memory, which stay; the stream; attributes, which stay.
_CONFIG, _CONSTANT = "III16s4xQ16s", (slice(12, 28), slice(40, 56))

# Driver versions from this one on capture early launches in graphs.
_EARLY_DRIVER = 12030
_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # of the driver's launch attributes


@functools.cache
def starts_early(device: int) -> bool:
    """Whether kernels on a device may start before the kernel ahead of them has ended."""
    import cupy

    return capability(device) >= 90 and int(cupy.cuda.runtime.driverGetVersion()) >= _EARLY_DRIVER


#: struct's letters of the types of arguments.
_LETTERS = {"p": "Q", "i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f4": "f", "f8": "d"}
#: How an argument of a kernel is typed: a letter and bytes as NumPy has them, "p" for a pointer, a struct, or the
#: number of its bytes, of which 4 and 8 are integers; or several arguments that come packed together, see `packed`.
Type: TypeAlias = "str | int | Struct | tuple[str | int | Struct, ...]"
#: Starts a kernel that is loaded: called with the grid and the arguments.
Start: TypeAlias = Callable[[tuple[int, ...], Sequence[Any]], None]


def _letters(type: Type) -> str:
    if isinstance(type, Struct):
        return f"{type.dtype.itemsize}s"
    if isinstance(type, tuple):
        return f"{struct.calcsize('=' + ''.join(map(_letters, type)))}s"
    return _LETTERS[type] if isinstance(type, str) else {4: "i", 8: "q"}.get(type, f"{type}s")


@functools.cache
def _starter(signature: tuple[Type, ...], early: bool) -> Callable[..., Start]:
    """What makes the function that packs a grid and arguments of a signature, and launches.

    A function written for the signature takes half the time of a loop over the arguments. Where a pointer is due, what
    is no int is an array: nobody asks an array for its value. Bytes are as many as they should be, which ``struct``
    itself would cut or fill up. An early launch has its configuration ahead of the arguments, in the same buffer: that
    is packed with them.
    """
    names = [f"a{i}" for i in range(len(signature))]

    def value(name: str, type: Type) -> str:
        letters = _letters(type)
        if letters.endswith("s"):
            return f"{name} if len({name}) == {letters[:-1]} else wrong({name}, {letters[:-1]})"
        return f"{name} if {name}.__class__ is int else {name}.data.ptr" if type == "p" else name

    given = [*map(value, names, signature)]
    start = ["launch(handle, width, height, depth, *shape, stream().ptr, *pointers)"]
    if early:
        given = ["width", "height", "depth", "shape", "stream().ptr", "attributes", *given]
        start = ["status = launch(*pointers)", "if status:", "    check(status)"]
    lines = (
        "def make(pack_into, buffer, launch, handle, pointers, shape, attributes, stream, check, name):",
        "    def start(grid, arguments):",
        "        width, height, depth = grid if len(grid) == 3 else (*grid, 1, 1)[:3]",
        "        try:",
        f"            [{', '.join(names)}] = arguments",
        f"            pack_into({', '.join(('buffer', '0', *given))})",
        "        except refused as error:",
        "            raise TypeError(f'arguments of {name}: {error}') from None",
        *(f"        {line}" for line in start),
        "    return start",
    )
    made: dict[str, Any] = {"wrong": _wrong_size, "refused": (struct.error, AttributeError, TypeError, ValueError)}
    exec("\n".join(lines), made)
    make: Callable[..., Start] = made["make"]
    return make


def packed(types: tuple[str | int | Struct, ...], *numbers: float | bytes) -> bytes:
    """Arguments of these types as one, which a plan packs once for all launches.

    Raises
    ------
    TypeError
        When one does not fit its type.
    """
    try:
        return struct.pack("=" + "".join(map(_letters, types)), *numbers)
    except struct.error as error:
        raise TypeError(f"arguments {numbers}: {error}") from None


def _wrong_size(given: bytes, size: int) -> None:
    raise ValueError(f"{len(given)} bytes came for {size}")


class _OfThread(threading.local):
    """A launch by buffers of the thread that asks for it: making them, it is bound to its device."""

    start: Start

    def __init__(
        self, handle: int, name: str, threads: int, shared: int, signature: tuple[Type, ...], early: bool
    ) -> None:
        from cupy.cuda import get_current_stream
        from cupy_backends.cuda.api import driver

        bind_thread()
        letters = [_letters(type) for type in signature]
        packing = struct.Struct("=" + _CONFIG * early + "".join(letters))
        buffer = self._buffer = ctypes.create_string_buffer(packing.size)
        size = ctypes.sizeof(_Config) if early else 0
        each = [one for type in signature for one in (type if isinstance(type, tuple) else (type,))]
        sizes = (struct.calcsize(f"={_letters(one)}") for one in each)
        places = itertools.accumulate(sizes, initial=ctypes.addressof(buffer) + size)
        self._places = (ctypes.c_void_p * len(each))(*itertools.islice(places, len(each)))
        arguments = ctypes.addressof(self._places)
        shape: Any = threads, 1, 1, shared
        pointers: Any = arguments, 0
        attributes = b""
        launch = driver.launchKernel
        if early:
            launch = driver_function("cuLaunchKernelEx")
            launch.argtypes = (ctypes.c_void_p,) * 4
            self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (ctypes.c_uint * 16)(1))
            config = bytes(_Config(1, 1, 1, *shape, 0, ctypes.addressof(self._attribute), 1))
            shape, attributes = (config[part] for part in _CONSTANT)
            pointers = ctypes.addressof(buffer), handle, arguments, None
        of_launch = launch, handle, pointers, shape, attributes, get_current_stream, driver.check_status
        self.start = _starter(signature, early)(packing.pack_into, buffer, *of_launch, name)


def _packed_launch(
    handle: int, name: str, threads: int, shared: int, signature: tuple[Type, ...], early: bool
) -> Start:
    """A launch whose arguments are packed into one buffer.

    Where CuPy's own launcher makes of an argument what its class says, here one that does not fit its type raises; with
    addresses in place of arrays it takes a microsecond less. Each thread has buffers of its own, as other threads may
    run during the call.
    """
    own = _OfThread(handle, name, threads, shared, signature, early)

    def launch(grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        own.start(grid, arguments)

    return launch


def grid_of(units: int, resident: int, rounds: int = 1, waves: int = 0) -> int:
    """Thread blocks for so many units of work.

    Each takes an equal run of the work, whatever the size of the grid: one block for each unit while the device holds
    them all at a time, and as many as fill it where that leaves each at most `rounds` units; beyond that more blocks,
    which keep the runs short.

    Parameters
    ----------
    units : int
        What a thread block does in one round.
    resident : int
        Thread blocks that the device holds at a time.
    rounds : int, default 1
        Units of a thread block in a grid that is larger than the device.
    waves : int, default 0
        Limit the grid to so many times `resident` instead, where each block costs although there may be nothing to do.

    Examples
    --------
    >>> grid_of(100, 132), grid_of(300, 132, rounds=4), grid_of(3000, 132, rounds=4), grid_of(3000, 132, waves=2)
    (100, 132, 750, 264)
    """
    if units <= resident:
        return units
    return min(units, waves * resident) if waves else max(resident, -(-units // rounds))


class Kernel:
    """One kernel with its launch shape, for every device: compiled on first use, then a lookup and a launch.

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
        See `grid_of`.
    signature : tuple of str, int, Struct or tuple, default ()
        Types of the arguments: ``"p"`` a pointer; ``"i4"``, ``"u4"``, ``"i8"``, ``"u8"``, ``"f4"`` and ``"f8"``
        numbers; a struct, or the size of one in bytes; a tuple of them for arguments that come `packed` together. An
        argument that does not fit raises TypeError.
    early : bool, default False
        Whether it may start before the kernel ahead of it has ended, where the device can do so (see `starts_early`):
        it then waits itself, by ``griddepcontrol.wait``, before it looks at what that one writes.
    cluster : int, default 1
        Thread blocks of a cluster, as the kernel declares them: of such a one a device holds whole clusters, which do
        not find a place everywhere.
    carveout : int, optional
        Percent of a multiprocessor's memory that should be shared memory while it has blocks of this kernel: one that
        needs little of it itself can keep a neighbour's blocks waiting, which need more.
    """

    __slots__ = (
        "_ready",
        "carveout",
        "cluster",
        "early",
        "expression",
        "rounds",
        "shared",
        "signature",
        "template",
        "threads",
    )

    def __init__(
        self,
        template: Template,
        values: tuple[str, ...],
        threads: int,
        shared: int = 0,
        rounds: int = 1,
        signature: tuple[Type, ...] = (),
        early: bool = False,
        cluster: int = 1,
        carveout: int | None = None,
    ):
        self.template, self.expression, self.threads = template, template.expression(*values), threads
        self.shared, self.rounds, self.signature, self.early = shared, rounds, signature, early
        self.cluster, self.carveout = cluster, carveout
        self._ready: dict[int, Ready] = {}

    def __call__(self, array: Any, units: int, arguments: tuple[Any, ...], waves: int = 0) -> None:
        """Launch as many thread blocks as `grid_of` finds, on the device of `array` and its current stream.

        Parameters
        ----------
        array : cupy.ndarray
            Any of the arrays. Its device must be the current one.
        units, waves : int
            See `grid_of`.
        arguments : tuple
            As `signature` types them: arrays or addresses, 0 where a pointer is null; ints; floats; structs as bytes.
        """
        ready = self._ready.get(array.data.device_id) or self.ready(array.data.device_id)
        grid = units if units <= ready.resident else grid_of(units, ready.resident, self.rounds, waves)
        ready.launch((grid,), arguments)

    def ready(self, device: int) -> Ready:
        """The kernel on a device, compiled where it has to be."""
        ready = self._ready.get(device)
        if ready is None:
            ready = self._ready[device] = self._load(device)
        return ready

    def launch(self, array: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launch a grid of the caller's choice; the rest is as in a call."""
        ready = self._ready.get(array.data.device_id) or self.ready(array.data.device_id)
        ready.launch(grid, arguments)

    def _load(self, device: int) -> Ready:
        from cupy_backends.cuda.api import driver

        bind_thread()
        with _load_lock:
            kernel = function(self.template, self.expression, device)
            if self.shared + kernel.shared_size_bytes > 48 << 10:  # more than that has to be asked for
                kernel.max_dynamic_shared_size_bytes = max(self.shared, kernel.max_dynamic_shared_size_bytes)
            if self.carveout is not None:
                kernel.preferred_shared_memory_carveout = self.carveout
            count = driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, self.threads, self.shared)
            resident = count * multiprocessors(device)
            if self.cluster > 1:
                resident = min(resident, self._clusters(kernel.kernel.ptr, resident) * self.cluster)
        early = self.early and starts_early(device)
        name = f"{self.template.label}: {self.expression}"
        launch = _packed_launch(kernel.kernel.ptr, name, self.threads, self.shared, self.signature, early)
        return Ready(launch, resident)

    def _clusters(self, kernel: int, blocks: int) -> int:
        """Those that the device holds at a time of a grid of so many thread blocks."""
        attribute = _Attribute(_CLUSTER_DIMENSION)
        attribute.value[:3] = self.cluster, 1, 1
        of_grid = blocks // self.cluster * self.cluster, 1, 1
        pointer = ctypes.cast(ctypes.pointer(attribute), ctypes.c_void_p)
        config = _Config(*of_grid, self.threads, 1, 1, self.shared, None, pointer, 1)
        found = ctypes.c_int()
        ask = driver_function("cuOccupancyMaxActiveClusters")
        status = ask(ctypes.byref(found), ctypes.c_void_p(kernel), ctypes.byref(config))
        return found.value if status == 0 and found.value > 0 else blocks // self.cluster


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
