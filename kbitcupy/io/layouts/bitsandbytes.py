"""bitsandbytes' checkpoints and functions, without PyTorch.

A checkpoint of bitsandbytes is a safetensors file (or shards) in which a 4-bit weight ``W`` is several tensors:

======================================  ==============================  ===============================================
key                                     dtype, shape                    contents
======================================  ==============================  ===============================================
``W``                                   uint8 [(n + 1) // 2, 1]         two codes a byte; or the same bytes under
                                                                        another dtype (``quant_storage``)
``W.absmax``                            float32 [blocks]                or uint8 when it is quantized itself
``W.quant_map``                         float32 [16]                    the table
``W.nested_absmax``                     float32 [blocks / 256]          only with double quantization
``W.nested_quant_map``                  float32 [256]                   likewise: the dynamic map
``W.quant_state.bitsandbytes__nf4``     uint8 (``__fp4`` for FP4)       JSON: quant_type, blocksize, dtype, shape, and
                                                                        nested_blocksize, nested_dtype, nested_offset
======================================  ==============================  ===============================================

A weight of LLM.int8 is ``layer.weight`` int8 [N, K], ``layer.SCB`` float32 [N] (the maximum of each row, 127 times the
scale) and ``layer.weight_format`` uint8 [].

Source: bitsandbytes 0.50, ``functional.py`` (QuantState) and ``nn/modules.py``. What its 0.50.2 wrote is read and
written again to the same bytes, but for the last bit of SCB. Functions have its names and arguments; their codes are
those of its CUDA kernels, with the exceptions that `kbitcupy.formats.codebook.table4` lists.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ... import tables
from ...array import QuantizedArray
from ...backend import xp as _xp
from ...errors import DeviceError, FileError, FormatError
from ...formats.base import Format, get_format
from ...formats.codebook.table4 import NESTED_BLOCK
from ...ops import dequantize, quantize
from ..checkpoint import Checkpoint, save_as
from ..safetensors import CODES, NAMES, Compressed, Entry, Layout, SourceFile, entry_of, read_json, with_configs

#: 4-bit types, which are formats of the same names.
QUANT_TYPES = ("nf4", "fp4")
#: Elements that may share an absmax in 4-bit weights.
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: dtypes that the bytes of a 4-bit weight may be stored under.
STORAGES = ("uint8", "float16", "bfloat16", "float32")

# The zero of FP4's code 8 has a sign only in the kernels.
_QUANT_MAPS = {"nf4": tables.NF4, "fp4": tables.FP4 + np.float32(0)}
_DTYPES = ("float16", "bfloat16", "float32")
_STATE = ".quant_state.bitsandbytes__"
_LONGEST_STATE = 1 << 14
_LONGEST_FLOAT = "-2.2250738585072014e-308"  # no repr of a float is longer
# PyTorch's linspace, from which the dynamic map is made, differs in the last bit between its own versions.
_MAP_TOLERANCE = 2.0**-20


class _State(NamedTuple):
    """What the JSON of a weight says."""

    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: float | None


def _write_state(format: Format, shape: tuple[int, ...], dtype: np.dtype, offset: float | None) -> str:
    """The JSON of a weight, to the byte as bitsandbytes writes it."""
    state: dict[str, Any] = {
        "quant_type": format.name,
        "blocksize": format.block,
        "dtype": _decoded_dtype(dtype).name,
        "shape": list(shape),
    }
    if offset is not None:
        state.update(nested_blocksize=NESTED_BLOCK, nested_dtype="float32", nested_offset=offset)
    return json.dumps(state)


def _decoded_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that bitsandbytes decodes to: it has no float64, which was rounded to float32 in any case."""
    return dtype if dtype.name in _DTYPES else np.dtype(np.float32)


