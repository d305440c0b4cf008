"""Settings: from the command line to a Config, presets, what can't work and how it is said."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import placement
import run
from config import AT_LEAST_1, COMMANDS, LIMITS, PRESETS, Config, as_text, check_batch, dashed, field_comments, parse_config

ROOT = Path(__file__).parent.parent
FIELDS = {field.name: field for field in dataclasses.fields(Config)}
PROMISED = ("preset", "mode", "out", "steps", "seed", "model", "judge", "data", "algorithm", "prompts-per-step", "answers-per-prompt")
PROMISED += ("dry-run", "rollout-only", "train-only", "replay")
RESOLVED = ("preset", "out", "judge_format", "judge_weights", "judge_signal")  # what isn't given follows from the rest
PATHS = ["--model", "m", "--judge", "j"]


# ---------------------------------------------------------------- from the command line


def test_without_arguments_the_demo():
    """The defaults are the preset `tiny`, in partial colocation, with where it goes and how it is judged filled in."""
    config = parse_config([])
    assert (config.preset, config.mode, config.out, config.judge_format) == ("tiny", "partial", "runs/tiny-partial", ("addition",))
    filled_in = dict(preset="tiny", out="runs/tiny-partial", judge_format=("addition",), judge_weights=(1.0,), judge_signal=("reward",))
    assert config == dataclasses.replace(Config(), **filled_in)


def test_what_is_filled_in_follows_from_the_rest():
    assert parse_config(["--mode", "full"]).out == "runs/tiny-full"
    assert parse_config(["--preset", "cuda"]).out == "runs/cuda-partial"
    assert parse_config(["--out", "x"]).out == "x"
    assert parse_config(["--rollout-only"]).out == "runs/tiny-partial-rollout-only"
    train_only = parse_config(["--train-only", "--replay", "r"])
    assert (train_only.out, train_only.partial_rollout) == ("runs/tiny-partial-train-only", True)
    assert parse_config([*PATHS]).judge_format == ("addition",)
    assert parse_config([*PATHS, "--data", "d"]).judge_format == ("chat",)
    assert parse_config([*PATHS, "--data", "d", "--judge-format", "addition"]).judge_format == ("addition",)


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_learning_from_examples_takes_the_demos_model(command):
    """As run.py puts it in place; there is no judge to go with it."""
    config = dataclasses.replace(parse_config([command]), model="m")
    assert (config.judges, config.judge_weights, config.judge_signal) == (0, (), ())


@pytest.mark.parametrize(
    "arguments,judge,weights,formats",
    [
        ([], (), (1.0,), ("addition",)),
        (["--model", "m", "--judge", "a"], ("a",), (1.0,), ("addition",)),
        (["--judge", "a", "b", "--model", "m", "--data", "d"], ("a", "b"), (1.0, 1.0), ("chat", "chat")),
        (["--model", "m", "--judge", "a", "a", "--judge-weights", "0.7", "0.3"], ("a", "a"), (0.7, 0.3), ("addition",) * 2),
        (["--model", "m", "--judge", "a", "b", "c", "--judge-format", "chat"], ("a", "b", "c"), (1.0,) * 3, ("chat",) * 3),
        (["--model", "m", "--judge", "a", "b", "--judge-format", "chat", "addition"], ("a", "b"), (1.0, 1.0), ("chat", "addition")),
        (["--model", "m", "--judge", "a", "b", "--judge-weights", "0", "2"], ("a", "b"), (0.0, 2.0), ("addition",) * 2),
        (["--model", "m", "--rule", "right"], (), (), ("addition",)),
        (["--model", "m", "--rule", "right", "--judge-format", "chat"], (), (), ("chat",)),
        (["--model", "m", "--train-only", "--replay", "r"], (), (), ("addition",)),
    ],
)
def test_judges_with_their_weights_and_formats(arguments, judge, weights, formats):
    """One weight and one format for each judge once it is resolved; the demo's only judge isn't named."""
    config = parse_config(arguments)
    assert (config.judge, config.judge_weights, config.judge_format) == (judge, weights, formats)
    assert dataclasses.replace(config, model="m", judge=judge or ("made",)).judge_weights == weights  # what is resolved stays valid


def test_what_takes_several_values_comes_back_as_the_command_line_takes_it():
    """as_text is the way back; one value is that value."""
    config = parse_config(["--model", "m", "--judge", "a", "b", "--judge-weights", "0.7", "0.3"])
    assert (as_text(config.judge), as_text(config.judge_weights), as_text(config.steps), as_text(())) == ("a b", "0.7 0.3", "40", "")
    described = run.describe(config, check_batch(config, 4), 4)
    assert "judge a b\n" in described and "--judge-weights 0.7 0.3" in described


def test_the_command_line_beats_the_preset_which_beats_the_defaults():
    for name, changes in PRESETS.items():
        config = dataclasses.asdict(parse_config(["--preset", name]))
        for field in FIELDS.values():
            if field.name not in RESOLVED:
                assert config[field.name] == changes.get(field.name, field.default), field.name
    assert parse_config(["--preset", "cuda", "--lr", "0.5"]).lr == 0.5
    assert parse_config(["--lr", "0.5", "--preset", "cuda", "--dtype", "float32"]).dtype == "float32"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_settings_and_work(name):
    """Every key is a field of the field's type, and the result is valid on 2 ranks."""
    for key, value in PRESETS[name].items():
        assert type(value).__name__ == FIELDS[key].type
    check_batch(parse_config(["--preset", name]), 2)


