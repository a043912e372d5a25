"""A Pipe over ranks whose payloads go beside the headers, over gloo groups that stand in for NCCL's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from one_and_many import Make, differences, in_one_process, over_ranks, state_of
from payloads_over_gloo import OverGloo
from rank_models import even, layered, rows, square
from torch import nn

from pipeline.distributed import group as rank_group
from pipeline.transports.payloads import Carrier

Carried = TypeVar("Carried", bound=Carrier)


@contextmanager
def carried_by(make: Callable[[torch.device], Carried]) -> Iterator[list[Carried]]:
    """Within: the Pipe finds a carrier, which is made for the device of this rank."""
    carriers: list[Carried] = []

    def carrier_of(group: Any, device: torch.device) -> Carried:
        carriers.append(make(device))
        return carriers[-1]

    found, rank_group.nccl_of = rank_group.nccl_of, carrier_of  # type: ignore[assignment]
    try:
        yield carriers
    finally:
        rank_group.nccl_of = found


def carried(place: str | None = None) -> AbstractContextManager[list[OverGloo]]:
    """Within: the Pipe finds a carrier, of another place on each rank where none is given."""
    return carried_by(lambda device: OverGloo(place or str(dist.get_rank())))


def trained(schedule: str, stages: int, place: str | None = None) -> tuple[list[str], int]:
    """(what differs from one process after five steps of changing batches, how many payloads came to this rank)"""

    def train(make: Make) -> dict[str, Any]:
        torch.manual_seed(3)
        pipe = make(layered(8), even(8, stages), 4, schedule=schedule)
        stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found: dict[str, Any] = {}
        for step, count in enumerate((8, 8, 12, 8, 11)):
            if step % 2:
                loss = square(pipe(rows(count, seed=step)), rows(count))
                loss.backward()
            else:
                loss = pipe.step(rows(count, seed=step), rows(count), loss_fn=square).loss
            stepper.step()
            stepper.zero_grad()
            found[f"loss {step}"] = loss.detach()
        return {**found, **state_of(pipe)}

    with carried(place) as carriers:
        results = [train(make) for make in (over_ranks, in_one_process)]
    return differences(*results), sum(len(carrier.received) for carrier in carriers)


def tied_ends(layers: int) -> nn.Sequential:
    """A model whose first layer and last have one weight."""
    model = layered(layers)
    model[-1].weight = model[0].weight
    return model


def connected() -> list[int]:
    """The groups for payloads that this rank has made after each kind of call, over ranks whose ends are tied."""
    found = []
    with carried() as carriers:
        pipe = over_ranks(tied_ends(8), even(8, dist.get_world_size()), 4)
        for call in (
            lambda: pipe.full_state_dict(),
            lambda: pipe.evaluate(rows(8), rows(8), loss_fn=square, outputs=True),
            lambda: pipe.step(rows(8).requires_grad_(), rows(8), loss_fn=square, outputs=True, clip_grad_norm=1.0,
                              optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1)),
            lambda: pipe.full_state_dict(),
        ):  # fmt: skip
            call()
            found.append(sum(carrier.connected for carrier in carriers))
    return found


Carried = Callable[[], AbstractContextManager[Any]]


def failing(first: bool, carried: Carried = carried) -> tuple[str, float, list[str]]:
    """Rank 1 raises within a step: (what this rank hears, after how many seconds, what differs in the step after)

    Args:
        first: in the first one, in which devices are connected; the ends are tied, so others wait to be connected.
        carried: within, the Pipe finds a carrier.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with carried():
        pipe = over_ranks(tied_ends(8), even(8, size), 4)
        if not first:
            pipe.step(rows(8), rows(8), loss_fn=square)
        layer = next(module for module in pipe.modules() if isinstance(module, nn.Linear))
        fail = layer.register_full_backward_pre_hook if first else layer.register_forward_pre_hook
        hook = fail(_fail) if rank == 1 else None
        begin = time.monotonic()
        try:
            pipe.step(rows(8), rows(8), loss_fn=square)
            heard = "nothing"
        except Exception as error:
            heard = f"{type(error).__name__}: {error}"
        waited = time.monotonic() - begin
        if hook is not None:
            hook.remove()
        after = _step_after(pipe)
    alone = in_one_process(tied_ends(8), even(8, size), 4)
    return heard, waited, differences(after, _step_after(alone))


def _step_after(pipe: Any) -> dict[str, Any]:
    pipe.zero_grad()
    torch.manual_seed(9)
    loss = pipe.step(rows(8), rows(8), loss_fn=square).loss
    return {"loss": loss, **{name: param.grad for name, param in pipe.named_parameters()}}


def _fail(*_: Any) -> None:
    raise ValueError("a layer's own")
