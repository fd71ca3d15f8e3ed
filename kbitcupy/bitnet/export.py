"""A layer as a GGUF file, with trits that llama.cpp's types hold exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import gguf
from ..backend import xp as _xp
from ..errors import FormatError
from .layers import BitLinear
from .packing import pack

__all__ = ["export_gguf"]

_TYPES = ("tq1_0", "tq2_0")


def export_gguf(layer: BitLinear, path: Any, name: str, *, format: str = "tq2_0", force: bool = False) -> None:
    """Write a layer to a GGUF file: the weights, and its bias where it has one.

    Trits are stored as they are, in blocks of 256 along a row with a float16 scale d. Where all weights have one scale
    and `name` ends in ``.weight``, what the rounding of d takes away stands beside them, ``scale / d`` in float32 under
    the name ``.scale``, by which llama.cpp multiplies.

    Parameters
    ----------
    layer : BitLinear
        With rows of whole blocks, and groups of whole blocks, or one scale for each row or for all.
    path : path_like
        The file to write.
    name : str
        The tensor's name, such as ``"blk.0.attn_q.weight"``.
    format : {"tq2_0", "tq1_0"}, default "tq2_0"
        2.06 or 1.69 bits a weight.
    force : bool, default False
        Overwrite `path` if it is a file.

    Raises
    ------
    FormatError
        When the format is another one, or the layer's groups or rows are no whole blocks.
    FileError
        When `path` exists or cannot be written.
    TypeError
        When an argument is of the wrong type.

    Examples
    --------
    >>> import os, tempfile, numpy as np, kbitcupy as kb
    >>> W = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    >>> layer = kb.bitnet.BitLinear.from_weight(W, config=kb.bitnet.BitNetConfig(group_size=256))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.bitnet.export_gguf(layer, f"{folder}/layer.gguf", "blk.0.attn_q.weight")
    ...     q = kb.io.load(f"{folder}/layer.gguf")["blk.0.attn_q.weight"].copy()
    >>> q.format.name, bool((np.sign(q.dequantize()) == layer.quantized_weight.trits()).all())
    ('tq2_0', True)
    """
    from ..io import save

    if not isinstance(layer, BitLinear):
        raise TypeError(f"layer is {type(layer).__name__}; it must be a BitLinear")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name is {name!r}; it must be the tensor's name, such as 'blk.0.attn_q.weight'")
    if format not in _TYPES:
        raise FormatError(f"format is {format!r}; allowed are {', '.join(map(repr, _TYPES))}")
    weight, block = layer.quantized_weight, gguf.block_size(format)
    if weight.in_features % block or (weight.scales.size > weight.out_features and weight.group_size % block):
        raise FormatError(
            f"the layer has {weight.in_features} columns in groups of {weight.group_size}; {format} has a scale for "
            f"{block} neighbours: make it with BitNetConfig(group_size={block}), of rows that are whole blocks"
        )
    q = weight.array.get()
    blocks = pack(q, format)
    stem = name.removesuffix(".weight")
    tensors: dict[str, Any] = {name: gguf.from_blocks(blocks, format, q.shape)}
    scale = q.planes["scale"]
    if scale.size == 1 and stem != name:
        stored = scale.astype(np.float16).astype(np.float32)
        tensors[f"{stem}.scale"] = np.divide(scale, stored, out=np.ones_like(scale), where=stored > 0)
    if layer.bias is not None:
        tensors[f"{stem}.bias"] = _xp.to_device(layer.bias, "cpu").astype(np.float32)
    save(path, tensors, layout="gguf", force=force)
