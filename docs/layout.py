"""Which bits of a block belong to which elements, asked of the decoder itself, and a drawing of it.

Every bit of a block of random bytes is turned over, and the elements that then decode to something else are its own. A
bit of a code belongs to one element, a bit of a scale to all that share it. So a drawing cannot differ from what the
format does, and a new format has one on the day it is registered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from kbitcupy.formats.base import Format, Plane

#: Elements, in ascending order.
Elements = tuple[int, ...]

# What a bit does may not show beside others, such as the sign of a zero: blocks are tried until so many, one after the
# other, have told nothing new. Every byte of a plane begins somewhere and counts up, so after `_ALL` blocks it has had
# every value.
_PATIENCE, _ALL = 24, 256
# Blocks of fewer bits are tried so many times that each value of one byte has met several of the others.
_FEW, _OFTEN = 320, 768
# Bits of an index into a grid belong to a group of so many elements at most.
_GROUP = 8
# Elements of formats whose scales the shape of an array says.
_LEAST = 32


@dataclass(frozen=True)
class Field:
    """A plane of the elements that are drawn.

    Parameters
    ----------
    name : str
        Of the plane.
    dtype : numpy.dtype
        Of its entries.
    scope : str
        What they belong to, see `kbitcupy.formats.base.Plane`.
    bits : tuple of tuple of tuple of int
        For each entry, and each of its bits from the lowest on, the elements that it belongs to.
    """

    name: str
    dtype: np.dtype
    scope: str
    bits: tuple[tuple[Elements, ...], ...]


@dataclass(frozen=True)
class Layout:
    """The fewest elements of a format that are whole bytes and blocks, and the planes that they lie in.

    Parameters
    ----------
    size : int
        How many elements.
    fields : tuple of Field
        Their planes.
    together : bool
        Whether the origin has the fields of a block side by side, in this order.
    """

    size: int
    fields: tuple[Field, ...]
    together: bool


def size_of(format: Format) -> int:
    """The fewest elements from which on planes grow as elements do."""
    size = max(format.block, _LEAST)
    while True:
        once, twice = format.planes((size,)), format.planes((2 * size,))
        if all(2 * once[name].shape[0] == twice[name].shape[0] for name in once if once[name].scope == "block"):
            return size
        size *= 2


def layout_of(format: Format) -> Layout:
    """Ask the decoder of a format which elements change with every bit."""
    size = size_of(format)
    specs = format.planes((size,))
    found = {name: np.zeros((_bits(spec), size), bool) for name, spec in specs.items()}  # which elements a bit changes
    rng = np.random.default_rng(0)
    tried = silent = known = 0

    @functools.cache
    def complete(known: int) -> bool:
        return all(_told(spec, size, _sets(found[name])) is not None for name, spec in specs.items())

    least = _OFTEN if sum(map(len, found.values())) < _FEW and _of_blocks(specs) else 0
    while tried < least or silent < _PATIENCE or (tried < _ALL and not complete(known)):
        if tried % _ALL == 0:
            begin = {name: rng.integers(0, 256, _bits(spec) // 8, np.uint8) for name, spec in specs.items()}
        planes = {name: _filled(spec, begin[name] + np.uint8(tried % _ALL), rng) for name, spec in specs.items()}
        tried += 1
        before = _decoded(format, planes, size)
        for name, bits in found.items():
            raw = planes[name].view(np.uint8)
            turned = np.repeat(raw[None], len(bits), axis=0)
            number = np.arange(len(bits))
            turned[number, number // 8] ^= (1 << number % 8).astype(np.uint8)
            bits |= _all_decoded(format, planes, name, turned, size) != before
        now = sum(int(np.count_nonzero(bits)) for bits in found.values())
        silent, known = 0 if known < now else silent + 1, now
    fields = []
    for name, spec in specs.items():
        width = 8 * np.dtype(spec.dtype).itemsize
        bits = _sets(found[name])
        elements = [tuple(sorted(bit)) for bit in _told(spec, size, bits) or bits]
        entries = tuple(tuple(elements[at : at + width]) for at in range(0, len(elements), width))
        fields.append(Field(name, np.dtype(spec.dtype), spec.scope, entries))
    return Layout(size, tuple(fields), hasattr(format, "fields"))


def _sets(changed: np.ndarray) -> list[set[int]]:
    return [set(np.flatnonzero(row).tolist()) for row in changed]


def _of_blocks(specs: Mapping[str, Plane]) -> bool:
    return all(spec.scope == "block" for spec in specs.values())


def _bits(spec: Plane) -> int:
    return 8 * np.dtype(spec.dtype).itemsize * math.prod(spec.shape)


def _filled(spec: Plane, content: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A plane of these bytes; of floats, which would be NaN or infinite now and then, random numbers."""
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "f":
        return rng.uniform(0.5, 2.0, spec.shape).astype(dtype)
    return content.view(dtype).reshape(spec.shape)


