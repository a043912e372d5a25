"""Laws of profiles as data: bytes of stages, of states, of messages; FLOPs; without numbers; as text."""

import json
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from block_models import MODELS
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from partition import PartitionError, Profile, halves, plan, profile, to_sequential
from partition.profiles import working
from partition.profiles.amounts import MedianSpread, sum_of_bytes
from partition.profiles.optimizer_state import state_bytes
from partition.profiles.working import counter
from partition.rows import with_rows
from pipeline import NoChunk, Pipe
from pipeline.skip import pop, skippable, stash
from pipeline.stage.stage import StageRun


class Table(nn.Module):
    """Multiplies by a tensor that it keeps as an attribute: each forward saves it again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.rand(width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


@skippable(stash=["early"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("early", x.sigmoid())
        return x.tanh()


@skippable(pop=["early"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return x * early


@skippable(stash=["one", "two"])
class StashTwice(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("one", x)
        yield stash("two", x)
        return x


@skippable(pop=["one"])
class PopOne(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("one"))


@skippable(pop=["two"])
class PopTwo(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("two"))


def models() -> dict[str, tuple[nn.Sequential, Tensor]]:
    torch.manual_seed(0)
    tied = nn.Linear(6, 6)
    return {
        "plain": (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8),
                                nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(8, 3)), torch.rand(4, 6)),
        "tables": (nn.Sequential(nn.Linear(6, 6), Table(6), nn.Flatten(), Table(6), nn.Tanh()), torch.rand(4, 6)),
        "skips": (nn.Sequential(nn.Linear(6, 6), Stash(), nn.Linear(6, 6), nn.Tanh(), Pop(), nn.ReLU()),
                  torch.rand(4, 6)),
        "tied": (nn.Sequential(tied, nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), tied), torch.rand(4, 6)),
        "attention": (nn.Sequential(nn.Embedding(9, 8), Attends(), nn.LayerNorm(8), nn.Linear(8, 9)),
                      torch.randint(9, (4, 5))),
    }  # fmt: skip


def saved_by(layers: list[nn.Module], x: Any, aside: set[int]) -> tuple[int, Any]:
    """Bytes of the storages that autograd saves while layers run one after the other; what they return."""
    storages: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        for layer in layers:
            x = layer(x)
    return sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in aside), x


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_stage_saves_what_its_layers_save_when_they_run_one_after_the_other(name: str, device: str) -> None:
    model, x = models()[name]
    measured = profile(model, x, device=device, timeout=0)
    tables = {layer.table.data_ptr() for layer in model if isinstance(layer, Table)}
    aside = tables | {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    for start in range(len(model)):
        for stop in range(start + 1, len(model) + 1):
            _, given = saved_by(list(model[:start]), x, set())
            if start and given.is_floating_point():
                given = given.detach().requires_grad_() * 1  # no leaf: a layer may write into it
            found, _ = saved_by(list(model[start:stop]), given, aside)
            assert measured.stage(start, stop).saved == found, (start, stop)


@pytest.mark.parametrize("name", models())
def test_without_numbers_bytes_are_those_of_a_run(name: str) -> None:
    model, x = models()[name]
    here, there = [profile(model, x, device=device, timeout=0, optimizer=2) for device in ("cpu", "meta")]
    for layer, fake in zip(here.layers, there.layers, strict=True):
        assert vars(layer) | {"work": None} == vars(fake) | {"work": None}


def test_a_tied_weight_counts_once_in_each_stage_that_has_it_with_its_gradient_and_optimizer_state() -> None:
    model, x = models()["tied"]
    measured = profile(model, x, timeout=0, optimizer=2)
    size = 4 * (36 + 6)
    assert measured.stage(0, 5).state == sum(4 * p.numel() for p in model.parameters()) * 4
    assert measured.stage(0, 1).state == measured.stage(4, 5).state == 4 * size


def test_a_skip_is_read_and_sent_by_each_stage_that_it_passes() -> None:
    measured = profile(*models()["skips"], timeout=0)
    size = 4 * 6 * 4
    assert [measured.message(cut) for cut in range(1, 6)] == [size, 2 * size, 2 * size, 2 * size, size]
    assert measured.stage(2, 4).read == size and measured.stage(3, 6).read == 2 * size
    assert measured.stage(1, 6).read == size


def test_one_tensor_under_two_names_travels_twice() -> None:
    model = nn.Sequential(nn.Linear(6, 6), StashTwice(), nn.Tanh(), PopOne(), PopTwo())
    measured = profile(model, torch.rand(4, 6), device="meta")
    size = 4 * 6 * 4
    assert [measured.message(cut) for cut in range(1, 5)] == [size, 3 * size, 3 * size, 2 * size]
    assert [measured.stage(start, 5).read for start in range(1, 5)] == [size, 3 * size, 3 * size, 2 * size]


def wrapping(depth: int, trains: bool) -> nn.Linear:
    """A layer whose weight wraps 2 ** depth others."""

    def wrapped(depth: int) -> Tensor:
        return TwoTensor(wrapped(depth - 1), wrapped(depth - 1)) if depth else torch.rand(6, 6)

    layer = nn.Linear(6, 6)
    layer.weight = nn.Parameter(wrapped(depth), trains)
    return layer


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_weight_that_wraps_others_has_their_bytes_with_numbers_and_without(device: str) -> None:
    """A quantised weight counted on "meta" as one of the type in which it computes."""
    depths = [0, 1, 2, 2, 1, 0]
    for trains in (False, True):
        layers = profile(nn.Sequential(*[wrapping(depth, trains) for depth in depths]), torch.rand(4, 6), device=device,
                         timeout=0).layers  # fmt: skip
        assert [layer.parameters.total for layer in layers] == [2**depth * 144 + 24 for depth in depths]
        assert [layer.gradients.total for layer in layers] == [trains * 2**depth * 144 + 24 for depth in depths]


def test_optimizer_state_of_a_parameter_that_wraps_others_is_that_of_its_parts() -> None:
    """As of a DTensor, whose shape is that of all ranks together."""
    wrapping = TwoTensor(torch.zeros(3, 4), torch.zeros(3, 4))
    assert state_bytes(2, [wrapping, torch.zeros(5)]) == [2 * 2 * 48, 2 * 20]
    assert state_bytes(partial(torch.optim.SGD, lr=0.1, momentum=0.9), [wrapping, torch.zeros(5)]) == [2 * 48, 20]


@pytest.mark.parametrize("optimizer", [
    torch.optim.AdamW, torch.optim.SGD, partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adagrad,
], ids=["AdamW", "SGD", "momentum", "Adagrad"])  # fmt: skip
def test_optimizer_state_is_that_of_the_optimizer_after_a_step(optimizer: Any) -> None:
    model, x = models()["plain"]
    model[2].weight.requires_grad_(False)
    stepped = optimizer([p for p in model.parameters() if p.requires_grad])
    model(x).sum().backward()
    stepped.step()
    for given in (optimizer, stepped):
        layers = profile(model, x, timeout=0, optimizer=given).layers
        for layer, measured in zip(model, layers, strict=True):
            tensors = [t for p in layer.parameters() for t in stepped.state.get(p, {}).values() if t is not None]
            assert measured.optimizer.total == sum(t.nbytes for t in tensors)
            assert measured.gradients.total == sum(p.nbytes for p in layer.parameters() if p.requires_grad)


def test_of_a_model_that_is_frozen_an_optimizer_keeps_nothing() -> None:
    model, x = models()["plain"]
    layers = profile(model.requires_grad_(False), x, device="meta", optimizer=torch.optim.AdamW).layers
    assert [layer.optimizer.total for layer in layers] == [0] * len(layers)


def test_optimizers_that_are_none_are_refused() -> None:
    model, x = models()["plain"]
    with pytest.raises(PartitionError, match="optimizer is -1, but must be a finite number"):
        profile(model, x, optimizer=-1)
    with pytest.raises(TypeError, match="optimizer must be a factor, a torch.optim.Optimizer.*makes str"):
        profile(model, x, optimizer="adam")  # type: ignore[arg-type]

    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].sum().item()

    with pytest.raises(PartitionError, match="Looks cannot step without numbers.*Give a factor"):
        profile(model, x, optimizer=Looks)
    with pytest.raises(PartitionError, match="no Muon can be made of parameters like the model's.*Give a function"):
        profile(model, x, optimizer=torch.optim.Muon)
    of_matrices = profile(model, x, optimizer=lambda p: torch.optim.Muon([param for param in p if param.dim() == 2]))
    matrices = [sum(p.nbytes for p in layer.parameters() if p.dim() == 2) for layer in model]
    assert [layer.optimizer.total for layer in of_matrices.layers] == matrices


def test_flops_are_two_for_each_weight_and_row_and_attention_counts() -> None:
    model, x = models()["attention"]
    embedding, attention, _, head = profile(model, x, chunks=2, device="meta").layers
    rows = 2 * 5
    assert [each.median for each in head.work] == [2 * rows * 72] * 3 + [2 * 2 * rows * 72]
    assert [each.median for each in embedding.work] == [0, 0, 0, 0]
    assert attention.work.forward.median == 2 * 2 * (2 * 5 * 5 * 4) * 2 and attention.work.weight.median == 0


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(4, 3, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_flops_of_recurrent_layers_are_those_of_their_matrices(kind: type[nn.RNNBase], options: Any) -> None:
    layer = Recurrent(kind, **options)
    products = 2 * sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    _, measured = profile(nn.Sequential(nn.Linear(4, 4), layer), torch.rand(2, 5, 4), device="meta").layers
    forward, _, _, backward = measured.work
    assert forward.median == 2 * 5 * products
    assert 1.7 * forward.median < backward.median <= 2 * forward.median  # nothing goes back to the first state


@pytest.mark.parametrize("name, factor", [("_cudnn_rnn", 1), ("_cudnn_rnn_backward", 2)])
def test_flops_of_a_recurrent_layer_on_cudnn_are_those_of_its_matrices(name: str, factor: int) -> None:
    inner = nn.LSTM(4, 3, num_layers=2, bidirectional=True)
    formula = working._FORMULAS[getattr(torch.ops.aten, name)]
    products = 2 * sum(weight.numel() for weight in inner.parameters() if weight.dim() == 2)
    assert formula(torch.Size([5, 2, 4]), [weight.shape for weight in inner.parameters()], 4) == factor * 10 * products


def test_a_loss_is_profiled_behind_the_last_layer() -> None:
    model, x = nn.Sequential(nn.Linear(6, 3)), torch.rand(8, 6)
    measured = profile(model, x, chunks=2, timeout=0, loss_fn=nn.CrossEntropyLoss(), target=torch.randint(3, (8,)))
    assert measured.loss is not None and measured.loss.kind == "CrossEntropyLoss" and len(measured.layers) == 1
    assert measured.loss.saved.total == 4 * 4 * 3 + 4  # log-probabilities, and the sum of weights
    assert measured.loss.work.total > 0


def test_input_and_weight_gradients_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            now[0] += 1
            return x + weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            for needed, seconds in zip(ctx.needs_input_grad, (2, 4)):
                now[0] += seconds * needed
            return grad, grad.sum(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Any:
            return Slow.apply(x, self.weight)

    def late(*given: Tensor) -> Any:
        now[0] += 8
        return product(*given)

    product = halves._product_by_columns
    monkeypatch.setattr(halves, "_product_by_columns", late)
    model = nn.Sequential(Layer(), nn.Linear(3, 3), Layer())
    first, linear, last = profile(model, torch.rand(2, 3), timeout=0).layers
    assert [each.median for each in first.work] == [1, 4, 0, 4]  # its weight is no matrix of a product: it cannot wait
    assert [each.median for each in linear.work] == [0, 0, 8, 0]
    assert [each.median for each in last.work] == [1, 6, 0, 6] and last.work.total == 7


class ByRows(nn.Module):
    """As transformers' Conv1D is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Alone(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


