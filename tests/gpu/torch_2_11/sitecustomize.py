"""Substitutes for what Penstock needs of torch 2.13, on a machine with a GPU whose torch is 2.11.

    PYTHONPATH=tests/gpu/torch_2_11:. python -m pytest --whole -m gpu

    _make_saved_tensor    what autograd saves of a tensor, by a Function that saves it
    _foreach_clone        a clone each
    fork_rng              device_type=None is that of the accelerator
    edge                  2.11 lets the node of a Function go with its tensor: a view keeps it

They take time on the host, which overhead on a GPU is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def substitute_in_torch(torch: Any) -> None:
    class Keep(torch.autograd.Function):  # type: ignore[misc]  # a class of a module that is Any here
        @staticmethod
        def forward(ctx: Any, anchor: Any, tensor: Any) -> Any:
            ctx.save_for_backward(tensor)
            return anchor.view_as(anchor)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, None

    class Kept:
        def __init__(self, tensor: Any, is_output: bool = False, is_inplace_on_view: bool = False) -> None:
            with torch.enable_grad(), torch.inference_mode(False):
                self.out = Keep.apply(torch.empty(0, device="cpu", requires_grad=True), tensor)

        def unpack(self) -> Any:
            return self.out.grad_fn.saved_tensors[0]

    fork_rng = torch.random.fork_rng

    def forked(*args: Any, device_type: str | None = "cuda", **kwargs: Any) -> Any:
        return fork_rng(*args, device_type=device_type or "cuda", **kwargs)

    torch._C._autograd._make_saved_tensor = Kept
    torch._foreach_clone = lambda tensors: tuple(tensor.clone() for tensor in tensors)
    torch.random.fork_rng = forked


def substitute_in_graph(graph: Any) -> None:
    import torch

    def edge(tensor: Any) -> Any:
        node, token = graph._node(tensor), None
        if isinstance(node, torch._C._FunctionBase):
            with torch.enable_grad():
                token = tensor.view_as(tensor).grad_fn
        return graph.GradientEdge(node, tensor.output_nr, token)

    graph.edge = edge


SUBSTITUTES = {"torch": substitute_in_torch, "pipeline.common.graph": substitute_in_graph}


class Finder(MetaPathFinder):
    """It changes these modules as soon as they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path) if fullname in SUBSTITUTES else None
        if found is not None and found.loader is not None:
            run: Callable[[ModuleType], None] = found.loader.exec_module

            def changed(module: ModuleType) -> None:
                run(module)
                SUBSTITUTES[fullname](module)

            found.loader.exec_module = changed  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, Finder())
