"""Checks accept a right answer, reject plausible wrong ones, and never raise."""

import random

import pytest
import torch
import torch.distributed as dist

from minitrain.exercises import Exercise, check, find, judge
from minitrain.exercises.compare import difference, short


def double(number: int) -> int:
    return 2 * number


def numbers(draw: random.Random):
    yield (1,)
    for _ in range(20):
        yield (draw.randint(2, 1000),)


DOUBLE = Exercise("double", double, numbers)
ANSWER = Exercise("answer", lambda: 42)


def raises_not_implemented(number):
    raise NotImplementedError


def raises(number):
    return 1 // (number - 1)


@pytest.mark.parametrize(
    "stub", [None, ..., lambda n: None, lambda n: ..., raises_not_implemented]
)
def test_a_stub_is_not_solved_yet(stub):
    assert judge(DOUBLE, stub) == judge(DOUBLE, None)
    assert judge(DOUBLE, stub).text == "not solved yet"
    assert not judge(DOUBLE, stub).solved


class Hostile:
    def __len__(self):
        raise RuntimeError("no")

    __repr__ = __eq__ = __len__
    __hash__ = None


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError("no")


def exits(number):
    raise SystemExit


def raises_silently(number):
    raise SilentError


@pytest.mark.parametrize(
    "answer",
    [
        lambda n: Hostile(),
        lambda n: 10**400,
        lambda n: torch.ones(3, device="meta"),
        lambda n: torch.eye(3).to_sparse(),
        exits,
        raises_silently,
    ],
)
def test_whatever_an_answer_does_comes_back_as_a_verdict(answer):
    for exercise in (DOUBLE, Exercise("tensor", lambda n: torch.ones(3), numbers)):
        verdict = judge(exercise, answer)
        assert not verdict.solved
        assert verdict.text


@pytest.mark.parametrize("right", [double, lambda n: n + n, lambda n: float(2 * n)])
def test_a_right_answer_is_solved(right):
    verdict = judge(DOUBLE, right)
    assert verdict.solved
    assert verdict.text == "solved (21 cases)"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lambda n: n + 1, "expected"),  # right for the first case only
        (lambda n: 2 * n if n < 500 else 2 * n + 1, "expected"),
        (lambda n: str(2 * n), "expected 2, got '2'"),
        (lambda n: n == 1, "got True"),
        (lambda n: None if n > 1 else 2, "got nothing"),
        (lambda n: float("nan"), "got nan"),
        (raises, "raised ZeroDivisionError"),
        (lambda: 2, "raised TypeError"),
        (7, "expected 2, got 7"),
    ],
)
def test_a_wrong_answer_is_told_where_it_fails(wrong, word):
    verdict = judge(DOUBLE, wrong)
    assert not verdict.solved
    assert word in verdict.text
    assert "for number=" in verdict.text or "TypeError" in verdict.text
    assert "\n" not in verdict.text


def test_a_number_answers_a_question_for_a_number():
    assert judge(ANSWER, 42).solved
    assert judge(ANSWER, lambda: 42).solved
    assert judge(ANSWER, 41).text == "not yet: expected 42, got 41"
    assert judge(ANSWER, None).text == "not solved yet"


def test_an_answer_cannot_change_what_is_expected():
    exercise = Exercise("sort", lambda items: sorted(items), lambda _: [([3, 1],)])

    def empties(items):
        items.clear()
        return items

    assert not judge(exercise, empties).solved


def test_the_same_cases_are_drawn_each_time():
    texts = {judge(DOUBLE, lambda n: 2 * n + (n > 1)).text for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.tensor([1.0, float("nan")]), torch.ones(2)),
        (torch.ones(20), torch.full((20,), 1.001)),
        ([1.0, 1.0], torch.ones(2)),
        ([1, 2], [1, 2, 3]),
        ([[1], [2]], [[1], [3]]),
        (True, 1),
        (1, True),
        ("a", "b"),
        (3.0001, 3),
        (1.0001, 1.0),
    ],
)
def test_differences_are_seen(got, expected):
    assert difference(got, expected, 1e-6)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.ones(3) + 1e-8, torch.ones(3)),
        (torch.ones(0), torch.ones(0)),
        ((1, 2), [1, 2]),
        (3.0, 3),
        (torch.tensor(3), 3),
        (1.0 + 1e-9, 1.0),
        ("a", "a"),
    ],
)
def test_equal_answers_pass(got, expected):
    assert difference(got, expected, 1e-6) == ""


