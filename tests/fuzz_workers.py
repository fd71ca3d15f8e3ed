"""Dying workers: processes of a job, or the workers of a Dask cluster, are killed while they write.

``python tests/fuzz_workers.py 30`` runs that many rounds of each kind, and prints what became of them; the suite runs
fewer. A job of two processes, which have one thread or two as those of GPUs have, compresses a folder, with
``resume`` or without; sometimes two such jobs begin at once on one output. At a random moment one of the processes,
or the one that began it, gets ``kill -9``. However often that happens: nothing half-written has its final name, a job
that fails says how to go on, the processes of one that was killed end, and repeated with ``resume`` it ends with the
bytes of a job that nobody disturbed. Where `distributed` is installed a worker of a cluster is killed, too: the job
does not fail. Moments are drawn from as long as an undisturbed job takes. A kill hits if it comes before the end of its
job; a run of which less than half do fails. Linux only, for its ``/proc``.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import kbitcupy as kb
from kbitcupy.errors import FileError
from kbitcupy.io import atomic, conversion, executors

FORMAT = "kbit4"
SHARDS, TENSORS = 4, 24


def small_pieces():
    """A piece for each tensor, so that there is something to interrupt."""
    conversion._LEAST_PIECE = conversion._LARGEST_PIECE = 1 << 14


def job(source, out, kind, resume):
    """What a process of its own runs: it prints the numbers of its workers, and works."""
    small_pieces()
    with executors.local(2) if kind == "processes" else executors._gpu_processes(["cpu", "cpu"], 2) as pool:
        own = {each.pid for each in getattr(pool, "processes", [])}
        print(*(own or {pool.submit(os.getpid).result() for _ in range(8)}), flush=True)
        kb.io.quantize_file(source, out, FORMAT, device="cpu", executor=pool, resume=resume)


class Job:
    """Such a process, and its workers."""

    def __init__(self, source, out, kind, resume):
        command = [sys.executable, __file__, "job", str(source), str(out), kind, "resume" * resume]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.workers, self.hit = [], False

    def begun(self):
        """Wait until it has workers."""
        self.workers = [int(word) for word in self.process.stdout.readline().split()]

    def kill(self, draw):
        """Kill one of them: what it is."""
        victim = draw.choice([*self.workers, self.process.pid])
        self.hit = self.process.poll() is None and alive(victim)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return "parent" if victim == self.process.pid else "worker"

    def wait(self):
        """Exit status and message, when all its processes have ended."""
        message = self.process.communicate(timeout=60)[1]
        ends = time.monotonic() + 20
        while any(map(alive, self.workers)):
            if time.monotonic() > ends:
                return "workers outlive their job", message
            time.sleep(0.01)
        return self.process.returncode, message


def alive(process):
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def contents(path):
    return {inside.name: inside.read_bytes() for inside in path.iterdir()}


def half_written(out, expected):
    """What has its final name and is not what it should be."""
    if out.exists():
        return contents(out).items() - expected.items() - {(atomic.JOB, contents(out).get(atomic.JOB))}
    part = out.with_name(out.name + atomic.PART)
    files = contents(part) if part.exists() else {}
    return {name for name, data in files.items() if name.startswith("model") and data != expected[name]}


def duration(kind, source, out):
    """The seconds from when a job has workers until it ends, where nobody disturbs it."""
    undisturbed = Job(source, out, kind, False)
    undisturbed.begun()
    began = time.monotonic()
    status, message = undisturbed.wait()
    assert status == 0, message
    return time.monotonic() - began


def processes(kind, most, lasts, source, out, expected, draw):
    """A job whose processes are killed up to `most` times, until it ends: what went wrong, or None, and its ends.

    Third, whether each kill came before the end of its job.
    """
    resume = draw.random() < 0.7
    ends, hits = [], []
    while not ends or ends[-1][1] != 0:
        jobs = [Job(source, out, kind, resume) for _ in range(1 if draw.random() < 0.7 else 2)]
        for each in jobs:
            each.begun()
        killed = None
        if len(ends) < most:
            time.sleep(draw.random() * lasts)
            aim = draw.choice(jobs)
            killed = aim.kill(draw)
        for each in jobs:
            status, message = each.wait()
            ends.append((killed, status))
            if killed is not None and each is aim:
                hits.append(each.hit and status != 0)  # a worker that has no more to do is no loss
            if status not in (0, 1, -signal.SIGKILL):
                return f"{ends}: {message[-2000:]}", ends, hits
            last = message.strip().splitlines()[-1] if message.strip() else ""
            if status == 1 and not ("--resume" in last or "another process" in last or str(out) in last):
                return f"{ends}: it says nothing of how to go on: {last}", ends, hits
        wrong = half_written(out, expected)
        if wrong:
            return f"{ends}: half-written {wrong}", ends, hits
        ends.sort(key=lambda end: end[1] == 0)
        resume = True
        if ends[-1][1] != 0 and len(ends) > 12:
            return f"{ends}: it does not end", ends, hits
    if contents(out) != expected:
        return f"{ends}: other bytes", ends, hits
    return None, ends, hits


def cluster(distributed, source, out, expected, draw):
    """A job of a Dask cluster one of whose workers is killed."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as made, distributed.Client(made) as client:
        pids = list(client.run(os.getpid).values())
        killer = threading.Timer(draw.random() * 0.3, lambda: os.kill(draw.choice(pids), signal.SIGKILL))
        killer.start()
        try:
            executor = client.get_executor(pure=False, retries=3)
            kb.io.quantize_file(source, out, FORMAT, device="cpu", executor=executor)
            hit = killer.finished.is_set()
        except FileError as error:
            return f"cluster: {error}", [], []
        finally:
            killer.join()
    return (None if contents(out) == expected else "cluster: other bytes"), [], [hit]


