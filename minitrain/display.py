"""What a notebook cell displays: source, and tables, as markdown and as text.

A bundle of `text/markdown` and `text/plain` is right in Jupyter and in the rendered
book, in light and in dark, and carries no memory address and no style sheet.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """Python source that displays itself, highlighted."""

    text: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict:
        return {
            "text/markdown": f"```python\n{self.text}\n```\n",
            "text/plain": self.text,
        }

    def __repr__(self) -> str:
        return self.text


def show(*objects: Any, docstring: bool = True) -> Source:
    """Display the source of functions, classes, methods or modules, as it runs.

    A comment before it names the file, for what is part of minitrain.

    Args:
        objects: What to show, in order.
        docstring: Whether to keep the docstrings; without them a line `...` tells
            that one was left out only where nothing else is in the body.

    Raises:
        TypeError: If an object has no Python source, such as a built-in or a value.
    """
    texts: list[str] = []
    last = ""
    for shown in objects:
        shown = inspect.unwrap(shown) if callable(shown) else shown
        try:
            text = inspect.getsource(shown)
        except (OSError, TypeError) as error:
            raise TypeError(
                f"{shown!r} has no Python source to show: give a function, a class,"
                " a method or a module"
            ) from error
        text = textwrap.dedent(text).strip("\n")
        text = text if docstring else _without_docstrings(text)
        file = _own_file(shown)
        texts.append(f"# {file}\n\n{text}" if file not in ("", last) else text)
        last = file
    return Source("\n\n\n".join(texts))


def _own_file(shown: Any) -> str:
    """The file of a part of minitrain, as `minitrain/runtime/server.py`."""
    module = inspect.getmodule(shown)
    name = module.__name__ if module else ""
    return f"{name.replace('.', '/')}.py" if name.startswith("minitrain.") else ""


def _without_docstrings(text: str) -> str:
    lines = text.splitlines()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False):
            first, only = node.body[0], len(node.body) == 1
            start, end = first.lineno - 1, first.end_lineno or first.lineno
            indent = " " * first.col_offset
            lines[start:end] = [indent + "..." if only else "\0"] + ["\0"] * (
                end - start - 1
            )
            if end < len(lines) and not lines[end].strip():
                lines[end] = "\0"  # the empty line after it
    return "\n".join(line for line in lines if line != "\0")


@dataclass(frozen=True)
class Table:
    """A small table of text cells: markdown in a notebook, aligned columns as text.

    Columns of numbers are aligned right.

    Attributes:
        columns: Their names.
        rows: One text a column; numbers should already be rounded, with their unit.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"a row of {len(row)} cells in a table of {len(self.columns)}"
                    f" columns: {list(row)}"
                )

    @property
    def markdown(self) -> str:
        """The table in markdown."""
        bars = ["---:" if right else ":---" for right in self._right()]
        lines = [self.columns, bars, *self.rows]
        return "\n".join(
            "| " + " | ".join(c.replace("|", r"\|") for c in line) + " |"
            for line in lines
        )

    @property
    def text(self) -> str:
        """The table as aligned columns."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        right = self._right()
        return "\n".join(
            "  ".join(
                c.rjust(w) if r else c.ljust(w)
                for c, w, r in zip(line, widths, right, strict=True)
            ).rstrip()
            for line in lines
        )

    def _right(self) -> list[bool]:
        columns = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        return [
            any(column) and all(map(_is_number, set(column) - {"", "-"}))
            for column in columns
        ]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict:
        return {"text/markdown": self.markdown, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text


def _is_number(cell: str) -> bool:
    """Whether a cell begins as a number does, with a sign or without."""
    return cell.lstrip("+-−")[:1].isdigit()


def bytes_text(count: float) -> str:
    """A number of bytes in binary units, exact below 10 KiB: `512 B`, `1.5 MiB`."""
    if abs(count) < 10 * 1024:
        return f"{count:,.0f} B"
    units = iter(("KiB", "MiB", "GiB", "TiB", "PiB"))
    count, unit = count / 1024, next(units)
    while abs(count) >= 1024 and unit != "PiB":
        count, unit = count / 1024, next(units)
    decimals = 2 if abs(count) < 10 else 1 if abs(count) < 100 else 0
    return f"{count:,.{decimals}f} {unit}"
