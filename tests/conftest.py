"""Fixtures of all tests: NumPy, or NumPy and CuPy, and what happens where there is no GPU."""

import contextlib
import functools
import gc
import os
import tempfile
import warnings

import numpy
import pytest
from hypothesis import HealthCheck, settings

# A program that imports CuPy, for test_threads_cuda.py; here it would be searched for doctests.
collect_ignore = ["threads_program.py"]

# The first call compiles a kernel, and a shared machine stalls: a deadline would only be noise. In CI every run draws
# the same examples, so a failure is the change's own; elsewhere each run draws new ones.
settings.register_profile(
    "default",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail the tests that need a GPU, instead of skipping them, without one",
    )


def take_turns_in_gpus():
    """Processes beside each other begin with another GPU each, where there are several: device 0 is another one.

    CuPy reads the order when it is imported.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if worker.isdecimal() and len(devices) > 1:
        first = int(worker) % len(devices)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])


take_turns_in_gpus()


@functools.cache
def find_cupy():
    """(CuPy, "") where it has a GPU, else (None, what is missing)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what CuPy says while it is imported is about the machine, not about us
            import cupy
    except ImportError as error:
        return None, f"needs a GPU, and CuPy cannot be imported: {error}"
    return (cupy, "") if cupy.cuda.is_available() else (None, "needs a GPU, and CuPy finds none")


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    # What one process of a run compiles for the host, the others need not.
    folder = tempfile.TemporaryDirectory(prefix="kbitcupy-host-", ignore_cleanup_errors=True)
    os.environ["KBITCUPY_HOST_LIBRARIES"] = folder.name
    config.add_cleanup(folder.cleanup)
    # Where Python may write no bytecode, each process that a test starts would compile the package anew.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ["PYTHONPYCACHEPREFIX"] = os.path.join(folder.name, "bytecode")
    # Where there is a process for each core, more threads would wait for each other most of the time.
    if getattr(config.option, "numprocesses", None):
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")


def pytest_report_header(config):
    module, missing = find_cupy()
    if module is None:
        what = "fail" if config.getoption("--require-gpu") else "are left out"
        return f"tests marked gpu {what}: each {missing}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    # Tens of thousands of tests stay until the end: the collector of garbage would look at them again and again.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    # `-m gpu` finds what asks for the fixture, too.
    for item in items:
        if "cupy" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        if "large_memory" in getattr(item, "fixturenames", ()):
            item.add_marker("alone")
    yield  # `-m` and `-k` choose
    # More than half of all tests need a GPU: without one, minutes would go by in skipping them. Where nothing else is
    # asked for, each says why it is skipped.
    others = [item for item in items if item.get_closest_marker("gpu") is None]
    if others and find_cupy()[0] is None and not config.getoption("--require-gpu"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu") is not None])
        items[:] = others
    if done := _done():
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]


def _done():
    """Tests that a run which was cut off has seen to pass: those named in the file KBITCUPY_DONE."""
    name = os.environ.get("KBITCUPY_DONE", "")
    if not os.path.exists(name):
        return frozenset()
    with open(name, encoding="utf-8") as file:
        return frozenset(file.read().splitlines())


def pytest_runtest_logreport(report):
    # Of a long run that may be cut off: what failed is named at once, in a file, and so is what is done. The latter
    # goes to a file of its own, since a process that starts later has to find the same tests.
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.failed and "KBITCUPY_FAILED" in os.environ:
        with open(os.environ["KBITCUPY_FAILED"], "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-2000:]}\n")
    ended = report.skipped if report.when == "setup" else report.passed and report.when == "call"
    if ended and "KBITCUPY_DONE" in os.environ:
        with open(f"{os.environ['KBITCUPY_DONE']}.more", "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    module, missing = find_cupy()
    if module is None:
        (pytest.fail if item.config.getoption("--require-gpu") else pytest.skip)(missing)


def pytest_runtest_teardown(item):
    # What a test leaves in CuPy's memory pool is missing to the other processes of the run.
    if item.get_closest_marker("gpu") is not None and (module := find_cupy()[0]) is not None:
        pool = module.get_default_memory_pool()
        if pool.total_bytes() > 1 << 30:
            pool.free_all_blocks()


@pytest.fixture(scope="session")
def cupy():
    """CuPy with a GPU; a test that asks for it is marked `gpu`, and skipped or failed without one.

    What it allocates is full of ones, NaN as floats of any size: what nobody has written is seen when it counts.
    """
    module = find_cupy()[0]
    if module is None:
        yield None
        return
    pool = module.get_default_memory_pool()

    def allocate(size):
        memory = pool.malloc(size)
        if size:
            memory.memset_async(0xFF, size)
        return memory

    module.cuda.set_allocator(allocate)
    yield module
    module.cuda.set_allocator(pool.malloc)


@pytest.fixture(scope="session")
def nvrtc():
    """CuPy's NVRTC, which compiles with no GPU; a test that asks for it is skipped without one."""
    missing = "needs the extra `compile`: pip install -e '.[compile]'"
    pathfinder = pytest.importorskip("cuda.pathfinder", reason=missing, exc_type=ImportError)
    cuda = pytest.importorskip("cupy.cuda", reason=missing, exc_type=ImportError)
    try:
        cuda.nvrtc.getVersion()
    except RuntimeError as error:  # CuPy loads the library on the first call
        pytest.skip(f"{missing} ({error})")
    if pathfinder.find_nvidia_header_directory("cudart") is None:
        pytest.skip(missing)
    return cuda.nvrtc


@pytest.fixture
def large_memory(cupy, request, tmp_path_factory):
    """A function that skips the test on a GPU of fewer GB than it needs, or with fewer free.

    With --require-gpu memory that others hold is a failure. One test at a time has this, whatever processes the run
    has, and gives its memory back to the others.
    """
    pool = cupy.get_default_memory_pool()

    def require(gigabytes):
        pool.free_all_blocks()
        free, total = cupy.cuda.runtime.memGetInfo()
        if total < gigabytes * 1e9:
            pytest.skip(f"needs a GPU of {gigabytes} GB")
        if free < gigabytes * 1e9:
            missing = f"needs {gigabytes} GB of free GPU memory and finds {free / 1e9:.0f}: run fewer processes"
            (pytest.fail if request.config.getoption("--require-gpu") else pytest.skip)(missing)

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(shared / "large_memory.lock", "w") as lock:
        with contextlib.suppress(ImportError):  # Windows: processes may then run out of memory
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield require
        pool.free_all_blocks()


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """NumPy, then CuPy."""
    return numpy if request.param == "numpy" else request.getfixturevalue("cupy")
