"""Commands that write: one file to one output, or several into a folder, all of them checked before the first."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from ..errors import FileError
from ..io.atomic import as_path, check_space
from ..io.checkpoint import INDEX_ENDING
from ..io.convert import FileReport
from ..io.gguf import part_of
from .workers import sharing, size_of

_ENDINGS = (".safetensors", ".gguf", ".npy", ".npz")

#: Takes a source, an output, whether only to check, and who does the work; returns what was done.
Work = Callable[[str, str, bool, Executor | None], FileReport]


def outputs(files: Sequence[str], output: str, ending: str) -> list[tuple[str, str]]:
    """Each file, and what is written for it: `output` itself for one, in that folder for several.

    Raises
    ------
    FileError
        When two of them would be the same.
    """
    if len(files) == 1:
        return [(files[0], output)]
    found: dict[str, str] = {}
    for file in files:
        name = _name(as_path(file, "FILE"), ending)
        if name in found:
            raise FileError(
                f"{found[name]} and {file} would both be written to {name} in {output}: write one elsewhere"
            )
        found[name] = file
    return [(file, os.path.join(output, name)) for name, file in found.items()]


def _name(path: Path, ending: str) -> str:
    """The name of the output: that of the file with the new ending, or that of the folder."""
    whole = Path(os.path.abspath(path))
    part = part_of(whole)
    if whole.name.endswith(INDEX_ENDING):
        name, is_folder = whole.parent.name, True
    elif part is not None:
        name, is_folder = part[0], True
    else:
        name, is_folder = whole.name, whole.is_dir()
        if not is_folder and whole.suffix in _ENDINGS:
            name = whole.stem
    return name if is_folder and ending == ".safetensors" else name + ending


def convert(arguments: argparse.Namespace, steps: Sequence[tuple[str, str]], work: Work) -> Iterator[FileReport]:
    """Do the work for each file, and yield the report of each.

    Raises
    ------
    FileError
        When any of them cannot be made: then none is.
    """
    with sharing(arguments, 0 if arguments.dry_run else size_of(arguments.files)) as executor:
        yield from _convert(arguments, steps, work, executor)


def _convert(
    arguments: argparse.Namespace, steps: Sequence[tuple[str, str]], work: Work, executor: Executor | None
) -> Iterator[FileReport]:
    if len(steps) == 1:
        yield work(*steps[0], arguments.dry_run, executor)
        return
    folder = as_path(arguments.output, "OUT")
    with _folder(folder, arguments.dry_run):
        planned = [work(source, output, True, executor) for source, output in steps]
        if not arguments.resume:
            check_space(folder, sum(report.nbytes_after for report in planned))
        if arguments.dry_run:
            yield from planned
            return
        for source, output in steps:
            yield work(source, output, False, executor)


@contextlib.contextmanager
def _folder(folder: Path, dry_run: bool) -> Iterator[None]:
    """The folder for several outputs, which does not stay when nothing comes into it."""
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file, but several outputs go into a directory: name one, or pass one FILE")
    made = not folder.exists()
    if made:
        try:
            folder.mkdir()
        except OSError as error:
            raise FileError(f"{folder} cannot be made: {error.strerror or error}") from error
    try:
        yield
    finally:
        if made and (dry_run or not any(folder.iterdir())):
            with contextlib.suppress(OSError):
                folder.rmdir()
