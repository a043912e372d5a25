"""The runtime of a Pipe in one process; tests/ranks/test_curvature_ranks.py uses it over ranks."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from pipeline import Pipe
from pipeline.data.microbatch import scatter, scatter_like


def pipe_of_two_stages() -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), [2, 1], chunks=3)


def test_in_one_process_the_runtime_has_all_stages_and_no_ties() -> None:
    pipe = pipe_of_two_stages()
    runtime = pipe.runtime
    assert runtime.stages() == [[pipe[0], pipe[1]], [pipe[2]]]
    assert (runtime.rank, runtime.ranks, runtime.topology, runtime.has_replicas) == (0, 1, None, False)
    assert runtime.tied() == {} and runtime.first_names == {name: name for name, _ in pipe.named_parameters()}


def test_a_setup_is_that_of_a_step_and_draws_nothing() -> None:
    pipe = pipe_of_two_stages()
    batch = scatter(torch.ones(5, 2), pipe.chunks, "x", 0)
    target = scatter_like(torch.ones(5, 1), batch, "the target")
    state = torch.get_rng_state()
    with pipe.runtime.communicator("analysis") as communicator:
        setup = pipe.runtime.setup(batch, target, communicator, {"matrix": "none"})
    assert torch.equal(torch.get_rng_state(), state)
    assert setup.grad and not setup.keep and setup.communicator is communicator and setup.seed == 0
    (phase,) = setup.plan.phases
    assert set(map(str, phase.merged)) >= {"0F0", "1B2"}


def test_a_runtime_is_frozen_and_tells_of_the_layers_of_now() -> None:
    pipe = pipe_of_two_stages()
    runtime = pipe.runtime
    with pytest.raises(FrozenInstanceError):
        setattr(runtime, "topology", None)
    pipe._modules["more"] = nn.Tanh()
    with pytest.raises(ValueError, match="the Pipe has 4 layers but its balance is"):
        runtime.stages()
