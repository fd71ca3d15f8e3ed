"""What ``from_pretrained`` of transformers wants of a folder: which matrices are compressed, and ``config.json``.

transformers swaps the linear layers of a model for those of a quantizer that ``quantization_config`` names, all but the
ones that it lists. Embeddings are no such layers, nor is the head, which often is the embedding once more, nor are the
experts of a mixture and what chooses among them. A model loads when just the layers that are swapped are compressed.

Source: transformers 5.23, ``quantizers/base.py``, ``quantizer_bnb_4bit.py``, ``quantizer_compressed_tensors.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import FileError
from ..formats.base import Choice
from .bitnet import CONFIG
from .checkpoint import Checkpoint
from .gguf import GgufReader
from .huggingface import quantization_of, read_config
from .layouts import LAYOUTS, Layout

#: Last parts of the names of embeddings and of heads.
_EMBEDDINGS = ("embed", "wte", "wpe", "relative_attention_bias")
_HEADS = ("shared", "lm_head", "embed_out", "score", "classifier", "qa_outputs", "vocab_projector")
#: Heads that are an embedding once more, of which a file then has nothing.
_TIED = ("lm_head",)
_TIED_OF_BERT = ("cls.predictions.decoder", "predictions.decoder", "lm_head.decoder", "vocab_projector")
#: What a mixture of experts has instead of linear layers.
_EXPERTS, _ROUTERS = "experts", ("gate", "router")
#: Models with linear layers of a class of their own (transformers' Conv1D with transposed matrices, FalconLinear).
_OWN_LINEAR = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "falcon")
#: Models whose code looks at weights of their layers, and the one that bitsandbytes leaves to them.
_LOOK_AT = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano")
_LOOKED_AT = "wo"
_KEY = "quantization_config"
#: Where a folder that only kbitcupy reads keeps what its configuration said before.
_BEFORE = "before"


@dataclass(frozen=True)
class Pretrained:
    """How a checkpoint is written, as far as transformers is to load it.

    Parameters
    ----------
    choices : mapping of str to Choice
        Formats by tensor.
    beside : dict of str to bytes
        Files of the folder.
    notes : tuple of str
        What is to be said.
    """

    choices: Mapping[str, Choice]
    beside: dict[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def natural_layout(checkpoint: Checkpoint, choices: Mapping[str, Choice]) -> str:
    """The layout of a checkpoint for which none is asked: for a model of transformers, one that it loads by itself."""
    config = _model_of(checkpoint)
    if config is None or checkpoint.compressed or quantization_of(config) or config.get("model_type") in _OWN_LINEAR:
        return "kbitcupy"
    formats = [format for name, (format, _) in choices.items() if not _part_of_experts(name)]
    mixed = config.get("model_type") in _LOOK_AT
    found = [
        layout.name
        for layout in LAYOUTS
        if layout.linear_only and layout.loads_mixed >= mixed and all(layout.is_natural(each) for each in formats)
    ]
    return found[0] if found and len(formats) == len(choices) > 0 else "kbitcupy"


def for_pretrained(
    checkpoint: Checkpoint, choices: Mapping[str, Choice], layout: Layout, *, planned: bool, one_file: bool
) -> Pretrained:
    """How a checkpoint is written.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is read.
    choices : mapping of str to Choice
        The formats of all tensors that can have them.
    layout : Layout
        The layout.
    planned : bool
        Whether each tensor was named.
    one_file : bool
        Whether a file is written, to which a plan is law: of a model more is known.

    Raises
    ------
    FileError
        When transformers could not load the folder.
    """
    config = None if one_file else _model_of(checkpoint)
    if not layout.linear_only:
        return Pretrained(choices) if config is None else _beside_own(checkpoint, choices, layout, config)
    if config is None:
        left = {name: each for name, each in choices.items() if planned or not _is_looked_up(name)}
        return Pretrained(left, notes=_spared_note(choices, left))
    method = _before_us(config).get("quant_method")
    if method is not None:
        raise FileError(
            f"{checkpoint.path}: {CONFIG} says that the model is quantized by {str(method)[:100]!r}: restore it first "
            "with kbit dequantize"
        )
    kind = config.get("model_type")
    for what, refused in (
        (f"linear layers of {kind!r}", kind in _OWN_LINEAR),
        (f"layers of {kind!r}", kind in _LOOK_AT and not layout.loads_mixed),
        ("experts", any(map(_part_of_experts, choices)) and not layout.loads_mixed),
    ):
        if refused:
            raise FileError(
                f"{checkpoint.path}: transformers does not load a model with {what} from the layout {layout.name!r}: "
                "take layout='kbitcupy' (--layout kbitcupy)"
            )
    shapes = {name: _shape_of(checkpoint, name) for name in checkpoint}
    for name in checkpoint.compressed:
        if not _is_swapped(name, shapes[name], kind):
            raise FileError(
                f"{checkpoint.path}: tensor {name!r} is compressed already, and transformers cannot load it so: "
                "restore it first with kbit dequantize"
            )
    left = {name: each for name, each in choices.items() if _is_swapped(name, shapes[name], kind)}
    formats = {name: (one.format, one.dtype.name) for name, one in checkpoint.compressed.items()}
    formats.update((name, (each[0], checkpoint.reader.entry(name).dtype)) for name, each in left.items())
    notes = _spared_note(choices, left)
    if not formats:
        return Pretrained(left, notes=notes)
    plain = [name for name, shape in shapes.items() if len(shape) == 2 and name not in formats and _is_weight(name)]
    heads = (*_TIED, *(_TIED_OF_BERT if "bert" in str(kind) else ()))
    prefixes = {name.partition(".")[0] for name in formats}
    prefix = f"{prefixes.pop()}." if len(prefixes) == 1 else ""
    # A base model, which AutoModel makes, has the names of its layers without the first part.
    ignored = sorted({*heads, *map(_module, plain), *(_module(name.removeprefix(prefix)) for name in plain)})
    said = layout.quantization_config(formats, ignored, prefix)
    loaded = layout.load_note(format for format, _ in formats.values())
    return Pretrained(left, {CONFIG: _text({**config, _KEY: said})}, (*notes, loaded))


def restored_config(checkpoint: Checkpoint) -> dict[str, bytes]:
    """``config.json`` of a folder that was compressed, without what it says of that; nothing where it says nothing."""
    config = _model_of(checkpoint)
    known = {None, "bitnet", *(layout.name for layout in LAYOUTS)}
    if config is None or _KEY not in config:
        return {}
    before = _before_us(config)
    if before.get("quant_method") in known:
        return {CONFIG: _text({key: value for key, value in config.items() if key != _KEY})}
    return {} if before is quantization_of(config) else {CONFIG: _text({**config, _KEY: before})}


def _beside_own(
    checkpoint: Checkpoint, choices: Mapping[str, Choice], layout: Layout, config: Mapping[str, Any]
) -> Pretrained:
    """A folder that only kbitcupy reads: transformers would fill the layers that it misses with random numbers, but
    refuses a folder whose `quantization_config` does not name a method.
    """
    about, before = layout.quantization_config({}, (), ""), quantization_of(config)
    if not about or not (choices or (checkpoint.compressed and not before)):
        return Pretrained(choices)
    if before:
        about = dict(before) if before.get("quant_method") is None else {**about, _BEFORE: before}
    others = " and ".join(f"{layout.loads} (--layout {layout.name})" for layout in LAYOUTS if layout.linear_only)
    note = f"kbitcupy alone reads this folder, and {CONFIG} says so; transformers loads {others}"
    return Pretrained(choices, {CONFIG: _text({**config, _KEY: about})}, (note,))


def _before_us(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of weights that another program has compressed."""
    about = quantization_of(config)
    before = about.get(_BEFORE)
    return before if about.get("quant_method") is None and isinstance(before, dict) else about


