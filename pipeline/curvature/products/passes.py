"""One pass over the data: products with some vectors, the gradient and the loss. It changes nothing else.

    for each mini-batch   a call of the Pipe, in the modes and with the kernels and generators of the analysis
    at the end            the parts of tied parameters are added, and all sums are divided by the divisor of the loss
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from partition.generators import generators_at
from partition.modes import modes_kept
from pipeline.common.call_lock import turn
from pipeline.common.interrupts import calls_users_code
from pipeline.common.module_tables import read_by_several
from pipeline.curvature.known_bad import refuse_modules, twice_differentiable
from pipeline.curvature.minibatches import MiniBatch
from pipeline.curvature.products.loss_end import LossProduct
from pipeline.curvature.products.matrices import FisherProduct
from pipeline.curvature.products.task import OnResult, ProductTask
from pipeline.curvature.space import HOST, Vec
from pipeline.data.loss import Loss, name_of
from pipeline.data.microbatch import scatter, scatter_like
from pipeline.distributed.agreement import MINI_BATCHES
from pipeline.execution.communicator import Communicator, Verdict
from pipeline.execution.execution import Execution
from pipeline.recompute.attributes import Attributes
from pipeline.recompute.buffers import Buffers
from pipeline.recompute.randomness import private_generators
from scheduler.collecting import no_collecting

if TYPE_CHECKING:
    from pipeline.curvature.operators import Operator


def run_pass(
    op: Operator,
    vectors: Sequence[Vec],
    gradient: bool,
    on_result: OnResult | None = None,
    shift: Vec | None = None,
    first: int = 0,
) -> tuple[list[Vec], Tensor]:
    """All mini-batches once.

    Args:
        op: the matrix, with its data, loss and settings; what the pass finds out of them is noted there.
        vectors: those that are multiplied.
        gradient: whether the gradient is wanted too.
        on_result: see `pipeline.curvature.products.task.ProductTask`.
        shift: added to the parameters' values for this pass.
        first: the number of the first of these vectors, on which all ranks must agree.

    Returns:
        The gradient, where it is wanted, and then the products; and the loss of all data, float64 on the CPU.

    Raises:
        RuntimeError: the loss depends on none of the parameters, and the matrix is no block of a larger one.
    """
    with turn(), torch.inference_mode(False):  # one pass at a time: each finds the parameters in their places
        named = op.space.parameters()  # held: no other gets the id of one
        slots = {id(parameter): op.space.slots[name] for name, parameter in named.items()}
        runtime = op.pipe.runtime
        shared = read_by_several(runtime.stages()) | set(map(id, runtime.tied().values()))
        sums = [op.space.zeros() for _ in range(len(vectors) + gradient)]
        mixes_rows = op.pipe.mixes_rows
        task = ProductTask(vectors, slots, gradient, sums, shared, mixes_rows, op.checks, on_result, shift)
        total, loss, reached = _sum_minibatches(op, task, first)
        if not reached and not op.is_block:
            raise RuntimeError(
                "the loss does not depend on any of the parameters: the output is detached, or params= leaves out "
                "all that are used."
            )
        if total is not None and (total or loss):  # where nothing counts all is zero, as torch has it
            for shard in itertools.chain(*sums):
                shard.div_(total)
        return sums, torch.tensor(loss, **HOST) / (1.0 if total is None else total)  # nan where nothing counts


def _sum_minibatches(op: Operator, task: ProductTask, vector: int) -> tuple[float | None, float, bool]:
    """All mini-batches: the divisor of the sums, the sum of the losses, and whether there is any gradient."""
    total: float | None = None
    loss, reached = 0.0, False
    batches = iter(op.data)
    number, first, is_proven = 0, None, True
    while True:  # what fails on one rank, its data too, fails on all
        with op.pipe.runtime.communicator("curvature") as communicator:
            item = _next(batches)
            if item is None:
                communicator.open(lambda values: {MINI_BATCHES: f"none after {number}"}, draws=False)
                task.join(communicator)
                op.compares_losses = not is_proven
                return total, loss, reached
            options = {
                "matrix": op.product.name, "vectors": task.number, "gradient": task.gradient,
                "mini-batch": number, "its values": item.digest, "first vector": vector,
                "loss_fn": name_of(op.loss_fn), "loss_reduction": op.loss_reduction,
                "training": op.training,
            }  # fmt: skip
            with no_collecting(), _prepared(op, op.seed + number):
                seed = op.seed + number
                verdict, own_loss = _minibatch(op, task, item, first, seed, options, communicator)
            total = total if verdict.divisor is None else (total or 0.0) + verdict.divisor.item()
            loss += verdict.value.item()
            reached, first = reached or verdict.reached, first or own_loss
            is_proven = is_proven and own_loss.is_proven
        number += 1


def _minibatch(
    op: Operator, task: ProductTask, item: MiniBatch, first: Loss | None, seed: int, options: Mapping[str, object],
    communicator: Communicator,
) -> tuple[Verdict, Loss]:  # fmt: skip
    """Run one. `options` are the same on all ranks."""
    # Tensors that autograd may save.
    x, target = tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, item[:2])
    batch = scatter(x, op.pipe.chunks, "x", op.pipe.batch_dim)
    target_batch = scatter_like(target, batch, "the target")
    if op.product is FisherProduct and batch.batch_dim:
        raise ValueError(
            f"EmpiricalFisher is a sum over rows, which it counts along dim 0; the Pipe's batch_dim is "
            f"{batch.batch_dim}. Make rows the first dim of the data and the output, or use Hessian or GaussNewton."
        )
    refuse_modules(op.pipe.named_modules(), 1 if task.mixes_rows else batch.chunks)
    setup = replace(op.pipe.runtime.setup(batch, target_batch, communicator, options), seed=seed)
    execution = Execution(setup, batch)
    compares = setup.compares or op.compares_losses
    loss_end = LossProduct(execution, op.loss_fn, op.loss_reduction, target_batch, first, compares)
    return op.product(execution, task, loss_end).run(), loss_end.loss


@contextmanager
def _prepared(op: Operator, seed: int) -> Iterator[None]:
    """Within: modes, kernels, generators as a product wants them; at the end they and all state are as they were.

    So every product begins with the same attributes of layers, and the same attributes and buffers of the loss.
    """
    op.pipe.runtime.follow_model()
    loss_modules = list(op.loss_fn.modules()) if isinstance(op.loss_fn, nn.Module) else []
    modules = [*[module for layer in op.pipe.children() for module in layer.modules()], *loss_modules]
    generators = private_generators(modules).values()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(modes_kept(modules))
        for module in modules if op.training is not None else ():
            module.training = bool(op.training)
        # Within: what `train` does to them is undone by `train`.
        stack.callback(Attributes(modules).roll_back)
        stack.callback(Buffers(loss_modules).roll_back)
        stack.enter_context(twice_differentiable(modules))
        stack.enter_context(generators_at([(generator, generator.get_state()) for generator in generators]))
        for number, generator in enumerate(generators):
            generator.manual_seed(seed + number)
        yield


@calls_users_code
def _next(batches: Iterator[MiniBatch]) -> MiniBatch | None:
    return next(batches, None)
