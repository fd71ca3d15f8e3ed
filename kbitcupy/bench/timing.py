"""Time on a GPU, on its CPU, and on one core; data to time with; what the machine is."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..backend import xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel
from ..errors import FormatError, KbitError
from ..formats.codebook.scales import E4M4_BIAS
from .report import Row

# Random numbers drawn; longer arrays repeat them.
_POOL = 1 << 24
_COPY_BYTES = 1 << 30
_MAX_ROTATED = 512
# Calls of a pass that is not a graph: three times that many launches still fit in the driver's queue.
_MAX_QUEUED = 32


# ---- what is timed ---------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class Cell:
    """One measurement of a run, by the name that ``--cells`` chooses it by.

    Parameters
    ----------
    name : str
        Operation, format, and what it works on: ``"quantize/kbit4/float16/2^28"``, ``"linear/nf4/28672x8192/8"``.
    group : tuple
        Cells of one group share inputs, which are freed when another group begins.
    time : callable
        Measures it, adds it to its report, and returns a line about it.
    """

    name: str
    group: tuple[Any, ...]
    time: Callable[[], str]


def cell_name(operation: str, format: str, *on: str) -> str:
    """The name of a cell, with no spaces and no commas but those of a format's options.

    Examples
    --------
    >>> cell_name("quantize, given channel 0", "int8", "float16", "2^28")
    'quantize:given-channel-0/int8/float16/2^28'
    """
    return "/".join((operation.replace(", ", ":").replace(" ", "-"), format.replace(" ", "-"), *on))


class Selection:
    """Which cells of a run are timed, and until when; one for all parts of a run.

    Parameters
    ----------
    patterns : sequence of str, optional
        Names, with ``*`` and ``?`` as in a shell; every cell by default.
    limit : float, optional
        Seconds after which no cell begins.
    say : callable, optional
        Called with a line about each cell as it is done.
    """

    def __init__(
        self,
        patterns: Sequence[str] | None = None,
        limit: float | None = None,
        say: Callable[[str], Any] | None = None,
    ):
        self.patterns, self._limit, self._say = patterns, limit, say
        self._end = math.inf if limit is None else time.monotonic() + limit

    def chosen(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells whose name is asked for."""
        if self.patterns is None:
            return list(cells)
        return [cell for cell in cells if any(fnmatch.fnmatchcase(cell.name, text) for text in self.patterns)]

    def time(self, cells: Sequence[Cell], notes: list[str], release: Callable[[], Any]) -> None:
        """Time cells one after the other; what is left at the limit, or finds no memory, becomes a note."""
        group: tuple[Any, ...] | None = None
        for number, cell in enumerate(cells):
            if time.monotonic() >= self._end:
                left = len(cells) - number
                notes.append(
                    f"stopped after {self._limit:g} s: {left} of {len(cells)} cells are left, from {cell.name}"
                )
                break
            if group != cell.group:
                release()
                group = cell.group
            try:
                found = cell.time()
            except MemoryError:
                notes.append(f"{cell.name}: not enough GPU memory")
                continue
            except KbitError:
                raise
            except (ValueError, TypeError) as error:  # a third party's format need not know kbitcupy's errors
                raise FormatError(f"{cell.name}: {error}") from error
            if self._say is not None:
                self._say(f"{cell.name}: {found}")
        release()


# ---- data ------------------------------------------------------------------------------------------------------------


class Source:
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


class Inputs:
    """Arrays of one size and dtype, made when they are first needed and shared by all formats."""

    def __init__(self, source: Source, n: int, dtype: np.dtype):
        self._make = functools.partial(source.array, n, dtype)
        self._made: dict[tuple[bool, int], Any] = {}
        self.size, self.dtype = n, dtype

    def get(self, rescaled: bool, number: int) -> Any:
        """The array of a number, far from 1 in magnitude where that is asked for."""
        key = (rescaled, number)
        if key not in self._made:
            self._made[key] = self._make(rescaled, number)
        return self._made[key]


