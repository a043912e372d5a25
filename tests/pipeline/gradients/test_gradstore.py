"""A GradStore is a dict of float64 sums, kept in the parameters' own types.

Ownership: what goes in is copied (add_) or taken over (insert, merge_), and what `.grad` holds is never shared.
"""

import copy
import pickle
from fractions import Fraction

import pytest
import torch
from cover import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import GradStore


def parameter(*shape, dtype=torch.float64):
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def like(param, seed=None, dtype=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(param.shape, dtype=dtype or param.dtype, generator=generator)


def sparse(param, *rows, value=1.0):
    values = torch.full((len(rows), *param.shape[1:]), value, dtype=param.dtype)
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, param.shape, check_invariants=True)


def filled(*params, seed=0):
    """A store with one gradient for each parameter, and the gradients."""
    store = GradStore(list(params))
    grads = [like(param, seed + index) for index, param in enumerate(params)]
    for param, grad in zip(params, grads, strict=True):
        store.add_(param, grad)
    return store, grads


# --------------------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_a_value_is_the_sum_of_its_contributions_in_their_order(dtype):
    param = parameter(3, 4, dtype=dtype)
    grads = [like(param) * 10.0**power for power in (0, 5, -5, 3)]
    store = GradStore([param])
    for grad in grads:
        store.add_(param, grad)
    assert torch.equal(store.get(param), ((grads[0] + grads[1]) + grads[2]) + grads[3])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex32])
@pytest.mark.parametrize("how", ["add", "merge", "insert"])
def test_half_precision_is_summed_in_float32(dtype, how):
    param = parameter(100, dtype=dtype)
    grads = [(torch.rand(100) + 0.5).to(dtype) for _ in range(64)]
    store = GradStore([param])
    for grad in grads:
        if how == "add" or (how == "insert" and store.get(param) is not None):
            store.add_(param, grad)
        elif how == "insert":
            store.insert(param, grad)
        else:
            other = GradStore()
            other.add_(param, grad)
            store.merge_(other)
    summed = torch.promote_types(dtype, torch.float32)
    wide = torch.promote_types(dtype, torch.float64)
    expected = torch.stack([grad.to(wide) for grad in grads]).sum(0)
    assert store.get(param).dtype is summed
    torch.testing.assert_close(store.get(param).to(wide), expected, rtol=1e-6, atol=0)
    store.assign()
    assert param.grad.dtype is dtype and torch.equal(param.grad.to(summed), expected.to(summed).to(dtype).to(summed))


@pytest.mark.parametrize("first, then", [("float32", "float64"), ("float64", "float32"), ("bfloat16", "float64")])
@pytest.mark.parametrize("of_param", ["float32", "float64", "bfloat16"])
def test_the_sum_is_as_wide_as_the_widest_that_went_in(of_param, first, then):
    # In the first version the type of the first contribution decided.
    param = parameter(50, dtype=getattr(torch, of_param))
    grads = [like(param, dtype=getattr(torch, name)) for name in (first, then)]
    store = GradStore([param])
    for grad in grads:
        store.add_(param, grad)
    torch.testing.assert_close(store.get(param), grads[0].double() + grads[1].double(), rtol=1e-15, atol=1e-15)
    store.assign()
    assert param.grad.dtype is param.dtype


def test_none_is_no_contribution_and_absent_is_not_zero():
    weights = [parameter(3), parameter(3)]
    before = weights[1].detach().clone()
    store = GradStore(weights)
    store.add_(weights[0], None)
    assert weights[0] not in store and len(store) == 0
    store.add_(weights[0], torch.ones(3, dtype=torch.float64))
    store.add_(weights[0], None)
    assert torch.equal(store.get(weights[0]), torch.ones(3, dtype=torch.float64))
    assert store.get(weights[1]) is None and store.pop(weights[1]) is None and weights[1] not in store
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.5)
    store.apply(optimizer)
    assert torch.equal(weights[1], before)  # no decay, no step
    assert weights[1] not in optimizer.state and weights[0] in optimizer.state


def test_zero_is_not_absent():
    weight = parameter(3)
    before = weight.detach().clone()
    store = GradStore([weight])
    store.add_(weight, torch.zeros(3, dtype=torch.float64))
    assert weight in store
    store.apply(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5))
    assert not torch.equal(weight, before)


