"""The command's messages about bad input: one line, before anything starts where possible."""

import asyncio
import dataclasses
import json
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from safetensors import torch as safetensors

import build
import config
import run
from engines import fleet
from engines.engine import Engine
from extras import dry_run
from extras.memory.estimate import with_micro_batch
from genrm import formats_of
from inputs import hf_directory, tokenization
from modes import lay_out
from placement import make_placement
from rewards import load_rules
from runtime import atomic_files
from runtime.errors import UserError
from scheduling.measured import ROLES, Split
from state import Environment
from tests.support import models
from tests.support.fakes import FakeWorld
from tests.support.patience import run_process
from tests.support.rows import jsonl
from tests.support.templates import GEMMA
from training import model
from training.hf_weights import HFWeights
from training.model import check_models

UNFIT = [
    ("run.py", "RANK=0 WORLD_SIZE=2", "start with: .* which sets LOCAL_RANK, LOCAL_WORLD_SIZE"),
    ("run.py", "WORLD_SIZE=two", "WORLD_SIZE=two in the environment is not a number: unset it"),
    ("run.py", "WORLD_SIZE=²", "WORLD_SIZE=² in the environment is not a number: unset it"),
    ("run.py", "PYTHONSAFEPATH=1", r"start with: torchrun .* run\.py .*"),
    ("run.py", "PYTHONOPTIMIZE=1", "unset PYTHONOPTIMIZE and leave out -O: they drop checks"),
    ("examples/sft.py", "", r"start with: torchrun .* examples/sft\.py .*"),
]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_only_loses_what_is_printed_there(closed):
    command = f"exec {sys.executable} run.py --steps 1 --mode unknown {closed}"
    ran = run_process("bash", "-c", command)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert ran.stderr.startswith("error: --mode unknown") or "2>" in closed


@pytest.mark.parametrize("program,variables,line", UNFIT)
def test_what_the_environment_must_not_hold_is_named(program, variables, line):
    """A cluster may set some of torchrun's variables; an image may set PYTHONOPTIMIZE."""
    ranked = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environment = {name: text for name, text in os.environ.items() if name not in ranked}
    command = [sys.executable, *program.split(), "--steps", "1", "--device", "cpu"]
    environment |= dict(each.split("=") for each in variables.split())
    ran = run_process(*command, env=environment)
    assert re.fullmatch(f"error: {line}\n", ran.stderr) and ran.returncode == 2


def test_a_value_error_that_is_no_users_shows_its_place():
    """A broken invariant isn't the user's mistake, though zip(strict=True) also raises a ValueError."""
    broken = "import run; run.build.check_settings = lambda *_: list(zip([1], [], strict=True))"
    ran = run_process(sys.executable, "-c", f"{broken}; run.main([])")
    assert ran.returncode not in (0, 2) and "error: zip()" not in ran.stderr
    assert "in <lambda>" in ran.stderr and "ValueError: zip() argument 2" in ran.stderr


GOOD_ROW = {"prompt": "What is 3+4?"}
GPT2 = '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    return models.save_model(tmp_path_factory.mktemp("own") / "actor")


@pytest.fixture
def rows(tmp_path):
    return jsonl(tmp_path / "rows.jsonl", [GOOD_ROW] * 4)


def read(actor: Path, rows: Path, *more: str) -> build.Inputs:
    """Read all that a rank reads of models and prompts before a start; return parts of a controller."""
    given = ["--model", str(actor), "--rule", "length:9", "--data", str(rows), *map(str, more)]
    settings = config.parse_config([*given, "--max-model-len", "512", "--max-new-tokens", "12"])
    build.check_settings(settings, 2)
    build.check_directories(settings, lay_out(settings, 2)[0])
    settings = with_micro_batch(settings)
    return build.load_inputs(settings, load_rules(settings), print)


def damaged(home: Path, file: str, change) -> Path:
    whole = (home / file).read_bytes()
    (home / file).unlink()
    if change:
        (home / file).write_bytes(change(whole))
    return home


def saying(**more):
    return lambda whole: json.dumps(json.loads(whole) | more).encode()


def holding(change):
    """Make a function that changes a safetensors file's tensors by name with `change`."""
    return lambda whole: safetensors.save(change(safetensors.load(whole)))


