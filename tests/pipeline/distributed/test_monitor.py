"""A failure anywhere is known everywhere, in seconds, in words; and nobody is accused who only waits."""

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import monitor_scripts
import pytest
import torch.distributed as dist
from monitor_scripts import Nursery, Remote, every

from pipeline.distributed.failure import store_exchange, store_watchdog
from pipeline.distributed.failure.detector import FailureDetector
from pipeline.distributed.failure.errors import Failure, of_exception, silence
from pipeline.distributed.failure.heartbeat import Heartbeat
from pipeline.distributed.failure.monitor import FailureMonitor
from pipeline.distributed.failure.store_exchange import StoreExchange
from pipeline.distributed.failure.store_keys import KEPT, StoreKeys
from pipeline.distributed.failure.store_watchdog import StoreWatchdog

QUICK = 3.0  # seconds in which all must know, on a machine that does other things too


# ------------------------------------------------------------------------------------------------------- the rules


def beat(serial: int = 0, number: int = 7, is_in: bool = True, at: str = "2B3", **others: Any) -> Heartbeat:
    call = f"step {number}" if number else ""
    found = Heartbeat(serial, 0 if number else -1, number, call, is_in and number > 0, at, 0, "")
    return found._replace(**others)


def judge(*, size: int = 2, heartbeat: float = 10.0, timeout: float = 300.0) -> FailureDetector:
    return FailureDetector(0, size, heartbeat, timeout)


@pytest.mark.parametrize("heartbeat", [0.5, 1.0, 10.0, 60.0])
@pytest.mark.parametrize("silent", [1, 2, 3])
def test_a_rank_is_accused_when_its_beat_stays_for_longer_than_heartbeat_and_not_before(
    heartbeat: float, silent: int
) -> None:
    rules = judge(size=4, heartbeat=heartbeat)
    last = 0
    for tick in range(60):
        now = 100.0 + tick * heartbeat / 8
        last = tick if tick < 20 else last
        beats = {rank: beat(tick, at=f"{rank}F0") for rank in range(4)}
        rules.see(beats | {silent: beat(last, at=f"{silent}F0")}, now)
        found = rules.accusation(now)
        if tick - last <= 8:
            assert found is None
        else:
            assert found is not None and found.rank == silent
            assert f"rank {silent} does not answer since {(tick - last) * heartbeat / 8:.1f} s" in found.message
            assert f"(heartbeat={heartbeat}): stopped, swapped out or cut off." in found.message
            assert found.waits.startswith("rank 0 was at 0F0 in step 7; rank 1 was")
            assert f"rank {silent} was at {silent}F0 in step 7" in found.waits


def test_ranks_that_beat_are_never_accused_whatever_else_they_do() -> None:
    chance = random.Random(0)
    for _ in range(50):
        rules, now, serials = judge(size=3, heartbeat=1.0, timeout=50.0), 0.0, [0, 0, 0]
        for _ in range(100):
            now += chance.uniform(0.0, 0.49)
            steps = chance.randrange(1000)
            for rank in range(3):
                serials[rank] += rank == 0 or chance.random() < 0.5 or 2
            rules.see({rank: beat(serials[rank], steps=steps + rank, is_in=rank == 0) for rank in range(3)}, now)
            assert rules.accusation(now) is None


def test_nobody_is_accused_by_a_rank_that_is_in_no_call() -> None:
    rules = judge()
    for now in (0.0, 1000.0):
        rules.see({0: beat(is_in=False), 1: beat(number=3)}, now)
        assert rules.accusation(now) is None
    rules.see({0: beat(1)}, 1000.0)
    assert rules.accusation(1000.0) is not None


@pytest.mark.parametrize("ended", ["", "ended its script"])
def test_a_rank_that_has_left_the_call_may_go(ended: str) -> None:
    rules = judge()
    for now in (0.0, 100.0):
        rules.see({0: beat(int(now)), 1: beat(is_in=False, ended=ended)}, now)
        assert rules.accusation(now) is None


def test_a_rank_that_ended_before_the_call_is_accused_at_once() -> None:
    rules = judge(size=3)
    rules.see({0: beat(at="0B1"), 1: beat(number=6, is_in=False, ended="ended its script"), 2: beat()}, 0.0)
    found = rules.accusation(0.0)
    assert found is not None and found.rank == 1
    assert found.message == "rank 1 ended its script while rank 0 waits in step 7 for it."
    assert found.waits == (
        "rank 0 was at 0B1 in step 7; rank 1 was outside of calls, after step 6 when it ended its script; "
        "rank 2 was at 2B3 in step 7."
    )


