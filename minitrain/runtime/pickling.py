"""Code that travels by value and still knows where its source is.

cloudpickle sends functions and classes of notebook cells and scripts by value, but
it blanks their file names, so a traceback in a rank could not show the reader's own
lines. This pickler keeps the names. What was typed in a notebook has no file: it is
named after its cell, and its text travels along.
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
    """cloudpickle, with file names kept and unusual modules by name.

    torch's operator namespaces and its settings are modules of classes of their own,
    which cloudpickle meets and cannot send.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.names: dict[str, str] = {}
        loaded = [m for m in list(sys.modules.values()) if m is not None]
        modules = {type(m) for m in loaded if isinstance(m, types.ModuleType)}
        special: dict[type, Any] = dict.fromkeys(modules - {types.ModuleType}, _by_name)
        special[types.CodeType] = self._reduce_code
        if torch := sys.modules.get("torch"):
            special |= {type(torch.ops): _by_name, type(torch.classes): _by_name}
        if fakes := sys.modules.get("torch._subclasses.fake_tensor"):
            special[fakes.FakeTensor] = _as_meta
        # In place before the C pickler looks it up, which it does once.
        self.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(special)
        super().__init__(file, protocol=5)

    def _reduce_code(self, code: types.CodeType) -> tuple:
        file, blank = code.co_filename, "<dynamic-code>"
        if file not in self.names:
            self.names[file] = known_as(file)
        build, arguments = internals._code_reduce(code)[:2]
        return build, tuple(
            self.names[file] if isinstance(a, str) and a == blank else a
            for a in arguments
        )


def _by_name(namespace: types.ModuleType) -> tuple:
    return _look_up, (namespace.__name__,)


def _as_meta(fake: Any) -> tuple:
    """A tensor without values keeps its shape and dtype, and leaves its mode behind."""
    return _make_meta, (tuple(fake.shape), fake.stride(), fake.dtype)


def _make_meta(shape: tuple, stride: tuple, dtype: Any) -> Any:
    return sys.modules["torch"].empty_strided(shape, stride, dtype=dtype, device="meta")


def _look_up(name: str) -> Any:
    module, *path = name.split(".")
    found: Any = importlib.import_module(module)
    for part in path:
        found = getattr(found, part)
    return found


Sources = dict[str, list[str]]


def dumps(value: Any) -> tuple[bytes, Sources]:
    """Pickle ``value``; returns the bytes, and the lines of code that has no file.

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


def _dump(value: Any) -> tuple[bytes, Sources]:
    buffer = io.BytesIO()
    pickler = Pickler(buffer)
    pickler.dump(value)
    cells = {n: linecache.getlines(f) for f, n in pickler.names.items() if n != f}
    return buffer.getvalue(), cells


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


def known_as(file: str) -> str:
    """What the reader calls a file of code: a notebook's cell by its number."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"Cell In[{numbers[file]}]" if file in numbers else file


def restore(sources: Sources) -> None:
    """Give this process's tracebacks the lines that :func:`dumps` collected."""
    for file, lines in sources.items():
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
