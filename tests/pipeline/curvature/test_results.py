"""Results: what goes into a file comes out again; what cannot is told in words; prints and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import Tensor

import pipeline
from pipeline.curvature.results.result import Result, ResultError

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.float32, torch.float64),
]
SUFFIXES = [".npz", ".json"]


@dataclass(frozen=True, eq=False)
class Anything(Result):
    value: Any
    other: Any = None

    def lines(self):
        yield f"  a {type(self.value).__name__}"
        yield "and more"


@dataclass(frozen=True, eq=False)
class Curve(Result):
    heights: Tensor

    def lines(self):
        yield f"{len(self.heights)} heights"

    def draw(self, ax):
        ax.plot(self.heights.tolist())


@st.composite
def tensors(draw):
    """Of any bits: nan, inf, -0.0 and denormal numbers among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    if dtype.is_floating_point and draw(st.booleans()):
        special = st.sampled_from([0.0, -0.0, 1.0 / 3.0, float("inf"), float("-inf"), float("nan"), 1e-45, 6e-8])
        return torch.tensor(draw(st.lists(special, min_size=1, max_size=4)), dtype=torch.float64).to(dtype)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    return ((raw % 2).bool() if dtype is torch.bool else raw.view(dtype)).reshape(shape)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4)
    | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def seen(value: Any) -> Any:
    """All that there is to a value, such that == compares it: repr tells nan, inf and -0.0 apart."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, repr(value.tolist())
    if isinstance(value, dict):
        return dict, [(key, seen(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [seen(item) for item in value]
    return type(value), repr(value)


def there_and_back(value: Any, path: Path) -> Any:
    Anything(value).save(path)
    return Anything.load(path).value


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(value=VALUES)
@example(value={"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}, "a/b": torch.ones(3), "A": {"B": torch.zeros(4)}})
@example(value={"file": torch.ones(1), "result": torch.ones(2), "x": torch.ones(3), "x.npy": torch.ones(4), "": "\0"})
@example(value={"A": torch.ones(1), "a.1": torch.zeros(1), "a": torch.ones(2), "a.2": torch.zeros(2)})
@example(value={"float": "inf"})
@example(value={"dict": {"tuple": [1], "tensor": "float32"}})
@example(value=["inf", float("inf"), -0.0, 0, False, (), [], {}, 10**40])
def test_a_saved_result_loads_as_it_was(suffix, value, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    assert seen(there_and_back(value, path)) == seen(value)


@given(value=tensors())
def test_an_npz_keeps_every_bit(value, tmp_path_factory):
    back = there_and_back(value, tmp_path_factory.getbasetemp() / "bits.npz")
    assert bytes(back.clone().untyped_storage()) == bytes(value.clone().untyped_storage())


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(10)[::3],
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.Size([2, 3]),
    ],
    ids=["transposed", "strided", "expanded", "negated", "parameter", "size"],
)
def test_views_and_parameters_are_saved_by_their_entries(suffix, value, tmp_path):
    back = there_and_back(value, tmp_path / f"view{suffix}")
    assert list(back) == list(value) if isinstance(value, torch.Size) else torch.equal(back, value.detach())


def test_a_view_does_not_bring_its_storage_along(tmp_path):
    Anything(torch.zeros(100_000)[:2]).save(tmp_path / "small.npz")
    assert (tmp_path / "small.npz").stat().st_size < 5_000


def test_a_loaded_tensor_can_be_written_to(tmp_path):
    back = there_and_back(torch.zeros(3), tmp_path / "one.npz")
    back += 1.0
    assert back.tolist() == [1.0, 1.0, 1.0]


def test_numpy_finds_the_arrays_of_an_npz_under_the_names_of_fields(tmp_path):
    Anything([{"0.weight": torch.ones(2)}], torch.arange(3.0)).save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz", allow_pickle=False) as file:
        assert set(file.files) == {"result", "value.0.0.weight", "other"}
        assert file["other"].tolist() == [0.0, 1.0, 2.0]
        assert json.loads(str(file["result"]))["class"] == "Anything"


@dataclass(frozen=True, eq=False)
class Taken(Result):
    result: Tensor
    Result: Tensor
    file: Tensor
    allow_pickle: Tensor

    def lines(self):
        yield "taken names"


def test_arrays_of_an_npz_have_names_of_their_own_on_disks_that_know_no_case_too(tmp_path):
    Taken(*map(torch.ones, range(4))).save(tmp_path / "taken.npz")
    with zipfile.ZipFile(tmp_path / "taken.npz") as file:
        assert len({name.lower() for name in file.namelist()}) == 5
    assert [len(part) for part in vars(Taken.load(tmp_path / "taken.npz")).values()] == [0, 1, 2, 3]


def test_a_json_file_is_one_that_strict_readers_take(tmp_path):
    Anything(torch.tensor([float("nan"), 0.1]), float("inf")).save(tmp_path / "run.json")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    fields = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)["fields"]
    assert fields["value"] == {"tensor": "float32", "shape": [2], "data": ["nan", 0.10000000149011612]}
    assert fields["other"] == {"float": "inf"}


def test_result_load_finds_the_class_and_other_classes_refuse_it(tmp_path):
    Curve(torch.ones(2)).save(tmp_path / "curve.npz")
    assert type(Result.load(tmp_path / "curve.npz")) is Curve
    assert type(Curve.load(str(tmp_path / "curve.npz"))) is Curve
    with pytest.raises(ResultError, match=r"curve.npz holds a Curve, no Anything: use Curve.load, or Result.load"):
        Anything.load(tmp_path / "curve.npz")


@pytest.mark.parametrize("wrong", [3, True, None, b"run.npz"])
def test_what_is_no_path_is_refused_in_words(wrong):
    for use in (Result.load, Curve(torch.ones(2)).save):
        with pytest.raises(TypeError, match=f"the path of the result is {wrong!r}. Give a path: a str, or a"):
            use(wrong)
    if wrong is not None:  # which shows it
        with pytest.raises(TypeError, match=f"the path of the picture is {wrong!r}. Give a path: a str, or a"):
            Curve(torch.ones(2)).plot(wrong)


def test_of_two_classes_of_one_name_the_module_decides(tmp_path):
    @dataclass(frozen=True, eq=False)
    class Twin(Curve):
        __module__ = "here"

    here = Twin

    @dataclass(frozen=True, eq=False)
    class Twin(Curve):  # noqa: F811
        __module__ = "there"

    here(torch.ones(1)).save(tmp_path / "twin.json")
    assert type(Result.load(tmp_path / "twin.json")) is here
    text = (tmp_path / "twin.json").read_text()
    (tmp_path / "twin.json").write_text(text.replace('"here"', '"elsewhere"'))
    with pytest.raises(ResultError, match="holds a Twin of elsewhere, which is not known here. Import elsewhere first"):
        Result.load(tmp_path / "twin.json")


def test_a_file_makes_no_module_of_others_be_imported(tmp_path, monkeypatch):
    (tmp_path / "trap_of_a_file.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    changed(tmp_path / "run.json", ("class", "Trap"), ("module", "trap_of_a_file"))
    with pytest.raises(ResultError, match="holds a Trap of trap_of_a_file, which is not known here"):
        Result.load(tmp_path / "run.json")


def test_every_class_of_ours_is_known_as_soon_as_result_is_imported():
    code = """import importlib, pkgutil
