"""Every argument of transformers 5.22's TrainingArguments, and anytrain's own; the words they take.

Names, defaults and order are theirs. What an argument does here is said in `support.py`. Words are
enums whose members are the strings that users type.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

from anytrain.core.nearest import unknown
from anytrain.core.plan import STEPS

if TYPE_CHECKING:
    # A parser sees one type per argument; a type checker sees all that may be passed.
    from anytrain.doors.training_args.accelerator_config import AcceleratorConfig

    Config = AcceleratorConfig | dict[str, Any] | str | None
    TokenCount = str | bool
    PathOrFlag = str | bool | None
    Settings = Any
    OutputDir = str
    LengthBuckets = str | int | list[int] | None
else:
    Config = Settings = dict[str, Any] | str | None
    TokenCount = str
    PathOrFlag = OutputDir = LengthBuckets = str | None


class OptionEnum(StrEnum):
    """An enum of words; a word it does not hold is refused with the nearest one it does."""

    @classmethod
    def accepted(cls) -> tuple[str, ...]:
        """Return the words that ask for something which is done here."""
        return tuple(str(member.value) for member in cls)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise unknown(cls.__name__, value, cls.accepted())


class IntervalStrategy(OptionEnum):
    """When something happens during training."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


EvaluationStrategy = IntervalStrategy


class SaveStrategy(OptionEnum):
    """When a checkpoint is written."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(OptionEnum):
    """What is pushed to the hub, and when."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class SchedulerType(OptionEnum):
    """How the learning rate moves."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


RUNNING = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""The optimizers that run here."""


class OptimizerNames(OptionEnum):
    """Optimizers by name; why others than `RUNNING` do not run is said in `support.py`."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAFACTOR = "adafactor"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADEMAMIX = "ademamix"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = "adamw_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    GROKADAMW = "grokadamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    STABLE_ADAMW = "stable_adamw"
    # Names of transformers 4.x, taken for what replaced them.
    ADAMW_HF = "adamw_hf"
    ADAMW_APEX_FUSED = "adamw_apex_fused"

    @classmethod
    def accepted(cls) -> tuple[str, ...]:
        """Return the names of those that run here."""
        return RUNNING


class DebugOption(OptionEnum):
    """What is watched while training."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class FSDPOption(OptionEnum):
    """Words of FSDP, which anytrain does not have; named so that scripts can be read."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    OFFLOAD = "offload"
    AUTO_WRAP = "auto_wrap"


class ParallelMode(Enum):
    """How processes and devices are shared out."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


LOG_LEVELS = {
    "detail": 10,
    "debug": 10,
    "info": 20,
    "warning": 30,
    "error": 40,
    "critical": 50,
    "passive": -1,
}
SAMPLING = ("random", "sequential", "group_by_length", "batch_rebalance")
START_METHODS = ("fork", "spawn", "forkserver")
TRANSPORTS = ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")
TOKEN_COUNTS = ("all", "non_padding", "no")
METRIC_EXTRAS = ("inputs", "loss")
ON_NONFINITE = ("stop", "skip", "rewind")
ACTIVATIONS = ("off", "fit")
PRECISIONS = ("no", "bf16", "fp16", "auto")
COMPILE_MODES = (
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)


def option(default: Any, text: str, **more: Any) -> Any:
    """Return a field with its help; `more` is passed to argparse."""
    return field(default=default, metadata={"help": text, **more})


def flag(text: str, **more: Any) -> Any:
    """Return a yes-or-no field that is unset by default and may be given without a value."""
    return field(default=None, metadata={"help": text, "nargs": "?", "const": True, **more})


def listed(text: str) -> Any:
    """Return a field that holds a list, empty by default."""
    return field(default=MISSING, default_factory=list, metadata={"help": text})


