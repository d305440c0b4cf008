"""docs/walkthrough.md: a step of the demo with all its numbers, and the lines of code that made them.

    python reproduce/bench/walkthrough.py --port 22000    run the demo, write page and picture: a minute

The run is run.py's own. Its ranks start here, because two functions are wrapped to record the values that
pass through them; the wrappers change no value. Page, table and picture come from this one run. The words
are those of reproduce/bench/walkthrough.md: {names} stand for recorded values, and a line such as

    code: controller.py: exchange: for key, owner ... parcels.setdefault

stands for these lines of this function; without its last part, for the whole function.
"""

import importlib
import inspect
import json
import math
import re
import sys
import tempfile
import textwrap
from operator import attrgetter
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

import controller
import run
from config import parse_config
from extras.figure import INK, LOOKS, Picture, add_legend, draw_lanes, read_run
from genrm import JudgeFormat, formats_of
from inputs import tokenization
from reproduce.bench.measuring import ROOT, run_ranks
from runtime.timeline import INSTANTS, Event, of_kind
from sample import flat
from scheduling.dynamic_sampling import MARGIN, FirstFinishedSampler

STEP = 2  # the third: files count from 0
PROMPT = 51  # the page follows it
RANKS = 2
WORDS = ["--mode", "partial", "--seed", "0", "--steps", str(STEP + 2), "--device", "cpu"]
TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs" / "walkthrough.md"
ROW = (
    "| {0.index} | `{0.text}` | {0.seconds[decoding]} | `{0.critique}` | {0.seconds[judging]} "
    "| {0.reward:g} | {0.advantage:+.4f} | {0.rank} |"
)
SECONDS = re.compile(r"\| \d+\.\d\d \|")  # they differ between runs
CODE = re.compile(r"^code: (.*)$", re.MULTILINE)


def one_rank(words: list[str]) -> None:
    """Run one rank; write to --out the samples that it trains on."""
    from training import lm_head  # it imports Megatron, and the page doesn't need that

    gather_metrics = controller.gather_metrics
    read_targets = lm_head.read_targets
    read = []  # the trainer's log-probabilities, in the order of its samples

    def note_read(*batch, **how):
        found = read_targets(*batch, **how)
        read.extend(found[0].tolist())
        return found

    async def note_trained(c, stats, shares):
        rows = []
        for sample in flat(shares.of(c.devices.actor)):
            own = {"rank": c.world.rank, "read": [read.pop(0) for _ in sample.response]}
            rows.append(json.dumps(vars(sample) | own) + "\n")
        Path(c.config.out, f"notes{c.state.step}.{c.world.rank}").write_text("".join(rows))
        return await gather_metrics(c, stats, shares)

    lm_head.read_targets = note_read
    controller.gather_metrics = note_trained
    run.main(words)


def excerpt(where: str) -> str:
    """Return the lines of a function or Class.method that follow `code: ` in the template, as Markdown."""
    path, name, *ends = where.split(": ", 2)
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    code = inspect.getsource(attrgetter(name)(module))
    if ends:
        first, last = map(re.escape, ends[0].split(" ... "))
        lines = re.search(rf"^ *{first}.*?^ *{last}[^\n]*", code, re.MULTILINE | re.DOTALL)
        assert lines, (
            f"{name} in {path} has no lines {ends[0]}: change reproduce/bench/walkthrough.md"
        )
        code = lines[0]
    return f"```python\n# {name} in {path}\n{textwrap.dedent(code).strip()}\n```"


def read_notes(out: Path) -> list[SimpleNamespace]:
    """Return all samples of the step, each with the rank that trained on it."""
    lines = "".join(path.read_text() for path in sorted(out.glob(f"notes{STEP}.*"))).splitlines()
    return [SimpleNamespace(**json.loads(line)) for line in lines]


def waves_of(samples: list[SimpleNamespace], per_kept: float, size: int) -> dict:
    """Return both waves' prompts: those of the first that teach nothing, those of the second that teach."""
    kept = {sample.prompt_id for sample in samples}
    first = range(min(kept), min(kept) + size)
    filtered = sorted({*first} - kept)
    refill = FirstFinishedSampler(size, per_kept).refill_size(len(filtered))
    second = range(first.stop, first.stop + refill)
    counts = {"missing": len(filtered), "per_kept": per_kept, "margin": MARGIN, "refill": refill}
    waves = {"first": first, "filtered": filtered, "second": second}
    return counts | waves | {"newcomers": sorted(kept - {*first})}


