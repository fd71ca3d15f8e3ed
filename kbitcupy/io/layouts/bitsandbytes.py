"""bitsandbytes' layout.

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
written again to the same bytes, but for the last bit of SCB.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ... import tables
from ...array import QuantizedArray
from ...backend import xp as _xp
from ...errors import FileError
from ...formats.base import Format, Plane, get_format
from ...formats.codebook.search import NESTED_BLOCK
from ...serial import read_json
from ..container import Container, Entry, Reader, entry_of
from ..safetensors import SAFETENSORS
from .base import Compressed, Layout

#: 4-bit types, which are formats of the same names.
QUANT_TYPES = ("nf4", "fp4")
#: Elements that may share an absmax in 4-bit weights.
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: dtypes that the bytes of a 4-bit weight may be stored under.
STORAGES = ("uint8", "float16", "bfloat16", "float32")

#: The tables as they are stored: the zero of FP4's code 8 has a sign only in the kernels.
QUANT_MAPS = {"nf4": tables.NF4, "fp4": tables.FP4 + np.float32(0)}
_DTYPES = ("float16", "bfloat16", "float32")
_STATE = ".quant_state.bitsandbytes__"
_LONGEST_STATE = 1 << 14
_LONGEST_FLOAT = "-2.2250738585072014e-308"  # no repr of a float is longer
#: PyTorch's linspace, from which the dynamic map is made, differs in the last bit between its own versions.
MAP_TOLERANCE = 2.0**-20


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


# ---- the layout ----------------------------------------------------------------------------------------------------


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
    name: ClassVar[str] = "bitsandbytes"
    container: ClassVar[Container] = SAFETENSORS
    linear_only: ClassVar[bool] = True
    loads: ClassVar[str] = "nf4 and fp4"
    loads_mixed: ClassVar[bool] = True

    def recognise(self, reader: Reader) -> dict[str, Compressed]:
        found: dict[str, Compressed] = {}
        for key in reader.names:
            name, state, quant_type = key.partition(_STATE)
            if state:
                if name in found:
                    raise FileError(f"{_where(reader, key)}: {name!r} has another state already; keep one of them")
                found[name] = _four_bit(name, quant_type, reader)
            elif key == "SCB" or key.endswith(".SCB"):
                prefix = key.removesuffix("SCB")
                one = _int8(prefix, reader)
                if one is not None:
                    found[f"{prefix}weight"] = one
        return found

    def entries(
        self, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Entry]:
        if any(planes[key].shape != spec.shape for key, spec in format.planes(shape).items()):
            raise FileError(
                f"tensor {name!r} is a stack of shape {shape}, for which bitsandbytes' layout has no place: save its "
                "members one by one"
            )
        if _is_int8(format, shape):
            prefix = _prefix(name)
            return {
                name: entry_of(Plane("int8", shape)),
                f"{prefix}SCB": entry_of(Plane("float32", shape[:1])),
                f"{prefix}weight_format": entry_of(Plane("uint8", ())),
            }
        if format.name in QUANT_TYPES and format.block in BLOCKS:
            entries = _four_bit_entries(name, format, planes, shape, dtype)
            return {**entries, name: self._packed_entry(name, entries[name])}
        raise FileError(
            f"tensor {name!r} is {format!r} of shape {shape}; bitsandbytes' layout holds nf4 and fp4 in blocks of "
            f"{BLOCKS[0]} to {BLOCKS[-1]}, and matrices of int8 with granularity=('channel', 0), symmetric"
        )

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
        return Entry(storage, (count, 1), entry.nbytes)

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
            f"{name}.quant_map": QUANT_MAPS[q.format.name],
        }
        offset = None
        if "nested_offset" in planes:
            arrays[f"{name}.nested_absmax"] = planes["nested_absmax"]
            arrays[f"{name}.nested_quant_map"] = tables.dynamic_map()
            offset = float(planes["nested_offset"][0])
        text = _write_state(q.format, q.shape, q.dtype, offset).encode()
        arrays[f"{name}{_STATE}{q.format.name}"] = np.frombuffer(text, np.uint8)
        return arrays

    def metadata(self, metadata: Mapping[str, Any], configs: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": "pt", **metadata}  # loaders of PyTorch models ask for this key

    def is_natural(self, format: Format) -> bool:
        return format.name in QUANT_TYPES and format.block in BLOCKS

    def quantization_config(
        self, formats: Mapping[str, tuple[Format, str]], ignored: Sequence[str], prefix: str
    ) -> dict[str, Any]:
        """As transformers' BitsAndBytesConfig; 4-bit layers compute in the dtype that their weights decode to."""
        four_bit = [name for name, (format, _) in formats.items() if format.name in QUANT_TYPES]
        if four_bit and len(four_bit) < len(formats):
            other = next(name for name in formats if name not in four_bit)
            raise FileError(
                f"tensor {four_bit[0]!r} has 4 bits and {other!r} has 8; a model of bitsandbytes has one of the two"
            )
        about: dict[str, Any] = {
            "quant_method": self.name,
            "load_in_4bit": bool(four_bit),
            "load_in_8bit": not four_bit,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": list(ignored),
            "llm_int8_threshold": 6.0,
        }
        if four_bit:
            format, dtype = formats[four_bit[0]]
            storage = self.quant_storage
            about["bnb_4bit_compute_dtype"] = dtype if dtype in _DTYPES else "float32"
            about["bnb_4bit_quant_storage"] = storage if isinstance(storage, str) else "uint8"
            about["bnb_4bit_quant_type"] = format.name
            about["bnb_4bit_use_double_quant"] = bool(format.options()["double_quant"])
        return about


