import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasnn.schedule import Action, Kind
from megasnn.schedule.actions import OF_NO_MICRO_BATCH, RECEIVES, SENDS

actions = st.sampled_from(Kind).flatmap(
    lambda kind: st.builds(
        Action, st.integers(1, 300), st.just(kind), st.none() if kind in OF_NO_MICRO_BATCH else st.integers(0, 300)
    )
)


@given(actions)
def test_what_is_printed_parses_back_and_transfers_know_their_other_end(action: Action) -> None:
    assert Action.parse(str(action)) == action
    if action.kind in SENDS | RECEIVES:
        assert action.peer.peer == action and (action.peer.kind in SENDS) != (action.kind in SENDS)
    else:
        with pytest.raises(ValueError, match=str(action)):
            _ = action.peer


def test_the_notation_is_that_of_torch_pipelining() -> None:
    from torch.distributed.pipelining.schedules import _Action

    for text in ("2F0", "1B3", "1I3", "1W3", "0SEND_F2", "2RECV_F1", "1SEND_B0", "2RECV_B1", "3UNSHARD", "3RESHARD"):
        assert str(_Action.from_str(text)) == str(Action.parse(text)) == text
    assert str(Action(0, Kind.REDUCE_GRAD)) == "0REDUCE_GRAD"


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2F0 1B3", "-1F0", "0REDUCE_GRAD1", "3UNSHARD1", "3RESHARD1", "3REDUCE_SCATTER"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Action.parse(text)
