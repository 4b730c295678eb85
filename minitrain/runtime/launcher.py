"""Run a function on several processes, from a cell, a script or a test."""

import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minitrain.runtime import pickling, server
from minitrain.runtime.errors import RankError, StallError

MAX_RANKS = 256
MAX_SECONDS = 10_000_000
MAX_SIMULATED = 2**20
BACKENDS = ("gloo", "nccl", "fake")

Outcomes = dict[int, dict[str, Any]]
"""What the supervisor tells of each rank; see `server.Supervisor`."""


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = None,
    check: bool = False,
    threads: int = 1,
    only: Sequence[int] = (0,),
) -> list[Any]:
    """Run ``fn(*args)`` on ``ranks`` processes that form one process group.

    ``fn`` may be defined in a notebook cell, a script with or without a main guard,
    or a test: it travels by value. Rank 0 prints as it goes; the lines of the others
    follow at the end, in rank order, each with its rank.

    With ``backend="fake"`` the world is not there: a few of its ranks really run, each
    in one process, on a group of ``ranks`` whose collectives return at once, and with
    tensors that have shapes but neither memory nor values. So a program can be traced
    as rank 5 of 16,384 would run it. What it returns holds meta tensors.

    Args:
        ranks: Number of processes; with ``"fake"``, size of the world.
        timeout: Longest wait for one message, in seconds. It does not bound the run.
        backend: ``"gloo"``, ``"nccl"`` or ``"fake"``; by default NCCL where each rank
            has a GPU, else gloo.
        check: Compare operator, shape and dtype of every collective across the ranks
            before it runs. Slow, and the way to find a mismatch.
        threads: torch threads of each rank.
        only: With ``"fake"``, the ranks that really run.

    Returns:
        The values that the ranks returned, in rank order; with ``"fake"`` in the order
        of ``only``.

    Raises:
        RankError: A rank raised an exception or died; the message names the rank
            that was the cause, and says what the others were doing.
        StallError: No message came within the timeout; the message says what each
            rank waits in, and which ranks disagree.
        ValueError: An argument makes no sense.
        TypeError: ``fn`` or an argument cannot be sent to another process.
    """
    job = _job(fn, ranks, args, timeout, backend, check, threads)
    job["played"] = played = _played(job, only)
    caller, folder = _start(job)
    printer = _Printer(played)
    with caller:
        try:
            outcomes = _follow(caller, folder, printer)
        finally:
            printer.close()
        _raise_failure(outcomes, ranks, timeout, folder)
        return [_load(folder, rank) for rank in played]


def _job(
    fn: Callable[..., Any],
    ranks: int,
    args: tuple,
    timeout: float,
    backend: str | None,
    check: bool,
    threads: int,
) -> dict[str, Any]:
    if not callable(fn):
        raise TypeError(f"launch runs a function, not a {type(fn).__name__}")
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"ranks is a number of processes, not {ranks!r}")
    most = MAX_SIMULATED if backend == "fake" else MAX_RANKS
    if not 1 <= ranks <= most:
        raise ValueError(f"ranks={ranks}: between 1 and {most:,} processes, please")
    if not 0 < timeout <= MAX_SECONDS:
        raise ValueError(
            f"timeout={timeout}: more than 0 and at most {MAX_SECONDS:,} seconds"
        )
    if threads < 1:
        raise ValueError(f"threads={threads}: each rank needs at least one")
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend={backend!r}: one of {', '.join(BACKENDS)}, or None")
    try:
        function, sources = pickling.dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"{getattr(fn, '__name__', fn)} or its arguments cannot be sent to another "
            f"process: {error}"
        ) from error
    return {
        "function": function,
        "sources": sources,
        "ranks": ranks,
        "timeout": float(timeout),
        "backend": backend,
        "check": check,
        "threads": threads,
        "start": "fork" if _can_fork() else "spawn",
        "cwd": os.getcwd(),
        "path": [entry or os.getcwd() for entry in sys.path],
        "argv": list(sys.argv),
        "environment": {
            "TORCH_FR_BUFFER_SIZE": "2000",  # NCCL keeps no record of calls otherwise
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
        },
    }


