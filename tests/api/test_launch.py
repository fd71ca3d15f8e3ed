"""Launches with no GPU: what reaches the driver, and what is refused before."""

import ctypes
import struct
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kbitcupy.backend import compile, launch
from kbitcupy.backend.compile import Template
from kbitcupy.backend.launch import Kernel, Ready, grid_of
from kbitcupy.backend.structs import Struct

cupy = pytest.importorskip("cupy")

CUT = Struct("Cut", rows="i4", value=("f4", 3))
SIGNATURE = ("p", "i4", "i8", "u4", "f4", "f8", CUT, 8, 4, 16)
SIZES = (8, 4, 8, 4, 4, 8, 16, 8, 4, 16)
GIVEN = (0xDEADBEEF00, -3, -(1 << 40), 1 << 31, 0.5, -2.0, CUT.pack(rows=7, value=(1, 2, 3)), 1 << 40, -1, bytes(16))


class Driver:
    """Takes the place of the driver's two functions; keeps what a launch says."""

    def __init__(self):
        self.launches = []
        self.argtypes = ()

    def arguments(self, address):
        places = (ctypes.c_void_p * len(SIZES)).from_address(address)
        return tuple(ctypes.string_at(place, size) for place, size in zip(places, SIZES, strict=True))

    def plain(self, handle, *numbers):
        *shape, stream, arguments, extra = numbers
        assert extra == 0
        self.launches.append((handle, tuple(shape), stream, self.arguments(arguments), 0))

    def __call__(self, config, handle, arguments, extra):
        assert extra is None
        config = launch._Config.from_address(config)
        shape = (config.grid, config.grid_y, config.grid_z, config.block, config.block_y, config.block_z)
        self.launches.append((handle, (*shape, config.shared), config.stream, self.arguments(arguments), config.count))
        return 0


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(launch, "bind_thread", lambda: None)
    monkeypatch.setattr(launch, "driver_function", lambda name: fake)
    monkeypatch.setattr("cupy.cuda.get_current_stream", lambda: types.SimpleNamespace(ptr=77))
    monkeypatch.setattr("cupy_backends.cuda.api.driver.launchKernel", fake.plain)
    return fake


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)])
def test_arguments_arrive_as_their_types_say(driver, early, grid):
    start = launch._packed_launch(1234, "kernel", 256, 4096, SIGNATURE, early)
    start(grid, GIVEN)
    ((handle, shape, stream, arguments, attributes),) = driver.launches
    assert (handle, stream, attributes) == (1234, 77, int(early))
    assert shape == (*grid, *(1,) * (3 - len(grid)), 256, 1, 1, 4096)
    wanted = [struct.pack(f"={letter}", value) for letter, value in zip("QiqIfd", GIVEN, strict=False)]
    assert arguments[:6] == tuple(wanted)
    assert arguments[6:] == (GIVEN[6], struct.pack("=q", 1 << 40), struct.pack("=i", -1), bytes(16))


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, -1),
        (0, None),
        (0, 1.5),
        (1, 1 << 31),
        (1, 1.5),
        (2, "3"),
        (3, -1),
        (4, b"x"),
        (6, 5),
        (6, b"xy"),
        (9, bytes(17)),
        (7, None),
        (9, 1.0),
    ],
)
def test_what_does_not_fit_its_type_is_refused(driver, place, wrong):
    start = launch._packed_launch(1, "some kernel", 32, 0, SIGNATURE, False)
    given = list(GIVEN)
    given[place] = wrong
    with pytest.raises(TypeError, match="arguments of some kernel: "):
        start((1,), given)
    with pytest.raises(TypeError, match="expected 10"):
        start((1,), GIVEN[:-1])
    assert not driver.launches


