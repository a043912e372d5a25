"""Law: where parts of a model are frozen, gradients, optimizer state and backward work are those of what is trained."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from block_models import adapted, ids
from cover import either
from families import of_family
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from partition import to_sequential
from pipeline import Pipe

PEFT_WARNS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def by_hand():
    return adapted().double(), ids


def by_peft(**settings):
    peft = pytest.importorskip("peft")
    model, inputs = of_family("LlamaForCausalLM")
    settings = {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 2], "lora_dropout": 0.2} | settings
    return peft.get_peft_model(model.double(), peft.LoraConfig(r=2, init_lora_weights=False, **settings)), inputs


def adapted_t5():
    peft = pytest.importorskip("peft")
    model, inputs = of_family("T5ForConditionalGeneration")
    config = peft.LoraConfig("SEQ_2_SEQ_LM", r=2, init_lora_weights=False, target_modules=["q", "v"])
    return peft.get_peft_model(model.double(), config), inputs


def with_prompts():
    peft = pytest.importorskip("peft")
    model, inputs = of_family("LlamaForCausalLM")
    return peft.get_peft_model(model.double(), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3)), inputs


def with_prompts_in_attention():
    peft = pytest.importorskip("peft")
    model, inputs = of_family("LlamaForCausalLM")
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2)
    return peft.get_peft_model(model, config).double(), inputs  # its forward is an attribute: its child's


ADAPTED = {
    "by hand": by_hand,
    "peft": by_peft,
    "peft, all layers and words": lambda: by_peft(
        target_modules="all-linear", layers_to_transform=None, task_type="CAUSAL_LM", modules_to_save=["embed_tokens"]
    ),
    "peft, dora": lambda: by_peft(use_dora=True),
    "peft, T5": adapted_t5,
    "peft, prompts": with_prompts,
    "peft, prompts in attention": with_prompts_in_attention,
}


def called(model, x):
    return model(**x) if isinstance(x, dict) else model(x)


def loss_fn(out, y):
    return cross_entropy(logits(out).transpose(1, 2), y)


def logits(out):
    return out["logits"] if isinstance(out, dict) else out


def rows_of(x, rows):
    return tree_map(lambda leaf: leaf[rows], x)


@PEFT_WARNS
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("name", either(list(ADAPTED)[::2], list(ADAPTED)))
def test_only_what_is_trained_has_gradients_and_state_and_changes(name, checkpoint):
    model, inputs = ADAPTED[name]()
    tolerance = 1e-13 if name == "by hand" else 1e-6  # norms of transformers compute in float32
    trained = {key for key, each in model.named_parameters() if each.requires_grad}
    start = {key: each.detach().clone() for key, each in model.named_parameters()}
    model.eval()
    pipe = Pipe(model, sample=inputs(4), chunks=2, devices=["cpu"] * 3, checkpoint=checkpoint)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.1)
    for rows in (4, 3):
        x = inputs(rows)
        y = torch.randint(11, logits(called(model, x)).shape[:2])
        optimizer.zero_grad()
        step = pipe.step(x, y, loss_fn=loss_fn)
        grads = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
        assert grads.keys() == trained
        parameters = dict(model.named_parameters())
        loss = 0.0
        for part in (slice(0, 2), slice(2, rows)):
            loss = loss + loss_fn(called(model, rows_of(x, part)), y[part]) * ((part.stop - part.start) / rows)
        expected = torch.autograd.grad(loss, [parameters[key] for key in grads])
        torch.testing.assert_close(step.loss, loss.detach(), rtol=tolerance, atol=0)
        for mine, other in zip(grads.values(), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e3 * tolerance, atol=tolerance)
        optimizer.step()
    assert {id(each) for each in optimizer.state} == {id(parameters[key]) for key in trained}
    assert {key for key, each in parameters.items() if not torch.equal(each, start[key])} == trained


@PEFT_WARNS
@pytest.mark.parametrize("name", ["by hand", "peft"])
def test_dropout_of_adapters_is_the_same_however_it_is_cut(name):
    model, inputs = ADAPTED[name]()
    x, found = inputs(5), []
    y = torch.randint(11, logits(called(model, x)).shape[:2])
    layers = to_sequential(model.train(), x)
    for balance, checkpoint in (([5], "never"), ([1, 4], "always"), ([2, 1, 2], "always"), ([3, 2], "never")):
        torch.manual_seed(3)
        model.zero_grad()
        pipe = Pipe(layers, balance, chunks=3, devices=["cpu"] * len(balance), checkpoint=checkpoint)
        step = pipe.step(x, y, loss_fn=loss_fn)
        found.append([step.loss, *[each.grad for each in model.parameters() if each.grad is not None]])
    assert all(all(map(torch.equal, numbers, found[0])) for numbers in found)
    assert not torch.equal(found[0][0], pipe.eval().evaluate(x, y, loss_fn=loss_fn).loss)


@PEFT_WARNS
def test_peft_saves_what_a_pipe_has_trained(tmp_path):
    from peft import PeftModel

    model, inputs = by_peft()
    x = inputs(4)
    pipe = Pipe(model, sample=x, chunks=2, devices=["cpu"] * 2)
    pipe.step(x, x["input_ids"], loss_fn=loss_fn, optimizer=torch.optim.SGD(pipe.parameters(), 0.1))
    model.save_pretrained(tmp_path)
    expected = pipe.eval()(x)["logits"]
    again = PeftModel.from_pretrained(model.unload(), tmp_path).eval()
    assert torch.equal(again(**x).logits, expected)


# --------------------------------------------------------------------------------------------------- what is computed


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "bmm", "addmm")
        return func(*args, **(kwargs or {}))


def watched(model):
    """How often each layer of a Llama is called."""
    calls = Counter()
    layers = {"embed": model.embed, **{f"block {n}": each for n, each in enumerate(model.layers)}, "end": model.head}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda module, given, name=name: calls.update([name]))
    return calls


def products_of(function):
    with Products() as products:
        function()
    return products.count


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_frozen_first_stages_are_run_forward_once_and_never_backward(first, schedule, checkpoint, training):
    model, x, y = adapted(first), ids(4), ids(4)
    model.train(training)
    layers = to_sequential(model, x)
    pipe = Pipe(layers, [1] * 5, chunks=2, devices=["cpu"] * 5, checkpoint=checkpoint, schedule=schedule)
    for _ in range(4):  # those that look at more, and one that does not
        pipe.step(x, y, loss_fn=loss_fn)
    calls = watched(model)
    count = products_of(lambda: pipe.step(x, y, loss_fn=loss_fn))
    again = 2 * (checkpoint == "always")
    blocks = {f"block {n}": 2 + again * (n >= first) for n in range(3)}
    assert calls == {"embed": 2, **blocks, "end": 2 + again}

    def plainly():
        for part in (slice(0, 2), slice(2, 4)):
            loss_fn(model(x[part]), y[part]).backward()

    expected = products_of(plainly)
    if again:
        with torch.no_grad():
            value = pipe.to_sequential()[: first + 1](x[:2])
            expected += 2 * products_of(lambda: pipe.to_sequential()[first + 1 :](value))
    assert count == expected


def test_a_model_that_is_wholly_frozen_is_refused_as_the_plain_one_is():
    model, x = adapted().requires_grad_(False), ids(4)
    pipe = Pipe(model, sample=x, chunks=2, devices=["cpu"] * 2)
    with pytest.raises(RuntimeError, match="every parameter is frozen, or the output is detached"):
        pipe.step(x, x, loss_fn=loss_fn)