def _read_state(text: bytes, quant_type: str) -> _State:
    """The JSON of a weight, of which nothing can be trusted.

    Raises
    ------
    ValueError
        Says what is wrong.
    """
    if quant_type not in QUANT_TYPES:
        raise ValueError(f"quant_type {quant_type[:100]!r} is unknown; known are {', '.join(QUANT_TYPES)}")
    state = read_json(text)
    if not isinstance(state, dict):
        raise ValueError(f"it is a JSON {type(state).__name__}, not an object")
    nested = "nested_offset" in state
    wanted = {"quant_type": (quant_type,), "blocksize": BLOCKS, "dtype": _DTYPES}
    if nested:
        wanted.update(nested_blocksize=(NESTED_BLOCK,), nested_dtype=("float32",))
    for key, allowed in wanted.items():
        value = state.get(key)
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise ValueError(f"{key} is {str(value)[:100]!r}; allowed is {' or '.join(map(str, allowed))}")
    shape = state.get("shape")
    if not isinstance(shape, list) or not all(type(length) is int and 0 <= length < 1 << 63 for length in shape):
        raise ValueError(f"shape is {str(shape)[:100]}; it must be a list of non-negative integers")
    offset = state.get("nested_offset")
    if nested and (type(offset) is not float or math.isnan(offset)):
        raise ValueError(f"nested_offset is {str(offset)[:100]!r}; it must be a floating-point number, not NaN")
    format = get_format(quant_type, block=state["blocksize"], double_quant=nested)
    return _State(format, tuple(shape), _xp.float_dtype(state["dtype"]), offset)


# ---- reading -------------------------------------------------------------------------------------------------------


class _Weight(NamedTuple):
    """A compressed weight: the tensors it is made of, and the number that is in none of them."""

    owners: Mapping[str, SourceFile]
    offset: float | None


class BitsandbytesCheckpoint(Checkpoint):
    """A `Checkpoint` whose tensors in bitsandbytes' layout are compressed arrays.

    Parameters
    ----------
    path : path_like
        As for `Checkpoint`.

    Attributes
    ----------
    quant_storage : dict of str to str
        The dtype that each 4-bit weight's bytes are stored under.

    Raises
    ------
    FileError
        As `Checkpoint`, and when the keys of a weight do not fit together.
    """

    def _claim(self) -> None:
        self.quant_storage: dict[str, str] = {}
        self._weights: dict[str, _Weight] = {}
        owners = {name: file for file in self.files.values() for name in file.plain}
        claimed = set()
        for key in owners:
            name, state, quant_type = key.partition(_STATE)
            if state:
                claimed |= self._claim_four_bit(name, quant_type, owners)
            elif key == "SCB" or key.endswith(".SCB"):
                claimed |= self._claim_int8(key.removesuffix("SCB"), owners)
        for file in self.files.values():
            file.plain = [name for name in file.plain if name not in claimed]

    def _claim_four_bit(self, name: str, quant_type: str, owners: Mapping[str, SourceFile]) -> set[str]:
        key = f"{name}{_STATE}{quant_type}"
        if name in self._weights:
            raise FileError(f"{owners[key].path}: tensor {key!r}: {name!r} has another state already; keep one of them")
        entry = owners[key].entries[key]
        if entry.dtype != "U8" or len(entry.shape) != 1 or entry.nbytes > _LONGEST_STATE:
            raise FileError(f"{owners[key].path}: tensor {key!r} is {entry}; it must be U8 text in one dimension")
        try:
            format, shape, dtype, offset = _read_state(owners[key].read(key).tobytes(), quant_type)
            _check_shape(shape, dtype)
        except ValueError as error:
            raise FileError(f"{owners[key].path}: tensor {key!r}: {error}") from error
        maps = {f"{name}.quant_map": _QUANT_MAPS[quant_type]}
        if offset is not None:
            maps[f"{name}.nested_quant_map"] = tables.dynamic_map()
        about = f"{key!r} describes {format} of shape {shape}"
        for stored, entry in _four_bit_entries(name, format, shape, dtype).items():
            if stored == key:
                continue
            found = self._find(stored, about, owners)
            if stored == name:
                storage = NAMES.get(found.dtype, found.dtype)
                if storage not in STORAGES:
                    raise FileError(
                        f"{owners[name].path}: tensor {name!r} is {found}; bytes are stored as {', '.join(STORAGES)}"
                    )
                self.quant_storage[name] = storage
                same = found.nbytes == entry.nbytes
            else:
                same = found == entry
            if not same:
                raise FileError(
                    f"{owners[stored].path}: tensor {stored!r} is {found} ({found.nbytes} bytes), but {about}, which "
                    f"needs {entry} ({entry.nbytes} bytes)"
                )
            if stored in maps and not np.allclose(owners[stored].array(stored), maps[stored], _MAP_TOLERANCE, 0):
                raise FileError(f"{owners[stored].path}: tensor {stored!r} is not the table that {about} implies")
        self._add(name, Compressed(format, shape, dtype), [name, key, *_companions(name, format)], offset, owners)
        return {name, key, *_companions(name, format)}

    def _claim_int8(self, prefix: str, owners: Mapping[str, SourceFile]) -> set[str]:
        name, scales, order = (f"{prefix}{key}" for key in ("weight", "SCB", "weight_format"))
        weight = owners[name].entries[name] if name in owners else None
        if weight is None or weight.dtype != "I8":
            return set()  # a layer that kept its float weight
        about = f"{name!r} is {weight}"
        found = self._find(scales, about, owners)
        if len(weight.shape) != 2 or found != entry_of(np.dtype(np.float32), weight.shape[:1], scales):
            raise FileError(
                f"{owners[scales].path}: tensor {scales!r} is {found}, but {about}; it must be I8[N, K] with F32[N]"
            )
        keys = [name, scales]
        if order in owners:
            if owners[order].entries[order].nbytes != 1 or owners[order].read(order)[0] != 0:
                raise FileError(
                    f"{owners[order].path}: tensor {order!r} says that {name!r} is not in row order (0), which only "
                    "old versions of bitsandbytes can read: load it there and save it again"
                )
            keys.append(order)
        format = get_format("int8", granularity=("channel", 0))
        self._add(name, Compressed(format, weight.shape, np.dtype(np.float16)), keys, None, owners)
        return set(keys)

    def _find(self, key: str, about: str, owners: Mapping[str, SourceFile]) -> Entry:
        if key not in owners:
            raise FileError(f"{self.path}: there is no tensor {key!r}, but {about}")
        return owners[key].entries[key]

    def _add(
        self,
        name: str,
        about: Compressed,
        keys: Iterable[str],
        offset: float | None,
        owners: Mapping[str, SourceFile],
    ) -> None:
        owners[name].compressed[name] = about
        self._weights[name] = _Weight({key: owners[key] for key in keys}, offset)

    def stored(self, name: str) -> dict[str, Entry]:
        if name not in self._weights:
            return super().stored(name)
        return {key: file.entries[key] for key, file in self._weights[name].owners.items()}

    def __getitem__(self, name: str) -> np.ndarray | QuantizedArray:
        if name not in self._weights:
            return super().__getitem__(name)
        owners, offset = self._weights[name]
        format, shape, dtype = owners[name].compressed[name]

        def read(key: str) -> np.ndarray:
            return owners[key].array(key)

        if format.name == "int8":
            maxima = read(f"{name.removesuffix('weight')}SCB")
            planes = {"codes": read(name).reshape(-1), "scale": maxima / np.float32(127)}
            return QuantizedArray(format, planes, shape, dtype)
        planes = {"packed": owners[name].raw(name), "absmax": read(f"{name}.absmax")}
        if offset is not None:
            planes["nested_absmax"] = read(f"{name}.nested_absmax")
            with np.errstate(over="ignore"):
                planes["nested_offset"] = np.array([offset], np.float32)
        return QuantizedArray(format, planes, shape, dtype)


