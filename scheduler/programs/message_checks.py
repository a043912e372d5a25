"""Checks of a program's messages, for programs whose computation is right.

                ┌─► there     each result that another lane needs is sent once, by its lane, after it is computed;
                │             and received once, by the other lane, before it is needed; nothing else travels
    program  ───┼─► order     both ends of each channel have its messages in one order
                └─► end       no lane waits for ever, if a send waits until its receive is posted (rendezvous)
"""

from collections.abc import Iterator

from scheduler.action import COMPUTE, Action
from scheduler.faults import Fault
from scheduler.programs.messages import Messages, messages
from scheduler.programs.program import Program, other_end


def message_faults(program: Program) -> list[Fault]:
    """All faults of the messages.

    Args:
        program: one whose schedule is right

    >>> program = Program.parse('''
    ...     program mine, chunks 1, stages on lanes 0 1
    ...     lane 0: 0SEND_F0 0F0 0RECV_B0 0B0
    ...     lane 1: 1F0 1B0 1SEND_B0
    ... ''')
    >>> for fault in message_faults(program):
    ...     print(fault.words)
    lane 0 runs 0SEND_F0 before 0F0, whose result it sends: put it after.
    1RECV_F0 is missing, which 1F0 needs: add it to lane 1 before 1F0.
    """
    travels = messages(program.placement)
    faults = [fault for lane in range(program.lanes) for fault in _there(program, lane, travels)]
    faults = faults or list(_in_order(program))
    return faults or stuck_lanes(program)


def _there(program: Program, lane: int, travels: Messages) -> Iterator[Fault]:
    position_of: dict[Action, int] = {}
    computed_at: dict[Action, Action] = {}  # a message, and the action that gives or needs it
    for position, action in enumerate(program.orders[lane]):
        stage, kind, chunk = action
        if position_of.setdefault(action, position) < position:
            yield Fault(f"lane {lane} runs {action}, which has run before: drop one of them.", lane, position)
        if (stage, kind) in travels.received:
            computed_at[Action(stage, travels.received[stage, kind], chunk)] = action
        for route in travels.sent.get((stage, kind), ()):
            computed_at[Action(stage, route.send, chunk)] = action
    for message, action in computed_at.items():
        is_send = message.kind.is_send
        side, role = ("after", f"the result of {action}") if is_send else ("before", f"which {action} needs")
        if message not in position_of:
            yield Fault(f"{message} is missing, {role}: add it to lane {lane} {side} {action}.")
        elif (position_of[message] < position_of[action]) is is_send:
            wrong = f"before {action}, whose result it sends" if is_send else f"after {action}, which needs it"
            yield Fault(f"lane {lane} runs {message} {wrong}: put it {side}.", lane, position_of[message])
    for message, position in position_of.items():
        if message.kind not in COMPUTE and message not in computed_at:
            yield Fault(f"lane {lane} runs {message}, but there is no such message: drop it.", lane, position)


def _in_order(program: Program) -> Iterator[Fault]:
    for (sender, receiver), channel in program.channels().items():
        for number, (send, receive) in enumerate(zip(channel.sends, channel.receives, strict=True)):
            if other_end(send) != receive:
                yield Fault(
                    f"channel from lane {sender} to lane {receiver}: its message {number} is sent as {send} and "
                    f"received as {receive}. Put {other_end(send)} there, or {other_end(receive)}.",
                    receiver, program.orders[receiver].index(receive),
                )
                break  # what follows is displaced


def stuck_lanes(program: Program) -> list[Fault]:
    """Runs every lane as far as it gets, in time proportional to the length of the program.

    Every message is taken for itself. That is right where both ends of each channel have its messages in one order;
    else the transport would mix them up before anything is stuck.

    Args:
        program: one that sends and receives each message once, and receives it before it is needed

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
    done: set[Action] = set()
    position = [0] * program.lanes
    sleepers: dict[Action, list[int]] = {}
    awake = list(reversed(range(program.lanes)))
    while awake:
        lane = awake.pop()
        while position[lane] < len(program.orders[lane]):
            action = stage, kind, chunk = program.orders[lane][position[lane]]
            receive = received.get((stage, kind))
            message = action if kind.is_send else receive and Action(stage, receive, chunk)
            if message and other_end(message) not in done:
                sleepers.setdefault(other_end(message), []).append(lane)
                break
            done.add(action)
            awake += sleepers.pop(action, ())
            position[lane] += 1
    waits = {lane: need for need, lanes in sleepers.items() for lane in lanes}
    return [_wait(program, position, lane, waits[lane]) for lane in sorted(waits)]


def _wait(program: Program, position: list[int], lane: int, need: Action) -> Fault:
    at, runner = position[lane], next(lane for lane, order in enumerate(program.orders) if need in order)
    return Fault(
        f"cannot end: lane {lane} waits at {program.orders[lane][at]} for {need}, which lane {runner} comes to after "
        f"{program.orders[runner][position[runner]]}.", lane, at
    )
