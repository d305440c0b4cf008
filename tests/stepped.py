"""Engines that decode in steps, as real ones do: the more answers an engine holds, the longer each waits."""

import asyncio
import random
from collections import Counter

from fakes import FakeEngine, to_text, within

from engines.engine import Answer, EngineLost

FIXED_S, PER_REQUEST_S, PREFILL_S = 0.020, 0.001, 0.00002  # of a step; for each answer in it; a token read


class SteppedEngine(FakeEngine):
    """A step takes FIXED_S, PER_REQUEST_S for each answer, and what it takes to read new prompts."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.server.running, self.server.unread, self.server.decoding = {}, 0, None

    async def generate(self, requests):
        server, clock = self.server, asyncio.get_running_loop().time
        assert server.awake and server.runs, f"a request came to the {self.name} while it slept"
        start, version, ended = clock(), server.version, asyncio.Queue()
        answers = [self._answer_to(request, index) for index, request in enumerate(requests)]
        server.running |= {(ended, answer.index): len(answer.tokens) for answer in answers}
        server.unread += sum(len(request.prompt) for request in requests)
        server.requests += 1
        server.decoding = server.decoding or asyncio.create_task(self._decode())
        server.aborts.append(ended)
        try:
            for _ in answers:
                index, left = await ended.get()
                answer = within(answers[index], max(1, len(answers[index].tokens) - left))
                tokens = answer.tokens[: len(answers[index].tokens) - left]
                times = dict(sent=start, first_token=start, end=clock(), rank=self.rank)
                finish = "abort" if left else answers[index].finish
                logprobs = answers[index].logprobs[: len(tokens)]
                yield Answer(index, tokens, logprobs, finish, [version] * len(tokens), **times)
        finally:
            server.aborts.remove(ended)

    async def _decode(self):
        server = self.server
        while server.running:
            step_s = FIXED_S + PER_REQUEST_S * len(server.running) + PREFILL_S * server.unread
            server.unread = 0
            await asyncio.sleep(step_s)
            if not server.runs:
                raise EngineLost("broke the connection")
            for (ended, index), left in list(server.running.items()):
                server.running[ended, index] = left - 1
                if left == 1:
                    del server.running[ended, index]
                    ended.put_nowait((index, 0))
        server.decoding = None

    async def abort(self):
        running, self.server.running = self.server.running, {}
        for (ended, index), left in running.items():
            ended.put_nowait((index, left))


def with_a_tail(share, longest, keep=1.0):
    """`write` of answers of 10 to 20 tokens, but a `share` of them of nearly `longest`.

    keep: the part of the groups whose rewards differ.
    """

    def write(prompt, index, sampling):
        question, begun = to_text(prompt).split("=")
        rng, right = random.Random(f"{question} {index}"), int(question.split("+")[0])
        length = rng.randint(longest * 4 // 5, longest) if rng.random() < share else rng.randint(10, 20)
        differs = random.Random(f"keep {question}").random() < keep
        end = f">{right + index % 2 * differs:0{index + 4}}"  # no two are the same, and have one verdict
        text = (" " * (length - len(end)) + end)[len(begun) :]
        return Answer(index, [ord(c) for c in text], [-0.01] * len(text), "stop", [])

    return write


def critique_of(tokens):
    """`verdict` of a judge that thinks for so long."""

    def verdict(prompt, index, sampling):
        asked, begun = to_text(prompt).split("?")
        question, answer = asked.split(">")
        text = "0:0." * (tokens // 4) + ("Y" if int(question.split("+")[0]) == int(answer) else "N")
        text = text[len(begun) :]
        return Answer(0, [ord(c) for c in text], [-0.1] * len(text), "stop", [])

    return verdict


WORKLOADS = {  # share of long answers, their length, tokens of a critique, part of the groups that is kept
    "tail": (0.025, 100, 32, 1.0),
    "longer tail": (0.05, 200, 64, 1.0),
    "longer tail, half filtered": (0.05, 200, 64, 0.5),
}


def settings_of(workload, steps=6):
    """Of `simulate`."""
    share, longest, critique, keep = WORKLOADS[workload]
    sizes = dict(prompts_per_step=16, answers_per_prompt=8, max_new_tokens=220, judge_max_new_tokens=120)
    how = dict(write=with_a_tail(share, longest, keep), verdict=critique_of(critique), prepare=swap_in_150_ms)
    return sizes | how | dict(steps=steps, eval_every=100, engine_class=SteppedEngine, timeout_s=600.0)


def swap_in_150_ms(engines):
    for engine in engines:
        engine.server.swap_s = 0.15


def seconds_of(controllers, first=1):
    """Of serving, a step: the slowest controller's."""
    return [stats.serve_s for stats in controllers[0].state.history[first:]]


def batches(controllers):
    """What each step trained on."""
    steps = range(len(controllers[0].placement.actor.batches))
    kept = [[s for c in controllers for s in c.placement.actor.batches[step]] for step in steps]
    return [Counter((s.key, tuple(s.response), s.reward) for s in samples) for samples in kept]
