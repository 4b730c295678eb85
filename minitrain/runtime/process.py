"""What one rank of a launch does: join the group, run the function, report.

The main thread runs the user's function. A helper thread answers the supervisor,
and says so when the main thread has waited for a message longer than the timeout.
"""

import datetime
import faulthandler
import io
import linecache
import os
import pickle
import re
import select
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minitrain.runtime import fake, pickling, server, stall

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
OWN = (__file__, fake.__file__)
INSTALLED = os.path.dirname(os.path.dirname(torch.__file__))


def main(rank: int, job: dict, control: socket.socket, folder: str) -> NoReturn:
    """Run the job's function as ``rank``; never returns."""
    _open_streams()
    fault = open(os.path.join(folder, f"fault{rank}"), "w")  # noqa: SIM115
    faulthandler.enable(fault)
    torch.set_num_threads(job["threads"])
    pickling.restore(job["sources"])
    helper = Helper(control, job["timeout"])
    status = 0
    try:
        _join(rank, job, folder)
        helper.start()
        function, arguments = pickle.loads(job["function"])
        if job["backend"] == "fake":
            function = fake.player(function)
        _save(function(*arguments), os.path.join(folder, f"result{rank}"))
        helper.finish()
    except BaseException as error:
        helper.say("failed", describe(error))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    helper.leave.wait()  # peers may still be talking to this rank
    os._exit(status)


def _open_streams() -> None:
    """Text on the pipes to the supervisor, passed on line by line."""
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), "utf-8", write_through=True)


def _join(rank: int, job: dict, folder: str) -> None:
    from minitrain.runtime import group

    if job["backend"] == "fake":
        fake.join(rank, job["ranks"])
        return
    if job["check"]:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.FileStore(os.path.join(folder, "store"), job["ranks"])
    # The helper thread speaks at the timeout, gloo a little later, should it fail to.
    timeout = datetime.timedelta(seconds=job["timeout"] * 1.2 + 2.0)
    group.join(job["backend"], store, rank, job["ranks"], timeout)


def _save(result: Any, path: str) -> None:
    try:
        data, _ = pickling.dumps((_returned, result))
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"a {kind} cannot be returned from a rank: {error}") from error
    with open(path, "wb") as file:
        file.write(data)


def _returned() -> None:
    """Stands for the function in a pickled result."""


# --------------------------------------------------------------------- helper


class Helper(threading.Thread):
    """Answers the supervisor while the main thread runs or blocks."""

    def __init__(self, control: socket.socket, timeout: float) -> None:
        super().__init__(daemon=True, name="minitrain-helper")
        self.leave = threading.Event()
        self._control = control
        self._timeout = timeout
        self._sending = threading.Lock()
        self._finished = False
        self._recorder = stall.Recorder()
        self._position: tuple = ()
        self._still_since = time.monotonic()

    def run(self) -> None:
        """Serve the supervisor until it says that this rank may leave."""
        pause = min(0.25, self._timeout / 10)
        try:
            while True:
                if select.select([self._control], [], [], pause)[0]:
                    word = server.receive(self._control)
                    if word == "leave":
                        return self.leave.set()
                    self.say("report", self.report())
                elif self._stalled():
                    self.say("stalled", self.report())
        except (EOFError, OSError):
            os._exit(1)  # the supervisor has gone

    def say(self, kind: str, content: Any) -> None:
        """Send one message to the supervisor."""
        with self._sending:
            server.send(self._control, (kind, content))

    def finish(self) -> None:
        """Say that the function has returned and its result is saved."""
        self._finished = True
        self.say("ok", None)

    def report(self) -> stall.Report:
        """What the main thread is doing now."""
        place = stall.users_line(stall.main_frame())
        passed = stall.passed()
        if self._finished:
            return stall.Report(place=place, finished=True, passed=passed)
        return stall.Report(self._recorder.waits(), place, passed=passed)

    def _stalled(self) -> bool:
        """Whether the main thread stands still in a message beyond the timeout."""
        now, place = time.monotonic(), stall.position(stall.main_frame())
        if self._finished or place != self._position:
            self._position, self._still_since = place, now
            return False
        if now - self._still_since < self._timeout:
            return False
        return any(w.seconds >= self._timeout for w in self._recorder.waits())


# ------------------------------------------------------------------ tracebacks


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as data: its type, its traceback, and whether a peer caused it."""
    text, message = "".join(_trace(error)), _message(error)
    if short := _mismatch(message):
        text, message = text.replace(message, short), short
    return {
        "type": type(error).__name__,
        "message": message,
        "traceback": text,
        "lost_connection": _lost_connection(error),
        "timed_out": _timed_out(error),
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "its own message cannot be made"


def _lost_connection(error: BaseException) -> bool:
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, (RuntimeError, OSError)) and any(
        word in _message(error) for word in words
    )


def _timed_out(error: BaseException) -> bool:
    words = (
        "Timed out waiting",
        "Watchdog caught",
        "failed to pass monitoredBarrier",
        "received errors while waiting for send/recv",
    )
    return isinstance(error, RuntimeError) and any(
        word in _message(error) for word in words
    )


def _mismatch(message: str) -> str | None:
    """Torch's words for two ranks in different collectives, made short."""
    calls = re.findall(
        r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, "
        r"OpType=(\w+)(?:, TensorShape=(\[[\d, ]*\]))?(?:, TensorDtypes=(\w+))?",
        message,
    )
    if "Detected mismatch between collectives" not in message or len(calls) < 2:
        return None
    (a, *first), (b, *second) = calls[:2]
    return f"rank {a} calls {_call(*first)}, but rank {b} calls {_call(*second)}"


def _call(operator: str, shape: str, dtype: str) -> str:
    tensor = f" on {stall.DTYPES.get(dtype, dtype.lower())}{shape}" if shape else ""
    return operator.lower() + tensor


def _trace(error: BaseException) -> list[str]:
    """Format a traceback without this machine's paths and this module's frames."""
    whole = traceback.TracebackException.from_exception(error)
    chain: list[Any] = [whole]
    while chain:
        part = chain.pop()
        part.stack = traceback.StackSummary.from_list(
            [_rename(f) for f in part.stack if f.filename not in OWN]
        )
        chain += [p for p in (part.__cause__, part.__context__) if p]
    return list(whole.format())


def _rename(frame: traceback.FrameSummary) -> Any:
    linecache.lazycache(frame.filename, {})
    _ = frame.line  # read the source before the file gets another name
    file = frame.filename
    for base in (INSTALLED, PACKAGE, os.getcwd()):
        if file.startswith(base + os.sep):
            frame.filename = os.path.relpath(file, base)
            break
    return frame
