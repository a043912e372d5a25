"""What loss_fn reports beside its loss: of the mini-batch, as if it had not been cut."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import EagerUpdate, NoChunk, Pipe
from pipeline.curvature import Hessian


def classifier():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def data(rows=7):
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(5, (rows,), generator=generator)
    target[0] = -100
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator), target


def correct(output, target):
    return (output.argmax(1) == target).sum(), (target != -100).sum()


def reported(output, target):
    """Numbers of all kinds; one that depends on the parameters; one of which some chunks have nothing."""
    return {
        "accuracy": correct(output, target),
        "rows": [len(output), 2],
        "entropy": (-(output.softmax(1) * output.log_softmax(1)).sum(), float(len(output))),
        "zeros": ((target == 0).sum(), torch.tensor([1], dtype=torch.uint8)),
        "ignored": (output[target == -100].sum(), (target == -100).sum()),
    }


LOSSES = {
    "loss": lambda o, t: F.cross_entropy(o, t),
    "rows": lambda o, t: o.square().mean(),
    "sum and count": lambda o, t: (F.cross_entropy(o, t, reduction="sum"), (t != -100).sum()),
}


def with_metrics(loss_fn, output, target):
    value = loss_fn(output, target)
    return (*value, reported(output, target)) if isinstance(value, tuple) else (value, reported(output, target))


@pytest.mark.parametrize("entry", ["step", "outputs", "store", "eager", "two runs", "evaluate"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_metrics_are_those_of_the_mini_batch_and_change_nothing(name, chunks, entry):
    module, (x, target) = classifier(), data()
    pipe = Pipe(module, [2, 1], chunks=chunks)
    with torch.no_grad():
        expected = {key: float(total) / float(count) for key, (total, count) in reported(module(x), target).items()}
    expected["zeros"] *= 1 / chunks  # a count of one in each chunk
    expected["rows"] *= 1 / chunks
    plain = pipe.evaluate(x, target, loss_fn=LOSSES[name])
    assert plain.metrics == {}
    for _ in range(3):
        loss_fn = partial(with_metrics, LOSSES[name])
        if entry == "evaluate":
            step = pipe.evaluate(x, target, loss_fn=loss_fn)
        elif entry in ("eager", "two runs"):
            options = {"clip": "two_pass", "max_norm": 1.0} if entry == "two runs" else {}
            update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.0), **options)
            step = pipe.step(x, target, loss_fn=loss_fn, optimizer=update)
        else:
            step = pipe.step(x, target, loss_fn=loss_fn, outputs=entry == "outputs", grads="store")
        torch.testing.assert_close(step.loss, plain.loss)
        assert type(step.metrics) is dict and step.metrics.keys() == expected.keys()
        for key, value in step.metrics.items():
            assert value.shape == () and not value.requires_grad and value.dtype is torch.get_default_dtype()
            assert value.item() == pytest.approx(expected[key], rel=1e-6)


def test_a_metric_of_nothing_is_nan():
    x, target = data()
    step = Pipe(classifier(), [2, 1], chunks=3).step(x, target, loss_fn=lambda o, t: (o.mean(), {"none": (0, 0)}))
    assert step.metrics["none"].isnan()


def test_curvature_takes_a_loss_with_metrics():
    x, target = data()
    vector = torch.randn(65, dtype=torch.float64)
    plain, reporting = (
        Hessian(Pipe(classifier(), [2, 1], chunks=2), (x, target), loss_fn)
        for loss_fn in (LOSSES["loss"], partial(with_metrics, LOSSES["loss"]))
    )
    torch.testing.assert_close(reporting @ vector, plain @ vector, rtol=0, atol=0)


REFUSED = {
    "a number": ({"accuracy": 0.5}, ValueError, r"returned 0.5 as the metric 'accuracy'. Return \(sum, count\)"),
    "a tensor": ({"accuracy": torch.tensor(0.5)}, ValueError, "as the metric 'accuracy'"),
    "rows": ({"accuracy": (torch.ones(3), 3)}, TypeError, r"a tensor of shape \[3\] in the metric 'accuracy'"),
    "a word": ({"accuracy": ("many", 3)}, TypeError, "'many' in the metric"),
    "no name": ({3: (1, 2)}, TypeError, "a metric named 3. Use a string"),
}


@pytest.mark.parametrize("entry", ["step", "evaluate"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_metric_is_refused_by_name(name, entry):
    metrics, error, words = REFUSED[name]
    x, target = data()
    pipe = Pipe(classifier(), [2, 1], chunks=3)
    with pytest.raises(error, match=words):
        getattr(pipe, entry)(x, target, loss_fn=lambda o, t: (o.mean(), metrics))
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_metrics_that_some_chunks_have_are_refused():
    x, target = data()
    with pytest.raises(ValueError, match=r"metrics \['accuracy'\] for one chunk and \[\] for another.*is \(0, 0\)"):
        Pipe(classifier(), [2, 1], chunks=3).step(
            x, target, loss_fn=lambda o, t: (o.mean(), {"accuracy": correct(o, t)} if len(o) == 3 else {})
        )


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda number: torch.tensor(number, dtype=torch.bfloat16)])
@pytest.mark.parametrize("entry", ["step", "evaluate", "eager"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_metric_taken_for_a_count_is_refused_and_told_where_it_goes(kind, entry, number):
    # In 1.0.1, (loss, accuracy) was (sum, count): a loss of 3.08 for 1.28.
    def accurate(output, target):
        accuracy = 0.4 if calls["now"] == number else 1.0
        return F.mse_loss(output, torch.ones_like(output)), kind(accuracy)

    x, target = data(6)
    pipe, calls = Pipe(classifier(), [2, 1], chunks=2), {"now": 0}
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    more = {"optimizer": EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1))} if entry == "eager" else {}
    for calls["now"] in range(1, number):
        pipe.step(x, target, loss_fn=accurate, grads="store")
    words = r"as a count, which is no whole number.*\(loss, \{'accuracy': \(sum, count\)\}\)"
    with pytest.raises(ValueError, match=words):
        calls["now"] = number
        getattr(pipe, entry.replace("eager", "step"))(x, target, loss_fn=accurate, **more)
    assert all(map(torch.equal, pipe.parameters(), before))


def test_the_remedy_for_class_weights_works():
    weight = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    x, target = data()
    pipe = Pipe(classifier(), [2, 1], chunks=3)

    def by_hand(output, target):
        return F.cross_entropy(output, target, weight, reduction="sum"), weight[target[target >= 0]].sum()

    with pytest.raises(ValueError, match=r"call F.cross_entropy\(output, target, weight=...\) in loss_fn"):
        pipe.step(x, target, loss_fn=by_hand)
    loss = pipe.step(x, target, loss_fn=lambda output, target: F.cross_entropy(output, target, weight=weight)).loss
    torch.testing.assert_close(loss, F.cross_entropy(classifier()(x), target, weight).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("entry", ["step", "product"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_remedy_for_other_weights_works_in_a_step_and_in_a_product(chunks, entry):
    # A product by a Hessian was told to call backward() instead of step().
    x, target = data(7)
    target = target.clamp(min=0)
    weights = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def weighted(output, part):
        return (F.cross_entropy(output, part["class"], reduction="none") * part["weights"]).sum()

    parts = {"class": target, "weights": weights, "all": NoChunk(weights.sum())}
    model = classifier()
    plain = weighted(model(x), parts) / weights.sum()
    grads = torch.autograd.grad(plain, list(model.parameters()), create_graph=True)

    def found(loss_fn, **reduction):
        pipe = Pipe(classifier(), [2, 1], chunks)
        if entry == "step":
            pipe.step(x, parts, loss_fn=loss_fn, **reduction)
            return [parameter.grad for parameter in pipe.parameters()]
        operator = Hessian(pipe, (x, parts), loss_fn, **reduction)
        return list((operator @ {name: torch.ones_like(one) for name, one in pipe.named_parameters()}).values())

    wanted = grads
    if entry == "product":
        wanted = torch.autograd.grad(grads, list(model.parameters()), [torch.ones_like(grad) for grad in grads])
    words = r"divide by those of all rows, .*\(NoChunk\(weights.sum\(\)\)\), and give loss_reduction='sum'"
    with pytest.raises(ValueError, match=words):
        found(lambda output, part: (weighted(output, part), part["weights"].sum()))
    ours = found(lambda output, part: weighted(output, part) / part["all"], loss_reduction="sum")
    torch.testing.assert_close(ours, [grad.detach() for grad in wanted], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entry", ["step", "product"])
def test_the_remedy_for_a_loss_that_compares_rows_works_in_a_step_and_in_a_product(entry):
    # A product by a Hessian was told to call backward(), which has no product.
    def compared(output, target):
        return (output @ output.T).square().mean()

    x, target = data(6)
    model = classifier()
    grads = torch.autograd.grad(compared(model(x), target), list(model.parameters()), create_graph=True)
    wanted = grads
    if entry == "product":
        wanted = torch.autograd.grad(grads, list(model.parameters()), [torch.ones_like(grad) for grad in grads])

    def found(chunks, batches=None):
        pipe = Pipe(classifier(), [2, 1], chunks)
        if entry == "step":
            pipe.step(x, target, loss_fn=compared)
            return [parameter.grad for parameter in pipe.parameters()]
        operator = Hessian(pipe, batches or (x, target), compared)
        return list((operator @ {name: torch.ones_like(one) for name, one in pipe.named_parameters()}).values())

    words = "give all rows at once, in one mini-batch with chunks=1"
    with pytest.raises(ValueError, match=words):
        found(3)
    if entry == "product":
        with pytest.raises(ValueError, match=words):
            found(1, [(x[:4], target[:4]), (x[4:], target[4:])])
    torch.testing.assert_close(found(1), [grad.detach() for grad in wanted], rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------ a loss that writes its output

WRITING = {
    "mean": lambda o, t: o.sub_(t).square().mean(),
    "of a pair": lambda o, t: o[0].sub_(t).square().mean() + o[1].mul_(2).mean(),
    "a view": lambda o, t: (o[:, :2].zero_().sum() * 0 + (o - t).square().sum()) / o.numel(),
    "sum and count": lambda o, t: (o.sub_(t).square().sum(), o.numel()),
    "learned": None,
}


class Both(nn.Module):
    def forward(self, x):
        return x * 2, x + 1


@pytest.mark.parametrize("entry", ["step", "outputs", "evaluate", "inference"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("name", WRITING)
def test_a_loss_may_write_its_output(name, checkpoint, entry):
    # In 1.0.1, a leaf Variable that requires grad was being used in an in-place operation.
    shift = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    loss_fn = WRITING[name] or (lambda o, t: o.sub_(t).mul_(shift).square().mean())
    module = classifier()
    if name == "of a pair":
        module.append(Both())
    x, _ = data()
    target = torch.randn(7, 5, dtype=torch.float64)
    output = module(x)
    whole = loss_fn(tuple(part.clone() for part in output) if name == "of a pair" else output.clone(), target)
    whole = whole[0] / whole[1] if isinstance(whole, tuple) else whole
    leaves = [*module.parameters(), shift]
    wanted = torch.autograd.grad(whole, leaves, allow_unused=True)
    pipe = Pipe(module, [2, len(module) - 2], chunks=3, checkpoint=checkpoint)
    for _ in range(3):
        if entry in ("evaluate", "inference"):
            with torch.inference_mode(entry == "inference"):
                step = pipe.evaluate(x, target, loss_fn=loss_fn)
        else:
            for leaf in leaves:
                leaf.grad = None
            step = pipe.step(x, target, loss_fn=loss_fn, outputs=entry == "outputs")
            for leaf, grad in zip(leaves, wanted, strict=True):
                assert (grad is None) == (leaf.grad is None)
                if grad is not None:
                    torch.testing.assert_close(leaf.grad, grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(step.loss, whole.detach(), rtol=1e-12, atol=0)
        if step.outputs is not None:  # the model's, not what the loss made of them
            torch.testing.assert_close(step.outputs, module(x), rtol=1e-12, atol=1e-15, check_stride=False)
