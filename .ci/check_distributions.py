"""Check that sdist and wheel carry what they must, and that the wheel installs nothing but `kbitcupy`.

Run it from the repository root with the folder of the two files.
"""

import sys
import tarfile
import zipfile
from pathlib import Path

KERNELS = sorted(
    path.relative_to("kernels").as_posix() for pattern in ("*.cu", "*.cuh") for path in Path("kernels").rglob(pattern)
)


def lacking(names, wanted):
    return [name for name in wanted if name not in names]


def main(folder):
    (sdist,) = Path(folder).glob("*.tar.gz")
    (wheel,) = Path(folder).glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    tests = [str(path) for path in Path("tests").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    problems = [
        f"{sdist.name} lacks {name}"
        for name in lacking(
            in_sdist,
            [f"kernels/{name}" for name in KERNELS]
            + ["kbitcupy/py.typed", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"]
            + ["CITATION.cff", "SECURITY.md"]
            + tests,
        )
    ]
    problems += [
        f"{wheel.name} lacks {name}"
        for name in lacking(in_wheel, [f"kbitcupy/kernels/{name}" for name in KERNELS] + ["kbitcupy/py.typed"])
    ]
    top = {name.partition("/")[0] for name in in_wheel}
    problems += [
        f"{wheel.name} installs {name} beside the package"
        for name in sorted(top)
        if name != "kbitcupy" and not name.endswith(".dist-info")
    ]
    if not KERNELS:
        problems.append("no kernels in kernels/: is this the repository root?")
    print(f"{sdist.name}: {len(in_sdist)} entries; {wheel.name}: {len(in_wheel)} files; {len(KERNELS)} kernel files")
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(main(*sys.argv[1:])) or 0)
