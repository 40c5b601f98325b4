"""Convolutions."""

# a case is a row of a table

from tests.gradients.rules.cases import Case

X1, X2, X3 = "float[2,2,7] a", "float[1,2,5,6] a", "float[1,2,3,4,3] a"
W1, W2, W3 = "float[3,2,3] b", "float[2,2,3,2] b", "float[2,2,2,2,2] b"

WAYS = [
    "", "<pads=[1,1,1,1]>", "<strides=[2,2]>", "<pads=[1,0,2,1], strides=[2,1]>", "<dilations=[2,2]>", "<dilations=[2,1], strides=[1,3], pads=[2,1,0,1]>",
    "<pads=[4,0,3,2]>", "<strides=[3,4], pads=[0,1,0,0]>", '<auto_pad="SAME_UPPER">', '<auto_pad="SAME_LOWER">', '<auto_pad="SAME_UPPER", strides=[2,2]>',
    '<auto_pad="SAME_LOWER", strides=[2,3]>', '<auto_pad="VALID", strides=[2,1]>', "<kernel_shape=[3,2]>",
]  # fmt: skip

CASES = [
    *(Case(f"Conv {way}".strip(), f"{X2}, {W2}", f"y = Conv{way}(a, b)") for way in WAYS),
    Case("Conv bias", f"{X2}, {W2}, float[2] c", "y = Conv<pads=[1,1,1,1]>(a, b, c)"),
    Case("Conv weight only", "float[3,2,3,3] b, float[3] c", "y = Conv<pads=[1,1,1,1]>(x, b, c)", "float[1,2,2,2] x = {1,2,3,4,5,6,7,8}"),
    Case("Conv frozen weight", X2, "y = Conv<pads=[1,1,1,1]>(a, b)", "float[1,2,2,2] b = {1,-2,3,-4,2,-1,3,1}"),
    Case("Conv point", "float[2,3,2,3] a, float[2,3,1,1] b", "y = Conv(a, b)"),
    Case("Conv point strided", "float[1,2,5,4] a, float[3,2,1,1] b, float[3] c", "y = Conv<strides=[2,2]>(a, b, c)"),
    Case("Conv patches", "float[2,1,4,4] a, float[2,1,2,2] b", "y = Conv<strides=[2,2]>(a, b)"),
    Case("Conv many filters", "float[2,1,4,4] a, float[5,1,2,2] b", "y = Conv<pads=[1,1,1,1]>(a, b)"),
    Case("Conv many taps", "float[1,2,7,6] a, float[1,2,6,5] b", "y = Conv<pads=[1,2,0,1], strides=[2,1]>(a, b)"),
    Case("Conv many taps, grouped", "float[2,2,6,5] a, float[2,1,6,5] b", "y = Conv<group=2, pads=[1,0,1,0], strides=[2,2]>(a, b)"),
    Case("Conv groups", "float[2,4,3,3] a, float[6,2,2,2] b", "y = Conv<group=2>(a, b)"),
    Case("Conv groups padded", "float[1,4,3,4] a, float[4,2,2,2] b, float[4] c", "y = Conv<group=2, pads=[1,0,1,1]>(a, b, c)"),
    Case("Conv groups strided", "float[1,4,4,4] a, float[2,2,3,2] b", "y = Conv<group=2, strides=[2,2], pads=[1,1,1,1]>(a, b)", single=True),
    Case("Conv depthwise", "float[2,3,3,3] a, float[3,1,2,2] b, float[3] c", "y = Conv<group=3, pads=[1,1,1,1]>(a, b, c)"),
    Case("Conv depthwise strided", "float[1,3,5,4] a, float[3,1,3,3] b", "y = Conv<group=3, strides=[2,2], pads=[1,1,1,1]>(a, b)"),
    Case("Conv depthwise same", "float[1,2,5,4] a, float[2,1,3,3] b", 'y = Conv<group=2, strides=[2,2], auto_pad="SAME_UPPER">(a, b)'),
    Case("Conv depthwise columns", "float[1,2,9,8] a, float[2,1,3,2] b", "y = Conv<group=2, pads=[1,0,1,1]>(a, b)", shapes=("static", "batch")),
    Case("Conv depthwise columns, two filters each", "float[1,2,9,9] a, float[4,1,2,2] b", "y = Conv<group=2>(a, b)", shapes=("static",)),
    Case("Conv depthwise sums", "float[1,2,1,66] a, float[2,1,1,3] b", "y = Conv<group=2, pads=[0,1,0,1]>(a, b)", shapes=("static",)),
    Case("Conv depthwise, two filters each", "float[1,2,3,4] a, float[4,1,2,2] b", "y = Conv<group=2>(a, b)"),
    Case("Conv 1-D", f"{X1}, {W1}, float[3] c", "y = Conv<strides=[2]>(a, b, c)"),
    Case("Conv 1-D same", "float[2,2,7] a, float[3,2,4] b", 'y = Conv<auto_pad="SAME_UPPER">(a, b)'),
    Case("Conv 1-D dilated causal", f"{X1}, {W1}", "y = Conv<dilations=[2], pads=[4,0]>(a, b)"),
    Case("Conv 1-D groups", "float[2,4,5] a, float[2,2,3] b", "y = Conv<group=2, pads=[1,1]>(a, b)"),
    # Strides above the kernel: onnxruntime leaves out elements at both ends, others than the reference does.
    *(
        Case(f"Conv same, stride {stride}, size {size}, {pad}, kernel {k}", f"float[2,2,{size}] a, float[3,2,{k}] b", f'y = Conv<strides=[{stride}], auto_pad="SAME_{pad}">(a, b)', single=True)
        for pad in ("UPPER", "LOWER")
        for stride, size, k in ((2, 4, 1), (3, 3, 1), (4, 4, 1), (4, 7, 1), (5, 5, 1), (5, 5, 2), (6, 6, 2))
    ),
    *(
        Case(f"Conv same, cropped {pad}{group}", f"float[2,2,5,4] a, float[2,{channels},2,1] b", f'y = Conv<strides=[5,2], auto_pad="SAME_{pad}"{group}>(a, b)', single=True)
        for pad in ("UPPER", "LOWER")
        for group, channels in (("", 2), (", group=2", 1))
    ),
    Case("Conv same, one axis padded, one cropped", "float[1,2,6,5] a, float[2,2,3,2] b", 'y = Conv<strides=[2,5], auto_pad="SAME_UPPER">(a, b)', single=True),
    Case("Conv 3-D", f"{X3}, {W3}", "y = Conv(a, b)"),
    Case("Conv 3-D strided", f"{X3}, {W3}, float[2] c", "y = Conv<strides=[2,1,2], pads=[1,0,0,1,1,0], dilations=[1,2,1]>(a, b, c)"),
    Case("Conv 3-D same", f"{X3}, {W3}", 'y = Conv<auto_pad="SAME_LOWER", strides=[2,2,2]>(a, b)'),
    Case("Conv 3-D depthwise", "float[1,2,3,3,2] a, float[2,1,2,2,2] b", "y = Conv<group=2>(a, b)"),
    Case("Conv few stops", "float[2,2,3,3] a, float[5,2,2,2] b", "y = Conv(a, b)"),
    Case("Conv few stops, grouped", "float[2,4,2,2] a, float[8,2,2,2] b", "y = Conv<group=2, pads=[0,0,1,0]>(a, b)"),
    Case("Conv wide", "float[2,16,2,3] a, float[16,16,1,2] b", "y = Conv(a, b)", single=True),
    Case("Conv both from one", "float[2,2,3,3] a", "y = Conv<pads=[1,1,1,1]>(a, a)"),
]  # fmt: skip

