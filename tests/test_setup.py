"""Whatever goes wrong in the set-up, the reader is told what to do, in one line."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A stand-in for Python: it answers what the script asks, and fails where it is told to.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) exit {old} ;;
  --version) echo "Python 3.9.2"; exit 0 ;;
  *"import ensurepip"*) exit {venvless} ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python; exit {unwritable} ;;
  *"-m pip"*) echo "{said}"; exit {failed} ;;
esac
"""


def set_up(folder: Path, name: str = "python", **faults: object):
    """Run the script in an empty project, with a Python that has the faults."""
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", folder / "tools")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    sound = {"old": 0, "venvless": 0, "unwritable": 0, "failed": 0, "said": "done"}
    python.write_text(PYTHON.format(**sound | faults))
    python.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(folder / "tools" / "setup.sh"), name]
    return subprocess.run(
        command, env={"PATH": path}, capture_output=True, text=True, timeout=30
    )


def test_a_sound_set_up_succeeds(tmp_path):
    run = set_up(tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("faults", "advice"),
    [
        ({"name": "python3.99"}, "install Python 3.11, or name one: make PYTHON="),
        ({"old": 1}, "Python 3.9.2 is not Python 3.11"),
        ({"venvless": 1}, "apt-get install python3.11-venv"),
        ({"unwritable": 1}, "check the permissions"),
        (
            {"failed": 1, "said": "[Errno 28] No space left on device"},
            "the disk is full; free about",
        ),
        (
            {"failed": 1, "said": "NewConnectionError: Temporary failure"},
            "check the network or the proxy",
        ),
        (
            {"failed": 1, "said": "ERROR: No matching distribution found for torch"},
            "this platform may lack a wheel",
        ),
        (
            {"failed": 1, "said": "ERROR: something else"},
            "pip failed: ERROR: something",
        ),
    ],
)
def test_each_failure_says_what_to_do(tmp_path, faults, advice):
    run = set_up(tmp_path, **faults)
    assert run.returncode == 1
    lines = run.stderr.strip().split("\n")
    assert len(lines) == 1
    assert lines[0].startswith("set-up stopped: ")
    assert advice in lines[0]


def test_help_lists_every_target():
    text = (ROOT / "Makefile").read_text()
    said = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    targets = text.split(".PHONY:")[1].split("\n")[0].split()
    assert [t for t in targets if f"make {t} " not in said] == []
