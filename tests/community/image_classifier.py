# An image classifier with all that belongs to one: warm-up, label smoothing, an average of weights, meters, a saver.
import argparse
import logging
import time
from collections import OrderedDict
from copy import deepcopy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_logger = logging.getLogger("train")
parser = argparse.ArgumentParser(description="Image training")
parser.add_argument("--output", default="ema.pt")
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--model-ema-decay", type=float, default=0.9)
parser.add_argument("--log-interval", type=int, default=4)


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def create_model(num_classes):
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 6, 3, padding=1, bias=False),
            norm=nn.GroupNorm(2, 6),
            act=nn.SiLU(),
            pool=nn.AdaptiveAvgPool2d(2),
            flat=nn.Flatten(),
            head=nn.Linear(24, num_classes),
        )
    )


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean() * 100.0


def main():
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(42)
    model = create_model(4)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    model_ema = ModelEma(model, decay=args.model_ema_decay)

    generator = torch.Generator().manual_seed(9)
    images = torch.randn(224, 3, 8, 8, generator=generator)
    targets = images[:, :, :4, :4].mean((2, 3)).argmax(1)
    dataset_train = TensorDataset(images[:160], targets[:160])
    dataset_eval = TensorDataset(images[160:], targets[160:])
    loader_train = DataLoader(dataset_train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    loader_eval = DataLoader(dataset_eval, batch_size=2 * args.batch_size)

    train_loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    validate_loss_fn = nn.CrossEntropyLoss()
    updates = len(loader_train)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=args.warmup_epochs * updates),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, (args.epochs - args.warmup_epochs) * updates
            ),
        ],
        [args.warmup_epochs * updates],
    )

    best_metric = None
    for epoch in range(args.epochs):
        train_metrics = train_one_epoch(
            epoch,
            model,
            loader_train,
            optimizer,
            train_loss_fn,
            args,
            lr_scheduler=lr_scheduler,
            model_ema=model_ema,
        )
        eval_metrics = validate(model_ema.module, loader_eval, validate_loss_fn)
        _logger.info("%s %s", train_metrics, eval_metrics)
        if best_metric is None or eval_metrics["top1"] > best_metric:
            best_metric = eval_metrics["top1"]
        _logger.info("*** Best metric: %.3f (epoch %d)", best_metric, epoch)
    torch.save(
        {"state_dict": model.state_dict(), "state_dict_ema": model_ema.module.state_dict()}, args.output
    )


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler=None, model_ema=None):
    batch_time_m = AverageMeter()
    losses_m = AverageMeter()
    model.train()
    end = time.time()
    last_idx = len(loader) - 1
    for batch_idx, (input, target) in enumerate(loader):
        output = model(input)
        loss = loss_fn(output, target)
        losses_m.update(loss.item(), input.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if model_ema is not None:
            model_ema.update(model)
        if lr_scheduler is not None:
            lr_scheduler.step()
        batch_time_m.update(time.time() - end)
        if batch_idx == last_idx or batch_idx % args.log_interval == 0:
            lr = sum(group["lr"] for group in optimizer.param_groups) / len(optimizer.param_groups)
            _logger.info(
                "Train: %d [%d/%d] Loss: %.3f LR: %.3e", epoch, batch_idx, last_idx, losses_m.val, lr
            )
        end = time.time()
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn):
    losses_m = AverageMeter()
    top1_m = AverageMeter()
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            output = model(input)
            losses_m.update(loss_fn(output, target).item(), input.size(0))
            top1_m.update(accuracy(output, target).item(), output.size(0))
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg)])


if __name__ == "__main__":
    main()
