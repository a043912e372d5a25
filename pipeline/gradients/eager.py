"""Updates of parameters during the backward: each once, as soon as its gradient is whole, which is then freed.

    gradient of p is whole --> EagerStep.take(p, grad) --> clip --> optimizer on p alone, or rule(p, grad)
    the backward has ended --> finish                       what is left; who had no gradient

    clip "two_pass"     first a run that only takes norms; clip_to; then the run that updates

execution/final_gradients.py tells when a gradient of a Pipe is whole; entry/eager_backward.py does for any module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeline.common.arguments import check_flags, check_limit, shown
from pipeline.common.cadence import Cadence
from pipeline.common.errors import message_of
from pipeline.common.interrupts import firm
from pipeline.gradients.clip import clip_factor, norm_of
from pipeline.gradients.per_parameter import check_separable, groups_of, params_of, step_one
from pipeline.gradients.slot import as_grad_of

Rule: TypeAlias = Callable[[Tensor, Tensor], Any]
CLIPS = (None, "value", "per_parameter", "two_pass")
_TORN = (
    "the step before has failed half-way: some parameters are updated and some are not ({}). Load a checkpoint "
    "(optimizer.load_state_dict does), or call acknowledge_torn_step() of the EagerUpdate to go on with what is there."
)


class EagerUpdate:
    """Updates each parameter during the backward, as soon as its gradient is whole; the gradient is then freed.

    Give it to `pipe.step` in the optimizer's place, or to `eager_backward` with any loss. The result is that of the
    ordinary step, to the bit. The optimizer keeps its role: its groups, schedulers and state_dict are those of
    ordinary training, and either kind of step may follow the other. docs/gradients.md says what this saves, and when.

    Args:
        update: an optimizer that treats each parameter by itself, or a rule(param, grad), called once for each
            parameter without gradients; it writes the parameter in place.
        clip: None; "value": each entry to at most clip_value; "per_parameter": each gradient to a norm of at most
            max_norm; "two_pass": all gradients to a norm of max_norm, as `torch.nn.utils.clip_grad_norm_`, at the price
            of a second run of forward and backward.
        clip_value: for "value".
        max_norm: for the others.
        separable: of an optimizer that is not torch's: it treats each parameter by itself.

    Raises:
        TypeError: update is neither an optimizer nor callable.
        ValueError: an optimizer that looks at several parameters at once; arguments that do not go together; a norm
            over all gradients in one pass, which is known only when the last gradient is there.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline import EagerUpdate, Pipe
        >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [1, 1], chunks=2)
        >>> update = EagerUpdate(torch.optim.AdamW(pipe.parameters(), lr=0.1))
        >>> step = pipe.step(torch.ones(4, 2), torch.ones(4, 1), loss_fn=nn.MSELoss(), optimizer=update)
        >>> [parameter.grad for parameter in pipe.parameters()]
        [None, None, None, None]
    """

    def __init__(
        self,
        update: torch.optim.Optimizer | Rule,
        clip: str | None = None,
        clip_value: float | None = None,
        max_norm: float | None = None,
        *,
        separable: bool = False,
    ) -> None:
        if not isinstance(update, torch.optim.Optimizer):
            _check_rule(update)
        check_flags(separable=separable)
        _check_clip(clip, clip_value, max_norm)
        self.clip, self.clip_value, self.max_norm = clip, clip_value, max_norm
        self.optimizer = update if isinstance(update, torch.optim.Optimizer) else None
        """The optimizer; None for a rule."""
        self._update = update
        self._groups: dict[int, dict[str, Any]] = {}  # of the optimizer, by the parameter's id
        self._torn = ""
        self._torn_state: object = None  # the optimizer's then; loading puts another in its place
        self._cadence = Cadence()  # of backwards outside a step
        self.without_gradient: list[Tensor] = []
        """The parameters of the optimizer that had no gradient in the last step and were not updated."""
        if self.optimizer is not None:
            check_separable(self.optimizer, separable)

    def __repr__(self) -> str:
        kind = "a rule" if self.optimizer is None else type(self.optimizer).__name__
        limit = self.clip_value if self.clip == "value" else self.max_norm
        return f"EagerUpdate({kind}, clip={self.clip!r}{'' if self.clip is None else f' to {limit}'})"

    @property
    def is_torn(self) -> bool:
        """Whether a step has failed half-way and was not acknowledged, nor the optimizer's state loaded since."""
        return bool(self._torn) and getattr(self.optimizer, "state", None) is self._torn_state

    def acknowledge_torn_step(self) -> None:
        """Go on after a step that failed half-way, with the parameters as they are."""
        self._torn, self._torn_state = "", None

    @property
    def params(self) -> list[Tensor]:
        """All parameters of the optimizer; none for a rule, which has no list."""
        return [] if self.optimizer is None else params_of(self.optimizer)

    @property
    def needs_two_runs(self) -> bool:
        """Whether the norm over all gradients is needed before the first update."""
        return self.clip == "two_pass"

    def get_ready(self) -> None:
        """Begin a step.

        Raises:
            RuntimeError: an earlier step is torn; step hooks of the optimizer.
        """
        if self.is_torn:
            raise RuntimeError(_TORN.format(self._torn))
        self.acknowledge_torn_step()  # by a state that was loaded
        self._groups = {} if self.optimizer is None else groups_of(self.optimizer)

    @contextmanager
    def guarded(self, step: EagerStep, alone: bool = True) -> Iterator[None]:
        """Within: a failure after an update leaves the step torn. `alone`: no other process updates its own."""
        try:
            yield
        except BaseException as error:
            if step.updated or not alone:
                counts = f"{len(step.updated)} were updated here" + ("" if alone else ", others perhaps on other ranks")
                self._torn = f"{counts}; then {type(error).__name__}: {message_of(error).partition(chr(10))[0]}"
                self._torn_state = getattr(self.optimizer, "state", None)
            raise

    def holds(self, param: Tensor) -> bool:
        """Whether this optimizer or rule updates the parameter."""
        return isinstance(param, nn.Parameter) if self.optimizer is None else id(param) in self._groups

    def apply(self, param: Tensor, grad: Tensor) -> None:
        """Update one parameter."""
        if isinstance(self._update, torch.optim.Optimizer):
            step_one(self._update, self._groups[id(param)], param, grad)
            return
        with torch.no_grad():
            self._update(param, grad)

    def validates(self) -> bool:
        """Count a backward outside a step. Returns whether it is to run the expensive checks."""
        return self._cadence.next()


