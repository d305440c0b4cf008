"""A warm start: the policy learns from good answers, before it learns from rewards (SFT).

    torchrun --nproc-per-node 2 examples/sft.py --model DIR --data FILE

A row of FILE has `messages`, or a `prompt` and its `response` or `completion`; only the last turn, the
assistant's, is learned. There is no engine and no controller: all ranks read the file and plan the same. A
signal or --time-limit-s ends the run after a step; OUT/hf then has that step's weights.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import build
import run
from actor import Actor, learning_rate
from config import HELD_OUT, Config, parse_settings, setting
from controller import MAX_SKIPS
from demo.task import example_rows
from engines.server import engine_context
from inputs import tokenization
from inputs.rows import PLACES, as_turns, read_conversation, read_rows
from inputs.shuffled import Shuffled, identities
from placement import make_placement
from reporting.metrics import MetricsWriter
from runtime import shutdown
from runtime.devices import choose_device
from runtime.errors import UserError
from runtime.hooks import added
from runtime.out_folder import archive
from runtime.world import raise_on_all
from scheduling.layout import Placement
from training.packing import Packed, Sequence

# groups of settings that are flags
GROUPS = ("run", "data", "training", "pipelines", "memory", "lora", "examples")
DEFAULTS = dict(command="sft", lr=1e-5, lr_decay_to=0.1)


@dataclass(frozen=True)
class SftConfig(Config):
    """The settings: some of run.py's, and three of its own."""

    steps: int = setting(40, "batches to train on", "training", low=1)
    batch_size: int = setting(32, "examples per step", "examples", low=1)
    time_limit_s: float = setting(0.0, "end after the step that reaches it; 0: none", "examples")


def read_examples(config: SftConfig, say: Callable) -> tuple[Shuffled, tuple[int, ...]]:
    """Return the examples, some held out, and the policy's end tokens. Raises UserError for a bad row."""
    [tokenizer] = tokenization.load_tokenizers(config, say)
    rows = read_rows(Path(config.data)) if config.data else enumerate(example_rows(config.seed), 1)
    longest = engine_context(config.model, replace(config, max_model_len=0))  # the model's own
    prompts = []
    examples = []
    for line, row in rows:
        where = f"{config.data}:{line}"
        for name in filter(row.get, PLACES):
            raise UserError(f"{where}: it has {name}, but sft learns only from texts")
        prompt, answer = read_conversation(row, where)
        last = as_turns(answer, "assistant")[-1]["content"]
        tokenization.check_prompt(tokenizer, prompt, where)
        tokenization.check_end(tokenizer, last.rstrip(), where, "answer")
        pair = tokenization.encode_pair(tokenizer, prompt, answer, where)
        if (tokens := sum(map(len, pair))) > config.max_tokens_per_micro_batch:
            raise UserError(f"{where}: {tokens} tokens exceed --max-tokens-per-micro-batch")
        if tokens > longest:
            raise UserError(f"{where}: {tokens} tokens, but {config.model} reads {longest}")
        prompts.append(prompt)
        examples.append(Sequence(*pair))
    order = Shuffled(examples, config.seed, HELD_OUT, prompts=identities(prompts))
    aside = len(order.held_out)
    say(f"sft: {order.count} examples, {aside} more held out, {order.repeats} repeat a prompt")
    return order, tokenization.stop_tokens(config.model, tokenizer, say=say)


def packed(actor: Actor, examples: list[Sequence]) -> Packed:
    """Return this rank's micro-batches."""
    mine = examples[actor.dp_rank :: actor.dp_size]
    return [[mine[number] for number in numbers] for numbers in actor.pack(mine)]


def learn(actor: Actor, examples: list[Sequence]) -> dict[str, float]:
    """Learn a batch; return its metrics from before the update (collective: all ranks)."""
    lr = learning_rate(actor.version, actor.config)
    stats = actor.run_step(packed(actor, examples), actor.cross_entropy_loss, (), lr)
    actor.version += 1
    kept = {name: stats[name] for name in ("grad_norm", "skipped")}
    return kept | {"loss": stats["loss"] / stats["divisor"], "lr": lr}


def measure(actor: Actor, examples: list[Sequence]) -> float:
    """Return the examples' loss without learning them (collective: all ranks)."""
    stats = actor.measure(packed(actor, examples), actor.cross_entropy_loss, ())
    return stats["loss"] / stats["divisor"]


async def train(config: SftConfig, placement: Placement, stop: shutdown.Stop) -> str:
    """Train; leave metrics and a Hugging Face directory in --out (collective: all ranks)."""
    end = time.monotonic() + (config.time_limit_s or math.inf)
    async with run.joined(config) as (world, progress):
        await raise_on_all(world, world.run(build.check_directories, config, placement))
        order, stop_tokens = await world.run(read_examples, config, progress.line)
        for check in added("run_check"):
            config = await check(config, placement, [], world)
        actor = await world.run(Actor, config, config.model)
        actor.stop_tokens = stop_tokens
        if world.rank == 0:
            archive(Path(config.out), progress.line, vars(config))
            writer = MetricsWriter(Path(config.out))
        held_out = [order.rows[number] for number in order.held_out]
        await stop.until_all_are_ready(world)
        skips = 0
        for step in range(config.steps + 1):
            row = {}
            if held_out and (step % config.eval_every == 0 or step == config.steps):
                row["sft/held_out_loss"] = loss = await world.run(measure, actor, held_out)
                progress.line(f"after {step:3d} steps: loss {loss:.4f} on held-out examples")
            if step < config.steps:
                numbers = range(step * config.batch_size, (step + 1) * config.batch_size)
                metrics = await world.run(learn, actor, [*map(order.training, numbers)])
                row |= {f"sft/{name}": value for name, value in metrics.items()}
                progress.line(f"step {step + 1:3d}/{config.steps}  loss {metrics['loss']:.4f}")
                progress.done()
                skips = skips + 1 if metrics["skipped"] else 0
            if world.rank == 0:
                writer.write(step, row)
            if skips == MAX_SKIPS:
                raise UserError(f"the loss or gradient of {skips} updates in a row wasn't finite")
            if any(await world.gather(bool(stop.asked) or time.monotonic() >= end)):
                break
        await world.run(actor.export, f"{config.out}/hf")
        await world.barrier()
        stop.neighbours = {}  # from here on other ranks may exit
        return f"{config.out}/hf has the weights after {actor.version} of {config.steps} steps"


def start(arguments: list[str], stop: shutdown.Stop) -> str:
    """Run the command line, as run.start does."""
    config = parse_settings(SftConfig, arguments, __doc__, GROUPS, DEFAULTS)
    placement = make_placement(config, build.launched("WORLD_SIZE") or 2)
    run.check_launcher("examples/sft.py ...")
    choose_device(config)
    return shutdown.run(train(config, placement, stop), stop)


if __name__ == "__main__":
    run.main(sys.argv[1:], start)
