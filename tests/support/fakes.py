"""Fakes of a controller's surroundings: many ranks in one process on a virtual clock. Only tests use them.

Clock and collectives are the simulation's. Engines and trainers aren't: these take fixed times, break on
command, and check what they are asked to do, and when.
"""

import asyncio
import copy
import pickle
import random
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import controller
import demo.task  # noqa: F401 (it adds judge formats)
import modes
import placement
import rewards
from algorithms import ALGORITHMS, algorithm_of
from config import Config
from data import Prompts
from engines.engine import LOOK_S, Answer, EngineLost, Request, Sampling, seed_of
from engines.fleet import Fleet
from engines.pool import Pool
from reproduce.simulation.clock import VirtualClock, end_all
from reproduce.simulation.meetings import Network, SimulatedWorld
from runtime.timeline import MARKS, Timeline, of_kind
from sample import Image, Prompt, flat
from scheduling.balance import Prefix
from scheduling.pipeline import schedule_of
from state import Environment

SECONDS_PER_TOKEN = 0.01
CALL_S = 50.0  # timeout of a call to a server


class FakeWorld(SimulatedWorld):
    """A fake world; it copies what it receives from other ranks, as a network would."""

    async def gather(self, value):
        return list(await super().gather(value))

    async def reduce(self, value, total):
        def pickled_total(values):
            return pickle.dumps(Network().reduced(total, values))

        return pickle.loads(await self._meet(value, pickled_total))

    async def broadcast(self, value):
        return (await self.gather(value))[0]

    async def wait_for_all(self):
        await self.barrier()

    async def gather_on_0(self, value):
        values = await self.gather(value)
        return [] if self.index else values

    async def exchange(self, outgoing):
        others = outgoing.keys() - {self.rank}
        sent = {rank: pickle.dumps(outgoing[rank]) for rank in others}
        return await super().exchange(outgoing | sent)

    def _received(self, parcel):
        return pickle.loads(parcel)


MAY_SHARE = [{f"{role} weights", f"{role} cache"} for role in ("rollout", "genrm")]
MAY_SHARE += [{"rollout weights", "actor"}]  # for the push
MAY_SHARE += [{"actor", "reference"}]  # both read the answers, one after the other
TRAINERS = {"actor", "reward critic", "cost critic"}  # they share it if the schedule fuses
# gradients, and memory that a pass reserved: freed before others come, unless in the same pipeline
LEFTOVERS = {trainer: f"{trainer}'s leftovers" for trainer in sorted(TRAINERS)}
MAY_SHARE += [{trainer, leftovers} for trainer, leftovers in LEFTOVERS.items()]


class Device:
    """One rank's memory: it records who holds it."""

    def __init__(self, rank, log, fuses=False):
        self.rank, self.log, self.fuses, self.holders = rank, log, fuses, set()

    def take(self, holder):
        self.log.append((self.rank, "take", holder))
        self.holders.add(holder)
        for other in self.holders - {holder}:
            both = {holder, other}
            fused = self.fuses and both <= {*TRAINERS, *LEFTOVERS.values()}
            may_share = fused or both in MAY_SHARE
            assert may_share, f"rank {self.rank}: {holder} came while {other} held the device"

    def give(self, *holders):
        for holder in holders:
            self.log.append((self.rank, "give", holder))
            self.holders.discard(holder)


