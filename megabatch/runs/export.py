"""Leaving with the model: a run's net as safetensors, as torchvision's weights, or as ONNX.

Each is checked before it is written: the file's own bytes are read back and must give the outputs
that the net gives.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from megabatch import models
from megabatch.errors import RunFailed
from megabatch.keyed import Purpose, keyed
from megabatch.runs.formats import check_format
from megabatch.runs.trained import Trained

_CHECKED_IMAGES = 8
_TOLERANCE = 1e-3
"""of the largest output: runtimes sum in other orders"""


@dataclass(frozen=True)
class Exported:
    data: bytes
    difference: float | None
    """largest between the file's outputs and the net's, of the largest output; None: not checked"""


def export(trained: Trained, to: str) -> Exported:
    """The net's bytes in a format, and how far its outputs are from the net's."""
    made: dict[str, Callable[[Trained], Exported]] = {
        "safetensors": _safetensors,
        "torchvision": _torchvision,
        "onnx": _onnx,
    }
    check_format(to, trained.config)
    exported = made[to](trained)
    if exported.difference is not None and not exported.difference <= _TOLERANCE:
        raise RunFailed(
            f"the {to} file would not give the run's outputs (they differ by "
            f"{exported.difference:.2g} of the largest): nothing was written"
        )
    return exported


def described(trained: Trained) -> dict[str, str]:
    """What a file says of itself beside its weights."""
    data = trained.config.data
    return {
        "format": "pt",
        "model": trained.config.model,
        "classes": json.dumps(trained.classes),
        "size": str(data.size),
        "channels": str(data.channels),
        "mean": json.dumps(trained.mean),
        "std": json.dumps(trained.std),
        "averaged": json.dumps(trained.averaged),
    }


def _safetensors(trained: Trained) -> Exported:
    data = save_safetensors(_weights(trained.net), metadata=described(trained))
    return Exported(data, _reloaded(trained, load_safetensors(data)))


def _torchvision(trained: Trained) -> Exported:
    """A state dict that torchvision.models.NAME(num_classes=N) loads; its ResNets have our names,
    shapes and arithmetic."""
    out = io.BytesIO()
    torch.save(_weights(trained.net), out)
    out.seek(0)
    return Exported(out.getvalue(), _reloaded(trained, torch.load(out, weights_only=True)))


def _onnx(trained: Trained) -> Exported:
    """Images as numbers of 0 to 1 in, logits out; mean and deviation are inside."""
    import onnx

    with_scale = _WithScale(trained).eval()
    data = trained.config.data
    example = torch.rand(2, data.channels, data.size, data.size)
    with tempfile.TemporaryDirectory() as folder, _quietly():
        path = Path(folder) / "net.onnx"
        torch.onnx.export(
            with_scale,
            (example,),
            str(path),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes={"images": {0: torch.export.Dim("n", min=1)}},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        model = onnx.load(path)
    onnx.helper.set_model_props(model, described(trained))
    onnx.checker.check_model(model)
    made: bytes = model.SerializeToString()
    return Exported(made, _onnx_difference(trained, made))


class _WithScale(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.net = trained.net
        for name, values in (("mean", trained.mean), ("std", trained.std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net((images - self.mean) / self.std)
        return logits


def _onnx_difference(trained: Trained, made: bytes) -> float | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(made, providers=["CPUExecutionProvider"])
    images = _images(trained)
    (found,) = session.run(None, {"images": (images.float() / 255).numpy()})
    return _difference(trained.logits(images), torch.from_numpy(found))


def _reloaded(trained: Trained, weights: dict[str, Tensor]) -> float:
    """How far a fresh net with these weights is from the run's."""
    config = trained.config
    fresh = models.build(config.model, len(trained.classes), config.data.channels, config.data.size)
    fresh.load_state_dict(weights)
    images = _images(trained)
    ours = trained.logits(images)
    theirs = Trained(**{**vars(trained), "net": fresh.eval()}).logits(images)
    return _difference(ours, theirs)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-12))


def _images(trained: Trained) -> Tensor:
    """Noise, but never twice the same image: every weight matters to it."""
    data = trained.config.data
    shape = (_CHECKED_IMAGES, data.channels, data.size, data.size)
    drawn = keyed(0, Purpose.SYNTHETIC, 2, torch.arange(torch.Size(shape).numel()))
    return (torch.as_tensor(drawn) % 256).to(torch.uint8).view(shape)


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous().clone() for name, tensor in net.state_dict().items()}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporter speaks to standard output, and warns of what is not the user's to change."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
