"""Which format: candidates, the best one for an array, plans over unlike tensors, and the commands on top of them."""

import json
import math
import time

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy import explore
from kbitcupy.cli import main
from kbitcupy.errors import FormatError
from kbitcupy.explore import candidates
from kbitcupy.explore.samples import draw


def image(n=512):
    """A smooth picture with some noise, from 0 to 1, as cameras and microscopes give them."""
    y, x = np.mgrid[:n, :n] / n
    field = 0.5 + 0.25 * np.sin(7 * x + 3 * y) + 0.2 * np.sin(11 * y - 5 * x * y)
    field += 0.012 * np.random.default_rng(0).standard_normal((n, n))
    field -= field.min()
    return (field / field.max()).astype(np.float32)


IMAGE = image()
PRESSURE = (1e5 + 2e3 * np.random.default_rng(1).standard_normal((64, 96))).astype(np.float32)
VELOCITY = np.random.default_rng(2).standard_normal((96, 64)).astype(np.float32)


# ---- best ----------------------------------------------------------------------------------------------------------


def test_an_image_at_4_bits_gets_a_fitted_codebook(xp):
    x = xp.asarray(IMAGE)
    plain = kb.metrics.sqnr_db(x, kb.quantize(x, "kbit4"))
    found = explore.best(x, bits=4.25, time_limit=math.inf)
    assert plain < 29 and found.row["sqnr_db"] > plain + 15 and found.row["sqnr_db"] > 43
    assert str(found.format) == "kbit4:codebook=custom" and found.given["codebook"].shape == (16,)
    assert round(found.row["bits_per_element"], 2) <= 4.25
    # Its figures are those of what it makes.
    q = found.quantize(x)
    assert q.format == found.format and q.bits_per_element == found.row["bits_per_element"]
    assert kb.metrics.sqnr_db(x, q) == found.row["sqnr_db"]
    assert found.row["fitted"] == {"codebook": found.given["codebook"].tolist()} and found.row["given"] == ["codebook"]
    assert kb.quantize(x, found.choice).to_bytes() == q.to_bytes()


TAILS = draw("Student-t, 4 df", (128, 512))
ARRAYS = {"tails": TAILS, "channels": draw("normal, outlier channels", (128, 512)), "image": image(256)}


@pytest.mark.parametrize("bits", [4.25, 6.5])
@pytest.mark.parametrize("name", ARRAYS)
def test_no_format_within_the_bits_is_noticeably_better(name, bits):
    x = ARRAYS[name]
    found = explore.best(x, bits=bits, time_limit=math.inf)
    assert found.row["bits_per_element"] <= bits + 0.005
    for candidate in candidates.candidates(x.shape):
        if bits - 1.3 <= 8 * candidate.nbytes(x.shape) / x.size <= bits + 0.005:
            row = candidate.measured(x, "x", candidate.fitted(x, tolerance=1e-5, iterations=500)).row()
            assert row["sqnr_db"] <= found.row["sqnr_db"] + 0.15, (row["label"], row["sqnr_db"], repr(found))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (33_000,), (2, 3, 4, 5)])
