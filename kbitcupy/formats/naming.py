"""Formats as text: ``name:key=value,key=value``, and lists of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..errors import FormatError


def parse_format(text: str, /) -> tuple[str, dict[str, Any]]:
    """Take the text of a format apart, without asking whether there is such a format.

    Parameters
    ----------
    text : str
        ``name:key=value,key=value``, ``name[key=value,key=value]`` or ``name``. A value is JSON where it can be
        (``32``, ``0.5``, ``[1,2]``, ``"text"``), ``true``, ``false`` or ``null`` in any case, a list in brackets, else
        text.

    Returns
    -------
    name : str
        As it was written.
    options : dict of str to object
        The values, by the keys as they were written.

    Raises
    ------
    TypeError
        When `text` is not a string.
    FormatError
        When it is not written like this, or holds an option twice.

    Examples
    --------
    >>> from kbitcupy.formats.naming import parse_format
    >>> parse_format("nf4:block=32,double_quant=True")
    ('nf4', {'block': 32, 'double_quant': True})
    >>> parse_format("int8[granularity=channel:0]")
    ('int8', {'granularity': 'channel:0'})
    """
    if not isinstance(text, str):
        raise TypeError(f"a format is given as {type(text).__name__}; parse_format takes text, such as 'nf4:block=32'")
    if len(text) > _LONGEST:
        raise FormatError(f"format is a text of {len(text)} characters; at most {_LONGEST} are read")
    text = text.strip()
    found = re.search(r"[:\[]", text)
    name, mark, inside = (text[: found.start()].rstrip(), found[0], text[found.end() :]) if found else (text, "", "")
    if set(name) & set(MARKS):
        raise FormatError(f"format is {text!r}; options stand behind a colon, such as nf4:block=32,double_quant=true")
    if not mark:
        return name, {}
    if mark == "[":
        if not inside.endswith("]"):
            raise FormatError(f"format is {text!r}; the bracket of its options is not closed: write nf4:block=32")
        inside = inside[:-1].strip()
        if not inside:
            return name, {}
    options: dict[str, Any] = {}
    for piece in _pieces(inside):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not key or not equals:
            raise FormatError(f"format is {text!r}; {piece!r} in it is not KEY=VALUE, such as block=32")
        if other_case(key, options) is not None:
            raise FormatError(f"format is {text!r}; it holds the option {key!r} twice")
        options[key] = _value(value)
    return name, options


def split_formats(text: str, /) -> list[str]:
    """The formats of a comma-separated list, each of them a text for `get_format`.

    Parameters
    ----------
    text : str
        A piece with ``=`` and no ``:`` or ``[`` before it is one more option of the format ahead of it.

    Returns
    -------
    list of str

    Raises
    ------
    TypeError
        When `text` is not a string.
    FormatError
        When nothing stands between two commas.

    Examples
    --------
    >>> from kbitcupy.formats.naming import split_formats
    >>> split_formats("kbit4,nf4:block=32,double_quant=true,int8[granularity=token]")
    ['kbit4', 'nf4:block=32,double_quant=true', 'int8[granularity=token]']
    """
    if not isinstance(text, str):
        raise TypeError(f"formats are given as {type(text).__name__}; split_formats takes text, such as 'kbit4,nf4'")
    found: list[str] = []
    for piece in _pieces(text):
        if not piece:
            raise FormatError(f"formats are {text!r}; each must be a name, such as kbit4,nf4:block=32")
        more = re.match(r"[^:\[]*=", piece) and found
        if more:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


#: What divides names from options and options from each other.
MARKS = ":[],="
# Texts come from files, too; one of 256 numbers has a tenth of this.
_LONGEST = 1 << 16
_LITERALS = {"true": True, "false": False, "null": None}


def _pieces(text: str) -> list[str]:
    """The stripped parts between commas; brackets and quotes are left alone."""
    parts, depth, quoted, escaped = [""], 0, False, False
    for c in text:
        if quoted:
            quoted, escaped = c != '"' or escaped, c == "\\" and not escaped
        else:
            quoted = c == '"'
            depth += (c in "[{") - (c in "]}")
        if c == "," and depth <= 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def _value(text: str) -> Any:
    """An option's value, from its text."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    import json

    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if text.startswith("[") and text.endswith("]") and text.count("[") == 1:
        return [_value(part) for part in _pieces(text[1:-1])]
    return text


def value_text(value: Any) -> str:
    """The text that `_value` reads as `value`."""
    if isinstance(value, str) and value == value.strip() and not set(value) & set(',[]{}"') and _value(value) == value:
        return value
    import json

    return json.dumps(value, separators=(",", ":"), default=str)


def equal(a: Any, b: Any) -> bool:
    """Whether an option that is given twice has one value."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except (ValueError, TypeError):  # arrays
        return False


def other_case(word: str, words: Iterable[str]) -> str | None:
    """The first of `words` that is `word` but for upper and lower case."""
    return next((each for each in words if each.lower() == word.lower()), None)


# Likeness of two names that may be one, misspelled; difflib's own choice.
_ALIKE = 0.6


def guesses(name: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that somebody may have meant; numbers in the name have to be the first in theirs."""
    import difflib

    plain = re.sub(r"[\s_-]", "", name.lower())
    number = re.findall(r"\d+", plain)
    same = [each for each in names if re.findall(r"\d+", each)[: len(number)] == number]
    likeness = {each: difflib.SequenceMatcher(None, each, plain).ratio() for each in same}
    nearest = [each for each in same if likeness[each] == max(likeness.values()) >= _ALIKE]
    return nearest or (same if number else [])
