"""decoder.cpp against transformers and torch; a row's bits in any batch; compilation and speed."""

import errno
import json
import os
import platform
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from config import parse_config
from cpu.sglang import murmur_hash32
from extras import dry_run
from extras.fast_cpu import compiler
from extras.fast_cpu.decoder import STOPS, Decoder, product_rates
from tests.support.rounding import apart

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LLAMA3 |= {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0}
SIZES = dict(hidden_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(intermediate_size=72, vocab_size=77, max_position_embeddings=256, pad_token_id=0)
MODELS = {
    "Qwen2, biases, untied": partial(Qwen2Config, head_dim=24, tie_word_embeddings=False),
    "Qwen3, norms of q and k, tied": partial(Qwen3Config, head_dim=64, tie_word_embeddings=True),
    "Llama, its rope, heads of 8": partial(LlamaConfig, head_dim=8, rope_parameters=LLAMA3),
    "Llama, heads of 128": partial(LlamaConfig, head_dim=128, tie_word_embeddings=True),
}
NATIVE = compiler.TARGETS[platform.machine()]
# targets that may run here, and the processor features that they need
LEVELS = {"x86_64": {"-march=x86-64-v2": {"sse4_2"}, "-march=x86-64-v3": {"avx2", "bmi2", "fma"}}}
LEVELS["x86_64"]["-march=x86-64-v4"] = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS["aarch64"] = {"-mcpu=generic": {"asimd"}}
OWN = set(re.search(r"^(?:flags|Features)\s*:(.*)", compiler.CPU_INFO.read_text(), re.M)[1].split())
LOWER = [level for level, needs in LEVELS[platform.machine()].items() if needs <= OWN]
NARROW = [level for level in LOWER if level.endswith(("v2", "v3"))]
SLOTS, REQUESTS = 8192, 70
LIMIT_MS = 1_000_000


class Loaded:
    """A random model of transformers as SGLang would have loaded it, and a decoder of it."""

    def __init__(self, make_config, seed=0, target=NATIVE):
        torch.manual_seed(seed)
        config = make_config(**({"rope_parameters": ROPE} | SIZES))
        self.oracle = AutoModelForCausalLM.from_config(config).double().eval()
        for name, weight in self.oracle.named_parameters():
            about = 1.0 if "norm" in name else 0.0
            torch.nn.init.normal_(weight, mean=about, std=0.2).copy_(weight.float())
        self.weights = sglang_weights(self.oracle)
        order = torch.randperm(SLOTS - 1)[: REQUESTS * 100] + 1
        table = order.view(REQUESTS, 100).to(torch.int32)
        self.decoder = Decoder(built_for(target), self.runner(config, table))

    def runner(self, config, table):
        shape = (SLOTS, config.num_key_value_heads, config.head_dim)
        caches = [[torch.full(shape, torch.nan) for _ in "kv"] for _ in range(3)]
        angles = self.oracle.model.rotary_emb(torch.zeros(1).double(), torch.arange(256)[None])
        table_of_angles = torch.cat([each[0].chunk(2, -1)[0] for each in angles], -1).float()
        attention = SimpleNamespace(rotary_emb=SimpleNamespace(cos_sin_cache=table_of_angles))
        body = SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)])
        model = SimpleNamespace(model=body, config=config, load_weights=self.load)
        model.named_parameters = lambda remove_duplicate: self.weights.items()
        model.named_children = lambda: [("logits_processor", SimpleNamespace())]
        runner = SimpleNamespace(model=model, sampler=SimpleNamespace(forward=None))
        runner.attn_backend = SimpleNamespace()
        runner.token_to_kv_pool = SimpleNamespace(get_kv_buffer=lambda layer: caches[layer])
        runner.req_to_token_pool = SimpleNamespace(req_to_token=table)
        return runner

    def load(self, weights):
        for name, weight in weights:
            self.weights[name].copy_(weight)

    def logits(self, *parts):
        """Return the logits of rows (request, position of the first token, tokens), all in one pass."""
        ids = torch.cat([tokens for _, _, tokens in parts])
        places = torch.cat([start + torch.arange(len(tokens)) for _, start, tokens in parts])
        requests = torch.cat([torch.full_like(tokens, request) for request, _, tokens in parts])
        return self.decoder.logits(self.hidden(ids, places, requests))

    def hidden(self, ids, places, requests):
        batch = SimpleNamespace(req_pool_indices=requests)
        batch.forward_mode = SimpleNamespace(is_decode=lambda: True)
        return self.decoder.run_layers(ids, places, batch)

    def decode(self, requests, steps):
        """Return each request's tokens, log-probabilities and their count, decoded in windows."""
        rows = torch.tensor(requests)
        tokens, logprobs = [[] for _ in rows], [[] for _ in rows]
        while len(active := rows[:, 5].nonzero().flatten()):
            asked = rows[active].contiguous()
            found = self.decoder.decode(asked, torch.ones(len(asked)), steps, LIMIT_MS)
            for row, new, values, count in zip(active.tolist(), *found, strict=True):
                tokens[row] += new[:count].tolist()
                logprobs[row] += values[:count].tolist()
                rows[row, 0] = new[count - 1]
                rows[row, 1] += count
                rows[row, 5] -= count
                if set(new[:count].tolist()) & set(rows[row, 6:].tolist()):
                    rows[row, 5] = 0
        return tokens, logprobs