class FakeEngine:
    """A fake engine for all ranks: a handle, and its server.

    version: that of its weights. pace: seconds per token. part: tokens that come at once. swap_s: seconds to
    sleep or wake. requests, asked: each call's requests, its time and its weights' version.
    """

    capacity = 128

    def __init__(self, role, rank, device, write, model=0):
        self.role, self.rank, self.device, self.model = role, rank, device, model
        self.name, self._write = f"{role} engine of rank {rank}", write
        self.version, self.awake, self.runs, self.hangs = None, False, True, False
        self.breaks = self.loses = False
        self.pace, self.part, self.swap_s = SECONDS_PER_TOKEN, 10**6, 0.1
        self.requests, self.asked, self.aborts = [], [], []
        self.futures = {}  # name of a request -> done when its call is aborted
        self.changed = asyncio.Event()  # set when it dies or hangs

    def die(self):
        """Die as by kill -9: free the memory and break all unfinished answers."""
        self.runs = self.awake = False
        self.device.give(f"{self.role} weights", f"{self.role} cache")
        self._change()

    def hang(self):
        """Hang as by SIGSTOP: send nothing any more."""
        self.hangs = True
        self._change()

    def lose(self):
        """Lose all answers to requests from now on, but stay healthy."""
        self.loses = True

    def break_off(self):
        """Lose the next part of an answer on its way."""
        self.breaks = True

    def _change(self):
        self.changed.set()
        self.changed = asyncio.Event()

    async def answer(self):
        """Return if the server runs; while it hangs, wait until the timeout."""
        if self.runs and self.hangs:
            await asyncio.sleep(CALL_S)
        if not self.runs or self.hangs:
            raise self.lost("didn't answer")

    async def generate(self, requests):
        """Yield each answer in parts of `part` tokens, or as far as it is when it is aborted.

        If a prompt ends in the beginning of its answer, continue it.
        """
        clock = asyncio.get_running_loop().time
        if not self.runs:
            raise self.lost("refused the connection")
        assert self.awake, f"a request came to the {self.name} while it slept"
        if self.role == "rollout":
            self._check(requests)
        start, version = clock() + 1e9 * self.loses, self.version
        aborted = asyncio.get_running_loop().create_future()
        self.requests.append(requests)
        self.asked.append((clock(), version))
        self.aborts.append(aborted)
        self.futures |= {request.name: aborted for request in requests}
        answers, came = [self._answer_to(request, k) for k, request in enumerate(requests)], {}
        lengths = [len(answer.tokens) for answer in answers]
        ends = [(end, k) for k, n in enumerate(lengths) for end in part_ends(n, self.part)]
        try:
            for end, index in sorted(ends):
                await self._until(start + self.pace * end, aborted)
                answer, begin = answers[index], came.get(index, 0)
                if begin == "aborted":
                    continue
                if self.breaks:
                    raise self.lost("broke the connection")
                finish = answer.finish if end == lengths[index] else ""
                if aborted.done() and (so_far := int((clock() - start) / self.pace)) < end:
                    end, finish = max(begin, so_far), "abort"
                came[index] = "aborted" if finish == "abort" else end
                times = dict(sent=start, first_token=start, end=clock(), rank=self.rank)
                part = replace(part_of(answer, begin, end, finish), index=index, **times)
                yield replace(part, versions=[version] * len(part.tokens))
        finally:
            self.aborts.remove(aborted)

    def _check(self, requests):
        assert self.version is not None, "asked before it was pushed weights"
        for request in requests:
            check_image(request.prompt, request.images)
            room = request.sampling.max_new_tokens - len(to_text(request.prompt).split("=")[1])
            assert request.limit == room, "asked for more than there is room for"

    def _answer_to(self, request, index):
        number = number_of(request.prompt, request.seed, index)
        answer = self._write(request.prompt, number, request.sampling)
        assert request.limit > 0, "asked for no token at all"
        is_cut_off = len(answer.tokens) > request.limit
        return part_of(answer, 0, request.limit, "length") if is_cut_off else answer

    async def _until(self, due, aborted):
        """Wait until `due`. A hanging server never returns; one that dies breaks the request."""
        clock = asyncio.get_running_loop().time
        while True:
            changed = asyncio.ensure_future(self.changed.wait())
            waiting = [changed] if self.hangs else [changed, aborted]
            left = None if self.hangs else max(0.0, due - clock())
            try:
                done, _ = await asyncio.wait(waiting, timeout=left, return_when="FIRST_COMPLETED")
            finally:
                changed.cancel()
            if not self.runs:
                raise self.lost("broke the connection")
            if not self.hangs and changed not in done:
                return

    async def abort(self):
        await self.answer()
        assert self.awake, "asked to abort while it slept"
        for aborted in self.aborts:
            if not aborted.done():
                aborted.set_result(None)

    async def abort_request(self, name):
        """Abort a request with all others of its call."""
        await self.answer()
        if not self.futures[name].done():
            self.futures[name].set_result(None)

    async def wake_weights(self):
        await self.answer()
        assert not self.awake, "woken while awake"
        self.device.take(f"{self.role} weights")

    async def wake_kv_cache(self):
        await asyncio.sleep(self.swap_s)
        await self.answer()
        self.device.take(f"{self.role} cache")
        self.awake = True

    def log_end(self):
        return f"the end of its log: written by rank {self.rank}"

    async def sleep(self):
        await self.answer()
        assert not self.aborts, "put to sleep while answers were in flight"
        await asyncio.sleep(self.swap_s)
        await self.answer()
        self.awake = False
        self.device.give(f"{self.role} weights", f"{self.role} cache")

    async def load_weights(self, named_weights, version):
        await self.answer()
        assert f"{self.role} weights" in self.device.holders
        self.version = version

    async def watch(self):
        while self.runs:
            await self.changed.wait()
        await asyncio.sleep(LOOK_S)
        raise self.lost("died (signal 9: memory may have run out)")

    def lost(self, how):
        return EngineLost(f"the {self.name} {how}; {self.log_end()}")


