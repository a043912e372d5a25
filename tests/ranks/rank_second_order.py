"""Hand-written second derivatives over ranks: each function is a script that knows of no ranks.

    script(net, case, ...) -> {"first 0.weight": ..., "second 0.weight": ...}

It runs on a Pipe over the ranks and on the plain module, chunk by chunk (second_order_reference.py), and both are
compared: what a rank gets for its parameters and for x is what the plain module's double backward gives.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from law_models import Case
from one_and_many import SEED, Compared, Found, compared
from rank_eager import CHECKPOINTS
from rank_models import layered, padded, rows
from second_order_reference import Plain, balance, leaves_of
from tied_models import embedding_and_head, layer_three_times
from torch import Tensor, nn
from torch.func import functional_call

from pipeline import MismatchError, Pipe

Script = Callable[..., Found]
BOUND = 1e-10
TIED: dict[str, Callable[[], Case]] = {
    "layer three times": lambda: Case(layer_three_times(), lambda count: rows(count)),
    "embedding and head": lambda: Case(
        embedding_and_head(), lambda count: torch.arange(count * 2).view(count, 2) * 7 % 9
    ),
}


def case_of(model: str, layers: int) -> Case:
    """A model with at least so many layers, in which every rank may have one without parameters."""
    torch.manual_seed(3)
    if model in TIED:
        return TIED[model]()
    if model == "layered":
        return Case(layered(max(layers, 8)), lambda count: rows(count))
    return padded(model, layers)


class Names:
    """The names of a net's parameters, and vectors for them, the same over ranks and on the plain module."""

    def __init__(self, whole: nn.Module) -> None:
        first = {id(parameter): name for name, parameter in whole.named_parameters()}
        self.first = {name: first[id(one)] for name, one in whole.named_parameters(remove_duplicate=False)}

    def vector(self, name: str, like: Tensor) -> Tensor:
        """One for each parameter, whatever the name under which it is known."""
        seed = int.from_bytes(hashlib.sha256(self.first.get(name, name).encode()).digest()[:4], "little")
        return rows(like.numel(), 1, seed=seed).view(like.shape).to(like.dtype)

    def found(self, what: str, net: nn.Module, pairs: Iterable[tuple[Tensor, Tensor | None]]) -> Found:
        """The gradients of parameters under all their names."""
        grads = {id(one): grad for one, grad in pairs}
        named = [(_plain(name), one) for name, one in net.named_parameters(remove_duplicate=False)]
        there = [(name, grads.get(id(one))) for name, one in named]
        return {f"{what} {name}": grad.detach() for name, grad in there if grad is not None}


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def trained(net: nn.Module) -> list[Tensor]:
    return [one for one in net.parameters() if one.requires_grad]


def named(net: nn.Module, names: Names) -> list[tuple[str, Tensor]]:
    """This rank's parameters with a name; the last one, without a name, stands for none."""
    name_of = {id(one): _plain(name) for name, one in net.named_parameters()}
    return [(name_of.get(id(one), "none"), one) for one in trained(net)]


# ---------------------------------------------------------------------------------------------------------- the scripts


