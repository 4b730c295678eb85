"""`python -m minitrain COMMAND`: each command is a module with `main(args) -> int`."""

import sys
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {
    "train": ("minitrain.train", "train a language model on text"),
    "simulate": (
        "minitrain.commands.simulate",
        "predict a training step on a cluster",
    ),
    "sweep": ("minitrain.commands.sweep", "compare many layouts on a cluster"),
    "validate": (
        "minitrain.commands.validate",
        "hold predictions against published runs",
    ),
}


def main(args: list[str]) -> int:
    """Runs one command, importing nothing that belongs to another one."""
    usage = "usage: python -m minitrain COMMAND [--help]"
    if args and args[0] in COMMANDS:
        try:
            return import_module(COMMANDS[args[0]][0]).main(args[1:])
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    if args and args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(usage, "", sep="\n")
        for name, (_, what) in COMMANDS.items():
            print(f"  {name:{width}}  {what}")
        return 0
    near = get_close_matches(args[0] if args else "", COMMANDS, n=1) or list(COMMANDS)
    said = f"no command is called {args[0]!r}" if args else "a command is missing"
    print(f"error: {said}; there is {', '.join(near)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
