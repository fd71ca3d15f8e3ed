"""What a run of the benchmark found: rows, and the tables that they are shown in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .._version import __version__
from ..formats.base import get_format
from ..text import Column, markdown_table, table


@dataclass(frozen=True)
class Row:
    """One measurement.

    Parameters
    ----------
    kind : {"gpu", "cpu", "numpy"}
        GPU time of a call; CPU time of a call on a GPU array; time of a call on one core.
    format, operation, dtype : str
        What ran.
    elements : int
        Elements of the array.
    us : float
        Median time of a call in microseconds.
    nbytes : int or None
        Bytes that the call must move.
    fraction : float or None
        Rate over the copy bandwidth of the same run.
    cpu_us : float or None
        CPU time of a call in microseconds.
    samples : int
        Measurements that the median is of.
    timed_by : {"graph", "events", "clock"}
        Passes of a CUDA graph; CUDA events around calls; the clock of the CPU.
    peer : bool
        Whether the row is another library's.
    """

    kind: str
    format: str
    operation: str
    dtype: str
    elements: int
    us: float
    nbytes: int | None = None
    fraction: float | None = None
    cpu_us: float | None = None
    samples: int = 1
    timed_by: str = "clock"
    peer: bool = False

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second."""
        return None if self.nbytes is None else self.nbytes / self.us * 1e-3

    @property
    def ns_per_element(self) -> float:
        """Nanoseconds for an element."""
        return self.us * 1e3 / self.elements

    def line(self) -> str:
        """The time in words."""
        if self.kind == "gpu":
            return f"{self.us:.2f} us" + (f", {self.fraction:.2f} of copy" if self.fraction is not None else "")
        return f"{self.ns_per_element:.2f} ns per element"

    def as_json(self) -> dict[str, Any]:
        """JSON values; what was not measured is null."""
        return {
            **vars(self),
            "gb_per_s": self.gb_per_s,
            "ns_per_element": self.ns_per_element,
            "elements_per_s": self.elements / self.us * 1e6,
        }


