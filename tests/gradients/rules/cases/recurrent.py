"""RNN, GRU and LSTM.

onnx.reference knows a part of these operators only, and onnxruntime no float64, so
`tests/gradients/rules/test_recurrent.py` has the judge of all `CONFIGURATIONS`, in float64; `CASES`
are a few of them, in float32.
"""

from __future__ import annotations

from tests.gradients.rules.cases import Case

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STATES = {"RNN": 1, "GRU": 1, "LSTM": 2}
ACTIVATIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
T, N, INPUT, H = 3, 2, 2, 2


def recurrent(
    name: str, op: str, given: str = "b h c", made: str = "y", lengths: str = "", d: int = 1, frozen: tuple[str, ...] = (), time: int = T,
    **attributes: object,
) -> Case:  # fmt: skip
    """A case of one node.

    `given` are its optional inputs, `made` its outputs in use: the first is y, the sum of the
    others z.
    """
    gates, first = GATES[op], bool(attributes.get("layout"))
    state = f"[{N},{d},{H}]" if first else f"[{d},{N},{H}]"
    shapes = {
        "x": f"[{N},{time},{INPUT}]" if first else f"[{time},{N},{INPUT}]", "w": f"[{d},{gates * H},{INPUT}]", "r": f"[{d},{gates * H},{H}]",
        "b": f"[{d},{2 * gates * H}]", "h": state, "c": state, "p": f"[{d},{3 * H}]",
    }  # fmt: skip
    slots = ["x", "w", "r", "b", "l", "h", *(["c", "p"] if op == "LSTM" else [])]
    present = {"x", "w", "r", *given.split(), *(["l"] if lengths else [])} & set(slots)
    text = ", ".join(s if s in present else "" for s in slots).rstrip(", ")
    if d == 2:
        attributes["direction"] = "bidirectional"
    settings = ", ".join(
        f"{k}={_literal(v)}" for k, v in {"hidden_size": H, **attributes}.items() if v is not None
    )
    outputs = ["y", "h", "c"][: 1 + STATES[op]]
    used = made.split()
    names = [("y" if used[0] == o else f"out_{o}") if o in used else '""' for o in outputs]
    while names[-1] == '""':
        names.pop()
    rest = [f"out_{o}" for o in used[1:]]
    after = "" if not rest else f" z = Sum({', '.join(rest)})"
    return Case(
        f"{op} {name}", ", ".join(f"float{shapes[s]} {s}" for s in slots if s in present and s != "l"),
        f"{', '.join(names)} = {op}<{settings}>({text}){after}",
        constants=f"int32[{N}] l = {{{lengths}}}" if lengths else "", frozen=frozen, single=True, low=-1.0, high=1.0,
    )  # fmt: skip


