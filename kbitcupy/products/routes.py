"""Routes: the ways to compute a product, what each of them takes, and what it costs.

A `Problem` says all that decides how a product is computed, and nothing of its numbers. A `Route` says whether it
accepts a problem, or why not; what it costs, in microseconds; and makes the callable that computes it. The plan is the
cheapest route that accepts, found once for each problem (`plan`); `explain` shows all of them (`Explanation`).

Costs are models of a few terms each, measured on an H200: what counts is which one is least. Other devices differ in
what they accept, not in the terms.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..array import QuantizedArray
from ..backend import launch, tma
from ..formats.base import Format, Fragments

#: Computes a product: from x, the weight and a bias (or None), into an array of the result's shape and dtype; one of
#: experts from x, the weights, the ids of experts and the weights of slots (or None).
Product = Callable[..., None]

#: Bytes that an H200 reads, or writes, in a microsecond.
BYTES_PER_US = 4.2e6
#: Where planes start at multiples of this many bytes, no kernel asks for more.
MOST_ALIGNED = 16


@dataclass(frozen=True)
class Device:
    """What routes ask of a GPU.

    Parameters
    ----------
    ordinal : int
        Its number.
    capability : int
        Compute capability, 90 for 9.0.
    multiprocessors : int
        How many it has.
    shared_memory : int
        Bytes of it that a thread block can have.
    tensor_maps : bool
        Whether the driver makes tensor maps, for the bulk tensor copy engine.
    starts_early : bool
        Whether kernels may start before the kernel ahead of them has ended.
    """

    ordinal: int
    capability: int
    multiprocessors: int
    shared_memory: int
    tensor_maps: bool
    starts_early: bool

    @property
    def copies_tiles(self) -> bool:
        """Whether there is what copies whole tiles: Hopper's copy engine, or asynchronous copies before it."""
        return self.capability < 90 or self.tensor_maps


@functools.cache
def device(ordinal: int) -> Device | None:
    """The GPU of that number; None for -1, where NumPy computes."""
    if ordinal < 0:
        return None
    facts = launch.capability(ordinal), launch.multiprocessors(ordinal), launch.shared_memory(ordinal)
    return Device(ordinal, *facts, tma.available(), launch.starts_early(ordinal))


class Stored(NamedTuple):
    """How the planes of a weight lie in memory.

    Parameters
    ----------
    codes, scales : int
        The power of two, up to 16, at whose multiples the planes of codes, and of scales and what stands beside them,
        start.
    members : int
        Arrays whose planes lie one behind the other, of a stack; else 1.
    lead : int
        Leading lengths that count them.
    whole : bool
        Whether the planes of `kbitcupy.formats.base.Records` start where they can be copied from.
    """

    codes: int = MOST_ALIGNED
    scales: int = MOST_ALIGNED
    members: int = 1
    lead: int = 0
    whole: bool = True


#: What the allocators of CuPy and NumPy give.
WELL_ALIGNED = Stored()


def stored(q: QuantizedArray) -> Stored:
    """How the planes of a weight lie, found out once for each weight."""
    found: Stored | None = q._launches.get(Stored)
    if found is None:
        fragments = q.format.fragments(q.ndim - q.lead)
        if fragments is None:
            first, *others = tuple(q.planes)[:2]
            others = others or [first]
        else:
            beside = (fragments.beside, fragments.offset) if fragments.beside else ()
            first, others = fragments.codes, [fragments.scales, *filter(None, beside)]
        codes, scales = _alignment(q.planes[first]), min(_alignment(q.planes[name]) for name in others)
        records = q.format.records()
        whole = records is None or all(
            _alignment(q.planes[name]) % piece == 0 for name, piece in zip(records.planes, records.pieces, strict=True)
        )
        found = q._launches[Stored] = Stored(codes, scales, q.members, q.lead, whole)
    return found


def _alignment(plane: Any) -> int:
    if isinstance(plane, np.ndarray):
        return MOST_ALIGNED
    address = int(plane.data.ptr) | MOST_ALIGNED
    return address & -address


@dataclass(frozen=True)
class Problem:
    """What decides how a product is computed.

    Parameters
    ----------
    format : Format
        Of the weight.
    shape : tuple of int
        N and K of the weight, or of one expert.
    tokens : int
        Rows of x; of experts the products, tokens times slots.
    dtype : numpy.dtype
        Of x and of the result.
    device : Device or None
        None: NumPy computes.
    aligned : bool, default True
        Whether x starts at a multiple of 16 bytes.
    stored : Stored
        How the planes of the weight lie.
    activations : str, optional
        How x is quantized on the way, or was before; None for floats that are multiplied as they came.
    experts : int, default 0
        Weights of which each token has chosen some; 0 for a product with one weight.
    """

    format: Format
    shape: tuple[int, int]
    tokens: int
    dtype: np.dtype
    device: Device | None
    aligned: bool = True
    stored: Stored = WELL_ALIGNED
    activations: str | None = None
    experts: int = 0

    @functools.cached_property
    def fragments(self) -> Fragments | None:
        """What tuned kernels need of the format."""
        return self.format.fragments(3 - self.stored.lead if self.experts else 2)

    @functools.cached_property
    def reading(self) -> float:
        """Microseconds to read the compressed weight once; of experts one of them."""
        n, k = self.shape
        # Inner scales are not stored as they lie in shared memory.
        if self.fragments is not None and self.fragments.entries and not self.fragments.beside:
            size = n * k * (self.fragments.bits / 8 + self.fragments.scale_bytes / self.fragments.granule)
            return size / BYTES_PER_US
        # Where experts are no members of a stack, the format may count an axis that one expert does not have.
        together = self.experts if self.experts and not self.stored.lead else 0
        planes = self.format.planes((together, n, k) if together else (n, k)).values()
        size = sum(math.prod(plane.shape) * np.dtype(plane.dtype).itemsize for plane in planes)
        return size / max(together, 1) / BYTES_PER_US


