"""run.py, but an engine is killed in each of three steps: before its tail moves, while it does, and after.

The first three steps, but the very first, whose tail is seen by a meeting: on a busy machine one may not be.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import rollout
import run
from engines.pool import Pool

MOMENTS = ["before", "during", "after"]
use, struck = Pool.use, [0]  # steps
rollout.MEETING_INTERVAL_S = 0.02


async def use_and_strike(self, leads, move=False):
    """The engine that is to go on with the tail dies, the first time that it is chosen in a step."""
    is_cut = self.role == "rollout" and 0 < len(leads) < len(self.awake)
    if not is_cut or self.timeline.step in struck or not MOMENTS:
        return await use(self, leads, move)
    struck.append(self.timeline.step)
    moment = MOMENTS.pop(0)

    def strike():
        if self.world.rank == leads[0]:
            print(f"struck {moment} the move", flush=True)
            os.kill(self.own._process._process.pid, signal.SIGKILL)

    if moment == "before":
        strike()
    if moment == "during":
        asyncio.get_running_loop().call_later(0.1, strike)
    await use(self, leads, move)
    if moment == "after":
        strike()


Pool.use = use_and_strike
if __name__ == "__main__":
    run.main(sys.argv[1:])