def test_one_sampled_answer_does_where_a_greedy_one_is_beside_it():
    assert parse_config(["--algorithm", "remax", "--answers-per-prompt", "1"]).answers_per_prompt == 1


VALUES = {
    "int": st.integers(1, 9999),
    "float": st.floats(0.01, 0.99),
    "str": st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8).map(lambda text: "a" + text),
    "bool": st.booleans(),
}
# these are checked against others
CHECKED = {"algorithm", "judgements", "max_model_len", "max_new_tokens", "judge_max_new_tokens", "max_tokens_per_micro_batch"}
CHECKED |= {"judge_format", "judge_weights", "judge_signal", "judge_retries", "judge_timeout_s", "collective_timeout_s"}
CHECKED |= {"request_timeout_s", "replay", "engine_timeout_s"}
CHECKED |= {"answers_per_prompt", "kl_in", "kl_estimator", "clip_dual", "mismatch_mask", "overlong_from"}
CHECKED |= {"critic", "critic_warmup", "samples", "pass_at", "rule", "cost_rule", "reward_weights", "ptx_coef", "ptx_data"}
CHECKED |= {name for name, field in FIELDS.items() if field.type == "bool"}  # and these take no value
FREE = sorted(set(FIELDS) - {"command", "preset", "mode", "dtype", "model", "judge", "data"} - CHECKED)


def within_limits(name):
    """Values of the setting's type that LIMITS allows."""
    low, high = LIMITS.get(name, (0, 10**9))
    if FIELDS[name].type == "int":
        return st.integers(int(low), int(min(high, 10**9)))
    return st.floats(low, min(high, 1e9)) if FIELDS[name].type == "float" else VALUES[FIELDS[name].type]


@settings(deadline=None)
@given(st.data())
def test_every_setting_comes_back_as_it_was_given(data):
    """Whatever its type, in any order; what isn't given keeps its default."""
    names = data.draw(st.lists(st.sampled_from(FREE), unique=True, max_size=6))
    given_values = {name: data.draw(within_limits(name)) for name in names}
    arguments = [text for name, value in given_values.items() for text in (f"--{dashed(name)}", str(value))]
    config = dataclasses.asdict(parse_config(arguments))
    for name, field in FIELDS.items():
        if name not in RESOLVED or name in given_values:
            assert config[name] == given_values.get(name, field.default)


