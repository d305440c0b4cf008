"""Hooks: where the core calls what extras add. extras/__init__.py fills them when run.py loads it.

What an extra adds is given as `module:name`, and imported when the hook is called: some modules import
Megatron or matplotlib, which take seconds.
"""

from pkgutil import resolve_name
from typing import Any

from runtime.errors import UserError

# hook -> extra -> what it adds. A comment names who calls it, with what, for what
HOOKS: dict[str, dict[str, str]] = {
    "rows": {},  # extras.load: a module whose import adds rows to MODES, PLACEMENTS or other tables
    "command": {},  # run.start: (arguments, usage) -> last line of what is done instead of a run, or None
    "evaluation": {},  # build.work_of, with --steps 0: a build.Work
    "launcher": {},  # examples/quiet_torchrun.py, before it runs torchrun: ()
    # before engines start, to raise UserError
    "device_check": {},  # choose_device, on every rank with --device cuda: (config)
    "model_check": {},  # build.check_directories, once on each machine: (config, placement)
    # modes.lay_out: (placement, config, ranks of a machine) -> the placement with the push that runs
    "push_kind": {},
    "run_check": {},  # run.run: (config, placement, splits, world) -> the settings to use (collective)
    # what build.load_inputs reads
    "end_tokens": {},  # (config, the policy's tokenizer) -> its tokens that also end an answer
    "rule_file": {},  # rewards.load, if a rule isn't a row of RULES: (title, spec, signal, seconds) -> a rule
    "environment": {},  # (config, the policy's tokenizer, its stop tokens) -> a state.Environment, or None
    # what loads users' functions and classes: (title, spec, name, kind, forms of spec, seconds) -> its calls
    "user_code": {},
    "loss_term": {},  # (algorithm, the policy's tokenizer, longest text in tokens) -> Actor.terms, or None
    # models that see
    "image_reader": {},  # tokenization.reader_of: (directory, frames per second, most frames) -> a reader
    "demo_media": {},  # task.Addition: (preset, two summands, a key) -> a task.Shown
    "image_collapse": {},  # Engine.generate: (prompt, its images) -> the prompt as SGLang reads it
    "image_packing": {},  # make_micro_batches: (batch, sequences, taken) -> the batch with its images
    "vision_stage": {},  # model.read_hf_config: the class of the first stage
    # models that learn, on the ranks that hold them
    "colocation": {},  # placement.colocation_of, unless all share all ranks: (placement) -> a Colocated
    # build.build_models, if the placement pushes shards: (placement, actor, seconds) -> this rank's
    # Models.shard_push, or None (collective: all ranks)
    "shard_push": {},
    "critic": {},  # build.build_models, if the algorithm has critics: a Trainer
    "adapters": {},  # Actor, before its optimizer is built: (config, gpt)
    "served": {},  # modes.collect, instead of `serve`: (controller, step) -> the step's RolloutBatch
    # engines
    "cpu_server": {},  # server.kind_of, with --device cpu: a ServerProcess
    "server_patch": {},  # server_main.main, in each engine's process before it starts: (SGLang's settings)
    # reports
    "sample_columns": {},  # metrics.local_facts, for samples.jsonl: (config, sample, decode) -> columns
    "picture": {},  # Report.close, on rank 0: (the run's folder) -> a figure, OUT/timeline.png
}


def added(hook: str) -> list[Any]:
    """Import and return what extras add at a hook."""
    return [resolve_name(name) for name in HOOKS[hook].values()]


def needed(hook: str, asked: str) -> Any:
    """Return what an extra adds at a hook. asked: what needs it, for the UserError if none does."""
    for name in HOOKS[hook].values():
        return resolve_name(name)
    raise UserError(f"{asked} needs an extra with the hook {hook!r}, and there is none")
