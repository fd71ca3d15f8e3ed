"""A progress bar over all workers: bytes, tensors, speed, time left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class Progress:
    """What is done of some work, for a bar, told by any thread.

    Parameters
    ----------
    bar : tqdm, optional
        The bar.
    tensors : int, default 0
        How many tensors there are, if it shows them.
    """

    def __init__(self, bar: Any = None, tensors: int = 0):
        self._bar, self._tensors, self._done, self._lock = bar, tensors, 0, threading.Lock()

    def advance(self, nbytes: int) -> None:
        """So many more bytes are read and dealt with."""
        if self._bar is not None and nbytes:
            with self._lock:
                self._bar.update(nbytes)

    def finished(self, tensors: int) -> None:
        """So many more tensors are."""
        if self._bar is not None and self._tensors:
            with self._lock:
                self._done += tensors
                self._bar.set_postfix_str(f"{self._done} of {self._tensors} tensors", refresh=False)


@contextlib.contextmanager
def progress_bar(label: str, nbytes: int, show: bool, tensors: int = 0) -> Iterator[Progress]:
    """Yields what counts bytes up to `nbytes`, and tensors, on stderr where `show` says so."""
    if not show:
        yield Progress()
        return
    from tqdm.auto import tqdm  # most calls show no bar; a widget in a notebook, text elsewhere

    with tqdm(desc=label, total=nbytes, unit="B", unit_scale=True, leave=False) as bar:
        yield Progress(bar, tensors)
