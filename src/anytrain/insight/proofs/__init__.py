"""Proofs: run something twice, compare to the last bit, and name the first thing that differs."""
