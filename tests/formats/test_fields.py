"""Blocks of bytes and planes of their fields: NumPy, and the kernels in a grid of threads of the host, bit for bit."""

import ctypes
import os

import numpy as np
import pytest
from host import compiled as host

from kbitcupy.backend.compile import kernel_folder, source
from kbitcupy.errors import FormatError
from kbitcupy.formats import fields as module
from kbitcupy.formats.fields import Field, block_bytes, join_blocks, split_blocks

# Every size of block that GGUF has, and others: fields of whole vectors, of a few bytes, and of neither.
LAYOUTS = {
    "q4_0": (Field("d", "float16", 1), Field("qs", "uint8", 16)),
    "q8_0": (Field("d", "float16", 1), Field("qs", "int8", 32)),
    "q5_1": (Field("d", "float16", 2), Field("qh", "uint32", 1), Field("qs", "uint8", 16)),
    "q3_k": (Field("hmask", "uint8", 32), Field("qs", "uint8", 64), Field("scales", "uint8", 12),
             Field("d", "float16", 1)),
    "q4_k": (Field("d", "float16", 2), Field("scales", "uint8", 12), Field("qs", "uint8", 128)),
    "q6_k": (Field("ql", "uint8", 128), Field("qh", "uint8", 64), Field("scales", "int8", 16),
             Field("d", "float16", 1)),
    "q8_k": (Field("d", "float32", 1), Field("qs", "int8", 256), Field("bsums", "int16", 16)),
    "tq1_0": (Field("qs", "uint8", 48), Field("qh", "uint8", 4), Field("d", "float16", 1)),
    "iq3_s": (Field("d", "float16", 1), Field("qs", "uint8", 64), Field("qh", "uint8", 8), Field("signs", "uint8", 32),
              Field("scales", "uint8", 4)),
    "mxfp4": (Field("scales", "uint8", 1), Field("qs", "uint8", 16, split=32)),
    "nvfp4": (Field("scales", "uint8", 4), Field("qs", "uint8", 32, split=16)),
    "one": (Field("bytes", "uint8", 1),),
    "odd": (Field("a", "uint8", 3), Field("b", "uint8", 32), Field("c", "uint8", 5), Field("d", "uint8", 16)),
}  # fmt: skip


def blocks_of(fields, count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, block_bytes(fields)), dtype=np.uint8)


