# Contrastive learning with a queue of keys and an encoder that follows by momentum.
import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="MoCo")
parser.add_argument("--output", default="moco.pt")
parser.add_argument("--lr", type=float, default=0.06)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--moco-dim", default=8, type=int)
parser.add_argument("--moco-k", default=64, type=int, help="queue size; number of negative keys")
parser.add_argument("--moco-m", default=0.9, type=float)
parser.add_argument("--moco-t", default=0.2, type=float)
parser.add_argument("--cos", action="store_true")


class TwoCrops(Dataset):
    """Two views of each picture."""

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.pictures = torch.randn(160, 12, generator=generator)
        self.noise = 0.1 * torch.randn(2, 160, 12, generator=generator)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return [self.pictures[i] + self.noise[0, i], self.pictures[i] + self.noise[1, i]], 0


class MoCo(nn.Module):
    def __init__(self, base_encoder, dim=8, K=64, m=0.9, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = base_encoder(num_classes=dim)
        self.encoder_k = base_encoder(num_classes=dim)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data.copy_(param_q.data)  # initialize
            param_k.requires_grad = False  # not update by gradient
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0  # for simplicity
        self.queue[:, ptr : ptr + batch_size] = keys.T
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():  # no gradient to keys
            self._momentum_update_key_encoder()
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


def encoder(num_classes):
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, num_classes))


def adjust_learning_rate(optimizer, epoch, args):
    """Decay the learning rate based on schedule"""
    lr = args.lr * (
        0.5 * (1.0 + math.cos(math.pi * epoch / args.epochs)) if args.cos else 0.5 ** (epoch // 2)
    )
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train(train_loader, model, criterion, optimizer, epoch, args):
    model.train()
    for i, (images, _) in enumerate(train_loader):
        # compute output
        output, target = model(im_q=images[0], im_k=images[1])
        loss = criterion(output, target)

        # compute gradient and do SGD step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] Loss {loss.item():.4e}")
    return loss.item()


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = MoCo(encoder, args.moco_dim, args.moco_k, args.moco_m, args.moco_t)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    train_loader = DataLoader(TwoCrops(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    for epoch in range(args.epochs):
        adjust_learning_rate(optimizer, epoch, args)
        last = train(train_loader, model, criterion, optimizer, epoch, args)
    torch.save({"epoch": epoch, "state_dict": model.state_dict(), "loss": last}, args.output)


if __name__ == "__main__":
    main()
