"""What ``kbit compare`` and ``kbit plan`` measure: the tensors of files, or seeded samples."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FileError
from ..explore.samples import DISTRIBUTIONS, SHAPE, draw
from ..io.checkpoint import Checkpoint
from ..io.container import entry_of


@dataclass(frozen=True)
class Source:
    """A tensor to measure, which is read when it is asked for.

    Parameters
    ----------
    name : str
        Its name; with the file's where there are several files.
    shape : tuple of int
        Its shape.
    nbytes : int
        Its bytes when it is not compressed.
    read : callable
        Returns the array.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Any]


def sources(files: Sequence[str], arguments: argparse.Namespace, again: bool) -> list[Source]:
    """What is compared: the compressible tensors of files; samples without a file.

    With `again`, tensors that are compressed already take part as what they decode to.
    """
    if not files:
        nbytes = 4 * math.prod(SHAPE)
        return [Source(name, SHAPE, nbytes, functools.partial(_sample, name)) for name in DISTRIBUTIONS]
    found = []
    for path in files:
        checkpoint = Checkpoint(path, mapped=False)
        for name in checkpoint.compressible(arguments.min_size, arguments.keep, again):
            entry = entry_of(checkpoint.compressed.get(name) or checkpoint.reader.entry(name))
            # Tensors of several files may have one name.
            shown = name if len(files) == 1 else f"{path}: {name}"
            read = functools.partial(_decoded, checkpoint, name)
            found.append(Source(shown, entry.shape, entry.nbytes, read))
    if not found:
        raise FileError(
            f"{', '.join(files)} holds no tensor to compress: none is {', '.join(_xp.FLOAT_DTYPES)} with two or more "
            f"dimensions, {arguments.min_size} or more elements (--min-size) and a name that --keep does not match"
        )
    return found


def counted(found: Sequence[Source], advance: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    """Name and array of each, one at a time; `advance` is told the bytes of each that was worked on."""
    for source in found:
        x = source.read()
        yield source.name, x
        advance(x.nbytes)


def described(files: Sequence[str]) -> Any:
    """What was compared, for JSON."""
    return (list(files) if len(files) > 1 else files[0]) if files else "samples"


def _sample(name: str) -> Any:
    return draw(name)


def _decoded(checkpoint: Checkpoint, name: str) -> Any:
    tensor = checkpoint[name]
    return tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor
