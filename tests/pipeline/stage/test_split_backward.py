"""Laws of the backward that is split into I and W: together they are B, bit for bit; after I no gradient of a weight
exists that can wait, and nothing of the graph is held but what W needs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from cover import pairwise
from law_check import AXES, DRIVES, differences, expect, observe
from law_models import Apply, normal
from pipeline_probes import no_collector, outside
from skip_models import MANY_READERS, SKIPS
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.common.graph import run_backward
from pipeline.stage.stage import StageRun
from scheduler import Kind, Schedule, by_name

SPLIT = "zb-h1"  # W of the later lanes wait for several I


def square(out: Tensor, target: Any = None) -> Tensor:
    return out.square().sum()


def name_of(config: dict[str, Any]) -> str:
    return ", ".join(map(str, config.values()))


@pytest.mark.parametrize("config", pairwise({**AXES, "schedule": (SPLIT,)}), ids=name_of)
def test_i_and_w_give_the_plain_modules_bits(config: dict[str, Any]) -> None:
    assert not differences(observe(config), expect(config))


PASSING = tuple(name for name in SKIPS if name not in MANY_READERS)


@pytest.mark.parametrize("config", pairwise({**AXES, "schedule": (SPLIT,), "model": PASSING}), ids=name_of)
def test_i_and_w_give_the_plain_modules_bits_with_skips(config: dict[str, Any]) -> None:
    assert not differences(observe(config, SKIPS), expect(config, SKIPS))


# ------------------------------------------------------------------------------------------- what waits, and how long


class Log:
    """Which weights have a gradient after each I and W of a stage, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after: list[tuple[str, int, int, set[str]]] = []  # I or W, stage, chunk, names
        self._patch(monkeypatch, "backward", "I")
        self._patch(monkeypatch, "weights", "W")

    def _patch(self, monkeypatch: pytest.MonkeyPatch, method: str, kind: str) -> None:
        real = getattr(StageRun, method)

        def wrapped(stage: StageRun, chunk: int, *args: Any) -> Any:
            result = real(stage, chunk, *args)
            have = {id(real) for real, alias in stage.aliases.trained if alias.grad is not None}
            tables = [module._parameters.items() for module in stage.layers.modules]
            there = {name for table in tables for name, real in table if id(real) in have}
            self.after.append((kind, stage.layers.index, chunk, there))
            return result

        monkeypatch.setattr(StageRun, method, wrapped)


WEIGHTY: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(4, 3), normal(6, 4)),
    "linear without bias": lambda: (nn.Linear(4, 3, bias=False), normal(6, 4)),
    "linear of one column": lambda: (nn.Linear(1, 1), normal(6, 1)),
    "linear over time": lambda: (nn.Linear(4, 3), normal(6, 5, 4)),
    "linear over time without bias": lambda: (nn.Linear(4, 3, bias=False), normal(6, 5, 4)),
    "weight by rows": lambda: (ByRows(), normal(6, 5, 4)),
    "linear on a transposed input": lambda: (Transposed(nn.Linear(5, 3)), normal(6, 5, 4)),
    "convolution 1d": lambda: (nn.Conv1d(2, 3, 3, padding=1), normal(6, 2, 5)),
    "convolution 2d": lambda: (nn.Conv2d(2, 4, 3, stride=2, groups=2), normal(6, 2, 7, 7)),
    "convolution 3d": lambda: (nn.Conv3d(1, 2, 2, dilation=2), normal(6, 1, 4, 4, 4)),
    "convolution, channels last": lambda: (nn.Conv2d(2, 3, 3), channels_last(normal(6, 2, 5, 5))),
    "transposed convolution": lambda: (nn.ConvTranspose2d(2, 3, 3, output_padding=1, stride=2), normal(6, 2, 4, 4)),
    "embedding": lambda: (nn.Embedding(7, 3), numbers()),
    "embedding with padding": lambda: (nn.Embedding(7, 3, padding_idx=2), numbers()),
    "embedding by frequency": lambda: (nn.Embedding(7, 3, scale_grad_by_freq=True), numbers()),
    "attention": lambda: (SelfAttention(), normal(6, 3, 4)),
    "used twice": lambda: (UsedTwice(), normal(6, 4)),
    "used three times": lambda: (UsedTwice(3), normal(6, 4)),
    "cast": lambda: (Cast(), normal(6, 4)),
}


