"""The registry: names, options, their text, what is said of an unknown one. `test_contract.py` has the rest."""

import functools
import json
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from inputs import BFLOAT16, make
from toy import Toy

import kbitcupy as kb
from kbitcupy.backend.compile import Template
from kbitcupy.formats import base
from kbitcupy.formats.base import kernel_templates, parse_format, resolve, split_formats, unregister

SHAPES = [(0,), (), (1,), (31,), (3, 32), (5, 7, 33), (4, 0, 2)]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def sample(shape, dtype):
    size = int(np.prod(shape, dtype=int))
    return make("normal", size, np.dtype("float32")).reshape(shape).astype(BFLOAT16 if dtype == "bfloat16" else dtype)


def test_registration():
    with pytest.raises(kb.KbitError, match="registered already; pass replace=True"):
        kb.register("kbit4", Toy)
    with pytest.raises(kb.KbitError, match="must be a non-empty string"):
        kb.register("", Toy)
    with pytest.raises(kb.KbitError, match="must be callable"):
        kb.register("other", 3)


def test_formats_of_other_packages_are_listed(monkeypatch):
    """By their names, without an import; what is shown unasked they say themselves."""
    loaded = []

    class Entry:
        name = "toy"

        def load(self):
            loaded.append(self.name)
            return Toy

    def entry_points(*, group, name=None):
        assert group == "kbitcupy.formats"
        return [Entry()] if name in (None, "toy") else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    base._offered.cache_clear()
    try:
        assert kb.list_formats()[-1] == "toy" and not loaded
        monkeypatch.setattr(Toy, "default", False)
        assert "toy" not in kb.list_formats(default=True) and "toy" in kb.list_formats(default=False) and loaded
    finally:
        unregister("toy")
        base._offered.cache_clear()


def test_what_only_decodes_is_refused_before_anything_is_touched(monkeypatch):
    kb.register("toy", Toy)
    try:
        q = kb.quantize(np.ones(16, np.float32), "toy")
        monkeypatch.setattr(Toy, "can_encode", False)
        with pytest.raises(kb.KbitError, match="toy can be decoded but not made"):
            kb.quantize(np.zeros(16, np.float32), "toy", out=q)
        assert q.dequantize().min() == 1
        assert "toy" not in [format.name for format in kb.explore.default_formats()]
    finally:
        unregister("toy")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kb.quantize(x, "nf4", scale=1.0), "scale is given, but nf4 takes no scale: .* it takes nothing"),
        (lambda x: kb.quantize(x, "int8", codebook=np.ones(16)), "int8 takes no codebook: .* scale, zero_point"),
        (lambda x: kb.quantize(x, "kbit4", importance=x), "kbit4 takes no importance"),
        (lambda x: kb.quantize(x, kb.get_format("kbit4"), codebook="nf"), r"options \(codebook\) go with a format's"),
        (lambda x: kb.get_format("int8", scale=0.1), "no option 'scale'; .*; scale goes with each call of quantize"),
        (lambda x: kb.quantize(x, "int8:scale=0.1", scale=0.2), "is given scale=0.1 and scale=0.2: leave one away"),
        (lambda x: kb.quantize(x, "kbit4:codebook=nf", codebook=np.ones(16)), "codebook='nf' and codebook=array"),
    ],
)
def test_what_a_call_may_bring(call, message):
    with pytest.raises(kb.KbitError, match=message):
        call(np.ones((2, 32), np.float32))


def test_a_format_and_what_a_call_brings_as_one():
    """Lists of formats take both together."""
    x, values = sample((4, 64), "float32"), np.linspace(-1, 1, 16)
    wanted = kb.quantize(x, "kbit4", codebook=values, absmax="float32")
    for choice in (("kbit4:absmax=float32", {"codebook": values}), (wanted.format, {"codebook": values})):
        assert np.array_equal(kb.quantize(x, choice).dequantize(), wanted.dequantize())
        (row,) = kb.explore.sweep(x, choice)
        assert row["label"] == "kbit4:codebook=custom,absmax=float32" and row["given"] == ["codebook"]
    assert len(kb.explore.sweep(x, ["kbit4", ("kbit4", {"codebook": values})])) == 2


def test_entry_points_are_asked_for_unknown_names_only(monkeypatch):
    asked = []

    class Entry:
        def load(self):
            return Toy

    def entry_points(*, group, name):
        asked.append((group, name))
        return [Entry()] if name == "toy" else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    try:
        assert isinstance(kb.get_format("toy"), Toy)
        kb.get_format("kbit4")
        assert asked == [("kbitcupy.formats", "toy")]
        with pytest.raises(kb.KbitError, match="format is 'nothing'; registered are kbit1, "):
            kb.get_format("nothing")
    finally:
        unregister("toy")


