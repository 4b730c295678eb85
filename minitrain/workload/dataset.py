"""Tokens on disk: memory-mapped shards with a checked header, made once and cached.

A shard is a 128-byte header (magic, bytes per token, number of tokens, CRC-32 of the
payload, digest of the vocabulary), then the ids, little-endian. A cache entry is one
folder, named after everything that went into it, and appears whole or not at all.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minitrain.workload.text import VALIDATION_SHARE, Corpus
from minitrain.workload.tokenizer import Tokenizer

MAGIC = b"MTTOKEN1"
HEADER = struct.Struct("<8sIQI32s72x")  # 128 bytes
SHARD_TOKENS = 1 << 26
FORMAT = 1  # raise it when what the cache holds, or how, changes

Shard = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Data:
    """A corpus ready for training.

    Attributes:
        tokenizer: the vocabulary the shards were written with.
        train: shards to train on, each [tokens].
        validation: shards of other documents.
    """

    tokenizer: Tokenizer
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]


def prepare(
    corpus: Corpus, vocab_size: int, cache: Path, shard_tokens: int = SHARD_TOKENS
) -> Path:
    """The cache entry with the tokens of `corpus`, made now if it is not there.

    Any number of processes may call this at once: one works, the others wait for it.

    Args:
        corpus: the texts.
        vocab_size: ids of the vocabulary to train.
        cache: folder that keeps the result; made if missing.
        shard_tokens: the most tokens in one shard.

    Raises:
        ValueError: no room for bytes in `vocab_size`, `cache` cannot be written, or a
            file has changed since `corpus` was scanned.
    """
    recipe = (FORMAT, corpus.digest, vocab_size, VALIDATION_SHARE, shard_tokens)
    entry = cache / hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(entry.with_suffix(".lock")):
            if not entry.is_dir():
                tokenizer = Tokenizer.train(corpus.train_documents(), vocab_size)
                with _appearing(entry) as made:
                    tokenizer.save(made / "tokenizer.json")
                    for split, texts in (
                        ("train", corpus.train_documents()),
                        ("validation", corpus.validation_documents()),
                    ):
                        ids = tokenizer.encode_documents(texts)
                        write_shards(made, split, ids, tokenizer, shard_tokens)
                    names = sorted(path.name for path in made.glob("*.tokens"))
                    (made / "shards.json").write_text(json.dumps(names))
    except OSError as error:
        raise ValueError(f"cannot keep tokens in {cache}: {error}") from error
    return entry


def open_data(entry: Path) -> Data:
    """Opens what `prepare` made, after checking all of it.

    Raises:
        ValueError: a file is missing, cut short or damaged.
    """
    try:
        names = json.loads((entry / "shards.json").read_text())
        tokenizer = Tokenizer.load(entry / "tokenizer.json")
        shards = {name: read_shard(entry / name, tokenizer) for name in names}
    except (OSError, TypeError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{entry} is damaged ({error}); delete it to have it made anew"
        ) from error
    train = tuple(ids for name, ids in shards.items() if name.startswith("train"))
    rest = tuple(ids for name, ids in shards.items() if not name.startswith("train"))
    return Data(tokenizer, train, rest)


def write_shards(
    folder: Path,
    split: str,
    documents: Iterable[list[int]],
    tokenizer: Tokenizer,
    shard_tokens: int,
) -> None:
    """Writes `documents` one after the other into `split`-00000.tokens and so on."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    pending: list[Shard] = []
    count, index = 0, 0

    def flush(ids: Shard) -> None:
        path = folder / f"{split}-{index:05d}.tokens"
        digest = bytes.fromhex(tokenizer.digest)
        payload = ids.tobytes()
        header = (MAGIC, dtype.itemsize, len(ids), zlib.crc32(payload), digest)
        with path.open("wb") as file:
            file.write(HEADER.pack(*header))
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())

    for ids in documents:
        pending.append(np.asarray(ids, dtype=dtype))
        count += len(ids)
        while count >= shard_tokens:
            whole = np.concatenate(pending)
            flush(whole[:shard_tokens])
            pending, count, index = (
                [whole[shard_tokens:]],
                count - shard_tokens,
                index + 1,
            )
    if count:
        flush(np.concatenate(pending))


def read_shard(path: Path, tokenizer: Tokenizer) -> Shard:
    """The ids of one shard, mapped into memory after header and payload are checked.

    Raises:
        ValueError: the file is no shard, is cut short or damaged, or was written with
            another vocabulary.
    """

    def refuse(why: str) -> ValueError:
        return ValueError(f"{path} {why}; delete {path.parent} to have it made anew")

    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise refuse("is not a shard of tokens, or lost its header")
    _, width, count, checksum, digest = HEADER.unpack(head)
    if size != HEADER.size + width * count:
        held = (size - HEADER.size) // width
        raise refuse(f"is cut short: {held:,} tokens of {count:,}")
    if digest.hex() != tokenizer.digest:
        raise refuse("was written with another vocabulary")
    ids = np.memmap(path, dtype=f"<u{width}", mode="r", offset=HEADER.size)
    if zlib.crc32(ids.data) != checksum:
        raise refuse("is damaged: its checksum does not match")
    return ids


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; released by the system if its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block ends well.

    It has one name, so that the next try clears up after one that was killed.
    """
    made = folder.with_name(f".{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    try:
        yield made
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
