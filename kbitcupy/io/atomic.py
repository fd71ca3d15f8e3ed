"""Outputs that are whole or not there.

A file is written beside its name and renamed, a folder is filled beside its name and renamed: after Ctrl-C, an error,
``kill -9`` or a full disk the old output stands, or none.

Of two processes that want one output, one has it. Whoever fills a folder holds the lock of the note in it, and nobody
writes to, or removes, a folder without holding that lock. A temporary file is locked by its writer, too: what is free
has lost its owner.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import FileError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

#: A folder being filled has its final name and this ending.
PART = ".part"
#: What a folder is being filled with.
JOB = ".kbit-job.json"

_TEMPORARY = re.compile(r"\.kbit-[0-9a-f]{16}\.tmp")
# A writer on another machine holds a lock that not every network file system shows here, but its file is young.
_STALE_SECONDS = 60
# How long a lock may be held by somebody who only looks whether it is free.
_PATIENCE = 0.2


class InputChanged(FileError):
    """The input was written to while it was read: what was made of it is worth nothing."""


# ---- what may be written -------------------------------------------------------------------------------------------


def as_path(value: Any, argument: str) -> Path:
    """The path of an argument.

    Raises
    ------
    TypeError
        When it is no path.
    FileError
        When it is empty, or holds a NUL character or one that the file system cannot encode.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"{argument} is {type(value).__name__}; it must be a path: a str or pathlib.Path")
    if not text or "\0" in text:
        raise FileError(f"{argument} is {text[:200]!r}; a path is not empty and has no NUL character")
    try:
        os.fsencode(text)
    except UnicodeError as error:
        raise FileError(f"{argument} is {text[:200]!r}, which the file system cannot encode: {error}") from error
    return Path(text)


def check_file(path: str | os.PathLike[str], force: bool, sources: Iterable[Path] = ()) -> Path:
    """The file to write to.

    Raises
    ------
    FileError
        When it is a link, a directory, a device or one of the inputs, exists without `force`, or lies in no directory.
    """
    with _written(path):
        target = _beyond_links(path)
        if target.is_dir():
            raise FileError(f"{path} is a directory; name the output file itself")
        if target.exists():
            for source in sources:
                if source.exists() and target.samefile(source):
                    raise FileError(f"output {path} is the input file {source}; write to another path")
            if not target.is_file():
                raise FileError(f"{path} is not a regular file; name a file to write")
            if not force:
                raise FileError(f"{path} exists; choose another path, or overwrite it with force=True (--force)")
    return target


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder to fill.

    Raises
    ------
    FileError
        When it is a link, a file, or a directory that is not empty, or lies in no directory.
    """
    with _written(path):
        target = _beyond_links(path)
        if target.exists() and not target.is_dir():
            raise FileError(f"{path} is a file, but a checkpoint in shards becomes a directory; choose another path")
        if target.is_dir() and any(target.iterdir()):
            raise FileError(f"{path} is a directory with files in it, which is never overwritten; choose another path")
    return target


def _beyond_links(path: str | os.PathLike[str]) -> Path:
    target = Path(os.path.abspath(as_path(path, "the output")))
    if os.fspath(path) == "-":
        raise FileError("standard output is not written to: name a file (./- is one of that name)")
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
def _written(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the file system refuses in this block is an error of this output."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


# ---- files ---------------------------------------------------------------------------------------------------------


class Output:
    """A file being written; what its disk refuses is an error that names the file.

    Parameters
    ----------
    file : FileIO
        The open file.
    target : pathlib.Path
        The name that it is going to have.
    path : pathlib.Path, optional
        The name that it has, where that is another one.
    """

    def __init__(self, file: FileIO, target: Path, path: Path | None = None):
        self._file, self.target = file, target
        self.path = target if path is None else path

    def write(self, data: Any) -> None:
        """Write bytes, or anything contiguous."""
        left = memoryview(data)
        if not left.nbytes:
            return
        left = left.cast("B")
        with _written(self.target):
            while left:
                left = left[self._file.write(left) :]

    def seek(self, position: int) -> None:
        """Go on at this byte."""
        self._file.seek(position)

    def truncate(self, nbytes: int) -> None:
        """Cut the file to so many bytes."""
        with _written(self.target):
            self._file.truncate(nbytes)


@contextlib.contextmanager
def replacing(target: Path, nbytes: int, force: bool) -> Iterator[Output]:
    """A new file of `nbytes` bytes that takes the place of `target` when all of it is on disk.

    It has the permissions, and where the system allows it the owner, of the file that it replaces.
    """
    with _written(target):
        _remove_stale(target.parent)
        check_space(target.parent, nbytes)
        before = os.stat(target) if target.is_file() else None
    names: list[Path] = []
    try:
        with _written(target):
            file, beside = _create(target, before, names)
        with file:
            yield Output(file, target, beside)
            with _written(target):
                os.fsync(file.fileno())
                if before is not None and sys.platform != "win32":
                    with contextlib.suppress(OSError):  # only root gives files away
                        os.fchown(file.fileno(), before.st_uid, before.st_gid)
                    os.fchmod(file.fileno(), _permissions(before))
        with _written(target):
            check_file(target, force)  # it may have appeared in the meantime
            _rename(beside, target, force)
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                name.unlink()


@contextlib.contextmanager
def opened_again(path: Path, target: Path) -> Iterator[Output]:
    """The file `path` that another thread or process is writing, to be named `target`; what is written here is on the
    disk when the block ends.

    Raises
    ------
    FileError
        When it is not there any more.
    """
    try:
        file = FileIO(path, "r+b")
    except FileNotFoundError as error:
        raise FileError(
            f"{target} is not being written here: the job was given up, or its folder is not one that this process "
            "shares with the one that began it"
        ) from error
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror or error}") from error
    with file:
        yield Output(file, target, path)
        with _written(target):
            os.fsync(file.fileno())


def _create(target: Path, before: os.stat_result | None, names: list[Path]) -> tuple[FileIO, Path]:
    """A new locked file beside `target`, which is never more open than the file that it will replace.

    Its name is put into `names` before there is a file: Ctrl-C may come at any moment from then on.
    """
    mode = 0o666 if before is None else _permissions(before)
    while True:
        beside = target.with_name(f".kbit-{secrets.token_hex(8)}.tmp")
        names.append(beside)
        file = FileIO(beside, "xb", opener=lambda path, flags: os.open(path, flags, mode))
        if _lock(file) is not False and _is_at(file, beside):
            return file, beside
        file.close()  # somebody took it for a dead one's before it was locked
        beside.unlink(missing_ok=True)


def _permissions(about: os.stat_result) -> int:
    return stat.S_IMODE(about.st_mode) & 0o777


def _rename(beside: Path, target: Path, force: bool) -> None:
    if not force:
        try:
            os.link(beside, target)  # unlike a rename it never takes a name that is taken
            return
        except FileExistsError:
            check_file(target, force)
            raise
        except (OSError, NotImplementedError):  # a file system without hard links
            pass
    os.replace(beside, target)


def _lock(file: FileIO, seconds: float = 0) -> bool | None:
    """Whether this process has the lock of an open file from now on, for as long as the file is open.

    None where the file system has no locks.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            if sys.platform == "win32":
                file.seek(1 << 30)  # what is locked cannot be read, so it lies beyond the end
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                file.seek(0)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                return None
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        else:
            return True