def built_for(target):
    """Return the library with this target's instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compiler.TARGETS, platform.machine(), target)
        return compiler.compiled()


def sglang_weights(model):
    """Return a transformers model's weights by SGLang's names: q, k, v and gate, up are joined."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named = {name: weight.float() for name, weight in named.items()}
    joins = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name in list(named):
        for joined, parts in joins.items():
            if parts[0] in name:
                found = [named[name.replace(parts[0], part)] for part in parts]
                named[name.replace(parts[0], joined)] = torch.cat(found)
    return named


ONE_MODEL = next(iter(MODELS))
EACH = [(name, NATIVE) for name in MODELS] + [(ONE_MODEL, level) for level in LOWER]


@pytest.fixture(scope="module", params=EACH, ids=lambda each: f"{each[0].split(',')[0]}{each[1]}")
def loaded(request):
    name, target = request.param
    with torch.no_grad():
        yield Loaded(MODELS[name], target=target)


@pytest.fixture(scope="module")
def llama():
    with torch.no_grad():
        return Loaded(MODELS["Llama, its rope, heads of 8"])


def some_tokens(length, seed=0):
    return torch.randint(77, (length,), generator=torch.Generator().manual_seed(seed))


def test_logprobs_are_transformers(loaded):
    tokens = some_tokens(90)
    with torch.no_grad():
        expected = loaded.oracle(tokens[None]).logits[0].log_softmax(-1)
    found = loaded.logits((0, 0, tokens)).double().log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.5


def test_bits_of_a_row_do_not_depend_on_the_pass(loaded):
    """A row must have the same bits in a batch, partly cached or one by one, with or without 63 others"""
    tokens = some_tokens(90)
    whole = loaded.logits((0, 0, tokens))
    for first in (1, 8, 47, 89):
        loaded.logits((1, 0, tokens[:first]))
        assert torch.equal(loaded.logits((1, first, tokens[first:])), whole[first:])
    one_by_one = [loaded.logits((2, i, tokens[i : i + 1])) for i in range(90)]
    assert torch.equal(torch.cat(one_by_one), whole)
    others = [(3 + i, 0, some_tokens(1 + i, i)) for i in range(63)]
    beside = loaded.logits(*others[:30], (1, 0, tokens), *others[30:])
    start = sum(len(each) for _, _, each in others[:30])
    assert torch.equal(beside[start : start + 90], whole)
    decoded = [(request, len(each), some_tokens(1, 99)) for request, _, each in others]
    last = loaded.logits(*decoded[:9], (1, 89, tokens[89:]), *decoded[9:])
    assert torch.equal(last[9], whole[89])


def requests_of(count, left=40):
    """Return rows for `decode`: last token, its position, request, seed, greedy, left, stops."""
    rows = [[7 + i, i, i, 2**40 * i + 5, i % 5 == 4, left - i % 7, 3] for i in range(count)]
    return [row + [-1] * (STOPS - 1) for row in rows]


def test_bits_do_not_depend_on_the_window(loaded):
    """Windows of 1, 4 and 16 steps must agree in any batch; a decode step is a row of a prefill."""
    count = 20
    for i in range(1, count):
        loaded.logits((i, 0, some_tokens(i, i)))
    tokens, logprobs = loaded.decode(requests_of(count), 1)
    for steps in (4, 16):
        assert loaded.decode(requests_of(count), steps) == (tokens, logprobs)
    assert loaded.decode(requests_of(count)[7:8], 16) == (tokens[7:8], logprobs[7:8])
    lengths = {len(each) for each in tokens}
    assert len(lengths) > 3 and all((each[-1] == 3) == (3 in each) for each in tokens)
    prompt = torch.tensor([*some_tokens(7, 7), 14, *tokens[7]])
    read = loaded.logits((69, 0, prompt))[7:-1].log_softmax(-1)
    expected = read.gather(1, prompt[8:, None]).flatten().tolist()
    assert logprobs[7] == pytest.approx(expected, rel=0, abs=apart(SIZES["vocab_size"]))