# ---------------------------------------------------------------------------------------------------------- ownership


def test_the_store_shares_no_memory_with_what_was_added():
    param = parameter(3)
    grad = torch.ones(3, dtype=torch.float64)
    store = GradStore([param])
    store.add_(param, grad)
    grad.mul_(5)
    store.add_(param, grad)
    grad.mul_(0)
    assert torch.equal(store.get(param), torch.full((3,), 6.0, dtype=torch.float64))
    assert torch.equal(grad, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_may_be_an_expanded_or_a_transposed_view(dtype):
    param = parameter(3, 4, dtype=dtype)
    store = GradStore([param])
    store.add_(param, torch.ones((), dtype=dtype).expand(3, 4))  # a sum()'s gradient: one number in memory
    store.add_(param, torch.arange(12.0).to(dtype).reshape(4, 3).T)
    assert torch.equal(store.get(param), torch.arange(12.0).reshape(4, 3).T + 1)


def test_grad_is_untouched_until_assign():
    param = parameter(3)
    param.grad = torch.ones(3, dtype=torch.float64)
    store = GradStore([param])
    store.add_(param, param.grad)
    store.add_(param, param.grad)
    store.scale_(10.0)
    store.clip_(1.0)
    assert torch.equal(param.grad, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["add", "set"])
def test_after_assign_the_store_is_empty_and_grad_is_its_own(mode):
    param = parameter(3)
    param.grad = torch.ones(3, dtype=torch.float64)
    added = torch.full((3,), 2.0, dtype=torch.float64)
    store = GradStore([param])
    store.add_(param, added)
    store.assign(mode)
    assert len(store) == 0 and param not in store
    expected = added + 1 if mode == "add" else added
    assert torch.equal(param.grad, expected)
    store.add_(param, torch.full((3,), 100.0, dtype=torch.float64))
    store.scale_(7.0)
    assert torch.equal(param.grad, expected)


def test_assign_adds_by_default_and_refuses_other_modes():
    param = parameter(3)
    store, (grad,) = filled(param)
    with pytest.raises(ValueError, match="mode is 'mean'. Use 'add' or 'set'"):
        store.assign("mean")
    for _ in range(2):
        store.add_(param, grad)
    store.assign()
    store.add_(param, grad)
    store.assign()
    torch.testing.assert_close(param.grad, 4 * grad)


def test_insert_returns_what_was_and_takes_the_gradient_over():
    param = parameter(3)
    store, (grad,) = filled(param)
    new = like(param)
    before = store.get(param)
    assert store.insert(param, new) is before and torch.equal(before, grad)
    assert store.get(param) is new
    assert GradStore([param]).insert(param, new) is None


@pytest.mark.parametrize("strides", [(0, 0), (0, 1), (1, 1), (2, 2)])
def test_a_gradient_whose_entries_share_memory_is_copied_as_sums_are_written_in_place(strides):
    param = parameter(3, 2)
    grad = torch.arange(7, dtype=torch.float64).as_strided((3, 2), strides)
    before = grad.clone()
    store = GradStore([param])
    store.insert(param, grad)
    store.add_(param, torch.ones(3, 2, dtype=torch.float64))
    store.scale_(0.5)
    assert torch.equal(store.get(param), (before + 1) / 2) and torch.equal(grad, before)


def test_pop_takes_out():
    param = parameter(3)
    store, (grad,) = filled(param)
    assert torch.equal(store.pop(param), grad)
    assert store.pop(param) is None and len(store) == 0


# --------------------------------------------------------------------------------------------------------------- keys


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight


def test_a_tied_parameter_is_one_under_all_its_names():
    module = Tied()
    store = GradStore(module)
    store.add_("one.weight", torch.ones(2, 2))
    store.add_("two.weight", torch.ones(2, 2))
    store.add_(module.one.weight, torch.ones(2, 2))
    assert len(store) == 1 and store.get("one.weight") is store.get("two.weight")
    assert "two.weight" in store and torch.equal(store.get("one.weight"), torch.full((2, 2), 3.0))
    assert store.norm() == 6.0  # counted once
    assert store.nbytes == 16
    store.apply(torch.optim.SGD(module.parameters(), lr=0.0))


@pytest.mark.parametrize("kind", ["module", "pairs", "dict"])
def test_keys_are_parameters_or_names(kind):
    module = nn.Linear(2, 3)
    store = GradStore(
        {"module": module, "pairs": module.named_parameters(), "dict": dict(module.named_parameters())}[kind]
    )
    store.add_("bias", torch.ones(3))
    assert torch.equal(store.get(module.bias), torch.ones(3)) and "bias" in store and module.bias in store
    assert "weight" not in store and module.weight not in store and "nonsense" not in store
    assert [id(key) for key in store.keys()] == [id(module.bias)]
    ((param, grad),) = store.items()
    assert param is module.bias and grad is store.get("bias") and len(store) == 1


def test_a_closed_store_refuses_what_it_does_not_know():
    module, stranger = nn.Linear(2, 3), parameter(3)
    store = GradStore(module)
    with pytest.raises(KeyError, match="no parameter named 'wieght'. Did you mean 'weight'"):
        store.add_("wieght", torch.ones(3, 2))
    for attempt in (lambda: store.add_(stranger, None), lambda: store.get(stranger), lambda: store.pop(stranger)):
        with pytest.raises(KeyError, match=r"shape \[3\]. It holds 2 parameters and is closed"):
            attempt()
    assert stranger not in store and len(store) == 0


def test_equal_parameters_are_different_keys():
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    store = GradStore([one, other])
    store.add_(one, torch.ones(2))
    assert one in store and other not in store and store.get(other) is None


def test_an_open_store_registers_at_the_first_add():
    one, other = parameter(2), parameter(3)
    store = GradStore()
    store.add_(one, like(one))
    store.add_(other, like(other))
    assert [id(key) for key in store.keys()] == [id(one), id(other)]
    with pytest.raises(KeyError, match="no parameter named"):
        store.get("one")


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two parameters are named 'w'"):
        GradStore([("w", parameter(2)), ("w", parameter(2))])


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match="params has a parameter named 1. Names are strings."):
        GradStore([(1, torch.zeros(1))])