def mixed(net: nn.Module, case: Case, names: Names, how: str, count: int, live: bool = True) -> Found:
    """One number of the loss and its gradients, differentiated.

    Args:
        how: "product", of a vector with the gradients of parameters and of x; "curved", a number that bends in each of
            them, with the loss beside it; "inputs", of the gradient of x alone; "weights", of some parameters alone,
            by these; "summed", whose cotangents are views of one number; "once", where only the owner of a tied
            parameter has its gradient in the number.
        live: whether x has a gradient.
    """
    x = case.make_input(count)
    own = leaves_of(x) if live else []
    pairs = named(net, names)
    if how == "weights":
        pairs = [pair for pair in pairs if not pair[0].endswith("bias")]
    targets = [*own, *[one for _, one in pairs], *case.extras]
    loss = case.loss(net(x))
    firsts = torch.autograd.grad(loss, targets, create_graph=True, allow_unused=True)
    assert all(grad is None or grad.requires_grad for grad in firsts)
    labels = [*[f"x{number}" for number in range(len(own))], *[name for name, _ in pairs]]
    labels += [f"extra{number}" for number in range(len(case.extras))]
    kept = {label: grad for label, grad in zip(labels, firsts, strict=True) if grad is not None}
    if how == "once" and isinstance(net, Pipe):
        copies = {id(copy) for tied, copy in net.runtime.tied().items() if tied.owner != dist.get_rank()}
        kept = {label: grad for label, grad in kept.items() if id(dict(pairs).get(label)) not in copies}
    number = 0 * loss if how == "curved" else 0 * sum((grad.sum() for grad in firsts if grad is not None), loss * 0)
    for label, grad in kept.items():
        vector = names.vector(label, grad)
        if how == "curved":
            number = number + (vector * grad).sin().sum() + grad.square().sum()
        elif how == "summed":
            number = number + grad.sum()
        elif how != "inputs" or label.startswith("x"):
            number = number + (vector * grad).sum()
    if how == "curved":
        number = number + 0.5 * loss.square()
    seconds = torch.autograd.grad(number, targets, allow_unused=True)
    found: Found = {"loss": loss.detach()}
    for what, grads in (("first", firsts), ("second", seconds)):
        of_input = {f"{what} x{index}": grad for index, grad in enumerate(grads[: len(own)])}
        found |= {name: _zeros(grad, x) for name, (grad, x) in zip(
            of_input, zip(of_input.values(), own, strict=True), strict=True
        )}  # fmt: skip
        parts = zip([one for _, one in pairs], grads[len(own) :], strict=False)
        found |= names.found(what, net, [(one, _zeros(grad, one)) for one, grad in parts])
        extras = grads[len(grads) - len(case.extras) :] if case.extras else ()
        found |= {f"{what} extra{index}": grad.detach() for index, grad in enumerate(extras) if grad is not None}
    return found


def _zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    """A derivative; torch says None for some that are zero."""
    return torch.zeros_like(like) if grad is None else grad.detach()


