"""The small matrices of an adapter: their first values, and the merged weight."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from onnxfit.errors import ModelError, SettingError
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.trainable.adapters.layers import AdaptableWeight
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.adapters.peft import Matrices, checksum_of

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Adapter:
    """The two small matrices A and B that adapt a weight.

    - `weight`: the weight.
    - `settings`: rank, scale and dropout.
    - `initial_factors`: the first values of A and B, if their product was subtracted from the
      frozen weight (PiSSA); None if the weight is unchanged.
    """

    weight: AdaptableWeight
    settings: LoRA
    initial_factors: tuple[Array, Array] | None = field(default=None, compare=False)

    @property
    def a(self) -> str:
        """The name of A, of (inputs, rank); of a Conv (rank, channels, ...)."""
        return f"{self.weight.name}.lora_A"

    @property
    def b(self) -> str:
        """The name of B, of (rank, outputs); of a Conv (channels, rank, 1, ...)."""
        return f"{self.weight.name}.lora_B"

    @property
    def magnitude(self) -> str:
        """The name of the magnitude of DoRA, of (outputs,)."""
        return f"{self.weight.name}.lora_magnitude_vector"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the trained arrays."""
        return (self.a, self.b, self.magnitude) if self.settings.dora else (self.a, self.b)

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """The element type of A and B: float64 for a weight in float64, else float32."""
        is_double = self.weight.element_type == TensorProto.DOUBLE
        return np.dtype(np.float64 if is_double else np.float32)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B."""
        rank, shape = self.settings.rank, self.weight.shape
        if self.weight.kind == "conv":
            return (rank, *shape[1:]), (shape[0], rank, *[1] * (len(shape) - 2))
        inputs, outputs = self.weight.sides
        return (inputs, rank), (rank, outputs)

    @property
    def _loaded(self) -> Matrices | None:
        """The loaded matrices, stored under the weight's module or its name."""
        matrices = self.settings.matrices or {}
        return matrices.get(self.weight.module) or matrices.get(self.weight.name)

    @property
    def inputs(self) -> list[onnx.ValueInfoProto]:
        """A and B as inputs of a graph, of any rank."""
        shapes: list[list[int | str]] = [list(shape) for shape in self.shapes]
        is_conv = self.weight.kind == "conv"
        shapes[0][0 if is_conv else 1] = shapes[1][1 if is_conv else 0] = f"{self.a[:-2]}_rank"
        element_type = helper.np_dtype_to_tensor_dtype(self.dtype)
        return [
            helper.make_tensor_value_info(name, element_type, shape)
            for name, shape in zip((self.a, self.b), shapes)
        ]

    @property
    def unscaled(self) -> Adapter:
        """The adapter with s = 1, for matrices whose B includes the scale."""
        settings = replace(self.settings, alpha=self.settings.rank, scaling="alpha/r")
        return replace(self, settings=settings)

    def input_values(self, saved: Matrices) -> dict[str, Array]:
        """Return A and s B by name, as onnxruntime's adapter files store them.

        - `saved`: the result of the method `saved`. Its rank may differ from the settings'.
        """
        a, b = self._as_peft(saved.a, saved.b * self.dtype.type(saved.scale))
        return {self.a: a, self.b: b}

    def initialized(self, seed: int, weight: TensorProto) -> tuple[Adapter, dict[str, Array]]:
        """Return the adapter with its `initial_factors`, and its first trained arrays by name.

        - `seed`: the seed of the first values. Loaded matrices need none.
        - `weight`: the weight of the file.

        SettingError: loaded matrices have another shape, or `init="pissa"` would change integers.
        ModelError: the weight has no singular value decomposition.
        """
        loaded = self._loaded
        if loaded is not None:
            a, b = self._checked(loaded)
        elif self.settings.init == "pissa":
            a, b = self._principal(weight)
        else:
            a, b = self._random(seed)
        factors = (a, b) if self.settings.init == "pissa" else None
        initialized = replace(self, initial_factors=factors)
        arrays = {self.a: a, self.b: b}
        if self.settings.dora:
            arrays[self.magnitude] = initialized._first_magnitude(weight, arrays, loaded)
        return initialized, arrays

    def _random(self, seed: int) -> tuple[Array, Array]:
        """Return first values of A and B. One of the two is zeros.

        They depend on the seed and the name of the weight, not on the other adapters.
        """
        random = np.random.default_rng([seed % 2**64, zlib.crc32(self.weight.name.encode())])
        a, b = (np.zeros(shape, self.dtype) for shape in self.shapes)
        if self.weight.kind == "embedding":  # each row of A is read rarely, so A starts with zeros
            return a, np.asarray(random.normal(size=b.shape), self.dtype)
        if self.settings.init == "gaussian":
            std = 1 / self.settings.rank
            return np.asarray(random.normal(0, std, a.shape), self.dtype), b
        bound = 1 / np.sqrt(self.weight.sides[0])
        return np.asarray(random.uniform(-bound, bound, a.shape), self.dtype), b

    def _principal(self, weight: TensorProto) -> tuple[Array, Array]:
        if self.weight.is_packed:
            raise SettingError(
                "init='pissa' subtracts the adapter's initial product from the weight, but"
                f" {self.weight.name!r} contains integers, which cannot change. Use init='kaiming',"
                f" or exclude the weight with target=[..., '!{self.weight.name}']."
            )
        matrix = self.weight.as_matrix(array_of(weight))
        rank, scale = self.settings.rank, self.settings.scale
        a, b = principal_matrices(matrix, rank, scale, name=self.weight.name)
        if self.weight.kind == "conv":
            a, b = a.T, b.T
        of_a, of_b = self.shapes
        return a.reshape(of_a).astype(self.dtype), b.reshape(of_b).astype(self.dtype)

    def _checked(self, loaded: Matrices) -> tuple[Array, Array]:
        a, b = (np.asarray(array, self.dtype) for array in (loaded.a, loaded.b))
        if self.weight.kind != "conv":
            a, b = a.T, b.T
        if (a.shape, b.shape) != self.shapes:
            raise SettingError(
                f"The loaded adapter of {self.weight.module!r} has matrices of shapes {a.shape}"
                f" and {b.shape}. Expected {self.shapes[0]} and {self.shapes[1]} for weight"
                f" {self.weight.name!r}. The adapter was trained with another model."
            )
        return a, b

    def _first_magnitude(
        self, weight: TensorProto, arrays: Mapping[str, Array], loaded: Matrices | None
    ) -> Array:
        """Return the loaded magnitude, or the weight's norms, which leave the output unchanged."""
        _require_columns(self.weight)
        if loaded is None or loaded.magnitude is None:
            return self._norms(self._sum(array_of(weight), arrays))
        if loaded.magnitude.size != self.weight.sides[1]:
            raise SettingError(
                f"The loaded adapter of {self.weight.module!r} has a magnitude of"
                f" {loaded.magnitude.size} numbers. Expected {self.weight.sides[1]} for weight"
                f" {self.weight.name!r}. The adapter was trained with another model."
            )
        return np.asarray(loaded.magnitude, self.dtype).reshape(-1)

    def saved(self, arrays: Mapping[str, Array], weight: TensorProto) -> Matrices:
        """Return A and B as PEFT stores them, for the weight of the file.

        With PiSSA, A and B add to the residual. PEFT adds to the weight itself, so the product is s
        (A B - A0 B0) with the first values A0 and B0: its rank is 2 r.

        - `arrays`: the trained arrays by name.
        - `weight`: the weight of the file.
        """
        settings = self.settings
        a, b = self._as_peft(arrays[self.a], arrays[self.b])
        alpha = settings.alpha
        if self.initial_factors is not None:
            first_a, first_b = self._as_peft(*self.initial_factors)
            a, b = np.concatenate([a, first_a]), np.concatenate([b, -first_b], axis=1)
            alpha *= 2 if settings.scaling == "alpha/r" else math.sqrt(2)  # the same s
        return Matrices(
            a=a,
            b=b,
            alpha=alpha,
            dropout=settings.dropout,
            scaling=settings.scaling,
            is_embedding=self.weight.kind == "embedding",
            checksums=(checksum_of(array_of(weight)),),
            magnitude=self._saved_magnitude(arrays),
        )

    def _saved_magnitude(self, arrays: Mapping[str, Array]) -> Array | None:
        if not self.settings.dora:
            return None
        magnitude = arrays[self.magnitude]
        if self.weight.kind == "conv":
            return magnitude.reshape(1, -1, *[1] * (len(self.weight.shape) - 2))
        return magnitude

    @property
    def initial_factors_in_peft(self) -> tuple[Array, ...]:
        """The first values of A and B as PEFT stores them; () if the weight is unchanged."""
        return () if self.initial_factors is None else self._as_peft(*self.initial_factors)

    def has_initial_product(self, factors: Sequence[Array]) -> bool:
        """Return whether `initial_factors_in_peft` of another adapter have the same product."""
        if self.initial_factors is None or len(factors) != len(self.initial_factors):
            return False
        a, b = self._as_peft(*factors)  # the conversion is its own inverse
        if (a.shape, b.shape) != self.shapes:
            return False
        product = self._product(*self.initial_factors)
        tolerance = 1e-5 * np.abs(product).max()
        return bool(np.allclose(self._product(a, b), product, rtol=0, atol=tolerance))

    def _as_peft(self, a: Array, b: Array) -> tuple[Array, Array]:
        return (a, b) if self.weight.kind == "conv" else (a.T, b.T)

    @property
    def checksums(self) -> Collection[int]:
        """The checksums of the weight that the loaded matrices were trained with, if known."""
        return () if self._loaded is None else self._loaded.checksums

    def matches_base_weight(self, weight: TensorProto) -> bool:
        """Return whether the loaded matrices were trained with this weight, or an unknown one."""
        return not self.checksums or checksum_of(array_of(weight)) in self.checksums

    def residual(self, weight: Array) -> Array:
        """Return the frozen weight as stored: the file's weight minus s A0 B0."""
        if self.initial_factors is None:
            return weight
        return np.asarray(weight - self._product(*self.initial_factors)).astype(weight.dtype)

    def merged(self, weight: Array, arrays: Mapping[str, Array]) -> Array:
        """Return the merged weight as stored: V = W + s (A B - A0 B0), or V m / |V|."""
        merged = self._sum(weight, arrays)
        if self.settings.dora:
            norms = self._norms(merged)
            factors = np.divide(
                arrays[self.magnitude], norms, out=np.ones_like(norms), where=norms > 0
            )
            merged = self.weight.as_stored(self.weight.as_matrix(merged) * factors)
        return merged.astype(weight.dtype, copy=False)

    def add_merged(self, op: GraphBuilder, weight: Array) -> Value:
        """Write the nodes of `merged` for an adapter of W + s A B; A and B are inputs."""
        a, b = (
            op.input(name, self.dtype, shape) for name, shape in zip((self.a, self.b), self.shapes)
        )
        if self.weight.kind == "conv":
            a, b = (
                op.Transpose(op.Reshape(x, [shape[0], -1]), perm=[1, 0])
                for x, shape in zip((a, b), self.shapes)
            )
        change = op.MatMul(a, b) * op.constant(self.settings.scale, self.dtype)
        if self.weight.kind == "conv" or self.weight.is_flipped:
            change = op.Transpose(change, perm=[1, 0])
        if self.weight.kind == "conv":
            change = op.Reshape(change, list(self.weight.shape))
        return op.cast(op.cast(op.constant(weight), self.dtype) + change, weight.dtype)

    def _sum(self, weight: Array, arrays: Mapping[str, Array]) -> Array:
        """Return W + s (A B - A0 B0), with the `initial_factors` A0 and B0."""
        change = self._product(arrays[self.a], arrays[self.b])
        if self.initial_factors is not None:
            change = change - self._product(*self.initial_factors)
        return np.asarray(weight + change)

    def _norms(self, weight: Array) -> Array:
        """Return the L2 norm of the weights of each output."""
        matrix = self.weight.as_matrix(weight).astype(np.float64)
        return np.asarray(np.linalg.norm(matrix, axis=0), self.dtype)

    def _product(self, a: Array, b: Array) -> Array:
        """Return s A B in the layout of the stored weight."""
        if self.weight.kind == "conv":
            a, b = a.reshape(len(a), -1).T, b.reshape(len(b), -1).T
        product = a @ b
        product *= product.dtype.type(self.settings.scale)
        return self.weight.as_stored(product)


