"""Chapter 4's exercises: a right answer for each, and the usual wrong ones."""

import math


def roof(operations, moved, peak, bandwidth):
    return max(operations / peak, moved / bandwidth)


def roof_sum(operations, moved, peak, bandwidth):
    return operations / peak + moved / bandwidth


def roof_compute(operations, moved, peak, bandwidth):
    return operations / peak


def ridge(hidden, size, peak, bandwidth):
    rows = 1
    while True:  # by doubling, then by halving the gap
        if bound(rows, hidden, size, peak, bandwidth):
            break
        rows *= 2
        if rows > 2**60:
            return None
    low = rows // 2
    while rows - low > 1:
        middle = (rows + low) // 2
        if bound(middle, hidden, size, peak, bandwidth):
            rows = middle
        else:
            low = middle
    return rows


def bound(tokens, hidden, size, peak, bandwidth):
    moved = size * (2 * tokens * hidden + hidden * hidden)
    return 2 * tokens * hidden**2 / peak >= moved / bandwidth


def ridge_weights_only(hidden, size, peak, bandwidth):
    return math.ceil(size * peak / (2 * bandwidth))


def ridge_one_matrix(hidden, size, peak, bandwidth):
    """Forgets the output."""
    gain = 2 * hidden * bandwidth - size * peak
    return math.ceil(size * hidden * peak / gain) if gain > 0 else None


def useful(m, n, tile_m, tile_n, sms):
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    return m * n / (math.ceil(tiles / sms) * sms * tile_m * tile_n)


def useful_tiles(m, n, tile_m, tile_n, sms):
    """As if tiles at the edges were full."""
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    return tiles / (math.ceil(tiles / sms) * sms)


def useful_no_rounds(m, n, tile_m, tile_n, sms):
    return m * n / (math.ceil(m / tile_m) * tile_m * math.ceil(n / tile_n) * tile_n)


def replayed(program):
    time = free = 0.0
    ends = {}
    for line in program:
        if line[0] == "compute":
            time += line[1]
        elif line[0] == "send":
            free = max(free, time) + line[2]
            ends[line[1]] = free
        else:
            time = max(time, ends[line[1]])
    return max(time, free)


def replayed_blocking(program):
    return sum(line[-1] for line in program if line[0] != "wait")


def replayed_no_queue(program):
    """Messages do not wait for one another."""
    time, ends = 0.0, {}
    for line in program:
        if line[0] == "compute":
            time += line[1]
        elif line[0] == "send":
            ends[line[1]] = time + line[2]
        else:
            time = max(time, ends[line[1]])
    return max([time, *ends.values()])


def replayed_forgets(program):
    """The step ends when computing has."""
    time = free = 0.0
    ends = {}
    for line in program:
        if line[0] == "compute":
            time += line[1]
        elif line[0] == "send":
            free = max(free, time) + line[2]
            ends[line[1]] = free
        else:
            time = max(time, ends[line[1]])
    return time


def adam(parameters, size, bandwidth, ranks):
    return parameters * (2 * size + 24) / bandwidth / ranks


def adam_whole(parameters, size, bandwidth, ranks):
    return parameters * (2 * size + 24) / bandwidth


def adam_reads(parameters, size, bandwidth, ranks):
    return parameters * (2 * size + 12) / bandwidth / ranks


def scale(compute, tensors, payload, latency, bandwidth):
    best, ranks = 1, 2
    while ranks <= 65_536:
        steps = 2 * (ranks - 1)
        if tensors * steps * (latency + payload / ranks / bandwidth) <= compute:
            best = ranks
        ranks *= 2
    return best


def scale_without_latency(compute, tensors, payload, latency, bandwidth):
    return scale(compute, tensors, payload, 0.0, bandwidth)


def scale_all_chunks(compute, tensors, payload, latency, bandwidth):
    return scale(compute, tensors, payload * 64, latency, bandwidth)


ANSWERS = {
    "roofline_seconds": (roof, [roof_sum, roof_compute]),
    "ridge_tokens": (ridge, [ridge_weights_only, ridge_one_matrix]),
    "useful_share": (useful, [useful_tiles, useful_no_rounds]),
    "replay": (replayed, [replayed_blocking, replayed_no_queue, replayed_forgets]),
    "adam_seconds": (adam, [adam_whole, adam_reads]),
    "largest_scale": (scale, [scale_without_latency, scale_all_chunks]),
}
