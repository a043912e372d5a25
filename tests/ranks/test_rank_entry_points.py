"""The forward entry point over ranks: a script that is written for one process trains the same bits on several."""

from __future__ import annotations

import re
import runpy
import sys
from itertools import product
from pathlib import Path

import pytest
from crew import Crew
from one_and_many import agree, agree_all, agree_on
from rank_entry_points import OPTIMIZERS
from under_torchrun import torchrun


def test_training_through_the_forward_entry_point_gives_the_bits_of_one_process(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    agree_on((crew2, crew3, crew4), "rank_entry_points:trained", lambda size: product(
        (size, 2 * size), OPTIMIZERS, ("always", "except_last", "never")
    ))  # fmt: skip


def test_layers_of_torch_jit_train_over_ranks(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:scripted", [(3,), (6,)])


def test_inference_gives_every_rank_the_output_and_no_graph(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:inferred", [(3,), (6,)])


def test_a_data_set_has_the_same_loss_and_metrics_on_every_rank(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:evaluated", [(3,), (6,)])


@pytest.mark.probes
def test_an_evaluation_counts_as_a_call_in_eval_mode_and_the_first_one_probes(crew2: Crew) -> None:
    for words in crew2.run("rank_entry_points:keeping_rows_in_eval_mode"):
        assert "keeps something of its rows for its next call" in words


def test_several_forwards_may_wait_for_their_backwards_in_any_order(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:several", product((3, 6), ("first first", "last first", "joined")))


def test_a_graph_that_is_kept_goes_backward_twice(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:twice", product((3, 6), ("always", "except_last", "never")))


def test_gradients_accumulate_over_mini_batches(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:accumulated", [(3,), (6,)])


def test_layers_around_the_pipe_have_the_same_gradients_on_every_rank(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:surrounded", [(3,), (6,)])


def test_autograd_grad_gives_each_rank_what_it_asks_for(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:asked", product((3, 6), ("x", "parameters", "both")))


@pytest.mark.parametrize("middle", ["has none", "uses none"])
def test_a_rank_without_gradients_takes_part_where_all_ask_for_those_of_the_pipe(crew3: Crew, middle: str) -> None:
    agree(crew3, "rank_entry_points:asked_of_all", 3, middle)


def test_frozen_stages_pass_gradients_on_or_have_no_backward(crew3: Crew) -> None:
    subsets = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    agree_all(crew3, "rank_entry_points:frozen", product((3,), subsets, (False, True)))


def test_an_optimizer_of_what_is_trained_is_made_on_every_rank(crew3: Crew) -> None:
    subsets = [(0,), (2,), (0, 1), (1, 2)]
    agree_all(crew3, "rank_entry_points:filtered", product((3,), subsets, ("forward", "step")))


def test_a_stage_without_parameters_takes_part(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:bare", product((3,), (0, 1, 2), ("forward", "step")))


def test_hooks_see_whole_gradients_once_on_their_rank(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:hooked", [(3,), (6,)])


def test_a_penalty_on_a_ranks_own_parameters_joins_the_pipes_gradient(crew3: Crew) -> None:
    agree_all(crew3, "rank_entry_points:weighed", [(3,), (6,)])


def test_autocast_reaches_all_ranks_stages(crew3: Crew) -> None:
    agree(crew3, "rank_entry_points:switched", 3)


REFUSED = {
    "is_grads_batched": "is_grads_batched=True cannot go through a Pipe over ranks.*pipeline.curvature",
    "vmap": "vmap.*cannot go through a Pipe",
    "func.grad": "torch.func transforms .* cannot see through a Pipe",
    "second backward": "second time",
    "x of a Pipe": r"within another call over ranks.*Nor may the x of pipe.step.*loss_fn\(pipe\(x\), target\)",
}


@pytest.mark.parametrize("crew", [2, 3], indirect=True)
@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_had_over_ranks_is_refused_on_every_rank_and_the_next_call_is_right(
    crew: Crew, how: str
) -> None:
    for words, wrong in crew.run("rank_entry_points:refused", how):
        assert re.search(REFUSED[how], words), words
        assert wrong == []


def test_a_function_that_draws_is_applied_to_no_pipe_over_ranks(crew2: Crew) -> None:
    for drew, filled, biases in crew2.run("rank_entry_points:applied"):
        words = "the function given to pipe.apply drew random numbers. .* Initialise the model before Pipe"
        assert re.match(words, drew)
        assert filled == "" and biases and all((bias == 1).all() for bias in biases)


@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_loss_that_writes_its_buffers_is_refused_over_ranks(entry: str, crew2: Crew) -> None:
    for writes in ("in place", "anew"):
        for words, has_gradients in crew2.run("rank_entry_points:counted", writes, entry):
            assert re.search(r"loss_fn wrote its buffers \['seen'\].* Return .* as a metric", words)
            assert not has_gradients
    found = crew2.run("rank_entry_points:counted", "never", entry)
    assert found == [("", entry == "step")] * 2


@pytest.mark.parametrize("crew", [2, pytest.param(3, marks=pytest.mark.soak)], indirect=True)
def test_the_blocks_of_the_readme_run_over_ranks(crew: Crew) -> None:
    assert crew.run("rank_entry_points:readme") == [6] * crew.size


SCRIPT = '''
import sys
import torch
from torch import nn
from pipeline import Pipe

def say(what, value):  # one write, which other ranks' words cannot part
    sys.stdout.write(f"{what} {value.item().hex()}\\n")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
pipe = Pipe(model, [2, 2, 2][: int(sys.argv[1])] if int(sys.argv[1]) == 3 else [3, 3], chunks=4)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
x = torch.randn(10, 4)
for step in range(3):
    optimizer.zero_grad()
    loss = (pipe(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    say(step, loss)
say("all", pipe.evaluate(x, loss_fn=lambda out, y: out.square().mean()).loss)
'''


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_script_that_knows_of_no_ranks_prints_the_same_bits_under_torchrun(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["script.py", str(size)])
    runpy.run_path(str(script), run_name="__main__")
    alone = capsys.readouterr().out.splitlines()
    over = torchrun(script, [str(size)], nproc=size)
    assert (over.code, over.stderr) == (0, "")
    assert len(alone) == 4
    assert sorted(over.stdout.splitlines()) == sorted(alone * size)