def test_a_window_ends_with_its_time_and_its_requests(llama):
    rows = torch.tensor(requests_of(3, left=40))
    tokens, _, counts = llama.decoder.decode(rows, torch.ones(3), 16, 0)
    assert counts.tolist() == [1, 1, 1]
    rows[:, 5] = torch.tensor([2, 5, 1])
    rows[:, 6:] = -1
    tokens, _, counts = llama.decoder.decode(rows, torch.ones(3), 16, LIMIT_MS)
    assert counts.tolist() == [2, 5, 1] and not tokens[0, 2:].any()


def test_other_weights_are_packed_anew(llama):
    """They must be packed when loaded, in two parts; what a part lacks stays as it was."""
    other = Loaded(MODELS["Llama, its rope, heads of 8"], seed=1)
    tokens = some_tokens(9)
    before = llama.logits((0, 0, tokens))
    new = list(other.weights.items())
    llama.decoder._runner.model.load_weights([])
    assert torch.equal(before, llama.logits((0, 0, tokens)))
    for part in (new[::2], new[1::2]):
        llama.decoder._runner.model.load_weights(part)
    after = llama.hidden(tokens, torch.arange(9), torch.zeros(9).long())
    expected = other.hidden(tokens, torch.arange(9), torch.zeros(9).long())
    assert torch.equal(after, expected) and not torch.equal(before, llama.logits((0, 0, tokens)))


def rules_for(temperatures, is_greedy, seeds):
    """Return the rules as in SGLang's SamplingBatchInfo; no row has top-p or the like."""
    rules = SimpleNamespace(temperatures=temperatures[:, None], sampling_seed=seeds)
    rules.vocab_size = 10**6
    rules.top_ks = torch.where(is_greedy, 1, 2**30)
    rules.top_ps = torch.ones(len(seeds))
    rules.min_ps = torch.zeros(len(seeds))
    return rules


def sampled_by_torch(logits, rules, positions):
    """Sample by the formula: the largest logit / temperature + Gumbel noise, where a hash gives the noise."""
    x = (logits / rules.temperatures).double()
    hashed = murmur_hash32(rules.sampling_seed, positions, torch.arange(logits.shape[1]))
    noise = -(hashed.double() / (2**32 - 1)).log().clamp(max=-(2.0**-32)).neg().log()
    tokens = torch.where(rules.top_ks == 1, x.argmax(-1), (x + noise).argmax(-1))
    return tokens, x.log_softmax(-1).gather(1, tokens[:, None]).flatten()


