"""What only a CUDA device can show. Skipped without one; not run yet by anybody."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: memory release and IPC weight push"
)


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_an_engine_that_sleeps_gives_its_memory_back(tmp_path):
    """Sleep frees weights and KV cache; after wake and push the engine answers again, under the new version.
    """
    import tiny_models
    from safetensors.torch import load_file

    from config import Config
    from engines.engine import Engine, Sampling

    model_dir = tiny_models.make_tiny_qwen3(tmp_path / "model")
    config = SimpleNamespace(**dataclasses.asdict(Config()) | {"mem_fraction": 0.5, "deterministic": False})

    async def cycle():
        engine = Engine.launch("rollout", 0, 32000, model_dir, config, str(tmp_path / "log"))
        try:
            await engine.ready(300)
            awake = used_bytes()
            await engine.sleep()
            asleep = used_bytes()
            weights = load_file(f"{model_dir}/model.safetensors", device="cuda")
            await engine.wake_weights()
            await engine.load_weights(weights.items(), 1)
            await engine.wake_kv_cache()
            answers = [a async for a in engine.generate([[5, 6, 7]] * 2, Sampling(1.0, 8))]
            return awake, asleep, answers
        finally:
            await engine.close()

    awake, asleep, answers = asyncio.run(cycle())
    assert awake - asleep > 0.4 * torch.cuda.mem_get_info()[1]
    assert {version for answer in answers for version in answer.versions} == {1}
