"""The command ``kbit``: what it takes, and what becomes of errors. Each command runs in a module of its own."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from .._version import __version__
from ..backend.xp import FLOAT_DTYPES
from ..errors import KbitError
from ..io.checkpoint import MIN_SIZE
from ..io.executors import APART, LARGE, MOST_WORKERS
from ..io.layouts import LAYOUTS, WEIGHT_SCALES
from ..io.recipes import RECIPES
from ..text import printable
from . import benchmark, choose, compare, doctor, files, formats
from .common import DEFAULT_FORMAT, option


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        Exit status: 0, 1 after bad input or a failed check, 130 after Ctrl-C. Bad usage raises SystemExit with status
        2, as argparse does.

    Examples
    --------
    >>> from kbitcupy.cli import main
    >>> main(["quantize", "missing.safetensors", "-o", "out.safetensors"])
    1
    """
    _mend_streams()
    arguments = _parse(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("kbit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe left (`kbit compare | head`); Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KbitError, ImportError, OSError, MemoryError, RecursionError) as error:
        if arguments.debug:
            traceback.print_exc()
        else:
            message = " ".join(str(error).split()) or type(error).__name__
            print("kbit: error:", printable(message), file=sys.stderr)
        return 1
    return status or 0


def _mend_streams() -> None:
    """Streams that take whatever is printed.

    A job of cron or a daemon may start without them: Python has None in their place, and the next file that is opened
    would get their number. Where the encoding has no sign for a name's character, an escape stands for it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; what no option takes is an error with the usage of the command that it was given to."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        arguments.command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


# ---- what each command takes ---------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kbit", description="Compress tensors to a few bits per element, and restore them."
    )
    parser.add_argument("--version", action="version", version=f"kbitcupy {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for add in (
        _add_compare,
        _add_plan,
        _add_quantize,
        _add_dequantize,
        _add_inspect,
        _add_formats,
        _add_doctor,
        _add_bench,
    ):
        add(commands)
    for command in commands.choices.values():
        command.set_defaults(command=command)
    return parser


def _add_compare(commands: Any) -> None:
    command = commands.add_parser(
        "compare",
        epilog="example: kbit compare model.safetensors --formats kbit3,kbit4",
        parents=[_common(several=True), _sharing(), _selection()],
        help="what formats cost and keep, on a file or on samples",
        description="Compress and restore every tensor of FILE (or seeded samples) and show the loss and the size. A "
        "tensor that is compressed already takes part as what it decodes to.",
    )
    command.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="safetensors or GGUF files, directories of checkpoints, or their indices; seeded samples without any",
    )
    command.add_argument(
        "--formats",
        metavar="A,B",
        help="formats to compare, such as kbit4,nf4:block=32, with every number of every tensor (default: those of "
        "kbit formats, with finer granularities and fitted codebooks where they keep more)",
    )
    _add_all(command)
    command.add_argument(
        "--wide",
        action="store_true",
        help="bits and SQNR only: a line for each tensor and a column for each format; without FILE the other way "
        "round",
    )
    command.add_argument(
        "--best",
        type=_bits,
        metavar="BITS",
        help="show the best format for each tensor within so many bits per element instead, of all formats or of "
        "--formats, finer granularities and fitted codebooks included",
    )
    command.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    command.add_argument("--plot", metavar="OUT", help="draw SQNR and bits too: a file such as out.png or out.svg")
    command.add_argument(
        "--html",
        metavar="OUT",
        help="write a page too, which needs nothing beside itself: a sortable table, a heat map of the tensors, their "
        "distributions",
    )
    command.add_argument("--force", action="store_true", help="overwrite OUT if it exists")
    command.set_defaults(run=compare.run)


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        epilog="example: kbit plan model.safetensors -o plan.json --bits 3.5",
        parents=[_common(several=True), _sharing(), _spared()],
        help="the best format for each tensor of a file under a budget of bits",
        description="Measure every format on every tensor of FILE, with finer granularities and fitted codebooks where "
        "they keep more, and choose those with the least error that fit the budget: each tensor's squared error over "
        "its variance, weighted by its size. kbit quantize --plan compresses the file so.",
    )
    command.add_argument("file", metavar="FILE", help=_INPUT)
    command.add_argument("-o", "--output", metavar="OUT", required=True, help="JSON file to write")
    command.add_argument("--force", action="store_true", help="overwrite OUT if it exists")
    command.add_argument("--bits", type=_bits, required=True, metavar="B", help="bits per element, such as 3.5")
    command.add_argument(
        "--formats",
        metavar="A,B",
        help="formats to choose from, such as kbit4,nf4:block=32 (default: those of kbit formats)",
    )
    _add_all(command)
    command.add_argument(
        "--weight",
        action="append",
        default=[],
        type=_weight,
        metavar="PATTERN=W",
        help="how much the tensors count beside that whose name matches, such as '*attention*=2' (others 1); may be "
        "repeated, the first that matches counts",
    )
    command.add_argument(
        "--absolute",
        action="store_true",
        help="make the sum of all squared errors least: a tensor of large numbers then outweighs one of small ones",
    )
    command.add_argument(
        "--time-limit",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds for choosing, after which the best plan so far is taken, and how far from the best it may be is "
        "said (default %(default)g)",
    )
    command.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    command.set_defaults(run=choose.run_plan)


def _add_quantize(commands: Any) -> None:
    command = commands.add_parser(
        "quantize",
        epilog="example: kbit quantize model.safetensors -o small.safetensors --format kbit4 --keep '*embed*'",
        parents=[_common(several=True), _sharing(), _selection(min_size=None), _converting()],
        help="compress the float tensors of a file or checkpoint",
        description="Compress the float tensors of FILE that have two or more dimensions, and copy all others. Of a "
        "directory configuration, tokenizer and text go along; pickles and other weights do not.",
    )
    how = command.add_mutually_exclusive_group()
    how.add_argument("--format", default=DEFAULT_FORMAT, help="format, such as nf4:block=32 (default %(default)s)")
    how.add_argument("--plan", metavar="PLAN", help="formats by tensor, as kbit plan wrote them; the rest is copied")
    how.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="in a GGUF file (OUT ends in .gguf) the types that llama-quantize gives each tensor: "
        + ", ".join(RECIPES),
    )
    command.add_argument(
        "--importance",
        metavar="FILE",
        help="importance of columns, as llama-imatrix wrote it, for formats that weight errors",
    )
    command.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="GGUF file of the same model, whose tokenizer a GGUF file gets that is made from Hugging Face's",
    )
    command.add_argument(
        "--layout",
        choices=[layout.name for layout in LAYOUTS],
        help="how compressed tensors are stored. Default: gguf where OUT ends in .gguf; for a directory with the "
        "config.json of a model the layout that from_pretrained of transformers loads with no step between, where it "
        "knows the format (bitsandbytes for nf4 and fp4, compressed-tensors for int8 and int4 without zero points); "
        "else kbitcupy. bitsandbytes also holds int8:granularity=channel:0, llama.cpp loads gguf, which holds q4_k and "
        "others; of ternary, BitNet's format, transformers loads bitnet (OUT is a folder), bitnet.cpp bitnet.cpp",
    )
    _add_weight_scale(command)
    command.set_defaults(run=files.run_quantize)


def _add_dequantize(commands: Any) -> None:
    command = commands.add_parser(
        "dequantize",
        epilog="example: kbit dequantize small.safetensors -o restored.safetensors",
        parents=[_common(several=True), _sharing(), _converting()],
        help="restore a compressed file",
        description="Restore the tensors of a FILE that kbit quantize, bitsandbytes or llama.cpp wrote. A GGUF file is "
        "written where OUT ends in .gguf.",
    )
    command.add_argument(
        "--dtype",
        choices=FLOAT_DTYPES,
        help="dtype of the restored tensors (default: as FILE says; float32 for GGUF, which does not)",
    )
    _add_weight_scale(command)
    command.set_defaults(run=files.run_dequantize)


def _add_weight_scale(command: Any) -> None:
    command.add_argument(
        "--weight-scale",
        choices=WEIGHT_SCALES,
        help="what the scales of a BitNet of transformers do, where config.json does not say it right",
    )


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser(
        "inspect",
        epilog="example: kbit inspect small.safetensors",
        parents=[_debugging()],
        help="what is in a file or checkpoint",
        description="Show format, dtype, shape, bits per element and share of every tensor of FILE, and the metadata.",
    )
    command.add_argument("files", metavar="FILE", nargs="+", help=f"{_INPUT}; several one after the other")
    command.add_argument(
        "--json", action="store_true", help="print a JSON document instead of a table; of several FILEs a list of them"
    )
    command.set_defaults(run=files.run_inspect)


def _add_formats(commands: Any) -> None:
    command = commands.add_parser(
        "formats",
        epilog="example: kbit formats --json",
        parents=[_debugging()],
        help="the formats there are",
        description="Show bits, block, dtypes and origin of the registered formats.",
    )
    command.add_argument("formats", metavar="FORMAT", nargs="*", help="only these formats")
    _add_all(command)
    command.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    command.set_defaults(run=formats.run)


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        epilog="example: kbit doctor --device cuda",
        parents=[_common()],
        help="whether this machine has what is needed",
        description="Check versions, disk, GPU, driver, headers and cache, and one kernel against NumPy. Exit status 1 "
        "when a check fails; each failure comes with its remedy.",
    )
    command.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    command.set_defaults(run=doctor.run)


def _add_bench(commands: Any) -> None:
    command = commands.add_parser(
        "bench",
        epilog="example: kbit bench --quick",
        parents=[_common()],
        help="how fast the formats are on this machine",
        description="Time quantize and dequantize: on a GPU against the bandwidth of a copy, on NumPy per core.",
    )
    for name, example, text in (
        ("--formats", "A,B", "formats to time (default: those of kbit formats)"),
        ("--sizes", "N,M", "numbers of elements, such as 1000 or 2^20 (default: 2^12 to 2^28 on a GPU, else 2^22)"),
        ("--dtypes", "A,B", "dtypes (default: float16, bfloat16 and float32 on a GPU, else float32)"),
    ):
        command.add_argument(name, type=str if name == "--formats" else _words, metavar=example, help=text)
    _add_all(command)
    command.add_argument("--quick", action="store_true", help="fewer sizes, dtypes and repetitions")
    command.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time bitsandbytes, torch and gguf too, where they are installed (default: yes)",
    )
    command.add_argument(
        "--cells",
        metavar="A,B",
        help="time only the cells whose name matches, such as 'linear/nf4/28672x8192/*' or 'quantize/*/float16/2^28'; "
        "those of products too, without their option",
    )
    command.add_argument("--list-cells", action="store_true", help="print the names of the cells instead")
    command.add_argument("--limit", type=_seconds, metavar="S", help="seconds after which no cell begins")
    only = command.add_mutually_exclusive_group()
    only.add_argument("--w8a8", action="store_true", help="time W8A8 products on a GPU instead of formats")
    only.add_argument("--linear", action="store_true", help="time products with compressed weights on a GPU instead")
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a JSON document instead of tables")
    output.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md instead")
    command.set_defaults(run=benchmark.run)


def _add_all(command: argparse.ArgumentParser) -> None:
    command.add_argument("--all", action="store_true", help="formats too that lists do not show unasked")


# ---- what several commands take ------------------------------------------------------------------------------------


_INPUT = "safetensors, GGUF, .npy or .npz file, directory of a checkpoint, or its index of shards"


def _debugging() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    # Without SUPPRESS a command's default would overwrite a --debug that stands before the command.
    parent.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    return parent


def _common(several: bool = False) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False, parents=[_debugging()])
    names = "auto (default: a GPU where there is one), cpu or cuda:N"
    more = "; several GPUs, such as cuda:0,cuda:1, share the work of --workers" if several else ""
    parent.add_argument("--device", default="auto", help=names + more)
    return parent


def _sharing() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(
        "--workers",
        type=_workers,
        metavar="N",
        help="how many tensors are worked on at once: by threads on GPUs, else by processes (default 1 below "
        f"{LARGE / 1e9:g} GB, above it {MOST_WORKERS} for each GPU, or one a core, at most {MOST_WORKERS}); from "
        f"{APART / 1e9:g} GB on each of several GPUs has its threads in processes of its own",
    )
    parent.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="the workers of a Dask cluster work instead, which see the same files: tcp://host:8786, or the file that "
        "its scheduler wrote (extra dask)",
    )
    return parent


def _selection(min_size: int | None = MIN_SIZE) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False, parents=[_spared(min_size)])
    parent.add_argument(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="KEY=VALUE",
        help="option of the format (of every one that is given), such as codebook=nf; the same as format:KEY=VALUE",
    )
    return parent


def _spared(min_size: int | None = MIN_SIZE) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    beside = "" if min_size is not None else ", and none beside --plan or --recipe"
    parent.add_argument(
        "--min-size",
        type=_count,
        default=min_size,
        metavar="N",
        help=f"leave tensors with fewer elements as they are (default {MIN_SIZE}{beside})",
    )
    parent.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave tensors whose name matches as they are, such as '*embed*'; may be repeated",
    )
    return parent


def _writing(output: str) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("files", metavar="FILE", nargs="+", help=f"{_INPUT}; several go into the directory OUT")
    parent.add_argument("-o", "--output", metavar="OUT", required=True, help=output)
    parent.add_argument("--force", action="store_true", help="overwrite OUT if it is a file that exists")
    return parent


def _converting() -> argparse.ArgumentParser:
    output = (
        "file to write, or the directory when FILE is a directory or shards, and OUT does not end in .gguf; of several "
        "FILEs the directory, made if it is not there, for an output of the name of each"
    )
    parent = argparse.ArgumentParser(add_help=False, parents=[_writing(output)])
    parent.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted job at the first missing shard, and keep finished shards if it is interrupted",
    )
    parent.add_argument(
        "--dry-run",
        action="store_true",
        help="write nothing: check the files, names, what is in the way and the room, and say what the sizes would be",
    )
    parent.add_argument(
        "--json", action="store_true", help="print a JSON document instead of a line; of several FILEs a list of them"
    )
    return parent


def _words(text: str) -> list[str]:
    return text.split(",")


def _bits(text: str) -> float:
    bits = _number(text)
    if not 0 < bits < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of bits")
    return bits


def _weight(text: str) -> tuple[str, float]:
    pattern, equals, number = text.rpartition("=")
    weight = _number(number)
    if not equals or not 0 <= weight < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=W, such as '*attention*=2', with W from 0 on")
    return pattern, weight


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds, or inf")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _workers(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of workers")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)
