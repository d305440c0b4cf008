"""docs/walkthrough.md: a step of the demo with all its numbers, beside the lines of code that made them.

    python bench/walkthrough.py                 a run of the demo, then the page: a minute; `make walkthrough`
    python bench/walkthrough.py --port 22000    the same, with more settings of run.py

The run is run.py's own. Its ranks start here, because a few functions are wrapped to note what passes
through them in one step; nothing is computed in another way. The words are those of bench/walkthrough.md,
where {names} stand for what was noted, and a line such as

    code: controller.py: exchange: for key, owner ... parcels.setdefault

stands for these lines of this function; without its last part, for the whole function.
"""

import ast
import json
import math
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import controller
import run
from algorithms import Algorithm, algorithm_of
from bench.measuring import ROOT, run_ranks
from config import Config, parse_config
from engines import wire
from genrm import formats_of
from inputs import tokenization
from reporting import timeline
from rollout import MEETING_INTERVAL_S
from sample import flat
from scheduling.dynamic_sampling import MARGIN, DynamicSampler

STEP = 2  # the third: files count from 0
PROMPT = 51  # the one that the page follows
RANKS = 2
WORDS = ["--mode", "partial", "--seed", "0", "--steps", str(STEP + 2), "--device", "cpu"]
TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs" / "walkthrough.md"
CODE = re.compile(r"^code: (.*)$", re.MULTILINE)
TIMES = re.compile("<!-- times -->.*<!-- end of times -->", re.DOTALL)
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# ---------------------------------------------------------------- a rank of the run, which takes notes

# the project's own, before a rank wraps them
tell_served = controller.tell_served
agree = controller.agree
train = controller.train
buckets = wire.buckets

notes = {"pushes": []}  # of this rank; they are written when the run ends
read = []  # log-probabilities that the trainer read in this step, in the order of its samples


async def note_served(batch, c: controller.Controller):
    """Note the samples that this rank had written and judged."""
    if c.state.step == STEP:
        notes["kept"] = list(map(vars, batch.kept))
        notes["filtered"] = list(map(vars, flat([batch.filtered])))
    return await tell_served(batch, c)


async def note_trained(c: controller.Controller, stats: dict, shares: controller.Shares):
    """Note the samples that this rank trained on, and what the trainer read of their tokens."""
    if c.state.step == STEP:
        notes["trained"] = []
        for sample in flat(shares.of(c.devices.actor)):
            row = {"key": sample.key, "advantage": sample.advantages[0]}
            row["work"] = c.devices.actor.cost(len(sample.prompt) + len(sample.response))
            row["read"] = [read.pop(0) for _ in sample.response]
            notes["trained"].append(row)
    read.clear()
    return await agree(c, stats, shares)


def note_buckets(named_weights):
    """Note a push: the tensors and the bytes of each bucket."""
    push = []
    notes["pushes"].append(push)
    for bucket in buckets(named_weights):
        push.append((len(bucket), sum(tensor.nbytes for _, tensor in bucket)))
        yield bucket


async def train_and_write(c: controller.Controller) -> bool:
    was_stopped = await train(c)
    Path(c.config.out, f"notes{c.world.rank}.json").write_text(json.dumps(notes))
    return was_stopped


def one_rank(arguments: list[str]) -> None:
    from training import lm_head  # which imports Megatron: the page is made without

    read_targets = lm_head.read_targets

    def note_read(*model_and_batch, **how):
        found = read_targets(*model_and_batch, **how)
        read.extend(found[0].tolist())
        return found

    lm_head.read_targets = note_read
    controller.tell_served = note_served
    controller.agree = note_trained
    controller.train = train_and_write
    wire.buckets = note_buckets
    run.main(arguments)


# ---------------------------------------------------------------- excerpts


def excerpt(where: str) -> str:
    """The lines of code that stand behind `code: `: of a function or a Class.method, in a file, as it is."""
    path, name, *lines = where.split(": ", 2)
    text = (ROOT / path).read_text()
    node = ast.parse(text)
    for part in name.split("."):
        inner = {each.name: each for each in node.body if isinstance(each, DEFINITIONS)}
        assert part in inner, f"{path} has no {name}: change bench/walkthrough.md"
        node = inner[part]
    found = text.splitlines()[node.lineno - 1 : node.end_lineno]
    if lines:
        first, last = lines[0].split(" ... ")
        found = found[place_of(first, found) :]
        found = found[: place_of(last, found) + 1]
    code = textwrap.dedent("\n".join(found))
    return f"# {name} in {path}\n{code}"


