"""The backward of `pipe(x)` as a differentiable function: `create_graph=True`.

    chunk after chunk   input, parameters --Gate--> the stages as one plain function --autograd.grad--> gradients

It recomputes on the original input and parameters, so that autograd differentiates the gradients to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from pipeline.common.graph import Gate
from pipeline.common.interrupts import deliver
from pipeline.data.pytrees import Bundle, Grads, Tree, add_grads
from pipeline.execution.execution import Execution
from pipeline.skip import Key
from pipeline.stage.hooks import hooks_asleep
from pipeline.stage.stage import StageRun


def differentiate(
    execution: Execution,
    stages: Sequence[StageRun],
    live: Sequence[bool],
    grads: Sequence[Grads],
    owners: Sequence[Tensor],
    create_graph: bool,
) -> tuple[Grads, list[Tensor | None]]:
    """The gradients as differentiable functions of the input, the parameters and `grads`.

    Args:
        execution: of the forward.
        stages: all stages, after their forwards.
        live: for each tensor of the input, whether it had a gradient at the forward.
        grads: of each chunk's outputs.
        owners: the parameters and external leaves.
        create_graph: whether the gradients are to be differentiated.

    Returns:
        Gradients of the input's tensors, and of `owners`.
    """
    external = {id(leaf) for stage in stages for leaf in stage.external.leaves.values()}
    gate = Gate()
    with torch.enable_grad():
        targets = [owner if id(owner) in external else _entered(owner, gate) for owner in owners]
    views = {id(owner): target for owner, target in zip(owners, targets, strict=True)}
    totals: list[Tensor | None] = [None] * len(owners)
    inputs: list[Grads] = []
    for chunk, chunk_grads in enumerate(grads):
        deliver()
        with execution.generators, torch.enable_grad():
            pieces, tree = _compose(execution, stages, live, chunk, views, gate)
        output_pairs = zip(tree.tensors, chunk_grads, strict=True)
        pairs = [(tensor, grad) for tensor, grad in output_pairs if grad is not None and tensor.requires_grad]
        roots, root_grads = [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
        wanted = [piece for piece in pieces if piece.requires_grad]
        derivatives: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(targets))
        if roots:
            with hooks_asleep(targets), gate.closed(), ExitStack() as stack:
                for stage in stages:  # a layer's own torch.utils.checkpoint runs its forward now
                    stack.enter_context(stage.aliases.stand_back(views))
                    stack.enter_context(stage.differentiating())
                derivatives = torch.autograd.grad(
                    roots, wanted + targets, root_grads, create_graph=create_graph, retain_graph=True,
                    allow_unused=True
                )
        of_pieces = iter(derivatives[: len(wanted)])
        inputs.append(tuple(next(of_pieces) if piece.requires_grad else None for piece in pieces))
        of_owners = derivatives[len(wanted) :]
        totals = [add_grads(total, derivative) for total, derivative in zip(totals, of_owners, strict=True)]
    return execution.batch.join_grads(inputs), totals


def _compose(
    execution: Execution,
    stages: Sequence[StageRun],
    live: Sequence[bool],
    chunk: int,
    views: dict[int, Tensor],
    gate: Gate,
) -> tuple[list[Tensor], Tree]:
    """One chunk through all stages: the pieces of the input, behind the gate, and the output."""
    batch, values = execution.batch, execution.setup.layout.values
    pieces = [
        gate.enter(piece[chunk]) if is_live else piece[chunk].detach()
        for piece, is_live in zip(batch.pieces, live, strict=True)
    ]
    under_way: dict[Key | str, Tree] = {"x": Tree(tuple(pieces), batch.tree.skeleton)}
    for stage, device in zip(stages, execution.devices, strict=True):
        stage.check_unchanged(chunk)
        trees = [under_way.pop(row.name) for row in values.read_by[stage.layers.index]]
        placed = [Tree(tuple([tensor.to(device) for tensor in tree.tensors]), tree.skeleton) for tree in trees]
        outputs = stage.compose(chunk, Bundle.of(tuple(placed)), views)
        under_way.update(zip([row.name for row in values.made_by[stage.layers.index]], outputs.trees, strict=True))
    return pieces, under_way["y"]


def _entered(owner: Tensor, gate: Gate) -> Tensor:
    """An owner with nothing behind it: itself, so that a backward that runs its module anew meets it there, or gated.

    One that was frozen since the forward is a part of the graph of that, as in torch.
    """
    if owner.requires_grad:
        return owner if owner.is_leaf else gate.enter(owner)
    owner.requires_grad_(True)
    try:
        return gate.enter(owner)
    finally:
        owner.requires_grad_(False)
