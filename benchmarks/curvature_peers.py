"""How do others multiply with the Hessian and the Gauss-Newton matrix of the same plain module?

    double backward    autograd.grad of autograd.grad over one graph of everything
    + checkpoint       the same, torch.utils.checkpoint(use_reentrant=False) round each block
    PyHessian 0.1      backward(create_graph=True), then autograd.grad; "kept": of one mini-batch, whose graph it keeps
    curvlinops 3.0.1   jvp of the gradient; jvp, the loss, vjp

curvlinops needs no torchvision for this, but a package that it needs says so; so install it without what they ask for:

    pip install -c constraints.txt --no-deps curvlinops-for-pytorch backpack-for-pytorch einconv einops \\
        linear_operator opt_einsum unfoldNd
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Product = Callable[[], Sequence[Tensor]]


def double_backward(
    model: nn.Sequential, x: Tensor, y: Tensor, loss: nn.Module, vector: list[Tensor], recompute: bool
) -> Product:
    params = list(model.parameters())

    def run() -> Sequence[Tensor]:
        out = x
        for block in model:
            out = checkpoint(block, out, use_reentrant=False) if recompute else block(out)
        grads = torch.autograd.grad(loss(out, y), params, create_graph=True)
        return torch.autograd.grad(grads, params, vector)

    return run


def pyhessian_product(
    model: nn.Sequential, x: Tensor, y: Tensor, loss: nn.Module, vector: list[Tensor], kept: bool
) -> Product:
    """As its eigenvalues() and trace() multiply: over a data loader, or over one mini-batch."""
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    if kept:
        tool = hessian(model, loss, data=(x, y), cuda=False)
        return lambda: hessian_vector_product(tool.gradsH, tool.params, vector)  # type: ignore[no-any-return]
    tool = hessian(model, loss, dataloader=[(x, y)], cuda=False)
    return lambda: tool.dataloader_hv_product(vector)[1]  # type: ignore[no-any-return]


def curvlinops_product(
    name: str, model: nn.Sequential, x: Tensor, y: Tensor, loss: nn.Module, vector: list[Tensor]
) -> Product:
    import curvlinops

    op = getattr(curvlinops, name)(model, loss, list(model.parameters()), [(x, y)], check_deterministic=False)
    return lambda: op @ vector  # type: ignore[no-any-return]


def peers(
    model: nn.Sequential, x: Tensor, y: Tensor, loss: nn.Module, vector: list[Tensor]
) -> dict[str, Callable[[], Product]]:
    """By name what makes each product; making PyHessian's kept graph is part of what it holds, not of its time."""
    given = (model, x, y, loss, vector)
    found: dict[str, Callable[[], Product]] = {
        "Hessian, double backward": lambda: double_backward(*given, False),
        "Hessian, double backward, checkpoint per block": lambda: double_backward(*given, True),
    }
    if importlib.util.find_spec("pyhessian"):
        found["Hessian, PyHessian"] = lambda: pyhessian_product(*given, False)
        found["Hessian, PyHessian, kept graph"] = lambda: pyhessian_product(*given, True)
    if importlib.util.find_spec("curvlinops"):
        found["Hessian, curvlinops"] = lambda: curvlinops_product("HessianLinearOperator", *given)
        found["Gauss-Newton, curvlinops"] = lambda: curvlinops_product("GGNLinearOperator", *given)
    return found
