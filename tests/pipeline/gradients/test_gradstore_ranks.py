"""all_reduce_ over two gloo ranks gives on both the sum of what the two stores hold, whatever each of them lacks.

Both ranks are started once; each runs all cases and writes what it found; the tests compare with sums made here.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_processes import two_processes

from pipeline import GradStore
from pipeline.gradients import reduce as gradstore_ranks

SHAPES = {"a": (3, 4), "b": (5,), "c": (), "d": (0, 2), "e": (6, 2)}
# What each of the ranks has, by name: d dense, s sparse in rows, e in entries, 0 without any.
CASES = {
    "all on both": ({"a": "d", "b": "d", "c": "d", "d": "d", "e": "d"},) * 2,
    "some on one": ({"a": "d", "c": "d"}, {"b": "d", "c": "d"}),
    "nothing on one": ({}, {"a": "d", "b": "d"}),
    "nothing at all": ({}, {}),
    "sparse on both": ({"e": "s", "a": "d"}, {"e": "s"}),
    "sparse on one": ({"a": "d"}, {"e": "s"}),
    "sparse and dense": ({"e": "d"}, {"e": "s", "b": "d"}),
    "sparse without entries": ({"e": "0"}, {"e": "0"}),
    "sparse in entries": ({"e": "e", "a": "e"}, {"e": "e"}),
    "sparse in rows and entries": ({"e": "s"}, {"e": "e"}),
}
KINDS = ("float32", "bfloat16", "complex128")
BUCKETS = {"one bucket": gradstore_ranks.BUCKET_BYTES, "a few buckets": 100, "one by one": 1}


def params(dtype="float64"):
    return {name: nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for name, shape in SHAPES.items()}


def grad_of(name, kind, rank, dtype="float64"):
    generator = torch.Generator().manual_seed(100 * rank + sum(map(ord, name)))
    if kind in "de":
        dense = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        return dense.to_sparse() if kind == "e" else dense
    rows = [] if kind == "0" else [1, 3, 3] if rank == 0 else [3, 5, 0, 2]  # more on one rank than on the other
    values = torch.randn(len(rows), 2, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, SHAPES[name], check_invariants=True)


def store_of(case, rank, dtype="float64", **options):
    store = GradStore(params(dtype), **options)
    for name, kind in CASES[case][rank].items():
        store.add_(name, grad_of(name, kind, rank, dtype))
    return store


def refusal(function):
    with pytest.raises(Exception) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


def mixed_types(rank):
    store = GradStore(params("float32"))
    store.add_("a", grad_of("a", "d", rank, "float64" if rank else "float32"))
    store.add_("b", grad_of("b", "d", rank, "float32"))
    store.all_reduce_()
    return store.state_dict()


def refusals(rank):
    swapped = dict(reversed(params().items())) if rank else params()
    wider = {**params(), "b": nn.Parameter(torch.zeros(7))} if rank else params()
    fewer = {"a": nn.Parameter(torch.zeros(3, 4))} if rank else params()
    return {
        "op": refusal(lambda: GradStore(params()).all_reduce_(op="max")),
        "open": refusal(lambda: GradStore().all_reduce_()),
        "ops": refusal(lambda: GradStore(params()).all_reduce_(op=gradstore_ranks.OPS[rank])),
        "order": refusal(lambda: GradStore(swapped).all_reduce_()),
        "shape": refusal(lambda: GradStore(wider).all_reduce_()),
        "fewer": refusal(lambda: GradStore(fewer).all_reduce_()),
        "sparse": refusal(lambda: store_of("sparse and dense", rank, sparse="error").all_reduce_()),
        "op of one": refusal(lambda: GradStore(params()).all_reduce_(op=("sum", "max")[rank])),
        "one open": refusal(lambda: GradStore(params() if rank else None).all_reduce_()),
        "sparse for one": refusal(
            lambda: store_of("sparse and dense", rank, sparse=("densify", "error")[rank]).all_reduce_()
        ),
    }


def trained(rank):
    """Three steps of AdamW; parameter c is never reached, b on rank 0 alone."""
    weights = {name: nn.Parameter(param.detach() + 1) for name, param in params().items()}
    store = GradStore(weights)
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        for name in ("a", "b") if rank == 0 else ("a",):
            store.add_(name, grad_of(name, "d", rank + 2 * step))
        store.all_reduce_(op="mean")
        store.clip_(0.5)
        store.apply(optimizer)
    return {name: weight.detach() for name, weight in weights.items()}


def held(rank):
    """The bytes of memory that each gradient keeps after all went in one bucket."""
    store = store_of("all on both", rank)
    store.all_reduce_()
    return [store.get(name).untyped_storage().nbytes() for name in ("a", "b")]


def after_another_backward():
    """What a store of the gradients of a DistributedDataParallel holds, before and after it runs again."""
    module = nn.Linear(2, 1, bias=False)  # one gradient: all of a bucket
    ddp = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    for scale in (1.0, 2.0):
        ddp(torch.full((3, 2), scale)).sum().backward()
        store = GradStore.from_grads(module)
        before = store.get("weight").clone()
    ddp(torch.full((3, 2), 7.0)).sum().backward()
    return before, store.get("weight")


def rank_main(rank):
    found = {"refusals": refusals(rank), "trained": trained(rank), "mixed types": mixed_types(rank)}
    found["ddp"], found["held"] = after_another_backward(), held(rank)
    for buckets, size in BUCKETS.items():
        gradstore_ranks.BUCKET_BYTES = size
        for case in CASES:
            for op in gradstore_ranks.OPS:
                store = store_of(case, rank)
                store.all_reduce_(op=op)
                found[case, op, buckets] = store.state_dict()
        for dtype in KINDS:
            store = store_of("some on one", rank, dtype)
            store.all_reduce_(dist.group.WORLD)
            found[dtype] = store.state_dict()
    return found


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory):
    return two_processes(rank_main, tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", gradstore_ranks.OPS)
@pytest.mark.parametrize("buckets", BUCKETS)
def test_each_rank_has_the_sum_of_both_and_what_both_lack_is_absent(case, op, buckets, both_ranks):
    expected = {}
    for rank, kinds in enumerate(CASES[case]):
        for name, kind in kinds.items():
            grad = grad_of(name, kind, rank).to_dense() / (2 if op == "mean" else 1)
            expected[name] = expected[name] + grad if name in expected else grad
    for found in both_ranks:
        sums = found[case, op, buckets]
        assert sums.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(sums[name].to_dense(), grad, rtol=1e-15, atol=1e-15)
            layouts = {kinds[name] for kinds in CASES[case] if name in kinds}
            assert sums[name].is_sparse == (len(layouts) == 1 and "d" not in layouts)
    one, other = (found[case, op, buckets] for found in both_ranks)
    assert all(torch.equal(one[name].to_dense(), other[name].to_dense()) for name in one)


@pytest.mark.parametrize("dtype", KINDS)
def test_ranks_add_in_the_type_of_the_sums(dtype, both_ranks):
    one, other = (store_of("some on one", rank, dtype) for rank in range(2))
    one = {**other.state_dict(), **one.state_dict()} | {"c": one.get("c") + other.get("c")}
    for found in both_ranks:
        assert found[dtype].keys() == one.keys()
        assert all(torch.equal(found[dtype][name], grad) for name, grad in one.items())
        assert all(grad.dtype is one["c"].dtype for grad in found[dtype].values())


def test_ranks_of_different_types_add_in_the_widest(both_ranks):
    expected = grad_of("a", "d", 0, "float32").double() + grad_of("a", "d", 1)
    for found in both_ranks:
        assert found["mixed types"]["a"].dtype is torch.float64 and torch.equal(found["mixed types"]["a"], expected)
        assert found["mixed types"]["b"].dtype is torch.float32


@pytest.mark.parametrize(
    ("sizes", "places", "expected"),
    [
        ([4, 4, 4], ["cpu"] * 3, [[0, 1, 2]]),
        ([5, 5, 5], ["cpu"] * 3, [[0, 1], [2]]),
        ([5, 20, 5, 5], ["cpu"] * 4, [[0], [1], [2, 3]]),  # one that is larger than a bucket goes alone
        ([1, 1, 1], ["cpu", "meta", "meta"], [[0], [1, 2]]),
        ([], [], []),
    ],
)
def test_a_bucket_holds_neighbours_of_one_device_up_to_its_size(sizes, places, expected, monkeypatch):
    monkeypatch.setattr(gradstore_ranks, "BUCKET_BYTES", 12 * 8)
    columns = [
        (
            gradstore_ranks.Word("w", (size,), torch.float64, "cpu", 0, 0),
            gradstore_ranks.Word("w", (size,), None, place, 0, 0),
        )
        for size, place in zip(sizes, places, strict=True)
    ]
    assert list(gradstore_ranks._buckets(range(len(sizes)), columns)) == expected


def test_a_gradient_does_not_keep_its_bucket(both_ranks):
    for found in both_ranks:
        assert found["held"] == [12 * 8, 5 * 8]


def test_from_grads_copies_out_of_the_buckets_of_ddp(both_ranks):
    for found in both_ranks:
        assert [grad.tolist() for grad in found["ddp"]] == [[[6.0, 6.0]]] * 2


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("op", "ValueError", "op is 'max'. Use 'sum', or 'mean', which divides by the number of ranks."),
        ("open", "ValueError", "an open GradStore has no order of its parameters that ranks share."),
        ("ops", "ValueError", "different ops: ['sum', 'mean'], by rank"),
        ("order", "ValueError", "0 of the GradStore is not the same on all ranks: a [3, 4], e [6, 2], by rank"),
        ("shape", "ValueError", "parameter 1 of the GradStore is not the same on all ranks: b [5], b [7], by rank"),
        ("fewer", "ValueError", "hold [5, 1] parameters, by rank. Make them of the same model, "),
        ("sparse", "TypeError", "parameter of shape [6, 2] got sparse and dense gradients"),
        ("op of one", "ValueError", "different ops: ['sum', 'max'], by rank"),
        ("one open", "ValueError", "an open GradStore has no order of its parameters that ranks share."),
        ("sparse for one", "TypeError", "parameter of shape [6, 2] got sparse and dense gradients"),
    ],
)
def test_what_does_not_fit_is_refused_on_both_ranks(what, error, words, both_ranks):
    for found in both_ranks:
        kind, said = found["refusals"][what]
        assert kind == error and words in said


def test_replicas_that_reduce_then_clip_then_step_stay_equal_and_leave_absent_ones_alone(both_ranks):
    weights = {name: nn.Parameter(param.detach() + 1) for name, param in params().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        weights["a"].grad = (grad_of("a", "d", 2 * step) + grad_of("a", "d", 2 * step + 1)) / 2
        weights["b"].grad = grad_of("b", "d", 2 * step) / 2
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
    for found in both_ranks:
        for name, weight in weights.items():
            torch.testing.assert_close(found["trained"][name], weight.detach(), rtol=1e-14, atol=1e-14)
            assert torch.equal(found["trained"][name], both_ranks[0]["trained"][name])
        assert torch.equal(found["trained"]["c"], torch.ones((), dtype=torch.float64))
