"""An engine's decode speed with a fixed number of concurrent answers of a fixed length, and no other load.

    python reproduce/bench/decode.py                                         the demo's model
    python reproduce/bench/decode.py --model DIR --at-once 1024 --tokens 2048 --tp 1 --out RUN

Prompts have 4 tokens. `begin` and `end` are the first and the last eighth of each answer, but at least one of
the 32-token parts that engines report. reproduce/papers/own_runs.py reads RUN/decode.json.
"""

import asyncio
import json
import os
import secrets
import sys
from argparse import Namespace
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import extras
from config import DEMO_MODELS, WITH_CUDA, Config
from engines.engine import Answer, Engine, Request, Sampling
from engines.server import SPARE
from reproduce.bench.measuring import parser_of, print_table
from runtime.devices import choose_device, default_device

PROMPT = 4  # tokens


async def written(given: Namespace, config: Config) -> list[Answer]:
    """Return all parts of all answers of an engine, in the order of arrival."""
    key = secrets.token_hex(32)
    log = given.out / "logs" / "rollout-0.log"
    engine = Engine.launch("rollout", 0, config.port, config.model, config, log, key)
    sampling = Sampling(1.0, given.tokens, ignore_eos=True)
    requests = []
    for number in range(given.at_once):
        prompt = [1 + number % 7, 1 + number // 7 % 7, 1, 1]
        requests.append(Request(prompt, sampling, given.tokens, seed=number))
    first = [request._replace(limit=2) for request in requests]  # compiles kernels of this size
    try:
        await engine.ready(config.engine_start_s)
        async for _ in engine.generate(first):
            pass
        return [part async for part in engine.generate(requests)]
    finally:
        await engine.close()


def paces(parts: list[Answer]) -> dict[str, float]:
    """Return tokens per second over all answers, not counting their first parts."""
    by_answer = defaultdict(list)
    for part in parts:
        by_answer[part.index].append(part)
    total = Counter()
    for own in by_answer.values():
        count = [*accumulate(len(part.tokens) for part in own)]
        eighth = (count[-1] - count[0]) / 8
        last = len(own) - 1
        begun = bisect_left(count, count[0] + eighth)
        ends = bisect_right(count, count[-1] - eighth) - 1
        for name, i, k in (("begin", 0, begun), ("end", ends, last), ("in all", 0, last)):
            total[name] += (count[k] - count[i]) / (own[k].end - own[i].end)
    return dict(total)


def parse(arguments: list[str]) -> Namespace:
    parser = parser_of(__doc__, at_once=16, tokens=128, tp=1, port=30000)
    parser.add_argument("--model", default=str(DEMO_MODELS / "written" / "actor"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench/decode"))
    given = parser.parse_args(arguments)
    if given.tokens < 64:
        parser.error("--tokens must be at least 64: two parts of an answer")
    return given


def main(given: Namespace) -> None:
    device = default_device()
    sizes = dict(max_running_requests=given.at_once, max_model_len=PROMPT + given.tokens + SPARE)
    settings = WITH_CUDA | sizes if device == "cuda" else sizes
    settings |= dict(max_new_tokens=given.tokens, rollout_tp=given.tp, port=given.port)
    config = Config(steps=0, model=given.model, device=device, **settings)
    os.environ.setdefault("LOCAL_RANK", "0")
    extras.load()  # adds the rows of a GPU
    choose_device(config)
    (given.out / "logs").mkdir(parents=True, exist_ok=True)
    found = paces(asyncio.run(written(given, config)))
    rows = [[name, f"{pace:,.0f}", f"{given.at_once / pace:.4f}"] for name, pace in found.items()]
    print_table(["", "tokens/s", "s a decode step"], rows)
    run = f"{Path(given.model).name} on {given.tp} x {device}, {given.at_once} answers at once"
    kept = {"fastest": found["begin"], "slowest": found["end"], "run": run}
    (given.out / "decode.json").write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
