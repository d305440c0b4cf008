"""Judges that see, and judges that don't: what they are shown of a prompt with images, and how often."""

from functools import partial

import pytest

import data
import demo.task  # noqa: F401 (it adds a judge format)
import rewards
from config import Config
from engines.engine import Answer
from images.reader import reader_of
from images.tokens import expand
from sample import Sample
from test_genrm import score_all
from vision_models import IMAGE, encoded_picture, make_vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("judge"), "qwen3_vl", layers=1)


@pytest.fixture(scope="module")
def pictures(model):
    read = reader_of(model).read
    return [(read(partial(encoded_picture, 64, 32, seed=seed), "here"),) for seed in range(2)]


class Pool:
    """Accepts all; remembers what it was asked."""

    def __init__(self, text):
        self.asked, self._text = [], text

    async def generate(self, requests, model):
        first = requests[0]
        self.asked.append((first.prompt, first.images, first.sampling.stop_token_ids))
        yield Answer(0, self._text, [-0.01] * len(self._text), "stop", [])


def score(listed, text, *samples):
    pool = Pool(text)
    score_all(listed, pool, samples)
    assert all(sample.reward == 1.0 for sample in samples)
    return pool.asked


def listed_for(model):
    config = Config(model="m", judge=(model,), judge_format=("addition",), max_model_len=2000)
    return rewards.build(config, [data.load_tokenizer(model)], "".join, [reader_of(model)])


def sample_of(media, prompt_id=0, answer=">5"):
    return Sample(prompt_id, 0, [], "<image>=", media=media, response=list(answer), finish="stop")


@pytest.mark.parametrize("answer", [">5", "><image>"])
def test_a_judge_that_sees_is_shown_the_images(model, pictures, answer):
    """At their places, expanded; its critique ends at an image token. An answer can't make up a place."""
    tokenizer, sample = data.load_tokenizer(model), sample_of(pictures[0], answer=answer)
    [(prompt, images, stop)] = score(listed_for(model), tokenizer("Y")["input_ids"], sample)
    assert prompt.count(IMAGE) == 2 and images is pictures[0]
    assert {*reader_of(model).stop_tokens} < {*stop}
    if answer == ">5":
        shown = tokenizer("<|vision_start|><|image_pad|><|vision_end|>=>5?")["input_ids"]
        assert prompt == expand(shown, pictures[0])


def test_a_judgement_is_shared_only_if_the_images_are_the_same(model, pictures):
    first, second = pictures
    same = (reader_of(model).read(first[0].read, "again"),)
    samples = [sample_of(media, number) for number, media in enumerate((first, second, same))]
    asked = score(listed_for(model), data.load_tokenizer(model)("Y")["input_ids"], *samples)
    assert [images for _, images, _ in asked] == [first, second]
