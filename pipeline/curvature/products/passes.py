"""One pass over the data: products with some vectors, the gradient and the loss. It changes nothing else.

    for each mini-batch   a call of the Pipe, in the modes and with the kernels and generators of the analysis
    at the end            the parts of tied parameters are added, and all sums are divided by the divisor of the loss
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from partition.modes import modes_kept
from pipeline.common.call_lock import turn
from pipeline.common.interrupts import calls_users_code
from pipeline.common.module_tables import read_by_several
from pipeline.curvature.identity import identity
from pipeline.curvature.known_bad import refuse_modules, twice_differentiable
from pipeline.curvature.minibatches import MiniBatch, MiniBatches
from pipeline.curvature.products.loss_end import LossProduct
from pipeline.curvature.products.matrices import FisherProduct
from pipeline.curvature.products.product import ProductCall
from pipeline.curvature.products.sharded import ParameterSpace
from pipeline.curvature.products.task import OnResult, ProductTask, StageChecks
from pipeline.curvature.space import HOST, Vec
from pipeline.data.loss import Loss, LossFn
from pipeline.data.microbatch import scatter, scatter_like
from pipeline.distributed.agreement import MINI_BATCHES
from pipeline.execution.communicator import Communicator, Verdict
from pipeline.execution.execution import Execution
from pipeline.pipe import Pipe
from pipeline.recompute.attributes import Attributes
from pipeline.recompute.buffers import Buffers
from pipeline.recompute.randomness import generators_at, private_generators


class PassResult(NamedTuple):
    """The result of one pass over the data.

    Attributes:
        vectors: the products.
        gradient: of the loss, where it was asked for.
        loss: of all data, float64 on the CPU.
    """

    vectors: list[Vec]
    gradient: Vec | None
    loss: Tensor


@dataclass(eq=False)
class Passes:
    """The passes of one operator over its data.

    Attributes:
        product: the matrix, as its product with one mini-batch.
        pipe: the model.
        data: the mini-batches.
        loss_fn: as in `Pipe.step`.
        reduction: as in `Pipe.step`.
        training: the mode; None: as the modules are.
        seed: of the first mini-batch.
        space: where the vectors live.
        checks: of the stages, with what the passes have found out so far.
        compares: losses: the first pass does, and those behind one that did not see them to be right.
        captures: a stage computes with a parameter past its modules, as a pass has seen.
    """

    product: type[ProductCall]
    pipe: Pipe
    data: MiniBatches
    loss_fn: LossFn
    reduction: str | None
    training: bool | None
    seed: int
    space: ParameterSpace
    checks: StageChecks
    compares: bool = True
    captures: bool = False

    def of(self, pipe: Pipe | None = None, space: ParameterSpace | None = None) -> Passes:
        """The same of another Pipe with the same layers, or of fewer parameters."""
        checks = StageChecks(self.checks.verify, set(), {})
        return replace(self, pipe=pipe or self.pipe, space=space or self.space, checks=checks)

    @property
    def settings(self) -> str:
        """All that decides the numbers besides the model, in words."""
        loss = identity(self.loss_fn)
        return f"{loss} {self.reduction} {self.training} {self.seed} {self.pipe.chunks} {self.data.fingerprint()}"

    def run(
        self,
        vectors: Sequence[Vec],
        gradient: bool,
        on_result: OnResult | None = None,
        shift: Vec | None = None,
        first: int = 0,
    ) -> PassResult:
        """All mini-batches once.

        Args:
            vectors: those that are multiplied.
            gradient: whether the gradient is wanted too.
            on_result: see `pipeline.curvature.products.task.ProductTask`.
            shift: added to the parameters' values for this pass.
            first: the number of the first of these vectors, on which all ranks must agree.

        Raises:
            RuntimeError: the loss depends on none of the parameters.
        """
        with turn(), torch.inference_mode(False):  # one pass at a time: each finds the parameters in their places
            named = self.space.parameters()  # held: no other gets the id of one
            slots = {id(parameter): self.space.slots[name] for name, parameter in named.items()}
            runtime = self.pipe.runtime
            shared = read_by_several(runtime.stages()) | set(map(id, runtime.tied().values()))
            sums = [self.space.zeros() for _ in range(len(vectors) + gradient)]
            task = ProductTask(vectors, slots, gradient, sums, shared, self.checks, on_result, shift)
            total, loss, reached = self._sum_minibatches(task, first)
            if not reached:
                raise RuntimeError(
                    "the loss does not depend on any of the parameters: the output is detached, or params= leaves out "
                    "all that are used."
                )
            for shard in itertools.chain(*sums) if total else ():
                shard.div_(total)
            mean_loss = torch.tensor(loss / (total or 1.0), **HOST)
            return PassResult(sums[gradient:], sums[0] if gradient else None, mean_loss)

    def _sum_minibatches(self, task: ProductTask, vector: int) -> tuple[float, float, bool]:
        """All mini-batches: the divisor of the sums, the sum of the losses, and whether there is any gradient."""
        total, loss, reached = 0.0, 0.0, False
        batches = iter(self.data)
        number, first, is_proven = 0, None, True
        while True:  # what fails on one rank, its data too, fails on all
            with self.pipe.runtime.communicator("curvature") as communicator:
                item = _next(batches)
                if item is None:
                    communicator.open(lambda values: {MINI_BATCHES: f"none after {number}"}, draws=False)
                    task.join(communicator)
                    self.compares = not is_proven
                    return total, loss, reached
                options = {
                    "matrix": self.product.name, "vectors": task.number, "gradient": task.gradient,
                    "mini-batch": number, "its values": item.digest, "first vector": vector,
                    "loss_reduction": self.reduction,
                }  # fmt: skip
                with self._prepared(self.seed + number):
                    seed = self.seed + number
                    verdict, own_loss = self._minibatch(task, item, first, seed, options, communicator)
                assert verdict.loss is not None  # some rank has the last stage
                weight = 1.0 if verdict.divisor is None else verdict.divisor.item()
                total += 0.0 if verdict.divisor is None else weight
                loss += verdict.loss.double().item() * weight if weight else 0.0  # where nothing counts it is nan
                reached, first = reached or verdict.reached, first or own_loss
                is_proven = is_proven and own_loss.is_proven
            number += 1

    def _minibatch(
        self, task: ProductTask, item: MiniBatch, first: Loss | None, seed: int, options: Mapping[str, object],
        communicator: Communicator,
    ) -> tuple[Verdict, Loss]:  # fmt: skip
        """Run one. `options` are the same on all ranks."""
        # Tensors that autograd may save.
        x, target = tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, item[:2])
        batch = scatter(x, self.pipe.chunks, "x", self.pipe.batch_dim)
        target_batch = scatter_like(target, batch, "the target")
        if self.product is FisherProduct and batch.batch_dim:
            raise ValueError(
                f"EmpiricalFisher is a sum over rows, which it counts along dim 0; the Pipe's batch_dim is "
                f"{batch.batch_dim}. Make rows the first dim of the data and the output, or use Hessian or GaussNewton."
            )
        refuse_modules(self.pipe.named_modules(), batch.chunks)
        setup = replace(self.pipe.runtime.setup(batch, target_batch, communicator, options), seed=seed)
        execution = Execution(setup, batch)
        compares = setup.compares or self.compares
        loss_end = LossProduct(execution, self.loss_fn, self.reduction, target_batch, first, compares)
        call = self.product(execution, task, loss_end)
        verdict = call.run()
        self.captures = self.captures or call.captures
        return verdict, loss_end.loss

    # ------------------------------------------------------------------------------------------------- surroundings

    @contextmanager
    def _prepared(self, seed: int) -> Iterator[None]:
        """Within: modes, kernels, generators as a product wants them; at the end they and all state are as they were.

        So every product begins with the same attributes of layers, and the same attributes and buffers of the loss.
        """
        self.pipe.runtime.follow_model()
        loss_modules = list(self.loss_fn.modules()) if isinstance(self.loss_fn, nn.Module) else []
        modules = [*[module for layer in self.pipe.children() for module in layer.modules()], *loss_modules]
        generators = private_generators(modules).values()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(modes_kept(modules))
            for module in modules if self.training is not None else ():
                module.training = bool(self.training)
            # Within: what `train` does to them is undone by `train`.
            stack.callback(_put_back, Attributes(modules, weak=True))
            stack.callback(Buffers(loss_modules).roll_back)
            stack.enter_context(twice_differentiable(modules))
            stack.enter_context(generators_at([(generator, generator.get_state()) for generator in generators]))
            for number, generator in enumerate(generators):
                generator.manual_seed(seed + number)
            yield


def _put_back(attributes: Attributes) -> None:
    if not attributes.is_current:
        attributes.roll_back()


@calls_users_code
def _next(batches: Iterator[MiniBatch]) -> MiniBatch | None:
    return next(batches, None)
