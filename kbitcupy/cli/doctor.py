"""``kbit doctor``: whether this machine has what kbitcupy needs, and what to do where it has not."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..backend import xp as _xp
from ..bench import cuda_version, driver_version
from ..errors import DeviceError, KbitError
from ..explore import DB_PER_BIT, default_formats
from ..explore.samples import draw
from ..formats.base import Format
from ..metrics import error_bound, sqnr_db
from ..ops import dequantize, quantize
from ..text import printable
from .common import dumps

_PACKAGES = ("numpy", "ml_dtypes", "scipy", "safetensors", "tqdm")
_SHAPE = (64, 512)
_LEAST_FREE = 100_000_000
# What a format without a bound keeps of normal numbers at least: half of what the best code of its bits could, less one
# bit. Floats keep less than integers of as many bits.
_OF_BEST, _LESS_DB = 0.5, DB_PER_BIT


@dataclass(frozen=True)
class Finding:
    """What a check found; `ok` is None where there was nothing to check."""

    name: str
    ok: bool | None
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A check: returns what it found, raises when that will not do."""

    name: str
    run: Callable[[str], str]
    remedy: str


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    findings = list(_findings(arguments.device))
    failed = [finding for finding in findings if finding.ok is False]
    if arguments.json:
        status = {True: "ok", False: "failed", None: "skipped"}
        print(
            dumps(
                {
                    "kbitcupy": __version__,
                    "ok": not failed,
                    "checks": [
                        {"name": f.name, "status": status[f.ok], "found": f.text, "remedy": f.remedy or None}
                        for f in findings
                    ],
                }
            )
        )
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[finding.ok]
            print(f"{mark}  {finding.name:<{width}}  {printable(' '.join(finding.text.split()))}")
            if finding.remedy:
                print(f"{'':{width + 8}}remedy: {finding.remedy}")
        print(f"{len(failed)} of {len(findings)} checks failed" if failed else "everything is in order")
    return 1 if failed else 0


def _findings(device: str) -> Iterator[Finding]:
    for check in _HOST:
        yield _tried(check, "cpu")
    if device == "cpu":
        yield Finding("GPU", None, "not asked for (--device cpu)")
        return
    if device == "auto" and driver_version() is None:
        yield Finding("GPU", None, "there is no NVIDIA driver: everything runs on NumPy")
        return
    device = "cuda:0" if device == "auto" else device
    for check in (_CUPY, _FOUND):
        found = _tried(check, device)
        yield found
        if not found.ok:
            return
    for check in _GPU:
        yield _tried(check, device)


def _tried(check: Check, device: str) -> Finding:
    try:
        return Finding(check.name, True, check.run(device))
    except Exception as error:  # whatever goes wrong here is what was looked for
        text = str(error) or type(error).__name__
        text = text if isinstance(error, KbitError) else f"{type(error).__name__}: {text}"
        return Finding(check.name, False, text, _DRIVER if isinstance(error, _NoDriverError) else check.remedy)


class _NoDriverError(KbitError):
    """CuPy is there, and the driver is what is missing."""


# ---- checks --------------------------------------------------------------------------------------------------------


def _versions(device: str) -> str:
    found = [f"kbitcupy {__version__}", f"Python {platform.python_version()}", platform.platform()]
    return ", ".join(found)


def _packages(device: str) -> str:
    for name in _PACKAGES:
        importlib.import_module(name)
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


def _numpy(device: str) -> str:
    x = draw("normal", _SHAPE)
    tried = 0
    for format in default_formats():
        q = quantize(x, format)
        bound, sqnr = error_bound(x, q), sqnr_db(x, q)
        if bound is not None and bound.violations:
            raise ArithmeticError(f"{format}: {bound.violations} elements are outside the format's own bound")
        if sqnr < (least := _OF_BEST * DB_PER_BIT * 8 * q.nbytes / q.size - _LESS_DB):
            raise ArithmeticError(f"{format}: SQNR {sqnr:.1f} dB of normal numbers, and {least:.1f} is the least")
        tried += 1
    return f"{tried} formats quantize and dequantize within their bounds"


