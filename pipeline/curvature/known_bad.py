"""Layers that have no second derivative, or a wrong one, and their treatment.

    before       modules that write their weights, scale their gradients, or look at other rows: refused
    within       fused attention --> the math kernel; weight_norm, hardsigmoid --> written out; fast path of
                 transformers, cuDNN's RNNs --> off
    first chunk  what the graph of each stage shows: refused

Found by comparing second derivatives with finite differences, torch 2.13: fused weight_norm is wrong by 19 per cent
without an error, that of norms by a bias without a weight is zero, and so is that of every autograd.Function whose
backward forgets what it depends on. tests/pipeline/curvature/test_every_operator.py compares all operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from partition.graph import nodes_of
from partition.modes import mode_of
from pipeline.common.twice import is_foreign, with_graphs


def refuse_modules(modules: Iterable[tuple[str, nn.Module]], chunks: int) -> None:
    """Raise for modules whose curvature is not defined, or would be wrong.

    Args:
        modules: with their names, in the mode in which they will run.
        chunks: into which a mini-batch is cut; 1 if each may be computed by itself.

    Raises:
        ValueError: it names the module and says what to do.
    """
    for name, module in modules:
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"'{name}' has max_norm={module.max_norm}: its forward writes its weight, so there is no function to "
                "differentiate. Renormalise the weight now, in a torch.no_grad() block, and set max_norm to None."
            )
        if getattr(module, "scale_grad_by_freq", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(_of_no_function(f"'{name}'"))
        if mode_of(module) and _has_spectral_norm(module):
            raise ValueError(
                f"'{name}' has spectral_norm, which moves its singular vectors in each forward of train mode, unseen "
                "by autograd: the second derivative would be wrong. Analyse in eval mode (training=False)."
            )
        kind = getattr(module, "original_name", type(module).__name__)  # torch.jit keeps the name of the class alone
        is_batch_norm = isinstance(module, _BatchNorm) or kind in _SCRIPTED_BATCH_NORMS
        looks_at_all = is_batch_norm and (mode_of(module) or getattr(module, "running_mean", None) is None)
        if looks_at_all and chunks > 1:
            raise ValueError(
                f"'{name}' ({kind}) normalises with the statistics of the rows that it sees: cut into chunks, the loss "
                "would be another one. Analyse in eval mode (training=False), or use chunks=1. If each chunk may be "
                "computed by itself, use Pipe(..., mixes_rows=True)."
            )


def _has_spectral_norm(module: nn.Module) -> bool:
    return isinstance(module, _SpectralNorm) or any([isinstance(hook, SpectralNorm) for hook in _hooks(module)])


def _hooks(module: nn.Module) -> Iterable[Any]:
    return module._forward_pre_hooks.values()


_SCRIPTED_BATCH_NORMS = [kind.__name__ for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)]


def _of_no_function(layer: str) -> str:
    return (
        f"{layer} has scale_grad_by_freq=True: what it gives is the gradient of no function, and its derivative would "
        "not be symmetric. Set scale_grad_by_freq to False for the analysis."
    )


def worked_round(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """A description of what `twice_differentiable` changes for the time of a product, module by module."""
    descriptions = []
    for name, module in modules:
        if _is_as_torch_wrote_it(module) or any(_old_weight_norms(module)):
            operation = "Hardsigmoid" if isinstance(module, nn.Hardsigmoid) else "weight_norm"
            descriptions.append(
                f"'{name}': {operation} is written out, since torch's second derivative of it is none or wrong"
            )
        elif isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            descriptions.append(
                f"'{name}': attention runs on the math kernel, without fused kernels and torch's fast path"
            )
        elif isinstance(module, nn.RNNBase):
            descriptions.append(f"'{name}': cuDNN is off, since its recurrent layers have no second derivative")
    return descriptions


@contextmanager
def twice_differentiable(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within: modules run on what can be differentiated twice."""
    mha = torch.backends.mha
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if any([isinstance(module, nn.RNNBase) for module in modules]):
            stack.callback(torch._C._set_cudnn_enabled, torch._C._get_cudnn_enabled())
            torch._C._set_cudnn_enabled(False)
        for module in modules:
            if _is_as_torch_wrote_it(module):
                stack.callback(vars(module).pop, "forward", None)
                vars(module)["forward"] = partial(_REPLACEMENTS[type(module)], module)
            for hook in _old_weight_norms(module):
                stack.callback(vars(hook).pop, "compute_weight", None)
                hook.compute_weight = partial(_old_weight_norm, hook)
        yield


def _is_as_torch_wrote_it(module: nn.Module) -> bool:
    """Whether it is to be written out, and nobody has put a forward of his own into it."""
    return type(module) in _REPLACEMENTS and "forward" not in vars(module)


def _hardsigmoid(module: nn.Module, x: Tensor) -> Tensor:
    return functional.hardtanh(x, -3.0, 3.0) / 6 + 0.5


def _weight_norm(module: Any, magnitude: Tensor, direction: Tensor) -> Tensor:
    """torch._weight_norm, of operations whose second derivatives are right."""
    return _scaled(direction, magnitude, module.dim)


_REPLACEMENTS: dict[type[nn.Module], Callable[..., Tensor]] = {_WeightNorm: _weight_norm, nn.Hardsigmoid: _hardsigmoid}


def _old_weight_norm(hook: Any, module: nn.Module) -> Tensor:
    return _scaled(getattr(module, hook.name + "_v"), getattr(module, hook.name + "_g"), hook.dim)


def _scaled(direction: Tensor, magnitude: Tensor, dim: int) -> Tensor:
    return direction * (magnitude / torch.norm_except_dim(direction, 2, dim))


def _old_weight_norms(module: nn.Module) -> Iterator[Any]:
    return (hook for hook in _hooks(module) if isinstance(hook, WeightNorm) and "compute_weight" not in vars(hook))


def refuse_nodes(stage: str, roots: Sequence[Tensor], until: Sequence[Tensor] = ()) -> bool:
    """Look at a stage's graph, or the loss's down to `until`, before it is differentiated twice.

    Returns:
        Whether it has an autograd.Function of the user's, which must be checked by numbers.

    Raises:
        ValueError: an operation has a wrong second derivative.
    """
    nodes = nodes_of(with_graphs(roots), until)
    for node in nodes:
        if node.name() == "WeightNormInterfaceBackward0":
            raise ValueError(
                f"{stage} calls torch._weight_norm, whose second derivative is wrong in torch. Use "
                "torch.nn.utils.parametrizations.weight_norm, which is written out here, or v * (g / v.norm(...))."
            )
        if node.name() == "EmbeddingBackward0" and node._saved_scale_grad_by_freq:
            raise ValueError(_of_no_function(f"an embedding of {stage}"))
        if node.name().startswith(_NORMS) and _has_bias_alone(node):
            raise ValueError(
                f"{stage} calls a norm with a bias and without a weight, whose second derivative in torch is wrong, or "
                "an error. Add the bias behind the norm: layer_norm(x, shape) + bias."
            )
    return any([is_foreign(node) for node in nodes])


_NORMS = ("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")


def _has_bias_alone(node: Any) -> bool:
    """Whether a norm has a bias that requires a gradient, and no weight."""
    *_, (bias_node, _) = node.next_functions
    return bias_node is not None and node._saved_weight is None
