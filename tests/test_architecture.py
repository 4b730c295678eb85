"""The rules by which the house is built, read off its source.

Each rule is a function from source to faults. It is run on the whole library, and on a
few lines that break it: a rule that accepts those would hold nothing up.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "minitrain").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))

# Parts from the ground up; a part imports itself and what stands above it in this list.
LAYERS = (
    "display",
    "viz",
    "runtime",
    "workload",
    "invariants",
    "collectives",
    "simulate",
    "testing",
    "parallel",
    "ledger",
    "options",
    "progress",
    "commands",
    "trainer",
    "train",
    "exercises",
)
# The chapter in which a part is made; the others belong to every chapter.
CHAPTER = {
    "runtime": 1,
    "workload": 2,
    "trainer": 2,
    "train": 2,
    "collectives": 3,
    "parallel": 5,
}
MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 70
MUTATORS = {"append", "extend", "add", "update", "setdefault", "pop", "clear", "insert"}
SERVER_HANDLE = {"launcher.py", "server.py"}


def part(path: Path) -> str:
    """The part of the library that a file belongs to: a package, or a module."""
    inside = path.relative_to(ROOT / "minitrain").parts
    return inside[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and full names of what is imported from minitrain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "minitrain":
            names = [f"minitrain.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        yield from ((node.lineno, n) for n in names if n.startswith("minitrain."))


def home(name: str) -> str:
    """The part that a name of minitrain is in; names it re-exports are of runtime."""
    first = name.split(".")[1]
    exported = {"show": "display", "check": "exercises"}
    return first if first in LAYERS else exported.get(first, "runtime")


# ---- imports ----


def upward(own: str, source: str) -> list[str]:
    """Imports from a part that stands higher than `own`."""
    if own == "__init__":  # lazy: it names the parts, and imports none
        return []
    return [
        f"line {line}: minitrain.{own} imports {name}"
        for line, name in imports(ast.parse(source))
        if LAYERS.index(home(name)) > LAYERS.index(own)
    ]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.stem)
def test_imports_run_downward(path):
    assert part(path) in (*LAYERS, "__init__", "__main__"), "give the part its layer"
    own = "train" if part(path) == "__main__" else part(path)
    assert upward(own, path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "from minitrain.workload.model import Transformer",
        "def f():\n    import minitrain.train",
        "from minitrain import train",
        "from minitrain.exercises import check",
    ],
)
def test_an_upward_import_is_seen(line):
    assert upward("runtime", line)
    assert not upward("exercises", line)


# ---- hidden channels ----


def environment_reads(source: str) -> list[int]:
    """Lines that touch the environment."""
    words = re.compile(r"\bos\.(environ|getenv|putenv)\b|\bfrom os import .*environ")
    return [i for i, line in enumerate(source.split("\n"), 1) if words.search(line)]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.stem)
def test_the_environment_is_read_in_runtime_only(path):
    assert part(path) == "runtime" or environment_reads(path.read_text()) == []


@pytest.mark.parametrize(
    "line", ["x = os.environ['A']", "os.getenv('A')", "from os import path, environ"]
)
def test_a_read_of_the_environment_is_seen(line):
    assert environment_reads(line) == [1]


def module_state(source: str) -> list[str]:
    """Names of a module that code changes after it was imported."""
    tree = ast.parse(source)
    made = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made |= {t.id for t in targets if isinstance(t, ast.Name)}
    changed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            changed |= changed_by(node)
    return sorted(changed & made)


def changed_by(function: ast.AST) -> set[str]:
    """Names that a function declares global, or changes without having made them."""
    nodes = list(ast.walk(function))
    names = [n for n in nodes if isinstance(n, ast.Name)]
    local = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    local |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    declared, changed = set(), set()
    for node in nodes:
        match node:
            case ast.Global(names=some):
                declared |= set(some)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                changed.add(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Del()):
                changed.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=verb)):
                changed |= {name} if verb in MUTATORS else set()
    return declared | (changed - local)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.stem)
def test_modules_keep_no_state(path):
    assert path.name in SERVER_HANDLE or module_state(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "CACHE = {}\ndef f(k):\n    CACHE[k] = 1",
        "seen = []\ndef f(x):\n    seen.append(x)",
        "_group = None\ndef f(g):\n    global _group\n    _group = g",
        "state: dict = {}\ndef f():\n    del state['a']",
    ],
)
def test_state_of_a_module_is_seen(source):
    assert module_state(source)
    assert not module_state("TABLE = {'a': 1}\ndef f(k):\n    x = []\n    x.append(k)")


# ---- sizes ----


def too_long(source: str) -> list[str]:
    """Functions that do not fit a screen, and a file that holds two ideas."""
    found = [
        f"{node.name}: {size} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or 0) - node.lineno + 1)
        > MOST_LINES_OF_A_FUNCTION
    ]
    lines = source.count("\n")
    return found + ([f"file: {lines} lines"] if lines > MOST_LINES_OF_A_FILE else [])


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.stem)
def test_pieces_are_small(path):
    assert too_long(path.read_text()) == []


def test_a_long_piece_is_seen():
    assert too_long("def f():\n" + "    x = 1\n" * 70) == ["f: 71 lines"]
    assert too_long("x = 1\n" * 451) == ["file: 451 lines"]
    assert too_long("def f():\n" + "    x = 1\n" * 69) == []


# ---- what a reader is told ----


def undocumented(source: str) -> list[str]:
    """Public functions, classes and methods without docstring or without types."""
    found = []

    def visit(body: list[ast.stmt], inside: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    found.append(f"{inside}{node.name}: no docstring")
                visit(node.body, f"{inside}{node.name}.")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.extend(told(node, inside))

    visit(ast.parse(source).body, "")
    return found


def told(node: ast.FunctionDef | ast.AsyncFunctionDef, inside: str) -> Iterator[str]:
    if node.name.startswith("_"):
        return
    name = inside + node.name
    if not ast.get_docstring(node):
        yield f"{name}: no docstring"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for argument in arguments:
        if argument.annotation is None and argument.arg not in ("self", "cls"):
            yield f"{name}: no type for {argument.arg}"
    if node.returns is None:
        yield f"{name}: no type for what it returns"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.stem)
def test_the_public_interface_is_documented(path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), "say the module's idea"
    assert undocumented(source) == []


def test_a_missing_docstring_or_type_is_seen():
    assert undocumented("def f(x: int) -> int:\n    return x") == ["f: no docstring"]
    assert undocumented("def f(x) -> int:\n    'Do.'") == ["f: no type for x"]
    assert undocumented("class A:\n    'A.'\n    def f(self) -> int: ...")
    assert not undocumented("def _f(x): ...")


# ---- notebooks ----


def code_of(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(c.source for c in cells if c.cell_type == "code")


def from_later_chapters(chapter: int, source: str) -> list[str]:
    """Imports of what a later chapter makes."""
    return [
        f"line {line}: {name}"
        for line, name in imports(ast.parse(source))
        if CHAPTER.get(home(name), 0) > chapter
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_chapter_uses_nothing_of_a_later_one(path):
    assert from_later_chapters(int(path.name[:2]), code_of(path)) == []


def test_every_chapter_has_its_exercises(root):
    for path in (root / "minitrain" / "exercises").glob("chapter_*.py"):
        chapter = int(path.stem.removeprefix("chapter_"))
        assert from_later_chapters(chapter, path.read_text()) == []


def test_a_use_of_a_later_chapter_is_seen():
    line = "from minitrain.workload.model import Transformer"
    assert from_later_chapters(1, line)
    assert not from_later_chapters(2, line)
