r"""Optimizers: the next value of a weight and its slots, computed from the gradient.

In the formulas $w$ is a weight, $g$ its gradient, $\eta$ the learning rate, $t$ the number of the
update counted from 1; a slot before the update has the index $t-1$. Slots have the shape of their
weight and start at 0 unless stated otherwise. Settings have the names and defaults of torch.optim
(`betas`, `eps`, `alpha`, ...), except that the learning rate is called `learning_rate`, SGD's
default is 0.01, and `weight_decay` is always decoupled. For the same gradients, the weights equal
torch.optim's.

To add an optimizer, add the class to the module of its family, and its name to that module's
`__all__`. The package exports every name in the `__all__` of its modules; for type checkers, each
module has a line below. `make docs` then writes the entry in docs/reference.md.
"""

from onnxfit.optimizers.adam import *
from onnxfit.optimizers.adaptive import *
from onnxfit.optimizers.base import *
from onnxfit.optimizers.constraints import *
from onnxfit.optimizers.groups import *
from onnxfit.optimizers.layerwise import *
from onnxfit.optimizers.lookahead import *
from onnxfit.optimizers.lookup import *
from onnxfit.optimizers.matrices import *
from onnxfit.optimizers.momentum import *
from onnxfit.registry import exported_members

_members = exported_members(__name__)
globals().update(_members)
__all__ = sorted(_members)
