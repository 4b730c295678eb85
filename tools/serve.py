"""Serve the built book on a free local port, until Ctrl-C."""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HTML = Path(__file__).resolve().parent.parent / "_build" / "html"


class Quiet(SimpleHTTPRequestHandler):
    """Files, without a line on the terminal for each."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def server(folder: Path = HTML) -> ThreadingHTTPServer:
    """A server of `folder`, bound to a free port of this machine only."""
    handler = partial(Quiet, directory=str(folder))
    return ThreadingHTTPServer(("127.0.0.1", 0), handler)


def main() -> int:
    """Serve until interrupted."""
    with server() as http:
        host, port = http.server_address[:2]
        print(f"The book: http://{host!s}:{port}/  (Ctrl-C ends)", flush=True)
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
