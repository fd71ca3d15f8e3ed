"""llama-quantize's recipes: which type each tensor of a model gets.

A recipe has one type for most matrices, and a few rules by what a matrix is for and how deep in the model it lies. The
rules are those of llama.cpp's program ``llama-quantize`` (src/llama-quant.cpp, October 2026), for the names of tensors
and the metadata that llama.cpp gives a model; `tests/data/llama_quantize.json` holds what that program says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import FormatError


@dataclass(frozen=True)
class Model:
    """What the types of its tensors depend on, beside their names and shapes.

    Parameters
    ----------
    architecture : str
        llama.cpp's name of it, ``general.architecture``.
    layers : int
        ``<architecture>.block_count``.
    heads, heads_kv : int
        ``<architecture>.attention.head_count`` and ``head_count_kv``, those of the first layer.
    experts : int
        ``<architecture>.expert_count``, 0 for none.
    """

    architecture: str
    layers: int
    heads: int = 0
    heads_kv: int = 0
    experts: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Model:
        """The model that a GGUF file's metadata (plain values by key) describes.

        Raises
        ------
        FormatError
            When a key is missing or is not a number.
        """
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise FormatError(
                "general.architecture is missing: a recipe is for models in llama.cpp's names; give a format instead"
            )
        heads = _number(metadata, f"{architecture}.attention.head_count", 0)
        return cls(
            architecture,
            _number(metadata, f"{architecture}.block_count"),
            heads,
            _number(metadata, f"{architecture}.attention.head_count_kv", heads),
            _number(metadata, f"{architecture}.expert_count", 0),
        )

    @property
    def sharing(self) -> int:
        """How many heads share one head of keys and values."""
        return self.heads // self.heads_kv if self.heads_kv else 0

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp calls it 70B, by its layers: its attn_v is small and worth more bits."""
        if self.architecture in ("llama", "llama-embed"):
            return self.layers == 80 and self.heads != self.heads_kv and self.experts != 8
        return (self.architecture, self.layers) in _70B


_70B = {("qwen2", 80), ("deci", 80), ("olmo", 80), ("jais2", 68)}


def _number(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    found = metadata.get(key, default)
    if isinstance(found, (list, tuple)) or getattr(found, "ndim", 0) == 1:  # one for each layer
        found = found[0] if len(found) else default
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)):
        raise FormatError(f"{key} is {str(found)[:100]!r}; a recipe needs an integer there: give a format instead")
    number = int(found)
    if not 0 <= number < 1 << 31:
        raise FormatError(f"{key} is {number}; it must be between 0 and {(1 << 31) - 1}")
    return number


# ---- the rules -----------------------------------------------------------------------------------------------------


class _At(NamedTuple):
    """Where a rule is asked: for the i-th of n tensors of its kind."""

    model: Model
    importance: bool
    i: int
    n: int

    @property
    def early(self) -> bool:
        """Whether it is in the first eighth."""
        return self.i < self.n // 8

    @property
    def more(self) -> bool:
        """Whether it is among those that are worth more bits: the first and last eighth, and every third between."""
        return self.early or self.i >= 7 * self.n // 8 or (self.i - self.n // 8) % 3 == 2

    @property
    def falcon(self) -> bool:
        """Falcon has rules of its own."""
        return self.model.architecture == "falcon"


#: By recipe, the type where it is not the recipe's own (None).
_Rules = Mapping[str, Callable[[_At], "str | None"]]

_ATTN_V: _Rules = {
    "q2_k": lambda at: "q4_k" if at.model.sharing >= 4 else "q3_k",
    "q2_k_s": lambda at: "q4_k" if at.model.sharing >= 4 else None,
    "q3_k_m": lambda at: "q5_k" if at.i < 2 else "q4_k",
    "q3_k_l": lambda at: "q5_k",
    "q4_k_s": lambda at: "q5_k" if at.i < 4 else None,
    "q4_k_m": lambda at: "q6_k" if at.more else None,
    "q5_k_m": lambda at: "q6_k" if at.more else None,
    "iq4_nl": lambda at: "q5_k" if at.model.sharing >= 4 else None,
    "iq4_xs": lambda at: "q5_k" if at.model.sharing >= 4 else None,
}

