"""docs/walkthrough.md: a step of the demo with all its numbers, beside the lines of code that made them.

    python bench/walkthrough.py        a run of the demo, then the page: a minute; `make walkthrough`

The run is run.py's own. Its ranks start here, because a few functions are wrapped to note what passes through
them in one step; nothing is computed in another way. Words stand in bench/walkthrough.md: {names} are filled
in from what was noted, and a line such as

    code: controller.py: exchange: for key, owner ... parcels.setdefault

becomes these lines of this function, or, without the last part, the whole function.
"""

import ast
import json
import math
import re
import sys
import tempfile
import textwrap
from collections import defaultdict
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
from engines.engine import Engine
from genrm import formats_of
from reporting import timeline
from reporting.timeline import Event
from sample import Sample, flat
from scheduling.dynamic_sampling import DynamicSampler

STEP = 2  # the third: files count from 0
PROMPT = 51  # the one that the page follows
TOKENS = ((2, 0), (0, 16), (5, 1))  # answer and place, from 0, of those in the table of the loss
RANKS = 2
WORDS = ["--mode", "partial", "--seed", "0", "--steps", str(STEP + 2), "--device", "cpu"]
TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs" / "walkthrough.md"
TIMES = re.compile("<!-- times -->.*?<!-- end of times -->", re.DOTALL)
MOST_LINES = 12  # of an excerpt
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# ---------------------------------------------------------------- a rank of the run, which takes notes

# the project's own, before a rank wraps them
tell_served = controller.tell_served
agree = controller.agree
train = controller.train
load_weights = Engine.load_weights
buckets = wire.buckets

notes = {}  # of this rank, in STEP; they are written when the run ends
read = []  # log-probabilities that the trainer read in this step, in the order of its samples
pushed = []  # tensors and bytes of each bucket of the newest push


async def note_served(batch, c: controller.Controller):
    """Note the samples that this rank had written and judged."""
    if c.state.step == STEP:

        def row(sample: Sample) -> dict:
            decode = c.report.decode
            pieces = [decode([token], special=True) for token in sample.response]
            return vars(sample) | {"text": decode(sample.response), "pieces": pieces}

        notes["kept"] = list(map(row, batch.kept))
        notes["filtered"] = list(map(row, flat([batch.filtered])))
        notes["waves"] = batch.waves
    return await tell_served(batch, c)


async def note_trained(c: controller.Controller, stats: dict, shares: controller.Shares):
    """Note the samples that this rank trained on, and what the trainer read of their tokens."""
    if c.state.step == STEP:
        actor = c.devices.actor
        notes["trained"] = []
        for sample in flat(shares.of(actor)):
            row = {"key": sample.key, "advantage": sample.advantages[0]}
            row["work"] = actor.cost(len(sample.prompt) + len(sample.response))
            row["read"] = [read.pop(0) for _ in sample.response]
            notes["trained"].append(row)
    read.clear()
    return await agree(c, stats, shares)


def note_buckets(named_weights):
    for bucket in buckets(named_weights):
        pushed.append({"tensors": len(bucket), "bytes": sum(t.nbytes for _, t in bucket)})
        yield bucket


async def note_push(engine: Engine, named_weights, version: int) -> None:
    """Note the push that ends the step."""
    pushed.clear()
    await load_weights(engine, named_weights, version)
    if version == STEP + 1:
        notes["push"] = {"engine": engine.rank, "version": version, "buckets": [*pushed]}


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
    Engine.load_weights = note_push
    run.main(arguments)


# ---------------------------------------------------------------- excerpts


def excerpt(path: str, name: str, lines: str = "") -> str:
    """A function or a Class.method as it stands in a file, or alone its lines `first ... last`.

    first, last: how these lines begin; of several the first one counts.
    """
    text = (ROOT / path).read_text()
    node = ast.parse(text)
    for part in name.split("."):
        inner = {each.name: each for each in node.body if isinstance(each, DEFINITIONS)}
        assert part in inner, f"{path} has no {name}: change bench/walkthrough.md"
        node = inner[part]
    found = text.splitlines()[node.lineno - 1 : node.end_lineno]
    if lines:
        first, last = lines.split(" ... ")
        found = found[place_of(first, found) :]
        found = found[: place_of(last, found) + 1]
    assert len(found) <= MOST_LINES, f"{name} in {path}: {len(found)} lines are no excerpt"
    return textwrap.dedent("\n".join(found))


