"""On-policy distillation: advantages against transformers in float64, and models that can't be teachers."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import build
from actor import Actor
from algorithms import algorithm_of, set_advantages
from config import parse_config
from examples.make_demo.closing import close
from examples.make_demo.models import VISION, character_tokenizer
from extras.teacher import check_teacher, largest_differences
from genrm import Judgement
from modes import lay_out
from rewards import Rewards, Rule
from runtime.errors import UserError
from sample import Outcome, Sample
from tests.support.plain import make_model, make_samples, plain_logprobs
from tests.support.vision import make_vision_model
from tests.workers.parallel import actor_config, balanced, weights_of
from tests.workers.start import train_layouts

pytestmark = pytest.mark.usefixtures("constants")
TEMPERATURE = 0.8  # actor_config's
LARGER = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4)
LAYOUTS = {  # name -> reference, ranks, sizes of student and teacher
    "one": ("models", 1, ({}, {})),
    "teacher_tp2": ("models", 2, ({}, {"tp": 2})),
    "both_tp2": ("models", 2, ({"tp": 2}, {"tp": 2, "sp": True})),
}


def distilled(**changes):
    return actor_config("distill", teacher="T", **changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    """Make a student, and a larger teacher."""
    path = tmp_path_factory.mktemp("models")
    student = make_model(path / "student", "qwen3", tied=True)
    return student, make_model(path / "teacher", "qwen2", tied=False, seed=1, **LARGER)


def on_policy(student: str) -> list[Sample]:
    """Make answers with an engine's log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(student)
    samples = [sample for sample in make_samples(0) if sample.advantages is not None]
    groups: dict[int, list[Outcome]] = {}
    for sample in samples:
        sample.logprobs = plain_logprobs(model, sample, TEMPERATURE)[0].tolist()
        sample.outcomes = groups.setdefault(sample.prompt_id, [])
        sample.outcomes.append(Outcome(sample.index, len(sample.response), 0.0, None, False))
        sample.advantages = None
    return samples


def with_advantages(samples: list[Sample], student: Actor, teacher: Actor) -> None:
    """Compute advantages as the loop does, on one rank or on several that hold the same."""
    student.compute_policy_logprobs([[samples]])
    teacher.compute_ref_logprobs([[samples]])
    set_advantages(samples, student.algorithm)


def train(known: dict, sizes: tuple[dict, dict], path: str) -> dict:
    """Compute the advantages in a layout."""
    samples = known["samples"]
    student = Actor(distilled(**sizes[0]), known["student"])
    teacher = Actor(distilled(**sizes[1]), known["teacher"], learns=False)
    with_advantages(samples, student, teacher)
    found = {sample.key: sample.advantages for sample in samples}
    close(student)
    return found


def test_advantages_are_those_of_transformers_in_float64(models, tmp_path):
    """Each must be log p_teacher - log p_student of its token, whatever follows it, on any ranks."""
    known = {"student": models[0], "teacher": models[1], "samples": on_policy(models[0])}
    found = train_layouts("tests.extras.test_teacher", tmp_path, LAYOUTS, {"models": known})
    exact = [AutoModelForCausalLM.from_pretrained(path).double() for path in models]
    largest = 0.0
    for sample in known["samples"]:
        with torch.no_grad():
            own, others = (plain_logprobs(model, sample, TEMPERATURE)[0] for model in exact)
        largest = max(largest, (others - own).abs().max().item())
        for layout in found.values():
            advantages = torch.tensor(layout[sample.key], dtype=torch.float64)
            assert torch.allclose(advantages, others - own, rtol=0, atol=1e-5)
    assert largest > 1


def test_a_student_equal_to_its_teacher_learns_nothing(build, models):
    [student] = build((Actor, distilled(), models[0]))
    samples = on_policy(models[0])
    with_advantages(samples, student, student)
    assert all(advantage == 0 for sample in samples for advantage in sample.advantages)
    metrics = student.update(balanced(samples, student))
    assert metrics["train/grad_norm"] < 1e-7 and metrics["train/reference_kl"] == 0


def build_models(config):
    """Build a run's models on its only rank."""
    placement, splits = lay_out(config, 1)
    sampling = SimpleNamespace(stop_token_ids=())
    inputs = SimpleNamespace(algorithm=algorithm_of(config), terms=[], sampling=sampling)
    return build.build_models(config, inputs, placement, splits)


def test_a_run_reads_the_teacher_and_leaves_it_as_it_is(models, single_rank):
    """A step along the gradient must move the student toward it."""
    given = ["--preset", "tiny", "--model", models[0], "--teacher", models[1], "--lora", "2"]
    config = parse_config(
        [*given, "--algorithm", "distill", "--temperature", f"{TEMPERATURE}", "--lr", "1e-2"]
    )
    built = build_models(config)
    [student], [teacher] = built.trainers, built.references
    assert not teacher.learns and not any(p.requires_grad for p in teacher.gpt.parameters())
    student.wake()
    teacher.wake()
    before = weights_of(teacher)
    expected = dict(AutoModelForCausalLM.from_pretrained(models[1]).named_parameters())
    assert all(torch.equal(expected[name], weight) for name, weight in before.items())
    kl = []
    for _ in range(4):
        samples = on_policy(models[0])
        for sample in samples:
            sample.versions = [student.version] * len(sample.response)
        with_advantages(samples, student, teacher)
        metrics = student.update(balanced(samples, student))
        kl.append(metrics["train/reference_kl"])
    assert kl[-1] < kl[0]
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(teacher).items())
    close(student)