class EagerStep:
    """A step: one run of forward and backward, or two, of which the first only takes norms.

    Args:
        update: takes the gradients.
        names: of parameters, by id, in order. Those of them that are not updated count in the norm all the same.

    Attributes:
        only_norms: whether this run updates nothing.
        updated: the ids of the parameters that were.
        external: (leaf, gradient) of leaves that are neither updated nor named.
    """

    def __init__(self, update: EagerUpdate, names: Mapping[int, str]) -> None:
        self.update = update
        self.names = names
        self.only_norms = update.needs_two_runs
        self.updated: set[int] = set()
        self.external: list[tuple[Tensor, Tensor]] = []
        self._max_norm = inf if update.max_norm is None else update.max_norm
        self._factor: Tensor | None = None
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}  # by the parameter's id: it, and its gradient's
        self._lock = threading.Lock()

    @property
    def norms(self) -> list[tuple[str, Tensor]]:
        """The norms of gradients, and the names of their parameters, in order; "" of those without a name."""
        keys = [key for key in {**self.names, **self._norms} if key in self._norms]
        return [(self.names.get(key, ""), self._norms[key][1]) for key in keys]

    def clip_to(self, total: Tensor) -> None:
        """End the run that takes norms, with that of all gradients. The next one updates, with clipped gradients."""
        self._factor = clip_factor(self._max_norm, total)
        self.only_norms = False
        self.external.clear()

    def take(self, owner: Tensor, grad: Tensor) -> None:
        """Take a whole gradient: update the parameter, once; or keep it for the leaf.

        Raises:
            RuntimeError: it was taken in this run; or its norm is not known in time.
        """
        with self._lock:
            name, is_held = self.names.get(id(owner)), self.update.holds(owner)
            if id(owner) in (self._norms if self.only_norms else self.updated):
                raise RuntimeError(
                    f"late gradient for {f'{name!r}' if name else 'a parameter'} of shape {list(owner.shape)}: its "
                    "gradient was used already in this step, without this part. x was computed with "
                    "it, or a layer ran a backward of its own (a reentrant checkpoint): use checkpoint_blocks or "
                    "use_reentrant=False, or the optimizer itself."
                )
            if not is_held and name is None:
                self._refuse_unknown_norm(owner)
                self.external.append((owner, grad))
            elif self.only_norms:
                self._norms[id(owner)] = owner, norm_of(as_grad_of(owner, grad))
            elif is_held:
                self._refuse_unclipped(owner)
                firm()
                self.updated.add(id(owner))
                self.update.apply(owner, self._clipped(as_grad_of(owner, grad)))

    def _refuse_unknown_norm(self, owner: Tensor) -> None:
        if self.only_norms and owner.grad_fn is not None:
            raise RuntimeError(
                "x was computed from something that requires a gradient, whose norm is known only when the backward "
                f"goes on from x; clip={self.update.clip!r} needs all norms before. Make what computes x a layer of "
                "the model, give x.detach(), or step with the optimizer itself."
            )

    def _refuse_unclipped(self, owner: Tensor) -> None:
        if self._factor is not None and id(owner) not in self._norms:
            raise RuntimeError(
                f"a parameter of shape {list(owner.shape)} got a gradient in the second run only, so it is not in the "
                "norm of clip='two_pass': a layer runs a backward of its own, which the first run did not reach. Let "
                "the layer's forward record its graph, or step with the optimizer itself."
            )

    def take_grads(self, params: Iterable[Tensor]) -> None:
        """Take the `.grad` of each that has one; it is None then."""
        for param in params:
            if param.grad is not None:
                grad, param.grad = param.grad, None
                self.take(param, grad)

    def _clipped(self, grad: Tensor) -> Tensor:
        update, factor = self.update, self._factor
        if update.clip == "value":
            assert update.clip_value is not None  # checked
            grad = grad.coalesce() if grad.is_sparse else grad
            bound = float(update.clip_value)
            (grad._values() if grad.is_sparse else grad).clamp_(-bound, bound)
        elif update.clip == "per_parameter":
            factor = clip_factor(self._max_norm, norm_of(grad))
        return grad if factor is None else grad.mul_(factor.to(grad.device))

    def finish(self) -> None:
        """Note that the run has succeeded, and which parameters it left as they were."""
        self.update.without_gradient = [
            param for param in self.update.params if id(param) not in self.updated and param.requires_grad
        ]


