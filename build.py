"""Builds what a controller works with: checks of the settings, inputs, servers, models."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import controller
import data
import modes
import rewards
from algorithms import Algorithm, algorithm_of
from checkpoint import open_checkpoints
from config import HELD_OUT, Config, as_text
from demo import task
from engines import server
from engines.engine import Sampling
from engines.fleet import ServerSpec
from genrm import formats_of
from inputs import tokenization
from inputs.numbers import number_key
from inputs.prompt_file import PromptFile
from inputs.shuffled import Shuffled
from placement import Models, colocation_of
from reporting.metrics import Report
from runtime.errors import UserError
from runtime.hooks import added, needed
from runtime.out_folder import NoSaves
from runtime.shared import once_a_machine
from runtime.world import World
from scheduling.layout import Placement, Shape
from scheduling.measured import Split
from scheduling.pipeline import schedule_of
from state import Controller, Environment

if TYPE_CHECKING:  # it imports Megatron, which takes seconds
    from training.trainer import Trainer

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # one process


class Work(NamedTuple):
    """The work of a run's controllers: to train, or to evaluate."""

    run: Callable[[Controller], Awaitable[bool]]  # returns whether a stop ended it
    # (config, world, print) -> its checkpoints, with --out prepared (collective: all ranks)
    open_saves: Callable[[Config, World, Callable[[str], None]], Awaitable[NoSaves]]
    report: type[Report]
    last_line: Callable[[Controller], str]  # what a stopped run prints


def last_line(c: Controller) -> str:
    """Return what a stopped training run prints at its end."""
    saved = "nothing was saved"
    if c.checkpoints.newest == c.state.step:
        without = "" if c.config.resume == "auto" else ", without --resume,"
        saved = f"the same command{without} continues"
    return f"stopped after {c.state.step} of {c.config.steps} steps; {saved}"


TRAINING = Work(controller.train, open_checkpoints, Report, last_line)


def work_of(config: Config) -> Work:
    """Return what the run does. Raises UserError if it evaluates, and no extra does that."""
    return needed("evaluation", "--steps 0") if config.evaluates else TRAINING


# ---------------------------------------------------------------- checks of the settings


def launched(variable: str) -> int:
    """Return a count that torchrun sets, or 0 without it. Raises UserError if it isn't a number."""
    text = os.environ.get(variable, "0")
    if not re.fullmatch("[0-9]{1,6}", text):
        raise UserError(f"{variable}={text} in the environment is not a number: unset it")
    return int(text)


def placed(config: Config) -> tuple[Placement, list[Split]]:
    """Check the settings for the ranks that torchrun started; without it, an evaluation has one rank."""
    if config.evaluates and not {*ALONE} & os.environ.keys():
        os.environ |= ALONE
    ranks = launched("WORLD_SIZE")
    return check_settings(config, ranks or 2, launched("LOCAL_WORLD_SIZE"))


def check_settings(
    config: Config, ranks: int, on_machine: int = 0
) -> tuple[Placement, list[Split]]:
    """Check the settings against the tables and the number of ranks. Returns modes.lay_out's result."""
    algorithm = algorithm_of(config)
    formats_of(config)
    schedule_of(config)
    work_of(config)
    asked = f"--algorithm {as_text(config.algorithm)}"
    for hook, is_used in {"critic": algorithm.critics, "loss_term": algorithm.ptx_data}.items():
        if is_used:
            needed(hook, asked)
    return modes.lay_out(config, ranks, on_machine)


def check_directories(config: Config, placement: Placement) -> None:
    """Raise UserError if a model's directory can't be used."""
    from training import model

    model.check_models(config, placement, formats_of(config))
    for check in added("model_check"):
        check(config, placement)


# ---------------------------------------------------------------- inputs, servers, models


class Inputs(NamedTuple):
    """The parts that are read before anything starts."""

    algorithm: Algorithm
    decode: Callable[[list[int]], str]  # the policy's tokens -> text
    prompts: data.Prompts
    rewards: rewards.Rewards
    sampling: Sampling  # how answers are sampled
    terms: list[Any]  # Actor.terms
    environment: Environment


def load_inputs(config: Config, rules: list[rewards.Rule], say: Callable[[str], None]) -> Inputs:
    """Read tokenizers and data. rules: from `rewards.load_rules`. Raises UserError if any can't be used."""
    algorithm = algorithm_of(config)
    longest = server.context_length(config.model, config)
    if not config.evaluates:
        longest = min(longest, config.max_tokens_per_micro_batch)
    room = longest - config.max_new_tokens
    if room < 1:
        raise UserError(
            f"--max-new-tokens {config.max_new_tokens} leaves prompts no room: with their answers "
            f"{config.model} takes {longest} tokens"
        )
    tokenizer, *judges = tokenization.load_tokenizers(config, say)
    clips = (config.video_fps, config.video_frames)
    models = (config.model, *config.judge_models)
    reader, *readers = (tokenization.reader_of(model, *clips) for model in models)
    stop = tokenization.stop_tokens(config.model, tokenizer, reader, say)
    ends = {end for find in added("end_tokens") for end in find(config, tokenizer)}
    stop = tuple(sorted({*stop, *ends}))
    decode = partial(tokenization.decode, tokenizer, ends=stop)
    environments = (build(config, tokenizer, stop) for build in added("environment"))
    environment = next(filter(None, environments), Environment())
    rows = dict(tokenizer=tokenizer, reader=reader, max_tokens=room, say=say)
    rows |= dict(read_key=formats_of(config)[0].read_key, keeps_turns=environment.keeps_turns)
    checks = environment.row_checks(say)
    source = source_of(config, partial(PromptFile, **rows), tokenizer, reader, judges, checks)
    groups = dict(keeps_groups=config.over_dispatch > 1, has_greedy=algorithm.greedy)
    threads = ThreadPoolExecutor(data.READERS) if reader else None
    images = dict(has_images=reader is not None, threads=threads)
    prompts = data.Prompts(source, config.answers_per_prompt, **groups, **images)
    is_exact = config.answer_tokens > 0
    sampling = Sampling(config.temperature, config.max_new_tokens, stop, ignore_eos=is_exact)
    scores = rewards.build(config, rules, judges, decode, readers)
    scores.counted += environment.counted
    terms = (build(algorithm, tokenizer, longest) for build in added("loss_term"))
    terms = list(filter(None, terms))
    return Inputs(algorithm, decode, prompts, scores, sampling, terms, environment)


