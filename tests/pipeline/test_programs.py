"""Programs: calls of a Pipe, between which its layers begin to do other things, against the plain module.

    a program -> [("ways", 1, ("dropout",)), ("forward", 5, True), ("freeze", 0, "w", False), ("step", 3, False), ...]
    a call    -> outputs, loss, gradients, buffers, generators are those of the plain module over the same chunks; or
                 the call is refused, and the program ends

The layers are shifting_layers.py, the reference is law_reference.py. What several stages read is added up in another
order there, so numbers are compared to rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from law_check import DRIVES, differences, observed, row_loss, target_of
from law_models import Case, normal, per_row
from law_reference import Result, call_seed, forward_only, reference, reference_step, seed_all
from shifting_layers import WAYS, WIDTH, Shifting
from torch import Tensor, nn

from pipeline import Pipe

CALLS = ("forward", "no_grad", "step", "evaluate")
PARAMETERS = ("w", "u", "b", "inner.weight", "shared.weight")
SEED = 23
Change = tuple[Any, ...]


class Program(NamedTuple):
    """What is done with one Pipe, and how that is built.

    Attributes:
        ways: of each layer, at first.
        balance: of the Pipe.
        chunks: of the Pipe.
        options: of the Pipe, by name.
        changes: calls, and what is done between them.
        drive: by which the Pipe runs, a name in DRIVES.
    """

    ways: tuple[tuple[str, ...], ...]
    balance: tuple[int, ...]
    chunks: int
    options: dict[str, str]
    changes: tuple[Change, ...]
    drive: str = "inline"


@st.composite
def programs(draw: st.DrawFn) -> Program:
    names = st.sampled_from(sorted(WAYS))
    count = draw(st.integers(2, 4))
    layers = st.integers(0, count - 1)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), min_size=1)))
    call = st.tuples(st.sampled_from(CALLS), st.integers(1, 7), st.booleans())
    change = st.one_of(
        st.tuples(st.just("ways"), layers, st.lists(names, min_size=1, max_size=3).map(tuple)),
        st.tuples(st.just("train"), st.booleans()),
        st.tuples(st.just("freeze"), layers, st.sampled_from(PARAMETERS), st.booleans()),
        st.tuples(st.just("descend")),
        st.tuples(st.just("replace"), layers),
    )
    options = {
        "checkpoint": draw(st.sampled_from(["always", "never", "except_last"])),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
    }
    drive = draw(st.sampled_from(sorted(DRIVES)))
    changes = draw(st.lists(st.one_of(call, call, change), min_size=1, max_size=12))
    balance = tuple([end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)])
    ways = tuple([("linear", *draw(st.lists(names, max_size=1))) for _ in range(count)])
    return Program(ways, balance, draw(st.integers(1, 4)), options, tuple(changes), drive)


def case_of(ways: Sequence[tuple[str, ...]]) -> Case:
    shared = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        shared.weight.copy_(normal(WIDTH, WIDTH, seed=90) / 2)
        shared.bias.zero_()
    captured = torch.full((WIDTH,), 0.7, dtype=torch.float64, requires_grad=True)
    layers = [Shifting(number, shared, captured) for number in range(len(ways))]
    for layer, own in zip(layers, ways, strict=True):
        layer.ways = own
    return Case(nn.Sequential(*layers), lambda rows: normal(rows, WIDTH), joined_loss, extras=(captured,))


def joined_loss(output: Any) -> Tensor:
    return per_row(output).sum()


def changed(case: Case, change: Change) -> None:
    """Do something else than a call to a model."""
    kind, *what = change
    if kind == "train":
        case.model.train(what[0])
    elif kind == "descend":
        with torch.no_grad():
            for param in [*case.model.parameters(), *case.extras]:
                if param.grad is not None:
                    param.sub_(0.05 * param.grad.clamp(-1, 1))
    else:
        layer: Any = case.model[what[0]]
        if kind == "ways":
            layer.ways = what[1]
        elif kind == "freeze":
            layer.get_parameter(what[1]).requires_grad_(what[2])
        else:
            layer.u = nn.Parameter(0.9 * layer.u.detach())


def ours(case: Case, pipe: Pipe, call: str, x: Tensor) -> Result:
    """A call of the Pipe, and its backward."""
    loss_fn, target, loss = row_loss("mean"), target_of(len(x)), None
    if call == "no_grad":
        with torch.no_grad():
            outputs = pipe(x)
    elif call == "forward":
        outputs = pipe(x)
        loss = case.loss(outputs)
        if loss.requires_grad:
            loss.backward()
    else:
        ask = pipe.step if call == "step" else pipe.evaluate
        step = ask(x, target, loss_fn=loss_fn, outputs=True)
        outputs, loss = step.outputs, step.loss
    return observed(case, x, outputs, loss)


def theirs(case: Case, call: str, x: Tensor, chunks: int, seed: int) -> Result:
    """The same of the plain module, chunk by chunk."""
    loss_fn, target, loss = row_loss("mean"), target_of(len(x)), None
    if call == "step":
        return reference_step(case.model, x, target, chunks, seed, loss_fn, extras=case.extras)
    if call == "forward":
        return reference(case.model, x, chunks, seed, case.loss, case.extras)
    modes = [(module, module.training) for module in case.model.modules()]
    with torch.no_grad():
        if call == "evaluate":
            case.model.eval()
        outputs = forward_only(case.model, x, chunks, seed)
        if call == "evaluate":
            loss = loss_fn(outputs, target)
    for module, mode in modes:
        module.training = mode
    return observed(case, x, outputs, loss)


def run(program: Program) -> tuple[list[str], str]:
    """What is not as it should be; and the words by which a call was refused, if one was, also by the plain module."""
    mine, other = case_of(program.ways), case_of(program.ways)
    drive = DRIVES[program.drive](len(program.balance))
    pipe = Pipe(mine.model, list(program.balance), program.chunks, **program.options, **drive)
    for number, change in enumerate(program.changes):
        if change[0] not in CALLS:
            changed(mine, change)
            changed(other, change)
            continue
        call, rows, needs_grad = change
        x, copy = (mine.make_input(rows).requires_grad_(needs_grad) for _ in range(2))
        seed = call_seed(SEED + number)
        seed_all(SEED + number)
        try:
            found = ours(mine, pipe, call, x)
        except Exception as error:
            return [], f"{type(error).__name__}: {error}"
        drawn = torch.get_rng_state()
        seed_all(SEED + number)
        torch.empty((), dtype=torch.int64).random_()
        try:
            expected = theirs(other, call, copy, program.chunks, seed)
        except RuntimeError as error:
            if "inplace operation" in str(error) or "single memory location" in str(error):
                return [], f"the plain module: {error}"  # which has no copies between stages
            raise
        wrong = [] if torch.equal(drawn, torch.get_rng_state()) else ["torch's default generator"]
        wrong += differences(found, expected, near)
        wrong += [
            f"layer {place}: {one.calls} calls instead of {two.calls}"
            for place, (one, two) in enumerate(zip(mine.model, other.model, strict=True)) if one.calls != two.calls
        ]  # fmt: skip
        if wrong:
            return [f"call {number} {change}", *wrong], ""
    return [], ""


def near(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.allclose(one, other, rtol=1e-9, atol=1e-11, equal_nan=True)
    return type(one) is type(other) and bool(one == other)


@settings(max_examples=examples(2000))
@given(programs())
def test_calls_of_a_pipe_whose_layers_change_are_the_plain_modules_or_refused(program):
    wrong, _ = run(program)
    assert not wrong


MAY_BE_REFUSED = {
    "write_input": "inplace operation",  # by autograd: tanh, which made it, has saved it
    "write_input_and_return_another": "inplace operation",
    "forked": "reads the number or the places of the rows",  # unseeded, each row has its number by its place
    **dict.fromkeys(["running_mean_unseen", "new_buffer", "keep_a_mean"], "have run before it"),  # it keeps rows
}


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_the_plain_modules_in_all_calls(way, checkpoint):
    changes = [(call, rows, rows > 4) for call in CALLS for rows in (5, 3, 6)]
    options = {"checkpoint": checkpoint, "schedule": "1f1b"}
    program = Program((("linear",), ("linear", way), ("linear",)), (1, 1, 1), 2, options, tuple(changes))
    wrong, refusal = run(program)
    assert not wrong
    assert not refusal or MAY_BE_REFUSED[way] in refusal
