"""Adapters in every layout against plain transformers with W + s B A: one sum for passes, pushes, exports."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from actor import Actor
from engines.engine import seed_of
from examples.make_demo.closing import close
from extras import lora
from extras.lora import check
from inputs.hf_directory import checkpoint_shapes
from placement import make_placement
from runtime.errors import UserError
from tests.support.plain import make_model, make_samples, plain_logprobs
from tests.support.vision import CLASSES, make_vision_model
from tests.workers.parallel import (
    actor_config,
    balanced,
    far,
    gathered,
    save,
    weights_of,
)
from tests.workers.start import trained_by_tier
from training.hf_weights import global_parameters
from training.model import check_models
from training.sharded_checkpoint import MOMENTS

pytestmark = pytest.mark.usefixtures("constants")
RANK, SCALE = 4, 8.0  # 32 / 4
RATES = (5e-4, 1e-3, 7.5e-4)  # three updates' rates, by hand from actor_config
FIRST = {  # name -> model, ranks, sizes; saves, resumes: the layout from which it resumes
    "one": ("qwen2", 1, {"saves": True}),
    "recomputed": ("qwen3", 1, {"recompute": 2}),
    "tp2_sp_recomputed": ("qwen3", 2, {"tp": 2, "sp": True, "recompute": 1, "saves": True}),
    "resumed on tp2": ("qwen2", 2, {"tp": 2, "resumes": "one"}),
    "resumed on pp2": ("qwen3", 2, {"pp": 2, "resumes": "tp2_sp_recomputed"}),
}
OTHERS = {
    "dp2": ("qwen3", 2, {}),
    "tp2": ("qwen3", 2, {"tp": 2}),
    "tp2_tied": ("qwen2", 2, {"tp": 2, "sp": True}),
    "pp2": ("qwen2", 2, {"pp": 2, "recompute": 1}),
    "tp2_pp2_sp": ("qwen3", 4, {"tp": 2, "pp": 2, "sp": True, "saves": True}),
    "tp2_dp2": ("qwen2", 4, {"tp": 2}),
    "resumed on dp4": ("qwen3", 4, {"resumes": "tp2_pp2_sp"}),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
FUSED = {  # Megatron's matrix -> the transformers' matrices that it fuses, which share an A
    "self_attention.linear_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention.linear_proj": ["self_attn.o_proj"],
    "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.linear_fc2": ["mlp.down_proj"],
}


@pytest.fixture
def make_actor(build):
    """Build an actor of a single rank with adapters, after closing the one before it."""

    def make(model_dir, **changes):
        [actor] = build((Actor, actor_config(**{"lora": RANK} | changes), model_dir))
        return actor

    return make


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


class Sum(torch.nn.Module):
    """W + s B A as a parametrization of W."""

    def __init__(self, a: torch.nn.Parameter, rows: int):
        super().__init__()
        self.a, self.b = a, torch.nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight):
        return weight + SCALE * self.b @ self.a


def first_a(name: str, columns: int) -> torch.Tensor:
    """Return the initial A: by the seed 0 and its matrix's name, U(-1, 1) / sqrt(columns)."""
    generator = torch.Generator().manual_seed(seed_of("lora", 0, name))
    return (2 * torch.rand(RANK, columns, generator=generator) - 1) / math.sqrt(columns)


def with_sums(model) -> list[torch.nn.Parameter]:
    """Make each matrix in the layers a sum; return every A and B."""
    learned = []
    model.requires_grad_(False)
    for number, layer in enumerate(model.model.layers):
        for fused, names in FUSED.items():
            linears = [layer.get_submodule(name) for name in names]
            a = first_a(f"decoder.layers.{number}.{fused}.weight", linears[0].in_features)
            learned.append(a := torch.nn.Parameter(a))
            for linear in linears:
                own = Sum(a, linear.out_features)
                learned.append(own.b)
                parametrize.register_parametrization(linear, "weight", own)
    return learned


def weights_in(model) -> dict[str, torch.Tensor]:
    """Return weights by transformers' names, with sums for matrices that have one."""
    found = {}
    for name, module in model.named_modules():
        for kind in ("weight", "bias") if not isinstance(module, Sum) else ():
            tensor = vars(module).get("_parameters", {}).get(kind)
            if parametrize.is_parametrized(module, kind):
                tensor = module.weight
            if tensor is not None:
                found[f"{name}.{kind}"] = tensor.detach().clone()
    return found


def batches() -> list[list]:
    found = []
    for step, number in enumerate((0, 1, 5)):
        samples = [sample for sample in make_samples(number) if sample.advantages is not None]
        for sample in samples:
            sample.versions = [step] * len(sample.response)
        found.append(samples)
    return found


