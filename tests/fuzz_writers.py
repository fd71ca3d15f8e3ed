"""Racing and dying writers: one of those that want an output has it, whole, and a killed job ends well when repeated.

``python tests/fuzz_writers.py 1000`` runs that many rounds of each kind and prints what became of them; the suite runs
fewer. In a race two to four processes begin to write one folder (or file) within two milliseconds, with ``resume``,
without, or some with it: one at least succeeds, the others are refused by name, and the output is whole. In the other
kind a job is killed (KILL, INT or TERM) at random moments and repeated with ``resume`` until it ends: the output is
byte for byte that of a job that nobody disturbed, and only what a killed process could not remove is left, which
`kbitcupy.io.atomic.leftovers` names. Processes are forked: POSIX only.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads should not fork

import numpy as np

import kbitcupy as kb
from kbitcupy.errors import FileError
from kbitcupy.io import atomic, convert

MOST_KILLS = 200
SUCCESS, REFUSED, INTERRUPTED, CRASHED = 0, 1, 130, 99


def contents(path):
    """Name -> bytes of a folder, or the bytes of a file; None of what is not there."""
    if path.is_dir():
        return {inside.name: inside.read_bytes() for inside in path.iterdir()}
    return path.read_bytes() if path.exists() else None


def sources(top):
    """A checkpoint in shards and one file, and what they become: {source: expected output}."""
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.standard_normal((32, 64)).astype(np.float32) for i in range(6)} | {"b": np.arange(9)}
    kb.io.save(top / "shards", tensors, max_shard_size=17_000)
    kb.io.save(top / "file", tensors)
    expected = {}
    for source in (top / "shards", top / "file"):
        convert.quantize_file(source, top / "whole", "kbit4", device="cpu")
        expected[source] = contents(top / "whole")
        shutil.rmtree(top / "whole") if source.is_dir() else (top / "whole").unlink()
    return expected


def start(source, out, resume, at):
    """Fork a process that begins to write at this moment; its exit status says what became of it."""
    # A signal waits until the process is one that ends by itself, instead of going on with the parent's work.
    waiting = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    process = os.fork()
    if process:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
        return process
    status = CRASHED
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
        while time.perf_counter() < at:
            pass
        convert.quantize_file(source, out, "kbit4", device="cpu", resume=resume)
        status = SUCCESS
    except FileError as error:
        named = str(out) in str(error)
        status = REFUSED if named else CRASHED
        if not named:
            print(f"refused without a name: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def wait(process):
    """Exit status of a process, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def race(top, source, expected, draw):
    """One race: a description of what went wrong, or None."""
    out = top / "out"
    kind = draw.choice(("none", "all", "mixed"))
    begin = time.perf_counter() + 0.003
    started = []
    for _ in range(draw.randrange(2, 5)):
        resume = kind == "all" or (kind == "mixed" and draw.random() < 0.5)
        started.append(start(source, out, resume, begin + draw.random() * draw.choice((0, 0.0005, 0.002))))
    found = Counter(map(wait, started))
    about = f"race of {len(started)} for a {'folder' if source.is_dir() else 'file'}, resume {kind}: {dict(found)}"
    if not found[SUCCESS] or set(found) - {SUCCESS, REFUSED}:
        return about
    return wrong_output(top, out, expected, about)


def kill(top, source, expected, draw):
    """One job, killed and repeated until it ends: a description of what went wrong, or None."""
    out = top / "out"
    longest = draw.choice((0.005, 0.02, 0.05))
    ends = []
    while not ends or ends[-1] != SUCCESS:
        process = start(source, out, True, 0)
        if len(ends) < MOST_KILLS and draw.random() < 0.9:
            time.sleep(draw.random() * longest)
            os.kill(process, draw.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM)))
        ends.append(wait(process))
        about = f"kills of a {'folder' if source.is_dir() else 'file'}: {ends}"
        if ends[-1] not in (SUCCESS, INTERRUPTED, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM):
            return about
        if out.exists() and contents(out) != expected and atomic.JOB not in contents(out):
            return f"{about}: half an output"
    return wrong_output(top, out, expected, about, swept=atomic.leftovers(top))


def wrong_output(top, out, expected, about, swept=()):
    """What is wrong with a finished output and with its folder, which is made ready for the next round."""
    found = contents(out)
    left = {path.name for path in top.iterdir()} - {"shards", "file", "out"} - {path.name for path in swept}
    for path in [out, *(top / name for name in left), *swept]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if found != expected:
        names = sorted(found) if isinstance(found, dict) else found is not None
        return f"{about}: the output is not whole ({names})"
    return f"{about}: left {sorted(left)}" if left else None


def run(count, seed=0):
    """Run `count` rounds of each kind; returns how many there were, and descriptions of failures."""
    rounds, failures = Counter(), []
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        expected = sources(top)
        for number in range(count):
            draw = random.Random(f"{seed}/{number}")
            for kind in (race, kill):
                source = draw.choice(sorted(expected))
                wrong = kind(top, source, expected[source], draw)
                rounds[f"{kind.__name__} {source.name}"] += 1
                if wrong is not None:
                    failures.append(f"round {number} of seed {seed}: {wrong}")
                    shutil.rmtree(top / "out.part", ignore_errors=True)
    return rounds, failures


def _main(count, seed):
    began = time.perf_counter()
    rounds, failures = run(count, seed)
    print(f"{dict(rounds)}, seed {seed}: {len(failures)} failures, {time.perf_counter() - began:.0f} s")
    print(*failures[:20], sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]) if len(sys.argv) > 1 else 100, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
