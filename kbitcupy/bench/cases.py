"""What the benchmark times of a format: on a GPU with all variants that have kernels of their own, on NumPy plainly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import affine, gguf
from ..array import QuantizedArray
from ..backend import xp as _xp
from ..compat.bitsandbytes import create_normal_float_codebook, dequantize_kbit, quantize_kbit
from ..formats.affine import blocks_of
from ..formats.base import Choice, Format, get_format
from ..ops import dequantize, quantize
from .report import Report, Row, size_text
from .timing import Call, Case, Cell, Session, Source, cell_name, time_on_core


def compressed(x: Any, format: Format) -> QuantizedArray:
    """The array in a format; one like it of random bits where the format only decodes."""
    if format.can_encode:
        return quantize(x, format)
    return random_array(format, x.shape, _xp.namespace(x), x.dtype)


# Planes whose bits are codes of elements, and say nothing of their size.
_CODES = frozenset(("packed", "qs", "ql", "qh", "hmask", "signs"))


def random_array(format: Format, shape: tuple[int, ...], xp: Any, dtype: Any = np.float16) -> QuantizedArray:
    """An array of random bits with scales of ordinary size: nothing has to be quantized."""
    rng = np.random.default_rng(0)
    planes = {}
    for name, plane in format.planes(shape).items():
        size, kind = math.prod(plane.shape), _xp.named_dtype(plane.dtype)
        if name in _CODES:
            array = random_words(-(-size * kind.itemsize // 4)).view(kind)[:size]
        elif kind.kind in "iu":  # E4M4 codes of 2^-4 to 1, or codes of the dynamic map
            array = rng.integers(112, 176, size, np.uint8).astype(kind)
        else:
            array = np.ones(size, kind) if size == 1 else rng.random(size, np.float32).astype(kind)
        planes[name] = xp.asarray(array.reshape(plane.shape))
    return QuantizedArray(format, planes, shape, dtype)


@functools.lru_cache(maxsize=1)
def _words() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, np.uint32)


def random_words(count: int) -> np.ndarray:
    """Random words of 32 bits; the same again after 2^22 of them."""
    return np.resize(_words(), count)


def _quantize_case(format: Format | Choice, operation: str = "quantize", **how: bool) -> Case:
    def prepare(x: Any) -> tuple[Call, int]:
        q = quantize(x, format)
        return lambda: quantize(x, format, out=q), x.nbytes + q.nbytes

    return Case(operation, prepare, **how)


def _dequantize_case(format: Format, operation: str = "dequantize", **how: bool) -> Case:
    def prepare(x: Any) -> tuple[Call, int]:
        q = compressed(x, format)
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

    custom = get_format(format.name, codebook="custom")
    # No rotation of an ascending codebook is ascending.
    unsorted = np.roll(create_normal_float_codebook(k), 1)
    cases = [
        Case("quantize_kbit", quantize_flat),
        Case("dequantize_kbit", dequantize_flat),
        _quantize_case((custom, {"codebook": unsorted}), "quantize, unsorted", largest_only=True),
    ]
    if k == 4:

        def quantize_device_codebook(x: Any) -> tuple[Call, int]:
            codebook = _xp.to_device(unsorted, _xp.device_of(x))
            return _quantize_case((custom, {"codebook": codebook})).prepare(x)

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
    format: Format, operation: str, granularity: Any, make: Callable[[Any], Case], given: bool = False
) -> Case:
    """`given`: with an array of scales, which is read, and written again as it belongs to the result."""

    def prepare(x: Any) -> tuple[Call, int]:
        x, brought, more = _matrix(x), {}, 0
        if given:
            scale = _xp.namespace(x).full(blocks_of(x.shape, granularity).shape, _GIVEN, np.float32)
            brought, more = {"scale": scale}, scale.nbytes
        other: Any = get_format(format.name, granularity=granularity)
        call, nbytes = make((other, brought) if brought else other).prepare(x)
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


def _raw_cases(format: Format) -> list[Case]:
    """Raw blocks as files of GGUF have them, to planes and back: the same whatever dtype the numbers had."""
    if format.family != "gguf":
        return []

    def from_blocks(x: Any) -> tuple[Call, int]:
        raw = gguf.to_blocks(compressed(x, format))
        return lambda: gguf.from_blocks(raw, format, x.shape), 2 * raw.nbytes

    def to_blocks(x: Any) -> tuple[Call, int]:
        q = compressed(x, format)
        return lambda: gguf.to_blocks(q), 2 * gguf.to_blocks(q).nbytes

    return [
        Case("raw, from blocks", from_blocks, largest_only=True),
        Case("raw, to blocks", to_blocks, largest_only=True),
    ]


# Formats that have cases beside `quantize` and `dequantize` on a GPU.
_MORE: dict[str, Callable[[Any], list[Case]]] = {
    **{f"kbit{k}": _kbit_cases for k in range(1, 9)},
    **dict.fromkeys(("nf4", "fp4"), _table4_cases),
    **dict.fromkeys(("int8", "int4"), _affine_cases),
}


def gpu_cases(format: Format, dtype: np.dtype) -> list[Case]:
    """What is timed of a format on a GPU."""
    cases = [_dequantize_case(format)]
    if format.can_encode:
        rescaled = (
            [_quantize_case(format, "quantize, s != 1", rescaled=True)] if _has_tensor_scale(format, dtype) else []
        )
        cases = [_quantize_case(format), *rescaled, *cases]
    return [*cases, *more_cases(format), *(_raw_cases(format) if dtype.name == format.dtypes[0] else ())]


def more_cases(format: Format) -> list[Case]:
    """Cases beside `quantize` and `dequantize`."""
    more = _MORE.get(format.name)
    return more(format) if more else []


def _has_tensor_scale(format: Format, dtype: np.dtype) -> bool:
    """Whether the format has a scale of the whole tensor that is 1 for ordinary data and not for rescaled data."""
    spec = format.planes((1024,)).get("scale")
    if spec is None or spec.scope == "block":
        return False
    pool = Source(1024)
    ordinary, rescaled = (quantize(pool.array(1024, dtype, flag), format).planes["scale"] for flag in (False, True))
    return bool((ordinary == 1).all()) and not bool((rescaled == 1).all())


def core_cases(format: Format) -> list[Case]:
    """The plain calls, which allocate their results, as those of gguf-py can only do."""

    def quantize_(x: Any) -> tuple[Call, int]:
        return lambda: quantize(x, format), x.nbytes + quantize(x, format).nbytes

    def dequantize_(x: Any) -> tuple[Call, int]:
        q = compressed(x, format)
        return lambda: dequantize(q), x.nbytes + q.nbytes

    decode = Case("dequantize", dequantize_)
    return [Case("quantize", quantize_), decode] if format.can_encode else [decode]


# ---- cells -----------------------------------------------------------------------------------------------------------

# Elements at which the CPU time of a call is taken: the GPU keeps up, so the queue never fills.
_CPU_SIZE = 1 << 12


def gpu_cells(
    report: Report, session: Session, chosen: Sequence[Format], sizes: Sequence[int], dtypes: Sequence[np.dtype]
) -> Iterator[Cell]:
    """The cells of formats on a GPU: GPU times by dtype, size and format, then the CPU times of the calls."""
    for dtype in dtypes:
        cases = {format: gpu_cases(format, dtype) for format in chosen}
        for n in sizes:
            for format in chosen:
                for case in cases[format]:
                    if n == sizes[-1] or not case.largest_only:
                        yield gpu_cell(report, session, case, str(format), n, dtype)
    for format in chosen:
        time = functools.partial(_time_calls, report, session, format, dtypes[0])
        yield Cell(cell_name("cpu", str(format), dtypes[0].name, size_text(_CPU_SIZE)), ("cpu", str(format)), time)


def gpu_cell(
    report: Report, session: Session, case: Case, name: str, n: int, dtype: np.dtype, peer: bool = False
) -> Cell:
    """The cell of a case on n elements."""

    def time() -> str:
        inputs = functools.partial(session.inputs(n, dtype).get, case.rescaled)
        row = session.gpu.time(case, name, inputs, peer)
        report.rows.append(row)
        return row.line()

    return Cell(cell_name(case.operation, name, dtype.name, size_text(n)), (dtype.name, n, name), time)


def core_cells(
    report: Report, session: Session, chosen: Sequence[Format], sizes: Sequence[int], dtypes: Sequence[np.dtype]
) -> Iterator[Cell]:
    """The cells of formats on NumPy."""
    for dtype in dtypes:
        for n in sizes:
            for format in chosen:
                for case in core_cases(format):
                    yield core_cell(report, session, case, str(format), n, dtype)


def core_cell(
    report: Report, session: Session, case: Case, name: str, n: int, dtype: np.dtype, peer: bool = False
) -> Cell:
    """The cell of a case on n elements on one core."""

    def time() -> str:
        row = time_on_core(case, session.inputs(n, dtype).get(False, 0), name, peer)
        report.rows.append(row)
        return row.line()

    return Cell(cell_name(case.operation, name, dtype.name, size_text(n)), (dtype.name, n), time)


def _time_calls(report: Report, session: Session, format: Format, dtype: np.dtype) -> str:
    """CPU time of the calls as a user writes them, with and without ``out=``."""
    name, gpu = str(format), session.gpu
    x = session.source.array(_CPU_SIZE, dtype)
    q = compressed(x, format)
    y = dequantize(q)
    calls: dict[str, Call] = {}
    if format.can_encode:
        calls = {"quantize": lambda: quantize(x, name), "quantize(out=)": lambda: quantize(x, name, out=q)}
    calls |= {"dequantize": lambda: dequantize(q), "dequantize(out=)": lambda: dequantize(q, out=y)}
    for case in more_cases(format):
        if not case.largest_only:
            calls[case.operation] = case.prepare(x)[0]
    rows = []
    for operation, call in calls.items():
        call()
        us = gpu.cpu_us([call], 200, gpu.least)
        rows.append(Row("cpu", name, operation, x.dtype.name, x.size, us, cpu_us=us, samples=gpu.least))
    report.rows += rows
    return ", ".join(f"{row.operation} {row.us:.1f} us" for row in rows)
