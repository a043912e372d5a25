"""The laws of docs/ARCHITECTURE.md: what it names exists, imports follow its arrows, calls follow its walks."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from count_code import lines_by_room
from torch import nn
from torch.utils._device import _device_constructors

from pipeline import Pipe, Place
from pipeline.curvature import Hessian

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
PACKAGES = ("scheduler", "partition", "pipeline")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
QUOTED = re.findall(r"`([^`\n]+)`", TEXT)


def test_the_page_is_two_pages() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 130] == []


def test_every_path_on_the_page_exists() -> None:
    paths = [name for name in QUOTED if re.fullmatch(r"[\w./]+\.py|[\w./]+/", name)]
    assert len(paths) > 30
    assert [name for name in paths if not any((ROOT / inside / name).exists() for inside in ("", "pipeline"))] == []


def test_every_dotted_name_on_the_page_exists() -> None:
    names = [name for name in QUOTED if re.fullmatch(rf"({'|'.join(PACKAGES)})\.[\w.]+", name) and name[-3:] != ".py"]
    assert names
    for name in names:
        owner, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(owner), attribute), name


def test_every_module_says_what_it_is() -> None:
    assert not [path for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_the_size_on_the_page_is_what_the_script_counts() -> None:
    stated = re.search(r"([\d,]+) lines of code", TEXT)
    assert stated
    counted = lines_by_room().total()
    assert abs(int(stated[1].replace(",", "")) - counted) <= counted / 100, (
        f"docs/ARCHITECTURE.md states {stated[1]} lines of code, but python tests/count_code.py counts {counted:,}, "
        f"which is more than 1 % away. Write {counted:,} there."
    )


# ----------------------------------------------------------------------------------------------------------- the walks


def _pipe(schedule: str) -> tuple[Pipe, torch.Tensor, torch.Tensor]:
    """A Pipe at two places, which recomputes every chunk, and a mini-batch for it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    cpu = torch.device("cpu")
    places = [Place(cpu, "a"), Place(cpu, "b")]
    pipe = Pipe(model, [2, 1], chunks=2, devices=places, schedule=schedule, checkpoint="always")
    return pipe, torch.randn(4, 3).double(), torch.randn(4, 2).double()


def _forward() -> None:
    pipe, x, _ = _pipe("1f1b")
    pipe(x)


def _back() -> None:
    pipe, x, y = _pipe("zb-h1")
    nn.functional.mse_loss(pipe(x), y).backward()
    pipe.step(x, y, loss_fn=nn.functional.mse_loss)
    (gradient,) = torch.autograd.grad(pipe(x).sum(), [pipe[0].weight], create_graph=True)
    assert gradient.requires_grad


def _product() -> None:
    pipe, x, y = _pipe("1f1b")
    H = Hessian(pipe, (x, y), nn.functional.mse_loss)
    H @ {name: torch.ones_like(parameter) for name, parameter in pipe.named_parameters()}


def _called(walk: Callable[[], None]) -> set[tuple[str, str]]:
    """(path, name) of every function that is called in this thread."""
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        walk()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize(
    ("title", "walk"),
    [("x forward", _forward), ("A gradient back", _back), ("v through", _product)],
)
def test_a_walk_names_at_most_12_files_and_functions_that_it_calls(title: str, walk: Callable[[], None]) -> None:
    (text,) = re.findall(rf"^### {title}[^\n]*\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
    assert len(set(re.findall(r"`([\w/]+\.py)`", text))) <= 12
    called = _called(walk)
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    for file, what in rows:
        names = re.findall(r"`(\w[\w.]*)`", what)
        assert {name for path, name in called if path == str(ROOT / "pipeline" / file)} & set(names), file
        assert set(names) <= {name for _, name in called}, file


# ----------------------------------------------------------------------------------------------------------- imports


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("scheduler", {"torch", "partition", "pipeline"}), ("partition", {"pipeline"})],
)
def test_packages_import_only_downward(package: str, forbidden: set[str]) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not imported(path) & forbidden, path


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ------------------------------------------------------------------------------------------------ the rooms of pipeline

