"""The layout of compressed-tensors, which transformers and vLLM load: integers of 8 and 4 bits.

A matrix ``layer.weight`` [N, K] of b bits becomes

=============================  =======================  ============================================================
key                            dtype, shape             contents
=============================  =======================  ============================================================
``layer.weight_packed``        int32 [N, ceil(Kb/32)]   q + 2^(b-1), from the lowest bits of a row's words on; the
                                                        bits behind a row are 0
``layer.weight_scale``         [N, G] of the model's    one for each of G groups of K / G elements, G = 1 for one a
                               dtype                    row
``layer.weight_zero_point``    int32 [ceil(Nb/32), G]   only with zero points: z + 2^(b-1), packed along N
``layer.weight_shape``         int64 [2]                N and K
=============================  =======================  ============================================================

and stands for ``scale * (q - z)``. A tensor with one scale is written with that scale for each row. In a folder whose
``config.json`` says "compressed-tensors", ``int-quantized`` is read, too: ``layer.weight`` int8 [N, K] beside its
``weight_scale`` ([N, G] or [1]) and ``weight_zero_point`` (int8, of the same shape).

The product is taken in the dtype of the scales, so a scale is a number of that dtype before codes are chosen: the one
nearest to the scale of the format, the next below where the largest element would come back infinite, and the least one
above 0 in place of 0.

Source: compressed-tensors 0.20, ``compressors/pack_quantized``, ``quantization/lifecycle/forward.py``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...array import QuantizedArray
from ...backend import xp as _xp
from ...errors import FileError
from ...formats.affine.levels import ENDS
from ...formats.base import Choice, Format, Plane, get_format
from ...formats.granularity import blocks_of
from ...ops import quantize
from ..container import Container, Entry, Reader, entry_of
from ..huggingface import quantization_of, read_config
from ..safetensors import SAFETENSORS
from .base import Compressed, Layout

_FORMATS = ("int8", "int4", "uint8", "uint4")
_DTYPES = ("float16", "bfloat16", "float32")
_WEIGHT = "weight"
_METHOD, _PACKED = "compressed-tensors", "pack-quantized"
_WORD = 32


class CompressedTensorsLayout(Layout):
    """compressed-tensors' keys for ``int8``, ``int4``, ``uint8`` and ``uint4``."""

    name: ClassVar[str] = "compressed-tensors"
    container: ClassVar[Container] = SAFETENSORS
    linear_only: ClassVar[bool] = True
    loads: ClassVar[str] = "int8 and int4"

    def recognise(self, reader: Reader) -> dict[str, Compressed]:
        found: dict[str, Compressed] = {}
        names = set(reader.names)
        said: dict[Path, set[int] | None] = {}  # by folder
        for key in reader.names:
            file = reader.file_of(key)
            if file.kind != SAFETENSORS.name:
                continue
            folder = file.path.parent
            if folder not in said:
                said[folder] = _bits_of(folder)
            if _is_one(key, f"{_WEIGHT}_packed"):
                one = _packed(key.removesuffix("_packed"), reader, names, said[folder])
            elif said[folder] is not None and _is_one(key, _WEIGHT) and file.entries[key].dtype == "int8":
                one = _plain(key, reader, names)
            else:
                continue
            if one is not None:
                found[key.removesuffix("_packed")] = one
        return found

    def entries(
        self, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Entry]:
        if not _is_one(name, _WEIGHT) or len(shape) != 2 or not math.prod(shape):
            raise FileError(
                f"tensor {name!r} of shape {shape}: compressed-tensors has matrices called 'weight' of a layer: keep "
                "it as it is (keep=, --keep), or take layout='kbitcupy' (--layout kbitcupy)"
            )
        bits, groups = _check(name, format, planes, shape), _groups(name, format, shape)
        rows, columns = shape
        entries = {
            f"{name}_packed": entry_of(Plane("int32", (rows, _words(columns, bits)))),
            f"{name}_scale": entry_of(Plane(_stored_dtype(dtype), (rows, groups))),
            f"{name}_shape": entry_of(Plane("int64", (2,))),
        }
        if "zero_point" in planes:
            entries[f"{name}_zero_point"] = entry_of(Plane("int32", (_words(rows, bits), groups)))
        return entries

    def arrays(self, name: str, q: QuantizedArray) -> dict[str, np.ndarray]:
        planes = q.get().planes
        (rows, columns), bits, groups = q.shape, int(q.format.bits), _groups(name, q.format, q.shape)
        middle = _middle(q.format, bits)
        scale = planes["scale"].astype(np.float32)
        dtype = _xp.named_dtype(_stored_dtype(q.dtype))
        with np.errstate(over="ignore", invalid="ignore"):
            stored = scale.astype(dtype)
        same = (stored.astype(np.float32) == scale) & np.isfinite(scale) & (scale >= 0)
        if not same.all():
            raise FileError(
                f"tensor {name!r} has the scale {scale[~same][0]}, for which {dtype.name} has no number: give quantize "
                "scales of that dtype (scale=), or let kb.io.quantize_file do it, or take layout='kbitcupy'"
            )
        arrays = {
            f"{name}_packed": _pack_codes(planes["codes"], rows, columns, bits, middle),
            f"{name}_scale": np.ascontiguousarray(np.broadcast_to(stored.reshape(-1, groups), (rows, groups))),
            f"{name}_shape": np.array(q.shape, np.int64),
        }
        if "zero_point" in planes:
            zero = planes["zero_point"].astype(np.int32) + middle
            zero = np.broadcast_to(np.clip(zero, 0, (1 << bits) - 1).reshape(-1, groups), (rows, groups))
            packed = _pack_rows(np.ascontiguousarray(zero.T.astype(np.uint8)), bits)
            arrays[f"{name}_zero_point"] = np.ascontiguousarray(packed.T)
        return arrays

    def metadata(self, metadata: Mapping[str, Any], configs: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": "pt", **metadata}  # loaders of PyTorch models ask for this key

    def is_natural(self, format: Format) -> bool:
        """Not with zero points: see `load_note`."""
        return format.name in _FORMATS and set(format.planes((1, 1))) == {"codes", "scale"}

    def load_note(self, formats: Iterable[Format]) -> str:
        if all("zero_point" not in format.planes((1, 1)) for format in formats):
            return super().load_note(formats)
        return (
            "transformers 5.23 does not load zero points of compressed-tensors, its own neither (they are packed in the"
            " file and not in the model): take a format without, such as int4:block=128, for it"
        )

    def given_by(self, choice: Choice) -> Callable[[Any], Mapping[str, Any]] | None:
        format, given = choice
        if format.name not in _FORMATS or "scale" in given:
            return None
        return functools.partial(_rounded, format)

    def quantization_config(
        self, formats: Mapping[str, tuple[Format, str]], ignored: Sequence[str], prefix: str
    ) -> dict[str, Any]:
        schemes: dict[tuple[Any, ...], list[str]] = {}
        for name, (format, _) in formats.items():
            granularity = format.options()["granularity"]
            group = int(granularity[1]) if granularity[0] == "group" else None
            scheme = int(format.bits), "zero_point" not in format.planes((1, 1)), group
            schemes.setdefault(scheme, []).append(name)
        groups = {}
        for number, ((bits, symmetric, group), names) in enumerate(schemes.items()):
            targets = ["Linear"] if len(schemes) == 1 else [_target(name, prefix) for name in names]
            weights = {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if group is None else "group",
                "group_size": group,
                "dynamic": False,
            }
            groups[f"group_{number}"] = {
                "format": _PACKED,
                "targets": targets,
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        return {
            "quant_method": _METHOD,
            "format": _PACKED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }


def _target(name: str, prefix: str) -> str:
    """What tells a layer by its name, which in a base model lacks the prefix."""
    module = name.removesuffix(f".{_WEIGHT}")
    return f"re:({re.escape(prefix)})?{re.escape(module.removeprefix(prefix))}$" if prefix else module


def _is_one(name: str, last: str) -> bool:
    return name == last or name.endswith(f".{last}")


def _stored_dtype(dtype: np.dtype) -> str:
    return dtype.name if dtype.name in _DTYPES else "float32"


def _words(length: int, bits: int) -> int:
    return -(-length * bits // _WORD)


def _middle(format: Format, bits: int) -> int:
    """What is added to a code of the format to give one without a sign."""
    return 1 << bits - 1 if format.name.startswith("int") else 0


# ---- scales ----------------------------------------------------------------------------------------------------------


def _rounded(format: Format, x: Any) -> dict[str, Any]:
    """The scales of an array as numbers of its dtype, and its zero points, as `quantize` is given them."""
    if x.dtype == np.float32 or not x.size:
        return {}
    planes = quantize(x, format).planes
    dtype = _xp.named_dtype(_stored_dtype(x.dtype))
    scale = _xp.to_device(planes["scale"], "cpu").astype(np.float32)
    levels: Any = format.levels  # type: ignore[attr-defined] # of all formats of this layout
    zero: Any = levels.zero
    given = {}
    if "zero_point" in planes:
        zero = _xp.to_device(planes["zero_point"], "cpu").astype(np.int32)
        given["zero_point"] = planes["zero_point"]
    # What max|x| becomes, and the farthest code from the zero point.
    far = np.asarray(np.maximum(levels.qmax - zero, zero - levels.qmin), np.float32)
    clipped = format.options().get("percentile") is not None
    reach = np.float32(levels.divisor) if levels.symmetric and not clipped else far
    limit = np.float32(ENDS[dtype.name].limit)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        stored = scale.astype(dtype)
        bits = stored.view(f"u{dtype.itemsize}")
        bits[(bits == 0) & (scale > 0)] = 1
        bits[stored.astype(np.float32) * reach > limit] -= 1
        # One less may be so much less that max|x| becomes one step more.
        used = stored.astype(np.float32)
        farther = (used * far > limit) & (np.rint(scale * reach / used) > reach)
        stored[farther] = np.broadcast_to((limit / far).astype(dtype), stored.shape)[farther]
        bits[farther & (stored.astype(np.float32) * far > limit)] -= 1
    with _xp.on_device_of(x):
        given["scale"] = _xp.to_device(stored.astype(np.float32), _xp.device_of(x))
    return given


def _check(name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    """The bits of a format that this layout has."""
    if format.name not in _FORMATS or not planes.keys() <= {"codes", "scale", "zero_point"}:
        raise FileError(
            f"tensor {name!r} is {format!r} of shape {shape}; compressed-tensors holds {', '.join(_FORMATS)}, with an "
            "integer for a zero point or none"
        )
    if any(planes[key].shape != spec.shape for key, spec in format.planes(shape).items()):
        raise FileError(
            f"tensor {name!r} is a stack of shape {shape}, for which compressed-tensors has no place: save its members "
            "one by one"
        )
    return int(format.bits)


def _groups(name: str, format: Format, shape: tuple[int, ...]) -> int:
    """Scales of a row."""
    columns = shape[1]
    granularity = format.options()["granularity"]
    blocks = blocks_of(shape, granularity if isinstance(granularity, str) else tuple(granularity))
    if granularity == "tensor" or blocks.layout == blocks_of(shape, "token").layout:
        return 1
    group = int(granularity[1])
    if granularity[0] != "group" or columns % group:
        raise FileError(
            f"tensor {name!r} of shape {shape} is {format!r}; compressed-tensors has one scale for a row, or for whole "
            "groups of one: keep it as it is (keep=, --keep), take another group, or layout='kbitcupy' (--layout "
            "kbitcupy)"
        )
    return columns // group


# ---- codes -----------------------------------------------------------------------------------------------------------


def _pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of rows of codes without a sign, one a byte."""
    rows, columns = codes.shape
    padded = np.zeros((rows, _words(columns, bits) * (_WORD // bits)), np.uint8)
    padded[:, :columns] = codes
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << np.uint8(4)
    return padded.view("<i4").astype(np.int32, copy=False)


def _unpack_rows(words: np.ndarray, columns: int, bits: int) -> np.ndarray:
    """The codes, one a byte, of rows of words."""
    found = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    if bits == 4:
        found = np.stack((found & np.uint8(15), found >> np.uint8(4)), axis=-1).reshape(len(words), -1)
    return found[:, :columns]


def _pack_codes(codes: np.ndarray, rows: int, columns: int, bits: int, middle: int) -> np.ndarray:
    """The words of the plane ``codes``."""
    flip = np.uint8(middle | middle << 4 if bits == 4 else middle)  # to add the middle is to turn the highest bit
    flipped = codes.reshape(-1).view(np.uint8) ^ flip
    if columns * bits % _WORD == 0:
        return flipped.view("<i4").reshape(rows, -1).astype(np.int32, copy=False)
    if bits == 4:
        flipped = np.stack((flipped & np.uint8(15), flipped >> np.uint8(4)), axis=-1).reshape(-1)[: rows * columns]
    return _pack_rows(flipped.reshape(rows, columns), bits)


def _codes_of(words: np.ndarray, columns: int, bits: int) -> np.ndarray:
    """The plane ``codes`` of a format with a sign, uint8."""
    middle = 1 << bits - 1
    flip = np.uint8(middle | middle << 4 if bits == 4 else middle)
    if columns * bits % _WORD == 0:
        return np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8).reshape(-1) ^ flip
    codes = _unpack_rows(words, columns, bits).reshape(-1)
    if bits == 4:
        size = codes.size
        codes = np.append(codes, np.uint8(0)) if size % 2 else codes
        codes = (codes[::2] | codes[1::2] << np.uint8(4)) ^ flip
        if size % 2:
            codes[-1] &= np.uint8(15)
        return codes
    return codes ^ flip


# ---- reading ---------------------------------------------------------------------------------------------------------


def _bits_of(folder: Path) -> set[int] | None:
    """The widths of integers that a folder's ``config.json`` speaks of; None where it does not name this layout."""
    config = read_config(folder)
    about = {} if config is None else quantization_of(config)
    groups = about.get("config_groups")
    if about.get("quant_method") != _METHOD or not isinstance(groups, dict):
        return None
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) and weights.get("type", "int") == "int" else None
        if isinstance(bits, int):
            found.add(bits)
    return found


def _packed(name: str, reader: Reader, names: set[str], said: set[int] | None) -> Compressed | None:
    """A packed matrix; None for one of other widths, or whose columns are in another order."""
    key, keys = f"{name}_packed", {each: f"{name}_{each}" for each in ("scale", "shape", "zero_point", "g_idx")}
    packed = reader.entry(key)
    if packed.dtype != "int32" or len(packed.shape) != 2 or keys["g_idx"] in names:
        return None
    about = f"{key!r} is {packed}"
    shape_entry = _find(keys["shape"], about, reader, names)
    if shape_entry.dtype not in ("int64", "int32") or shape_entry.shape != (2,):
        raise FileError(f"{_where(reader, keys['shape'])} is {shape_entry}, but {about}; it must be two integers")
    rows, columns = (int(length) for length in reader.array(keys["shape"]))
    if rows != packed.shape[0] or not 0 < columns <= packed.shape[1] * _WORD:
        raise FileError(f"{_where(reader, keys['shape'])} says {rows} x {columns}, but {about}")
    fitting = [bits for bits in (4, 8) if packed.shape[1] == _words(columns, bits) and (said is None or bits in said)]
    if not fitting:
        return None
    if len(fitting) > 1:
        raise FileError(f"{_where(reader, key)} may hold 4 or 8 bits of {rows} x {columns}; config.json must say which")
    bits = fitting[0]
    groups = _scales(keys["scale"], (rows, columns), about, reader, names)
    stored = [key, keys["scale"], keys["shape"]]
    if keys["zero_point"] in names:
        zero = reader.entry(keys["zero_point"])
        if zero != entry_of(Plane("int32", (_words(rows, bits), groups or 1))):
            raise FileError(f"{_where(reader, keys['zero_point'])} is {zero}, which does not fit {about}")
        stored.append(keys["zero_point"])
    planes = functools.partial(_read_packed, name, (rows, columns), bits, len(stored) == 4)
    return _compressed(name, bits, (rows, columns), groups, stored, len(stored) == 4, planes, reader)


def _plain(name: str, reader: Reader, names: set[str]) -> Compressed | None:
    """A matrix of bytes; None for one without scales."""
    weight, scale, zero_point = reader.entry(name), f"{name}_scale", f"{name}_zero_point"
    if scale not in names or len(weight.shape) != 2 or not weight.size:
        return None
    about = f"{name!r} is {weight}"
    groups = _scales(scale, weight.shape, about, reader, names)
    stored = [name, scale]
    if zero_point in names:
        if (found := reader.entry(zero_point)).dtype != "int8" or found.shape != reader.entry(scale).shape:
            raise FileError(f"{_where(reader, zero_point)} is {found}, which does not fit {about}")
        stored.append(zero_point)
    planes = functools.partial(_read_plain, name, len(stored) == 3)
    return _compressed(name, 8, weight.shape, groups, stored, len(stored) == 3, planes, reader)


def _compressed(
    name: str,
    bits: int,
    shape: tuple[int, ...],
    groups: int,
    stored: Sequence[str],
    zero: bool,
    planes: Callable[[Reader], Mapping[str, np.ndarray]],
    reader: Reader,
) -> Compressed:
    granularity: Any = ("group", shape[1] // groups) if groups > 1 else ("channel", 0) if groups else "tensor"
    format = get_format(f"int{bits}", granularity=granularity, symmetric=not zero)
    dtype = _xp.named_dtype(reader.entry(f"{name}_scale").dtype)
    return Compressed(format, shape, dtype, tuple(stored), planes)


def _scales(key: str, shape: tuple[int, ...], about: str, reader: Reader, names: set[str]) -> int:
    """Scales of a row; 0 where there is one for all rows."""
    found = _find(key, about, reader, names)
    if found.dtype in _DTYPES and found.shape == (1,):
        return 0
    if (
        found.dtype not in _DTYPES
        or len(found.shape) != 2
        or found.shape[0] != shape[0]
        or not found.shape[1]
        or shape[1] % found.shape[1]
    ):
        raise FileError(
            f"{_where(reader, key)} is {found}, but {about} for a matrix of shape {tuple(shape)}; it must be a number "
            f"of {', '.join(_DTYPES)} for each row, or for each of equal groups of one"
        )
    return found.shape[1]


def _find(key: str, about: str, reader: Reader, names: set[str]) -> Entry:
    if key not in names:
        raise FileError(f"{reader.path}: there is no tensor {key!r}, but {about}")
    return reader.entry(key)


def _where(reader: Reader, key: str) -> str:
    return f"{reader.file_of(key).path}: tensor {key!r}"


def _read_scales(name: str, reader: Reader) -> np.ndarray:
    scale = reader.array(f"{name}_scale").reshape(-1).astype(np.float32)
    good = np.isfinite(scale) & (scale >= 0)
    if not good.all():
        raise FileError(
            f"{_where(reader, f'{name}_scale')} holds {scale[~good][0]}; a scale must be finite and not negative"
        )
    return scale


def _read_packed(name: str, shape: tuple[int, int], bits: int, zero: bool, reader: Reader) -> dict[str, np.ndarray]:
    codes = _codes_of(reader.array(f"{name}_packed"), shape[1], bits)
    planes = {"codes": codes.view(np.int8) if bits == 8 else codes, "scale": _read_scales(name, reader)}
    if zero:
        words = np.ascontiguousarray(reader.array(f"{name}_zero_point").T)
        points = _unpack_rows(words, shape[0], bits).T.astype(np.int32) - (1 << bits - 1)
        planes["zero_point"] = np.ascontiguousarray(points).reshape(-1)
    return planes


def _read_plain(name: str, zero: bool, reader: Reader) -> dict[str, np.ndarray]:
    planes = {"codes": reader.array(name).reshape(-1), "scale": _read_scales(name, reader)}
    if zero:
        planes["zero_point"] = reader.array(f"{name}_zero_point").reshape(-1).astype(np.int32)
    return planes
