"""`Accelerator`: your loop, our tools.

Each method hands over to the room that does the work; none decides anything about hardware.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import WrongOrder
from anytrain.core.nearest import NamedArguments
from anytrain.core.plan import Plan
from anytrain.core.text import Sheet
from anytrain.doors.accelerator import settings
from anytrain.doors.accelerator.memory import release_memory
from anytrain.doors.accelerator.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DynamoBackend,
    GradientAccumulationPlugin,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
    changed,
    check_flags,
    sort_handlers,
)
from anytrain.doors.accelerator.preflight import Foretelling
from anytrain.doors.accelerator.saving import Saving
from anytrain.doors.accelerator.states import AcceleratorState, GradientState
from anytrain.doors.accelerator.stepping import Stepping
from anytrain.doors.accelerator.tracking import Tracking
from anytrain.doors.accelerator.unsupported import UnsupportedMembers, refuse_plugins
from anytrain.doors.described import NOWHERE, Described, run_facts, sheet
from anytrain.engine import collect
from anytrain.engine.assemble import current
from anytrain.engine.assemble.run import Run, holders, note_norm, num_skipped, unscale
from anytrain.engine.assemble.session import Session, session
from anytrain.engine.prepared.optimizer import PreparedOptimizer
from anytrain.engine.prepared.rebuild import skip_first_batches
from anytrain.engine.recording import trackers
from anytrain.engine.recording.profile import profile
from anytrain.engine.tree import is_all_tensors, map_tensors


class Accelerator(
    Described, Stepping, Tracking, Saving, Foretelling, UnsupportedMembers, NamedArguments
):
    """Run a training loop on whatever device and processes there are.

    Args:
        device_placement: Whether `prepare` moves models, and loaders their batches, to the
            device.
        split_batches: With several processes: True cuts each batch of the loader into one part
            for each; False, the default, gives each process whole batches, so that a step
            takes num_processes times as many samples. Sets the same option of
            `dataloader_config`.
        mixed_precision: "no", "bf16", "fp16", or "auto" for what the device is quickest in.
            None: what `anytrain launch` or ANYTRAIN_MIXED_PRECISION says, else "no".
        gradient_accumulation_steps: Batches that make one update, inside `accumulate`. None:
            what the launch says, else 1.
        cpu: Use the CPU even where there is a GPU or TPU.
        dataloader_config: How `prepare` treats loaders: a DataLoaderConfiguration.
        deepspeed_plugin: Refused: the model is replicated on every process, not sharded.
        fsdp_plugin: Refused, for the same reason.
        torch_tp_plugin: Refused, for the same reason.
        megatron_lm_plugin: Refused, for the same reason.
        rng_types: Which random generators every rank takes from the main process at the start
            of an epoch: "generator" (the sampler's, the default), "torch", "cuda", "xla".
        log_with: Trackers: a name, a list of names, "all" for those that are installed, or a
            GeneralTracker of your own. The known ones are tensorboard, wandb, mlflow, trackio,
            jsonl and csv.
        project_dir: The run's folder: its record, its checkpoints, its trackers' files.
            Without one, nothing is recorded, and nothing is saved when a signal stops the run.
        project_config: How the folder is used (ProjectConfiguration): numbered checkpoints,
            how many of them stay, where logs go.
        gradient_accumulation_plugin: The same as `gradient_accumulation_steps`, with more to
            say: a GradientAccumulationPlugin.
        step_scheduler_with_optimizer: Whether a prepared schedule moves only with an update,
            and as many positions as there are processes. False: your `step()` moves it as it
            is.
        kwargs_handlers: Options of what lies below: AutocastKwargs,
            DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs,
            ProfileKwargs; one of each at most.
        dynamo_backend: Compile models with torch.compile and this backend, such as "inductor".
        dynamo_plugin: The same with more to say: a TorchDynamoPlugin.
        deepspeed_plugins: Refused, as `deepspeed_plugin`.
        parallelism_config: Refused: there is one kind of parallelism here, over data.
        downcast_bf16: On TPUs: let float32 be bfloat16 in the compiler.
    """

    _is_trainers = False

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        downcast_bf16: bool | None = None,
    ) -> None:
        refuse_plugins(
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            deepspeed_plugins=deepspeed_plugins,
            parallelism_config=parallelism_config,
        )
        check_flags(device_placement=device_placement, cpu=cpu)
        handlers = sort_handlers(kwargs_handlers)
        plugin = settings.accumulation_plugin(
            gradient_accumulation_steps, gradient_accumulation_plugin
        )
        dynamo = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
        loaders = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            loaders.split_batches = split_batches
        self.dataloader_config = loaders
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None:
            self.project_configuration.set_directories(project_dir)
        self._log_with = trackers.resolve(log_with, self.logging_dir)
        found = session(
            settings.wishes(
                cpu=cpu,
                mixed_precision=mixed_precision,
                accumulation=plugin.num_steps,
                dynamo=dynamo,
                downcast_bf16=downcast_bf16,
            ),
            settings.session_options(plugin, handlers),
        )
        self._run = Run(
            found,
            settings.run_options(
                device_placement=device_placement,
                loaders=loaders,
                rng_types=rng_types,
                handlers=handlers,
                dynamo=dynamo,
                step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            ),
        )
        self._run.replace_until_end()
        self._handlers = handlers
        self._trackers: trackers.Trackers | None = None
        self._triggered = False
        self._begin_saving()
        current.take(found)

    @classmethod
    def over(cls, run: Run) -> Accelerator:
        """Return an Accelerator that stands on a run which somebody else drives.

        Args:
            run: The run, which has its device, plan and world.
        """
        made = cls.__new__(cls)
        given, own = run.options.loaders, fields(DataLoaderConfiguration)
        known = {f.name: getattr(given, f.name) for f in own if hasattr(given, f.name)}
        made.dataloader_config = DataLoaderConfiguration(**known)
        made.project_configuration = ProjectConfiguration()
        made._log_with, made._handlers, made._trackers = [], {}, None
        made._run, made._triggered, made._is_trainers = run, False, True
        made._begin_saving()
        return made

    # -- what was decided ---------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        return self._run.session

    @property
    def plan(self) -> Plan:
        """Everything that was decided, each with its reason."""
        return self._session.plan

    @property
    def state(self) -> AcceleratorState:
        """This run, as HF's state object shows it."""
        view: AcceleratorState = AcceleratorState._of(self._session)
        return view

    @property
    def gradient_state(self) -> GradientState:
        """Where this run's loop stands between two updates."""
        return GradientState._of(self._session.cursor)

    @property
    def mixed_precision(self) -> str:
        """The precision in force: no, bf16 or fp16."""
        return self._session.plan.precision.value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """fp16's loss scaler; None in other precisions."""
        scale = self._session.precision.scale
        return None if scale is None else scale.scaler

    @property
    def multi_device(self) -> bool:
        """Whether several devices train together."""
        return self.use_distributed

    @property
    def data_parallel_rank(self) -> int:
        """This process's rank: every process holds a replica."""
        return self.process_index

    def _sheet(self) -> Sheet:
        run = self._run
        models = [run.unwrap(each, keep_forward=True, keep_compiled=False) for each in run.models]
        rows = [("updates", f"{run.session.cursor.updates:,} so far")]
        folder = self.project_configuration.project_dir or NOWHERE
        place = "its Trainer's" if self._is_trainers else folder
        return sheet("Accelerator", run.session, models, rows, place, "in .plan")

    # -- prepare ------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Return models, optimizers, loaders and schedulers ready for this run, in their order.

        Args:
            *args: Models, optimizers, loaders and schedulers, in any order; anything else
                comes back as it is.
            device_placement: For each of them whether it is moved to the device; None in
                the list, or instead of it, is the Accelerator's own setting.
        """
        observer = self._run.session.observer
        observer.tell(**run_facts(self._run), output_dir=self.project_dir or "")
        return self._run.prepare(args, device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return the model on its device, in its precision, tied to the other ranks'.

        Args:
            model: The model.
            device_placement: Whether to move it to the device. None: as the Accelerator
                was told.
            evaluation_mode: Whether it will only be evaluated: then it is not tied to the
                other ranks'.
        """
        return self._run.model(model, device_placement, evaluation_mode=evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Return the optimizer, guarded and bound to accumulated steps.

        Args:
            optimizer: The optimizer, made from the model's parameters.
            device_placement: Whether its state is moved to the device. None: as the
                Accelerator was told.
        """
        return self._run.optimizer(optimizer, device_placement)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Return the loader, dealt to this rank.

        Args:
            data_loader: A torch DataLoader.
            device_placement: Whether its batches are moved to the device. None: as the
                Accelerator was told.
            slice_fn_for_dispatch: With dispatch_batches: `f(batch, slice, process_index,
                num_processes)`, which cuts a rank's part out of what the main process has
                read.
        """
        return self._run.loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler, moving with its optimizer.

        Args:
            scheduler: A schedule of torch's, of a prepared optimizer.
        """
        return self._run.scheduler(scheduler)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model that was given to `prepare`.

        Args:
            model: The prepared model.
            keep_fp32_wrapper: Whether its forward goes on computing in the run's
                precision. False gives the forward that the model came with.
            keep_torch_compile: Whether it stays compiled, where it was compiled.
        """
        return self._run.unwrap(
            model, keep_forward=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's weights, under the names of the model given to `prepare`.

        Args:
            model: The prepared model.
            unwrap: Whether names are those of the model that was given to `prepare`.
        """
        if unwrap:
            model = self._run.unwrap(model, keep_forward=True, keep_compiled=False)
        return model.state_dict()

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader less its first batches, for the first epoch after a resume.

        Args:
            dataloader: A loader, prepared or not.
            num_batches: How many batches of this process to leave out.
        """
        return skip_first_batches(dataloader, num_batches)

    # -- the step -----------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Let gradients add up inside the block until the update is due.

        Args:
            *models: The prepared models that are trained inside.
        """
        cursor = self._session.cursor
        if cursor.next_micro() or cursor.accumulation.sync_each_batch:
            yield
            return
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self._session.strategy.accumulating(model))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Leave gradients local inside the block.

        Args:
            model: The prepared model.
        """
        return self._session.strategy.accumulating(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> Any:
        """Average the gradients of the next backward although the forward was under no_sync.

        Args:
            model: The prepared model.
        """
        found = current.get()
        assert found is not None
        return found.strategy.share_next_backward(model)

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch ends an update."""
        return self._session.cursor.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._session.cursor.sync = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many batches make one update."""
        return self._session.cursor.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        cursor = self._session.cursor
        cursor.accumulation = replace(cursor.accumulation, num_steps=steps)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo fp16's loss scale now, so that gradients can be looked at.

        Args:
            optimizer: A prepared optimizer, or several. None: all.
        """
        if self.scaler is not None and not self.sync_gradients:
            raise WrongOrder(
                "Cannot look at fp16 gradients in the middle of an accumulated step.",
                why="they are still scaled, and the next backward adds scaled ones to them.",
                fix="clip under `if accelerator.sync_gradients:`.",
            )
        chosen = self._run.optimizers if optimizer is None else optimizer
        unscale(list(chosen) if isinstance(chosen, (list, tuple)) else [chosen])

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Clip the gradients to a norm; return the norm they had, on the device.

        Args:
            parameters: The parameters, such as `model.parameters()`.
            max_norm: The largest norm of all their gradients together.
            norm_type: Which norm: 2, 1, or inf.
        """
        found = _listed(parameters)
        owners = holders(self._run.optimizers, found)
        self.unscale_gradients(owners)
        grads = [p.grad for p in found if p.grad is not None]
        norm = self._session.strategy.norm(grads, norm_type)
        torch.nn.utils.clip_grads_with_norm_(found, max_norm, norm)
        note_norm(owners, norm)
        return norm

    def clip_grad_value_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float
    ) -> None:
        """Clip each gradient value; one that was not finite still counts as that.

        Args:
            parameters: The parameters.
            clip_value: The largest absolute value of a gradient's entry.
        """
        found = _listed(parameters)
        owners = holders(self._run.optimizers, found)
        self.unscale_gradients(owners)
        grads = [p.grad for p in found if p.grad is not None]
        if grads:
            note_norm(owners, self._session.strategy.norm(grads, float("inf")))
        torch.nn.utils.clip_grad_value_(found, clip_value)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return the context that the planned precision computes in.

        Args:
            autocast_handler: Options of this block alone. None: the Accelerator's.
        """
        return self._session.precision.autocast(changed(autocast_handler))

    @property
    def native_amp(self) -> bool:
        """Whether the run computes in a mixed precision; False, assigned, ends it."""
        return self._session.precision.is_mixed

    @native_amp.setter
    def native_amp(self, mixed: bool) -> None:
        if self.native_amp and not mixed:
            self._run.compute_in("no", "native_amp=False was assigned")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was left out because its gradient was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._run.optimizers)

    @property
    def num_skipped_steps(self) -> int:
        """How many updates were left out so far; reads the device."""
        return num_skipped(self._run.optimizers)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let ranks run out of batches at different times inside the block.

        Args:
            joinables: The prepared models.
            even_batches: Whether loaders fill their last round inside the block. None: as
                they are.
        """
        with self._run.evenness(even_batches) as even:
            if even or not self.use_distributed:
                yield
                return
            # Ranks pass different numbers of batches in here: a stop waits for the block's end.
            cursor = self._session.cursor
            stops, cursor.stops = cursor.stops, None
            try:
                with self._session.strategy.join(joinables):
                    yield
            finally:
                cursor.stops = stops

    # -- collectives --------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return every rank's tensors, joined along the first dimension.

        Args:
            tensor: A tensor, or a list, tuple or dict of them; the other ranks' must have
                its shape.
        """
        return collect.gather(tensor, self._session.world, check=self.debug)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, without the samples that were repeated to fill the last round.

        Args:
            input_data: What was computed from the current batch of a prepared loader:
                tensors, or anything that can be pickled.
            use_gather_object: Whether to gather it as objects although it is tensors, as
                when shapes differ.
        """
        as_objects = use_gather_object or not is_all_tensors(input_data)
        world, cursor = self._session.world, self._session.cursor
        if as_objects:
            data = collect.gather_objects(input_data, world)
        else:
            data = collect.gather(input_data, world, check=self.debug)
        of_rows = not as_objects or isinstance(input_data, (list, tuple))
        if of_rows and cursor.at_end and cursor.num_last > 0:
            kept = cursor.num_last
            data = data[:kept] if as_objects else map_tensors(lambda t: t[:kept], data)
        if cursor.end_step is not None:
            cursor.end_step()  # what is gathered is read next: all of it, in one graph
        return data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean of every tensor over the ranks.

        Args:
            tensor: A tensor, or a list, tuple or dict of them.
            reduction: "sum", "mean", "max" or "none".
            scale: What the result is multiplied by.
        """
        return collect.reduce(tensor, self._session.world, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False
    ) -> Any:
        """Return the tensors padded to the longest rank's size along `dim`.

        Args:
            tensor: A tensor, or a list, tuple or dict of them.
            dim: The dimension in which sizes differ.
            pad_index: The value to pad with.
            pad_first: Whether the padding comes before the values.
        """
        return collect.pad_across(tensor, self._session.world, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every process."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process raised the flag since the last check; lowers it."""
        raised = any(self._session.world.gather_object(self._triggered))
        self._triggered = False if raised else self._triggered
        return raised

    # -- the end ------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of every prepared object and give memory back.

        Args:
            *objects: Objects to let go of; assign the Nones that come back: `model, loader
                = accelerator.free_memory(model, loader)`.
        """
        self._run.forget()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """Do what `free_memory` does.

        Args:
            *objects: Objects to let go of.
        """
        return self.free_memory(*objects)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Profile the block with torch's profiler.

        Args:
            profile_handler: What to measure. None: the Accelerator's ProfileKwargs, else
                everything this machine can measure.
        """
        options = profile_handler or self._handlers.get(ProfileKwargs) or ProfileKwargs()
        return profile(options, self.process_index)

    def end_training(self) -> None:
        """Finish the trackers, leave the process group, and clear the current run.

        Raise NotFinite where every update of the run was skipped: nothing was learnt.
        """
        self.finish_saving()
        self._between.disarm()
        if self._trackers is not None:
            self._trackers.finish()
        self._session.world.close()
        self._run.end()
        if current.get() is self._session:
            current.clear()
        self._refuse_idle(is_over=True)

    @property
    def _models(self) -> list[nn.Module]:
        return self._run.models

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        return self._run.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return list(self._run.schedulers)

    @property
    def _dataloaders(self) -> list[Any]:
        return list(self._run.loaders)

    @property
    def _custom_objects(self) -> list[Any]:
        return self._registered


def _listed(parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
