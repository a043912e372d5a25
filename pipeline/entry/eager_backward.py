"""`eager_backward(loss, update)`: a backward in which parameters are updated and their gradients freed.

    loss's graph --walk--> its leaves, and the nodes that give gradients to each
    AccumulateGrad of p has run: autograd adds up all parts first --> hook --> EagerStep.take(p, p.grad)
    p is reached only through one pipe(x) --> that Pipe hands over its whole gradient, stage by stage
    .grad from a backward within the backward --> at the end

Autograd runs each node of a graph once, so the gradient is whole at that point. A layer that runs a backward of its own
(reentrant checkpoints do) adds to `.grad` in another graph: that part is used at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from partition.graph import nodes_of
from partition.halves import REENTRANT
from pipeline.common.arguments import shown
from pipeline.common.interrupts import DeferredSignals, calls_users_code
from pipeline.distributed.wrapped import OF_PARTS, refuse_parts, refuse_reduced
from pipeline.entry.eager_step import refuse_shared_memory
from pipeline.entry.forward import Backward
from pipeline.execution.final_gradients import EarlyUse
from pipeline.gradients.clip import joined_norm
from pipeline.gradients.eager import EagerStep, EagerUpdate, check_free
from pipeline.stage.hooks import grads_kept


def eager_backward(
    loss: Tensor, update: EagerUpdate, *, retain_graph: bool = False, create_graph: bool = False
) -> None:
    """`loss.backward()` and the optimizer's step in one: each parameter is updated as soon as its gradient is whole.

    For a plain module, with checkpoint_blocks or without, and for a loss computed from `pipe(x)`. Every parameter of
    the optimizer that the loss depends on is updated once, and its `.grad` is None afterwards; for a rule, every
    nn.Parameter. Other leaves get their `.grad` as from loss.backward().

    Args:
        loss: of one number.
        update: the optimizer or rule.
        retain_graph, create_graph: refused, with the reason: a graph cannot be used on weights written since.

    Raises:
        RuntimeError: the loss depends on none of the parameters; a `.grad` is set already; other hooks use one;
            an earlier step is torn; a parameter was updated and then got another part of its gradient.
        TypeError: update is no EagerUpdate.
        ValueError: retain_graph or create_graph.

    Example:
        >>> from torch import nn
        >>> from pipeline import EagerUpdate, eager_backward
        >>> module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        >>> update = EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.1))
        >>> eager_backward(module(torch.ones(3, 2)).square().mean(), update)
        >>> [parameter.grad for parameter in module.parameters()]
        [None, None, None, None]
    """
    if not isinstance(update, EagerUpdate):
        raise TypeError(f"update is {shown(update)}. Make it once before the steps: EagerUpdate(optimizer).")
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss is {shown(loss)}. Give the tensor that loss.backward() would be called on.")
    if retain_graph or create_graph:
        raise ValueError(
            f"{'create_graph' if create_graph else 'retain_graph'}=True keeps the graph for another backward, but an "
            "EagerUpdate writes the weights that it was computed with. Use loss.backward(...) and the optimizer."
        )
    with DeferredSignals():
        _eager_backward(loss, update)


def _eager_backward(loss: Tensor, update: EagerUpdate) -> None:
    update.get_ready()
    leaves, pipes = _explored(loss, update)
    parents = {leaf: nodes for leaf, nodes in leaves.items() if update.holds(leaf)}
    _check(loss, list(parents), update, is_alone=all(pipe.is_alone for pipe in pipes))
    step = EagerStep(update, {id(param): "" for param in update.params})
    left = [*parents, *update.params]  # by a backward within the backward
    with grads_kept(left), _taking(loss, parents, step):
        if step.only_norms:
            _norms_only(loss, list(parents))
            step.take_grads(update.params)
            step.clip_to(joined_norm([norm for _, norm in step.norms]))
        with update.guarded(step):
            _autograd(loss, False, None)
            step.take_grads(update.params)
            step.finish()


def _explored(loss: Tensor, update: EagerUpdate) -> tuple[dict[Tensor, list[Any]], list[Backward]]:
    """The leaves of the loss's graph, each with the nodes that give gradients to it; and the calls of Pipes there."""
    if loss.grad_fn is None:
        return {}, []
    nodes = nodes_of([loss])
    refused = "a rule" if update.optimizer is None else "clip='two_pass'" if update.needs_two_runs else None
    if refused is not None and any(node.name() == REENTRANT for node in nodes):
        raise _hidden(refused)
    leaves: dict[Tensor, list[Any]] = {}
    for node in nodes:
        for next_node, _ in node.next_functions:
            leaf = getattr(next_node, "variable", None)
            if leaf is not None:
                leaves.setdefault(leaf, []).append(node)
    calls = [getattr(node, "backward_call", None) for node in nodes]
    return leaves, [call for call in calls if isinstance(call, Backward)]


