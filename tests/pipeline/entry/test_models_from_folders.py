"""Law: a model on the meta device, loaded from what save_pretrained wrote, is the one that from_pretrained loads."""

import json

import pytest
import torch
from cover import either
from families import FAMILIES, of_family

from pipeline import Pipe, Saved, meta_parameters

transformers = pytest.importorskip("transformers")
LARGEST = "20KB"  # of shards


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def saved(family, folder, **how):
    """A model's folder, with shards; and inputs of so many rows."""
    model, inputs = of_family(family)
    model.save_pretrained(folder, max_shard_size=LARGEST, **{"save_original_format": False} | how)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return inputs


def on_meta(family, folder, **others):
    config = getattr(transformers, FAMILIES[family][0]).from_pretrained(folder, **others)
    with meta_parameters():
        return getattr(transformers, family)(config)


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


FEW = ["LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration"]
OTHERS = ["GPT2LMHeadModel", "BertForMaskedLM", "BartForConditionalGeneration", "Gemma3ForCausalLM"]


@pytest.mark.parametrize("family", either(FEW, [*FEW, *OTHERS]))
def test_a_model_from_a_folder_is_that_of_from_pretrained(family, tmp_path):
    inputs = saved(family, tmp_path)
    expected, x = getattr(transformers, family).from_pretrained(tmp_path), inputs(5)
    pipe = Pipe(
        on_meta(family, tmp_path).eval(), sample=inputs(4), devices=["cpu"] * 3, chunks=2, materialize=tmp_path
    )
    assert same(pipe.state_dict(), expected.state_dict())
    with torch.no_grad():
        assert torch.equal(pipe.to_sequential()(x)["logits"], expected(**x, use_cache=False)["logits"])
    again = Pipe(on_meta(family, tmp_path), sample=inputs(4), devices=["cpu"] * 2, materialize=Saved(tmp_path))
    assert same(again.state_dict(), expected.state_dict())


def test_a_model_has_the_type_of_its_folder_or_a_wider_one(tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**FAMILIES["LlamaForCausalLM"][1])).bfloat16(
    ).save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    x = {"input_ids": torch.randint(3, 50, (3, 8))}
    with meta_parameters():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    pipe = Pipe(model.eval(), sample=x, materialize=tmp_path / "model.safetensors")
    assert pipe.state_dict()["lm_head.weight"].dtype == torch.bfloat16 and same(
        pipe.state_dict(), expected.state_dict()
    )
    with torch.no_grad():
        assert torch.equal(pipe(x)["logits"], expected(**x)["logits"])
    wide = Pipe(on_meta("LlamaForCausalLM", tmp_path), sample=x, materialize=tmp_path)
    assert same(wide.state_dict(), expected.float().state_dict())
    expected.save_pretrained(tmp_path)
    with meta_parameters():
        narrow = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    narrow = narrow.bfloat16()
    words = r"torch.float32 of .* for 'model.embed_tokens.weight', which is torch.bfloat16 .*dtype=torch.float32\)"
    with pytest.raises(ValueError, match=words):
        Pipe(narrow, sample=x, materialize=tmp_path)


def test_what_a_folder_lacks_is_said(tmp_path):
    inputs = saved("LlamaForCausalLM", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())

    def refused(error, words, **others):
        model = on_meta("LlamaForCausalLM", tmp_path, **others)
        with pytest.raises(error, match=words):
            Pipe(model, sample=inputs(4), devices=["cpu"] * 2, materialize=tmp_path)

    refused(ValueError, r"of shape \[64, 32\] for 'model.layers.0.mlp.gate_proj.weight', which .* \[48, 32\]. Build",
            intermediate_size=48)  # fmt: skip
    refused(ValueError, "no values for model.layers.3.self_attn.q_proj.weight, .* and 4 more. It has 30 entries",
            num_hidden_layers=4)  # fmt: skip
    names = [name for name in whole["weight_map"] if name != "model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps({"weight_map": {name: whole["weight_map"][name] for name in names}}))
    refused(ValueError, "no values for model.layers.1.mlp.up_proj.weight. It has 29 entries")
    index.write_text(json.dumps(whole))
    shard = tmp_path / whole["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    shard.unlink()
    refused(RuntimeError, f"'model.layers.1.* of .*{shard.name}' cannot be read: No such file")


def test_names_of_other_classes_are_refused_in_words(tmp_path):
    model, inputs = of_family("LlamaForCausalLM")
    model.model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="'embed_tokens.weight' may be 'model.embed_tokens.weight'. What a l"):
        Pipe(on_meta("LlamaForCausalLM", tmp_path / "base"), sample=inputs(4), materialize=tmp_path / "base")
    folder = tmp_path / "experts"
    inputs = saved("MixtralForCausalLM", folder, save_original_format=True)
    with pytest.raises(ValueError, match=r"no values for model.layers.0.mlp.*save_original_format=False"):
        Pipe(on_meta("MixtralForCausalLM", folder), sample=inputs(4), materialize=folder)


def test_a_model_with_values_is_not_loaded_in_silence(tmp_path):
    inputs = saved("GPT2LMHeadModel", tmp_path)
    model = of_family("GPT2LMHeadModel")[0]
    with pytest.raises(ValueError, match="has values already, which stay. Build it on the meta device"):
        Pipe(model, sample=inputs(4), materialize=tmp_path)


def test_rotary_tables_without_values_are_refused(tmp_path):
    inputs = saved("LlamaForCausalLM", tmp_path)
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="no state_dict has: model.rotary_emb.inv_freq, .*pipeline.meta_parameters()"):
        Pipe(model, sample=inputs(4), materialize=tmp_path)
