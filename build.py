"""Builds what a controller works with: checks of the settings, inputs, servers, models.

The tables here are where extras join a run; the rest of the core names none.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
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
from config import HELD_OUT, Config
from demo import task
from engines import server
from engines.engine import Sampling
from engines.fleet import ServerSpec
from genrm import formats_of
from inputs import media, tokenization
from inputs.numbers import number_key
from inputs.prompt_file import PromptFile
from inputs.shuffled import Shuffled
from placement import Models, row_of
from reporting.metrics import Report
from runtime.errors import UserError
from runtime.out_folder import NoSaves
from runtime.world import World
from scheduling.layout import Placement, Shape
from scheduling.measured import Split
from scheduling.pipeline import schedule_of
from state import Controller, Environment

if TYPE_CHECKING:  # they import Megatron, which takes seconds
    from actor import Term
    from training.trainer import Trainer

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # one process


class Work(NamedTuple):
    """What a run does with its controllers."""

    run: Callable[[Controller], Awaitable[bool]]  # returns whether a stop ended it
    # (config, world, say) -> its checkpoints, with --out prepared (collective: all ranks)
    open_saves: Callable[[Config, World, Callable[[str], None]], Awaitable[NoSaves]]
    report: Callable[[Inputs], Callable[..., Report]]
    last_line: Callable[[Controller], str]  # of a run that was stopped


def stopped_training(c: Controller) -> str:
    saved = "nothing was saved"
    if c.checkpoints.newest == c.state.step:
        saved = "the same command, without --resume, continues"
    return f"stopped after {c.state.step} of {c.config.steps} steps; {saved}"


def actor_kind(config: Config) -> type:
    from actor import Actor

    return Actor


def check_models(config: Config, placement: Placement) -> None:
    from training import model

    model.check_models(config, placement, formats_of(config))


# ---------------------------------------------------------------- the tables that extras add rows to

# words of the command line -> what to do instead of a run: (arguments, usage) -> the last line
COMMANDS: dict[str, Callable[[list[str], str], str]] = {}
WORKS = {"train": Work(controller.train, open_checkpoints, lambda inputs: Report, stopped_training)}
# checks of the models' directories, before the ranks meet
DIRECTORIES: list[Callable[[Config, Placement], None]] = [check_models]
# checks of the whole run, before engines start; they may choose settings (collective: all ranks)
CHECKS: list[Callable[[Config, Placement, list[Split], World], Awaitable[Config]]] = []
# who answers the policy's turns: (config, the policy's tokenizer, its stop tokens); None: nobody
ENVIRONMENTS: list[Callable[[Config, Any, tuple[int, ...]], Environment | None]] = []
# terms of an update: (algorithm, the policy's tokenizer, longest text in tokens)
TERMS: list[Callable[[Algorithm, Any, int], Term | None]] = []
# model to train -> its class
KINDS: dict[str, Callable[[Config], type]] = {"actor": actor_kind}


def needed(table: Mapping[str, Any], name: str, asked: str) -> Any:
    """Return a row of a table. Raises UserError if no extra has added it."""
    if name not in table:
        raise UserError(f"{asked}: no extra has the row {name!r}")
    return table[name]


# ---------------------------------------------------------------- checks of the settings


def launched(variable: str) -> int:
    """Return a count that torchrun sets, or 0 without it. Raises UserError if it isn't a number."""
    text = os.environ.get(variable, "0")
    if not text.isdigit():
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
    if algorithm.critics:
        needed(KINDS, "critic", f"--algorithm {algorithm.name}")
    if algorithm.ptx_data and not TERMS:
        raise UserError(f"--algorithm {algorithm.name} ptx_data=...: no extra reads it")
    needed(WORKS, config.work, f"--steps {config.steps}")
    return modes.lay_out(config, ranks, on_machine)


def check_directories(config: Config, placement: Placement) -> None:
    """Raise UserError if a model's directory can't be used."""
    for check in DIRECTORIES:
        check(config, placement)


# ---------------------------------------------------------------- inputs, servers, models


class Inputs(NamedTuple):
    """The parts that are read before anything starts."""

    algorithm: Algorithm
    decode: Callable[[list[int]], str]  # the policy's tokens -> text
    prompts: data.Prompts
    rewards: rewards.Rewards
    sampling: Sampling  # how answers are sampled
    terms: list[Term]  # of an update
    environment: Environment | None


