"""Print one of the README's one-line shell commands, counted from 1: what CI runs is what the README says."""

import re
import sys
from pathlib import Path

text = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
commands = re.findall(r"^```sh\n(.*)\n```$", text, re.MULTILINE)
print(commands[int(sys.argv[1]) - 1])