def test_switches_and_equals_signs():
    assert parse_config(["--tp", "2", "--sp"]).sp is True
    assert parse_config(["--sp", "--no-sp"]).sp is False
    assert parse_config(["--steps=7"]).steps == 7
    assert parse_config(["--seed", "-1"]).seed == -1


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3


# ---------------------------------------------------------------- what can't work

BAD_WEIGHTS = ("0.0 0.0", "-1.0 2.0", "nan 1.0", "1.0 nan", "inf 1.0", "1.0 inf")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--stepz", "3"], "unrecognized arguments: --stepz 3; see run.py --help"),
        (["--step", "3"], "unrecognized arguments: --step 3"),  # no abbreviations: a new setting would change their meaning
        (["steps"], "unrecognized arguments: steps"),
        (["--steps"], "argument --steps: expected one argument"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--steps", "1.5"], "argument --steps: invalid int value"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--preset", "huge"], "--preset huge is unknown; choose one of tiny, cuda"),
        (["--dtype", "float16"], "--dtype float16 is unknown; choose float32 or bfloat16"),
        (["--judge-format", "xml"], "--judge-format xml is unknown; choose one of addition, chat"),
        (["--judge-format", "chat", "xml"], "--judge-format xml is unknown"),
        (["--judge-signal", "cost"], "--judge-signal cost: reward or cost is needed for each judge, so 1, and reward at least once"),
        ([*PATHS, "k", "--judge-signal", "reward"], "--judge-signal reward: reward or cost is needed for each judge, so 2"),
        ([*PATHS, "k", "--judge-signal", "reward", "price"], "--judge-signal reward price: reward or cost"),
        (
            [*PATHS, "k", "--judge-signal", "reward", "cost", "--judge-weights", "1", "0"],
            "--judge-weights 1.0 0.0: one above 0 is needed for each --judge-signal",
        ),
        (["--judge-format", "chat", "chat"], "--judge-format chat chat: one for all judges is needed, or one for each, so 1"),
        ([*PATHS, "k", "l", "--judge-format", "chat", "chat"], "--judge-format chat chat: one for all judges is needed, or one"),
        ([*PATHS, "k", "--judge-weights", "1"], "--judge-weights 1.0: one for each judge is needed, so 2"),
        (["--judge-weights", "1", "1"], "--judge-weights 1.0 1.0: one for each judge is needed, so 1"),
        *[([*PATHS, "k", "--judge-weights", *bad.split()], f"--judge-weights {bad}: finite numbers are needed") for bad in BAD_WEIGHTS],
        (["--judge-weights"], "argument --judge-weights: expected at least one argument"),
        (["--judge-weights", "much"], "argument --judge-weights: invalid float value: 'much'"),
        (["--answers-per-prompt", "1"], "--answers-per-prompt 1: at least 2 is needed by --algorithm grpo"),
        (["--kl-in", "gradient"], "--kl-in gradient is unknown; choose one of loss, reward"),
        (["--kl-estimator", "k4"], "--kl-estimator k4 is unknown; choose one of k1, k2, k3"),
        (["--clip-dual", "0.5"], "--clip-dual 0.5: 0 or more than 1 is needed"),
        (["--mismatch-mask", "1"], "--mismatch-mask 1: 0 or more than 1 is needed"),
        (["--overlong-from", "72"], "--overlong-from 72 must be below --max-new-tokens 72"),
        (["--critic", "c"], "--critic and --critic-warmup are for algorithms with a critic: --algorithm grpo has none"),
        (["--critic-warmup", "3"], "--critic and --critic-warmup are for algorithms with a critic: --algorithm grpo has none"),
        (["--algorithm", "ppo", "--critic", "c"], "--critic needs --model: the demo's critic starts from its actor"),
        (["--algorithm", "ppo", "--critic-warmup", "40"], "--critic-warmup 40 leaves the actor none of --steps 40"),
        (["--value-clip", "0"], "--value-clip 0.0: at least 1e-12 is needed"),
        (["--model", "m"], "--model needs a --judge or a --rule, which say what an answer is worth"),
        (["--judge", "j"], "--data and --judge need --model"),
        (["--data", "d", "--rule", "right"], "--data and --judge need --model: the demo's models only know addition"),
        (["--model", "m", "--rule", "right", "--reward-weights", "1", "1"], "1.0 1.0: one for each --rule is needed, so 1"),
        (["--model", "m", "--rule", "right", "--judge-signal", "reward"], "--judge-weights and --judge-signal need a --judge"),
        (["--sp"], "--sp needs --tp 2"),
        (["--rollout-only", "--train-only", "--replay", "r"], "--rollout-only never trains and --train-only starts no"),
        (["--train-only"], "--train-only needs --replay FILE"),
        (["--replay", "r"], "--train-only needs --replay FILE, what a --rollout-only run wrote, and nothing else reads that"),
        (["--engine-timeout-s", "600"], "longer than the other controllers wait, --collective-timeout-s 600"),
        (["--collective-timeout-s", "300"], "may take longer than the other controllers wait, --collective-timeout-s 300"),
        (["--judgements", "4"], "--judgements 4 needs --judge-temperature above 0: a greedy judge repeats itself"),
        *[([f"--{dashed(name)}", "0"], f"--{dashed(name)} 0: at least 1 is needed") for name in AT_LEAST_1],
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
        ["--algorithm", "ppp"],  # found when the actor is built, after the engines were started
        ["--mode", "half"],
        ["--port", "70000"],  # OverflowError in Engine.launch
        ["--port", "0"],
        ["--lr", "-1"],
        ["--lr", "nan"],
        ["--temperature", "-1"],
        ["--temperature", "0"],  # the trainer divides logits by it
        ["--judge-temperature", "-1"],
        ["--max-refill-waves", "-1"],  # no wave at all: no sample
        ["--eval-prompts", "-5"],  # a slice from the wrong end
        ["--clip-grad", "-1"],
        ["--mem-fraction", "2"],
        ["--engine-timeout-s", "0"],
        ["--judge-max-new-tokens", "256"],  # no room for what the judge is asked
        ["--max-tokens-per-micro-batch", "50"],  # shorter than one answer: fails at the first update
    ],
    ids=" ".join,
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(arguments):
    """By parse_config or check_batch, naming the setting."""
    with pytest.raises(ValueError, match=re.escape(arguments[0])):
        check_batch(parse_config(arguments), 2)


