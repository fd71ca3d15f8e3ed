"""``kbit bench``: how fast the registered formats are on this machine, beside what moving their bytes costs.

On a GPU every row is the median GPU time of a call, the bytes that the call must move (input read plus output
written) over that time, and that rate as a fraction of the copy bandwidth measured in the same run. Scales that are
given are read as an input, and written as a part of the result, which owns them. On NumPy a row is the time of an
element on one core.

How the GPU is timed:

- CUDA events stand around one call, or around a pass over many calls where one call is short. Ahead of the first event
  goes a copy that keeps the GPU busy until the CPU has queued everything, so gaps in the queue are never counted.
- While the arrays of one call are smaller than four times the L2 cache, a pass rotates through as many inputs and
  outputs as that takes (up to 512), so that every call finds the cache cold. Such a pass is a CUDA graph where the
  calls can be captured.
- Data is drawn from N(0, 1) on the host with a fixed seed. Arrays larger than 2^24 elements repeat it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import affine
from .._version import __version__
from ..backend import xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel
from ..compat.bitsandbytes import create_normal_float_codebook, dequantize_kbit, quantize_kbit
from ..errors import FormatError, KbitError
from ..formats.affine import Affine, blocks_of
from ..formats.base import Format, get_format, list_formats
from ..formats.codebook.kbit import KBit
from ..formats.codebook.scales import E4M4_BIAS
from ..formats.codebook.table4 import Table4
from ..ops import dequantize, quantize

#: Sizes and dtypes of a run that names none, by (GPU, quick).
SIZES = {
    (True, False): tuple(1 << p for p in (12, 16, 20, 24, 28)),
    (True, True): (1 << 20, 1 << 26),
    (False, False): (1 << 22,),
    (False, True): (1 << 20,),
}
DTYPES = {
    (True, False): ("float16", "bfloat16", "float32"),
    (True, True): ("float16",),
    (False, False): ("float32",),
    (False, True): ("float32",),
}
MAX_SIZE = 1 << 40

# Elements at which the CPU time of a call is taken: the GPU keeps up, so the queue never fills.
_CPU_SIZE = 1 << 12
# Elements of the peers that run on the CPU in a run on a GPU.
_HOST_PEER_SIZE = {False: 1 << 22, True: 1 << 20}
# Random numbers drawn; longer arrays repeat them.
_POOL = 1 << 24
_COPY_BYTES = 1 << 30
_MAX_ROTATED = 512
# Calls of a pass that is not a graph: three times that many launches still fit in the driver's queue.
_MAX_QUEUED = 32


# ---- what is measured ----------------------------------------------------------------------------------------------

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """An operation to time.

    Parameters
    ----------
    operation : str
        Its name in the tables.
    prepare : callable
        Takes an input array, allocates the outputs; returns the call to time and the bytes that it must move.
    rescaled : bool
        Whether the input is far from 1 in magnitude, so that a format with a tensor scale needs one.
    largest_only : bool
        Whether the largest size of a run is enough.
    capture : bool
        Whether the call may be captured in a CUDA graph.
    """

    operation: str
    prepare: Callable[[Any], tuple[Call, int]]
    rescaled: bool = False
    largest_only: bool = False
    capture: bool = True


def _quantize_case(format: Format, operation: str = "quantize", **how: bool) -> Case:
    def prepare(x: Any) -> tuple[Call, int]:
        q = quantize(x, format)
        return lambda: quantize(x, format, out=q), x.nbytes + q.nbytes

    return Case(operation, prepare, **how)


def _dequantize_case(format: Format, operation: str = "dequantize", **how: bool) -> Case:
    def prepare(x: Any) -> tuple[Call, int]:
        q = quantize(x, format)
        y = _xp.namespace(x).empty(x.shape, x.dtype)
        return lambda: dequantize(q, out=y), y.nbytes + q.nbytes

    return Case(operation, prepare, **how)


def _table4_cases(format: Any) -> list[Case]:
    """Other block sizes, and absmax that are quantized themselves."""
    variants = [(f"block {block}", {"block": block}) for block in (32, 4096)]
    variants.append(("double_quant", {"double_quant": True}))
    cases = []
    for label, options in variants:
        other = get_format(format.name, **options)
        cases.append(_quantize_case(other, f"quantize, {label}", largest_only=True))
        cases.append(_dequantize_case(other, f"dequantize, {label}", largest_only=True))
    return cases


def _kbit_cases(format: Any) -> list[Case]:
    """The flat functions, which search by another rule, and codebooks that the fast search does not take."""
    k = format.bits

    def quantize_flat(x: Any) -> tuple[Call, int]:
        packed, absmax, _ = quantize_kbit(x, k)
        return lambda: quantize_kbit(x, k), x.nbytes + packed.nbytes + absmax.nbytes

    def dequantize_flat(x: Any) -> tuple[Call, int]:
        packed, absmax, codebook = quantize_kbit(x, k)
        y = _xp.namespace(x).empty(x.shape, x.dtype)
        call = functools.partial(dequantize_kbit, packed, absmax, codebook, k, x.size, out=y)
        return call, y.nbytes + packed.nbytes + absmax.nbytes

    # No rotation of an ascending codebook is ascending.
    unsorted = np.roll(create_normal_float_codebook(k), 1)
    cases = [
        Case("quantize_kbit", quantize_flat),
        Case("dequantize_kbit", dequantize_flat),
        _quantize_case(get_format(format.name, codebook=unsorted), "quantize, unsorted", largest_only=True),
    ]
    if k == 4:

        def quantize_device_codebook(x: Any) -> tuple[Call, int]:
            codebook = _xp.to_device(unsorted, _xp.device_of(x))
            return _quantize_case(get_format(format.name, codebook=codebook)).prepare(x)

        cases.append(Case("quantize, device codebook", quantize_device_codebook, largest_only=True))
    return cases


# What the rows of affine integers call a granularity.
_GRANULARITIES: dict[str, Any] = {
    "tensor": "tensor",
    "token": "token",
    "channel 0": ("channel", 0),
    "channel 1": ("channel", 1),
    "group 128": ("group", 128),
}


def _affine_cases(format: Any) -> list[Case]:
    """Given scales and found ones, of every granularity; fake quantization and the gradients."""
    if format.name not in ("int8", "int4"):
        return []
    cases = []
    for label, granularity in _GRANULARITIES.items():
        cases += [
            _affine_case(format, f"quantize, given {label}", granularity, _quantize_case, given=True),
            _affine_case(format, f"dequantize, {label}", granularity, _dequantize_case),
        ]
        if label != "tensor":  # which is the plain row
            cases.append(_affine_case(format, f"quantize, {label}", granularity, _quantize_case))
        if format.name == "int8":
            cases += [
                _gradient_case(f"fake_quantize, {label}", granularity, _fake_quantize, 2),
                _gradient_case(f"fake_quantize_backward, {label}", granularity, _fake_quantize_backward, 3),
                _gradient_case(f"quantize_backward, {label}", granularity, affine.quantize_backward, 3),
                _gradient_case(f"dequantize_backward, {label}", granularity, _dequantize_backward, 2),
            ]
    return cases


# A scale for numbers from N(0, 1).
_GIVEN = 0.03


def _matrix(x: Any) -> Any:
    """A flat array as rows of 4096 elements, or of what its size allows."""
    return x.reshape(-1, math.gcd(x.size, 4096))


def _affine_case(
    format: Format, operation: str, granularity: Any, make: Callable[[Format], Case], given: bool = False
) -> Case:
    """`given`: with an array of scales, which is read, and written again as it belongs to the result."""

    def prepare(x: Any) -> tuple[Call, int]:
        x, options, more = _matrix(x), {}, 0
        if given:
            scale = _xp.namespace(x).full(blocks_of(x.shape, granularity).shape, _GIVEN, np.float32)
            options, more = {"scale": scale}, scale.nbytes
        call, nbytes = make(get_format(format.name, granularity=granularity, **options)).prepare(x)
        return call, nbytes + more

    return Case(operation, prepare, largest_only=True)


def _gradient_case(operation: str, granularity: Any, function: Callable[..., Any], arrays: int) -> Case:
    """A function of dy, x and scales that fills `out` and moves so many arrays."""

    def prepare(x: Any) -> tuple[Call, int]:
        x = _matrix(x)
        scale, _ = affine.choose_qparams(x, granularity=granularity)
        out = _xp.namespace(x).empty_like(x)
        dy = x[::-1].copy() if arrays == 3 else x
        call = functools.partial(function, dy, x, scale, granularity=granularity, out=out)
        return call, arrays * x.nbytes + scale.nbytes

    return Case(operation, prepare, largest_only=True)


def _fake_quantize(dy: Any, x: Any, scale: Any, **options: Any) -> Any:
    return affine.fake_quantize(x, scale, qmin=-128, qmax=127, **options)


def _fake_quantize_backward(dy: Any, x: Any, scale: Any, **options: Any) -> Any:
    return affine.fake_quantize_backward(dy, x, scale, qmin=-128, qmax=127, **options)


def _dequantize_backward(dy: Any, x: Any, scale: Any, **options: Any) -> Any:
    return affine.dequantize_backward(dy, scale, **options)


#: Cases beside `quantize` and `dequantize` that the class of a format adds on a GPU.
EXTRA_CASES: dict[type[Format], Callable[[Any], list[Case]]] = {
    KBit: _kbit_cases,
    Table4: _table4_cases,
    Affine: _affine_cases,
}


def _extra_cases(format: Format) -> list[Case]:
    return [case for cls, make in EXTRA_CASES.items() if isinstance(format, cls) for case in make(format)]


def _cases(format: Format, dtype: np.dtype) -> list[Case]:
    cases = [_quantize_case(format), _dequantize_case(format)]
    if _has_tensor_scale(format, dtype):
        cases.insert(1, _quantize_case(format, "quantize, s != 1", rescaled=True))
    return cases + _extra_cases(format)


def _has_tensor_scale(format: Format, dtype: np.dtype) -> bool:
    """Whether the format has a scale of the whole tensor that is 1 for ordinary data and not for rescaled data."""
    spec = format.planes((1024,)).get("scale")
    if spec is None or spec.scope == "block":
        return False
    pool = _Source(1024)
    ordinary, rescaled = (quantize(pool.array(1024, dtype, flag), format).planes["scale"] for flag in (False, True))
    return bool((ordinary == 1).all()) and not bool((rescaled == 1).all())


class _Source:
    """Random arrays, drawn on the host and kept on `device`."""

    def __init__(self, largest: int, device: str = "cpu"):
        self._device = device
        self._normal = np.random.default_rng(0).standard_normal(min(largest, _POOL), np.float32)
        self._pools: dict[tuple[str, bool], Any] = {}

    def array(self, n: int, dtype: np.dtype, rescaled: bool = False, number: int = 0) -> Any:
        """A new array of n elements; another `number` gives another part of the pool."""
        pool = self._pool(dtype, rescaled)
        x = _xp.namespace(pool).empty(n, dtype)
        offset = number * n % (pool.size - n + 1) if n <= pool.size else 0
        for start in range(0, n, pool.size):
            part = x[start : start + pool.size]
            part.view(np.uint8)[...] = pool[offset : offset + part.size].view(np.uint8)  # plain bytes for any dtype
        return x

    def _pool(self, dtype: np.dtype, rescaled: bool) -> Any:
        key = (dtype.name, rescaled)
        if key not in self._pools:
            factor = 1.0 if not rescaled else 2.0**-12 if dtype == np.float16 else 2.0**20
            self._pools[key] = _xp.to_device((self._normal * np.float32(factor)).astype(dtype), self._device)
        return self._pools[key]

    def release(self) -> None:
        """Free the pools; they are made again when they are needed."""
        self._pools.clear()


# ---- the report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measurement.

    Parameters
    ----------
    kind : {"gpu", "cpu", "numpy"}
        GPU time of a call; CPU time of a call on a GPU array; time of a call on one core.
    format, operation, dtype : str
        What ran.
    elements : int
        Elements of the array.
    us : float
        Median time of a call in microseconds.
    nbytes : int or None
        Bytes that the call must move.
    fraction : float or None
        Rate over the copy bandwidth of the same run.
    cpu_us : float or None
        CPU time of a call in microseconds.
    samples : int
        Measurements that the median is of.
    timed_by : {"graph", "events", "clock"}
        Passes of a CUDA graph; CUDA events around calls; the clock of the CPU.
    peer : bool
        Whether the row is another library's.
    """

    kind: str
    format: str
    operation: str
    dtype: str
    elements: int
    us: float
    nbytes: int | None = None
    fraction: float | None = None
    cpu_us: float | None = None
    samples: int = 1
    timed_by: str = "clock"
    peer: bool = False

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second."""
        return None if self.nbytes is None else self.nbytes / self.us * 1e-3

    @property
    def ns_per_element(self) -> float:
        """Nanoseconds for an element."""
        return self.us * 1e3 / self.elements

    def as_json(self) -> dict[str, Any]:
        """JSON values; what was not measured is null."""
        return {
            **vars(self),
            "gb_per_s": self.gb_per_s,
            "ns_per_element": self.ns_per_element,
            "elements_per_s": self.elements / self.us * 1e6,
        }


@dataclass
class Report:
    """What a run found.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    environment : dict
        The machine and the versions, as JSON values.
    copy_gb_per_s : float or None
        Copy bandwidth of the GPU, bytes read and bytes written counted.
    launch_us : float or None
        CPU time of the launch of a kernel that does next to nothing.
    rows : list of Row
        The measurements.
    notes : list of str
        What was left out, and why.
    """

    device: str
    environment: dict[str, Any]
    copy_gb_per_s: float | None = None
    launch_us: float | None = None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def json(self) -> str:
        """One JSON document."""
        document = {
            "kbitcupy": __version__,
            "device": self.device,
            "environment": self.environment,
            "copy_gb_per_s": self.copy_gb_per_s,
            "launch_us": self.launch_us,
            "rows": [row.as_json() for row in self.rows],
            "notes": self.notes,
        }
        return json.dumps(document, indent=1, allow_nan=False)

    def text(self) -> str:
        """Aligned tables, one for each dtype."""
        lines = self._heading()
        for kind, columns in _COLUMNS.items():
            rows = [row for row in self.rows if row.kind == kind]
            for dtype in dict.fromkeys(row.dtype for row in rows):
                cells = [["format", "operation", "elements", *(title for title, _ in columns)]]
                for row in rows:
                    if row.dtype == dtype:
                        numbers = [show(row) for _, show in columns]
                        cells.append([row.format, row.operation, _size_text(row.elements), *numbers])
                lines += ["", f"{dtype}{' (one core)' if kind == 'numpy' else ''}", *_aligned(cells, 2)]
        lines += self._cpu_text()
        return "\n".join(lines)

    def markdown(self) -> str:
        """The README's tables: the largest size, a column for each format, a table for each family."""
        kind, title, show = ("gpu", "fraction of copy", _fraction_text)
        if self.device == "cpu":
            kind, title, show = ("numpy", "ns per element", lambda row: f"{row.ns_per_element:.1f}")
        measured = [row for row in self.rows if row.kind == kind]
        largest = max((row.elements for row in measured if not row.peer), default=0)
        rows = [row for row in measured if row.elements == largest]
        tables = [_family_table(family, show) for family in _families([row for row in rows if not row.peer])]
        if kind == "gpu":
            caption = (
                f"{_size_text(largest)} elements: bytes that must move, over GPU time, as a fraction of the copy "
                f"bandwidth of the same run ({self.copy_gb_per_s or 0:.0f} GB/s)."
            )
        else:
            caption = f"{_size_text(largest)} elements: nanoseconds per element on one core, median of 3."
        blocks = [[caption], *tables]
        peers = [row for row in rows if row.peer]
        if peers:
            lines = [[row.format, row.operation, row.dtype, show(row)] for row in peers]
            blocks.append(_markdown_table([["peer", "operation", "dtype", title], *lines]))
        blocks.append(["; ".join(self._heading()[:2]) + "."])
        return "\n".join(["<!-- bench -->", *"\n\n".join("\n".join(block) for block in blocks).splitlines(), _END])

    def _heading(self) -> list[str]:
        about = self.environment
        versions = [f"{name} {version}" for name, version in about["versions"].items()]
        if self.device == "cpu":
            return [f"{about['cpu']}, times per core", ", ".join(versions)]
        return [
            f"{about['gpu']}, driver {about['driver'] or 'unknown'} (CUDA {about['driver_cuda']}), CUDA runtime "
            f"{about['cuda_runtime']}, NVRTC {about['nvrtc']}",
            ", ".join(versions),
            f"copy bandwidth {self.copy_gb_per_s or 0:.0f} GB/s (device to device, read and write counted); "
            f"CPU time of one kernel launch {self.launch_us or 0:.1f} us",
        ]

    def _cpu_text(self) -> list[str]:
        rows = [row for row in self.rows if row.kind == "cpu"]
        if not rows:
            return []
        operations = list(dict.fromkeys(row.operation for row in rows))
        found = {(row.format, row.operation): f"{row.us:.1f}" for row in rows}
        cells = [["format", *operations]]
        cells += [
            [name, *(found.get((name, operation), "") for operation in operations)]
            for name in dict.fromkeys(row.format for row in rows)
        ]
        title = f"CPU time of a call in us, {rows[0].dtype}, {_size_text(rows[0].elements)} elements"
        return ["", title, *_aligned(cells, 1)]


