"""``kbit quantize``, ``kbit dequantize``, ``kbit inspect``: files in, files out, and what is in them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from .._version import __version__
from ..backend.xp import FLOAT_DTYPES
from ..errors import FormatError
from ..explore import label, read_plan
from ..io.atomic import PART, check_file, leftovers
from ..io.checkpoint import MIN_SIZE, Checkpoint, File
from ..io.convert import FileReport, dequantize_file, quantize_file
from ..io.gguf import GGUF, GgufValue
from ..io.layouts import LAYOUTS
from ..io.recipes import RECIPES, find_recipe
from ..io.safetensors import SAFETENSORS
from ..text import Column, printable, table
from .common import chosen_format, dumps, finite
from .several import Work, convert, outputs
from .workers import devices_of

# Of a value of the metadata: a template of a chat has thousands of characters, which --json shows.
_LONGEST_TEXT = 400
_GGUF_LAYOUTS = {layout.name for layout in LAYOUTS if layout.container is GGUF}


def run_quantize(arguments: argparse.Namespace) -> None:
    """Run ``kbit quantize``."""
    if arguments.option and arguments.plan is not None:
        raise FormatError("--option is one of --format; the formats of a plan have theirs in it: leave it away")
    if arguments.option and arguments.recipe is not None:
        raise FormatError("--option is one of --format; the types of a recipe have none: leave it away")
    formats: Any = None
    if arguments.recipe is not None:
        done = f"quantized by recipe {arguments.recipe}"
    elif arguments.plan is not None:
        done = f"quantized by {arguments.plan}"
        formats = read_plan(arguments.plan)
    else:
        done = f"quantized to {arguments.format}"
        formats = chosen_format(arguments.format, arguments.option)
    others = [Path(path) for path in (arguments.plan, arguments.importance, arguments.tokenizer) if path is not None]
    into_gguf = arguments.recipe is not None or arguments.layout in _GGUF_LAYOUTS
    steps = outputs(arguments.files, arguments.output, GGUF.ending if into_gguf else SAFETENSORS.ending)
    for _, output in steps:
        if others and os.path.isfile(output):
            check_file(output, arguments.force, others)

    def work(source: str, output: str, dry_run: bool, executor: Executor | None) -> FileReport:
        return quantize_file(
            source,
            output,
            formats,
            recipe=arguments.recipe,
            importance=arguments.importance,
            tokenizer=arguments.tokenizer,
            min_size=arguments.min_size,
            keep=arguments.keep,
            layout=arguments.layout,
            weight_scale=arguments.weight_scale,
            dry_run=dry_run,
            executor=executor,
            **_writing(arguments),
        )

    def say(report: FileReport) -> None:
        for pattern in report.unused_keep:
            _note(f"--keep {pattern!r} matches no tensor")
        if report.without_importance:
            _note(
                f"{arguments.importance} has no importance for {len(report.without_importance)} tensors, which are "
                f"quantized without: {', '.join(report.without_importance)}"
            )
        _say(report)
        only_rounded = arguments.recipe and RECIPES[find_recipe(arguments.recipe)].type in FLOAT_DTYPES
        if not report.converted and not only_rounded:
            _note(_why_nothing(arguments, report))

    _convert(arguments, steps, work, done, say)


def run_dequantize(arguments: argparse.Namespace) -> None:
    """Run ``kbit dequantize``."""

    def work(source: str, output: str, dry_run: bool, executor: Executor | None) -> FileReport:
        return dequantize_file(
            source,
            output,
            dtype=arguments.dtype,
            weight_scale=arguments.weight_scale,
            dry_run=dry_run,
            executor=executor,
            **_writing(arguments),
        )

    steps = outputs(arguments.files, arguments.output, SAFETENSORS.ending)
    _convert(arguments, steps, work, "dequantized", _say)


def _convert(
    arguments: argparse.Namespace,
    steps: Sequence[tuple[str, str]],
    work: Work,
    done: str,
    say: Callable[[FileReport], None],
) -> None:
    """Do the work for each file, and say what was done."""
    targets = [output for _, output in steps]
    documents = []
    with _resumable(arguments, targets), _sweeping(targets):
        for (_, output), report in zip(steps, convert(arguments, steps, work), strict=True):
            say(report)
            if arguments.json:
                documents.append(_document(output, report))
            else:
                _close(output, done, report)
    if arguments.json:
        print(dumps(documents if len(steps) > 1 else documents[0]))
    if arguments.dry_run:
        _note("nothing was written (--dry-run)")


def _note(text: str) -> None:
    print(printable(f"kbit: note: {text}"), file=sys.stderr)


def _say(report: FileReport) -> None:
    """What the result lacks, or is not."""
    for text in report.notes:
        _note(text)
    if report.files_left_out:
        names = ", ".join(report.files_left_out[:8]) + (", ..." if len(report.files_left_out) > 8 else "")
        _note(
            f"left out {names}: neither the tensors that are converted, nor configuration, tokenizer or text (pickles "
            "never go along)"
        )


def _why_nothing(arguments: argparse.Namespace, report: FileReport) -> str:
    already = report.compressed_already
    some = f"{already} of {report.copied} tensors are compressed already (kbit dequantize restores them)"
    if already == report.copied > 0:
        return f"nothing was compressed: {some}"
    least = MIN_SIZE if arguments.min_size is None else arguments.min_size
    wanted = f"a float dtype, two or more dimensions, {least} or more elements (--min-size)"
    if arguments.plan:
        wanted = "a format in the plan"
    elif arguments.recipe:
        wanted = "a type in the recipe other than its own"
    none = f"no {'other ' if already else ''}tensor has {wanted} and a name that --keep does not match"
    return f"nothing was compressed: {f'{some}, and ' if already else ''}{none}"


@contextlib.contextmanager
def _sweeping(targets: Sequence[str]) -> Iterator[None]:
    """Say what killed runs have left beside outputs of one folder, which a run may have removed when it ends."""
    folder = Path(os.path.abspath(targets[0])).parent
    before = leftovers(folder)
    own = {Path(os.path.abspath(output) + PART) for output in targets}
    try:
        yield
    finally:
        after = leftovers(folder)
        for path, nbytes in before.items():
            if path not in after and path not in own:
                _note(f"removed {path} ({nbytes / 1e6:.1f} MB), which a run that was killed had left")
        _note_leftovers({path: nbytes for path, nbytes in after.items() if path not in own})


def _note_leftovers(found: Mapping[Path, int]) -> None:
    for path, nbytes in found.items():
        remedy = "delete it"
        if path.suffix == PART:
            remedy = "repeat that run with --resume, or delete it"
        _note(f"a run that was killed has left {path} ({nbytes / 1e6:.1f} MB): {remedy}")


def _writing(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": devices_of(arguments),
        "force": arguments.force,
        "resume": arguments.resume,
        "progress": sys.stderr.isatty(),
    }


@contextlib.contextmanager
def _resumable(arguments: argparse.Namespace, targets: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for output in targets:
            part = os.path.normpath(output) + PART
            if arguments.resume and os.path.isdir(part):
                _note(f"{part} keeps finished shards; repeat the command to continue")
        raise


def _document(output: str, report: FileReport) -> dict[str, Any]:
    """What was done, as JSON."""
    numbers = {"bits_per_element": report.bits_per_element, "gb_per_second": report.gb_per_second}
    finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return {"kbitcupy": __version__, "output": output, **dataclasses.asdict(report), **finite}


def _close(output: str, done: str, report: FileReport) -> None:
    """The closing line."""
    files = "file was" if report.resumed == 1 else "files were"
    there = f" ({report.resumed} {files} there already)" if report.resumed else ""
    count = len(report.files_copied)
    beside = f", {count} other {'file' if count == 1 else 'files'} beside" if count else ""
    lost = ""
    if report.not_finite:
        names = ", ".join(report.not_finite[:3]) + (", ..." if len(report.not_finite) > 3 else "")
        lost = f"; {report.nan} NaN and {report.infinite} infinite values, which are not kept, in {names}"
    bits = f", {report.bits_per_element:.2f} bits per element" if report.elements else ""
    print(
        f"{printable(output)}: {report.converted} tensors {done}, {report.copied} copied{there}{beside}; "
        f"{report.nbytes_before / 1e6:.2f} MB before, {report.nbytes_after / 1e6:.2f} MB after{bits}, "
        f"{report.seconds:.2f} s, {report.gb_per_second:.2f} GB/s{printable(lost)}"
    )


# ---- inspect -------------------------------------------------------------------------------------------------------


def run_inspect(arguments: argparse.Namespace) -> None:
    """Run ``kbit inspect``."""
    documents = []
    for number, file in enumerate(arguments.files):
        if number and not arguments.json:
            print()
        documents.append(_inspect(file, arguments.json))
    if arguments.json:
        print(dumps(documents if len(documents) > 1 else documents[0]))


def _inspect(name: str, as_json: bool) -> dict[str, Any] | None:
    """Show what is in a file, or return it as JSON."""
    checkpoint = Checkpoint(name)
    _note_leftovers(leftovers(checkpoint.paths[0].parent))
    total = checkpoint.nbytes
    rows = [row for file in checkpoint.files.values() for row in _rows(checkpoint, file, total)]
    written_by = checkpoint.written_by
    compressed = sum(row["format"] is not None for row in rows)
    if as_json:
        return {
            "kbitcupy": __version__,
            "source": name,
            "written_by": written_by,
            "files": {each: file.nbytes for each, file in checkpoint.files.items()},
            "metadata": finite({key: _plain(value) for key, value in checkpoint.metadata.items()}),
            "index_metadata": finite(checkpoint.index_metadata),
            "nbytes": total,
            "tensors": [{key: value for key, value in row.items() if key != "label"} for row in rows],
        }
    files = f" in {len(checkpoint.files)} files" if len(checkpoint.files) > 1 else ""
    writer = f", written by {written_by}" if written_by else ""
    about = f"{len(rows)} tensors{files}, {compressed} of them compressed{writer}"
    print(printable(f"{name}: {about}, {total / 1e6:.2f} MB"))
    for key, value in checkpoint.metadata.items():
        text = str(value)
        more = f"... ({len(text)} characters)" if len(text) > _LONGEST_TEXT else ""
        print(printable(f"metadata {key}: {text[:_LONGEST_TEXT]}{more}"))
    columns = [
        Column("tensor", left=True, elastic=True),
        Column("format", left=True),
        Column("dtype", left=True),
        Column("shape", left=True, elastic=True),
        Column("bits"),
        Column("MB"),
        Column("share"),
    ]
    words = list(dict.fromkeys(word for row in rows for word in row["shares"]))
    columns += (Column(word) for word in words)
    cells = [
        [
            row["name"],
            row["label"],
            row["dtype"],
            "x".join(map(str, row["shape"])) or "scalar",
            "" if row["bits_per_element"] is None else f"{row['bits_per_element']:.2f}",
            f"{row['nbytes'] / 1e6:.3f}",
            f"{row['share']:.1%}",
            *(f"{row['shares'][word]:.1%}" if word in row["shares"] else "" for word in words),
        ]
        for row in rows
    ]
    print(table(columns, cells))
    return None


def _plain(value: Any) -> Any:
    """A value of a file's metadata as JSON."""
    return value.json if isinstance(value, GgufValue) else value


def _rows(checkpoint: Checkpoint, file: File, total: int) -> Iterator[dict[str, Any]]:
    """One row for each tensor, by name; all that a compressed one consists of is counted together."""
    about: tuple[Any, ...]
    for name in sorted((*file.compressed, *file.plain)):
        nbytes = sum(entry.nbytes for entry in checkpoint.stored(name).values())
        if name in file.compressed:
            found = file.compressed[name]
            shape, about = found.shape, (found.format.config(), label(found.format), found.dtype.name)
        else:
            entry = file.reader.entries[name]
            shape, about = entry.shape, (None, "", entry.dtype)
        size = math.prod(shape)
        shares: dict[str, float] = {}
        if name in file.compressed and found.format.tells:
            shares = found.format.shares(found.read(file.reader).planes, shape)
        yield {
            "name": name,
            **dict(zip(("format", "label", "dtype"), about, strict=True)),
            "shape": list(shape),
            "nbytes": nbytes,
            "bits_per_element": nbytes * 8 / size if size else None,
            "share": nbytes / total if total else 0.0,
            "shares": shares,
            "file": file.path.name,
        }