def test_a_store_prints_what_it_has():
    weight, bias = nn.Linear(2, 3).parameters()
    store = GradStore([weight, bias])
    store.insert(weight, torch.ones(3, 2))
    assert repr(store) == "GradStore(gradients of 1 of 2 parameters, 24 bytes)"


def test_one_tensor_is_no_list_of_parameters():
    with pytest.raises(TypeError, match=r"GradStore\(\[parameter\]\)"):
        GradStore(parameter(2, 3))


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("how", ["add_", "insert"])
def test_a_gradient_of_compressed_layout_is_refused(how):
    param = parameter(2, 2)
    store, grad = GradStore([param]), torch.eye(2, dtype=torch.float64).to_sparse_csr()
    with pytest.raises(TypeError, match=r"layout torch.sparse_csr, .* torch.strided. Give .*grad.to_sparse_coo\(\)."):
        getattr(store, how)(param, grad)


@pytest.mark.parametrize("how", ["add_", "insert"])
@pytest.mark.parametrize(
    "grad, error, words",
    [
        (torch.ones(3, dtype=torch.int64), TypeError, "floating-point tensor.*int64"),
        (torch.ones(3, dtype=torch.bool), TypeError, "floating-point tensor.*bool"),
        (torch.ones(3, requires_grad=True), TypeError, r"requires_grad=True. Give grad.detach\(\)"),
        (torch.ones(3, dtype=torch.complex64), TypeError, "complex64 but the parameter .*float32. Give grad.real"),
        (torch.ones(1), ValueError, r"has shape \[1\], the parameter \[3\]"),  # would broadcast
        (torch.ones(3, 1), ValueError, r"has shape \[3, 1\]"),
        (torch.ones(()), ValueError, r"has shape \[\]"),
        (torch.ones(3, device="meta"), ValueError, "on meta, the parameter on cpu. Move the gradient there"),
    ],
)
@pytest.mark.parametrize("filled_before", [False, True])
def test_what_is_no_gradient_of_the_parameter_is_refused(how, grad, error, words, filled_before):
    param = parameter(3, dtype=torch.float32)
    store = GradStore([param])
    if filled_before:
        store.add_(param, torch.ones(3))
    with pytest.raises(error, match=words):
        getattr(store, how)(param, grad)
    assert len(store) == filled_before and (not filled_before or torch.equal(store.get(param), torch.ones(3)))


