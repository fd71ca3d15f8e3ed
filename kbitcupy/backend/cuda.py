"""Kernels: the only file that names RawModule.

A kernel is a file of ``kernels/`` and a C++ name expression, ``("kbit.cu", "dequantize_kbit<__half, 4, E4M4>")``.
NVRTC compiles it for the GPU at hand on the first call; CuPy keeps the binary on disk for later processes.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import KernelCompileError

#: C++ names of the element types, by NumPy dtype name.
CXX_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
#: ... and of row numbers.
IDS_CXX = {"int32": "int", "int64": "long long"}


@dataclass(frozen=True)
class Template:
    """A ``__global__`` template and the values of its parameters.

    Parameters
    ----------
    file : str
        File name in ``kernels/``.
    name : str
        Name of the function template (or plain function, without `axes`).
    axes : tuple of tuple of str
        For each template parameter, its values as C++ text.
    hot : bool
        Whether a register spill is an error.
    """

    file: str
    name: str
    axes: tuple[tuple[str, ...], ...] = ()
    hot: bool = True

    def instances(self) -> Iterator[str]:
        """Every name expression of the template."""
        for values in itertools.product(*self.axes):
            yield f"{self.name}<{', '.join(values)}>" if values else self.name


@functools.cache
def kernel_folder() -> Path:
    """The folder of the ``.cu`` files: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent
    for folder, owner in ((package / "kernels", package), (checkout / "kernels", checkout / "pyproject.toml")):
        if folder.is_dir() and owner.exists():
            return folder
    raise FileNotFoundError(f"kbitcupy's kernels are not in {package}: the installation is broken, reinstall it")


@functools.cache
def _headers_hash() -> str:
    """CuPy's on-disk cache does not see our headers, so their content goes into the options."""
    import hashlib

    digest = hashlib.sha256()
    for header in sorted(kernel_folder().rglob("*.cuh")):
        digest.update(header.relative_to(kernel_folder()).as_posix().encode())
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


def options() -> tuple[str, ...]:
    """NVRTC options, the same at run time and in the offline check.

    ``--fmad=false``: NumPy rounds after every operation, so a contraction would change the bytes.
    """
    return ("-std=c++17", "--fmad=false", f"-I{kernel_folder()}", f"-DKBIT_HEADERS={_headers_hash()}")


def architecture_of(file: str) -> str:
    """The one architecture that a file is for, ``"90a"`` of ``w8a8_sm90a.cu``; "" when it compiles for all.

    What only one architecture has needs its letter in the option. CuPy adds the option of the device: of two that
    differ in the letter alone NVRTC takes the one with it.
    """
    return file.partition("_sm")[2].removesuffix(".cu")


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
        The kernel. (A RawKernel takes a microsecond more to find it out again.)
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


class _Launch(threading.local):
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
    file, expression : str
        File in ``kernels/`` and C++ name expression.
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

    __slots__ = ("_ready", "early", "expression", "file", "rounds", "shared", "sizes", "threads")

    def __init__(
        self,
        file: str,
        expression: str,
        threads: int,
        shared: int = 0,
        rounds: int = 1,
        sizes: tuple[int, ...] = (),
        early: bool = True,
    ):
        self.file, self.expression, self.threads = file, expression, threads
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
        with _compile_lock:
            function = _function(self.file, self.expression, device)
            if self.shared + function.shared_size_bytes > 48 << 10:  # more than that has to be asked for
                function.max_dynamic_shared_size_bytes = max(self.shared, function.max_dynamic_shared_size_bytes)
            count = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, self.threads, self.shared)
        launch: Any = function.kernel
        if self.sizes:
            launch = _Launch(launch.ptr, self.shared, self.sizes, self.early and starts_early(device))
        return Ready(launch, count * multiprocessors(device))


_compile_lock = threading.RLock()


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


#: The kernels that this process has compiled or loaded, by (file, expression, device), for its life.
loaded: dict[tuple[str, str, int], Any] = {}


def _function(file: str, expression: str, device: int) -> Any:
    """The compiled kernel."""
    key = file, expression, device
    if key not in loaded:
        loaded[key] = _compiled(file, expression, device)
    return loaded[key]


def _compiled(file: str, expression: str, device: int) -> Any:
    import cupy

    only = architecture_of(file)
    chosen = (*options(), f"-arch=sm_{only}") if only else options()
    module = cupy.RawModule(code=(kernel_folder() / file).read_text(), options=chosen, name_expressions=(expression,))
    try:
        return module.get_function(expression)
    except Exception as error:  # NVRTC, the driver and the loader each raise a class of their own
        architecture = cupy.cuda.Device(device).compute_capability
        raise KernelCompileError(f"{file}: {expression} for sm_{architecture}: {error}") from error


def compile_offline(file: str, expression: str, architecture: int | str) -> str:
    """Compile one kernel for ``sm_<architecture>`` without a GPU and return the log of ptxas.

    Raises
    ------
    KernelCompileError
        When NVRTC refuses the kernel.
    """
    from cuda.pathfinder import find_nvidia_header_directory
    from cupy.cuda import nvrtc

    include = find_nvidia_header_directory("cudart")
    if include is None:
        raise FileNotFoundError("the CUDA headers are not installed: pip install nvidia-cuda-runtime-cu12")
    arguments = (*options(), f"-I{include}", f"-arch=sm_{architecture}", "-ftz=true", "--ptxas-options=-v")
    program = nvrtc.createProgram((kernel_folder() / file).read_text(), file, (), ())
    try:
        nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, arguments)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelCompileError(f"{file}: {expression} for sm_{architecture}: {error}\n{log}") from error
        nvrtc.getCUBIN(program)
        return str(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
