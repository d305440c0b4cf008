"""Greedy accuracy and pass@k: a real engine's answers, read as --judge-format says, against --data's keys."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from functools import partial
from math import comb
from pathlib import Path
from statistics import fmean

import data
from config import Config, UserError, printable
from engines.engine import Answer, Request, Sampling, seed_of
from engines.fleet import Fleet, ServerSpec
from engines.pool import EngineStatus, Pool
from engines.server import context_length
from genrm import formats_of
from images.reader import ImageReader, reader_of
from recipes.addition.task import Addition
from reporting.timeline import Timeline
from rollout import Tasks
from runtime import rendezvous
from runtime.out_folder import archive, held


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased, 1 - C(n - c, k) / C(n, k) if c of n are right. Codex (arXiv 2107.03374), equation 1."""
    return 1 - comb(samples - right, k) / comb(samples, k)


def read_problems(
    config: Config, tokenizer: data.Tokenizer, reader: ImageReader | None = None
) -> list[data.Prompt]:
    """The rows of --data that have an answer key, or the demo's. UserError if there are none."""
    if not config.data:
        return Addition(
            config.seed, partial(data.encode_prompt, tokenizer, reader), reader
        ).held_out
    longest = context_length(config.model, config) - config.max_new_tokens
    rows = data.PromptFile(Path(config.data), tokenizer, longest, config.skip_long, reader=reader)
    if not (problems := [row for row in rows if row.answer_key is not None]):
        raise UserError(f"--data {config.data}: no row has an `answer` to compare with")
    return problems


async def generate(
    config: Config, prompts: list[data.Prompt], sampling: Sampling
) -> list[list[Answer]]:
    """For each prompt `samples` sampled answers and a greedy one, the last, by an engine started for it."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    world = rendezvous.join(config)
    try:
        async with Fleet(config, world) as fleet:
            await fleet.launch([ServerSpec("rollout", config.port, config.model)])
            await fleet.ready()
            pools = await fleet.connect(Timeline(0, asyncio.get_running_loop().time))
            await pools["rollout"].wake()
            return await ask_all(prompts, pools["rollout"], sampling, config)
    finally:
        world.close()
        rendezvous.close()


async def ask_all(
    prompts: list[data.Prompt], pool: Pool, sampling: Sampling, config: Config
) -> list[list[Answer]]:
    """The answers to each prompt. UserError as soon as no engine is left to ask."""
    asked = [asyncio.create_task(ask(n, p, pool, sampling, config)) for n, p in enumerate(prompts)]
    tasks = Tasks()
    tasks.running |= enumerate(asked)
    while tasks.running:
        pool.apply_status(EngineStatus.total([pool.status()]))  # a meeting of one
        await tasks.poll()
    return [task.result() for task in asked]


async def ask(
    number: int, prompt: data.Prompt, pool: Pool, sampling: Sampling, config: Config
) -> list[Answer]:
    rules = [sampling] * config.samples + [dataclasses.replace(sampling, temperature=0.0)]
    images, limit, requests = prompt.images(), sampling.max_new_tokens, []
    for index, rule in enumerate(rules):
        seed = seed_of(config.seed, "eval", number, index)
        requests.append(Request(prompt.tokens, rule, limit, seed, images))
    found = [answer async for answer in pool.generate(requests)]
    return sorted(found, key=lambda answer: answer.index)


async def run(config: Config) -> str:
    """Evaluate alone in OUT. UserError for what can't be used."""
    from training import model

    model.check_models(config)
    async with held(Path(config.out), print):
        await evaluate(config)
    return ""


async def evaluate(config: Config) -> None:
    """Write OUT/eval.json and OUT/answers.jsonl, print the figures. UserError for what can't be used."""
    tokenizer, reader = data.load_tokenizer(config.model), reader_of(config.model)
    problems = read_problems(config, tokenizer, reader)
    answer_of = formats_of(config)[0].answer_of
    stop = data.stop_tokens(config.model, tokenizer, reader, print)
    sampling = Sampling(config.temperature, config.max_new_tokens, stop)
    archive(Path(config.out), print)
    out, rows = Path(config.out), []
    answers = await generate(config, problems, sampling)
    for problem, row in zip(problems, answers, strict=True):
        texts = [data.decode(tokenizer, answer.tokens) for answer in row]
        right = [
            answer_of(t, a.finish) == problem.answer_key for t, a in zip(texts, row, strict=True)
        ]
        asked = {"question": problem.question, "answer": problem.answer_key}
        # the greedy one's is last
        ends = {"right": right, "finish": [answer.finish for answer in row]}
        rows.append(asked | {"greedy": texts[-1], "sampled": texts[:-1]} | ends)
    figures = {"eval/accuracy": fmean(row["right"][-1] for row in rows)}
    for k in (2**n for n in range(config.samples.bit_length())):
        passed = (pass_at_k(config.samples, sum(row["right"][:-1]), k) for row in rows)
        figures[f"eval/pass@{k}"] = fmean(passed)
    facts = figures | {"prompts": len(problems), "config": dataclasses.asdict(config)}
    (out / "eval.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = "  ".join(
        f"{name.removeprefix('eval/')} {value:.3f}" for name, value in figures.items()
    )
    print(
        printable(
            f"{config.model}: {shown}  ({len(problems)} prompts, {config.samples} samples each)"
        )
    )
    print(f"wrote {out}/", flush=True)
