"""What `sass.py` and `compile_kernels.py` share: the kernels of a tree, what they are made of, and their binaries.

A tree is asked for its kernels in a process of its own, so that two trees can be compared. A binary is known by the
hash of its whole source (the file, every header that it reaches, the options, the expression), the architecture and
the version of NVRTC: comments, empty space and the names of files and folders do not count.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import re
import sqlite3
import struct
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

# Run in a tree's own process: one JSON object an instance.
_LIST = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
import kbitcupy.affine
try:
    import kbitcupy.gguf  # these are loaded when they are first asked for
    import kbitcupy.products.functions
except ModuleNotFoundError:
    pass
from kbitcupy.formats.base import kernel_templates
for name in ("backend.compile", "backend.cuda", "_cuda"):
    try:
        compiler = importlib.import_module("kbitcupy." + name)
        break
    except ModuleNotFoundError as error:
        if not error.name.startswith("kbitcupy." + name.partition(".")[0]):
            raise
if hasattr(compiler, "offline"):  # source and options in one piece
    request = compiler.offline
else:
    def request(template, expression):
        source = (compiler.kernel_folder() / template.file).read_text()
        return source, compiler.options()
for template in kernel_templates():
    for number, expression in enumerate(template.instances()):
        source, options = request(template, expression)
        print(json.dumps({
            "file": getattr(template, "label", template.file), "expression": expression,
            "template": template.name, "hot": template.hot,
            "only": compiler.architecture_of(template.file), "least": getattr(template, "least", 0),
            "first": number == 0, "source": source, "options": list(options),
        }))
"""


@dataclass(frozen=True)
class Instance:
    """A kernel of a tree.

    Parameters
    ----------
    file, expression, template : str
        File in ``kernels/`` (``blocks.cu with formats/kbit.cuh`` where a header says which format), C++ name
        expression, and its name without arguments.
    hot : bool
        Whether it must not spill.
    only : str
        The one architecture that it is for, or "".
    least : int
        The oldest architecture on which its body is not empty, or 0.
    first : bool
        Whether it is the first instance of its template.
    source : str
        What NVRTC gets.
    options : tuple of str
        ... and its options.
    """

    file: str
    expression: str
    template: str
    hot: bool
    only: str
    least: int
    first: bool
    source: str
    options: tuple[str, ...]

    @property
    def name(self):
        """How lists call it."""
        return f"{self.file}: {self.expression}"


@dataclass
class Binary:
    """A compiled kernel.

    Parameters
    ----------
    instructions, registers, stack, stores, loads : int
        Bytes of code over 16; of ptxas: registers a thread, bytes of stack frame, of spill stores and of spill loads.
    cubin : bytes
        The file.
    error : str
        What NVRTC said where it refused; the rest is empty then.
    """

    instructions: int = 0
    registers: int = 0
    stack: int = 0
    stores: int = 0
    loads: int = 0
    cubin: bytes = field(default=b"", repr=False)
    error: str = ""

    @functools.cached_property
    def text(self):
        """Hash of the machine code, and of the constants that it names.

        Bank 0 holds the arguments, which only a launch knows, and bank 4 addresses of all variables there are, used
        or not.
        """
        found = [data for name, data in _sections(self.cubin) if re.match(r"\.text|\.nv\.constant[1-3]", name)]
        return hashlib.sha256(b"".join(sorted(found))).hexdigest()

    @property
    def spills(self):
        """Whether memory stands in for registers."""
        return bool(self.stack or self.stores or self.loads)


def instances(tree):
    """Every instance of every template of a tree, each once; hot when one of its templates is."""
    done = subprocess.run(
        [sys.executable, "-c", _LIST, str(tree)], stdout=subprocess.PIPE, text=True, cwd=tree, check=True
    )
    found = {}
    for line in done.stdout.splitlines():
        instance = Instance(**{**json.loads(line), "options": tuple(json.loads(line)["options"])})
        before = found.get(instance.name)
        if before is None or (instance.hot and not before.hot):
            found[instance.name] = instance
    return list(found.values())


# ---- what a kernel is made of ----------------------------------------------------------------------------------------

_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)
_INCLUDE = re.compile(r"^ ?# ?include (\S+)", re.MULTILINE)
_NAMED = re.compile(r'^ ?# ?define (\w+) (".*")$', re.MULTILINE)


