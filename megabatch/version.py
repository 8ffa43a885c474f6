"""The version of megabatch, told once."""

__version__ = "0.1.0"
