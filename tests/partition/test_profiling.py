"""Laws of partition.profiles: what is measured of layers, and that nothing of the caller's is changed by it."""

import gc
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from partition import PartitionError, balance_by_size, profile, to_sequential
from partition.profiles.profiling import layer_bytes, layer_work
from partition.profiles.sandbox import device_of

Profile = Callable[..., Any]


class LayerSize(NamedTuple):
    activations: int
    parameters: int


def layer_times(module: nn.Sequential, sample: Any, *, timeout: float, device: Any = None) -> list[float]:
    return [work.total for work in layer_work(module, sample, device_of(module, device), timeout)[0]]


def layer_sizes(module: nn.Sequential, sample: Any, device: Any = None) -> list[LayerSize]:
    sizes, _ = layer_bytes(module, sample, device_of(module, device))
    return [LayerSize(size.activations, size.held) for size in sizes]


def times(module: nn.Sequential, sample: Any, **options: Any) -> list[float]:
    return layer_times(module, sample, timeout=0, **options)


profilers = pytest.mark.parametrize("profile", [times, layer_sizes], ids=["times", "sizes"])


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class WritesIntoItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Draws(nn.Module):
    """Draws from all default generators of the host, and keeps what it has made."""

    def forward(self, x: Tensor) -> Tensor:
        self.made = {"last": [x * random.random() + numpy.random.rand() * torch.rand(())]}
        return self.made["last"][0]