def eight_bits(tensors):
    return tensors | {UP: tensors[UP].to(torch.float8_e4m3fn)}


def swapped(whole):
    found = json.loads(whole)
    vocabulary = found["model"]["vocab"]
    vocabulary |= {"1": vocabulary["2"], "2": vocabulary["1"]}
    return json.dumps(found).encode()


def adding(*names):
    return holding(lambda tensors: tensors | {name: torch.ones(1, 64) for name in names})


def without(name):
    return holding(lambda tensors: {each: tensors[each] for each in tensors if each != name})


def two_more(whole):
    """Add two tokens to a tokenizer of 384, more than the model has embedding rows."""
    found = json.loads(whole)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    found["added_tokens"] += [{"id": 384 + n, "content": f"<{n}>"} | plain for n in range(2)]
    return json.dumps(found).encode()


UP = "model.layers.0.mlp.up_proj.weight"
TOO_MANY = "has 386 tokens, its embeddings 384 rows"
OWN_CODE = {"auto_map": {"AutoModel": "own.Own"}}
OWN_CLASS = saying(architectures=["OwnForCausalLM"])
READS_511 = saying(max_position_embeddings=511)
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
READS_512 = saying(max_position_embeddings=256, rope_scaling=SCALED)
THREE_LAYERS = saying(num_hidden_layers=3, layer_types=["full_attention"] * 3)


DAMAGES = [
    ("model.safetensors", lambda whole: whole[:-1000], r"model\.safetensors"),
    ("model.safetensors", None, r"no model\.safetensors in it"),
    ("model.safetensors", without(UP), f"lack {UP}"),
    ("model.safetensors", without("lm_head.weight"), "lack lm_head.weight"),
    ("model.safetensors", holding(eight_bits), f"{UP} is F8_E4M3: quantized"),
    ("model.safetensors", adding(f"{UP}_scale_inv", "score.weight"), f"reads {UP}_scale_inv"),
    ("config.json", THREE_LAYERS, "lack model.layers.2.input_layernorm.weight"),
    ("config.json", saying(intermediate_size=64), r"shape \[64, 128\], and needs \[64, 64"),
    ("config.json", saying(tie_word_embeddings=True), "isn't model.embed_tokens.weight, but"),
    ("config.json", saying(pad_token_id=384), "has 385 tokens, its embeddings 384 rows"),
    ("config.json", saying(quantization_config={"quant_method": "fp8"}), "quantized weights"),
    ("config.json", saying(**OWN_CODE), "config.json has auto_map"),
    ("config.json", OWN_CLASS, r"\['OwnForCausalLM'\] are not Qwen3ForCausalLM or "),
    ("config.json", None, "has no config.json"),
    ("config.json", lambda _: b"{", "config.json is not valid JSON"),
    ("config.json", lambda _: b"[" * 10**5 + b"]" * 10**5, "config.json is not valid JSON: max"),
    ("config.json", saying(eos_token_id=10), "its eos_token_id 10, which is the text '"),
    ("config.json", lambda _: GPT2.encode(), "gpt2"),
    ("config.json", saying(hidden_size="64"), "config.json: .*hidden_size"),
    ("config.json", saying(attention_bias=True), "not supported: attention_bias"),
    ("config.json", READS_511, r"its-name: --max-model-len 512 is above its limit, 511$"),
    ("generation_config.json", saying(eos_token_id=[2, 400]), "has 401 tokens"),
    ("generation_config.json", saying(eos_token_id="2"), "eos_token_id is a token's number"),
    ("generation_config.json", saying(eos_token_id=[2, -1]), "eos_token_id is a token's number"),
    ("tokenizer.json", two_more, TOO_MANY),
    ("tokenizer.json", lambda _: b"{", "no tokenizer could be loaded from"),
    ("tokenizer_config.json", saying(deep=[OWN_CODE]), "tokenizer_config.json has auto_map"),
    ("tokenizer_config.json", saying(pad_token=0), "no tokenizer could be loaded from"),
]


@pytest.mark.parametrize("file,change,message", DAMAGES)
def test_a_model_that_cannot_be_used_is_named(tmp_path, rows, file, change, message):
    home = damaged(models.save_model(tmp_path / "its-name"), file, change)
    with pytest.raises(UserError, match=message) as caught:
        read(home, rows)
    assert "its-name" in str(caught.value) and "\n" not in str(caught.value)


