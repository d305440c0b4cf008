"""The files of examples/: each short enough to read at a glance, and run on fakes and a virtual clock."""

import importlib
import json
import re
import runpy
import sys
from unittest.mock import patch

import pytest
import torch

import algorithms
import genrm
import modes
import placement
import rewards
import run
from extras import users
from inputs import prompt_file, tokenization
from sample import Sample
from tests import ROOT
from tests.root.test_genrm import Characters
from tests.support import fakes, slow_server
from tests.support.fakes import simulate, text_answer, to_text
from tests.support.launched import Run, free_ports
from tests.support.patience import run_process

EXAMPLES = ROOT / "examples"
BENCH = ROOT / "reproduce/bench"


@pytest.fixture(autouse=True)
def tables():
    """Remove an example's additions to the tables after its test."""
    with (
        patch.dict(algorithms.ALGORITHMS),
        patch.dict(placement.PLACEMENTS),
        patch.dict(modes.MODES),
        patch.dict(genrm.FORMATS),
    ):
        yield


def run_example(name, monkeypatch, *arguments):
    """Run the file as a user does, but without the run itself; return the arguments that it starts with."""
    started = []
    monkeypatch.setattr(run, "main", started.append)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return started


def kept(controllers, steps):
    """Return each step's samples in order: prompt, index and reward."""
    found = []
    for step in range(steps):
        samples = [s for c in controllers for s in c.report.steps[step][1].kept]
        assert samples
        found.append(sorted((s.prompt_id, s.index, s.reward) for s in samples))
    return found


def test_an_algorithm_of_one_s_own_runs(monkeypatch):
    """It must register its row, start the program with its arguments, and train."""
    arguments = ["--algorithm", "mine", "clip_low=0.1"]
    assert run_example("my_algorithm.py", monkeypatch, *arguments) == [arguments]
    controllers, _ = simulate("partial", 2, algorithm=("mine", "clip_low=0.1"), steps=2)
    samples = [sample for c in controllers for sample in c.report.steps[1][2]]
    assert len({sample.advantages[0] for sample in samples}) > 1
    now = torch.tensor([-1.0, -0.5], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0])
    inputs = algorithms.LossInputs(now, old, advantages, torch.tensor([0, 0]), torch.tensor([2.0]))
    loss, clipped = controllers[0].algorithm.loss(inputs, controllers[0].algorithm)
    loss.sum().backward()
    assert loss.shape == clipped.shape == (2,) and now.grad[0] < 0 < now.grad[1]


def test_a_mode_of_one_s_own_runs(monkeypatch):
    """It must train on partial colocation's samples, and judge no answer before its group is finished."""
    arguments = ["--mode", "by_group"]
    assert run_example("my_mode.py", monkeypatch, *arguments) == [arguments]
    runs = [simulate(mode, 4)[0] for mode in ("by_group", "partial")]
    assert runs[0][0].devices.split.mode == "by_group"
    assert kept(runs[0], 3) == kept(runs[1], 3)
    without_judge, _ = simulate("by_group", 3, model="m", judge=(), rule=("right",), steps=2)
    assert without_judge[0].devices.split.rollout == 3 and kept(without_judge, 2)


def test_a_placement_of_one_s_own_runs(monkeypatch):
    """The critic must learn on the last rank; the actor's samples are those of a colocated run."""
    arguments = ["--placement", "last", "--algorithm", "ppo"]
    assert run_example("my_placement.py", monkeypatch, *arguments) == [arguments]
    ppo = dict(algorithm=("ppo",), steps=2)
    apart, _ = simulate("partial", 3, placement="last", **ppo)
    together, _ = simulate("partial", 2, **ppo)
    words = "engines=0-1 actor=0-1:tp1 critic=2:tp1 reference=0-1:tp1"
    assert str(apart[0].devices.placement) == words
    assert [c.devices.actor.holds for c in apart] == [True, True, False]
    assert [c.devices.critics[0].holds for c in apart] == [False, False, True]
    assert kept(apart, 2) == kept(together, 2)
    assert [c.devices.critics[0].version for c in apart] == [2, 2, 2]


CRITIQUES = {"Points: 10": 1.0, "points: 3\n**Points:** 7.5/10": 0.75, "Points: 0.": 0.0}
CRITIQUES |= dict.fromkeys(("Points: 11", "Points: -3", "It is good."))


def test_a_judge_of_one_s_own_runs(monkeypatch):
    """The reward must be a tenth of its points for the whole response; above 5 it accepts."""
    arguments = ["--judge-format", "points"]
    assert run_example("my_judge.py", monkeypatch, *arguments) == [arguments]
    parse = genrm.FORMATS["points"].parse
    assert {critique: parse(critique) for critique in CRITIQUES} == CRITIQUES

    def judge(prompt, index, sampling):
        found = re.search(r"Response:\n *>(\d+)(.*)$", to_text(prompt), re.DOTALL)
        response, begun = found.groups()
        return text_answer(f"So so.\nPoints: {int(response[-1])}", begun=begun)

    monkeypatch.setattr(fakes, "FakeTokenizer", Characters)
    room = dict(max_model_len=2000, max_new_tokens=100)
    controllers, _ = simulate("partial", 2, verdict=judge, judge_format=("points",), **room)
    assert kept(controllers, 3)
    for sample in (s for c in controllers for s in c.report.steps[2][1].kept):
        points = int(to_text(sample.response)[-1])
        assert (sample.reward, sample.verdict) == (points / 10, points > 5)


