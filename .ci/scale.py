"""How checkpoint jobs grow with workers, cores and GPUs: ``python .ci/scale.py FOLDER [GROUP...]``.

FOLDER is on a RAM disk. A whole job is timed: names and space checked, shards of 537 MB of float16 read, compressed to
kbit4 or decoded, and written. GB are those of float16. What is compared takes turns, A B A B, as often as the time of
its group allows. Speeds are medians, and what one is beside another is a ratio of least times: whatever else a host
does meanwhile only adds to them. Each line says at once whether it is met; those that fall short of what they are to
reach are named again at the end, and the status is 1.

    cores   `workers=2` beside 1
    numpy   8 processes beside one
    gpus    1, 4 and 8 workers on a GPU, beside a prototype; as many on each of two GPUs, by threads and by processes;
            and what the RAM disk itself gives so many threads that do nothing but read it, or write to it
    dask    two workers of dask-cuda beside one; compressed chunks that are spilled to the host and come back
    memory  peak of the host's memory, beside workers times the largest tensor

All bytes are compared with those of one worker. What takes two GPUs is left out where there is one. A virtual machine
may get its memory when that is written to first, which then counts as work of a job: so as much of the RAM disk as all
jobs need is written to beforehand.
"""

import argparse
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import signal
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
#: What else two CPUs do, which says what they are worth: its names, and how often one of it hashes.
HASHING, APART = "two threads that hash beside one", "two processes of half the numbers beside one"
HASHED = 1 << 18
#: Compressed chunks for each worker of dask-cuda, their elements, and the bytes that its GPU may hold of them.
CHUNKS, CHUNK, DEVICE_LIMIT = 18, (1 << 14, 1 << 14), 1_000_000_000
#: Processes of NumPy.
PROCESSES = 8
#: Seconds of all, and how those that are left are shared out to groups; of two directions of a job, how much the first
#: one gets; what the end of a group takes after its rounds, and rounds that each has whatever it takes.
SECONDS = 280
SHARES = {"cores": 25, "numpy": 35, "gpus": 105, "dask": 50, "memory": 35}
FIRST, SPILLING, LEAST_ROUNDS = 0.4, 15, 2
#: Bytes that are written to the RAM disk at a time before there is a checkpoint, by how many threads, the memory that
#: is to be left beside them, and how often one of them waits for that, how many seconds.
TOUCHED, TOUCHING, LEFT, PATIENCE, MOMENT = 1 << 26, 8, 2e9, 400, 0.1
_INDEX = "model.safetensors.index.json"


class Lines:
    """What was found, beside what is to be reached."""

    def __init__(self, until=float("inf")):
        self.short, self.until = [], until

    def add(self, what, value, least=None, most=None, note=""):
        """Print a line."""
        target = f"at least {least}" if least is not None else f"at most {most}" if most is not None else ""
        missed = (least is not None and value < least) or (most is not None and value > most)
        self.short += [f"{what}: {value:.2f} ({target})"] * missed
        said = "SHORT" if missed else "met" if target else ""
        print(f"{what:66} {value:8.2f}  {target:14} {said:6} {note}", flush=True)

    def right(self, what, is_right):
        """Print whether something holds."""
        self.short += [what] * (not is_right)
        print(f"{what:66} {'yes' if is_right else 'NO':>8}", flush=True)

    def ratio(self, what, one, two, least=None):
        """Print by how much the least of some times is shorter than that of others; medians stand beside it."""
        ratio, middle = min(one) / min(two), statistics.median(one) / statistics.median(two)
        self.add(what, ratio, least, note=f"medians {middle:.2f}, of {len(one)} and {len(two)}")


