"""``kbit bench --linear`` and ``--w8a8``: matrix products, beside cuBLAS and other libraries' products.

``--linear``: a row is the median GPU time of `kbitcupy.linear` on float16 activations with ``out=``, and how much of
that time would be needed to read the compressed weights once, at the copy bandwidth of the same run. Beside it stand
decoding the weights to float16 and multiplying by cuBLAS, which is the other way that `linear` may take, torch's
bfloat16 product (cuBLAS), bitsandbytes' NF4 product and torch's int4 product (tinygemm, groups of 128), as far as they
are installed, and beside types of GGUF ggml's own product (`kbitcupy.bench.ggml`). Rows of ternary weights are of
floats, of tokens that are int8 already, and of tokens that are quantized on the way, as BitNet does it, also behind an
RMSNorm; W8A8 and ``kbit2`` stand beside them, at two smaller shapes, too. Below them stand products with a mixture of
experts, `kbitcupy.linear_grouped`: M tokens choose 8 of 128 experts each. There reading counts the weights of the
experts that are chosen, and cuBLAS multiplies with one of them after the other.

``--w8a8``: a row is the median GPU time of `kbitcupy.affine.linear_w8a8` on float16 activations, quantization,
rescaling and bias included. Beside it stand ``torch._int_mm`` on matrices that are int8 already (from 17 tokens on, as
it takes no fewer) and torch's bfloat16 product.

The timing is that of `kbitcupy.bench`: weights rotate, so that no call finds them in the cache.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..affine import linear_w8a8
from ..array import QuantizedArray
from ..backend import xp as _xp
from ..bitnet import linear as bit_linear
from ..errors import DeviceError
from ..formats.base import Format, get_format
from ..ops import quantize
from ..products.functions import linear, linear_grouped, multiply_decoded
from . import ggml
from .cases import random_array, random_words
from .peers import distribution_version
from .report import LinearReport, Product, ProductReport, W8A8Report
from .timing import Call, Case, Cell, Selection, Session, cell_name

#: [N, K] of the weights: layers of models with 8 and 70 billion parameters.
SHAPES = ((28672, 8192), (8192, 8192), (14336, 4096), (4096, 14336), (4096, 4096))
#: Numbers of tokens, and formats.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
FORMATS = ("kbit4", "nf4")
#: Formats that are timed at the first shape only, with one token.
EXTRA_FORMATS = ("kbit2", "kbit3", "kbit5", "q4_0", "q4_k", "q5_k", "q6_k", "q8_0")
#: BitNet's activations behind an RMSNorm, beside those that `linear` knows.
NORMALIZED = "rms_norm+bitnet"
#: Tokens that are int8 already: the product alone.
INT8_TOKENS = "int8 tokens"
#: Products whose activations are quantized, and ternary weights with what is compared with them, by format and
#: ``activations=``, and their numbers of tokens.
QUANTIZED: tuple[tuple[str, str | None], ...] = (
    ("uint4:block=128,zero=int", "int8"),
    ("uint4:granularity=channel:0,zero=int", "int8"),
    ("q4_0", "q8_1"),
    ("q4_k", "q8_1"),
    ("ternary", INT8_TOKENS),
    ("ternary", "bitnet"),
    ("ternary", NORMALIZED),
    ("ternary:granularity=channel:0", "bitnet"),
    ("ternary", None),
    ("ternary:block=64", "bitnet"),
    ("ternary:block=128", "bitnet"),
    ("int8:granularity=channel:0", "int8"),
    ("kbit2", None),
)
QUANTIZED_TOKENS = (1, 8, 16, 64, 512)
#: Those of them that are timed at more shapes, as small products wait for their tokens.
BITNET: tuple[tuple[str, str | None], ...] = (
    ("ternary", INT8_TOKENS),
    ("ternary", "bitnet"),
    ("ternary", NORMALIZED),
    ("int8:granularity=channel:0", "int8"),
    ("kbit2", None),
)
BITNET_SHAPES, BITNET_TOKENS = ((8192, 8192), (4096, 4096)), (1, 8, 64)
QUICK_TOKENS = (1, 8, 16, 64)
#: Experts, N, K and experts a token of the mixture, and its numbers of tokens.
EXPERTS = (128, 768, 2048, 8)
EXPERT_TOKENS = (8, 64)
#: Numbers of tokens of W8A8.
W8A8_TOKENS = (1, 4, 16, 64, 256, 512, 2048, 4096)
W8A8_QUICK_TOKENS = (1, 16, 512, 2048)

# torch refuses fewer rows.
_INT_MM_TOKENS = 17


# ---- linear ----------------------------------------------------------------------------------------------------------


def run_linear(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    device: str = "auto",
    quick: bool = False,
    peers: bool = True,
    selection: Selection | None = None,
) -> LinearReport:
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
    selection : Selection, optional
        Which of the cells are timed, and until when; what is done when one is.

    Returns
    -------
    LinearReport

    Raises
    ------
    DeviceError
        When there is no GPU, or `device` is not one.

    Examples
    --------
    >>> from kbitcupy.bench import products
    >>> products.run_linear(device="cpu")
    Traceback (most recent call last):
        ...
    kbitcupy.errors.DeviceError: products with compressed weights are timed on a GPU only; device is 'cpu'
    """
    session = _session("products with compressed weights", device, quick)
    report = LinearReport(session.device)
    _timed(report, session, selection, linear_cells(report, session, shapes, tokens, names, quick, peers))
    return report


