"""Does a Pipe give what the plain module gives? One configuration, run through an entry point and compared bit for bit.

    config --observe--> Result of the pipe    config --expect--> Result of the plain module    differences(ours, theirs)
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from law_models import MODELS, Case, normal, per_row
from law_reference import Result, call_seed, reference, reference_step
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline import Pipe
from pipeline.common.places import Place

SEED = 17

CHECKPOINTS: dict[str, Any] = {
    "always": "always",
    "except_last": "except_last",
    "never": "never",
    "callable": lambda stage, chunk: (stage + chunk) % 2 == 0,
}

DRIVES: dict[str, Callable[[int], dict[str, Any]]] = {
    "inline": lambda stages: {},
    "threads": lambda stages: {"workers": "threads"},
    "apart": lambda stages: {"devices": apart(stages)},
    "apart, threads": lambda stages: {"devices": apart(stages), "workers": "threads"},
}

AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "balance": ("whole", "first alone", "last alone", "halves", "each alone"),
    "chunks": (1, 2, 3, 4, 8),
    "rows": (1, 2, 5, 7, 8, 16),
    "checkpoint": tuple(CHECKPOINTS),
    "train": (True, False),
    "entry": ("forward", "step mean", "step sum"),
    "schedule": ("gpipe", "1f1b"),
    "drive": tuple(DRIVES),
    "input_grad": (True, False),
}


def apart(stages: int) -> list[Place]:
    """As if each stage had a device of its own."""
    return [Place(torch.device("cpu"), str(stage)) for stage in range(stages)]


def balance_of(kind: str | list[int], layers: int) -> list[int]:
    """The layers of each stage."""
    if isinstance(kind, list):
        return kind
    half = layers // 2
    kinds = {
        "whole": [layers],
        "first alone": [1, layers - 1],
        "last alone": [layers - 1, 1],
        "halves": [half, layers - half],
        "each alone": [1] * layers,
    }
    return kinds[kind]


def ready(case: Case, train: bool, input_grad: bool, rows: int, device: str = "cpu") -> Any:
    """Put the model in its mode, and on a device; return the input, which is there too."""
    case.model.train(train).to(device)
    x = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), case.make_input(rows))
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        leaf.requires_grad_(input_grad and leaf.is_floating_point())
    return x


def row_loss(reduction: str) -> Callable[[Any, Tensor], Tensor]:
    """A mean or a sum over rows of a non-linear number for each."""

    def loss_fn(out: Any, y: Tensor) -> Tensor:
        rows = per_row(out)
        loss: Tensor = getattr(rows * y.to(rows.device), reduction)()
        return loss

    return loss_fn


def target_of(rows: int) -> Tensor:
    return normal(rows, seed=9)


def expect(
    config: Mapping[str, Any], models: Mapping[str, Callable[[], Case]] = MODELS, device: str = "cpu"
) -> Result:
    """What the plain module gives on a device, chunk by chunk."""
    case = models[config["model"]]()
    x = ready(case, config["train"], config["input_grad"], config["rows"], device)
    seed = call_seed(SEED)
    if config["entry"] == "forward":
        return reference(case.model, x, config["chunks"], seed, case.loss, case.extras)
    reduction = config["entry"].split()[1]
    target = target_of(config["rows"]).to(device)
    return reference_step(
        case.model, x, target, config["chunks"], seed, row_loss(reduction), reduction, extras=case.extras
    )


def observe(config: Mapping[str, Any], models: Mapping[str, Callable[[], Case]] = MODELS) -> Result:
    """What a Pipe gives; x is found as it was."""
    case = models[config["model"]]()
    x = ready(case, config["train"], config["input_grad"], config["rows"])
    tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    balance = balance_of(config["balance"], len(case.model))
    pipe = Pipe(
        case.model,
        balance,
        config["chunks"],
        checkpoint=CHECKPOINTS[config["checkpoint"]],
        schedule=config["schedule"],
        mixes_rows=not case.rowwise,
        **DRIVES[config["drive"]](len(balance)),
    )
    torch.manual_seed(SEED)
    outputs, loss = through_the_entry_point(config, case, pipe, x)
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value) and tensor._version == version, "x was written"
    return observed(case, x, outputs, loss)


def through_the_entry_point(config: Mapping[str, Any], case: Case, pipe: Pipe, x: Any) -> tuple[Any, Tensor]:
    """Forward, loss and backward; the outputs and the loss."""
    if config["entry"] == "forward":
        outputs = pipe(x)
        loss = case.loss(outputs)
        if loss.requires_grad:
            loss.backward()
        return outputs, loss
    reduction = config["entry"].split()[1]
    target = target_of(config["rows"])
    step = pipe.step(x, target, loss_fn=row_loss(reduction), loss_reduction=reduction, outputs=True)
    return step.outputs, step.loss


def observed(case: Case, x: Any, outputs: Any, loss: Tensor | None) -> Result:
    """What a call of a Pipe around `case.model` left behind."""
    tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    return Result(
        outputs=pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), outputs),
        loss=None if loss is None else loss.detach(),
        input_grads=[tensor.grad for tensor in tensors],
        grads={name: param.grad for name, param in case.model.named_parameters()},
        buffers={name: buffer.detach().clone() for name, buffer in case.model.named_buffers()},
        extra_grads=[leaf.grad for leaf in case.extras],
    )


def differences(ours: Result, theirs: Result, alike: Callable[[Any, Any], bool] | None = None) -> list[str]:
    """What is not the same bits (or the same None), in words. `alike`: another judge of two values."""
    alike = alike or same
    return [
        f"{field}{pytree.keystr(path)}: {_short(mine)} instead of {_short(other)}"
        for field in ("outputs", "loss", "input_grads", "grads", "buffers", "extra_grads")
        for path, mine, other in _paired(getattr(ours, field), getattr(theirs, field))
        if not alike(mine, other)
    ]


def _paired(ours: Any, theirs: Any) -> Iterator[tuple[Any, Any, Any]]:
    left, spec = pytree.tree_flatten_with_path(ours)
    right, other_spec = pytree.tree_flatten_with_path(theirs)
    if spec != other_spec:
        yield (), spec, other_spec
        return
    for (path, mine), (_, other) in zip(left, right, strict=True):
        yield path, mine, other


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)} {value.flatten()[:3].tolist()}"
    return str(value)
