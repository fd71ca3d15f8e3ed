"""What a format is, and the registry that everything else iterates."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..backend.compile import Template
from ..backend.xp import FLOAT_DTYPES
from ..errors import FormatError
from . import decoders
from .decoders import Decoder as Decoder
from .integer_codes import IntegerCodes as IntegerCodes
from .naming import (
    MARKS,
    equal,
    guesses,
    other_case,
    parse_format as parse_format,
    split_formats as split_formats,
    value_text,
)
from .planes import (
    Fragments as Fragments,
    Integers as Integers,
    Magnitude as Magnitude,
    Plane as Plane,
    Records as Records,
    Trits as Trits,
)

# Axes that an array can have, NumPy's limit.
_MOST_AXES = 64
#: Third parties list their formats under this entry-point group: name = "module:factory".
ENTRY_POINTS = "kbitcupy.formats"


class Format(ABC):
    """A way to store an array in a few bits per element, with all its options chosen.

    It is JSON: a name and options, which are the keyword parameters of its factory; two are equal when these are. What
    belongs to one call, such as scales that are given, goes to `kbitcupy.quantize` (see `takes`) and lies in planes.

    A subclass sets the class attributes (``name`` may be an instance attribute) and writes `options`, `planes`,
    `encode_numpy` and `decode_numpy`, their twins for CUDA where there are kernels, and `error_bound` where theory
    gives one. Everything else (shapes, allocation, slicing, stacks, files, command line, benchmark, tests) works from
    these.
    """

    #: Name in the registry, ``"kbit4"``.
    name: str
    #: What the formats of one kind have in common, such as the line of a plot: the name without its number.
    family: str
    #: Bits of an element, scales not counted where they have planes of their own.
    bits: float
    #: Elements that share a scale; 1 where the shape of an array says it.
    block: int
    #: dtypes of the arrays that `encode` takes and `decode` writes; float64 goes through float32.
    dtypes: ClassVar[tuple[str, ...]] = FLOAT_DTYPES[:3]
    #: Where the format comes from (paper, project, file).
    origin: str
    #: One line on what it is good for.
    summary: str
    #: Whether lists show the format to who has not asked for it.
    default: ClassVar[bool] = True
    #: Whether arrays can be quantized to it; those that can only be decoded are for reading the files of others.
    can_encode: ClassVar[bool] = True
    #: Whether all numbers are -1, 0 and 1 times a scale: arrays of them are trained to be, and no sum with others is.
    ternary: ClassVar[bool] = False
    #: What a call of `quantize` may bring beside the options, of `GIVEN`.
    takes: ClassVar[tuple[str, ...]] = ()
    #: Options that what a call brings sets where they are not given: what, the option and its value.
    implied: ClassVar[Mapping[str, tuple[str, Any]]] = {}
    #: Names that options had in earlier versions, and the names that they have.
    renamed: ClassVar[Mapping[str, str]] = {}
    #: Kernels of the family, for the compile check.
    kernels: ClassVar[tuple[Template, ...]] = ()
    #: What `fragments` may return, for the compile check of product kernels, but for the values of codes.
    all_fragments: ClassVar[tuple[Fragments, ...]] = ()
    #: What `records` may return, for the same.
    all_records: ClassVar[tuple[Records, ...]] = ()
    #: Words for what `shares` tells; where there are none, no plane is read for it.
    tells: ClassVar[tuple[str, ...]] = ()
    #: A plane that `decode` multiplies by where it is given, and products may multiply by instead, in fp32.
    tensor_scale: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "family" not in cls.__dict__ and isinstance(name := cls.__dict__.get("name"), str):
            cls.family = name.rstrip("0123456789")

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        """Sets of options that are worth testing and timing, the first of them the usual one."""
        return ({},)

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The chosen options, as JSON values; ``get_format(name, **options)`` gives an equal format."""

    @abstractmethod
    def planes(self, shape: tuple[int, ...]) -> Mapping[str, Plane]:
        """The planes that an array of `shape` compresses to."""

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Fill `planes` from the C-contiguous array `x`, whose dtype is one of `dtypes`.

        `given` holds what one call brings with it, by the names in `takes`.
        """
        raise FormatError(f"{self} does not quantize NumPy arrays: pass a CuPy array")

    def part_numpy(self, x: np.ndarray, planes: Mapping[str, Any]) -> Any:
        """What some rows of an array say of its numbers that belong to the whole array, where several threads quantize
        rows of their own; None where those cannot be told from parts.

        `planes` are those of these rows: what is left there is found by `encode_numpy`, which is called next for them.
        """
        return None

    def whole_numpy(self, found: list[Any], dtype: np.dtype, planes: Mapping[str, Any]) -> dict[str, Any]:
        """What `encode_numpy` is to be given beside `given`, from what `part_numpy` said of all rows in order.

        What belongs to the whole array may be written to its `planes` here; `dtype` is the array's.
        """
        return {}

    def first_numpy(
        self, shape: tuple[int, ...], planes: Mapping[str, Any]
    ) -> tuple[Format, Mapping[str, Any], Callable[[], None]] | None:
        """How an array of `shape` is quantized in two steps, of which several threads can do the first: by another
        format, into planes of that, after which a call fills what is left of `planes`; None where it is not.
        """
        return None

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """The twin of `encode_numpy` for CuPy arrays, which gives the same bits.

        The device of `x` is the current one when this is called; the work goes to its current stream, without
        synchronising.
        """
        raise FormatError(f"{self} does not quantize CuPy arrays: pass x.get()")

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        """Fill the C-contiguous array `out`, whose dtype is one of `dtypes`, from `planes`."""
        raise FormatError(f"{self} does not decode NumPy arrays: call .to_device('cuda:0') first")

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        """The twin of `decode_numpy` for CuPy arrays, which gives the same bits; by the `decoder` if there is one."""
        if self.decoder is None:
            raise FormatError(f"{self} does not decode CuPy arrays: call .get() first")
        decoders.dequantize(self.decoder, planes, out.shape, out)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any | None:
        """Upper bound of ``|x - dequantized|`` before the rounding to the output dtype.

        Returns
        -------
        array or None
            float64, one entry for each block of the flattened `x`, or for each element; None where no bound is known.
        """
        return None

    def shares(self, planes: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, float]:
        """Shares of the elements of an array, or of a stack, that lists show beside it, by the words in `tells`.

        They lie between 0 and 1; an array of no elements has none. On CuPy the call waits for the device.
        """
        return {}

    def remark(self, sqnr_db: float, cosine: float) -> str | None:
        """What an error that was measured means for this format and its numbers do not say; None where that is nothing.

        It goes behind the name of a tensor in one line, so it names no number of that tensor.
        """
        return None

    def magnitude(self) -> Magnitude | None:
        """The planes that bring decoded elements out of the range of float16; None where none of them can."""
        return None

    def fragments(self, ndim: int = 2) -> Fragments | None:
        """What the tuned product kernels need to decode this format; None where they cannot.

        `ndim` is the number of axes of an array, or of a member of a stack, whose last two are the weight's.
        """
        return None

    def records(self) -> Records | None:
        """What the streaming product kernel needs to decode this format; None where it cannot."""
        return next(iter(self.all_records), None)

    def integers(self, shape: tuple[int, ...], lead: int = 0) -> Integers | None:
        """How an array of `shape`, whose first `lead` lengths count members, is a matrix of plain int8; or None."""
        return None

    def integer_codes(self, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
        """How the last axis of an array of `shape`, whose first `lead` lengths count members, is rows of integer codes
        with scales of groups; or None.
        """
        return None

    def staged_codes(self, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
        """How the codes of such an array lie that stand for integers, of blocks of 256, by a table or with minima; or
        None.
        """
        return None

    def trits(self, shape: tuple[int, ...], lead: int = 0) -> Trits | None:
        """How an array of `shape`, whose first `lead` lengths count members, is one of -1, 0 and 1; or None."""
        return None

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Check what a call brings beside the options, as far as it can be told without the data.

        Raises
        ------
        FormatError
            When it is not allowed.
        """
        return

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Check that an array of `shape` can have this format; asked whenever one is made, reshaped or read.

        Raises
        ------
        FormatError
            When it cannot.
        """
        return

    @property
    def decoder(self) -> Decoder | None:
        """The storey-1 decoder: all that decoding, `take` and a simple product need on a GPU; None where there is none.

        The same object every time, since kernels are remembered by it.
        """
        return None

    def decode_rows(
        self,
        planes: Mapping[str, Any],
        shape: tuple[int, ...],
        ids: Any,
        out: Any,
        lead: int = 0,
        kept: dict[Any, Any] | None = None,
    ) -> bool:
        """Fill `out` with the rows `ids` (int32 or int64) of an array of `shape`, in one launch.

        All arrays are on one device, the current one, and not empty; rows are whole blocks, or those of a stack, whose
        first `lead` lengths count members. Row numbers wrap. `kept` lives as long as the planes, for what does not
        change with them.

        Returns
        -------
        bool
            Whether it was done. Otherwise the caller selects the rows and decodes them.
        """
        if self.decoder is None or not decoders.decodes(out):
            return False
        decoders.take(self.decoder, planes, shape, ids, out, lead, kept)
        return True

    def decode_stack(self, planes: Mapping[str, Any], out: Any, lead: int) -> bool:
        """Fill `out` with a stack whose first `lead` lengths count members, at once.

        Returns
        -------
        bool
            Whether it was done. Otherwise the caller decodes member after member, as where a format has own kernels.
        """
        if self.decoder is None or type(self).decode_cuda is not Format.decode_cuda or not decoders.decodes(out):
            return False
        decoders.dequantize(self.decoder, planes, out.shape[lead:], out, math.prod(out.shape[:lead]))
        return True

    def counted_from_end(self, ndim: int) -> Format:
        """An equal format for arrays of so many axes whose options count axes from the end: a stack puts its own axes
        in front of those of its members.
        """
        return self

    def of_row(self, shape: tuple[int, ...]) -> Format:
        """The format of one row of an array of `shape`, as an array of ``shape[1:]``.

        Raises
        ------
        FormatError
            When the row's planes are not those of such an array.
        """
        if not self.keeps_blocks((1, *shape[1:]), shape[1:]):
            raise FormatError(f"a row of shape {shape[1:]} would not keep its blocks of {self}: dequantize first")
        return self

    def rows_are_blocks(self, shape: tuple[int, ...]) -> bool:
        """Whether every row along axis 0 consists of whole blocks."""
        return bool(shape) and math.prod(shape[1:]) % self.block == 0

    def why_not_blocks(self, shape: tuple[int, ...]) -> str:
        """What an error message says of an array of `shape` whose rows are not whole blocks."""
        return f"rows of shape {shape[1:]} are not whole blocks of {self.block} elements"

    def keeps_blocks(self, shape: tuple[int, ...], new: tuple[int, ...], lead: int = 0, new_lead: int = 0) -> bool:
        """Whether the planes of an array of `shape` are those of the same elements as an array of shape `new`; of
        stacks, where the first `lead` and `new_lead` lengths count members.
        """
        specs = self.planes_of(shape, lead)
        if specs != self.planes_of(new, new_lead):
            return False
        if all(spec.scope != "tensor" and spec.every == 1 for spec in specs.values()):
            return True
        return math.prod(shape[:lead]) == math.prod(new[:new_lead])

    # ---- what follows from the planes ------------------------------------------------------------------------------

    def encode(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any] | None = None, lead: int = 0) -> None:
        """Fill `planes` from the C-contiguous array `x`, whose first `lead` lengths count members of a stack."""
        given = given or {}
        if lead:
            for part, cut in self.parts(x, planes, lead):
                self.encode(part, cut, given)
        elif isinstance(x, np.ndarray):
            self.encode_numpy(x, planes, given)
        else:
            self.encode_cuda(x, planes, given)

    def decode(self, planes: Mapping[str, Any], out: Any, lead: int = 0) -> None:
        """Fill the C-contiguous array `out`, whose first `lead` lengths count members of a stack, from `planes`."""
        if lead:
            if not self.decode_stack(planes, out, lead):
                for part, cut in self.parts(out, planes, lead):
                    self.decode(cut, part)
        elif isinstance(out, np.ndarray):
            self.decode_numpy(planes, out)
        else:
            self.decode_cuda(planes, out)

    def bounds(self, x: np.ndarray, planes: Mapping[str, Any], lead: int = 0) -> Any | None:
        """`error_bound` of an array, or of a stack whose first `lead` lengths count members."""
        if not lead:
            return self.error_bound(x, planes)
        found = [self.error_bound(part, cut) for part, cut in self.parts(x, planes, lead)]
        if any(bound is None for bound in found):
            return None
        return np.concatenate([np.zeros(0), *found])

    def planes_of(self, shape: tuple[int, ...], lead: int = 0) -> dict[str, Plane]:
        """The planes of an array of `shape`; with `lead` of a stack whose first lengths so many count members."""
        members = math.prod(shape[:lead])
        return {name: spec.repeated(members) for name, spec in self.planes(shape[lead:]).items()}

    def lead_of(self, shape: tuple[int, ...], found: Mapping[str, tuple[int, ...]]) -> int | None:
        """How many leading lengths of `shape` count the members of a stack, from the shapes of its planes.

        A stack has the planes of its members one behind the other. Where all that a member has belongs to its blocks,
        it is an array like any other.

        Returns
        -------
        int or None
            The least that fits, 0 for an array that is no stack; None where nothing does.
        """
        for lead in range(min(len(shape), _MOST_AXES) + 1):
            try:
                self.check_shape(shape[lead:])
                specs = self.planes_of(shape, lead)
            except FormatError:  # no member can have this shape
                continue
            if specs.keys() == found.keys() and all(spec.shape == found[name] for name, spec in specs.items()):
                return lead
        return None

    def parts(self, array: Any, planes: Mapping[str, Any], lead: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The members of a stack: a view of each one's elements, and its planes."""
        members, shape = math.prod(array.shape[:lead]), array.shape[lead:]
        specs = self.planes(shape)
        for member in range(members):
            cut = {
                name: plane if specs[name].scope == "constant" else plane.reshape(members, *specs[name].shape)[member]
                for name, plane in planes.items()
            }
            yield array.reshape(members, *shape)[member], cut

    def select(self, planes: Mapping[str, Any], shape: tuple[int, ...], key: Any, lead: int = 0) -> dict[str, Any]:
        """The planes of ``array[key]`` along axis 0; rows are members of a stack or whole blocks."""
        specs, length = self.planes(shape[lead:]), shape[0]
        chosen = {}
        for name, plane in planes.items():
            spec = specs[name]
            if spec.scope == "constant" or (spec.scope == "tensor" and not lead):
                chosen[name] = plane
            elif spec.every > 1 and not lead:
                chosen[name] = self._select_shared(plane, spec, shape, key)
            else:
                rows = plane.reshape(length, len(plane) // length if length else 0, *plane.shape[1:])[key]
                chosen[name] = rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])
        return chosen

    def _select_shared(self, plane: Any, spec: Plane, shape: tuple[int, ...], key: Any) -> Any:
        """Of a plane whose entries serve several blocks each: it can only be cut where such a group ends."""
        per_row = math.prod(shape[1:]) // self.block
        length, every = shape[0], spec.every
        if per_row % every == 0:
            return plane.reshape(length, -1 if length else 0)[key].reshape(-1)
        if isinstance(key, slice):
            start, stop, step = key.indices(length)
            whole = stop >= length or stop * per_row % every == 0
            if step == 1 and start < stop and start * per_row % every == 0 and whole:
                return plane[start * per_row // every : -(-min(stop, length) * per_row // every)].copy()
            if step == 1 and start >= stop:
                return plane[:0].copy()
        raise FormatError(
            f"rows of {per_row} blocks can be cut only where {every} blocks end, since double quantization stores "
            "their absmax together: dequantize first, or quantize with double_quant=False"
        )

    def config(self) -> dict[str, Any]:
        """JSON description: the name and the options."""
        return {"name": self.name, **self.options()}

    def spelled(self) -> dict[str, Any]:
        """The options as the text of the format has them; a family may have a shorter word for one."""
        return self.options()

    def __repr__(self) -> str:
        return f"get_format({str(self)!r})"

    def __str__(self) -> str:
        """The text that `get_format` reads: the name, and the options that differ from their defaults."""
        default: Mapping[str, Any] = {}
        if self.name in _registry:
            with contextlib.suppress(ValueError, TypeError):  # it needs an option: all of them are told
                default = get_format(self.name).spelled()
        changed = {key: value for key, value in self.spelled().items() if default.get(key, ...) != value}
        pieces = ",".join(f"{key}={value_text(value)}" for key, value in changed.items())
        return f"{self.name}:{pieces}" if pieces else self.name

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Format) and self.config() == other.config())

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Of the options too: plans are looked up by formats, and to compare two of one name takes a microsecond."""
        return _hash_of(self.config())

    def __reduce__(self) -> Any:
        # Other processes may not know a format of another package: it brings what makes it, if that has an import path.
        factory = _loaded(self.name) or type(self)
        brings = is_of_others(self) and _has_path(_unwrapped(factory))
        return named, (self.config(), factory) if brings else (self.config(),)


def _hash_of(value: Any) -> int:
    """Of what JSON holds, lists and dictionaries included."""
    if isinstance(value, dict):
        return hash(frozenset((key, _hash_of(each)) for key, each in value.items()))
    return hash(tuple(map(_hash_of, value)) if isinstance(value, list) else value)


def named(config: dict[str, Any], factory: Callable[..., Format] | None = None) -> Format:
    """The format of a `Format.config`: how one is unpickled that its name and options describe. A name that is not
    registered is registered for `factory`, if that is given.
    """
    options = dict(config)
    name = options.pop("name")
    if factory is not None:
        with _lock:
            _registry.setdefault(name, factory)
    return get_format(name, **options)


def is_of_others(format: Format) -> bool:
    """Whether a format is none of kbitcupy's own."""
    return type(format).__module__.partition(".")[0] != __name__.partition(".")[0]


