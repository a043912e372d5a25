"""Law 1: a Pipe gives the plain module's outputs, losses, gradients and buffers, bit for bit.

The reference is law_reference.py, the models are law_models.py, one comparison is law_check.py. Here: which ones.
"""

from itertools import product
from typing import Any

import pytest
import torch
from cover import either, pairwise, some
from hypothesis import given, settings
from hypothesis import strategies as st
from law_check import AXES, CHECKPOINTS, differences, expect, observe
from law_models import MODELS


def _name(config: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in config.values())


@pytest.mark.parametrize("config", pairwise(AXES), ids=_name)
def test_pipe_equals_the_plain_module_bit_for_bit_for_every_pair_of_settings(config):
    assert not differences(observe(config), expect(config))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Any value on each axis, any balance, any small number of chunks and rows."""
    config = {name: draw(st.sampled_from(values)) for name, values in AXES.items()}
    layers = len(MODELS[config["model"]]().model)
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1))))
    config["balance"] = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    config["chunks"] = draw(st.integers(1, 9))
    config["rows"] = draw(st.integers(1, 17))
    return config


@settings(max_examples=either(40, 1000))
@given(configs())
def test_pipe_equals_the_plain_module_bit_for_bit_at_any_balance(config):
    assert not differences(observe(config), expect(config))


@pytest.mark.soak
@pytest.mark.parametrize("rows", AXES["rows"])
@pytest.mark.parametrize("chunks", AXES["chunks"])
@pytest.mark.parametrize("model", AXES["model"])
def test_pipe_equals_the_plain_module_bit_for_bit_in_the_full_product(model, chunks, rows):
    """One reference serves all settings that may not matter."""
    inputs = ("train", "entry", "input_grad")
    settings_ = ("balance", "checkpoint", "schedule")
    for values in product(*(AXES[name] for name in inputs)):
        config = {"model": model, "chunks": chunks, "rows": rows, **dict(zip(inputs, values, strict=True))}
        expected = expect(config)
        for number, more in enumerate(product(*(AXES[name] for name in settings_))):
            drive = AXES["drive"][number % len(AXES["drive"])]
            full = {**config, **dict(zip(settings_, more, strict=True)), "drive": drive}
            assert not differences(observe(full), expected), _name(full)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("entry", AXES["entry"])
def test_results_depend_on_neither_schedule_nor_balance_nor_checkpoint_mode_nor_driver(model, entry):
    config = {"model": model, "chunks": 3, "rows": 7, "train": True, "entry": entry, "input_grad": True}
    first, *others = (
        observe({**config, "balance": balance, "schedule": schedule, "checkpoint": checkpoint, "drive": drive})
        for balance, schedule, checkpoint, drive in some(
            product(("whole", "each alone"), AXES["schedule"], CHECKPOINTS, ("inline", "apart, threads"))
        )
    )
    for other in others:
        assert not differences(other, first)


def test_the_reference_tells_what_is_wrong():
    """The comparison itself: other dropout masks, another chunking, a missing gradient are all seen."""
    config = {"model": "mlp", "balance": "halves", "chunks": 2, "rows": 5, "checkpoint": "always", "train": True}
    config |= {"entry": "forward", "schedule": "gpipe", "drive": "inline", "input_grad": True}
    right = expect(config)
    assert differences(expect({**config, "chunks": 3}), right)
    assert differences(expect({**config, "train": False}), right)
    assert differences(expect({**config, "input_grad": False}), right)
    assert differences(expect({**config, "model": "no_parameters"}), right)
    with torch.no_grad():
        right.grads["0.weight"][0, 0] += 1e-16
        right.grads["0.weight"][0, 0] *= 1 + 2**-52
    assert differences(observe(config), right)
