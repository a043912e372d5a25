"""What goes from `.grad` into a store and back, and what an optimizer makes of it: one step with the sum.

The references are `.grad` itself, and the loop that a training script would write.
"""

import copy
import importlib.util
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import GradStore

EXAMPLES = Path(__file__).parents[3] / "examples"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def loss_of(module, seed):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return module(x).pow(2).mean()


def parameter(*shape, dtype=torch.float64):
    return nn.Parameter(torch.randn(shape, dtype=dtype))


# --------------------------------------------------------------------------------------------------------- from_grads


def test_from_grads_moves_what_grad_holds():
    module = network()
    loss_of(module, 1).backward()
    module[2].bias.grad = None
    before = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    store = GradStore.from_grads(module)
    assert all(param.grad is None for param in module.parameters())
    assert store.state_dict().keys() == before.keys() == {"0.weight", "0.bias", "2.weight"}
    assert all(store.get(name) is grad for name, grad in before.items())  # moved, not copied
    with pytest.raises(KeyError, match="is closed"):
        store.add_(parameter(3), torch.ones(3))


def test_from_grads_of_a_tied_parameter_is_one():
    module = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    module["two"].weight = module["one"].weight
    module["two"](torch.ones(3, 2)).sum().backward()
    store = GradStore.from_grads(module)
    assert len(store) == 1 and torch.equal(store.get("one.weight"), torch.full((2, 2), 3.0))


@pytest.mark.parametrize("how", ["view of a buffer", "one for two"])
def test_from_grads_copies_what_others_share(how):
    params = [parameter(3), parameter(3)]
    buffer = torch.ones(6, dtype=torch.float64)
    views = [buffer[:3], buffer[3:]] if how == "view of a buffer" else [buffer, buffer]
    for param, view in zip(params, views, strict=True):
        param.grad = view if how == "view of a buffer" else view[:3]
    store = GradStore.from_grads(params)
    store.scale_(2.0)
    assert torch.equal(buffer, torch.ones(6, dtype=torch.float64))
    assert all(torch.equal(store.get(param), torch.full((3,), 2.0, dtype=torch.float64)) for param in params)


def test_two_whole_grads_of_one_memory_are_two_in_the_store():
    params, grad = [parameter(3), parameter(3)], torch.ones(3, dtype=torch.float64)
    for param in params:
        param.grad = grad
    store = GradStore.from_grads(params)
    store.scale_(2.0)
    assert all(torch.equal(store.get(param), torch.full((3,), 2.0, dtype=torch.float64)) for param in params)


def test_from_grads_keeps_sparse_gradients_and_widens_half_ones():
    table, half = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1).bfloat16()
    table(torch.tensor([1, 3])).sum().backward()
    half(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    store = GradStore.from_grads([*table.parameters(), *half.parameters()])
    assert store.get(table.weight).is_sparse and store.get(half.weight).dtype is torch.float32
    assert table.weight.grad is None and half.weight.grad is None


def test_from_grads_that_is_refused_moves_nothing():
    module = network()
    before = list(torch.autograd.grad(loss_of(module, 1), list(module.parameters())))
    before[-1].requires_grad_()
    for param, grad in zip(module.parameters(), before, strict=True):
        param.grad = grad
    with pytest.raises(TypeError, match="requires_grad=True"):
        GradStore.from_grads(module)
    assert all(param.grad is grad for param, grad in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("how", ["list", "dict"])
def test_from_grads_copies_gradients_that_are_given(how):
    module = network()
    params = dict(module.named_parameters())
    grads = torch.autograd.grad(loss_of(module[:2], 1), params.values(), allow_unused=True)
    given = list(grads) if how == "list" else dict(zip(params, grads, strict=True))
    store = GradStore.from_grads(module, given)
    assert store.state_dict().keys() == {"0.weight", "0.bias"}
    assert torch.equal(store.get("0.weight"), grads[0]) and store.get("0.weight") is not grads[0]


def test_from_grads_takes_what_func_grad_returns():
    module = network()
    given = torch.func.grad(lambda params: torch.func.functional_call(module, params, torch.ones(1, 4).double()).sum())(
        {name: param.detach() for name, param in module.named_parameters()}
    )
    store = GradStore.from_grads(module, given)
    module(torch.ones(1, 4).double()).sum().backward()
    for name, param in module.named_parameters():
        assert torch.equal(store.get(name), param.grad)


def test_from_grads_wants_one_for_each_parameter():
    with pytest.raises(ValueError, match="there are 3 gradients of 4 parameters. Give each its own"):
        GradStore.from_grads(network(), [None] * 3)
    with pytest.raises(KeyError, match="no parameter named '0.wieght'. Did you mean '0.weight'"):
        GradStore.from_grads(network(), {"0.wieght": torch.ones(5, 4)})


@given(seeds=st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_from_grads_and_assign_are_each_others_inverse(seeds):
    module, other = network(), network()
    total = GradStore(module)
    for seed in seeds:
        loss_of(module, seed).backward()
        total.merge_(GradStore.from_grads(module))
        loss_of(other, seed).backward()
    total.assign()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), other.parameters(), strict=True))


