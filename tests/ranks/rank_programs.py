"""What do calls give over ranks, between which layers begin to do other things? A job for test_rank_programs.py.

    program (programs.py) --over the ranks--> what this rank knows after each call; or the call that is refused
                          --in one process--> all there is to know, the same to rounding
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from law_check import row_loss, target_of
from one_and_many import Found, differences, state_of
from programs import Program, case_of, changed, joined_loss, near
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline import EagerUpdate, GradStore, Pipe

SEED = 23
Votes = dict[int, bool]  # by the number of a call: whether all ranks take part in its second backward


class Ran:
    """What a process knew after each call, and the words by which the last one was refused ("": none was)."""

    def __init__(self) -> None:
        self.known: list[tuple[int, Found]] = []
        self.refusal = ""


def compare(program: Program) -> tuple[list[str], str, str]:
    """What this rank knows otherwise than one process; the refusal on this rank, and that in one process."""
    votes: Votes = {}
    here, alone = run(program, True, votes), run(program, False, votes)
    wrong = [
        f"after change {number}, {program.changes[number]}: {words}"
        for (number, found), (_, known) in zip(here.known, alone.known) for words in differences(found, known, near)
    ]  # fmt: skip
    return wrong, here.refusal, alone.refusal


def run(program: Program, over_ranks: bool, votes: Votes) -> Ran:
    """Run a program. `votes` are made over ranks, and kept to in one process."""
    case, ran = case_of(program.ways), Ran()
    where: dict[str, Any] = {"timeout": 20.0} if over_ranks else {"devices": ["cpu"] * len(program.balance)}
    pipe = Pipe(case.model, program.balance, program.chunks, **program.options, **where)
    rank = dist.get_rank() if over_ranks else 0
    for number, change in enumerate(program.changes):
        if change[0] not in CALLS:
            changed(case.model, change, pipe)
            continue
        torch.manual_seed(SEED + number + 1000 * rank)  # rank 0's seed is that of one process
        random.seed(number)
        numpy.random.seed(number)
        name, rows, needs_grad = change
        x = case.make_input(rows).requires_grad_(needs_grad)
        try:
            found = CALLS[name](pipe, x, lambda own, number=number: _vote(votes, number, own, over_ranks))
        except Exception as error:
            ran.refusal = f"{type(error).__name__}: {error}"
            return ran
        drawn = {} if rank else {"torch's default generator": torch.get_rng_state()}
        counts = {f"calls of {name}": layer.calls for name, layer in pipe.named_children() if hasattr(layer, "calls")}
        ran.known.append((number, {**_copied(found), "x": x.grad, **drawn, **counts, **state_of(pipe)}))
    return ran


def _vote(votes: Votes, number: int, own: bool, over_ranks: bool) -> bool:
    """Whether all ranks have gradients that depend on parameters: a rank without any takes no part (docs/ranks.md)."""
    if over_ranks:
        count = torch.tensor([int(own)])
        dist.all_reduce(count, dist.ReduceOp.MIN)
        votes[number] = bool(count)
    return votes.get(number, own)


def _copied(found: Found) -> Found:
    return {name: pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value) for name, value in found.items()}


# --------------------------------------------------------------------------------------------------------------- calls

Call = Callable[[Pipe, Tensor, Callable[[bool], bool]], Found]


def _forward(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool]) -> Found:
    outputs = pipe(x)
    loss = joined_loss(outputs)
    if loss.requires_grad:
        loss.backward()
    return {"outputs": outputs, "loss": loss}


def _without_gradients(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool]) -> Found:
    with torch.no_grad():
        return {"outputs": pipe(x)}


def _penalty(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool]) -> Found:
    """The squared norm of all gradients goes backward."""
    loss = joined_loss(pipe(x))
    trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    if not all_have(loss.requires_grad and bool(trained)):
        return {}
    grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    if not all_have(any(grad is not None and grad.requires_grad for grad in grads)):
        return {}
    norm = pipe.dot(grads, grads)
    norm.backward()
    return {"norm": norm}


def _step(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool], **how: Any) -> Found:
    step = pipe.step(x, target_of(len(x)), loss_fn=row_loss("mean"), **how)
    if isinstance(step.grads, GradStore):
        step.grads.assign()
    return {"loss": step.loss, "grad_norm": step.grad_norm}


def _evaluate(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool]) -> Found:
    return {"loss": pipe.evaluate(x, target_of(len(x)), loss_fn=row_loss("mean")).loss}


def _by_optimizer(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool]) -> Found:
    pipe.zero_grad()
    optimizer = torch.optim.SGD(pipe.parameters(), 0.05)
    return _step(pipe, x.detach(), all_have, optimizer=optimizer, clip_grad_norm=0.3)


def _eagerly(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool]) -> Found:
    pipe.zero_grad()
    return _step(pipe, x.detach(), all_have, optimizer=EagerUpdate(torch.optim.SGD(pipe.parameters(), 0.05)))


def _to_a_store(pipe: Pipe, x: Tensor, all_have: Callable[[bool], bool]) -> Found:
    return _step(pipe, x, all_have, grads="store")


CALLS: dict[str, Call] = {
    "forward": _forward, "no_grad": _without_gradients, "penalty": _penalty, "step": _step, "evaluate": _evaluate,
    "optimizer": _by_optimizer, "eager": _eagerly, "store": _to_a_store,
}  # fmt: skip
