"""What every format promises, a check each: ``check(case, xp, folder)``. `test_contract.py` makes a table of them.

`xp` is NumPy or CuPy: a check is the same on both.
"""

import copy
import functools
import json
import pickle

import numpy as np
import pytest
from cases import DTYPES, KINDS, SHAPES, numbers
from inputs import same_values

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.formats.base import option_names

#: Parameters for `pytest.mark.parametrize`.
CHECKS = []
#: Those of the checks that write files, into their `folder`.
WRITING = []


def checked(*values, writes=False):
    """Put a function into `CHECKS`, once, or once for each value of its first parameter."""

    def add(function):
        name = function.__name__
        calls = {f"{name}-{value}": functools.partial(function, value) for value in values} or {name: function}
        CHECKS.extend(pytest.param(call, id=id) for id, call in calls.items())
        WRITING.extend(calls.values() if writes else ())
        return function

    return add


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def same_planes(a, b):
    """Whether two arrays have planes of the same bytes."""
    a, b = a.get(), b.get()
    return list(a.planes) == list(b.planes) and all(
        plane.dtype == b.planes[name].dtype and plane.tobytes() == b.planes[name].tobytes()
        for name, plane in a.planes.items()
    )


def described(q):
    """The planes of an array as the format of its parts describes them."""
    return {name: (spec.dtype, spec.shape) for name, spec in q.format.planes(q.shape).items()} == {
        name: (plane.dtype.name, plane.shape) for name, plane in q.planes.items()
    }


def attempt(call, q):
    """What a call gives; None where it is refused and the format of `q` may do so.

    That is where rows share scales: they are no whole blocks, or a plane or an axis has them in common.
    """
    may_refuse = (
        not q.format.rows_are_blocks(q.shape)
        or any(spec.every > 1 for spec in q.format.planes(q.shape).values())
        or "granularity" in q.format.options()
    )
    try:
        return call()
    except kb.KbitError:
        if not may_refuse:
            raise
        return None


# ---- round trips -----------------------------------------------------------------------------------------------------


@checked(*SHAPES)
def any_shape(kind, case, xp, folder):
    x = numbers("normal", case.shape(kind))
    q = case.quantize(xp.asarray(x))
    y = q.dequantize()
    assert (q.shape, q.dtype, q.format, q.members) == (x.shape, x.dtype, case.format, 1)
    assert described(q) and y.shape == x.shape and y.dtype == x.dtype
    config = json.loads(json.dumps(q.config()))
    assert same_values(host(kb.QuantizedArray.from_config(config, q.planes).dequantize()), host(y))


@checked(*DTYPES)
def any_dtype(dtype, case, xp, folder):
    """Decoding to another dtype rounds the float32 numbers once."""
    x = xp.asarray(numbers("normal", case.matrix(), dtype))
    q = case.quantize(x)
    y = q.dequantize()
    assert q.dtype == x.dtype and y.dtype == x.dtype
    single = host(q.dequantize(dtype="float32"))
    for other in DTYPES:
        assert same_values(host(q.dequantize(dtype=other)), single.astype(DTYPES[other]).astype(np.float32))
    out = xp.empty_like(x)
    assert kb.dequantize(q, out=out) is out and same_values(host(out), host(y))


@checked(*KINDS)
def any_numbers(kind, case, xp, folder):
    """No warning, no error, the same bytes each time, also into planes that hold something else."""
    x = xp.asarray(numbers(kind, case.shape("many")))
    q = case.quantize(x)
    assert same_planes(case.quantize(x.copy()), q)
    used = case.quantize(xp.asarray(numbers("normal", x.shape)))
    assert case.quantize(x, out=used) is used and same_planes(used, q)
    assert q.dequantize().shape == x.shape