def _check_shape(shape: tuple[int, ...], dtype: np.dtype) -> None:
    np.broadcast_to(np.zeros((), dtype), shape)  # refuses what no array can have, and takes no memory


def _companions(name: str, format: Format) -> list[str]:
    """The keys beside a 4-bit weight and its JSON."""
    keys = ["absmax", "quant_map"]
    if "nested_offset" in format.planes((1,)):
        keys += ["nested_absmax", "nested_quant_map"]
    return [f"{name}.{key}" for key in keys]


def _four_bit_entries(name: str, format: Format, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Entry]:
    """The entries of a 4-bit weight; that of the JSON is as long as it can become."""
    planes = format.planes(shape)
    nested = "nested_offset" in planes
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        name: ("uint8", (*planes["packed"].shape, 1)),
        f"{name}.absmax": (planes["absmax"].dtype, planes["absmax"].shape),
        f"{name}.quant_map": ("float32", (16,)),
    }
    if nested:
        shapes[f"{name}.nested_absmax"] = ("float32", planes["nested_absmax"].shape)
        shapes[f"{name}.nested_quant_map"] = ("float32", (256,))
    entries = {key: entry_of(np.dtype(kind), size, f"tensor {key!r}") for key, (kind, size) in shapes.items()}
    longest = len(_write_state(format, shape, dtype, 0.0 if nested else None)) + nested * len(_LONGEST_FLOAT)
    entries[f"{name}{_STATE}{format.name}"] = Entry("U8", (longest,), longest, at_most=True)
    return entries


