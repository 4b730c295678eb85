"""Rows of published runs: each form of each field, and what no rule completes."""

import re
from contextlib import suppress
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.simulate.names import (
    COLUMNS,
    FRAMEWORKS,
    device_name,
    network_bytes_per_second,
)
from minitrain.simulate.plan import Experts
from minitrain.simulate.published import RefusedError, Run, read_run
from minitrain.simulate.runs import TABLES, published_runs
from minitrain.simulate.software import SOFTWARE
from minitrain.simulate.validation import validate

ROW = dict.fromkeys(COLUMNS, "") | {
    "source_id": "paper",
    "source": "arXiv 2205.05198",
    "framework": "Megatron-LM",
    "model": "GPT-175B",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "kv_heads": "96",
    "ffn_hidden": "49152",
    "vocab": "51200",
    "seq_len": "2048",
    "precision": "fp16",
    "gpu": "A100-SXM4-80G",
    "n_gpus": "128",
    "gpus_per_node": "8",
    "interconnect": "NVLink3; 8x HDR 200 Gb/s",
    "tp": "8",
    "pp": "8",
    "dp": "2",
    "cp": "1",
    "ep": "1",
    "sequence_parallel": "y",
    "interleave_v": "1",
    "schedule": "1f1b",
    "zero_stage": "0",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "selective",
    "measured_quantity": "step_time_s",
    "value": "13.75",
    "quality": "A",
}


def read(**changed) -> Run:
    return read_run(ROW | changed)


def refusal(**changed) -> str:
    with pytest.raises(RefusedError) as refused:
        read(**changed)
    return str(refused.value)


def test_a_full_row_is_read_as_it_stands():
    run = read()
    assert (run.source, run.software, run.quantity) == (
        "paper",
        "megatron-lm",
        "step_seconds",
    )
    assert run.value == 13.75
    assert run.assumed == []
    assert (run.model.layers, run.model.hidden, run.model.heads) == (96, 12288, 96)
    assert (run.model.ffn, run.model.vocab_size, run.model.max_seq) == (
        49152,
        51200,
        2048,
    )
    assert run.model.tie_embeddings and run.model.bias
    assert run.model.activation == "gelu" and run.model.positions == "learned"
    plan = run.plan
    assert (plan.tp, plan.pp, plan.dp, plan.cp, plan.ep) == (8, 8, 2, 1, 1)
    assert (plan.seq, plan.micro_batch, plan.global_batch) == (2048, 1, 64)
    assert plan.sequence_parallel and plan.recompute == "selective"
    assert (plan.schedule, plan.interleave, plan.zero) == ("1f1b", 1, 0)
    assert (run.cluster.hosts, run.cluster.per_host) == (16, 8)
    assert run.cluster.across.bytes_per_second == 25e9
    assert run.experts is None and run.choices == []


# ---- networks ----


@pytest.mark.parametrize(
    ("words", "per_host", "gigabytes"),
    [
        ("NVLink3; 8x HDR 200 Gb/s (Selene)", 8, 25),
        ("NVSwitch 600 GB/s; 8x HDR 200 Gb/s IB per node (Selene)", 8, 25),
        ("A100 80G; 8x 200 Gb/s (three-tier Clos), values per paper", 8, 25),
        ("NVLink3 intra; 4x HDR IB=800 Gb/s per node inter", 8, 12.5),
        ("NVLink3 intra; 4x Omni-Path 100 Gb/s per node", 8, 6.25),
        ("NVLink3; 4x100 Gb/s RoCE per node", 8, 6.25),
        ("NVLink4; DGX H100-class 8x400 Gb/s (not stated)", 8, 50),
        ("NVLink4; DGX H100 (8x400 Gb/s NDR)", 8, 50),
        ("NVLink4; 8x NDR 400 Gb/s (Eos-class, not printed)", 8, 50),
        ("NVLink 400 GB/s (bidir); 8x 400 Gb/s IB", 8, 50),
        ("NVLink4; 8x50 GB/s IB", 8, 50),
        ("NVLink4; 400 Gb/s CX-7 per GPU", 8, 50),
        ("NVLink; RoCE 400 Gb/s per GPU", 8, 50),
        (
            "NVLink4; 400 Gb/s RDMA per GPU; H100 96GB HBM2e 2.4TB/s capped at 500 W",
            8,
            50,
        ),
        ("4x 400 Gb/s", 4, 50),
        ("NVLink intra; RoCE RDMA inter", 8, None),
        ("NVL72 NVLink5", 4, None),
        ("NVLink5 8-GPU; inter-node not stated", 8, None),
        ("2 pods ICI + DCN", 4, None),
        ("", 8, None),
    ],
)
def test_a_network_is_read_in_bytes_per_device(words, per_host, gigabytes):
    found = network_bytes_per_second(words, per_host)
    assert found == (None if gigabytes is None else pytest.approx(gigabytes * 1e9))