_ATTN_OUTPUT: _Rules = {
    "q2_k": lambda at: None if at.falcon else "q3_k",
    "q3_k_m": lambda at: None if at.falcon else "q4_k",
    "q3_k_l": lambda at: "q4_k" if at.falcon else "q5_k",
}

#: attn_output of models of eight experts.
_ATTN_OUTPUT_OF_8: _Rules = dict.fromkeys(
    ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs"), lambda at: "q5_k"
)


def _down_of_falcon(first: str, more: str) -> Callable[[_At], str | None]:
    return lambda at: first if at.i < at.n // 16 else more if at.more else None


_FFN_DOWN_OF_FALCON: _Rules = {
    "q3_k_m": _down_of_falcon("q5_k", "q4_k"),
    "q3_k_l": lambda at: "q4_k",
    "q4_k_s": lambda at: None,
    "q4_k_m": _down_of_falcon("q6_k", "q5_k"),
}

_FFN_DOWN: _Rules = {
    "q2_k": lambda at: "q3_k",
    "q2_k_s": lambda at: "q4_k" if at.early else None,
    "q3_k_m": lambda at: "q5_k" if at.i < at.n // 16 else "q4_k",
    "q3_k_l": lambda at: "q5_k",
    "q4_k_s": lambda at: "q5_k" if at.early else None,
    "q4_k_m": lambda at: "q6_k" if at.more else None,
    "q5_k_m": lambda at: "q6_k" if at.more else None,
    "iq4_nl": lambda at: "q5_k" if at.early and not at.importance else None,
    "iq4_xs": lambda at: "q5_k" if at.early and not at.importance else None,
    "q4_0": lambda at: "q4_1" if at.early and at.importance else None,
    "q5_0": lambda at: "q5_1" if at.early and at.importance else None,
}


class Recipe(NamedTuple):
    """The type of most matrices, the number that stands under ``general.file_type``, and whether matrices of this type
    that lie between the embedding and the head must have an importance.
    """

    type: str
    file_type: int
    needs_importance: bool = False


#: llama-quantize's recipes by name, as far as their types can be made.
RECIPES: Mapping[str, Recipe] = {
    "q2_k": Recipe("q2_k", 10),
    "q2_k_s": Recipe("q2_k", 21, needs_importance=True),
    "q3_k_s": Recipe("q3_k", 11),
    "q3_k_m": Recipe("q3_k", 12),
    "q3_k_l": Recipe("q3_k", 13),
    "q4_0": Recipe("q4_0", 2),
    "q4_1": Recipe("q4_1", 3),
    "q4_k_s": Recipe("q4_k", 14),
    "q4_k_m": Recipe("q4_k", 15),
    "q5_0": Recipe("q5_0", 8),
    "q5_1": Recipe("q5_1", 9),
    "q5_k_s": Recipe("q5_k", 16),
    "q5_k_m": Recipe("q5_k", 17),
    "q6_k": Recipe("q6_k", 18),
    "q8_0": Recipe("q8_0", 7),
    "iq4_nl": Recipe("iq4_nl", 25),
    "iq4_xs": Recipe("iq4_xs", 30),
    "tq1_0": Recipe("tq1_0", 36),
    "tq2_0": Recipe("tq2_0", 37),
    "mxfp4_moe": Recipe("mxfp4", 38),
    "f16": Recipe("float16", 1),
    "bf16": Recipe("bfloat16", 32),
    "f32": Recipe("float32", 0),
}
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}

#: What takes the place of a type of 256 elements where rows are no multiple of that.
_OF_32 = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
    "tq1_0": "q4_0",
    "tq2_0": "q4_0",
}
_PLAIN = ("float16", "bfloat16", "float32")

