"""Fuzzing of GGUF files: damaged headers, lying counts, odd values, and parts that are not of one model.

Whatever the bytes are, a file is read, or refused with an error of kbitcupy's own that names it; nothing outside its
data is read. `python tests/fuzz_gguf.py [cases] [seed]` runs any number; the test suite runs some.
"""

import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from gguf_files import header, info, key, text

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.errors import FileError, KbitError
from kbitcupy.io import gguf as files

# Numbers of a header that are worth trying, in 8 bytes.
ODD = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 33, 63, 64, 127, 255, 256, 4096, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1),
)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
SECONDS = 5


def words(draw):
    """A name or a text."""
    return draw.choice(
        (b"w", b"blk.0.attn_q.weight", b"blk.0.attn_q.scale", b"", b"\xff", b"a\0", b"x" * 63, b"x" * 64)
    )


def odd(draw, usual):
    """A number that is right most of the time."""
    return draw.choice(ODD) if draw.random() < 0.04 else usual


def value(draw):
    """Type and bytes of a value, with a lie now and then."""
    kind = draw.choice((*SIZES, 8, 8, 9, 9))
    if kind in SIZES:
        return kind, draw.randbytes(SIZES[kind])
    if kind == 8:
        word = words(draw)
        return kind, odd(draw, len(word)).to_bytes(8, "little") + word
    item, count = draw.choice((*SIZES, 8, odd(draw, 8) % 2**32)), draw.randrange(5)
    data = draw.randbytes(count * SIZES[item]) if item in SIZES else b"".join(text(words(draw)) for _ in range(count))
    return kind, item.to_bytes(4, "little") + odd(draw, count).to_bytes(8, "little") + data


def keys(draw):
    """Some keys."""
    found = []
    for number in range(draw.randrange(5)):
        kind, data = value(draw)
        found.append(key(f"a.{odd(draw, number) % 100}", odd(draw, kind) % 2**32, data))
    if draw.random() < 0.3:
        found.append(key("general.alignment", 4, odd(draw, draw.choice((8, 32, 64))).to_bytes(8, "little")[:4]))
    if draw.random() < 0.1:
        numbers = odd(draw, 0), odd(draw, 1), odd(draw, 1)
        found += [
            key(name, 4, (number % 2**32).to_bytes(4, "little"))
            for name, number in zip(files.SPLIT_KEYS, numbers, strict=True)
        ]
    draw.shuffle(found)
    return found


