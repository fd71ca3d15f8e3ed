"""Threads that have not used CUDA yet: servers, pools, and whatever decodes in the background have such."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("kernels", ["compiled", "from disk"])
def test_first_calls_of_fresh_threads(cupy, cache, kernels):
    """Eight at once, in a process for each part of the calls; those that come second find on disk what these compiled.

    On a machine that has compiled nothing it is the compiler that takes the time.
    """
    assert kernels == "compiled" or any(cache.iterdir())
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUPY_CACHE_DIR": str(cache)}
    program = ROOT / "tests" / "threads_program.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(part), str(PARTS)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(PARTS)
    ]
    try:
        said = [process.communicate(timeout=540)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-4000:]
        assert " 0 wrong" in text
