"""The compile check and the comparison of machine code: what they know a kernel by, and what they complain of."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent.parent / ".ci"
KERNEL = '#include "head.cuh"\n__global__ void kernel() { f(); }  // calls f\n'


def load(name):
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cubins, check, sass = load("cubins"), load("compile_kernels"), load("sass")


@pytest.fixture
def tree(tmp_path):
    """A kernel with a header that includes another one, and a third that a define names."""
    (tmp_path / "rooms").mkdir()
    (tmp_path / "head.cuh").write_text('#pragma once\n#include <cuda_fp16.h>\n#include "rooms/deep.cuh"\nvoid f();\n')
    (tmp_path / "rooms" / "deep.cuh").write_text("const int N = 1;\n")
    (tmp_path / "rooms" / "format.cuh").write_text("struct F {};\n")
    return tmp_path


def instance(tree, source=KERNEL, expression="kernel<1>", options=("-std=c++17",)):
    return cubins.Instance(
        "file.cu", expression, "kernel", True, "", 0, True, source, (*options, f"-I{tree}", "-DKBIT_HEADERS=x")
    )


def changed(tree, **how):
    """Whether a kernel is another one after its headers got other contents."""
    before = cubins.source_hash(instance(tree))
    for name, text in how.items():
        path = {"head": tree / "head.cuh", "deep": tree / "rooms" / "deep.cuh"}[name]
        path.write_text(text(path.read_text()))
    cubins._plain_file.cache_clear()
    return cubins.source_hash(instance(tree)) != before


def test_headers_of_headers_count(tree):
    assert changed(tree, deep=lambda text: text.replace("1", "2"))


def test_comments_and_empty_space_do_not_count(tree):
    assert not changed(
        tree, deep=lambda text: f"/* a\nnote */\n\n  {text[:-1]}   // one\n", head=lambda text: text + "\n"
    )
    assert cubins.source_hash(instance(tree)) == cubins.source_hash(instance(tree, KERNEL.replace("calls", "needs")))


def test_text_in_quotes_is_no_comment(tree):
    quoted = KERNEL + 'asm("// %0");\n'
    assert cubins.source_hash(instance(tree, quoted)) != cubins.source_hash(instance(tree, quoted.replace("%0", "%1")))


def test_options_and_expressions_count_and_the_key_for_cupys_cache_does_not(tree):
    plain = instance(tree)
    assert cubins.source_hash(plain) != cubins.source_hash(instance(tree, expression="kernel<2>"))
    assert cubins.source_hash(plain) != cubins.source_hash(instance(tree, options=("-std=c++20",)))
    other = replace(plain, options=tuple(option.replace("=x", "=y") for option in plain.options))
    assert cubins.source_hash(plain) == cubins.source_hash(other)


def test_a_header_that_a_define_names_counts(tree):
    source = '#define KBIT_FORMAT_HEADER "rooms/format.cuh"\n#line 1 "file.cu"\n#include KBIT_FORMAT_HEADER\n' + KERNEL
    before = cubins.source_hash(instance(tree, source))
    (tree / "rooms" / "format.cuh").write_text("struct F { int x; };\n")
    cubins._plain_file.cache_clear()
    assert cubins.source_hash(instance(tree, source)) != before


def test_the_name_of_a_folder_does_not_count(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere") / "tree"
    tree.rename(other)
    assert cubins.source_hash(instance(other)) and other != tree


def test_a_header_that_is_nowhere_is_an_error(tree):
    with pytest.raises(FileNotFoundError, match="lost.cuh"):
        cubins.source_hash(instance(tree, '#include "lost.cuh"\n'))


# ---- the list --------------------------------------------------------------------------------------------------------

GOOD = cubins.Binary(10, 32)
NAME = "kbit.cu: kernel<1> | sm_90"


def complaints(binary=GOOD, known=None, accepted=None, hot=(NAME,), digest="abc"):
    return check.complaints({NAME: "abc"}, set(hot), known or {}, accepted or {}, {NAME: binary})


def test_a_line_of_the_list_reads_back():
    line = check.line_of(NAME, "abc", replace(GOOD, stack=8, stores=4, loads=12))
    assert check.read_lock(f"# written by hand\n{line}\n") == {NAME: ("abc", 32, 8, 4, 12)}


@pytest.mark.parametrize(
    ("binary", "known", "accepted", "hot", "words"),
    [
        (GOOD, {}, {}, [NAME], []),
        (GOOD, {NAME: ("abc", 32, 0, 0, 0)}, {}, [NAME], []),
        (GOOD, {NAME: ("abc", 40, 0, 0, 0)}, {}, [NAME], ["listed (40, 0, 0, 0)"]),
        (GOOD, {NAME: ("old", 40, 0, 0, 0)}, {}, [NAME], []),  # another source: not comparable
        (GOOD, {"gone | sm_90": ("x", 1, 0, 0, 0)}, {}, [NAME], ["gone | sm_90: the list has it"]),
        (GOOD, {}, {"gone | sm_90": (8, 0, 0)}, [NAME], ["gone | sm_90: .ci/spills has it"]),
        (replace(GOOD, stack=16), {}, {}, [NAME], ["16 bytes stack frame"]),
        (replace(GOOD, stack=16), {}, {}, [], []),
        (replace(GOOD, stack=16), {}, {NAME: (16, 0, 0)}, [NAME], []),
        (replace(GOOD, stack=24), {}, {NAME: (16, 0, 0)}, [NAME], [".ci/spills says (16, 0, 0)"]),
        (GOOD, {}, {NAME: (16, 0, 0)}, [NAME], [".ci/spills says (16, 0, 0)"]),  # mended: take it out
        (cubins.Binary(error="no such type"), {}, {}, [NAME], ["no such type"]),
    ],
)
def test_complaints(binary, known, accepted, hot, words):
    found = check.complaints({NAME: "abc"}, set(hot), known, accepted, {NAME: binary})
    assert len(found) == len(words) and all(word in text for word, text in zip(words, found, strict=True))


def test_every_instance_is_compiled_where_it_does_something(tree):
    first, second = instance(tree), replace(instance(tree), expression="kernel<2>", first=False, least=80)
    names = check.jobs([first, second, replace(second, expression="kernel<3>", only="90a")])
    assert [name.rpartition(" | ")[2] for name in names if "<1>" in name] == [
        f"sm_{number}" for number in (75, 80, 90, 86, 89, 100, 120)
    ]
    assert [name for name in names if "<1>" not in name] == [
        "file.cu: kernel<2> | sm_80",
        "file.cu: kernel<2> | sm_90",
        "file.cu: kernel<3> | sm_90a",
    ]


# ---- machine code ----------------------------------------------------------------------------------------------------


def code(*lines):
    return [(line[:-1], "") if line.endswith(":") else (None, line) for line in lines]


def test_the_main_loop_is_the_longest_that_holds_no_other():
    wait = [".L_w:", "SYNCS", "@!P0 BRA `(.L_w)"]
    body = ["FFMA"] * 20
    lines = code(
        "MOV", ".L_out:", *wait, ".L_in:", *body, "@P1 BRA `(.L_in)", *["IADD"] * 40, "@P2 BRA `(.L_out)", "EXIT"
    )
    assert sass.count(lines) == (21, 66)
    assert sass.count(code("MOV", "EXIT")) == (0, 2)


def test_where_parameters_lie_makes_no_other_code():
    old = code(".L_x_1:", "MOV R1, c[0x0][0x28]", "ULDC UR4, c[0x0][0x210]", "BRA `(.L_x_1)")
    new = code(".L_x_9:", "MOV R1, c[0x0][0x28]", "ULDC UR4, c[0x0][0x220]", "BRA `(.L_x_9)")
    assert sass.without_places(old) == sass.without_places(new)
    assert sass.without_places(old) != sass.without_places(code(*["FADD R1, R2, R3"] * 3))


def test_kernels_are_matched_by_name_and_by_rule():
    old, new = ["a.cu: f<1>", "a.cu: g<1>", "a.cu: h"], ["b.cu: f<1>", "a.cu: g<1>", "c.cu: new"]
    both, gone, added = sass.pairs(old, new, [("^a.cu: f", "b.cu: f")])
    assert both == {"a.cu: f<1>": "b.cu: f<1>", "a.cu: g<1>": "a.cu: g<1>"}
    assert (gone, added) == (["a.cu: h"], ["c.cu: new"])
