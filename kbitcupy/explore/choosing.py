"""The best format for one array."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..errors import FormatError
from ..formats.base import Choice, Format
from ..ops import quantize
from .candidates import Candidate, Trial, candidates, trials
from .measurement import Measurement, notes, remarks
from .sweeps import Sweep, checked, chosen_formats

# Lists show bits to two decimals, and a budget is meant as they show it: the codebook and the scale of a large array
# do not count.
_ROUNDING = 0.005
# A trial tells the mean squared error of a format this well: what it shows further from the best is not measured.
_TELLS = 10**0.1
# What misses an aim on a sample by no more is measured on the whole array all the same.
_SLACK, _SLACK_DB = 0.05, 0.25
# Of errors that differ by less the format of fewer bits is the better one.
_ALIKE = 1.01


@dataclass(frozen=True, repr=False)
class Best:
    """The format that `best` has chosen.

    Parameters
    ----------
    format : Format
        The format, with its options chosen.
    given : dict of str to array
        What was fitted to the array (a codebook), and what `kbitcupy.quantize` is to be given beside the format.
    row : dict
        Its figures, as `sweep` lists them.
    rows : Sweep
        Those of everything that was measured on the whole array.
    """

    format: Format
    given: Mapping[str, Any]
    row: dict[str, Any]
    rows: Sweep = field(compare=False)

    def __repr__(self) -> str:
        fitted = f", fitted {' and '.join(self.row['fitted'])}" if self.row["fitted"] else ""
        said = f"{self.row['bits_per_element']:.2f} bits per element, SQNR {self.row['sqnr_db']:.2f} dB"
        lines = [f"<Best: {self.format}{fitted}, {said}>", *notes([self.row]), *remarks([self.row])]
        return "\n".join(lines)

    @property
    def choice(self) -> Choice:
        """The format and what is given beside it, as `kbitcupy.quantize` and lists of formats take it."""
        return self.format, dict(self.given)

    def quantize(self, x: Any, **how: Any) -> QuantizedArray:
        """Compress an array so, the one that the choice was made for or one like it.

        Parameters
        ----------
        x : array_like
            As for `kbitcupy.quantize`.
        **how
            ``out`` or ``check_finite`` of `kbitcupy.quantize`.

        Returns
        -------
        QuantizedArray
        """
        return quantize(x, self.choice, **how)


def best(
    x: Any,
    *,
    bits: float | None = None,
    max_error: float | None = None,
    sqnr_db: float | None = None,
    formats: str | Format | Choice | Iterable[str | Format | Choice] | None = None,
    device: str | None = None,
    all: bool = False,
    time_limit: float = 20.0,
) -> Best:
    """The best format for an array: of the least error within so many bits, or of the fewest bits within an error.

    Everything that the registry has is tried on a sample of the array, with finer granularities, and with codebooks
    that are fitted to it. What is close to the best is then measured on the whole array, so that the figures of the
    answer, and the promise that it keeps, are those of the array.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 array of any shape, with no NaN and no infinity. A CuPy array is measured
        on its GPU.
    bits : float, optional
        The format of the least squared error that takes at most so many bits per element, scales, codebook and every
        other plane included, rounded to two decimals as lists show them. Of errors within 1 % of the least it is the
        one of the fewest bits.
    max_error : float, optional
        Or the one of the fewest bits of which no element is further from the original than this, in the unit of `x`.
    sqnr_db : float, optional
        Or the one of the fewest bits whose SQNR is at least so many dB.
    formats : str, Format or iterable of them, optional
        What to choose from, as for `sweep`; by default everything that can be tried.
    device : str, optional
        Where to work, as for `sweep`.
    all : bool, default False
        Without `formats`: try those too that lists do not show to who has not asked for them, such as GGUF's smallest.
    time_limit : float, default 20
        Seconds for trials on the sample, after which only formats with their default options are tried, and as many
        again after which no further one is measured on the array. What has been found until then is the answer.

    Returns
    -------
    Best
        ``format``, what was fitted (``given``), its figures (``row``), and ``quantize(x)``.

    Raises
    ------
    TypeError
        When `x` is not a float array.
    FormatError
        When not exactly one of `bits`, `max_error` and `sqnr_db` is given, it is not a positive number (`max_error` may
        be 0), `x` has no element or one that is not finite, or no format keeps to it: the message names what comes
        nearest.

    See Also
    --------
    plan : a format for each of many arrays, under one budget.
    sweep : the figures of every format.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> y, x = np.mgrid[:256, :256] / 256
    >>> image = (0.5 + 0.3 * np.sin(7 * x + 3 * y) * np.cos(5 * y)).astype(np.float32)
    >>> found = kb.explore.best(image, bits=4.3)
    >>> str(found.format), list(found.given)
    ('kbit4:codebook=custom', ['codebook'])
    >>> nf4 = kb.metrics.sqnr_db(image, kb.quantize(image, "nf4"))
    >>> bool(kb.metrics.sqnr_db(image, found.quantize(image)) > nf4 + 9)
    True
    """
    wanted = {"bits": bits, "max_error": max_error, "sqnr_db": sqnr_db}
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) != 1:
        raise FormatError(
            f"best is given {' and '.join(given) or 'no aim'}; give one of bits=, max_error= and sqnr_db=, such as "
            "bits=4.25"
        )
    ((aim, value),) = given.items()
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not _allowed(aim, float(value)):
        positive = "number from 0 on" if aim == "max_error" else "positive number"
        raise FormatError(f"{aim} is {value!r}; it must be a finite {positive}")
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float, np.number)) or not time_limit > 0:
        raise FormatError(f"time_limit is {time_limit!r}; it must be a positive number of seconds, or math.inf")
    data = checked(x, "x", device)
    if not data.size:
        raise FormatError(f"x has shape {data.shape} and no element; there is nothing to choose a format for")
    if formats is None:
        offered = candidates(data.shape, all=all)
    else:
        offered = [Candidate.of(choice) for choice in chosen_formats(formats, data.shape)]
    search = _Search(data, float(time_limit), named=formats is not None)
    return search.within_bits(offered, float(value)) if aim == "bits" else search.smallest(offered, aim, float(value))


def _allowed(aim: str, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or (aim == "max_error" and value == 0))


class _Search:
    """What is measured on an array, until the time is up."""

    def __init__(self, x: Any, seconds: float, named: bool):
        self.x, self.seconds, self.named = x, seconds, named
        self.deadline = math.inf
        self.found: list[tuple[Candidate, Measurement]] = []

    def within_bits(self, offered: Sequence[Candidate], bits: float) -> Best:
        """The least error of those that take so many bits."""
        sizes = {one: one.nbytes(self.x.shape) for one in offered}
        fitting = [one for one in offered if 8 * sizes[one] / self.x.size <= bits + _ROUNDING]
        if not fitting:
            small = min(offered, key=lambda one: sizes[one])
            raise FormatError(
                f"bits is {bits:g}; the smallest format, {small.format}, takes {8 * sizes[small] / self.x.size:.2f} "
                "bits per element of this array: raise the number, or offer formats of fewer bits"
            )
        ranked = sorted(self._tried(fitting), key=lambda trial: (trial.found.sums.noise, trial.nbytes))
        least = math.inf
        for trial in ranked:
            if trial.found.sums.mse > _TELLS * least or (self.found and time.monotonic() >= self.deadline):
                break
            least = min(least, self._measure(trial.candidate).sums.mse)
        alike = [each for each in self.found if each[1].sums.mse <= _ALIKE * least]
        return self._best(min(alike, key=lambda each: (each[1].nbytes_after, each[1].sums.noise)))

    def smallest(self, offered: Sequence[Candidate], aim: str, value: float) -> Best:
        """The fewest bytes of those that keep to the aim; of one size the least error."""
        tried = self._tried(offered)
        # A sample's largest error may be above that of the whole, where a scale is of the whole.
        slack = _SLACK * value if aim == "max_error" else _SLACK_DB
        promising = [trial for trial in tried if _misses(trial.found, aim, value) <= slack]
        promising.sort(key=lambda trial: (trial.nbytes, trial.found.sums.noise))
        # The last resort: on the whole array more may be lost than on the sample.
        closest = min(tried, key=lambda trial: (_misses(trial.found, aim, 0.0), trial.nbytes))
        for trial in (*promising, closest):
            if time.monotonic() >= self.deadline and trial is not closest:
                continue
            if _misses(self._measure(trial.candidate), aim, value) <= 0:
                return self._best(self.found[-1])
        candidate, nearest = min(self.found, key=lambda each: _misses(each[1], aim, 0.0))
        row = nearest.row()
        reached = f"{row['max_error']:.4g}" if aim == "max_error" else f"{row['sqnr_db']:.2f} dB"
        raise FormatError(
            f"{aim} is {value:g}; no format keeps to it. {candidate.format} comes nearest, with {reached} at "
            f"{row['bits_per_element']:.2f} bits per element: {'raise' if aim == 'max_error' else 'lower'} the number"
        )

    def _tried(self, offered: Sequence[Candidate]) -> list[Trial]:
        found = trials(self.x, offered, seconds=math.inf if self.named else self.seconds)
        self.deadline = time.monotonic() + self.seconds
        for trial in found:
            _check_finite(trial.found)
        if not found:  # each of them refuses the array, and the first one says why
            self._measure(offered[0])
        # Numbers may be beyond what a format has scales for.
        kept = [trial for trial in found if math.isfinite(trial.found.sums.noise)]
        if not kept:
            raise FormatError("x has numbers that none of the formats can hold: scale it, or offer others")
        return kept

    def _measure(self, candidate: Candidate) -> Measurement:
        found = candidate.measured(self.x, "x")
        _check_finite(found)
        self.found.append((candidate, found))
        return found

    def _best(self, chosen: tuple[Candidate, Measurement]) -> Best:
        candidate, found = chosen
        rows = Sweep(measured.row() for _, measured in self.found)
        return Best(candidate.format, {**dict(candidate.given), **found.fitted}, found.row(), rows)


def _misses(found: Measurement, aim: str, value: float) -> float:
    """How far a format is from an aim; 0 or less where it keeps to it."""
    if aim == "max_error":
        return found.sums.largest - value
    return value - found.sums.sqnr_db


def _check_finite(found: Measurement) -> None:
    if not math.isfinite(found.sums.signal):
        raise FormatError(
            f"x holds {found.nan} NaN and {found.infinite} infinite elements, or its squares are: no error can be "
            "measured there; replace them, or scale the array"
        )
