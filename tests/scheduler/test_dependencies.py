from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import depends, pieces, schedules

from scheduler import Action, requires


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_requires_is_the_relation_over_all_pairs_of_actions(stages, chunks, random):
    everything = [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
    split = frozenset(pair for pair in everything if random.random() < 0.5)
    actions = list(pieces(stages, chunks, split))
    for action in actions:
        expected = {other for other in actions if depends(action, other, stages)}
        needs = requires(action, stages, split)
        assert set(needs) == expected
        assert len(needs) == len(expected)


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules())
def test_what_an_action_requires_is_in_the_schedule(schedule):
    actions = set(schedule.actions)
    assert all(actions.issuperset(requires(action, schedule.stages, schedule.split)) for action in actions)


def test_a_skip_waits_through_the_chain():
    """Why skips need no rows: F of stage 3 comes after F of stage 0, B of stage 0 after B of stage 3."""
    assert Action.parse("0F0") in everything_before(Action.parse("3F0"), 4)
    assert Action.parse("3B0") in everything_before(Action.parse("0B0"), 4)


def everything_before(action, stages):
    needs = requires(action, stages)
    return set(needs).union(*(everything_before(need, stages) for need in needs))
