"""The verbs of the command, one module each with a function run(arguments) -> exit status."""
