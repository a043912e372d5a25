"""The models of other libraries through a Pipe: torchvision, timm, diffusers and more, as far as they are installed.

    python benchmarks/libraries.py                      all libraries, some half an hour
    python benchmarks/libraries.py timm --seconds 20    one of them
    python benchmarks/libraries.py timm --names vit     models whose names contain this; those not right go to stderr

    model ─► cut on one sample ─► called with another: the plain model's outputs, to 1e-12?
                              └─► steps of two stages, two chunks: the plain loop's gradients, to 1e-9 of the largest?

Of a library with many models a small one of each family is taken. Weights are random, nothing is downloaded. All is in
float64 and in eval mode, where dropout draws nothing. Steps are made twice: "always" under 1F1B, "never" under ZB-H1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from families import TooLongError, apart, tensors, within
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import register_dataclass

from partition import PartitionError, to_sequential
from pipeline import Pipe

CHUNKS = ((0, 3), (3, 5))  # rows of each


class Candidate(NamedTuple):
    """A model, and what it is called with.

    Attributes:
        name: for the report.
        build: makes it.
        inputs: of so many rows: a tensor, a tuple or a dict.
        output: what is taken of what it returns.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    output: Callable[[Any], Any] | None = None


def images(size: int, rows: int, channels: int = 3) -> Tensor:
    return torch.randn(rows, channels, size, size, dtype=torch.float64)


def words(length: int, rows: int) -> Tensor:
    return torch.randint(1, 50, (rows, length))


# -------------------------------------------------------------------------------------------------------- the libraries


def torchvision() -> Iterator[Candidate]:
    """The smallest model of each module, classifiers and segmentation, on images as small as it takes; two of videos.

    Detectors are called with lists of images, which are no rows.
    """
    models = importlib.import_module("torchvision.models")
    sized: dict[str, list[tuple[int, str]]] = {}
    for name in [*models.list_models(models), *models.list_models(models.segmentation)]:
        try:
            with torch.device("meta"):
                model = _of_torchvision(name, 224)
        except NotImplementedError:  # it needs numbers
            model = _of_torchvision(name, 224)
        kind = models.get_model_builder(name).__module__.rpartition(".")[2]
        sized.setdefault(kind, []).append((sum(each.numel() for each in model.parameters()), name))
    for kind, names in sized.items():
        size = {"maxvit": 224, "inception": 299}.get(kind, 96)
        _, name = min(names)
        yield Candidate(name, partial(_of_torchvision, name, size), partial(images, size))
    for name in ("r3d_18", "swin3d_t"):
        yield Candidate(name, partial(_of_torchvision, name, 64), partial(_random, (3, 8, 64, 64)))


def _of_torchvision(name: str, size: int) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    options: dict[str, Any] = {"image_size": size} if name.startswith("vit_") else {}
    if name in models.list_models(models.segmentation):
        options["weights_backbone"] = None
    made: nn.Module = models.get_model(name, weights=None, **options)
    return made


def _random(shape: tuple[int, ...], rows: int) -> Tensor:
    return torch.randn(rows, *shape, dtype=torch.float64)


SMALL = ("test", "atto", "femto", "pico", "nano", "tiny", "mini", "_xxs", "_xs", "small", "_s", "18", "_0", "b0", "_1")


def timm() -> Iterator[Candidate]:
    """Of each module the smallest of six models whose names say that they are small, built on the meta device."""
    library = importlib.import_module("timm")
    for module in sorted(library.list_modules()):
        names = library.list_models(module=module)
        names.sort(key=lambda name: next((place for place, word in enumerate(SMALL) if word in name), len(SMALL)))
        sized = []
        for name in names[:6]:
            size = (library.get_pretrained_cfg(name) or library.models.PretrainedCfg()).input_size[-1]
            try:
                with torch.device("meta"):
                    model = library.create_model(name)
            except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError):  # needs numbers
                continue
            sized.append((sum(each.numel() for each in model.parameters()) * size**2, name, size))
        if sized:
            _, name, size = min(sized)
            yield Candidate(f"{module}: {name}", partial(library.create_model, name), partial(images, size))


