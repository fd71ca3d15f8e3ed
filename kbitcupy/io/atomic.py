"""Outputs that are whole or not there.

A file is written beside its name and renamed, a folder is filled beside its name and renamed: after Ctrl-C, an error,
``kill -9`` or a full disk the old output stands, or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import FileError

try:
    import fcntl
except ImportError:  # Windows: what a killed process left is not swept there
    fcntl = None  # type: ignore[assignment]

#: A folder being filled has its final name and this ending.
PART = ".part"
#: What a folder is being filled with.
JOB = ".kbit-job.json"

_TEMPORARY = ".kbit-{}.tmp"
# A process locks its temporary file within moments of creating it; a file that is older and free has lost its owner.
_STALE_SECONDS = 60


def check_file(path: str | os.PathLike[str], force: bool, source: Path | None = None) -> Path:
    """The file to write to.

    Raises
    ------
    FileError
        When it is a link, a directory, a device or the input, exists without `force`, or lies in no directory.
    """
    target = _beyond_links(path)
    if target.is_dir():
        raise FileError(f"{path} is a directory; name the output file itself")
    if source is not None and source.exists() and target.exists() and target.samefile(source):
        raise FileError(f"output {path} is the input file; write to another path")
    if target.exists() and not target.is_file():
        raise FileError(f"{path} is not a regular file; name a file to write")
    if target.exists() and not force:
        raise FileError(f"{path} exists; choose another path, or overwrite it with force=True (--force)")
    return target


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder to fill.

    Raises
    ------
    FileError
        When it is a link, a file, or a directory that is not empty, or lies in no directory.
    """
    target = _beyond_links(path)
    if target.exists() and not target.is_dir():
        raise FileError(f"{path} is a file, but a checkpoint in shards becomes a directory; choose another path")
    if target.is_dir() and any(target.iterdir()):
        raise FileError(f"{path} is a directory with files in it, which is never overwritten; choose another path")
    return target


def _beyond_links(path: str | os.PathLike[str]) -> Path:
    target = Path(os.path.abspath(path))
    if target.is_symlink():
        raise FileError(f"{path} is a symbolic link; name the output itself")
    if not target.parent.is_dir():
        raise FileError(f"{path} cannot be written: the directory {target.parent} does not exist; create it first")
    return target


def check_space(folder: Path, nbytes: int) -> None:
    """Check that the disk has room.

    Raises
    ------
    FileError
        When less than `nbytes` is free.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise FileError(
            f"no space left in {folder}: {nbytes / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free; make room, "
            "or write elsewhere"
        )


@contextlib.contextmanager
def replacing(target: Path, nbytes: int, force: bool) -> Iterator[IO[bytes]]:
    """A new file of `nbytes` bytes that takes the place of `target` when all of it is on disk."""
    beside = target.with_name(_TEMPORARY.format(secrets.token_hex(8)))
    try:
        _remove_stale(target.parent)
        check_space(target.parent, nbytes)
        with open(beside, "xb") as file:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_file(target, force)  # it may have appeared in the meantime
        os.replace(beside, target)
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _remove_stale(folder: Path, seconds: float = _STALE_SECONDS) -> None:
    """Delete the temporary files that killed processes left that long ago."""
    for path in folder.glob(_TEMPORARY.format("*")):
        with contextlib.suppress(OSError):
            if fcntl is None or path.is_symlink() or not path.is_file():
                continue
            if time.time() - path.stat().st_mtime >= seconds:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


@contextlib.contextmanager
def filling(target: Path, job: Mapping[str, Any], resume: bool = False) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends.

    Parameters
    ----------
    target : pathlib.Path
        From `check_folder`.
    job : mapping
        JSON values that say what is being written; unfinished work is continued only by the same job.
    resume : bool, default False
        Continue what an earlier process left, and leave finished shards behind after a failure.

    Yields
    ------
    pathlib.Path
        The folder to write into.
    """
    part = target.with_name(target.name + PART)
    try:
        _begin(part, json.dumps(job, indent=1, sort_keys=True).encode(), resume)
        try:
            yield part
            os.replace(part, target)
            (target / JOB).unlink()
        except BaseException:
            if not resume or not any(part.glob("*.safetensors")):
                shutil.rmtree(part, ignore_errors=True)
            raise
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror or error}") from error


def _begin(part: Path, job: bytes, resume: bool) -> None:
    """Make the folder, or check that what is in it is the beginning of this job."""
    if part.is_symlink() or (part.exists() and not (resume and part.is_dir())):
        raise FileError(
            f"{part} is in the way: if it is unfinished work, continue it with resume=True (--resume), or delete it"
        )
    fresh = not part.exists()
    try:
        part.mkdir(exist_ok=True)
        _remove_stale(part, 0)  # nobody else is expected here
        note = part / JOB
        if not note.exists() and all(path.match(_TEMPORARY.format("*")) for path in part.iterdir()):
            with replacing(note, len(job), force=False) as file:
                file.write(job)
        # A little more is read than there should be, and no more: anybody can have put a file there.
        elif not note.is_file() or _head(note, len(job) + 1) != job:
            raise FileError(
                f"{part} is not the unfinished work of this command, with this input and these options: delete it, or "
                "repeat the command that began it"
            )
    except BaseException:
        if fresh:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _head(path: Path, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(nbytes)