def test_a_reward_of_one_s_own_runs():
    """As the only reward it must be 1 for the right answer, a tenth less for every ten tokens over forty."""
    rule = str(EXAMPLES / "my_reward.py")
    controllers, _ = simulate("partial", 2, model="m", judge=(), rule=(rule,), steps=2)
    assert kept(controllers, 2) and not controllers[0].devices.genrm.all_engines
    for sample in (s for c in controllers for s in c.report.steps[1][1].kept):
        right = to_text(sample.response).rsplit(">", 1)[1] == sample.answer_key
        assert sample.reward == pytest.approx(right - 0.01 * max(0, len(sample.response) - 40))


def test_a_rule_that_reads_its_rows():
    """It must score a right, a too short and a cut-off answer of each row of its file, and no other row."""
    rule = users.module_of(EXAMPLES / "my_rule_rows.py").tidy
    tokenizer = tokenization.load_tokenizer(str(EXAMPLES.parent / "demo/models/written/actor"))
    prompts = prompt_file.PromptFile(EXAMPLES / "my_rows.jsonl", tokenizer, 184)
    assert {prompt.row["kind"] for prompt in prompts} == {"sum", "free"}
    for prompt in prompts:
        said = []
        for answer, end in ((prompt.answer_key, "<eos>"), ("1", "<eos>"), (prompt.answer_key, "")):
            texts = dict(text=f">{answer}{end}", answer=answer, row=prompt.row)
            said.append(rule(rewards.TextSample(0, 0, prompt.tokens, **texts)))
        assert said == ([1.0, 0.0, 0.0] if prompt.row["kind"] == "sum" else [None] * 3)


ASKED = {"2+3*4": 14, "10-4-3": 3, "7": 7, "2*3*4-30": -6, "73920415+80012377": 153932792}
REFUSED = ("", "2+", "2++3", "-2", "2**9", "1/2", "(2)", " 2", "2\n", "a")
REFUSED += ("\u0663+1", "9" * 16, "1+" * 10 + "1")


def test_a_calculator_replies_to_questions_and_ends_with_the_answer():
    """It must refuse anything but numbers with + - * between them."""
    from examples.my_environment import Environment
    from extras.environment import read_step

    def new():
        return Environment(Sample(0, 0, [], "2+3=", "5"), seed=0)

    replies = {text: read_step(new().step(f"{text}?")) for text in (*ASKED, *REFUSED)}
    said = {text: step.reply[0]["content"] for text, step in replies.items()}
    assert said == {text: str(value) for text, value in ASKED.items()} | dict.fromkeys(
        REFUSED, "no"
    )
    assert [replies[text].metrics["refused_frac"] for text in ("7", "a")] == [0.0, 1.0]
    assert [new().step(text) for text in (">5", ">6", "5", ">5>5", "")] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_guessing_game_is_won_by_its_hints():
    """Its seed must choose the number. Each hint costs; at the end the distance of the last guess counts."""
    from examples.my_guessing_game import Environment
    from extras.environment import read_step

    numbers = set()
    for seed in range(20):
        game, twin = (Environment(Sample(0, 0, []), seed=seed) for _ in range(2))
        numbers.add(game.number)
        low, high, hints = 0, 99, 0
        step = read_step(game.step("4+5=9;>50"))
        assert (
            step == read_step(twin.step("50")) and game.score() == 1 - abs(game.number - 50) / 100
        )
        while not step.done:
            hints += 1
            guess = (low + high) // 2
            step = read_step(game.step(f"{guess}"))
            low, high = (guess + 1, high) if step.reply and "higher" in str(step) else (low, guess)
        assert hints <= 8 and game.score() == 1.0
        assert read_step(twin.step("no number")).done
    assert len(numbers) > 10


def test_a_sandbox_is_asked_over_http(monkeypatch):
    """A server that drops a request, is too slow, or is gone must raise errors that drop the episode."""
    from examples import my_sandbox

    episode = my_sandbox.Environment(Sample(0, 0, [], "2+3=", "5"), seed=0)
    habits = slow_server.Habits(slow_s=0.0, drops=3, stalls=2, stall_s=5.0)
    with slow_server.running(habits) as address:
        monkeypatch.setattr(my_sandbox, "SERVER", address)
        assert episode.step("2+3?") == "5"
        monkeypatch.setattr(my_sandbox, "TIMEOUT_S", 0.05)
        with pytest.raises(TimeoutError):
            episode.step("2+3?")
        monkeypatch.setattr(my_sandbox, "TIMEOUT_S", 5.0)
        with pytest.raises(ConnectionError):
            episode.step("2+3?")
        assert [episode.step(text) for text in ("2+3+4?", "x?", ">5", ">6")] == [
            "9",
            "no",
            1.0,
            0.0,
        ]
    with pytest.raises(ConnectionError):
        episode.step("2+3?")