def segmentation_models_pytorch() -> Iterator[Candidate]:
    """Each decoder, on a ResNet."""
    library = importlib.import_module("segmentation_models_pytorch")
    for name in ("Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "Linknet", "MAnet", "PAN",
                 "UPerNet", "Segformer", "DPT"):  # fmt: skip
        encoder = {} if name == "DPT" else {"encoder_name": "resnet18"}
        build = partial(getattr(library, name), encoder_weights=None, classes=2, **encoder)
        yield Candidate(name, build, partial(images, 224 if name == "DPT" else 64))


def open_clip() -> Iterator[Candidate]:
    """The two towers of CLIP and of CoCa, small."""
    library = importlib.import_module("open_clip.model")
    vision = library.CLIPVisionCfg(layers=4, width=32, head_width=8, patch_size=16, image_size=64)
    text = library.CLIPTextCfg(context_length=16, vocab_size=60, width=32, heads=4, layers=4)
    resnet = library.CLIPVisionCfg(layers=(2, 2, 2, 2), width=16, image_size=64)

    def tower(name: str, seen: Any) -> nn.Module:
        made: nn.Module = getattr(library.CLIP(32, seen, text), name)
        return made

    yield Candidate("CLIP, images", partial(tower, "visual", vision), partial(images, 64))
    yield Candidate("CLIP, images by a ResNet", partial(tower, "visual", resnet), partial(images, 64))
    both = partial(library.CLIP, 32, vision, text)  # without the scale of the logits, a single number
    yield Candidate("CLIP", both, lambda rows: (images(64, rows), words(16, rows)), lambda returned: returned[:2])
    custom = partial(library.CustomTextCLIP, 32, vision, text)
    yield Candidate("CustomTextCLIP, words", lambda: custom().text, partial(words, 16))


def vit_pytorch() -> Iterator[Candidate]:
    """Every module of the library that has a vision transformer of the usual arguments."""
    library = importlib.import_module("vit_pytorch")
    usual = {
        "image_size": 64, "patch_size": 16, "num_classes": 5, "dim": 32, "depth": 4, "heads": 4, "mlp_dim": 64,
        "dim_head": 8, "k": 16, "max_tokens_per_depth": (16, 12, 8, 6), "window_size": 4, "spatial_size": 16,
        "depths": (2, 2), "cls_depth": 2, "num_register_tokens": 2, "ssl_depth": 1, "cnn_depth": 1,
    }  # fmt: skip
    for found in pkgutil.iter_modules(library.__path__, "vit_pytorch."):
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # of packages that it does not ask for
            continue
        for name, kind in vars(module).items():
            if not (inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == found.name):
                continue
            taken = inspect.signature(kind).parameters
            needs = [key for key, each in taken.items() if each.default is each.empty and each.kind < 4 and
                     each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]  # fmt: skip
            if {"image_size", "num_classes"} <= set(taken) and set(needs) <= set(usual):
                arguments = {key: usual[key] for key in taken if key in usual}
                yield Candidate(f"{found.name[12:]}.{name}", partial(kind, **arguments), partial(images, 64))


def x_transformers() -> Iterator[Candidate]:
    """A decoder with each of the library's options."""
    library = importlib.import_module("x_transformers")
    register_dataclass(importlib.import_module("x_transformers.attend").Intermediates)  # what attention returns, too
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True},
        "relative positions": {"rel_pos_bias": True}, "dynamic positions": {"dynamic_pos_bias": True},
        "RMSNorm": {"use_rmsnorm": True}, "gated": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
        "one head of keys": {"attn_one_kv_head": True}, "grouped queries": {"attn_kv_heads": 2},
        "norms of queries": {"attn_qk_norm": True}, "talking heads": {"attn_pre_talking_heads": True},
        "gates of values": {"attn_gate_values": True}, "memories": {"attn_num_mem_kv": 2},
        "sandwich norm": {"sandwich_norm": True}, "residual attention": {"residual_attn": True},
        "macaron": {"macaron": True}, "scaled residuals": {"scale_residual": True},
        "shifted tokens": {"shift_tokens": 1}, "gated residuals": {"gate_residual": True},
        "sparse attention": {"attn_sparse_topk": 4},
        "squared ReLU": {"ff_relu_squared": True}, "layer dropout": {"layer_dropout": 0.1},
        "hyper connections": {"num_residual_streams": 2}, "values of the first layer": {"add_value_residual": True},
    }  # fmt: skip

    def build(some: dict[str, Any]) -> nn.Module:
        layers = library.Decoder(dim=32, depth=4, heads=4, attn_dim_head=8, **some)
        made: nn.Module = library.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)
        return made

    for name, some in options.items():
        yield Candidate(name, partial(build, some), partial(words, 12))