U1, U2, U3 = "float[2,2,4] a", "float[1,2,3,3] a", "float[1,2,2,2,2] a"
V1, V2, V3 = "float[2,3,3] b", "float[2,2,3,2] b", "float[2,1,2,2,2] b"

BACK = [
    "", "<strides=[2,2]>", "<pads=[1,0,1,1]>", "<strides=[2,3], pads=[1,0,0,1]>", "<strides=[2,2], output_padding=[1,0]>", "<strides=[3,3], output_padding=[2,1]>",
    "<dilations=[2,2]>", "<dilations=[2,1], strides=[2,2], pads=[1,1,1,0], output_padding=[1,1]>", '<strides=[2,2], auto_pad="SAME_UPPER">',
    '<strides=[2,2], auto_pad="SAME_LOWER">', '<strides=[2,2], auto_pad="VALID">', "<kernel_shape=[3,2], strides=[2,1]>",
]  # fmt: skip

CASES += [
    *(Case(f"ConvTranspose {way}".strip(), f"{U2}, {V2}", f"y = ConvTranspose{way}(a, b)") for way in BACK),
    Case("ConvTranspose bias", f"{U2}, {V2}, float[2] c", "y = ConvTranspose<strides=[2,2]>(a, b, c)"),
    Case("ConvTranspose groups", "float[1,4,2,3] a, float[4,2,2,2] b, float[4] c", "y = ConvTranspose<group=2, strides=[2,2], output_padding=[1,0]>(a, b, c)", single=True),
    Case("ConvTranspose depthwise", "float[1,3,2,3] a, float[3,1,2,2] b", "y = ConvTranspose<group=3, strides=[2,1]>(a, b)"),
    Case("ConvTranspose many taps", "float[1,2,2,2] a, float[2,1,6,5] b", "y = ConvTranspose<strides=[2,2], pads=[1,1,2,2]>(a, b)"),
    Case("ConvTranspose 1-D", f"{U1}, {V1}, float[3] c", "y = ConvTranspose<strides=[2], pads=[1,0]>(a, b, c)"),
    Case("ConvTranspose 1-D same", f"{U1}, {V1}", 'y = ConvTranspose<strides=[2], auto_pad="SAME_LOWER">(a, b)'),
    Case("ConvTranspose 3-D", f"{U3}, {V3}, float[1] c", "y = ConvTranspose<strides=[2,1,2], pads=[1,0,0,0,1,0], output_padding=[1,0,1]>(a, b, c)"),
    *(
        Case(f"ConvTranspose {shape}", f"{U2}, {V2}", f"y = ConvTranspose<strides=[2,2], {shape}>(a, b)", single=True)
        for shape in ("output_shape=[6,5]", 'output_shape=[6,5], auto_pad="SAME_UPPER"', "output_shape=[8,7]", "output_shape=[6,6], output_padding=[1,1]")
    ),
]  # fmt: skip

FUSED = ["", ', activation="Relu"', ', activation="Tanh"', ', activation="Sigmoid"', ', activation="LeakyRelu", activation_params=[0.3]',
         ', activation="Clip", activation_params=[-0.5, 2.0]', ', activation="HardSigmoid", activation_params=[0.1, 0.4]']  # fmt: skip

CASES += [
    *(
        Case(f"FusedConv{activation}", "float[1,2,3,4] a, float[2,2,2,2] b, float[2] c", f"y = com.microsoft.FusedConv<pads=[1,0,0,1]{activation}>(a, b, c)",
             domains=("com.microsoft",))
        for activation in FUSED
    ),
    Case("FusedConv residual", "float[1,2,3,4] a, float[2,2,2,2] b, float[2] c, float[1,2,2,3] d", 'y = com.microsoft.FusedConv<activation="Relu">(a, b, c, d)', domains=("com.microsoft",)),
    Case("FusedConv groups, no bias", "float[1,2,3,4] a, float[2,1,2,2] b", 'y = com.microsoft.FusedConv<activation="Tanh", group=2, auto_pad="SAME_UPPER">(a, b)', domains=("com.microsoft",)),
]  # fmt: skip