def test_merging_adds_and_consumes():
    one, other, third = parameter(3), parameter(2), parameter(4)
    store, (first, second) = filled(one, other)
    more, (again, new) = filled(one, third, seed=7)
    target = GradStore()
    target.merge_(store)
    target.merge_(more)
    assert torch.equal(target.get(one), first + again)
    assert torch.equal(target.get(other), second) and torch.equal(target.get(third), new)
    assert len(store) == 0 and len(more) == 0


def test_merging_names_a_parameter_that_had_no_name():
    module = nn.Linear(2, 3)
    store, named = GradStore(), GradStore(module)
    named.add_("bias", torch.ones(3))
    store.merge_(named)
    assert store.get("bias") is store.get(module.bias)
    store.insert("bias", torch.zeros(3))
    assert torch.equal(store.get(module.bias), torch.zeros(3))


def test_a_store_cannot_be_merged_with_itself():
    store, (grad,) = filled(parameter(3))
    with pytest.raises(ValueError, match="cannot be merged with itself: its gradients would count twice"):
        store.merge_(store)
    assert torch.equal(next(store.items())[1], grad)


USES = {
    "add_": lambda store, param: store.add_(param, torch.ones(3)),
    "add_ none": lambda store, param: store.add_(param, None),
    "insert": lambda store, param: store.insert(param, torch.ones(3)),
    "get": lambda store, param: store.get(param),
    "pop": lambda store, param: store.pop(param),
    "merge_": lambda store, param: store.merge_(GradStore()),
    "be merged": lambda store, param: GradStore().merge_(store),
    "scale_": lambda store, param: store.scale_(2.0),
    "norm": lambda store, param: store.norm(),
    "clip_": lambda store, param: store.clip_(1.0),
    "is_finite": lambda store, param: store.is_finite(),
    "assign": lambda store, param: store.assign(),
    "apply": lambda store, param: store.apply(torch.optim.SGD([param], lr=1.0)),
    "clear": lambda store, param: store.clear(),
}


@pytest.mark.parametrize("use", USES)
def test_a_store_that_was_merged_away_cannot_be_used(use):
    # assign() on it did nothing, without a word.
    param = parameter(3)
    store, _ = filled(param)
    GradStore([param]).merge_(store)
    with pytest.raises(ValueError, match="was merged into another one and is empty for good"):
        USES[use](store, param)


def test_a_merge_that_is_refused_changes_neither_store():
    known, unknown = parameter(3), parameter(2)
    store, (grad,) = filled(known)
    other, grads = filled(known, unknown, seed=5)
    with pytest.raises(KeyError, match="is closed"):
        store.merge_(other)
    assert torch.equal(store.get(known), grad) and len(store) == 1
    assert torch.equal(other.get(known), grads[0]) and torch.equal(other.get(unknown), grads[1])
    other.pop(unknown)
    store.merge_(other)  # not used up
    assert torch.equal(store.get(known), grad + grads[0])


def test_merging_refuses_a_gradient_of_another_shape():
    param = parameter(3)
    store, _ = filled(param)
    other = GradStore([param])
    param.data = torch.zeros(1, dtype=torch.float64)
    other.add_(param, torch.ones(1, dtype=torch.float64))
    param.data = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the gradient has shape \[1\], the parameter \[3\]"):  # would broadcast
        store.merge_(other)
    assert len(other) == 1


def test_merging_in_a_fixed_order_is_bitwise_that_order_of_addition():
    param = parameter(1000)
    grads = [like(param) * 10.0**index for index in range(4)]
    stores = []
    for grad in grads:
        store = GradStore()
        store.add_(param, grad)
        stores.append(store)
    total = GradStore()
    for store in stores:
        total.merge_(store)
    assert torch.equal(total.get(param), ((grads[0] + grads[1]) + grads[2]) + grads[3])


