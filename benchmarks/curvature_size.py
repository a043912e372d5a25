"""The Hessian of GPT-2 124M's shape under a cap on memory in which others do not fit: on the CPU, and on a GPU.

    python benchmarks/curvature_size.py              both, each in a process of its own; some minutes
    python benchmarks/curvature_size.py pipe         the product through a Pipe of four stages, checkpointed
    python benchmarks/curvature_size.py plain        torch.autograd.grad of torch.autograd.grad on the model
    python benchmarks/curvature_size.py --gpu        on a GPU; --tiny: the same code with a small model on the CPU

12 blocks, width 768, 1,024 tokens of one row, a vocabulary of 50,257, from transformers' configuration with random
weights: nothing is downloaded. Eager attention, float32. The cap is RLIMIT_DATA, which bounds heap and private mappings
of a process; the peak is the largest resident set that the system has seen. Two products are computed: the first
compares more. Seconds are the processor's, of one thread.

On the GPU the data are four rows, which the Pipe takes as four chunks, and each line below is a process of its own:

    no cap      pipe, plain, curvlinops (HessianLinearOperator, where it is installed): two products, their peaks
    the cap     between the peaks of pipe and of the other that needs less
                spectrum: through the Pipe, the top eigenvalues and the density    plain, curvlinops: out of memory

The cap is on what torch's allocator takes from the device (set_per_process_memory_fraction); the peak is the most that
tensors have had. Each prints w'Hw of the parameters w as well, which should agree.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from curvature_peers import curvlinops_product
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import Hessian

CAP, TOKENS, BALANCE = 6.0, 1024, [4, 4, 4, 2]  # GiB; layers: the embeddings, 12 blocks, norm and head
NO_MEMORY = 3  # the status of a process that ran out of it
ROWS = 4  # on the GPU
SLAB = 8  # vectors for which a Krylov basis grows at a time
PEAK = re.compile(r"peak ([0-9.]+) GiB")


def loss_fn(out: dict[str, Tensor], following: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"].flatten(0, 1), following.flatten())


def gpt2(rows: int = 1, tiny: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, rows of token ids, and the tokens that follow."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_head": 2, "vocab_size": 101, "n_positions": 32} if tiny else {}
    config = GPT2Config(
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager", use_cache=False, **shape,
        bos_token_id=None, eos_token_id=None
    )
    ids = torch.randint(config.vocab_size, (rows, (16 if tiny else TOKENS) + 1))
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


# ------------------------------------------------------------------------------------------------------------- a GPU


class Task(NamedTuple):
    """What a process is to do on a device."""

    what: str
    device: torch.device
    cap: float  # GiB; 0: none
    basis: int  # vectors that a Krylov basis may hold
    tiny: bool


class Case(NamedTuple):
    """A model, in eval mode, on its device, with data there."""

    model: nn.Module
    ids: Tensor
    following: Tensor


class Tokens(nn.Module):
    """The logits as torch's cross entropy takes them: [rows, words, tokens]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids)["logits"]
        return logits.transpose(1, 2)


def case(task: Task) -> Case:
    model, ids, following = gpt2(ROWS, task.tiny)
    return Case(model.to(task.device).eval(), ids.to(task.device), following.to(task.device))


def hessian(given: Case, device: torch.device) -> Hessian:
    # A short sample: to cut a model runs the whole of it.
    sample = given.ids[:, :8]
    pipe = Pipe(given.model, BALANCE, ROWS, devices=[device] * len(BALANCE), checkpoint="always", sample=sample)
    return Hessian(pipe, (given.ids, given.following), loss_fn, seed=0, block=1)


def pipe_product(given: Case, device: torch.device) -> Callable[[], float]:
    H = hessian(given, device)
    vector = H.point()
    return lambda: float(H.space.dots([vector], H.products([vector])))


def plain_product(given: Case, device: torch.device) -> Callable[[], float]:
    params = list(given.model.parameters())
    vector = [parameter.detach().clone() for parameter in params]

    def product() -> float:
        grads = torch.autograd.grad(loss_fn(given.model(given.ids), given.following), params, create_graph=True)
        return inner(vector, torch.autograd.grad(grads, params, vector))

    return product


def curvlinops_run(given: Case, device: torch.device) -> Callable[[], float]:
    model = Tokens(given.model)
    vector = [parameter.detach().clone() for parameter in model.parameters()]
    loss = nn.CrossEntropyLoss()
    product = curvlinops_product(
        "HessianLinearOperator", model, given.ids, given.following, loss, vector  # type: ignore[arg-type]
    )
    return lambda: inner(vector, product())


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((one.double() * other.double()).sum()) for one, other in zip(left, right, strict=True))


PRODUCTS = {"pipe": pipe_product, "plain": plain_product, "curvlinops": curvlinops_run}


def two_products(task: Task) -> str:
    """The first compares more, or compiles kernels. Each begins without what the other has left."""
    product = PRODUCTS[task.what](case(task), task.device)
    seconds = []
    for _ in range(2):
        wait(task.device)
        start = time.perf_counter()
        form = product()  # a number on the CPU: the device has ended
        seconds.append(time.perf_counter() - start)
    return f"{seconds[0]:.2f} s, then {seconds[1]:.2f} s; w'Hw {form:.6e}"


