"""A fine-tuning script of a user of transformers, for the tests. argv: RESULT_FOLDER JSON_OPTIONS.

With `"plain": true` the Trainer is transformers' own. Writes RESULT_FOLDER/POD.events, a line for each event
of a callback, and at its end RESULT_FOLDER/POD.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from script_hold import hold
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

PAD = 31
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_substep_end"]


class Recorder(TrainerCallback):
    """Writes down each event with the step that the state shows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: str, state: Any, named: dict[str, Any]) -> None:
        line: dict[str, Any] = {
            "event": event,
            "step": state.global_step,
            "first": state.is_world_process_zero,
        }
        if event == "on_pre_optimizer_step":
            gradients = [p.grad for p in named["model"].parameters() if p.grad is not None]
            line["norm"] = float(torch.nn.utils.get_total_norm(gradients))
        if event == "on_log":
            line["logs"] = {name: value for name, value in named["logs"].items() if "runtime" not in name}
        self._file.write(json.dumps(line) + "\n")


def _record(event: str) -> Any:
    def record(self: Recorder, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.write(event, state, named)

    return record


for _event in EVENTS:
    setattr(Recorder, _event, _record(_event))


class LowRank(torch.nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self, base: torch.nn.Module, features: int, out: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(features, 2) * 0.1)
        self.up = torch.nn.Parameter(torch.zeros(2, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


def sentences(count: int, seed: int, classes: bool) -> list[dict[str, Any]]:
    """Sentences of several lengths, padded; a label of each, or of each of their words."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        words = torch.randint(0, PAD, (4 + number % 6,), generator=generator)
        ids = torch.cat([words, torch.full((10 - len(words),), PAD)])
        sample: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
        if classes:
            sample["label"] = int(words[0] > 15)
        else:
            sample["labels"] = torch.where(ids == PAD, -100, ids)
        found.append(sample)
    return found


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "classes":
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(
            BertConfig(vocab_size=32, max_position_embeddings=16, num_labels=2, **size, **quiet)
        )
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, **size, **quiet))
    if kind == "adapters":
        model.requires_grad_(False)
        for block in model.transformer.h:
            block.attn.c_attn = LowRank(block.attn.c_attn, 16, 48)
    return model


class Weighted:
    """Gives a Trainer a loss of the script's own: a mean over samples, with weights of the classes."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        loss = (losses * torch.tensor([1.0, 3.0])[labels]).mean()
        return (loss, outputs) if return_outputs else loss


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func`: the sum over words, by the number that the Trainer gives."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def refused(kind: Any, folder: Path, options: dict[str, Any]) -> dict[str, str]:
    """Return what the constructor says to each of these arguments, one at a time."""
    said = {}
    for text, arguments in options["refused"].items():
        named: dict[str, Any] = {"train_dataset": sentences(8, 1, False), "model": make_model("words")}
        own = {"output_dir": str(folder), "use_cpu": True, "report_to": "none"}
        if arguments == "iterator":
            arguments, named["train_dataset"] = {"max_steps": 3}, iter(Stream([]))
        elif arguments == "endless":
            arguments, named["train_dataset"] = {}, Endless()
        elif arguments == "short":
            arguments, named["train_dataset"] = {"max_steps": 3, "dataloader_drop_last": True}, Endless()
        elif arguments == "substeps":
            arguments, named["callbacks"] = {}, [SubSteps()]
        elif arguments == "sampler":
            arguments, chosen = {}, type("Sampling", (kind,), {"_get_train_sampler": lambda self: None})
            named["kind"] = chosen
        chosen, resumes = named.pop("kind", kind), arguments == "resume"
        try:
            trainer = chosen(args=TrainingArguments(**own | ({} if resumes else arguments)), **named)
            if resumes:
                trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
            said[text] = "nothing"
        except Exception as error:
            said[text] = f"{type(error).__name__}: {error}"
    return said


class Endless(torch.utils.data.IterableDataset[Any]):
    """A stream of samples that have no numbers."""

    def __iter__(self) -> Any:
        while True:
            yield sentences(1, 1, False)[0]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples that can only be read from their begin."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter(self._samples)


def train_data(kind: str, classes: bool) -> Any:
    """Return the same 50 samples: by number, as one stream, or in five shards."""
    samples = sentences(50, 1, classes)
    if kind == "stream":
        return Stream(samples)
    if kind == "shards":
        from springtide.data import Shards

        return Shards(range(5), lambda shard: samples[shard * 10 : shard * 10 + 10])
    return samples


class SubSteps(TrainerCallback):
    """Counts micro-batches."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None: ...


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    name = os.environ.get("SPRINGTIDE_POD_NAME", "plain" if options.get("plain") else "alone")
    kind: Any = Trainer
    if not options.get("plain"):
        from springtide.integrations.transformers import ElasticTrainer

        kind = ElasticTrainer
    classes = options.get("model") == "classes"
    arguments: dict[str, Any] = {
        "output_dir": str(folder / f"out-{'plain' if options.get('plain') else 'elastic'}"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 3,
        "learning_rate": 0.02,
        "adam_epsilon": 1e-3,  # else a gradient that is a rounding error alone would move its parameter far
        "warmup_steps": 3,
        "logging_steps": 1,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options.get("arguments", {}),
    }
    if "refused" in options:
        (folder / f"{name}.json").write_text(json.dumps(refused(kind, folder, options)))
        return
    if options.get("loss") == "weighted":
        kind = type("Own", (Weighted, kind), {})
    own = {"shuffle_buffer": options["shuffle_buffer"]} if "shuffle_buffer" in options else {}
    callbacks: list[TrainerCallback] = [Recorder(folder / f"{name}.events")]
    if "patience" in options:
        callbacks.append(EarlyStoppingCallback(options["patience"]))
    trainer = kind(
        make_model(options.get("model", "words")),
        TrainingArguments(**arguments),
        train_dataset=train_data(options.get("data", "numbers"), classes),
        eval_dataset=sentences(22, 2, classes),
        compute_metrics=accuracy if classes else None,
        compute_loss_func=summed if options.get("loss") == "summed" else None,
        callbacks=callbacks,
        **own,
    )
    output = trainer.train()
    after = {}
    if "save" in options:
        if options["save"] != "by one" or trainer.is_world_process_zero():
            trainer.save_model()
        hold(folder, name, options)
        after = trainer.evaluate()
        after["predicted"] = list(trainer.predict(trainer.eval_dataset).predictions.shape)
    result = {
        "global_step": output.global_step,
        "after": {
            name: value for name, value in after.items() if "second" not in name and "time" not in name
        },
        "training_loss": output.training_loss,
        "metrics": output.metrics,
        "history": trainer.state.log_history,
        "values": torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]).tolist(),
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
    }
    if options.get("plain"):
        from springtide.integrations.transformers.arguments import unclassified

        result["unclassified"] = unclassified(TrainingArguments)
    else:
        import springtide

        runtime = springtide.api.active_runtime
        assert runtime is not None
        result["audit"] = runtime.position.ledger.audit()
        if options.get("again"):
            try:
                kind(make_model("words"), TrainingArguments(**arguments), train_dataset=[{}]).train()
            except Exception as error:
                result["again"] = f"{type(error).__name__}: {error}"
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
