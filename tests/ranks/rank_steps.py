"""What do training scripts do with `pipe.step` and `pipe.evaluate`? Each function is one, for one_and_many.py.

    pipe.step(x, y, loss_fn=f) --> the loss on every rank, gradients where their parameters are
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from cover import either
from law_models import Apply
from one_and_many import Found, Make, differences, over_ranks, state_of
from rank_entry_points import OPTIMIZERS, piped
from rank_models import even, layered, rows, square
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from pipeline import EagerUpdate, Pipe
from pipeline.distributed import group
from pipeline.distributed.communicator import DistributedCommunicator
from pipeline.distributed.tree import all_to_all
from pipeline.transports.distributed import _GlooChannel


def sizes_change(make: Make, stages: int) -> Found:
    """Batches of 7, 1, 12 and 7 rows, in eval mode where BatchNorm could not take a chunk of one."""
    pipe = piped(make, stages)
    pipe.eval()
    return {f"loss {step}": pipe.step(rows(count, seed=step), rows(count), loss_fn=square).loss
            for step, count in enumerate((7, 1, 12, 7))} | state_of(pipe)  # fmt: skip


class Sequences(nn.Module):
    """[rows, length, 4] -> [rows, length, 4], mixing what stands at different places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + x.mean(1, keepdim=True) + x.flip(1))