# ------------------------------------------------------------------------------------------- norms, scaling, finiteness


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_is_that_of_one_vector(norm_type):
    store, grads = filled(parameter(3, 4), parameter(5), parameter())
    vector = torch.cat([grad.reshape(-1) for grad in grads])
    torch.testing.assert_close(store.norm(norm_type), torch.linalg.vector_norm(vector, norm_type))
    assert store.norm(norm_type).shape == ()


@pytest.mark.parametrize("max_norm", [Fraction(1, 10), 2**70])
def test_any_real_number_is_a_limit_and_a_factor(max_norm):
    (one, _), (other, _) = (filled(param) for param in [parameter(3, 4)] * 2)
    assert torch.equal(one.clip_(max_norm), other.clip_(float(max_norm)))
    one.scale_(max_norm)
    other.scale_(float(max_norm))
    for (_, grad), (_, expected) in zip(one.items(), other.items(), strict=True):
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_is_torchs(max_norm, norm_type):
    params = [parameter(3, 4), parameter(5)]
    store, grads = filled(*params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    assert torch.equal(store.clip_(max_norm, norm_type), expected)
    for param in params:
        assert torch.equal(store.get(param), param.grad)


def test_norms_of_mixed_types():
    params = [parameter(3), parameter(2, dtype=torch.float32), parameter(2, dtype=torch.bfloat16)]
    params.append(parameter(2, dtype=torch.complex64))
    store, grads = filled(*params)
    expected = sum((grad.abs().double() ** 2).sum() for grad in grads).sqrt()
    assert not store.norm().is_complex()
    torch.testing.assert_close(store.norm().double(), expected, rtol=1e-6, atol=0)
    store.clip_(0.5)
    torch.testing.assert_close(store.norm().item(), 0.5, rtol=1e-5, atol=0)


def test_a_parameter_without_elements_has_no_say_in_the_norm():
    empty, param = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(2))
    store = GradStore([empty, param])
    store.add_(empty, torch.zeros(0, 3))
    store.add_(param, torch.tensor([3.0, 4.0]))
    assert store.norm() == 5.0 and store.norm(float("inf")) == 4.0


def test_an_empty_store_has_norm_0_and_is_finite():
    store = GradStore([parameter(3)])
    assert store.norm() == 0.0 and store.clip_(1.0) == 0.0 and store.is_finite() and store.nbytes == 0


@pytest.mark.parametrize("value, finite", [(1.0, True), (float("nan"), False), (float("inf"), False)])
@pytest.mark.parametrize("layout", ["dense", "sparse", "complex"])
def test_is_finite_finds_one_bad_entry(value, finite, layout):
    param = parameter(3, 2, dtype=torch.complex64 if layout == "complex" else torch.float32)
    store = GradStore([param])
    bad = sparse(param, 0, 2, value=value) if layout == "sparse" else torch.full_like(param, value).detach()
    store.add_(param, bad)
    assert store.is_finite() is finite


@pytest.mark.parametrize("factor", [0.25, 2, torch.tensor(0.25), torch.tensor([0.25]).double().requires_grad_()])
def test_scaling_multiplies_all(factor):
    params = [
        parameter(3, dtype=torch.float32), parameter(2, 2), parameter(), parameter(2, dtype=torch.complex64)
    ]  # fmt: skip
    store, grads = filled(*params)
    store.scale_(factor)
    for param, grad in zip(params, grads, strict=True):
        assert torch.equal(store.get(param), grad * torch.as_tensor(factor).item())
        assert not store.get(param).requires_grad


def test_nbytes_are_those_of_the_sums():
    half, single, table = parameter(10, dtype=torch.bfloat16), parameter(10, dtype=torch.float32), parameter(8, 4)
    store = GradStore()
    store.add_(half, like(half))
    assert store.nbytes == 40  # float32
    store.add_(single, like(single))
    assert store.nbytes == 80
    store.add_(table, sparse(table, 1, 5))
    assert store.nbytes == 80 + 2 * 4 * 8 + 2 * 8  # values and indices


def test_clear_forgets_gradients_and_keeps_parameters():
    module = nn.Linear(2, 3)
    store = GradStore(module)
    store.add_("bias", torch.ones(3))
    store.clear()
    assert len(store) == 0 and store.get("bias") is None
    store.add_("bias", torch.ones(3))


# -------------------------------------------------------------------------------------------------------------- sparse


