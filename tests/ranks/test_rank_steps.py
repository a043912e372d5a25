"""`pipe.step` over ranks. Laws that begin "where torch" are those that torch.distributed.pipelining 2.13 breaks."""

from __future__ import annotations

import re
from itertools import product

import pytest
from crew import Crew
from one_and_many import agree, agree_all, agree_on
from rank_entry_points import OPTIMIZERS
from torch import nn

from scheduler import names


def test_where_torch_refuses_or_drops_rows_an_evaluation_takes_seven_rows_in_four_chunks(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    cases = list(product(((7, 4), (1, 4), (5, 3), (4, 1)), ("mean", "sum")))
    agree_on((crew2, crew3, crew4), "rank_steps:evaluated", lambda size: [
        (size, *count, reduction) for count, reduction in cases
    ])  # fmt: skip


def test_where_torch_keeps_its_first_shapes_batch_sizes_change_between_steps(crew2: Crew, crew4: Crew) -> None:
    agree_all(crew2, "rank_steps:sizes_change", [(2,), (4,)])
    agree(crew4, "rank_steps:sizes_change", 4)


def test_where_torch_keeps_its_first_shapes_sequence_lengths_change_between_steps(crew3: Crew) -> None:
    agree_all(crew3, "rank_steps:lengths_change", product((3, 6), ("step", "forward")))


def test_where_torch_keeps_its_first_mode_training_and_evaluation_alternate(crew2: Crew, crew3: Crew) -> None:
    agree(crew2, "rank_steps:modes_switch", 2)
    agree_all(crew3, "rank_steps:modes_switch", [(3,), (6,)])


def test_a_layer_has_the_mode_that_its_own_rank_finds_by_its_type(crew2: Crew, crew3: Crew) -> None:
    cases = product((3, 6), (nn.BatchNorm1d, nn.Dropout), ("step", "forward"))
    agree_all(crew2, "rank_steps:modes_by_type", [(2, nn.BatchNorm1d, "step"), (4, nn.Dropout, "forward")])
    agree_all(crew3, "rank_steps:modes_by_type", cases)


def test_a_block_of_layers_of_several_ranks_has_one_mode_whichever_number_gives_it(crew2: Crew, crew3: Crew) -> None:
    cases = product((1, 4), (False, True), (False, True))
    agree_all(crew2, "rank_steps:modes_of_a_block", [(2, *case) for case in cases])
    agree_all(crew3, "rank_steps:modes_of_a_block", [(3, 1, True, False), (6, 4, False, True)])


def test_where_torch_runs_a_forward_to_learn_shapes_statistics_are_right_at_the_first_step(crew3: Crew) -> None:
    agree_all(crew3, "rank_steps:first_step", product((3, 6), (False, True)))


@pytest.mark.parametrize("to", ["param", "store"])
def test_where_torch_scales_gradients_again_two_steps_accumulate(crew2: Crew, crew3: Crew, to: str) -> None:
    agree(crew2, "rank_steps:accumulated", 4, to)
    agree(crew3, "rank_steps:accumulated", 3, to)


def test_a_store_is_applied_on_every_rank_where_gradients_reach_some_alone(crew2: Crew, crew3: Crew) -> None:
    agree(crew2, "rank_steps:stored_behind_a_detach", 4)
    agree(crew3, "rank_steps:stored_behind_a_detach", 3)


def test_a_failure_of_the_next_call_leaves_the_step_that_a_rank_has_still_to_end(crew2: Crew, crew3: Crew) -> None:
    """The rank that is slow to hear of the vote does not take the failure for its step's, which others have made."""
    agree(crew2, "rank_steps:ends_late", 2)
    agree(crew3, "rank_steps:ends_late", 3)


def test_mini_batches_of_other_lengths_accumulate_in_one_step(crew2: Crew, crew3: Crew) -> None:
    agree_all(crew2, "rank_steps:accumulated_in_one_step", [(2, "always"), (4, "except_last")])
    agree(crew3, "rank_steps:accumulated_in_one_step", 3, "never")


def test_where_torch_cuts_tensors_alone_outputs_and_targets_may_be_dicts(crew3: Crew) -> None:
    agree_all(crew3, "rank_steps:dicts", product((3, 6), ("step", "evaluate", "forward")))


def test_where_torch_gives_losses_to_the_last_rank_every_rank_has_the_same_number(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    for crew in (crew2, crew3, crew4):
        first, *others = crew.run("rank_steps:losses_of_every_rank", crew.size)
        assert others == [first] * (crew.size - 1)


def test_steps_with_an_optimizer_clipping_and_counted_losses_give_the_same_bits_under_every_schedule(
    crew2: Crew,
) -> None:
    agree_all(crew2, "rank_steps:everything", product((4,), OPTIMIZERS, names(), ("always", "never")))


def test_an_overflow_on_one_rank_skips_the_step_on_all(crew2: Crew, crew3: Crew) -> None:
    agree_all(crew2, "rank_steps:scaled", [(2, None), (2, 1)])
    agree(crew3, "rank_steps:scaled", 3)


def test_gradients_are_clipped_by_the_norm_over_all_ranks(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    agree_on((crew2, crew3, crew4), "rank_steps:clipped", lambda size: product(
        (size,), (2.0, 1.0, float("inf")), ("param", "store"), (False, True)
    ))  # fmt: skip


def test_an_optimizer_may_have_an_empty_parameter_where_all_that_it_steps_is_on_other_ranks(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    for crew in (crew2, crew3, crew4):
        agree(crew, "rank_steps:by_turns", crew.size)
    for words in crew2.run("rank_steps:no_optimizer_of_the_pipe"):
        assert "none of the Pipe's parameters" in words and "give it nn.Parameter(torch.empty(0, 0)) where all" in words


def test_an_lbfgs_in_a_step_is_not_sent_to_a_closure_that_is_refused_too(crew2: Crew) -> None:
    for words in crew2.run("rank_steps:lbfgs_in_a_step"):
        assert re.search(REFUSED["LBFGS"], words), words


def test_an_optimizer_that_is_not_torchs_may_combine_parameters_and_a_rank_has_some_of_them(crew2: Crew) -> None:
    for said, others, own in crew2.run("rank_steps:optimizers_of_others"):
        assert len(said) == 4 and not others, (said, others)
        for words in said:
            assert words.startswith("Lion.step is not one of torch.optim's, and of the Pipe this rank has "), words
            assert own[0] in words and own[-1] in words and "Prodigy" in words and "devices=[...]" in words


WHOLE = "is not that of all gradients: other ranks have the other layers of the Pipe.* on every rank"
REFUSED = {
    "torch's": WHOLE, "imported before": WHOLE, "of a list": WHOLE, "of groups": WHOLE, "of some": WHOLE,
    "of one": WHOLE, "of weights": WHOLE,
    "of a layer": WHOLE + ".*one layer's own.*torch.linalg.vector_norm and torch.nn.utils.clip_grads_with_norm_",
    "of a module around": WHOLE, "the norm alone": r"\.weight, .*Call pipe\.clip_grad_norm_\(max_norm\) on every",
    "of a store": r"Call store\.assign\(\) and pipe\.clip_grad_norm_\(max_norm\), or step\(.*clip_grad_norm=\), on",
    "whether a store is finite": r"one rank would skip the step.*scaler=.*ReduceOp\.MIN decide for all",
    "LBFGS": r"LBFGS takes inner products over all parameters, and this rank has only its own.*devices=\[\.\.\.\]",
    **dict.fromkeys(
        ["a scaler's step", "a scaler's step, fused", "a scaler's unscale_"],
        r"one rank would skip the step.*Call pipe\.step\(x, y, .*optimizer=optimizer, scaler=scaler\) on every rank",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_the_norm_of_one_ranks_part_is_not_taken_for_that_of_all(crew2: Crew, how: str) -> None:
    for words, of_copy, changed in crew2.run("rank_steps:whole_norm", how):
        assert re.search(REFUSED[how], words), words
        assert of_copy == words and changed == []


def test_norms_that_need_no_other_ranks_gradients_are_those_of_one_process(crew2: Crew) -> None:
    agree_all(crew2, "rank_steps:part_norms", [(how,) for how in ("layer", "value", "others")])


def test_two_pipes_share_the_ranks_and_one_may_feed_the_other(crew2: Crew, crew3: Crew) -> None:
    agree(crew2, "rank_steps:two_pipes", 2)
    agree(crew3, "rank_steps:two_pipes", 3)
