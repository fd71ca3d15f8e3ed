"""How checkpoint jobs grow with workers, cores and GPUs: ``python .ci/scale.py FOLDER [GROUP...]``.

FOLDER is on a RAM disk. A whole job is timed: names and space checked, shards of 537 MB of float16 read, compressed to
kbit4 or decoded, and written. GB are those of float16. What is compared is timed in turns, and lines are medians; those
that fall short of what they are to reach are named at the end, and the status is 1.

    gpus    1, 4 and 8 workers on a GPU, beside a prototype; as many on each of two GPUs, by threads and by processes
    dask    two workers of dask-cuda beside one; compressed chunks that are spilled to the host and come back
    memory  peak of the host's memory, beside workers times the largest tensor
    numpy   8 processes beside one
    cores   `workers=2` beside 1

All bytes are compared with those of one worker. What takes two GPUs is left out where there is one.
"""

import argparse
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import kbitcupy as kb
from kbitcupy.io import executors

FORMAT = "kbit4"
#: Of a tensor, four of which are a shard.
SHAPE, TENSORS = (8192, 8192), 4
#: Arrays of numbers that tensors share in turn.
NUMBERS = 5
#: Shards that are enough for one worker.
FEW = 8
#: Formats whose `workers=` is timed, the dtype of the numbers, and how many there are.
CORES = (("kbit4", "float16"), ("int8", "float32"), ("q4_0", "float32"), ("nf4", "float32"))
ELEMENTS = 1 << 25
#: Pairs of times for each round, and runs of which the shortest is a time; the name of what two CPUs are worth, and how
#: often it hashes.
PAIRS, RUNS = 3, 3
ALONE, HASHED = "hashing, which needs no memory", 1 << 16
#: Compressed chunks for each worker of dask-cuda, their elements, and the bytes that its GPU may hold of them.
CHUNKS, CHUNK, DEVICE_LIMIT = 18, (1 << 14, 1 << 14), 1_000_000_000
#: Processes of NumPy.
PROCESSES = 8
_INDEX = "model.safetensors.index.json"


class Lines:
    """What was found, beside what is to be reached."""

    def __init__(self):
        self.short = []

    def add(self, what, value, least=None, most=None, note=""):
        """Print a line."""
        target = f"at least {least}" if least is not None else f"at most {most}" if most is not None else ""
        missed = (least is not None and value < least) or (most is not None and value > most)
        self.short += [f"{what}: {value:.2f} ({target})"] * missed
        print(f"{what:72} {value:8.2f}  {target:14}{'SHORT ' * missed}{note}", flush=True)

    def right(self, what, is_right):
        """Print whether something holds."""
        self.short += [what] * (not is_right)
        print(f"{what:72} {'yes' if is_right else 'NO':>8}", flush=True)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _name(number, count):
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def header(path):
    """The bytes before the data of a file, and what they say of each tensor."""
    with open(path, "rb") as file:
        length = file.read(8)
        text = file.read(struct.unpack("<Q", length)[0])
    return length + text, {name: about for name, about in json.loads(text).items() if name != "__metadata__"}


def _write_index(folder):
    where = {name: path.name for path in folder.glob("*.safetensors") for name in header(path)[1]}
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_checkpoint(folder, shards):
    """A checkpoint of so many shards, which many threads write."""
    numbers = [np.random.default_rng(i).standard_normal(SHAPE, np.float32).astype(np.float16) for i in range(NUMBERS)]
    folder.mkdir()

    def write(number):
        tensors = {f"layers.{number:03}.{i}": numbers[(number + i) % NUMBERS] for i in range(TENSORS)}
        kb.io.save(folder / _name(number, shards), tensors)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(shards)))
    _write_index(folder)


def first(folder, shards):
    """Its first shards as a checkpoint of their own, which takes no memory."""
    found = folder.with_name(f"{folder.name}-{shards}")
    if not found.exists():
        found.mkdir()
        for path in sorted(folder.glob("*.safetensors"))[:shards]:
            os.link(path, found / path.name)
        _write_index(found)
    return found


