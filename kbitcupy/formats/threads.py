"""Quantizing a NumPy array by several threads, each of which has rows of its own."""

from __future__ import annotations

import contextvars
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .base import Format
from .chunks import AT_ONCE

# Elements that are worth a thread; those of a row where an array has none that are whole blocks, such as a 1-D one.
LEAST, COLUMNS = 1 << 17, 1 << 15
# See `chunks.AT_ONCE`: with less, threads wait for each other most of the time; with more, the cache holds too little.
_AT_ONCE = 4


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
        format.encode(x, planes, given, lead)
        return
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    rows, lead = x.reshape(shape), lead if shape == x.shape else 0
    step = -(-len(rows) // min(workers, len(rows)))
    cuts = [slice(first, min(first + step, len(rows))) for first in range(0, len(rows), step)]
    parts: list[tuple[Any, ...]] = [(rows[cut], format.select(planes, shape, cut, lead)) for cut in cuts]
    context = contextvars.copy_context()
    context.run(AT_ONCE.set, _AT_ONCE)
    with ThreadPoolExecutor(workers) as pool:

        def each(function: Callable[..., Any], *more: Any) -> list[Any]:
            # np.errstate belongs to a context.
            done = [pool.submit(context.copy().run, function, *part, *more) for part in parts]
            return [future.result() for future in done]

        if not lead and any(spec.scope == "tensor" for spec in format.planes(shape).values()):
            found = each(format.part_numpy)
            if any(one is None for one in found):
                format.encode(x, planes, given, lead)
                return
            given = {**(given or {}), **format.whole_numpy(found)}
        each(format.encode, given, lead)


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