# ----------------------------------------------------------------------------------------------------------------- to


def test_to_holds_gradients_elsewhere_until_they_are_applied():
    param = parameter(3, dtype=torch.bfloat16)
    store = GradStore([("w", param)])
    store.add_(param, torch.full((3,), 1.0, dtype=torch.bfloat16))
    assert store.to(dtype=torch.bfloat16) is store and store.get("w").dtype is torch.bfloat16 and store.nbytes == 6
    for _ in range(300):  # in bfloat16 the sum would stop at 256
        store.add_(param, torch.full((3,), 1.0, dtype=torch.bfloat16))
    assert torch.equal(store.get("w"), torch.full((3,), 301.0))
    store.to("cpu", torch.float64)
    assert store.get("w").dtype is torch.float64
    store.assign()
    assert param.grad.dtype is torch.bfloat16 and torch.equal(param.grad, torch.full((3,), 301.0).bfloat16())


def test_to_another_device_holds_them_there_and_adds_there():
    param = parameter(3)
    store = GradStore([param])
    store.add_(param, torch.ones(3, dtype=torch.float64))
    store.to("meta")
    store.add_(param, torch.ones(3, dtype=torch.float64))
    assert store.get(param).device.type == "meta"


@pytest.mark.gpu
def test_gradients_held_on_the_host_are_applied_where_the_parameter_is():
    param = nn.Parameter(torch.zeros(3, device="cuda"))
    store = GradStore([param])
    store.add_(param, torch.ones(3, device="cuda"))
    store.to("cpu")
    store.add_(param, torch.ones(3, device="cuda"))
    assert store.get(param).device.type == "cpu"
    store.apply(torch.optim.SGD([param], lr=1.0))
    assert param.device.type == "cuda" and param.tolist() == [-2.0] * 3


