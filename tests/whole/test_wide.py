"""Engines that span several ranks, on the CPU: they write what an engine of one rank writes."""

import asyncio

import pytest

from config import DEMO_MODELS, Config
from engines import server
from engines.engine import Engine, Sampling, seed_of
from inputs import tokenization
from tests.support.fakes import requests_of
from tests.support.launched import Run, free_ports, rows_done, saved
from tests.support.patience import LIMIT_S
from tests.support.rounding import apart

ACTOR = DEMO_MODELS / "written" / "actor"
NEAR = apart(3 * 288)  # the longest sum in each of three layers
JUDGE = DEMO_MODELS / "written" / "judge"
SHORT = ("--prompts-per-step", 4, "--steps", 2, "--log-samples", 32, "--save-every", 1)
FULL = ("--mode", "full")
TWO = ("--rollout-tp", 2, "--genrm-tp", 2)
AHEAD = ("--placement", "standalone", "--ahead", 1, *FULL)
SPLIT = ("--placement", "split", "--algorithm", "ppo", *FULL)
JUDGES = ("--preset", "tiny", "--model", ACTOR, "--judge", JUDGE, JUDGE, *FULL)
CASES = {  # name -> ranks, settings, those of wide engines
    "two ranks": (2, FULL, TWO),
    "four ranks write, two judge": (4, FULL, ("--rollout-tp", 4, "--genrm-tp", 2)),
    "partial": (4, (), ("--rollout-tp", 2)),
    "fused": (4, ("--mode", "fused"), TWO),
    "a tail that moves": (4, ("--mode", "fused", "--rebalance"), TWO),
    "images": (2, ("--preset", "images", *FULL), ("--rollout-tp", 2)),
    "lora": (2, ("--lora", 4, *FULL), ("--rollout-tp", 2)),
    "apart, ahead": (4, AHEAD, TWO),
    "split": (4, SPLIT, TWO),
    "two judges": (4, JUDGES, TWO),
}
QUICK = "two ranks"


@pytest.mark.parametrize(
    "name",
    [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != QUICK)],
)
def test_a_run_has_the_samples_of_engines_of_one_rank(name, tmp_path):
    """All must be equal to the last character; the trainer must find the engine's log-probabilities."""
    ranks, how, wide = CASES[name]
    narrow = Run(tmp_path / "narrow", *SHORT, *how, ranks=ranks).ended()
    run = Run(tmp_path / "wide", *SHORT, *how, *wide, ranks=ranks).ended()
    run.check_nothing_is_left()
    assert "rollout engines run plain torch" in run.stdout + run.stderr
    samples = [(each.out / "samples.jsonl").read_bytes() for each in (narrow, run)]
    assert samples[0] == samples[1] and samples[0].count(b"\n") >= 2 * 8
    apart_by = [row.get("train/engine_logprob_diff_max") for row in run.rows()[:2]]
    assert max(filter(None, apart_by)) <= 1e-4  # ahead, the second step has no fresh token


@pytest.mark.slow
@pytest.mark.parametrize("second", ["TP0", "TP1"])
def test_a_killed_rank_of_an_engine_ends_the_run_in_one_line(second, tmp_path):
    run = Run(tmp_path, *SHORT, *FULL, *TWO, "--steps", 1000)
    run.struck((rows_done(1), lambda run: run.engine("rollout", 0, f"_{second}").kill()))
    run.check_one_line("the rollout engine of rank 0 ", status=1)
    run.check_nothing_is_left()


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    how = (*SHORT, "--steps", 4, *FULL, *TWO)
    unbroken = Run(tmp_path / "unbroken", *how).ended()
    Run(tmp_path / "killed", *how).struck((saved(2), Run.kill_all)).again().check_as(unbroken)


def answers_of(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of 64 seeded answers, in the order of requests."""
    tokenizer = tokenization.load_tokenizer(str(ACTOR))
    texts = [f"{37 * number}+{91 * number + 8}=" for number in range(64)]
    prompts = [tokenization.encode(tokenizer, text) for text in texts]
    seeds = [seed_of(0, number, 0) for number in range(64)]

    async def ask():
        await engine.ready(LIMIT_S)
        written = {number: ([], []) for number in range(64)}
        requests = requests_of(prompts, Sampling(1.0, 72), seeds=seeds)
        async for part in engine.generate(requests):
            tokens, logprobs = written[part.index]
            tokens += part.tokens
            logprobs += part.logprobs
        return list(written.values())

    async def all_of_it():
        try:
            return await ask()
        finally:
            await engine.close()

    return asyncio.run(all_of_it())


@pytest.mark.slow
def test_log_probabilities_are_those_of_an_engine_of_one_rank(tmp_path, monkeypatch):
    """Sums over ranks round differently, as those of decoder.cpp and of torch do."""

    def engine(tp: int) -> Engine:
        config = Config(rollout_tp=tp, max_model_len=256, max_new_tokens=72, rule=("right",))
        log = tmp_path / f"{tp}.log"
        return Engine.launch("rollout", 0, free_ports(), str(ACTOR), config, log, "a key")

    fast, *wide = (answers_of(engine(tp)) for tp in (1, 2, 4))
    monkeypatch.setattr(server, "kind_of", lambda device: server.ServerProcess)
    narrow = answers_of(engine(1))
    for answers in (fast, *wide):
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in narrow]
        far = []
        for (_, found), (_, expected) in zip(answers, narrow, strict=True):
            far += [abs(a - b) for a, b in zip(found, expected, strict=True)]
        print(f"mean {sum(far) / len(far):.2e}, largest {max(far):.2e}")
        assert sum(far) / len(far) < 1e-6 and max(far) < NEAR