@dataclass
class Report:
    """What a run found.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    environment : dict
        The machine and the versions, as JSON values.
    copy_gb_per_s : float or None
        Copy bandwidth of the GPU, bytes read and bytes written counted.
    launch_us : float or None
        CPU time of the launch of a kernel that does next to nothing.
    rows : list of Row
        The measurements.
    notes : list of str
        What was left out, and why.
    """

    device: str
    environment: dict[str, Any]
    copy_gb_per_s: float | None = None
    launch_us: float | None = None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def json(self) -> str:
        """One JSON document."""
        document = {
            "kbitcupy": __version__,
            "device": self.device,
            "environment": self.environment,
            "copy_gb_per_s": self.copy_gb_per_s,
            "launch_us": self.launch_us,
            "rows": [row.as_json() for row in self.rows],
            "notes": self.notes,
        }
        return json.dumps(document, indent=1, allow_nan=False)

    def text(self) -> str:
        """Aligned tables, one for each dtype."""
        lines = self._heading()
        for kind, columns in _COLUMNS.items():
            rows = [row for row in self.rows if row.kind == kind]
            for dtype in dict.fromkeys(row.dtype for row in rows):
                cells = [["format", "operation", "elements", *(title for title, _ in columns)]]
                for row in rows:
                    if row.dtype == dtype:
                        numbers = [show(row) for _, show in columns]
                        cells.append([row.format, row.operation, size_text(row.elements), *numbers])
                lines += ["", f"{dtype}{' (one core)' if kind == 'numpy' else ''}", *aligned(cells, 2)]
        lines += self._cpu_text()
        return "\n".join(lines)

    def markdown(self) -> str:
        """The tables of docs/benchmarks.md: the largest size, a column for each format, a table for each family."""
        kind, title, show = ("gpu", "fraction of copy", _fraction_text)
        if self.device == "cpu":
            kind, title, show = ("numpy", "ns per element", lambda row: f"{row.ns_per_element:.1f}")
        measured = [row for row in self.rows if row.kind == kind]
        largest = max((row.elements for row in measured if not row.peer), default=0)
        rows = [row for row in measured if row.elements == largest]
        tables = [_family_table(family, show) for family in _families([row for row in rows if not row.peer])]
        if kind == "gpu":
            caption = (
                f"{size_text(largest)} elements: bytes that must move, over GPU time, as a fraction of the copy "
                f"bandwidth of the same run ({self.copy_gb_per_s or 0:.0f} GB/s)."
            )
        else:
            caption = f"{size_text(largest)} elements: nanoseconds per element on one core, median of 3."
        blocks = [[caption], *tables]
        peers = [row for row in rows if row.peer]
        if peers:
            lines = [[row.format, row.operation, row.dtype, show(row)] for row in peers]
            blocks.append(markdown_table([["peer", "operation", "dtype", title], *lines]))
        blocks.append(["; ".join(self._heading()[:2]) + "."])
        return "\n".join(["<!-- bench -->", *"\n\n".join("\n".join(block) for block in blocks).splitlines(), _END])

    def _heading(self) -> list[str]:
        about = self.environment
        versions = [f"{name} {version}" for name, version in about["versions"].items()]
        if self.device == "cpu":
            return [f"{about['cpu']}, times per core", ", ".join(versions)]
        return [
            f"{about['gpu']}, driver {about['driver'] or 'unknown'} (CUDA {about['driver_cuda']}), CUDA runtime "
            f"{about['cuda_runtime']}, NVRTC {about['nvrtc']}",
            ", ".join(versions),
            f"copy bandwidth {self.copy_gb_per_s or 0:.0f} GB/s (device to device, read and write counted); "
            f"CPU time of one kernel launch {self.launch_us or 0:.1f} us",
        ]

    def _cpu_text(self) -> list[str]:
        rows = [row for row in self.rows if row.kind == "cpu"]
        if not rows:
            return []
        operations = list(dict.fromkeys(row.operation for row in rows))
        found = {(row.format, row.operation): f"{row.us:.1f}" for row in rows}
        cells = [["format", *operations]]
        cells += [
            [name, *(found.get((name, operation), "") for operation in operations)]
            for name in dict.fromkeys(row.format for row in rows)
        ]
        title = f"CPU time of a call in us, {rows[0].dtype}, {size_text(rows[0].elements)} elements"
        return ["", title, *aligned(cells, 1)]


_END = "<!-- /bench -->"


def _fraction_text(row: Row) -> str:
    return "" if row.fraction is None else f"{row.fraction:.2f}"


_COLUMNS: dict[str, tuple[tuple[str, Callable[[Row], str]], ...]] = {
    "gpu": (
        ("GPU us", lambda row: f"{row.us:.2f}"),
        ("GB/s", lambda row: "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}"),
        ("of copy", _fraction_text),
        ("CPU us", lambda row: "" if row.cpu_us is None else f"{row.cpu_us:.1f}"),
    ),
    "numpy": (
        ("ns/element", lambda row: f"{row.ns_per_element:.2f}"),
        ("elements/s", lambda row: f"{row.elements / row.us * 1e6:.2e}"),
    ),
}


