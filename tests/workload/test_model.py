"""The model against torch's own layers and a second, naive statement of Llama."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from minitrain.testing import (
    assert_close,
    assert_same_gradients,
    weights,
)
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Attention, Transformer, initial_value
from minitrain.workload.presets import preset

LLAMA = ModelConfig(
    vocab_size=61, layers=2, hidden=24, heads=6, kv_heads=2, ffn=40, max_seq=32
)
GPT = ModelConfig(
    vocab_size=61,
    layers=2,
    hidden=24,
    heads=6,
    max_seq=32,
    norm="layer",
    positions="learned",
    activation="gelu",
    tie_embeddings=True,
    bias=True,
)
PALM = dataclasses.replace(
    LLAMA, norm="layer", kv_heads=1, head_dim=8, parallel_block=True
)


def build(config: ModelConfig, seed: int = 0) -> Transformer:
    """A float64 model with large random weights, so that every term matters."""
    model = Transformer(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.add_(0.3 * noise)
    return model


def data(config: ModelConfig, batch: int = 3, seq: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (batch, seq), generator=generator)
    return tokens, torch.arange(seq).expand(batch, seq)


def naive_llama(model: Transformer, tokens: Tensor, positions: Tensor) -> Tensor:
    """Llama head by head: rotation as complex numbers, softmax written out."""
    config, parameters = model.config, dict(model.named_parameters())

    def rms(x: Tensor, name: str) -> Tensor:
        square = (x * x).mean(-1, keepdim=True)
        return x / (square + config.norm_eps).sqrt() * parameters[name]

    def turn(x: Tensor) -> Tensor:  # [batch, seq, head_dim]
        half = config.head_dim // 2
        i = torch.arange(half, dtype=torch.float64)
        angle = positions[..., None] * config.rope_theta ** (-2 * i / config.head_dim)
        z = torch.complex(x[..., :half], x[..., half:])
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    x = parameters["embed.tokens.weight"][tokens]
    later = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for i in range(config.layers):
        p = {
            k.removeprefix(f"blocks.{i}."): v
            for k, v in parameters.items()
            if k.startswith(f"blocks.{i}.")
        }
        h, out = rms(x, f"blocks.{i}.attention_norm.weight"), []
        for head in range(config.heads):
            d, kv = config.head_dim, head // (config.heads // config.kv_heads)
            q = turn(h @ p["attention.q.weight"][head * d : (head + 1) * d].T)
            k = turn(h @ p["attention.k.weight"][kv * d : (kv + 1) * d].T)
            v = h @ p["attention.v.weight"][kv * d : (kv + 1) * d].T
            score = q @ k.transpose(1, 2) / math.sqrt(d)
            score = score.masked_fill(later, -math.inf)
            out.append(score.exp() / score.exp().sum(-1, keepdim=True) @ v)
        x = x + torch.cat(out, -1) @ p["attention.o.weight"].T
        h = rms(x, f"blocks.{i}.mlp_norm.weight")
        gate = h @ p["mlp.gate.weight"].T
        gated = gate * gate.sigmoid() * (h @ p["mlp.up.weight"].T)
        x = x + gated @ p["mlp.down.weight"].T
    return rms(x, "norm.weight") @ parameters["head.weight"].T


def test_llama_equals_the_naive_one_and_so_do_its_gradients() -> None:
    model, oracle = build(LLAMA), build(LLAMA)
    tokens, positions = data(LLAMA)
    logits, expected = model(tokens, positions), naive_llama(oracle, tokens, positions)
    assert_close(logits, expected)
    logits.square().mean().backward()
    expected.square().mean().backward()
    assert_same_gradients(model, oracle)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_gpt_equals_torchs_encoder_layer(activation: str) -> None:
    config = dataclasses.replace(GPT, activation=activation)
    model = build(config)
    tokens, positions = data(config)
    assert model.embed is not None
    assert model.norm is not None
    x = F.embedding(tokens, model.embed.tokens.weight)
    x = x + model.embed.positions.weight[: tokens.shape[1]]
    for block in model.blocks:
        gelu = lambda h: F.gelu(h, approximate="tanh")  # noqa: E731
        layer = nn.TransformerEncoderLayer(
            config.hidden,
            config.heads,
            config.ffn,
            dropout=0.0,
            activation=gelu if activation == "gelu" else "relu",
            norm_first=True,
            batch_first=True,
            dtype=torch.float64,
        )
        ours = dict(block.named_parameters())
        for kind in ("weight", "bias"):
            qkv = [ours[f"attention.{n}.{kind}"] for n in "qkv"]
            target = getattr(layer.self_attn, f"in_proj_{kind}")
            target.data = torch.cat(qkv).detach()
            getattr(layer.self_attn.out_proj, kind).data = ours[f"attention.o.{kind}"]
            getattr(layer.norm1, kind).data = ours[f"attention_norm.{kind}"]
            getattr(layer.norm2, kind).data = ours[f"mlp_norm.{kind}"]
            getattr(layer.linear1, kind).data = ours[f"mlp.up.{kind}"]
            getattr(layer.linear2, kind).data = ours[f"mlp.down.{kind}"]
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], dtype=torch.float64
        )
        x = layer(x, src_mask=mask, is_causal=True)
    expected = F.linear(model.norm(x), model.embed.tokens.weight)
    assert_close(model(tokens, positions), expected)


def test_parallel_block_reads_one_norm() -> None:
    model = build(PALM)
    block = model.blocks[0]
    x = torch.randn(2, 5, PALM.hidden, dtype=torch.float64)
    rotation = model.rope(data(PALM, 2, 5)[1], x.dtype)
    normed = block.attention_norm(x)
    expected = x + block.attention(normed, rotation) + block.mlp(normed)
    assert_close(block(x, rotation), expected)


@pytest.mark.parametrize("config", [LLAMA, GPT, PALM], ids=["llama", "gpt", "palm"])
def test_a_token_does_not_see_later_ones(config: ModelConfig) -> None:
    model = build(config)
    tokens, positions = data(config)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % config.vocab_size
    before, after = model(tokens, positions), model(changed, positions)
    assert_close(after[:, :6], before[:, :6], tol=0.0)
    assert (after[:, 6:] - before[:, 6:]).abs().amax(-1).min() > 1e-3


def test_rotary_positions_are_relative_and_learned_ones_are_not() -> None:
    tokens, positions = data(LLAMA)
    model = build(LLAMA)
    assert_close(model(tokens, positions + 7), model(tokens, positions))
    stretched = model(tokens, 2 * positions) - model(tokens, positions)
    assert stretched.abs().max() > 1e-2
    model = build(GPT)
    assert (model(tokens, positions + 7) - model(tokens, positions)).abs().max() > 1e-2


def test_head_counts_and_widths_come_from_the_weights() -> None:
    """Two halves of the heads, and of the MLP, add up to the whole (Megatron's cut)."""
    whole = build(LLAMA)
    x = torch.randn(2, 5, LLAMA.hidden, dtype=torch.float64)
    rotation = whole.rope(data(LLAMA, 2, 5)[1], x.dtype)
    attended, transformed = torch.zeros_like(x), torch.zeros_like(x)
    for half in range(2):
        model = build(LLAMA)
        attention, mlp = model.blocks[0].attention, model.blocks[0].mlp
        for layer in (attention.q, attention.k, attention.v, mlp.gate, mlp.up):
            layer.weight = nn.Parameter(layer.weight.chunk(2, 0)[half])
        for layer in (attention.o, mlp.down):
            layer.weight = nn.Parameter(layer.weight.chunk(2, 1)[half])
        attended += attention(x, rotation)
        transformed += mlp(x)
    assert_close(attended, whole.blocks[0].attention(x, rotation))
    assert_close(transformed, whole.blocks[0].mlp(x))


def test_the_attention_core_is_replaceable() -> None:
    model, seen = build(LLAMA), []

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q.shape, k.shape, v.shape))
        k, v = (t.repeat_interleave(3, dim=1) for t in (k, v))
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    tokens, positions = data(LLAMA)
    expected = model(tokens, positions)
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        block.attention.core = core
    assert_close(model(tokens, positions), expected)
    assert seen == [((3, 6, 11, 4), (3, 2, 11, 4), (3, 2, 11, 4))] * 2


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_stages_compose_to_the_model_under_the_same_names(config: ModelConfig) -> None:
    whole, first, last = (Transformer(config, dtype=torch.float64) for _ in range(3))
    first.norm = first.head = None
    last.embed = None
    first.blocks[1] = last.blocks[0] = None  # type: ignore[assignment]
    tokens, positions = data(config)
    hidden = first(tokens, positions)
    assert_close(last(hidden, positions), whole(tokens, positions), tol=0.0)
    names = {n for n, _ in whole.named_parameters(remove_duplicate=False)}
    assert {n for m in (first, last) for n, _ in m.named_parameters()} == names
    assert not dict(first.named_parameters()).keys() & dict(last.named_parameters())


