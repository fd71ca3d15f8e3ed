"""Routes: which one a product takes, what explain says of it, activations, and what is compiled beforehand."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from inputs import BFLOAT16

import kbitcupy as kb
from kbitcupy.errors import DeviceError, FormatError
from kbitcupy.products import functions, int8, integer_batch, integer_stream, integer_tile, small_batch
from kbitcupy.products.functions import GROUPED, LINEAR, plan
from kbitcupy.products.hopper import cut_tile, tile_kernel
from kbitcupy.products.integer_batch import IntegerBatch
from kbitcupy.products.integer_tile import IntegerTile
from kbitcupy.products.integer_units import IntegerUnits, SpreadUnits, share_of, stages_of
from kbitcupy.products.routes import Device, Explanation, Problem, Stored, choices, stored
from kbitcupy.products.staged import StagedStream

HALF, SINGLE = np.dtype("float16"), np.dtype("float32")
FROZEN = json.loads((Path(__file__).parent.parent / "data" / "routes.json").read_text(encoding="utf-8"))
LETTERS = {"1": "single_token", "s": "small_batch", "h": "hopper", "d": "decoded"}
# The routes that version 0.1 had.
OLD = [route for route in LINEAR if route.name in LETTERS.values()]


def new(format):
    """Whether the kernels for few tokens have learned to decode a format since then."""
    fragments = kb.get_format(format).fragments()
    return fragments is not None and (not fragments.entries or fragments.in_two_parts)


def device(name):
    capability, multiprocessors, shared_memory = FROZEN["devices"][name]
    return Device(0, capability, multiprocessors, shared_memory, True, capability >= 90)


def numbers(*shape, dtype=HALF, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def weight(*shape, format="kbit4", seed=1):
    return kb.quantize(numbers(*shape, dtype=SINGLE, seed=seed), format)


# ---- the choices of version 0.1 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROZEN["devices"])
def test_choices_are_those_of_version_0_1(name):
    """Its rules have become costs; `tests/data/routes.json` is what the rules chose."""
    letter_of = {route: letter for letter, route in LETTERS.items()}
    for text, letters in FROZEN["choices"][name].items():
        format, _, dtype = text.partition(" ")
        if new(format):
            continue
        fixed = kb.get_format(format), np.dtype(dtype or "float16"), device(name)
        for shape, letter in zip(FROZEN["shapes"], letters, strict=True):
            found = ""
            for tokens in FROZEN["tokens"]:
                problem = Problem(fixed[0], tuple(shape), tokens, *fixed[1:])
                found += letter_of[choices(problem, OLD)[0].route.name]
            wanted = FROZEN["patterns"][letter]
            if shape == [100, 1376] and wanted.startswith("dddddddd"):
                # Rows of half blocks: 0.1 took linear_tile from 9 tokens on, and decoded for fewer for no reason.
                found = found.replace("h" * 8, "d" * 8, 1)
            assert found == wanted, (name, text, shape)


@pytest.mark.parametrize("name", FROZEN["devices"])
def test_the_simple_product_takes_nothing_from_faster_kernels(name):
    """What is multiplied by fragments stays so; where it decoded, the simple product may be the cheaper one."""
    for text, letters in FROZEN["choices"][name].items():
        if " " in text or new(text):
            continue
        format, gpu = kb.get_format(text), device(name)
        for shape, letter in list(zip(FROZEN["shapes"], letters, strict=True))[::3]:
            for tokens, wanted in list(zip(FROZEN["tokens"], FROZEN["patterns"][letter], strict=True))[::2]:
                if wanted == "d":
                    continue
                problem = Problem(format, tuple(shape), tokens, HALF, gpu)
                assert choices(problem, LINEAR)[0].route.name == LETTERS[wanted], (text, shape, tokens)


@pytest.mark.parametrize("name", FROZEN["devices"])
def test_choices_of_experts_are_those_of_version_0_1(name):
    """... of 128 experts, of which so many may be chosen; the first letter of the name of the kernel."""
    letters = {"grouped_hopper": "h", "grouped_small_batch": "s", "each_expert": "d"}
    frozen = FROZEN["grouped"]
    for text, wanted in frozen["choices"][name].items():
        if new(text):
            continue
        found = ""
        for shape in frozen["shapes"]:
            for chosen in frozen["chosen"]:
                problem = Problem(kb.get_format(text), tuple(shape), chosen, HALF, device(name), experts=128)
                found += letters[choices(problem, GROUPED)[0].route.name]
        assert found == wanted, (name, text)


def test_kernels_and_grids_are_those_of_version_0_1():
    """On an H200: template arguments, threads, shared memory, grid, and how the work is cut."""
    gpu = device("H200")
    for text, n, k, tokens, expression, threads, shared, grid, cut in FROZEN["kernels"]:
        assert not new(text)
        problem = Problem(kb.get_format(text), (n, k), tokens, HALF, gpu)
        kernel = choices(problem, OLD)[0].route.prepare(problem)
        name, _, layout = kernel.kernel.expression.rpartition(", ")
        found = kernel.kernel.expression.split(", Layout")[0].split(", TileLayout")[0]
        assert "Layout" in kernel.kernel.expression and layout and name
        assert (found, kernel.kernel.threads, kernel.kernel.shared) == (expression, threads, shared)
        if found.startswith("linear_few"):
            assert [-(-tokens // kernel.tokens), *kernel.grid] == grid and kernel._cut.hex() == cut
        elif found.startswith("linear_one"):
            assert [kernel.blocks] == grid
        else:
            tile = cut_tile(n, k, tokens, 132)
            assert tile_kernel(problem.fragments, (n, k), HALF, gpu, tile) is kernel
            assert [kernel._tiles * tile.splits, -(-tokens // tile.tokens)] == grid


# ---- what routes refuse ----------------------------------------------------------------------------------------------


def refusals(routes=LINEAR, **changes):
    given = {"format": kb.get_format("kbit4"), "shape": (4096, 4096), "tokens": 4, "dtype": HALF}
    problem = Problem(**{**given, "device": device("H200"), **changes})
    return {choice.route.name: choice.refusal for choice in choices(problem, routes)}


@pytest.mark.parametrize(
    ("changes", "route", "text"),
    [
        ({"tokens": 33}, "small_batch", "more than 32 tokens"),
        ({"tokens": 17, "format": kb.get_format("kbit5:absmax=float32")}, "small_batch", "more than 16 tokens"),
        ({"tokens": 2}, "single_token", "one token, and these are 2"),
        ({"tokens": 129}, "hopper", "more than 128 tokens"),
        ({"format": kb.get_format("kbit1")}, "small_batch", "kbit1 has no decoder to fragments"),
        ({"dtype": SINGLE}, "hopper", "x is float32"),
        ({"device": device("A100")}, "hopper", "compute capability 9.0"),
        ({"device": device("T4")}, "small_batch", "compute capability 8.0"),
        ({"device": None}, "decoded", "host memory"),
        ({"aligned": False}, "hopper", "x does not start at a multiple of 16"),
        ({"stored": Stored(codes=8)}, "small_batch", "planes do not start at multiples of 16 and"),
        ({"stored": Stored(codes=8)}, "hopper", "plane of codes does not start"),
        ({"stored": Stored(members=4096, lead=1)}, "small_batch", "a stack is for linear_grouped"),
        ({"shape": (4096, 4080)}, "small_batch", "not whole blocks of 32"),
        ({"shape": (64, 1 << 20), "tokens": 1}, "single_token", "do not fit the shared memory"),
        ({"shape": (4097, 4096), "tokens": 1}, "single_token", "not whole tiles of 16"),
        ({"shape": (1 << 17, 1 << 16)}, "small_batch", "offsets of 32 bits"),
        ({"format": kb.get_format("nf4:block=16")}, "hopper", "no decoder for blocks of 16"),
        ({"format": kb.get_format("nf4:double_quant=true"), "tokens": 1}, "single_token", "scales as they are stored"),
        ({"activations": "int8"}, "decoded", "it multiplies floats as they came"),
        ({"activations": "int8"}, "int8", "a symmetric int8 with a scale for each row"),
        ({}, "int8", 'ask for activations="int8"'),
        ({"experts": 4}, "small_batch", "it is for one weight"),
        ({}, "records", "kbit4 has no decoder of records"),
        ({"format": kb.get_format("q5_k"), "shape": (64, 512), "tokens": 65}, "records", "more than 64 tokens"),
        ({"format": kb.get_format("q5_0"), "shape": (64, 288)}, "records", "not whole records of 256"),
        ({"format": kb.get_format("q6_k"), "dtype": SINGLE}, "records", "x is float32"),
        ({"format": kb.get_format("q6_k"), "device": device("T4")}, "records", "compute capability 8.0"),
        ({"format": kb.get_format("q6_k"), "stored": Stored(whole=False)}, "records", "where they can be copied from"),
        ({"format": kb.get_format("q6_k"), "aligned": False}, "records", "x does not start at a multiple of 16"),
    ],
)
def test_refusals(changes, route, text):
    assert text in refusals(**changes)[route]


@pytest.mark.parametrize(
    ("changes", "route", "text"),
    [
        ({}, "grouped_small_batch", "it is for experts"),
        ({"experts": 12001}, "grouped_small_batch", "more than 12000 experts"),
        ({"experts": 8, "stored": Stored(members=16, lead=2)}, "grouped_hopper", "16 arrays with planes of their own"),
        ({"experts": 8, "tokens": 1 << 31}, "grouped_small_batch", "numbers of 32 bits"),
    ],
)
def test_refusals_of_experts(changes, route, text):
    assert text in refusals(GROUPED, **changes)[route]


def test_every_problem_has_a_route():
    for name in kb.list_formats():
        format = kb.get_format(name)
        for gpu in (None, *map(device, FROZEN["devices"])):
            for dtype in (HALF, BFLOAT16, SINGLE, np.dtype("float64")):
                for tokens in (1, 7, 1000):
                    problem = Problem(format, (256, 512), tokens, dtype, gpu)
                    found = choices(problem, LINEAR)
                    assert found[0].refusal is None and 0 < found[0].cost < float("inf")
                    assert found[0].route.describe(problem) and callable(found[0].route.prepare(problem))


def test_a_plan_is_made_once():
    q = weight(48, 64)
    x = numbers(3, 64)
    kb.linear(x, q)
    before = plan.cache_info().misses
    for _ in range(3):
        kb.linear(x, q)
    assert plan.cache_info().misses == before


def test_many_numbers_of_tokens_share_a_plan():
    """What a server meets does not fill memory with plans; few tokens have plans, and kernels, of their own."""
    q = weight(48, 64)
    before = plan.cache_info().misses
    for tokens in range(257, 1025):
        kb.linear(np.ones((tokens, 64), HALF), q)
    assert plan.cache_info().misses - before <= 2
    before = plan.cache_info().misses
    for tokens in range(1, 100):
        kb.linear(np.ones((tokens, 64), HALF), q)
    assert plan.cache_info().misses - before >= 96


# ---- explain -------------------------------------------------------------------------------------------------------


def test_explain_says_what_every_route_says(xp):
    q, x = kb.quantize(xp.asarray(numbers(64, 256)), "kbit4"), xp.asarray(numbers(3, 256))
    found = kb.explain(x, q)
    assert isinstance(found, Explanation) and len(found) == len(LINEAR)
    assert [row.chosen for row in found] == [True] + [False] * (len(LINEAR) - 1)
    assert found.route == found[0].route and found[0].cost == min(row.cost for row in found if row.cost is not None)
    assert all(row.reason for row in found)
    text = str(found)
    assert text.startswith("3 tokens of float16, QuantizedArray(kbit4") and text == repr(found)
    assert f"> {found.route}" in text and all(row.reason in text for row in found)
    if xp is np:
        assert found.route == "numpy" and {row.route: row.reason for row in found}["decoded"].endswith("host memory")
    else:
        assert found.route in ("small_batch", "generic", "hopper") and "tokens 1: " in text


def test_explain_computes_nothing(xp, monkeypatch):
    for route in {type(route) for route in (*LINEAR, *GROUPED)}:
        monkeypatch.setattr(route, "prepare", lambda self, problem: pytest.fail("it computes"))
    q = kb.quantize(xp.asarray(numbers(4, 16, 64)), "kbit4")
    assert kb.explain(xp.asarray(numbers(3, 64)), q, expert_ids=[[0, 1]] * 3).route.startswith(("each", "grouped"))
    assert kb.explain(xp.asarray(numbers(3, 64)), q[0]).route


@pytest.mark.parametrize("tokens", [1, 3, 256, 257, 300, 513])
def test_explain_asks_what_the_product_asks(monkeypatch, tokens):
    """Many numbers of tokens share a plan."""
    counts, made = [], functions.plan
    monkeypatch.setattr(functions, "explained", lambda heading, problem, *rest: problem.tokens)
    monkeypatch.setattr(functions, "plan", lambda *facts: counts.append(facts[3]) or made(*facts))
    x, q = numbers(tokens, 64), weight(16, 64)
    kb.linear(x, q)
    assert kb.explain(x, q) == counts[-1]
    ids, experts = np.zeros((tokens, 2), int), kb.stack([q] * 5)
    kb.linear_grouped(x, experts, ids)
    assert kb.explain(x, experts, expert_ids=ids) == counts[-1]


def test_explain_of_experts(xp):
    q = kb.quantize(xp.asarray(numbers(4, 16, 64)), "kbit4")
    found = kb.explain(xp.asarray(numbers(3, 64)), q, expert_ids=[[0, 1]] * 3)
    assert len(found) == len(GROUPED) and "6 products of float16 with experts" in str(found)
    assert found.route == "each_expert" if xp is np else found.route == "grouped_small_batch"


def test_experts_whose_axis_one_of_them_does_not_have():
    """A channel may be an expert: each of them alone has no such axis, and no scale of its own."""
    q = kb.quantize(numbers(4, 16, 64, dtype=SINGLE), "int8", granularity=("channel", -3))
    problem = Problem(q.format, (16, 64), 6, SINGLE, device("H200"), stored=stored(q), experts=4)
    (found,) = [choice for choice in choices(problem, GROUPED) if choice.refusal is None]
    assert found.route.name == "each_expert" and problem.reading > 0
    assert kb.linear_grouped(numbers(3, 64), q, [[0, 3]] * 3).shape == (3, 2, 16)


def test_explain_of_nothing():
    found = kb.explain(numbers(0, 64), weight(16, 64))
    assert len(found) == 0 and found.route == "" and "nothing to compute" in str(found)


def test_explanation_tells_from_how_many_tokens_on():
    shown = str(Explanation("h", (), [(1, "a"), (2, "b"), (9, "c"), (10, "d")]))
    assert shown.endswith("tokens 1: a, 2 to 8: b, 9: c, from 10: d")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, q: kb.explain(x, q.dequantize()), TypeError, "q is ndarray"),
        (lambda x, q: kb.explain(x[:, :8], q), ValueError, r"needs \[..., 64\]"),
        (lambda x, q: kb.explain(x, q, activations="int4"), FormatError, "activations is 'int4'"),
        (lambda x, q: kb.explain(x, q, expert_ids=[[0]]), FormatError, r"it must be \[E, N, K\]"),
        (lambda x, q: kb.explain(x, q, x[0], expert_ids=[[0]]), FormatError, "a bias goes with one weight"),
        (lambda x, q: kb.explain(x, q, activations="int3", expert_ids=[[0]]), FormatError, "activations is 'int3'"),
    ],
)
def test_explain_refuses_what_the_product_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call(numbers(3, 64), weight(16, 64))


# ---- activations ---------------------------------------------------------------------------------------------------

INT8 = "int8:granularity=channel:0"


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, SINGLE, np.dtype("float64")], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_int8_activations_are_w8a8(xp, dtype, biased, tokens):
    """`linear_w8a8` is their shorthand: the same bits."""
    q = kb.quantize(xp.asarray(numbers(48, 160)), INT8)
    x = xp.asarray(numbers(2, tokens, 160, dtype=dtype, seed=3))
    bias = xp.asarray(numbers(48, dtype=dtype, seed=4)) if biased else None
    wanted = kb.affine.linear_w8a8(x, q, bias)
    assert same(kb.linear(x, q, bias, activations="int8"), wanted)
    out = xp.empty(wanted.shape, dtype)
    assert kb.linear(x, q, bias, activations="int8", out=out) is out and same(out, wanted)
    codes = kb.quantize(x, "int8", granularity="token")
    for given in (None, "int8"):
        assert same(kb.linear(codes, q, bias, activations=given), kb.affine.linear_w8a8(codes, q, bias))
    assert kb.explain(x, q, activations="int8").route == ("int8_numpy" if xp is np else "int8")
    assert kb.explain(codes, q).route == ("int8_numpy" if xp is np else "int8")


def test_int8_activations_of_a_stack_and_of_nothing(xp):
    members = [kb.quantize(xp.asarray(numbers(160, seed=i)), "int8") for i in range(5)]
    q, x = kb.stack(members), xp.asarray(numbers(3, 160))
    assert same(kb.linear(x, q, activations="int8"), kb.affine.linear_w8a8(x, q))
    assert kb.linear(x[:0], q, activations="int8").shape == (0, 5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, q: kb.linear(x, q, activations="int4"), FormatError, "activations is 'int4'; allowed are None"),
        (lambda x, q: kb.linear(x, q, activations="bitnet"), FormatError, "it must be .* in ternary"),
        (lambda x, q: kb.linear(x, q, activations=8), FormatError, "activations is 8; .*'int8'"),
        (lambda x, q: kb.linear(x, weight(16, 64), activations="int8"), FormatError, "'kbit4'.*in int8, uint8"),
        (lambda x, q: kb.linear(x[:0], weight(16, 64), activations="int8"), FormatError, "'kbit4'.*in int8, uint8"),
        (
            lambda x, q: kb.linear(x, weight(16, 64, format="int8:granularity=channel:1"), activations="int8"),
            FormatError,
            "groups of a row or all",
        ),
        (lambda x, q: kb.linear(kb.quantize(x, "int8"), q, activations="q8_1"), FormatError, "leave activations away"),
        (lambda x, q: kb.linear(x, weight(4, 131072, format=INT8), activations="int8"), ValueError, "needs"),
        (lambda x, q: kb.linear(x[:, :5], q, activations="int8"), ValueError, r"needs \[..., 64\]"),
        (
            lambda x, q: kb.linear(kb.quantize(x, "kbit4"), q),
            TypeError,
            "x is QuantizedArray; it must be a plain array",
        ),
        (lambda x, q: kb.linear(kb.quantize(x, "kbit4"), q, activations="int8"), FormatError, "symmetric int8"),
        (lambda x, q: kb.linear(kb.quantize(x, "int8"), weight(16, 64)), FormatError, "'kbit4'.*in int8, uint8"),
        (lambda x, q: kb.linear(x, q, numbers(5), activations="int8"), ValueError, r"bias has shape \(5,\)"),
        (lambda x, q: kb.linear(x, q, activations="int8", out=np.empty((3, 16), "f4")), TypeError, "out is float32"),
    ],
)
def test_refusals_of_activations(call, error, message):
    with pytest.raises(error, match=message):
        call(numbers(3, 64), weight(16, 64, format=INT8))


def test_activations_of_another_device_are_refused(cupy):
    q = weight(16, 64, format=INT8)
    with pytest.raises(DeviceError, match="move one"):
        kb.linear(cupy.asarray(numbers(3, 64)), q, activations="int8")
    with pytest.raises(DeviceError, match="move one"):
        kb.linear(kb.quantize(cupy.asarray(numbers(3, 64)), "int8"), q)


# ---- what is compiled beforehand -----------------------------------------------------------------------------------


def test_precompile(xp):
    q = kb.quantize(xp.asarray(numbers(96, 512)), "kbit3:absmax=float16")
    found = kb.precompile(q, (1, 8, 32), dtype="bfloat16")
    assert found == 0 if xp is np else found > 0
    assert kb.precompile(q, (1, 8, 32), dtype="bfloat16") == 0
    for wrong in ((0,), (1.5,), (-1, 8)):
        with pytest.raises(ValueError, match="sequence of positive integers"):
            kb.precompile(q, wrong)
    with pytest.raises(TypeError, match="int32"):
        kb.precompile(q, dtype="int32")
    with pytest.raises(FormatError, match="activations is 'x'"):
        kb.precompile(q, activations="x")


def test_a_product_compiles_what_it_needs_and_no_more(cupy):
    """One kernel where weights are decoded in registers; a split of k adds the one that adds up the parts."""
    from kbitcupy.backend.compile import loaded

    for format, shape, tokens, most in (("kbit2", (4096, 4096), 1, 1), ("kbit2", (4096, 4096), 8, 1)):
        q = kb.quantize(cupy.asarray(numbers(*shape)), f"{format}:absmax=float32")
        before = set(loaded)
        kb.linear(cupy.asarray(numbers(tokens, shape[1])), q)
        assert len(set(loaded) - before) <= most, set(loaded) - before


def test_costs_know_no_device():
    """The table above is a model of an H200; a route is chosen by it wherever it accepts."""
    problem = Problem(kb.get_format("kbit4"), (4096, 4096), 8, HALF, device("A100"))
    costs = [choice.cost for choice in choices(problem, OLD) if choice.refusal is None]
    assert costs == sorted(costs) and small_batch.SmallBatch().cost(problem) == costs[0]


def test_rounded_scales_of_codebooks_are_said():
    """float16 holds E4M4 and halves; more than 32 values and their scales are kept in two parts."""
    gpu = Device(0, 90, 132, 232448, True, True)
    for spec, dtype, rounded in (
        ("kbit4", HALF, False),
        ("kbit4:absmax=float16", HALF, False),
        ("kbit4:absmax=float16", BFLOAT16, True),
        ("kbit4:absmax=float32", HALF, True),
        ("kbit8:absmax=float32", HALF, False),
        ("nf4", HALF, False),
        ("q4_k", BFLOAT16, False),
    ):
        problem = Problem(kb.get_format(spec), (4096, 4096), 8, dtype, gpu)
        assert ("scales rounded to" in small_batch.SmallBatch().describe(problem)) == rounded, spec


@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 64), ("group", 40)], ids=str)
def test_routes_of_ternary_weights(granularity, monkeypatch):
    """Every route says what it costs, or why not; with few tokens codes are read in place."""
    format = kb.get_format("ternary", granularity=granularity)
    gpu = Device(0, 90, 132, 232448, True, True)
    monkeypatch.setattr(int8, "_multiprocessors", lambda ordinal: gpu.multiprocessors)
    for activations, tokens in itertools.product((None, "int8", "bitnet"), (1, 16, 32, 33, 500)):
        problem = Problem(format, (4096, 5120), tokens, np.dtype("float16"), gpu, activations=activations)
        best = choices(problem, LINEAR)[0]
        assert best.refusal is None and best.cost > 0 and best.route.describe(problem)
        grouped, in_place = granularity[0] == "group", tokens <= 32
        if activations is not None:
            streams = granularity == ("group", 64) or (not grouped and in_place)
            assert best.route.name == ("ternary_stream" if streams else "ternary" if grouped else "ternary_tile")
            older = replace(problem, device=replace(gpu, capability=89))
            assert choices(older, LINEAR)[0].route.name == ("ternary_stream" if streams else "ternary")
        elif not grouped and tokens <= 16:
            assert best.route.name == "ternary_floats"


@pytest.mark.parametrize("activations", ["int8", "bitnet"])
@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 32)], ids=str)
def test_ternary_weights_have_one_contract_whatever_their_size(granularity, activations):
    format = kb.get_format("ternary", granularity=granularity)
    for name in (None, "H200"):
        for shape in ((16, 64), (28672, 8192)):
            on = device(name) if name else None
            problem = Problem(format, shape, 3, SINGLE, on, activations=activations)
            taken = [route.name for route in LINEAR if route.accepts(problem) is None]
            assert taken and all(route.startswith("ternary") for route in taken), taken


@pytest.mark.parametrize(
    ("format", "activations", "taken"),
    [
        ("q4_1", None, ("small_batch", "small_batch")),
        ("iq4_xs", None, ("small_batch", "small_batch")),
        ("nvfp4", None, ("small_batch", "small_batch")),
        ("q6_k", None, ("records", "records")),
        ("q4_1", "q8_1", ("staged_columns", *("staged_stream",) * 3)),
        *((name, "q8_1", ("staged_stream",) * 4) for name in ("iq4_nl", "mxfp4", "iq4_xs")),
        ("nvfp4", "q8_1", ("staged_columns", *("staged_small_batch",) * 3)),
        ("q6_k", "q8_1", ("staged_records",) * 4),
    ],
)
def test_few_tokens_of_gguf_types(format, activations, taken):
    """Fragments where there are any, those of one quantized token, too; codes in place or integers of records where
    more of them make these slower.
    """
    for tokens, name in zip((1, 8, 16, 4), taken, strict=False):
        problem = Problem(kb.get_format(format), (28672, 8192), tokens, HALF, device("H200"), activations=activations)
        assert choices(problem, LINEAR)[0].route.name == name


def test_two_tokens_in_two_halves():
    """That is as fast as floats; from three on their integers, scaled after they are added up, are faster."""
    for shape in ((28672, 8192), (8192, 8192)):
        for tokens, taken in ((2, "staged_halves"), (3, "staged_small_batch")):
            problem = Problem(kb.get_format("nvfp4"), shape, tokens, HALF, device("H200"), activations="q8_1")
            assert choices(problem, LINEAR)[0].route.name == taken


def test_one_quantized_token_of_less_rows():
    """Columns begin earlier, codes in place pass faster."""
    taken = {"q4_1": "columns", "iq4_nl": "columns", "mxfp4": "columns", "nvfp4": "columns", "iq4_xs": "stream"}
    for name, way in taken.items():
        problem = Problem(kb.get_format(name), (8192, 8192), 1, HALF, device("H200"), activations="q8_1")
        assert choices(problem, LINEAR)[0].route.name == f"staged_{way}"


def test_experts_of_integers_have_small_groups():
    """One group of eight tokens an expert is for linear_few; where most have several, a tile decodes once for all."""
    for format in ("q4_0", "q4_k"):
        for products, taken in ((64, "grouped_small_batch"), (512, "grouped_small_batch"), (4096, "grouped_hopper")):
            problem = Problem(kb.get_format(format), (768, 2048), products, HALF, device("H200"), experts=128)
            assert choices(problem, GROUPED)[0].route.name == taken


@pytest.mark.parametrize("format", ["iq4_xs", "q4_1"])
def test_few_tokens_keep_scales_as_they_are(format):
    for tokens in (1, 8, 9):
        problem = Problem(kb.get_format(format), (5, 512), tokens, HALF, device("H200"))
        tile = next(choice for choice in choices(problem, LINEAR) if choice.route.name == "hopper")
        assert (tile.refusal is None) == (tokens > 8)


@pytest.mark.parametrize(
    ("format", "activations", "streamed"),
    [
        ("int4:block=64,zero=float", "int8", True),
        ("uint8:block=64,zero=float", "q8_1", True),
        ("int4:granularity=channel:0,zero=float", "q8_1", True),
        ("int4:block=256", "int8", True),
        ("int4:block=384", "int8", False),
        ("int4:granularity=channel:0,zero=float", "int8", True),
        ("uint4:block=64,zero=float", "int8", True),
        ("int4:block=64", "int8", True),
        ("int4:block=256", "q8_1", True),
    ],
)
def test_integers_are_streamed_where_sums_stay_exact(format, activations, streamed):
    """Not where a group's sum would be rounded in parts, or an offset together with what turns signed codes over."""
    problem = Problem(kb.get_format(format), (512, 1024), 4, HALF, device("H200"), activations=activations)
    route = next(route for route in LINEAR if route.name == "integer_stream")
    assert (route.accepts(problem) is None) == streamed