def diffusers() -> Iterator[Candidate]:
    """Denoisers and encoders, small."""
    library = importlib.import_module("diffusers")

    def timed(size: int, channels: int, rows: int, **others: Any) -> dict[str, Any]:
        sample = torch.randn(rows, channels, size, size, dtype=torch.float64)
        return {"sample": sample, "timestep": torch.arange(rows), **{key: make(rows) for key, make in others.items()}}

    def hidden(length: int, width: int, rows: int) -> Tensor:
        return torch.randn(rows, length, width, dtype=torch.float64)

    unet = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    plain = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    crossed = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
               "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16,
               "attention_head_dim": 8}  # fmt: skip
    yield Candidate("UNet2D", partial(library.UNet2DModel, **unet, **plain), partial(timed, 16, 3))
    yield Candidate("UNet2DCondition", partial(library.UNet2DConditionModel, **unet, **crossed),
                    partial(timed, 16, 4, encoder_hidden_states=partial(hidden, 6, 16)))  # fmt: skip
    dit = partial(library.DiTTransformer2DModel, num_attention_heads=4, attention_head_dim=8, in_channels=4,
                  out_channels=8, num_layers=4, sample_size=8, patch_size=2, norm_num_groups=4)  # fmt: skip
    yield Candidate("DiT", dit, lambda rows: {
        "hidden_states": torch.randn(rows, 4, 8, 8, dtype=torch.float64), "timestep": torch.arange(rows),
        "class_labels": torch.arange(rows)})  # fmt: skip
    pixart = partial(library.PixArtTransformer2DModel, num_attention_heads=4, attention_head_dim=8, in_channels=4,
                     out_channels=8, num_layers=4, sample_size=8, patch_size=2, cross_attention_dim=32,
                     caption_channels=16, use_additional_conditions=False)  # fmt: skip
    yield Candidate("PixArt", pixart, lambda rows: {
        "hidden_states": torch.randn(rows, 4, 8, 8, dtype=torch.float64), "timestep": torch.arange(rows),
        "encoder_hidden_states": hidden(6, 16, rows), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}})
    sd3 = partial(library.SD3Transformer2DModel, sample_size=8, patch_size=2, in_channels=4, num_layers=4,
                  attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32,
                  pooled_projection_dim=16, out_channels=4)  # fmt: skip
    yield Candidate("SD3", sd3, lambda rows: {
        "hidden_states": torch.randn(rows, 4, 8, 8, dtype=torch.float64), "timestep": torch.arange(rows),
        "encoder_hidden_states": hidden(6, 16, rows),
        "pooled_projections": torch.randn(rows, 16, dtype=torch.float64)})  # fmt: skip
    for name, (sizes, inputs) in _transformers().items():
        build = partial(getattr(library, f"{name}Transformer{'3D' if name in _OF_VIDEOS else '2D'}Model"), **sizes)
        yield Candidate(name, build, inputs)
    vae = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4,
           "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
    yield Candidate("AutoencoderKL", partial(library.AutoencoderKL, **vae), partial(images, 16))
    yield Candidate("AutoencoderTiny", partial(
        library.AutoencoderTiny, encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 2), num_decoder_blocks=(2, 1)), partial(images, 16))  # fmt: skip
    yield Candidate("Prior", partial(
        library.PriorTransformer, num_attention_heads=4, attention_head_dim=8, num_layers=4, embedding_dim=16,
        num_embeddings=6, additional_embeddings=4), lambda rows: {
            "hidden_states": torch.randn(rows, 16, dtype=torch.float64), "timestep": torch.arange(rows),
            "proj_embedding": torch.randn(rows, 16, dtype=torch.float64),
            "encoder_hidden_states": hidden(6, 16, rows)})  # fmt: skip


