"""The models of Hugging Face's transformers that `to_sequential` cuts, all of them that a small configuration builds.

    python benchmarks/families.py            text and images, some ten minutes
    python benchmarks/families.py causal     one kind

    configuration, small ─► model ─► cut on one sample ─► called with another: the same outputs, to the bit?

Every class that AutoModelForCausalLM, MaskedLM, Seq2SeqLM and ImageClassification know is built from its configuration
with small sizes, where these make a model at all; nothing is downloaded, and no model is chosen. Weights are random.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from partition import PartitionError, to_sequential

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
# What configurations call their sizes.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "state_size", "mamba_d_state"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16), **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 60, "max_position_embeddings": 64,
    "n_positions": 64, "image_size": 32, "patch_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
LARGEST = 20_000_000  # parameters


def model_of(kind: str, name: str, known: str) -> nn.Module:
    """A small model of a kind: `known` is the name of its class."""
    transformers = importlib.import_module("transformers")
    config_class = transformers.CONFIG_MAPPING[name]
    usual = config_class()
    sizes = {key: size for key, size in SIZES.items() if isinstance(getattr(usual, key, None), int | float | None)}
    config = config_class(**{key: size for key, size in sizes.items() if hasattr(usual, key)})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, known)(config).eval()
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        raise ValueError("its configuration has sizes by other names")
    return model


def inputs(kind: str, model: Any, rows: int) -> dict[str, torch.Tensor]:
    """Token ids and a padding mask, or images."""
    if kind == "image":
        size = getattr(model.config, "image_size", 32)
        return {"pixel_values": torch.randn(rows, 3, *([size, size] if isinstance(size, int) else size))}
    mask = (torch.arange(12) < torch.randint(6, 13, (rows, 1))).long()
    words = {"input_ids": torch.randint(3, 50, (rows, 12)), "attention_mask": mask}
    return words | ({"decoder_input_ids": torch.randint(3, 50, (rows, 5))} if kind == "seq2seq" else {})


def verdict(kind: str, name: str, known: str, seconds: int) -> tuple[str, str]:
    """What became of a model, and the words of a refusal."""
    try:
        with within(seconds), torch.no_grad():
            model = model_of(kind, name, known)
            model(**inputs(kind, model, 2))
    except TooLongError:
        return "too slow to build", ""
    except Exception as error:  # whatever a configuration of other sizes does
        return "not built", repr(error)
    try:
        with within(seconds):
            layers = to_sequential(model, inputs(kind, model, 4)).eval()
    except PartitionError as error:
        return "refused", str(error)
    except TooLongError:
        return "too slow to cut", ""
    x = inputs(kind, model, 3)
    with torch.no_grad():
        ours, theirs = tensors(layers(x)), tensors(dict(model(**x, **layers[0].outline.inputs.always)))
    same = len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))
    return ("cut" if same else "DIFFERENT"), ""


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in an output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


class TooLongError(BaseException):
    """A model has taken too long. What catches errors does not catch it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Within: TooLongError after so many seconds."""

    def end(*_: Any) -> None:
        raise TooLongError

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--seconds", type=int, default=20, help="the longest that a model may take to be built, or cut")
    parser.add_argument("--names", nargs="*", help="of models, as in their configurations; default: all")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    automatic = importlib.import_module("transformers.models.auto.modeling_auto")
    refusals: list[str] = []
    columns = ["cut", "DIFFERENT", "refused", "not built", "too slow to build", "too slow to cut"]
    print(f"| kind | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for kind in arguments.kinds or KINDS:
        counts: Counter[str] = Counter()
        for name, known in sorted(getattr(automatic, KINDS[kind]).items()):
            if arguments.names and name not in arguments.names:
                continue
            what, words = verdict(kind, name, known if isinstance(known, str) else known[0], arguments.seconds)
            counts[what] += 1
            refusals += [f"{kind} {name}: {words}"] if what == "refused" else []
        print(f"| {kind} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)
    print("\n" + "\n".join(refusals))


if __name__ == "__main__":
    main()