@pytest.mark.parametrize("preset", ["int8", "q8_1"])
def test_routes_of_integer_codes_on_hopper(preset, monkeypatch):
    """Many tokens take tiles where codes can be decoded in registers, or cuBLAS; what stands against it is said."""
    gpu = Device(0, 90, 132, 232448, True, True)
    monkeypatch.setattr(int8, "_multiprocessors", lambda ordinal: gpu.multiprocessors)
    taken = "int4:block=32", "uint4:block=128,zero=int", "uint4:granularity=channel:0,zero=int", "q4_0", "q8_0"
    against = {
        "uint8:block=128,zero=int": "zero points of 4 bits",
        "uint4:block=128,zero=float": "zero points of 4 bits",
        "int4:block=96": "groups are of 96",
        "q4_k": "codes with scales",
        "ternary": "a route of their own",
    }
    for text in (*taken, *against):
        format = kb.get_format(text)
        for tokens in (64, 4096):
            problem = Problem(format, (28672, 4608), tokens, np.dtype("float16"), gpu, activations=preset)
            found = {choice.route.name: choice for choice in choices(problem, LINEAR)}["integer_tile"]
            if text in against:
                assert against[text] in found.refusal
                continue
            assert found.refusal is None and "wgmma_integers" in found.route.describe(problem)
            best = choices(problem, LINEAR)[0]
            if tokens == 4096 and (preset == "q8_1" or text in ("int4:block=32", "q4_0", "q8_0")):
                assert best.route.name == "integer_decoded" and "cuBLAS" in best.route.describe(problem)
            elif tokens > integer_batch.MOST_TOKENS:
                assert best == found
            older = replace(problem, device=replace(gpu, capability=89))
            assert "compute capability 9.0" in IntegerTile().accepts(older)
    for text in ("q4_k", "uint4:block=128,zero=float"):
        problem = Problem(kb.get_format(text), (4096, 4608), 64, np.dtype("float16"), gpu, activations=preset)
        few = text == "q4_k" and preset == "q8_1"
        assert choices(problem, LINEAR)[0].route.name == ("integer_batch" if few else "integer_turns")
    short = Problem(kb.get_format("int4:block=32"), (64, 200), 64, np.dtype("float16"), gpu, activations=preset)
    assert "multiples of 16 bytes" in IntegerTile().accepts(short)


