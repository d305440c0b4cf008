"""The measurements of test_gpu.py, each in its own process so that the device is empty. It judges nothing.

Usage: gpu_worker.py WORK DEVICE MODEL_DIR RESULT.json [WHAT]. DEVICE is cuda, or cpu for a dry run with
small sizes, where figures of the device's memory are 0. WORK is a row of WORKS, and WHAT its argument. The
result maps each completed check to its figures: seconds, bytes or nats unless the name differs.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

if "TORCHELASTIC_RUN_ID" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # otherwise products may differ from run to run
if sys.argv[2] == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

sys.path.insert(0, str(Path(__file__).parents[1]))  # before tests/, whose rooms have the same names

import torch
from torch.nn.attention import activate_flash_attention_impl

from config import AS_FITS, Config
from engines.engine import Answer, Engine, Request, Sampling
from inputs import hf_directory
from modes import lay_out
from runtime import devices, rendezvous, shutdown
from sample import Sample
from tests.gpu_model import SIZES
from tests.support.patience import LIMIT_S
from tests.workers.parallel import balanced, set_constants

os.environ.setdefault("PYTORCH_ALLOC_CONF", devices.PIN_EXACTLY)  # as in a run

DEVICE, MODEL, RESULT = sys.argv[2], sys.argv[3], Path(sys.argv[4])
HAS_GPU, SIZE = DEVICE == "cuda", SIZES[DEVICE]
FITS_BYTES = 32e9  # within this, some layers have to be recomputed
SHAPES = hf_directory.checkpoint_shapes(MODEL)
WEIGHT_BYTES = 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values())

figures: dict[str, dict[str, float]] = {}


def note(check: str, **found: float) -> None:
    """Save rank 0's figures of a check, so that they survive if the next check ends the process."""
    figures.setdefault(check, {}).update(found)
    if os.environ["RANK"] == "0":
        RESULT.write_text(json.dumps(figures))


def settings(**changes) -> Config:
    context = SIZE.prompt + SIZE.answer + 8
    sizes = dict(max_model_len=context, max_new_tokens=SIZE.answer)
    sizes |= dict(judge_max_new_tokens=SIZE.answer)
    sizes |= dict(max_tokens_per_micro_batch=SIZE.micro_batch, max_running_requests=SIZE.answers)
    learning = dict(lr=3e-5, lr_warmup_steps=0, mem_fraction=0.5, deterministic=False)
    return Config(**sizes | learning | dict(device=DEVICE, dtype="bfloat16") | changes)


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def used_bytes() -> int:
    if not HAS_GPU:
        return 0
    synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def timed(work: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def differences(samples: list[Sample], rows: list[list[float]]) -> dict[str, float]:
    pairs = [zip(s.logprobs, row, strict=True) for s, row in zip(samples, rows, strict=True)]
    distances = [abs(a - b) for row in pairs for a, b in row]
    apart = torch.tensor(distances, dtype=torch.float64).sort().values
    p999 = apart[int(0.999 * len(apart))].item()
    return dict(mean=apart.mean().item(), p999=p999, max=apart[-1].item())


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, SIZE.widths["vocab_size"]) for _ in range(count)]


def logprobs(actor, samples):
    return actor.read_tokens([[sample] for sample in samples])


def random_samples(actor) -> list[Sample]:
    """Return random answers of up to `SIZE.answer` tokens, with the actor's log-probabilities."""
    samples = []
    for number in range(SIZE.answers):
        length = SIZE.answer * (number + 1) // SIZE.answers
        sample = Sample(number, 0, random_tokens(SIZE.prompt, number))
        sample.response = random_tokens(length, -number - 1)
        sample.advantages = [(-1.0) ** number] * length
        samples.append(sample)
    for sample, row in zip(samples, logprobs(actor, samples), strict=True):
        sample.logprobs = row
    return samples


def update(actor, samples: list[Sample]) -> dict[str, float]:
    versions = [[actor.version] * len(sample.response) for sample in samples]
    fresh = [replace(s, versions=written) for s, written in zip(samples, versions, strict=True)]
    return actor.update(balanced(fresh, actor))


