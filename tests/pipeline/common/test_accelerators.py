"""The choice of accelerators, their generators and their streams, by stand-ins for torch.accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipeline import Pipe
from pipeline.common import accelerators
from pipeline.common.places import Place, place_of
from pipeline.curvature import Hessian
from pipeline.entry.validation import choose_balance, choose_places

CPU = torch.device("cpu")


class Xpu:
    """A machine with some XPUs, whose module has generators when it is initialised."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch) -> None:
        self.current = count - 1
        self.generators: tuple[str, ...] = ()
        self.count = count
        self.get_device_properties: Callable[[torch.device], Any] = SimpleNamespace
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
        patch.setattr(torch.accelerator, "device_count", lambda: count)
        patch.setattr(torch.accelerator, "current_device_index", self.initialised)
        patch.setattr(torch, "get_device_module", lambda device: self)

    @property
    def default_generators(self) -> tuple[str, ...]:
        return self.generators

    def initialised(self) -> int:
        self.generators = tuple(f"generator of xpu:{index}" for index in range(self.count))
        return self.current


def test_tests_and_the_processes_that_they_start_see_no_gpu() -> None:
    """They do not say where they run, and compare with the host's numbers."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and accelerators.accelerators() == []


def test_stages_without_devices_take_the_accelerators_that_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])
    assert choose_balance(layers, None, None) == [6] and choose_places(None, 2) == [Place(CPU)] * 2
    Xpu(3, monkeypatch)
    assert accelerators.accelerators() == [torch.device("xpu", index) for index in range(3)]
    assert choose_balance(layers, None, None) == [2, 2, 2]
    assert choose_places(None, 2) == [Place(torch.device("xpu", 0)), Place(torch.device("xpu", 1))]
    with pytest.raises(ValueError, match=r"balance has 4 stages but there are 3 devices \(xpu:0, xpu:1, xpu:2\)"):
        choose_places(None, 4)


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Xpu(3, monkeypatch)
    assert place_of("xpu") == Place(torch.device("xpu", 2))
    assert place_of("xpu:1") == Place(torch.device("xpu", 1))
    assert place_of("cpu") == place_of("cpu:0") == Place(CPU)


def test_generators_are_asked_for_when_the_devices_are_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pipe without parameters on an accelerator may be the first to use it."""
    assert accelerators.device_generators([CPU]) == []
    Xpu(3, monkeypatch)
    devices = [torch.device("xpu", 2), CPU, torch.device("xpu", 0), torch.device("xpu", 2)]
    assert accelerators.device_generators(devices) == ["generator of xpu:0", "generator of xpu:2"]


