"""Is what the documents show true? Their Python blocks run in order, a page at a time; their doctests must match."""

from __future__ import annotations

import doctest
import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def run_doctest(block: str, names: dict[str, object], where: str, line: int) -> None:
    test = doctest.DocTestParser().get_doctest(block, names, where, where, line)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert not report, "".join(report)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page: Path) -> None:
    torch.manual_seed(0)
    text = page.read_text()
    names: dict[str, object] = {}
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        if match.group(1).lstrip().startswith(">>>"):
            run_doctest(match.group(1), names, page.name, line)
        else:
            exec(compile("\n" * line + match.group(1), page.name, "exec"), names)


def test_every_page_that_is_linked_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_what_one_is_told_to_install_is_this_distribution_with_extras_that_it_has() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    sources = [path for room in ("pipeline", "partition", "scheduler") for path in (ROOT / room).rglob("*.py")]
    told = [
        name
        for path in [*PAGES, *sources]
        for name in re.findall(r"pip install \W?(penstock[^\s`'\"]*)", path.read_text())
    ]
    name = setup["metadata"]["name"]
    extras = {name, *[f"{name}[{extra}]" for extra in setup["options.extras_require"]]}
    assert len(told) >= 5 and set(told) <= extras


def test_the_public_ci_runs_on_each_python_that_the_classifiers_name() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (pinned,) = re.findall(r"python: \[(.*)\]", workflow)
    newest = re.findall(r"- python: \"([\d.]+)\"", workflow)
    assert sorted({*re.findall(r"[\d.]+", pinned), *newest}) == named
    assert f">={named[0]}" == setup["options"]["python_requires"]
    assert f"Python {named[0]} to {named[-1]}" in (ROOT / "README.md").read_text()


def test_the_readme_names_the_torches_that_are_asked_for_and_tested() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (least,) = re.findall(r"torch>=([\d.]+)", setup["options"]["install_requires"])
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (newest,) = set(re.findall(r"torch==(\d+\.\d+)\.\d+", (ROOT / ".github" / "workflows" / "ci.yml").read_text()))
    readme = (ROOT / "README.md").read_text()
    assert f"torch {least} or newer (tested with {pinned} and {newest})" in readme and least == pinned
