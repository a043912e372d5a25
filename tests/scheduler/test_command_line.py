"""`python -m scheduler` says what the functions say; its refusals are words."""

import csv
import io
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from itertools import takewhile

import pytest

import scheduler.__main__
from scheduler import Costs, Placement, Schedule, by_name, draw, names, simulate
from scheduler.__main__ import main
from scheduler.chrome import timeline_from_chrome
from scheduler.command_line.commands import schedules, show
from scheduler.comparison import compare
from scheduler.csv_files import from_csv, to_csv
from scheduler.plotting import svg
from scheduler.searches.searching import search

COMMANDS = ["draw", "compare", "simulate", "search", "verify"]
WRONG = "0F0,0B0,0F1,0B1\n1B0,1F0,1F1\n"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs a command in an empty folder: its status, what it printed, what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(command):
        capsys.readouterr()
        status = main(command.split())
        return (status, *capsys.readouterr())

    return run


class Terminal(io.StringIO):
    def isatty(self):
        return True


def table_in(text):
    """The rows of a printed table, cell by cell: cells are two spaces apart."""
    lines = text.splitlines()
    line = next(number for number, line in enumerate(lines) if line.startswith("──"))
    cells = [re.split(r"\s{2,}", row.strip()) for row in takewhile(str.strip, [lines[line - 1], *lines[line + 1:]])]
    columns, *rows = cells
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) > 1]


