"""The models of Hugging Face's transformers that `to_sequential` cuts, all of them that a small configuration builds.

    python benchmarks/families.py            text and images, some ten minutes
    python benchmarks/families.py causal     one kind
    python benchmarks/families.py --train    trained instead, some half an hour

    configuration, small ─► model ─► cut on one sample ─► called with another: the same outputs, to the bit?
                                                       └► --train: steps of a Pipe, and H @ v: the plain loop's numbers?

Every class that AutoModelForCausalLM, MaskedLM, Seq2SeqLM and ImageClassification know is built from its configuration
with small sizes, where these make a model at all; nothing is downloaded, and no model is chosen. Weights are random.
Trained are models in float64, in eval mode (dropout would differ by its chunks) and with attention="eager", which has
second derivatives; two stages, two chunks. Differences are shares of the largest number.
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
from pipeline import Pipe
from pipeline.curvature import Hessian

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


def trained(kind: str, name: str, known: str, seconds: int) -> tuple[str, str]:
    """What became of a model's gradients and Hessian products through a Pipe, and the words that say more."""
    try:
        with within(seconds):
            model: Any = model_of(kind, name, known).double()
            model.set_attn_implementation("eager")
            layers: Any = to_sequential(model, doubled(inputs(kind, model, 4))).eval()
    except (Exception, TooLongError):  # as `verdict` says, or not in float64
        return "not trained", ""
    parameters = {key: each for key, each in model.eval().named_parameters() if each.requires_grad}
    x, target = doubled(inputs(kind, model, 5)), torch.randn(5, dtype=torch.float64)
    always, half = layers[0].outline.inputs.always, len(layers) // 2
    balance = [half, len(layers) - half]
    v = {key: torch.randn_like(each) for key, each in parameters.items()}
    try:
        with within(6 * seconds):
            found = []
            for checkpoint, schedule in (("always", "1f1b"), ("never", "zb-h1")):
                model.zero_grad()
                Pipe(layers, balance, 2, checkpoint=checkpoint, schedule=schedule, mixes_rows=True).step(
                    x, target, loss_fn=loss_of
                )
                found.append([each.grad for each in parameters.values()])
            pipe = Pipe(layers, balance, 2, checkpoint="always", mixes_rows=True)
            keys = {id(each): key for key, each in pipe.named_parameters()}
            product = Hessian(pipe, (x, target), loss_of) @ {keys[id(parameters[key])]: v[key] for key in parameters}
            expected = plain_grads(model, x, always, target, list(parameters.values()))
            dots = sum((v[key] * each).sum() for key, each in zip(v, expected, strict=True) if each is not None)
            plain = torch.autograd.grad(dots, list(parameters.values()), allow_unused=True)
            gradients = max(apart(grads, expected) for grads in found)
            products = apart([product[keys[id(each)]] for each in parameters.values()], plain)
    except TooLongError:
        return "too slow", ""
    except Exception as error:
        return "refused", str(error)
    words = f"gradients {gradients:.0e}, Hessian products {products:.0e}"
    return ("to 1e-12" if max(gradients, products) <= 1e-12 else "FURTHER"), words


def plain_grads(model: nn.Module, x: Any, always: Any, target: torch.Tensor, parameters: list[torch.Tensor]) -> Any:
    """The gradients of the mean over rows, by a loop over two chunks without a Pipe. They can be differentiated."""
    total = torch.zeros((), dtype=torch.float64)
    for first, last in ((0, 3), (3, 5)):
        output = model(**{key: value[first:last] for key, value in x.items()}, **always)
        total = total + loss_of(output, target[first:last]) * (last - first) / len(target)
    return torch.autograd.grad(total, parameters, create_graph=True, allow_unused=True)


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A mean over rows: of their logits' means, weighed, and of their squares."""
    rows: torch.Tensor = output["logits"].double().flatten(1)
    return (rows.mean(1) * target + rows.square().mean(1)).mean()


def apart(found: Any, expected: Any) -> float:
    """The largest difference, as a share of the largest number. None is 0."""
    pairs = [(one, other) for one, other in zip(found, expected, strict=True) if one is not None or other is not None]
    both = [(torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b) for a, b in pairs]
    largest = max(float(other.detach().abs().max()) for _, other in both if other.numel())
    return max(float((one - other).detach().abs().max()) for one, other in both if one.numel()) / (largest or 1.0)


def doubled(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs, floats in float64."""
    return {key: value.double() if value.is_floating_point() else value for key, value in x.items()}


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
    parser.add_argument("--train", action="store_true", help="gradients and Hessian products through a Pipe")
    parser.add_argument("--names", nargs="*", help="of models, as in their configurations; default: all")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    automatic = importlib.import_module("transformers.models.auto.modeling_auto")
    refusals: list[str] = []
    columns = ["cut", "DIFFERENT", "refused", "not built", "too slow to build", "too slow to cut"]
    judge = verdict
    if arguments.train:
        judge, columns = trained, ["to 1e-12", "FURTHER", "refused", "too slow"]
        softmax = torch.nn.functional.softmax  # models ask for float32, in which second derivatives are off by 1e-9
        torch.nn.functional.softmax = lambda x, dim=None, *_, **__: softmax(x, dim)
    print(f"| kind | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for kind in arguments.kinds or KINDS:
        counts: Counter[str] = Counter()
        for name, known in sorted(getattr(automatic, KINDS[kind]).items()):
            if arguments.names and name not in arguments.names:
                continue
            what, words = judge(kind, name, known if isinstance(known, str) else known[0], arguments.seconds)
            counts[what] += 1
            refusals += [f"{kind} {name}: {words}"] if what in ("refused", "FURTHER") else []
        print(f"| {kind} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)
    print("\n" + "\n".join(refusals))


if __name__ == "__main__":
    main()
