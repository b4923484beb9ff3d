"""Takes a Keras model and gives a new one; never changes the one given."""

from .convert import convert_batch_norm
from .fold import fold_batch_norm
from .report import BatchNormFate, FoldReport, Size

__all__ = ["BatchNormFate", "FoldReport", "Size", "convert_batch_norm", "fold_batch_norm"]
