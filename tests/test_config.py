"""Settings: from the command line to a Config, presets, commands, what can't work and how it is said."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import placement
from config import (
    AT_LEAST_1,
    COMMANDS,
    DEMO_MODELS,
    PRESETS,
    Config,
    as_text,
    dashed,
    documented_settings,
    make_out,
    parse_config,
)
from run import check_settings, describe

ROOT = Path(__file__).parent.parent
FIELDS = {field.name: field for field in dataclasses.fields(Config)}
# DESIGN.md: names that scripts outside may rely on
PROMISED = """preset mode out steps seed resume model judge rule data algorithm prompts_per_step
answers_per_prompt rollout_ranks rebalance over_dispatch tp pp cp sp max_tokens_per_micro_batch lr
save_every keep save_hf_every deterministic dry_run rollout_only train_only replay"""
RESOLVED = (
    "preset",
    "out",
    "judge_format",
    "model",
    "judge",
)  # what isn't given follows from the rest
PATHS = ["--model", "m", "--judge", "j"]
DEMO_JUDGE = os.path.relpath(DEMO_MODELS / "written" / "judge")


# ---------------------------------------------------------------- from the command line


def test_without_arguments_the_demo():
    """The preset `tiny`, in partial colocation, with where it goes and how it is judged filled in."""
    config = parse_config([])
    assert (config.command, config.preset, config.mode, config.out) == (
        "rl",
        "tiny",
        "partial",
        "runs/tiny-partial",
    )
    written = os.path.relpath(DEMO_MODELS / "written")
    filled_in = dict(preset="tiny", out="runs/tiny-partial", judge_format=("addition",))
    filled_in |= dict(model=f"{written}/actor", judge=(f"{written}/judge",))
    assert config == dataclasses.replace(Config(), **PRESETS["tiny"] | filled_in)
    assert (config.lr, config.max_new_tokens, config.max_model_len) == (5e-4, 72, 256)


def test_with_a_model_the_fields_defaults():
    """What suits the demo alone doesn't apply: the preset is `base`, and the context is the model's own."""
    config = parse_config(PATHS)
    assert (config.preset, config.out) == ("base", "runs/base-partial")
    assert (config.lr, config.max_new_tokens, config.max_model_len) == (1e-6, 1024, 0)
    assert parse_config([*PATHS, "--preset", "tiny"]).lr == 5e-4
    assert [parse_config([name, "--model", "m"]).lr for name in ("sft", "rm", "dpo")] == [
        1e-5,
        1e-5,
        1e-6,
    ]
    assert [parse_config([name]).lr for name in ("sft", "rm", "dpo")] == [5e-4] * 3


def test_what_is_filled_in_follows_from_the_rest():
    assert parse_config(["--mode", "full"]).out == "runs/tiny-full"
    assert parse_config(["--preset", "cuda"]).out == "runs/cuda-partial"
    assert parse_config(["--out", "x"]).out == "x"
    assert parse_config(["--rollout-only"]).out == "runs/tiny-partial-rollout-only"
    train_only = parse_config(["--train-only", "--replay", "r"])
    assert (train_only.out, train_only.continues_answers) == ("runs/tiny-partial-train-only", True)
    assert (
        parse_config(["--over-dispatch", "1.5"]).continues_answers
        and not parse_config([]).continues_answers
    )
    assert parse_config(["sft"]).out == "runs/sft"
    assert parse_config([*PATHS]).judge_format == ("addition",)
    assert parse_config([*PATHS, "--data", "d"]).judge_format == ("chat",)
    assert parse_config([*PATHS, "--data", "d", "--judge-format", "addition"]).judge_format == (
        "addition",
    )


@pytest.mark.parametrize(
    "arguments,models",
    [
        ([], (DEMO_JUDGE,)),
        ([*PATHS], ("j",)),
        ([*PATHS, "k", "--reward-weights", "0.7", "0.3"], ("j", "k")),
        ([*PATHS, "--cost-judge", "c"], ("j", "c")),
        (["--model", "m", "--rule", "right"], ()),
        (["--model", "m", "--rule", "right", "--cost-judge", "c", "--reward-weights", "1"], ("c",)),
        (["sft"], ()),
    ],
)
def test_the_judges_of_a_run(arguments, models):
    """Those of the reward, then those of the cost; without --model the demo's, for the loop alone."""
    assert parse_config(arguments).judge_models == models


