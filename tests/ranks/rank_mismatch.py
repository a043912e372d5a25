"""Scripts that are not the same on every rank: what does each rank hear, and is the next right call right?

    mismatch("chunks")  -->  this rank's error, and the loss of a right step after it
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from one_and_many import SEED, in_one_process
from rank_models import even, layered, rows, square
from torch import nn

from pipeline import EagerUpdate, MismatchError, NoChunk, Pipe
from pipeline.distributed import digests as fingerprints

Script = Callable[[int, int], object]  # rank, size


def mismatch(which: str, apart: int) -> tuple[str, bool, float]:
    """(this rank's error in words, whether a right step after it gives the bits of one process, what is drawn then)

    Args:
        which: a key of SCRIPTS.
        apart: the rank that does something else.
    """
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    words = "no error"
    torch.manual_seed(SEED)
    try:
        SCRIPTS[which](rank == apart, size)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    drawn = torch.rand(1).item()
    losses = []
    for pipe in (right(size), in_one_process(layered(8), even(8, size), 3)):
        torch.manual_seed(SEED)
        losses.append(pipe.step(rows(7), rows(7), loss_fn=square).loss)
    return words, torch.equal(*losses), drawn


def right(size: int, **settings: Any) -> Pipe:
    return Pipe(layered(8), even(8, size), 3, **settings)


def stepped(pipe: Pipe, **settings: Any) -> object:
    return pipe.step(rows(7), rows(7), loss_fn=square, **settings)


# ----------------------------------------------------------------------------------------------- how they are built


def balance(odd: bool, size: int) -> object:
    one, *between, other = even(8, size)
    return Pipe(layered(8), [one + odd, *between, other - odd], 3)


def chunks(odd: bool, size: int) -> object:
    return Pipe(layered(8), even(8, size), 3 + odd)


def schedule(odd: bool, size: int) -> object:
    return right(size, schedule="gpipe" if odd else "1f1b")


def checkpoint(odd: bool, size: int) -> object:
    return right(size, checkpoint="never" if odd else "always")


def deferred(odd: bool, size: int) -> object:
    return right(size, deferred_batch_norm=odd)


def shape(odd: bool, size: int) -> object:
    model = layered(8)
    if odd:
        model[4] = nn.Linear(4, 5, device="meta").double().to_empty(device="cpu")  # draws nothing
    return Pipe(model, even(8, size), 3)


def dtype(odd: bool, size: int) -> object:
    model = layered(8)
    if odd:
        model[0].float()
    return Pipe(model, even(8, size), 3)


def tie(odd: bool, size: int) -> object:
    model = layered(8)
    if odd:
        model[7].weight = model[0].weight
    return Pipe(model, even(8, size), 3)


def tied_values(odd: bool, size: int) -> object:
    """One rank has changed its copy of a weight that all have."""
    model = layered(8)
    model[4].weight = model[7].weight = model[0].weight
    pipe = Pipe(model, even(8, size), 3)
    if odd:
        named = dict(pipe.named_parameters(remove_duplicate=False))
        next(named[name] for name in ("0.weight", "4.weight", "7.weight") if name in named).data.add_(1.0)
    return stepped(pipe)


def late_tied_values(odd: bool, size: int) -> object:
    """The same with a Pipe that is built behind a number of calls of another one."""
    earlier = right(size)
    for _ in range(4):
        stepped(earlier)
    return tied_values(odd, size)


# ----------------------------------------------------------------------------------------- ties that are not the same


def later_tie(odd: bool, size: int) -> object:
    """One rank puts a parameter of another's layer into one of its own."""
    model = layered(8)
    pipe = Pipe(model, even(8, size), 3)
    here = {index: isinstance(pipe[index], nn.Linear) for index in (0, 4, 7)}
    if odd:
        own, other = (next(index for index in here if here[index] == is_here) for is_here in (True, False))
        model[own].weight = model[other].weight
    return stepped(pipe)


def _tied(size: int) -> Pipe:
    """All first layers of the ranks, which have two each, hold one weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 * size)]).double()
    for index in range(0, 2 * size, 2):
        model[index].weight = model[0].weight
    return Pipe(model, [1] * (2 * size), 3)


def later_untie(odd: bool, size: int) -> object:
    pipe = _tied(size)
    if odd:
        pipe[2 * torch.distributed.get_rank()].weight = nn.Parameter(rows(4))
    return stepped(pipe)


def later_tie_of_tied(odd: bool, size: int) -> object:
    """One rank puts its copy of a tied weight into one more stage."""
    pipe, own = _tied(size), 2 * torch.distributed.get_rank()
    if odd:
        pipe[own + 1].weight = pipe[own].weight
    return stepped(pipe)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 1, dtype=torch.float64))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.gain


def later_parametrized(odd: bool, size: int) -> object:
    """One rank parametrizes its copy of a tied weight."""
    pipe = _tied(size)
    if odd:
        nn.utils.parametrize.register_parametrization(pipe[2 * torch.distributed.get_rank()], "weight", Gain())
    return stepped(pipe)


def later_shared(odd: bool, size: int) -> object:
    """A parameter joins layers of two ranks, on all ranks."""
    model, gain = layered(8), Gain()
    pipe = Pipe(model, even(8, size), 3)
    for layer in (model[0], model[7]):
        nn.utils.parametrize.register_parametrization(layer, "weight", gain)
    return stepped(pipe)


def assigned(odd: bool, size: int) -> object:
    pipe = _tied(size)
    pipe.load_state_dict(pipe.state_dict(), assign=odd)
    return stepped(pipe)


# -------------------------------------------------------------------------------------------------- what they call


def later_chunks(odd: bool, size: int) -> object:
    pipe = right(size)
    pipe.chunks = 2 if odd else 3
    return stepped(pipe)


def later_schedule(odd: bool, size: int) -> object:
    pipe = right(size)
    pipe.schedule = "gpipe" if odd else "1f1b"
    return stepped(pipe)


def values(odd: bool, size: int) -> object:
    return right(size).step(rows(7, seed=1 + odd), rows(7), loss_fn=square)


def target_values(odd: bool, size: int) -> object:
    return right(size).step(rows(7), rows(7, seed=1 + odd), loss_fn=square)


def shuffled(odd: bool, size: int) -> object:
    """The same rows in another order: no sum over them tells."""
    x = rows(7)
    return right(size)(x.flip(0) if odd else x)


def _third(odd: bool, size: int, call: Callable[[Pipe, torch.Tensor, torch.Tensor], object]) -> object:
    """Three calls with mini-batches 0, 1, 2; at the third, one rank has left one out, with its targets or without."""
    pipe = right(size)
    for index in range(3):
        call(pipe, rows(7, seed=index), rows(7, seed=10 + index + (odd and index == 2)))
    return None


def later_target(odd: bool, size: int) -> object:
    return _third(odd, size, lambda pipe, x, y: pipe.step(x, y, loss_fn=square))


def later_labels(odd: bool, size: int) -> object:
    """Whole numbers, of which a few are not the same."""
    return _third(odd, size, lambda pipe, x, y: pipe.step(x, (y > 0).long(), loss_fn=square))


def later_input(odd: bool, size: int) -> object:
    return _third(odd, size, lambda pipe, x, y: pipe.step(y, x, loss_fn=square))


def later_order(odd: bool, size: int) -> object:
    """The same rows in another order: no sum over all of them tells."""
    pipe = right(size)
    for index in range(3):
        x = rows(7, seed=index)
        pipe.evaluate(x.flip(0) if odd and index == 2 else x, rows(7), loss_fn=square)
    return None


def later_whole(odd: bool, size: int) -> object:
    """What goes to every chunk whole, beside a plain value."""

    def call(pipe: Pipe, x: torch.Tensor, y: torch.Tensor) -> object:
        target = {"y": x, "scale": NoChunk(y[0, 0]), "weight": 2}
        return pipe.step(x, target, loss_fn=lambda out, target: square(out, target["y"] * target["scale"]))

    return _third(odd, size, call)


def later_forward(odd: bool, size: int) -> object:
    return _third(odd, size, lambda pipe, x, y: pipe(y))


def later_evaluate(odd: bool, size: int) -> object:
    with torch.inference_mode():
        return _third(odd, size, lambda pipe, x, y: pipe.evaluate(y.requires_grad_(False), x, loss_fn=square))


def later_eager(odd: bool, size: int) -> object:
    def call(pipe: Pipe, x: torch.Tensor, y: torch.Tensor) -> object:
        update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.0))
        return pipe.step(x, y, loss_fn=square, optimizer=update)

    return _third(odd, size, call)


def other_labels(odd: bool, size: int) -> object:
    """Each rank draws labels by itself; the outputs are the same."""
    generator = torch.Generator().manual_seed(int(odd))

    def call(pipe: Pipe, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(pipe(x), torch.randint(0, 4, (7,), generator=generator)).backward()

    return _third(False, size, call)


def other_scale(odd: bool, size: int) -> object:
    """A loss scaler whose scale is not the same on all ranks."""
    return _third(False, size, lambda pipe, x, y: (square(pipe(x), y) * (1 + odd)).backward())


def scale(odd: bool, size: int) -> object:
    """A checkpoint of the scaler that one rank alone loads, before the third step."""
    pipe, scaler = right(size), torch.amp.GradScaler("cpu", init_scale=8.0)
    for index in range(3):
        if odd and index == 2:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
        pipe.step(rows(7), rows(7), loss_fn=square, scaler=scaler)
    return None


def first_scale(odd: bool, size: int) -> object:
    return stepped(right(size), scaler=torch.amp.GradScaler("cpu", init_scale=4.0 if odd else 8.0))


def other_part(odd: bool, size: int) -> object:
    """Of two outputs, one rank's loss leaves one out."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x * 2

    pipe = Pipe(nn.Sequential(*layered(7), Two()), even(8, size), 3)
    first, second = pipe(rows(7))
    return (first.sum() if odd else first.sum() + second.sum()).backward()


@contextmanager
def late(odd: bool) -> Iterator[None]:
    """As if the tensors of one rank were on an accelerator: their fingerprints come when the call is under way."""
    kept = fingerprints._HostCopy.__init__

    def init(coming: Any, tensor: torch.Tensor) -> None:
        kept(coming, tensor)
        coming.is_on_host = False

    with pytest.MonkeyPatch.context() as patch:
        if odd:
            patch.setattr(fingerprints._HostCopy, "__init__", init)
        yield


def late_target(odd: bool, size: int) -> object:
    with late(odd):
        return later_target(odd, size)


def late_forward(odd: bool, size: int) -> object:
    with late(odd):
        return later_forward(odd, size)


def late_eager(odd: bool, size: int) -> object:
    with late(odd):
        return later_eager(odd, size)


def batch(odd: bool, size: int) -> object:
    pipe = right(size)
    stepped(pipe)
    return pipe.step(rows(7 + odd), rows(7 + odd), loss_fn=square)


def drawn_apart(odd: bool, size: int) -> object:
    """One rank draws a number more, as for a parameter of its own, before all draw their mini-batches."""
    pipe = right(size)
    with torch.random.fork_rng():
        if odd:
            torch.rand(())
        return pipe.step(torch.randn(7, 4, dtype=torch.float64), rows(7), loss_fn=square)


def width(odd: bool, size: int) -> object:
    return right(size).step(rows(7, 4 + odd), rows(7), loss_fn=square)


def batch_count(odd: bool, size: int) -> object:
    """A loader that gives one rank fewer mini-batches."""
    return right(size).step(iter([(rows(7), rows(7))] * (3 - odd)), loss_fn=square)


def data_set_count(odd: bool, size: int) -> object:
    """A data set of which one rank has fewer mini-batches."""
    return right(size).evaluate(iter([(rows(7), rows(7))] * (3 - odd)), loss_fn=square)


def data_set_fails(odd: bool, size: int) -> object:
    """A loader that fails on one rank, behind its first mini-batch."""

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(3):
            if odd and number == 1:
                raise OSError("cannot read shard 1")
            yield rows(7), rows(7)

    return right(size).evaluate(loader(), loss_fn=square)


def data_set_is_empty(odd: bool, size: int) -> object:
    return right(size).evaluate(iter([] if odd else [(rows(7), rows(7))]), loss_fn=square)


def batch_dtype(odd: bool, size: int) -> object:
    x = rows(7)
    return right(size).step(x.float() if odd else x, rows(7), loss_fn=square)


def structure(odd: bool, size: int) -> object:
    return right(size).evaluate((rows(7),) if odd else rows(7), rows(7), loss_fn=square)


def no_target(odd: bool, size: int) -> object:
    return right(size).evaluate(rows(7), None if odd else rows(7), loss_fn=lambda out, *y: out.mean())


def plain_value(odd: bool, size: int) -> object:
    return right(size).evaluate(rows(7), {"y": rows(7), "weight": 2 + odd}, loss_fn=lambda out, y: out.mean())


def entry(odd: bool, size: int) -> object:
    pipe = right(size)
    return pipe.evaluate(rows(7), rows(7), loss_fn=square) if odd else stepped(pipe)


def forward_or_step(odd: bool, size: int) -> object:
    pipe = right(size)
    return pipe(rows(7)) if odd else stepped(pipe)


def other_pipe(odd: bool, size: int) -> object:
    pipes = right(size), right(size)
    return stepped(pipes[odd])


def copied(odd: bool, size: int) -> object:
    """One rank runs a copy, such as an average of its parameters, whose history is its own."""
    pipe = right(size)
    stepped(pipe)
    return stepped(copy.deepcopy(pipe) if odd else pipe)


def no_grad(odd: bool, size: int) -> object:
    with torch.no_grad() if odd else nullcontext():
        return right(size)(rows(7))


def input_grad(odd: bool, size: int) -> object:
    return right(size)(rows(7).requires_grad_(odd)).sum().backward()


def options(odd: bool, size: int) -> object:
    return stepped(right(size), loss_reduction="sum" if odd else "mean")


def loss_function(odd: bool, size: int) -> object:
    return right(size).step(rows(7), rows(7), loss_fn=nn.L1Loss() if odd else nn.MSELoss())


def no_optimizer(odd: bool, size: int) -> object:
    pipe = right(size)
    return stepped(pipe, optimizer=None if odd else torch.optim.SGD(pipe.parameters(), lr=0.1))


def autocast(odd: bool, size: int) -> object:
    with torch.autocast("cpu", torch.bfloat16, enabled=odd):
        return right(size)(rows(7))


def mode(odd: bool, size: int) -> object:
    return stepped(right(size).train(not odd))


def loaded(odd: bool, size: int) -> object:
    """One rank alone loads a state, and evaluates; then all load one and go on, until it does so again."""
    pipe = right(size)
    stepped(pipe)
    state = layered(8).state_dict()
    if odd:
        pipe.load_state_dict(state)
    with pytest.raises(MismatchError, match="the states differ"):
        pipe.evaluate(rows(7), rows(7), loss_fn=square)
    pipe.load_state_dict(state)
    pipe.evaluate(rows(7), rows(7), loss_fn=square)
    stepped(pipe)
    if odd:
        pipe.load_state_dict(state)
    return pipe(rows(7))


def clip(odd: bool, size: int) -> object:
    pipe = right(size)
    pipe(rows(7)).sum().backward()
    return pipe.clip_grad_norm_(1.0 + odd)


def clip_nonfinite(odd: bool, size: int) -> object:
    """One rank alone would raise, and the others scale their gradients by nan."""
    pipe = right(size)
    (pipe(rows(7)) * torch.inf).sum().backward()
    return pipe.clip_grad_norm_(1.0, error_if_nonfinite=odd)


def no_backward(odd: bool, size: int) -> object:
    """One rank forgets the backward, and goes on to the next step."""
    pipe = right(size)
    loss = square(pipe(rows(7)), rows(7))
    if not odd:
        loss.backward()
    return stepped(pipe)


def no_last_backward(odd: bool, size: int) -> object:
    """One rank forgets the backward, and evaluates, as all others do after theirs."""
    pipe = right(size)
    loss = square(pipe(rows(7)), rows(7))
    if not odd:
        loss.backward()
    return pipe.evaluate(rows(7), rows(7), loss_fn=square)


def other_backward(odd: bool, size: int) -> object:
    """Two forwards, whose backwards have another order on one rank."""
    pipe = right(size)
    first, second = pipe(rows(7)).sum(), pipe(rows(8)).sum()
    (second if odd else first).backward()
    return (first if odd else second).backward()


def retain(odd: bool, size: int) -> object:
    """One rank goes back again, where the others go on."""
    pipe = right(size)
    loss = pipe(rows(7)).sum()
    loss.backward(retain_graph=True)
    return loss.backward() if odd else stepped(pipe)


def extra_call(odd: bool, size: int) -> object:
    """One rank evaluates once more than the others, who go on to step."""
    pipe = right(size)
    if odd:
        pipe.evaluate(rows(7), rows(7), loss_fn=square)
    return stepped(pipe)


def moved_buffer(odd: bool, size: int) -> object:
    """One rank changes a buffer that its forward only read, before the backward."""
    pipe = right(size).eval()
    loss = pipe(rows(7)).sum()
    for name, buffer in pipe.named_buffers():
        if odd and name.endswith("running_mean"):
            buffer.add_(1)
    return loss.backward()


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        balance, chunks, schedule, checkpoint, deferred, shape, dtype, tie, tied_values, late_tied_values, later_tie,
        later_untie, later_tie_of_tied, later_parametrized, later_shared, assigned, later_chunks, later_schedule,
        values, target_values, shuffled,
        later_target, later_labels, later_input, later_order, later_whole, later_forward, later_evaluate, later_eager,
        other_labels, other_scale, scale, first_scale, other_part, late_target, late_forward, late_eager, batch,
        drawn_apart, width,
        batch_count, data_set_count, data_set_fails, data_set_is_empty, batch_dtype, structure, no_target, plain_value,
        entry, forward_or_step, other_pipe, copied, no_grad, input_grad, options, loss_function, no_optimizer,
        autocast, mode, loaded,
        clip, clip_nonfinite, no_backward, no_last_backward, other_backward, retain, extra_call, moved_buffer,
    )
}  # fmt: skip
