"""Fakes for the controllers' outside: many ranks in one process on a virtual clock. They live in tests only.

The clock jumps to the next event when every task waits, so a step of minutes takes milliseconds, and a deadlock is an error at once.
"""

import asyncio
import pickle
import random
import selectors
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import controller
import genrm
import placement
import rewards
from algorithms import get_algorithm
from checkpoint import Checkpoints, restore
from config import Config
from data import Prompt, Prompts
from engines.engine import Answer, Sampling, seed_of
from engines.pool import Pool
from engines.server import EngineLost
from reporting.timeline import Timeline
from runtime.background_writer import ForkedWriter
from scheduling.balance import flat
from scheduling.dynamic_sampling import Groups

SECONDS_PER_TOKEN = 0.01
PROBE_S = 10.0  # until a server that hangs is found out
RESTART_S = 10.0
LONGEST_RUN_S = 20_000.0  # of virtual time: controllers that meet for ever are a deadlock, too


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything can run, and jumps when nothing can. `look` is called before each jump."""

    def __init__(self, look=lambda: None):
        self.now, self.look = 0.0, look
        super().__init__(_Jump(self))

    def time(self):
        return self.now


class _Jump(selectors.EpollSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("deadlock: every task waits for another")
        if timeout:
            self._loop.look()
        self._loop.now += timeout
        assert self._loop.now < LONGEST_RUN_S, "the run never ends"
        return super().select(0)


class FakeWorld:
    """World over ranks that are tasks of one loop. `meetings` is shared by all ranks."""

    def __init__(self, rank, size, meetings):
        self.rank, self.size, self._meetings, self._calls = rank, size, meetings, 0

    async def run(self, function, *args):
        result = function(*args)
        return await result if asyncio.iscoroutine(result) else result

    async def gather(self, value):
        future, values = self._meetings.setdefault(self._calls, (asyncio.get_running_loop().create_future(), {}))
        assert self.rank not in values, "a rank came twice to one meeting"
        self._calls += 1
        values[self.rank] = value
        if len(values) == self.size:
            future.set_result([values[rank] for rank in range(self.size)])
        return list(await future)

    async def broadcast(self, value, source=0):
        return (await self.gather(value))[source]

    async def barrier(self):
        await self.gather(None)

    async def exchange(self, outgoing):
        """What goes to others is a copy."""
        sent = await self.gather(outgoing)
        incoming = {sender: parcels[self.rank] for sender, parcels in enumerate(sent) if self.rank in parcels}
        return {sender: parcel if sender == self.rank else pickle.loads(pickle.dumps(parcel)) for sender, parcel in incoming.items()}


MAY_SHARE = ({"rollout weights", "actor"}, {"rollout weights", "rollout cache"}, {"genrm weights", "genrm cache"})
MAY_SHARE += ({"actor", "reward critic"}, {"actor", "cost critic"}, {"reward critic", "cost critic"})


class Device:
    """One rank's memory: who holds it. Allowed beside the actor: the critic to train, and rollout weights for the push."""

    def __init__(self, rank, log):
        self.rank, self.log, self.holders = rank, log, set()

    def take(self, holder):
        self.log.append((self.rank, "take", holder))
        self.holders.add(holder)
        for other in self.holders - {holder}:
            assert {holder, other} in MAY_SHARE, f"rank {self.rank}: {holder} came while {other} held the device"

    def give(self, *holders):
        for holder in holders:
            self.log.append((self.rank, "give", holder))
            self.holders.discard(holder)


class FakeServer(SimpleNamespace):
    """What all handles on one engine share: the server, and those that take its place.

    version: of the weights that it was pushed. pace: seconds a token. swap_s: to sleep or wake. is_deaf: it hears no abort.
    starts: how many more times it can be started. drops: replies that will be lost on their way.
    """

    def __init__(self, device, role, rank):
        super().__init__(device=device, role=role, rank=rank, version=None, awake=True, pace=SECONDS_PER_TOKEN, swap_s=0.1)
        self.requests, self.aborts, self.asked, self.seeds = 0, [], [], []
        self.is_deaf, self.runs, self.hangs, self.starts, self.drops = False, True, False, 10**6, 0
        self.changed = asyncio.Event()  # set when it dies, hangs or is killed

    def die(self):
        """As by kill -9: its memory is free, and what it owed breaks."""
        if not self.runs:
            return
        self.runs = self.hangs = self.awake = False
        self.device.give(f"{self.role} weights", f"{self.role} cache")
        self._change()

    def hang(self):
        """As by SIGSTOP: nothing comes from it any more."""
        self.hangs = self.runs
        self._change()

    def _change(self):
        self.changed.set()
        self.changed = asyncio.Event()

    async def answer(self):
        """Returns if it runs; what waits for one that hangs gives up in the end."""
        if self.runs and self.hangs:
            await asyncio.wait([asyncio.ensure_future(self.changed.wait())], timeout=PROBE_S)
        if not self.runs or self.hangs:
            raise EngineLost("didn't answer")


