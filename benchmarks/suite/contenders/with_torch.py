"""PyTorch, eager, compiled and with autocast, in a plain loop with the fused optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from workloads import Array, Job

from contenders.contender import Contender, Refused, first_losses, over

BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")  # as torch.cpu names the instructions


class Eager(Contender):
    def load(self) -> None:
        import torch

        self.torch = torch

    def build(self, job: Job) -> None:
        torch = self.torch
        torch.set_num_threads(job.threads)
        self.job = job
        self.module = torch_module(job)
        self.loss = loss_of(job)
        self.optimizer = fused_optimizer(job, self.module)
        self.data = tuple(map(torch.from_numpy, job.workload.data()))
        self.forward: Callable[[Any, Any], Any] = self._forward

    def _forward(self, x: Any, y: Any) -> Any:
        output = self.module(x)
        return self.loss(output, y), output

    def _step(self, x: Any, y: Any) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        loss, self.output = self.forward(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _batches(self) -> list[Any]:
        return [tuple(map(self.torch.from_numpy, batch)) for batch in self.job.workload.split()]

    def losses(self) -> list[float]:
        return first_losses(self._step, self._batches())

    def step(self) -> Callable[[], object]:
        return over(self._step, self._batches())

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        """The fastest loop that PyTorch allows: rows are gathered by index, not collected one by
        one as its DataLoader does.
        """
        torch, (x, y), work = self.torch, self.data, self.job.workload
        history = []
        for _ in range(epochs):
            total, right = 0.0, 0
            for rows in torch.randperm(len(x)).split(work.batch_size):
                inputs, labels = x[rows], y[rows]
                total += self._step(inputs, labels).item() * len(rows)
                if work.classifies:
                    right += (self.output.detach().argmax(-1) == labels).sum().item()
                on_batch()
            history.append((total / len(x), right / y.numel()))


class Autocast(Eager):
    """Products in bfloat16 where PyTorch's autocast chooses so; weights and loss are float32."""

    def load(self) -> None:
        super().load()
        abilities = self.torch.cpu.get_capabilities()
        if not any(abilities.get(name) for name in BFLOAT16):
            raise Refused("the processor has no instructions for bfloat16")

    def _forward(self, x: Any, y: Any) -> Any:
        with self.torch.autocast("cpu", self.torch.bfloat16):
            output = self.module(x)
        output = output.float()
        return self.loss(output, y), output


class Compiled(Eager):
    """Forward pass, loss, gradients and update in one compiled graph, which takes a C++ compiler.

    `Optimizer.step` breaks a graph in two, so the update is that of `torch.optim.sgd` and
    `torch.optim.adam` as functions. A network that PyTorch cannot trace as one graph has only its
    forward and backward passes compiled.
    """

    def build(self, job: Job) -> None:
        super().build(job)
        warnings.simplefilter("ignore")
        dynamo = self.torch._dynamo
        dynamo.reset()
        dynamo.config.trace_autograd_ops = True  # it is off by default, and breaks the graph then
        self.weights = list(self.module.parameters())
        self.update = functional_update(job, self.weights)
        self.compiled = self.torch.compile(self._whole, fullgraph=True)
        self.remark = ""

    def _whole(self, x: Any, y: Any) -> Any:
        loss, output = self._forward(x, y)
        gradients = self.torch.autograd.grad(loss, self.weights)
        with self.torch.no_grad():
            self.update(gradients)
        return loss.detach(), output.detach()

    def _step(self, x: Any, y: Any) -> Any:
        if self.compiled is None:
            return super()._step(x, y)
        try:
            loss, self.output = self.compiled(x, y)
        except self.torch._dynamo.exc.Unsupported:  # by the first step, which has changed nothing
            self.compiled = None
            self.forward = self.torch.compile(self._forward)
            self.remark = "update not compiled: the step cannot be traced as one graph"
            return super()._step(x, y)
        return loss


def torch_module(job: Job) -> Any:
    """The network with the job's weights."""
    import networks
    import torch

    module = networks.network(job.workload.network)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in job.weights().items()})
    return module


def loss_of(job: Job) -> Callable[[Any, Any], Any]:
    from torch.nn import functional

    if not job.workload.classifies:
        return functional.mse_loss
    classes = job.workload.outputs[-1]
    return lambda output, y: functional.cross_entropy(output.view(-1, classes), y.view(-1))


def fused_optimizer(job: Job, module: Any) -> Any:
    import torch

    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[job.optimizer]
    return kind(module.parameters(), lr=job.learning_rate, fused=True)


def functional_update(job: Job, weights: list[Any]) -> Callable[[Any], None]:
    """An update of the weights by their gradients, to be compiled.

    The variants for lists are taken: compiled by PyTorch 2.13, the one of SGD for single tensors
    gave other losses.
    """
    import torch

    def zeros() -> list[Any]:
        return [torch.zeros_like(weight) for weight in weights]

    if job.optimizer == "sgd":
        from torch.optim.sgd import sgd

        return lambda gradients: sgd(
            weights, list(gradients), [None] * len(weights), foreach=True, fused=False, weight_decay=0, momentum=0,
            lr=job.learning_rate, dampening=0, nesterov=False, maximize=False,
        )  # fmt: skip
    from torch.optim.adam import adam

    means, squares, steps = zeros(), zeros(), [torch.zeros(()) for _ in weights]
    return lambda gradients: adam(
        weights, list(gradients), means, squares, [], steps, foreach=True, fused=False, capturable=True, differentiable=False,
        amsgrad=False, beta1=0.9, beta2=0.999, lr=job.learning_rate, weight_decay=0, eps=1e-8, maximize=False,
    )  # fmt: skip


def rows_of(x: Array, y: Array) -> Any:
    """A data set that torch's DataLoader reads."""
    import torch

    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
