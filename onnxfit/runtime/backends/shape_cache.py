"""A cache of graphs compiled for the shapes of batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from onnxfit.errors import ModelError
from onnxfit.graph.garbage import gc_disabled
from onnxfit.graph.spec import TensorSpec

Specs = Mapping[str, TensorSpec]
T = TypeVar("T")
# A graph for exact shapes is faster, but costs memory and compile time. Batches of a fifth shape
# get the graph for any size.
MAX_EXACT_SHAPES = 4
# The same, if no graph for any size can be built.
MAX_EXACT_SHAPES_WITHOUT_ANY_SIZE = 16
MAX_SIGNATURES = 1024  # signatures of batches whose graph is looked up without their specs


class ShapeCache(Generic[T]):
    """Cache of objects compiled for batches. Each is compiled once.

    Each of the first `MAX_EXACT_SHAPES` shapes gets its own object. The other shapes share one
    object for any size. If that cannot be built, because some operators need known sizes for their
    gradient, every shape gets its own object, and the oldest one is dropped.

    - `only_any_size`: use the object for any size from the first shape on, for graphs that gain
      little from known sizes.
    - `only_exact`: every shape gets its own object.

    `exact` maps the signature of a batch to its object; `any_size` maps specs without sizes to
    theirs; None if it cannot be built. `get(signature)` returns the object of a signature, or None
    if `compile` has not been called for it.
    """

    def __init__(self, *, only_any_size: bool = False, only_exact: bool = False) -> None:
        self.only_any_size = only_any_size
        self.only_exact = only_exact
        self.exact: OrderedDict[Hashable, T] = OrderedDict()
        self.any_size: dict[tuple[TensorSpec, ...], T | None] = {}
        self._by_signature: dict[Hashable, T] = {}
        # The dict's own method, without a call in between: it runs once per batch.
        self.get: Callable[[Hashable], T | None] = self._by_signature.get

    def compile(
        self,
        signature: Hashable,
        shapes: Specs,
        without_sizes: Callable[[], Specs],
        compile_for: Callable[[Specs], T],
    ) -> T:
        """Return the object for a batch; compile it unless an object for any size exists.

        - `signature`: equal for two batches of the same names, types and shapes.
        - `shapes`: a mapping from input to its spec, with every size a number.
        - `without_sizes`: a function that returns the same specs without sizes.
        - `compile_for`: the function that compiles the object for some specs. A ModelError for
          specs without sizes leads to objects for exact shapes.
        """
        compiled: T | None = None
        any_size = self.only_any_size or len(self.exact) >= MAX_EXACT_SHAPES
        if any_size and not self.only_exact:
            compiled = self._compile_for_any_size(without_sizes(), compile_for)
        if compiled is None:
            with gc_disabled():
                compiled = compile_for(shapes)
            self.exact[signature] = compiled
            if len(self.exact) > MAX_EXACT_SHAPES_WITHOUT_ANY_SIZE:
                oldest, _ = self.exact.popitem(last=False)
                self._by_signature.pop(oldest, None)
        if len(self._by_signature) >= MAX_SIGNATURES:
            self._restore(self.exact)
        self._by_signature[signature] = compiled
        return compiled

    def _compile_for_any_size(self, specs: Specs, compile_for: Callable[[Specs], T]) -> T | None:
        key = tuple(specs.values())
        if key not in self.any_size:
            try:
                with gc_disabled():
                    self.any_size[key] = compile_for(specs)
            except ModelError:
                self.any_size[key] = None
        return self.any_size[key]

    def clear(self) -> None:
        """Drop all objects; they are compiled again when they are needed."""
        self.exact.clear()
        self.any_size.clear()
        self._by_signature.clear()

    def _restore(self, by_signature: Mapping[Hashable, T]) -> None:
        # Changed in place, because `get` is a method of this dict.
        by_signature = dict(by_signature)
        self._by_signature.clear()
        self._by_signature.update(by_signature)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Discard objects compiled inside this block."""
        exact = self.exact.copy()
        any_size = self.any_size.copy()
        by_signature = self._by_signature.copy()
        try:
            yield
        finally:
            self.exact = exact
            self.any_size = any_size
            self._restore(by_signature)


@contextmanager
def trial_shapes(caches: Iterable[ShapeCache[Any]]) -> Iterator[None]:
    """Discard graphs compiled for batches inside this block, so that trial batch shapes do not fill
    the caches.
    """
    with ExitStack() as stack:
        for cache in caches:
            stack.enter_context(cache.discarding())
        yield


def without_sizes(spec: TensorSpec, declared: TensorSpec | None) -> TensorSpec:
    """Return the spec of one batch's tensor without its sizes.

    The shape is the one that the model declares (`declared`), else a name for the batch dimension
    and unknown sizes after it.
    """
    if declared is not None and declared.shape is not None:
        return TensorSpec(spec.name, spec.dtype, declared.shape)
    shape = spec.shape or ()
    return TensorSpec(spec.name, spec.dtype, ("batch", *[None] * len(shape))[: len(shape)])
