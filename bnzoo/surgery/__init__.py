"""Takes a Keras model and gives a new one; never changes the one given."""

from .convert import convert_batch_norm

__all__ = ["convert_batch_norm"]
