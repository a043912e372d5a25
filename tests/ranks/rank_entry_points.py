"""What do training scripts do with `pipe(x)`? Each function here is one, for one_and_many.py to run both ways.

    out = pipe(x) --> loss of out, on every rank --> loss.backward() --> gradients, each on its parameter's rank
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from one_and_many import Found, Make, state_of
from rank_models import even, layered, rows, square
from torch import Tensor, nn

from pipeline import Pipe

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


def piped(make: Make, stages: int, **settings: Any) -> Pipe:
    return make(layered(8), even(8, stages), 3, **settings)


def trained(make: Make, stages: int, optimizer: str, checkpoint: str) -> Found:
    pipe = piped(make, stages, checkpoint=checkpoint)
    stepper = OPTIMIZERS[optimizer](pipe.parameters())
    found: Found = {}
    for step in range(4):
        stepper.zero_grad()
        loss = square(pipe(rows(7, seed=step)), rows(7, seed=20 + step))
        loss.backward()
        found |= {f"{step} loss": loss.detach(), **state_of(pipe, step)}
        stepper.step()
    return {**found, **state_of(pipe, "end")}


def scripted(make: Make, stages: int) -> Found:
    """Steps of layers of torch.jit, then an evaluation."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double() for _ in range(stages)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        model = nn.Sequential(*map(torch.jit.script, layers))
    pipe = make(model, [1] * stages, 2)
    stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with torch.jit.optimized_execution(False):  # which has other last bits
        losses = [pipe.step(rows(6), rows(6, seed=step), loss_fn=square, optimizer=stepper).loss for step in range(3)]
        last = pipe.evaluate(rows(6), rows(6), loss_fn=square).loss
    return {"losses": losses, "last": last, **state_of(pipe)}


def evaluated(make: Make, stages: int) -> Found:
    """A data set in mini-batches of unequal sizes, with a metric; the loss counts some rows only."""

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        counts, metrics = target[:, :1] > 0, {"largest": (output.amax(1).sum(), len(output))}
        return ((output - target).square() * counts).sum(), counts.sum(), metrics

    pipe = piped(make, stages)
    step = pipe.evaluate(((rows(size, seed=size), rows(size, seed=9)) for size in (6, 1, 4)), loss_fn=loss_fn)
    return {"loss": step.loss, **step.metrics, **state_of(pipe, "end")}


class Recalling(nn.Linear):
    """Adds in eval mode what the rows of its last call were in the mean."""

    last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        earlier, self.last = self.last, x.detach().mean(0)
        return super().forward(x if self.training else x + earlier)


def keeping_rows_in_eval_mode() -> str:
    """What is said when the third call is the first in eval mode."""
    torch.manual_seed(1)
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Recalling(4, 4)).double(), [1, 1], 2)
    for seed in (1, 2):
        pipe.step(rows(6, seed=seed), rows(6), loss_fn=square)
    try:
        pipe.evaluate(rows(6, seed=3), rows(6), loss_fn=square)
    except RuntimeError as error:
        return str(error)
    return ""


def inferred(make: Make, stages: int) -> Found:
    """Without gradients, in train and in eval mode, before, between and after what has some."""
    pipe = piped(make, stages)
    found: Found = {}
    for step, (mode, context) in enumerate([(True, torch.no_grad), (False, torch.no_grad), (False, torch.enable_grad),
                                            (False, torch.inference_mode), (True, torch.enable_grad)]):
        pipe.train(mode)
        with context():
            out = pipe(rows(6, seed=step))
            assert out.requires_grad == (context is torch.enable_grad)
            assert out.is_inference() == (context is torch.inference_mode)
            if out.requires_grad:
                out.sum().backward()
        found |= {f"{step} out": out.detach().clone(), **state_of(pipe, step)}
    return found


