"""Checks of a program's messages, for programs whose computation is right.

                ┌─► there     each result that another lane needs is sent once, by its lane, after it is computed;
                │             and received once, by the other lane, before it is needed; nothing else travels
    program  ───┼─► order     both ends of each channel have its messages in one order
                └─► end       no lane waits for ever, if a send waits until its receive is posted (rendezvous.py)
"""

from collections.abc import Iterator

from scheduler.action import COMPUTE, Action
from scheduler.faults import Fault
from scheduler.programs.messages import Messages, messages
from scheduler.programs.program import Program, other_end
from scheduler.programs.rendezvous import stuck_lanes

__all__ = ["message_faults"]


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
    due: dict[Action, Action] = {}  # a send that is to come -> what it sends
    sent: set[Action] = set()
    receive_at: dict[Action, int] = {}  # receives, and where
    late: dict[Action, Action] = {}  # a receive that was not there yet -> what needed it
    used: set[Action] = set()
    odd: list[tuple[int, Action]] = []
    for position, action in enumerate(program.orders[lane]):
        stage, kind, chunk = action
        if kind in COMPUTE:
            if (stage, kind) in travels.received:
                receive = Action(stage, travels.received[stage, kind], chunk)
                if receive in receive_at:
                    used.add(receive)
                else:
                    late[receive] = action
            for route in travels.sent.get((stage, kind), ()):
                due[Action(stage, route.send, chunk)] = action
        elif action in due:
            del due[action]
            sent.add(action)
        elif kind.is_send or action in receive_at:
            odd.append((position, action))
        else:
            receive_at[action] = position
    for position, action in odd:
        if action in due:
            words = f"lane {lane} runs {action} before {due.pop(action)}, whose result it sends: put it after."
        elif action in receive_at or action in sent:
            words = f"lane {lane} runs {action}, which has run before: drop one of them."
        else:
            words = f"lane {lane} runs {action}, but there is no such message: drop it."
        yield Fault(words, lane, position)
    for send, action in due.items():
        yield Fault(f"{send} is missing, the result of {action}: add it to lane {lane} after {action}.")
    for receive, action in late.items():
        if receive in receive_at:
            words = f"lane {lane} runs {receive} after {action}, which needs it: put it before."
            yield Fault(words, lane, receive_at[receive])
        else:
            yield Fault(f"{receive} is missing, which {action} needs: add it to lane {lane} before {action}.")
    for receive in [receive for receive in receive_at if receive not in used and receive not in late]:
        words = f"lane {lane} runs {receive}, but there is no such message: drop it."
        yield Fault(words, lane, receive_at[receive])


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
