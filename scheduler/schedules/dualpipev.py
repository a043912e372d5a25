"""DualPipeV: F of one chunk and B of another as one block, so that one computes while messages of the other travel.

    >>> from scheduler import by_name
    >>> print(by_name("dualpipev", lanes=2, chunks=4))
    schedule dualpipev, chunks 4, stages on lanes 0 1 1 0
    lane 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0I2 0W2 0I3 0W3
    lane 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2I3 1I3 2W3 1W3

It is DualPipe (DeepSeek-AI 2024, arXiv 2412.19437), which has every stage twice, cut in half; the order is that of
github.com/deepseek-ai/DualPipe, file dualpipev.py. Blocks (`Schedule.blocks`, with a "+" above) make up the steady
state; the backward is split where W fill the warm-up and the cool-down. Where F, I and W of a stage take one slot each,
the lanes idle 2 (lanes - 1) slots if what a block gives goes out when the block is over, and half of that, as ZB-V's
do, if it goes out as soon as it is there (`simulate(..., release=...)`). All lanes hold 2 lanes + 1 pairs of stage and
chunk.
"""

from collections import Counter, deque

from scheduler.action import Action, Kind
from scheduler.errors import refuse_unless_filled
from scheduler.placement import Placement
from scheduler.schedule import Schedule


def build(lanes: int, chunks: int) -> Schedule:
    """DualPipeV with two stages a lane.

    Args:
        lanes: how many lanes there are
        chunks: how many chunks a step has, at least twice as many as lanes

    Raises:
        ScheduleError: there are fewer chunks, which could not fill the warm-up and the cool-down.
    """
    refuse_unless_filled("dualpipev", "its warm-up and its cool-down", lanes, chunks, "zb-v")
    rows = [_cells(_words(lane, lanes, chunks), (lane, 2 * lanes - 1 - lane)) for lane in range(lanes)]
    return Schedule.of_cells("dualpipev", Placement.vee(lanes), chunks, rows)


def _words(lane: int, lanes: int, chunks: int) -> list[str]:
    """The order of a lane but for the chunks. 0 is its stage on the way there, 1 the one on the way back; W is that of
    the oldest I that has had none; "+" joins a block."""
    after = lanes - 1 - lane
    steady = ["F0+B1", "F1+B0"] * (chunks - 2 * lanes + lane + 1)
    if after == 0:
        steady[:1] = ["F0", "B1"]  # the lane before waits for this B1
    return [
        *["F0"] * (2 * after),
        *["F0", "F1"] * (lane + 1),
        *["I1", "W", "F1"] * after,
        *steady,
        *["B1", "F1+B0"] * after,
        *(f"{'B' if at <= lane else 'I'}{stage}" for at, stage in enumerate([1, 0] * (lane + 1))),
        *["W", "I0"] * after,
        *["W"] * (lane + 1),
    ]


def _cells(words: list[str], stages: tuple[int, int]) -> list[list[Action]]:
    """Chunks ascend, for each stage and direction."""
    chunks: Counter[tuple[int, bool]] = Counter()
    waiting: deque[Action] = deque()

    def action_of(word: str) -> Action:
        if word == "W":
            return waiting.popleft()._replace(kind=Kind.W)
        kind, stage = Kind(word[0]), stages[int(word[1])]
        action = Action(stage, kind, chunks[stage, kind.is_backward])
        chunks[stage, kind.is_backward] += 1
        if kind is Kind.I:
            waiting.append(action)
        return action

    return [list(map(action_of, word.split("+"))) for word in words]


BUILDERS = {"dualpipev": build}
