"""A server at the pace of a device: cpu.sglang, whose decode steps last at least as long as there.

    NANOYATT_PACE_MS=20,0.1 python -m bench.paced_server ...      20 ms, and 0.1 ms for each sequence

For measurements on a machine whose ranks share its cores: an engine that waits for its device leaves them to
others.
"""

import os
import time

from cpu import sglang


def at_pace(forward, pace):
    """`forward`, made to last at least as long as on a device with this pace."""
    fixed_ms, each_ms = map(float, pace.split(","))

    def paced(self, input_ids, positions, forward_batch, *args, **kwargs):
        due = time.perf_counter() + (fixed_ms + each_ms * forward_batch.batch_size) / 1000
        result = forward(self, input_ids, positions, forward_batch, *args, **kwargs)
        time.sleep(max(0.0, due - time.perf_counter()))
        return result

    return paced


if __name__ in ("__main__", "__mp_main__"):
    sglang.die_with_parent()
    library = sglang.install()
    sglang.decoder_forward = at_pace(sglang.decoder_forward, os.environ["NANOYATT_PACE_MS"])
if __name__ == "__main__":
    sglang.main()
