"""A forward changes buffers once; a recomputation runs on copies of what they were; a failure puts them back."""

import copy
from collections.abc import Callable

import pytest
import torch
from pipeline_probes import outside
from torch import Tensor, nn

from pipeline import CheckpointError, Pipe, is_recomputing
from pipeline.recompute.buffers import Buffers

DOUBLE = torch.float64
ENTRIES = ("forward", "step", "create_graph")
POLICIES = ("always", "except_last", "never")


def one() -> Tensor:
    return torch.ones((), dtype=DOUBLE)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", one())

    def forward(self, x: Tensor) -> Tensor:
        self.b.add_(1.0)
        return x * self.b.clone()


class Unversioned(InPlace):
    """As BatchNorm does: the version counter does not see it."""

    def forward(self, x: Tensor) -> Tensor:
        self.b.data.mul_(2.0)
        return x * self.b.clone()


class Assigned(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b + 1
        return x * self.b


class Grows(nn.Module):
    """A buffer whose shape changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().sum().reshape(1)])
        return x * self.seen.numel()


class Resized(nn.Module):
    """As the observers of quantization: the first forward gives the buffer its shape, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(0, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().abs().amax(0)
        if not self.largest.numel():
            self.largest.resize_(now.shape).zero_()
        self.largest.copy_(torch.maximum(self.largest, now))
        return torch.cat([x[:, :1], x[:, 1:] * self.largest[1:].clone()], 1)


class Late(nn.Module):
    """Begins to write with the call's chunk number `start`."""

    def __init__(self, start: int, versioned: bool) -> None:
        super().__init__()
        self.start = start
        self.versioned = versioned
        self.register_buffer("b", one())

    def forward(self, x: Tensor) -> Tensor:
        if x.detach()[0, 0] >= self.start:
            (self.b if self.versioned else self.b.data).add_(1.0)
        return torch.cat([x[:, :1], x[:, 1:] * self.b.clone()], 1)


class LateAssigned(Late):
    def forward(self, x: Tensor) -> Tensor:
        if x.detach()[0, 0] >= self.start:
            self.b = self.b + 1
        return torch.cat([x[:, :1], x[:, 1:] * self.b], 1)


class TwoBuffers(nn.Module):
    """One is written by every chunk, the other from chunk 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", one())
        self.register_buffer("b", one())

    def forward(self, x: Tensor) -> Tensor:
        self.a.data.add_(1.0)
        if x.detach()[0, 0] >= 1:
            self.b.data.add_(1.0)
        return torch.cat([x[:, :1], x[:, 1:] * (self.a * self.b)], 1)


class FirstOnly(nn.Module):
    """An observer that takes what it needs from the first chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros((), dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale == 0:
            self.scale.copy_(x.detach().abs().max())
        return x / self.scale.clone()


class BeginsAsNone(nn.Module):
    """A running mean that does not exist before the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else (self.mean + now) / 2
        return torch.tanh(x * self.mean)


class BecomesNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", one())

    def forward(self, x: Tensor) -> Tensor:
        scale = 3.0 if self.b is None else 2.0
        self.b = None
        return x * scale


class Registers(nn.Module):
    """Registers its buffer within its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if "mean" not in self._buffers:
            self.register_buffer("mean", now)
        else:
            self.mean = (self.mean + now) / 2
        return torch.tanh(x * self.mean)


class Reads(nn.Module):
    def __init__(self, b: Tensor) -> None:
        super().__init__()
        self.register_buffer("b", b)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.b.clone()


def shared() -> list[nn.Module]:
    """Two modules with one buffer: what one writes the other reads."""
    writer = InPlace()
    return [writer, Reads(writer.b)]


class ReadsAView(nn.Module):
    """One buffer is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.ones(6, dtype=DOUBLE))
        self.register_buffer("part", self.whole[:4])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(1.0)
        return x * self.part.clone()


class HeldInAList(InPlace):
    """Writes its buffer by another way than its name."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.b]

    def forward(self, x: Tensor) -> Tensor:
        self.held[0].add_(1.0)
        return x * self.held[0].clone()


class PreHook(InPlace):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: module.b.add_(1.0) and None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.b.clone()


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "in place": lambda: [InPlace()],
    "without its version counter": lambda: [Unversioned()],
    "by assignment": lambda: [Assigned()],
    "in shape": lambda: [Grows()],
    "in shape, in place": lambda: [Resized()],
    "late, in place": lambda: [Late(1, True)],
    "later, in place": lambda: [Late(2, True)],
    "late, by assignment": lambda: [LateAssigned(1, True)],
    "one at once, one late": lambda: [TwoBuffers()],
    "by the first chunk only": lambda: [FirstOnly()],
    "from None": lambda: [BeginsAsNone()],
    "to None": lambda: [BecomesNone()],
    "by being registered": lambda: [Registers()],
    "and read by another module": shared,
    "and read through a view": lambda: [ReadsAView()],
    "through a list": lambda: [HeldInAList()],
    "in a pre-hook": lambda: [PreHook()],
    "in BatchNorm": lambda: [nn.BatchNorm1d(4, dtype=DOUBLE), nn.Tanh()],
    "in BatchNorm of momentum 0": lambda: [nn.BatchNorm1d(4, momentum=0.0, dtype=DOUBLE), nn.Tanh()],
    "in spectral_norm": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4, dtype=DOUBLE))],
}


