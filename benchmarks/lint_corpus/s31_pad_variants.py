from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("distilbert-base-uncased")
ds = load_dataset("imdb")


def tokenize(batch):
    return tokenizer(batch["text"], padding="max_length", truncation=True)


def tokenize_ok(batch):
    return tokenizer(batch["text"], truncation=True, max_length=512)


PADDING = "max_length"


def tokenize_const(batch):
    return tokenizer(batch["text"], padding=PADDING, truncation=True, max_length=256)


def tokenize_kw(batch):
    kw = dict(padding="max_length", truncation=True, max_length=128)
    return tokenizer(batch["text"], **kw)


collator = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=512)
good = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
train = ds["train"].map(tokenize, batched=True)
fixed = ds["train"].map(tokenize_ok, batched=True, remove_columns=["text"])
const = ds["test"].map(tokenize_const, batched=True)
model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased")
args = TrainingArguments(
    "out",
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    eval_accumulation_steps=8,
    fp16=True,
    num_train_epochs=1,
)
trainer = Trainer(model=model, args=args, train_dataset=fixed, eval_dataset=fixed, data_collator=good)
trainer.train()
predictions = trainer.predict(fixed)
