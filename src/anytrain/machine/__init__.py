"""What it runs on: devices, processes, and the ties between them."""
