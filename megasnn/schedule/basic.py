"""The schedules with one chunk per pipeline rank, and evaluation, as computing alone; `passes` adds the rest.

Each function is a whole schedule. Micro-batches run backward in ascending order in all of them, so
gradients are accumulated in the same order and every schedule gives the same bits.
"""

from __future__ import annotations

from megasnn.schedule.actions import Action, Kind, Schedule


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965). Holds the activations of every micro-batch."""
    actions = tuple(
        tuple(
            [Action(stage, Kind.FORWARD, m) for m in range(micro_batches)]
            + [Action(stage, Kind.BACKWARD, m) for m in range(micro_batches)]
        )
        for stage in range(stages)
    )
    return Schedule("gpipe", tuple(range(stages)), micro_batches, actions)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn (PipeDream-flush, arXiv 2006.09503).

    As fast as GPipe, but stage s holds the activations of min(stages - s, micro_batches) micro-batches only.
    """
    actions = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        steady = micro_batches - warm_up
        order = [Action(stage, Kind.FORWARD, m) for m in range(warm_up)]
        for m in range(steady):
            order.append(Action(stage, Kind.FORWARD, warm_up + m))
            order.append(Action(stage, Kind.BACKWARD, m))
        order += [Action(stage, Kind.BACKWARD, m) for m in range(steady, micro_batches)]
        actions.append(tuple(order))
    return Schedule("1f1b", tuple(range(stages)), micro_batches, tuple(actions))


def forward_only(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Evaluation on any placement: a rank takes what is ready, the chunk nearest to the end first."""
    chunks = len(placement)
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done = [0] * chunks  # micro-batches that each chunk has computed
    while done[-1] < micro_batches:
        ready = {placement[c]: c for c in range(chunks) if done[c] < (done[c - 1] if c else micro_batches)}
        for rank, chunk in ready.items():
            rows[rank].append(Action(chunk, Kind.FORWARD, done[chunk]))
        for chunk in ready.values():
            done[chunk] += 1
    return Schedule("forward", placement, micro_batches, tuple(map(tuple, rows)), forward_only=True)
