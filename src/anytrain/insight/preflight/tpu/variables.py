"""What the processes in the other environment must find set before anything is loaded."""

GRAPH = {
    "PJRT_DEVICE": "CPU",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
CHIP = {
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a cloud's metadata server, for minutes
    "JAX_PLATFORMS": "cpu",
    "TPU_MIN_LOG_LEVEL": "3",
}