@pytest.mark.parametrize(
    "arguments,name", [([], "written"), (["sft"], "written"), (["--preset", "images"], "drawn")]
)
def test_the_demos_models_are_found_from_any_folder(arguments, name, tmp_path, monkeypatch):
    """By a path that is the same wherever the project lies: a checkpoint has it, and may be moved."""
    config = parse_config(arguments)
    assert config.model == os.path.relpath(DEMO_MODELS / name / "actor")
    monkeypatch.chdir(tmp_path)
    elsewhere = parse_config(arguments)
    for path in (elsewhere.model, *elsewhere.judge):
        assert Path(path, "model.safetensors").is_file()
    assert len(elsewhere.judge) == (config.command == "rl")


def test_the_command_line_beats_the_preset_which_beats_the_defaults():
    for name, changes in PRESETS.items():
        config = dataclasses.asdict(parse_config(["--preset", name]))
        for field in FIELDS.values():
            if field.name not in RESOLVED:
                assert config[field.name] == changes.get(field.name, field.default), field.name
    assert parse_config(["--preset", "cuda", "--lr", "0.5"]).lr == 0.5
    assert (
        parse_config(["--lr", "0.5", "--preset", "cuda", "--dtype", "float32"]).dtype == "float32"
    )
    assert parse_config(["sft", "--preset", "cuda", "--lr", "0.5"]).lr == 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_settings_and_work(name):
    """Every key is a field of the field's type, and the result is valid on 2 ranks."""
    for key, value in PRESETS[name].items():
        assert type(value).__name__ == FIELDS[key].type
    check_settings(parse_config(["--preset", name]), 2)


OF_RL = {
    field.name
    for name, row in documented_settings().items()
    if name in COMMANDS["rl"].groups
    for field, _ in row
}


@pytest.mark.parametrize("timeout_s", [10.0, 600.0])
def test_nothing_is_waited_for_longer_than_the_other_controllers_wait(timeout_s):
    """Every timeout is a part of one: also three stalls of one request together."""
    config = Config(timeout_s=timeout_s)
    assert config.engine_silence_s < config.stalled_s < config.engine_start_s < timeout_s
    assert 3 * config.stalled_s < timeout_s


# ---------------------------------------------------------------- what can't work

