"""A compressed array as bytes, and JSON of strangers.

What `to_bytes` writes, and `from_buffer` reads for ever; numbers are little-endian:

======  ======  ====================================================================================================
offset  bytes   contents
======  ======  ====================================================================================================
0       8       `MAGIC`
8       4       version of this layout, 1
12      4       H, the length of the header
16      8       bytes of the whole: who receives a stream knows from the first 24 how many follow
24      H       the header: JSON in UTF-8, filled up with spaces so that 24 + H is a multiple of 64
24 + H          the planes in the order of the header, each beginning at a multiple of 64, with zeros between them
======  ======  ====================================================================================================

The header is ``{"config": q.config(), "planes": [{"name": ..., "dtype": ..., "shape": [...]}, ...]}``. Where a plane
begins follows from the lengths ahead of it, so planes can neither overlap nor leave gaps, and the last one ends where
the bytes end. Equal arrays have equal bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from .array import QuantizedArray, read_config
from .backend import xp as _xp
from .errors import FormatError
from .formats.base import Format

#: The first bytes. No text begins with the first one, and whoever changes ends of lines changes the last one.
MAGIC = b"\x93KBITQA\n"
#: Version of the bytes; what an older version wrote is still read.
BYTES_VERSION = 1
#: Planes begin at multiples of this, which suits every dtype and the vector loads of every processor.
ALIGNMENT = 64

_HEAD = struct.Struct("<8sIIQ")
# A header has some hundred bytes; from this many on JSON of a stranger would take noticeable memory.
_LONGEST_HEADER = 1 << 18
_MOST_DIMENSIONS = 64  # NumPy's own limit
_CUT = "it was cut off, or more than one array stands in it: pass exactly what to_bytes() returned"


# ---- arrays as bytes -------------------------------------------------------------------------------------------------


def to_bytes(q: QuantizedArray) -> bytes:
    """A compressed array as bytes: its configuration and its planes, for sockets, queues, caches and chunks of files.

    Parameters
    ----------
    q : QuantizedArray
        The array; one on a GPU is copied to host memory.

    Returns
    -------
    bytes
        See `kbitcupy.serial` for their layout. They hold no code and are the same wherever they are made.

    Raises
    ------
    FormatError
        When the options of the format take more than 262,144 bytes of JSON.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.linspace(-1, 1, 1024, dtype=np.float32).reshape(32, 32), "kbit4")
    >>> data = q.to_bytes()
    >>> len(data), q.nbytes
    (900, 548)
    >>> kb.QuantizedArray.from_buffer(data)
    QuantizedArray(kbit4, shape=(32, 32), dtype=float32, device=cpu, 4.28 bits/element)
    """
    planes = {name: _xp.to_device(plane, "cpu") for name, plane in q.planes.items()}
    about = [{"name": name, "dtype": x.dtype.name, "shape": list(x.shape)} for name, x in planes.items()]
    header = json.dumps({"config": q.config(), "planes": about}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + _HEAD.size) % ALIGNMENT)
    if len(header) > _LONGEST_HEADER:
        raise FormatError(
            f"the configuration of {q.format.name!r} takes {len(header)} bytes of JSON; at most {_LONGEST_HEADER} are "
            "written: a format keeps long tables in planes"
        )
    parts: list[Any] = [b"", header]
    end = _HEAD.size + len(header)
    for start, plane in zip(_starts(end, [x.nbytes for x in planes.values()]), planes.values(), strict=True):
        parts += [bytes(start - end), plane.reshape(-1).view(np.uint8).data]
        end = start + plane.nbytes
    parts[0] = _HEAD.pack(MAGIC, BYTES_VERSION, len(header), end)
    return b"".join(parts)


def from_buffer(buffer: Any) -> QuantizedArray:
    """The array of which `to_bytes` made these bytes, without a copy.

    Parameters
    ----------
    buffer : bytes_like
        ``bytes``, ``bytearray``, a contiguous ``memoryview``, a mapped file, a NumPy array of bytes. Nothing in it is
        trusted: every length is checked before memory is taken for it.

    Returns
    -------
    QuantizedArray
        In host memory; ``.to_device("cuda:0")`` moves it. Its planes are read-only views of `buffer` (a plane that is
        not aligned to its dtype there is a copy) and change when somebody writes to that; ``.copy()`` makes them
        independent.

    Raises
    ------
    TypeError
        When `buffer` holds no bytes in host memory.
    FormatError
        When the bytes are not those of a compressed array, are cut off, lie about a length, a dtype or the format, are
        not contiguous, or were written by a newer version.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.linspace(-1, 1, 1024, dtype=np.float32), "nf4")
    >>> again = kb.QuantizedArray.from_buffer(bytearray(q.to_bytes()))
    >>> bool((again.dequantize() == q.dequantize()).all()), again.planes["packed"].flags.writeable
    (True, False)
    """
    view = _contiguous(buffer)
    header, data = _read_head(view)
    try:
        found = read_json(str(header, "utf-8"))
        if not isinstance(found, dict) or not isinstance(found.get("planes"), list):
            raise ValueError("its header is not an object with config and planes")
        format, shape, dtype = read_config(found.get("config"))  # type: ignore[arg-type]
        np.broadcast_to(np.zeros((), dtype), shape)  # refuses what no array can have, and takes no memory
        planes = _views(view, data, _described(found["planes"], format, shape))
        return QuantizedArray(format, planes, shape, dtype)
    except Exception as error:  # a third party's format may raise anything on options that it did not write
        raise FormatError(f"buffer: {_brief(error)}") from error


def _starts(end: int, sizes: list[int]) -> Iterator[int]:
    """Where planes of so many bytes begin, behind what ends at `end`."""
    for nbytes in sizes:
        start = end + -end % ALIGNMENT
        yield start
        end = start + nbytes


def _contiguous(buffer: Any) -> memoryview:
    """The bytes of an argument, as they lie in memory."""
    if _xp.is_cupy(buffer):
        raise TypeError("buffer is a CuPy array; it must be bytes in host memory: pass cupy.asnumpy(buffer)")
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise TypeError(
            f"buffer is {type(buffer).__name__}; it must be bytes, or an object that shares its bytes: a bytearray, "
            "memoryview, mmap or NumPy array"
        ) from error
    except (ValueError, BufferError) as error:
        raise FormatError(f"buffer: its bytes are not to be had: {error}") from error
    if not view.c_contiguous:
        raise FormatError("buffer is not contiguous: pass a copy, such as bytes(buffer)")
    if view.nbytes < _HEAD.size:
        raise FormatError(f"buffer has {view.nbytes} bytes; what to_bytes() returns has more than {_HEAD.size}")
    return view.cast("B")


def _read_head(view: memoryview) -> tuple[memoryview, int]:
    """The header, and where it ends."""
    magic, version, length, total = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(f"buffer begins with {magic!r}; what to_bytes() returns begins with {MAGIC!r}")
    if not 1 <= version <= BYTES_VERSION:
        upgrade = ": upgrade kbitcupy" if version else ""
        raise FormatError(f"buffer has version {version}; this kbitcupy reads up to {BYTES_VERSION}{upgrade}")
    if total != view.nbytes:
        raise FormatError(f"buffer has {view.nbytes} bytes and says that it has {total}; {_CUT}")
    end = _HEAD.size + length
    if length > _LONGEST_HEADER or end > view.nbytes:
        raise FormatError(
            f"buffer: its header is said to have {length} bytes; it has at most {_LONGEST_HEADER}, and ends within the "
            f"{view.nbytes} bytes"
        )
    return view[_HEAD.size : end], end


def _described(
    planes: list[Any], format: Format, shape: tuple[int, ...]
) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of the planes, which must be of the format's names and dtypes.

    Raises
    ------
    ValueError
        Says what is wrong.
    """
    wanted = format.planes(shape)
    found: dict[str, tuple[str, np.dtype, tuple[int, ...]]] = {}
    for plane in planes:
        if not isinstance(plane, dict) or not {"name", "dtype", "shape"} <= plane.keys():
            raise ValueError("a plane is not an object with name, dtype and shape")
        name, dtype, lengths = plane["name"], plane["dtype"], plane["shape"]
        if not isinstance(name, str) or name not in wanted or name in found:
            raise ValueError(f"plane {_brief(name, 80)!r} is not one of {', '.join(wanted)}, or stands there twice")
        if dtype != wanted[name].dtype:
            raise ValueError(f"plane {name!r} is {_brief(dtype, 80)}; {format} has it as {wanted[name].dtype}")
        sized = isinstance(lengths, list) and len(lengths) <= _MOST_DIMENSIONS
        if not sized or not all(type(length) is int and 0 <= length < 1 << 63 for length in lengths):
            raise ValueError(f"plane {name!r} has shape {_brief(lengths, 80)}: no list of non-negative lengths")
        found[name] = name, _xp.named_dtype(dtype), tuple(lengths)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"plane {missing[0]!r} of {format} is missing")
    return list(found.values())


