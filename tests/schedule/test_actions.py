import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasnn.schedule import Action, Kind
from megasnn.schedule.actions import COMPUTE, MOVES, SENDS

transfers_and_computing = st.builds(
    Action,
    st.integers(0, 300),
    st.sampled_from([kind for kind in Kind if kind is not Kind.SYNC_GRADIENTS]),
    st.integers(0, 300),
)
syncs = st.builds(Action, st.integers(0, 300), st.just(Kind.SYNC_GRADIENTS), st.none())
actions = transfers_and_computing | syncs


@given(actions)
def test_what_is_printed_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.FORWARD, 0)),
        ("1B3", Action(1, Kind.BACKWARD, 3)),
        ("0SEND_F2", Action(0, Kind.SEND_FORWARD, 2)),
        ("2RECV_B1", Action(2, Kind.RECV_BACKWARD, 1)),
        ("0SYNC", Action(0, Kind.SYNC_GRADIENTS)),
    ],
)
def test_notation(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 1B3", "-1F0", "0SYNC1", "2f0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Action.parse(text)


@given(transfers_and_computing.filter(lambda a: a.kind not in COMPUTE | MOVES and a.chunk > 0))
def test_the_two_ends_of_a_transfer_know_each_other(action: Action) -> None:
    assert action.peer.peer == action
    assert (action.peer.kind in SENDS) != (action.kind in SENDS)


def test_computing_has_no_other_end() -> None:
    with pytest.raises(ValueError, match="2F0"):
        _ = Action.parse("2F0").peer