def in_a_process(program):
    """What a program prints last, as JSON, in a process of its own."""
    program = f"import json, sys\nimport kbitcupy as kb\n{textwrap.dedent(program)}"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_formats_of_gguf_are_imported_when_one_is_used():
    """Each by its own module, which registers what is said of it; lists have them in their places from the start."""
    known, before, first, second = in_a_process(
        """
        known = kb.list_formats()
        before = [name for name in sys.modules if "gguf" in name]
        q = kb.get_format("Q4_K")
        first = [name for name in kb.list_formats() if name not in known], type(q).__module__
        makers = {name: kb.formats.base.format_factory(name) for name in known}
        second = {name: maker.__module__ for name, maker in makers.items() if hasattr(maker, "ggml_type")}
        print(json.dumps([known, before, first, second]))
        """
    )
    assert not before and first == [[], "kbitcupy.formats.gguf.kquants"]
    assert known == [name for name in kb.list_formats() if name in known]
    owners = {name: type(kb.get_format(name)).__module__ for name in known if kb.get_format(name).family == "gguf"}
    assert second == owners and len(owners) == 25
    assert list(owners) == known[known.index("q8_0") : known.index("iq3_s") + 1]


def test_a_format_that_is_not_imported_yet_is_registered_all_the_same():
    refused, replaced, beside, left = in_a_process(
        """
        try:
            kb.register("q6_k", kb.get_format)
        except kb.KbitError as error:
            refused = str(error)
        kb.register("iq4_nl", lambda: kb.get_format("q4_0"), replace=True)
        replaced, beside = kb.get_format("iq4_nl").name, kb.get_format("iq4_xs").name
        kb.formats.base.unregister("mxfp4")
        kb.get_format("nvfp4")
        print(json.dumps([refused, replaced, beside, kb.list_formats()]))
        """
    )
    assert "'q6_k' is registered already" in refused and (replaced, beside) == ("q4_0", "iq4_xs")
    assert "mxfp4" not in left and "nvfp4" in left


def test_a_package_may_register_its_format_when_it_is_imported(monkeypatch):
    """As ours do, and not only by being what the entry point names."""

    class Entry:
        def load(self):
            kb.register("toy", Toy)
            return Toy

    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group, name: [Entry()] if name == "toy" else [])
    try:
        assert isinstance(kb.get_format("toy"), Toy)
    finally:
        unregister("toy")


def test_texts_with_options_are_taken_apart_once():
    for text in ("kbit4:absmax=float16", "nvfp4:tensor_scale=true"):
        assert resolve(text)[0] is resolve(text)[0] is kb.get_format(text)
    assert resolve("int8:scale=0.5")[1] == resolve("int8:scale=0.5")[1] == {"scale": 0.5}
    assert resolve("nvfp4:scale=0.5") == (kb.get_format("nvfp4:tensor_scale=true"), {"scale": 0.5})


# ---- a format with options, as text ----------------------------------------------------------------------------------

TEXTS = {
    "kbit4": ("kbit4", {}),
    " NF4 ": ("NF4", {}),
    "kbit4[]": ("kbit4", {}),
    "int4:block=32": ("int4", {"block": 32}),
    "nf4 : block = 32 , double_quant = true": ("nf4", {"block": 32, "double_quant": True}),
    "nf4[block=32,double_quant=FALSE]": ("nf4", {"block": 32, "double_quant": False}),
    "int8:granularity=token,percentile=99.5": ("int8", {"granularity": "token", "percentile": 99.5}),
    "int8:granularity=channel:0": ("int8", {"granularity": "channel:0"}),
    'int4[granularity=["group",32],symmetric=false]': ("int4", {"granularity": ["group", 32], "symmetric": False}),
    "int4:granularity=[group,32]": ("int4", {"granularity": ["group", 32]}),
    'kbit4:codebook="nf",absmax=float32': ("kbit4", {"codebook": "nf", "absmax": "float32"}),
    "table4:table=[-1,0.5,1e3],block=64": ("table4", {"table": [-1, 0.5, 1e3], "block": 64}),
    'x:a="1,b=2]",c=Null': ("x", {"a": "1,b=2]", "c": None}),
    'x:a="\\",b=1",c=2': ("x", {"a": '",b=1', "c": 2}),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_taken_apart(text):
    assert parse_format(text) == TEXTS[text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nf4:", "'' in it is not KEY=VALUE, such as block=32"),
        ("nf4:block", "'block' in it is not KEY=VALUE"),
        ("nf4:block=32,", "'' in it is not KEY=VALUE"),
        ("nf4:=32", "'=32' in it is not KEY=VALUE"),
        ("nf4[block=32", "the bracket of its options is not closed: write nf4:block=32"),
        ("nf4,block=32", "options stand behind a colon, such as nf4:block=32"),
        ("nf4:block=32,BLOCK=64", "holds the option 'BLOCK' twice"),
    ],
)
def test_texts_that_are_none(text, message):
    with pytest.raises(kb.KbitError, match=re.escape(message)):
        kb.get_format(text)


