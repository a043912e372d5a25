"""Programs (programs.py): calls of a Pipe whose layers begin to do other things, against the plain module.

    a call    -> outputs, loss, gradients, buffers, generators are those of the plain module over the same chunks; or
                 the call is refused, and the program ends

The reference is law_reference.py. What several stages read is added up in another order there, so numbers are compared
to rounding.
"""


import pytest
import torch
from cover import examples
from hypothesis import given, settings
from law_check import DRIVES, differences, observed, row_loss, target_of
from law_models import Case
from law_reference import Result, call_seed, forward_only, reference, reference_step, seed_all
from programs import CALLS, Program, case_of, changed, near, programs
from shifting_layers import WAYS
from torch import Tensor

from pipeline import Pipe

SEED = 23


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
            changed(mine.model, change, pipe, mine.extras)
            changed(other.model, change, extras=other.extras)
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
            expected = theirs(other, call, copy, pipe.chunks, seed)
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