def _is_at(file: FileIO, path: Path) -> bool:
    """Whether an open file has this name still."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove_stale(folder: Path) -> None:
    """Delete the temporary files that killed processes left some time ago."""
    for path in _temporaries(folder):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= _STALE_SECONDS:
                with open(path, "r+b", buffering=0) as file:  # locks of network file systems ask for writing
                    if _lock(file):
                        path.unlink()


def _temporaries(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:  # each file of a folder comes here: `Path.iterdir` takes ten times as long
        found = [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]
        return [folder / entry.name for entry in found if entry.is_file(follow_symlinks=False)]


def leftovers(folder: Path) -> dict[Path, int]:
    """What killed processes left in a folder, with its bytes: temporary files, and folders that were being filled."""
    found = {}
    with contextlib.suppress(OSError):
        for path in sorted(_temporaries(folder)):
            if _is_free(path):
                found[path] = path.stat().st_size
        for path in sorted(folder.glob("*" + PART)):
            if _is_free(path / JOB):
                found[path] = sum(inside.stat().st_size for inside in path.iterdir())
    return found


def _is_free(path: Path) -> bool:
    """Whether a file is there and nobody holds its lock."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with open(path, "r+b", buffering=0) as file:
            return bool(_lock(file))
    except OSError:
        return False


