"""Fleet: the servers of this rank from their start to their end, and a handle on those of every rank."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from config import Config
from engines import server
from engines.engine import Engine
from engines.pool import Pool
from engines.reward_model import ScoringEngine
from runtime.world import World, raise_on_all

if TYPE_CHECKING:
    from reporting.timeline import Timeline


class ServerSpec(NamedTuple):
    """A server to be started on this rank."""

    role: str
    port: int
    model_dir: str
    model: int = 0  # which of its role's models that is
    scores: bool = False  # whether it is a scalar reward model


class Fleet:
    """`async with` ends what was started, whatever happens. All other methods are collective."""

    def __init__(self, config: Config, world: World):
        self._config, self._world = config, world
        self._engines: list[Engine] = []  # those of this rank; once connected all
        self._pools: dict[str, Pool] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for pool in self._pools.values():
            pool.close()
        await asyncio.gather(*(engine.close() for engine in self._engines))

    async def end_stale(self, say: Callable[[str], None]) -> None:
        """End what an earlier run in the same place left behind (collective). ValueError if it isn't over."""

        async def end() -> None:
            if os.environ["LOCAL_RANK"] == "0":  # one of each machine
                for line in server.end_stale_servers(Path(self._config.out)):
                    say(line)

        await raise_on_all(self._world, end())

    async def launch(self, specs: list[ServerSpec]) -> None:
        """Start this rank's servers, without waiting for them (collective). ValueError if that fails."""
        key = await self._world.broadcast(secrets.token_hex(32))  # rank 0's: what all servers want to see

        async def start() -> None:
            for spec in specs:
                log = Path(self._config.out, "logs", f"{spec.role}-{self._world.rank}.log")
                kind = ScoringEngine if spec.scores else Engine
                where = self._world.rank, spec.port, spec.model_dir
                self._engines.append(kind.launch(spec.role, *where, self._config, log, key, spec.model))

        await raise_on_all(self._world, start())

    async def ready(self) -> None:
        """Wait for every rank's servers (collective). ValueError with the end of a log if one fails."""
        waiting = asyncio.gather(*(engine.ready(self._config.engine_start_s) for engine in self._engines))
        await raise_on_all(self._world, waiting)

    async def connect(self, timeline: Timeline) -> dict[str, Pool]:
        """By role, a handle on every engine of the run (collective)."""
        facts = [(type(e), e.role, e.rank, e.url, e.key, e.model) for e in self._engines]
        for rank, there in enumerate(await self._world.gather(facts)):
            if rank != self._world.rank:
                self._engines += [kind(*arguments) for kind, *arguments in there]
        self._engines.sort(key=lambda engine: engine.rank)
        for role in ("rollout", "genrm"):
            engines = [engine for engine in self._engines if engine.role == role]
            self._pools[role] = Pool(engines, self._world, timeline, self._config)
        return self._pools