def test_arrays_stand_for_their_addresses(driver):
    """... and no value of them is read, as converting an array of one integer to an int would do."""

    class Array(types.SimpleNamespace):
        def __index__(self):
            raise AssertionError("the value of an array was asked for")

    array = Array(data=types.SimpleNamespace(ptr=4096, device_id=0))
    kernel = Kernel(Template("codes.cu", "any"), (), 32, signature=SIGNATURE)
    kernel._ready[0] = Ready(launch._packed_launch(1, "any", 32, 0, SIGNATURE, False), 4)
    kernel(array, 3, (array, *GIVEN[1:]))
    kernel(array, 100, (0, *GIVEN[1:]), 2)
    kernel.launch(array, (5, 6), GIVEN)
    assert [struct.unpack("=Q", arguments[0])[0] for _, _, _, arguments, _ in driver.launches] == [4096, 0, GIVEN[0]]
    assert [shape[:2] for _, shape, _, _, _ in driver.launches] == [(3, 1), (8, 1), (5, 6)]
    with pytest.raises(TypeError, match="arguments of any: .*ptr"):
        kernel(array, 3, (np.zeros(1), *GIVEN[1:]))  # an array of the host has no address on a device


def test_arguments_that_come_packed_together_arrive_each_in_its_place(driver):
    signature = ("p", SIGNATURE[1:6], CUT, (), ("i8",), 4, 16)
    given = GIVEN[0], launch.packed(signature[1], *GIVEN[1:6]), GIVEN[6], launch.packed(()), struct.pack("=q", 1 << 40)
    for early in (False, True):
        launch._packed_launch(1, "kernel", 32, 0, SIGNATURE, early)((7, 1, 1), GIVEN)
        launch._packed_launch(1, "kernel", 32, 0, signature, early)((7, 1, 1), (*given, *GIVEN[8:]))
        assert driver.launches[-1] == driver.launches[-2]
    with pytest.raises(TypeError, match="20 bytes came for 28"):
        launch._packed_launch(1, "kernel", 32, 0, signature, False)((1,), (0, bytes(20), *given[2:], *GIVEN[8:]))
    with pytest.raises(TypeError, match="arguments"):
        launch.packed(("i4",), 1 << 31)
    with pytest.raises(TypeError, match="arguments"):
        launch.packed(("i4", "i4"), 1)


def test_threads_have_buffers_of_their_own(driver, monkeypatch):
    """... so that one that waits for the driver does not send off what another has packed meanwhile."""
    start = launch._packed_launch(1, "kernel", 32, 0, SIGNATURE, True)
    begun, call = threading.Barrier(4), driver.__call__

    def slow(*arguments):
        begun.wait()
        return call(*arguments)

    monkeypatch.setattr(Driver, "__call__", lambda self, *arguments: slow(*arguments))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: start((i + 1,), (i, *GIVEN[1:])), range(4)))
    found = {(shape[0], struct.unpack("=Q", arguments[0])[0]) for _, shape, _, arguments, _ in driver.launches}
    assert found == {(i + 1, i) for i in range(4)}


@pytest.mark.parametrize("resident", [1, 7, 132])
@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_grids_leave_no_unit_out(resident, rounds):
    for units in (*range(1, 50), 1000, 1 << 40):
        blocks = grid_of(units, resident, rounds)
        assert blocks == units if units <= resident else resident <= blocks <= units
        assert -(-units // blocks) <= max(rounds, -(-units // resident))
        assert grid_of(units, resident, waves=2) == min(units, 2 * resident)


def test_a_struct_has_its_members_where_numpy_has_them():
    packed = np.frombuffer(CUT.pack(rows=5, value=2.5), CUT.dtype)[0]
    assert packed["rows"] == 5 and (packed["value"] == 2.5).all()


def test_threads_that_ask_at_once_wait_for_one_compilation(monkeypatch):
    begun = threading.Barrier(4)
    made = []

    def compiled(template, expression, device):
        time.sleep(0.05)
        made.append(expression)
        return object()

    def ask():
        begun.wait()
        return compile.function(Template("none.cu", "kernel"), "kernel", 0)

    monkeypatch.setattr(compile, "_compiled", compiled)
    monkeypatch.setattr(compile, "loaded", {})
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask) for _ in range(4)]
        assert len({id(each.result()) for each in asked}) == 1
    assert made == ["kernel"]
