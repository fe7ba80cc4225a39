"""Pages that need nothing else: one HTML file with its style, its charts and no network."""
