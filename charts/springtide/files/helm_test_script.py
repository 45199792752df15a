# What each worker of `helm test` runs: fit y = 3 x0 - 2 x1, and say how far off the weights are.
import torch
from torch.utils.data import TensorDataset

import springtide

springtide.init()
torch.manual_seed(0)
inputs = torch.randn(256, 2)
targets = inputs @ torch.tensor([[3.0], [-2.0]])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = springtide.distribute(model, optimizer)
for x, y in springtide.batches(TensorDataset(inputs, targets), batch_size=32, epochs=10, seed=0):
    with springtide.step():
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
error = float((model.weight.detach() - torch.tensor([[3.0, -2.0]])).abs().max())
springtide.report(weight_error=error)
if error > 0.01:
    raise RuntimeError(f"trained for 80 steps, but the weights are off by {error:.3f}")