@pytest.mark.parametrize(
    "arguments,ranks,message",
    [
        ([], 1, "--mode partial needs at least 2 ranks, for a rollout engine of 1 and a genrm engine of 1; this run has 1"),
        (["--rollout-ranks", "2"], 2, "--rollout-ranks 2 leaves 0 of 2 ranks for genrm; this run takes 1"),
        (["--rollout-ranks", "-1"], 4, "--rollout-ranks -1"),
        (["--prompts-per-step", "15"], 2, "--prompts-per-step 15 can't be shared evenly by 2 data-parallel ranks"),
        (["--tp", "2"], 3, "--tp 2 x --pp 1 x --cp 1 = 2 doesn't divide 3 ranks"),
        (["--tp", "2", "--pp", "2", "--mode", "full"], 2, "= 4 doesn't divide 2 ranks"),
        (["--max-new-tokens", "256"], 2, "--max-new-tokens 256 leaves prompts no room in --max-model-len 256"),
        (["--rollout-ranks", "3", "--rollout-tp", "2"], 8, "--rollout-ranks 3 leaves 5 of 8 ranks for genrm; this run takes 2, 4, 6"),
        (["--rollout-tp", "2", "--prompts-per-step", "15"], 3, "--rollout-tp 2 doesn't divide 3 ranks"),
        (["--genrm-tp", "4", "--prompts-per-step", "12"], 6, "--genrm-tp 4 doesn't divide 6 ranks"),
        (["--rollout-tp", "2"], 2, "--mode partial needs at least 4 ranks, for a rollout engine of 2 and a genrm engine of 1"),
        ([*PATHS, "k"], 2, "engine of 1 for each of 2 judges; this run has 2"),
        ([*PATHS, "k", "l", "--rollout-ranks", "6"], 8, "leaves 2 of 8 ranks for genrm; this run takes 1, 2, 3, 4, 5"),
        ([*PATHS, "k", "--mode", "full"], 1, "--mode full needs at least 2 ranks, for a rollout engine of 1"),
        (["--mode", "half"], 2, "--mode half is unknown; choose one of full, partial, auto"),
    ],
)
def test_what_only_the_number_of_ranks_tells(arguments, ranks, message):
    """With the numbers."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        check_batch(parse_config(arguments), ranks)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments,ranks,plan",
    [
        (["--mode", "full"], 1, placement.Plan("full", (0,), (0,), (0,))),
        ([], 2, placement.Plan("partial", (0,), (1,), (0, 1))),
        ([*PATHS], 2, placement.Plan("partial", (0,), (1,), (0, 1))),
        ([*PATHS, "k"], 4, placement.Plan("partial", (0, 1), (2, 3), (0, 1, 2, 3))),
        ([*PATHS, "k", "--mode", "full"], 2, placement.Plan("full", (0, 1), (0, 1), (0, 1))),
        (["--rollout-ranks", "3"], 4, placement.Plan("partial", (0, 1, 2), (3,), (0, 1, 2, 3))),
        (["--prompts-per-step", "15", "--tp", "2", "--sp"], 2, placement.Plan("partial", (0,), (1,), (0, 1))),  # one data-parallel rank
    ],
)
def test_a_batch_that_fits_gives_its_plan(arguments, ranks, plan):
    config = parse_config(arguments)
    assert check_batch(config, ranks) == [plan]
    described = run.describe(config, [plan], ranks)
    assert str(plan) in described and f"{config.prompts_per_step * 8} samples" in described


# ---------------------------------------------------------------- help


def test_every_setting_is_explained():
    """A comment for each field is its help text; two explain themselves."""
    comments = field_comments()
    assert set(FIELDS) - set(comments) == {"weight_decay", "adam_beta1", "adam_beta2"}
    assert comments["steps"] == "batches to train on, each for updates_per_step optimizer updates"
    assert all(comment and not comment.startswith("#") for comment in comments.values())
    assert set(comments) <= set(FIELDS)


def test_help():
    """Runs on a bare machine: without torch, in a second or so; every setting with its default."""
    heavy = {"torch", "sglang", "aiohttp", "transformers"}
    code = f"import sys, run\ntry: run.parse_config(['--help'], run.__doc__)\nfinally: assert not {heavy} & sys.modules.keys()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and not ran.stderr
    assert all(f"\n  {name} " in ran.stdout for name in COMMANDS)
    for name, field in list(FIELDS.items())[1:]:  # but the command, which is the first word
        assert f"--{dashed(name)}" in ran.stdout
        assert f"[{as_text(field.default)}]" in ran.stdout
    assert "torchrun --nproc-per-node 2 run.py --mode partial" in ran.stdout
    assert {f"--{name}" for name in PROMISED} <= set(re.findall(r"--[a-z-]+", ran.stdout))


def test_the_plain_script_says_how_to_start_it():
    """Without torchrun, and with a bad setting: one line on stderr, exit status 1, nothing imported that takes seconds."""
    for arguments, message in (([], "error: start with: torchrun --nproc-per-node 2 run.py"), (["--steps", "0"], "error: --steps 0")):
        ran = subprocess.run([sys.executable, "run.py", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 1 and ran.stdout == ""
        assert ran.stderr.startswith(message) and len(ran.stderr.splitlines()) == 1