def spectrum(task: Task) -> str:
    """The top eigenvalues and the density, printed, of a basis of at most `task.basis` vectors."""
    H = hessian(case(task), task.device)
    start = time.perf_counter()
    top = H.top_eigenpairs(2, tol=1e-2, max_products=32, max_basis=task.basis, miss=1.0, show=False)
    between = time.perf_counter()
    print(f"{top}\n  {between - start:.1f} s, {peak(task.device)}", flush=True)
    gc.collect()
    density = H.density(steps=min(12, task.basis), runs=2, show=False)
    print(f"{density}\n  {time.perf_counter() - between:.1f} s", flush=True)
    return f"{time.perf_counter() - start:.1f} s, {top.products + density.products} products"


def on_device(task: Task) -> int:
    """In this process. The status: `NO_MEMORY` where the cap was not enough."""
    if task.device.type == "cpu":
        torch.set_num_threads(1)
    elif task.cap:
        total = torch.cuda.get_device_properties(task.device).total_memory
        torch.cuda.set_per_process_memory_fraction(task.cap * 2**30 / total, task.device)
    under = f"under {task.cap:.1f} GiB" if task.cap else "without a cap"
    try:
        said = spectrum(task) if task.what == "spectrum" else two_products(task)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        print(f"{task.what}: out of memory {under}, {peak(task.device)}", flush=True)
        return NO_MEMORY
    print(f"{task.what}: {said}, {peak(task.device)} {under}", flush=True)
    return 0


def out_of_memory(error: BaseException | None) -> bool:
    """Whether it is torch's OutOfMemoryError, or was raised because of one."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device) -> str:
    if device.type == "cpu":
        return f"peak {_peak():.2f} GiB"
    taken = torch.cuda.max_memory_reserved(device) / 2**30
    return f"peak {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB ({taken:.2f} with what the allocator keeps)"


def started(*arguments: str) -> tuple[int, float]:
    """Run a task in a process of its own, print what it prints: its status, and the last peak that it told."""
    command = [sys.executable, __file__, *arguments]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=180)
    except subprocess.TimeoutExpired as error:
        print(f"{arguments[0]}: not done after {error.timeout:.0f} s", flush=True)
        return 1, 0.0
    print(ran.stdout.rstrip(), flush=True)
    peaks = PEAK.findall(ran.stdout)
    return ran.returncode, float(peaks[-1]) if peaks else 0.0


def on_gpu(tiny: bool) -> int:
    """All tasks, each in a process of its own. The status: 0 where all is as the module's docstring says."""
    at = ["--device", "cpu" if tiny else "cuda:0", *(["--tiny"] if tiny else [])]
    others = ["plain", *(["curvlinops"] if importlib.util.find_spec("curvlinops") else [])]
    results = {what: started(what, *at) for what in ("pipe", *others)}
    if tiny:
        return max([status for status, _ in results.values()] + [started("spectrum", *at, "--basis", "16")[0]])
    failed = [what for what, (status, _) in results.items() if status not in (0, NO_MEMORY)]
    needed = [value for what in others if (value := results[what][1]) and what not in failed]
    if results["pipe"][0] or not needed:
        return 1
    cap, basis = between_peaks(results["pipe"][1], min(needed))
    print(f"cap {cap:.1f} GiB, a basis of {basis} vectors", flush=True)
    within = [*at, "--cap", f"{cap:.2f}"]
    done = started("spectrum", *within, "--basis", str(basis))[0]
    if done == NO_MEMORY and basis > SLAB:
        done = started("spectrum", *within, "--basis", str(SLAB))[0]
    refused = [started(what, *within)[0] for what in others]
    return int(bool(failed) or done != 0 or any(status != NO_MEMORY for status in refused))


def between_peaks(ours: float, theirs: float) -> tuple[float, int]:
    """A cap, and how many vectors find room in what it leaves: half way, or nearer to `theirs` for two slabs at least.

    Four vectors are left free for what an estimate computes with.
    """
    vector = 124_439_808 * 4 / 2**30
    for share in (0.5, 0.7, 0.9):
        cap = ours + share * (theirs - ours)
        slabs = int(((cap - ours) / vector - 4) // SLAB)
        if slabs >= 2:
            break
    return cap, SLAB * max(1, min(slabs, 3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("both", *PRODUCTS, "spectrum"), nargs="?", default="both")
    parser.add_argument("--cap", type=float, help=f"GiB (default: {CAP:g}; with --device: none)")
    parser.add_argument("--gpu", action="store_true", help="all tasks on cuda:0")
    parser.add_argument("--tiny", action="store_true", help="with --gpu or --device: a small model; --gpu on the CPU")
    parser.add_argument("--device", type=torch.device, help="one task there, with four rows")
    parser.add_argument("--basis", type=int, default=2 * SLAB, help="vectors of a Krylov basis (default: 16)")
    options = parser.parse_args()
    if options.gpu:
        return on_gpu(options.tiny)
    if options.device is not None:
        warnings.simplefilter("ignore")
        return on_device(Task(options.what, options.device, options.cap or 0.0, options.basis, options.tiny))
    options.cap = options.cap or CAP
    if options.what not in ("both", "pipe", "plain"):
        parser.error(f"{options.what} is a task for --device")
    if options.what != "both":
        return run(options.what, options.cap)
    command = [sys.executable, __file__, "--cap", str(options.cap)]
    return [subprocess.run([*command, what], check=False).returncode for what in ("pipe", "plain")] != [0, NO_MEMORY]


if __name__ == "__main__":
    sys.exit(main())
