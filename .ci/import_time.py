"""Check what `import kbitcupy` costs over NumPy's own import, and that nothing heavy is loaded.

It may take 0.05 s, or three fifths of what NumPy takes in the same process: machines may be slow, or busy.
"""

import statistics
import subprocess
import sys

SECONDS, SHARE = 0.05, 0.6
ROUNDS = 15
HEAVY = ("cupy", "matplotlib", "safetensors", "scipy", "torch")

PROGRAM = """
import sys, time
begin = time.perf_counter()
import numpy
middle = time.perf_counter()
import kbitcupy
print(middle - begin, time.perf_counter() - middle, *(name for name in {heavy} if name in sys.modules))
"""


def once():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(heavy=HEAVY)], check=True, capture_output=True, text=True
    )
    numpy, own, *loaded = done.stdout.split()
    return float(numpy), float(own), loaded


def main():
    once()  # the first one reads the files from disk
    numpys, owns, loaded = zip(*(once() for _ in range(ROUNDS)), strict=True)
    numpy, own = statistics.median(numpys), statistics.median(owns)
    allowed = max(SECONDS, SHARE * numpy)
    print(
        f"import kbitcupy: {own:.3f} s after NumPy, which takes {numpy:.3f} s (medians of {ROUNDS}, "
        f"allowed {allowed:.3f} s), heavy: {loaded[0]}"
    )
    return "import kbitcupy is too slow or loads too much" if own > allowed or any(loaded) else 0


if __name__ == "__main__":
    sys.exit(main())
