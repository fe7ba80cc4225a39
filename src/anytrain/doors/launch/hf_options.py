"""Options of `accelerate launch` that a launch here has no use for, or cannot serve."""

from __future__ import annotations

from collections.abc import Mapping

from anytrain.core.errors import Unsupported

_FLAGS = {
    *("same_network", "enable_cpu_affinity", "quiet", "q", "use_mps_device", "use_xpu", "ipex"),
    *("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"),
    "no_tpu_cluster",
}
"""What a run does without, with no value."""
_VALUES = {
    *("rdzv_backend", "rdzv_conf", "tee", "t", "log_dir", "role", "monitor_interval"),
    *("main_training_function", "dynamo_mode"),
}
"""What a run does without, with a value."""
_REFUSED = {
    "use_deepspeed": "DeepSpeed",
    "deepspeed_": "DeepSpeed",
    "zero_stage": "DeepSpeed",
    "zero3_": "DeepSpeed",
    "offload_": "DeepSpeed",
    "gradient_clipping": "DeepSpeed",
    "use_fsdp": "FSDP",
    "fsdp_": "FSDP",
    "use_megatron_lm": "Megatron-LM",
    "megatron_lm_": "Megatron-LM",
    "fp8_": "fp8 training",
    "use_parallelism_config": "several kinds of parallelism at once",
    "parallelism_config_": "several kinds of parallelism at once",
    "mpirun_": "starting through mpirun",
    "tpu_cluster": "starting a TPU pod over ssh",
    "tpu_use_sudo": "starting a TPU pod over ssh",
    "vm": "starting a TPU pod over ssh",
    "env": "starting a TPU pod over ssh",
    "aws_": "starting on SageMaker",
    "no_python": "starting programs that are not Python scripts",
}
"""What cannot be served, by how its name begins."""


def sift(words: list[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return a command line without the options that a run here does without, and their names.

    `own` says of each of our options whether a value follows it. The first word that is no option
    is the script, and everything after it the script's.

    >>> sift(["--same_network", "--cpu", "--tee=3", "train.py", "--role", "x"], {"cpu": False})
    (['--cpu', 'train.py', '--role', 'x'], ['same_network', 'tee'])
    """
    kept: list[str] = []
    unused: list[str] = []
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "--":
        word = left.pop(0)
        spelt, is_joined, _ = word.partition("=")
        name = spelt.lstrip("-").replace("-", "_")
        takes = own.get(name, name in _VALUES) and not is_joined
        value = [left.pop(0)] if takes and left else []
        if name in own:
            kept += [word, *value]
        elif name in _FLAGS or name in _VALUES:
            unused.append(name)
        else:
            _refuse(spelt, name)
            kept.append(word)  # whoever reads it next says that there is no such option
    return kept + left, unused


def _refuse(spelt: str, name: str) -> None:
    for begin, what in _REFUSED.items():
        if name == begin or (begin.endswith("_") and name.startswith(begin)):
            raise Unsupported(
                f"Cannot launch with {spelt}.",
                why=f"anytrain does not do {what}.",
                fix=f"leave {spelt} out, or start the job with the tool it was made for.",
            )
