"""DFT and STFT."""

from __future__ import annotations

from tests.gradients.rules.cases import Case

_KINDS = {"real": 1, "complex": 2}

_DFT = [
    *(
        Case(f"DFT {kind} {attributes}".strip(), f"float[2,5,{parts}] x", f"y = DFT{f'<{attributes}>' if attributes else ''}(x)")
        for kind, parts in _KINDS.items()
        for attributes in ("", "inverse=1")
    ),
    *(
        Case(
            f"DFT {kind} {attributes} length {length}".replace("  ", " "),
            f"float[2,5,{parts}] x",
            f"y = DFT{f'<{attributes}>' if attributes else ''}(x, n)",
            f"int64 n = {{{length}}}",
        )
        for kind, parts in _KINDS.items()
        for attributes in ("", "inverse=1")
        for length in (3, 8)
    ),
    *(
        Case(f"DFT axis {axis}", "float[2,3,4,2] x", "y = DFT(x, , a)", f"int64 a = {{{axis}}}")
        for axis in (0, 1, -2, -4)
    ),
    *(
        Case(f"DFT onesided of {size}", f"float[2,{size},1] x", "y = DFT<onesided=1>(x)")
        for size in (1, 4, 5)
    ),
    *(
        Case(f"DFT onesided length {length}", "float[2,5,1] x", "y = DFT<onesided=1>(x, n)", f"int64 n = {{{length}}}")
        for length in (3, 8)
    ),
    Case("DFT onesided axis and length", "float[5,2,1] x", "y = DFT<onesided=1>(x, n, a)", "int32 n = {6}, int64 a = {0}"),
    Case("DFT of opset 17", "float[2,5,1] x", "y = DFT<axis=1, onesided=1>(x)", opset=17),
    Case("DFT there and back", "float[2,5,1] x", "f = DFT(x) g = Mul(f, f) y = DFT<inverse=1>(g)"),
]  # fmt: skip

# Complex signals are in tests/gradients/rules/test_signal.py: onnxruntime's STFT reads beyond their
# end. Without the attribute ONNX's inference takes onesided for 0, against its default of 1.
_STFT = [
    *(
        Case(
            f"STFT onesided={onesided} {name}",
            "float[2,9,1] x" + (", float[4] w" if "w" in arguments else ""),
            f"y = STFT<onesided={onesided}>(x, step, {', '.join(arguments)})",
            "int64 step = {2}" + (", int64 n = {4}" if "n" in arguments else ""),
        )
        for onesided in (0, 1)
        for name, arguments in (
            ("window", ["w"]),
            ("window and length", ["w", "n"]),
            ("length", ["", "n"]),
        )
    ),
    Case(
        "STFT step beyond the frame",
        "float[1,8,1] x, float[3] w",
        "y = STFT<onesided=1>(x, step, w)",
        "int32 step = {5}",
    ),
    Case(
        "STFT frozen window",
        "float[2,6,1] x",
        "y = STFT<onesided=1>(x, step, w)",
        "int64 step = {1}, float[4] w = {0.5, 1.0, 1.0, 0.5}",
    ),
]

CASES = [*_DFT, *_STFT]