def _plain(text):
    """Source without comments, empty lines, and what only says where it stood."""
    text = _COMMENT.sub(lambda found: found[1] or " ", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#line"))


@functools.cache
def _plain_file(path):
    return _plain(path.read_text(encoding="utf-8"))


def _reached(text, folders, named, seen):
    """The plain text and all of ours that it includes, each file once; what stands in <> is the toolkit's."""
    named = {**named, **dict(_NAMED.findall(text))}
    yield text
    for spelled in _INCLUDE.findall(text):
        spelled = named.get(spelled, spelled)
        if spelled.startswith("<"):
            continue
        path = next(
            (folder / spelled.strip('"') for folder in folders if (folder / spelled.strip('"')).is_file()), None
        )
        if path is None:
            raise FileNotFoundError(f"#include {spelled} is in none of {', '.join(map(str, folders))}")
        path = path.resolve()
        if path not in seen:
            seen.add(path)
            yield from _reached(_plain_file(path), (path.parent, *folders), named, seen)


def source_hash(instance):
    """The hash of everything of ours that decides a binary, but for the architecture."""
    folders, named, options = [], {}, []
    for option in instance.options:
        if option.startswith("-I"):
            folders.append(Path(option[2:]))
        elif not option.startswith("-DKBIT_HEADERS="):  # for CuPy's cache on disk; the headers are read here
            options.append(option)
        if option.startswith("-D"):
            name, _, value = option[2:].partition("=")
            named[name] = value
    texts = _reached(_plain(instance.source), tuple(folders), named, set())
    return hashlib.sha256("\0".join([*texts, *options, instance.expression]).encode()).hexdigest()[:16]


# ---- compiling -------------------------------------------------------------------------------------------------------

_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@functools.cache
def nvrtc_version():
    """Of the package, where there is one: releases of one version differ in their code too."""
    from cupy.cuda import nvrtc

    for package in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "{}.{}".format(*nvrtc.getVersion())


def build(instance, architecture):
    """Compile for ``sm_<architecture>``; what NVRTC refuses is a Binary with an error."""
    from cuda.pathfinder import find_nvidia_header_directory
    from cupy.cuda import nvrtc

    include = find_nvidia_header_directory("cudart")
    if include is None:
        raise FileNotFoundError("the CUDA headers are not installed: pip install -e '.[compile]'")
    options = (
        *(option for option in instance.options if not option.startswith("-DKBIT_HEADERS=")),
        f"-I{include}",
        f"-arch=sm_{architecture}",
        "-ftz=true",  # as CuPy has it
        "--no-cache",  # a binary from NVRTC's own cache comes without ptxas' log
        "--ptxas-options=-v",
    )
    program = nvrtc.createProgram(instance.source, instance.file, (), ())
    try:
        nvrtc.addNameExpression(program, instance.expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            return Binary(error=f"{error}\n{nvrtc.getProgramLog(program)}")
        cubin, log = nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)  # CuPy drops the last byte, a NUL
    finally:
        nvrtc.destroyProgram(program)
    # A device function that is not inlined has lines of its own: the worst of all counts.
    frames = [tuple(map(int, found)) for found in _FRAME.findall(log)]
    registers = [int(found) for found in _REGISTERS.findall(log)]
    if not frames or not registers:
        return Binary(error=f"ptxas reported no registers or no stack frame:\n{log}")
    stack, stores, loads = map(max, zip(*frames, strict=True))
    code = [data for name, data in _sections(cubin) if name.startswith(".text")]
    return Binary(sum(map(len, code)) // 16, max(registers), stack, stores, loads, cubin)


def _sections(elf):
    """Name and content of each section of an ELF file of 64 bits; none of what was not compiled."""
    if not elf:
        return
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    for head in heads:
        start = heads[names][4] + head[0]
        yield elf[start : elf.index(b"\0", start)].decode(), elf[head[4] : head[4] + head[5]]


# ---- what has been compiled before -----------------------------------------------------------------------------------


class Store:
    """Binaries on disk, by the hash of what they are made of; several processes may use it at once."""

    def __init__(self, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with self._open() as database:
            database.execute("create table if not exists binaries (key text primary key, about text, cubin blob)")

    def _open(self):
        return sqlite3.connect(self._path, timeout=60)

    def get(self, key):
        with self._open() as database:
            row = database.execute("select about, cubin from binaries where key = ?", (key,)).fetchone()
        if row is None:
            return None
        about = {name: value for name, value in json.loads(row[0]).items() if name != "text"}
        return Binary(**about, cubin=zlib.decompress(row[1]))

    def put(self, key, binary):
        about = {name: value for name, value in asdict(binary).items() if name != "cubin"}
        with self._open() as database:
            row = (key, json.dumps(about), zlib.compress(binary.cubin))
            database.execute("insert or replace into binaries values (?, ?, ?)", row)


def folder():
    """Where binaries and unpacked trees are kept between runs."""
    return Path(os.environ.get("KBITCUPY_CI_CACHE") or Path.home() / ".cache" / "kbitcupy-ci")


def key_of(instance, architecture):
    """What a binary is known by: its source, its architecture, and the compiler."""
    return hashlib.sha256(f"{source_hash(instance)} {architecture} {nvrtc_version()}".encode()).hexdigest()[:16]


def _build_into(job):
    path, key, instance, architecture = job
    store = Store(path)
    if store.get(key) is None:
        binary = build(instance, architecture)
        _plain_file.cache_clear()
        if key_of(instance, architecture) != key:
            raise RuntimeError(f"{instance.name}: its headers changed while it was compiled; start again")
        store.put(key, binary)
    return key


def build_all(wanted, workers=None, progress=None):
    """Binaries of (instance, architecture) pairs, by name and architecture; what the store has is not built again.

    Parameters
    ----------
    wanted : iterable of (Instance, int or str)
        What to build.
    workers : int, optional
        Processes; by default one for each core.
    progress : callable, optional
        Called with how many are built and how many are to build.

    Returns
    -------
    dict of (str, str) to Binary
    """
    path = folder() / "binaries.sqlite"
    store = Store(path)
    keys = {(i.name, str(a)): (key_of(i, a), i, a) for i, a in wanted}
    jobs = {key: (path, key, i, a) for key, i, a in keys.values() if store.get(key) is None}
    if jobs:
        # Spawned, not forked: a forked child would share the parent's NVRTC state.
        with multiprocessing.get_context("spawn").Pool(workers or os.cpu_count() or 1) as pool:
            for number, _ in enumerate(pool.imap_unordered(_build_into, list(jobs.values()), chunksize=2), 1):
                if progress is not None:
                    progress(number, len(jobs))
    return {name: store.get(key) for name, (key, _, _) in keys.items()}
