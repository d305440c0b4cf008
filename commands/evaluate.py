"""Greedy accuracy and pass@k: a real engine's answers, read as --judge-format says, against --data's keys."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from math import comb
from pathlib import Path
from statistics import fmean

import data
from config import Config, UserError
from demo.task import Addition
from engines.engine import Answer, Request, Sampling, seed_of
from engines.fleet import Fleet, ServerSpec
from engines.pool import EngineStatus, Pool
from engines.server import context_length
from genrm import formats_of, none_right
from images.reader import ImageReader, reader_of
from reporting.timeline import Timeline
from rollout import Tasks
from runtime.out_folder import archive


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased 1 - C(n - c, k) / C(n, k) if c of n are right. Codex (arXiv 2107.03374), equation 1."""
    return 1 - comb(samples - right, k) / comb(samples, k)


def read_problems(
    config: Config, tokenizer: data.Tokenizer, reader: ImageReader | None = None
) -> list[data.Prompt]:
    """The rows of --data that have an answer key, or the demo's. UserError if there are none."""
    if not config.data:
        encode = partial(data.encode_prompt, tokenizer, reader)
        return Addition(config.seed, encode, reader).held_out
    longest = context_length(config.model, config) - config.max_new_tokens
    how = (config.skip_long, print, reader, formats_of(config)[0].read_key)
    rows = data.PromptFile(Path(config.data), tokenizer, longest, *how)
    if not (problems := [row for row in rows if row.answer_key is not None]):
        raise UserError(f"--data {config.data}: no row has an `answer` to compare with")
    return problems


async def generate(
    config: Config, fleet: Fleet, prompts: list[data.Prompt], sampling: Sampling
) -> list[list[Answer]]:
    """Start an engine. Returns `samples` sampled answers to each prompt, and a greedy one at the end."""
    await fleet.launch([ServerSpec("rollout", config.port, config.model)])
    await fleet.ready()
    pools = await fleet.connect(Timeline(0, asyncio.get_running_loop().time))
    await pools["rollout"].wake()
    return await ask_all(prompts, pools["rollout"], sampling, config)


async def ask_all(
    prompts: list[data.Prompt], pool: Pool, sampling: Sampling, config: Config
) -> list[list[Answer]]:
    """The answers to each prompt. UserError as soon as no engine is left to ask."""
    tasks = Tasks()
    for number, prompt in enumerate(prompts):
        tasks.start(number, ask(number, prompt, pool, sampling, config))
    asked = list(tasks.running.values())
    while tasks.running:
        pool.apply_status(EngineStatus.total([pool.status()]))  # a meeting of one
        await tasks.poll()
    return [task.result() for task in asked]


async def ask(
    number: int, prompt: data.Prompt, pool: Pool, sampling: Sampling, config: Config
) -> list[Answer]:
    greedy = dataclasses.replace(sampling, temperature=0.0)
    images = prompt.images()
    requests = []
    for index, how in enumerate([sampling] * config.samples + [greedy]):
        seed = seed_of(config.seed, "eval", number, index)
        requests.append(Request(prompt.tokens, how, sampling.max_new_tokens, seed, images))
    found = [answer async for answer in pool.generate(requests)]
    return sorted(found, key=lambda answer: answer.index)


async def evaluate(config: Config, fleet: Fleet, say: Callable[[str], None]) -> None:
    """Write OUT/eval.json and OUT/answers.jsonl, say the figures. UserError for what can't be used."""
    tokenizer = data.load_tokenizer(config.model)
    reader = reader_of(config.model)
    problems = read_problems(config, tokenizer, reader)
    answer_of = formats_of(config)[0].answer_of
    stop = data.stop_tokens(config.model, tokenizer, reader, say)
    sampling = Sampling(config.temperature, config.max_new_tokens, stop)
    out = Path(config.out)
    archive(out, say)
    answers = await generate(config, fleet, problems, sampling)
    rows = []
    for problem, of_problem in zip(problems, answers, strict=True):
        texts = [data.decode(tokenizer, answer.tokens) for answer in of_problem]
        finish = [answer.finish for answer in of_problem]
        found = map(answer_of, texts, finish)
        right = [answer == problem.answer_key for answer in found]
        row = {"question": problem.question, "answer": problem.answer_key, "greedy": texts[-1]}
        rows.append(row | {"sampled": texts[:-1], "right": right, "finish": finish})
    figures = {"eval/accuracy": fmean(row["right"][-1] for row in rows)}
    for power in range(config.samples.bit_length()):
        passed = [pass_at_k(config.samples, sum(row["right"][:-1]), 2**power) for row in rows]
        figures[f"eval/pass@{2**power}"] = fmean(passed)
    facts = figures | {"prompts": len(problems), "config": dataclasses.asdict(config)}
    (out / "eval.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in figures.items()]
    counts = f"({len(problems)} prompts, {config.samples} samples each)"
    say(f"{config.model}: {'  '.join(shown)}  {counts}")
    right = [flag for row in rows for flag in row["right"]]
    if not any(right):
        say(none_right(config, len(right), rows[0]["greedy"], rows[0]["answer"]))
    say(f"wrote {out}/")
