"""Laws: a model that `to_sequential` has cut trains over ranks to the bits of one process, and loads there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cover import either, pairwise
from crew import Crew
from families import FAMILIES, of_family
from one_and_many import agree_all

CASES = [
    ("gpt", "1f1b", "always"), ("diffusion", "zb-h1", "never"), ("experts", "gpipe", "except_last"),
    ("resnet", "1f1b", "except_last"), ("lstm", "gpipe", "always"), ("unet", "1f1b", "always"),
    ("unet of lists", "zb-h1", "never"), ("llama with adapters", "zb-h1", "always"),
    ("numbers", "1f1b", "always"), ("decides", "zb-h1", "except_last"), ("repeats", "zb-h1", "always"),
    ("states", "gpipe", "except_last"),
]  # fmt: skip


def test_cut_models_train_over_ranks_as_in_one_process(crew2: Crew, crew3: Crew) -> None:
    for crew, cases in ((crew2, CASES), (crew3, either(CASES[1::2], CASES))):
        agree_all(crew, "rank_cut:trained", [
            (name, crew.size, schedule, checkpoint) for name, schedule, checkpoint in cases
        ])  # fmt: skip


def test_a_pipe_over_ranks_has_the_modes_that_its_model_was_told(crew2: Crew) -> None:
    agree_all(crew2, "rank_cut:told_modes", [(is_cut, crew2.size) for is_cut in (True, False)])


ROWS = pairwise({
    "family": either(["T5ForConditionalGeneration"], list(FAMILIES)),
    "stages": (2, 3),
    "schedule": either(("1f1b", "zb-h1"), ("1f1b", "gpipe", "zb-h1")),
    "checkpoint": ("always", "except_last", "never"),
    "dtype": (None, torch.bfloat16),
})  # fmt: skip


@pytest.mark.soak
def test_families_train_over_ranks_as_in_one_process_and_go_on_after_loading(crew2: Crew) -> None:
    agree_all(crew2, "rank_families:trained", [tuple(row.values()) for row in ROWS], timeout=either(120.0, 600.0))


def test_each_rank_loads_its_own_blocks_from_a_folder(crew2: Crew, tmp_path: Path) -> None:
    families = ("LlamaForCausalLM", "GPT2LMHeadModel")  # in the second's file a tied weight has one of its names
    for family in families:
        of_family(family)[0].save_pretrained(tmp_path / family, max_shard_size="20KB")
    agree_all(crew2, "rank_cut:loaded", [(family, str(tmp_path / family), crew2.size) for family in families])