def tensors(draw):
    """Some tensors one behind the other, and their bytes."""
    infos, end = [], 0
    for number in range(draw.randrange(4)):
        block, nbytes, kind = 1, 4, 0
        if draw.random() < 0.6:
            kind, block, nbytes = draw.choice(list(files.BLOCKS.values()))
        lengths = [block * draw.randrange(3), *(draw.randrange(3) for _ in range(draw.randrange(4)))]
        size = nbytes * lengths[0] // block
        for length in lengths[1:]:
            size *= length
        name = f"t{number}" if draw.random() < 0.9 else words(draw)
        lengths = [odd(draw, length) for length in lengths]
        infos.append(info(name, lengths, odd(draw, kind) % 2**32, odd(draw, end)))
        end += -(-size // 64) * 64
    return infos, draw.randbytes(end)


def damaged(content, draw):
    """Bytes of which some are changed, removed, doubled or random."""
    content = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, kind = draw.randrange(len(content)), draw.randrange(6)
        if kind < 2:
            content[at] = draw.randrange(256)
        elif kind == 2:
            del content[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            content[at:at] = content[at : at + draw.randrange(1, 40)]
        elif kind == 4:
            content[at : at + 8] = draw.choice(ODD).to_bytes(8, "little")
        else:
            del content[draw.randrange(len(content)) :]
        if not content:
            break
    return bytes(content)


def case(draw):
    """The bytes of a file."""
    infos, data = tensors(draw)
    alignment = 64 if draw.random() < 0.5 else 32
    content = header(keys(draw), infos, data, alignment)
    if draw.random() < 0.05:
        content = content[:4] + draw.choice((2, 3, 1, 0, 2**24 * 3)).to_bytes(4, "little") + content[8:]
    if draw.random() < 0.3:
        return damaged(content, draw)
    if draw.random() < 0.1:  # counts that lie
        at = draw.choice((8, 16))
        content = content[:at] + draw.choice(ODD).to_bytes(8, "little") + content[at + 8 :]
    return content


def check(path):
    """Returns "read" or "refused"; anything else is raised."""
    content = path.read_bytes()
    try:
        loaded = kb.io.load(path)
    except FileError as error:
        if path.name not in str(error) or len(str(error)) > 2000:
            raise AssertionError(error) from error
        return "refused"
    reader = loaded.reader.files[0]
    spans = []
    for name, entry in reader.entries.items():
        start = reader._starts[name]
        assert entry.nbytes >= 0 and (start + entry.nbytes <= len(content) or not entry.nbytes)
        assert reader.raw(name).tobytes() == content[start : start + entry.nbytes]
        spans += [(start, start + entry.nbytes)] if entry.nbytes else []
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for name, found in loaded.metadata.items():
        str(found), repr(found), found.json, found.value
        assert files.GgufValue(found.value, found.type).type == found.type, name
    for name in loaded:
        try:
            tensor = loaded[name]
        except KbitError as error:
            if repr(name) not in str(error):
                raise AssertionError(error) from error
            continue
        if isinstance(tensor, kb.QuantizedArray):
            assert tensor.dequantize().shape == tensor.shape
            raw = np.asarray(tensor.format.to_blocks(tensor.planes)).reshape(-1)
            assert raw.tobytes() == reader.raw(name).tobytes()
    return "read"


def convert(path, draw):
    """Run a command on a file: it writes another that is read, or says in a line why not and leaves nothing."""
    out = path.with_name("out" + draw.choice((".gguf", ".safetensors")))
    words = draw.choice((["dequantize"], ["quantize", "--format", "q8_0", "--min-size", "1"], ["inspect"]))
    words = [*words, str(path), *(["-o", str(out), "--device", "cpu"] if words != ["inspect"] else [])]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        status = main(words)
    lines = [line for line in errors.getvalue().split("\n")[:-1] if not line.startswith("kbit: note: ")]
    assert status in (0, 1) and len(lines) == status, errors.getvalue()
    if status == 0 and words[0] != "inspect":
        assert set(kb.io.load(out)) <= set(kb.io.load(path)), words
        out.unlink()


def run(count, seed=0):
    """Run `count` cases; returns outcomes, the slowest case in seconds, and descriptions of failures."""
    outcomes, slowest, failures = Counter(), 0.0, []
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        for number in range(count):
            path = Path(folder) / f"case{number}.gguf"  # a new one: some file systems are slow to cut an old one
            draw = random.Random(f"{seed}/gguf/{number}")
            path.write_bytes(case(draw))
            began = time.process_time()
            try:
                outcomes[check(path)] += 1
                if draw.random() < 0.1:
                    convert(path, draw)
            except Exception as error:
                failures.append(f"case {number} of seed {seed}: {type(error).__name__}: {str(error)[:300]}")
            slowest = max(slowest, time.process_time() - began)
            path.unlink()
            if os.listdir(folder):
                failures.append(f"case {number} of seed {seed} left {os.listdir(folder)}")
                for left in Path(folder).iterdir():
                    left.unlink()
    return outcomes, slowest, failures


def _hangs(*_):
    raise TimeoutError(f"more than {SECONDS} s")


def _main(count, seed):
    import resource  # POSIX only

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    signal.signal(signal.SIGALRM, _hangs)
    began, totals, slowest, failures = time.perf_counter(), Counter(), 0.0, []
    for first in range(0, count, 1000):
        signal.alarm(1000 * SECONDS)
        outcomes, longest, bad = run(min(1000, count - first), seed + first)
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
