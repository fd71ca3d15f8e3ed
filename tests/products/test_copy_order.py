"""Copies into shared memory behind the reads of what was there before.

A warp that has read a stage asks for the next one itself. Its loads wait in a queue, which the copy engine overtakes
where memory is busy, so the request depends on what every load brought (zero_after of kernels/common/sync.cuh). That is
seen in PTX, and nowhere else but in products that now and then have other bits.
"""

import re

import pytest

import kbitcupy as kb
from kbitcupy.backend.compile import architecture_of, offline
from kbitcupy.formats.base import kernel_templates

#: Loads of each size and number, by kernel and how its instance begins.
KERNELS = {
    "words, three": ("linear_few", "Kbit<__half, 3, E4M4>, 1, 4, true, AT_ONCE"),
    "words, three, values in two parts": ("linear_few", "Kbit<__half, 3, E4M4, true>, 1, 4, false, AT_ONCE"),
    "words, five": ("linear_few", "Kbit<__half, 5, E4M4>, 1, 2, true, AT_ONCE"),
    "8 bytes, three": ("linear_few", "Kbit<__half, 6, E4M4>, 1, 2, true, IN_CHUNKS"),
    "16 bytes": ("linear_few", "Kbit<__half, 4, E4M4>, 1, 4, false, AT_ONCE"),
    "16 bytes, two": ("linear_few", "Kbit<__half, 8, E4M4>, 1, 2, true, IN_CHUNKS"),
    "halves of words": ("linear_few", "Table4<__half, 16>, 1, 2, true, AT_ONCE"),
    "8 bytes, two": ("linear_few", "Table4<__half, 64>, 1, 2, true, AT_ONCE"),
    "8 bytes, two of a record": ("linear_few", "Q4K<__half>, 1, 4, true"),
    "8 bytes, of one token": ("linear_few", "Columns<Q4K<__half>>, 1, 4, false"),
    "words, of one token": ("linear_few", "Columns<PairTable<__half, unsigned char, NEIGHBOURS>>, 1, 4, false"),
    "one token": ("linear_one", "Kbit<__half, 3, E4M4>"),
    "words of a slot": ("stream_integers", "NEIGHBOURS4, 32, NOTHING"),
    "words of a slot, places in a table": ("stream_integers", "TABLE_HALVES4, 32, NOTHING, true, true, 2"),
    "8 bytes of a slot": ("stream_integers", "PAIRS4, 32"),
    "16 bytes of a slot": ("stream_integers", "NEIGHBOURS4, 128, ZERO_POINTS"),
    "16 bytes, of a stage of others": ("linear_tile", "TileKbit<__half, 4, E4M4>, 8, 2, 2, 1, false"),
}
REGISTER = re.compile(r"%[a-z]+\d+")
# Loads by an address in the shared window, as those of stages are; the compiler's own have another one.
SHARED = re.compile(r"^(ld|ldmatrix\.\S+)\.shared\.\S+\s.*\[%r\d")
# Asking for a copy: bytes announced at a barrier, and the copies; or an arrival, where another warp waits for it.
REQUEST = re.compile(r"(mbarrier\.arrive|cp\.async\.c|cp\.async\.bulk\.tensor)")


def instance(kernel, begins):
    assert kb.linear  # with it the kernels of products are declared
    return next(
        (template, expression)
        for template in kernel_templates()
        if template.name == kernel
        for expression in template.instances()
        if expression.startswith(f"{kernel}<{begins}")
    )


def ptx(compiler, include, template, expression):
    """The instructions, with predicates in front left out."""
    source, options = offline(template, expression)
    program = compiler.createProgram(source, template.file, (), ())
    try:
        compiler.addNameExpression(program, expression)
        architecture = architecture_of(template.file) or "90"
        compiler.compileProgram(program, (*options, f"-I{include}", f"-arch=compute_{architecture}", "-ftz=true"))
        text = compiler.getPTX(program)
    finally:
        compiler.destroyProgram(program)
    lines = (text.decode() if isinstance(text, bytes) else text).splitlines()
    return [re.sub(r"^@!?%p\d+\s+", "", line.strip()) for line in lines]


def written_by(line):
    """Registers that an instruction writes, and those that it reads; nothing where it writes none."""
    if re.match(r"(st|bar|bra|mbarrier|cp|ret|red|prefetch|griddepcontrol|fence|\{)\b", line) or " " not in line:
        return [], []
    operands = line.split(None, 1)[1]
    target, _, rest = operands.partition("}" if operands.startswith("{") else ",")
    return REGISTER.findall(target), REGISTER.findall(rest)


def unordered(lines, asks="mbarrier.arrive.expect_tx"):
    """How often a stage is read and asked for anew, by lines that begin so, and the loads that none waits for."""
    sources, waiting = {}, set()
    for line in lines:
        targets, read = written_by(line)
        for target in targets:
            sources.setdefault(target, set()).update(read)
        if REQUEST.search(line):
            waiting.update(REGISTER.findall(line))
    reached, new = set(), waiting
    while new:
        reached |= new
        new = {register for each in new for register in sources.get(each, ())} - reached
    loads, stages, found = None, 0, []
    for line in lines:
        if "mbarrier.try_wait" in line:
            loads = []  # those before have been used
        elif loads is not None and SHARED.match(line):
            loads.append(line)
        elif line.startswith(asks) and loads:
            stages += 1
            found += [load for load in loads if not reached.intersection(written_by(load)[0])]
    return stages, found


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_copy_waits_for_every_load(nvrtc, kernel):
    from cuda.pathfinder import find_nvidia_header_directory

    lines = ptx(nvrtc, find_nvidia_header_directory("cudart"), *instance(*kernel))
    stages, found = unordered(lines, *(["mbarrier.arrive.shared"] if kernel[0] == "linear_tile" else []))
    assert stages and not found


def test_a_load_that_nothing_waits_for_is_found():
    lines = ["mbarrier.try_wait %p1, [%r1];", "ld.shared.u32 %r2, [%r1];", "ld.shared.v2.u32 {%r3, %r4}, [%r1+8];"]
    lines += ["or.b32 %r5, %r4, 64;", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r5;"]
    assert unordered(lines) == (1, [lines[1]])