def in_turns(calls, until, most):
    """Seconds that these calls, which tell them, have taken by their names: so many rounds at most, as long as there
    is time, but a few.
    """
    seconds = defaultdict(list)
    for number in range(most):
        began = time.monotonic()
        for name, call in calls.items():
            seconds[name].append(call(not number))
        now = time.monotonic()
        if number + 1 >= LEAST_ROUNDS and now + (now - began) > until:
            break
    return seconds


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
    folder.mkdir()

    def normal(seed):
        return np.random.default_rng(seed).standard_normal(SHAPE, np.float32).astype(np.float16)

    def write(number):
        tensors = {f"layers.{number:03}.{i}": numbers[(number + i) % NUMBERS] for i in range(TENSORS)}
        kb.io.save(folder / _name(number, shards), tensors)

    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(normal, range(NUMBERS)))
        list(pool.map(write, range(shards)))
    _write_index(folder)


def available():
    """Bytes of memory that the system can still give, where it tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def touch(folder, nbytes):
    """Write so many bytes to the RAM disk, and remove them: how many could be written."""
    folder.mkdir()
    zeros, waits = np.zeros(TOUCHED, np.uint8), [MOMENT] * PATIENCE

    def write(number):
        while available() < LEFT:  # more may be on its way
            if not waits:
                return 0
            time.sleep(waits.pop())
        (folder / str(number)).write_bytes(zeros)
        return zeros.nbytes

    with ThreadPoolExecutor(TOUCHING) as pool:
        written = sum(pool.map(write, range(-(-nbytes // TOUCHED))))
    remove(folder)
    return written


def first(folder, shards):
    """Its first shards as a checkpoint of their own, which takes no memory."""
    found = folder.with_name(f"{folder.name}-{shards}")
    if not found.exists():
        found.mkdir()
        for path in sorted(folder.glob("*.safetensors"))[:shards]:
            os.link(path, found / path.name)
        _write_index(found)
    return found


#: Of a shard, the bytes that it takes with what becomes of it: once compressed, twice decoded.
_TIMES = 3.5


def shard_nbytes():
    return 2 * TENSORS * SHAPE[0] * SHAPE[1]


def room(folder):
    """How many shards there is room for, and beside them for what becomes of them."""
    return int(shutil.disk_usage(folder).free / shard_nbytes() / _TIMES)


def floats(folder):
    """GB of a checkpoint as float16."""
    return len(list(folder.glob("*.safetensors"))) * shard_nbytes() / 1e9


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
    names, began = devices(), time.monotonic()
    source, back, out = folder / "source", folder / "back", folder / "out"
    disk = _of_disk(source, out, lines) if len(names) > 1 else None
    for name in names:  # kernels are compiled, and loaded
        job("quantize", first(source, 1), out, None, name)
        job("dequantize", out, back, None, name)
        for made in (out, back):
            remove(made)
    small = compressed(folder)
    job("dequantize", small, back, None, names[0])
    with contextlib.ExitStack() as stack:
        who = {_workers(n): (stack.enter_context(executors.local(n, names[:1])), names[:1]) for n in (1, 4, 8)}
        for n in (1, 4, 8) if len(names) > 1 else ():
            each = f"{_workers(n)} on each of two"
            who[f"{each}, threads"] = stack.enter_context(executors.local(2 * n, names)), names
            start = time.perf_counter()
            pool = stack.enter_context(executors.local(2 * n, names, executors.APART))
            who[f"{each}, processes"] = pool, names
            job("quantize", first(source, FEW), out, pool, names)
            remove(out)
            what = f"processes for {_workers(n)} on each of two GPUs and their first {FEW} shards, s"
            lines.add(what, time.perf_counter() - start)
        prototypes = {n: Prototype(n, names[0], _cupy()) for n in (1, 4, 8)}
        for prototype in prototypes.values():
            stack.callback(prototype.close)
        half = began + FIRST * (lines.until - began)
        for direction, read, expected, until in (
            ("quantize", source, small, half),
            ("dequantize", small, back, lines.until),
        ):
            calls = {
                name: functools.partial(job, direction, executor=own, device=on) for name, (own, on) in who.items()
            }
            if direction == "dequantize":
                calls |= {
                    _prototype(n): functools.partial(each.dequantize, expected=back) for n, each in prototypes.items()
                }
            runs = {
                name: functools.partial(_run, f"{direction}, {name}", call, read, expected, out, lines)
                for name, call in calls.items()
            }
            _say(direction, in_turns(runs, until, rounds), floats(source), lines)
            if disk is not None:
                _say_disk(direction, *(_nbytes(each) for each in (read, expected)), disk, lines)
    remove(back)


def _workers(n):
    return "1 worker" if n == 1 else f"{n} workers"


def _prototype(workers):
    return f"prototype of {workers}"


def _alone(who):
    """Whether it is one worker, or one on each of two GPUs, for whom some shards are enough."""
    return who.partition(" on each of two")[0] in (_workers(1), _prototype(1))


def _run(what, call, source, expected, out, lines, is_first):
    """The seconds of a job, or of the part of it that is enough for one worker."""
    alone = _alone(what.partition(", ")[2])
    seconds = call(source=first(source, FEW) if alone else source, out=out)
    if is_first:
        lines.right(f"{what}: the bytes of one worker", same(out, expected))
    remove(out)
    return seconds


def _say(direction, seconds, nbytes, lines):
    """Speeds and ratios of jobs of so many GB."""
    few = min(nbytes, FEW * shard_nbytes() / 1e9)
    least = {_workers(1): 3.3, _workers(4): 10, _workers(8): 14} if direction == "quantize" else {}
    for name, found in seconds.items():
        _say_speed(f"{direction}, {name}", few if _alone(name) else nbytes, found, lines, least.get(name))
    for n in (1, 4, 8):
        name = _workers(n)
        if _prototype(n) in seconds:
            what = f"{direction}, {name} beside the prototype"
            lines.ratio(what, seconds[_prototype(n)], seconds[name], 0.85)
        two = [found for who, found in seconds.items() if who.startswith(f"{name} on each")]
        if two:
            what = f"{direction}, {name} on each of two GPUs beside {n} on one"
            lines.ratio(what, seconds[name], min(two, key=min), 1.7)


def _of_disk(source, out, lines):
    """Least seconds a byte of so many threads that read files of the RAM disk, or write them, with no GPU and no work
    beside; how much faster twice as many are.
    """
    paths = sorted(source.glob("*.safetensors"))[: 2 * FEW]
    out.mkdir()

    def read(path, buffer):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def write(path, buffer):
        with open(out / path.name, "wb", buffering=0) as file:
            for _ in range(shard_nbytes() // buffer.nbytes):
                file.write(buffer)

    def timed(what, workers):
        buffers, some = threading.local(), paths if workers > 2 else paths[:FEW]

        def one(path):
            if not hasattr(buffers, "own"):
                buffers.own = np.ones(1 << 22, np.uint8)
            what(path, buffers.own)

        began = time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, some))
        return (time.perf_counter() - began) / (len(some) * shard_nbytes())

    found = {}
    for what in (read, write):
        calls = {n: lambda is_first, what=what, n=n: timed(what, n) for n in (1, 2, 4, 8, 16)}
        seconds = in_turns(calls, 0, LEAST_ROUNDS)
        for n in (1, 4, 8):
            lines.ratio(
                f"the RAM disk itself: {2 * n} threads that {what.__name__} beside {n}", seconds[n], seconds[2 * n]
            )
        found[what.__name__] = {n: min(each) for n, each in seconds.items()}
    remove(out)
    return found


def _nbytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _say_disk(direction, read, written, disk, lines):
    """How much faster two GPUs could be if nothing but reading so many bytes and writing so many took time."""
    seconds = {n: read * disk["read"][n] + written * disk["write"][n] for n in disk["read"]}
    for n in (1, 4, 8):
        lines.add(f"{direction}, reading and writing alone: {2 * n} threads beside {n}", seconds[n] / seconds[2 * n])


def _say_speed(what, nbytes, seconds, lines, least=None):
    lines.add(f"{what}, GB/s", nbytes / statistics.median(seconds), least, note=f"best {nbytes / min(seconds):.2f}")


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
        calls = {}
        for count in sorted({1, len(workers)}):
            what = f"quantize, {_workers(count)} of dask-cuda"
            executor = client.get_executor(pure=False, workers=workers[:count])
            call = functools.partial(job, "quantize", executor=executor, device="auto")
            calls[what] = functools.partial(_run, what, call, source, small, out, lines)
            call(source=first(source, FEW), out=out)  # kernels are loaded
            remove(out)
        seconds = in_turns(calls, lines.until - SPILLING, rounds)
        for what, found in seconds.items():
            _say_speed(what, floats(source), found, lines)
        if len(workers) > 1:
            lines.ratio("quantize, two workers of dask-cuda beside one", *seconds.values(), 1.7)
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
            what = f"{direction}, {_workers(workers)}: peak over workers x largest tensor"
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
    """One process on few shards, and several, which begin with the job, on all, so that their start weighs little."""
    small, out, source = compressed(folder), folder / "out", folder / "source"
    few = first(source, FEW // 2)

    def run(read, pool, what, is_first):
        began = time.perf_counter()
        with pool() as executor:
            job("quantize", read, out, executor, "cpu")
            seconds = time.perf_counter() - began
        if is_first:
            lines.right(what, same(out, small))
        remove(out)
        return seconds / floats(read)

    several = functools.partial(executors.local, PROCESSES)
    calls = {
        "NumPy": functools.partial(run, few, contextlib.nullcontext, "NumPy: the bytes of a GPU"),
        f"NumPy, {PROCESSES} processes": functools.partial(
            run, source, several, f"NumPy, {PROCESSES} processes: the bytes of one worker"
        ),
    }
    seconds = in_turns(calls, lines.until, rounds)
    for what, found in seconds.items():
        _say_speed(what, 1, found, lines)
    lines.ratio(f"NumPy, {PROCESSES} processes and their start beside one", *seconds.values(), 5)


def cores(folder, lines, rounds):
    """Two threads where the system puts them: a host's cores may be of unlike speed, and two of its CPUs one core."""
    cpus = os.sched_getaffinity(0)
    count = len({_siblings(cpu) for cpu in cpus})
    shared = ": two threads may share one" * (count < len(cpus))
    print(f"{len(cpus)} CPUs, of {count} cores as the system tells{shared}")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        seconds = pool.submit(_two_threads, lines.until, 10 * rounds).result()
    for what, (one, two) in seconds.items():
        least = None if what in (HASHING, APART) else 1.7
        lines.ratio(what if least is None else f"workers=2 beside 1: {what}", one, two, least)
        print(f"    ms: {_few(one)} and {_few(two)}", flush=True)


