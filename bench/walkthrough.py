"""Makes docs/walkthrough.md: a step of the demo with all its numbers and the code that made them.

    python bench/walkthrough.py --port 22000    run the demo, with more settings, and write the page: a minute

The run is run.py's own. Its ranks start here because two functions are wrapped to note what passes through
them; nothing is computed differently. The text comes from bench/walkthrough.md: {names} stand for numbers of
the run, and a line such as

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

sys.path.insert(0, str(Path(__file__).parent.parent))

import controller
import run
from bench.measuring import ROOT, run_ranks
from config import parse_config
from genrm import JudgeFormat, formats_of
from inputs import tokenization
from sample import flat
from scheduling.dynamic_sampling import MARGIN, FirstFinishedSampler

STEP = 2  # the third step: files count from 0
PROMPT = 51  # the prompt that the page follows
RANKS = 2
WORDS = ["--mode", "partial", "--seed", "0", "--steps", str(STEP + 2), "--device", "cpu"]
TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs" / "walkthrough.md"
ROW = "| {0.index} | `{0.text}` | `{0.critique}` | {0.reward:g} | {0.advantage:+.4f} | {0.rank} |"
CODE = re.compile(r"^code: (.*)$", re.MULTILINE)


def one_rank(words: list[str]) -> None:
    """Run one rank; write notes in --out about the samples that it trains on."""
    from training import lm_head  # imports Megatron, which making the page doesn't need

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
    """Return the lines that a `code: ` line names: (part of) a function or Class.method of a file."""
    path, name, *ends = where.split(": ", 2)
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    code = inspect.getsource(attrgetter(name)(module))
    if ends:
        first, last = map(re.escape, ends[0].split(" ... "))
        lines = re.search(rf"^ *{first}.*?^ *{last}[^\n]*", code, re.MULTILINE | re.DOTALL)
        assert lines, f"{name} in {path} has no lines {ends[0]}: change bench/walkthrough.md"
        code = lines[0]
    return f"```python\n# {name} in {path}\n{textwrap.dedent(code).strip()}\n```"


def read_notes(out: Path) -> list[SimpleNamespace]:
    """Return all samples of the step, each with the rank that trained on it."""
    lines = "".join(path.read_text() for path in sorted(out.glob(f"notes{STEP}.*"))).splitlines()
    return [SimpleNamespace(**json.loads(line)) for line in lines]


def waves_of(samples: list[SimpleNamespace], per_kept: float, size: int) -> dict:
    """Return the prompts of both waves: those filtered out of the first, and those kept from the second."""
    kept = {sample.prompt_id for sample in samples}
    first = range(min(kept), min(kept) + size)
    filtered = sorted({*first} - kept)
    refill = FirstFinishedSampler(size, per_kept).refill_size(len(filtered))
    second = range(first.stop, first.stop + refill)
    counts = {"missing": len(filtered), "per_kept": per_kept, "margin": MARGIN, "refill": refill}
    waves = {"first": first, "filtered": filtered, "second": second}
    return counts | waves | {"newcomers": sorted(kept - {*first})}


def explain(s: SimpleNamespace, tokenizer, judge: JudgeFormat) -> None:
    """Add to an answer what the page shows: its texts, and numbers for each of its tokens."""
    s.text = tokenization.decode(tokenizer, s.response)
    s.pieces = [tokenization.decode(tokenizer, [token]) for token in s.response]
    s.asked = judge.prompt(s.question, judge.answer_of(s.text, s.finish))
    s.advantage = s.advantages[0]
    s.chances = [math.exp(logprob) for logprob in s.read]
    s.ratios = [math.exp(now - old) for now, old in zip(s.read, s.logprobs, strict=True)]
    s.pulls = [s.advantage * (1 - chance) for chance in s.chances]


def page_of(out: Path) -> str:
    """Return the page about a run."""
    config = parse_config(WORDS)
    tokenizer, *_ = tokenization.load_tokenizers(config, print)
    judge = formats_of(config)[0]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    samples = read_notes(out)
    group = sorted((s for s in samples if s.prompt_id == PROMPT), key=attrgetter("index"))
    for s in group:
        explain(s, tokenizer, judge)
    rewards = [s.reward for s in group]
    tokens = [0] * RANKS
    for s in samples:
        tokens[s.rank] += len(s.response)
    values = {"config": config, "metrics": metrics[STEP], "samples": len(samples), "group": group}
    values |= {"answers": "\n".join(map(ROW.format, group)), "tokens": tokens}
    values |= {"asked": len({s.asked for s in group}), "sure": math.exp(judge.min_logprob)}
    values |= {"mean": fmean(rewards), "std": pstdev(rewards)}
    per_kept = metrics[STEP - 1]["rollout/groups_per_kept"]
    values |= waves_of(samples, per_kept, config.prompts_per_step)
    return CODE.sub(lambda found: excerpt(found[1]), TEMPLATE.read_text().format(**values))


def make_run(out: Path, *words: str) -> None:
    """Run the demo until one step after STEP. words: more settings."""
    run_ranks(RANKS, [__file__, "--rank", *WORDS, "--out", out, *words], out.with_suffix(".log"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_run(Path(folder, "run"), *sys.argv[1:])
            PAGE.write_text(page_of(Path(folder, "run")))
