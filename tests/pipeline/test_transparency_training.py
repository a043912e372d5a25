"""Law 1 over several calls: training, accumulation, evaluation, and what a call may not leave behind."""

from typing import Any

import pytest
import torch
from law_check import CHECKPOINTS, balance_of, differences, observed, ready, row_loss, target_of
from law_models import MODELS, sum_loss
from law_reference import call_seed, forward_only, reference, reference_step
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline import Pipe

# torch's own words for checkpoint(use_reentrant=True) without gradients, on the plain module too
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def seed_of(call: int) -> int:
    """torch.manual_seed before a call: another one each time."""
    return 100 + call


def pipe_of(model: str, checkpoint: str = "except_last", chunks: int = 3, **what: Any) -> tuple[Any, Pipe]:
    case = MODELS[model]()
    return case, Pipe(case.model, balance_of("each alone", len(case.model)), chunks, checkpoint=checkpoint,
                      mixes_rows=not case.rowwise, **what)  # fmt: skip


def same_tensors(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("entry", ["step", "step and own optimizer", "store", "forward"])
@pytest.mark.parametrize("model", MODELS)
def test_three_training_steps_give_the_reference_loops_parameters(model, entry, optimizer):
    """The optimizer's own state must see the same history; parameters without a gradient are left alone."""
    plain, (case, pipe) = MODELS[model](), pipe_of(model)
    loss_fn, y = row_loss("mean"), target_of(7)
    theirs = OPTIMIZERS[optimizer]([*plain.model.parameters(), *plain.extras])
    ours = OPTIMIZERS[optimizer]([*case.model.parameters(), *case.extras])
    x = case.make_input(7)
    for call in range(3):
        seed = call_seed(seed_of(call))
        if entry == "forward":
            reference(plain.model, x, 3, seed, plain.loss, plain.extras)
        else:
            reference_step(plain.model, x, y, 3, seed, loss_fn, "mean")
        theirs.step()
        theirs.zero_grad()

        torch.manual_seed(seed_of(call))
        if entry == "forward":
            case.loss(pipe(x)).backward()
            ours.step()
        elif entry == "step":
            pipe.step(x, y, loss_fn=loss_fn, optimizer=ours)
            assert all(param.grad is None for param in case.model.parameters())
        elif entry == "store":
            pipe.step(x, y, loss_fn=loss_fn, grads="store").grads.apply(ours)
        else:
            pipe.step(x, y, loss_fn=loss_fn)
            ours.step()
        ours.zero_grad()
        assert same_tensors(case.model.state_dict(), plain.model.state_dict()), call
        assert same_tensors(case.extras, plain.extras), call


@pytest.mark.parametrize("backwards", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("model", MODELS)
def test_several_forwards_may_stand_before_their_backwards_in_any_order(model, checkpoint, backwards):
    """Each backward recomputes with its own call's masks and buffers, although later forwards have moved them on."""
    plain, (case, pipe) = MODELS[model](), pipe_of(model, CHECKPOINTS[checkpoint])
    forwards = []
    for call in range(3):
        x = ready(case, True, True, 4 + call)
        torch.manual_seed(seed_of(call))
        forwards.append((x, pipe(x)))
    seeds = [call_seed(seed_of(call)) for call in range(3)]
    xs = [ready(plain, True, True, 4 + call) for call in range(3)]
    theirs = [reference(plain.model, x, 3, seed, plain.loss) for x, seed in zip(xs, seeds, strict=True)]
    assert same_tensors(case.model.state_dict(), plain.model.state_dict())
    alone = _gradients_of_each_call(model, 3)
    total: dict[str, Tensor | None] = {}
    for call in backwards:
        x, out = forwards[call]
        case.loss(out).backward()
        input_grads = [leaf.grad for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
        assert same_tensors(input_grads, theirs[call].input_grads)
        for name, grad in alone[call].items():
            earlier = total.get(name)
            total[name] = grad if earlier is None else earlier if grad is None else earlier + grad
        assert same_tensors({name: param.grad for name, param in case.model.named_parameters()}, total)


def _gradients_of_each_call(model: str, calls: int) -> list[dict[str, Tensor | None]]:
    """Each call's whole gradients, on a model whose buffers have seen the calls before."""
    case = MODELS[model]()
    found = []
    for call in range(calls):
        x = ready(case, True, True, 4 + call)
        found.append(reference(case.model, x, 3, call_seed(seed_of(call)), case.loss).grads)
        for param in case.model.parameters():
            param.grad = None
    return found


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_accumulate_over_calls_without_rescaling(model, entry):
    """`.grad` grows by each call's whole gradient, as by each backward() of the plain module."""
    plain, (case, pipe) = MODELS[model](), pipe_of(model)
    total: dict[str, Tensor] = {}
    for call in range(3):
        x, y = case.make_input(5 + call), target_of(5 + call)
        seed = call_seed(seed_of(call))
        if entry == "forward":
            result = reference(plain.model, x, 3, seed, plain.loss)
        else:
            result = reference_step(plain.model, x, y, 3, seed, row_loss("sum"), "sum")
        for name, grad in result.grads.items():
            if grad is not None:
                total[name] = total[name] + grad if name in total else grad
        for param in plain.model.parameters():
            param.grad = None
        torch.manual_seed(seed_of(call))
        if entry == "forward":
            case.loss(pipe(x)).backward()
        else:
            pipe.step(x, y, loss_fn=row_loss("sum"), loss_reduction="sum")
        ours = {name: param.grad for name, param in case.model.named_parameters() if param.grad is not None}
        assert same_tensors(ours, total)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_evaluate_gives_the_plain_modules_eval_output_and_leaves_no_trace(model, chunks, checkpoint):
    plain, (case, pipe) = MODELS[model](), pipe_of(model, CHECKPOINTS[checkpoint], chunks)
    x, y = case.make_input(7), target_of(7)
    pipe.train()
    case.model[0].eval()  # a mixture of modes comes back as it was
    modes = [module.training for module in case.model.modules()]
    torch.manual_seed(3)
    step = pipe.evaluate(x, y, loss_fn=row_loss("mean"))
    assert [module.training for module in case.model.modules()] == modes
    assert same_tensors(case.model.state_dict(), plain.model.state_dict())
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(step.outputs) if isinstance(leaf, Tensor))

    plain.model.eval()
    with torch.no_grad():
        assert same_tensors(step.outputs, forward_only(plain.model, x, chunks, call_seed(3)))
        if plain.rowwise:  # else a row's output depends on the chunk that it is in
            whole = plain.model(pytree.tree_map_only(Tensor, torch.clone, x))
            torch.testing.assert_close(step.outputs, whole, rtol=1e-13, atol=1e-14)
            torch.testing.assert_close(step.loss, row_loss("mean")(whole, y), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_without_gradients_outputs_and_buffers_equal_the_plain_modules(model, train, mode):
    plain, (case, pipe) = MODELS[model](), pipe_of(model, "always")
    x = ready(case, train, False, 7)
    plain.model.train(train)
    seed = call_seed(5)
    with mode():
        out = pipe(x)
        assert same_tensors(out, forward_only(plain.model, x, 3, seed))
    assert same_tensors(case.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("chunks, rows", [(1, 4), (3, 8), (8, 5)])
def test_batch_norm_counts_each_chunk_once(chunks, rows, entry, checkpoint):
    case, pipe = pipe_of("convnet", CHECKPOINTS[checkpoint], chunks)
    x, y = case.make_input(rows), target_of(rows)
    for call in range(1, 3):
        if entry == "forward":
            case.loss(pipe(x)).backward()
        else:
            pipe.step(x, y, loss_fn=row_loss("mean"))
        assert case.model[1].num_batches_tracked == case.model[5][0].num_batches_tracked == call * min(chunks, rows)


@pytest.mark.parametrize("model", MODELS)
def test_two_pipes_around_two_models_do_not_know_of_each_other(model):
    """Interleaved calls of both; each ends as it would alone."""
    (one, first), (other, second) = pipe_of(model, "always"), pipe_of(model, "never", schedule="gpipe")
    x1, x2 = ready(one, True, True, 5), ready(other, True, True, 6)
    torch.manual_seed(1)
    out1 = first(x1)
    torch.manual_seed(2)
    out2 = second(x2)
    loss1, loss2 = one.loss(out1), other.loss(out2)
    loss1.backward()
    loss2.backward()
    for case, x, out, loss, seed, rows in ((one, x1, out1, loss1, 1, 5), (other, x2, out2, loss2, 2, 6)):
        plain = MODELS[model]()
        theirs = reference(plain.model, ready(plain, True, True, rows), 3, call_seed(seed), plain.loss, plain.extras)
        assert not differences(observed(case, x, out, loss), theirs)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_two_pipes_around_one_model_share_it(model, train):
    """Another cut of the same layers: nothing of one Pipe stays in the module."""
    case, pipe = pipe_of(model, "always")
    halves = balance_of("halves", len(case.model))
    other = Pipe(case.model, halves, 2, checkpoint="never", mixes_rows=not case.rowwise)
    plain = MODELS[model]()
    x, copy = ready(case, train, True, 6), ready(plain, train, True, 6)
    for call, (each, chunks) in enumerate([(pipe, 3), (other, 2), (pipe, 3)]):
        torch.manual_seed(seed_of(call))
        out = each(x)
        loss = case.loss(out)
        loss.backward()
        theirs = reference(plain.model, copy, chunks, call_seed(seed_of(call)), plain.loss, plain.extras)
        assert not differences(observed(case, x, out, loss), theirs) or call  # sums over calls: see the next line
        for param in [*case.model.parameters(), *plain.model.parameters(), *case.extras, *plain.extras]:
            param.grad = None
        for leaf in pytree.tree_leaves((x, copy)):
            if isinstance(leaf, Tensor):
                leaf.grad = None
    assert same_tensors(case.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("model", MODELS)
def test_the_plain_module_works_as_before_beside_its_pipe(model):
    """No alias, flag or buffer of a call stays in the layers."""
    case, pipe = pipe_of(model, "always")
    before = {name: id(param) for name, param in case.model.named_parameters()}
    x = case.make_input(6)
    sum_loss(pipe(x)).backward()
    assert {name: id(param) for name, param in case.model.named_parameters()} == before
    assert {name: id(param) for name, param in pipe.named_parameters()} == before
    plain = MODELS[model]()
    reference(plain.model, x, 3, call_seed(0), plain.loss)
    if case.stateful:
        plain.model.load_state_dict(case.model.state_dict())
    case.model.eval()
    plain.model.eval()
    assert same_tensors(case.model(_copy(x)), plain.model(_copy(x)))


def _copy(x: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, x)
