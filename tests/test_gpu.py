"""What only a CUDA device can show. Skipped without one; not run yet by anybody."""

import asyncio

import pytest
import torch

from config import Config
from engines.engine import Engine, Request, Sampling

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: memory release and IPC weight push"
)
CONFIG = Config(
    mem_fraction=0.5, deterministic=False, max_model_len=1024, max_new_tokens=64, judge_max_new_tokens=64
)


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_an_engine_that_sleeps_gives_its_memory_back(tmp_path):
    """Sleep frees weights and KV cache; after wake and push it answers again, under the new version."""
    import tiny_models
    from safetensors.torch import load_file

    model_dir = tiny_models.make_tiny_qwen3(tmp_path / "model")

    async def cycle():
        engine = Engine.launch("rollout", 0, 32000, model_dir, CONFIG, tmp_path / "log", "a key")
        try:
            await engine.ready(300)
            awake = used_bytes()
            await engine.sleep()
            asleep = used_bytes()
            weights = load_file(f"{model_dir}/model.safetensors", device="cuda")
            await engine.wake_weights()
            await engine.load_weights(weights.items(), 1)
            await engine.wake_kv_cache()
            requests = [Request([5, 6, 7], Sampling(1.0, 8), 8)] * 2
            return awake, asleep, [part async for part in engine.generate(requests)]
        finally:
            await engine.close()

    awake, asleep, parts = asyncio.run(cycle())
    assert awake - asleep > 0.4 * torch.cuda.mem_get_info()[1]
    assert sum(len(part.tokens) for part in parts) <= 16 and {part.index for part in parts} == {0, 1}
    assert {version for part in parts for version in part.versions} == {1}