def lengths_change(make: Make, stages: int, entry: str) -> Found:
    """Batches whose sequences have another length each time, and whose chunks have other rows."""
    torch.manual_seed(2)
    pipe = make(nn.Sequential(*[Sequences() for _ in range(stages)]).double(), [1] * stages, 3)
    found: Found = {}
    for step, (count, length) in enumerate([(6, 5), (6, 2), (7, 9), (2, 9), (6, 5), (7, 1)]):
        x = torch.randn(count, length, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if entry == "step":
            found[f"loss {step}"] = pipe.step(x, loss_fn=lambda out, _: out.square().mean()).loss
        else:
            loss = pipe(x).square().mean()
            loss.backward()
            found[f"loss {step}"] = loss.detach()
        found |= state_of(pipe, step)
    return found


def modes_switch(make: Make, stages: int) -> Found:
    """Evaluations before, between and after steps; modes of single layers come back as they were."""
    pipe = piped(make, stages)
    for name, layer in pipe.named_children():
        if name == "3":
            layer.eval()
    found: Found = {}
    for step in range(3):
        before = pipe.evaluate(rows(7, seed=5), rows(7), loss_fn=square)
        found |= {f"{step} evaluated": before.loss, f"{step} outputs": before.outputs}
        found |= state_of(pipe, f"{step} evaluated")
        found[f"{step} loss"] = pipe.step(rows(7, seed=step), rows(7), loss_fn=square).loss
        found |= {**state_of(pipe, step), f"{step} modes": [layer.training for layer in pipe.children()]}
        if step == 1:
            pipe.eval()
    pipe.train()
    return {**found, "last": pipe.step(rows(6), rows(6), loss_fn=square).loss, **state_of(pipe)}


def modes_by_type(make: Make, stages: int, kind: type[nn.Module], entry: str) -> Found:
    """Scripts freeze the statistics of all BatchNorms, and draw masks of all Dropouts in eval mode."""
    pipe = piped(make, stages)
    found: Found = {}
    for step, training in enumerate((True, False, True)):
        pipe.train(training)
        for module in pipe.modules():
            if isinstance(module, kind):
                module.train(not training)
        if entry == "step":
            found[f"loss {step}"] = pipe.step(rows(7, seed=step), rows(7), loss_fn=square).loss
        else:
            loss = square(pipe(rows(7, seed=step)), rows(7))
            loss.backward()
            found[f"loss {step}"] = loss.detach()
        found |= state_of(pipe, step)
    return found


class Around(nn.Module):
    """A layer with a block that may stand in others, too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.dropout = block, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x) + self.block(x)


def modes_of_a_block(make: Make, stages: int, number: int, nested: bool, copied: bool) -> Found:
    """A block with a Dropout stands in two layers, and gets its mode by the number of one of them."""
    torch.manual_seed(3)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4))
    places = [Around(block) if nested else block for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 4), places[0], nn.Linear(4, 4), nn.Tanh(), places[1], nn.Linear(4, 4)).double()
    pipe = make(model, even(6, stages), 3)
    pipe = copy.deepcopy(pipe) if copied else pipe
    found: Found = {}
    for step, training in enumerate((False, True, False)):
        pipe.train(step > 1)
        pipe[number].train(training)
        loss = square(pipe(rows(7, seed=step)), rows(7))
        loss.backward()
        found |= {f"loss {step}": loss.detach(), **state_of(pipe, step)}
    return found


def evaluated(make: Make, stages: int, count: int, chunks: int, reduction: str) -> Found:
    pipe = make(_model(stages), [1] * stages, chunks)
    step = pipe.evaluate(rows(count), rows(count, seed=2), loss_fn=nn.MSELoss(reduction=reduction))
    assert not step.outputs.requires_grad and not step.loss.requires_grad
    return {"loss": step.loss, "outputs": step.outputs, **state_of(pipe)}


def _model(stages: int) -> nn.Sequential:
    torch.manual_seed(6)
    block = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))  # noqa: E731
    return nn.Sequential(*[block() for _ in range(stages)]).double()


def first_step(make: Make, stages: int, deferred: bool) -> Found:
    """BatchNorm's statistics and counters after the first step, and after the second."""
    pipe = make(_model(stages), [1] * stages, 3, deferred_batch_norm=deferred)
    found: Found = {}
    for step in range(2):
        pipe.step(rows(7, seed=step), rows(7), loss_fn=square)
        found |= state_of(pipe, step)
    return found


def accumulated(make: Make, stages: int, to: str) -> Found:
    """Two steps' gradients, one optimizer step."""
    pipe = piped(make, stages)
    stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: Found = {}
    for step in range(4):
        result = pipe.step(rows(7, seed=step), rows(7), loss_fn=square, grads=to)
        if to == "store":
            found |= _stored(pipe, result.grads, step)
            earlier = {name: parameter.grad for name, parameter in pipe.named_parameters()}
            result.grads.assign()
            for name, parameter in pipe.named_parameters():
                if earlier[name] is not None:
                    parameter.grad = earlier[name] + parameter.grad
        found |= state_of(pipe, step)
        if step % 2:
            stepper.step()
            stepper.zero_grad()
    return {**found, **state_of(pipe, "end")}


def accumulated_in_one_step(make: Make, stages: int, checkpoint: str) -> Found:
    """Mini-batches of sequences of other lengths, before one optimizer step."""
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Sequential(Sequences(), nn.Dropout(0.2)) for _ in range(stages)]).double()
    pipe = make(model, [1] * stages, 2, checkpoint=checkpoint)
    stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: Found = {}
    for step in range(4):
        shapes = [(3, 5, 4), (1, 2, 4), (2, 7, 4)][: step + 1]
        pairs = [(rows(shape[0], seed=step)[:, None, :].repeat(1, shape[1], 1), None) for shape in shapes]
        result = pipe.step(iter(pairs), loss_fn=lambda out, _: (out.square().sum(), out.numel()), optimizer=stepper,
                           clip_grad_norm=0.5)  # fmt: skip
        found |= {f"loss {step}": result.loss, f"norm {step}": result.grad_norm, **state_of(pipe, step)}
    return found


def stored_behind_a_detach(make: Make, stages: int) -> Found:
    """Stores of steps in every second of which no gradient reaches the stages before the last one."""
    torch.manual_seed(4)
    step = 0
    last = Apply(lambda x: x.detach() if step % 2 else x)
    layers = [nn.Linear(4, 4) for _ in range(stages - 1)]
    pipe = make(nn.Sequential(*layers, nn.Sequential(last, nn.Linear(4, 4))).double(), [1] * stages, 3)
    stepper = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    found: Found = {}
    for step in range(4):
        result = pipe.step(rows(7, seed=step), rows(7), loss_fn=square, grads="store")
        result.grads.apply(stepper)
        found |= {f"loss {step}": result.loss, **state_of(pipe, step)}
    return found


