"""Fleet: starts and ends this rank's servers, and connects it to every rank's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from config import Config
from engines.engine import Engine, EngineLost
from engines.pool import Pool
from runtime import devices
from runtime.world import World, raise_on_all
from scheduling.measured import ROLES

if TYPE_CHECKING:
    from runtime.timeline import Timeline

OWNER_S = 3.0  # time that a lost engine's owner gets to report the cause


class ServerSpec(NamedTuple):
    """A server to start on this rank."""

    role: str
    port: int
    model_dir: str
    model: int = 0  # index among its role's models
    engine: type[Engine] = Engine
    stride: int = 1  # distance between the engine's ranks, if it has several


class Fleet(contextlib.AbstractAsyncContextManager):
    """A run's servers: `launch`, build trainers, `ready`, `connect`. `async with` ends them."""

    def __init__(self, config: Config, world: World):
        self._config = config
        self._world = world
        self._engines: list[Engine] = []  # this rank's; after `connect` every rank's
        self._engine_bytes = 0.0  # bytes of this rank's GPU that an awake engine takes

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))

    async def launch(self, specs: list[ServerSpec]) -> None:
        """Start this rank's servers (collective: all ranks). Raises UserError if that fails.

        With CUDA, roles start one by one: each sleeps before the next starts and before a trainer is built,
        as an engine takes a fraction of the memory that it finds free. Each role's first server on a machine
        compiles kernels, and the others find them cached. On a CPU all start at once.
        """
        if self._config.device == "cuda":
            self._engine_bytes = self._config.mem_fraction * devices.free_bytes()
        key = await self._world.broadcast(secrets.token_hex(32))
        for role in ROLES:
            of_role = [spec for spec in specs if spec.role == role]
            if self._config.device == "cpu":
                await raise_on_all(self._world, self._start(of_role, key))
            else:
                await self._start_in_turn(of_role, key)

    async def _start_in_turn(self, specs: list[ServerSpec], key: str) -> None:
        """Start each machine's first server, then, once it sleeps, the others (collective: all ranks)."""
        is_first = await self._is_first_here(specs)
        for turn in (is_first, not is_first):
            await raise_on_all(self._world, self._start(specs if turn else [], key))
            await self.ready()

    async def _is_first_here(self, specs: list[ServerSpec]) -> bool:
        """True if no lower rank on this machine has such servers (collective: all ranks)."""
        rank = self._world.rank
        first = rank - int(os.environ["LOCAL_RANK"])
        return not any((await self._world.gather(bool(specs)))[first:rank])

    async def _start(self, specs: list[ServerSpec], key: str) -> None:
        rank = self._world.rank
        for spec in specs:
            log = Path(self._config.out, "logs", f"{spec.role}-{rank}.log")
            served = (spec.role, rank, spec.port, spec.model_dir)
            engine = spec.engine.launch(*served, self._config, log, key, spec.stride)
            engine.model = spec.model
            self._engines.append(engine)

    async def ready(self) -> None:
        """Wait until all started servers sleep (collective: all ranks). Raises UserError with a log's end.

        An engine of several ranks reports that its first one sleeps, so each rank also checks its own GPU.
        """
        limit_s = self._config.engine_start_s
        starting = [engine for engine in self._engines if not engine.capacity]
        asleep = [engine.ready_asleep(limit_s) for engine in starting]
        await raise_on_all(self._world, asyncio.gather(*asleep))
        if self._config.device == "cuda" and self._config.memory_check:
            room = self._world.run(
                devices.wait_for_room, self._engine_bytes, "the next process", limit_s
            )
            await raise_on_all(self._world, room)

    async def connect(self, timeline: Timeline, serving: World | None = None) -> dict[str, Pool]:
        """Return pools by role, with all engines (collective: all ranks). serving: all ranks by default."""
        own = [(type(e), e.role, e.rank, e.url, e.key, e.model, e.capacity) for e in self._engines]
        for rank, there in enumerate(await self._world.gather(own)):
            if rank != self._world.rank:
                self._engines += [kind(*arguments) for kind, *arguments in there]
        self._engines.sort(key=lambda engine: engine.rank)
        pools = {}
        for role in ROLES:
            engines = [engine for engine in self._engines if engine.role == role]
            pools[role] = Pool(engines, serving or self._world, timeline, self._config)
        return pools

    async def while_up(self, work: Coroutine) -> Any:
        """Return the result of `work`. Raises EngineLost as soon as one of this rank's engines is lost."""
        mine = [engine for engine in self._engines if engine.rank == self._world.rank]
        works = [let_owner_speak_first(work), *(engine.watch() for engine in mine)]
        tasks = list(map(asyncio.ensure_future, works))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return done.pop().result()


async def let_owner_speak_first(work: Coroutine) -> Any:
    """Await `work`. If it loses an engine, let the owner, which knows the cause, report it first."""
    try:
        return await work
    except EngineLost:
        await asyncio.sleep(OWNER_S)
        raise