def _literal(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _of(op: str) -> list[Case]:
    every = "y h c" if op == "LSTM" else "y h"
    cases = [
        recurrent(f"{way}, {what}", op, given, d=1 + (way == "bidirectional"), direction=way)
        for way in ("forward", "reverse", "bidirectional")
        for what, given in (("weights only", ""), ("everything given", "b h c"))
    ]
    cases += [
        recurrent("last state", op, made="h"),
        recurrent("last state bidirectional", op, made="h", d=2),
        recurrent("every output", op, made=every),
        recurrent("every output reverse", op, made=every, direction="reverse"),
        recurrent("one step", op, made=every, time=1),
        recurrent("bias alone", op, "b"),
        recurrent("first state alone", op, "h"),
        recurrent("frozen weights", op, frozen=("w", "r", "b")),
        recurrent("frozen input", op, frozen=("x", "h", "c")),
        recurrent("clip", op, clip=0.5, made=every),
    ]
    cases += [
        recurrent(
            f"lengths {way}, {made}",
            op,
            made=made,
            lengths="2, 3",
            d=1 + (way == "bidirectional"),
            direction=way,
        )
        for way in ("forward", "reverse", "bidirectional")
        for made in ("y", "h", every)
    ]
    cases += [
        recurrent("lengths, weights only", op, "", made=every, lengths="1, 2"),
        recurrent(
            "lengths clip reverse", op, made=every, lengths="1, 2", clip=0.5, direction="reverse"
        ),
    ]
    count = len(ACTIVATIONS[op])
    plain = ["Relu", "Tanh", "Sigmoid", "Softsign", "Softplus"]
    for name in plain if op == "RNN" else [*plain, "LeakyRelu", "HardSigmoid", "Elu"]:
        cases.append(recurrent(f"activations {name}", op, made=every, activations=[name] * count))
    pairs = {
        "Affine": (0.6, 0.2),
        "LeakyRelu": (0.3, None),
        "ThresholdedRelu": (0.2, None),
        "ScaledTanh": (0.8, 1.3),
        "HardSigmoid": (0.3, 0.4),
        "Elu": (0.7, None),
    }
    for name, (alpha, beta) in pairs.items():
        betas = None if beta is None else [beta + 0.1 * k for k in range(count)]
        cases.append(
            recurrent(f"activations {name} alpha beta", op, made=every, activations=[name] * count,
                      activation_alpha=[alpha + 0.1 * k for k in range(count)], activation_beta=betas)
        )  # fmt: skip
    mixed = (
        ["LeakyRelu", "Elu"]
        if op == "RNN"
        else ["LeakyRelu", "HardSigmoid", "Tanh", "Sigmoid", "Elu", "ScaledTanh"][: 2 * count]
    )
    cases.append(
        recurrent(
            "activations of two directions",
            op,
            made=every,
            d=2,
            activations=mixed,
            activation_alpha=[0.1, 0.3, 0.7, 1.1],
            activation_beta=[0.4, 1.2],
        )
    )
    cases += [
        recurrent(f"batch first, {what}", op, made=every, layout=1, **more)
        for what, more in (
            ("forward", {}),
            ("bidirectional", {"d": 2}),
            ("lengths reverse", {"lengths": "2, 1", "direction": "reverse"}),
        )
    ]
    return cases


CONFIGURATIONS = [
    *_of("RNN"),
    *_of("GRU"),
    *_of("LSTM"),
    *(recurrent(f"reset after, {what}", "GRU", given, made="y h", linear_before_reset=1, **more)
      for what, given, more in (
          ("weights only", "", {}), ("forward", "b h", {}), ("reverse", "b h", {"direction": "reverse"}), ("bidirectional", "b h", {"d": 2}),
          ("lengths", "b h", {"lengths": "2, 3"}), ("lengths bidirectional", "b h", {"lengths": "2, 1", "d": 2}), ("clip", "b h", {"clip": 0.5}),
          ("frozen input", "b h", {"frozen": ("x",)}), ("activations", "b h", {"activations": ["Relu", "Elu"]}))),
    recurrent("cell state", "LSTM", made="c"),
    recurrent("cell state and output", "LSTM", made="y c"),
    recurrent("cell state and lengths, reverse", "LSTM", made="c", lengths="1, 2", direction="reverse"),
    recurrent("first cell state alone", "LSTM", "c"),
    *(recurrent(f"peepholes, {what}", "LSTM", given, made="y h c", **more)
      for what, given, more in (
          ("alone", "p", {}), ("forward", "b h c p", {}), ("reverse", "b h c p", {"direction": "reverse"}), ("bidirectional", "b h c p", {"d": 2}),
          ("lengths", "b h c p", {"lengths": "2, 3"}), ("lengths reverse", "b h c p", {"lengths": "2, 1", "direction": "reverse"}),
          ("clip", "b h c p", {"clip": 0.5}), ("coupled", "b h c p", {"input_forget": 1}), ("frozen", "b h c p", {"frozen": ("p",)}),
          ("activations", "b h c p", {"activations": ["Softsign", "Relu", "Elu"]}))),
    recurrent("coupled", "LSTM", made="y h c", input_forget=1),
    recurrent("coupled lengths bidirectional", "LSTM", made="y h c", input_forget=1, lengths="2, 3", d=2),
]  # fmt: skip

CASES = [
    case
    for case in CONFIGURATIONS
    if case.name.split(" ", 1)[1] in (
        "forward, everything given", "bidirectional, weights only", "last state", "every output reverse", "lengths bidirectional, y", "frozen input",
        "reset after, lengths", "peepholes, forward",
    )
]  # fmt: skip
