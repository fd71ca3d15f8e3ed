"""Check what `import kbitcupy` costs over NumPy's own import: at most 0.05 s, and nothing heavy is loaded."""

import statistics
import subprocess
import sys

ALLOWED = 0.05
ROUNDS = 15
HEAVY = ("cupy", "matplotlib", "safetensors", "scipy", "torch")

PROGRAM = """
import sys, time
import numpy
begin = time.perf_counter()
import kbitcupy
print(time.perf_counter() - begin, *(name for name in {heavy} if name in sys.modules))
"""


def once():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(heavy=HEAVY)], check=True, capture_output=True, text=True
    )
    seconds, *loaded = done.stdout.split()
    return float(seconds), loaded


def main():
    once()  # the first one reads the files from disk
    times, loaded = zip(*(once() for _ in range(ROUNDS)), strict=True)
    median = statistics.median(times)
    print(f"import kbitcupy: {median:.3f} s after NumPy (median of {ROUNDS}, allowed {ALLOWED} s), heavy: {loaded[0]}")
    return "import kbitcupy is too slow or loads too much" if median > ALLOWED or any(loaded) else 0


if __name__ == "__main__":
    sys.exit(main())
