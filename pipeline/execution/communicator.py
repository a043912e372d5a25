"""The communicator: the processes that run a call together.

    with communicator:         within, a failure of one process fails the call on all
        open                   all make the same call, and get its seed
        at ...                 the action that runs
        agree                  the call took place on all processes, or on none
        close                  all have made their step

    communicator.topology      the stages of this process
                .exchange      what travels: values between stages, the output and sums to everyone
                .gradients     a parameter's whole gradient, from those of the stages that read it
                .averager      the means of gradients over replicas; None: there are none

The classes here are those of a process that has every stage: nobody is to be asked, and everything is here. Over ranks
each has a subclass that answers all of it anew (distributed/communicator.py and beside it). With replicas, the one of
distributed/data_parallel/communicator.py stands around either: it has the other's parts, and an averager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from pipeline.common.places import Place
from pipeline.data.pytrees import Activations, Grads, add_grads
from pipeline.data.values import Values
from pipeline.execution.mailbox import Mailbox
from pipeline.execution.trace import Span
from pipeline.gradients.clip import joined_norm, total_norm
from pipeline.recompute.randomness import draw_seed
from pipeline.transports.local import Local
from pipeline.transports.message import Message
from scheduler import Action, Event

StageGrad: TypeAlias = tuple[int, Tensor, Tensor]  # a stage, a parameter it reads, its gradient there
Pair: TypeAlias = tuple[Tensor, Tensor]  # a parameter, or another leaf, and its gradient
Describe: TypeAlias = Callable[[bool], Mapping[str, str]]  # with or without values -> descriptions, by name


class CommonTensors(NamedTuple):
    """Tensors of a call that must be the same on all ranks.

    Attributes:
        mini_batch: the same to the bit. Where it is on an accelerator, `agree` finds out.
        output_grads: those with which a backward begins: the same but for rounding, as `agree` finds out.
        words: the error where they are not: formatted with the number of the gradient, and what each rank has.
    """

    mini_batch: Sequence[Tensor] = ()
    output_grads: Grads = ()
    words: str = (
        "the gradients of the output differ between the ranks, in its tensor {}: {}. Every rank computes the loss, and "
        "all must compute the same: give all the same targets and weights, and the same seed to generators that the "
        'loss draws from; or let the last rank alone compute it, with pipe(x, output="last")'
    )


class Verdict(NamedTuple):
    """The facts on which all processes of a step agree.

    Attributes:
        loss: of the mini-batch. None: no rank computed one.
        divisor: divides the summed gradients. None: they stay as they are.
        reached: whether any process has a gradient.
        hooks: whether any process has hooks on gradients. The step has not taken place until they have run.
        metrics: of the mini-batch. Given by the process of the last stage; `agree` returns them everywhere.
    """

    loss: Tensor | None
    divisor: Tensor | None
    reached: bool
    hooks: bool = False
    metrics: Mapping[str, Tensor] = {}

    @property
    def value(self) -> Tensor:
        """The loss, as all have it once they agree."""
        assert self.loss is not None  # the last stage's process has it
        return self.loss


# ----------------------------------------------------------------------------------------------------------- the parts


class Topology:
    """The stages of this process: all.

    Attributes:
        nothing: a leaf for a process that has no parameters.
    """

    nothing: Tensor

    def __init__(self) -> None:
        self.nothing = torch.empty(0, requires_grad=True, device="cpu")

    def has(self, stage: int) -> bool:
        """Whether this process runs a stage."""
        return True

    def is_elsewhere(self, leaf: Tensor) -> bool:
        """Whether this is a parameter of the module that other processes alone have."""
        return False

    def refuse_external(self, leaves: Iterable[Tensor], who: str, stage: int | None = None) -> None:
        """Raise if gradients of these leaves would be lost on other ranks.

        Args:
            leaves: those that `who` read besides its input and the parameters of its modules.
            who: a stage, or the loss.
            stage: its index. None: the loss.
        """


class Exchange:
    """The exchange of values between the processes of a call: everything is here."""

    def mailbox(self, values: Values, places: Mapping[int, Place], transport: Local) -> Mailbox:
        """A mailbox for the values between the action that makes them and the one that reads them."""
        return Mailbox(values, places, transport)

    def broadcast(self, name: str, stage: int, message: Message | None) -> Message:
        """A message from the process of one stage, on all processes.

        Args:
            name: of the message, for errors.
            stage: 0 or -1: the first or the last.
            message: the message, on the process of that stage; else None.
        """
        assert message is not None  # the first stage is here, and the last
        return message

    def gather(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        """The named values of all ranks, on rank 0; None on the others. `agree` must follow."""
        return dict(named)

    def rows(self, value: Any) -> list[Any]:
        """The values of all processes, by rank.

        Args:
            value: what JSON can hold.

        Raises:
            MismatchError: the ranks exchange different things.
        """
        return [value]

    def any(self, condition: bool) -> bool:
        """Whether a condition holds in any process."""
        return any(self.rows(condition))

    def sum_over(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, added in the order of the ranks.

        Args:
            numbers: float64, on the CPU.

        Raises:
            MismatchError: the ranks sum different things.
        """
        return numbers

    def total_norm(self, named: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        """The norm of all processes' gradients as one vector, to the bit as if one process had them all.

        Args:
            named: this process's gradients under the plain module's names; "" for leaves outside the module.
            norm_type: as in torch.nn.utils.clip_grad_norm_.
        """
        return total_norm([grad for _, grad in named], norm_type)

    def joined_norm(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        """The same, from the norm of each gradient."""
        return joined_norm([norm for _, norm in norms], norm_type)

    def share_events(self, events: Sequence[Event], steps: Sequence[Span]) -> tuple[list[Event], list[Span]]:
        """The events that all processes recorded, and the span of each step over all of them, by one clock."""
        return list(events), list(steps)


class Gradients:
    """Whole gradients of parameters that several stages read: all parts are here."""

    def join(self, parts: Sequence[StageGrad]) -> dict[int, Pair]:
        """Whole gradients by the id of their owner: (owner, its stages' sums, added in the order of the stages)."""
        return joined_by_owner(parts)

    def check_alike(self, words: Callable[[Tensor], str], error: str) -> None:
        """Raise if something of a parameter that has copies is not the same of all.

        Args:
            words: from a copy to what it has, in words.
            error: formatted with the names of the parameter, and the ranks that have it.

        Raises:
            MismatchError: it is not.
        """

    def shared(self, pairs: dict[int, Pair]) -> dict[int, Pair]:
        """One tensor for each parameter, wherever it has copies.

        Args:
            pairs: (owner, tensor) of this process, by the owner's id. One for a copy may be left out, or be zeros.

        Raises:
            MismatchError: the tensors of two copies differ.
        """
        return pairs


class Averager(ABC):
    """The means of gradients over replicas of the whole pipeline."""

    @abstractmethod
    def settled(self, stage: int, pairs: Sequence[Pair]) -> None:
        """Note that a stage's last backward has run: its part of these owners' gradients is final."""

    @abstractmethod
    def average(self, pairs: list[Pair], divisor: Tensor | None, waits: bool = False) -> list[Pair]:
        """Make whole gradients the means over the replicas, each divided by its replica's divisor first.

        Args:
            pairs: (owner, whole gradient) of this process; they may be written.
            divisor: of this replica.
            waits: return when all ranks have the means. Else `agree` waits for that.
        """


# ---------------------------------------------------------------------------------------------------- the communicator


class Communicator:
    """The processes that run a call together. The call runs within it as a context; a failure there fails all ranks.

    Attributes:
        topology: the stages of this process.
        exchange: what travels between the processes.
        gradients: adds up what stages computed for one parameter.
        averager: averages gradients over replicas. None: there are none, or this call has no gradients.
        is_alone: whether no other process takes part: this one has every stage, and there are no replicas.
    """

    topology: Topology
    exchange: Exchange
    gradients: Gradients
    averager: Averager | None = None
    is_alone = True

    def __init__(self) -> None:
        self.topology, self.exchange, self.gradients = Topology(), Exchange(), Gradients()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def open(self, words: Describe, draws: bool = True, tensors: CommonTensors = CommonTensors()) -> int:
        """Make sure that all ranks make the same call.

        Args:
            words: descriptions, by name, of what must be equal; called with whether to include the mini-batch's values.
            draws: whether this call draws a seed from torch's default CPU generator.
            tensors: those whose values must be the same, too.

        Returns:
            The seed of the call; 0 if it draws none.

        Raises:
            MismatchError: the ranks make different calls.
        """
        return draw_seed() if draws else 0

    def at(self, action: Action | None) -> None:
        """Note the action that runs next, unless this process is alone. None: those of the phase have run."""

    def share_divisor(self, divisor: Tensor | None) -> Tensor | None:
        """The divisor of a step, which the process of the last stage knows, for updates before `agree`."""
        return divisor

    def compare(self) -> None:
        """Compare now what `agree` would compare later.

        Raises:
            MismatchError: something differs between ranks.
        """

    def agree(self, verdict: Verdict) -> Verdict:
        """Wait for all ranks, and merge their verdicts."""
        return verdict

    def close(self) -> None:
        """Wait until all ranks have made their step. Hooks and optimizers are the user's code and may raise."""

    def again(self, entry: str = "backward") -> Communicator:
        """A communicator for the backward of this call. `entry`: its name in words."""
        return self


def joined_by_owner(parts: Sequence[StageGrad]) -> dict[int, Pair]:
    """The parts of each owner, added in the order in which they stand."""
    sums: dict[int, Pair] = {}
    for _, owner, grad in parts:
        key = id(owner)
        total = add_grads(sums[key][1], grad) if key in sums else grad
        assert total is not None  # because neither part is None
        sums[key] = (owner, total)
    return sums


def share_output(exchange: Exchange, output: Activations | None) -> Activations:
    """The joined output of a call, also on processes that did not compute it.

    Args:
        exchange: reaches them.
        output: on the process of the last stage; else None.
    """
    message = exchange.broadcast("the output", -1, None if output is None else Message.of(output))
    return message.activations