# ---- writing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BitsandbytesLayout(Layout):
    """bitsandbytes' keys for ``nf4``, ``fp4`` and (one scale for each row) ``int8``.

    Parameters
    ----------
    quant_storage : str or mapping of str to str
        dtype under which the bytes of 4-bit weights are stored: one of `STORAGES` for all, or by name (uint8 for
        those without).
    """

    quant_storage: str | Mapping[str, str] = "uint8"

    def entries(
        self, name: str, format: Format, shape: tuple[int, ...], dtype: np.dtype, taken: Iterable[str], lead: int = 0
    ) -> dict[str, Entry]:
        if lead:
            raise FileError(
                f"tensor {name!r} is a stack of shape {shape}, for which bitsandbytes' layout has no place: save its "
                "members one by one"
            )
        if _is_int8(format, shape):
            prefix = _prefix(name)
            rows = shape[:1]
            entries = {
                name: entry_of(np.dtype(np.int8), shape, name),
                f"{prefix}SCB": entry_of(np.dtype(np.float32), rows, name),
                f"{prefix}weight_format": entry_of(np.dtype(np.uint8), (), name),
            }
        elif format.name in QUANT_TYPES and format.block in BLOCKS:
            entries = _four_bit_entries(name, format, shape, dtype)
            entries[name] = self._packed_entry(name, entries[name])
        else:
            raise FileError(
                f"tensor {name!r} is {format!r} of shape {shape}; bitsandbytes' layout holds nf4 and fp4 in blocks of "
                f"{BLOCKS[0]} to {BLOCKS[-1]}, and matrices of int8 with granularity=('channel', 0), symmetric"
            )
        for key in entries:
            if key != name and key in taken:
                raise FileError(
                    f"{key!r} would be stored for tensor {name!r}, but that is the name of another tensor: rename one "
                    f"of them, or keep {name!r} as it is"
                )
        return entries

    def _packed_entry(self, name: str, entry: Entry) -> Entry:
        storage = self.quant_storage
        if not isinstance(storage, str):
            storage = storage.get(name, "uint8")
        if storage not in STORAGES:
            raise FileError(f"quant_storage is {storage!r}; allowed is {' or '.join(STORAGES)}")
        count, rest = divmod(entry.nbytes, _xp.named_dtype(storage).itemsize)
        if rest:
            raise FileError(
                f"tensor {name!r} packs to {entry.nbytes} bytes, which are no whole number of {storage}: use "
                "quant_storage 'uint8' for it"
            )
        return Entry(CODES[storage], (count, 1), entry.nbytes)

    def arrays(self, name: str, q: QuantizedArray) -> dict[str, np.ndarray]:
        planes = q.get().planes
        if q.format.name == "int8":
            prefix = _prefix(name)
            with np.errstate(over="ignore"):
                maxima = planes["scale"] * np.float32(127)
            return {name: planes["codes"], f"{prefix}SCB": maxima, f"{prefix}weight_format": np.zeros(1, np.uint8)}
        arrays = {
            name: planes["packed"],
            f"{name}.absmax": planes["absmax"],
            f"{name}.quant_map": _QUANT_MAPS[q.format.name],
        }
        offset = None
        if "nested_offset" in planes:
            arrays[f"{name}.nested_absmax"] = planes["nested_absmax"]
            arrays[f"{name}.nested_quant_map"] = tables.dynamic_map()
            offset = float(planes["nested_offset"][0])
        text = _write_state(q.format, q.shape, q.dtype, offset).encode()
        arrays[f"{name}{_STATE}{q.format.name}"] = np.frombuffer(text, np.uint8)
        return arrays

    def metadata(
        self, metadata: Mapping[str, str], before: Mapping[str, Any], configs: Mapping[str, Any]
    ) -> dict[str, str]:
        # Loaders of PyTorch models ask for this key.
        return {"format": "pt", **(with_configs(metadata, before) if before else metadata)}


def _is_int8(format: Format, shape: tuple[int, ...]) -> bool:
    planes = format.planes(shape)
    return (
        format.name == "int8"
        and len(shape) == 2
        and set(planes) == {"codes", "scale"}
        and format.options().get("granularity") in (("channel", 0), ["channel", 0])
    )


def _prefix(name: str) -> str:
    prefix = name.removesuffix("weight")
    if name not in ("weight", f"{prefix.removesuffix('.')}.weight"):
        raise FileError(f"tensor {name!r} is int8; bitsandbytes knows such weights by the name 'weight' of a layer")
    return prefix