def _played(job: dict[str, Any], only: Sequence[int]) -> list[int]:
    """The ranks that really run."""
    ranks, played = job["ranks"], list(only)
    if job["backend"] != "fake":
        if played != [0]:
            raise ValueError('only=...: goes with backend="fake"; others run all ranks')
        return list(range(ranks))
    if job["check"]:
        raise ValueError('check=True: with backend="fake" there is nobody to compare')
    if not 1 <= len(set(played)) == len(played) <= MAX_RANKS:
        raise ValueError(f"only={only}: between 1 and {MAX_RANKS} different ranks")
    if outside := [rank for rank in played if not 0 <= rank < ranks]:
        raise ValueError(f"only={only}: {outside} are not in a world of {ranks}")
    return played


# ------------------------------------------------------------- the fork server


class _Server:
    """The handle of this process's fork server, started at the first launch."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.top: socket.socket | None = None
        self.owner = 0

    def connect(self) -> tuple[socket.socket, bool]:
        """A connection to a new supervisor, and whether the server is new too."""
        ours, theirs = socket.socketpair()
        with self.lock, theirs:
            started = not self._alive()
            top = self._start() if started else self.top
            assert top is not None
            with contextlib.suppress(OSError):  # the caller sees that nobody answers
                socket.send_fds(top, [b"+"], [theirs.fileno()])
        return ours, started

    def stop(self) -> None:
        """Forget a server that does not answer."""
        with self.lock:
            if self.process:
                self.process.kill()
                self.process.wait()

    def _alive(self) -> bool:
        mine = self.owner == os.getpid()  # not inherited by a fork of the caller
        return mine and self.process is not None and self.process.poll() is None

    def _start(self) -> socket.socket:
        self.top, theirs = socket.socketpair()
        self.process = _program("serve", theirs)
        self.owner = os.getpid()
        theirs.close()
        return self.top


def _can_fork() -> bool:
    """Whether a process that has loaded torch may be forked."""
    return sys.platform == "linux"


def _program(role: str, connection: socket.socket) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", server.__file__, role, str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **_QUIET},
    )


_QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "FATAL",  # what C++ would print of a lost rank, we explain
}
_server = _Server()


def _start(job: dict[str, Any]) -> tuple[socket.socket, Path]:
    """Start a supervisor with its job; returns the connection to it and its folder."""
    if sys.platform == "win32":
        raise OSError("launch needs Linux or macOS; on Windows use WSL")
    while True:
        caller, started = _connect()
        try:
            server.send(caller, job)
            return caller, Path(server.receive(caller))  # it has begun
        except (EOFError, OSError):
            caller.close()
            if started:  # a new server that does not answer: nothing more to try
                raise
            _server.stop()


def _connect() -> tuple[socket.socket, bool]:
    if _can_fork():
        return _server.connect()
    ours, theirs = socket.socketpair()
    with theirs:
        _program("supervise", theirs)
    return ours, True


# ------------------------------------------------------------------ the outcome


def _follow(caller: socket.socket, folder: Path, printer: "_Printer") -> Outcomes:
    while True:
        try:
            kind, *content = server.receive(caller)
        except (EOFError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise RankError(
                "the supervisor of the launch died, and its ranks with it", -1, "lost"
            ) from error
        if kind == "end":
            return content[0]
        printer.take(*content)


def _load(folder: Path, rank: int) -> Any:
    try:
        return pickle.loads((folder / f"result{rank}").read_bytes())[1]
    except Exception as error:
        kind = type(error).__name__
        text = f"what rank {rank} returned cannot be read here: {kind}: {error}"
        raise RankError(text, rank, kind) from error


class _Printer:
    """Prints rank 0 as it goes and keeps the lines of the others for the end."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.first = ranks[0]
        self.kept = {(r, s): bytearray() for r in ranks for s in _STREAMS}

    def take(self, rank: int, stream: str, data: bytes) -> None:
        buffer = self.kept[rank, stream]
        buffer += data
        if rank == self.first:
            end = max(buffer.rfind(b"\n"), buffer.rfind(b"\r")) + 1
            _write(stream, bytes(buffer[:end]))
            del buffer[:end]

    def close(self) -> None:
        for (rank, stream), data in self.kept.items():
            if rank != self.first:
                for line in bytes(data).splitlines(keepends=True):
                    _write(stream, b"[rank %d] " % rank + line.rstrip(b"\n") + b"\n")
            else:
                _write(stream, bytes(data))


_STREAMS = ("stdout", "stderr")


def _write(stream: str, data: bytes) -> None:
    if data:
        target = getattr(sys, stream)
        target.write(data.decode(errors="replace"))
        target.flush()