def place_of(start: str, lines: list[str]) -> int:
    """The place of the first line that begins so."""
    places = [place for place, line in enumerate(lines) if line.strip().startswith(start)]
    assert places, f"no line begins with `{start}`: change bench/walkthrough.md"
    return places[0]


def fenced(where: re.Match) -> str:
    return f"```python\n{excerpt(where[1])}\n```"


def laid_out(paragraph: str) -> str:
    """A paragraph in lines of at most 110 columns; no table, heading, list or code."""
    if paragraph.startswith(("#", "|", "<", "-", " ", "code: ")):
        return paragraph
    return textwrap.fill(paragraph, 110, break_long_words=False, break_on_hyphens=False)


# ---------------------------------------------------------------- numbers


def table(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def samples_of(ranks: list[SimpleNamespace]) -> list[SimpleNamespace]:
    """All that were trained on. owner, trainer: the rank that had a sample written, that trains on it."""
    samples = {}
    for rank, noted in enumerate(ranks):
        for row in noted.kept:
            samples[row["prompt_id"], row["index"]] = SimpleNamespace(**row, owner=rank)
    for rank, noted in enumerate(ranks):
        for row in noted.trained:
            vars(samples[tuple(row["key"])]).update(row, trainer=rank)
    return list(samples.values())


def answers_of(group: list[SimpleNamespace], config: Config) -> dict:
    """The life of the answers to one prompt, a row each, and how their rewards are spread."""
    tokenizer, *_ = tokenization.load_tokenizers(config, print)
    judge = formats_of(config)[0]
    rows = []
    for sample in group:
        text = tokenization.decode(tokenizer, sample.response)
        sample.pieces = [tokenization.decode(tokenizer, [token]) for token in sample.response]
        sample.asked = judge.prompt(sample.question, judge.answer_of(text, sample.finish))
        row = f"| {sample.index} | `{text}` | {len(sample.response)} | `{sample.critique}`"
        row += f" | {sample.reward:g} | {sample.advantage:+.4f} | {sample.trainer} |"
        rows.append(row)
    rewards = [sample.reward for sample in group]
    head = "| answer | text | tokens | critique | reward | advantage | trained by rank |"
    return {
        "answers": table(head, rows),
        "asked": len({sample.asked for sample in group}),
        "tokens_of": {"prompt": numbers(group[0].prompt), "answer": numbers(group[2].response)},
        "sure": math.exp(judge.min_logprob),
        "rewards": numbers(rewards),
        "mean": fmean(rewards),
        "std": pstdev(rewards),
    }


def waves_of(ranks: list[SimpleNamespace], per_kept: float, config: Config) -> dict:
    """Who has which prompts of the first wave, which teach nothing, and which replace them."""
    kept = {row["prompt_id"] for noted in ranks for row in noted.kept}
    filtered = {row["prompt_id"]: row["question"] for noted in ranks for row in noted.filtered}
    first = sorted(kept | filtered.keys())[: config.prompts_per_step]
    dealt = []
    for noted in ranks:
        own = {row["prompt_id"] for row in noted.kept + noted.filtered}
        dealt.append(numbers(sorted(own & {*first})))
    missing = len(filtered.keys() & {*first})
    refill = DynamicSampler(config.prompts_per_step, per_kept).refill_size(missing)
    return {
        "first": first,
        "dealt": dealt,
        "filtered": " and ".join(f"{each} (`{filtered[each]}`)" for each in sorted(filtered)),
        "missing": missing,
        "per_kept": per_kept,
        "margin": MARGIN,
        "refill": refill,
        "second": range(first[-1] + 1, first[-1] + 1 + refill),
        "newcomers": " and ".join(map(str, sorted(kept - {*first}))),
    }


def deal_of(samples: list[SimpleNamespace]) -> str:
    """How many samples, of how many tokens, each rank has, sends and trains on."""
    rows = []
    for rank in range(RANKS):
        has = [sample for sample in samples if sample.owner == rank]
        sends = [sample for sample in has if sample.trainer != rank]
        trains = [sample for sample in samples if sample.trainer == rank]
        cells = []
        for part in (has, sends, trains):
            tokens = sum(len(sample.prompt) + len(sample.response) for sample in part)
            cells.append(f"{len(part)} ({tokens:,})")
        work = sum(sample.work for sample in trains)
        rows.append(f"| {rank} | {' | '.join(cells)} | {work / 1e6:.2f} |")
    return table("| rank | has | sends | trains on | work, million multiply-adds |", rows)


def set_terms(samples: list[SimpleNamespace], a: Algorithm) -> None:
    """Work out each token's part of the loss, from what engine and trainer read and from the advantage."""
    low = 1 - a.clip_low
    high = 1 + a.clip_high
    for sample in samples:
        advantage = sample.advantage
        pairs = zip(sample.read, sample.logprobs, strict=True)
        sample.ratios = [math.exp(trainer - engine) for trainer, engine in pairs]
        sample.terms = []
        for ratio in sample.ratios:
            clipped = min(max(ratio, low), high)
            sample.terms.append(-min(ratio * advantage, clipped * advantage))
        sample.probabilities = [math.exp(logprob) for logprob in sample.read]
        sample.pulls = [advantage * (1 - probability) for probability in sample.probabilities]


def times_of(out: Path, owner: int) -> str:
    """What happened when, in seconds since the ranks began to serve the step. owner: of the prompt."""
    begin: dict[str, float] = {}
    end: dict[str, float] = {}
    for event in timeline.read(out / "spans", STEP, STEP):
        name = event.name
        if event.kind == "sample":
            prompt, _ = event.args["answer"].split(".")
            name = f"{name} {prompt}"
        begin[name] = min(event.start, begin.get(name, event.start))
        end[name] = max(event.end, end.get(name, event.end))
    first = f"the first is finished; rank {owner} asks rank 1's engine about it"
    moments = [
        (begin["serve"], "both controllers begin to serve the step"),
        (begin[f"queued {PROMPT}"], f"rank {owner} asks rank 0's engine for the eight answers"),
        (begin[f"judging {PROMPT}"], first),
        (end[f"decoding {PROMPT}"], "the last is finished"),
        (begin["wave 2"], "wave 2 is drawn"),
        (end[f"judging {PROMPT}"], "the last verdict on the eight is there"),
        (end["rollout"], "rank 0's engine has written its last answer of the step"),
        (end["genrm"], "rank 1's engine has given its last verdict of the step"),
        (begin["train"], "both ranks begin to train"),
        (end["train"], "the update is made"),
        (end["sync"], "rank 0's engine has the new weights"),
    ]
    rows = [f"| {at - begin['serve']:.2f} | {what} |" for at, what in sorted(moments)]
    return table("| seconds | what happens |", rows)


def page_of(out: Path) -> str:
    """The page of a run."""
    config = parse_config(WORDS)
    files = [out / f"notes{rank}.json" for rank in range(RANKS)]
    ranks = [SimpleNamespace(**json.loads(file.read_text())) for file in files]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    samples = samples_of(ranks)
    group = [sample for sample in samples if sample.prompt_id == PROMPT]
    assert group, f"prompt {PROMPT} wasn't trained on: choose another, and read the whole page"
    set_terms(samples, algorithm_of(config))
    terms = [term for sample in samples for term in sample.terms]
    reported = metrics[STEP]["train/loss"]
    assert math.isclose(fmean(terms), reported, rel_tol=1e-5), "the run's loss is another"
    values = {"config": config, "metrics": metrics[STEP], "group": group}
    values |= {"samples": len(samples), "tokens": len(terms), "total": sum(terms)}
    values |= answers_of(group, config)
    values |= waves_of(ranks, metrics[STEP - 1]["rollout/groups_per_kept"], config)
    values |= {"deal": deal_of(samples), "times": times_of(out, group[0].owner)}
    values["interval"] = MEETING_INTERVAL_S
    # the first push was of the weights that the run began with
    values["push"] = ranks[0].pushes[STEP + 1]
    paragraphs = TEMPLATE.read_text().format(**values).split("\n\n")
    return CODE.sub(fenced, "\n\n".join(map(laid_out, paragraphs)))


def make_run(out: Path, *words: str) -> None:
    """The demo as far as the step behind this one. words: more settings."""
    log = out.with_suffix(".log")
    run_ranks(RANKS, [__file__, "--rank", *WORDS, "--out", out, *words], log)


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        make_run(out, *words)
        PAGE.write_text(page_of(out))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2:])
    else:
        main(sys.argv[1:])
