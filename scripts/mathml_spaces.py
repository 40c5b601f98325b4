"""Put TeX's spaces into the MathML that latex2mathml writes."""

from __future__ import annotations

import re

FUNCTION = "<mi>(?:log|exp|cos|cosh|sin|sinh|tan|tanh)</mi>"
FACTOR_END = "</m(?:i|n|row|sub|sup|subsup|frac)>"
BAR = "&#x0(?:007C|2016|2225);"
SPACE = '<mspace width="0.167em" />'


def spaced(formula: str) -> str:
    """Return a formula in MathML with thin spaces around functions, and none around bars.

    latex2mathml writes no space between a function and its argument. Browsers take a bar for an
    operator between two values, and put wide spaces around it.
    """
    formula = re.sub(rf"<mo(?=[^>]*>{BAR})", '<mo lspace="0" rspace="0"', formula)
    formula = re.sub(rf"({FUNCTION})(?=<m(?!o|space))", rf"\1{SPACE}", formula)
    return re.sub(rf"({FACTOR_END})(?={FUNCTION})", rf"\1{SPACE}", formula)
