"""Text to learn from: Python's own standard library, or any folder of text files."""

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

VALIDATION_SHARE = 0.05  # of the documents
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests"})


@dataclass(frozen=True)
class Corpus:
    """The readable files of a folder, in an order that does not depend on the machine.

    Attributes:
        root: the folder.
        contents: SHA-256 of each file that holds UTF-8 text, by its name relative to
            `root`; the names are sorted.
        validation: those names that are kept for validation.
        undecodable: files left out because they are not text.
        digest: SHA-256 over all names and contents.
    """

    root: Path
    contents: Mapping[str, str]
    validation: frozenset[str]
    undecodable: int
    digest: str

    @property
    def names(self) -> tuple[str, ...]:
        """The files that hold UTF-8 text, relative to `root`, sorted."""
        return tuple(self.contents)

    def train_documents(self) -> Iterator[str]:
        """The texts to train on, one document at a time."""
        for name in self.names:
            if name not in self.validation:
                yield from self._parts(name)[:1]

    def validation_documents(self) -> Iterator[str]:
        """The texts kept for validation; none of them is also trained on."""
        for name in self.names:
            if not self.validation:
                yield from self._parts(name)[1:]
            elif name in self.validation:
                yield self._read(name)

    def _read(self, name: str) -> str:
        """The text that was scanned; what it is now would pass for it for ever."""
        data = _read_bytes(self.root / name)
        if hashlib.sha256(data).hexdigest() != self.contents[name]:
            raise ValueError(f"{self.root / name} changed while it was read; try again")
        return data.decode()

    def _parts(self, name: str) -> list[str]:
        """The document; a lone one is cut in two at a line, its end for validation."""
        text = self._read(name)
        if self.validation:
            return [text]
        cut = text.find("\n", int(len(text) * (1 - VALIDATION_SHARE))) + 1
        cut = cut or int(len(text) * (1 - VALIDATION_SHARE))
        return [text[:cut], text[cut:]]


def standard_library() -> Path:
    """The folder of the running Python's standard library: text that is always here."""
    return Path(sysconfig.get_path("stdlib"))


def scan(folder: Path | None = None) -> Corpus:
    """Reads `folder` once: which files are text, what they hold, how they are split.

    Files and folders whose names start with a dot are passed over, and so are links to
    folders. Of the standard library (the default) only Python source is read, without
    installed packages and tests, which not every system ships. About one document in
    twenty is for validation, chosen by content, so that equal files fall on the same
    side.

    Raises:
        ValueError: there is no such folder, no text in it, or a file cannot be read.
    """
    root = standard_library() if folder is None else folder
    pattern = "*.py" if folder is None else "*"
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give a folder of text files")
    digest, contents, undecodable = hashlib.sha256(), {}, 0
    for path in sorted(root.rglob(pattern), key=lambda p: p.relative_to(root).parts):
        name = path.relative_to(root)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if folder is None and not NOT_LIBRARY.isdisjoint(name.parts):
            continue
        data = _read_bytes(path)
        if not data.strip():
            continue
        if not _is_text(data):
            undecodable += 1
            continue
        contents[name.as_posix()] = hashlib.sha256(data).hexdigest()
        line = f"{name.as_posix()}\0{contents[name.as_posix()]}\0"
        digest.update(line.encode(errors="surrogateescape"))  # names may be any bytes
    if not contents:
        raise ValueError(
            f"no text in {root}: {undecodable} files are not UTF-8, no others hold any"
        )
    validation = _choose(contents)
    return Corpus(root, contents, validation, undecodable, digest.hexdigest())


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text: {error}") from error


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _choose(contents: dict[str, str]) -> frozenset[str]:
    """The documents for validation: those with the smallest digests; none of one."""
    distinct = sorted(set(contents.values()))
    count = max(1, round(len(distinct) * VALIDATION_SHARE)) if distinct[1:] else 0
    chosen = set(distinct[:count])
    return frozenset(name for name, value in contents.items() if value in chosen)