def _families(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of formats that are implemented together, in one module, in the order of the formats."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(type(get_format(row.format)).__module__, []).append(row)
    return list(found.values())


def _family_table(rows: Sequence[Row], show: Callable[[Row], str]) -> list[str]:
    """A column for each format."""
    names, dtypes = list(dict.fromkeys(row.format for row in rows)), list(dict.fromkeys(row.dtype for row in rows))
    cells = {(row.operation, row.dtype, row.format): show(row) for row in rows}
    table = [["operation", "dtype", *names]]
    for operation in dict.fromkeys(row.operation for row in rows):
        for dtype in dtypes:
            line = [cells.get((operation, dtype, name), "") for name in names]
            if any(line):
                table.append([operation, dtype, *line])
    return markdown_table(table)


# ---- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """The times of one matrix product in microseconds.

    Parameters
    ----------
    format : str
        Of the weight.
    channels, depth, tokens : int
        Its N, K and M.
    us, cpu_us : float
        GPU time and CPU time of our product.
    read_fraction : float
        Time to read the weights at the copy bandwidth, over `us`.
    peers : dict of str to float
        Times of the others, by name; what was not measured is missing.
    """

    format: str
    channels: int
    depth: int
    tokens: int
    us: float
    cpu_us: float
    read_fraction: float
    peers: dict[str, float]

    def cells(self) -> list[str]:
        """N x K, M and our times as text."""
        times = f"{self.us:.1f}", f"{self.cpu_us:.1f}", f"{self.read_fraction:.2f}"
        return [f"{self.channels} x {self.depth}", str(self.tokens), *times]


@dataclass
class ProductReport:
    """What a run of products found.

    Parameters
    ----------
    device : str
        ``"cuda:N"``.
    environment : dict
        The machine and the versions, as JSON values.
    copy_gb_per_s : float
        Copy bandwidth of the GPU, bytes read and bytes written counted.
    products : list of Product
        The measurements.
    notes : list of str
        What was left out, and why.
    """

    #: Titles of the columns, how many of them stand to the left, and a line about the table.
    titles: ClassVar[tuple[str, ...]]
    left: ClassVar[int]
    about: ClassVar[str]

    device: str
    environment: dict[str, Any] = field(default_factory=dict)
    copy_gb_per_s: float = 0.0
    products: list[Product] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self, product: Product) -> list[str]:
        """A product as a line of the table."""
        raise NotImplementedError

    def json(self) -> str:
        """One JSON document."""
        document = {"kbitcupy": __version__, **vars(self), "products": [vars(product) for product in self.products]}
        return json.dumps(document, indent=1, allow_nan=False)

    def text(self) -> str:
        """An aligned table."""
        return "\n".join([*self._heading(), "", *aligned(self._lines(), self.left)])

    def markdown(self) -> str:
        """A table for a document."""
        return "\n".join([*markdown_table(self._lines()), "", *self._heading()])

    def _lines(self) -> list[list[str]]:
        return [list(self.titles), *map(self.line, self.products)]

    def _heading(self) -> list[str]:
        versions = ", ".join(f"{name} {version}" for name, version in self.environment["versions"].items())
        return [f"{self.environment['gpu']}, copy bandwidth {self.copy_gb_per_s:.0f} GB/s; {versions}", self.about]


class LinearReport(ProductReport):
    """Products with compressed weights."""

    peers: ClassVar = ("decode + cuBLAS", "cuBLAS bf16", "bitsandbytes", "tinygemm")
    #: Those whose column is there only where one of them was timed.
    rare_peers: ClassVar = ("ggml",)
    titles = ("format", "N x K", "M", "us", "CPU us", "of reading", *peers)
    left = 2
    about = "linear on float16 activations, microseconds of GPU time; the columns behind `of reading` are the others'."

    def line(self, product: Product) -> list[str]:
        """Our times, then the others'."""
        shown = (*self.peers, *self._rare())
        others = (f"{product.peers[name]:.1f}" if name in product.peers else "" for name in shown)
        return [product.format, *product.cells(), *others]

    def _lines(self) -> list[list[str]]:
        return [[*self.titles, *self._rare()], *map(self.line, self.products)]

    def _rare(self) -> list[str]:
        return [name for name in self.rare_peers if any(name in product.peers for product in self.products)]


class W8A8Report(ProductReport):
    """Products of int8 activations and weights."""

    peers: ClassVar = ("int8", "bf16")
    titles = ("N x K", "M", "us", "CPU us", "of reading", "int8 us", "int8 / ours", "bf16 us", "bf16 / ours")
    left = 1
    about = "W8A8 on float16 activations; int8: torch._int_mm alone; bf16: torch's bfloat16 product."

    def line(self, product: Product) -> list[str]:
        """Our times, then each of the others', and that over ours."""
        line = product.cells()
        for name in self.peers:
            us = product.peers.get(name)
            line += ["", ""] if us is None else [f"{us:.1f}", f"{us / product.us:.2f}"]
        return line


# ---- tables ----------------------------------------------------------------------------------------------------------


def aligned(cells: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table whose first line are its titles; the first `left` columns are flush left."""
    columns = [Column(title, left=number < left) for number, title in enumerate(cells[0])]
    return table(columns, cells[1:]).splitlines()


def size_text(n: int) -> str:
    """A number of elements as people write it."""
    return f"2^{n.bit_length() - 1}" if n.bit_count() == 1 else str(n)