# ---- folders -------------------------------------------------------------------------------------------------------


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

    Raises
    ------
    FileError
        When another process is filling it, or what lies there is not the beginning of this job.
    """
    part = target.with_name(target.name + PART)
    note: FileIO | None = None
    try:
        with _written(target):
            note = _claim(part, _note_text(job), resume)
        check_folder(target)  # who had the claim before may have finished it
        with _written(target):
            for path in _temporaries(part):  # whoever filled it before is dead
                path.unlink()
        yield part
        with _written(target):
            if sys.platform == "win32":
                note.close()  # a folder with an open file in it cannot be renamed there
            os.replace(part, target)
        with contextlib.suppress(OSError):
            (target / JOB).unlink()
    except BaseException as error:
        if note is not None and (not resume or isinstance(error, InputChanged) or not _has_files(part)):
            _discard(part, note)
        raise
    finally:
        if note is not None:
            note.close()


@contextlib.contextmanager
def writing_inside(target: Path) -> Iterator[Output]:
    """A file of a folder that is being filled, and its own folder there: it is written anew each time, and whole when
    the folder is.
    """
    with _written(target):
        target.parent.mkdir(exist_ok=True)
        file = FileIO(target, "wb")
    with file:
        yield Output(file, target)
        with _written(target):
            os.fsync(file.fileno())


def _has_files(part: Path) -> bool:
    """Whether a folder that is being filled has finished files."""
    return any(path.name != JOB and not _TEMPORARY.fullmatch(path.name) for path in part.iterdir())


def forget(target: Path, job: Mapping[str, Any]) -> None:
    """Remove the note of this job from a folder that it has filled: a process can be killed before it does so."""
    note, wanted = target / JOB, _note_text(job)
    with contextlib.suppress(OSError):
        if not note.is_symlink() and note.is_file():
            with open(note, "rb") as file:
                same = file.read(len(wanted) + 1) == wanted
            if same:
                note.unlink()


def _note_text(job: Mapping[str, Any]) -> bytes:
    return json.dumps(job, indent=1, sort_keys=True).encode()


def _forsake(part: Path) -> None:
    """Remove a folder that this process has just made, and at most began to note its job in."""
    with contextlib.suppress(OSError):
        (part / JOB).unlink(missing_ok=True)
        part.rmdir()


def _claim(part: Path, job: bytes, resume: bool) -> FileIO:
    """The open note in the folder, which this process has locked: nobody else writes there from now on."""
    while True:
        made = not os.path.lexists(part)
        note: FileIO | None = None
        try:
            try:
                part.mkdir()
            except FileExistsError:
                made = False
                if part.is_symlink() or not (resume and part.is_dir()):
                    if not os.path.lexists(part):
                        continue  # it was removed meanwhile
                    raise FileError(
                        f"{part} is in the way: if another process is writing it, wait for that; if it is unfinished "
                        "work, continue it with resume=True (--resume), or delete it"
                    ) from None
                if not _is_ours(part):
                    raise FileError(_not_this_job(part)) from None
            note = _open_note(part)
            if note is not None:
                _note_job(part, note, job, resume)
                return note
        except BaseException:  # an interrupt among them, which may come at any moment
            if made:
                _forsake(part) if note is None else _discard(part, note)
            if note is not None:
                note.close()
            raise


def _note_job(part: Path, note: FileIO, job: bytes, resume: bool) -> None:
    """Note the job in the folder, where it is not noted yet.

    Raises
    ------
    FileError
        When the folder is of another job, or this one is not to be continued.
    """
    # A little more is read than there should be, and no more: anybody can have put a file there.
    found = note.read(len(job) + 1)
    if (found != job or not resume) if found else not _is_ours(part, empty=True):
        raise FileError(_not_this_job(part))
    if not found:
        try:
            note.write(job)
            os.fsync(note.fileno())
        except BaseException:
            _discard(part, note)
            raise


def _not_this_job(part: Path) -> str:
    return (
        f"{part} is not the unfinished work of this command, with this input and these options: delete it, or repeat "
        "the command that began it"
    )


def _is_ours(part: Path, empty: bool = False) -> bool:
    """Whether a folder has a note, or nothing in it that is not ours; with `empty`, whether it has nothing else."""
    with contextlib.suppress(FileNotFoundError):
        names = [path.name for path in part.iterdir()]
        if empty or JOB not in names:
            return all(name == JOB or _TEMPORARY.fullmatch(name) for name in names)
        return not (part / JOB).is_symlink() and (part / JOB).is_file()
    return True  # it was removed meanwhile


def _open_note(part: Path) -> FileIO | None:
    """The note of a folder, locked; None when the folder or the note was removed meanwhile."""
    try:
        note = FileIO(part / JOB, "r+b", opener=lambda path, flags: os.open(path, flags | os.O_CREAT, 0o666))
    except FileNotFoundError:
        return None
    try:
        if _lock(note, _PATIENCE) is False:
            raise FileError(f"{part} is being written by another process: wait for it, or write elsewhere")
        if _is_at(note, part / JOB):
            return note
    except BaseException:
        note.close()
        raise
    note.close()
    return None


def _discard(part: Path, note: FileIO) -> None:
    """Remove a folder of which this process holds the note, and the note last: until then nobody else begins there."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the note is closed, and the folder has gone
        if not _is_at(note, part / JOB):
            return
        for path in part.iterdir():
            if path.name != JOB:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if sys.platform == "win32":
            note.close()
        (part / JOB).unlink()
        part.rmdir()
