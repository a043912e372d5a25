"""Law 7, hooks: a parameter's act once per backward, on the whole gradient; a module's as on the plain module."""

import warnings

import pytest
import torch
from by_chunks import CHECKPOINTS, ByChunks, assert_same_grads, same, step_by_chunks, twins
from torch import nn

from pipeline import EagerUpdate, Pipe, is_recomputing

ROWS, WIDE, CHUNKS = 7, 4, 3
ENTRIES = ("forward", "step", "step with optimizer", "step with store")


def mlp():
    return nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch():
    return torch.randn(ROWS, WIDE, dtype=torch.float64), torch.randn(ROWS, 2, dtype=torch.float64)


def mse(output, target):
    return (output - target).pow(2).mean()


def clipped(grad):
    """Not linear: on the chunks' parts it would give another sum than on the whole."""
    return grad.clamp(-0.01, 0.01) + 0.001


def run(entry, pipe, x, y):
    """One backward through an entry point; gradients by name as they reach `.grad`, the optimizer or the store."""
    if entry == "forward":
        mse(pipe(x), y).backward()
    elif entry == "step":
        pipe.step(x, y, loss_fn=mse)
    elif entry == "step with store":
        store = pipe.step(x, y, loss_fn=mse, grads="store").grads
        assert all(param.grad is None for param in pipe.parameters())
        return {name: store.get(name) for name, _ in pipe.named_parameters()}
    else:
        before = {name: param.detach().clone() for name, param in pipe.named_parameters()}
        pipe.step(x, y, loss_fn=mse, optimizer=torch.optim.SGD(pipe.parameters(), lr=1.0))
        return {name: before[name] - param.detach() for name, param in pipe.named_parameters()}
    return {name: param.grad for name, param in pipe.named_parameters()}


def whole_gradients(entry, model, x, y):
    """The plain module's, without hooks."""
    if entry == "forward":
        reference = ByChunks(model, x, CHUNKS)
        reference.backward(mse(reference.output, y))
    else:
        step_by_chunks(model, x, y, CHUNKS, mse)
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_tensor_hooks_act_once_on_the_whole_gradient(entry, checkpoint):
    ours, theirs = twins(mlp())
    x, y = batch()
    seen = {name: [] for name, _ in ours.named_parameters()}
    for name, param in ours.named_parameters():
        param.register_hook(lambda grad, name=name: seen[name].append(grad.clone()))
        param.register_hook(clipped)
    found = run(entry, Pipe(ours, [2, 2, 1], CHUNKS, checkpoint=checkpoint), x, y)
    for name, grad in whole_gradients(entry, theirs, x, y).items():
        assert len(seen[name]) == 1 and same(seen[name][0], grad), name
        if entry == "step with optimizer":
            torch.testing.assert_close(found[name], clipped(grad), rtol=0, atol=1e-15)
        else:
            assert same(found[name], clipped(grad)), name


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_post_accumulate_hooks_act_once_when_the_whole_gradient_is_in_grad(entry, checkpoint, schedule):
    """Also where weight gradients are computed apart (zb-h1), and added by nobody's node of autograd."""
    ours, theirs = twins(mlp())
    x, y = batch()
    seen = {name: [] for name, _ in ours.named_parameters()}
    for name, param in ours.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen[name].append(param.grad.clone()))
    run(entry, Pipe(ours, [2, 2, 1], CHUNKS, checkpoint=checkpoint, schedule=schedule), x, y)
    for name, grad in whole_gradients(entry, theirs, x, y).items():
        if entry == "step with store":
            assert not seen[name]  # nothing is accumulated into `.grad`
        else:
            assert len(seen[name]) == 1 and same(seen[name][0], grad), name


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_an_optimizer_in_post_accumulate_hooks_makes_one_step(entry, checkpoint):
    ours, theirs = twins(mlp())
    x, y = batch()
    for param in ours.parameters():
        optimizer = torch.optim.Adam([param], lr=0.1)

        def update(param, optimizer=optimizer):
            optimizer.step()
            param.grad = None

        param.register_post_accumulate_grad_hook(update)
    pipe = Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    for _ in range(3):
        run(entry, pipe, x, y)
        optimizer.zero_grad()
        whole_gradients(entry, theirs, x, y)
        optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same(one.data, other.data)


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_hooks_act_on_each_backward_of_an_accumulation(entry):
    ours, theirs = twins(mlp())
    weight, calls = ours[2].weight, []
    weight.register_hook(lambda grad: calls.append("hook") or clipped(grad))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param.grad.clone()))
    pipe = Pipe(ours, [2, 3], CHUNKS)
    expected = None
    for _ in range(2):
        x, y = batch()
        run(entry, pipe, x, y)
        theirs.zero_grad()
        grad = clipped(whole_gradients(entry, theirs, x, y)["2.weight"])
        expected = grad if expected is None else expected + grad
        assert same(weight.grad, expected) and same(calls[-1], expected)
    assert [call for call in calls if isinstance(call, str)] == ["hook"] * 2


