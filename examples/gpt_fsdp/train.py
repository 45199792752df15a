"""A small GPT whose parameters, gradients and optimizer state are divided among the processes of each pod.

python examples/gpt_fsdp/train.py
"""

import math
import os
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import springtide

CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 4
BATCH_SIZE = 32  # windows of CONTEXT letters, of the whole job
STEPS = int(os.environ.get("STEPS", "2000"))

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
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)

    def forward(self, letters):
        places = torch.arange(letters.shape[1], device=letters.device)
        x = self.letter(letters) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def windows(numbers):
    """Cut the text into (n, CONTEXT + 1): each window's letters but the last one, and those that follow."""
    whole = (len(numbers) - 1) // CONTEXT * CONTEXT
    return torch.stack([numbers[i : i + CONTEXT + 1] for i in range(0, whole, CONTEXT)])


def main():
    springtide.init()
    mesh = springtide.mesh()  # of the processes of this pod
    number_of = {letter: number for number, letter in enumerate(LETTERS)}
    data = windows(torch.tensor([number_of[letter] for letter in TEXT]))
    most = STEPS * BATCH_SIZE
    train = data[:most]

    torch.manual_seed(0)
    model = GPT().to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warm_up = max(1, STEPS // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1, n / STEPS)))
    )
    springtide.distribute(model, optimizer, scheduler=scheduler, clip_norm=1.0)

    epochs = round(most / len(train))
    for window in springtide.batches(train, batch_size=BATCH_SIZE, epochs=epochs, seed=0):
        with springtide.step():
            letters = window.data.to(mesh.device_type)
            loss = F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())
            loss.backward()
            springtide.report(loss=loss.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    here = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    print(f"trained {whole} parameters, of which {here} are in this process")


if __name__ == "__main__":
    main()