def test_an_unnamed_network_is_the_usual_one_and_said_to_be():
    run = read(interconnect="RoCE")
    assert run.cluster.across.bytes_per_second == 25e9
    assert run.assumed == ["network: 2.5e+10 B/s"]


def test_omni_path_has_shares_of_its_own():
    assert read(interconnect="4x Omni-Path 100 Gb/s").fabric == "omni-path"
    assert read().fabric == ""


# ---- devices ----


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("A100-SXM4-80G", "A100"),
        ("A100-SXM4", "A100"),
        ("A800 80GB", "A800"),
        ("H100-SXM-80G", "H100"),
        ("H800-SXM-80G", "H800"),
        ("H200", "H200"),
        ("GH200", "H200"),
        ("B200", "B200"),
        ("B300", "B300"),
        ("GB200", "GB200"),
        ("GB300", "GB300"),
        ("MI250X", "MI250X"),
        ("MI300X", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("TPU v5p", "TPU v5p"),
        ("Gaudi2", "Gaudi2"),
        ("Intel Gaudi 2", "Gaudi2"),
    ],
)
def test_a_device_is_known_by_its_words(words, name):
    run = read(gpu=words, precision="bf16", gpus_per_node="")
    plain = re.sub(r"[^a-z0-9]", "", run.cluster.accelerator.name.lower())
    assert plain == re.sub(r"[^a-z0-9]", "", name.lower())


def test_a_device_is_not_known_by_a_part_of_a_word():
    assert device_name("H1000") == "H1000"
    assert "H1000" in refusal(gpu="H1000")
    assert "'Abacus'" in refusal(gpu="Abacus")


def test_power_and_memory_that_differ_are_read():
    run = read(
        gpu="H100-SXM-96G-HBM2e-500W",
        precision="bf16",
        interconnect="NVLink4; 400 Gb/s RDMA per GPU; H100 96GB HBM2e 2.4TB/s",
    )
    device = run.cluster.accelerator
    assert device.memory_bytes_per_second == 2.4e12 and device.memory_bytes == 96e9
    assert run.cluster.power_derate == pytest.approx((500 / 700) ** 0.5)
    full = read(gpu="H100-SXM-80G 700 W", precision="bf16")
    assert full.cluster.power_derate == 1


def test_hosts_are_of_the_usual_size_unless_said():
    run = read(gpus_per_node="")
    assert run.cluster.per_host == 8
    assert "gpus_per_node=8: usual" in run.assumed
    small = read(n_gpus="4", tp="4", pp="1", dp="1")
    assert (small.cluster.hosts, small.cluster.per_host) == (1, 4)


# ---- the plan ----


@pytest.mark.parametrize(
    ("words", "stage", "shards"),
    [
        ("0", 0, 0),
        ("1", 1, 0),
        ("2", 2, 0),
        ("3", 3, 0),
        ("1 (8-GPU groups)", 1, 8),
        ("2 (FSDP, no reshard between fwd/bwd)", 2, 0),
        ("3 (FSDP within pod)", 3, 0),
    ],
)
def test_zero_is_a_stage_and_maybe_a_group(words, stage, shards):
    plan = read(zero_stage=words, n_gpus="64", dp="8", pp="1").plan
    assert (plan.zero, plan.shard_ranks) == (stage, shards)


def test_a_pipeline_keeps_gradients_whole():
    """ZeRO-2 would scatter them for every micro-batch, and nobody who reports does."""
    run = read(zero_stage="2", n_gpus="512", dp="8")
    assert run.plan.zero == 1
    assert "zero_stage=1: in a pipeline gradients stay whole" in run.assumed


