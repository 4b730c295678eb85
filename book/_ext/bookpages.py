"""What the pages of this book need beyond Sphinx.

`{chapter}`, the box at the head of a chapter, with the minutes that were measured;
`{parts}`, the book's parts as cards that know which chapters are written; `{modules}`,
the reference of every module of a package; `{formula}` and `{numbers}`, the library's
closed forms and what they say of a model.
"""

import ast
import html
import importlib
import inspect
import json
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import fit
import layouts
import stepper
import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from minitrain.workload import formulas

LABEL = re.compile(r'<svg [^>]*aria-label="([^"]*)"')
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
                "   :ignore-module-all:",  # a re-export stands where it is defined
                "```",
                "",
            ]
        return self.myst(lines)


class Formula(MystDirective):
    """`{formula} parameter_count`: a closed form of the library, as the code that runs.

    The argument names a function of `minitrain.workload.formulas`.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write its first sentence and its body."""
        name = self.arguments[0]
        function = getattr(formulas, name, None)
        if function is None:
            raise self.error(f"minitrain.workload.formulas has no '{name}'")
        self.env.note_dependency(inspect.getfile(function))
        sentence = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        link = f"{{py:func}}`{name} <minitrain.workload.formulas.{name}>`"
        lines = [f"{link}: {sentence}", "", "```python", *body_of(function), "```"]
        return self.myst(lines, "formula")


def body_of(function: Any) -> list[str]:
    """The lines of a function after its docstring."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    definition = ast.parse("\n".join(lines)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    first = 1 if ast.get_docstring(definition) else 0
    start = definition.body[first].lineno - 1
    return textwrap.dedent("\n".join(lines[start:])).splitlines()


class Numbers(MystDirective):
    """`{numbers} gpt2 llama3-8b`: what the closed forms say of some models."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Write a table with a column for each model."""
        models = " ".join(self.content).split()
        found = [fit.numbers(name) for name in models]
        rows = {
            "parameters": [f"{n['parameters'] / 1e9:,.2f} billion" for n in found],
            "sequence, tokens": [f"{n['seq']:,}" for n in found],
            "model FLOPs a token": [
                f"{n['token_flops'] / 1e9:,.1f} GFLOPs" for n in found
            ],
            "of them attention": [f"{n['attention_share']:.0%}" for n in found],
            "state, 16 bytes a parameter": [gib(n["state_bytes"]) for n in found],
            "saved for backward": [gib(n["saved_bytes"]) for n in found],
            "the same, recomputing": [gib(n["recompute_bytes"]) for n in found],
        }
        lines = ["| | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
        return self.myst(lines, "numbers")


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:,.1f} GiB"


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
    if name == "book/will_it_fit":
        app.add_js_file(None, body=fit.javascript(), priority=300)
        app.add_js_file("fit.js")
        app.add_js_file(None, body=layouts.javascript(), priority=300)
        app.add_js_file("layout.js")
    if name == "book/collective_stepper":
        app.add_js_file(None, body=stepper.javascript(), priority=300)
        app.add_js_file("stepper.js")
    scripts = context.get("script_files", [])
    context["script_files"] = [s for s in scripts if not is_thebe(s)]


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


def is_thebe(script: Any) -> bool:
    """Whether a script belongs to thebe, which this book does not use."""
    return "thebe" in f"{script}{getattr(script, 'attributes', '')}".lower()


def chapter_numbers(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Give each chapter the number of its file.

    Sphinx counts the chapters that there are, and some are not written yet.
    """

    def renumber(number: tuple[int, ...]) -> tuple[int, ...]:
        return (chapter, *number[1:])

    for name, numbers in env.toc_secnumbers.items():
        if not (found := re.match(r"notebooks/(\d+)_", name)):
            continue
        chapter = int(found[1])
        for anchor, number in numbers.items():
            numbers[anchor] = renumber(number)
        for figures in env.toc_fignumbers.get(name, {}).values():
            for anchor, number in figures.items():
                figures[anchor] = renumber(number)
        for link in env.tocs[name].findall(nodes.reference):
            if "secnumber" in link:
                link["secnumber"] = renumber(link["secnumber"])
        for titles in (env.titles, env.longtitles):
            if "secnumber" in titles[name]:
                titles[name]["secnumber"] = renumber(titles[name]["secnumber"])
    return []


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives and the hooks."""
    app.add_directive("chapter", Chapter)
    app.add_directive("parts", Parts)
    app.add_directive("modules", Modules)
    app.add_directive("formula", Formula)
    app.add_directive("numbers", Numbers)
    app.connect("doctree-read", alt_text)
    app.connect("env-get-updated", chapter_numbers, priority=900)
    app.connect("html-page-context", page, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