@checked()
def errors_are_small(case, xp, folder):
    if not case.format.can_encode:
        pytest.skip("nothing is quantized")
    x = numbers("normal", case.matrix())
    q = case.quantize(xp.asarray(x))
    y = host(q.dequantize())
    least = 1.5 if case.format.bits > 1 else -5.0  # two values of any codebook have not much more
    assert kb.metrics.sqnr_db(x, y) > least and (x * y).sum() > 0
    bound = kb.metrics.error_bound(xp.asarray(x), q)
    assert bound is None or bound.violations == 0


@checked()
def inputs_may_lie_anyhow(case, xp, folder):
    """Transposed, with gaps, backwards, read-only."""
    x = numbers("normal", case.matrix())
    wanted = case.quantize(xp.asarray(x))
    wide = xp.asarray(np.repeat(x, 2, axis=1))[:, ::2]
    backwards = xp.asarray(x[::-1].copy())[::-1]
    for found in (xp.asarray(x.T.copy()).T, wide, backwards):
        assert same_planes(case.quantize(found), wanted)
    x.flags.writeable = False
    assert same_planes(case.quantize(xp.asarray(x)), wanted)


# ---- descriptions ----------------------------------------------------------------------------------------------------


@checked()
def facts(case, xp, folder):
    format = case.format
    assert (
        format.name == case.text.partition(":")[0] and format.bits > 0 and (format.block is None or format.block >= 1)
    )
    assert format.origin and format.summary and set(format.dtypes) <= set(DTYPES)
    with pytest.raises(kb.KbitError, match="has no option 'no_such_option'"):
        kb.get_format(case.format.name, no_such_option=1)
    assert set(format.options()) <= set(option_names(kb.formats.base.format_factory(case.format.name)))


@checked()
def configs(case, xp, folder):
    """JSON, text and repr name an equal format."""
    format = case.format
    options = json.loads(json.dumps(format.options()))
    found = [
        kb.get_format(format.name, **options),
        kb.get_format(str(format)),
        eval(repr(format), {"get_format": kb.get_format}),
        pickle.loads(pickle.dumps(format)),
        copy.deepcopy(format),
    ]
    for other in found:
        assert other == format and hash(other) == hash(format) and other.config() == format.config()
    assert format != kb.get_format("kbit4" if format.name != "kbit4" else "kbit3")


@checked()
def copies(case, xp, folder):
    q = case.quantize(xp.asarray(numbers("normal", case.matrix())))
    kb.take(q, xp.asarray([0]))  # what a first call keeps is no part of the array
    for other in (copy.copy(q), copy.deepcopy(q), q.copy(), pickle.loads(pickle.dumps(q)), q.to_device(q.device)):
        assert same_planes(other, q) and other.config() == q.config() and other.device == q.device
    data = q.get().to_bytes()
    back = kb.QuantizedArray.from_buffer(data)
    assert same_planes(back, q) and back.config() == q.config()


# ---- parts and joints ------------------------------------------------------------------------------------------------

KEYS = {"slice": slice(3, 17), "reversed": slice(None, None, -1), "step": slice(1, 20, 5), "ids": [5, 3, 3, 0, 23]}


@checked(*KEYS)
def rows(key, case, xp, folder):
    q = case.quantize(xp.asarray(numbers("normal", case.matrix())))
    found = attempt(lambda: q[KEYS[key]], q)
    if found is not None:
        assert same_values(host(found.dequantize()), host(q.dequantize())[KEYS[key]])


@checked()
def one_row(case, xp, folder):
    q = case.quantize(xp.asarray(numbers("normal", case.matrix())))
    row = attempt(lambda: q[5], q)
    if row is not None:
        assert row.shape == q.shape[1:] and same_values(host(row.dequantize()), host(q.dequantize())[5])


@checked(*DTYPES)
def taken_rows(dtype, case, xp, folder):
    q = case.quantize(xp.asarray(numbers("normal", case.matrix())))
    ids = np.array([[5, 3, 3], [-1, 0, 23]])
    found = attempt(lambda: kb.take(q, xp.asarray(ids), dtype=dtype), q)
    if found is not None:
        assert found.shape == (2, 3, q.shape[1]) and found.dtype == np.dtype(DTYPES[dtype])
        assert same_values(host(found), host(q.dequantize(dtype=dtype))[ids])


