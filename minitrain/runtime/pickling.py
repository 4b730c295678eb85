"""Code that travels by value and still knows where its source is.

cloudpickle sends functions and classes of notebook cells and scripts by value, but
it blanks their file names, so a traceback in a rank could not show the reader's own
lines. This pickler keeps the names, and :func:`cell_sources` collects the text of
those files that exist only in a notebook.
"""

import importlib
import io
import linecache
import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

_by_value = threading.Lock()  # cloudpickle keeps its by-value modules in one registry


class Pickler(cloudpickle.Pickler):
    """cloudpickle, with file names kept and torch's operator namespaces by name."""

    def __init__(self, file: io.BytesIO) -> None:
        self.files: set[str] = set()
        special: dict[type, Any] = {types.CodeType: self._reduce_code}
        if torch := sys.modules.get("torch"):
            special |= {type(torch.ops): _by_name, type(torch.classes): _by_name}
        # In place before the C pickler looks it up, which it does once.
        self.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(special)
        super().__init__(file, protocol=5)

    def _reduce_code(self, code: types.CodeType) -> tuple:
        self.files.add(code.co_filename)
        build, arguments = internals._code_reduce(code)[:2]
        blank = "<dynamic-code>"
        return build, tuple(
            code.co_filename if isinstance(a, str) and a == blank else a
            for a in arguments
        )


def _by_name(namespace: types.ModuleType) -> tuple:
    return _look_up, (namespace.__name__,)


def _look_up(name: str) -> Any:
    module, *path = name.split(".")
    found: Any = importlib.import_module(module)
    for part in path:
        found = getattr(found, part)
    return found


def dumps(value: Any) -> tuple[bytes, set[str]]:
    """Pickle ``value``; returns the bytes and the files its code came from.

    The module that defines a function or class of the user's own is sent by value
    where that is possible, so that the ranks need not import it: a script without a
    main guard would start again, a test module would import pytest.
    """
    module = sys.modules.get(_home(value) or "")
    if module is None or not _is_users(module):
        return _dump(value)
    with _by_value:
        registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not registered:
            cloudpickle.register_pickle_by_value(module)
        try:
            return _dump(value)
        except Exception:
            if not registered:
                cloudpickle.unregister_pickle_by_value(module)
                registered = True
            return _dump(value)
        finally:
            if not registered:
                cloudpickle.unregister_pickle_by_value(module)


def _dump(value: Any) -> tuple[bytes, set[str]]:
    buffer = io.BytesIO()
    pickler = Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.files


def _home(value: Any) -> str | None:
    """The module of a function, of ``(function, arguments)``, or of a partial."""
    if isinstance(value, tuple) and value:
        return _home(value[0])
    return _home(value.func) if hasattr(value, "func") else value.__module__


def _is_users(module: types.ModuleType) -> bool:
    """Whether a module is neither installed, nor built in, nor part of minitrain."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" or name.partition(".")[0] == "minitrain" or not file:
        return False  # __main__ goes by value in any case
    paths = sysconfig.get_paths()
    installed = {Path(paths[k]).resolve() for k in ("stdlib", "purelib", "platlib")}
    return not installed & set(Path(file).resolve().parents)


def cell_sources(files: set[str]) -> dict[str, tuple[str, list[str]]]:
    """The text of files that exist only in this process.

    Returns:
        For each such file name, the name a reader knows it by (``Cell In[5]``) and
        its lines.
    """
    sources = {}
    for file in files:
        lines = linecache.getlines(file)
        if lines and not Path(file).exists():
            sources[file] = (_cell_name(file), lines)
    return sources


def _cell_name(file: str) -> str:
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"Cell In[{numbers[file]}]" if file in numbers else file


def restore_sources(sources: dict[str, tuple[str, list[str]]]) -> None:
    """Give a rank's tracebacks the text that :func:`cell_sources` collected."""
    for file, (_, lines) in sources.items():
        size = sum(map(len, lines))
        linecache.cache[file] = (size, None, lines, file)
