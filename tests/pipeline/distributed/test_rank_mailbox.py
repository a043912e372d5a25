"""The mailbox over ranks: every value comes to its readers as in one process, and its memory is known for the same."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeline import Pipe
from pipeline.common.places import Place
from pipeline.data.pytrees import Activations, Tree
from pipeline.data.values import CALLER, chain
from pipeline.distributed.mailbox import RankMailbox
from pipeline.execution.mailbox import Mailbox, written_until
from pipeline.execution.p2p_plan import P2PPlan
from pipeline.skip import Key, pop, skippable, stash
from pipeline.transports.local import Local
from pipeline.transports.message import Message
from scheduler import Placement, by_name

SKIPS = ((Key(None, "near"), 0, 1), (Key(None, "far"), 0, 3), (Key(None, "late"), 1, 3))
STAGES, CHUNKS = 4, 3


class Link:
    """Both ends of a link: each message is sent once and taken once, under a name that both ends expect."""

    def __init__(self) -> None:
        self.under_way: dict[str, Message] = {}
        self.expected: set[tuple[str, ...]] = set()
        self.position, self.arrived = 0, 0.0

    def begin(self, series: str, names: list[str]) -> None:
        self.expected.add((series, *names))

    def send(self, name: str, message: Message) -> None:
        assert name not in self.under_way and all(name in names for names in self.expected)
        self.under_way[name] = message

    def receive(self, name: str) -> Message:
        self.position += 1
        return self.under_way.pop(name)

    def reap(self, count: int) -> None:
        pass

    def finish(self) -> None:
        assert not self.under_way and len(self.expected) == 1


class Ranks:
    """What a mailbox knows of a RankGroup and of its connections."""

    def __init__(self, rank: int, links: dict[tuple[int, int], Link]) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.monitor = SimpleNamespace(at=("an action",))
        self.connections, self._links = self, links

    def connect(self, pairs) -> None:
        """There are no devices."""

    def sender(self, to: int) -> Link:
        return self._links[self.rank, to]

    def receiver(self, source: int) -> Link:
        return self._links[source, self.rank]

    def finish(self, to: int) -> None:
        self.sender(to).finish()


def mailboxes(rank_of):
    values = chain(STAGES, SKIPS)
    orders = [[] for _ in range(max(rank_of) + 1)]
    for action in by_name("gpipe", 1, CHUNKS).orders[0]:
        for stage in range(STAGES):
            orders[rank_of[stage]].append(action._replace(stage=stage))
    links: defaultdict[tuple[int, int], Link] = defaultdict(Link)
    ranks = range(len(orders))
    boxes = [RankMailbox(values, rank_of, Ranks(rank, links), "series", Local()) for rank in ranks]
    for rank, box in enumerate(boxes):
        box.begin(0, P2PPlan(orders, values, Placement(rank_of), rank))
    return values, links, boxes


def message(number: float, memory=()) -> Activations:
    return Activations(Tree((torch.tensor([number]),), None), (True,), memory)


@pytest.mark.parametrize("rank_of", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 2, 0)])
def test_values_and_gradients_come_to_their_readers_as_in_one_process(rank_of) -> None:
    values, links, boxes = mailboxes(rank_of)
    places = dict.fromkeys(range(STAGES), Place(torch.device("cpu")))
    reference = Mailbox(values, places, Local())
    for chunk in range(CHUNKS):
        for box in (boxes[rank_of[0]], reference):
            box.put(CALLER, chunk, [message(chunk)])
        for stage in range(STAGES):
            ours, theirs = boxes[rank_of[stage]].take(stage, chunk), reference.take(stage, chunk)
            assert [one.tree.tensors[0].item() for one in ours] == [one.tree.tensors[0].item() for one in theirs]
            made = [message(100 * chunk + 10 * stage + index) for index in range(len(values.made_by[stage]))]
            boxes[rank_of[stage]].put(stage, chunk, made)
            reference.put(stage, chunk, made)
        assert not any(link.under_way for link in links.values())
        boxes[rank_of[-1]].take(CALLER, chunk)
    for chunk in range(CHUNKS):
        for box in (boxes[rank_of[-1]], reference):
            box.put_grads(CALLER, chunk, [(torch.tensor([1.0]),)])
        for stage in reversed(range(STAGES)):
            ours, theirs = boxes[rank_of[stage]].take_grads(stage, chunk), reference.take_grads(stage, chunk)
            assert ours == theirs
            grads = [(torch.tensor(float(stage)), None) for _ in values.read_by[stage]]
            boxes[rank_of[stage]].put_grads(stage, chunk, grads)
            reference.put_grads(stage, chunk, grads)
        boxes[rank_of[0]].take_grads(CALLER, chunk)
    assert not any(len(box) for box in boxes)
    for box in boxes:
        box.end()


@pytest.mark.parametrize("rank_of", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1)])
def test_memory_that_a_stage_writes_is_known_to_all_later_stages_whatever_way_it_came(rank_of) -> None:
    """Stage 0 gives one memory to stages 1 and 3; stage 1 stashes it again, for stage 3 too; stage 2 writes another."""
    _, _, of_ranks = mailboxes(rank_of)
    boxes = [of_ranks[rank] for rank in rank_of]
    shared, own = (0, 0, 0), (0, 0, 1)
    boxes[0].put(0, 0, [message(1.0, (shared,)), message(2.0, (own,)), message(3.0, (shared,))])
    inbox = boxes[1].take(1, 0)
    written = written_until("stage 1", inbox, True)
    assert written == ((shared, "stage 1"), (own, "stage 1"))
    boxes[1].put(1, 0, [message(4.0, ((1, 0, 0),))._replace(written=written), message(5.0, (shared,))])
    inbox = boxes[2].take(2, 0)
    assert written_until("stage 2", inbox, False) == written
    written = written_until("stage 2", inbox, True)
    assert written[2:] == (((1, 0, 0), "stage 2"),)
    boxes[2].put(2, 0, [message(6.0)._replace(written=written)])
    with pytest.raises(RuntimeError, match="stage 1 writes its input in place, and another tensor .* stash a clone"):
        written_until("stage 3", boxes[3].take(3, 0), False)


def test_two_tensors_that_share_memory_may_be_read_and_not_written() -> None:
    inbox = [message(1.0, ((0, 0, 0),)), message(2.0, ((0, 0, 0),))]
    assert written_until("stage 1", inbox, False) == ()
    with pytest.raises(RuntimeError, match="stage 1 writes its input in place, and another tensor of that input"):
        written_until("stage 1", inbox, True)


@skippable(stash=["s"])
class Keep(nn.Module):
    def forward(self, x):
        yield stash("s", x)
        return x


@skippable(pop=["s"])
class Add(nn.Module):
    def forward(self, x):
        return x + (yield pop("s"))


class Write(nn.Module):
    def forward(self, x):
        return x.mul_(2.0)


def test_in_one_process_too_a_stage_may_not_write_what_a_later_one_pops() -> None:
    pipe = Pipe(nn.Sequential(Keep(), Write(), Add()), [1, 1, 1], chunks=2)
    with pytest.raises(RuntimeError, match="stage 1 .*writes its input in place.* a skip that a later stage pops"):
        pipe(torch.ones(4, 2))
