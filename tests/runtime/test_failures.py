"""Every way a launch can fail, and whether its message names the cause."""

import ctypes
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from minitrain import RankError, StallError, launch


def failure(kind, fn, ranks, **options):
    with pytest.raises(kind) as caught:
        launch(fn, ranks, **options)
    return caught.value


# --------------------------------------------------------------------- exceptions


def raises_on_rank_2():
    time.sleep(1.0 * (dist.get_rank() == 2))  # the others are in the barrier by then
    if dist.get_rank() == 2:
        raise ValueError("no such thing")  # the reader's own line
    dist.barrier()


def test_an_exception_names_its_rank_line_and_the_others():
    start = time.monotonic()
    error = failure(RankError, raises_on_rank_2, 4)
    assert time.monotonic() - start < 5  # the others wait a minute for the barrier
    assert (error.rank, error.cause) == (2, "ValueError")
    assert 'raise ValueError("no such thing")  # the reader\'s own line' in str(error)
    assert "in raises_on_rank_2" in error.traceback
    assert set(error.others) == {0, 1, 3}
    assert all("barrier #1" in text for text in error.others.values())


def test_the_first_exception_is_the_cause_not_the_lost_connections_after_it():
    def f():
        x = torch.ones(1000)
        for step in range(100):
            if step == 7 and dist.get_rank() == 1:
                raise KeyError("cause")
            dist.all_reduce(x)

    assert failure(RankError, f, 3).rank == 1


def test_of_two_exceptions_the_earlier_is_named():
    def f():
        time.sleep(0.3 * (dist.get_rank() == 0))
        raise RuntimeError(f"from {dist.get_rank()}")

    assert failure(RankError, f, 2).rank == 1


def test_the_chain_of_an_exception_is_shown():
    def f():
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error

    text = str(failure(RankError, f, 1))
    assert "KeyError: 'missing'" in text and "direct cause" in text


def test_no_path_of_this_machine_in_a_traceback_through_torch():
    text = str(failure(RankError, lambda: torch.nn.Linear(2, 3)(torch.ones(5)), 1))
    assert 'File "torch/nn/modules/linear.py"' in text
    assert os.path.dirname(torch.__file__) not in text


def test_a_result_that_cannot_be_returned():
    error = failure(RankError, lambda: (i for i in range(3)), 2)
    assert "a generator cannot be returned" in str(error)


def test_ranks_that_all_raise_without_a_message():
    def f():
        raise AssertionError

    error = failure(RankError, f, 2)
    assert error.cause == "AssertionError"
    assert list(error.others.values()) == ["raised AssertionError"]


def test_a_rank_that_dies_after_it_has_returned():
    def f():
        if dist.get_rank() == 0:
            time.sleep(60)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    error = failure(RankError, f, 2)
    assert (error.rank, error.cause) == (1, "SIGKILL")
    assert "after its function had returned" in str(error)


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


def test_a_result_that_cannot_be_read_names_its_rank():
    error = failure(RankError, lambda: dist.get_rank() and Unreadable(), 2)
    assert (error.rank, error.cause) == (1, "ZeroDivisionError")


def test_an_exception_without_a_message_and_one_whose_message_fails():
    assert "of 1 raised MemoryError\n" in str(
        failure(RankError, lambda: bytearray(10**15), 1)
    )

    class WeirdError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def f():
        raise WeirdError

    assert failure(RankError, f, 1).cause == "WeirdError"


def test_a_rank_that_is_busy_outside_python_cannot_answer():
    def f():
        if dist.get_rank() == 1:
            time.sleep(0.3)
            raise ValueError("cause")
        re.match(r"(a+)+$", "a" * 30 + "b")  # seconds, and never lets go of the lock

    assert "busy outside Python" in failure(RankError, f, 2).others[0]


def test_exit_inside_a_rank():
    assert failure(RankError, lambda: exit(3), 2).cause == "SystemExit"
    error = failure(RankError, lambda: os._exit(0), 2)
    assert "exit code 0 before its function returned" in str(error)


# ------------------------------------------------------------------------ deaths


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_killed_rank_is_named_with_its_signal(number):
    def f():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(3))

    error = failure(RankError, f, 3)
    assert (error.rank, error.cause) == (1, number.name)
    assert set(error.others) == {0, 2}


def test_a_segmentation_fault_shows_the_line():
    def f():
        if dist.get_rank() == 1:
            ctypes.string_at(0)
        dist.barrier()

    error = failure(RankError, f, 2)
    assert error.cause == "SIGSEGV" and "test_failures.py" in error.traceback


def test_a_message_longer_than_its_buffer_aborts_and_is_named():
    def f():
        if dist.get_rank() == 0:
            dist.send(torch.ones(1000), 1)
        else:
            dist.recv(torch.ones(10), 0)

    error = failure(RankError, f, 2)
    assert (error.rank, error.cause) == (1, "SIGABRT")


# ------------------------------------------------------------------------ stalls


def test_two_sends_first_are_a_circle():
    def f():
        rank = dist.get_rank()
        dist.send(torch.ones(3), (rank + 1) % 3)
        dist.recv(torch.ones(3), (rank - 1) % 3)

    error = failure(StallError, f, 3, timeout=1)
    assert error.verdict == [
        "The ranks wait for each other in a circle: 0 -> 1 -> 2 -> 0."
    ]
    assert "send to rank 1, float32[3], at test_failures.py" in error.waiting[0]


