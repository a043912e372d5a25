"""Which layers have no second derivative, or a wrong one, and what is done about them?

    before       modules that write their weights, or look at other rows of the mini-batch: refused
    within       fused attention --> the math kernel; weight_norm --> written out; fast path of transformers --> off
    first chunk  what the graph of each stage shows: refused
    an error     of torch's that says "not implemented": said again, with what helps

Found by comparing second derivatives with finite differences, torch 2.13: fused weight_norm is wrong by 19 per cent
without an error, and so is every autograd.Function whose backward forgets what it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm

_BATCH_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
_REMEDIES = {
    "scaled_dot_product": "Use torch.nn.attention.SDPBackend.MATH, or eager attention (attn_implementation='eager').",
    "embedding_bag": "Use nn.Embedding and sum or average its rows yourself.",
    "hardsigmoid": "Write it out: torch.clamp(x / 6 + 0.5, 0, 1).",
    "cdist": "Write it out: (x[:, None] - y[None]).square().sum(-1).sqrt().",
    "pdist": "Write it out: (x[:, None] - x[None]).square().sum(-1).sqrt(), of the pairs that you need.",
    "ctc_loss": "It has none in torch; GaussNewton wants one of the loss too, EmpiricalFisher does not.",
    "cudnn": "Set torch.backends.cudnn.enabled = False for the analysis.",
    "flex_attention": "Use torch.nn.functional.scaled_dot_product_attention.",
}


def refuse_modules(modules: Iterable[tuple[str, nn.Module]], chunks: int) -> None:
    """Raise for modules whose curvature is not defined, or would be wrong.

    Args:
        modules: with their names, in the mode in which they will run.
        chunks: into which a mini-batch is cut.

    Raises:
        ValueError: it names the module and says what to do.
    """
    if parametrize._cache_enabled:
        raise ValueError(
            "parametrized weights are cached now (torch.nn.utils.parametrize.cached()), so they would not depend on "
            "their parameters. Leave that block first."
        )
    for name, module in modules:
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"'{name}' has max_norm={module.max_norm}: its forward writes its weight, so there is no function to "
                "differentiate. Renormalise the weight now, in a torch.no_grad() block, and set max_norm to None."
            )
        looks_at_all = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        if looks_at_all and chunks > 1:
            raise ValueError(_of_all_rows(f"'{name}' ({type(module).__name__})"))


def _of_all_rows(what: str) -> str:
    return (
        f"{what} normalises with the statistics of the rows that it sees: cut into chunks, the loss would be another "
        "one. Analyse in eval mode (training=False), or use chunks=1."
    )


@contextmanager
def twice_differentiable(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within: modules run on what can be differentiated twice."""
    found = [(put, get()) for get, put in _KERNELS]
    patched = [module for module in modules if type(module) is _WeightNorm and "forward" not in vars(module)]
    old_style = [hook for module in modules for hook in _old_weight_norms(module)]
    try:
        for (put, _), value in zip(found, _ONLY_MATH, strict=True):
            put(value)
        for module in patched:
            vars(module)["forward"] = partial(_weight_norm, module)
        for hook in old_style:
            hook.compute_weight = partial(_old_weight_norm, hook)
        yield
    finally:
        for put, value in found:
            put(value)
        for module in patched:
            del vars(module)["forward"]
        for hook in old_style:
            del hook.compute_weight


_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)
_ONLY_MATH = (False, False, False, True, False)


def _weight_norm(module: Any, magnitude: Tensor, direction: Tensor) -> Tensor:
    """torch._weight_norm, of operations whose second derivatives are right."""
    return _scaled(direction, magnitude, module.dim)


def _old_weight_norm(hook: Any, module: nn.Module) -> Tensor:
    return _scaled(getattr(module, hook.name + "_v"), getattr(module, hook.name + "_g"), hook.dim)


def _scaled(direction: Tensor, magnitude: Tensor, dim: int) -> Tensor:
    axes = [axis for axis in range(direction.dim()) if axis != dim % max(direction.dim(), 1)] if dim != -1 else None
    norm = direction.square().sum(axes, keepdim=True).sqrt() if axes is None or axes else direction.abs()
    return direction * (magnitude / norm)


def _old_weight_norms(module: nn.Module) -> Iterator[Any]:
    for hook in module._forward_pre_hooks.values():
        if type(hook).__name__ == "WeightNorm" and type(hook).__module__ == "torch.nn.utils.weight_norm":
            yield hook


def nodes_of(roots: Iterable[Tensor | None]) -> list[Any]:
    """All nodes of the graph behind some tensors."""
    stack = [root.grad_fn for root in roots if root is not None and root.grad_fn is not None]
    seen: dict[Any, None] = {}
    while stack:
        node: Any = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(following for following, _ in node.next_functions if following is not None)
    return list(seen)


def refuse_nodes(stage: str, roots: Sequence[Tensor], chunks: int) -> bool:
    """Look at a stage's graph before it is differentiated twice.

    Returns:
        Whether it has an autograd.Function of the user's, which must be checked by numbers.

    Raises:
        ValueError: an operation has a wrong second derivative, or looks at other rows.
    """
    nodes = nodes_of(roots)
    for node in nodes:
        if node.name() == "WeightNormInterfaceBackward0":
            raise ValueError(
                f"{stage} calls torch._weight_norm, whose second derivative is wrong in torch. Use "
                "torch.nn.utils.parametrizations.weight_norm, which is written out here, or v * (g / v.norm(...))."
            )
        if node.name() in _BATCH_NORMS and getattr(node, "_saved_training", True) and chunks > 1:
            raise ValueError(_of_all_rows(f"a batch norm of {stage}"))
    return any([is_foreign(node) for node in nodes])


def is_foreign(node: Any) -> bool:
    """Whether a node is an autograd.Function that is neither torch's nor ours."""
    if not isinstance(node, BackwardCFunction):
        return False
    written_in: str = getattr(type(node)._forward_cls, "__module__", "")  # type: ignore[attr-defined]
    return written_in.partition(".")[0] not in ("torch", "pipeline")


def refuse_once_differentiable(stage: str, grads: Iterable[Tensor | None]) -> None:
    """Raise where a gradient has come through a backward that is marked as not differentiable.

    torch would say so too, if it were asked for everything; asked for some derivatives, it takes these for zero.
    """
    if any([node.name() in ("torch::autograd::Error", "DelayedError") for node in nodes_of(grads)]):
        raise ValueError(
            f"{stage} has an autograd.Function whose backward is marked @once_differentiable. Write its backward with "
            "differentiable torch operations and take the mark away; GaussNewton and EmpiricalFisher need that too."
        )


def explained(error: BaseException, stage: str) -> BaseException:
    """An error of torch's that says what is not implemented, with what helps; another error as it is."""
    text = str(error)
    if isinstance(error, (RuntimeError, NotImplementedError)) and "erivative" in text and "not implemented" in text:
        remedy = next((words for name, words in _REMEDIES.items() if name in text), "Write it out in other operations.")
        return RuntimeError(f"{stage} has an operation without a second derivative: {text.rstrip('.')}. {remedy}")
    if isinstance(error, RuntimeError) and "use_reentrant=True" in text:
        return RuntimeError(
            f"{stage} has a torch.utils.checkpoint with use_reentrant=True, which autograd cannot differentiate twice. "
            "Use use_reentrant=False, or none: the Pipe checkpoints by itself."
        )
    return error