# ---- public: files -------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> BitsandbytesCheckpoint:
    """Open a checkpoint of bitsandbytes; its tensors are read when they are asked for.

    Parameters
    ----------
    path : path_like
        As for `kbitcupy.io.load`: a safetensors file, a directory, or the index of shards.

    Returns
    -------
    BitsandbytesCheckpoint
        A read-only mapping: a `QuantizedArray` for each quantized weight (``nf4``, ``fp4``; ``int8`` with
        ``granularity=("channel", 0)`` for LLM.int8, as float16, with SCB / 127 as scale), an array for every other
        tensor. A table or dynamic map that is a last bit off is read as bitsandbytes' own.

    Raises
    ------
    FileError
        When a file is missing or not a safetensors file, or when the keys of a weight do not fit together: packed data
        or absmax of another length, an unknown quant_type, another table, JSON that lies about the shape. The message
        names the key.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> from kbitcupy.io import bitsandbytes
    >>> x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bitsandbytes.save(f"{folder}/a.safetensors", {"up.weight": kb.quantize(x, "nf4", double_quant=True)})
    ...     q = bitsandbytes.load(f"{folder}/a.safetensors")["up.weight"].copy()
    >>> q
    QuantizedArray(nf4:double_quant=true, shape=(64, 64), dtype=float16, device=cpu, 4.14 bits/element)
    """
    return BitsandbytesCheckpoint(path)


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
    quant_storage: str | Mapping[str, str] = "uint8",
) -> None:
    """Write arrays and compressed arrays as a checkpoint that bitsandbytes loads.

    Parameters
    ----------
    path, metadata, force, max_shard_size
        As for `kbitcupy.io.save`. Beside compressed arrays the metadata key ``format`` is ``"pt"`` if it is not given.
    tensors : mapping of str to array_like or QuantizedArray
        Compressed arrays must be ``nf4`` or ``fp4`` in blocks of 32 to 4096, or ``int8`` with
        ``granularity=("channel", 0)`` under a name that ends in ``weight``. Every key gets the bytes that bitsandbytes
        writes for these planes; only of SCB, which is 127 times the scale, the last bit may differ from what `load`
        has read. A float64 array is described as float32.
    quant_storage : str or mapping of str to str, default "uint8"
        dtype under which the bytes of 4-bit weights are stored: ``"uint8"``, ``"float16"``, ``"bfloat16"`` or
        ``"float32"`` for all or by name, such as the `BitsandbytesCheckpoint.quant_storage` of what was loaded.

    Raises
    ------
    FileError
        As `kbitcupy.io.save`, and when a compressed array is in a format that bitsandbytes does not have.

    Examples
    --------
    >>> import tempfile, numpy as np, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.io.bitsandbytes.save(f"{folder}/a.safetensors", {"w": kb.quantize(np.ones((8, 8)), "fp4")})
    ...     for name, array in kb.io.load(f"{folder}/a.safetensors").items():
    ...         print(name, array.dtype, array.shape)
    w.absmax float32 (1,)
    w.quant_map float32 (16,)
    w uint8 (32, 1)
    w.quant_state.bitsandbytes__fp4 uint8 (75,)
    """
    save_as(BitsandbytesLayout(quant_storage), path, tensors, metadata, force=force, max_shard_size=max_shard_size)


# ---- public: functions ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class QuantState:
    """What bitsandbytes keeps beside the codes of an array.

    The functions below take bitsandbytes' own QuantState as well. Where they return one beside torch tensors, its
    arrays are tensors.

    Parameters
    ----------
    absmax : array
        float32[blocks], or uint8[blocks] when it is quantized itself.
    shape : tuple of int, optional
        Shape of the array; None for 8-bit codes, which have it themselves.
    code : array, optional
        float32[16] or float32[256], the table, in host memory.
    blocksize : int
        Elements that share an absmax.
    quant_type : {"nf4", "fp4"}, optional
        None for 8-bit codes.
    dtype : dtype
        dtype of the array.
    offset : array, optional
        float32, what was subtracted from absmax before it was quantized.
    state2 : QuantState, optional
        State of the quantized absmax.
    """

    absmax: Any
    shape: tuple[int, ...] | None = None
    code: Any = None
    blocksize: int = 64
    quant_type: str | None = None
    dtype: Any = None
    offset: Any = None
    state2: QuantState | None = None

    @property
    def nested(self) -> bool:
        """Whether absmax is quantized itself."""
        return self.state2 is not None