def check_free(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if code other than an EagerUpdate uses these parameters' gradients.

    Raises:
        RuntimeError: a `.grad` is set; another library's hook would see it, or see none.
    """
    for name, param in named:
        if param.grad is not None and param.numel():  # an empty one stands for none of a rank's
            raise RuntimeError(
                f"{name} has a .grad already, which this step would not use. An EagerUpdate lets each gradient go as "
                "soon as it is used: call zero_grad() first, or use the optimizer itself to add to what is there."
            )
        if param._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"{name} has post-accumulate hooks (register_post_accumulate_grad_hook), which wait for a .grad that "
                "an EagerUpdate never leaves: another optimizer that steps in the backward, say. Remove them."
            )


def _check_rule(rule: Any) -> None:
    callee = rule.func if isinstance(rule, partial) else rule
    if isinstance(callee, type) and issubclass(callee, torch.optim.Optimizer):
        raise TypeError(f"update is {shown(callee)}. Give an object: {callee.__name__}(pipe.parameters(), lr=0.01).")
    if not callable(rule) or isinstance(rule, type | nn.Module):
        raise TypeError(f"update is {shown(rule)}. Give a torch optimizer, or a rule: callable(param, grad).")
    try:
        signature(rule).bind(None, None)
    except TypeError as error:
        raise TypeError(f"update is {shown(rule)}, which is no rule(param, grad): {error}.") from None
    except ValueError:  # one that C has, of which nobody knows
        pass


def _check_clip(clip: str | None, clip_value: float | None, max_norm: float | None) -> None:
    if clip not in CLIPS:
        raise ValueError(
            f"clip is {clip!r}. Use None, 'value', 'per_parameter' or 'two_pass'. A norm over all gradients is known "
            "only when the last of them is there, when most have been used and let go: 'two_pass' runs forward and "
            "backward twice."
        )
    wanted = {"clip_value": clip == "value", "max_norm": clip in ("per_parameter", "two_pass")}
    for name, value in (("clip_value", clip_value), ("max_norm", max_norm)):
        if wanted[name] != (value is not None):
            raise ValueError(
                f"{name} is {value}, but clip is {clip!r}. Give clip_value for 'value', max_norm for 'per_parameter' "
                "and for 'two_pass', which clips by the norm over all gradients."
            )
        if value is not None:
            check_limit(name, value)
