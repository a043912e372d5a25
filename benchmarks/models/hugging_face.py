"""Models of Hugging Face's transformers, made from configurations, and the layers that they are cut into.

    small    launch-bound        large    compute-bound        as in blocks.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partition import to_sequential

WORDS = 64
HUGGING_FACE = {"hf-llama": "LlamaForCausalLM", "hf-gpt2": "GPT2LMHeadModel", "hf-bert": "BertForMaskedLM"}


def build(
    name: str, size: str, blocks: int, rows: int, attention: str | None = None, device: torch.device | str = "cpu"
) -> tuple[nn.Module, nn.Sequential, Tensor, Tensor]:
    """A model whose output is its logits, its layers, token ids of `rows` rows and a target like the logits.

    `attention`: "eager" computes it in torch's operations, which have second derivatives; None: transformers' choice.
    """
    import transformers

    length, width = (16, 64) if size == "small" else (128, 256)
    kind = getattr(transformers, HUGGING_FACE[name])
    sizes = {
        "vocab_size": WORDS, "hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": 4,
        "max_position_embeddings": length, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if name != "hf-gpt2":  # which takes four times its width
        sizes["intermediate_size"] = 3 * width if name == "hf-llama" else 4 * width
    config = kind.config_class(**sizes)
    config.use_cache = False
    config._attn_implementation = attention
    for key in vars(config):
        if key.endswith(("dropout", "pdrop", "dropout_prob")):
            setattr(config, key, 0.0)
    model = kind(config).to(device)
    ids, target = torch.randint(WORDS, (rows, length)).to(device), torch.randn(rows, length, WORDS).to(device)
    return Logits(model), to_sequential(model, ids, output=_logits), ids, target


class Logits(nn.Module):
    """A model, called with token ids, of whose outputs only the logits are returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return _logits(self.model(ids))


def _logits(outputs: Any) -> Any:
    return outputs["logits"]