def test_a_kind_without_generators_that_can_be_seeded_is_treated_as_the_host_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mps = torch.device("mps", 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert not hasattr(torch.mps, "default_generators")
    assert not accelerators.is_accelerator(mps) and accelerators.accelerators() == []
    assert accelerators.device_generators([mps]) == []
    assert choose_places(None, 1) == [Place(CPU)]


def test_streams_are_current_within_and_those_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised within. The same stream may be entered while it is."""
    current: dict[Any, Any] = {torch.device("xpu", index): f"own {index}" for index in range(2)}
    streams = [SimpleNamespace(device=device, name=f"copies {device.index}") for device in current]
    before = {device: SimpleNamespace(device=device, name=name) for device, name in current.items()}
    current.update(before)
    chosen = [1]

    def put(stream: Any) -> None:
        current[stream.device], chosen[0] = stream, stream.device.index

    monkeypatch.setattr(torch.accelerator, "current_stream", current.__getitem__)
    monkeypatch.setattr(torch.accelerator, "set_stream", put)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[0])
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: chosen.__setitem__(0, index))
    reading: Any = streams[0]
    with pytest.raises(KeyError), accelerators.entered_streams(*streams):  # type: ignore[arg-type]
        assert list(current.values()) == streams
        with accelerators.entered_streams(reading):
            assert chosen == [0]
        assert list(current.values()) == streams and chosen == [1]
        raise KeyError
    assert current == before and chosen == [1]


NUMBERS = "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"


@pytest.mark.parametrize(("set_to", "seen", "index"), [
    ({}, 4, 3),  # no launcher says: the current one
    ({"LOCAL_RANK": "2"}, 4, 2),
    ({"SLURM_LOCALID": "1"}, 4, 1),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 4, 1),
    ({"MPI_LOCALRANKID": "1"}, 4, 1),
    ({"MV2_COMM_WORLD_LOCAL_RANK": "1"}, 4, 1),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 4, 2),  # mpirun in a shell of Slurm's
    ({"LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 4, 1),
    ({"SLURM_LOCALID": "3"}, 1, 0),  # each process sees its own
])
def test_a_rank_takes_the_device_that_its_launcher_means(
    set_to: dict[str, str], seen: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NUMBERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert accelerators.device_of_rank() == CPU
    Xpu(seen, monkeypatch)
    assert accelerators.device_of_rank() == torch.device("xpu", index)


@pytest.mark.parametrize(("uuid", "seen", "visible", "name"), [
    ("u", 4, "", "u"), ("u", 1, "", "u"), ("u", 1, "2", "u"), ("u", 1, "MIG-p", "u MIG-p"),
    (None, 4, "", "xpu:0"), (None, 1, "", ""),
])
def test_the_name_of_a_device_is_one_in_all_processes_or_none(
    uuid: str | None, seen: int, visible: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accelerators.device_identity(CPU) == ""
    machine = Xpu(seen, monkeypatch)
    machine.get_device_properties = lambda device: SimpleNamespace(**{} if uuid is None else {"uuid": uuid})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert accelerators.device_identity(torch.device("xpu", 0)) == name


@pytest.mark.parametrize("call", ["forward", "step", "evaluate", "product"])
def test_a_call_within_a_graph_capture_is_refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And works again after it."""
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], 2, devices=["cpu", "cpu"])
    x = torch.ones(4, 2)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: pipe(x), "step": lambda: pipe.step(x, x, loss_fn=mse_loss),
        "evaluate": lambda: pipe.evaluate(x, x, loss_fn=mse_loss),
        "product": lambda: Hessian(pipe, (x, x), mse_loss) @ dict(pipe.named_parameters()),
    }  # fmt: skip
    calls[call]()
    monkeypatch.setattr("pipeline.entry.runtime.is_capturing", lambda devices: devices == [CPU, CPU])
    with pytest.raises(RuntimeError, match="a Pipe was called while a graph was being captured .*Pipe outside"):
        calls[call]()
    monkeypatch.undo()
    calls[call]()


def test_a_capture_is_asked_for_where_there_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = torch.device("xpu", 0)
    assert not accelerators.is_capturing([CPU])
    machine = Xpu(1, monkeypatch)
    assert not accelerators.is_capturing([xpu])  # it has no graphs
    monkeypatch.setattr(machine, "is_current_stream_capturing", lambda: True, raising=False)
    assert accelerators.is_capturing([CPU, xpu]) and not accelerators.is_capturing([CPU])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_move_stay_the_objects_that_they_are(device: str) -> None:
    """On the meta device, as on backends that are not torch's own, `.to()` replaces them by default."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[1].weight = layers[0].weight
    before = list(layers.parameters())
    with accelerators.moved_in_place(torch.device(device)):
        layers.to(device)
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert all(one is other for one, other in zip(layers.parameters(), before, strict=True))
    assert all(parameter.device.type == device for parameter in before)


def test_the_allocator_is_told_of_what_a_sparse_tensor_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """record_stream has no kernel for sparse tensors."""
    told: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, stream: told.append(part.data_ptr()))
    sparse, dense = torch.eye(3).to_sparse(), torch.ones(2)
    for tensor in (sparse, dense):
        accelerators.use_in(SimpleNamespace(), tensor)  # type: ignore[arg-type]
    assert told == [sparse._indices().data_ptr(), sparse._values().data_ptr(), dense.data_ptr()]