def part_ends(length, part):
    """Return after how many tokens the parts of an answer end."""
    return [*range(part, length, part), length]


def number_of(prompt, seed, index):
    """Return which answer of its group a seed belongs to: a request may be only for the unfinished ones."""
    seeds = [seed_of(0, number_in(prompt), number) for number in range(8)]
    return seeds.index(seed) if seed in seeds else index


def part_of(answer, begin, end, finish):
    """Return the answer's tokens from `begin` to `end`."""
    tokens, logprobs = answer.tokens[begin:end], answer.logprobs[begin:end]
    return replace(answer, tokens=tokens, logprobs=logprobs, finish=finish)


def check_image(prompt, images):
    shown = [int(image.digest) for image in images]
    assert shown == [number_in(prompt)], "not its image"


class FakeTrainer:
    """The common parts of the fake actor and critic. Its weights are its version."""

    received_bytes = 0

    def __init__(self, title, rank, shape, device):
        self.title, self.device, self.version, self.awake = title, device, 0, False
        self.batches, self.log, self.passes = [], [], []
        self.shape, place = shape, shape.position_of(rank)
        self.holds, (self.dp_rank, self.is_lead) = place is not None, place or (-1, False)

    def wake(self):
        assert not self.awake, "woken while awake"
        self.awake = True
        self.has_gradients = True
        self.device.take(self.title)

    def sleep(self):
        assert self.awake, "put to sleep while asleep"
        self.awake = False
        self.device.give(self.title, f"{self.title}'s leftovers")

    def trim(self, keeps_gradients):
        assert self.awake or not self.holds, "trimmed while asleep"
        self.has_gradients = keeps_gradients
        self.device.give(f"{self.title}'s leftovers")

    async def update(self, mini_batches, *beside):
        metrics = [await trainer.learn(mini_batches) for trainer in (self, *beside)]
        return {name: value for each in metrics for name, value in each.items()}

    async def learn(self, mini_batches):
        if not self.holds:
            self.version += 1
            return {}
        assert self.awake and self.has_gradients, "trained while asleep, or trimmed"
        for sample in flat(mini_batches):
            self.check(sample)
        await asyncio.sleep(self.update_s)
        self.device.take(f"{self.title}'s leftovers")
        self.log.append("update")
        self.batches.append(flat(mini_batches))
        self.version += 1
        return {"train/loss": 0.0, "train/not_finite": 0.0}

    def snapshot(self, folder):
        assert self.awake or not self.holds, "saved while asleep"
        rank, version = self.device.rank, self.version

        def write():
            (folder / f"__{rank}_0.distcp").write_text(str(version))
            return [rank]

        def complete(written):
            assert written == [[rank] for rank in range(len(written))], "a rank's part is missing"
            (folder / ".metadata").write_text("")

        return write, complete

    def whole_weights(self):
        return {"version": self.version} if self.device.rank == self.shape.ranks[0] else {}

    def write_hf(self, weights, folder):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(str(weights))

    def restore(self, folder):
        assert self.awake or not self.holds, "restored while asleep"
        self.version = int((folder / "__0_0.distcp").read_text())


class FakeActor(FakeTrainer):
    update_s = 0.5

    def __init__(self, rank, shape, device, takes_stale=False, lag=0):
        self.takes_stale = takes_stale
        super().__init__("actor", rank, shape, device)
        if self.holds:  # a real trainer has it only there
            self.lag = lag

    def named_weights(self):
        return iter(())

    def compute_policy_logprobs(self, mini_batches):
        for sample in flat(mini_batches):
            sample.policy_logprobs = sample.logprobs

    def macs(self, tokens):
        return 100 * tokens + tokens**2

    def prefix_of(self, prompt):
        return Prefix(len(prompt) - 1, self.macs(len(prompt) - 1))

    def check(self, sample):
        versions, facts = sample.versions, (sample.logprobs, sample.versions)
        assert {len(sample.response)} == {*map(len, facts)} != {0}, "a token without its facts"
        assert versions == sorted(versions), "written by older weights than before"
        assert versions[-1] <= self.version, "written by weights to come"
        is_whole = len({*versions}) == 1 and versions[0] >= max(0, self.version - self.lag)
        assert self.takes_stale or is_whole, "off-policy sample"
        check_image(sample.prompt, sample.media)