class Transposed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2))


class ByRows(nn.Module):
    """As transformers' Conv1D (of GPT-2) is: the weight is no transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.second_weight = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 2))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:2], 3).tanh() @ self.second_weight


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


class UsedTwice(nn.Module):
    """One weight, several products in a chunk."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return x


class Cast(nn.Module):
    """As autocast does: the weight in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self.weight.float()).double()


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def numbers() -> Tensor:
    return torch.arange(30).reshape(6, 5) % 7


def built(kind: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(2)
    layer, x = WEIGHTY[kind]()
    return nn.Sequential(layer.double(), nn.Flatten(), Apply(torch.sin), nn.Identity()), x


@pytest.mark.parametrize("kind", WEIGHTY)
def test_after_i_no_weight_has_its_gradient_and_after_w_every_one_has(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = built(kind)
    log = Log(monkeypatch)
    Pipe(model, [4], 1, schedule=one_lane(1)).step(x, loss_fn=square, loss_reduction="sum")
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    weights = names if "convolution" in kind else {name for name in names if "weight" in name}
    assert log.after == [("I", 0, 0, names - weights), ("W", 0, 0, names)]


@pytest.mark.parametrize("kind", WEIGHTY)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_every_layer_whose_weight_waits_gives_the_bits_of_b(kind: str, checkpoint: str) -> None:
    found = []
    for order in ("F0 B0 F1 B1 F2 B2", "F0 F1 F2 I0 I1 W0 W1 I2 W2"):
        model, x = built(kind)
        schedule = Schedule.parse(f"schedule mine, chunks 3, stages on lanes 0\nlane 0: {with_stage(order)}")
        mixes_rows = kind == "embedding by frequency"
        pipe = Pipe(model, [4], 3, schedule=schedule, checkpoint=checkpoint, mixes_rows=mixes_rows)
        pipe.step(x, loss_fn=square, loss_reduction="sum")
        found.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]) and grad.stride() == found[1][name].stride(), name


def with_stage(order: str) -> str:
    return " ".join(f"0{action}" for action in order.split())


def one_lane(chunks: int) -> Schedule:
    order = " ".join(f"F{chunk} I{chunk}" for chunk in range(chunks))
    late = " ".join(f"W{chunk}" for chunk in range(chunks))
    return Schedule.parse(
        f"schedule mine, chunks {chunks}, stages on lanes 0\nlane 0: {with_stage(order)} {with_stage(late)}"
    )


# ------------------------------------------------------------------------------------------------- what does not wait


class Penalised(nn.Module):
    """A weight that is a matrix of a product and also something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.weight.square().sum()


class Right(nn.Module):
    """The weight on the other side of the product, or with strides of its own."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        weight = torch.randn(4, 4)
        self.weight = nn.Parameter(weight.t() if transposed else weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Sometimes(nn.Module):
    """A product in some chunks, a product and a sum in others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out + self.layer.weight.sum() if x[0, 0] > 0 else out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.complex(x, x.sin()), self.weight).abs()