def _hidden(refused: str) -> RuntimeError:
    return RuntimeError(
        f"torch's reentrant checkpoint hides its parameters from the graph, where {refused} looks for them. Use "
        "checkpoint(..., use_reentrant=False), checkpoint_blocks, or an optimizer without clip='two_pass'."
    )


def _norms_only(loss: Tensor, params: list[Tensor]) -> None:
    """The run of clip="two_pass" that takes norms. `.grad` of other leaves is added to once, in the run after it."""
    try:
        _autograd(loss, True, params)
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):  # torch's words: a layer of a Pipe, whose graph is not the loss's
            raise _hidden("clip='two_pass'") from error
        raise


def _check(loss: Tensor, leaves: Sequence[Tensor], update: EagerUpdate, is_alone: bool) -> None:
    if update.needs_two_runs and not is_alone:
        raise ValueError(
            "clip='two_pass' in eager_backward would clip each rank's gradients by a norm of its own. Use "
            "pipe.step(..., optimizer=update), which knows all, or loss.backward(), pipe.clip_grad_norm_ and the "
            "optimizer."
        )
    if not leaves and is_alone:  # over ranks others may have leaves, and wait for this rank
        raise RuntimeError(
            "the loss depends on no parameter that this EagerUpdate holds: they are frozen, or another optimizer's, or "
            f"the loss is detached (it has {'a' if loss.requires_grad else 'no'} gradient), or a layer that runs a "
            "backward of its own hides all of them (torch's reentrant checkpoint: give it use_reentrant=False)."
        )
    params = leaves if update.optimizer is None else update.params
    named = [(f"a parameter of shape {list(param.shape)}", param) for param in params]
    refuse_parts(named, "eager_backward", OF_PARTS)
    check_free(named)
    if update.validates():
        refuse_reduced(leaves, "an EagerUpdate")
        refuse_shared_memory(enumerate(leaves), "number")


@calls_users_code
def _autograd(loss: Tensor, retain: bool, ends: list[Tensor] | None) -> None:
    torch.autograd.backward(loss, retain_graph=retain, inputs=ends)


@contextmanager
def _taking(loss: Tensor, parents: Mapping[Tensor, list[Any]], step: EagerStep) -> Iterator[None]:
    """Within: gradients go to the step as soon as they are whole."""
    assert loss.grad_fn is not None  # it has leaves
    outer: list[int] = []

    def take(param: Tensor) -> None:
        is_outer = torch._C._current_graph_task_id() == outer[0]
        if is_outer or id(param) in step.updated:  # else it is of a backward within the backward, with more to follow
            step.take_grads([param])

    def begins(*_: Any) -> None:
        outer[:] = [torch._C._current_graph_task_id()]

    handles: list[Any] = [leaf.register_post_accumulate_grad_hook(take) for leaf in parents]
    handles.append(loss.grad_fn.register_prehook(begins))
    by_pipe = _by_pipe(parents)
    for pipe in by_pipe.values():
        pipe.early_use = EarlyUse(lambda: by_pipe.__contains__, step.take)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for pipe in by_pipe.values():
            pipe.early_use = None


def _by_pipe(parents: Mapping[Tensor, list[Any]]) -> dict[int, Backward]:
    """The run of a Pipe that gives a parameter its gradient, by its id; of those that get one from nowhere else."""
    only = {id(leaf): nodes[0] for leaf, nodes in parents.items() if len(nodes) == 1 and not leaf._backward_hooks}
    calls = {key: getattr(node, "backward_call", None) for key, node in only.items()}
    return {key: call for key, call in calls.items() if isinstance(call, Backward)}
