"""GradStore: the gradients of several backward passes, added up before one optimizer step.

    from_grads(module), add_(key, gradient), merge_(another store)   -->   a GradientSum for each parameter
        -->   all_reduce_   -->   scale_, clip_   -->   apply(optimizer) or assign()

Keys are in gradients/keys.py, sums in gradients/slot.py, the reduction over ranks in gradients/reduce.py. What goes to
and from `.grad` is moved: afterwards one side holds it alone.

A value is the sum of its contributions, never their mean. A parameter without contributions is absent, which is not
zero: the optimizer skips it (no weight decay, no momentum step). Sums are kept in the wider of the parameter's
and the gradients' types, half-precision ones in float32, and cast once, when they leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.common.arguments import check_factor, check_limit, check_optimizer, shown
from pipeline.gradients import reduce as gradstore_ranks
from pipeline.gradients.clip import clip_factor, stored_entries, total_norm
from pipeline.gradients.keys import GradKey, Keys, Params
from pipeline.gradients.partial import names_of_parts, refuse_norm, refuse_verdict
from pipeline.gradients.per_parameter import params_of
from pipeline.gradients.slot import GradientSum, as_grad_of, check_grad, parts, plus


class GradStore:
    """Gradients by parameter. It owns its tensors; `.grad` is untouched until `assign` or `apply`.

    Several threads may call `add_` at once, of a store whose parameters are given; all else is for one thread.

    Args:
        params: a module, (name, parameter) pairs, a dict of them, or parameters: a closed store, which refuses any
            other key. None: an open store, which takes a new parameter at its first `add_`.
        sparse: a sparse and a dense gradient of one parameter: "densify" adds them to a dense one, "error" refuses.

    Raises:
        ValueError: two parameters of one name, or an unknown sparse.

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

    def __init__(self, params: Params | None = None, *, sparse: str = "densify") -> None:
        if sparse not in ("densify", "error"):
            raise ValueError(f"sparse is {sparse!r}. Use 'densify' or 'error'.")
        self._densify = sparse == "densify"
        self._keys = Keys(params, self._densify)
        self._moved = False

    def __reduce__(self) -> NoReturn:
        """Called by `copy` and `pickle`: refused."""
        raise TypeError(
            "a GradStore cannot be copied or pickled: its keys are the parameters themselves, and a copy would have "
            "others. Take store.state_dict(), and load that into GradStore(module)."
        )

    @classmethod
    def from_grads(
        cls, params: Params, grads: Mapping[str, Tensor | None] | Sequence[Tensor | None] | None = None
    ) -> GradStore:
        """A closed store of existing gradients.

        Args:
            params: as above.
            grads: None: the `.grad` of the parameters are moved: not copied, and `.grad` is None afterwards. (A
                view of a larger buffer, as DistributedDataParallel keeps, is copied.) Otherwise gradients to copy: a
                dict by name, as torch.func.grad returns, or a list in the order of the parameters, as
                torch.autograd.grad does. None: no gradient.

        Raises:
            KeyError, TypeError, ValueError: as `add_`; nothing is moved then.
            ValueError: a list of another length than the parameters.

        Example:
            >>> import torch
            >>> from pipeline import GradStore
            >>> layer = torch.nn.Linear(2, 1, bias=False)
            >>> layer(torch.tensor([1.0, 3.0])).sum().backward()
            >>> store = GradStore.from_grads(layer)
            >>> store.get("weight"), layer.weight.grad
            (tensor([[1., 3.]]), None)
        """
        store = cls(params)
        if grads is None:
            store._move_grads()
        elif isinstance(grads, Mapping):
            for name, grad in grads.items():
                store.add_(name, grad)
        elif isinstance(grads, str | bytes | Tensor) or not isinstance(grads, Sequence):
            raise TypeError(f"grads is {shown(grads)}. Give a dict by name, a list in the parameters' order, or None.")
        else:
            slots = store._keys.slots
            if len(grads) != len(slots):
                raise ValueError(f"there are {len(grads)} gradients of {len(slots)} parameters. Give each its own.")
            for slot, grad in zip(slots.values(), grads, strict=True):
                store.add_(slot.param, grad)
        return store

    # ------------------------------------------------------------------------------------------------- one gradient

    def add_(self, key: GradKey, grad: Tensor | None) -> None:
        """Add a contribution. None: no gradient.

        Raises:
            KeyError: the store is closed and does not know the key.
            TypeError: not a floating-point gradient, one that requires grad, a complex one of a real parameter, or one
                of a compressed layout (CSR); a sparse and a dense one under sparse="error".
            ValueError: another shape or device than the parameter's.
        """
        slot = self._keys.slots.get(id(key)) or self._slot(key)
        if grad is not None:
            check_grad(slot.param, grad)
            slot.add(grad)

    def insert(self, key: GradKey, grad: Tensor) -> Tensor | None:
        """Replace a gradient and return the earlier one. The store takes over `grad`. Raises as `add_`.

        Of a tensor whose entries may share memory (the gradient of a sum is expanded) it takes a copy, as sums are
        written in place.
        """
        slot = self._slot(key)
        check_grad(slot.param, grad)
        before = slot.sum
        slot.put(grad.clone() if not grad.is_sparse and torch._debug_has_internal_overlap(grad) else grad)
        return before

    def get(self, key: GradKey) -> Tensor | None:
        """The gradient of a parameter; None where there is none."""
        return self._slot(key).sum

    def pop(self, key: GradKey) -> Tensor | None:
        """Take a gradient out."""
        slot = self._slot(key)
        grad = slot.sum
        slot.put(None)
        return grad

    def __contains__(self, key: GradKey) -> bool:
        slot = self._keys.names.get(key) if isinstance(key, str) else self._keys.slots.get(id(key))
        return slot is not None and slot.sum is not None

    def __len__(self) -> int:
        return sum(1 for _ in self.keys())

    def __repr__(self) -> str:
        return f"GradStore(gradients of {len(self)} of {len(self._keys.slots)} parameters, {self.nbytes:,} bytes)"

    def keys(self) -> Iterator[Tensor]:
        """The parameters that have a gradient, in the order in which the store got them."""
        return (slot.param for slot, _ in self._keys.filled())

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, gradient) pairs."""
        return ((slot.param, grad) for slot, grad in self._keys.filled())

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        tensors = (tensor for _, grad in self.items() for tensor in parts(grad))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # ----------------------------------------------------------------------------------------------- all gradients

    def merge_(self, other: GradStore) -> None:
        """Add all of another store's gradients, and empty it: it cannot be used again.

        Raises:
            ValueError: merging a store with itself, or one that was merged away.
            KeyError: this store is closed and does not know one of the other's keys.
            TypeError, ValueError: as `add_`. In any case neither store changes.
        """
        if not isinstance(other, GradStore):
            raise TypeError(f"other is {shown(other)}. Give a GradStore.")
        if other is self:
            raise ValueError("a GradStore cannot be merged with itself: its gradients would count twice.")
        theirs, keys = other._live, self._live
        pairs = [(keys.find(slot.param), grad) for slot, grad in theirs.filled()]
        for slot, grad in pairs:
            slot.check_take(grad)
        for slot, grad in pairs:
            slot.take(grad)
        keys.learn(theirs)
        other._keys, other._moved = Keys(None, True), True

    def all_reduce_(self, group: dist.ProcessGroup | None = None, op: str = "sum") -> None:
        """Add up the stores of all ranks of a group: afterwards each has the same gradients, bit for bit.

        The stores are of the same model, but need not have the same gradients: one that is absent on some ranks counts
        as zero there, and is present everywhere afterwards; one that is absent on all ranks stays absent. All
        ranks of the group call this. Reduce first, then scale and clip: the norm is that of the sum.

        Args:
            group: the ranks; None: all.
            op: "sum", or "mean": the sum divided by the number of ranks, with or without the gradient.

        Raises:
            ValueError: an open store, which has no order that ranks share; another op on another rank; ranks whose
                parameters differ, in names, shapes or order. On all ranks.
            TypeError: sparse on one rank and dense on another, under sparse="error" on any. On all ranks.
        """
        keys = self._live
        names = keys.first_names()
        named = None if keys.is_open else [(names.get(key), slot) for key, slot in keys.slots.items()]
        gradstore_ranks.all_reduce(named, group, op, not self._densify)

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients."""
        slots = self._live.filled()
        check_factor(factor)
        for _, grad in slots:
            grad.mul_(factor.detach().to(grad.device).reshape(()) if isinstance(factor, Tensor) else float(factor))

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients as one vector, each parameter counted once; a 0-d tensor.

        Args:
            norm_type: above 0, such as 2.0 or float("inf").

        Raises:
            RuntimeError: these are a rank's part of a Pipe's gradients.
        """
        grads = [stored_entries(grad) for _, grad in self._live.filled()]
        check_limit("norm_type", norm_type)
        refuse_norm(self.keys(), "store.assign() and pipe.clip_grad_norm_(max_norm), or step(..., clip_grad_norm=),")
        return total_norm([grad for grad in grads if grad.numel()], norm_type)

    def clip_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down to a norm of at most `max_norm`; return the norm before.

        As `torch.nn.utils.clip_grad_norm_`, which divides by norm + 1e-6.
        """
        check_limit("max_norm", max_norm)
        total = self.norm(norm_type)
        self.scale_(clip_factor(max_norm, total))
        return total

    def is_finite(self) -> bool:
        """Whether no gradient holds an inf or a nan.

        Raises:
            RuntimeError: these are a rank's part of a Pipe's gradients.
        """
        slots = self._live.filled()
        refuse_verdict(self.keys())
        flags: dict[torch.device, list[Tensor]] = {}  # one wait for each device
        for _, grad in slots:
            flags.setdefault(grad.device, []).append(torch.isfinite(stored_entries(grad)).all())
        return all(bool(torch.stack(device_flags).all()) for device_flags in flags.values())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GradStore:
        """Hold the gradients that are there on another device or in another type from now on; returns the store.

        `apply` and `assign` bring each back to its parameter. What is added to a gradient is added where it is held,
        half precision again in float32. Complex gradients stay complex, in the precision of `dtype`, but at least
        complex64.

        Raises:
            TypeError: dtype is not a real floating-point type.
        """
        keys = self._live
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"gradients cannot be held in {dtype}. Use a floating-point type, such as torch.float32.")
        of_complex = None if dtype is None else torch.promote_types(dtype, torch.complex64)
        for slot, grad in keys.filled():
            slot.sum = grad.to(device, of_complex if grad.is_complex() else dtype)
        return self

    def clear(self) -> None:
        """Forget all gradients."""
        self._live.clear()

    # ------------------------------------------------------------------------------------------------ by their names

    def state_dict(self) -> dict[str, Tensor]:
        """The gradients by name, to save with a checkpoint in mid-sum; not copied, as those of a module are not.

        A parameter of several names is there once, under its first. Those without a gradient are not there.

        Raises:
            ValueError: a gradient of a parameter without a name.
        """
        names = self._live.first_names()
        unnamed = [param for param in self.keys() if id(param) not in names]
        if unnamed:
            raise ValueError(
                f"{len(unnamed)} of the {len(self)} gradients have no name (the first of shape "
                f"{list(unnamed[0].shape)}). Make the store of named parameters: GradStore(module)."
            )
        return {names[id(param)]: grad for param, grad in self.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy gradients by name in place of all that are there; the others are absent afterwards.

        Raises:
            KeyError, TypeError, ValueError: as `add_`, but each may be on any device; nothing is loaded then.
            ValueError: two are of one parameter, under two of its names.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is {shown(state)}. Give a dict of gradients by name, as from state_dict().")
        slots = [self._slot(name) for name in state]
        names = {id(slot.param): name for name, slot in zip(state, slots, strict=True)}
        for name, slot in zip(state, slots, strict=True):
            if names[id(slot.param)] != name:
                raise ValueError(
                    f"{name!r} and {names[id(slot.param)]!r} are one parameter, and the state has a gradient under "
                    "each. Give one, or their sum."
                )
        grads = [
            grad.to(slot.param.device) if isinstance(grad, Tensor) else grad
            for slot, grad in zip(slots, state.values(), strict=True)
        ]
        for slot, grad in zip(slots, grads, strict=True):
            check_grad(slot.param, grad)
        self.clear()
        for slot, grad in zip(slots, grads, strict=True):
            slot.put(grad.clone())

    # -------------------------------------------------------------------------------------------------- where they go

    def assign(self, mode: str = "add") -> None:
        """Move all gradients to their parameters' `.grad`, and empty the store.

        Args:
            mode: "add" to what is there, as backward() does, or "set".
        """
        if mode not in ("add", "set"):
            raise ValueError(f"mode is {mode!r}. Use 'add' or 'set'.")
        for slot, grad in list(self._live.filled()):
            param = slot.param
            total = grad if mode == "set" or param.grad is None else plus(param.grad, grad)
            param.grad = as_grad_of(param, total.to(param.device))
        self.clear()

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer make one step with these gradients, then empty the store. `.grad` is None afterwards.

        If the optimizer fails the store keeps its gradients.

        Raises:
            RuntimeError: the store is empty, and the optimizer has parameters to train. (Those of a Pipe over ranks may
                have no gradient on one rank.)
            ValueError: the optimizer does not hold one of the parameters, or `.grad` of one of its parameters is set,
                which the step would use too.
        """
        grads = dict(self._live.filled())
        check_optimizer(optimizer)
        params = {id(param): param for param in params_of(optimizer)}
        trained = [param for param in params.values() if param.requires_grad and param.numel()]
        if not grads and trained and not names_of_parts(trained):
            raise RuntimeError(
                "the GradStore is empty: there is nothing to step with. It was applied already, or nothing was added: "
                "run a backward pass first."
            )
        foreign = [slot.param for slot in grads if id(slot.param) not in params]
        if foreign:
            raise ValueError(
                f"the optimizer does not hold {len(foreign)} of the {len(grads)} parameters in the store, the first of "
                f"shape {list(foreign[0].shape)}. Give it all of them, or pop() those that stay as they are."
            )
        stale = [param for param in params.values() if param.grad is not None]
        if stale:
            raise ValueError(
                f"{len(stale)} parameters of the optimizer have a .grad already (the first of shape "
                f"{list(stale[0].shape)}), which the step would use too. Call optimizer.zero_grad(), or "
                "store.assign('add') and optimizer.step()."
            )
        self.assign("set")
        try:
            optimizer.step()
        except BaseException:
            for slot, grad in grads.items():
                slot.put(grad)
            raise
        finally:
            optimizer.zero_grad(set_to_none=True)

    def _slot(self, key: GradKey) -> GradientSum:
        return self._live.find(key)

    @property
    def _live(self) -> Keys:
        if self._moved:
            raise ValueError("this GradStore was merged into another one and is empty for good. Make a new one.")
        return self._keys

    def _move_grads(self) -> None:
        """Move `.grad` of all parameters here, or nothing if one is no gradient."""
        pairs = [(slot, grad) for slot in self._keys.slots.values() if (grad := slot.param.grad) is not None]
        for slot, grad in pairs:
            check_grad(slot.param, grad)
        seen: set[int] = set()
        for slot, grad in pairs:
            slot.put(_owned(grad, seen))
            slot.param.grad = None


def _owned(grad: Tensor, seen: set[int]) -> Tensor:
    """The gradient, or a copy where another tensor shares its memory.

    DistributedDataParallel's gradients can be views of a bucket, even of a whole one, which it writes again.
    """
    if grad.is_sparse:
        return grad
    storage = grad.untyped_storage()
    is_shared = grad._is_view() or storage.nbytes() != grad.numel() * grad.element_size() or storage.data_ptr() in seen
    seen.add(storage.data_ptr())
    return grad.clone() if is_shared else grad
