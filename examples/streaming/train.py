"""A small language model on documents in shards, which are read once and packed into blocks of one length.

python examples/streaming/train.py
"""

import os
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import springtide
from springtide.data import Shards, pack_tokens

LENGTH, WIDTH = 64, 64
BATCH_SIZE = 32  # blocks of LENGTH letters, of the whole job
PASSES = int(os.environ.get("PASSES", "2"))
SHARDS = 24
LETTERS = 128  # ASCII

NAMES = sorted(topics)


def read(shard):
    """Yield the documents of one shard: every SHARDS-th topic of Python's manual."""
    for name in NAMES[shard::SHARDS]:
        yield topics[name].encode("ascii", "replace")


def letters_of(document):
    return torch.frombuffer(bytearray(document), dtype=torch.uint8)


class Model(nn.Module):
    """Letters in (n, LENGTH), scores of the next letter out; no document sees another."""

    def __init__(self):
        super().__init__()
        self.letter = nn.Embedding(LETTERS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.head = nn.Linear(4 * WIDTH, LETTERS)

    def forward(self, letters, places, documents):
        x = self.letter(letters) + self.place(places)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        other = documents[:, :, None] != documents[:, None, :]
        mask = (later | other).repeat_interleave(4, 0)
        attended, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return self.head(self.layers(x + attended))


springtide.init()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
springtide.distribute(model, optimizer, clip_norm=1.0)

blocks = pack_tokens(Shards(range(SHARDS), read), LENGTH, tokens=letters_of, end=0)
for batch in springtide.batches(
    blocks, batch_size=BATCH_SIZE, epochs=PASSES, seed=0, shuffle_buffer=512, loader_workers=1
):
    with springtide.step():
        scores = model(batch["input_ids"], batch["position_ids"], batch["segment_ids"])
        following = batch["labels"][:, 1:].clone()
        following[batch["segment_ids"][:, 1:] != batch["segment_ids"][:, :-1]] = -100  # begins a document
        batch.weight((following != -100).sum())
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), following.flatten())
        loss.backward()
        springtide.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
print("the last block was trained", flush=True)
