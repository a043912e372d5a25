"""A checkpoint directory as a dict: every value as it was saved, read alone, whoever saved it."""

import warnings
from collections.abc import Mapping

import pytest
import torch
import torch.distributed.checkpoint as dcp
from by_chunks import same
from torch import nn

from pipeline.entry.state.dcp import Saved


@pytest.fixture(autouse=True)
def _one_process():
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as torch says in one process


STATE = {
    "model": {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones((), dtype=torch.bfloat16)},
    "optimizer": {"state.0.weight.step": torch.tensor(3.0), "param_groups.0.weight.betas": (0.9, 0.99), "none": None},
    "extra": {"model": {"deep": [torch.ones(2), {"er": torch.zeros(1)}], "count": 5}},
    "epoch": 3,
    "words": "as they are",
    "list": [torch.ones(1), 2],
    "empty": torch.empty(0, 4, dtype=torch.int64),
}


def equal(one, other):
    if isinstance(other, Mapping):
        return isinstance(one, Mapping) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in other)
    if isinstance(other, list):
        return isinstance(one, list) and len(one) == len(other) and all(map(equal, one, other))
    return same(one, other) if isinstance(other, torch.Tensor) else one == other


def test_every_value_is_what_was_saved(tmp_path):
    dcp.save(STATE, checkpoint_id=tmp_path)
    for path in (tmp_path, str(tmp_path)):
        saved = Saved(path)
        assert saved.keys() == STATE.keys() and len(saved) == len(STATE)
        assert all(equal(saved[key], STATE[key]) for key in STATE)
        for part in ("model", "optimizer", "extra"):
            inner = Saved(path, part)
            assert inner.keys() == STATE[part].keys() and len(inner) == len(STATE[part])
            assert all(equal(inner[key], STATE[part][key]) for key in inner)
            assert repr(inner) == f"Saved('{tmp_path}', '{part}') of {len(inner)} entries"


def test_several_values_are_read_at_once(tmp_path):
    dcp.save(STATE, checkpoint_id=tmp_path)
    keys = ["extra", "list", "epoch", "empty"]
    found = Saved(tmp_path).read(iter(keys))
    assert list(found) == keys and all(equal(found[key], STATE[key]) for key in keys)
    assert Saved(tmp_path).read([]) == {}
    with pytest.raises(KeyError, match="nothing"):
        Saved(tmp_path).read(["epoch", "nothing"])


def test_a_read_tensor_is_the_readers_own(tmp_path):
    dcp.save(STATE, checkpoint_id=tmp_path)
    saved = Saved(tmp_path, "model")
    saved["0.weight"].zero_()
    assert same(saved["0.weight"], STATE["model"]["0.weight"])
    with torch.device("meta"):
        assert same(Saved(tmp_path, "model")["0.weight"], STATE["model"]["0.weight"])


def test_only_what_is_asked_for_is_read(tmp_path):
    dcp.save({"model": {str(index): torch.full((1000,), float(index)) for index in range(9)}}, checkpoint_id=tmp_path)
    saved = Saved(tmp_path, "model")
    (tmp_path / ".metadata").unlink()  # which is read once
    assert same(saved["3"], torch.full((1000,), 3.0))
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    assert "3" in saved and "9" not in saved and 3 not in saved and len(saved) == len(list(saved)) == 9
    with pytest.raises(KeyError, match="9"):
        saved["9"]
    with pytest.raises(RuntimeError, match=r"'3' of Saved\(.*'model'\) cannot be read: .*No such file.*whole"):
        saved["3"]


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*Give the directory that torch.distributed.check"):
        Saved(tmp_path)
    dcp.save({"model": {"0.weight": torch.ones(1)}, "epoch": 3}, checkpoint_id=tmp_path)
    for part in ("modle", "epoch", "model.0.weight"):
        with pytest.raises(KeyError, match=rf"has no dict '{part}'; it has \['epoch', 'model'\]"):
            Saved(tmp_path, part)


def test_a_modules_state_dict_is_loaded_from_it(tmp_path):
    one, other = nn.LSTM(2, 3), nn.LSTM(2, 3)
    dcp.save({"model": one.state_dict()}, checkpoint_id=tmp_path)
    other.load_state_dict(Saved(tmp_path, "model"))
    assert all(same(a, b) for a, b in zip(other.state_dict().values(), one.state_dict().values(), strict=True))