def _disk(device: str) -> str:
    places = {"this folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    return ", ".join(f"{_room(folder)} MB free for {name} ({folder})" for name, folder in places.items())


def _room(folder: Path) -> int:
    """Free MB of a folder that can be written."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"kbitcupy")
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE:
        raise OSError(f"{folder} has {free / 1e6:.0f} MB free")
    return free // 1_000_000


def _cupy(device: str) -> str:
    wheels = sorted(
        {
            name
            for distribution in importlib.metadata.distributions()
            if (name := str(distribution.metadata["Name"]).lower()).startswith("cupy-cuda") or name == "cupy"
        }
    )
    if len(wheels) > 1:
        raise ImportError(f"{' and '.join(wheels)} are installed, and conflict")
    with contextlib.suppress(DeviceError):  # it is there, and finds no GPU: the next check says why
        _xp.import_cupy()
    return f"CuPy {sys.modules['cupy'].__version__} ({', '.join(wheels)})"


def _gpu(device: str) -> str:
    try:
        _xp.import_cupy()
    except DeviceError as error:
        if driver_version() is None:
            raise _NoDriverError("there is no NVIDIA driver") from error
        raise
    _xp.resolve_device(device)
    runtime = _xp.import_cupy().cuda.runtime
    found = []
    for ordinal in range(runtime.getDeviceCount()):
        about = runtime.getDeviceProperties(ordinal)
        memory = about["totalGlobalMem"] / 1e9
        found.append(f"cuda:{ordinal} {about['name'].decode()}, sm_{about['major']}{about['minor']}, {memory:.0f} GB")
    return "; ".join(found)


def _driver(device: str) -> str:
    runtime = _xp.import_cupy().cuda.runtime
    takes, needs = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    text = f"driver {driver_version()}, which takes CUDA {cuda_version(takes)}; CuPy's runtime is {cuda_version(needs)}"
    # Within one major version an older driver takes programs of a newer runtime.
    if takes // 1000 < needs // 1000:
        raise RuntimeError(text)
    return text


def _nvrtc(device: str) -> str:
    return "NVRTC " + ".".join(map(str, _xp.import_cupy().cuda.nvrtc.getVersion()))


def _headers(device: str) -> str:
    from cuda.pathfinder import find_nvidia_header_directory

    roots = [_xp.import_cupy().cuda.get_cuda_path(), os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME")]
    for folder in (find_nvidia_header_directory("cudart"), *(Path(root) / "include" for root in roots if root)):
        if folder and (Path(folder) / "cuda_fp16.h").is_file():
            return str(folder)
    raise FileNotFoundError("cuda_fp16.h is neither in the installed packages nor in the CUDA toolkit's folder")


def _cache(device: str) -> str:
    default = os.path.join("~", ".cupy", "kernel_cache")
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or default).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return f"{folder}, {_room(folder)} MB free"


def _kernel(device: str) -> str:
    format = next(format for format in default_formats() if format.kernels)
    x = draw("normal", _SHAPE)
    began = time.perf_counter()
    found = quantize(_xp.to_device(x, device), format)
    values = _xp.to_device(dequantize(found), "cpu")
    seconds = time.perf_counter() - began
    _compare(format, x, found.get().planes, values)
    return f"{format} compiled and run in {seconds:.2f} s: the same bytes as NumPy"


def _compare(format: Format, x: np.ndarray, planes: Any, values: np.ndarray) -> None:
    wanted = quantize(x, format)
    for name, plane in wanted.planes.items():
        if not np.array_equal(plane, planes[name]):
            raise ArithmeticError(f"plane {name!r} of {format} differs from NumPy's")
    if not np.array_equal(dequantize(wanted), values):
        raise ArithmeticError(f"what {format} restores differs from NumPy's")


_REINSTALL = f"reinstall: {Path(sys.executable).name} -m pip install --force-reinstall kbitcupy"
_EXTRA = (
    "install one of the extras, which bring NVRTC and headers: pip install 'kbitcupy[cuda12]' or 'kbitcupy[cuda13]'"
)

_HOST = (
    Check("kbitcupy", _versions, _REINSTALL),
    Check("packages", _packages, _REINSTALL),
    Check("NumPy", _numpy, f"a NumPy that computes otherwise: {_REINSTALL} numpy"),
    Check("disk", _disk, "make room, or set TMPDIR to a folder that has some"),
)
_CUPY = Check(
    "CuPy",
    _cupy,
    "pip uninstall all cupy packages, then install one for the CUDA version that nvidia-smi shows: 'kbitcupy[cuda12]' "
    "or 'kbitcupy[cuda13]'",
)
_DRIVER = (
    "CuPy needs no change: install the NVIDIA driver of this machine, or start its container with the GPUs (docker run "
    "--gpus all); nvidia-smi must list them"
)
_FOUND = Check("GPU", _gpu, "check nvidia-smi, and CUDA_VISIBLE_DEVICES")
_GPU = (
    Check("driver", _driver, "update the NVIDIA driver, or install the extra for its CUDA version"),
    Check("NVRTC", _nvrtc, _EXTRA),
    Check("headers", _headers, _EXTRA),
    Check("cache", _cache, "set CUPY_CACHE_DIR to a folder that can be written and has room"),
    Check("kernel", _kernel, "delete CuPy's cache folder and try again; then report it with the output of --debug"),
)