def test_an_array_of_any_shape_has_a_best_format(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    found = explore.best(x, bits=100)
    assert found.quantize(x).shape == shape and found.row["sqnr_db"] > 40


def test_of_alike_errors_the_fewer_bits_win():
    x = draw("normal", (128, 512))
    found = explore.best(x, bits=8, formats=["kbit7:absmax=float32", "kbit7:absmax=float16", "int4"])
    assert str(found.format) == "kbit7:absmax=float16"


@pytest.mark.parametrize("limit", [0.5, 0.02, 0.004])
def test_no_element_is_further_away_than_max_error(xp, limit):
    x = xp.asarray(IMAGE)
    found = explore.best(x, max_error=limit, time_limit=math.inf)
    q = found.quantize(x)
    assert kb.metrics.max_abs(x, q.dequantize()) <= limit
    smaller = [each for each in explore.default_formats(x.shape) if kb.quantize(x, each).nbytes < q.nbytes]
    assert all(kb.metrics.max_abs(x, kb.quantize(x, each).dequantize()) > limit for each in smaller)


@pytest.mark.parametrize("limit", [10.0, 21.0, 40.0])
def test_the_sqnr_is_kept_to_with_few_bits(limit):
    x = TAILS
    found = explore.best(x, sqnr_db=limit, time_limit=math.inf)
    q = found.quantize(x)
    assert kb.metrics.sqnr_db(x, q) >= limit
    smaller = [each for each in explore.default_formats(x.shape) if kb.quantize(x, each).nbytes < q.nbytes]
    assert all(kb.metrics.sqnr_db(x, kb.quantize(x, each)) < limit for each in smaller)


def test_a_choice_among_named_formats():
    own = np.linspace(-1, 1, 16)
    formats = ["nf4", ("kbit4", {"codebook": own}), "kbit8"]
    found = explore.best(IMAGE, bits=4.6, formats=formats)
    assert {str(found.format)} <= {row["label"] for row in found.rows} <= {"nf4", "kbit4:codebook=custom"}
    only = explore.best(IMAGE, bits=4.6, formats=formats[1])
    assert np.array_equal(only.given["codebook"], own) and only.row["fitted"] == {}
    assert kb.metrics.sqnr_db(IMAGE, only.quantize(IMAGE)) == only.row["sqnr_db"]


def test_what_a_choice_says_of_itself():
    found = explore.best(PRESSURE, bits=4.5, time_limit=math.inf)
    first, note = repr(found).splitlines()
    assert found.format.options()["zero"] == "float" and first.startswith(f"<Best: {found.format}, 4.")
    assert first.endswith(f"bits per element, SQNR {found.row['sqnr_db']:.2f} dB>")
    assert note.startswith("note: 'x': the mean is 9.999e+04")
    fitted = explore.best(IMAGE, bits=4.5, time_limit=math.inf)
    assert repr(fitted).startswith(f"<Best: {fitted.format}, fitted codebook, 4.")


def test_zeros_and_constants_are_exact():
    for x in (np.zeros((64, 64), np.float32), np.full((64, 64), 3.7, np.float32), np.float32(2.5).reshape(())):
        found = explore.best(x, bits=200)
        assert found.row["max_error"] == 0 and np.array_equal(found.quantize(x).dequantize(), x)


@pytest.mark.parametrize(
    ("x", "given", "error", "message"),
    [
        (IMAGE, {}, FormatError, "best is given no aim; give one of bits=, max_error= and sqnr_db="),
        (IMAGE, {"bits": 4, "sqnr_db": 20}, FormatError, "best is given bits and sqnr_db; give one of"),
        (IMAGE, {"bits": 0}, FormatError, "bits is 0; it must be a finite positive number"),
        (IMAGE, {"bits": "4"}, FormatError, "bits is '4'"),
        (IMAGE, {"bits": True}, FormatError, "bits is True"),
        (IMAGE, {"sqnr_db": math.inf}, FormatError, "sqnr_db is inf"),
        (IMAGE, {"max_error": -1}, FormatError, "max_error is -1; it must be a finite number from 0 on"),
        (IMAGE, {"bits": 4, "time_limit": 0}, FormatError, "time_limit is 0"),
        (IMAGE, {"bits": 0.5}, FormatError, r"bits is 0.5; the smallest format, kbit1, takes 1\.25 bits per element"),
        (IMAGE, {"sqnr_db": 500}, FormatError, "sqnr_db is 500; no format keeps to it. .* nearest, with .* dB at"),
        (IMAGE, {"max_error": 0}, FormatError, "max_error is 0; no format keeps to it. .* raise the number"),
        (IMAGE, {"bits": 4, "formats": []}, FormatError, "formats is empty"),
        (IMAGE, {"bits": 4, "formats": "kbit9"}, FormatError, "format is 'kbit9'"),
        (IMAGE[:5, :5], {"bits": 9, "formats": "q4_k"}, FormatError, "q4_k"),
        (np.ones((0, 4)), {"bits": 4}, FormatError, "no element"),
        (np.array([1.0, np.nan, np.inf]), {"bits": 40}, FormatError, "x holds 1 NaN and 1 infinite elements"),
        (np.arange(4), {"bits": 4}, TypeError, "x is int64"),
    ],
)
def test_bad_calls(x, given, error, message):
    with pytest.raises(error, match=message):
        explore.best(x, **given)


@pytest.mark.parametrize("factor", [1e-40, 1e-20, 1e20, 1e30])
def test_numbers_may_be_large_or_small(factor):
    """Formats that have no scales for them are left out."""
    x = (VELOCITY * np.float64(factor)).astype(np.float32)
    found = explore.best(x, bits=5.3, time_limit=math.inf)
    assert found.row["sqnr_db"] > 20 and np.isfinite(found.quantize(x).dequantize()).all()
    assert explore.best(x, sqnr_db=20).row["sqnr_db"] >= 20
    formats = ["int4:block=32,zero=float,scale_dtype=float16", "int4:block=32,zero=float"]
    assert explore.plan({"x": x}, 7, formats=formats).loss < 0.02


def test_a_nan_that_no_sample_has_is_found():
    x = draw("normal", (512, 512)).copy()
    x[1, 1] = np.nan
    with pytest.raises(FormatError, match="1 NaN and 0 infinite"):
        explore.best(x, bits=4.5)


def test_when_the_time_is_up_there_is_an_answer():
    x = draw("normal", (1024, 1024))
    began = time.monotonic()
    found = explore.best(x, bits=4.5, time_limit=1e-9)
    assert time.monotonic() - began < 20 and len(found.rows) == 1 and found.row["sqnr_db"] > 20


# ---- what is tried -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(), (5,), (100_000,), (4096, 256), (3, 5, 7), (40, 3, 2000), (3, 90_000), (1 << 17, 3)]
)
def test_samples_are_parts_of_the_array(xp, shape):
    x = xp.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    part = candidates.sample(x)
    assert part.ndim == x.ndim and part.size <= 1 << 16 and part.size >= min(x.size, 1 << 14)
    assert bool(xp.isin(part, x).all()) and len(xp.unique(part)) == part.size
    if x.size <= 1 << 15:
        assert part is x


