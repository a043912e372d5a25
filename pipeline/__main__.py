"""python -m pipeline curvature: what goes in, what comes out, and with which status?

    words  --options.py-->  Namespace  --target.py-->  operator  --answers.py-->  stdout and files
       └────── wrong ──────┴──────────── cannot be ────────────┴──►  stderr, in words ──► 2
    0: done        1: --check found something wrong        2: the command        130: interrupted

    $ python -m pipeline curvature train.py:build --check --top 5 --trace
    $ torchrun --nproc-per-node 4 -m pipeline curvature train.py:build --top 5
    $ python -m pipeline curvature --help

What the script itself raises is shown with its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

from pipeline.curvature.command_line.answers import curvature
from pipeline.curvature.command_line.options import parse
from scheduler.command_line.arguments import CommandError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after `python -m pipeline`; None takes those of this process

    Returns:
        The exit status.

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
        args = parse(argv)
        status = curvature(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has enough, as head does
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # or Python flushes into the pipe once more
        return 0
    except KeyboardInterrupt as error:
        _say("interrupted", error)
        return 130
    except CommandError as error:
        _say(str(error), error)
        return 2
    except (ValueError, TypeError, ArithmeticError, ImportError, OSError) as error:
        if not _is_ours(error.__traceback__):
            raise
        _say(str(error), error)
        return 2


def _say(words: str, error: BaseException) -> None:
    """On stderr, with the error's notes (where a run was saved); over ranks each says who it is."""
    who = f"rank {os.environ.get('RANK', 0)}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    print("\n".join([who + words, *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether this package has raised it: then its words say what to do, and where it was is of no use."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return str(name).partition(".")[0] == "pipeline"


if __name__ == "__main__":
    sys.exit(main())
