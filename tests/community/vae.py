# A variational autoencoder: its loss is a sum over the batch, and noise is drawn in forward.
import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="VAE Example")
parser.add_argument("--output", default="vae.pt")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--log-interval", type=int, default=5)
args = parser.parse_args()
torch.manual_seed(1)
device = torch.device("cpu")

pictures = (torch.rand(192, 3, generator=torch.Generator().manual_seed(3)) @ torch.eye(3).repeat(1, 6)).clamp(
    0, 1
)
train_loader = DataLoader(
    TensorDataset(pictures[:160], torch.zeros(160)), batch_size=args.batch_size, shuffle=True
)
test_loader = DataLoader(
    TensorDataset(pictures[160:], torch.zeros(32)), batch_size=args.batch_size, shuffle=False
)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(18, 24)
        self.fc21 = nn.Linear(24, 3)
        self.fc22 = nn.Linear(24, 3)
        self.fc3 = nn.Linear(3, 24)
        self.fc4 = nn.Linear(24, 18)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 18))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-2)


# Reconstruction + KL divergence losses summed over all elements and batch
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 18), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}] Loss: {loss.item() / len(data):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            recon_batch, mu, logvar = model(data.to(device))
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    test_loss /= len(test_loader.dataset)
    print(f"====> Test set loss: {test_loss:.4f}")
    return test_loss


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test_loss = test(epoch)
        with torch.no_grad():
            sample = model.decode(torch.randn(4, 3)).cpu()
    torch.save({"model": model.state_dict(), "loss": test_loss}, args.output)