def state_of(actor) -> list[torch.Tensor]:
    """Return all that an update changes: weights, AdamW's state and its step counts."""
    parts = [part.optimizer.state.values() for part in actor.optimizer.chained_optimizers]
    counts = [x for states in parts for state in states for x in state.values() if not x.ndim]
    return [*actor._state_tensors(), *counts]


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return max((a.float() - b.to(a.device).float()).abs().max().item() for a, b in pairs)


def fill_the_device() -> None:
    """Overwrite the memory that a sleeping trainer released, so that stale data can't pass for restored."""
    if HAS_GPU:
        size = int(0.9 * torch.cuda.mem_get_info()[0])
        torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        torch.cuda.empty_cache()


def nap() -> None:
    """Let a trainer sleep and wake between two updates; repeat the same twice without sleep."""
    from actor import Actor
    from extras.memory.estimate import trainer_parts

    torch.use_deterministic_algorithms(True)
    actor = Actor(settings(), MODEL)
    samples = random_samples(actor)
    update(actor, samples)
    begun = to_host(state_of(actor))

    def again(between: Callable[[], None]) -> list[torch.Tensor]:
        for tensor, kept in zip(state_of(actor), begun, strict=True):
            tensor.data.copy_(kept)
        actor.version = 1
        between()
        update(actor, samples)
        return state_of(actor)

    def sleep() -> None:
        if HAS_GPU:
            torch.cuda.empty_cache()  # memory that earlier passes left doesn't count
        before = used_bytes()
        actor.sleep()
        parts = trainer_parts(hf_directory.checkpoint_shapes(MODEL), actor.config, actor.shape)
        states = parts["weights"] + parts["gradients"] + parts["optimizer"]
        note("release", given_back=before - used_bytes(), states=states)
        fill_the_device()
        actor.wake()
        note("nap", lost=furthest(state_of(actor), begun))

    plain = to_host(again(lambda: None))
    moved = max(furthest([a], [b]) for a, b in zip(plain, begun, strict=True) if a.ndim)
    note("nap", moved=moved, repeated=furthest(again(lambda: None), plain))
    note("nap", napped=furthest(again(sleep), plain))
    torch.use_deterministic_algorithms(False)


def ranks() -> None:
    """Make an update on two ranks: sum gradients during or after the backward pass, or use two stages."""
    from actor import Actor
    from training import trainer

    for name, overlaps, sizes in (
        ("during", True, {}),
        ("after", False, {}),
        ("stages", True, {"pp": 2}),
    ):
        trainer.OVERLAPS = overlaps
        actor = Actor(settings(**sizes), MODEL)
        metrics = update(actor, random_samples(actor))
        note(name, grad_norm=metrics["train/grad_norm"], loss=metrics["train/loss"])


