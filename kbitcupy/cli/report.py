"""``kbit compare --html``: what was measured as one page, which needs nothing beside itself."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._version import __version__
from ..backend import xp as _xp
from ..explore import DB_PER_BIT, Measurement
from ..explore.candidates import sample
from ..explore.plots import COLOURED
from ..text import printable

# Bars of a histogram, and how far it reaches on either side of the mean, in standard deviations.
_BARS, _REACH = 64, 4.0
# Tensors that get a histogram: a page of more would be slow to look at.
_MOST_HISTOGRAMS = 400
# The colours of cividis, which colour-blind readers tell apart, dark to bright.
_SCALE = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))


@dataclass(frozen=True)
class Histogram:
    """How the elements of a tensor are distributed, from a sample of it.

    Parameters
    ----------
    tensor : str
        Its name.
    counts : tuple of int
        Elements in each bar, from -4 to 4 standard deviations around the mean; what lies beyond is in the outermost.
    peak : float
        The largest distance to the mean in standard deviations.
    """

    tensor: str
    counts: tuple[int, ...]
    peak: float

    @classmethod
    def of(cls, x: Any, tensor: str) -> Histogram:
        """The histogram of an array of floats."""
        host = _xp.to_device(sample(x), "cpu").astype(np.float64).reshape(-1)
        host = host[np.isfinite(host)]
        deviation = float(host.std()) if host.size else 0.0
        if not 0 < deviation < math.inf:
            return cls(tensor, (0,) * _BARS, 0.0)
        distance = (host - host.mean()) / deviation
        counts, _ = np.histogram(np.clip(distance, -_REACH, _REACH), _BARS, (-_REACH, _REACH))
        return cls(tensor, tuple(counts.tolist()), float(abs(distance).max()))


@dataclass(frozen=True)
class Line:
    """A format of the page, or several that do the same.

    Parameters
    ----------
    title : str
        What it is called.
    decibels : float
        What formats are ranked by.
    not_beaten : bool
        Whether no smaller one keeps more.
    total : Measurement
        Of all tensors together.
    rows : sequence of Measurement
        Of each tensor.
    """

    title: str
    decibels: float
    not_beaten: bool
    total: Measurement
    rows: Sequence[Measurement]


def page(
    source: str,
    device: str,
    ranked_by: str,
    lines: Sequence[Line],
    histograms: Sequence[Histogram],
    said: Iterable[str],
) -> str:
    """The page.

    Parameters
    ----------
    source : str
        What was compared.
    device : str
        Where.
    ranked_by : str
        What `Line.decibels` are.
    lines : sequence of Line
        The formats, the smallest first.
    histograms : sequence of Histogram
        Of the tensors.
    said : iterable of str
        The conclusion and notes.

    Returns
    -------
    str
        HTML with its style, script and pictures inside.
    """
    tensors, before = len(lines[0].rows), lines[0].total.nbytes_before
    about = f"{tensors} tensor{'s' * (tensors != 1)}, {before / 1e6:.3f} MB, {len(lines)} formats, on {device}"
    shown = histograms[:_MOST_HISTOGRAMS]
    parts = [
        f"<h1>{_text(source)}</h1><p class=about>{_text(about)}; measured by kbitcupy {__version__}</p>",
        "".join(f"<p>{_text(line)}</p>" for line in said),
        f"<h2>Formats</h2>{_chart(lines, ranked_by)}{_formats(lines, ranked_by)}",
        "<h2>Tensors</h2><p>SQNR in dB of each tensor in each format; a click on a heading sorts.</p>"
        + _heat_map(lines),
        "<h2>Distributions</h2><p>Elements of each tensor, from a sample of it, within 4 standard deviations of their "
        f"mean; the outermost bars hold what lies beyond.</p><div class=small>{''.join(map(_histogram, shown))}</div>",
    ]
    if len(shown) < len(histograms):
        parts.append(f"<p>... and {len(histograms) - len(shown)} more tensors</p>")
    return (
        f"<!DOCTYPE html><html lang=en><head><meta charset=utf-8><title>{_text(source)}: formats compared</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body><main>\n" + "\n".join(parts) + f"\n</main><script>{_SCRIPT}</script>"
        "</body></html>\n"
    )


def _text(text: str) -> str:
    """A text of a stranger, for between tags and in quotes."""
    return html.escape(printable(text))


def _breaking(text: str) -> str:
    """A name that a narrow page may break where its parts end."""
    for mark in ".:,_":
        text = text.replace(mark, f"{mark}<wbr>")
    return text


def _number(value: float, shown: str | None = None, **attributes: str) -> str:
    """A cell that sorts by its value."""
    more = "".join(f' {name}="{text}"' for name, text in attributes.items())
    key = "" if math.isnan(value) else f"{value:.9g}".replace("inf", "1e999")
    return f'<td data-v="{key}"{more}>{f"{value:.2f}" if shown is None else shown}</td>'


def _heading(*titles: str) -> str:
    cells = "".join(f"<th scope=col><button>{title}</button></th>" for title in titles)
    return f"<thead><tr>{cells}</tr></thead>"


def _formats(lines: Sequence[Line], ranked_by: str) -> str:
    titles = (
        "format",
        "bits",
        ranked_by,
        "SQNR dB",
        "worst tensor",
        "max error",
        "MB after",
        "smaller by",
        "not beaten",
    )
    rows = []
    for line in lines:
        total = line.total
        worst = min(row.sums.sqnr_db for row in line.rows)
        ratio = total.nbytes_before / total.nbytes_after if total.nbytes_after else math.nan
        cells = [
            f"<th scope=row>{_breaking(_text(line.title))}</th>",
            *map(_number, (total.bits_per_element, line.decibels, total.sums.sqnr_db, worst)),
            _number(total.sums.largest, f"{total.sums.largest:.1e}"),
            _number(total.nbytes_after / 1e6, f"{total.nbytes_after / 1e6:.3f}"),
            _number(ratio, f"{ratio:.2f}x"),
            _number(line.not_beaten, "yes" if line.not_beaten else ""),
        ]
        rows.append(f"<tr{' class=best' * line.not_beaten}>{''.join(cells)}</tr>")
    return f"<div class=wide><table>{_heading(*titles)}<tbody>{''.join(rows)}</tbody></table></div>"


def _heat_map(lines: Sequence[Line]) -> str:
    finite = [row.sums.sqnr_db for line in lines for row in line.rows if math.isfinite(row.sums.sqnr_db)]
    # A tensor that is nearly exact would leave one colour for all others.
    low, high = np.quantile(finite, COLOURED).tolist() if finite else (0.0, 1.0)
    titles = [f"{_breaking(_text(line.title))}<br>{line.total.bits_per_element:.2f}" for line in lines]
    rows = []
    for i, first in enumerate(lines[0].rows):
        name = _text(first.tensor)
        shape = "x".join(map(str, first.shape or ()))
        cells = [f'<th scope=row title="{name}: {_text(first.dtype or "")} {shape}">{_breaking(name)}</th>']
        for line in lines:
            value = line.rows[i].sums.sqnr_db
            style = {"style": _colour((value - low) / ((high - low) or 1.0))} if math.isfinite(value) else {}
            cells.append(_number(value, f"{value:.1f}", **style))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = _heading("tensor", *titles)
    return f'<div class="wide tall"><table class=heat>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _colour(share: float) -> str:
    """Style of a cell between the worst (0) and the best (1)."""
    at = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    i = min(int(at), len(_SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (at - i)) for a, b in zip(_SCALE[i], _SCALE[i + 1], strict=True))
    dark = 0.3 * red + 0.59 * green + 0.11 * blue < 128
    return f"background:#{red:02x}{green:02x}{blue:02x};color:{'#fff' if dark else '#000'}"


def _chart(lines: Sequence[Line], ranked_by: str) -> str:
    """Decibels against bits: a dot for each format, and a line through those that are not beaten."""
    dots = [(line.total.bits_per_element, line.decibels, line) for line in lines if math.isfinite(line.decibels)]
    if not dots:
        return ""
    width, height, left, below = 720, 380, 46, 40
    most = 1.05 * max(bits for bits, _, _ in dots)
    low, high = min(0.0, *(each for _, each, _ in dots)), 1.08 * max(1.0, *(each for _, each, _ in dots))

    def at(bits: float, decibels: float) -> tuple[float, float]:
        across = left + (width - left - 10) * bits / most
        return round(across, 1), round((height - below) - (height - below - 10) * (decibels - low) / (high - low), 1)

    grid = []
    for tick in range(0, int(most) + 1, max(int(most) // 10, 1)):
        x, y = at(tick, low)
        grid.append(f'<path d="M{x} 10V{y}"/><text x={x} y={y + 16} text-anchor=middle>{tick}</text>')
    for tick in range(math.ceil(low / 10) * 10, int(high) + 1, 10 * max(round((high - low) / 80), 1)):
        x, y = at(0, tick)
        grid.append(f'<path d="M{x} {y}H{width - 10}"/><text x={x - 6} y={y + 4} text-anchor=end>{tick}</text>')
    end = min(most, high / DB_PER_BIT)
    (x0, y0), (x1, y1) = at(0, 0), at(end, DB_PER_BIT * end)
    front = " ".join(f"{x},{y}" for x, y in (at(bits, each) for bits, each, line in dots if line.not_beaten))
    marks = []
    for bits, decibels, line in dots:
        x, y = at(bits, decibels)
        about = f"{_text(line.title)}: {bits:.2f} bits, {decibels:.2f} dB"
        marks.append(f"<circle cx={x} cy={y} r=5{' class=best' * line.not_beaten}><title>{about}</title></circle>")
    middle = (left + width) // 2
    return (
        "<div class=scroll>"
        f'<svg class=chart viewBox="0 0 {width} {height}" role=img aria-label="decibels against bits">'
        f'<g class=grid>{"".join(grid)}</g><path class=bound d="M{x0} {y0}L{x1} {y1}"/>'
        f'<polyline points="{front}"/>{"".join(marks)}'
        f"<text x={middle} y={height - 6} text-anchor=middle>bits per element</text>"
        f'<text x=14 y={height // 2} text-anchor=middle transform="rotate(-90 14 {height // 2})">{ranked_by}</text>'
        "</svg></div>"
        "<p class=about>Filled: not beaten by a smaller one. Dashed: 6.02 dB per bit, the bound for independent "
        "normal numbers. A dot says its name under the pointer; the table has them all.</p>"
    )


def _histogram(found: Histogram) -> str:
    top = max(max(found.counts), 1)
    bars = "".join(f"M{i} 40V{40 - 38 * n / top:.1f}h1V40" for i, n in enumerate(found.counts) if n)
    name = _text(found.tensor)
    peak = f"largest {found.peak:.1f} standard deviations" if found.peak else "all elements are equal"
    return (
        f'<figure><svg viewBox="0 0 {_BARS} 41" preserveAspectRatio=none role=img aria-label="distribution of {name}">'
        f'<path d="{bars}"/></svg><figcaption>{_breaking(name)}<br><span>{peak}</span></figcaption></figure>'
    )


_STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;background:#fff;color:#1a1a1a;font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1500px;margin:0 auto;padding:16px}
h1{font-size:1.4em;margin:.2em 0;overflow-wrap:anywhere}h2{font-size:1.15em;margin:1.6em 0 .4em}
p{margin:.4em 0;max-width:75em;overflow-wrap:anywhere}.about,figcaption span{color:#555}
.wide{overflow-x:auto;border:1px solid #ddd;border-radius:4px;margin:.6em 0}.tall{max-height:85vh;overflow-y:auto}
table{border-collapse:separate;border-spacing:0;font-size:13px;font-variant-numeric:tabular-nums;min-width:100%}
td,th{padding:3px 8px;text-align:right;white-space:nowrap;border-bottom:1px solid #eee}
thead th{position:sticky;top:0;z-index:2;background:#f6f6f6;vertical-align:bottom;padding:0;
border-bottom:1px solid #bbb}
th:first-child{text-align:left;position:sticky;left:0;z-index:1;background:#fff;font-weight:normal;
max-width:min(34em,45vw);overflow:hidden;text-overflow:ellipsis}
thead th:first-child{z-index:3;background:#f6f6f6}
button{all:unset;box-sizing:border-box;cursor:pointer;display:block;width:100%;padding:4px 8px;font-weight:600}
button:focus-visible{outline:2px solid #0072b2;outline-offset:-2px}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
.best th:first-child{font-weight:600}.heat thead button{white-space:normal;min-width:5em;max-width:13em;font-size:11px}
.heat td{border:0;text-align:center}
.scroll{overflow-x:auto}.chart{width:100%;min-width:540px;max-width:720px;height:auto;font-size:12px;display:block}
.chart text{fill:#444}.grid path{stroke:#e4e4e4;fill:none}.bound{stroke:#6e6e6e;stroke-dasharray:5 4;fill:none}
polyline{fill:none;stroke:#0072b2;stroke-width:1.5}circle{fill:#fff;stroke:#d55e00;stroke-width:1.5}
circle.best{fill:#0072b2;stroke:#0072b2}
.small{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:12px}
figure{margin:0;min-width:0}figure svg{width:100%;height:64px;display:block;border-bottom:1px solid #999}
figure path{fill:#0072b2}figcaption{font-size:12px;overflow-wrap:anywhere}
@media(max-width:700px){th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:11.5em;font-size:12px}
.small{grid-template-columns:1fr 1fr}}
"""

_SCRIPT = """
const keyOf=cell=>"v"in cell.dataset?(cell.dataset.v===""?-Infinity:Number(cell.dataset.v)):cell.textContent;
const order=(a,b)=>typeof a==="string"?a.localeCompare(b,undefined,{numeric:true}):a-b||0;
for(const table of document.querySelectorAll("table")){
const heads=[...table.tHead.rows[0].cells],body=table.tBodies[0];
heads.forEach((head,column)=>head.querySelector("button").addEventListener("click",()=>{
const was=head.getAttribute("aria-sort"),down=was?was==="ascending":column>0;
heads.forEach(each=>each.removeAttribute("aria-sort"));
head.setAttribute("aria-sort",down?"descending":"ascending");
const rows=[...body.rows].map(row=>[keyOf(row.cells[column]),row]);
rows.sort(([a],[b])=>order(a,b)*(down?-1:1));
body.append(...rows.map(([,row])=>row));
}));
}
"""