class Counter(nn.Module):
    """A buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


# ------------------------------------------------------------------------------------- what is left as it was


def generator_states() -> tuple[Any, ...]:
    """Of the default generators of the host."""
    return torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(numpy.random.get_state())


@profilers
@pytest.mark.parametrize("training", [True, False])
def test_module_sample_and_generator_are_left_as_they_were(profile: Profile, training: bool) -> None:
    layers = WritesIntoItsInput(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Counter(), Draws()
    module = nn.Sequential(*layers)
    module[5](module[1](torch.ones(1, 4))).sum().backward()
    activation = module[5].made["last"][0]
    module.train(training)
    module[2].train(not training)
    sample = torch.rand(3, 4, requires_grad=True)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    grads = [None if p.grad is None else (p.grad, p.grad.clone()) for p in module.parameters()]
    values, generators = sample.detach().clone(), generator_states()
    modes = [layer.training for layer in module.modules()]

    profile(module, sample)

    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in state.items())
    for parameter, before in zip(module.parameters(), grads):
        assert parameter.grad is None if before is None else parameter.grad is before[0]
        assert before is None or torch.equal(before[0], before[1])
    assert torch.equal(sample, values) and sample.grad is None and sample.requires_grad and sample._version == 0
    assert generator_states() == generators
    assert module[5].made["last"][0] is activation and activation.grad_fn is not None
    assert [layer.training for layer in module.modules()] == modes


@profilers
def test_layers_run_in_the_mode_they_are_in(profile: Profile) -> None:
    seen: list[bool] = []

    class Sees(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.training)
            return x

    module = nn.Sequential(Sees(), Sees())
    module[1].eval()
    profile(module, torch.rand(1))
    assert seen == sorted(seen, reverse=True) and set(seen) == {True, False}


@profilers
def test_a_tensor_that_a_layer_reaches_through_a_closure_gets_no_gradient(profile: Profile) -> None:
    tied = nn.Linear(4, 4)
    profile(nn.Sequential(tied, Lambda(lambda x: x @ tied.weight), nn.ReLU()), torch.rand(2, 4))
    profile(nn.Sequential(Lambda(lambda x: x @ tied.weight)), torch.rand(2, 4))
    assert tied.weight.grad is None


@profilers
def test_the_graph_of_the_sample_is_left_alone(profile: Profile) -> None:
    leaf = torch.rand(2, 4, requires_grad=True)
    profile(nn.Sequential(nn.Linear(4, 4)), leaf * 2)
    assert leaf.grad is None


@profilers
def test_a_device_that_is_not_here_is_refused(profile: Profile) -> None:
    absent = f"cuda:{torch.cuda.device_count() + 7}"
    with pytest.raises(PartitionError, match=f"layers cannot run on {absent} here: .* Give cpu, or meta"):
        profile(nn.Sequential(nn.Linear(2, 2)), torch.rand(4, 2), device=absent)


@profilers
def test_a_sample_without_numbers_is_refused_where_layers_compute(profile: Profile) -> None:
    with pytest.raises(PartitionError, match=r"of shape \[4, 2\] is on the meta device, so there are no numbers"):
        profile(nn.Sequential(nn.Linear(2, 2)), torch.rand(4, 2, device="meta"))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.sum() > 0 else x


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


@pytest.mark.parametrize("kind", [Branching, Choosing])
def test_a_layer_that_looks_at_numbers_is_refused_where_there_are_none(kind: type[nn.Module]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), kind())
    words = rf"layer '1' \({kind.__name__}\) looks at numbers .*, of which there are none on meta. Profile it .*'cpu'"
    with pytest.raises(PartitionError, match=words):
        balance_by_size(2, module, torch.rand(4, 2), device="meta")


@profilers
def test_lazy_layers_stay_lazy(profile: Profile) -> None:
    module = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with pytest.raises(PartitionError, match="lazy modules have not run yet: LazyLinear. Call the model with a batch"):
        balance_by_size(2, module, torch.rand(4, 2), device="meta")
    profile(module, torch.rand(2, 4))
    assert isinstance(module[0], nn.LazyLinear) and module[0].has_uninitialized_params()


@profilers
def test_a_layer_that_holds_what_cannot_be_copied_is_refused_in_words(profile: Profile) -> None:
    module = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    module[1].lock = threading.Lock()
    with pytest.raises(PartitionError, match="Linear holds what cannot be copied .*lock.* a __deepcopy__") as refused:
        profile(module, torch.rand(4, 2))
    assert "while profiling layer '1' (Linear)" in refused.value.__notes__[0]


@profilers
def test_one_copy_of_one_layer_lives_at_a_time(profile: Profile) -> None:
    copies: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            copies.append(weakref.ref(self))
            alive.append(len({id(layer) for layer in (copy() for copy in copies) if layer is not None}))
            return super().forward(x)

    gc.disable()  # freed by reference counts alone: no cycle holds a graph
    try:
        profile(nn.Sequential(*[Watched(2, 2) for _ in range(4)], nn.Sigmoid()), torch.rand(1, 2))
        assert set(alive) == {1} and all(copy() is None for copy in copies)
    finally:
        gc.enable()


@profilers
def test_no_cast_of_a_weight_outlives_its_layer_under_autocast(profile: Profile) -> None:
    casts: list[StorageWeakRef] = []

    def pack(tensor: Tensor) -> Tensor:
        casts.extend([StorageWeakRef(tensor.untyped_storage())] * (tensor.dtype is torch.bfloat16))
        return tensor

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert all(cast.expired() for cast in casts) or calls[-1:] == [self]
            calls.append(self)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().forward(x)

    calls: list[nn.Module] = []
    with torch.autocast("cpu", torch.bfloat16):
        profile(nn.Sequential(*[Watched(4, 4) for _ in range(3)]), torch.rand(2, 4).requires_grad_())
        calls.clear()
        assert casts and all(cast.expired() for cast in casts)


@profilers
def test_a_backward_runs_without_autocast_as_in_a_pipe(profile: Profile) -> None:
    switches: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            switches.append(torch.is_autocast_enabled("cpu"))
            return grad

    with torch.autocast("cpu", torch.bfloat16):
        profile(nn.Sequential(nn.Linear(4, 4), Lambda(Watched.apply)), torch.rand(2, 4))
        assert torch.is_autocast_enabled("cpu")
    assert switches and not any(switches)


# ------------------------------------------------------------------------------------------- what is accepted


@profilers
@pytest.mark.parametrize("ambient", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_grad_mode_does_not_matter(profile: Profile, ambient: Callable[[], Any]) -> None:
    with ambient():
        module, sample = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.rand(2, 4)
        numbers = profile(module, sample)
    assert len(numbers) == 3
    if profile is layer_sizes:
        assert numbers == layer_sizes(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.rand(2, 4))


@profilers
def test_an_in_place_first_layer_may_write_into_a_sample_that_needs_a_gradient(profile: Profile) -> None:
    sample = torch.tensor([-1.0, 1.0], requires_grad=True)
    assert len(profile(nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(inplace=True)), sample)) == 2
    assert sample.tolist() == [-1.0, 1.0]


@profilers
def test_layers_may_pass_pytrees_ints_and_things_that_are_no_tensors(profile: Profile) -> None:
    module = nn.Sequential(
        Lambda(lambda x: (x["tokens"] + 1, x["scale"], None)),
        Lambda(lambda x: {"ids": x[0], "scale": x[1]}),
        Lambda(lambda x: (torch.nn.functional.one_hot(x["ids"], 6).float(), x["scale"])),
        Lambda(lambda x: x[0] * x[1]),
        nn.Linear(6, 2),
        Lambda(lambda x: (x, x.detach(), x.argmax(-1))),
        Lambda(lambda x: x[0] + x[1]),
        Lambda(lambda x: "done"),
    )
    assert len(profile(module, {"tokens": torch.tensor([[0, 1, 2]]), "scale": 2.0})) == 8


@profilers
def test_an_embedding_of_int_inputs_is_measured(profile: Profile) -> None:
    module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    assert len(profile(module, torch.tensor([[1, 2], [3, 4]]))) == 2


@profilers
def test_a_layer_that_stands_in_two_places_is_measured_in_both(profile: Profile) -> None:
    layer = nn.Linear(4, 4)
    assert len(profile(nn.Sequential(layer, layer), torch.rand(2, 4))) == 2


@profilers
def test_a_layer_may_take_gradients_in_its_forward(profile: Profile) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    assert len(profile(nn.Sequential(Force(), nn.Linear(2, 2)), torch.rand(3, 2))) == 2


@profilers
def test_a_failing_layer_is_named(profile: Profile) -> None:
    with pytest.raises(RuntimeError) as caught:
        profile(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), torch.rand(2, 4))
    assert caught.value.__notes__ == ["while profiling layer '1' (Linear) on cpu"]


def test_a_module_that_is_no_plain_sequential_is_refused() -> None:
    with pytest.raises(TypeError, match="must be an nn.Sequential.*got Linear"):
        profile(nn.Linear(1, 1), torch.rand(1))


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(PartitionError, match=f"timeout is {timeout}, but must be a finite number"):
        profile(nn.Sequential(nn.ReLU()), torch.rand(1), timeout=timeout)


# ------------------------------------------------------------------------------------------- what is measured


class Sleeps(nn.Module):
    """Sleeps in forward, and in backward where there is one."""

    def __init__(self, forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.seconds[1]))
        return y


def test_seconds_are_of_forward_and_backward() -> None:
    module = nn.Sequential(Sleeps(0.004, 0.1), Sleeps(0.03))
    forward = layer_times(module, torch.rand(1), timeout=0)
    both = layer_times(module, torch.rand(1, requires_grad=True), timeout=0)
    assert 0.004 <= forward[0] < 0.1 and 0.03 <= forward[1] and 0.104 <= both[0]


def test_passes_are_repeated_until_the_timeout_and_each_layer_runs_once_to_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    module = nn.Sequential(Lambda(lambda x: (calls.append(0), x)[1]), Lambda(lambda x: (calls.append(1), x)[1]))
    layer_times(module, torch.rand(1), timeout=0)
    assert calls == [0, 0, 1, 1]
    clock = count()  # a second for each look at it
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    layer_times(module, torch.rand(1), timeout=50)
    passes, seconds = len(calls) // 4 - 1, next(clock)
    assert passes > 1 and calls == [0, 0, 1, 1] * (passes + 1)
    assert 50 < seconds < 52 + seconds / passes  # no pass begins after the timeout


def test_a_layer_counts_its_median_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # until; then three times warm-up, run (begin, made, end) and clock
    ticks = iter([0.0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 2, 9, 0, 0, 0, 0, 0, 1, 2, 99])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert layer_times(nn.Sequential(nn.ReLU()), torch.rand(1), timeout=1) == [2]


FLOAT = 4


def test_a_linear_holds_its_input_and_no_weights() -> None:
    [size] = layer_sizes(nn.Sequential(nn.Linear(5, 7)), torch.rand(3, 5))
    assert size == LayerSize(activations=3 * 5 * FLOAT, parameters=(5 * 7 + 7) * FLOAT)


def test_a_linear_whose_input_needs_a_gradient_holds_its_weight_as_a_parameter_only() -> None:
    sizes = layer_sizes(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)), torch.rand(3, 5))
    assert sizes[1] == LayerSize(3 * 7 * FLOAT, (7 * 2 + 2) * FLOAT)


def test_a_relu_holds_its_output() -> None:
    sample = torch.rand(3, 5, requires_grad=True)
    assert layer_sizes(nn.Sequential(nn.ReLU()), sample) == [LayerSize(3 * 5 * FLOAT, 0)]
    assert layer_sizes(nn.Sequential(nn.ReLU(inplace=True)), sample) == [LayerSize(3 * 5 * FLOAT, 0)]


def test_a_batch_norm_holds_its_input_and_in_training_the_batch_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm1d(5))
    training = layer_sizes(module, torch.rand(3, 5))
    assert training == [LayerSize(3 * 5 * FLOAT + 2 * 5 * FLOAT, 2 * 5 * FLOAT)]
    assert layer_sizes(module.eval(), torch.rand(3, 5)) == [LayerSize(3 * 5 * FLOAT, 2 * 5 * FLOAT)]


def test_a_storage_that_is_saved_more_than_once_counts_once() -> None:
    module = nn.Sequential(Lambda(lambda x: x * x + x[:1] * x.exp()))  # saves x three times, and exp(x) twice
    assert layer_sizes(module, torch.rand(3, 5, requires_grad=True)) == [LayerSize(2 * 3 * 5 * FLOAT, 0)]


def test_layers_without_a_backward_hold_nothing() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(5, 2).requires_grad_(False), nn.Sigmoid())
    assert [size.activations for size in layer_sizes(module, torch.rand(3, 5))] == [0, 0, 0, 0]


def test_bytes_follow_the_dtype() -> None:
    module = nn.Sequential(nn.Linear(5, 7)).double()
    assert layer_sizes(module, torch.rand(3, 5, dtype=torch.float64)) == [LayerSize(3 * 5 * 8, 42 * 8)]


def test_sizes_on_meta_are_those_on_the_cpu() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 7), nn.Sigmoid())
    assert layer_sizes(module, torch.rand(3, 5), device="meta") == layer_sizes(module, torch.rand(3, 5))
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


def test_layers_run_where_the_parameters_are_or_without_numbers_where_these_have_none() -> None:
    fakes: list[bool] = []
    module = nn.Sequential(Lambda(lambda x: (fakes.append(isinstance(x, FakeTensor)), x)[1]), nn.Linear(2, 2))
    layer_sizes(module, torch.rand(1, 2))
    layer_sizes(module.to("meta"), torch.rand(1, 2))
    layer_sizes(module, torch.rand(1, 2, device="meta"), device="meta")
    layer_sizes(nn.Sequential(module[0]), torch.rand(1, 2, device="cpu"))
    assert fakes == [False] * 2 + [True] * 4 + [False] * 2


@pytest.mark.gpu
def test_on_cuda_sizes_are_those_on_the_cpu_and_the_generator_is_left_alone() -> None:  # pragma: no cover  # needs CUDA
    module = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.ReLU())
    generator = torch.cuda.get_rng_state()
    on_cuda = layer_sizes(module, torch.rand(3, 5), device="cuda")
    assert on_cuda[::2] == layer_sizes(module, torch.rand(3, 5))[::2]  # Dropout saves a mask of another dtype
    assert all(seconds > 0 for seconds in layer_times(module, torch.rand(3, 5), timeout=0, device="cuda:0"))
    assert torch.equal(torch.cuda.get_rng_state(), generator)


class WideWhereItsWeightSaysSo(nn.Linear):
    def __init__(self, is_wide: bool) -> None:
        super().__init__(5, 5)
        self.weight.is_wide, self.weight.scale = is_wide, torch.rand(5)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([x, x, x]) * self.weight.scale if self.weight.is_wide else x
        return super().forward(wide).tanh().sum(1, keepdim=True)[: len(x)].expand(-1, 5).contiguous()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_is_set_on_a_parameter_is_on_its_copy_in_a_profile(device: str) -> None:
    """A Pipe's aliases have it. A profile's copies lacked it: "'Parameter' object has no attribute"."""
    x = torch.rand(4, 5)
    widths = [True, False, False, True, False]
    together = profile(nn.Sequential(*map(WideWhereItsWeightSaysSo, widths)), x, device=device, timeout=0).layers
    for is_wide, layer in zip(widths, together):
        (alone,) = profile(nn.Sequential(WideWhereItsWeightSaysSo(is_wide)), x, device=device, timeout=0).layers
        assert layer.saved.total == alone.saved.total
    assert together[0].saved.total > together[1].saved.total


def test_what_is_set_on_a_parameter_without_numbers_is_there_while_the_model_is_cut() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([WideWhereItsWeightSaysSo(number == 1) for number in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Model().to("meta")
    for block in model.blocks:
        block.weight.is_wide, block.weight.scale = True, torch.ones(5)  # type: ignore[union-attr, assignment]
    assert len(to_sequential(model, torch.rand(4, 5))) >= 3