def test_the_registry_says_what_is_tried():
    found = candidates.candidates((64, 256))
    assert {str(each.format) for each in found if each.fits} >= {"kbit4:codebook=custom", "table4:codebook=custom"}
    assert {"int4:block=32,zero=int", "nf4:block=16"} <= {str(each.format) for each in found}
    assert {each.format.name for each in found} == {format.name for format in explore.default_formats((64, 256))}
    more = {each.format.name for each in candidates.candidates((64, 256), all=True)}
    assert "q2_k" in more and "q2_k" not in {each.format.name for each in found}


def test_a_sweep_shows_the_best_answer_too(xp):
    rows = explore.sweep(xp.asarray(IMAGE))
    plain = {str(format) for format in explore.default_formats(IMAGE.shape)}
    more = [row for row in rows if row["label"] not in plain]
    assert [row["label"] for row in rows[: len(plain)]] == [str(f) for f in explore.default_formats(IMAGE.shape)]
    (kbit4,) = (row for row in more if row["label"] == "kbit4:codebook=custom")
    assert kbit4["sqnr_db"] > 43 and round(kbit4["bits_per_element"], 2) == 4.25
    assert max(row["sqnr_db"] for row in rows if row["label"] in plain and row["bits_per_element"] <= 4.25) < 33
    # Each of them keeps a dB more than all that are no larger.
    for row in more:
        others = [each for each in rows if each is not row and each["nbytes_after"] <= row["nbytes_after"]]
        assert all(row["sqnr_db"] > each["sqnr_db"] + 1 for each in others), row["label"]
    # Nothing is added where nothing is gained.
    assert len(more) < 12 and len(explore.sweep(np.zeros((64, 64), np.float32))) == len(
        explore.default_formats((64, 64))
    )


def test_trials_end_in_time():
    plain = explore.default_formats(IMAGE.shape)
    assert candidates.Search(seconds=1e-9).beyond(IMAGE, plain) == []
    tried = candidates.trials(IMAGE, candidates.candidates(IMAGE.shape), seconds=1e-9)
    assert {str(trial.candidate.format) for trial in tried} <= {format.name for format in plain}
    search = candidates.Search()
    first = search.beyond(IMAGE, plain)
    assert "kbit4:codebook=custom" in [str(each.format) for each in first]
    search._left = 0.0
    # What earlier arrays have shown goes on.
    again = search.beyond(VELOCITY, explore.default_formats(VELOCITY.shape))
    assert {each.format for each in again} <= {each.format for each in first} and again


# ---- plans over unlike tensors -------------------------------------------------------------------------------------


def test_a_plan_does_not_ask_for_units():
    fields = {"pressure": PRESSURE - 1e5, "velocity": VELOCITY}
    formats = [f"kbit{k}" for k in range(1, 9)]
    plan = explore.plan(fields, 4.5, formats=formats)
    assert {str(format) for format in plan.formats.values()} == {"kbit4"}
    assert plan.loss == pytest.approx(sum(10 ** (-row["sqnr_centered_db"] / 10) for row in plan.rows) / 2, rel=1e-9)
    by_units = explore.plan(fields, 4.5, formats=formats, objective="absolute")
    assert str(by_units.formats["pressure"]) == "kbit7" and str(by_units.formats["velocity"]) == "kbit1"
    weighted = explore.plan(fields, 4.5, formats=formats, weights={"velo*": 1000})
    assert weighted.formats["velocity"].bits > weighted.formats["pressure"].bits
    assert weighted.weights == {"velocity": 1000.0}


