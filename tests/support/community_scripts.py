"""Scripts as their communities write them (`tests/community/`), and what changes in each for a job.

A change is a list of replacements, each of whole lines by others, applied to the text of the script. Lines
that are added, removed or written anew count; those of a body that only move to the right, below a new
`with`, do not.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "community"
MAX_LINES = 5
"""Lines that may change in a script."""
BEYOND = {"reinforce": 6}
"""Scripts that need more, and how many; the page says why."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Say what takes the place of some lines.

    Attributes:
        old: lines of the script, without the white space around them, the only such ones.
        new: lines in their place, with the indentation of the first old one.
        body: how many lines from behind them on move to the right, below a `with`; to the last of them.
    """

    old: str
    new: str
    body: str = ""


@dataclass(frozen=True, slots=True)
class Community:
    """One script, what changes in it, and what is to come out.

    Attributes:
        title: of the row in docs/compatibility.md.
        replacements: that the guide names.
        arguments: of the command line; {own} is a folder of each process, {shared} one of all.
        result: the file that it leaves, in these folders.
        tolerance: the largest difference to the script alone, unchanged; None: random numbers or statistics
            of a part of the batch are in it, so that all workers are alike, and learn as it does.
        order: of the samples: (seed, epoch) of pass number k, as a format; empty: the data set's own.
        learned: with a tolerance of None, the largest loss that training is to end with.
        refused: a part of the sentence with which it is refused; empty: it runs.
        note: why it is refused, or what else there is to say, for the page.
        join_at: the step behind which a worker joins.
        imports: modules of other libraries that it takes.
        environment: of its processes.
    """

    title: str
    replacements: tuple[Replacement, ...]
    arguments: tuple[str, ...] = ("--output", "{own}/result.pt")
    result: str = "{own}/result.pt"
    tolerance: float | None = 2e-5
    order: str = "k 0"
    learned: float | None = None
    refused: str = ""
    join_at: int = 14
    note: str = ""
    imports: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def source_of(name: str) -> str:
    """Return the text of a script."""
    return (FOLDER / f"{name}.py").read_text()


def converted(name: str) -> str:
    """Return the text of a script with its changes.

    Args:
        name: of the script.

    Raises:
        ValueError: lines that are to be replaced are not there, or not once.
    """
    lines = source_of(name).splitlines()
    for replacement in SCRIPTS[name].replacements:
        lines = _replaced(lines, replacement, name)
    return "\n".join(lines) + "\n"


def _replaced(lines: list[str], replacement: Replacement, name: str) -> list[str]:
    old = [line.strip() for line in replacement.old.splitlines()]
    bare = [line.strip() for line in lines]
    places = [n for n in range(len(lines)) if bare[n : n + len(old)] == old]
    if len(places) != 1:
        raise ValueError(f"{name}: {replacement.old!r} is there {len(places)} times")
    first, after = places[0], places[0] + len(old)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    new = [(indent + line).rstrip() for line in replacement.new.splitlines()]
    body: list[str] = []
    if replacement.body:
        stop = 1 + next(n for n in range(after, len(lines)) if bare[n] == replacement.body)
        body = [f"    {line}" if line.strip() else line for line in lines[after:stop]]
        after = stop
    return [*lines[:first], *new, *body, *lines[after:]]


def changed_lines(name: str) -> int:
    """Return how many lines of a script change: those written anew once, and those added or removed.

    Args:
        name: of the script.
    """
    before, after = (
        [line.strip() for line in text.splitlines()] for text in (source_of(name), converted(name))
    )
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(
        max(stop - start, other_stop - other)
        for kind, start, stop, other, other_stop in matcher.get_opcodes()
        if kind != "equal"
    )


_IMPORT = Replacement("import torch", "import springtide\nimport torch")

SCRIPTS: dict[str, Community] = {
    "quickstart": Community(
        "the quickstart: functions `train` and `test`, an epoch each",
        (
            _IMPORT,
            Replacement(
                "optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)",
                "optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)\n"
                "springtide.distribute(model, optimizer)",
            ),
            Replacement(
                "for batch, (X, y) in enumerate(dataloader):",
                "for batch, (X, y) in enumerate(springtide.batches(dataloader.dataset, "
                "batch_size=batch_size, seed=t)):\n"
                "    with springtide.step():",
                'print(f"loss: {loss:>7f}  [{current:>5d}/{size:>5d}]")',
            ),
        ),
    ),
    "transfer_learning": Community(
        "transfer learning: one loop for the phases train and val, the best weights kept",
        (
            _IMPORT,
            Replacement(
                "exp_lr_scheduler = lr_scheduler.StepLR(optimizer_ft, step_size=2, gamma=0.5)",
                "exp_lr_scheduler = lr_scheduler.StepLR(optimizer_ft, step_size=2, gamma=0.5)\n"
                "springtide.distribute(model_ft, optimizer_ft, scheduler=exp_lr_scheduler)",
            ),
            Replacement(
                "for inputs, labels in dataloaders[phase]:",
                'data = springtide.batches(image_datasets["train"], batch_size=8, seed=epoch)'
                ' if phase == "train" else dataloaders[phase]\n'
                "for inputs, labels in data:\n"
                '    with springtide.step() if phase == "train" else torch.no_grad():',
                "running_corrects += torch.sum(preds == labels.data)",
            ),
        ),
    ),
    "word_language_model": Community(
        "words by an LSTM: the hidden state goes from one batch to the next",
        (
            _IMPORT,
            Replacement(
                "optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)",
                "optimizer = torch.optim.SGD(model.parameters(), "
                "lr=args.lr)\nspringtide.distribute(model, optimizer)",
            ),
            Replacement(
                "for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):",
                "for batch, i in enumerate(int(b.data[0]) for b in springtide.batches("
                "range(0, len(train_data) - 1, args.bptt), batch_size=1, shuffle=False)):\n"
                "    with springtide.step():",
                "total_loss += loss.item()",
            ),
        ),
        arguments=("--save", "{own}/result.pt"),
        refused="clip_norm",
        note="`clip_grad_norm_` by hand: give `clip_norm=`; and begin windows with a hidden state of zeros "
        "([guide](guide.md#a-hidden-state-from-one-batch-to-the-next))",
    ),
    "nanogpt": Community(
        "the GPT of one file: random windows, accumulation and schedule by hand, `while True`",
        (
            Replacement(
                "import torch\nfrom torch import nn", "import springtide\nimport torch\nfrom torch import nn"
            ),
            Replacement(
                "grad_clip = 1.0  # clip gradients at this value, or disable if == 0.0", "grad_clip = 0.0"
            ),
            Replacement(
                "# training loop",
                "springtide.distribute(model, optimizer, clip_norm=1.0)",
            ),
            Replacement(
                "while True:",
                "for iter_num in (int(b.data[0]) for b in springtide.batches("
                "[n for n in range(max_iters) for _ in range(16)], batch_size=16, shuffle=False)):",
            ),
            Replacement(
                "# forward backward update, with optional gradient accumulation to "
                "simulate larger batch size",
                "with springtide.step():",
                "optimizer.zero_grad(set_to_none=True)",
            ),
        ),
        arguments=(),
        result="{own}/out/ckpt.pt",
        tolerance=None,
        learned=2.0,
    ),
    "mingpt": Community(
        "a trainer class of its own: batches by `next()`, so many iterations, callbacks",
        (
            _IMPORT,
            Replacement(
                "self.optimizer = model.configure_optimizers(config)",
                "self.optimizer = "
                "model.configure_optimizers(config)\nspringtide.distribute(model, self.optimizer)",
            ),
            Replacement(
                "data_iter = iter(train_loader)\nwhile True:",
                "data_iter = springtide.batches(self.train_dataset, "
                "batch_size=config.batch_size, epochs=10)\n"
                "while True:",
            ),
            Replacement("data_iter = iter(train_loader)\nbatch = next(data_iter)", "break"),
            Replacement(
                "batch = [t.to(self.device) for t in batch]",
                "with springtide.step():\n    batch = [t.to(self.device) for t in batch]",
                "self.iter_time = tnow",
            ),
        ),
        refused="clip_norm",
        note="`clip_grad_norm_` by hand: give `clip_norm=` and leave that line out, which makes it six",
    ),
    "image_classifier": Community(
        "an image classifier with warm-up, label smoothing, an average of weights, meters",
        (
            _IMPORT,
            Replacement(
                "best_metric = None",
                "springtide.distribute(model, optimizer, scheduler=lr_scheduler, "
                "ema=model_ema)\nbest_metric = None",
            ),
            Replacement(
                "for batch_idx, (input, target) in enumerate(loader):",
                "for batch_idx, (input, target) in enumerate(\n"
                "    springtide.batches(loader.dataset, batch_size=args.batch_size, "
                "seed=epoch, drop_last=True)):\n"
                "    with springtide.step():",
                "end = time.time()",
            ),
        ),
    ),
    "lightning_module": Community(
        "a LightningModule with a data module, callbacks, logged values and a schedule",
        (
            Replacement(
                "from torch import nn",
                "from springtide.integrations.lightning import SpringtideStrategy\nfrom torch import nn",
            ),
            Replacement("max_epochs=5,", "max_epochs=5,\nstrategy=SpringtideStrategy(),"),
        ),
        arguments=("--root", "{shared}"),
        result="{shared}/checkpoints/last.ckpt",
        imports=("lightning",),
        order="1234 k",
    ),
    "dcgan": Community(
        "a GAN: two networks, two optimizers, real and fake halves",
        (
            _IMPORT,
            Replacement(
                "G_losses = []",
                "springtide.distribute([netG, netD], [optimizerD, optimizerG])\nG_losses = []",
            ),
            Replacement(
                "for i, data in enumerate(dataloader, 0):",
                "for i, data in enumerate(springtide.batches(dataset, "
                "batch_size=opt.batchSize, seed=epoch)):\n"
                "    with springtide.step():",
                "D_losses.append(errD.item())",
            ),
        ),
        tolerance=None,
    ),
    "vae": Community(
        "a variational autoencoder, whose loss is a sum",
        (
            Replacement(
                "loss = loss_function(recon_batch, data, mu, logvar)",
                "loss = loss_function(recon_batch, data, mu, logvar) / len(data)",
            ),
            _IMPORT,
            Replacement(
                "optimizer = optim.Adam(model.parameters(), lr=1e-2)",
                "optimizer = optim.Adam(model.parameters(), "
                "lr=1e-2)\nspringtide.distribute(model, optimizer)",
            ),
            Replacement(
                "for batch_idx, (data, _) in enumerate(train_loader):",
                "for batch_idx, (data, _) in enumerate("
                "springtide.batches(train_loader.dataset, batch_size=args.batch_size, seed=epoch)):\n"
                "    with springtide.step():",
                'print(f"Train Epoch: {epoch} [{batch_idx * len(data)}] Loss: {loss.item() '
                '/ len(data):.6f}")',
            ),
        ),
        tolerance=None,
        learned=13.0,
    ),
    "moco": Community(
        "contrastive learning: a queue of keys, an encoder that follows by momentum",
        (
            Replacement(
                "self.queue[:, ptr : ptr + batch_size] = keys.T",
                "self.queue[:, torch.arange(ptr, ptr + batch_size) % self.K] = keys.T",
            ),
            Replacement(
                "import torch\nfrom torch import nn", "import springtide\nimport torch\nfrom torch import nn"
            ),
            Replacement(
                "train_loader = DataLoader(TwoCrops(), batch_size=args.batch_size, "
                "shuffle=True, drop_last=True)",
                "train_loader = DataLoader(TwoCrops(), batch_size=args.batch_size, "
                "shuffle=True, drop_last=True)\n"
                "springtide.distribute(model, optimizer)",
            ),
            Replacement(
                "for i, (images, _) in enumerate(train_loader):",
                "for i, (images, _) in enumerate(springtide.batches(TwoCrops(), "
                "batch_size=args.batch_size, seed=epoch)):\n"
                "    with springtide.step():",
                'print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] Loss {loss.item():.4e}")',
            ),
        ),
        tolerance=None,
        learned=1.6,
        note="parts of the batch have to divide the queue, as the script's own `assert` says",
    ),
    "reinforce": Community(
        "policy gradient: an episode is played in each step",
        (
            Replacement(
                "import torch\nfrom torch import nn, optim",
                "import springtide\nimport torch\nfrom torch import nn, optim",
            ),
            Replacement(
                "optimizer = optim.Adam(policy.parameters(), lr=1e-2)",
                "optimizer = optim.Adam(policy.parameters(), "
                "lr=1e-2)\nspringtide.distribute(policy, optimizer)",
            ),
            Replacement(
                "state, ep_reward = env.reset(), 0",
                "state, ep_reward, policy.rewards, policy.saved_log_probs = env.reset(), 0, [], []",
            ),
            Replacement(
                "for i_episode in count(1):",
                "for i_episode, _ in enumerate(springtide.batches(range(320), batch_size=8), 1):\n"
                "    with springtide.step():",
                'print(f"Solved! Running reward {running_reward}, the last episode has {t} steps.")',
            ),
            Replacement(
                'print(f"Solved! Running reward {running_reward}, the last episode has {t} steps.")\nbreak',
                'print(f"Solved! Running reward {running_reward}, the last episode has {t} steps.")',
            ),
        ),
        tolerance=None,
        note="one more than five: a step that is done again finds lists that the script keeps, so they are "
        "emptied at its begin; a number of episodes takes the place of `break`",
    ),
    "dqn": Community(
        "deep Q-learning: a memory that fills first",
        (
            Replacement(
                "import torch\nfrom torch import nn, optim",
                "import springtide\nimport torch\nfrom torch import nn, optim",
            ),
            Replacement(
                "memory = ReplayMemory(200)",
                "springtide.distribute(policy_net, optimizer)\nmemory = ReplayMemory(200)",
            ),
            Replacement(
                "for t in count():",
                "for t, _ in enumerate(springtide.batches(range(64), batch_size=8, seed=i_episode)):\n"
                "    with springtide.step():",
                "target.lerp_(source, TAU)",
            ),
        ),
        refused="without backward() and optimizer.step()",
        note="no step until the memory is full: fill it before the loop",
    ),
    "run_glue": Community(
        "fine-tuning by Hugging Face's Trainer: arguments parsed, metrics, early stopping, best model",
        (
            Replacement("Trainer,\nTrainingArguments,", "TrainingArguments,"),
            Replacement(
                "logger = logging.getLogger(__name__)",
                "from springtide.integrations.transformers import ElasticTrainer as Trainer\n"
                "logger = logging.getLogger(__name__)",
            ),
        ),
        arguments=(
            "--output_dir",
            "{shared}",
            "--do_train",
            "--do_eval",
            "--report_to",
            "none",
            "--use_cpu",
            "--num_train_epochs",
            "2",
            "--eval_strategy",
            "epoch",
            "--save_strategy",
            "epoch",
            "--load_best_model_at_end",
            "--metric_for_best_model",
            "accuracy",
            "--disable_tqdm",
            "true",
        ),
        result="{shared}/final/model.safetensors",
        order="42 k",
        imports=("transformers",),
    ),
    "lora": Community(
        "adapters of low rank (LoRA) in a frozen model, a subclass of Trainer",
        (
            Replacement(
                "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, "
                "TrainingArguments, default_data_collator",
                "from springtide.integrations.transformers import ElasticTrainer as Trainer\n"
                "from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, "
                "default_data_collator",
            ),
        ),
        arguments=("--output_dir", "{shared}"),
        result="{shared}/final/model.safetensors",
        # Adam divides by the size of a gradient: where that is near zero, the order of a sum is seen.
        tolerance=5e-4,
        order="42 k",
        imports=("transformers",),
    ),
    "nlp_example": Community(
        "Accelerate: a loop of its own, accumulation by hand, metrics gathered",
        (
            Replacement(
                "from accelerate import Accelerator",
                "from springtide.integrations.accelerate import ElasticAccelerator as Accelerator",
            ),
            Replacement(
                "accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)",
                "accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)",
            ),
            Replacement(
                "for step, batch in enumerate(train_dataloader):",
                "for step, batch in enumerate(train_dataloader):\n    with accelerator.accumulate(model):",
                "optimizer.zero_grad()",
            ),
            Replacement("loss = loss / gradient_accumulation_steps", ""),
            Replacement(
                "if (step + 1) % gradient_accumulation_steps == 0:",
                "if accelerator.sync_gradients:",
            ),
        ),
        arguments=("--cpu", "--output", "{own}/result.pt"),
        order="k+1 0",
        imports=("accelerate", "transformers"),
    ),
    "ddp_torchrun": Community(
        "DistributedDataParallel by torchrun: a Trainer class with snapshots",
        (
            _IMPORT,
            Replacement(
                "self.model = DDP(self.model)",
                "self.model = DDP(self.model)\nspringtide.distribute(self.model, optimizer)",
            ),
            Replacement(
                "for source, targets in self.train_data:",
                "for source, targets in springtide.batches(self.train_data.dataset, "
                "batch_size=16, seed=epoch):\n"
                "    with springtide.step():",
                "self._run_batch(source, targets)",
            ),
        ),
        arguments=("--snapshot", "{own}/result.pt"),
        refused="DistributedDataParallel",
        note="the wrapper, the sampler and the process group go too, which is more than five lines "
        "([coming-from.md](coming-from.md#distributeddataparallel)); unchanged by "
        "[`springtide launch --torchrun-env`](launch.md#any-torchdistributed-script)",
        environment={
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        },
    ),
    "streaming": Community(
        "an IterableDataset over files, shared out by `get_worker_info()`",
        (
            Replacement(
                "import torch\nfrom torch import nn",
                "import springtide.data\nimport torch\nfrom torch import nn",
            ),
            Replacement(
                "loss_fn = nn.MSELoss()", "loss_fn = nn.MSELoss()\nspringtide.distribute(model, optimizer)"
            ),
            Replacement(
                "for i, (x, y) in enumerate(loader):",
                "shards = springtide.data.Shards(files, read_shard)\n"
                "for i, (x, y) in enumerate(springtide.batches(shards, batch_size=16, "
                "shuffle=False, streams=1)):\n"
                "    with springtide.step():",
                "total += loss.item()",
            ),
        ),
        order="",
    ),
    "resumable_stream": Community(
        "torchdata's StatefulDataLoader over a stream that keeps its place",
        (
            _IMPORT,
            Replacement(
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
                "optimizer = torch.optim.SGD(model.parameters(), "
                "lr=0.1)\nspringtide.distribute(model, optimizer)",
            ),
            Replacement(
                "for x, y in loader:",
                "for x, y in springtide.batches(loader, batch_size=16, shuffle=False):\n   "
                " with springtide.step():",
                "optimizer.step()",
            ),
        ),
        order="",
        imports=("torchdata",),
    ),
}
