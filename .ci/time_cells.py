"""Time named calls of two trees side by side on a GPU: ``python .ci/time_cells.py OLD NEW``.

OLD and NEW are folders that hold the package. Each has a process of its own, which calls nothing but the public
functions that both have; the two are timed in turns, so that clocks and temperature are the same for both, and each
round has its arrays at new places: where these lie moves a cell by up to 5 %. A cell is the GPU time of a call: CUDA
events around a graph of calls that rotate through inputs larger than the cache, behind the same graph (calls of cuBLAS
are queued one by one). `cpu` is the time that a call takes to be queued. Behind the ratio, the mean of those of the
rounds, stands its standard error: 25 rounds tell differences of half a percent apart. A cell that is slower by more
than 5 % is timed again with three times the rounds, and what is printed is the repetition.
"""

import argparse
import contextlib
import fnmatch
import json
import random
import statistics
import subprocess
import sys
import time

ELEMENTS = 1 << 28
#: Bytes that are taken before the arrays of a round, at the most, and of how many rounds they stay.
_MOST_BESIDE, _BESIDE = 64 << 20, 16
#: What linear_grouped multiplies with: experts, rows, depth, experts a token.
EXPERTS = (128, 768, 2048, 8)
CELLS = [
    *(f"quantize/{name}/float16/2^28" for name in ("kbit2", "kbit4", "kbit5", "nf4", "dynamic8", "int8", "int4")),
    *(f"dequantize/{name}/float16/2^28" for name in ("kbit2", "kbit4", "kbit5", "nf4", "dynamic8", "int8", "int4")),
    *(f"{operation}/{name}/float32/2^28" for name in ("kbit4", "int8") for operation in ("quantize", "dequantize")),
    *(f"take/{name}/float16/65536x4096/512" for name in ("kbit4", "nf4")),
    *(f"linear/kbit4/28672x8192/{tokens}" for tokens in (1, 8, 32, 64, 512)),
    *(f"linear/{name}/28672x8192/{tokens}" for name in ("kbit2", "kbit3", "kbit5", "nf4") for tokens in (1, 8, 64)),
    *(f"linear/{name}/4096x4096/{tokens}" for name in ("kbit4", "nf4") for tokens in (1, 8)),
    "linear_grouped/kbit4/128x768x2048/8",
    "linear_grouped/nf4/128x768x2048/64",
    *(f"linear_w8a8/int8/28672x8192/{tokens}" for tokens in (1, 16, 512)),
    # Ranges: of a tensor, of rows long and short, of columns and of groups, and at a percentile.
    *(f"quantize/int8@token/{dtype}/65536x4096" for dtype in ("float16", "bfloat16", "float32")),
    *(f"quantize/{name}/float16/65536x4096" for name in ("int8@channel:1", "int8@group:64", "int4@group:128")),
    *(f"quantize/{name}/float32/65536x4096" for name in ("int8@group:64", "int4@group:32", "int4@channel:0")),
    *(f"quantize/int8@channel:0@99.9/{dtype}/16384x4096" for dtype in ("float16", "float32")),
    *(f"linear_w8a8_float32/int8/28672x8192/{tokens}" for tokens in (16, 512)),
]


def chosen_by(name):
    """A format and its options from a cell's name: ``int8@channel:0@99.9`` has a granularity and a percentile."""
    name, *given = name.split("@")
    if not given:
        return name, {}
    kind, _, number = given[0].partition(":")
    options = {"granularity": (kind, int(number)) if number else kind}
    return name, options | ({"percentile": float(given[1])} if given[1:] else {})


# ---- a tree's process ------------------------------------------------------------------------------------------------


