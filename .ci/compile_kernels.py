"""Compile every kernel with no GPU, and look at what ptxas says of registers and spills.

Every instance for the oldest architecture and for the one that is tuned for; one instance of each template for the
others, where the same code takes no other path. Needs `pip install -e '.[compile]'`; run it from the repository root.
"""

import multiprocessing
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kbitcupy.affine  # noqa: F401  (registers the kernels of its products)
from kbitcupy.backend.compile import architecture_of, compile_offline
from kbitcupy.errors import KernelCompileError
from kbitcupy.formats.base import kernel_templates

EVERY_INSTANCE = (75, 90)
ONE_INSTANCE = (80, 86, 89, 100, 120)

_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def jobs():
    """(template, expression, architecture) of everything that is compiled."""
    for template in kernel_templates():
        for number, expression in enumerate(template.instances()):
            only = architecture_of(template.file)
            for architecture in (only,) if only else EVERY_INSTANCE + (ONE_INSTANCE if number == 0 else ()):
                yield replace(template, axes=()), expression, architecture


def compile_one(job):
    """(job, seconds, registers, complaint); the complaint of a good kernel is empty."""
    template, expression, architecture = job
    begin = time.perf_counter()
    try:
        log = compile_offline(template, expression, architecture)
    except KernelCompileError as error:
        return job, time.perf_counter() - begin, 0, str(error)
    seconds = time.perf_counter() - begin
    # A device function that is not inlined has lines of its own: the worst of all counts.
    frames = [tuple(map(int, found)) for found in _FRAME.findall(log)]
    registers = [int(found) for found in _REGISTERS.findall(log)]
    if not frames or not registers:
        return job, seconds, 0, f"ptxas reported no registers or no stack frame:\n{log}"
    stack, stores, loads = map(max, zip(*frames, strict=True))
    complaint = ""
    if template.hot and (stack or stores or loads):
        complaint = f"{stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads"
    return job, seconds, max(registers), complaint


def name_of(job):
    template, expression, architecture = job
    return f"{template.label}: {expression} for sm_{architecture}"


def main():
    begin = time.perf_counter()
    work = list(jobs())
    workers = os.cpu_count() or 1
    # Spawned, not forked: a forked child would share the parent's NVRTC state.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = list(pool.imap_unordered(compile_one, work, chunksize=8))
    if not results:
        print("no kernel template is registered")
        return 1
    failures = sorted((name_of(job), complaint) for job, _, _, complaint in results if complaint)
    for name, complaint in failures:
        print(f"FAILED {name}: {complaint}")
    instances = {(job[0].label, job[1]) for job in work}
    print(f"{len(results) - len(failures)} of {len(results)} kernels compiled, {len(instances)} instances:")
    for architecture in sorted({job[2] for job in work}, key=str):
        of_this = [result for result in results if result[0][2] == architecture]
        job, _, registers, _ = max(of_this, key=lambda result: result[2])
        print(f"  sm_{architecture:<4} {len(of_this):4}   most registers: {registers:3}  {job[0].label}: {job[1]}")
    job, seconds, _, _ = max(results, key=lambda result: result[1])
    print(f"  slowest: {seconds:.2f} s, {name_of(job)}")
    hot = sum(job[0].hot for job in work)
    print(
        f"  {hot} of hot templates, {sum(job[0].hot and bool(bad) for job, _, _, bad in results)} with spills or errors"
    )
    print(f"  {time.perf_counter() - begin:.1f} s with {workers} processes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
