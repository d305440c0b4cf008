"""Memory of a training pass at an eighth of a 7B's widths: what layers keep, how many copies of logits."""

import pytest
import torch

from config import AS_FITS
from extras.memory.estimate import KEPT
from tests.root.test_actor import actor_config, make_actor, update  # noqa: F401
from tests.support.plain import make_model, make_samples
from tests.support.rounding import apart
from tests.workers.parallel import far, weights_of
from training import lm_head
from training.offload import HostCopies

HIDDEN, KV, FFN, VOCAB, TOKENS = 448, 64, 2368, 19008, 512
DTYPES = ["float32", "bfloat16"]
WIDTHS = dict(hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=28)
WIDTHS |= dict(num_key_value_heads=4, vocab_size=VOCAB, max_position_embeddings=1024)


@pytest.fixture(scope="session")
def shallow_and_deep(tmp_path_factory) -> list[str]:
    """Make Qwen2 models of one and of three layers."""
    home = tmp_path_factory.mktemp("widths")
    shape = dict(family="qwen2", tied=False, **WIDTHS)
    return [make_model(home / str(layers), num_hidden_layers=layers, **shape) for layers in (1, 3)]


def kept_by(actor) -> int:
    """Return the bytes that a forward pass keeps for the gradient, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in actor.gpt.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # held, or its address would soon be another's
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    def nothing(batch, output):
        raise StopIteration

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, pytest.raises(StopIteration):
        actor._passes([[([1] * 12, [2] * (TOKENS - 11))]], nothing)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("recompute", [0, AS_FITS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_layer_keeps(make_actor, shallow_and_deep, dtype, recompute):  # noqa: F811
    """Per token it must be within 2% of KEPT; if recomputed, only the layer's input."""
    how = dict(dtype=dtype, recompute=recompute)
    one, three = (kept_by(make_actor(model, **how)) for model in shallow_and_deep)
    of_a_layer = (three - one) / 2 / TOKENS
    widths = zip(KEPT["cpu", dtype], (HIDDEN, KV, FFN), strict=True)
    all_of_it = sum(size * width for size, width in widths)
    expected = HIDDEN * {"float32": 4, "bfloat16": 2}[dtype] if recompute else all_of_it
    assert of_a_layer == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_chunks_and_recomputation_change_nothing(make_actor, tmp_path, monkeypatch, entropy_coef):  # noqa: F811
    """Loss, statistics and weights after a float32 step must equal those of one chunk that keeps all, up to
    the order of its sums. Recomputed layers and kept chunks must agree to the last bit."""
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    found = []
    ways = [(10**6, 0, 0), (10**6, 1, 0), (10**6, AS_FITS, 0)]
    ways += [(7, 0, 0), (7, 0, 2), (7, AS_FITS, 99)]
    for rows, recompute, kept in ways:
        monkeypatch.setattr(lm_head, "CHUNK_BYTES", rows * 4 * 64)
        how = dict(recompute=recompute, kept_chunks=kept, entropy_coef=entropy_coef)
        actor = make_actor(model, **how)
        samples = make_samples(0)
        for sample, logprobs in zip(samples, actor.read_tokens([samples]), strict=True):
            sample.logprobs, sample.versions = logprobs, [0] * len(logprobs)
        metrics = update(actor, samples)
        timeless = {name: value for name, value in metrics.items() if "seconds" not in name}
        found.append((timeless, weights_of(actor), actor.ddp.buffers[0].grad_data.clone()))
    (metrics, weights, gradient), *others = found
    near = apart(int(metrics["train/tokens"]))  # a token's gradients are below 1
    for layers in others[:2]:
        assert layers[0] == metrics and torch.equal(layers[2], gradient)
    for chunks in others[3:]:
        assert chunks[0] == others[2][0] and torch.equal(chunks[2], others[2][2])
    assert gradient.abs().max() > 1e-3
    for other, others_weights, others_gradient in others:
        assert other == pytest.approx(metrics, rel=near, abs=near)
        assert torch.allclose(others_gradient, gradient, rtol=0, atol=near)
        assert far(others_weights, weights) < 1e-4


def test_what_leaves_the_device_comes_back():
    """Views and ties of a storage must too, and what was created between two naps."""
    copies, whole, other = HostCopies(), torch.arange(12.0), torch.ones(3, dtype=torch.bfloat16)
    tensors = [whole[:5], other, whole[5:].view(7)]
    for _ in range(3):
        before = [tensor.clone() for tensor in tensors]
        copies.move_out(tensors)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        copies.move_in()
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
        whole.mul_(2.0)  # both views see it
        tensors.append(torch.full((4,), len(tensors)))
    assert tensors[0].tolist() == [0, 8, 16, 24, 32] and whole[5] == tensors[2][0] == 40
