"""Train the integers of a model, through a model of floats.

- `parameters`: the map between floats and integers, and the limits of integer types.
- `operators`: the operators of quantized models, and the constants that they read.

`quantized_model` makes the model of floats that is trained, with the choices in `settings`.
`qoperators` first turns operators of integers to operators of floats between QuantizeLinear and
DequantizeLinear: `conversion` has the registry of conversions, `qlinear_conversions` and
`dynamic_conversions` have one for each operator. `integer_weights` finds the weights,
`integer_weight` is one of them, `packed_weights` unpacks those of MatMulNBits, and `float_model`
has the floats from which they were made. `quantizers` finds the scales and zero points that
training changes: `learning` trains them, `observing` lets them follow the batches, and `biases`
follow both.
"""