class FakeCritic(FakeTrainer):
    """A fake critic; a token's value depends only on the token. `log`: its calls."""

    update_s = 0.0

    def __init__(self, name, *place):
        self.name = name
        super().__init__(f"{name} critic", *place)

    async def compute_values(self, mini_batches):
        assert self.awake or not self.holds, "asked while asleep"
        self.log.append("values")
        for sample in flat(mini_batches):
            assert sample.advantages is None, "asked after the advantages were made"
            sample.values[self.name] = [token / 200 for token in sample.response]

    def check(self, sample):
        facts = (sample.values[self.name], sample.returns[self.name])
        assert {len(sample.response)} == {*map(len, facts)}, "a token without its facts"


class FakeReference(FakeTrainer):
    """A fake reference; a token's log-probability depends only on the token. `log`: its calls."""

    async def compute_ref_logprobs(self, mini_batches):
        assert self.awake or not self.holds, "asked while asleep"
        self.log.append("reference")
        for sample in flat(mini_batches):
            assert sample.advantages is None, "asked after the advantages were made"
            sample.reference_logprobs = [token / 200 for token in sample.response]


class FakeCheckpoints:
    """Fake checkpoints; they count saves, and check that nothing is in flight."""

    newest = None

    def __init__(self):
        self.saved = []

    async def save(self, c):
        pass

    async def finish(self, c, wait=False):
        pass

    async def close(self, c):
        pass

    async def save_now(self, c):
        await c.world.barrier()
        awake = c.devices.rollout.awake + c.devices.genrm.awake
        assert not awake, "saved while an engine was awake"
        self.saved.append((c.state.step, c.prompts.cursor, list(c.prompts.carried)))


class LateWriter:
    """A writer that runs the work at once, as a forked process would see it; done after enough polls."""

    patience = 3

    def __init__(self, work):
        self._result, self._asked = (work(), ""), 0

    def result(self):
        self._asked += 1
        return self._result if self._asked > self.patience else None

    def close(self):
        pass


class FakeReport:
    """A report that keeps each step's results; `carried` and `carried_ids` as they were at its end."""

    def __init__(self):
        self.steps, self.notes, self.marks = [], [], []
        self.accuracies, self.sampled, self.earned, self.lost = {}, {}, {}, {}
        self.carried, self.carried_ids, self.cursors = [], [], []
        self.note, self.decode = self.notes.append, str

    async def written(self):
        pass

    def dump(self, samples):
        self.dumped = samples
        return "OUT/skipped_samples.jsonl"

    def answers(self, number, samples, right):
        pass

    def evaluation(self, step, right, earned, lost, now):
        self.lost[step] = lost
        self.earned[step] = sorted(earned)
        self.accuracies[step] = fmean(greedy for greedy, _ in right) if right else None
        self.sampled[step] = sorted(right)

    async def step(self, c, step, batch, samples, stats):
        held = chain.from_iterable(batch.carried)
        facts = {(s.prompt_id, s.index): (s.response, s.logprobs, s.versions) for s in held}
        self.carried.append(copy.deepcopy(facts))
        self.carried_ids.append(list(c.prompts.carried))
        self.cursors.append(c.prompts.cursor)
        events = c.timeline.drain()
        self.marks += of_kind(events, *MARKS)
        self.steps.append((step, batch, samples, of_kind(events, "span")))


def requests_of(prompts, sampling, seeds=()):
    """Return a request for each prompt, with the limit of `sampling`; by default without a seed."""
    seeds = seeds or [None] * len(prompts)
    limit = sampling.max_new_tokens
    return [Request(p, sampling, limit, seed) for p, seed in zip(prompts, seeds, strict=True)]


class Picture(Image):
    """A picture of the number in a prompt. It stays with the controller that read it."""

    def __reduce__(self):
        raise AssertionError("an image was sent to another controller")

    def __deepcopy__(self, memo):
        return self


class FakeSource:
    """A source whose prompt k is the text of k and its picture."""

    def __init__(self):
        self.held_out = tuple(map(self.training, range(10)))

    def training(self, draw):
        text, picture = f"{draw}+0=", Picture(str(draw).encode(), (1, 1, 1), 0, bytes)
        return Prompt([ord(c) for c in text], text, str(draw), (picture,))


