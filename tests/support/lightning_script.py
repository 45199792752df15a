"""A training script of a user of Lightning, for the tests. argv: RESULT_FOLDER JSON_OPTIONS.

With `"plain": true` the Trainer has Lightning's own strategy. Writes RESULT_FOLDER/POD.events, a line for
each hook of a callback, and at its end RESULT_FOLDER/POD.json.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from script_hold import hold
from torch.utils.data import DataLoader, TensorDataset

HOOKS = [
    name
    for name in dir(Callback)
    if name.startswith("on_") and name not in ("on_before_backward", "on_after_backward")
]


class Recorder(Callback):
    """Writes down each hook with the step that the Trainer shows, and counts steps in a state of its own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self.ended = 0

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended, "mean": torch.tensor([1.0 * self.ended])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["mean"].tolist() == [state["ended"]]
        self.ended = state["ended"]

    def write(self, hook: str, trainer: Any, module: Any, *args: Any) -> None:
        line: dict[str, Any] = {"event": hook, "step": trainer.global_step, "first": trainer.is_global_zero}
        if hook == "on_before_optimizer_step" and not module.options.get("quiet"):
            stepped = [p for group in args[0].param_groups for p in group["params"]]
            gradients = [p.grad for p in stepped if p.grad is not None]
            line["norm"] = float(torch.nn.utils.get_total_norm(gradients))
        if hook == "on_train_batch_end":
            self.ended += 1
            line["ended"], line["batch_idx"] = self.ended, args[2]
            line["loss"] = float(args[0]["loss"]) if args[0] else None
            line["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if hook in ("on_train_epoch_end", "on_validation_end"):
            line["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._file.write(json.dumps(line) + "\n")


def _record(hook: str) -> Any:
    def record(self: Recorder, trainer: Any, module: Any, *args: Any, **named: Any) -> None:
        self.write(hook, trainer, module, *args)

    return record


for _hook in HOOKS:
    if _hook not in ("on_load_checkpoint", "on_save_checkpoint"):
        setattr(Recorder, _hook, _record(_hook))


class Classifier(pl.LightningModule):
    """Two layers, a schedule, metrics, and a hook of most kinds."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.options = options
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 12),
            torch.nn.BatchNorm1d(12) if options.get("norm") else torch.nn.Tanh(),
            torch.nn.Linear(12, 3),
        )
        self.seen = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.checked = torchmetrics.classification.MulticlassAccuracy(3, average="macro")
        self.mean_of_losses = torchmetrics.MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self(x)
        loss = torch.nn.functional.cross_entropy(scores, y)
        self.seen(scores.softmax(-1), y)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.mean_of_losses.update(loss.detach(), weight=len(y))
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(
            "right", (scores.argmax(-1) == y).float().sum(), reduce_fx="sum", on_step=False, on_epoch=True
        )
        self.log("scores", scores.mean(), batch_size=len(y))
        return {"loss": loss, "extra": 1}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        if not self.options.get("quiet"):
            self.log("norm", norm)

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_losses", self.mean_of_losses.compute())
        self.mean_of_losses.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.log("val_loss", torch.nn.functional.cross_entropy(scores, y), prog_bar=True)
        self.checked.update(scores, y)

    def on_validation_epoch_end(self) -> None:
        self.log("val_accuracy", self.checked.compute())
        self.checked.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", torch.nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        kind = self.options.get("schedule", "step")
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        if kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Players(pl.LightningModule):
    """Manual optimization: two models, each with its optimizer and schedule, one of them clipped."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.options = options
        self.maker: torch.nn.Module = torch.nn.Linear(6, 6)
        if options.get("wide"):  # enough for products of thin matrices to be smaller, and not the same
            inner = torch.nn.Linear(24, 24)
            self.maker = torch.nn.Sequential(
                torch.nn.Linear(6, 24), torch.nn.Tanh(), inner, torch.nn.Tanh(), torch.nn.Linear(24, 6)
            )
        self.judge = torch.nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        maker, judge = self.optimizers()
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        with maker.toggle_model():
            made = bce(self.judge(self.maker(x)), torch.ones(len(x), 1))
            maker.zero_grad()
            self.manual_backward(made)
            self.clip_gradients(maker, gradient_clip_val=0.05)
            maker.step()
        self.toggle_optimizer(judge)

        def closure() -> torch.Tensor:
            judged = bce(self.judge(x), torch.ones(len(x), 1)) + bce(
                self.judge(self.maker(x).detach()), torch.zeros(len(x), 1)
            )
            judge.zero_grad()
            self.manual_backward(judged)
            return judged

        judged = judge.step(closure=closure)
        self.untoggle_optimizer(judge)
        self.log_dict({"made": made, "judged": judged}, on_step=True, on_epoch=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return {"loss": made}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.judge(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        maker = torch.optim.SGD(self.maker.parameters(), lr=0.5)
        judge = torch.optim.Adam(self.judge.parameters(), lr=0.05, eps=1e-3)
        steps = [torch.optim.lr_scheduler.StepLR(item, 4, gamma=0.7) for item in (maker, judge)]
        return [maker, judge], steps


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


class Held(Callback):
    """Waits in `test()` until the test of this script lets it go on."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self._place = folder, name, options

    def on_test_start(self, trainer: Any, module: Any) -> None:
        hold(*self._place)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples that can only be read from their begin."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return (self._samples[number] for number in range(len(self._samples)))


class Afterwards(Callback):
    """Counts micro-batches."""

    def on_after_backward(self, trainer: Any, module: Any) -> None: ...


class Odds(Callback):
    """Has something in its state that no other process can have."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": object()}


class Endless(torch.utils.data.IterableDataset[Any]):
    """A stream of samples that have no numbers."""

    def __iter__(self) -> Any:
        while True:
            yield samples(1, 1)[0]


class Odd(Classifier):
    """Does in a step what cannot be there, one thing at a time."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        odd = self.options["odd"]
        if odd == "gather":
            self.all_gather(batch[0])
        if odd == "max":
            self.log("highest", batch[0].max(), reduce_fx="max")
        if odd == "none":
            return None
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.options["odd"] == "skip" else None

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.options["odd"] == "twice":
            optimizer_closure()


def refused(folder: Path, options: dict[str, Any]) -> dict[str, str]:
    """Return what `fit` says to each of these, one at a time; one in a step comes last, for it ends all."""
    from springtide.integrations.lightning import SpringtideStrategy

    said = {}
    for text, case in options["refused"].items():
        module = Classifier(options) if "odd" not in case else Odd(case)
        if case.get("hook"):
            module = type("Hooked", (Classifier,), {"on_after_backward": lambda self: None})(options)
        dataset: Any = Endless() if case.get("data") == "endless" else samples(10, 1)
        loader: Any = DataLoader(dataset, batch_size=4, drop_last=bool(case.get("short")))
        if case.get("data") == "sampler":
            chosen = torch.utils.data.SubsetRandomSampler(range(5))
            loader = DataLoader(dataset, batch_size=4, sampler=chosen)
        if case.get("data") == "two":
            loader = {"a": loader, "b": loader}
        kinds: dict[str, Any] = {"after": Afterwards, "odds": Odds, "average": EMAWeightAveraging}
        own: dict[str, Any] = {
            "callbacks": [kinds[name]() for name in case.get("callbacks", ())],
            "default_root_dir": folder,
            "logger": False,
            "accelerator": "cpu",
            "max_epochs": 2,
            "enable_checkpointing": False,
        }
        try:
            trainer = pl.Trainer(strategy=SpringtideStrategy(), **own | case.get("arguments", {}))
            trainer.fit(module, loader, DataLoader(samples(5, 2)), ckpt_path=case.get("ckpt_path"))
            said[text] = "nothing"
        except Exception as error:
            said[text] = f"{type(error).__name__}: {error}"
    return said


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    name = os.environ.get("SPRINGTIDE_POD_NAME", "plain" if options.get("plain") else "alone")
    warnings.simplefilter("ignore")  # Lightning with the newest torch has some
    if "refused" in options:
        (folder / f"{name}.json").write_text(json.dumps(refused(folder, options)))
        return
    torch.manual_seed(0)
    module = (Players if options.get("model") == "players" else Classifier)(options)
    out = folder / f"out-{'plain' if options.get('plain') else 'elastic'}"
    recorder = Recorder(folder / f"{name}.events")
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    callbacks: list[Any] = [recorder, saver, LearningRateMonitor()]
    if "patience" in options:
        callbacks.append(EarlyStopping("val_accuracy", mode="max", patience=options["patience"]))
    arguments: dict[str, Any] = {
        "max_epochs": 3,
        "log_every_n_steps": 1,
        "logger": CSVLogger(out),
        "callbacks": callbacks,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        **options.get("arguments", {}),
    }
    if not options.get("plain"):
        from springtide.integrations.lightning import SpringtideStrategy

        arguments["strategy"] = SpringtideStrategy(reference_workers=options.get("reference_workers", 1))
    if "held_until" in options:
        callbacks.append(Held(folder, name, options))
    trainer = pl.Trainer(**arguments)
    size = options.get("batch_size", 4)
    data: Any = samples(50, 1)
    if options.get("data") == "stream":
        data = Stream(data)
    loader = DataLoader(data, batch_size=size, num_workers=options.get("loader_workers", 0))
    trainer.fit(module, loader, DataLoader(samples(22, 2), batch_size=5))
    after = (
        trainer.test(module, DataLoader(samples(20, 3), batch_size=5), verbose=False)
        if options.get("test")
        else []
    )
    result: dict[str, Any] = {
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "ended": recorder.ended,
        "after": after,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "values": torch.cat([p.detach().reshape(-1).float() for p in module.parameters()]).tolist(),
        "best": [float(saver.best_model_score or 0), Path(saver.best_model_path).name],
        "checkpoints": sorted(path.name for path in out.rglob("*.ckpt")),
    }
    if options.get("plain"):
        from springtide.integrations.lightning.arguments import unclassified

        result["unclassified"] = unclassified(inspect.signature(pl.Trainer.__init__).parameters)
    else:
        import springtide

        runtime = springtide.api.active_runtime
        assert runtime is not None
        result["audit"] = runtime.position.ledger.audit()
        if options.get("again"):
            try:
                second = pl.Trainer(strategy=SpringtideStrategy(), logger=False, enable_checkpointing=False)
                second.fit(Classifier(options), loader)
            except Exception as error:
                result["again"] = f"{type(error).__name__}: {error}"
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
