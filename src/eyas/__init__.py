"""eyas: lossless speculative decoding with EAGLE draft heads."""

from eyas.errors import InputError
from eyas.model import Model, Output, load
from eyas.policies import Chain, Dynamic, Policy, Sampled, Static
from eyas.sampling import Sampling

__all__ = ["Chain", "Dynamic", "InputError", "Model", "Output", "Policy", "Sampled", "Sampling", "Static", "load"]