def _pooled(bits: list[set[int]], width: int, size: int, whole: bool = True) -> list[set[int]] | None:
    """The elements of the bits of entries, those of all groups of elements taken together; None where groups differ.

    An index into a grid has so many values that not all of them are tried in every group. Entries may be of two kinds,
    one behind the other, where they are a `whole` plane.
    """
    entries = len(bits) // width
    for end in sorted({entries, *(entries * cut // 12 for cut in (9, 8, 6) if whole)}, reverse=True):
        rest: list[set[int]] | None = bits[end * width :]
        if any(map(_partial, rest or [])):
            rest = _pooled(bits[end * width :], width, size, whole=False)
        if rest is None:
            continue
        for period in (p for p in range(1, end) if end % p == 0 and size * p % end == 0):
            step, every = size * period // end, period * width
            pools: list[set[int]] = [set() for _ in range(every)]
            for at in range(end * width):
                pools[at % every] |= {element - at // every * step for element in bits[at]}
            if all(_of_one_group(pool, bit) for pool, bit in zip(pools, bits, strict=False)):
                shifts = [at // every * step for at in range(end * width)]
                pooled = [{element + shift for element in pools[at % every]} for at, shift in enumerate(shifts)]
                return pooled + rest
    return None


def _of_one_group(pool: set[int], bit: set[int]) -> bool:
    """Whether the elements `pool` may be those of a bit of which `bit` have been seen."""
    if len(bit) > _GROUP:
        return len(pool) == len(bit)
    return len(pool) == len(bit) if len(bit) < 2 else max(pool) - min(pool) < _GROUP


def _partial(bit: set[int]) -> bool:
    """Whether a bit belongs to several elements, of which some may not have been seen."""
    return 1 < len(bit) <= _GROUP


def _told(spec: Plane, size: int, bits: list[set[int]]) -> list[set[int]] | None:
    """The elements of the bits of a plane; None where some may not have been seen."""
    if not any(map(_partial, bits)):
        return bits
    return _pooled(bits, 8 * np.dtype(spec.dtype).itemsize, size)


def _decoded(format: Format, planes: dict[str, np.ndarray], size: int) -> np.ndarray:
    """The bits of what planes decode to."""
    out = np.empty(size, np.float32)
    with np.errstate(all="ignore"):
        format.decode(planes, out)
    return out.view(np.uint32)


def _all_decoded(format: Format, planes: dict[str, np.ndarray], name: str, turned: np.ndarray, size: int) -> np.ndarray:
    """What planes decode to with each row of `turned` in the place of one, row by row.

    At once where planes grow with the array, or are those of every array, and this one grows.
    """
    dtype, count = planes[name].dtype, len(turned)
    specs, lengths = format.planes((count * size,)), {other: len(plane) for other, plane in planes.items()}
    grow = {other for other, spec in specs.items() if spec.shape[0] == count * lengths[other]}
    if name in grow and all(other in grow or spec.shape[0] == lengths[other] for other, spec in specs.items()):
        many = {other: np.tile(plane, count) if other in grow else plane for other, plane in planes.items()}
        many[name] = turned.reshape(-1).view(dtype)
        return _decoded(format, many, count * size).reshape(count, size)
    rows = [_decoded(format, {**planes, name: row.view(dtype)}, size) for row in turned]
    return np.reshape(rows, (count, size))


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Neighbouring bits of an entry that belong to the same elements: from `low` to `high`, both included."""

    low: int
    high: int
    elements: Elements


@dataclass(frozen=True)
class Run:
    """Neighbouring entries whose bits are alike, with elements that go on by `step` from one to the next.

    Parameters
    ----------
    first, last : int
        Numbers of the entries.
    segments : tuple of Segment
        Those of the first entry, from the lowest bit on.
    step : int
        From the elements of an entry to those of the next.
    """

    first: int
    last: int
    segments: tuple[Segment, ...]
    step: int

    def at(self, segment: Segment, entry: int) -> Elements:
        """The elements of a segment in an entry of the run."""
        return tuple(element + (entry - self.first) * self.step for element in segment.elements)


def segments_of(bits: Sequence[Elements]) -> tuple[Segment, ...]:
    """The bits of an entry, neighbours of the same elements together."""
    found: list[Segment] = []
    for bit, elements in enumerate(bits):
        if found and found[-1].elements == elements:
            found[-1] = Segment(found[-1].low, bit, elements)
        else:
            found.append(Segment(bit, bit, elements))
    return tuple(found)


def _step(one: tuple[Segment, ...], other: tuple[Segment, ...]) -> int | None:
    """By how much the elements of `other` are those of `one`, bit for bit; None where they are not."""
    steps = set()
    for a, b in zip(one, other, strict=False):
        if (a.low, a.high, len(a.elements)) != (b.low, b.high, len(b.elements)):
            return None
        steps |= {y - x for x, y in zip(a.elements, b.elements, strict=True)}
    if len(one) != len(other) or len(steps) > 1:
        return None
    return steps.pop() if steps else 0  # bits of nothing are alike


def runs_of(field: Field) -> list[Run]:
    """The entries of a plane, as few runs."""
    entries = [segments_of(bits) for bits in field.bits]
    runs: list[Run] = []
    first = 0
    while first < len(entries):
        last, step = first, 0
        while last + 1 < len(entries):
            found = _step(entries[last], entries[last + 1])
            if found is None or (last > first and found != step):
                break
            last, step = last + 1, found
        runs.append(Run(first, last, entries[first], step))
        first = last + 1
    return runs


def period_of(runs: Sequence[Run]) -> int:
    """After how many runs they repeat with other elements; all of them where they do not."""
    for period in range(1, len(runs) // 2 + 1):
        if len(runs) % period:
            continue
        pairs = list(zip(runs, runs[period:], strict=False))
        steps = {_step(a.segments, b.segments) for a, b in pairs}
        alike = all(a.last - a.first == b.last - b.first and a.step == b.step for a, b in pairs)
        if alike and len(steps) == 1 and None not in steps:
            return period
    return len(runs)


# ---- words -----------------------------------------------------------------------------------------------------------


def in_words(elements: Elements, size: int) -> str:
    """Elements as people write them."""
    if not elements:
        return "not used"
    if len(elements) == size:
        return f"all {size}"
    steps = {b - a for a, b in zip(elements, elements[1:], strict=False)}
    if len(elements) == 1:
        return str(elements[0])
    if steps == {1}:
        return f"{elements[0]}–{elements[-1]}"  # noqa: RUF001 (a dash between numbers)
    if len(steps) == 1 and len(elements) > 3:
        return f"{{{elements[0]}, {elements[1]} … {elements[-1]}}}"
    return ", ".join(map(str, elements)) if len(elements) < 6 else f"{len(elements)} of {size}"


def run_in_words(run: Run, segment: Segment, size: int) -> str:
    """The elements of a segment along its run."""
    count = run.last - run.first + 1
    texts = [in_words(run.at(segment, entry), size) for entry in (run.first, run.first + 1, run.last)]
    if count == 1 or run.step == 0:
        return texts[0]
    if count == 2:
        return f"{texts[0]}, {texts[2]}"
    return f"{texts[0]} … {texts[2]}" if run.step == 1 else f"{texts[0]}, {texts[1]} … {texts[2]}"


# ---- the drawing -----------------------------------------------------------------------------------------------------

_WIDTH, _LEFT = 720, 34
# Of what belongs to one element (neighbours differ), to several, to all, to nothing.
_CODES, _SHARED, _WHOLE, _NONE = ("#cfe3f5", "#e6f1fa"), "#fbdcb0", "#cfe9c7", "#eeeeee"
_LEGEND = ((_CODES[0], "one element"), (_SHARED, "several elements"), (_WHOLE, "all elements"), (_NONE, "not used"))
_BIT = {1: 15, 2: 11, 4: 7}  # height of a bit, by the bytes of an entry


class _Svg:
    """Lines of an SVG document, and how high it has become."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.y = 0.0

    def box(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
            f'stroke="#5b6b7a" stroke-width="0.8">{title}</rect>'
        )

    def text(self, x: float, y: float, text: str, size: float = 11, anchor: str = "middle", **look: bool) -> None:
        fill = "#16202a" if look.get("inside") else "currentColor"
        weight = ' font-weight="600"' if look.get("bold") else ""
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}>'
            f"{escape(text)}</text>"
        )

    def document(self, about: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self.y:.0f}" width="{_WIDTH}" '
            f'height="{self.y:.0f}" role="img" font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, f"<title>{escape(about)}</title>", *self.lines, "</svg>"])


def _fits(text: str, width: float, size: float) -> bool:
    return len(text) * size * 0.56 <= width - 4


def _fill(elements: Elements, size: int, number: int = 0) -> str:
    if not elements:
        return _NONE
    if len(elements) == 1:
        return _CODES[number % 2]
    return _WHOLE if len(elements) == size else _SHARED


def draw(layout: Layout, name: str) -> str:
    """The drawing of a layout as an SVG document."""
    svg = _Svg()
    _draw_bytes(svg, layout)
    for field in layout.fields:
        _draw_field(svg, field, layout.size)
    svg.y += 8
    x = float(_LEFT)
    for fill, text in _LEGEND:
        svg.box(x, svg.y, 14, 12, fill)
        svg.text(x + 20, svg.y + 10, text, anchor="start")
        x += 150
    svg.y += 20
    return svg.document(f"How {layout.size} elements of {name} are stored")


def _draw_bytes(svg: _Svg, layout: Layout) -> None:
    """The planes beside one another, as wide as they have bytes, but not too narrow for their names."""
    local = [field for field in layout.fields if field.scope == "block" or not layout.together]
    sizes = [len(field.bits) * field.dtype.itemsize for field in local]
    of_block = sum(nbytes for field, nbytes in zip(local, sizes, strict=True) if field.scope == "block")
    least, gap = 74.0, 0.0 if layout.together else 8.0
    room = _WIDTH - _LEFT - gap * (len(local) - 1) - least * len(local)
    svg.text(_LEFT, 14, f"{layout.size} elements, {of_block} bytes", 12, "start", bold=True)
    x, offset = float(_LEFT), 0
    for field, nbytes in zip(local, sizes, strict=True):
        width = least + room * nbytes / sum(sizes)
        kinds = {len(bit) for entry in field.bits for bit in entry} - {0}
        whole = (0,) * layout.size if kinds == {layout.size} else (0,) * max(kinds, default=0)
        svg.box(x, 24, width, 34, _fill(whole, layout.size), f"{field.name}: {nbytes} bytes")
        entries = f"{field.dtype.name} \N{MULTIPLICATION SIGN} {len(field.bits)}"
        svg.text(x + width / 2, 38, field.name, 12, inside=True, bold=True)
        svg.text(x + width / 2, 52, entries, 10, inside=True)
        where = f"byte {offset}" if layout.together else f"{nbytes} bytes"
        if field.scope != "block":
            where = f"one for each {field.scope}" if field.scope == "tensor" else "known to all"
        svg.text(x + 2, 70, where, 9, "start")
        x, offset = x + width + gap, offset + nbytes
    svg.y = 80


def _draw_field(svg: _Svg, field: Field, size: int) -> None:
    """The bits of a plane: entries from left to right, in each the highest bit on top."""
    runs = runs_of(field)
    if len(runs) == 1 and len(runs[0].segments) == 1:  # nothing but "all bits are of these elements"
        (run,) = runs
        unit = "bytes" if field.dtype.itemsize == 1 else "entries"
        count = f" of {len(field.bits)} {unit}" if len(field.bits) > 1 else ""
        text = run_in_words(run, run.segments[0], size)
        one = len(run.segments[0].elements) == 1
        words = f"one element each: {text}" if one and count else f"every bit is for the elements {text}"
        if not run.segments[0].elements:
            words = "not needed to decode"
        elif len(run.segments[0].elements) == size:
            words = f"every bit counts for all {size} elements"
        svg.text(_LEFT, svg.y + 16, field.name, 12, "start", bold=True)
        svg.text(_LEFT + 90, svg.y + 16, f"{field.dtype.name}{count}; {words}", 11, "start")
        svg.y += 26
        return
    svg.text(_LEFT, svg.y + 16, field.name, 12, "start", bold=True)
    if field.dtype.itemsize >= 4 and len(field.bits) <= 8:
        _draw_words(svg, field, size)
        return
    period = period_of(runs)
    repeats = len(runs) // period
    shown = runs if repeats < 4 else runs[:period]
    if shown is not runs:
        step = runs[period].segments[0].elements[0] - runs[0].segments[0].elements[0]
        each = shown[-1].last + 1
        note = f"the first {each} of {len(field.bits)} entries; the others repeat them, {step} elements on each time"
        svg.text(_LEFT + 90, svg.y + 16, note, 11, "start")
    svg.y += 24
    _draw_runs(svg, field, shown, size)


def _draw_words(svg: _Svg, field: Field, size: int) -> None:
    """A few long words: a line each, bit 0 to the left."""
    svg.text(_LEFT + 90, svg.y + 16, f"{field.dtype.name}; a line is a word, its lowest bit to the left", 11, "start")
    svg.y += 24
    count = len(field.bits[0])
    width, height = (_WIDTH - _LEFT) / count, 17
    for word, bits in enumerate(field.bits):
        svg.text(_LEFT - 5, svg.y + 12, str(word), 10, "end")
        for bit, elements in enumerate(bits):
            tip = f"word {word}, bit {bit}: element {in_words(elements, size)}"
            svg.box(_LEFT + bit * width, svg.y, width, height, _fill(elements, size, bit), tip)
            label = in_words(elements, size)
            if _fits(label, width + 5, 9):
                svg.text(_LEFT + (bit + 0.5) * width, svg.y + 12, label, 9, inside=True)
        svg.y += height
    svg.y += 8


def _draw_runs(svg: _Svg, field: Field, runs: Sequence[Run], size: int) -> None:
    """Runs as boxes, in as many lines as it takes."""
    unit = {1: "byte"}.get(field.dtype.itemsize, "entry")
    count, bit = len(field.bits[0]), _BIT[field.dtype.itemsize]
    total = sum(run.last - run.first + 1 for run in runs)
    a_line = min(len(runs), 6)
    lines = [runs[at : at + a_line] for at in range(0, len(runs), a_line)]
    for line in lines:
        here = sum(run.last - run.first + 1 for run in line)
        least = min(110.0, (_WIDTH - _LEFT) / a_line)
        room = (_WIDTH - _LEFT) * (1.0 if len(lines) == 1 else len(line) / a_line) - least * len(line)
        for label in range(count):
            if count == 8 or label % 4 in (0, 3):
                svg.text(_LEFT - 5, svg.y + 14 + (count - label - 0.5) * bit + 3, str(label), 9, "end")
        x = float(_LEFT)
        for run in line:
            width = least + room * (run.last - run.first + 1) / max(here, 1)
            where = f"{unit} {run.first}" if run.first == run.last else f"{unit}s {run.first} to {run.last}"
            where = where.replace("entrys", "entries")
            svg.text(x + 2, svg.y + 10, where, 9, "start")
            for number, segment in enumerate(run.segments):
                y, height = svg.y + 14 + (count - 1 - segment.high) * bit, (segment.high - segment.low + 1) * bit
                text = run_in_words(run, segment, size)
                bits = f"bit {segment.low}" if segment.low == segment.high else f"bits {segment.low} to {segment.high}"
                svg.box(x, y, width, height, _fill(segment.elements, size, number), f"{where}, {bits}: {text}")
                font = next((f for f in (11, 10, 9, 8, 7) if f <= height - 2 and _fits(text, width, f)), None)
                if font:
                    svg.text(x + width / 2, y + height / 2 + font * 0.36, text, font, inside=True)
            x += width
        svg.y += 14 + count * bit + 10
    assert total
