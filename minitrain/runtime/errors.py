"""How a launch fails: by a rank that raised or died, or by ranks that wait in vain."""

from collections.abc import Mapping


class LaunchError(RuntimeError):
    """A launch that did not return; the message says why."""


class RankError(LaunchError):
    """A rank raised an exception or died.

    Attributes:
        rank: The rank that was the cause.
        cause: The exception's type, or the signal's name (``SIGKILL``).
        traceback: Where it was raised, with the source lines; empty for a signal.
        others: What each of the other ranks was doing.
    """

    def __init__(
        self,
        headline: str,
        rank: int,
        cause: str,
        traceback: str = "",
        others: Mapping[int, str] | None = None,
    ) -> None:
        self.rank = rank
        self.cause = cause
        self.traceback = traceback
        self.others = dict(others or {})
        parts = [headline, traceback.rstrip()]
        if self.others:
            parts.append("The other ranks:\n" + _rows(self.others))
        super().__init__("\n".join(part for part in parts if part))


class StallError(LaunchError):
    """The ranks wait for messages that will not come.

    Attributes:
        waiting: What each rank waits in, and where in the user's code.
        verdict: The disagreement, in one sentence for each.
    """

    def __init__(
        self, headline: str, waiting: Mapping[int, str], verdict: list[str]
    ) -> None:
        self.waiting = dict(waiting)
        self.verdict = list(verdict)
        super().__init__("\n".join([headline, _rows(waiting), *verdict]))


def _rows(texts: Mapping[int, str]) -> str:
    return "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(texts.items()))
