"""Formats beyond the plain ones that are worth a trial, and which of them an array shows to be worth measuring.

The registry says what there is to try: the sets of options that `Format.samples` names, with a codebook that is fitted
to the array where an option asks for one from the caller. Each is tried on a sample of the array, which takes about a
millisecond, so that only those that may be the answer are measured on all of it.
"""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backend import xp as _xp
from ..errors import FormatError
from ..formats.base import Choice, Format, list_formats, samples
from .fit import fit_table
from .measurement import Measurement, measure

# Elements that a trial takes: 128 blocks of the largest formats, and more of a distribution than a tenth of a dB needs.
_SAMPLE = 1 << 15
# The pieces of a sample along an axis that is too long for it: whole blocks of every format.
_PIECE = 1 << 10
# A fit for a trial ends here: the levels move by less than the trial can tell.
_COARSE: dict[str, Any] = {"tolerance": 1e-4, "iterations": 200}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A format to try.

    Parameters
    ----------
    format : Format
        The format.
    given : mapping of str to object
        What the caller brings beside it.
    fits : bool
        Whether a codebook is fitted to each array.
    """

    format: Format
    given: tuple[tuple[str, Any], ...] = ()
    fits: bool = False

    @classmethod
    def of(cls, choice: Choice) -> Candidate:
        """A format, and what is given beside it, as the caller named them."""
        format, given = choice
        return cls(format, tuple(given.items()))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the planes of an array of `shape`."""
        planes = self.format.planes(shape).values()
        return sum(math.prod(plane.shape) * _xp.named_dtype(plane.dtype).itemsize for plane in planes)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of `shape` can have this format."""
        try:
            self.format.check_shape(shape)
            self.nbytes(shape)
        except (ValueError, TypeError):  # rows are not whole blocks, or there is no such axis
            return False
        return True

    def fitted(self, x: Any, **how: Any) -> dict[str, Any]:
        """What is fitted to an array, by the names that `kbitcupy.quantize` has for it."""
        return {"codebook": _codebook(x, round(self.format.bits), self.format.block, **how)} if self.fits else {}

    def estimated(self, x: Any, tensor: str) -> Measurement:
        """The same from a sample of a large array, counted as if it were the whole."""
        part = sample(x)
        found = self.measured(part, tensor, self.fitted(part, **_COARSE))
        more = x.size / max(part.size, 1)
        sums = found.sums
        sums = replace(
            sums,
            count=x.size,
            **{name: more * getattr(sums, name) for name in ("signal", "noise", "other", "product", "spread")},
        )
        sizes = {"nbytes_before": x.nbytes, "nbytes_after": self.nbytes(x.shape), "spread": more * found.spread}
        return replace(found, shape=x.shape, sums=sums, **sizes)

    def measured(self, x: Any, tensor: str, fitted: dict[str, Any] | None = None) -> Measurement:
        """What the format makes of an array, with what is fitted to it."""
        fitted = self.fitted(x) if fitted is None else fitted
        found = measure(x, (self.format, {**dict(self.given), **fitted}), tensor)
        return replace(found, fitted=fitted)


def _codebook(x: Any, k: int, block: int, **how: Any) -> np.ndarray:
    """A fitted codebook; where there is too little to fit one to, evenly spaced values, the ends among them."""
    try:
        return fit_table(x, k, block=block, **how)
    except FormatError:
        return np.linspace(-1, 1, 1 << k, dtype=np.float32)


def candidates(shape: tuple[int, ...], *, all: bool = False) -> list[Candidate]:
    """Every registered format with each set of options that its `Format.samples` names, if it takes the shape.

    Parameters
    ----------
    shape : tuple of int
        Shape of the array.
    all : bool, default False
        Those too that lists do not show to who has not asked for them (`Format.default`).

    Returns
    -------
    list of Candidate
    """
    return [candidate for candidate in _offered(None if all else True) if candidate.takes(shape)]


def _offered(default: bool | None) -> Iterable[Candidate]:
    for name in list_formats(default=default):
        for format in samples(name):
            if format.can_encode:
                # "custom" is what calls bring themselves.
                yield Candidate(
                    format, fits=format.options().get("codebook") == "custom" and "codebook" in format.takes
                )


def sample(x: Any, size: int = _SAMPLE) -> Any:
    """About `size` elements of an array that stand for all: evenly spaced rows, or pieces of long ones.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.explore.candidates import sample
    >>> sample(np.zeros((4096, 256))).shape, sample(np.zeros((7, 5))).shape
    ((128, 256), (7, 5))
    """
    if x.size <= size:
        return x
    *lead, length = x.shape
    if length > size:
        pieces = max(size // math.prod(map(_few, lead)) // _PIECE, 1)
        starts = [i * (length - _PIECE) // max(pieces - 1, 1) for i in range(pieces)]
        kept = x[(*(slice(None, None, -(-n // _few(n))) for n in lead), slice(None))]
        return _xp.namespace(x).concatenate([kept[..., start : start + _PIECE] for start in starts], axis=-1)
    steps = [1] * len(lead)
    while math.prod(-(-n // step) for n, step in zip(lead, steps, strict=True)) * length > size:
        longest = max(range(len(lead)), key=lambda i: -(-lead[i] // steps[i]))
        steps[longest] *= 2
    return x[tuple(slice(None, None, step) for step in steps)]


def _few(length: int) -> int:
    """How many entries of a leading axis a sample takes where rows are longer than it."""
    return min(length, 2)


@dataclass(frozen=True)
class Trial:
    """What a trial on a sample has shown.

    Parameters
    ----------
    candidate : Candidate
        What was tried.
    nbytes : int
        Bytes that the whole array would take.
    found : Measurement
        What became of the sample.
    """

    candidate: Candidate
    nbytes: int
    found: Measurement


def trials(x: Any, tried: Iterable[Candidate], *, distinct: bool = True, seconds: float = math.inf) -> list[Trial]:
    """What candidates make of a sample of an array; where `distinct`, of those that do the same the first one.

    After so many seconds, as on a GPU where each kernel is compiled when it is first used, only formats with their
    default options are tried.
    """
    ends = time.monotonic() + seconds
    part = sample(x)
    fit = functools.cache(lambda k, block: _codebook(part, k, block, **_COARSE))
    found: dict[tuple[Any, ...], Trial] = {}
    for candidate in tried:
        format = candidate.format
        if time.monotonic() >= ends and str(format) != format.name:
            continue
        try:
            fitted = {"codebook": fit(round(format.bits), format.block)} if candidate.fits else {}
            trial = Trial(candidate, candidate.nbytes(x.shape), candidate.measured(part, "sample", fitted))
        except FormatError:  # it refuses the sample's shape or values
            continue
        sums = trial.found.sums
        found.setdefault((trial.nbytes, sums.noise, sums.largest) if distinct else (candidate,), trial)
    return list(found.values())


# What a format that nobody has asked for must gain over those that are measured anyway, to be measured too.
_GAIN_DB = 1.0
# Of two sizes that differ by less than this part, the larger one counts as no larger.
_ALIKE = 0.02
# Seconds that all trials for one sweep may take; later arrays are measured with what the earlier ones have shown.
_SECONDS = 30.0


class Search:
    """Finds what to measure beside the formats that are measured anyway, for one array after another.

    It can be pickled: another process has one such search of its own, for all arrays that it is given with it.

    Parameters
    ----------
    all : bool, default False
        As for `candidates`.
    seconds : float
        What all trials may take, in one process.
    """

    def __init__(self, *, all: bool = False, seconds: float = _SECONDS):
        self.all, self._left = all, seconds
        self._shown: dict[Format, Candidate] = {}
        self._token = secrets.token_hex(8)

    def __reduce__(self) -> Any:
        return _search_here, (self._token, self.all, self._left)

    def beyond(self, x: Any, taken: Sequence[Format]) -> list[Candidate]:
        """Candidates that keep at least a dB more of an array than all of `taken` that are no larger; by their size."""
        if not x.size:
            return []
        if self._left <= 0:
            return [one for one in self._shown.values() if one.format not in taken and one.takes(x.shape)]
        began = time.monotonic()
        plain = [Candidate(format) for format in taken]
        others = [one for one in candidates(x.shape, all=self.all) if one.format not in taken]
        tried = trials(x, (*plain, *others), seconds=self._left)
        better = ahead([(one.nbytes, one.found.sums.noise, one.candidate.format in taken) for one in tried])
        found = [tried[i].candidate for i in better]
        self._shown |= {one.format: one for one in found}
        self._left -= time.monotonic() - began
        return found


# The search of another process that was the last to come here.
_here: dict[str, Search] = {}


def _search_here(token: str, all: bool, seconds: float) -> Search:
    found = _here.get(token)
    if found is None:
        _here.clear()
        found = _here[token] = Search(all=all, seconds=seconds)
    return found


def beyond_all(arrays: Iterable[Any], taken: Sequence[Format], *, all: bool = False) -> list[Candidate]:
    """What is to be measured beside `taken` on several arrays: what keeps a dB more of all of them together, by their
    errors over their variances.

    Parameters
    ----------
    arrays : iterable of array
        Some of the arrays; each is looked at in turn, so one is in memory at a time.
    taken : sequence of Format
        What is measured anyway.
    all : bool, default False
        As for `candidates`.

    Returns
    -------
    list of Candidate
        By their size. They take every one of the arrays.
    """
    offered = [Candidate(format) for format in taken]
    offered += (one for one in _offered(None if all else True) if one.format not in taken)
    losses, sizes, ends = dict.fromkeys(offered, 0.0), dict.fromkeys(offered, 0), time.monotonic() + _SECONDS
    for x in arrays:
        if x.size:
            fitting, left = [one for one in losses if one.takes(x.shape)], ends - time.monotonic()
            found = {trial.candidate: trial for trial in trials(x, fitting, distinct=False, seconds=left)}
            variance = max((trial.found.spread / trial.found.sums.count for trial in found.values()), default=0.0)
            for one in list(losses):
                if one in found:
                    losses[one] += x.size * found[one].found.sums.mse / variance if variance else 0.0
                    sizes[one] += found[one].nbytes
                else:
                    del losses[one]
        if time.monotonic() >= ends:
            break
    kept = list(losses)
    better = ahead([(sizes[one], losses[one], one.format in taken) for one in kept])
    return [kept[i] for i in better]


def ahead(found: Sequence[tuple[int, float, bool]]) -> list[int]:
    """Which formats keep at least a dB more than all others that are no larger, but for those measured anyway.

    Parameters
    ----------
    found : sequence of (int, float, bool)
        Bytes, squared error, and whether it is measured anyway.

    Returns
    -------
    list of int
        Their places, the smallest first. Of two of about one size it is the better one.

    Examples
    --------
    >>> from kbitcupy.explore.candidates import ahead
    >>> ahead([(400, 1.0, True), (400, 0.9, False), (425, 0.3, False), (426, 0.1, False), (800, 0.09, False)])
    [3]
    """
    kept: list[int] = []
    least = math.inf
    for i in sorted(range(len(found)), key=lambda i: (found[i][0], not found[i][2], found[i][1])):
        nbytes, noise, known = found[i]
        if known:
            least = min(least, noise)
        elif noise < least * 10 ** (-_GAIN_DB / 10):
            least = noise
            if kept and nbytes < (1 + _ALIKE) * found[kept[-1]][0]:
                kept.pop()
            kept.append(i)
    return kept