# ---- reading -------------------------------------------------------------------------------------------------------


def _four_bit(name: str, quant_type: str, reader: Reader) -> Compressed:
    """A 4-bit weight from its JSON, of which nothing can be trusted."""
    key = f"{name}{_STATE}{quant_type}"
    entry = reader.entry(key)
    if entry.dtype != "uint8" or len(entry.shape) != 1 or entry.nbytes > _LONGEST_STATE:
        raise FileError(f"{_where(reader, key)} is {entry}; it must be uint8 text in one dimension")
    try:
        format, shape, dtype, offset = _read_state(reader.read(key).tobytes(), quant_type)
        np.broadcast_to(np.zeros((), dtype), shape)  # refuses what no array can have, and takes no memory
    except ValueError as error:
        raise FileError(f"{_where(reader, key)}: {error}") from error
    maps = {f"{name}.quant_map": QUANT_MAPS[quant_type]}
    if offset is not None:
        maps[f"{name}.nested_quant_map"] = tables.dynamic_map()
    about = f"{key!r} describes {format} of shape {shape}"
    wanted = _four_bit_entries(name, format, format.planes(shape), shape, dtype)
    del wanted[key]
    storage = "uint8"
    for stored, entry in wanted.items():
        found = _find(stored, about, reader)
        same = found == entry
        if stored == name:
            storage = found.dtype
            if storage not in STORAGES:
                raise FileError(f"{_where(reader, name)} is {found}; bytes are stored as {', '.join(STORAGES)}")
            same = found.nbytes == entry.nbytes
        if not same:
            raise FileError(
                f"{_where(reader, stored)} is {found} ({found.nbytes} bytes), but {about}, which needs {entry} "
                f"({entry.nbytes} bytes)"
            )
        if stored in maps and not np.allclose(reader.array(stored), maps[stored], MAP_TOLERANCE, 0):
            raise FileError(f"{_where(reader, stored)} is not the table that {about} implies")
    planes = functools.partial(_four_bit_planes, name, offset)
    return Compressed(format, shape, dtype, (*wanted, key), planes, {"quant_storage": storage})


def _four_bit_planes(name: str, offset: float | None, reader: Reader) -> dict[str, np.ndarray]:
    planes = {"packed": reader.raw(name), "absmax": reader.array(f"{name}.absmax")}
    if offset is not None:
        planes["nested_absmax"] = reader.array(f"{name}.nested_absmax")
        with np.errstate(over="ignore"):
            planes["nested_offset"] = np.array([offset], np.float32)
    return planes


def _int8(prefix: str, reader: Reader) -> Compressed | None:
    """A weight of LLM.int8; None for a layer that kept its float weight."""
    name, scales, order = (f"{prefix}{key}" for key in ("weight", "SCB", "weight_format"))
    weight = reader.entry(name) if name in reader.names else None
    if weight is None or weight.dtype != "int8":
        return None
    about = f"{name!r} is {weight}"
    found = _find(scales, about, reader)
    if len(weight.shape) != 2 or found != entry_of(Plane("float32", weight.shape[:1])):
        raise FileError(f"{_where(reader, scales)} is {found}, but {about}; it must be int8[N, K] with float32[N]")
    stored = [name, scales]
    if order in reader.names:
        if reader.entry(order).nbytes != 1 or reader.read(order)[0] != 0:
            raise FileError(
                f"{_where(reader, order)} says that {name!r} is not in row order (0), which only old versions of "
                "bitsandbytes can read: load it there and save it again"
            )
        stored.append(order)
    format = get_format("int8", granularity=("channel", 0))
    planes = functools.partial(_int8_planes, name, scales)
    return Compressed(format, weight.shape, np.dtype(np.float16), tuple(stored), planes)


def _int8_planes(name: str, scales: str, reader: Reader) -> dict[str, np.ndarray]:
    return {"codes": reader.array(name).reshape(-1), "scale": reader.array(scales) / np.float32(127)}


def _find(key: str, about: str, reader: Reader) -> Entry:
    if key not in reader.names:
        raise FileError(f"{reader.path}: there is no tensor {key!r}, but {about}")
    return reader.entry(key)


def _where(reader: Reader, key: str) -> str:
    return f"{reader.file_of(key).path}: tensor {key!r}"


# ---- writing -------------------------------------------------------------------------------------------------------


def _four_bit_entries(
    name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
) -> dict[str, Entry]:
    """The entries of a 4-bit weight, its own first; that of the JSON is as long as it can become."""
    nested = "nested_offset" in planes
    specs = {
        name: Plane("uint8", (*planes["packed"].shape, 1)),
        f"{name}.absmax": planes["absmax"],
        f"{name}.quant_map": Plane("float32", (16,)),
    }
    if nested:
        specs[f"{name}.nested_absmax"] = planes["nested_absmax"]
        specs[f"{name}.nested_quant_map"] = Plane("float32", (256,))
    entries = {key: entry_of(spec) for key, spec in specs.items()}
    longest = len(_write_state(format, shape, dtype, 0.0 if nested else None)) + nested * len(_LONGEST_FLOAT)
    entries[f"{name}{_STATE}{format.name}"] = Entry("uint8", (longest,), longest, at_most=True)
    return entries


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
