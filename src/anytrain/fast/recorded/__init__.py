"""Steps that are recorded once and replayed: when, what of, and for how long that holds."""
