"""What a user's code does besides computing, and what it reads that may change."""
