from types import SimpleNamespace

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import schedules
from torch.distributed.pipelining import schedules as of_torch

from scheduler import Placement, Schedule, ScheduleError, by_name, names, simulate, verify
from scheduler.csv_files import from_csv, to_csv

LAWS = settings(derandomize=True, deadline=None, max_examples=examples(100))


@st.composite
def with_blocks(draw, schedules):
    """Some neighbours of each lane become blocks."""
    schedule = draw(schedules)
    random = draw(st.randoms(use_true_random=False))
    blocks = set()
    for lane, order in enumerate(schedule.orders):
        for at in range(len(order) - 1):
            if (lane, at - 1) not in blocks and random.random() < 0.3:
                blocks.add((lane, at))
    return Schedule("random", schedule.placement, schedule.chunks, schedule.orders, frozenset(blocks))


@LAWS
@given(with_blocks(schedules()))
def test_what_is_written_is_read_back(schedule):
    assert from_csv(to_csv(schedule), "random") == schedule


@LAWS
@given(with_blocks(schedules()), st.data())
def test_half_a_schedule_is_read_back_with_its_placement_and_chunks(schedule, data):
    lane = data.draw(st.integers(0, schedule.lanes - 1))
    left = data.draw(st.integers(0, len(schedule.orders[lane])))
    orders = [order[:left] if at == lane else order for at, order in enumerate(schedule.orders)]
    blocks = frozenset((host, at) for host, at in schedule.blocks if at + 1 < len(orders[host]))
    half = Schedule("half", schedule.placement, schedule.chunks + 1, tuple(orders), blocks)
    assert from_csv(to_csv(half), "half", half.placement, half.chunks) == half


@pytest.mark.parametrize("name", names())
def test_named_schedules_are_read_back(name):
    schedule = by_name(name, 4, 8)
    assert from_csv(to_csv(schedule), name) == schedule


@LAWS
@given(with_blocks(schedules()), st.randoms(use_true_random=False))
def test_idle_cells_and_what_does_not_compute_carry_no_meaning(schedule, random):
    noise = [
        "", " ", "0SEND_F1", "12RECV_F0", "3SEND_B10", "1RECV_B1", "0UNSHARD", "1RESHARD", "2REDUCE_GRAD",
        "0WAIT_SEND_F1", "3WAIT_SEND_B10", "2WAIT_REDUCE_GRAD",
    ]  # fmt: skip
    rows = [row.split(",") for row in to_csv(schedule).splitlines()]
    for row in rows:
        for _ in range(random.randrange(6)):
            row.insert(random.randrange(len(row) + 1), random.choice(noise))
    ends = random.choice(["\n", "\r\n", "\r"])
    text = ends.join(",".join(row) for row in rows) + ends * random.randrange(3) + random.choice(["", ",,", " "])
    assert from_csv(random.choice(["", "\ufeff"]) + text, "random") == schedule


# ---- torch's own files -----------------------------------------------------------------------------------------------

TORCH = {
    "Interleaved1F1B": (of_torch.ScheduleInterleaved1F1B, Placement.loop(4, 8)),
    "InterleavedZeroBubble": (of_torch.ScheduleInterleavedZeroBubble, Placement.loop(4, 8)),
    "ZBVZeroBubble": (of_torch.ScheduleZBVZeroBubble, Placement.vee(4)),
    "DualPipeV": (of_torch.ScheduleDualPipeV, Placement.vee(4)),
}


def made_by_torch(kind, lanes=4, chunks=8):
    """torch builds the tables of all ranks from the number of stages and ranks alone."""
    about = dict(num_stages=2 * lanes, group_size=lanes, group_rank=0, submod=None, has_backward=True)
    return kind([SimpleNamespace(stage_index=at, is_first=at == 0, is_last=False, **about) for at in range(2)], chunks)


def dumped(schedule, format, folder):
    path = folder / "torch.csv"
    schedule._dump_csv(path, format=format)
    return path.read_text()


def computing(order):
    return {rank: [str(action) for action in row if action is not None] for rank, row in order.items()}


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", TORCH)
def test_schedules_that_torch_dumps_are_read_and_right(name, format, tmp_path):
    kind, placement = TORCH[name]
    made = made_by_torch(kind)
    schedule = from_csv(dumped(made, format, tmp_path), name)
    verify(schedule)
    assert (schedule.placement, schedule.chunks) == (placement, 8)
    assert computing(made.pipeline_order) == {
        rank: row.split(",") for rank, row in enumerate(to_csv(schedule).splitlines())
    }