def linear_cells(
    report: ProductReport,
    session: Session,
    shapes: Sequence[tuple[int, int]] | None = None,
    tokens: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    quick: bool = False,
    peers: bool = True,
) -> Iterator[Cell]:
    """The cells of `run_linear`: ``linear/format/NxK/M`` and ``linear_grouped/format/EXPERTSxNxK/M``."""
    counts = tuple(tokens or (QUICK_TOKENS if quick else TOKENS))
    for number, shape in enumerate(shapes or (SHAPES[:1] if quick else SHAPES)):
        others = _Others(report, session, shape) if peers else None
        extra = EXTRA_FORMATS if number == 0 and not names else ()
        wanted: list[tuple[str, str | None, Sequence[int]]] = [(name, None, counts) for name in names or FORMATS]
        wanted += [(name, None, counts[:1]) for name in extra]
        beside = QUANTIZED if number == 0 else BITNET if shape in BITNET_SHAPES else ()
        some = [count for count in counts if count in (BITNET_TOKENS if number else QUANTIZED_TOKENS)]
        wanted += [(*pair, some) for pair in beside if not names or (pair[1] and pair[0] in names)]
        for name, activations, of in wanted:
            format = get_format(name)
            for count in of:
                yield Cell(
                    cell_name("linear", _label(format, activations), "x".join(map(str, shape)), str(count)),
                    ("linear", shape, name),
                    _adding(
                        report, functools.partial(_time_linear, session, format, shape, count, others, activations)
                    ),
                )
    if not shapes:
        for name in names or FORMATS:
            for count in EXPERT_TOKENS:
                yield Cell(
                    cell_name("linear_grouped", name, "x".join(map(str, EXPERTS[:3])), str(count)),
                    ("linear_grouped", name),
                    _adding(report, functools.partial(_time_experts, session, get_format(name), count, peers)),
                )


def _label(format: Format, activations: str | None) -> str:
    return str(format) if activations is None else f"{format}+{activations}"


def _time_linear(
    session: Session,
    format: Format,
    shape: tuple[int, int],
    tokens: int,
    others: _Others | None,
    activations: str | None,
) -> Product:
    xp = session.gpu.cupy
    weights = session.kept((str(format), shape), lambda: Rotated(random_array(format, shape, xp), xp))
    beside = {} if others is None else others.times(tokens)
    if others is not None and activations is None and hasattr(format, "ggml_type"):
        beside = beside | others.ggml(format, tokens)
    return measure_linear(session.gpu, weights, format, shape, tokens, beside, activations)


def _time_experts(session: Session, format: Format, tokens: int, peers: bool) -> Product:
    return measure_experts(session.gpu, session.torch if peers else None, format, tokens)


