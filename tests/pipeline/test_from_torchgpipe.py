"""Does what torchgpipe promises hold here? The laws behind its public tests; skips are in test_from_torchgpipe_skip.py.

Its cases (torchgpipe 0.0.7, tests/; each name with test_ before it) -> ours that ask the same. Where the law is another
one here, it is among the differences in docs/from_torchgpipe.md, and the test asks for ours.

    test_gpipe.py
      parameters, sequential_like, named_children, partitions -> test_layers_and_names_are_the_plain_modules
      public_attrs -> test_settings_are_read_back, test_chunks_of_another_type_are_refused,
          test_chunks_may_be_a_whole_number_of_numpy
      balance_wrong_length, balance_less_than_1, recommend_auto_balance -> test_a_wrong_balance_says_how_to_choose_one,
          test_without_a_balance_parameters_are_made_even
      chunks_less_than_1 -> test_fewer_chunks_than_1_are_refused
      too_few_devices, devices -> test_devices_in_excess_are_left_out_and_too_few_are_refused
      batch_size_indivisible, batch_size_small -> test_any_number_of_rows_is_cut_evenly
      checkpoint_mode, checkpoint_eval, checkpoint_mode_when_chunks_1 ->
          test_the_mode_says_how_many_chunks_are_recomputed
      checkpoint_mode_invalid -> test_an_unknown_mode_is_refused
      no_grad -> test_nothing_is_recorded_without_gradients, test_a_hook_on_a_stage_runs_or_is_refused
      exception, exception_early_stop_asap -> test_an_exception_arrives_and_nothing_runs_after_it
      input_pair, input_singleton -> test_gradients_reach_every_input
      input_varargs, non_tensor, non_tensor_tuple -> test_inputs_that_cannot_be_cut_are_refused,
          test_plain_values_pass, test_other_values_do_not_pass
      deferred_batch_norm, deferred_batch_norm_params -> test_deferred_chunks_are_normalised_one_by_one,
          test_deferred_statistics_are_the_mini_batchs
      deny_moving -> test_moving_is_denied, test_casting_is_not_denied
      empty_module, verify_module_non_sequential -> test_what_has_no_layers_to_cut_is_refused
      verify_module_duplicate_children, verify_module_duplicate_parameters_in_distinct_children ->
          test_layers_and_parameters_may_stand_twice, test_a_buffer_in_two_stages_is_refused
    test_transparency.py
      simple_linears -> test_linears_have_the_plain_modules_gradients
    test_bugs.py
      python_autograd_function -> test_a_python_function_may_return_its_input
      exception_no_hang -> test_an_exception_arrives_and_nothing_runs_after_it
      tuple_wait (two GPUs there) -> test_every_tensor_of_a_tuple_has_its_gradient
      parallel_randoms -> test_backward_drops_what_forward_dropped
    test_inplace.py
      inplace_on_requires_grad, inplace_on_not_requires_grad -> test_an_inplace_layer_at_a_boundary_is_plain
      inplace_incorrect_grad -> test_an_inplace_sum_is_counted_once
    test_balance.py
      blockpartition, blockpartition_zeros -> test_a_row_of_costs_is_cut
      blockpartition_non_positive_partitions, blockpartition_short_sequence -> test_costs_that_cannot_be_cut_are_refused
      balance_by_time -> in tests/partition/test_partition_balancing.py
      balance_by_time_loop_resets_input -> test_every_pass_of_profiling_begins_at_the_sample
      balance_by_size_latent (CUDA there, as the next two) -> test_sizes_balance_by_what_is_kept_for_the_backward
      balance_by_size_param, balance_by_size_param_scale -> test_sizes_balance_by_parameters_at_their_scale
      layerwise_sandbox, sandbox_during_profiling, not_training, already_has_grad ->
          test_profiling_leaves_the_module_as_it_was
      balance_by_time_tuple, balance_by_size_tuple -> test_profiling_passes_tuples_on
      deprecated_torchgpipe_balancing -> none: it asks for a package of torchgpipe's past
    test_deferred_batch_norm.py
      transparency, input_requiring_grad -> test_deferred_chunks_are_normalised_one_by_one
      running_stats, eval -> test_deferred_statistics_are_the_mini_batchs
      convert_deferred_batch_norm -> test_deferred_layers_stay_the_users_own,
          test_a_state_dict_of_torchgpipes_deferred_layers_loads
      optimize -> test_deferred_statistics_follow_training
      conv_bn -> test_deferred_layers_before_are_trained_by_chunks

Its test_checkpoint, test_copy, test_dependency, test_microbatch, test_phony, test_pipeline, test_stream and test_worker
ask about private modules.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from by_chunks import CHECKPOINTS, ByChunks, assert_same_grads, same, twins
from law_models import Apply
from pipeline_probes import outside
from torch import Tensor, nn

from partition import PartitionError, balance_by_size, balance_by_time, balance_costs
from pipeline import Pipe, is_recomputing
from pipeline.common.places import Place

F64 = torch.float64
every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINTS)


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count))).double()


def rows_of(count: int, width: int = 2) -> Tensor:
    return torch.randn(count, width, dtype=F64)


def ones(count: int) -> list[int]:
    return [1] * count


def places(count: int) -> list[Place]:
    """As many devices, as far as a Pipe can tell."""
    return [Place(torch.device("cpu"), str(number)) for number in range(count)]


# -------------------------------------------------------------------------------------------- names, settings, edges


@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_layers_and_names_are_the_plain_modules(balance: list[int]) -> None:
    layers = OrderedDict(zip("abcd", linears(4)))
    model = nn.Sequential(layers)
    names, params = [name for name, _ in model.named_modules()], list(model.parameters())
    pipe = Pipe(model, balance, devices=["cpu"] * len(balance))
    assert len(pipe) == 4 and list(pipe) == list(layers.values())
    for index in range(-4, 4):
        assert pipe[index] is list(layers.values())[index]
    for index in (-5, 4):
        with pytest.raises(IndexError):
            pipe[index]
    assert params and all(one is other for one, other in zip(pipe.parameters(), params, strict=True))
    assert [name for name, _ in pipe.named_modules()] == names and pipe.b is layers["b"]
    assert "a.weight" in pipe.state_dict()
    assert all(isinstance(stage, nn.Sequential) for stage in pipe.partitions)
    assert [len(stage) for stage in pipe.partitions] == balance
    assert [layer for stage in pipe.partitions for layer in stage] == list(pipe)


def test_settings_are_read_back() -> None:
    pipe = Pipe(linears(1), balance=(1,), devices=("cpu",), chunks=42, checkpoint="always")
    assert (pipe.balance, pipe.devices, pipe.chunks, pipe.checkpoint) == ([1], [torch.device("cpu")], 42, "always")
    assert type(pipe.chunks) is int and pipe.deferred_batch_norm is False


@pytest.mark.parametrize("chunks", [42.0, 1.9, "4", True])
def test_chunks_of_another_type_are_refused(chunks: Any) -> None:
    """torchgpipe takes int() of them, so 1.9 runs as 1."""
    with pytest.raises(TypeError, match=f"chunks is {chunks!r}. Give a whole number"):
        Pipe(linears(1), [1], chunks)


@pytest.mark.parametrize("chunks", [numpy.int64(4), numpy.int32(4)])
def test_chunks_may_be_a_whole_number_of_numpy(chunks: Any) -> None:
    assert Pipe(linears(1), [numpy.int64(1)], 4).balance == [1]
    found = Pipe(linears(1), [1], chunks).chunks
    assert found == 4 and type(found) is int


@pytest.mark.parametrize("chunks", [0, -1])
def test_fewer_chunks_than_1_are_refused(chunks: int) -> None:
    with pytest.raises(ValueError, match=f"chunks is {chunks}. .*at least 1"):
        Pipe(linears(1), [1], chunks)


@pytest.mark.parametrize(
    "balance, words",
    [
        ([1], "balance sums to 1 but the module has 2 layers"),
        ([3], "balance sums to 3 but the module has 2 layers"),
        ([0, 2], r"balance\[0\] is 0, below 1"),
        ([-1, 3], r"balance\[0\] is -1, below 1"),
    ],
)
def test_a_wrong_balance_says_how_to_choose_one(balance: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words + r".*Use balance=\[.*partition.balance_by_time\("):
        Pipe(linears(2), balance)


@pytest.mark.parametrize("devices, balance", [(1, [4]), (2, [2, 2]), (3, [1, 1, 2]), (4, [1, 1, 1, 1]), (9, ones(4))])
def test_without_a_balance_parameters_are_made_even(devices: int, balance: list[int]) -> None:
    found = Pipe(linears(4), devices=["cpu"] * devices).balance
    assert len(found) == len(balance) and sum(found) == 4 and max(found) == max(balance)


def test_devices_in_excess_are_left_out_and_too_few_are_refused() -> None:
    for given in range(1, 6):
        if given < 3:
            with pytest.raises(ValueError, match=f"balance has 3 stages but there are {given} devices"):
                Pipe(linears(3), ones(3), devices=["cpu"] * given)
        else:
            assert Pipe(linears(3), ones(3), devices=["cpu"] * given).devices == [torch.device("cpu")] * 3


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint is 'sometimes'. Use 'always', 'except_last', 'never'"):
        Pipe(linears(1), [1], 2, checkpoint="sometimes")


class Mover:
    """A way to move a module, and what it is called."""

    def __init__(self, *args: Any, name: str = "to", **kwargs: Any) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs

    def __call__(self, module: nn.Module) -> object:
        return getattr(module, self.name)(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{self.name}{self.args}{self.kwargs}"


MOVERS: list[Any] = [
    Mover(torch.device("meta")),
    Mover("meta"),
    Mover("meta", torch.float16),
    Mover(torch.ones(1, device="meta")),
    Mover(tensor=torch.ones(1, device="meta")),
    Mover(device="meta"),
]


@pytest.mark.parametrize("move", MOVERS, ids=repr)
def test_moving_is_denied(move: Mover) -> None:
    with pytest.raises(TypeError, match=r"a Pipe places its stages itself.*pipe.to_sequential\(\)"):
        move(Pipe(linears(2), [1, 1]))


def test_casting_is_not_denied() -> None:
    pipe = Pipe(linears(2), [1, 1])
    for cast, dtype in (
        (lambda: pipe.half(), torch.float16),
        (lambda: pipe.to(torch.double), torch.float64),
        (lambda: pipe.to(dtype=torch.float), torch.float32),
    ):
        assert cast() is pipe and {param.dtype for param in pipe.parameters()} == {dtype}


@pytest.mark.parametrize(
    "module, error, words",
    [
        (nn.Sequential(), PartitionError, "module has no layers"),  # torchgpipe's gives its input back
        (nn.Linear(1, 1), TypeError, "module must be an nn.Sequential.*got Linear"),
        (nn.ModuleList([nn.Linear(1, 1)]), TypeError, "module must be an nn.Sequential.*got ModuleList"),
    ],
)
def test_what_has_no_layers_to_cut_is_refused(module: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Pipe(module, [1] * (not isinstance(module, nn.Sequential)))


# ---------------------------------------------------------------------------------------------- rows, inputs, outputs


def test_any_number_of_rows_is_cut_evenly() -> None:
    """torchgpipe cuts with torch.chunk: 5 rows in 4 chunks run as 3."""
    for chunks in range(1, 7):
        for rows in range(1, 10):
            seen: list[int] = []
            model = nn.Sequential(Apply(lambda x: seen.append(len(x)) or x), nn.Linear(2, 2).double())
            x = rows_of(rows)
            out = Pipe(model, [1, 1], chunks, checkpoint="never")(x)
            assert len(seen) == min(chunks, rows) and sum(seen) == rows and max(seen) - min(seen) <= 1
            torch.testing.assert_close(out, model[1](x), rtol=0, atol=1e-15)


class Pair(nn.Module):
    """Takes and gives as many tensors as it has linears."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linears = linears(count)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear, x in zip(self.linears, tensors, strict=True))


