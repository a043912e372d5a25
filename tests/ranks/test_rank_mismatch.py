"""Scripts that differ between the ranks are refused on every rank, in words that name the difference; no rank hangs."""

from __future__ import annotations

import re

import pytest
from crew import Crew

# What differs, as {odd} has it and {even} have it.
WORDS = {
    "balance": r"the settings differ.*{odd}: balance \[.*{even}: balance \[",
    "chunks": "the settings differ.*{odd}: chunks 4.*{even}: chunks 3",
    "schedule": "the settings differ.*{odd}: schedule gpipe.*{even}: schedule 1f1b",
    "checkpoint": "the settings differ.*{odd}: checkpoint never.*{even}: checkpoint always",
    "deferred": "the settings differ.*{odd}: deferred_batch_norm True.*{even}: deferred_batch_norm False",
    "shape": r"the settings differ.*{odd}: 4.weight: \[5, 4\].*{even}: 4.weight: \[4, 4\]",
    "dtype": r"the settings differ.*{odd}: 0.weight: \[4, 4\] float32.*{even}: 0.weight: \[4, 4\] float64",
    "tie": "the settings differ.*{even}: 7.weight",
    **dict.fromkeys(
        ["tied_values", "late_tied_values"],
        "the tied parameter '0.weight' = .* has other values, or another requires_grad, on rank 0",
    ),
    "later_tie": "parameter '[047].weight' of another rank's layer was put into .*build the Pipe anew",
    **dict.fromkeys(
        ["later_untie", "later_tie_of_tied", "later_parametrized", "assigned"],
        "parameter '0.weight' in this rank's layers was replaced, or tied to one more, .*build the Pipe anew",
    ),
    "later_shared": "'parametrizations.weight.0.gain' joined this rank's layers and another rank's .*the Pipe anew",
    "later_chunks": "the settings differ.*{odd}: chunks 2.*{even}: chunks 3",
    "later_schedule": "the settings differ.*{odd}: schedule gpipe.*{even}: schedule 1f1b",
    "values": "the values of the mini-batches differ.*the same seed on every rank(?!.*not alike)",
    "drawn_apart": "the values of the mini-batches differ.*default generators are not alike.*before Pipe",
    "target_values": "the values of the mini-batches differ.*the same seed on every rank",
    "shuffled": r"the values of the mini-batches differ.*the same seed on every rank.*Sampler.*Pipe\(..., devices=",
    **dict.fromkeys(
        [
            "later_target", "later_labels", "later_input", "later_order", "later_whole", "later_forward",
            "later_evaluate", "later_eager", "late_target", "late_forward", "late_eager",
        ],
        r"the values of the mini-batches differ.*\(digest .*the same seed on every rank",
    ),
    **dict.fromkeys(
        ["other_labels", "other_scale", "other_part"],
        "the gradients of the output differ .*rank 0: norm .*rank 1: norm .*the same targets and weights",
    ),
    **dict.fromkeys(
        ["scale", "first_scale"],
        "the scales of the GradScaler differ(?=.*Load the scaler's state_dict on every rank).*{odd}: 4.0.*{even}: 8.0",
    ),
    "batch": r"the mini-batches differ.*{odd}: x float64\[8, 4\].*{even}: x float64\[7, 4\]",
    "width": r"the mini-batches differ.*{odd}: x float64\[7, 5\].*{even}: x float64\[7, 4\]",
    "batch_count": r"the mini-batches differ.*{odd}: (x|the target) float64.*{even}: (x|the target) float64\[7, 4\]; ",
    "data_set_count": r"the mini-batches differ.*{odd}: none after 2.*{even}: x float64\[7, 4\]",
    "data_set_fails": "OSError: cannot read shard 1",
    "data_set_is_empty": "ValueError: the loader gave no mini-batch",
    "batch_dtype": r"the mini-batches differ.*{odd}: x float32\[7, 4\].*{even}: x float64\[7, 4\]",
    "structure": r"the mini-batches differ.*{odd}: x \(.*{even}: x float64\[7, 4\]",
    "no_target": r"the mini-batches differ.*{odd}: x float64\[7, 4\], the target None[;.].*{even}: x float64",
    "plain_value": "the mini-batches differ.*{odd}: .*'weight': 3.*{even}: .*'weight': 2",
    "entry": "the calls differ.*{odd}: evaluate of.*{even}: step of",
    "forward_or_step": "the calls differ.*{odd}: forward of.*{even}: step of",
    "other_pipe": "the calls differ.*{odd}: step of Pipe 1.*{even}: step of Pipe 0",
    "copied": "the calls differ.*{odd}: step of a copy of Pipe 0.*{even}: step of Pipe 0",
    "no_grad": "the options differ.*{odd}: gradients=off.*{even}: gradients=on",
    "input_grad": "the mini-batches differ.*{odd}: .*with gradient.*{even}: ",
    "options": "the options differ.*{odd}: loss_reduction=sum.*{even}: loss_reduction=mean",
    "loss_function": "the options differ.*{odd}: loss_fn=L1Loss.*{even}: loss_fn=MSELoss",
    "no_optimizer": "the options differ.*{odd}: optimizer=NoneType.*{even}: optimizer=SGD",
    "autocast": "differ.*{odd}: .*autocast.*{even}: ",
    "mode": r"the modes differ(?=.*call pipe\.train\(\) or pipe\.eval\(\), on every rank).*{odd}: eval.*{even}: train",
    "loaded": (
        r"the states differ(?=.*Call pipe\.load_state_dict\(state\) on every rank: each takes its part)"
        ".*{odd}: loaded since the last call with gradients.*{even}: not loaded"
    ),
    "clip": "the arguments differ.*{odd}: 2.0.*{even}: 1.0",
    "clip_nonfinite": "the arguments differ.*{odd}: .*error_if_nonfinite=True.*{even}: .*error_if_nonfinite=False",
    "no_backward": "the calls differ.*{odd}: step of.*{even}: backward of call",
    "no_last_backward": "the calls differ.*{odd}: evaluate of.*{even}: backward of call",
    "other_backward": "the calls differ.*{odd}: backward of call.*{even}: backward of call",
    "retain": "the calls differ.*{odd}: backward of call.*{even}: step of",
    "extra_call": "the calls differ.*{odd}: evaluate of.*{even}: step of",
    "moved_buffer": "a buffer that the forward read was changed before its backward",
}


@pytest.mark.parametrize(("crew", "apart"), [(2, 0), (2, 1), (3, 1)], indirect=["crew"])
@pytest.mark.parametrize("which", WORDS)
def test_a_script_that_differs_on_one_rank_is_refused_on_every_rank_and_the_next_call_is_right(
    crew: Crew, apart: int, which: str
) -> None:
    odd, others = f"rank {apart}", [rank for rank in range(crew.size) if rank != apart]
    even = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    ranks = crew.run("rank_mismatch:mismatch", which, apart, timeout=40.0)
    for words, right_after, _ in ranks:
        assert in_any_order(WORDS[which], odd, even, words), words
        assert right_after
    assert len({drawn for *_, drawn in ranks}) == 1


def in_any_order(pattern: str, odd: str, even: str, words: str) -> bool:
    """Whether words match a pattern; who has the lower number stands first in them."""
    named, *parts = re.split(r"(?=\{(?:odd|even)\})", pattern)
    orders = ([*parts], [*reversed(parts)])
    patterns = [named + ".*".join(part.removesuffix(".*") for part in order) for order in orders]
    return any(re.search(each.replace("{odd}", odd).replace("{even}", even), words, re.DOTALL) for each in patterns)
