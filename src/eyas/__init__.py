"""eyas: lossless speculative decoding with EAGLE draft heads."""

from eyas.by_value import Adaptive, Dynamic
from eyas.errors import InputError
from eyas.model import Model, Output, load
from eyas.policies import Chain, Sampled, Static
from eyas.policy import Policy
from eyas.sampling import Sampling

__all__ = [
    "Adaptive",
    "Chain",
    "Dynamic",
    "InputError",
    "Model",
    "Output",
    "Policy",
    "Sampled",
    "Sampling",
    "Static",
    "load",
]
