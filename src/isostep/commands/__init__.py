"""One module per `isostep` command. Each has `configure(parser)` and `run(args) -> exit code`.

Importing a command module must be fast: torch and other heavy imports belong inside `run`.
"""
