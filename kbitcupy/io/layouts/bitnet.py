"""BitNet's layouts: that of transformers' checkpoints, and I2_S of bitnet.cpp's GGUF files.

A linear layer of a checkpoint of transformers is ``layer.weight``, uint8 [N / 4, K] (`kbitcupy.io.layouts.trits`), and
``layer.weight_scale``, one number in the model's dtype. Only ``config.json`` beside says that this is BitNet
(``quantization_config`` with ``quant_method`` "bitnet") and what the number means: with ``linear_class`` "bitlinear",
also where there is none, products are divided by it, with "autobitlinear" multiplied.

A GGUF file of bitnet.cpp has type 36, which ggml has given up, for n / 4 + 32 bytes of n elements, and 40 as
``general.file_type``; a BitNet model is ``bitnet-b1.58`` there, which llama.cpp does not know.

Sources: transformers 5.23, ``integrations/bitnet.py``; microsoft/BitNet, ``utils/convert-hf-to-gguf-bitnet.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...array import QuantizedArray
from ...backend import xp as _xp
from ...errors import FileError
from ...formats.base import Format, Plane, get_format
from ..container import Container, Entry, Reader, entry_of
from ..gguf import GgufReader
from ..huggingface import quantization_of, read_config
from ..safetensors import SAFETENSORS, SafetensorsReader
from . import trits
from .base import Compressed, Layout
from .gguf import GgufLayout

#: What a product is done with ``weight_scale``, by the class of the layers.
CONVENTIONS = {"bitlinear": "divides", "autobitlinear": "multiplies"}
_WEIGHT, _SCALE = "weight", "weight_scale"
_DTYPES = ("float16", "bfloat16", "float32")
# bitnet.cpp's type, file type, and what its rows consist of.
_TYPE, _FILE_TYPE, _ROW = "type36", 40, 128


@dataclass(frozen=True)
class BitnetLayout(Layout):
    """transformers' keys for ``ternary`` with one scale.

    Parameters
    ----------
    weight_scale : {"divides", "multiplies"}, optional
        What the number does; by default what ``config.json`` says of a file to read, and ``"divides"`` of one to write.
    """

    weight_scale: str | None = None
    name: ClassVar[str] = "bitnet"
    container: ClassVar[Container] = SAFETENSORS

    def recognise(self, reader: Reader) -> dict[str, Compressed]:
        found: dict[str, Compressed] = {}
        names = set(reader.names)
        conventions: dict[Any, str | None] = {}  # by folder
        for name in reader.names:
            file = reader.file_of(name)
            entry = file.entries[name]
            if entry.dtype != "uint8" or len(entry.shape) != 2 or not _is_weight(name):
                continue
            if not isinstance(file, SafetensorsReader):
                continue
            folder = file.path.parent
            if folder not in conventions:
                conventions[folder] = self._convention(folder)
            convention = conventions[folder]
            if convention is None:
                continue
            scale = _scale_name(name)
            if scale not in names:
                raise FileError(f"{file.path}: tensor {name!r} lacks its scale: there is no tensor {scale!r}")
            about = reader.entry(scale)
            if about.dtype not in _DTYPES or about.shape not in ((), (1,)):
                raise FileError(
                    f"{file.path}: tensor {scale!r} is {about}; it must be one number of {', '.join(_DTYPES)}"
                )
            shape = (4 * entry.shape[0], entry.shape[1])
            planes = functools.partial(_planes, name, scale, convention)
            options = {"weight_scale": convention}
            found[name] = Compressed(
                get_format("ternary"), shape, _xp.named_dtype(about.dtype), (name, scale), planes, options
            )
        return found

    def _convention(self, folder: Any) -> str | None:
        """What the scales of a folder do; None where it has no packed BitNet."""
        config = read_config(folder)
        about = None if config is None else quantization_of(config)
        if about is None or about.get("quant_method") != "bitnet":
            return None
        if self.weight_scale is not None:
            return self.weight_scale
        linear_class = about.get("linear_class", "bitlinear")
        if not isinstance(linear_class, str) or linear_class not in CONVENTIONS:
            raise FileError(
                f"{folder / 'config.json'}: linear_class is {str(linear_class)[:100]!r}; known are "
                f"{', '.join(CONVENTIONS)}: say what weight_scale does (weight_scale=, --weight-scale)"
            )
        return CONVENTIONS[linear_class]

    def entries(
        self, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Entry]:
        _check(self.name, name, format, planes, shape)
        if not _is_weight(name) or len(shape) != 2 or shape[0] % 4:
            raise FileError(
                f"tensor {name!r} of shape {shape}: transformers' BitNet has matrices called 'weight' of a layer, "
                "whose rows are a multiple of 4: keep it as it is (keep=, --keep)"
            )
        return {
            name: entry_of(Plane("uint8", (shape[0] // 4, shape[1]))),
            _scale_name(name): entry_of(Plane(_stored_dtype(dtype), (1,))),
        }

    def arrays(self, name: str, q: QuantizedArray) -> dict[str, np.ndarray]:
        scale = trits.one_scale(name, q, "transformers' BitNet")
        dtype = _xp.named_dtype(_stored_dtype(q.dtype))
        with np.errstate(all="ignore"):
            stored = np.array([scale if self.weight_scale == "multiplies" else np.float32(1) / scale], np.float32)
            number = stored.astype(dtype)
        value = float(number[0])
        if not math.isfinite(value) or value == 0:
            raise FileError(
                f"tensor {name!r} has the scale {scale}, for which {dtype.name} has no number: quantize it from float32"
            )
        return {name: trits.to_transformers(trits.trits_of(name, q), q.shape), _scale_name(name): number}

    def metadata(self, metadata: Mapping[str, Any], configs: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": "pt", **metadata}  # which transformers asks for


@dataclass(frozen=True)
class BitnetCppLayout(GgufLayout):
    """bitnet.cpp's I2_S for ``ternary`` with one scale; all else as in GGUF."""

    name: ClassVar[str] = "bitnet.cpp"

    @property
    def ternary_file_type(self) -> int:
        return _FILE_TYPE

    def recognise(self, reader: Reader) -> dict[str, Compressed]:
        found = {}
        for name in reader.names:
            file = reader.file_of(name)
            entry = file.entries[name]
            if not isinstance(file, GgufReader) or entry.dtype != _TYPE:
                continue
            if (
                not entry.size
                or entry.shape[-1] % _ROW
                or not 0 <= entry.nbytes - _nbytes(entry.size) < trits.I2_S_TAIL
            ):
                continue  # what type 36 was in files of ggml of old
            planes = functools.partial(_i2_s_planes, name, entry.size)
            found[name] = Compressed(get_format("ternary"), entry.shape, np.dtype(np.float32), (name,), planes)
        return found

    def entries(
        self, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Entry]:
        _check(self.name, name, format, planes, shape)
        if not math.prod(shape) or shape[-1] % _ROW:
            raise FileError(
                f"tensor {name!r} of shape {shape}: rows of I2_S are multiples of {_ROW} elements: keep it as it is "
                "(keep=, --keep)"
            )
        return {name: Entry(_TYPE, shape, _nbytes(math.prod(shape)))}

    def arrays(self, name: str, q: QuantizedArray) -> dict[str, np.ndarray]:
        return {name: trits.to_i2_s(name, q)}

    def file_type(self, entries: Mapping[str, Entry]) -> int:
        if any(entry.dtype == _TYPE for entry in entries.values()):
            return self.ternary_file_type
        return super().file_type(entries)


