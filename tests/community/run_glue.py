# Fine-tuning for sequence classification by the Trainer: arguments from a parser, a collator, metrics, an evaluation.
import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments:
    max_seq_length: int = field(default=12, metadata={"help": "The maximum total input sequence length."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Whether to pad all samples."})


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count, seed, longest):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(count):
            ids = rng.integers(4, 30, rng.integers(4, longest + 1)).tolist()
            self.rows.append({"input_ids": ids, "label": int(ids[0] > 16)})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    pad = [f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]
    mask = [[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features]
    labels = torch.tensor([f["label"] for f in features])
    return {"input_ids": torch.tensor(pad), "attention_mask": torch.tensor(mask), "labels": labels}


def main():
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)])
    logger.setLevel(training_args.get_process_log_level())
    transformers.utils.logging.set_verbosity_error()
    set_seed(training_args.seed)

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    train_dataset = Sentences(160, 0, data_args.max_seq_length)
    eval_dataset = Sentences(40, 1, data_args.max_seq_length)

    def compute_metrics(p: EvalPrediction):
        preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        preds = np.argmax(preds, axis=1)
        return {"accuracy": (preds == p.label_ids).astype(np.float32).mean().item()}

    # Initialize our Trainer
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        data_collator=collate,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=20)],
    )

    # Training
    if training_args.do_train:
        checkpoint = None
        if training_args.resume_from_checkpoint is not None:
            checkpoint = training_args.resume_from_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.save_model(os.path.join(training_args.output_dir, "final"))
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    # Evaluation
    if training_args.do_eval:
        logger.info("*** Evaluate ***")
        metrics = trainer.evaluate(eval_dataset=eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