def quantize_4bit(
    A: Any,
    absmax: Any = None,
    out: Any = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: str = "uint8",
) -> tuple[Any, QuantState]:
    """Quantize an array to 4 bits, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        float16, bfloat16, float32 or float64, flattened in C order.
    absmax, out : array, optional
        Receive a copy of the state's absmax and of the codes.
    blocksize : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096 (bitsandbytes itself begins with 32).
    compress_statistics : bool, default False
        Quantize absmax itself.
    quant_type : {"fp4", "nf4"}, default "fp4"
        The table.
    quant_storage : str, default "uint8"
        dtype under which the bytes of the codes are returned: ``"uint8"``, ``"float16"``, ``"bfloat16"`` or
        ``"float32"``.

    Returns
    -------
    codes : array
        ``quant_storage`` [(n + 1) // 2 / itemsize, 1], on the device of `A`.
    state : QuantState

    Raises
    ------
    FormatError
        When an argument is not allowed, or the codes are no whole number of `quant_storage`.
    TypeError
        When `A` is not a float array.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> packed, state = bitsandbytes.quantize_4bit(np.linspace(-1, 1, 128, dtype=np.float32), quant_type="nf4")
    >>> packed.shape, state.absmax
    ((64, 1), array([1., 1.], dtype=float32))
    """
    if _xp.is_tensor(A):
        options: dict[str, Any] = {"blocksize": blocksize, "compress_statistics": compress_statistics}
        options |= {"quant_type": quant_type, "quant_storage": quant_storage}
        return _in_torch(quantize_4bit, A, absmax, out, options)
    format = _four_bit_format(quant_type, 64 if blocksize is None else blocksize, compress_statistics)
    if quant_storage not in STORAGES:
        raise FormatError(f"quant_storage is {quant_storage!r}; allowed is {' or '.join(STORAGES)}")
    q = quantize(A, format)
    planes = q.planes
    packed = planes["packed"]
    storage = _xp.named_dtype(quant_storage)
    if packed.size % storage.itemsize:
        raise FormatError(f"the codes are {packed.size} bytes, no whole number of {quant_storage}: use 'uint8'")
    state = QuantState(
        _copied(planes["absmax"], absmax, "absmax"),
        shape=q.shape,
        code=_QUANT_MAPS[quant_type],
        blocksize=format.block,
        quant_type=quant_type,
        dtype=q.dtype,
    )
    if compress_statistics:
        state.offset = planes["nested_offset"].reshape(())
        state.state2 = _blockwise_state(planes["nested_absmax"], NESTED_BLOCK, np.dtype(np.float32))
    return _copied(packed.view(storage).reshape(-1, 1), out, "out"), state


def dequantize_4bit(
    A: Any,
    quant_state: QuantState | None = None,
    absmax: Any = None,
    out: Any = None,
    blocksize: int | None = None,
    quant_type: str = "fp4",
) -> Any:
    """Decode what `quantize_4bit` returned, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        The codes, under any dtype that `quantize_4bit` returns them in.
    quant_state : QuantState, optional
        Their state, of this module's or bitsandbytes' own class. Without it `absmax` and `out` are needed, and
        `blocksize` and `quant_type` say what `A` is.
    absmax : array, optional
        float32[blocks]; ignored beside `quant_state`.
    out : array, optional
        Receives the result.
    blocksize : int, default 64
        Ignored beside `quant_state`.
    quant_type : {"fp4", "nf4"}, default "fp4"
        Ignored beside `quant_state`.

    Returns
    -------
    array
        Shape and dtype of the state, or `out`.

    Raises
    ------
    FormatError
        When `A` or absmax has not the length that the shape needs.
    TypeError, DeviceError
        When an array is of the wrong type or on another device.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> x = np.linspace(-1, 1, 128, dtype=np.float16).reshape(2, 64)
    >>> y = bitsandbytes.dequantize_4bit(*bitsandbytes.quantize_4bit(x, quant_type="nf4"))
    >>> y.shape, y.dtype, float(abs(x - y).max()) < 0.16
    ((2, 64), dtype('float16'), True)
    """
    if _xp.is_tensor(A):
        options = {"blocksize": blocksize, "quant_type": quant_type}
        return _xp.in_torch(dequantize_4bit, "A", A, quant_state, absmax, out=out, **options)
    if quant_state is None:
        if absmax is None or out is None:
            raise FormatError("without quant_state both absmax and out are needed")
        quant_state = QuantState(
            absmax, shape=out.shape, blocksize=64 if blocksize is None else blocksize, quant_type=quant_type,
            dtype=out.dtype,
        )  # fmt: skip
    state = _checked_state(quant_state)
    if state.shape is None:
        raise FormatError("quant_state has no shape: it belongs to 8-bit codes, see dequantize_blockwise")
    format = _four_bit_format(state.quant_type, state.blocksize, state.nested)
    codes = _xp.contiguous(_xp.as_array(A, "A"))
    if codes.dtype.name not in STORAGES:
        raise TypeError(f"A is {codes.dtype}; codes are stored as {', '.join(STORAGES)}")
    planes = {
        "packed": codes.reshape(-1).view(np.uint8),
        "absmax": _xp.contiguous(_xp.as_array(state.absmax, "absmax")),
    }
    if state.state2 is not None:
        if state.state2.blocksize != NESTED_BLOCK:
            raise FormatError(f"state2.blocksize is {state.state2.blocksize}; it must be {NESTED_BLOCK}")
        planes["nested_absmax"] = _xp.contiguous(_xp.as_array(state.state2.absmax, "state2.absmax"))
        planes["nested_offset"] = _xp.as_array(state.offset, "offset").reshape(1)
    return dequantize(QuantizedArray(format, planes, state.shape, state.dtype), out=out)


