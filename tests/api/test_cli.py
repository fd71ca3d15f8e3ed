"""The command line: tables and JSON, exit statuses, one-line errors."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.backend import xp as _xp
from kbitcupy.cli import compare as cli_compare, doctor as cli_doctor, main, sources as cli_sources
from kbitcupy.errors import DeviceError, MissingExtraError
from kbitcupy.formats.base import Format, Plane, unregister
from kbitcupy.io import conversion

ROOT = Path(kb.__file__).resolve().parent.parent
LONG = "model.language_model.layers.10.self_attention.query_projection.weight"


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """A terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def model(tmp_path):
    generator = np.random.default_rng(0)
    tensors = {
        "a.weight": generator.standard_normal((64, 64)).astype(np.float32),
        LONG: generator.standard_normal((32, 64)).astype(np.float16),
        "a.bias": np.zeros(64, np.float32),
    }
    kb.io.save(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def small_samples(monkeypatch):
    """Samples of 4096 elements instead of a million: the same code, sooner."""
    draw = cli_sources.draw
    monkeypatch.setattr(cli_sources, "draw", lambda name: draw(name, (16, 256)))
    monkeypatch.setattr(cli_sources, "SHAPE", (16, 256))


class Half(Format):
    """A toy format: everything as float16."""

    name = "toy-half"
    bits = 16
    block = 1
    origin = "this test"
    summary = "rounds to float16"

    def __init__(self, *, factor: float = 1.0):
        self.factor = factor

    def options(self):
        return {"factor": self.factor}

    def planes(self, shape):
        return {"half": Plane("float16", (int(np.prod(shape, dtype=np.int64)),))}

    def encode_numpy(self, x, planes, given):
        planes["half"][:] = (x.reshape(-1) / self.factor).astype(np.float16)

    def decode_numpy(self, planes, out):
        out[...] = (planes["half"].astype(np.float32) * self.factor).reshape(out.shape)

    encode_cuda, decode_cuda = encode_numpy, decode_numpy


class Hidden(Half):
    """One that lists do not show unasked."""

    name = "toy-hidden"
    default = False


class Decoded(Half):
    """One that is only decoded."""

    name = "toy-decoded"
    can_encode = False


@pytest.fixture
def hidden_and_decoded():
    for kind in (Hidden, Decoded):
        kb.register(kind.name, kind)
    yield
    for kind in (Hidden, Decoded):
        unregister(kind.name)


@pytest.fixture
def toy():
    kb.register(Half.name, Half)
    yield
    unregister(Half.name)


def table(text):
    """The rows of a table as lists of words."""
    return [line.split() for line in text.splitlines()]


# ---- compare ----


@pytest.mark.usefixtures("small_samples")
def test_compare_alone_is_a_screen_with_every_format_and_a_conclusion(capsys):
    assert main(["compare", "--device", "cpu"]) == 0
    text, conclusion = capsys.readouterr().out.split("best for their bits per element, by the mean of the tensors: ")
    lines = text.splitlines()
    assert len(lines) + len(conclusion.splitlines()) <= 50 and max(map(len, lines)) <= 100
    heading = next(line for line in lines if line.startswith("format"))
    assert heading.split()[:2] == ["format", "bits"] and heading.endswith("beaten")
    # Formats that do the same have one line, and every format has one.
    first = [line.split("  ")[0] for line in lines[lines.index(heading) + 1 :]]
    assert {"int4, uint4", "int8, uint8"} <= set(first)
    shown = {name for cell in first for name in cell.split(", ")}
    assert shown >= set(kb.list_formats(default=True)) and "kbit2:codebook=custom" in shown
    # The conclusion names formats that keep more than whatever is not larger, and the mark stands behind them.
    named = re.findall(r"(\S+) within ([\d.]+) \((-?[\d.]+) dB\)", " ".join(conclusion.split()))
    assert len(named) >= 4
    kept = {}
    for line in lines[lines.index(heading) + 1 :]:
        name, bits, *numbers = line.removesuffix("*").rsplit(maxsplit=6)
        kept[name] = float(bits), float(numbers[-1]), line.endswith("*")
    for name, budget, decibels in named:
        fitting = [d for bits, d, _ in kept.values() if bits <= float(budget)]
        assert abs(kept[name][1] - float(decibels)) < 0.06 and kept[name][1] == max(fitting) and kept[name][2]
    assert [mark for *_, mark in kept.values()] == [
        all(d < decibels or (b, d) == (bits, decibels) for b, d, _ in kept.values() if b <= bits)
        for bits, decibels, _ in kept.values()
    ]


@pytest.mark.usefixtures("small_samples")
def test_samples_are_the_same_every_time(capsys):
    texts = []
    for _ in range(2):
        assert main(["compare", "--formats", "kbit2,kbit3", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_samples_have_the_shape_they_promise():
    for name in cli_sources.DISTRIBUTIONS:
        x = cli_sources.draw(name, (256, 256))
        assert (x.shape, x.dtype) == ((256, 256), np.float32)
        assert np.isfinite(x).all()
    columns = cli_sources.draw("normal, outlier channels", (256, 256)).std(axis=0)
    assert (columns[::128] > 10).all()
    assert (np.delete(columns, [0, 128]) < 2).all()


def test_compare_a_file_compares(model, capsys):
    assert main(["compare", str(model), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[1].split()) == "format bits mean dB SQNR dB worst max err MB after beaten"
    (line,) = (line for line in lines if line.startswith("kbit4 "))
    tensors = [kb.io.load(model)[name] for name in ("a.weight", LONG)]
    found = [kb.explore.measure(x, "kbit4") for x in tensors]
    sums = found[0].sums + found[1].sums
    mean = sum(
        x.size * each.sums.mse / float(x.astype(np.float64).var()) for x, each in zip(tensors, found, strict=True)
    )
    bits = 8 * sum(each.nbytes_after for each in found) / sums.count
    numbers = bits, -10 * math.log10(mean / sums.count), sums.sqnr_db, min(each.sums.sqnr_db for each in found)
    assert line.split()[1:5] == [f"{each:.2f}" for each in numbers]
    assert line.split()[5:7] == [f"{sums.largest:.1e}", f"{sum(each.nbytes_after for each in found) / 1e6:.3f}"]
    assert "2 tensors, 0.020 MB before" in lines
    text = " ".join(" ".join(lines).split())
    assert "best for their bits per element" in text and "next: --wide for every tensor" in text
    assert "left out" not in text and {"kbit8", "nf4", "fp4"} <= {line.split()[0] for line in lines if line}
    assert not {"q4_k", "q8_0 "} & {line.split()[0] for line in lines if line}  # rows of 64 are not whole blocks


def test_a_comparison_that_takes_long_goes_on_with_samples(tmp_path, monkeypatch, capsys):
    x = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
    kb.io.save(tmp_path / "m", {"w": x})
    monkeypatch.setattr(cli_compare, "_SECONDS", 0.0)
    assert main(["compare", str(tmp_path / "m"), "--json", "--device", "cpu"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimated_tensors"] == 1
    for result in document["results"]:
        if result["format"]["name"] in ("kbit4", "nf4"):
            (row,) = result["tensors"]
            found = kb.explore.measure(x, kb.get_format(result["format"]["name"]))
            assert row["sqnr_db"] == pytest.approx(found.sums.sqnr_db, abs=0.1)
            assert row["bytes_after"] == found.nbytes_after and row["shape"] == [512, 256]
    assert main(["compare", str(tmp_path / "m"), "--device", "cpu"]) == 0
    assert "1 tensors were measured on samples of them" in capsys.readouterr().out


def test_compare_a_file_with_one_format(model, capsys):
    assert main(["compare", str(model), "--formats", "kbit4", "--device", "cpu"]) == 0
    heading, *rows = table(capsys.readouterr().out)
    assert heading[0] == "kbit4"
    assert [row[0] for row in rows] == ["a.weight", LONG[:16] + "..." + LONG[-16:], "total"]
    x = kb.io.load(model)["a.weight"]
    q = kb.quantize(x, "kbit4")
    assert rows[0][1] == f"{kb.metrics.sqnr_db(x, q.dequantize()):.2f}"
    assert rows[0][2] == f"{kb.metrics.sqnr_db(x, q.dequantize(), centered=True):.2f}"
    assert rows[0][3:5] == [f"{f(x, q.dequantize()):.1e}" for f in (kb.metrics.mse, kb.metrics.max_abs)]
    assert rows[0][5:] == [f"{q.bits_per_element:.2f}", f"{x.nbytes / 1e6:.3f}", f"{q.nbytes / 1e6:.3f}"]


def test_compare_json(model, capsys):
    assert main(["compare", str(model), "--formats", "kbit2,kbit8", "--json", "--device", "cpu"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == str(model)
    assert document["device"] == "cpu"
    assert [result["format"]["name"] for result in document["results"]] == ["kbit2", "kbit8"]
    tensors = kb.io.load(model)
    total = kb.metrics.Sums()
    for row in document["results"][0]["tensors"]:
        x = tensors[row["name"]]
        q = kb.quantize(x, "kbit2")
        sums = kb.metrics.sums(x, q.dequantize())
        total += sums
        assert row["shape"] == list(x.shape)
        assert row["dtype"] == x.dtype.name
        assert (row["sqnr_db"], row["mse"], row["max_error"]) == (sums.sqnr_db, sums.mse, sums.largest)
        assert row["sqnr_centered_db"] == pytest.approx(kb.metrics.sqnr_db(x, q.dequantize(), centered=True))
        assert (row["nan"], row["infinite"]) == (0, 0)
        assert (row["bytes_before"], row["bytes_after"]) == (x.nbytes, q.nbytes)
    assert document["results"][0]["total"]["sqnr_db"] == total.sqnr_db
    assert document["results"][0]["total"]["bits_per_element"] == pytest.approx(2.25, abs=0.02)


def test_json_has_no_token_that_json_lacks(tmp_path, capsys):
    x = np.zeros((64, 64), np.float32)
    y = x.copy()
    y[0, 0] = np.nan
    kb.io.save(tmp_path / "m", {"zeros": x, "nan": y})
    assert main(["compare", str(tmp_path / "m"), "--json", "--device", "cpu"]) == 0

    def refuse(token):
        raise AssertionError(token)

    rows = json.loads(capsys.readouterr().out, parse_constant=refuse)["results"][0]["tensors"]
    assert {row["name"]: row["sqnr_db"] for row in rows} == {"nan": None, "zeros": None}
    assert {row["name"]: row["nan"] for row in rows} == {"nan": 1, "zeros": 0}
    assert main(["compare", str(tmp_path / "m"), "--formats", "kbit1", "--device", "cpu"]) == 0
    *lines, closing = capsys.readouterr().out.splitlines()
    assert {row[0]: row[1] for row in table("\n".join(lines))[1:]} == {"nan": "nan", "zeros": "inf", "total": "nan"}
    assert closing == "note: 1 of 2 tensors holds 1 NaN and 0 infinities: 'nan'"


@pytest.mark.parametrize("wide", [[], ["--wide"]])
def test_compare_says_when_a_mean_is_far_from_zero(tmp_path, capsys, wide):
    field = 290 + 5 * np.random.default_rng(0).standard_normal((64, 64))
    kb.io.save(tmp_path / "m", {"field": field.astype(np.float32)})
    assert main(["compare", str(tmp_path / "m"), "--device", "cpu", *wide]) == 0
    *_, closing = capsys.readouterr().out.splitlines()
    assert closing.startswith("note: 'field': the mean is 289.9 and the standard deviation 4.98")
    assert main(["plan", str(tmp_path / "m"), "-o", str(tmp_path / "p"), "--bits", "5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == closing


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    kb.io.save(tmp_path / "m", {"\x1b[2Jw\n": np.ones((64, 64), np.float32)})
    assert main(["compare", str(tmp_path / "m"), "--formats", "kbit4", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3


@pytest.mark.usefixtures("small_samples", "toy")
def test_a_new_format_appears_by_itself(model, capsys):
    assert main(["compare", "--device", "cpu"]) == 0
    rows = [row for row in table(capsys.readouterr().out) if row and row[0] == "toy-half"]
    assert len(rows) == 1 and rows[0][1] == "16.00"
    out, back = str(model) + ".toy", str(model) + ".back"
    assert main(["quantize", str(model), "-o", out, "--format", "toy-half", "--option", "factor=2"]) == 0
    assert kb.io.load(out)["a.weight"].format == Half(factor=2)
    assert main(["dequantize", out, "-o", back]) == 0
    assert np.allclose(kb.io.load(back)["a.weight"], kb.io.load(model)["a.weight"], rtol=2**-10)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["codebook=nf"], {"codebook": "nf"}),
        (["codebook=nf", "absmax=float32"], {"codebook": "nf", "absmax": "float32"}),
        (["absmax=null"], {"absmax": None}),
        (["codebook=[-1, 0, 0.25, 1]"], {"codebook": [-1, 0, 0.25, 1]}),
    ],
)
def test_options_are_json_or_text(model, capsys, options, expected):
    arguments = [word for option in options for word in ("--option", option)]
    assert main(["compare", str(model), "--formats", "kbit2", *arguments, "--json", "--device", "cpu"]) == 0
    row = json.loads(capsys.readouterr().out)["results"][0]["tensors"][0]
    x = kb.io.load(model)[row["name"]]
    assert row["sqnr_db"] == kb.metrics.sqnr_db(x, kb.dequantize(kb.quantize(x, "kbit2", **expected)))


# ---- quantize, dequantize ----


def test_quantize_and_dequantize(model, capsys):
    small, back = model.with_name("small"), model.with_name("back")
    assert main(["quantize", str(model), "-o", str(small), "--option", "codebook=nf", "--device", "cpu"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{small}: 2 tensors quantized to kbit4, 1 copied; 0.02 MB before, 0.00 MB after, 4.2")
    assert output.out.count("\n") == 1
    assert output.err == ""  # no progress bar where stderr is no terminal
    assert kb.io.load(small)["a.weight"].format == kb.get_format("kbit4", codebook="nf")
    assert main(["dequantize", str(small), "-o", str(back)]) == 0
    assert capsys.readouterr().out.startswith(f"{back}: 2 tensors dequantized, 1 copied; ")
    assert {n: (x.shape, x.dtype) for n, x in kb.io.load(back).items()} == {
        n: (x.shape, x.dtype) for n, x in kb.io.load(model).items()
    }


def test_keep_and_min_size(model, capsys):
    out = model.with_name("out")
    words = ["quantize", str(model), "-o", str(out), "--device", "cpu"]
    assert main([*words, "--keep", "a.*", "--keep", "lm_haed"]) == 0
    assert [name for name, t in kb.io.load(out).items() if isinstance(t, kb.QuantizedArray)] == [LONG]
    assert capsys.readouterr().err == "kbit: note: --keep 'lm_haed' matches no tensor\n"
    assert main([*words, "--min-size", "3000", "--force"]) == 0
    assert [name for name, t in kb.io.load(out).items() if isinstance(t, kb.QuantizedArray)] == ["a.weight"]


def test_the_closing_line_and_its_json(model, capsys):
    out = model.with_name("out")
    assert main(["quantize", str(model), "-o", str(out), "--device", "cpu"]) == 0
    assert re.fullmatch(
        r".*out: 2 tensors quantized to kbit4, 1 copied; 0\.02 MB before, 0\.00 MB after, 4\.2\d bits per element, "
        r"\d+\.\d\d s, \d+\.\d\d GB/s\n",
        capsys.readouterr().out,
    )
    for words in (["quantize", str(model)], ["dequantize", str(out)]):
        assert main([*words, "-o", str(model.with_name(words[0])), "--device", "cpu", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["converted"], document["copied"], document["elements"]) == (2, 1, 64 * 64 + 32 * 64)
        assert document["nbytes_before"] > 0 and document["gb_per_second"] > 0
        assert document["bits_per_element"] == pytest.approx(4.25, abs=0.02)


def test_a_sharded_job_says_that_it_can_go_on(tmp_path, monkeypatch, capsys):
    kb.io.save(tmp_path / "in", {f"w{i}": np.ones((64, 64), np.float32) for i in range(4)}, max_shard_size=20_000)
    calls = []

    def quantize(x, format):
        calls.append(x)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return kb.quantize(x, format)

    monkeypatch.setattr(conversion, "quantize", quantize)
    words = ["quantize", str(tmp_path / "in"), "-o", f"{tmp_path / 'out'}/", "--device", "cpu", "--resume"]
    assert main(words) == 130
    note = f"kbit: note: {tmp_path / 'out.part'} keeps finished shards; repeat the command to continue\n"
    assert capsys.readouterr().err == note + "kbit: interrupted\n"
    assert main(words) == 0
    assert "4 tensors quantized to kbit4, 0 copied (2 files were there already); " in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize(
    "formats",
    [
        "kbit2,kbit2:absmax=float16,int4:block=32,symmetric=false",
        'kbit2,kbit2[absmax="float16"],int4[granularity=["group",32],symmetric=false]',
    ],
)
def test_wide_comparison_and_formats_with_options(capsys, formats):
    assert main(["compare", "--wide", "--formats", formats, "--device", "cpu"]) == 0
    _, _, heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["format", "bits", "normal"] and heading.endswith("total") and len(lines) == 3
    assert [line.split()[0] for line in lines] == ["kbit2", "kbit2:absmax=float16", "int4:block=32,zero=int"]
    assert main(["compare", "--formats", formats, "--json", "--device", "cpu"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["format"]["name"] for r in results] == ["kbit2", "kbit2", "int4"]
    assert results[1]["format"]["absmax"] == "float16" and results[2]["format"]["granularity"] == ["group", 32]
    for line, result in zip(lines, results, strict=True):
        assert line.split()[-1] == f"{result['total']['sqnr_db']:.2f}"


def test_a_wide_comparison_of_a_file_has_tensors_as_lines(tmp_path, capsys):
    names = [LONG.replace("10", str(i)) for i in range(12)]
    kb.io.save(tmp_path / "m", {name: np.eye(32, 64, i, np.float32) + i for i, name in enumerate(names)})
    formats = "kbit4,int4:block=32,symmetric=false"
    assert main(["compare", str(tmp_path / "m"), "--wide", "--formats", formats, "--device", "cpu"]) == 0
    one, two, heading, bits, *lines = capsys.readouterr().out.splitlines()
    assert (one.split(), two.split()) == (["int4:"], ["block=32,"])
    assert heading.split() == ["tensor", "kbit4", "zero=int"] and bits.split()[0] == "bits"
    shown = [line.split()[0] for line in lines[:13]]
    assert shown == [*sorted(names), "total"]  # whole names: there is room
    assert max(map(len, (one, two, heading, bits, *lines[:13]))) <= 100


@pytest.mark.parametrize("columns", [60, 100])
def test_a_comparison_of_many_formats_goes_on_below(model, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [format.name for format in kb.explore.default_formats((64, 64))]
    assert main(["compare", str(model), "--wide", "--formats", ",".join(names), "--device", "cpu"]) == 0
    text = capsys.readouterr().out.partition("\nbest of")[0]
    parts = text.split("\n\n")
    assert len(parts) > 1 and max(map(len, text.splitlines())) <= columns
    assert [name for part in parts for name in part.splitlines()[0].split()[1:]] == names
    assert {part.splitlines()[3].split()[0] for part in parts} != {"total"}
    assert all(LONG[:5] in part for part in parts)


def test_compare_several_files(model, tmp_path, capsys):
    other = tmp_path / "other"
    kb.io.save(other, {"a.weight": np.eye(64, dtype=np.float32)})
    assert main(["compare", str(model), str(other), "--json", "--device", "cpu"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == [str(model), str(other)]
    names = [row["name"] for row in document["results"][0]["tensors"]]
    assert names == [f"{model}: a.weight", f"{model}: {LONG}", f"{other}: a.weight"]


TABLE = "table4[table=[1,2,3,4,5,6,7,8,-1,-2,-3,-4,-5,-6,-7,-8]]"


@pytest.mark.parametrize("columns", ["0", "20", "-5", "abc"])
@pytest.mark.parametrize(
    "words",
    [
        ["compare", "{model}", "--formats", f"kbit4,{TABLE}"],
        ["compare", "{model}", "--formats", TABLE],
        ["compare", "{model}", "--wide", "--formats", f"kbit4,{TABLE},int4:block=32,symmetric=false"],
        ["compare", "--wide", "--formats", f"kbit4,{TABLE}"],
        ["compare", "--formats", "kbit4:absmax=float32,codebook=nf,kbit5"],
        ["inspect", "{model}"],
        ["inspect", "{deep}"],
        ["formats"],
        ["formats", "int4", "table4"],
        ["plan", "{model}", "-o", "{out}", "--bits", "5", "--formats", "kbit4,int4:block=32,symmetric=false"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
@pytest.mark.usefixtures("small_samples")
def test_no_terminal_is_too_narrow(model, monkeypatch, capsys, words, columns):
    deep = model.with_name("deep")
    kb.io.save(deep, {LONG: np.ones((1,) * 62 + (64, 64), np.float32)})
    monkeypatch.setenv("COLUMNS", columns)
    device = [] if words[0] in ("inspect", "formats") else ["--device", "cpu"]
    assert main([word.format(model=model, deep=deep, out=model.with_name("out")) for word in words] + device) == 0
    assert all(line == line.rstrip() for line in capsys.readouterr().out.splitlines())


# ---- inspect, formats, doctor ----


def test_inspect(model, capsys):
    small = model.with_name("small")
    assert main(["quantize", str(model), "-o", str(small), "--option", "codebook=nf", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(small)]) == 0
    first, metadata, heading, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{small}: 3 tensors, 2 of them compressed, written by kbitcupy {kb.__version__}, 0.0")
    assert metadata == "metadata format: pt"
    assert heading.split() == ["tensor", "format", "dtype", "shape", "bits", "MB", "share"]
    assert rows[0].split() == ["a.bias", "float32", "64", "32.00", "0.000", "7.3%"]
    assert rows[1].split() == ["a.weight", "kbit4:codebook=nf", "float32", "64x64", "4.26", "0.002", "61.8%"]
    assert rows[2].split()[1:4] == ["kbit4:codebook=nf", "float16", "32x64"]
    assert max(map(len, rows)) <= 100 and "..." in rows[2]


def test_inspect_json(model, capsys):
    small = model.with_name("small")
    assert main(["quantize", str(model), "-o", str(small), "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(small), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metadata"] == {"format": "pt"} and document["files"] == {"small": document["nbytes"]}
    assert document["written_by"] == f"kbitcupy {kb.__version__}"
    tensors = {row["name"]: row for row in document["tensors"]}
    loaded = kb.io.load(small)
    assert set(tensors) == set(loaded)
    for name, row in tensors.items():
        tensor = loaded[name]
        assert (row["shape"], row["dtype"], row["nbytes"]) == (list(tensor.shape), tensor.dtype.name, tensor.nbytes)
        assert row["bits_per_element"] == tensor.nbytes * 8 / tensor.size
        assert row["format"] == (tensor.format.config() if isinstance(tensor, kb.QuantizedArray) else None)
    assert sum(row["share"] for row in tensors.values()) == pytest.approx(1)


def test_inspect_json_of_an_index_with_numbers_that_json_lacks(tmp_path, capsys):
    kb.io.save(tmp_path / "in", {f"w{i}": np.ones((64, 64), np.float32) for i in range(2)}, max_shard_size=20_000)
    (index,) = (tmp_path / "in").glob("*.index.json")
    stored = json.loads(index.read_text())
    stored["metadata"] |= {"loss": math.nan, "more": [math.inf, {"least": -math.inf, "step": 3}]}
    index.write_text(json.dumps(stored))

    def refuse(token):
        raise AssertionError(token)

    assert main(["inspect", str(tmp_path / "in"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)["index_metadata"]
    assert found == stored["metadata"] | {"loss": None, "more": [None, {"least": None, "step": 3}]}


def test_inspect_shows_nothing_that_controls_a_terminal(tmp_path, capsys):
    kb.io.save(tmp_path / "m", {"\x1b[2Jw\n": np.zeros(()), "empty": np.zeros((0, 3))}, {"\x1b]0;a": "b\r\x07"})
    assert main(["inspect", str(tmp_path / "m")]) == 0
    text = capsys.readouterr().out
    assert all(line.isprintable() for line in text.splitlines())
    assert "scalar" in text and "0x3" in text


def test_formats(capsys):
    assert main(["formats"]) == 0
    heading, *rows = table(capsys.readouterr().out)
    assert " ".join(heading) == "name bits block bits per element dtypes origin"
    assert [row[0] for row in rows] == kb.list_formats(default=True)
    assert main(["formats", "kbit3", "--json"]) == 0
    (about,) = json.loads(capsys.readouterr().out)["formats"]
    format = kb.get_format("kbit3")
    assert (about["name"], about["bits"], about["block"]) == ("kbit3", 3, 32)
    assert about["bits per element"] == pytest.approx(3.25, abs=0.001)
    assert (about["origin"], about["summary"], about["dtypes"]) == (format.origin, format.summary, list(format.dtypes))
    assert about["options"] == format.options()
    assert [choice["name"] for choice in about["choices"]] == ["codebook", "absmax"]
    assert main(["formats", "kbit9"]) == 1
    assert "registered are kbit1" in capsys.readouterr().err


def test_formats_lists_the_options_of_a_format(capsys):
    assert main(["formats", "int4", "nf4", "kbit8"]) == 0
    _, int4, nf4, kbit8 = capsys.readouterr().out.split("\noptions of ")
    options = [line.split()[0] for line in int4.splitlines() if re.match(r"  \w", line)]
    assert options == [
        "granularity=tensor", "block", "zero=none", "symmetric", "percentile", "scale_dtype=float32",
        "zero_dtype=int32",
    ]  # fmt: skip
    assert re.search(r"granularity=tensor +tensor, token, \(channel, axis\), \(group, size\): Elements that", int4)
    assert "zero=none            none, int, float: What stands for 0" in int4
    assert nf4.startswith(
        "nf4:\n  block=64            int: Elements that share an absmax: a power of two from 16 to 4096"
    )
    assert "absmax=float16" in kbit8 and "e4m4, float16, float32: Storage" in kbit8 and "members" not in kbit8
    assert main(["formats"]) == 0
    assert "options of" not in capsys.readouterr().out


@pytest.mark.usefixtures("toy")
def test_options_without_a_docstring_are_listed_too(capsys):
    assert main(["formats", "toy-half"]) == 0
    assert capsys.readouterr().out.endswith("\noptions of toy-half:\n  factor=1.0\n")


def test_what_a_format_takes_is_said(capsys):
    assert main(["compare", "--formats", "kbit4:speed=2", "--device", "cpu"]) == 1
    assert "it takes: codebook, absmax\n" in capsys.readouterr().err


def test_a_format_that_needs_an_option_is_listed(capsys):
    class Needy(Half):
        name = "toy-needy"

        def __init__(self, *, factor=None):
            if factor is None:
                raise ValueError("factor is None; give it")
            super().__init__(factor=factor)

    kb.register("toy-needy", Needy)
    try:
        assert main(["formats"]) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("toy-needy")]
        assert row.endswith("needs an option: factor is None; give it")
        assert main(["formats", "toy-needy", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["formats"][0]["bits"] is None
    finally:
        unregister("toy-needy")


@pytest.mark.usefixtures("hidden_and_decoded", "small_samples")
@pytest.mark.parametrize(
    ("words", "shown", "more"),
    [
        (["formats"], {"toy-decoded"}, {"toy-hidden"}),
        (["compare"], set(), {"toy-hidden"}),
        (["bench", "--device", "cpu", "--list-cells"], {"toy-decoded"}, {"toy-hidden"}),
    ],
)
def test_lists_show_what_is_asked_for(capsys, words, shown, more):
    """Formats that only decode can be listed and timed, and not be compared."""
    names = [set(), set()]
    for number, line in enumerate((words, [*words, "--all"])):
        assert main(line) == 0
        out = capsys.readouterr().out
        names[number] = {name for name in ("toy-hidden", "toy-decoded") if name in out}
    assert names == [shown, shown | more]


@pytest.mark.usefixtures("hidden_and_decoded")
def test_a_format_that_only_decodes_is_timed_decoding(capsys):
    assert main(["bench", "--device", "cpu", "--sizes", "1000", "--formats", "toy-decoded", "--no-peers"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("toy")]
    assert rows == [["toy-decoded", "dequantize"]]
    assert main(["compare", "--formats", "toy-decoded"]) == 1
    assert "toy-decoded can be decoded but not made" in capsys.readouterr().err


@pytest.mark.usefixtures("hidden_and_decoded")
def test_plans_choose_from_what_is_asked_for(tmp_path, capsys):
    kb.io.save(tmp_path / "w.safetensors", {"w": np.ones((64, 64), np.float32) / 3})
    labels = []
    for words in ([], ["--all"]):
        output = tmp_path / f"plan{len(words)}.json"
        command = ["plan", str(tmp_path / "w.safetensors"), "-o", str(output), "--bits", "20", "--min-size", "1"]
        assert main([*command, *words]) == 0
        labels.append("toy-hidden for all" in capsys.readouterr().out)
    assert labels == [False, True]


def test_doctor_on_this_machine(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert f"kbitcupy {kb.__version__}" in text and "everything is in order" in text
    assert [line.split()[:2] for line in text.splitlines()[:5]] == [
        ["ok", "kbitcupy"],
        ["ok", "packages"],
        ["ok", "NumPy"],
        ["ok", "disk"],
        ["-", "GPU"],
    ]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("broken", [False, True])
def test_doctor_measures_a_format_that_has_no_bound(monkeypatch, capsys, broken):
    if broken:
        monkeypatch.setattr(Half, "decode_numpy", lambda self, planes, out: out.fill(1))
    assert main(["doctor", "--device", "cpu"]) == broken
    text = capsys.readouterr().out
    assert ("FAIL  NumPy" in text and "toy-half: SQNR" in text) == broken


def test_doctor_on_a_gpu(cupy, capsys):
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in document["checks"]}
    assert document["ok"] and {check["status"] for check in checks.values()} == {"ok"}
    assert "same bytes as NumPy" in checks["kernel"]["found"] and cupy.__version__ in checks["CuPy"]["found"]
    assert len(checks) == 4 + 7


def test_doctor_names_a_remedy_for_each_failure(monkeypatch, capsys):
    def failing(device):
        raise OSError(30, "Read-only\nfile system")

    check = cli_doctor.Check("disk", failing, "make room")
    monkeypatch.setattr(cli_doctor, "_HOST", (check,))
    monkeypatch.setattr(cli_doctor, "driver_version", lambda: None)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAIL  disk  OSError: [Errno 30] Read-only file system"
    assert lines[1].strip() == "remedy: make room"
    assert lines[2].startswith("-     GPU   there is no NVIDIA driver")
    assert lines[3] == "1 of 2 checks failed"
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"]
    assert [(c["status"], c["remedy"]) for c in document["checks"]] == [("failed", "make room"), ("skipped", None)]


def test_doctor_where_there_is_a_driver_but_no_cupy(monkeypatch, capsys):
    def missing():
        raise MissingExtraError("CuPy is not installed: pip install 'kbitcupy[cuda12]'")

    monkeypatch.setattr(cli_doctor, "driver_version", lambda: "580.1")
    monkeypatch.setattr(_xp, "import_cupy", missing)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  CuPy      CuPy is not installed" in text and "remedy: pip uninstall all cupy" in text


def test_doctor_where_there_is_cupy_but_no_driver(monkeypatch, capsys):
    def finds_none():
        raise DeviceError("a CUDA device was asked for but CuPy finds none: use device 'cpu', or check nvidia-smi")

    monkeypatch.setattr(cli_doctor, "_HOST", ())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="14.0"))
    monkeypatch.setattr(_xp, "import_cupy", finds_none)
    monkeypatch.setattr(cli_doctor, "driver_version", lambda: None)
    assert main(["doctor", "--device", "cuda"]) == 1
    ok, failed, remedy, last = capsys.readouterr().out.splitlines()
    assert ok.startswith("ok    CuPy  CuPy 14.0") and failed == "FAIL  GPU   there is no NVIDIA driver"
    assert "install the NVIDIA driver" in remedy and "pip" not in remedy and last == "1 of 2 checks failed"
    monkeypatch.setattr(cli_doctor, "driver_version", lambda: "580.1")
    assert main(["doctor", "--device", "cuda"]) == 1
    _, failed, remedy, _ = capsys.readouterr().out.splitlines()
    assert "CuPy finds none" in failed and "check nvidia-smi, and CUDA_VISIBLE_DEVICES" in remedy


def test_what_doctor_finds_on_a_gpu(monkeypatch, tmp_path):
    """The checks of a GPU, on a stand-in for CuPy."""
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda i: {"name": b"GPU", "major": 9, "minor": 0, "totalGlobalMem": 80 * 10**9},
        driverGetVersion=lambda: 12080,
        runtimeGetVersion=lambda: 12090,
    )
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 9))
    cuda = SimpleNamespace(runtime=runtime, nvrtc=nvrtc, get_cuda_path=lambda: str(tmp_path))
    fake = SimpleNamespace(__version__="14", cuda=cuda)
    pathfinder = SimpleNamespace(find_nvidia_header_directory=lambda library: None)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(_xp, "import_cupy", lambda: fake)
    monkeypatch.setattr(cli_doctor, "driver_version", lambda: "580.1")
    assert cli_doctor._gpu("cuda:0") == "cuda:0 GPU, sm_90, 80 GB"
    assert cli_doctor._driver("cuda:0") == "driver 580.1, which takes CUDA 12.8; CuPy's runtime is 12.9"
    assert cli_doctor._nvrtc("cuda:0") == "NVRTC 12.9"
    with pytest.raises(FileNotFoundError, match="cuda_fp16.h"):
        cli_doctor._headers("cuda:0")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").write_text("")
    assert cli_doctor._headers("cuda:0") == str(tmp_path / "include")
    runtime.runtimeGetVersion = lambda: 13000
    with pytest.raises(RuntimeError, match=r"takes CUDA 12\.8; CuPy's runtime is 13\.0"):
        cli_doctor._driver("cuda:0")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    assert cli_doctor._cache("cuda:0").startswith(f"{tmp_path / 'cache'}, ")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        cli_doctor._cache("cuda:0")


def test_the_doctors_kernel_check_compares(monkeypatch):
    assert "the same bytes as NumPy" in cli_doctor._kernel("cpu")
    x = cli_doctor.draw("normal", (64, 512))
    q = kb.quantize(x, "kbit4")
    with pytest.raises(ArithmeticError, match="plane 'absmax' of kbit4 differs"):
        cli_doctor._compare(q.format, x, {**q.planes, "absmax": q.planes["absmax"] + 1}, q.dequantize())
    with pytest.raises(ArithmeticError, match="what kbit4 restores differs"):
        cli_doctor._compare(q.format, x, q.planes, q.dequantize() + 1)


# ---- errors ----


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frobnicate"],
        ["quantize"],
        ["quantize", "{model}"],
        ["dequantize", "{model}", "-o"],
        ["compare", "--option", "codebook"],
        ["compare", "--option", "=nf"],
        ["compare", "--min-size", "-1"],
        ["compare", "--min-size", "many"],
        ["compare", "--unknown"],
    ],
)
def test_bad_usage_exits_2(model, capsys, words):
    with pytest.raises(SystemExit) as stop:
        main([word.format(model=model) for word in words])
    assert stop.value.code == 2
    assert "usage: kbit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--unknown"],
        ["--debug", "plan", "m", "-o", "p", "--bits", "3", "--fast"],
        ["plan", "m", "-o", "p", "--bits", "3", "--time-limit", "0"],
        ["plan", "m", "-o", "p", "--bits", "3", "--time-limit", "soon"],
        ["plan", "m", "-o", "p", "--bits", "nan"],
        ["inspect"],
        ["formats", "--wide"],
        ["doctor", "now"],
        ["bench", "--linear", "--w8a8"],
    ],
)
def test_bad_usage_shows_the_usage_of_the_command(capsys, words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    command = next(word for word in words if not word.startswith("-"))
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: kbit {command} ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "{missing}"], "{missing} does not exist"),
        (["compare", "{text}"], "{text} is not a valid safetensors file: "),
        (["compare", "{folder}"], "{folder} is a directory with 0 indices"),
        (["compare", "{truncated}"], "{truncated} is not a valid safetensors file: "),
        (["compare", "--formats", "kbit9"], "format is 'kbit9'; registered are kbit1, "),
        (["compare", "--formats", "nf4[block=32"], "format is 'nf4[block=32'; "),
        (["compare", "--formats", "nf4[32]"], "format is 'nf4[32]'; '32' in it is not KEY=VALUE"),
        (["compare", "--formats", "nf4:32"], "format is 'nf4:32'; '32' in it is not KEY=VALUE"),
        (["compare", "--formats", "nf4:block=33"], "block is 33; allowed are the powers of two"),
        (["compare", "--formats", "kbit4,"], "formats are 'kbit4,'; each must be a name"),
        (["compare", "--formats", ""], "formats are ''; each must be a name"),
        (["compare", "{model}", "{missing}"], "{missing} does not exist"),
        (["plan", "{model}", "-o", "{out}", "--bits", "4", "--formats", ",nf4"], "formats are ',nf4'; each"),
        (["compare", "{model}", "--min-size", "999999"], "{model} holds no tensor to compress"),
        (["compare", "{model}", "--keep", "*"], "{model} holds no tensor to compress"),
        (["compare", "--option", "speed=11"], "format 'kbit1' has no option 'speed'; it takes: codebook, absmax"),
        (["compare", "--option", "codebook=best"], "codebook is 'best'; allowed are "),
        (["compare", "--formats", "kbit2", "--option", "codebook=[1,2,3]"], "codebook is of shape (3,)"),
        (
            ["compare", "--formats", "kbit1", "--option", "codebook=[1,NaN]"],
            "codebook holds values that are not finite",
        ),
        (
            ["compare", "--formats", "kbit1", "--option", "codebook=custom"],
            "tensor 'normal' with kbit1:codebook=custom: codebook='custom' names",
        ),
        (["inspect", "{missing}"], "{missing} does not exist"),
        (["inspect", "{text}"], "{text} is not a valid safetensors file: "),
        (["inspect", "{folder}"], "{folder} is a directory with 0 indices"),
        (["compare", "--device", "tpu"], "device is 'tpu'; allowed are 'auto', 'cpu' and 'cuda:N'"),
        (["compare", "--device", "cuda:x"], "device is 'cuda:x'; allowed are 'auto', 'cpu' and 'cuda:N'"),
        (["quantize", "{missing}", "-o", "{out}"], "{missing} does not exist"),
        (["quantize", "{text}", "-o", "{out}"], "{text} is not a valid safetensors file: "),
        (["quantize", "{model}", "-o", "{out}", "--format", "kbit0"], "format is 'kbit0'; registered are kbit1, "),
        (["quantize", "{model}", "-o", "{out}", "--option", "k=4"], "format 'kbit4' has no option 'k'"),
        (["quantize", "{model}", "-o", "{text}"], "{text} exists; choose another path, or overwrite it with "),
        (["quantize", "{model}", "-o", "{model}", "--force"], "output {model} is the input file"),
        (["quantize", "{model}", "-o", "{folder}", "--force"], "{folder} is a directory"),
        (["quantize", "{model}", "-o", "{missing}/out"], "{missing}/out cannot be written: the directory "),
        (["quantize", "{model}", "-o", "{out}", "--device", "gpu"], "device is 'gpu'; "),
        (["dequantize", "{model}", "-o", "{out}"], "{model} holds no tensors compressed by kbitcupy"),
        (["dequantize", "{text}", "-o", "{out}"], "{text} is not a valid safetensors file: "),
        (["dequantize", "{missing}", "-o", "{out}"], "{missing} does not exist"),
    ],
)
def test_bad_input_exits_1_with_one_line(model, capsys, words, message):
    paths = {name: model.with_name(name) for name in ("missing", "text", "folder", "truncated", "out")}
    paths["model"] = model
    paths["text"].write_text("not tensors at all")
    paths["folder"].mkdir()
    paths["truncated"].write_bytes(model.read_bytes()[:-1])
    before = sorted(os.listdir(model.parent))
    words = [word.format(**paths) for word in words]
    assert main(words if "--device" in words or words[0] == "inspect" else [*words, "--device", "cpu"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("kbit: error: " + message.format(**paths))
    assert output.err.count("\n") == 1
    assert sorted(os.listdir(model.parent)) == before


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "cuda:7"])
def test_a_gpu_that_is_not_there_has_a_remedy(model, capsys, device):
    if _xp.resolve_device("auto") != "cpu":
        pytest.skip("there is a GPU")
    out = model.with_name("out")
    assert main(["quantize", str(model), "-o", str(out), "--device", device]) == 1
    message = capsys.readouterr().err
    assert message.startswith("kbit: error: a CUDA device was asked for but CuPy ")
    assert "nvidia-smi" in message or "pip install" in message
    assert not out.exists()


@pytest.mark.parametrize("words", [["--debug", "compare"], ["compare", "--debug"]])
def test_debug_shows_the_traceback(capsys, words):
    assert main([*words, "--formats", "kbit9"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("Traceback (most recent call last)")
    assert "FormatError: format is 'kbit9'" in message


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (KeyboardInterrupt, 130, "kbit: interrupted\n"),
        (MemoryError("no room\nfor 5 bytes"), 1, "kbit: error: no room for 5 bytes\n"),
        (MemoryError, 1, "kbit: error: MemoryError\n"),
        (OSError(5, "Input/output error"), 1, "kbit: error: [Errno 5] Input/output error\n"),
        (TypeError("no such cast"), 1, "kbit: error: {model}: tensor 'a.weight': no such cast\n"),
    ],
)
def test_failures_in_the_middle_leave_nothing_behind(model, monkeypatch, capsys, failure, status, message):
    def failing(*_):
        raise failure

    monkeypatch.setattr(conversion, "quantize", failing)
    out = model.with_name("out")
    assert main(["quantize", str(model), "-o", str(out), "--device", "cpu"]) == status
    assert capsys.readouterr().err == message.format(out=out, model=model)
    assert os.listdir(model.parent) == [model.name]


# ---- processes ----


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_module_runs_and_knows_its_version():
    command = [sys.executable, "-m", "kbitcupy", "--version"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert run.stdout == f"kbitcupy {kb.__version__}\n"


def test_import_loads_no_command_line_and_no_files():
    code = "import json, sys; import kbitcupy; print(json.dumps([*sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert not loaded & {
        "kbitcupy.cli",
        "kbitcupy.io",
        "kbitcupy.explore.samples",
        "safetensors",
        "tqdm",
        "argparse",
        "cupy",
    }


POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and pipes are POSIX's")


@POSIX
@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("quantize {model} -o out", ">&-"),
        ("quantize {model} -o out", "2>&-"),
        ("quantize {model} -o out", "<&- >&- 2>&-"),
        ("compare {model}", ">&-"),
        ("inspect {model}", ">&- 2>&-"),
        ("formats", ">&-"),
        ("plan {model} -o out --bits 5 --formats kbit2,kbit4", ">&- 2>&-"),
        ("bench --sizes 1000 --formats kbit2 --no-peers", "2>&-"),
    ],
)
def test_streams_may_be_closed(model, tmp_path, words, closed):
    """As for a job of cron: the work is done, the exit status is 0, and what is open has no traceback."""
    device = "" if words.split()[0] in ("inspect", "formats") else " --device cpu"
    command = f"{sys.executable} -m kbitcupy {words.format(model=model)}{device} {closed}"
    run = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert ">&-" in closed.split() or run.stdout
    assert ("-o" in words) == (tmp_path / "out").exists()
    if words.startswith("quantize"):
        assert isinstance(kb.io.load(tmp_path / "out")["a.weight"], kb.QuantizedArray)


@POSIX
def test_an_error_without_streams_is_an_exit_status(tmp_path):
    command = f"{sys.executable} -m kbitcupy compare missing 2>&-"
    run = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", [["inspect"], ["compare", "--wide", "--device", "cpu"]], ids=["inspect", "compare"])
def test_names_beyond_the_encoding_are_escaped(tmp_path, encoding, words):
    kb.io.save(tmp_path / "m", {"caf\u00e9.\u6a21\u578b": np.eye(64, dtype=np.float32)})
    command = [sys.executable, "-m", "kbitcupy", words[0], "m", *words[1:]]
    run = subprocess.run(
        command, cwd=tmp_path, env={**environment(), "PYTHONIOENCODING": encoding}, capture_output=True
    )
    assert (run.returncode, run.stderr) == (0, b"")
    shown = run.stdout.decode(encoding)
    assert ("caf\\xe9" if encoding == "ascii" else "caf\u00e9") + ".\\u6a21\\u578b" in shown


@POSIX
def test_a_reader_that_leaves_is_no_error(model):
    command = [sys.executable, "-m", "kbitcupy", "compare", str(model), "--device", "cpu"]
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(command, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


@POSIX
def test_ctrl_c_leaves_nothing_behind(tmp_path):
    kb.io.save(tmp_path / "m", {f"w{i}": np.ones((2048, 4096), np.float16) for i in range(4)})
    # A shell may start its background jobs with SIGINT ignored, which Python would inherit.
    code = (
        "import signal, sys; from kbitcupy.cli import main; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(main('quantize m -o out --format kbit8 --device cpu'.split()))"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".kbit-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "kbit: interrupted\n"
    assert process.returncode == 130
    assert os.listdir(tmp_path) == ["m"]
