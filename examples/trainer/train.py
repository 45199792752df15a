"""Hugging Face's Trainer, elastically: a small GPT-2 that learns Python's manual, byte by byte.

python examples/trainer/train.py

It needs `springtide[worker,transformers]`. Two lines differ from a script for `transformers.Trainer`: the
import, and the name.
"""

import os
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from springtide.integrations.transformers import ElasticTrainer

CONTEXT = 64
STEPS = int(os.environ.get("STEPS", "300"))
OUTPUT = os.environ.get("OUTPUT", "out")  # in a job: a volume that all workers mount


def samples():
    """Cut the text into windows of CONTEXT bytes, each its own labels: the model shifts them."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    numbers = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    windows = numbers[: len(numbers) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": window, "labels": window} for window in windows]


def main():
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    data = samples()
    arguments = TrainingArguments(
        output_dir=OUTPUT,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,  # 32 samples in a step, whatever the number of workers
        max_steps=STEPS,
        learning_rate=3e-3,
        warmup_steps=0.1,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = ElasticTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=data[: -len(data) // 20],
        eval_dataset=data[-len(data) // 20 :][:256],
    )
    trainer.train()
    trainer.save_model()
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
