"""What a checkpoint costs: the stall of a save that is written by forked processes, beside the same save done
synchronously, in turns.

    python bench/checkpoint.py [--ranks 2] [--repeats 3] [--layers 16] [--hidden 1024]

Both make the same files with the same checks: shards, JSON, SHA-256 of every file, fsync, rename. The model
is a random Qwen3 whose AdamW state (float32) is real: one update has been made. While a forked writer writes,
its memory is sampled: USS is what it alone holds, PSS counts what it shares with its rank by halves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from launch import TORCHRUN, end_with_us, run_to_its_end

SAMPLE_S = 0.1  # between two looks at the writers' memory
GIB = 2**30


class InTheRank:
    """A writer that is no process of its own: the rank waits for it."""

    def __init__(self, work):
        self._result = (work(), "")

    def result(self):
        return self._result

    def close(self) -> None:
        pass


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """A random Qwen3 directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = hidden // 64
    shape = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=64)
    config = Qwen3Config(**shape, intermediate_size=3 * hidden, vocab_size=32768, tie_word_embeddings=True, max_position_embeddings=512)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def job_of(config, world, actor):
    """As much of a Job as a checkpoint looks at."""
    import placement
    from controller import State
    from data import Addition, Prompts
    from reporting.timeline import Timeline
    from scheduling.dynamic_sampling import Groups

    prompts, plans = Prompts(Addition(0, lambda text: [1])), placement.full_colocation(world.size, 1, 1)
    timeline = Timeline(world.rank, asyncio.get_running_loop().time)
    parts = dict(config=config, world=world, actor=actor, critics=[], plans=plans, plan=plans[0])
    parts |= dict(prompts=prompts, groups=Groups(prompts, 1, True))
    judge, report = SimpleNamespace(failed=[0], parsed=[0]), SimpleNamespace(note=print)
    return SimpleNamespace(**parts, judge=judge, report=report, timeline=timeline, state=State())


def held() -> tuple[float, float]:
    """GiB that this rank's writers hold alone (USS), and their share of all that they hold (PSS)."""
    uss = pss = 0.0
    for process in psutil.Process().children():
        try:
            memory = process.memory_full_info()
        except psutil.Error:  # it has just ended
            continue
        uss, pss = uss + memory.uss / GIB, pss + memory.pss / GIB
    return uss, pss


async def one_save(checkpoints, job) -> dict[str, float]:
    """Save the job's next step: seconds until the rank may go on, and until the checkpoint is complete."""
    clock, job.state.step = asyncio.get_running_loop().time, job.state.step + 1
    start, memory = clock(), [(0.0, 0.0)]
    await checkpoints.save(job)
    stall = clock() - start
    while checkpoints.newest != job.state.step:
        memory.append(held())
        await asyncio.sleep(SAMPLE_S)
        await checkpoints.finish(job)
    peaks = await job.world.gather([max(column) for column in zip(*memory, strict=True)])
    uss, pss = (sum(column) for column in zip(*peaks, strict=True))
    return {"stall": stall, "total": clock() - start, "uss": uss, "pss": pss}


async def measure(given, folder: Path) -> list[dict]:
    """Both kinds of save, in turns (collective)."""
    from actor import Actor
    from checkpoint import Checkpoints
    from config import Config
    from runtime import rendezvous
    from runtime.background_writer import BackgroundWriter

    config = Config(save_every=1, keep=1, steps=10**6, updates_per_step=1)
    world = rendezvous.join(config)
    actor = Actor(config, str(folder / "model"))
    actor.supervised([([1] * 8, [2] * 8)], 1e-4)
    job, rows = job_of(config, world, actor), []
    for repeat in range(given.repeats + 1):
        for name, writer in (("forked", BackgroundWriter), ("synchronous", InTheRank)):
            row = await one_save(Checkpoints(config, world, folder, writer=writer), job)
            if repeat:  # the first is a warm-up: modules are imported, memory is found
                rows.append({"name": name} | row)
    world.close()
    return rows


def report(rows: list[dict], folder: Path) -> None:
    """The table, of rank 0."""
    newest = max((folder / "checkpoints").glob("step_*"))
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    print(f"checkpoint of {size / GIB:.2f} GiB")
    print("| save | the run waits, s | complete after, s | writers' peak USS, GiB | PSS, GiB |\n|---|---|---|---|---|")
    middle = {}
    for name in ("forked", "synchronous"):
        columns = {key: [row[key] for row in rows if row["name"] == name] for key in ("stall", "total", "uss", "pss")}
        middle[name] = median(columns["total" if name == "synchronous" else "stall"])
        cells = " | ".join(f"{median(columns[key]):.2f} ({min(columns[key]):.2f}-{max(columns[key]):.2f})" for key in columns)
        print(f"| {name} | {cells} |")
    print(f"stall: {middle['forked'] / middle['synchronous']:.1%} of the synchronous save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("repeats", 3), ("layers", 16), ("hidden", 1024), ("port", 29090)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    given = parser.parse_args()
    if "RANK" in os.environ:
        rows = asyncio.run(measure(given, given.folder))
        if os.environ["RANK"] == "0":
            (given.folder / "rows.json").write_text(json.dumps(rows))
        return
    end_with_us()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=given.folder))
    try:
        make_model(folder / "model", given.layers, given.hidden)
        command = [TORCHRUN, "--nproc-per-node", given.ranks, "--master-port", given.port, __file__, "--folder", folder]
        run_to_its_end([*command, "--repeats", given.repeats], log=folder / "log")
        report(json.loads((folder / "rows.json").read_text()), folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
