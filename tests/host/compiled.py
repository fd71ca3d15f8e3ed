"""Storey-1 decoders on the host: compiled by its C++ compiler through ``shim.h``, and compared with NumPy bit for bit.

``python tests/host/compiled.py [--blocks 1000000] [FORMAT ...]`` compares as many random blocks as one likes.
"""

import argparse
import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import kbitcupy as kb
from kbitcupy.backend.compile import kernel_folder
from kbitcupy.backend.structs import declarations
from kbitcupy.errors import FormatError
from kbitcupy.formats.base import samples

HERE = Path(__file__).resolve().parent
OPTIONS = ("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas",
           "-fPIC", "-shared")  # fmt: skip
#: To compile takes longer than the tests run: only for many blocks code is made faster.
LEVEL = ["-O0"]


@functools.cache
def compiler():
    """The C++ compiler: ``CXX``, else the first of c++, g++ and clang++; None where there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def _own_folder():
    return tempfile.TemporaryDirectory(prefix="kbitcupy-host-")


@functools.cache
def _precompiled():
    """A folder where g++ finds what it has made of ``shim.h`` and its headers: half the time of a small text.

    Other compilers, and any that sees that it does not fit, go on to the header itself.
    """
    name = hashlib.sha256("\0".join((compiler(), *LEVEL)).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("KBITCUPY_HOST_LIBRARIES") or _own_folder().name, f"shim-{name}")
    if not (folder / "shim.h.gch").exists():
        folder.mkdir(exist_ok=True)
        made = folder / f"{os.getpid()}.gch"
        command = [compiler(), *OPTIONS, *LEVEL, f"-I{HERE}", "-x", "c++-header", str(HERE / "shim.h"), "-o", str(made)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            made.replace(folder / "shim.h.gch")
    return folder


@functools.cache
def build(source, folders=()):
    """A shared library of a C++ text that begins with ``shim.h``; headers are looked for in `folders`, then ours.

    Processes of a run that have KBITCUPY_HOST_LIBRARIES, a folder, find there what another one has compiled.
    """
    included = [f"-I{folder}" for folder in (*folders, HERE, kernel_folder())]
    text = f'#include "shim.h"\n{source}'
    name = hashlib.sha256("\0".join((compiler(), *LEVEL, *included, text)).encode()).hexdigest()[:32]
    library = Path(os.environ.get("KBITCUPY_HOST_LIBRARIES") or _own_folder().name, f"{name}.so")
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            file, made = Path(folder, "source.cpp"), Path(library.parent, f"{name}.{os.getpid()}")
            file.write_text(text)
            command = [compiler(), *OPTIONS, *LEVEL, f"-I{_precompiled()}", *included, str(file), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
            made.replace(library)
    return ctypes.CDLL(str(library))


@functools.cache
def _library(header, structs, folders, declared):
    functions = [
        f'extern "C" int decode_{i}(const void* argument, long long members, float* out) '
        f"{{ return decode_all<{struct}>(argument, members, out); }}\n"
        f'extern "C" long long bytes_{i}() {{ return sizeof(Argument<{struct}>); }}\n'
        f'extern "C" int together_{i}() {{ return Together<{struct}>::COUNT; }}'
        for i, struct in enumerate(structs)
    ]
    ahead = f'{declarations(declared)}\n#include "{header}"\n#include "decode.h"\n'
    return build(ahead + "\n".join(functions), folders)


class Compiled:
    """The decoder of one format.

    Parameters
    ----------
    decoder : kbitcupy.formats.decoders.Decoder
        Which.
    structs : tuple of str
        The decoders of its header that are compiled with it, in one go.
    folders : tuple of Path, default ()
        Where headers are looked for first.
    """

    def __init__(self, decoder, structs, folders=()):
        self.decoder = decoder
        library = _library(decoder.header, structs, (*folders, *filter(None, [decoder.folder])), decoder.declared)
        number = structs.index(decoder.struct)
        self._decode, self.bytes = getattr(library, f"decode_{number}"), getattr(library, f"bytes_{number}")()
        assert (getattr(library, f"together_{number}")() > 1) == decoder.together, f"{decoder.struct}: decode_together"
        self._decode.argtypes = (ctypes.c_char_p, ctypes.c_longlong, ctypes.c_void_p)

    def __call__(self, planes, shape, members=1):
        """float32 of an array of `shape`, or of a stack of such arrays."""
        out = np.full((members, *shape), np.float32(7))
        argument = self.decoder.argument(planes, shape, members)
        assert len(argument) == self.bytes, f"Argument<{self.decoder.struct}> has {self.bytes} bytes, not these"
        good = self._decode(argument, members, out.ctypes.data)
        assert good, f"{self.decoder.struct} reads past a plane of an array of shape {shape}"
        return out


class Walled:
    """Arrays that end where readable memory ends, so that a read beyond is found.

    ``walled(array)`` is a copy.
    """

    def __init__(self):
        self._maps = []
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def __call__(self, array):
        size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, size + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert self._protect(address + size, mmap.PAGESIZE, 0) == 0
        self._maps.append(pages)
        copy = np.frombuffer(pages, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
        copy[...] = array
        return copy


# ---- planes of random bytes ------------------------------------------------------------------------------------------

_SPECIAL = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], "u4")


def random_plane(rng, spec):
    """Random bytes; of floats many are of ordinary size and some are special."""
    dtype = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    plane = rng.integers(0, 256, (*spec.shape, dtype.itemsize), np.uint8).view(dtype).reshape(spec.shape)
    kind = rng.integers(0, 8, spec.shape)
    if dtype == np.float32:
        ordinary = np.exp2(rng.uniform(-30, 30, spec.shape)).astype(np.float32)
        small = np.exp2(rng.uniform(-130, -120, spec.shape)).astype(np.float32)
        special = rng.choice(_SPECIAL, spec.shape) | rng.integers(0, 2, spec.shape).astype(np.uint32) << 31
        plane = np.select([kind < 4, kind < 5, kind < 6], [ordinary, small, special.view(np.float32)], plane)
    elif dtype.kind == "i" and dtype.itemsize == 4:
        plane = np.where(kind < 6, rng.integers(-300, 300, spec.shape), plane)
    return np.ascontiguousarray(plane, dtype)


def random_planes(rng, format, shape):
    """The planes of an array of `shape`, each a `random_plane`."""
    return {name: random_plane(rng, spec) for name, spec in format.planes(shape).items()}


def different(a, b):
    """How many numbers differ in their bits; any NaN is equal to any NaN, and 0 to -0."""
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b)) | ((a == 0) & (b == 0))
    return int(same.size - np.count_nonzero(same))


def decoded_by_numpy(format, planes, shape):
    """What the reference gives."""
    out = np.empty(shape, np.float32)
    with np.errstate(all="ignore"):
        format.decode(planes, out)
    return out


def fits(format, shape):
    """Whether an array of `shape` can have the format."""
    try:
        format.check_shape(shape)
        format.planes(shape)
    except FormatError:
        return False
    return True


# ---- which formats ---------------------------------------------------------------------------------------------------

#: Option sets beside those that formats name: the largest and the oddest blocks, tables from planes.
MORE = [
    "kbit4:codebook=custom,absmax=float32", "kbit8:absmax=e4m4", "kbit8:codebook=custom,absmax=float32",
    "nf4:block=4096", "table4:codebook=custom,double_quant=true,block=32", "dynamic8:block=16", "dynamic8:block=4096",
    *(
        f"{name}:block=3{rest}"
        for name in ("int8", "uint8", "int4", "uint4")
        for rest in ("", ",zero=int", ",zero=float", ",zero=float,scale_dtype=bfloat16", ",scale_dtype=float16")
    ),
    *(f"{name}:granularity=channel:-1" for name in ("int8", "uint4")),
]  # fmt: skip


def all_formats():
    """Every registered format that has a decoder, with each of its option sets, as texts."""
    own = [str(format) for name in kb.list_formats() for format in samples(name)]
    return [text for text in dict.fromkeys((*own, *MORE)) if kb.get_format(text).decoder is not None]


@functools.cache
def structs_of(header):
    """The decoders of one header, which are compiled together."""
    decoders = [kb.get_format(text).decoder for text in all_formats()]
    return tuple(dict.fromkeys(decoder.struct for decoder in decoders if decoder.header == header))


def compiled(format):
    """The compiled decoder of a format."""
    return Compiled(format.decoder, structs_of(format.decoder.header))


def many_blocks(format, blocks):
    """A shape of about so many blocks, 2^22 elements at the most, that is no whole number of tiles."""
    size = max(format.block, 32)
    rows = max(1, min(blocks, (1 << 22) // size) // 8)
    return next(shape for shape in ((rows, 8 * size + 3), (rows, 8 * size)) if fits(format, shape))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("formats", nargs="*", default=None)
    options = parser.parse_args()
    LEVEL[0] = "-O1"
    wrong = 0
    for text in options.formats or all_formats():
        format, rng, done, differ = kb.get_format(text), np.random.default_rng(options.seed), 0, 0
        while done < options.blocks:
            shape = many_blocks(format, options.blocks - done)
            planes = random_planes(rng, format, shape)
            found = compiled(format)(planes, shape)[0]
            differ += different(decoded_by_numpy(format, planes, shape), found)
            done += -(-found.size // max(format.block, 32))
        print(f"{text}: {done} blocks, {differ} numbers differ", flush=True)
        wrong += differ
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
