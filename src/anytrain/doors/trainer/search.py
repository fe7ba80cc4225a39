"""Look for good settings, with optuna.

The main process asks optuna; the others are told each trial and follow it, so that every rank
trains, evaluates and gives up the same trials.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from anytrain.core.errors import BadInput, BadType, Unsupported, WrongOrder
from anytrain.core.records import FORMAT, SWEEP, open_sweep
from anytrain.core.text import one_line
from anytrain.doors.trainer.outputs import (
    BestRun,
    HPSearchBackend,
    default_compute_objective,
    default_hp_space_optuna,
)
from anytrain.engine.recording.disk import Disk

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

Space = Callable[[Any], dict[str, Any]]
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = (bool, int, float, str, type(None))
_OF_OPTIMIZE = ("timeout", "gc_after_trial", "catch", "callbacks", "show_progress_bar")


class Search:
    """Trials, each with its own model, settings and folder."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._args_before: dict[str, Any] = {}

    def run(
        self,
        hp_space: Space | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train `n_trials` models with settings that optuna suggests; return the best trial.

        With several directions, return every trial that no other beats in all of them. The
        arguments are as they were once the search is over. A line says where each trial's folder
        is; `anytrain report` of the folder that they are in compares them. `kwargs` go to optuna's
        `create_study` (sampler, pruner, storage) and `Study.optimize` (timeout, catch).
        """
        trainer = self._trainer
        self._check_search(backend, n_trials, kwargs)
        trainer.hp_search_backend = HPSearchBackend.OPTUNA
        trainer.hp_space = hp_space or default_hp_space_optuna
        trainer.compute_objective = compute_objective or default_compute_objective
        trainer.hp_name = hp_name
        self._args_before = {}
        try:
            if trainer.is_world_process_zero():
                return self._lead(n_trials, direction, kwargs)
            return self._follow(kwargs.get("catch", ()))
        finally:
            self._restore_args()
            trainer._trial = trainer.hp_search_backend = None
            trainer._follow_arguments()
            trainer._new_run()

    def make_model(self, trial: Any = None) -> nn.Module:
        """Return a fresh model from `model_init`, which may take the trial."""
        trainer = self._trainer
        if trainer.model_init is None:
            raise WrongOrder(
                "There is no model_init to call.",
                why="the Trainer was given a model.",
                fix="pass model_init=, a function that returns a new model.",
            )
        model = trainer.model_init(trial) if self.takes_trial() else trainer.model_init()
        if not isinstance(model, nn.Module):
            raise BadType(
                f"model_init returned {type(model).__name__}, not a model.",
                why="each trial trains what model_init returns.",
                fix="return a torch.nn.Module from model_init.",
            )
        return model

    def takes_trial(self) -> bool:
        """Whether model_init has a place for a trial: one it must be given, or one so named."""
        assert self._trainer.model_init is not None
        parameters = inspect.signature(self._trainer.model_init).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind not in _ANY_NUMBER]
        if len(needed) > 1:
            raise BadInput(
                f"model_init takes {len(needed)} arguments.",
                why="it is called with nothing, or with the trial of a search.",
                fix="let it take no argument, or one: the trial.",
            )
        return bool(needed) or any(p.name == "trial" for p in parameters)

    def _check_search(
        self, backend: str | HPSearchBackend | None, n_trials: int, options: Mapping[str, Any]
    ) -> None:
        if backend is not None and backend != HPSearchBackend.OPTUNA:
            raise Unsupported(
                f"Cannot search with {str(backend)!r}.",
                why="anytrain drives optuna alone.",
                fix='pass backend="optuna", or leave it out.',
            )
        if self._trainer.model_init is None:
            raise WrongOrder(
                "Cannot search: the Trainer has no model_init.",
                why="every trial trains a new model, and a model that was given is one model.",
                fix="pass model_init=, a function that returns a new model, in place of model=.",
            )
        if options.get("n_jobs", 1) != 1:
            raise Unsupported(
                f"Cannot run {options['n_jobs']} trials at once.",
                why="one Trainer trains one model at a time.",
                fix="leave n_jobs out; start several searches on one storage= instead.",
            )
        if n_trials < 1:
            raise BadInput(
                f"Cannot search with n_trials={n_trials}.",
                why="the best of no trials is none.",
                fix="pass n_trials=1 or more.",
            )
        _optuna()

    def _lead(
        self, n_trials: int, direction: str | list[str], options: dict[str, Any]
    ) -> BestRun | list[BestRun]:
        """Ask optuna for trials until it has enough, and tell the other ranks."""
        trainer = self._trainer
        optuna, world = _optuna(), trainer._session.world
        several = not isinstance(direction, str)
        trials = _Trials(
            trainer.args.output_dir, [direction] if isinstance(direction, str) else direction
        )
        asked = {key: options[key] for key in _OF_OPTIMIZE if key in options}
        rest = {k: v for k, v in options.items() if k not in (*_OF_OPTIMIZE, "n_jobs")}
        goal = {"directions": direction} if several else {"direction": direction}

        def objective(trial: Any) -> Any:
            assert trainer.hp_space is not None
            trainer.hp_space(trial)  # so that its values are known and can be told
            world.broadcast_object(("trial", dict(trial.params), trial.number))
            with trials.kept(trial, trainer._get_output_dir(trial), trainer):
                return self._try(trial)

        study = optuna.create_study(**goal, **rest)
        trials.go_on({trial.number for trial in study.trials})
        study.optimize(objective, n_trials=n_trials, **asked)
        best = _best(study, several)
        world.broadcast_object(("end", best, 0))
        return _something(best)

    def _follow(self, catch: Any) -> BestRun | list[BestRun]:
        """Train what the main process tells, until it tells the best."""
        optuna = _optuna()
        caught = tuple(catch) if isinstance(catch, list | tuple | set) else (catch,)
        while True:
            what, value, number = self._trainer._session.world.broadcast_object(("", None, 0))
            if what == "end":
                return _something(value)
            try:
                self._try(optuna.trial.FixedTrial(value, number))
            except (optuna.TrialPruned, *caught):
                continue  # the main process has told optuna

    def _try(self, trial: Any) -> Any:
        trainer = self._trainer
        trainer.objective = None
        trainer.train(resume_from_checkpoint=None, trial=trial)
        if trainer.objective is None:  # nothing was evaluated while it trained
            trainer.objective = trainer.compute_objective(trainer.evaluate())
        return trainer.objective

    def set_up(self, trial: Any) -> None:
        """Put a trial's values into the arguments; outside a search, do nothing."""
        trainer = self._trainer
        trainer._trial = trial
        if trainer.hp_search_backend is None or trial is None:
            return
        assert trainer.hp_space is not None
        self._restore_args()  # a value that only an earlier trial set must not stay
        suggested = trainer.hp_space(trial)
        unknown = [name for name in suggested if not hasattr(trainer.args, name)]
        if unknown and not self.takes_trial():
            raise BadInput(
                f"The search suggests {', '.join(unknown)}, which nothing uses.",
                why="no training argument has that name, and model_init takes no trial.",
                fix="correct the name, or let model_init take the trial and read trial.params.",
            )
        for name in suggested.keys() - set(unknown):
            self._args_before.setdefault(name, getattr(trainer.args, name))
            setattr(trainer.args, name, suggested[name])
        trainer.args.check()

    def _restore_args(self) -> None:
        for name, value in self._args_before.items():
            setattr(self._trainer.args, name, value)

    def report(self, trial: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Tell optuna how a trial stands; leave it, on every rank, if optuna gives it up."""
        trainer = self._trainer
        if trainer.hp_search_backend is None or trial is None:
            return
        optuna = _optuna()
        trainer.objective = trainer.compute_objective(dict(metrics))
        stop = False
        if trainer.is_world_process_zero() and len(trial.study.directions) == 1:
            trial.report(trainer.objective, step)
            stop = trial.should_prune()
        if trainer._session.world.broadcast_object(stop):
            raise optuna.TrialPruned(f"given up at step {step}")


class _Trials:
    """Says where each trial is, and keeps all of them in the search's folder."""

    def __init__(self, root: str | os.PathLike[str] | None, directions: list[str]) -> None:
        self._root = None if root is None else Path(root)
        self._directions = directions
        self._entries: dict[int, dict[str, Any]] = {}
        self._disk = Disk()

    def go_on(self, numbers: set[int]) -> None:
        """Keep what is known of the trials that a stored study has already."""
        known = None if self._root is None or not numbers else open_sweep(self._root)
        for trial in () if known is None else known.trials:
            if trial.number in numbers:
                values = list(trial.objectives)
                folder, told = str(trial.folder.relative_to(self._root or "")), trial.parameters
                self._put(trial.number, folder, told, trial.state, values)

    @contextmanager
    def kept(self, trial: Any, folder: str, trainer: Trainer) -> Iterator[None]:
        """Keep the trial of the block, and how it ended."""
        told = {n: v if isinstance(v, _PLAIN) else str(v) for n, v in trial.params.items()}
        place = folder if self._root is None else os.path.relpath(folder, self._root)
        if trainer.args.should_log:
            shown = ", ".join(
                f"{n} {v:.4g}" if type(v) is float else f"{n} {v}" for n, v in told.items()
            )
            sys.stderr.write(
                one_line(f"anytrain: trial {trial.number} in {folder}: {shown}") + "\n"
            )
        self._put(trial.number, place, told, "running", [])
        state = "failed"
        try:
            yield
            state = "complete"
        except _optuna().TrialPruned:
            state = "pruned"
            raise
        finally:
            self._put(trial.number, place, told, state, _numbers(trainer.objective))

    def _put(
        self, number: int, folder: str, told: Mapping[str, Any], state: str, values: list[float]
    ) -> None:
        named = {"number": number, "folder": folder, "state": state}
        self._entries[number] = {**named, "parameters": told, "objectives": values}
        if self._root is not None:
            trials = [self._entries[each] for each in sorted(self._entries)]
            found = {"format": FORMAT, "directions": self._directions, "trials": trials}
            self._disk.replace(self._root / SWEEP, found)


def _numbers(objective: Any) -> list[float]:
    found = objective if isinstance(objective, list | tuple) else [objective]
    try:
        return [float(each) for each in found]
    except (TypeError, ValueError):
        return []


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise BadInput(
            "Cannot search: optuna is not installed.",
            why="it is the library that suggests each trial's settings.",
            fix="pip install optuna.",
        ) from None
    return optuna


def _best(study: Any, several: bool) -> BestRun | list[BestRun] | None:
    """Return the study's best trial or trials, None where not one was finished."""
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        return None
    if several:
        return [BestRun(str(t.number), list(t.values), t.params) for t in study.best_trials]
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params)


def _something(best: Any) -> BestRun | list[BestRun]:
    if best is None:
        raise WrongOrder(
            "The search has no best run: not one of its trials was finished.",
            why="each was given up early, or failed.",
            fix="pass more n_trials, or a pruner that waits longer (n_startup_trials).",
        )
    found: BestRun | list[BestRun] = best
    return found
