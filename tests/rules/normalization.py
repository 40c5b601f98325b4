"""Normalisations."""
# ruff: noqa: E501  # a case is a row of a table

from tests.rules import Case

CASES = [
    Case("LayerNormalization", "float[3,5] a, float[5] s, float[5] b", "y = LayerNormalization(a, s, b)"),
    Case("LayerNormalization no bias", "float[2,3,4] a, float[4] s", "y = LayerNormalization<epsilon=0.1>(a, s)"),
    Case("LayerNormalization axis 1", "float[2,3,4] a, float[3,4] s, float[3,4] b", "y = LayerNormalization<axis=1>(a, s, b)"),
    Case("LayerNormalization axis -2", "float[2,3,4] a, float[3,4] s", "y = LayerNormalization<axis=-2>(a, s)"),
    Case("LayerNormalization axis 0", "float[3,4] a, float[3,4] s, float[3,4] b", "y = LayerNormalization<axis=0>(a, s, b)"),
    Case("LayerNormalization frozen data", "float[3,5] a, float[5] s, float[5] b", "y = LayerNormalization(a, s, b)", frozen=("a",)),
    Case("LayerNormalization same twice", "float[2,4] a, float[4] s", "y = LayerNormalization(a, s, s)"),
    Case("LayerNormalization batch of sequences", "float[2,3,4] a, float[4] s, float[4] b", "y = LayerNormalization(a, s, b)"),
    Case("InstanceNormalization", "float[2,3,2,3] a, float[3] s, float[3] b", "y = InstanceNormalization(a, s, b)"),
    Case("InstanceNormalization 1-D", "float[2,3,4] a, float[3] s, float[3] b", "y = InstanceNormalization<epsilon=0.1>(a, s, b)"),
    Case("InstanceNormalization 3-D", "float[1,2,2,2,2] a, float[2] s, float[2] b", "y = InstanceNormalization(a, s, b)"),
    Case("GroupNormalization", "float[2,4,3] a, float[4] s, float[4] b", "y = GroupNormalization<num_groups=2>(a, s, b)"),
    Case("GroupNormalization one group, 2-D", "float[2,3,2,2] a, float[3] s, float[3] b", "y = GroupNormalization<num_groups=1, epsilon=0.1>(a, s, b)"),
    Case("GroupNormalization a group a channel", "float[2,3,4] a, float[3] s, float[3] b", "y = GroupNormalization<num_groups=3>(a, s, b)"),
    Case("BatchNormalization", "float[2,3,4] a, float[3] s, float[3] b, float[3] m, float[3] v", "y = BatchNormalization(a, s, b, m, v)", low=0.3),
    Case("BatchNormalization rank 2", "float[4,3] a, float[3] s, float[3] b, float[3] m, float[3] v", "y = BatchNormalization<epsilon=0.1>(a, s, b, m, v)", low=0.3),
    Case("BatchNormalization images, statistics frozen", "float[2,3,2,2] a, float[3] s, float[3] b", "y = BatchNormalization(a, s, b, m, v)",
         "float[3] m = {0.1, -0.2, 0.3}, float[3] v = {0.5, 1, 2}"),
    Case("BatchNormalization training", "float[3,2,4] a, float[2] s, float[2] b", "y, r, q = BatchNormalization<training_mode=1, epsilon=0.01>(a, s, b, m, v)",
         "float[2] m = {0.1, -0.2}, float[2] v = {0.5, 1}"),
    Case("BatchNormalization training, running mean used", "float[3,2,4] a, float[2] s, float[2] b",
         "y, z, q = BatchNormalization<training_mode=1, momentum=0.3>(a, s, b, m, v)", "float[2] m = {0.1, -0.2}, float[2] v = {0.5, 1}"),
    Case("MeanVarianceNormalization", "float[2,3,2,2] a", "y = MeanVarianceNormalization(a)"),
    Case("MeanVarianceNormalization axes", "float[2,3,4] a", "y = MeanVarianceNormalization<axes=[-1]>(a)"),
    Case("SkipLayerNormalization", "float[2,3,4] a, float[2,3,4] k, float[4] s, float[4] b", "y = com.microsoft.SkipLayerNormalization<epsilon=0.01>(a, k, s, b)",
         domains=("com.microsoft",)),
    Case("SkipLayerNormalization bias and sum", "float[2,3,4] a, float[2,3,4] k, float[4] s, float[4] b, float[4] c",
         "y, m, i, z = com.microsoft.SkipLayerNormalization<epsilon=0.01>(a, k, s, b, c)", domains=("com.microsoft",)),
    Case("SkipSimplifiedLayerNormalization", "float[2,3,4] a, float[2,3,4] k, float[4] s", "y = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.01>(a, k, s)",
         domains=("com.microsoft",)),
    Case("SimplifiedLayerNormalization", "float[2,3,4] a, float[4] s", "y = SimplifiedLayerNormalization<axis=-1, epsilon=0.01, stash_type=1>(a, s)"),
]  # fmt: skip