def several(make: Make, stages: int, order: str) -> Found:
    """Three forwards, of other sizes, then their backwards."""
    pipe = piped(make, stages)
    losses = [square(pipe(rows(count, seed=count)), rows(count)) for count in (7, 9, 6)]
    if order == "joined":
        (losses[0] + losses[1] * losses[2]).backward()
    else:
        for loss in reversed(losses) if order == "last first" else losses:
            loss.backward()
    return {"losses": [loss.detach() for loss in losses], **state_of(pipe)}


def twice(make: Make, stages: int, checkpoint: str) -> Found:
    """A backward that keeps the graph, and a second one, of another loss of the same output."""
    pipe = piped(make, stages, checkpoint=checkpoint)
    x = rows(7).requires_grad_()
    out = pipe(x)
    out.square().sum().backward(retain_graph=True)
    first = {f"first {name}": value for name, value in state_of(pipe).items()}
    out.sin().sum().backward()
    return {**first, **state_of(pipe), "x.grad": x.grad}


def accumulated(make: Make, stages: int) -> Found:
    """Three mini-batches before an optimizer step, twice."""
    pipe = piped(make, stages)
    stepper = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: Found = {}
    for step in range(2):
        for part in range(3):
            square(pipe(rows(6 + part, seed=part)), rows(6 + part)).backward()
        found |= state_of(pipe, step)
        stepper.step()
        stepper.zero_grad()
    return {**found, **state_of(pipe, "end")}


def surrounded(make: Make, stages: int) -> Found:
    """Layers before the pipe and after it, which every rank has, and each computes in full."""
    torch.manual_seed(5)
    before, after = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    pipe = piped(make, stages)
    x = rows(7).requires_grad_()
    loss = after(pipe(before(x).tanh())).square().mean()
    loss.backward()
    own = {f"{name} of {where}": one.grad for where, layer in (("before", before), ("after", after))
           for name, one in layer.named_parameters()}
    return {"loss": loss.detach(), "x.grad": x.grad, **own, **state_of(pipe)}


def asked(make: Make, stages: int, what: str) -> Found:
    """torch.autograd.grad of what a rank has, and of x: `.grad` stays None."""
    pipe = piped(make, stages)
    x = rows(7).requires_grad_()
    loss = square(pipe(x), rows(7, seed=9))
    own = dict(pipe.named_parameters())
    wanted = {"x": [], "parameters": list(own), "both": list(own)}[what]
    given = [x] if what != "parameters" else []
    grads = torch.autograd.grad(loss, [*[own[name] for name in wanted], *given], allow_unused=True)
    assert x.grad is None and all(one.grad is None for one in own.values())
    names = [f"gradient of {name}" for name in wanted] + ["gradient of x" for _ in given]
    return dict(zip(names, grads, strict=True))


