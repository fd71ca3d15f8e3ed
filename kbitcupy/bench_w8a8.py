"""``kbit bench --w8a8``: int8 products with everything around them, beside torch's int8 and bfloat16 products alone.

A row is the median GPU time of `kbitcupy.affine.linear_w8a8` on float16 activations, quantization, rescaling and bias
included, with ``out=``. Beside it stand ``torch._int_mm`` on matrices that are int8 already (from 17 tokens on, as it
takes no fewer) and torch's bfloat16 product, and how much of our time reading the weights once would take at the copy
bandwidth of the same run. The timing is that of `kbitcupy.bench`: weights rotate, so that no call finds them in the
cache.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _xp
from ._version import __version__
from .affine import linear_w8a8
from .array import QuantizedArray
from .bench import Call, Case, Row, _aligned, _distribution_version, _environment, _Gpu, _markdown_table
from .errors import DeviceError
from .formats.base import get_format

#: [N, K] of the weights: layers of models with 8 and 70 billion parameters.
SHAPES = ((28672, 8192), (8192, 8192), (14336, 4096), (4096, 14336), (4096, 4096))
TOKENS = (1, 4, 16, 64, 256, 512, 2048, 4096)
QUICK_SHAPES, QUICK_TOKENS = SHAPES[:1], (1, 16, 512, 2048)

# torch refuses fewer rows.
_INT_MM_TOKENS = 17


@dataclass(frozen=True)
class Product:
    """The times of one product in microseconds.

    Parameters
    ----------
    channels, depth, tokens : int
        Its N, K and M.
    us, cpu_us : float
        GPU time and CPU time of `linear_w8a8`.
    read_fraction : float
        Time to read the weights at the copy bandwidth, over `us`.
    int8_us, bfloat16_us : float or None
        torch's products; None where they were not measured.
    """

    channels: int
    depth: int
    tokens: int
    us: float
    cpu_us: float
    read_fraction: float
    int8_us: float | None = None
    bfloat16_us: float | None = None

    @property
    def of_int8(self) -> float | None:
        """torch's time of the int8 product alone, over ours."""
        return None if self.int8_us is None else self.int8_us / self.us

    @property
    def of_bfloat16(self) -> float | None:
        """torch's time of the bfloat16 product, over ours."""
        return None if self.bfloat16_us is None else self.bfloat16_us / self.us

    def cells(self) -> list[str]:
        """As text."""
        numbers = (
            (self.us, ".1f"),
            (self.cpu_us, ".1f"),
            (self.read_fraction, ".2f"),
            (self.int8_us, ".1f"),
            (self.of_int8, ".2f"),
            (self.bfloat16_us, ".1f"),
            (self.of_bfloat16, ".2f"),
        )
        texts = ("" if number is None else format(number, how) for number, how in numbers)
        return [f"{self.channels} x {self.depth}", str(self.tokens), *texts]


_TITLES = ["N x K", "M", "us", "CPU us", "of reading", "int8 us", "int8 / ours", "bf16 us", "bf16 / ours"]


@dataclass
class Report:
    """What a run found.

    Parameters
    ----------
    device : str
        ``"cuda:N"``.
    environment : dict
        The machine and the versions, as JSON values.
    copy_gb_per_s : float
        Copy bandwidth of the GPU, bytes read and bytes written counted.
    products : list of Product
        The measurements.
    notes : list of str
        What was left out, and why.
    """

    device: str
    environment: dict[str, Any]
    copy_gb_per_s: float
    products: list[Product] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def json(self) -> str:
        """One JSON document."""
        rows = [vars(p) | {"of_int8": p.of_int8, "of_bfloat16": p.of_bfloat16} for p in self.products]
        document = {"kbitcupy": __version__, **vars(self), "products": rows}
        return json.dumps(document, indent=1, allow_nan=False)

    def text(self) -> str:
        """An aligned table."""
        return "\n".join([*self._heading(), "", *_aligned([_TITLES, *(p.cells() for p in self.products)], 1)])

    def markdown(self) -> str:
        """A table for a document."""
        return "\n".join([*_markdown_table([_TITLES, *(p.cells() for p in self.products)]), "", *self._heading()])

    def _heading(self) -> list[str]:
        versions = ", ".join(f"{name} {version}" for name, version in self.environment["versions"].items())
        return [
            f"{self.environment['gpu']}, copy bandwidth {self.copy_gb_per_s:.0f} GB/s; {versions}",
            "W8A8 on float16 activations; int8: torch._int_mm alone; bf16: torch's bfloat16 product.",
        ]