@every_mode
@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_reach_every_input(count: int, checkpoint: str) -> None:
    model, plain = twins(nn.Sequential(Pair(count), Apply(lambda tensors: tuple(x.tanh() for x in tensors))))
    inputs = tuple(rows_of(10).requires_grad_() for _ in range(count))
    copies = tuple(x.detach().clone().requires_grad_() for x in inputs)
    for net, given in ((Pipe(model, [1, 1], 2, checkpoint=checkpoint), inputs), (plain, copies)):
        out = net(given)
        assert type(out) is tuple and len(out) == count
        sum(place * y.square().mean() for place, y in enumerate(out, 1)).backward()
    for one, other in zip((*inputs, *model.parameters()), (*copies, *plain.parameters()), strict=True):
        assert other.grad.abs().max() > 0
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-15)


def test_inputs_that_cannot_be_cut_are_refused() -> None:
    pipe = Pipe(linears(1), [1], 2)
    with pytest.raises(TypeError, match=r"called with 2 inputs.*pipe\(\(x, y\)\) hands it a tuple"):
        pipe(rows_of(1), rows_of(1))
    for plain in ("hello", 42, None, ("hello", 42)):
        with pytest.raises(ValueError, match="the input has nothing to cut"):
            pipe(plain)
    with pytest.raises(TypeError, match="the input holds a builtins.object"):
        pipe((rows_of(2), object()))


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_a_layer_of_several_arguments_is_told_that_it_gets_one_value(entry: str) -> None:
    """The Pipe of torch.distributed.pipeline.sync gives a layer each value of a tuple as an argument."""

    class Scale(nn.Module):
        def forward(self, hidden: Tensor, factor: Tensor) -> Tensor:
            return hidden * factor

    pipe = Pipe(nn.Sequential(linears(1), Apply(lambda hidden: (hidden, hidden)), Scale()), [1, 2], 2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'factor'") as caught:
        pipe(rows_of(4)) if entry == "forward" else pipe.step(rows_of(4), loss_fn=lambda output, _: output.mean())
    assert any("is called with one value" in note and "in a tuple" in note for note in caught.value.__notes__)


def test_rows_are_never_dropped() -> None:
    """torchgpipe runs 5 and 8 rows in 4 chunks as 5 and 6, and gives one row a chunk for a mean over rows."""
    pair = Pipe(nn.Sequential(Apply(lambda pair: (pair[0] + 1, pair[1]))), [1], 4)
    with pytest.raises(ValueError, match=r"tensors of different length.*rows: \[5, 8\]"):
        pair((rows_of(5), rows_of(8)))
    with pytest.raises(ValueError, match="an output cannot be joined along dim 0"):
        Pipe(nn.Sequential(Apply(lambda x: x.mean(0, keepdim=True))), [1], 4)(rows_of(8))


@pytest.mark.parametrize("chunks", [1, 3])
def test_plain_values_pass(chunks: int) -> None:
    """torchgpipe takes tensors and flat tuples of tensors alone."""
    x = rows_of(6)
    assert Pipe(nn.Sequential(Apply(lambda x: "hello")), [1], chunks)(x) == "hello"
    pipe = Pipe(nn.Sequential(Apply(lambda x: (x, "hello")), Apply(lambda pair: [pair[0] + 1, *pair])), [1, 1], chunks)
    out = pipe(x)
    assert torch.equal(out[0], x + 1) and torch.equal(out[1], x) and out[2] == "hello"
    greeting = Pipe(nn.Sequential(Apply(lambda pair: (pair[0] * len(pair[1]), pair[1]))), [1], chunks)
    assert torch.equal(greeting((x, "hello"))[0], x * 5) and greeting((x, "hello"))[1] == "hello"


@pytest.mark.parametrize("made", [lambda x: object(), lambda x: (x, {1})])
def test_other_values_do_not_pass(made: Callable[[Tensor], Any]) -> None:
    for layers in ([Apply(made)], [Apply(made), nn.Identity()]):
        with pytest.raises(TypeError, match="the output of stage 0.* holds a builtins"):
            Pipe(nn.Sequential(*layers), ones(len(layers)), 2)(rows_of(4))


# -------------------------------------------------------------------------------------------------------- recomputing


class Counted(nn.Module):
    """Counts its forwards, and those among them that repeat one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=F64))
        self.told = outside([])  # is_recomputing() of each forward

    @property
    def forwards(self) -> int:
        return len(self.told())

    @property
    def repeats(self) -> int:
        return sum(self.told())

    def forward(self, x: Tensor) -> Tensor:
        self.told().append(is_recomputing())
        return (x * self.weight).sin()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_the_mode_says_how_many_chunks_are_recomputed(chunks: int, train: bool) -> None:
    """In eval mode too; torchgpipe then keeps everything."""
    for checkpoint, repeats in zip(CHECKPOINTS, (chunks, chunks - 1, 0), strict=True):
        model, plain = twins(nn.Sequential(Counted(), Counted()))
        pipe = Pipe(model, [2], chunks, checkpoint=checkpoint).train(train)
        x = rows_of(5)
        pipe(x).mean().backward()
        assert [layer.repeats for layer in model] == [repeats] * 2, checkpoint
        assert [layer.forwards for layer in model] == [chunks + repeats] * 2
        plain(x).mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=0)


@every_mode
def test_nothing_is_recorded_without_gradients(checkpoint: str) -> None:
    model = nn.Sequential(Counted(), Counted())
    outputs: list[Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        outputs.append(Pipe(model, [1, 1], 2, checkpoint=checkpoint)(rows_of(2)))
    assert len(outputs) == 5 and all(out.grad_fn is None and not out.requires_grad for out in outputs)
    assert [layer.repeats for layer in model] == [0, 0]


def test_a_hook_on_a_stage_runs_or_is_refused() -> None:
    pipe, seen = Pipe(linears(2), [1, 1], 3), []
    try:
        pipe.partitions[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    except (TypeError, ValueError, RuntimeError):
        return
    pipe(rows_of(3))
    assert seen == [1, 1, 1]


# ---------------------------------------------------------------------------------------------------------- exceptions


class Expected(Exception):
    pass


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_an_exception_arrives_and_nothing_runs_after_it(stages: int, workers: str) -> None:
    """With threads, the stages before it may be at work already; nothing hangs, and no later stage sees that chunk."""
    for bad in range(stages):
        for fail_at in range(3):
            log: list[tuple[int, int]] = []

            def layer(stage: int) -> Callable[[Tensor], Tensor]:
                def forward(x: Tensor) -> Tensor:
                    log.append((stage, int(x[0, 0])))
                    if failing and log[-1] == (bad, fail_at):
                        raise Expected()
                    return x

                return forward

            failing = True
            model = nn.Sequential(*(Apply(layer(stage)) for stage in range(stages)))
            pipe = Pipe(model, ones(stages), 3, devices=places(stages), workers=workers)
            x = torch.arange(3.0)[:, None]
            with pytest.raises(Expected) as caught:
                pipe(x)
            assert f"stage {bad}" in caught.value.__notes__[-1]
            assert not any(stage > bad and chunk >= fail_at or stage == bad and chunk > fail_at for stage, chunk in log)
            if workers == "inline":
                assert log[-1] == (bad, fail_at)
            failing, before = False, len(log)
            assert torch.equal(pipe(x), x) and len(log) == before + 3 * stages


# ------------------------------------------------------------------------------------------------------- same numbers


@every_mode
@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]])
def test_linears_have_the_plain_modules_gradients(balance: list[int], workers: str, checkpoint: str) -> None:
    plain = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 1)).double()
    plain, by_chunks = twins(plain)
    piped = copy.deepcopy(plain)
    x = rows_of(8, 1)
    devices = places(len(balance))
    Pipe(piped, balance, 4, devices=devices, checkpoint=checkpoint, workers=workers)(x).mean().backward()
    reference = ByChunks(by_chunks, x, 4)
    reference.backward(reference.output.mean())
    assert_same_grads(piped, by_chunks)  # to the bit
    plain(x).mean().backward()
    for one, other in zip(piped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


class Itself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


@every_mode
def test_a_python_function_may_return_its_input(checkpoint: str) -> None:
    pipe = Pipe(nn.Sequential(Apply(Itself.apply), Apply(Itself.apply)), [1, 1], 2, checkpoint=checkpoint)
    for needs_grad in (False, True):
        x = rows_of(6).requires_grad_(needs_grad)
        out = pipe(x)
        assert torch.equal(out, x)
        if needs_grad:
            out.sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, 9))


@every_mode
def test_every_tensor_of_a_tuple_has_its_gradient(checkpoint: str) -> None:
    a, b = (rows_of(32).requires_grad_() for _ in range(2))
    first = Apply(lambda pair: (pair[0] * 1, pair[1] * 2, pair[1] * 3))
    second = Apply(lambda triple: triple[0] + triple[1].sin() + triple[2])
    Pipe(nn.Sequential(first, second), [1, 1], 32, checkpoint=checkpoint)((a, b)).sum().backward()
    assert torch.equal(a.grad, torch.ones_like(a))
    torch.testing.assert_close(b.grad, 2 * (2 * b.detach()).cos() + 3, rtol=0, atol=1e-14)


@every_mode
@pytest.mark.parametrize("workers", ["inline", "threads"])
def test_backward_drops_what_forward_dropped(workers: str, checkpoint: str) -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Dropout(0.02) for _ in range(10))) for _ in range(2)))
    masks = []
    for _ in range(2):
        torch.manual_seed(4)
        x = torch.ones(10, 10, dtype=F64, requires_grad=True)
        y = Pipe(model, [1, 1], 10, devices=places(2), checkpoint=checkpoint, workers=workers)(x)
        y.sum().backward()
        assert torch.equal(y.detach(), x.grad) and 0 < (x.grad == 0).sum() < 100
        masks.append(x.grad)
    assert torch.equal(*masks)  # and the seed gives them again


@every_mode
@pytest.mark.parametrize("balance", [[1, 1], [2]])
def test_an_inplace_layer_at_a_boundary_is_plain(balance: list[int], checkpoint: str) -> None:
    """torchgpipe: a leaf Variable that requires grad is being used in an in-place operation."""
    for layers in ([nn.Linear(2, 2), nn.ReLU(inplace=True)], [nn.ReLU(inplace=True), nn.Softplus()]):
        model, plain = twins(nn.Sequential(*layers).double())
        for needs_grad in (False, True):
            model.zero_grad()
            plain.zero_grad()
            x = rows_of(6).requires_grad_(needs_grad)
            before = x.detach().clone()
            y = Pipe(model, balance, 3, checkpoint=checkpoint)(x)
            assert torch.equal(x, before)  # torchgpipe writes the caller's input
            if not y.requires_grad:
                torch.testing.assert_close(y, plain(before.clone()), rtol=1e-13, atol=1e-15)  # Softplus on few rows
                continue
            y.square().sum().backward()
            other = before.clone().requires_grad_(needs_grad)
            plain(other.clone()).square().sum().backward()
            torch.testing.assert_close(x.grad, other.grad, rtol=1e-13, atol=1e-15)
            for one, its in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, its.grad, rtol=1e-13, atol=1e-15)


@every_mode
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_inplace_sum_is_counted_once(chunks: int, checkpoint: str) -> None:
    """add_ is not idempotent: a recomputation on what it wrote would give 3."""
    pipe = Pipe(nn.Sequential(Apply(lambda pair: pair[0] * pair[1].add_(1))), [1], chunks, checkpoint=checkpoint)
    foo, bar = torch.ones(2, requires_grad=True), torch.ones(2)
    pipe((foo, bar)).sum().backward()
    assert foo.grad.tolist() == [2.0, 2.0] and bar.tolist() == [1.0, 1.0]


@every_mode
@pytest.mark.parametrize("apart", [False, True], ids=["one place", "places"])
@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]])
def test_layers_and_parameters_may_stand_twice(balance: list[int], apart: bool, checkpoint: str) -> None:
    """torchgpipe refuses both."""
    for nested in (False, True):
        shared, other = linears(2)
        inner = [nn.Sequential(shared), other, nn.Sequential(shared, nn.Tanh())]
        model, plain = twins(nn.Sequential(*(inner if nested else [shared, nn.Tanh(), shared])))
        x = rows_of(6)
        pipe = Pipe(model, balance, 3, checkpoint=checkpoint, devices=places(len(balance)) if apart else None)
        for net in (pipe, plain):
            net(x).square().sum().backward()
        names = [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names
        for one, its in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, its.grad, rtol=1e-13, atol=1e-15)


def test_a_buffer_in_two_stages_is_refused() -> None:
    shared = nn.BatchNorm1d(2)
    assert Pipe(nn.Sequential(shared, shared), [2], 2)(torch.rand(4, 2)).shape == (4, 2)
    with pytest.raises(ValueError, match="buffer '1.running_mean' is shared by stages 0 and 1"):
        Pipe(nn.Sequential(shared, shared), [1, 1], 2)


# ------------------------------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize(
    "costs, stages, balance",
    [([1, 2, 3, 4, 5, 6], 2, [4, 2]), ([0, 0], 2, [1, 1]), ([2, 6, 12, 20, 30, 42], 2, [5, 1])],
)
def test_a_row_of_costs_is_cut(costs: list[int], stages: int, balance: list[int]) -> None:
    """Exactly: of the last row, torchgpipe makes stages of 40 and 72; here they are 70 and 42."""
    assert balance_costs(costs, stages) == balance


@pytest.mark.parametrize(
    "costs, stages, words",
    [
        ([42], 0, "cannot cut 1 layers into 0 stages"),
        ([42], -1, "cannot cut 1 layers into -1 stages"),
        ([], 1, "there are no layers to cut"),
        ([42], 2, "cannot cut 1 layers into 2 stages"),
    ],
)
def test_costs_that_cannot_be_cut_are_refused(costs: list[int], stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balance_costs(costs, stages)


def test_every_pass_of_profiling_begins_at_the_sample() -> None:
    seen: list[tuple[int, ...]] = []
    note = Apply(lambda x: seen.append(tuple(x.shape)) or x.clone())
    model = nn.Sequential(note, nn.Conv2d(3, 2, 1), nn.Flatten(), note, nn.Linear(32, 10))
    assert sum(balance_by_time(2, model, torch.rand(10, 3, 4, 4), timeout=0.5, device="cpu")) == 5
    assert len(seen) > 4  # more than one pass; two runs of a layer in each
    assert seen == [(10, 3, 4, 4), (10, 3, 4, 4), (10, 32), (10, 32)] * (len(seen) // 4)


class Latent(nn.Module):
    """Keeps `count` tensors of the size of its input for its backward, and has `size` parameters."""

    def __init__(self, count: int, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = (x + self.weight.sum()).exp()
        return x


UP, DOWN = range(1, 7), range(6, 0, -1)


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_sizes_balance_by_what_is_kept_for_the_backward(device: str | None) -> None:
    for counts, balance in ((UP, [4, 2]), (DOWN, [2, 4])):
        model = nn.Sequential(*(Latent(count) for count in counts))
        assert balance_by_size(2, model, torch.rand(10, 10, 10), device=device) == balance


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_sizes_balance_by_parameters_at_their_scale(device: str | None) -> None:
    widths = nn.Sequential(*(nn.Linear(i, i + 1) for i in UP)), nn.Sequential(*(nn.Linear(i + 1, i) for i in DOWN))
    for model, width, balance in zip(widths, (1, 7), ([4, 2], [2, 4]), strict=True):
        assert balance_by_size(2, model, torch.rand(7, width), param_scale=100, device=device) == balance
    tradeoff = nn.Sequential(*(Latent(7 - size, size) for size in UP))
    assert balance_by_size(2, tradeoff, torch.ones(1), param_scale=0, device=device) == [2, 4]
    assert balance_by_size(2, tradeoff, torch.ones(1), param_scale=100, device=device) == [4, 2]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_profiling_leaves_the_module_as_it_was(balance_by: Any, train: bool) -> None:
    """torchgpipe profiles in train mode whatever the module's is, and refuses gradients."""
    modes: list[bool] = []

    class Mode(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            return x

    model = nn.Sequential(nn.Conv2d(3, 3, 1), Mode(), nn.BatchNorm2d(3), nn.Dropout())
    sample = torch.rand(2, 3, 8, 8)
    model(sample).norm().backward()
    model.train(train)
    state = copy.deepcopy(model.state_dict())
    grads = [param.grad.clone() for param in model.parameters()]
    timeout = {"timeout": 0.01} if balance_by is balance_by_time else {}
    balance_by(2, model, sample, **timeout)
    assert set(modes[1:]) == {train} and {module.training for module in model.modules()} == {train}
    assert all(same(value, state[name]) for name, value in model.state_dict().items())
    assert all(same(param.grad, grad) for param, grad in zip(model.parameters(), grads, strict=True))
    assert {param.device.type for param in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_profiling_passes_tuples_on(balance_by: Any) -> None:
    model = nn.Sequential(Apply(lambda x: (x.sin(), x.detach())), Apply(lambda pair: pair[0] * pair[1]))
    for needs_grad in (False, True):
        timeout = {"timeout": 0.01} if balance_by is balance_by_time else {}
        assert balance_by(1, model, torch.rand(1, requires_grad=needs_grad), device="cpu", **timeout) == [2]


# --------------------------------------------------------------------------------------------------------- batch norm


def tilted(rows: int) -> Tensor:
    """Images whose channels have other variances, and whose rows have other means."""
    x = torch.rand(rows, 3, 5, 5, dtype=F64) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    return x + 2.0 ** torch.arange(rows, dtype=F64).view(-1, 1, 1, 1)


def norm(**what: Any) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(3, **what).double()
    with torch.no_grad():
        made.weight.uniform_(0.5, 2)
    return made


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def assert_same_statistics(ours: nn.Module, theirs: nn.Module) -> None:
    for name in STATISTICS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=0)


@every_mode
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_deferred_chunks_are_normalised_one_by_one(chunks: int, needs_grad: bool, checkpoint: str) -> None:
    model, plain = twins(nn.Sequential(norm()))
    x = tilted(8).requires_grad_(needs_grad)
    pipe = Pipe(model, [1], chunks, checkpoint=checkpoint, deferred_batch_norm=True)
    out = pipe(x)
    reference = ByChunks(plain, x, chunks)
    assert torch.equal(out, reference.output)
    out.square().mean().backward()
    reference.backward(reference.output.square().mean())
    assert_same_grads(model, plain)
    assert x.grad is None if not needs_grad else same(x.grad, reference.input_grad)
    assert not any(buffer.requires_grad or buffer.grad_fn for buffer in model.buffers())


@every_mode
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_deferred_statistics_are_the_mini_batchs(chunks: int, momentum: float | None, checkpoint: str) -> None:
    """Of any number of rows; torchgpipe waits for `chunks` chunks, which 5 rows in 4 never give."""
    model, plain = twins(nn.Sequential(norm(momentum=momentum)))
    pipe = Pipe(model, [1], chunks, checkpoint=checkpoint, deferred_batch_norm=True)
    for rows in (8, 5, 3, 1):
        x = tilted(rows)
        pipe(x).mean().backward()
        plain(x)
        assert_same_statistics(model[0], plain[0])  # running_var unbiased, as torch's is
    pipe.eval()
    plain.eval()
    x = tilted(6)
    torch.testing.assert_close(pipe(x), plain(x), rtol=1e-11, atol=1e-12)


def test_deferred_layers_stay_the_users_own() -> None:
    """torchgpipe puts layers of another type in their place, in the caller's module too, with two more buffers each."""
    inner = nn.Sequential(norm(), norm(track_running_stats=False))
    model = nn.Sequential(inner, nn.BatchNorm2d(3, affine=False).double())
    norms, names = [*inner, model[1]], list(model.state_dict())
    state = copy.deepcopy(model.state_dict())
    pipe = Pipe(model, [1, 1], 4, deferred_batch_norm=True)
    assert [*pipe[0], pipe[1]] == norms and {type(each) for each in norms} == {nn.BatchNorm2d}
    pipe(tilted(8))
    assert list(pipe.state_dict()) == names and norms[1].running_mean is None
    assert int(norms[0].num_batches_tracked) == int(norms[2].num_batches_tracked) == 1
    pipe.load_state_dict(state)
    assert int(norms[0].num_batches_tracked) == 0


def test_a_state_dict_of_torchgpipes_deferred_layers_loads() -> None:
    """Its DeferredBatchNorm has two buffers more, empty between mini-batches; keys as torchgpipe 0.0.7 writes them."""
    source = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3))).double()
    source(tilted(4))
    state = OrderedDict((f"partitions.{key[0]}.{key}", value) for key, value in source.state_dict().items())
    for name in ("sum", "sum_squares"):
        state[f"partitions.1.1.0.{name}"] = torch.zeros(3, dtype=F64)
    target = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3))).double()
    result = Pipe(target, [1, 1], 4, deferred_batch_norm=True).load_state_dict(state)
    assert str(result) == "<All keys matched successfully>"
    assert all(same(value, source.state_dict()[name]) for name, value in target.state_dict().items())


