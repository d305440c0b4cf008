"""Settings: from the command line to a Config; presets, commands, impossible combinations and messages."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest

import config as settings
from build import check_settings
from config import DEMO_MODELS, GROUPS, PRESETS, Config, parse_config, settings_of
from engines import server
from reporting.describe import run_metadata
from scheduling.measured import Split
from tests import ROOT
from tests.support.patience import run_process

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
# DESIGN.md: names that outside scripts may rely on
PROMISED = """preset mode out steps seed resume model judge rule data algorithm prompts_per_step
answers_per_prompt rollout_ranks rebalance over_dispatch tp pp sp max_tokens_per_micro_batch lr
save_every keep save_hf_every deterministic dry_run"""
# settings derived from the others if not given
RESOLVED = ("preset", "out", "judge_format", "model", "judge")
PATHS = ["--model", "m", "--judge", "j"]
DEMOS = {"": "written", "--steps 0": "written", "--preset images": "drawn"}  # which models they use
DEMO_JUDGE = os.path.relpath(DEMO_MODELS / "written" / "judge")


def test_without_arguments_the_demo():
    config = parse_config([])
    written = os.path.relpath(DEMO_MODELS / "written")
    filled_in = dict(preset="tiny", out="runs/tiny-partial", judge_format=("addition",))
    filled_in |= dict(model=f"{written}/actor", judge=(f"{written}/judge",))
    assert config == dataclasses.replace(Config(), **PRESETS["tiny"] | filled_in)
    assert (config.command, config.mode) == ("rl", "partial")
    assert (config.lr, config.lr_decay_to) == (5e-4, 0.1)
    assert (config.max_new_tokens, config.max_model_len) == (72, 256)
    assert config.algorithm_defaults == ("critic_lr=1e-3",)


def test_a_flag_of_several_values_adds_when_it_is_given_again():
    arguments = [*PATHS, "--judge", "k", "--rule", "right", "length:4", "--rule=number"]
    arguments += ["--judge-format", "chat", "--judge-format", "number", "--reward-weights", "1"]
    config = parse_config([*arguments, "--reward-weights", "2", "3", "4", "5"])
    assert config.judge == ("j", "k") and config.rule == ("right", "length:4", "number")
    assert config.judge_format == ("chat", "number")
    assert config.reward_weights == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_a_path_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = "--model=~/m --judge ~/j k~ --rule=~/my.py:score --out=~ --data a/~"
    config = parse_config(paths.split())
    assert (config.model, config.judge) == ("/home/me/m", ("/home/me/j", "k~"))
    assert (config.rule, config.out) == (("/home/me/my.py:score",), "/home/me")
    assert config.data == "a/~"


def test_with_a_model_the_fields_defaults():
    """Settings that suit only the demo must not apply: the preset is `base`; the context is the model's."""
    config = parse_config(PATHS)
    assert (config.preset, config.out) == ("base", "runs/base-partial")
    assert (config.lr, config.lr_decay_to) == (1e-6, 1.0)
    assert (config.max_new_tokens, config.max_model_len) == (1024, 0)
    assert parse_config([*PATHS, "--preset", "tiny"]).lr == 5e-4


@pytest.mark.parametrize(
    "arguments,field,value",
    [
        ("--mode full", "out", "runs/tiny-full"),
        ("--steps 0", "out", "runs/eval"),
        ("--steps 0 --out runs/my", "out", "runs/my"),
        ("--answer-tokens 32", "max_new_tokens", 32),
        ("--steps 0 --answer-tokens 80", "max_new_tokens", 80),
        ("--model m --judge j", "judge_format", ("addition",)),
        ("--model m --judge j --data d", "judge_format", ("chat",)),
        ("--model m --judge j --eval-data d", "judge_format", ("addition",)),
        ("--model m --steps 0 --eval-data d", "judge_format", ("chat",)),
        ("--model m --judge j --data d --judge-format harm", "judge_format", ("harm",)),
        # the reward's judges, then the cost's; without --model the demo's, for the loop
        ("", "judge_models", (DEMO_JUDGE,)),
        ("--model m --judge j k --reward-weights 0.7 0.3", "judge_models", ("j", "k")),
        ("--model m --judge j --cost-judge c", "judge_models", ("j", "c")),
        ("--model m --rule right", "judge_models", ()),
        ("--model m --rule right --cost-judge c --reward-weights 1", "judge_models", ("c",)),
    ],
)
def test_what_is_filled_in_follows_from_the_rest(arguments, field, value):
    config = parse_config(arguments.split())
    derived = dict(judge_models=config.judge_models)
    assert (vars(config) | derived)[field] == value


