"""`make test` leaves out the fewest tests that take most of the time, all of which there are."""

from pathlib import Path

import longest
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = "pytester"


@given(st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 100)), st.floats(0, 1))
def test_the_fewest_take_so_large_a_share(seconds, share):
    found = longest.longest(seconds, share)
    left = [seconds[name] for name in seconds if name not in found]
    assert sum(left) <= (1 - share) * sum(seconds.values()) + 1e-6
    assert all(seconds[name] >= max(left, default=0) for name in found)
    assert not found or sum(seconds[name] for name in found[:-1]) < share * sum(seconds.values()) + 1e-6


def test_each_name_is_that_of_a_test():
    root = Path(__file__).parents[1]
    for name in longest.names():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (root / file).read_text(), f"{name} is no test. Measure anew: make longest."


def test_a_run_that_passes_writes_the_names_of_its_longest(pytester, monkeypatch):
    path = pytester.path / "names.txt"
    monkeypatch.setattr(longest, "PATH", path)
    pytester.makeconftest("""
        from longest import Stopwatch

        def pytest_configure(config):
            config.pluginmanager.register(Stopwatch())
    """)
    pytester.makepyfile(test_it="""
        import time, pytest
        @pytest.mark.parametrize("seconds", [0.3, 0.2])
        def test_long(seconds): time.sleep(seconds)
        def test_short(): pass
    """)
    assert pytester.runpytest("-p", "no:cacheprovider").ret == 0
    assert path.read_text() == "test_it.py::test_long\n"
    pytester.makepyfile(test_it="def test_fails(): assert False")
    assert pytester.runpytest("-p", "no:cacheprovider").ret == 1
    assert path.read_text() == "test_it.py::test_long\n"


def test_a_function_is_named_without_its_case():
    assert longest.function_of("tests/test_a.py::test_b[c-d[0]]") == "tests/test_a.py::test_b"