@checked(writes=True)
def stacks(case, xp, folder):
    """Members keep their bytes, and so do stacks of parts of a stack."""
    scaled = [numbers("normal", case.matrix(8), seed=i) * np.float32(10.0**i) for i in range(3)]
    members = [case.quantize(xp.asarray(x)) for x in scaled]
    stack = attempt(lambda: kb.stack(members), members[0])
    if stack is None:
        return
    assert stack.shape == (3, *members[0].shape)
    assert same_values(host(stack.dequantize()), np.stack([host(q.dequantize()) for q in members]))
    for member, q in zip(range(3), members, strict=True):
        assert same_planes(stack[member], q) and stack[member].format == q.format.counted_from_end(q.ndim)
    assert same_planes(kb.stack([stack[1], stack[2]])[0], members[1])
    assert same_values(host(kb.take(stack, xp.asarray([2, 0]))), host(stack.dequantize())[[2, 0]])
    kb.io.save(folder / "stack.safetensors", {"w": stack.get()})
    back = kb.io.load(folder / "stack.safetensors")["w"]
    assert same_planes(back, stack) and back.config() == stack.config() and back.members == stack.members


@checked()
def concatenations(case, xp, folder):
    whole = case.quantize(xp.asarray(numbers("normal", case.matrix(16))))
    found = attempt(lambda: kb.concatenate([whole[:8], whole[8:]]), whole)
    if found is not None:
        assert same_planes(found, whole) and found.shape == whole.shape


@checked()
def reshapes(case, xp, folder):
    q = case.quantize(xp.asarray(numbers("normal", case.matrix())))
    found = attempt(lambda: q.reshape(2, -1, q.shape[1]), q)
    if found is not None:
        assert same_planes(found, q)
        assert same_values(host(found.dequantize()), host(q.dequantize()).reshape(2, -1, q.shape[1]))


# ---- files -----------------------------------------------------------------------------------------------------------


@checked(writes=True)
def files(case, xp, folder):
    q = case.quantize(xp.asarray(numbers("normal", case.matrix())))
    empty = case.quantize(xp.asarray(numbers("normal", case.shape("nothing"))))
    kb.io.save(folder / "a.safetensors", {"w": q.get(), "none": empty.get()})
    loaded = kb.io.load(folder / "a.safetensors")
    assert loaded["w"].config() == q.config() and same_planes(loaded["w"], q)
    assert loaded["none"].shape == empty.shape
    assert same_values(host(loaded["w"].to_device(q.device).dequantize()), host(q.dequantize()))


@checked(writes=True)
def converted_files(case, xp, folder):
    """A file that is compressed tensor by tensor holds what `quantize` gives, and comes back."""
    if case.given:
        pytest.skip("a file is converted with a format that brings no numbers of its own")
    x = numbers("normal", case.matrix())
    kb.io.save(folder / "in.safetensors", {"w": x, "bias": np.ones(3, np.float32)})
    if not case.format.can_encode:
        with pytest.raises(kb.KbitError, match=case.format.name):
            kb.io.quantize_file(folder / "in.safetensors", folder / "out.safetensors", case.format, device="cpu")
        assert not (folder / "out.safetensors").exists()
        kb.io.save(folder / "packed.safetensors", {"w": case.quantize(x)})
        kb.io.dequantize_file(folder / "packed.safetensors", folder / "back.safetensors", device="cpu")
        assert same_values(kb.io.load(folder / "back.safetensors")["w"], case.quantize(x).dequantize())
        return
    report = kb.io.quantize_file(
        folder / "in.safetensors", folder / "out.safetensors", case.format, min_size=1, device="cpu"
    )
    assert report.converted == 1
    wanted = case.quantize(x)
    assert same_planes(kb.io.load(folder / "out.safetensors")["w"], wanted)
    kb.io.dequantize_file(folder / "out.safetensors", folder / "back.safetensors", device="cpu")
    assert same_values(kb.io.load(folder / "back.safetensors")["w"], wanted.dequantize())


