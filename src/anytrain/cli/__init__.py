"""The `anytrain` command, one file per subcommand."""