def text_answer(text, index=0, begun=""):
    """Return the rest of a text as an answer; each log-probability encodes its position."""
    places = range(len(begun), len(text))
    return Answer(index, [ord(text[k]) for k in places], [-0.01 * k for k in places], "stop", [])


def write_on(prompt, index, sampling):
    """Return an answer that depends only on question and number in the group, wherever it is continued.

    How often it is right depends on the question: some groups are all right or all wrong.
    """
    question, begun = to_text(prompt).split("=")
    number, skill = number_in(prompt), random.Random(question).choice([0.0, 0.3, 0.6, 1.0])
    rng = random.Random(f"{question} {index}")
    text = " " * rng.randint(1, 60) + ">" + str(number + (rng.random() > skill))
    return text_answer(text, index, begun)


def always_right(prompt, index, sampling):
    """Return a right answer, so that every group is filtered."""
    question, begun = to_text(prompt).split("=")
    length = random.Random(question).randint(0, 60)
    return text_answer(f"{' ' * length}>{number_in(prompt)}", index, begun)


def judge_on(prompt, index, sampling):
    """Return a perfect judge's verdict, wherever it is continued: `7+0=>7?` -> Y."""
    asked, begun = to_text(prompt).split("?")
    is_right = asked.split(">")[1] == str(number_in(prompt))
    return text_answer("0:0." * 5 + ("Y" if is_right else "N"), begun=begun)


def number_in(prompt):
    """Return the answer of a question, which may be part of a judge's prompt."""
    return int(re.search(r"(\d+)\+", to_text(prompt))[1])


def at_random_paces(seed):
    """Make engines that differ up to tenfold in speed."""
    rng = random.Random(seed)

    def prepare(engines):
        for engine in engines:
            engine.pace = 0.005 * 10 ** rng.random()

    return prepare


def batches_of(controllers, step):
    """Return a step's batch on every rank."""
    return [c.report.steps[step][1] for c in controllers]


def all_batches(controllers):
    return [batch for c in controllers for _, batch, _, _ in c.report.steps]


def samples_of(batches):
    """Return all samples of these batches, kept or not."""
    groups = [group for b in batches for group in (b.kept, b.dropped, *b.filtered, *b.carried)]
    return list(chain.from_iterable(groups))


def trained(controllers, step):
    """Return the samples of a step by prompt_id and index; check that each was trained on once."""
    samples = {}
    for c in controllers:
        for sample in c.report.steps[step][2]:
            key = (sample.prompt_id, sample.index)
            assert (key not in samples) == c.devices.actor.is_lead
            assert samples.setdefault(key, sample).advantages == sample.advantages
    return samples


def learned(controllers):
    """Return by step the samples trained on: key, answer, version of the weights, reward."""
    found = []
    for step in range(len(controllers[0].report.steps)):
        samples = trained(controllers, step).values()
        facts = [(s.key, s.response, s.logprobs, s.versions, s.reward) for s in samples]
        found.append(sorted(facts))
    return found


class FakeTokenizer:
    """A tokenizer whose tokens are characters."""

    eos_token_id, chat_template, all_special_tokens, added_tokens_decoder = 0, None, (), {}
    name_or_path = "FAKE"

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens, **_):
        return to_text(tokens)

    def get_vocab(self):
        return {chr(number): number for number in range(128)}


def fake_config(mode="partial", **settings):
    """Return the settings of a simulated run."""
    defaults = dict(mode=mode, steps=3, prompts_per_step=8, answers_per_prompt=4, eval_every=2)
    defaults |= dict(save_every=0, timeout_s=100.0, judge_format=("addition",))
    defaults |= dict(max_model_len=1100, judge_max_new_tokens=100, max_new_tokens=100)
    if "model" not in settings:
        defaults["judge"] = ("JUDGE",)
    name, *given = settings.pop("algorithm", ("grpo",))
    if "max_refill_waves" in settings:
        given.append(f"max_refill_waves={settings.pop('max_refill_waves')}")
    if "cost" in ALGORITHMS[name].signals:
        defaults["cost_rule"] = ("length:50",)
    return Config(**defaults | settings, algorithm=(name, *given))