class Route(ABC):
    """One way to compute a product."""

    #: As `Explanation` shows it.
    name: ClassVar[str]

    @abstractmethod
    def accepts(self, problem: Problem) -> str | None:
        """None where the route computes such products; otherwise what stands against it."""

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """Microseconds of a product that the route accepts."""

    @abstractmethod
    def prepare(self, problem: Problem) -> Product:
        """What computes such products; kernels are compiled when they are launched."""

    @abstractmethod
    def describe(self, problem: Problem) -> str:
        """A few words on how it does so."""


def refused_by_all(problem: Problem, weights: str) -> str | None:
    """What stands against routes that run on a GPU and multiply floats as they came by `weights`, "a weight" or so."""
    if problem.device is None:
        return "the arrays are in host memory"
    if problem.activations is not None:
        return "it multiplies floats as they came"
    if bool(problem.experts) != (weights == "experts"):
        return f"it is for {weights}"
    return None


class Choice(NamedTuple):
    """One route and what it says of a problem.

    Parameters
    ----------
    route : Route
        The route.
    refusal : str or None
        None where it accepts.
    cost : float
        Microseconds; infinite where it refuses.
    """

    route: Route
    refusal: str | None
    cost: float


def choices(problem: Problem, routes: Iterable[Route]) -> list[Choice]:
    """What all routes say of a problem, the cheapest first, those that refuse last."""
    found = []
    for route in routes:
        refusal = route.accepts(problem)
        found.append(Choice(route, refusal, float("inf") if refusal else route.cost(problem)))
    return sorted(found, key=lambda choice: choice.cost)


@dataclass(frozen=True)
class Row:
    """What an explanation says of one route.

    Parameters
    ----------
    route : str
        Its name.
    chosen : bool
        Whether the product takes it.
    cost : float or None
        Its modelled microseconds on an H200; None where it refuses.
    reason : str
        How it computes the product, or what stands against it.
    """

    route: str
    chosen: bool
    cost: float | None
    reason: str


class Explanation(Sequence[Row]):
    """How a product is computed: the rows of all routes, the chosen one first. ``str`` is a table for people.

    Parameters
    ----------
    heading : str
        What is multiplied.
    rows : sequence of Row
        One for each route.
    ranges : sequence of (int, str)
        From how many tokens on which route is taken.
    """

    def __init__(self, heading: str, rows: Sequence[Row], ranges: Sequence[tuple[int, str]] = ()):
        self.heading, self.rows, self.ranges = heading, tuple(rows), tuple(ranges)

    @property
    def route(self) -> str:
        """The name of the route that the product takes; empty where there is nothing to compute."""
        return next((row.route for row in self.rows if row.chosen), "")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        return self.rows[key]

    def __str__(self) -> str:
        wide = max((len(row.route) for row in self.rows), default=0)
        lines = [self.heading]
        for row in self.rows:
            cost = "" if row.cost is None else f"{row.cost:.1f} us"
            lines.append(f"{'>' if row.chosen else ' '} {row.route:<{wide}}  {cost:>10}  {row.reason}")
        if len(self.ranges) > 1:
            ends = [start - 1 for start, _ in self.ranges[1:]]
            spans = (str(a) if a == b else f"{a} to {b}" for (a, _), b in zip(self.ranges[:-1], ends, strict=True))
            names = [f"{span}: {name}" for span, (_, name) in zip(spans, self.ranges[:-1], strict=True)]
            lines.append(f"tokens {', '.join(names)}, from {ends[-1] + 1}: {self.ranges[-1][1]}")
        return "\n".join(lines)

    __repr__ = __str__


def explained(
    heading: str, problem: Problem, routes: Iterable[Route], ranges: Sequence[tuple[int, str]]
) -> Explanation:
    """The explanation of a problem that one of the routes accepts."""
    rows = []
    for number, (route, refusal, cost) in enumerate(choices(problem, routes)):
        reason = refusal or route.describe(problem)
        rows.append(Row(route.name, number == 0 and not refusal, None if refusal else round(cost, 2), reason))
    return Explanation(heading, rows, ranges)
