r"""The fork server: a warm process from which the ranks of every launch are forked.

Importing torch takes seconds, forking a process that has imported it takes
milliseconds. So the first launch starts one server, which imports torch and then
waits; each launch gets a supervisor forked from it, and the supervisor forks the
ranks::

    caller ----> server ----> supervisor ----> rank 0, rank 1, ...
       \______________________/    (one socket for each launch)

Whoever dies takes the rest along. When the caller goes, however it goes, the
supervisor reads an end of file and kills its ranks. When the supervisor goes, the
kernel kills the ranks. The server is single-threaded and never imports minitrain
or the user's code: the ranks do, each time, so that edits take effect.

This file runs as a program, by its path, and imports nothing of the package. Where
``fork`` is unsafe (not Linux) each rank is a new interpreter instead; everything
else is the same.
"""

import contextlib
import ctypes
import os
import pickle
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

GRACE_SECONDS = 0.5  # what a failing launch waits for the reports of the other ranks
LOST_SECONDS = 0.15  # what it waits, at least, for the death behind a lost connection
PR_SET_PDEATHSIG = 1


# --------------------------------------------------------------- framed messages


def send(connection: socket.socket, message: Any) -> None:
    """Send one message: its length in eight bytes, then its pickle."""
    body = pickle.dumps(message, protocol=5)
    connection.sendall(struct.pack("<Q", len(body)) + body)


def receive(connection: socket.socket) -> Any:
    """Receive one message sent by :func:`send`; raises EOFError at the end."""
    (length,) = struct.unpack("<Q", _exactly(connection, 8))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the other side has closed the connection")
        view = view[got:]
    return data


# ------------------------------------------------------------------------ server


def serve(top: socket.socket) -> None:
    """Fork a supervisor for each connection that arrives on ``top``."""
    _warm_up()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors leave no zombies
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(top, 1, 1)
        except OSError:
            return
        if not message:
            return  # the caller has gone
        server = os.getpid()
        if os.fork() == 0:
            top.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with_parent(server)
            with contextlib.suppress(EOFError, OSError):
                Supervisor(socket.socket(fileno=descriptors[0])).run()
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _warm_up() -> None:
    """Import what every rank needs, with the parts that torch imports lazily."""
    import cloudpickle  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.testing._internal.distributed.fake_pg

    torch.set_num_threads(1)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


# -------------------------------------------------------------------- supervisor


