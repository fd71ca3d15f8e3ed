"""``kbit bench --linear``: products with compressed weights, beside cuBLAS and other libraries' 4-bit products.

A row is the median GPU time of `kbitcupy.linear` on float16 activations with ``out=``, and how much of that time would
be needed to read the compressed weights once, at the copy bandwidth of the same run. Beside it stand decoding the
weights to float16 and multiplying by cuBLAS, which is the other way that `linear` may take, torch's bfloat16 product
(cuBLAS), bitsandbytes' NF4 product and torch's int4 product (tinygemm, groups of 128), as far as they are installed.
The timing is that of `kbitcupy.bench`: weights rotate, so that no call finds them in the cache.

Below them stand products with a mixture of experts, `kbitcupy.linear_grouped`: M tokens choose 8 of 128 experts each.
There reading counts the weights of the experts that are chosen, and cuBLAS multiplies with one of them after the other.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..formats.base import Format, get_format
from ..products.functions import linear, linear_grouped, multiply_decoded
from . import Call, Case, products as bench_products
from .products import SHAPES, random_words, release, started

#: Numbers of tokens, and formats.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
FORMATS = ("kbit4", "nf4")
#: Formats that are timed at the first shape only, with one token.
EXTRA_FORMATS = ("kbit2", "kbit3", "kbit5")
QUICK_TOKENS = (1, 8, 16, 64)
#: Experts, N, K and experts a token of the mixture, and its numbers of tokens.
EXPERTS = (128, 768, 2048, 8)
EXPERT_TOKENS = (8, 64)


@dataclass(frozen=True)
class Product:
    """The times of one product in microseconds.

    Parameters
    ----------
    format : str
        Of the weight.
    channels, depth, tokens : int
        Its N, K and M.
    us, cpu_us : float
        GPU time and CPU time of `linear`.
    read_fraction : float
        Time to read the compressed weights at the copy bandwidth, over `us`.
    peers : dict of str to float
        Times of the others, by name; what was not measured is missing.
    """

    format: str
    channels: int
    depth: int
    tokens: int
    us: float
    cpu_us: float
    read_fraction: float
    peers: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return dict(vars(self))

    def cells(self) -> list[str]:
        """As text."""
        peers = (f"{self.peers[name]:.1f}" if name in self.peers else "" for name in PEERS)
        ours = (f"{self.us:.1f}", f"{self.cpu_us:.1f}", f"{self.read_fraction:.2f}")
        return [self.format, f"{self.channels} x {self.depth}", str(self.tokens), *ours, *peers]


PEERS = ("decode + cuBLAS", "cuBLAS bf16", "bitsandbytes", "tinygemm")


class Report(bench_products.Report):
    """What a run found."""

    titles = ("format", "N x K", "M", "us", "CPU us", "of reading", *PEERS)
    left = 2
    about = "linear on float16 activations, microseconds of GPU time; the columns behind `of reading` are the others'."


def run(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    device: str = "auto",
    quick: bool = False,
    peers: bool = True,
) -> Report:
    """Time products with compressed weights.

    Parameters
    ----------
    shapes : sequence of (int, int), optional
        [N, K] of the weights; by default `SHAPES`.
    tokens : sequence of int, optional
        M; by default `TOKENS`.
    names : sequence of str, optional
        Formats; by default `FORMATS`, and `EXTRA_FORMATS` at the first shape.
    device : str, default "auto"
        ``"auto"`` or ``"cuda:N"``.
    quick : bool, default False
        One shape, fewer numbers of tokens and repetitions.
    peers : bool, default True
        Time the others too, where they are installed.

    Returns
    -------
    Report

    Raises
    ------
    DeviceError
        When there is no GPU, or `device` is not one.

    Examples
    --------
    >>> from kbitcupy.bench import linear
    >>> linear.run(device="cpu")
    Traceback (most recent call last):
        ...
    kbitcupy.errors.DeviceError: products with compressed weights are timed on a GPU only; device is 'cpu'
    """
    with started(Report, "products with compressed weights", device, quick, peers) as (report, gpu, torch):
        for number, shape in enumerate(shapes or (SHAPES[:1] if quick else SHAPES)):
            counts = tuple(tokens or (QUICK_TOKENS if quick else TOKENS))
            others = _others(gpu, torch, shape, counts, report)
            for name in names or FORMATS:
                report.products += measure(gpu, get_format(name), shape, counts, others)
            if number == 0 and not names:
                for name in EXTRA_FORMATS:
                    report.products += measure(gpu, get_format(name), shape, counts[:1], others)
            release(gpu, torch)
        if not shapes:
            for name in names or FORMATS:
                for count in EXPERT_TOKENS:
                    report.products.append(measure_experts(gpu, torch, get_format(name), count))
            release(gpu, torch)
    return report


def measure(
    gpu: Any, format: Format, shape: tuple[int, int], counts: Sequence[int], others: dict[int, dict[str, float]]
) -> list[Product]:
    """Products of one weight with several numbers of tokens, and the same through decoded weights.

    Parameters
    ----------
    gpu : object
        What `kbitcupy.bench` times with: ``cupy`` and ``time(case, name, inputs)``.
    format : Format
        Of the weight.
    shape : tuple of int
        N and K.
    counts : sequence of int
        M.
    others : dict of int to dict of str to float
        Times of other libraries' products of this shape, by M and name.

    Returns
    -------
    list of Product
    """
    xp = gpu.cupy
    weights = _Rotated(random_weight(format, shape, xp), xp)

    def product(tokens: int) -> Product:
        x = _activations((tokens, shape[1]), xp)
        out = xp.empty((tokens, shape[0]), np.float16)

        def fused(weight: Any) -> tuple[Call, int]:
            return lambda: linear(x, weight.q, out=out), weight.q.nbytes

        def decoded(weight: Any) -> tuple[Call, int]:
            return lambda: multiply_decoded(x, weight.q, out), weight.q.nbytes

        ours = gpu.time(Case("linear", fused), str(format), weights)
        through = gpu.time(Case("decode + cuBLAS", decoded), str(format), weights)
        peers = {PEERS[0]: through.us, **others.get(tokens, {})}
        return Product(str(format), *shape, tokens, ours.us, ours.cpu_us or 0.0, ours.fraction or 0.0, peers)

    return [product(tokens) for tokens in counts]


def measure_experts(gpu: Any, torch: Any, format: Format, tokens: int) -> Product:
    """One product with a mixture of experts.

    Parameters
    ----------
    gpu : object
        As in `measure`.
    torch : module or None
        torch, on the stream of `gpu`.
    format : Format
        Of the weights.
    tokens : int
        M.

    Returns
    -------
    Product
    """
    xp = gpu.cupy
    experts, rows, depth, chosen = EXPERTS
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
    touched = np.unique(ids)
    whole = random_weight(format, (experts * rows, depth), xp).reshape(experts, rows, depth)
    weights = _Rotated(whole, xp)
    x, on_device = _activations((tokens, depth), xp), xp.asarray(ids)
    out = xp.empty((tokens, chosen, rows), np.float16)

    def grouped(weight: Any) -> tuple[Call, int]:
        return lambda: linear_grouped(x, weight.q, on_device, out=out), whole.nbytes * len(touched) // experts

    ours = gpu.time(Case("linear_grouped", grouped), str(format), weights)
    peers = {}
    if torch is not None:
        one_after_the_other = functools.partial(_cublas_experts, torch, ids, touched)
        codes = xp.asarray(random_words(experts * rows * depth // 8).view(np.uint8))
        peers[PEERS[1]] = gpu.time(
            Case(PEERS[1], one_after_the_other), PEERS[1], lambda number: xp.roll(codes, number)
        ).us
    name = f"{format}, {chosen} of {experts}"
    return Product(name, rows, depth, tokens, ours.us, ours.cpu_us or 0.0, ours.fraction or 0.0, peers)


def _activations(shape: tuple[int, ...], xp: Any) -> Any:
    return xp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16))


class _Rotated:
    """Weights like a given one, by number: their planes are turned a little, and kept."""

    def __init__(self, q: QuantizedArray, xp: Any):
        self._q, self._xp = q, xp
        self._made: dict[int, _Moved] = {}

    def __call__(self, number: int) -> _Moved:
        if number not in self._made:
            planes = {n: plane if number == 0 else self._xp.roll(plane, number) for n, plane in self._q.planes.items()}
            self._made[number] = _Moved(QuantizedArray(self._q.format, planes, self._q.shape, np.float16))
        return self._made[number]


@dataclass(frozen=True)
class _Moved:
    """A weight where `kbitcupy.bench` expects an input array."""

    q: QuantizedArray

    @property
    def size(self) -> int:
        return self.q.size

    @property
    def dtype(self) -> np.dtype:
        return self.q.dtype


def random_weight(format: Format, shape: tuple[int, int], xp: Any) -> QuantizedArray:
    """A weight of random bits with scales of ordinary size: nothing has to be quantized."""
    rng = np.random.default_rng(0)
    planes = {}
    for name, plane in format.planes(shape).items():
        size, dtype = math.prod(plane.shape), np.dtype(plane.dtype)
        if name == "packed":
            array = random_words(-(-size * dtype.itemsize // 4)).view(dtype)[:size]
        elif dtype == np.uint8:  # E4M4 codes of 2^-4 to 1, or codes of the dynamic map
            array = rng.integers(112, 176, size, np.uint8)
        else:
            array = np.ones(size, dtype) if size == 1 else rng.random(size, np.float32).astype(dtype)
        planes[name] = xp.asarray(array.reshape(plane.shape))
    return QuantizedArray(format, planes, shape, np.float16)


# ---- other libraries -------------------------------------------------------------------------------------------------


def _others(
    gpu: Any, torch: Any, shape: tuple[int, int], counts: Sequence[int], report: Report
) -> dict[int, dict[str, float]]:
    """The times of torch's and bitsandbytes' products, by M and name; what fails is left out with a note."""
    found: dict[int, dict[str, float]] = {count: {} for count in counts}
    if torch is None:
        return found
    makers: tuple[Callable[..., tuple[Call, int]], ...] = (_cublas, _bitsandbytes, _tinygemm)
    codes = gpu.cupy.asarray(random_words(shape[0] * shape[1] // 8).view(np.uint8))

    def moved(number: int) -> Any:
        return codes if number == 0 else gpu.cupy.roll(codes, number)

    for name, make in zip(PEERS[1:], makers, strict=True):
        for count in counts:
            try:
                case = Case(name, functools.partial(make, torch, shape, count), capture=True)
                found[count][name] = gpu.time(case, name, moved).us
            except Exception as error:  # other libraries raise what they like
                note = f"{name} left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                if note not in report.notes:
                    report.notes.append(note)
                if isinstance(error, ImportError):
                    break
    return found


def _cublas_experts(torch: Any, ids: np.ndarray, touched: np.ndarray, codes: Any) -> tuple[Call, int]:
    """One product for each expert that is chosen, on tokens that are gathered already."""
    _, rows, depth, _ = EXPERTS
    w = (torch.from_dlpack(codes).to(torch.bfloat16).repeat_interleave(2) / 128 - 1).reshape(-1, rows, depth)
    pairs = [
        (torch.randn(int((ids == expert).sum()), depth, dtype=torch.bfloat16, device=w.device), w[int(expert)])
        for expert in touched
    ]

    def call() -> None:
        for x, weight in pairs:
            torch.nn.functional.linear(x, weight)

    return call, 2 * rows * depth * len(touched)


def _cublas(torch: Any, shape: tuple[int, int], tokens: int, codes: Any) -> tuple[Call, int]:
    w = (torch.from_dlpack(codes).to(torch.bfloat16).repeat_interleave(2) / 128 - 1).reshape(shape)
    x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device=w.device)
    return lambda: torch.nn.functional.linear(x, w), 2 * w.numel()


def _bitsandbytes(torch: Any, shape: tuple[int, int], tokens: int, codes: Any) -> tuple[Call, int]:
    library = importlib.import_module("bitsandbytes")
    packed = torch.from_dlpack(codes).reshape(-1, 1)
    w = torch.randn(64, 64, dtype=torch.float16, device=packed.device)
    _, state = library.functional.quantize_4bit(w, quant_type="nf4")
    state.absmax = torch.rand(shape[0] * shape[1] // 64, device=packed.device)
    state.shape = torch.Size(shape)
    x = torch.randn(tokens, shape[1], dtype=torch.float16, device=packed.device)
    return lambda: library.matmul_4bit(x, packed.t(), state), packed.numel()


def _tinygemm(torch: Any, shape: tuple[int, int], tokens: int, codes: Any) -> tuple[Call, int]:
    w = torch._convert_weight_to_int4pack(torch.from_dlpack(codes).reshape(shape[0], shape[1] // 2), 8)
    scales = torch.rand(shape[1] // 128, shape[0], 2, dtype=torch.bfloat16, device=w.device)
    x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device=w.device)
    return lambda: torch._weight_int4pack_mm(x, w, 128, scales), codes.nbytes