#: Matrices that stay as they are: parts of their names.
_KEPT = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj"),
    *("ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight"),
    *(
        f"time_mix_{part}.weight"
        for part in ("first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2")
    ),
    *(f"time_mix_{part}.weight" for part in ("decay_w1", "decay_w2", "lerp_fused")),
    *(".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger"),
    *("a.rvq.codebook", "mm.a.code_embd"),
)
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
#: Matrices whose rows are looked up; without an ``output.weight`` they give the logits, too.
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
#: What else matrices are for: parts of their names, of which the first that is found counts.
_KINDS = (
    *("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight", "attn_k.weight", "attn_q.weight", "attn_output.weight"),
    *("ffn_up", "ffn_gate", "ffn_down"),
)
_ATTN_V_KINDS = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")
_LAYER = re.compile(r"blk\.([0-9]{1,9})(\.?)")


def find_recipe(name: str) -> str:
    """The name of a recipe in lower case, aliases resolved.

    Raises
    ------
    FormatError
        When there is none.
    """
    if not isinstance(name, str):
        raise TypeError(f"recipe is {type(name).__name__}; it must be a name, such as 'q4_k_m'")
    lower = name.lower()
    lower = _ALIASES.get(lower, lower)
    if lower not in RECIPES:
        why = "its types can be read but not made" if re.fullmatch(r"iq[123]_\w+", lower) else "it is not known"
        raise FormatError(f"recipe {name!r}: {why}; allowed are {', '.join(RECIPES)}")
    return lower


def order(name: str) -> tuple[int, bytes]:
    """By what llama.cpp sorts tensors: those of no layer first, then layer after layer, by name.

    Examples
    --------
    >>> from kbitcupy.io.recipes import order
    >>> sorted(["blk.10.attn_q.weight", "output.weight", "blk.9.ffn_up.weight", "blk.9.attn_q.weight"], key=order)
    ['output.weight', 'blk.9.attn_q.weight', 'blk.9.ffn_up.weight', 'blk.10.attn_q.weight']
    """
    layer = _LAYER.match(name)
    return int(layer[1]) if layer else -1, name.encode("utf-8", "surrogatepass")


