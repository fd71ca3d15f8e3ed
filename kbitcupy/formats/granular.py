"""What formats have in common whose scales belong to a tensor, channel, row or group."""

from __future__ import annotations

import math
from typing import Any

from .base import Format
from .granularity import Granularity, blocks_of, stack_blocks


class Granular(Format):
    """A format with scales of any granularity, beside codes that lie in the order of the elements.

    A subclass sets `granularity` and `pitch`, and writes `with_granularity` and `why_not_whole`; its `options` begin
    with `granularity_option`.
    """

    #: The elements that share a scale.
    granularity: Granularity
    #: Elements whose codes are whole bytes, or whole blocks of them.
    pitch: int

    def with_granularity(self, granularity: Granularity) -> Granular:
        """The format with its other options under another granularity."""
        raise NotImplementedError

    def why_not_whole(self, shape: tuple[int, ...]) -> str:
        """Why rows of an array of `shape` are no multiples of `pitch`, for an error message."""
        raise NotImplementedError

    def granularity_option(self) -> Any:
        """The granularity as a JSON value."""
        return self.granularity if isinstance(self.granularity, str) else list(self.granularity)

    def spelled(self) -> dict[str, Any]:
        options = self.options()
        if isinstance(self.granularity, str):
            return options
        kind, number = self.granularity
        del options["granularity"]
        return {"block": number, **options} if kind == "group" else {"granularity": f"{kind}:{number}", **options}

    def scope_of(self, shape: tuple[int, ...]) -> str:
        """The scope of scales: rows along axis 0 own theirs, or all of them share some."""
        if self.granularity[0] == "channel":
            own = self.granularity[1] in (0, -len(shape))
        else:
            own = self.granularity != "tensor" and len(shape) > 1
        return "block" if own else "tensor"

    def keeps_blocks(self, shape: tuple[int, ...], new: tuple[int, ...], lead: int = 0, new_lead: int = 0) -> bool:
        if self.layout_of(shape, lead) != self.layout_of(new, new_lead):
            return False
        # Members whose codes end within a byte, or a block, do not lie as those of one array.
        whole = all(math.prod(of[first:]) % self.pitch == 0 for of, first in ((shape, lead), (new, new_lead)))
        return whole or math.prod(shape[:lead]) == math.prod(new[:new_lead])

    def layout_of(self, shape: tuple[int, ...], lead: int = 0) -> tuple[int, ...]:
        """Equal where elements share scales in the same way (`Blocks.layout`), of stacks as well."""
        blocks = stack_blocks(shape, self.granularity, lead)
        if blocks is not None:
            return blocks.layout
        return *blocks_of(shape[lead:], self.granularity).layout, math.prod(shape[:lead])

    def counted_from_end(self, ndim: int) -> Format:
        if self.granularity[0] != "channel" or int(self.granularity[1]) <= 0:
            return self  # the first axis of a member is told apart from that of the stack by the number of scales
        return self.with_granularity(("channel", int(self.granularity[1]) - ndim))

    def of_row(self, shape: tuple[int, ...]) -> Format:
        granularity = self.granularity
        if granularity == "token" and len(shape) == 1:
            return self.with_granularity("tensor")
        if granularity[0] != "channel":
            return self
        axis = int(granularity[1])
        if axis in (0, -len(shape)):
            return self.with_granularity("tensor")
        return self if axis < 0 else self.with_granularity(("channel", axis - 1))

    def rows_are_blocks(self, shape: tuple[int, ...]) -> bool:
        if not shape or (len(shape) == 1 and self.granularity[0] == "group"):
            return False
        return math.prod(shape[1:]) % self.pitch == 0

    def why_not_blocks(self, shape: tuple[int, ...]) -> str:
        if len(shape) == 1 and self.granularity[0] == "group":
            return f"rows of shape () are not whole blocks: those are groups of {self.granularity[1]} elements"
        return f"rows of shape {shape[1:]} are not whole blocks: {self.why_not_whole(shape)}"