def quantize_blockwise(
    A: Any, code: Any = None, absmax: Any = None, out: Any = None, blocksize: int = 4096, nested: bool = False
) -> tuple[Any, QuantState]:
    """Quantize an array to 8 bits by the dynamic map, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        float16, bfloat16, float32 or float64.
    code : array, optional
        The dynamic map, float32[256] in host memory: the only table there is.
    absmax, out : array, optional
        Receive a copy of the state's absmax and of the codes.
    blocksize : int, default 4096
        Elements that share an absmax: a power of two from 16 to 4096 (bitsandbytes itself begins with 64).
    nested : bool, default False
        Quantize absmax itself.

    Returns
    -------
    codes : array
        uint8, of the shape of `A`.
    state : QuantState

    Raises
    ------
    FormatError
        When an argument is not allowed.
    TypeError
        When `A` is not a float array.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> codes, state = bitsandbytes.quantize_blockwise(np.array([[0.5, -1.0, 0.0, 1.0]], np.float32))
    >>> codes
    array([[219,   0, 127, 255]], dtype=uint8)
    """
    if _xp.is_tensor(A):
        return _in_torch(quantize_blockwise, A, absmax, out, {"code": code, "blocksize": blocksize, "nested": nested})
    _check_code(code)
    q = quantize(A, get_format("dynamic8", block=blocksize))
    maxima = q.planes["absmax"]
    if nested:
        with _xp.on_device_of(maxima):
            offset = maxima.mean(dtype=np.float64).astype(np.float32)
            inner = quantize(maxima - offset, q.format)
        maxima = inner.planes["codes"]
    state = _blockwise_state(_copied(maxima, absmax, "absmax"), q.format.block, q.dtype)
    if nested:
        state.offset = offset
        state.state2 = _blockwise_state(inner.planes["absmax"], q.format.block, np.dtype(np.float32))
    return _copied(q.planes["codes"].reshape(q.shape), out, "out"), state


