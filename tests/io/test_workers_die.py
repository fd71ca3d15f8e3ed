"""Workers that are killed: the quick version of ``python tests/fuzz_workers.py``."""

import sys

import fuzz_workers
import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="it finds processes in /proc")
def test_a_killed_worker_leaves_what_can_be_continued():
    ended, failures = fuzz_workers.run(1, 3, kinds=("processes",), most=1)
    assert not failures and ended["processes"] == 1
