"""Compare the machine code of two trees: ``python .ci/sass.py OLD NEW``, with no GPU.

OLD and NEW are folders or git revisions. Every hot kernel of either is compiled, and is
  equal      to the byte;
  moved      equal but for where its parameters lie;
  changed    other code: instructions of the main loop and in all, registers and spills of both are printed;
  worse      changed, with more instructions in the main loop or registers, or a spill;
  new, gone  in one tree only.
A kernel that has another name is found by its code, or by ``--rename 'PATTERN=REPLACEMENT'`` of the old name
(``file: expression``), a regular expression; what moved since 0.1 is known. The status is 1 when a kernel is worse or
gone.

What is compiled is kept in ~/.cache/kbitcupy-ci (KBITCUPY_CI_CACHE); a second run takes seconds. The main loop is found
by nvdisasm (``pip install nvidia-cuda-nvdisasm``); without it the code's length is compared instead.
"""

import argparse
import collections
import difflib
import functools
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cubins

#: Where the kernels of 0.1 are now, and what tells their names apart from those of today.
RENAMED = (
    (r"^linear\.cu: (linear_few|add_partials)", r"linear/small_batch.cu: \1"),
    (r"^linear\.cu: linear_one", "linear/single_token.cu: linear_one"),
    (r"^linear\.cu:", "linear/experts.cu:"),
    (r"^linear_tile_sm90a\.cu:", "linear/hopper_sm90a.cu:"),
    (r"^w8a8(_sm90a)?\.cu:", r"linear/int8\1.cu:"),
    (r"^scales\.cu:", "linear/prescale.cu:"),
    (r"^float4\.cu:", "table4.cu:"),
    # Sizes that the kernels had of their own are now told to them, and numbers have names.
    (r", (Tile)?Layout<[^<>]*>", ""),
    (r"\b(false|IN_CHUNKS)\b", "0"),
    (r"\b(true|AT_ONCE)\b", "1"),
    (r"\bAT_ONCE_SPREAD\b", "2"),
)


def tree_of(text):
    """The folder of a tree; a revision is unpacked once."""
    if Path(text).is_dir():
        return Path(text).resolve()
    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", "-q", f"{text}^{{commit}}"], cwd=here, capture_output=True, text=True
    ).stdout.strip()
    if not commit:
        sys.exit(f"{text!r} is neither a folder nor a revision of this repository")
    target = cubins.folder() / "trees" / commit
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        top = subprocess.run(
            ["git", "rev-parse", "--show-toplevel"], cwd=here, capture_output=True, text=True, check=True
        )
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            packed = Path(folder) / "tree.tar"
            what = ["git", "archive", "-o", packed, commit, "kbitcupy", "kernels", "pyproject.toml"]
            subprocess.run(what, cwd=top.stdout.strip(), check=True)
            with tarfile.open(packed) as archive:
                archive.extractall(Path(folder) / "tree", filter="data")
            (Path(folder) / "tree").rename(target)
    return target


# ---- disassembly -----------------------------------------------------------------------------------------------------