def takes_part(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a recipe says the type of a tensor; norms, biases, routers and some small matrices stay as they are."""
    lengths = [length for number, length in enumerate(shape) if length != 1 or any(n != 1 for n in shape[:number])]
    return (
        len(lengths) >= 2
        and name.endswith("weight")
        and name not in _KEPT_NAMES
        and not any(part in name for part in _KEPT)
    )


def tensor_types(
    recipe: str, shapes: Mapping[str, tuple[int, ...]], model: Model, *, importance: bool = False
) -> dict[str, str]:
    """The type of each tensor that a recipe says one of.

    Parameters
    ----------
    recipe : str
        A name of `RECIPES`, in any case, or one of llama-quantize's short forms (``"q4_k"`` for ``"q4_k_m"``).
    shapes : mapping of str to tuple of int
        The shapes of **all** tensors of the model (rows last but one, as in NumPy), by llama.cpp's names.
    model : Model
        The model.
    importance : bool, default False
        Whether there is an importance matrix: some rules ask.

    Returns
    -------
    dict of str to str
        Names of formats, or of the dtypes float16, bfloat16 and float32, in llama.cpp's order of tensors. Those that
        are missing stay as they are.

    Raises
    ------
    FormatError
        When there is no such recipe, or a model of experts has a tensor outside its layers.

    Examples
    --------
    >>> from kbitcupy.io.recipes import Model, tensor_types
    >>> shapes = {"token_embd.weight": (512, 256), "blk.0.attn_v.weight": (256, 256), "blk.0.attn_q.weight": (256, 256)}
    >>> tensor_types("q4_k_m", shapes, Model("llama", 1, 4, 4))
    {'token_embd.weight': 'q6_k', 'blk.0.attn_q.weight': 'q4_k', 'blk.0.attn_v.weight': 'q6_k'}
    """
    recipe = find_recipe(recipe)
    names = sorted(shapes, key=order)
    kinds = {name: next((kind for kind in _KINDS if kind in name), "") for name in names}
    head = "output.weight" if "output.weight" in shapes else None
    values = sum(kinds[name] in _ATTN_V_KINDS for name in names if name not in (head, *EMBEDDINGS))
    counted = {"attn_v": 0, "ffn_down": 0}
    types: dict[str, str] = {}
    for name in names:
        if not takes_part(name, shapes[name]):
            continue
        own = RECIPES[recipe].type
        if own in _PLAIN:
            types[name] = own
            continue
        columns = shapes[name][-1]
        if name == "output.weight" or (head is None and name in EMBEDDINGS):
            found = _head_type(recipe, columns, model)
        elif recipe == "mxfp4_moe":
            found = "mxfp4" if len(shapes[name]) >= 3 and shapes[name][-3] > 1 else "q8_0"
        elif name in EMBEDDINGS:
            found = "q4_k" if own in ("tq1_0", "tq2_0") else own
        elif kinds[name] in _ATTN_V_KINDS:
            found = _attn_v_type(recipe, _At(model, importance, counted["attn_v"], values))
            counted["attn_v"] += 1
        elif kinds[name] == "ffn_down":
            layer = _layer_of_experts(name, model) if model.experts > 1 else counted["ffn_down"]
            at = _At(model, importance, layer, model.layers)
            rules = {**_FFN_DOWN, **_FFN_DOWN_OF_FALCON} if at.falcon else _FFN_DOWN
            found = _asked(rules, recipe, at)
            counted["ffn_down"] += 1
        elif kinds[name] == "attn_output.weight":
            at = _At(model, importance, 0, 0)
            found = _asked(_ATTN_OUTPUT_OF_8 if model.experts == 8 and not at.falcon else _ATTN_OUTPUT, recipe, at)
        elif kinds[name] == "attn_k.weight" and model.experts == 8:
            found = "q8_0"
        else:
            if kinds[name] in ("ffn_up", "ffn_gate") and model.experts > 1:
                _layer_of_experts(name, model)
            found = own
        types[name] = _fitting(found, columns)
    return types


def _asked(rules: _Rules, recipe: str, at: _At) -> str:
    """The type that the rules say, or the recipe's own."""
    return (rules[recipe](at) if recipe in rules else None) or RECIPES[recipe].type


def _attn_v_type(recipe: str, at: _At) -> str:
    """Of attn_v, and of what holds it together with others."""
    if at.model.experts == 8:
        return "q8_0"
    found = _asked(_ATTN_V, recipe, at)
    return "q5_k" if at.model.is_70b and found in ("q3_k", "q4_k") else found


def _head_type(recipe: str, columns: int, model: Model) -> str:
    """Of the matrix that gives the logits."""
    own = RECIPES[recipe].type
    whole = columns % (256 if own in _OF_32 else 32) == 0
    return "q8_0" if own in ("q8_0", "mxfp4") or model.architecture == "falcon" or not whole else "q6_k"


def _fitting(type: str, columns: int) -> str:
    """The type itself, or one whose blocks the rows are whole numbers of."""
    if type in _OF_32:
        if columns % 256 == 0:
            return type
        type = _OF_32[type]
    return "float16" if columns % 32 else type


def _layer_of_experts(name: str, model: Model) -> int:
    """The number of a tensor's layer: those of experts come in any order."""
    found = _LAYER.match(name)
    if not found or not found[2] or not 0 <= int(found[1]) < model.layers:
        raise FormatError(
            f"tensor {name!r} is in none of the {model.layers} layers of a model of {model.experts} experts: its name "
            f"must begin with blk.N., N from 0 to {model.layers - 1}"
        )
    return int(found[1])