@pytest.mark.parametrize("given,name", DEMOS.items())
def test_the_demos_models_are_found_from_any_folder(given, name, tmp_path, monkeypatch):
    """Their path must not depend on the project's location: a checkpoint holds it and may be moved."""
    config = parse_config(given.split())
    assert config.model == os.path.relpath(DEMO_MODELS / name / "actor")
    monkeypatch.chdir(tmp_path)
    elsewhere = parse_config(given.split())
    for path in (elsewhere.model, *elsewhere.judge):
        assert Path(path, "model.safetensors").is_file()
    assert len(elsewhere.judge) == (not config.evaluates)


@pytest.mark.parametrize("name", PRESETS)
def test_the_command_line_beats_the_preset_which_beats_the_defaults(name):
    config, changes = parse_config(["--preset", name]), PRESETS[name]
    assert all(type(value) is type(FIELDS[key].default) for key, value in changes.items())
    check_settings(config, 2)
    for field in FIELDS.values():
        if field.name not in RESOLVED:
            assert vars(config)[field.name] == changes.get(field.name, field.default), field.name
    given = parse_config(["--lr", "0.5", "--preset", name, "--dtype", "float32"])
    assert (given.lr, given.dtype) == (0.5, "float32")


FLAGS = [each for each in settings_of(Config) if each.metadata["group"] in GROUPS]


@pytest.mark.parametrize("timeout_s", [10.0, 600.0])
def test_nothing_is_waited_for_longer_than_the_other_controllers_wait(timeout_s):
    """Every timeout must be a fraction of one, and a lost engine's owner must notice first."""
    config = Config(timeout_s=timeout_s)
    assert config.engine_lost_s == timeout_s / 2 < config.engine_start_s < timeout_s


ONE_EACH = "--reward-weights 1.0: one for each --judge, then each --rule, then --environment, so 2"
INTEGERS = [each for each in FLAGS if each.type == "int"]
POSITIVE = [settings.dashed(each.name) for each in INTEGERS if each.metadata["low"] == 1]
ONLY_ADDITION = "needs --model: the demo's models only know addition"
REFUSED = """--algorithm ppp; --preset huge; --judge-format chat chat; --lr -1; --lr nan; --mem-fraction 2;
--lr-decay-to 1.5; --lr-decay-to -0.1; --temperature 0; --over-dispatch 0.5; --lr inf; --timeout-s 1e7;
--seed 9223372036854775808; --lora 9223372036854775808; --algorithm grpo kl_coef=inf;
--algorithm grpo ptx_data=; --algorithm grpo max_refill_waves=9223372036854775808;
--placement engines=0-9999999"""
BAD = [
    ("--stepz 3", "unrecognized arguments: --stepz 3; see --help"),
    # a new setting would change what an abbreviation means
    ("--step 3", "unrecognized arguments: --step 3"),
    ("--steps 1.5", "argument --steps: invalid int value: '1.5'"),
    ("--judge j", f"--judge {ONLY_ADDITION}"),
    ("--data d --rule right", f"--data {ONLY_ADDITION}"),
    ("--eval-data d", f"--eval-data {ONLY_ADDITION}"),
    ("--eval-samples -1", "--eval-samples -1: at least 0 is needed"),
    ("--steps -1", "--steps -1: at least 0 is needed"),
    ("--steps 0 --eval-data d", f"--eval-data {ONLY_ADDITION}"),
    ("--steps 0 --model m --data d", "--steps 0 needs prompts to answer: --eval-data FILE; --pre"),
    ("--steps 0 --resume run/checkpoints/step_3", "--steps 0 reads no checkpoint: evaluate the Hu"),
    ("--model m --judge j k --reward-weights 1", ONE_EACH),
    ("--model m --judge j k --reward-weights 0 0", "weights 0.0 0.0: finite"),
    ("--model m --judge j k --reward-weights 1 nan", "weights 1.0 nan: finite"),
    ("--reward-weights", "argument --reward-weights: expected at least one argument"),
    (
        "--model m --algorithm grpo",
        "needs a --judge, a --rule or an --environment to score answers",
    ),
    (
        "--model m --teacher t --algorithm grpo kl_coef=0.1",
        "a --judge, a --rule or an --environment",
    ),
    ("--model m --teacher t --rule right", "needs kl_coef above 0 with --teacher"),
    ("--model m --rule right --algorithm distill", "needs a --teacher"),
    ("--sp", "--sp needs --tp 2"),
    ("--answer-tokens 9 --max-new-tokens 8", "9: --max-new-tokens 8 contradicts it"),
    ("--answer-tokens 9 --algorithm grpo overlong_from=3", "needs overlong_from=0 with --answer"),
    ("--max-tokens-per-micro-batch 255", "micro-batch 255: one sample may have 256 tokens"),
    ("--model m --judge j --max-new-tokens 8192", "8192: one sample may have 8193 tokens"),
    *[(f"--{name} 0", f"--{name} 0: at least 1") for name in POSITIVE],
    *[(each, each.split()[0]) for each in REFUSED.split(";")],
]
ON_RANKS = [  # errors that depend on the number of ranks; test_placement.py has more about splits
    ("--tp 2", "tp 2 x pp 1 = 2 doesn't divide the 3 ranks of actor", 3),
    ("--model m --judge j k l --rollout-ranks 6", "this run takes 1, 2, 3, 4, 5", 8),
]


