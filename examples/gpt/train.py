"""A small GPT that learns to write Python's manual, letter by letter: every Python carries that text.

python examples/gpt/train.py
"""

import math
import os
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import springtide

CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 4
BATCH_SIZE = 32  # windows of CONTEXT letters, of the whole job
STEPS = int(os.environ.get("STEPS", "2000"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
LETTERS = sorted(set(TEXT))


class Block(nn.Module):
    """Attention to earlier letters, then a feed-forward layer, each beside a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        parts = self.query_key_value(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Letters in (n, CONTEXT or fewer), scores of the next letter out (n, the same, len(LETTERS))."""

    def __init__(self):
        super().__init__()
        self.letter = nn.Embedding(len(LETTERS), WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.letter.weight  # one table for both ways

    def forward(self, letters):
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letter(letters) + self.position(places))))


def windows(numbers):
    """Cut the text into (n, CONTEXT + 1): each window's letters but the last one, and those that follow."""
    whole = (len(numbers) - 1) // CONTEXT * CONTEXT
    return torch.stack([numbers[i : i + CONTEXT + 1] for i in range(0, whole, CONTEXT)])


def loss_of(model, window):
    window = window.to(DEVICE)
    scores = model(window[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def write(model, start, length):
    """Continue the text, letter by letter."""
    letters = torch.tensor([[LETTERS.index(letter) for letter in start]], device=DEVICE)
    for _ in range(length):
        chances = model(letters[:, -CONTEXT:])[0, -1].softmax(0)
        letters = torch.cat((letters, torch.multinomial(chances, 1)[None]), dim=1)
    return "".join(LETTERS[number] for number in letters[0].tolist())


def main():
    springtide.init()
    number_of = {letter: number for number, letter in enumerate(LETTERS)}
    data = windows(torch.tensor([number_of[letter] for letter in TEXT]))
    most = STEPS * BATCH_SIZE
    held_out, train = data[::10][:most], data[torch.arange(len(data)) % 10 != 0][:most]

    torch.manual_seed(0)
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warm_up = max(1, STEPS // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1, n / STEPS)))
    )
    springtide.distribute(model, optimizer, scheduler=scheduler, clip_norm=1.0)

    epochs = round(most / len(train))
    for window in springtide.batches(train, batch_size=BATCH_SIZE, epochs=epochs, seed=0):
        with springtide.step():
            loss = loss_of(model, window.data)
            loss.backward()
            springtide.report(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    evaluation = springtide.batches(held_out, batch_size=BATCH_SIZE, train=False)
    for window in evaluation:
        with torch.no_grad():
            springtide.report(held_out_loss=loss_of(model, window.data))
    print(f"held-out loss {evaluation.values['held_out_loss']:.3f} per letter")
    print(write(model, "The for statement\n", min(STEPS, 300)))


if __name__ == "__main__":
    main()
