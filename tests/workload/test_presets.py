"""Each preset has the number of parameters that was published for it."""

import pytest

from minitrain.workload.model import Transformer
from minitrain.workload.presets import PRESETS, preset

# Model, published count, half a unit of its last printed digit (0 = printed in full).
# gpt2*: names of the released checkpoints (124M, 355M, 774M, 1558M,
#   github.com/openai/gpt-2).
# gpt3: Brown et al. 2020 (arXiv:2005.14165), table D.1.
# megatron-*: Narayanan et al. 2021 (arXiv:2104.04473), table 1; 22b and 175b:
#   Korthikanti et al. 2022 (arXiv:2205.05198), table 3.
# opt: Zhang et al. 2022 (arXiv:2205.01068), table 1.
# bloom: the model card (huggingface.co/bigscience/bloom).
# palm: Chowdhery et al. 2022 (arXiv:2204.02311), table 1. It prints 540.35, so it cuts
#   rather than rounds, or leaves out the norms: one whole unit is allowed.
# llama*: tensor sizes of the released checkpoints (huggingface.co/meta-llama).
PUBLISHED = {
    "gpt2": (124e6, 0.5e6),
    "gpt2-medium": (355e6, 0.5e6),
    "gpt2-large": (774e6, 0.5e6),
    "gpt2-xl": (1558e6, 0.5e6),
    "gpt3-175b": (174_600e6, 5e6),
    "megatron-1.7b": (1.7e9, 0.05e9),
    "megatron-3.6b": (3.6e9, 0.05e9),
    "megatron-7.5b": (7.5e9, 0.05e9),
    "megatron-18b": (18.4e9, 0.05e9),
    "megatron-22b": (22e9, 0.5e9),
    "megatron-39b": (39.1e9, 0.05e9),
    "megatron-76b": (76.1e9, 0.05e9),
    "megatron-145b": (145.6e9, 0.05e9),
    "megatron-175b": (175e9, 0.5e9),
    "megatron-310b": (310.1e9, 0.05e9),
    "megatron-530b": (529.6e9, 0.05e9),
    "megatron-1t": (1008.0e9, 0.05e9),
    "opt-175b": (175e9, 0.5e9),
    "bloom-176b": (176_247_271_424, 0),
    "palm-540b": (540.35e9, 0.01e9),
    "llama2-7b": (6_738_415_616, 0),
    "llama2-13b": (13_015_864_320, 0),
    "llama2-70b": (68_976_648_192, 0),
    "llama3-8b": (8_030_261_248, 0),
    "llama3-70b": (70_553_706_496, 0),
    "llama3-405b": (405_853_388_800, 0),
}
LAPTOP = {"tiny", "laptop", "laptop-gpt2", "laptop-large"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_count(name: str) -> None:
    model = Transformer(preset(name), device="meta")
    count = sum(p.numel() for p in model.parameters())
    published, half_unit = PUBLISHED[name]
    assert abs(count - published) <= half_unit
    assert all(p.is_meta for p in model.parameters())


def test_every_published_model_has_its_figure() -> None:
    assert set(PRESETS) == set(PUBLISHED) | LAPTOP


def test_unknown_name_is_refused_with_near_ones() -> None:
    with pytest.raises(ValueError, match=r"'llama3-7b'.*llama3-8b"):
        preset("llama3-7b")
    with pytest.raises(ValueError, match="tiny"):
        preset("????")
