"""A check that all lanes run their programs to the end if a send waits until its receive is posted.

    lane 0: 0F0 0SEND_F0 ...        runs each lane as far as it gets, by the rules of program.py
    lane 1: 1RECV_F0 1F0 ...        ──►  a fault for each lane that waits for ever: where, and for what

Every message is taken for itself. That is right where both ends of each channel have its messages in one order; else
the transport would mix them up before anything is stuck, and verification.py says so.
"""

from scheduler.action import Action
from scheduler.faults import Fault
from scheduler.programs.messages import messages
from scheduler.programs.program import Program, other_end


def stuck_lanes(program: Program, receives_wait: bool = False) -> list[Fault]:
    """Runs every lane as far as it gets, in time proportional to the length of the program.

    Args:
        program: one that sends and receives each message once
        receives_wait: whether a receive, too, waits until its message is there

    Returns:
        A fault for each lane that is stuck; none where the program ends.

    >>> program = Program.parse('''
    ...     program mine, chunks 2, stages on lanes 0 1
    ...     lane 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    ...     lane 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    ... ''')
    >>> for fault in stuck_lanes(program):
    ...     print(fault.words)
    cannot end: lane 0 waits at 0SEND_F1 for 1RECV_F1, which lane 1 comes to after 1SEND_B0.
    cannot end: lane 1 waits at 1SEND_B0 for 0RECV_B0, which lane 0 comes to after 0SEND_F1.
    """
    received = messages(program.placement).received
    reached: set[Action] = set()  # sends and receives; what waits for one waits until its lane has come to it
    position = [0] * program.lanes
    sleepers: dict[Action, list[int]] = {}
    awake = list(reversed(range(program.lanes)))
    while awake:
        lane = awake.pop()
        order = program.orders[lane]
        for at in range(position[lane], len(order)):
            action, need = order[at], None
            kind = action.kind
            if kind.is_send or kind.is_receive:
                reached.add(action)
                if action in sleepers:
                    awake += sleepers.pop(action)
                if receives_wait or kind.is_send:
                    need = other_end(action)
            elif (action.stage, kind) in received:
                need = other_end(Action(action.stage, received[action.stage, kind], action.chunk))
            if need is not None and need not in reached:
                sleepers.setdefault(need, []).append(lane)
                position[lane] = at
                break
        else:
            position[lane] = len(order)
    waits = {lane: need for need, lanes in sleepers.items() for lane in lanes}
    return [_wait(program, position, lane, waits[lane]) for lane in sorted(waits)]


def _wait(program: Program, position: list[int], lane: int, need: Action) -> Fault:
    at, runner = position[lane], next(lane for lane, order in enumerate(program.orders) if need in order)
    return Fault(
        f"cannot end: lane {lane} waits at {program.orders[lane][at]} for {need}, which lane {runner} comes to after "
        f"{program.orders[runner][position[runner]]}.", lane, at
    )
