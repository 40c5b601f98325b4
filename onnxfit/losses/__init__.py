r"""Losses: the cost of a prediction, for each sample or element. The base class `Loss` applies the
mean, weights and masks.

In the formulas $y$ is the label, $\hat y$ the model's output, $d = y - \hat y$. Every loss and its
gradient are finite for outputs and labels of moderate size ($10^4$ and far beyond), at kinks and at
the ends of ranges; the class documents any bound that this needs.

Several losses have a setting `from_logits`. True reads the output as logits (raw scores, any
number), False as probabilities. None, the default, lets the graph decide: a Softmax or Sigmoid at
its end, also before operators that only move or scale numbers, means probabilities; an Add, Gemm,
MatMul, Conv or LogSoftmax means logits. The activation may be spelled in other operators, such as
Exp, ReduceSum and Div, or 1 / (1 + Exp). A HardSigmoid, or a Clip to numbers from 0 to 1, means
probabilities, too. For any other graph, CrossEntropy, CTC and Focal expect logits;
BinaryCrossEntropy, KLDivergence, Dice and Tversky expect probabilities, as in Keras.
`Trainer.summary()` shows the decision, and the nodes. A setting that contradicts the graph is
followed, with a UserWarning. Where the graph does not show what the output is, `fit` and `evaluate`
compare the numbers of the first batch with the setting, and warn once: of scores that are all from
0 to 1 and sum to 1 in each row of classes, and of probabilities outside of 0 to 1.

If the graph shows the Sigmoid or Softmax that computes probabilities, the loss computes from its
input, as in Keras. So a probability that is rounded to 0 or 1 has the same loss and gradient as its
logits. Operators that move, join or cast probabilities may follow. A Clip may follow, too: the
model then has no gradient beyond the bounds of the Clip. Without such an activation, a probability
is raised to 1e-30, and has no gradient there.

To add a loss, add the class to the module of its family, and its name to that module's `__all__`.
The package exports every name in the `__all__` of its modules; for type checkers, each module has a
line below. `make docs` then writes the entry in docs/reference.md.
"""

from onnxfit.losses.base import *
from onnxfit.losses.binary import *
from onnxfit.losses.boxes import *
from onnxfit.losses.classification import *
from onnxfit.losses.contrastive import *
from onnxfit.losses.distributions import *
from onnxfit.losses.divergences import *
from onnxfit.losses.embeddings import *
from onnxfit.losses.functions import *
from onnxfit.losses.hinges import *
from onnxfit.losses.lookup import *
from onnxfit.losses.margins import *
from onnxfit.losses.pairs import *
from onnxfit.losses.preferences import *
from onnxfit.losses.ranking import *
from onnxfit.losses.regression import *
from onnxfit.losses.segmentation import *
from onnxfit.losses.sequences import *
from onnxfit.losses.uncertainty import *
from onnxfit.registry import exported_members

_members = exported_members(__name__)
globals().update(_members)
__all__ = sorted(_members)