def test_a_wider_contribution_widens_a_sum_that_was_narrowed():
    param = parameter(3)
    store = GradStore([param])
    store.add_(param, torch.ones(3, dtype=torch.float64))
    store.to(dtype=torch.float32)
    assert store.nbytes == 12
    store.add_(param, torch.ones(3, dtype=torch.float64))
    assert torch.equal(store.get(param), torch.full((3,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_to_keeps_complex_gradients_complex(dtype):
    param = parameter(3, dtype=torch.complex128)
    store = GradStore([param])
    store.add_(param, torch.full((3,), 1 + 2j, dtype=torch.complex128))
    store.to(dtype=dtype)
    assert store.get(param).dtype is torch.complex64 and torch.equal(store.get(param), torch.full((3,), 1 + 2j))
    assert float(store.norm()) == pytest.approx(15**0.5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_to_a_type_that_holds_no_gradients_is_refused(dtype):
    with pytest.raises(TypeError, match=f"cannot be held in {dtype}. Use a floating-point type"):
        GradStore().to(dtype=dtype)


# --------------------------------------------------------------------------------------------------------- state_dict


def test_a_saved_sum_goes_on_where_it_stopped():
    module, straight = network(), network()
    store, whole = GradStore(module), GradStore(straight)
    for seed in (1, 2):
        loss_of(straight, seed).backward()
        whole.merge_(GradStore.from_grads(straight))
    loss_of(module, 1).backward()
    store.merge_(GradStore.from_grads(module))
    file = io.BytesIO()
    torch.save(store.state_dict(), file)

    resumed = network()
    again = GradStore(resumed)
    file.seek(0)
    again.load_state_dict(torch.load(file))
    loss_of(resumed, 2).backward()
    again.merge_(GradStore.from_grads(resumed))
    assert all(torch.equal(again.get(name), grad) for name, grad in whole.state_dict().items())


def test_loading_replaces_all_and_copies():
    module = network()
    store = GradStore(module)
    store.add_("0.bias", torch.ones(5, dtype=torch.float64))
    state = {"2.bias": torch.ones(2, dtype=torch.float64)}
    store.load_state_dict(state)
    store.scale_(3.0)
    assert store.state_dict().keys() == state.keys() and torch.equal(state["2.bias"], torch.ones(2).double())
    assert store.get("0.bias") is None


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"2.bias": torch.ones(2), "2.bais": torch.ones(2)}, KeyError, "'2.bais'. Did you mean '2.bias'"),
        ({"2.bias": torch.ones(2), "0.bias": torch.ones(3)}, ValueError, r"shape \[3\], the parameter \[5\]"),
        ({"2.bias": torch.ones(2), "0.bias": torch.ones(5, dtype=torch.int64)}, TypeError, "int64"),
        ({"2.bias": torch.ones(2), "0.bias": None}, TypeError, "the gradient is None. Give a tensor"),
    ],
)
def test_loading_what_does_not_fit_loads_nothing(state, error, words):
    store = GradStore(network())
    store.add_("0.bias", torch.ones(5, dtype=torch.float64))
    with pytest.raises(error, match=words):
        store.load_state_dict(state)
    assert store.state_dict().keys() == {"0.bias"}


def test_two_gradients_of_one_parameter_are_not_loaded():
    layer = nn.Linear(2, 2)
    store = GradStore(nn.Sequential(layer, layer))
    with pytest.raises(ValueError, match="'0.bias' and '1.bias' are one parameter, and the state has a gradient"):
        store.load_state_dict({"0.bias": torch.ones(2), "1.bias": torch.zeros(2)})
    store.load_state_dict({"1.bias": torch.ones(2)})
    assert store.get("0.bias").tolist() == [1, 1]