def test_many_tokens_are_decoded_where_few_elements_share_scales():
    """Units of 32, of float16 and bfloat16; int8 that has not come in host memory, and of one weight."""
    gpu = device("H200")
    route = next(route for route in LINEAR if route.name == "integer_decoded")
    problem = Problem(kb.get_format("q4_0"), (8192, 8192), 2048, HALF, gpu, activations="q8_1")
    assert route.accepts(problem) is None
    assert route.accepts(replace(problem, dtype=BFLOAT16, device=replace(gpu, capability=80))) is None
    for changed, why in (
        ({"dtype": SINGLE}, "float16 and bfloat16"),
        ({"device": None}, "host memory"),
        ({"experts": 4}, "one weight"),
        ({"activations": None}, "activations that are int8"),
        ({"shape": (8192, 32)}, "32 elements share all scales"),
        ({"format": kb.get_format("uint4:block=64"), "activations": "int8"}, "64 elements share all scales"),
    ):
        assert why in route.accepts(replace(problem, **changed))


@pytest.mark.parametrize("preset", ["int8", "q8_1"])
def test_some_tokens_of_codes_in_short_groups(preset):
    """Up to 64 tokens have a kernel whose sums become float32 for little; what stands against it is said."""
    gpu = Device(0, 90, 132, 232448, True, True)
    against = dict.fromkeys(("int8:block=32", "int4:block=32", "uint4:block=32,zero=int"), "q4_0")
    if preset == "int8":
        against["q4_k"] = 'activations="q8_1"'
    for text in ("q4_0", *(("q4_k",) if preset == "q8_1" else ()), *against):
        for shape, tokens in itertools.product(((28672, 8448), (4096, 4352)), (48, 64, 65)):
            problem = Problem(kb.get_format(text), shape, tokens, HALF, gpu, activations=preset)
            found = {choice.route.name: choice for choice in choices(problem, LINEAR)}["integer_batch"]
            if text in against:
                assert against[text] in found.refusal
            elif tokens > integer_batch.MOST_TOKENS:
                assert "up to 64 tokens" in found.refusal
            else:
                assert choices(problem, LINEAR)[0] == found and "batch_integers" in found.route.describe(problem)
                older = replace(problem, device=replace(gpu, capability=80))
                assert "compute capability 9.0" in found.route.accepts(older)
    problem = Problem(kb.get_format("q4_0"), (512, 288), 64, HALF, gpu, activations=preset)
    assert "K must be a multiple" in IntegerBatch().accepts(problem)