def path_of(kind: Any) -> str:
    """Module and name of a class or function; the program that runs has one name in all its processes."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _has_path(kind: Any) -> bool:
    """Whether a class or function is found where it says that it is: no lambda, and nothing inside of a function."""
    found: Any = sys.modules.get(getattr(kind, "__module__", ""))
    for name in getattr(kind, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is kind


#: What a call of `quantize` may bring, beside a format's options.
GIVEN = ("scale", "zero_point", "offset", "codebook", "importance")

#: A format, and what calls of `quantize` bring beside it.
Choice = tuple[Format, Mapping[str, Any]]


class _Later(NamedTuple):
    """Stands in the registry for the factory of a format whose module has not been imported yet."""

    module: str


_registry: dict[str, Callable[..., Format] | _Later] = {}
# Formats whose options are all strings, numbers, None or tuples of those. An option may be any number, so not too many.
_made: dict[tuple[Any, ...], Format] = {}
_MOST_MADE = 4096
_lock = threading.Lock()


def register(name: str, factory: Callable[..., Format], *, replace: bool = False) -> None:
    """Add a format to the registry.

    Parameters
    ----------
    name : str
        Name for `quantize`, the command line and files.
    factory : callable
        Returns a `Format`; its keyword-only parameters are the format's options. A `Format` subclass will do.
    replace : bool, default False
        Allow `name` to be taken already.

    Raises
    ------
    FormatError
        When `name` is taken and `replace` is false.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.register("kbit4", kb.get_format)
    Traceback (most recent call last):
        ...
    kbitcupy.errors.FormatError: format 'kbit4' is registered already; pass replace=True to replace it
    """
    if not isinstance(name, str) or not name:
        raise FormatError(f"format name is {name!r}; it must be a non-empty string")
    if name != name.strip() or set(name) & set(MARKS):
        raise FormatError(
            f"format name is {name!r}; it must be free of {' '.join(MARKS)} and of space at its ends, which divide "
            "a name from options: use letters, digits, - and _"
        )
    if not callable(factory):
        raise FormatError(f"factory of format {name!r} is {type(factory).__name__}; it must be callable")
    awaited = _registry.get(name) == _Later(getattr(_unwrapped(factory), "__module__", ""))
    if not awaited:
        _loaded(name)
    with _lock:
        if name in _registry and not replace and not awaited:
            raise FormatError(f"format {name!r} is registered already; pass replace=True to replace it")
        _registry[name] = factory
        if not awaited:  # of which none has been made
            _made.clear()


def register_later(module: str, *names: str) -> None:
    """Give names their places in the registry; their module, which registers them, is imported when one is used."""
    _registry.update((name, _Later(module)) for name in names)


def _loaded(name: str) -> Callable[..., Format] | None:
    """The factory of exactly this name, whose module is imported for it; None where there is none."""
    found = _registry.get(name)
    if isinstance(found, _Later):
        import_module(found.module)
        found = _registry[name]
        assert not isinstance(found, _Later), f"{name} is not registered by its module"
    return found


def unregister(name: str) -> None:
    """Take a format out of the registry (for tests and plugins)."""
    _loaded(name)
    with _lock:
        _registry.pop(name, None)
        _made.clear()


def list_formats(*, default: bool | None = None) -> list[str]:
    """Names of the registered formats, in the order of their registration, then those of other packages.

    Parameters
    ----------
    default : bool, optional
        Only those that lists show to who has not asked for them (`Format.default`), or only the others. For this the
        packages of other formats are imported, for their names alone they are not.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.list_formats()[:3]
    ['kbit1', 'kbit2', 'kbit3']
    """
    names = list(dict.fromkeys((*_registry, *_offered())))
    return names if default is None else [name for name in names if _about(name, "default", True) == default]


@functools.cache
def _offered() -> tuple[str, ...]:
    """Names of the formats that installed packages offer; asked once, as it takes milliseconds."""
    from importlib.metadata import entry_points  # slow to import

    return tuple(entry.name for entry in entry_points(group=ENTRY_POINTS))


def _about(name: str, attribute: str, otherwise: Any) -> Any:
    """An attribute of a format's class; of what a function makes without options, where it is none."""
    maker = _maker(name)
    if hasattr(maker, attribute):
        return getattr(maker, attribute)
    try:
        return getattr(get_format(name), attribute)
    except (ValueError, TypeError):  # a function that needs an option
        return otherwise


