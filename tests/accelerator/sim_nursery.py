"""The nursery of ranks with a simulated accelerator each: rank r of a crew computes on sim:r."""

import importlib
import warnings

import crew_worker
import simulated
import torch
import torch._dynamo  # noqa: F401 (else optimizers import it, in each process)
from nursery import serve

if __name__ == "__main__":
    torch.set_num_threads(1)
    simulated.load()
    importlib.import_module("sim_ranks")
    warnings.resetwarnings()
    warnings.simplefilter("error")
    serve(crew_worker.main)
