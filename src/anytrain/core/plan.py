"""Decide once: wishes and facts in, one frozen Plan out.

INVARIANT: `resolve` is pure, and every choice says why. Which wish wins is settled here too:
an argument beats a launch option, which beats the environment, which beats the automatic choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from anytrain.core import patches
from anytrain.core.errors import BadInput, Unsupported
from anytrain.core.facts import Capabilities, Gain, JobFacts, MemoryForecast
from anytrain.core.nearest import unknown
from anytrain.core.text import Sheet, size

PRECISIONS = ("no", "bf16", "fp16")
STRATEGIES = ("auto", "spmd")
STEPS = ("auto", "eager", "cuda_graph")
_ENOUGH = 1.1
_NO = ("", "false", "no", "0")
# What torch_xla's variables do to every tensor, whatever its dtype says.
_NARROWS = {
    "XLA_USE_BF16": "is set: float32 and float64 are bfloat16 in torch_xla",
    "XLA_DOWNCAST_BF16": "is set: float32 is bfloat16 and float64 is float32 in torch_xla",
}
_WHY_AUTOCAST = {
    "xla": ("autocast, not XLA_USE_BF16, which would turn float64 into bfloat16 too",),
    "tpu": ("autocast: torch_tpu has no XLA_USE_BF16",),
}
_DTYPE_OF = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A value and the reason for it."""

    value: str
    because: str
    is_free: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.value