def _views(view: memoryview, end: int, about: list[tuple[str, np.dtype, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """The planes behind the header, which ends at `end`.

    Raises
    ------
    ValueError
        When they do not end where the bytes end.
    """
    content = np.frombuffer(view, np.uint8)
    planes = {}
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in about]
    for start, nbytes, (name, dtype, shape) in zip(_starts(end, sizes), sizes, about, strict=True):
        end = start + nbytes
        if end > view.nbytes:
            raise ValueError(
                f"plane {name!r}, {dtype.name}{_brief(list(shape), 80)}, does not end within the {view.nbytes} bytes"
            )
        plane = content[start:end].view(dtype).reshape(shape)
        if not plane.flags.aligned:
            plane = plane.copy()
        plane.flags.writeable = False
        planes[name] = plane
    if end != view.nbytes:
        raise ValueError(f"its planes end at byte {end}, but it has {view.nbytes} bytes")
    return planes


def _brief(text: Any, length: int = 400) -> str:
    """The beginning of what may quote a large part of the bytes."""
    text = str(text)
    return text if len(text) <= length else f"{text[:length]}..."


# ---- JSON of strangers -----------------------------------------------------------------------------------------------

#: Values of a JSON text that is read: they bound what a short text becomes in memory. A header of safetensors has nine
#: for a tensor of two dimensions, and a compressed tensor some forty: this is room for 100,000 of them in one file.
MOST_VALUES = 1 << 22
_LONGEST_JSON = 100_000_000
_DEEPEST = 100  # levels of JSON; Python's own limit would be found while it is written


def read_json(text: bytes | str) -> Any:
    """JSON of a stranger.

    Raises
    ------
    ValueError
        When it is not JSON, has too many values or nests too deep, or an object has a key twice: readers differ in
        which one they take.
    """
    if len(text) > MOST_VALUES:
        check_values(count_values(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text))

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"key {twice!r} stands twice in one object")
        return found

    try:
        found = json.loads(text, object_pairs_hook=without_duplicates)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    level = [found] if isinstance(found, (dict, list)) else []
    levels = 0
    while level:
        if levels == _DEEPEST:
            raise ValueError(f"it nests too deep: more than {_DEEPEST} levels")
        inside = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inside for value in values if isinstance(value, (dict, list))]
        levels += 1
    return found


def read_json_file(path: str | os.PathLike[str]) -> Any:
    """A file of JSON of a stranger.

    Raises
    ------
    OSError
        When it cannot be read.
    ValueError
        As `read_json`, and when it is too long.
    """
    with open(path, "rb") as file:
        text = file.read(min(os.fstat(file.fileno()).st_size, _LONGEST_JSON) + 1)
    if len(text) > _LONGEST_JSON:
        raise ValueError(f"it is longer than {_LONGEST_JSON} bytes")
    return read_json(text)


def count_values(text: bytes) -> int:
    """How many values a JSON text has, or more: commas and brackets of strings count as well."""
    return sum(map(text.count, (b",", b"[", b"{")))


def check_values(count: int) -> None:
    """Check that a JSON text of so many values, by `count_values`, may be read.

    Raises
    ------
    ValueError
        When it would take gigabytes.
    """
    if count > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values, which would take gigabytes of memory; use shards")
