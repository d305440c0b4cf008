"""Greedy accuracy and pass@k: a real engine's answers, read as --judge-format says, against --data's keys."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import data
from checkpoint import FREE, NAMED, contents_of
from config import Config
from demo.task import Addition
from engines.engine import Answer, Request, Sampling, seed_of
from engines.fleet import Fleet, ServerSpec
from engines.pool import EngineStatus, Pool
from engines.server import context_length
from genrm import formats_of, none_right
from images.reader import ImageReader, reader_of
from reporting.metrics import pass_at_k
from reporting.progress import Progress
from reporting.timeline import Timeline
from rollout import Tasks
from runtime.atomic_files import append, complete_rows, keep_rows
from runtime.out_folder import archive
from runtime.shutdown import Stop


def read_problems(
    config: Config, tokenizer: data.Tokenizer, reader: ImageReader | None = None
) -> list[data.Prompt]:
    """The rows of --data, or the demo's. UserError for one without an answer key."""
    if not config.data:
        encode = partial(data.encode_prompt, tokenizer, reader)
        return Addition(config.seed, encode, reader).held_out
    longest = context_length(config.model, config) - config.max_new_tokens
    how = (print, reader, formats_of(config)[0].read_key, {"run.py eval": str})
    return list(data.PromptFile(Path(config.data), tokenizer, longest, *how))


async def ask(
    number: int, prompt: data.Prompt, pool: Pool, sampling: Sampling, config: Config
) -> list[Answer]:
    """Return `samples` sampled answers to a prompt, and a greedy one at the end."""
    greedy = dataclasses.replace(sampling, temperature=0.0)
    images = prompt.images()
    requests = []
    for index, how in enumerate([sampling] * config.samples + [greedy]):
        seed = seed_of(config.seed, "eval", number, index)
        requests.append(Request(prompt.tokens, how, sampling.max_new_tokens, seed, images))
    found = [answer async for answer in pool.generate(requests)]
    return sorted(found, key=lambda answer: answer.index)


async def evaluate(config: Config, fleet: Fleet, progress: Progress, stop: Stop) -> str:
    """Write OUT/answers.jsonl, then OUT/eval.json. Returns how far it came if it is stopped. UserErrors."""
    [tokenizer] = data.load_tokenizers(config, progress.line)
    reader = reader_of(config.model)
    problems = read_problems(config, tokenizer, reader)
    stop_tokens = data.stop_tokens(config.model, tokenizer, reader, progress.line)
    sampling = Sampling(config.temperature, config.max_new_tokens, stop_tokens)
    rows = begin(config, progress.line)  # by the problem's number
    if rows:
        progress.line(f"goes on after {len(rows)} of {len(problems)} prompts")
    progress.doing("starting an engine")
    await fleet.launch([ServerSpec("rollout", config.port, config.model)])
    await fleet.ready()
    pools = await fleet.connect(Timeline(0, asyncio.get_running_loop().time))
    pool = pools["rollout"]
    await pool.wake()
    stop.graceful = True
    progress.resume_at(len(rows), len(problems))

    async def answer(number: int, problem: data.Prompt) -> None:
        answers = await ask(number, problem, pool, sampling, config)
        texts = [data.decode(tokenizer, answer.tokens) for answer in answers]
        row = row_of(problem, texts, [answer.finish for answer in answers], config)
        rows[number] = {"prompt": number} | row
        append(Path(config.out, "answers.jsonl"), [rows[number]])
        progress.done()

    async with Tasks() as tasks:
        for number, problem in enumerate(problems):
            if number not in rows:
                tasks.start(number, answer(number, problem))
        rate = await fleet.while_up(wait_for_answers(tasks, pool, stop, progress))
    if len(rows) < len(problems):
        return f"stopped after {len(rows)} of {len(problems)} prompts"
    finish(config, list(rows.values()), rate, progress.line)
    return ""


async def wait_for_answers(tasks: Tasks, pool: Pool, stop: Stop, progress: Progress) -> float:
    """Wait for all, or for a stop. Returns the tokens a second."""
    clock = asyncio.get_running_loop().time
    tokens = rate = 0
    while tasks.running and not stop.asked:
        pool.apply_status(EngineStatus.total([pool.status()]))  # a meeting of one
        await tasks.poll()
        tokens += pool.pop_stats().tokens
        rate = tokens / (clock() - pool.woke_at)
        progress.doing(f"{rate:.0f} tokens/s")
    return rate


def begin(config: Config, say: Callable[[str], None]) -> dict[int, dict]:
    """Return the rows of an unfinished evaluation of the same. Anything else in OUT is moved aside."""
    settings = {name: vars(config)[name] for name in vars(config).keys() - {*FREE, *NAMED}}
    same = json.dumps([settings, contents_of(config)], sort_keys=True)
    begun = Path(config.out, "eval_begun.json")
    if not begun.exists() or begun.read_text() != same:
        archive(begun.parent, say)
        begun.write_text(same)
    keep_rows(begun.with_name("answers.jsonl"), lambda row: True)  # but one that was cut short
    return {row["prompt"]: row for row in complete_rows(begun.with_name("answers.jsonl"))}


def row_of(problem: data.Prompt, texts: list[str], finish: list[str], config: Config) -> dict:
    """Tell which answers are right, the greedy one last, in a row of OUT/answers.jsonl."""
    answer_of = formats_of(config)[0].answer_of
    found = map(answer_of, texts, finish)
    right = [answer == problem.answer_key for answer in found]
    row = {"question": problem.question, "answer": problem.answer_key, "greedy": texts[-1]}
    return row | {"sampled": texts[:-1], "right": right, "finish": finish}


def finish(config: Config, rows: list[dict], rate: float, say: Callable[[str], None]) -> None:
    """Write the figures to OUT/eval.json and say them. rate: tokens a second."""
    figures = {"eval/accuracy": fmean(row["right"][-1] for row in rows)}
    figures |= pass_at_k(config.samples, [sum(row["right"][:-1]) for row in rows])
    shown = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in figures.items()]
    figures["eval/truncated_frac"] = fmean(row["finish"].count("length") for row in rows)
    figures["eval/truncated_frac"] /= config.samples + 1
    figures["eval/tokens_per_s"] = rate
    facts = figures | {"prompts": len(rows), "config": dataclasses.asdict(config)}
    Path(config.out, "eval.json").write_text(json.dumps(facts, indent=1) + "\n")
    Path(config.out, "eval_begun.json").unlink()  # the same command begins anew
    counts = f"({len(rows)} prompts, {config.samples} samples each, {rate:.0f} tokens/s)"
    say(f"{config.model}: {'  '.join(shown)}  {counts}")
    right = [flag for row in rows for flag in row["right"]]
    if not any(right):
        say(none_right(config, len(right), rows[0]["greedy"], rows[0]["answer"]))
    say(f"wrote {config.out}/")
