"""What arguments ask of a session: wishes, and how objects are prepared."""

from __future__ import annotations

from typing import Any

from anytrain.core.plan import Wishes, wish
from anytrain.doors.training_args.accelerator_config import refuse_configured
from anytrain.doors.training_args.arguments import TrainingArguments
from anytrain.doors.training_args.processes import asked_precision
from anytrain.engine.assemble import session as sessions
from anytrain.engine.assemble.loaders import LoaderOptions
from anytrain.engine.assemble.run import RunOptions
from anytrain.engine.assemble.session import Session, SessionOptions
from anytrain.engine.data.compiled_shapes import Remedies
from anytrain.engine.prepared.walk import Accumulation

_REMEDIES = Remedies(
    last="Pass dataloader_drop_last=True if it is training's, or a batch size that divides the "
    "number of samples.",
    length='Pad batches to one length (padding="max_length"), or to a few: length_buckets.',
)


def wishes(args: TrainingArguments) -> Wishes:
    """Return what the machine is asked for; accumulation is the step's own affair."""
    spelling = "precision" if args.precision is not None else "bf16" if args.bf16 else "fp16"
    compiler = args.torch_compile_backend if args.torch_compile else None
    return Wishes(
        device=wish("cpu" if args.use_cpu else None, "argument use_cpu"),
        precision=wish(asked_precision(args), f"argument {spelling}"),
        compile=wish(compiler, "argument torch_compile"),
        step=wish(None if args.step_engine == "auto" else args.step_engine, "argument step_engine"),
    )


def session_options(args: TrainingArguments) -> SessionOptions:
    """Return what the session needs besides wishes."""
    config: Any = args.accelerator_config
    accumulation = config.gradient_accumulation_kwargs or {}
    return SessionOptions(
        accumulation=Accumulation(sync_each_batch=bool(accumulation.get("sync_each_batch"))),
        process_group={"backend": args.ddp_backend, "timeout": args.ddp_timeout_delta},
    )


def run_options(args: TrainingArguments) -> RunOptions:
    """Return how models and loaders are prepared."""
    config: Any = args.accelerator_config
    refuse_configured(config)
    return RunOptions(
        loaders=LoaderOptions(
            split_batches=config.split_batches,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=args.seed if args.data_seed is None else args.data_seed,
            non_blocking=config.non_blocking,
        ),
        ddp=_ddp(args),
        compile=_compiling(args),
    )


def _ddp(args: TrainingArguments) -> dict[str, Any]:
    unused = args.ddp_find_unused_parameters
    if unused is None:
        # As HF: a head that a loss does not use must not stop a run; checkpointing cannot do it.
        unused = not args.gradient_checkpointing
    options = {
        "find_unused_parameters": unused,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return {name: value for name, value in options.items() if value is not None}


def _compiling(args: TrainingArguments) -> dict[str, Any]:
    if not args.torch_compile:
        return {}
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in options.items() if value is not None}


def asked(args: Any) -> tuple[Wishes, SessionOptions]:
    """Return all that a session is opened by."""
    return wishes(args), session_options(args)


def open_session(args: Any) -> Session:
    """Open the session that the arguments ask for, and let them read their device from it.

    Each call opens one of its own: two runs share neither a loss scale nor a place in a loop.
    """
    wanted = asked(args)
    opened = sessions.session(*wanted)
    if opened.graphs is not None:
        opened.graphs.remedies = _REMEDIES
    args.__dict__["_opened"] = (wanted, opened)
    return opened


def kept_session(args: Any) -> Session:
    """Return the session opened last, unless the arguments ask for another one by now."""
    kept = args.__dict__.get("_opened")
    if kept is None or kept[0] != asked(args):
        return open_session(args)
    opened: Session = kept[1]
    return opened