def test_the_index_says_which_files_are_read(tmp_path, rows):
    """It must exclude another save's shards beside them; without an index the choice is ambiguous."""
    home = models.save_model(tmp_path / "its-name")
    write = safetensors.save_file
    saved = safetensors.load_file(home / "model.safetensors")
    (home / "model.safetensors").unlink()
    files = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    weight_map = {name: files[number % 2] for number, name in enumerate(saved)}
    for file in files:
        shard = {name: saved[name] for name in saved if weight_map[name] == file}
        write(shard, home / file)
        stray = {name: 2 * tensor for name, tensor in shard.items()}
        write(stray, home / f"more{file}")
    index = home / hf_directory.INDEX
    index.write_text(json.dumps({"weight_map": weight_map}))
    read(home, rows)
    found = HFWeights(str(home))
    assert found.file_of.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    elsewhere = json.dumps({"weight_map": {UP: "sub/model.safetensors"}})
    damages = {
        r"\S* is in model-2-of-2.safetensors and in": lambda: write(saved, home / files[1]),
        "no model-1-of-2.safetensors in it": (home / files[0]).unlink,
        "no sub/model.safetensors in it": lambda: index.write_text(elsewhere),
        "index.json has no weight_map": lambda: index.write_text('{"weight_map": null}'),
        "unclear if model-2-of-2.safetensors belongs to it": index.unlink,
    }
    for message, damage in damages.items():
        damage()
        with pytest.raises(UserError, match=f"--model .*its-name: .*{message}"):
            read(home, rows)


def scores_are(shape):
    return holding(lambda tensors: tensors | {"score.weight": torch.ones(shape)})


OF_OTHERS = [
    ("--judge", "config.json", OWN_CLASS, "architectures"),
    ("--judge", "config.json", saying(eos_token_id=[2, 10]), "eos_token_id 10, which is"),
    ("--critic", "config.json", saying(eos_token_id=10), ""),
    ("--judge", "config.json", saying(eos_token_id=[-1, 2]), ""),
    ("--judge", "config.json", READS_511, "--max-model-len 512 is above its limit, 511"),
    ("--judge", "config.json", READS_512, ""),
    ("--judge", "model.safetensors", without(UP), f"lack {UP}"),
    ("--judge", "model.safetensors", scores_are((1, 64)), "nothing here reads score.weight"),
    ("--judge", "tokenizer.json", two_more, TOO_MANY),
    ("--judge-format score --judge", "model.safetensors", holding(dict), "lack score.weight"),
    ("--critic", "model.safetensors", holding(dict), "lack score.weight"),
    ("--critic", "model.safetensors", scores_are((2, 64)), r"\[2, 64\], and needs \[1, 64\]"),
    ("--critic", "model.safetensors", adding("score.weight", "a.inv_freq"), ""),
    ("--critic", "tokenizer.json", two_more, TOO_MANY),
    ("--critic", "tokenizer.json", swapped, "'1' isn't the token"),
]


@pytest.mark.parametrize("given,file,change,message", OF_OTHERS)
def test_models_beside_it_are_looked_at(actor, tmp_path, rows, given, file, change, message):
    """A critic must be accepted even with an output layer and frequencies that it won't read."""
    home, setting = models.save_model(tmp_path / "its-name"), given.split()[-1]
    if setting == "--critic" and file != "model.safetensors":
        damaged(home, "model.safetensors", adding("score.weight"))
    more = ("--judge-max-new-tokens", 12, "--algorithm", "ppo")
    expected = f"^{setting} \\S*its-name: .*{message}"
    with pytest.raises(UserError, match=expected) if message else nullcontext():
        read(actor, rows, *given.split(), damaged(home, file, change), *more)


def rows_of(path: Path, *answers) -> Path:
    rows = enumerate(answers)
    return jsonl(path, [{"prompt": f"{path.stem} {n}?", "answer": answer} for n, answer in rows])