def plain(model_dir: str) -> dict:
    """Make three on-policy updates of plain transformers with torch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    learned = with_sums(model)
    adam = torch.optim.AdamW(learned, betas=(0.9, 0.95), weight_decay=0.1)
    known = {"model_dir": model_dir, "batches": batches(), "first": weights_in(model)}
    for samples, lr in zip(known["batches"], RATES, strict=True):
        losses = []
        for sample in samples:
            logprobs, _ = plain_logprobs(model, sample, 0.8)
            sample.logprobs = logprobs.tolist()
            losses.append(-(logprobs - logprobs.detach()).exp() * torch.tensor(sample.advantages))
        adam.param_groups[0]["lr"] = lr
        adam.zero_grad()
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(learned, 0.5)
        adam.step()
    return known | {"weights": weights_in(model)}


def train(known: dict, sizes: dict, path: str) -> dict:
    """Make three updates in a layout, the last after a save and a load; or only that one, if it resumes."""
    sizes = dict(sizes)
    saves, resumes = sizes.pop("saves", False), sizes.pop("resumes", "")
    config = actor_config(lora=RANK, **sizes)
    folder = Path(path)
    if resumes:
        folder = folder.with_name(f"result.{resumes}")
    actor = Actor(config, known["model_dir"])
    counted = lora.memory_of(checkpoint_shapes(known["model_dir"]), RANK, config, actor.dp_size)
    base = {name: weight.detach().clone() for name, weight in global_parameters(actor.gpt)}
    found = {"first": weights_of(actor), "counted": counted, "differences": [], "kl": []}
    adapters = actor.gpt.adapters.parameters.values()
    found["numbers"] = sum(tensor.numel() for tensor in adapters)
    for step, samples in enumerate(known["batches"]):
        if step == 2 and saves:
            save(actor, folder)
        if step == 2 and (saves or resumes):
            close(actor)
            actor = Actor(config, known["model_dir"])
            actor.restore(folder)
        elif resumes:
            continue
        batch = balanced(copy.deepcopy(samples), actor)
        actor.compute_ref_logprobs(batch)
        metrics = actor.update(batch)
        found["differences"].append(metrics["train/engine_logprob_diff_max"])
        found["kl"].append(metrics["train/reference_kl"])
    found |= {"weights": weights_of(actor), "version": actor.version}
    after = dict(global_parameters(actor.gpt))
    found["base_stays"] = gathered(all(torch.equal(base[name], after[name]) for name in base))
    found["export"] = Path(f"{path}.hf")
    actor.export(found["export"])
    close(actor)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, dict]:
    path = tmp_path_factory.mktemp("models")
    return {
        name: plain(make_model(path / name, name, name == "qwen2")) for name in ("qwen2", "qwen3")
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory, models):
    return trained_by_tier("tests.extras.test_lora", tmp_path_factory, FIRST, OTHERS, models)


def same_names(weights: dict, like: dict) -> dict:
    """Drop a tied output layer, which transformers counts."""
    return {name: weights[name] for name in like if name in weights}


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_updates_are_those_of_plain_transformers(trained, models, name):
    found, known = trained(name), models[(FIRST | OTHERS)[name][0]]
    expected = same_names(known["weights"], found["weights"])
    assert expected.keys() == found["weights"].keys()
    assert far(found["weights"], expected) < 1e-6
    assert far(found["first"], expected) > 5e-3
    assert max(found["differences"]) < 1e-4 and found["version"] == 3


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_the_weights_of_model_stay(trained, models, name):
    """A first push must send them; later ones send embedding, norms and biases unchanged."""
    found, known = trained(name), models[(FIRST | OTHERS)[name][0]]
    for key, tensor in found["first"].items():
        assert torch.equal(tensor, known["first"][key]), key
    assert all(found["base_stays"])
    matrices = [key for key in found["first"] if lora.MATRIX.search(key)]
    assert len(matrices) == 7 * 2
    for key in found["first"].keys() - {*matrices}:
        assert torch.equal(found["weights"][key], found["first"][key]), key
    for key in matrices:
        assert not torch.equal(found["weights"][key], found["first"][key]), key
    if (FIRST | OTHERS)[name][1] == 1:  # else the count is as if tp cut A and B
        assert found["counted"]["adapters"] == 4 * found["numbers"]


@pytest.mark.parametrize("name", [name for name in FIRST if "resumed" not in name])
def test_the_reference_is_the_actor_without_adapters(trained, name):
    """Its KL must be 0 before the first update, and only then; its pass leaves the adapters on."""
    first, *later = trained(name)["kl"]
    assert first == 0 and all(kl > 0 for kl in later)


def learn(actor, steps: int = 2) -> None:
    for _ in range(steps):
        samples = batches()[0]
        for sample in samples:
            sample.versions = [actor.version] * len(sample.response)
            sample.logprobs = [-1.0] * len(sample.response)
        actor.update(balanced(samples, actor))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_multiply_by_what_is_pushed(make_actor, build, model_dir, tmp_path, dtype):
    """A model of the exported sum must compute the same bits; with x W + s (x A) B it wouldn't."""
    actor = make_actor(model_dir, dtype=dtype, lr=1e-2)
    learn(actor)
    samples = batches()[1]
    rows = actor.read_tokens([samples])
    actor.export(tmp_path)
    [merged] = build((Actor, actor_config(dtype=dtype), str(tmp_path)))
    assert merged.read_tokens([samples]) == rows