class Keep(nn.Module):
    """A weight for the columns that do not number the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], torch.tanh(x[:, 1:] * self.weight)], 1)


def model(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Keep(), *LAYERS[name](), Keep())


def batch(chunks: int) -> Tensor:
    torch.manual_seed(2)
    numbers = torch.arange(chunks, dtype=DOUBLE).repeat_interleave(2)
    return torch.cat([numbers[:, None], torch.randn(2 * chunks, 3, dtype=DOUBLE)], 1)


def total(out: Tensor, target: object = None) -> Tensor:
    return out[:, 1:].sum()


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_buffer_that_changes_changes_once_and_gradients_are_right_or_refused(
    name: str, entry: str, policy: str
) -> None:
    chunks = 3
    plain = model(name)
    plain_buffers: list[dict[str, Tensor]] = []
    expected = []
    for call in range(2):
        outs = [plain(piece) for piece in batch(chunks).tensor_split(chunks)]
        for out in outs:
            total(out).backward()
        plain_buffers.append(buffers_of(plain))
        expected.append([param.grad for param in plain.parameters()])
        plain.zero_grad()
    ours = model(name)
    pipe = Pipe(ours, [1, len(ours) - 1], chunks, checkpoint=policy)
    for call in range(2):
        try:
            if entry == "step":
                pipe.step(batch(chunks), loss_fn=total, loss_reduction="sum")
            else:
                loss = total(pipe(batch(chunks)))
                assert same(buffers_of(ours), plain_buffers[call])
                grads = torch.autograd.grad(loss, list(ours.parameters()), create_graph=entry == "create_graph")
                for param, grad in zip(ours.parameters(), grads, strict=True):
                    param.grad = grad.detach()
        except CheckpointError:
            return  # refused: whether it needs to be is another test's affair
        assert same(buffers_of(ours), plain_buffers[call])
        for param, grad in zip(ours.parameters(), expected[call], strict=True):
            assert torch.allclose(param.grad, grad, rtol=1e-13, atol=0)
        pipe.zero_grad()


@pytest.mark.parametrize("name", [
    "in place", "without its version counter", "by assignment", "in shape", "late, in place", "later, in place",
    "late, by assignment", "one at once, one late", "by the first chunk only", "in a pre-hook", "in BatchNorm",
    "in BatchNorm of momentum 0", "in spectral_norm",
])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_usual_ways_to_change_a_buffer_are_not_refused(name: str, entry: str, policy: str) -> None:
    ours = model(name)
    pipe = Pipe(ours, [1, len(ours) - 1], 3, checkpoint=policy)
    if entry == "step":
        pipe.step(batch(3), loss_fn=total, loss_reduction="sum")
    else:
        torch.autograd.grad(total(pipe(batch(3))), list(ours.parameters()), create_graph=entry == "create_graph")


@pytest.mark.parametrize("entry", ["forward", "step", "no_grad"])
@pytest.mark.parametrize("start", [1, 2])
def test_a_buffer_that_changes_unseen_after_chunk_0_is_refused_by_name_and_put_back(entry: str, start: int) -> None:
    layers = nn.Sequential(Keep(), Late(start, versioned=False), Keep())
    pipe = Pipe(layers, [1, 2], 3, checkpoint="always")
    words = r"buffer 'b' of stage 1 \(layers 1\.\.2\) changed after chunk 0.*chunks=1"
    with pytest.raises(CheckpointError, match=words):
        if entry == "step":
            pipe.step(batch(3), loss_fn=total, loss_reduction="sum")
        else:
            with torch.set_grad_enabled(entry == "forward"):
                pipe(batch(3))
    assert layers[1].b == 1.0


class WritesInBackward(InPlace):
    """Divides its gradient by a mean of the norms of those that have gone backward."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns

    def normalised(self, grad: Tensor) -> Tensor:
        mean = 0.9 * self.b + 0.1 * grad.norm()
        if self.assigns:
            self.b = mean
        else:
            self.b.copy_(mean)
        return grad / mean

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(self.normalised)
        return x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("assigns", [True, False])
