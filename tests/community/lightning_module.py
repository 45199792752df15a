# A LightningModule with a data module, callbacks, logged values and a schedule.
import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class ToyDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(11)
        x = torch.randn(200, 12, generator=generator)
        y = x[:, :3].argmax(1)
        self.train_set, self.val_set = random_split(TensorDataset(x, y), [160, 40], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)


class LitClassifier(L.LightningModule):
    def __init__(self, hidden_dim: int = 24, learning_rate: float = 0.02):
        super().__init__()
        self.save_hyperparameters()
        self.l1 = nn.Linear(12, hidden_dim)
        self.l2 = nn.Linear(hidden_dim, 3)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def cli_main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default=".")
    args = parser.parse_args()
    L.seed_everything(1234)
    trainer = L.Trainer(
        max_epochs=5,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        enable_progress_bar=False,
        default_root_dir=args.root,
        logger=CSVLogger(args.root),
        callbacks=[
            ModelCheckpoint(dirpath=f"{args.root}/checkpoints", monitor="val_loss", save_last=True),
            EarlyStopping(monitor="val_loss", patience=5),
            LearningRateMonitor(logging_interval="step"),
        ],
    )
    model = LitClassifier()
    trainer.fit(model, datamodule=ToyDataModule())
    trainer.validate(model, datamodule=ToyDataModule())


if __name__ == "__main__":
    cli_main()