def place_of(start: str, lines: list[str]) -> int:
    """The place of the first line that begins so."""
    places = [place for place, line in enumerate(lines) if line.strip().startswith(start)]
    assert places, f"no line begins with `{start}`: change bench/walkthrough.md"
    return places[0]


def with_code(template: str) -> str:
    """The template with its excerpts, their braces doubled for str.format."""

    def block(match: re.Match) -> str:
        path, name, *lines = match[1].split(": ", 2)
        code = excerpt(path, name, *lines).replace("{", "{{").replace("}", "}}")
        return f"`{name}` in {path}:\n\n```python\n{code}\n```"

    return re.sub(r"^code: (.*)$", block, template, flags=re.MULTILINE)


def without_times(page: str) -> str:
    return TIMES.sub("", page)


# ---------------------------------------------------------------- numbers


def table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def numbers(values: Iterable) -> str:
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
    """The answers to one prompt; the judgements of them; advantages by hand, which are the run's."""
    judge = formats_of(config)[0]
    rewards = [sample.reward for sample in group]
    std = pstdev(rewards)
    answers = []
    verdicts = []
    questions = set()
    for sample in group:
        by_hand = (sample.reward - fmean(rewards)) / (std + 1e-4)
        assert math.isclose(sample.advantage, by_hand), "the run's advantage is another"
        question = judge.prompt(sample.question, judge.answer_of(sample.text, sample.finish))
        questions.add(question)
        answers.append(f"| {sample.index} | `{sample.text}` | {len(sample.response)} |")
        says = f"| {sample.index} | `{question}` | `{sample.critique}` |"
        verdicts.append(f"{says} {sample.reward:g} | {sample.advantage:+.4f} |")
    head = "| answer | the judge is asked | it writes | reward | advantage |"
    found = {"answers": table("| answer | text | tokens |", answers)}
    found |= {"verdicts": table(head, verdicts), "asked": len(questions)}
    found |= {"sure": math.exp(judge.min_logprob), "prompt_tokens": numbers(group[0].prompt)}
    found |= {"answer_tokens": numbers(group[2].response), "work": math.exp(group[2].logprobs[0])}
    return found | {"rewards": numbers(rewards), "mean": fmean(rewards), "std": std}


def waves_of(ranks: list[SimpleNamespace], per_kept: float, config: Config) -> dict:
    """Who has which prompts, which teach nothing, and which replace them."""
    kept = {row["prompt_id"] for noted in ranks for row in noted.kept}
    filtered = {row["prompt_id"]: row["question"] for noted in ranks for row in noted.filtered}
    drawn = sorted(kept | filtered.keys())
    first = drawn[: config.prompts_per_step]
    missing = len(filtered.keys() & {*first})
    refill = DynamicSampler(config.prompts_per_step, per_kept).refill_size(missing)
    of_rank = []
    for noted in ranks:
        own = {row["prompt_id"] for row in noted.kept + noted.filtered}
        of_rank.append(numbers(sorted(own & {*first})))
    told = [f"{prompt} (`{filtered[prompt]}`)" for prompt in sorted(filtered)]
    second = range(first[-1] + 1, first[-1] + 1 + refill)
    found = {
        "first": first,
        "dealt": of_rank,
        "filtered": " and ".join(told),
        "second": second,
        "refill": refill,
    }
    newcomers = " and ".join(map(str, sorted(kept - {*first})))
    return found | {"missing": missing, "per_kept": per_kept, "newcomers": newcomers}


def deal_of(samples: list[SimpleNamespace]) -> str:
    """How much each rank has, sends and trains on."""
    rows = []
    for rank in range(RANKS):
        has = [sample for sample in samples if sample.owner == rank]
        sends = [sample for sample in has if sample.trainer != rank]
        trains = [sample for sample in samples if sample.trainer == rank]
        cells = []
        for part in (has, sends, trains):
            tokens = sum(len(sample.prompt) + len(sample.response) for sample in part)
            cells.append(f"{len(part)}: {tokens:,}")
        work = sum(sample.work for sample in trains)
        rows.append(f"| {rank} | {' | '.join(cells)} | {work / 1e6:.2f} |")
    return table("| rank | has | sends to the other | trains on | million multiply-adds |", rows)