def test_some_tokens_of_codes_with_inner_scales():
    """33 to 64 tokens of "q8_1" with q4_k; what stands against it is said."""
    gpu, route = Device(0, 90, 132, 232448, True, True), IntegerBatch()
    problem = Problem(kb.get_format("q4_k"), (28672, 8192), 64, HALF, gpu, activations="q8_1")
    for shape in ((28672, 8448), (4096, 14592), (4096, 4352)):
        best = choices(replace(problem, shape=shape), LINEAR)[0].route
        assert best.name == route.name and "batch_integers" in best.describe(replace(problem, shape=shape))
    for changed, why in (
        ({"activations": "int8"}, 'activations="q8_1"'),
        ({"activations": None}, "activations that are int8"),
        ({"tokens": 65}, "up to 64 tokens"),
        ({"tokens": 32}, "33 to 64 tokens"),
        ({"experts": 4}, "one weight"),
        ({"device": None}, "host memory"),
        ({"device": replace(gpu, capability=80)}, "compute capability 9.0"),
        ({"stored": Stored(scales=8)}, "multiples of 16 bytes"),
        ({"shape": (1 << 31, 256)}, "numbers of 32 bits"),
    ):
        assert why in route.accepts(replace(problem, **changed))


@pytest.mark.parametrize("text", ["q4_0", "q4_k"])
def test_some_tokens_of_weights_whose_rows_keep_a_device_busy_once(text):
    """Two thread blocks share 128 rows; what stands against it is said."""
    gpu, route = Device(0, 90, 132, 232448, True, True), IntegerUnits()
    problem = Problem(kb.get_format(text), (8192, 8192), 64, HALF, gpu, activations="q8_1")
    for shape in (8192, 8192), (8448, 28672), (8192, 2048):
        assert choices(replace(problem, shape=shape), LINEAR)[0].route.name == route.name
    assert "multiply_units" in route.describe(problem)
    for changed, why in (
        ({"activations": "int8"}, 'activations="q8_1"'),
        ({"format": kb.get_format("q8_0")}, "q4_0 and q4_k"),
        ({"tokens": 16}, "17 to 64 tokens"),
        ({"tokens": 65}, "17 to 64 tokens"),
        ({"shape": (8192, 288)}, "K must be a multiple" if text == "q4_0" else ""),
        ({"shape": (8192, 8448)}, "a multiple of 2048" if text == "q4_k" else ""),
        ({"shape": (4096, 8192)}, "64 thread blocks do not keep 132"),
        ({"shape": (8576, 8192)}, "134 thread blocks do not keep 132"),
        ({"shape": (8192, 1 << 24)}, "numbers of 32 bits"),
        ({"device": None}, "host memory"),
        ({"device": replace(gpu, capability=80)}, "compute capability 9.0"),
        ({"stored": Stored(scales=8)}, "multiples of 16 bytes"),
    ):
        if why:
            assert why in route.accepts(replace(problem, **changed))


