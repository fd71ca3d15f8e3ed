"""Adapters as PEFT stores them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

The tensors of a module's adapter are ``[base_model.model.]{module}.lora_A[.{adapter}].weight`` and ``lora_B``; PEFT
writes the first part and no name of an adapter, and other programs and older versions differ. What is no low-rank pair
beside a linear layer is refused by its name: an adapter that is read in part computes something else.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backend import xp as _xp
from ..errors import FileError
from ..serial import read_json_file
from .atomic import as_path, check_folder, filling, replacing
from .checkpoint import load, save
from .container import reading

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# What numbers may be: a scaling is multiplied in float32.
_LARGEST = float(np.finfo(np.float32).max)
# What PEFT's own files begin their names with: the module within the model that it wraps.
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
# A pattern for the names of modules that is a name itself; others would have to be run as regular expressions.
_PLAIN_PATTERN = re.compile(r"\^?[\w.-]+")

# Fields that change what is computed or stored, and what they do; they may be there as long as they are off.
_REFUSED = {
    "use_dora": "rescales the weights by magnitudes (DoRA)",
    "lora_bias": "gives the adapters biases of their own",
    "modules_to_save": "stores whole modules beside the adapters",
    "layer_replication": "repeats layers of the model",
    "target_parameters": "adapts parameters that belong to no linear layer",
    "trainable_token_indices": "stores rows of the embedding beside the adapters",
    "alora_invocation_tokens": "adapts the tokens behind an invocation alone",
    "use_qalora": "pools the inputs (QALoRA)",
    "use_bdlora": "has block-diagonal factors (BD-LoRA)",
    "arrow_config": "chooses among adapters for each token (Arrow)",
    "kasa_config": "changes the weights of the model (KaSA)",
    "monteclora_config": "samples the factors (MonteCLoRA)",
}
# Ways to begin a training that take something away from the weights of the model: the adapter fits only what is left.
_CHANGES_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True)
class Pair:
    """What a folder holds for one module.

    Parameters
    ----------
    A, B : numpy.ndarray or cupy.ndarray
        [r, K] and [N, r].
    alpha : float
        Its ``lora_alpha``.
    """

    A: Any
    B: Any
    alpha: float


@dataclass(frozen=True)
class Adapters:
    """What a folder holds.

    Parameters
    ----------
    pairs : mapping of str to Pair
        By the names of modules, without ``base_model.model.``.
    rank_stabilized : bool
        ``use_rslora``.
    dropout : float
        ``lora_dropout``.
    """

    pairs: Mapping[str, Pair]
    rank_stabilized: bool
    dropout: float


# ---- reading -------------------------------------------------------------------------------------------------------


def read_adapters(path: str | os.PathLike[str]) -> Adapters:
    """The adapters of a folder, in memory.

    Raises
    ------
    FileError
        When one of the two files is missing or not what it claims to be, or the adapters are of another kind.
    """
    folder = as_path(path, "path")
    with reading(folder):
        if not folder.is_dir():
            what = "a file" if folder.exists() else "not there"
            raise FileError(f"{folder} is {what}; pass the directory that holds {CONFIG} and {WEIGHTS}")
        names = {entry.name for entry in folder.iterdir()}
    if WEIGHTS not in names and "adapter_model.bin" in names:
        raise FileError(
            f"{folder} holds adapter_model.bin, a pickle, which may run any code when it is read; let PEFT write it "
            "anew as safetensors: PeftModel.from_pretrained(...).save_pretrained(...)"
        )
    config = _Config(folder / CONFIG)
    found: dict[str, dict[str, np.ndarray]] = {}
    tensors: Mapping[str, Any] = load(folder / WEIGHTS, raw=True)
    adapters = set()
    for name in tensors:
        match = _KEY.fullmatch(name)
        if match is None:
            raise FileError(
                f"{folder / WEIGHTS}: tensor {name!r} is no weight of a low-rank pair ({_PREFIX}MODULE.lora_A.weight "
                "or lora_B): only adapters of linear layers are read"
            )
        adapters.add(match["adapter"])
        pair = found.setdefault(match["module"], {})
        if match["side"] in pair:
            raise FileError(f"{folder / WEIGHTS}: module {match['module']!r} has lora_{match['side']} twice")
        pair[match["side"]] = _factor(tensors[name], name, folder / WEIGHTS)
    if len(adapters) > 1:
        raise FileError(
            f"{folder / WEIGHTS} holds more than one adapter ({', '.join(sorted(map(str, adapters)))}): store each in "
            "a folder of its own"
        )
    if not found:
        raise FileError(f"{folder / WEIGHTS} holds no adapter")
    pairs = {module: config.pair(module, pair) for module, pair in sorted(found.items())}
    return Adapters(pairs, config.rank_stabilized, config.dropout)


def _factor(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    """A stored factor, checked, in memory of its own."""
    if array.dtype.name not in _xp.FLOAT_DTYPES:
        raise FileError(f"{path}: tensor {name!r} is {array.dtype}; allowed are {', '.join(_xp.FLOAT_DTYPES)}")
    if array.ndim != 2 or not array.size:
        raise FileError(
            f"{path}: tensor {name!r} has shape {array.shape}; it must be [r, K] or [N, r]: only adapters of linear "
            "layers are read"
        )
    return np.array(array)


class _Config:
    """The fields of ``adapter_config.json`` that count, checked."""

    def __init__(self, path: Path):
        self._path = path
        with reading(path):
            try:
                fields = read_json_file(path)
            except ValueError as error:
                raise FileError(f"{path} is no JSON that can be read: {str(error)[:400]}") from error
        if not isinstance(fields, dict):
            raise FileError(f"{path} is no JSON object with the fields of an adapter")
        self._fields: dict[str, Any] = fields
        self._refuse()
        self.rank = self._number("r", fields.get("r"), integer=True)
        self.alpha = self._number("lora_alpha", fields.get("lora_alpha"))
        self.rank_stabilized = fields.get("use_rslora", False)
        if not isinstance(self.rank_stabilized, bool):
            self._wrong("use_rslora", self.rank_stabilized, "true or false")
        self.dropout = fields.get("lora_dropout", 0.0)
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            self._wrong("lora_dropout", self.dropout, "a number from 0 to below 1")
        self.ranks = self._patterns("rank_pattern", integer=True)
        self.alphas = self._patterns("alpha_pattern")

    def pair(self, module: str, factors: Mapping[str, np.ndarray]) -> Pair:
        """The two factors of a module, which fit together and the fields."""
        if len(factors) != 2:
            raise FileError(f"{self._path.with_name(WEIGHTS)}: module {module!r} has lora_{next(iter(factors))} alone")
        a, b = factors["A"], factors["B"]
        rank = _of_module(self.ranks, module, self.rank)
        if (a.shape[0], b.shape[1]) != (rank, rank):
            raise FileError(
                f"{self._path.with_name(WEIGHTS)}: module {module!r} has lora_A of shape {a.shape} and lora_B of shape "
                f"{b.shape}; r = {rank} of {CONFIG} needs ({rank}, K) and (N, {rank})"
            )
        return Pair(a, b, _of_module(self.alphas, module, self.alpha))

    def _refuse(self) -> None:
        """Adapters of other kinds."""
        kind = self._fields.get("peft_type")
        if kind != "LORA":
            self._wrong("peft_type", kind, "'LORA'")
        bias = self._fields.get("bias", "none")
        if bias != "none":
            self._wrong("bias", bias, "'none': biases of the model are no part of an adapter; add them to the model's")
        for field, what in _REFUSED.items():
            if self._fields.get(field):
                raise FileError(f"{self._path}: {field} is set, which {what}; such adapters are not read")
        begun = self._fields.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGES_WEIGHTS):
            raise FileError(
                f"{self._path}: init_lora_weights is {begun!r}, which changed the weights of the model: let PEFT write "
                "the adapter for the unchanged ones, save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            )

    def _patterns(self, field: str, integer: bool = False) -> dict[str, Any]:
        """Numbers for some modules."""
        patterns = self._fields.get(field) or {}
        if not isinstance(patterns, dict):
            self._wrong(field, patterns, "an object of names and numbers")
        for pattern, value in patterns.items():
            if not _PLAIN_PATTERN.fullmatch(pattern):
                self._wrong(field, pattern, "names of modules, or their ends: regular expressions are not run")
            self._number(f"{field}[{pattern!r}]", value, integer)
        return patterns

    def _number(self, field: str, value: Any, integer: bool = False) -> Any:
        """A positive number."""
        if not _is_number(value) or value <= 0 or (integer and type(value) is not int):
            self._wrong(field, value, "a positive integer" if integer else "a positive number")
        return value

    def _wrong(self, field: str, value: Any, allowed: str) -> None:
        raise FileError(f"{self._path}: {field} is {str(value)[:200]!r}; it must be {allowed}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _of_module(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The number of the first pattern that is the module's name, or, without a ^, the end of it behind a dot."""
    for pattern, value in patterns.items():
        if module == pattern.removeprefix("^") or module.endswith(f".{pattern}"):
            return value
    return otherwise