def test_a_buffer_that_backwards_write_is_theirs_in_the_order_of_the_chunks(
    assigns: bool, chunks: int, policy: str
) -> None:
    plain, ours = [nn.Sequential(Keep(), WritesInBackward(assigns), Keep(), Keep()) for _ in range(2)]
    pipe = Pipe(ours, [1, 1, 2], chunks, checkpoint=policy)
    for _ in range(3):
        for piece in batch(chunks).tensor_split(chunks):
            total(plain(piece)).backward()
        pipe.step(batch(chunks), loss_fn=total, loss_reduction="sum")
        assert torch.equal(ours[1].b, plain[1].b)
        for param, expected in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, rtol=1e-13, atol=0)


class CountsInAList(HeldInAList):
    """Its output does not show how often it has counted."""

    def forward(self, x: Tensor) -> Tensor:
        self.held[0].add_(1.0)
        return x * 2.0


@pytest.mark.parametrize("entry", ["step", "forward"])
def test_a_counter_that_a_recomputation_would_count_twice_is_refused_by_name(entry: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), CountsInAList(), nn.Linear(4, 4)), [1, 2], 2, checkpoint="always")
    x = torch.ones(4, 4)
    with pytest.raises(CheckpointError, match=r"buffer 'b' by another way than its module's attribute.*as self\.b\."):
        if entry == "step":
            pipe.step(x, x, loss_fn=nn.MSELoss())
        else:
            pipe(x).sum().backward()


class FailsSecond(nn.Module):
    """Raises in its second forward, in its second recomputation or in the backward of the second chunk."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.calls = outside({"F": 0, "R": 0})

    def forward(self, x: Tensor) -> Tensor:
        now = "R" if is_recomputing() else "F"
        self.calls()[now] += 1
        if now == self.when and self.calls()[now] == 2:
            raise KeyError(now)
        y = x * 1
        if self.when == "B" and y.requires_grad and self.calls()["R"] == 2:
            y.register_hook(self._raise)
        return y

    def _raise(self, grad: Tensor) -> None:
        raise KeyError("B")


@pytest.mark.parametrize("when", ["F", "R", "B"])
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("late")])
def test_a_failed_step_leaves_buffers_as_they_were_the_same_tensors_with_the_same_values(name: str, when: str) -> None:
    ours = model(name)
    ours.append(FailsSecond(when))
    pipe = Pipe(ours, [1, len(ours) - 1], 3, checkpoint="always")
    tensors = dict(ours.named_buffers())
    values = buffers_of(ours)
    with pytest.raises((KeyError, CheckpointError)):  # the latter where the buffer itself makes recomputing impossible
        pipe.step(batch(3), loss_fn=total, loss_reduction="sum")
    assert same(buffers_of(ours), values)
    found = dict(ours.named_buffers())
    assert all(found[key] is tensor for key, tensor in tensors.items())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_failed_forward_leaves_buffers_as_they_were(name: str, grad: bool) -> None:
    ours = model(name)
    ours.append(FailsSecond("F"))
    pipe = Pipe(ours, [1, len(ours) - 1], 3)
    values = buffers_of(ours)
    with pytest.raises(KeyError), torch.set_grad_enabled(grad):
        pipe(batch(3))
    assert same(buffers_of(ours), values)


@pytest.mark.parametrize("when", ["R", "B"])
def test_a_failed_backward_leaves_buffers_as_its_forward_left_them(when: str) -> None:
    """The forward was a success; its output is in the user's hands."""
    ours = nn.Sequential(Keep(), nn.BatchNorm1d(4, dtype=DOUBLE), FailsSecond(when))
    pipe = Pipe(ours, [1, 2], 3, checkpoint="always")
    out = pipe(batch(3))
    values = buffers_of(ours)
    with pytest.raises(KeyError, match=when):
        total(out).backward()
    assert same(buffers_of(ours), values)
    assert all(param.grad is None for param in ours.parameters())


def norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    for _ in range(3):
        net(torch.randn(6, 3).double())
    return net


@pytest.mark.parametrize("first, second", [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("policy", ["always", lambda stage, chunk: stage == 0])
def test_a_forward_in_another_mode_before_the_backward_changes_no_number(
    first: bool, second: bool, policy: object
) -> None:
    """Recomputed chunks see their own buffers. (Kept ones share torch's fate: BatchNorm's eval-mode backward reads the
    running statistics of the moment, in the plain module too.)"""
    x, z = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1)).double()
    plain = norm_net().train(first)
    for piece in x.tensor_split(3):
        plain(piece).sum().backward()
    plain.train(second)
    for piece in z.tensor_split(3):
        plain(piece)
    ours = norm_net()
    pipe = Pipe(ours, [2, 2], 3, checkpoint=policy).train(first)
    out = pipe(x)
    pipe.train(second)
    pipe(z)
    out.sum().backward()
    assert all(module.training is second for module in ours)
    assert same(buffers_of(ours), buffers_of(plain))
    for param, reference in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, reference.grad)


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_and_recomputed_chunks_agree_with_the_plain_module_when_another_forward_comes_between(policy: str) -> None:
    """The plain module, used in the same order. Where it is wrong itself (eval-mode BatchNorm whose running statistics
    are written before the backward) the Pipe may be right instead."""
    x, z = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1)).double()
    plain, ours = norm_net(), norm_net()
    pipe = Pipe(ours, [2, 2], 3, checkpoint=policy)
    outs = [plain(piece) for piece in x.tensor_split(3)]
    for piece in z.tensor_split(3):
        plain(piece)
    for out in outs:
        out.sum().backward()
    joined = pipe(x)
    pipe(z)
    joined.sum().backward()
    assert same(buffers_of(ours), buffers_of(plain))
    for param, reference in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, reference.grad)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_that_holds_nan_does_not_seem_to_change(policy: str) -> None:
    layers = nn.Sequential(Keep(), Reads(torch.tensor([1.0, torch.nan, 1.0, 1.0], dtype=DOUBLE)), Keep())
    pipe = Pipe(layers, [1, 2], 3, checkpoint=policy)
    pipe(batch(3)).sum().backward()
    pipe.step(batch(3), loss_fn=total, loss_reduction="sum")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_buffers_of_any_dtype_change_once(policy: str, dtype: torch.dtype) -> None:
    class Flips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(2).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            self.b.copy_((self.b.to(torch.complex64) == 0).to(dtype))
            return x * (1 + self.b.real.sum().to(x.dtype) if dtype.is_complex else 1 + self.b.sum().to(x.dtype))

    grads = []
    for chosen in ("never", policy):
        layers = nn.Sequential(Keep(), Flips(), Keep())
        total(Pipe(layers, [1, 2], 3, checkpoint=chosen)(batch(3))).backward()
        assert bool((layers[1].b == 1).all())  # three flips
        grads.append([param.grad for param in layers.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_buffer_that_requires_grad_is_differentiated_or_refused(policy: str, entry: str) -> None:
    class Tunable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", one().requires_grad_())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.b

    found = []
    for pipelined in (False, True):
        layers = nn.Sequential(Keep(), Tunable(), Keep())
        leaves = [layers[1].b, *layers.parameters()]
        try:
            if pipelined and entry == "step":
                pipe = Pipe(layers, [1, 2], 3, checkpoint=policy)
                pipe.step(batch(3), loss_fn=total, loss_reduction="sum")
                found.append([leaf.grad for leaf in leaves])
            else:
                out = Pipe(layers, [1, 2], 3, checkpoint=policy)(batch(3)) if pipelined else layers(batch(3))
                found.append(torch.autograd.grad(total(out), leaves, create_graph=entry == "create_graph"))
        except CheckpointError:
            return
    assert all(torch.allclose(one, other, rtol=1e-13) for one, other in zip(*found, strict=True))


def test_a_buffer_that_requires_grad_and_is_read_without_is_not_written_before_the_recomputation() -> None:
    class Reads(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.b.detach()

    layer = Reads()
    layer.b.requires_grad_()
    loss = Pipe(nn.Sequential(layer, nn.Linear(2, 2).double()), [1, 1], 2, devices=["cpu"] * 2, checkpoint="always")(
        torch.ones(4, 2, dtype=DOUBLE, requires_grad=True)
    ).sum()
    with torch.no_grad():
        layer.b.mul_(2)
    with pytest.raises(CheckpointError, match="buffer 'b', which requires a gradient, was changed in place between"):
        loss.backward()


def test_buffers_of_frozen_stages_change_once_too() -> None:
    for policy in POLICIES:
        ours, plain = norm_net(), norm_net()
        for net in (ours, plain):
            net[:2].requires_grad_(False)
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
        for piece in x.tensor_split(3):
            plain(piece)
        Pipe(ours, [2, 2], 3, checkpoint=policy)(x).sum().backward()
        assert same(buffers_of(ours), buffers_of(plain))


# ------------------------------------------------------------------------------------------------- the class itself


def test_within_as_before_a_module_sees_copies_and_afterwards_its_own_tensor() -> None:
    layer = InPlace()
    own = layer.b
    buffers = Buffers([layer])
    before = []
    for _ in range(2):
        before.append(buffers.present())
        layer(one())
        buffers.after_forward()
    for chunk, value in ((0, 1.0), (1, 2.0), (0, 1.0)):
        with buffers.as_before(before[chunk]):
            assert layer.b is not own and layer.b == value
            layer.b.fill_(99.0)
        assert layer.b is own and own == 3.0
    with pytest.raises(KeyError), buffers.as_before(before[0]):
        raise KeyError
    assert layer.b is own
    buffers.roll_back()
    assert layer.b is own and own == 1.0


def test_in_place_writes_under_inference_mode_change_a_buffer_once_for_each_chunk() -> None:
    layers = nn.Sequential(Keep(), InPlace(), Keep())
    with torch.inference_mode():
        Pipe(layers, [1, 2], 3)(batch(3))
    assert layers[1].b == 4.0 and not layers[1].b.is_inference()


def test_a_late_writer_that_no_counter_shows_is_put_back_after_recomputations_too() -> None:
    """In 1F1B chunks are recomputed before the forwards are done; a recomputation that writes must not spoil the values
    to which a failure goes back."""
    layers = nn.Sequential(Keep(), Late(1, versioned=False), Keep(), FailsSecond("B"))
    pipe = Pipe(layers, [1, 3], 3, schedule="1f1b", checkpoint="always")
    with pytest.raises((KeyError, CheckpointError)):
        pipe.step(batch(3), loss_fn=total, loss_reduction="sum")
    assert layers[1].b == 1.0


class WritesWhereItDifferentiates(nn.Module):
    """Some rows make it count, and call autograd, which a chunk that is recomputed has to be run again for."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() < 0:
            return self.layer(x)
        self.count += 1
        energy = self.layer(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, self.layer.weight, create_graph=True)
        return self.layer(x) + force.sum() + self.count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_that_a_late_chunk_writes_first_counts_once_where_that_is_run_again(policy: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Identity(), WritesWhereItDifferentiates()).double()
    plain = copy.deepcopy(layers)
    x = torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0]).view(5, 1).expand(5, 4).double().clone()
    Pipe(layers, [1, 1], 5, checkpoint=policy, mixes_rows=True).step(x, loss_fn=total, loss_reduction="sum")
    total(torch.cat([plain(rows) for rows in x.split(1)])).backward()
    assert layers[1].count == plain[1].count == 3
    for mine, other in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=0)


class AttributeOfBuffer(nn.Module):
    """Scales by a number that stands on its buffer."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((4,), 2.0))
        setattr(self.factor, "scale", 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor * getattr(self.factor, "scale", 1.0)


@pytest.mark.parametrize("policy", ["always", "except_last", "never"])
def test_a_recomputation_finds_what_was_set_on_a_buffer(policy: str) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    output = Pipe(nn.Sequential(AttributeOfBuffer(), nn.Identity()), [1, 1], 3, checkpoint=policy)(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    assert torch.equal(grad, torch.full((6, 4), 6.0))