@checked(writes=True)
def bitsandbytes_files(case, xp, folder):
    """The other layout holds the same numbers, or refuses the format by its name."""
    if case.given:
        pytest.skip("a file is converted with a format that brings no numbers of its own")
    x = numbers("normal", case.matrix(), "float16")
    kb.io.save(folder / "in.safetensors", {"w.weight": x})
    arguments = folder / "in.safetensors", folder / "out.safetensors", case.format
    refusal = None
    try:
        kb.io.quantize_file(*arguments, min_size=1, layout="bitsandbytes", device="cpu")
    except kb.KbitError as error:
        refusal = str(error)
    assert refusal is None or ("bitsandbytes" in refusal and case.text not in ("nf4", "fp4"))
    if refusal is not None:
        return
    found, wanted = kb.io.load(folder / "out.safetensors")["w.weight"].dequantize(), case.quantize(x).dequantize()
    if case.format.name == "int8":  # whose scales are stored as maxima
        assert np.allclose(found, wanted, rtol=2.0**-9, atol=0)
    else:
        assert same_values(found, wanted)


# ---- products --------------------------------------------------------------------------------------------------------


# Half the distance of neighbours, relative; tensor cores may round what is float32 to 11 bits.
HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-18, "float64": 2.0**-18}


@checked(*DTYPES)
def products(dtype, case, xp, folder):
    """Against float64, for one token and for some."""
    q = case.quantize(xp.asarray(numbers("normal", case.matrix(40, 256))))
    weight = host(q.dequantize(dtype="float32")).astype(np.float64)
    for tokens in (1, 9):
        x = numbers("normal", (tokens, q.shape[1]), dtype, seed=1)
        bias = numbers("normal", (q.shape[0],), dtype, seed=2)
        found = host(kb.linear(xp.asarray(x), q, xp.asarray(bias)))
        exact = x.astype(np.float64) @ weight.T + bias.astype(np.float64)
        assert found.shape == exact.shape and found.dtype == x.dtype
        # What rounding every weight, every token and the result may cost.
        size = np.abs(x.astype(np.float64)) @ np.abs(weight.T) + np.abs(bias.astype(np.float64))
        assert (np.abs(found.astype(np.float64) - exact) <= HALF_ULP[dtype] * (np.abs(exact) + size)).all()


# ---- the command line, once a format ---------------------------------------------------------------------------------


def commands(case, folder):
    """The command line compresses, describes, compares, plans and restores."""
    x = numbers("normal", case.matrix())
    source, packed, back, plan = (str(folder / name) for name in ("in.safetensors", "out", "back", "plan.json"))
    kb.io.save(source, {"w": x})
    chosen = ["--formats", case.text, "--min-size", "1", "--device", "cpu"]
    making = (
        ["quantize", source, "-o", packed, "--format", case.text, "--min-size", "1", "--device", "cpu"],
        ["compare", source, *chosen],
        ["plan", source, "-o", plan, "--bits", "20", *chosen],
    )
    for words in making:
        assert (main(words) == 0) == case.format.can_encode, words
    if not case.format.can_encode:
        kb.io.save(packed, {"w": case.quantize(x)})
    for words in (["inspect", packed], ["dequantize", packed, "-o", back, "--device", "cpu"]):
        assert main(words) == 0, words
    assert main(["formats", case.format.name]) == 0
    assert same_planes(kb.io.load(packed)["w"], case.quantize(x))
    assert not case.format.can_encode or kb.explore.read_plan(plan) == {"w": case.format}
    assert same_values(kb.io.load(back)["w"], case.quantize(x).dequantize())
