"""Kernels from source to binary: the only file that names RawModule.

A kernel is a file of ``kernels/`` and a C++ name expression, ``dequantize_kbit<__half, 4, E4M4>`` of ``kbit.cu``.
NVRTC compiles it for the GPU at hand on the first call; CuPy keeps the binary on disk for later processes.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KernelCompileError
from .structs import Declared, declarations

if TYPE_CHECKING:
    from pathlib import Path

#: C++ names of the element types, by NumPy dtype name.
CXX_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
#: ... and of row numbers.
IDS_CXX = {"int32": "int", "int64": "long long"}
#: ... and truth values, by what they are as numbers.
CXX_BOOLS = ("false", "true")


@functools.cache
def cxx_type(dtype: np.dtype) -> str:
    """That of `CXX_TYPES`; a dtype's name takes longer to ask for than most kernels to launch."""
    return CXX_TYPES[dtype.name]


@dataclass(frozen=True)
class Template:
    """A ``__global__`` template and the values of its parameters.

    Parameters
    ----------
    file : str
        File below ``kernels/``.
    name : str
        Name of the function template (or plain function, without `axes`).
    axes : tuple of tuple of str
        For each template parameter, its values as C++ text.
    hot : bool, default True
        Whether a register spill is an error.
    folder : Path, optional
        The kernels of another package. What is not there is looked for among ours: a format of another package brings
        a header with its decoder, and names a file of ours.
    header : str, default ""
        The header with the decoder of a format, below `folder` or ours: what ``#include KBIT_FORMAT_HEADER`` includes.
    structs : tuple of Struct, Constants and Table, default ()
        Those that stand ahead of the source.
    least : int, default 0
        The oldest architecture on which its body is not empty: the host never asks an older one.
    """

    file: str
    name: str
    axes: tuple[tuple[str, ...], ...] = ()
    hot: bool = True
    folder: Path | None = None
    header: str = ""
    structs: tuple[Declared, ...] = ()
    least: int = 0

    def expression(self, *values: str) -> str:
        """The name expression of one instance.

        Examples
        --------
        >>> Template("kbit.cu", "dequantize_kbit").expression("__half", "4", "E4M4")
        'dequantize_kbit<__half, 4, E4M4>'
        """
        return f"{self.name}<{', '.join(values)}>" if values else self.name

    def instances(self) -> Iterator[str]:
        """Every name expression of the template."""
        for values in itertools.product(*self.axes):
            yield self.expression(*values)

    @property
    def label(self) -> str:
        """The file as messages and `loaded` name it: with the folder and the header, where they are not ours."""
        file = self.file if self.folder is None else str(self.folder / self.file)
        return f"{file} with {self.header}" if self.header else file


@functools.cache
def kernel_folder() -> Path:
    """The folder of the ``.cu`` files: inside the package when installed, beside it in a checkout."""
    from pathlib import Path

    package = Path(__file__).resolve().parent.parent
    checkout = package.parent
    for folder, owner in ((package / "kernels", package), (checkout / "kernels", checkout / "pyproject.toml")):
        if folder.is_dir() and owner.exists():
            return folder
    raise FileNotFoundError(f"kbitcupy's kernels are not in {package}: the installation is broken, reinstall it")


@functools.cache
def _headers_hash(folders: tuple[Path, ...]) -> str:
    """CuPy's on-disk cache does not see headers, so their content goes into the options."""
    import hashlib

    digest = hashlib.sha256()
    for folder in folders:
        for header in sorted(folder.rglob("*.cuh")):
            digest.update(header.relative_to(folder).as_posix().encode())
            digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _folders(folder: Path | None) -> tuple[Path, ...]:
    """Where the files of a template are looked for."""
    return (kernel_folder(),) if folder is None else (folder, kernel_folder())


def options(template: Template | None = None) -> tuple[str, ...]:
    """NVRTC options of a template, by default one of ours; the same at run time and in the offline check.

    ``--fmad=false``: NumPy rounds after every operation, so a contraction would change the bytes.
    """
    return include_options(() if template is None or template.folder is None else (template.folder,))


def include_options(folders: tuple[Path, ...]) -> tuple[str, ...]:
    """... of sources that include headers of `folders`, those of other packages, and ours."""
    folders = (*folders, kernel_folder())
    included = (f"-I{folder}" for folder in folders)
    return ("-std=c++17", "--fmad=false", *included, f"-DKBIT_HEADERS={_headers_hash(folders)}")


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def source(template: Template) -> str:
    """What NVRTC compiles: the file, and ahead of it what Python declares."""
    path = next(folder / template.file for folder in _folders(template.folder) if (folder / template.file).is_file())
    ahead = [f'#define KBIT_FORMAT_HEADER "{template.header}"'] if template.header else []
    ahead += [declarations(template.structs)] if template.structs else []
    return "\n".join((*ahead, f'#line 1 "{template.file}"', _text(path))) if ahead else _text(path)


def offline(template: Template, expression: str) -> tuple[str, tuple[str, ...]]:
    """Source and options of one kernel, for whoever compiles it without a GPU."""
    return source(template), options(template)


def architecture_of(file: str) -> str:
    """The one architecture that a file is for, ``"90a"`` of ``hopper_sm90a.cu``; "" when it compiles for all.

    What only one architecture has needs its letter in the option. CuPy adds the option of the device: of two that
    differ in the letter alone NVRTC takes the one with it.
    """
    return file.rpartition("/")[2].partition("_sm")[2].removesuffix(".cu")


#: The kernels that this process has compiled or loaded, by (label of the file, expression, device), for its life.
loaded: dict[tuple[str, str, int], Any] = {}
_turns: dict[tuple[str, str, int], threading.Lock] = {}


def function(template: Template, expression: str, device: int) -> Any:
    """The compiled kernel, a cupy.RawKernel, compiled where this process has not done so.

    Raises
    ------
    KernelCompileError
        When NVRTC refuses it, or the driver does not load it.
    """
    key = template.label, expression, device
    if key not in loaded:
        with _turns.setdefault(key, threading.Lock()):  # of threads that ask for it at once one compiles it
            if key not in loaded:
                loaded[key] = _compiled(template, expression, device)
    return loaded[key]


def _compiled(template: Template, expression: str, device: int) -> Any:
    import cupy

    only = architecture_of(template.file)
    chosen = (*options(template), f"-arch=sm_{only}") if only else options(template)
    module = cupy.RawModule(code=source(template), options=chosen, name_expressions=(expression,))
    try:
        return module.get_function(expression)
    except Exception as error:  # NVRTC, the driver and the loader each raise a class of their own
        architecture = cupy.cuda.Device(device).compute_capability
        raise KernelCompileError(f"{template.label}: {expression} for sm_{architecture}: {error}") from error


def compile_offline(template: Template, expression: str, architecture: int | str) -> str:
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
    text, chosen = offline(template, expression)
    arguments = (*chosen, f"-I{include}", f"-arch=sm_{architecture}", "-ftz=true", "--ptxas-options=-v")
    program = nvrtc.createProgram(text, template.file, (), ())
    try:
        nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, arguments)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelCompileError(f"{template.label}: {expression} for sm_{architecture}: {error}\n{log}") from error
        nvrtc.getCUBIN(program)
        return str(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
