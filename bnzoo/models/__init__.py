"""The networks of Ioffe & Szegedy 2015 and He et al. 2015."""

from .auxiliary import auxiliary_loss_weights, without_auxiliary
from .counting import multiply_adds, receptive_field
from .ensemble import Ensemble
from .features import INCEPTION_ENDPOINTS, feature_extractor
from .forms import FORMS, Form
from .imagenet import decode_predictions, preprocess_input
from .inception import bn_inception, inception
from .mlp import mnist_mlp
from .transfer import TransferReport, transfer_weights

__all__ = [
    "FORMS",
    "INCEPTION_ENDPOINTS",
    "Ensemble",
    "Form",
    "TransferReport",
    "auxiliary_loss_weights",
    "bn_inception",
    "decode_predictions",
    "feature_extractor",
    "inception",
    "mnist_mlp",
    "multiply_adds",
    "preprocess_input",
    "receptive_field",
    "transfer_weights",
    "without_auxiliary",
]
