"""A call whose joined output is attached to autograd's graph: what its backwards, and those of them, have in common.

    output     [rows of chunk 0 | rows of chunk 1 | ...]     its gradients are cut as it was joined
    leaves     the tensors of the input that need a gradient, then the parameters of this process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from partition.process_lock import LockHold
from partition.rows import row_dim
from pipeline.common.accelerators import beside, current_streams, use_here
from pipeline.common.call_lock import turn
from pipeline.common.errors import CheckpointError
from pipeline.common.graph import marked_under_way
from pipeline.data.microbatch import joined_grads
from pipeline.data.pytrees import Grads, versions
from pipeline.execution.call import Call
from pipeline.execution.communicator import Communicator
from pipeline.stage.hooks import skip_none
from scheduler.collecting import no_collecting


class AttachedCall(NamedTuple):
    """A call that has run forward, and its output in autograd's graph.

    Attributes:
        call: the call.
        hold: its hold of the call lock.
        sizes: for each tensor of the output the number of rows from each chunk. Empty on ranks that did not compute it.
        is_everywhere: whether all ranks have the output; else the last one, and the others a number in its place.
        input_indices: the indices of the input's tensors that need a gradient.
        owners: the parameters, and other leaves, that have one in this process.
        input_versions: of all tensors of the input at the forward.
        streams: those of the forward, on which autograd goes back, too.
    """

    call: Call
    hold: LockHold
    sizes: Sequence[tuple[int, ...]]
    is_everywhere: bool
    input_indices: Sequence[int]
    owners: Sequence[Tensor]
    input_versions: tuple[int, ...]
    streams: Sequence[torch.Stream]

    @property
    def leaves(self) -> list[Tensor]:
        """All that has a gradient here: tensors of the input, then owners."""
        return [*[self.call.batch.tree.tensors[index] for index in self.input_indices], *self.owners]

    @property
    def needs_leaf(self) -> bool:
        """Whether an empty leaf stands for owners: those of other ranks, with which this one goes back, or for none."""
        return not (self.owners or self.input_indices and self.call.communicator.is_alone)

    @contextmanager
    def going_back(self, again: Callable[[], Communicator]) -> Iterator[Communicator]:
        """Within: a backward of this call. `again`: gives its communicator."""
        with no_collecting(), turn(self.hold), beside(self.streams), again() as communicator:
            self.call.execution.go_on_with(communicator)
            yield communicator

    def handed_on(self, grads: Sequence[Tensor | None]) -> None:
        """Prepare gradients for autograd, in whose streams and hooks they are used.

        Args:
            grads: those of the leaves, and others behind them.
        """
        if self.streams != current_streams(self.call.execution.devices):
            use_here(grads)
        skip_none([leaf for leaf, grad in zip(self.leaves, grads, strict=False) if grad is None])

    def check_input(self) -> None:
        """Raise if the input was written since the forward.

        Raises:
            CheckpointError: it was.
        """
        if versions(self.call.batch.tree.tensors) != self.input_versions:
            raise CheckpointError(
                "the input of the pipe was changed in place between the forward and the recomputation that "
                "create_graph=True needs. Change it after the backward, or give the pipe a clone."
            )

    def refuse_stray(self) -> None:
        """Raise if the backward under way reaches a stage past the output too: that part of a gradient would be lost.

        Raises:
            RuntimeError: it does.
        """
        leaves = marked_under_way()
        for stage in self.call.stages if leaves else ():
            stage.refuse_stray(leaves)

    def parts(self, grads: Grads) -> list[Grads]:
        """The gradients of each chunk's outputs. None of any chunk where the last stage is not here."""
        if not self.call.execution.has_last:
            return []
        chunks = self.call.batch.chunks
        columns = [
            (None,) * chunks if grad is None else self._cut(grad, sizes)
            for grad, sizes in zip(grads, self.sizes, strict=True)
        ]
        return [tuple(column[chunk] for column in columns) for chunk in range(chunks)]

    def join(self, parts: Sequence[Grads], grads: Grads) -> Grads:
        """From tensors for each chunk's outputs to those of the whole; None counts as zeros.

        Args:
            parts: by chunk.
            grads: of the whole output. Where one is None, so is what is joined.
        """
        batch_dim = self.call.batch.batch_dim
        return tuple([
            None if grad is None else joined_grads(column, self._cut(grad, sizes), batch_dim)
            for grad, sizes, column in zip(grads, self.sizes, zip(*parts, strict=True), strict=True)
        ])

    def _cut(self, grad: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return (grad,) if len(sizes) == 1 else torch.split(grad, list(sizes), row_dim(grad, self.call.batch.batch_dim))
