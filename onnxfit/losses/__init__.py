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
The package exports every name in the `__all__` of its modules; `make docs` then writes the lines
for type checkers below, and the entry in docs/reference.md.
"""

from typing import TYPE_CHECKING

from onnxfit.registry import exported_members

if TYPE_CHECKING:
    # Type checkers do not run the search below, so `make docs` writes these imports.
    # begin of generated imports
    from onnxfit.losses.base import Loss as Loss
    from onnxfit.losses.binary import Asymmetric as Asymmetric
    from onnxfit.losses.binary import BinaryCrossEntropy as BinaryCrossEntropy
    from onnxfit.losses.binary import BinaryCrossEntropyWithLogits as BinaryCrossEntropyWithLogits
    from onnxfit.losses.binary import Hinge as Hinge
    from onnxfit.losses.binary import HingeEmbedding as HingeEmbedding
    from onnxfit.losses.binary import SoftMargin as SoftMargin
    from onnxfit.losses.binary import SquaredHinge as SquaredHinge
    from onnxfit.losses.boxes import CIoU as CIoU
    from onnxfit.losses.boxes import DIoU as DIoU
    from onnxfit.losses.boxes import GIoU as GIoU
    from onnxfit.losses.boxes import IoU as IoU
    from onnxfit.losses.classification import NLL as NLL
    from onnxfit.losses.classification import ClassLoss as ClassLoss
    from onnxfit.losses.classification import CrossEntropy as CrossEntropy
    from onnxfit.losses.classification import Focal as Focal
    from onnxfit.losses.classification import GeneralizedCrossEntropy as GeneralizedCrossEntropy
    from onnxfit.losses.classification import PolyCrossEntropy as PolyCrossEntropy
    from onnxfit.losses.contrastive import Circle as Circle
    from onnxfit.losses.contrastive import NTXent as NTXent
    from onnxfit.losses.contrastive import SigLIP as SigLIP
    from onnxfit.losses.contrastive import SupCon as SupCon
    from onnxfit.losses.contrastive import TripletSemiHard as TripletSemiHard
    from onnxfit.losses.distributions import GaussianNLL as GaussianNLL
    from onnxfit.losses.distributions import MixtureNLL as MixtureNLL
    from onnxfit.losses.distributions import Poisson as Poisson
    from onnxfit.losses.divergences import DistillationKL as DistillationKL
    from onnxfit.losses.divergences import JensenShannon as JensenShannon
    from onnxfit.losses.divergences import KLDivergence as KLDivergence
    from onnxfit.losses.embeddings import CosineSimilarity as CosineSimilarity
    from onnxfit.losses.embeddings import InfoNCE as InfoNCE
    from onnxfit.losses.embeddings import TripletMargin as TripletMargin
    from onnxfit.losses.functions import Function as Function
    from onnxfit.losses.functions import Joint as Joint
    from onnxfit.losses.hinges import CategoricalHinge as CategoricalHinge
    from onnxfit.losses.hinges import MultiMargin as MultiMargin
    from onnxfit.losses.lookup import get_loss as get_loss
    from onnxfit.losses.margins import ArcFace as ArcFace
    from onnxfit.losses.margins import CosFace as CosFace
    from onnxfit.losses.pairs import Contrastive as Contrastive
    from onnxfit.losses.pairs import CosineEmbedding as CosineEmbedding
    from onnxfit.losses.pairs import MarginRanking as MarginRanking
    from onnxfit.losses.preferences import DPO as DPO
    from onnxfit.losses.preferences import ORPO as ORPO
    from onnxfit.losses.ranking import ListNet as ListNet
    from onnxfit.losses.regression import Elastic as Elastic
    from onnxfit.losses.regression import Huber as Huber
    from onnxfit.losses.regression import LogCosh as LogCosh
    from onnxfit.losses.regression import MeanAbsoluteError as MeanAbsoluteError
    from onnxfit.losses.regression import MeanAbsolutePercentageError as MeanAbsolutePercentageError
    from onnxfit.losses.regression import MeanSquaredError as MeanSquaredError
    from onnxfit.losses.regression import MeanSquaredLogarithmicError as MeanSquaredLogarithmicError
    from onnxfit.losses.regression import Quantile as Quantile
    from onnxfit.losses.regression import SmoothL1 as SmoothL1
    from onnxfit.losses.segmentation import Dice as Dice
    from onnxfit.losses.segmentation import Jaccard as Jaccard
    from onnxfit.losses.segmentation import LovaszHinge as LovaszHinge
    from onnxfit.losses.segmentation import LovaszSoftmax as LovaszSoftmax
    from onnxfit.losses.segmentation import Tversky as Tversky
    from onnxfit.losses.sequences import CTC as CTC
    from onnxfit.losses.sequences import CausalLM as CausalLM
    from onnxfit.losses.uncertainty import UncertaintyWeights as UncertaintyWeights
    # end of generated imports

_members = exported_members(__name__)
globals().update(_members)
__all__ = sorted(_members)
