"""How many messages does a step over ranks send beside those of its plan? Each rank counts its own, by their channels.

    counted("a step")  -->  [2, 2, 2]      this rank's messages beside the plan, in each step that was looked at
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rank_models import even, layered, rows, square
from torch import nn

from pipeline import EagerUpdate, Pipe
from pipeline.common.cadence import validates
from pipeline.distributed.mailbox import RankMailbox
from pipeline.transports import distributed

STEPS = 7  # calls 1, 2, 4, ... look at more; messages are announced at first


def counted(kind: str) -> list[int]:
    """The messages that this rank sends in each later step, beside those of the plan."""
    _, step = KINDS[kind](dist.get_world_size())
    found = []
    with counting() as count:
        for number in range(1, STEPS + 1):
            before = count()
            step()
            if not validates(number):
                found.append(count() - before)
    return found


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Within: how many messages this rank has sent that are in no plan."""
    sent, planned = [0], [0]
    begin_channel, begin_box = distributed._GlooChannel.begin, RankMailbox.begin

    def begin(edge: Any, buffer: Any, sends: bool, extra: bool) -> Any:
        sent[0] += sends
        return begin_channel(edge, buffer, sends, extra)

    def begin_phase(box: Any, phase: int, messages: Any) -> None:
        planned[0] += sum(len(of) for (source, _), of in messages.channels.items() if source == dist.get_rank())
        begin_box(box, phase, messages)

    distributed._GlooChannel.begin, RankMailbox.begin = begin, begin_phase  # type: ignore[method-assign]
    try:
        yield lambda: sent[0] - planned[0]
    finally:
        distributed._GlooChannel.begin, RankMailbox.begin = begin_channel, begin_box  # type: ignore[method-assign]


Made = tuple[Pipe, Callable[[], object]]


def stepped(size: int, optimized: bool = False, eager: dict[str, Any] | None = None, **settings: Any) -> Made:
    pipe = Pipe(layered(8), even(8, size), 2)
    if optimized:
        settings["optimizer"] = torch.optim.SGD(pipe.parameters(), lr=0.01)
    if eager is not None:
        settings["optimizer"] = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.01), **eager)
    return pipe, lambda: pipe.step(rows(4), rows(4), loss_fn=square, **settings)


def tied(size: int) -> Made:
    """Its first layer and its last have one weight, whose gradient goes to its owner and back."""
    model = layered(8)
    model[7].weight = model[0].weight
    pipe = Pipe(model, even(8, size), 2)
    return pipe, lambda: pipe.step(rows(4), rows(4), loss_fn=square)


def forward(size: int) -> Made:
    pipe = Pipe(layered(8), even(8, size), 2)
    return pipe, lambda: square(pipe(rows(4)), rows(4)).backward()


def hooked(size: int) -> Made:
    pipe, step = stepped(size)
    for parameter in pipe.parameters():
        parameter.register_hook(lambda grad: grad)
    return pipe, step


def evaluated(size: int) -> Made:
    pipe = Pipe(layered(8), even(8, size), 2)
    return pipe, lambda: pipe.evaluate(rows(4), rows(4), loss_fn=square)


def clipped(size: int) -> Made:
    pipe, _ = stepped(size)
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    return pipe, lambda: pipe.clip_grad_norm_(1.0)


def many(size: int) -> Made:
    """Norms of more parameters than go at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(1, 1) for _ in range(200)]) for _ in range(size)]).double()
    pipe = Pipe(model, [1] * size, 2)
    return pipe, lambda: pipe.step(rows(4, 1), rows(4, 1), loss_fn=square, clip_grad_norm=1.0, grads="store")


KINDS: dict[str, Callable[[int], Made]] = {
    "a step": stepped,
    "a step that is traced": lambda size: stepped(size, trace=True),
    "a step with its outputs": lambda size: stepped(size, outputs=True),
    "a step that clips": lambda size: stepped(size, clip_grad_norm=1.0, grads="store"),
    "a step that clips many": many,
    "a step with an optimizer": lambda size: stepped(size, True),
    "a step with an optimizer that clips": lambda size: stepped(size, True, clip_grad_norm=1.0),
    "a step with hooks": hooked,
    "a step with tied weights": tied,
    "an eager step": lambda size: stepped(size, eager={}),
    "an eager step that clips": lambda size: stepped(size, eager={"clip": "two_pass", "max_norm": 1.0}),
    "an evaluation": evaluated,
    "a forward and its backward": forward,
    "clip_grad_norm_": clipped,
}
