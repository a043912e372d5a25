"""Law: a model that `to_sequential` has cut trains over ranks to the bits of one process."""

from __future__ import annotations

from crew import Crew
from one_and_many import agree_all

CASES = [
    ("gpt", "1f1b", "always"), ("diffusion", "zb-h1", "never"), ("experts", "gpipe", "except_last"),
    ("resnet", "1f1b", "except_last"), ("lstm", "gpipe", "always"), ("unet", "1f1b", "always"),
    ("unet of lists", "zb-h1", "never"), ("llama with adapters", "zb-h1", "always"),
]  # fmt: skip


def test_cut_models_train_over_ranks_as_in_one_process(crew2: Crew, crew3: Crew) -> None:
    for crew in (crew2, crew3):
        agree_all(crew, "rank_cut:trained", [
            (name, crew.size, schedule, checkpoint) for name, schedule, checkpoint in CASES
        ])  # fmt: skip