import pipeline.curvature
from pipeline.curvature import Result
def known(kind):
    return [kind, *[name for each in kind.__subclasses__() for name in known(each)]]
before = known(Result)
for module in pkgutil.walk_packages(pipeline.curvature.__path__, "pipeline.curvature."):
    importlib.import_module(module.name)
assert known(Result) == before and len(before) > 10
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(pipeline.__file__).parent.parent)


def test_a_class_of_ours_that_moved_to_another_module_is_found(tmp_path):
    changed(tmp_path / "run.json", ("class", "Curve"), ("module", "pipeline.no_more"), ("fields", {"heights": [1.0]}))
    assert type(Result.load(tmp_path / "run.json")) is Curve


def changed(path: Path, *changes: tuple[str, Any]) -> None:
    """A file of an Anything whose JSON says something else."""
    Anything(1.5).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))


def test_a_newer_version_is_told(tmp_path):
    changed(tmp_path / "run.json", ("version", 2))
    with pytest.raises(ResultError, match="a newer version: its format is 2, .* knows 1. Update penstock-torch"):
        Result.load(tmp_path / "run.json")


@pytest.mark.parametrize(
    "fields, differ",
    [({}, "missing .*'value'"), ({"value": 1, "extra": 2}, "unexpected.*'extra'"), ({"other": 1}, "missing .*'value'")],
    ids=["none", "more", "missing"],
)
def test_fields_of_another_version_are_told(fields, differ, tmp_path):
    changed(tmp_path / "run.json", ("fields", fields))
    with pytest.raises(ResultError, match=rf"does not have the fields of a Anything .*{differ}.* Load it with"):
        Result.load(tmp_path / "run.json")


