"""The checkpoint policy: the activations that are kept from F to B, and those that are computed again.

    kept         F keeps what autograd saves; B goes through it
    recomputed   F runs as usual but saves nothing; B first runs the chunk again (R), then goes through that

Checkpointing is on iff gradients are (`torch.is_grad_enabled()`); `module.training` has no say. `except_last` reads the
order that will run: a chunk is recomputed iff another backward of the same device stands between its F and its B.
Where none does, its activations would be the only ones there are, so keeping them adds nothing to the peak.

The forward of a recomputed chunk runs with gradients on, under hooks that drop what autograd saves, and not under
`no_grad`: there some modules take other kernels, and which outputs require a gradient would be unknown. A layer that
calls autograd within its forward needs what was dropped, and torch.func does not run under such hooks at all. This
shows on the first chunk that meets it: its stage runs that chunk again, and all later ones, without hooks, and lets
their graphs go at the end of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pipeline.common.errors import DroppedError
from scheduler import Action, Kind
from scheduler.interruptions import interrupted

Policy: TypeAlias = str | Callable[[int, int], bool]
POLICIES = ("always", "except_last", "never")

NO_HOOKS = "don't yet support saved tensor hooks"  # part of torch.func's error where there are hooks
_DROPPED = (
    "a backward reached a tensor of a chunk that will be recomputed, and this forward keeps nothing for it. Either a "
    "tensor that a layer left on a module (an auxiliary loss) was used outside: return it as part of the output. Or a "
    "layer called autograd within its own forward, or keeps a tensor from one chunk or call for the next (a cached "
    "weight): call it for every chunk or for none, compute such tensors anew in each forward, or use "
    "checkpoint='never'."
)

_checkpointing: ContextVar[bool] = ContextVar("checkpointing", default=False)
_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether this forward's activations are dropped, since the chunk will be recomputed. For use inside modules.

    Example:
        >>> is_checkpointing()
        False
    """
    return _checkpointing.get()


def is_recomputing() -> bool:
    """Whether this forward repeats an earlier one (to count or log something once). For use inside modules.

    Example:
        >>> is_recomputing()
        False
    """
    return _recomputing.get()


def check_policy(policy: Policy) -> Policy:
    """The policy itself; a ValueError unless it is one of the modes or a callable."""
    is_function = callable(policy) and not isinstance(policy, type | nn.Module)
    if not is_function and not (isinstance(policy, str) and policy in POLICIES):
        raise ValueError(
            f"checkpoint is {policy!r}. Use 'always', 'except_last', 'never', or a callable (stage, chunk) -> bool."
        )
    return policy


def recomputed(policy: Policy, orders: Sequence[Sequence[Action]]) -> frozenset[tuple[int, int]]:
    """Return the (stage, chunk) pairs that are recomputed.

    Args:
        policy: a mode or a callable.
        orders: for each device, all its actions in the order that will run.
    """
    pairs = [(action.stage, action.chunk) for order in orders for action in order if action.kind is Kind.F]
    if callable(policy):
        return frozenset(pair for pair in pairs if _answer_of(policy, pair))
    if policy == "never":
        return frozenset()
    if policy == "always":
        return frozenset(pairs)
    return interrupted(orders)


def _answer_of(policy: Callable[[int, int], bool], pair: tuple[int, int]) -> bool:
    answer = policy(*pair)
    if not isinstance(answer, bool):
        raise ValueError(f"checkpoint returned {answer!r} for stage {pair[0]}, chunk {pair[1]}. Return True or False.")
    return answer


@contextmanager
def _set(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def checkpointing(whether: bool) -> AbstractContextManager[None]:
    """Within: `is_checkpointing()` returns `whether`."""
    return _set(_checkpointing, whether)


def repeating() -> AbstractContextManager[None]:
    """Within: `is_recomputing()` is True: what runs repeats a forward, and modules should not count it."""
    return _set(_recomputing, True)


@contextmanager
def recomputing() -> Iterator[None]:
    """R: within, the same forward runs again, with gradients on, though the backward may run in inference mode."""
    recording = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with repeating(), recording, torch.enable_grad():
        yield


class SavingNothing:
    """F of a chunk that will be recomputed: within, autograd builds its graph, and what it would save is dropped.

    Raises:
        DroppedError: a layer called autograd within its forward (torch.func too), and its saved tensors were dropped.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(_drop, _miss)  # as autograd.graph.saved_tensors_hooks does
        self._token = _checkpointing.set(True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _checkpointing.reset(self._token)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if isinstance(error, RuntimeError) and NO_HOOKS in str(error):
            raise DroppedError(_DROPPED) from error


def _drop(tensor: Tensor) -> None:
    return None


def _miss(dropped: None) -> Tensor:
    raise DroppedError(_DROPPED)