def halved() -> dict[str, tuple[list[nn.Module], Tensor]]:
    block = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    frozen, half = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
    half.weight.requires_grad_(False)
    twice = nn.Linear(6, 6)
    return {
        "linear": ([nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), frozen, half], torch.rand(4, 6)),
        "by rows": ([ByRows(), ByRows()], torch.rand(4, 6)),
        "convolution": ([nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, bias=False)],
                        torch.rand(4, 2, 6, 6)),
        "block": ([nn.Embedding(9, 6), block, nn.Linear(6, 9)], torch.randint(9, (4, 5))),
        "lstm": ([Alone(nn.LSTM(6, 6, batch_first=True)), nn.Linear(6, 6)], torch.rand(4, 5, 6)),
        "used twice": ([nn.Sequential(twice, nn.Tanh(), twice), nn.Linear(6, 6)], torch.rand(4, 6)),
    }  # fmt: skip


def total(y: Tensor, target: None) -> Tensor:
    return y.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("ask", [partial(profile, chunks=2), partial(plan, devices=1)], ids=["profile", "plan"])
def test_a_loss_that_needs_a_target_and_has_none_is_an_error_that_says_so(ask: Any, device: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.rand(8, 4)
    with pytest.raises(TypeError, match="(?s)while profiling layer 'loss'.*target=None. Give target= too"):
        ask(model, x, loss_fn=nn.functional.cross_entropy, device=device)
    ask(model, x, loss_fn=total, device=device)
    with pytest.raises(Exception) as caught:
        ask(model, x, loss_fn=nn.functional.cross_entropy, target=torch.rand(8, 5), device=device)
    assert "target=None" not in str(caught.value.__notes__)


@pytest.mark.inline
@pytest.mark.parametrize("name", halved())
def test_flops_of_actions_are_those_of_a_pipe_that_runs_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = halved()[name]
    measured = profile(nn.Sequential(*layers), x, chunks=2, device="meta")
    ran = Counter[tuple[str, int]]()
    for method in ("forward", "backward", "weights"):
        def counting(run: StageRun, *args: Any, real: Any = getattr(StageRun, method), method: str = method) -> Any:
            with counter() as flops:
                result = real(run, *args)
            ran[method, run.layers.index] += flops.get_total_flops()
            return result

        monkeypatch.setattr(StageRun, method, counting)
    for schedule, works in (("zb-h1", ("forward", "input", "weight")), ("1f1b", ("forward", "backward"))):
        pipe = Pipe(nn.Sequential(*layers), [1] * len(layers), 2, schedule=schedule, checkpoint="never")
        for _ in range(3):  # calls 1 and 2 compute more, to compare
            ran.clear()
            pipe.step(x, loss_fn=total, loss_reduction="sum")
        for stage in range(len(layers)):
            took = [ran[method, stage] / 2 for method in ("forward", "backward", "weights")]
            assert took[: len(works)] == [getattr(measured.stage(stage, stage + 1), work) for work in works], stage


def test_a_profile_reads_back_what_it_wrote(tmp_path: Any) -> None:
    for model, x in models().values():
        loss = None if not x.is_floating_point() else nn.functional.mse_loss
        measured = profile(model, x, chunks=2, timeout=0, optimizer=1, loss_fn=loss, target=model(x).detach())
        measured.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == measured
    with pytest.raises(PartitionError, match="this is no profile.*Give what Profile.save"):
        Profile.from_json("[1]")
    fields = json.loads(measured.to_json())
    without_output = [{**layer, "output": None} for layer in fields["layers"]]
    for wrong in ({"entry": ["x"]}, {"layers": without_output}, {"loss": {**fields["layers"][0], "constants": "a"}}):
        with pytest.raises(PartitionError, match="this is no profile"):
            Profile.from_json(json.dumps({**fields, **wrong}))


def test_the_spread_is_from_quartile_to_quartile() -> None:
    assert MedianSpread.of([5.0]) == (5, 0) and MedianSpread.of([1.0, 2, 3, 4, 100]) == (3, 2)


def test_rows_are_repeated_or_left_out_and_what_has_no_rows_stays() -> None:
    marked = NoChunk(torch.ones(3))  # as long as there are rows, by chance
    sample = {"x": torch.arange(3), "whole": torch.ones(5), "n": 7, "number": torch.tensor(1.0), "marked": marked}
    fewer, more = with_rows(sample, 2, 3), with_rows(sample, 7, 3)
    assert fewer["x"].tolist() == [0, 1] and more["x"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len(fewer["whole"]) == 5 and fewer["n"] == 7 and fewer["marked"] is marked
    timed = torch.arange(6).view(2, 3)
    assert with_rows((timed, torch.arange(3)), 4, 3, batch_dim=1)[0].tolist() == [[0, 1, 2, 0], [3, 4, 5, 3]]
    assert with_rows((timed, torch.arange(3)), 4, 3, batch_dim=1)[1].tolist() == [0, 1, 2, 0]
    with pytest.raises(PartitionError, match="the sample has no rows"):
        profile(nn.Sequential(nn.ReLU()), torch.tensor(1.0))


class Shapes(nn.Module):
    """Scales its input, and keeps the shapes of all that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.Size, ...]] = set()
        self.linear = nn.Linear(4, 4)

    def __deepcopy__(self, memo: Any) -> "Shapes":
        return self

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, scale = pair
        self.seen.add((x.shape, scale.shape))
        return self.linear(x) * scale.sum()


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_layer_gets_the_chunks_that_it_gets_in_a_pipe(chunks: int, batch_dim: int) -> None:
    sample, target = (torch.rand(8, 8, 4), NoChunk(torch.ones(8))), torch.rand(8, 8, 4)
    profiled, piped, loss_fn = Shapes(), Shapes(), nn.functional.mse_loss
    profile(nn.Sequential(profiled, nn.Tanh()), sample, chunks=chunks, batch_dim=batch_dim, timeout=0, loss_fn=loss_fn,
            target=target)  # fmt: skip
    pipe = Pipe(nn.Sequential(piped, nn.Tanh()), [2], chunks, batch_dim=batch_dim)
    for _ in range(3):  # calls 1 and 2 look at other chunks too
        piped.seen.clear()
        pipe.step(sample, target, loss_fn=loss_fn)
    assert profiled.seen == piped.seen and len(profiled.seen) == 1


def test_a_model_without_numbers_is_profiled_on_meta_only() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**14, 2**14), nn.ReLU(), nn.Linear(2**14, 2**14))
    measured = profile(model, torch.rand(8, 2**14))
    assert measured.unit == "FLOP" and measured.device == "meta" and measured.stage(0, 3).state == 4 * 2**30 + 2**18
    with pytest.raises(PartitionError, match="weight, bias are on the meta device.*Use device='meta'"):
        profile(model, torch.rand(8, 2**14), device="cpu")


def test_a_model_of_blocks_is_profiled_without_numbers_and_left_as_it_was() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=20)
    model, sample = LlamaForCausalLM(config), {"input_ids": torch.randint(20, (2, 5))}
    layers = to_sequential(model, sample)
    measured = profile(layers, sample, device="meta")
    _, first, *_, last, end = measured.layers
    assert first.parameters == last.parameters and first.work.forward.median > 0
    assert sum_of_bytes(layer.parameters for layer in measured.layers) == sum(p.nbytes for p in model.parameters())
    assert end.output == 2 * 5 * 20 * 4
    assert torch.equal(layers(sample)["logits"], model(**sample).logits)


def test_a_profile_without_numbers_is_the_same_each_time_and_activations_are_no_constants() -> None:
    """Memory that one run of a layer frees is that of another tensor in the next."""
    model, sample = MODELS["unet"][0](), MODELS["unet"][1](4)
    layers = to_sequential(model, sample)
    profiles = [profile(layers, sample, device="meta", optimizer=2) for _ in range(5)]
    assert all(each == profiles[0] for each in profiles)
    assert not any(layer.constants for layer in profiles[0].layers)
