"""Quantizing a NumPy array by several threads, each of which has rows of its own."""

from __future__ import annotations

import contextvars
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from .base import Format
from .chunks import AT_ONCE, KEPT

_T = TypeVar("_T")
_R = TypeVar("_R")

# Elements that are worth a thread; those of a row where an array has none that are whole blocks, such as a 1-D one.
LEAST, COLUMNS = 1 << 17, 1 << 15
# See `chunks.AT_ONCE`: as many as there are threads, up to this power of two. With less they wait for each other more
# of the time, the more the more they are; with more, the cache of a core holds too little.
_MOST_AT_ONCE = 4
# Elements of the smallest parts of an array, about a chunk, where it has so many times as much for each thread: cores
# are not equally fast while other programs run, and so none waits long for the last one.
_PART, _MANY = 1 << 19, 4


def check_workers(workers: Any, array: Any) -> int:
    """How many threads are asked for.

    Raises
    ------
    TypeError
        When `workers` is no integer.
    ValueError
        When it is below 1, or above 1 beside an array on a GPU.
    """
    try:
        number = operator.index(workers) if not isinstance(workers, (bool, np.bool_)) else 0
    except TypeError:
        raise TypeError(f"workers is {workers!r}; it must be an integer, the number of threads") from None
    if number < 1:
        raise ValueError(f"workers is {workers!r}; it must be 1 or more")
    if number > 1 and not isinstance(array, np.ndarray):
        raise ValueError(f"workers is {workers!r}, and x is on a GPU, which needs none: leave workers away")
    return number


def encode(
    format: Format, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any] | None, lead: int, workers: int
) -> None:
    """`Format.encode` by up to so many threads, with the same bits; by one where parts of an array are no arrays."""
    workers = min(workers, x.size // LEAST) if workers > 1 else 1
    two = format.first_numpy(x.shape, planes) if workers > 1 and not lead else None
    if two is not None:
        first, own, finish = two
        encode(first, x, own, given, 0, workers)
        finish()
        return
    shape = _in_rows(format, x.shape, lead) if workers > 1 else None
    if shape is None or not _for_all_rows(given or {}, shape == x.shape and not lead):
        kept = KEPT.set({})
        try:
            format.encode(x, planes, given, lead)
        finally:
            KEPT.reset(kept)
        return
    rows, lead = x.reshape(shape), lead if shape == x.shape else 0
    cuts = _cuts(len(rows), x.size // len(rows), workers)
    context = contextvars.copy_context()  # np.errstate belongs to one
    context.run(AT_ONCE.set, min(1 << workers.bit_length() - 1, _MOST_AT_ONCE))

    def each(function: Callable[..., Any], *more: Any) -> list[Any]:
        def of_rows(cut: slice) -> Any:
            return function(rows[cut], format.select(planes, shape, cut, lead), *more)

        return team.share(of_rows, cuts)

    with _Team(min(workers, len(cuts)), context) as team:
        if not lead and any(spec.scope == "tensor" for spec in format.planes(shape).values()):
            found = each(format.part_numpy)
            if any(one is None for one in found):
                format.encode(x, planes, given, lead)
                return
            given = {**(given or {}), **format.whole_numpy(found, x.dtype, planes)}
        each(format.encode, given, lead)


def _cuts(rows: int, columns: int, workers: int) -> list[slice]:
    """The parts of an array: one for each thread, of a large array more and smaller and smaller ones, in multiples of
    the smallest: chunks are whole there.
    """
    cuts: list[slice] = []
    step, first, each = -(-rows // workers), 0, max(_PART // columns, 1)
    each -= each % (1 << max(each.bit_length() - 3, 0))  # even numbers of rows, where there are many
    while first < rows:
        if rows * columns >= workers * _MANY * _PART:
            step = -(-(rows - first) // (2 * workers))
            step += -step % each
        cuts.append(slice(first, min(first + step, rows)))
        first += step
    return cuts


class _Team:
    """So many threads, of which this one is the first, until the end of the block: to begin one takes as long as to
    quantize a part.

    Parameters
    ----------
    workers : int
        How many.
    context : contextvars.Context
        What each has a copy of.
    """

    def __init__(self, workers: int, context: contextvars.Context):
        self._contexts = [context.copy() for _ in range(workers)]
        self._others: list[threading.Thread] = []
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> _Team:
        return self

    def __exit__(self, *error: object) -> None:
        for _ in self._others:
            self._work.put(None)
        for other in self._others:
            other.join()

    def share(self, function: Callable[[_T], _R], tasks: Sequence[_T]) -> list[_R]:
        """What a function gives for each task: threads take the next that is left."""
        results: dict[int, _R] = {}
        failed: list[BaseException] = []
        left = deque(enumerate(tasks))

        def work() -> None:
            while left:
                try:
                    number, task = left.popleft()
                except IndexError:  # another thread was quicker
                    return
                try:
                    results[number] = function(task)
                except BaseException as error:
                    failed.append(error)
                    left.clear()

        own, *others = self._contexts
        asked = 0
        try:
            for number, context in enumerate(others):
                self._work.put(work)
                if number == len(self._others):
                    other = threading.Thread(target=context.run, args=(self._serve,), name="kbitcupy")
                    other.start()
                    self._others.append(other)
                asked += 1
            own.run(_keeping, work)
        finally:
            left.clear()
            for _ in range(asked):
                self._done.get()
        if failed:
            raise failed[0]
        return [results[number] for number in range(len(tasks))]

    def _serve(self) -> None:
        """Do what is asked for, until nothing is."""
        while (work := self._work.get()) is not None:
            _keeping(work)
            self._done.put(None)


def _keeping(work: Callable[[], None]) -> None:
    """Do some work with the memory that this thread had for the last one."""
    if KEPT.get() is None:
        KEPT.set({})
    work()


def _for_all_rows(given: Mapping[str, Any], own: bool) -> bool:
    """Whether what a call brings goes with each row as it is; `own`: rows are those of the array, which is no stack."""
    others = given.keys() - {"codebook"}
    return not others or (own and others == {"importance"} and given["importance"].ndim == 1)


def _in_rows(format: Format, shape: tuple[int, ...], lead: int) -> tuple[int, ...] | None:
    """The shape of an array whose rows, of the same elements, are arrays of their own; None where there is none."""
    specs = format.planes(shape[lead:]).values()
    if not lead and any(spec.every > 1 for spec in specs):
        return None
    if len(shape) > 1 and shape[0] > 1 and (lead or format.rows_are_blocks(shape)):
        return shape
    flat = math.prod(shape) // COLUMNS, COLUMNS
    if not lead and math.prod(flat) == math.prod(shape) and format.rows_are_blocks(flat):
        return flat if format.keeps_blocks(shape, flat) else None
    return None
