"""Measurements of this machine, one module each with a function run(arguments) -> exit status."""
