"""The ranks that run a Pipe together, and the connections between them.

    torchrun, or group=...  -->  RankGroup: rank, size, FailureMonitor, Connections: channels, links over them

    within a call   exchange: a few plain values from all to all         connections: messages
    a failure       its record first, then every channel is closed; the next call builds the next generation of them

All Pipes of one process group share one. Control values travel on the same channels as messages, before and after
those of a phase.

Each channel is a process group of torch for one ordered pair, so that no receive blocks a send. Control values go as
messages over a tree (`pipeline.distributed.tree`), since a collective of gloo takes much longer than two of these.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pipeline.common.accelerators import device_identity, device_of_rank, is_accelerator
from pipeline.common.arguments import check_group
from pipeline.common.interrupts import Deferral
from pipeline.distributed.agreement import MismatchError
from pipeline.distributed.connections import Connections
from pipeline.distributed.failure.errors import Failure, RankError, exception_of, of_exception, silence
from pipeline.distributed.failure.heartbeat import in_words
from pipeline.distributed.failure.monitor import FailureMonitor
from pipeline.distributed.failure.store_watchdog import watch
from pipeline.distributed.rendezvous import AbortableRendezvous
from pipeline.distributed.tree import TreePlace, all_to_all, place_in_tree, tree_pairs
from pipeline.execution.p2p_plan import RankPair
from pipeline.transports.channel import ChannelError
from pipeline.transports.distributed import Channels
from pipeline.transports.nccl import nccl_of
from scheduler import Action

_LATER = 60.0  # seconds after `timeout`, when the monitor has decided, until torch itself ends a wait
GRACE = 0.5  # seconds that a rank whose connection broke waits for the reason


class RankGroup:
    """The ranks of a process group.

    Args:
        group: the process group.
        heartbeat: seconds without a sign of life after which a rank is given up.
        timeout: seconds without progress after which a call is given up.

    Attributes:
        members: the numbers of the ranks in the world.
    """

    def __init__(self, group: Any, heartbeat: float, timeout: float, number: int) -> None:
        self.members = dist.get_process_group_ranks(group)
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.device = _device(group)
        self.calls = 0
        self.pipes = 0  # that all ranks have joined
        self._action: Action | None = None  # under way
        prefix = f"penstock/{group.group_name}/{number}"
        store = dist.distributed_c10d._get_default_store()
        self.monitor = FailureMonitor(heartbeat)
        rendezvous = AbortableRendezvous(store, f"{prefix}/rendezvous", self.size)
        patience, carrier = timedelta(seconds=timeout + _LATER), nccl_of(group, self.device)
        self.payload_place = "" if carrier is None else carrier.place

        def new_channels(store: dist.Store, pairs: Collection[RankPair]) -> Channels:
            return Channels(store, self.rank, pairs, patience, carrier)

        self.connections = Connections(self.rank, self.device, rendezvous, self.monitor, new_channels)
        watch(self.monitor, store, f"{prefix}/monitor", self.rank, self.size, timeout)

    def __deepcopy__(self, memo: Any) -> RankGroup:
        """A copy of a Pipe runs on the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Pipe over ranks cannot be pickled: it holds connections, and only a part of the model. Save "
            "pipe.state_dict() with torch.distributed.checkpoint, or pipe.full_state_dict() on rank 0."
        )

    @property
    def next_call(self) -> str:
        """The number of the next call, in words: the same on all ranks, which may differ in `calls` after a failure."""
        failures = f" after failure {self.generation}" if self.generation else ""
        return f"call {self.monitor.next_number(self.generation)}{failures}"

    @property
    def is_in_call(self) -> bool:
        """Whether a call is under way."""
        return self.monitor.latest.abort is not None

    @property
    def generation(self) -> int:
        """The number of calls that have failed."""
        return self.connections.generation

    @property
    def place(self) -> TreePlace:
        """The place in the tree over which the ranks exchange."""
        return place_in_tree(self.rank, self.size)

    # ----------------------------------------------------------------------------------------------------- messages

    def connect(self, pairs: Collection[RankPair]) -> None:
        """Connect these ordered pairs of ranks, and their devices where each has a device of its own.

        All ranks call this with the same pairs, at the same place of a call.
        """
        new_pairs = self.connections.incomplete(pairs)
        if new_pairs:
            places = self.exchange(self.payload_place)
            with_devices = [
                (source, target) for source, target in new_pairs if "" != places[source] != places[target] != ""
            ]
            self.connections.connect(new_pairs, with_devices)

    def finish(self, to: int) -> None:
        """Wait until a rank has received all that was sent to it."""
        self.monitor.at = f"the end, for rank {to} to receive the last messages"
        self.connections.sender(to).finish()

    # ------------------------------------------------------------------------------------------------------ values

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank: what JSON can hold. Numbers arrive bit by bit.

        A call exchanges before all else, so the first one of a generation connects the ranks.
        """
        if self.connections.are_closed:
            self.connections.connect(tree_pairs(self.size))
        self.monitor.at = "a meeting of all ranks"
        values = all_to_all(self.connections.channels, self.rank, self.size, value)
        self.monitor.latest.has_met = True
        return values

    def exchange_alike(self, action: str, value: Any) -> list[Any]:
        """The values of all ranks, each of which does the same: `action`, as an error names it.

        Raises:
            MismatchError: another rank does something else.
        """
        rows = self.exchange([action, value])
        if any(not isinstance(row, list) or row[:1] != [action] for row in rows):
            raise MismatchError(
                f"rank {self.rank} {action} while others do something else. All ranks make the same calls in the same "
                "order: take none of them into an `if rank == 0:`."
            )
        return [row_value for _, row_value in rows]

    def refuse_shared_devices(self) -> None:
        """Raise on all ranks if two on one host compute on the same accelerator.

        Raises:
            ValueError: they do.
        """
        own_device = device_identity(self.device)
        ranks_at: dict[str, list[int]] = {}
        for rank, name in enumerate(self.exchange(own_device and f"{own_device} on host {socket.gethostname()}")):
            ranks_at.setdefault(name, []).append(rank)
        for name, ranks in ranks_at.items():
            if name and len(ranks) > 1:
                raise ValueError(
                    f"ranks {ranks} all take device {name}. Start as many processes as the host has devices, with "
                    "torchrun, srun or mpirun, which number them; or choose a device in each before its first Pipe: "
                    "torch.accelerator.set_device_index(...). For ranks on the CPU begin with "
                    'torch.distributed.init_process_group("cpu:gloo").'
                )

    # ----------------------------------------------------------------------------------------------------- failure

    def enter(self, call: str) -> None:
        """Begin a call. A failure from now on fails it on all ranks."""
        self.refuse_within_call(call)
        try:
            with Deferral():  # in the call, or not
                self.calls += 1
                self._action = None
                self.connections.open()  # before the monitor can give it up
                self.monitor.enter(self.generation, call, self.connections.abort)
        except BaseException as error:
            self.fail(error, call)

    def refuse_within_call(self, call: str) -> None:
        """Raise if a call is under way: the other ranks cannot know of one within it."""
        if self.is_in_call:
            raise RuntimeError(
                f"{call} was begun within another call over ranks, which the other ranks cannot know of. A loss_fn, a "
                "layer or a hook may not call a Pipe that runs over ranks: give that one devices=[...]. Nor may the x "
                "of pipe.step be computed by one: use loss_fn(pipe(x), target).backward(), or give x.detach()."
            )

    def at(self, action: Action | None) -> None:
        """Note the action that runs next. None: those of the phase have run."""
        self._action = action
        self.monitor.at = "the end of a phase" if action is None else (action,)
        self.monitor.steps += 1

    def leave(self) -> None:
        """Note that the call has succeeded here."""
        self.monitor.leave()

    def fail(self, error: BaseException, call: str, progress: str = "") -> NoReturn:
        """Report a failure of the call here to all ranks, and raise the error that all raise.

        Args:
            progress: of this rank, in words: added where another one went silent, whose progress is unknown.
        """
        with Deferral():
            is_lost = isinstance(error, ChannelError)  # usually another rank knows the reason
            own_failure = self.lost(error, call) if is_lost else of_exception(error, self.rank, call, self._action)
            first = self.monitor.verdict(GRACE) if is_lost else None
            if first is None:
                self.monitor.fail(own_failure)
                first = self.monitor.verdict(GRACE) or own_failure
            self.connections.close()
            self.monitor.leave()
            shared = exception_of(first, self.rank)
            if progress and isinstance(shared, RankError) and not first.traceback:
                shared.add_note(f"rank {self.rank} {progress}")  # no rank raised: progress is unknown
            is_everyones = type(shared) is type(error) and str(shared) == str(error)  # all ranks made the same error
            if not is_lost and (first == own_failure or is_everyones or not isinstance(error, Exception)):
                error.add_note(f"this is rank {self.rank}, in {call}")
                raise error  # Ctrl-C stays itself
            if not is_lost:
                kind = own_failure.type_name.removeprefix("builtins.")
                shared.add_note(f"rank {self.rank} failed, too: {kind}: {own_failure.message}")
            raise shared from shared.__cause__ or error

    def lost(self, error: BaseException, call: str) -> Failure:
        """The failure of a call whose connection broke, where nobody knows the reason."""
        waited = f"rank {self.rank} waited at {in_words(self.monitor.at)}."
        return silence(self.rank, call, f"rank {self.rank} lost a connection: {error}", waited)

    def farewell(self) -> None:
        """End the monitor and drop the connections: the script ends."""
        self.monitor.farewell()
        self.connections.drain(self.monitor.heartbeat)
        self.connections.close()


def _device(group: Any) -> torch.device:
    """The device of this rank in a group: the one that the group is bound to; a group for the CPU alone runs there."""
    bound: torch.device | None = group.bound_device_id
    if bound is not None:
        return bound
    kinds = {entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")}
    return torch.device("cpu") if kinds == {"cpu"} else device_of_rank()


# ----------------------------------------------------------------------------------------------------------- the groups

# By process (a fork has none), process group that a Pipe ran on, heartbeat and timeout.
_groups: dict[tuple[int, Any, float, float], RankGroup] = {}


def ranks_of(group: Any, heartbeat: float, timeout: float) -> RankGroup | None:
    """The ranks of a group; of torch.distributed's world where none is given and there are several processes.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or None.
        heartbeat, timeout: seconds, see RankGroup.

    Returns:
        None: one process runs everything.
    """
    if group is None and not _is_world():
        return None
    check_group(group)
    group = _process_group(group, timeout)
    if dist.get_world_size(group) == 1:
        return None
    key = (os.getpid(), group, heartbeat, timeout)
    if key not in _groups:
        of_group = [other for _, other, _, _ in _groups if other.group_name == group.group_name]
        _groups[key] = RankGroup(group, heartbeat, timeout, len(of_group))  # the same number on the group's other ranks
        atexit.register(_farewell)  # before _destroy, since the store may live in this process
    return _groups[key]


def _is_world() -> bool:
    """Whether torch.distributed has several processes, or torchrun started several."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _process_group(group: Any, timeout: float) -> Any:
    if not dist.is_initialized():
        device = device_of_rank()
        backend = "gloo"
        if is_accelerator(device):
            torch.accelerator.set_device_index(device)
            device_backend = dist.Backend.default_device_backend_map.get(device.type)
            backend = f"cpu:gloo,{device.type}:{device_backend}" if device_backend else backend
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))  # torch's default is 30 minutes
        atexit.register(_destroy, os.getpid())
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):  # a DeviceMesh
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group has no place for rank {dist.get_rank()}. Build the Pipe only on the ranks of its group."
        )
    return group


def _destroy(process: int) -> None:
    if dist.is_initialized() and os.getpid() == process:  # and not in a fork, whose copy has none of the threads
        dist.destroy_process_group()


def _farewell() -> None:
    for (process, *_), ranks in _groups.items():
        if process == os.getpid():
            ranks.farewell()
    _groups.clear()
