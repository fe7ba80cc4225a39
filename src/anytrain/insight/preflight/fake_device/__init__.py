"""A device that is not here, claimed by tensors that hold no data.

Underneath, every tensor of the fake device is a tensor of torch's `meta` device: C++ sees a
device that each build of torch has, with autograd, in-place updates and shapes for all of its
operations. Python is told another device (`function_mode`), and what depends on values is
answered (`dispatch_mode`). What a tensor claims is noted on its storage, so that views and what
autograd saved claim the same.

Weights that a script makes on the CPU are claimed too, as CPU tensors: none is ever allocated.
Data are real as long as they are on the CPU.

Private names of torch, held to torch 2.9 and 2.13 by the tests:
`_C.DisableTorchFunction`: our own look at a tensor must not ask us.
`utils._python_dispatch.TorchDispatchMode`, `_meta_registrations`: see and shape every operation.
`_C._current_autograd_node`, `autograd._get_sequence_nr`, `Node._sequence_nr`: whose backward runs.
`utils._device._device_constructors`: which functions a default device is for.
`utils._foreach_utils._group_tensors_by_device_and_dtype`: it groups in C++, by the other device.
`utils.checkpoint._allowed_determinism_checks_to_fns`: a check that is called from C++.
`OpOverload._schema`, `._overloadpacket`, `Library._destroy`: arguments' names, FLOPs, the end.
"""