# ---- writing -------------------------------------------------------------------------------------------------------


def write_adapters(path: str | os.PathLike[str], adapters: Adapters, about: Mapping[str, Any]) -> None:
    """Write a folder, which is there as a whole or not at all.

    Parameters
    ----------
    path : path_like
        The folder, which does not exist or is empty.
    adapters : Adapters
        What to write; their names may begin with ``base_model.model.``.
    about : mapping
        Fields of ``adapter_config.json`` that say nothing of the numbers.

    Raises
    ------
    FileError
        When the folder cannot be written, or two modules would get the same name.
    """
    pairs: dict[str, Pair] = {}
    for name, pair in adapters.pairs.items():
        module = name.removeprefix(_PREFIX)
        if not module or module in pairs:
            fault = "stands twice" if module else "is empty"
            raise FileError(f"the name of module {name!r} {fault}; adapters are named as the modules of the model")
        pairs[module] = pair
    text = _config_text(pairs, adapters, about)
    tensors = {}
    for module, pair in pairs.items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = pair.A
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = pair.B
    with filling(check_folder(path), {}) as folder:
        save(folder / WEIGHTS, tensors, {"format": "pt"})
        with replacing(folder / CONFIG, len(text), force=True) as file:
            file.write(text)


def _config_text(pairs: Mapping[str, Pair], adapters: Adapters, about: Mapping[str, Any]) -> bytes:
    """The content of ``adapter_config.json``: what most modules have, and patterns for the others."""
    ranks = {module: int(pair.A.shape[0]) for module, pair in pairs.items()}
    alphas = {
        module: int(pair.alpha) if pair.alpha == int(pair.alpha) else pair.alpha for module, pair in pairs.items()
    }
    rank, alpha = (Counter(numbers.values()).most_common(1)[0][0] for numbers in (ranks, alphas))
    fields = {
        "auto_mapping": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": adapters.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "target_modules": sorted(pairs),
        "use_rslora": adapters.rank_stabilized,
        **about,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _exceptions(ranks, rank),
        "alpha_pattern": _exceptions(alphas, alpha),
    }
    return json.dumps(dict(sorted(fields.items())), indent=2).encode() + b"\n"


def _exceptions(numbers: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Patterns for what most modules do not have.

    A pattern matches the ends of names as well, and the first that does counts: longer names stand first, and so does
    the usual number of a module whose name ends in that of another one.
    """
    others = [module for module, number in numbers.items() if number != usual]
    ends = tuple(f".{module}" for module in others)
    named = [module for module, number in numbers.items() if number != usual or module.endswith(ends)]
    return {module: numbers[module] for module in sorted(named, key=lambda module: (-len(module), module))}
