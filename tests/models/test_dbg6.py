from tests.models.test_by_channel import *
from tests.models.test_by_channel import _whole, _steps, _placed
import math
def test_dbg(ranks):
    (one,), two = ranks(1, _steps, Layout()), ranks(2, _steps, Layout(tensor=2))
    for way, step in one.items():
        steps = [each[way] for each in two]
        if isinstance(step, str): print(way, step[:150], "|", [str(s)[:150] for s in steps]); continue
        w = _whole(Of(way=way))
        try:
            assert_equal(steps, [step])
        except BaseException as e:
            print("BAD", way, w, step.loss, step.norm, step.spikes, [(s if isinstance(s,str) else (s.loss, s.norm, s.spikes)) for s in steps], repr(e)[:200])
        if ("way" in w) != (way in MIXING): print("WHOLE?", way, w)
    (one,), two = ranks(1, _placed, Layout()), ranks(2, _placed, Layout(tensor=2))
    for name, step, *steps in zip(PLACED, one, *two, strict=True):
        try:
            assert_equal(steps, [step])
        except BaseException as e:
            print("BAD", name, step.loss, step.norm, step.spikes, [(s.loss, s.norm, s.spikes) for s in steps], repr(e)[:200])
        print(name, _whole(PLACED[name]))
    assert 0
