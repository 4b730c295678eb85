"""Run again the notebooks that changed, in place.

A notebook is stale when its code, or a file of minitrain that its kernel imported, is
not what it was when the outputs were made. A fingerprint of both stands in the
notebook's metadata, beside the seconds that the run took.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
CELL_SECONDS = 120
CHAPTER_SECONDS = 60
KEPT = ("tags", "mystnb", "jupyter")  # what a cell's metadata may hold
PROBE = """import json, sys
print(json.dumps(sorted(m for m in sys.modules if m.split(".")[0] == "minitrain")))
"""
ADDRESS = re.compile(r"0x[0-9a-f]{8,}")


class RefusedError(RuntimeError):
    """A run whose outputs cannot be stored; the message says which cell and why."""


# ---- what a notebook stands on ----


def fingerprint(notebook: Any, modules: Iterable[str], root: Path = ROOT) -> str:
    """A hash of the notebook's code and of all of minitrain that `modules` stand on."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            digest.update(cell.source.encode() + b"\0")
    for path in files(modules, root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def files(modules: Iterable[str], root: Path = ROOT) -> list[Path]:
    """The files of `modules` and of whatever they import, at any depth.

    Ranks import parts of `minitrain.runtime` that the kernel does not, so all of it
    belongs to every notebook.
    """
    runtime = root.glob("minitrain/runtime/*.py")
    found: set[Path] = set()
    waiting = {p for m in modules if (p := locate(m, root))} | set(runtime)
    while waiting:
        path = waiting.pop()
        found.add(path)
        tree = ast.parse(path.read_text())
        names = imported(tree)
        waiting |= {p for n in names if (p := locate(n, root))} - found
    return sorted(found)


def locate(module: str, root: Path) -> Path | None:
    """The file of a module of minitrain, if there is one."""
    stem = root.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name of minitrain that is imported, and the packages it stands in."""
    for node in statements(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "minitrain":
                yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of `tree` but what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from statements(node)


def stale(path: Path, root: Path = ROOT) -> str:
    """Why a notebook must be run again; an empty string if it need not."""
    notebook = nbformat.read(path, as_version=4)
    stored = notebook.metadata.get("minitrain")
    if not stored:
        return "was never run by `make notebooks`"
    if fingerprint(notebook, stored["imports"], root) != stored["fingerprint"]:
        return "its code, or the library that it imports, has changed"
    return ""


# ---- one run ----


def run(path: Path, root: Path = ROOT) -> float:
    """Run a notebook from top to bottom, and write it back with its outputs.

    Returns:
        The seconds that it took.

    Raises:
        RefusedError: A cell failed, or an output may not be stored. The file is as it
            was.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources=where,
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # it warns of its own local port
    )
    start = time.perf_counter()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise RefusedError(str(error)) from None
    seconds = time.perf_counter() - start
    probe = notebook.cells.pop()
    modules = json.loads("".join(o.text for o in probe.outputs if o.name == "stdout"))
    tidy(notebook)
    for number, reason in objections(notebook, root):
        raise RefusedError(f"code cell {number}: {reason}")
    notebook.metadata["minitrain"] = {
        "fingerprint": fingerprint(notebook, modules, root),
        "imports": modules,
        "seconds": round(seconds, 1),
    }
    nbformat.write(notebook, path)
    return seconds


def tidy(notebook: Any) -> None:
    """Keep what every run shares: tags, outputs and counts, streams in one piece."""
    name = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": name, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        kept = {k: v for k, v in cell.metadata.items() if k in KEPT}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)


def merged(outputs: list[Any]) -> list[Any]:
    """The outputs with neighbours of one stream joined, and overwritten lines gone."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and continues(output, last):
            last.text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r(?=[^\n])", "", output.text)
    return joined


def continues(output: Any, last: Any) -> bool:
    """Whether `output` is more of the stream `last`."""
    streams = output.output_type == last.output_type == "stream"
    return streams and output.name == last.name


def objections(notebook: Any, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """What may not be stored: the number of the code cell, and why."""
    here = (root, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix))
    machine = [f"{path}/" for path in here]
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    for number, cell in enumerate(code, start=1):
        if cell.execution_count != number:
            yield number, f"its execution count is {cell.execution_count}"
        for output in cell.outputs:
            text = json.dumps(output)
            if output.output_type == "error":
                yield number, f"an error is stored: {output.ename}"
            if output.get("name") == "stderr":
                yield number, f"it wrote to stderr: {output.text[:200]}"
            if path := next((p for p in machine if p in text), None):
                yield number, f"an output holds the path {path}"
            if found := ADDRESS.search(text):
                yield number, f"an output holds the memory address {found[0]}"


# ---- the command ----


def main(arguments: list[str] | None = None) -> int:
    """Run the stale notebooks, or with `--check` only name them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="run every one of them")
    parser.add_argument("--check", action="store_true", help="only name the stale ones")
    options = parser.parse_args(arguments)
    paths = options.notebooks or sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
    failed = 0
    for path in paths:
        reason = "asked for" if options.all else stale(path)
        if not reason:
            print(f"{path.name}: up to date")
        elif options.check:
            failed += 1
            print(f"{path.name}: stale, {reason}; run: make notebooks")
        else:
            failed += not rerun(path)
    return 1 if failed else 0


def rerun(path: Path) -> bool:
    """Run one notebook and say how it went."""
    print(f"{path.name}: running", flush=True)
    try:
        seconds = run(path)
    except RefusedError as error:
        print(f"{path.name}: not stored.\n{error}", file=sys.stderr)
        return False
    print(f"{path.name}: done in {seconds:.1f} s")
    if seconds > CHAPTER_SECONDS:
        print(f"{path.name}: longer than the {CHAPTER_SECONDS} s that a chapter has")
    return True


if __name__ == "__main__":
    sys.exit(main())
