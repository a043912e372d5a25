"""A checkpoint as a dict: every value as it was saved, read alone, whoever saved it."""

import pickle
import sys
import warnings
from collections.abc import Mapping

import pytest
import torch
import torch.distributed.checkpoint as dcp
from by_chunks import same
from safetensors.torch import save_file
from shards import save_shards
from torch import nn

from pipeline.entry.state.saved import Saved


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
    with pytest.raises(RuntimeError, match=r"'3' of .* cannot be read: .*No such file.*whole"):
        saved["3"]


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(["of", "others"])])
def test_a_damaged_list_of_entries_or_file_of_values_is_said(content, tmp_path):
    dcp.save({"3": torch.ones(1)}, checkpoint_id=tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"(?s)'3' of .* cannot be read: \S.*Is the directory whole"):
        Saved(tmp_path)["3"]
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"'.metadata' of .* cannot be read: \w+Error.*Is the directory whole"):
        Saved(tmp_path)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*Give the directory that torch.distributed.check"):
        Saved(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*model.pt"):
        Saved(tmp_path / "model.pt")
    dcp.save({"model": {"0.weight": torch.ones(1)}, "epoch": 3}, checkpoint_id=tmp_path)
    for part in ("modle", "epoch", "model.0.weight"):
        with pytest.raises(KeyError, match=rf"has no dict '{part}'; it has \['epoch', 'model'\]"):
            Saved(tmp_path, part)


@pytest.mark.parametrize("wrong", [3, None, b"run"])
def test_what_is_no_path_is_said(wrong):
    with pytest.raises(TypeError, match=f"the path of Saved is {wrong!r}. Give a path: a str, or a pathlib.Path"):
        Saved(wrong)


def test_a_modules_state_dict_is_loaded_from_it(tmp_path):
    one, other = nn.LSTM(2, 3), nn.LSTM(2, 3)
    dcp.save({"model": one.state_dict()}, checkpoint_id=tmp_path)
    other.load_state_dict(Saved(tmp_path, "model"))
    assert all(same(a, b) for a, b in zip(other.state_dict().values(), one.state_dict().values(), strict=True))


# ---------------------------------------------------------------------------------------------- safetensors files

TENSORS = {
    "0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones((), dtype=torch.bfloat16),
    "1.count": torch.tensor(7), "1.table": torch.randn(3, 2, 4).to(torch.float8_e4m3fn), "1.empty": torch.empty(0, 4),
    "1.mask": torch.tensor([True, False]),
}  # fmt: skip


def save_files(folder, shards):
    """The tensors in so many files, as save_pretrained names them."""
    if shards > 1:
        names = list(TENSORS)
        return save_shards(folder, [{name: TENSORS[name] for name in names[at::shards]} for at in range(shards)])
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_tensor_of_safetensors_files_is_what_was_saved(tmp_path, shards):
    folder = save_files(tmp_path / "model", shards)
    file = folder / ("model.safetensors" if shards == 1 else "model.safetensors.index.json")
    for path in (folder, str(folder), file):
        saved = Saved(path)
        assert saved.keys() == TENSORS.keys() and len(saved) == len(TENSORS)
        with torch.device("meta"):
            assert all(equal(saved[name], TENSORS[name]) for name in TENSORS)
        assert equal(saved.read(["1.count", "0.bias"]), {name: TENSORS[name] for name in ("1.count", "0.bias")})
        assert repr(saved) == f"Saved('{path}') of {len(TENSORS)} entries" and "2.weight" not in saved
        with pytest.raises(KeyError, match="2.weight"):
            saved["2.weight"]
    saved["0.weight"].zero_()
    assert equal(saved["0.weight"], TENSORS["0.weight"])


def test_shards_are_read_when_they_are_needed(tmp_path):
    folder = save_files(tmp_path / "model", 3)
    saved = Saved(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert equal(saved["0.weight"], TENSORS["0.weight"]) and "0.bias" in saved
    with pytest.raises(RuntimeError, match="'0.bias' of .*00002-of-00003.safetensors' cannot be read: No such fi"):
        saved["0.bias"]
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"broken")
    with pytest.raises(RuntimeError, match="cannot be read: .*header.*Is the folder whole"):
        saved["0.bias"]
    (folder / "model-00001-of-00003.safetensors").rename(folder / "model-00002-of-00003.safetensors")
    with pytest.raises(RuntimeError, match="does not contain tensor 0.bias.*index.json' says that this file has it"):
        saved["0.bias"]


def test_which_file_of_a_folder_is_meant_is_clear_or_asked(tmp_path):
    folder = save_files(tmp_path / "model", 2)
    (folder / "consolidated.safetensors").write_bytes(b"others, beside those of the index, are not looked at")
    assert len(Saved(folder)) == len(TENSORS)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="several states in .*: model.safetensors.index.json, model.safetensors. Give"):
        Saved(folder)
    other = save_files(tmp_path / "other", 1)
    (other / "adapter.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="several states in .*: adapter.safetensors, model.safetensors. Give the path"):
        Saved(other)
    assert len(Saved(other / "model.safetensors")) == len(TENSORS)
    (other / "adapter.safetensors").unlink()
    dcp.save({"model": STATE["model"]}, checkpoint_id=other)
    with pytest.raises(ValueError, match=r"has a checkpoint of torch.distributed.checkpoint \(.metadata\) and 'mod"):
        Saved(other)
    assert Saved(other, "model").keys() == STATE["model"].keys()


def test_what_is_no_safetensors_file_is_said(tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(RuntimeError, match="x.safetensors' cannot be read: .*header"):
        Saved(tmp_path)
    with pytest.raises(KeyError, match="x.safetensors' has no dict 'model': safetensors files have tensors only"):
        Saved(tmp_path, "model")
    with pytest.raises(FileNotFoundError, match="y.safetensors"):
        Saved(tmp_path / "y.safetensors")
    index = tmp_path / "z.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"0.weight": 3}}'):
        index.write_text(text)
        with pytest.raises(RuntimeError, match=r"is no index of safetensors files, {'weight_map': {name: file, "):
            Saved(index)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"needs the library: pip install penstock-torch\[safetensors\]"):
        Saved(tmp_path / "x.safetensors")
