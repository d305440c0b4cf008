"""nanoYATT and TRL's GRPOTrainer side by side: same model, problems, reward, batch and learning rate, two
ranks each, on CPU.

    python bench/vs_trl.py                            3 repeats of each, alternating: a table, and
    runs/vs_trl-demo/results.json python bench/vs_trl.py --repeats 1 --steps 4      a quick look python
    bench/vs_trl.py --size larger              nine times the parameters, so that arithmetic counts

Model: the demo's warm-started actor, or a larger one made likewise. Task: addition, reward 1 for the exact
answer. A step is 16 prompts x 8 answers of up to 72 tokens and one update on all of them. Every repeat is a
fresh torchrun, whose first steps are left out of the step figures. CPU-seconds and memory count every process
of a side: ranks, servers, schedulers, the launcher. TRL has an environment of its own, .venv-trl, made on
first use. Start-up is reported apart; one unmeasured run of each side comes first, so that both find their
files cached. TRL's step is counted from on_step_begin to on_step_end, nanoYATT's from one report to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from statistics import fmean, median

from launch import ROOT, TORCHRUN, end_with_us, run_to_its_end

RUNS = ROOT / "runs"
CACHE = Path.home() / ".cache" / "nanoyatt"  # where warmstart.py keeps the demo's models
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


def make_trl_environment() -> None:
    """.venv-trl with TRL in it, unless it is there."""
    done = TRL_VENV / "installed"
    if done.exists() and done.read_text() == str(TRL_PACKAGES):
        return
    print(f"installing {', '.join(TRL_PACKAGES)} into {TRL_VENV.name}", flush=True)
    pip = [TRL_VENV / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run_to_its_end([sys.executable, "-m", "venv", TRL_VENV], limit_s=RUN_LIMIT_S)
    run_to_its_end([*pip, "torch==2.13.0"], limit_s=RUN_LIMIT_S)  # first and alone, else it is resolved anew
    run_to_its_end([*pip, *TRL_PACKAGES], limit_s=RUN_LIMIT_S)
    done.write_text(str(TRL_PACKAGES))


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


def run_side(side: str, name: str, steps: int, settings: argparse.Namespace) -> dict:
    """One fresh run; returns what its ranks measured, added up."""
    folder = settings.out / f"{side}-{name}"
    folder.mkdir(parents=True)
    measure = ["--measure", folder, "--launched", time.monotonic(), "--steps", steps]
    measure += ["--lr", settings.lr, "--seed", settings.seed, "--max-new-tokens", settings.max_new_tokens]
    if side == "nanoYATT":
        command = [TORCHRUN, *LAUNCH, "bench/nano_rule.py", *measure]
        command += ["--prompts-per-step", settings.prompts, "--answers-per-prompt", settings.answers]
        command += ["--model", model_of(settings), "--lr-warmup-steps", 0, *settings.nano]
        command += ["--port", free_ports(2 * RANKS), "--out", folder / "run"]
    else:
        command = [TRL_VENV / "bin" / "torchrun", *LAUNCH, "bench/trl_baseline.py", *measure]
        command += ["--prompts", settings.prompts, "--answers", settings.answers]
        command += ["--model", model_of(settings)]
    run_to_its_end(command, folder / "log.txt", RUN_LIMIT_S)
    return merge([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)])


def model_of(settings: argparse.Namespace) -> Path:
    """The demo's warm-started policy, or the larger one; made on first use."""
    if settings.size == "larger":
        if not LARGER.is_dir():
            run_to_its_end([TORCHRUN, *LAUNCH, "bench/larger_model.py", LARGER], limit_s=RUN_LIMIT_S)
        return LARGER
    homes = sorted(CACHE.glob(f"addition-*-seed{settings.seed}"))
    if not homes:  # a run of sft makes them, and starts no engine
        command = [TORCHRUN, *LAUNCH, "run.py", "sft", "--steps", 1, "--seed", settings.seed]
        run_to_its_end([*command, "--out", settings.out / "warm-start"], limit_s=RUN_LIMIT_S)
        homes = sorted(CACHE.glob(f"addition-*-seed{settings.seed}"))
    return homes[-1] / "actor"