class FreeChoice(Choice):
    """One that nobody asked for: a checkpoint or a recording may choose otherwise."""

    __slots__ = ()
    is_free = True


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody asked for, and where they said it."""

    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.value!r} ({self.source})"


@dataclass(frozen=True, slots=True)
class Wishes:
    """Everything a user may ask for that the machine has a say in; None means automatic."""

    device: Wish | None = None
    precision: Wish | None = None
    accumulation: Wish | None = None
    compile: Wish | None = None
    step: Wish | None = None
    downcast_bf16: Wish | None = None
    stall_s: Wish | None = None
    strategy: Wish | None = None
    resume_from_checkpoint: Wish | None = None

    def over(self, lower: Wishes) -> Wishes:
        """Return these wishes, with `lower`'s where these are silent."""
        return Wishes(*(getattr(self, f.name) or getattr(lower, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Everything that was decided before the first step, each with its reason."""

    device: Choice
    precision: Choice
    strategy: Choice
    step: Choice
    accumulation: Choice
    guard: Choice
    shapes: Choice = Choice("any", "default: batches keep the shapes they come in")
    workers: Choice = Choice("as asked", "default: the loader's own number")
    kernels: Choice = Choice("torch's", "default: as the model asks for them")
    evaluation: Choice = Choice("as asked", "default: evaluation has its own batch size")
    batch: Choice = Choice("whole", "default: a batch is computed at once")
    patches: Choice = Choice("none", "default: nothing of other libraries is replaced")

    @property
    def precision_is_free(self) -> bool:
        """Whether nobody asked for a precision, so that a checkpoint may bring its own."""
        return self.precision.is_free

    @property
    def step_is_free(self) -> bool:
        """Whether nobody asked for the way steps run, so that they may be recorded."""
        return self.step.is_free

    def reasons(self) -> Mapping[str, Choice]:
        """Return the choices by name, in the order they were made."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _sheet(self) -> Sheet:
        chosen = self.reasons().items()
        return Sheet("Plan", [(name, choice.value, choice.because) for name, choice in chosen])

    def __repr__(self) -> str:
        return repr(self._sheet())

    def _repr_html_(self) -> str:
        return self._sheet()._repr_html_()


@dataclass(frozen=True, slots=True)
class Revision:
    """A choice that moved inside the plan once the run had learnt something."""

    choice: str
    value: str
    because: str
    step: int
    """Optimizer steps done when it moved."""


def wish(value: object, source: str) -> Wish | None:
    """Return a Wish, or None where nothing was asked for.

    >>> wish("bf16", "argument")
    Wish(value='bf16', source='argument')
    >>> wish(None, "argument") is None
    True
    """
    return None if value is None else Wish(str(getattr(value, "value", value)), source)


def whole_number(asked: Wish | None, what: str, default: int) -> Choice:
    """Return a count of at least one, or refuse the wish."""
    if asked is None:
        return Choice(str(default), "default")
    try:
        number = int(asked.value)
    except ValueError:
        number = 0
    if number < 1:
        raise BadInput(
            f"Cannot use {what}={asked.value:.40}.",
            why=f"the {asked.source} must be a whole number of at least 1.",
            fix=f"pass {what}=1 or more.",
        )
    return Choice(str(number), asked.source)


def check_precision(asked: Wish | None) -> None:
    """Refuse a precision that no device could give."""
    if asked is None or asked.value in (*PRECISIONS, "fp32", "auto"):
        return
    if asked.value == "fp8":
        raise Unsupported(
            "Cannot train in fp8.",
            why="fp8 needs Transformer Engine, torchao or MS-AMP, and anytrain has no fp8 recipe.",
            fix='pass mixed_precision="bf16", which every device that has fp8 computes in.',
        )
    raise unknown("mixed precision", asked.value, (*PRECISIONS, "auto"), source=asked.source)


def check_strategy(asked: Wish | None) -> None:
    """Refuse a strategy that nobody knows."""
    if asked is not None and asked.value not in STRATEGIES:
        fix = 'pass "auto": several processes average their gradients (ddp).'
        raise unknown("strategy", asked.value, STRATEGIES, source=asked.source, fix=fix)


def resolve(wishes: Wishes, machine: Capabilities, job: JobFacts, world_size: int) -> Plan:
    """Decide everything about a run. Pure: the same facts give the same Plan."""
    check_precision(wishes.precision)
    check_processes(machine.backend, machine.process_group, world_size)
    check_downcast(wishes.downcast_bf16, machine.backend)
    precision = _precision(wishes.precision, machine)
    return Plan(
        device=_device(wishes, machine),
        precision=precision,
        strategy=_strategy(wishes.strategy, machine, world_size),
        step=_step(wishes, machine, job),
        accumulation=whole_number(wishes.accumulation, "gradient_accumulation_steps", 1),
        guard=_guard(machine),
        patches=_patches(machine, precision),
    )


def _patches(machine: Capabilities, precision: Choice) -> Choice:
    """Return what of other people's code the run replaces, some of it while it is needed alone."""
    own = [name for name, patch in patches.of(machine.backend).items() if patch.devices]
    names = [*([] if precision.value == "no" else ["autocast"]), *own]
    if not names:
        return Choice(
            "none", f"nothing of torch's or transformers' is replaced on {machine.backend}"
        )
    told = "each as long as it is needed; `anytrain env` says why"
    return Choice(str(len(names)), f"{', '.join(names)}: {told}")


def _device(wishes: Wishes, machine: Capabilities) -> Choice:
    why = "automatic: first found of tpu, xla, cuda, mps, cpu"
    return Choice(machine.device, wishes.device.source if wishes.device else why)


def _precision(asked: Wish | None, machine: Capabilities) -> Choice:
    """Return the precision, with what else the compiler of a TPU makes of float32."""
    found = _chosen_precision(asked, machine)
    notes = [found.because]
    if found.value == "bf16" and not machine.narrowed_by:
        notes += _WHY_AUTOCAST.get(machine.backend, ())
    notes += [f"{name} {_NARROWS[name]}" for name in machine.narrowed_by]
    return replace(found, because="; ".join(notes))


def _chosen_precision(asked: Wish | None, machine: Capabilities) -> Choice:
    if asked is None:
        return FreeChoice("no", "default: float32, as the peers do; ask for bf16 or auto")
    if asked.value == "auto":
        if machine.bf16_gain is not None:
            return _measured_precision(machine.bf16_gain)
        if "bfloat16" in machine.slow_dtypes:
            because = f"auto: {machine.name} has no bfloat16 instructions, it is slower"
            return FreeChoice("no", because)
        if "bfloat16" in machine.dtypes:
            return FreeChoice("bf16", f"auto: {machine.device} computes in bfloat16")
        return FreeChoice("no", f"auto: {machine.device} does not compute in bfloat16")
    value = "no" if asked.value == "fp32" else asked.value
    if _DTYPE_OF[value] not in machine.dtypes:
        raise _impossible(value, machine, f"it computes in {' and '.join(machine.dtypes)}")
    if value == "fp16" and not machine.scales_gradients:
        raise _impossible(value, machine, "no gradient scaler runs there")
    return Choice(value, asked.source)


def _measured_precision(gain: Gain) -> Choice:
    """Return bf16 where it gained enough to be worth its rounding."""
    told = f"bf16 is {gain.factor:.1f} times as fast as fp32 here, measured on {gain.day}"
    if gain.factor >= _ENOUGH:
        return FreeChoice("bf16", f"auto: {told}")
    return FreeChoice("no", f"auto: {told}, too small a gain to accept its rounding")


def _impossible(precision: str, machine: Capabilities, why: str) -> BadInput:
    return BadInput(
        f"Cannot train in {precision} on {machine.backend!r}.",
        why=f"{machine.device} is {machine.name}; {why}.",
        fix='ask for "auto" or bf16 (mixed_precision="bf16"; in TrainingArguments bf16=True), or '
        "choose another device.",
    )


def _strategy(asked: Wish | None, machine: Capabilities, world_size: int) -> Choice:
    if asked is not None and asked.value != "auto":
        return _asked_strategy(asked, machine, world_size)
    if world_size == 1:
        return Choice("solo", "one process")
    return Choice("ddp", f"{world_size} processes over {machine.process_group}")


def _asked_strategy(asked: Wish, machine: Capabilities, world_size: int) -> Choice:
    check_strategy(asked)
    if machine.spread_over is None or world_size > 1:
        why = f"{machine.backend} has no compiler that splits a batch over its devices"
        many = f"one process holds all devices, and {world_size} were started"
        raise BadInput(
            f"Cannot train with strategy {asked}.",
            why=f"{why if machine.spread_over is None else many}.",
            fix='run one process on torch_xla (ANYTRAIN_DEVICE=xla), or pass "auto".',
        )
    told = f"{asked.source}: one process, batches split over {machine.spread_over} devices"
    return Choice(asked.value, told)


def with_memory(plan: Plan, forecast: MemoryForecast, device_bytes: int | None) -> Plan:
    """Return the plan with what each rank will hold, beside the reason for its strategy.

    >>> known = MemoryForecast(4 * 10**8, 4 * 10**8, 8 * 10**8)
    >>> choice = Choice("solo", "one process")
    >>> plan = Plan(*[choice] * 6)
    >>> with_memory(plan, known, 24 * 10**9).strategy.because
    'one process; weights, gradients and optimizer take 1.6 GB of 24 GB on each rank'
    """
    names = ["weights", "gradients"]
    names += ["optimizer"] if forecast.optimizer_bytes is not None else []
    names += ["buckets"] if forecast.copy_bytes else []
    whole = "" if device_bytes is None else f" of {size(device_bytes)}"
    takes = f"{', '.join(names[:-1])} and {names[-1]} take {size(forecast.num_bytes)}{whole}"
    because = f"{plan.strategy.because}; {takes} on each rank"
    return replace(plan, strategy=Choice(plan.strategy.value, because))


def _step(wishes: Wishes, machine: Capabilities, job: JobFacts) -> Choice:
    compiler, asked = wishes.compile, wishes.step
    if asked is not None and asked.value != "auto":
        return _asked_step(asked, machine)
    if compiler is not None and compiler.value.lower() != "no":
        if machine.backend == "xla":
            raise BadInput(
                f"Cannot use torch.compile ({compiler}) on {machine.backend!r}.",
                why="torch_xla compiles the whole step already, and torch's compilers do not "
                "read its tensors.",
                fix="drop torch_compile or dynamo_backend.",
            )
        return Choice("compiled", f"{compiler.source}: torch.compile with {compiler.value.lower()}")
    return FreeChoice("eager", "your own loop" if job.own_loop else "default")


def _asked_step(asked: Wish, machine: Capabilities) -> Choice:
    if asked.value not in STEPS:
        fix = 'pass "auto", which records the step where that can be.'
        raise unknown("step engine", asked.value, STEPS, source=asked.source, fix=fix)
    if asked.value == "cuda_graph" and machine.backend != "cuda":
        raise BadInput(
            f"Cannot record steps as CUDA graphs on {machine.backend!r}.",
            why=f"{machine.device} is {machine.name}.",
            fix='pass "auto", or choose a CUDA device.',
        )
    return Choice(asked.value, asked.source)


def _guard(machine: Capabilities) -> Choice:
    if machine.backend == "cpu":
        return Choice("host", "reading a flag on the CPU waits for nothing")
    if machine.traces and machine.narrowed_by:
        return Choice(
            "host", "bfloat16 cannot count steps, so the host does: one flag is read per step"
        )
    if machine.traces:
        return Choice("select", "the device takes a non-finite step back, in the step's own graph")
    if machine.fuses_optimizer:
        return Choice("device", "the fused optimizer skips a non-finite step by itself")
    return Choice("host", f"no fused optimizer on {machine.backend}: one flag is read per step")


def check_processes(backend: str, process_group: str | None, count: int) -> None:
    """Refuse a second process where nothing could carry a gradient."""
    if count > 1 and process_group is None:
        raise BadInput(
            f"Cannot train with {count} processes on {backend!r}.",
            why=f"no process group serves {backend}: gloo and nccl do not know it.",
            fix="start one process, or use CPU processes: `anytrain launch --cpu "
            f"--num_processes {count}`.",
        )


def is_yes(asked: Wish | None) -> bool:
    """Whether a yes-or-no wish was made, and is a yes."""
    return asked is not None and asked.value.strip().lower() not in _NO


def check_downcast(asked: Wish | None, backend: str) -> None:
    """Refuse downcast_bf16 where no compiler knows it."""
    if not is_yes(asked) or backend == "xla":
        return
    raise BadInput(
        f"Cannot use downcast_bf16 on {backend!r}.",
        why="torch_tpu has no XLA_DOWNCAST_BF16: its float32 matmuls already run in bfloat16."
        if backend == "tpu"
        else "it maps float32 to bfloat16 inside torch_xla's compiler, and nowhere else.",
        fix='pass mixed_precision="bf16", or drop downcast_bf16.',
    )
