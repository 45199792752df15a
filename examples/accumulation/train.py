"""Gradient accumulation: a large global batch in pieces that fit into memory, on any number of workers.

    python examples/accumulation/train.py

The update is that of the whole batch at once: the library weights the pieces by their samples. When workers
go, the others take more pieces, so nobody needs more memory than before.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import springtide

BATCH_SIZE = 512  # of the whole job, whatever the number of workers
MICRO_BATCH = 64  # most samples that one worker computes at once
EPOCHS = int(os.environ.get("EPOCHS", "60"))


def main():
    springtide.init()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Clipping is the library's affair: the norm is that of the average over all workers and pieces.
    model, optimizer = springtide.distribute(model, optimizer, clip_norm=1.0)

    for batch in springtide.batches(
        (images, labels), batch_size=BATCH_SIZE, micro_batch=MICRO_BATCH, epochs=EPOCHS, seed=0
    ):
        with springtide.step():
            for x, y in batch.split():  # as many pieces as needed; gradients leave with the last one
                loss = F.cross_entropy(model(x), y)  # the mean over the piece: no division by their number
                loss.backward()
                springtide.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()

    print(f"accuracy on the training set {(model(images).argmax(1) == labels).float().mean().item():.4f}")


if __name__ == "__main__":
    main()