def loss_of(samples: list[SimpleNamespace], reported: float, a: Algorithm) -> dict:
    """Each token's part of the loss, whose mean has to be the loss that the run reports; a table of three."""
    count = 0
    total = 0.0
    rows = {}
    for sample in samples:
        count += len(sample.read)
        for place, (engine, trainer) in enumerate(zip(sample.logprobs, sample.read, strict=True)):
            ratio = math.exp(trainer - engine)
            clipped = min(max(ratio, 1 - a.clip_low), 1 + a.clip_high)
            term = -min(ratio * sample.advantage, clipped * sample.advantage)
            total += term
            piece = (
                f"| {sample.index} | {place + 1}: `{sample.pieces[place]}` | {math.exp(engine):.4f}"
            )
            logprobs = f"{engine:.6f} | {trainer:.6f} | {ratio:.6f}"
            pull = sample.advantage * (1 - math.exp(trainer))
            row = f"{piece} | {logprobs} | {sample.advantage:+.4f} | {term:+.4f} | {pull:+.4f} |"
            rows[sample.prompt_id, sample.index, place] = row
    assert math.isclose(total / count, reported, rel_tol=1e-5), "the run's loss is another"
    head = "| answer | token | probability | engine | trainer | ratio | advantage | term | pull |"
    told = [rows[PROMPT, *token] for token in TOKENS]
    return {"terms": table(head, told), "tokens": count, "total": total, "loss": total / count}


def times_of(events: list[Event], owner: int) -> str:
    """What happened when, in seconds since the ranks began to serve this step. owner: of the prompt."""
    spans = defaultdict(list)
    own = defaultdict(list)  # of the prompt's answers
    for event in events:
        if event.kind == "span":
            spans[event.name].append(event)
        elif event.kind == "sample" and event.args["answer"].startswith(f"{PROMPT}."):
            own[event.name].append(event)

    def begins(of: list[Event]) -> float:
        return min(event.start for event in of)

    def ends(of: list[Event]) -> float:
        return max(event.end for event in of)

    writer = own["decoding"][0].rank
    judge = spans["genrm"][0].rank
    rollout = spans["rollout"]
    moments = [
        (begins(spans["serve"]), "controllers", "begin to serve the step"),
        (begins(own["queued"]), f"rank {owner}", f"asks rank {writer}'s engine for the answers"),
        (begins(own["decoding"]), f"rank {writer}'s engine", "sends the first token of them"),
        (
            begins(own["judging"]),
            f"rank {owner}",
            f"has an answer whole, asks rank {judge}'s judge",
        ),
        (ends(own["decoding"]), f"rank {writer}'s engine", "sends the last token of the group"),
        (begins(event for event in events if event.name == "wave 2"), "controllers", "draw wave 2"),
        (ends(own["judging"]), f"rank {judge}'s judge", "sends the last verdict on the group"),
        (ends(rollout), f"rank {writer}'s engine", "sends the last token of the step"),
        (ends(spans["genrm"]), f"rank {judge}'s judge", "sends the last verdict of the step"),
        (begins(spans["train"]), "trainers", "begin"),
        (ends(spans["train"]), "trainers", "have made their update"),
        (ends(spans["sync"]), f"rank {writer}'s engine", "has the new weights"),
    ]
    rows = [f"| {at - moments[0][0]:.2f} | {who} | {does} |" for at, who, does in sorted(moments)]
    return table("| seconds | who | does |", rows)


def page_of(out: Path) -> str:
    """The page of a run."""
    config = parse_config(WORDS)
    files = sorted(out.glob("notes*.json"))
    ranks = [SimpleNamespace(**json.loads(file.read_text())) for file in files]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    metrics = rows[STEP]
    samples = samples_of(ranks)
    group = [sample for sample in samples if sample.prompt_id == PROMPT]
    assert group, f"prompt {PROMPT} wasn't trained on: choose another, and read the whole page"
    values = dict(config=config, metrics=metrics, samples_count=len(samples), group=group)
    values |= answers_of(group, config)
    values |= waves_of(ranks, rows[STEP - 1]["rollout/groups_per_kept"], config)
    values |= loss_of(samples, metrics["train/loss"], algorithm_of(config))
    values["deal"] = deal_of(samples)
    values["trains"] = [numbers(s.index for s in group if s.trainer == rank) for rank in (0, 1)]
    values["times"] = times_of(timeline.read(out / "spans", STEP, STEP), group[0].owner)
    (values["push"],) = [
        each.push | {"rank": n} for n, each in enumerate(ranks) if "push" in vars(each)
    ]
    return with_code(TEMPLATE.read_text()).format(**values)


def make_run(out: Path, *words: str) -> None:
    """The demo as far as the step after this one. words: more settings."""
    log = Path(f"{out}.log")
    run_ranks(RANKS, [__file__, "--rank", *WORDS, "--out", out, *words], log)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        make_run(out)
        PAGE.write_text(page_of(out))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2:])
    else:
        main()