@pytest.mark.parametrize("name", TORCH)
def test_torch_reads_what_is_written(name, tmp_path):
    made = made_by_torch(TORCH[name][0])
    schedule = from_csv(dumped(made, "compute_only", tmp_path), name)
    other = made_by_torch(TORCH[name][0])
    other.pipeline_order.clear()
    (tmp_path / "ours.csv").write_text(to_csv(schedule))
    other._load_csv(tmp_path / "ours.csv")
    assert computing(other.pipeline_order) == computing(made.pipeline_order)
    assert computing(other.pipeline_order_with_comms) == computing(made.pipeline_order_with_comms)


@pytest.mark.parametrize("name, bubble", [
    ("Interleaved1F1B", 0.1579), ("InterleavedZeroBubble", 0.0588), ("ZBVZeroBubble", 0.0588), ("DualPipeV", 0.0588),
])
def test_torch_schedules_idle_as_published(name, bubble, tmp_path):
    """At 4 lanes and 8 chunks."""
    schedule = from_csv(dumped(made_by_torch(TORCH[name][0]), "compute_only", tmp_path))
    assert simulate(schedule).bubble == pytest.approx(bubble, abs=5e-5)


def test_torch_looped_bfs_is_read_but_goes_back_in_descending_order(tmp_path):
    schedule = from_csv(dumped(made_by_torch(of_torch.ScheduleLoopedBFS), "compute_only", tmp_path))
    with pytest.raises(ScheduleError, match="lane 0 runs 4B6 after 4B7, but backwards of a stage ascend"):
        verify(schedule)


def test_an_overlapped_pair_is_two_neighbours_and_a_block():
    schedule = from_csv("0F0,,(0F1;1B0)OVERLAP_F_B,0B0\n")
    assert str(schedule).endswith("lane 0: 0F0 0F1+1B0 0B0") and schedule.blocks == {(0, 1)}
    assert to_csv(schedule) == "0F0,(0F1;1B0)OVERLAP_F_B,0B0\n"


# ---- what is refused -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cell", [
    "0F", "F0", "0X0", "0F0xyz", "00F0", "0f0", "0F0 0F1", "0F0;0F1", "-1F0", "0SEND_F", "0SEND_F1x", "UNSHARD", "0FB1",
    "(0F0)OVERLAP_F_B", "(0F0;1B0;2B0)OVERLAP_F_B", "(0F0;1B0)", "(0SEND_F0;1B0)OVERLAP_F_B", "(0F0;)OVERLAP_F_B",
    "0F0+1B0", "None", "\u0661F0", "9" * 5000 + "F0",
])
def test_a_cell_that_is_no_action_is_refused_with_its_place(cell):
    with pytest.raises(ScheduleError) as refused:
        from_csv(f"0F0,0B0\n1F0,,{cell}\n")
    words = str(refused.value)
    assert words.startswith(f"row 2 (lane 1), column 3: '{cell[:40]}")
    assert "is not an action. Write a row for each lane" in words and len(words) < 500


@pytest.mark.parametrize("text, words", [
    ("", "there is no action in the table"),
    (",,\n\n", "there is no action in the table"),
    ("0UNSHARD\n", "there is no action in the table"),
    ("0F0,1F0\n0B0,1B0\n",
     r"row 2 \(lane 1\), column 1: 0B0 is of stage 0, which row 1 \(lane 0\), column 1 has put on another lane"),
    ("0F0,2F0\n", "no row has an action of stage 1, but stage 2 is there"),
    ("0F0,123456789012F0\n", "no row has an action of stage 1, but stage 123456789012 is there"),
    ("0F0\n\n1F0\n", r"lanes \[1\] host no stage"),
    ('"0F0', "this is no table: unexpected end of data. Write a row for each lane"),
    ('0F0,"0F1\n1F0,1F1', "this is no table: unexpected end of data"),
    ("0F0,\0\n", "this is no table: line contains NUL|is not an action"),
    ("0F0," + "x" * 200_000, "this is no table: field larger than field limit"),
])
def test_a_table_that_leaves_a_question_is_refused(text, words):
    with pytest.raises(ScheduleError, match=words):
        from_csv(text)


def test_rows_beyond_the_placement_are_refused():
    with pytest.raises(ScheduleError, match="there are 2 orders but 1 lanes"):
        from_csv("0F0\n1F0\n", placement=Placement.linear(1))


@pytest.mark.parametrize("chunks", [0, -1, 1.5])
def test_chunks_that_are_no_count_are_refused(chunks):
    with pytest.raises(ScheduleError, match="chunks is .*, but must be a whole number of at least 1"):
        from_csv("0F0,0B0", chunks=chunks)
