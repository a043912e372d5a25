import json
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.data.pytrees import memory_address
from pipeline.transports.codec import decode, encode
from pipeline.transports.packing import Packing
from pipeline.transports.tensor_spec import StridedSpec, sendable

pytestmark = [  # what torch says of the tensors that are made here
    pytest.mark.filterwarnings("ignore:Sparse (... tensor support|invariant checks):UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
CPU = torch.device("cpu")
HEADER = bytes(range(64))
DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]


def numbers(dtype, shape, seed=0):
    """Any bits at all (for bool, 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    drawn = torch.randint(2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).view(shape)


def bits(tensor):
    """Number for number, whatever the layout."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).tolist()


def over(tensors):
    """Pack and unpack, as the two ends of a link do."""
    settled = sendable(tensors, "it")
    packing = Packing.of(settled)
    buffer = packing.pack(HEADER, settled)
    assert len(buffer) == 64 + packing.nbytes and bytes(buffer[:64].tolist()) == HEADER
    written = json.loads(json.dumps(encode(packing.specs)))
    return Packing(decode(written)).unpack(buffer, 64, CPU)


LAYOUTS = {
    "as made": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t,
    "every other": lambda t: t[..., ::2] if t.dim() else t,
    "first column": lambda t: t[..., :1] if t.dim() else t,
    "a row of it": lambda t: t[1:] if t.dim() else t,
    "expanded": lambda t: t.expand(4, *t.shape),
    "one number for all": lambda t: t.reshape(-1)[0].expand(3, 5) if t.numel() else t,
    "overlapping": lambda t: t.reshape(-1).unfold(0, 3, 1) if t.numel() > 2 else t,
    "with gaps, as many as expanded": lambda t: t.reshape(-1).as_strided((2, 2), (3, 0)) if t.numel() > 3 else t,
    "flat": lambda t: t.reshape(-1),
}
drawn = st.builds(
    lambda dtype, shape, layout, seed: LAYOUTS[layout](numbers(dtype, shape, seed)),
    st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.sampled_from(sorted(LAYOUTS)),
    st.integers(0, 9),
)


def test_every_dtype_and_layout_arrives_bit_by_bit():
    for dtype in DTYPES:
        for layout in LAYOUTS.values():
            tensor = layout(numbers(dtype, (3, 4, 2)))
            (found,) = over([tensor])
            assert found.dtype is dtype and found.shape == tensor.shape and bits(found) == bits(tensor)


@given(st.lists(st.one_of(st.none(), drawn), max_size=6))
def test_any_tensors_arrive_each_at_its_place_of_a_cache_line_and_with_memory_of_its_own(tensors):
    found = over(tensors)
    assert [None if t is None else (t.dtype, t.shape, bits(t)) for t in found] == [
        None if t is None else (t.dtype, t.shape, bits(t)) for t in tensors
    ]
    arrived = [t for t in found if t is not None]
    assert not any(t._is_view() or t.requires_grad for t in arrived)
    sent = [t for t in sendable(tensors, "it") if t is not None]
    assert all(t.data_ptr() % 64 == s.data_ptr() % 64 for t, s in zip(arrived, sent, strict=True) if t.numel())
    assert len({memory_address(t) for t in arrived}) == len(arrived)


@given(drawn)
def test_strides_stay_as_they_are(tensor):
    (found,) = over([tensor])
    assert found.stride() == tensor.stride()


def test_the_gradient_of_a_sum_travels_as_one_number():
    gradient = torch.ones(()).expand(1000, 1000)
    assert Packing.of(sendable([gradient], "it")).nbytes == 4
    (found,) = over([gradient])
    assert found.stride() == (0, 0) and torch.equal(found, gradient)


def test_what_is_mostly_gaps_travels_without_them():
    column = torch.randn(100, 100)[:, 0]
    assert Packing.of(sendable([column], "it")).nbytes == 400
    assert torch.equal(over([column])[0], column)
    for step, nbytes in ((2, 29), (3, 10)):
        packing = Packing.of([torch.arange(30, dtype=torch.uint8)[::step]])
        assert packing.nbytes == nbytes


def test_channels_last_stays_channels_last():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (found,) = over([image])
    assert found.is_contiguous(memory_format=torch.channels_last) and not found.is_contiguous()


def test_conjugated_and_negated_numbers_are_so_in_memory():
    number = numbers(torch.complex64, (3, 4))
    for lazy in (number.conj(), number.imag, number.conj().imag, torch._neg_view(numbers(torch.float32, (5,)))):
        (found,) = over([lazy])
        assert not found.is_conj() and not found.is_neg() and bits(found) == bits(lazy)
    assert number.conj().is_conj() and number.conj().imag.is_neg()


def test_a_zero_that_has_no_memory_arrives_as_zeros():
    (found,) = over([torch._efficientzerotensor((2, 3))])
    assert not found._is_zerotensor() and torch.equal(found, torch.zeros(2, 3))
    (found,) = over([torch._efficientzerotensor((3, 2)).t()])
    assert not found._is_zerotensor() and torch.equal(found, torch.zeros(2, 3))


def test_sparse_tensors_arrive():
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 4]])
    repeated = torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [2, 2, 0]]), torch.tensor([1.0, 2, 3]), (2, 3))
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.randn(2, 4), (3, 4))
    empty = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (2, 3))
    sparse = [dense.to_sparse_coo(), repeated, repeated.coalesce(), hybrid, empty]
    for tensor, found in [*zip(sparse, over(sparse), strict=True), *[(t, over([t])[0]) for t in sparse]]:
        assert found.layout is tensor.layout and found.dtype is tensor.dtype
        assert torch.equal(found.to_dense(), tensor.to_dense())
        assert found.is_coalesced() == tensor.is_coalesced() and found._nnz() == tensor._nnz()
    values = [found._values() for found in over(sparse)]
    assert len({memory_address(each) for each in values if each.numel()}) == len(values) - 1