def samples(name: str) -> list[Format]:
    """A registered format with the sets of options that its `Format.samples` names; empty where it names none."""
    made = []
    sets: tuple[dict[str, Any], ...] = getattr(_maker(name), "samples", lambda: ({},))()
    for options in sets:
        try:
            made.append(get_format(name, **options))
        except (ValueError, TypeError):  # it needs an option, and says nothing of it
            continue
    return made


def get_format(name: str, /, **options: Any) -> Format:
    """A format by name, with its options chosen.

    Parameters
    ----------
    name : str
        A registered name in any case, with options of its own where it has some: ``"int4:block=32"``, see
        `parse_format`. An unknown name is looked up once among the installed entry points of the group
        ``kbitcupy.formats``.
    **options
        The format's options, beside those in `name`.

    Returns
    -------
    Format
        Its ``str`` is the shortest text for it, and its ``repr`` evaluates to an equal format.

    Raises
    ------
    FormatError
        When the name or an option is unknown, an option's value is not allowed, or `name` and `options` contradict
        each other.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.get_format("kbit4", absmax="float32")
    get_format('kbit4:absmax=float32')
    >>> kb.get_format("NF4:block=32,double_quant=true") == kb.get_format("nf4", block=32, double_quant=True)
    True
    """
    key = _key(name, options)
    try:
        found = _made.get(key)
    except TypeError:  # an option that does not hash, such as an array
        key, found = (), None
    if found is not None:
        return found
    plain, own = parse_format(name) if isinstance(name, str) else (name, {})
    registered, factory = _factory(plain)
    known = option_names(factory)
    chosen: dict[str, Any] = {}
    for option, value in (*own.items(), *options.items()):
        exact = _option(option, factory)
        if exact is None:
            offered = ", ".join(known) or "no options"
            takes = getattr(_unwrapped(factory), "takes", ())
            later = f"; {option} goes with each call of quantize" if option in takes else ""
            raise FormatError(f"format {registered!r} has no option {option!r}; it takes: {offered}{later}")
        if exact in chosen and not equal(chosen[exact], value):
            raise FormatError(
                f"format {registered!r} is given {exact}={chosen[exact]!r} and {exact}={value!r}: leave one away"
            )
        chosen[exact] = value
    made = factory(**chosen)
    if key and all(map(_is_plain, options.values())):
        _keep(key, made)
    return made


