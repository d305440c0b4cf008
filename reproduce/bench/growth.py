"""How this project's own Python grows with its work: CPU-seconds, memory, and the exponents of both.

    python reproduce/bench/growth.py                 a table, in about two minutes
    python reproduce/bench/growth.py --doublings 4   sizes up to 16 times the smallest instead of 64 times

Each sweep doubles one size. It calls the product's functions on made-up samples, without engines and models;
passes of models grow with attention, and engines with theirs. Each size runs in a process of its own. The
exponent is the slope over the largest four sizes: 1 is linear. Memory is the peak above the start.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from math import log
from pathlib import Path
from statistics import linear_regression, median

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from actor import pack_targets
from algorithms import algorithm_of, set_advantages
from config import DEMO_MODELS, Config
from engines.engine import read_part
from inputs import tokenization
from inputs.prompt_file import PromptFile
from reproduce.bench.measuring import parser_of, peak_rss_mb, print_table
from runtime import rendezvous
from sample import Outcome, Sample
from scheduling.balance import Prefix
from scheduling.dealing import Shares, Sizes, deal
from scheduling.layout import Shape
from training.packing import make_micro_batches
from training.trainer import as_sequences

CONFIG = Config(rule=("right",), max_tokens_per_micro_batch=16384)
ALGORITHM = algorithm_of(CONFIG)
PROMPT = 40  # tokens
REPEATS = 3
PART = 32  # tokens of an event of an answer's stream


def made(prompts: int, answers: int, length: int) -> list[Sample]:
    """Make groups of answers of random tokens, with rewards of 0 and 1."""
    rng = random.Random(0)
    samples = []
    for prompt_id in range(prompts):
        prompt = rng.choices(range(30_000), k=PROMPT)
        outcomes = [Outcome(i, length, float(i % 2), None, False) for i in range(answers)]
        for index in range(answers):
            response = rng.choices(range(30_000), k=length)
            sample = Sample(prompt_id, index, prompt, response=response, outcomes=outcomes)
            sample.logprobs = [-1.0] * length
            sample.versions = [0] * length
            samples.append(sample)
    return samples


def learned(samples: list[Sample], ranks: int = 2) -> None:
    """Do what one rank does with a step's samples up to the model's passes."""
    shape = Shape(tuple(range(ranks)))

    def prefix_of(prompt: list[int]) -> Prefix:
        return Prefix(len(prompt) - 1, len(prompt) - 1)

    sizes = []
    for rank in range(ranks):
        own = [sample for sample in samples if sample.prompt_id % ranks == rank]
        sizes.append(Sizes.of(own, prefix_of, has_costs=False))
    _, deals = deal(sizes, [shape], lambda tokens: tokens, CONFIG)
    shares = Shares(deals, {sample.key: sample for sample in samples}, [])
    [micro_batches] = [
        [[shares.samples[key] for key in keys] for keys in mini_batch]
        for mini_batch in deals[shape].plan[0]
    ]
    mine = [sample for micro_batch in micro_batches for sample in micro_batch]
    set_advantages(mine, ALGORITHM)
    make_micro_batches(as_sequences(micro_batches), 1)
    pack_targets(mine, 1, {}, ALGORITHM, torch.device("cpu"))


def streamed(length: int) -> None:
    """Read answers of this length as an engine streams them."""
    for _ in range(8):
        parts = []
        for written in range(0, length, PART):
            rows = [[-1.0, 7, None]] * PART
            info = {"completion_tokens": written + PART, "output_token_logprobs": rows}
            info |= {"weight_version": "0", "finish_reason": None}
            event = json.loads(json.dumps({"index": 0, "meta_info": info}))
            parts.append(read_part(event, written))
        parts[0].extended(*parts[1:])


def read(rows: int) -> None:
    """Read and check a file of prompts, and hold some out."""
    tokenizer = tokenization.load_tokenizer(str(DEMO_MODELS / "written" / "actor"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        with path.open("w") as file:
            for number in range(rows):
                file.write(json.dumps({"prompt": f"{number}+{number}=", "answer": 2 * number}))
                file.write("\n")
        PromptFile(path, tokenizer, 256, lambda text: None).shuffled(0, 200)
    rendezvous.close()


# what is swept -> (smallest size, what is made before the clock starts, what is timed)
SWEEPS: dict[str, tuple[int, Callable, Callable]] = {
    "prompts of a step, 8 answers of 64": (8, lambda n: made(n, 8, 64), learned),
    "answers of a prompt, 4 prompts, 64 tokens": (8, lambda n: made(4, n, 64), learned),
    "tokens of an answer, 32 answers": (64, lambda n: made(4, 8, n), learned),
    "ranks, 16 samples each of 64 tokens": (
        2,
        lambda n: (made(2 * n, 8, 64), n),
        lambda given: learned(*given),
    ),
    "tokens of a streamed answer": (256, lambda n: n, streamed),
    "rows of --data": (1000, lambda n: n, read),
}


def measure(name: str, size: int) -> tuple[float, float]:
    """Return CPU-seconds and the peak of memory, in MB."""
    smallest, made_of, timed = SWEEPS[name]
    timed(made_of(smallest))  # imports
    gc.freeze()  # as in a run
    given = made_of(size)
    own = multiprocessing.current_process().pid
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before_mb = peak_rss_mb(own)
    started = time.process_time()
    timed(given)
    return time.process_time() - started, peak_rss_mb(own) - before_mb


def slope(sizes: list[int], values: list[float]) -> float:
    """Return the exponent of growth over the largest four sizes."""
    logs = [(log(size), log(max(value, 1e-6))) for size, value in zip(sizes, values, strict=True)]
    return linear_regression(*zip(*logs[-4:], strict=True)).slope


def main() -> None:
    doublings = parser_of(__doc__, doublings=6).parse_args().doublings
    torch.set_num_threads(1)
    forked = multiprocessing.get_context("fork")
    rows = []
    for name, (smallest, _, _) in SWEEPS.items():
        sizes = [smallest << doubling for doubling in range(doublings + 1)]
        seconds = []
        megabytes = []
        for size in sizes:
            with forked.Pool(1, maxtasksperchild=1) as pool:
                runs = [pool.apply(measure, (name, size)) for _ in range(REPEATS)]
            for column, values in zip((seconds, megabytes), zip(*runs, strict=True), strict=True):
                column.append(median(values))
        figures = (f"{seconds[-1]:.3f}", f"{slope(sizes, seconds):.2f}", f"{megabytes[-1]:.0f}")
        memory = f"{slope(sizes, megabytes):.2f}" if megabytes[-1] > 10 else ""
        rows.append([name, f"{sizes[0]:,} to {sizes[-1]:,}", *figures, memory])
        print(name, [f"{spent:.4f}" for spent in seconds], file=sys.stderr, flush=True)
    print_table(["swept", "sizes", "CPU-s", "exponent", "MB", "exponent"], rows)


if __name__ == "__main__":
    main()
