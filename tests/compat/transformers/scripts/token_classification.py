"""Label the words of a sentence; labels of later pieces of a word do not count."""

import argparse

import numpy as np
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import set_seed

NAMES = ["O", "B-COLOUR", "B-ANIMAL"]
COLOURS, ANIMALS = ["red", "blue", "green"], ["cat", "dog", "bird"]


def sentences(count):
    for number in range(count):
        colour, animal = COLOURS[number % 3], ANIMALS[number // 3 % 3]
        words = ["the", colour, animal, "sees", *(["a", animal] if number % 2 else [])]
        tags = [1 if word in COLOURS else 2 if word in ANIMALS else 0 for word in words]
        yield {"tokens": words, "ner_tags": tags}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    set_seed(9)
    features = Features(
        {"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=NAMES))}
    )
    rows = Dataset.from_list(list(sentences(30)), features=features)
    config = AutoConfig.from_pretrained(
        options.model, id2label=dict(enumerate(NAMES)), label2id={n: i for i, n in enumerate(NAMES)}
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForTokenClassification.from_pretrained(options.model, config=config)

    def align(examples):
        encoded = tokenizer(examples["tokens"], is_split_into_words=True, truncation=True)
        encoded["labels"] = []
        for number, tags in enumerate(examples["ner_tags"]):
            last, labels = None, []
            for word in encoded.word_ids(number):
                labels.append(-100 if word is None or word == last else tags[word])
                last = word
            encoded["labels"].append(labels)
        return encoded

    encoded = rows.map(align, batched=True, remove_columns=rows.column_names)
    encoded = encoded.train_test_split(test_size=10, seed=4)

    def compute_metrics(found):
        predictions, labels = found
        counted = labels != -100
        return {"accuracy": float((predictions.argmax(-1) == labels)[counted].mean())}

    args = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        label_smoothing_factor=0.1,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=encoded["train"],
        eval_dataset=encoded["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
    )
    trainer.save_metrics("train", trainer.train().metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    found = trainer.predict(encoded["test"])
    assert found.predictions.shape[:2] == found.label_ids.shape
    assert np.isfinite(found.predictions[found.label_ids != -100]).all()


if __name__ == "__main__":
    main()
