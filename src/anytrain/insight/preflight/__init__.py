"""Know before a run what will fail in it, on a machine that is not here.

`run` has the run traced for each target: in a process of its own (`trace_process`), the user's
`script` on a `fake_device`, in a `sandbox`, with `loaders` that end early. The `recorder` notes
operations with their `source_lines` and `op_costs`, and memory in a `memory_log`; a `trace` is
what it leaves. Of a trace, `checks/` (one question a file) yield `findings`; `memory` with its
`allocator`, `step_time` and `batch_search` forecast; `tpu/` compiles the step. The `report` holds
all of it, and `rendering` shows it.
"""
