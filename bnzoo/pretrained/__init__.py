"""Published weights of BN-Inception, from TF-slim, PyTorch, MXNet and ONNX, in bnzoo's models."""

from .download import fetch
from .loading import SOURCES, Checkpoint, from_checkpoint, load_weights, read_checkpoint

__all__ = ["SOURCES", "Checkpoint", "fetch", "from_checkpoint", "load_weights", "read_checkpoint"]
