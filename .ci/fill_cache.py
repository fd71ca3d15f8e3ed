"""Compile all kernels for a GPU that is elsewhere: ``python .ci/fill_cache.py FOLDER --checkout PATH --site PATH``.

A machine with a GPU that is bare compiles for minutes before there is anything to run. FOLDER gets the files that CuPy
would keep there in ``~/.cupy/kernel_cache``: carried over and put into that folder, they are found. CuPy knows a kernel
by its source, its options, folders of headers among them, and the version of NVRTC. So here and there have the same
CuPy, NVRTC and CUDA headers (``pip install cupy-cuda13x nvidia-cuda-nvrtc nvidia-cuda-runtime`` of its versions), and
it is told where the checkout and Python's packages lie there. What is not met is compiled there as ever.

``--keep FOLDER`` keeps binaries by what they are made of: after a change only what has changed is compiled. ``--only
REGEX`` leaves out kernels whose "file: expression" it does not match, and ``--tree PATH`` takes the kernels of another
tree than this one, for a comparison there.
"""

import argparse
import functools
import hashlib
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cubins

# Folders of headers in the packages of Python, as CuPy lists them ahead of a module's own options and behind them.
_AHEAD = tuple(f"cupy/_core/include/cupy/_cccl/{name}" for name in ("cub", "thrust", "libcudacxx"))
_BEHIND = "cupy/_core/include", "nvidia/cu13/include"


def options_of(instance, site):
    """Those by which CuPy knows a kernel; `instance` has been listed where the checkout lies."""
    only = (f"-arch=sm_{instance.only}",) if instance.only else ()
    ahead, behind = ((f"-I{site}/{name}" for name in names) for names in (_AHEAD, _BEHIND))
    return (*ahead, *instance.options, *only, *behind, "-ftz=true")


@functools.cache
def _about_cupy(architecture):
    """What stands in every key: the compiler's own words about itself, CuPy's headers and their checksum."""
    from cupy._core import core
    from cupy.cuda import compiler

    words = compiler._preprocess("", (), architecture, "nvrtc")
    return compiler._get_nvrtc_version(), words, core._get_header_source(), core.CUPY_CACHE_KEY


def name_of(instance, site, architecture):
    """The file of a kernel in CuPy's cache."""
    from cupy.cuda import compiler

    version, words, headers, checksum = _about_cupy(architecture)
    about = architecture, options_of(instance, site), version, "nvrtc", f"-arch=sm_{architecture}", "cubin"
    key = f"{about} {words} {instance.source} {headers} {checksum}"
    key += f" ne{compiler._cache_payload_version} {instance.expression}"
    return compiler._hash_hexdigest(key.encode()) + ".cubin"


def compiled(instance, architecture):
    """A kernel as CuPy keeps it: the name that C++ gives it, and the binary."""
    import cupy
    from cupy.cuda import compiler, nvrtc

    here = Path(cupy.__file__).parent.parent
    program = nvrtc.createProgram(instance.source, instance.file, (), ())
    try:
        nvrtc.addNameExpression(program, instance.expression)
        options = *options_of(instance, here), f"-arch=sm_{architecture}", "--device-as-default-execution-space"
        nvrtc.compileProgram(program, options)
        names = [nvrtc.getLoweredName(program, instance.expression)]
        return compiler._encode_cache_payload(names, nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


def _keep(instance, architecture, path):
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_bytes(compiled(instance, architecture))
    beside.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--tree", type=Path, default=here, metavar="PATH", help="whose kernels (default: this one's)")
    parser.add_argument("--checkout", metavar="PATH", help="where that lies there (default: where it lies here)")
    parser.add_argument("--site", required=True, help="the folder of CuPy's package there, .../site-packages")
    parser.add_argument("--architecture", default="90", help="of the GPU there (default 90)")
    parser.add_argument("--keep", type=Path, default=cubins.folder() / "filled", metavar="FOLDER")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    tree = given.tree.resolve()
    fits = {"", f"{given.architecture}a"}
    wanted = [
        instance
        for instance in cubins.instances(tree)
        if instance.only in fits
        and instance.least <= int(given.architecture)
        and given.only.search(f"{instance.file}: {instance.expression}")
    ]
    version = hashlib.sha256("\0".join(map(str, _about_cupy(given.architecture))).encode()).hexdigest()[:16]
    kept = {each: given.keep / f"{version}-{given.architecture}-{cubins.source_hash(each)}.bin" for each in wanted}
    missing = {path: each for each, path in kept.items() if not path.exists()}
    for folder in (given.keep, given.folder):
        folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(wanted)} kernels, {len(missing)} to compile", flush=True)
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        todo = [pool.submit(_keep, each, given.architecture, path) for path, each in missing.items()]
        for each in todo:
            each.result()
    for instance, path in kept.items():
        moved = (option.replace(f"-I{tree}/", f"-I{given.checkout or tree}/", 1) for option in instance.options)
        there = replace(instance, options=tuple(moved))
        payload = path.read_bytes()
        checksum = hashlib.sha1(payload, usedforsecurity=False).hexdigest().encode()
        (given.folder / name_of(there, given.site, given.architecture)).write_bytes(checksum + payload)
    print(f"{len(kept)} files in {given.folder}")


if __name__ == "__main__":
    main()
