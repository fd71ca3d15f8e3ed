"""The best format for each tensor under a budget of bits."""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from .. import metrics
from .._version import __version__
from ..errors import FileError, FormatError
from ..formats.base import GIVEN, Choice, Format, get_format, resolve
from ..serial import read_json_file
from .sweeps import sweep

#: Version of the JSON that a plan is written as; what an older version wrote is still read. Version 2 has codebooks
#: that were fitted, and a plan without any is written as version 1.
PLAN_VERSION = 2

#: The label of a tensor that a plan leaves as it is.
KEPT = "kept"
#: What a plan makes least, and what messages call it.
OBJECTIVES = {"relative": "error over variance", "absolute": "squared error"}


@dataclass(frozen=True, repr=False)
class Plan:
    """A format for each tensor, as `plan` chooses them.

    Parameters
    ----------
    budget_bits : float
        Bits per element that the plan was made for.
    rows : tuple of dict
        The chosen row of `sweep` for each tensor. A tensor that stays as it is has None for its format.
    bound : float, optional
        What the loss of no choice within the budget is below: that of the plan, where none is better. None where it is
        not known.
    objective : {"relative", "absolute"}, default "relative"
        What the loss is: see `loss`.
    weights : mapping of str to float, optional
        How much the tensors count, by name; 1 where one is not named.
    """

    budget_bits: float
    rows: tuple[dict[str, Any], ...]
    bound: float | None = None
    objective: Literal["relative", "absolute"] = "relative"
    weights: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        bits = f"{self.bits_per_element:.3f} of {self.budget_bits:g} bits per element"
        proof = "" if self.bound is None else f", {self.proof}"
        return f"<Plan: {len(self.rows)} tensors, {bits}, SQNR {self.sqnr_db:.2f} dB{proof}>"

    @property
    def loss(self) -> float:
        """What the plan makes least.

        ``"relative"``: the mean over all elements of their squared error over the variance of their tensor, weighted;
        1 is what storing the means alone would lose. ``"absolute"``: the weighted sum of all squared errors.
        """
        return math.fsum(loss for row in self.rows for loss in _losses(self, (row,)))

    @property
    def gap(self) -> float:
        """How much less the loss of a better choice could be, as a part of the plan's own, at most.

        0 where no choice is better, NaN where that is not known.
        """
        if self.bound is None:
            return math.nan
        loss = self.loss
        proven = self.bound >= loss * (1 - _RESOLUTION)
        return 0.0 if proven else 1 - self.bound / loss

    @property
    def proof(self) -> str:
        """How good the plan is, in words."""
        if self.bound is None:
            return "not compared with other choices"
        what = OBJECTIVES[self.objective]
        if self.gap == 0:
            return f"no other choice within the budget has less {what}"
        return f"stopped early; no choice within the budget has {100 * self.gap:.2g} % less {what}"

    @property
    def formats(self) -> dict[str, Format | Choice]:
        """What `kbitcupy.quantize` takes as the format of each tensor, by name: with what was fitted beside it, where
        something was. Tensors that stay as they are have none.
        """
        found: dict[str, Format | Choice] = {}
        for row in self.rows:
            if row["format"] is not None:
                format = get_format(row["format"], **row["options"])
                fitted = {name: np.array(values, np.float32) for name, values in row.get("fitted", {}).items()}
                found[row["tensor"]] = (format, fitted) if fitted else format
        return found

    @property
    def bits_per_element(self) -> float:
        """Bits of all planes of all tensors for each of their elements."""
        return 8 * sum(row["nbytes_after"] for row in self.rows) / sum(row["elements"] for row in self.rows)

    @property
    def squared_error(self) -> float:
        """Sum of all squared errors."""
        return math.fsum(row["squared_error"] for row in self.rows)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio of all tensors together, in dB."""
        return metrics.Sums(1, math.fsum(row["signal"] for row in self.rows), self.squared_error).sqnr_db

    def config(self) -> dict[str, Any]:
        """JSON description: what `kbit quantize --plan` and `read_plan` read."""
        tensors: dict[str, Any] = {}
        for row in self.rows:
            if row["format"] is not None:
                fitted = {"given": row["fitted"]} if row.get("fitted") else {}
                tensors[row["tensor"]] = {**get_format(row["format"], **row["options"]).config(), **fitted}
        kept = [row["tensor"] for row in self.rows if row["format"] is None]
        return {
            "version": PLAN_VERSION if any("given" in one for one in tensors.values()) else 1,
            "written_by": f"kbitcupy {__version__}",
            "budget_bits": self.budget_bits,
            "bits_per_element": self.bits_per_element,
            "objective": self.objective,
            "loss": self.loss,
            "loss_bound": self.bound,
            "squared_error": self.squared_error,
            **({"weights": dict(self.weights)} if self.weights else {}),
            **({"kept": kept} if kept else {}),
            "tensors": tensors,
        }


def plan(
    tensors: Any,
    budget_bits: float,
    *,
    formats: str | Format | Iterable[str | Format] | None = None,
    objective: Literal["relative", "absolute"] = "relative",
    weights: Mapping[str, float] | None = None,
    device: str | None = None,
    progress: bool = False,
    time_limit: float = 10.0,
) -> Plan:
    """The format for each tensor that makes the total error least, under a budget of bits.

    The choice is exact, unless the time runs out: no other assignment of the given formats has a lower total within the
    budget. The plan says which of both it is, and how far from the best it is at most (`Plan.gap`).

    Parameters
    ----------
    tensors : mapping of str to array_like, or list of dict
        The arrays, as `sweep` takes them, or the rows of a `sweep` (which can serve several budgets).
    budget_bits : float
        Bits per element of all tensors together, scales and every other plane included.
    formats : str, Format or iterable of them, optional
        What to choose from; by default what `sweep` measures: every format that needs no option and takes a tensor's
        shape, and finer granularities and fitted codebooks where they keep more. Not with rows.
    objective : {"relative", "absolute"}, default "relative"
        What is made least. ``"relative"``: each tensor's squared error over its variance, weighted by its size: a
        tensor in pascals counts as one of mean 0 and standard deviation 1. A tensor of variance 0 is kept exact, as it
        is where no format can. ``"absolute"``: the sum of all squared errors, in which a tensor of large numbers
        outweighs one of small ones.
    weights : mapping of str to float, optional
        How much tensors count beside that, by name or pattern (``"*attention*"``; case matters), from 0 on. A name
        counts before patterns, and of those the first that matches; all other tensors count 1.
    device, progress
        As for `sweep`.
    time_limit : float, default 10
        Seconds for choosing, measuring apart; ``math.inf`` to search as far as the memory for its states reaches. The
        best choice found until then is taken.

    Returns
    -------
    Plan

    Raises
    ------
    FormatError
        When there is no tensor, a tensor is not finite, even the smallest choice is over the budget, a format's options
        cannot be written into a plan (a codebook or scales given as an array), or a weight is negative or for no
        tensor.

    See Also
    --------
    best : the best format for one array.

    Notes
    -----
    This is the multiple-choice knapsack problem. Where choices could be mixed, the tensors would move along the lower
    convex hulls of their errors over their bytes, the step that saves the most error a byte first: that gives a good
    choice, and bounds the optimum from below. Dynamic programming over the tensors that are still open then keeps only
    what neither another state dominates nor the bound excludes, and ever more of it while there is time.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> fields = {"pressure": rng.normal(0, 2e3, (64, 64)), "velocity": rng.normal(0, 0.1, (64, 64))}
    >>> found = kb.explore.plan(fields, 4.5, formats=["kbit2", "kbit4", "kbit6"])
    >>> {name: str(format) for name, format in found.formats.items()}
    {'pressure': 'kbit4', 'velocity': 'kbit4'}
    >>> found = kb.explore.plan(fields, 4.5, formats=["kbit2", "kbit4", "kbit6"], weights={"velo*": 20})
    >>> {name: str(format) for name, format in found.formats.items()}
    {'pressure': 'kbit2', 'velocity': 'kbit6'}
    """
    if isinstance(budget_bits, bool) or not isinstance(budget_bits, (int, float, np.number)) or not budget_bits > 0:
        raise FormatError(f"budget_bits is {budget_bits!r}; it must be a positive number of bits per element")
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float, np.number)) or not time_limit > 0:
        raise FormatError(f"time_limit is {time_limit!r}; it must be a positive number of seconds, or math.inf")
    if objective not in OBJECTIVES:
        raise FormatError(f"objective is {objective!r}; allowed are {', '.join(map(repr, OBJECTIVES))}")
    _check_weights(weights)
    if isinstance(tensors, list) and tensors and all(isinstance(row, dict) for row in tensors):
        if formats is not None:
            raise FormatError("formats goes with arrays; rows of a sweep have theirs: filter the rows instead")
        rows = tensors
    else:
        rows = sweep(tensors, formats, device=device, progress=progress)
    choices: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["elements"]:
            choices.setdefault(row["tensor"], []).append(row)
    if not choices:
        raise FormatError("there is nothing to plan: no tensor has an element")
    _check_choices(choices)
    if objective == "relative":
        choices = {name: options if options[0]["deviation"] else _exact(options) for name, options in choices.items()}
    elements = sum(options[0]["elements"] for options in choices.values())
    budget = math.floor(float(budget_bits) * elements / 8)
    least = sum(min(row["nbytes_after"] for row in options) for options in choices.values())
    if least > budget:
        raise FormatError(
            f"budget_bits is {budget_bits}; the smallest choice takes {8 * least / elements:.3f} bits per element: "
            "raise the budget, or offer formats of fewer bits"
        )
    first = tuple(options[0] for options in choices.values())
    empty = Plan(float(budget_bits), first, None, objective, _weights_of(weights or {}, list(choices)))
    found, bound = cheapest(
        [[row["nbytes_after"] for row in options] for options in choices.values()],
        [_losses(empty, options) for options in choices.values()],
        budget,
        float(time_limit),
    )
    chosen_rows = tuple(options[i] for i, options in zip(found, choices.values(), strict=True))
    return replace(empty, rows=chosen_rows, bound=bound)


def _losses(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """What rows, each in the place of that of its tensor, add to the loss of a plan."""
    if plan.objective == "absolute":
        return [plan.weights.get(row["tensor"], 1.0) * row["squared_error"] for row in rows]
    whole = math.fsum(plan.weights.get(row["tensor"], 1.0) * row["elements"] for row in plan.rows)
    found = []
    for row in rows:
        part = plan.weights.get(row["tensor"], 1.0) / whole if whole else 0.0
        # The sum of squares over the variance is the mean over it times the number of elements.
        error, variance = row["squared_error"], row["deviation"] ** 2
        found.append(part * error / variance if variance else math.inf if error else 0.0)
    return found


def _exact(options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices for a tensor of variance 0: formats that lose nothing of it, and none."""
    nothing = {"squared_error": 0.0, "mse": 0.0, "max_error": 0.0, "sqnr_db": math.inf, "sqnr_centered_db": math.inf}
    kept = {
        **options[0],
        **nothing,
        **dict.fromkeys(("format", "family", "remark")),
        "options": {},
        "given": [],
        "fitted": {},
        "shares": {},
        "cosine": 1.0,
        "label": KEPT,
        "nbytes_after": options[0]["nbytes_before"],
        "bits_per_element": 8 * options[0]["nbytes_before"] / options[0]["elements"],
    }
    return [*(row for row in options if row["squared_error"] == 0), kept]


