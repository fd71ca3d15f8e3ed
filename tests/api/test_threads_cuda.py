"""Threads that have not used CUDA yet: servers, pools, and whatever decodes in the background have such."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("kernels", ["compiled", "from disk"])
def test_first_calls_of_fresh_threads(cupy, cache, kernels):
    """Eight at once; the second process finds on disk what the first has compiled."""
    assert kernels == "compiled" or any(cache.iterdir())
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUPY_CACHE_DIR": str(cache)}
    command = [sys.executable, str(ROOT / "tests" / "threads_program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " 0 wrong" in done.stdout