class Session:
    """The device of a run, opened for its time: what to time with, inputs, and torch on the same stream.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    quick : bool
        Fewer repetitions.
    largest : int
        Elements of the largest input.
    """

    def __init__(self, device: str, quick: bool = False, largest: int = _POOL):
        self.device, self.quick = device, quick
        self._largest = largest
        self._key: Any = None
        self._value: Any = None
        self._stack = contextlib.ExitStack()
        self._gpu: Gpu | None = None

    @property
    def gpu(self) -> Gpu:
        """What times on a GPU."""
        assert self._gpu is not None, "the session is not open, or not on a GPU"
        return self._gpu

    @functools.cached_property
    def source(self) -> Source:
        """Random arrays on the device."""
        return Source(self._largest, self.device)

    @functools.cached_property
    def torch(self) -> Any:
        """torch, working on the stream of this session; None where it is not installed or has no GPU."""
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return None
        if self.device == "cpu" or not torch.cuda.is_available():
            return None
        self._stack.enter_context(torch.cuda.device(self.gpu.ordinal))
        stream = torch.cuda.ExternalStream(self.gpu.stream.ptr, device=self.device)
        self._stack.enter_context(torch.cuda.stream(stream))
        return torch

    @contextlib.contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """Work on the device until the end of the block, which gets what is said of the machine."""
        if self.device == "cpu":
            yield environment()
            return
        cupy = _xp.import_cupy()
        ordinal = int(self.device.partition(":")[2])
        with self._stack, cupy.cuda.Device(ordinal), cupy.cuda.Stream() as stream:
            self._gpu = Gpu(cupy, ordinal, stream, self.quick)
            yield self._gpu.environment()
            stream.synchronize()
            self._key = self._value = self._gpu = None
            self.__dict__.pop("source", None)
        cupy.get_default_memory_pool().free_all_blocks()

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, until something else is asked for: cells that follow each other share it."""
        if key != self._key:
            self._key, self._value = None, None  # before there is more
            self._key, self._value = key, make()
        return self._value

    def inputs(self, n: int, dtype: np.dtype) -> Inputs:
        """Arrays of one size and dtype."""
        inputs: Inputs = self.kept((n, dtype.name), lambda: Inputs(self.source, n, dtype))
        return inputs

    @property
    def used_torch(self) -> bool:
        """Whether anything was timed with torch."""
        return self.__dict__.get("torch") is not None

    def release(self) -> None:
        """Give memory that nothing refers to back."""
        if self._gpu is not None:
            self._gpu.free()
            if self.used_torch:
                self.torch.cuda.empty_cache()


# ---- one core --------------------------------------------------------------------------------------------------------


def time_on_core(case: Case, x: Any, name: str, peer: bool = False, runs: int = 3) -> Row:
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


# ---- a GPU -----------------------------------------------------------------------------------------------------------


class Gpu:
    """A GPU, a stream on it, and its copy bandwidth; `device`, `stream` must be the current ones."""

    def __init__(self, cupy: Any, ordinal: int, stream: Any, quick: bool):
        self.cupy, self.stream = cupy, stream
        self.least, self.most, self.budget = (7, 9, 0.03) if quick else (15, 50, 0.1)
        self.captured = 8  # calls of a graph at least, as far as they take 2 ms
        properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        self.ordinal, self.cold = ordinal, 4 * int(properties["l2CacheSize"])
        self.name = properties["name"].decode()
        free, self.memory = cupy.cuda.runtime.memGetInfo()
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._copied = min(_COPY_BYTES, free // 8) // 512 * 512
        source = Source(_POOL, f"cuda:{ordinal}")
        self._from = source.array(self._copied // 4, np.dtype("float32"))
        self._to = cupy.empty_like(self._from)
        self.bandwidth = 1e11  # bytes a second; a guess, until it is measured
        for count in (10, self.most):  # the first ones wake the clocks up
            times = [self._sample(lambda: self._copy(self._copied), 1e-3) for _ in range(count)]
            self.bandwidth = 2 * self._copied / statistics.median(times)

    def environment(self) -> dict[str, Any]:
        """The machine and the versions, as JSON values."""
        runtime, nvrtc = self.cupy.cuda.runtime, ".".join(map(str, self.cupy.cuda.nvrtc.getVersion()))
        about = environment(
            gpu=self.name,
            compute_capability=self.cupy.cuda.Device(self.ordinal).compute_capability,
            memory_bytes=int(self.memory),
            l2_bytes=self.cold // 4,
            driver=driver_version(),
            driver_cuda=cuda_version(runtime.driverGetVersion()),
            cuda_runtime=cuda_version(runtime.runtimeGetVersion()),
            nvrtc=nvrtc,
        )
        about["versions"]["CuPy"] = self.cupy.__version__
        return about

    def launch_us(self) -> float:
        """CPU time of one launch of a kernel of one element."""
        codes, absmax = self.cupy.zeros(1, np.uint8), self.cupy.empty(1, np.float32)
        kernel = Kernel(Template("codes.cu", "decode_absmax_e4m4"), (), 256, signature=("p", "i8", "i4", "p"))
        call = functools.partial(kernel, absmax, 1, (codes, 1, int(E4M4_BIAS), absmax))
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
            each = self._wall(functools.partial(_call_all, calls)) / rotated  # `once` is mostly waiting
            calls *= math.ceil(max(8, min(self.captured, int(2e-3 / each))) / rotated)
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


# ---- the machine -----------------------------------------------------------------------------------------------------


def environment(**about: Any) -> dict[str, Any]:
    """The machine and the versions, as JSON values, and what else is known."""
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