def _check_weights(weights: Any) -> None:
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise FormatError(f"weights is {type(weights).__name__}; it must be a mapping of names or patterns to numbers")
    for name, weight in weights.items():
        number = isinstance(weight, (int, float, np.number)) and not isinstance(weight, bool)
        if not isinstance(name, str) or not number or not 0 <= weight < math.inf:
            raise FormatError(f"weights has {weight!r} for {name!r}; it must be a finite number from 0 on for a name")


def _weights_of(weights: Mapping[str, float], tensors: Sequence[str]) -> dict[str, float]:
    """How much each tensor counts that a name or a pattern names."""
    for pattern in weights:
        if pattern not in tensors and not any(fnmatch.fnmatchcase(name, pattern) for name in tensors):
            raise FormatError(f"weights names {pattern!r}, which matches no tensor; there are {_listed(tensors)}")
    found: dict[str, float] = {}
    for name in tensors:
        patterns = [name] if name in weights else [each for each in weights if fnmatch.fnmatchcase(name, each)]
        if patterns:
            found[name] = float(weights[patterns[0]])
    return found


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_choices(choices: Mapping[str, list[dict[str, Any]]]) -> None:
    for name, options in choices.items():
        # Numbers may be beyond what a format has scales for: it is no choice then.
        options[:] = [row for row in options if math.isfinite(row["squared_error"]) or not math.isfinite(row["signal"])]
        if not options or not all(math.isfinite(row["squared_error"]) for row in options):
            raise FormatError(f"tensor {name!r} has an error that is not finite (NaN or infinity in it); leave it out")
        for row in options:
            given = [each for each in row.get("given", ()) if each not in row.get("fitted", {})]
            if given:
                raise FormatError(
                    f"{get_format(row['format'], **row['options'])!r} was given {' and '.join(given)}, which a plan "
                    "cannot carry; offer formats whose options are text and numbers"
                )