def picture_of(out: Path) -> Picture:
    """Return what happened in the step; times in seconds since its start."""
    shown = read_run(out, STEP, STEP)
    began = min(e.start for e in shown.events)
    events = [e._replace(start=e.start - began, end=e.end - began) for e in shown.events]
    return shown._replace(title=f"The demo on {RANKS} ranks", events=events)


def stretches_of(index: int, events: list[Event]) -> list[Event]:
    """Return when one answer to PROMPT waited, was written and was judged."""
    states = [e for e in of_kind(events, "sample") if e.name not in INSTANTS]
    return [e for e in states if e.args["answer"] == f"{PROMPT}.{index}"]


def explain(s: SimpleNamespace, tokenizer, judge: JudgeFormat, events: list[Event]) -> None:
    """Add what the page shows of an answer: its texts, its seconds, and the numbers of each token."""
    s.seconds = {e.name: f"{e.end:.2f}" for e in stretches_of(s.index, events)}
    s.text = tokenization.decode(tokenizer, s.response)
    s.pieces = [tokenization.decode(tokenizer, [token]) for token in s.response]
    s.asked = judge.prompt(s.question, judge.answer_of(s.text, s.finish))
    s.advantage = s.advantages[0]
    s.chances = [math.exp(logprob) for logprob in s.read]
    s.ratios = [math.exp(now - old) for now, old in zip(s.read, s.logprobs, strict=True)]
    s.pulls = [s.advantage * (1 - chance) for chance in s.chances]


def draw(out: Path) -> None:
    """Draw a lane for each rank, and below them a row for each answer to PROMPT."""
    shown = picture_of(out)
    figure = Figure((13, 5), dpi=150, layout="constrained")
    lanes, answers = figure.subplots(2, sharex=True)
    draw_lanes(lanes, shown)
    for index in range(parse_config(WORDS).answers_per_prompt):
        for e in stretches_of(index, shown.events):
            answers.barh(f"answer {index}", e.end - e.start, left=e.start, color=LOOKS[e.name][0])
    answers.set_title(f"Its answers to prompt {PROMPT}", fontsize=10, loc="left", color=INK)
    answers.set_xlabel("seconds since the step's start", fontsize=9, color=INK, loc="left")
    answers.set_frame_on(False)
    answers.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    answers.invert_yaxis()
    add_legend(figure, {"queued", *(name for _, name in shown.lanes)})
    figure.savefig(PAGE.with_suffix(".png"))


def page_of(out: Path) -> str:
    """Return the page of a run."""
    config = parse_config(WORDS)
    tokenizer, *_ = tokenization.load_tokenizers(config, print)
    judge = formats_of(config)[0]
    events = picture_of(out).events
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    samples = read_notes(out)
    group = sorted((s for s in samples if s.prompt_id == PROMPT), key=attrgetter("index"))
    for s in group:
        explain(s, tokenizer, judge, events)
    rewards = [s.reward for s in group]
    per_kept = metrics[STEP - 1]["rollout/groups_per_kept"]
    values = {
        "config": config,
        "metrics": metrics[STEP],
        "samples": len(samples),
        "group": group,
        "answers": "\n".join(map(ROW.format, group)),
        "tokens": [
            sum(len(s.response) for s in samples if s.rank == rank) for rank in range(RANKS)
        ],
        "asked": len({s.asked for s in group}),
        "sure": math.exp(judge.min_logprob),
        "mean": fmean(rewards),
        "std": pstdev(rewards),
        **waves_of(samples, per_kept, config.prompts_per_step),
    }
    return CODE.sub(lambda found: excerpt(found[1]), TEMPLATE.read_text().format(**values))


def make_run(out: Path, *words: str) -> None:
    """Run the demo one step past STEP. words: more settings."""
    run_ranks(RANKS, [__file__, "--rank", *WORDS, "--out", out, *words], out.with_suffix(".log"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_run(Path(folder, "run"), *sys.argv[1:])
            PAGE.write_text(page_of(Path(folder, "run")))
            draw(Path(folder, "run"))
