"""What tells: proofs about a run, made from the outside."""