def read_plan(path: str | os.PathLike[str]) -> dict[str, Format | Choice]:
    """The formats of a plan that `kbit plan` wrote, by tensor name; with the codebook that was fitted, where one was.

    Parameters
    ----------
    path : path_like
        JSON file of `Plan.config`.

    Returns
    -------
    dict of str to Format or tuple of Format and dict
        As `kbitcupy.quantize` and `kbitcupy.io.quantize_file` take them.

    Raises
    ------
    FileError
        When the file is missing, not a plan, or from a newer version.
    FormatError
        When it names a format or an option that is not known.

    Examples
    --------
    >>> import json, pathlib, tempfile, numpy as np, kbitcupy as kb
    >>> found = kb.explore.plan({"w": np.eye(64)}, 4.5, formats="kbit4")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "plan.json")
    ...     _ = path.write_text(json.dumps(found.config()))
    ...     kb.explore.read_plan(path)
    {'w': get_format('kbit4')}
    """
    try:
        stored = read_json_file(path)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FileError(f"{path} is not a plan: it is not JSON ({error})") from error
    tensors = stored.get("tensors") if isinstance(stored, dict) else None
    version = stored.get("version") if isinstance(stored, dict) else None
    if not isinstance(tensors, dict) or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(f"{path} is not a plan: it has no version or lists no tensors; write one with kbit plan")
    if version > PLAN_VERSION:
        raise FileError(f"{path} has plan version {version}; this kbitcupy reads up to {PLAN_VERSION}: upgrade it")
    found: dict[str, Format | Choice] = {}
    for tensor, config in tensors.items():
        if not isinstance(config, dict) or not isinstance(config.get("name"), str):
            raise FileError(f"{path}: tensor {tensor!r} names no format")
        options = {key: value for key, value in config.items() if key not in ("name", "given")}
        format = get_format(config["name"], **options)
        given = config.get("given", {})
        _check_given(given, f"{path}: tensor {tensor!r}")
        resolve(format, given)  # which checks numbers that are no array yet
        found[tensor] = (format, {name: np.array(given[name], np.float32) for name in given}) if given else format
    return found


def _check_given(given: Any, where: str) -> None:
    """Check what a plan has beside a format."""
    if not isinstance(given, dict) or not given.keys() <= set(GIVEN):
        raise FileError(f"{where} has something beside its format that is not one of {', '.join(GIVEN)}")
    for name, values in given.items():
        numbers = isinstance(values, list) and all(isinstance(x, (int, float)) and abs(x) <= _LARGEST for x in values)
        if not numbers:
            raise FileError(f"{where} has a {name} that is not a list of numbers")


# What float32 holds; a codebook of a plan is checked for it as a text of a stranger.
_LARGEST = float(np.finfo(np.float32).max)
# What could save less than this part of the error is not looked for: the sums are no more exact.
_RESOLUTION = 1e-12
# States of the search, which are assignments of its first tensors: how many the first pass keeps of each tensor, how
# many the last one may keep of all together, and how many may be looked at for one. Some hundred MB.
_FIRST_STATES, _MOST_STATES, _MOST_CANDIDATES = 1 << 12, 1 << 26, 1 << 22


def cheapest(
    nbytes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int, time_limit: float = math.inf
) -> tuple[list[int], float]:
    """One choice for each tensor, with the least total error of those that take at most `budget` bytes.

    Parameters
    ----------
    nbytes : sequence of sequence of int
        For each tensor, the bytes of its choices. The smallest choices fit the budget.
    errors : sequence of sequence of float
        Their errors, finite and not negative.
    budget : int
        Bytes of all tensors together.
    time_limit : float
        Seconds after which the best choice so far is the answer.

    Returns
    -------
    list of int
        For each tensor, the index of its choice.
    float
        What no choice's total error is below: that of this choice, where none is better.
    """
    deadline = time.monotonic() + time_limit
    # Choices as a matrix, padded by choices of infinite error.
    most = max(map(len, nbytes))
    cost = np.array([[*row, *[max(row)] * (most - len(row))] for row in nbytes], np.int64)
    error = np.array([[*row, *[np.inf] * (most - len(row))] for row in errors])
    rows = np.arange(len(cost))
    # Totals of bytes differ by multiples of one number: the budget ends at one of them.
    smallest = cost.min(1, keepdims=True)
    unit = int(np.gcd.reduce((cost - smallest).reshape(-1)))
    budget = int(smallest.sum()) + (budget - int(smallest.sum())) // max(unit, 1) * unit

    best, bound, price = _Relaxed(cost, error).filled(budget)
    upper, lower = float(error[rows, best].sum()), 0.0
    states = _FIRST_STATES
    while True:
        lower = min(max(lower, bound), upper)
        # A choice takes no part when every assignment with it has a larger error than the best known one.
        priced = error + price * cost
        more = priced * (1 - _RESOLUTION) - priced.min(1, keepdims=True)
        part = np.isfinite(error) & (bound + more <= upper)
        part[rows, best] = True
        core = np.flatnonzero(part.sum(1) > 1)
        proven = lower >= upper * (1 - _RESOLUTION) or not core.size
        if proven or states * core.size > _MOST_STATES or states * int(part.sum(1).max()) > _MOST_CANDIDATES:
            break
        # Large tensors come first: the small ones then fill what is left of the budget.
        core = core[np.argsort(-np.where(part[core], cost[core], 0).max(1), kind="stable")]
        others = np.setdiff1d(rows, core)
        room = budget - int(cost[others, best[others]].sum())
        fixed = float(error[others, best[others]].sum())
        search = _Relaxed(cost[core], np.where(part[core], error[core], np.inf))
        found, upper, bounded = search.searched(room, fixed, upper, states, deadline)
        if found is not None:
            best[core] = found
        lower = min(max(lower, bounded), upper)
        if lower >= upper * (1 - _RESOLUTION) or time.monotonic() >= deadline:
            break
        states *= 8
    return best.tolist(), upper if proven or lower >= upper * (1 - _RESOLUTION) else lower


