"""Pushes of shards: each engine rank's bits, the bytes of HybridFlow's table 2, and when whole tensors go."""

import asyncio
import base64
import pickle
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from build import servers_of
from config import Config
from engines import wire
from engines.engine import Engine
from engines.fleet import ServerSpec
from engines.server import cuda_flags
from extras.shards.choice import choose
from extras.shards.push import connect, shard_shapes, shared
from inputs.hf_directory import checkpoint_shapes
from modes import lay_out
from placement import Devices, Models
from reporting.describe import describe
from reproduce.papers.hybridflow import table_2
from runtime.errors import UserError
from runtime.timeline import Timeline
from runtime.world import World
from tests import ROOT
from tests.extras.test_fusion import tail_marks
from tests.root.test_faults import UNBROKEN, check_as_unbroken
from tests.support.fakes import simulate
from tests.support.patience import LIMIT_S
from tests.support.plain import VOCAB, make_model
from tests.support.vision import CLASSES, make_vision_model
from tests.workers.parallel import actor_config, gathered, weights_of
from tests.workers.start import trained_by_tier

MODELS = {  # name -> family, whether the head is tied; 4 key heads for 8 query heads
    "llama": ("llama", False),
    "llama_tied": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen2_tied": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "qwen3_tied": ("qwen3", True),
}
SIZES = dict(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=4)
SIZES |= dict(hidden_size=128, intermediate_size=256)
FIRST = {  # name -> model, ranks, (p, t, t_g) and other settings
    "1 2 2": ("llama", 2, {}),
    "1 4 2": ("qwen2_tied", 4, {}),
    "2 2 2": ("qwen3", 4, {}),
    "1 4 1": ("qwen3_tied", 4, {}),
    "1 4 2 lora": ("llama_tied", 4, {"lora": 4}),
    "two copies": ("qwen2", 4, {"pp": 1, "tp": 2, "rollout_tp": 2}),
}
OTHERS = {
    "2 4 2": ("qwen3", 8, {}),
    "2 2 2 lora": ("qwen2", 4, {"lora": 4}),
    "1 4 2 head": ("llama", 4, {}),
    "1 4 4": ("qwen3", 4, {}),
}
LAYOUTS = FIRST | OTHERS
ALL = [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def sizes_of(name: str) -> dict[str, int]:
    """Return pp, tp and rollout_tp of a layout."""
    known = {each: size for each, size in LAYOUTS[name][2].items() if each != "lora"}
    return known or dict(zip(("pp", "tp", "rollout_tp"), map(int, name.split()[:3]), strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    return {name: make_model(path / name, *how, **SIZES) for name, how in MODELS.items()}


# ---------------------------------------------------------------- real pushes between forked ranks


class ReadingEngine(Engine):
    """An engine that checks as the real one, and reads handles as SGLang does: each rank's into its own."""

    def __init__(self, rank: int, tp: int):
        super().__init__("rollout", rank, "", "")
        self.loaded = [{} for _ in range(tp)]
        self.paths = []

    async def _call(self, method, path, deadline_s=0.0, **body):
        self.paths.append(path)
        for mine, handle in zip(
            self.loaded, body.get("serialized_named_tensors", ()), strict=False
        ):
            assert (body["load_format"], body["weight_version"]) == ("direct", "3")
            named = pickle.loads(base64.b64decode(handle))
            mine |= {name: tensor.clone() for name, tensor in named}


def shard_of(weights: dict[str, torch.Tensor], number: int, tp: int) -> dict[str, torch.Tensor]:
    """Cut whole weights by hand into the parameters of SGLang's rank `number` of `tp`."""
    found = {}
    for name, whole in weights.items():
        head, _, kind = name.rpartition(".")
        part = head.rpartition(".")[2]
        if part == "q_proj":
            rows = [weights[f"{head[:-6]}{each}_proj.{kind}"] for each in "qkv"]
            found[f"{head[:-6]}qkv_proj.{kind}"] = torch.cat([x.chunk(tp)[number] for x in rows])
        elif part == "gate_proj":
            up = weights[name.replace("gate", "up")]
            rows = torch.cat([whole.chunk(tp)[number], up.chunk(tp)[number]])
            found[name.replace("gate", "gate_up")] = rows
        elif part in ("o_proj", "down_proj"):
            found[name] = whole.chunk(tp, 1)[number]
        elif part in ("embed_tokens", "lm_head"):
            found[name] = whole.chunk(tp)[number]
        elif part not in ("k_proj", "v_proj", "up_proj"):
            found[name] = whole
    return found


def train(model_dir: str, how: dict, path: str) -> dict:
    """Push an actor's weights whole and in shards, and compare what arrives with shards cut by hand."""
    from actor import Actor
    from examples.make_demo.closing import close

    config = replace(actor_config(**how), model=model_dir, mode="full", rule=("right",))
    placement, [split] = lay_out(config, dist.get_world_size(), dist.get_world_size())
    actor = Actor(config, model_dir)
    actor.version = 3
    for name, adapter in actor.gpt.adapters.items():
        generator = torch.Generator().manual_seed(len(name))  # equal on all ranks, where B is whole
        torch.nn.init.normal_(adapter.b, generator=generator)
    whole = weights_of(actor)
    found = dict(shards=placement.pushes_shards, received={"HybridFlow-V": actor.received_bytes})
    found["held"] = {"HybridFlow-V": sum(tensor.nbytes for tensor in whole.values())}
    found["split"] = sum(x.nbytes for name, x in whole.items() if "norm" not in name)
    found["wrong"] = []
    if placement.pushes_shards:
        found |= asyncio.run(push(config, placement, split, actor, whole, found))
    everyone = gathered(found)
    close(actor)
    return {"ranks": everyone}


async def push(config, placement, split, actor, whole: dict, found: dict) -> dict:
    world = World("cpu", LIMIT_S)
    pushed = connect(placement, actor, LIMIT_S)
    leads, held = placement.leads("rollout", split), []
    engine = ReadingEngine(world.rank, config.rollout_tp) if world.rank in leads else None
    rollout = SimpleNamespace(world=world, own=engine)
    rollout.timeline = Timeline(world.rank, asyncio.get_running_loop().time)
    models = Models([actor], [], shard_push=pushed)
    pools = dict(rollout=rollout, genrm=None)
    devices = Devices(config, placement, [split], models, pools, world, rollout.timeline)
    copied, most = wire.flat_copy, wire.BUCKET_BYTES

    def counted(bucket):
        flat = copied(bucket)
        held.append(flat.nbytes)
        return flat

    wire.flat_copy, wire.BUCKET_BYTES = counted, 100_000
    try:
        await pushed.load(rollout, devices.leads("rollout"))
        wire.BUCKET_BYTES = most
        at_once = len(held), held.pop()
        held.clear()
        await pushed.load(rollout, devices.leads("rollout"))
    finally:
        wire.flat_copy = copied
    found["received"]["HybridFlow"] = devices.received_bytes
    found["held"]["HybridFlow"] = sum(held)
    found["buckets"] = at_once[0], len(held)
    if engine:
        assert engine.paths.count("/update_weights_from_tensor") == at_once[0] + len(held)
        for number, loaded in enumerate(engine.loaded):
            expected = shard_of(whole, number, config.rollout_tp)
            assert loaded.keys() == expected.keys()
            wrong = [name for name in loaded if not torch.equal(loaded[name], expected[name])]
            found["wrong"] += [f"{name} of {number}" for name in wrong]
        found["ranks"] = list(placement.ranks_of("rollout", world.rank))
    world.close()
    return found


@pytest.fixture(scope="module")
def result_of(tmp_path_factory, models):
    known = {}
    for name, (model, ranks, how) in LAYOUTS.items():
        lora = {each: size for each, size in how.items() if each == "lora"}
        known[name] = (model, ranks, sizes_of(name) | lora)
    of_tier = [{name: known[name] for name in tier} for tier in (FIRST, OTHERS)]
    return trained_by_tier("tests.extras.test_shards", tmp_path_factory, *of_tier, models)


@pytest.mark.parametrize("name", ALL)
def test_each_engine_rank_gets_its_shard_bit_for_bit(name, result_of):
    ranks = result_of(name)["ranks"]
    sizes = sizes_of(name)
    apart = sizes["tp"] // sizes["rollout_tp"]
    assert [found["wrong"] for found in ranks] == [[]] * len(ranks)
    assert {found["shards"] for found in ranks} == {sizes["rollout_tp"] > 1}
    if sizes["rollout_tp"] == 1:
        return
    engines = [found["ranks"] for found in ranks if "ranks" in found]
    assert sorted(rank for engine in engines for rank in engine) == [*range(len(ranks))]
    assert {second - first for first, second, *_ in engines} == {apart}
    for found in ranks:
        many, one = found["buckets"]
        assert many > 3 and one == 1


@pytest.mark.parametrize("name", ALL)
def test_a_push_receives_and_holds_what_table_2_says(name, result_of):
    """Table 2 has equal stages and no tensor that tensor parallelism leaves whole, as norms: of these, a rank
    gets other stages'."""
    sizes = sizes_of(name)
    pp, tp, parts = sizes.values()
    ranks = result_of(name)["ranks"]
    split = ranks[0]["split"]
    rest = ranks[0]["held"]["HybridFlow-V"] - split
    systems = ["HybridFlow-V"] + ["HybridFlow"] * (parts > 1)
    for system in systems:
        of_split, of_rest = table_2(pp, tp, 1, parts)[system], table_2(pp, 1, 1, 1)["HybridFlow"]
        received = Fraction(sum(found["received"][system] for found in ranks), len(ranks))
        assert received == of_split.received * split + of_rest.received * rest
        for found in ranks:
            assert found["held"][system] == of_split.peak * split + rest
            if pp == 1:
                assert found["received"][system] == of_split.received * split
    assert rest < 0.01 * split


ROWS = ["1 2 2", "1 4 2", "2 2 2", "1 4 1", pytest.param("2 4 2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", ROWS)
def test_the_page_has_what_was_measured(name, result_of):
    page = (ROOT / "docs/push.md").read_text()
    assert row_of(name, result_of(name)["ranks"]) in page


def row_of(name: str, ranks: list[dict]) -> str:
    """Return a layout's row of the page: means over ranks in fractions of the model, and table 2's."""
    pp, tp, parts = sizes_of(name).values()
    model = ranks[0]["held"]["HybridFlow-V"]
    cells = [f"{pp}, {tp}, {parts}"]
    for what, in_table in (("received", "received"), ("held", "peak")):
        for system in ("HybridFlow-V", "HybridFlow"):
            fractions = [found[what].get(system, 0) / model for found in ranks]
            formula = float(table_2(pp, tp, 1, parts)[system]._asdict()[in_table])
            measured = f"{sum(fractions) / len(ranks):.3f} ({formula:g})"
            cells.append(measured if parts > 1 or system == "HybridFlow-V" else "-")
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- which push runs


def settings(model: str, **how) -> Config:
    return Config(**dict(mode="full", tp=2, rollout_tp=2, model=model, judge=("j",)) | how)


def test_shards_go_where_they_fit_and_the_log_says_so(models):
    config = settings(models["llama"])
    placed, [split] = lay_out(config, 4, 4)
    assert (
        placed.pushes_shards
        and placed.stride("rollout") == 1
        and placed.leads("rollout", split) == (0, 2)
    )
    said = "pushes send shards: a rank of an engine needs 1 of the actor's 2"
    assert f"\n  {said}" in describe(config, placed, split)
    placed, [split] = lay_out(replace(config, tp=4), 8, 8)
    assert placed.leads("rollout", split) == (0, 1, 4, 5) and placed.leads("genrm", split) == (
        *range(8),
    )
    assert [[*placed.ranks_of("rollout", lead)] for lead in (1, 4)] == [[1, 3], [4, 6]]
    assert "needs 2 of the actor's 4" in describe(config, placed, split)


WHOLE = [  # settings, ranks, ranks of a machine, why
    (dict(rollout_tp=4), 4, 4, "--rollout-tp 4 doesn't divide the actor's tp 2"),
    (dict(placement="engines=0-1 actor=2-3"), 4, 4, "engines are on other ranks than the actor"),
    (dict(placement="engines=0-3 actor=0-1"), 4, 4, "engines are on other ranks than the actor"),
    (dict(tp=4), 4, 2, "the actor's tp 4 doesn't divide 2 ranks of a machine"),
    (dict(tp=4, mode="partial"), 4, 4, "with shards --mode partial needs more ranks than 4"),
    (dict(tp=4, mode="partial", rollout_ranks=2), 8, 8, "with shards --rollout-ranks 2 leaves 6"),
    (dict(model="nowhere"), 4, 4, "nowhere has no config.json"),
]


@pytest.mark.parametrize("how,ranks,on_machine,why", WHOLE)
def test_whole_tensors_go_elsewhere_as_before(models, how, ranks, on_machine, why):
    config = replace(settings(models["llama"]), **how)
    placed, _ = lay_out(config, ranks, on_machine)
    assert not placed.pushes_shards and placed.stride("rollout") == 1
    assert placed.push.startswith(f"pushes send whole tensors: {why}")


def test_whole_tensors_go_where_sglang_pads_or_renames(tmp_path):
    padded = make_model(tmp_path / "padded", "llama", False, vocab_size=VOCAB + 4)
    placed, _ = lay_out(settings(padded), 4, 4)
    assert placed.push.endswith("an engine pads the vocabulary of 68 to a multiple of 64")
    seeing = make_vision_model(tmp_path / "seeing", next(iter(CLASSES)))
    placed, _ = lay_out(settings(seeing), 4, 4)
    assert placed.push.endswith("an engine divides an image tower in its own way")


def test_without_wide_engines_nothing_is_said_or_changed(models):
    for config in (settings(models["llama"], rollout_tp=1), settings(models["llama"], steps=0)):
        placed, splits = lay_out(replace(config, tp=1), 4, 4)
        assert not placed.push and choose(placed, config, 4) is placed
        assert "push" not in describe(config, placed, splits[0])


@pytest.mark.parametrize("tp,ranks,cuts", [(2, 8, [4, 2, 6]), (4, 8, [4]), (4, 12, [4, 8])])
def test_a_split_moves_whole_copies_of_the_actor(models, tp, ranks, cuts):
    """With engines of ranks 0, 2 and 1, 3, a split after rank 1 would cut both."""
    config = settings(models["llama"], mode="partial", tp=tp, rebalance=True)
    placed, splits = lay_out(config, ranks, ranks)
    assert placed.pushes_shards and sorted(split.rollout for split in splits) == sorted(cuts)
    for split in splits:
        writing = [placed.ranks_of("rollout", lead) for lead in placed.leads("rollout", split)]
        assert sorted(rank for engine in writing for rank in engine) == [*range(split.rollout)]


def test_on_gpus_an_engine_takes_its_ranks_devices(models, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    config = settings(
        models["llama"], tp=4, genrm_tp=2, judge=(models["qwen3"],), judge_format=("chat",)
    )
    placed, splits = lay_out(config, 8, 8)
    [rollout] = servers_of(1, config, placed, splits)
    assert rollout == ServerSpec("rollout", config.port + 2, config.model, stride=2)
    flags = cuda_flags("rollout", config.model, config, rollout.stride)
    assert (flags["base-gpu-id"], flags["tp-size"], flags["gpu-id-step"]) == ("1", 2, 2)
    [_, genrm] = servers_of(4, config, placed, splits)
    assert genrm.stride == 1
    assert "gpu-id-step" not in cuda_flags(
        "rollout", config.model, replace(config, rollout_tp=1), 1
    )


def test_engines_with_distant_ranks_change_hands_whole(models):
    how = dict(UNBROKEN, tail=0.3, judge=("JUDGE",), model=models["llama"])
    controllers, _ = simulate("fused", 8, **how, tp=4, rollout_tp=2)
    assert controllers[0].devices.placement.pushes_shards
    check_as_unbroken(controllers)
    assert {text for *_, text in tail_marks(controllers)} == {"4|4", "0|8", "8|0"}


# ---------------------------------------------------------------- what an engine refuses


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda named: named | {"model.norm.weight": torch.zeros(3)}, "has .128. for model.norm"),
        (lambda named: named | {"model.more": torch.zeros(3)}, "has None for model.more"),
        (lambda named: {n: x for n, x in named.items() if "norm" in n}, "lacked .'model.embed_tok"),
    ],
)
def test_names_and_shapes_are_checked_before_sglang_sees_them(models, run, change, message):
    """A wrong shape would end SGLang's scheduler."""
    shapes = shard_shapes(checkpoint_shapes(models["qwen3"]), 2)
    engine = ReadingEngine(0, 2)

    async def offers():
        bucket = [*change({name: torch.zeros(shape) for name, shape in shapes.items()}).items()]
        yield wire.facts_of(bucket), [shared(bucket)[1]] * 2

    with pytest.raises(UserError, match=message):
        run(engine.load(offers(), shapes, "direct", 3))
    assert "/end_weight_update" not in engine.paths
    assert ("/update_weights_from_tensor" in engine.paths) == ("lacked" in message)
