"""Processes: their signs of life, their deaths, and how to start and end them. No torch here."""