_END = "<!-- /bench -->"


def _fraction_text(row: Row) -> str:
    return "" if row.fraction is None else f"{row.fraction:.2f}"


_COLUMNS: dict[str, tuple[tuple[str, Callable[[Row], str]], ...]] = {
    "gpu": (
        ("GPU us", lambda row: f"{row.us:.2f}"),
        ("GB/s", lambda row: "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}"),
        ("of copy", _fraction_text),
        ("CPU us", lambda row: "" if row.cpu_us is None else f"{row.cpu_us:.1f}"),
    ),
    "numpy": (
        ("ns/element", lambda row: f"{row.ns_per_element:.2f}"),
        ("elements/s", lambda row: f"{row.elements / row.us * 1e6:.2e}"),
    ),
}


def _families(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of formats that are implemented together, in the order of the formats."""
    found: dict[type[Format], list[Row]] = {}
    for row in rows:
        found.setdefault(type(get_format(row.format)), []).append(row)
    return list(found.values())


def _family_table(rows: Sequence[Row], show: Callable[[Row], str]) -> list[str]:
    """A column for each format."""
    names, dtypes = list(dict.fromkeys(row.format for row in rows)), list(dict.fromkeys(row.dtype for row in rows))
    cells = {(row.operation, row.dtype, row.format): show(row) for row in rows}
    table = [["operation", "dtype", *names]]
    for operation in dict.fromkeys(row.operation for row in rows):
        for dtype in dtypes:
            line = [cells.get((operation, dtype, name), "") for name in names]
            if any(line):
                table.append([operation, dtype, *line])
    return _markdown_table(table)


def _aligned(cells: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table; the first `left` columns are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if number < left else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _markdown_table(cells: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return [lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]


def _size_text(n: int) -> str:
    return f"2^{n.bit_length() - 1}" if n.bit_count() == 1 else str(n)


# ---- a run ---------------------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """A number of elements from the command line.

    Parameters
    ----------
    text : str
        Decimal digits, or ``2^N``.

    Returns
    -------
    int
        1 to 2^40.

    Raises
    ------
    FormatError
        When `text` is anything else.

    Examples
    --------
    >>> from kbitcupy.bench import parse_size
    >>> parse_size("2^12"), parse_size("1000")
    (4096, 1000)
    """
    found = re.fullmatch(r"(2\^)?([0-9]{1,13})", text.strip())
    if found is not None:
        number = int(found[2])
        size = number if found[1] is None else 1 << number if number <= 40 else 0
        if 1 <= size <= MAX_SIZE:
            return size
    raise FormatError(f"size is {text!r}; it must be a number of elements from 1 to 2^40, such as 1048576 or 2^20")


def run(
    names: Sequence[str] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    device: str = "auto",
    quick: bool = False,
    peers: bool = True,
    progress: bool = False,
) -> Report:
    """Time formats.

    Parameters
    ----------
    names : sequence of str, optional
        Formats; all registered ones by default.
    sizes : sequence of int, optional
        Numbers of elements; 2^12 to 2^28 on a GPU, 2^22 on NumPy.
    dtypes : sequence of str, optional
        float16, bfloat16 and float32 on a GPU, float32 on NumPy.
    device : str, default "auto"
        ``"auto"``, ``"cpu"`` or ``"cuda:N"``.
    quick : bool, default False
        Fewer sizes, dtypes and repetitions.
    peers : bool, default True
        Time bitsandbytes, torch and gguf too, where they are installed.
    progress : bool, default False
        Show a progress bar on stderr.

    Returns
    -------
    Report

    Raises
    ------
    FormatError
        When a format, size or dtype is not known, or a format fails.
    DeviceError
        When the device is not there.

    Examples
    --------
    >>> from kbitcupy import bench
    >>> report = bench.run(["kbit2"], sizes=[1024], device="cpu", peers=False)
    >>> [(row.format, row.operation, row.elements) for row in report.rows]
    [('kbit2', 'quantize', 1024), ('kbit2', 'dequantize', 1024)]
    """
    chosen = [get_format(name) for name in (list_formats() if names is None else names)]
    device = _xp.resolve_device(device)
    mode = (device != "cpu", quick)
    counts = sorted(set(SIZES[mode] if sizes is None else sizes))
    for count in counts:
        if not 1 <= count <= MAX_SIZE:
            raise FormatError(f"size is {count}; allowed are 1 to 2^40 elements")
    try:
        types = [_xp.float_dtype(dtype) for dtype in dict.fromkeys(DTYPES[mode] if dtypes is None else dtypes)]
    except TypeError as error:
        raise FormatError(str(error)) from error
    if not chosen or not counts or not types:
        raise FormatError("nothing to measure: name at least one format, one size and one dtype")
    measure = _run_cpu if device == "cpu" else _run_gpu
    with _Progress(progress) as bar:
        return measure(chosen, counts, types, device, quick, peers, bar)


class _Progress:
    """A bar on stderr that names what is being timed."""

    def __init__(self, show: bool):
        self._show = show
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def total(self, count: int) -> None:
        """Say how many steps there are."""
        if self._show:
            from tqdm.auto import tqdm  # most runs in scripts show no bar

            self._bar = tqdm(total=count, desc="bench", leave=False)

    def step(self, text: str) -> None:
        """Begin the next step."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()


@contextlib.contextmanager
def _naming(case: Case, format: Format) -> Iterator[None]:
    """Errors of a format say which one it was."""
    try:
        yield
    except KbitError:
        raise
    except (ValueError, TypeError) as error:
        raise FormatError(f"{case.operation} with {format}: {error}") from error


def _environment(**about: Any) -> dict[str, Any]:
    return {
        **about,
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "versions": {"kbitcupy": __version__, "NumPy": np.__version__, "Python": platform.python_version()},
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


# ---- NumPy ---------------------------------------------------------------------------------------------------------


def _run_cpu(
    chosen: Sequence[Format],
    sizes: Sequence[int],
    dtypes: Sequence[np.dtype],
    device: str,
    quick: bool,
    peers: bool,
    bar: _Progress,
) -> Report:
    report = Report(device, _environment())
    source = _Source(max(sizes))
    bar.total(len(chosen) * len(sizes) * len(dtypes) * 2)
    for dtype in dtypes:
        for n in sizes:
            x = source.array(n, dtype)
            for format in chosen:
                for case in _core_cases(format):
                    bar.step(f"{format} {case.operation}")
                    with _naming(case, format):
                        report.rows.append(_time_on_core(case, x, str(format)))
    if peers:
        for n in sizes:
            _run_host_peers(report, source.array(n, np.dtype("float32")))
    return report


def _core_cases(format: Format) -> list[Case]:
    """The plain calls, which allocate their results, as those of gguf-py can only do."""

    def quantize_(x: Any) -> tuple[Call, int]:
        return lambda: quantize(x, format), x.nbytes + quantize(x, format).nbytes

    def dequantize_(x: Any) -> tuple[Call, int]:
        q = quantize(x, format)
        return lambda: dequantize(q), x.nbytes + q.nbytes

    return [Case("quantize", quantize_), Case("dequantize", dequantize_)]


def _time_on_core(case: Case, x: Any, name: str, peer: bool = False, runs: int = 3) -> Row:
    """Median of a few runs; a run of short calls is as many as take 20 ms."""
    call, nbytes = case.prepare(x)
    start = time.perf_counter()
    call()
    count = max(1, math.ceil(0.02 / max(time.perf_counter() - start, 1e-7)))
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds.append((time.perf_counter() - start) / count)
    us = statistics.median(seconds) * 1e6
    return Row("numpy", name, case.operation, x.dtype.name, x.size, us, nbytes, samples=runs, peer=peer)


# ---- CUDA ----------------------------------------------------------------------------------------------------------


class _Gpu:
    """A GPU, a stream on it, and its copy bandwidth; `device`, `stream` must be the current ones."""

    def __init__(self, cupy: Any, ordinal: int, stream: Any, quick: bool):
        self.cupy, self.stream = cupy, stream
        self.least, self.most, self.budget = (7, 9, 0.03) if quick else (15, 50, 0.1)
        self.captured = 8  # calls of a graph at least, as far as they take 2 ms
        properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        self.cold = 4 * int(properties["l2CacheSize"])
        self.name = properties["name"].decode()
        free, self.memory = cupy.cuda.runtime.memGetInfo()
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._copied = min(_COPY_BYTES, free // 8) // 512 * 512
        source = _Source(_POOL, f"cuda:{ordinal}")
        self._from = source.array(self._copied // 4, np.dtype("float32"))
        self._to = cupy.empty_like(self._from)
        self.bandwidth = 1e11  # bytes a second; a guess, until it is measured
        for count in (10, self.most):  # the first ones wake the clocks up
            times = [self._sample(lambda: self._copy(self._copied), 1e-3) for _ in range(count)]
            self.bandwidth = 2 * self._copied / statistics.median(times)

    def launch_us(self) -> float:
        """CPU time of one launch of a kernel of one element."""
        codes, absmax = self.cupy.zeros(1, np.uint8), self.cupy.empty(1, np.float32)
        kernel = Kernel(Template("codes.cu", "decode_absmax_e4m4"), (), 256)
        call = functools.partial(kernel, absmax, 1, (codes, 1, np.int32(E4M4_BIAS), absmax))
        call()
        return self.cpu_us([call], 200)

    def cpu_us(self, calls: Sequence[Call], count: int, batches: int = 5) -> float:
        """Wall time of a call on the CPU: `count` calls enqueued without waiting, median of some batches."""
        todo = [calls[i % len(calls)] for i in range(count)]
        found = []
        for _ in range(batches):
            self.stream.synchronize()
            start = time.perf_counter()
            for call in todo:
                call()
            found.append((time.perf_counter() - start) / count)
        self.stream.synchronize()
        return statistics.median(found) * 1e6

    def time(self, case: Case, name: str, inputs: Callable[[int], Any], peer: bool = False) -> Row:
        """Measure a case on ``inputs(0)``, ``inputs(1)``, ..., which are alike."""
        x = inputs(0)
        call, nbytes = case.prepare(x)
        once = self._wall(call)
        rotated = 1 if nbytes >= self.cold else min(_MAX_ROTATED, math.ceil(self.cold / nbytes))
        calls = [call, *(case.prepare(inputs(i))[0] for i in range(1, rotated))]
        cpu_us = self.cpu_us(calls, max(4, min(64, int(self.budget / 4 / once))), 3)
        if rotated > 1:
            calls *= math.ceil(max(8, min(self.captured, int(2e-3 / once))) / rotated)
        graph = self._capture(calls) if rotated > 1 and case.capture else None
        if graph is None:
            calls = calls[:_MAX_QUEUED]
            launch: Call = functools.partial(_call_all, calls)
        else:
            launch = graph
        wall = self._wall(launch)
        lead = 1e-4 + 2 * self._cpu_seconds(launch)
        samples = max(self.least, min(self.most, int(self.budget / (wall + lead))))
        seconds = statistics.median(self._sample(launch, lead) for _ in range(samples)) / len(calls)
        us = max(seconds * 1e6, 1e-3)  # a call that enqueues nothing takes no time
        return Row(
            "gpu",
            name,
            case.operation,
            x.dtype.name,
            x.size,
            us,
            nbytes,
            nbytes / us * 1e6 / self.bandwidth,
            cpu_us,
            samples,
            "events" if graph is None else "graph",
            peer,
        )

    def free(self) -> None:
        """Give memory that nothing refers to back to the driver."""
        self.stream.synchronize()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def _capture(self, calls: Sequence[Call]) -> Call | None:
        """The calls as one CUDA graph; None when they cannot be captured."""
        self.stream.synchronize()
        self.stream.begin_capture()
        try:
            results = [call() for call in calls]
            graph = self.stream.end_capture()
        except Exception:  # CuPy's, or whatever a format makes of an operation that capturing forbids
            with contextlib.suppress(Exception):
                self.stream.end_capture()
            return None
        graph.upload(self.stream)

        def launch(_kept: Any = results) -> None:  # the graph writes to the results: they must not be freed before it
            graph.launch(self.stream)

        return launch

    def _wall(self, call: Call) -> float:
        """Seconds of a call and of waiting for it; the second of two, since the first may compile."""
        seconds = 0.0
        for _ in range(2):
            self.stream.synchronize()
            start = time.perf_counter()
            call()
            self.stream.synchronize()
            seconds = time.perf_counter() - start
        return max(seconds, 1e-6)

    def _cpu_seconds(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        self.stream.synchronize()
        return seconds

    def _sample(self, launch: Call, lead: float) -> float:
        """GPU seconds of what `launch` enqueues, behind about `lead` seconds of copying."""
        begin, end = self._events
        left = int(lead * self.bandwidth / 2)
        while left > 0:
            self._copy(min(left, self._copied))
            left -= self._copied
        begin.record(self.stream)
        launch()
        end.record(self.stream)
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(begin, end)) * 1e-3

    def _copy(self, nbytes: int) -> None:
        self._to.data.copy_from_device_async(self._from.data, nbytes, self.stream)


def _call_all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()


def _run_gpu(
    chosen: Sequence[Format],
    sizes: Sequence[int],
    dtypes: Sequence[np.dtype],
    device: str,
    quick: bool,
    peers: bool,
    bar: _Progress,
) -> Report:
    cupy = _xp.import_cupy()
    ordinal = int(device.partition(":")[2])
    with cupy.cuda.Device(ordinal), cupy.cuda.Stream() as stream:
        gpu = _Gpu(cupy, ordinal, stream, quick)
        runtime, nvrtc = cupy.cuda.runtime, ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        environment = _environment(
            gpu=gpu.name,
            compute_capability=cupy.cuda.Device(ordinal).compute_capability,
            memory_bytes=int(gpu.memory),
            l2_bytes=gpu.cold // 4,
            driver=driver_version(),
            driver_cuda=cuda_version(runtime.driverGetVersion()),
            cuda_runtime=cuda_version(runtime.runtimeGetVersion()),
            nvrtc=nvrtc,
        )
        environment["versions"]["CuPy"] = cupy.__version__
        report = Report(device, environment, gpu.bandwidth * 1e-9, gpu.launch_us())
        source = _Source(max(*sizes, _CPU_SIZE), device)
        bar.total(len(dtypes) * len(sizes) * len(chosen) + len(chosen))
        for dtype in dtypes:
            for n in sizes:
                inputs = _Inputs(source, n, dtype)
                for format in chosen:
                    bar.step(f"{dtype} {_size_text(n)} {format}")
                    for case in _cases(format, dtype):
                        if n == sizes[-1] or not case.largest_only:
                            with _naming(case, format):
                                _add_gpu_row(report, gpu, case, str(format), inputs)
                    gpu.free()
                if peers and dtype == np.float16:
                    _run_gpu_peers(report, gpu, inputs, ordinal)
                del inputs
                gpu.free()
            source.release()
        for format in chosen:
            bar.step(f"CPU time of {format}")
            report.rows += _cpu_rows(gpu, format, source.array(_CPU_SIZE, dtypes[0]))
        if peers:
            _run_host_peers(report, _Source(_POOL).array(_HOST_PEER_SIZE[quick], np.dtype("float32")))
        del source, gpu
        stream.synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    return report


class _Inputs:
    """Arrays of one size and dtype, made when they are first needed and shared by all formats."""

    def __init__(self, source: _Source, n: int, dtype: np.dtype):
        self._make = functools.partial(source.array, n, dtype)
        self._made: dict[tuple[bool, int], Any] = {}
        self.size, self.dtype = n, dtype

    def get(self, rescaled: bool, number: int) -> Any:
        key = (rescaled, number)
        if key not in self._made:
            self._made[key] = self._make(rescaled, number)
        return self._made[key]


def _add_gpu_row(report: Report, gpu: _Gpu, case: Case, name: str, inputs: _Inputs, peer: bool = False) -> None:
    try:
        report.rows.append(gpu.time(case, name, functools.partial(inputs.get, case.rescaled), peer))
    except MemoryError:
        report.notes.append(
            f"{name} {case.operation}, {inputs.dtype}, {_size_text(inputs.size)} elements: not enough GPU memory"
        )


def _cpu_rows(gpu: _Gpu, format: Format, x: Any) -> list[Row]:
    """CPU time of the calls as a user writes them, with and without ``out=``."""
    name = str(format)
    q = quantize(x, name)
    y = dequantize(q)
    calls: dict[str, Call] = {
        "quantize": lambda: quantize(x, name),
        "quantize(out=)": lambda: quantize(x, name, out=q),
        "dequantize": lambda: dequantize(q),
        "dequantize(out=)": lambda: dequantize(q, out=y),
    }
    for case in _extra_cases(format):
        if not case.largest_only:
            calls[case.operation] = case.prepare(x)[0]
    rows = []
    for operation, call in calls.items():
        call()
        us = gpu.cpu_us([call], 200, gpu.least)
        rows.append(Row("cpu", name, operation, x.dtype.name, x.size, us, cpu_us=us, samples=gpu.least))
    return rows


def cuda_version(number: int) -> str:
    """CUDA's version number as people write it."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str | None:
    """Version of the NVIDIA driver; CuPy knows only which CUDA version the driver takes."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return lines[0] if lines else None
    return None


# ---- peers ---------------------------------------------------------------------------------------------------------


def _bitsandbytes(torch: Any, functional: Any) -> list[Case]:
    def compressed(x: Any) -> tuple[Any, Any, Any, int]:
        a = torch.from_dlpack(x)
        packed, state = functional.quantize_4bit(a, blocksize=64, quant_type="nf4")
        return a, packed, state, x.nbytes + packed.nbytes + state.absmax.nbytes

    def quantize_(x: Any) -> tuple[Call, int]:
        a, _, _, nbytes = compressed(x)
        return lambda: functional.quantize_4bit(a, blocksize=64, quant_type="nf4"), nbytes

    def dequantize_(x: Any) -> tuple[Call, int]:
        a, packed, state, nbytes = compressed(x)
        y = torch.empty_like(a) if a.is_cuda else None  # on a CPU it takes no output
        return lambda: functional.dequantize_4bit(packed, state, out=y), nbytes

    # Its C code ends the process on a CUDA error, so no capture is tried.
    return [Case("quantize_4bit", quantize_, capture=False), Case("dequantize_4bit", dequantize_, capture=False)]


def _torch(torch: Any) -> list[Case]:
    def copy(x: Any) -> tuple[Call, int]:
        a = torch.from_dlpack(x)
        b = torch.empty_like(a)
        return lambda: b.copy_(a), 2 * x.nbytes

    def clone(x: Any) -> tuple[Call, int]:
        a = torch.from_dlpack(x)
        return a.clone, 2 * x.nbytes

    return [Case("copy_", copy, capture=False), Case("clone", clone, capture=False)]


def _gguf(gguf: Any, quants: Any) -> list[Case]:
    q4_0 = gguf.GGMLQuantizationType.Q4_0

    def quantize_(x: Any) -> tuple[Call, int]:
        nbytes = x.nbytes + quants.quantize(x, q4_0).nbytes
        return lambda: quants.quantize(x, q4_0), nbytes

    def dequantize_(x: Any) -> tuple[Call, int]:
        packed = quants.quantize(x, q4_0)
        return lambda: quants.dequantize(packed, q4_0), x.nbytes + packed.nbytes

    return [Case("quantize", quantize_), Case("dequantize", dequantize_)]


#: Label, modules and cases of the libraries that a run is compared with, where they are installed.
GPU_PEERS = (
    ("bitsandbytes NF4", ("torch", "bitsandbytes.functional"), _bitsandbytes),
    ("torch", ("torch",), _torch),
)
HOST_PEERS = (
    ("bitsandbytes NF4", ("torch", "bitsandbytes.functional"), _bitsandbytes),
    ("torch", ("torch",), _torch),
    ("gguf Q4_0", ("gguf", "gguf.quants"), _gguf),
)


def _peer_cases(report: Report, label: str, names: Sequence[str], make: Callable[..., list[Case]]) -> list[Case]:
    """The cases of a peer; none, and a note unless it is just not installed, when it cannot be imported."""
    try:
        with warnings.catch_warnings(), _without_log():
            warnings.simplefilter("ignore")
            cases = make(*(importlib.import_module(name) for name in names))
        for name in names:
            top = name.partition(".")[0]
            report.environment["versions"].setdefault(top, _distribution_version(top))
    except ModuleNotFoundError as error:
        if error.name not in {name.partition(".")[0] for name in names}:
            _note_peer(report, label, error)
        return []
    except Exception as error:
        _note_peer(report, label, error)
        return []
    return cases


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Libraries log what they miss when they are imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _note_peer(report: Report, label: str, error: BaseException) -> None:
    note = f"{label} left out: " + (textwrap.shorten(str(error), 200) or type(error).__name__)
    if note not in report.notes:
        report.notes.append(note)


def _run_gpu_peers(report: Report, gpu: _Gpu, inputs: _Inputs, ordinal: int) -> None:
    for label, names, make in GPU_PEERS:
        cases = _peer_cases(report, label, names, make)
        if not cases:
            continue
        try:
            torch = importlib.import_module("torch")
            stream = torch.cuda.ExternalStream(gpu.stream.ptr, device=f"cuda:{ordinal}")
            with torch.cuda.device(ordinal), torch.cuda.stream(stream):
                for case in cases:
                    _add_gpu_row(report, gpu, case, label, inputs, peer=True)
            torch.cuda.empty_cache()
        except Exception as error:
            _note_peer(report, label, error)


def _run_host_peers(report: Report, x: Any) -> None:
    for label, names, make in HOST_PEERS:
        for case in _peer_cases(report, label, names, make):
            try:
                with _one_thread():
                    report.rows.append(_time_on_core(case, x, label, peer=True))
            except Exception as error:
                _note_peer(report, label, error)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """torch, and what shares its OpenMP as bitsandbytes does, on one core as everything else here."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
