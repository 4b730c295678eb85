"""Byte-level byte-pair encoding: any text becomes ids and comes back unchanged."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # every byte, and the end of a text


class Tokenizer:
    """A trained vocabulary (Sennrich et al. 2016; on bytes, Radford et al. 2019).

    Attributes:
        end_of_text: the id that ends each document.
        digest: SHA-256 of the vocabulary; data written with another one is refused.
    """

    def __init__(self, definition: str) -> None:
        self._definition = definition
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        self._tokenizer.encode_special_tokens = True  # in a text they are text
        end_of_text = self._tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise ValueError(f"the vocabulary has no {END_OF_TEXT}")
        self.end_of_text: int = end_of_text
        self.digest = hashlib.sha256(definition.encode()).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learns at most `vocab_size` ids from `texts`; fewer if they have no more.

        Raises:
            ValueError: `vocab_size` has no room for the 256 bytes.
        """
        if vocab_size < SMALLEST:
            raise ValueError(
                f"vocab_size {vocab_size} is too small: bytes alone need {SMALLEST} ids"
            )
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no vocabulary.
        """
        text = path.read_text(encoding="utf-8")
        try:
            return cls(text)
        except Exception as error:  # tokenizers raises no narrower one
            raise ValueError(
                f"{path} holds no vocabulary ({error}); delete {path.parent} to have "
                "it made anew"
            ) from error

    def save(self, path: Path) -> None:
        """Writes the vocabulary as JSON, the format of the `tokenizers` library."""
        path.write_text(self._definition, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. The end-of-text mark inside it is text like any other."""
        return self._tokenizer.encode(text).ids

    def encode_documents(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The ids of each text, closed by `end_of_text`."""
        texts = iter(texts)
        while batch := list(islice(texts, 64)):
            for encoding in self._tokenizer.encode_batch_fast(batch):
                yield [*encoding.ids, self.end_of_text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, in which `end_of_text` shows as nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)
