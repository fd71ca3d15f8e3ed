"""Numbers that host and kernels share: a kernel with other sizes than those that the host reckons with fails."""

import re

import pytest

import kbitcupy as kb
import kbitcupy.products.functions  # registers the kernels of products
from kbitcupy.backend.compile import architecture_of, compile_offline, kernel_folder, source
from kbitcupy.backend.structs import Constants
from kbitcupy.errors import KernelCompileError
from kbitcupy.formats.base import all_fragments, kernel_templates
from kbitcupy.products.fused import Decoder
from kbitcupy.products.hopper import tile_cuts

# What NVRTC 12.9 and 13.0 get wrong: where the condition is false, a loop behind that is unrolled is left out as well.
DROPS_THE_NEXT = r"if constexpr [^\n{;]*\)\n *#pragma unroll\n( *)for [^\n]*\{\n.*?\n\1\}\n *#pragma unroll"
# Whose sizes stand in the last template argument.
CHECKED = ("linear_few", "linear_one", "linear_tile", "wgmma_w8a8", "wgmma_integers")


def first(name):
    template = next(t for t in kernel_templates() if t.name == name)
    return template, next(template.instances())


@pytest.mark.parametrize("name", CHECKED)
def test_other_sizes_do_not_compile(nvrtc, name):
    """Every number of the layout, off by one unit; a planted fault in the host is found where there is no GPU."""
    template, expression = first(name)
    start, layout, rest = re.fullmatch(r"(.*Layout<)([^>]*)(>.*)", expression).groups()
    sizes = layout.split(", ")
    architecture = architecture_of(template.file) or 80
    for place, size in enumerate(sizes):
        wrong = {"true": "false", "false": "true"}.get(size) or str(int(size) + 16)
        planted = start + ", ".join([*sizes[:place], wrong, *sizes[place + 1 :]]) + rest
        with pytest.raises(KernelCompileError, match="the host reckons with other sizes"):
            compile_offline(template, planted, architecture)


def test_layouts_are_those_of_the_formats():
    layouts = {Decoder(fragments).layout for fragments in all_fragments()}
    assert Decoder(kb.get_format("kbit4").fragments()).layout == "Layout<256, true, 64, 4, false>"
    assert Decoder(kb.get_format("nf4:block=16").fragments()).layout in layouts
    kbit3 = kb.get_format("kbit3").fragments()
    assert len({cut.layout(kbit3) for cut in tile_cuts()}) > 4


def test_formats_say_what_kernels_decode():
    """Every way to decode that a format may ask for is among those that are compiled."""
    texts = {fragments.small_batch for fragments in all_fragments()}
    for name in kb.list_formats():
        fragments = kb.get_format(name).fragments()
        assert fragments is None or fragments.small_batch in texts
        assert fragments is None or len(fragments.known_values) in (0, 1 << fragments.bits)


def test_constants_stand_ahead_of_the_source():
    template, _ = first("linear_few")
    text = source(template)
    for line in ("constexpr int ITEM_K = 128;", "constexpr int X_GAP = 256;", "struct Cut {", "struct Values {"):
        assert text.index(line) < text.index('#line 1 "linear/small_batch.cu"')
    sizes = Constants(ROWS=16)
    assert sizes.ROWS == 16 and repr(sizes) == "Constants(ROWS=16)"
    with pytest.raises(AttributeError, match="TOKENS is none of the constants ROWS"):
        _ = sizes.TOKENS


def test_no_loop_is_left_out_by_the_compiler():
    """Braces around the body of such an ``if constexpr`` cure it."""
    wrong = "if constexpr (O)\n#pragma unroll\n  for (;;) {\n    a();\n  }\n#pragma unroll\n  for (;;) b();\n"
    assert re.search(DROPS_THE_NEXT, wrong, re.DOTALL)
    for path in sorted(kernel_folder().rglob("*.cu*")):
        assert not re.search(DROPS_THE_NEXT, path.read_text(), re.DOTALL), path.name
