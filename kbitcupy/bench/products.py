"""What the benchmarks of matrix products share: shapes, the report, and a GPU with torch on the same stream."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from .._version import __version__
from ..backend import xp as _xp
from ..errors import DeviceError
from . import _aligned, _distribution_version, _environment, _Gpu, _markdown_table

#: [N, K] of the weights: layers of models with 8 and 70 billion parameters.
SHAPES = ((28672, 8192), (8192, 8192), (14336, 4096), (4096, 14336), (4096, 4096))

# Random words drawn; larger weights repeat them.
_POOL = 1 << 22


@dataclass
class Report:
    """What a run found.

    A subclass says what its products are: dataclasses with ``cells()``, the texts of a line, and ``as_json()``.

    Parameters
    ----------
    device : str
        ``"cuda:N"``.
    environment : dict
        The machine and the versions, as JSON values.
    copy_gb_per_s : float
        Copy bandwidth of the GPU, bytes read and bytes written counted.
    products : list
        The measurements.
    notes : list of str
        What was left out, and why.
    """

    #: Titles of the columns, how many of them stand to the left, and a line about the table.
    titles: ClassVar[tuple[str, ...]]
    left: ClassVar[int]
    about: ClassVar[str]

    device: str
    environment: dict[str, Any]
    copy_gb_per_s: float
    products: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def json(self) -> str:
        """One JSON document."""
        document = {"kbitcupy": __version__, **vars(self), "products": [p.as_json() for p in self.products]}
        return json.dumps(document, indent=1, allow_nan=False)

    def text(self) -> str:
        """An aligned table."""
        return "\n".join([*self._heading(), "", *_aligned(self._cells(), self.left)])

    def markdown(self) -> str:
        """A table for a document."""
        return "\n".join([*_markdown_table(self._cells()), "", *self._heading()])

    def _cells(self) -> list[list[str]]:
        return [list(self.titles), *(product.cells() for product in self.products)]

    def _heading(self) -> list[str]:
        versions = ", ".join(f"{name} {version}" for name, version in self.environment["versions"].items())
        return [f"{self.environment['gpu']}, copy bandwidth {self.copy_gb_per_s:.0f} GB/s; {versions}", self.about]


_AnyReport = TypeVar("_AnyReport", bound=Report)


@contextlib.contextmanager
def started(
    report: type[_AnyReport], what: str, device: str, quick: bool, peers: bool = True
) -> Iterator[tuple[_AnyReport, Any, Any]]:
    """An empty report, what `kbitcupy.bench` times with, and torch on its stream (None without it).

    Raises
    ------
    DeviceError
        When there is no GPU, or `device` is not one.
    """
    device = _xp.resolve_device(device)
    if device == "cpu":
        raise DeviceError(f"{what} are timed on a GPU only; device is {device!r}")
    cupy = _xp.import_cupy()
    ordinal = int(device.partition(":")[2])
    with cupy.cuda.Device(ordinal), cupy.cuda.Stream() as stream:
        gpu = _Gpu(cupy, ordinal, stream, quick)
        gpu.most, gpu.budget = min(gpu.most, 25), min(gpu.budget, 0.05)  # there are hundreds of products
        gpu.captured = 64  # the start of a graph is as long as a call
        environment = _environment(gpu=gpu.name)
        environment["versions"]["CuPy"] = cupy.__version__
        made = report(device, environment, gpu.bandwidth * 1e-9)
        torch = _torch(made) if peers else None
        with _torch_stream(torch, stream, ordinal):
            yield made, gpu, torch
    cupy.get_default_memory_pool().free_all_blocks()


@functools.lru_cache(maxsize=1)
def _pool() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 32, _POOL, np.uint32)


def random_words(count: int) -> np.ndarray:
    """Random words of 32 bits."""
    return np.resize(_pool(), count)


def release(gpu: Any, torch: Any) -> None:
    """Free what a product has allocated."""
    gpu.free()
    if torch is not None:
        torch.cuda.empty_cache()


def _torch(report: Report) -> Any:
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
