# A data set without length, read line by line from files that the loader's processes share out among themselves.
import argparse
import glob
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data")
parser.add_argument("--output", default="model.pt")
args = parser.parse_args()
torch.manual_seed(0)


def read_shard(path):
    with open(path) as f:
        for line in f:
            row = json.loads(line)
            yield torch.tensor(row["x"]), torch.tensor([row["y"]])


class JsonLines(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        worker = get_worker_info()
        files = self.files if worker is None else self.files[worker.id :: worker.num_workers]
        for path in files:
            yield from read_shard(path)


if not os.path.exists(args.data):
    os.makedirs(args.data)
    generator = torch.Generator().manual_seed(6)
    for shard in range(4):
        with open(f"{args.data}/{shard:02d}.jsonl", "w") as f:
            for _ in range(40):
                x = torch.rand(6, generator=generator)
                f.write(json.dumps({"x": x.tolist(), "y": float(x.sum())}) + "\n")

files = sorted(glob.glob(f"{args.data}/*.jsonl"))
loader = DataLoader(JsonLines(files), batch_size=16)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = nn.MSELoss()

for epoch in range(5):
    model.train()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / (i + 1):.4f}")

torch.save(model.state_dict(), args.output)
