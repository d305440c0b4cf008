"""An engine with a set pace: a step of the model takes at least as long as on the device that it mimics.

It is for measurements on a machine whose ranks share its cores: an engine that sleeps leaves the cores to the
others. BENCH_PACE_MS="20,0.1" is 20 ms, and 0.1 ms for each sequence; a third number is added for each prompt
that is read. If it is set, reproduce/bench/served_load.py has servers run this module. It needs a C++
compiler.
"""

import math
import os
import time

from engines import server_main
from extras.fast_cpu.decoder import Decoder


def at_pace(forward, pace):
    """Return a model's `forward`, slowed down to `pace`.

    Sampling and scheduling between two steps overlap with the device's work, as on a GPU: a step that comes
    sooner after the last one than its own duration begins where the last one ended.
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
    Decoder.most_steps = 1  # so that each step is paced
    server_main.main()
