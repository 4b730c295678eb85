"""Text, vocabulary and shards: complete, disjoint, made once, and refused if torn."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minitrain.workload import dataset
from minitrain.workload.dataset import open_data, prepare
from minitrain.workload.text import scan, standard_library
from minitrain.workload.tokenizer import END_OF_TEXT, Tokenizer

WORDS = "the quick brown fox jumps over the lazy dog while it rains "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    (root / "deep" / ".git").mkdir(parents=True)
    for i in range(40):
        name = f"{'deep/' if i % 2 else ''}{i:02d}.txt"
        (root / name).write_text(f"document {i}: {WORDS * (i + 1)}\n")
    (root / "binary.bin").write_bytes(b"\xff\xfe\x00" * 9)
    (root / "zeros.txt").write_bytes(b"text\0text")
    (root / "empty.txt").write_text(" \n")
    (root / "deep" / ".git" / "HEAD").write_text("hidden")
    return root


def test_scan_finds_all_text_and_nothing_else(folder: Path) -> None:
    corpus = scan(folder)
    assert len(corpus.names) == 40
    assert corpus.undecodable == 2
    train = list(corpus.train_documents())
    validation = list(corpus.validation_documents())
    assert len(validation) == 2
    assert len(train) == 38
    assert not set(train) & set(validation)
    # A moved folder is the same corpus, a changed letter is another one.
    moved = folder.rename(folder.with_name("moved"))
    assert scan(moved).digest == corpus.digest
    (moved / "00.txt").write_text("changed")
    assert scan(moved).digest != corpus.digest


def test_equal_documents_fall_on_the_same_side(folder: Path) -> None:
    for name in scan(folder).names:
        copy = folder / f"{name}.copy"
        copy.write_bytes((folder / name).read_bytes())
    corpus = scan(folder)
    assert len(corpus.names) == 80
    assert not set(corpus.train_documents()) & set(corpus.validation_documents())


def test_copies_of_one_document_are_one(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("line\n" * 100)
    corpus = scan(tmp_path)
    assert len(list(corpus.train_documents())) == 3
    assert len(list(corpus.validation_documents())) == 3


@pytest.mark.parametrize("text", ["line\n" * 100, "x" * 100])
def test_one_document_is_cut_in_two(tmp_path: Path, text: str) -> None:
    (tmp_path / "book.txt").write_text(text)
    corpus = scan(tmp_path)
    train, validation = [*corpus.train_documents()], [*corpus.validation_documents()]
    assert [*train, *validation] == [train[0], text[len(train[0]) :]]
    assert 0.9 < len(train[0]) / len(text) < 1


def test_the_standard_library_is_always_there() -> None:
    corpus = scan()
    assert "abc.py" in corpus.names
    assert not any("site-packages" in name for name in corpus.names)
    assert not any(name.startswith("test/") for name in corpus.names)
    assert corpus.root == standard_library()


def test_folders_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text in"):
        scan(tmp_path)
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="1 files are not UTF-8"):
        scan(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        scan(tmp_path / "nowhere")


def test_names_may_be_any_bytes(folder: Path) -> None:
    before = scan(folder)
    (folder / os.fsdecode(b"n\xe4me.txt")).write_text("text")
    corpus = scan(folder)
    assert len(corpus.names) == len(before.names) + 1
    assert corpus.digest != before.digest
    assert "text" in [*corpus.train_documents(), *corpus.validation_documents()]


def test_a_file_that_cannot_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"cannot read the text: .*denied: '.*00.txt'"):
        scan(folder)


def test_text_that_changes_after_the_scan_is_not_kept(
    folder: Path, tmp_path: Path
) -> None:
    corpus, cache = scan(folder), tmp_path / "cache"
    (folder / "00.txt").write_text("CHANGED")
    with pytest.raises(ValueError, match=r"00.txt changed while it was read"):
        prepare(corpus, 300, cache)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_any_text_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer.train(scan(folder).train_documents(), 300)
    assert tokenizer.vocab_size == 300
    for text in ("", "  a\tb\r\n", "naïve 漢字 🙂", f"is {END_OF_TEXT} text?", "\x00"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids
    assert len(tokenizer.encode(WORDS)) < len(WORDS) / 3
    with pytest.raises(ValueError, match="vocab_size 256 is too small"):
        Tokenizer.train([WORDS], 256)


def test_training_the_vocabulary_twice_gives_the_same(folder: Path) -> None:
    corpus = scan(folder)
    digests = {Tokenizer.train(corpus.train_documents(), 300).digest for _ in range(3)}
    assert len(digests) == 1


def test_shards_hold_every_document_in_order(folder: Path, tmp_path: Path) -> None:
    corpus = scan(folder)
    whole = open_data(prepare(corpus, 300, tmp_path / "cache"))
    assert (len(whole.train), len(whole.validation)) == (1, 1)
    ends = np.flatnonzero(whole.train[0] == whole.tokenizer.end_of_text)
    documents = np.split(whole.train[0], ends + 1)
    texts = [whole.tokenizer.decode(ids) for ids in documents[:-1]]
    assert texts == list(corpus.train_documents())
    assert len(documents[-1]) == 0
    parts = open_data(prepare(corpus, 300, tmp_path / "cache", shard_tokens=500))
    assert [len(p) for p in parts.train[:-1]] == [500] * (len(parts.train) - 1)
    assert np.array_equal(np.concatenate(parts.train), whole.train[0])


def test_large_vocabularies_need_wider_ids(tmp_path: Path, folder: Path) -> None:
    tokenizer = Tokenizer.train(scan(folder).train_documents(), 300)
    for size, width in ((300, 2), (1 << 16, 2), ((1 << 16) + 1, 4)):
        kind = type("Wide", (Tokenizer,), {"vocab_size": size})
        wide = kind(tokenizer._definition)
        dataset.write_shards(tmp_path, f"w{size}", [[size - 1, 0]], wide, 100)
        ids = dataset.read_shard(tmp_path / f"w{size}-00000.tokens", wide)
        assert ids.tolist() == [size - 1, 0]
        assert ids.itemsize == width


def _prepare(folder: Path, cache: Path, queue: "multiprocessing.Queue[str]") -> None:
    queue.put(str(prepare(scan(folder), 280, cache)))


def test_many_processes_make_one_entry(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    cache = tmp_path / "cache"
    processes = [
        context.Process(target=_prepare, args=(folder, cache, queue)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    entries = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(entries) == 1
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [Path(entries.pop()).name]


def test_an_interrupted_writer_leaves_nothing_to_trust(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(dataset.json, "dumps", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(scan(folder), 280, cache)
    assert not [p for p in cache.iterdir() if p.is_dir()]
    with monkeypatch.context() as patch:  # killed: not even time to clear up
        patch.setattr(dataset.json, "dumps", die)
        patch.setattr(dataset.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            prepare(scan(folder), 280, cache)
    entry = prepare(scan(folder), 280, cache)
    assert [p for p in cache.iterdir() if p.is_dir()] == [entry]
    open_data(entry)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def other_vocabulary(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"is cut short: [\d,]+ tokens of [\d,]+; delete"),
        (cut_header, "lost its header"),
        (flip, "checksum does not match"),
        (other_vocabulary, "another vocabulary"),
        (Path.unlink, "is damaged"),
    ],
)
def test_a_damaged_shard_is_one_clear_error(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    entry = prepare(scan(folder), 280, tmp_path / "cache")
    damage(entry / "train-00000.tokens")
    with pytest.raises(ValueError, match=message):
        open_data(entry)


@pytest.mark.parametrize("name", ["tokenizer.json", "shards.json"])
@pytest.mark.parametrize("content", [b'{"a"', b"\xff", b"[1]"])
def test_a_damaged_list_or_vocabulary_is_one_clear_error(
    folder: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    entry = prepare(scan(folder), 280, tmp_path / "cache")
    (entry / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"delete .* to have it made anew") as caught:
        open_data(entry)
    assert str(entry) in str(caught.value)


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot keep tokens in"):
        prepare(scan(folder), 280, tmp_path / "file" / "cache")