class Detached(nn.Linear):
    """It computes, and no gradient goes to it or through it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach()


MIDDLE = {"has none": nn.Tanh, "uses none": lambda: Detached(4, 4)}


def asked_of_all(make: Make, stages: int, middle: str) -> Found:
    """The same of `pipe.parameters()`, where a rank has or uses none of its own; then a second backward."""
    torch.manual_seed(3)
    layers = [nn.Linear(4, 4) if stage != 1 else MIDDLE[middle]() for stage in range(stages)]
    pipe = make(nn.Sequential(*layers).double(), [1] * stages, 2, timeout=15.0)
    name_of = {id(parameter): name for name, parameter in pipe.named_parameters()}
    loss = square(pipe(rows(6)), rows(6, seed=2))
    wanted = list(pipe.parameters())
    grads = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    torch.autograd.backward(loss, inputs=wanted)
    found = [(name_of.get(id(one)), one, grad) for one, grad in zip(wanted, grads, strict=True)]
    return {name: (grad, one.grad) for name, one, grad in found if name is not None}


def frozen(make: Make, stages: int, which: tuple[int, ...], input_grad: bool) -> Found:
    """Whole stages are frozen."""
    model, balance = layered(8), even(8, stages)
    ends = [sum(balance[: stage + 1]) for stage in range(stages)]
    for stage in which:
        model[ends[stage] - balance[stage] : ends[stage]].requires_grad_(False)
    pipe = make(model, balance, 3)
    x = rows(7).requires_grad_(input_grad)
    out = pipe(x)
    if out.requires_grad:
        square(out, rows(7)).backward()
    return {"out": out.detach(), "requires grad": out.requires_grad, "x.grad": x.grad, **state_of(pipe)}


def filtered(make: Make, stages: int, which: tuple[int, ...], entry: str) -> Found:
    """Whole stages are frozen through the Pipe, and the optimizer gets what is left, as with adapters."""
    model, balance = layered(8), even(8, stages)
    pipe = make(model, balance, 3)
    for param in pipe.parameters():
        param.requires_grad_(False)
    ends = [sum(balance[: stage + 1]) for stage in range(stages)]
    for stage in set(range(stages)) - {*which}:
        model[ends[stage] - balance[stage] : ends[stage]].requires_grad_(True)
    stepper = torch.optim.AdamW([param for param in pipe.parameters() if param.requires_grad], lr=0.1)
    found: Found = {}
    for step in range(2):
        if entry == "step":
            found[f"{step} loss"] = pipe.step(rows(7), rows(7, seed=2), loss_fn=square, optimizer=stepper).loss
        else:
            stepper.zero_grad()
            square(pipe(rows(7)), rows(7, seed=2)).backward()
            stepper.step()
    saved = pipe.full_optimizer_state_dict(stepper)
    pipe.load_optimizer_state_dict(stepper, pipe.optimizer_state_dict(stepper))
    names = None if saved is None else [name for group in saved["param_groups"] for name in group["param_names"]]
    return {**found, **state_of(pipe), **({} if names is None else {"names": names})}


def bare(make: Make, stages: int, which: int, entry: str) -> Found:
    """A stage without a parameter."""
    layers = [nn.Linear(4, 4) if stage != which else nn.Tanh() for stage in range(stages)]
    torch.manual_seed(3)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    pipe = make(nn.Sequential(*layers).double(), [1] * stages, 2)
    stepper = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    found: Found = {}
    for step in range(2):
        stepper.zero_grad()
        if entry == "step":
            found[f"{step} loss"] = pipe.step(rows(5), rows(5, seed=2), loss_fn=square, optimizer=stepper).loss
        else:
            loss = square(pipe(rows(5)), rows(5, seed=2))
            loss.backward()
            stepper.step()
            found[f"{step} loss"] = loss.detach()
    return {**found, **state_of(pipe)}


def hooked(make: Make, stages: int) -> Found:
    """Hooks on parameters see one whole gradient, once, and may change it; so may a hook on the output and on x."""
    pipe = piped(make, stages)
    x = rows(7).requires_grad_()
    seen: dict[str, list[Any]] = {}

    def doubling(name: str) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            seen.setdefault(f"hook of {name}", []).append(grad.clone())
            return 2 * grad

        return hook

    for name, parameter in pipe.named_parameters():
        parameter.register_hook(doubling(name))
    x.register_hook(lambda grad: 3 * grad)
    out = pipe(x)
    out.register_hook(lambda grad: grad * grad)
    square(out, rows(7, seed=9)).backward()
    assert all(len(grads) == 1 for grads in seen.values())
    return {**seen, "x.grad": x.grad, **state_of(pipe)}


def weighed(make: Make, stages: int) -> Found:
    """A loss that adds a rank's own: a penalty on its parameters, past the pipe."""
    pipe = piped(make, stages)
    loss = square(pipe(rows(7)), rows(7, seed=9))
    penalty = sum(parameter.square().sum() for parameter in pipe.parameters())
    (loss + 0.1 * penalty).backward()
    return {"loss": loss.detach(), **state_of(pipe)}


def switched(make: Make, stages: int) -> Found:
    """Autocast around the forward alone, then a default dtype that changes between forward and backward."""
    model = layered(8).float()
    pipe = make(model, even(8, stages), 3)
    found: Found = {}
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = pipe(rows(7).float())
        loss = (out.float() - rows(7, seed=9).float()).square().mean()
        loss.backward()
        found |= {f"{step} loss": loss.detach(), f"{step} out": out.detach(), **state_of(pipe, step)}
    return found


