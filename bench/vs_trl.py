"""nanoYATT and TRL's GRPOTrainer side by side: same model, problems, reward, batch and learning rate, on CPU.

    python bench/vs_trl.py                           3 repeats of each: a table, runs/vs_trl-demo/results.json
    python bench/vs_trl.py --repeats 1 --steps 4     a quick look
    python bench/vs_trl.py --size larger             nine times the parameters, so that arithmetic counts
    python bench/vs_trl.py --no-deterministic        nanoYATT without answers that are equal to the last bit

Model: the demo's warm-started actor, or a larger one made likewise. Task: addition, reward 1 for the exact
answer. A step is 16 prompts x 8 answers of up to 72 tokens and one update on all of them, on two ranks. Every
repeat is a fresh torchrun, whose first steps are left out of the step figures; sides alternate. CPU-seconds
and memory count every process of a side: ranks, servers, schedulers, the launcher. TRL has an environment of
its own, .venv-trl, made on first use. Start-up is reported apart; one unmeasured run of each side comes
first, so that both find their files cached. TRL's step is counted from on_step_begin to on_step_end,
nanoYATT's from one report to the next.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from itertools import chain
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import ROOT, TORCHRUN, end_with_us, run_to_its_end
from tables import print_table, spread

from config import DEMO_MODELS
from recipes.addition.task import Addition

RUNS = ROOT / "runs"
LARGER = RUNS / "vs_trl-larger-actor"
TRL_VENV = ROOT / ".venv-trl"
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "datasets==5.2.0", "psutil==7.2.2")
RANKS = 2
LAUNCH = ("--standalone", "--nproc-per-node", RANKS)
RUN_LIMIT_S = 900.0
SIDES = ("nanoYATT", "TRL")
LR = {"demo": 5e-4, "larger": 1e-4}  # at 5e-4 the larger model's reward falls on either side
# what the table shows: label, digits
FIGURES = {
    "tokens per wall-second, whole steps": 0,
    "tokens per CPU-second, whole steps": 0,
    "tokens per wall-second, generation": 0,
    "tokens per CPU-second, generation": 0,
    "step, s": 3,
    "generation, s": 3,
    "update, s": 3,
    "start-up, s": 1,
    "start-up, CPU-s": 1,
    "processes": 0,
    "peak memory, MB (sum of peak RSS)": 0,
    "memory at the end, MB (PSS: shared pages once)": 0,
    "tokens an answer": 1,
    "reward, mean of the steps": 3,
}


# ---------------------------------------------------------------- what both sides are given


def make_trl_environment() -> None:
    """.venv-trl with TRL in it, unless it is there."""
    done = TRL_VENV / "installed"
    if done.exists() and done.read_text() == str(TRL_PACKAGES):
        return
    print(f"installing {', '.join(TRL_PACKAGES)} into {TRL_VENV.name}", flush=True)
    pip = [TRL_VENV / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run_to_its_end([sys.executable, "-m", "venv", TRL_VENV], limit_s=RUN_LIMIT_S)
    # first and alone, else it is resolved anew
    run_to_its_end([*pip, "torch==2.13.0"], limit_s=RUN_LIMIT_S)
    run_to_its_end([*pip, *TRL_PACKAGES], limit_s=RUN_LIMIT_S)
    done.write_text(str(TRL_PACKAGES))


def make_model(settings: Namespace) -> Path:
    """The demo's policy, or the larger one, which is made on first use."""
    if settings.size == "demo":
        return DEMO_MODELS / "written" / "actor"
    if not LARGER.is_dir():
        run_to_its_end([TORCHRUN, *LAUNCH, "bench/larger_model.py", LARGER], limit_s=RUN_LIMIT_S)
    return LARGER


