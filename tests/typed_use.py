"""Code of a user that mypy reads (see pyproject.toml): what it does not find here, no editor finds either."""

from typing import Any

import kbitcupy as kb


def compress(tensors: dict[str, Any], path: str) -> kb.io.Checkpoint:
    """Names of every namespace that is loaded when it is first used."""
    rows: list[dict[str, Any]] = kb.explore.sweep(tensors, ["kbit4", "nf4"])
    assert rows
    assert kb.gguf.to_blocks(kb.quantize(tensors["weight"], "q4_k")).size
    assert kb.bitnet.sparsity(kb.quantize(tensors["weight"], "ternary")) <= 1
    kb.affine.smooth_scales(tensors["absmax"], tensors["weight"])
    adapter = kb.lora.LoRA.init(tensors["weight"], r=4)
    assert adapter.forward(tensors["x"]).shape
    kb.io.save(path, {name: kb.quantize(x, "kbit4") for name, x in tensors.items()})
    return kb.io.load(path)


def misspelt() -> None:
    """A name that is not there is an error, which mypy would call a needless comment if it were none."""
    kb.quantise  # type: ignore[attr-defined]  # noqa: B018