def test_a_constant_tensor_is_kept_exact():
    constant = np.full((16, 16), 3.7, np.float32)
    fields = {"velocity": VELOCITY, "constant": constant, "zero": np.zeros((16, 16), np.float32)}
    plan = explore.plan(fields, 7, formats=["kbit2", "kbit4"])
    assert "constant" not in plan.formats and str(plan.formats["zero"]) == "kbit2"
    assert plan.config()["kept"] == ["constant"] and sum(row["nbytes_after"] for row in plan.rows[1:2]) == 4 * 256
    assert math.isfinite(plan.loss) and plan.gap == 0
    free = explore.plan(fields, 7, formats=["kbit2", "kbit4", "ternary"])
    assert np.array_equal(kb.quantize(constant, free.formats["constant"]).dequantize(), constant)
    with pytest.raises(FormatError, match="the smallest choice takes 3"):
        explore.plan(fields, 3, formats=["kbit2", "kbit4"])


def test_fitted_codebooks_go_through_a_plan(tmp_path):
    fields = {"image": IMAGE, "velocity": VELOCITY}
    plan = explore.plan(fields, 4.3)
    without = explore.plan(fields, 4.3, formats=explore.default_formats(VELOCITY.shape))
    assert plan.bits_per_element <= 4.3 and plan.loss < 0.2 * without.loss
    format, given = plan.formats["image"]
    assert given["codebook"].dtype == np.float32
    source, path, small = (tmp_path / name for name in ("m.safetensors", "plan.json", "small.safetensors"))
    kb.io.save(source, fields)
    path.write_text(json.dumps(plan.config(), allow_nan=False))
    assert (
        json.loads(path.read_text())["version"] == 2
        and explore.plan(fields, 4.3, formats=["kbit4"]).config()["version"] == 1
    )
    kb.io.quantize_file(source, small, explore.read_plan(path))
    loaded = kb.io.load(small)["image"]
    assert loaded.format == format and loaded.to_bytes() == kb.quantize(IMAGE, plan.formats["image"]).to_bytes()
    (row,) = (row for row in plan.rows if row["tensor"] == "image")
    assert kb.metrics.sqnr_db(IMAGE, loaded.dequantize()) == pytest.approx(row["sqnr_db"])


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    kb.io.save(path, {"image": IMAGE, "velocity": VELOCITY, "bias": np.ones(64, np.float32)})
    return path


def test_compare_names_the_best_format(model, capsys):
    assert main(["compare", str(model), "--best", "4.25", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tensor", "format", "bits", "SQNR", "dB", "centered", "max", "err"]
    found = explore.best(IMAGE, bits=4.25)
    assert lines[1].split()[:5] == ["image", "kbit4:codebook=custom", "(codebook", "fitted)", "4.25"]
    assert lines[1].split()[5] == f"{found.row['sqnr_db']:.2f}"
    text = " ".join(" ".join(lines).split())
    assert "best within 4.25 bits per element, of 2 tensors: kbit4:codebook=custom (codebook fitted) for 1" in text
    assert f"kbit plan {model} --bits 4.25 -o plan.json" in text


def test_compare_best_json(model, capsys):
    assert main(["compare", str(model), "--best", "8.6", "--formats", "kbit4,int8", "--json", "--device", "cpu"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bits"] == 8.6 and document["source"] == str(model)
    assert [(row["tensor"], row["format"]) for row in document["best"]] == [("image", "int8"), ("velocity", "int8")]
    assert document["total"]["bits_per_element"] == pytest.approx(8, abs=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--best", "0.5"], "tensor 'image': bits is 0.5; the smallest format"),
        (["--best", "4", "--wide"], "--wide shows every format, and --best one for each tensor"),
        (["--best", "4", "--option", "block=32"], "--option is one of --formats"),
    ],
)
def test_a_best_that_is_refused(model, capsys, words, message):
    assert main(["compare", str(model), *words, "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err


def test_plan_takes_weights_and_absolute_errors(tmp_path, capsys, model):
    path = tmp_path / "plan.json"
    words = ["plan", str(model), "--bits", "4.4", "--formats", "kbit2,kbit4,kbit6,kbit8", "-o", str(path), "--force"]
    for more, objective in ((["--weight", "velo*=1e6"], "relative"), (["--absolute"], "absolute")):
        assert main([*words, *more]) == 0
        stored = json.loads(path.read_text())
        assert stored["objective"] == objective
        assert stored.get("weights", {}) == ({"velocity": 1e6} if objective == "relative" else {})
        shown = capsys.readouterr().out
        assert shown.splitlines()[-1].endswith("squared error" if objective == "absolute" else "error over variance")
    for wrong in ("velo*", "velo*=x", "velo*=-1", "velo*=nan"):
        with pytest.raises(SystemExit) as stop:
            main([*words, "--weight", wrong])
        assert stop.value.code == 2
    assert main([*words, "--weight", "nobody=1"]) == 1
    assert "weights names 'nobody', which matches no tensor" in capsys.readouterr().err
