"""A dataclass from its defaults, then from files, then from the command line."""

import contextlib
import io
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def parse(
    kind: type[T], args: Sequence[str], *bases: Mapping[str, Any], prog: str = ""
) -> T:
    """A `kind` whose fields come from `bases`, then from `args`; the last one wins.

    Every source goes through the same parser, so a wrong name or value is refused in
    the same words wherever it stands. `--help` prints the fields and leaves.

    Raises:
        ValueError: an option that does not exist, or a value that does not fit it.
    """
    value = kind()
    for base in bases:
        value = _parse(kind, _flags(base), value, prog)
    return _parse(kind, args, value, prog)


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a TOML file.

    Raises:
        ValueError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _flags(values: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in values.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-"):  # as a word of its own it were another option
            flags.append(f"--{name}={value}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def _parse(kind: type[T], args: Sequence[str], default: T, prog: str) -> T:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=args, default=default, prog=prog)
    except SystemExit as end:
        if not end.code:
            raise  # help was asked for, and given
        raise ValueError(_one_line(said.getvalue())) from None


def _one_line(report: str) -> str:
    """The sentence in tyro's framed report, without title, frame and help."""
    lines = [line.strip(" │╭╮╰╯") for line in report.splitlines()]
    sentence: list[str] = []
    for line in [line for line in lines if line.strip("─-")][1:]:
        if line.startswith(("Argument helptext", "For full helptext")):
            break
        sentence.append(line.replace("Perhaps you meant", "; perhaps you meant"))
    return " ".join(sentence).replace(" ;", ";") or "the options make no sense"
