"""``kbit quantize`` and ``kbit dequantize``: files in, files out."""

from __future__ import annotations

import argparse
import sys

from .cli_common import chosen_format
from .io.convert import FileReport, dequantize_file, quantize_file


def run_quantize(arguments: argparse.Namespace) -> None:
    """Run ``kbit quantize``."""
    report = quantize_file(
        arguments.file,
        arguments.output,
        chosen_format(arguments.format, arguments.option),
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


def run_dequantize(arguments: argparse.Namespace) -> None:
    """Run ``kbit dequantize``."""
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
