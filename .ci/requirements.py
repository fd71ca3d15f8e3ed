"""Print what pyproject.toml requires: `dependencies`, or the names of extras, one requirement a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
for group in sys.argv[1:]:
    wanted = project["dependencies"] if group == "dependencies" else project["optional-dependencies"][group]
    print(*wanted, sep="\n")