class Supervisor:
    """Starts the ranks of one launch, watches them, and ends them.

    To the caller go ``("output", rank, stream, bytes)`` as it comes, and at the end
    one ``("end", outcomes)``, by rank. An outcome is a dict with any of the keys
    ``ok``, ``failed``, ``stalled``, ``report`` (as the rank sent them, with the time)
    and ``exit`` (the code with which it left too early; negative: the signal).
    """

    def __init__(self, caller: socket.socket) -> None:
        self.caller = caller
        self.job = receive(caller)
        self.folder = tempfile.mkdtemp(prefix="minitrain-")
        self.selector = selectors.DefaultSelector()
        self.controls: dict[int, socket.socket] = {}
        self.alive: dict[int, int] = {}  # pid -> rank
        self.outcomes: dict[int, dict[str, Any]] = {r: {} for r in self.job["played"]}
        self.ending_since: float | None = None
        self.released = False

    def run(self) -> None:
        """Run the launch to its end; nothing of it is left when this returns."""
        try:
            send(self.caller, self.folder)  # the caller may have gone while we started
            for rank in self.outcomes:
                self._start(rank)
            self.selector.register(self.caller, selectors.EVENT_READ, ("caller", 0))
            while not self._over():
                self._step()
            self._kill()
            self._drain()
            send(self.caller, ("end", self.outcomes))
            with contextlib.suppress(EOFError, OSError):
                receive(self.caller)  # the caller closes when it has read the results
        finally:
            self._kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- starting

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        pipes = {"stdout": os.pipe(), "stderr": os.pipe()}
        if self.job["start"] == "fork":
            pid = self._fork(rank, theirs, pipes)
        else:
            pid = self._spawn(rank, theirs, pipes)
        theirs.close()
        if self.job["start"] == "spawn":
            send(ours, (rank, self.job, self.folder))
        self.alive[pid] = rank
        self.controls[rank] = ours
        self.selector.register(ours, selectors.EVENT_READ, ("control", rank))
        for stream, (read_end, write_end) in pipes.items():
            os.close(write_end)
            self.selector.register(read_end, selectors.EVENT_READ, (stream, rank))

    def _fork(self, rank: int, control: socket.socket, pipes: dict) -> int:
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        _die_with_parent(supervisor)
        os.dup2(pipes["stdout"][1], 1)
        os.dup2(pipes["stderr"][1], 2)
        keep = {0, 1, 2, control.fileno()}
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in keep:
                with contextlib.suppress(OSError):
                    os.close(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            run_rank(rank, self.job, control, self.folder)
        finally:
            os._exit(1)

    def _spawn(self, rank: int, control: socket.socket, pipes: dict) -> int:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, "rank", str(control.fileno())],
            pass_fds=[control.fileno()],
            stdout=pipes["stdout"][1],
            stderr=pipes["stderr"][1],
            start_new_session=True,
        )
        process.returncode = 0  # it is reaped with the others, not by subprocess
        return process.pid

    # ---- watching

    def _over(self) -> bool:
        if not self.alive:
            return True
        if self.ending_since is None:
            return False
        waited = time.monotonic() - self.ending_since
        told = all(self.outcomes.values())
        return waited > GRACE_SECONDS or (told and waited > LOST_SECONDS)

    def _step(self) -> None:
        for key, _ in self.selector.select(0.02):
            what, rank = key.data
            if what == "caller":
                raise EOFError("the caller has gone")
            if what == "control":
                self._hear(rank, key.fileobj)
            else:
                self._forward(rank, what, key.fileobj)
        self._reap()
        every = self.outcomes.values()
        if not self.released and all("ok" in outcome for outcome in every):
            self.released = True  # nobody leaves before all are done
            self._tell("leave")

    def _hear(self, rank: int, control: Any) -> None:
        try:
            kind, content = receive(control)
        except (EOFError, OSError):
            self.selector.unregister(control)
            return
        self.outcomes[rank].setdefault(kind, (time.time(), content))
        if kind in ("failed", "stalled"):
            self._begin_to_end()

    def _forward(self, rank: int, stream: str, pipe: Any) -> None:
        data = os.read(pipe, 1 << 16)
        if data:
            send(self.caller, ("output", rank, stream, data))
        else:
            self.selector.unregister(pipe)
            os.close(pipe)

    def _reap(self) -> None:
        for pid, rank in list(self.alive.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self.alive[pid]
            _kill_group(pid)  # what the rank has started itself
            if not self.released:
                self.outcomes[rank]["exit"] = os.waitstatus_to_exitcode(status)
                self._begin_to_end()

    # ---- ending

    def _begin_to_end(self) -> None:
        if self.ending_since is None:
            self.ending_since = time.monotonic()
            self._tell("report")

    def _tell(self, word: str) -> None:
        for control in self.controls.values():
            with contextlib.suppress(OSError):
                send(control, word)

    def _kill(self) -> None:
        for pid in self.alive:
            _kill_group(pid)
        for pid in self.alive:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.alive.clear()

    def _drain(self) -> None:
        """Forward what the ranks have written and nobody has read."""
        for key in list(self._pipes()):
            os.set_blocking(key.fd, False)
            with contextlib.suppress(BlockingIOError):
                while data := os.read(key.fd, 1 << 16):
                    stream, rank = key.data[0], key.data[1]
                    send(self.caller, ("output", rank, stream, data))

    def _pipes(self) -> Iterator[selectors.SelectorKey]:
        for key in self.selector.get_map().values():
            if key.data[0] in ("stdout", "stderr"):
                yield key


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def run_rank(rank: int, job: dict, control: socket.socket, folder: str) -> None:
    """Become a rank: take on the caller's surroundings, then import the package."""
    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["argv"]
    os.environ.clear()
    os.environ.update(job["environment"])
    from minitrain.runtime.process import main

    main(rank, job, control, folder)


if __name__ == "__main__":
    role, connection = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    if role == "serve":
        serve(connection)
    elif role == "supervise":
        with contextlib.suppress(EOFError, OSError):
            Supervisor(connection).run()
    else:
        rank, job, folder = receive(connection)
        run_rank(rank, job, connection, folder)
