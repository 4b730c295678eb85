"""Build the book from the stored outputs. A warning is an error."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "_build" / "html" / "index.html"


def build() -> int:
    """Run jupyter-book, and return its exit status.

    Sphinx tells a warning only once, while it reads a page. The pages it has read are
    therefore thrown away after a failure, so that the next run fails again.
    """
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    options = ["-n", "-W", "--keep-going", "-q"]
    command = [str(jupyter_book), "build", str(ROOT), *options]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status:
        shutil.rmtree(ROOT / "_build" / ".doctrees", ignore_errors=True)
    return status


def main() -> int:
    """Build, and say where the book lies."""
    if status := build():
        print("The book was not built: mend the warnings above.", file=sys.stderr)
        return status
    print(f"The book: {PAGE.as_uri()}")
    print("To read it with search, run: make serve")
    return 0


if __name__ == "__main__":
    sys.exit(main())