class Unused(nn.Module):
    """A parameter that no output depends on, and one behind an output that the loss may leave out."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(WIDE, 2), nn.Linear(WIDE, 2)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return {"used": self.linear(x), "other": self.other(x)}


@pytest.mark.parametrize("entry", ["forward", "step", "autograd.grad", "create_graph"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_hooks_of_parameters_without_a_gradient_do_not_run(entry, checkpoint):
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Unused()).double()
    ran = []
    for name, param in model[1].named_parameters():
        param.register_hook(lambda grad, name=name: ran.append((name, grad is None)))
        param.register_post_accumulate_grad_hook(lambda param, name=name: ran.append((name, "post")))
    pipe = Pipe(model, [1, 1], CHUNKS, checkpoint=checkpoint)
    x, y = batch()
    if entry == "step":
        pipe.step(x, y, loss_fn=lambda output, target: mse(output["used"], target))
    elif entry == "forward":
        mse(pipe(x)["used"], y).backward()
    elif entry == "autograd.grad":
        grads = torch.autograd.grad(mse(pipe(x)["used"], y), list(model.parameters()), allow_unused=True)
        assert [grad is None for grad in grads] == [False, False, True, False, False, True, True]
        assert all(not name.startswith(("other", "never")) for name, _ in ran)
        return
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward.. with create_graph", category=UserWarning)
            mse(pipe(x)["used"], y).backward(create_graph=True)
    assert ran and {name for name, _ in ran} == {"linear.weight", "linear.bias"}
    assert model[1].never.grad is None and model[1].other.weight.grad is None


@pytest.mark.parametrize("ends", ["twice in one loss", "in a failure"])
def test_hooks_of_parameters_without_a_gradient_are_the_same_after_the_backward(ends):
    pipe = Pipe(nn.Sequential(nn.Linear(WIDE, WIDE), Unused()).double(), [1, 1], CHUNKS)
    weight, ran = pipe[1].other.weight, []
    weight.register_hook(lambda grad: ran.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda param: ran.append("post"))
    tables = weight._backward_hooks, weight._post_accumulate_grad_hooks
    before = [dict(table) for table in tables]
    x, y = batch()
    x = x.requires_grad_() * 1
    loss = mse(pipe(x)["used"], y) + mse(pipe(x)["used"], y)
    if ends == "in a failure":
        x.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    else:
        loss.backward()
    assert ran == [] and [dict(table) for table in tables] == before


def test_an_input_that_the_loss_does_not_reach_runs_no_hook():
    class Pass(nn.Module):
        def forward(self, pair):
            return {"a": pair[0] * 2, "b": pair[1] * 2}

    pipe = Pipe(nn.Sequential(Pass(), nn.Identity()), [1, 1], 2)
    one, other = (torch.randn(4, 2, requires_grad=True) for _ in range(2))
    ran = []
    other.register_hook(lambda grad: ran.append(grad))
    pipe((one, other))["a"].sum().backward()
    assert ran == [] and other.grad is None


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_hooks_registered_or_removed_after_the_forward_count_at_the_backward(checkpoint):
    ours, theirs = twins(mlp())
    x, y = batch()
    removed = ours[0].weight.register_hook(lambda grad: grad * 1000)
    loss = mse(Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)(x), y)
    removed.remove()
    ours[2].weight.register_hook(clipped)
    loss.backward()
    expected = whole_gradients("forward", theirs, x, y)
    assert same(ours[0].weight.grad, expected["0.weight"])
    assert same(ours[2].weight.grad, clipped(expected["2.weight"]))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_autograd_grad_and_two_backwards_run_the_hooks_each_time(checkpoint):
    ours, theirs = twins(mlp())
    x, y = batch()
    calls = []
    ours[2].weight.register_hook(lambda grad: calls.append(1) or clipped(grad))
    loss = mse(Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)(x), y)
    expected = clipped(whole_gradients("forward", theirs, x, y)["2.weight"])
    (grad,) = torch.autograd.grad(loss, [ours[2].weight], retain_graph=True)
    assert same(grad, expected) and ours[2].weight.grad is None
    loss.backward(retain_graph=True)
    assert same(ours[2].weight.grad, expected)
    loss.backward()
    assert same(ours[2].weight.grad, expected + expected) and len(calls) == 3


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_tensor_hooks_act_once_at_create_graph_too(checkpoint):
    ours, theirs = twins(mlp())
    x, y = batch()
    calls = []
    ours[2].weight.register_hook(lambda grad: calls.append(1) or clipped(grad))
    loss = mse(Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)(x), y)
    grads = torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)
    expected = whole_gradients("forward", theirs, x, y)
    expected["2.weight"] = clipped(expected["2.weight"])
    assert len(calls) == 1
    for grad, other in zip(grads, expected.values(), strict=True):
        torch.testing.assert_close(grad.detach(), other, rtol=1e-12, atol=1e-14)


class Scaled(nn.Module):
    """Computes with a tensor that is no parameter of the model: held in a list."""

    def __init__(self, *held):
        super().__init__()
        self.held = list(held)

    def forward(self, x):
        for each in self.held:
            x = torch.tanh(x * each)
        return x


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_hooks_of_a_captured_leaf_act_once_on_the_whole_gradient(entry, checkpoint):
    x, y = batch()
    found = []
    for kind in ("pipe", "plain"):
        torch.manual_seed(0)
        leaf = nn.Parameter(torch.randn(2, dtype=torch.float64))
        model = nn.Sequential(nn.Linear(WIDE, 2), Scaled(leaf), nn.Linear(2, 2), Scaled(leaf)).double()
        calls = []
        if kind == "pipe":
            leaf.register_hook(lambda grad, calls=calls: calls.append("hook") or clipped(grad))
            leaf.register_post_accumulate_grad_hook(lambda param, calls=calls: calls.append("post"))
            run(entry, Pipe(model, [2, 2], CHUNKS, checkpoint=checkpoint), x, y)
            assert calls == ["hook", "post"]
            found.append(leaf.grad)
        else:
            whole_gradients(entry, model, x, y)
            found.append(clipped(leaf.grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_hooks_of_a_weight_that_two_stages_share_act_once(entry, checkpoint):
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)).double()
    model[2].weight = model[0].weight
    ours, theirs = twins(model)
    x, y = batch()
    calls = []
    ours[0].weight.register_hook(lambda grad: calls.append("hook") or clipped(grad))
    ours[0].weight.register_post_accumulate_grad_hook(lambda param: calls.append("post"))
    found = run(entry, Pipe(ours, [2, 1, 1], CHUNKS, checkpoint=checkpoint), x, y)
    expected = clipped(whole_gradients(entry, theirs, x, y)["0.weight"])
    torch.testing.assert_close(found["0.weight"], expected, rtol=1e-12, atol=1e-14)
    assert calls == (["hook"] if entry == "step with store" else ["hook", "post"])


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_hooks_of_the_input_act_once(entry):
    ours, theirs = twins(mlp())
    x, y = batch()
    x.requires_grad_()
    calls = []
    x.register_hook(lambda grad: calls.append("hook") or clipped(grad))
    x.register_post_accumulate_grad_hook(lambda leaf: calls.append("post"))
    run(entry, Pipe(ours, [2, 3], CHUNKS), x, y)
    plain = x.detach().requires_grad_()
    if entry == "forward":
        reference = ByChunks(theirs, plain, CHUNKS)
        reference.backward(mse(reference.output, y))
        expected = reference.input_grad
    else:
        mse(theirs(plain), y).backward()
        expected = plain.grad
    torch.testing.assert_close(x.grad, clipped(expected), rtol=1e-12, atol=1e-14)
    assert calls == ["hook", "post"]


@pytest.mark.parametrize("where", ["tensor", "parameter"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_computed_input_keeps_its_gradient_once_whatever_has_a_hook(entry, where):
    model, (x, y) = mlp(), batch()
    grads = []
    for module in (model, Pipe(model, [2, 3], CHUNKS)):
        leaf = x.clone().requires_grad_()
        computed = leaf * 2
        handle = (computed if where == "tensor" else model[0].weight).register_hook(clipped)
        computed.retain_grad()
        if module is model:
            mse(module(computed), y).backward()
            model.zero_grad()
        else:
            run(entry, module, computed, y)
        handle.remove()
        grads.append((leaf.grad, computed.grad))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("has_hook", [True, False])
@pytest.mark.parametrize("entry", [*ENTRIES, "eager"])
def test_a_parameter_behind_the_input_has_one_whole_gradient_or_the_step_is_refused(entry, has_hook):
    model, (x, y) = mlp(), batch()
    if has_hook:
        model[0].bias.register_hook(clipped)
    mse(model(x + model[0].bias[:WIDE]), y).backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    pipe, computed = Pipe(model, [2, 3], CHUNKS), x + model[0].bias[:WIDE]
    if entry == "forward" or entry in ("step", "step with optimizer") and not has_hook:
        for name, grad in run(entry, pipe, computed, y).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14)
        return
    with pytest.raises(RuntimeError, match=r"computed with a leaf of shape \[6\].*loss.backward"):
        if entry == "eager":
            pipe.step(computed, y, loss_fn=mse, optimizer=EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=1.0)))
        else:
            run(entry, pipe, computed, y)
    assert all(param.grad is None and same(param, before[name]) for name, param in pipe.named_parameters())


# ------------------------------------------------------------------------------------------------------ module hooks


def double_output(module, args, output):
    return output * 2


def shift_input(module, args):
    return (args[0] + 1,)


def halve_grads(module, grad_input, grad_output):
    return tuple(None if grad is None else grad * 0.5 for grad in grad_input)


def triple_grads(module, grad_output):
    return tuple(grad * 3 for grad in grad_output)


def hook_layers(model):
    model[0].register_forward_hook(double_output)
    model[2].register_forward_pre_hook(shift_input)
    model[2].register_full_backward_hook(halve_grads)
    model[3].register_full_backward_pre_hook(triple_grads)
    model[4].register_full_backward_hook(halve_grads)


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_module_hooks_on_layers_change_what_they_change_on_the_plain_module(entry, checkpoint):
    ours, theirs = twins(mlp())
    x, y = batch()
    for model in (ours, theirs):
        hook_layers(model)
    run(entry, Pipe(ours, [2, 2, 1], CHUNKS, checkpoint=checkpoint), x, y)
    whole_gradients(entry, theirs, x, y)
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_backward_hooks_on_a_layer_run_once_for_each_chunk(entry, checkpoint):
    model = mlp()
    x, y = batch()
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append("R" if is_recomputing() else "F"))
    model[2].register_full_backward_hook(lambda module, gin, gout: calls.append(("B", len(gout[0]))))
    run(entry, Pipe(model, [2, 2, 1], CHUNKS, checkpoint=checkpoint), x, y)
    assert calls.count("F") == CHUNKS and calls.count("R") == (CHUNKS if checkpoint == "always" else 0)
    assert [call for call in calls if call not in ("F", "R")] == [("B", 3), ("B", 2), ("B", 2)]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_module_hooks_on_the_pipe_are_those_of_the_plain_module(checkpoint):
    ours, theirs = twins(mlp())
    x, y = batch()
    grads = []
    for module in (Pipe(ours, [2, 2, 1], CHUNKS, checkpoint=checkpoint), theirs):
        calls = []
        module.register_forward_pre_hook(shift_input)
        module.register_forward_hook(double_output)
        module.register_full_backward_pre_hook(triple_grads)
        module.register_full_backward_hook(
            lambda module, gin, gout, calls=calls: (
                calls.append([len(gin[0]), len(gout[0])]) or halve_grads(module, gin, gout)
            )
        )
        leaf = x.clone().requires_grad_()
        mse(module(leaf), y).backward()
        assert calls == [[ROWS, ROWS]]
        grads.append([leaf.grad, *(param.grad for param in module.parameters())])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("entry", ["step", "step with optimizer", "step with store"])
def test_a_parameter_hook_that_raises_leaves_everything_as_before(entry):
    model = nn.Sequential(nn.Linear(WIDE, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    x, y = batch()
    pipe = Pipe(model, [2, 1], CHUNKS)
    pipe.step(x, y, loss_fn=mse)
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    grads = [param.grad.clone() for param in pipe.parameters()]

    def fails(grad):
        raise KeyError("in a hook")

    handle = model[0].bias.register_hook(fails)
    options = {"step with optimizer": {"optimizer": torch.optim.SGD(pipe.parameters(), lr=0.1)}}.get(entry, {})
    with pytest.raises(KeyError, match="in a hook"):
        pipe.step(x, y, loss_fn=mse, grads="store" if entry == "step with store" else "param", **options)
    handle.remove()
    for name, tensor in pipe.state_dict().items():
        assert same(tensor, before[name]), name
    for param, grad in zip(pipe.parameters(), grads, strict=True):
        assert same(param.grad, grad)


class Squares(nn.Module):
    """A weight that may be given as the input too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("has_hook", [True, False])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_parameter_that_is_the_input_too_has_one_gradient_and_its_hook_runs_once(entry, has_hook):
    model = nn.Sequential(Squares(), nn.Linear(WIDE, 2)).double()
    weight = model[0].weight
    target = torch.randn(WIDE, 2, dtype=torch.float64)
    seen = []
    if has_hook:
        weight.register_hook(lambda grad: seen.append(grad.clone()) or clipped(grad))
    mse(model(weight), target).backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    got = run(entry, Pipe(model, [1, 1], CHUNKS), weight, target)
    assert len(seen) == 2 * has_hook
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("entry", ["backward", "step"])
def test_a_hook_that_another_hook_removes_is_gone(entry):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    pipe, weight, ran = Pipe(module, [1, 1], chunks=3), module[0].weight, []
    handle = weight.register_hook(lambda grad: ran.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda parameter: ran.append("after") or handle.remove())
    x, y = torch.randn(7, 4).double(), torch.randn(7, 2).double()
    for _ in range(3):
        if entry == "step":
            pipe.step(x, y, loss_fn=nn.MSELoss())
        else:
            nn.functional.mse_loss(pipe(x), y).backward()
    assert ran == ["tensor", "after", "after", "after"]


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_no_hook_of_a_parameter_that_no_output_depends_on_runs(entry):
    """Nor one of the node at which autograd adds to its gradient, where optimizers and averagers watch."""
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
    unused = nn.Parameter(torch.ones(3))
    model[0].register_parameter("unused", unused)
    node = unused.expand_as(unused).grad_fn.next_functions[0][0]
    for register in (
        unused.register_hook, unused.register_post_accumulate_grad_hook, node.register_hook, node.register_prehook
    ):  # fmt: skip
        register(lambda *_: calls.append(1))
    pipe, x = Pipe(model, [1, 1], 2), torch.ones(4, 4)
    for _ in range(3):
        if entry == "step":
            pipe.step(x, x, loss_fn=nn.functional.mse_loss)
        else:
            pipe(x).sum().backward()
    assert not calls and unused.grad is None


def test_a_hook_on_several_gradients_works_in_a_backward_and_is_told_of_in_a_step():
    pipe, calls = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [1, 1], 2), []
    torch.autograd.graph.register_multi_grad_hook(list(pipe.parameters()), calls.append)
    pipe(torch.ones(4, 2)).sum().backward()
    assert [[gradient is not None for gradient in gradients] for gradients in calls] == [[True] * 4]
    with pytest.raises(RuntimeError) as caught:
        pipe.step(torch.ones(4, 2), loss_fn=lambda output, _: output.mean())
    assert any("register_multi_grad_hook" in note and "loss.backward()" in note for note in caught.value.__notes__)
