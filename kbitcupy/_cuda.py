"""Kernels: the only file that names RawModule.

A kernel is a file of ``kernels/`` and a C++ name expression, ``("kbit.cu", "dequantize_kbit<__half, 4, E4M4>")``.
NVRTC compiles it for the GPU at hand on the first call; CuPy keeps the binary on disk for later processes.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import KernelCompileError

#: C++ names of the element types, by NumPy dtype name.
CXX_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}


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
    package = Path(__file__).resolve().parent
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
    for header in sorted(kernel_folder().glob("*.cuh")):
        digest.update(header.name.encode())
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


def options() -> tuple[str, ...]:
    """NVRTC options, the same at run time and in the offline check.

    ``--fmad=false``: NumPy rounds after every operation, so a contraction would change the bytes.
    """
    return ("-std=c++17", "--fmad=false", f"-I{kernel_folder()}", f"-DKBIT_HEADERS={_headers_hash()}")


_functions: dict[tuple[str, str, int], Any] = {}
_compile_lock = threading.Lock()


def function(file: str, expression: str, device: int) -> Any:
    """The compiled kernel for `device`, which must be the current one; cached for the life of the process."""
    key = (file, expression, device)
    found = _functions.get(key)
    return found if found is not None else _compile(key)


def _compile(key: tuple[str, str, int]) -> Any:
    import cupy

    file, expression, device = key
    with _compile_lock:
        if key in _functions:
            return _functions[key]
        module = cupy.RawModule(
            code=(kernel_folder() / file).read_text(), options=options(), name_expressions=(expression,)
        )
        try:
            kernel = module.get_function(expression)
        except Exception as error:  # NVRTC, the driver and the loader each raise a class of their own
            major_minor = cupy.cuda.Device(device).compute_capability
            raise KernelCompileError(f"{file}: {expression} for sm_{major_minor}: {error}") from error
        _functions[key] = kernel
        return kernel


_resident: dict[tuple[Any, int, int], int] = {}


def launch(file: str, expression: str, blocks: int, threads: int, arguments: tuple[Any, ...], shared: int = 0) -> None:
    """Launch a grid-stride kernel on the current device and stream.

    Parameters
    ----------
    file, expression : str
        The kernel.
    blocks : int
        Thread blocks that the work fills; the grid has as many, but no more than the GPU holds at a time.
    threads : int
        Threads of a block.
    arguments : tuple
        Arrays, Python ints (64 bits), NumPy scalars (their own size) and zero-dimensional structured NumPy arrays (by
        value); 0 where a pointer is null.
    shared : int, default 0
        Bytes of dynamic shared memory.
    """
    device = sys.modules["cupy"].cuda.runtime.getDevice()
    kernel = function(file, expression, device)
    resident = _resident.get((kernel, threads, shared)) or _occupancy(kernel, threads, shared, device)
    kernel((min(blocks, resident),), (threads,), arguments, shared_mem=shared)


def _occupancy(kernel: Any, threads: int, shared: int, device: int) -> int:
    """Blocks of a kernel that the device holds at a time."""
    import cupy
    from cupy_backends.cuda.api import driver

    per_multiprocessor = driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, threads, shared)
    count = per_multiprocessor * int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
    _resident[kernel, threads, shared] = count
    return count


class on_device:
    """Make the device of a CuPy array the current one, at no cost when it already is."""

    __slots__ = ("_device",)

    def __init__(self, array: Any):
        cupy = sys.modules["cupy"]
        wanted = array.device.id
        self._device = None if cupy.cuda.runtime.getDevice() == wanted else cupy.cuda.Device(wanted)

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            self._device.__exit__(*error)


def compile_offline(file: str, expression: str, architecture: int) -> str:
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