def test_a_rank_that_ended_within_the_call_is_accused_at_once() -> None:
    rules = judge()
    rules.see({0: beat(), 1: beat(ended="ended its script", at="1F2")}, 0.0)
    found = rules.accusation(0.0)
    assert found is not None
    assert found.message == "rank 1 ended its script while rank 0 waits in step 7 for it."
    assert found.waits.endswith("; rank 1 was at 1F2 in step 7 when it ended its script.")


@pytest.mark.parametrize("timeout", [1.5, 300.0])
def test_a_call_is_given_up_when_nothing_moves_on_any_rank_for_longer_than_timeout(timeout: float) -> None:
    rules, moved = judge(size=3, timeout=timeout), 0.0
    for tick in range(100):
        now = tick * timeout / 10
        steps = min(tick // 7, 5)  # in every 7th tick rank 2 gets on, up to tick 35
        moved = 35 * timeout / 10 if tick >= 35 else now
        rules.see({0: beat(tick, at="0B0"), 1: beat(tick, at="1B0"), 2: beat(tick, steps=steps)}, now)
        found = rules.accusation(now)
        assert (found is not None) == (now - moved > timeout)
        if found is not None:
            assert f"nothing moves on any rank for {timeout:g} s (timeout={timeout}) in step 7" in found.message
            stand = "rank 0 was at 0B0 in step 7; rank 1 was at 1B0 in step 7; rank 2 was at 2B3 in step 7."
            assert found.waits == stand


@pytest.mark.parametrize(
    "absent, words",
    [
        (beat(number=6, is_in=False), "rank 1 was outside of calls, after step 6."),
        (beat(number=6), "rank 1 was at 2B3 in step 6."),
        (beat(number=0), "rank 1 was before its first call."),
        (None, "rank 1 has not been heard of yet."),
    ],
)
def test_a_rank_that_stays_away_is_named(absent: Heartbeat | None, words: str) -> None:
    rules = judge(timeout=1.5)
    for tick in range(17):
        now = tick / 10
        beats = {0: beat(tick)} | ({1: absent._replace(serial=tick)} if absent else {})
        rules.see(beats, now)
        assert (rules.accusation(now) is None) == (tick <= 15)
    found = rules.accusation(now)
    assert found is not None and found.rank == 1
    assert "rank 1 did not enter step 7 for 1.5 s (timeout=1.5). Every rank must make the same" in found.message
    assert "devices=[...]" in found.message  # of a pipeline in one process, among several of them
    assert found.waits.endswith(f"; {words}")


def test_a_rank_that_did_not_run_itself_begins_to_count_anew() -> None:
    rules = judge(heartbeat=1.0, timeout=5.0)
    beats = {0: beat(), 1: beat()}
    rules.see(beats, 0.0)
    rules.restart(100.0)
    for now, accused in ((100.0, None), (101.0, None), (101.5, 1)):
        rules.see(beats, now)
        found = rules.accusation(now)
        assert (found.rank if found else None) == accused


def test_a_rank_that_the_others_left_behind_learns_that_its_call_is_over() -> None:
    rules = judge()
    rules.see({0: beat(), 1: beat(generation=3, number=1, call="step 9")}, 0.0)
    found = rules.accusation(0.0)
    assert found is not None
    assert "step 7 was given up by the others while rank 0 was not heard of" in found.message
    assert found.waits.endswith("; rank 1 was at 2B3 in step 9.")


def test_who_parts_waits_for_ranks_that_may_be_in_its_last_call_and_for_no_others() -> None:
    mine = beat(is_in=False, ended="ended its script")
    for other, is_needy in [
        (beat(), True),  # it is in that call
        (beat(number=6), True),  # it is in the one before, or was when it said so
        (beat(number=6, is_in=False), True),  # this may be old
        (beat(5, number=6, is_in=False), False),  # this is not: it has not entered, and need not
        (beat(is_in=False), False),
        (beat(number=8), False),
        (beat(ended="ended its script"), False),
    ]:
        rules = judge()
        rules.see({0: mine, 1: other}, 0.0)
        assert bool(rules.needy(mine, {1: 0}, 0.0, 1.0)) == is_needy
        assert rules.needy(mine, {1: 0}, 2.0, 1.0) == []  # it does not beat: it is gone


# ---------------------------------------------------------------------------------------------- the main thread's part


def failure(rank: int = 1, message: str = "no") -> Failure:
    return silence(rank, "step 7", message)


def test_a_call_is_aborted_once() -> None:
    status, aborts = FailureMonitor(10.0), []
    status.enter(0, "step 1", lambda: aborts.append(1))
    for _ in range(3):
        status.deliver(0, failure())
        status.wake()
    assert aborts == [1]


def test_no_call_is_aborted_that_was_left_or_has_failed_here_or_is_of_a_later_generation() -> None:
    status, aborts = FailureMonitor(10.0), []
    status.enter(0, "step 1", lambda: aborts.append(1))
    status.leave()
    status.deliver(0, failure())
    status.enter(1, "step 2", lambda: aborts.append(2))
    status.deliver(0, failure())
    assert aborts == []
    assert status.failure is None


def test_a_call_in_a_generation_that_has_failed_is_aborted() -> None:
    status, aborts = FailureMonitor(10.0), []
    status.enter(0, "step 1", lambda: None)
    status.deliver(0, failure())
    status.enter(0, "step 2", lambda: aborts.append(2))
    status.wake()
    assert aborts == [2]


def test_an_abort_that_raises_is_printed_and_the_failure_known_all_the_same(capsys: Any) -> None:
    status = FailureMonitor(10.0)
    status.enter(0, "step 1", lambda: [][0])
    status.deliver(0, failure())
    assert status.failure == failure()
    assert "IndexError" in capsys.readouterr().err


def test_leaving_waits_for_an_abort_that_is_under_way() -> None:
    status, order = FailureMonitor(10.0), []
    begun = threading.Event()

    def abort() -> None:
        begun.set()
        time.sleep(0.2)
        order.append("aborted")

    status.enter(0, "step 1", abort)
    thread = threading.Thread(target=status.deliver, args=(0, failure()))
    thread.start()
    assert begun.wait(10)
    status.leave()
    order.append("left")
    thread.join()
    assert order == ["aborted", "left"]


def test_what_is_known_of_a_generation_stays() -> None:
    status = FailureMonitor(10.0)
    status.enter(0, "step 1", lambda: None)
    status.deliver(0, failure(1, "first"))
    status.deliver(0, failure(2, "second"))
    assert status.failure == failure(1, "first")


def test_a_generation_that_is_over_cannot_be_entered() -> None:
    status = FailureMonitor(10.0)
    status.enter(2, "step 1", lambda: None)
    with pytest.raises(ValueError, match="generation 1 is over: this rank is in 2"):
        status.enter(1, "step 2", lambda: None)


def test_where_the_main_thread_is_may_be_said_in_parts() -> None:
    status = FailureMonitor(10.0)
    status.enter(0, "step 1", lambda: None)
    for at, text in [("2B3", "2B3"), (("2B3", "for", "h3", "from rank", 3), "2B3 for h3 from rank 3"), (None, "None")]:
        status.at = at
        assert status.beat(0).described() == f"at {text} in step 1"


# --------------------------------------------------------------------------------------------------------- the store


@pytest.fixture(params=["hash", "tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), -1)


def at_once(works: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_failures_that_come_together_one_wins_everywhere(store: dist.Store) -> None:
    boards = [StoreKeys(store, "w", rank, 8) for rank in range(8)]
    for generation in range(5):
        told: dict[int, Failure] = {}

        def tell(rank: int) -> None:
            told[rank] = boards[rank].post(generation, failure(rank))

        at_once([partial(tell, rank) for rank in range(8)])
        assert len(set(told.values())) == 1
        assert {keys.failure(generation) for keys in boards} == set(told.values())


def test_keys_do_not_pile_up_and_the_latest_failures_can_be_had(store: dist.Store) -> None:
    boards, most = [StoreKeys(store, "w", rank, 3) for rank in range(3)], 0
    for generation in range(50):
        for rank, keys in enumerate(boards):
            keys.say(beat(generation))
            keys.forget_before(generation)
        boards[0].post(generation, failure(0, str(generation)))
        most = max(most, store.num_keys())
        for earlier in range(max(0, generation - KEPT), generation + 1):
            assert boards[2].failure(earlier) == failure(0, str(earlier))
    assert boards[0].failure(50 - KEPT - 2) is None
    assert most <= 3 + KEPT + 1 + 2  # two are a FileStore's own


def said(keys: StoreKeys, what: Heartbeat) -> None:
    """It is in the store when this returns: a TCPStore is told without an answer, so one is asked for."""
    keys.say(what)
    keys.failure(0)


def test_a_rank_that_has_said_nothing_yet_is_not_waited_for(store: dist.Store) -> None:
    boards = [StoreKeys(store, "w", rank, 3) for rank in range(3)]
    assert boards[0].beats() == {}
    said(boards[2], beat(5))
    assert boards[0].beats() == {2: beat(5)}
    said(boards[1], beat(6))
    said(boards[2], beat(7))
    assert boards[0].beats() == {1: beat(6), 2: beat(7)}
    assert boards[1].beats() == {2: beat(7)}


def test_watches_with_other_prefixes_know_nothing_of_each_other(store: dist.Store) -> None:
    StoreKeys(store, "one", 0, 2).post(0, failure())
    assert StoreKeys(store, "two", 1, 2).failure(0) is None


# ------------------------------------------------------------------------------------------------- within one process


def watching(store: dist.Store, rank: int, size: int, heartbeat: float) -> FailureMonitor:
    found = FailureMonitor(heartbeat)
    store_watchdog.watch(found, store, "w", rank, size, timeout=300.0)
    return found


@pytest.fixture
def watches(store: dist.Store) -> Iterator[list[FailureMonitor]]:
    found = [watching(store, rank, 3, heartbeat=20.0) for rank in range(3)]
    yield found
    for watch in found:
        watch.stop()


def test_all_learn_of_the_first_failure_within_a_second_and_their_calls_are_aborted(
    watches: list[FailureMonitor],
) -> None:
    aborts: list[int] = []
    for generation in range(3):
        for rank, watch in enumerate(watches):
            watch.enter(generation, f"step {generation}", partial(aborts.append, rank))
        time.sleep(0.15 * generation)
        began = time.monotonic()
        watches[1].fail(failure(1, str(generation)))
        assert {watch.verdict(5.0) for watch in watches} == {failure(1, str(generation))}
        assert time.monotonic() - began < 1.0
        assert sorted(aborts) == [0, 2]
        aborts.clear()


def test_of_ranks_that_fail_together_all_raise_the_same(watches: list[FailureMonitor]) -> None:
    for generation in range(20):
        for watch in watches:
            watch.enter(generation, "step", lambda: None)
        at_once([partial(watches[rank].fail, failure(rank)) for rank in range(3)])
        assert len({watch.verdict(0.0) for watch in watches}) == 1


@pytest.mark.parametrize("has_met", [True, False])
def test_what_fails_before_the_ranks_meet_is_told_when_all_have_left_the_call_before(
    watches: list[FailureMonitor], has_met: bool
) -> None:
    aborts: list[int] = []
    raised = of_exception(ValueError("no"), 0, "step 2")
    for watch in watches:
        watch.enter(0, "step 1", partial(aborts.append, 1))
    watches[0].leave()
    watches[0].enter(0, "step 2", partial(aborts.append, 2))
    watches[0].latest.has_met = has_met
    failing = threading.Thread(target=watches[0].fail, args=(raised,))
    failing.start()
    watches[1].leave()
    watches[1].enter(0, "step 2", partial(aborts.append, 2))
    time.sleep(1.0)
    assert sorted(aborts) == ([1, 2] if has_met else [])
    assert failing.is_alive() == (not has_met)
    if not has_met:
        watches[2].leave()
    failing.join(1.0)
    assert not failing.is_alive()
    assert {watch.verdict(1.0) for watch in watches} == {raised}
    assert sorted(aborts) == ([1, 2] if has_met else [2])


@pytest.mark.parametrize("is_gone", [True, False])
def test_who_fails_waits_for_no_rank_that_is_gone_and_for_others_as_long_as_for_a_sign_of_life(
    store: dist.Store, is_gone: bool
) -> None:
    watches = [watching(store, rank, 2, heartbeat=20.0 if is_gone else 0.4) for rank in range(2)]
    watches[1].enter(0, "step 0", lambda: None)
    for number in range(2):
        watches[0].enter(0, f"step {number}", lambda: None)
    time.sleep(0.3)
    if is_gone:
        watches[1].stop()
    began = time.monotonic()
    watches[0].fail(of_exception(ValueError("no"), 0, "step 1"))
    assert 0.35 * (not is_gone) < time.monotonic() - began < 0.4 + QUICK
    for watch in watches:
        watch.stop()


def test_where_nothing_has_failed_there_is_no_verdict(watches: list[FailureMonitor]) -> None:
    for watch in watches:
        watch.enter(0, "step 1", lambda: None)
    began = time.monotonic()
    assert watches[0].verdict(0.3) is None
    assert 0.29 < time.monotonic() - began < QUICK


def test_a_rank_that_enters_a_call_which_has_failed_is_told(watches: list[FailureMonitor]) -> None:
    woken = threading.Event()
    watches[0].enter(0, "step 1", lambda: None)
    watches[0].fail(failure(0))
    watches[2].enter(0, "step 1", woken.set)
    assert woken.wait(1.0)
    assert watches[2].verdict(0.0) == failure(0)
    woken.clear()
    watches[2].enter(0, "step 2", woken.set)  # though it knows
    assert woken.wait(1.0)


def test_after_a_failure_the_next_generation_begins_clean(watches: list[FailureMonitor]) -> None:
    aborts: list[int] = []
    for watch in watches:
        watch.enter(0, "step 1", lambda: None)
    watches[2].fail(failure(2))
    for watch in watches:
        watch.verdict(1.0)
        watch.enter(1, "step 1", lambda: aborts.append(1))
    assert watches[0].verdict(0.3) is None
    for watch in watches:
        watch.leave()
    assert not aborts


def names(within: float = 0.0) -> list[str]:
    """The threads that are left after that time."""
    end = time.monotonic() + within
    while True:
        found = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipe ")]
        if not found or time.monotonic() >= end:
            return found
        time.sleep(0.01)


def test_stopping_ends_the_threads_and_may_be_done_twice(store: dist.Store) -> None:
    watch = watching(store, 0, 2, heartbeat=20.0)
    assert sorted(names()) == ["pipe monitor", "pipe watchdog"]
    watch.enter(0, "step 1", lambda: None)
    watch.stop()
    watch.stop()
    assert names() == []
    with pytest.raises(RuntimeError, match="this rank ended its script: it cannot enter step 2"):
        watch.enter(0, "step 2", lambda: None)
    watch.farewell()


def test_a_rank_that_stops_its_watch_is_known_to_have_done_so(store: dist.Store) -> None:
    watches = [watching(store, rank, 2, heartbeat=20.0) for rank in range(2)]
    watches[1].stop()
    watches[0].enter(0, "step 1", lambda: None)
    found = watches[0].verdict(QUICK)
    assert found is not None
    assert found.message == "rank 1 ended its script while rank 0 waits in step 1 for it."
    watches[0].stop()


def test_a_rank_that_parts_learns_soon_that_the_others_are_out_of_the_call(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_exchange, "BEAT", 60.0)
    watches = [watching(store, rank, 2, heartbeat=400.0) for rank in range(2)]
    for watch in watches:
        watch.enter(0, "step 1", lambda: None)
    time.sleep(0.3)
    watches[0].leave()
    leaver = threading.Timer(0.3, watches[1].leave)
    leaver.start()
    began = time.monotonic()
    watches[0].farewell()
    assert 0.2 < time.monotonic() - began < QUICK
    leaver.join()
    began = time.monotonic()
    watches[1].farewell()
    assert time.monotonic() - began < QUICK
    for watch in watches:
        watch.stop()


def test_what_the_main_thread_wants_is_done_at_once_however_long_the_pauses_are(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_exchange, "BEAT", 60.0)
    monkeypatch.setattr(store_exchange, "PAUSE", 60.0)
    watches = [watching(store, rank, 2, heartbeat=400.0) for rank in range(2)]
    for watch in watches:
        watch.enter(0, "step 1", lambda: None)
    time.sleep(0.3)  # they pause now
    began = time.monotonic()
    watches[0].fail(failure(0))
    assert watches[1].verdict(20.0) == failure(0)
    for watch in watches:
        watch.stop()
    assert time.monotonic() - began < 1.0
    assert names() == []


def test_the_watchdog_speaks_when_a_turn_takes_longer_than_heartbeat_of_which_this_process_was_awake() -> None:
    for stopped in (False, True):
        status = FailureMonitor(10.0)
        status.enter(0, "step 1", lambda: None)
        detector = judge()
        thread = StoreExchange(status, StoreKeys(dist.HashStore(), "w", 0, 2), detector)
        watchdog = StoreWatchdog(status, thread, detector.rank)
        thread.turn_began = began = time.monotonic()
        for second in range(1, 30):
            awake_since = 6 if stopped else 0
            if second >= awake_since:
                watchdog._look(began + second)
            assert (status.failure is None) == (second - awake_since <= 10)


class HeldKeys(StoreKeys):
    """Its store does not answer when it is asked for a failure: meanwhile, that happens."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__(dist.HashStore(), "w", 0, 2)
        self.meanwhile = meanwhile
        self.told: list[str] = []

    def failure(self, generation: int) -> Failure | None:
        self.meanwhile()
        return super().failure(generation)

    def post(self, generation: int, failure: Failure) -> Failure:
        self.told.append(f"failure of {generation}")
        return super().post(generation, failure)

    def say(self, beat: Heartbeat) -> None:
        self.told.append(f"beat of {beat.generation}")
        super().say(beat)


def test_no_rank_is_seen_in_a_generation_before_the_failure_that_led_to_it_can_be() -> None:
    status = FailureMonitor(10.0)

    def give_up() -> None:
        status.lose(failure(0, "the store does not answer"))
        status.enter(1, "step 2", lambda: None)

    status.enter(0, "step 1", lambda: None)
    keys = HeldKeys(give_up)
    StoreExchange(status, keys, judge()).turn()
    assert keys.told == ["failure of 0", "beat of 1"]


# ---------------------------------------------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with monitor_scripts.nursery(tmp_path_factory.mktemp("w")) as found:
        yield found


Make = Callable[..., list[Remote]]


@pytest.fixture
def make(home: Nursery, tmp_path: Path) -> Iterator[Make]:
    agents = []

    def ranks(size: int, *, store: str = "agent", heartbeat: float = 20.0, timeout: float = 300.0) -> list[Remote]:
        where: Any = str(tmp_path / "file")
        if store == "agent":
            agents.append(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
            where = agents[-1].port
        elif store == "rank 0":
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                where = found.getsockname()[1]
        return home.ranks(size, (store, where), heartbeat, timeout)

    home.written()
    yield ranks
    home.clear()
    found = home.written()
    assert not any(words in found for words in ("Traceback", "Fatal", "terminate called")), found


def learned(remotes: list[Remote], since: float, within: float = QUICK) -> dict[str, Any]:
    """What they all raise; they know within that time."""
    answers = [remote.answer() for remote in remotes]
    records = [answer for answer, _ in answers]
    assert all(isinstance(record, dict) for record in records), records
    for record in records[1:]:
        assert {**record, "aborts": 0} == {**records[0], "aborts": 0}
    assert max(when for _, when in answers) - since < within
    return records[0]


@pytest.mark.parametrize("store", ["agent", "rank 0", "file"])
def test_what_one_rank_raises_all_raise_and_the_next_generation_works(make: Make, store: str) -> None:
    ranks = make(3, store=store)
    for generation in range(2):
        if generation:
            every(ranks, "connect", generation)
        every(ranks, "enter", generation, "step 7")
        ranks[0].post("receive", 2)
        ranks[1].post("receive", 0)
        time.sleep(0.2)
        since = ranks[2].post("fail", "not like this")
        assert ranks[2].answer()[0] is None
        found = learned(ranks[:2], since)
        assert found["aborts"] == generation + 1
        assert (found["rank"], found["place"]) == (2, "stage 2, chunk 3, 2F3, ")
        assert (found["type_name"], found["call"]) == ("__main__.StrangeError", "step 7")
        assert "raise StrangeError(message)" in found["traceback"]
        note = "on rank 2: stage 2, chunk 3, 2F3, in step 7"
        assert ranks[0].do("raised") == ["StrangeError", "not like this", [note]]
    every(ranks, "connect", 2)
    every(ranks, "enter", 2, "step 9")
    ranks[1].do("send", 0, 5.0)
    assert ranks[0].do("receive", 1) == 5.0
    every(ranks, "leave")
    assert every(ranks, "stop") == [[], [], []]


def test_a_killed_rank_is_known_to_all_that_wait_for_it_or_for_each_other(make: Make) -> None:
    ranks = make(3)
    every(ranks, "enter", 0, "step 7")
    ranks[0].post("receive", 1)
    ranks[1].post("receive", 2)
    time.sleep(0.2)
    since = ranks[2].kill(signal.SIGKILL)
    found = learned(ranks[:2], since)
    assert found["message"] == "the connection to rank 2 was closed"
    assert found["rank"] == 1


def test_a_stopped_rank_is_known_after_heartbeat_and_learns_what_it_missed(make: Make) -> None:
    ranks = make(3, heartbeat=1.0)
    every(ranks, "enter", 0, "step 7")
    for rank, remote in enumerate(ranks):
        remote.do("at", [f"{rank}B3", "for the gradient of", f"h{rank}"])
    ranks[0].post("receive", 1)
    ranks[1].post("receive", 2)
    ranks[2].post("receive", 1)
    time.sleep(0.5)
    since = ranks[2].kill(signal.SIGSTOP)
    found = learned(ranks[:2], since, 1.0 + QUICK)
    assert found["rank"] == 2 and found["type_name"].endswith(".RankError")
    assert "rank 2 does not answer since 1." in found["message"]
    assert "s (heartbeat=1.0): stopped, swapped out or cut off." in found["message"]
    for rank in range(3):
        assert f"at {rank}B3 for the gradient of h{rank} in step 7" in found["waits"]
    assert ranks[2].is_silent(0.5)
    since = ranks[2].kill(signal.SIGCONT)
    assert learned([ranks[2]], since) == {**found, "aborts": 1}


def test_a_stopped_rank_that_missed_several_generations_learns_of_each(make: Make) -> None:
    ranks = make(2, heartbeat=0.8)
    ranks[1].do("enter", 0, "step 0")
    ranks[1].post("receive", 0)
    time.sleep(0.4)
    ranks[1].kill(signal.SIGSTOP)
    seen = []
    for generation in range(3):
        ranks[0].do("enter", generation, f"step {generation}")
        seen.append(ranks[0].do("verdict", 5.0)["message"])
    assert "rank 1 does not answer" in seen[0]
    since = ranks[1].kill(signal.SIGCONT)
    assert learned([ranks[1]], since)["message"] == seen[0]
    for generation in (1, 2):
        ranks[1].do("enter", generation, f"step {generation}")
        assert ranks[1].do("verdict", 5.0)["message"] == seen[generation]
    ranks[1].do("enter", 3, "step 3")
    time.sleep(0.7)  # rank 0 has to see one of its beats before it enters, or it would give it up at once
    ranks[0].do("enter", 3, "step 3")
    assert every(ranks, "verdict", 1.5) == [None, None]


def test_if_the_process_that_hosts_the_store_is_stopped_the_others_know_and_then_it_knows(make: Make) -> None:
    ranks = make(3, store="rank 0", heartbeat=1.0)
    every(ranks, "enter", 0, "step 7")
    ranks[0].post("receive", 2)
    ranks[1].post("receive", 0)
    ranks[2].post("receive", 1)
    time.sleep(1.5)  # several looks at the store: by then they know what each is in
    since = ranks[0].kill(signal.SIGSTOP)
    answers = [remote.answer() for remote in ranks[1:]]
    for rank, (found, when) in enumerate(answers, start=1):
        assert when - since < 1.0 + QUICK
        assert found["type_name"].endswith(".RankError")
        assert f"the store of torch.distributed does not answer rank {rank} since" in found["message"]
        assert "the process that hosts it (rank 0, or torchrun's agent) is stopped" in found["message"]
        assert "rank 0 was in step 7" in found["waits"]
    ranks[1].do("enter", 1, "step 8")
    assert "does not answer" in ranks[1].do("verdict", 5.0)["message"]  # it still does not
    since = ranks[0].kill(signal.SIGCONT)
    found = learned([ranks[0]], since)
    assert found["message"] in [answer["message"] for answer, _ in answers]


def test_if_the_process_that_hosts_the_store_is_killed_the_others_know(make: Make) -> None:
    ranks = make(3, store="rank 0")
    every(ranks, "enter", 0, "step 7")
    ranks[1].post("receive", 2)
    ranks[2].post("receive", 1)
    time.sleep(0.2)
    since = ranks[0].kill(signal.SIGKILL)
    for rank, remote in enumerate(ranks[1:], start=1):
        found, when = remote.answer()
        assert when - since < QUICK
        assert f"rank {rank} lost the store of torch.distributed: DistNetworkError: " in found["message"]
        assert "The process that hosts it (rank 0, or torchrun's agent) has ended or was killed" in found["message"]
    ranks[1].do("enter", 1, "step 8")
    assert "lost the store" in ranks[1].do("verdict", 1.0)["message"]
    assert ranks[2].do("stop") == []
    ranks[1].post("exit")
    assert ranks[1].has_ended()


def test_ranks_that_wait_in_a_circle_learn_who_waits_for_what(make: Make) -> None:
    ranks = make(3, timeout=1.5)
    every(ranks, "enter", 0, "step 7")
    ranks[2].post("steps", 1.0)
    for rank in (0, 1):
        ranks[rank].do("at", f"{rank}B0 for h{rank}")
        ranks[rank].post("receive", (rank + 1) % 3)
    _, since = ranks[2].answer()
    ranks[2].do("at", "2B0 for h2")
    ranks[2].post("receive", 0)
    found = learned(ranks, since, 1.5 + QUICK)
    assert "nothing moves on any rank for 1.5 s (timeout=1.5) in step 7" in found["message"]
    for rank in range(3):
        assert f"at {rank}B0 for h{rank} in step 7" in found["waits"]


def test_a_rank_that_makes_another_call_is_named(make: Make) -> None:
    ranks = make(3, timeout=1.5)
    every(ranks, "enter", 0, "step 6")
    every(ranks, "leave")
    every(ranks[:2], "enter", 0, "step 7")
    ranks[0].post("receive", 1)
    since = ranks[1].post("receive", 2)
    found = learned(ranks[:2], since, 1.5 + QUICK)
    assert found["rank"] == 2
    assert "rank 2 did not enter step 7 for 1.5 s" in found["message"]
    assert "rank 2 was outside of calls, after step 6" in found["waits"]
    ranks[2].do("enter", 0, "step 7")
    ranks[2].post("receive", 1)
    assert learned([ranks[2]], time.monotonic())["message"] == found["message"]


@pytest.mark.parametrize("end", ["exit", "crash"])
@pytest.mark.parametrize("where", ["before", "within"])
def test_a_rank_that_ends_its_script_is_known_at_once(make: Make, end: str, where: str) -> None:
    ranks = make(2)
    every(ranks if where == "within" else ranks[:1], "enter", 0, "step 7")
    if where == "within":
        ranks[1].do("at", "1F2")
    ranks[0].post("receive", 1)
    time.sleep(0.2)
    since = ranks[1].post(end)
    found = learned(ranks[:1], since)
    if found["message"] != "the connection to rank 1 was closed":  # gloo may be first to say
        place = "at 1F2 in step 7" if where == "within" else "before its first call"
        assert found["message"] == "rank 1 ended its script while rank 0 waits in step 7 for it."
        assert f"rank 1 was {place} when it ended its script" in found["waits"]


def test_a_rank_that_ends_its_script_is_named_to_ranks_that_wait_for_others(make: Make) -> None:
    ranks = make(3)
    every(ranks[:2], "enter", 0, "step 7")
    ranks[0].post("receive", 1)
    ranks[1].post("receive", 0)
    since = ranks[2].post("exit")
    found = learned(ranks[:2], since)
    assert found["rank"] == 2
    assert found["message"].startswith("rank 2 ended its script while rank ")


def test_a_rank_that_ends_before_the_others_have_finished_the_last_call_waits_for_them(make: Make) -> None:
    ranks = make(2, store="rank 0")
    every(ranks, "enter", 0, "step 7")
    ranks[1].post("steps", 2.5)
    ranks[0].do("leave")
    ranks[0].post("exit")
    assert ranks[1].answer()[0] is None
    assert ranks[1].do("verdict", 0.0) is None
    ranks[1].do("leave")
    assert ranks[0].has_ended()
    ranks[1].post("exit")
    assert ranks[1].has_ended()


def test_the_rank_that_hosts_the_store_fails_and_ends_and_the_others_know_why(make: Make) -> None:
    ranks = make(3, store="rank 0")
    every(ranks, "enter", 0, "step 7")
    ranks[1].post("receive", 2)
    ranks[2].post("receive", 1)
    time.sleep(0.3)
    since = ranks[0].post("fail", "not like this")
    ranks[0].post("crash")
    assert learned(ranks[1:], since)["message"] == "not like this"
    ranks[0].answer()
    assert ranks[0].has_ended()


def test_scripts_that_end_together_end_at_once_and_quietly(make: Make, home: Nursery) -> None:
    ranks = make(3, store="agent")
    every(ranks, "enter", 0, "step 7")
    every(ranks, "leave")
    since = [remote.post("farewell") for remote in ranks][0]
    assert max(remote.answer()[1] for remote in ranks) - since < QUICK
    for remote in ranks:
        remote.post("exit")
    assert all(remote.has_ended() for remote in ranks)
    assert home.written() == ""


def test_a_rank_that_was_stopped_itself_accuses_nobody(make: Make) -> None:
    ranks = make(2, heartbeat=2.0)
    every(ranks, "enter", 0, "step 7")
    time.sleep(0.6)
    ranks[1].kill(signal.SIGSTOP)  # machines fall asleep, one earlier than the other
    time.sleep(0.8)
    ranks[0].kill(signal.SIGSTOP)
    time.sleep(2.0)
    ranks[0].kill(signal.SIGCONT)
    time.sleep(0.3)
    ranks[1].kill(signal.SIGCONT)
    assert every(ranks, "verdict", 1.0) == [None, None]


def test_a_rank_whose_python_is_held_accuses_nobody_and_learns_that_it_was_given_up(make: Make) -> None:
    ranks = make(2, heartbeat=1.0)
    every(ranks, "enter", 0, "step 7")
    since = ranks[1].post("hold", 2.5)
    ranks[0].post("verdict", 5.0)
    found = learned(ranks[:1], since, 1.0 + QUICK)
    assert found["rank"] == 1 and "rank 1 does not answer" in found["message"]
    ranks[1].answer()
    assert ranks[1].do("verdict", 1.0)["message"] == found["message"]


def test_a_rank_can_end_while_the_store_does_not_answer(make: Make) -> None:
    ranks = make(2, store="rank 0", heartbeat=1.0)
    every(ranks, "enter", 0, "step 7")
    time.sleep(0.3)
    ranks[0].kill(signal.SIGSTOP)
    assert "does not answer" in ranks[1].do("verdict", 5.0)["message"]
    since = ranks[1].post("farewell")
    assert ranks[1].answer()[1] - since < QUICK
    ranks[1].post("exit")
    assert ranks[1].has_ended()


def test_a_rank_that_loads_data_for_long_is_alive(make: Make) -> None:
    ranks = make(2, heartbeat=1.0, timeout=30.0)
    ranks[0].do("enter", 0, "step 7")
    ranks[1].post("steps", 3.0)
    assert ranks[0].do("verdict", 3.0) is None
    ranks[1].answer()


def test_a_fork_of_a_rank_ends_without_a_word(make: Make) -> None:
    ranks = make(2)
    every(ranks, "enter", 0, "step 7")
    assert ranks[1].do("fork") == 0
    assert every(ranks, "verdict", 1.5) == [None, None]