def test_a_difference_names_its_place():
    assert difference([1, [2, 4]], [1, [2, 3]], 0).startswith("element 1, element 1:")


def test_long_values_are_shortened():
    assert len(short(list(range(10_000)))) <= 160
    assert short(torch.ones(2, 50)) == "a float32 tensor of shape [2, 50]"


def test_an_unknown_name_is_told_the_nearest(capsys):
    check("ring_allreduce", double)
    assert "is it ring_all_reduce" in capsys.readouterr().out


def test_check_prints_one_line(capsys):
    check("ring_wire_bytes", lambda payload_bytes, ranks: payload_bytes)
    out = capsys.readouterr().out
    assert out.startswith("ring_wire_bytes: not yet: expected 0, got 4096, for payload")
    assert out.count("\n") == 1


# ---- chapter 1 ----


@pytest.mark.parametrize(
    "wrong",
    [
        lambda payload_bytes, ranks: 2 * payload_bytes,
        lambda payload_bytes, ranks: 2 * payload_bytes // ranks * ranks // 2,
        lambda payload_bytes, ranks: (ranks - 1) * payload_bytes // ranks,
        lambda payload_bytes, ranks: (ranks - 1) * payload_bytes,
        lambda payload_bytes, ranks: 2 * (ranks - 1) * payload_bytes,
    ],
)
def test_ring_wire_bytes_rejects(wrong):
    assert not judge(find("ring_wire_bytes"), wrong).solved


def test_ring_wire_bytes_accepts():
    right = lambda p, n: (n - 1) * (p // n) * 2  # noqa: E731
    assert judge(find("ring_wire_bytes"), right).solved


def exchange(chunk, buffer, rank, size):
    """Send to the right and receive from the left, without waiting on each other."""
    sending = dist.isend(chunk.contiguous(), (rank + 1) % size)
    dist.recv(buffer, (rank - 1) % size)
    sending.wait()


def ring_all_reduce(tensor, chunked=lambda t, n: list(t.tensor_split(n)), last=0):
    """A ring of sends and receives; `chunked` and `last` let a test break it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = chunked(tensor, size)
    for step in range(size - 1 - last):
        out, into = (rank - step) % size, (rank - step - 1) % size
        received = torch.empty_like(chunks[into])
        exchange(chunks[out], received, rank, size)
        chunks[into] = chunks[into] + received
    for step in range(size - 1):
        out, into = (rank + 1 - step) % size, (rank - step) % size
        received = torch.empty_like(chunks[into])
        exchange(chunks[out], received, rank, size)
        chunks[into] = received
    return torch.cat(chunks)


def test_ring_all_reduce_accepts_a_ring():
    assert judge(find("ring_all_reduce"), ring_all_reduce).solved


def stops_a_step_early(tensor):
    return ring_all_reduce(tensor, last=1)


def wants_equal_chunks(tensor):
    return ring_all_reduce(tensor, lambda t, n: list(t.view(n, -1)))


def keeps_its_own(tensor):
    return tensor


def for_two_ranks_only(tensor):
    other = torch.empty_like(tensor)
    if dist.get_world_size() > 1:
        exchange(tensor, other, dist.get_rank(), dist.get_world_size())
        return tensor + other
    return tensor


def rounds(tensor):
    return ring_all_reduce(tensor.float()).double()


def sends_first(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        dist.send(tensor, (rank + 1) % size)
    return tensor


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (stops_a_step_early, "rank 0: off by"),
        (wants_equal_chunks, "raised RuntimeError on rank"),
        (keeps_its_own, "rank 0: off by"),
        (for_two_ranks_only, "sends or receives 64 bytes at once"),
        (rounds, "rank 0: off by"),
        (sends_first, "wait for each other in a circle: 0 -> 1 -> 0"),
        (lambda x: dist.all_reduce(x) or x, "it calls all_reduce"),
    ],
)
def test_ring_all_reduce_rejects(wrong, word):
    verdict = judge(find("ring_all_reduce"), wrong)
    assert not verdict.solved
    assert word in verdict.text


def test_ring_all_reduce_knows_a_stub():
    assert judge(find("ring_all_reduce"), raises_not_implemented).text == (
        "not solved yet"
    )
