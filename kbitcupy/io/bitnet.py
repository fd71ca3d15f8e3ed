"""What becomes of BitNet's models on their way into files that transformers, llama.cpp and bitnet.cpp load.

Only linear layers are ternary there: embeddings and the head stay as they are. What is ternary already, compressed or
not, keeps its trits and its scale: the mean of its magnitudes, by which BitNet scales weights, would be smaller by the
share of zeros.

Source: transformers 5.23, ``quantizers/quantizer_bitnet.py`` and ``utils/quantization_config.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..backend import xp as _xp
from ..errors import FileError
from ..formats.base import Choice, get_format
from .checkpoint import Checkpoint
from .gguf import GgufReader
from .huggingface import architecture_of, quantization_of, read_config
from .layouts import Layout
from .layouts.bitnet import CONVENTIONS, BitnetCppLayout, BitnetLayout
from .layouts.gguf import FILE_TYPE_KEY, QUANTIZATION_VERSION, VERSION_KEY, GgufLayout
from .layouts.trits import TYPES, is_ternary
from .recipes import RECIPES, find_recipe

#: File of a checkpoint of Hugging Face that says what the model is.
CONFIG = "config.json"
_METHOD, _LINEAR_CLASS = "bitnet", "bitlinear"
_HEADS = ("lm_head", "score", "classifier")
_EMBEDDINGS = ("embed", "wte", "wpe")
# Elements that tell most arrays that are not ternary.
_FEW = 4096


@dataclass(frozen=True)
class BitnetJob:
    """How a checkpoint is written, as far as it is a BitNet.

    Parameters
    ----------
    layout : Layout
        The layout, which knows now how to store trits.
    choices : mapping of str to Choice
        Formats by tensor.
    kept : frozenset of str
        Compressed tensors that stay so, and are stored anew.
    metadata : dict
        Metadata of the file.
    is_bitnet : bool
        Whether a GGUF type of trits means BitNet's rule.
    beside : dict of str to bytes
        Files of the folder.
    """

    layout: Layout
    choices: Mapping[str, Choice]
    kept: frozenset[str] = frozenset()
    metadata: dict[str, Any] = field(default_factory=dict)
    is_bitnet: bool = False
    beside: dict[str, bytes] = field(default_factory=dict)

    @property
    def bitnet_cpp(self) -> bool:
        """Whether the file is for bitnet.cpp."""
        return isinstance(self.layout, BitnetCppLayout)

    def choice(self, name: str, choice: Choice) -> Choice:
        """The format of a tensor, where `choice` is asked for."""
        return (get_format("ternary"), {}) if self.is_bitnet and choice[0].name in TYPES and is_linear(name) else choice

    def given_by(self, choice: Choice) -> Callable[[Any], Mapping[str, Any]] | None:
        """What finds the scale of a tensor that is ternary already; None where it is not looked for."""
        format, given = choice
        options = format.options()
        mean = is_ternary(format) and options["granularity"] == "tensor" and options["rule"] == "absmean"
        stores = isinstance(self.layout, (BitnetLayout, GgufLayout))
        return scale_of_ternary if mean and stores and "scale" not in given else self.layout.given_by(choice)


def bitnet_job(
    checkpoint: Checkpoint,
    wanted: Choice | Mapping[str, Choice] | None,
    choices: Mapping[str, Choice],
    layout: Layout,
    recipe: str | None = None,
) -> BitnetJob:
    """How a checkpoint is written.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is read.
    wanted : Choice or mapping, optional
        The one format that is asked for, or the formats by tensor.
    choices : mapping of str to Choice
        The formats of all tensors that can have them.
    layout : Layout
        What is asked for.
    recipe : str, optional
        The recipe that is asked for instead.

    Raises
    ------
    FileError
        When the layout is for a model, and there is no ``config.json`` that says which.
    """
    # What config.json says of packed weights, or what an own layout does, would be lost where they are only copied.
    compressed = checkpoint.compressed
    ternary = frozenset(name for name, one in compressed.items() if is_ternary(one.format))
    packed = frozenset(name for name in ternary if "weight_scale" in compressed[name].options)
    one = wanted if isinstance(wanted, tuple) else None
    type = one[0].name if one is not None else "" if recipe is None else RECIPES[find_recipe(recipe)].type
    if isinstance(layout, GgufLayout) and type in TYPES:
        layout = replace(layout, ternary=type)
    foreign = not any(isinstance(file.reader, GgufReader) for file in checkpoint.files.values())
    config = read_config(checkpoint.paths[0].parent) if foreign else None
    if isinstance(layout, (BitnetLayout, BitnetCppLayout)) and (config is None or not checkpoint.is_folder):
        raise FileError(
            f"{checkpoint.path}: the layout {layout.name!r} is for a model: pass the folder of a checkpoint of Hugging "
            f"Face, with its {CONFIG}"
        )
    into_model = isinstance(layout, BitnetLayout) or (isinstance(layout, GgufLayout) and foreign)
    if not into_model:
        return BitnetJob(layout, choices, packed)
    is_bitnet = not isinstance(layout, (BitnetLayout, BitnetCppLayout)) and _is_bitnet(config, ternary)
    if config is not None and one is not None and (is_ternary(one[0]) or (is_bitnet and type in TYPES)):
        choice = one if is_ternary(one[0]) else (get_format("ternary"), {})
        spared = _spared(quantization_of(config))
        choices = {name: choice for name in choices if is_linear(name) and not _matches(_module(name), spared)}
        for name in choices:
            if f"{name}_scale" in checkpoint:
                raise FileError(
                    f"{checkpoint.path}: tensor {name!r} has a scale beside it, {name + '_scale'!r}, but is not packed:"
                    " multiply by it first"
                )
    if isinstance(layout, BitnetLayout):
        return _for_transformers(checkpoint, layout, choices, ternary, config or {})
    metadata: dict[str, Any] = {}
    if isinstance(layout, GgufLayout) and (ternary or any(is_ternary(format) for format, _ in choices.values())):
        metadata = {VERSION_KEY: QUANTIZATION_VERSION, FILE_TYPE_KEY: layout.ternary_file_type}
    return BitnetJob(layout, choices, ternary, metadata, is_bitnet)


def _is_bitnet(config: Mapping[str, Any] | None, ternary: Collection[str]) -> bool:
    """Whether a model was trained to be ternary, by its configuration, or is."""
    if config is None:
        return False
    return (
        bool(ternary) or architecture_of(config) == "bitnet" or quantization_of(config).get("quant_method") == _METHOD
    )


def is_linear(name: str) -> bool:
    """Whether a matrix of this name is one of a linear layer that BitNet makes ternary."""
    last = _module(name).split(".")[-1]
    return name.endswith("weight") and last not in _HEADS and not any(part in last for part in _EMBEDDINGS)


def _module(name: str) -> str:
    return name.removesuffix("weight").removesuffix(".")


def _spared(about: Mapping[str, Any]) -> list[str]:
    """What a configuration says is not converted."""
    found = about.get("modules_to_not_convert")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _matches(module: str, spared: Collection[str]) -> bool:
    """Whether a layer is one of these, or a part of one."""
    return any(f".{each}." in f".{module}." for each in spared)


def _for_transformers(
    checkpoint: Checkpoint,
    layout: BitnetLayout,
    choices: Mapping[str, Choice],
    ternary: frozenset[str],
    config: Mapping[str, Any],
) -> BitnetJob:
    """A folder that transformers loads."""
    about = quantization_of(config)
    if about.get("quant_method", _METHOD) != _METHOD:
        raise FileError(
            f"{checkpoint.path}: {CONFIG} says that the model is quantized by {str(about['quant_method'])[:100]!r}: "
            "begin with one that is not"
        )
    linear_class = about.get("linear_class")
    linear_class = linear_class if linear_class in CONVENTIONS else _LINEAR_CLASS
    floats = [name for name in checkpoint.compressible(0) if len(checkpoint.reader.entry(name).shape) == 2]
    left = {_module(name) for name in floats if name not in choices and not _is_embedding(name)}
    said = {
        **about,
        "quant_method": _METHOD,
        "linear_class": linear_class,
        "quantization_mode": "offline",
        "modules_to_not_convert": sorted({"lm_head", *_spared(about), *left}),
    }
    text = json.dumps({**config, "quantization_config": said}, indent=2).encode() + b"\n"
    made = replace(layout, weight_scale=CONVENTIONS[linear_class])
    return BitnetJob(made, choices, ternary, beside={CONFIG: text})


def _is_embedding(name: str) -> bool:
    return any(part in _module(name).split(".")[-1] for part in _EMBEDDINGS)


def scale_of_ternary(x: Any) -> Mapping[str, Any]:
    """The scale of an array that has no elements but -s, 0 and s, as `kbitcupy.quantize` is given it; else nothing."""
    if not x.size:
        return {}
    with _xp.on_device_of(x):
        for part in (x.reshape(-1)[:_FEW], x):
            magnitude = abs(part.astype("float32", copy=False))
            largest = magnitude.max()
            if not 0 < float(largest) < float("inf") or not bool(((magnitude == largest) | (magnitude == 0)).all()):
                return {}
    return {"scale": float(largest)}