def run(count, seed=0, kinds=("processes", "apart", "cluster"), most=4):
    """Run `count` rounds of each kind; returns how they ended, and descriptions of failures."""
    small_pieces()
    ended, failures = Counter(), []
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        rng = np.random.default_rng(0)
        tensors = {f"w{i}": rng.standard_normal((256, 512)).astype(np.float32) for i in range(TENSORS)}
        kb.io.save(top / "source", tensors, max_shard_size=TENSORS // SHARDS * 256 * 512 * 4)
        kb.io.quantize_file(top / "source", top / "whole", FORMAT, device="cpu")
        expected = contents(top / "whole")
        distributed = None
        with contextlib.suppress(ImportError):
            import distributed
        lasts = {kind: duration(kind, top / "source", top / kind) for kind in kinds if kind != "cluster"}
        for number in range(count):
            draw, out = random.Random(f"{seed}/{number}"), top / f"out{number}"
            for kind in kinds:
                if kind == "cluster" and distributed is None:
                    continue
                where = top / "source", out, expected, draw
                if kind == "cluster":
                    wrong, ends, hits = cluster(distributed, *where)
                else:
                    wrong, ends, hits = processes(kind, most, lasts[kind], *where)
                ended[kind] += 1
                ended.update(f"{killed or 'nobody'} killed: {status}" for killed, status in ends)
                ended.update(kills=len(hits), hits=sum(hits))
                if wrong is not None:
                    failures.append(f"round {number} of seed {seed}, {kind}: {wrong}")
                for path in (out, out.with_name(out.name + atomic.PART)):
                    shutil.rmtree(path, ignore_errors=True)
    return ended, failures


def _main(count, seed):
    began = time.perf_counter()
    ended, failures = run(count, seed)
    print(f"{dict(ended)}, seed {seed}: {len(failures)} failures, {time.perf_counter() - began:.0f} s")
    print(f"{ended['hits']} of {ended['kills']} kills hit before the end of their job")
    if 2 * ended["hits"] < ended["kills"]:
        failures.append("too few kills hit: nothing is shown")
    print(*failures[:20], sep="\n")
    return bool(failures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job(*sys.argv[2:5], bool(sys.argv[5]))
    else:
        sys.exit(_main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
