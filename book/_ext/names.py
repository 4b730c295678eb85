"""Docstrings and names, read as they are meant.

What Sphinx's autodoc and napoleon would take otherwise: indented blocks of a module's
docstring, colons in an attribute's, names that a package re-exports, plurals of terms.
"""

import importlib
import re
from typing import Any

from sphinx.application import Sphinx

SEVERAL = re.compile(r":(ivar|param) \w+(, \w+)+:")


def docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Read docstrings as they are meant, where Sphinx would read them otherwise.

    An indented block of a module's docstring is literal, as in Markdown; and the words
    before a colon, in an attribute's, are no type.
    """
    if what == "module":
        blocks = [
            i
            for i, line in enumerate(lines)
            if line.startswith("    ") and i and not lines[i - 1].strip()
        ]
        for i in reversed(blocks):
            lines[i:i] = ["::", ""]
    elif what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment, in which no type is found


def shared_lines(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Let a line of a docstring describe several names: `rank, world_size: ...`.

    Napoleon has turned it into a field, whose first word would be read as a type.
    """
    for i, line in enumerate(lines):
        if match := SEVERAL.match(line):
            lines[i] = match[0].replace(", ", ",") + line[match.end() :]


def public_name(app: Sphinx, env: Any, node: Any, text: Any) -> Any:
    """Resolve a name by which a package offers what one of its modules defines.

    `minitrain.launch` is documented where it is defined, in `minitrain.runtime`. A bare
    name, of an annotation that was imported for types only, may stand for the one
    object that is called so.
    """
    if node.get("refdomain") != "py":
        return None
    domain, target = env.get_domain("py"), node["reftarget"]
    names = {definition(target), definition(f"{node.get('py:module')}.{target}")}
    if "." not in target:
        same = {n for n in domain.objects if n.endswith(f".{target}")}
        names |= same if len(same) == 1 else set()
    for name in sorted(names - {"", target}):
        role, source = node.get("reftype", "obj"), node.get("refdoc")
        return domain.resolve_xref(env, source, app.builder, role, name, node, text)
    return None


def singular(app: Sphinx, env: Any, node: Any, text: Any) -> Any:
    """Resolve `{term}` for the plural of a term of the glossary, or for a capital."""
    if (node.get("refdomain"), node.get("reftype")) != ("std", "term"):
        return None
    term = node["reftarget"].lower()
    domain = env.get_domain("std")
    for name in (term, term.removesuffix("s"), term.removesuffix("es")):
        reference = domain.resolve_xref(
            env, node.get("refdoc"), app.builder, "term", name, node, text
        )
        if reference is not None:
            return reference
    return None


def definition(name: str) -> str:
    """The full name under which an object of minitrain is defined, if it is one."""
    package, _, attribute = name.rpartition(".")
    if not package.startswith("minitrain"):
        return ""
    try:
        found = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError):
        return ""
    module, qualname = (getattr(found, a, "") for a in ("__module__", "__qualname__"))
    return f"{module}.{qualname}" if module and qualname else ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the hooks: ours before napoleon's (500) and after it."""
    app.connect("autodoc-process-docstring", docstring, priority=400)
    app.connect("autodoc-process-docstring", shared_lines, priority=600)
    app.connect("missing-reference", public_name)
    app.connect("missing-reference", singular)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
