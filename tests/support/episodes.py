"""Episodes on fakes: the user's code runs in the event loop, where it may wait on the virtual clock."""

import asyncio
import random
from dataclasses import dataclass

from extras.environment import Step
from extras.environment import episodes as user_episodes
from inputs import tokenization
from tests.support.fakes import FakeTokenizer, simulate, text_answer, to_text
from tests.support.in_process import InProcess

END = "."  # ends a turn


@dataclass(eq=False)
class FakeEpisodes(user_episodes.Episodes):
    """Fake episodes. waited: steps that ran when those waiting for one were released."""

    waited: int = 0

    def let_go(self):
        steps = [episode.step for episode in self._episodes.values()]
        self.waited += sum(step is not None and not step.done() for step in steps)
        super().let_go()

    async def _encode(self, prompt, reply):
        return tokenization.encode_reply(self.tokenizer, prompt, reply, self.code.title)


def game(pauses=(0.0,), seed=0, replies=4):
    """Make a class with its own lists: up to three replies `[k]`, chosen by the seed; some turns earn some.

    pauses: seconds that a step may take, decided only by chance. made: its objects, each with the texts that
    it was shown, and how often it was closed.
    """
    chance = random.Random(seed)

    class Game:
        made = ()

        def __init__(self, sample, *, seed):
            Game.made += (self,)
            self.key, self.seed, self.turns, self.closed = sample.key, seed, [], 0
            self.left = seed % replies

        async def step(self, text):
            self.turns.append(text)
            await asyncio.sleep(chance.choice(pauses))
            self.left -= 1
            earned = len(text) % 3 / 4
            if self.left < 0:
                return Step(reward=earned, done=True)
            return Step(f"[{len(self.turns)}]", earned, metrics={"text": len(text)})

        def score(self):
            return len(self.turns) / 8

        async def close(self):
            self.closed += 1

    return Game


def play_on(prompt, index, sampling):
    """Return a turn that depends on the question, its number in the group, and the earlier turns."""
    question, said = to_text(prompt).split("=")
    *turns, begun = said.split("]")
    rng = random.Random(f"{question} {index} {turns}")
    return text_answer(f"{' ' * rng.randint(0, 9)}>{rng.randint(0, 9)}{END}", index, begun)


def judge_by_chance(prompt, index, sampling):
    """Return a verdict that depends on all that the judge is shown."""
    asked, begun = to_text(prompt).split("?")
    return text_answer("0:0." * 3 + random.Random(asked).choice("YN"), begun=begun)


def play(kind, mode="partial", size=2, **settings):
    """Run episodes of this class. Return the controllers."""

    def episodes(config):
        code = InProcess("--environment g.py", kind)
        return FakeEpisodes(code, FakeTokenizer(), config, {ord(END)})

    how = dict(write=play_on, verdict=judge_by_chance, environment="g.py", episodes=episodes)
    return simulate(mode, size, **how | settings)[0]


def texts_of(sample):
    """Return the turns of an answer as sampled, each without its end."""
    ends = [*(reply.start for reply in sample.replies), len(sample.response)]
    starts = [0, *ends[:-1]]
    return [to_text(sample.response[a : b - 1]) for a, b in zip(starts, ends, strict=True)]
