"""Write tests/data/frozen_bytes.safetensors: `QuantizedArray.to_bytes` of an array of each file in tests/data/frozen.

Run it once for a format that is new, ``python tests/make_frozen_bytes.py``: bytes that are there already are kept, for
every later version must read them.
"""

from pathlib import Path

import numpy as np

import kbitcupy as kb

DATA = Path(__file__).parent / "data"
FILE = DATA / "frozen_bytes.safetensors"


def main():
    frozen = {name: array.copy() for name, array in kb.io.load(FILE).items()} if FILE.exists() else {}
    for number, path in enumerate(sorted((DATA / "frozen").glob("*.safetensors"))):
        tensors = kb.io.load(path)
        cases = [case for case in tensors if isinstance(tensors[case], kb.QuantizedArray)]
        if cases and not any(name.startswith(f"{path.stem} ") for name in frozen):
            case = cases[number % len(cases)]  # every dtype and kind of options has its turn
            frozen[f"{path.stem} {case}"] = np.frombuffer(tensors[case].to_bytes(), np.uint8)
            print(f"{path.stem} {case}")
    kb.io.save(FILE, frozen, force=True)


if __name__ == "__main__":
    main()