@pytest.mark.parametrize(
    ("field", "word"),
    [("recompute", "zzz"), ("precision", "int8"), ("zero_stage", "1.5")],
)
def test_an_unknown_word_is_no_guess(field, word):
    assert word in refusal(**{field: word})


@pytest.mark.parametrize("quantity", ["MFU %", "mfu"])
def test_a_share_is_no_percentage(quantity):
    said = refusal(measured_quantity=quantity, value="0.41")
    assert "in per cent" in said


@pytest.mark.parametrize("name", ["step_seconds", "tokens_per_second"])
def test_the_library_s_own_names_are_read(name):
    assert read(measured_quantity=name).quantity == name


@pytest.mark.parametrize(
    ("framework", "stage"),
    [
        ("Megatron-LM", 0),
        ("Megatron-DeepSpeed", 0),
        ("Megatron-Core", 1),
        ("Megatron-Core 0.8", 1),
        ("InternEvo", 1),
        ("torchtitan FSDP2", 3),
        ("DeepSpeed", 3),
    ],
)
def test_zero_that_is_not_said_is_the_framework_s_default(framework, stage):
    run = read(zero_stage="", framework=framework)
    assert run.plan.zero == stage
    assert f"zero_stage={stage}: the framework's default" in run.assumed


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("bf16", "bf16"),
        ("BF16", "bf16"),
        ("fp16", "fp16"),
        ("fp16/bf16 (Megatron)", "bf16"),
        ("fp8", "fp8"),
        ("FP8-CS", "fp8"),
        ("MXFP8", "fp8"),
        ("FP8-MX (Hopper: 128x128/1x128 sub-channel)", "fp8"),
        ("NVFP4", "fp4"),
        ("fp32", "fp32"),
        ("tf32", "fp32"),
    ],
)
def test_a_precision_is_read(words, precision):
    assert read(precision=words).plan.precision == precision


@pytest.mark.parametrize(
    ("words", "chunks", "name", "expected"),
    [
        ("1f1b", "1", "1f1b", 1),
        ("none", "1", "1f1b", 1),
        ("1f1b-interleaved", "3", "interleaved", 3),
        ("1f1b", "4", "interleaved", 4),
        ("gpipe", "1", "gpipe", 1),
        ("zb-1p", "1", "zb-h1", 1),
        ("zb-2p", "1", "zb-h2", 1),
        ("zb-v", "1", "zb-v", 1),
        ("DualPipe", "", "zb-v", 1),
        ("1f1b + vocabulary-parallel passes (2 barriers)", "1", "vocab-1", 1),
        ("1f1b + vocabulary-parallel passes (1 barrier)", "1", "vocab-2", 1),
        ("interlaced (nnScaler-style)", "1", "interlaced", 1),
        ("1f1b (uniform layers; in/out vocab on first/last stage)", "1", "1f1b", 1),
    ],
)
def test_a_schedule_is_read(words, chunks, name, expected):
    plan = read(schedule=words, interleave_v=chunks).plan
    assert (plan.schedule, plan.interleave) == (name, expected)


def test_chunks_that_are_not_said_are_the_fastest_of_those_that_divide():
    run = read(schedule="1f1b-interleaved", interleave_v="")
    assert [plan.interleave for plan in run.choices] == [2, 3, 4, 6, 12]
    assert "micro_batch or interleave_v: the fastest that fits" in run.assumed


def test_interleaving_needs_whole_rounds_of_micro_batches():
    said = refusal(schedule="interleaved", interleave_v="3", global_batch="24")
    assert said == "12 micro-batches, pp=8"


def test_redistributed_stages_have_fewer_blocks_at_the_head():
    run = read(
        schedule="1f1b with transformer layers redistributed to balance vocab",
        layers="32",
        hidden="3072",
        heads="24",
        kv_heads="24",
        ffn_hidden="12288",
        vocab="256000",
        n_gpus="8",
        tp="1",
        dp="1",
        framework="Megatron-LM fork",
    )
    assert run.plan.stage_layers == (4, 4, 4, 5, 5, 5, 5, 0)