def test_evaluation_has_the_rows_of_a_file_of_its_own(actor, tmp_path, capsys):
    """Only rows that are too long may be dropped, and then all of --data is trained on.

    Without such a file a tenth of --data measures, if it has keys."""
    rows = rows_of(tmp_path / "rows.jsonl", *range(15), *[None] * 15)
    own = rows_of(tmp_path / "own.jsonl", *range(5))
    own.write_text(json.dumps({"prompt": "x" * 900, "answer": 1}) + "\n" + own.read_text())
    source = read(actor, rows, "--eval-data", own).prompts.source
    assert f"1 of 6 prompts in {own} are left out: over --max-model-len" in capsys.readouterr().out
    found = [(prompt.question, prompt.answer_key) for prompt in source.held_out]
    assert found == [(f"own {n}?", str(n)) for n in range(5)]
    epoch = {source.training(number).question for number in range(30)}
    assert epoch == {f"rows {n}?" for n in range(30)}
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(rows.read_text().splitlines(True)[:3]) + own.read_text() * 2)
    read(actor, rows, "--eval-data", mixed)
    said = f"{mixed}: of 13 prompts that measure 5 repeat another, 3 are also trained on\n"
    assert capsys.readouterr().out.endswith(said)
    source = read(actor, rows, "--eval-samples", 2).prompts.source
    others = {source.training(number).question for number in range(27)}
    assert source.count == 27 and len(source.held_out) == 3
    assert {prompt.question for prompt in source.held_out} == epoch - others
    assert all(prompt.answer_key for prompt in source.held_out)
    with pytest.raises(UserError, match="--eval-samples: no held-out prompt"):
        read(actor, rows_of(rows, *range(9)), "--eval-samples", 2)


def test_an_evaluation_has_all_rows_of_its_file(actor, tmp_path):
    """Rows may be as long as the context, whatever a trainer could take."""
    settings = ["--steps", "0", "--model", str(actor), "--max-model-len", "9999"]
    settings += ["--max-new-tokens", "12"]
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "7" * 9000, "answer": 1}] * 30)
    settings = config.parse_config([*settings, "--eval-data", str(path)])
    _, splits = build.check_settings(settings, 2)
    assert splits == [Split("partial", 2, 0)]
    held_out = build.load_inputs(settings, load_rules(settings), print).prompts.source.held_out
    assert [prompt.answer_key for prompt in held_out] == ["1"] * 30
    jsonl(path, [{"prompt": "3+4=", "answr": 7}])
    with pytest.raises(UserError, match=r"rows\.jsonl:1: `answer` is missing, for --eval-data"):
        build.load_inputs(settings, load_rules(settings), print)


def test_a_file_that_cannot_evaluate_is_named(actor, tmp_path, rows):
    for answers, more, message in (
        ((1, None), (), "^{}:2: `answer` is missing, for --eval-data; the row has "),
        ((), (), "^--eval-data {}: the file holds no row$"),
        (("x" * 9, ""), ("--judge-format", "number"), "^{}:1: --judge-format finds no key in"),
    ):
        own = rows_of(tmp_path / "own.jsonl", *answers)
        with pytest.raises(UserError, match=message.format(own)):
            read(actor, rows, "--eval-data", own, *more)


def test_a_quantized_judge_needs_cuda(actor, tmp_path):
    """On CUDA SGLang has the kernels; but tokens without an embedding must always be refused."""
    home = models.save_model(tmp_path / "its-name")
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    damaged(home, "config.json", saying(quantization_config=quantized))
    damaged(home, "model.safetensors", holding(eight_bits))
    given = f"--model {actor} --judge {home} --max-model-len 512 --max-new-tokens 9"
    settings = config.parse_config(f"{given} --judge-max-new-tokens 9 --device cpu".split())
    on_cuda = dataclasses.replace(settings, device="cuda", dtype="bfloat16")
    formats = formats_of(settings)
    placement = make_placement(settings, 2)
    check_models(on_cuda, placement, formats)
    with pytest.raises(UserError, match=f"{UP} is F8_E4M3: quantized"):
        check_models(settings, placement, formats)
    damaged(home, "tokenizer.json", two_more)
    with pytest.raises(UserError, match="386 tokens"):
        check_models(on_cuda, placement, formats)