def neighbours(codes, split):
    """Bytes of split codes in the order of planes, one run at a time, from the text of the format."""
    out = []
    for run in codes.reshape(-1, split // 2):
        elements = [*(run & 15), *(run >> 4)]
        out += [int(low) | int(high) << 4 for low, high in zip(elements[::2], elements[1::2], strict=True)]
    return np.array(out, np.uint8)


def expected(fields, blocks):
    """Bytes of the planes, each field by itself."""
    planes, start = {}, 0
    for field in fields:
        column = blocks[:, start : start + field.nbytes].tobytes()
        if field.split:
            column = neighbours(np.frombuffer(column, np.uint8), field.split).tobytes()
        planes[field.name] = column
        start += field.nbytes
    return planes


@pytest.mark.parametrize("count", [0, 1, 7, 5000])
@pytest.mark.parametrize("name", LAYOUTS)
def test_numpy(name, count):
    fields = LAYOUTS[name]
    blocks = blocks_of(fields, count)
    planes = split_blocks(fields, blocks)
    assert {key: plane.tobytes() for key, plane in planes.items()} == expected(fields, blocks)
    assert all(planes[f.name].dtype == f.dtype and planes[f.name].shape == (count * f.entries,) for f in fields)
    assert np.array_equal(join_blocks(fields, planes), blocks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_numpy_from_any_byte(name):
    fields = LAYOUTS[name]
    memory = np.random.default_rng(1).integers(0, 256, 3 + 40 * block_bytes(fields), dtype=np.uint8)
    memory.flags.writeable = False
    planes = split_blocks(fields, memory[3:])
    assert {key: p.tobytes() for key, p in planes.items()} == expected(fields, memory[3:].reshape(40, -1))


# ---- the kernels -----------------------------------------------------------------------------------------------------

ENTRY = """
extern "C" void {name}(unsigned grid, unsigned char* raw, long long blocks, const void* fields) {{
    launch(grid, 1, THREADS, [&] {{ {name}(raw, blocks, *static_cast<const BlockFields*>(fields)); }});
}}
"""


@pytest.fixture(scope="module")
def compiled():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    return library()


def library(fault=("", "")):
    (text,) = {source(template) for template in module._TEMPLATES.values()}
    assert fault[0] in text
    return host.build(
        '#include "grid.h"\n' + text.replace(*fault) + "".join(ENTRY.format(name=n) for n in module._TEMPLATES)
    )


class Room:
    """Memory that begins so many bytes behind a multiple of 16, between bytes that nobody may write."""

    def __init__(self, nbytes, offset):
        self.memory = np.full(nbytes + 96, 0xA5, np.uint8)
        self.start = -self.memory.ctypes.data % 16 + 32 + offset
        self.bytes = self.memory[self.start : self.start + nbytes]

    def is_whole(self):
        return (self.memory[: self.start] == 0xA5).all() and (self.memory[self.start + self.bytes.size :] == 0xA5).all()


def run(built, name, fields, raw, planes, count):
    addresses = [plane.bytes.ctypes.data for plane in planes.values()]
    packed = module._POINTERS.pack(*addresses, *(0,) * (module.MAX_FIELDS - len(fields))) + module._described(fields)
    grid = -(-count // module._tile(fields))
    arguments = ctypes.c_uint(grid), ctypes.c_void_p(raw.bytes.ctypes.data), ctypes.c_longlong(count)
    getattr(built, name)(*arguments, ctypes.c_char_p(packed))


def round_trip(built, fields, count, offset=0, shift=0):
    """Split and join on the host; `offset` of the blocks and `shift` of the planes that are joined, in bytes."""
    blocks = blocks_of(fields, count, seed=2)
    raw = Room(blocks.size, offset)
    raw.bytes[...] = blocks.reshape(-1)
    planes = {field.name: Room(count * field.nbytes, 0) for field in fields}
    run(built, "split_fields", fields, raw, planes, count)
    assert {key: plane.bytes.tobytes() for key, plane in planes.items()} == expected(fields, blocks)
    shifted = {key: Room(plane.bytes.size, shift) for key, plane in planes.items()}
    for key, plane in planes.items():
        shifted[key].bytes[...] = plane.bytes
    again = Room(blocks.size, offset)
    run(built, "join_fields", fields, again, shifted, count)
    assert np.array_equal(again.bytes, raw.bytes)
    assert all(room.is_whole() for room in (raw, again, *planes.values(), *shifted.values()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_kernels(compiled, name):
    fields = LAYOUTS[name]
    tile = module._tile(fields)
    assert all(tile * field.nbytes % 16 == 0 for field in fields)
    assert tile * block_bytes(fields) <= module._SIZES.TILE_BYTES
    round_trip(compiled, fields, 3 * tile + 5)


@pytest.mark.parametrize(("offset", "shift"), [(1, 0), (2, 2), (3, 4), (8, 8), (15, 1)])
@pytest.mark.parametrize("name", ["q4_0", "q3_k", "q4_k", "mxfp4", "nvfp4", "odd"])
def test_kernels_at_any_byte(compiled, name, offset, shift):
    fields = LAYOUTS[name]
    round_trip(compiled, fields, module._tile(fields) + 3, offset, shift)


@pytest.mark.parametrize("fields", [(Field("a", "uint8", 2001),), (Field("a", "uint8", 1),) * 6])
def test_blocks_that_are_too_large_for_the_kernels(fields):
    with pytest.raises(FormatError, match=r"up to \d+ bytes and 5 fields: call .get\(\) first"):
        module._described(fields)


FAULTS = [
    ("bytes = at % 4", "bytes = at % 2", "odd", 3),
    ("edges >> 16", "edges", "q4_0", 0),
    ("b < ahead ?", "b <= ahead ?", "mxfp4", 0),
    ("run == 32 ? v.y : v.z", "v.y", "nvfp4", 0),
    ("min(span.first * VECTOR, span.end)", "span.first * VECTOR", "one", 1),
    ("begin + i * THREADS < span.last) to", "begin + i * THREADS + 1 < span.last) to", "q4_k", 0),
]


@pytest.mark.parametrize(("right", "wrong", "name", "offset"), FAULTS)
def test_a_planted_fault_is_found(compiled, right, wrong, name, offset):
    assert right in (kernel_folder() / "fields.cu").read_text()
    built = library((right, wrong))
    with pytest.raises(AssertionError):
        round_trip(built, LAYOUTS[name], 5, offset)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_numpy_and_cuda_agree(cupy, name):
    """Blocks that begin anywhere, and planes that do."""
    fields = LAYOUTS[name]
    for count, offset in ((0, 0), (1, 3), (777, 1), (5000, 0), (3 * module._tile(fields) + 5, 14)):
        memory = np.random.default_rng(offset).integers(0, 256, offset + count * block_bytes(fields), dtype=np.uint8)
        blocks = memory[offset:]
        planes = split_blocks(fields, cupy.asarray(memory)[offset:])
        for key, plane in split_blocks(fields, blocks).items():
            assert planes[key].dtype == plane.dtype and np.array_equal(
                planes[key].get().view(np.uint8), plane.view(np.uint8)
            )
        assert np.array_equal(join_blocks(fields, planes).get().reshape(-1), blocks)
        behind = {field.name: planes[field.name][field.entries :] for field in fields}
        assert np.array_equal(join_blocks(fields, behind).get().reshape(-1), blocks[block_bytes(fields) :])