def resolve(format: Any, /, given: Mapping[str, Any] | None = None, **options: Any) -> tuple[Format, dict[str, Any]]:
    """What `quantize` is called with: a format, and what the call brings beside it.

    Parameters
    ----------
    format : str, Format or tuple of one of them and a dict
        A name or text as for `get_format`, in which what the call brings may stand too (``"int8:scale=0.1"``); or a
        Format; or one of them and more of `given`.
    given : mapping, optional
        Values by the names in `GIVEN`; None counts as nothing.
    **options
        Options of the format, where it is a name; what of them the call brings goes over to `given`.

    Returns
    -------
    format : Format
    given : dict

    Raises
    ------
    FormatError
        As `get_format`, and when the format takes nothing of that name.

    Examples
    --------
    >>> from kbitcupy.formats.base import resolve
    >>> resolve("int8:scale=0.5,granularity=token")
    (get_format('int8:granularity=token'), {'scale': 0.5})
    >>> resolve("kbit2", codebook=[-1, 0, 0.5, 1])
    (get_format('kbit2:codebook=custom'), {'codebook': [-1, 0, 0.5, 1]})
    """
    if given is None and isinstance(format, str):
        try:
            made = _made.get(_key(format, options))
        except TypeError:  # an option that does not hash, such as an array
            made = None
        if made is not None:
            return made, {}
    if isinstance(format, tuple) and len(format) == 2 and isinstance(format[1], Mapping):
        format, more = format
    else:
        more = {}
    brought = {name: value for name, value in (*more.items(), *(given or {}).items()) if value is not None}
    if not isinstance(format, Format):
        text = format
        format, brought = _split(format, brought, options)
        if not brought and isinstance(text, str) and not options:
            _keep((text,), format)
    elif options or isinstance(brought.get("codebook"), str):
        names = ", ".join((*options, *(("codebook",) if isinstance(brought.get("codebook"), str) else ())))
        raise FormatError(f"options ({names}) go with a format's name, not with a Format")
    for name in brought:
        if name not in format.takes:
            takes = f"{', '.join(format.takes)}" if format.takes else "nothing"
            raise FormatError(f"{name} is given, but {format} takes no {name}: beside its options it takes {takes}")
    if brought:
        format.check_given(brought)
    if "codebook" in brought and format.options().get("codebook", "custom") != "custom":
        raise FormatError(
            f"codebook is given, but {format!r} has one of its own: pass get_format({format.name!r}, "
            "codebook='custom'), or the name alone"
        )
    return format, brought


