"""Prove a device's numbers (`parity`) and a script's resume (`verify_resume`) by running them."""