@pytest.mark.parametrize("arguments,message,ranks", [*((*row, 2) for row in BAD), *ON_RANKS])
def test_a_bad_setting_is_named(arguments, message, ranks):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        check_settings(parse_config(arguments.split()), ranks)
    assert "\n" not in str(caught.value)


RUNS = (
    "--lr 3e-7 --no-deterministic --no-memory-check --rebalance --reward-weights 0.1 2 0 --log-samples 0 "
    "--rule right length:4 --model m --judge j --algorithm ppo kl_coef=0.1 --recompute -1 "
    "--placement engines=0-1_actor=2",
    "--preset images --seed -7 --answer-tokens 9",
    "--steps 0 --model m --eval-data d --eval-samples 4",
    "",
)


@pytest.mark.parametrize("arguments", RUNS)
def test_a_run_s_config_json_is_the_run(tmp_path, monkeypatch, arguments):
    """So a resume by it is exact; the command line wins, also over lists."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "config.json"
    config = parse_config([word.replace("_actor", " actor") for word in arguments.split()])
    path.write_text(json.dumps(run_metadata(config)))
    assert parse_config(["--config", str(path)]) == config
    given = ["--seed", "5", "--rule", "number", "--config", str(path), "--deterministic"]
    changed = dict(seed=5, rule=() if config.evaluates else ("number",), deterministic=True)
    changed["reward_weights"] = ()
    path.write_text(json.dumps(run_metadata(config) | {"reward_weights": []}))
    assert parse_config(given) == dataclasses.replace(config, **changed)


def test_a_run_s_folder_that_moved_is_the_runs(tmp_path, monkeypatch):
    """Else the run would begin again in the folder that was. A copy elsewhere still names that folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("moved", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(run_metadata(parse_config([]))))
    (tmp_path / "moved" / "lock").touch()
    assert parse_config(["--config", f"{tmp_path}/moved/config.json"]).out == f"{tmp_path}/moved"
    assert parse_config(["--config", f"{tmp_path}/copy/config.json"]).out == "runs/tiny-partial"
    other = ["--config", f"{tmp_path}/moved/config.json", "--out", "elsewhere"]
    assert parse_config(other).out == "elsewhere"


