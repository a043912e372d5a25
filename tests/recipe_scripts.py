"""The recipes of docs/recipes.md: how each is run in the tests, which is shorter than when a user runs it."""

from __future__ import annotations

import io
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

EXAMPLES = Path(__file__).parent.parent / "examples"
RECIPES = {
    "finetune_llama": ["--steps", "12"],
    "bert_padding": ["--steps", "15"],
    "t5_dates": ["--steps", "15"],
    "vit_digits": ["--epochs", "1"],
    "resnet_digits": ["--epochs", "1"],
    "unet_denoise": ["--epochs", "1"],
    "lora": ["--steps", "15"],
    "hessian_llama": ["--steps", "5"],
    "influence": ["--points", "2"],
    "natural_gradient": ["--steps", "4"],
}

SECOND_ORDER = ("hessian_product", "gradient_penalty", "maml", "implicit_gradient")  # each compares itself


def ran(name: str, *arguments: str) -> str:
    """What a recipe prints."""
    script = EXAMPLES / f"{name}.py"
    with (
        patch.object(sys, "argv", [str(script), *(arguments or RECIPES.get(name, ()))]),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]), redirect_stdout(io.StringIO()) as printed,
        warnings.catch_warnings()
    ):  # fmt: skip
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # peft's
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()
