"""How answers look: rich tables with bars, on a terminal of any width."""

import sys
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDEST = 100
LONGEST_BAR = 30


def console() -> Console:
    """Of standard output; a page is no wider than 100 columns."""
    made = Console(highlight=False, emoji=False, markup=False)
    made.width = min(made.width, WIDEST) if made.is_terminal else WIDEST
    return made


def complain(error: object) -> int:
    """One line on standard error; returns the exit code of a wrong question."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def heading(text: str, under: str = "") -> RenderableType:
    """A bold line, and a plain one below it."""
    lines = [Text(text, style="bold")]
    return Group(*lines, Text(under)) if under else lines[0]


def amounts(
    title: str,
    rows: Mapping[str, float],
    texts: Mapping[str, str],
    whole: float,
    out: Console,
) -> Table:
    """Parts of a whole, each with its amount, its share and a bar.

    Args:
        title: Of the table.
        rows: Amounts by name; what rounds to nothing is left out.
        texts: The amounts in words.
        whole: What the shares are of; the longest bar stands for it.
        out: Where it is printed: bars fill its width, and are of # where it has no
            blocks.
    """
    kept = {name: a for name, a in rows.items() if abs(a / whole) >= 5e-4}
    wide = max(map(len, kept), default=0) + max(map(len, texts.values())) + 16
    longest = max(0, min(LONGEST_BAR, out.width - wide))
    unit = longest / max([whole, *kept.values()])
    block = "█" if "utf" in out.encoding.lower() else "#"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.show_header = False
    for justify in ("left", "right", "right", "left"):
        table.add_column("", justify=justify, no_wrap=True)
    for name, amount in kept.items():
        bar = block * round(unit * max(amount, 0))
        table.add_row(name, texts[name], f"{amount / whole:.1%}", bar)
    return table


def pairs(rows: Mapping[str, str]) -> Table:
    """Names and values in two columns."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def seconds_text(seconds: float) -> str:
    """Three figures with a unit: 12.4 s, 124 ms."""
    unit, size = ("s", 1.0) if abs(seconds) >= 1 else ("ms", 1e-3)
    count = seconds / size
    decimals = 2 if abs(count) < 10 else 1 if abs(count) < 100 else 0
    return f"{count:,.{decimals}f} {unit}"


def gib_text(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:,.1f} GiB"
