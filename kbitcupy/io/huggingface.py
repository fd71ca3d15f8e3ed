"""Models of Hugging Face as llama.cpp has them, and back: names, the order of rows, and metadata.

Known are llama.cpp's architectures ``llama`` (also Mistral's models, which are alike) and ``bitnet``. llama.cpp rotates
neighbours (x[2i], x[2i + 1]) of a head of ``llama``, Hugging Face the halves (x[i], x[i + d/2]): the rows of q and k
change places. Those of ``bitnet`` do not.

Source: llama.cpp, ``conversion/llama.py`` and ``src/models``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError
from ..serial import read_json_file

#: llama.cpp's architecture by the name of a class, or by ``model_type`` where there is none.
_ARCHITECTURES = {
    **dict.fromkeys(("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "llama", "mistral"), "llama"),
    **dict.fromkeys(("BitnetForCausalLM", "BitNetForCausalLM", "bitnet"), "bitnet"),
}

#: bitnet.cpp's name of bitnet.
_BITNET_CPP = "bitnet-b1.58"

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: transformers' names, which are those on the way back, and then the first models'.
_BITNET = {
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "self_attn.inner_attn_ln": "attn_sub_norm",
    "mlp.ffn_layernorm": "ffn_sub_norm",
}
_THEIRS = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)")
_OURS = re.compile(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)")
_FREQUENCIES = "rope_freqs.weight"
_LARGEST_HEAD = 1 << 16  # what no model has


@dataclass(frozen=True)
class Translation:
    """How the tensors of one program's files become those of another's.

    Parameters
    ----------
    names : dict of str to str
        New names; tensors that are missing keep theirs.
    left_out : frozenset of str
        Tensors that the other program computes itself.
    heads : dict of str to int
        Heads of the tensors whose rows change places.
    neighbours : bool
        Whether rows that are rotated together become neighbours, as llama.cpp has them, or halves of a head.
    widened : frozenset of str
        Tensors that become float32.
    metadata : dict
        Metadata of the file, plain values or those that bring a type (see `float32`).
    made : dict of str to ndarray
        Tensors that the other program wants beside, by their new names.
    notes : tuple of str
        What is not as whoever asked for this may expect.
    """

    names: dict[str, str]
    left_out: frozenset[str] = frozenset()
    heads: dict[str, int] = field(default_factory=dict)
    neighbours: bool = True
    widened: frozenset[str] = frozenset()
    metadata: dict[str, Any] = field(default_factory=dict)
    made: dict[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def transform(self, name: str) -> Callable[[Any], Any] | None:
        """What puts a tensor's rows into their order; None where they stay."""
        if name not in self.heads:
            return None
        return functools.partial(swap_rows, heads=self.heads[name], neighbours=self.neighbours)


