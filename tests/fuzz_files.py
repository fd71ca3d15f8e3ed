"""Damaged and hostile files and bytes: each is read or refused by name, quickly, and nothing is left behind.

``python tests/fuzz_files.py 100000`` runs that many cases of files, and as many of the bytes of one array,
and prints what became of them; the suite runs fewer. A case is a small file of one registered format, maybe with an
index, in which bytes of the header, values of the header, of kbitcupy's configuration or of the index, or data were
changed; a file of bitsandbytes whose JSON was changed; the beginning of another kind of file; a plan with other values;
or what `QuantizedArray.to_bytes` makes, with such changes.
"""

import contextlib
import copy
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import KbitError

SECONDS = 10  # a case that takes longer hangs
INDEX = "model.safetensors.index.json"
PLAN = "plan.json"
DEEP = json.loads("[" * 60 + "]" * 60)
HEADS = [
    *(
        b"PK\x03\x04",
        b"\x80\x02",
        b"\x93NUMPY",
        b"GGUF",
        b"\x89HDF\r\n\x1a\n",
        b"\x1f\x8b",
        b"BZh",
        b"7z\xbc\xaf\x27\x1c",
    ),
    *(
        b"version https://git-lfs.github.com/spec/v1",
        b"<!DOCTYPE html>",
        b"<?xml",
        b'{"a": 1}',
        b"",
        bytes(8),
        bytes(300),
    ),
]
VALUES = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        3,
        31,
        64,
        2**31,
        2**53,
        2**62,
        2**63,
        2**64,
        10**30,
        10**400,
        0.5,
        64.0,
        1e308,
        -0.0,
    ),
    *("", "w", "b", "x" * 1000, "U8", "F4", "F99", "float32", "int8", "custom", "nf", "__metadata__", "\x1b[2J", "\0"),
    *("../a.safetensors", "/etc/passwd", "a/../b.safetensors", "..", ".safetensors", "con:x.safetensors", "ü"),
    *(
        [],
        [[]],
        [-1, -1],
        [2**62, 2**62],
        [0, 2**62],
        [0, 2**62, 2**62],
        [1] * 70,
        [2**63] * 2000,
        [1e999],
        ["64"],
        [[1]],
    ),
    *({}, {"name": "kbit4"}, {"name": ["kbit4"]}, {"": {}}, {"version": 99}, DEEP),
]


class Twice(dict):
    """An object one of whose keys stands twice."""


