"""``kbit bench --w8a8``: int8 products with everything around them, beside torch's int8 and bfloat16 products alone.

A row is the median GPU time of `kbitcupy.affine.linear_w8a8` on float16 activations, quantization, rescaling and bias
included, with ``out=``. Beside it stand ``torch._int_mm`` on matrices that are int8 already (from 17 tokens on, as it
takes no fewer) and torch's bfloat16 product, and how much of our time reading the weights once would take at the copy
bandwidth of the same run. The timing is that of `kbitcupy.bench`: weights rotate, so that no call finds them in the
cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..affine import linear_w8a8
from ..array import QuantizedArray
from ..formats.base import get_format
from . import Call, Case, Row, products as bench_products
from .products import SHAPES, random_words, release, started

#: Numbers of tokens.
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

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**vars(self), "of_int8": self.of_int8, "of_bfloat16": self.of_bfloat16}

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


class Report(bench_products.Report):
    """What a run found."""

    titles = ("N x K", "M", "us", "CPU us", "of reading", "int8 us", "int8 / ours", "bf16 us", "bf16 / ours")
    left = 1
    about = "W8A8 on float16 activations; int8: torch._int_mm alone; bf16: torch's bfloat16 product."


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
    >>> from kbitcupy.bench import w8a8
    >>> w8a8.run(device="cpu")
    Traceback (most recent call last):
        ...
    kbitcupy.errors.DeviceError: W8A8 products are timed on a GPU only; device is 'cpu'
    """
    with started(Report, "W8A8 products", device, quick) as (report, gpu, torch):
        for shape in shapes or (QUICK_SHAPES if quick else SHAPES):
            report.products += measure(gpu, torch, shape, tokens or (QUICK_TOKENS if quick else TOKENS))
            release(gpu, torch)
    return report


def measure(gpu: Any, torch: Any, shape: tuple[int, int], counts: Sequence[int]) -> list[Product]:
    """Products of every kind with one weight.

    Parameters
    ----------
    gpu : object
        What `kbitcupy.bench` times with: ``cupy`` and ``time(case, name, inputs)``.
    torch : module or None
        torch, on the stream of `gpu`.
    shape : tuple of int
        N and K.
    counts : sequence of int
        M.

    Returns
    -------
    list of Product
    """
    xp = gpu.cupy
    rng = np.random.default_rng(0)
    codes = xp.asarray(np.maximum(random_words(math.prod(shape) // 4).view(np.int8), np.int8(-127)))

    def product(tokens: int) -> Product:
        activations = rng.standard_normal((tokens, shape[1]), np.float32)
        x = xp.asarray(activations.astype(np.float16))
        ours = _time(gpu, codes, functools.partial(_w8a8, xp, *shape, x), capture=True)
        int8 = bfloat16 = None
        if torch is not None:
            if tokens >= _INT_MM_TOKENS:
                steps = xp.asarray(np.clip(np.rint(activations * 32), -127, 127).astype(np.int8))
                int8 = _time(gpu, codes, functools.partial(_int_mm, torch, *shape, steps)).us
            bfloat16 = _time(gpu, codes, functools.partial(_bfloat16, torch, *shape, xp.asarray(activations))).us
        return Product(*shape, tokens, ours.us, ours.cpu_us or 0.0, ours.fraction or 0.0, int8, bfloat16)

    return [product(tokens) for tokens in counts]


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
