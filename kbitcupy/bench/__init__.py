"""``kbit bench``: how fast the registered formats are on this machine, beside what moving their bytes costs.

On a GPU every row is the median GPU time of a call, the bytes that the call must move (input read plus output
written) over that time, and that rate as a fraction of the copy bandwidth measured in the same run. Scales that are
given are read as an input, and written as a part of the result, which owns them. On NumPy a row is the time of an
element on one core.

How the GPU is timed:

- CUDA events stand around one call, or around a pass over many calls where one call is short. Ahead of the first event
  goes a copy that keeps the GPU busy until the CPU has queued everything, so gaps in the queue are never counted.
- While the arrays of one call are smaller than four times the L2 cache, a pass rotates through as many inputs and
  outputs as that takes (up to 512), so that every call finds the cache cold. Such a pass is a CUDA graph where the
  calls can be captured.
- Data is drawn from N(0, 1) on the host with a fixed seed. Arrays larger than 2^24 elements repeat it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend import xp as _xp
from ..errors import FormatError
from ..formats.base import Format, get_format, list_formats
from . import cases, peers as libraries
from .report import Report, Row
from .timing import Case, Cell, Selection, Session, cuda_version, driver_version

__all__ = [
    "Case",
    "Report",
    "Row",
    "Selection",
    "cuda_version",
    "driver_version",
    "list_cells",
    "parse_size",
    "run",
]

#: Sizes and dtypes of a run that names none, by (GPU, quick).
SIZES = {
    (True, False): tuple(1 << p for p in (12, 16, 20, 24, 28)),
    (True, True): (1 << 20, 1 << 26),
    (False, False): (1 << 22,),
    (False, True): (1 << 20,),
}
DTYPES = {
    (True, False): ("float16", "bfloat16", "float32"),
    (True, True): ("float16",),
    (False, False): ("float32",),
    (False, True): ("float32",),
}
MAX_SIZE = 1 << 40

# Elements of the peers that run on the CPU in a run on a GPU.
_HOST_PEER_SIZE = {False: 1 << 22, True: 1 << 20}


def parse_size(text: str) -> int:
    """A number of elements from the command line.

    Parameters
    ----------
    text : str
        Decimal digits, or ``2^N``.

    Returns
    -------
    int
        1 to 2^40.

    Raises
    ------
    FormatError
        When `text` is anything else.

    Examples
    --------
    >>> from kbitcupy.bench import parse_size
    >>> parse_size("2^12"), parse_size("1000")
    (4096, 1000)
    """
    found = re.fullmatch(r"(2\^)?([0-9]{1,13})", text.strip())
    if found is not None:
        number = int(found[2])
        size = number if found[1] is None else 1 << number if number <= 40 else 0
        if 1 <= size <= MAX_SIZE:
            return size
    raise FormatError(f"size is {text!r}; it must be a number of elements from 1 to 2^40, such as 1048576 or 2^20")


@dataclass(frozen=True)
class _Asked:
    """What a run is asked for."""

    formats: list[Format]
    sizes: list[int]
    dtypes: list[np.dtype]
    quick: bool
    peers: bool

    @property
    def largest(self) -> int:
        return max(*self.sizes, 1 << 12)

    def cells(self, report: Report, session: Session) -> Iterator[Cell]:
        """All cells, in the order of the tables."""
        float32 = np.dtype("float32")
        if session.device == "cpu":
            yield from cases.core_cells(report, session, self.formats, self.sizes, self.dtypes)
            for n in self.sizes if self.peers else ():
                yield from libraries.core_cells(report, session, n, float32)
            return
        yield from cases.gpu_cells(report, session, self.formats, self.sizes, self.dtypes)
        if self.peers:
            for n in self.sizes if np.float16 in self.dtypes else ():
                yield from libraries.gpu_cells(report, session, n, np.dtype("float16"))
            host = Session("cpu", self.quick, _HOST_PEER_SIZE[self.quick])
            yield from libraries.core_cells(report, host, _HOST_PEER_SIZE[self.quick], float32)


def _shown(default: bool | None) -> list[Format]:
    """The formats of lists that need no option."""
    found = []
    for name in list_formats(default=default):
        with contextlib.suppress(FormatError):  # it needs an option that only its user knows
            found.append(get_format(name))
    return found


def _asked(
    names: Sequence[str] | None,
    sizes: Sequence[int] | None,
    dtypes: Sequence[str] | None,
    on_gpu: bool,
    quick: bool,
    peers: bool,
    all: bool,
) -> _Asked:
    chosen = _shown(None if all else True) if names is None else [get_format(name) for name in names]
    counts = sorted(set(SIZES[on_gpu, quick] if sizes is None else sizes))
    for count in counts:
        if not 1 <= count <= MAX_SIZE:
            raise FormatError(f"size is {count}; allowed are 1 to 2^40 elements")
    try:
        types = [_xp.float_dtype(dtype) for dtype in dict.fromkeys(DTYPES[on_gpu, quick] if dtypes is None else dtypes)]
    except TypeError as error:
        raise FormatError(str(error)) from error
    if not chosen or not counts or not types:
        raise FormatError("nothing to measure: name at least one format, one size and one dtype")
    return _Asked(chosen, counts, types, quick, peers)


def list_cells(
    names: Sequence[str] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    device: str = "auto",
    quick: bool = False,
    peers: bool = True,
    all: bool = False,
) -> list[str]:
    """The names of the cells that `run` would time, by which a `Selection` chooses.

    Parameters
    ----------
    names, sizes, dtypes, device, quick, peers, all
        As for `run`. The device need not be there.

    Returns
    -------
    list of str
        ``operation/format/dtype/elements``, and ``cpu/format/dtype/elements`` for the CPU times of calls on a GPU.

    Examples
    --------
    >>> from kbitcupy import bench
    >>> bench.list_cells(["nf4"], device="cpu", peers=False)
    ['quantize/nf4/float32/2^22', 'dequantize/nf4/float32/2^22']
    """
    device = device if device.startswith("cuda") else _xp.resolve_device(device)
    asked = _asked(names, sizes, dtypes, device != "cpu", quick, peers, all)
    return [cell.name for cell in asked.cells(Report(device, {}), Session(device, quick))]


def run(
    names: Sequence[str] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    device: str = "auto",
    quick: bool = False,
    peers: bool = True,
    all: bool = False,
    selection: Selection | None = None,
) -> Report:
    """Time formats.

    Parameters
    ----------
    names : sequence of str, optional
        Formats; by default those that lists show.
    sizes : sequence of int, optional
        Numbers of elements; 2^12 to 2^28 on a GPU, 2^22 on NumPy.
    dtypes : sequence of str, optional
        float16, bfloat16 and float32 on a GPU, float32 on NumPy.
    device : str, default "auto"
        ``"auto"``, ``"cpu"`` or ``"cuda:N"``.
    quick : bool, default False
        Fewer sizes, dtypes and repetitions.
    peers : bool, default True
        Time bitsandbytes, torch and gguf too, where they are installed.
    all : bool, default False
        Without `names`: formats too that lists do not show to who has not asked for them.
    selection : Selection, optional
        Which of the cells are timed, and until when; what is done when one is.

    Returns
    -------
    Report

    Raises
    ------
    FormatError
        When a format, size or dtype is not known, or a format fails.
    DeviceError
        When the device is not there.

    Examples
    --------
    >>> from kbitcupy import bench
    >>> report = bench.run(["kbit2"], sizes=[1024], device="cpu", peers=False)
    >>> [(row.format, row.operation, row.elements) for row in report.rows]
    [('kbit2', 'quantize', 1024), ('kbit2', 'dequantize', 1024)]
    """
    device = _xp.resolve_device(device)
    asked = _asked(names, sizes, dtypes, device != "cpu", quick, peers, all)
    session = Session(device, quick, asked.largest)
    selection = selection or Selection()
    report = Report(device, {})
    cells = selection.chosen(asked.cells(report, session))
    with session.opened() as about:
        report.environment = about
        if device != "cpu":
            report.copy_gb_per_s, report.launch_us = session.gpu.bandwidth * 1e-9, session.gpu.launch_us()
        selection.time(cells, report.notes, session.release)
    return report
