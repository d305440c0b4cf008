"""The program that made the demo's models: what it teaches is right, and it still makes them."""

import filecmp
from types import SimpleNamespace

import pytest

from config import DEMO_MODELS, Config
from demo import task
from examples.make_demo import texts, warmstart
from examples.make_demo.texts import DEMOS
from inputs.templates import IMAGE, VIDEO
from tests.test_drawn import read_clip, read_numbers

CRITIQUES = {  # of 57+68
    "125": "7+8+0=15:5.5+6+1=12:2.1:1.Y",
    "135": "7+8+0=15:5.5+6+1=12:3x1:1.N",
    "25": "7+8+0=15:5.5+6+1=12:2.1:xN",
    "1125": "7+8+0=15:5.5+6+1=12:2.1:11xN",
    "1a": "N",
}


def test_critiques_by_hand():
    assert {answer: texts.critique(57, 68, answer) for answer in CRITIQUES} == CRITIQUES


def numbers_in(shown: task.Shown, question: str) -> list[str]:
    if shown.images:
        return read_numbers(*shown.images)
    return read_clip(shown) if shown.videos else question.split("+")


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
def test_what_is_taught_is_right(name):
    """The same on every rank; no sum is held out; verdicts are the truth, of own errors, too."""
    demo, held_out = DEMOS[name], {tuple(sorted(each)) for each in task.HELD_OUT_PROBLEMS}
    for shown, response in texts.demonstrations(0, 3, demo):
        a, b = map(int, numbers_in(shown, shown.text[:-1]))
        assert response in (f">{a + b}", task.shown_work(a, b))
        assert tuple(sorted((a, b))) not in held_out
    for shown, response in texts.critiques(0, [(1, 1, "3")], 3, demo):
        question, answer = shown.text.removesuffix("?").split("=>", 1)
        assert (question == IMAGE, question == VIDEO) == (bool(shown.images), bool(shown.videos))
        a, b = map(int, numbers_in(shown, question))
        assert response == texts.critique(a, b, answer)
        assert task.addition_parse(response) == (answer == str(a + b))


def test_both_models_are_made(tmp_path, single_rank, monkeypatch):
    """In a few steps, as the project has them: the same files, with other weights."""
    monkeypatch.setattr(task, "HELD_OUT_PROBLEMS", task.HELD_OUT_PROBLEMS[:4])
    monkeypatch.setattr(warmstart, "GATE", 1.0)
    steps = dict(actor_steps=3, actor_batch=8, judge_steps=2, judge_batch=8, pool=4)
    demo = DEMOS["drawn"]._replace(**steps)
    warmstart.make(Config(), single_rank, tmp_path, SimpleNamespace(doing=print), demo)
    for model in ("actor", "judge"):
        names = [path.name for path in (DEMO_MODELS / "drawn" / model).iterdir()]
        folders = (DEMO_MODELS / "drawn" / model, tmp_path / model)
        _, others, missing = filecmp.cmpfiles(*folders, names, shallow=False)
        assert "model.safetensors" in others and "tokenizer.json" not in others and not missing