def _stored(pipe: Pipe, store: Any, when: object) -> Found:
    return {f"{when} store {name}": store.get(parameter).clone() for name, parameter in pipe.named_parameters()}


class Named(nn.Module):
    """The last stage: a dict of outputs, some of them not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.layer(x)
        more = {"classes": h.argmax(1), "scale": 2.0, "name": "n", "no": None}
        return {"scores": h, "pair": (h.sum(1), x.detach()), **more}


def _named_loss(out: dict[str, Any], target: dict[str, Any]) -> Tensor:
    assert out["name"] == "n" and out["no"] is None and target["word"] == "w"
    loss = functional.cross_entropy(out["scores"], target["classes"])
    return loss + out["scale"] * (out["pair"][0] - target["sums"][0]).square().mean()


def dicts(make: Make, stages: int, entry: str) -> Found:
    torch.manual_seed(4)
    pipe = make(nn.Sequential(*[nn.Linear(4, 4) for _ in range(stages - 1)], Named()).double(), [1] * stages, 3)
    target = {"classes": torch.arange(7) % 4, "sums": [rows(7, seed=8).sum(1)], "word": "w"}
    if entry == "forward":
        out = pipe(rows(7))
        loss = _named_loss(out, target)
        loss.backward()
        return {"loss": loss.detach(), "outputs": _detached(out), **state_of(pipe)}
    call = pipe.step if entry == "step" else pipe.evaluate
    step = call(rows(7), target, loss_fn=_named_loss, outputs=True)
    return {"loss": step.loss, "outputs": _detached(step.outputs), **state_of(pipe)}


def _detached(out: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), out)


def everything(make: Make, stages: int, optimizer: str, schedule: str, checkpoint: str) -> Found:
    """Steps with an optimizer, clipping, metrics, and a loss that counts what it adds up: that of some rows."""

    def counted(out: Tensor, target: Tensor) -> Any:
        kept = target != 3
        metrics = {"accuracy": ((out.argmax(1) == target)[kept].sum(), kept.sum()), "rows": (len(out), 1)}
        return functional.cross_entropy(out[kept], target[kept], reduction="sum"), kept.sum(), metrics

    settings = {"schedule": schedule, "checkpoint": checkpoint, "deferred_batch_norm": True}
    pipe = make(layered(8), even(8, stages), 8, **settings)
    stepper = OPTIMIZERS[optimizer](pipe.parameters())
    found: Found = {}
    for step in range(either(3, 4)):
        target = (torch.arange(17) + step) % 4
        result = pipe.step(rows(17, seed=step), target, loss_fn=counted, optimizer=stepper, clip_grad_norm=0.1)
        found |= {f"{step} loss": result.loss, **state_of(pipe, step)}
        of_all = {"step": result, "evaluate": pipe.evaluate(rows(17), target, loss_fn=counted)}
        found |= {
            f"{step} {entry} {name}": value for entry, one in of_all.items() for name, value in one.metrics.items()
        }
        assert list(result.metrics) == ["accuracy", "rows"]
    return found


def scaled(make: Make, stages: int, frozen: int | None = None) -> Found:
    """A GradScaler: the second step overflows on one rank, and no rank's parameters move. One stage may be frozen.

    The default dtype is float64: the scaler's own numbers are float32.
    """
    torch.set_default_dtype(torch.float64)
    try:
        return _scaled(make, stages, frozen)
    finally:
        torch.set_default_dtype(torch.float32)


def _scaled(make: Make, stages: int, frozen: int | None) -> Found:
    pipe = piped(make, stages)
    if frozen is not None:
        for number in range(len(pipe)):
            pipe[number].requires_grad_(number * stages // len(pipe) != frozen)
    stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found: Found = {}
    for step in range(3):
        if step == 1:
            bad = dict(pipe.named_parameters()).get("0.weight")
            if bad is not None:
                handle = bad.register_hook(lambda grad: grad * torch.inf)
        loss = pipe.step(rows(7, seed=step), rows(7), loss_fn=square, optimizer=stepper, scaler=scaler).loss
        if step == 1 and bad is not None:
            handle.remove()
        found |= {f"{step} loss": loss, f"{step} scale": scaler.get_scale(), **state_of(pipe, step)}
    return found


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def clipped(make: Make, stages: int, norm: float, to: str, joins: bool) -> Found:
    """pipe.clip_grad_norm_ between backward and the optimizer; clip_grad_norm of a step's store.

    Args:
        joins: whether weights get other names after the Pipe was built, as those of adapters are new.
    """
    pipe = piped(make, stages)
    for layer in [layer for layer in pipe.modules() if joins and isinstance(layer, nn.Linear)]:
        nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
    if to == "store":
        result = pipe.step(rows(7), rows(7), loss_fn=square, grads="store", clip_grad_norm=0.05)
        return _stored(pipe, result.grads, "clipped")
    found: Found = {}
    stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(2):
        square(pipe(rows(7, seed=step)), rows(7)).backward()
        found |= {f"{step} norm": pipe.clip_grad_norm_(0.05, norm), **state_of(pipe, step)}
        stepper.step()
        stepper.zero_grad()
    return {**found, **state_of(pipe)}


def by_turns(make: Make, stages: int) -> Found:
    """Two optimizers step by turns, one of the first layers, one of the others; a rank may have none of one's."""
    pipe = piped(make, stages)

    def chosen(first: bool) -> list[nn.Parameter]:
        named = [(int(name.partition(".")[0]) < 4, parameter) for name, parameter in pipe.named_parameters()]
        return [parameter for is_first, parameter in named if is_first == first] or [nn.Parameter(torch.empty(0, 0))]

    def train(optimizer: torch.optim.Optimizer | EagerUpdate, step: int, **settings: Any) -> Tensor:
        return pipe.step(rows(7, seed=step), rows(7), loss_fn=square, optimizer=optimizer, **settings).loss

    optimizers = [torch.optim.AdamW(chosen(first), lr=0.02) for first in (True, False)]
    found: Found = {f"loss {step}": train(optimizers[step % 2], step, clip_grad_norm=0.05) for step in range(4)}
    again = torch.optim.AdamW(chosen(True), lr=7.0)
    pipe.load_optimizer_state_dict(again, pipe.optimizer_state_dict(optimizers[0]))
    whole = pipe.full_optimizer_state_dict(again)
    if whole is not None:
        found |= {"names": whole["param_groups"][0]["param_names"], "lr": whole["param_groups"][0]["lr"]}
    found |= {"loss 4": train(again, 4), "eager": train(EagerUpdate(again), 5)}
    matrices = [parameter for parameter in chosen(True) if parameter.dim() == 2]
    found |= {"muon": train(torch.optim.Muon(matrices), 6)}
    return {**found, **state_of(pipe)}


