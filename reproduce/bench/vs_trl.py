"""nanoYATT and TRL's GRPOTrainer side by side: same model, problems, reward, batch and learning rate, on CPU.

    python reproduce/bench/vs_trl.py                 3 repeats of each: a table, runs/vs_trl-demo/results.json
    python reproduce/bench/vs_trl.py --repeats 1 --steps 4     a quick look
    python reproduce/bench/vs_trl.py --size larger       nine times the parameters, so that arithmetic matters
    python reproduce/bench/vs_trl.py --model DIR --steps 3     any other model

The model is the demo's actor, a larger one that has learned the demo's task from examples, or any other.
The task is addition; the exact answer earns a reward of 1. A step is 16 prompts x 8 answers of up to 72
tokens (24 with another model) and one update on all of them, on two ranks. Every repeat is a fresh torchrun
(ours as `make run` starts it), and its first two steps don't count. Sides alternate after one unmeasured
run of each, so that the files of both are cached. Memory is the sum over every process of a side: ranks,
servers, schedulers, the launcher. TRL has its own environment, .venv-trl, made on first use. TRL's step
lasts from on_step_begin to on_step_end, ours from one report to the next.
"""

import json
import shutil
import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from config import DEMO_MODELS
from demo.task import Addition
from examples.make_demo import models
from reproduce.bench.measuring import (
    ROOT,
    TORCHRUN,
    column,
    parser_of,
    print_table,
    run_to_its_end,
    spread,
)

RUNS = ROOT / "runs"
LARGER = RUNS / "vs_trl-larger-actor"
UNTAUGHT = RUNS / "vs_trl-larger-new"
LARGER_SHAPE = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=64)
LARGER_STEPS = 150  # enough for answers that end and are sometimes right
TRL_VENV = ROOT / ".venv-trl"
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "datasets==5.2.0", "psutil==7.2.2")
RANKS = 2
LAUNCH = ("--standalone", "--nproc-per-node", RANKS)
OURS = (sys.executable, "examples/quiet_torchrun.py")
RUN_LIMIT_S = 900.0
WARM_UP = 2  # steps
SIDES = ("nanoYATT", "TRL")
# 5e-4 makes the larger model's reward fall on both sides; other models don't know the task
LR = {"demo": 5e-4, "larger": 1e-4, "other": 1e-6}
PORT = 31000  # nanoYATT's first engine
PROMPTS = 16  # per step
ANSWERS = 8  # per prompt
MAX_NEW_TOKENS = {"demo": 72, "larger": 72, "other": 24}


def make_trl_environment() -> None:
    """Make .venv-trl and install TRL in it, unless that is done."""
    done = TRL_VENV / "installed"
    if done.exists() and done.read_text() == str(TRL_PACKAGES):
        return
    print(f"installing {', '.join(TRL_PACKAGES)} into {TRL_VENV.name}", flush=True)
    pip = [TRL_VENV / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run_to_its_end([sys.executable, "-m", "venv", TRL_VENV], limit_s=RUN_LIMIT_S)
    # first, in a command of its own; otherwise pip resolves its version again
    run_to_its_end([*pip, "torch==2.13.0"], limit_s=RUN_LIMIT_S)
    run_to_its_end([*pip, *TRL_PACKAGES], limit_s=RUN_LIMIT_S)
    done.write_text(str(TRL_PACKAGES))


def make_model(settings: Namespace) -> Path:
    """Return the folder of the demo's policy, of the larger one (trained on first use), or of --model."""
    if settings.model:
        return settings.model.resolve()
    if settings.size == "demo":
        return DEMO_MODELS / "written" / "actor"
    if not (LARGER / "hf").is_dir():
        models.SHAPE.update(LARGER_SHAPE)
        models.new_model(UNTAUGHT, seed=0)
        command = [TORCHRUN, *LAUNCH, "examples/sft.py", "--model", UNTAUGHT]
        command += ["--steps", LARGER_STEPS, "--lr", 1e-3, "--out", LARGER]
        run_to_its_end(command, limit_s=RUN_LIMIT_S)
    return LARGER / "hf"


def write_problems(settings: Namespace) -> Path:
    """Write a run's problems, in order, for TRL; return the file."""
    source = Addition(0, lambda *question: [])
    path = settings.out / "problems.jsonl"
    with path.open("w") as file:
        for number in range(PROMPTS * (WARM_UP + settings.steps)):
            row = source.training(number)
            file.write(json.dumps({"prompt": row.question, "answer": row.answer_key}) + "\n")
    return path


def run_side(side: str, name: str, steps: int, settings: Namespace) -> dict:
    """Start one fresh run; return the measurements of its ranks, merged."""
    folder = settings.out / f"{side}-{name}"
    folder.mkdir(parents=True)
    if side == "nanoYATT":
        command = [*OURS, *LAUNCH, "reproduce/bench/nano_rule.py", "--lr-warmup-steps", 0]
        command += ["--prompts-per-step", PROMPTS, "--answers-per-prompt", ANSWERS]
        command += ["--port", PORT, "--out", folder / "run"]
    else:
        command = [TRL_VENV / "bin" / "torchrun", *LAUNCH, "reproduce/bench/trl_baseline.py"]
        command += ["--prompts", PROMPTS, "--answers", ANSWERS, "--problems", settings.problems]
    command += ["--model", settings.model, "--steps", steps, "--lr", LR[settings.size]]
    command += ["--seed", 0, "--max-new-tokens", MAX_NEW_TOKENS[settings.size]]
    meter = {"METER_FOLDER": str(folder), "METER_LAUNCHED": str(time.monotonic())}
    run_to_its_end(command, folder / "log.txt", RUN_LIMIT_S, meter)
    return merge([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)])


