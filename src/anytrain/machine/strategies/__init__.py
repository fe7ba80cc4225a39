"""Ways to share a model among ranks, one file each. `table.py` lists them, the plan chooses."""