class _Relaxed:
    """The problem of `cheapest`, and what becomes of it when choices may be mixed: the lower convex hulls.

    On a tensor's hull, from the smallest choice to the one of the least error, each step saves less error a byte than
    the one before. The steps of all tensors in that order are the least error for any budget.

    Parameters
    ----------
    cost : array of int64[tensors, choices]
        Bytes.
    error : array of float64[tensors, choices]
        Errors; infinite where there is no choice.
    """

    def __init__(self, cost: np.ndarray, error: np.ndarray):
        self.cost, self.error = cost, error
        hulls = [_hull(*row) for row in zip(cost.tolist(), error.tolist(), strict=True)]
        steps = [
            (row, after, cost[row, after] - cost[row, before], error[row, before] - error[row, after])
            for row, hull in enumerate(hulls)
            for before, after in itertools.pairwise(hull)
        ]
        rows, choices, costs, saved = (np.array(column) for column in zip(*steps, strict=True)) if steps else [()] * 4
        self.step_cost, self.step_saved = np.array(costs, np.int64), np.array(saved, float)
        with np.errstate(over="ignore"):
            self.step_price = self.step_saved / self.step_cost
        order = np.lexsort((-self.step_cost, -self.step_price))
        self.step_row, self.step_choice = np.array(rows, np.int64)[order], np.array(choices, np.int64)[order]
        self.step_cost, self.step_saved = self.step_cost[order], self.step_saved[order]
        self.step_price = self.step_price[order]
        self.first = np.array([hull[0] for hull in hulls])
        numbers = np.arange(len(cost))
        self.least_cost = _sums_from(cost[numbers, self.first])
        self.least_error = _sums_from(error[numbers, [hull[-1] for hull in hulls]])

    def filled(self, budget: int) -> tuple[np.ndarray, float, float]:
        """A good choice: every step that fits, in their order. Then a bound of all choices, and the price of a byte."""
        best, blocked = self.first.copy(), set()
        left = budget - int(self.least_cost[0])
        steps = zip(self.step_row.tolist(), self.step_choice.tolist(), self.step_cost.tolist(), strict=True)
        price = 0.0
        for number, (row, choice, nbytes) in enumerate(steps):
            if nbytes <= left and row not in blocked:
                best[row] = choice
                left -= nbytes
            else:
                blocked.add(row)
                price = price or float(self.step_price[number])
        nbytes, errors, _ = self._ahead(0)
        _, bound = _between(nbytes, errors, np.array([budget]))
        return best, float(bound[0]), price

    def searched(
        self, budget: int, fixed: float, upper: float, states: int, deadline: float
    ) -> tuple[np.ndarray | None, float, float]:
        """A choice whose error and `fixed` are less than `upper`, and the least possible unless time or states run out.

        Dynamic programming over the tensors: of each keeps as many `states` at most.

        Returns
        -------
        array of int or None
            The choice; None when none was found.
        float
            Its error and `fixed`, or `upper`.
        float
            A bound of every choice: not above the other one.
        """
        spent, lost = np.zeros(1, np.int64), np.full(1, fixed)  # bytes and error of each state
        trail: list[tuple[np.ndarray, np.ndarray]] = []  # for each tensor, each state's predecessor and choice
        best, dropped = None, math.inf
        for row in range(len(self.cost)):
            options = np.flatnonzero(np.isfinite(self.error[row]))
            before, choice = np.repeat(np.arange(len(spent)), len(options)), np.tile(options, len(spent))
            spent, lost = spent[before] + self.cost[row, choice], lost[before] + self.error[row, choice]
            fits = np.flatnonzero(spent + self.least_cost[row + 1] <= budget)
            spent, lost, before, choice = spent[fits], lost[fits], before[fits], choice[fits]
            nbytes, errors, steps = self._ahead(row + 1)
            at, bound = _between(nbytes, errors, budget - spent)
            bound += lost
            total = lost + errors[at]
            if total.min() < upper:
                state = int(total.argmin())
                upper, best = float(total[state]), self.first.copy()
                taken = steps[: at[state]]
                best[self.step_row[taken]] = self.step_choice[taken]  # of a tensor's steps the last one counts
                best[row], state = choice[state], before[state]
                for earlier in range(row - 1, -1, -1):
                    best[earlier], state = trail[earlier][1][state], trail[earlier][0][state]
            # A state goes when it cannot end below the best known total, or when another one takes no more bytes and
            # has no more error.
            alive = np.flatnonzero(bound < upper * (1 - _RESOLUTION))
            alive = alive[np.lexsort((lost[alive], spent[alive]))]
            alive = alive[lost[alive] < np.minimum.accumulate(np.append(np.inf, lost[alive]))[:-1]]
            if len(alive) > states:
                order = np.argpartition(bound[alive], states)
                dropped = min(dropped, float(bound[alive[order[states:]]].min()))
                alive = alive[order[:states]]
            if time.monotonic() >= deadline:
                dropped = min(dropped, float(bound[alive].min(initial=math.inf)))
                alive = alive[:0]
            if not alive.size:
                break
            trail.append((before[alive].astype(np.int32), choice[alive].astype(np.int32)))
            spent, lost = spent[alive], lost[alive]
        return best, upper, min(dropped, upper)

    def _ahead(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the tensors from `row` on take, in bytes and in error, before and after each of their steps; those."""
        steps = np.flatnonzero(self.step_row >= row)
        nbytes = self.least_cost[row] + np.concatenate(([0], np.cumsum(self.step_cost[steps])))
        # Summed from the small end: a difference of large numbers would have their error.
        saved = np.concatenate((np.cumsum(self.step_saved[steps][::-1])[::-1], [0.0]))
        return nbytes, self.least_error[row] + saved, steps


def _hull(cost: Sequence[int], error: Sequence[float]) -> list[int]:
    """The choices on the lower convex hull, from the smallest one to that of the least error."""
    hull: list[int] = []
    prices: list[float] = []  # error saved for a byte, up to each of them
    for i in sorted((i for i, e in enumerate(error) if e < math.inf), key=lambda i: (cost[i], error[i])):
        if hull and error[i] >= error[hull[-1]]:
            continue
        while hull:
            price = (error[hull[-1]] - error[i]) / (cost[i] - cost[hull[-1]])
            if len(hull) == 1 or price < prices[-1]:
                break
            hull.pop()
            prices.pop()
        if hull:
            prices.append(price)
        hull.append(i)
    return hull


def _between(nbytes: np.ndarray, errors: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each number of bytes the last step that it has room for, and the least error on the line to the next one."""
    at = np.searchsorted(nbytes, room, "right") - 1
    after = np.minimum(at + 1, len(nbytes) - 1)
    missing = (nbytes[after] - room) / np.maximum(nbytes[after] - nbytes[at], 1)
    return at, errors[after] + (errors[at] - errors[after]) * np.maximum(missing, 0.0)


def _sums_from(x: np.ndarray) -> np.ndarray:
    """Element i is the sum of the elements from i on; one more element of 0 ends them."""
    return np.concatenate((np.cumsum(x[::-1], 0)[::-1], np.zeros_like(x[:1])))
