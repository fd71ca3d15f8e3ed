"""What becomes of a checkpoint's tensors on their way into a GGUF file for llama.cpp, and on the way back."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FileError, FormatError
from ..formats.base import resolve
from .atomic import as_path
from .bitnet import BitnetJob
from .changes import Change, Changes
from .checkpoint import Checkpoint
from .gguf import GGUF, GgufReader, GgufValue
from .huggingface import Translation, architecture_of, for_hugging_face, for_llama_cpp, read_config
from .importance import importance_for, read_importance
from .layouts.gguf import ARCHITECTURE_KEY, FILE_TYPE_KEY, QUANTIZATION_VERSION, UNKNOWN, VERSION_KEY
from .layouts.trits import TYPES
from .recipes import EMBEDDINGS, RECIPES, Model, find_recipe, order, tensor_types

_TOKENIZER, _NO_TOKENIZER, _TOKENS = "tokenizer.ggml.model", "no_vocab", "tokenizer.ggml.tokens"
_NO_TOKENIZER_NOTE = (
    "the file has no tokenizer, so that llama.cpp takes tokens but no text: take one from a GGUF file of the model "
    "(tokenizer=, --tokenizer), such as llama.cpp's convert_hf_to_gguf.py --vocab-only makes"
)


class Outcome(NamedTuple):
    """What is to be done, and what is to be said.

    Parameters
    ----------
    changes : Changes
        What becomes of the checkpoint.
    notes : tuple of str
        What whoever asked for it may not expect.
    without_importance : tuple of str
        Tensors that take an importance, for which the file of them has none.
    """

    changes: Changes
    notes: tuple[str, ...] = ()
    without_importance: tuple[str, ...] = ()


def is_gguf(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a GGUF file, or several that are parts of one."""
    return all(isinstance(file.reader, GgufReader) for file in checkpoint.files.values())