def embedding_grads(table, *batches):
    found = []
    for batch in batches:
        table.zero_grad()
        (table(torch.tensor(batch)) ** 2).sum().backward()
        found.append(table.weight.grad)
    table.zero_grad()
    return found


@pytest.mark.parametrize("kinds", ["ss", "sd", "ds", "ssd", "dss", "sds", "es", "se", "ee", "eds"])
@pytest.mark.parametrize("how", ["add", "merge"])
def test_sparse_and_dense_contributions_add(kinds, how):
    table = nn.Embedding(6, 3, sparse=True).double()
    param = table.weight
    rows = [embedding_grads(table, [0, 2, 2])[0], embedding_grads(table, [2, 5])[0]]
    grads = [rows.pop() if kind == "s" else like(param) for kind in kinds]
    grads = [grad.to_sparse() if kind == "e" else grad for kind, grad in zip(kinds, grads)]  # entries, not rows
    kept = [grad.clone() for grad in grads]
    store = GradStore([param])
    for grad in grads:
        if how == "add":
            store.add_(param, grad)
        else:
            other = GradStore()
            other.add_(param, grad)
            store.merge_(other)
    expected = sum(grad.to_dense() for grad in kept)
    found = store.get(param)
    assert found.is_sparse == (set(kinds) in ({"s"}, {"e"}))
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(store.norm(), torch.linalg.vector_norm(expected), rtol=1e-14, atol=1e-14)
    for grad, value in zip(grads, kept, strict=True):
        assert torch.equal(grad.to_dense(), value.to_dense())  # what was given stays as it was
    store.clip_(0.5)
    clipped = expected * (0.5 / (torch.linalg.vector_norm(expected) + 1e-6))
    torch.testing.assert_close(store.get(param).to_dense(), clipped, rtol=1e-12, atol=1e-14)
    store.assign()
    torch.testing.assert_close(param.grad.to_dense(), clipped, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("present", ["sparse", "dense"])
@pytest.mark.parametrize("mode", ["add", "set"])
def test_sparse_gradients_are_assigned_onto_any_layout(present, mode):
    param = parameter(4, 2)
    added = sparse(param, 1, 3)
    param.grad = sparse(param, 0, 1) if present == "sparse" else like(param)
    expected = added.to_dense() + (param.grad.to_dense() if mode == "add" else 0)
    store = GradStore([param])
    store.add_(param, added)
    store.assign(mode)
    torch.testing.assert_close(param.grad.to_dense(), expected)


def test_dense_is_assigned_onto_a_sparse_grad():
    param = parameter(4, 2)
    param.grad = sparse(param, 0, 1)
    store, (grad,) = filled(param)
    expected = param.grad.to_dense() + grad
    store.assign()
    torch.testing.assert_close(param.grad, expected)


def test_an_empty_sparse_gradient_has_norm_0():
    param = parameter(4, 2)
    store = GradStore([param])
    store.add_(param, sparse(param))
    assert store.norm() == 0.0 and store.norm(float("inf")) == 0.0 and store.is_finite()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(copied):
    """The copy of a parameter is another key."""
    with pytest.raises(TypeError, match=r"keys are the parameters.*store.state_dict\(\)"):
        copied(GradStore([("w", parameter(2))]))


def test_sparse_half_precision_is_summed_in_float32():
    param = parameter(4, 2, dtype=torch.bfloat16)
    store = GradStore([param])
    for _ in range(300):  # in bfloat16 the sum would stop at 256
        store.add_(param, sparse(param, 1))
    assert torch.equal(store.get(param).to_dense()[1], torch.full((2,), 300.0))


def test_sparse_apply_is_sparse_adam():
    one = nn.Embedding(6, 3, sparse=True).double()
    other = copy.deepcopy(one)
    optimizer, reference = torch.optim.SparseAdam(one.parameters()), torch.optim.SparseAdam(other.parameters())
    for _ in range(3):
        grads = embedding_grads(one, [0, 2, 2], [2, 5])
        store = GradStore(one)
        for grad in grads:
            store.add_("weight", grad)
        other.weight.grad = grads[0] + grads[1]
        store.apply(optimizer)
        reference.step()
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-14, atol=1e-14)