def _require_columns(weight: AdaptableWeight) -> None:
    """Raise SettingError for a weight whose columns DoRA cannot scale."""
    problem = ""
    if weight.is_packed:
        problem = "it contains integers, whose column norms are unknown"
    elif any(reader.flipped != weight.is_flipped for reader in weight.readers):
        problem = (
            "one layer reads it as it is and another reads it transposed, as for tied embeddings"
        )
    if problem:
        raise SettingError(
            f"dora=True cannot scale the columns of the weight {weight.name!r}: {problem}. Exclude"
            f" the weight with target=[..., '!{weight.name}'], or give it its own adapter with"
            " dora=False."
        )


def principal_matrices(weight: Array, rank: int, scale: float, *, name: str) -> tuple[Array, Array]:
    r"""Return $A = U_r \sqrt{S_r / s}$ and $B = \sqrt{S_r / s}\, V_r^T$ of PiSSA, in float64.

    Meng et al. 2024, arXiv:2404.02948: of the singular value decomposition $W = U S V^T$ the
    adapter gets the $r$ largest singular values, $s A B = U_r S_r V_r^T$. The frozen weight is the
    residual $W - s A B$, so the layer first computes what it did before.

    - `weight`: of (inputs, outputs).
    - `rank`: $r$.
    - `scale`: $s$.
    - `name`: the name of the weight, for the error.

    ModelError: the weight contains NaN or infinity.
    """
    matrix = np.asarray(weight, np.float64)
    if not np.isfinite(matrix).all():
        raise ModelError(
            f"The weight {name!r} contains NaN or infinity, so init='pissa' cannot decompose it."
            " Repair the weight, or exclude it from the adapters' target."
        )
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    roots = np.sqrt(values[:rank] / scale)
    return left[:, :rank] * roots, roots[:, None] * right[:rank]