def dequantize_blockwise(
    A: Any,
    quant_state: QuantState | None = None,
    absmax: Any = None,
    code: Any = None,
    out: Any = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> Any:
    """Decode what `quantize_blockwise` returned, as bitsandbytes' function of this name.

    Parameters
    ----------
    A : array_like
        uint8 codes.
    quant_state : QuantState, optional
        Their state, of this module's or bitsandbytes' own class. Without it `absmax` is needed, and the result is
        float32 or what `out` is.
    absmax : array, optional
        float32[blocks]; ignored beside `quant_state`.
    code : array, optional
        The dynamic map, float32[256] in host memory: the only table there is.
    out : array, optional
        Receives the result.
    blocksize : int, default 4096
        Ignored beside `quant_state`.
    nested : bool, default False
        Has no effect, as in bitsandbytes: the state knows.

    Returns
    -------
    array
        The shape of `A`; dtype of the state, or `out`.

    Raises
    ------
    FormatError
        When absmax has not the length that the codes need.
    TypeError, DeviceError
        When an array is of the wrong type or on another device.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io import bitsandbytes
    >>> bitsandbytes.dequantize_blockwise(np.array([219, 0, 127, 255], np.uint8), absmax=np.array([2.0], np.float32))
    array([ 1.0015625, -1.9859375,  0.       ,  2.       ], dtype=float32)
    """
    if _xp.is_tensor(A):
        arguments = quant_state, absmax, code
        options = {"blocksize": blocksize, "nested": nested}
        return _xp.in_torch(dequantize_blockwise, "A", A, *arguments, out=out, **options)
    if quant_state is None:
        if absmax is None:
            raise FormatError("without quant_state absmax is needed")
        quant_state = _blockwise_state(absmax, blocksize, np.dtype(np.float32) if out is None else out.dtype)
        quant_state.code = code
    state = _checked_state(quant_state)
    _check_code(state.code)
    codes = _xp.contiguous(_xp.as_array(A, "A"))
    maxima = _xp.contiguous(_xp.as_array(state.absmax, "absmax"))
    if state.state2 is not None:
        with _xp.on_device_of(maxima):
            maxima = dequantize_blockwise(maxima, state.state2) + _xp.as_array(state.offset, "offset")
    planes = {"codes": codes.reshape(-1), "absmax": maxima}
    format = get_format("dynamic8", block=state.blocksize)
    return dequantize(QuantizedArray(format, planes, codes.shape, state.dtype), out=out)


def _four_bit_format(quant_type: Any, block: Any, nested: bool) -> Format:
    if quant_type not in QUANT_TYPES:
        raise FormatError(f"quant_type is {quant_type!r}; allowed is {' or '.join(QUANT_TYPES)}")
    return get_format(quant_type, block=block, double_quant=bool(nested))


def _blockwise_state(absmax: Any, blocksize: int, dtype: np.dtype) -> QuantState:
    return QuantState(absmax, code=tables.dynamic_map(), blocksize=blocksize, dtype=dtype)


def _checked_state(state: Any, argument: str = "quant_state") -> QuantState:
    """A state of this module's class, from one of any class with the same attributes, such as bitsandbytes' own."""
    missing = [field.name for field in fields(QuantState) if not hasattr(state, field.name)]
    if missing:
        raise TypeError(
            f"{argument} is {type(state).__name__} and has no {missing[0]}; it must be a QuantState, as these "
            "functions or bitsandbytes' return"
        )
    made = QuantState(**{field.name: getattr(state, field.name) for field in fields(QuantState)})
    if made.shape is not None:
        made.shape = tuple(made.shape)
    if made.state2 is not None:
        if argument != "quant_state":
            raise FormatError(f"{argument} has a state2 of its own; what is quantized twice has none")
        if made.offset is None:
            raise FormatError("quant_state has a state2 but no offset")
        made.state2 = _checked_state(made.state2, "state2")
    return made


def _check_code(code: Any) -> None:
    if code is None or code is tables.dynamic_map():
        return
    if _xp.is_tensor(code):  # bitsandbytes' own states hold it on the device of the codes
        code = _xp.to_device(_xp.as_array(code, "code"), "cpu")
    table = None if _xp.is_cupy(code) else np.asarray(code)
    if table is None or table.shape != (256,) or not np.allclose(table, tables.dynamic_map(), _MAP_TOLERANCE, 0):
        raise FormatError("code must be bitsandbytes' dynamic map in host memory: leave it away")


def _in_torch(function: Any, A: Any, absmax: Any, out: Any, options: dict[str, Any]) -> tuple[Any, QuantState]:
    """The tensors that `function` makes of the tensor `A`."""
    given = [_xp.as_array(x, name) if _xp.is_tensor(x) else x for x, name in ((absmax, "absmax"), (out, "out"))]
    codes, state = function(_xp.as_array(A, "A"), absmax=given[0], out=given[1], **options)
    state = _state_of_tensors(state)
    if absmax is not None:
        state.absmax = absmax
    return _xp.as_tensor(codes) if out is None else out, state


def _state_of_tensors(state: QuantState) -> QuantState:
    names = [name for name in ("absmax", "code", "offset") if getattr(state, name) is not None]
    inner = None if state.state2 is None else _state_of_tensors(state.state2)
    return replace(state, **{name: _xp.as_tensor(getattr(state, name)) for name in names}, state2=inner)


def _copied(result: Any, given: Any, argument: str) -> Any:
    """`result`, or the array of the caller with a copy of it."""
    if given is None:
        return result
    if not _xp.is_array(given) or given.dtype != result.dtype or given.shape != result.shape:
        got = f"{given.dtype}{list(given.shape)}" if _xp.is_array(given) else type(given).__name__
        raise FormatError(f"{argument} is {got}; it must be an array {result.dtype}{list(result.shape)}")
    if not _xp.same_device(given, result):
        raise DeviceError(f"{argument} is on {_xp.device_of(given)}; the result is on {_xp.device_of(result)}")
    with _xp.on_device_of(given):
        given[...] = result
    return given
