"""A sum's bits: which order it is added in, who may add at once, and in what precision.

The reference of a sum by index is the plain loop over its contributions in ascending index.
"""

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


def rough(param, index):
    """Values over ten orders of magnitude: the bits of their sum depend on its order."""
    generator = torch.Generator().manual_seed(hash(index) % 2**32)
    power = torch.randint(-5, 5, (), generator=generator).item()
    return (torch.randn(param.shape, generator=generator) * 10.0**power).to(param.dtype)


def by_hand(param, indices):
    total = None
    for index in sorted(indices):
        grad = rough(param, index).to(torch.promote_types(param.dtype, torch.float32))
        total = grad if total is None else total + grad
    return total


INDICES = [(chunk, stage) for chunk in range(6) for stage in range(3)]
orders = st.permutations(INDICES)


# ------------------------------------------------------------------------------------------------------ order="index"


@given(order=orders, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_by_index_the_bits_do_not_depend_on_who_came_first(order, dtype):
    param = parameter(20, dtype=dtype)
    store = GradStore([param], order="index")
    for index in order:
        store.add_(param, rough(param, index), index=index)
    assert torch.equal(store.get(param), by_hand(param, INDICES))


def test_by_arrival_they_do():
    param = parameter(20)
    found = []
    for order in (INDICES, INDICES[::-1]):
        store = GradStore([param])
        for index in order:
            store.add_(param, rough(param, index), index=index)  # which means nothing here
        found.append(store.get(param))
    assert torch.equal(found[0], by_hand(param, INDICES)) and not torch.equal(found[0], found[1])


cuts = st.integers(0, len(INDICES))


@given(order=orders, cuts=st.tuples(cuts, cuts), merges=st.permutations(range(3)))
def test_by_index_the_bits_do_not_depend_on_how_stores_were_merged(order, cuts, merges):
    param = parameter(20)
    first, second = sorted(cuts)
    stores = []
    for part in (order[:first], order[first:second], order[second:]):
        stores.append(GradStore([param], order="index"))
        for index in part:
            stores[-1].add_(param, rough(param, index), index)
    total = GradStore([param], order="index")
    for each in merges:
        total.merge_(stores[each])
    assert torch.equal(total.get(param), by_hand(param, INDICES))


@given(order=st.permutations(INDICES[:6]), reads=st.sets(st.integers(0, 5)))
def test_a_read_closes_the_order_up_to_what_it_added(order, reads):
    param = parameter(4)
    store, last, done = GradStore([param], order="index"), None, []
    for position, index in enumerate(order):
        if last is not None and index < last:
            with pytest.raises(RuntimeError, match=r"after the sum up to \(\d, \d\) was read: its place in the order"):
                store.add_(param, rough(param, index), index)
            continue
        store.add_(param, rough(param, index), index)
        done.append(index)
        if position in reads:
            assert torch.equal(store.get(param), by_hand(param, done))
            last = max(done)
    assert torch.equal(store.get(param), by_hand(param, done))


READS = {
    "get": lambda store, param: store.get(param),
    "items": lambda store, param: dict(store.items()),
    "norm": lambda store, param: store.norm(),
    "scale_": lambda store, param: store.scale_(1.0),
    "is_finite": lambda store, param: store.is_finite(),
    "state_dict": lambda store, param: store.state_dict(),
}
EMPTYING = {
    "pop": lambda store, param: store.pop(param),
    "clear": lambda store, param: store.clear(),
    "assign": lambda store, param: store.assign(),
    "apply": lambda store, param: store.apply(torch.optim.SGD([param], lr=0.0)),
    "load_state_dict": lambda store, param: store.load_state_dict({}),
}


@pytest.mark.parametrize("how", READS)
def test_what_waits_is_held_until_a_read(how):
    param = parameter(10)
    store = GradStore([("w", param)], order="index")
    for chunk in range(4):
        store.add_(param, torch.ones(10), index=(chunk, 0))
    assert param in store and len(store) == 1 and [id(key) for key in store.keys()] == [id(param)]
    assert store.nbytes == 4 * 40  # asking does not read
    READS[how](store, param)
    assert store.nbytes == 40 and torch.equal(store.get(param), torch.full((10,), 4.0))


@pytest.mark.parametrize("how", EMPTYING)
def test_an_emptied_store_begins_a_new_order(how):
    param = parameter(3)
    store = GradStore([("w", param)], order="index")
    for _ in range(2):
        store.add_(param, torch.ones(3), index=(5, 0))
        store.add_(param, torch.ones(3), index=(0, 0))
        EMPTYING[how](store, param)
        assert len(store) == 0 and store.nbytes == 0


@pytest.mark.parametrize("index", [None, 3])
def test_order_by_index_needs_one(index):
    param = parameter(3)
    with pytest.raises(TypeError, match=rf"needs add_\(key, grad, index=\(chunk, stage\)\); the index is {index}"):
        GradStore([param], order="index").add_(param, torch.ones(3), index)


def test_one_index_twice_is_refused():
    param = parameter(3)
    store = GradStore([param], order="index")
    store.add_(param, torch.ones(3), (1, 0))
    with pytest.raises(ValueError, match=r"got two gradients of index \(1, 0\)"):
        store.add_(param, torch.ones(3), (1, 0))
    other = GradStore(order="index")
    other.add_(param, torch.ones(3), (1, 0))
    with pytest.raises(ValueError, match=r"got two gradients of index \(1, 0\)"):
        store.merge_(other)
    assert torch.equal(store.get(param), torch.ones(3)) and torch.equal(other.get(param), torch.ones(3))


@pytest.mark.parametrize("other_order", ["arrival", "index"])
def test_a_sum_has_no_place_among_contributions_by_index(other_order):
    param = parameter(3)
    store, other = GradStore([param], order="index"), GradStore([param], order=other_order)
    store.add_(param, torch.ones(3), (0, 0))
    other.add_(param, torch.ones(3), (1, 0))
    other.get(param)
    with pytest.raises(ValueError, match="were summed before they were merged into a GradStore with order='index'"):
        store.merge_(other)
    store.clear()
    store.merge_(other)  # alone it has
    assert torch.equal(store.get(param), torch.ones(3))
    if other_order == "index":  # and closes the order where it did
        with pytest.raises(RuntimeError, match=r"index \(0, 0\) came after the sum up to \(1, 0\)"):
            store.add_(param, torch.ones(3), (0, 0))
    store.add_(param, torch.ones(3), (2, 0))
    assert torch.equal(store.get(param), torch.full((3,), 2.0))


def test_an_index_that_was_read_is_late():
    param = parameter(3)
    store = GradStore([param], order="index")
    store.add_(param, torch.ones(3), (1, 0))
    store.get(param)
    with pytest.raises(RuntimeError, match=r"index \(1, 0\) came after the sum up to \(1, 0\) was read"):
        store.add_(param, torch.ones(3), (1, 0))
    assert torch.equal(store.get(param), torch.ones(3))


def test_a_late_index_is_refused_in_a_merge_too():
    param = parameter(3)
    store, other = GradStore([param], order="index"), GradStore([param], order="index")
    store.add_(param, torch.ones(3), (2, 0))
    store.get(param)
    other.add_(param, torch.ones(3), (1, 0))
    with pytest.raises(RuntimeError, match=r"index \(1, 0\) came after the sum up to \(2, 0\) was read"):
        store.merge_(other)
    assert len(other) == 1 and torch.equal(store.get(param), torch.ones(3))


def test_a_store_by_arrival_takes_one_by_index_in_its_order():
    param = parameter(20)
    store, other = GradStore([param]), GradStore([param], order="index")
    for index in INDICES[::-1]:
        other.add_(param, rough(param, index), index)
    store.merge_(other)
    assert torch.equal(store.get(param), by_hand(param, INDICES))


def test_one_half_precision_gradient_by_index_is_float32_too():
    param = parameter(3, dtype=torch.bfloat16)
    store = GradStore([param], order="index")
    store.add_(param, torch.ones(3, dtype=torch.bfloat16), (0, 0))
    assert store.get(param).dtype is torch.float32


def test_what_was_added_by_index_is_a_copy():
    param, grad = parameter(3), torch.ones(3)
    store = GradStore([param], order="index")
    store.add_(param, grad, (0, 0))
    grad.fill_(7.0)
    assert torch.equal(store.get(param), torch.ones(3))


@pytest.mark.parametrize(("what", "words"), [("order", "'arrival' or 'index'"), ("sparse", "'densify' or 'error'")])
def test_other_choices_are_refused(what, words):
    with pytest.raises(ValueError, match=f"{what} is 'sorted'. Use {words}"):
        GradStore(**{what: "sorted"})


# ------------------------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize("order", ["arrival", "index"])
def test_threads_may_add_at_once(order):
    params = [parameter(50, dtype=torch.float64) for _ in range(3)]
    store, begin = GradStore(params, order=order), threading.Barrier(4)

    def adds(thread):
        begin.wait()
        for chunk in range(200):
            for param in params:
                store.add_(param, torch.full((50,), float(thread + 1), dtype=torch.float64), (chunk, thread))

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


@pytest.mark.parametrize("order", ["arrival", "index"])
@pytest.mark.parametrize("how", ["add", "merge"])
@pytest.mark.parametrize("kinds", ["sd", "ds"])
def test_sparse_error_refuses_a_sparse_and_a_dense_gradient_of_one_parameter(kinds, how, order):
    param = parameter(4, 2)
    grads = [sparse(param, 1) if kind == "s" else torch.ones(4, 2) for kind in kinds]
    store, loose = GradStore([param], order=order, sparse="error"), GradStore([param], order=order)
    for index, grad in enumerate(grads[:1] * 2):
        store.add_(param, grad, (index, 0))
    with pytest.raises(TypeError, match=r"of shape \[4, 2\] got sparse and dense gradients.*use sparse='densify'"):
        if how == "add":
            store.add_(param, grads[1], (2, 0))
        else:
            other = GradStore(order=order)
            other.add_(param, grads[1], (2, 0))
            store.merge_(other)
    assert torch.equal(store.get(param).to_dense(), 2 * grads[0].to_dense())
    for index, grad in enumerate(grads):
        loose.add_(param, grad, (index, 0))
    assert torch.equal(loose.get(param), grads[0].to_dense() + grads[1].to_dense())


def test_sparse_error_looks_into_what_is_merged():
    param = parameter(4, 2)
    store, other = GradStore([param], order="index", sparse="error"), GradStore([param], order="index")
    other.add_(param, sparse(param, 1), (0, 0))
    other.add_(param, torch.ones(4, 2), (1, 0))
    with pytest.raises(TypeError, match="sparse and dense"):
        store.merge_(other)


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