def _few(seconds):
    """The least of them in ms, and those that a tenth and half of them are below."""
    ordered = sorted(seconds)
    return " ".join(f"{1e3 * ordered[int(part * (len(ordered) - 1))]:.1f}" for part in (0, 0.1, 0.5))


def _siblings(cpu):
    """What the system calls the CPUs of one core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _numbers():
    return np.random.default_rng(0).standard_normal(ELEMENTS, np.float32).reshape(-1, min(4096, ELEMENTS // 2))


def _two_threads(until, most):
    """Seconds of one and of two, in turns, by what they do: the first format, what two CPUs are worth beside, and then
    the other formats, which have half of the time.
    """
    x, pairs = _numbers(), {}
    for format, dtype in CORES:
        quantize = functools.partial(kb.quantize, x.astype(dtype), format)
        pairs[f"{format} of {dtype}"] = [functools.partial(_timed, quantize, workers) for workers in (1, 2)]
    with ProcessPoolExecutor(2, get_context("spawn"), _begin_half, (get_context("spawn").Barrier(2),)) as pool:
        own, *others = pairs
        beside = {own: pairs.pop(own), HASHING: [functools.partial(_timed, _hash, workers) for workers in (1, 2)]}
        beside[APART] = [beside[own][0], functools.partial(_halves, pool)]
        found = {}
        for part, ends in ((beside, (time.monotonic() + until) / 2), (pairs, until)):
            calls = {(what, number): call for what, both in part.items() for number, call in enumerate(both)}
            for call in calls.values():
                call(True)
            seconds = in_turns(calls, ends, most)
            found |= {what: (seconds[what, 0], seconds[what, 1]) for what in part}
    return {what: found[what] for what in (own, *others, HASHING, APART)}


def _timed(function, workers, is_first):
    began = time.perf_counter()
    function(workers=workers)
    return time.perf_counter() - began


def _hash(workers):
    """Work that needs neither memory nor the interpreter, shared by threads."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: hashlib.pbkdf2_hmac("sha256", b"", b"", HASHED // workers), range(workers)))