def test_a_gradient_without_a_name_cannot_be_saved_by_name():
    named, unnamed = parameter(3), parameter(2, 5)
    store = GradStore([("named", named), unnamed])
    store.add_(named, torch.ones(3, dtype=torch.float64))
    assert store.state_dict().keys() == {"named"}
    store.add_(unnamed, torch.ones(2, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"1 of the 2 gradients have no name .* \[2, 5\]\). .* GradStore\(module\)"):
        store.state_dict()


def test_a_tied_gradient_is_saved_once_under_its_first_name():
    module = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    module["two"].weight = module["one"].weight
    store = GradStore(module)
    store.add_("two.weight", torch.ones(2, 2))
    assert store.state_dict().keys() == {"one.weight"}


USES = {
    "to": lambda store: store.to("cpu"),
    "state_dict": lambda store: store.state_dict(),
    "load_state_dict": lambda store: store.load_state_dict({}),
    "all_reduce_": lambda store: store.all_reduce_(),
}


@pytest.mark.parametrize("use", USES)
def test_a_store_that_was_merged_away_has_no_state(use):
    store = GradStore([parameter(2)])
    GradStore().merge_(store)
    with pytest.raises(ValueError, match="was merged into another one and is empty for good"):
        USES[use](store)


# --------------------------------------------------------------------------------------------- what a step is made of

OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
}


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_a_and_b_is_not_a_step_with_each_and_the_store_makes_the_former(name):
    ours, summed, hasty = network(), network(), network()
    optimizer = OPTIMIZERS[name](ours.parameters())
    store = GradStore(ours)
    for seed in (1, 2):
        loss_of(ours, seed).backward()
        store.merge_(GradStore.from_grads(ours))
    store.apply(optimizer)

    (loss_of(summed, 1) + loss_of(summed, 2)).backward()
    OPTIMIZERS[name](summed.parameters()).step()

    grads = [torch.autograd.grad(loss_of(hasty, seed), hasty.parameters()) for seed in (1, 2)]  # where it stands now
    each = OPTIMIZERS[name](hasty.parameters())
    for found in grads:
        for param, grad in zip(hasty.parameters(), found, strict=True):
            param.grad = grad
        each.step()
    assert distance(ours, summed) < 1e-9
    assert distance(hasty, summed) > 5e-3


def test_for_plain_sgd_the_two_are_equal():
    summed, each = network(), network()
    grads = [torch.autograd.grad(loss_of(summed, seed), summed.parameters()) for seed in (1, 2)]
    for module, rounds in ((summed, [grads]), (each, [grads[:1], grads[1:]])):
        for some in rounds:
            store = GradStore(module)
            for found in some:
                store.merge_(GradStore.from_grads(module, found))
            store.apply(torch.optim.SGD(module.parameters(), lr=0.1))
    assert distance(summed, each) < 1e-15


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_absent_gradient_makes_no_decay_and_no_momentum_step(name):
    params = [parameter(3), parameter(3)]
    optimizer = OPTIMIZERS[name](params)
    store = GradStore(params)
    for param in params:  # both have momentum now
        store.add_(param, torch.ones(3, dtype=torch.float64))
    store.apply(optimizer)
    before, state = params[1].detach().clone(), copy.deepcopy(optimizer.state[params[1]])
    store.add_(params[0], torch.ones(3, dtype=torch.float64))
    store.apply(optimizer)
    assert torch.equal(params[1], before)
    assert all(torch.equal(optimizer.state[params[1]][key], value) for key, value in state.items())
    store.add_(params[1], torch.zeros(3, dtype=torch.float64))  # zero is another matter
    store.apply(optimizer)
    assert not torch.equal(params[1], before)


def test_apply_makes_one_step_whatever_went_in():
    module = network()
    optimizer = torch.optim.Adam(module.parameters())
    store = GradStore(module)
    for seed in range(3):
        loss_of(module, seed).backward()
        store.merge_(GradStore.from_grads(module))
    store.apply(optimizer)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    with pytest.raises(RuntimeError, match="the GradStore is empty: .* applied already, or nothing was added"):
        store.apply(optimizer)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


# ----------------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("name", ["segments", "two_losses"])
def test_the_example_makes_the_step_that_it_promises(name, capsys):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    right, wrong = example.main()
    assert right < 1e-14 < 0.02 < wrong
    assert f"{wrong:.3f}" in capsys.readouterr().out


def test_a_parameter_that_asks_for_gradients_of_another_type_gets_them_so() -> None:
    wide, half = (nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2))
    wide.grad_dtype = torch.float32
    store = GradStore([("wide", wide), ("half", half)])
    for param in (wide, half):
        store.add_(param, torch.tensor([1.0, 1.001]))
    store.assign("set")
    assert wide.grad is not None and torch.equal(wide.grad, torch.tensor([1.0, 1.001]))
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
