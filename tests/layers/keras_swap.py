"""A pytest plugin: Keras' own tests find the layers of bnzoo where Keras' are.

The tests reach the classes through these two modules, so a private name has to be set.
"""

from keras.src import layers
from keras.src.layers.activations import prelu

import bnzoo

layers.BatchNormalization = bnzoo.layers.BatchNormalization
prelu.PReLU = bnzoo.layers.PReLU