#: What a process of two has: half of the numbers, and what both wait at.
_own = {}


def _begin_half(together):
    dtype = CORES[0][1]
    _own.update(x=np.split(_numbers().astype(dtype), 2)[0], together=together)


def _half(number):
    _own["together"].wait()
    began = time.monotonic()
    kb.quantize(_own["x"], CORES[0][0])
    return began, time.monotonic()


def _halves(pool, is_first):
    """What `workers=2` would take of processes, which do not share an interpreter."""
    began, ended = zip(*pool.map(_half, range(2)), strict=True)
    return max(ended) - min(began)


GROUPS = {"cores": cores, "numpy": numpy, "gpus": gpus, "dask": dask, "memory": memory}


def _say_host():
    """What it is measured on."""
    try:
        cpus = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    except (OSError, IndexError):
        cpus = platform.processor()
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    print(f"{cpus}, {nodes} nodes, {platform.release()}, load {' '.join(f'{load:.1f}' for load in os.getloadavg())}")


def _source(folder, shards):
    """The checkpoint that all jobs read, on memory that was written to before."""
    began = time.perf_counter()
    nbytes = touch(folder / "touched", int(shards * shard_nbytes() * _TIMES))
    seconds = time.perf_counter() - began
    print(f"{nbytes / 1e9:.0f} GB of the RAM disk written to beforehand: {seconds:.0f} s", flush=True)
    write_checkpoint(folder / "source", shards)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP")
    parser.add_argument("--shards", type=int, default=32, help="fewer where there is no room for them")
    parser.add_argument("--rounds", type=int, default=9, help="at most, for each group")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all groups, if least rounds take no longer")
    chosen = parser.parse_args(words)
    ends, lines, shards = time.monotonic() + chosen.seconds, Lines(), min(chosen.shards, room(chosen.folder))
    _say_host()
    left = list(chosen.groups or GROUPS)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        while left:
            began = time.monotonic()
            if left[0] != "cores" and not (folder / "source").exists():
                _source(folder, shards)
                print(f"---- {shards} shards: {time.monotonic() - began:.0f} s", flush=True)
                continue
            lines.until = began + (ends - began) * SHARES[left[0]] / sum(SHARES[each] for each in left)
            group = left.pop(0)
            try:
                GROUPS[group](folder, lines, chosen.rounds)
            except Exception:  # the others are worth running
                traceback.print_exc()
                lines.right(f"{group} could be run", False)
            shutil.rmtree(folder / "out", ignore_errors=True)
            print(f"---- {group}: {time.monotonic() - began:.0f} s", flush=True)
    print(*(f"short: {line}" for line in lines.short), sep="\n", flush=True)
    return bool(lines.short)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the RAM disk is left as it was found
    sys.exit(main())
