"""Constants: the standard codebooks, frozen, and what is derived from a codebook.

``nf`` (``create_normal_float_codebook`` of bitsandbytes' pull request 1858): value i is the standard normal quantile of
(2i + 1) / 2^(k+1), rounded to float32 and then divided by the largest of them. ``bnf``: the Lloyd-Max quantizer of
normal blocks of 32 divided by their absmax, error weighted by absmax^2; K = 2..5 as bitsandbytes' pull request 1858
rounds them to four decimals, the others iterated until no level moves by 1e-9. Both are symmetric, so the positive
halves are written down, as big-endian float32 bits.

``NF4``, ``FP4`` and the dynamic map are those of bitsandbytes' CUDA kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

_NF_HALVES = {
    1: "3f800000",
    2: "3e8dd21a 3f800000",
    3: "3dd20129 3ea32005 3f1409f5 3f800000",
    4: "3d2c6c36 3e0265ad 3e5d2107 3e9f2ee8 3ed56949 3f0ace38 3f35233b 3f800000",
    5: (
        "3c950060 3d5ff631 3dbb691d 3e04052d 3e2b36ba 3e539bdb 3e7d9849 3e94d4a9 3eac39a3 3ec56bf3 "
        "3ee10f82 3f001198 3f122cf2 3f288359 3f4731dc 3f800000"
    ),
    6: (
        "3c04b96f 3cc7303e 3d26292a 3d68fc27 3d96163b 3db7eb44 3dda0c16 3dfc887c 3e0fb8b1 3e216c8a "
        "3e3369c6 3e45bb69 3e586dbc 3e6b8e8f 3e7f2d9d 3e89ae7a 3e9418d0 3e9ee22e 3eaa1958 3eb5d02c "
        "3ec21ca7 3ecf1a5a 3edcec92 3eebc1b0 3efbd889 3f06c4be 3f10ab83 3f1c0741 3f2988ae 3f3a8bf4 "
        "3f5273dd 3f800000"
    ),
    7: (
        "3b713cb5 3c34f374 3c96d4c2 3cd33ea3 3d07dead 3d262b7c 3d4488cc 3d62f9ba 3d80c0b8 3d901193 "
        "3d9f7115 3daee0ef 3dbe62dd 3dcdf8ac 3ddda435 3ded6764 3dfd4435 3e069e5e 3e0ea993 3e16c4da "
        "3e1ef164 3e273071 3e2f8352 3e37eb6a 3e406a34 3e490140 3e51b23b 3e5a7eeb 3e636938 3e6c7330 "
        "3e759f05 3e7eef19 3e843301 3e890344 3e8de9de 3e92e87b 3e9800ef 3e9d353f 3ea287a8 3ea7faa4 "
        "3ead90fa 3eb34dc5 3eb93486 3ebf4939 3ec59066 3ecc0f43 3ed2cbdc 3ed9cd3b 3ee11bac 3ee8c10f "
        "3ef0c949 3ef942da 3f011fdc 3f05eb44 3f0b1235 3f10a7e6 3f16c675 3f1d92bc 3f25434c 3f2e2e42 "
        "3f38e842 3f469712 3f5a18f5 3f800000"
    ),
    8: (
        "3ade6090 3ba6c9ca 3c0affc3 3c429e0c 3c7a411d 3c98f52b 3cb4cd8a 3cd0aa60 3cec8c5b 3d043a18 "
        "3d123148 3d202c18 3d2e2ae4 3d3c2e07 3d4a35dc 3d5842c3 3d66551a 3d746d3d 3d8145c7 3d885838 "
        "3d8f6e21 3d9687b5 3d9da527 3da4c6a9 3dabec70 3db316b1 3dba45a1 3dc17977 3dc8b26a 3dcff0b4 "
        "3dd7348d 3dde7e31 3de5cddb 3ded23c9 3df48039 3dfbe36a 3e01a6d0 3e055f8d 3e091c10 3e0cdc7b "
        "3e10a0f2 3e14699a 3e183699 3e1c0816 3e1fde38 3e23b929 3e279913 3e2b7e21 3e2f6880 3e33585e "
        "3e374dec 3e3b4959 3e3f4ada 3e4352a1 3e4760e7 3e4b75e2 3e4f91cd 3e53b4e5 3e57df68 3e5c1197 "
        "3e604bb5 3e648e08 3e68d8db 3e6d2c78 3e718930 3e75ef52 3e7a5f37 3e7ed939 3e81aedb 3e83f687 "
        "3e8643d5 3e8896fb 3e8af032 3e8d4fb4 3e8fb5c2 3e92229b 3e949687 3e9711cc 3e9994bb 3e9c1fa2 "
        "3e9eb2da 3ea14ebe 3ea3f3af 3ea6a213 3ea95a59 3eac1cf6 3eaeea67 3eb1c331 3eb4a7e3 3eb79918 "
        "3eba9773 3ebda3a5 3ec0be71 3ec3e8a2 3ec7231c 3eca6ecf 3ecdccc8 3ed13e28 3ed4c42e 3ed86035 "
        "3edc13bf 3edfe075 3ee3c830 3ee7ccfe 3eebf12c 3ef03752 3ef4a25f 3ef935a3 3efdf4ee 3f017251 "
        "3f0404ea 3f06b53a 3f0986c2 3f0c7dae 3f0f9f09 3f12f0f9 3f167b1d 3f1a4717 3f1e614f 3f22da28 "
        "3f27c7ef 3f2d4a2b 3f338f9d 3f3ae233 3f43c1cb 3f4f2bc2 3f5f9b6e 3f800000"
    ),
}

_BNF_HALVES = {
    1: "3ea9e2f7",
    2: "3e491d15 3f2a0903",
    3: "3dd07c85 3ea0d1b7 3f0eecc0 3f61f8a1",
    4: "3d4c63f1 3e1a8588 3e829c78 3ebafb7f 3ef81d7e 3f1e2eb2 3f461e4f 3f77f62b",
    5: (
        "3cc3c9ef 3d930be1 3df5f6fd 3e2d42c4 3e60902e 3e8a9931 3ea5d639 3ec21965 3edfb15b 3efed289 "
        "3f100000 3f21d14e 3f353261 3f4a92a3 3f628f5c 3f7df3b6"
    ),
    6: (
        "3c3fe3e1 3d0ffac3 3d702c3e 3da856cb 3dd8cfc6 3e04c8ed 3e1d572f 3e361bab 3e4f1fd0 3e686d8f "
        "3e8107b9 3e8e085f 3e9b3ec5 3ea8b178 3eb66797 3ec468f3 3ed2be2a 3ee170cd 3ef08b91 3f000d41 "
        "3f0815a8 3f1066cf 3f1909bc 3f2208f0 3f2b70c0 3f354fd7 3f3fb7d4 3f4abe2f 3f567d76 3f631712 "
        "3f70b5e8 3f7f925b"
    ),
    7: (
        "3bbe7ef0 3c8ee314 3cee320a 3d26ca37 3d568906 3d832cb1 3d9b1fa0 3db31f52 3dcb2dca 3de34d17 "
        "3dfb7f4e 3e09e345 3e16127c 3e224e63 3e2e981a 3e3af0c8 3e47599b 3e53d3c8 3e60608e 3e6d0137 "
        "3e79b714 3e8341c2 3e89b3f9 3e9032ec 3e96bf5d 3e9d5a18 3ea403f0 3eaabdc3 3eb18878 3eb86501 "
        "3ebf545b 3ec65791 3ecd6fbb 3ed49e00 3edbe399 3ee341cf 3eeab9ff 3ef24d9d 3ef9fe32 3f00e6b1 "
        "3f04de77 3f08e75a 3f0d025b 3f11308c 3f157318 3f19cb3c 3f1e3a54 3f22c1d6 3f276358 3f2c2096 "
        "3f30fb75 3f35f607 3f3b1294 3f4053a0 3f45bbf3 3f4b4ea5 3f510f2b 3f570161 3f5d29a4 3f638ce0 "
        "3f6a30b2 3f711b86 3f7854c1 3f7fe4fb"
    ),
    8: (
        "3b3dc702 3c0e5621 3c6d3d6c 3ca614c0 3cd58e21 3d0285ea 3d1a4767 3d320c04 3d49d442 3d61a092 "
        "3d797177 3d88a3b8 3d94917c 3da08248 3dac7659 3db86df3 3dc46953 3dd068bd 3ddc6c6f 3de874ae "
        "3df481b8 3e0049ea 3e0655a2 3e0c6426 3e127599 3e188a1d 3e1ea1d5 3e24bce5 3e2adb71 3e30fd9d "
        "3e37238d 3e3d4d68 3e437b52 3e49ad73 3e4fe3f0 3e561ef0 3e5c5e9d 3e62a31e 3e68ec9e 3e6f3b46 "
        "3e758f3e 3e7be8b4 3e8123ea 3e845664 3e878bdf 3e8ac474 3e8e0039 3e913f47 3e9481b5 3e97c79e "
        "3e9b111a 3e9e5e44 3ea1af36 3ea5040b 3ea85ce0 3eabb9d0 3eaf1af9 3eb28079 3eb5ea6d 3eb958f6 "
        "3ebccc32 3ec04444 3ec3c14b 3ec7436c 3ecacac8 3ece5785 3ed1e9c7 3ed581b6 3ed91f77 3edcc334 "
        "3ee06d17 3ee41d4a 3ee7d3f8 3eeb9150 3eef5581 3ef320ba 3ef6f32e 3efacd10 3efeae95 3f014bfa "
        "3f0344b2 3f054191 3f0742b5 3f09483c 3f0b5248 3f0d60fb 3f0f7476 3f118cdf 3f13aa5b 3f15cd10 "
        "3f17f528 3f1a22cd 3f1c5629 3f1e8f6c 3f20cec4 3f231463 3f25607c 3f27b346 3f2a0cf8 3f2c6dce "
        "3f2ed606 3f3145de 3f33bd9c 3f363d86 3f38c5e5 3f3b5708 3f3df141 3f4094e6 3f434252 3f45f9e4 "
        "3f48bc01 3f4b8914 3f4e618e 3f5145e5 3f543698 3f57342d 3f5a3f33 3f5d5840 3f607ff7 3f63b703 "
        "3f66fe1b 3f6a5606 3f6dbf93 3f713ba7 3f74cb33 3f786f3d 3f7c28e0 3f7ff94c"
    ),
}

#: bitsandbytes' NF4: 16 ascending float32 values by code.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)

#: Where x / absmax goes up to the next value of NF4, in bitsandbytes' compiled kernels: the float32 midpoints, but four
#: are off by the last bit (-0.8480964, 0.12025525, 0.50166345 and 0.86147845 were the midpoints).
NF4_THRESHOLDS = np.array(
    [
        *(-0.84809643, -0.6106329, -0.45999527, -0.33967942, -0.2346074, -0.13791174, -0.045525018, 0.03979015),
        *(0.120255254, 0.20352125, 0.29201376, 0.38931254, 0.5016634, 0.6427869, 0.8614784),
    ],
    np.float32,
)

_FP4_MAGNITUDES = (0.0, 5.2083333e-3, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
#: bitsandbytes' FP4, as its kernels decode it: bit 3 of a code is the sign, that of zero too.
FP4 = np.array([*_FP4_MAGNITUDES, *(-m for m in _FP4_MAGNITUDES)], np.float32)
#: Where |x| / absmax goes up to the next magnitude of FP4, as bitsandbytes' kernel writes these numbers.
FP4_THRESHOLDS = np.array([0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333], np.float32)

for _table in (NF4, NF4_THRESHOLDS, FP4, FP4_THRESHOLDS):
    _table.setflags(write=False)

#: Names of the standard codebooks.
STANDARD = ("bnf", "nf")

#: float32 magnitudes below this are flushed to zero, as the GPU does.
SMALLEST_NORMAL = np.float32(2.0**-126)

# A codebook is searched by thresholds when distinct neighbours are at least this far apart, relative to
# max(1, |value|): then the rounding of |y - value| (2^-24 relative) cannot make a far value tie with a near one, and
# the nearest value is always one of the two around y.
_REGULAR_GAP = np.float32(2.0**-18)
# Thresholds this close to zero could meet quotients that lose bits to the flushing of subnormals.
_REGULAR_THRESHOLD = np.float32(2.0**-40)


def flush(x: Any) -> Any:
    """Set float32 magnitudes below 2^-126 to zero, in place, as ``-ftz=true`` does on the GPU."""
    x[abs(x) < SMALLEST_NORMAL] = 0
    return x


#: A product of float32 numbers that is smaller is zero under ``-ftz=true``. The GPU rounds to 24 bits before it looks
#: whether the result is subnormal, so this is half a step of those below 2^-126.
LEAST_PRODUCT = float(SMALLEST_NORMAL) * (1 - 2.0**-25)


def flushed_product(a: np.ndarray, b: np.ndarray | np.floating) -> np.ndarray:
    """``a * b`` in float32 as the GPU rounds it under ``-ftz=true``; NumPy, whose subnormal numbers have fewer bits,
    rounds some of them up to 2^-126.
    """
    exact = flush(np.array(a, np.float32)).astype(np.float64) * flush(np.array(b, np.float32))
    product = exact.astype(np.float32)
    product[np.abs(exact) < LEAST_PRODUCT] = 0
    return product


class Codebook:
    """The 2^k values that an index stands for, with what the search needs to know about them.

    Parameters
    ----------
    values : numpy.ndarray
        float32, finite, 2^k of them, in any order.

    Attributes
    ----------
    values : numpy.ndarray
        float32[2^k], read-only, subnormals flushed to zero.
    lowest, highest : numpy.float32
        The extreme values.
    thresholds : numpy.ndarray or None
        float32[levels - 1], ascending. The nearest value of y is level number (count of y > threshold), levels being
        the distinct values in ascending order; a tie goes to the value that stands first in the codebook. None where
        values are so close that only the full search is right.
    index : numpy.ndarray
        uint8[levels], the first index of each level.
    ordered : bool
        Whether level and index are the same number: strictly ascending values.
    """

    def __init__(self, values: np.ndarray):
        self.values = flush(np.array(values, np.float32))
        self.values.setflags(write=False)
        self.lowest, self.highest = self.values.min(), self.values.max()
        levels, first = np.unique(self.values, return_index=True)
        self.index = first.astype(np.uint8)
        self.ordered = bool(np.array_equal(first, np.arange(self.values.size)))
        self.thresholds = _thresholds(levels, self.index)

    @property
    def edge(self) -> float:
        """Largest distance of a point of [-1, 1] to its nearest value, for the error bound."""
        ordered = np.sort(self.values.astype(np.float64))
        return float(max(np.diff(ordered).max() / 2, 1 - ordered[-1], ordered[0] + 1))


def reach(values: np.ndarray) -> float:
    """What an error of the scale grows by when it is multiplied with one of these values, 1 at least."""
    return max(1.0, float(np.abs(values).max()))


def _thresholds(levels: np.ndarray, index: np.ndarray) -> np.ndarray | None:
    """For each pair of neighbours the largest float32 that belongs to the lower one, by bisection."""
    low, high = levels[:-1], levels[1:]
    reach = max(np.float32(1), np.abs(levels).max())
    with np.errstate(over="ignore"):
        gaps = high - low
    if not (gaps >= _REGULAR_GAP * reach).all() or not np.isfinite(gaps).all():
        return None
    tie_is_low = index[:-1] < index[1:]
    # Invariant: `below` belongs to the lower level, `above` to the upper one. Floats are halved by ordered integers.
    below, above = _ordered(low), _ordered(high)
    while (above - below > 1).any():
        middle = (below + above) // 2
        x = _unordered(middle)
        to_low, to_high = x - low, high - x
        is_low = (to_low < to_high) | ((to_low == to_high) & tie_is_low)
        below, above = np.where(is_low, middle, below), np.where(is_low, above, middle)
    thresholds = _unordered(below)
    if (np.abs(thresholds) < _REGULAR_THRESHOLD).any():
        return None
    thresholds.setflags(write=False)
    return thresholds


def direct_thresholds(thresholds: np.ndarray, mantissa_bits: int) -> np.ndarray | None:
    """Thresholds for the exact product ``x * r`` instead of the rounded quotient ``x / d``, r = fl(1 / d).

    For x and d of `mantissa_bits` significant bits (and d = fl(1e-8), the smallest divisor of the flat rule) the
    decisions ``fl(x / d) > threshold`` and ``x * r > direct threshold`` are the same for every pair: each direct
    threshold lies between the largest product that must stay below and the smallest that must not. Powers of two
    cancel, so one binade of d stands for all.

    Parameters
    ----------
    thresholds : numpy.ndarray
        float32 thresholds for the quotient, none of them 0.
    mantissa_bits : int
        11 for float16, 8 for bfloat16.

    Returns
    -------
    numpy.ndarray or None
        float32, or None where a threshold has no such number.
    """
    one = 1 << (mantissa_bits - 1)
    d = np.append(np.arange(one, 2 * one) / one, np.float64(np.float32(1e-8)) * 2.0**27).astype(np.float32)
    r = (1 / d.astype(np.float64)).astype(np.float32).astype(np.float64)
    threshold = thresholds.astype(np.float64)[:, None]
    target = threshold * d
    step = np.exp2(np.floor(np.log2(np.abs(target))) - mantissa_bits)  # half a unit in the last place of x
    highest_below = np.full(thresholds.shape, -np.inf)
    lowest_above = np.full(thresholds.shape, np.inf)
    for i in range(-4, 6):
        x = (np.floor(target / step) + i) * step
        fraction, _ = np.frexp(x)
        representable = fraction * 2.0**mantissa_bits == np.rint(fraction * 2.0**mantissa_bits)
        above = x.astype(np.float32) / d > thresholds[:, None]
        product = x * r  # exact: at most 35 bits
        highest_below = np.maximum(highest_below, np.where(representable & ~above, product, -np.inf).max(1))
        lowest_above = np.minimum(lowest_above, np.where(representable & above, product, np.inf).min(1))
    direct = highest_below.astype(np.float32)
    direct = np.where(direct < highest_below, np.nextafter(direct, np.float32(np.inf)), direct)
    return direct if (direct < lowest_above).all() else None


def _ordered(x: np.ndarray) -> np.ndarray:
    """float32 to integers of the same order (-0.0 and 0.0 become the same one)."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _unordered(i: np.ndarray) -> np.ndarray:
    """The inverse of `_ordered`."""
    bits = np.where(i < 0, -i | 0x80000000, i)
    return bits.astype(np.uint32).view(np.float32)


