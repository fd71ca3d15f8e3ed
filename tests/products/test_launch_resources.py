"""What ptxas says of kernels in `.ci/kernels.lock`, beside the thread blocks that hosts launch: each has its registers
and its shared memory on every GPU."""

import functools
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from kbitcupy.products import (
    activations,
    integer_batch,
    integer_stream,
    integer_tile,
    integer_units,
    ternary_rows,
    ternary_stream,
)

LIST = Path(__file__).resolve().parent.parent.parent / ".ci" / "kernels.lock"
REGISTERS = 65536  # of a multiprocessor, and of a thread block
# Bytes of shared memory that a thread block can have: compute capability 8.0, 8.6, 9.0.
ROOMS = 163 << 10, 99 << 10, 227 << 10


@functools.cache
def listed(only=r"\S+"):
    """{(file, kernel): [(arguments, registers of a thread)]} of all architectures, or of one."""
    if not LIST.exists():
        pytest.skip("the list of kernels is not there")
    found = {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        match = re.match(rf"linear/(\S+)\.cu.*?: (\w+)(?:<(.*)>)? \| {only} \| \w+ (\d+) ", line)
        if match:
            found.setdefault((match[1], match[2]), []).append((match[3] or "", int(match[4])))
    return found


def taken(registers, threads):
    """Of a thread block: eight at a time of a thread, warps as a whole."""
    return -(-registers // 8) * 8 * -(-threads // 32) * 32


def test_what_is_taken():
    assert taken(128, 512) == taken(255, 256) == taken(121, 512) == REGISTERS
    assert taken(129, 512) > REGISTERS
    assert taken(255, 288) > REGISTERS


@pytest.mark.parametrize(
    ("flavour", "eights"),
    [(flavour, eights) for flavour in integer_stream._flavours() for eights in flavour.eights],
    ids=lambda value: value.text(0)[:-3] if isinstance(value, integer_stream.Flavour) else None,
)
def test_blocks_of_integer_stream(flavour, eights):
    """Those of every shape: with tokens of its own or none, of which the shared memory has room."""
    found = set()
    shapes = (16, 64, 132), (512, 512, 132), (5000, 4096, 132), (28672, 8192, 132), (5000, 12384, 16)
    owns = {0: (0, 1), 1: (0, 1, 3)}.get(eights, (0,))
    groups = (1, 2, 3, 8) if flavour.unit == 512 else (1,)
    for room, (rows, depth, processors), own, shares in itertools.product(ROOMS, shapes, owns, groups):
        cut = integer_stream.choose_cut(flavour, eights, rows, depth, processors, room, shares, own)
        if cut is not None:
            found.add(32 * cut.warps * cut.teams)
            assert cut.shared <= room
    assert found
    for text, registers in of("integer_stream", "stream_integers", flavour, eights):
        assert taken(registers, max(found)) <= REGISTERS, text
        assert taken(registers, 32 * integer_stream.most_warps(flavour, eights)) <= REGISTERS, text


def of(file, kernel, flavour, eights):
    """Instances of a flavour."""
    found = [each for each in listed()[file, kernel] if each[0] == flavour.text(eights)]
    assert found
    return found


def test_ternary_products_leave_registers_to_clusters_that_quantize():
    """Beside those of up to 8 tokens a block of the cluster of a token finds room, where it is launched early."""
    few = max(registers for _, registers in listed("sm_90")["cluster_tokens", "quantize_in_clusters"])
    few = taken(few, activations._FEW_SIZES.ROW_THREADS)
    for _, registers in listed("sm_90")["ternary_rows", "rows_ternary"]:
        assert taken(registers, ternary_rows.SIZES.ROW_THREADS) + few <= REGISTERS
    for _, registers in listed("sm_90")["ternary_rows_few", "rows_ternary_early"]:
        assert taken(registers, ternary_rows.FEW_SIZES.ROW_THREADS) + few <= REGISTERS
    for text, registers in listed("sm_90")["ternary_stream", "stream_ternary"]:
        if re.search(r", 8, Integers$", text):
            assert 2 * taken(registers, ternary_stream._STREAM_SIZES.STREAM_THREADS) + few <= REGISTERS


def test_products_leave_registers_to_blocks_that_quantize():
    """Beside a product of tokens with scales of 32 a block of few tokens finds room, as both are compiled here; not of
    sixteen tokens and inner scales, with which a product takes all registers.
    """
    few = max(registers for _, registers in listed()["integer_tokens", "quantize_few_integers"])
    few = of_scheduler(few, integer_stream._SIZES.FEW_THREADS)
    assert few <= integer_stream._SIZES.FEW_REGISTERS // 4
    for flavour in integer_stream._flavours():
        for eights in flavour.eights if flavour.blocked else ():
            if flavour.added == "INNER" and eights == 2:
                continue
            threads = 32 * integer_stream.most_warps(flavour, eights)
            for text, registers in of("integer_stream", "stream_integers", flavour, eights):
                assert of_scheduler(registers, threads) + few <= REGISTERS // 4, text


def test_products_that_share_k_leave_registers_to_blocks_that_quantize():
    found = listed()["integer_stream_split", "stream_integers"]
    assert {text for text, _ in found} == {f.text(2) for f in integer_stream._flavours() if f.splits}
    for text, registers in found:
        assert taken(registers, 256) + integer_stream._SIZES.FEW_REGISTERS <= REGISTERS, text


def of_scheduler(registers, threads):
    """Of a thread block, on the one of four schedulers that has most of its warps: each has registers of its own."""
    return taken(registers, 32) * -(-threads // 128)


def test_products_leave_registers_to_blocks_that_quantize_rows():
    """The same beside those of up to eight tokens with one scale each, where a block may be there early."""
    few = max(registers for _, registers in listed("sm_90")["integer_tokens", "quantize_few_rows"])
    few = of_scheduler(few, integer_stream._SIZES.ROW_THREADS)
    assert few <= integer_stream._SIZES.ROW_REGISTERS // 4
    found = [flavour for flavour in integer_stream._flavours() if flavour.by_rows]
    assert found
    for text, registers in listed("sm_90")["integer_stream", "stream_integers"]:
        if text in [flavour.text(1) for flavour in found]:
            assert of_scheduler(registers, integer_stream._SIZES.STREAM_THREADS) + few <= REGISTERS // 4, text


def test_blocks_of_integer_batch():
    """Registers that are handed from warps that copy to warps that multiply are there, or these would wait for ever."""
    for text, registers in listed()["integer_batch_sm90a", "batch_integers"]:
        _, tiles, inner = text.split(", ")
        cut = next(cut for cut in integer_batch.CUTS.values() if cut.most == int(tiles))
        copiers, warps = integer_batch._COPIERS, cut.warps(inner == "true")
        multiplies = warps * (232 if warps == integer_batch._WARPS else 104)
        assert copiers * 40 + multiplies <= registers * (copiers + warps) <= REGISTERS // 32, text
    of_barriers = 16 * integer_batch.SIZES.BATCH_STAGES
    for cut in integer_batch.CUTS.values():
        for blocked, inner in ((False, False), (True, False), (True, True)):
            assert cut.packed(blocked, inner)[1] + of_barriers <= 227 << 10


def test_blocks_of_integer_units():
    """The same of warps that have 56 and 224 registers; barriers, one of them for sums of others, and constants stand
    beside."""
    kernels = ("integer_units_sm90a", "multiply_units"), ("spread_units_sm90a", "spread_units")
    beside = 24 * integer_units.SIZES.UNITS_STAGES + 8 + 2 * 256 + 128  # at a multiple of 128
    for text, registers in itertools.chain.from_iterable(listed()[kernel] for kernel in kernels):
        assert 4 * 56 + 8 * 224 <= registers * 12 <= REGISTERS // 32, text
        assert integer_units.shared_bytes(text.startswith("true")) + beside <= 227 << 10


def test_blocks_of_integer_tile():
    registers = {}
    for text, count in listed()["integers_sm90a", "wgmma_integers"]:
        threads = int(re.search(r"Layout<(\d+)", text)[1])
        registers.setdefault(threads, set()).add(count)
    assert registers.keys() == {cut.threads for cut in integer_tile.CUTS}
    for threads, counts in registers.items():
        assert all(taken(count, threads) <= REGISTERS for count in counts)


@pytest.mark.parametrize(
    ("file", "threads"),
    [
        ("gguf_stream", 512),
        ("small_batch", 512),
        ("ternary_rows", ternary_rows.SIZES.ROW_THREADS),
        ("ternary_rows_few", ternary_rows.FEW_SIZES.ROW_THREADS),
        ("ternary_bytes", ternary_rows.SIZES.ROW_THREADS),
        ("ternary_bytes_few", ternary_rows.FEW_SIZES.ROW_THREADS),
        ("block_tokens", activations._BLOCK_SIZES.ROW_THREADS),
    ],
)
def test_blocks_of_other_products(file, threads):
    """The most threads that their hosts make."""
    kernels = [each for (name, _), some in listed().items() if name == file for each in some]
    assert kernels
    for text, registers in kernels:
        assert taken(registers, threads) <= REGISTERS, text


@pytest.mark.parametrize("room", [227 << 10, 99 << 10])
def test_shared_memory_of_ternary_rows(monkeypatch, room):
    """What launches ask for and what kernels declare by name, 16 warps in each: barriers; and sums of float tokens."""
    launched = []
    monkeypatch.setattr(ternary_rows, "shared_memory", lambda device: room)
    monkeypatch.setattr(ternary_rows, "capability", lambda device: 90)
    monkeypatch.setattr(ternary_rows, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(ternary_rows, "_launch", lambda template, values, shared, *_: launched.append(shared))
    barriers, sums = 16 * 8 * ternary_rows.SIZES.MOST_ROW_STAGES, 8 * (ternary_rows.SIZES.MOST_SLOTS + 2 * 16)
    dtype, rows = np.dtype("float16"), 4 * ternary_rows.LEAST_ROWS
    for named, function in (
        (barriers, functools.partial(ternary_rows.rows_of.__wrapped__, group=0)),
        (barriers, functools.partial(ternary_rows.rows_of.__wrapped__, group=64)),
        (barriers + 4 * ternary_rows.TOKENS, ternary_rows.bytes_rows_of.__wrapped__),
        (barriers + sums, ternary_rows.float_rows_of.__wrapped__),
    ):
        launched.clear()
        for tokens, lines in itertools.product(range(1, ternary_rows.TOKENS + 1), range(1, 250)):
            function(dtype, tokens, rows, 512 * lines, device=0)
        assert len(launched) > 60
        assert max(launched) + ternary_rows.ALIGNMENT + named <= room


def test_shared_memory_of_integer_tile():
    """The same: barriers, scales and sums of tokens, and what turns results."""
    for bits, kinds in integer_tile._KINDS.items():
        for unit, each in kinds:
            for cut in integer_tile.cuts(bits, unit, each):
                barriers = 16 * (cut.stages(bits, unit, each) + integer_tile.SIZES.TABLES)
                whole = integer_tile.Codes(bits, unit, each=each).whole
                named = barriers + cut.row_groups * (cut.tokens * (8 if whole else 4) + 4096) + 16
                assert cut.shared(bits, unit, each) + named <= 227 << 10
