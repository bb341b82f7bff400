import pytest
from torch.distributed.pipelining.schedules import _Action

from megasnn.schedule import Action, Kind
from megasnn.schedule.actions import RECEIVES, SENDS
from tests.schedule.test_passes import parsed


def test_transfers_know_their_other_end() -> None:
    for kind in Kind:
        action = Action(3, kind, 7)
        if kind in SENDS | RECEIVES:
            assert action.peer.peer == action and (action.peer.kind in SENDS) != (kind in SENDS)
        else:
            with pytest.raises(ValueError, match=str(action)):
                _ = action.peer


def test_the_notation_is_that_of_torch_pipelining() -> None:
    for text in ("2F0", "1B3", "1I3", "1W3", "0SEND_F2", "2RECV_F1", "1SEND_B0", "2RECV_B1", "3UNSHARD", "3RESHARD"):
        ((action,),) = parsed(text)
        assert str(_Action.from_str(text)) == str(action) == text
    assert str(Action(0, Kind.REDUCE_GRAD)) == "0REDUCE_GRAD"