def test_a_field_with_a_default_may_be_missing(tmp_path):
    changed(tmp_path / "run.json", ("fields", {"value": 2}))
    assert (Anything.load(tmp_path / "run.json").value, Anything.load(tmp_path / "run.json").other) == (2, None)


def foreign(kind: str, path: Path) -> None:
    if kind == "text":
        path.write_text("eigenvalue 3\n")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    elif kind == "other json":
        path.write_text('{"lr": 0.1}')
    elif kind == "a list":
        path.write_text("[1, 2]")
    elif kind == "numpy's":
        with open(path, "wb") as file:
            np.savez(file, a=np.ones(2))
    else:
        Anything(torch.zeros(1000)).save(path)
        path.write_bytes(path.read_bytes()[:-300])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["text", "empty", "bytes", "other json", "a list", "numpy's", "cut short"])
def test_a_file_that_is_no_result_is_told(kind, suffix, tmp_path):
    path = tmp_path / f"foreign{suffix}"
    foreign(kind, path)
    with pytest.raises(ResultError, match=rf"foreign{suffix} is no saved result"):
        Result.load(path)


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": "float32", "shape": [3], "data": [1.0]},
        {"tensor": "float3", "shape": [1], "data": [1.0]},
        {"tensor": "object", "shape": [1], "data": [1.0]},
        {"array": "value"},
        {"set": [1]},
        {"list": [], "dict": {}},
    ],
    ids=["shape", "dtype", "no number", "array", "kind", "kinds"],
)
def test_a_damaged_field_is_told(value, tmp_path):
    changed(tmp_path / "run.json", ("fields", {"value": value}))
    with pytest.raises(ResultError, match="run.json is no saved result, or a damaged one"):
        Result.load(tmp_path / "run.json")


def test_no_pickle_in_a_file_is_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("a pickle was run",)

    with open(tmp_path / "trap.npz", "wb") as file:
        np.savez(file, result=np.array(Trap(), dtype=object))
    with pytest.raises(ResultError, match="trap.npz is no saved result.*allow_pickle=False"):
        Result.load(tmp_path / "trap.npz")