def room(folder):
    """How many shards there is room for, and beside them for what becomes of them: once compressed, twice decoded."""
    return int(shutil.disk_usage(folder).free / (2 * TENSORS * SHAPE[0] * SHAPE[1]) / 3.5)


def floats(folder):
    """GB of a checkpoint as float16."""
    shards = len(list(folder.glob("*.safetensors")))
    return shards * TENSORS * SHAPE[0] * SHAPE[1] * 2 / 1e9


def same(folder, expected):
    """Whether every shard, of which there is one at least, has the bytes of the one of its name."""

    def equal(path):
        a, b = (np.memmap(each, np.uint8, "r") for each in (path, expected / path.name))
        return a.size == b.size and not compare(
            *(ctypes.c_void_p(each.ctypes.data) for each in (a, b)), ctypes.c_size_t(a.size)
        )

    compare, paths = ctypes.CDLL(None).memcmp, list(folder.glob("*.safetensors"))  # without the interpreter's lock
    with ThreadPoolExecutor(16) as pool:
        return bool(paths) and all(pool.map(equal, paths))


def remove(folder):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(os.unlink, folder.iterdir()))
    folder.rmdir()


def job(direction, source, out, executor, device):
    """The seconds of a whole job."""
    began = time.perf_counter()
    how = {"device": device, "executor": executor}
    if direction == "quantize":
        kb.io.quantize_file(source, out, FORMAT, **how)
    else:
        kb.io.dequantize_file(source, out, **how)
    return time.perf_counter() - began


# ---- GPUs ------------------------------------------------------------------------------------------------------------


