"""GGUF files made by hand: headers that say whatever they are told to."""

import struct

#: Types of blocks that files have.
TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "iq4_nl", "iq4_xs"),
    *("tq1_0", "tq2_0", "mxfp4", "nvfp4"),
)


def text(data):
    """A text with its length."""
    data = data.encode() if isinstance(data, str) else data
    return len(data).to_bytes(8, "little") + data


def key(name, kind, value):
    """A key with a value of this type."""
    return text(name) + struct.pack("<I", kind) + value


def info(name, lengths, kind, offset=0):
    """What is said of a tensor; lengths are those of the file, the fastest first."""
    return text(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, offset)


def header(keys, infos=(), data=b"", alignment=32):
    """A file of these keys, tensors and data."""
    first = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join((*keys, *infos))
    return first + bytes(-len(first) % alignment) + data if infos else first
