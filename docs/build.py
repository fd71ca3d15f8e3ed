"""Build the documentation: ``python docs/build.py OUT``, with what ``pip install '.[docs]'`` installs.

Sphinx reads a tree that is made in a temporary folder and looks like the repository: README.md is its first page, and
beside it stand docs/, notebooks/ and the other files that pages link to, so that a link leads to the same place here
and in the repository. What `pages.py` generates is added. Warnings are errors.
"""

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]  # the checkout is documented, whether or not it is installed

import pages  # noqa: E402

# What stands beside README.md, as far as it is there.
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")


def linked(text: str) -> set[str]:
    """Targets of a page's links to other files, without the parts behind a #."""
    return {link.partition("#")[0] for link in re.findall(r"\]\((?!https?://|#)([^)\s]+)", text)}


def assemble(tree: Path) -> None:
    """Put together what Sphinx reads."""
    contents = "\n".join(pages.contents(ROOT))
    (tree / "index.md").write_text((ROOT / "README.md").read_text(encoding="utf-8") + contents, encoding="utf-8")
    for name in BESIDE:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    shutil.copytree(DOCS, tree / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__", "_static"))
    shutil.copytree(ROOT / "notebooks", tree / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    pages.write(tree / "docs")
    overview = tree / "docs" / "formats.md"
    linked_names = re.sub(
        r"^\| `(\w+)` \|", r"| {doc}`\1 <formats/\1>` |", overview.read_text("utf-8"), flags=re.MULTILINE
    )
    overview.write_text(linked_names, "utf-8")
    for page in [*tree.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("(../README.md)", "(../index.md)").replace("(README.md)", "(index.md)"), "utf-8")
        for link in linked(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if not target.exists() and target.is_relative_to(tree):  # a source file, to be downloaded
                source = ROOT / target.relative_to(tree)
                if source.is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the HTML pages")
    parser.add_argument("--jobs", default="auto", help="processes (default: one for each core)")
    arguments = parser.parse_args()
    from sphinx.cmd.build import main as sphinx

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        tree.mkdir()
        assemble(tree)
        doctrees = str(Path(folder) / "doctrees")
        options = ["-q", "-W", "--keep-going", "-j", arguments.jobs, "-c", str(DOCS), "-d", doctrees]
        # What an extension leaves beside the pages goes with the folder.
        pages_folder = Path(folder) / "pages"
        failed = int(sphinx([*options, str(tree), str(pages_folder)]))
        if pages_folder.exists():
            shutil.copytree(pages_folder, arguments.out, dirs_exist_ok=True)
        return failed


if __name__ == "__main__":
    sys.exit(main())
