"""The step in closed form: physics at all sizes, and faults that physics must see."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minitrain.simulate import estimate as predicting
from minitrain.simulate import footprint, layer, network, step
from minitrain.simulate.estimate import estimate, flops, machine_records, sweep
from minitrain.simulate.hardware import ACCELERATORS, Cluster, Link, cluster
from minitrain.simulate.plan import SCHEDULES, Experts, Plan
from minitrain.simulate.runs import published_runs
from minitrain.simulate.sizes import Sizes, sizes
from minitrain.simulate.software import SOFTWARE, software
from minitrain.simulate.validation import validate
from minitrain.workload import formulas
from minitrain.workload.config import ModelConfig
from minitrain.workload.presets import PRESETS, preset

MODELS = {
    name: preset(name) for name in ("megatron-22b", "llama3-8b", "llama3-70b")
} | {"mixtral": preset("llama3-8b")}
MIXTRAL = Experts(count=8, top_k=2, ffn=14336, shared_ffn=1024)
CLUSTERS = {name: cluster(name) for name in ("a100:8x8", "h100:8x8", "gb200:16x4")}
RANKS = 64
degrees = st.sampled_from([1, 2, 4, 8])


@st.composite
def plans(draw, layers=32, experts=False, precision="bf16"):
    """Plans of 64 ranks that `check` accepts."""
    tp, pp, cp = draw(degrees), draw(degrees), draw(st.sampled_from([1, 1, 2]))
    assume(tp * pp * cp <= RANKS)
    dp = RANKS // (tp * pp * cp)
    named = draw(st.sampled_from(SCHEDULES))
    chunks = draw(st.sampled_from([1, 2, 4])) if named == "interleaved" else 1
    each = draw(st.sampled_from([1, 2]))
    # Schedules of two chunks and interleaving fill a pipeline with p at least.
    count = draw(st.integers(1, 4)) * 2 * pp
    return Plan(
        seq=draw(st.sampled_from([1024, 4096, 8192])),
        global_batch=dp * each * count,
        micro_batch=each,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=draw(st.sampled_from([1, 8])) if experts and dp * cp * tp % 8 == 0 else 1,
        schedule=named,
        interleave=chunks if pp > 1 and layers // pp >= chunks else 1,
        sequence_parallel=draw(st.booleans()) and tp > 1,
        # ZeRO-3 gathers weights for each pass: no one splits these passes further.
        zero=draw(st.integers(0, 2 if named.startswith("zb") and pp > 1 else 3)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=precision,
    )


@st.composite
def questions(draw):
    """What `estimate` is asked: a model, a plan, a cluster, software, experts."""
    name = draw(st.sampled_from(sorted(MODELS)))
    experts = MIXTRAL if name == "mixtral" else None
    model = MODELS[name]
    asked = draw(plans(model.layers, bool(experts)))
    machines = CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    return model, asked, machines, draw(st.sampled_from(sorted(SOFTWARE))), experts


# ---- one source for a plan and for many ----


@settings(max_examples=25, deadline=None)
@given(
    st.lists(plans(), min_size=2, max_size=6),
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from(["megatron-core", "megatron-2021", "fsdp", "deepspeed-zero3"]),
    st.booleans(),
)
def test_many_plans_at_once_are_as_each_alone(many, where, by, mixture):
    model, machines = MODELS["llama3-8b"], CLUSTERS[where]
    experts = MIXTRAL if mixture else None
    found = sweep(model, many, machines, by, experts)
    for i, asked in enumerate(many):
        alone = estimate(model, asked, machines, by, experts)
        for name, one in (("parts", alone.parts), ("kinds", alone.memory)):
            column = found[name][:, i]
            assert column == pytest.approx(list(one.values()), rel=1e-12, abs=1e-9)
        assert found["step_seconds"][i] == pytest.approx(alone.step_seconds, rel=1e-12)
        assert found["memory_bytes"][i] == pytest.approx(alone.memory_bytes, rel=1e-12)


# ---- laws: none of them is about a constant that was fitted ----


def laws(made) -> list[str]:
    """What of a prediction contradicts its hardware, in words."""
    model, plan, machines = made.model, made.plan, made.cluster
    ranks, soft = plan.world_size, made.software
    chip = machine_records(machines, plan.precision, soft)[0]
    inputs = plan.global_batch * plan.seq
    broken = []

    def at_least(part: str, least: float, said: str) -> None:
        if made.parts[part] < least * (1 - 1e-9):
            broken.append(f"{part}: {made.parts[part]:.3g} s, {said} {least:.3g} s")

    for name, seconds in (*made.parts.items(), *made.memory.items()):
        if seconds < -1e-9:
            broken.append(f"{name} is negative: {seconds:.3g}")
    if made.step_seconds != pytest.approx(sum(made.parts.values())):
        broken.append("parts do not make the step")
    matrices = formulas.block_matrices(
        model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn,
        int(model.activation == "swiglu"),
    )  # fmt: skip
    if made.experts is None:
        work = 3 * 2 * inputs * model.layers * matrices
        at_least("matrix products", work / ranks / chip.flops, "their operations take")
        share = model.layers * matrices / (plan.tp * plan.pp)
        shard = plan.dp * plan.cp if plan.zero > 2 else 1
        least = soft.weight_bytes * share / shard
        if not least <= made.memory["weights"] * (1 + 1e-9) <= 8 * least:
            broken.append(f"weights: {made.memory['weights']:.3g} B, not {least:.3g}")
    core = 3.5 if soft.flash else 3
    work = core * formulas.attention_flops(
        plan.global_batch, plan.seq, model.heads, model.head_dim
    )
    work *= model.layers / 2  # the mask lets half of it through
    least = work / ranks / chip.attention_flops
    at_least("attention", least, "half of the matrix takes")
    owned = share_of(model, plan) * soft.update_bytes if not made.experts else 0
    least = owned / machines.accelerator.memory_bytes_per_second
    at_least("optimizer", least, "its bytes take")
    if soft.data_hidden == 0 and plan.zero == 0 and not made.experts:
        # All hosts together sum up: what each one's cards must send.
        group = plan.dp * plan.cp
        cards = min(group, max(1, machines.domain_ranks // plan.tp))
        card = 2 * soft.message_bytes * share_of(model, plan) / cards
        least = card * (1 - cards / group) / machines.across.bytes_per_second
        at_least("data-parallel messages", least, "the cards allow")
    return broken


def share_of(model: ModelConfig, plan: Plan) -> float:
    """Parameters of the blocks of a rank, at least, split as ZeRO does."""
    matrices = formulas.block_matrices(
        model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn,
        int(model.activation == "swiglu"),
    )  # fmt: skip
    held = model.layers * matrices / (plan.tp * plan.pp)
    return held / (plan.dp * plan.cp) if plan.zero else held


@settings(max_examples=150, deadline=None)
@given(questions())
def test_a_step_keeps_the_laws(question):
    assert laws(estimate(*question)) == []


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_model_runs_faster_than_the_peak(name):
    model = preset(name)
    for device in ACCELERATORS.values():
        for precision, peak in device.peak_flops.items():
            if precision == "tf32":
                continue
            for again in ("none", "selective", "full"):
                plan = Plan(
                    seq=model.max_seq,
                    global_batch=16,
                    micro_batch=16,
                    precision=precision,
                    recompute=again,
                )
                machines = cluster(f"{device.name}:1x1")
                made = estimate(model, plan, machines, "megatron-core")
                whole = made.cluster.accelerator.peak_flops
                half = whole.get("bf16", whole.get("fp16"))
                assert 0 < made.mfu <= made.hfu < peak / half
                assert made.mfu == pytest.approx(
                    flops(model, None, plan) / made.step_seconds / half
                )


@pytest.mark.parametrize("seq", [4096, 32_768, 131_072])
def test_with_the_mask_counted_no_length_is_faster_than_the_peak(seq):
    plan = Plan(seq=seq, global_batch=1, recompute="full")
    for device in ("a100", "h100", "b200"):
        model = preset("llama3-8b")
        made = estimate(model, plan, f"{device}:1x1")
        core = formulas.attention_flops(1, seq, model.heads, model.head_dim)
        done = flops(model, None, plan, hardware=True) - 2 * core * model.layers
        peak = ACCELERATORS[device.upper()].peak_flops["bf16"]
        assert done / made.step_seconds < peak


# ---- more of anything never hurts ----


def faster(machines: Cluster, part: str, times: float) -> Cluster:
    """The same cluster with one number changed."""
    a = machines.accelerator
    if part in ("inside", "across"):
        link = getattr(machines, part)
        wider = Link(link.latency_seconds, link.bytes_per_second * times)
        return replace(machines, **{part: wider})
    if part.endswith("latency"):
        name = part.split()[0]
        link = getattr(machines, name)
        later = Link(link.latency_seconds * times, link.bytes_per_second)
        return replace(machines, **{name: later})
    if part == "memory":
        rate = a.memory_bytes_per_second * times
        return replace(machines, accelerator=replace(a, memory_bytes_per_second=rate))
    peak = {name: rate * times for name, rate in a.peak_flops.items()}
    return replace(machines, accelerator=replace(a, peak_flops=peak))


@settings(max_examples=60, deadline=None)
@given(questions(), st.floats(1.01, 10))
@pytest.mark.parametrize("part", ["inside", "across", "memory", "peak"])
def test_better_hardware_is_never_slower(part, question, times):
    model, plan, machines, by, experts = question
    before = estimate(model, plan, machines, by, experts)
    better = faster(machines, part, times)
    after = estimate(model, plan, better, by, experts)
    assert after.step_seconds <= before.step_seconds * (1 + 1e-9)
    assert after.step_seconds >= before.step_seconds / times * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(questions(), st.floats(1.01, 10))
@pytest.mark.parametrize("part", ["inside latency", "across latency"])
def test_latency_never_helps(part, question, times):
    model, plan, machines, by, experts = question
    before = estimate(model, plan, machines, by, experts)
    later = estimate(model, plan, faster(machines, part, times), by, experts)
    assert later.step_seconds >= before.step_seconds * (1 - 1e-9)


def test_each_number_matters_somewhere():
    plan = Plan(seq=4096, global_batch=64, tp=8, pp=2, dp=4, sequence_parallel=True)
    question = MODELS["llama3-70b"], plan
    for name in ("inside", "across", "memory", "peak"):
        before = estimate(*question, CLUSTERS["h100:8x8"], "megatron-lm")
        after = estimate(*question, faster(before.cluster, name, 2.0), "megatron-lm")
        assert after.step_seconds < before.step_seconds, name
    for name in ("inside latency", "across latency"):
        after = estimate(*question, faster(before.cluster, name, 10.0), "megatron-lm")
        assert after.step_seconds > before.step_seconds, name


# ---- scaling ----


@settings(max_examples=60, deadline=None)
@given(questions())
def test_micro_batches_cost_alike(question):
    """Once the pipeline is full, each more takes as long as the one before."""
    model, plan, machines, by, experts = question
    assume(SOFTWARE[by].first_free == 0)  # the first one is cheaper there
    at = []
    for times in (2, 3, 4):
        more = replace(plan, global_batch=plan.global_batch * times)
        at.append(estimate(model, more, machines, by, experts))
    first, second, third = (made.step_seconds for made in at)
    # The longest of several chains, each of which grows evenly.
    assert (1 - 1e-6) * (second - first) <= third - second <= 1.1 * (second - first)
    for name in ("matrix products", "attention", "recomputation"):
        twice = 2 * at[0].parts[name]
        assert at[2].parts[name] == pytest.approx(twice, rel=1e-9)
    assert 1 < third / first <= 2 * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(questions())
def test_computing_again_takes_time(question):
    model, plan, machines, by, experts = question
    none, core, whole = (
        estimate(model, replace(plan, recompute=again), machines, by, experts)
        for again in ("none", "selective", "full")
    )
    assert none.parts["recomputation"] == 0
    assert none.step_seconds < core.step_seconds < whole.step_seconds
    assert whole.memory["activations"] <= none.memory["activations"]
    assert core.memory["activations"] <= none.memory["activations"]


def test_full_recomputation_is_the_forward_pass():
    plan = Plan(seq=2048, global_batch=8, recompute="full")
    made = estimate(MODELS["megatron-22b"], plan, "a100:1x1", "megatron-lm")
    blocks = MODELS["megatron-22b"].layers * plan.micro_batches
    again = made.parts["recomputation"]
    assert again == pytest.approx(blocks * made.forward_seconds)


# ---- the messages of data parallelism, by hand ----

LATENCY, NEAR, FAR = 3e-6, 400e9, 50e9


def messages(dp: int, zero: int, group: int = 0, hosts: int = 8) -> tuple[float, float]:
    """The part of the step, and the bytes of the gradients, over links without loss."""
    model, soft = MODELS["llama3-8b"], SOFTWARE["megatron-lm"]
    machines = replace(
        cluster(f"h100:{hosts}x{dp // hosts}"),
        inside=Link(0, NEAR),
        across=Link(0, FAR),
    )
    plan = Plan(seq=1024, global_batch=dp, dp=dp, zero=zero, shard_ranks=group)
    s = sizes(model, plan, hosts)
    c, w, n = machine_records(machines, "bf16", soft)
    n = network.ideal(n, LATENCY, 2 * LATENCY)
    parts = dict(zip(step.PARTS, step.step_seconds(s, c, w, n, soft), strict=True))
    return float(parts["data-parallel messages"]), float(s.stage_parameters)


def test_gradients_inside_a_host_take_a_ring():
    seconds, parameters = messages(8, 0, hosts=1)
    ring = 2 * 7 / 8 * 4 * parameters / NEAR + 2 * 7 * LATENCY
    assert seconds == pytest.approx(ring, rel=1e-12)


def test_gradients_across_hosts_take_their_cards():
    """8 hosts of 4: 56 of 62 steps inside; a card carries a fourth of 7/8, twice."""
    seconds, parameters = messages(32, 0)
    ring = 2 * 7 / 8 * 4 * parameters / 4 / FAR
    near = 2 * 31 / 32 * 4 * parameters / NEAR
    steps = 2 * (24 * LATENCY + 7 * 2 * LATENCY)
    assert seconds == pytest.approx(max(ring, near) + steps, rel=1e-12)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_scatters_gradients_of_4_bytes_and_gathers_weights_of_2(zero):
    seconds, parameters = messages(8, zero, hosts=1)
    ring = 7 / 8 * (4 + 2) * parameters / NEAR + 2 * 7 * LATENCY
    assert seconds == pytest.approx(ring, rel=1e-12)


def test_a_group_of_shards_in_each_host_reduces_across_what_it_owns():
    """8 hosts of 4, shards in the host: scatter, sum a fourth over 8, gather."""
    seconds, parameters = messages(32, 1, group=4)
    inside = 3 / 4 * (4 + 2) * parameters / NEAR + 2 * 3 * LATENCY
    across = 2 * 7 / 8 * (4 * parameters / 4) / FAR + 2 * 7 * 2 * LATENCY
    assert seconds == pytest.approx(inside + across, rel=1e-12)


def test_no_replicas_no_messages():
    plan = Plan(seq=1024, global_batch=8, tp=8)
    made = estimate(MODELS["llama3-8b"], plan, "h100:1x8")
    assert made.parts["data-parallel messages"] == 0
    assert made.parts["tensor, context and expert messages"] > 0
    alone = estimate(MODELS["llama3-8b"], Plan(seq=1024, global_batch=8), "h100:1x1")
    assert alone.parts["tensor, context and expert messages"] == 0
    assert alone.parts["pipeline messages"] == 0
    assert alone.parts["pipeline bubble"] == pytest.approx(0, abs=1e-9)


def test_tensor_ranks_exchange_the_stream_four_times_a_block():
    """Two all-reduces forward, two backward, of 2 bytes for each of the stream."""
    model, soft = MODELS["llama3-8b"], SOFTWARE["megatron-2021"]
    plan = Plan(seq=2048, global_batch=4, micro_batch=2, tp=8)
    s = sizes(model, plan, 1)
    c, w, n = machine_records(cluster("h100:1x8"), "bf16", soft)
    n = network.ideal(n, 0, 0)._replace(inside_bytes_per_second=NEAR)
    parts = dict(zip(step.PARTS, step.step_seconds(s, c, w, n, soft), strict=True))
    one = 2 * 7 / 8 * (2 * 2048 * model.hidden * 2) / NEAR
    found = parts["tensor, context and expert messages"]
    assert found == pytest.approx(2 * model.layers * 4 * one)


# ---- the bubble ----


@pytest.fixture
def fault(monkeypatch):
    """Puts a function in the place of another one of the closed forms."""
    forms = SimpleNamespace(step=step, footprint=footprint)
    monkeypatch.setattr(predicting, "ONE", forms)
    return monkeypatch.setattr


@pytest.fixture
def bare(fault):
    """Blocks only: no embedding, no head, no loss, no messages."""
    fault(step, "head_seconds", lambda *_: (0.0, 0.0))
    fault(step, "embedding_seconds", lambda *_: (0.0, 0.0))
    fault(step, "pipeline_message_seconds", lambda *_: 0.0)


def bubble(stages: int, count: int, schedule: str, chunks: int = 1) -> float:
    """Of a step, over what the passes take."""
    plan = Plan(
        seq=2048,
        global_batch=count,
        pp=stages,
        schedule=schedule,
        interleave=chunks,
    )
    made = estimate(MODELS["llama3-8b"], plan, f"h100:1x{stages}")
    each = made.forward_seconds + made.block_backward_seconds
    return made.parts["pipeline bubble"] / (count * 32 / stages * each)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (4, 4), (4, 16), (8, 64)])
def test_the_bubble_is_p_less_one_over_m(stages, count, schedule):
    """Huang et al. (arXiv:1811.06965); Narayanan et al. (arXiv:2104.04473), 2.2.1."""
    assert bubble(stages, count, schedule) == pytest.approx((stages - 1) / count)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_divide_the_bubble(chunks):
    """Narayanan et al. (arXiv:2104.04473), section 2.2.2."""
    name = "interleaved" if chunks > 1 else "1f1b"
    assert bubble(4, 16, name, chunks) == pytest.approx(3 / 16 / chunks)


@pytest.mark.usefixtures("bare")
def test_zero_bubble_schedules_leave_less():
    """Qi et al. (arXiv:2401.10241), section 2.3: a third at most, and none."""
    plain, half, none = (bubble(4, 16, name) for name in ("1f1b", "zb-h1", "zb-h2"))
    assert none <= half < 0.5 * plain
    assert none < 0.2 * plain


# ---- faults that must be seen ----


def training(by="megatron-lm", **wanted) -> Plan:
    """A plan that sends, and is not small."""
    asked = dict(seq=2048, global_batch=64, tp=2, dp=32) | wanted  # noqa: C408
    return estimate(MODELS["llama3-8b"], Plan(**asked), CLUSTERS["a100:8x8"], by)


def broken(said: str, **wanted) -> bool:
    """Whether a law says so."""
    return any(said in law for law in laws(training(**wanted)))


def test_without_a_fault_the_laws_hold():
    assert laws(training()) == []
    assert laws(training(tp=8, dp=8)) == []


def test_bits_taken_for_bytes_are_seen(fault):
    def wrong(made: Cluster) -> network.Wires:
        n = network.wires(made)
        return n._replace(across_bytes_per_second=8 * n.across_bytes_per_second)

    fault(predicting, "wires", wrong)
    assert broken("the cards allow")


def test_a_forgotten_gradient_of_weights_is_seen(fault):
    only = layer.dgrad_seconds
    fault(layer, "backward_seconds", only)
    assert broken("operations take")


def test_parameters_not_split_over_tensor_ranks_are_seen(fault):
    def whole(model, plan, *more) -> Sizes:
        s = sizes(model, plan, *more)
        return replace(s, block_parameters=s.block_parameters * plan.tp)

    fault(predicting, "sizes", whole)
    assert broken("weights", tp=8, dp=8)


def mape(source: str) -> float:
    return validate(published_runs(source)).sources[source]["mape"]


def test_attention_without_its_mask_is_seen_in_what_was_published(fault):
    right = mape("vocabpp")
    plain = layer.attention_seconds

    def whole(c, batch, heads, keys, rows, seq, width, causal, backward):
        return plain(c, batch, heads, keys, rows, seq, width, 0, backward)

    fault(layer, "attention_seconds", whole)
    assert right < 4 < mape("vocabpp")


def test_a_forgotten_recomputation_is_seen_in_what_was_published(fault):
    def never(model, plan, *more) -> Sizes:
        return replace(sizes(model, plan, *more), recompute_full=0)

    right = mape("sc21-t1")
    fault(predicting, "sizes", never)
    assert right < 5 < 15 < mape("sc21-t1")


def test_forgotten_messages_are_seen_in_what_was_published(fault):
    fault(layer, "tensor_message_seconds", lambda s, n: 0.0)
    assert mape("korthikanti-t5") > 5


# ---- small parts ----


def test_the_last_bucket_is_never_hidden():
    soft = SOFTWARE["megatron-core"]
    assert step.exposed(1.0, 10.0, soft) == pytest.approx(soft.last_bucket)
    assert step.exposed(1.0, 0.25, soft) == pytest.approx(0.75)


def test_what_hides_leaves_nothing_negative():
    assert step.hidden_behind(np.array([1.0, 3.0]), 2.0).tolist() == [0, 1]


def test_the_optimizer_moves_its_bytes_once():
    """16 bytes a parameter and more over 3.35 TB/s; with ZeRO a rank does its share."""
    soft = software("megatron-core", "H100")
    whole = estimate(
        MODELS["llama3-8b"], Plan(seq=1024, global_batch=8, dp=8), "h100:1x8"
    )
    shared = estimate(
        MODELS["llama3-8b"], Plan(seq=1024, global_batch=8, dp=8, zero=1), "h100:1x8"
    )
    least = soft.update_bytes * 8e9 / 3.35e12
    assert least < whole.parts["optimizer"] < 1.4 * least
    assert shared.parts["optimizer"] == pytest.approx(
        whole.parts["optimizer"] / 8, rel=0.01
    )


def test_waiting_micro_batches_do_not_outnumber_the_step():
    for name in SCHEDULES:
        plan = Plan(seq=1024, global_batch=2, pp=8, schedule=name)
        s = sizes(MODELS["llama3-8b"], plan, 1)
        assert footprint.waiting_micro_batches(s) <= 2


def test_experts_are_updated_by_those_who_have_them():
    """8 ranks, each with an expert of its own: nobody shares its update."""
    model, soft = MODELS["llama3-8b"], software("megatron-core", "H100")
    experts = Experts(count=8, top_k=2, ffn=14336)
    plan = Plan(seq=1024, global_batch=8, dp=8, ep=8, zero=1)
    made = estimate(model, plan, "h100:1x8", soft, experts)
    each = 32 * 3 * 4096 * 14336
    rest = 32 * 2 * 4096 * (4096 + 1024) + 2 * 128256 * 4096
    least = soft.update_bytes * (each + rest / 8) / 3.35e12
    assert least < made.parts["optimizer"] < 1.4 * least


@pytest.mark.parametrize(("ep", "zero"), [(2, 1), (8, 1), (8, 0), (8, 3)])
def test_experts_meet_their_own_replicas_only(ep, zero):
    """Of 8 ranks, 8 / ep have the same expert: with ep 8 no expert is sent at all."""
    plan = Plan(seq=1024, global_batch=8, dp=8, ep=ep, zero=zero)
    s = sizes(MODELS["llama3-8b"], plan, 1, Experts(count=8, top_k=2, ffn=14336))
    each = 8 / ep * 3 * 4096 * 14336
    assert s.expert_parameters == each
    sent = step.sent_parameters(s, s.block_parameters, s.expert_parameters, 8)
    replicas = 8 // ep
    moved = (s.block_parameters - each) * 7 / 8 + each * (replicas - 1) / replicas
    assert sent * 7 / 8 == pytest.approx(moved)


def test_a_folded_pipeline_sums_both_tables():
    """ZB-V: embedding and head lie on one rank, and both have gradients."""
    model, plan = MODELS["llama3-8b"], Plan(seq=1024, global_batch=16, pp=4, dp=2)
    straight = sizes(model, plan, 1)
    folded = sizes(model, replace(plan, schedule="zb-v"), 1)
    more = folded.stage_parameters - straight.stage_parameters
    assert more == model.vocab_size * model.hidden


# ---- messages inside a block and between stages, by hand ----


def ideal_parts(plan: Plan, machines: str, rate: float, **rules) -> dict[str, float]:
    """Parts of a step of Llama-3 8B over links of this rate, without latency."""
    model = MODELS["llama3-8b"]
    made = replace(cluster(machines), inside=Link(0, rate), across=Link(0, rate))
    soft = replace(SOFTWARE["megatron-flash"], **rules)
    s = sizes(model, plan, made.hosts)
    c, w, n = machine_records(made, "bf16", soft)
    n = network.ideal(n, 0, 0)
    values = step.step_seconds(s, c, w, n, soft)
    return dict(zip(step.PARTS, map(float, values), strict=True))


@pytest.mark.parametrize("machines", ["h100:1x4", "h100:4x1"])
def test_keys_and_values_go_round_the_context_ranks(machines):
    """Three hops forward; backward three with them and three with their gradients."""
    plan = Plan(seq=4096, global_batch=2, cp=4)
    parts = ideal_parts(plan, machines, NEAR, context_hidden=0)
    hop = 1024 * 2 * 1024 * 2 / NEAR  # 1,024 tokens, 8 heads of 128, 2 bytes
    found = parts["tensor, context and expert messages"]
    assert found == pytest.approx(2 * 32 * 3 * 3 * hop)


@pytest.mark.parametrize(("chunks", "scatter"), [(1, 0), (1, 1), (4, 0)])
def test_stages_send_the_stream_forward_and_its_gradient_back(chunks, scatter):
    plan = Plan(
        seq=2048,
        global_batch=8,
        pp=2,
        tp=4,
        schedule="interleaved" if chunks > 1 else "1f1b",
        interleave=chunks,
    )
    parts = ideal_parts(plan, "h100:8x1", FAR, pipeline_hidden=0, scatter=scatter)
    one = 2048 * 4096 * 2 / (4 if scatter else 1) / FAR
    assert parts["pipeline messages"] == pytest.approx(2 * 8 * chunks * one)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_a_token_crosses_the_network_once_for_each_host(top_k):
    """16 experts in 2 hosts of 8: a token of k experts visits 2 (1 - 1/2^k) of them."""
    experts = Experts(count=16, top_k=top_k, ffn=1024)
    plan = Plan(seq=1024, global_batch=16, dp=16, ep=16)
    s = sizes(MODELS["llama3-8b"], plan, 2, experts)
    n = network.ideal(network.wires(cluster("h100:2x8")), 0, 0)
    n = n._replace(inside_bytes_per_second=NEAR, across_bytes_per_second=FAR)
    once = 1024 * 4096 * 2
    far = 2 * (1 - 0.5**top_k) * once / 2 / FAR  # half of them are at home
    near = top_k * once * 7 / 8 / NEAR
    found = float(layer.expert_message_seconds(s, n))
    assert found == pytest.approx(max(near, far))


@settings(max_examples=40, deadline=None)
@given(plans(32, True), st.integers(1, 8), st.integers(0, 2))
def test_experts_take_their_operations_at_least(plan, top_k, dense):
    experts = Experts(count=8, top_k=top_k, ffn=8192, dense_layers=dense)
    model, machines = MODELS["llama3-8b"], CLUSTERS["h100:8x8"]
    made = estimate(model, plan, machines, "megatron-core", experts)
    core = formulas.attention_flops(
        plan.global_batch, plan.seq, model.heads, model.head_dim
    )
    head = 2 * plan.global_batch * plan.seq * model.hidden * model.vocab_size
    work = flops(model, experts, plan) - 3 * (core * model.layers + head)
    assert made.parts["matrix products"] > work / RANKS / 989.4e12
