"""Command line: ``kbit compare``, ``kbit quantize``, ``kbit dequantize``, ``kbit bench``."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _xp, bench, metrics
from ._version import __version__
from .errors import FileError, FormatError, KbitError
from .formats.base import Format, formats, get_format
from .io.safetensors import MIN_SIZE, FileReport, SourceFile, dequantize_file, quantize_file, with_progress
from .ops import dequantize, quantize
from .samples import DISTRIBUTIONS, draw

DEFAULT_FORMAT = "kbit4"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        Exit status: 0, 1 after bad input, 130 after Ctrl-C. Bad usage raises SystemExit with status 2, as argparse
        does.

    Examples
    --------
    >>> from kbitcupy.cli import main
    >>> main(["quantize", "missing.safetensors", "-o", "out.safetensors"])
    1
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("kbit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe left (`kbit compare | head`); Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KbitError, ImportError, OSError, MemoryError) as error:
        if arguments.debug:
            traceback.print_exc()
        else:
            print("kbit: error:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


# ---- compare -------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What one format made of one tensor, or of several together."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sums: metrics.Sums = field(default_factory=metrics.Sums)
    nbytes_before: int = 0
    nbytes_after: int = 0

    @property
    def bits_per_element(self) -> float:
        """Bits of all planes for each element."""
        return self.nbytes_after * 8 / self.sums.count if self.sums.count else math.nan

    def add(self, other: Row) -> None:
        """Count `other` in."""
        self.sums += other.sums
        self.nbytes_before += other.nbytes_before
        self.nbytes_after += other.nbytes_after

    def as_json(self) -> dict[str, Any]:
        """JSON values; numbers that JSON has no token for are null."""
        numbers = {
            "sqnr_db": self.sums.sqnr_db,
            "mse": self.sums.mse,
            "max_error": self.sums.largest,
            "bits_per_element": self.bits_per_element,
        }
        about = {} if self.shape is None else {"shape": list(self.shape), "dtype": self.dtype}
        return {
            "name": self.name,
            **about,
            **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
            "bytes_before": self.nbytes_before,
            "bytes_after": self.nbytes_after,
        }


def _compare(arguments: argparse.Namespace) -> None:
    names = arguments.formats
    if names is None:
        names = formats() if arguments.file is None else [DEFAULT_FORMAT]
    chosen = {name: _format(name, arguments) for name in names}
    device = _xp.resolve_device(arguments.device)
    tensors, count = _tensors(arguments)
    rows: dict[str, list[Row]] = {name: [] for name in chosen}
    for tensor, x in with_progress(tensors, count, "compare", sys.stderr.isatty()):
        on_device = _xp.to_device(x, device)
        for name, format in chosen.items():
            rows[name].append(_measure(tensor, on_device, format))
    totals = {name: Row("total") for name in chosen}
    for name, total in totals.items():
        for row in rows[name]:
            total.add(row)
    if arguments.json:
        document = {
            "kbitcupy": __version__,
            "source": arguments.file or "samples",
            "device": device,
            "results": [
                {
                    "format": format.config(),
                    "tensors": [row.as_json() for row in rows[name]],
                    "total": totals[name].as_json(),
                }
                for name, format in chosen.items()
            ],
        }
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        label = " ".join([*chosen, *(option.text for option in arguments.option)]) if len(chosen) == 1 else None
        lines = [(name, row) for name in chosen for row in (*rows[name], totals[name])]
        print("\n".join(_table(lines, label)))


def _tensors(arguments: argparse.Namespace) -> tuple[Iterator[tuple[str, Any]], int]:
    """(name, array) of what is compared, one at a time, and how many there are."""
    if arguments.file is None:
        return ((name, draw(name)) for name in DISTRIBUTIONS), len(DISTRIBUTIONS)
    source = SourceFile(arguments.file)
    names = source.compressible(arguments.min_size, arguments.keep)
    if not names:
        raise FileError(
            f"{arguments.file} holds no tensor to compress: none is {', '.join(_xp.FLOAT_DTYPES)} with two or more "
            f"dimensions, {arguments.min_size} or more elements (--min-size) and a name that --keep does not match"
        )
    return ((name, source.array(name)) for name in names), len(names)


def _measure(name: str, x: Any, format: Format) -> Row:
    try:
        q = quantize(x, format)
        sums = metrics.sums(x, dequantize(q))
    except (ValueError, TypeError) as error:
        raise FormatError(f"tensor {name!r} with {format}: {error}") from error
    return Row(name, x.shape, x.dtype.name, sums, x.nbytes, q.nbytes)


#: Heading, width and text of the columns that hold numbers.
_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("SQNR dB", 7, lambda row: f"{row.sums.sqnr_db:.2f}"),
    ("MSE", 7, lambda row: f"{row.sums.mse:.1e}"),
    ("max err", 7, lambda row: f"{row.sums.largest:.1e}"),
    ("bits", 5, lambda row: f"{row.bits_per_element:.2f}"),
    ("MB before", 9, lambda row: f"{row.nbytes_before / 1e6:.3f}"),
    ("MB after", 8, lambda row: f"{row.nbytes_after / 1e6:.3f}"),
)


def _table(lines: list[tuple[str, Row]], label: str | None) -> list[str]:
    """Aligned text; `label` names the only format, None asks for a column of formats."""
    widest = max((len(name) for name, _ in lines), default=0)
    formats_width = max(widest, len("format")) + 2 if label is None else 0
    numbers_width = sum(width + 2 for _, width, _ in _COLUMNS)
    room = max(100, shutil.get_terminal_size((100, 24)).columns) - formats_width - numbers_width
    heading = "tensor" if label is None else label
    names = [_shortened(name, room) for name in (heading, *(row.name for _, row in lines))]
    width = max(map(len, names))

    def line(format: str, name: str, cells: Iterable[str]) -> str:
        numbers = "".join(f"  {cell:>{width}}" for cell, (_, width, _) in zip(cells, _COLUMNS, strict=True))
        return f"{format:<{formats_width}}{name:<{width}}{numbers}"

    text = [line("format" if label is None else "", names[0], (title for title, _, _ in _COLUMNS))]
    for (format, row), name in zip(lines, names[1:], strict=True):
        cells = (show(row) for _, _, show in _COLUMNS)
        text.append(line(format if label is None else "", name, cells))
    return text


def _shortened(name: str, room: int) -> str:
    """The name without its middle where it is too long; control characters of a file never reach the terminal."""
    name = name if name.isprintable() else ascii(name)
    if len(name) <= room:
        return name
    tail = (room - 3) // 2
    return f"{name[: room - 3 - tail]}...{name[-tail:]}"


# ---- quantize, dequantize ------------------------------------------------------------------------------------------


def _quantize(arguments: argparse.Namespace) -> None:
    report = quantize_file(
        arguments.file,
        arguments.output,
        _format(arguments.format, arguments),
        min_size=arguments.min_size,
        keep=arguments.keep,
        device=arguments.device,
        force=arguments.force,
        progress=sys.stderr.isatty(),
    )
    for pattern in report.unused_keep:
        print(f"kbit: note: --keep {pattern!r} matches no tensor", file=sys.stderr)
    bits = f", {report.bits_per_element:.2f} bits per element" if report.elements else ""
    print(
        f"{arguments.output}: {report.converted} tensors quantized to {arguments.format}, {report.copied} copied; "
        f"{_megabytes(report)}{bits}, {report.seconds:.2f} s"
    )


def _dequantize(arguments: argparse.Namespace) -> None:
    report = dequantize_file(
        arguments.file,
        arguments.output,
        device=arguments.device,
        force=arguments.force,
        progress=sys.stderr.isatty(),
    )
    print(
        f"{arguments.output}: {report.converted} tensors dequantized, {report.copied} copied; {_megabytes(report)}, "
        f"{report.seconds:.2f} s"
    )


def _megabytes(report: FileReport) -> str:
    return f"{report.nbytes_before / 1e6:.2f} MB before, {report.nbytes_after / 1e6:.2f} MB after"


# ---- bench ---------------------------------------------------------------------------------------------------------


def _bench(arguments: argparse.Namespace) -> None:
    report = bench.run(
        arguments.formats,
        sizes=None if arguments.sizes is None else [bench.parse_size(text) for text in arguments.sizes],
        dtypes=arguments.dtypes,
        device=arguments.device,
        quick=arguments.quick,
        peers=arguments.peers,
        progress=sys.stderr.isatty(),
    )
    for note in report.notes:
        print(f"kbit: note: {note}", file=sys.stderr)
    print(report.json() if arguments.json else report.markdown() if arguments.markdown else report.text())


# ---- arguments -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """An option of a format, as it was typed and as it was understood."""

    text: str
    key: str
    value: Any


def _option(text: str) -> Option:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as codebook=nf")
    try:
        return Option(text, key, json.loads(value))
    except (ValueError, RecursionError):
        return Option(text, key, value)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)


def _format(name: str, arguments: argparse.Namespace) -> Format:
    try:
        return get_format(name, **{option.key: option.value for option in arguments.option})
    except KbitError:
        raise
    except (ValueError, TypeError) as error:  # a third party's format need not know kbitcupy's errors
        raise FormatError(f"format {name!r}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kbit", description="Compress tensors to a few bits per element, and restore them."
    )
    parser.add_argument("--version", action="version", version=f"kbitcupy {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common = argparse.ArgumentParser(add_help=False)
    # Without SUPPRESS a command's default would overwrite a --debug that stands before the command.
    common.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    common.add_argument("--device", default="auto", help="auto (default: a GPU where there is one), cpu or cuda:N")
    selection = argparse.ArgumentParser(add_help=False)
    selection.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="option of the format, such as codebook=nf; the value is JSON, or else text",
    )
    selection.add_argument(
        "--min-size",
        type=_count,
        default=MIN_SIZE,
        metavar="N",
        help="leave tensors with fewer elements as they are (default %(default)s)",
    )
    selection.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave tensors whose name matches as they are, such as '*embed*'; may be repeated",
    )
    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument("file", metavar="FILE", help="safetensors file to read")
    writing.add_argument("-o", "--output", metavar="OUT", required=True, help="safetensors file to write")
    writing.add_argument("--force", action="store_true", help="overwrite OUT if it exists")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    compare = commands.add_parser(
        "compare",
        parents=[common, selection],
        help="what formats cost and keep, on a file or on samples",
        description="Compress and restore every tensor of FILE (or seeded samples) and show the loss and the size.",
    )
    compare.add_argument("file", metavar="FILE", nargs="?", help="safetensors file; seeded samples without it")
    compare.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        metavar="A,B",
        help=f"formats to compare (default: {DEFAULT_FORMAT} on a file, all on samples)",
    )
    compare.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    compare.set_defaults(run=_compare)

    quantize_command = commands.add_parser(
        "quantize",
        parents=[common, selection, writing],
        help="compress the float tensors of a file",
        description="Compress the float tensors of FILE that have two or more dimensions, and copy all others.",
    )
    quantize_command.add_argument("--format", default=DEFAULT_FORMAT, help="format (default %(default)s)")
    quantize_command.set_defaults(run=_quantize)

    dequantize_command = commands.add_parser(
        "dequantize",
        parents=[common, writing],
        help="restore a compressed file",
        description="Restore the tensors of a FILE that kbit quantize wrote.",
    )
    dequantize_command.set_defaults(run=_dequantize)

    bench_command = commands.add_parser(
        "bench",
        parents=[common],
        help="how fast the formats are on this machine",
        description="Time quantize and dequantize: on a GPU against the bandwidth of a copy, on NumPy per core.",
    )
    for option, example, text in (
        ("--formats", "A,B", "formats to time (default: all)"),
        ("--sizes", "N,M", "numbers of elements, such as 1000 or 2^20 (default: 2^12 to 2^28 on a GPU, else 2^22)"),
        ("--dtypes", "A,B", "dtypes (default: float16, bfloat16 and float32 on a GPU, else float32)"),
    ):
        bench_command.add_argument(option, type=lambda text: text.split(","), metavar=example, help=text)
    bench_command.add_argument("--quick", action="store_true", help="fewer sizes, dtypes and repetitions")
    bench_command.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time bitsandbytes, torch and gguf too, where they are installed (default: yes)",
    )
    output = bench_command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a JSON document instead of tables")
    output.add_argument("--markdown", action="store_true", help="print the table for the README instead")
    bench_command.set_defaults(run=_bench)
    return parser
