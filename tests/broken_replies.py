"""run.py, but for replies of the engines that are lost on their way or late, by the seed in CHAOS_REPLIES.

CHAOS_REPLIES=7 torchrun --nproc-per-node 2 tests/broken_replies.py [--name value ...]
"""

import asyncio
import os
import random
import sys
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

import run
from engines import server
from engines.engine import Engine, EngineLost

LOST, LATE = 0.004, 0.02  # of the events of a stream
LATE_S = 3.0
MOST_LOST = 4  # in a rank's life
MOVES = ("memory_occupation", "update_weights_from_tensor", "abort_request")
rng, lost = random.Random(f"{os.environ['CHAOS_REPLIES']} {os.environ.get('RANK')}"), []


def is_lost(chance: float) -> bool:
    if len(lost) == MOST_LOST or rng.random() >= chance:
        return False
    lost.append(True)
    print(f"CHAOS: rank {os.environ['RANK']} loses a reply", flush=True)
    return True


async def events_with_faults(response, real=server.server_sent_events):
    """A stream that breaks or stands still."""
    async for event in real(response):
        if is_lost(LOST):
            raise aiohttp.ClientPayloadError("lost on its way")
        if rng.random() < LATE:
            await asyncio.sleep(rng.uniform(0, LATE_S))
        yield event


async def call_with_faults(self, method, path, real=Engine._call, **body):
    """The server does what it is told, but nobody hears of it."""
    reply = await real(self, method, path, **body)
    if path.endswith(MOVES) and is_lost(LOST * 5):
        raise EngineLost(f"didn't answer {path}: lost on its way")
    return reply


if __name__ == "__main__":
    server.server_sent_events, Engine._call = events_with_faults, call_with_faults
    run.main(sys.argv[1:])