def test_different_collectives_are_told_apart():
    def f():
        if dist.get_rank() == 2:
            dist.broadcast(torch.ones(3), 0)
        else:
            dist.all_reduce(torch.ones(4))

    error = failure(StallError, f, 3, timeout=1)
    assert "ranks 0 and 1 in all_reduce, float32[4]" in error.verdict[0]
    assert "rank 2 in broadcast, float32[3]" in error.verdict[0]


def test_a_rank_that_never_arrives():
    def f():
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(4))

    error = failure(StallError, f, 3, timeout=1)
    assert error.waiting[1] == "has finished"
    assert error.verdict == [
        "Ranks 0 and 2 wait in all_reduce #1 for rank 1, which never called it."
    ]


def test_a_rank_that_came_out_of_a_collective_of_another_shape_is_not_accused():
    """gloo lets rank 0 go with the numbers it got; rank 1 waits for the rest."""

    def f():
        dist.barrier()
        dist.all_reduce(torch.ones(3 + dist.get_rank()))

    (verdict,) = failure(StallError, f, 2, timeout=1).verdict
    assert "rank 0, which came out of it" in verdict
    assert "check=True" in verdict


def test_a_stall_in_a_subgroup_names_its_ranks():
    def f():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 2:
            dist.all_reduce(torch.ones(2), group=group)

    error = failure(StallError, f, 3, timeout=1)
    assert "all_reduce #1 of ranks [0, 2]" in error.waiting[2]


def test_a_receive_from_anyone_and_an_asynchronous_one():
    def anyone():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(3))

    assert "recv from any rank" in failure(StallError, anyone, 2, timeout=1).waiting[0]

    def later():
        if dist.get_rank() == 0:
            work = dist.irecv(torch.ones(3), 1)
            work.wait()

    assert "recv from rank 1" in failure(StallError, later, 2, timeout=1).waiting[0]


def test_a_stall_inside_torchs_own_data_parallel():
    def f():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        if dist.get_rank() == 0:
            model(torch.ones(2, 3)).sum().backward()
        else:
            time.sleep(60)

    error = failure(StallError, f, 2, timeout=1)
    assert "all_reduce" in error.waiting[0] and "not communicating" in error.waiting[1]


def test_a_message_to_oneself_is_refused_in_words():
    def f():
        dist.recv(torch.ones(1), dist.get_rank())

    error = failure(RankError, f, 2)
    assert f"rank {error.rank} would receive from itself" in str(error)


def test_the_timeout_bounds_a_wait_not_the_run():
    def f():
        for _ in range(8):
            time.sleep(0.3)
            dist.barrier()
        return True

    assert launch(f, 2, timeout=2) == [True, True]


def test_a_message_nobody_waits_for_is_no_stall():
    def f():
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(3), 1)
            x = 0
            deadline = time.monotonic() + 2.5
            while time.monotonic() < deadline:
                x += work.is_completed()
        else:
            dist.recv(torch.ones(3), 0)
        return True

    assert launch(f, 2, timeout=2) == [True, True]


# -------------------------------------------------------------------- check=True


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: dist.all_reduce(torch.ones(3 + r)), ("float32[3]", "float32[4]")),
        (
            lambda r: dist.all_reduce(
                torch.ones(3, dtype=[torch.int64, torch.float32][r])
            ),
            ("int64[3]", "float32[3]"),
        ),
        (
            lambda r: (dist.all_reduce, lambda x: dist.broadcast(x, 0))[r](
                torch.ones(2)
            ),
            ("allreduce", "broadcast"),
        ),
    ],
)
def test_check_names_both_sides_of_a_mismatch_at_once(call, words):
    start = time.monotonic()
    error = failure(RankError, lambda: call(dist.get_rank()), 2, check=True)
    assert time.monotonic() - start < 5  # not after a minute's timeout
    assert all(word in str(error) for word in words), str(error)
    assert "rank 0 calls" in str(error) and "rank 1 calls" in str(error)


def test_check_finds_nothing_wrong_with_a_right_program():
    def f():
        x = torch.ones(3)
        dist.all_reduce(x)
        return x.sum().item()

    assert launch(f, 3, check=True) == [9.0] * 3


def test_a_stall_under_check():
    def f():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    assert 0 in failure(StallError, f, 2, timeout=1, check=True).waiting


def shift(group=None):
    """One message to the next rank and one from the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(4), torch.empty(4)
    work = dist.isend(x, (rank + 1) % size, group)
    dist.recv(y, (rank - 1) % size, group)
    work.wait()


def test_messages_that_have_ended_are_not_waited_for():
    """A rank that merely sleeps is not said to wait in an old message."""

    def f():
        for _ in range(3):
            shift()
        if dist.get_rank() == 0:
            time.sleep(8)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(StallError) as error:
        launch(f, 2, timeout=2.0)
    text = str(error.value)
    assert "recv from" not in text and "send to" not in text
    assert "rank 0" in text and "sleep" not in error.value.verdict[0]


def test_two_threads_may_send_and_receive_at_once():
    def f():
        groups, errors = [dist.new_group([0, 1]) for _ in range(2)], []

        def go(group):
            try:
                for _ in range(200):
                    shift(group)
            except BaseException as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=go, args=(g,)) for g in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    assert launch(f, 2, timeout=10.0) == [[], []]
