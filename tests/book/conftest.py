"""A real browser, and folders of pages served to it."""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "tools"), str(ROOT / "book" / "_ext")]

from serve import server  # noqa: E402

# No sandbox: CI runs as root. The others keep the browser from calling home.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def give_up(reason: str) -> None:
    """Skip on a reader's machine; under CI nothing may be missing."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(f"the page tests were not run: {reason}")


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """The system's Chromium, driven by Playwright."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        give_up("there is no Chromium here (on Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Path], str]]:
    """A function that serves a folder and returns its address."""
    running = []

    def start(folder: Path) -> str:
        http = server(folder)
        running.append(http)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{http.server_address[1]}/"

    yield start
    for http in running:
        http.shutdown()


@pytest.fixture(scope="session")
def site(serve) -> str:
    """The address of the built book."""
    html = ROOT / "_build" / "html"
    if not (html / "index.html").is_file():
        give_up("the book is not built (make book)")
    return serve(html)