def load_inputs(config: Config, rules: list[rewards.Rule], say: Callable[[str], None]) -> Inputs:
    """Read tokenizers and data. rules: from `rewards.load_rules`. Raises UserError if any can't be used."""
    algorithm = algorithm_of(config)
    longest = server.context_length(config.model, config)
    if not config.evaluates:
        longest = min(longest, config.max_tokens_per_micro_batch)
    tokenizer, *judges = tokenization.load_tokenizers(config, say)
    clips = (config.video_fps, config.video_frames)
    reader, *readers = (
        media.reader_of(model, *clips) for model in (config.model, *config.judge_models)
    )
    decode = partial(tokenization.decode, tokenizer)
    room = longest - config.max_new_tokens
    if room < 1:
        raise UserError(
            f"--max-new-tokens {config.max_new_tokens} leaves prompts no room in the {longest} "
            f"tokens of {config.model}"
        )
    how = dict(tokenizer=tokenizer, max_tokens=room, say=say, reader=reader)
    stop = tokenization.stop_tokens(config.model, tokenizer, reader, say)
    found = (build(config, tokenizer, stop) for build in ENVIRONMENTS)
    environment = next(filter(None, found), None)
    checks = []
    if environment:
        checks.append(environment.row_check(say))
        how["keeps_turns"] = True
    read = partial(PromptFile, **how, read_key=formats_of(config)[0].read_key)
    if config.data:
        source = training_rows(config, read, judges, checks)
    else:
        encode = partial(tokenization.encode_prompt, tokenizer, reader)
        source = task.Addition(config.seed, encode, reader, task.show_of(config.preset))
    if config.eval_data:
        path = Path(config.eval_data)
        needs = {} if environment else {"--eval-data": str}
        source.held_out = read(path, needs=needs, setting="--eval-data", checks=checks)
    if config.eval_samples and not source.held_out:
        raise UserError("--eval-samples: no held-out prompt has an `answer`; see --eval-data")
    keeps = {"keeps_groups": config.over_dispatch > 1, "has_greedy": algorithm.greedy}
    if reader:
        keeps |= {"has_images": True, "threads": ThreadPoolExecutor(data.READERS)}
    prompts = data.Prompts(source, config.answers_per_prompt, **keeps)
    is_exact = config.answer_tokens > 0
    sampling = Sampling(config.temperature, config.max_new_tokens, stop, ignore_eos=is_exact)
    scores = rewards.build(config, rules, judges, decode, readers)
    if environment:
        scores.counted.append(environment)
    terms = [build(algorithm, tokenizer, longest) for build in TERMS]
    terms = list(filter(None, terms))
    return Inputs(algorithm, decode, prompts, scores, sampling, terms, environment)


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
        specs.append(ServerSpec("rollout", server.port_of(config, rank, "rollout"), config.model))
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
    from training.groups import make_groups

    groups = {}
    for shape in dict.fromkeys(placement.models):
        groups[shape] = make_groups(shape, config.timeout_s)

    colocation = row_of(config).colocation(placement)

    def made(kind: str, shape: Shape, model: str, **how: Any) -> Trainer:
        own = shape.sized(config)
        if groups[shape] is None:
            return colocation.stand_in(own, model, shape, **how)
        return KINDS[kind](config)(own, model, groups=groups[shape], **how)

    actor = made("actor", placement.actor, config.model)
    actor.terms = inputs.terms
    actor.stop_tokens = inputs.sampling.stop_token_ids
    actor.sleep()
    references = []
    if inputs.algorithm.kl_coef and placement.actor_is_reference(config):
        references.append(actor)
    elif inputs.algorithm.kl_coef:
        references.append(made("actor", placement.reference, config.reference, learns=False))
        references[0].sleep()
    critics = []
    for name in inputs.algorithm.critics:
        model = config.critic or config.model
        critics.append(made("critic", placement.critic, model, name=name))
        critics[-1].sleep()
    engines = {rank for split in splits for rank in placement.leads("rollout", split)}
    senders = [copy[0] for copy in placement.actor.copies]
    receivers = sorted(engines - {*placement.actor.ranks})
    route = colocation.connect(senders, receivers, config.timeout_s)
    return Models([actor, *critics], references, route)
