"""The networks of Ioffe & Szegedy 2015 and He et al. 2015."""

from .inception import bn_inception, inception
from .mlp import mnist_mlp

__all__ = ["bn_inception", "inception", "mnist_mlp"]
