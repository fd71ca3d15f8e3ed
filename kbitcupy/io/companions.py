"""What lies beside the tensors of a checkpoint's folder: configuration, tokenizer and text go along, pickles never.

Copied are regular files of the folder itself whose name says that they are text or a tokenizer, and whose first bytes
do not say anything else; of folders in it those that ``modules.json`` lists, which is how sentence-transformers stores
a pipeline. Other weights stay behind, for they are not what was compressed. Hidden files belong to other programs, and
are not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import FileError
from ..serial import read_json_file
from .atomic import writing_inside
from .container import head_of, reading

#: Names that end so are text.
_TEXT = (
    *(".json", ".txt", ".md", ".rst", ".jinja", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".py"),
    *(".tiktoken", ".bpe", ".vocab", ".merges"),
)
#: Tokenizers of sentencepiece are no text.
_TOKENIZERS = (".model", ".spm")
#: What text without an ending is called.
_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY", "merges", "vocab")
#: An index of other shards, which are not there.
_INDEX_ENDING = ".index.json"
_MODULES = "modules.json"
_TENSORS = ".safetensors"
# The longest tokenizers are a tenth of this; what is longer is data.
_LARGEST = 1 << 28
_HEAD = 1 << 12
_COPIED_BYTES = 1 << 20
# Archives, and the opcode that pickles begin with.
_BINARY = (b"PK\x03\x04", b"\x80", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"\x93NUMPY", b"\x89HDF")


@dataclass(frozen=True)
class Companion:
    """A file to copy.

    Parameters
    ----------
    path : pathlib.Path
        Where it is.
    name : str
        Its name in the folder, with ``/`` where it lies in a folder of that.
    nbytes : int
        Its length.
    """

    path: Path
    name: str
    nbytes: int

    def parts(self) -> Iterator[bytes]:
        """Its bytes.

        Raises
        ------
        FileError
            When it cannot be read, or is no longer what it was.
        """
        left = self.nbytes
        with reading(self.path), open(self.path, "rb") as file:
            while part := file.read(_COPIED_BYTES):
                left -= len(part)
                yield part
        if left:
            raise FileError(f"{self.path} was changed while it was read: wait until it is complete, and repeat")

    def copy(self, folder: Path) -> None:
        """Write it into a folder that is being filled."""
        target = folder.joinpath(*PurePosixPath(self.name).parts)
        with writing_inside(target) as output:
            for part in self.parts():
                output.write(part)

    def is_at(self, folder: Path) -> bool:
        """Whether a folder has a file of this name and these bytes."""
        found = folder.joinpath(*PurePosixPath(self.name).parts)
        if not found.is_file() or found.stat().st_size != self.nbytes:
            return False
        with reading(found), open(found, "rb") as file:
            return all(file.read(len(part)) == part for part in self.parts())


def companions(folder: Path, own: Collection[str], output: Path) -> tuple[list[Companion], list[str]]:
    """The files that go along with a checkpoint's tensors, and the names of those that stay behind.

    Parameters
    ----------
    folder : pathlib.Path
        The folder of the checkpoint.
    own : collection of str
        Names of its files of tensors, and of files that are written anew: they are neither.
    output : pathlib.Path
        What is written, and may lie in the folder.

    Raises
    ------
    FileError
        When the folder cannot be read.
    """
    found: list[Companion] = []
    left: list[str] = []
    with reading(folder):
        paths = sorted(path for path in folder.iterdir() if path.name not in own and not path.name.startswith("."))
    modules = _modules(folder / _MODULES)
    for path in paths:
        if path.is_dir():
            if path.name in modules and not path.is_symlink():
                inside, outside = _of_module(path)
                found += inside
                left += outside
            elif not _is_output(path, output):
                left.append(f"{path.name}/")
        elif _goes_along(path):
            found.append(Companion(path, path.name, path.stat().st_size))
        else:
            left.append(path.name)
    return found, left


def _of_module(folder: Path) -> tuple[list[Companion], list[str]]:
    """Those of a module of a pipeline, whose weights are none of the model's."""
    found: list[Companion] = []
    left: list[str] = []
    with reading(folder):
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in paths:
        name = f"{folder.name}/{path.name}"
        if path.is_file() and (path.suffix == _TENSORS or _goes_along(path)):
            found.append(Companion(path, name, path.stat().st_size))
        else:
            left.append(f"{name}/" if path.is_dir() else name)
    return found, left


def _is_output(path: Path, output: Path) -> bool:
    """Whether a folder is the one to be written, or that one while it is filled."""
    here = os.path.abspath(path)
    return os.path.abspath(output) in (here, here.removesuffix(".part"))


def _goes_along(path: Path) -> bool:
    """Whether a file is configuration, tokenizer or text."""
    if not path.is_file() or path.name.endswith(_INDEX_ENDING):
        return False
    with reading(path):
        if path.stat().st_size > _LARGEST:
            return False
    suffix = path.suffix.lower()
    if suffix in _TOKENIZERS:
        return not head_of(path, _HEAD).startswith(_BINARY)
    named = suffix in _TEXT or (not suffix and path.name.startswith(_NAMES))
    return named and _is_text(head_of(path, _HEAD))


def _is_text(head: bytes) -> bool:
    if b"\0" in head or head.startswith(_BINARY):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 3 and len(head) == _HEAD  # the head ends within a character
    return True


def _modules(path: Path) -> set[str]:
    """The folders that ``modules.json`` lists; nothing in it is trusted."""
    if not path.is_file():
        return set()
    try:
        listed = read_json_file(path)
    except (OSError, ValueError):
        return set()
    entries = [each.get("path") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {name for name in entries if isinstance(name, str)}