def lbfgs_in_a_step() -> str:
    """The refusal of an optimizer that a closure would not help."""
    pipe = piped(over_ranks, torch.distributed.get_world_size())
    with pytest.raises(RuntimeError) as raised:
        pipe.step(rows(7), rows(7), loss_fn=square, optimizer=torch.optim.LBFGS(pipe.parameters()))
    return str(raised.value)


class Lion(torch.optim.SGD):
    """An optimizer that is not torch's, for all that one can know."""

    def step(self, closure: Any = None) -> None:
        assert closure is None


def optimizers_of_others() -> tuple[list[str], list[str], list[str]]:
    """(what is said of an optimizer that is not torch's, as its parameters are given; of others; this rank's names)"""
    pipe = piped(over_ranks, torch.distributed.get_world_size())
    said = []
    for make in (
        lambda: Lion(pipe.parameters(), lr=0.1),
        lambda: Lion([{"params": pipe.parameters(), "lr": 0.2}]),
        lambda: Lion(pipe.named_parameters()),
        lambda: Lion([nn.Parameter(torch.ones(1))]).add_param_group({"params": list(pipe.parameters())}),
    ):  # fmt: skip
        with pytest.warns(UserWarning) as caught:
            make()
        said += [str(warning.message) for warning in caught]
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        torch.optim.AdamW(pipe.parameters())
        Lion(nn.Linear(2, 2).parameters())
        warnings.filterwarnings("ignore", message="Lion.step")
        Lion(pipe.parameters())
    return said, [str(warning.message) for warning in quiet], [name for name, _ in pipe.named_parameters()]