class Worker:
    """One tree on the GPU; a cell is prepared, timed as often as is asked for, and dropped."""

    def __init__(self):
        import cupy
        import numpy

        self.cp, self.np = cupy, numpy
        self.stream = cupy.cuda.Stream()
        self.stream.use()
        pool = numpy.random.default_rng(0).standard_normal((1 << 24) + 4096, numpy.float32)
        import ml_dtypes

        kinds = {"float32": numpy.float32, "float16": numpy.float16, "bfloat16": ml_dtypes.bfloat16}
        self.pools = {name: cupy.asarray(pool.astype(kind)) for name, kind in kinds.items()}
        self.cold = 4 * int(cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"])
        self.beside = []

    def data(self, shape, dtype, number):
        """Normal data that repeats after 2^24 elements, and begins elsewhere for each number."""
        count = self.np.prod(shape, dtype=int)
        part = self.pools[dtype][8 * number % 4096 :][: 1 << 24]
        return self.cp.resize(part, int(count)).reshape(shape)

    def calls(self, cell):
        """Yields (call, bytes that it moves) for as many inputs as are asked for."""
        import kbitcupy as kb

        operation, name, *rest = cell.split("/")
        cp, np = self.cp, self.np
        if operation in ("quantize", "dequantize"):
            dtype, shape = rest[0], (ELEMENTS,) if rest[1] == "2^28" else tuple(map(int, rest[1].split("x")))
            name, options = chosen_by(name)
            for number in range(1 << 30):
                x = self.data(shape, dtype, number)
                q = kb.quantize(x, name, **options)
                if operation == "quantize" and options:  # the percentile is not a part of q's format in all trees
                    yield (lambda x=x: kb.quantize(x, name, **options)), x.nbytes + q.nbytes
                elif operation == "quantize":
                    yield (lambda x=x, q=q: kb.quantize(x, name, out=q)), x.nbytes + q.nbytes
                else:
                    yield (lambda x=x, q=q: kb.dequantize(q, out=x)), x.nbytes + q.nbytes
        shape, tokens = tuple(map(int, rest[-2].split("x"))), int(rest[-1])
        rng = np.random.default_rng(tokens)
        if operation == "take":
            q = kb.quantize(self.data(shape, "float16", 0), name)
            out = cp.empty((tokens, shape[1]), np.float16)
            for _ in range(1 << 30):
                rows = cp.asarray(rng.integers(0, shape[0], tokens))
                yield (lambda rows=rows: kb.take(q, rows, out=out)), out.nbytes + q.nbytes * tokens // shape[0]
        token_dtype = np.float32 if operation.endswith("_float32") else np.float16
        x = cp.asarray(rng.standard_normal((tokens, shape[-1])).astype(token_dtype))
        if operation == "linear_grouped":
            experts, _, _, chosen = EXPERTS
            ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
            touched, ids = len(np.unique(ids)), cp.asarray(ids)
            out = cp.empty((tokens, chosen, shape[1]), np.float16)
        else:
            out = cp.empty((tokens, shape[0]), token_dtype)
        for number in range(1 << 30):
            w = self.data(shape, "float16", number)
            if operation == "linear":
                q = kb.quantize(w, name)
                yield (lambda q=q: kb.linear(x, q, out=out)), q.nbytes
            elif operation == "linear_grouped":
                q = kb.quantize(w, name)
                yield (lambda q=q: kb.linear_grouped(x, q, ids, out=out)), q.nbytes * touched // experts
            else:
                q = kb.quantize(w, name, granularity=("channel", 0))
                yield (lambda q=q: kb.affine.linear_w8a8(x, q, out=out)), q.nbytes

    def prepare(self, cell, beside=0):
        """Arrays for a cell; `beside` bytes are taken before, so that they lie elsewhere than the last ones."""
        self.beside.append(self.cp.cuda.Memory(beside) if beside else None)
        del self.beside[:-_BESIDE]
        make = self.calls(cell)
        call, nbytes = next(make)
        rotated = max(1, min(64, -(-self.cold // nbytes)))
        calls = [call, *(next(make)[0] for _ in range(rotated - 1))]
        for _ in range(4):  # the first may compile, and make handles and workspaces of cuBLAS
            self.stream.synchronize()
            start = time.perf_counter()
            call()
            self.stream.synchronize()
            once = time.perf_counter() - start
        for other in calls[1:]:
            other()
        self.list = calls * -(-max(4, min(100, int(2e-3 / once))) // rotated)
        self.launch = self.graph() or (lambda: [call() for call in self.list])
        self.launch()
        self.stream.synchronize()

    def graph(self):
        """The calls as one graph; None, and another stream, where they cannot be captured (cuBLAS)."""
        self.stream.synchronize()
        self.stream.begin_capture()
        try:
            self.kept = [call() for call in self.list]
            graph = self.stream.end_capture()
        except Exception:
            with contextlib.suppress(Exception):
                self.stream.end_capture()
            self.stream = self.cp.cuda.Stream()
            self.stream.use()
            return None
        return lambda: graph.launch(self.stream)

    def sample(self):
        """Microseconds of a call on the GPU, and of queueing it on the CPU: the least of many."""
        events = [self.cp.cuda.Event() for _ in range(2)]
        found = []
        for _ in range(5):
            self.launch()  # what is timed queues up behind it
            events[0].record(self.stream)
            self.launch()
            events[1].record(self.stream)
            events[1].synchronize()
            found.append(self.cp.cuda.get_elapsed_time(*events) * 1e3 / len(self.list))
        count, batches = 10, []
        for _ in range(20):
            start = time.perf_counter()
            for number in range(count):
                self.list[number % len(self.list)]()
            batches.append((time.perf_counter() - start) / count * 1e6)
            self.stream.synchronize()
        return [statistics.median(found), min(batches)]

    def drop(self):
        self.list = self.kept = self.launch = None
        self.cp.get_default_memory_pool().free_all_blocks()


def serve(tree):
    sys.path.insert(0, tree)
    worker = Worker()
    import kbitcupy

    if not kbitcupy.__file__.startswith(tree):
        raise ImportError(f"{kbitcupy.__file__} is not of {tree}")
    for line in sys.stdin:
        word, *arguments = json.loads(line)
        try:
            answer = getattr(worker, word)(*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


# ---- side by side ----------------------------------------------------------------------------------------------------


class Tree:
    def __init__(self, folder):
        command = [sys.executable, __file__, "--serve", folder]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *what):
        print(json.dumps(what), file=self._process.stdin, flush=True)

    def answer(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a tree's process has ended")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise RuntimeError(answer["error"])
        return answer

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def both(trees, *what):
    """The answers of both, who work at the same time."""
    for tree in trees:
        tree.ask(*what)
    answers, errors = [], []
    for tree in trees:
        try:
            answers.append(tree.answer())
        except RuntimeError as error:
            errors.append(str(error))
    if errors:
        raise RuntimeError("; ".join(errors))
    return answers


def compare(trees, cell, rounds):
    """Median GPU us and least CPU us of each tree, timed in turns; mean and standard error of the rounds' ratios."""
    rng, found = random.Random(0), ([], [])
    for turn in range(rounds):
        both(trees, "prepare", cell, rng.randrange(1 << 20, _MOST_BESIDE))
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            trees[i].ask("sample")
            found[i].append(trees[i].answer())
        both(trees, "drop")
    ratios = [new[0] / old[0] for old, new in zip(*found, strict=True)]
    error = statistics.stdev(ratios) / rounds**0.5 if rounds > 1 else 0.0
    times = [(statistics.median(gpu for gpu, _ in samples), min(cpu for _, cpu in samples)) for samples in found]
    return *times, statistics.mean(ratios), error


def chosen_cells(patterns):
    """Cells of the list whose names match, and those that are named whole, whether the list has them or not."""
    named = [pattern for pattern in patterns if not set("*?[") & set(pattern)]
    return list(dict.fromkeys([cell for cell in CELLS if any(fnmatch.fnmatch(cell, p) for p in patterns)] + named))


def main():
    from pathlib import Path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument(
        "--cells", default="*", metavar="PATTERN", help="such as 'linear/*/28672x8192/*', or the whole name of any cell"
    )
    parser.add_argument("--list-cells", action="store_true", help="print the names and stop")
    parser.add_argument("--rounds", type=int, default=5, help="times that each tree has its turn (default 5)")
    parser.add_argument("--limit", type=float, default=95, metavar="SECONDS", help="begin no cell after (default 95)")
    arguments = parser.parse_args()
    cells = chosen_cells(arguments.cells.split(","))
    if arguments.list_cells:
        print(*cells, sep="\n")
        return 0
    begin = time.monotonic()
    trees = [Tree(str(Path(folder).resolve())) for folder in (arguments.old, arguments.new)]
    slower = []
    print(f"{'cell':<42}{'old us':>10}{'new us':>10}{'ratio':>7}{'+-':>7}{'old cpu':>9}{'new cpu':>9}")
    for number, cell in enumerate(cells):
        if time.monotonic() - begin > arguments.limit:
            print(f"stopped after {arguments.limit:.0f} s: {len(cells) - number} cells are left, from {cell}")
            break
        try:
            (old, old_cpu), (new, new_cpu), ratio, error = compare(trees, cell, arguments.rounds)
            again = ""
            if ratio > 1.05:
                (old, old_cpu), (new, new_cpu), ratio, error = compare(trees, cell, 3 * arguments.rounds)
                again = "  repeated"
            if ratio > 1.05:
                slower.append(cell)
            times = f"{old:10.2f}{new:10.2f}{ratio:7.3f}{error:7.4f}{old_cpu:9.1f}{new_cpu:9.1f}"
            print(f"{cell:<42}{times}{again}", flush=True)
        except RuntimeError as failure:
            print(f"{cell:<42}FAILED: {failure}", flush=True)
            both(trees, "drop")
    for tree in trees:
        tree.close()
    print(f"{len(slower)} slower by more than 5 %{': ' + ', '.join(slower) if slower else ''}")
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if slower else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