def product_with(
    xp: Any, shape: tuple[int, ...], tokens: int, activations: str | None = None, dtype: Any = np.float16
) -> Callable[[Any], tuple[Call, int]]:
    """A function of a weight of `Rotated`: the call that is timed, and the bytes that it must read.

    Parameters
    ----------
    xp : module
        ``cupy``.
    shape : tuple of int
        N and K, or experts, N and K: then tokens choose as many experts as `EXPERTS` says.
    tokens : int
        M.
    activations : str, optional
        How tokens are quantized on the way, or `NORMALIZED` or `INT8_TOKENS`.
    dtype : dtype-like, default float16
        Of activations and products.

    Returns
    -------
    callable
    """
    x = _activations((tokens, shape[-1]), xp).astype(dtype)
    if len(shape) == 3:
        ids, touched = _chosen_experts(shape[0], tokens)
        on_device, out = xp.asarray(ids), xp.empty((*ids.shape, shape[1]), dtype)

        def grouped(weight: Any) -> tuple[Call, int]:
            nbytes = weight.q.nbytes * len(touched) // shape[0]
            return lambda: linear_grouped(x, weight.q, on_device, out=out, activations=activations), nbytes

        return grouped
    out = xp.empty((tokens, shape[0]), dtype)
    if activations not in (NORMALIZED, INT8_TOKENS):
        return lambda weight: (lambda: linear(x, weight.q, activations=activations, out=out), weight.q.nbytes)
    norm = xp.ones(shape[1], np.float32) if activations == NORMALIZED else None
    given = quantize(x, "int8", granularity="token") if activations == INT8_TOKENS else x

    def quantized(weight: Any) -> tuple[Call, int]:
        if weight.q.format.ternary:
            return lambda: bit_linear(given, weight.q, norm=norm, out=out), weight.q.nbytes
        return lambda: linear(given, weight.q, out=out), weight.q.nbytes

    return quantized