def text(value):
    """JSON, with duplicate keys where a `Twice` asks for one."""
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)}:{text(item)}" for key, item in value.items()]
        return "{" + ",".join(pairs + pairs[:1] if isinstance(value, Twice) else pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    return json.dumps(value)


def places(value, found=None):
    """(container, key) of everything in a JSON document."""
    found = [] if found is None else found
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(item, (dict, list)):
            places(item, found)
    return found


def changed(document, draw):
    """A copy with one to three values replaced, removed, renamed, exchanged or doubled."""
    document = {"": copy.deepcopy(document)}
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        container, key = draw.choice(places(document))
        kind = draw.randrange(6)
        if kind == 0 and container is not document:
            del container[key]
        elif kind == 1 and isinstance(container, dict) and container is not document:
            container[draw.choice([str(value)[:50] for value in VALUES])] = container.pop(key)
        elif kind == 2 and isinstance(container[key], dict):
            container[key] = Twice(container[key])
        elif kind == 3:
            other, there = draw.choice(places(document))
            container[key] = copy.deepcopy(other[there])
        elif kind == 4 and type(container[key]) is int:
            container[key] += draw.choice((-64, -8, -1, 1, 8, 64, 2**32))
        else:
            container[key] = copy.deepcopy(draw.choice(VALUES))
    return document[""]


def damaged(content, end, draw):
    """Bytes with some of the first `end` changed, removed, doubled or random."""
    content = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        if not content:
            break
        at = draw.randrange(min(end, len(content)))
        kind = draw.randrange(5)
        if kind < 2:
            content[at] = draw.choice((draw.randrange(256), *b'0123456789[]{}",:-'))
        elif kind == 2:
            del content[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            content[at:at] = content[at : at + draw.randrange(1, 40)]
        else:
            content[at : at + 8] = draw.randbytes(8)
    return bytes(content) if draw.random() < 0.9 else bytes(content[: draw.randrange(len(content) + 1)])


def with_header(header, data):
    head = text(header).encode("utf-8", "surrogatepass")
    return len(head).to_bytes(8, "little") + head + data


def seeds():
    """(header, data) of a small file of every format."""
    found = []
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for name in kb.list_formats():
            try:
                q = kb.quantize(rng.standard_normal((4, 256)).astype(np.float32), name)
            except (ValueError, TypeError):  # it needs an option
                continue
            path = Path(folder) / "seed"
            kb.io.save(path, {"w": q, "b": np.ones(3), "c": np.zeros((2, 2), np.float16)}, {"format": "pt"}, force=True)
            content = path.read_bytes()
            length = int.from_bytes(content[:8], "little")
            found.append((json.loads(content[8 : 8 + length]), content[8 + length :]))
    return found


def bitsandbytes_seed():
    """The stored tensors of a file of bitsandbytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed"
        x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
        kb.io.bitsandbytes.save(path, {"w": kb.quantize(x, "nf4", double_quant=True)})
        return {name: array.copy() for name, array in kb.io.load(path, raw=True).items()}


STATES = bitsandbytes_seed()
STATE = "w.quant_state.bitsandbytes__nf4"


def write_case(folder, seed, draw):
    """Write one case and return the path to open."""
    header, data = seed
    path = folder / "case.safetensors"
    kind = draw.randrange(8)
    if kind == 0:  # bytes of the header
        content = with_header(header, data)
        path.write_bytes(damaged(content, len(content) - len(data), draw))
    elif kind == 1:  # values of the header
        header = changed(header, draw)
        path.write_bytes(with_header(header, data))
    elif kind == 2:  # values of our configuration
        header = copy.deepcopy(header)
        ours = changed(json.loads(header["__metadata__"]["kbitcupy"]), draw)
        header["__metadata__"]["kbitcupy"] = text(ours)
        path.write_bytes(with_header(header, data))
    elif kind == 3:  # values in the planes
        data = bytearray(data)
        for _ in range(8):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(with_header(header, bytes(data)))
    elif kind == 4:  # an index of shards
        names = [name for name in header if name != "__metadata__"]
        path.write_bytes(with_header(header, data))
        index = text(changed({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, path.name)}, draw))
        content = index.encode("utf-8", "surrogatepass")
        (folder / INDEX).write_bytes(content if draw.random() < 0.7 else damaged(content, len(content), draw))
        return folder
    elif kind == 5:  # what bitsandbytes says of a weight
        state = text(changed(json.loads(STATES[STATE].tobytes()), draw)).encode("utf-8", "surrogatepass")
        state = state if draw.random() < 0.7 else damaged(state, len(state), draw)
        kb.io.save(path, {**STATES, STATE: np.frombuffer(state, np.uint8)})
    elif kind == 6:  # another kind of file
        content = draw.choice(HEADS) + draw.randbytes(draw.choice((0, 1, 22, 600)))
        path.write_bytes(content if draw.random() < 0.7 else damaged(content or b"a", 40, draw))
    else:  # formats by tensor
        path.write_bytes(with_header(header, data))
        plan = {"version": 1, "tensors": {"c": {"name": "kbit4", "codebook": "nf", "absmax": "float32"}}}
        content = text(changed(plan, draw)).encode("utf-8", "surrogatepass")
        (folder / PLAN).write_bytes(content if draw.random() < 0.7 else damaged(content, len(content), draw))
    return path


def check(fact, about):
    if not fact:
        raise AssertionError(about)


def try_case(path, out, draw):
    """Returns "read" or "refused"; anything else is raised."""
    plan = path.with_name(PLAN)
    try:
        if plan.exists():
            kb.explore.read_plan(plan)
        tensors = kb.io.load(path, raw=draw.random() < 0.2)
        for name in tensors:
            try:
                tensor = tensors[name]
            except KbitError as error:
                check(repr(name) in str(error), error)
                continue
            if isinstance(tensor, kb.QuantizedArray):
                assert tensor.dequantize().shape == tensor.shape
        outcome = "read"
    except KbitError as error:
        named = "case.safetensors" in str(error) or str(path) in str(error)
        check(named or plan.exists(), error)  # a format of a plan says itself what is wrong
        outcome = "refused"
    if draw.random() < 0.25:
        command = draw.choice((["dequantize"], ["quantize", "--format", "kbit2", "--min-size", "1"]))
        words = [*command, str(path), "-o", str(out), "--device", "cpu"]
        if plan.exists():
            words = ["quantize", str(path), "-o", str(out), "--device", "cpu", "--plan", str(plan), "--min-size", "1"]
        if draw.random() < 0.3:
            words = ["inspect", str(path)]
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            status = main(words)
        lines = [line for line in errors.getvalue().split("\n")[:-1] if not line.startswith("kbit: note: ")]
        assert status in (0, 1) and len(lines) == status, errors.getvalue()
        assert all(line.isprintable() for line in lines)
        assert out.exists() == (status == 0 and words[0] != "inspect")
    return outcome


def remove(path):
    if path.is_dir():
        for inside in path.iterdir():
            inside.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def run(count, seed=0):
    """Run `count` cases; returns outcomes, the slowest case in seconds, and descriptions of failures."""
    corpus = seeds()
    outcomes, slowest, failures = Counter(), 0.0, []
    with tempfile.TemporaryDirectory() as top:
        folder, out = Path(top) / "in", Path(top) / "out"
        folder.mkdir()
        for number in range(count):
            draw = random.Random(f"{seed}/{number}")
            path = write_case(folder, corpus[number % len(corpus)], draw)
            written = sorted(os.listdir(folder))
            began = time.perf_counter()
            try:
                outcomes[try_case(path, out, draw)] += 1
            except Exception as error:
                failures.append(f"case {number} of seed {seed}: {type(error).__name__}: {str(error)[:300]}")
            slowest = max(slowest, time.perf_counter() - began)
            remove(out)
            if os.listdir(top) != ["in"] or sorted(os.listdir(folder)) != written:
                failures.append(f"case {number} of seed {seed} left {os.listdir(top)} {os.listdir(folder)}")
            for name in written:
                (folder / name).unlink()
    return outcomes, slowest, failures


# ---- the bytes of one array ----


def bytes_of(header, data, draw=None):
    """The bytes of an array from its header and what follows; with `draw`, maybe with lies in the first 24."""
    head = text(header).encode("utf-8", "surrogatepass") if not isinstance(header, bytes) else header
    head += b" " * (-(len(head) + 24) % 64)
    numbers = [1, len(head), 24 + len(head) + len(data)]
    if draw is not None and draw.random() < 0.3:
        number = draw.randrange(3)
        limit = 2 ** (64 if number == 2 else 32)
        lies = (0, 1, 2, 23, 64, len(head) - 64, numbers[2] - 24, numbers[2] + 64, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
        numbers[number] = draw.choice(lies) % limit
    first = b"\x93KBITQA\n" + numbers[0].to_bytes(4, "little") + numbers[1].to_bytes(4, "little")
    return first + numbers[2].to_bytes(8, "little") + head + data


def bytes_seeds():
    """(header, data) of the bytes of a small array of every format."""
    found = []
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    for name in kb.list_formats():
        try:
            content = kb.quantize(x, name).to_bytes()
        except (ValueError, TypeError):  # it needs an option, or only decodes
            continue
        end = 24 + int.from_bytes(content[12:16], "little")
        found.append((json.loads(content[24:end]), content[end:]))
    return found


def bytes_case(seed, draw):
    """Damaged bytes, as one of the things that hold bytes."""
    header, data = seed
    kind = draw.randrange(5)
    if kind == 0:
        content = bytes_of(changed(header, draw), data, draw)
    elif kind == 1:  # planes that lie
        header = copy.deepcopy(header)
        plane = draw.choice(header["planes"])
        plane[draw.choice(("name", "dtype", "shape"))] = copy.deepcopy(draw.choice(VALUES))
        content = bytes_of(header, data, draw)
    elif kind == 2:  # more or fewer bytes, which are said to be there
        content = bytes_of(header, data[: draw.randrange(len(data) + 1)] + draw.randbytes(draw.choice((0, 1, 64))))
    elif kind == 3:
        content = bytes_of(header, data)
        content = damaged(content, len(content), draw)
    else:
        content = bytes_of(header, data, draw)
        content = content[: draw.randrange(len(content) + 1)] if draw.random() < 0.5 else content
    kind = draw.randrange(5)
    if kind == 0:
        return bytearray(content)
    if kind == 1:
        return memoryview(b"x" * 5 + content)[5:]
    if kind == 2:
        return np.frombuffer(content, np.uint8)
    if kind == 3 and draw.random() < 0.3:
        return memoryview(content)[::2]
    return content


def run_bytes(count, seed=0):
    """Read `count` damaged arrays; returns what `run` does."""
    corpus = bytes_seeds()
    outcomes, slowest, failures = Counter(), 0.0, []
    for number in range(count):
        draw = random.Random(f"{seed}/bytes/{number}")
        content = bytes_case(corpus[number % len(corpus)], draw)
        began = time.perf_counter()
        try:
            try:
                q = kb.QuantizedArray.from_buffer(content)
                check(q.dequantize().shape == q.shape, q.shape)
                again = kb.QuantizedArray.from_buffer(q.to_bytes())
                check(again.config() == q.config() and again.to_bytes() == q.to_bytes(), q.config())
                outcomes["read"] += 1
            except KbitError as error:
                check(str(error).startswith("buffer") and len(str(error)) < 1000, error)
                outcomes["refused"] += 1
        except Exception as error:
            failures.append(f"bytes {number} of seed {seed}: {type(error).__name__}: {str(error)[:300]}")
        slowest = max(slowest, time.perf_counter() - began)
    return outcomes, slowest, failures


def _hangs(*_):
    raise TimeoutError(f"more than {SECONDS} s")


def _main(count, seed):
    import resource  # POSIX only

    # What would take much memory fails as a MemoryError, and a hang as a TimeoutError.
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    signal.signal(signal.SIGALRM, _hangs)
    began = time.perf_counter()
    failures, totals, slowest = [], Counter(), 0.0
    for first in range(0, count, 1000):
        signal.alarm(1000 * SECONDS)
        for kind in (run, run_bytes):
            outcomes, longest, bad = kind(min(1000, count - first), seed + first)
            totals, slowest, failures = totals + outcomes, max(slowest, longest), failures + bad
    signal.alarm(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{count} cases, seed {seed}: {dict(totals)}, {len(failures)} failures, slowest {slowest * 1e3:.0f} ms, "
        f"peak {peak:.0f} MB, {time.perf_counter() - began:.0f} s"
    )
    print(*failures[:20], sep="\n")
    return bool(failures) or slowest > SECONDS


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
