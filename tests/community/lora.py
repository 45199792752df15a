# Adapters of low rank in a causal language model whose own weights are frozen; the Trainer with its own loss.
import argparse
import math

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
args = parser.parse_args()
torch.manual_seed(0)


class LoraLayer(nn.Module):
    def __init__(self, base, r=4, lora_alpha=8):
        super().__init__()
        self.base_layer = base
        self.scaling = lora_alpha / r
        self.lora_A = nn.Parameter(torch.empty(base.weight.shape[0], r))
        self.lora_B = nn.Parameter(torch.zeros(r, base.weight.shape[1]))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base_layer(x) + x @ self.lora_A @ self.lora_B * self.scaling


def get_peft_model(model):
    for parameter in model.parameters():
        parameter.requires_grad = False
    for block in model.transformer.h:
        block.attn.c_attn = LoraLayer(block.attn.c_attn)
    return model


def print_trainable_parameters(model):
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(
        f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {100 * trainable / total:.4f}"
    )


config = GPT2Config(
    vocab_size=24, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = get_peft_model(GPT2LMHeadModel(config))
print_trainable_parameters(model)

# Main data processing function that will concatenate all texts and generate chunks of block_size.
text = torch.randint(1, 24, (160 * 12,), generator=torch.Generator().manual_seed(4)).tolist()
block_size = 12
chunks = [text[i : i + block_size] for i in range(0, len(text), block_size)]
lm_dataset = [{"input_ids": chunk, "labels": list(chunk)} for chunk in chunks]


class LoraTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss
        return (loss, outputs) if return_outputs else loss


trainer = LoraTrainer(
    model=model,
    train_dataset=lm_dataset,
    args=TrainingArguments(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        warmup_steps=5,
        num_train_epochs=5,
        learning_rate=2e-2,
        logging_steps=10,
        output_dir=args.output_dir,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    ),
    data_collator=default_data_collator,
)
model.config.use_cache = False  # silence the warnings. Please re-enable for inference!
trainer.train()
trainer.save_model(f"{args.output_dir}/final")
