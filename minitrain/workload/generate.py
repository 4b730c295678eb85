"""Text from a model, one token after the other, by the plainest method."""

import torch
from torch import nn

from minitrain.workload.tokenizer import Tokenizer


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    window: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Continues `prompt` by at most `tokens` tokens, and returns both together.

    Each token is drawn from the `top_k` likeliest, sharpened by `temperature` (0 takes
    the likeliest). The model sees the last `window` tokens; generation stops at the end
    of a text. The whole window is computed anew for each token, which is simple, and
    slow for long windows.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    for _ in range(tokens):
        seen = torch.tensor([ids[-window:]], device=device)  # [1, seq]
        positions = torch.arange(seen.shape[1], device=device)[None]  # [1, seq]
        logits = model(seen, positions)[0, -1, : tokenizer.vocab_size]  # [vocab]
        values, choices = logits.topk(min(top_k, len(logits)))  # [top_k]
        if temperature > 0:
            share = (values.to(torch.float32) / temperature).softmax(-1)  # [top_k]
            pick = int(torch.multinomial(share, 1, generator=generator))
        else:
            pick = 0
        ids.append(int(choices[pick]))
        if ids[-1] == tokenizer.end_of_text:
            break
    return tokenizer.decode(ids)
