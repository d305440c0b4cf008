"""The cost of a checkpoint: how long a save in forked processes and a synchronous one stall the run.

    python reproduce/bench/checkpoint.py [--ranks 2] [--repeats 3] [--layers 16] [--hidden 1024]

The two alternate and write the same files with the same checks: shards, JSON, SHA-256 of every file, fsync,
rename. The model is a random Qwen3 after one update, so its AdamW state (float32) is real.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.bench.measuring import column, parser_of, print_table, run_ranks, spread

if TYPE_CHECKING:  # Megatron takes seconds to import, and the launcher needs none of it
    from actor import Actor
    from config import Config
    from runtime.world import World

LOOK_S = 0.1  # seconds between checks whether a checkpoint is complete
GIB = 2**30
KINDS = ("forked", "synchronous")
FIGURES = {"stall": "the run waits, s", "total": "complete after, s"}


class InTheRank:
    """A writer that runs in the rank's own process, so the rank waits for it."""

    def __init__(self, work: Callable[[], Any]):
        self._result = (work(), "")

    def result(self) -> tuple[Any, str]:
        return self._result

    def close(self) -> None:
        pass


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Write a random Qwen3 directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = dict(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers)
    heads = dict(num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64)
    texts = dict(vocab_size=32768, tie_word_embeddings=True, max_position_embeddings=512)
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **texts)).save_pretrained(folder)


def controller_of(config: Config, world: World, actor: Actor) -> SimpleNamespace:
    """Make a stand-in with the parts of a Controller that a checkpoint reads."""
    from data import Prompts
    from demo.task import Addition
    from modes import full_colocation
    from placement import colocate
    from runtime.timeline import Timeline
    from state import State

    (split,) = full_colocation(colocate(tuple(range(world.size)), config), config)
    nobody_else = {"critics": [], "give_device_to": AsyncMock()}
    return SimpleNamespace(
        config=config,
        world=world,
        ahead=None,
        devices=SimpleNamespace(actor=actor, next=split, **nobody_else),
        prompts=Prompts(Addition(0, lambda *text: [1]), 1),
        rewards=SimpleNamespace(counts=lambda: ([0], [0])),
        report=SimpleNamespace(note=print),
        timeline=Timeline(world.rank, asyncio.get_running_loop().time),
        state=State(),
    )


async def one_save(c: SimpleNamespace) -> dict[str, float]:
    """Save the next step. Return seconds until the rank may continue and until the checkpoint is complete."""
    clock = asyncio.get_running_loop().time
    c.state.step += 1
    start = clock()
    await c.checkpoints.save(c)
    stall = clock() - start
    while c.checkpoints.newest != c.state.step:
        await asyncio.sleep(LOOK_S)
        await c.checkpoints.finish(c)
    return {"stall": stall, "total": clock() - start}


async def measure(given: Namespace, folder: Path) -> list[dict]:
    """Alternate the two kinds of save; return a row per save (collective: all ranks)."""
    from actor import Actor
    from checkpoint import Checkpoints
    from config import Config
    from runtime import rendezvous
    from runtime.background_writer import BackgroundWriter

    config = Config(save_every=1, keep=1, steps=10**6)
    world = rendezvous.join(config)
    actor = Actor(config, str(folder / "model"))
    actor.run_step([[([1] * 8, [2] * 8)]], actor.cross_entropy_loss, (), 1e-4)
    c = controller_of(config, world, actor)
    rows = []
    for repeat in range(given.repeats + 1):
        for name, start in zip(KINDS, (BackgroundWriter, InTheRank), strict=True):
            c.checkpoints = Checkpoints(config, world, folder, {}, start_writer=start)
            row = await one_save(c)
            if repeat:  # the first is a warm-up: it imports modules and allocates memory
                rows.append({"name": name} | row)
    await world.barrier()
    world.close()
    rendezvous.close()
    return rows


def report(rows: list[dict], folder: Path) -> None:
    """Print rank 0's table."""
    (newest,) = (folder / "checkpoints").glob("step_*")
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    print(f"checkpoint of {size / GIB:.2f} GiB")
    table = []
    for name in KINDS:
        runs = [row for row in rows if row["name"] == name]
        table.append([name, *(spread(column(runs, key)) for key in FIGURES)])
    print_table(["save", *FIGURES.values()], table)


def main() -> None:
    parser = parser_of(__doc__, ranks=2, repeats=3, layers=16, hidden=1024)
    parser.add_argument("--folder", type=Path, help="write here; default: a temporary folder")
    given = parser.parse_args()
    if "RANK" in os.environ:
        rows = asyncio.run(measure(given, given.folder))
        if os.environ["RANK"] == "0":
            (given.folder / "rows.json").write_text(json.dumps(rows))
        return
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=given.folder))
    try:
        make_model(folder / "model", given.layers, given.hidden)
        words = [__file__, "--folder", folder, "--repeats", given.repeats]
        run_ranks(given.ranks, words, folder / "log")
        report(json.loads((folder / "rows.json").read_text()), folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