def test_zero_bubble_runs_have_one_block_less_at_both_ends():
    run = read(
        framework="Megatron-LM + ZB", layers="30", schedule="zb-1p", micro_batch="1"
    )
    assert run.plan.stage_layers == (3, 4, 4, 4, 4, 4, 4, 3)
    assert "first and last stage have one block less" in run.assumed


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("none", "none"),
        ("selective", "selective"),
        ("full", "full"),
        ("Full (uniform, 1)", "full"),
        ("selective (RMSNorm, MLA up-proj, SwiGLU)", "selective"),
        ("mlp", "selective"),
    ],
)
def test_recomputation_is_read(words, kind):
    assert read(recompute=words).plan.recompute == kind


def test_recomputation_that_is_not_said_is_none():
    run = read(recompute="")
    assert run.plan.recompute == "none"
    assert "recompute=none: nothing is said" in run.assumed


def test_degrees_left_out_follow_from_the_others():
    run = read(dp="", cp="", ep="")
    assert (run.plan.dp, run.plan.cp, run.plan.ep) == (2, 1, 1)
    assert "dp=2: what the other degrees leave" in run.assumed


def test_a_micro_batch_that_is_not_said():
    deep = read(micro_batch="")
    assert deep.plan.micro_batch == 1
    assert "micro_batch=1: as pipelines of many stages are run" in deep.assumed
    flat = read(micro_batch="", pp="1", dp="16")
    assert [plan.micro_batch for plan in flat.choices] == [1, 2, 4]
    assert "micro_batch or interleave_v: the fastest that fits" in flat.assumed


def test_sequence_parallelism_needs_tensor_ranks():
    assert read(sequence_parallel="").plan.sequence_parallel is False
    alone = read(tp="1", n_gpus="16").plan
    assert alone.sequence_parallel is False


# ---- the model ----


def test_sizes_that_are_not_said_are_completed_and_listed():
    run = read(heads="", kv_heads="", ffn_hidden="", vocab="")
    model = run.model
    assert (model.heads, model.kv_heads, model.ffn) == (96, 96, 49152)
    assert model.vocab_size == 50_257
    assert run.assumed == [
        "heads=96: 128 columns a head",
        "kv_heads=96: as many as heads",
        "ffn_hidden=49152: 4 * hidden",
        "vocab=50257: GPT-2's vocabulary",
    ]


def test_a_family_has_its_gate_its_positions_and_its_head():
    llama = read(
        model="Llama3-70B",
        layers="80",
        hidden="8192",
        heads="64",
        kv_heads="8",
        ffn_hidden="28672",
    ).model
    assert (llama.activation, llama.positions, llama.norm) == ("swiglu", "rope", "rms")
    assert not llama.bias and not llama.tie_embeddings and llama.head_dim == 128
    nemotron = read(model="Nemotron4-340B").model
    assert (nemotron.activation, nemotron.positions) == ("gelu", "rope")
    qwen = read(model="Qwen3-30B-A3B", hidden="2048", heads="32", kv_heads="4").model
    assert qwen.head_dim == 128
    palm = read(
        model="PaLM-540B",
        hidden="18432",
        heads="48",
        kv_heads="1",
        ffn_hidden="73728",
    ).model
    assert palm.head_dim == 256 and palm.parallel_block


def test_experts_are_read_with_what_the_family_shares():
    run = read(
        model="DeepSeek-V3",
        framework="HAI-LLM",
        layers="64",
        hidden="7168",
        heads="128",
        kv_heads="128",
        ffn_hidden="18432",
        experts="256",
        topk="8",
        moe_ffn="2048",
        tp="1",
        dp="16",
        ep="16",
        gpu="H800-SXM-80G",
        precision="fp8",
    )
    assert run.experts == Experts(
        count=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3, latent=0.4
    )
    assert read(experts="1").experts is None


def test_experts_of_no_width_take_the_mlp_s():
    run = read(experts="8", topk="2")
    assert run.experts.ffn == 49152
    assert "moe_ffn=49152: the MLP's width" in run.assumed


