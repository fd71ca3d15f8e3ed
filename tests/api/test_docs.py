"""The generated pages of the documentation: nothing public lacks one, and layouts are drawn as they are."""

import functools
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import kbitcupy as kb

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def pages():
    """``docs/pages.py``, which needs nothing that the package does not."""
    sys.path.insert(0, str(DOCS))
    try:
        import pages
    finally:
        sys.path.remove(str(DOCS))
    pages.layout.layout_of = functools.cache(pages.layout.layout_of)
    return pages


@pytest.fixture(scope="module")
def written(pages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    pages.write(folder)
    return folder


def test_every_public_name_has_a_page(pages, written):
    found = {path.stem for path in (written / "api").glob("*.rst")}
    for name in kb.__all__:
        assert name == "__version__" or {f"kbitcupy.{name}", f"kbitcupy.{name}.index"} & found, name
    for namespace in pages.namespaces():
        assert namespace.page in found
        assert all(f"{namespace.name}.{name}" in found for name in namespace.names)
    assert {"kbitcupy.quantize", "kbitcupy.bitsandbytes.quantize_kbit", "kbitcupy.io.bitsandbytes.save"} <= found


def test_every_public_name_says_what_it_is(pages):
    for namespace in pages.namespaces():
        assert namespace.summary.endswith((".", ":")), namespace
        for name in namespace.names:
            value = pages.value_of(namespace, name)
            if callable(value):
                assert pages.first_sentence(value).endswith((".", ":")), f"{namespace.name}.{name}"


def test_pages_of_a_name_are_those_of_its_module(pages):
    listed = {namespace.name: namespace.names for namespace in pages.namespaces()}
    assert "get_format" not in listed["kbitcupy.bitsandbytes"]  # imported there, offered elsewhere
    assert "quantize_nf4" in listed["kbitcupy.bitsandbytes"]
    assert "Format" in listed["kbitcupy.formats.base"]


def bits_of(pages, name, field):
    """The elements of each bit of a plane: entries, and in them bits from the lowest on."""
    found = pages.layout.layout_of(kb.get_format(name))
    (plane,) = (each for each in found.fields if each.name == field)
    return plane.bits


def test_layouts_are_those_of_the_contracts(pages):
    words = bits_of(pages, "kbit3", "packed")  # word p, bit e: bit p of the index of element e
    assert words == tuple(tuple((e,) for e in range(32)) for _ in range(3))
    assert bits_of(pages, "nf4", "packed")[5] == ((11,),) * 4 + ((10,),) * 4  # the first in the high nibble
    assert bits_of(pages, "int4", "codes")[5] == ((10,),) * 4 + ((11,),) * 4  # the first in the low one
    assert bits_of(pages, "q4_0", "qs")[5] == ((5,),) * 4 + ((21,),) * 4
    assert bits_of(pages, "q4_0", "d") == ((tuple(range(32)),) * 16,)
    high = bits_of(pages, "q5_k", "qh")  # byte m, bit s: element 32 s + m
    assert high == tuple(tuple((32 * s + m,) for s in range(8)) for m in range(32))
    scales = bits_of(pages, "q4_k", "scales")  # byte 4 + j: the minimum of sub-block j, and 2 bits of that of j + 4
    assert scales[6] == (tuple(range(64, 96)),) * 6 + (tuple(range(192, 224)),) * 2
    assert bits_of(pages, "tq1_0", "qs")[3] == ((3, 35, 67, 99, 131),) * 8
    assert bits_of(pages, "iq2_s", "qs")[2] == (tuple(range(16, 24)),) * 8  # a byte of an index into a grid
    assert bits_of(pages, "q8_k", "bsums") == (((),) * 16,) * 16  # for products, not for decoding


def test_runs_and_periods(pages):
    layout = pages.layout
    (codes,) = (f for f in layout.layout_of(kb.get_format("q4_k")).fields if f.name == "qs")
    runs = layout.runs_of(codes)
    assert [(run.first, run.last, run.step) for run in runs] == [(at, at + 31, 1) for at in (0, 32, 64, 96)]
    assert [layout.run_in_words(runs[1], segment, 256) for segment in runs[1].segments] == ["64 … 95", "96 … 127"]
    assert layout.period_of(runs) == 1


def test_every_format_has_a_page_with_its_drawing(written):
    names = {path.stem for path in (written / "formats").glob("*.rst")}
    assert names == {"index", *kb.list_formats()}
    for name in kb.list_formats():
        text = (written / "formats" / f"{name}.rst").read_text(encoding="utf-8")
        (picture,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        drawing = ElementTree.fromstring(picture)
        shown = "".join(drawing.itertext())
        assert all(plane in shown for plane in kb.get_format(name).planes((512,)))
        width, height = (float(number) for number in drawing.get("viewBox").split()[2:])
        for box in drawing.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= width + 0.2 and y + h <= height


def test_the_page_of_a_format_has_its_options_and_its_contract(written):
    text = (written / "formats" / "kbit4.rst").read_text(encoding="utf-8")
    assert "``absmax=e4m4``" in text and "bit e of word b * K + p" in text
    text = (written / "formats" / "dynamic8.rst").read_text(encoding="utf-8")
    assert "Thresholds are the float32 midpoints" in text  # the contract lies in a file of another format
