"""Other libraries' module names over our doors: re-exports and refusals."""
