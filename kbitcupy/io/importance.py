"""Importance matrices of llama.cpp: how much the errors of each column of a weight count.

``llama-imatrix`` runs a model on text and sums, for each matrix, the squares of what it is multiplied by. Its file is
GGUF (``general.type`` is ``"imatrix"``) with two float32 tensors for each matrix of the model: ``NAME.in_sum2`` of
shape (experts, columns) and ``NAME.counts`` of shape (experts, 1), one expert where there are none. A column's
importance is its mean square, the sum over the count; 1 for all columns of an expert that no token came to.

Until 2025 the file was ``imatrix.dat``, little-endian::

    i32 matrices  (i32 length, name, i32 calls, i32 values, float32 values) ...  what is not needed here

with sums of mean squares, one for each call; experts have their values one behind the other.

Source: llama.cpp, ``tools/imatrix`` and ``common/imatrix-loader.cpp``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import FileError
from .atomic import as_path
from .container import head_of, reading
from .gguf import GGUF, GgufReader

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_importance(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read an importance matrix, for the argument ``importance=`` of `kbitcupy.quantize`.

    Parameters
    ----------
    path : path_like
        What ``llama-imatrix`` wrote, GGUF or the older ``imatrix.dat``.

    Returns
    -------
    dict of str to ndarray
        By the matrix's name in llama.cpp (``"blk.0.attn_q.weight"``) its columns' importance, float32, of shape
        (columns,), or (experts, columns) for a stack of experts; of ``imatrix.dat`` (experts * columns,).

    Raises
    ------
    FileError
        When the file is no importance matrix, or its tensors do not fit together, or hold what is no finite number
        from 0 on.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> sums = {"blk.0.attn_q.weight.in_sum2": np.full((1, 4), 6, np.float32)}
    >>> counts = {"blk.0.attn_q.weight.counts": np.full((1, 1), 3, np.float32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.save(f"{folder}/imatrix.gguf", sums | counts, {"general.type": "imatrix"})
    ...     kb.io.read_importance(f"{folder}/imatrix.gguf")
    {'blk.0.attn_q.weight': array([2., 2., 2., 2.], dtype=float32)}
    """
    file = as_path(path, "importance")
    if file.is_file() and head_of(file, len(GGUF.magic)) != GGUF.magic:
        return _read_dat(file)
    reader = GGUF.open(file, mapped=False)
    kind = reader.metadata.get("general.type")
    if kind is None or kind.value != "imatrix":
        raise FileError(
            f"{file} is no importance matrix: its general.type is not 'imatrix'; pass what llama-imatrix wrote"
        )
    found = {}
    for name in reader.names:
        if name.endswith(_SUMS):
            found[name.removesuffix(_SUMS)] = _mean_squares(reader, name.removesuffix(_SUMS))
        elif name.endswith(_COUNTS) and name.removesuffix(_COUNTS) + _SUMS not in reader.entries:
            raise FileError(f"{file} has {name!r} but not {name.removesuffix(_COUNTS) + _SUMS!r}: download it again")
    if not found:
        raise FileError(f"{file} is an importance matrix of no tensor")
    return found


def _mean_squares(reader: GgufReader, name: str) -> np.ndarray:
    """The importance of one matrix."""
    if name + _COUNTS not in reader.entries:
        raise FileError(f"{reader.path} has {name + _SUMS!r} but not {name + _COUNTS!r}: download it again")
    for stored in (name + _SUMS, name + _COUNTS):
        if reader.entries[stored].dtype != "float32":
            raise FileError(f"{reader.path}: {stored!r} is {reader.entries[stored]}; it must be float32")
    counts = reader.array(name + _COUNTS).reshape(-1)
    sums = reader.array(name + _SUMS)
    if not counts.size or sums.size % counts.size or not sums.size:
        raise FileError(f"{reader.path}: {name!r} has sums of shape {sums.shape} for {counts.size} counts")
    sums = sums.reshape(counts.size, -1)
    with np.errstate(all="ignore"):
        counted = np.trunc(counts + np.copysign(np.float32(0.5), counts))[:, None]
        means = np.where(counted > 0, sums / np.where(counted > 0, counted, 1), np.float32(1))
    return _checked(reader.path, name, means[0] if counts.size == 1 else means)


def _checked(path: Path, name: str, means: np.ndarray) -> np.ndarray:
    if not (np.isfinite(means).all() and (means >= 0).all()):
        raise FileError(f"{path}: the importance of {name!r} is not finite and at least 0 everywhere")
    return means


def _read_dat(path: Path) -> dict[str, np.ndarray]:
    """The older kind of file, of which nothing is trusted."""
    found: dict[str, np.ndarray] = {}
    with reading(path), open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size

        def take(nbytes: int) -> bytes:
            nonlocal left
            left -= nbytes
            if nbytes < 0 or left < 0:
                raise FileError(f"{path} is neither a GGUF file nor an imatrix.dat of llama-imatrix, or it is cut off")
            return file.read(nbytes)

        def number() -> int:
            return int.from_bytes(take(4), "little", signed=True)

        for _ in range(number()):
            data = take(number())
            name = data.decode("utf-8", "backslashreplace")
            calls, count = number(), number()
            sums = np.frombuffer(take(4 * count), "<f4")
            if name in found or not sums.size:
                raise FileError(f"{path}: {name!r:.100} stands twice, or has no values")
            found[name] = _checked(path, name, sums / np.float32(calls) if calls > 0 else sums)
    if not found:
        raise FileError(f"{path} is neither a GGUF file nor an imatrix.dat of llama-imatrix")
    return found


def importance_for(
    name: str, shape: tuple[int, ...], matrices: Mapping[str, np.ndarray], path: str | os.PathLike[str]
) -> np.ndarray | None:
    """The importance of a tensor's columns, None where the file has none that fits.

    Parameters
    ----------
    name : str
        llama.cpp's name of it.
    shape : tuple of int
        Its shape.
    matrices : mapping of str to ndarray
        From `read_importance`.
    path : path_like
        Of the file, for messages.

    Returns
    -------
    ndarray or None

    Raises
    ------
    FileError
        When the file is of another model.
    """
    found = matrices.get(name)
    if found is None:
        return None
    matrix = shape[-3:-2] + shape[-1:]  # of a stack that no router chooses from all members have one count
    if found.size == math.prod(matrix):
        return found.reshape(matrix)
    if name == "token_embd.weight":  # nothing is multiplied by it but as the matrix of the logits
        return None
    raise FileError(
        f"{Path(path)} has importance of shape {found.shape} for tensor {name!r} of shape {shape}: it is of another "
        "model"
    )