# --------------------------------------------------------------------------------------------------------------- apply


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw loop": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_apply_is_the_hand_written_loop_bit_for_bit(name, dtype):
    params = [parameter(3, 4, dtype=dtype), parameter(4, dtype=dtype)]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer, reference = OPTIMIZERS[name](params), OPTIMIZERS[name](others)
    store = GradStore(params)
    for step in range(5):
        present = params if step != 2 else params[:1]  # once a parameter gets nothing
        for chunk in range(3):
            for param, other in zip(present, others, strict=False):
                grad = like(param, 10 * step + chunk)
                store.add_(param, grad)
                other.grad = grad.clone() if other.grad is None else other.grad.add_(grad)
        store.scale_(0.5)
        for other in others:
            if other.grad is not None:
                other.grad.mul_(0.5)
        store.apply(optimizer)
        reference.step()
        reference.zero_grad()
        assert len(store) == 0
        for param, other in zip(params, others, strict=True):
            assert torch.equal(param, other) and param.grad is None


def test_apply_on_bfloat16_parameters_casts_the_sum_once():
    param = parameter(5, dtype=torch.bfloat16)
    before = param.detach().clone()
    store = GradStore([param])
    for _ in range(300):
        store.add_(param, torch.ones(5, dtype=torch.bfloat16))
    store.apply(torch.optim.SGD([param], lr=1.0))
    assert torch.equal(param, before - torch.tensor(300.0).bfloat16())


def test_apply_twice_is_refused():
    param = parameter(3)
    store, _ = filled(param)
    optimizer = torch.optim.SGD([param], lr=1.0)
    store.apply(optimizer)
    after = param.detach().clone()
    with pytest.raises(RuntimeError, match="the GradStore is empty: there is nothing to step with"):
        store.apply(optimizer)
    assert torch.equal(param, after)


def test_apply_of_nothing_to_an_optimizer_of_nothing_is_a_step():
    frozen, none = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.empty(0))
    optimizer = torch.optim.Adam([frozen, none])  # as of a rank that trains nothing
    steps = []
    optimizer.register_step_post_hook(lambda *args: steps.append(args))
    GradStore([]).apply(optimizer)
    assert len(steps) == 1


def test_apply_refuses_an_optimizer_without_one_of_the_parameters():
    held, other = parameter(3), parameter(2, 5)
    store, (grad, _) = filled(held, other)
    before = held.detach().clone()
    optimizer = torch.optim.SGD([held], lr=1.0)
    with pytest.raises(ValueError, match=r"does not hold 1 of the 2 parameters .* of shape \[2, 5\]"):
        store.apply(optimizer)
    assert torch.equal(held, before) and len(store) == 2 and held.grad is None
    store.pop(other)
    store.apply(optimizer)
    assert torch.equal(held, before - grad)


def test_apply_refuses_gradients_that_are_set_already():
    param, other = parameter(3), parameter(2)
    store, _ = filled(param)
    other.grad = torch.ones(2, dtype=torch.float64)
    before = param.detach().clone()
    optimizer = torch.optim.SGD([param, other], lr=1.0)
    with pytest.raises(ValueError, match="1 parameters of the optimizer have a .grad already"):
        store.apply(optimizer)
    assert torch.equal(param, before) and len(store) == 1
    optimizer.zero_grad()
    store.apply(optimizer)


def test_a_failing_optimizer_leaves_the_gradients_in_the_store():
    param = parameter(4, 2)
    store = GradStore([param])
    store.add_(param, sparse(param, 1))
    with pytest.raises(RuntimeError, match="sparse"):
        store.apply(torch.optim.Adam([param]))  # takes no sparse gradients
    assert param.grad is None and torch.equal(store.get(param).to_dense(), sparse(param, 1).to_dense())
    store.apply(torch.optim.SparseAdam([param]))


def test_param_groups_and_their_rates_are_the_optimizers():
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1.0}, {"params": [other], "lr": 10.0}])
    store = GradStore([one, other])
    for param in (one, other):
        store.add_(param, torch.ones(2))
    store.apply(optimizer)
    assert one.tolist() == [-1.0, -1.0] and other.tolist() == [-10.0, -10.0]


# --------------------------------------------------------------------------------------------------- against a model