def run(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    device: str = "auto",
    quick: bool = False,
) -> Report:
    """Time W8A8 products.

    Parameters
    ----------
    shapes : sequence of (int, int), optional
        [N, K] of the weights; by default `SHAPES`.
    tokens : sequence of int, optional
        M; by default `TOKENS`.
    device : str, default "auto"
        ``"auto"`` or ``"cuda:N"``.
    quick : bool, default False
        One shape, fewer numbers of tokens and repetitions.

    Returns
    -------
    Report

    Raises
    ------
    DeviceError
        When there is no GPU, or `device` is not one.

    Examples
    --------
    >>> from kbitcupy import bench_w8a8
    >>> bench_w8a8.run(device="cpu")
    Traceback (most recent call last):
        ...
    kbitcupy.errors.DeviceError: W8A8 products are timed on a GPU only; device is 'cpu'
    """
    device = _xp.resolve_device(device)
    if device == "cpu":
        raise DeviceError(f"W8A8 products are timed on a GPU only; device is {device!r}")
    cupy = _xp.import_cupy()
    ordinal = int(device.partition(":")[2])
    with cupy.cuda.Device(ordinal), cupy.cuda.Stream() as stream:
        gpu = _Gpu(cupy, ordinal, stream, quick)
        environment = _environment(gpu=gpu.name)
        environment["versions"]["CuPy"] = cupy.__version__
        report = Report(device, environment, gpu.bandwidth * 1e-9)
        torch = _torch(report)
        with _torch_stream(torch, stream, ordinal):
            for channels, depth in shapes or (QUICK_SHAPES if quick else SHAPES):
                for count in tokens or (QUICK_TOKENS if quick else TOKENS):
                    report.products.append(measure(gpu, torch, channels, depth, count))
                    gpu.free()
                    if torch is not None:
                        torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
    return report


def _torch(report: Any) -> Any:
    """torch; None, and a note, where it is not installed or has no GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        report.notes.append("torch's products left out: torch with CUDA is not installed")
        return None
    report.environment["versions"]["torch"] = _distribution_version("torch")
    return torch


@contextlib.contextmanager
def _torch_stream(torch: Any, stream: Any, ordinal: int) -> Iterator[None]:
    """torch works on this stream of CuPy's."""
    if torch is None:
        yield
        return
    with torch.cuda.device(ordinal), torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, device=f"cuda:{ordinal}")):
        yield


def measure(gpu: Any, torch: Any, channels: int, depth: int, tokens: int) -> Product:
    """One product of every kind.

    Parameters
    ----------
    gpu : object
        What `kbitcupy.bench` times with: ``cupy`` and ``time(case, name, inputs)``.
    torch : module or None
        torch, on the stream of `gpu`.
    channels, depth, tokens : int
        N, K and M.

    Returns
    -------
    Product
    """
    xp = gpu.cupy
    rng = np.random.default_rng(0)
    codes = xp.asarray(rng.integers(-127, 128, channels * depth, dtype=np.int8))
    activations = rng.standard_normal((tokens, depth), np.float32)
    x = xp.asarray(activations.astype(np.float16))
    ours = _time(gpu, codes, functools.partial(_w8a8, xp, channels, depth, x), capture=True)
    int8 = bfloat16 = None
    if torch is not None:
        if tokens >= _INT_MM_TOKENS:
            steps = xp.asarray(np.clip(np.rint(activations * 32), -127, 127).astype(np.int8))
            int8 = _time(gpu, codes, functools.partial(_int_mm, torch, channels, depth, steps)).us
        bfloat16 = _time(gpu, codes, functools.partial(_bfloat16, torch, channels, depth, xp.asarray(activations))).us
    read_fraction = 0.0 if ours.fraction is None else ours.fraction
    return Product(channels, depth, tokens, ours.us, ours.cpu_us or 0.0, read_fraction, int8, bfloat16)


def _time(gpu: Any, codes: Any, prepare: Callable[[Any], tuple[Call, int]], capture: bool = False) -> Row:
    """`prepare` gets weights of its own for every call of a pass: the same ones, moved."""

    def moved(number: int) -> Any:
        return codes if number == 0 else gpu.cupy.roll(codes, number)

    row: Row = gpu.time(Case("product", prepare, capture=capture), "w8a8", moved)
    return row


def _w8a8(xp: Any, channels: int, depth: int, x: Any, codes: Any) -> tuple[Call, int]:
    format = get_format("int8", granularity=("channel", 0))
    planes = {"codes": codes, "scale": xp.full(channels, 1e-3, np.float32)}
    q = QuantizedArray(format, planes, (channels, depth), "float32")
    bias, out = xp.ones(channels, np.float16), xp.empty((len(x), channels), np.float16)
    return lambda: linear_w8a8(x, q, bias, out=out), codes.nbytes


def _int_mm(torch: Any, channels: int, depth: int, a: Any, codes: Any) -> tuple[Call, int]:
    left, right = torch.from_dlpack(a), torch.from_dlpack(codes).reshape(channels, depth).t()
    return lambda: torch._int_mm(left, right), codes.nbytes


def _bfloat16(torch: Any, channels: int, depth: int, a: Any, codes: Any) -> tuple[Call, int]:
    left = torch.from_dlpack(a).to(torch.bfloat16)
    right = torch.from_dlpack(codes).reshape(channels, depth).to(torch.bfloat16).t()
    return lambda: left @ right, 2 * codes.nbytes
