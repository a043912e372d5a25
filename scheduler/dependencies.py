"""The dependencies of an action: what must have run before it. No other file states them.

    0F0 ──► 1F0 ──► 2F0          F  waits for F of the stage before
     │       │       │
     ▼       ▼       ▼           B, I  wait for their own F, and for the backward of the stage after:
    0B0 ◄── 1I0 ◄── 2B0                its I where that backward is split into I and W, else its B
             │
             ▼                   W  waits for its own I
            1W0

`verify`, `simulate`, `draw`, the lowering, the engine's waiting and every message that explains a wait read this.
What an action waits for is of its own chunk, and depends on nothing of that chunk but whether the backward of the stage
after is split: so eight questions for each stage answer for all chunks (simulation.py asks them).

Skip connections and tied weights need no rows of their own. A skip goes from stage s to a later stage t: F of t waits
for F of s through the chain of F between them, and the gradient comes back along the chain of B. Stages that share a
weight read a value that no action of the step changes, and add into sums of their own.
"""

from scheduler.action import COMPUTE, Action


def requires(action: Action, stages: int, split: frozenset[tuple[int, int]] = frozenset()) -> tuple[Action, ...]:
    """The actions that `action` waits for directly; those that these wait for are left out.

    Args:
        action: the action that is to run
        stages: how many stages the model is cut into
        split: the (stage, chunk) pairs whose backward is I and W; for all others it is B

    Returns:
        At most two actions of the same chunk.

    >>> [str(need) for need in requires(Action.parse("1B0"), stages=3)]
    ['1F0', '2B0']
    >>> [str(need) for need in requires(Action.parse("1B0"), stages=3, split=frozenset({(2, 0)}))]
    ['1F0', '2I0']
    """
    stage, kind, chunk = action
    if kind is _F:
        return (Action(stage - 1, _F, chunk),) if stage > 0 else ()
    if kind is _W:
        return (Action(stage, _I, chunk),)
    forward = Action(stage, _F, chunk)
    if stage == stages - 1:
        return (forward,)
    return forward, Action(stage + 1, _I if (stage + 1, chunk) in split else _B, chunk)


# Looking up Kind.F on the enum class takes as long as the rest of a call, and everything calls this for every action.
_F, _B, _I, _W = COMPUTE