BAD_WEIGHTS = ("0.0 0.0", "-1.0 2.0", "nan 1.0", "1.0 nan", "inf 1.0", "1.0 inf")
ONE_EACH = "--reward-weights 1.0: one for each --judge, then each --rule, so 2"
POSITIVE = sorted(OF_RL & {*AT_LEAST_1})
NOT_A_NUMBER = "argument --reward-weights: invalid float value: 'much'"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--stepz", "3"], "unrecognized arguments: --stepz 3; see run.py --help"),
        (
            ["--step", "3"],
            "unrecognized arguments: --step 3",
        ),  # a new setting would change what it means
        (["steps"], "unrecognized arguments: steps"),
        (["--steps"], "argument --steps: expected one argument"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--steps", "1.5"], "argument --steps: invalid int value"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--preset", "huge"], "--preset huge is unknown; choose one of base, tiny, images, cuda"),
        (["--dtype", "float16"], "--dtype float16 is unknown; choose float32 or bfloat16"),
        (["--critic", "c"], "--critic needs --model: the demo's models only know addition"),
        (
            ["--model", "m"],
            "--model needs a --judge or a --rule, which say what an answer is worth",
        ),
        (["--judge", "j"], "--judge needs --model: the demo's models only know addition"),
        (
            ["--data", "d", "--rule", "right"],
            "--data needs --model: the demo's models only know addition",
        ),
        (["--cost-judge", "c"], "--cost-judge needs --model"),
        (["sft", "--data", "d"], "--data needs --model"),
        (["eval"], "run.py eval needs --model DIR"),
        (
            ["--model", "m", "--rule", "right", "--reward-weights", "1", "1"],
            "then each --rule, so 1",
        ),
        ([*PATHS, "k", "--reward-weights", "1"], ONE_EACH),
        (["--rule", "right", "--reward-weights", "1"], ONE_EACH),
        *[
            ([*PATHS, "k", "--reward-weights", *bad.split()], f"weights {bad}: finite")
            for bad in BAD_WEIGHTS
        ],
        (["--reward-weights"], "argument --reward-weights: expected at least one argument"),
        (["--reward-weights", "much"], NOT_A_NUMBER),
        (["--sp"], "--sp needs --tp 2"),
        (["--rebalance", "--mode", "full"], "--rebalance moves ranks between the roles"),
        (
            ["--rollout-only", "--train-only", "--replay", "r"],
            "--rollout-only never trains and --train-only",
        ),
        (
            ["--train-only"],
            "--train-only and --replay FILE, which a --rollout-only run wrote, go together",
        ),
        (
            ["--replay", "r"],
            "--train-only and --replay FILE, which a --rollout-only run wrote, go together",
        ),
        (
            ["--max-model-len", "72"],
            "--max-new-tokens 72 leaves prompts no room in --max-model-len 72",
        ),
        (["--max-model-len", "90"], "--judge-max-new-tokens 100 leaves prompts no room in --max-"),
        (
            ["--max-tokens-per-micro-batch", "255"],
            "micro-batch 255: one sample may have 256 tokens",
        ),
        ([*PATHS, "--max-new-tokens", "8192"], "micro-batch 8192: one sample may have 8193 tokens"),
        *[([f"--{dashed(name)}", "0"], f"--{dashed(name)} 0: at least 1") for name in POSITIVE],
        (["--tp", "-2"], "--tp -2: at least 1"),
    ],
)
def test_a_bad_setting_is_named(arguments, message):
    """One line, with the setting, its value and what to choose."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_config(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--algorithm", "ppp"],
        ["--judge-format", "xml"],
        ["--mode", "half"],
        ["--port", "0"],
        ["--lr", "-1"],
        ["--temperature", "0"],  # the trainer divides logits by it
        ["--judgements", "0"],
        ["--mem-fraction", "2"],
        ["--timeout-s", "0"],
        ["--over-dispatch", "0.5"],
    ],
    ids=" ".join,
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(arguments):
    """By parse_config or check_settings, naming the setting."""
    with pytest.raises(ValueError, match=re.escape(arguments[0])) as caught:
        check_settings(parse_config(arguments), 2)
    assert "\n" not in str(caught.value)


ENGINES = "for a rollout engine of 1 and a genrm engine of 1"


@pytest.mark.parametrize(
    "arguments,ranks,message",
    [
        ([], 1, f"--mode partial needs at least 2 ranks, {ENGINES}; this run has 1"),
        (
            ["--rollout-ranks", "2"],
            2,
            "--rollout-ranks 2 leaves 0 of 2 ranks for genrm; this run takes 1",
        ),
        (["--tp", "2"], 3, "--tp 2 x --pp 1 x --cp 1 = 2 doesn't divide 3 ranks"),
        (
            ["--rollout-ranks", "3", "--rollout-tp", "2"],
            8,
            "--rollout-ranks 3 leaves 5 of 8 ranks for genrm",
        ),
        (["--rollout-tp", "2"], 3, "--rollout-tp 2 doesn't divide 3 ranks"),
        ([*PATHS, "k"], 2, "engine of 1 for each of 2 judges; this run has 2"),
        (
            [*PATHS, "k", "l", "--rollout-ranks", "6"],
            8,
            "leaves 2 of 8 ranks for genrm; this run takes 1, 2, 3, 4, 5",
        ),
        (["--mode", "half"], 2, "--mode half is unknown; choose one of full, partial, fused, auto"),
    ],
)
def test_what_only_the_number_of_ranks_tells(arguments, ranks, message):
    """With the numbers."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        check_settings(parse_config(arguments), ranks)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("role", ["rollout", "genrm"])
def test_an_engine_stays_on_one_machine(role):
    """Its ranks divide those of a machine, not only those of the run."""
    config = parse_config([f"--{role}-tp", "4", "--mode", "full"])
    assert check_settings(config, 12, 4) == check_settings(config, 12)
    expected = f"--{role}-tp 4 doesn't divide 6 ranks of a machine, which no engine leaves"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        check_settings(config, 12, 6)


