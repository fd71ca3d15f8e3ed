"""Numbers of many kinds for GGUF's quantizers, the same to the bit on every machine: from the bits of a generator whose
stream NumPy promises to keep, by integers and single float32 operations, with no function of a mathematical library.
"""

import numpy as np

LARGEST = np.float32(65504)


class Bits:
    """Random bits by kind and seed."""

    def __init__(self, *key):
        self._generator = np.random.Philox(key=[0x6767756600000000 + sum(map(ord, key[0])), key[1]])

    def words(self, count):
        return self._generator.random_raw(-(-count // 2)).view(np.uint32)[:count]

    def below(self, limit, count):
        """Integers from 0 to limit - 1, int64; limit up to 2^16."""
        return (self.words(count).astype(np.int64) * limit) >> 32

    def normal(self, count):
        """A sum of eight numbers of 16 bits, of variance 1 and 24 bits: float32, of magnitude under 5."""
        parts = self.words(4 * count).view(np.uint16).reshape(8, count).astype(np.int64)
        total = parts.sum(axis=0) * 32 + (self.words(count) & 31)
        return (total - 4 * 65535 * 32).astype(np.float32) * np.float32(5.84e-7)

    def uniform(self, count):
        """Greater than 0, up to 1."""
        return ((self.words(count) >> 8).astype(np.float32) + np.float32(1)) * np.float32(2.0**-24)


def power(exponents):
    """2^e of integers from -149 to 127, float32."""
    e = np.asarray(exponents, np.int64)
    bits = np.where(e >= -126, (e + 127) << 23, np.left_shift(1, np.clip(e + 149, 0, 22)))
    return bits.astype(np.uint32).view(np.float32)


def _normal(bits, n):
    return bits.normal(n)


def _halves(bits, n):
    return bits.normal(n).astype(np.float16).astype(np.float32)


def _heavy(bits, n):
    return bits.normal(n) / bits.uniform(n)


def _shifted(bits, n):
    return bits.normal(n) + np.float32(5)


def _negative(bits, n):
    return -np.abs(bits.normal(n))


def _positive(bits, n):
    return np.abs(bits.normal(n))


def _ties(bits, n):
    """Halves of small integers, some blocks of them times a half."""
    scale = (bits.uniform(n // 32) * np.float32(4)).astype(np.float16).astype(np.float32)
    scale[::2] = 1
    return (bits.below(33, n) - 16).astype(np.float32) / np.float32(2) * np.repeat(scale, 32)


def _constant(bits, n):
    """Runs of 16, 32 or 256 equal numbers."""
    run = 1 + bits.below(3, n // 256)
    each = bits.normal(n)
    position = np.arange(n) // 256
    length = np.array([0, 16, 32, 256])[run][position]
    return each[np.arange(n) // length * length]


def _zeros(bits, n):
    """Zeros of both signs, whole blocks of them, and few other numbers."""
    x = np.where(bits.words(n) & 1, np.float32(0), np.float32(-0.0))
    some = (bits.below(32, n) == 0) & np.repeat(bits.below(2, n // 256) == 0, 256)
    return np.where(some, bits.normal(n), x)


def _signs(bits, n):
    """One magnitude in a block, of either sign, or two."""
    magnitude = np.repeat(bits.uniform(n // 32), 32)
    x = np.where(bits.words(n) & 1, magnitude, -magnitude)
    return np.where(bits.below(8, n) == 0, x * np.float32(0.5), x)


def _sparse(bits, n):
    return np.where(bits.below(33, n) == 0, bits.normal(n), np.float32(0))


def _wide(bits, n):
    """1e-38 to 6e4, each number for itself."""
    return bits.normal(n) * power(bits.below(140, n) - 126)


def _wide_blocks(bits, n):
    """The same, 32 numbers alike."""
    return bits.normal(n) * np.repeat(power(bits.below(140, n // 32) - 126), 32)


def _powers(bits, n):
    """Powers of two and the numbers beside them: within 12 floats."""
    near = power(bits.below(60, n) - 45).view(np.int32) + (bits.below(25, n) - 12).astype(np.int32)
    x = near.view(np.float32)
    return np.where(bits.words(n) & 1, x, -x)


def _levels(bits, n):
    """Whole multiples of a scale that is a half, and numbers in the middle between two."""
    scale = np.repeat(bits.uniform(n // 32).astype(np.float16).astype(np.float32), 32)
    codes = (bits.below(31, n) - 15).astype(np.float32)
    return scale * np.where(bits.below(4, n) == 0, codes + np.float32(0.5), codes)


def _scaled(factor):
    return lambda bits, n: bits.normal(n) * np.float32(factor)


def _subnormal(bits, n):
    magnitude = bits.words(n) >> np.repeat(9 + bits.below(20, n // 32), 32).astype(np.uint32)
    return (magnitude | bits.words(n) << 31).view(np.float32)


def _small_halves(bits, n):
    """Where scales are subnormal halves or vanish."""
    return bits.normal(n) * np.repeat(power(-30 + bits.below(20, n // 32)), 32)


KINDS = {
    "normal": _normal,
    "halves": _halves,
    "heavy": _heavy,
    "shifted": _shifted,
    "negative": _negative,
    "positive": _positive,
    "ties": _ties,
    "constant": _constant,
    "zeros": _zeros,
    "signs": _signs,
    "sparse": _sparse,
    "wide": _wide,
    "wide_blocks": _wide_blocks,
    "powers": _powers,
    "levels": _levels,
    "large": _scaled(15000),
    "small": _scaled(1e-6),
    "smaller": _scaled(1e-12),
    "tiny": _scaled(1e-30),
    "small_halves": _small_halves,
    "subnormal": _subnormal,
}


def numbers(kind, size, seed=0):
    """float32 of one kind, at most 65504 in magnitude; `size` is a multiple of 256."""
    with np.errstate(all="ignore"):
        return np.clip(KINDS[kind](Bits(kind, seed), size), -LARGEST, LARGEST).astype(np.float32)


# ---- importance ------------------------------------------------------------------------------------------------------


def _activations(bits, n):
    """Mean squares of activations as models have them: most alike, a few columns far larger."""
    x = bits.normal(n)
    return x * x * np.where(bits.below(100, n) == 0, np.float32(1000), np.float32(1))


IMPORTANCES = {
    "ones": lambda bits, n: np.ones(n, np.float32),
    "uniform": lambda bits, n: bits.uniform(n),
    "activations": _activations,
    "heavy": lambda bits, n: np.abs(bits.normal(n) / bits.uniform(n)),
    "wide": lambda bits, n: bits.uniform(n) * power(bits.below(40, n) - 20),
    "small": lambda bits, n: bits.uniform(n) * np.float32(1e-9),
    "large": lambda bits, n: bits.uniform(n) * np.float32(1e9),
    "steps": lambda bits, n: np.repeat(bits.uniform(n // 32), 32),
    "ties": lambda bits, n: (1 + bits.below(4, n)).astype(np.float32),
    "zeros": lambda bits, n: np.where(bits.below(3, n) == 0, np.float32(0), bits.uniform(n)),
}


def importance(kind, columns, seed=0):
    """float32[columns] of one kind; `columns` is a multiple of 256."""
    return IMPORTANCES[kind](Bits(kind, 1000 + seed), columns).astype(np.float32)
