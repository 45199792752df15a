"""Handwritten digits with DistributedDataParallel, and nothing of Springtide.

`springtide launch --torchrun-env --processes 2 -- python examples/torchrun/train.py`, alone or in a job; or
`torchrun --nproc-per-node 2 examples/torchrun/train.py`.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = int(os.environ.get("DIGITS_EPOCHS", "40"))
PAUSE_SECONDS = float(os.environ.get("DIGITS_PAUSE_SECONDS", "0"))
# Each process keeps its own copy, so no storage needs to be shared: what one rank has, all get.
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "checkpoint") + f".{os.environ.get('LOCAL_RANK', '0')}.pt")


def save(epoch, model, optimizer):
    """Write aside and move: a process that is stopped in between leaves the last whole checkpoint."""
    aside = CHECKPOINT.with_suffix(".new")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, aside)
    os.replace(aside, CHECKPOINT)


def go_on(model, optimizer):
    """Take over the newest checkpoint that any rank has; return its number of epochs."""
    mine = torch.load(CHECKPOINT) if CHECKPOINT.exists() else {"epoch": 0}
    epochs = [0] * dist.get_world_size()
    dist.all_gather_object(epochs, mine["epoch"])
    newest = max(epochs)
    if newest:
        box = [mine]
        dist.broadcast_object_list(box, src=epochs.index(newest))
        model.load_state_dict(box[0]["model"])
        optimizer.load_state_dict(box[0]["optimizer"])
    return newest


def main():
    dist.init_process_group("gloo")
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    done = go_on(model, optimizer)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} begins after epoch {done}", flush=True)
    wrapped = DistributedDataParallel(model)
    for epoch in range(done, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            time.sleep(PAUSE_SECONDS)
            optimizer.step()
            optimizer.zero_grad()
        save(epoch + 1, model, optimizer)
    accuracy = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
    print(f"accuracy {accuracy:.3f} after {EPOCHS} epochs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
