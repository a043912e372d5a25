"""The functions of torch within a loss: by its name, what each does with means, sums and rows.

    func  --known-->  LossFunction       looked up once, since a loss calls the same few for every chunk
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

_REDUCING = frozenset(
    getattr(functional, name)
    for name in dir(functional)
    if "reduction" in getattr(getattr(functional, name), "__annotations__", ())
)
_TOKEN_MEANS = ("cross_entropy", "nll_loss", "linear_cross_entropy")
_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "outer", "cdist", "linear")  # each with each
SCALING = ("mul", "multiply", "div", "divide", "true_divide", "__rdiv__", "__rtruediv__")
WEIGHING = frozenset((*SCALING, *_PRODUCTS, *_TOKEN_MEANS, "einsum", "dot", "vdot", "inner", "tensordot"))
ADDING = ("add", "sub", "subtract", "__radd__", "__rsub__", "rsub")
_SUMMING = ("sum", "mean", "nansum")
_REDUCERS = (*_SUMMING, "amax", "amin", "max", "min", "prod", "std", "var", "logsumexp", "all", "any", "median")
LINEAR = frozenset((
    *SCALING, *ADDING, *_SUMMING, "neg", "negative", "positive", "stack", "cat", "concat", "concatenate", "hstack",
    "vstack", "__get__", "__getitem__", "__setitem__", "select", "index_select", "narrow", "unbind", "split", "chunk",
    "cumsum", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "view", "view_as", "reshape", "reshape_as",
    "ravel", "flatten", "unflatten", "permute", "transpose", "t", "movedim", "clone", "contiguous", "detach", "to",
    "cpu", "type", "type_as", "half", "bfloat16", "float", "double", "requires_grad_", "dot", "vdot", "inner",
    "matmul", "mv", "mm", "bmm", "einsum", "tensordot", "index_add", "scatter_add",
))  # fmt: skip
_OPAQUE = frozenset((
    "addcdiv", "scatter_reduce", "index_reduce", "numpy", "batch_norm", "nanmean", "cartesian_prod", "corrcoef", "cov",
    "kron", "unique", "unique_consecutive",
))  # fmt: skip
SUMMING_ROWS = frozenset((*_REDUCERS, *_PRODUCTS, "bincount", "histc", "index_add", "scatter_add", "einsum"))
KNOWN = LINEAR | SUMMING_ROWS  # in what they make of several numbers: their sum, their mean, one of them, their largest
TO_HOST = frozenset([
    "__bool__", "__float__", "__int__", "__index__", "__array__", "__dlpack__", "item", "tolist", "numpy",
    "unique", "unique_consecutive",  # by its length
])  # fmt: skip
_FIRST = (9, 0)  # no argument says so
_ALONG = {  # the place of dim, which counts if it is that of the rows, and what it is if it is not given
    "softmax": (1, 1), "log_softmax": (1, 1), "softmin": (1, 1), "normalize": (2, 1), "topk": (2, -1), "sort": (1, -1),
    "argsort": (1, -1), "msort": (1, 0), "kthvalue": (2, -1), "argmax": (1, None), "argmin": (1, None),
    "count_nonzero": (1, None), "nanmedian": (1, None), "mode": (1, -1), "aminmax": (1, None), "std_mean": (1, None),
    "var_mean": (1, None), "cumprod": (1, None), "cumsum": (1, None), "cummax": (1, None), "cummin": (1, None),
    "quantile": (2, None), "nanquantile": (2, None), "norm": (2, None), "linalg_norm": (2, None),
    "linalg_vector_norm": (2, None),
    **dict.fromkeys(_REDUCERS, (1, None)), "diff": (2, -1), "cosine_similarity": (2, 1), "gradient": (9, None),
    **dict.fromkeys(("bincount", "histc"), _FIRST),
}  # fmt: skip
_TAKING = {  # likewise, where rows are taken by their place
    **dict.fromkeys(("flip", "select", "index_select", "narrow", "gather", "unsqueeze"), (1, None)), "unbind": (1, 0),
    **dict.fromkeys(("split", "chunk", "tensor_split"), (2, 0)), **dict.fromkeys(("roll", "take_along_dim"), (2, None)),
    **dict.fromkeys(("t", "flipud", "rot90", "repeat", "tile", "__reversed__", "__get__"), _FIRST),  # T and its like
    "repeat_interleave": (2, None),
}  # fmt: skip
_SWAPPING = ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute")  # two dimensions, or all
VIEWING = ("view", "reshape", "view_as", "reshape_as")
_MOVING = frozenset((*_TAKING, *_SWAPPING, *VIEWING, "__getitem__"))
MOVED = "rows were moved"  # in a LossForm
Dims: TypeAlias = Iterable[tuple[Any, Iterable[Any]]]  # tensors, and some dimensions of each


class LossFunction(NamedTuple):
    """A function of torch, as a loss may call it.

    Attributes:
        func: the function.
        name: its name.
        plain: the same without the underscore of what writes in place.
        is_reducing: it has a reduction.
        is_opaque: it may divide by something that is not seen, or give the host what does.
        looks: it may sum or compare numbers of several rows, choose some, or move them: `dims_along` says where.
    """

    func: Callable[..., Any]
    name: str
    plain: str
    is_reducing: bool
    is_opaque: bool
    looks: bool


@lru_cache(maxsize=1024)
def known(func: Callable[..., Any]) -> LossFunction:
    """The record of a function, made once for each."""
    name = func.__name__
    plain = name if name.endswith("__") else name.removesuffix("_")
    is_property = name == "__get__" and getattr(func, "__self__").__name__ not in ("T", "mT", "H", "mH")
    return LossFunction(
        func,
        name,
        plain,
        is_reducing=func in _REDUCING,
        is_opaque=isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or plain in _OPAQUE,
        looks=not is_property and (plain in _DIMS or plain in VIEWING),
    )


class LossCall(NamedTuple):
    """A call of a function of torch within a loss."""

    function: LossFunction
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def result(self) -> Any:
        """The result of the call."""
        return self.function.func(*self.args, **self.kwargs)

    @property
    def values(self) -> list[Any]:
        """The arguments, with and without names."""
        return [*self.args, *self.kwargs.values()]

    @property
    def form(self) -> str:
        """The name of the function, and how it reduces: by a reduction, or all numbers to one."""
        name = self.function.name
        if self.function.is_reducing:
            return f"{name}, reduction {self.kwargs.get('reduction')}"
        return f"{name} of all" if self.function.plain in _SUMMING and len(self.values) == 1 else name

    @property
    def first(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else self.kwargs.get("input")

    @property
    def is_mean(self) -> bool:
        """Whether it has reduction "mean". torch.nn.functional gives modes all but the tensors by name."""
        return self.function.is_reducing and self.kwargs.get("reduction", "mean") in ("mean", "batchmean")

    @property
    def is_token_mean(self) -> bool:
        """Whether it is a mean over tokens. That by class probabilities is one over rows."""
        if not self.is_mean or self.function.name not in _TOKEN_MEANS:
            return False
        target = self.args[-1]
        return isinstance(target, Tensor) and not target.is_floating_point()  # torch refuses what is no tensor

    @property
    def takes_all(self) -> bool:
        """Whether it moves rows, or takes them one by one, but leaves none out by a slice."""
        name, args = self.function.plain, self.args
        index = args[1] if name == "__getitem__" and isinstance(args[1], tuple) else args[1:]
        return name in _MOVING and not any([isinstance(part, slice) and part != slice(None) for part in index])

    def dims_along(self) -> Dims:
        """The arguments along which it sums, looks or chooses, or whose dimensions it moves, and these."""
        return _DIMS[self.function.plain](self)


def _given_dims(call: LossCall) -> Dims:
    place, default = _ALONG.get(call.function.plain) or _TAKING[call.function.plain]
    args, kwargs = call.args, call.kwargs
    dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if isinstance(dims, Tensor):  # torch.max(one, other) takes the larger of two
        return []
    return [(call.first, dims if isinstance(dims, (tuple, list)) else [dims])]


def _indexed_dims(call: LossCall) -> Dims:
    parts = call.args[1] if isinstance(call.args[1], tuple) else call.args[1:]
    index = [part for part in parts if part is not None]
    dots = [dim for dim, part in enumerate(index) if part is Ellipsis]
    chosen = [
        dim - len(index) if dots and dim > dots[0] else dim
        for dim, part in enumerate(index)
        if isinstance(part, int) or isinstance(part, slice) and part != slice(None)
    ]
    new = [dim for dim, part in enumerate(parts) if part is None]  # behind which it puts the rows
    return [(call.first, new), (call.first, chosen)]


def _swapped_dims(call: LossCall) -> Dims:
    args = call.args
    moved = [*(args[1] if isinstance(args[1], (tuple, list)) else args[1:]), *call.kwargs.values()]
    is_order = call.function.plain == "permute"
    return [(call.first, [dim for place, dim in enumerate(moved) if not is_order or dim != place])]


def _normalized_dims(call: LossCall) -> Dims:
    sizes = call.args[1] if len(call.args) > 1 else call.kwargs["normalized_shape"]
    return [(call.first, range(-len(sizes), 0))]


def _multiplied_dims(call: LossCall) -> Dims:
    if len(call.values) < 2:
        return []
    left, right = call.values[:2]
    if call.function.plain == "__rmatmul__":
        left, right = right, left
    return [(left, [-1]), (right, [0 if call.function.plain == "linear" else -min(2, right.dim())])]


def _einsum_dims(call: LossCall) -> Dims:
    args = call.args
    if len(args) < 2 or not isinstance(args[0], str):
        return []
    terms, arrow, kept = args[0].replace(" ", "").partition("->")
    kept = kept if arrow else "".join([letter for letter in terms if terms.count(letter) == 1])
    operands = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    letters = [term.partition("...")[0] for term in terms.split(",")]  # what the dots stand for is kept
    return [
        (operand, [dim for dim, letter in enumerate(of_operand) if letter not in kept])
        for of_operand, operand in zip(letters, operands, strict=False)
    ]


_DIMS: dict[str, Callable[[LossCall], Dims]] = {
    **dict.fromkeys((*_ALONG, *_TAKING), _given_dims),
    "__getitem__": _indexed_dims,
    **dict.fromkeys(_SWAPPING, _swapped_dims),
    **dict.fromkeys(_PRODUCTS, _multiplied_dims),
    "einsum": _einsum_dims,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized_dims),
    **dict.fromkeys(
        ("index_add", "scatter_add"), lambda call: [(source, [call.values[1]]) for source in call.values[3:4]]
    ),
    "scaled_dot_product_attention": lambda call: [(keys, [-2]) for keys in call.values[1:2]],
}
