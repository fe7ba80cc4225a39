"""Parts of a recorded step in fewer launches than torch needs, for bfloat16 training."""