def test_initial_weights_depend_on_the_seed_and_the_name_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model = Transformer(LLAMA)
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
    torch.manual_seed(2)
    again = Transformer(LLAMA, device="meta")
    again.to_empty(device="cpu")
    again.blocks[0] = None  # type: ignore[assignment]
    again.init_weights()
    for name, value in weights(again).items():
        assert torch.equal(value, weights(model)[name]), name
        assert torch.equal(value, initial_value(name, value, LLAMA.layers)), name
    other = weights(Transformer(LLAMA, seed=1))
    same = [n for n, v in weights(model).items() if torch.equal(v, other[n])]
    assert all("norm" in n for n in same)
    assert len(same) == 5
    assert len({v.flatten()[0].item() for n, v in other.items() if n not in same}) == 16


def test_initial_deviation_is_gpt2s() -> None:
    config = dataclasses.replace(LLAMA, hidden=192, heads=6, head_dim=32, ffn=512)
    for name, value in weights(Transformer(config)).items():
        if "norm" not in name:
            ends = name.endswith(("attention.o.weight", "mlp.down.weight"))
            expected = 0.02 / math.sqrt(2 * config.layers) if ends else 0.02
            assert value.std() == pytest.approx(expected, rel=0.05), name


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    config = preset("tiny")
    model = Transformer(config)
    tokens, positions = data(config, 4, 64)
    loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.05)


