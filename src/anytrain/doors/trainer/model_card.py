"""A model card: what a run was, in the form that the hub reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from anytrain.core import documents

TAG = "generated_from_trainer"
_FENCE = "---"
_SKIPPED = ("epoch", "step", "eval_runtime", "loss")
_SHOWN_ARGUMENTS = (
    "learning_rate",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "optim",
    "optim_args",
    "weight_decay",
    "max_grad_norm",
    "lr_scheduler_type",
    "warmup_steps",
    "label_smoothing_factor",
)


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the user may say about a model that the run itself does not know."""

    language: str | Sequence[str] | None = None
    license: str | None = None
    tags: str | Sequence[str] | None = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: str | Sequence[str] | None = None
    dataset_tags: str | Sequence[str] | None = None
    dataset: str | Sequence[str] | None = None
    dataset_args: str | Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the run knows about itself."""

    name: str
    library: str
    arguments: Any
    num_processes: int
    device: str
    precision: str
    history: Sequence[Mapping[str, Any]] = field(default_factory=list)


def write_card(facts: CardFacts, run: RunFacts) -> str:
    """Return the text of a model card."""
    name = facts.model_name or run.name
    results = _final_results(run.history)
    parts = [
        _FENCE,
        yaml.safe_dump(_header(facts, run.library, name, results), sort_keys=False).rstrip(),
        _FENCE,
        "",
        f"# {name}",
        "",
        _introduction(facts),
        "",
        *_evaluation(results),
        "## How it was trained",
        "",
        *_hyperparameters(run),
        "",
        *_curve(run.history),
        "### Versions",
        "",
        *(f"- {library}: {version}" for library, version in _versions().items()),
        "",
        "This card was drafted from the run's own records. Please add what the model is for,"
        " what it was trained on, and where it fails.",
        "",
    ]
    return "\n".join(parts)


def card_tags(path: Path) -> list[str]:
    """Return the tags in a card's header, none where there is no card or no header."""
    if not path.is_file():
        return []
    before, fence, rest = path.read_text(encoding="utf-8").partition(f"{_FENCE}\n")
    if before.strip() or not fence:
        return []
    try:
        header = documents.from_yaml(rest.partition(f"\n{_FENCE}")[0])
    except ValueError:
        return []
    return as_list(header.get("tags")) if isinstance(header, dict) else []


def as_list(value: str | Sequence[str] | None) -> list[str]:
    """Return one name, several or none as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _header(
    facts: CardFacts, library: str, name: str, results: Mapping[str, float]
) -> dict[str, Any]:
    metrics = [metric for metric in results if metric != "loss"]
    datasets = as_list(facts.dataset_tags)
    header: dict[str, Any] = {
        "library_name": library,
        "language": as_list(facts.language),
        "license": facts.license,
        "base_model": facts.finetuned_from,
        "tags": list(dict.fromkeys([TAG, *as_list(facts.tags)])),
        "datasets": datasets,
        "metrics": metrics,
    }
    index = _model_index(facts, name, results)
    if index is not None:
        header["model-index"] = [index]
    return {key: value for key, value in header.items() if value}


def _model_index(
    facts: CardFacts, name: str, results: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the results in the hub's form, which needs a task and a dataset for them."""
    tasks, datasets = as_list(facts.tasks), as_list(facts.dataset)
    metrics = {metric: value for metric, value in results.items() if metric != "loss"}
    if not (tasks and datasets and metrics):
        return None
    types = as_list(facts.dataset_tags) or datasets
    dataset: dict[str, Any] = {"name": datasets[0], "type": types[0]}
    if facts.dataset_args:
        dataset["args"] = as_list(facts.dataset_args)[0]
    return {
        "name": name,
        "results": [
            {
                "task": {"name": task.replace("-", " "), "type": task},
                "dataset": dataset,
                "metrics": [
                    {"name": metric.replace("_", " "), "type": metric, "value": value}
                    for metric, value in metrics.items()
                ],
            }
            for task in tasks
        ],
    }


def _introduction(facts: CardFacts) -> str:
    source = "This model was trained"
    if facts.finetuned_from:
        link = f"https://huggingface.co/{facts.finetuned_from}"
        source = f"This model is a fine-tuned version of [{facts.finetuned_from}]({link})"
    datasets = as_list(facts.dataset)
    data = f" on {', '.join(datasets)}" if datasets else ""
    return f"{source}{data}, with anytrain."


def _final_results(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    evaluations = [entry for entry in history if _is_evaluation(entry)]
    return _metrics_of(evaluations[-1]) if evaluations else {}


def _is_evaluation(entry: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in entry)


def _metrics_of(entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in entry.items()
        if name not in _SKIPPED
        and name.startswith("eval_")
        and not name.endswith("_per_second")
        and isinstance(value, int | float)
    }


def _evaluation(results: Mapping[str, float]) -> list[str]:
    if not results:
        return []
    lines = [f"- {name.replace('_', ' ')}: {value:.4f}" for name, value in results.items()]
    return ["At the end of training it gave, on the evaluation set:", "", *lines, ""]


def _hyperparameters(run: RunFacts) -> list[str]:
    args = run.arguments
    rows: dict[str, Any] = {
        name: getattr(args, name)
        for name in _SHOWN_ARGUMENTS
        if getattr(args, name, None) not in (None, "", 0, 0.0) or name == "seed"
    }
    if getattr(args, "max_steps", -1) > 0:
        rows["max_steps"] = args.max_steps
    else:
        rows["num_train_epochs"] = args.num_train_epochs
    batch = args.per_device_train_batch_size * run.num_processes
    rows["samples in one update"] = batch * args.gradient_accumulation_steps
    rows["device"] = f"{run.device} ({run.num_processes} process(es))"
    rows["precision"] = run.precision
    return ["### Settings", "", *(f"- {n}: {getattr(v, 'value', v)}" for n, v in rows.items())]


def _curve(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table with a row for each evaluation, and the last loss logged before it."""
    rows, loss = [], None
    for entry in history:
        if _is_evaluation(entry):
            rows.append((loss, entry.get("epoch"), entry.get("step"), _metrics_of(entry)))
        elif "loss" in entry:
            loss = entry["loss"]
    if not rows:
        return []
    names = list(dict.fromkeys(name for *_, metrics in rows for name in metrics))
    titles = ["training loss", "epoch", "step", *(f"eval {n.replace('_', ' ')}" for n in names)]
    lines = [_row(titles), _row(["---"] * len(titles))]
    for loss, epoch, step, metrics in rows:
        lines.append(_row([loss, epoch, step, *(metrics.get(name) for name in names)]))
    return ["### Results", "", *lines, ""]


def _row(cells: Sequence[Any]) -> str:
    shown = [f"{cell:.4f}" if isinstance(cell, float) else str(cell or "") for cell in cells]
    return f"| {' | '.join(shown)} |"


def _versions() -> dict[str, str]:
    found = {}
    for name in ("anytrain", "torch", "transformers", "datasets", "tokenizers", "peft"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not installed, so it had no part in the run
    return found
