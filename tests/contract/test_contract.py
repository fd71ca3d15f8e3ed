"""What every registered format promises: a table of checks and of formats with their options, on NumPy and on CuPy.

A format is in it on the day it is registered. A test here takes less than a second.
"""

import json

import numpy as np
import pytest
from cases import CASES, Case, cases_of
from checks import CHECKS, WRITING, commands
from toy import Toy

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.explore.samples import draw
from kbitcupy.formats.base import Plane, kernel_templates, unregister


@pytest.fixture
def folder(check, request):
    """A folder for a check that writes files: to make one takes longer than most of the others."""
    return request.getfixturevalue("tmp_path") if check in WRITING else None


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_registered(check, case, xp, folder):
    check(case, xp, folder)


@pytest.mark.parametrize("name", kb.list_formats())
def test_the_command_line(name, tmp_path):
    commands(Case(name), tmp_path)


def test_every_name_has_a_case():
    assert {case.format.name for case in CASES} == set(kb.list_formats())


# ---- a format that is new --------------------------------------------------------------------------------------------


@pytest.fixture
def toy():
    kb.register("toy", Toy)
    yield "toy"
    unregister("toy")


@pytest.mark.parametrize("text", ["toy", "toy:boost=1.5"])
@pytest.mark.parametrize("check", CHECKS)
def test_a_new_format(check, text, toy, folder):
    """The same table, for a format that only this file knows."""
    check(Case(text), np, folder)


def test_a_new_format_on_the_command_line(toy, tmp_path):
    commands(Case(toy), tmp_path)


def test_a_new_format_is_in_the_lists(toy, monkeypatch, capsys):
    assert [str(case) for case in cases_of(toy)] == ["toy", "toy:boost=1.5"]
    assert toy in kb.list_formats() and toy not in [template.name for template in kernel_templates()]
    monkeypatch.setattr("kbitcupy.cli.sources.draw", lambda name: draw(name, (4, 256)))
    monkeypatch.setattr("kbitcupy.cli.sources.SHAPE", (4, 256))
    assert main(["compare", "--device", "cpu", "--json"]) == 0  # the toy knows NumPy only
    results = json.loads(capsys.readouterr().out)["results"]
    shown = list(dict.fromkeys(result["format"]["name"] for result in results))
    assert shown == kb.list_formats(default=True) and shown[-1] == toy


class Broken(Toy):
    """Toys that keep one promise less."""

    name = "broken"

    def __init__(self, *, fault: str = "", boost: float = 1.0):
        super().__init__(boost=boost)
        self.fault = fault

    def options(self):
        return {"boost": self.boost} if self.fault == "options" else {"fault": self.fault, "boost": self.boost}

    def planes(self, shape):
        planes = super().planes(shape)
        if self.fault == "scope":
            planes["mean"] = Plane("float32", planes["mean"].shape, "constant")
        return planes

    def encode_numpy(self, x, planes, given):
        super().encode_numpy(x, planes, given)
        if self.fault == "tail" and x.size % 16:
            planes["sign"][-1] = np.random.default_rng().integers(256)
        if self.fault == "sign":
            planes["sign"][:] ^= 255

    def decode_numpy(self, planes, out):
        super().decode_numpy(planes, out)
        if self.fault == "dtype" and out.dtype == np.float16:
            out[...] = np.nextafter(out, np.float16(9))


@pytest.mark.parametrize("fault", ["options", "scope", "tail", "sign", "dtype"])
def test_a_broken_promise_is_found(fault, tmp_path):
    kb.register("broken", Broken)
    try:
        case, found = Case(f"broken:fault={fault}"), 0
        for number, check in enumerate(CHECKS):
            folder = tmp_path / str(number)
            folder.mkdir()
            try:
                check.values[0](case, np, folder)
            except (AssertionError, ValueError):
                found += 1
        assert found
    finally:
        unregister("broken")