def readme() -> int:
    """Run README's Python blocks in order, as they stand; how many there are without the doctests."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    scripts = [block for block in blocks if not block.startswith(">>>")]
    for script in scripts:
        exec(compile(script, "README.md", "exec"), names)
    return len(scripts)


# ------------------------------------------------------------------------------------------------ what is refused


def refused(how: str) -> tuple[str, list[str]]:
    """(the words of the error on this rank, what a right call after it does otherwise than one process)"""
    words = ""
    pipe = Pipe(layered(4), even(4, torch.distributed.get_world_size()), 3)
    x = rows(6).requires_grad_()
    try:
        _REFUSED[how](pipe, x)
    except (RuntimeError, TypeError) as error:
        words = f"{type(error).__name__}: {error}"
    pipe.zero_grad()
    x.grad = None
    pipe.eval()
    for layer in pipe.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()  # what is refused at the backward has had a forward
    square(pipe(x), rows(6)).backward()
    plain = layered(4).eval()
    square(plain(y := rows(6).requires_grad_()), rows(6)).backward()
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    pairs = [("x", x.grad, y.grad), *[(name, one.grad, grads[name]) for name, one in pipe.named_parameters()]]
    return words, [name for name, one, other in pairs if not torch.allclose(one, other, rtol=0, atol=1e-12)]


def applied() -> tuple[str, str, list[Tensor]]:
    """(the words of the error of a function that draws, those of one that does not, the biases after the second)"""
    found = []
    pipe = Pipe(layered(4), even(4, torch.distributed.get_world_size()), 3)
    for fill in (nn.init.normal_, nn.init.ones_):
        found.append("")
        try:
            pipe.apply(lambda module: fill(module.bias) if isinstance(module, nn.Linear) else None)
        except RuntimeError as error:
            found[-1] = str(error)
    return *found, [module.bias.detach() for module in pipe.modules() if isinstance(module, nn.Linear)]


class Counts(nn.Module):
    """A loss that counts its rows in a buffer, and has one that it reads."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("weight", torch.ones(4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.writes == "in place":
            self.seen += len(output)
        elif self.writes == "anew":
            self.seen = self.seen + len(output)
        return ((output - target).square() * self.weight).mean()


def counted(writes: str, entry: str) -> tuple[str, bool]:
    """(the words of the error, whether anything has a gradient)"""
    pipe = Pipe(layered(4), even(4, torch.distributed.get_world_size()), 3)
    x, words = rows(6), ""
    try:
        getattr(pipe, entry)(x, x, loss_fn=Counts(writes))
    except RuntimeError as error:
        words = str(error)
    return words, any(parameter.grad is not None for parameter in pipe.parameters())


def _batched(pipe: Pipe, x: Tensor) -> None:
    out = pipe(x).sum(0)
    torch.autograd.grad(out, x, torch.eye(4, dtype=torch.float64), is_grads_batched=True)


def _vmapped(pipe: Pipe, x: Tensor) -> None:
    out = pipe(x).sum(0)
    rows_of = torch.eye(4, dtype=torch.float64)
    torch.func.vmap(lambda grad: torch.autograd.grad(out, x, grad, retain_graph=True))(rows_of)


def _functional(pipe: Pipe, x: Tensor) -> None:
    torch.func.grad(lambda x: pipe(x).sum())(x)


def _spent(pipe: Pipe, x: Tensor) -> None:
    out = pipe(x).sum()
    out.backward()
    out.backward()


def _between(pipe: Pipe, x: Tensor) -> None:
    pipe.step(pipe(x), rows(6), loss_fn=square)


_REFUSED = {
    "is_grads_batched": _batched,
    "vmap": _vmapped,
    "func.grad": _functional,
    "second backward": _spent,
    "x of a Pipe": _between,
}
