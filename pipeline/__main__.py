"""The command line, `penstock`, also as `python -m pipeline`: schedules, devices, plans, reports, and curvature.

    $ penstock schedules draw 1f1b --lanes 4 --chunks 8
    $ penstock devices --choose 4
    $ penstock plan train.py:build --devices 4 --memory 24GiB
    $ penstock report step.json
    $ penstock curvature train.py:build --check --top 5 --trace
    $ torchrun --nproc-per-node 4 -m pipeline curvature train.py:build --top 5
    $ penstock --help
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after `penstock`; None takes those of this process

    Returns:
        The exit status: 0; 1 where `curvature --check` or `schedules verify` finds something wrong; 2 for a command
        that cannot be; 130 after an interrupt. What a script itself raises is shown with its traceback.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> script = '''
        ... import torch
        ... def build():
        ...     model = torch.nn.Linear(1, 1, bias=False).double()
        ...     torch.nn.init.zeros_(model.weight)
        ...     x = torch.tensor([[1.0], [2.0]]).double()
        ...     return model, (x, 3 * x), torch.nn.functional.mse_loss
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "fit.py").write_text(script)
        ...     main(["curvature", f"{folder}/fit.py:build", "--matrix", "gauss-newton", "--trace"])
        GaussNewton(1 x 1, float64), 1 stage
        loss 22.5, norm of the gradient 15
        <BLANKLINE>
        trace of Gauss-Newton  5 +- 0
          basis, 1 products, stopped by: exact
        0
    """
    try:
        import click

        from partition.hardware.command import devices
        from partition.plans.command import plan, profile
        from pipeline.curvature.command import curvature
        from scheduler.command_line.commands import schedules
        from scheduler.command_line.report import report
        from scheduler.command_line.running import run
    except ImportError as error:
        print(f'the command line needs {error.name}: pip install "penstock-torch[cli]"', file=sys.stderr)
        return 2
    description = (
        "Pipeline parallelism for PyTorch: schedules to look at and compare, the devices of this host, profiles and "
        "plans of models, reports on traced steps, and the curvature of a model's loss."
    )
    commands: list[click.Command] = [schedules, devices, profile, plan, report, curvature]
    named_commands = {command.name or "": command for command in commands}
    return run(click.Group("penstock", named_commands, help=description), "penstock", argv)


if __name__ == "__main__":
    sys.exit(main())
