"""What may pass between ranks? Tied weights, tensors of any kind and of shapes that the data decide.

    rank 0  embedding.weight --copied when the Pipe is built--> rank 2  head.weight
            sum of its chunks <---------- added in the order of the stages ----------> the same whole gradient
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from cover import pairwise
from law_check import row_loss, target_of
from one_and_many import Found, Make, state_of
from rank_entry_points import OPTIMIZERS
from rank_models import even, rows, square
from skip_models import Pop, Stash
from tied_models import KINDS, input_of, made
from torch import Tensor, nn

from pipeline import GradStore, Pipe
from pipeline.curvature import Hessian
from pipeline.skip import Namespace

TIES = {
    "kind": tuple(KINDS),
    "stages": ("few", "many"),
    "entry": ("forward", "step", "store"),
    "optimizer": tuple(OPTIMIZERS),
    "checkpoint": ("always", "except_last", "never"),
    "schedule": ("1f1b", "gpipe", "zb-h1"),
}


def mixing(kind: str) -> dict[str, Any]:
    """A layer that looks at the rows of its chunk to choose what it computes says so."""
    return {"mixes_rows": kind == "in_some_chunks"}


def ties(size: int) -> list[tuple[Any, ...]]:
    """Every kind of tying of tied_models.py whose layers suffice for so many ranks, with every pair of settings."""
    return [(*config.values(),) for config in pairwise(TIES) if len(made(config["kind"])) >= size]


def tied(make: Make, kind: str, how: str, entry: str, optimizer: str, checkpoint: str, schedule: str) -> Found:
    """Some steps; clipped by the norm of all gradients, in which a tied one counts once."""
    model, size = made(kind), torch.distributed.get_world_size()
    stages = size if how == "few" else min(2 * size, len(model))
    pipe = make(model, even(len(model), stages), 3, checkpoint=checkpoint, schedule=schedule, **mixing(kind))
    stepper = OPTIMIZERS[optimizer](pipe.parameters())
    x, y, loss_fn = input_of(kind, 7), target_of(7), row_loss("mean")
    found: Found = {}
    for step in range(3):
        if entry == "forward":
            loss = loss_fn(pipe(x), y)
            loss.backward()
            found[f"{step} norm"] = pipe.clip_grad_norm_(0.5)
        else:
            options = {"grads": "store", "clip_grad_norm": 0.5} if entry == "store" else {}
            result = pipe.step(x, y, loss_fn=loss_fn, **options)
            loss, found[f"{step} norm"] = result.loss, result.grad_norm
            if result.grads is not None:
                result.grads.assign()
        found[f"{step} loss"] = loss.detach()
        for name, parameter in pipe.named_parameters():
            found[f"{step} {name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
        stepper.step()
        stepper.zero_grad()
    return found | {f"end {name}": parameter.detach().clone() for name, parameter in pipe.named_parameters()}


def asked(make: Make, kind: str) -> Found:
    """torch.autograd.grad of what this rank has, on ranks too that have a tied parameter and do not use it."""
    model, size = made(kind), torch.distributed.get_world_size()
    pipe = make(model, even(len(model), size), 3, **mixing(kind))
    found = dict(pipe.named_parameters())
    grads = torch.autograd.grad(pipe(input_of(kind, 7)).square().sum(), list(found.values()), allow_unused=True)
    return dict(zip(found, grads, strict=True))


def named(make: Make, kind: str) -> Found:
    """What this rank's parameters are called, and in which order; in stores of gradients too, and with a prefix."""
    model, size = made(kind), torch.distributed.get_world_size()
    pipe = make(model, even(len(model), size), 3, **mixing(kind))
    optimizer = OPTIMIZERS["adamw"](pipe.parameters())
    found: Found = {}
    for what, is_once in (("each once", True), ("all", False)):
        plain = [name for name, _ in model.named_parameters(remove_duplicate=is_once)]
        here = [name for name, _ in pipe.named_parameters(remove_duplicate=is_once)]
        assert set(here) <= set(plain) and len(here) == len(set(here))
        assert [f"a.{name}" for name in here] == [name for name, _ in pipe.named_parameters("a", True, is_once)]
        found |= {f"{what} {name}": name for name in here}
    once = dict(pipe.named_parameters())
    assert list(once.values()) == [each for each in pipe.parameters() if each.numel()]
    assert list(once.values()) == list(nn.ModuleList([pipe]).parameters())
    both = dict(pipe.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        assert name not in both or both[name] is once[first.setdefault(id(each), name)]
    for step in range(2):
        result = pipe.step(input_of(kind, 7), target_of(7), loss_fn=row_loss("mean"), grads="store")
        assert result.grads is not None
        found |= {f"{step} store {name}": grad for name, grad in result.grads.state_dict().items()}
        whole = GradStore(pipe)
        whole.merge_(result.grads)
        found |= {f"{step} merged {name}": whole.get(name) for name in both}
        if len(whole):
            whole.apply(optimizer)
    return found


def untied(size: int) -> list[list[str]]:
    """The names of a rank's parameters when a tied one was replaced on the last rank, and in one of two layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3, bias=False) for _ in range(size + 1)]
    for layer in layers:
        layer.weight = layers[0].weight
    pipe = Pipe(nn.Sequential(*layers), [2] + [1] * (size - 1), 2)
    rank = torch.distributed.get_rank()
    if rank in (0, size - 1):
        pipe[1 if rank == 0 else size].weight = nn.Parameter(torch.zeros(3, 3))
    return [[name for name, _ in pipe.named_parameters(remove_duplicate=once)] for once in (True, False)]


def tied_within(make: Make, stages: int) -> Found:
    """A tie between layers of one rank, which is made later, in a Pipe with a tie between ranks and in its copy."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]).double()
    model[7].weight = model[0].weight
    pipe = make(model, even(8, stages), 2)
    found: Found = {}
    for which, part in enumerate((pipe, copy.deepcopy(pipe))):
        if isinstance(part[1], nn.Linear):
            part[2].weight = part[1].weight
        found |= {f"loss {which}": part.step(rows(5), rows(5), loss_fn=square).loss, **state_of(part, which)}
    return found


def embedding_and_head(rank_seeds: bool) -> list[Any]:
    """This rank's copy of a weight of the first stage and the last, as it is made and after each of three steps.

    Args:
        rank_seeds: the ranks make other numbers; rank 0's count.
    """
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(rank if rank_seeds else 0)
    embedding, head = nn.Embedding(9, 4).double(), nn.Linear(4, 9, bias=False).double()
    head.weight = embedding.weight
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore" if rank_seeds else "error", "the ranks' models have other values")
        pipe = Pipe(nn.Sequential(embedding, *[nn.Tanh() for _ in range(size - 2)], head), [1] * size, 2)
    stepper = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    x = torch.arange(12).view(4, 3) % 9
    found = []
    for _ in range(4):
        copies = [parameter for name, parameter in pipe.named_parameters() if name.endswith("weight")]
        found.append([(each.detach().clone(), None if each.grad is None else each.grad.clone()) for each in copies])
        stepper.zero_grad()
        pipe(x).square().mean().backward()
        stepper.step()
    return found


# ------------------------------------------------------------------------------------------------- tensors of any kind


class Choose(nn.Module):
    """Gives on the rows whose first entry is positive, as many as there are; what they came from; how many."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        chosen = self.layer(x)[x[:, 0] > 0]
        return x, chosen, len(chosen)


class Pass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, int]:
        x, chosen, count = value
        assert len(chosen) == count
        return self.layer(x), torch.cat([self.layer(chosen), chosen[: count // 2]]), count + count // 2


class Join(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor, int]) -> Tensor:
        x, chosen, count = value
        assert len(chosen) == count
        return x + chosen.sum(0) / (count + 1)


def shapes_from_data(make: Make, stages: int, entry: str, checkpoint: str) -> Found:
    """Between stages the number of rows is what the data make it, none among them, another for each chunk and step."""
    torch.manual_seed(5)
    model = nn.Sequential(Choose(), *[Pass() for _ in range(stages - 2)], Join()).double()
    pipe = make(model, [1] * stages, 4, checkpoint=checkpoint, mixes_rows=True)
    found: Found = {}
    for step in range(6):
        x, y = rows(8 + step % 3, seed=step), rows(8 + step % 3, seed=9)
        if step == 4:
            x = -x.abs()
        if entry == "step":
            found[f"{step} loss"] = pipe.step(x, y, loss_fn=square).loss
        else:
            loss = square(pipe(x), y)
            loss.backward()
            found[f"{step} loss"] = loss.detach()
        found |= state_of(pipe, step)
    return found


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128, torch.int8, torch.uint8,
          torch.int16, torch.int32, torch.int64, torch.bool)  # fmt: skip


PLAIN = [None, True, -1, 2**70, 0.1, -0.0, float("inf"), "ä", ""]


class Kinds(nn.Module):
    """x, and tensors made of it: of every dtype, of no dimension, empty, transposed, expanded, sliced, one twice."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        small = x.detach().abs().clamp(max=1)
        more = {str(dtype): small.to(dtype) for dtype in DTYPES}
        shapes = {
            "number": x.sum(), "empty": x[:0], "no columns": x[:, :0], "transposed": x.t(), "sliced": x[:, ::2],
            "column": x[:, 1], "gaps": x.repeat(1, 9)[:, 1::8], "expanded": x[:1].expand(3, 4), "row": x[0],
            "twice": (x, x), "of plain": torch.tensor(2.5, dtype=x.dtype),
        }  # fmt: skip
        return {"x": x, **more, **shapes, "plain": PLAIN, "nest": ({},)}


class Gather(nn.Module):
    """One number a row, of everything; strides and plain values included."""

    def forward(self, value: dict[str, Any]) -> Tensor:
        plain = value["plain"]
        assert plain == PLAIN and [type(each) for each in plain] == [type(each) for each in PLAIN]
        assert str(plain[5]) == "-0.0"
        assert value["nest"] == ({},) and value["twice"][0] is value["twice"][1]
        total = value["x"].clone()
        for name, each in value.items():
            if isinstance(each, Tensor):
                assert name not in map(str, DTYPES) or str(each.dtype) == name
                real = torch.view_as_real(each) if each.is_complex() else each
                total = total + real.to(total.dtype).square().sum() + sum(each.stride())
        return total + value["twice"][1]


def kinds(make: Make, stages: int, entry: str) -> Found:
    torch.manual_seed(5)
    between = [nn.Identity() for _ in range(stages - 2)]
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Kinds()), *between, nn.Sequential(Gather(), nn.Linear(4, 4)))
    pipe = make(model.double(), [1] * stages, 3, mixes_rows=True)
    found: Found = {}
    for step in range(2):
        if entry == "step":
            found[f"{step} loss"] = pipe.step(rows(7), rows(7, seed=2), loss_fn=square).loss
        else:
            loss = square(pipe(rows(7)), rows(7, seed=2))
            loss.backward()
            found[f"{step} loss"] = loss.detach()
        found |= state_of(pipe, step)
    return found


