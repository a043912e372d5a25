"""Law: a call over ranks gives what it gives in one process, whatever calls came before it, or both refuse it.

test_programs.py holds that of one process to the plain module.
"""

from __future__ import annotations

import pytest
from cover import examples
from crew import Crew
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program, programs
from rank_programs import CALLS

# By autograd, in one process, where stages hand on views: what one has saved another writes, or is at an odd place.
OF_VIEWS = ("inplace operation", "storage_offset")


def check(crew: Crew, program: Program) -> None:
    for rank, (wrong, refusal, alone) in enumerate(crew.run("rank_programs:compare", program)):
        assert not wrong, f"rank {rank}: {wrong[0]}"
        assert bool(refusal) == bool(alone) or any(words in alone for words in OF_VIEWS), (rank, refusal, alone)


@pytest.mark.probes
@settings(max_examples=examples(300))
@given(data=st.data())
def test_calls_over_ranks_whose_layers_change_are_those_of_one_process_or_refused(
    crew2: Crew, crew3: Crew, data: st.DataObject
) -> None:
    crew = data.draw(st.sampled_from([crew2, crew3]))
    check(crew, data.draw(programs(ranks=crew.size, calls=tuple(CALLS))))
