"""`anytrain launch`: run a script in one process or in many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import typer
from typer.core import TyperCommand

from anytrain.doors.launch import options
from anytrain.doors.launch.config import with_file
from anytrain.doors.launch.options import LaunchOptions


def option(name: str, help: str, *more: str) -> Any:
    """Return an option that is spelt with underscores, as HF does, or with dashes."""
    return typer.Option(None, *_spellings(name), *more, help=help, show_default=False)


def flag(name: str, help: str, *more: str) -> Any:
    """Return a switch that is off unless it is named."""
    return typer.Option(False, *_spellings(name), *more, help=help, show_default=False)


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


PROCESSES = option("num_processes", "Processes on all machines together.", "-n")
MACHINES = option("num_machines", "Machines that take part.")
MACHINE_RANK = option("machine_rank", "This machine's number, from 0.")
IP = option("main_process_ip", "Address of machine 0.")
PORT = option("main_process_port", "Port of machine 0; 0 picks a free one.")
PRECISION = option("mixed_precision", "no, bf16, fp16 or auto.")
DOWNCAST = flag("downcast_bf16", "On TPUs: let float32 be bfloat16 in the compiler.")
ACCUMULATION = option("gradient_accumulation_steps", "Batches that make one update.")
CPU = flag("cpu", "Use the CPU even where there is a GPU or TPU.")
MULTI_GPU = flag("multi_gpu", "Use CUDA GPUs, and nothing else.")
TPU = flag("tpu", "Use TPUs, and nothing else.")
GPU_IDS = option("gpu_ids", "GPUs to use, such as 0,2; all means every one.")
THREADS = option("num_cpu_threads_per_process", "Threads for each process.")
DYNAMO = option("dynamo_backend", "Compile with torch.compile and this backend.")
RESTARTS = option("max_restarts", "How often to start again after a failure.")
STALL = option("stall_timeout", "Seconds after which a frozen rank ends the job; 0: never.")
STRATEGY = option("strategy", "spmd: one process, batches split over all devices (torch_xla).")
RESUME = option(
    "resume_from_checkpoint",
    "Go on from this checkpoint; auto: from the newest whole one, or from the start.",
    "--resume",
)
CONFIG = option("config_file", "YAML file with these options; HF Accelerate's work too.")


def launch(  # noqa: PLR0913  a command has one parameter for each option
    script: str = typer.Argument(help="Python file, or module with --module."),
    args: list[str] = typer.Argument(None, help="The script's own options, as they are."),
    num_processes: int | None = PROCESSES,
    num_machines: int | None = MACHINES,
    machine_rank: int | None = MACHINE_RANK,
    main_process_ip: str | None = IP,
    main_process_port: int | None = PORT,
    mixed_precision: str | None = PRECISION,
    downcast_bf16: bool = DOWNCAST,
    gradient_accumulation_steps: int | None = ACCUMULATION,
    cpu: bool = CPU,
    multi_gpu: bool = MULTI_GPU,
    tpu: bool = TPU,
    gpu_ids: str | None = GPU_IDS,
    num_cpu_threads_per_process: int | None = THREADS,
    dynamo_backend: str | None = DYNAMO,
    max_restarts: int | None = RESTARTS,
    stall_timeout: float | None = STALL,
    strategy: str | None = STRATEGY,
    resume_from_checkpoint: str | None = RESUME,
    module: bool = flag("module", "Treat the script as a module, as python -m does.", "-m"),
    debug: bool = flag("debug", "Show every rank's traceback and torch's own logs."),
    config_file: str | None = CONFIG,
) -> None:
    """Run a script in one process or in many, on one machine or several.

    Without options: one process for each GPU or TPU of this machine, else one on its only
    device. The command line beats the config file, which beats the environment.
    """
    asked = given(locals())
    from anytrain.doors.launch import elastic

    raise typer.Exit(elastic.launch(with_file(asked, config_file), script, args or []))


def given(parameters: Mapping[str, Any]) -> LaunchOptions:
    """Return the options of a launch among a command's parameters; a switch that is off is none."""
    names = {field.name for field in fields(LaunchOptions)}
    known = {name: value for name, value in parameters.items() if name in names}
    return LaunchOptions(
        **{name: None if value is False else value for name, value in known.items()}
    )


class _Launch(TyperCommand):
    """A command that takes what `accelerate launch` takes, and says what of it is not used."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        own = {
            name.lstrip("-").replace("-", "_"): not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in parameter.opts
        }
        args, unused = options.sift_hf_options(args, own)
        if unused:
            typer.echo(f"anytrain: not used here: {', '.join(unused)}.", err=True)
        return super().parse_args(ctx, args)


launch.command_class = _Launch  # type: ignore[attr-defined]  # read by main
# The first word that is no option is the script; everything after it belongs to the script.
launch.context_settings = {  # type: ignore[attr-defined]  # read by main
    "allow_interspersed_args": False,
}
