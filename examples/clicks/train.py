"""Clicks, a wide and deep model with embedding tables, Adagrad: by a job with strategy Hybrid or
ParameterServer, or alone: `python examples/clicks/train.py`.

The data is made from a known truth, so the best area under the ROC curve that any model can reach is known.
"""

import os
import time

import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import springtide

BATCH_SIZE = 512
EPOCHS = int(os.environ.get("CLICKS_EPOCHS", "5"))
SAMPLES = int(os.environ.get("CLICKS_SAMPLES", "60000"))
PAUSE_SECONDS = float(os.environ.get("CLICKS_PAUSE_SECONDS", "0"))
USERS, ITEMS, SEGMENTS = 400, 120, 8


def make_data():
    """Return ids int64 [n, 2], facts of the moment float32 [n, 4], clicked float32 [n], and its chance."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tastes, traits, popularity = normal(USERS, 3), normal(ITEMS, 3), normal(ITEMS)
    by_segment = 0.7 * normal(SEGMENTS, ITEMS)
    # A few users and items are seen often, most are not.
    users = (USERS * torch.rand(SAMPLES, generator=generator) ** 2).long()
    items = (ITEMS * torch.rand(SAMPLES, generator=generator) ** 2).long()
    moment = normal(SAMPLES, 4)
    score = 0.6 * (tastes[users] * traits[items]).sum(1) + by_segment[users % SEGMENTS, items]
    score += popularity[items] + moment @ torch.tensor([0.5, -0.4, 0.3, 0.0]) - 1.0
    chance = torch.sigmoid(score)
    clicked = (torch.rand(SAMPLES, generator=generator) < chance).float()
    # Names of users and items as other systems give them: any 64-bit number.
    ids = torch.stack([users * 7_919_000_003 + 1, -1 - items * 104_729], 1)
    return ids, moment, clicked, chance


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = springtide.EmbeddingBag(None, 1, mode="sum", seed=1, init="zeros")
        self.users = springtide.Embedding(None, 8, seed=2, scale=0.3)
        self.items = springtide.Embedding(None, 8, seed=3, scale=0.3)
        self.deep = nn.Sequential(nn.Linear(8 * 3 + 4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids, moment):
        users, items = ids.unbind(1)
        segments = (users - 1) // 7_919_000_003 % SEGMENTS
        crossed = segments * 1_000_003 + items * 31
        wide = self.wide(torch.stack([users, items, crossed], 1))
        user, item = self.users(users), self.items(items)
        return (wide + self.deep(torch.cat([user, item, user * item, moment], 1))).squeeze(1)


def main():
    springtide.init()
    ids, moment, clicked, chance = make_data()
    test = SAMPLES // 5
    torch.manual_seed(0)
    model = WideAndDeep()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
    model, optimizer = springtide.distribute(model, optimizer)

    training = (ids[test:], moment[test:], clicked[test:])
    for x, at, y in springtide.batches(training, batch_size=BATCH_SIZE, epochs=EPOCHS, seed=0):
        with springtide.step():
            loss = F.binary_cross_entropy_with_logits(model(x, at), y)
            loss.backward()
            springtide.report(loss=loss.item())
            time.sleep(PAUSE_SECONDS)
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        auc = roc_auc_score(clicked[:test], model(ids[:test], moment[:test]))
    best = roc_auc_score(clicked[:test], chance[:test])
    springtide.report(test_auc=auc, best_auc=best)
    print(f"test AUC {auc:.4f}, with the known truth {best:.4f}")


if __name__ == "__main__":
    main()
