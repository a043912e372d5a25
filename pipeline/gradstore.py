"""Where do the gradients of several backward passes become one? In a store, before one optimizer step.

    add_(parameter, gradient) ...   merge_(another store)   -->   scale_, clip_   -->   apply(optimizer) or assign()

A value is the sum of its contributions, never their mean. A parameter without contributions is absent, which is not
zero: the optimizer leaves it alone (no weight decay, no momentum step). Sums are kept in the wider of the parameter's
and the gradients' types, half-precision ones in float32, and cast once, when they leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeAlias

import torch
from torch import Tensor, nn

Key: TypeAlias = Tensor | str
_HALF = (torch.float16, torch.bfloat16)


class GradStore:
    """Gradients by parameter. It owns its tensors; `.grad` is untouched until `assign` or `apply`.

    Args:
        params: a module, (name, parameter) pairs, a dict of them, or parameters: a closed store, which refuses any
        other
            key. None: an open store, which takes a new parameter at its first `add_`.

    Example:
        >>> import torch
        >>> from pipeline import GradStore
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> store = GradStore([("w", w)])
        >>> store.add_(w, torch.tensor([1.0, 2.0]))
        >>> store.add_("w", torch.tensor([1.0, 0.0]))
        >>> store.get(w)
        tensor([2., 2.])
        >>> store.apply(torch.optim.SGD([w], lr=1.0)); w
        Parameter containing:
        tensor([-2., -2.], requires_grad=True)
    """

    def __init__(
        self, params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]] | None = None
    ) -> None:
        self._closed = params is not None
        self._params: dict[int, Tensor] = {}
        self._names: dict[str, int] = {}
        self._grads: dict[int, Tensor] = {}
        self._moved = False
        for name, param in _named(params):
            self._params[id(param)] = param
            if name is not None and self._names.setdefault(name, id(param)) != id(param):
                raise ValueError(f"two parameters are named {name!r}. Give each a name of its own.")

    # ------------------------------------------------------------------------------------------------- one gradient

    def add_(self, key: Key, grad: Tensor | None) -> None:
        """Add a contribution. None is none.

        Raises:
            KeyError: the store is closed and does not know the key.
            TypeError: not a floating-point gradient, one that requires grad, or a complex one of a real parameter.
            ValueError: another shape or device than the parameter's.
        """
        param = self._param(key)
        if grad is None:
            return
        self._check(param, grad)
        present = self._grads.get(id(param))
        if present is None:
            self._grads[id(param)] = grad.detach().to(_sum_dtype(param, grad), copy=True)
        else:
            self._grads[id(param)] = _sum(present, grad.detach())

    def insert(self, key: Key, grad: Tensor) -> Tensor | None:
        """Put a gradient in place of what is there; return what was. The store takes `grad` over. Raises as `add_`."""
        param = self._param(key)
        self._check(param, grad)
        before = self._grads.get(id(param))
        self._grads[id(param)] = grad.to(_sum_dtype(param, grad))
        return before

    def get(self, key: Key) -> Tensor | None:
        """The gradient of a parameter; None where there is none."""
        return self._grads.get(id(self._param(key)))

    def pop(self, key: Key) -> Tensor | None:
        """Take a gradient out."""
        return self._grads.pop(id(self._param(key)), None)

    def __contains__(self, key: Key) -> bool:
        found = self._names.get(key) if isinstance(key, str) else id(key)
        return found in self._grads

    def __len__(self) -> int:
        return len(self._grads)

    def keys(self) -> Iterator[Tensor]:
        """The parameters that have a gradient."""
        return (self._params[key] for key in self._grads)

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, gradient) pairs."""
        return ((self._params[key], grad) for key, grad in self._grads.items())

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(tensor.numel() * tensor.element_size() for grad in self._grads.values() for tensor in _parts(grad))

    # ----------------------------------------------------------------------------------------------- all gradients

    def merge_(self, other: GradStore) -> None:
        """Add all of another store's gradients, and empty it: it cannot be used again.

        Raises:
            ValueError: merging a store with itself, or one that was merged away.
            KeyError: this store is closed and does not know one of the other's keys; nothing is merged then.
        """
        if other is self:
            raise ValueError("a GradStore cannot be merged with itself: its gradients would count twice.")
        other._check_alive()
        self._check_alive()
        for param, grad in other.items():
            self._check(self._param(param), grad)
        for param, grad in list(other.items()):
            present = self._grads.get(id(param))
            self._grads[id(param)] = grad if present is None else _sum(present, grad)
        for name, key in other._names.items():
            if key in self._params:
                self._names.setdefault(name, key)
        other._grads.clear()
        other._moved = True

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients."""
        self._check_alive()
        for grad in self._grads.values():
            grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients as one vector, each parameter counted once; a 0-d tensor."""
        self._check_alive()
        values = (_values(grad) for grad in self._grads.values())
        return torch.nn.utils.get_total_norm([each for each in values if each.numel()], norm_type)

    def clip_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down to a norm of at most `max_norm`; return the norm before.

        As torch.nn.utils.clip_grad_norm_, which divides by norm + 1e-6.
        """
        total = self.norm(norm_type)
        self.scale_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def is_finite(self) -> bool:
        """Whether no gradient holds an inf or a nan."""
        self._check_alive()
        return all(bool(torch.isfinite(_values(grad)).all()) for grad in self._grads.values())

    def clear(self) -> None:
        """Forget all gradients."""
        self._check_alive()
        self._grads.clear()

    # -------------------------------------------------------------------------------------------------- where they go

    def assign(self, mode: str = "add") -> None:
        """Move all gradients to their parameters' `.grad`, and empty the store.

        Args:
            mode: "add" to what is there, as backward() does, or "set".
        """
        if mode not in ("add", "set"):
            raise ValueError(f"mode is {mode!r}. Use 'add' or 'set'.")
        self._check_alive()
        for param, grad in list(self.items()):
            cast = grad.to(param.dtype)
            param.grad = cast if mode == "set" or param.grad is None else _sum(param.grad, cast)
        self.clear()

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer make one step with these gradients, then empty the store. `.grad` is None afterwards.

        If the optimizer fails the store keeps its gradients.

        Raises:
            RuntimeError: the store is empty.
            ValueError: the optimizer does not hold one of the parameters, or `.grad` of one of its parameters is set,
                which the step would use too.
        """
        self._check_alive()
        if not self._grads:
            raise RuntimeError("the GradStore is empty: there is nothing to step with. Run a backward pass first.")
        held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        foreign = [key for key in self._grads if key not in held]
        if foreign:
            raise ValueError(
                f"the optimizer does not hold {len(foreign)} of the {len(self._grads)} parameters in the store, the "
                f"first of shape {list(self._params[foreign[0]].shape)}. Give it all of them, or pop() those that "
                "stay as they are."
            )
        stale = [param for param in held.values() if param.grad is not None]
        if stale:
            raise ValueError(
                f"{len(stale)} parameters of the optimizer have a .grad already (the first of shape "
                f"{list(stale[0].shape)}), which the step would use too. Call optimizer.zero_grad(), or "
                "store.assign('add') and optimizer.step()."
            )
        grads = dict(self._grads)
        self.assign("set")
        try:
            optimizer.step()
        except BaseException:
            self._grads = grads
            raise
        finally:
            optimizer.zero_grad(set_to_none=True)

    # -------------------------------------------------------------------------------------------------------- checks

    def _param(self, key: Key) -> Tensor:
        self._check_alive()
        if isinstance(key, str):
            if key not in self._names:
                raise KeyError(f"the GradStore has no parameter named {key!r}.{_nearest(key, self._names)}")
            return self._params[self._names[key]]
        if id(key) not in self._params:
            if self._closed:
                raise KeyError(
                    f"the GradStore does not know this parameter of shape {list(key.shape)}. It holds "
                    f"{len(self._params)} parameters and is closed: GradStore() without arguments takes new ones."
                )
            self._params[id(key)] = key
        return self._params[id(key)]

    def _check(self, param: Tensor, grad: Tensor) -> None:
        if not (grad.is_floating_point() or grad.is_complex()) or grad.requires_grad:
            raise TypeError(
                f"a gradient is a floating-point tensor that requires no grad; got {grad.dtype}, "
                f"requires_grad={grad.requires_grad}. Give grad.detach()."
            )
        if grad.is_complex() and not param.is_complex():
            raise TypeError(f"the gradient is {grad.dtype} but the parameter is {param.dtype}. Give grad.real.")
        if grad.shape != param.shape or grad.device != param.device:
            raise ValueError(
                f"the gradient has shape {list(grad.shape)} on {grad.device}, the parameter {list(param.shape)} on "
                f"{param.device}."
            )

    def _check_alive(self) -> None:
        if self._moved:
            raise ValueError("this GradStore was merged into another one and is empty for good. Make a new one.")


def _named(
    params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]] | None,
) -> Iterator[tuple[str | None, Tensor]]:
    if params is None:
        return
    if isinstance(params, nn.Module):
        yield from params.named_parameters(remove_duplicate=False)
        return
    if isinstance(params, Tensor):  # an iterable too: of its rows
        raise TypeError("params is one tensor. Give a list: GradStore([parameter]).")
    for each in params.items() if isinstance(params, Mapping) else params:
        yield (None, each) if isinstance(each, Tensor) else each


def _sum_dtype(param: Tensor, grad: Tensor) -> torch.dtype:
    dtype = torch.promote_types(param.dtype, grad.dtype)
    return torch.float32 if dtype in _HALF else dtype


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """one + other, in place where that keeps layout and type; sparse + dense is dense."""
    dtype = torch.promote_types(one.dtype, other.dtype)
    if one.is_sparse and not other.is_sparse:
        return other.to(dtype) + one.to(dtype)
    return one.to(dtype).add_(other.to(dtype))


def _parts(grad: Tensor) -> tuple[Tensor, ...]:
    return (grad._indices(), grad._values()) if grad.is_sparse else (grad,)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