def test_a_text_has_an_end():
    with pytest.raises(kb.KbitError, match="format is a text of 1000007 characters; at most 65536 are read"):
        kb.get_format("table4:" + "[" * 1_000_000)
    with pytest.raises(kb.KbitError, match="codebook is '\\[\\["):
        kb.quantize(np.ones(4, np.float32), "table4:codebook=" + "[" * 60_000)


def test_text_is_a_string():
    for function in (parse_format, split_formats):
        with pytest.raises(TypeError, match="given as int; .* takes text"):
            function(4)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kbit4", ["kbit4"]),
        ("kbit4, nf4", ["kbit4", "nf4"]),
        ("nf4:block=32,double_quant=true,kbit2", ["nf4:block=32,double_quant=true", "kbit2"]),
        ("int8:granularity=token,percentile=99,int8:granularity=channel:0,symmetric=false",
         ["int8:granularity=token,percentile=99", "int8:granularity=channel:0,symmetric=false"]),
        ("nf4[block=32,double_quant=true],int4[block=32]", ["nf4[block=32,double_quant=true]", "int4[block=32]"]),
        ("table4:table=[1,2],block=64,fp4", ["table4:table=[1,2],block=64", "fp4"]),
    ],
)  # fmt: skip
def test_lists_of_formats_are_split(text, parts):
    assert split_formats(text) == parts


@pytest.mark.parametrize("text", ["", "kbit4,,nf4", "kbit4,", ",kbit4"])
def test_lists_with_holes(text):
    with pytest.raises(kb.KbitError, match="each must be a name, such as kbit4,nf4:block=32"):
        split_formats(text)


SPELLED = [  # the shortest text, the name, the options
    ("kbit4", "KBIT4", {}),
    ("kbit4", "kbit4", {"absmax": "e4m4", "codebook": "bnf"}),
    ("kbit4:absmax=float32", "kbit4", {"absmax": "float32"}),
    ("kbit4:absmax=float32", "Kbit4:AbsMax=float32", {}),
    ("kbit4:codebook=custom", "kbit4", {"codebook": "custom"}),
    ("nf4:block=32,double_quant=true", "nf4[block=32]", {"double_quant": True}),
    ("nf4:block=32", "nf4:block=32", {"block": 32}),
    ("dynamic8", "Dynamic8", {"block": 256}),
    ("table4:block=128,codebook=custom", "table4:table=custom,block=128", {}),
    ("table4:codebook=nf", "table4:TABLE=nf", {"codebook": "nf"}),
    ("int4:block=32", "int4", {"granularity": ("group", 32)}),
    ("int4:block=32", 'int4[granularity=["group",32]]', {}),
    ("int4:block=32", "int4:granularity=group:32", {}),
    ("int4:block=32", "int4:block=32", {"granularity": ["group", 32]}),
    ("int4:block=32,zero=int", "int4", {"block": 32, "symmetric": False}),
    ("int4:block=32,zero=int", "int4:symmetric=false", {"block": 32, "zero": "int"}),
    ("int4", "int4:symmetric=true", {}),
    ("uint8:block=32,zero=float,scale_dtype=float16", "UINT8:Zero=float", {"block": 32, "scale_dtype": "float16"}),
    ("int8", "int8", {"granularity": "tensor"}),
    ("int8:granularity=token,percentile=99.5", "int8:percentile=99.5", {"granularity": "token"}),
    ("int8:granularity=channel:-1", "int8", {"granularity": ("channel", -1)}),
]


@pytest.mark.parametrize(("text", "name", "options"), SPELLED)
def test_one_notation(text, name, options):
    format = kb.get_format(name, **options)
    assert str(format) == text and repr(format) == f"get_format({text!r})"
    again = eval(repr(format), {"get_format": kb.get_format})
    assert again == format and again.config() == format.config()
    assert kb.get_format(format.name, **json.loads(json.dumps(format.options()))) == format


def test_texts_are_read_wherever_a_format_is_named():
    x = sample((4, 64), "float32")
    q = kb.quantize(x, "NF4:block=32")
    assert q.format == kb.get_format("nf4", block=32)
    assert repr(q).startswith("QuantizedArray(nf4:block=32, shape=(4, 64), ")
    assert kb.quantize(x, "int4[block=32]", symmetric=False).format == kb.get_format(
        "int4", granularity=("group", 32), symmetric=False
    )
    assert [row["label"] for row in kb.explore.sweep(x, ["INT4:block=32", "kbit4"])] == ["int4:block=32", "kbit4"]


