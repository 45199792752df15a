"""A loop with Accelerate, elastically: a small network that learns to read digits.

python examples/accelerate/train.py

It needs `springtide[worker,accelerate,examples]`. Two lines differ from a script for accelerate's own
Accelerator: the import, and the name.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from springtide.integrations.accelerate import ElasticAccelerator

EPOCHS = int(os.environ.get("EPOCHS", "20"))
OUTPUT = os.environ.get("OUTPUT", "out")  # in a job: a volume that all workers mount


def main():
    accelerator = ElasticAccelerator(gradient_accumulation_steps=2)
    images, digits = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(digits))
    train, val = torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 23)
    loader = DataLoader(train, batch_size=32, shuffle=True)  # 64 samples in a step, whatever the workers
    model, optimizer, loader, val, schedule = accelerator.prepare(
        model, optimizer, loader, DataLoader(val, batch_size=128), schedule
    )
    for epoch in range(EPOCHS):
        model.train()
        for images, digits in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), digits)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = count = 0
        for images, digits in val:
            with torch.no_grad():
                scores = model(images)
            scores, digits = accelerator.gather_for_metrics((scores, digits))
            right, count = right + (scores.argmax(-1) == digits).sum().item(), count + len(digits)
        accelerator.print(f"epoch {epoch + 1}: accuracy {right / count:.3f}")
    accelerator.wait_for_everyone()
    accelerator.save_model(model, OUTPUT)
    accelerator.end_training()


if __name__ == "__main__":
    main()