# ---- what was measured ----


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("step_time_s", "step_seconds"),
        ("tokens/s/GPU", "tokens_per_second_per_device"),
        ("tokens/s", "tokens_per_second"),
        ("samples/s", "samples_per_second"),
        ("TFLOP/s per GPU", "tflops"),
        ("TFLOP/s per GPU (model)", "tflops"),
        ("MFU %", "mfu_percent"),
        ("HFU %", "hfu_percent"),
        ("peak memory GB", "memory_gb"),
        ("layer_forward_time_ms", "layer_forward_ms"),
        ("layer_backward_time_ms", "layer_backward_ms"),
        ("activation memory GiB (SP+selective)", "activation_gib"),
        ("parameter+optimizer memory GiB", "state_gib"),
    ],
)
def test_a_quantity_is_read(words, name):
    assert read(measured_quantity=words).quantity == name


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, "hardware"),  # Megatron-LM's formula
        ({"framework": "Megatron-Core 0.8"}, "model"),
        ({"framework": "NeMo", "note": "counts recompute FLOPs"}, "hardware"),
        ({"framework": "Meta internal"}, "causal"),
        ({"framework": "MaxText", "measured_quantity": "MFU %"}, "model"),
        (
            {
                "framework": "T5X",
                "measured_quantity": "MFU %",
                "note": "HFU 57.8; parallel block",
            },
            "model",
        ),
    ],
)
def test_what_flops_are_counted(changed, count):
    run = read(**{"measured_quantity": "TFLOP/s per GPU"} | changed)
    assert run.flops_count == count


@pytest.mark.parametrize(
    ("framework", "source", "note", "name"),
    [
        ("Megatron-LM", "arXiv 2205.05198", "", "megatron-lm"),
        ("Megatron-LM", "Megatron-LM SC21 (arXiv 2104.04473)", "", "megatron-2021"),
        ("Megatron-LM + ZB", "arXiv 2401.10241", "", "megatron-zb"),
        ("Megatron-LM fork", "arXiv 2411.05288", "", "megatron-flash"),
        ("Megatron-DeepSpeed", "BigScience", "", "megatron-deepspeed"),
        ("Megatron-Core", "", "", "megatron-core"),
        ("Megatron-Core 0.8", "README", "", "megatron-core-2024"),
        ("NeMo/Megatron-Core", "summary 24.07", "", "megatron-core-2024"),
        ("NeMo/Megatron-Core", "DGX Cloud v25.05", "", "megatron-core"),
        ("Megatron-LM 23e00ed + TE 2.11", "SimuMax", "", "megatron-core"),
        ("Megatron-Core", "", "HybridEP; CUDA graphs", "megatron-core-graphs"),
        ("DeepSpeed", "", "", "deepspeed-zero3"),
        ("torchtitan FSDP2", "", "", "fsdp"),
        ("metaseq (FSDP + Megatron TP)", "", "", "fsdp-unfused"),
        ("InternEvo", "", "", "internevo"),
        ("MaxText (JAX)", "", "", "maxtext"),
        ("PaxML (JAX)", "", "", "maxtext"),
        ("Pathways/T5X", "", "", "maxtext"),
        ("HAI-LLM", "", "", "megatron-core"),
        ("Meta internal", "", "", "megatron-core"),
        ("llm-foundry / Composer", "", "", "composer"),
    ],
)
def test_a_framework_is_known_by_its_words(framework, source, note, name):
    run = read(framework=framework, source=source, note=note)
    assert run.software == name


def test_racks_of_bridge_capture_graphs():
    found = read(framework="Megatron-Bridge/MCore", gpu="GB200", gpus_per_node="4")
    assert found.software == "megatron-core-graphs"
    assert read(framework="Megatron-Bridge/MCore").software == "megatron-core"


def test_every_framework_of_the_list_has_rules():
    assert {name for _, name in FRAMEWORKS} <= set(SOFTWARE)