def test_what_arrives_can_be_used_like_any_tensor():
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for found in (*over([torch.randn(3, 4), torch.randn(2)]), *over([torch.randn(3, 4).t()])):
                as_sent = found.clone()
                leaf = found.detach() if found.is_inference() else found.detach().requires_grad_()
                assert leaf.is_leaf and torch.equal(leaf, as_sent)
                found.clone().mul_(2.0)
                with torch.no_grad():
                    found.mul_(2.0)
                assert torch.equal(found, 2 * as_sent)
    for found in over([torch.randn(3), torch.randn(2, 3).t()]):
        leaf = found.detach().requires_grad_()
        (leaf * leaf).sum().backward()
        assert torch.equal(leaf.grad, 2 * found)


def test_versions_and_memory_are_not_shared_among_tensors():
    found = over([torch.zeros(3), torch.zeros(5, dtype=torch.int64), torch.zeros(2, 2).t(), torch.zeros(())])
    before = [tensor._version for tensor in found]
    found[1].add_(7)
    assert [tensor._version for tensor in found] == [before[0], before[1] + 1, *before[2:]]
    assert not any(found[place].any() for place in (0, 2, 3)) and found[1].eq(7).all()


def test_the_packed_copy_is_a_copy():
    tensor = torch.zeros(3)
    packing = Packing.of([tensor])
    buffer = packing.pack(HEADER, [tensor])
    tensor.add_(1)
    assert torch.equal(packing.unpack(buffer, 64, CPU)[0], torch.zeros(3))


def test_no_graph_is_sent():
    weight = torch.nn.Parameter(torch.randn(3))
    for tensor in (weight, weight * 2):
        (found,) = over([tensor])
        assert type(found) is torch.Tensor and found.is_leaf and not found.requires_grad
        assert torch.equal(found, tensor.detach())


def test_only_tensors_that_look_alike_and_can_be_sent_as_they_are_fit():
    base = torch.randn(2, 3)
    others = [
        base.double(), base.view(torch.int32), base[:, :2], torch.randn(3, 2).t(), base[None], base.to_sparse_coo(),
        torch.randn(2, 3).requires_grad_(), torch.nn.Parameter(base, requires_grad=False), torch._neg_view(base), None,
        torch.nested.nested_tensor([torch.ones(3), torch.ones(3)]),
        torch.quantize_per_tensor(base, 0.1, 0, torch.qint8),
    ]
    packing = Packing.of([base])
    assert packing.fits([torch.zeros(2, 3)]) and packing.fits([torch.zeros(18, 3)[16:]])
    for other in (*others, torch.zeros(5, 3)[3:]):
        assert not packing.fits([other])
    assert not packing.fits([]) and not packing.fits([base, base]) and not Packing.of([None]).fits([base])
    assert not Packing.of([torch.randn(3).to(torch.complex64)]).fits([torch.zeros(3, dtype=torch.complex64).conj()])


def test_sparse_tensors_fit_where_their_parts_do():
    one, other = torch.tensor([0.0, 1, 2]).to_sparse_coo(), torch.tensor([3.0, 0, 4]).to_sparse_coo()
    packing = Packing.of([one])
    assert packing.fits([other])
    uncoalesced = torch.sparse_coo_tensor(one.indices(), one.values(), (3,))
    longer = torch.tensor([0.0, 1, 2, 0]).to_sparse_coo()
    for unlike in (torch.ones(3).to_sparse_coo(), torch.ones(3), longer, uncoalesced):
        assert not packing.fits([unlike])


