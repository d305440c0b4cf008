"""Run torchrun, and end with the run's own line.

    python examples/quiet_torchrun.py --nproc-per-node 2 run.py ...

After an error of a rank, and after Ctrl-C, torchrun prints its own traceback and a table, up to 40 lines.
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: list[str]) -> int:
    """Return the exit status of the first rank that failed, or 128 plus the number of its or our signal."""
    logging.disable(logging.ERROR)  # only in this process: ranks have their own
    try:
        run.main(arguments)
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode >= 0:
            return first.exitcode  # the rank has printed why
        number = signal.Signals(-first.exitcode)
        print(f"error: rank {first.local_rank} was ended by {number.name}", file=sys.stderr)
        return 128 + number
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
