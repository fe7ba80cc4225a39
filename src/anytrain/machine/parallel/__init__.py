"""Processes that train together. The only floor that talks to torch.distributed."""