def no_optimizer_of_the_pipe() -> str:
    """The refusal of an optimizer that has none of the parameters."""
    pipe = piped(over_ranks, torch.distributed.get_world_size())
    with pytest.raises(ValueError) as raised:
        pipe.step(rows(7), rows(7), loss_fn=square, optimizer=torch.optim.SGD([{"params": []}], lr=0.1))
    return str(raised.value)


def whole_norm(how: str) -> tuple[str, str, list[str]]:
    """(what says that this rank's part is not all, on a Pipe and on a copy of it; what the refusals changed)"""
    pipe = piped(over_ranks, torch.distributed.get_world_size())
    pipe.eval()  # whose buffers stay
    words = []
    for part in (pipe, copy.deepcopy(pipe)):
        square(part(rows(7)), rows(7)).backward()
        before = state_of(part)
        try:
            WHOLE_NORMS[how](part)
            words.append("no error")
        except RuntimeError as error:
            words.append(str(error))
        changed = differences(state_of(part), before)
        part.zero_grad()
    pipe.step(rows(7), rows(7), loss_fn=square)
    return words[0], words[1], changed


def _lbfgs(pipe: Pipe) -> None:
    def closure() -> Tensor:
        loss = square(pipe(rows(7)), rows(7))
        loss.backward()
        return loss

    torch.optim.LBFGS(pipe.parameters()).step(closure)


def _own_layers(pipe: Pipe) -> Iterator[nn.Module]:
    return (layer for layer in pipe.children() if next(layer.parameters(), None) is not None)


def _groups(pipe: Pipe) -> None:
    stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
    clip_grad_norm_(stepper.param_groups[0]["params"], 1e-3)


def _stored_norm(pipe: Pipe) -> None:
    store = pipe.step(rows(7), rows(7), loss_fn=square, grads="store").grads
    assert store is not None
    store.clip_(1e-3)


def _stored_verdict(pipe: Pipe) -> None:
    store = pipe.step(rows(7), rows(7), loss_fn=square, grads="store").grads
    assert store is not None
    store.is_finite()


def _scaled_by_hand(pipe: Pipe, method: str, **settings: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # its scale exists from its first use on
    getattr(scaler, method)(torch.optim.SGD(pipe.parameters(), lr=0.1, **settings))


WHOLE_NORMS: dict[str, Callable[[Pipe], Any]] = {
    "torch's": lambda pipe: torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3),
    "imported before": lambda pipe: clip_grad_norm_(pipe.parameters(), 1e-3, norm_type=torch.inf),
    "of a list": lambda pipe: clip_grad_norm_([each for each in pipe.parameters() if each.grad is not None], 1e-3),
    "of groups": _groups,
    "of one": lambda pipe: clip_grad_norm_(next(each for each in pipe.parameters() if each.grad is not None), 1e-3),
    "of a layer": lambda pipe: clip_grad_norm_(next(_own_layers(pipe)).parameters(), 1e-3),
    "of weights": lambda pipe: clip_grad_norm_([each for each in pipe.parameters() if each.ndim == 2], 1e-3),
    "of some": lambda pipe: clip_grad_norm_([each for each in pipe.parameters() if each.ndim == 1], 1e-3),
    "of a module around": lambda pipe: clip_grad_norm_(nn.ModuleList([pipe]).parameters(), 1e-3, foreach=False),
    "the norm alone": lambda pipe: torch.nn.utils.get_total_norm([each.grad for each in pipe.parameters()]),
    "of a store": _stored_norm,
    "whether a store is finite": _stored_verdict,
    "LBFGS": _lbfgs,
    "a scaler's step": lambda pipe: _scaled_by_hand(pipe, "step"),
    "a scaler's step, fused": lambda pipe: _scaled_by_hand(pipe, "step", fused=True),
    "a scaler's unscale_": lambda pipe: _scaled_by_hand(pipe, "unscale_"),
}