# ---- refusals ----


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quality": "D"}, "quality D: the source contradicts itself"),
        ({"model": "Llama2-70B LoRA"}, "adapters: only a few weights get gradients"),
        ({"framework": "MegaScale"}, "its block is parallel and its attention slides"),
        ({"model": "Nemotron_3_Nano"}, "layers that are not Transformers"),
        ({"model": "Nemotron-H-56B"}, "layers that are not Transformers"),
        ({"measured_quantity": "loss"}, "measured_quantity 'loss' is not a step's"),
        ({"measured_quantity": ""}, "measured_quantity '' is not a step's"),
        ({"framework": ""}, "framework is not given"),
        ({"framework": "abacus"}, "no rules for the framework 'abacus'"),
        ({"gpu": ""}, "gpu is not given"),
        ({"layers": ""}, "layers is not given"),
        ({"seq_len": ""}, "seq_len is not given"),
        ({"n_gpus": ""}, "n_gpus is not given"),
        ({"global_batch": ""}, "global_batch is not given"),
        ({"value": ""}, "value is not given"),
        ({"value": "fast"}, "value='fast' is not a number"),
        ({"value": "0"}, "value=0 cannot have been measured"),
        ({"value": "nan"}, "value='nan' is not a number"),
        ({"value": "1e18"}, "value=1e+18 cannot have been measured"),
        ({"layers": "9.5"}, "layers=9.5"),
        ({"layers": "100000"}, "layers=100000: no model has more than 10000"),
        ({"hidden": "0"}, "hidden=0"),
        ({"gpus_per_node": "0"}, "gpus_per_node=0"),
        ({"n_gpus": "0"}, "n_gpus=0"),
        ({"tp": "0"}, "tp=0"),
        ({"n_gpus": "130"}, "130 devices do not fill hosts of 8"),
        ({"dp": "3"}, "tp*pp*cp*dp = 8*8*1*3 = 192, and n_gpus=128"),
        ({"pp": "128"}, "pp=128 stages of 96 layers"),
        ({"global_batch": "63"}, "global_batch=63 is not a multiple"),
        ({"heads": "95"}, "heads"),
        ({"seq_len": "2047", "cp": "2", "dp": "1"}, "seq=2047 is not a multiple"),
        ({"interleave_v": "24"}, "interleave=24 chunks of 12 layers"),
        ({"zero_stage": "7"}, "zero_stage='7' is none of 0, 1, 2 and 3"),
        (
            {"zero_stage": "1 (3-GPU group)", "n_gpus": "512", "dp": "8"},
            "shard_ranks=3",
        ),
        ({"ep": "2"}, "ep=2, and the model has no experts"),
        ({"experts": "8"}, "topk is not given"),
        ({"experts": "8", "topk": "9"}, "experts=8, top_k=9"),
        ({"gpu": "A100 0 W"}, "power_derate=0"),
    ],
)
def test_a_row_is_refused_with_its_reason(changed, said):
    assert said in refusal(**changed)


GARBAGE = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "0", "-1", "1e400", "nan", "inf", "1e18", "3.5", "NaN", "١٢", "1_0", "0x8"]
    ),
    st.sampled_from(["zb-v", "interleaved", "gpipe", "8x 0 Gb/s", "fp4", "0 W", "D"]),
    st.integers(-10, 10**12).map(str),
    st.floats().map(str),
)


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(st.sampled_from(COLUMNS), GARBAGE, max_size=4))
def test_garbage_is_refused_and_breaks_nothing(changed):
    row = ROW | changed
    with suppress(RefusedError):
        assert read_run(row).value > 0
    (record,) = validate([row]).rows
    assert bool(record.get("refused")) != ("predicted" in record)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(COLUMNS), st.none() | st.just(""), max_size=40))
def test_fields_may_be_missing(changed):
    row = {name: value for name, value in (ROW | changed).items() if value is not None}
    try:
        run = read_run(row)
    except RefusedError:
        return
    gone = [n for n in ("heads", "ffn_hidden", "vocab", "dp") if not row.get(n)]
    for name in gone:
        assert any(line.startswith(f"{name}=") for line in run.assumed), name


# ---- the tables of the library ----


def test_published_rows_are_all_read_and_predicted():
    rows = published_runs()
    assert len(rows) == sum(len(published_runs(t.source_id)) for t in TABLES)
    assert all(set(row) == set(COLUMNS) for row in rows)
    for row in rows:
        read_run(row)
    assert validate(rows).refusals == {}


def test_published_rows_say_where_they_were_printed():
    for table in TABLES:
        assert table.citation and all(
            row["source_id"] == table.source_id and row["table_figure"]
            for row in published_runs(table.source_id)
        )


def test_degrees_of_published_rows_multiply():
    for row in published_runs():
        ranks = [int(row[name] or 1) for name in ("tp", "pp", "dp", "cp")]
        product = ranks[0] * ranks[1] * ranks[2] * ranks[3]
        assert product == int(row["n_gpus"]), row


def test_an_unknown_source_is_named():
    with pytest.raises(ValueError, match=r"no source .*nobody.*there is korth"):
        published_runs("nobody")


def test_a_run_s_fields_are_documented():
    for field in fields(Run):
        assert field.name in (Run.__doc__ or "")
