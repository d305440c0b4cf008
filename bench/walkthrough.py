"""docs/walkthrough.md: a step of the demo with all its numbers, beside the lines of code that made them.

    python bench/walkthrough.py        a run of the demo, then the page: a minute; `make walkthrough`

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
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import controller
import data
import run
from algorithms import Algorithm, algorithm_of
from bench.measuring import ROOT, run_ranks
from config import Config, parse_config
from engines import wire
from genrm import formats_of
from reporting import timeline
from rollout import MEETING_INTERVAL_S
from sample import flat
from scheduling.dynamic_sampling import MARGIN, DynamicSampler

STEP = 2  # the third: files count from 0
PROMPT = 51  # the one that the page follows
TOKENS = ((2, 0), (0, 16), (5, 1))  # answer and place, from 0, of those in the table of the loss
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
    """The answers to one prompt, what the judge is asked and writes, and how the rewards are spread."""
    tokenizer, *_ = data.load_tokenizers(config, print)
    judge = formats_of(config)[0]
    answers = defaultdict(list)  # the cells of a row -> numbers of the answers
    verdicts = defaultdict(list)
    for sample in group:
        sample.text = data.decode(tokenizer, sample.response)
        sample.pieces = [data.decode(tokenizer, [token]) for token in sample.response]
        answers[f"`{sample.text}` | {len(sample.response)}"].append(sample.index)
        asked = judge.prompt(sample.question, judge.answer_of(sample.text, sample.finish))
        said = f"`{asked}` | `{sample.critique}` | {sample.reward:g} | {sample.advantage:+.4f}"
        verdicts[said].append(sample.index)
    rewards = [sample.reward for sample in group]
    answer_rows = [f"| {numbers(who)} | {what} |" for what, who in answers.items()]
    verdict_rows = [f"| {numbers(who)} | {what} |" for what, who in verdicts.items()]
    head = "| answers | the judge is asked | it writes | reward | advantage |"
    return {
        "answers": table("| answers | text | tokens |", answer_rows),
        "verdicts": table(head, verdict_rows),
        "asked": len(verdicts),
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
            probability = math.exp(trainer)
            pull = sample.advantage * (1 - probability)
            read = f"{engine:.6f} | {trainer:.6f} | {probability:.4f} | {ratio:.6f}"
            row = f"{read} | {sample.advantage:+.4f} | {term:+.4f} | {pull:+.4f} |"
            rows[sample.prompt_id, sample.index, place] = row
    assert math.isclose(total / count, reported, rel_tol=1e-5), "the run's loss is another"
    group = {sample.index: sample for sample in samples if sample.prompt_id == PROMPT}
    told = []
    for index, place in TOKENS:
        piece = group[index].pieces[place]
        told.append(f"| {index} | {place + 1}: `{piece}` | {rows[PROMPT, index, place]}")
    head = "| answer | token | engine | trainer | probability | ratio | advantage | term | pull |"
    return {"terms": table(head, told), "tokens": count, "total": total, "loss": total / count}


def times_of(out: Path, owner: int) -> str:
    """What happened when, in seconds since the ranks began to serve the step. owner: of the prompt."""
    begin: dict[str, float] = {}
    end: dict[str, float] = {}
    for event in timeline.read(out / "spans", STEP, STEP):
        name = event.name
        if event.kind == "sample":
            is_told = event.args["answer"].startswith(f"{PROMPT}.")
            name = f"{name} of {'the prompt' if is_told else 'others'}"
        begin[name] = min(event.start, begin.get(name, event.start))
        end[name] = max(event.end, end.get(name, event.end))
    moments = [
        (begin["serve"], "both controllers begin to serve the step"),
        (begin["queued of the prompt"], f"rank {owner} asks rank 0's engine for the eight answers"),
        (
            begin["judging of the prompt"],
            "one of them is finished; rank 1's engine is asked about it",
        ),
        (end["decoding of the prompt"], "the last of them is finished"),
        (begin["wave 2"], "wave 2 is drawn"),
        (end["judging of the prompt"], "the last verdict on the eight is there"),
        (end["rollout"], "rank 0's engine has written all answers of the step"),
        (end["genrm"], "rank 1's engine has judged all of them"),
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
    values = {"config": config, "metrics": metrics[STEP], "group": group, "samples": len(samples)}
    values |= answers_of(group, config)
    values |= waves_of(ranks, metrics[STEP - 1]["rollout/groups_per_kept"], config)
    values |= loss_of(samples, metrics[STEP]["train/loss"], algorithm_of(config))
    values |= {"deal": deal_of(samples), "interval": MEETING_INTERVAL_S}
    values["trains"] = [numbers(s.index for s in group if s.trainer == rank) for rank in (0, 1)]
    values["times"] = times_of(out, group[0].owner)
    # the first push was of the weights that the run began with
    values["push"] = ranks[0].pushes[STEP + 1]
    paragraphs = TEMPLATE.read_text().format(**values).split("\n\n")
    return CODE.sub(fenced, "\n\n".join(map(laid_out, paragraphs)))


def make_run(out: Path, *words: str) -> None:
    """The demo as far as the step behind this one. words: more settings."""
    log = out.with_suffix(".log")
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
