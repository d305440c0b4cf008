"""An engine with a pace: a step of the model lasts at least as long as on the device that is played.

For measurements on a machine whose ranks share its cores: an engine that waits for its device leaves them
to the others. BENCH_PACE_MS="20,0.1" is 20 ms, and 0.1 ms for each sequence; a third number is more for each
prompt that is read. With it, bench/served_load.py has servers run this module. It takes a C++ compiler.
"""

import math
import os
import time

from cpu.fast.decoder import Decoder
from engines import server_main


def at_pace(forward, pace):
    """`forward` of a model, made to last as long as `pace` says.

    Sampling and scheduling between two steps hide behind the device, as they do on a GPU: a step that comes
    in less time than it lasts begins where the one before ended.
    """
    fixed_ms, each_ms, *read_ms = map(float, pace.split(","))
    ended = -math.inf

    def paced(self, input_ids, positions, forward_batch, *args, **kwargs):
        nonlocal ended
        sequence_ms = each_ms
        if read_ms and forward_batch.forward_mode.is_extend():
            sequence_ms += read_ms[0]
        seconds = (fixed_ms + sequence_ms * forward_batch.batch_size) / 1000
        now = time.perf_counter()
        begin = ended if now - ended < seconds else now
        due = begin + seconds
        result = forward(self, input_ids, positions, forward_batch, *args, **kwargs)
        time.sleep(max(0.0, due - time.perf_counter()))
        ended = max(due, time.perf_counter())
        return result

    return paced


def main():
    """Serve at a pace, in a process that the fork server made."""
    Decoder.run_layers = at_pace(Decoder.run_layers, os.environ["BENCH_PACE_MS"])
    Decoder.most_steps = 1  # each step has its pace
    server_main.main()