def write_problems(settings: Namespace) -> Path:
    """The problems of a run, in order, for TRL's environment."""
    source, path = Addition(settings.seed, lambda *question: []), settings.out / "problems.jsonl"
    count = settings.prompts * (settings.warmup + settings.steps)
    rows = [source.training(number) for number in range(count)]
    lines = [json.dumps({"prompt": row.question, "answer": row.answer_key}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that nobody listens on."""
    for first in range(31000, 60000, count):
        probes = [socket.socket() for _ in range(count)]
        busy = [probe.connect_ex(("127.0.0.1", first + i)) == 0 for i, probe in enumerate(probes)]
        for probe in probes:
            probe.close()
        if not any(busy):
            return first
    sys.exit("no free ports")


# ---------------------------------------------------------------- runs


def run_side(side: str, name: str, steps: int, settings: Namespace) -> dict:
    """One fresh run; returns what its ranks measured, added up."""
    folder = settings.out / f"{side}-{name}"
    folder.mkdir(parents=True)
    if side == "nanoYATT":
        command = [TORCHRUN, *LAUNCH, "bench/nano_rule.py"]
        command += [
            "--prompts-per-step",
            settings.prompts,
            "--answers-per-prompt",
            settings.answers,
        ]
        command += [
            "--lr-warmup-steps",
            0,
            "--port",
            free_ports(2 * RANKS),
            "--out",
            folder / "run",
        ]
        command += ["--no-deterministic"] * settings.no_deterministic
    else:
        command = [TRL_VENV / "bin" / "torchrun", *LAUNCH, "bench/trl_baseline.py"]
        command += ["--prompts", settings.prompts, "--answers", settings.answers]
        command += ["--problems", settings.problems]
    command += ["--model", settings.model, "--measure", folder, "--launched", time.monotonic()]
    command += ["--steps", steps, "--lr", settings.lr, "--seed", settings.seed]
    command += ["--max-new-tokens", settings.max_new_tokens]
    run_to_its_end(command, folder / "log.txt", RUN_LIMIT_S)
    return merge([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)])


def merge(ranks: list[dict]) -> dict:
    """One run from its ranks: CPU, tokens and memory add up, of wall seconds the slowest rank's count."""
    rows = []
    for of_step in zip(*(rank["rows"] for rank in ranks), strict=True):
        counted = ("tokens", "answers", "prompt_tokens", "reward")
        row = {name: sum(r[name] for r in of_step) for name in counted}
        for phase in ("step", "generate"):
            row[f"{phase}_s"] = max(r[phase]["wall"] for r in of_step)
            row[f"{phase}_cpu_s"] = sum(r[phase]["cpu"] for r in of_step)
        row["update_s"] = max(r["update_s"] for r in of_step)
        rows.append(row)
    summed = ("processes", "peak_rss_mb", "pss_mb", "startup_cpu_s")
    sums = {name: sum(rank[name] for rank in ranks) for name in summed}
    return {"rows": rows, "startup_s": max(rank["startup_s"] for rank in ranks)} | sums


def alternate(settings: Namespace) -> dict[str, list[dict]]:
    """The repeats of each side, in turns, after an unmeasured run of each."""
    for side in SIDES:
        run_side(side, "unmeasured", 1, settings)
    results: dict[str, list[dict]] = {side: [] for side in SIDES}
    for repeat in range(settings.repeats):
        for side in SIDES:
            run = run_side(side, str(repeat), settings.warmup + settings.steps, settings)
            results[side].append(run)
            summary = summarize(run, settings.warmup)
            figures = [f"{summary[label]:.{digits}f} {label}" for label, digits in FIGURES.items()]
            print(f"repeat {repeat + 1}, {side}: {', '.join(figures)}", flush=True)
    ours, theirs = ([run["rows"] for run in results[side]] for side in SIDES)
    for our, their in zip(chain(*ours), chain(*theirs), strict=True):
        assert our["prompt_tokens"] == their["prompt_tokens"], (
            "the sides were not given the same problems"
        )
    return results


# ---------------------------------------------------------------- figures


def summarize(run: dict, warmup: int) -> dict[str, float]:
    """The table's figures of one run."""
    rows = run["rows"][warmup:]
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    return {
        "tokens per wall-second, whole steps": total["tokens"] / total["step_s"],
        "tokens per CPU-second, whole steps": total["tokens"] / total["step_cpu_s"],
        "tokens per wall-second, generation": total["tokens"] / total["generate_s"],
        "tokens per CPU-second, generation": total["tokens"] / total["generate_cpu_s"],
        "step, s": median(row["step_s"] for row in rows),
        "generation, s": median(row["generate_s"] for row in rows),
        "update, s": median(row["update_s"] for row in rows),
        "start-up, s": run["startup_s"],
        "start-up, CPU-s": run["startup_cpu_s"],
        "processes": run["processes"],
        "peak memory, MB (sum of peak RSS)": run["peak_rss_mb"],
        "memory at the end, MB (PSS: shared pages once)": run["pss_mb"],
        "tokens an answer": total["tokens"] / total["answers"],
        "reward, mean of the steps": total["reward"] / total["answers"],
    }


def print_figures(summaries: dict[str, list[dict]]) -> None:
    """Medians over the repeats with the smallest and the largest; ratios are of neighbouring repeats."""
    table = []
    for label, digits in FIGURES.items():
        ours, theirs = ([summary[label] for summary in summaries[side]] for side in SIDES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
        table.append(
            [label, spread(ours, digits), spread(theirs, digits), spread(ratios) if ratios else ""]
        )
    print_table(["median (smallest-largest)", *SIDES, "nanoYATT / TRL"], table)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a repeat")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    for name, default in (("prompts", 16), ("answers", 8), ("max-new-tokens", 72), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--size", choices=LR, default="demo", help="of the model")
    parser.add_argument("--lr", type=float, help=f"default: {LR}")
    unequal = "nanoYATT without answers that are equal to the last bit"
    parser.add_argument("--no-deterministic", action="store_true", help=unequal)
    settings = parser.parse_args()
    settings.lr = settings.lr or LR[settings.size]
    settings.out = RUNS / f"vs_trl-{settings.size}{'-no-deterministic' * settings.no_deterministic}"
    end_with_us()
    make_trl_environment()
    shutil.rmtree(settings.out, ignore_errors=True)
    settings.out.mkdir(parents=True)
    load = os.getloadavg()[0]
    settings.model, settings.problems = make_model(settings), write_problems(settings)
    results = alternate(settings)
    summaries = {
        side: [summarize(run, settings.warmup) for run in runs] for side, runs in results.items()
    }
    print_figures(summaries)
    print(f"\nload average before the first run: {load:.1f} on {os.cpu_count()} cores")
    found = {"figures": summaries, "runs": results}
    text = json.dumps({"settings": vars(settings), "load": load} | found, indent=1, default=str)
    (settings.out / "results.json").write_text(text + "\n")
    print(f"wrote {settings.out.relative_to(ROOT)}/results.json")


if __name__ == "__main__":
    main()
