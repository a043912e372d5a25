import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Action, Kind, ScheduleError
from scheduler.action import COMPUTE

actions = st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6))


@settings(derandomize=True, deadline=None)
@given(actions)
def test_an_action_is_printed_as_it_is_parsed(action):
    assert Action.parse(str(action)) == action
    assert isinstance(Action.parse(str(action)).kind, Kind)


def test_an_action_is_written_stage_kind_chunk():
    assert [str(Action(2, kind, 10)) for kind in COMPUTE] == ["2F10", "2B10", "2I10", "2W10"]
    assert str(Action(1, Kind.RECV_F, 3)) == "1RECV_F3"


WRONG = ["", "F0", "2F", "2F0xyz", " 2F0", "2F0\n", "2X0", "2f0", "-2F0", "02F0", "2F00", "²F0"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_exactly_an_action_is_refused_with_its_text(text):
    with pytest.raises(ScheduleError, match="is not an action. Write stage, kind and chunk .* 2F0") as error:
        Action.parse(text)
    assert repr(text) in str(error.value)


def test_the_backward_kinds_are_those_that_make_an_input_gradient():
    assert {kind for kind in Kind if kind.is_backward} == {Kind.B, Kind.I}
