"""The networks of Ioffe & Szegedy 2015 and He et al. 2015."""

from .auxiliary import auxiliary_loss_weights, without_auxiliary
from .counting import multiply_adds, receptive_field
from .dense_evaluation import dense_evaluation
from .ensemble import Ensemble
from .features import INCEPTION_ENDPOINTS, feature_extractor
from .forms import FORMS, Form
from .imagenet import decode_predictions, preprocess_input
from .inception import bn_inception, inception
from .mlp import mnist_mlp
from .prelu_net import prelu_net_14, prelu_net_30, prelu_net_a, prelu_net_b, prelu_net_c
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
    "dense_evaluation",
    "feature_extractor",
    "inception",
    "mnist_mlp",
    "multiply_adds",
    "prelu_net_14",
    "prelu_net_30",
    "prelu_net_a",
    "prelu_net_b",
    "prelu_net_c",
    "preprocess_input",
    "receptive_field",
    "transfer_weights",
    "without_auxiliary",
]