ODD: dict[str, Callable[[], nn.Module]] = {
    "also used otherwise": Penalised,
    "on the right": lambda: Right(False),
    "with strides of its own": lambda: Right(True),
    "not the same in every chunk": Sometimes,
    "complex": Complex,
    "bilinear": lambda: Apply2(nn.Bilinear(4, 4, 3)),
    "sparse": lambda: Sparse(),
    "in torch's own checkpoint": lambda: InCheckpoint(False),
    "in torch's own checkpoint, reentrant": lambda: InCheckpoint(True),
    "frozen": lambda: Frozen("layer.weight"),
    "with a frozen bias": lambda: Frozen("layer.bias"),
    "convolution of a frozen weight": lambda: Frozen("layer.weight", nn.Conv1d(4, 4, 1)),
    "convolution with a frozen bias": lambda: Frozen("layer.bias", nn.Conv1d(4, 4, 1)),
    "convolution whose bias is used otherwise": lambda: OtherBias(),
    "weight beside a bias that is used otherwise": lambda: OtherBias(twice=True),
    "outputs of one node": lambda: Apply3(),
}


class Apply2(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.sin())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rows((x[:, 0] > 0).long())


class InCheckpoint(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.layer, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        out: Tensor = checkpoint(self.layer, self.before(x), use_reentrant=self.reentrant)
        return out


class Frozen(nn.Module):
    def __init__(self, name: str, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(4, 4)
        self.get_parameter(name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None])[:, :, 0] if isinstance(self.layer, nn.Conv1d) else self.layer(x)


class OtherBias(nn.Module):
    """A bias that is a factor too; its weight in another convolution too, which has a bias of its own."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.layer, self.other, self.twice = nn.Conv1d(4, 4, 1), nn.Parameter(torch.randn(4)), twice

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x[:, :, None])
        if self.twice:
            out = functional.conv1d(out.sin(), self.layer.weight, self.other)
        return out[:, :, 0] * self.layer.bias


class Apply3(nn.Module):
    """The next stage gets one tensor twice, and parts of one node."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.layer(x)
        return out, out, *out.chunk(2, 1)


class Joined(nn.Module):
    def forward(self, given: Any) -> Tensor:
        return given if isinstance(given, Tensor) else torch.cat(given, 1).sin()


@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize("kind", ODD)
def test_odd_uses_of_weights_give_the_bits_of_b(kind: str, drive: str) -> None:
    found = []
    for name in ("1f1b", SPLIT):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), ODD[kind](), Joined(), nn.LazyLinear(2)).double()
        model(normal(2, 4))
        pipe = Pipe(model, [1, 1, 2], 4, schedule=name, **DRIVES[drive](3))
        for _ in range(3):
            pipe.zero_grad()
            pipe.step(normal(9, 4), loss_fn=square, loss_reduction="sum")
        found.append([param.grad for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is None and other is None or torch.equal(to_dense(one), to_dense(other))


@pytest.mark.parametrize("selective", [False, True])
def test_what_torchs_checkpoint_recomputes_is_recomputed_once_and_gives_the_bits_of_b(selective: bool) -> None:
    """Each saved input that is looked at before the backward would recompute the whole region."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    found, counts = [], []
    for name in ("1f1b", SPLIT):
        torch.manual_seed(2)
        inner = nn.Sequential(nn.Linear(4, 4), Apply(torch.sin), nn.Linear(4, 4), Apply(torch.sin), nn.Linear(4, 4))
        runs: list[int] = []
        inner[1].register_forward_hook(lambda module, args, out, runs=runs: runs.append(1))
        ways = {"context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])}
        region = Apply(partial(checkpoint, inner, use_reentrant=False, **(ways if selective else {})))
        region.add_module("inner", inner)
        model = nn.Sequential(nn.Linear(4, 4), region, nn.Linear(4, 4)).double()
        Pipe(model, [1, 1, 1], 4, schedule=name, checkpoint="never", **DRIVES["apart"](3)).step(
            normal(9, 4), loss_fn=square, loss_reduction="sum"
        )
        found.append([param.grad for param in model.parameters()])
        counts.append(len(runs))
    assert counts[0] == counts[1]
    assert all(map(torch.equal, *found))


def to_dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def test_a_weight_in_several_stages_gives_the_bits_of_b() -> None:
    found = []
    for name in ("1f1b", SPLIT):
        torch.manual_seed(2)
        shared = nn.Linear(4, 4)
        model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
        model[4].weight = shared.weight
        Pipe(model, [2, 2, 2], 4, schedule=name).step(normal(9, 4), loss_fn=square, loss_reduction="sum")
        found.append([param.grad for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_under_autocast_weights_wait_and_give_the_bits_of_b(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    log = Log(monkeypatch)
    for name in ("1f1b", SPLIT):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        with torch.autocast("cpu", getattr(torch, kind)):
            Pipe(model, [2, 1], 3, schedule=name).step(
                torch.randn(9, 8), loss_fn=lambda out, _: out.float().square().sum(), loss_reduction="sum"
            )
        found.append([param.grad for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert ("I", 1, 0, {"bias"}) in log.after


# ------------------------------------------------------------------------------- hooks between a product and its weight


def small(grad: Tensor) -> Tensor:
    return grad.clamp(-1e-3, 1e-3)


def hook_tensor(between: Tensor, product: Tensor) -> None:
    between.register_hook(small)


def hook_retained(between: Tensor, product: Tensor) -> None:
    between.retain_grad()
    between.register_hook(small)


def hook_node_before(between: Tensor, product: Tensor) -> None:
    assert between.grad_fn is not None
    between.grad_fn.register_prehook(lambda grads: tuple(map(small, grads)))


def hook_node_after(between: Tensor, product: Tensor) -> None:
    assert between.grad_fn is not None
    between.grad_fn.register_hook(lambda of_inputs, _: tuple(map(small, of_inputs)))


def hook_product_before(between: Tensor, product: Tensor) -> None:
    assert product.grad_fn is not None
    product.grad_fn.register_prehook(lambda grads: tuple(map(small, grads)))


def hook_product_after(between: Tensor, product: Tensor) -> None:
    assert product.grad_fn is not None
    product.grad_fn.register_hook(lambda of_inputs, _: tuple([g if g is None else small(g) for g in of_inputs]))


HOOKS = [hook_tensor, hook_retained, hook_node_before, hook_node_after, hook_product_before, hook_product_after]


class HooksItsProduct(nn.Module):
    """A product whose weight is transposed, cast or viewed first; what stands between is hooked, or the product."""

    def __init__(self, way: str, hook: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.weight, self.way, self.hook = nn.Parameter(torch.randn(4, 4)), way, hook
        self.retained: Callable[[], list[Tensor]] = outside([])

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "transposed":
            between = self.weight.t()
            product = x @ between
        elif self.way == "cast":
            between = self.weight.float()
            product = functional.linear(x.float(), between)
        else:
            between = self.weight[:, :, None].float()
            product = functional.conv1d(x.float()[:, :, None], between)
        if product.requires_grad:
            self.hook(between, product)
            self.retained().append(between)
        return product.double().flatten(1)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("way", ["transposed", "cast", "viewed, cast"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", [SPLIT, "zb-h2", "interleaved-zb", "zb-v"])
def test_hooks_between_a_product_and_its_weight_act_as_in_a_hand_written_loop(
    schedule: str, checkpoint: str, way: str, hook: Callable[[Tensor, Tensor], None]
) -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 4), HooksItsProduct(way, hook), nn.Tanh(), nn.Linear(4, 4)]
    model = nn.Sequential(*layers).double()
    plain = copy.deepcopy(model)
    plain[1].retained = outside([])
    x = normal(16, 4)
    Pipe(model, [1, 1, 1, 1], 8, schedule=schedule, checkpoint=checkpoint).step(
        x, loss_fn=square, loss_reduction="sum"
    )
    for rows in x.chunk(8):
        square(plain(rows)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-15)
    if hook is hook_retained:
        ours = [between.grad for between in model[1].retained() if between.grad is not None]
        theirs = [between.grad for between in plain[1].retained()]
        assert all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


# ------------------------------------------------------------------------------------------------------ entry points


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_forward_entry_point_runs_i_and_w_again_where_the_graph_is_retained(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [2, 1], 3, schedule=SPLIT, checkpoint=checkpoint)
    once, twice = square(pipe(normal(6, 4))), None
    once.backward(retain_graph=True)
    first = [param.grad.clone() for param in model.parameters()]
    once.backward(inputs=list(model.parameters()))
    twice = [param.grad for param in model.parameters()]
    assert all(torch.equal(2 * one, two) for one, two in zip(first, twice, strict=True))
    square(Pipe(plain, [2, 1], 3)(normal(6, 4))).backward()
    assert all(torch.equal(one, param.grad) for one, param in zip(first, plain.parameters(), strict=True))


def test_second_derivatives_through_a_split_schedule_are_the_plain_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    found = []
    for net in (Pipe(model, [2, 1], 3, schedule=SPLIT), model):
        grads = torch.autograd.grad(square(net(normal(6, 4))), list(model.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), list(model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_failure_in_i_leaves_no_gradient_and_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    armed = [True]

    def burn(grad: Tensor) -> Tensor:
        if armed.pop() if armed else False:
            raise ValueError("burnt")
        return grad

    def hooked(x: Tensor) -> Tensor:
        out = x * 1.0
        if out.requires_grad and out[0, 0] > 0.99:  # the last chunk
            out.register_hook(burn)
        return out

    model = nn.Sequential(nn.Linear(4, 4), Apply(torch.cos), Apply(hooked), nn.Linear(4, 2)).double()
    again = copy.deepcopy(model)
    nn.init.zeros_(model[0].weight[0])
    x = normal(8, 4)
    model[0].bias.data.fill_(0.0)
    pipe = Pipe(model, [2, 2], 4, schedule=SPLIT)
    with pytest.raises(ValueError, match="burnt"):
        pipe.step(x, loss_fn=square, loss_reduction="sum")
    assert all(param.grad is None for param in model.parameters())
    again.load_state_dict(model.state_dict())
    pipe.step(x, loss_fn=square, loss_reduction="sum")
    Pipe(again, [2, 2], 4).step(x, loss_fn=square, loss_reduction="sum")
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), again.parameters(), strict=True))


class KeepsItsInput(nn.Module):
    """Computes with one tensor that it writes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.kept.detach()
        self.kept.copy_(x)
        out: Tensor = self.layer(self.kept)
        return out


@pytest.mark.parametrize("drive", DRIVES)
def test_what_w_needs_and_a_later_forward_writes_is_an_error_and_never_another_number(drive: str) -> None:
    """On the last stage a whole backward runs at once, so there it is right; I does, but W comes later."""
    model = nn.Sequential(nn.Linear(4, 4), KeepsItsInput(), nn.Linear(4, 2)).double()
    how = {"checkpoint": "never", **DRIVES[drive](2)}
    Pipe(model, [1, 2], 4, schedule="1f1b", **how).step(normal(8, 4), loss_fn=square, loss_reduction="sum")
    whole = [param.grad.clone() for param in model.parameters()]
    words = r"the input of a weight of stage 1 \(layers 1..2\) \(shape \[2, 4\]\).* was changed in place between"
    with pytest.raises(RuntimeError, match=words):
        Pipe(model, [1, 2], 4, schedule=SPLIT, **how).step(normal(8, 4), loss_fn=square, loss_reduction="sum")
    assert all(torch.equal(one, param.grad) for one, param in zip(whole, model.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is alive of the tensors that were noted, after each I and W."""
    noted: dict[str, Any] = {"tensors": {}, "after": {}}
    for method, kind in (("backward", "I"), ("weights", "W")):
        real = getattr(StageRun, method)

        def wrapped(stage: StageRun, chunk: int, *args: Any, real: Any = real, kind: str = kind) -> Any:
            result = real(stage, chunk, *args)
            alive = {name for name, tensor in noted["tensors"].items() if tensor() is not None}
            noted["after"][kind, chunk] = alive
            return result

        monkeypatch.setattr(StageRun, method, wrapped)
    yield noted


def test_from_i_to_w_only_the_inputs_of_weights_are_held_of_the_activations(lives: dict[str, Any]) -> None:
    """Of x -> Linear -> exp -> Linear: what exp saves is the second's input; the first's output goes at once, and
    what sin saves goes in I."""
    def note(name: str) -> Apply:
        def noting(x: Tensor) -> Tensor:
            lives["tensors"][name] = weakref.ref(x)
            return x

        return Apply(noting)

    model = nn.Sequential(
        nn.Linear(4, 4), note("saved by sin"), Apply(torch.sin), note("input of a weight"), nn.Linear(4, 2),
        note("saved by the loss"),
    ).double()
    with no_collector():
        pipe = Pipe(model, [6], 1, schedule=one_lane(1), checkpoint="never")
        for _ in range(3):
            pipe.step(normal(6, 4), loss_fn=square, loss_reduction="sum")
    assert lives["after"]["I", 0] <= {"input of a weight"}
    assert lives["after"]["W", 0] == set()


def test_w_of_each_chunk_frees_what_that_chunk_held(lives: dict[str, Any]) -> None:
    seen = iter(range(99))

    def noting(x: Tensor) -> Tensor:
        made = x.sin()
        lives["tensors"][next(seen) % 3] = weakref.ref(made.untyped_storage())
        return made

    model = nn.Sequential(Apply(noting), nn.Linear(4, 2)).double()
    pipe = Pipe(model, [2], 3, schedule=one_lane(3), checkpoint="never")
    pipe.step(normal(6, 4), loss_fn=square, loss_reduction="sum")
    held = [len(lives["after"][kind, chunk]) for kind, chunk in (("I", 2), ("W", 0), ("W", 1), ("W", 2))]
    assert held == [3, 2, 1, 0]


def test_w_holds_the_gradient_of_one_weight_at_a_time_beside_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole backward does; those of the uses of one weight come together."""
    earlier: list[weakref.ref[Any]] = []
    runs: list[tuple[int, int]] = []  # gradients that are added, and those of earlier runs that are left

    def noting(roots: Any, grads: Sequence[Tensor], retain: bool) -> None:
        runs.append((len(grads), sum([storage() is not None for storage in earlier])))
        run_backward(roots, grads, retain)
        earlier[:] = [weakref.ref(grad.untyped_storage()) for grad in grads]

    monkeypatch.setattr("pipeline.stage.split_backward.run_backward", noting)
    model = nn.Sequential(nn.Linear(8, 8), UsedTwice(), nn.Linear(8, 8), nn.Linear(8, 8)).double()
    model[1].layer = nn.Linear(8, 8).double()
    pipe = Pipe(model, [4], 4, schedule=one_lane(4))
    with no_collector():
        pipe.step(normal(8, 8), loss_fn=square, loss_reduction="sum")
    assert sorted([count for count, _ in runs]) == [1] * 12 + [2] * 4
    assert {left for _, left in runs[5:]} == {0}  # the gradients of the first chunk become the sums


@pytest.mark.parametrize("name", ["zb-h1", "interleaved-zb"])
def test_every_action_of_a_split_schedule_runs_in_its_order(name: str) -> None:
    lanes = 2 if name == "interleaved-zb" else 4
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    pipe = Pipe(model, [1, 1, 1, 1], 6, schedule=name)
    step = pipe.step(normal(6, 4), loss_fn=square, loss_reduction="sum", trace=True)
    rows = tuple(
        tuple(event.action for event in row if event.action.kind is not Kind.R) for row in step.timeline.by_lane
    )
    assert rows == by_name(name, lanes, 6).orders
