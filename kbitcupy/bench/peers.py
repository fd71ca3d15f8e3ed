"""Other libraries that a run is compared with, where they are installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import core_cell, gpu_cell
from .report import Report, size_text
from .timing import Call, Case, Cell, Session, cell_name


def _bitsandbytes(torch: Any, functional: Any) -> list[Case]:
    def compressed(x: Any) -> tuple[Any, Any, Any, int]:
        a = torch.from_dlpack(x)
        packed, state = functional.quantize_4bit(a, blocksize=64, quant_type="nf4")
        return a, packed, state, x.nbytes + packed.nbytes + state.absmax.nbytes

    def quantize_(x: Any) -> tuple[Call, int]:
        a, _, _, nbytes = compressed(x)
        return lambda: functional.quantize_4bit(a, blocksize=64, quant_type="nf4"), nbytes

    def dequantize_(x: Any) -> tuple[Call, int]:
        a, packed, state, nbytes = compressed(x)
        y = torch.empty_like(a) if a.is_cuda else None  # on a CPU it takes no output
        return lambda: functional.dequantize_4bit(packed, state, out=y), nbytes

    # Its C code ends the process on a CUDA error, so no capture is tried.
    return [Case("quantize_4bit", quantize_, capture=False), Case("dequantize_4bit", dequantize_, capture=False)]


def _torch(torch: Any) -> list[Case]:
    def copy(x: Any) -> tuple[Call, int]:
        a = torch.from_dlpack(x)
        b = torch.empty_like(a)
        return lambda: b.copy_(a), 2 * x.nbytes

    def clone(x: Any) -> tuple[Call, int]:
        a = torch.from_dlpack(x)
        return a.clone, 2 * x.nbytes

    return [Case("copy_", copy, capture=False), Case("clone", clone, capture=False)]


def _gguf(gguf: Any, quants: Any) -> list[Case]:
    q4_0 = gguf.GGMLQuantizationType.Q4_0

    def quantize_(x: Any) -> tuple[Call, int]:
        nbytes = x.nbytes + quants.quantize(x, q4_0).nbytes
        return lambda: quants.quantize(x, q4_0), nbytes

    def dequantize_(x: Any) -> tuple[Call, int]:
        packed = quants.quantize(x, q4_0)
        return lambda: quants.dequantize(packed, q4_0), x.nbytes + packed.nbytes

    return [Case("quantize", quantize_), Case("dequantize", dequantize_)]


@dataclass(frozen=True)
class Peer:
    """A library that a run is compared with.

    Parameters
    ----------
    label : str
        Its name in the tables.
    modules : tuple of str
        What is imported of it.
    make : callable
        Takes the modules and returns the cases.
    operations : tuple of str
        Their names.
    """

    label: str
    modules: tuple[str, ...]
    make: Callable[..., list[Case]]
    operations: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether its modules are there; nothing is imported."""
        return all(_is_installed(name.partition(".")[0]) for name in self.modules)


_BITSANDBYTES = Peer(
    "bitsandbytes NF4", ("torch", "bitsandbytes.functional"), _bitsandbytes, ("quantize_4bit", "dequantize_4bit")
)
_TORCH = Peer("torch", ("torch",), _torch, ("copy_", "clone"))
GPU_PEERS = [_BITSANDBYTES, _TORCH]
HOST_PEERS = [_BITSANDBYTES, _TORCH, Peer("gguf Q4_0", ("gguf", "gguf.quants"), _gguf, ("quantize", "dequantize"))]


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def gpu_cells(report: Report, session: Session, n: int, dtype: np.dtype) -> Iterator[Cell]:
    """The cells of other libraries on a GPU."""
    for peer in GPU_PEERS:
        for operation in peer.operations if peer.installed else ():

            def time(case: Case, peer: Peer = peer) -> str:
                if session.torch is None:
                    raise ImportError("torch with CUDA is not installed")
                return gpu_cell(report, session, case, peer.label, n, dtype, peer=True).time()

            name = cell_name(operation, peer.label, dtype.name, size_text(n))
            yield _cell(report, name, peer, operation, time)


def core_cells(report: Report, session: Session, n: int, dtype: np.dtype) -> Iterator[Cell]:
    """The cells of other libraries on one core."""
    for peer in HOST_PEERS:
        for operation in peer.operations if peer.installed else ():

            def time(case: Case, peer: Peer = peer) -> str:
                with _one_thread():
                    return core_cell(report, session, case, peer.label, n, dtype, peer=True).time()

            name = cell_name(operation, peer.label, dtype.name, size_text(n))
            yield _cell(report, name, peer, operation, time)


def _cell(report: Report, name: str, peer: Peer, operation: str, measure: Callable[[Case], str]) -> Cell:
    """A cell that costs a note where the library fails: whatever it raises."""

    def time() -> str:
        try:
            with warnings.catch_warnings(), _without_log():
                warnings.simplefilter("ignore")
                cases = {case.operation: case for case in peer.make(*map(importlib.import_module, peer.modules))}
            for module in peer.modules:
                top = module.partition(".")[0]
                report.environment["versions"].setdefault(top, distribution_version(top))
            return measure(cases[operation])
        except Exception as error:
            note = f"{peer.label} left out: " + (textwrap.shorten(str(error), 200) or type(error).__name__)
            if note not in report.notes:
                report.notes.append(note)
            return "left out"

    return Cell(name, ("peer", peer.label), time)


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Libraries log what they miss when they are imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def distribution_version(name: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """torch, and what shares its OpenMP as bitsandbytes does, on one core as everything else here."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
