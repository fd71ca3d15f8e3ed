"""Work that executors share: the bytes of a serial job, one error with a name, and nothing left behind."""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pickle
import threading
import time
import tracemalloc

import numpy as np
import pytest
from contract.toy import Toy

import kbitcupy as kb
from kbitcupy.backend import staging
from kbitcupy.cli import main
from kbitcupy.errors import DeviceError, FileError
from kbitcupy.formats.base import unregister
from kbitcupy.io import atomic, conversion, executors

F32 = np.float32


@pytest.fixture
def source(tmp_path):
    """Shards of many tensors, some of which are copied."""
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.standard_normal((64, 96)).astype(("f2", "f4")[i % 2]) for i in range(12)}
    tensors |= {"bias": np.arange(9), "empty": np.zeros((0, 4), F32), "w3.more": np.float64(rng.random((40, 64)))}
    tensors["w5"][3, 5] = np.nan
    kb.io.save(tmp_path / "shards", tensors, max_shard_size=60_000)
    kb.io.save(tmp_path / "one.safetensors", tensors)
    (tmp_path / "shards" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a tensor or two."""
    monkeypatch.setattr(conversion, "_LEAST_PIECE", 1 << 14)
    monkeypatch.setattr(conversion, "_LARGEST_PIECE", 1 << 14)


class Pickling(concurrent.futures.Executor):
    """Threads that are given copies, each task twice: what a process would see, and what a retried task does."""

    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(3)

    def submit(self, function, *arguments):
        return self.pool.submit(self.twice, pickle.dumps((function, arguments)))

    @staticmethod
    def twice(data):
        for _ in range(2):
            function, arguments = pickle.loads(data)
            result = pickle.loads(pickle.dumps(function(*arguments)))
        return result


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, context, initializer=executors._begin) as pool:
        yield pool


@pytest.fixture(scope="module")
def apart():
    with executors._gpu_processes(["cpu", "cpu"], 2) as pool:
        yield pool


@pytest.fixture(params=["threads", "copies", "processes", "apart"])
def executor(request):
    if request.param in ("processes", "apart"):
        yield request.getfixturevalue(request.param)
    elif request.param == "copies":
        made = Pickling()
        yield made
        made.pool.shutdown()
    else:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            yield pool


def contents(path):
    return path.read_bytes() if path.is_file() else {each.name: each.read_bytes() for each in path.iterdir()}


def same_but_for_time(report):
    return {**vars(report), "seconds": 0}


@pytest.mark.parametrize(
    ("name", "format", "options"),
    [
        ("shards", "kbit4", {}),
        ("one.safetensors", "q8_0", {"layout": "gguf"}),
        ("shards", "nf4:double_quant=true", {"layout": "bitsandbytes"}),
    ],
)
def test_the_bytes_are_those_of_a_serial_job(source, executor, small_pieces, name, format, options):
    ending = ".gguf" if options.get("layout") == "gguf" else ".st"
    whole, out = source / f"whole{ending}", source / f"out{ending}"
    options = {**options, "keep": ("w3*",), "device": "cpu"}
    serial = kb.io.quantize_file(source / name, whole, format, **options)
    report = kb.io.quantize_file(source / name, out, format, **options, executor=executor)
    assert contents(out) == contents(whole)
    assert same_but_for_time(report) == same_but_for_time(serial) and report.not_finite == ("w5",)
    kb.io.dequantize_file(whole, source / "back", device="cpu")
    kb.io.dequantize_file(out, source / "again", device="cpu", executor=executor)
    assert contents(source / "again") == contents(source / "back")
    # What is there already is compared, by the same workers.
    assert kb.io.quantize_file(source / name, out, format, **options, executor=executor, resume=True).resumed
    assert not atomic.leftovers(source) and not list(source.glob("*.part"))


@pytest.mark.parametrize("shards", [1, 4])
def test_pieces_become_smaller(tmp_path, monkeypatch, shards):
    """As many tensors as four pieces for each worker have of what is left, and each one in the end."""
    tensors = {f"w{i:02}": np.zeros((32, 32), np.float16) for i in range(64)}
    source = tmp_path / ("source.safetensors" if shards == 1 else "source")
    kb.io.save(source, tensors, **({} if shards == 1 else {"max_shard_size": 2048 * 64 // shards}))
    monkeypatch.setattr(conversion, "_LEAST_PIECE", 1)
    sizes = []
    monkeypatch.setattr(conversion, "_do", lambda piece, do=conversion._do: sizes.append(len(piece.names)) or do(piece))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        kb.io.quantize_file(source, tmp_path / f"out{source.suffix}", "int8", device="cpu", executor=pool)
        assert sum(sizes) == 64 and max(sizes) == 8 and len(sizes) < 48
        assert sizes[-10:] == [1] * 10
        sizes.clear()
        monkeypatch.setattr(conversion, "_LARGEST_PIECE", 4096)
        kb.io.quantize_file(source, tmp_path / f"again{source.suffix}", "int8", device="cpu", executor=pool)
        assert sum(sizes) == 64 and max(sizes) == 2


def test_a_plan_and_a_codebook_travel(source, processes, monkeypatch, small_pieces):
    monkeypatch.chdir(source)  # workers have another working directory
    codebook = np.linspace(-1, 1, 16, dtype=F32)
    formats = {"w0": ("kbit4", {"codebook": codebook}), "w1": "int8", "w4": kb.get_format("kbit3", absmax="float32")}
    for out, how in (("whole", {}), ("out", {"executor": processes})):
        kb.io.quantize_file("shards", out, formats, device="cpu", **how)
    assert contents(source / "out") == contents(source / "whole")


@pytest.fixture
def toy():
    """A format of another package, which this process alone has registered."""
    kb.register("toy", Toy)
    yield kb.get_format("toy", boost=2)
    unregister("toy")


@pytest.mark.parametrize("named", ["text", "format", "plan"])
def test_a_format_that_only_this_process_has_registered(source, small_pieces, toy, named):
    format = {"text": "toy:boost=2", "format": toy, "plan": {"w0": toy, "w1": "kbit4", "w4": "toy"}}[named]
    kb.io.quantize_file(source / "shards", source / "whole", format, device="cpu")
    context = multiprocessing.get_context("spawn")
    for direction in ("quantize", "dequantize"):  # each in processes that have never heard of it
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            how = {"device": "cpu", "executor": pool}
            if direction == "quantize":
                kb.io.quantize_file(source / "shards", source / "out", format, **how)
            else:
                kb.io.dequantize_file(source / "whole", source / "again", **how)
    kb.io.dequantize_file(source / "whole", source / "back", device="cpu")
    assert contents(source / "out") == contents(source / "whole")
    assert contents(source / "again") == contents(source / "back")


def test_commands_take_it_to_their_processes(source, toy, capsys):
    words = [str(source / "shards"), "--device", "cpu", "--formats", "toy:boost=2,kbit4", "--json"]
    found = []
    for workers in "12":
        assert main(["compare", *words, "--workers", workers]) == 0
        found.append(json.loads(capsys.readouterr().out)["results"])
    assert [each["format"] for each in found[1]] == [each["format"] for each in found[0]]
    assert [[row["mse"] for row in each["tensors"]] for each in found[1]] == [
        [row["mse"] for row in each["tensors"]] for each in found[0]
    ]


def test_a_format_brings_what_makes_it(toy):
    q = kb.quantize(np.arange(64, dtype=F32), toy)
    data = pickle.dumps(q)
    unregister("toy")
    again = pickle.loads(data)
    assert again.format == toy and kb.get_format("toy:boost=2") == toy
    assert (again.dequantize() == q.dequantize()).all()
    assert b"kbitcupy.formats" not in pickle.dumps(kb.get_format("kbit4")).replace(b"kbitcupy.formats.base", b"")


def test_a_format_without_an_import_path_is_refused(source, processes):
    kb.register("toy", lambda *, boost=1.0: Toy(boost=boost))
    try:
        with pytest.raises(FileError, match=r"a worker does not know all .*format is 'toy'.*register formats in a mod"):
            kb.io.quantize_file(source / "shards", source / "out", "toy", device="cpu", executor=processes)
    finally:
        unregister("toy")
    assert not (source / "out").exists() and not (source / "out.part").exists()


def test_another_format_of_that_name_is_refused(source, toy, monkeypatch):
    paths = iter("abcdefgh")  # here, and for a worker
    monkeypatch.setattr(conversion, "path_of", lambda kind: next(paths))
    out = source / "out"
    with pytest.raises(FileError, match="format 'toy' is . for this worker and a for the process that began"):
        kb.io.quantize_file(source / "one.safetensors", out, "toy", device="cpu", executor=Pickling())
    assert not out.exists()


def failing(monkeypatch, at, error):
    """`quantize` fails at the tensor of this many elements, and no sooner than another one has ended."""
    one = threading.Event()

    def quantize(x, format, **given):
        if x.size == at:
            one.wait(5)
            raise error
        made = kb.quantize(x, format, **given)
        one.set()
        return made

    monkeypatch.setattr(conversion, "quantize", quantize)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no"), "tensor 'w3.more': no"), (RuntimeError("no"), "model-")]
)
def test_a_failure_stops_the_job_with_a_name(source, small_pieces, monkeypatch, resume, error, said):
    around = sorted(os.listdir(source))
    failing(monkeypatch, 40 * 64, error)
    with concurrent.futures.ThreadPoolExecutor(3) as pool, pytest.raises(FileError, match=said):
        kb.io.quantize_file(source / "shards", source / "out", "kbit4", device="cpu", executor=pool, resume=resume)
    left = sorted(os.listdir(source))
    assert left == around or (resume and left == sorted([*around, "out.part"]))
    monkeypatch.undo()
    kb.io.quantize_file(source / "shards", source / "whole", "kbit4", device="cpu")
    if resume:
        finished = set(os.listdir(source / "out.part")) - {atomic.JOB} if left != around else set()
        assert all((source / "out.part" / name).read_bytes() == contents(source / "whole")[name] for name in finished)
        report = kb.io.quantize_file(source / "shards", source / "out", "kbit4", device="cpu", resume=True)
        assert report.resumed == len(finished) and contents(source / "out") == contents(source / "whole")


def test_what_waits_is_given_up_and_what_runs_is_waited_for(source, small_pieces, monkeypatch):
    begun, ended = [], []

    def quantize(x, format, **given):
        begun.append(x)
        if len(begun) == 3:
            raise KeyboardInterrupt
        time.sleep(0.05)
        ended.append(x)
        return kb.quantize(x, format, **given)

    monkeypatch.setattr(conversion, "quantize", quantize)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            kb.io.quantize_file(source / "one.safetensors", source / "out", "kbit4", device="cpu", executor=pool)
        assert len(begun) <= 5 and len(ended) == len(begun) - 1
    assert not (source / "out").exists() and not atomic.leftovers(source)


def test_everything_is_checked_before_the_first_piece(source, monkeypatch):
    monkeypatch.setattr(conversion, "_do", None)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for out, why in (("one.safetensors", "is a file"), ("nowhere/out", "does not exist")):
            with pytest.raises(FileError, match=why):
                kb.io.quantize_file(source / "shards", source / out, "kbit4", device="cpu", executor=pool)
        with pytest.raises(DeviceError, match="auto"):
            kb.io.quantize_file(source / "shards", source / "out", "kbit4", device="gpu", executor=pool)
    with pytest.raises(TypeError, match=r"executor is 4; it must be a concurrent.futures.Executor"):
        kb.io.quantize_file(source / "shards", source / "out", "kbit4", executor=4)


def test_another_input_for_a_worker_is_refused(source, small_pieces):
    """The same path, but other bytes behind it: another machine may see another file system."""

    class Elsewhere(Pickling):
        def submit(self, function, *arguments):
            data = pickle.dumps((function, arguments))
            conversion._last.clear()
            os.utime(source / "one.safetensors", ns=(1, 1))
            return self.pool.submit(self.twice, data)

    out = source / "out"
    with pytest.raises(FileError, match="is another file for this worker"):
        kb.io.quantize_file(source / "one.safetensors", out, "kbit4", device="cpu", executor=Elsewhere())
    assert not out.exists()


def _raise(error):
    raise error


class _OfTwo(Exception):
    """It cannot be made again from what it keeps."""

    def __init__(self, first, second):
        super().__init__(f"{first} of {second}")


class _WithLock(_OfTwo):
    """It cannot be packed."""

    def __init__(self, first, second):
        super().__init__(first, second)
        self.lock = threading.Lock()


def _fail(kind):
    raise kind("seven", "nine")


class _Stays:
    """What is packed, and nobody can unpack."""

    def __reduce__(self):
        return __import__, ("no_such_module",)

    def __call__(self):
        return None


def _where():
    with staging.lane(("cpu",)) as own:
        return own.device, os.getpid(), threading.current_thread().name


def test_each_gpu_has_a_process_with_threads(apart):
    assert executors.workers_of(apart) == 4 and not executors.is_local(apart)
    futures = [apart.submit(_where) for _ in range(8)]
    found = [future.result() for future in futures]
    assert {pid for _, pid, _ in found} == {each.pid for each in apart.processes} and len(apart.processes) == 2
    assert all(name.startswith("kbitcupy") and device == "cpu" for device, _, name in found)
    with pytest.raises(FileError, match="seven"):
        apart.submit(_raise, FileError("seven")).result()
    with pytest.raises(RuntimeError, match="came to cannot be pickled: .*lock"):
        apart.submit(threading.Lock).result()
    with pytest.raises(RuntimeError, match="has sent cannot be unpickled: .*no_such_module"):
        apart.submit(_Stays).result()
    for kind in (_OfTwo, _WithLock):
        with pytest.raises(RuntimeError, match=f"{kind.__name__}: seven of nine"):
            apart.submit(_fail, kind).result()
    with pytest.raises(ModuleNotFoundError):
        apart.submit(_Stays()).result()
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        apart.submit(lambda: 1)
    assert not any(each.pending for each in apart._all)
    assert apart.submit(int, "11", base=3).result() == 4


@pytest.mark.parametrize("kind", [_OfTwo, _WithLock])
def test_an_error_that_stays_in_its_process_is_told(apart, kind):
    """With the name of what was worked on."""
    with pytest.raises(FileError, match=rf"a tensor: RuntimeError: {kind.__name__}: seven of nine"):
        list(executors.completed(apart, _fail, [kind], lambda kind: "a tensor"))


def test_a_gpu_whose_process_is_gone_ends_the_job(source, small_pieces):
    with executors._gpu_processes(["cpu", "cpu"], 2) as pool:
        pool.submit(_where).result()
        pool.processes[0].kill()
        with pytest.raises(FileError, match=r"model-0000.*: a worker ended abruptly.*--resume"):
            kb.io.quantize_file(source / "shards", source / "out", "kbit4", device="cpu", executor=pool)
        with pytest.raises(concurrent.futures.BrokenExecutor):
            pool.submit(_where)
    assert not (source / "out").exists() and not (source / "out.part").exists()
    with pytest.raises(KeyboardInterrupt), executors._gpu_processes(["cpu", "cpu"], 1) as pool:
        list(executors.completed(pool, os._exit, [executors._INTERRUPTED], str))
    with executors._gpu_processes(["cpu"], 2) as pool:
        pool.submit(_where).result()
        pool.shutdown()
        assert pool.processes[0].exitcode == 0


def test_no_process_stays_where_one_does_not_start(monkeypatch):
    before, start = multiprocessing.active_children(), executors._GpuProcess.__init__

    def once(self, gpu, *rest):
        if gpu == "none":
            raise OSError("no more processes")
        start(self, gpu, *rest)

    monkeypatch.setattr(executors._GpuProcess, "__init__", once)
    with pytest.raises(OSError, match="no more"):
        executors.GpuProcesses(["cpu", "none"], 1)
    left = [each for each in multiprocessing.active_children() if each not in before]
    for each in left:
        each.join(20)
    assert not any(each.is_alive() for each in left)


def test_lanes_of_a_process_stay_on_its_device(monkeypatch):
    monkeypatch.setattr(staging, "_here", [])
    monkeypatch.setattr(staging, "_idle", {})
    monkeypatch.setattr(staging._xp, "resolve_device", str)
    monkeypatch.setattr(staging, "GpuLane", _NoGpu)
    for devices, wanted in ((("cuda:0", "cuda:1"), "cuda:0"), (("cuda:1",), "cuda:1")):
        with staging.lane(devices) as one:
            assert one.device == wanted
    staging.stay_on("cuda:1")
    for devices, wanted in ((("cuda:0", "cuda:1"), "cuda:1"), (("cuda:0",), "cuda:0")):
        for _ in range(2):
            with staging.lane(devices) as one:
                assert one.device == wanted


class _NoGpu(staging.Lane):
    @contextlib.contextmanager
    def current(self):
        yield


def test_a_killed_process_is_named(source, small_pieces):
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(1, context, initializer=os.abort)
    with pool, pytest.raises(FileError, match=r"model-0000.*: a worker ended abruptly.*--resume"):
        kb.io.quantize_file(source / "shards", source / "out", "kbit4", device="cpu", executor=pool)
    assert not (source / "out").exists() and not (source / "out.part").exists()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "format",
    ["kbit4", "nf4:double_quant=true", "q6_k", "ternary:block=20", "uint4:block=32,zero=float,scale_dtype=float16"],
)
def test_memory_grows_with_workers_and_not_with_files(tmp_path, format, workers):
    """Each has two and a half of the largest tensor at most."""
    x = np.random.default_rng(0).standard_normal((1024, 4096)).astype(np.float16)
    files = 8 if workers > 1 else 4  # more than the workers may hold together
    kb.io.save(tmp_path / "in", {f"w{i}": x for i in range(files)}, max_shard_size=2 * x.nbytes)
    names = ["in", "small", "back"]
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(workers)) if workers > 1 else None
        for make, options in ((kb.io.quantize_file, (format,)), (kb.io.dequantize_file, ())):
            source, target = tmp_path / names.pop(0), tmp_path / names[0]
            tracemalloc.start()
            try:
                make(source, target, *options, device="cpu", executor=pool)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert x.nbytes < peak <= 2.5 * workers * x.nbytes


def test_lanes_share_devices():
    """The device with the fewest lanes; of those with equally many the one whose turn it is. Their memory stays until
    it is given back.
    """
    staging.release()
    names = []
    with staging.lane(("cpu",), 3) as one:
        names.append(one.device)
        assert one.memory(10) is one.memory(5) and one.memory(100).nbytes == 100
        assert next(one.parts(np.arange(3, dtype="u1"))).tobytes() == b"\0\1\2"
    assert names == ["cpu"] and not staging._used["cpu"]
    with staging.lane(("cpu",)) as again, staging.lane(("cpu",)) as other:
        assert again is one is not other and one.memory(100).nbytes == 100
    staging.release()
    assert not staging._idle and one.memory(7).nbytes == 7


def test_processes_of_gpus_make_the_same_bytes(tmp_path, cupy):
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.standard_normal((1300, 4096), F32).astype(("f2", "f4")[i % 2]) for i in range(6)}
    tensors["w3"][2, 5], tensors["w4"][7, 9] = np.inf, np.nan
    kb.io.save(tmp_path / "in", tensors, max_shard_size=1 << 25)
    serial = kb.io.quantize_file(tmp_path / "in", tmp_path / "cpu", "kbit4", device="cpu")
    with executors._gpu_processes(["cuda:0", "cuda:0"], 2) as pool:
        report = kb.io.quantize_file(tmp_path / "in", tmp_path / "gpu", "kbit4", device="cuda:0", executor=pool)
        kb.io.dequantize_file(tmp_path / "gpu", tmp_path / "back", device="cuda:0", executor=pool)
    kb.io.dequantize_file(tmp_path / "cpu", tmp_path / "again", device="cpu")
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")
    assert contents(tmp_path / "back") == contents(tmp_path / "again")
    assert same_but_for_time(report) == same_but_for_time(serial) and (report.nan, report.infinite) == (1, 1)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("format", ["kbit4", "nf4:double_quant=true", "q8_0", "int8:block=32", "ternary:block=32"])
def test_a_gpu_makes_the_same_bytes_through_its_lanes(tmp_path, cupy, workers, format):
    """Tensors of several parts, of less than one, and of none; planes that are uploaded as they are stored."""
    rng = np.random.default_rng(0)
    shapes = [(2600, 4096), (33, 96), (4096, 2048), (64, 32)]
    tensors = {f"w{i}": rng.standard_normal(shape, F32).astype(("f2", "f4")[i % 2]) for i, shape in enumerate(shapes)}
    tensors |= {"bias": np.arange(7), "empty": np.zeros((0, 64), F32)}
    kb.io.save(tmp_path / "in", tensors, max_shard_size=1 << 24)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(workers)) if workers else None
        for device, executor in (("cpu", None), ("cuda:0", pool)):
            how = {"device": device, "executor": executor}
            kb.io.quantize_file(tmp_path / "in", tmp_path / device, format, **how)
            kb.io.dequantize_file(tmp_path / "cpu", tmp_path / f"{device}-back", **how)
            kb.io.dequantize_file(tmp_path / "cpu", tmp_path / f"{device}-f2", dtype="float16", **how)
    for name in ("", "-back", "-f2"):
        assert contents(tmp_path / f"cuda:0{name}") == contents(tmp_path / f"cpu{name}")
    assert not staging._idle and not staging._used["cuda:0"]
