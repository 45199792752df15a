"""A LightningModule, elastically: a small network that learns to read digits.

python examples/lightning/train.py

It needs `springtide[worker,lightning,examples]`. Two lines differ from a script for one process: the import,
and `strategy=`.
"""

import os

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from springtide.integrations.lightning import SpringtideStrategy

EPOCHS = int(os.environ.get("EPOCHS", "20"))
OUTPUT = os.environ.get("OUTPUT", "out")  # in a job: a volume that all workers mount


class Reader(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(256, 10),
        )
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(10)
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(10)

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, batch_idx):
        images, digits = batch
        scores = self(images)
        loss = torch.nn.functional.cross_entropy(scores, digits)
        self.train_accuracy(scores, digits)
        self.log("train_loss", loss)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, digits = batch
        self.val_accuracy(self(images), digits)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    images, digits = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(digits))
    train, val = torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=SpringtideStrategy(),
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,  # 64 samples in a step, whatever the number of workers
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=OUTPUT,
        logger=CSVLogger(OUTPUT),
        callbacks=[ModelCheckpoint(monitor="val_accuracy", mode="max")],
    )
    trainer.fit(Reader(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=128))
    print(f"accuracy {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