def _split(format: Any, given: dict[str, Any], options: Mapping[str, Any]) -> tuple[Format, dict[str, Any]]:
    """A format by name, with what stands in its text and its options sorted."""
    name, own = parse_format(format) if isinstance(format, str) else (format, {})
    registered, factory = _factory(name)
    chosen: dict[str, Any] = {}
    brought: dict[str, Any] = {}
    for word, value in (*own.items(), *options.items(), *given.items()):
        option = _option(word, factory)
        found = other_case(word, GIVEN) if option is None else option
        numbers = found == "codebook" and not isinstance(value, str)
        to, key = (chosen, word) if option is not None and not numbers else (brought, found)
        if key is None or (key not in GIVEN and to is brought):  # get_format says what there is
            to, key = chosen, word
        if key in to and not equal(to[key], value):
            raise FormatError(f"format {registered!r} is given {key}={to[key]!r} and {key}={value!r}: leave one away")
        to[key] = value
    if "codebook" in brought and _option("codebook", factory) is not None:
        known = next((value for key, value in chosen.items() if _option(key, factory) == "codebook"), "custom")
        if known != "custom":
            own_values = brought["codebook"]
            raise FormatError(
                f"format {registered!r} is given codebook={known!r} and codebook={own_values!r}: leave one away"
            )
        chosen["codebook"] = "custom"
    for word, (to, value) in getattr(_unwrapped(factory), "implied", {}).items():
        if word in brought and all(_option(word, factory) != to for word in chosen):
            chosen[to] = value
    return get_format(registered, **chosen), brought


