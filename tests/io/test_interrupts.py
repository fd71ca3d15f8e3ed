"""Ctrl-C at any line of what makes temporary files and folders leaves none of them."""

import os
import sys

import pytest

from kbitcupy.io import atomic


def file(folder):
    return atomic.replacing(folder / "out", 8, False)


def again(folder):
    (folder / "out").write_bytes(b"before")
    return atomic.replacing(folder / "out", 8, True)


def shards(folder):
    return atomic.filling(folder / "out", {"a": 1})


def shards_to_resume(folder):
    return atomic.filling(folder / "out", {"a": 1}, resume=True)


class Interrupt:
    """Ctrl-C before line number `left` of `atomic` that is run."""

    def __init__(self, left):
        self.left, self.came = left, False

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename != atomic.__file__:
            return None
        if event == "line":
            if not self.left:
                self.came = True
                sys.settrace(None)
                raise KeyboardInterrupt
            self.left -= 1
        return self


def interrupted(context, at):
    """Whether Ctrl-C before that line comes before the body, where it comes otherwise."""
    before, trace = sys.gettrace(), Interrupt(at)
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt), context:
            sys.settrace(before)
            raise KeyboardInterrupt
    finally:
        sys.settrace(before)
    return trace.came


# A file that was opened a moment before is closed when nobody has it any more, which is what is said of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("context", [file, again, shards, shards_to_resume], ids=lambda f: f.__name__)
def test_nothing_is_left(context, tmp_path):
    before, at = context is again, 0
    while True:
        folder = tmp_path / str(at)
        folder.mkdir()
        early = interrupted(context(folder), at)
        assert os.listdir(folder) == ["out"] * before, at
        if not early:
            break
        at += 1
    assert at > 20
