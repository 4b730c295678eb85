"""Search that knows the field's compound words.

`all-to-all` and `zero-bubble` are words of this book, so a hyphenated term is indexed
once without its hyphens (what `alltoall` and `all-to-all` both ask for) and once for
each of its parts.
"""

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.en import SearchEnglish

COMPOUND = re.compile(r"\w+(?:-\w+)*")


class TermSearch(SearchEnglish):
    """English, with hyphenated terms kept whole."""

    # The page splits a query in the same way; it asks for the joined word alone.
    js_splitter_code = """
function splitQuery(query) {
  const compounds = query.match(/[\\p{L}\\p{N}_]+(?:-[\\p{L}\\p{N}_]+)*/gu) ?? [];
  return compounds.map((compound) => compound.replaceAll("-", ""));
}
"""

    def split(self, input: str) -> list[str]:
        """The words of `input`: each compound joined, then its parts."""
        words: list[str] = []
        for compound in COMPOUND.findall(input):
            parts = compound.split("-")
            words.append("".join(parts))
            if len(parts) > 1:
                words.extend(parts)
        return words


def note_change(
    app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Remember whether any page is new."""
    env.book_changed = bool(added | changed | removed)
    return []


def write_all(app: Sphinx, env: Any) -> list[str]:
    """Write every page if one is new.

    The search index forgets the glossary's terms of pages that are not written.
    """
    return sorted(env.found_docs) if env.book_changed else []


def setup(app: Sphinx) -> dict[str, Any]:
    """Take the place of Sphinx's English."""
    languages["en"] = TermSearch
    app.connect("env-get-outdated", note_change)
    app.connect("env-updated", write_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
