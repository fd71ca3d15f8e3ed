"""``kbit compare --html``: what the page holds, that it needs nothing else, and that names of files are only text."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import main, report

RNG = np.random.default_rng(0)
HOSTILE = "layer.<script>alert(1)</script>&\"'\x1b[2J"
TENSORS = {
    "layer.0.weight": RNG.standard_normal((64, 64)).astype(np.float32),
    "layer.1.weight": (290 + 5 * RNG.standard_normal((64, 64))).astype(np.float32),
    "layer.2.constant": np.ones((32, 64), np.float32),
    HOSTILE: RNG.standard_t(3, (32, 64)).astype(np.float16),
}


VOID = {"meta", "br", "wbr", "path", "circle"}


class Page(HTMLParser):
    """Tables as lists of rows of (text, key), and what else a test looks at."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.attributes, self.open, self.title = [], [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(["", dict(attributes).get("data-v")])

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1][0] += data
        elif "h1" in self.open:
            self.title += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    kb.io.save(folder / "m.safetensors", TENSORS)
    assert main(["compare", str(folder / "m.safetensors"), "--html", str(folder / "out.html"), "--device", "cpu"]) == 0
    return (folder / "out.html").read_text(encoding="utf-8")


def test_the_page_has_every_format_and_every_tensor(written):
    page = Page(written)
    formats, heat = page.tables
    assert page.title.endswith("m.safetensors")
    assert [cell[0] for cell in formats[0]][:4] == ["format", "bits", "mean dB", "SQNR dB"]
    titles = [row[0][0] for row in formats[1:]]
    assert {"kbit1", "kbit8", "nf4", "int4, uint4"} <= set(titles)
    bits = [float(row[1][1]) for row in formats[1:]]
    assert bits == sorted(bits)
    assert [row[0][0] for row in heat[1:]] == [name.replace("\x1b", "\\x1b") for name in sorted(TENSORS)]
    column = next(i for i, cell in enumerate(heat[0]) if cell[0].startswith("kbit44."))
    for row, name in zip(heat[1:], sorted(TENSORS), strict=True):
        x = TENSORS[name]
        found = kb.metrics.sqnr_db(x, kb.quantize(x, "kbit4"))
        assert float(row[column][1]) == pytest.approx(found, rel=1e-6) and row[column][0] == f"{found:.1f}"
    (nf4,) = (row for row in formats if row[0][0] == "nf4")
    sums = [kb.metrics.sums(x, kb.quantize(x, "nf4")) for x in TENSORS.values()]
    assert float(nf4[3][1]) == pytest.approx(sum(sums[1:], sums[0]).sqnr_db)
    assert "note: &#x27;layer.1.weight&#x27;: the mean is" in written and "best for their bits" in written


def test_the_page_needs_nothing_beside_itself(written):
    page = Page(written)
    assert not {"img", "link", "iframe", "object", "base", "form", "a"} & set(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "action", "xlink:href"}
    assert not re.search(r"https?:|//\w|@import|url\(", written)
    assert "default-src 'none'" in written and page.tags.count("script") == page.tags.count("style") == 1
    assert "width=device-width" in written


def test_names_of_a_file_are_only_text(written):
    assert "<script>alert" not in written and "\x1b" not in written
    assert not [name for name, _ in Page(written).attributes if name.startswith("on")]


def test_histograms_count_the_elements():
    x = RNG.standard_normal((64, 64))
    found = report.Histogram.of(x, "x")
    assert sum(found.counts) == x.size and found.peak == pytest.approx(abs(x - x.mean()).max() / x.std())
    middle = sum(found.counts[16:48])  # within two standard deviations
    assert middle == int((abs(x - x.mean()) < 2 * x.std()).sum())
    assert sum(report.Histogram.of(np.ones((8, 8)), "x").counts) == 0
    broken = np.array([np.nan, np.inf, 1.0, 2.0])
    assert sum(report.Histogram.of(broken, "x").counts) == 2


def test_a_page_of_formats_that_were_named(tmp_path, capsys):
    kb.io.save(tmp_path / "m", {"a": TENSORS["layer.0.weight"]})
    words = ["compare", str(tmp_path / "m"), "--formats", "kbit2,nf4", "--html", str(tmp_path / "o"), "--device", "cpu"]
    assert main(words) == 0
    formats, heat = Page((tmp_path / "o").read_text()).tables
    assert [row[0][0] for row in formats[1:]] == ["kbit2", "nf4"] and len(heat) == 2
    assert main(words) == 1
    assert "exists" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


def test_a_page_of_numbers_that_are_none(tmp_path):
    x = TENSORS["layer.0.weight"].copy()
    x[0, 0] = np.nan
    kb.io.save(tmp_path / "m", {"nan": x, "zero": np.zeros((64, 64), np.float32)})
    assert main(["compare", str(tmp_path / "m"), "--html", str(tmp_path / "o"), "--device", "cpu"]) == 0
    text = (tmp_path / "o").read_text()
    _, heat = Page(text).tables
    keys = {row[0][0]: {cell[1] for cell in row[1:]} for row in heat[1:]}
    assert keys == {"nan": {""}, "zero": {"1e999"}} and "1 NaN" in text


@pytest.mark.parametrize("words", [["--formats", "kbit0"], ["--min-size", "99999999"]])
def test_nothing_is_left_of_a_page_that_fails(tmp_path, words):
    kb.io.save(tmp_path / "m", {"a": TENSORS["layer.0.weight"]})
    assert main(["compare", str(tmp_path / "m"), "--html", str(tmp_path / "o"), *words]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