_OF_VIDEOS = ("Allegro", "CogVideoX", "HunyuanVideo", "LTXVideo", "Mochi", "Wan")


def _transformers() -> dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]]:
    """Denoisers of images and videos of diffusers: sizes, and inputs."""

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float64)

    def timed(rows: int, *sizes: int, words: tuple[int, int], **others: Tensor) -> dict[str, Any]:
        times = torch.linspace(0, 1, rows, dtype=torch.float64)
        return {"hidden_states": randn(rows, *sizes), "encoder_hidden_states": randn(rows, *words), "timestep": times,
                **others}  # fmt: skip

    def places(rows: int, axes: int) -> dict[str, Tensor]:
        """Ids of a sequence's places, the same in each row."""
        ids = {"img_ids": 16, "txt_ids": 6}
        return {name: torch.arange(length * axes).view(1, length, axes).expand(rows, -1, -1).double()
                for name, length in ids.items()}  # fmt: skip

    def masked(rows: int, *sizes: int) -> dict[str, Tensor]:
        return {"encoder_attention_mask": torch.ones(rows, *sizes, dtype=torch.bool)}

    heads = {"num_attention_heads": 2, "attention_head_dim": 16}
    small = {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 3}
    mixed = {"patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, **heads,
             "joint_attention_dim": 32}  # fmt: skip
    return {
        "Flux": ({**mixed, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}, lambda rows: timed(
            rows, 16, 4, words=(6, 32), pooled_projections=randn(rows, 32), **places(rows, 3))),
        "Flux2": ({**mixed, "axes_dims_rope": (4, 4, 4, 4)}, lambda rows: timed(
            rows, 16, 4, words=(6, 32), guidance=torch.ones(rows).double(), **places(rows, 4))),
        "Chroma": ({**mixed, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8,
                    "approximator_hidden_dim": 16, "approximator_layers": 1}, lambda rows: timed(
            rows, 16, 4, words=(6, 32), **places(rows, 3))),
        "AuraFlow": ({"sample_size": 8, "num_mmdit_layers": 2, "num_single_dit_layers": 3, "attention_head_dim": 8,
                      "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
                      "pos_embed_max_size": 64}, lambda rows: timed(rows, 4, 8, 8, words=(6, 32))),
        "Sana": ({**small, "patch_size": 1, "num_attention_heads": 2, "attention_head_dim": 4, "sample_size": 8,
                  "num_cross_attention_heads": 2, "cross_attention_head_dim": 4, "cross_attention_dim": 8,
                  "caption_channels": 8}, lambda rows: timed(rows, 4, 8, 8, words=(6, 8))),
        "Lumina2": ({"sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
                     "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2),
                     "axes_lens": (128,) * 3, "cap_feat_dim": 8}, lambda rows: timed(
            rows, 4, 8, 8, words=(6, 8), **masked(rows, 6))),
        "CogView4": ({**small, "num_attention_heads": 4, "attention_head_dim": 4, "text_embed_dim": 8,
                      "time_embed_dim": 8, "condition_dim": 4}, lambda rows: timed(
            rows, 4, 8, 8, words=(8, 8), original_size=torch.full((rows, 2), 20.0).double(),
            target_size=torch.full((rows, 2), 20.0).double(), crop_coords=torch.zeros(rows, 2).double())),
        "CogVideoX": ({**small, **heads, "time_embed_dim": 2, "text_embed_dim": 8, "sample_width": 8,
                       "sample_height": 8, "sample_frames": 8, "max_text_seq_length": 8}, lambda rows: timed(
            rows, 2, 4, 8, 8, words=(8, 8))),
        "LTXVideo": ({**heads, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "num_layers": 3,
                      "caption_channels": 16}, lambda rows: {
            **timed(rows, 32, 8, words=(6, 16), **masked(rows, 6)), "num_frames": 2, "height": 4, "width": 4}),
        "Wan": ({"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
                 "text_dim": 16, "ffn_dim": 32, "num_layers": 3, "rope_max_seq_len": 32}, lambda rows: timed(
            rows, 4, 2, 8, 8, words=(6, 16))),
        "HunyuanVideo": ({**small, "patch_size": 1, "num_attention_heads": 2, "attention_head_dim": 10,
                          "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 16,
                          "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)}, lambda rows: timed(
            rows, 4, 1, 4, 4, words=(6, 16), encoder_attention_mask=torch.ones(rows, 6).double(),
            pooled_projections=randn(rows, 8), guidance=torch.ones(rows).double())),
        "Mochi": ({"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 16,
                   "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 16},
                  lambda rows: timed(rows, 4, 2, 8, 8, words=(6, 16), **masked(rows, 6))),
        "Allegro": ({"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 24,
                     "sample_width": 8, "sample_height": 8, "sample_frames": 8, "caption_channels": 24},
                    lambda rows: timed(rows, 4, 2, 8, 8, words=(6, 24),
                                       encoder_attention_mask=torch.ones(rows, 1, 6).double())),
    }  # fmt: skip


def monai() -> Iterator[Candidate]:
    """Networks for images of one channel, in two dimensions where they can."""
    nets = importlib.import_module("monai.networks.nets")
    flat, wide = {"spatial_dims": 2}, {"in_channels": 1, "out_channels": 2}
    sizes: dict[str, dict[str, Any]] = {
        "UNet": {**flat, **wide, "channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1},
        "AttentionUnet": {**flat, **wide, "channels": (8, 16, 32), "strides": (2, 2)},
        "BasicUNet": {**flat, **wide, "features": (8, 8, 16, 16, 32, 8)},
        "BasicUNetPlusPlus": {**flat, **wide, "features": (8, 8, 16, 16, 32, 8)},
        "DynUNet": {**flat, **wide, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
        "SegResNet": {**flat, **wide, "init_filters": 8},
        "SegResNetVAE": {**flat, **wide, "init_filters": 8, "input_image_size": (64, 64)},
        "VNet": {**flat, **wide}, "DenseNet": {**flat, **wide, "init_features": 8, "growth_rate": 4},
        "HighResNet": {**flat, **wide}, "SENet154": {**flat, "in_channels": 1, "num_classes": 2},
        "UNETR": {**flat, **wide, "img_size": 64, "feature_size": 8, "hidden_size": 48, "mlp_dim": 64},
        "SwinUNETR": {**flat, **wide, "feature_size": 12},
        "ViT": {**flat, "in_channels": 1, "img_size": 64, "patch_size": 16, "hidden_size": 32, "mlp_dim": 64,
                "num_layers": 4, "num_heads": 4, "classification": True},
        "EfficientNetBN": {**flat, "model_name": "efficientnet-b0", "in_channels": 1, "pretrained": False},
        "AutoEncoder": {**flat, **wide, "channels": (8, 16), "strides": (2, 2)},
        "FlexibleUNet": {**flat, **wide, "backbone": "efficientnet-b0", "pretrained": False},
        "Regressor": {"in_shape": (1, 64, 64), "out_shape": (1,), "channels": (4, 8), "strides": (2, 2)},
        "Classifier": {"in_shape": (1, 64, 64), "classes": 3, "channels": (4, 8), "strides": (2, 2)},
        "resnet18": {**flat, "n_input_channels": 1, "num_classes": 3},
    }  # fmt: skip
    for name, arguments in sizes.items():
        yield Candidate(name, partial(getattr(nets, name), **arguments), partial(images, 64, channels=1))


LIBRARIES: dict[str, Callable[[], Iterator[Candidate]]] = {
    each.__name__: each for each in (
        torchvision, timm, segmentation_models_pytorch, open_clip, vit_pytorch, x_transformers, diffusers, monai,
    )
}


NAMES = {"open_clip": "open_clip_torch"}  # of distributions


# ------------------------------------------------------------------------------------------------------------ judgement


def judged(candidate: Candidate, seconds: int) -> tuple[str, str]:
    """What became of a model, and the words that say more."""
    torch.manual_seed(0)
    try:
        with within(seconds):
            x, made = candidate.inputs(5), candidate.output or dict_of
            with torch.no_grad():
                called(candidate.build().double().train(), x)
            torch.manual_seed(0)
            model = candidate.build().double().eval()
            expected = plain_grads(model, x, made)
    except TooLongError:
        return "not run", "too slow"
    except Exception as error:  # whatever a model does in float64, in train mode, or without its author's settings
        return "not run", f"{type(error).__name__}: {error}"
    try:
        with within(8 * seconds):
            layers = to_sequential(model, candidate.inputs(4), output=candidate.output).eval()
            with torch.no_grad():
                outputs = apart(tensors(Pipe(layers, halves(layers), 1)(x)), tensors(made(called(model, x))))
            grads = max(
                apart(stepped(model, layers, x, *how), expected) for how in (("always", "1f1b"), ("never", "zb-h1"))
            )
    except TooLongError:
        return "not run", "too slow"
    except PartitionError as error:
        return "refused", str(error)
    except Exception as error:  # a Pipe's words, say
        return "failed", f"{type(error).__name__}: {error}"
    said = f"outputs {outputs:.0e}, gradients {grads:.0e}"
    return ("right" if outputs <= 1e-12 and grads <= 1e-9 else "FURTHER"), said


def called(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def dict_of(returned: Any) -> Any:
    """What `to_sequential` makes of what a model returns."""
    return {key: each for key, each in returned.items() if each is not None} if isinstance(returned, dict) else returned


def halves(layers: nn.Sequential) -> list[int]:
    return [len(layers) // 2, len(layers) - len(layers) // 2]


def stepped(model: nn.Module, layers: nn.Sequential, x: Any, checkpoint: str, schedule: str) -> list[Tensor | None]:
    """The gradients of a step."""
    model.zero_grad()
    pipe = Pipe(layers, halves(layers), len(CHUNKS), checkpoint=checkpoint, schedule=schedule)
    pipe.step(x, torch.zeros(CHUNKS[-1][1]), loss_fn=loss_of)
    return [parameter.grad for parameter in model.parameters()]


def plain_grads(model: nn.Module, x: Any, made: Callable[[Any], Any]) -> list[Tensor | None]:
    """The same by a loop over the chunks."""
    model.zero_grad()
    for first, last in CHUNKS:
        output = called(model, torch.utils._pytree.tree_map_only(Tensor, lambda whole: whole[first:last], x))
        (loss_of(made(output), None) * (last - first) / CHUNKS[-1][1]).backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def loss_of(output: Any, target: Tensor | None) -> Tensor:
    """A mean over rows, of all floating-point tensors of the output that have rows."""
    rows = [each.flatten(1) for each in tensors(output) if each.is_floating_point() and each.dim() > 1]
    return torch.stack([(functional.softplus(each).mean(1) + each.square().mean(1)).mean() for each in rows]).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("libraries", nargs="*", choices=[*LIBRARIES, []], help="default: all that are installed")
    parser.add_argument("--names", default="", help="a pattern that the models' names contain; default: all")
    parser.add_argument("--seconds", type=int, default=20, help="the longest that a model may take to be built and run")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    columns = ["right", "FURTHER", "refused", "failed", "not run"]
    print(f"| library | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for name in arguments.libraries or [name for name in LIBRARIES if importlib.util.find_spec(name)]:
        counts: Counter[str] = Counter()
        for candidate in LIBRARIES[name]():
            if re.search(arguments.names, candidate.name):
                what, said = judged(candidate, arguments.seconds)
                counts[what] += 1
                if what != "right":
                    print(f"{name}, {candidate.name}: {what}: {said}", file=sys.stderr, flush=True)
        version = metadata.version(NAMES.get(name, name))
        print(f"| {name} {version} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)


if __name__ == "__main__":
    main()
