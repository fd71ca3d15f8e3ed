"""Workers that are killed: the quick version of ``python tests/fuzz_workers.py``."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fuzz_workers
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.errors import FileError
from kbitcupy.io import atomic, executors

ROOT = str(Path(kb.__file__).resolve().parent.parent)


@pytest.mark.skipif(sys.platform != "linux", reason="it finds processes in /proc")
def test_a_killed_worker_leaves_what_can_be_continued():
    ended, failures = fuzz_workers.run(1, 3, kinds=("processes", "apart"), most=1)
    assert not failures and ended["processes"] == ended["apart"] == 1


def _interrupted():
    os._exit(130)


def test_ctrl_c_that_only_workers_have_heard():
    with pytest.raises(KeyboardInterrupt), executors.local(2) as pool:
        list(executors.completed(pool, _call, [_interrupted], str))
    with pytest.raises(FileError, match="ended abruptly"), executors.local(2) as pool:
        list(executors.completed(pool, _call, [os.abort], str))


def _call(function):
    function()


class _EndsSoon:
    """A process that another thread has waited for, and of which it is yet to say how it has ended."""

    def __init__(self):
        self._codes = iter([None, None, 130])

    def terminate(self):
        pass

    @property
    def exitcode(self):
        return next(self._codes)


def test_how_a_process_ended_is_heard_when_another_waits_too():
    assert executors._code(_EndsSoon()) == 130


@pytest.mark.skipif(sys.platform != "linux", reason="it sends signals to a group of processes")
def test_ctrl_c_ends_a_job_of_processes(tmp_path):
    tensors = {f"w{i}": np.ones((1024, 1024), np.float32) for i in range(24)}
    kb.io.save(tmp_path / "in", tensors, max_shard_size=1 << 25)
    words = ["quantize", "in", "-o", "out", "--device", "cpu", "--format", "q4_k", "--workers", "2", "--resume"]
    command = [sys.executable, "-m", "kbitcupy", *words]
    how = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, env=environment, **how) as process:
        while not any(path.stat().st_size for path in tmp_path.glob("out.part/*.tmp")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "kbit: interrupted" in said and "Traceback" not in said
    finished = [path for path in tmp_path.glob("out.part/*") if path.name != atomic.JOB]
    assert not (tmp_path / "out").exists() and all(path.suffix == ".safetensors" for path in finished)
    assert not finished or "repeat the command to continue" in said
    with pytest.raises(ProcessLookupError):  # nobody of the group is left
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