SHAPES = ((3,), (2, 2), (), (4,))


class AgainstADict(RuleBasedStateMachine):
    """Any sequence of calls leaves what a dict of float64 sums says, and no memory is shared."""

    stores = Bundle("stores")

    @initialize()
    def begin(self):
        self.params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
        self.expected = {}  # id of store -> {index: sum}
        self.alive = []
        self.grads = {}
        self.counter = 0

    @rule(target=stores, closed=st.booleans())
    def make(self, closed):
        store = GradStore(self.params if closed else None)
        self.alive.append(store)
        self.expected[id(store)] = {}
        return store

    def draw(self, index):
        self.counter += 1
        return like(self.params[index], self.counter)

    @rule(store=stores, index=st.integers(0, 3), none=st.booleans())
    def add(self, store, index, none):
        if store not in self.alive:
            return
        grad = None if none else self.draw(index)
        store.add_(self.params[index], grad)
        if grad is not None:
            sums = self.expected[id(store)]
            sums[index] = grad.clone() if index not in sums else sums[index] + grad
            grad.fill_(99.0)  # the caller does as it likes with its own

    @rule(store=stores, index=st.integers(0, 3))
    def insert(self, store, index):
        if store in self.alive:
            grad = self.draw(index)
            before = store.insert(self.params[index], grad.clone())
            assert (before is None) == (index not in self.expected[id(store)])
            self.expected[id(store)][index] = grad

    @rule(store=stores, index=st.integers(0, 3))
    def pop(self, store, index):
        if store in self.alive:
            found = store.pop(self.params[index])
            expected = self.expected[id(store)].pop(index, None)
            assert (found is None) == (expected is None)

    @rule(store=stores, other=stores)
    def merge(self, store, other):
        if store is other or store not in self.alive or other not in self.alive:
            with pytest.raises(ValueError):
                store.merge_(other)
            return
        store.merge_(other)
        self.alive.remove(other)
        sums = self.expected[id(store)]
        for index, grad in self.expected[id(other)].items():
            sums[index] = grad if index not in sums else sums[index] + grad

    @rule(store=stores, factor=st.sampled_from([0.5, -2.0, 0.3]))
    def scale(self, store, factor):
        if store in self.alive:
            store.scale_(factor)
            sums = self.expected[id(store)]
            self.expected[id(store)] = {index: grad * factor for index, grad in sums.items()}

    @rule(store=stores, add=st.booleans())
    def assign(self, store, add):
        if store in self.alive:
            store.assign("add" if add else "set")
            for index, grad in self.expected[id(store)].items():
                self.grads[index] = self.grads[index] + grad if add and index in self.grads else grad
            self.expected[id(store)] = {}

    @rule(store=stores)
    def clear(self, store):
        if store in self.alive:
            store.clear()
            self.expected[id(store)] = {}

    @invariant()
    def as_the_dict_says(self):
        for store in self.alive:
            sums = self.expected[id(store)]
            assert len(store) == len(sums)
            assert {id(param) for param in store.keys()} == {id(self.params[index]) for index in sums}
            for index, grad in sums.items():
                torch.testing.assert_close(store.get(self.params[index]), grad, rtol=1e-12, atol=1e-12)
            square = sum(float((grad**2).sum()) for grad in sums.values())
            torch.testing.assert_close(float(store.norm()), square**0.5, rtol=1e-12, atol=1e-12)
        for index, param in enumerate(self.params):
            assert (param.grad is None) == (index not in self.grads)
            if index in self.grads:
                torch.testing.assert_close(param.grad, self.grads[index], rtol=1e-12, atol=1e-12)

    @invariant()
    def nothing_is_shared(self):
        grads = [grad for store in self.alive for _, grad in store.items()]
        grads += [param.grad for param in self.params if param.grad is not None]
        assert len({grad.data_ptr() for grad in grads}) == len(grads)


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=examples(60), stateful_step_count=20)


def test_a_store_asks_the_device_once_whether_all_is_finite():
    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func._opname == "_local_scalar_dense"
            return func(*args, **(kwargs or {}))

    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    for param in params:
        param.grad = torch.ones(3)
    store = GradStore.from_grads(params)
    with Waits() as waits:
        assert store.is_finite()
    assert waits.count == 1
