"""A training script of a user of Accelerate, for the tests. argv: RESULT_FOLDER JSON_OPTIONS.

With `"plain": true` it is accelerate's own Accelerator. Writes RESULT_FOLDER/POD.events, a line for each step
and evaluation, and at its end RESULT_FOLDER/POD.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from script_hold import hold, wait_for
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Patience:
    """Counts evaluations without a better one, as a part of what is saved."""

    def __init__(self, most: int) -> None:
        self.most, self.best, self.bad = most, float("inf"), 0

    def update(self, value: float) -> bool:
        better = value < self.best - 1e-3
        self.best, self.bad = (value, 0) if better else (self.best, self.bad + 1)
        return self.bad >= self.most

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad = state["best"], state["bad"]


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


class Stream(IterableDataset[Any]):
    """Samples that can only be read from their begin."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return (self._samples[number] for number in range(len(self._samples)))


def refused(options: dict[str, Any]) -> dict[str, str]:
    """Return what is said to each of these, one at a time."""
    from springtide.integrations.accelerate import ElasticAccelerator

    said = {}
    for text, case in options["refused"].items():
        try:
            accelerator = ElasticAccelerator(cpu=True, **case.get("arguments", {}))
            model = torch.nn.Linear(6, 3)
            loader: Any = DataLoader(samples(8, 1), batch_size=4)
            if case.get("data") == "batches":
                loader = DataLoader(samples(8, 1), batch_size=None)
            if case.get("data") == "stream":
                loader = DataLoader(Stream(samples(8, 1)), batch_size=4, drop_last=bool(case.get("short")))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            if case.get("call"):
                eval(case["call"], {"accelerator": accelerator, "model": model, "loader": loader})
            for x, _ in loader:
                if case.get("step") == "none":
                    continue
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).mean())
                    if case.get("step"):
                        eval(case["step"], {"accelerator": accelerator, "model": model, "x": x})
                    optimizer.step()
                    optimizer.zero_grad()
            said[text] = "nothing"
        except Exception as error:
            said[text] = f"{type(error).__name__}: {error}"
    return said


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    name = os.environ.get("SPRINGTIDE_POD_NAME", "plain" if options.get("plain") else "alone")
    if "refused" in options:
        (folder / f"{name}.json").write_text(json.dumps(refused(options)))
        return
    arguments: dict[str, Any] = {
        "cpu": True,
        "gradient_accumulation_steps": options.get("accumulation", 1),
        "mixed_precision": options.get("precision"),
    }
    most = options.get("max_train_steps")
    if options.get("plain"):
        accelerator: Any = Accelerator(**arguments)
    else:
        from springtide.integrations.accelerate import ElasticAccelerator

        own = {"reference_workers": options.get("reference_workers", 1), "max_train_steps": most}
        accelerator = ElasticAccelerator(**arguments, **own)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
    data: Any = samples(options.get("samples", 48), 1)
    if options.get("data") == "stream":
        data = Stream(data)
    train: Any = DataLoader(data, batch_size=options.get("batch_size", 4))
    check: Any = DataLoader(samples(22, 2), batch_size=5)
    model, optimizer, train, check, scheduler = accelerator.prepare(model, optimizer, train, check, scheduler)
    patience = Patience(options.get("patience", 100))
    accelerator.register_for_checkpointing(patience)
    out = folder / f"out-{'plain' if options.get('plain') else 'elastic'}"
    events = (folder / f"{name}.events").open("a", buffering=1)
    done = 0
    for epoch in range(options.get("epochs", 3)):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                plain = options.get("plain")
                done = done + 1 if plain else accelerator.completed_steps
                line = {
                    "step": done,
                    "loss": float(loss.detach()) if plain else accelerator.step_values["loss"],
                    "norm": float(norm),
                    "rate": scheduler.get_last_lr()[0],
                }
                events.write(json.dumps(line) + "\n")
                if most and done >= most:
                    break
        model.eval()
        right = []
        for x, y in check:
            with torch.no_grad():
                scores = model(x)
            scores, y = accelerator.gather_for_metrics((scores, y))
            right.append(torch.nn.functional.cross_entropy(scores, y, reduction="sum"))
        value = float(sum(right)) / 22
        if epoch == options.get("epochs", 3) - 1:
            hold(folder, name, options)
        events.write(json.dumps({"epoch": epoch, "evaluated": value}) + "\n")
        if name == options.get("late"):
            wait_for(Path(options["late_until"]))  # the other one saves
        accelerator.save_state(str(out / f"epoch_{epoch}"))
        if patience.update(value) or (most and done >= most):
            break
    accelerator.wait_for_everyone()
    accelerator.save_model(model, str(out / "model"))
    accelerator.end_training()
    result = {
        "steps": done,
        "values": torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(),
        "patience": patience.state_dict(),
        "saved": sorted(path.name for path in out.iterdir()),
    }
    if options.get("plain"):
        import inspect

        from springtide.integrations.accelerate.arguments import unclassified

        result["unclassified"] = unclassified(inspect.signature(Accelerator.__init__).parameters)
    else:
        import springtide

        runtime = springtide.api.active_runtime
        assert runtime is not None
        result["audit"] = runtime.position.ledger.audit()
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
