"""One Hessian-vector product of GPT-2 124M's shape under a cap on memory in which double backward does not fit.

    python benchmarks/curvature_size.py              both, each in a process of its own; some minutes
    python benchmarks/curvature_size.py pipe         the product through a Pipe of four stages, checkpointed
    python benchmarks/curvature_size.py plain        torch.autograd.grad of torch.autograd.grad on the model

12 blocks, width 768, 1,024 tokens of one row, a vocabulary of 50,257, from transformers' configuration with random
weights: nothing is downloaded. Eager attention, float32. The cap is RLIMIT_DATA, which bounds heap and private mappings
of a process; the peak is the largest resident set that the system has seen. Two products are computed: the first
compares more. Seconds are the processor's, of one thread.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import Hessian

CAP, TOKENS, BALANCE = 6.0, 1024, [4, 4, 4, 2]  # GiB; layers: the embeddings, 12 blocks, norm and head
NO_MEMORY = 3  # the status of a process that ran out of it


def loss_fn(out: dict[str, Tensor], following: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"].flatten(0, 1), following.flatten())


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    """The model, a row of token ids, and the tokens that follow."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager", use_cache=False)
    ids = torch.randint(config.vocab_size, (1, TOKENS + 1))
    return GPT2LMHeadModel(config), ids[:, :-1], ids[:, 1:]


def of_pipe() -> list[float]:
    """Processor seconds of two products."""
    model, ids, following = gpt2()
    # A short sample: to cut a model runs the whole of it.
    pipe = Pipe(model, BALANCE, checkpoint="always", sample=ids[:, :8])
    H = Hessian(pipe, (ids, following), loss_fn, seed=0)
    vector, seconds = H.space.random("normal", 0, 0), []
    for _ in range(2):
        start = time.process_time()
        (product,) = H.products([vector])
        seconds.append(time.process_time() - start)
        assert H.space.norm(product) > 0.0
    return seconds


def of_plain() -> list[float]:
    model, ids, following = gpt2()
    model.eval()
    params = list(model.parameters())
    vector = [torch.randn_like(parameter) for parameter in params]
    start = time.process_time()
    grads = torch.autograd.grad(loss_fn(model(ids), following), params, create_graph=True)
    torch.autograd.grad(grads, params, vector)
    return [time.process_time() - start]


def run(what: str, cap: float) -> int:
    """In this process, under the cap. The status: `NO_MEMORY` where that was not enough."""
    torch.set_num_threads(1)
    bytes_ = int(cap * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_, bytes_))
    try:
        seconds = of_pipe() if what == "pipe" else of_plain()
    except (RuntimeError, MemoryError) as error:
        if "can't allocate memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        print(f"{what}: out of memory under {cap:g} GiB, with {_peak():.1f} GiB resident", flush=True)
        return NO_MEMORY
    times = ", ".join(f"{each:.0f} s" for each in seconds)
    print(f"{what}: {times} of one core, peak {_peak():.1f} GiB of {cap:g}", flush=True)
    return 0


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("both", "pipe", "plain"), nargs="?", default="both")
    parser.add_argument("--cap", type=float, default=CAP, help=f"GiB (default: {CAP:g})")
    options = parser.parse_args()
    if options.what != "both":
        return run(options.what, options.cap)
    command = [sys.executable, __file__, "--cap", str(options.cap)]
    return [subprocess.run([*command, what], check=False).returncode for what in ("pipe", "plain")] != [0, NO_MEMORY]


if __name__ == "__main__":
    sys.exit(main())
