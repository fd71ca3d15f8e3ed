"""A Dask cluster of two processes as the executor of files, and for arrays of compressed chunks."""

import json
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from contract.toy import Toy

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.formats.base import unregister
from kbitcupy.io import atomic

distributed = pytest.importorskip("distributed", reason="needs distributed: the extra `dask`")
da = pytest.importorskip("dask.array", reason="needs dask: the extra `dask`")


@pytest.fixture(scope="module")
def client():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ports and files that a neighbour has taken
        options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
        with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as made:
            yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("cluster")
    rng = np.random.default_rng(0)
    kb.io.save(
        top / "shards",
        {f"w{i}": rng.standard_normal((256, 256)).astype(np.float16) for i in range(16)},
        max_shard_size=300_000,
    )
    kb.io.quantize_file(top / "shards", top / "whole", "kbit4", device="cpu")
    return top


def contents(path):
    return {each.name: each.read_bytes() for each in path.iterdir()}


def test_files_are_those_of_a_serial_job(client, folder, tmp_path, capsys):
    executor = client.get_executor(pure=False, retries=2)
    report = kb.io.quantize_file(folder / "shards", tmp_path / "out", "kbit4", executor=executor)  # its own devices
    assert contents(tmp_path / "out") == contents(folder / "whole") and report.converted == 16
    kb.io.dequantize_file(folder / "whole", tmp_path / "back", device="cpu")
    address = client.scheduler.address
    words = [str(tmp_path / "out"), "-o", str(tmp_path / "again"), "--device", "cpu", "--scheduler", address]
    assert main(["dequantize", *words]) == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "back")
    (tmp_path / "scheduler.json").write_text(json.dumps({"address": address}))
    found = []
    for more in ((), ("--scheduler", str(tmp_path / "scheduler.json"))):
        capsys.readouterr()
        words = ["compare", str(folder / "shards"), "--formats", "kbit3,nf4", "--json", "--device", "cpu"]
        assert main([*words, *more]) == 0
        results = json.loads(capsys.readouterr().out)["results"]
        found.append([[row["sqnr_db"] for row in each["tensors"]] for each in results])
    assert np.allclose(*found, rtol=1e-9)  # sums are taken in another order


def test_workers_learn_of_a_format_of_a_notebook(client, folder, tmp_path, monkeypatch):
    own = type("Own", (Toy,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)
    kb.register("toy", own)
    try:
        executor = client.get_executor(pure=False)
        for out, how in (("whole", {}), ("out", {"executor": executor})):
            kb.io.quantize_file(folder / "shards", tmp_path / out, "toy:boost=2", device="cpu", **how)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        x = np.random.default_rng(0).standard_normal((64, 32), np.float32)
        q = kb.dask.quantize(da.from_array(x, chunks=(16, 32)), "toy")
        found = kb.dask.dequantize(q).compute(scheduler=client)
        assert (found == kb.quantize(x, "toy").dequantize()).all()
    finally:
        unregister("toy")


def test_a_worker_that_is_killed_costs_nothing(client, folder, tmp_path):
    """Its pieces are done once more by the other one, or by the one that takes its place."""
    pids = list(client.run(os.getpid).values())

    def kill():
        time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    executor = client.get_executor(pure=False, retries=2)
    kb.io.quantize_file(folder / "shards", tmp_path / "out", "kbit4", device="cpu", executor=executor)
    killer.join()
    assert contents(tmp_path / "out") == contents(folder / "whole") and not atomic.leftovers(tmp_path)
    client.wait_for_workers(2, timeout=30)


def test_a_failure_on_a_worker_comes_back_with_its_name(client, folder, tmp_path):
    executor = client.get_executor(pure=False)
    with pytest.raises(kb.KbitError, match="only 0 CUDA|CuPy|cuda"):
        kb.io.quantize_file(folder / "shards", tmp_path / "out", "kbit4", device="cuda:99", executor=executor)
    assert not os.listdir(tmp_path)


def test_no_scheduler(tmp_path, capsys):
    words = ["compare", "--formats", "kbit4", "--device", "cpu", "--scheduler"]
    assert main([*words, str(tmp_path / "none.json")]) == 1
    assert "is no scheduler's file" in capsys.readouterr().err


def test_the_scheduler_knows_what_chunks_weigh(client):
    x = da.random.default_rng(0).standard_normal((512, 256), chunks=(128, 256)).astype("f4")
    q = kb.dask.quantize(x, "kbit4").persist()
    distributed.wait(q)
    weights = client.run_on_scheduler(lambda dask_scheduler: {k: t.nbytes for k, t in dask_scheduler.tasks.items()})
    found = [nbytes for key, nbytes in weights.items() if "kbit-quantize" in str(key)]
    expected = kb.quantize(np.ones((128, 256), np.float32), "kbit4").nbytes
    assert len(found) >= 4 and set(found) == {expected}
    exact = float(abs(kb.dask.dequantize(q) - x).max().compute())
    assert 0 < exact < 1
