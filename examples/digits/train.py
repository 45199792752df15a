"""Handwritten digits, an MLP, SGD: by the workers of a job, or alone: `python examples/digits/train.py`."""

import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import springtide

BATCH_SIZE = 128
EPOCHS = int(os.environ.get("DIGITS_EPOCHS", "250"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Stands for the work of a bigger model: this one is done in seconds, too soon to watch it rise and fall.
PAUSE_SECONDS = float(os.environ.get("DIGITS_PAUSE_SECONDS", "0"))


def load():
    """Return the training set (1437 images) and the test set (360), always split the same way."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=DEVICE) / 16
    labels = torch.tensor(digits.target, device=DEVICE)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2))
    test, train = order[:360], order[360:]
    return (images[train], labels[train]), (images[test], labels[test])


def main():
    springtide.init()
    (images, labels), (test_images, test_labels) = load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 10))
    model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * -(-len(images) // BATCH_SIZE))
    model, optimizer = springtide.distribute(model, optimizer, scheduler=scheduler)

    for x, y in springtide.batches((images, labels), batch_size=BATCH_SIZE, epochs=EPOCHS, seed=0):
        with springtide.step():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            springtide.report(loss=loss.item())
            time.sleep(PAUSE_SECONDS)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    with torch.no_grad():
        accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    springtide.report(test_accuracy=accuracy)
    print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
