"""One module a command: `HELP`, `add_flags(parser)` and `run(arguments)`, which returns the exit code."""
