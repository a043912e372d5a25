"""Errors of layers that cannot be differentiated twice: torch's own, with what helps, and what torch takes for zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from partition.graph import nodes_of
from pipeline.common.errors import message_of

_REMEDIES = {
    "scaled_dot_product": "Use torch.nn.attention.SDPBackend.MATH, or eager attention (attn_implementation='eager').",
    "embedding_bag": "Use nn.Embedding and sum or average its rows yourself.",
    "hardsigmoid": "Write it out: torch.clamp(x / 6 + 0.5, 0, 1).",
    "cdist": "Write it out: (x[:, None] - y[None]).square().sum(-1).sqrt().",
    "pdist": "Write it out: (x[:, None] - x[None]).square().sum(-1).sqrt(), of the pairs that you need.",
    "ctc_loss": "torch has none, and GaussNewton wants one too. Use EmpiricalFisher, or write the loss out.",
    "cudnn": "Set torch.backends.cudnn.enabled = False for the analysis.",
    "flex_attention": "Use torch.nn.functional.scaled_dot_product_attention.",
    "out=": "Write it out in operations that return new tensors (nn.LocalResponseNorm for nn.CrossMapLRN2d).",
    "torch.compile": "Analyse the module as it was before torch.compile.",
}
_NO_SECOND = (
    ("erivative", "not implemented"),
    ("double backward",),
    ("Double backward",),
    ("don't support automatic differentiation",),
    ("@once_differentiable",),
)


def with_graphs(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Those of the tensors that a graph has made."""
    return [tensor for tensor in tensors if tensor is not None and tensor.grad_fn is not None]


def is_foreign(node: Any) -> bool:
    """Whether a node is an autograd.Function not known to be right: a user's, an extension's, a backward hook's."""
    if isinstance(node, BackwardCFunction):
        written_in: str = getattr(type(node)._forward_cls, "__module__", "")  # type: ignore[attr-defined]
        return written_in.partition(".")[0] != "pipeline"
    return "CppNode" in node.name()


def refuse_once_differentiable(stage: str, grads: Iterable[Tensor | None]) -> None:
    """Raise where a gradient has come through a backward that is marked as not differentiable.

    torch would say so too, if it were asked for everything; asked for some derivatives, it takes these for zero.
    """
    if any([node.name() in ("torch::autograd::Error", "DelayedError") for node in nodes_of(with_graphs(grads))]):
        raise ValueError(
            f"{stage} has an autograd.Function whose backward is marked @once_differentiable. Write its backward with "
            "differentiable torch operations and take the mark away; GaussNewton and EmpiricalFisher need that too."
        )


def explained(error: BaseException, stage: str) -> BaseException:
    """An error of torch's that says what is not implemented, with what helps; another error as it is."""
    text = message_of(error)
    says_so = any([all([words in text for words in phrases]) for phrases in _NO_SECOND])
    if isinstance(error, (RuntimeError, NotImplementedError)) and says_so:
        remedy = next((words for name, words in _REMEDIES.items() if name in text), "Write it out in other operations.")
        return RuntimeError(f"{stage} has an operation without a second derivative: {text.rstrip('.')}. {remedy}")
    if isinstance(error, RuntimeError) and "use_reentrant=True" in text:
        return RuntimeError(
            f"{stage} has a torch.utils.checkpoint with use_reentrant=True, which autograd cannot differentiate twice. "
            "Use use_reentrant=False, or none: the Pipe checkpoints by itself."
        )
    return error