@functools.cache
def standard_codebook(name: str, k: int) -> Codebook:
    """The frozen codebook ``"nf"`` or ``"bnf"`` of 2^k values."""
    halves = {"nf": _NF_HALVES, "bnf": _BNF_HALVES}[name]
    half = np.frombuffer(bytes.fromhex(halves[k]), ">f4").astype(np.float32)
    return Codebook(np.concatenate((-half[::-1], half)))


def midpoints(levels: np.ndarray) -> np.ndarray:
    """The float32 means of ascending neighbours, each step rounded."""
    with np.errstate(over="ignore"):
        return (levels[:-1] + levels[1:]) * np.float32(0.5)


@functools.cache
def dynamic_map() -> np.ndarray:
    """bitsandbytes' signed dynamic map of 8 bits: seven decades, the highest in 64 steps each way, 0 and 1.

    Returns
    -------
    numpy.ndarray
        float32[256], ascending, read-only, to the bit what ``create_dynamic_map`` makes with PyTorch.
    """
    tenth = np.float64(np.float32(0.1))
    values = [np.float32(0), np.float32(1)]
    for decade in range(7):
        steps = 1 << decade
        step = np.float64(np.float32(np.float32(1 - np.float32(0.1)) / steps))
        # torch.linspace counts from the nearer end, with a fused multiply-add: exact in float64, then rounded.
        ends = [
            np.float32(step * j + tenth if j < (steps + 1) // 2 else 1 - step * (steps - j)) for j in range(steps + 1)
        ]
        for low, high in zip(ends[:-1], ends[1:], strict=True):
            mean = (low + high) / np.float32(2) * np.float32(10.0 ** (decade - 6))
            values += [mean, -mean]
    made = np.sort(np.array(values, np.float32))
    made.setflags(write=False)
    return made


# The grids of GGUF's types iq1_s to iq3_s, by tests/make_iq_grids.py: entries of each in the order in which they are
# stored, values of a coordinate, coordinates. llama.cpp's, MIT.
_IQ_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "iq2_xxs": ((8, 25, 43), 8),
    "iq2_xs": ((8, 25, 43), 8),
    "iq2_s": ((8, 25, 43), 8),
    "iq3_xxs": ((4, 12, 20, 28, 36, 44, 52, 62), 4),
    "iq3_s": ((1, 3, 5, 7, 9, 11, 13, 15), 4),
    "iq1": ((-1, 0, 1), 8),
}
_IQ_GRIDS = (
    "c-nPWO^h5z6@FDzp_+EEs+VrX;#AvShfX`PjBkWXwKXFd`_dCli@Q%Ipa^m1r`_y^ac_`f3j~5oyRnmTJ92^#$c!aN$|*z~K-"
    "_Y$z=sI04@kLyj6`@<)jd74IIWr4nR<WUd-c6nwRsria-62Xf-"
    "y({U>X9@V7>ulQl~zUfawg^QOxn30T3`MDXs^BRdg?FC82u)CMBvd9~i+e+F0R3oT6kJT{<h-"
    "y=@5haAHIThu<$*bKSW%KM8l9oKe>6flg7Xdu`U)bTadD2pDWW4qk@UkP=e{>CDGquy^>iv})1-U1dsONEsv<oJ-Od#lGd(Vr0acunpS*qb6$}*-"
    "D2=HelB4V*8|4jdUVCs9BKykY(`9+}CnA{FrKXTfy|oaOJ?#Mh{8ah_>crBdzraLwZE^Wmv}zeGT<9tu`L{IkFX!!_|Do_h&xr^VRY^pXQS^oRC?"
    "bXOmPSTW3@36$XSrW<;T35Q>n<jM*Ye?%0=eKX47vaa<aNj5xx~@+n&B-"
    "XV%I$o#&X#^J=)Os9Qbc2C?_&Y|lme*?VkP&<dfGHIfAT}PbaIJL~{o5l%AUptu+8%6d$Z66R@{IN^f=GCPPV@xk4y+bUN?I(gFx8d3pO3R^X2<f"
    "7xHvYhyuDmv727Hs(plx}jDNpJa<k~=CSPiW^en`DR65Z8M8d%vTqa107UgLsmYk8P=KsE}^`f;Q~PC{n<W+CZ%7i<=$%4smOO{3TNsfT7qZBuMB"
    "Sr0Q-GUlp5T)WFndZUxE83uA4WN^4c*ydyz<}Y%Kt&JsHOC9u47;H|L&0?D1lWq$-)O`3vxUOmPko&pecpmUDK#pfQ1K-"
    "C#6I2LilWCUc0lp0VQ8W!KTf^K~Ax$*T*%(D;#{<dTsew&1MbF_hz<x9#@&K|RO&JGE$-"
    "$u!S%(34l*E3VG9$u_ok+S_+cAAM4W}t*#D`giZRxBeOijOX7-"
    "JS24*mY<vc^8bkhVJEs%>nC;)iJ(lXDo1O*MFjFb$bW+2G1^Hw?guvb0Bt4rJg&Y?u=oGTCnpIt;B9{9np}odiK=wQ>j@c$+ec?BpFBx@lqgH3>N"
    "))Y5X?)=(N4%yNcI*BweLTXl!D)o?>cZqUfh1e_CoF!OQNz{G*aVc>_I74EX%O_x4pVno?$LK%^9LssXB^~?=dCb{ga?54<m@HoakqlUg*rEP{c8"
    "SWVVA?71{XR<%oW#6YdaHDbBIV9c0J#@b49_ZQ-&?F#TnZk-wT!}p%af*{Fq`ZO>RLPYy5>Utj;u2PMR@QO~D5BtTFDwjIscS}$Q#)um5Nbk4tI+"
    "n0p=u4DS?1ov#D~P%%?U4gK~RahBKS6*FtG}ZHYDh23j`?l(7&?rOz}KpY>-l8<q|J&B{krcO<IE!2|M2ksA0Z7bP1-"
    "DVzge}1d%<A)sRzsn9S534!Sq6*A&)80Aigpr?!64=ubLBFyo)Pcd;6)>H0~ah8^v|J9mrKEa<K>CQUQkS8%D-"
    "<U{E;PN}!QbzI!^__gPcUx_3{?6=>H{2LyOM8wZaUPNTR#YWVe6%)~b7TQC1SltkRo85W-"
    "Hh%>&$}aeHgcL~04WEq^Vb?~bkBTG?z#F5Um0HMGEy<B5%E)i$6;F8aBEPb;#ZZ0?yvuYBTPJAXF>IF-MmxB?BPlD00J3MCprxXk2y@A8S@Lr#Xd"
    "*px28;<qsKoH6A{Ev^oJFtr9|Gly;VCXG2~B)(1ozohhRh?o9@`d3R&SdMQsDIo8^Rqf($JgM){2?JyDQB$5P?g~XK)pVRl+Qd8KELImET3yNvgy"
    "a{yX9>ui6A%HD=Hct;DRF!}fB2pOj27LL}`r%4{TqQFoP6{RVcvuHy7DS008Ojq&$ZirG*bW5?i#M1R|7{r#D)lOR74?A7$_R7}3McwJS^S45(My"
    "(}ozcyc1-H7(Wr7>Kg|LQ>D~x89rW5$tKNeWR>}Myu_4kp*a8off~UMUmi2u&2(Q&BcVg^g*qv7a-"
    "YLw2gT5t`Kny7%OgLwJ4PL8}WzbLVa}SN^_@u`3Fx9miNn}_oC%Te?5AQMi8k*we(6VAUXfH<{ObZ*}!FexvgRm5kwf4YBbrN?bU)FU%ae#OEp6n"
    "jS|1e0-A_>i?XQC;Rck=rH0106S0TiPm2j&A`oE>XQy}>d9j45OvLrm0mqbM2cA;ZCZM){SKWyh%j@mpdr*3U#u42`I-"
    "V=)gZGm51GT@54nBT+fB&_`HT?bk{c8MNqR#E=xJpE;KKxS?HShkq{>Q@fU$U5kD(d~FiI;Uzp7E9s?k)fOq^VCfqVnQ{2Cko>&po|y@bI4}7pH#"
    "q;73oM{_Dr@fAYiS!*BoRtDn99!qctCf3G6hJ~+DDio1&=<(<!#JCA=-"
    "u!}EU`gGylI0=}tc+_qIEfeo8^~dtcn`I0Qyit4^N+IC8RomXDZ#}5$k7)6oU!MB&-"
    "N&+&r`m^c_?MduJW~fH$aPh=UtdONcI#1b465cLy^Oa9tk^rH-"
    "Q`xr?N7ZeyUV;5hBideS~n5SP|=82tJm(eZ2`(FAAJ~Yi?Oj9RVqYAz3z!NNeb|c)%F6c!$)dfddF}J+NQ1E+oxWFA<CllViCiwIgRQEN8)>;T3)"
    "z|Dc|__omRaPU;2H0`jf(=$b?rfB9Um@o@@`ATXiFZRCN_WdDQK)XDNE?i*UZB;wH#1jk{guNa^yOPfa&rEN`g}8VcpPQT#Xn|H8y@V?iy#`Hq;!"
    "o))-*DO2N+{14W->I4"
)


