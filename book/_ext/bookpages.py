"""What the pages of this book need beyond Sphinx.

`{chapter}`, the box at the head of a chapter, with the minutes that were measured;
`{parts}`, the book's parts as cards that know which chapters are written; `{modules}`,
the reference of every module of a package; and the formulas of the calculating pages,
printed from the library.
"""

import html
import importlib
import json
import pkgutil
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tojs import to_js

LABEL = re.compile(r'<svg [^>]*aria-label="([^"]*)"')
SEVERAL = re.compile(r":(ivar|param) \w+(, \w+)+:")
PATHS = {"core": "primary", "deep dive": "info", "catalogue": "secondary"}


class MystDirective(SphinxDirective):
    """A directive that writes MyST and has it parsed in place."""

    def myst(self, lines: list[str], *classes: str) -> list[nodes.Node]:
        """Parse `lines` into a container of the given classes."""
        box = nodes.container(classes=list(classes))
        self.state.nested_parse(StringList(lines, self.env.docname), 0, box)
        return [box]


def measured(notebook: Path) -> str:
    """The running time that `make notebooks` recorded, in words."""
    metadata = json.loads(notebook.read_text())["metadata"]
    seconds = metadata.get("minitrain", {}).get("seconds")
    if seconds is None:
        return "not measured yet"
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds on two cores, measured"
    return f"{seconds / 60:.0f} minutes on two cores, measured"


class Chapter(MystDirective):
    """`{chapter}`: what a chapter builds, needs and costs; the body says what is built.

    Options: `path` (core, deep dive or catalogue), `needs` (MyST, with links) and
    `module` (a module of minitrain; a misspelt one fails the build).
    """

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "path": lambda text: directives.choice(text, tuple(PATHS)),
        "needs": directives.unchanged_required,
        "module": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        """Write the box."""
        if missing := set(self.option_spec) - set(self.options):
            raise self.error(f"a chapter box wants {', '.join(sorted(missing))}")
        self.assert_has_content()
        notebook = Path(self.env.doc2path(self.env.docname))
        badge = PATHS[self.options["path"]]
        rows = {
            "You will build": " ".join(self.content),
            "You need": self.options["needs"].replace("\n", " "),
            "Time to run": measured(notebook),
            "Module": f"{{py:mod}}`{self.options['module']}`",
            "Path": f"{{bdg-{badge}}}`{self.options['path']}`",
        }
        lines: list[str] = []
        for term, text in rows.items():
            lines += [term, f": {text}", ""]
        return self.myst(lines, "chapter-box")


class Parts(MystDirective):
    """`{parts}`: the parts of `book/parts.yml` as cards.

    A chapter whose notebook is in the table of contents is a link; the others are named
    in grey, so that a reader sees what is there and what is planned.
    """

    def run(self) -> list[nodes.Node]:
        """Write one card for each part."""
        path = Path(self.env.srcdir, "book", "parts.yml")
        self.env.note_dependency(str(path))
        lines = ["::::{grid} 1 2 2 3", ":gutter: 3", ":class-container: parts", ""]
        for part in yaml.safe_load(path.read_text()):
            head = f":::{{grid-item-card}} {part['title']}"
            lines += [head, ":shadow: none", "", part["about"], ""]
            for number, (name, title) in part["chapters"].items():
                written = f"notebooks/{name}" in self.env.found_docs
                text = f"{{doc}}`{title} </notebooks/{name}>`" if written else title
                mark = "written" if written else "planned"
                lines.append(f"- [{number}]{{.number}} [{text}]{{.{mark}}}")
            lines += [":::", ""]
        return self.myst([*lines, "::::"])


class Modules(MystDirective):
    """`{modules} minitrain.runtime`: the reference of a package and its modules."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write one automodule for each module that has a public name."""
        lines: list[str] = []
        for name in module_names(self.arguments[0]):
            if name != self.arguments[0]:
                lines += [f":::{{rubric}} {name}", ":class: module", ":::", ""]
            lines += [
                "```{eval-rst}",
                f".. automodule:: {name}",
                "   :members:",
                "```",
                "",
            ]
        return self.myst(lines)


def module_names(package: str) -> list[str]:
    """The public modules of `package`, the package itself first."""
    module = importlib.import_module(package)
    if not hasattr(module, "__path__"):
        return [package]
    inner = [m.name for m in pkgutil.walk_packages(module.__path__, f"{package}.")]
    return [package, *(n for n in inner if not n.rpartition(".")[2].startswith("_"))]


def page(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give the calculating pages their formulas, and no page the scripts of thebe."""
    scripts = context.get("script_files", [])
    context["script_files"] = [s for s in scripts if not is_thebe(s)]
    if name == "book/will_it_fit":
        app.add_js_file(None, body=formulas(), priority=300)


def alt_text(app: Sphinx, doctree: nodes.document) -> None:
    """Give a figure of the library the words that it carries itself.

    A cell's metadata (`mystnb: image: alt`) goes before the figure's own label.
    """
    for image in doctree.findall(nodes.image):
        path = Path(app.srcdir, image["uri"].lstrip("/"))
        if image.get("alt") or path.suffix != ".svg" or not path.is_file():
            continue
        if label := LABEL.search(path.read_text()[:4000]):
            image["alt"] = html.unescape(label[1])


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

    `minitrain.launch` is documented where it is defined, in `minitrain.runtime`.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    for name in (target, f"{node.get('py:module')}.{target}"):
        defined = definition(name)
        if defined and defined != name:
            role, source = node.get("reftype", "obj"), node.get("refdoc")
            domain = env.get_domain("py")
            return domain.resolve_xref(
                env, source, app.builder, role, defined, node, text
            )
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


def is_thebe(script: Any) -> bool:
    """Whether a script belongs to thebe, which this book does not use."""
    return "thebe" in f"{script}{getattr(script, 'attributes', '')}".lower()


def formulas() -> str:
    """The JavaScript of the library's closed forms, and the presets they apply to."""
    return ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives and the hook."""
    app.add_directive("chapter", Chapter)
    app.add_directive("parts", Parts)
    app.add_directive("modules", Modules)
    app.connect("doctree-read", alt_text)
    app.connect("autodoc-process-docstring", docstring, priority=400)
    app.connect("autodoc-process-docstring", shared_lines, priority=600)
    app.connect("missing-reference", public_name)
    app.connect("html-page-context", page, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