@pytest.mark.parametrize("cost", [None, 5.0])
def test_an_answer_without_judges_is_worth_nothing(cost):
    """Only its tokens must count, to the teacher. It may have a cost."""
    config = parse_config(
        ["--preset", "tiny", "--model", "m", "--teacher", "t", "--algorithm", "distill"]
    )
    assert config.judge == ()
    sample = Sample(0, 0, [1], response=[2], finish="stop")

    async def ask(seen):
        return Judgement("", cost)

    rules = [] if cost is None else [Rule("cost", ask)]
    asyncio.run(Rewards(config, [], rules, lambda tokens, special=False: "").score(sample, None))
    assert (sample.reward, sample.cost, sample.verdict) == (0, cost, None)


def tokenized(path: str | Path, tokens: int = 0) -> str:
    """Give a directory the demo's tokenizer. tokens: the number of additional tokens."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(tokens)])
    tokenizer.save_pretrained(path)
    return str(path)


def check(student: str, teacher: str) -> None:
    given = ["--model", student, "--teacher", teacher, "--algorithm", "distill"]
    check_teacher(parse_config([*given, "--max-new-tokens", "20", "--max-model-len", "100"]))


def test_a_teacher_has_the_students_tokens(tmp_path):
    def model(name: str, tokens: int = 0, **changes) -> str:
        path = make_model(tmp_path / name, "qwen3", tied=True, **{"vocab_size": 80} | changes)
        return tokenized(path, tokens)

    student = model("student")
    check(student, model("same", hidden_size=64, vocab_size=96))
    check(student, model("more", tokens=1))
    other = model("other", tokens=1)
    with pytest.raises(UserError, match=r"^--teacher .*student: '<0>' isn't the token it is for"):
        check(other, student)
    short = model("short", vocab_size=70)
    with pytest.raises(
        UserError, match=r"^--teacher .*short: it has fewer tokens than --model, 80$"
    ):
        check(student, short)
    window = model("window", max_position_embeddings=80)
    with pytest.raises(UserError, match="reads 80 tokens, and prompt and answer may have 94"):
        check(student, window)
    with pytest.raises(
        UserError, match=r"^--teacher .*nowhere: not a Hugging Face model directory"
    ):
        check(student, str(tmp_path / "nowhere"))


def changed(path: str, **names: str) -> str:
    """Give a directory's tokenizer other special tokens."""
    file = Path(path, "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    return path


def renamed(path: str, old: str, new: str) -> str:
    """Give one token of a directory's tokenizer another name."""
    for file in (Path(path, "tokenizer.json"), Path(path, "tokenizer_config.json")):
        file.write_text(file.read_text().replace(json.dumps(old), json.dumps(new)))
    return path


def test_a_teacher_may_end_otherwise(tmp_path):
    """A base model's chat model has another end, which also ends the policy's answers, and another padding.

    An end may have another name; a token that isn't an end of both may not, nor may an end be elsewhere.
    """

    def model(name: str) -> str:
        return tokenized(make_model(tmp_path / name, "qwen3", tied=True, vocab_size=80))

    student = model("student")
    tokenizer = character_tokenizer()
    end, begin = tokenizer.eos_token_id, tokenizer.bos_token_id
    chat = changed(model("chat"), eos_token="<bos>", pad_token="<eos>")
    check(student, chat)
    given = ["--preset", "tiny", "--model", student, "--max-model-len", "120", "--rule", "right"]
    for teacher, stops in ((student, (end,)), (chat, tuple(sorted((begin, end))))):
        config = parse_config([*given, "--algorithm", "distill", "--teacher", teacher])
        assert build.load_inputs(config, [], print).sampling.stop_token_ids == stops
    check(student, renamed(model("renamed"), "<eos>", "<end>"))
    with pytest.raises(UserError, match=r"^--teacher .*begun: '<bos>' isn't the token it is for"):
        check(student, renamed(model("begun"), "<bos>", "<begin>"))


def test_a_teacher_sees_what_the_student_sees(tmp_path):
    student = make_vision_model(tmp_path / "student", "qwen3_vl")
    check(student, make_vision_model(tmp_path / "teacher", "qwen3_vl", layers=6))
    path = Path(tmp_path, "teacher", "preprocessor_config.json")
    own = json.loads(path.read_text())
    path.write_text(json.dumps(own | {"image_mean": [0.4] * 3}))
    with pytest.raises(UserError, match="another image processor than --model"):
        check(student, str(tmp_path / "teacher"))
    blind = make_model(tmp_path / "blind", "qwen3", tied=True)
    character_tokenizer(VISION).save_pretrained(blind)
    with pytest.raises(UserError, match="it sees no images, and --model does"):
        check(student, blind)


def test_the_largest_differences_come_first():
    sample = Sample(0, 0, [1], response=list(range(20, 32)), logprobs=[-1.0] * 12)
    sample.reference_logprobs = [-1.0 - place / 8 for place in range(12)]
    sample.reference_logprobs[3] = 4.0
    found = largest_differences(sample)
    assert len(found) == 10
    assert found[0] == (3, 23, -1.0, 4.0) and found[1] == (11, 31, -1.0, -2.375)
    sample.policy_logprobs = sample.reference_logprobs
    assert {each.teacher - each.student for each in largest_differences(sample)} == {0}
