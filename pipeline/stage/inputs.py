"""The cut before a stage: where the graph of a chunk ends, and whether the stage writes what it reads.

    value that was read --[copy, if the stage writes it]--> Entry --> layers
    entry leaf, one number ----------------------------------^        gradients arrive here, at the Entry

Whether a stage writes its input shows only afterwards: by version counters, and by value where it writes through
`.data`. So chunk 0 computes on a copy of its input in calls without gradients, in validating calls (1, 2, 4, 8, ...),
and where training flags or shapes are new. A stage that writes gets a copy of every chunk; one that begins to write at
a later chunk is an error. A recomputation gets a copy where the forward did: numbers depend on where memory begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.common.errors import CheckpointError
from pipeline.common.graph import StrayGradientGuard, enter, mark
from pipeline.data.pytrees import Bundle, Grads, copied, parts_of, same_values, versions
from pipeline.recompute.snapshot import StageTraits


class StageInputs(NamedTuple):
    """The cut before a stage: a leaf for each input (None: it needs no gradient), and the gradients that arrive."""

    leaves: tuple[Tensor | None, ...]  # one tensor for all chunks: no graph is followed behind its own entry
    arrived: list[Tensor | None]  # one for each leaf
    sizes: Sequence[int]  # the number of inputs of each value that was read
    entry: Any  # the node of the graph there. None: no input needs a gradient

    @property
    def grad_leaves(self) -> list[Tensor]:
        """The leaves that there are."""
        return [leaf for leaf in self.leaves if leaf is not None]

    def grads(self) -> list[Grads]:
        """Take out the gradients that arrived, for each value that was read."""
        arrived = iter(self.arrived.copy())
        self.arrived[:] = [None] * len(self.arrived)
        grads = tuple([None if leaf is None else next(arrived, None) for leaf in self.leaves])
        return list(map(tuple, parts_of(grads, self.sizes)))


class InputCut:
    """Cuts the graph before one stage in one call.

    Args:
        stage: how errors name the stage.
        key: of its traits: its index and training flags.
        traits: those that earlier calls have observed.
        validates: whether to observe anew whether the stage writes its input.
        is_of_caller: whether what it reads is the caller's own, and no later check finds a write to it.

    Attributes:
        guard: what the stage's own backward opens.
        writes: whether the stage writes its input. True until the first chunk, in this call or an earlier one, shows
            that it does not.
    """

    def __init__(
        self, stage: str, key: tuple[int, tuple[bool, ...]], traits: StageTraits, validates: bool, is_of_caller: bool
    ) -> None:
        self.guard = StrayGradientGuard(stage)
        self.writes = True
        self._stage = stage
        self._leaf_description = f"the input of {stage}"
        self._key = key
        self._traits = traits
        self._validates = validates
        self._is_of_caller = is_of_caller
        self._is_first = True  # no chunk has run yet
        self._first_is_copied = True
        self._leaves: dict[torch.device, Tensor] = {}

    def __contains__(self, leaf: int) -> bool:
        return leaf in map(id, self._leaves.values())

    def begin(self, read: Bundle) -> None:
        """Begin a forward: the first chunk is copied unless it is known that the stage only reads."""
        if self._is_first:
            self.writes = self._validates or self._read_key(read) not in self._traits.only_reads
            self._first_is_copied = self.writes

    def layer_inputs(self, chunk: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors on which layers compute a chunk: these, or copies."""
        if self.writes or self._is_of_caller or chunk == 0 and self._first_is_copied:
            return tuple([copied(tensor) for tensor in tensors])
        return tensors

    def enter(
        self, chunk: int, read: Bundle, needs_grad: Sequence[bool]
    ) -> tuple[StageInputs, tuple[Tensor, ...]]:
        """Cut: the leaves of this chunk, and the tensors that the layers get."""
        tensors = self.layer_inputs(chunk, read.tensors)
        sizes = [len(tree.tensors) for tree in read.trees]
        if True not in needs_grad:
            return StageInputs((None,) * len(tensors), [], sizes, None), tuple([tensor.detach() for tensor in tensors])
        leaves = tuple([self._leaf(tensor) if needs else None for tensor, needs in zip(tensors, needs_grad)])
        wanted = [leaf for leaf in leaves if leaf is not None]
        arrived: list[Tensor | None] = [None] * len(wanted)
        entered = enter(self.guard, arrived, [tensor for tensor, needs in zip(tensors, needs_grad) if needs], wanted)
        attached = iter(entered)
        layer_inputs = tuple([
            next(attached) if needs else tensor.detach() for tensor, needs in zip(tensors, needs_grad)
        ])
        return StageInputs(leaves, arrived, sizes, entered[0].grad_fn), layer_inputs

    def _leaf(self, tensor: Tensor) -> Tensor:
        """The leaf at which graphs end at an input on this device: one number, which keeps nothing alive."""
        device = tensor.device
        if device not in self._leaves:
            self._leaves[device] = mark(torch.empty((), device=device, requires_grad=True), self._leaf_description)
        return self._leaves[device]

    def end(self, read: Bundle, versions_before: tuple[int, ...], layer_inputs: Sequence[Tensor]) -> None:
        """End a forward: the first one on a copy shows whether the stage writes its input.

        Args:
            read: what was read.
            versions_before: the versions of its tensors when the forward began.
            layer_inputs: what the layers got.

        Raises:
            CheckpointError: the stage wrote its input, and had not done so before.
        """
        if self._is_first and self.writes:
            self._observe(read, layer_inputs)
        elif versions(read.tensors) != versions_before:
            self._traits.only_reads.discard(self._read_key(read))  # the next call copies
            changed = " The x of this call was changed: make it anew." if self._key[0] == 0 else ""
            raise CheckpointError(
                f"{self._stage} wrote its input in place, which it did not do before: for the first chunk, or in "
                "earlier calls. Write it for every chunk or for none (for example x = x + 1 instead of x += 1). If it "
                "does so from now on, as after relu.inplace = True, make this call once more." + changed
            )
        self._is_first = False

    def _observe(self, read: Bundle, layer_inputs: Sequence[Tensor]) -> None:
        index, traits = self._key[0], self._traits
        if self._validates and _differ(layer_inputs, read.tensors):
            traits.writes_unseen.add(index)
        self.writes = index in traits.writes_unseen or any(versions(layer_inputs))  # a copy begins at version 0
        if not self.writes:
            traits.only_reads.add(self._read_key(read))

    def _read_key(self, read: Bundle) -> tuple[object, ...]:
        """The key of that trait. It has shapes: a stage may pad odd lengths and write the copy, and else its input."""
        return *self._key, *[tensor.shape[1:] for tensor in read.tensors]


def _differ(layer_inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Compare by value: writes may bypass version counters (inference mode, `.data`). Not on a GPU, which waits.

    Nothing reads a tensor whose memory a layer has freed, to compute its input again from its output in the backward.
    """
    pairs = [pair for pair in zip(layer_inputs, tensors, strict=True) if pair[0].device.type == "cpu"]
    return any([_is_freed(layer_input) or not same_values(layer_input, tensor) for layer_input, tensor in pairs])


def _is_freed(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
