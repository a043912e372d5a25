"""The nursery of the crews' processes: it has imported whatever the jobs of the tests import."""

import importlib
from pathlib import Path

import crew_worker
import torch._dynamo  # noqa: F401 (else optimizers import it, in each process)
from absent_devices import leave_absent_devices_unseeded
from nursery import serve

if __name__ == "__main__":
    torch.set_num_threads(1)
    leave_absent_devices_unseeded()
    for file in sorted(Path(__file__).parent.glob("r*_*.py")):
        importlib.import_module(file.stem)
    serve(crew_worker.main)
