"""The arguments of a step or an evaluation, and which of them exclude each other.

    StepArguments(x, target, loss_fn, ...).check()     TypeError, ValueError: what is wrong, the value, what to give
                                          .options     on which all ranks must agree
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.common.arguments import check_flags, check_limit, check_optimizer, check_scaler
from pipeline.data.loss import LossFn, name_of
from pipeline.gradients.eager import EagerUpdate
from pipeline.gradients.partial import refuse_lbfgs, refuse_sharded
from pipeline.gradients.per_parameter import params_of

_ANEW = (
    "It is another model's, or was made before parameters were replaced (load_state_dict(assign=True), a cast that "
    "makes new ones): make it of pipe.parameters(). What is not to be trained: requires_grad_(False)."
)


class StepArguments(NamedTuple):
    """The arguments of a step, see `Pipe.step`; of an evaluation the first six, as it has no gradients."""

    x: Any
    target: Any
    loss_fn: LossFn
    loss_reduction: str | None
    outputs: bool
    trace: bool
    optimizer: torch.optim.Optimizer | EagerUpdate | None = None
    clip_grad_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    grads: str = "param"
    is_part: bool = False  # the mini-batch is one of several, whose losses are added up

    @property
    def options(self) -> dict[str, object]:
        """Those that all ranks must give alike."""
        optimizer = self.optimizer if isinstance(self.optimizer, EagerUpdate) else type(self.optimizer).__name__
        return {
            "loss_fn": name_of(self.loss_fn), "loss_reduction": self.loss_reduction,
            "outputs": self.outputs, "trace": self.trace,
            "clip_grad_norm": self.clip_grad_norm, "grads": self.grads, "scaler": type(self.scaler).__name__,
            "optimizer": optimizer,
        }  # fmt: skip

    def check(self) -> None:
        """
        Raises:
            TypeError, ValueError: arguments that are invalid, or that exclude each other.
        """
        optimizer, clip, scaler = self.optimizer, self.clip_grad_norm, self.scaler
        check_flags(outputs=self.outputs, trace=self.trace)
        if self.grads not in ("param", "store"):
            raise ValueError(f"grads is {self.grads!r}. Use 'param' or 'store'.")
        if optimizer is not None and not isinstance(optimizer, EagerUpdate):
            check_optimizer(optimizer)
            refuse_sharded(optimizer)
        if scaler is not None:
            check_scaler(scaler)
        if clip is not None:
            check_limit("clip_grad_norm", clip)
        if self.grads == "store" and optimizer is not None:
            raise ValueError(
                "grads='store' keeps the gradients for you, so no optimizer can step. Use store.apply(optimizer)."
            )
        if isinstance(optimizer, EagerUpdate) and clip is not None:
            raise ValueError(
                "clip_grad_norm clips by the norm over all gradients, which an EagerUpdate does not know before its "
                f"first update. Use EagerUpdate(..., clip='two_pass', max_norm={clip})."
            )
        if isinstance(optimizer, EagerUpdate) and scaler is not None:
            raise ValueError(
                "a GradScaler leaves the whole step out where one gradient overflows, and an EagerUpdate has used the "
                "others by then. Use bfloat16, which needs no scaler, or the optimizer itself."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            refuse_lbfgs(optimizer)  # over ranks a closure would be refused too
            raise ValueError(
                "LBFGS evaluates the loss several times a step: write a closure around pipe.step(x, y, loss_fn=f)."
            )
        if clip is not None and optimizer is None and self.grads == "param":
            raise ValueError(
                "clip_grad_norm without an optimizer would clip what .grad will hold, which you may still add to. Call "
                "pipe.clip_grad_norm_ before your own optimizer step, or give optimizer=... or grads='store'."
            )
        if scaler is not None and optimizer is None and clip is not None:
            raise ValueError("clip_grad_norm with a scaler needs the optimizer, which unscales: give optimizer=...")

    def check_holds(self, named: Sequence[tuple[str, Tensor]], inputs: Iterable[Tensor]) -> None:
        """Refuse an optimizer that would drop the gradients: of another model, or of parameters that were replaced.

        One with other tensors beside the Pipe's is fine (a loss's own parameters); so is one without some of its.

        Args:
            named: the Pipe's parameters, of this process.
            inputs: the tensors of x, which get gradients in a step, too.

        Raises:
            ValueError: it has none of them; or, in place of some, others of their shapes.
        """
        optimizer = self.optimizer.optimizer if isinstance(self.optimizer, EagerUpdate) else self.optimizer
        if optimizer is None:  # a rule gets them all
            return
        optimizer_params = {id(param): param for param in params_of(optimizer)}
        lacking = {
            id(param): (name, param) for name, param in named
            if param.requires_grad and id(param) not in optimizer_params
        }  # fmt: skip
        if not lacking:
            return
        of_loss = self.loss_fn.parameters() if isinstance(self.loss_fn, nn.Module) else ()
        known_ids = {id(tensor) for tensor in (*inputs, *of_loss)}.union([id(param) for _, param in named])
        foreign = [param for key, param in optimizer_params.items() if key not in known_ids and param.requires_grad]
        if not optimizer_params.keys() & known_ids:
            if optimizer_params and not any(param.numel() for param in optimizer_params.values()):
                return  # an empty one stands for none of a rank's: what this optimizer steps is on other ranks
            raise ValueError(
                f"the optimizer has none of the Pipe's parameters, so their gradients would be lost. {_ANEW} Over "
                "ranks give it nn.Parameter(torch.empty(0, 0)) where all that it steps is on other ranks."
            )
        if foreign and Counter([param.shape for param in foreign]) <= Counter([p.shape for _, p in lacking.values()]):
            shapes = [param.shape for param in foreign]
            names = [name for name, param in lacking.values() if param.shape in shapes]
            raise ValueError(
                f"the optimizer has {len(foreign)} parameters that are not the Pipe's, and none of {names[:5]}, which "
                f"have their shapes: gradients would be lost. {_ANEW}"
            )