@functools.cache
def nvdisasm():
    """The program's path, or None: on the path, of a toolkit, or of the package of that name."""
    places = [Path(folder) / "nvidia" / cu / "bin" for folder in sys.path for cu in ("cu13", "cu12", "cuda_nvdisasm")]
    for found in (shutil.which("nvdisasm"), *(place / "nvdisasm" for place in places), "/usr/local/cuda/bin/nvdisasm"):
        if found and Path(found).is_file():
            return str(found)
    return None


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_LABEL = re.compile(r"^(\.L\w+):|^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
# Spinning at a barrier is a loop, but not the main one: it waits.
_LEAST_LOOP = 16


def listing(binary):
    """(label or None, instruction) lines of the kernel and its functions; padding at the end is left out."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"nvdisasm: {done.stderr.strip()}")
    found = []
    for label, _, instruction in _LABEL.findall(done.stdout):
        if label:
            found.append((label, ""))
        elif instruction != "NOP":
            found.append((None, " ".join(instruction.split())))
    return found


def count(lines):
    """Instructions of the main loop (the longest loop that holds no other; 0 without one) and in all."""
    places, number = {}, 0
    for label, _ in lines:
        if label:
            places[label] = number
        else:
            number += 1
    loops = []
    at = 0
    for label, instruction in lines:
        if label:
            continue
        target = re.search(r"\bBRA\b.*\((\.L\w+)\)", instruction)
        if target and at - places[target[1]] + 1 >= _LEAST_LOOP and places[target[1]] <= at:
            loops.append((places[target[1]], at))
        at += 1
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return max((b - a + 1 for a, b in inner), default=0), number


def without_places(lines):
    """The lines with no word of where parameters lie and of what labels are called."""
    text = "\n".join(label or instruction for label, instruction in lines)
    text = re.sub(r"c\[0x0\]\[(?:0x[0-9a-f]+|(U?R\d+)(?:\+-?0x[0-9a-f]+)?)\]", "c[parameter]", text)
    names = {}
    return re.sub(r"\.L\w+", lambda found: names.setdefault(found[0], f".L{len(names)}"), text)


class Shape:
    """What is compared of a binary whose code is another."""

    def __init__(self, binary):
        self.registers, self.spill = binary.registers, binary.stack + binary.stores + binary.loads
        self.loop, self.all, self.text = 0, binary.instructions, None
        if nvdisasm():
            lines = listing(binary)
            self.loop, self.all = count(lines)
            self.text = without_places(lines)


def verdict(old, new):
    if new.text is not None and old.text == new.text and new.registers <= old.registers:
        return "moved"
    worse = new.loop > old.loop or new.registers > old.registers or new.spill > old.spill
    if nvdisasm() is None or not (old.loop and new.loop):  # one may have been unrolled
        worse = worse or new.all > old.all
    return "worse" if worse else "changed"


# ---- the two trees ---------------------------------------------------------------------------------------------------


def known_as(name, rules):
    """The name after all rules: what has the same one on both sides is one kernel."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def pairs(old, new, rename):
    """{old name: new name} of what is in both; and the names that are left on either side."""
    there = {known_as(name, RENAMED): name for name in new} | {name: name for name in new}
    both, gone = {}, []
    for name in old:
        found = there.get(name) or there.get(known_as(name, [*rename, *RENAMED]))
        if found is None:
            gone.append(name)
        else:
            both[name] = found
    taken = set(both.values())
    return both, gone, [name for name in new if name not in taken]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--only", default="", metavar="PATTERN", help="kernels whose `file: expression` it is found in")
    parser.add_argument("--all", action="store_true", help="kernels that are not hot too")
    parser.add_argument("--arch", default="90", help="architecture; files for one only have their own (default 90)")
    parser.add_argument("--rename", action="append", default=[], metavar="PATTERN=REPLACEMENT")
    parser.add_argument("--list", action="store_true", help="print every kernel, the equal ones too")
    parser.add_argument("--diff", action="store_true", help="print the difference of the code of what changed")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile (default 2)")
    arguments = parser.parse_args()

    def chosen(tree):
        return {i.name: i for i in cubins.instances(tree) if not i.only or i.only[:2] == arguments.arch[:2]}

    old, new = chosen(tree_of(arguments.old)), chosen(tree_of(arguments.new))
    rename = [text.rpartition("=")[::2] for text in arguments.rename]
    both, gone, added = pairs(old, new, rename)
    looked_at = re.compile(arguments.only)

    def wanted(*instances):
        return any(arguments.all or i.hot for i in instances) and any(looked_at.search(i.name) for i in instances)

    both = {a: b for a, b in both.items() if wanted(old[a], new[b])}
    gone = [name for name in gone if wanted(old[name])]
    added = [name for name in added if wanted(new[name])]

    def build(tree, names):
        def progress(done, of):
            if sys.stderr.isatty():
                print(f"\r{done}/{of} ", end="\n" if done == of else "", file=sys.stderr)

        work = [(tree[name], tree[name].only or arguments.arch) for name in names]
        built = cubins.build_all(work, arguments.workers, progress)
        return {name: binary for (name, _), binary in built.items()}

    before, after = build(old, [*both, *gone]), build(new, [*both.values(), *added])
    for side in (before, after):
        for name, binary in side.items():
            if binary.error:
                print(f"FAILED {name}: {binary.error}")
    # What only changed its name.
    by_code = collections.defaultdict(list)
    for name in added:
        by_code[after[name].text].append(name)
    renamed = {name: by_code[before[name].text].pop(0) for name in gone if by_code.get(before[name].text)}
    gone = [name for name in gone if name not in renamed]
    added = [name for name in added if name not in set(renamed.values())]

    tally = collections.Counter(gone=len(gone), new=len(added), renamed=len(renamed))
    for name, now in {**both, **renamed}.items():
        a, b = before[name], after[now]
        shown = name if name == now else f"{name} -> {now}"
        if a.text == b.text:
            tally["equal"] += 1
            if arguments.list:
                print(f"equal    {shown}")
            continue
        x, y = Shape(a), Shape(b)
        how = verdict(x, y)
        tally[how] += 1
        if how != "moved" or arguments.list:
            print(
                f"{how:<8} {shown}: loop {x.loop} -> {y.loop}, all {x.all} -> {y.all}, "
                f"registers {x.registers} -> {y.registers}, spills {x.spill} -> {y.spill}"
            )
        if arguments.diff and how != "moved" and y.text is not None:
            print(*difflib.unified_diff(x.text.splitlines(), y.text.splitlines(), "old", "new", lineterm=""), sep="\n")
    for name in gone:
        print(f"gone     {name}")
    for name in added:
        print(f"new      {name}: {after[name].registers} registers{', SPILLS' if after[name].spills else ''}")
    print(", ".join(f"{tally[key]} {key}" for key in ("equal", "moved", "changed", "worse", "renamed", "new", "gone")))
    if nvdisasm() is None:
        print("nvdisasm was not found: instructions are bytes of code over 16, with no main loop")
    return 1 if tally["worse"] or gone else 0


if __name__ == "__main__":
    sys.exit(main())
