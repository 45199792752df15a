"""A convolutional network with BatchNorm, augmented images, mixed precision and evaluation in between.

    python examples/augmentation/train.py

On a GPU it trains in fp16 with a GradScaler, on the CPU in bfloat16 without one.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import springtide

BATCH_SIZE = 128
EPOCHS = int(os.environ.get("EPOCHS", "20"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISION = torch.float16 if DEVICE == "cuda" else torch.bfloat16


class Augmented(Dataset):
    """Images of 8 x 8 that are moved by up to one pixel and made noisy each time they are read."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        # Random numbers in here belong to the step: one that is done again draws the same ones.
        down, right = torch.randint(0, 3, (2,)).tolist()
        moved = F.pad(self.images[index], (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        return moved + 0.05 * torch.randn_like(moved), self.labels[index]


def load():
    """Return the training set (1437 images) and the test set (360), always split the same way."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2))
    test, train = order[:360], order[360:]
    return Augmented(images[train], labels[train]), (images[test], labels[test])


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def main():
    springtide.init()
    train, test = load()
    torch.manual_seed(0)
    model = nn.Sequential(block(1, 16), nn.MaxPool2d(2), block(16, 32), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(32, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = EPOCHS * -(-len(train) // BATCH_SIZE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
    springtide.distribute(model, optimizer, scheduler=scheduler, scaler=scaler)

    def evaluate():
        """Return the accuracy on the test set, which all workers share out among them."""
        model.eval()
        evaluation = springtide.batches(test, batch_size=64, train=False)
        for images, labels in evaluation:
            with torch.no_grad(), torch.autocast(DEVICE, PRECISION):
                right = model(images.to(DEVICE)).argmax(1) == labels.to(DEVICE)
            springtide.report(test_accuracy=right.float().mean())
        model.train()
        return evaluation.values["test_accuracy"]

    for batch in springtide.batches(train, batch_size=BATCH_SIZE, epochs=EPOCHS, seed=0):
        with springtide.step():
            images, labels = batch
            with torch.autocast(DEVICE, PRECISION):
                loss = F.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE))
            springtide.report(loss=loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # skipped by all workers if a gradient is not finite at one of them
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

    print(f"test accuracy {evaluate():.4f}")


if __name__ == "__main__":
    main()