def test_kinds_are_equal_where_tensors_look_alike():
    looks = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 3).double(), torch.zeros(6)]
    looks.append(torch.zeros(2, 3).to_sparse_coo())
    for one, other in combinations(looks, 2):
        assert Packing.of([one]).specs != Packing.of([other]).specs
    assert Packing.of([torch.ones(2, 3)]).specs == (StridedSpec(torch.float32, (2, 3), (3, 1)),)


class Tagged(torch.Tensor):
    pass


def test_what_cannot_be_sent_is_refused_by_name():
    refused = {
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8): r"quantized tensor \(torch.qint8\).*dequantize",
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]): r"a nested tensor, .*to_padded_tensor",
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged): r"NestedTensor, and only plain tensors",
        torch.ones(2).as_subclass(Tagged): r"test_packing.Tagged, and only plain tensors.*Return its parts",
        torch.ones(2, device="meta"): r"a tensor on meta, and only what is on the CPU or an accelerator",
        torch.ones(2, 2).to_mkldnn(): r"layout torch._mkldnn.*to_dense",
        torch.ones(2, 2).to_sparse_csr(): r"layout torch.sparse_csr, .*Return tensor.to_sparse_coo\(\)",
        torch.ones(2, 2).to_sparse_bsc((1, 1)): r"layout torch.sparse_bsc, .*Return tensor.to_sparse_coo\(\)",
    }
    for tensor, words in refused.items():
        with pytest.raises(TypeError, match=rf"(?s)^2F0 from rank 0 to rank 1 holds .*{words}"):
            sendable([torch.ones(1), tensor], "2F0 from rank 0 to rank 1")


def test_torchs_defaults_of_the_moment_do_not_matter():
    tensors = [torch.randn(3), torch.zeros(0, 2), torch.tensor([0.0, 1.0]).to_sparse_coo()]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            found = over(tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(t.device == CPU and t.dtype is torch.float32 for t in found)
    assert torch.equal(found[0], tensors[0]) and torch.equal(found[2].to_dense(), tensors[2].to_dense())


def test_inference_tensors_travel_in_and_out_of_inference_mode():
    with torch.inference_mode():
        made = [torch.randn(3), torch.randn(4).expand(2, 4)]
        packing = Packing.of(sendable(made, "it"))
        packed = packing.pack(HEADER, made)
    assert all(torch.equal(one, other) for one, other in zip(over(made), made, strict=True))
    found = packing.unpack(packed, 64, CPU)
    assert not any(tensor.is_inference() for tensor in found) and torch.equal(found[1], made[1])


@given(st.lists(st.one_of(st.none(), drawn), max_size=4))
def test_on_another_device_tensors_have_memory_of_their_own_as_well(tensors):
    settled = sendable(tensors, "it")
    packing = Packing.of(settled)
    elsewhere = packing._on_device(packing.pack(HEADER, settled), 64, CPU)  # the CPU stands in for the other device
    sent = [tensor for tensor in settled if tensor is not None]
    found = list(elsewhere)
    assert [(t.dtype, t.shape, t.stride(), bits(t)) for t in found] == [
        (t.dtype, t.shape, t.stride(), bits(t)) for t in sent
    ]
    assert not any(tensor._is_view() for tensor in found)
    assert len({memory_address(tensor) for tensor in found}) == len(found)


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_staged_and_come_out_there():
    tensors = [torch.randn(3, 4, device="cuda").t(), None, torch.tensor(True), torch.ones((), device="cuda").expand(5)]
    tensors.append(torch.tensor([0.0, 1.0], device="cuda").to_sparse_coo())
    packing = Packing.of(sendable(tensors, "it"))
    packed = packing.pack(HEADER, tensors)
    assert packed.is_cpu
    found = packing.unpack(packed.pin_memory(), 64, torch.device("cuda"))
    for one, other in zip(found, tensors, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.is_cuda and torch.equal(one.to_dense().cpu(), other.to_dense().cpu())


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_what_is_on_the_host_is_packed_without_an_operator_but_the_one_that_makes_the_buffer():
    for tensors, made in (((torch.arange(12.0),), "empty"), ((torch.arange(3), torch.ones(2, 2).t()), "zeros")):
        packing = Packing.of(tensors)
        with Operators() as operators:
            packed = packing.pack(HEADER, tensors)
        assert operators.ran[0] == made and set(operators.ran) <= {made, "zero_"}
        assert all(torch.equal(*pair) for pair in zip(packing.unpack(packed, 64, CPU), tensors, strict=True))


def test_one_contiguous_tensor_is_packed_by_one_kernel():
    tensors = (torch.arange(12.0).view(3, 4),)
    packing = Packing.of(tensors)
    with Operators() as operators:
        packed = packing.pack_payload(tensors, CPU)
    assert [name for name in operators.ran if name not in ("as_strided", "view", "detach")] == ["cat"]
    assert packed.view(torch.float32).tolist() == list(range(12)) and packed.data_ptr() != tensors[0].data_ptr()
