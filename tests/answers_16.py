"""Chapter 16's exercises: a right answer for each, and the usual wrong ones."""

import math
import re
import statistics
from itertools import combinations

from minitrain.simulate.estimate import estimate
from minitrain.simulate.plan import Plan
from minitrain.workload.presets import preset


def constant(rates):
    middle = sorted(rates)[len(rates) // 2]
    return sum(abs(rate / middle - 1) for rate in rates) / len(rates)


def constant_of_rates(rates):
    """Errors of the rates, not of the times."""
    middle = sorted(rates)[len(rates) // 2]
    return sum(abs(middle / rate - 1) for rate in rates) / len(rates)


def constant_mean(rates):
    middle = statistics.mean(rates)
    return sum(abs(rate / middle - 1) for rate in rates) / len(rates)


def constant_signed(rates):
    middle = sorted(rates)[len(rates) // 2]
    return abs(sum(rate / middle - 1 for rate in rates)) / len(rates)


def seconds(tflops, layers, hidden, vocab, batch, seq, gpus, recompute):
    block = 24 * hidden**2 + 4 * seq * hidden  # of a token
    head = 2 * hidden * vocab
    each = (3 + recompute) * layers * block + 3 * head
    return batch * seq * each / (tflops * 1e12 * gpus)


def seconds_no_recompute(tflops, layers, hidden, vocab, batch, seq, gpus, recompute):
    return seconds(tflops, layers, hidden, vocab, batch, seq, gpus, False)


def seconds_head_again(tflops, layers, hidden, vocab, batch, seq, gpus, recompute):
    once = seconds(tflops, layers, hidden, vocab, batch, seq, gpus, False)
    return once * (4 / 3 if recompute else 1)


def seconds_one_gpu(tflops, layers, hidden, vocab, batch, seq, gpus, recompute):
    return seconds(tflops, layers, hidden, vocab, batch, seq, 1, recompute)


def width(errors, share):
    away = sorted(abs(1 / (1 + e) - 1) for e in errors)
    return away[max(0, math.ceil(share * len(away)) - 1)]


def width_of_errors(errors, share):
    """Around the reported time."""
    away = sorted(map(abs, errors))
    return away[math.ceil(share * len(away)) - 1]


def width_too_small(errors, share):
    away = sorted(abs(1 / (1 + e) - 1) for e in errors)
    return away[max(0, math.floor(share * len(away)) - 1)]


def tau(predicted, reported):
    pairs = combinations(range(len(predicted)), 2)
    same = opposite = 0
    for i, j in pairs:
        sign = (predicted[i] - predicted[j]) * (reported[i] - reported[j])
        same += sign > 0
        opposite += sign < 0
    return (same - opposite) / (same + opposite) if same + opposite else 0.0


def tau_of_all(predicted, reported):
    """Ties count in the denominator."""
    pairs = list(combinations(zip(predicted, reported, strict=True), 2))
    signs = [(a - b) * (x - y) for (a, x), (b, y) in pairs]
    total = sum((s > 0) - (s < 0) for s in signs)
    return total / len(pairs) if pairs else 0.0


def tau_share(predicted, reported):
    pairs = list(combinations(zip(predicted, reported, strict=True), 2))
    signs = [(a - b) * (x - y) for (a, x), (b, y) in pairs if a != b and x != y]
    return sum(s > 0 for s in signs) / len(signs) if signs else 0.0


def network(text, per_host):
    rate, unit = re.search(r"(\d+) (Gb|GB)/s", text).groups()
    each = float(rate) * 1e9 / {"Gb": 8, "GB": 1}[unit]
    return (
        each if "per GPU" in text else int(re.match(r"\d+", text)[0]) * each / per_host
    )


def network_in_bits(text, per_host):
    return network(text.replace("GB", "Gb"), per_host)


def network_of_host(text, per_host):
    return network(text, 1)


def network_shared(text, per_host):
    each = network(text, per_host)
    return each / per_host if "per GPU" in text else each


def plan(need_fit=True):
    found = {}
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            layout = {"tp": tp, "pp": pp, "dp": 512 // (tp * pp), "zero": 1}
            option = Plan(
                seq=8192, global_batch=512, sequence_parallel=tp > 1, **layout
            )
            made = estimate(preset("llama3-70b"), option, "h100:64x8")
            if made.fits or not need_fit:
                found[tp, pp] = made.step_seconds
    return min(found, key=found.get)


ANSWERS = {
    "constant_error": (constant, [constant_of_rates, constant_mean, constant_signed]),
    "step_seconds": (
        seconds,
        [seconds_no_recompute, seconds_head_again, seconds_one_gpu],
    ),
    "half_width": (width, [width_of_errors, width_too_small]),
    "kendall_tau": (tau, [tau_of_all, tau_share]),
    "network_of": (network, [network_in_bits, network_of_host, network_shared]),
    "best_plan": (plan, [lambda: plan(need_fit=False), lambda: (8, 2), (1, 1)]),
}