def training_pass(how: str = "") -> None:
    """Time forward and backward passes of full micro-batches; record an optimizer step's peak memory.

    how: "recompute" recomputes all layers, "fits" as few as fit in a device of FITS_BYTES; FA3 and FA4 use
    torch's prototypes of newer attention and need their packages.
    """
    from actor import Actor
    from extras.memory.estimate import trainer_parts, with_recompute
    from training.lm_head import CHUNK_BYTES

    config = settings(mode="full", model=MODEL, judge=(MODEL,))
    if how in ("recompute", "fits"):
        config = replace(config, recompute=AS_FITS)
    if how == "fits":
        config = with_recompute(config, *lay_out(config, 1), FITS_BYTES)
        note("pass", layers=config.recompute, chunks=config.kept_chunks)
    actor = Actor(config, MODEL)
    if how.startswith("FA"):
        activate_flash_attention_impl(how)
    sequence = ([5], random_tokens(SIZE.sequence - 1, 0))
    packed = [[sequence] * (SIZE.micro_batch // SIZE.sequence)] * 2
    for _ in range(2):  # compiles, and makes AdamW's state
        actor.run_step(packed, actor.cross_entropy_loss, (), 1e-6)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    actor.run_step(packed, actor.cross_entropy_loss, (), 1e-6)
    peak = torch.cuda.max_memory_allocated() if HAS_GPU else 0
    parts = trainer_parts(hf_directory.checkpoint_shapes(MODEL), actor.config, actor.shape)
    predicted = sum(parts.values()) + config.kept_chunks * CHUNK_BYTES
    note("memory", peak=peak, predicted=predicted)
    work = lambda: actor._passes(packed, actor.cross_entropy_loss)  # noqa: E731
    seconds = statistics.median(timed(work) for _ in range(5))
    tokens_per_s = sum(map(len, packed)) * SIZE.sequence / seconds
    note("pass", tokens_per_s=tokens_per_s)


def launch(role: str, config: Config) -> Engine:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Engine.launch(role, 0, port, MODEL, config, RESULT.with_name(f"{role}.log"), "a key")


async def answers_of(engine: Engine, requests: list[Request]) -> list[Answer]:
    whole: dict[int, Answer] = {}
    async for part in engine.generate(requests):
        whole[part.index] = whole[part.index].extended(part) if part.index in whole else part
    return [whole[number] for number in range(len(requests))]


async def sampled(engine: Engine) -> list[Sample]:
    sampling = Sampling(1.0, SIZE.answer, ignore_eos=True)
    prompts = [random_tokens(SIZE.prompt, number) for number in range(SIZE.answers)]
    requests = [Request(prompt, sampling, SIZE.answer) for prompt in prompts]
    answers = await answers_of(engine, requests)
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sample = Sample(number, 0, prompt, response=answer.tokens, logprobs=answer.logprobs)
        sample.versions, sample.finish = answer.versions, answer.finish
        sample.advantages = [(-1.0) ** number] * len(answer.tokens)
        samples.append(sample)
    return samples


async def serve_and_learn(tp: str = "1") -> None:
    """Let an engine and a trainer alternate on the device, as in a run, with two updates and pushes."""
    from actor import Actor

    config, before = settings(rollout_tp=int(tp)), used_bytes()
    engine = launch("rollout", config)
    try:
        begun = time.perf_counter()
        await engine.ready(LIMIT_S)
        note("serve", start_s=time.perf_counter() - begun)
        written = await sampled(engine)
        awake = used_bytes()
        await engine.sleep()
        total = torch.cuda.mem_get_info()[1] if HAS_GPU else 0
        memory = dict(before=before, awake=awake, asleep=used_bytes())
        note("release", **memory, share=config.mem_fraction * total)
        actor = Actor(config, MODEL)
        note("agreement", **differences(written, logprobs(actor, written)))
        for version in (1, 2):
            update(actor, written)
            note("push", stale=differences(written, logprobs(actor, written))["mean"])
            begun = time.perf_counter()
            await push(engine, actor)
            note("push", seconds=time.perf_counter() - begun)
            begun = time.perf_counter()
            written = await sampled(engine)
            seconds = time.perf_counter() - begun
            note("serve", tokens_per_s=SIZE.answers * SIZE.answer / seconds)
            assert {v for sample in written for v in sample.versions} == {version}
            begun = time.perf_counter()
            await engine.sleep()
            note("release", sleep_s=time.perf_counter() - begun)
            note("release", trainer_wake_s=timed(actor.wake))
            note("push", **differences(written, logprobs(actor, written)))
    finally:
        await engine.close()


async def push(engine: Engine, actor) -> None:
    """Go from training to serving, in placement.py's order."""
    actor.trim()
    asleep = used_bytes()
    await engine.wake_weights()
    note("push", weights=WEIGHT_BYTES, room=used_bytes() - asleep)
    await engine.load_weights(actor.named_weights(), actor.version)
    actor.sleep()
    await engine.wake_kv_cache()


async def same_tokens() -> None:
    """Check that a deterministic judge answers the same by itself, among others, and after sleep."""
    dtype = "bfloat16" if HAS_GPU else "float32"  # what cpu/invariance.py is for
    engine = launch("genrm", settings(deterministic=True, dtype=dtype))
    try:
        await engine.ready(LIMIT_S)
        asked = [request(number) for number in range(8)]
        alone = [(await answers_of(engine, [one]))[0] for one in asked]
        others = [request(number) for number in range(8, SIZE.answers)]
        together = (await answers_of(engine, others + asked))[-len(asked) :]
        note("deterministic", **equal_answers(alone, together))
        before = used_bytes()
        await engine.sleep()
        given_back = before - used_bytes()
        await engine.wake_weights()
        await engine.wake_kv_cache()
        note("judge", **equal_answers(alone, await answers_of(engine, asked)))
        note("judge", weights=WEIGHT_BYTES, given_back=given_back)
    finally:
        await engine.close()


async def full() -> None:
    """Start both engines, then a trainer, as in full mode; the trainer learns and pushes."""
    from actor import Actor
    from extras.memory.estimate import peaks_of

    config = settings(mode="full", model=MODEL, judge=(MODEL,), mem_fraction=0.3)
    engines, before = {}, used_bytes()
    try:
        for role in ("rollout", "genrm"):
            engines[role] = launch(role, config)
            await engines[role].ready(LIMIT_S)
            written = await sampled(engines[role])
            await engines[role].sleep()
            asleep = used_bytes()
            note("asleep", **{role: asleep - before})
            before = asleep
        actor = Actor(config, MODEL)
        update(actor, written)
        actor.sleep()
        note("asleep", actor=used_bytes() - before)
        actor.wake()
        update(actor, written)
        peaks = peaks_of(config, *lay_out(config, 1), device=0.0)
        with most_used() as most:
            await push(engines["rollout"], actor)
        note("push", peak=max(most), predicted=peaks["the push"])
        written = await sampled(engines["rollout"])
        assert {v for sample in written for v in sample.versions} == {actor.version}
    finally:
        for engine in engines.values():
            await engine.close()


@contextlib.contextmanager
def most_used() -> Iterator[list[int]]:
    """Record the device's peak memory use by sampling it every few milliseconds."""
    found, is_over = [used_bytes()], threading.Event()

    def look() -> None:
        while not is_over.wait(0.005):
            free, total = torch.cuda.mem_get_info() if HAS_GPU else (0, 0)
            found.append(total - free)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield found
    finally:
        is_over.set()
        watch.join()


def request(number: int) -> Request:
    """Return a request: every fourth is greedy, and prompt lengths differ."""
    prompt = random_tokens(SIZE.prompt - number % 7, number)
    sampling = Sampling(0.0 if number % 4 == 0 else 1.0, SIZE.answer, ignore_eos=True)
    return Request(prompt, sampling, SIZE.answer, seed=number)


def equal_answers(some: list[Answer], others: list[Answer]) -> dict[str, float]:
    """Return how many answers have the same tokens, and how many also the same log-probabilities."""
    pairs = list(zip(some, others, strict=True))
    tokens = sum(a.tokens == b.tokens for a, b in pairs)
    bits = sum((a.tokens, a.logprobs) == (b.tokens, b.logprobs) for a, b in pairs)
    return dict(answers=len(pairs), same_tokens=tokens, same_logprobs=bits)


WORKS: dict[str, Callable] = {
    "nap": nap,
    "pass": training_pass,
    "ranks": ranks,
    "serve": lambda *tp: asyncio.run(serve_and_learn(*tp)),
    "full": lambda: asyncio.run(full()),
    "same": lambda: asyncio.run(same_tokens()),
}


if __name__ == "__main__":
    set_constants()  # engines may be far off: this is measured, and must not end an update
    sys.excepthook = shutdown.leave_with_traceback
    try:
        world = rendezvous.join(settings())
        world.enter_device()
        WORKS[sys.argv[1]](*sys.argv[5:])
    finally:
        rendezvous.close()
    shutdown.leave(0)
