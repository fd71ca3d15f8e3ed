"""bitsandbytes' rules written down once more, for comparisons with it: codes of y = x * r, whatever r is.

Its kernels compute r with the GPU's approximate reciprocal (``rcp.approx.ftz``), which is within one last bit of the
true one; kbitcupy's r is the true one. So a code of bitsandbytes is explained when r, or a neighbour of r, gives it.
"""

import numpy as np

from kbitcupy import tables

_MAGNITUDE_CODES = np.array([0, 1, 6, 7, 4, 5, 2, 3], np.uint8)  # FP4's magnitudes in ascending order


def codes_of(y, kind, xp=np):
    """The codes of float32 numbers in units of the absmax; `xp` is NumPy, or CuPy for arrays on a GPU."""
    if kind == "fp4":
        level = xp.searchsorted(xp.asarray(tables.FP4_THRESHOLDS), xp.abs(y), side="left")
        codes = xp.asarray(_MAGNITUDE_CODES)[xp.minimum(level, 7)] + 8 * (y < 0)
    elif kind == "nf4":
        codes = xp.searchsorted(xp.asarray(tables.NF4_THRESHOLDS), y, side="left")
    else:
        middles = xp.asarray(tables.midpoints(tables.dynamic_map()))
        codes = xp.searchsorted(middles, y, side="left")
        ties = middles[xp.minimum(codes, 254)] == y
        codes = codes + (ties & (codes % 2 == 1))  # to the even one
    return xp.where(xp.isnan(y), 0, codes).astype(xp.uint8)


def unpack(packed, size):
    """Codes by element from two codes a byte, the first in the high nibble."""
    return np.stack((packed >> 4, packed & 15), axis=-1).reshape(-1)[:size]


def differences(x, kind, block, ours, theirs):
    """Where two arrays of codes of the float32 array x differ, and how many of these nothing explains."""
    places = np.flatnonzero(ours != theirs)
    blocks = np.unique(places // block)
    unexplained = 0
    for number in blocks:
        part = x[number * block : (number + 1) * block]
        here = places[places // block == number]
        with np.errstate(all="ignore"):
            absmax = np.fmax.reduce(np.abs(part), initial=0)
            r = np.float32(1) / absmax
            # Over 2^126 their reciprocal is flushed to zero; kbitcupy scales the block down first.
            others = [np.float32(0)] if absmax > 2.0**126 else [np.nextafter(r, np.float32(s)) for s in (0, np.inf)]
            candidates = np.array([codes_of(x[here] * other, kind) for other in others])
        unexplained += int((candidates != theirs[here]).all(axis=0).sum())
    return places, unexplained
