"""run.py, but an engine is killed in each of three steps: before its tail moves, while it does, and after."""

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import run
from engines.pool import Pool

MOMENTS = {1: "before", 2: "during", 3: "after"}
use, struck = Pool.use, set()


async def use_and_strike(self, leads, move=False):
    """The engine that is to go on with the tail dies, the first time that it is chosen in a step."""
    step = self.timeline.step
    is_cut = self.role == "rollout" and 0 < len(leads) < len(self.awake) and step not in struck
    moment = MOMENTS.get(step) if is_cut else None
    struck.update({step} if moment else ())

    def strike():
        if self.world.rank == leads[0]:
            print(f"struck in step {step}, {moment} the move", flush=True)
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