def simulate(
    mode,
    size,
    *,
    tp=1,
    write=write_on,
    verdict=judge_on,
    prepare=lambda servers: None,
    prepare_controller=lambda c: None,
    controllers=None,
    out=Path(),
    resumed=None,
    loop=controller.train,
    events=(),
    writer=LateWriter,
    episodes=None,
    **settings,
):
    """Run the real controllers on fakes, by default the whole `loop`; return them and the log of hand-overs.

    prepare is called with all servers, prepare_controller with each controller, before they start. A list
    given as `controllers` is filled, so that a failed run can be inspected. With `save_every`, checkpoints go
    to `out`; `resumed` is one to resume from. events: (seconds, function(servers, controllers)), called at
    that time. episodes: called with the settings for a controller's environment.
    """
    config = fake_config(mode, out=str(out), tp=tp, **settings)
    (placed, splits), log, meetings = modes.lay_out(config, size), [], {}
    devices = [Device(rank, log, schedule_of(config).fuses) for rank in range(size)]
    engines = fake_engines(config, placed, splits, devices, write, verdict)
    prepare(engines)
    controllers = [] if controllers is None else controllers
    clock = VirtualClock()
    for rank in range(size):
        world = FakeWorld(rank, size, meetings)
        c = fake_controller(
            config, placed, splits, world, engines, devices[rank], clock, out, writer, episodes
        )
        controllers.append(c)
        prepare_controller(c)
    for seconds, event in events:
        clock.call_at(seconds, event, engines, controllers)

    async def one_rank(c):
        if resumed:
            from checkpoint import restore

            await restore(c, resumed)
        fleet = Fleet(config, c.world)
        fleet._engines = engines
        try:
            c.was_stopped = await fleet.while_up(loop(c))
        finally:
            await c.environment.close()

    run_on(clock, *map(one_rank, controllers))
    return controllers, log


def run_on(clock, *works):
    """Await all of these on a virtual clock. No rank may leave a task unfinished.

    If one fails, the others are cancelled, as by torchrun's SIGTERM.
    """

    async def together():
        ranks = list(map(asyncio.ensure_future, works))
        try:
            return await asyncio.gather(*ranks)
        finally:
            for rank in ranks:
                rank.cancel()
            await asyncio.gather(*ranks, return_exceptions=True)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"left to themselves: {left}"

    try:
        return clock.run_until_complete(together())
    finally:
        end_all(clock)


def fake_engines(config, placed, splits, devices, write, verdict):
    """Make a fake engine for each role and lead of any split."""
    engines, judges = [], max(1, len(config.judge_models))
    for role, writes in (("genrm", verdict), ("rollout", write)):
        for rank in sorted({lead for split in splits for lead in placed.leads(role, split)}):
            model = placed.judge_of(rank, judges) if role == "genrm" else 0
            engines.append(FakeEngine(role, rank, devices[rank], writes, model))
    return engines


def fake_controller(config, placed, splits, world, engines, device, clock, out, writer, episodes):
    """Make the real controller of one rank on fakes."""
    timeline, algorithm = Timeline(world.rank, clock.time), algorithm_of(config)
    pools = {}
    same_duty = world.part(placed.servers)
    for role in ("rollout", "genrm"):
        pools[role] = Pool([e for e in engines if e.role == role], same_duty, timeline, config)
    actor = FakeActor(world.rank, placed.actor, device, config.over_dispatch > 1, config.ahead)
    critics = [FakeCritic(name, world.rank, placed.critic, device) for name in algorithm.critics]
    references = []
    if algorithm.kl_coef:
        references.append(FakeReference("reference", world.rank, placed.reference, device))
    models = placement.Models([actor, *critics], references)
    sampling = Sampling(1.0, config.max_new_tokens)
    keeps, checkpoints = (config.over_dispatch > 1, algorithm.greedy), FakeCheckpoints()
    if config.save_every:
        from checkpoint import Checkpoints, contents_of

        contents = contents_of(config)
        checkpoints = Checkpoints(config, world, out, contents, start_writer=writer)
    given = dict(config=config, algorithm=algorithm, world=world, timeline=timeline)
    given |= dict(sampling=sampling, checkpoints=checkpoints, report=FakeReport())
    tokenizers = [FakeTokenizer()] * len(config.judge_models)
    scores = rewards.build(config, rewards.load_rules(config), tokenizers, to_text)
    environment = episodes(config) if episodes else Environment()
    scores.counted += environment.counted
    return controller.Controller(
        devices=placement.Devices(config, placed, splits, models, pools, world, timeline),
        rewards=scores,
        environment=environment,
        prompts=Prompts(FakeSource(), config.answers_per_prompt, *keeps, has_images=True),
        same_duty=same_duty,
        **given,
    )


def to_text(tokens, **_):
    return "".join(map(chr, tokens))
