"""How an exercise is judged: hidden cases, the reader's answer, one helpful line.

An exercise is a value: how to draw its cases, what is right for a case, and how to run
an answer on one. Nothing that the reader's function does gets out as an exception.
"""

import copy
import difflib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from minitrain.exercises.compare import difference, short
from minitrain.runtime.errors import RankError, StallError

Case = tuple[Any, ...]
CHAPTERS = Path(__file__).parent


class RefusedError(Exception):
    """Raised by a run: the answer may be right, and is not what was asked for."""


def call(answer: Callable[..., Any], case: Case) -> Any:
    """Call the reader's function with the arguments of the case, in this process."""
    return answer(*case)


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: What `check` is asked for.
        expected: The right result; its parameters name those of a case. With no
            parameters the exercise asks for a number, and the answer may be a number.
        cases: Draws the cases, the telling ones first; the generator is seeded.
        run: Runs an answer on a case; by default a plain call.
        tolerance: Largest relative difference between floating-point numbers.
        part: What an element of a list of results is called.
    """

    name: str
    expected: Callable[..., Any]
    cases: Callable[[random.Random], Iterable[Case]] = lambda draw: [()]
    run: Callable[[Callable[..., Any], Case], Any] = call
    tolerance: float = 1e-9
    part: str = "element"


@dataclass(frozen=True)
class Verdict:
    """What came of a check: whether it is solved, and the line to print."""

    solved: bool
    text: str


def check(name: str, answer: Any) -> None:
    """Print whether `answer` solves the exercise `name`, and if not, where it fails.

    Args:
        name: An exercise's name, as its text gives it.
        answer: Your function, or your number where the exercise asks for one. A stub
            (`None`, `...`, or a function that returns one of them or raises
            `NotImplementedError`) is not solved yet.
    """
    try:
        exercise = find(name)
    except ValueError as error:
        print(error)
        return
    print(f"{name}: {judge(exercise, answer).text}")


def find(name: str) -> Exercise:
    """The exercise of that name. Chapters are imported in order, up to the one.

    Raises:
        ValueError: No chapter has it; names the nearest ones.
    """
    names: list[str] = []
    for path in sorted(CHAPTERS.glob("chapter_*.py")):
        module = import_module(f"minitrain.exercises.{path.stem}")
        for exercise in module.EXERCISES:
            if exercise.name == name:
                return exercise
            names.append(exercise.name)
    near = difflib.get_close_matches(name, names) or names
    raise ValueError(f"there is no exercise '{name}'; is it {' or '.join(near)}?")


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """Try `answer` on every case of `exercise`, and stop at the first that fails."""
    if is_stub(answer):
        return Verdict(False, "not solved yet")
    function = answer if callable(answer) else lambda *_: answer
    count = 0
    for count, case in enumerate(_drawn(exercise), start=1):
        where = _words(exercise, case)
        try:
            got = exercise.run(function, copy.deepcopy(case))
        except (Exception, SystemExit) as error:
            if _unwritten(error):
                return Verdict(False, "not solved yet")
            if "RefusedError" in (type(error).__name__, getattr(error, "cause", "")):
                return Verdict(False, f"not yet: {_first_line(error)}{where}")
            return Verdict(False, f"your function raised {_reason(error)}{where}")
        if is_stub(got) or (isinstance(got, list) and got and all(map(is_stub, got))):
            text = "not solved yet" if count == 1 else f"got nothing{where}"
            return Verdict(False, text)
        expected = exercise.expected(*copy.deepcopy(case))
        if fault := _compared(got, expected, exercise):
            return Verdict(False, f"not yet: {fault}{where}")
    plural = "s" if count > 1 else ""
    return Verdict(True, f"solved ({count} case{plural})" if count > 1 else "solved")


def _compared(got: Any, expected: Any, exercise: Exercise) -> str:
    """The difference in words, also where the reader's value resists a comparison."""
    try:
        return difference(got, expected, exercise.tolerance, part=exercise.part)
    except Exception:
        return (
            f"expected {short(expected)}, and your {type(got).__name__} is not like it"
        )


def is_stub(value: Any) -> bool:
    """Whether `value` is what an exercise's cell holds before it is solved."""
    return value is None or value is ...


def _drawn(exercise: Exercise) -> Iterator[Case]:
    """The cases, the same each time, so that a reader can mend one after the other."""
    yield from exercise.cases(random.Random(exercise.name))


def _words(exercise: Exercise, case: Case) -> str:
    """The case as `for ranks=3, elements=5`."""
    names = inspect.signature(exercise.expected).parameters
    pairs = [f"{n}={short(v)}" for n, v in zip(names, case, strict=True)]
    return f", for {', '.join(pairs)}" if pairs else ""


def _unwritten(error: BaseException) -> bool:
    in_rank = isinstance(error, RankError) and "NotImplementedError" in error.cause
    return in_rank or isinstance(error, NotImplementedError)


def _reason(error: BaseException) -> str:
    """An exception in one line; of a launch, with the rank or who waits for whom."""
    first = _first_line(error)
    if isinstance(error, StallError):
        return " ".join([f"StallError ({first}).", *error.verdict])
    if isinstance(error, RankError) and error.cause == "SIGABRT":
        return (
            f"SIGABRT on rank {error.rank}: gloo ends a rank whose message has another "
            "size than expected; do all ranks make the same calls in one order?"
        )
    if isinstance(error, RankError):
        return f"{error.cause} on rank {error.rank} ({first})"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _first_line(error: BaseException) -> str:
    try:
        first = str(error).strip().partition("\n")[0]
    except Exception:
        return ""
    return first.partition("RefusedError: ")[2] or first