@functools.cache
def iq_bitmaps() -> dict[str, bytes]:
    """The grids of GGUF's IQ types as bitmaps: bit n, from the lowest of a byte on, says whether point n is in it."""
    import base64
    import zlib

    packed, found = zlib.decompress(base64.b85decode(_IQ_GRIDS)), {}
    for name, (values, coordinates) in _IQ_SHAPES.items():
        size = -(-(len(values) ** coordinates) // 8)
        found[name], packed = packed[:size], packed[size:]
    return found


@functools.cache
def iq_digits(name: str) -> np.ndarray:
    """The entries of a grid: of each coordinate, which of the values it may have, the first one first.

    Parameters
    ----------
    name : str
        ``"iq2_xxs"``, ``"iq2_xs"``, ``"iq2_s"``, ``"iq3_xxs"``, ``"iq3_s"`` or ``"iq1"``.

    Returns
    -------
    numpy.ndarray
        uint8[entries, coordinates], read-only, in the order of the points, whose digits they are, the least first.
    """
    values, coordinates = _IQ_SHAPES[name]
    points = np.flatnonzero(np.unpackbits(np.frombuffer(iq_bitmaps()[name], np.uint8), bitorder="little"))
    digits = (points[:, None] // len(values) ** np.arange(coordinates) % len(values)).astype(np.uint8)
    digits.setflags(write=False)
    return digits


@functools.cache
def iq_grid(name: str) -> np.ndarray:
    """The numbers of a grid's entries, int8[entries, coordinates], read-only; names as of `iq_digits`.

    Examples
    --------
    >>> iq_grid("iq2_xxs").shape, iq_grid("iq2_xxs")[1].tolist()
    ((256, 8), [43, 8, 8, 8, 8, 8, 8, 8])
    """
    grid = np.array(_IQ_SHAPES[name][0], np.int8)[iq_digits(name)]
    grid.setflags(write=False)
    return grid