def merge(ranks: list[dict]) -> dict:
    """Merge a run's ranks: add up tokens and memory, and take the slowest rank's seconds."""
    rows = []
    for of_step in zip(*column(ranks, "rows"), strict=True):
        row = {name: max(column(of_step, name)) for name in ("step_s", "generate_s", "update_s")}
        for name in ("tokens", "answers", "prompt_tokens", "reward"):
            row[name] = sum(column(of_step, name))
        rows.append(row)
    startup_s = max(column(ranks, "startup_s"))
    return {"rows": rows, "startup_s": startup_s, "pss_mb": sum(column(ranks, "pss_mb"))}


def alternate(settings: Namespace) -> dict[str, list[dict]]:
    """Alternate the repeats of both sides after an unmeasured run of each."""
    for side in SIDES:
        run_side(side, "unmeasured", 1, settings)
    results: dict[str, list[dict]] = {side: [] for side in SIDES}
    for repeat in range(settings.repeats):
        for side in SIDES:
            run = run_side(side, str(repeat), WARM_UP + settings.steps, settings)
            results[side].append(run)
            seconds = summarize(run)["step, s"]
            print(f"repeat {repeat + 1}, {side}: {seconds:.3f} s a step", flush=True)
    for ours, theirs in zip(*results.values(), strict=True):
        same = column(ours["rows"], "prompt_tokens") == column(theirs["rows"], "prompt_tokens")
        assert same, "the sides were not given the same problems"
    return results


def summarize(run: dict) -> dict[str, float]:
    """Return the table's figures of one run."""
    rows = run["rows"][WARM_UP:]
    total = {name: sum(column(rows, name)) for name in rows[0]}
    return {
        "tokens per wall-second, whole steps": total["tokens"] / total["step_s"],
        "step, s": median(column(rows, "step_s")),
        "generation, s": median(column(rows, "generate_s")),
        "update, s": median(column(rows, "update_s")),
        "start-up, s": run["startup_s"],
        "memory at the end, MB (PSS: shared pages once)": run["pss_mb"],
        "tokens an answer": total["tokens"] / total["answers"],
        "reward, mean of the steps": total["reward"] / total["answers"],
    }


def print_figures(summaries: dict[str, list[dict]]) -> None:
    """Print the median, smallest and largest over the repeats; ratios compare neighboring repeats."""
    table = []
    for label in summaries["TRL"][0]:
        ours = column(summaries["nanoYATT"], label)
        theirs = column(summaries["TRL"], label)
        digits = 0 if max(theirs) >= 100 else 3
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
        ratio = spread(ratios) if ratios else ""
        table.append([label, spread(ours, digits), spread(theirs, digits), ratio])
    print_table(["median (smallest-largest)", *SIDES, "nanoYATT / TRL"], table)


def main() -> None:
    parser = parser_of(__doc__, repeats=3, steps=12)  # steps: the measured ones of a repeat
    parser.add_argument("--size", choices=("demo", "larger"), default="demo", help="model size")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory to use instead")
    settings = parser.parse_args()
    settings.size = "other" if settings.model else settings.size
    settings.out = RUNS / f"vs_trl-{settings.size}"
    make_trl_environment()
    shutil.rmtree(settings.out, ignore_errors=True)
    settings.out.mkdir(parents=True)
    settings.model = make_model(settings)
    settings.problems = write_problems(settings)
    results = alternate(settings)
    summaries = {side: [*map(summarize, runs)] for side, runs in results.items()}
    print_figures(summaries)
    found = {"figures": summaries, "runs": results}
    (settings.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