@pytest.mark.parametrize("name", ["run", "run.pt", "run.npz.old", "run.NPZ"])
def test_another_suffix_is_told(name, tmp_path):
    with pytest.raises(ResultError, match=rf"a result's file is named \*.npz or \*.json \(path: .*{name}\)"):
        Anything(1).save(tmp_path / name)
    with pytest.raises(ResultError, match=rf"a result's file is named \*.npz or \*.json \(path: .*{name}\)"):
        Result.load(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_file_and_no_folder_are_told(suffix, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"run{suffix}"):
        Result.load(tmp_path / f"run{suffix}")
    with pytest.raises(FileNotFoundError, match="there is no folder .*none .*Make it first"):
        Anything(1).save(tmp_path / "none" / f"run{suffix}")


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "value, words",
    [
        ({1, 2}, r"value is a set, which no file can hold here. Make it a tensor"),
        ([1, {"a": object()}], r"value.1.a is a object"),
        ({1: 2}, r"value is a dict with keys that are no str"),
        (Pair(1, 2), r"value is a Pair"),
        (1j, r"value is a complex"),
        (np.ones(2), r"value is a ndarray"),
        (torch.eye(2).to_sparse(), r"value is a torch.sparse_coo tensor"),
        (torch.ones(2, device="meta"), r"value is a .* on meta"),
        (torch.tensor([1j]), r"torch.complex64 .* Make it a dense one of: bool, uint8"),
        (torch.ones(2).bfloat16(), r"torch.bfloat16 .* Make it a dense one of: bool, uint8"),
        (torch.ones(2).to(torch.float8_e5m2), r"torch.float8_e5m2 .* Make it a dense one of: bool, uint8"),
    ],
    ids=[
        "set", "object", "keys", "namedtuple", "complex", "array", "sparse", "meta", "complex tensor", "bfloat16",
        "float8",
    ],
)
def test_a_value_that_no_file_can_hold_is_told_and_no_file_is_made(suffix, value, words, tmp_path):
    with pytest.raises(ResultError, match=words):
        Anything(value).save(tmp_path / f"run{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_old_file_as_it_was(tmp_path, monkeypatch):
    Anything(torch.ones(2)).save(tmp_path / "run.npz")
    whole = np.lib.format.write_array

    def disk_full(file: Any, array: Any, **options: Any) -> None:
        whole(file, array, **options)
        if array.shape == (3,):
            raise OSError("no space left")

    monkeypatch.setattr(np.lib.format, "write_array", disk_full)
    with pytest.raises(OSError, match="no space left"):
        Anything(torch.zeros(3)).save(tmp_path / "run.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["run.npz"]
    assert Anything.load(tmp_path / "run.npz").value.tolist() == [1.0, 1.0]


def test_print_shows_the_lines_and_repr_the_first():
    assert str(Anything(0.5)) == "  a float\nand more"
    assert repr(Anything(0.5)) == "<Anything: a float>"
    assert repr(Curve(torch.zeros(1000))) == "<Curve: 1000 heights>"


@pytest.mark.parametrize(
    "suffix, starts",
    [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")],
    ids=["png", "svg", "pdf", "PNG"],
)
def test_plot_writes_a_picture_without_pyplot(suffix, starts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    ax = Curve(torch.tensor([1.0, 2.0])).plot(tmp_path / f"curve{suffix}")
    assert len(ax.lines) == 1 and ax.lines[0].get_ydata().tolist() == [1.0, 2.0]
    assert (tmp_path / f"curve{suffix}").read_bytes().startswith(starts)


def test_plot_draws_on_the_axes_that_it_is_given(tmp_path):
    left, right = Figure().subplots(1, 2)
    assert Curve(torch.ones(2)).plot(tmp_path / "two.png", ax=right) is right
    assert (len(left.lines), len(right.lines)) == (0, 1)
    assert (tmp_path / "two.png").stat().st_size > 0


def test_plot_on_what_is_no_axes_is_refused_in_words(tmp_path):
    with pytest.raises(TypeError, match="ax is 3. Give axes of matplotlib"):
        Curve(torch.ones(2)).plot(tmp_path / "two.png", ax=3)


def test_plot_without_a_path_is_pyplots_figure():
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    ax = Curve(torch.ones(2)).plot()
    assert plt.gcf() is ax.figure
    plt.close(ax.figure)
    with pytest.raises(ResultError, match="no picture"):
        Anything(1).plot()
    assert plt.get_fignums() == []


def test_a_result_without_a_picture_tells(tmp_path):
    with pytest.raises(ResultError, match="Anything has no picture. Print it"):
        Anything(1).plot(tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_with_another_suffix_is_told(tmp_path):
    with pytest.raises(ResultError, match=r"named \*.png, \*.svg or \*.pdf \(path: .*curve.npz\)"):
        Curve(torch.ones(2)).plot(tmp_path / "curve.npz")


@pytest.mark.parametrize("path", [None, "curve.png"])
def test_without_matplotlib_plot_says_how_to_get_it(path, monkeypatch):
    for module in ("matplotlib", "matplotlib.pyplot", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "penstock-torch\[plots\]"'):
        Curve(torch.ones(2)).plot(path)