@dataclass
class Fields:
    """What a run can be told."""

    output_dir: OutputDir = option(None, "Where checkpoints, results and logs are written.")

    per_device_train_batch_size: int = option(8, "Samples a device sees at once in training.")
    num_train_epochs: float = option(3.0, "Passes over the training data; 1.5 stops half way.")
    max_steps: int = option(-1, "Optimizer steps in all; above 0 it beats num_train_epochs.")

    learning_rate: float = option(5e-5, "The highest learning rate of the schedule.")
    lr_scheduler_type: SchedulerType | str = option("linear", "How the learning rate moves.")
    lr_scheduler_kwargs: Settings = option(None, "The schedule's own options, as a dict or JSON.")
    warmup_steps: float = option(0, "Steps of warm-up; below 1, a share of all steps.")

    optim: OptimizerNames | str = option("adamw_torch_fused", "The optimizer.")
    optim_args: str | None = option(None, "The optimizer's own options: 'key=value,key2=value2'.")
    weight_decay: float = option(0.0, "Weight decay; biases and norms are left out.")
    adam_beta1: float = option(0.9, "Decay of Adam's mean of gradients.")
    adam_beta2: float = option(0.999, "Decay of Adam's mean of squared gradients.")
    adam_epsilon: float = option(1e-8, "What keeps Adam's division finite.")
    optim_target_modules: None | str | list[str] = option(None, "Modules for GaLore or APOLLO.")

    gradient_accumulation_steps: int = option(1, "Batches that make one optimizer step.")
    average_tokens_across_devices: bool = option(
        True, "Weigh every token of a step alike, whichever rank saw it."
    )
    max_grad_norm: float = option(1.0, "Clip the gradient's norm to this; 0 does not clip.")
    label_smoothing_factor: float = option(0.0, "Share of the target given to other classes.")

    bf16: bool = option(False, "Compute in bfloat16 (mixed precision).")
    fp16: bool = option(False, "Compute in float16 (mixed precision, with a loss scale).")
    bf16_full_eval: bool = option(False, "Evaluate with the whole model in bfloat16.")
    fp16_full_eval: bool = option(False, "Evaluate with the whole model in float16.")
    tf32: bool | None = option(None, "Let float32 matmuls run as TF32, where the GPU can.")

    gradient_checkpointing: bool = option(False, "Compute activations again to save memory.")
    gradient_checkpointing_kwargs: Settings = option(
        None, "Options of gradient checkpointing, as a dict or JSON."
    )

    torch_compile: bool = option(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = option(None, "The compiler; setting it compiles.")
    torch_compile_mode: str | None = option(None, "The compiler's mode; setting it compiles.")

    use_liger_kernel: bool = option(False, "Use Liger's kernels.")
    liger_kernel_config: Settings = option(None, "Which of Liger's kernels to use.")

    use_cache: bool = option(False, "Let the model keep key-value caches while training.")
    neftune_noise_alpha: float | None = option(None, "Noise added to embeddings (NEFTune).")
    torch_empty_cache_steps: int | None = option(None, "Steps between two cache releases.")
    auto_find_batch_size: bool = option(
        False, "Split a batch that does not fit memory; the effective batch stays."
    )

    logging_strategy: IntervalStrategy | str = option("steps", "When to log.")
    logging_steps: float = option(500, "Steps between two logs; below 1, a share of all steps.")
    logging_first_step: bool = option(False, "Log the first step too.")
    log_on_each_node: bool = option(True, "Log on each machine's main process.")
    logging_nan_inf_filter: bool = option(False, "Leave non-finite losses out of the logged mean.")
    include_num_input_tokens_seen: TokenCount = option(
        "no", "Count the tokens seen: all, non_padding or no.", nargs="?", const="all"
    )

    log_level: str = option("passive", "Log level of the main process.", choices=list(LOG_LEVELS))
    log_level_replica: str = option(
        "warning", "Log level of the other processes.", choices=list(LOG_LEVELS)
    )
    disable_tqdm: bool | None = flag("Show no progress bar.")

    report_to: list[str] | str = option("none", "Trackers to log with: names, all or none.")
    run_name: str | None = option(None, "The run's name in the trackers.")
    project: str = option("huggingface", "The project's name in the trackers.")
    trackio_space_id: str | None = option(None, "The Space that Trackio logs to.")
    trackio_bucket_id: str | None = option(None, "The bucket of that Space.")
    trackio_static_space_id: PathOrFlag = option(None, "A read-only Space for Trackio.")

    eval_strategy: IntervalStrategy | str = option("no", "When to evaluate.")
    eval_steps: float | None = option(None, "Steps between two evaluations; unset: logging_steps.")
    eval_delay: float = option(0, "Epochs or steps before the first evaluation.")
    per_device_eval_batch_size: int = option(8, "Samples a device sees at once in evaluation.")
    prediction_loss_only: bool = option(False, "Compute the loss and keep no predictions.")
    eval_on_start: bool = option(False, "Evaluate before the first step.")
    eval_do_concat_batches: bool = option(True, "Join the batches of predictions.")
    eval_use_gather_object: bool = option(False, "Gather predictions that are not tensors.")
    eval_accumulation_steps: int | None = option(
        None, "Batches of predictions kept on the device before they go to memory."
    )

    include_for_metrics: list[str] = listed("What compute_metrics gets besides: inputs, loss.")
    batch_eval_metrics: bool = option(False, "Call compute_metrics batch by batch.")

    save_only_model: bool = option(False, "Save no optimizer: such a save cannot be resumed.")
    save_strategy: SaveStrategy | str = option("steps", "When to save.")
    save_steps: float = option(500, "Steps between two saves; below 1, a share of all steps.")
    save_on_each_node: bool = option(False, "Save on every machine, not on the first alone.")
    save_total_limit: int | None = option(None, "Checkpoints to keep; the best one always stays.")
    enable_jit_checkpoint: bool = option(False, "Save when the job is told to end.")

    push_to_hub: bool = option(False, "Push the model to the hub when it is saved.")
    hub_token: str | None = field(
        default=None, repr=False, metadata={"help": "The hub's token; unset: the one logged in."}
    )
    hub_private_repo: bool | None = flag("Make the repository private.")
    hub_model_id: str | None = option(None, "The repository; unset: output_dir's name.")
    hub_strategy: HubStrategy | str = option("every_save", "What is pushed, and when.")
    hub_always_push: bool = option(False, "Push even while the push before is under way.")
    hub_revision: str | None = option(None, "The branch that is pushed to.")

    load_best_model_at_end: bool = option(False, "End with the best checkpoint's weights.")
    metric_for_best_model: str | None = option(None, "What decides which checkpoint is best.")
    greater_is_better: bool | None = flag("Whether more of that metric is better.")

    ignore_data_skip: bool = option(False, "Resume at the start of the data.")
    restore_callback_states_from_checkpoint: bool = option(
        False, "Make callbacks anew, with the arguments and the state that the checkpoint holds."
    )

    full_determinism: bool = option(False, "Use deterministic kernels only; slower.")
    seed: int = option(42, "The seed of everything random.")
    data_seed: int | None = option(None, "The seed of the data's order; unset: seed.")

    use_cpu: bool = option(False, "Train on the CPU, whatever else is there.")

    accelerator_config: Config = option(
        None, "How loaders share out batches: a dict, JSON or a file."
    )
    parallelism_config: Settings = option(None, "A mesh of several kinds of parallelism.")

    dataloader_drop_last: bool = option(False, "Drop the last batch where it is not full.")
    dataloader_num_workers: int = option(0, "Processes that load data; 0 loads in this one.")
    dataloader_pin_memory: bool = option(True, "Pin batches in memory for faster copies.")
    dataloader_persistent_workers: bool = option(False, "Keep workers from epoch to epoch.")
    dataloader_prefetch_factor: int | None = option(None, "Batches that a worker loads ahead.")
    dataloader_multiprocessing_context: str | None = option(
        None, "How workers are started.", choices=list(START_METHODS)
    )
    dataloader_in_order: bool = option(True, "Keep the order of the workers' batches.")
    remove_unused_columns: bool = option(True, "Drop columns that the model does not take.")
    label_names: list[str] | None = option(None, "The inputs that are labels.")
    train_sampling_strategy: str = option(
        "random", "The order of the training data.", choices=list(SAMPLING)
    )
    length_column_name: str = option("length", "The column that holds lengths.")

    ddp_find_unused_parameters: bool | None = flag("Let parameters go unused in a step.")
    ddp_bucket_cap_mb: int | None = option(None, "Megabytes of gradients that travel together.")
    ddp_broadcast_buffers: bool | None = flag("Send the first rank's buffers to the others.")
    ddp_static_graph: bool | None = flag("Promise that every step uses the same parameters.")
    ddp_backend: str | None = option(
        None, "The transport between processes.", choices=list(TRANSPORTS)
    )
    ddp_timeout: int = option(1800, "Seconds that a process waits for the others.")

    fsdp: PathOrFlag = option(None, "Shard the model over processes.", nargs="?", const=True)
    fsdp_config: Settings = option(None, "Options of FSDP.")
    deepspeed: Settings = option(None, "Options of DeepSpeed.")

    debug: str | list[DebugOption] = option("", "What to watch: underflow_overflow.")
    skip_memory_metrics: bool = option(True, "Leave memory use out of the metrics.")

    do_train: bool = option(False, "Train: read by scripts.")
    do_eval: bool = option(False, "Evaluate: read by scripts.")
    do_predict: bool = option(False, "Predict: read by scripts.")
    resume_from_checkpoint: PathOrFlag = option(
        None, "The checkpoint to go on from: a folder, true or auto.", nargs="?", const=True
    )
    local_rank: int = option(-1, "This process's place on its machine; the launcher tells.")

    # anytrain's own
    precision: str | None = option(
        None, "no, bf16, fp16, or auto for what the device has.", choices=list(PRECISIONS)
    )
    on_nonfinite: str = option(
        "stop",
        "What to do about a loss or gradient that is not finite.",
        choices=list(ON_NONFINITE),
    )
    step_engine: str = option(
        "auto", "How steps run: recorded where that can be, or op by op.", choices=list(STEPS)
    )
    length_buckets: LengthBuckets = option(
        None, "Pad to a few lengths: auto, how many, or the lengths themselves (64,128,256)."
    )
    trim_padding: bool = option(
        True, "Cut columns that every row of a batch masks, where the model does not read them."
    )
    activation_checkpointing: str = option(
        "off", "fit: keep fewer activations where the memory is full.", choices=list(ACTIVATIONS)
    )
    packing: bool = option(
        False, "Put a batch's rows into one, without padding: for causal language models."
    )
    async_save: bool = option(
        True, "Write checkpoints behind the loop; False: commit each before the next step."
    )
    earlier_total_limit: int | None = option(
        None, "Folders earlier-N to keep, the newest first; unset keeps all."
    )
    save_on_signal: bool = option(True, "Save and end between two steps when told to stop.")


def packs(args: Fields) -> bool:
    """Whether batches are packed; not where a subclass means something of its own by that name."""
    own = Fields.__dataclass_fields__["packing"]
    return args.packing and type(args).__dataclass_fields__["packing"] is own