def test_the_examples_of_config_are_whole(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse_config(["--config", "examples/demo.json"]) == parse_config([])
    real = parse_config(["--config", "examples/smollm2.json"])
    assert (real.lr, real.rule, real.preset) == (1e-5, ("number",), "base")


BAD_FILES = {
    "{": "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    "[1]": 'an object of settings is needed, such as {"lr": 1e-6}',
    '{"weight_decay": 1}': "weight_decay is not a setting",
    '{"lr": "fast"}': "argument --lr: invalid float value: 'fast'; see --help",
    '{"lr": true}': "argument --lr: expected one argument; see --help",
    '{"steps": false}': "steps needs a value, not false",
    '{"judge": false}': "judge needs a value, not false",
    '{"lr": ' + "[" * 10**5 + "]" * 10**5 + "}": "maximum recursion depth exceeded",
    '{"sp": "yes"}': "argument --sp: ignored explicit argument 'yes'; see --help",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_a_bad_file_of_settings_is_named(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"--config {path}: {BAD_FILES[content]}")):
        parse_config(["--config", str(path)])
    with pytest.raises(ValueError, match=r"^--config none: .*No such file"):
        parse_config(["--config", "none"])


@pytest.mark.parametrize("value", ["", " ", "runs/mine\r", "a\nb", "\x1b[2J"])
def test_a_text_is_neither_empty_nor_has_controls(value):
    """An unset variable in quotes must not stand for a default, which would learn the demo's sums."""
    texts = [each for each in FLAGS if each.type in ("str", "Texts")]
    assert {"data", "out", "rule", "template"} < {each.name for each in texts}
    for field in texts:
        name = settings.dashed(field.name)
        with pytest.raises(ValueError, match=f"^argument --{name}: invalid text value"):
            parse_config(["--model", "m", f"--{name}", value])


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, settings.MOST])
def test_any_seed_is_one_for_an_engine(seed):
    """NumPy, which an engine seeds, takes 32 bits."""
    config = parse_config(["--seed", str(seed)])
    flags = server.server_flags("rollout", 1, 30000, config.model, config)
    assert 0 <= int(flags[flags.index("--random-seed") + 1]) < 2**32


@pytest.mark.parametrize("role", ["rollout", "genrm"])
def test_an_engine_stays_on_one_machine(role):
    config = parse_config([f"--{role}-tp", "4", "--mode", "full"])
    assert check_settings(config, 12, 4) == check_settings(config, 12)
    expected = f"--{role}-tp 4 doesn't divide 6 ranks of a machine"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        check_settings(config, 12, 6)


def test_a_judge_that_writes_nothing_needs_no_room_for_it():
    given = "--model m --judge j --max-model-len 128 --max-new-tokens 24 --judge-format score"
    assert parse_config(given.split()).max_model_len == 128


def test_what_is_promised_is_a_flag():
    """Each flag must have a heading in --help; an extra's flag is removed with the extra."""
    assert all(FIELDS[name].metadata["group"] for name in PROMISED.split())


def test_an_evaluation_has_no_use_for_what_is_for_training():
    """A training command must therefore evaluate whatever it sets: all training settings have defaults."""
    trains = "--model m --data d --judge j k --rule right --reward-weights 1 2 3 --algorithm ppo"
    trains += " --placement standalone --ahead 1 --tp 2 --sp --max-tokens-per-micro-batch 99999"
    trains += " --mode full --genrm-tp 2 --save-every 1 --judge-format number chat"
    kept = "--model m --eval-data e --judge-format number --eval-samples 4 --rollout-tp 2 --dry-run"
    evaluates = ["--steps", "0", *kept.split()]
    config = parse_config([*trains.split(), *evaluates])
    assert config == parse_config(evaluates) and (config.dry_run, config.rollout_tp) == (True, 2)
    assert check_settings(config, 2)[1] == [Split("partial", 2, 0)]
    for field in FLAGS:
        if not GROUPS.get(field.metadata["group"]) and field.name not in ("steps", "dry_run"):
            assert vars(config)[field.name] == field.default, field.name
    with pytest.raises(ValueError, match="one sample may have 1025 tokens"):
        parse_config([*PATHS, "--max-tokens-per-micro-batch", "512"])
    assert parse_config([*evaluates, "--max-tokens-per-micro-batch", "512"]).evaluates


def test_help():
    heavy = {"torch", "sglang", "transformers", "megatron", "matplotlib"}
    parse = "run.parse_config(['--help'], run.__doc__)"
    code = f"import sys, run\ntry: {parse}\nfinally: assert not {heavy} & sys.modules.keys()"
    ran = run_process(sys.executable, "-c", code)
    assert ran.returncode == 0 and not ran.stderr
    assert "python run.py --steps 0" in ran.stdout
    for group in {field.metadata["group"] for field in FLAGS}:
        assert f"\n{group}:\n" in ran.stdout