def source_of(
    config: Config,
    read: Callable[..., PromptFile],
    tokenizer: tokenization.Tokenizer,
    reader: tokenization.Reader | None,
    judges: list[tokenization.Tokenizer],
    checks: list[Callable],
) -> data.Source:
    """Return --data or the demo's sums; --eval-data replaces the prompts that these hold out.

    checks: of each prompt. Raises UserError if a row can't be used, or if pass@k would have no prompt.
    """
    if config.data:
        source = training_rows(config, read, judges, checks)
    else:
        encode = partial(tokenization.encode_prompt, tokenizer, reader)
        source = task.Addition(config.seed, encode, reader, config.preset)
    if config.eval_data:
        needs = {} if config.environment else {"--eval-data": str}
        rows = dict(needs=needs, setting="--eval-data", checks=checks)
        source.held_out = read(Path(config.eval_data), **rows)
        trained = source.rows if config.data else None
        once_a_machine("repeats", map(source.held_out.compare, [trained]))
    if config.eval_samples and not source.held_out:
        raise UserError("--eval-samples: no held-out prompt has an `answer`; see --eval-data")
    return source


def training_rows(
    config: Config,
    read: Callable[..., PromptFile],
    judges: list[tokenization.Tokenizer],
    checks: list[Callable],
) -> Shuffled:
    """Read --data, and hold out some rows. Raises UserError if a row can't be used."""
    read_key = {"right": str, "number": number_key}  # for rules that compare with a row's key
    rules = read_key.keys() & {*config.rule, *config.cost_rule}
    needs = {f"the rule {rule}": read_key[rule] for rule in sorted(rules)}
    formats = zip(judges, formats_of(config), strict=False)
    checks = [*checks, *(partial(row.check, tokenizer) for tokenizer, row in formats)]
    rows = read(Path(config.data), needs=needs, checks=checks)
    return rows.shuffled(config.seed, 0 if config.eval_data else HELD_OUT)


def servers_of(
    rank: int, config: Config, placement: Placement, splits: list[Split]
) -> list[ServerSpec]:
    """Return the servers that a rank owns in any of the splits."""
    specs = []
    if any(rank in placement.leads("rollout", split) for split in splits):
        port = server.port_of(config, rank, "rollout")
        stride = placement.stride("rollout")
        specs.append(ServerSpec("rollout", port, config.model, stride=stride))
    if any(rank in placement.leads("genrm", split) for split in splits):
        model = placement.judge_of(rank, len(config.judge_models))
        engine = formats_of(config)[model].engine
        port = server.port_of(config, rank, "genrm")
        specs.append(ServerSpec("genrm", port, config.judge_models[model], model, engine))
    return specs


def build_models(
    config: Config, inputs: Inputs, placement: Placement, splits: list[Split]
) -> Models:
    """Build this rank's models, which are asleep; none for an evaluation (collective: all ranks)."""
    if config.evaluates:
        return Models([], [])
    from actor import Actor
    from training.groups import make_groups

    groups = {}
    for shape in dict.fromkeys(placement.models):
        groups[shape] = make_groups(shape, config.timeout_s)

    colocation = colocation_of(placement)

    def made(kind: type[Trainer], shape: Shape, model: str, **options: Any) -> Trainer:
        own = shape.sized(config)
        if groups[shape] is None:
            return colocation.stand_in(own, model, shape, **options)
        return kind(own, model, groups=groups[shape], **options)

    actor = made(Actor, placement.actor, config.model)
    actor.terms = inputs.terms
    actor.stop_tokens = inputs.sampling.stop_token_ids
    actor.sleep()
    references = []
    if inputs.algorithm.kl_coef and placement.actor_is_reference(config):
        references.append(actor)
    elif inputs.algorithm.kl_coef:
        references.append(made(Actor, placement.reference, config.reference, learns=False))
        references[0].sleep()
    critics = []
    for name in inputs.algorithm.critics:
        critic = needed("critic", f"--algorithm {as_text(config.algorithm)}")
        critics.append(made(critic, placement.critic, config.critic or config.model, name=name))
        critics[-1].sleep()
    engines = {rank for split in splits for rank in placement.leads("rollout", split)}
    senders = [copy[0] for copy in placement.actor.copies]
    receivers = sorted(engines - {*placement.actor.ranks})
    route = colocation.connect(senders, receivers, config.timeout_s)
    shard_push = None
    if placement.pushes_shards:
        shard_push = needed("shard_push", "a push of shards")(placement, actor, config.timeout_s)
    return Models([actor, *critics], references, route, shard_push)
