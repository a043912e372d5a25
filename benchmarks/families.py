"""The models of Hugging Face's transformers that `to_sequential` cuts, all of them that a small configuration builds.

    python benchmarks/families.py            all kinds, some twenty minutes
    python benchmarks/families.py causal     one kind
    python benchmarks/families.py --train    text and images trained instead, some half an hour

    configuration, small ─► model ─► cut on one sample ─► called with another: the same outputs, to the bit?
                                                       └► --train: steps of a Pipe, and H @ v: the plain loop's numbers?

Every class that transformers' automatic classes of some kinds know is built from its configuration with small sizes,
where these make a model at all; nothing is downloaded, and no model is chosen. Weights are random. Trained are models
in float64, in eval mode (dropout would differ by its chunks) and with attention="eager", which has second derivatives;
two stages, two chunks. Differences are shares of the largest number.
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
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from partition import PartitionError, to_sequential
from pipeline import Pipe
from pipeline.curvature import Hessian

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seeing": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "towers": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "backbone": "MODEL_FOR_BACKBONE_MAPPING_NAMES",
    "depth": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "segments": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "objects": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "video": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
WORDS = ("causal", "masked", "seq2seq", "sequence")  # kinds that are called with a text alone, as far as they take one
TRAINED = ("causal", "masked", "seq2seq", "image")
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
    "decoder_start_token_id": 1, "use_cache": False, "depth": 2, "in_channels": 3, "out_hidden_size": 32,
    **dict.fromkeys(("expand", "mamba_expand"), 1), "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60,
}  # fmt: skip
OTHERS: tuple[dict[str, Any], ...] = (  # where a model does not run with these sizes
    {}, {"num_key_value_heads": 4}, {"image_size": 64}, {"image_size": 224, "patch_size": 16}, {"head_dim": 16},
    {"num_hidden_layers": 6}, dict.fromkeys(("num_experts_per_tok", "n_groups", "n_shared_experts"), 1),
    *[dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 1)
      | dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "head_dim"), width) for width in (64, 128)],
)  # fmt: skip
DROPPED = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")  # layers at random
LARGEST = 40_000_000  # parameters
IMAGE = 55  # the token of an image


def model_of(kind: str, name: str, known: str) -> tuple[nn.Module, str]:
    """A small model of a kind, and the kind of what it is called with: `known` is the name of its class.

    It is the first that runs. A model that sees or hears is called with a text alone where that takes what is not here.
    """
    errors: list[Exception] = []
    for others, called in product(OTHERS, dict.fromkeys((kind, "seq2seq"))):
        try:
            model = built(kind, name, known, others)
            with torch.no_grad():
                model(**inputs(called, model, 2))
            return model, called
        except Exception as error:  # whatever a configuration of other sizes does
            errors.append(error)
    raise errors[0]


def built(kind: str, name: str, known: str, others: dict[str, Any]) -> nn.Module:
    """A model of these sizes. Its class may ask for a configuration that is within the one of its name."""
    transformers = importlib.import_module("transformers")
    config_class, model_class = transformers.CONFIG_MAPPING[name], getattr(transformers, known)
    if model_class.config_class in getattr(config_class, "sub_configs", {}).values():
        config_class = model_class.config_class
    config = config_class(**sized(config_class, kind, others))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError("its configuration has sizes by other names")
    torch.manual_seed(0)
    model: nn.Module = model_class(config).eval()
    return model


def sized(config_class: Any, kind: str, others: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that make it small, of those in it too. The kinds of layers keep four."""
    usual = config_class()
    values = usual.to_dict()
    values |= {key: values[name] for key, name in usual.attribute_map.items() if name in values}
    known = SIZES | (dict.fromkeys(DROPPED, 0.0) if kind in ("audio", "ctc", "speech") else {}) | others
    found: dict[str, Any] = {
        key: size for key, size in known.items() if key in values and isinstance(values[key], int | float | None)
    }
    found |= {
        key: value[:3] + value[-1:] for key, value in values.items()
        if isinstance(value, list) and len(value) == values.get("num_hidden_layers") and isinstance(value[0], str)
    }  # fmt: skip
    for key in getattr(config_class, "sub_configs", {}):
        inner = getattr(usual, key, None)
        if inner is not None:
            found[key] = {**sized(type(inner), kind, others), "model_type": inner.model_type}
    return found