@pytest.mark.parametrize("target", [NATIVE, *LOWER])
@pytest.mark.parametrize("vocab", [7, 64, 77, 49152])
def test_tokens_are_those_of_the_formula(target, vocab):
    """They must agree with few or all tokens likely and some impossible; log-probabilities are in float64."""
    rows = 400 if vocab < 100 else 48
    generator = torch.Generator().manual_seed(vocab)
    spread = torch.tensor([0.0, 1.0, 4.0, 30.0]).repeat(rows // 4)[:, None]
    logits = torch.randn(rows, vocab, generator=generator) * spread
    logits[::3, ::5] = -torch.inf
    temperatures = torch.tensor([1.0, 0.7, 1.3, 0.2, 1.0]).repeat(rows)[:rows].clone()
    seeds = torch.randint(2**63 - 1, (rows,), generator=generator)
    rules = rules_for(temperatures, torch.arange(rows) % 5 == 4, seeds)
    positions = torch.arange(rows) * 37
    output = SimpleNamespace(next_token_logits=logits)
    decoder = Loaded(MODELS[ONE_MODEL], target=target).decoder
    tokens = decoder.sample(output, rules, True, None, None, positions)
    expected, their_logprobs = sampled_by_torch(logits, rules, positions)
    assert torch.equal(tokens, expected)
    found = output.next_token_logprobs.double()
    torch.testing.assert_close(found, their_logprobs, rtol=0, atol=1e-5)
    assert len(tokens.unique()) > min(rows, vocab) / 3


def test_numbers_that_are_none_give_a_token(llama):
    rules = rules_for(torch.ones(1), torch.tensor([False]), torch.ones(1).long())
    output = SimpleNamespace(next_token_logits=torch.full((1, 40), torch.nan))
    token = llama.decoder.sample(output, rules, True, None, None, torch.ones(1))
    assert 0 <= token.item() < 40 and output.next_token_logprobs.isnan()


def test_check_names_its_speed(capsys):
    dry_run.check(parse_config(["--device", "cpu"]))
    said = (
        r"rollout runs   extras/fast_cpu/decoder.cpp, \d+ GFLOP/s on a core.*; torch reaches \d+\n"
    )
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize("target", NARROW)
def test_no_vector_is_wider_than_a_register(target, tmp_path, monkeypatch):
    """With vectors of 16 floats the same code was 12 and 45 times slower on an EPYC 9005."""
    ours, _ = product_rates(built_for(target), 24, 96, 576)
    wide = re.sub(r"WIDTH = \d+", "WIDTH = 16", compiler.SOURCE.read_text())
    (tmp_path / "decoder.cpp").write_text(wide)
    monkeypatch.setattr(compiler, "SOURCE", tmp_path / "decoder.cpp")
    theirs, _ = product_rates(built_for(target), 24, 96, 576)
    assert ours > 5 * theirs


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanoyatt"


def fake_compiler(folder, text, monkeypatch):
    folder.mkdir()
    (folder / "g++").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_a_compiler_plain_torch_serves(empty_cache, tmp_path, monkeypatch, capfd):
    """It must also serve if a compiler fails (printing why), without a usable home, on other processors."""
    works = compiler.shutil.which("g++")
    fake_compiler(tmp_path / "bin", 'echo "note\nerror: no such thing" >&2; exit 1', monkeypatch)
    assert compiler.compiled() is None and not list(empty_cache.iterdir())
    assert capfd.readouterr().err == "g++: error: no such thing\n"
    (tmp_path / "bin" / "clang++").symlink_to(works)
    assert compiler.compiled().parent == empty_cache
    no_room = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    fakes = {"os.getuid": lambda: 9, "platform.machine": str, "os.mkdir": no_room}
    fakes |= {"pathlib.Path.write_bytes": no_room, "ctypes.CDLL": no_room}
    for name, fake in fakes.items():
        with monkeypatch.context() as other:
            other.setenv("XDG_CACHE_HOME", str(tmp_path / name))
            other.setattr(name, fake)
            assert compiler.compiled() is None
    empty_cache.chmod(0o720)
    assert compiler.compiled() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert compiler.compiled() is None


def test_its_name_is_of_all_that_the_code_depends_on(empty_cache, tmp_path, monkeypatch):
    """A shared home serves machines of several kinds, so each kind must have its own name."""
    text = f'[ "$1" = --version ] && cat "$0" || exec {compiler.shutil.which("g++")} -x c++ "$@"'
    (tmp_path / "small").write_text("int y;")
    monkeypatch.setattr(compiler, "SOURCE", tmp_path / "small")
    fake_compiler(tmp_path / "bin", text, monkeypatch)
    names = {compiler.compiled()}
    fake_compiler(tmp_path / "newer", f"{text}  # 13", monkeypatch)
    names.add(compiler.compiled())
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    names.add(compiler.compiled())
    for name, text in {"CPU_INFO": "flags\t\t: fpu avx2\n", "SOURCE": "int x;"}.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(compiler, name, tmp_path / name)
        names.add(compiler.compiled())
    assert len(names) == 5 and names == set(empty_cache.iterdir())


def test_which_models_it_is_for(tmp_path, monkeypatch):
    """What it lacks is named: what the model or what the machine lacks, not both."""

    def choice(dtype="float32", **changed):
        hf = dict(model_type="llama", hidden_size=64, num_attention_heads=4, intermediate_size=96)
        (tmp_path / "config.json").write_text(json.dumps(hf | changed))
        return compiler.library_for(tmp_path, dtype)

    assert choice() == compiler.compiled() is not None
    assert compiler.program_for(tmp_path, "float32") == "extras/fast_cpu/decoder.cpp"
    assert choice(model_type="qwen3", head_dim=24, rope_scaling={"type": "yarn"})
    refused = [{"model_type": "qwen3_vl"}, {"dtype": "bfloat16"}, {"head_dim": 12}]
    refused += [{"attention_bias": True}, {"use_sliding_window": True}, {"hidden_size": 68}]
    refused += [{"rope_scaling": {"type": "su"}}, {"rope_parameters": {"rope_type": "longrope"}}]
    refused += [{"partial_rotary_factor": 0.5}, {"dual_chunk_attention_config": {"chunk_size": 8}}]
    assert not any(choice(**changed) for changed in [*refused, {"num_key_value_heads": 3}])
    slow = "plain torch, several times slower: extras/fast_cpu/decoder.cpp needs "
    of_model, of_machine = (
        "one rank, and Qwen2, Qwen3 or Llama in float32",
        "g++ or clang++, and a private",
    )
    assert compiler.program_for(tmp_path, "float32") == slow + of_model
    monkeypatch.setattr(compiler, "compiled", lambda: None)
    assert choice() is None
    assert compiler.program_for(tmp_path, "float32").startswith(slow + of_machine)