def _key(name: Any, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of `_made`. 1, 1.0 and True are equal, but not all allowed."""
    return (name, *options.items(), *map(_types, options.values())) if options else (name,)


def _keep(key: tuple[Any, ...], made: Format) -> None:
    if len(_made) == _MOST_MADE:
        _made.clear()
    _made[key] = made


def _types(value: Any) -> Any:
    return tuple(map(type, value)) if type(value) is tuple else type(value)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(isinstance(part, (str, int)) for part in value)
    return isinstance(value, (str, int, float, type(None)))


def _unwrapped(factory: Any) -> Any:
    """The class or function behind a factory."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory


def _option(option: str, factory: Callable[..., Format]) -> str | None:
    """The option of a factory that is meant, in another case or by the name that an earlier version had for it."""
    known = option_names(factory)
    exact = option if option in known else other_case(option, known)
    renamed: Mapping[str, str] = getattr(_unwrapped(factory), "renamed", {})
    return renamed.get(option.lower()) if exact is None else exact


def format_factory(name: str) -> Callable[..., Format]:
    """The factory of a registered name.

    Raises
    ------
    FormatError
        When the name is unknown.
    """
    return _factory(name)[1]


@functools.cache
def option_names(factory: Callable[..., Format]) -> list[str]:
    """The keyword-only parameters of a factory."""
    parameters = inspect.signature(factory).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _factory(name: Any) -> tuple[str, Callable[..., Format]]:
    """The name as it is registered, and its factory."""
    if isinstance(name, str):
        found = name if name in _registry else other_case(name, list(_registry))
        factory = None if found is None else _loaded(found)
        if found is not None and factory is not None:
            return found, factory
        from importlib.metadata import entry_points  # slow to import, seldom needed

        for wanted in dict.fromkeys((name, name.lower())):
            for entry in entry_points(group=ENTRY_POINTS, name=wanted):
                offered = entry.load()
                with _lock:
                    _registry.setdefault(wanted, offered)
                return _factory(wanted)
    near = guesses(str(name), _registry) if isinstance(name, (str, int)) else []
    meant = " or ".join(filter(None, (", ".join(near[:-1]), *near[-1:])))
    shown = repr(name) if isinstance(name, (str, int)) else type(name).__name__
    hint = f"did you mean {meant}? Registered" if near else "registered"
    raise FormatError(f"format is {shown}; {hint} are {', '.join(_registry)}")


_templates: list[Callable[[], Iterable[Template]]] = []


def register_templates(*templates: Template | Callable[[], Iterable[Template]]) -> None:
    """Add kernels that belong to no format, such as those of a product, to what `kernel_templates` yields.

    A function is called for them when they are asked for.
    """
    _templates.extend(t if callable(t) else functools.partial(iter, (t,)) for t in templates)


def all_fragments() -> Iterator[Fragments]:
    """Every way in which the product kernels decode a registered format, each once."""
    yield from dict.fromkeys(itertools.chain(*(_of_family(name, "all_fragments") for name in list_formats())))


def all_records() -> Iterator[Records]:
    """The same of the product kernel that streams records."""
    yield from dict.fromkeys(itertools.chain(*(_of_family(name, "all_records") for name in list_formats())))


def kernel_templates() -> Iterator[Template]:
    """The kernel templates of all registered formats, then those of `register_templates`, each once.

    Those of a format stand in the attribute `kernels` of its factory, or of what the factory makes without options.
    """
    seen: set[Template] = set()
    families = (_of_family(name, "kernels") for name in list_formats())
    for template in itertools.chain(*families, *(make() for make in _templates)):
        if template not in seen:
            seen.add(template)
            yield template


def _of_family(name: str, attribute: str) -> tuple[Any, ...]:
    """What the class of a registered format says in an attribute."""
    maker = _maker(name)
    if hasattr(maker, attribute):  # a class says it without an instance, for which options may be needed
        return tuple(getattr(maker, attribute))
    try:
        return tuple(getattr(get_format(name), attribute))
    except (ValueError, TypeError):  # a function that needs an option, and does not say
        return ()


def _maker(name: str) -> Any:
    """The class or function that makes a registered format."""
    return _unwrapped(_factory(name)[1])
