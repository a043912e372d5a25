"""Laws: estimators compute in the vectors' own precision, where they are, whatever the caller has set for the layers.

Autocast and TF32 (torch.set_float32_matmul_precision) make products of float32 matrices less exact. Layers get what
the caller asks for; inner products and bases do not: their errors would be taken for the matrix's.
"""

import pytest
import torch
from cover import examples
from dense_map import DenseMap, DenseSpace, symmetric
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.curvature.estimates.density import density
from pipeline.curvature.estimates.diagonal import diagonal
from pipeline.curvature.estimates.eigenpairs import top_eigenpairs
from pipeline.curvature.estimates.frobenius import frobenius_squared
from pipeline.curvature.estimates.layer_traces import layer_traces
from pipeline.curvature.estimates.solve import solve
from pipeline.curvature.estimates.trace import trace

PRODUCTS = ("mm", "mv", "bmm", "dot", "addmm", "addmv", "baddbmm", "addmm_", "addmv_", "baddbmm_", "linear")


class Exact(DenseMap):
    """Its products are computed in float64, whatever is switched on."""

    def products(self, vectors):
        found = DenseMap.products(self, [[part.double() for part in vector] for vector in vectors])
        return [[part.float() for part in vector] for vector in found]


def exact(size=60):
    A = Exact(symmetric(torch.linspace(-3.0, 5.0, size)), block=2)
    A._space = DenseSpace(size, torch.float32)
    return A


ESTIMATES = {
    "eigenpairs": lambda A: vars(top_eigenpairs(A, 3, max_basis=20)),  # so few that it restarts
    "hutchinson": lambda A: vars(trace(A, 12)),
    "hutch++": lambda A: vars(trace(A, 12, method="hutch++")),
    "xtrace": lambda A: vars(trace(A, 12, method="xtrace")),
    "layer traces": lambda A: vars(layer_traces(A, {"a": ["a"], "b": ["b"]}, 12)),
    "diagonal": lambda A: vars(diagonal(A, 12)),
    "norm": lambda A: vars(frobenius_squared(A, 12)),
    "density": lambda A: vars(density(A, steps=12, runs=2, points=10)),
    "cg": lambda A: vars(solve(A, A.space.random("normal", 3, 3), damping=4.0, max_products=30)),
    "minres": lambda A: vars(solve(A, A.space.random("normal", 3, 3), max_products=30, method="minres")),
}  # fmt: skip


class Watched(TorchDispatchMode):
    """Collects products of float32 that lower precision is allowed for, and tensors of half precision."""

    def __init__(self):
        super().__init__()
        self.lowered = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
        lower = any(torch._C._get_fp32_precision_getter(name, "matmul") not in ("none", "ieee") for name in PRECISIONS)
        is_product = func._opname in PRODUCTS and any(each.dtype is torch.float32 for each in tensors)
        if is_product and lower or any(each.dtype is torch.bfloat16 for each in tensors):
            self.lowered.add(func._opname)
        return out


PRECISIONS = ("cuda", "mkldnn")


def set_precisions(values):
    for backend, value in zip(PRECISIONS, values, strict=True):
        torch._C._set_fp32_precision_setter(backend, "matmul", value)


def get_precisions():
    return [torch._C._get_fp32_precision_getter(backend, "matmul") for backend in PRECISIONS]


@pytest.fixture(params=["matmul", "all"])
def tf32(request):
    before = get_precisions()
    torch._C._set_fp32_precision_setter("generic", "all", "tf32" if request.param == "all" else "none")
    if request.param == "matmul":
        torch.set_float32_matmul_precision("medium")
    yield
    torch._C._set_fp32_precision_setter("generic", "all", "none")
    if request.param == "matmul":
        torch.set_float32_matmul_precision("highest")
    set_precisions(before)


@pytest.mark.parametrize("what", ESTIMATES)
def test_no_estimator_multiplies_in_less_than_the_precision_of_its_vectors(what, tf32):
    allowed = get_precisions()
    with torch.autocast("cpu", torch.bfloat16), Watched() as watched:
        found = ESTIMATES[what](exact())
        assert torch.is_autocast_enabled("cpu")
    assert not watched.lowered and get_precisions() == allowed
    torch._C._set_fp32_precision_setter("generic", "all", "none")
    if allowed == ["tf32", "tf32"]:  # that of all backends, which it goes on to follow
        assert get_precisions() == ["none", "none"]
    for name, value in ESTIMATES[what](exact()).items():
        assert repr(found[name]) == repr(value), name
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("what", ESTIMATES)
def test_the_default_device_is_for_layers_alone(what):
    expected, A = ESTIMATES[what](exact()), exact()
    with torch.device("meta"):
        found = ESTIMATES[what](A)
    assert {name: repr(value) for name, value in found.items()} == {name: repr(expected[name]) for name in found}


@settings(max_examples=examples(10))
@given(st.sampled_from([1, 3, 70, (1 << 16) + 1, (1 << 20) + 5]), st.booleans(), st.integers(0, 5))
def test_inner_products_are_exact_to_the_rounding_of_float64(size, is_autocast, seed):
    space = DenseSpace(size, torch.float32)
    vectors = [space.random("normal", seed, index) for index in range(3)]
    whole = torch.stack([torch.cat(vector) for vector in vectors]).double()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        found = space.dots(vectors, vectors[:2])
        norm = space.norm(vectors[0])
    torch.testing.assert_close(found, whole @ whole[:2].T, rtol=1e-12, atol=1e-13 * size)
    assert norm == pytest.approx(float(whole[0].norm()), rel=1e-12)


@pytest.mark.parametrize("vectors", [1, 4])
def test_inner_products_come_to_the_host_once_for_each_shard(vectors):
    class Counted(TorchDispatchMode):
        moved = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.moved += func._opname == "add_" and args[0].dtype is torch.float64  # into the sum on the host
            return func(*args, **(kwargs or {}))

    space = DenseSpace(30)
    those = [space.random("normal", 0, index) for index in range(vectors)]
    with Counted() as counted:
        space.dots(those, those)
    assert counted.moved == 2
