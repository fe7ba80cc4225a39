"""Plain values every floor shares. Nothing here imports torch."""