def test_a_text_is_read_once():
    format = kb.get_format("nf4:block=32")
    assert kb.get_format("nf4:block=32") is format
    assert kb.get_format("nf4:block=32", double_quant=True) is kb.get_format("nf4:block=32", double_quant=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nf4:block=32", {"block": 64}, "format 'nf4' is given block=32 and block=64: leave one away"),
        ("table4:table=bnf", {"table": np.ones(16)}, "format 'table4' is given codebook='bnf' and codebook="),
        ("int4:block=32", {"granularity": "token"}, "granularity is 'token' and block 32, which means"),
        ("int4", {"block": 32, "granularity": "tensor"}, "granularity is 'tensor' and block 32"),
        ("int4", {"block": 32, "granularity": ("group", 64)}, r"granularity is \('group', 64\) and block 32"),
        ("int4:block=0", {}, "block is 0; it must be a positive integer"),
        ("int4:block=half", {}, "block is 'half'; it must be a positive integer"),
        ("int4", {"block": True}, "block is True; it must be a positive integer"),
        ("int8:granularity=channel:x", {}, "granularity is 'channel:x'; allowed are .* in text channel:0"),
        ("int8:granularity=group:0", {}, "the group size of granularity is 0"),
        ("nf4:speed=9", {}, "format 'nf4' has no option 'speed'; it takes: block, double_quant"),
    ],
)
def test_contradictions(name, options, message):
    with pytest.raises(kb.KbitError, match=message):
        resolve(name, **options)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nf4x", "nf4"),
        ("int 4", "int4"),
        ("K-Bit_3", "kbit3"),
        ("4bit", "kbit4"),
        ("dynamic", "dynamic8"),
        ("q4", "q4_0, .*q4_k"),
        ("Q4-K", "q4_k"),
        ("q8", "q8_0.*"),
        (4, "kbit4, nf4, fp4, table4, int4, uint4, q4_0, .*"),
        ("4", "kbit4, nf4, fp4, table4, int4, uint4, q4_0, .*"),
        ("fp8", "kbit8, dynamic8, int8, uint8, q8_0.*"),
        ("q4:block=32", "q4_0, .*q4_k"),
    ],
)
def test_did_you_mean(name, meant):
    with pytest.raises(kb.KbitError, match=rf"did you mean {meant}\? Registered are kbit1, "):
        kb.get_format(name)


@pytest.mark.parametrize("name", ["kbit9", "nothing", "", None, {}])
def test_no_name_is_near(name):
    with pytest.raises(kb.KbitError, match=r"format is .*; registered are kbit1, "):
        kb.get_format(name)


@pytest.mark.parametrize("name", ["my:format", "a[b", "a,b", "a=b", " a"])
def test_names_are_free_of_what_divides_them(name):
    with pytest.raises(kb.KbitError, match="it must be free of"):
        kb.register(name, Toy)


class Needy(Toy):
    name = "Needy"
    kernels = (Template("needy.cu", "needy", ()),)

    def __init__(self, *, shape):
        super().__init__()
        self.shape = shape

    def options(self):
        return {"shape": self.shape}


@pytest.mark.parametrize("factory", [Needy, functools.partial(Needy)])
def test_a_format_that_needs_an_option(factory):
    """It is spelled with all of them, found in any case, and its kernels are known all the same."""
    kb.register("Needy", factory)
    try:
        format = kb.get_format("needy", shape="a,b")
        assert str(format) == 'Needy:shape="a,b"' and eval(repr(format), {"get_format": kb.get_format}) == format
        assert "needy" in [template.name for template in kernel_templates()]
    finally:
        unregister("Needy")


def test_a_function_that_needs_an_option():
    """Nothing is known of its kernels; that of the others is."""
    kb.register("needy", lambda *, shape: Needy(shape=shape))
    try:
        assert "needy" not in [template.name for template in kernel_templates()]
        assert "quantize_kbit" in [template.name for template in kernel_templates()]
    finally:
        unregister("needy")


def test_texts_of_hypothesis():
    """Any value that JSON knows comes back from the text."""
    from hypothesis import given, strategies as st

    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    values = scalars | st.lists(scalars, max_size=4)

    @given(value=values)
    def check(value):
        kb.register("toy", Toy, replace=True)
        format = Toy(boost=value)
        format.boost = value
        name, options = parse_format(str(format))
        assert name == "toy" and options.get("boost", 1.0) == value
        (alone,) = split_formats(str(format))
        assert alone == str(format)

    try:
        check()
    finally:
        unregister("toy")
