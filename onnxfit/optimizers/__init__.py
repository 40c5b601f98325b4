r"""Optimizers: the next value of a weight and its slots, computed from the gradient.

In the formulas $w$ is a weight, $g$ its gradient, $\eta$ the learning rate, $t$ the number of the
update counted from 1; a slot before the update has the index $t-1$. Slots have the shape of their
weight and start at 0 unless stated otherwise. Settings have the names and defaults of torch.optim
(`betas`, `eps`, `alpha`, ...), except that the learning rate is called `learning_rate`, SGD's
default is 0.01, and `weight_decay` is always decoupled. For the same gradients, the weights equal
torch.optim's.

To add an optimizer, add the class to the module of its family, and its name to that module's
`__all__`. The package exports every name in the `__all__` of its modules; `make docs` then writes
the lines for type checkers below, and the entry in docs/reference.md.
"""

from typing import TYPE_CHECKING

from onnxfit.registry import exported_members

if TYPE_CHECKING:
    # Type checkers do not run the search below, so `make docs` writes these imports.
    # begin of generated imports
    from onnxfit.optimizers.adam import AdaBelief as AdaBelief
    from onnxfit.optimizers.adam import Adam as Adam
    from onnxfit.optimizers.adam import Adamax as Adamax
    from onnxfit.optimizers.adam import AdamW as AdamW
    from onnxfit.optimizers.adam import Adan as Adan
    from onnxfit.optimizers.adam import Adopt as Adopt
    from onnxfit.optimizers.adam import NAdam as NAdam
    from onnxfit.optimizers.adam import RAdam as RAdam
    from onnxfit.optimizers.adam import ScheduleFreeAdamW as ScheduleFreeAdamW
    from onnxfit.optimizers.adaptive import Adadelta as Adadelta
    from onnxfit.optimizers.adaptive import Adafactor as Adafactor
    from onnxfit.optimizers.adaptive import Adagrad as Adagrad
    from onnxfit.optimizers.adaptive import RMSprop as RMSprop
    from onnxfit.optimizers.base import Optimizer as Optimizer
    from onnxfit.optimizers.constraints import Constraint as Constraint
    from onnxfit.optimizers.constraints import MaxNorm as MaxNorm
    from onnxfit.optimizers.constraints import MinMaxNorm as MinMaxNorm
    from onnxfit.optimizers.constraints import NonNeg as NonNeg
    from onnxfit.optimizers.constraints import UnitNorm as UnitNorm
    from onnxfit.optimizers.constraints import get_constraint as get_constraint
    from onnxfit.optimizers.groups import Groups as Groups
    from onnxfit.optimizers.layerwise import Lamb as Lamb
    from onnxfit.optimizers.layerwise import Lars as Lars
    from onnxfit.optimizers.layerwise import NovoGrad as NovoGrad
    from onnxfit.optimizers.lookahead import Lookahead as Lookahead
    from onnxfit.optimizers.lookup import get_optimizer as get_optimizer
    from onnxfit.optimizers.matrices import Muon as Muon
    from onnxfit.optimizers.momentum import SGD as SGD
    from onnxfit.optimizers.momentum import Lion as Lion
    from onnxfit.optimizers.momentum import Rprop as Rprop
    # end of generated imports

_members = exported_members(__name__)
globals().update(_members)
__all__ = sorted(_members)