def calculator(name, *more):
    """Return the arguments of a run in which the model may ask, as in my_environment.py."""
    text = (EXAMPLES / "my_environment.py").read_text()
    arguments = re.search(r"run\.py ((?:.*\\\n)*.*)", text)[1].replace("\\\n", " ").split()
    place = arguments.index("--environment") + 1
    return *arguments[:place], f"examples/{name}.py", *arguments[place + 1 :], *more


@pytest.mark.slow
def test_the_calculator_s_command_learns_to_ask(tmp_path):
    """It must go from nothing right to nearly all, with episodes of two turns instead of one."""
    first, *_, trained, last = Run(tmp_path, *calculator("my_environment")).ended().rows()
    assert first["eval/accuracy"] < 0.3 and last["eval/accuracy"] > 0.85
    assert first["environment/turns_mean"] < 1.4 and trained["environment/turns_mean"] > 1.8


@pytest.mark.slow
def test_a_bad_server_costs_episodes_and_a_silent_one_the_run(tmp_path, monkeypatch):
    """Dropped requests must be counted. If it never answers, the run ends in one line and leaves nothing."""
    monkeypatch.setenv("SANDBOX_TIMEOUT_S", "1")
    with slow_server.running(slow_server.Habits()) as address:
        monkeypatch.setenv("SANDBOX", address)
        run = Run(tmp_path / "bad", *calculator("my_sandbox")).ended()
    first, *_, last = run.rows()
    assert 0 < first["environment/lost_frac"] < 0.1 and last["eval/accuracy"] > 0.85
    monkeypatch.setenv("SANDBOX_TIMEOUT_S", "1000")
    with slow_server.running(slow_server.Habits(hangs=True)) as address:
        monkeypatch.setenv("SANDBOX", address)
        run = Run(tmp_path / "silent", *calculator("my_sandbox", "--timeout-s", "20")).start()
        run.finish()
    run.check_one_line("my_sandbox.py: step on the prompt ", " returned nothing for 18 s")
    run.check_nothing_is_left()


def test_a_warm_start_learns_episodes_as_they_are_played():
    """Its prompts must start a turn: the question, a turn with its end, the reply. The sums are included."""
    from examples.make_demo import calculator

    model = EXAMPLES.parent / "demo/models/calculator/actor"
    tokenizer = tokenization.load_tokenizer(str(model))
    batch = calculator.lessons(0, 0)
    assert len(batch) == sum(calculator.BATCH.values())
    for example in batch:
        first, *replied = example.prompt.text.split("<eos>")
        a, b, begun = re.fullmatch(r"(\d+)\+(\d+)=(.*)", first).groups()
        question = f"{a}+{b}?"
        if replied:
            assert begun == question and example.response == f">{replied[0]}"
        else:
            assert begun + example.response in (question, f">{int(a) + int(b)}")
        text = [tokenizer.convert_tokens_to_ids([*part]) for part in (first, *replied)]
        woven = [tokenizer.eos_token_id, *text[1]] if replied else []
        assert tokenization.encode(tokenizer, example.prompt.text) == [1, *text[0], *woven]
    lines = (EXAMPLES / "my_sums.jsonl").read_text().splitlines()
    sums = calculator.problems("rows", calculator.ROWS)
    assert [json.loads(line) for line in lines] == [
        {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums
    ]


@pytest.mark.parametrize("bench", sorted(path.stem for path in BENCH.glob("*.py")))
def test_a_benchmark_finds_what_it_measures(bench):
    if bench == "trl_baseline":
        pytest.importorskip("trl")
    importlib.import_module(f"reproduce.bench.{bench}")


@pytest.mark.parametrize("path", [*(ROOT / "reproduce").rglob("*.py")], ids=lambda path: path.name)
def test_a_run_s_training_is_replaced_where_a_run_finds_it(path):
    """build.TRAINING has controller.train from its import on: another value there changes nothing."""
    assert not re.search(r"^\s*controller\.train\s*=", path.read_text(), re.MULTILINE)


REAL = {  # bench -> settings of a short measurement, and what it prints
    "modes": (
        "--ranks 2 --workloads short --sides full --repeats 1 --steps 2 --moving 0 --port PORT",
        "| short: full |",
    ),
    "media": ("--ranks 2 --repeats 1", "| central |"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bench", REAL)
def test_a_benchmark_measures_its_own_load(bench):
    """A real run must do the bench's work instead of the demo's."""
    settings, shown = REAL[bench]
    words = settings.replace("PORT", str(free_ports())).split()
    ran = run_process(sys.executable, f"reproduce/bench/{bench}.py", *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert shown in ran.stdout, ran.stdout
