"""Visits of layers, one after the other.

    sample ──copy──► x ──► layer 0 ──► y ──cut──► x ──► layer 1 ──► ...
                           │ a copy, one at a time, in a sandbox
                           └─ visit: bytes (storages.py), or seconds or FLOPs (working.py)

Cut: detached, needing a gradient if y did, so that the graph of one layer is gone before the next runs. What layers
stash for later ones is cut too. Nothing of the caller's is changed (sandbox.py).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from partition.contents import tensors_in
from partition.errors import PartitionError
from partition.precision import weights_cast_anew
from partition.profiles.alike import LikenessCache
from partition.profiles.sandbox import Sandbox
from partition.profiles.skips import renew, skips_of, skips_under
from partition.rows import bare

T = TypeVar("T")
Visit = Callable[[nn.Module, Any, "VisitedLayer"], tuple[T, Any]]
Reuse = Callable[[T, Any, Any], T]


class VisitedLayer(NamedTuple):
    """One layer of a visit.

    Attributes:
        number: its number; of the loss, that of the layers.
        sandbox: where it runs.
        stashes, pops: the keys of its skips.
        aside: tensors that are the caller's, not counted: the target of a loss.
    """

    number: int
    sandbox: Sandbox
    stashes: list[Hashable]
    pops: list[Hashable]
    aside: list[Tensor]


class VisitedLoss(NamedTuple):
    """A loss that is visited like a layer behind the last: function(output, target)."""

    function: Callable[[Any, Any], Any]
    target: Any


def each_layer(
    module: nn.Sequential, sample: Any, sandbox: Sandbox, visit: Visit[T], loss: VisitedLoss | None = None,
    reuse: Reuse[T] = lambda result, x, y: result,
) -> list[T]:
    """visit(copy of the layer, its input, VisitedLayer) -> (result, output), layer after layer; the results.

    Without numbers, layers that are alike run once (alike.py).

    Args:
        module: the layers.
        sample: the input of the first.
        sandbox: where they run.
        visit: what to do with each.
        loss: of the output, visited like a layer behind the last; None: there is none.
        reuse: (result of a layer, input and output of one that is like it) -> its result.
    """
    return copy_context().run(_each_layer, module, sample, sandbox, visit, loss, reuse)


def _each_layer(
    module: nn.Sequential, sample: Any, sandbox: Sandbox, visit: Visit[T], loss: VisitedLoss | None, reuse: Reuse[T]
) -> list[T]:
    results = []
    cache = LikenessCache()
    with sandbox.within():
        x = sandbox.moved(bare(sample))
        # Not named_children(), which leaves out the second place of a layer that stands in two.
        for index, (name, layer) in enumerate(module._modules.items()):
            assert layer is not None  # a Sequential that runs has no None
            with _noted(name, layer, sandbox), weights_cast_anew(True):
                visited = VisitedLayer(index, sandbox, *skips_of(layer), [])
                layer_copy = sandbox.copy(layer)
                with sandbox.running():
                    if sandbox.fake and not visited.stashes and not visited.pops:
                        run = partial(_visit, visit, layer_copy, x, visited)
                        result, x = cache.run(layer, layer_copy, x, run, reuse)
                        del run
                    else:
                        result, x = _visit(visit, layer_copy, x, visited)
                del layer_copy
            renew(dict(zip(visited.stashes, _cut(skips_under(visited.stashes)), strict=True)))
            results.append(result)
        if loss is not None:
            with _target_asked_for(loss), _noted("loss", loss.function, sandbox):
                loss_layer = _LossLayer(loss, sandbox)
                with sandbox.running():
                    visited = VisitedLayer(len(module), sandbox, [], [], tensors_in(loss_layer.target))
                    results.append(visit(loss_layer, x, visited)[0])
    return results


def _visit(visit: Visit[T], layer: nn.Module, x: Any, visited: VisitedLayer) -> tuple[T, Any]:
    """The result, and the output, cut."""
    result, y = visit(layer, x, visited)
    return result, _cut(y)


@contextmanager
def _noted(name: str, layer: Any, sandbox: Sandbox) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PartitionError(
            f"layer {name!r} ({type(layer).__name__}) looks at numbers ({error}), of which there are none on meta. "
            "Profile it where it can run: device='cpu', or an accelerator."
        ) from None
    except Exception as error:
        error.add_note(f"while profiling layer {name!r} ({type(layer).__name__}) on {sandbox}")
        raise


@contextmanager
def _target_asked_for(loss: VisitedLoss) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if loss.target is None:
            error.add_note("loss_fn was called with target=None. Give target= too, of as many rows as the sample.")
        raise


class _LossLayer(nn.Module):
    """A loss as a layer."""

    def __init__(self, loss: VisitedLoss, sandbox: Sandbox) -> None:
        super().__init__()
        function = loss.function
        self.function = sandbox.copy(function) if isinstance(function, nn.Module) else function
        self.target = sandbox.moved(bare(loss.target))

    def forward(self, output: Any) -> Any:
        return self.function(output, self.target)


# ------------------------------------------------------------------------------------------------------- input, output


def outputs_of(y: Any, stashes: list[Hashable]) -> list[Tensor]:
    """The tensors that a layer returns or stashes, and that need a gradient."""
    return [tensor for tensor in tensors_in([y, skips_under(stashes)]) if tensor.requires_grad]


class _InputsFromLeaf(torch.autograd.Function):
    """The identity from a leaf to the inputs of a layer, which are no views and no leaves: it may write into them."""

    @staticmethod
    def forward(ctx: Any, tensors: Sequence[Tensor], leaf: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:  # pragma: no cover  # called from C++
        return None, None


class RunInput:
    """The input of one run of a layer, in a graph of its own; the skips that it takes are put into the context.

    Attributes:
        value: the input.
        leaves: the one leaf of the graph; none where no input needs a gradient.
    """

    def __init__(self, x: Any, pops: list[Hashable]) -> None:
        given = [x, *skips_under(pops)]
        differentiable = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        self.leaves = [torch.empty((), device=tensor.device, requires_grad=True) for tensor in differentiable[:1]]
        inputs: Iterator[Tensor] = iter(())
        if differentiable:
            inputs = iter(_InputsFromLeaf.apply(differentiable, *self.leaves))  # type: ignore[no-untyped-call]
        self.value, *popped = pytree.tree_map_only(
            Tensor, lambda tensor: next(inputs) if tensor.requires_grad else tensor.detach(), given
        )
        renew(dict(zip(pops, popped, strict=True)))

    def targets(self, layer: nn.Module) -> list[Tensor]:
        """The tensors whose gradients a whole backward computes."""
        return [*self.leaves, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]


def _cut(x: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), x)