def _chosen_experts(experts: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[tokens, EXPERTS[3]], and which experts are among them."""
    rng, each = np.random.default_rng(tokens), min(EXPERTS[3], experts)
    ids = np.stack([rng.permutation(experts)[:each] for _ in range(tokens)]).astype(np.int32)
    return ids, np.unique(ids)


def measure_linear(
    gpu: Any,
    weights: Rotated,
    format: Format,
    shape: tuple[int, int],
    tokens: int,
    others: dict[str, float],
    activations: str | None = None,
) -> Product:
    """One product, and the same through decoded weights.

    Parameters
    ----------
    gpu : object
        What times: ``cupy`` and ``time(case, name, inputs)``.
    weights : Rotated
        The weight.
    format : Format
        ... its format,
    shape : tuple of int
        ... N and K.
    tokens : int
        M.
    others : dict of str to float
        Times of other libraries' products, by name.
    activations : str, optional
        How tokens are quantized on the way, or `NORMALIZED` or `INT8_TOKENS`.

    Returns
    -------
    Product
    """
    xp = gpu.cupy
    x, out = _activations((tokens, shape[1]), xp), xp.empty((tokens, shape[0]), np.float16)
    fused = product_with(xp, shape, tokens, activations)

    def decoded(weight: Any) -> tuple[Call, int]:
        return lambda: multiply_decoded(x, weight.q, out), weight.q.nbytes

    ours = gpu.time(Case("linear", fused), str(format), weights)
    through = gpu.time(Case("decode + cuBLAS", decoded), str(format), weights)
    peers = {"decode + cuBLAS": through.us, **others}
    return Product(
        _label(format, activations), *shape, tokens, ours.us, ours.cpu_us or 0.0, ours.fraction or 0.0, peers
    )


def measure_experts(gpu: Any, torch: Any, format: Format, tokens: int) -> Product:
    """One product with a mixture of experts.

    Parameters
    ----------
    gpu : object
        As in `measure_linear`.
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
    weights = Rotated(random_array(format, (experts * rows, depth), xp).reshape(experts, rows, depth), xp)
    grouped = product_with(xp, EXPERTS[:3], tokens)
    ours = gpu.time(Case("linear_grouped", grouped), str(format), weights)
    peers = {}
    if torch is not None:
        one_after_the_other = functools.partial(_cublas_experts, torch, *_chosen_experts(experts, tokens))
        codes = xp.asarray(random_words(experts * rows * depth // 8).view(np.uint8))
        peers["cuBLAS bf16"] = gpu.time(
            Case("cuBLAS bf16", one_after_the_other), "cuBLAS bf16", functools.partial(_moved, xp, codes)
        ).us
    name = f"{format}, {chosen} of {experts}"
    return Product(name, rows, depth, tokens, ours.us, ours.cpu_us or 0.0, ours.fraction or 0.0, peers)


# ---- int8 activations ------------------------------------------------------------------------------------------------


def run_w8a8(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    device: str = "auto",
    quick: bool = False,
    peers: bool = True,
    selection: Selection | None = None,
) -> W8A8Report:
    """Time W8A8 products.

    Parameters
    ----------
    shapes : sequence of (int, int), optional
        [N, K] of the weights; by default `SHAPES`.
    tokens : sequence of int, optional
        M; by default `W8A8_TOKENS`.
    device, quick, peers, selection
        As for `run_linear`.

    Returns
    -------
    W8A8Report

    Raises
    ------
    DeviceError
        When there is no GPU, or `device` is not one.

    Examples
    --------
    >>> from kbitcupy.bench import products
    >>> products.run_w8a8(device="cpu")
    Traceback (most recent call last):
        ...
    kbitcupy.errors.DeviceError: W8A8 products are timed on a GPU only; device is 'cpu'
    """
    session = _session("W8A8 products", device, quick)
    report = W8A8Report(session.device)
    _timed(report, session, selection, w8a8_cells(report, session, shapes, tokens, quick, peers))
    return report


def w8a8_cells(
    report: ProductReport,
    session: Session,
    shapes: Sequence[tuple[int, int]] | None = None,
    tokens: Sequence[int] | None = None,
    quick: bool = False,
    peers: bool = True,
) -> Iterator[Cell]:
    """The cells of `run_w8a8`: ``linear_w8a8/int8/NxK/M``."""
    for shape in shapes or (SHAPES[:1] if quick else SHAPES):
        for count in tokens or (W8A8_QUICK_TOKENS if quick else W8A8_TOKENS):
            yield Cell(
                cell_name("linear_w8a8", "int8", "x".join(map(str, shape)), str(count)),
                ("linear_w8a8", shape),
                _adding(report, functools.partial(_time_w8a8, session, shape, count, peers)),
            )


def _time_w8a8(session: Session, shape: tuple[int, int], tokens: int, peers: bool) -> Product:
    return measure_w8a8(session.gpu, session.torch if peers else None, shape, tokens)


def measure_w8a8(gpu: Any, torch: Any, shape: tuple[int, int], tokens: int) -> Product:
    """One product with int8 activations, and torch's.

    Parameters
    ----------
    gpu : object
        As in `measure_linear`.
    torch : module or None
        torch, on the stream of `gpu`.
    shape : tuple of int
        N and K.
    tokens : int
        M.

    Returns
    -------
    Product
    """
    xp = gpu.cupy
    codes = xp.asarray(np.maximum(random_words(math.prod(shape) // 4).view(np.int8), np.int8(-127)))
    activations = np.random.default_rng(0).standard_normal((tokens, shape[1]), np.float32)

    def time(prepare: Callable[[Any], tuple[Call, int]], capture: bool = False) -> Any:
        case = Case("product", prepare, capture=capture)
        return gpu.time(case, "w8a8", functools.partial(_moved, xp, codes))

    ours = time(functools.partial(_w8a8, xp, *shape, xp.asarray(activations.astype(np.float16))), capture=True)
    peers = {}
    if torch is not None:
        if tokens >= _INT_MM_TOKENS:
            steps = xp.asarray(np.clip(np.rint(activations * 32), -127, 127).astype(np.int8))
            peers["int8"] = time(functools.partial(_int_mm, torch, *shape, steps)).us
        peers["bf16"] = time(functools.partial(_bfloat16, torch, *shape, xp.asarray(activations))).us
    return Product("int8", *shape, tokens, ours.us, ours.cpu_us or 0.0, ours.fraction or 0.0, peers)


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


# ---- what both share -------------------------------------------------------------------------------------------------


def list_cells(names: Sequence[str] | None = None, *, quick: bool = False) -> dict[str, list[str]]:
    """The names of the cells that `run_linear` and `run_w8a8` would time, under ``"linear"`` and ``"w8a8"``.

    Examples
    --------
    >>> from kbitcupy.bench import products
    >>> products.list_cells(quick=True)["linear"][:2]
    ['linear/kbit4/28672x8192/1', 'linear/kbit4/28672x8192/8']
    """
    report, session = LinearReport("cuda:0"), Session("cuda:0", quick)
    cells = linear_cells(report, session, names=names, quick=quick, peers=False)
    return {
        "linear": [cell.name for cell in cells],
        "w8a8": [cell.name for cell in w8a8_cells(report, session, quick=quick)],
    }


def _session(what: str, device: str, quick: bool) -> Session:
    device = _xp.resolve_device(device)
    if device == "cpu":
        raise DeviceError(f"{what} are timed on a GPU only; device is {device!r}")
    return Session(device, quick)


def _timed(report: ProductReport, session: Session, selection: Selection | None, cells: Iterator[Cell]) -> None:
    selection = selection or Selection()
    chosen = selection.chosen(cells)
    with session.opened() as report.environment:
        gpu = session.gpu
        gpu.most, gpu.budget = min(gpu.most, 25), min(gpu.budget, 0.05)  # there are hundreds of products
        gpu.captured = 64  # the start of a graph is as long as a call
        report.copy_gb_per_s = gpu.bandwidth * 1e-9
        selection.time(chosen, report.notes, session.release)
        if session.used_torch:
            report.environment["versions"]["torch"] = distribution_version("torch")


def _adding(report: ProductReport, measure: Callable[[], Product]) -> Callable[[], str]:
    def time() -> str:
        product = measure()
        report.products.append(product)
        peers = "".join(f", {name} {us:.1f} us" for name, us in product.peers.items())
        return f"{product.us:.1f} us, {product.read_fraction:.2f} of reading{peers}"

    return time


def _activations(shape: tuple[int, ...], xp: Any) -> Any:
    return xp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16))


def _moved(xp: Any, codes: Any, number: int) -> Any:
    """Codes of their own for every call of a pass: the same ones, turned."""
    return codes if number == 0 else xp.roll(codes, number)


class Rotated:
    """Weights like a given one, by number: their planes are turned a little, and kept."""

    def __init__(self, q: QuantizedArray, xp: Any):
        self._q, self._xp = q, xp
        self._made: dict[int, _Turned] = {}

    def __call__(self, number: int) -> _Turned:
        if number not in self._made:
            planes = {n: plane if number == 0 else self._xp.roll(plane, number) for n, plane in self._q.planes.items()}
            self._made[number] = _Turned(QuantizedArray(self._q.format, planes, self._q.shape, np.float16))
        return self._made[number]


@dataclass(frozen=True)
class _Turned:
    """A weight where the timing expects an input array."""

    q: QuantizedArray

    @property
    def size(self) -> int:
        return self.q.size

    @property
    def dtype(self) -> np.dtype:
        return self.q.dtype


# ---- other libraries -------------------------------------------------------------------------------------------------


class _Others:
    """Times of torch's and bitsandbytes' products with a weight of one shape; what fails is left out with a note."""

    def __init__(self, report: ProductReport, session: Session, shape: tuple[int, int]):
        self._report, self._session, self._shape = report, session, shape
        self._found: dict[int, dict[str, float]] = {}
        self._ggml: ggml.Backend | None = None

    def times(self, tokens: int) -> dict[str, float]:
        """By name, for a number of tokens; timed once."""
        if tokens not in self._found:
            self._found[tokens] = self._time(tokens)
        return self._found[tokens]

    def _time(self, tokens: int) -> dict[str, float]:
        torch, gpu = self._session.torch, self._session.gpu
        found: dict[str, float] = {}
        if torch is None:
            self._note("torch's products left out: torch with CUDA is not installed")
            return found
        codes = gpu.cupy.asarray(random_words(math.prod(self._shape) // 8).view(np.uint8))
        for name, make in _MAKERS.items():
            try:
                case = Case(name, functools.partial(make, torch, self._shape, tokens), capture=True)
                found[name] = gpu.time(case, name, functools.partial(_moved, gpu.cupy, codes)).us
            except Exception as error:  # other libraries raise what they like
                first = (str(error).splitlines() or [""])[0]
                self._note(f"{name} left out: {type(error).__name__}: {first}")
        return found

    def ggml(self, format: Any, tokens: int) -> dict[str, float]:
        """The time of ggml's product with a weight of a GGUF type, under "ggml"; nothing where it has none."""
        library, gpu = ggml.found(), self._session.gpu
        if library is None:
            self._note(f"ggml left out: no library with its CUDA backend is installed; {ggml.VARIABLE} may name one")
            return {}
        try:
            self._ggml = self._ggml or ggml.Backend(library, gpu.ordinal)
            blocks = format.to_blocks(random_array(format, self._shape, np).planes).reshape(self._shape[0], -1)
            gpu.stream.synchronize()
            us = ggml.timed(self._ggml, format.ggml_type, blocks, tokens, self._shape, gpu.cold)
        except Exception as error:
            self._note(f"ggml left out: {type(error).__name__}: {error}")
            return {}
        return {"ggml": us}

    def _note(self, note: str) -> None:
        if note not in self._report.notes:
            self._report.notes.append(note)


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


_MAKERS: dict[str, Callable[..., tuple[Call, int]]] = {
    "cuBLAS bf16": _cublas,
    "bitsandbytes": _bitsandbytes,
    "tinygemm": _tinygemm,
}
