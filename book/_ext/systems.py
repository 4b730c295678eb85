"""The survey map: `book/systems.csv` as a table of checked references.

Each row ties a system to the survey's section, its paper, the chapter that explains it,
the function that does it and the test that proves it. A row that names something that
is not there is a warning, which the build of this book makes an error.
"""

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

COLUMNS = ("system", "section", "paper", "chapter", "symbol", "test")
SECTION = re.compile(r"[1-9](\.[1-9])*")
logger = logging.getLogger(__name__)


def functions(path: Path) -> set[str]:
    """The names of the test functions that `path` defines, in classes or outside."""
    tree = ast.parse(path.read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def faults(row: dict[str, str], root: Path) -> Iterator[str]:
    """What is wrong with a row, as far as no reference role would notice."""
    if set(row) != set(COLUMNS) or not all(row.values()):
        yield f"wants one value in each of {', '.join(COLUMNS)}"
        return
    if not SECTION.fullmatch(row["section"]):
        yield f"'{row['section']}' is no section of the survey"
    file, _, name = row["test"].partition("::")
    path = root / file
    if not path.is_file():
        yield f"there is no test file '{file}'"
    elif name.split("::")[-1] not in functions(path):
        yield f"'{file}' has no test '{name}'"


def cells(row: dict[str, str]) -> list[str]:
    """The MyST text of a row's cells."""
    test = row["test"].partition("::")[2] or row["test"]
    return [
        row["system"],
        row["section"],
        f"{{cite:t}}`{row['paper']}`",
        f"{{doc}}`/notebooks/{row['chapter']}`",
        f"{{py:obj}}`~{row['symbol']}`",
        f"`{test}`",
    ]


class Systems(SphinxDirective):
    """`{systems}`: the table of every row of `book/systems.csv`."""

    def run(self) -> list[nodes.Node]:
        """Check the rows, and let MyST resolve their references."""
        root = Path(self.env.srcdir)
        path = root / "book" / "systems.csv"
        self.env.note_dependency(str(path))
        text = [":::{list-table}", ":header-rows: 1", ":class: searchable", ""]
        text += self.item(["System", "Section", "Paper", "Chapter", "Function", "Test"])
        seen: set[str] = set()
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                wrong = list(faults(row, root))
                if row["system"] in seen:
                    wrong.append(f"'{row['system']}' stands in two rows")
                seen.add(row["system"])
                for fault in wrong:
                    logger.warning("%s", fault, location=(str(path), number))
                if not wrong:
                    text += self.item(cells(row))
        box = nodes.container(classes=["survey-map"])
        source = StringList([*text, ":::"], str(path))
        self.state.nested_parse(source, self.content_offset, box)
        return [box]

    @staticmethod
    def item(texts: list[str]) -> list[str]:
        """A row of a list-table."""
        return [f"{'* ' if i == 0 else '  '}- {t}" for i, t in enumerate(texts)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("systems", Systems)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
