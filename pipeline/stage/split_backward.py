"""The backwards of one stage in two halves, I and W (partition/halves.py), and what waits between them.

    I of a chunk --gradients that wait, in the order of the chunks--> W: into the stage's sums
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from partition.halves import LateGrads, Site, add_late_gradients, waiting
from pipeline.common.graph import run_backward


class SplitBackward:
    """The backwards of one stage that run in two halves, during one call.

    Args:
        stage: how errors name the stage.
        chunks: those whose backward is I and W.
    """

    def __init__(self, stage: str, chunks: Collection[int]) -> None:
        self._stage = stage
        self._chunks = chunks
        self._waiting: dict[int, list[LateGrads]] = {}

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def waits(self, chunk: int) -> bool:
        """Whether gradients of a chunk are left to W."""
        return chunk in self._waiting

    @contextmanager
    def first_half(self, chunk: int, sites: Sequence[Site], retain: bool) -> Iterator[None]:
        """Within: I of a chunk runs. The gradients that it leaves wait for W.

        Args:
            sites: uses of weights whose gradients can wait.
            retain: another backward of this chunk may come.
        """
        late = {id(weight) for site in sites for weight in site.weights}
        waited = {id(weight) for parts in self._waiting.values() for part in parts for weight in part.site.weights}
        if not waited <= late:
            for earlier in sorted(self._waiting):  # sums ascend in chunks: earlier ones come first
                self.second_half(earlier, retain)
        with waiting(sites) as parts:
            yield
        if parts:
            self._waiting[chunk] = parts

    def second_half(self, chunk: int, retain: bool) -> None:
        """W of a chunk: add the gradients that waited to the sums."""
        add_late_gradients(self._waiting.pop(chunk), self._stage, partial(run_backward, retain=retain))

    def clear(self) -> None:
        """Drop the gradients that wait."""
        self._waiting.clear()
