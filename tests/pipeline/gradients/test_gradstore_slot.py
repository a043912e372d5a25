"""A sum's bits: which order it is added in, who may add at once, and in what precision.

The reference of a sum is the plain loop over its contributions.
"""

import re
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import GradStore


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def rough(param, seed):
    """Values over ten orders of magnitude: the bits of their sum depend on its order."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.randint(-5, 5, (), generator=generator).item()
    return (torch.randn(param.shape, generator=generator) * 10.0**power).to(param.dtype)


def by_hand(param, seeds):
    total = None
    for seed in seeds:
        grad = rough(param, seed).to(torch.promote_types(param.dtype, torch.float32))
        total = grad if total is None else total + grad
    return total


# -------------------------------------------------------------------------------------------------------------- order


@given(order=st.permutations(range(8)), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_contributions_are_added_in_the_order_in_which_they_come(order, dtype):
    param = parameter(20, dtype=dtype)
    store = GradStore([param])
    for seed in order:
        store.add_(param, rough(param, seed))
    assert torch.equal(store.get(param), by_hand(param, order))


def test_another_order_gives_other_bits():
    param = parameter(20)
    assert not torch.equal(by_hand(param, range(8)), by_hand(param, reversed(range(8))))


def test_what_was_added_is_a_copy():
    param, grad = parameter(3), torch.ones(3)
    store = GradStore([param])
    store.add_(param, grad)
    grad.fill_(7.0)
    assert torch.equal(store.get(param), torch.ones(3))


@pytest.mark.parametrize("choice", ["sorted", None, ["densify"]])
def test_other_choices_of_sparse_are_refused(choice):
    with pytest.raises(ValueError, match=re.escape(f"sparse is {choice!r}. Use 'densify' or 'error'.")):
        GradStore(sparse=choice)


# ------------------------------------------------------------------------------------------------------------ threads


def test_threads_may_add_at_once():
    params = [parameter(50, dtype=torch.float64) for _ in range(3)]
    store, begin = GradStore(params), threading.Barrier(4)

    def adds(thread):
        begin.wait()
        for _ in range(200):
            for param in params:
                store.add_(param, torch.full((50,), float(thread + 1), dtype=torch.float64))

    threads = [threading.Thread(target=adds, args=(each,)) for each in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(store.get(param), torch.full((50,), 2000.0, dtype=torch.float64)) for param in params)


def test_a_first_addition_waits_for_the_other_thread():
    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:  # the copy that the first one makes
                entered.set()
                proceed.wait(0.2)
            return super().__torch_function__(func, types, args, kwargs)

    entered, proceed = threading.Event(), threading.Event()
    param = parameter(3)
    store = GradStore([param])
    thread = threading.Thread(target=store.add_, args=(param, torch.ones(3).as_subclass(Slow)))
    thread.start()
    entered.wait(10)
    store.add_(param, torch.ones(3))  # an unlocked one would be lost
    proceed.set()
    thread.join()
    assert torch.equal(torch.Tensor(store.get(param)), torch.full((3,), 2.0))


# --------------------------------------------------------------------------------------------------- precision, layout


@given(count=st.integers(1, 64), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_sums_are_the_float64_ones_to_1e_6(count, seed, dtype):
    param = parameter(30, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    grads = [(torch.rand(30, generator=generator) + 0.5).to(dtype) for _ in range(count)]
    store = GradStore([param])
    for grad in grads:
        store.add_(param, grad)
    exact = torch.stack([grad.double() for grad in grads]).sum(0)
    torch.testing.assert_close(store.get(param).double(), exact, rtol=1e-6, atol=0)
    cast = store.get(param).to(dtype)
    store.assign()
    assert torch.equal(param.grad, cast)


def test_64_bfloat16_gradients_summed_in_bfloat16_lose_a_hundred_times_more():
    param = parameter(1000, dtype=torch.bfloat16)
    grads = [(torch.rand(1000) + 0.5).bfloat16() for _ in range(64)]
    exact = torch.stack([grad.double() for grad in grads]).sum(0)
    store, naive = GradStore([param]), torch.zeros(1000, dtype=torch.bfloat16)
    for grad in grads:
        store.add_(param, grad)
        naive += grad

    def error(found):
        return ((found.double() - exact).norm() / exact.norm()).item()

    assert error(naive) > 4e-3 and error(store.get(param)) < 1e-6
    store.assign()
    assert error(param.grad) < 2.5e-3  # that of the one cast: half a unit in the last of 8 bits, at most 2 ** -9


def test_assign_adds_to_half_precision_with_one_cast():
    param = parameter(2, dtype=torch.bfloat16)
    param.grad = torch.full((2,), 1.0, dtype=torch.bfloat16)
    store = GradStore([param])
    store.add_(param, torch.full((2,), 2.0**-8 + 2.0**-16))  # cast by itself it is 2 ** -8, and 1 + 2 ** -8 is 1
    store.assign()
    assert torch.equal(param.grad, torch.full((2,), 1 + 2.0**-7, dtype=torch.bfloat16))


def sparse(param, row):
    return torch.sparse_coo_tensor([[row]], torch.ones(1, *param.shape[1:]), param.shape, check_invariants=True)


@pytest.mark.parametrize("how", ["add", "merge"])
@pytest.mark.parametrize("kinds", ["sd", "ds", "se", "es"])
def test_sparse_error_refuses_a_sparse_and_a_dense_gradient_of_one_parameter(kinds, how):
    param = parameter(4, 2)
    alike = {"s": sparse(param, 1), "d": torch.ones(4, 2), "e": torch.ones(4, 2).to_sparse()}
    grads = [alike[kind] for kind in kinds]
    store, loose = GradStore([param], sparse="error"), GradStore([param])
    for grad in grads[:1] * 2:
        store.add_(param, grad)
    with pytest.raises(TypeError, match=r"of shape \[4, 2\] got sparse and dense gradients.*use sparse='densify'"):
        if how == "add":
            store.add_(param, grads[1])
        else:
            other = GradStore()
            other.add_(param, grads[1])
            store.merge_(other)
    assert torch.equal(store.get(param).to_dense(), 2 * grads[0].to_dense())
    for grad in grads:
        loose.add_(param, grad)
    assert torch.equal(loose.get(param), grads[0].to_dense() + grads[1].to_dense())


# ---------------------------------------------------------------------------------------------------- trees of merges

LEAVES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**16)), max_size=3)
trees = st.recursive(LEAVES, lambda children: st.tuples(children, children), max_leaves=12)


def merged(tree, params):
    if isinstance(tree, tuple):
        one, other = (merged(each, params) for each in tree)
        one.merge_(other)
        return one
    store = GradStore(params)
    for which, seed in tree:
        store.add_(params[which], torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return store


def flat(tree):
    return flat(tree[0]) + flat(tree[1]) if isinstance(tree, tuple) else tree


def mirrored(tree):
    return (mirrored(tree[1]), mirrored(tree[0])) if isinstance(tree, tuple) else tree


@given(tree=trees)
def test_any_tree_of_merges_is_the_sum_of_its_leaves(tree):
    params = [parameter(5, dtype=torch.float64) for _ in range(3)]
    expected = {}
    for which, seed in flat(tree):
        grad = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        expected[which] = expected.get(which, 0.0) + grad
    for each in (tree, mirrored(tree), flat(tree)):
        store = merged(each, params)
        assert {id(param) for param in store.keys()} == {id(params[which]) for which in expected}
        for which, grad in expected.items():
            torch.testing.assert_close(store.get(params[which]), grad, rtol=1e-13, atol=1e-13)