class Views(nn.Module):
    """x, and what shares its memory: a part, an expanded row."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x[:, :2], x[:, :1].expand(-1, 5)


def views(make: Make, stages: int) -> Found:
    """The outputs of one chunk, where each has memory of its own."""
    torch.manual_seed(5)
    layers = [nn.Linear(4, 4) for _ in range(stages - 1)]
    pipe = make(nn.Sequential(*layers, nn.Sequential(nn.Linear(4, 4), Views())).double(), [1] * stages, 1)
    out = pipe(rows(5))
    sum(square(each, 0 * each) for each in out).backward()
    return {"strides": [each.stride() for each in out], "out": [each.detach() for each in out], **state_of(pipe)}


class Odd:
    """No value that may pass between ranks."""


class Strange(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.is_on = True

    def forward(self, x: Tensor) -> Any:
        return (x, self.value) if self.is_on else x


class First(nn.Module):
    def forward(self, value: Any) -> Tensor:
        x: Tensor = value[0] if isinstance(value, tuple) else value
        return x


STRANGE = {"object": Odd(), "type": int, "function": len, "bytes": b"bytes", "set": {1, 2}, "dtype": torch.float32}


def strange(which: str) -> tuple[str, float]:
    """(the words of the error on this rank, the loss of a right call after it)"""
    size = torch.distributed.get_world_size()
    rest = [nn.Identity() for _ in range(size - 2)]
    pipe = Pipe(nn.Sequential(Strange(STRANGE[which]), First(), *rest), [1] * size, 2)
    x = rows(4).requires_grad_()
    words = ""
    try:
        pipe.step(x, rows(4, seed=2), loss_fn=square)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    if isinstance(pipe[0], Strange):
        pipe[0].is_on = False
    return words, pipe.step(x, rows(4, seed=2), loss_fn=square).loss.item()


def stashed_again(clones: bool, entry: str) -> str:
    """What becomes of one memory that is stashed twice, and written by who pops it first: the error, or "equal".

    Stage 1 stashes for stage 3 what stage 0 has already sent to stage 2, which writes it.
    """
    torch.manual_seed(5)
    once, again = Namespace(), Namespace()
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), Stash().isolate(once)),
        Stash(lambda x: x.clone() if clones else x, on=torch.sin).isolate(again),
        Pop(lambda x, a: x + a.mul_(2)).isolate(once),
        Pop(lambda x, b: x * b).isolate(again),
    ).double()
    x = rows(4)
    want = model(x)
    pipe = Pipe(model, [1] * 4, 2, schedule="interleaved")
    try:
        if entry == "product":
            Hessian(pipe, [(x, x)], square) @ {name: torch.ones_like(of) for name, of in pipe.named_parameters()}
        return "equal" if torch.allclose(pipe(x), want, rtol=0, atol=1e-12) else "wrong"
    except RuntimeError as error:
        return str(error)