def accumulated(net: nn.Module, case: Case, names: Names, count: int) -> Found:
    """`loss.backward(create_graph=True)`, then the backward of a number of `.grad`."""
    x = case.make_input(count)
    own = leaves_of(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
        case.loss(net(x)).backward(create_graph=True)
    firsts = [one.grad for one in [*trained(net), *own]]
    for one in [*trained(net), *own]:
        one.grad = None
    sum((grad.square().sum() for grad in firsts if grad is not None), torch.zeros(())).backward()
    found = {f"second x{index}": one.grad for index, one in enumerate(own)}
    pairs = [(one, one.grad) for one in trained(net)]
    found |= names.found("second", net, pairs)
    for one in [*trained(net), *own]:
        one.grad = None
    return found


def _number(net: nn.Module, names: Names, grads: Sequence[Tensor | None]) -> Tensor:
    """One that bends in all gradients."""
    pairs = [(name, grad) for (name, _), grad in zip(named(net, names), grads, strict=True) if grad is not None]
    return torch.stack([(names.vector(name, grad) * grad).sin().sum() for name, grad in pairs]).sum()


def several(net: nn.Module, case: Case, names: Names, count: int, which: str) -> Found:
    """Two losses of one output, or two outputs: two second backwards in one, or one after the other."""
    xs = [case.make_input(count), case.make_input(count + 2)]
    outs = [net(xs[0])] * 2 if which == "of one output" else [net(x) for x in xs]
    losses = [case.loss(outs[0]), case.loss(outs[1]).square() * 0.1]
    targets = trained(net)
    grads = [torch.autograd.grad(loss, targets, create_graph=True, allow_unused=True) for loss in losses]
    numbers = [_number(net, names, part) for part in grads]
    found: Found = {}
    if which == "one by one":
        parts = [torch.autograd.grad(number, targets, allow_unused=True) for number in reversed(numbers)]
    elif which == "of one output":
        parts = [torch.autograd.grad(number, targets, retain_graph=True, allow_unused=True) for number in numbers]
        parts.append(torch.autograd.grad(numbers[0] - 3 * numbers[1] + losses[1], targets, allow_unused=True))
    else:
        parts = [torch.autograd.grad(numbers[0] * 2 + numbers[1], targets, allow_unused=True)]
    for turn, part in enumerate(parts):
        found |= names.found(f"{turn}", net, [
            (one, _zeros(grad, one)) for one, grad in zip(targets, part, strict=True)
        ])  # fmt: skip
    return found


def adapted(net: nn.Module, case: Case, names: Names, count: int, steps: int) -> Found:
    """MAML: the gradient of a loss after some steps of gradient descent, by the parameters before them."""
    params = {name: one for name, one in net.named_parameters() if one.requires_grad}
    own = [*params.values()]
    x, y = case.make_input(count), case.make_input(count + 1)
    fast = params
    for step in range(steps):
        loss = case.loss(functional_call(net, fast, (x,))) / (step + 1)
        grads = torch.autograd.grad(loss, [*fast.values()], create_graph=True, allow_unused=True)
        pairs = zip(fast.items(), grads, strict=True)
        fast = {name: one - 0.01 * grad for (name, one), grad in pairs if grad is not None}  # others stay as they are
    loss = case.loss(functional_call(net, fast, (y,)))
    meta = torch.autograd.grad(loss, own, allow_unused=True)
    found: Found = {"loss": loss.detach()}
    return found | names.found("meta", net, [
        (one, _zeros(grad, one)) for one, grad in zip(own, meta, strict=True)
    ])  # fmt: skip


def at_the_end(net: nn.Module, case: Case, names: Names, count: int) -> Found:
    """The last rank alone has the output, and computes the loss."""
    x = case.make_input(count).requires_grad_()
    out = net(x, output="last") if isinstance(net, Pipe) else net(x)
    is_last = not isinstance(net, Pipe) or dist.get_rank() == dist.get_world_size() - 1
    targets = [x, *trained(net)]
    grads = torch.autograd.grad(case.loss(out) if is_last else out, targets, create_graph=True, allow_unused=True)
    number = _number(net, names, grads[1:]) + grads[0].square().sum()
    seconds = torch.autograd.grad(number, targets)
    return {"second x": seconds[0]} | names.found("second", net, zip(targets[1:], seconds[1:], strict=True))


def normed(net: nn.Module, case: Case, names: Names, count: int) -> Found:
    """Numbers over all gradients: their norm, their product with a vector; the derivatives of both."""
    x = case.make_input(count)
    targets = trained(net)
    grads = torch.autograd.grad(case.loss(net(x)), targets, create_graph=True, allow_unused=True)
    vector = [names.vector(name, one) for name, one in named(net, names)]
    if isinstance(net, Pipe):
        norm, along, size = net.grad_norm(grads), net.dot(grads, vector), net.grad_norm(targets)
    else:
        pairs = [(grad, part) for grad, part in zip(grads, vector, strict=True) if grad is not None]
        norm = torch.stack([grad.square().sum() for grad, _ in pairs]).sum().sqrt()
        along = torch.stack([(grad * part).sum() for grad, part in pairs]).sum()
        size = torch.stack([one.square().sum() for one in targets]).sum().sqrt()
    found: Found = {"norm": norm.detach(), "along": along.detach(), "size": size.detach()}
    seconds = torch.autograd.grad((norm - 1).square() + along.sin() / norm + size, targets, allow_unused=True)
    return found | names.found("second", net, [
        (one, _zeros(grad, one)) for one, grad in zip(targets, seconds, strict=True)
    ])  # fmt: skip


# --------------------------------------------------------------------------------------------------------- compared


def compare(script: str, cases: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """For each case: what a script finds here otherwise than on the plain module."""
    function: Script = globals()[script]
    return compared(
        cases, lambda case: _ran(function, True, **case), lambda case: _ran(function, False, **case),
        apart,
    )  # fmt: skip


def apart(here: Found, alone: Found) -> list[str]:
    """What is further apart than 1e-10 of the largest entry of its kind, in words."""
    sizes: dict[str, float] = {}
    for name, value in alone.items():
        kind = name.split()[0]
        sizes[kind] = max(sizes.get(kind, 0.0), float(value.abs().max()) if value.numel() else 0.0)
    unknown = [f"{name} is known here alone" for name in here if name not in alone]
    known = [name for name in here if name in alone and here[name].numel()]
    errors = {name: float((here[name] - alone[name]).abs().max()) for name in known}
    return unknown + [
        f"{name} is off by {error:.1e}, where the largest entry is {sizes[name.split()[0]]:.1e}"
        for name, error in errors.items() if not error <= BOUND * sizes[name.split()[0]]
    ]  # fmt: skip


def _ran(
    function: Script,
    alone: bool,
    model: str,
    stages: int,
    chunks: int = 3,
    schedule: str = "1f1b",
    checkpoint: str = "always",
    train: bool = True,
    **how: Any,
) -> Found:
    case = case_of(model, stages)
    names = Names(case.model)
    cuts = balance(len(case.model), stages)
    net: nn.Module = Plain(case.model, chunks) if alone else Pipe(
        case.model, cuts, chunks, schedule=schedule, checkpoint=CHECKPOINTS[checkpoint],
        mixes_rows=not case.rowwise, timeout=20.0,
    )  # fmt: skip
    net.train(train)
    torch.manual_seed(SEED)
    found = function(net, case, names, **how)
    with torch.no_grad():  # and the next call is right
        found["after"] = case.loss(net(case.make_input(8)))
    return found


# ------------------------------------------------------------------------------------------------------ what is refused


class Asked:
    """A Pipe whose first and last layer are one, on every rank, with a loss and its gradients."""

    def __init__(self) -> None:
        ranks = dist.get_world_size()
        torch.manual_seed(3)
        shared = nn.Linear(4, 4)
        middle = [nn.Tanh() if index % 2 else nn.Linear(4, 4) for index in range(2 * ranks - 2)]
        self.model = nn.Sequential(shared, *middle, shared).double()
        self.plain = copy.deepcopy(self.model)  # over ranks the model is refused after a backward
        self.pipe = Pipe(self.model, [2] * ranks, 2, checkpoint="always", timeout=20.0)
        self.is_first, self.is_last = dist.get_rank() == 0, dist.get_rank() == ranks - 1
        self.x = rows(6).requires_grad_()
        self.targets = [self.x, *self.pipe.parameters()]

    def gradients(self, x: Tensor | None = None, **how: Any) -> Sequence[Tensor]:
        loss = self.pipe(self.x if x is None else x).square().sum()
        return torch.autograd.grad(loss, self.targets, **{"create_graph": True, **how})

    def again(self, number: Tensor, **how: Any) -> None:
        torch.autograd.grad(number, self.targets, allow_unused=True, **how)


def _of_parameters(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads[1:]]).sum()


def _third(asked: Asked) -> None:
    asked.again(_of_parameters(asked.gradients()), create_graph=True)


def _left_out(asked: Asked) -> None:
    """One rank's number depends on none of its gradients, and it goes on to the next call."""
    grads = asked.gradients()
    if not asked.is_last:
        asked.again(_of_parameters(grads))
    asked.pipe(asked.x)


def _only_one(asked: Asked) -> None:
    asked.gradients(create_graph=asked.is_first, retain_graph=True)


def _other_order(asked: Asked) -> None:
    numbers = [_of_parameters(asked.gradients()) for _ in range(2)]
    for number in numbers if asked.is_first else reversed(numbers):
        asked.again(number)


def _plain_instead(asked: Asked) -> None:
    """One rank differentiates the loss alone, in the same call of autograd."""
    loss = asked.pipe(asked.x).square().sum()
    grads = torch.autograd.grad(loss, asked.targets, create_graph=True)
    asked.again(loss + _of_parameters(grads) if asked.is_first else loss)


def _of_x_apart(asked: Asked) -> None:
    grads = asked.gradients()
    asked.again(_of_parameters(grads) + (1.0 if asked.is_first else 2.0) * grads[0].sum())


def _of_tied_apart(asked: Asked) -> None:
    grads = asked.gradients()
    asked.again(_of_parameters(grads) * (1.0 if asked.is_first else 2.0))


def _detached_loss(asked: Asked) -> None:
    """One rank's loss does not bend."""
    out = asked.pipe(asked.x)
    loss = out.square().sum() if asked.is_first else (out * (2 * out).detach()).sum()
    asked.again(_of_parameters(torch.autograd.grad(loss, asked.targets, create_graph=True)))


def _batched(asked: Asked) -> None:
    grads = asked.gradients()
    torch.autograd.grad(grads[0], asked.targets, torch.ones(2, 6, 4, dtype=torch.float64), is_grads_batched=True)


def _freed(asked: Asked) -> None:
    loss = asked.pipe(asked.x).square().sum()
    grads = torch.autograd.grad(loss, asked.targets, create_graph=True)
    asked.again(loss)
    asked.again(_of_parameters(grads))


def _freed_at_once(asked: Asked) -> None:
    asked.again(_of_parameters(asked.gradients(retain_graph=False)))


def _parameters_written(asked: Asked) -> None:
    number = _of_parameters(asked.gradients())
    with torch.no_grad():
        for one in asked.pipe.parameters():
            one.add_(0.0)
    asked.again(number)


def _input_written(asked: Asked) -> None:
    x = rows(6)
    loss = asked.pipe(x).square().sum()
    number = _of_parameters((x, *torch.autograd.grad(loss, asked.targets[1:], create_graph=True)))
    x.add_(0.0)
    asked.again(number)


def _grads_written(asked: Asked) -> None:
    out, given = asked.pipe(asked.x), rows(6, seed=8)
    grads = torch.autograd.grad(out, asked.targets, given, create_graph=True)
    given.add_(0.0)
    asked.again(_of_parameters(grads))


REFUSED: dict[str, Callable[[Asked], None]] = {
    "third": _third, "left out": _left_out, "only one": _only_one, "other order": _other_order,
    "plain instead": _plain_instead, "x apart": _of_x_apart, "tied apart": _of_tied_apart, "detached": _detached_loss,
    "batched": _batched, "freed": _freed, "freed at once": _freed_at_once, "parameters written": _parameters_written,
    "input written": _input_written, "grads written": _grads_written,
}  # fmt: skip


def refused(which: Sequence[str]) -> list[tuple[str, float]]:
    """For each the error's words on this rank, and how far a right second derivative after it is from the plain one."""
    found = []
    for how in which:
        asked, words = Asked(), ""
        try:
            REFUSED[how](asked)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        found.append((words, _error_of(asked)))
    return found


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def unreached(is_frozen: bool) -> tuple[str, float]:
    """The words of an error, and how far a second derivative is off, where no gradient reaches the first rank."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(not is_frozen), Detach(), nn.Linear(4, 4), nn.Tanh()).double()
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [1, 3], chunks=2, timeout=20.0)
    x, targets = rows(6), trained(pipe)
    grads = torch.autograd.grad(pipe(x).square().sum(), targets, create_graph=True, allow_unused=True)
    assert [grad is None for grad in grads] == [dist.get_rank() == 0 and not is_frozen] * len(grads)
    try:
        here = torch.autograd.grad(pipe.grad_norm(grads), targets, allow_unused=True)
        pipe(x)
    except MismatchError as error:
        return str(error), 0.0
    own = list(plain[2].parameters())
    wanted = torch.autograd.grad(plain(x).square().sum(), own, create_graph=True)
    wanted = torch.autograd.grad(torch.stack([grad.square().sum() for grad in wanted]).sum().sqrt(), own)
    pairs = [(one, other) for one, other in zip(here, wanted, strict=False) if one is not None and one.numel()]
    return "", max((float((one - other).abs().max()) for one, other in pairs), default=0.0)


def _error_of(asked: Asked) -> float:
    firsts = asked.gradients()
    here = torch.autograd.grad(_of_parameters(firsts) + firsts[0].sum(), asked.targets)
    torch.manual_seed(0)
    targets = [asked.x, *asked.plain.parameters()]
    firsts = torch.autograd.grad(asked.plain(asked.x).square().sum(), targets, create_graph=True)
    wanted = torch.autograd.grad(_of_parameters(firsts) + firsts[0].sum(), targets)
    places = {id(one): place for place, one in enumerate([asked.x, *asked.model.parameters()])}
    return max(
        float((grad - wanted[places[id(one)]]).abs().max()) for one, grad in zip(asked.targets, here, strict=True)
        if id(one) in places
    )  # fmt: skip
