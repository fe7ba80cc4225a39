"""Which operations Apple's backend has a kernel for, per version of torch.

`kernels.of("2.13.0")` answers; the JSON files are written by `tools/mps_ops.py`.
"""