@pytest.mark.parametrize(
    "arguments,ranks,plan",
    [
        (["--mode", "full"], 1, placement.Plan("full", (0,), (0,), (0,))),
        ([], 2, placement.Plan("partial", (0,), (1,), (0, 1))),
        (
            [],
            3,
            placement.Plan("partial", (0, 1), (2,), (0, 1, 2)),
        ),  # 16 prompts need not be shared evenly
        ([*PATHS, "k"], 4, placement.Plan("partial", (0, 1), (2, 3), (0, 1, 2, 3))),
        ([*PATHS, "k", "--mode", "full"], 2, placement.Plan("full", (0, 1), (0, 1), (0, 1))),
        (
            ["--prompts-per-step", "15", "--tp", "2", "--sp"],
            2,
            placement.Plan("partial", (0,), (1,), (0, 1)),
        ),
    ],
)
def test_a_batch_that_fits_gives_its_plan(arguments, ranks, plan):
    config = parse_config(arguments)
    assert check_settings(config, ranks) == [plan]
    described = describe(config, [plan], ranks)
    assert str(plan) in described and f"{config.prompts_per_step * 8} samples" in described


@pytest.mark.parametrize("name", ["a file/out", "a file"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name):
    """In one line; a folder that can is made, with those above it, and nothing stays in it."""
    (tmp_path / "a file").touch()
    with pytest.raises(
        ValueError, match=rf"--out {tmp_path / name} can't be written: \w+"
    ) as caught:
        make_out(Config(out=str(tmp_path / name)))
    assert "\n" not in str(caught.value)
    made = make_out(Config(out=str(tmp_path / "deep" / "out")))
    assert made.is_dir() and not list(made.iterdir())


# ---------------------------------------------------------------- help


def test_a_command_has_few_settings_and_its_own():
    """At most 60 for the loop, among them all that are promised; learning from examples has no judge."""
    assert len(OF_RL) <= 60 and set(PROMISED.split()) <= OF_RL
    for name in ("sft", "rm", "dpo", "eval"):
        for refused in (
            ["--judge", "j"],
            ["--mode", "full"],
            ["--dry-run"],
            ["--updates-per-step", "2"],
        ):
            with pytest.raises(ValueError, match=f"unrecognized arguments: {refused[0]}"):
                parse_config([name, "--model", "m", *refused])
    with pytest.raises(ValueError, match="unrecognized arguments: --dpo-beta"):
        parse_config(["--dpo-beta", "0.2"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    """In a second or so, without torch; every setting under its heading, with its default."""
    heavy = {"torch", "sglang", "transformers", "megatron", "matplotlib"}
    parse = f"run.parse_config({[command, '--help']}, run.__doc__)"
    code = f"import sys, run\ntry: {parse}\nfinally: assert not {heavy} & sys.modules.keys()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and not ran.stderr
    assert "torchrun --nproc-per-node 2 run.py --mode partial" in ran.stdout
    assert all(f"\n  {name} " in ran.stdout for name in COMMANDS)
    shown = " ".join(ran.stdout.split())
    for group, row in documented_settings().items():
        assert (f"\n{group}:\n" in ran.stdout) == (group in COMMANDS[command].groups)
        for field, comment in row:
            default = (
                ""
                if field.default in ("", ()) or field.default is False
                else f" [{as_text(field.default)}]"
            )
            assert (f" {comment}{default} " in f"{shown} ") == (
                group in COMMANDS[command].groups
            ), field.name
    assert "--no-deterministic" in ran.stdout or command not in ("rl", "eval")
    assert "--no-sp" not in ran.stdout and "--no-rebalance" not in ran.stdout


def test_the_plain_script_says_how_to_start_it():
    """Without torchrun, and with a bad setting: one line, status 2, nothing imported that takes seconds."""
    start = "error: start with: torchrun --nproc-per-node 2 run.py"
    for arguments, message in (([], start), (["--steps", "0"], "error: --steps 0")):
        ran = subprocess.run(
            [sys.executable, "run.py", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert ran.returncode == 2 and ran.stdout == ""
        assert ran.stderr.startswith(message) and len(ran.stderr.splitlines()) == 1