def _raise_failure(
    outcomes: Outcomes, ranks: int, timeout: float, folder: Path
) -> None:
    """Raise what went wrong, by its cause: a signal, an exception, a stall."""
    dead = {r: o["exit"] for r, o in outcomes.items() if _died(o)}
    failed = {r: o["failed"] for r, o in outcomes.items() if "failed" in o}
    causes = {
        r: f
        for r, f in failed.items()
        if not f[1]["lost_connection"] and not f[1]["timed_out"]
    }
    signals = {r: code for r, code in dead.items() if code < 0}
    if signals:
        rank = min(signals)
        name = signal.Signals(-signals[rank]).name
        text = f"was killed by {_meaning(name)}{_late(outcomes[rank])}"
        _raise_death(outcomes, ranks, rank, name, text, folder)
    if causes:
        _raise_exception(outcomes, ranks, min(causes, key=lambda r: causes[r][0]))
    if dead:
        rank, code = min(dead.items())
        late = _late(outcomes[rank]) or " before its function returned"
        text = f"left with exit code {code}{late}"
        _raise_death(outcomes, ranks, rank, f"exit {code}", text, folder)
    if any("stalled" in o for o in outcomes.values()) or any(
        f[1]["timed_out"] for f in failed.values()
    ):
        _raise_stall(outcomes, timeout)
    if failed:
        _raise_exception(outcomes, ranks, min(failed, key=lambda r: failed[r][0]))


def _died(outcome: dict[str, Any]) -> bool:
    return "exit" in outcome and "failed" not in outcome


def _late(outcome: dict[str, Any]) -> str:
    returned = "ok" in outcome
    return " after its function had returned, while others still ran" * returned


def _meaning(name: str) -> str:
    more = {"SIGKILL": " (kill -9, or the system ran out of memory)"}
    return name + more.get(name, "")


def _raise_exception(outcomes: Outcomes, ranks: int, rank: int) -> None:
    failure = outcomes[rank]["failed"][1]
    what = ": ".join(filter(None, (failure["type"], failure["message"])))
    raise RankError(
        f"rank {rank} of {ranks} raised {what}",
        rank,
        failure["type"],
        failure["traceback"],
        _others(outcomes, rank),
    )


def _raise_death(
    outcomes: Outcomes, ranks: int, rank: int, cause: str, text: str, folder: Path
) -> None:
    raise RankError(
        f"rank {rank} of {ranks} {text}",
        rank,
        cause,
        _last_position(folder / f"fault{rank}"),
        _others(outcomes, rank),
    )


def _raise_stall(outcomes: Outcomes, timeout: float) -> None:
    from minitrain.runtime import stall

    reports = {
        r: (o.get("stalled") or o.get("report") or (0, None))[1]
        for r, o in outcomes.items()
    }
    known = {r: report for r, report in reports.items() if report}
    waiting = {r: _doing(o) for r, o in outcomes.items()}
    headline = f"no message came within {timeout:g} s"
    raise StallError(headline, waiting, stall.explain(known))


def _last_position(fault: Path) -> str:
    """The user's Python lines at a crash, from what faulthandler left behind."""
    text = fault.read_text(errors="replace") if fault.exists() else ""
    _, found, lines = text.partition("Current thread")
    frames = lines.splitlines()[1:] if found else []
    here = str(Path(__file__).parent)
    users = [
        re.sub(r'"[^"]*/', '"', frame)
        for frame in frames
        if frame.startswith("  File") and here not in frame
    ]
    return "\n".join(["The crash, innermost line first:", *users]) if users else ""


def _others(outcomes: Outcomes, cause: int) -> dict[int, str]:
    return {r: _doing(o) for r, o in outcomes.items() if r != cause}


def _doing(outcome: dict[str, Any]) -> str:
    if "failed" in outcome:
        failure = outcome["failed"][1]
        if failure["lost_connection"]:
            return "lost its connection to a peer"
        first = failure["message"].strip().partition("\n")[0]
        return "raised " + ": ".join(filter(None, (failure["type"], first)))
    for kind in ("stalled", "report"):
        if kind in outcome:
            return str(outcome[kind][1])
    if "ok" in outcome:
        return "has finished"
    if "exit" in outcome:
        return f"has left with exit code {outcome['exit']}"
    return "gave no answer: it is busy outside Python"