class Prototype:
    """Decodes a checkpoint with no more than that takes: threads with a stream and pinned memory for whole tensors."""

    def __init__(self, workers, device, xp):
        self._xp, self._own, self._format = xp, threading.local(), kb.get_format(FORMAT)
        self._device = xp.cuda.Device(int(device.partition(":")[2] or 0))
        together = threading.Barrier(workers)
        self._pool = ThreadPoolExecutor(workers, initializer=self._begin)
        list(self._pool.map(lambda _: together.wait(), range(workers)))

    def _begin(self):
        nbytes = 2 * SHAPE[0] * SHAPE[1]
        with self._device:
            self._own.stream = self._xp.cuda.Stream(non_blocking=True)
            pinned = [self._xp.cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
        self._own.buffers = [np.frombuffer(each, np.uint8)[:nbytes] for each in pinned]

    def dequantize(self, source, out, expected):
        """Write shards, whose headers those of `expected` are: the seconds."""
        began = time.perf_counter()
        out.mkdir()
        with contextlib.ExitStack() as stack:
            tasks = []
            for path in sorted(source.glob("*.safetensors")):
                read = stack.enter_context(open(path, "rb")).fileno()
                written = stack.enter_context(open(out / path.name, "wb")).fileno()
                before, stored = header(path)
                head, made = header(expected / path.name)
                os.pwrite(written, head, 0)
                os.truncate(written, (expected / path.name).stat().st_size)
                for name, about in made.items():
                    planes = {plane: stored[f"{name}.{plane}"] for plane in self._format.planes(SHAPE)}
                    target = len(head) + about["data_offsets"][0]
                    tasks.append((read, len(before), planes, written, target))
            list(self._pool.map(self._decode, tasks))
        return time.perf_counter() - began

    def _decode(self, task):
        source, begin, planes, target, at = task
        compressed, decoded = self._own.buffers
        arrays, used = {}, 0
        with self._device, self._own.stream:
            for name, plane in self._format.planes(SHAPE).items():
                start, end = planes[name]["data_offsets"]
                part = compressed[used : used + end - start]
                os.preadv(source, [part], begin + start)
                arrays[name] = self._xp.empty(end - start, np.uint8)
                arrays[name].set(part, self._own.stream)
                arrays[name] = arrays[name].view(plane.dtype).reshape(plane.shape)
                used += end - start
            x = kb.QuantizedArray(self._format, arrays, SHAPE, np.float16).dequantize()
            self._xp.asnumpy(x.reshape(-1).view(np.uint8), out=decoded)
        os.pwritev(target, [decoded], at)

    def close(self):
        self._pool.shutdown()


def _cupy():
    import cupy

    return cupy


def devices():
    """The GPUs, two of them at most."""
    return [f"cuda:{number}" for number in range(min(2, _cupy().cuda.runtime.getDeviceCount()))]


def compressed(folder):
    """The checkpoint compressed by one worker, for groups that begin with it."""
    small = folder / "small"
    if not small.exists():
        job("quantize", folder / "source", small, None, devices()[0])
    return small


def gpus(folder, lines, rounds):
    names = devices()
    source, back, out = folder / "source", folder / "back", folder / "out"
    job("quantize", first(source, 1), out, None, names[0])  # kernels are compiled
    job("dequantize", out, back, None, names[0])
    for made in (out, back):
        remove(made)
    small = compressed(folder)
    job("dequantize", small, back, None, names[0])
    with contextlib.ExitStack() as stack:
        who = {"1 worker": (None, names[:1])}
        who |= {f"{n} workers": (stack.enter_context(executors.local(n, names[:1])), names[:1]) for n in (4, 8)}
        for n in (4, 8) if len(names) > 1 else ():
            who[f"{n} workers on each of two, threads"] = stack.enter_context(executors.local(2 * n, names)), names
            began = time.perf_counter()
            pool = stack.enter_context(executors.local(2 * n, names, executors.APART))
            who[f"{n} workers on each of two, processes"] = pool, names
            job("quantize", first(source, FEW), out, pool, names)
            remove(out)
            lines.add(f"processes of two GPUs and their first {FEW} shards, s", time.perf_counter() - began)
        prototypes = {n: Prototype(n, names[0], _cupy()) for n in (1, 4, 8)}
        for prototype in prototypes.values():
            stack.callback(prototype.close)
        for direction, read, expected in (("quantize", source, small), ("dequantize", small, back)):
            calls = {
                name: functools.partial(job, direction, executor=own, device=on) for name, (own, on) in who.items()
            }
            if direction == "dequantize":
                beside = {
                    _prototype(n): functools.partial(each.dequantize, expected=back) for n, each in prototypes.items()
                }
                calls |= beside
            speeds = _timed(direction, calls, read, expected, out, rounds, lines)
            _say_speeds(direction, speeds, lines)
    remove(back)


def _prototype(workers):
    return f"prototype of {workers}"


def _timed(direction, calls, source, expected, out, rounds, lines):
    """GB/s of each of these calls, which take what to read and where to write."""
    speeds = defaultdict(list)
    for number in range(rounds):
        for name, call in calls.items():
            read = first(source, FEW) if name in ("1 worker", _prototype(1)) else source
            speeds[name].append(floats(read) / call(source=read, out=out))
            if not number:
                lines.right(f"{direction}, {name}: the bytes of one worker", same(out, expected))
            remove(out)
    return speeds


def _say_speeds(direction, speeds, lines):
    median = {name: statistics.median(found) for name, found in speeds.items()}
    least = {"1 worker": 3.3, "4 workers": 10, "8 workers": 14} if direction == "quantize" else {}
    for name, found in speeds.items():
        lines.add(f"{direction}, {name}, GB/s", median[name], least.get(name), note=f"best {max(found):.2f}")
    for n, name in ((1, "1 worker"), (4, "4 workers"), (8, "8 workers")):
        if _prototype(n) in median:
            lines.add(f"{direction}, {name} beside the prototype", median[name] / median[_prototype(n)], 0.85)
        two = [each for who, each in median.items() if who.startswith(f"{n} workers on each")]
        if two:
            lines.add(f"{direction}, {n} workers on each of two GPUs beside {n} on one", max(two) / median[name], 1.7)


# ---- Dask ------------------------------------------------------------------------------------------------------------


def cluster(folder):
    """A worker of dask-cuda for each GPU."""
    from dask_cuda import LocalCUDACluster

    # What host memory there is, a machine may say too little of before it is used.
    options = {"memory_limit": "60GB", "dashboard_address": None, "local_directory": str(folder / "dask")}
    return LocalCUDACluster(n_workers=len(devices()), device_memory_limit=DEVICE_LIMIT, **options)


def dask(folder, lines, rounds):
    from distributed import Client

    source, small, out = folder / "source", compressed(folder), folder / "out"
    with cluster(folder) as made, Client(made) as client:
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        speeds, names = defaultdict(list), [f"{count} workers of dask-cuda" for count in (1, len(workers))]
        for number in range(-1, rounds):
            for name, count in zip(names, (1, len(workers)), strict=True):
                read = source if number >= 0 else first(source, FEW)
                executor = client.get_executor(pure=False, workers=workers[:count])
                seconds = job("quantize", read, out, executor, "auto")
                if number >= 0:
                    speeds[name].append(floats(read) / seconds)
                else:  # kernels are loaded
                    lines.right(f"quantize, {name}: the bytes of one worker", same(out, small))
                remove(out)
        for name, found in speeds.items():
            lines.add(f"quantize, {name}, GB/s", statistics.median(found), note=f"best {max(found):.2f}")
        if len(workers) > 1:
            one, two = (statistics.median(speeds[name]) for name in names)
            lines.add("quantize, two workers of dask-cuda beside one", two / one, 1.7)
        _spill(client, len(workers), lines)


def _chunk(block_info=None):
    """Numbers that are another chunk's nowhere: CuPy's, from a few that are made on the host."""
    cupy, number = _cupy(), block_info[None]["chunk-location"][0]
    few = np.random.default_rng(number).standard_normal(1 << 16, np.float32)
    return cupy.tile(cupy.asarray(few), CHUNK[0] * CHUNK[1] >> 16).reshape(CHUNK)


def _is_right(q, number):
    """Whether a chunk is on a GPU, and what quantize makes of its numbers."""
    expected = kb.quantize(_chunk({None: {"chunk-location": (number, 0)}}), FORMAT)
    return q.device == expected.device and all(
        bool((q.planes[name] == plane).all()) for name, plane in expected.planes.items()
    )


def _held(dask_worker):
    """Bytes of compressed chunks on the GPU of a worker, and in its host memory."""
    from dask.sizeof import sizeof

    data = dask_worker.data
    return [
        sum(sizeof(one) for key, one in place.items() if "kbit-quantize" in str(key))
        for place in (data.device, data.host)
    ]


def _spill(client, workers, lines):
    import dask.array as da
    from distributed import futures_of, wait

    count = CHUNKS * workers
    chunks = ((CHUNK[0],) * count, (CHUNK[1],))
    x = da.map_blocks(_chunk, chunks=chunks, dtype=np.float32, meta=_cupy().empty((0, 0), np.float32))
    q = kb.dask.quantize(x, FORMAT).persist()
    wait(q)
    held = client.run(_held)
    for on_gpu, on_host in held.values():
        lines.add("GB of compressed chunks that a worker has", (on_gpu + on_host) / 1e9, 2.0)
        lines.add("GB of them on its GPU", on_gpu / 1e9, most=DEVICE_LIMIT / 1e9)
        lines.right("others are in the host's memory", on_host > 0)
    sizes = client.run_on_scheduler(
        lambda dask_scheduler: [
            each.nbytes for key, each in dask_scheduler.tasks.items() if "kbit-quantize" in str(key)
        ]
    )
    one = kb.quantize(np.zeros((32, 32), np.float32), FORMAT).format
    expected = sum(np.dtype(plane.dtype).itemsize * int(np.prod(plane.shape)) for plane in one.planes(CHUNK).values())
    lines.right("the scheduler's bytes are q.nbytes", len(sizes) >= count and set(sizes) == {expected})
    checks = [client.submit(_is_right, future, future.key[1], pure=False) for future in futures_of(q)]
    lines.right("what was spilled comes back right", len(checks) == count and all(client.gather(checks)))


# ---- the host --------------------------------------------------------------------------------------------------------


#: What a process tells of its memory: the most that it has had, looked at every few milliseconds, and what it has
#: pinned, which is counted where it is asked for, since the driver's pages may be none of the process'; and how much of
#: what it takes at its end, and on a GPU pins, that counts. It ends at once: what is pinned has nobody to go back to.
_WATCHED = """
import os, sys, threading, time
import kbitcupy.cli as cli

most, pinned, page = 0, 0, os.sysconf("SC_PAGE_SIZE")

def used():
    with open("/proc/self/statm") as file:
        resident, of_files = map(int, file.read().split()[1:3])
    return page * (resident - of_files) + pinned

def watch():
    global most
    while True:
        most = max(most, used())
        time.sleep(0.003)

threading.Thread(target=watch, daemon=True).start()
on_gpu, tried = "cpu" not in sys.argv, int(sys.argv[1])
if on_gpu:
    from cupy import cuda

    def pin(nbytes):
        global pinned
        pinned += nbytes
        return cuda.PinnedMemoryPointer(cuda.PinnedMemory(nbytes), 0)

    cuda.set_pinned_memory_allocator(cuda.PinnedMemoryPool(pin).malloc)
status = cli.main(sys.argv[2:])
found, before = max(most, used()), used()
if tried:
    import numpy as np

    kept = np.ones(tried, np.uint8), cuda.alloc_pinned_memory(tried) if on_gpu else None
print("found:", found, used() - before, flush=True)
sys.stderr.flush()
os._exit(status)
"""
#: Bytes by which it is tried whether memory is counted, and the seconds that a command may take.
_TRIED, _LIMIT = 1 << 28, 120


def memory(folder, lines, rounds):
    """Of commands, which are processes of their own; what a job takes that has next to nothing to do is not counted."""
    source, small, device = folder / "source", compressed(folder), devices()[0]
    tiny = [folder / f"tiny.{number}.safetensors" for number in range(3)]
    kb.io.save(tiny[0], {"w": np.zeros((64, 64), np.float16)})
    largest, kinds = 2 * SHAPE[0] * SHAPE[1], 1 + (device != "cpu")
    for number, (direction, read) in enumerate((("quantize", source), ("dequantize", small))):
        # The first one may have to compile kernels.
        bases = [_peak(direction, *tiny[number : number + 2], 1, device, _TRIED) for _ in range(2)]
        base, counted = min(found for found, _ in bases), bases[-1][1] / (kinds * _TRIED)
        # What is pinned may be the process' own as well, and be counted twice.
        lines.right(f"{direction}: memory that a process takes and pins is counted", 0.9 <= counted <= 1.6)
        for workers in (1, 8):
            peak = _peak(direction, first(read, FEW), folder / "out", workers, device)[0] - base
            remove(folder / "out")
            what = f"{direction}, {workers} workers: peak over workers x largest tensor"
            lines.add(what, peak / workers / largest, most=2.5, note=f"{peak / 1e9:.3f} GB, and {base / 1e9:.2f}")


def _peak(direction, source, out, workers, device, tried=0):
    """Bytes that the process of a command has at most, and how many it counts of those that it is to take behind."""
    words = [direction, str(source), "-o", str(out), "--device", device, "--workers", str(workers), "--force"]
    words += ["--format", FORMAT] * (direction == "quantize")
    command = [sys.executable, "-c", _WATCHED, str(tried), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}, {done.stderr}")
    peak, counted = done.stdout.rpartition("found:")[2].split()
    return int(peak), int(counted)


def numpy(folder, lines, rounds):
    small, out = compressed(folder), folder / "out"
    several, one = first(folder / "source", 2 * FEW), first(folder / "source", FEW // 2)
    alone = floats(one) / job("quantize", one, out, None, "cpu")
    lines.right("NumPy: the bytes of a GPU", same(out, small))
    remove(out)
    began = time.perf_counter()
    with executors.local(PROCESSES) as pool:
        job("quantize", several, out, pool, "cpu")
    together = floats(several) / (time.perf_counter() - began)
    lines.right(f"NumPy, {PROCESSES} processes: the bytes of one worker", same(out, small))
    remove(out)
    lines.add("NumPy, GB/s of one process", alone)
    lines.add(
        f"NumPy, {PROCESSES} processes and their start beside one", together / alone, 5, note=f"{together:.2f} GB/s"
    )


def cores(folder, lines, rounds):
    """Two threads where the system puts them: a host's cores may be of unlike speed, and two of its CPUs one core."""
    cpus = os.sched_getaffinity(0)
    count = len({_siblings(cpu) for cpu in cpus})
    shared = ": two threads may share one" * (count < len(cpus))
    print(f"{len(cpus)} CPUs, of {count} cores as the system tells{shared}")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        seconds = pool.submit(_two_threads, PAIRS * rounds).result()
    for what, pairs in seconds.items():
        ratios = [one / two for one, two in pairs]
        note = f"{min(ratios):.2f} to {max(ratios):.2f}; one {1e3 * min(one for one, _ in pairs):.0f} ms"
        least = None if what == ALONE else 1.7
        lines.add(f"workers=2 beside 1: {what}", statistics.median(ratios), least, note=note)


def _siblings(cpu):
    """What the system calls the CPUs of one core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _two_threads(pairs):
    """So many pairs of seconds, of one thread and of two, by what they do, which takes turns: pairs lie apart."""
    x = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32).reshape(-1, 4096)
    calls = {f"{format} of {dtype}": functools.partial(kb.quantize, x.astype(dtype), format) for format, dtype in CORES}
    calls[ALONE] = _alone
    found = {what: [] for what in calls}
    for _ in range(pairs):
        for what, call in calls.items():
            seconds = {1: [], 2: []}
            for _ in range(RUNS):
                for workers, own in seconds.items():
                    began = time.perf_counter()
                    call(workers=workers)
                    own.append(time.perf_counter() - began)
            found[what].append(tuple(map(min, seconds.values())))
    return found


def _alone(workers):
    """Work that needs neither memory nor the interpreter, shared by threads: what two of these CPUs are worth."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: hashlib.pbkdf2_hmac("sha256", b"", b"", HASHED // workers), range(workers)))


GROUPS = {"gpus": gpus, "dask": dask, "memory": memory, "numpy": numpy, "cores": cores}


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP")
    parser.add_argument("--shards", type=int, default=32, help="fewer where there is no room for them")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(words)
    lines, shards = Lines(), min(chosen.shards, room(chosen.folder))
    print(f"{shards} shards")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        for group in ["source", *(chosen.groups or GROUPS)]:
            began = time.perf_counter()
            if group == "source":
                write_checkpoint(Path(name) / group, shards)
            else:
                try:
                    GROUPS[group](Path(name), lines, chosen.rounds)
                except Exception:  # the others are worth running
                    traceback.print_exc()
                    lines.right(f"{group} could be run", False)
                shutil.rmtree(Path(name) / "out", ignore_errors=True)
            print(f"---- {group}: {time.perf_counter() - began:.0f} s", flush=True)
    print(*(f"short: {line}" for line in lines.short), sep="\n")
    return bool(lines.short)


if __name__ == "__main__":
    sys.exit(main())