@pytest.mark.parametrize("text", ["q4_0", "q4_k"])
def test_some_tokens_of_weights_whose_stages_are_shared_out(text):
    """Other numbers of rows: all thread blocks have as many stages; what stands against it is said."""
    gpu, route = Device(0, 90, 132, 232448, True, True), SpreadUnits()
    problem = Problem(kb.get_format(text), (28672, 8192), 64, HALF, gpu, activations="q8_1")
    for shape in (28672, 8192), (10240, 8192), (4096, 14336), (2048, 8192), (128256, 4096):
        best = choices(replace(problem, shape=shape), LINEAR)[0].route
        assert best.name == route.name and "spread_units" in best.describe(replace(problem, shape=shape))
    least = 1024 if text == "q4_k" else 512
    for changed, why in (
        ({"activations": "int8"}, 'activations="q8_1"'),
        ({"format": kb.get_format("q8_0")}, "q4_0 and q4_k"),
        ({"tokens": 16 if text == "q4_k" else 32}, "to 1024 tokens"),
        ({"tokens": 1025}, "to 1024 tokens"),
        ({"shape": (28672, 8448)}, f"K must be a multiple of {least}"),
        ({"shape": (1 << 24, 1 << 23)}, "more thread blocks or stages than it can count"),
        ({"shape": (8192, 1 << 24)}, "numbers of 32 bits"),
        ({"device": replace(gpu, capability=80)}, "compute capability 9.0"),
    ):
        assert why in route.accepts(replace(problem, **changed))


