"""How good a model is: greedy accuracy and pass@k, by answers of a real engine that are compared with the answer key.

    python run.py eval --model DIR --data problems.jsonl --samples 8 --pass-at 1 4 8

Rows are those of --data in training, each with its `answer`; without --data the addition task's held-out problems. Which part of a
response is its answer is said by --judge-format (genrm.FORMATS); no judge is asked. No training code is loaded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from pathlib import Path
from statistics import fmean

import data
import genrm
import resume
from config import printable
from engines.engine import Answer, Engine, Sampling, seed_of
from engines.server import EngineLost
from runtime import shutdown


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k answers is right, drawn without putting back from `samples`, of which `right` are.

    1 - C(n - c, k) / C(n, k) as a product, the unbiased estimate of pass@k. Source: Codex (arXiv 2107.03374), section 2.1, equation 1.
    """
    assert 0 <= right <= samples and 1 <= k <= samples, "k answers of so many, and no more right ones than there are"
    all_wrong = 1.0
    for i in range(samples - right + 1, samples + 1):
        all_wrong *= max(0.0, 1 - k / i)
    return 1 - all_wrong


def summarize(greedy: list[bool], right: list[int], samples: int, ks: tuple[int, ...]) -> dict[str, float]:
    """Means over prompts: whether the greedy answer is right, and pass@k from how many of the sampled ones are."""
    return {"eval/accuracy": fmean(greedy)} | {f"eval/pass@{k}": fmean(pass_at_k(samples, count, k) for count in right) for k in ks}


def read_problems(config, tokenizer) -> list[data.Prompt]:
    """Those of --data that have an answer key, or the built-in ones. ValueError if there are none."""
    encode = functools.partial(data.encode, tokenizer)
    if not config.data:
        return data.Addition(config.seed, encode).held_out
    room = config.max_model_len - config.max_new_tokens
    problems = [p for p in data.PromptFile(Path(config.data), encode, config.seed, 0, room).prompts if p.answer_key is not None]
    if not problems:
        raise ValueError(f"--data {config.data}: no row has an `answer` to compare with")
    return problems


def is_right(answer: Answer, problem: data.Prompt, final_answer, decode) -> bool:
    """An answer that was cut off before its end has none, as in training."""
    return answer.finish == "stop" and final_answer(decode(answer.tokens)) == problem.answer_key


async def answer_all(engine: Engine, problems: list[data.Prompt], sampling: Sampling, config) -> list[list[Answer]]:
    """For each problem `samples` sampled answers and a greedy one, the last, in one request; as many at once as the engine decodes."""
    at_once = asyncio.Semaphore(max(1, -(-config.max_running_requests // (config.samples + 1))))
    greedy = [False] * config.samples + [True]

    async def answers_to(number: int, problem: data.Prompt) -> list[Answer]:
        seeds = [seed_of(config.seed, "eval", number, index) for index in range(len(greedy))]
        async with at_once:
            found = [answer async for answer in engine.generate([problem.tokens] * len(greedy), sampling, seeds=seeds, greedy=greedy)]
        return sorted(found, key=lambda answer: answer.index)

    return await asyncio.gather(*(answers_to(number, problem) for number, problem in enumerate(problems)))


async def run(config, stop: shutdown.Stop) -> tuple[int, str]:
    """Start the engine, ask, write OUT/eval.json and OUT/answers.jsonl, print the figures. ValueError for what can't be used."""
    out, tokenizer = Path(config.out), data.load_tokenizer(config.model, config.trust_remote_code)
    problems, decode = read_problems(config, tokenizer), functools.partial(data.decode, tokenizer)
    resume.move_aside(out, print)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    sampling = Sampling(config.temperature, config.max_new_tokens, data.stop_tokens(config.model, tokenizer))
    engine = Engine.launch("rollout", 0, config.port, config.model, config, str(out / "logs" / "rollout-0.log"))
    try:
        await engine.ready(config.engine_timeout_s)
        answers = await answer_all(engine, problems, sampling, config)
    except EngineLost as error:
        raise ValueError(f"the {engine.name} {error}{engine.log_tail()}") from None
    finally:
        await engine.close()
    final_answer = genrm.FORMATS[config.judge_format[0]].final_answer
    marks = [[is_right(a, problem, final_answer, decode) for a in row] for problem, row in zip(problems, answers, strict=True)]
    figures = summarize([row[-1] for row in marks], [sum(row[:-1]) for row in marks], config.samples, config.pass_at)
    settings = dataclasses.asdict(config)
    (out / "eval.json").write_text(json.dumps(figures | {"prompts": len(problems), "config": settings}, indent=1) + "\n")
    with (out / "answers.jsonl").open("w") as file:
        for problem, row, right in zip(problems, answers, marks, strict=True):
            *sampled, greedy = (decode(answer.tokens) for answer in row)
            asked = {"question": problem.question, "answer": problem.answer_key}
            file.write(json.dumps(asked | {"greedy": greedy, "sampled": sampled, "right": right}) + "\n")
    shown = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in figures.items())
    print(printable(f"{config.model}: {shown}  ({len(problems)} prompts, {config.samples} samples each)\nwrote {out}/"), flush=True)
    return 0, ""