@pytest.mark.parametrize("command", ["evaluation", "training", "check"])
def test_every_command_looks_at_its_model(tmp_path, command):
    home = damaged(models.save_model(tmp_path / "model"), "tokenizer.json", two_more)
    given = ["--model", str(home), "--out", f"{tmp_path}/out", "--rule", "right"]
    evaluates = ["--steps", "0", "--eval-data", "d"] if command == "evaluation" else []
    settings = config.parse_config([*given, *evaluates])
    with pytest.raises(UserError, match=f"--model .*: its tokenizer .* {TOO_MANY}"):
        if command == "check":
            dry_run.check(settings)
        else:
            build.check_directories(settings, build.check_settings(settings, 2)[0])
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_of_a_run_is_named(tmp_path):
    """Its last line may be incomplete, because it may have been in the writing."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step" 1}\n{"st')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not valid JSON"):
        list(atomic_files.whole_rows(path))


def test_a_scalar_judge_must_take_every_row(actor, tmp_path, monkeypatch):
    """It is shown all turns; a generative judge sees only what its format uses."""
    monkeypatch.setattr(model, "check_models", lambda *_: None)
    tokenizer = tokenization.load_tokenizer(str(models.save_model(tmp_path / "judge")))
    tokenizer.chat_template = GEMMA
    tokenizer.save_pretrained(tmp_path / "judge")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}]
    rows = jsonl(tmp_path / "rows.jsonl", [GOOD_ROW, {"messages": turns}])
    judge = ("--judge", tmp_path / "judge", "--judge-max-new-tokens", 12, "--judge-format")
    read(actor, rows, *judge, "chat")
    with pytest.raises(UserError, match=r"rows\.jsonl:2: .*judge refuses turns: System"):
        read(actor, rows, *judge, "score")


OWN = "--model m --judge j"
FULL = "rollout 0 0, genrm 1 0; rollout 2 0; rollout 4 0, genrm 5 1; rollout 6 0"
SERVERS = {f"{OWN} k --mode full --genrm-tp 2": FULL}  # role, port after --port, model of the role
SERVERS |= {f"{OWN} k": "rollout 0 0; genrm 3 1; genrm 5 0"}
SERVERS |= {"--rule right --model m": "rollout 0 0; rollout 2 0"}


@pytest.mark.parametrize("arguments,expected", SERVERS.items())
def test_the_servers_of_each_rank(arguments, expected):
    settings = config.parse_config(arguments.split())
    size = expected.count(";") + 1
    placed = build.check_settings(settings, size)
    specs = [build.servers_of(rank, settings, *placed) for rank in range(size)]
    for row, of_rank in zip(specs, expected.split("; "), strict=True):
        found = [f"{each.role} {each.port - settings.port} {each.model}" for each in row]
        assert ", ".join(found) == of_rank
        for each in row:
            of_role = settings.judge_models if each.role == "genrm" else [settings.model]
            assert each.model_dir == of_role[each.model]


class FakeEngine(Engine):
    """An engine that records calls. Rank 2's judge doesn't fall asleep."""

    @classmethod
    def launch(cls, role, rank, port, model_dir, config, log, key, stride):
        engine = cls(role, rank, f"http://{config.host}:{port}", key)
        engine.calls = []
        return engine

    async def ready_asleep(self, deadline_s):
        self.calls.append(f"asleep within {deadline_s:g} s")
        self.capacity = 10 + self.rank

    async def close(self):
        pass


def test_with_cuda_a_role_starts_once_all_devices_have_room(monkeypatch, tmp_path):
    """An engine's second rank may return its device later than the first one reports."""
    settings = config.parse_config([*f"{OWN} --mode full --out".split(), str(tmp_path)])
    settings = dataclasses.replace(settings, device="cuda", dtype="bfloat16", mem_fraction=0.6)
    events, free = [], iter([80e9, 30e9, 47e9, 48e9, 30e9, 79e9, 80e9, 80e9])

    def free_bytes():
        events.append(next(free))
        return events[-1]

    class OnCuda(FakeEngine):
        @classmethod
        def launch(cls, role, *more):
            events.append(role)
            return super().launch(role, *more)

    monkeypatch.setattr(fleet.devices, "free_bytes", free_bytes)
    monkeypatch.setattr(fleet.devices.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("LOCAL_RANK", "0")

    async def launch():
        async with fleet.Fleet(settings, FakeWorld(0, 1, {})) as engines:
            await engines.launch([fleet.ServerSpec(role, 1, "m", engine=OnCuda) for role in ROLES])

    asyncio.run(launch())
    # two per role: with the machine's first engine, and with the others
    late = [30e9, 47e9, 48e9]
    assert events == [80e9, "rollout", *late, 30e9, 79e9, "genrm", 80e9, 80e9]


@pytest.mark.parametrize("rank, first", [(4, False), (5, False), (6, True), (7, False)])
def test_the_first_engine_of_a_machine_compiles(monkeypatch, rank, first):
    """Judges on ranks 2, 3 and 6, 7 of machines with four ranks must do so."""
    monkeypatch.setenv("LOCAL_RANK", str(rank % 4))
    has = [False, False, True, True] * 2
    world = SimpleNamespace(rank=rank, gather=AsyncMock(return_value=has))
    engines = fleet.Fleet(config.parse_config([]), world)
    is_first = asyncio.run(engines._is_first_here(["a judge"] * has[rank]))
    assert (is_first and has[rank]) == first


def test_every_rank_has_a_handle_on_every_engine(tmp_path):
    """Handles are by role, in rank order, with the run's one key; each engine sleeps before others use it.

    One that doesn't fall asleep must be ended, because the next would measure a full device."""
    settings = config.parse_config([*f"{OWN} --mode full --out".split(), str(tmp_path)])
    placed, meetings = build.check_settings(settings, 3), {}

    async def rank(number):
        world = FakeWorld(number, 3, meetings)
        async with fleet.Fleet(settings, world) as engines:
            specs = build.servers_of(number, settings, *placed)
            await engines.launch([spec._replace(engine=FakeEngine) for spec in specs])
            await engines.ready()
            return await engines.connect(None, world)

    async def all_ranks():
        return await asyncio.gather(*map(rank, range(3)))

    pools = asyncio.run(all_ranks())
    handles = [engine for each in pools for pool in each.values() for engine in pool.all_engines]
    assert len({engine.key for engine in handles}) == 1 and len(handles[0].key) == 64
    for number, each in enumerate(pools):
        for offset, role in enumerate(("rollout", "genrm")):
            found = each[role].all_engines
            urls = [f"http://127.0.0.1:{settings.port + 2 * n + offset}" for n in range(3)]
            assert [(engine.rank, engine.url) for engine in found] == list(enumerate(urls))
            assert [engine.capacity for engine in found] == [10, 11, 12]
            assert found[number].calls == ["asleep within 540 s"]


@pytest.mark.parametrize("local_rank, raises", [("0", True), ("1", False)])
def test_directories_are_checked_once_on_each_machine(monkeypatch, local_rank, raises):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(run, "joined", lambda _: nullcontext((FakeWorld(0, 1, {}), None)))
    monkeypatch.setattr(
        run.build, "check_directories", Mock(side_effect=UserError("no such model"))
    )
    checks = [Mock(side_effect=UserError("checked elsewhere"))]
    monkeypatch.setattr(run, "added", lambda hook: checks)
    given = config.parse_config(["--mode", "full"])
    with pytest.raises(UserError, match="no such model" if raises else "checked elsewhere"):
        asyncio.run(run.run(given, *lay_out(given, 1), run.shutdown.Stop()))


HOW_TO_GO_ON = [
    (3, "auto", "the same command continues"),
    (3, "DIR", "the same command, without --resume, continues"),
    (2, "auto", "nothing was saved"),
]


@pytest.mark.parametrize("newest, resume, end", HOW_TO_GO_ON)
def test_a_stopped_run_says_how_to_go_on(monkeypatch, newest, resume, end):
    c = SimpleNamespace(
        environment=Environment(),
        checkpoints=SimpleNamespace(newest=newest),
        state=SimpleNamespace(step=3),
        config=SimpleNamespace(steps=40, resume=resume),
    )
    joined = nullcontext((FakeWorld(0, 1, {}), None))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(run, "joined", lambda _: joined)
    fleet = SimpleNamespace(while_up=lambda work: work)
    monkeypatch.setattr(run, "Fleet", lambda *_: nullcontext(fleet))
    monkeypatch.setattr(run, "controller_of", AsyncMock(return_value=c))
    work = build.TRAINING._replace(run=AsyncMock(return_value=True))
    monkeypatch.setattr(build, "TRAINING", work)
    monkeypatch.setattr(run, "added", lambda hook: [])
    given = config.parse_config(["--mode", "full"])
    line = asyncio.run(run.run(given, *lay_out(given, 1), run.shutdown.Stop()))
    assert line == f"stopped after 3 of 40 steps; {end}"