def _check(layout: str, name: str, format: Format, planes: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Check that a layout of trits is asked for trits."""
    if not trits.is_ternary(format):
        raise FileError(f"tensor {name!r}: the layout {layout!r} holds the format ternary, not {format}")
    if any(planes[key].shape != spec.shape for key, spec in format.planes(shape).items()):
        raise FileError(
            f"tensor {name!r} is a stack of shape {shape}, for which the layout {layout!r} has no place: save its "
            "members one by one"
        )


def _is_weight(name: str) -> bool:
    return name == _WEIGHT or name.endswith(f".{_WEIGHT}")


def _scale_name(name: str) -> str:
    return name.removesuffix(_WEIGHT) + _SCALE


def _stored_dtype(dtype: np.dtype) -> str:
    return dtype.name if dtype.name in _DTYPES else "float32"


def _planes(name: str, scale: str, convention: str, reader: Reader) -> dict[str, np.ndarray]:
    number = reader.array(scale).reshape(-1).astype(np.float32)
    value = float(number[0])
    if not math.isfinite(value) or value < 0 or (value == 0 and convention == "divides"):
        raise FileError(f"{reader.path}: tensor {scale!r} is {value}; it must be a positive number")
    with np.errstate(over="ignore"):
        found = number if convention == "multiplies" else np.float32(1) / number
    if not np.isfinite(found).all():
        raise FileError(f"{reader.path}: tensor {scale!r} is {value}, whose inverse float32 does not have")
    return {"codes": trits.codes_of(trits.from_transformers(name, reader.array(name))), "scale": found}


def _i2_s_planes(name: str, size: int, reader: Reader) -> dict[str, np.ndarray]:
    return trits.from_i2_s(name, reader.raw(name), size)


def _nbytes(size: int) -> int:
    """Bytes of I2_S."""
    return size // 4 + trits.I2_S_TAIL
