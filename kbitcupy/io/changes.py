"""What becomes of the tensors of a checkpoint when it is written anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..formats.base import Choice


@dataclass(frozen=True)
class Change:
    """What becomes of a tensor on its way from one file into another.

    A tensor that is compressed is decoded first, unless it is `kept`.

    Parameters
    ----------
    choice : Choice, optional
        The format to compress to, and what `quantize` is given beside it; without one the tensor becomes a plain array.
    dtype : str, optional
        What it is rounded to: one of float16, bfloat16, float32 and float64.
    name : str, optional
        Its new name.
    transform : callable, optional
        Takes the array, on its device, and returns the one to store or to compress, of the same dtype.
    shape : tuple of int, optional
        Shape of what `transform` returns, where it is another.
    kept : bool, default False
        Whether a compressed tensor stays so, to be stored in another layout or under another name; `transform` then
        takes and returns a `QuantizedArray`.
    given_by : callable, optional
        Takes the array to compress, and returns what `quantize` is given beside `choice`.
    """

    choice: Choice | None = None
    dtype: str | None = None
    name: str | None = None
    transform: Callable[[Any], Any] | None = None
    shape: tuple[int, ...] | None = None
    kept: bool = False
    given_by: Callable[[Any], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Changes:
    """What becomes of a checkpoint.

    Parameters
    ----------
    tensors : mapping of str to Change
        By the names of tensors; all others are copied, or stored as the new layout has them.
    metadata : mapping, optional
        In place of what the source says, and behind it; None removes a key.
    made : mapping of str to numpy.ndarray, optional
        Tensors that the source does not have.
    omitted : collection of str, optional
        Tensors that are left out.
    order : sequence of str, optional
        Names of all tensors that are not left out, and of those that are made, in their order in a file that keeps one.
    describes : bool, default True
        Whether the metadata describe compressed tensors, of which there are none in the end otherwise.
    beside : mapping of str to bytes, optional
        Files to write into the folder, by their names.
    """

    tensors: Mapping[str, Change]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, np.ndarray] = field(default_factory=dict)
    omitted: Collection[str] = ()
    order: Sequence[str] | None = None
    describes: bool = True
    beside: Mapping[str, bytes] = field(default_factory=dict)
