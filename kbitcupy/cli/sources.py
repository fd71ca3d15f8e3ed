"""What ``kbit compare`` and ``kbit plan`` measure: the tensors of files, or seeded samples."""

from __future__ import annotations

import argparse
import math
import os
import secrets
import threading
from collections.abc import Sequence
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
    tensor : str
        Its own name.
    opened : Opened, optional
        What it is read from; seeded samples without.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    tensor: str
    opened: Opened | None = None

    def read(self) -> Any:
        """The array, decoded."""
        if self.opened is None:
            return draw(self.tensor)
        tensor = self.opened.checkpoint[self.tensor]
        return tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor


class Opened:
    """A checkpoint that is open, and that other processes open once, each for itself.

    Parameters
    ----------
    path : str
        Where it is.
    token : str, optional
        What tells it from others at the same place.
    """

    def __init__(self, path: str, token: str | None = None):
        self.checkpoint = Checkpoint(path, mapped=False)
        self._path, self._token = os.path.abspath(path), token or secrets.token_hex(8)

    def __reduce__(self) -> Any:
        return _opened, (self._path, self._token)


# Those that other processes have asked this one for.
_lock = threading.Lock()
_open: dict[str, Opened] = {}
_MOST_OPEN = 4


def _opened(path: str, token: str) -> Opened:
    with _lock:
        if token not in _open:
            while len(_open) >= _MOST_OPEN:
                del _open[next(iter(_open))]
            _open[token] = Opened(path, token)
        return _open[token]


def sources(files: Sequence[str], arguments: argparse.Namespace, again: bool) -> list[Source]:
    """What is compared: the compressible tensors of files; samples without a file.

    With `again`, tensors that are compressed already take part as what they decode to.
    """
    if not files:
        nbytes = 4 * math.prod(SHAPE)
        return [Source(name, SHAPE, nbytes, name) for name in DISTRIBUTIONS]
    found = []
    for path in files:
        opened = Opened(path)
        checkpoint = opened.checkpoint
        for name in checkpoint.compressible(arguments.min_size, arguments.keep, again):
            entry = entry_of(checkpoint.compressed.get(name) or checkpoint.reader.entry(name))
            # Tensors of several files may have one name.
            shown = name if len(files) == 1 else f"{path}: {name}"
            found.append(Source(shown, entry.shape, entry.nbytes, name, opened))
    if not found:
        raise FileError(
            f"{', '.join(files)} holds no tensor to compress: none is {', '.join(_xp.FLOAT_DTYPES)} with two or more "
            f"dimensions, {arguments.min_size} or more elements (--min-size) and a name that --keep does not match"
        )
    return found


def described(files: Sequence[str]) -> Any:
    """What was compared, for JSON."""
    return (list(files) if len(files) > 1 else files[0]) if files else "samples"