def test_a_checkpoint_holds_a_b_and_moments_in_float32(make_actor, model_dir, tmp_path):
    """A bfloat16 model's must also be float32; frozen weights must not be saved."""
    actor = make_actor(model_dir, dtype="bfloat16", lr=1e-2)
    learn(actor)
    save(actor, tmp_path / "saved")
    before = {name: x.detach().clone() for name, x in actor.gpt.adapters.parameters.items()}
    learn(actor, 1)
    after = weights_of(actor)
    again = make_actor(model_dir, dtype="bfloat16", lr=1e-2)
    again.restore(tmp_path / "saved")
    for name, tensor in again.gpt.adapters.parameters.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
    learn(again, 1)
    assert far(weights_of(again), after) == 0
    saved = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    prefixes = ("", "optimizer.state.param.", *(f"optimizer.state.{name}." for name in MOMENTS))
    assert saved.keys() == {prefix + name for prefix in prefixes for name in before}
    assert {tensor.properties.dtype for tensor in saved.values()} == {torch.float32}


def check_adapter(path: Path, model_dir: str, kind, inputs: dict) -> None:
    """Check that PEFT puts it on --model: logits are the exported sum's, and adapters matter."""
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, 32)
    merged = kind.from_pretrained(path)  # doesn't add the adapter twice
    both = PeftModel.from_pretrained(kind.from_pretrained(model_dir), path / "adapter")
    loaded = [name for name, _ in both.named_parameters() if ".lora_" in name]
    stored = load_file(path / "adapter" / "adapter_model.safetensors")
    assert {name.replace(".default.", ".") for name in loaded} == stored.keys()
    with torch.no_grad():
        ours, theirs = merged(**inputs).logits, both(**inputs).logits
        with both.disable_adapter():
            without = both(**inputs).logits
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-5)
    assert (ours - without).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_peft_reads_an_export(trained, models, name):
    path = trained(name)["export"]
    tokens = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(1))
    known = models[(FIRST | OTHERS)[name][0]]
    check_adapter(path, known["model_dir"], AutoModelForCausalLM, {"input_ids": tokens})


@pytest.mark.parametrize("family", CLASSES)
def test_peft_reads_an_export_of_a_model_that_sees(make_actor, tmp_path, family):
    """Its tower must get no adapter, though some of its names end as those of blocks do."""
    model_dir = make_vision_model(tmp_path / "model", family)
    actor = make_actor(model_dir, lr=1e-2, max_tokens_per_micro_batch=64)
    assert all(name.startswith("decoder.layers.") for name in actor.gpt.adapters)
    learn(actor)
    actor.export(tmp_path / "hf")
    tokens = torch.randint(7, 60, (2, 20), generator=torch.Generator().manual_seed(1))
    check_adapter(tmp_path / "hf", model_dir, CLASSES[family][1], {"input_ids": tokens})


@pytest.mark.parametrize("rank", [33, 1000])
def test_a_rank_that_a_matrix_lacks_is_refused(model_dir, rank):
    with pytest.raises(UserError) as caught:
        check(actor_config(lora=rank, model=model_dir, rule=("right",)))
    assert str(caught.value) == f"--lora {rank}: a matrix of --model has a side of 32"


def test_the_largest_rank_is_taken(model_dir):
    check(actor_config(lora=32, model=model_dir, rule=("right",)))


def test_an_adapter_is_no_model(model_dir, tmp_path):
    """It must be refused with or without its model beside it: transformers would merge them, not engines."""
    (tmp_path / "adapter_config.json").write_text("{}")
    for name in ("", "config.json"):
        if name:
            (tmp_path / name).write_text(Path(model_dir, name).read_text())
        with pytest.raises(UserError, match="makes it an adapter: merge it into its model"):
            config = actor_config(model=str(tmp_path), rule=("right",))
            check_models(config, make_placement(config, 1))