LEVELS = (  # each imports only what stands above it
    "common", "skip", "data", "transports", "recompute", "gradients", "stage", "execution", "distributed", "entry",
    "pipe", "curvature",
)  # fmt: skip


ARROWS = re.findall(r"(?=\b(\w+) +--> +(\w+))", TEXT)  # "a --> b --> c" holds two


def test_every_room_is_on_the_page() -> None:
    names = [f"pipeline/{room}" for room in LEVELS] + ["scheduler", "partition"]
    rows = re.findall(r"^\| `([\w/.]+?)(?:/|\.py)` \|", TEXT, re.MULTILINE)
    assert set(names) <= set(rows)
    assert {name for pair in ARROWS for name in pair} == {*LEVELS, *PACKAGES}


@pytest.mark.parametrize("room", LEVELS)
def test_a_room_imports_what_the_arrows_on_the_page_lead_to(room: str) -> None:
    files = _files(room)
    direct = {other for path in files for other, _ in _imports(path)}
    leads: set[str] = set()
    new = {room}
    while new:
        leads |= new
        new = {end for start, end in ARROWS if start in leads} - leads
    assert direct <= leads
    assert {end for start, end in ARROWS if start == room} <= direct  # no arrow is for nothing


def test_pipeline_has_few_rooms_and_each_says_what_it_is_and_imports() -> None:
    inside = [path for path in (ROOT / "pipeline").iterdir() if path.is_dir() or path.suffix == ".py"]
    entries = {path.stem for path in inside if not path.name.startswith("__")}
    assert entries == set(LEVELS) and len(entries) <= 12
    for room in (ROOT / "pipeline").rglob("__init__.py"):
        words = ast.get_docstring(ast.parse(room.read_text()))
        assert words, room
        if room.parent.parent.name == "pipeline" and room.parent.name != "curvature":
            assert re.search(r"\n\nImports .+\.", words), room


def _files(room: str) -> list[Path]:
    folder = ROOT / "pipeline" / room
    files = list(folder.rglob("*.py")) or [folder.with_suffix(".py")]
    assert files[0].exists()
    return files


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """(room, name) of what a file of pipeline imports from pipeline."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pipeline":
            for alias in node.names:
                parts = f"{node.module}.{alias.name}".split(".")
                yield parts[1], parts[-1]
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "pipeline" for alias in node.names), path


@pytest.mark.parametrize("level", range(len(LEVELS)), ids=LEVELS)
def test_a_room_imports_only_rooms_below_it_and_no_private_names(level: int) -> None:
    for path in _files(LEVELS[level]):
        for other, name in _imports(path):
            assert other in LEVELS[: level + 1], f"{path.relative_to(ROOT)} imports {other}"
            assert other == LEVELS[level] or not name.startswith("_"), f"{path.relative_to(ROOT)} imports {name}"


def _private_names_of_pipe() -> set[str]:
    """Methods and attributes that pipe.py gives a Pipe for itself."""
    tree = ast.parse((ROOT / "pipeline" / "pipe.py").read_text())
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names += [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    ]
    return {name for name in names if re.match(r"_(?!_)", name)}


def test_curvature_touches_no_private_name_of_a_pipe() -> None:
    private = _private_names_of_pipe()
    assert private  # or this would hold of anything
    for path in (ROOT / "pipeline" / "curvature").rglob("*.py"):
        tree = ast.parse(path.read_text())
        own = {"self", "cls", *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in private:
                owner = ast.unparse(node.value)
                assert owner in own, f"{path.relative_to(ROOT)}:{node.lineno} uses {owner}.{node.attr}"


# -------------------------------------------------------------------------------------- one path for all accelerators

CUDAS_OWN = {  # NCCL; switches of CUDA's kernels
    "pipeline/transports/nccl.py", "pipeline/common/torch_modes.py", "partition/precision.py",
}  # fmt: skip
NVIDIAS_OWN = ROOT / "partition" / "hardware"  # NVML, which knows no other devices


def _is_cudas(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("cuda", "is_cuda")
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(re.match("cuda(:|$)", node.value))


def test_what_is_only_cudas_stands_in_named_modules() -> None:
    """All else goes through torch.accelerator, in pipeline/common/accelerators.py."""
    found = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if NVIDIAS_OWN not in path.parents and any(map(_is_cudas, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == CUDAS_OWN


# ------------------------------------------------------------------------------------------ the caller's default device


def _made_by_default(node: ast.AST) -> bool:
    """Whether a call makes a tensor on the default device."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    factory = getattr(torch, node.func.attr, None) if ast.unparse(node.func.value) == "torch" else None
    has_device = any(keyword.arg in ("device", None) for keyword in node.keywords)
    return factory in _device_constructors() and not has_device


