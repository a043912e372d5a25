"""Families of Hugging Face's transformers: tiny models, built from configs, what they are called with, and trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partition.models.parts import Block
from pipeline import layer_seed

CHUNKS = 3

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50,
    "max_position_embeddings": 64,
}  # fmt: skip
SEEING = {"image_size": 16, "patch_size": 4} | {
    key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
GROUPED = SIZES | {"num_key_value_heads": 2}
IMAGE, IMAGES = 45, 16  # the token in whose place a part of an image comes, and how many there are
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 64,
                                       "bos_token_id": 1, "eos_token_id": 2}),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED | {"head_dim": 8}),
    "MistralForCausalLM": ("MistralConfig", GROUPED | {"sliding_window": 6}),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED | {"head_dim": 8}),
    "Gemma2ForCausalLM": ("Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 6}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GROUPED | {"head_dim": 8, "sliding_window": 6}),
    "PhiForCausalLM": ("PhiConfig", SIZES),
    "Phi3ForCausalLM": ("Phi3Config", SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "MixtralForCausalLM": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "BertForMaskedLM": ("BertConfig", SIZES),
    "BertForSequenceClassification": ("BertConfig", SIZES),
    "RobertaForMaskedLM": ("RobertaConfig", SIZES),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", SIZES | {  # blocks get a table of positions, the parameter itself
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "type_vocab_size": 0}),
    "ViTForImageClassification": ("ViTConfig", SEEING),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", SIZES | {"bos_token_id": 1, "eos_token_id": 2}),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", SEEING),
    "DPTForDepthEstimation": ("DPTConfig", SEEING | {
        "backbone_out_indices": [0, 1, 2], "neck_hidden_sizes": [8, 8, 16], "fusion_hidden_size": 16,
        "reassemble_factors": [2, 1, 0.5]}),
    "SegformerForSemanticSegmentation": ("SegformerConfig", SEEING | {
        "depths": [1] * 4, "sr_ratios": [2, 2, 1, 1], "hidden_sizes": [8, 8, 16, 16], "patch_sizes": [3] * 4,
        "strides": [2, 2, 1, 1], "num_attention_heads": [2] * 4, "mlp_ratios": [2] * 4, "decoder_hidden_size": 16}),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", SIZES | {  # numpy draws what is masked in train mode
        "conv_dim": [16] * 3, "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.3, "mask_time_length": 2}),
    "DetrForObjectDetection": ("DetrConfig", {  # what its backbone computes decides whether there is a mask
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "num_queries": 5,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "use_timm_backbone": False,
        "backbone": None, "use_pretrained_backbone": False, "backbone_config": {
            "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
            "out_features": ["stage2"]}}),
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8,
                                                "vocab_size": 50}),
    "BartForConditionalGeneration": ("BartConfig", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                                                    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                                                    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 50,
                                                    "max_position_embeddings": 64, "forced_eos_token_id": 2}),
    "WhisperForConditionalGeneration": ("WhisperConfig", {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 50,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
        "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1}),
    "LlavaForConditionalGeneration": ("LlavaConfig", {
        "vision_config": SEEING | {"model_type": "clip_vision_model"}, "image_token_index": IMAGE,
        "text_config": GROUPED | {"model_type": "llama"}}),
    "PaliGemmaForConditionalGeneration": ("PaliGemmaConfig", {
        "vision_config": SEEING | {"model_type": "siglip_vision_model", "vision_use_head": False}, "projection_dim": 32,
        "text_config": GROUPED | {"model_type": "gemma", "head_dim": 8}, "image_token_index": IMAGE,
        "hidden_size": 32}),
}  # fmt: skip
TWO_ROWS = ("T5ForConditionalGeneration", "BartForConditionalGeneration", "WhisperForConditionalGeneration")
SEEING_ROWS = {
    "LlavaForConditionalGeneration": 11, "PaliGemmaForConditionalGeneration": 13, "DetrForObjectDetection": 11,
}  # fmt: skip
LAYERS = dict.fromkeys(TWO_ROWS, 7) | SEEING_ROWS | {"DPTForDepthEstimation": 15}  # all others: 5
# From transformers 5.24 on it returns a list with an entry for each image, which no chunk can continue.
OUTPUTS = {"LlavaForConditionalGeneration": lambda returned: {"logits": returned["logits"]}}


def of_family(
    family: str, dropout: float | None = None, **settings: Any
) -> tuple[nn.Module, Callable[..., dict[str, Tensor]]]:
    """A model, and inputs of so many rows.

    Args:
        family: a name in FAMILIES.
        dropout: everywhere, in place of what the family has.
        settings: of its config, beside its sizes.
    """
    transformers = pytest.importorskip("transformers")
    config, sizes = FAMILIES[family]
    kind = getattr(transformers, config)
    if dropout is not None:
        known = kind(**sizes).to_dict().items()
        settings |= {key: dropout for key, value in known if re.search("(?<!layer)drop", key) and value is not None}
    model = getattr(transformers, family)(kind(**sizes, **settings))
    if "conv_dim" in sizes:
        return model, lambda rows: {"input_values": torch.randn(rows, 400)}
    if "patch_size" in sizes or "backbone_config" in sizes:
        return model, lambda rows: {"pixel_values": torch.randn(rows, 3, 16, 16)}

    def text(rows: int, length: int = 12) -> dict[str, Tensor]:
        mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))).long()
        words = {"input_ids": torch.randint(3, IMAGE, (rows, length)), "attention_mask": mask}
        if family in TWO_ROWS:
            words["decoder_input_ids"] = torch.randint(3, 50, (rows, 5))
        if "WhisperConfig" == config:
            del words["input_ids"], words["attention_mask"]
            words["input_features"] = torch.randn(rows, 8, 20)
        if "vision_config" in sizes:
            places = torch.full((rows, IMAGES), IMAGE)
            words["input_ids"] = torch.cat([words["input_ids"][:, :2], places, words["input_ids"][:, 2:]], 1)
            mask[:, -1] = 0  # PaliGemma itself (transformers 5.23) gives a row other logits where no row is padded
            words["attention_mask"] = torch.cat([torch.ones_like(places), mask], 1)
            words["pixel_values"] = torch.randn(rows, 3, 16, 16)
        return words

    return model, text


class Plain:
    """A copy of a model, run over the same chunks, with the generators seeded as in the layers that it was cut into.

    Args:
        model: the one that was cut.
        layers: what it was cut into.
    """

    def __init__(self, model: nn.Module, layers: nn.Sequential) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self.model = copy.deepcopy(model)
        self.seed = self.chunk = 0
        for number, layer in enumerate(layers):
            if isinstance(layer, Block):
                (block,) = [self.model.get_submodule(names[id(module)]) for module in layer._units().values()]
                block.register_forward_pre_hook(lambda *_, layer=number: self.begin(layer))
                block.register_forward_hook(lambda *_, layer=number + 1: self.begin(layer))

    def begin(self, layer: int) -> None:
        """What follows is this layer's: its dropout masks by the public rule."""
        seed = layer_seed(self.seed, self.chunk, layer)
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)

    def step(
        self, x: Any, target: Tensor, loss_fn: Callable[[Any, Tensor], Tensor],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """The loss; gradients are added up."""
        self.seed = int(torch.empty((), dtype=torch.int64).random_())
        total = torch.zeros((), device=target.device)
        for self.chunk, rows in enumerate(torch.arange(len(target)).tensor_split(CHUNKS)):
            self.begin(0)
            with context():
                loss = loss_fn(self.model(**tree_map(lambda leaf, rows=rows: leaf[rows], x)), target[rows])
            (loss * (len(rows) / len(target))).backward()
            total += loss.detach() * (len(rows) / len(target))
        return total


def near(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], share: float = 1e-5) -> None:
    """To a part of the largest number of each tensor; of one that is all but 0, as that of a key's bias, of all."""
    largest = max(float(other.abs().max()) for other in theirs if other is not None)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            bound = share * max(float(other.abs().max()), 0.01 * largest)
            torch.testing.assert_close(mine, other, rtol=0, atol=bound)


def second_order(output: Callable[[], Tensor], params: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of the squared gradient of the mean square of an output."""
    grads = torch.autograd.grad(
        (output() ** 2).mean(), params, create_graph=True, allow_unused=True, materialize_grads=True
    )
    square = torch.stack([(grad**2).sum() for grad in grads]).sum()
    return torch.autograd.grad(square, params, allow_unused=True)
