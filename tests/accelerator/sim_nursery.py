"""The nursery of ranks with a simulated accelerator each: rank r of a crew computes on sim:r."""

import importlib

import crew_worker
import simulated
import torch
import torch._dynamo  # noqa: F401 (else optimizers import it, in each process)
from nursery import serve

if __name__ == "__main__":
    torch.set_num_threads(1)
    simulated.load()
    for module in ("sim_ranks", "rank_curvature", "rank_transparency"):  # which import the others
        importlib.import_module(module)
    serve(crew_worker.main)