def part_norms(make: Make, how: str) -> Found:
    """What needs no other rank's gradients: a layer's own norm, values, the norm of others."""
    torch.manual_seed(5)
    pipe = make(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]).double(), even(8, 4), 3)
    torch.manual_seed(6)
    head = nn.Linear(4, 2).double()
    stepper = torch.optim.SGD([*pipe.parameters(), *head.parameters()], lr=0.1)
    found: Found = {}
    for step in range(2):
        head(pipe(rows(7, seed=step))).square().mean().backward()
        if how == "layer":
            for layer in _own_layers(pipe):
                norms = [torch.linalg.vector_norm(parameter.grad) for parameter in layer.parameters()]
                clip_grads_with_norm_(layer.parameters(), 1e-2, torch.linalg.vector_norm(torch.stack(norms)))
        elif how == "value":
            torch.nn.utils.clip_grad_value_(pipe.parameters(), 1e-3)
        else:
            found[f"{step} norm"] = clip_grad_norm_(head.parameters(), 1e-2)
        found |= state_of(pipe, step)
        stepper.step()
        stepper.zero_grad()
    return found | {"head": head.weight.detach().clone()}


def two_pipes(make: Make, stages: int) -> Found:
    """Two models over the same ranks, trained in turn, then one through the other, and on what the other gives."""
    one, other = piped(make, stages), make(_model(stages), even(stages, stages), 2)
    found: Found = {}
    for step in range(2):
        found[f"{step} one"] = one.step(rows(7, seed=step), rows(7), loss_fn=square).loss
        found[f"{step} other"] = other.step(rows(6, seed=step), rows(6), loss_fn=square).loss
    loss = square(other(one(rows(8))), rows(8, seed=9))
    loss.backward()
    found["both"] = loss.detach()
    pairs = ((rows(count), one.evaluate(rows(count), rows(count), loss_fn=square).outputs) for count in (5, 6))
    found["distilled"] = other.step(pairs, loss_fn=square).loss
    return {**found, **state_of(one, "one"), **state_of(other, "other")}


def losses_of_every_rank(stages: int) -> list[str]:
    """The numbers that this rank sees, and of what kind: of steps, an evaluation and the forward entry point."""
    pipe = piped(over_ranks, stages)
    losses = [pipe.step(rows(7, seed=step), rows(7), loss_fn=square).loss for step in range(2)]
    losses.append(pipe.evaluate(rows(7), rows(7), loss_fn=square).loss)
    losses.append(square(pipe(rows(7)), rows(7)).detach())
    return [f"{loss.item().hex()} {loss.dtype} {list(loss.shape)} {loss.requires_grad}" for loss in losses]


def ends_late(make: Make, stages: int) -> Found:
    """The last rank is slow to hear that a step went well. Meanwhile rank 0 begins the next one, and fails."""
    pipe = piped(make, stages)
    pipe.step(rows(6), rows(6), loss_fn=square)
    pipe.zero_grad()
    if make is not over_ranks:
        loss = pipe.step(rows(6), rows(6), loss_fn=square).loss
        return {"loss": loss, **state_of(pipe), "again": pipe.step(rows(6), rows(6), loss_fn=square).loss}
    rank, size, meetings, post = dist.get_rank(), dist.get_world_size(), itertools.count(1), _GlooChannel.post
    vote = 2  # after the comparison of calls

    def slow(connections: Any, own: int, ranks: int, data: Any) -> list[Any]:
        is_late = next(meetings) == vote and own == size - 1
        with patch.object(_GlooChannel, "post", lambda *given: time.sleep(0.5 * is_late) or post(*given)):
            return all_to_all(connections, own, ranks, data)

    with patch.object(group, "all_to_all", slow):
        loss = pipe.step(rows(6), rows(6), loss_fn=square).loss
    found = {"loss": loss, **state_of(pipe)}
    at_once = Mock(side_effect=KeyError("at once")) if rank == 0 else DistributedCommunicator.open
    with patch.object(DistributedCommunicator, "open", at_once), pytest.raises(KeyError, match="at once"):
        pipe.step(rows(6), rows(6), loss_fn=square)
    return {**found, "again": pipe.step(rows(6), rows(6), loss_fn=square).loss}