def inputs(kind: str, model: Any, rows: int) -> dict[str, torch.Tensor]:
    """What the model's forward asks for, of these: images, sounds, token ids and a padding mask."""
    asked: Any = signature(model.forward).parameters
    if kind in WORDS and "input_ids" in asked:
        asked = asked.keys() & {"input_ids", "decoder_input_ids"}
    config = model.config
    found: dict[str, torch.Tensor] = {}
    if "pixel_values" in asked:
        seen = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
        size = getattr(seen, "image_size", 32)
        frames = [getattr(config, "num_frames", 2)] if kind == "video" else []
        shape = [size, size] if isinstance(size, int) else size
        found["pixel_values"] = torch.randn(rows, *frames, getattr(seen, "num_channels", 3), *shape)
    if "input_values" in asked:
        found["input_values"] = torch.randn(rows, 8000)
    if "input_features" in asked:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 80)
        is_whisper = "whisper" in config.model_type
        shape = [bins, 2 * config.max_source_positions] if is_whisper else [40, bins]
        found["input_features"] = torch.randn(rows, *shape)
    if "input_ids" in asked and "input_features" not in asked:
        found |= words(kind, model, rows, found.get("pixel_values"))
        found = {key: value for key, value in found.items() if key in asked or kind not in ("towers", "seeing")}
    if "decoder_input_ids" in asked and kind in ("seq2seq", "speech"):
        found["decoder_input_ids"] = torch.randint(3, 50, (rows, 5))
    return found


def words(kind: str, model: Any, rows: int, images: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Token ids and a padding mask; where images are in the text, the places for what the model makes of them."""
    mask = (torch.arange(12) < torch.randint(6, 13, (rows, 1))).long()
    ids = torch.randint(3, 50, (rows, 12))
    if kind == "sequence":
        ids[:, -1] = SIZES["eos_token_id"]  # by which some find the end
    names = [name for name in ("image_token_id", "image_token_index") if getattr(model.config, name, None) is not None]
    if kind == "seeing" and names:
        for name in names:
            setattr(model.config, name, IMAGE)
        with torch.no_grad():
            made = model.get_image_features(images)
        made = tree_leaves(getattr(made, "pooler_output", made))
        places = torch.full((rows, sum(leaf.numel() for leaf in made) // rows // SIZES["hidden_size"]), IMAGE)
        ids = torch.cat([ids[:, :2], places, ids[:, 2:]], 1)
        mask = torch.cat([torch.ones_like(places), mask], 1)
        mask[:, -1] = 0  # PaliGemma itself (transformers 5.23) gives a row other logits where no row is padded
    return {"input_ids": ids, "attention_mask": mask}


def verdict(kind: str, name: str, known: str, seconds: int) -> tuple[str, str]:
    """What became of a model, and the words of a refusal."""
    try:
        with within(seconds), torch.no_grad():
            model, kind = model_of(kind, name, known)
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
    except Exception as error:  # what a model itself raises in train mode
        return "not built", repr(error)
    x = inputs(kind, model, 3)
    with torch.no_grad():
        ours, theirs = tensors(layers(x)), tensors(dict(model(**x, **layers[0].outline.inputs.always)))
    same = len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))
    return ("cut" if same else "DIFFERENT"), ""


def trained(kind: str, name: str, known: str, seconds: int) -> tuple[str, str]:
    """What became of a model's gradients and Hessian products through a Pipe, and the words that say more."""
    try:
        with within(seconds):
            model: Any = model_of(kind, name, known)[0].double()
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")
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
            with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
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
    """Within: TooLongError after so many seconds of this process, however busy the machine is."""

    def end(*_: Any) -> None:
        raise TooLongError

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--seconds", type=int, default=20, help="of this process, to build a model or cut it")
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
    for kind in arguments.kinds or (TRAINED if arguments.train else KINDS):
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
