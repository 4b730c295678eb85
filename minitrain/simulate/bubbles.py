"""How long a pipeline schedule takes, in closed form: uneven ends, and messages.

A step takes as long as the longest chain of passes that must follow one another. The
chains that matter turn at one stage: down to it with the first micro-batch, along its
own passes of all micro-batches, and up again with the last one. Once at the begin and
once at the end a chain may leave the stage for a round trip through the stages behind
it, where that takes longer than the stage's own passes in the meantime. The formula is
the maximum over the first, the second and the last stage: those between are alike.

The arithmetic is NumPy's, so an argument is a number, or an array with one entry for
each plan. `minitrain.simulate.pipeline` replays the same schedules task by task, and
`tests/simulate/test_bubbles.py` says how far the two are apart. Not at all for equal
stages without messages, nor with a longer first and last stage under gpipe, 1f1b,
zb-h1 and zb-h2; interleaved and zb-v then by up to 5 %, by 0.2 % on average. With
messages all of them by up to 5 %, by 0.3 % on average. zb-v is a fit: off by up to
2.5 % for equal stages whose passes differ, and exact where forward and both backward
passes take equal times. The zero-bubble schedules are for at least 2p micro-batches.
"""

from typing import Any

import numpy as np

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_H2, ZB_V = range(6)
DUALPIPE = 8
"""Numbers of the schedules; the first six as in `minitrain.simulate.plan`."""


def pipeline_span_seconds(
    schedule: Any,
    stages: Any,
    micro_batches: Any,
    chunks: Any,
    forward: Any,
    backward: Any,
    weight: Any,
    first_forward: Any = 0,
    first_backward: Any = 0,
    last_forward: Any = 0,
    last_backward: Any = 0,
    send: Any = 0,
) -> Any:
    """Seconds from a rank's first pass to the end of its last one, the longest of all.

    Where each rank steps its optimizer as soon as it has done, that is what a step
    takes: ranks that begin later end later (Qi et al. 2023, section 4).

    Args:
        schedule: Its number.
        stages: Ranks in a row, p.
        micro_batches: m.
        chunks: Pieces of the model on a rank, v; read for `interleaved` only.
        forward: Of one micro-batch through all chunks of a middle rank.
        backward: Likewise, to the input.
        weight: Likewise, to the weights.
        first_forward: What the first stage takes more, forward; may be negative.
        first_backward: Likewise, both parts of backward.
        last_forward: What the last stage takes more, forward.
        last_backward: Likewise, both parts of backward.
        send: From one rank to the next, beside the computing.
    """
    p, m = stages, micro_batches
    more = (first_forward, first_backward, last_forward, last_backward)
    whole = forward + backward + weight
    first, last = first_forward + first_backward, last_forward + last_backward
    through = (p - 1) * (whole + 2 * send) + first + last
    phases = through + m * whole + (m - 1) * rise_seconds(p, first, last)
    ways = m * (whole + np.maximum((first + last) / 2, 0))
    ways = ways + np.maximum(p / 2 - 1, 0) * (forward + 2 * backward - weight)
    times = (forward, backward, weight)
    chain = chain_seconds(schedule, p, m, chunks, *times, *more, send)
    folded = folded_seconds(
        p, m, *times, first_forward + last_forward, first_backward + last_backward, send
    )
    chained = (schedule > GPIPE) & (schedule < ZB_V)
    span = (schedule == GPIPE) * phases + (schedule == ZB_V) * folded
    return span + chained * chain + (schedule == DUALPIPE) * ways


