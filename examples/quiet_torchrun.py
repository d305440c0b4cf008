"""Run torchrun, and end with the run's own line.

    python examples/quiet_torchrun.py --nproc-per-node 2 run.py ...

After an error of a rank, and after Ctrl-C, torchrun prints its own traceback and a table, up to 40 lines.
Without a GPU, ranks are forks of this process, which start faster (extras/fast_cpu/ranks.py, docs/trl.md).
"""

import logging
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import extras
from runtime import rendezvous, shutdown
from runtime.errors import UserError
from runtime.hooks import added


def main(arguments: list[str]) -> int:
    """Return the exit status of the first rank that failed, or 128 plus the number of its or our signal."""
    logging.disable(logging.ERROR)  # only in this process
    extras.load()
    try:
        for prepare in added("launcher"):
            prepare()
        run.main(arguments)
    except SystemExit as error:  # torchrun has printed its usage
        return error.code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
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
    status = main(sys.argv[1:])
    rendezvous.close()
    shutdown.leave(status)
