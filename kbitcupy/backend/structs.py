"""Structs that are passed to kernels by value, and constants of theirs: declared once, in Python.

A `Struct` is a NumPy dtype, with which the host packs, and the text of a C++ struct of the same layout; `Constants` are
numbers, and the text of their definitions in C++. The text stands ahead of the source of the kernels that ask for it.
So there is no second declaration that could disagree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

#: C++ names of the members' types, by NumPy's.
_CXX = {
    "u1": "unsigned char",
    "i4": "int",
    "u4": "unsigned",
    "i8": "long long",
    "u8": "unsigned long long",
    "f4": "float",
    "f8": "double",
}


class Struct:
    """A struct of C++ and NumPy.

    Parameters
    ----------
    name : str
        Its C++ name; one in brackets, ``"Codebook<4>"``, is that of an instance of a template of an int.
    **members : str, Struct, or tuple of one of them and an int
        Types by name, in order: ``"i4"`` and its like as NumPy writes them, another struct, or an array of one of them.

    Attributes
    ----------
    dtype : numpy.dtype
        With the padding that C++ gives it.

    Examples
    --------
    >>> cut = Struct("Cut", rows="i4", value=("f4", 4))
    >>> print(cut.text)
    struct Cut {
        int rows;
        float value[4];
    };
    static_assert(sizeof(Cut) == 20, "Cut is what the host packs");
    >>> len(cut.pack(rows=3, value=(1, 2, 3, 4)))
    20
    """

    __slots__ = ("_members", "dtype", "name")
    dtype: np.dtype[Any]

    def __init__(self, name: str, **members: Any):
        self.name = name
        self._members = tuple((member, *(of if isinstance(of, tuple) else (of, 0))) for member, of in members.items())
        fields = [
            (member, of.dtype if isinstance(of, Struct) else np.dtype(of), *((count,) if count else ()))
            for member, of, count in self._members
        ]
        self.dtype = np.dtype(fields, align=True)

    @property
    def text(self) -> str:
        """The declaration in C++; structs of which it has members come ahead of it."""
        inner = dict.fromkeys(of for _, of, _ in self._members if isinstance(of, Struct))
        lines = [
            f"    {of.name if isinstance(of, Struct) else _CXX[of]} {member}{f'[{count}]' if count else ''};"
            for member, of, count in self._members
        ]
        check = f'static_assert(sizeof({self.name}) == {self.dtype.itemsize}, "{self.name} is what the host packs");'
        template = self.name.partition("<")[0]
        ahead = (f"template <int>\nstruct {template};\ntemplate <>",) if template != self.name else ()
        return "\n".join((*(struct.text for struct in inner), *ahead, f"struct {self.name} {{", *lines, "};", check))

    def zeros(self) -> np.ndarray:
        """One of them, all zero, as a zero-dimensional array whose members are set by name."""
        return np.zeros((), self.dtype)

    def pack(self, **members: Any) -> bytes:
        """The bytes of one whose members are `members`; those not named are zero."""
        struct = self.zeros()
        for name, value in members.items():
            struct[name] = value
        return struct.tobytes()

    def __repr__(self) -> str:
        return f"Struct({self.name!r}, {', '.join(name for name, _, _ in self._members)})"


class Constants:
    """Numbers that Python and kernels share; the attributes are the numbers.

    Parameters
    ----------
    **numbers : int, float or tuple of int
        By their C++ names. They are ``int``, ``float`` and arrays of ``int`` there.

    Examples
    --------
    >>> sizes = Constants(ROWS=16, TOKENS=8)
    >>> sizes.ROWS
    16
    >>> print(sizes.text)
    [[maybe_unused]] constexpr int ROWS = 16;
    [[maybe_unused]] constexpr int TOKENS = 8;
    >>> print(Constants(OFFSET=2.0**-23, BYTES=(48, 96)).text)
    [[maybe_unused]] constexpr float OFFSET = 0x1.0000000000000p-23f;
    [[maybe_unused]] constexpr int BYTES[] = {48, 96};
    """

    def __init__(self, **numbers: Any):
        self._numbers = numbers
        vars(self).update(numbers)

    def __getattr__(self, name: str) -> Any:
        """Of no constant."""
        raise AttributeError(f"{name} is none of the constants {', '.join(vars(self).get('_numbers', ()))}")

    @property
    def text(self) -> str:
        """The definitions in C++."""
        return "\n".join(f"[[maybe_unused]] constexpr {_defined(*item)};" for item in self._numbers.items())

    def __repr__(self) -> str:
        return f"Constants({', '.join(f'{name}={number}' for name, number in self._numbers.items())})"


class Table:
    """An array of numbers that lies in the memory of the device with the kernels that read it.

    Parameters
    ----------
    name : str
        Its C++ name.
    make : callable
        Gives the numbers, uint32, when the text is asked for.

    Examples
    --------
    >>> print(Table("PRIMES", lambda: np.array([2, 3, 5], np.uint32)).text)
    static __device__ __align__(16) const unsigned PRIMES[3] = {2, 3, 5};
    """

    __slots__ = ("_make", "name")

    def __init__(self, name: str, make: Callable[[], np.ndarray]):
        self.name, self._make = name, make

    @property
    def text(self) -> str:
        """The definition in C++."""
        numbers = self._make()
        named = f"static __device__ __align__(16) const unsigned {self.name}[{numbers.size}]"
        return f"{named} = {{{', '.join(map(str, numbers))}}};"

    def __repr__(self) -> str:
        return f"Table({self.name!r})"


def _defined(name: str, number: Any) -> str:
    if isinstance(number, tuple):
        return f"int {name}[] = {{{', '.join(map(str, number))}}}"
    return f"float {name} = {number.hex()}f" if isinstance(number, float) else f"int {name} = {number}"


#: What stands ahead of the source of kernels.
Declared: TypeAlias = Struct | Constants | Table


@functools.cache
def declarations(declared: tuple[Declared, ...]) -> str:
    """The text of several, in order."""
    return "\n".join(each.text for each in declared)