class FakeEngine:
    """A handle; `server` is what all handles on one engine share."""

    def __init__(self, role, rank, device, write, capacity=16, model=0):
        self.role, self.rank, self.capacity, self.awake, self.up = role, rank, capacity, True, True
        self.server = FakeServer(device, role, rank)
        self._write = write
        self.on_request, self.outstanding, self.model = None, 0, model
        self.name = f"{role} engine of rank {rank}"

    def handle(self):
        other = FakeEngine(self.role, self.rank, self.server.device, self._write, self.capacity, self.model)
        other.server = self.server
        return other

    async def generate(self, prompts, sampling, rooms=None, seeds=None, greedy=None):
        """Each prompt's answer after `server.pace` seconds a token; a prompt that ends in the beginning of its answer is continued."""
        if not self.server.runs:
            await self._try_again()
        assert self.awake and self.server.awake, f"a request came to the {self.role} engine of rank {self.rank} while it slept"
        assert self.role == "genrm" or self.server.version is not None, "asked before it was pushed weights"
        clock = asyncio.get_running_loop().time
        start, version = clock(), self.server.version
        self.server.requests += 1
        self.server.asked.append((start, version))
        self.server.seeds += seeds
        aborted = asyncio.get_running_loop().create_future()
        self.server.aborts.append(aborted)
        rooms, pace = rooms or [sampling.max_new_tokens] * len(prompts), self.server.pace
        how = [replace(sampling, temperature=0.0) if is_greedy else sampling for is_greedy in greedy or [False] * len(prompts)]
        answers = [
            replace(within(self._write(prompt, number_of(prompt, seed, index), how[index]), rooms[index]), index=index)
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        answers.sort(key=lambda answer: len(answer.tokens))
        owed = [len(prompts[a.index]) + len(a.tokens) for a in answers]
        self.outstanding += sum(owed)
        try:
            for answer in answers:
                due = start + pace * len(answer.tokens)
                await self._until(due, aborted)
                if self.server.drops:
                    self.server.drops -= 1
                    raise EngineLost("the connection broke again and again")
                tokens, finish = answer.tokens, answer.finish
                if aborted.done() and (so_far := int((clock() - start) / pace)) < len(tokens):
                    tokens, finish = tokens[:so_far], "abort"
                self.outstanding -= owed.pop(0)
                versions = [version] * len(tokens)
                cut = Answer(answer.index, tokens, answer.logprobs[: len(tokens)], finish, versions, 0, start, start, clock())
                if self.on_request:
                    self.on_request(self, len(prompts[answer.index]), cut)
                yield cut
        finally:
            self.outstanding -= sum(owed)
            self.server.aborts.remove(aborted)

    async def _try_again(self):
        """The connection broke: opened again after 1 s and then 5 s, unless the engine is known to be down by then."""
        for delay_s in (1.0, 5.0):
            await asyncio.sleep(delay_s)
            assert not self.up or not self.server.runs, "a new server was asked before all knew that the old one was down"
            if not self.up:
                break
        raise EngineLost("the connection broke")

    async def _until(self, due, aborted):
        """Wait until an answer is due, or aborted. Nothing comes of a server that hangs, until it is killed, which breaks it."""
        clock, server = asyncio.get_running_loop().time, self.server
        while True:
            changed = asyncio.ensure_future(server.changed.wait())
            timeout = None if server.hangs else due - clock()
            try:
                done, _ = await asyncio.wait([aborted, changed], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if not server.runs:
                await self._try_again()
            if not server.hangs and changed not in done:
                return
            if server.hangs:
                aborted = asyncio.get_running_loop().create_future()  # it hears no abort

    async def abort(self):
        await self.server.answer()
        assert self.server.awake, "told to abort while it slept"
        for aborted in () if self.server.is_deaf else self.server.aborts:
            if not aborted.done():
                aborted.set_result(None)

    async def wake_weights(self):
        await self.server.answer()
        self.server.device.take(f"{self.role} weights")

    async def wake_kv_cache(self):
        await asyncio.sleep(self.server.swap_s)
        await self.server.answer()
        self.server.device.take(f"{self.role} cache")
        self.awake = self.server.awake = True

    async def sleep(self):
        await self.server.answer()
        assert not self.server.aborts, "put to sleep while answers were in flight"
        await asyncio.sleep(self.server.swap_s)
        await self.server.answer()
        self.awake = self.server.awake = False
        self.server.device.give(f"{self.role} weights", f"{self.role} cache")

    async def load_weights(self, named_weights, version):
        await self.server.answer()
        assert f"{self.role} weights" in self.server.device.holders
        self.server.version = version

    async def until_down(self):
        while self.server.runs:
            if self.server.hangs:
                await asyncio.sleep(PROBE_S)
                return "gave no sign of life"
            await self.server.changed.wait()
        return "died"

    async def restart(self, deadline_s):
        assert not self.server.runs, "started while it runs"
        await asyncio.sleep(RESTART_S)
        self.server.starts -= 1
        if self.server.starts < 0:
            raise ValueError("its log")
        self.server.device.take(f"{self.role} weights")
        self.server.device.take(f"{self.role} cache")
        self.server.runs = self.server.awake = self.awake = True
        self.server.version = None

    async def kill(self):
        self.awake = False
        self.server.die()

    def log_tail(self):
        return "; the end of its log"


def number_of(prompt, seed, index):
    """Which answer of its group a seed stands for: a request may be for what another engine still owed."""
    draw = int(to_text(prompt).split("+")[0])
    return next((number for number in range(8) if seed == seed_of(0, draw, number)), index)


def within(answer, room):
    """The answer, cut off where there is no more room."""
    assert room > 0, "asked for no token at all"
    if len(answer.tokens) <= room:
        return answer
    return Answer(answer.index, answer.tokens[:room], answer.logprobs[:room], "length", [])


class FakeTrainer:
    """What actor and critic have in common. Its weights are its version."""

    def __init__(self, title, rank, size, device, tp):
        self.title, self.device, self.version, self.awake, self.batches = title, device, 0, True, []
        self.dp_rank, self.dp_size, self.is_head = rank // tp, size // tp, rank % tp == 0
        device.take(title)

    def wake(self):
        assert not self.awake, "woken while awake"
        self.awake = True
        self.device.take(self.title)

    def sleep(self):
        assert self.awake, "put to sleep while asleep"
        self.awake = False
        self.device.give(self.title)

    def snapshot(self, folder):
        """The weights are their version."""
        assert self.awake, "saved while asleep"
        rank, version = self.device.rank, self.version

        def write():
            (folder / f"__{rank}_0.distcp").write_text(str(version))
            if rank == 0:
                (folder / "common.pt").write_text("")
            return [rank]

        def complete(written):
            assert written == [[rank] for rank in range(len(written))], "a rank's part is missing"
            for name in (".metadata", "metadata.json"):
                (folder / name).write_text("")

        return write, complete

    def restore(self, folder):
        assert self.awake, "restored while asleep"
        self.version = int((folder / "__0_0.distcp").read_text())


class FakeActor(FakeTrainer):
    def __init__(self, rank, size, device, tp=1, takes_stale=False):
        self.takes_stale = takes_stale
        super().__init__("actor", rank, size, device, tp)

    def named_weights(self):
        return iter(())

    def cost(self, tokens):
        return 100 * tokens + tokens**2

    async def update(self, mini_batches):
        samples = flat(mini_batches)
        assert self.awake, "trained while asleep"
        for sample in samples:
            assert len(sample.response) == len(sample.logprobs) == len(sample.versions) > 0, "a token without its facts"
            assert sample.versions == sorted(sample.versions) and sample.versions[-1] <= self.version, "written by weights to come"
            assert self.takes_stale or set(sample.versions) == {self.version}, "off-policy sample"
        await asyncio.sleep(0.5)
        self.batches.append(samples)
        self.version += 1
        return {"train/loss": 0.0, "train/not_finite": 0.0}


class FakeCritic(FakeTrainer):
    """Its value of a token follows from the token alone. `log`: what it was asked."""

    def __init__(self, name, *place):
        self.name, self.log = name, []
        super().__init__(f"{name} critic", *place)

    async def appraise(self, mini_batches):
        assert self.awake, "asked while asleep"
        self.log.append("appraise")
        for sample in flat(mini_batches):
            assert sample.advantages is None, "appraised after the advantages were made"
            sample.values[self.name] = [token / 200 for token in sample.response]

    async def update(self, mini_batches):
        samples = flat(mini_batches)
        assert self.awake, "trained while asleep"
        for sample in samples:
            assert len(sample.values[self.name]) == len(sample.returns[self.name]) == len(sample.response), "a token without its facts"
        self.log.append("update")
        self.batches.append(samples)
        self.version += 1
        return {"critic/value_loss": 0.0}


class FakeReference:
    """Its log-probability of a token follows from the token alone. `log`: what it was asked."""

    def __init__(self, actor):
        self.actor, self.log = actor, []

    async def appraise(self, mini_batches):
        assert self.actor.awake, "asked while the actor sleeps"
        self.log.append("appraise")
        for sample in flat(mini_batches):
            assert sample.advantages is None, "appraised after the advantages were made"
            sample.reference_logprobs = [token / 200 for token in sample.response]


class FakeCheckpoints:
    """Counts saves, and looks whether the actor is awake and nothing is in flight."""

    def __init__(self):
        self.saved = []

    async def save(self, job):
        pass

    async def finish(self, job, wait=False):
        pass

    async def save_now(self, job):
        await job.world.barrier()
        assert job.actor.awake and not job.rollout.awake and not job.genrm.awake, "saved while an engine was awake"
        assert all(critic.awake for critic in job.critics), "saved while a critic slept"
        self.saved.append((job.state.step, job.prompts.cursor, list(job.prompts.buffer)))


class LateWriter:
    """Runs the work at once, as a forked process would see it, and has a result when it was asked `self.patience` times."""

    patience = 3

    def __init__(self, work):
        self._result, self._asked = (work(), ""), 0

    def result(self):
        self._asked += 1
        return self._result if self._asked > self.patience else None

    def close(self):
        pass


class AwaitedWriter(ForkedWriter):
    """A real process. The virtual clock stands still while it writes, or a busy machine's would be late by hours."""

    def result(self):
        if self._result is None:
            self._receiver.poll(60)
        return super().result()


class FakeReport:
    """Keeps what each step came to; `carried` and `buffers` as they were at its end, for they change later."""

    def __init__(self):
        self.steps, self.accuracies, self.notes, self.marks = [], {}, [], []
        self.carried, self.buffers, self.cursors, self.restarts = [], [], [], []

    def note(self, text):
        self.notes.append(text)

    def dump(self, samples):
        self.dumped = samples
        return "OUT/skipped_samples.jsonl"

    def accuracy(self, step, value, now):
        self.accuracies[step] = value

    async def step(self, step, served, samples, stats, job):
        held = [sample for group in served.carried for sample in group]
        self.carried.append({(s.prompt_id, s.index): (list(s.response), list(s.logprobs), list(s.versions)) for s in held})
        self.buffers.append(list(job.prompts.buffer))
        self.cursors.append(job.prompts.cursor)
        self.restarts.append(stats.get("faults/engine_restarts", 0.0))
        self.marks += job.timeline.marks
        self.steps.append((step, served, samples, job.timeline.take()))


class FakeSource:
    """Prompt k is the text of k; how often its answers are right depends on k, so that some groups are all right or all wrong."""

    held_out = tuple(Prompt([ord(c) for c in f"{i}+0="], f"{i}+0=", str(i)) for i in range(10))

    def training(self, draw):
        return Prompt([ord(c) for c in f"{draw}+0="], f"{draw}+0=", str(draw))


def write_answer(prompt, index, sampling):
    """An answer that depends on the prompt and its number in the group alone, or on how it begins, if it is to be continued."""
    question, begun = "".join(map(chr, prompt)).split("=")
    rng = random.Random(question)
    skill, rng = rng.choice([0.0, 0.3, 0.6, 1.0]), random.Random(f"{question} {begun or index}")
    right = int(question.split("+")[0])
    if ">" in begun:
        return Answer(index, [ord(" ")], [-0.5], "stop", [])
    text = " " * rng.randint(1, 60) + ">" + str(right if rng.random() < skill else right + 1)
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


def write_verdict(prompt, index, sampling):
    """A perfect judge: `7+0=>7?` -> Y."""
    question, answer = "".join(map(chr, prompt)).rstrip("?").split(">")
    text = "0:0." * 5 + ("Y" if question.split("+")[0] == answer else "N")
    return Answer(0, [ord(c) for c in text], [-0.1] * len(text), "stop", [])


def simulate(
    mode, size, *, tp=1, write=write_answer, verdict=write_verdict, world_class=FakeWorld, prepare=None, prepare_job=None, jobs=None,
    out=Path(), resumed=None, loop=controller.train, events=(), writer=LateWriter, look=lambda servers, jobs: None, **settings,
):
    """Run the real controllers on fakes, by default the whole `loop`; returns every rank's job and the log of device hand-overs.

    prepare: called with all servers, prepare_job with each job, before the controllers start. A list given as `jobs` is filled, for
    those who want to see what became of a run that failed. With `save_every`, checkpoints go to `out`; `resumed` is one to go on from.
    events: (seconds, function(servers, jobs)), called when it is time. look: called likewise whenever nothing can run but later.
    """
    defaults = dict(mode=mode, steps=3, prompts_per_step=8, answers_per_prompt=4, eval_every=2, max_judge_failures=5, judge=("JUDGE",))
    if "cost" in get_algorithm(settings.get("algorithm", "grpo")).signals:
        defaults["cost_rule"] = ("length:50",)
    config = SimpleNamespace(**vars(Config()) | defaults | dict(request_timeout_s=50.0, save_every=0) | settings)
    config.judges, config.judge_format = len(config.judge), ("addition",) * max(1, len(config.judge))
    plans, log, meetings = placement.make_plans(config, size), [], {}
    devices = [Device(rank, log) for rank in range(size)]
    hosts = sorted({(role, lead) for plan in plans for role in ("rollout", "genrm") for lead in plan.leads(role)})
    servers = []
    for role, rank in hosts:
        model = placement.judge_of(rank, config.genrm_tp, len(config.judge)) if role == "genrm" else 0
        servers.append(FakeEngine(role, rank, devices[rank], write if role == "rollout" else verdict, model=model))
    if prepare:
        prepare(servers)
    jobs = [] if jobs is None else jobs
    states = [server.server for server in servers]
    clock = VirtualClock(lambda: look(states, jobs))
    for rank in range(size):
        world = world_class(rank, size, meetings)
        timeline = Timeline(rank, clock.time)
        handles = [server if server.rank == rank else server.handle() for server in servers]
        pools = [Pool([h for h in handles if h.role == role], world, timeline) for role in ("rollout", "genrm")]
        encode = lambda text: [ord(c) for c in text]  # noqa: E731
        judge_model = genrm.JudgeModel(genrm.FORMATS["addition"], encode, to_text, Sampling(0.0, 100), 1000)
        judge = genrm.Judge([judge_model] * config.judges, to_text, genrm.Calls(timeout_s=20.0), genrm.FORMATS["addition"])
        rules = rewards.build(config, judge, to_text)
        sampling, actor = Sampling(1.0, 100), FakeActor(rank, size, devices[rank], tp, config.partial_rollout)
        prompts, report = Prompts(FakeSource()), FakeReport()
        algorithm = get_algorithm(config.algorithm)
        groups = Groups(prompts, config.answers_per_prompt, config.partial_rollout, algorithm.greedy)
        critics = [FakeCritic(name, rank, size, devices[rank], tp) for name in algorithm.critics]
        reference = [FakeReference(actor)] if config.kl_coef else []
        roles = (actor, *pools, judge)
        checkpoints = Checkpoints(config, world, out, writer=writer) if config.save_every else FakeCheckpoints()
        outside = (prompts, groups, sampling, Sampling(0.0, 100), timeline, report, checkpoints)
        job = controller.Job(config, world, plans, plans[0], *roles, *outside, reference=reference, critics=critics, rules=rules)
        jobs.append(job)
        if prepare_job:
            prepare_job(job)

    for seconds, event in events:
        clock.call_at(seconds, event, states, jobs)

    async def one_rank(job):
        if resumed:
            await restore(job, resumed)
        await loop(job)

    async def all_ranks():
        await asyncio.gather(*(one_rank(job) for job in jobs))

    try:
        clock.run_until_complete(all_ranks())
    finally:
        left = asyncio.all_tasks(clock)  # engines are watched to the end; and what is left of a run that failed
        for task in left:
            task.cancel()
        if left:
            clock.run_until_complete(asyncio.wait(left))
        clock.close()
    return jobs, log


def to_text(tokens):
    return "".join(map(chr, tokens))