def test_every_tensor_that_is_made_names_its_device() -> None:
    """Or a script's torch.set_default_device would move what only the host reads."""
    assert _made_by_default(ast.parse("torch.zeros(3, dtype=torch.int64)", mode="eval").body)
    for path in set(MODULES) - {ROOT / "pipeline/transports/testing.py"}:  # tests of channels
        for node in ast.walk(ast.parse(path.read_text())):
            assert not _made_by_default(node), f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


# ------------------------------------------------------------------------------------- first lines say what a module is

INTERROGATIVE = re.compile(
    r"(Who|Whose|Whom|What|Which|When|Where|Why|How|Whether|Is|Are|Do|Does|Did|Has|Have|May|Must|Can|Could|Should|"
    r"Would|Will)\b"
)


def _named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The first line of the docstrings of a module, its classes and its functions, with their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", ""), text.split("\n")[0]


def test_the_first_line_of_a_docstring_is_no_question() -> None:
    """That of a function with a verdict may begin with "Whether"."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), path
            for name, first in _named(tree):
                is_question = INTERROGATIVE.match(first) and not (name and first.startswith("Whether"))
                assert "?" not in first and not is_question, f"{path.relative_to(ROOT)}, {name}: {first}"


# ----------------------------------------------------------------------------------------------------- small classes


def _attributes(node: ast.ClassDef) -> set[str]:
    """The names of the attributes that a class sets on its objects, and of its fields."""
    annotated = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    stores = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    return fields | {part.attr for part in stores if isinstance(part.value, ast.Name) and part.value.id == "self"}


def test_a_type_name_means_one_thing() -> None:
    """Classes and aliases, whether private or not, of the three packages. Two public ones are called Report."""
    owners: dict[str, list[str]] = {}
    for path in MODULES:
        for name in _type_names(ast.parse(path.read_text())):
            owners.setdefault(name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert len(owners) > 500
    assert owners.pop("Report") == ["pipeline/curvature/checking.py", "scheduler/reporting.py"]
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_a_public_function_name_means_one_thing() -> None:
    """Functions of modules. Commands are called what they run; each schedule has its `build`."""
    owners: dict[str, list[str]] = {}
    for path in MODULES:
        is_of_commands = path.name in ("command.py", "commands.py", "__main__.py")
        if not is_of_commands and path.parent.name not in ("schedules", "command_line"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    owners.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(owners) > 600
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def _type_names(tree: ast.Module) -> Iterator[str]:
    yield from [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if ast.unparse(node.annotation) == "TypeAlias":
                yield node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if re.match("_?[A-Z][a-z]", node.targets[0].id) and "TypeVar" not in ast.unparse(node.value):
                yield node.targets[0].id


def test_no_class_has_more_than_12_attributes() -> None:
    counted = 0
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    counted += 1
                    names = _attributes(node)
                    assert len(names) <= 12, f"{path.relative_to(ROOT)}, {node.name}: {sorted(names)}"
    assert counted > 100
