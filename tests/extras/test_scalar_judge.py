"""Scalar reward models as judges: what they see, and what becomes of their numbers."""

import asyncio
import math

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import rewards
from config import Config
from engines.engine import Answer, Sampling
from examples.make_demo.models import new_model
from extras.scalar import ScoringEngine
from inputs import tokenization
from tests.engines.test_engine import PROMPT, ask
from tests.root.test_genrm import Engine, Pool, always, make_rewards, sample, score_all
from tests.support.models import save_tokenizer


def test_a_scalar_reward_model_scores_the_whole_response():
    """It must score even a response that was cut off. Accuracy uses its final answer."""
    listed = make_rewards("addition_score")
    judged, cut = sample("7+8+0=15;>125"), sample("7+8", finish="length")
    engine = Engine(lambda prompt, _: (-2.5 if prompt.endswith(">7+8") else 1.25, -0.1, "stop"))
    score_all(listed, Pool(engine), [judged, cut, sample("7+8")])  # the last is shown with its end
    assert "<user>57+68=<assistant>7+8+0=15;>125" in engine.asked and len(engine.asked) == 3
    assert (listed.counts(), judged.critique) == (([0], [3]), "score 1.25")
    assert (judged.reward, judged.verdict, listed.final_answer(judged)) == (1.25, None, "125")
    assert (cut.reward, cut.verdict, listed.final_answer(cut)) == (-2.5, None, None)


QUESTION = [{"role": "user", "content": "3+4="}]
SEVERAL = [{"role": "system", "content": "Be right."}, *QUESTION]
SEEN = {  # kind of tokenizer, prompt -> what is scored, as TRL's RewardTrainer joins and ends it
    ("text", "3+4="): "<bos>3+4=>7<eos>",
    ("chat", "3+4="): "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n>7<|im_end|>\n",
}
SEEN["chat", "several"] = f"<|im_start|>system\nBe right.<|im_end|>\n{SEEN['chat', '3+4=']}"


class ScoringPool:
    async def generate(self, requests, model):
        self.shown = requests[0].prompt
        yield Answer(0, [], [], "stop", [], score=0.0)


@pytest.mark.parametrize("kind,prompt", SEEN)
def test_a_scalar_judge_sees_the_whole_exchange(kind, prompt, tmp_path):
    """It must be what RewardTrainer learns from; only a finished answer has an end."""
    home = tmp_path / kind
    new_model(home, 0) if kind == "text" else save_tokenizer(home)
    tokenizer = tokenization.load_tokenizer(str(home))
    config = Config(model="m", judge=("m",), judge_format=("score",), max_model_len=2000)
    [judge] = rewards.build(config, [], [tokenizer], "".join).judges
    asked = SEVERAL if prompt == "several" else prompt
    seen = []
    for is_cut in (False, True):
        pool = ScoringPool()
        asyncio.run(judge.judge(asked, ">7", pool, is_cut=is_cut))
        seen.append(tokenizer.decode(pool.shown))
    whole = SEEN[kind, prompt]
    assert seen == [whole, whole[: whole.rindex("<eos>" if kind == "text" else "<|im_end|>")]]


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_a_score_that_is_not_finite_is_a_failed_judgement(score):
    """None comes from a server that can't send NaN."""
    listed, judged = make_rewards("addition_score"), sample(">125")
    score_all(listed, Pool(Engine(always(score))), [judged])
    assert (judged.reward, listed.counts()) == (None, ([1], [0]))


def test_a_server_that_can_not_say_its_score_has_none():
    """FastAPI returns 500 for NaN; a request that a server refuses for another reason must stay an error."""

    async def refuse(request):
        asked = await request.json()
        raise web.HTTPInternalServerError if asked["input_ids"] == [PROMPT] else web.HTTPBadRequest

    async def score(prompt):
        app = web.Application()
        app.router.add_post("/classify", refuse)
        async with TestServer(app) as stub:
            engine = ScoringEngine("genrm", 0, str(stub.make_url("/")), "a key")
            try:
                return await ask(engine, [prompt], Sampling(0.0, 1))
            finally:
                await engine.close()

    [answer] = asyncio.run(score(PROMPT))
    assert answer.score is None and answer.finish == "stop"
    with pytest.raises(ValueError, match="rank 0 refused /classify: 400"):
        asyncio.run(score([5]))
