"""The public classes: Hessian, GaussNewton, EmpiricalFisher of a Pipe, or of a plain module, over given data.

    H = Hessian(pipe, (x, y), loss_fn)        H @ v        H.hvp(v)        H.top_eigenpairs(5)        H.trace() ...

    v in the user's form --taken--> Vec --products: ProductCall for each mini-batch--> Vec --> the user's form

A product is a call of the Pipe: its schedule, checkpoint mode, places, threads and ranks. It leaves parameters,
`.grad`, buffers, modes and generators as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from partition.modes import modes_of
from partition.names import NamedLayer
from pipeline.common.arguments import check_count, check_flags, shown
from pipeline.common.torch_modes import Ambient
from pipeline.curvature.by_layers import layer_densities, per_layer
from pipeline.curvature.checking import check
from pipeline.curvature.estimates.density import density
from pipeline.curvature.estimates.diagonal import diagonal
from pipeline.curvature.estimates.eigenpairs import top_eigenpairs
from pipeline.curvature.estimates.frobenius import frobenius_squared
from pipeline.curvature.estimates.layer_traces import layer_traces
from pipeline.curvature.estimates.scipy_operator import to_scipy
from pipeline.curvature.estimates.solve import Inverse, solve
from pipeline.curvature.estimates.systems import VecLike
from pipeline.curvature.estimates.trace import trace
from pipeline.curvature.identity import architecture, value_in_words
from pipeline.curvature.known_bad import worked_round
from pipeline.curvature.linear import LinearMap, Vectors, blocks, taken
from pipeline.curvature.minibatches import MiniBatches
from pipeline.curvature.products.matrices import FisherProduct, GaussNewtonProduct, HessianProduct
from pipeline.curvature.products.passes import run_pass
from pipeline.curvature.products.product import ProductCall
from pipeline.curvature.products.sharded import ParameterSpace
from pipeline.curvature.products.task import OnResult, StageChecks
from pipeline.curvature.selection import ParamSelection, as_pipe
from pipeline.curvature.space import Vec
from pipeline.data.loss import LossFn
from pipeline.distributed.agreement import digest, values_in_words
from pipeline.distributed.wrapped import refuse_parts
from pipeline.pipe import Pipe
from pipeline.recompute.randomness import draw_seed
from pipeline.stage.layers import stage_name
from scheduler.errors import whole

Batches: TypeAlias = Any  # one (x, target), or an iterable of them


class Operator(LinearMap):
    """A matrix of second derivatives as its products with vectors, and estimators. Use one of the classes below.

    Over ranks every process makes the same calls. Each estimator is a function of its own module, of which the matrix
    is the first argument.

    Attributes:
        product: the matrix, as its product with one mini-batch.
        pipe: the model; a module that was given, as one stage.
        seed: of random numbers, see `__init__`.
        data, loss_fn, loss_reduction, training: as they were given.
        checks: of the stages, with what the passes over the data have found out so far.
        compares_losses: the first pass does, and those behind one that did not see them to be right.
        is_block: of a larger matrix; it may be of parameters on which the loss does not depend.
    """

    product: type[ProductCall]
    space: ParameterSpace
    is_block = False

    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        loss_fn: LossFn,
        *,
        params: ParamSelection = None,
        loss_reduction: str | None = None,
        training: bool | None = False,
        seed: int | None = None,
        block: int = 4,
        verify: bool = True,
    ) -> None:
        """Take the matrix of a model, data and a loss. Nothing is computed yet.

        Args:
            model: a Pipe, in one process or over ranks; or a module, which becomes one stage.
            data: one mini-batch, a tuple (x, target); or several, a list or a DataLoader of such pairs. The matrix is
                that of the loss over all of them.
            loss_fn: (output, target) -> loss, or (sum, count); as in `Pipe.step`.
            params: by which parameters: all that require a gradient, or names of layers or parameters, or a
                predicate(name, parameter).
            loss_reduction: "mean" or "sum", as in `Pipe.step`.
            training: False: eval mode; True: train mode; None: the modes of the modules. Each product restores the
                modes.
            seed: of random numbers (dropout in train mode), which are the same in every product. Chunk i of
                mini-batch b runs as in a call with seed `seed + b`, see `pipeline.layer_seed`. None: drawn once, now.
            block: the number of products that are computed at a time.
            verify: whether the first products compare stages that have an autograd.Function of your own with finite
                differences. A stage that differs is an error.

        Raises:
            TypeError, ValueError: an argument is invalid; the message says why, and what is valid.
        """
        check_flags(verify=verify)
        if training is not None:
            check_flags(training=training)
        self.pipe, prefix = as_pipe(model)
        refuse_parts(
            self.pipe.named_parameters(), "an operator of curvature",
            "Its vectors hold whole parameters: give the model as it was before parallelize_module."
        )
        self.name, self.block = self.product.name, check_count("block", block)
        self.space = ParameterSpace(self.pipe, prefix, params)
        own_seed = draw_seed() if seed is None else whole(seed)  # all draw, so that their generators stay alike
        if own_seed is None:
            raise TypeError(f"seed is {shown(seed)}. Give a whole number, or None.")
        self.seed = int(self.space.rows(own_seed)[0])
        self.data, self.training = MiniBatches(data), training
        self.loss_fn, self.loss_reduction = loss_fn, loss_reduction
        self.checks, self.compares_losses = StageChecks(verify), True

    # ---------------------------------------------------------------------------------------------------- what it is

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n): n entries in all parameters, over all ranks."""
        return (self.space.size, self.space.size)

    @property
    def dtype(self) -> torch.dtype:
        """Of vectors and products."""
        return self.space.dtype

    def __repr__(self) -> str:
        size = self.space.size
        return f"{type(self).__name__}({size} x {size}, {str(self.dtype).removeprefix('torch.')})"

    # ----------------------------------------------------------------------------------------------------- products

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        products: list[Vec] = []
        for part in blocks(vectors, self.block):
            products += run_pass(self, part, False, first=len(products))[0]
        return products

    def hvp(self, vector: Vectors) -> tuple[Any, dict[str, Tensor]]:
        """The product with one vector, in its form, and the gradient by name, which costs nothing more."""
        vecs, to_user_form = taken(self.space, vector)
        if len(vecs) != 1:
            raise ValueError(f"hvp takes one vector, not {len(vecs)}. Use {type(self).__name__} @ vectors.")
        (gradient, *products), _ = run_pass(self, vecs, True)
        return to_user_form(products), self.space.named(gradient)

    def gradient(self) -> dict[str, Tensor]:
        """The gradient of the loss over all data, by name."""
        return self.space.named(self.gradient_at())

    def loss(self) -> Tensor:
        """The loss over all data."""
        return run_pass(self, [], True)[1]

    # --------------------------------------------------------------------------------------------------- estimators

    top_eigenpairs = top_eigenpairs
    trace = trace
    layer_traces = layer_traces
    per_layer = per_layer
    layer_densities = layer_densities
    diagonal = diagonal
    frobenius_squared = frobenius_squared
    density = density
    solve = solve
    to_scipy = to_scipy

    check = check

    def inverse(
        self,
        damping: float = 0.0,
        *,
        tol: float = 1e-6,
        max_products: int | None = None,
        preconditioner: VecLike | None = None,
        method: str = "cg",
    ) -> Inverse:
        """(A + damping I)^-1, whose products with vectors are linear systems: `H.inverse(1e-3) @ v`.

        Args:
            damping, tol, max_products, preconditioner, method; see `solve`.
        """
        return Inverse(
            self, damping=damping, tol=tol, max_products=max_products, preconditioner=preconditioner, method=method
        )

    # ---------------------------------------------------------------------------------------------------- by layers

    def restricted(self, names: Collection[str]) -> Self:
        """The block of the matrix that belongs to some parameters.

        Args:
            names: of parameters of this one's; those of tied parameters as the first layer has them, on all ranks.
        """
        return self._twin(space=self.space.restricted(names), is_block=True)

    def _twin(self, **attributes: Any) -> Self:
        """One like this, but for some attributes; its stages are not checked yet."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, checks=StageChecks(self.checks.verify), **attributes)
        return twin

    # ------------------------------------------------------------------------------------------------------- checks

    @property
    def workarounds(self) -> list[str]:
        """A description of what products compute in another way than the model, with the same values: see known_bad.py.

        Functional attention is not among them: within a product all of it runs on torch's math kernel.
        """
        return worked_round(self.pipe.named_modules())

    @property
    def has_gradient(self) -> bool:
        """Whether the matrix is the derivative of the gradient."""
        return self.product is HessianProduct

    @property
    def captures(self) -> bool:
        """Whether a layer of any rank has captured a parameter of another module, as products so far have shown."""
        return any(self.space.rows(self.checks.has_captured))

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return len(self.pipe.balance)

    def stage_name(self, index: int) -> str:
        """A stage with its layers, in words."""
        return stage_name(index, sum(self.pipe.balance[:index]), self.pipe.balance[index])

    def point(self) -> Vec:
        """The parameters as a vector."""
        return self.space.vec(self.space.parameters())

    def compare_stages(self, vectors: Sequence[Vec], on_result: OnResult) -> None:
        """Compute products, and compare the rule of each stage of this process with finite differences."""
        run_pass(self, vectors, False, on_result=on_result)

    def gradient_at(self, shift: Vec | None = None) -> Vec:
        """The gradient at other values: with `shift` added to the parameters, which are not written."""
        (gradient,), _ = run_pass(self, [], True, shift=shift)
        return gradient

    def in_one_stage(self) -> Self | None:
        """The same matrix of the whole model as one stage. None: its stages are on several devices or ranks."""
        pipe = self.pipe
        if pipe.runtime.topology is not None or len(set(pipe.devices)) > 1:
            return None
        whole = Pipe(
            pipe.to_sequential(), [len(pipe)], pipe.chunks, devices=pipe.devices[:1], batch_dim=pipe.batch_dim,
            mixes_rows=pipe.mixes_rows,
        )
        return self._twin(pipe=whole)

    def fingerprint(self) -> str:
        """A digest of the model with all its tensors, data, loss and settings; the same text on all ranks."""
        pipe = self.pipe
        pipe.runtime.follow_model()
        beside = [buffer for part in pipe.modules() if isinstance(part, NamedLayer) for buffer in part.buffers_beside]
        tensors = [*pipe.parameters(), *pipe.buffers(), *beside]
        flags = "" if self.training is not None else str(list(modes_of(pipe.modules())))
        model = f"{architecture(pipe)} {values_in_words(tensors)} by {list(self.space.parameters())}"
        autocast = Ambient.capture(sorted({device.type for device in pipe.devices})).autocast
        chunks = f"{pipe.chunks} {pipe.batch_dim} {pipe.mixes_rows} {autocast}"
        settings = f"{value_in_words(self.loss_fn)} {self.loss_reduction} {self.training} {self.seed} {chunks}"
        text = f"{self.name} {model} {settings} {self.data.fingerprint()} {flags}"
        digests = self.space.rows(digest(text) % (1 << 48))
        return f"{self.name} {self.shape[0]} " + " ".join(f"{number:x}" for number in digests)


class Hessian(Operator):
    """H = d2L / dw2, the matrix of second derivatives of the loss."""

    product = HessianProduct


class GaussNewton(Operator):
    """G = J^T (d2L / dy2) J with J = dy / dw: positive semi-definite where the loss is convex in the output y."""

    product = GaussNewtonProduct


class EmpiricalFisher(Operator):
    """F = (1/c) sum_n g_n g_n^T over the rows of the output, g_n being the gradient of row n's loss.

    c is the number of rows; of a sum it is 1. Of a weighted mean (class weights, ignored rows), or of (sum, count), c
    is what the sum is divided by, and row n's loss its term of the sum, weight included.
    """

    product = FisherProduct
