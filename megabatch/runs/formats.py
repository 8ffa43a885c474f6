"""The formats that a run's net leaves in: their files' names, and which nets they are for. Needs no
torch."""

from __future__ import annotations

from importlib.util import find_spec

from megabatch.config import Config
from megabatch.errors import UserError

SUFFIXES = {"safetensors": (".safetensors",), "torchvision": (".pth", ".pt"), "onnx": (".onnx",)}


def check_format(to: str, config: Config) -> None:
    """Refuse a format that the net of a run cannot have, or not here."""
    grey = config.data.channels != 3
    if to == "torchvision" and (grey or not config.model.startswith("resnet")):
        raise UserError(
            f"torchvision has no net like {config.model} for {config.data.channels} "
            f"channel{'s' if config.data.channels > 1 else ''}: its ResNets are ours, for colour; "
            f"take --to safetensors or --to onnx"
        )
    # torch's exporter needs the second.
    if to == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UserError("ONNX files need onnx: pip install 'megabatch[export]'")
