"""Does one call over ranks give the plain module's bits? The call, and what the plain module makes of it.

    config --one_call(make)--> outputs, loss, x.grad, gradients and buffers of this process, after one call of a Pipe
    config --plainly----------> the same of the plain module, chunk by chunk (law_reference.py): it knows of no Pipe

    compare_all(configs)   this rank's one_call against both: one process, and the plain module
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from law_check import CHECKPOINTS, expect, ready, through_the_entry_point
from law_reference import Result
from one_and_many import SEED, Compared, Found, Make, compared, differences, in_one_process, over_ranks
from rank_models import even, padded
from skip_models import MANY_READERS
from torch import Tensor
from torch.utils import _pytree as pytree

from scheduler import ScheduleError, by_name

STAGES = {"one": lambda size: size, "one more": lambda size: size + 1, "two": lambda size: 2 * size}
ROWS = {"even": lambda chunks: 2 * chunks, "uneven": lambda chunks: 2 * chunks - 1, "tiny": lambda chunks: chunks - 1}
TWO_A_LANE = ("1f1b-v", "dualpipev", "v-half", "v-min", "zb-v")
LOOPS = ("interleaved", "interleaved-zb", "looped-bfs")  # as many stages on one rank as on another


def runnable(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A configuration in words, in numbers that its schedule takes.

    Args:
        config: "stages" a key of STAGES, "rows" one of ROWS; the rest as in law_check.AXES.
        size: how many ranks.
    """
    kind, name = config["stages"], config["schedule"]
    if name in TWO_A_LANE or (name in LOOPS and kind == "one more"):
        kind = "two"
    stages = STAGES[kind](size)
    chunks = max(config["chunks"], least_chunks(name, stages) + (config["rows"] == "tiny"))
    layers = len(padded(config["model"], stages).model)
    return {
        **config, "stages": stages, "chunks": chunks, "rows": max(1, ROWS[config["rows"]](chunks)),
        "balance": even(layers, stages),
    }  # fmt: skip


def least_chunks(name: str, stages: int) -> int:
    """How many chunks a schedule must have for so many stages."""
    lanes = stages // by_name(name, 1, 9).stages
    for chunks in range(1, 99):
        try:
            by_name(name, lanes, chunks)
            return chunks
        except ScheduleError:
            pass
    raise AssertionError(name)


def one_call(make: Make, config: Mapping[str, Any]) -> Found:
    """What a call of a Pipe leaves in this process."""
    case = padded(config["model"], config["stages"])
    x = ready(case, config["train"], config["input_grad"], config["rows"])
    settings = {"checkpoint": CHECKPOINTS[config["checkpoint"]], "schedule": config["schedule"],
                "mixes_rows": not case.rowwise}  # fmt: skip
    pipe = make(case.model, config["balance"], config["chunks"], **settings)
    outputs, loss = through_the_entry_point(config, case, pipe, x)
    own = {name for name, _ in pipe.named_parameters()}
    strangers = [name for name, one in case.model.named_parameters() if name not in own and one.grad is not None]
    assert not strangers, f"other ranks' parameters have gradients here: {strangers}"
    tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    buffers = dict(pipe.named_buffers())
    inputs = [tensor.grad for tensor in tensors]
    return dict(named(Result(outputs, loss, inputs, grads, buffers, [leaf.grad for leaf in case.extras])))


def plainly(config: Mapping[str, Any]) -> Found:
    """The same of the plain module."""
    models = {config["model"]: partial(padded, config["model"], config["stages"])}
    return dict(named(expect(config, models)))


def named(result: Result) -> Iterator[tuple[str, Any]]:
    """A result as names and values. A leaf that no module knows has a gradient on the rank that computes with it."""
    yield "outputs", pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), result.outputs)
    yield "loss", None if result.loss is None else result.loss.detach()
    yield "gradients of the input", result.input_grads
    for kind, found in (("gradient of", result.grads), ("buffer", result.buffers)):
        for name, value in found.items():
            yield f"{kind} {name}", value
    for number, grad in enumerate(result.extra_grads):
        if grad is not None:
            yield f"gradient of extra {number}", grad


def compare_all(configs: list[dict[str, Any]]) -> list[Compared]:
    """Each configuration on this rank, against one process and against the plain module."""
    return compared(configs, alone, partial(one_call, over_ranks))


def alone(config: Mapping[str, Any]) -> Found:
    """What one process knows, if it is what the plain module knows.

    In one process a schedule has a lane for each stage, of which there may be too few or too many: then gpipe, since
    all schedules give the same bits.
    """
    torch.manual_seed(SEED)
    plain = plainly(config)
    try:
        piped = one_call(in_one_process, config)
    except ScheduleError:
        piped = one_call(in_one_process, {**config, "schedule": "gpipe"})
    assert piped.keys() == plain.keys()
    if config["model"] not in MANY_READERS:  # their gradients are summed in another order than the plain module's
        assert not (wrong := differences(piped, plain)), wrong
    return piped