def help_of(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("lanes, chunks", [(1, 2), (3, 6), (4, 9)])
def test_draw_prints_the_grid_of_the_schedule(run, name, lanes, chunks):
    drawn = run(f"draw {name} --lanes {lanes} --chunks {chunks}")
    assert drawn == (0, draw(by_name(name, lanes, chunks)) + "\n", "")


def test_draw_takes_the_options_of_a_schedule(run):
    three = by_name("interleaved", 2, 4, stages_per_lane=3)
    assert run("draw interleaved --lanes 2 --chunks 4 --stages-per-lane 3")[1] == draw(three) + "\n"
    deep = by_name("eager-1f1b", 2, 4, warmup=(3, 2))
    assert run("draw eager-1f1b --lanes 2 --chunks 4 --option warmup=3,2")[1] == draw(deep) + "\n"
    assert run("draw eager-1f1b --lanes 2 --chunks 4 --option warmup=x")[2].startswith("warmup")
    assert run("draw eager-1f1b --lanes 2 --chunks 4 --option lanes=3")[::2] == (
        2, "--option lanes=... is no option of a schedule. Give NAME, --lanes and --chunks.\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    "said, costs",
    [
        ("--forward 1,1.2,0.9", Costs(forward=(1, 1.2, 0.9))),
        ("--forward 0", Costs(forward=0)),
        ("--input 3 --weight 2 --link 0.5", Costs(input=3, weight=2, link=0.5)),
        ("--backward 5 --recompute 1e0 --link 1,2", Costs(backward=5, recompute=1.0, link=(1, 2))),
        ("--speed 1,2,4 --activation 3 --kept 1 --checkpoint 0.5",
         Costs(speed=(1, 2, 4), activation=3, kept=1, checkpoint=0.5)),
    ],
)
def test_costs_are_those_that_are_said(run, said, costs):
    timeline = simulate(by_name("zb-h1", 3, 5), costs)
    drawn = run(f"draw zb-h1 --lanes 3 --chunks 5 {said} --width 30 --chrome trace.json")
    assert drawn == (0, draw(timeline, 30) + "\n", "")
    with open("trace.json") as trace:
        assert timeline_from_chrome(trace.read()).peak_memory == timeline.peak_memory


def test_every_cost_has_an_option_but_for_the_size_of_a_message_and_the_unit():
    said = {option.name for option in schedules.commands["draw"].params}
    assert {field.name for field in fields(Costs)} - said == {"message", "unit"}  # what is typed is in slots


def test_files_hold_what_is_drawn(run):
    schedule = by_name("interleaved-zb", 2, 4)
    status, _, said = run("draw interleaved-zb --lanes 2 --chunks 4 --svg a.svg --chrome a.json --to-csv a.csv")
    assert (status, said) == (0, "")
    with open("a.svg") as figure, open("a.json") as trace, open("a.csv") as table:
        assert figure.read() == svg(schedule)
        assert timeline_from_chrome(trace.read()) == simulate(schedule)
        assert from_csv(table.read(), schedule.name) == schedule


@pytest.mark.parametrize("name", names())
def test_a_schedule_is_read_from_a_table_or_as_it_is_printed(run, tmp_path, name):
    schedule = by_name(name, 3, 7)
    (tmp_path / "table.csv").write_text(to_csv(schedule))
    (tmp_path / "printed.txt").write_text(f"\n{schedule}\n")
    assert run("draw --csv table.csv")[1] == run("draw --csv printed.txt")[1] == draw(schedule) + "\n"
    assert run("verify printed.txt") == (0, f"{str(schedule).splitlines()[0]}: right\n", "")


def test_a_file_gives_a_name_that_can_be_printed(run, tmp_path):
    (tmp_path / "mine_(2)-v1.csv").write_text(to_csv(by_name("1f1b", 2, 2)))
    status, text, _ = run("verify mine_(2)-v1.csv")
    assert (status, text) == (0, "schedule mine__2_-v1, chunks 2, stages on lanes 0 1: right\n")


@pytest.mark.parametrize("lanes, chunks", [(1, 4), (2, 3), (4, 8), (4, 30), (8, 32)])
def test_compare_prints_what_compare_returns(run, lanes, chunks):
    status, text, said = run(f"compare --lanes {lanes} --chunks {chunks} --kept 0.5")
    rows = [row for row in compare(lanes, chunks, Costs(kept=0.5)) if not row.reason]
    found = {row["schedule"]: row for row in table_in(text)}
    assert (status, said, len(found)) == (0, "", len(rows))
    for row in rows:
        assert found[row.name] == {
            "schedule": row.name, "stages": str(row.stages_per_lane), "step": f"{row.makespan:.6g}",
            "bubble": f"{row.bubble:.1%}", "span": f"{row.span_bubble:.1%}",
            "in flight": f"{row.peak_in_flight:.6g}", "memory": f"{row.peak_memory:.6g}",
        }


def test_compare_takes_names_before_and_after_options(run):
    ahead = run("compare zb-h1 gpipe --lanes 2 --chunks 4")
    assert ahead == run("compare --lanes 2 --chunks 4 zb-h1 gpipe")
    assert [row["schedule"] for row in table_in(ahead[1])] == ["zb-h1", "gpipe"]


def test_compare_says_what_a_chunk_costs(run):
    text = run("compare --lanes 2 --chunks 4 --forward 1,2.5 --link 0.25")[1]
    assert text.startswith("2 lanes, 4 chunks; a chunk on a lane: forward 1,2.5, input 1, weight 1, link 0.25\n\n")


@pytest.mark.parametrize("sort, what", [("bubble", "bubble"), ("step", "makespan"), ("memory", "peak_memory")])
def test_compare_sorts_by_what_is_asked_for_and_puts_what_is_not_defined_last(run, sort, what):
    status, text, _ = run(f"compare --lanes 4 --chunks 7 --sort {sort} --to-csv rows.csv")
    rows = {row.name: row for row in compare(4, 7)}
    missing = [row for row in rows.values() if row.reason]
    shown = [getattr(rows[row["schedule"]], what) for row in table_in(text)]
    assert status == 0 and missing
    assert shown == sorted(shown) and len(shown) == len(rows) - len(missing)
    *_, last = text.rstrip().split("\n\n")
    assert sorted(text.splitlines()[-len(missing):]) == sorted(f"{row.name}: {row.reason}" for row in missing)


def test_compare_prints_no_table_where_nothing_is_defined(run):
    status, text, _ = run("compare zb-h2 --lanes 4 --chunks 7")
    assert status == 0
    assert text.splitlines()[2:] == [f"zb-h2: {row.reason}" for row in compare(4, 7, names=["zb-h2"])]


def test_compare_without_sort_sorts_by_bubble(run):
    assert run("compare --lanes 3 --chunks 8") == run("compare --lanes 3 --chunks 8 --sort bubble")


@pytest.mark.parametrize("said, cap", [("4", 4), ("4,4,3.5,2", (4, 4, 3.5, 2)), ("7", 7), ("0", 0)])
def test_compare_says_what_fits(run, said, cap):
    found = table_in(run(f"compare --lanes 4 --chunks 8 --memory {said} --to-csv rows.csv")[1])
    fits = {row.name: row.fits(cap) for row in compare(4, 8)}
    assert {row["schedule"]: row[f"fits {said}"] == "yes" for row in found} == fits
    with open("rows.csv") as table:
        assert {row["name"]: row["fits"] == "yes" for row in csv.DictReader(table)} == fits


def test_the_table_of_compare_as_a_file_is_unrounded(run):
    run("compare --lanes 3 --chunks 5 --forward 0.1 --to-csv rows.csv")
    with open("rows.csv") as table:
        found = {row["name"]: row for row in csv.DictReader(table)}
    for row in compare(3, 5, Costs(forward=0.1)):
        assert found[row.name]["reason"] == row.reason
        for what in ("stages_per_lane", "makespan", "bubble", "span_bubble", "peak_in_flight", "peak_memory"):
            assert found[row.name][what] == ("" if row.reason else str(getattr(row, what)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2", "interleaved"])
def test_simulate_prints_what_simulate_returns(run, name):
    status, text, said = run(f"simulate {name} --lanes 4 --chunks 9 --link 0.5 --kept 0.25")
    schedule = by_name(name, 4, 9)
    timeline = simulate(schedule, Costs(link=0.5, kept=0.25))
    assert (status, said) == (0, "")
    assert text.startswith(str(schedule).splitlines()[0])
    assert re.search(r"makespan +(\S+) slots", text)[1] == f"{timeline.makespan:g}"
    assert re.search(r"flush bubble +(\S+)", text)[1] == f"{timeline.bubble:.2%}"
    assert re.search(r"span bubble +(\S+)", text)[1] == f"{timeline.span_bubble:.2%}"
    for lane, row in enumerate(table_in(text)):
        events = timeline.by_lane[lane]
        assert list(row) == ["lane", "start", "end", "busy", "idle", "pairs in flight", "memory"]
        assert [float(cell) for cell in row.values()] == pytest.approx([
            lane, events[0].start, events[-1].end, timeline.busy[lane], timeline.makespan - timeline.busy[lane],
            timeline.peak_in_flight[lane], timeline.peak_memory[lane],
        ])


@pytest.mark.parametrize("lanes, chunks", [(1, 1), (2, 2), (4, 8)])
def test_simulate_prints_the_critical_path(run, lanes, chunks):
    text = run(f"simulate gpipe --lanes {lanes} --chunks {chunks} --link 2")[1]
    last = lanes - 1
    ahead = "".join(f"{lane}F0 > " for lane in range(last))
    back = "".join(f" > {lane}B0" for lane in range(last - 1, 0, -1))
    first = f" > 0B0..0B{chunks - 1} ({chunks})" if last else ""
    end = f"{last}B0" if last else f"0B{chunks - 1}"
    path = f"  {ahead}{last}F0..{end} ({chunks + 1 if last else 2 * chunks}){back}{first}\n"
    assert text.endswith(path)
    assert f"{3 * (chunks + lanes - 1)} at work, {4 * last} between them:\n" in text


def test_a_long_critical_path_is_shortened(run):
    text = run("simulate 1f1b --lanes 30 --chunks 30")[1]
    assert text.endswith("  0F0 > 1F0 > 2F0 > 3F0 > 4F0 > 5F0 > (47 more) > 5B29 > 4B29 > 3B29 > 2B29 > 1B29 > 0B29\n")


def test_simulate_says_why_a_lane_is_idle(run):
    timeline = simulate(by_name("1f1b", 4, 8))
    for lane, time in ((0, 5), (3, 1.5), (1, 33), (2, 9)):
        text = run(f"simulate 1f1b --lanes 4 --chunks 8 --why {lane} {time}")[1]
        assert text.endswith(f"\n\n{timeline.why_idle(lane, time)}\n")


def test_outputs_of_blocks_are_released_as_asked(run, tmp_path):
    schedule = Schedule.parse("""
        schedule mine, chunks 2, stages on lanes 0 1
        lane 0: 0F0 0F1+0B0 0B1
        lane 1: 1F0 1B0 1F1 1B1
    """)
    (tmp_path / "mine.csv").write_text(to_csv(schedule))
    assert run("draw --csv mine.csv --svg mine.svg")[1] == draw(schedule) + "\n"
    assert (tmp_path / "mine.svg").read_text() == svg(schedule)
    late = simulate(schedule, release="block")
    assert late.makespan > simulate(schedule).makespan
    assert run("draw --csv mine.csv --release block")[1] == draw(late) + "\n"
    assert f"makespan      {late.makespan} slots" in run("simulate --csv mine.csv --release block")[1]
    rows = table_in(run("compare dualpipev --lanes 3 --chunks 6 --release block")[1])
    assert [row["step"] for row in rows] == [f"{compare(3, 6, names=['dualpipev'], release='block')[0].makespan:g}"]


@pytest.mark.parametrize(
    "said, given",
    [
        ("", {}),
        ("--memory 3 --objective span --seed 7", {"memory": 3, "objective": "span", "seed": 7}),
        ("--memory 4,3,3.5 --effort 0.02", {"memory": (4, 3, 3.5), "effort": 0.02}),
        ("--whole --placement linear", {"split": False, "placement": Placement.linear(3)}),
        ("--placement vee", {"placement": Placement.vee(3)}),
        ("--placement loop", {"placement": Placement.loop(3, 6)}),
        ("--stages-per-lane 3", {"placement": Placement.loop(3, 9)}),
        ("--stages-per-lane 1 --placement loop", {"placement": Placement.linear(3)}),
    ],
)
def test_search_prints_what_search_finds(run, said, given):
    status, text, _ = run(f"search --lanes 3 --chunks 5 --effort 0.01 --input 2 --to-csv found.csv --width 20 {said}")
    found = search(Costs(input=2), 3, 5, **{"effort": 0.01, **given})
    assert (status, text) == (0, f"{found}\n\n{draw(found.timeline, 20)}\n")
    with open("found.csv") as table:
        assert from_csv(table.read()).orders == found.schedule.orders


def test_numbers_of_a_file_that_is_no_right_schedule_come_with_a_note(run, tmp_path):
    (tmp_path / "half.csv").write_text("0F0,0F1\n1F0,1B0\n")
    (tmp_path / "right.csv").write_text(to_csv(by_name("1f1b", 2, 2)))
    for command in ("simulate", "draw"):
        status, text, said = run(f"{command} --csv half.csv")
        assert not status and text
        assert said == "note: half.csv is no right schedule: penstock schedules verify half.csv says why.\n"
        assert not run(f"{command} --csv right.csv")[2]


def test_no_words_are_answered_by_the_help_alone(run, capsys):
    assert run("")[2] == help_of("", capsys)


def test_verify_prints_all_faults_and_ends_with_status_1(run, tmp_path):
    (tmp_path / "wrong.csv").write_text(WRONG)
    status, text, said = run("verify wrong.csv")
    assert (status, said) == (1, "")
    assert "schedule wrong (lanes=2, chunks=2) has 3 faults:" in text
    assert "1B1 is missing: add it to lane 1, or 1I1 and 1W1." in text
    assert "lane 1 |B0! F0  F1" in text


@pytest.mark.parametrize(
    "command, words",
    [
        ("drew", "No such command 'drew'. Did you mean 'draw'? See python -m scheduler --help."),
        ("drew 1f1b", "No such command 'drew'."),
        ("draw", "which schedule? Name one (1f1b, "),
        ("draw 1f1b", "1f1b is made for a number of lanes and of chunks. Add --lanes and --chunks."),
        ("draw 1f1b --lanes 2", "Add --chunks."),
        ("draw 1f1b --lanes 0 --chunks 2", "lanes is 0, but must be a whole number of at least 1. Use lanes=1"),
        ("draw 1f1b --lanes 2.5 --chunks 2", "value for '--lanes': '2.5' is not a valid integer. See python"),
        ("draw 1f1b --lane 2 --chunks 2", "No such option '--lane'. (Did you mean one of: '--lanes', '--link'?)"),
        ("draw 1f1 --lanes 2 --chunks 2", "there is no schedule '1f1'; there are "),
        ("draw zb-h2 --lanes 2 --chunks 2", "Use chunks=4 or more"),
        ("draw gpipe --lanes 2 --chunks 2 --stages-per-lane 2", "gpipe takes no option stages_per_lane"),
        ("draw gpipe --lanes 2 --chunks 2 --option warmup", "'warmup' is not of the form WHAT=VALUE"),
        ("draw gpipe --lanes 2 --chunks 2 --width 0", "width is 0"),
        ("draw gpipe --lanes 2 --chunks 2 --svg no/a.svg", "Could not open file 'no/a.svg': No such file"),
        ("draw gpipe --lanes 2 --chunks 2 --chrome .", "Could not open file '.': Is a directory"),
        ("draw --csv no.csv", "value for '--csv': 'no.csv': No such file or directory"),
        ("draw --csv bytes.csv", "row 1 (lane 0), column 1: '��\\x00' is not an action."),
        ("draw --csv words.csv", "row 1 (lane 0), column 2: '0X0' is not an action."),
        ("draw --csv wrong.csv", "lane 1 waits at 1B0"),
        ("verify words.csv", "'0X0' is not an action."),
        ("verify no.csv", "value for 'FILE': 'no.csv': No such file or directory"),
        ("draw 1f1b --lanes 2 --csv a.csv", "leaves nothing to say for the name, --lanes. Drop one or the other."),
        ("simulate --csv a.csv --option a=1", "leaves nothing to say for --option."),
        ("simulate 1f1b --lanes 2 --chunks 2 --forward 1,x", "value for '--forward': 'x' is not a number, nor a list"),
        ("simulate 1f1b --lanes 2 --chunks 2 --forward 1,", "value for '--forward': '' is not a number, nor a list"),
        ("simulate 1f1b --lanes 2 --chunks 2 --forward x", "Invalid value for '--forward': 'x' is not a number. See"),
        ("simulate 1f1b --lanes 2 --chunks 2 --forward -1", "forward is -1, but must be a finite number"),
        ("simulate 1f1b --lanes 2 --chunks 2 --link nan", "link is nan"),
        ("simulate 1f1b --lanes 2 --chunks 2 --forward 1,2,3", "forward lists 3 costs but there are 2 stages"),
        ("simulate 1f1b --lanes 2 --chunks 2 --why 2 0", "there is no lane 2 at 0"),
        ("simulate 1f1b --lanes 2 --chunks 2 --why 0.5 0", "lane is 0.5, but must be a whole number"),
        ("compare --lanes 2", "Missing option '--chunks'. See python -m scheduler compare"),
        ("compare --lanes 2 --chunks 0", "chunks is 0"),
        ("compare 1f1 --lanes 2 --chunks 2", "Did you mean '1f1b'?"),
        ("compare --lanes 3 --chunks 6 --memory 1,2", "memory lists 2 numbers but there are 3 lanes"),
        ("compare --lanes 3 --chunks 6 --memory nan", "memory is nan"),
        ("compare --lanes 3 --chunks 6 --sort name", "Invalid value for '--sort': 'name' is not one of"),
        ("search --lanes 3 --chunks 6 --placement vee --stages-per-lane 2", "Drop --stages-per-lane."),
        ("search --lanes 3 --chunks 6 --stages-per-lane 0", "stages_per_lane is 0"),
        ("search --lanes 3 --chunks 0", "chunks is 0"),
        ("search --lanes 3 --chunks 6 --effort -1", "effort is -1"),
        ("search --lanes 3 --chunks 6 --seed -1", "seed is -1"),
        ("search --lanes 3 --chunks 6 --memory 0.5", "memory of lane 0 is 0.5, but one chunk alone holds 1"),
        ("search --lanes 3 --chunks 6 --memory 1,2", "memory lists 2 numbers but there are 3 lanes"),
        ("search --lanes 3 --chunks 6 --forward 1,2", "forward lists 2 costs but there are 3 stages"),
        ("search --lanes 3 --chunks 6 --objective step", "Invalid value for '--objective': 'step' is not one of"),
        ("compare --lanes 3 --chunks 6 --csv a.csv", "No such option '--csv'."),
        ("search --lanes 3 --chunks 6 --csv a.csv", "No such option '--csv'."),
        ("compare --lanes 3 --chunks 6 --to-csv .", "Could not open file '.': Is a directory"),
    ],
)
def test_what_cannot_be_is_refused_in_words_on_stderr_with_status_2(run, tmp_path, command, words):
    (tmp_path / "a.csv").write_text("0F0,0B0\n")
    (tmp_path / "words.csv").write_text("0F0,0X0\n")
    (tmp_path / "wrong.csv").write_text(WRONG)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    status, text, said = run(command)
    assert status == 2
    assert words in said and "Traceback" not in said
    assert (tmp_path / "a.csv").read_text() == "0F0,0B0\n"
    assert "open file" in said or not text


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_says_what_there_is(command, capsys):
    text = help_of(command, capsys)
    assert text.startswith(f"Usage: python -m scheduler {command}".rstrip())
    assert f"  penstock schedules {command or 'draw'} " in text[text.index("examples:\n"):]
    listed = set(COMMANDS) if not command else set(names()) if command in ("draw", "compare", "simulate") else set()
    assert listed <= set(re.findall(r"[\w-]+", text))
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_in_the_help_runs(run, tmp_path, capsys, command):
    (tmp_path / "mine.csv").write_text(to_csv(by_name("zb-h1", 4, 6)))
    examples = re.findall(rf"^    penstock schedules ({command} .*)$", help_of(command, capsys), re.MULTILINE)
    assert examples
    for example in examples:
        status, text, said = run(f"{example} --effort 0" if command == "search" else example)
        assert (status, said) == (0, "") and text


def test_without_its_library_the_command_line_says_what_to_install(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("scheduler.command_line")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "click", None)
    status, text, said = run("draw 1f1b --lanes 2 --chunks 2")
    assert (status, text) == (2, "") and said.startswith("the command line needs click")
    assert said.endswith('pip install "penstock-torch[cli]"\n')


def test_on_a_terminal_what_does_not_fit_is_dim(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    main("compare 1f1b gpipe --lanes 4 --chunks 8 --memory 4".split())
    dim = {name: "\x1b[2m" in line for line in sys.stdout.getvalue().splitlines() for name in ("1f1b", "gpipe")
           if name in line}
    assert dim == {"1f1b": False, "gpipe": True}


def test_a_terminal_shows_styles_and_a_pipe_shows_none(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stdout, styled in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", stdout)
        show(["name", "number"], [["one", "1"], ["two", "2"]], [False, True])
        assert ("\x1b[2m" in stdout.getvalue()) is styled
        assert "two" in stdout.getvalue()


@pytest.mark.parametrize("columns", [10, 30, 60, 90])
def test_a_narrow_terminal_cuts_no_number(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    main("compare interleaved-zb 1f1b --lanes 8 --chunks 32 --activation 1000 --memory 9000".split())
    words = re.sub("\x1b[^m]*m", "", sys.stdout.getvalue()).split()
    assert {"interleaved-zb", "99.5", "3.5%", "8000", "1f1b", "117", "17.9%", "yes"} <= set(words)
    assert "…" not in sys.stdout.getvalue()


def test_on_a_terminal_a_grid_that_is_too_wide_comes_with_what_to_do(monkeypatch, capsys):
    said = {}
    for columns in (106, 105):  # the grid has 106
        monkeypatch.setenv("COLUMNS", str(columns))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Terminal())
            main("draw gpipe --lanes 4 --chunks 8".split())
        said[columns] = capsys.readouterr().err
    assert said == {106: "", 105: "The grid has 106 columns, this terminal 105: say --width N or --svg FILE, or pipe "
                    "it into less -S.\n"}


def test_a_closed_pipe_is_no_traceback(monkeypatch, capsys):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main("draw gpipe --lanes 2 --chunks 2".split()) == 0
    assert capsys.readouterr().err == ""


def test_the_words_and_the_status_are_those_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scheduler", "draw", "1f1b", "--lanes", "0", "--chunks", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(scheduler.__main__.__file__, run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("lanes is 0")


def test_an_interrupt_is_no_traceback(run, monkeypatch):
    def interrupt(**given):
        raise KeyboardInterrupt

    monkeypatch.setattr(schedules.commands["draw"], "callback", interrupt)
    assert run("draw 1f1b") == (130, "", "interrupted\n")


def process(command, encoding="utf-8"):
    return subprocess.run(f"{sys.executable} -m scheduler {command}", shell=True, capture_output=True, text=True,
                          env={"PYTHONIOENCODING": encoding, "COLUMNS": "20"})


def test_into_a_pipe_a_table_is_plain_and_whole():
    ended = process("compare --lanes 8 --chunks 32 --memory 8 | cat")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\x1b" not in ended.stdout
    rows = {row["schedule"]: row for row in table_in(ended.stdout)}
    assert rows["1f1b"]["step"] == "117" and rows["1f1b"]["bubble"] == "17.9%" and rows["1f1b"]["fits 8"] == "yes"


def test_a_process_ends_with_the_status_of_its_command():
    ended = process("draw zb-h2 --lanes 4 --chunks 4")
    assert ended.returncode == 2
    assert ended.stdout == "" and ended.stderr.startswith("zb-h2 ") and ended.stderr.count("\n") == 1


def test_a_reader_who_has_enough_is_no_error():
    ended = process("draw gpipe --lanes 64 --chunks 99 | head -c 9")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "lane  0 |", "")


def test_letters_that_a_terminal_lacks_cost_no_result():
    ended = process("compare 1f1b --lanes 2 --chunks 3", "latin-1")
    assert (ended.returncode, ended.stderr) == (0, "") and "\n1f1b           1    12   25.0%" in ended.stdout
