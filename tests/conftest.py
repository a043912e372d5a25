"""What all tests share: one thread (bitwise laws hold at equal thread counts), seeded hypothesis, a clean slate."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "laws", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("laws")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Every test begins at the same seed and leaves torch's switches as it found them."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() is dtype
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
