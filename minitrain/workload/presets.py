"""Published models by name, as configurations, and a few that a laptop can train.

Each one gives the published number of parameters; `tests/workload/test_presets.py`
holds the figures and where they were printed.
"""

from difflib import get_close_matches
from functools import partial
from types import MappingProxyType

from minitrain.workload.config import ModelConfig

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
_gpt = partial(
    ModelConfig,
    vocab_size=50257,
    max_seq=1024,
    norm="layer",
    positions="learned",
    activation="gelu",
    tie_embeddings=True,
    bias=True,
)

# Narayanan et al. 2021 (arXiv:2104.04473), section 5: vocabulary 51,200, sequence 2048.
_megatron = partial(_gpt, vocab_size=51200, max_seq=2048)

# Touvron et al. 2023 (arXiv:2307.09288); Llama team 2024 (arXiv:2407.21783), table 3.
_llama2 = partial(ModelConfig, vocab_size=32000, max_seq=4096)
_llama3 = partial(
    ModelConfig, vocab_size=128256, kv_heads=8, max_seq=8192, rope_theta=500_000.0
)

PRESETS = MappingProxyType(
    {
        # For tests and laptops.
        "tiny": ModelConfig(
            vocab_size=512, layers=2, hidden=64, heads=4, kv_heads=2, max_seq=128
        ),
        "laptop": ModelConfig(
            vocab_size=2048, layers=4, hidden=128, heads=4, kv_heads=2, max_seq=128
        ),
        "laptop-gpt2": _gpt(
            vocab_size=2048, layers=4, hidden=128, heads=4, max_seq=128
        ),
        "laptop-large": ModelConfig(
            vocab_size=8192, layers=8, hidden=512, heads=8, kv_heads=4, max_seq=512
        ),
        "gpt2": _gpt(layers=12, hidden=768, heads=12),
        "gpt2-medium": _gpt(layers=24, hidden=1024, heads=16),
        "gpt2-large": _gpt(layers=36, hidden=1280, heads=20),
        "gpt2-xl": _gpt(layers=48, hidden=1600, heads=25),
        # Brown et al. 2020 (arXiv:2005.14165), table 2.1. Its alternating sparse
        # attention layers have the same parameters and are dense here.
        "gpt3-175b": _gpt(layers=96, hidden=12288, heads=96, max_seq=2048),
        # Narayanan et al. 2021, table 1; 22b and 175b are of Korthikanti et al. 2022
        # (arXiv:2205.05198), table 3, whose 530b and 1t are the same as table 1's.
        "megatron-1.7b": _megatron(layers=24, hidden=2304, heads=24),
        "megatron-3.6b": _megatron(layers=30, hidden=3072, heads=32),
        "megatron-7.5b": _megatron(layers=36, hidden=4096, heads=32),
        "megatron-18b": _megatron(layers=40, hidden=6144, heads=48),
        "megatron-22b": _megatron(layers=48, hidden=6144, heads=64),
        "megatron-39b": _megatron(layers=48, hidden=8192, heads=64),
        "megatron-76b": _megatron(layers=60, hidden=10240, heads=80),
        "megatron-145b": _megatron(layers=80, hidden=12288, heads=96),
        "megatron-175b": _megatron(layers=96, hidden=12288, heads=96),
        "megatron-310b": _megatron(layers=96, hidden=16384, heads=128),
        "megatron-530b": _megatron(layers=105, hidden=20480, heads=128),
        "megatron-1t": _megatron(layers=128, hidden=25600, heads=160),
        # Zhang et al. 2022 (arXiv:2205.01068), table 1. Its position table has two
        # rows more than the sequence is long, which nothing reads.
        "opt-175b": _gpt(
            vocab_size=50272,
            layers=96,
            hidden=12288,
            heads=96,
            max_seq=2048,
            activation="relu",
        ),
        # BigScience 2022 (arXiv:2211.05100), section 3.2. ALiBi has no parameters and
        # is not modelled: as it stands here the model sees order only by causality.
        "bloom-176b": _gpt(
            vocab_size=250880,
            layers=70,
            hidden=14336,
            heads=112,
            max_seq=2048,
            positions="none",
            embed_norm=True,
        ),
        # Chowdhery et al. 2022 (arXiv:2204.02311), section 2 and table 1: SwiGLU of
        # four times the width, one key-value head, head size 256, parallel layers.
        "palm-540b": ModelConfig(
            vocab_size=256_000,
            layers=118,
            hidden=18432,
            heads=48,
            kv_heads=1,
            head_dim=256,
            ffn=73728,
            max_seq=2048,
            norm="layer",
            tie_embeddings=True,
            parallel_block=True,
        ),
        "llama2-7b": _llama2(layers=32, hidden=4096, heads=32, ffn=11008),
        "llama2-13b": _llama2(layers=40, hidden=5120, heads=40, ffn=13824),
        "llama2-70b": _llama2(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
        # The stretched frequencies of the 128k-token phase are not modelled.
        "llama3-8b": _llama3(layers=32, hidden=4096, heads=32, ffn=14336),
        "llama3-70b": _llama3(layers=80, hidden=8192, heads=64, ffn=28672),
        "llama3-405b": _llama3(layers=126, hidden=16384, heads=128, ffn=53248),
    }
)


def preset(name: str) -> ModelConfig:
    """The configuration called `name`.

    Raises:
        ValueError: there is none; the message has the names that look like it.
    """
    if name not in PRESETS:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5) or PRESETS
        raise ValueError(f"no model is called {name!r}; there is {', '.join(near)}")
    return PRESETS[name]