def test_tied_weights_stay_one_tensor() -> None:
    model = Transformer(GPT, device="meta")
    model.to_empty(device="cpu").init_weights()
    model.double().requires_grad_()
    assert model.head.weight is model.embed.tokens.weight
    assert sum(p is model.head.weight for p in model.parameters()) == 1
    tokens, positions = data(GPT)
    model(tokens, positions).square().sum().backward()
    both = model.embed.tokens.weight.grad
    # The head alone also has a gradient for tokens that never occur.
    unseen = [t for t in range(GPT.vocab_size) if t not in tokens]
    assert unseen
    assert both[unseen].abs().sum(1).min() > 0


def test_meta_and_fake_models_allocate_nothing() -> None:
    big = Transformer(preset("llama2-7b"), device="meta", dtype=torch.bfloat16)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    out = big(tokens, torch.arange(8, device="meta")[None])
    assert out.shape == (1, 8, 32000)
    assert out.dtype == torch.bfloat16
    with FakeTensorMode():
        fake = Transformer(preset("llama2-7b"), device="cpu")
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        fake(tokens, torch.arange(8)[None]).sum().backward()
        assert fake.head.weight.grad.shape == (32000, 4096)


def test_low_precision_rounds_like_low_precision() -> None:
    tokens, positions = data(LLAMA)
    exact = Transformer(LLAMA).double()(tokens, positions)
    model = Transformer(LLAMA)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(tokens, positions)
    mixed.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    low = Transformer(LLAMA, dtype=torch.bfloat16)(tokens, positions)
    for logits in (mixed, low):
        assert logits.dtype == torch.bfloat16
        assert_close(logits.double(), exact, tol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5, "head_dim": 0}, "hidden 24 is not divisible by heads 5"),
        ({"kv_heads": 4}, "heads 6 is not divisible by kv_heads 4"),
        ({"head_dim": 3}, "head_dim 3 must be even"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"heads": 0, "head_dim": 0}, "heads must be at least 1"),
        ({"vocab_size": -5}, "vocab_size must be at least 1"),
        ({"norm": "batch"}, "norm must be one of rms, layer, not 'batch'"),
        ({"activation": "tanh"}, "activation must be one of"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **change)


def test_usual_sizes_are_filled_in() -> None:
    config = ModelConfig(vocab_size=9, layers=1, hidden=256, heads=8)
    assert (config.kv_heads, config.head_dim, config.ffn) == (8, 32, 704)
    config = ModelConfig(vocab_size=9, layers=1, hidden=256, heads=8, activation="gelu")
    assert config.ffn == 1024