def chain_seconds(
    schedule: Any,
    p: Any,
    m: Any,
    chunks: Any,
    forward: Any,
    backward: Any,
    weight: Any,
    first_forward: Any,
    first_backward: Any,
    last_forward: Any,
    last_backward: Any,
    send: Any,
) -> Any:
    """The longest chain of 1f1b, interleaved, zb-h1 or zb-h2.

    Arguments are those of `pipeline_span_seconds`.
    """
    grouped, twice = (schedule == INTERLEAVED) * 1, (schedule == ZB_H2) * 1
    split = (schedule == ZB_H1) + twice
    v = 1 + grouped * (chunks - 1)
    f, w, b = forward, weight * split, backward + weight * (1 - split)
    late = w / np.maximum(b + w, 1e-30)  # of what the ends add backward
    f0, w0, b0 = first_forward, first_backward * late, first_backward * (1 - late)
    f1, w1, b1 = last_forward, last_backward * late, last_backward * (1 - late)
    stage, first, last = f + b + w, f0 + b0 + w0, f1 + b1 + w1
    # Down and up by one stage; a group of p waits for the slow first chunk, each time.
    pair, one = (f + b) / v + 2 * send, 1 - grouped
    often = 1 + grouped * (p - 1) * (first > 0)
    turns = 2 * send * (v - 1) * p * (p > 1)
    # Turning at the first stage, where p - 1 are behind it.
    reach, apart = (1 + grouped + twice) * (p - 1), m - 1 > (1 + twice) * (p - 1)
    away = (p - 1) * pair + (f1 + b1) * (p > 1)
    pass_f, pass_b = f / v + one * f0, (b + w) / v + one * (b0 + w0)
    slow = turn_seconds(m, reach, apart, away, pass_f, pass_b, one * (stage + first))
    chain = m * (stage + first + (p == 1) * last) + slow
    # At the second one.
    behind = (p - 2) * (p > 2)
    reach, apart = (1 + grouped + twice) * behind, m - 1 > (1 + twice) * behind
    slow = turn_seconds(m, reach, apart, away - pair, f / v, (b + w) / v, one * stage)
    held = np.minimum(m - 1, split + twice) * w
    second = m * stage + slow + pair + often * (f0 + b0) + w0 - held
    chain = np.maximum(chain, second * (p > 2))
    # At the last one, with weights' gradients to do when its last micro-batch is back.
    held = np.minimum(m - 1, (split + twice) * (p - 1)) * (w + w1)
    ways = (p - 1) * pair + often * (f0 + b0) + w0
    end = m * (stage + last) + np.maximum(ways - w1 - held, 0)
    return np.maximum(chain, end * (p > 1)) + turns


def turn_seconds(
    m: Any, reach: Any, apart: Any, away: Any, forward: Any, backward: Any, stage: Any
) -> Any:
    """What round trips add to the chain of one stage's own passes.

    Args:
        m: Micro-batches.
        reach: Forward passes between a micro-batch's forward pass and its backward one.
        apart: Whether the first micro-batch is back before the last one leaves.
        away: Seconds from the end of the forward pass to the begin of the backward one,
            if none waits.
        forward, backward: Of one own pass; backward with what is put off.
        stage: All passes of one micro-batch, where messages slow the steady state: a
            round trip may outlast the passes that fill it.
    """
    passes = np.minimum(m - 1, reach)
    begin, end = away - passes * forward, away - passes * backward
    begin, end = np.maximum(begin, 0), np.maximum(end, 0)
    waits = begin + end - (1 - apart) * np.minimum(begin, end)
    slower = (away + stage) / (passes + 1) - stage
    return waits + np.maximum(slower, 0) * (m - 1 - passes) * (stage > 0)


def folded_seconds(
    p: Any,
    m: Any,
    forward: Any,
    backward: Any,
    weight: Any,
    more_forward: Any,
    more_backward: Any,
    send: Any,
) -> Any:
    """zb-v, whose first rank has both ends of the model; fitted to replays.

    Args:
        p, m: Stages and micro-batches.
        forward, backward, weight: Of both chunks of a middle rank.
        more_forward, more_backward: What the first rank takes more.
        send: From one rank to the next.
    """
    late = weight / np.maximum(backward + weight, 1e-30)
    more_weight = late * more_backward
    f, b, w = forward / 2, backward / 2, weight / 2
    f0 = f + more_forward / 2
    b0, w0 = b + (more_backward - more_weight) / 2, w + more_weight / 2
    away = (2 * p - 2) * (f + b + 2 * send)
    away = away + np.where(m > p, more_forward + more_backward - more_weight, 0)
    ahead = (np.minimum(m, p) - 1) * np.minimum(2 * f0, f0 + b0)
    later = np.maximum(np.minimum(m, 2 * p - 1) - p, 0) * 2 * np.minimum(b0, w0)
    uneven = np.minimum(np.maximum(f - b, 0), np.maximum(b - w, 0))
    waits = away - ahead - later + (p - 2) * uneven
    waits = np.maximum(waits, (p - 2) * np.maximum(w - np.maximum(f, b), 0))
    busy = m * 2 * np.maximum(f0 + b0 + w0, f + b + w)
    return np.where(p > 1, busy + np.maximum(waits, 0), m * 2 * (f0 + b0 + w0))


def rise_seconds(p: Any, first: Any, last: Any) -> Any:
    """What the slowest stage takes more than a middle one.

    Args:
        p: Stages; with one, it is first and last; with two, none is in the middle.
        first, last: What the ends take more.
    """
    ends = np.maximum(first, last) + (p == 1) * np.minimum(first, last)
    return np.maximum(ends, -1e30 * (p < 3))
