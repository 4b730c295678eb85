"""What is stored in the notebooks is the run of the code that is there."""

import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import notebooks  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_of_the_code_that_is_here(path):
    assert notebooks.stale(path) == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_can_be_stored(path):
    assert list(notebooks.objections(nbformat.read(path, as_version=4))) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_chapter_runs_in_a_minute(path):
    stored = nbformat.read(path, as_version=4).metadata["minitrain"]
    assert stored["seconds"] <= notebooks.CHAPTER_SECONDS


def test_a_notebook_keeps_its_counts_in_order():
    """nbval compares nothing for a cell that was never run."""
    book = notebook("1 + 1", "2 + 2")
    assert [n for n, _ in notebooks.objections(book)] == [1, 2]
    for number, cell in enumerate(book.cells, start=1):
        cell.execution_count = number
    assert list(notebooks.objections(book)) == []


# ---- the tool ----


def notebook(*sources):
    cells = [nbformat.v4.new_code_cell(s) for s in sources]
    return nbformat.v4.new_notebook(cells=cells)


def stored(output):
    book = notebook("cell")
    book.cells[0].execution_count = 1
    book.cells[0].outputs = [output]
    return book


@pytest.mark.parametrize(
    ("output", "word"),
    [
        (nbformat.v4.new_output("error", ename="ValueError"), "error"),
        (nbformat.v4.new_output("stream", name="stderr", text="careful"), "stderr"),
        (nbformat.v4.new_output("stream", text=f"{ROOT}/notebooks"), "path"),
        (nbformat.v4.new_output("stream", text="<A at 0x7f2b0c1d2e3f>"), "address"),
    ],
)
def test_outputs_of_one_machine_are_refused(output, word):
    ((number, reason),) = notebooks.objections(stored(output))
    assert number == 1
    assert word in reason


def test_streams_are_stored_in_one_piece():
    piece = nbformat.v4.new_output
    parts = [piece("stream", text="a\n"), piece("stream", text="10%\r100%\n")]
    (whole,) = notebooks.merged(parts)
    assert whole.text == "a\n100%\n"


@pytest.fixture
def tree(tmp_path):
    """A small library, and a notebook that uses a part of it."""
    files = {
        "minitrain/__init__.py": "",
        "minitrain/runtime/__init__.py": "",
        "minitrain/used.py": "from minitrain import deep\nUSED = 1\n",
        "minitrain/deep.py": "def f():\n    from minitrain.deeper import X\n",
        "minitrain/deeper.py": "X = 1\n",
        "minitrain/other.py": "Y = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    book = notebook("import minitrain.used")
    modules = ["minitrain", "minitrain.used"]
    mark = notebooks.fingerprint(book, modules, tmp_path)
    book.metadata["minitrain"] = {"imports": modules, "fingerprint": mark}
    nbformat.write(book, tmp_path / "01.ipynb")
    return tmp_path


def test_an_untouched_notebook_is_up_to_date(tree):
    assert notebooks.stale(tree / "01.ipynb", tree) == ""


@pytest.mark.parametrize("name", ["used", "deep", "deeper", "runtime/__init__"])
def test_a_change_of_what_it_stands_on_is_seen(tree, name):
    path = tree / "minitrain" / f"{name}.py"
    path.write_text(path.read_text() + "# changed\n")
    assert "changed" in notebooks.stale(tree / "01.ipynb", tree)


def test_a_change_elsewhere_is_not(tree):
    (tree / "minitrain" / "other.py").write_text("Y = 2\n")
    assert notebooks.stale(tree / "01.ipynb", tree) == ""


def test_a_change_of_its_code_is_seen(tree):
    book = nbformat.read(tree / "01.ipynb", as_version=4)
    book.cells[0].source = "import minitrain.other"
    nbformat.write(book, tree / "01.ipynb")
    assert notebooks.stale(tree / "01.ipynb", tree)


def test_a_run_stores_outputs_counts_and_seconds(tmp_path):
    path = tmp_path / "01.ipynb"
    nbformat.write(notebook("import minitrain", "print('a')\nprint('b')"), path)
    notebooks.run(path)
    book = nbformat.read(path, as_version=4)
    assert [c.execution_count for c in book.cells] == [1, 2]
    assert book.cells[1].outputs[0].text == "a\nb\n"
    assert book.metadata["minitrain"]["imports"] == ["minitrain"]
    assert book.metadata["minitrain"]["seconds"] > 0
    assert notebooks.stale(path) == ""


def test_a_run_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "01.ipynb"
    nbformat.write(notebook("1 / 0"), path)
    before = path.read_bytes()
    with pytest.raises(notebooks.RefusedError, match="ZeroDivisionError"):
        notebooks.run(path)
    assert path.read_bytes() == before
