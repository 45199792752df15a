# A stream that can say where it stands, in the loader that asks it: what is read again begins where it was left.
import argparse

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="model.pt")
args = parser.parse_args()
torch.manual_seed(0)


class Counter(IterableDataset):
    """Numbers from 0 on, and their sines; knows its place."""

    def __init__(self, size):
        self.size = size
        self.position = 0

    def __iter__(self):
        while self.position < self.size:
            value = torch.tensor([self.position / self.size])
            self.position += 1
            yield value, torch.sin(6 * value)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


loader = StatefulDataLoader(Counter(160), batch_size=16)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(5):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
torch.save(model.state_dict(), args.output)