def swap_rows(x: Any, heads: int, neighbours: bool) -> Any:
    """Put the rows of q or k, or a bias of them, into the other order.

    Parameters
    ----------
    x : ndarray
        Shape (heads * d, ...), on any device.
    heads : int
        How many there are.
    neighbours : bool
        Whether rows i and i + d/2 of a head become 2i and 2i + 1, or the other way round.

    Returns
    -------
    ndarray
        A new array.

    Examples
    --------
    >>> import numpy as np
    >>> from kbitcupy.io.huggingface import swap_rows
    >>> swap_rows(np.arange(8), 2, neighbours=True)
    array([0, 2, 1, 3, 4, 6, 5, 7])
    """
    half = x.shape[0] // heads // 2
    lengths = (heads, 2, half) if neighbours else (heads, half, 2)
    return x.reshape(*lengths, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def read_config(folder: Path) -> dict[str, Any] | None:
    """``config.json`` of a folder, None where there is none.

    Raises
    ------
    FileError
        When it is not JSON, or no object.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = read_json_file(path)
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {str(error)[:400]}") from error
    if not isinstance(config, dict):
        raise FileError(f"{path} is no JSON object")
    return config


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of compressed weights; nothing where it says nothing."""
    about = config.get("quantization_config")
    return about if isinstance(about, dict) else {}


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of a model's architecture, None where it is not known here."""
    classes = config.get("architectures")
    names = classes if isinstance(classes, list) and classes else [config.get("model_type")]
    return next((_ARCHITECTURES[name] for name in names if isinstance(name, str) and name in _ARCHITECTURES), None)


# ---- to llama.cpp ----------------------------------------------------------------------------------------------------


def for_llama_cpp(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, bitnet_cpp: bool = False
) -> Translation:
    """How a model of Hugging Face becomes one of llama.cpp.

    Parameters
    ----------
    config : mapping
        Its ``config.json``; `architecture_of` it is known.
    shapes : mapping of str to tuple of int
        Names and shapes of its tensors.
    bitnet_cpp : bool, default False
        Whether it is for bitnet.cpp, where bitnet has another name and activation.

    Returns
    -------
    Translation

    Raises
    ------
    FileError
        When the configuration lacks a key, or does not fit a tensor.
    """
    architecture = architecture_of(config)
    if architecture is None:
        raise FileError("config.json is of no architecture that is known here")
    about = _About(config)
    names, left_out, unknown = {}, set(), []
    for name in shapes:
        if name.endswith(".rotary_emb.inv_freq"):
            left_out.add(name)
        elif name == "lm_head.weight" and architecture == "bitnet" and config.get("tie_word_embeddings") is not False:
            left_out.add(name)  # llama.cpp has the embedding there, and refuses a file with another
        elif new := _llama_cpp_name(name, architecture):
            names[name] = new
        else:
            unknown.append(name)
    heads = {}
    if architecture == "llama":
        ends = {"q_proj": about.heads, "k_proj": about.heads_kv}
        heads = {name: ends[kind] for name in names if (kind := name.split(".")[-2]) in ends}
        for name, count in heads.items():
            if not shapes[name] or shapes[name][0] % (2 * count):
                raise FileError(
                    f"tensor {name!r} of shape {shapes[name]} has no two halves of {count} heads, as config.json says"
                )
    program, own, activation = ("llama.cpp", "bitnet", "silu")
    if bitnet_cpp:
        program, own, activation = ("bitnet.cpp", _BITNET_CPP, "relu2")
    metadata, made, notes = _metadata(own if architecture == "bitnet" else architecture, config, about)
    if unknown:
        notes.append(f"{program} has no name for {_some(unknown)}, which keep theirs: it will refuse the file")
    if architecture == "bitnet" and config.get("hidden_act") not in (None, activation):
        metadata[f"{own}.hidden_activation"] = str(config["hidden_act"])
        notes.append(f"the model computes {config['hidden_act']}, where {program} computes {activation} for {own}")
    return Translation(
        names,
        frozenset(left_out),
        heads,
        neighbours=True,
        widened=frozenset(name for name, new in names.items() if _is_wide(new, shapes[name])),
        metadata=metadata,
        made=made,
        notes=tuple(notes),
    )


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _llama_cpp_name(name: str, architecture: str) -> str | None:
    found = _THEIRS.fullmatch(name)
    if not found:
        return _TOP.get(name)
    part = _BLOCK.get(found[2]) or (_BITNET.get(found[2]) if architecture == "bitnet" else None)
    return f"blk.{found[1]}.{part}.{found[3]}" if part else None


def _is_wide(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp wants a tensor in float32."""
    return len(shape) < 2 or name.endswith("_norm.weight")


class _About:
    """Numbers of a ``config.json``, checked."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = config
        self.heads = self.whole("num_attention_heads")
        self.heads_kv = self.whole("num_key_value_heads", self.heads)
        self.width = self.whole("hidden_size")
        self.head_dim = self.whole("head_dim", self.width // self.heads)
        if self.head_dim > _LARGEST_HEAD:
            raise FileError(f"config.json: a head has {self.head_dim} elements; at most {_LARGEST_HEAD} are taken")
        #: transformers 5 has all about the rotation in one place, those before it in two.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        self.rope: Mapping[str, Any] = rope if isinstance(rope, dict) else {}

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise FileError(f"config.json: {key!r} is {value!r}; it must be a positive integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, of the configuration or of its part about the rotation."""
        value = self._config.get(key)
        value = self.rope.get(key, default) if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise FileError(f"config.json: {key!r} is {value!r}; it must be a positive number")
        return float(value)


def _metadata(
    architecture: str, config: Mapping[str, Any], about: _About
) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """Metadata, tensors to make, notes."""
    values: dict[str, Any] = {
        "block_count": about.whole("num_hidden_layers"),
        "context_length": about.whole("max_position_embeddings"),
        "embedding_length": about.width,
        "feed_forward_length": about.whole("intermediate_size"),
        "attention.head_count": about.heads,
        "attention.head_count_kv": about.heads_kv,
        "attention.layer_norm_rms_epsilon": about.real("rms_norm_eps"),
        "rope.freq_base": about.real("rope_theta", 10000.0),
        "rope.dimension_count": about.head_dim,
        "vocab_size": about.whole("vocab_size"),
    }
    if config.get("head_dim") is not None:
        values.update({"attention.key_length": about.head_dim, "attention.value_length": about.head_dim})
    made, notes = {}, []
    kind = about.rope.get("rope_type", about.rope.get("type", "default"))
    if kind == "llama3":
        made[_FREQUENCIES] = _frequencies(about)
    elif kind in ("linear", "yarn"):
        values.update({"rope.scaling.type": kind, "rope.scaling.factor": about.real("factor")})
        if kind == "yarn":
            original = about.real("original_max_position_embeddings", values["context_length"])
            values["rope.scaling.original_context_length"] = int(original)
    elif kind not in ("default", None):
        notes.append(f"config.json: rotation of type {kind!r} was not carried over: llama.cpp rotates without scaling")
    return (
        {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in values.items()}},
        made,
        notes,
    )


def _frequencies(about: _About) -> np.ndarray:
    """What Llama 3.1 divides the frequencies of its rotation by, one for each pair of a head."""
    base, factor = about.real("rope_theta", 10000.0), about.real("factor", 8.0)
    low, high = about.real("low_freq_factor", 1.0), about.real("high_freq_factor", 4.0)
    original = about.real("original_max_position_embeddings", 8192.0)
    with np.errstate(all="ignore"):
        frequencies = base ** -(np.arange(0, about.head_dim, 2, dtype=np.float64) / about.head_dim)
        turns = original * frequencies / (2 * math.pi)  # in the context of the first training
        smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns > low).astype(np.float64)
        found = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    if not np.isfinite(found).all():
        raise FileError("config.json: its numbers on the rotation (llama3) are out of range")
    return found


# ---- and back --------------------------------------------------------------------------------------------------------


def for_hugging_face(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Translation | None:
    """How a model of llama.cpp becomes one of Hugging Face; None where its architecture is not known here.

    Parameters
    ----------
    metadata : mapping
        Plain values of a GGUF file's metadata.
    shapes : mapping of str to tuple of int
        Names and shapes of its tensors.

    Returns
    -------
    Translation or None

    Raises
    ------
    FileError
        When numbers of heads are missing, or do not fit a tensor.
    """
    architecture = metadata.get("general.architecture")
    architecture = "bitnet" if architecture == _BITNET_CPP else architecture
    if architecture not in _ARCHITECTURES.values():
        return None
    back = {new: name for name, new in _TOP.items()}
    known = {**_BLOCK, **(_BITNET if architecture == "bitnet" else {})}
    blocks = {new: name for name, new in reversed(known.items())}
    found, left_out, heads = {}, set(), {}
    counts = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    for name, shape in shapes.items():
        block = _OURS.fullmatch(name)
        if name == _FREQUENCIES:
            left_out.add(name)
        elif name in back:
            found[name] = back[name]
        elif block and block[2] in blocks:
            found[name] = f"model.layers.{block[1]}.{blocks[block[2]]}.{block[3]}"
            if architecture == "llama" and block[2] in counts:
                heads[name] = _heads(metadata, f"llama.{counts[block[2]]}", int(block[1]), name, shape)
    unknown = [name for name in shapes if name not in found and name not in left_out]
    notes = (f"Hugging Face has no name for {_some(unknown)}, which keep theirs",) if unknown else ()
    return Translation(found, frozenset(left_out), heads, neighbours=False, notes=notes)


def _heads(metadata: Mapping[str, Any], key: str, layer: int, name: str, shape: tuple[int, ...]) -> int:
    value = metadata.get(key, metadata.get("llama.attention.head_count"))
    if isinstance(value, (list, np.ndarray)):  # one for each layer
        value = value[layer] if layer < len(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value <= 0:
        raise FileError(f"{key} is {value!r}; it must be a positive integer to tell the rows of {name!r}")
    if not shape or shape[0] % (2 * int(value)):
        raise FileError(f"tensor {name!r} of shape {shape} has no two halves of {value} heads, as {key} says")
    return int(value)