def test_deferred_statistics_follow_training() -> None:
    model, plain = twins(nn.Sequential(norm()))
    pipe = Pipe(model, [1], 4, deferred_batch_norm=True)
    optimizer = torch.optim.SGD([*pipe.parameters(), *plain.parameters()], lr=1.0)
    for number in range(5):
        x = tilted(8) * (number + 1)
        for net in (pipe.train(), plain.train()):
            net(x).sum().backward()
        optimizer.step()
        assert_same_statistics(model[0], plain[0])
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-9)


def test_deferred_layers_before_are_trained_by_chunks() -> None:
    model, plain = twins(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).double())
    pipe = Pipe(model, [1, 1], 4, deferred_batch_norm=True)
    optimizer = torch.optim.SGD([*pipe.parameters(), *plain.parameters()], lr=0.1)
    x = tilted(8)
    outs = [net(x) for net in (pipe, plain)]
    assert (outs[0] - outs[1]).abs().max() > 0.1  # a chunk is normalised by itself
    assert_same_statistics(model[1], plain[1])  # of one and the same input
    for out in outs:
        out.square().sum(0).prod(0).log().sum().backward()
    optimizer.step()
    assert (model[0].weight - plain[0].weight).abs().max() > 1e-6
    for net in (pipe, plain):
        net(x)
    assert (model[1].running_mean - plain[1].running_mean).abs().max() > 1e-9


# ---------------------------------------------------------------------------------------------------------- the tables


def test_every_test_that_the_tables_name_exists() -> None:
    here = Path(__file__).parent
    files = [file.read_text() for file in sorted(here.glob("test_from_torchgpipe*.py"))]
    found = {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.M)}
    for text in files:
        table = text.split('"""')[1].partition("ask the same")[2].partition("\n\nIts ")[0]
        named = set(re.findall(r"test_\w+(?!\w|\.py)", table))
        assert len(named) > 5 and named <= found, named - found
    page = (here.parent.parent / "docs" / "from_torchgpipe.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 5 and named <= found, named - found
