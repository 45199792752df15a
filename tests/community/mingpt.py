# A trainer class of one's own with callbacks, that takes batches by `next()` for as many iterations as it is told.
import argparse
import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="model.pt")
options = parser.parse_args()


class SortDataset(Dataset):
    """Sequences of numbers, and behind each the same numbers sorted."""

    def __init__(self, length=4, num_digits=3, size=96):
        generator = torch.Generator().manual_seed(7)
        self.length, self.num_digits = length, num_digits
        self.inputs = torch.randint(num_digits, (size, length), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, idx):
        inp = self.inputs[idx]
        cat = torch.cat((inp, torch.sort(inp)[0]), dim=0)
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Net(nn.Module):
    def __init__(self, vocab, size):
        super().__init__()
        self.emb = nn.Embedding(vocab, size)
        self.gru = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, vocab)

    def configure_optimizers(self, train_config):
        return torch.optim.AdamW(self.parameters(), lr=train_config.learning_rate, betas=train_config.betas)

    def forward(self, idx, targets=None):
        logits = self.head(self.gru(self.emb(idx))[0])
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)


class Trainer:
    @staticmethod
    def get_default_config():
        return CfgNode(
            device="auto", num_workers=0, max_iters=None, batch_size=16,
            learning_rate=5e-3, betas=(0.9, 0.95), weight_decay=0.1, grad_norm_clip=1.0,
        )  # fmt: skip

    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self.model.to(self.device)
        print("running on device", self.device)
        self.iter_num = 0
        self.iter_time = 0.0
        self.iter_dt = 0.0

    def add_callback(self, onevent: str, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent: str):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config

        # setup the optimizer
        self.optimizer = model.configure_optimizers(config)

        # setup the dataloader
        train_loader = DataLoader(
            self.train_dataset,
            shuffle=True,
            pin_memory=torch.cuda.is_available(),
            batch_size=config.batch_size,
            num_workers=config.num_workers,
        )

        model.train()
        self.iter_num = 0
        self.iter_time = time.time()
        data_iter = iter(train_loader)
        while True:
            # fetch the next batch (x, y) and re-init iterator if needed
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            batch = [t.to(self.device) for t in batch]
            x, y = batch

            # forward the model
            logits, self.loss = model(x, y)

            # backprop and update the parameters
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()

            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            tnow = time.time()
            self.iter_dt = tnow - self.iter_time
            self.iter_time = tnow

            # termination conditions
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


def batch_end_callback(trainer):
    if trainer.iter_num % 10 == 0:
        print(
            f"iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: loss {trainer.loss.item():.5f}"
        )


torch.manual_seed(3407)
model = Net(3, 16)
config = Trainer.get_default_config()
config.max_iters = 60
trainer = Trainer(config, model, SortDataset())
trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()
torch.save(trainer.model.state_dict(), options.output)
