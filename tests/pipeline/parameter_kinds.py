"""Models whose frozen parameters are of types of their own, and the loop that is their reference."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNKS = (0, 3), (3, 5)
Linear = partial(nn.Linear, dtype=torch.float64)
COMPUTES = (F.linear,)
DISPATCHES = ("detach", "clone", "_to_copy", "alias")


class Quantised(Tensor):
    """Whole numbers and a scale for each row. It is multiplied, copied and moved: all else raises."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, weight):
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def __repr__(self):
        return f"Quantised({list(self.shape)})"

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantised(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in COMPUTES:
            x, weight, *bias = args
            return F.linear(x, weight.numbers * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in DISPATCHES:
            raise NotImplementedError(name)
        self, settings = args[0], kwargs or {}
        settings = {key: value for key, value in settings.items() if key != "dtype"}
        return cls(func(self.numbers, *args[1:], **settings), func(self.scale, *args[1:], **settings))


class Tagged(nn.Parameter):
    """A subclass that a library knows by its type."""

    def __new__(cls, data, requires_grad=True, tag=None):
        self = Tensor._make_subclass(cls, data, requires_grad)
        self.tag = tag
        return self

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), Tagged(self.data.clone(), self.requires_grad, self.tag))


class Adapted(nn.Module):
    """A quantised layer with an adapter, whose forward asks for types."""

    def __init__(self, width, factory):
        super().__init__()
        self.base = Linear(width, width)
        self.base.weight = factory(self.base.weight)
        self.base.bias.requires_grad_(False)
        self.kinds = type(self.base.weight), type(self.base.bias)
        self.down, self.up = Linear(width, 2, bias=False), Linear(2, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        assert (type(self.base.weight), type(self.base.bias)) == self.kinds
        assert isinstance(self.base.weight, nn.Parameter) and not self.base.weight.requires_grad
        if isinstance(self.base.weight, Tagged):
            assert self.base.weight.tag == "int4"
        return x + (self.base(x) + self.up(self.down(self.drop(x)))).tanh()


KINDS = {
    "wraps": lambda weight: nn.Parameter(Quantised.of(weight), requires_grad=False),
    "subclass": lambda weight: Tagged(weight.detach(), False, "int4"),
    "plain": lambda weight: weight.requires_grad_(False),
}


def adapted(kind):
    torch.manual_seed(1)
    return nn.Sequential(*[Adapted(6, KINDS[kind]) for _ in range(4)], Linear(6, 3))


def rows():
    return torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)


def looped(model, x, y):
    """The gradients of a loop over the chunks, in eval mode."""
    for first, last in CHUNKS:
        (F.mse_loss(model(x[first:last]), y[first:last]) * (last - first) / len(x)).backward()
    return [parameter.grad for parameter in model.parameters()]


def same(grads, expected):
    assert [grad is None for grad in grads] == [grad is None for grad in expected]
    for grad, other in zip(grads, expected):
        if grad is not None:
            torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-14)
