"""launch: what comes back, from where it may be called, and what is left behind."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minitrain import launch
from minitrain.runtime import server


@dataclass
class Point:
    x: int
    where: torch.Tensor


def total(value):
    x = torch.tensor([float(value * (dist.get_rank() + 1))])
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_results_come_in_rank_order(ranks):
    def f(base):
        return base + dist.get_rank(), dist.get_world_size()

    assert launch(f, ranks, 10) == [(10 + r, ranks) for r in range(ranks)]


def test_the_ranks_really_are_processes_that_talk():
    assert launch(total, 3, 2) == [12.0] * 3
    assert len(set(launch(os.getpid, 3)) | {os.getpid()}) == 4


def test_tensors_arrays_and_the_callers_classes_come_back():
    def f(p):
        return Point(p.x + dist.get_rank(), p.where * 2)

    a, b = launch(f, 2, Point(1, torch.arange(5)))
    assert type(a) is Point and (a.x, b.x) == (1, 2)
    assert torch.equal(b.where, torch.arange(5) * 2)


def test_a_large_result_comes_back_whole():
    (big,) = launch(lambda: torch.arange(10_000_000), 1)
    assert big.numel() == 10_000_000 and big[-1] == 9_999_999


def test_closures_lambdas_and_partials_travel():
    factor = 7
    assert launch(lambda x: factor * x, 2, 3) == [21, 21]
    assert launch(functools.partial(total, 1), 2) == [3.0, 3.0]


def test_a_name_that_is_also_a_settings_module_of_torch_travels():
    """`torch.distributed.config` is a module, and of a class that cannot be pickled."""

    def f(model):
        return model.config + dist.get_rank()

    assert launch(f, 2, SimpleNamespace(config=5)) == [5, 6]


def test_one_torch_thread_per_rank_unless_asked():
    assert launch(torch.get_num_threads, 2) == [1, 1]
    assert launch(torch.get_num_threads, 1, threads=2) == [2]


def test_an_optimizer_in_every_rank():
    def f():
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return sum(p.numel() for p in model.parameters())

    assert launch(f, 2) == [12, 12]


def test_output_of_rank_0_comes_first_and_that_of_others_in_rank_order(capsys):
    def f():
        print("line", dist.get_rank())
        print("no newline", end="")

    launch(f, 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "line 0",
        "no newline[rank 1] line 1",
        "[rank 1] no newline",
        "[rank 2] line 2",
        "[rank 2] no newline",
    ]


def test_rank_0_prints_while_it_runs(capfd):
    script = """
        import time, minitrain
        def f():
            print("early"); time.sleep(3)
        minitrain.launch(f, 1)
    """
    with _script(script) as process:
        line = process.stdout.readline()
        assert line == "early\n" and process.poll() is None


def test_several_launches_at_once_from_threads():
    results = {}

    def work(i):
        results[i] = launch(total, 2, i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == {i: [3.0 * i, 3.0 * i] for i in range(6)}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None, 2), TypeError, "NoneType"),
        ((total, 0, 1), ValueError, "ranks=0"),
        ((total, -3, 1), ValueError, "ranks=-3"),
        ((total, 2.0, 1), TypeError, "2.0"),
        ((total, True, 1), TypeError, "True"),
        ((total, 100_000, 1), ValueError, "100000"),
        ((total, 2, threading.Lock()), TypeError, "lock"),
    ],
)
def test_arguments_that_make_no_sense(arguments, error, words):
    with pytest.raises(error, match=words):
        launch(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"backend": "mpi"}, "mpi.*gloo, nccl"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(ValueError, match=words):
        launch(total, 2, 1, **options)


# ------------------------------------------------------ scripts and what is left


def _script(text, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__":'])
def test_scripts_with_and_without_a_main_guard(tmp_path, guard):
    call = "print(minitrain.launch(f, 2))"
    body = f"{guard}\n    {call}" if guard else call
    path = tmp_path / "program.py"
    path.write_text(
        "import minitrain, torch.distributed as dist\n"
        "print('top level')\n"
        "def f():\n    return dist.get_rank()\n" + body + "\n"
    )
    run = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert run.stdout == "top level\n[0, 1]\n", run.stderr


def test_an_edited_module_takes_effect_at_the_next_launch(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = tmp_path / "edited_module.py"

    def f():
        import edited_module

        return edited_module.value

    for value in (1, 22):
        module.write_text(f"value = {value}\n")
        assert launch(f, 1) == [value]


def _descendants(pid):
    """Every process that a process started, however deep."""
    tree = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        tree.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        children = tree.get(queue.pop(), [])
        found += children
        queue += children
    return found


def _all_gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not [p for p in pids if Path(f"/proc/{p}").exists()]:
            return True
        time.sleep(0.02)
    return False


LONG = """
    import time, minitrain, torch.distributed as dist
    def f():
        print("up", flush=True); time.sleep(600)
    minitrain.launch(f, 3)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_caller_goes(tmp_path, number):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with _script(LONG, env=environment) as process:
        assert process.stdout.readline() == "up\n"
        started = _descendants(process.pid)
        assert len(started) == 5  # server, supervisor, three ranks
        assert list(tmp_path.glob("minitrain-*"))
        process.send_signal(number)
        process.wait(10)
        assert _all_gone(started)
        assert not list(tmp_path.glob("minitrain-*"))


@pytest.mark.parametrize("victim", [0, 1])
def test_nothing_is_left_when_the_server_or_the_supervisor_is_killed(tmp_path, victim):
    with _script(LONG, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        assert process.stdout.readline() == "up\n"
        started = _descendants(process.pid)
        os.kill(started[victim], signal.SIGKILL)
        assert process.wait(10) == 1  # RankError: the supervisor died
        assert _all_gone(started)
        assert not list(tmp_path.glob("minitrain-*"))


def test_nothing_is_left_after_a_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("minitrain.runtime.launcher._server", _fresh_server())
    launch(total, 2, 1)
    with pytest.raises(Exception, match="raised ZeroDivisionError"):
        launch(lambda: 1 // 0, 2)
    deadline = time.monotonic() + 5
    while list(tmp_path.glob("minitrain-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list(tmp_path.glob("minitrain-*"))


def _fresh_server():
    from minitrain.runtime.launcher import _Server

    return _Server()


def test_a_process_that_a_rank_started_is_ended_with_it():
    def f():
        return subprocess.Popen(["sleep", "600"]).pid

    assert _all_gone(launch(f, 1))


def test_a_killed_server_is_replaced():
    from minitrain.runtime.launcher import _server

    launch(total, 1, 1)
    _server.process.kill()
    assert launch(total, 2, 1) == [3.0, 3.0]


def test_ranks_started_as_new_interpreters(monkeypatch):
    """What happens where fork is unsafe, tried here."""
    monkeypatch.setattr("minitrain.runtime.launcher._can_fork", lambda: False)
    assert launch(total, 2, 1) == [3.0, 3.0]


def test_messages_are_framed():
    a, b = server.socket.socketpair()
    server.send(a, {"x": b"1" * 100})
    server.send(a, [2])
    assert server.receive(b) == {"x": b"1" * 100} and server.receive(b) == [2]
    a.close()
    with pytest.raises(EOFError):
        server.receive(b)