def merge(ranks: list[dict]) -> dict:
    """One run from its ranks: CPU, tokens and memory add up, of wall seconds the slowest rank's count."""
    rows = []
    for of_step in zip(*(rank["rows"] for rank in ranks), strict=True):
        row = {name: sum(r[name] for r in of_step) for name in ("tokens", "answers", "prompt_tokens", "reward")}
        for phase in ("step", "generate"):
            row |= {f"{phase}_s": max(r[phase]["wall"] for r in of_step), f"{phase}_cpu_s": sum(r[phase]["cpu"] for r in of_step)}
        row["update_s"] = max(r["update_s"] for r in of_step)
        if "spans" in of_step[0]:
            row["spans"] = {name: max(r["spans"][name] for r in of_step) for name in of_step[0]["spans"]}
        rows.append(row)
    sums = {name: sum(rank[name] for rank in ranks) for name in ("processes", "peak_rss_mb", "pss_mb", "startup_cpu_s")}
    return {"rows": rows, "startup_s": max(rank["startup_s"] for rank in ranks)} | sums


def summarize(run: dict, warmup: int) -> dict[str, float]:
    """The table's figures of one run."""
    rows = run["rows"][warmup:]
    total = {name: sum(row[name] for row in rows) for name in rows[0] if name != "spans"}
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


def where_time_goes(runs: list[dict], warmup: int) -> dict[str, float]:
    """Mean seconds of nanoYATT's step by phase, from the timeline's spans; `rest`: dealing samples, rewards, the report."""
    rows = [row for run in runs for row in run["rows"][warmup:]]
    mean = {name: fmean(row["spans"][name] for row in rows) for name in ("serve", "rollout", "train", "switch", "sync")}
    step = fmean(row["step_s"] for row in rows)
    parts = {"rollout": mean["rollout"], "serve, besides rollout": mean["serve"] - mean["rollout"]}
    parts |= {name: mean[name] for name in ("train", "switch", "sync")}
    return parts | {"rest": step - sum(parts.values()), "step": step}


def spread(values: list[float], digits: int) -> str:
    """median (smallest-largest)"""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def print_tables(results: dict[str, list[dict]], settings: argparse.Namespace) -> None:
    """Medians over the repeats with the smallest and the largest; ratios are those of neighbouring repeats."""
    print("\n| median (smallest-largest) | nanoYATT | TRL | nanoYATT / TRL |\n|---|---|---|---|")
    sides = {side: [summarize(run, settings.warmup) for run in runs] for side, runs in results.items()}
    for label, digits in FIGURES.items():
        ours, theirs = ([summary[label] for summary in sides[side]] for side in SIDES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
        print(f"| {label} | {spread(ours, digits)} | {spread(theirs, digits)} | {spread(ratios, 2) if ratios else ''} |")
    parts = where_time_goes(results["nanoYATT"], settings.warmup)
    print("\n| where nanoYATT's step goes | ms | part |\n|---|---|---|")
    for name, seconds in parts.items():
        print(f"| {name} | {1000 * seconds:.0f} | {seconds / parts['step']:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a repeat")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    for name, default in (("prompts", 16), ("answers", 8), ("max-new-tokens", 72), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--size", choices=LR, default="demo", help="of the model")
    parser.add_argument("--lr", type=float, help=f"default: {LR}")
    parser.add_argument("--no-deterministic", action="store_true", help="nanoYATT without bit-equal answers")
    settings = parser.parse_args()
    settings.nano = ["--no-deterministic"] * settings.no_deterministic
    settings.lr = settings.lr or LR[settings.size]
    settings.out = RUNS / f"vs_trl-{settings.size}"
    end_with_us()
    make_trl_environment()
    shutil.rmtree(settings.out, ignore_errors=True)
    load = os.getloadavg()[0]
    for side in SIDES:
        run_side(side, "unmeasured", 1, settings)
    results: dict[str, list[dict]] = {side: [] for side in SIDES}
    for repeat in range(settings.repeats):
        for side in SIDES:
            run = run_side(side, str(repeat), settings.warmup + settings.steps, settings)
            results[side].append(run)
            summary = summarize(run, settings.warmup)
            figures = ", ".join(f"{summary[label]:.{digits}f} {label}" for label, digits in FIGURES.items())
            print(f"repeat {repeat + 1}, {side}: {figures}", flush=True)
    ours, theirs = ([[row["prompt_tokens"] for row in run["rows"]] for run in results[side]] for side in SIDES)
    assert ours == theirs, "the two sides were not given the same problems"
    print_tables(results, settings)
    print(f"\nload average before the first run: {load:.1f} on {os.cpu_count()} cores")
    summaries = {side: [summarize(run, settings.warmup) for run in runs] for side, runs in results.items()}
    parts = where_time_goes(results["nanoYATT"], settings.warmup)
    everything = {"settings": vars(settings), "load": load, "figures": summaries, "nanoYATT_step_s": parts, "runs": results}
    (settings.out / "results.json").write_text(json.dumps(everything, indent=1, default=str) + "\n")
    print(f"wrote {settings.out.relative_to(ROOT)}/results.json")


if __name__ == "__main__":
    main()
