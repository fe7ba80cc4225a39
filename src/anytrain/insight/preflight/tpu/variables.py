"""What the processes in the other environment must find set before anything is loaded."""

GRAPH = {
    "PJRT_DEVICE": "CPU",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
CHIP = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is taken, so nobody need wait for it
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a cloud's metadata server, for minutes
    "JAX_PLATFORMS": "cpu",
    "TPU_MIN_LOG_LEVEL": "3",
}
