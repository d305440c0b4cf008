"""What the command says about bad input: in one line, before anything starts where that is possible."""

import asyncio
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import data
import models
import run
from config import parse_config
from engines import fleet, server
from engines.engine import Engine
from fakes import FakeWorld
from launched import ROOT, Run

# ---------------------------------------------------------------- as processes


def test_one_process_ends_with_one_line(tmp_path):
    """Status 2, the setting, nothing on stdout, and nothing is written."""
    command = [sys.executable, "run.py", "--out", str(tmp_path / "out"), "--stepz", "3"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    [line] = ran.stderr.splitlines()
    assert line.startswith("error: ") and "--stepz" in line
    assert not list(tmp_path.iterdir())


def test_two_ranks_end_with_one_line(tmp_path):
    """Though one of them alone finds that the folder can't be used; nothing is left behind."""
    (tmp_path / "file").touch()
    ended = Run(tmp_path / "run", out=tmp_path / "file" / "out").start().finish()
    ended.check_one_line("--out ", "file/out can't be used")
    ended.check_nothing_is_left()


# ---------------------------------------------------------------- a user's own files

GOOD_ROW = '{"prompt": "What is 3+4?"}\n'
LONG_ROW = json.dumps({"prompt": "What is 3+4? " * 100}) + "\n"


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    return models.save_model(tmp_path_factory.mktemp("own") / "actor")


def read(actor: Path, rows: Path) -> dict:
    """All that a rank reads of a model and its prompts before an engine starts; parts of a controller."""
    given = ["--model", str(actor), "--rule", "right", "--data", str(rows)]
    config = parse_config([*given, "--max-model-len", "512", "--max-new-tokens", "12"])
    run.check_settings(config, 2)
    server.checkpoint_shapes(config.model)
    return run.load_inputs(config, print)[-1]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def of_another_architecture(path: Path) -> None:
    path.write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')


@pytest.mark.parametrize(
    "file,change,message",
    [
        ("model.safetensors", cut_short, r"model\.safetensors"),
        ("model.safetensors", Path.unlink, r"holds no \*\.safetensors"),
        ("config.json", Path.unlink, "has no config.json"),
        ("config.json", lambda path: path.write_text("{"), "config.json"),
        ("config.json", of_another_architecture, "gpt2"),
    ],
)
def test_a_model_that_cannot_be_used_is_named(tmp_path, file, change, message):
    home = models.save_model(tmp_path / "its-name")
    (tmp_path / "rows.jsonl").write_text(GOOD_ROW * 4)
    change(home / file)
    with pytest.raises(ValueError, match=message) as caught:
        read(home, tmp_path / "rows.jsonl")
    assert "its-name" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text,message",
    [
        (GOOD_ROW + "{nope}\n", r"rows\.jsonl:2.*not valid"),
        ("\n", r"rows\.jsonl.* holds no row"),
        (GOOD_ROW + LONG_ROW, r"rows\.jsonl:2.*--max-model-len"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(actor, tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read(actor, tmp_path / "rows.jsonl")
    assert "\n" not in str(caught.value)


def test_how_answers_are_asked_for(actor, tmp_path):
    """Sampled as the settings say; greedy ones, for an evaluation, in the same way otherwise."""
    (tmp_path / "rows.jsonl").write_text(GOOD_ROW * 4)
    inputs = read(actor, tmp_path / "rows.jsonl")
    assert inputs["greedy"] == replace(inputs["sampling"], temperature=0.0)
    assert (inputs["sampling"].temperature, inputs["sampling"].max_new_tokens) == (1.0, 12)


@pytest.mark.parametrize("more,fits", [(0, True), (1, False)])
def test_a_prompt_leaves_room_for_its_answer(actor, tmp_path, more, fits):
    """Of 512 tokens twelve."""
    tokenizer, words = data.load_tokenizer(str(actor)), 0

    def tokens(words):
        return len(data.encode(tokenizer, "7" * words))

    while tokens(words + 1) <= 500:
        words += 1
    assert tokens(words) == 500
    row = json.dumps({"prompt": "7" * (words + more)}) + "\n"
    (tmp_path / "rows.jsonl").write_text(GOOD_ROW * 3 + row)
    with nullcontext() if fits else pytest.raises(ValueError, match=r"rows\.jsonl:4"):
        read(actor, tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["eval", "--model", "m"], "needs one engine, not 2 ranks"),
        (["--map"], "--map belongs to --dry-run"),
    ],
)
def test_what_a_start_refuses(monkeypatch, arguments, message):
    """What neither the settings nor the number of ranks alone tell."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        run.start(arguments, None)


def test_ranks_are_needed(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="start with: torchrun --nproc-per-node 2"):
        run.start(["--mode", "full"], None)


# ---------------------------------------------------------------- who serves what


@pytest.mark.parametrize(
    "arguments,ranks,expected",
    [
        ([], 2, [[("rollout", 0, 0)], [("genrm", 3, 0)]]),
        (
            ["--mode", "full"],
            2,
            [[("rollout", 0, 0), ("genrm", 1, 0)], [("rollout", 2, 0), ("genrm", 3, 0)]],
        ),
        (
            ["--model", "m", "--judge", "j", "k"],
            3,
            [[("rollout", 0, 0)], [("genrm", 3, 1)], [("genrm", 5, 0)]],
        ),
        (["--rule", "right", "--model", "m"], 2, [[("rollout", 0, 0)], [("rollout", 2, 0)]]),
    ],
)
def test_the_servers_of_each_rank(arguments, ranks, expected):
    """Role, port after --port, and which of its role's models; a model for each judge."""
    config = parse_config(arguments)
    plans = run.check_settings(config, ranks)
    if not config.judge and not config.rule:
        config = parse_config([*arguments, "--model", "m", "--judge", "j"])
    specs = [run.servers_of(rank, config, plans) for rank in range(ranks)]
    found = [[(spec.role, spec.port - config.port, spec.model) for spec in row] for row in specs]
    assert found == expected
    for row in specs:
        for spec in row:
            of_role = config.judge_models if spec.role == "genrm" else [config.model]
            assert spec.model_dir == of_role[spec.model]


class FakeEngine(Engine):
    """Notes what is asked of it."""

    @classmethod
    def launch(cls, role, rank, port, model_dir, config, log, key, model=0):
        engine = cls(role, rank, f"http://{config.host}:{port}", key, model)
        engine.calls = []
        return engine

    async def ready(self, deadline_s):
        self.calls.append("ready")
        self.capacity = 10 + self.rank

    async def sleep(self):
        self.calls.append("sleep")

    async def close(self):
        pass


def test_every_rank_has_a_handle_on_every_engine(monkeypatch, tmp_path):
    """By role, in the order of ranks, with the one key of the run; its own sleep before it is asked."""
    monkeypatch.setattr(fleet, "Engine", FakeEngine)
    config = parse_config(
        ["--mode", "full", "--model", "m", "--judge", "j", "--out", str(tmp_path)]
    )
    plans, meetings = run.check_settings(config, 3), {}

    async def rank(number):
        world = FakeWorld(number, 3, meetings)
        async with fleet.Fleet(config, world) as engines:
            await engines.launch(run.servers_of(number, config, plans))
            await engines.ready()
            return await engines.connect(None)

    async def all_ranks():
        return await asyncio.gather(*map(rank, range(3)))

    pools = asyncio.run(all_ranks())
    handles = [engine for each in pools for pool in each.values() for engine in pool.all_engines]
    assert len({engine.key for engine in handles}) == 1 and len(handles[0].key) == 64
    for number, each in enumerate(pools):
        for offset, role in enumerate(("rollout", "genrm")):
            found = each[role].all_engines
            facts = [(engine.rank, engine.url, engine.capacity) for engine in found]
            urls = [f"http://127.0.0.1:{config.port + 2 * n + offset}" for n in range(3)]
            assert facts == [(n, urls[n], 10 + n) for n in range(3)]
            assert found[number].calls == ["ready", "sleep"]