@pytest.mark.parametrize("inner", [False, True])
def test_shares_of_stages(inner):
    """No thread block without one, no stage left, a whole number of what a thread block has together."""
    together = 4 if inner else 2
    shapes = (1, 129, 4096, 28672), (1024, 9216), (17, 64, 65, 500), (1, 78, 132)
    for rows, depth, tokens, processors in itertools.product(*shapes):
        stages, share = stages_of((rows, depth), tokens), share_of((rows, depth), tokens, inner, processors)
        blocks = -(-stages // share)
        assert share % together == 0 and (blocks - 1) * share < stages <= blocks * share and blocks <= processors
    assert share_of((28672, 8192), 64, inner, 132) == 56


def test_cuts_of_integer_batches():
    """A ring holds more stages than there are parts of k; sums of all parts find room where it was."""
    assert integer_batch.choose(28672, 132).tiles == 14
    assert integer_batch.choose(8192, 132).tiles == 4
    kinds = (False, False), (True, False), (True, True)
    for (blocked, inner), cut in itertools.product(kinds, integer_batch.CUTS.values()):
        packed, size = cut.packed(blocked, inner)
        stages, parts = np.frombuffer(packed, integer_batch.CUT.dtype)["stages"][0], 8 // cut.row_groups
        assert (inner or stages % parts == 0 or stages >= parts + 2) and stages > parts
        # A warp with one tile loads the codes of the one behind it as well: those of the last stage are still inside.
        of_stages = np.frombuffer(packed, integer_batch.CUT.dtype)["stage_bytes"][0]
        end = 256 * 64 + (5120 if inner else 2048 * blocked) + (16 * cut.tiles + 16) * 128
        assert end <= of_stages and stages * of_stages + 1024 <= size
        assert size + 1024 <= 227 << 10
        assert cut.row_groups * (cut.most - 1) <= cut.tiles <= cut.row_groups * cut.most


def test_cuts_of_integer_tiles():
    """Rows are shared out where there are many, k where there are few; parts of k have a stage each."""
    codes = integer_tile.Codes(4, 128)
    assert integer_tile.choose(64, 28672, 8192, codes, 132) == integer_tile.PAIRS
    assert integer_tile.choose(64, 28672, 8192, replace(codes, group=256), 132) == integer_tile.CUTS[0]
    assert integer_tile.choose(128, 28672, 8192, codes, 132) == integer_tile.CUTS[2]
    assert integer_tile.choose(64, 8192, 8192, codes, 132).k_groups == 4
    assert integer_tile.choose(64, 8192, 384, codes, 132).k_groups == 1
    assert integer_tile.choose(2048, 28672, 8192, integer_tile.Codes(4), 132).tokens == 256
    assert integer_tile.choose(2048, 28672, 8192, codes, 132).tokens == 256
    wide = integer_tile.CUTS[-1]  # 448 tiles of 132 multiprocessors: three each, and the rest as halves
    assert wide.waves(512, 28672, codes, 132) == 3.5 and wide.waves(512, 28672, integer_tile.Codes(4), 132) == 4
    # Clusters multiply those together, some stages each; not where parts would be short or take as long.
    assert [wide.part_stages(tokens, 28672, 8192, codes, 132) for tokens in (512, 2048)] == [26, 37]
    assert wide.part_stages(512, 28672, 8192, integer_tile.Codes(4), 132) == 26
    assert wide.part_stages(256, 16896, 8192, codes, 132) == wide.part_stages(256, 5000, 1024, codes, 132) == 0
    assert wide.part_stages(512, 28672, 8192, integer_tile.Codes(4, 64), 132) == 0
    for codes in (integer_tile.Codes(2), integer_tile.Codes(4, 128), integer_tile.Codes(4, 32, each=True)):
        for cut in integer_tile.cuts(codes.bits, codes.unit, codes.each):
            kind = codes.bits, codes.unit, codes.each
            assert cut.stages(*kind) >= 2 * cut.k_groups and cut.shared(*kind) <= 227 << 10
            assert cut.stages(*kind) % cut.k_groups == 0


@pytest.mark.parametrize("activations", ["int8", "q8_1"])
@pytest.mark.parametrize("format", ["int4:block=32", "uint4:block=64,zero=int", "uint4:granularity=channel:0", "q4_0"])
def test_short_rows_of_integer_codes_have_a_plan(format, activations):
    for depth, tokens in itertools.product((64, 128, 256), (1, 16, 64, 600)):
        problem = Problem(kb.get_format(format), (48, depth), tokens, HALF, device("H200"), activations=activations)
        costs = [route.cost(problem) for route in LINEAR if route.accepts(problem) is None]
        assert min(costs) > 0


def test_integers_are_streamed_by_tensor_maps_where_there_is_tma():
    problem = Problem(kb.get_format("q4_0"), (512, 1024), 4, HALF, device("H200"), activations="q8_1")
    route = next(route for route in LINEAR if route.name == "integer_stream")
    without = replace(problem, device=replace(problem.device, tensor_maps=False))
    assert route.accepts(problem) is None and "tensor maps" in route.accepts(without)


#: Which way was the fastest on an H200 where two of them take about as long.
MEASURED = [
    ("q4_0", (28672, 8192), "s" * 4 + "h" * 3),
    ("q4_1", (28672, 8192), "s" * 4 + "h" * 3),
    ("q4_1", (8192, 8192), "s" + "h" * 6),
    ("q4_1", (4096, 4096), "s" + "h" * 3),
    ("q4_k", (28672, 8192), "s" * 4 + "h" * 3),
    ("q4_k", (8192, 8192), "s" * 7),
    ("q4_k", (14336, 4096), "s" * 7),
    ("iq4_nl", (28672, 8192), "s" * 4 + "h" * 3),
    ("iq4_nl", (8192, 8192), "s" + "h" * 6),
    ("iq4_xs", (28672, 8192), "s" * 4 + "h" * 3),
    ("iq4_xs", (8192, 8192), "s" + "h" * 6),
    ("iq4_xs", (14336, 4096), "s" + "h" * 6),
    ("mxfp4", (8192, 8192), "s" + "h" * 6),
    ("nvfp4", (28672, 8192), "s" * 4 + "h" * 3),
    ("nvfp4", (8192, 8192), "s" * 4 + "h" * 3),
    ("uint4:block=128,zero=int", (8192, 8192), "s" * 4),
]


@pytest.mark.parametrize(("format", "shape", "wanted"), MEASURED)
def test_the_fastest_way_is_taken(format, shape, wanted):
    """Of 8, 9, 12, 16, 17, 24 and 32 tokens of float16."""
    found = ""
    for tokens in (8, 9, 12, 16, 17, 24, 32)[: len(wanted)]:
        problem = Problem(kb.get_format(format), shape, tokens, HALF, device("H200"))
        found += choices(problem, LINEAR)[0].route.name[0]
    assert found == wanted


def test_what_is_not_streamed_by_a_table_is_multiplied_all_the_same():
    gpu = device("H200")
    for format, shape, tokens, lies, why in (
        ("iq4_nl", (512, 288), 4, Stored(), "whole blocks of 256"),
        ("iq4_xs", (512, 768), 12, Stored(), "whole blocks of 512"),
        ("mxfp4", (512, 1024), 17, Stored(), "up to 16 tokens"),
        ("q4_1", (512, 1024), 4, Stored(scales=8), "multiple of 16 bytes"),
        ("nvfp4", (512, 1024), 4, Stored(), "no places in a table"),
    ):
        about = Problem(kb.get_format(format), shape, tokens, HALF, gpu, stored=lies, activations="q8_1")
        assert why in StagedStream().accepts(about)
        assert choices(about, LINEAR)[0].refusal is None


def test_scales_of_q4_0_that_start_anywhere():
    """Rows whose scales are whole pieces of 16 bytes are read in these, and others by the word."""
    gpu, format = Device(0, 90, 132, 232448, True, True), kb.get_format("q4_0")
    for depth, aligned, taken in ((4096, 16, True), (4096, 8, False), (4096, 4, False), (4128, 4, True)):
        stored = Stored(scales=aligned)
        for tokens, activations in itertools.product((1, 16), ("int8", "q8_1")):
            problem = Problem(format, (4096, depth), tokens, HALF, gpu, stored=stored, activations=activations)
            refusal = integer_stream.IntegerStream().accepts(problem)
            assert (refusal is None) == taken, (depth, aligned, refusal)
            assert choices(problem, LINEAR)[0].refusal is None
