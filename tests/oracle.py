"""The contract of the k-bit format, written a second time: one scalar or block at a time, straight from its text."""

import math

import numpy as np

SMALLEST_NORMAL = 2.0**-126


def flushed(x):
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.float32(0), x).astype(np.float32)


def e4m4_value(code):
    """Value of one E4M4 code, in exact arithmetic."""
    e, m = code >> 4, code & 15
    return m * 2.0**-14 if e == 0 else 2.0 ** (e - 11) * (1 + m / 16)


def e4m4_code(x):
    """Code of one float, by the definition: floor of log2, half to even, no carry, saturation."""
    if not x > 0:
        return 0
    if math.isinf(x) or x >= 32:
        return 0xFF
    exponent = math.frexp(x)[1] - 1
    if exponent + 11 <= 0:
        return min(round(x * 2.0**14), 15)  # Python rounds half to even
    return (exponent + 11) << 4 | min(round((x / 2.0**exponent - 1) * 16), 15)


def nearest_index(y, codebook):
    """First i with the smallest |y - codebook[i]| in float32; NaN never wins."""
    distances = flushed(np.abs(np.float32(y) - codebook))
    return int(np.argmin(np.where(np.isnan(distances), np.float32(np.inf), distances)))


def quantize_block(block, codebook, divisor, clamp):
    """Indices of up to 32 float32 numbers for one divisor."""
    out = []
    for x in flushed(np.resize(block, 32) if block.size == 32 else np.append(block, np.zeros(32 - block.size))):
        with np.errstate(all="ignore"):
            y = x * np.float32(0) if divisor == 0 else flushed(np.float32(x) / np.float32(divisor))
            if clamp and not np.isnan(y):
                y = np.float32(min(max(y, codebook.min()), codebook.max()))
            out.append(nearest_index(y, codebook))
    return out


def block_absmax(block):
    finite = flushed(block[~np.isnan(block)])
    return np.float32(np.abs(finite).max()) if finite.size else np.float32(0)


def pack(indices, k):
    """Bit `lane` of word j is bit j of index `lane`."""
    return [sum((index >> j & 1) << lane for lane, index in enumerate(indices)) for j in range(k)]


def quantize_flat(x, k, codebook):
    """(packed words, float32 absmax) of the flat rule, no padding."""
    words, maxima = [], []
    for start in range(0, x.size, 32):
        block = x[start : start + 32].astype(np.float32)
        absmax = block_absmax(block)
        maxima.append(absmax)
        words += pack(quantize_block(block, codebook, max(absmax, np.float32(1e-8)), clamp=False), k)
    return np.array(words, np.uint32), np.array(maxima, np.float32)


def tensor_scale(largest, absmax):
    """By trial of every power of two."""
    low, high, target = {
        "e4m4": (2.0**-4, 31.0, (15.5, 31.0)),
        "float16": (2.0**-4, 65504.0, (2.0**14, 2.0**15)),
    }.get(absmax, (0.0, math.inf, (0.0, math.inf)))
    if largest == 0 or low <= largest <= high:
        return 1.0
    for exponent in range(-126, 125):
        if target[0] < float(largest) / 2.0**exponent <= target[1]:
            return 2.0**exponent
    return 2.0**-126


def quantize_format(x, k, codebook, absmax):
    """Planes of the format: search with the scale that will be decoded."""
    blocks = [x[start : start + 32].astype(np.float32) for start in range(0, x.size, 32)]
    maxima = [block_absmax(block) for block in blocks]
    finite = [float(a) for a in maxima if math.isfinite(a)]
    scale = tensor_scale(max(finite, default=0.0), absmax)
    words, codes = [], []
    for block, a in zip(blocks, maxima, strict=True):
        with np.errstate(over="ignore"):
            ratio = float(a) / scale
            if absmax == "e4m4":
                code = e4m4_code(ratio)
                decoded = e4m4_value(code)
            else:
                code = np.dtype(absmax).type(np.float32(ratio))
                decoded = float(code)
            divisor = flushed(np.float32(decoded * scale))
        codes.append(code)
        words += pack(quantize_block(block, codebook, divisor, clamp=True), k)
    plane = "uint8" if absmax == "e4m4" else absmax
    return np.array(words, np.uint32), np.array(codes, plane), np.float32(scale)
