"""Compile the kernels with no GPU, and hold what ptxas says of them against `.ci/kernels.lock`.

The list has a line for each instance and architecture: every instance for 80 and 90, and for 75 where its body is not
empty there (`Template.least`); one instance of each template for the other architectures, where the same code takes no
other path. A line says what the binary is made of (a hash of source, headers, options, expression and the version of
NVRTC), registers, bytes of stack frame, of spill stores and of spill loads.

What the list does not know, or knows with another hash, is compiled, and a random tenth of the rest. It is an error
when a kernel does not compile, when a hot one spills that `.ci/spills` does not name, when a binary is not what the
list says, and when the list or `.ci/spills` names what there is no more.

    python .ci/compile_kernels.py            the check
    python .ci/compile_kernels.py --write    compile what is not known, and write the list anew
    python .ci/compile_kernels.py --all      compile everything

Needs `pip install -e '.[compile]'`. Binaries are kept as by `sass.py`, so a run that was stopped goes on where it was.
"""

import argparse
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import cubins  # noqa: E402

LOCK, SPILLS = HERE / "kernels.lock", HERE / "spills"
EVERY_INSTANCE, ONE_INSTANCE = ("75", "80", "90"), ("86", "89", "100", "120")
SAMPLE = 10  # of what is known, one in so many is compiled again


def jobs(instances):
    """{name in the list: (instance, architecture)} of everything that is compiled."""
    found = {}
    for instance in instances:
        wanted = (instance.only,) if instance.only else EVERY_INSTANCE + (ONE_INSTANCE if instance.first else ())
        for architecture in wanted:
            if int(architecture.rstrip("af")) >= instance.least:
                found[f"{instance.name} | sm_{architecture}"] = instance, architecture
    return found


# ---- the list --------------------------------------------------------------------------------------------------------


def line_of(name, digest, binary):
    return f"{name} | {digest} {binary.registers} {binary.stack} {binary.stores} {binary.loads}"


def read_lock(text):
    """{name: (hash, registers, stack, stores, loads)}."""
    known = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, facts = line.rpartition(" | ")
            digest, *numbers = facts.split()
            known[name] = digest, *map(int, numbers)
    return known


def read_spills(text):
    """{name: bytes of stack frame, of stores and of loads} of the spills that are accepted."""
    accepted = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, numbers = line.rpartition(" | ")
            accepted[name] = tuple(map(int, numbers.split()))
    return accepted


def complaints(hashes, hot, known, accepted, built):
    """What is wrong, one text each.

    Parameters
    ----------
    hashes : dict of str to str
        What everything that is wanted is made of, by name in the list.
    hot : set of str
        What must not spill.
    known : dict
        The list.
    accepted : dict
        The spills that are accepted.
    built : dict of str to cubins.Binary
        What has been compiled.
    """
    found = [f"{name}: the list has it, and there is no such kernel" for name in sorted(known.keys() - hashes.keys())]
    found += [
        f"{name}: .ci/spills has it, and there is no such kernel" for name in sorted(accepted.keys() - hashes.keys())
    ]
    for name, binary in sorted(built.items()):
        if binary.error:
            found.append(f"{name}: {binary.error}")
            continue
        spills = binary.stack, binary.stores, binary.loads
        if name in accepted and spills != accepted[name]:
            found.append(f"{name}: spills {spills}, and .ci/spills says {accepted[name]}")
        if name in hot and any(spills) and name not in accepted:
            found.append(f"{name}: {spills[0]} bytes stack frame, {spills[1]} bytes spill stores, {spills[2]} loads")
        if name in known and known[name][0] == hashes[name] and known[name][1:] != (binary.registers, *spills):
            found.append(
                f"{name}: {(binary.registers, *spills)} registers, stack, stores, loads; listed {known[name][1:]}"
            )
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the list")
    parser.add_argument("--all", action="store_true", help="compile everything, not a sample")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the sample")
    parser.add_argument("--workers", type=int, help="processes (default: one for each core)")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    work = jobs(cubins.instances(HERE.parent))
    if not work:
        print("no kernel template is registered")
        return 1
    version = cubins.nvrtc_version()
    hashes = {name: cubins.key_of(instance, architecture) for name, (instance, architecture) in work.items()}
    known = read_lock(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    accepted = read_spills(SPILLS.read_text(encoding="utf-8")) if SPILLS.exists() else {}
    unknown = [name for name in work if name not in known or known[name][0] != hashes[name]]
    certain = sorted(work.keys() - set(unknown))
    sample = certain if arguments.all else random.Random(arguments.seed).sample(certain, -(-len(certain) // SAMPLE))
    if arguments.write:
        sample = [] if not arguments.all else certain

    def progress(done, of):
        if done % 50 == 0 or done == of:
            print(f"  {done} of {of} compiled, {time.perf_counter() - begin:.0f} s", flush=True)

    names = [*unknown, *sample]
    found = cubins.build_all([work[name] for name in names], arguments.workers, progress)
    built = {name: found[work[name][0].name, work[name][1]] for name in names}
    hot = {name for name, (instance, _) in work.items() if instance.hot}
    if arguments.write:
        lines = {
            name: line_of(name, hashes[name], built[name])
            if name in built
            else f"{name} | {' '.join(map(str, known[name]))}"
            for name in work
            if name not in built or not built[name].error
        }
        head = f"# Written by .ci/compile_kernels.py --write with NVRTC {version}: {len(lines)} kernels"
        LOCK.write_text("\n".join([head, *sorted(lines.values()), ""]), encoding="utf-8")
        known = read_lock(LOCK.read_text(encoding="utf-8"))
    failures = complaints(hashes, hot, known, accepted, built)
    for text in failures:
        print(f"FAILED {text}")
    count = len({instance.name for instance, _ in work.values()})
    print(f"{len(work)} kernels of {count} instances, {len(known)} listed, {len(unknown)} not as they are")
    print(f"  {len(sample)} of the others compiled too (--seed {arguments.seed})")
    for architecture in sorted({architecture for _, architecture in work.values()}, key=lambda a: int(a.rstrip("af"))):
        of_this = {name: facts for name, facts in known.items() if name.endswith(f"sm_{architecture}")}
        if of_this:
            name = max(of_this, key=lambda name: of_this[name][1])
            print(f"  sm_{architecture:<4} {len(of_this):5}   most registers: {of_this[name][1]:3}  {name}")
    print(f"  NVRTC {version}, {time.perf_counter() - begin:.1f} s; {len(failures)} complaints")
    if unknown and not arguments.write:
        print("  renew the list: python .ci/compile_kernels.py --write")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