def _model_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """``config.json`` of a folder that is a model of transformers; None for all else."""
    if checkpoint.folder is None or any(isinstance(file.reader, GgufReader) for file in checkpoint.files.values()):
        return None
    config = read_config(checkpoint.folder)
    return config if config is not None and (config.get("model_type") or config.get("architectures")) else None


def _shape_of(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    found = checkpoint.compressed.get(name)
    return checkpoint.reader.entry(name).shape if found is None else found.shape


def _module(name: str) -> str:
    return name.removesuffix("weight").removesuffix(".")


def _is_weight(name: str) -> bool:
    return name.endswith(".weight")


def _is_looked_up(name: str) -> bool:
    """Whether a tensor is an embedding or a head, by its name."""
    module = _module(name)
    last = module.split(".")[-1]
    return (
        any(part in last for part in _EMBEDDINGS)
        or last in _HEADS
        or module.endswith(_TIED_OF_BERT)
        or "lm_head" in module.split(".")
    )


def _part_of_experts(name: str) -> bool:
    return _EXPERTS in name.split(".")


def _is_swapped(name: str, shape: tuple[int, ...], kind: Any) -> bool:
    """Whether transformers swaps the layer of this tensor in a model of this kind."""
    last = _module(name).split(".")[-1]
    return (
        _is_weight(name)
        and len(shape) == 2
        and not _is_looked_up(name)
        and not _part_of_experts(name)
        and last not in _ROUTERS
        and not (kind in _LOOK_AT and last == _LOOKED_AT)
    )


def _spared_note(choices: Iterable[str], left: Mapping[str, Any]) -> tuple[str, ...]:
    spared = [name for name in choices if name not in left]
    if not spared:
        return ()
    shown = ", ".join(spared[:4]) + (", ..." if len(spared) > 4 else "")
    tensors = "1 tensor stays as it is" if len(spared) == 1 else f"{len(spared)} tensors stay as they are"
    return (f"{tensors}, for transformers swaps linear layers only: {shown}",)


def _text(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2).encode() + b"\n"
