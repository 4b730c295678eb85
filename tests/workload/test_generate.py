"""Generation from a model whose next token is known."""

import torch
from torch import Tensor, nn

from minitrain.workload.generate import generate
from minitrain.workload.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["abcdefgh"], 257)


class Next(nn.Module):
    """Gives the byte after the last one, and keeps what it was shown."""

    def __init__(self, end_after: int = 99) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.end_after = end_after
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert positions.tolist() == [list(range(tokens.shape[1]))]
        self.seen.append(tokens[0].tolist())
        logits = torch.zeros(1, tokens.shape[1], 300)
        ends = len(self.seen) > self.end_after
        last = TOKENIZER.end_of_text if ends else int(tokens[0, -1]) + 1
        logits[0, -1, last] = 9.0
        logits[0, -1, 299] = 99.0  # beyond the vocabulary: must never be drawn
        return logits


def test_continues_the_prompt_through_a_window() -> None:
    model = Next()
    assert generate(model, TOKENIZER, "ab", 4, window=3, temperature=0) == "abcdef"
    a = TOKENIZER.encode("a")[0]
    expected = [[a, a + 1], [a, a + 1, a + 2], [a + 1, a + 2, a + 3]]
    assert model.seen[:3] == expected


def test_stops_at_the_end_of_a_text() -> None:
    model = Next(end_after=2)
    assert generate(model, TOKENIZER, "a", 50, window=8, temperature=0) == "abc"
    assert len(model.seen) == 3


def test_draws_among_the_likeliest_by_the_seed() -> None:
    def draw(seed: int, **options: float) -> str:
        return generate(Next(), TOKENIZER, "a", 12, 8, seed=seed, **options)

    assert draw(1, top_k=1) == "abcdefghijklm"
    warm = {seed: draw(seed, temperature=9.0) for seed in range(4)}
    assert len(set(warm.values())) > 1
    assert draw(2, temperature=9.0) == warm[2]
    assert generate(Next(), TOKENIZER, "", 0, 8) == ""