def plain_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Values of the metadata without their types; long arrays, which are tokenizers, are left out."""
    found = checkpoint.metadata.items()
    return {
        key: value.value
        for key, value in found
        if isinstance(value, GgufValue) and not (value.type.endswith("[]") and key.startswith("tokenizer."))
    }


def quantizing(
    checkpoint: Checkpoint,
    job: BitnetJob,
    *,
    into_gguf: bool,
    recipe: str | None = None,
    min_size: int = 0,
    keep: Sequence[str] = (),
    importance: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Outcome:
    """How a checkpoint is compressed.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is read.
    job : BitnetJob
        Formats by tensor, of which what a recipe says takes the place, and what is particular to BitNet.
    into_gguf : bool
        Whether a GGUF file is written.
    recipe : str, optional
        Name of a recipe.
    min_size : int
        Of smaller tensors a recipe changes none.
    keep : sequence of str
        Patterns of names that it leaves alone.
    importance : path_like, optional
        An importance matrix of llama.cpp.
    tokenizer : path_like, optional
        A GGUF file whose tokenizer the file to write gets.

    Raises
    ------
    FileError, FormatError
        When the checkpoint is not what a recipe needs, or the importance is of another model.
    """
    foreign = not is_gguf(checkpoint)
    translation = (
        _to_llama_cpp(checkpoint, job.bitnet_cpp)
        if foreign and (into_gguf or importance is not None)
        else Translation({})
    )
    shapes = shapes_of(checkpoint)
    if into_gguf:
        _check_plain(checkpoint, translation, job.kept)
        shapes = {name: shape for name, shape in shapes.items() if name not in translation.left_out}
    names = {name: translation.names.get(name, name) for name in shapes}
    metadata, notes = {**translation.metadata, **job.metadata}, list(translation.notes)
    tensors = {
        name: Change(choice, given_by=job.given_by(choice)) for name, choice in job.choices.items() if name in names
    }
    tensors.update((name, Change(kept=True)) for name in job.kept if name in names)
    if recipe is not None:
        types = _types(checkpoint, recipe, names, shapes, metadata, importance is not None)
        for name in checkpoint.compressible(min_size, keep):
            type = types.get(names.get(name, ""))
            if type is not None and type != checkpoint.reader.entry(name).dtype:
                if type in _xp.FLOAT_DTYPES:
                    tensors[name] = Change(dtype=type)
                else:
                    choice = job.choice(name, resolve(type))
                    tensors[name] = Change(choice, given_by=job.given_by(choice))
        already = len(checkpoint.compressed)
        if job.is_bitnet and RECIPES[find_recipe(recipe)].type in TYPES:
            already -= len(job.kept)  # which get the recipe's type
        if already:
            notes.append(f"{already} tensors are compressed already and keep their types: begin with a file of none")
        else:
            metadata.update({VERSION_KEY: QUANTIZATION_VERSION, FILE_TYPE_KEY: RECIPES[find_recipe(recipe)].file_type})
    without: list[str] = []
    if importance is not None:
        without = _give_importance(tensors, names, shapes, importance)
    if recipe is not None and RECIPES[find_recipe(recipe)].needs_importance:
        _check_importance(find_recipe(recipe), tensors, names)
    if not into_gguf:
        return Outcome(Changes(tensors, beside=job.beside), (), tuple(without))
    if tokenizer is not None:
        rows = next((shape[0] for name, shape in shapes.items() if names[name] == "token_embd.weight" and shape), None)
        metadata.update(_tokenizer(tokenizer, rows))
    elif metadata.get(_TOKENIZER) == _NO_TOKENIZER:
        notes.append(_NO_TOKENIZER_NOTE)
    if foreign:  # what safetensors says means nothing to llama.cpp
        metadata = {**dict.fromkeys(checkpoint.metadata), **metadata}
    made = translation.made
    in_order = None  # llama-quantize sorts; without a recipe a GGUF file's order stays as it is
    if recipe is not None or translation.names:
        in_order = sorted((*names, *made), key=lambda name: order(names.get(name) or name))
    tensors = _renamed(checkpoint, tensors, names, translation)
    return Outcome(Changes(tensors, metadata, made, translation.left_out, in_order), tuple(notes), tuple(without))


def dequantizing(checkpoint: Checkpoint, dtype: str | None, *, into_gguf: bool) -> Outcome:
    """How a checkpoint is restored; models of llama.cpp get Hugging Face's names where these are known here."""
    tensors = dict.fromkeys(checkpoint.compressed, Change(dtype=dtype))
    if into_gguf or not is_gguf(checkpoint):
        return Outcome(Changes(tensors, describes=False))
    metadata = plain_metadata(checkpoint)
    translation = for_hugging_face(metadata, shapes_of(checkpoint))
    if translation is None:
        architecture = metadata.get(ARCHITECTURE_KEY, UNKNOWN)
        note = f"names stay llama.cpp's: Hugging Face's are known of llama and bitnet, not of {architecture!s:.100}"
        return Outcome(Changes(tensors, describes=False), () if architecture == UNKNOWN else (note,))
    names = {name: translation.names.get(name, name) for name in checkpoint if name not in translation.left_out}
    tensors = _renamed(checkpoint, tensors, names, translation)
    return Outcome(Changes(tensors, omitted=translation.left_out, describes=False), translation.notes)


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, compressed or not."""
    compressed, reader = checkpoint.compressed, checkpoint.reader
    return {name: compressed[name].shape if name in compressed else reader.entry(name).shape for name in checkpoint}


def _to_llama_cpp(checkpoint: Checkpoint, bitnet_cpp: bool) -> Translation:
    """The names and metadata of a checkpoint that is no GGUF file."""
    folder = checkpoint.paths[0].parent
    config = read_config(folder)
    if config is None or architecture_of(config) is None:
        why = f"there is no config.json in {folder}"
        if config is not None:
            why = f"config.json says {str(config.get('architectures') or config.get('model_type'))[:100]}"
        note = (
            "names and rows stay as they are, and llama.cpp will not know the model: known are llama and bitnet, and "
        )
        return Translation({}, notes=(note + why,))
    try:
        found = for_llama_cpp(config, shapes_of(checkpoint), bitnet_cpp=bitnet_cpp)
    except FileError as error:
        raise FileError(f"{folder}: {error}") from error
    return replace(found, metadata={**found.metadata, _TOKENIZER: _NO_TOKENIZER})


def _check_plain(checkpoint: Checkpoint, translation: Translation, kept: Collection[str]) -> None:
    """Check that no tensor that gets another name, or another order of rows, is compressed, but for those `kept`."""
    for name in checkpoint.compressed:
        if name in translation.names and name not in kept:
            raise FileError(
                f"{checkpoint.path}: tensor {name!r} is compressed already, and a model of llama.cpp has other names "
                "and another order of rows: restore the file with kbit dequantize first"
            )


def _tokenizer(path: str | os.PathLike[str], rows: int | None) -> dict[str, GgufValue]:
    """The tokenizer of a GGUF file, which has as many tokens as the embedding has rows."""
    file = as_path(path, "tokenizer")
    found = {
        key: value for key, value in GGUF.open(file, mapped=False).metadata.items() if key.startswith("tokenizer.")
    }
    tokens = found.get(_TOKENS)
    if tokens is None or tokens.type != "string[]":
        raise FileError(f"{file} has no tokenizer: pass a GGUF file of the model that llama.cpp takes text with")
    if rows is not None and len(tokens) != rows:
        raise FileError(f"{file} has a tokenizer of {len(tokens)} tokens, but token_embd.weight has {rows} rows")
    return found


def _types(
    checkpoint: Checkpoint,
    recipe: str,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, Any],
    importance: bool,
) -> dict[str, str]:
    """What a recipe says, by the new names; of a model that llama.cpp does not know each matrix is like another."""
    known = {**plain_metadata(checkpoint), **metadata}
    model = Model.of(known) if metadata or is_gguf(checkpoint) else Model(UNKNOWN, 0)
    return tensor_types(recipe, {names[name]: shape for name, shape in shapes.items()}, model, importance=importance)


def _give_importance(
    tensors: dict[str, Change],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    path: str | os.PathLike[str],
) -> list[str]:
    """Put the importance of columns into the changes of tensors that take one; returns those that it has none for."""
    matrices = read_importance(path)
    without = []
    for name, change in tensors.items():
        if change.choice is None or "importance" not in change.choice[0].takes or "importance" in change.choice[1]:
            continue
        found = importance_for(names[name], shapes[name], matrices, path)
        if found is None:
            without.append(name)
        else:
            format, given = change.choice
            tensors[name] = replace(change, choice=(format, {**given, "importance": found}))
    return without


def _check_importance(recipe: str, tensors: Mapping[str, Change], names: Mapping[str, str]) -> None:
    """Check that what would be useless without an importance has one, as llama-quantize does."""
    for name, change in tensors.items():
        if change.choice is None or change.choice[0].name != RECIPES[recipe].type or names[name] in EMBEDDINGS:
            continue
        if "importance" not in change.choice[1]:
            raise FormatError(
                f"recipe {recipe!r} is useless without importance, and there is none for tensor {name!r}: pass "
                "importance= (--importance), or take another recipe, such as 'q2_k'"
            )


def _renamed(
    checkpoint: Checkpoint, tensors: Mapping[str, Change], names: Mapping[str, str], translation: Translation
) -> dict[str, Change]:
    """Changes with new names and orders of rows, of all tensors that have any change."""
    found = {}
    for name, new in names.items():
        before = tensors.get(name)
        transform = translation.transform(name)
        if transform is not None and before is not None and before.kept:
            transform = functools.partial(_reordered, transform)
        widened = name in translation.widened and not (before is not None and before.kept)
        widened = widened and checkpoint.reader.entry(name).dtype in _xp.FLOAT_DTYPES
        if before is None and new == name and transform is None and not widened:
            continue
        change = replace(before or Change(), name=new, transform=transform)
        if widened and change.choice is None:
            change = replace(change, dtype="float32")
        found[name] = change
    return found


def _reordered(transform: Callable[[np.ndarray], np.ndarray], q: QuantizedArray) -> QuantizedArray:
    """The rows of a compressed tensor in the order that they would get, still compressed."""
    return q[transform(np.arange(len(q)))]
