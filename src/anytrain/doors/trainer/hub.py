"""Put a model on the hub.

What can fail is tried before training begins. A push behind the loop that fails later is told
and never stops the run.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from anytrain.core.errors import BadInput, HubError
from anytrain.core.notices import give_notice
from anytrain.doors.trainer.model_card import CardFacts, RunFacts, as_list, card_tags, write_card
from anytrain.doors.trainer.outputs import PREFIX_CHECKPOINT_DIR, write_text
from anytrain.engine.checkpoint import files, manifest
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.manifest import MANIFEST

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

    from anytrain.doors.trainer.trainer import Trainer

CARD_NAME = "README.md"
LAST_CHECKPOINT = "last-checkpoint"
# Rows of the data, and the host's names and paths: they are nobody's but the user's.
_PRIVATE = [
    "evaluation*.json",
    "run.json",
    "events.jsonl",
    "timesheet.jsonl",
    "report*.html",
    "*.new",  # a draft of one of these, which a full disk has left
]
_OF_OTHERS = [f"{PREFIX_CHECKPOINT_DIR}-*", "run-*", "earlier-*"]
_NOT_PUSHED = ["_*", ".*", "*/.*", *_OF_OTHERS, *_PRIVATE, *(f"*/{name}" for name in _PRIVATE)]
_STAGED = ".hub-"
_TEXTS = (".json", ".jsonl", ".md")


class Hub:
    """A repository for the run: made before training, fed at saves, filled at the end."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._pushes: list[tuple[Future[Any], Path]] = []
        """Pushes behind the loop, and the folders that they are sent from."""
        self._known_api: HfApi | None = None

    def open(self, token: str | None = None) -> None:
        """Make the repository, or find out now why that cannot be."""
        trainer = self._trainer
        wanted = trainer.args.hub_model_id or Path(str(trainer.args.output_dir)).absolute().name
        answer: str | HubError = ""
        if trainer.is_world_process_zero():
            answer = self._make_repository(wanted, token or trainer.args.hub_token)
        # A refusal is every rank's: the others would wait for the first one in the first step.
        answer = trainer._session.world.broadcast_object(answer)
        if isinstance(answer, HubError):
            raise answer
        trainer.hub_model_id = answer

    def write_card(self, facts: CardFacts) -> None:
        """Write README.md into the output folder: header, settings, results and versions."""
        trainer = self._trainer
        if not trainer.is_world_process_zero():
            return
        target = Path(str(trainer.args.output_dir)) / CARD_NAME
        known = [*as_list(facts.tags), *as_list(getattr(trainer.model, "model_tags", None))]
        facts = replace(
            facts,
            tags=list(dict.fromkeys([*known, *card_tags(target)])),
            finetuned_from=_hub_name(facts.finetuned_from) or _base_model(trainer.model),
        )
        write_text(target, write_card(facts, self._run_facts()))

    def push(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the model, write its card, and push the output folder without checkpoints.

        Return what the hub answered, a future of it where `blocking` is False, and None on
        every process but the main one. `kwargs` go to `create_model_card`.
        """
        trainer = self._trainer
        trainer._parts.recorder.tell("push_begin")
        token = token or trainer.args.hub_token
        if trainer.hub_model_id is None:
            trainer.init_hf_repo(token=token)
        trainer.save_model(_internal_call=True)
        if not trainer.is_world_process_zero():
            return None
        kwargs["model_name"] = kwargs.get("model_name") or str(trainer.hub_model_id).split("/")[-1]
        trainer.create_model_card(**kwargs)
        trainer._finish_current_push()
        folder = Path(str(trainer.args.output_dir))
        return self._upload(folder, str(commit_message), token, revision, blocking=blocking)

    def _make_repository(self, wanted: str, token: str | None) -> str | HubError:
        try:
            made = self._api().create_repo(
                wanted, token=token, private=self._trainer.args.hub_private_repo, exist_ok=True
            )
        except _hub_errors() as error:
            return HubError(
                f"Cannot push to the hub: the repository {wanted!r} could not be opened.",
                why=_first_line(error),
                fix="log in (`hf auth login`) or pass hub_token=; check hub_model_id= and the "
                "network; or leave push_to_hub out and call trainer.push_to_hub() later.",
            )
        return str(made.repo_id)

    def push_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint's model behind the loop, as hub_strategy says."""
        trainer = self._trainer
        strategy = str(getattr(trainer.args.hub_strategy, "value", trainer.args.hub_strategy))
        if not trainer.is_world_process_zero() or strategy == "end":
            return
        self._settle(wait=False)
        if self._pushes and not trainer.args.hub_always_push:
            return
        trainer._parts.recorder.tell("push_begin")
        source = Path(checkpoint_folder)
        within = {"checkpoint": LAST_CHECKPOINT, "all_checkpoints": source.name}.get(strategy)
        try:
            staged = _stage(source, Path(str(trainer.args.output_dir)), within)
            pushed = self._upload(
                staged,
                f"Training in progress, step {trainer.state.global_step}",
                blocking=False,
            )
        except (Damaged, HubError, OSError) as error:
            _tell_failed_push(error)
            return
        assert isinstance(pushed, Future)
        trainer.push_in_progress = pushed
        self._pushes = [*(self._pushes), (pushed, staged)]

    def push_after_save(self) -> None:
        """Push what `save_model` wrote; a hub that fails costs a notice, not the run."""
        try:
            self._trainer.push_to_hub(commit_message="Model save")
        except HubError as error:
            _tell_failed_push(error)

    def finish(self) -> None:
        """Wait for what is pushed behind the loop, and tell if it failed."""
        self._settle(wait=True)
        self._trainer.push_in_progress = None

    def _settle(self, *, wait: bool) -> None:
        """Tell of pushes that are over and failed, and remove the files they were sent from."""
        pushes, self._pushes = self._pushes, []
        for pushed, staged in pushes:
            if not (wait or pushed.done()):
                self._pushes.append((pushed, staged))
                continue
            error = pushed.exception()
            shutil.rmtree(staged, ignore_errors=True)
            if error is not None:
                _tell_failed_push(error)

    def _upload(
        self,
        folder: Path,
        message: str,
        token: str | None = None,
        revision: str | None = None,
        *,
        blocking: bool,
    ) -> CommitInfo | Future[CommitInfo]:
        # A checkpoint inside a staged folder is meant to go; one in the output folder is not.
        trainer = self._trainer
        ignored = [] if folder.name.startswith(_STAGED) else _NOT_PUSHED
        try:
            return self._api().upload_folder(
                repo_id=str(trainer.hub_model_id),
                folder_path=str(folder),
                commit_message=message,
                token=token or trainer.args.hub_token,
                run_as_future=not blocking,
                ignore_patterns=ignored,
                revision=revision or trainer.args.hub_revision,
            )
        except _hub_errors() as error:
            raise HubError(
                f"The push to {trainer.hub_model_id} failed.",
                why=_first_line(error),
                fix=f"the files are whole in {folder}: call trainer.push_to_hub() again, or "
                f"`hf upload {trainer.hub_model_id} {folder}`.",
            ) from error

    def _run_facts(self) -> RunFacts:
        trainer = self._trainer
        found = trainer._session
        precision = found.plan.precision.value
        return RunFacts(
            name=Path(str(trainer.args.output_dir)).absolute().name,
            library=_library(trainer.model),
            arguments=trainer.args,
            num_processes=found.world.size,
            device=str(found.device.type),
            precision={"no": "float32"}.get(precision, precision),
            history=trainer.state.log_history,
        )

    def _api(self) -> HfApi:
        if self._known_api is None:
            try:
                from huggingface_hub import HfApi
            except ImportError:
                raise BadInput(
                    "Cannot push to the hub: huggingface_hub is not installed.",
                    why="it is the library that talks to the hub.",
                    fix="pip install huggingface_hub, or leave push_to_hub out.",
                ) from None
            self._known_api = HfApi(library_name="anytrain")
        return self._known_api


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return what its library raises: its own errors, and those of what carries its requests."""
    from huggingface_hub.errors import HfHubHTTPError

    carriers = tuple(kind for kind in HfHubHTTPError.__bases__ if issubclass(kind, Exception))
    return (OSError, ValueError, RuntimeError, *carriers)


def _first_line(error: BaseException) -> str:
    if isinstance(error, HubError):
        return error.why
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _tell_failed_push(error: BaseException) -> None:
    give_notice(
        f"A push to the hub failed ({_first_line(error)}). The files are whole on the disk, and "
        "the next save pushes again.",
        stacklevel=3,
    )


def _stage(checkpoint: Path, output: Path, within: str | None) -> Path:
    """Give the files to push second names in a folder of their own.

    Retention may remove the checkpoint while it is still being read; its files stay under
    these names until the push is over.
    """
    contents = manifest.read(checkpoint)
    states = {
        name
        for part in (
            *contents.parts.values(),
            *(p for r in contents.rank_parts.values() for p in r),
        )
        for name in (part.document, *part.tensors)
    }
    staged = output / f"{_STAGED}{checkpoint.name}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    files.link_tree(checkpoint, staged, sorted(contents.files.keys() - states))
    if within is not None:
        (staged / within).mkdir()
        files.link_tree(checkpoint, staged / within, sorted([*contents.files, MANIFEST]))
    for text in output.iterdir():
        beside = staged / text.name
        if any(fnmatch(text.name, name) for name in _PRIVATE):
            continue
        if text.is_file() and text.suffix in _TEXTS and not beside.exists():
            shutil.copyfile(text, beside)  # a copy: logs grow while they are read
    return staged


def _base_model(model: nn.Module) -> str | None:
    """Return the hub's name of the model this one came from."""
    config = getattr(model, "config", None)
    return _hub_name(
        getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
    )


def _hub_name(name: Any) -> str | None:
    """Return a name that the hub may know; it refuses a card whose base model is a folder."""
    if not name or Path(str(name)).exists() or str(name).startswith(("/", ".", "~")):
        return None
    return str(name)


def _library(model: nn.Module) -> str:
    if hasattr(model, "peft_config"):
        return "peft"
    return "transformers" if hasattr(model, "save_pretrained") else "pytorch"
