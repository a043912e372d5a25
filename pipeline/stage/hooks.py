"""Gradient hooks: those of a parameter run once per backward pass, on the whole gradient, as on the plain module.

    add_hooked    whole gradients go to their owners through autograd: `hooked`, then `accumulate`
    hooked        the tensor hooks alone, touching no `.grad`
    accumulate    the rest: `.grad`, post-accumulate hooks
    grads_kept    puts `.grad` back if code of the user fails within
    hooks_asleep  hooks do nothing while a part of a gradient passes
    skip_none     hooks are not called with None for an owner that this loss does not reach
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.common.graph import explore, finish_backward
from pipeline.common.interrupts import at_end_of_backward


class Deliver(torch.autograd.Function):
    """Deliver whole gradients to their owners through autograd, so that hooks act once and `.grad` is added to."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *owners: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.empty((), device=owners[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # pragma: no cover
        result = (None, *ctx.grads)
        ctx.grads.clear()  # without other references, a gradient becomes `.grad` without a copy
        return result


# Function.apply without its Python part, which looks at each owner.
_delivery: Callable[..., Tensor] = super(torch.autograd.Function, Deliver).apply


def add_hooked(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to their owners' `.grad` as one backward pass would. Empties `pairs`, which it owns."""
    if any(owner._backward_hooks for owner, _ in pairs):
        pairs[:] = hooked(pairs)  # first, and apart: a hook that raises must not leave half of the gradients behind
    accumulate(pairs)


def accumulate(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Add gradients, on which tensor hooks have acted, to their owners' `.grad`. Empties `pairs`.

    A failure leaves `.grad` as it was found; only a hook, which is the user's code, can fail. Gradients of each device
    have a root there: autograd takes a gradient for one of its root's current stream.
    """
    if not pairs:
        return
    owners = [owner for owner, _ in pairs]
    devices = dict.fromkeys([owner.device for owner in owners])
    groups = [[pair for pair in pairs if pair[0].device == device] for device in devices]
    pairs.clear()
    may_fail = not all([owner.is_leaf and not owner._post_accumulate_grad_hooks for owner in owners])
    with grads_kept(owners if may_fail else ()), torch.enable_grad(), hooks_asleep(owners):
        roots = [_delivery([grad for _, grad in group], *[owner for owner, _ in group]) for group in groups]
        groups.clear()
        finish_backward(roots)


@contextmanager
def grads_kept(owners: Iterable[Tensor]) -> Iterator[None]:
    """Within: a failure leaves `.grad` as it was found, of these and of the leaves that they were computed from."""
    leaves: dict[int, Tensor] = {}
    for owner in owners:
        if owner.is_leaf or owner.retains_grad:
            leaves[id(owner)] = owner
        if not owner.is_leaf:
            leaves.update(explore([owner]))
    previous = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves.values()]
    try:
        yield
    except BaseException:
        for leaf, grad, values in previous:
            if grad is not None and values is not None:
                with torch.no_grad():
                    grad.copy_(values)
            leaf.grad = grad
        raise


def has_hooks(owner: Tensor) -> bool:
    """Whether the user's hooks run when this tensor gets a gradient."""
    return bool(owner._backward_hooks or owner._post_accumulate_grad_hooks)


def hooked(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Apply the owners' tensor hooks to whole gradients, touching no `.grad`."""
    if not pairs:
        return []
    owners = [owner for owner, _ in pairs]
    ends = [owner if owner.is_leaf else _with_hooks_of(owner) for owner in owners]
    with torch.enable_grad():
        root = _delivery([grad for _, grad in pairs], *ends)
    try:
        return list(zip(owners, torch.autograd.grad(root, ends), strict=True))
    except RuntimeError as error:
        if "_will_engine_execute_node" in str(error):
            error.add_note("A step runs hooks as torch.autograd.grad does, which register_multi_grad_hook of several "
                           "parameters does not know. Use pipe(x) and loss.backward().")  # fmt: skip
        raise


def _with_hooks_of(computed: Tensor) -> Tensor:
    """A leaf with the hooks of a computed tensor, from which autograd would go on, to `.grad` and other leaves."""
    leaf = computed.detach().requires_grad_()
    leaf._backward_hooks = computed._backward_hooks
    return leaf


@contextmanager
def hooks_asleep(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Within: the leaves' tensor hooks do nothing. They act later, once, on the whole gradient."""
    with _asleep([leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]):
        yield


@contextmanager
def _asleep(tables: Sequence[Any]) -> Iterator[None]:
    """Within: the hooks of these tables do nothing, and can be removed."""
    previous = [(table, dict(table)) for table in tables]
    for table, hooks in previous:
        table.update(dict.fromkeys(hooks, _nothing))
    try:
        yield
    finally:
        for table, hooks in previous:
            _put_back(table, hooks)


def _nothing(_: Tensor) -> None:
    """A hook that leaves a gradient as it is."""


def _put_back(table: Any, hooks: dict[int, Any]) -> None:
    """Put hooks back into the table that had them, but for those that were removed meanwhile."""
    table.update({key: hook for key, hook in hooks.items() if key in table})


@contextmanager
def grads_apart(leaves: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Within: gradients come to the leaves' `.grad` as if there were none, all hooks asleep.

    At the end the list has these gradients, and `.grad` is as before.
    """
    parts: list[Tensor | None] = []
    previous = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        with hooks_asleep(leaves), _asleep([leaf._post_accumulate_grad_hooks or {} for leaf in leaves]):
            yield parts
    finally:
        for leaf, grad in previous:
            parts.append(leaf.grad)
            leaf.grad = grad


def skip_none(leaves: Sequence[Tensor]) -> None:
    """Until the backward under way ends, hooks of these tensors run only if another path brings them a gradient.

    A Function that returns None for a leaf would have autograd call the leaf's hooks with None.
    """
    for leaf in leaves:
        tables: list[tuple[Any, Any]] = [(leaf._backward_hooks, _unless_none)]
        if leaf.is_leaf:
            tables.append((leaf._post_accumulate_grad_hooks, partial(_unless_same, before=_state(leaf))))
        for table, guard in tables:
            hooks = {key: hook for key, hook in (table or {}).items() if not isinstance(hook, _Guard)}
            if hooks:
                at_end_of_backward(partial(_put_back, table, hooks))
                table.update({key: _Guard(guard, hook=hook) for key, hook in hooks.items()})


class _Guard(partial[Any]):
    """A guard in the place of a hook. It takes no other: two calls of a Pipe in one loss may both return None."""


def _unless_none(grad: Tensor | None, hook: Any) -> Any:
    return None if grad is None else hook(grad)


def _unless_same(leaf: Tensor, hook: Any, before: Any) -> None:
    if _state(leaf) != before:
        hook(leaf)


def _state(leaf: Tensor) -> tuple[int, int] | None:
    return None if leaf.grad is None else (id(leaf.grad), leaf.grad._version)
