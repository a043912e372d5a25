"""The tensors that autograd saves within one forward: dropped, and given back from a recomputation.

    F    autograd --saves--> an empty slot; a sample of the tensor stays
    R    fills all slots that autograd still holds, and compares samples
    B    autograd --asks---> a slot, which gives its tensor away

The first slot that a backward asks brings about one R, the others find themselves filled. Another backward computes
anew, and so does one that asks a slot twice.

R ends with the last tensor that F saved: what a block computes after that, often its largest product, no gradient
needs. If samples differ it goes on to its end, where its outputs tell whether anything is wrong: some kernels save
memory that they have not written.

A tensor that R writes after it was saved is no longer what the gradient needs: its version tells, as in autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from pipeline.common.errors import CheckpointError
from pipeline.common.torch_modes import as_it_is, eagerly
from pipeline.data.pytrees import versions
from pipeline.recompute.fingerprints import EntrySample, sample

T = TypeVar("T")
_NO_TASK = -1  # autograd's number of the running backward, if there is none
_hooks = torch._C._autograd


class _SavedSlot:
    """The place of a saved tensor in autograd's graph."""

    __slots__ = ("tensor", "version", "__weakref__")

    tensor: Tensor | None
    version: tuple[int, ...]  # of the tensor, when R saved it


class _AllSlotsFilled(BaseException):
    """All slots are filled. No code of the user's takes it for an error of its own."""


class RecomputeResult(NamedTuple):
    """The result of R that went on to its end.

    Attributes:
        result: what it returned.
        matches: whether it saved as many tensors as F, of the same shapes and dtypes.
    """

    result: Any
    matches: bool


class SavedTensors:
    """The tensors that autograd saves in F, which runs within this context.

    Args:
        recompute: runs R, in `filled`.
        known: the addresses of tensors that R is known to find as F did.
    """

    __slots__ = ("_recompute", "_known_addresses", "_slots", "_samples", "_task", "is_over")

    def __init__(self, recompute: Callable[[SavedTensors], None], known_addresses: frozenset[int]) -> None:
        self._recompute = recompute
        self._known_addresses = known_addresses
        self._slots: list[ref[_SavedSlot]] = []
        self._samples: list[EntrySample] = []
        self._task = _NO_TASK
        self.is_over = False  # F; before, a layer that calls autograd asks for what has been saved so far

    def __enter__(self) -> None:
        _hooks._push_saved_tensors_default_hooks(self._drop, self._give)

    def __exit__(self, *_: object) -> None:
        _hooks._pop_saved_tensors_default_hooks()
        self.is_over = True

    def _drop(self, tensor: Tensor) -> _SavedSlot:
        slot = _SavedSlot()
        slot.tensor = None
        self._slots.append(ref(slot))
        self._samples.append(sample(tensor, self._known_addresses))
        return slot

    def _give(self, slot: _SavedSlot) -> Tensor:
        task = torch._C._current_graph_task_id()
        if slot.tensor is None or task != self._task or task == _NO_TASK:
            eagerly(_refill, self)
            self._task = task
        tensor, slot.tensor = slot.tensor, None
        assert tensor is not None  # R has filled it
        if versions([tensor]) != slot.version:  # autograd itself does not compare what hooks give
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} that is needed for the gradient of a checkpointed block has "
                "been modified by an inplace operation after autograd saved it. Without a checkpoint autograd refuses "
                "this too: let the block write a copy (p = p * 2 instead of p.mul_(2), inplace=False)."
            )
        return tensor

    def filled(self, compute: Callable[[], Any], whole: bool) -> RecomputeResult | None:
        """R: call `compute`, and fill the slots with what autograd saves meanwhile. None: it ended with the last one.

        Args:
            compute: the forward.
            whole: go on to its end in any case.
        """
        slots, samples, known_addresses, needed = self._slots, self._samples, self._known_addresses, len(self._slots)
        count = 0
        matches, is_full = True, False

        def keep(tensor: Tensor) -> Tensor:
            nonlocal count, whole, matches, is_full
            saved = tensor.detach() if tensor.requires_grad else tensor
            if count < needed:
                expected, observed = samples[count], sample(tensor, known_addresses)
                if expected != observed:
                    whole = True
                    matches = matches and expected[:2] == observed[:2]
                slot = slots[count]()
                if slot is not None:
                    slot.tensor, slot.version = saved, versions([saved])
            count += 1
            if count == needed and not whole:
                is_full = True
                raise _AllSlotsFilled
            return saved

        _hooks._push_saved_tensors_default_hooks(keep, as_it_is)
        try:
            result = compute()
        except (_AllSlotsFilled, Exception):  # torch.jit makes another exception of it
            if not is_full:
                raise
        finally:
            _hooks._pop_saved_tensors_default_hooks()
        if is_full:
            return None
        return RecomputeResult(result, matches and (count == needed or not self.is_over))


def _refill(saved: SavedTensors) -> None:
    saved._recompute(saved)
