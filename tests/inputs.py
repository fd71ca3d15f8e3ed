"""Arrays that the tests share: every dtype, every kind of number."""

import zlib

import ml_dtypes
import numpy as np

import kbitcupy as kb
from kbitcupy.errors import FormatError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32")]
ABSMAX = ["e4m4", "float16", "float32"]
SIZES = [0, 1, 31, 32, 33, 4097]
#: Names of the formats that quantize.
ENCODED = [name for name in kb.list_formats() if kb.get_format(name).can_encode]


def fitting(format, shape):
    """`shape`, with a last length that a format takes which wants whole blocks there."""
    try:
        (format[0] if isinstance(format, tuple) else format).check_shape(shape)
    except FormatError:
        return (*shape[:-1], -(-shape[-1] // format.block) * format.block) if shape else (format.block,)
    return shape


def bits_for(format, x):
    """The planes of `x` in a format that is only decoded: random bits, by the bytes of `x`, of modest numbers."""
    rng, planes = np.random.default_rng([zlib.crc32(np.ascontiguousarray(x).tobytes()), x.size]), {}
    specs = format.planes(x.shape)
    for name, spec in specs.items():
        dtype = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
        if dtype.kind in "iu":
            planes[name] = rng.integers(0, 256, (*spec.shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        else:
            planes[name] = np.exp2(rng.uniform(-9, -7, spec.shape)).astype(dtype)
    decoded = np.zeros(x.shape, np.float32)
    with np.errstate(all="ignore"):
        format.decode(planes, decoded)
    if x.size:  # a scale may be among the bits: blocks that it makes large are zero
        large = ~(np.abs(decoded.reshape(-1, format.block)) < 100).all(axis=1)
        for name, spec in specs.items():
            planes[name].reshape(-1, spec.per)[large] = 0
    return planes


KINDS = ["normal", "small", "wide", "huge", "extreme", "subnormal", "special", "constant", "zeros"]


def make(kind, size, dtype, seed=0):
    """A flat array of one kind of numbers; what overflows in float16 is infinite there."""
    rng = np.random.default_rng([seed, size])
    x = rng.standard_normal(size).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "small":
            x *= np.float32(1e-6)
        elif kind == "wide":
            x *= np.exp2(rng.integers(-30, 30, size)).astype(np.float32)
        elif kind == "huge":
            x *= np.float32(1e37)
        elif kind == "extreme":
            x *= np.exp2(rng.integers(-126, 127, size).astype(np.float32))
        elif kind == "subnormal":
            x *= np.float32(2e-38)
        elif kind == "special":
            x[rng.random(size) < 0.3] = 0
            for value in (np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38, 2.0**-126):
                x[rng.random(size) < 0.02] = value
            x[: size // 8] = np.nan
        elif kind == "constant":
            x[:] = np.float32(-0.3)
        elif kind == "zeros":
            x[:] = 0
        return x.astype(dtype)


def codebook(kind, k, seed=0):
    """A codebook by kind, as the `codebook` option takes it."""
    rng = np.random.default_rng([seed, k])
    size = 1 << k
    if kind in ("bnf", "nf"):
        return kind
    if kind == "unsorted":
        return rng.permutation(np.linspace(-1, 1, size)).astype(np.float32)
    if kind == "duplicate":
        return np.sort(np.repeat(rng.standard_normal(max(1, size // 2)), 2)[:size]).astype(np.float32)
    if kind == "asymmetric":
        return np.sort(rng.random(size)).astype(np.float32) * np.float32(1.2) - np.float32(0.1)
    if kind == "tiny":
        return (np.sort(rng.standard_normal(size)) * 1e-39).astype(np.float32)
    if kind == "large":
        return (np.sort(rng.standard_normal(size)) * 1e30).astype(np.float32)
    raise ValueError(kind)


CODEBOOKS = ["bnf", "nf", "unsorted", "duplicate", "asymmetric", "tiny", "large"]


def same_values(a, b):
    """Equal numbers, any NaN equal to any NaN, 0 equal to -0."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return a.shape == b.shape and bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())


def repeated(cupy, piece, length):
    """`piece` over and over along axis 0, on the device."""
    x, source = cupy.empty((length, *piece.shape[1:]), piece.dtype), cupy.asarray(piece)
    whole = length // len(piece) * len(piece)
    x[:whole].reshape(-1, *piece.shape)[...] = source
    x[whole:] = source[: length - whole]
    return x


def assert_repeats(found, piece):
    """Every repetition in `found`, which is on a device, has the bytes of `piece`, and the last part of one, too."""
    expected = type(found)(piece.shape, piece.dtype)
    expected.set(piece)
    whole, rows = len(found) // len(piece) * len(piece), max(1, (1 << 28) // piece.size) * len(piece)
    unsigned = f"u{piece.dtype.itemsize}"
    for start in range(0, whole, rows):
        part = found[start : min(start + rows, whole)].view(unsigned)
        assert bool((part.reshape(-1, *piece.shape) == expected.view(unsigned)).all())
    assert bool((found[whole:].view(unsigned) == expected[: len(found) - whole].view(unsigned)).all())
